"""Host time per kernel: its launch, and everything since the previous launch on the same thread.

That time is Python, the dispatch of the operator, and smaller calls such as queries of a kernel's attributes. Calls
that wait for the GPU are never part of it.
"""

from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from statistics import median

from cs336_systems.measure.readers.trace_replay import Graph


class Launches:
    """The launches of a graph's kernels."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.kernels = Counter(node.launch for node in graph.nodes if node.launch is not None)
        """Launch -> how many kernels it started; a CUDA graph starts many."""

    def own_launch(self, kernel: int) -> int | None:
        """Return the launch of a kernel, or None where it has none or shares it with others."""
        launch = self.graph.nodes[kernel].launch
        return launch if launch is not None and self.kernels[launch] == 1 else None

    def unused(self, removed: Iterable[int]) -> set[int]:
        """Return the launches all of whose kernels are removed, except those that wait for the GPU."""
        nodes = self.graph.nodes
        found = Counter(nodes[number].launch for number in removed)
        return {
            launch
            for launch, count in found.items()
            if launch is not None and count == self.kernels[launch] and nodes[launch].returns is None
        }

    def calls_for(self, launch: int) -> list[int]:
        """Return a launch and the calls since the launch before it."""
        found = [launch]
        while (before := self._before(found[-1])) is not None and self._is_small(before):
            found.append(before)
        return found

    @cached_property
    def usual_seconds(self) -> float:
        """Median host time per kernel, over the launches of the measured steps."""
        measured = self.graph.measured.intersection(self.kernels)
        times = [self.seconds_for(launch) for launch in measured if self.graph.nodes[launch].returns is None]
        return median(times) if times else 0.0

    def seconds_for(self, launch: int) -> float:
        """Return the host's time for the kernels of a launch."""
        calls = self.calls_for(launch)
        return sum(self.graph.nodes[call].own + self._lag(call) for call in calls)

    def _before(self, call: int) -> int | None:
        """Return the thread's call before this one."""
        nodes = self.graph.nodes
        place = nodes[call].place
        earlier = (point >> 1 for point, _ in nodes[call].after if point & 1)
        return next((other for other in earlier if not nodes[other].on_gpu and nodes[other].place == place), None)

    def _lag(self, call: int) -> float:
        """Return the host's time between a call and the one before it on the thread."""
        before = self._before(call)
        return sum(lag for point, lag in self.graph.nodes[call].after if point & 1 and point >> 1 == before)

    def _is_small(self, call: int) -> bool:
        """Return True if a call neither launches, nor waits, nor marks the beginning of the steps."""
        node = self.graph.nodes[call]
        waits = node.returns is not None or "synchronize" in node.name.lower()
        return bool(node.name) and not waits and node.kernel is None and call not in self.kernels
