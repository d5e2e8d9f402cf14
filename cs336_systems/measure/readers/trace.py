"""Traces of kernels: each kernel with the phase and the part of the model that launched it.

`read_chrome` reads traces of torch.profiler, `nsys.read_nsys` those of Nsight Systems. No torch: a trace can be read on
any machine.

Phase of a kernel. The host launches kernels inside ranges (`forward`, `backward`, ...), and a kernel carries the
correlation id of its launch. Another thread launches the kernels of backward, but while the range is open.

Part of a kernel (`attention softmax`, ...). In forward it is the range around the launch. Backward has no such ranges:
the profiler links the operator that launched the kernel to the forward operator whose gradient it computes, by a flow
event and by a sequence number, and the forward operator ran inside a range.

Without a GPU the operators replace the kernels, each with its self time.
"""

import math
import re
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from cs336_systems.config import UserError
from cs336_systems.files import (
    LARGEST_FILE,
    LONGEST_NAME,
    MOST_ITEMS,
    LimitError,
    decompressed,
    foreign,
    is_number,
    limit,
    read_input,
    require_at_most,
)
from cs336_systems.measure.readers.json_stream import items_of
from cs336_systems.measure.readers.kernel_classes import UNKNOWN, classify
from cs336_systems.measure.readers.recorded_tables import KernelRow, KindRow, PartRow, flatten
from cs336_systems.record import Metric
from cs336_systems.text import printable

PHASES = ("forward", "loss", "backward", "sync", "optimizer")
WHOLE = "step"
"""The phase of all kernels in a trace without this package's ranges."""
US = 1e-6
NAMES_KEPT = 12
"""Kernel names that are recorded for each phase; the sums by kind include all kernels."""
HALF_NS = 5e-10
"""Profilers count nanoseconds: times that differ by less than this are equal after rounding."""


class Origin(NamedTuple):
    """The phase and the part of the model that launched a kernel, as far as they are known."""

    phase: str | None = None
    part: str | None = None


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, with times in seconds on the trace's clock."""

    name: str
    start: float
    duration: float
    phase: str | None = None
    part: str | None = None
    stream: Any = None
    """The stream it ran on; of an operator, the thread."""
    launch: int | None = None
    """Index of the host call that launched it in `Trace.calls`, where the trace links them."""

    @property
    def end(self) -> float:
        return self.start + self.duration

    @property
    def kind(self) -> str:
        return classify(self.name)


@dataclass(frozen=True)
class Span:
    """A range on the host."""

    name: str
    start: float
    end: float
    thread: Any = None

    def holds(self, time: float) -> bool:
        return self.start <= time < self.end


class Call(NamedTuple):
    """A call of the CUDA runtime or driver on a thread of the host."""

    name: str
    start: float
    end: float
    thread: Any
    process: Any = None
    stream: Any = None
    """The stream that the call waits for, if the trace has it."""


class StreamWait(NamedTuple):
    """An event that a stream waits for; both calls are indices in `Trace.calls`."""

    call: int
    """The call of cudaStreamWaitEvent: work launched later on `stream` waits."""
    stream: Any
    record: int
    """The call of cudaEventRecord: work launched earlier on `source` is waited for."""
    source: Any


@dataclass(frozen=True)
class NamedKernels:
    """All kernels of one name, as in `nsys stats`."""

    name: str
    durations: list[float]

    @property
    def total(self) -> float:
        return sum(self.durations)

    @property
    def median(self) -> float:
        return statistics.median(self.durations)


class KindTotal(NamedTuple):
    """The kernels of one kind."""

    seconds: float
    kernels: int


