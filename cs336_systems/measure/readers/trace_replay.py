"""A graph of dependencies between kernels and calls of the host: replayed with other durations, and its critical path.

A replay predicts the time of a step from the trace of another one; the longest chain is the critical path. With the
recorded durations a replay gives the recorded times. trace_graph.py makes the graph of a trace.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from cs336_systems.measure.readers.kernel_classes import GAP, HOST
from cs336_systems.measure.readers.trace import Kernel


class Dependency(NamedTuple):
    """A point in time, the start or the end of a node, and the minimum time from it to the dependent point.

    A negative lag after the start of a kernel counts from its end: the next one starts before it has ended.
    """

    point: int
    lag: float


@dataclass(slots=True)
class Node:
    """A kernel, a call of the host, an operator of a CPU, or the beginning or end of the measured steps."""

    name: str
    kind: str
    start: float
    end: float
    place: Any
    """The stream, or the thread."""
    process: Any = None
    kernel: Kernel | None = None
    on_gpu: bool = False
    launch: int | None = None
    """Number of the call that launched it."""
    own: float = 0.0
    """Seconds of its own work, without the time in which a call waits for the GPU."""
    after: list[Dependency] = field(default_factory=list)
    delay: float = 0.0
    """Seconds between the last of the `after` dependencies and the start."""
    returns: Dependency | None = None
    """The end of the kernel that a call waits for."""


@dataclass(frozen=True)
class Change:
    """The changes that a replay makes to the recorded times."""

    seconds: Mapping[int, float] = field(default_factory=dict)
    """Number of a node -> its new time."""
    joined: frozenset[int] = frozenset()
    """Numbers of kernels that start without a gap after the one before them."""
    prompt: frozenset[int] = frozenset()
    """Numbers of calls that the host makes immediately after the previous call on their thread has returned."""
    host: float = 1.0
    """Factor of all times of the host."""


class OnPath(NamedTuple):
    """A stretch of the critical path; `node` is None for gaps and for the host's time between calls."""

    kind: str
    seconds: float
    node: int | None


def start_of(number: int) -> int:
    return 2 * number


def end_of(number: int) -> int:
    return 2 * number + 1


@dataclass(frozen=True)
class Replay:
    """Times and causes of all points of a graph."""

    graph: "Graph"
    times: Sequence[float]
    causes: Sequence[int]
    """The index of the point that each point waited for; -1 for the first ones."""

    @cached_property
    def begin(self) -> float:
        return max(self.times[point] for point in self.graph.begins)

    @cached_property
    def last(self) -> int:
        """The last point of the measured steps."""
        return max(self.graph.ends, key=lambda point: self.times[point])

    @cached_property
    def span(self) -> float:
        """Seconds of the measured steps."""
        return max(0.0, self.times[self.last] - self.begin)

    def busy(self) -> float:
        """Return the seconds of the measured steps in which a kernel ran."""
        inside = self.graph.measured_kernels
        total, reached = 0.0, self.begin
        for start, end in sorted((self.times[start_of(n)], self.times[end_of(n)]) for n in inside):
            total += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return total

    def critical_path(self) -> list[OnPath]:
        """Return the chain of causes of the last point, from the last stretch to the first; it covers the span."""
        found = []
        begin, point = self.begin, self.last
        reached = self.times[point]
        while reached > begin and (cause := self.causes[point]) >= 0:
            until = max(self.times[cause], begin)
            if until < reached:
                found.append(OnPath(*self.graph.meaning(cause, point, reached - until)))
                reached = until
            point = cause
        if reached > begin:  # nothing in the trace says what the first point waited for
            found.append(OnPath(GAP if self.graph.nodes[point >> 1].on_gpu else HOST, reached - begin, None))
        return found


@dataclass(frozen=True)
class Graph:
    """The nodes of a trace and the order of their points in time."""

    nodes: list[Node]
    order: list[int]
    begins: list[int]
    """Points the last of which begins the measured steps: the host begins them, and the GPU has finished all earlier
    work."""
    ends: list[int]
    """Points the last of which ends the measured steps."""
    measured: frozenset[int]
    """Numbers of the nodes that belong to the measured steps."""
    steps: int
    has_steps: bool
    """True if there are measured steps; otherwise the whole trace is measured."""

    @cached_property
    def on_gpu(self) -> bool:
        """True if the kernels are those of a GPU, false if they are operators of a CPU."""
        return any(node.on_gpu for node in self.nodes)

    @cached_property
    def measured_kernels(self) -> list[int]:
        """Numbers of the kernels, or of the operators of a CPU, in the measured steps."""
        return [number for number in sorted(self.measured) if self.nodes[number].kernel is not None]

    def meaning(self, cause: int, point: int, seconds: float) -> tuple[str, float, int | None]:
        """Return kind, seconds and node of the stretch between two points."""
        node = self.nodes[point >> 1]
        if cause == point - 1 and point & 1:
            return node.kind, seconds, point >> 1
        return (GAP if node.on_gpu else HOST), seconds, None

    def replay(self, change: Change | None = None) -> Replay:
        """Return the times of all points."""
        change = change or Change()
        times, causes = [0.0] * len(self.order), [-1] * len(self.order)
        for point in self.order:
            node = self.nodes[point >> 1]
            if point & 1:
                times[point], causes[point] = self._end(point, node, change, times)
            else:
                times[point], causes[point] = self._start(point, node, change, times)
        return Replay(self, times, causes)

    def _end(self, point: int, node: Node, change: Change, times: list[float]) -> tuple[float, int]:
        factor = change.host if node.kernel is None else 1.0
        time = times[point - 1] + change.seconds.get(point >> 1, node.own) * factor
        if node.returns is not None:
            returned = times[node.returns.point] + node.returns.lag * factor
            if returned > time:
                return returned, node.returns.point
        return time, point - 1

    def _start(self, point: int, node: Node, change: Change, times: list[float]) -> tuple[float, int]:
        if not node.after:
            return node.start, -1
        is_joined, is_prompt = point >> 1 in change.joined, point >> 1 in change.prompt
        is_removed = is_joined and not change.seconds.get(point >> 1, node.own)
        best, cause = -math.inf, -1
        for before, lag in node.after:
            time = times[before]
            if lag < 0:
                other = before >> 1
                time += max(0.0, change.seconds.get(other, self.nodes[other].own) + lag)
            elif not node.on_gpu:
                follows = is_prompt and before & 1 and self.nodes[before >> 1].place == node.place
                time += 0.0 if follows else lag * change.host
            elif not is_removed and not (is_joined and self.nodes[before >> 1].on_gpu):
                time += lag
            if time > best:
                best, cause = time, before
        if node.on_gpu:
            return (best if is_joined else best + node.delay), cause
        return best + node.delay * change.host, cause
