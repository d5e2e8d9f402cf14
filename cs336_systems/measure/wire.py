"""What the wrappers send, and when: stands between them and torch.distributed, and can make the wire slow.

Torch's own wrappers send from C++, past this.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from cs336_systems.parallel import collectives

Link = tuple[float, float]
"""Seconds for each message, and bytes per second."""


@dataclass
class Message:
    collective: str
    nbytes: int
    """Of the whole array: what an all-gather ends with and a reduce-scatter begins with."""
    start: float
    end: float | None = None
    """None until it is over."""


class Wire:
    """A log of messages. With a `link`, all-reduces go one after another and each takes its time, most of it asleep."""

    def __init__(self, link: Link | None = None):
        self.messages: list[Message] = []
        self._link = link
        self._free_at = 0.0

    @contextmanager
    def tapped(self) -> Iterator["Wire"]:
        places: tuple[tuple[Any, str, int], ...] = (
            (dist, "all_reduce", 0),
            (dist, "broadcast", 0),
            (collectives, "all_gather", 0),
            (collectives, "reduce_scatter", 1),
        )
        with ExitStack() as stack:
            for owner, name, whole in places:
                send = self._tap(name, getattr(owner, name), whole)
                stack.enter_context(patch.object(owner, name, send))
            yield self

    def _tap(self, name: str, send: Callable[..., Any], whole: int) -> Callable[..., Any]:
        def tapped(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            array: Tensor = args[whole] if args else kwargs["tensor"]
            message = Message(name, array.nbytes, time.perf_counter())
            self.messages.append(message)
            until = self._slow(message) if self._link and name == "all_reduce" else 0.0
            sent = _Sent(message, send(*args, async_op=True, **kwargs), until)
            return sent if async_op else sent.wait()

        return tapped

    def _slow(self, message: Message) -> float:
        """When the message may arrive; it starts when the one before it has."""
        assert self._link is not None
        latency, bandwidth = self._link
        message.start = max(message.start, self._free_at)
        self._free_at = message.start + latency + message.nbytes / bandwidth
        return self._free_at


class _Sent:
    """A `Work` that notes its end; and is not over before `until`."""

    def __init__(self, message: Message, work: Any, until: float):
        self._message, self._work, self._until = message, work, until
        # Gloo's own thread calls this when the message is there; whoever waits may look much later. Its reduce-scatter
        # has no future: of that the end is when somebody saw it.
        with suppress(RuntimeError):
            work.get_future().then(self._note)

    def _note(self, future: Any) -> None:
        if self._message.end is None:
            self._message.end = max(time.perf_counter(), self._until)

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._until - time.perf_counter()))
        self._note(None)
