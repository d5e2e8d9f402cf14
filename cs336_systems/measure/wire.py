"""Records the collectives of this package's wrappers with their times, and can emulate a slow network.

torch's own wrappers call collectives from C++ and are not recorded.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from cs336_systems.parallel import collectives


class Link(NamedTuple):
    """A network connection."""

    latency: float
    """Seconds for each collective."""
    bandwidth: float
    """Bytes per second."""


@dataclass
class Transfer:
    """One collective, as recorded on this rank."""

    collective: str
    nbytes: int
    """Size of the full array: the output of an all-gather, the input of a reduce-scatter."""
    start: float
    end: float | None = None
    """End time; None while the collective runs."""


class _Patched(NamedTuple):
    module: Any
    function: str
    full_array: int
    """Position of the argument that holds the full array."""


PATCHED = (
    _Patched(dist, "all_reduce", 0),
    _Patched(dist, "broadcast", 0),
    _Patched(collectives, "all_gather", 0),
    _Patched(collectives, "reduce_scatter", 1),
)


class Wire:
    """A log of collectives. With a `link`, all-reduces run one after another and take as long as on that network."""

    def __init__(self, link: Sequence[float] | None = None):
        self.transfers: list[Transfer] = []
        self._link = None if link is None else Link(*link)
        self._free_at = 0.0

    @contextmanager
    def tapped(self) -> Iterator["Wire"]:
        """Record the collectives that are called inside."""
        with ExitStack() as stack:
            for module, name, full_array in PATCHED:
                send = self._tap(name, getattr(module, name), full_array)
                stack.enter_context(patch.object(module, name, send))
            yield self

    def _tap(self, name: str, send: Callable[..., Any], full_array: int) -> Callable[..., Any]:
        def tapped(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            array: Tensor = args[full_array] if args else kwargs["tensor"]
            transfer = Transfer(name, array.nbytes, time.perf_counter())
            self.transfers.append(transfer)
            until = self._slow(transfer) if self._link and name == "all_reduce" else 0.0
            sent = _Sent(transfer, send(*args, async_op=True, **kwargs), until)
            return sent if async_op else sent.wait()

        return tapped

    def _slow(self, transfer: Transfer) -> float:
        """Return the earliest time at which the collective may end; it starts when the one before it has ended."""
        assert self._link is not None
        transfer.start = max(transfer.start, self._free_at)
        self._free_at = transfer.start + self._link.latency + transfer.nbytes / self._link.bandwidth
        return self._free_at


class _Sent:
    """A `Work` that records when it ends, and does not end before `until`."""

    def __init__(self, transfer: Transfer, work: Any, until: float):
        self._transfer, self._work, self._until = transfer, work, until
        # Gloo's thread calls this at the end of the collective; the caller may wait much later. Its reduce-scatter has
        # no future: its end is recorded when the caller waits.
        with suppress(RuntimeError):
            work.get_future().then(self._record_end)

    def _record_end(self, future: Any) -> None:
        if self._transfer.end is None:
            self._transfer.end = max(time.perf_counter(), self._until)

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._until - time.perf_counter()))
        self._record_end(None)
