"""The graph of a trace: what each kernel and each call of the host waited for.

A kernel starts after the kernel before it on its stream, after its launch, and after events of other streams that its
stream waits for. The host's calls follow one another; a synchronisation, a copy to pageable memory and a launch into a
full queue end after the kernel that they waited for. Of the kernels of a CUDA graph only the first has a launch.

Every dependency has a lag: the usual one of the trace (between kernels, from launch to start), or less where less was
recorded. The rest of a recorded gap is a delay that a replay keeps, except after a launch: there it is part of the lag.
Dependencies lead forward in time, so that there are no cycles; links of a trace that lead back are left out.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from cs336_systems.measure.readers.kernel_classes import HOST
from cs336_systems.measure.readers.trace import PHASES, Span, StreamWait, Trace
from cs336_systems.measure.readers.trace_replay import Dependency, Graph, Node, end_of, start_of

UNEXPLAINED = 2e-6
"""Seconds of a gap beyond which a kernel without a recorded reason is taken to have waited for another stream."""
LONGEST_WAIT = 1e-5
"""Maximum seconds between the end of a kernel and the start of one on another stream that waited for it."""
QUEUED_GAP = 5.5e-7
"""Seconds between queued kernels of an H200, for traces whose kernels were never queued."""
LONGEST_LATENCY = 5e-5
"""Maximum seconds beyond the usual ones from a kernel's launch to its start; a longer delay has another cause."""
LONG_CALL = 2e-5
"""A call may have waited for the GPU if it takes longer than these seconds and than a multiple of its usual time."""
LONG_CALLS = 10
OWN_CALL = 5e-6
"""Maximum seconds of its own work in a call that waited for the GPU."""
ROUNDING = 1e-9
"""Rounding error in seconds: profilers count nanoseconds, and a float of microseconds since boot resolves half of
one."""
MOST_TRIED = 64
"""Maximum number of kernels that are tried to find the one that a call or a stream waited for."""
MOST_BRANCHES = 8
"""Maximum number of streams of a CUDA graph that the next kernel waits for."""


def graph_of(trace: Trace) -> Graph:
    """Return the graph of a trace that holds at least one kernel."""
    return _Builder(trace).graph()


def _measured(trace: Trace) -> tuple[Span, Span, int] | None:
    """Return the first and the last range of the measured steps, and how many steps there are; None without ranges."""
    spans = trace.phases or trace.profiler_steps
    if not spans:
        return None
    first, last = min(spans, key=lambda span: span.start), max(spans, key=lambda span: span.end)
    names = Counter(span.name for span in spans if span.thread == first.thread)
    steps = max(names[name] for name in PHASES) if trace.phases else sum(names.values())
    return first, last, steps