@dataclass(frozen=True)
class Trace:
    kernels: list[Kernel]
    phases: list[Span]
    on_gpu: bool
    """True for kernels, False for operators of the host."""
    calls: Sequence[Call] = ()
    waits: Sequence[StreamWait] = ()
    profiler_steps: Sequence[Span] = ()
    """Ranges of torch.profiler's schedule (`ProfilerStep#3`)."""
    pieces: Sequence[Kernel] = ()
    """Without a GPU: the parts of operators outside of nested operators; on one thread these do not overlap."""

    @property
    def steps(self) -> int:
        """Number of traced steps; every step has each of its phases once."""
        names = [span.name for span in self.phases]
        return max((names.count(name) for name in PHASES), default=0) or 1

    def in_a_phase(self) -> "Trace":
        """Return the trace; where no kernel has a phase, as in a CUDA graph, with all of them in the phase WHOLE."""
        if any(kernel.phase is not None for kernel in self.kernels):
            return self
        return replace(self, kernels=[replace(kernel, phase=WHOLE) for kernel in self.kernels])

    def of(self, phase: str | None) -> list[Kernel]:
        return [kernel for kernel in self.kernels if kernel.phase == phase]

    def table(self, phase: str | None = None) -> list[NamedKernels]:
        """Return the kernels of one phase, or of all, by name; the largest total first."""
        durations: dict[str, list[float]] = defaultdict(list)
        for kernel in self.of(phase) if phase else self.kernels:
            durations[kernel.name].append(kernel.duration)
        return sorted((NamedKernels(name, found) for name, found in durations.items()), key=lambda row: -row.total)

    def by_kind(self, phase: str | None = None) -> dict[str, KindTotal]:
        """Return the totals of one phase, or of all, by kind."""
        found: dict[str, KindTotal] = {}
        for kernel in self.of(phase) if phase else self.kernels:
            seconds, count = found.get(kernel.kind, (0.0, 0))
            found[kernel.kind] = KindTotal(seconds + kernel.duration, count + 1)
        return found

    def by_part(self, phase: str) -> dict[tuple[str, str], float]:
        """Return the seconds of a phase by (part, kind)."""
        found: dict[tuple[str, str], float] = defaultdict(float)
        for kernel in self.of(phase):
            if kernel.part:
                found[kernel.part, kernel.kind] += kernel.duration
        return dict(found)

    def busy(self, phase: str) -> float:
        """Return the seconds during which at least one of the phase's kernels ran."""
        total, reached = 0.0, float("-inf")
        for kernel in sorted(self.of(phase), key=lambda kernel: kernel.start):
            total += max(0.0, kernel.end - max(kernel.start, reached))
            reached = max(reached, kernel.end)
        return total


def phase_at(phases: Sequence[Span], time: float) -> str | None:
    """Return the phase at `time`; `phases` are sorted and do not overlap."""
    index = bisect_right(phases, time, key=lambda span: span.start) - 1
    return phases[index].name if index >= 0 and phases[index].holds(time) else None


def trace_metrics(trace: Trace) -> list[Metric]:
    """Return the metrics of one step; recorded_tables.py defines the rows of the tables."""
    steps = trace.steps
    seconds = {
        "kernel_time": sum(kernel.duration for kernel in trace.kernels),
        "unknown_kernel_time": sum(kernel.duration for kernel in trace.kernels if kernel.kind == UNKNOWN),
        "kernel_time_outside_phases": sum(kernel.duration for kernel in trace.of(None)),
    }
    metrics = [Metric(name, "s", [total / steps]) for name, total in seconds.items()]
    metrics.append(Metric("kernels_on_gpu", "1", [int(trace.on_gpu)]))
    for phase in (*PHASES, WHOLE):
        if not trace.of(phase):
            continue
        kinds = [KindRow(kind, n / steps, total / steps) for kind, (total, n) in trace.by_kind(phase).items()]
        parts = [PartRow(part, kind, total / steps) for (part, kind), total in trace.by_part(phase).items()]
        names = [_kernel_row(found, steps) for found in trace.table(phase)[:NAMES_KEPT]]
        metrics.append(Metric(f"busy_time: {phase}", "s", [trace.busy(phase) / steps]))
        for table, samples in (("kind", flatten(kinds)), ("part", flatten(parts)), ("kernel", flatten(names))):
            if samples:
                metrics.append(Metric(f"{table}_table: {phase}", "", samples))
    return metrics


def _kernel_row(found: NamedKernels, steps: int) -> KernelRow:
    durations = found.durations
    number, total = len(durations) / steps, found.total / steps
    return KernelRow(found.name, number, total, found.median, min(durations), max(durations))


# -- traces of torch.profiler -----------------------------------------------------------------------------------------

