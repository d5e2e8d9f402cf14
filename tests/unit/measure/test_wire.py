"""The log of collectives, and the emulated network."""

import time

import pytest
import torch
import torch.distributed as dist

from cs336_systems.measure.wire import Wire
from cs336_systems.parallel import collectives


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_an_emulated_network_takes_its_time_and_overlaps_with_work(group_of_one, monkeypatch):
    """Two all-reduces of 10 ms each, begun together: the second ends at least 20 ms later."""
    before, sleep, sleeps = dist.all_reduce, time.sleep, []
    monkeypatch.setattr(time, "sleep", lambda seconds: (sleeps.append(seconds), sleep(seconds)))
    with Wire(link=(0.005, 4e5)).tapped() as wire:
        start = time.perf_counter()
        works = [dist.all_reduce(torch.zeros(500), async_op=True) for _ in range(2)]
        assert not sleeps, "only waiting takes time"
        for work in works:
            work.wait()
        assert time.perf_counter() - start >= 0.02
    assert dist.all_reduce is before
    first, second = (transfer.end - start for transfer in wire.transfers)
    assert first >= 0.01
    assert second >= first + 0.009, "one after another"


def test_every_collective_of_ours_is_logged_and_done(group_of_one):
    whole, part = torch.ones(8), torch.zeros(8)
    with Wire().tapped() as wire:
        dist.all_reduce(whole)
        dist.broadcast(whole, 0)
        collectives.all_gather(whole, part)
        collectives.reduce_scatter(part, whole.double().float(), async_op=True).wait()
    assert [(m.collective, m.nbytes) for m in wire.transfers] == [
        ("all_reduce", 32),
        ("broadcast", 32),
        ("all_gather", 32),
        ("reduce_scatter", 32),
    ]
    assert all(m.start <= m.end for m in wire.transfers)
    assert torch.equal(whole, torch.zeros(8))