def _lower_quartile(found: list[float]) -> float:
    return sorted(found)[len(found) // 4] if found else 0.0


class _Builder:
    """Finds the dependencies between the nodes of a trace."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self.nodes: list[Node] = []
        self.calls: dict[int, int] = {}
        """Index of a call in the trace -> number of its node."""
        self.streams: dict[Any, list[int]] = defaultdict(list)
        """Kernels of a stream, by start."""
        self.window = _measured(trace)
        self.marks: list[int] = []
        self._add_nodes()
        self.works = [number for number, node in enumerate(self.nodes) if node.on_gpu]
        self.by_end = sorted(self.works, key=lambda number: self.nodes[number].end)
        self._ends = [self.nodes[number].end for number in self.by_end]

    def _add_nodes(self) -> None:
        trace = self.trace
        launching = {trace.calls[kernel.launch].thread for kernel in trace.kernels if kernel.launch is not None}
        for index, call in enumerate(trace.calls):
            if call.thread in launching:
                self.calls[index] = len(self.nodes)
                self.nodes.append(Node(call.name, HOST, call.start, call.end, call.thread, call.process))
        for piece in trace.pieces:
            self.nodes.append(Node(piece.name, piece.kind, piece.start, piece.end, piece.stream, kernel=piece))
        if self.window:
            first, last, _ = self.window
            for span, time in ((first, first.start), (last, last.end)):
                process = next((call.process for call in trace.calls if call.thread == span.thread), None)
                self.marks.append(len(self.nodes))
                self.nodes.append(Node("", HOST, time, time, span.thread, process))
        for kernel in sorted(trace.kernels if trace.on_gpu else [], key=lambda kernel: (kernel.start, kernel.end)):
            self.streams[kernel.stream].append(len(self.nodes))
            node = Node(kernel.name, kernel.kind, kernel.start, kernel.end, kernel.stream, kernel=kernel, on_gpu=True)
            if kernel.launch is not None:
                node.launch, node.process = self.calls[kernel.launch], trace.calls[kernel.launch].process
            self.nodes.append(node)
        self._part_touching_nodes()
        for node in self.nodes:
            node.own = node.end - node.start

    def _part_touching_nodes(self) -> None:
        """End a node where the next one of its stream or thread starts, if they overlap only by rounding."""
        last: dict[Any, Node] = {}
        for node in sorted(self.nodes, key=lambda node: (node.start, node.end)):
            before = last.get((node.on_gpu, node.place))
            if before is not None and node.start < before.end <= min(node.start + ROUNDING, node.end):
                before.end = max(before.start, node.start)
            last[node.on_gpu, node.place] = node

    def graph(self) -> Graph:
        self._link_host()
        self._link_waiting_calls()
        self._link_kernels()
        order = self._in_order()
        self._keep_forward(order)
        return Graph(self.nodes, order, *self._window_points(), has_steps=self.window is not None)

    def launched(self, number: int) -> float:
        """Return when a kernel was launched, or else when it started."""
        node = self.nodes[number]
        return node.start if node.launch is None else self.nodes[node.launch].start

    # -- the host

    def _link_host(self) -> None:
        """Link each node of the host to the one before it on its thread, or to the one that last ended in its process.

        A thread that waits for another, as Python's does during backward, continues when the other has finished.
        """
        host = [number for number, node in enumerate(self.nodes) if not node.on_gpu]
        by_start = sorted(host, key=lambda number: (self.nodes[number].start, -self.nodes[number].end))
        ended = iter(sorted(host, key=lambda number: self.nodes[number].end))
        following = next(ended, None)
        last_of_thread: dict[Any, int] = {}
        last_of_process: dict[Any, int] = {}
        for number in by_start:
            node = self.nodes[number]
            while following is not None and self.nodes[following].end <= node.start and following != number:
                last_of_process[self.nodes[following].process] = following
                following = next(ended, None)
            before, other = last_of_thread.get(node.place), last_of_process.get(node.process)
            node.after = list(self._host_dependencies(node, before, other))
            if before is None or self.nodes[before].end <= node.end:
                last_of_thread[node.place] = number

    def _host_dependencies(self, node: Node, before: int | None, other: int | None) -> Iterator[Dependency]:
        nested = before is not None and self.nodes[before].end > node.start
        handed_over = (
            not nested
            and other is not None
            and other != before
            and (before is None or self.nodes[other].end > self.nodes[before].end)
        )
        if before is not None and nested:
            yield Dependency(start_of(before), node.start - self.nodes[before].start)
        elif before is not None:
            yield Dependency(end_of(before), 0.0 if handed_over else node.start - self.nodes[before].end)
        if other is not None and handed_over:
            yield Dependency(end_of(other), node.start - self.nodes[other].end)

    def _link_waiting_calls(self) -> None:
        """Link the ends of calls that waited for the GPU to the kernels that they waited for."""
        durations: dict[str, list[float]] = defaultdict(list)
        for number in self.calls.values():
            durations[self.nodes[number].name].append(self.nodes[number].own)
        usual = {name: sorted(found)[len(found) // 20] for name, found in durations.items()}
        pageable = {
            self.nodes[number].launch: number for number in self.works if "pageable" in self.nodes[number].name.lower()
        }
        for index, number in self.calls.items():
            call = self.nodes[number]
            syncs = "synchronize" in call.name.lower()
            if number in pageable and self.nodes[pageable[number]].end <= call.end:
                waited_for: int | None = pageable[number]
            elif syncs or call.own > max(LONG_CALL, LONG_CALLS * usual[call.name]):
                waited_for = self._waited_for(call, self.trace.calls[index].stream)
            else:
                continue
            if waited_for is None:
                continue
            ended = self.nodes[waited_for].end
            if ended > call.start:
                call.own = min(call.own, usual[call.name], OWN_CALL)
                call.returns = Dependency(end_of(waited_for), call.end - ended)
            elif syncs:
                call.returns = Dependency(end_of(waited_for), 0.0)

    def _waited_for(self, call: Node, stream: Any) -> int | None:
        """Return the kernel, launched before a call, that was the last to end before the call ended."""

        def fits(number: int) -> bool:
            node = self.nodes[number]
            is_there = node.process in (None, call.process) and (stream is None or node.place == stream)
            return is_there and self.launched(number) < call.start

        return self._last_ended(call.end, fits)

    def _last_ended(self, time: float, fits: Callable[[int], bool]) -> int | None:
        """Return, among the last few kernels, the one that fits and ended last before `time`."""
        last = bisect_right(self._ends, time)
        return next(filter(fits, reversed(self.by_end[max(0, last - MOST_TRIED) : last])), None)

    # -- the GPU

    def _link_kernels(self) -> None:
        first = self._first_of_launch()
        before = {number: other for found in self.streams.values() for other, number in pairwise(found)}
        gap, latency = self._usual_gap(before), self._usual_latency(before, first)
        awaited = self._awaited()
        infers = not self.trace.waits and any("waitevent" in call.name.lower() for call in self.trace.calls)
        branches = self._branches()
        for number in self.works:
            node = self.nodes[number]
            launch = node.launch
            is_first = launch is None or first[launch] == number
            dependencies = self._in_stream(number, before.get(number), gap, branches)
            if launch is not None and is_first and self.nodes[launch].start <= node.start:
                dependencies.append(Dependency(start_of(launch), min(latency, node.start - self.nodes[launch].start)))
            dependencies += [self._end_before(number, other) for other in awaited.get(number, ())]
            if not is_first and not self._same_launch(number, before.get(number)):
                longest = -math.inf
            elif infers or not is_first:
                longest = UNEXPLAINED
            else:
                longest = math.inf
            node.after = dependencies + self._inferred(number, dependencies, longest, inside=not is_first)

    def _first_of_launch(self) -> dict[int, int]:
        """Return the first kernel of each call that launched some; a CUDA graph has many."""
        first: dict[int, int] = {}
        for number in self.works:
            if (launch := self.nodes[number].launch) is not None:
                first.setdefault(launch, number)
        return first

    def _same_launch(self, number: int, other: int | None) -> bool:
        return other is not None and self.nodes[number].launch == self.nodes[other].launch

    def _usual_gap(self, before: Mapping[int, int]) -> float:
        """Return the lower quartile of the gaps before kernels that were queued when the one before them began.

        Some of the others waited for events of other streams.
        """
        gaps = []
        for number, other in before.items():
            node, previous = self.nodes[number], self.nodes[other]
            is_queued = self.launched(number) < previous.start and not self._same_launch(number, other)
            if is_queued and 0 <= node.start - previous.end <= LONGEST_WAIT:
                gaps.append(node.start - previous.end)
        return _lower_quartile(gaps) if gaps else QUEUED_GAP

    def _usual_latency(self, before: Mapping[int, int], first: Mapping[int, int]) -> float:
        """Return the lower quartile of the times from launch to start, on streams that had nothing else to do."""
        found = []
        for launch, number in first.items():
            called, other = self.nodes[launch].start, before.get(number)
            if called <= self.nodes[number].start and (other is None or self.nodes[other].end <= called):
                found.append(self.nodes[number].start - called)
        return _lower_quartile(found)

    def _branches(self) -> dict[int, list[int]]:
        """Return the last kernels on the streams of a launch, for those that have several streams."""
        last: dict[int, dict[Any, int]] = defaultdict(dict)
        for number in self.works:
            if (launch := self.nodes[number].launch) is not None:
                last[launch][self.nodes[number].place] = number
        return {
            launch: sorted(found.values(), key=lambda number: -self.nodes[number].end)[:MOST_BRANCHES]
            for launch, found in last.items()
            if len(found) > 1
        }

    def _in_stream(
        self, number: int, before: int | None, gap: float, branches: Mapping[int, list[int]]
    ) -> list[Dependency]:
        """Return the dependency on the previous kernel of the stream, and on all branches of the CUDA graph that it
        belongs to."""
        if before is None:
            return []
        start = self.nodes[number].start
        recorded = start - self.nodes[before].end
        if recorded < 0:
            return [Dependency(start_of(before), recorded)]
        if self._same_launch(number, before):
            return [Dependency(end_of(before), min(UNEXPLAINED, recorded))]
        launch = self.nodes[before].launch
        joining = branches.get(launch, []) if launch is not None else []
        others = [last for last in joining if last != before and self.nodes[last].end <= start]
        return [Dependency(end_of(before), min(gap, recorded)), *(self._end_before(number, last) for last in others)]

    def _end_before(self, number: int, other: int) -> Dependency:
        """Return the dependency of a kernel on one of another stream."""
        return Dependency(end_of(other), min(UNEXPLAINED, self.nodes[number].start - self.nodes[other].end))

    def _awaited(self) -> dict[int, list[int]]:
        """Return the kernels that each kernel waits for by an event."""
        ordered = {stream: sorted(found, key=self.launched) for stream, found in self.streams.items()}
        times = {stream: [self.launched(number) for number in found] for stream, found in ordered.items()}
        found: dict[int, list[int]] = defaultdict(list)
        for wait in self.trace.waits:
            if pair := self._wait_pair(wait, ordered, times):
                number, other = pair
                if self.nodes[other].end <= self.nodes[number].start:
                    found[number].append(other)
        return found

    def _wait_pair(
        self, wait: StreamWait, ordered: Mapping[Any, list[int]], times: Mapping[Any, list[float]]
    ) -> tuple[int, int] | None:
        """Return the first kernel after the wait, and the last one before the event was recorded."""
        if wait.stream not in ordered or wait.source not in ordered:
            return None
        calls = self.trace.calls
        after = bisect_left(times[wait.stream], calls[wait.call].start)
        until = bisect_left(times[wait.source], calls[wait.record].start)
        if after == len(ordered[wait.stream]) or not until:
            return None
        return ordered[wait.stream][after], ordered[wait.source][until - 1]

    def _inferred(self, number: int, known: Sequence[Dependency], longest: float, *, inside: bool) -> list[Dependency]:
        """Return the dependency on a kernel of another stream that follows from the times.

        It is looked for if the known dependencies leave more than `longest` seconds unexplained, `inside` a CUDA graph
        among the kernels of that graph. A kernel without any dependency follows the last one that ended.
        """
        node = self.nodes[number]
        explained = max(map(self._ready, known), default=-math.inf)
        if known and node.start - explained <= longest:
            return []

        def fits(found: int) -> bool:
            other = self.nodes[found]
            is_elsewhere = found != number and (not known or other.place != node.place)
            return is_elsewhere and other.process == node.process and (not inside or other.launch == node.launch)

        other = self._last_ended(node.start, fits)
        if other is None or self.nodes[other].start > node.start:
            return []
        ended = self.nodes[other].end
        if known and (ended <= explained or node.start - ended > LONGEST_WAIT):
            return []
        return [Dependency(end_of(other), node.start - ended)]

    # -- order

    def _recorded(self, point: int) -> float:
        node = self.nodes[point >> 1]
        return node.end if point & 1 else node.start

    def _ready(self, dependency: Dependency) -> float:
        """Return the recorded time from which a dependency allows the next start."""
        point, lag = dependency
        return self._recorded(point | 1 if lag < 0 else point) + lag

    def _in_order(self) -> list[int]:
        """Return all points by recorded time; of equal ones those of the node that started earlier come first."""
        by_start = sorted(range(len(self.nodes)), key=lambda number: (self.nodes[number].start, self.nodes[number].end))
        rank = {number: place for place, number in enumerate(by_start)}
        points = range(2 * len(self.nodes))
        return sorted(points, key=lambda point: (self._recorded(point), rank[point >> 1], point & 1))

    def _keep_forward(self, order: list[int]) -> None:
        """Remove dependencies that lead back in time, and set the delays that give the recorded times."""
        position = [0] * len(order)
        for place, point in enumerate(order):
            position[point] = place
        for number, node in enumerate(self.nodes):
            here = position[start_of(number)]
            node.after = [found for found in node.after if position[found.point] < here]
            if node.returns is not None and position[node.returns.point] > position[end_of(number)]:
                node.returns, node.own = None, node.end - node.start
            if node.after:
                self._set_delay(node)

    def _set_delay(self, node: Node) -> None:
        """Set what the dependencies leave unexplained. A kernel that waited for its launch took longer to start than
        usual; with a queue before it this time does not count, so it belongs to that dependency."""
        last = max(node.after, key=self._ready)
        node.delay = node.start - self._ready(last)
        waits_for_launch = node.on_gpu and node.launch is not None and last.point == start_of(node.launch)
        if waits_for_launch and 0 < node.delay <= LONGEST_LATENCY:
            node.after.remove(last)
            node.after.append(Dependency(last.point, node.start - self._recorded(last.point)))
            node.delay = node.start - max(map(self._ready, node.after))

    def _window_points(self) -> tuple[list[int], list[int], frozenset[int], int]:
        """Return the points that begin and end the measured steps, their nodes, and the number of steps."""
        numbers: Iterable[int] = range(len(self.nodes))
        if self.window is None:
            first = min(numbers, key=lambda number: self.nodes[number].start)
            return [start_of(first)], [end_of(number) for number in numbers], frozenset(numbers), 1
        begin, end = self.marks
        since, until = self.nodes[begin].start, self.nodes[end].end
        earlier = [number for number in self.works if self.launched(number) < since]
        inside = [n for n in self.works if since <= self.launched(n) <= until]
        inside += [n for n in numbers if not self.nodes[n].on_gpu and since <= self.nodes[n].start <= until]
        begins = [start_of(begin), *map(end_of, earlier)]
        return begins, [end_of(end), *map(end_of, inside)], frozenset(inside), self.window[2]