_GROUPS = {
    **dict.fromkeys(("kernel", "gpu_memcpy", "gpu_memset"), "works"),
    **dict.fromkeys(("cuda_runtime", "cuda_driver"), "launches"),
    "user_annotation": "ranges",
    "cpu_op": "operators",
}
"""Categories of events that are read -> fields of _Events that hold them."""
MOST_CHARACTERS = 1 << 24
"""Maximum characters in the different names of a trace; a real one has a few thousand names."""
UNLIMITED = 1 << 62
DEEPEST = 100
"""Maximum levels of nested ranges or operators; real ones have up to 30, and the time to find one grows with them."""
PROFILER_STEP = "ProfilerStep"
NO_STREAM = -1
"""The stream of a synchronisation with the whole device."""
_NOT_A_PART = re.compile(rf"({'|'.join(PHASES)})$|{PROFILER_STEP}|Optimizer\.")
"""Ranges that do not name a part of the model."""


class Moment(NamedTuple):
    """A time on a thread of the host."""

    time: float
    thread: Any


@dataclass(slots=True)
class Event:
    """An operator or a named range on the host."""

    name: str
    start: float
    end: float
    own: float = 0.0
    """Self time: seconds outside of nested events of its kind."""
    sequence: int | None = None
    is_backward: bool = False
    forward: Moment | None = None
    """Start of the forward operator whose gradient this computes, if a flow event links them."""
    parent: "Event | None" = None
    depth: int = 1


class Nest:
    """The events of one kind on one thread: any two are nested or disjoint."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, event: Event) -> None:
        """Add an event; events come by start, the longer first."""
        around = self.events[-1] if self.events else None
        while around is not None and around.end <= event.start + HALF_NS:
            around = around.parent
        if around is not None:
            event.parent, event.depth = around, around.depth + 1
            around.own -= event.own
            if event.depth > DEEPEST:
                raise ValueError(f"its ranges are nested more than {DEEPEST} levels deep")
        self.events.append(event)

    def at(self, time: float) -> Event | None:
        """Return the innermost event around `time`."""
        index = bisect_right(self.events, time, key=lambda event: event.start) - 1
        found = self.events[index] if index >= 0 else None
        while found is not None and found.end < time:
            found = found.parent
        return found


class _Raw(NamedTuple):
    """The fields of an event that are used; times in microseconds on the trace's clock."""

    name: str
    time: float
    duration: float
    thread: int | str
    correlation: int | None
    sequence: int | None
    is_backward: bool
    process: int | str | None
    """The number of the GPU for work on a GPU; otherwise the process."""


class _Sync(NamedTuple):
    """A synchronisation as the profiler records it on request (`enable_cuda_sync_events`)."""

    correlation: int | str
    device: int | str | None
    stream: int | str
    record: int | str | None
    """Correlation id of the call that recorded the awaited event."""
    source: int | str | None


