"""Measures each connection between two ranks: latency, bandwidth and the difference of their clocks.

In a round each rank is in at most one pair, so that measurements do not disturb each other. Up to MOST_PAIRED ranks
every pair is measured alone; with more ranks, each rank with its neighbours, in two or three rounds.
"""

import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.parallel.collectives import communication_device, gather

MOST_PAIRED = 16
"""Maximum number of ranks for which all pairs are measured."""
WARM_UP, ROUND_TRIPS, TRANSFERS = 2, 12, 3
BYTES = {"gloo": 4 << 20, "nccl": 64 << 20}
"""Size of a message for the bandwidth."""


class Link(NamedTuple):
    """A connection between two ranks; times in seconds, the best of several."""

    first: int
    second: int
    latency: float
    """Half the time of a round trip."""
    bandwidth: float
    """Bytes per second."""
    clock: float
    """Seconds that the clock of `second` is ahead of that of `first`, to within the latency."""


def rounds_of(world_size: int) -> list[list[tuple[int, int]]]:
    """Return the pairs to measure, in rounds; the pairs of a round are measured at the same time."""
    if world_size <= MOST_PAIRED:
        return [[(a, b)] for a in range(world_size) for b in range(a + 1, world_size)]
    ring = [(rank, (rank + 1) % world_size) for rank in range(world_size)]
    last = [ring.pop()] if world_size % 2 else []  # its ranks are in both other rounds
    return [pairs for pairs in (ring[0::2], ring[1::2], last) if pairs]


def measure_links() -> list[Link]:
    """Return the links of the group. Called by all ranks together."""
    rank, own = dist.get_rank(), []
    for pairs in rounds_of(dist.get_world_size()):
        dist.barrier()
        for first, second in pairs:
            if rank == first:
                own.append(_measure(first, second))
            elif rank == second:
                _answer(first)
    return sorted(link for links in gather(own) for link in links)


def _buffers() -> tuple[Tensor, Tensor]:
    device = communication_device()
    large = torch.zeros(BYTES[dist.get_backend()], dtype=torch.uint8, device=device)
    return torch.zeros(1, dtype=torch.float64, device=device), large


def _measure(first: int, second: int) -> Link:
    """Send to `second`, which sends back: small messages with its clock, then large ones."""
    small, large = _buffers()
    trips = []
    for _ in range(WARM_UP + ROUND_TRIPS):
        begin, sent_at = time.perf_counter(), time.time()
        dist.send(small, second)
        dist.recv(small, second)
        its_clock = small.item()  # waits for a GPU
        trip = time.perf_counter() - begin
        trips.append((trip, its_clock - sent_at - trip / 2))
    fastest, clock = min(trips[WARM_UP:])
    times = []
    for _ in range(1 + TRANSFERS):
        begin = time.perf_counter()
        dist.send(large, second)
        dist.recv(large, second)
        _ = large[-1].item()
        times.append(time.perf_counter() - begin)
    return Link(first, second, fastest / 2, 2 * large.nbytes / min(times[1:]), clock)


def _answer(first: int) -> None:
    small, large = _buffers()
    for _ in range(WARM_UP + ROUND_TRIPS):
        dist.recv(small, first)
        _ = small.item()  # it has arrived, also on a GPU
        small.fill_(time.time())
        dist.send(small, first)
    for _ in range(1 + TRANSFERS):
        dist.recv(large, first)
        dist.send(large, first)
