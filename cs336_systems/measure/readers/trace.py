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

import gzip
import json
import math
import re
import statistics
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cs336_systems.config import UserError
from cs336_systems.files import read_input
from cs336_systems.measure.readers.kernel_classes import UNKNOWN, classify
from cs336_systems.measure.readers.recorded_tables import KernelRow, KindRow, PartRow, flatten
from cs336_systems.record import Metric

PHASES = ("forward", "loss", "backward", "sync", "optimizer")
WHOLE = "step"
"""The phase of all kernels in a trace without this package's ranges."""
US = 1e-6
NAMES_KEPT = 12
"""Kernel names that are recorded for each phase; the sums by kind include all kernels."""
HALF_NS = 5e-10
"""Profilers count nanoseconds: times closer than this are equal after rounding."""


class Origin(NamedTuple):
    """The phase and the part of the model that launched a kernel, as far as they are known."""

    phase: str | None = None
    part: str | None = None


@dataclass(frozen=True)
class Kernel:
    """A kernel, with times in seconds on the trace's clock."""

    name: str
    start: float
    duration: float
    phase: str | None = None
    part: str | None = None

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
    """Otherwise the kernels are operators of the host."""

    @property
    def steps(self) -> int:
        """The number of traced steps; every step has each of its phases once."""
        names = [span.name for span in self.phases]
        return max((names.count(name) for name in PHASES), default=0) or 1

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

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_NOT_A_PART = re.compile(rf"({'|'.join(PHASES)})$|ProfilerStep|Optimizer\.")
"""Ranges that do not name a part of the model."""


class Moment(NamedTuple):
    """A time on a thread of the host."""

    time: float
    thread: Any


@dataclass
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
            event.parent = around
            around.own -= event.own
        self.events.append(event)

    def at(self, time: float) -> Event | None:
        """Return the innermost event around `time`."""
        index = bisect_right(self.events, time, key=lambda event: event.start) - 1
        found = self.events[index] if index >= 0 else None
        while found is not None and found.end < time:
            found = found.parent
        return found


def read_chrome(path: Path) -> Trace:
    events, links = _chrome_events(path)
    spans = sorted(map(_span, _of(events, "user_annotation")), key=lambda span: span.start)
    phases = [span for span in spans if span.name in PHASES]
    named = [event for event in _of(events, "user_annotation") if not _NOT_A_PART.match(event["name"])]
    operators = _nests(_of(events, "cpu_op"), links)
    attribute = _Attribution(phases, _nests(named), operators)
    works = _of(events, *_ON_GPU)
    if works:
        launches = {
            event["args"]["correlation"]: event
            for event in _of(events, *_LAUNCHES)
            if "correlation" in event.get("args", {})
        }
        kernels = [_gpu_kernel(event, launches, attribute) for event in works]
    else:
        kernels = [
            Kernel(op.name, op.start, op.own, *attribute(Moment(op.start, thread), op))
            for thread, nest in operators.items()
            for op in nest.events
            if op.own > 0
        ]
    if not kernels:
        raise UserError(f"{str(path)!r} holds no kernels and no operators: was anything run while it was recorded?")
    return Trace(kernels, phases, bool(works))


def _chrome_events(path: Path) -> tuple[list[dict[str, Any]], dict[Moment, Moment]]:
    """Return the events, and the links from operators of backward to those of forward; seconds since the first event.

    (A float of microseconds since boot cannot resolve nanoseconds.)
    """
    found = _trace_events(path)
    events = [event for event in found if event.get("ph") == "X"]
    if problem := next(filter(None, map(_problem, events)), None):
        raise UserError(f"{str(path)!r} is not a trace of torch.profiler: an event {problem}")
    first = min((event["ts"] for event in events), default=0.0)
    for event in events:
        event["start"], event["duration"] = (event["ts"] - first) * US, event.get("dur", 0) * US
    ends: dict[Any, dict[str, Moment]] = defaultdict(dict)
    for event in _of(found, "fwdbwd"):
        if event.get("ph") in ("s", "f") and isinstance(event.get("ts"), int | float):
            ends[event.get("id")][event["ph"]] = Moment((event["ts"] - first) * US, event.get("tid"))
    return events, {link["f"]: link["s"] for link in ends.values() if len(link) == 2}


def _problem(event: dict[str, Any]) -> str | None:
    """Return why an event cannot be read, or None."""
    numbers = (event.get("ts"), event.get("dur", 0))
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        return "without a time"
    if not isinstance(event.get("name"), str):
        return "without a name"
    if not isinstance(event.get("args", {}), dict):
        return f"whose arguments are {type(event['args']).__name__}"
    return None if "tid" in event else "without a thread"


def _trace_events(path: Path) -> list[dict[str, Any]]:
    data = read_input(path)
    try:
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        document = json.loads(data)
    except gzip.BadGzipFile as error:
        raise UserError(f"{str(path)!r} is cut off: {error}") from None
    except (EOFError, zlib.error):
        raise UserError(f"{str(path)!r} is cut off; record it again") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{str(path)!r} is not a trace of torch.profiler, or is cut off: {error}") from None
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise UserError(f"{str(path)!r} is not a trace of torch.profiler: it has no list of traceEvents")
    return events


def _of(events: Iterable[dict[str, Any]], *categories: str) -> list[dict[str, Any]]:
    return [event for event in events if event.get("cat") in categories]


def _span(event: dict[str, Any]) -> Span:
    return Span(event["name"], event["start"], event["start"] + event["duration"], event["tid"])


def _gpu_kernel(event: dict[str, Any], launches: dict[Any, dict[str, Any]], attribute: "_Attribution") -> Kernel:
    launch = launches.get(event.get("args", {}).get("correlation"))
    origin = Origin() if launch is None else attribute(Moment(launch["start"], launch["tid"]))
    return Kernel(event["name"], event["start"], event["duration"], *origin)


def _nests(events: list[dict[str, Any]], links: dict[Moment, Moment] | None = None) -> dict[Any, Nest]:
    """Return the events of each thread."""
    nests: dict[Any, Nest] = defaultdict(Nest)
    for event in sorted(events, key=lambda event: (event["start"], -event["duration"])):
        span, arguments = _span(event), event.get("args", {})
        nests[span.thread].add(
            Event(
                span.name,
                span.start,
                span.end,
                own=event["duration"],
                sequence=arguments.get("Sequence number"),
                is_backward=bool(arguments.get("Fwd thread id")),
                forward=(links or {}).get(Moment(span.start, span.thread)),
            )
        )
    return nests


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