class _Events:
    """The events of a trace by group, and the links from operators of backward to those of forward."""

    def __init__(self, most: int) -> None:
        self.kept: dict[str, list[_Raw]] = {group: [] for group in _GROUPS.values()}
        self._syncs: list[_Sync] = []
        self._first = math.inf
        self._flows: dict[int | str, dict[str, tuple[float, int | str]]] = defaultdict(dict)
        self._names: dict[str, str] = {}
        self._characters = 0
        self._count, self._most = 0, most

    def add(self, event: Any) -> None:
        """Keep the fields that are needed of an event; raise ValueError if it cannot be read."""
        if not isinstance(event, dict):
            raise ValueError("it has no list of traceEvents")
        self._count += 1
        if self._count > self._most:
            raise LimitError(f"it has more than {self._most:,} events")
        category, phase = event.get("cat"), event.get("ph")
        if phase == "X":
            if problem := _problem(event):
                raise ValueError(f"an event {problem}")
            self._first = min(self._first, event["ts"])
            if category == "cuda_sync":
                self._add_sync(event)
            elif isinstance(category, str) and category in _GROUPS:
                self.kept[_GROUPS[category]].append(self._raw(event))
        elif category == "fwdbwd" and phase in ("s", "f"):
            time, thread, number = event.get("ts"), event.get("tid"), event.get("id")
            if is_number(time) and _is_id(thread) and _is_id(number):
                self._flows[number][phase] = (time, thread)  # type: ignore[index, assignment]

    def _raw(self, event: dict[str, Any]) -> _Raw:
        arguments = event.get("args", {})
        correlation, sequence = arguments.get("correlation"), arguments.get("Sequence number")
        return _Raw(
            self._shared(event["name"]),
            event["ts"],
            event.get("dur", 0),
            event["tid"],
            correlation if _is_id(correlation) else None,
            sequence if _is_id(sequence) else None,
            bool(arguments.get("Fwd thread id")),
            event["pid"] if _is_id(event.get("pid")) else None,
        )

    def _add_sync(self, event: dict[str, Any]) -> None:
        names = ("correlation", "stream", "wait_on_cuda_event_record_corr_id", "wait_on_stream")
        found = [event.get("args", {}).get(name) for name in names]
        correlation, stream, record, source = (value if _is_id(value) else None for value in found)
        device = event["pid"] if _is_id(event.get("pid")) else None
        if correlation is not None and stream is not None:
            self._syncs.append(_Sync(correlation, device, stream, record, source))

    def _shared(self, name: str) -> str:
        """Return a shared, printable copy of a name, which occurs many times in a trace."""
        name = name[:LONGEST_NAME]
        if name not in self._names:
            self._characters += len(name)
            require_at_most(self._characters, MOST_CHARACTERS, "characters of names")
            self._names[name] = printable(name)
        return self._names[name]

    def _seconds(self, time: float) -> float:
        """Return seconds since the first event: a float of microseconds since boot cannot resolve nanoseconds."""
        return (time - self._first) * US

    def span(self, raw: _Raw) -> Span:
        start = self._seconds(raw.time)
        return Span(raw.name, start, start + raw.duration * US, raw.thread)

    def nests(self, events: list[_Raw]) -> dict[Any, Nest]:
        """Return the events of each thread."""
        links = {
            Moment(self._seconds(link["f"][0]), link["f"][1]): Moment(self._seconds(link["s"][0]), link["s"][1])
            for link in self._flows.values()
            if len(link) == 2
        }
        nests: dict[Any, Nest] = defaultdict(Nest)
        for raw in sorted(events, key=lambda raw: (self._seconds(raw.time), -raw.duration)):
            span = self.span(raw)
            nests[raw.thread].add(
                Event(
                    raw.name,
                    span.start,
                    span.end,
                    own=raw.duration * US,
                    sequence=raw.sequence,
                    is_backward=raw.is_backward,
                    forward=links.get(Moment(span.start, raw.thread)),
                )
            )
        return nests

    def gpu_trace(self, attribute: "_Attribution") -> dict[str, Any]:
        """Return the kernels, copies and fills on a GPU, with the origins of their launches, and the host's calls."""
        numbers: dict[Any, int] = {raw.correlation: number for number, raw in enumerate(self.kept["launches"])}
        numbers.pop(None, None)
        calls = [self._call(raw) for raw in self.kept["launches"]]
        found = []
        for raw in self.kept["works"]:
            number = numbers.get(raw.correlation)
            origin = Origin() if number is None else attribute(Moment(calls[number].start, calls[number].thread))
            stream = (raw.process, raw.thread)
            found.append(Kernel(raw.name, self._seconds(raw.time), raw.duration * US, *origin, stream, number))
        waits = []
        for sync in self._syncs:
            call, record = numbers.get(sync.correlation), numbers.get(sync.record)
            stream = (sync.device, sync.stream)
            if call is not None and record is not None and sync.source is not None:
                waits.append(StreamWait(call, stream, record, (sync.device, sync.source)))
            elif call is not None and sync.stream != NO_STREAM:
                calls[call] = calls[call]._replace(stream=stream)
        return {"kernels": found, "calls": calls, "waits": waits}

    def _call(self, raw: _Raw) -> Call:
        start = self._seconds(raw.time)
        return Call(raw.name, start, start + raw.duration * US, raw.thread, raw.process)


def read_chrome(path: Path, *, is_own: bool = False) -> Trace:
    """Read a trace of torch.profiler; one that this process has just recorded (`is_own`) may have any size."""
    with foreign(path, "a trace of torch.profiler"):
        events = _read_events(path, is_own)
        spans = sorted(map(events.span, events.kept["ranges"]), key=lambda span: span.start)
        phases = [span for span in spans if span.name in PHASES]
        parts = events.nests([raw for raw in events.kept["ranges"] if not _NOT_A_PART.match(raw.name)])
        operators = events.nests(events.kept["operators"])
        attribute = _Attribution(phases, parts, operators)
        on_gpu = bool(events.kept["works"])
        found = events.gpu_trace(attribute) if on_gpu else _self_times(operators, attribute)
        steps = [span for span in spans if span.name.startswith(PROFILER_STEP)]
    if not found["kernels"]:
        raise UserError(f"{str(path)!r} holds no kernels and no operators: was anything run while it was recorded?")
    return Trace(phases=phases, on_gpu=on_gpu, profiler_steps=steps, **found)


def _self_times(operators: dict[Any, Nest], attribute: "_Attribution") -> dict[str, Any]:
    """Return the operators with their self times, and the pieces of time that make up these."""
    kernels: list[Kernel] = []
    pieces: list[Kernel] = []
    for thread, nest in operators.items():
        made = {
            id(op): Kernel(op.name, op.start, op.own, *attribute(Moment(op.start, thread), op), stream=thread)
            for op in nest.events
            if op.own > 0
        }
        kernels += made.values()
        pieces += [
            replace(made[id(op)], start=start, duration=end - start)
            for op, start, end in _outside_of_nested(nest)
            if id(op) in made
        ]
    return {"kernels": kernels, "pieces": pieces}


def _outside_of_nested(nest: Nest) -> Iterator[tuple[Event, float, float]]:
    """Yield the innermost operator of every stretch of a thread, from first to last."""
    reached, around = -math.inf, None
    for event in [*nest.events, None]:
        start = math.inf if event is None else event.start
        while around is not None and around is not (event.parent if event else None):
            if around.end > reached:
                yield around, max(reached, around.start), around.end
                reached = around.end
            around = around.parent
        if around is not None and start > max(reached, around.start):
            yield around, max(reached, around.start), start
            reached = start
        around = event


def _read_events(path: Path, is_own: bool) -> _Events:
    largest = UNLIMITED if is_own else LARGEST_FILE
    events = _Events(UNLIMITED if is_own else limit(MOST_ITEMS))
    try:
        for event in items_of(decompressed(read_input(path, largest), largest), "traceEvents"):
            events.add(event)
    except KeyError:
        raise UserError(f"{str(path)!r} is not a trace of torch.profiler: it has no list of traceEvents") from None
    return events


def _is_id(value: Any) -> bool:
    """Return whether a value can name a thread, a launch or a link."""
    return is_number(value) or (isinstance(value, str) and len(value) < 100)


def _problem(event: dict[str, Any]) -> str | None:
    """Return why an event cannot be read, or None."""
    if not is_number(event.get("ts")):
        return "without a time"
    if not is_number(event.get("dur", 0), 0):
        return f"that lasts {event['dur']!r:.40} microseconds"
    if not isinstance(event.get("name"), str):
        return "without a name"
    if not isinstance(event.get("args", {}), dict):
        return f"whose arguments are {type(event['args']).__name__}"
    return None if _is_id(event.get("tid")) else "without a thread"


class _Attribution:
    """Finds the origin of a launch by its time and thread."""

    def __init__(self, phases: list[Span], parts: dict[Any, Nest], operators: dict[Any, Nest]):
        self._phases = phases
        self._parts = parts
        self._operators = operators
        self._forward: dict[int, Moment] = {}
        """Sequence number of an operator -> its start."""
        for thread, nest in operators.items():
            for event in nest.events:
                # Several operators carry the number of the next autograd node; the last of them creates it.
                if event.sequence is not None and not event.is_backward:
                    self._forward[event.sequence] = Moment(event.start, thread)

    def __call__(self, moment: Moment, operator: Event | None = None) -> Origin:
        phase = phase_at(self._phases, moment.time)
        part = self._part(moment)
        if part is None and phase == "backward":
            part = self._part_of_forward(operator or innermost(self._operators, moment))
        return Origin(phase, part)

    def _part(self, moment: Moment) -> str | None:
        found = innermost(self._parts, moment)
        return found.name if found else None

    def _part_of_forward(self, operator: Event | None) -> str | None:
        by_number = None
        while operator is not None:
            if operator.forward is not None:
                return self._part(operator.forward)
            if operator.is_backward and by_number is None:
                by_number = self._forward.get(operator.sequence)  # type: ignore[arg-type]
            operator = operator.parent
        # Each thread counts its own sequence numbers. Recomputation reuses some of them, so links come first.
        return self._part(by_number) if by_number else None


def innermost(nests: dict[Any, Nest], moment: Moment) -> Event | None:
    """Return the innermost event around a moment, on its thread."""
    return nests[moment.thread].at(moment.time) if moment.thread in nests else None
