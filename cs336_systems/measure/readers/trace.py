"""A trace of kernels, whoever recorded it: each with the phase and the part of the model that launched it.

`read_chrome` reads what torch.profiler exports, `nsys.read_nsys` what Nsight Systems does. No torch here: a trace can
be read on another machine.

How a kernel finds its phase. The host launches kernels from inside ranges (`forward`, `backward`, ...), and a kernel
carries the number of its launch. Backward's kernels are launched by another thread, but while the range is open.

How it finds its part (`attention softmax`, ...). In forward by the range around the launch. In backward there is none:
the profiler ties the operator that launched it to the forward operator whose gradient it computes, by an arrow and by a
number that both carry, and that one lay in a range. Without a GPU the operators themselves stand in for kernels, each
with the time it spent in no other.
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
from typing import Any

from cs336_systems.config import UserError
from cs336_systems.measure.readers.kernel_classes import UNKNOWN, classify

PHASES = ("forward", "loss", "backward", "sync", "optimizer")
WHOLE = "step"
"""Stands in for a phase where a trace has none: somebody else's, without our ranges."""
US = 1e-6
NAMES_KEPT = 12
"""Kernels of a phase that are named in the records; the others are in its kinds' sums."""
HALF_NS = 5e-10
"""Profilers count nanoseconds: what is nearer than this is the same moment, rounded."""


@dataclass(frozen=True)
class Kernel:
    """Times in seconds, on a clock that all of a trace share."""

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
    """A range of the host."""

    name: str
    start: float
    end: float
    thread: Any = None

    def holds(self, time: float) -> bool:
        return self.start <= time < self.end


@dataclass(frozen=True)
class Row:
    """All kernels of one name, as `nsys stats` shows them."""

    name: str
    durations: list[float]

    @property
    def total(self) -> float:
        return sum(self.durations)

    @property
    def median(self) -> float:
        return statistics.median(self.durations)


@dataclass(frozen=True)
class Trace:
    kernels: list[Kernel]
    phases: list[Span]
    on_gpu: bool
    """Else the kernels are operators of the host."""

    @property
    def steps(self) -> int:
        """How many were traced: every step has each of its phases once."""
        names = [span.name for span in self.phases]
        return max((names.count(name) for name in PHASES), default=0) or 1

    def of(self, phase: str | None) -> list[Kernel]:
        return [kernel for kernel in self.kernels if kernel.phase == phase]

    def table(self, phase: str | None = None) -> list[Row]:
        """Of one phase, or of all; the name that took most first."""
        durations: dict[str, list[float]] = defaultdict(list)
        for kernel in self.of(phase) if phase else self.kernels:
            durations[kernel.name].append(kernel.duration)
        return sorted((Row(name, found) for name, found in durations.items()), key=lambda row: -row.total)

    def by_kind(self, phase: str | None = None) -> dict[str, tuple[float, int]]:
        """Kind -> seconds and number, of one phase or of all."""
        found: dict[str, tuple[float, int]] = {}
        for kernel in self.of(phase) if phase else self.kernels:
            seconds, count = found.get(kernel.kind, (0.0, 0))
            found[kernel.kind] = seconds + kernel.duration, count + 1
        return found

    def by_part(self, phase: str) -> dict[tuple[str, str], float]:
        """(part, kind) -> seconds."""
        found: dict[tuple[str, str], float] = defaultdict(float)
        for kernel in self.of(phase):
            if kernel.part:
                found[kernel.part, kernel.kind] += kernel.duration
        return dict(found)

    def busy(self, phase: str) -> float:
        """Seconds in which at least one of the phase's kernels ran."""
        total, reached = 0.0, float("-inf")
        for kernel in sorted(self.of(phase), key=lambda kernel: kernel.start):
            total += max(0.0, kernel.end - max(kernel.start, reached))
            reached = max(reached, kernel.end)
        return total


def phase_at(phases: Sequence[Span], time: float) -> str | None:
    """`phases` do not overlap, and are sorted."""
    index = bisect_right(phases, time, key=lambda span: span.start) - 1
    return phases[index].name if index >= 0 and phases[index].holds(time) else None


def trace_metrics(trace: Trace) -> list[list[Any]]:
    """[metric, unit, samples] rows, of one step. Tables are samples row by row:

    - kind_table: kind, kernels, seconds
    - part_table: part of the model, kind, seconds
    - kernel_table: name, kernels, total, median, least and greatest seconds; those that took most
    """
    steps = trace.steps
    seconds = {
        "kernel_time": sum(kernel.duration for kernel in trace.kernels),
        "unknown_kernel_time": sum(kernel.duration for kernel in trace.kernels if kernel.kind == UNKNOWN),
        "kernel_time_outside_phases": sum(kernel.duration for kernel in trace.of(None)),
    }
    rows: list[list[Any]] = [[name, "s", [total / steps]] for name, total in seconds.items()]
    rows.append(["kernels_on_gpu", "1", [int(trace.on_gpu)]])
    for phase in (*PHASES, WHOLE):
        if not trace.of(phase):
            continue
        kinds = [[kind, n / steps, total / steps] for kind, (total, n) in trace.by_kind(phase).items()]
        parts = [[part, kind, total / steps] for (part, kind), total in trace.by_part(phase).items()]
        names = [
            [
                row.name,
                len(row.durations) / steps,
                row.total / steps,
                row.median,
                min(row.durations),
                max(row.durations),
            ]
            for row in trace.table(phase)[:NAMES_KEPT]
        ]
        rows.append([f"busy_time: {phase}", "s", [trace.busy(phase) / steps]])
        for table, found in (("kind", kinds), ("part", parts), ("kernel", names)):
            if found:
                rows.append([f"{table}_table: {phase}", "", [value for row in found for value in row]])
    return rows


# -- traces of torch.profiler -----------------------------------------------------------------------------------------

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_NOT_A_PART = re.compile(rf"({'|'.join(PHASES)})$|ProfilerStep|Optimizer\.")
"""Ranges that say nothing of the model."""


_Moment = tuple[float, Any]
"""A time and a thread."""


@dataclass
class _Event:
    """Something of the host that took time: an operator, or a range that somebody named."""

    name: str
    start: float
    end: float
    own: float
    """Seconds that it spent in no other of its kind."""
    sequence: int | None
    is_backward: bool
    forward: "_Moment | None"
    """When and where the operator began whose gradient this computes, if an arrow says so."""
    parent: "_Event | None" = None


class _Nest:
    """Events of a kind on one thread: they lie inside one another or apart."""

    def __init__(self) -> None:
        self.events: list[_Event] = []

    def add(self, event: _Event) -> None:
        """In the order of their starts, the longer first."""
        around = self.events[-1] if self.events else None
        while around is not None and around.end <= event.start + HALF_NS:
            around = around.parent
        if around is not None:
            event.parent = around
            around.own -= event.own
        self.events.append(event)

    def at(self, time: float) -> _Event | None:
        """The innermost around a moment."""
        index = bisect_right(self.events, time, key=lambda event: event.start) - 1
        found = self.events[index] if index >= 0 else None
        while found is not None and found.end < time:
            found = found.parent
        return found


def read_chrome(path: Path) -> Trace:
    events, arrows = _chrome_events(path)
    spans = sorted(map(_span, _of(events, "user_annotation")), key=lambda span: span.start)
    phases = [span for span in spans if span.name in PHASES]
    named = [event for event in _of(events, "user_annotation") if not _NOT_A_PART.match(event["name"])]
    operators = _nests(_of(events, "cpu_op"), arrows)
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
            Kernel(op.name, op.start, op.own, *attribute(op.start, thread, op))
            for thread, nest in operators.items()
            for op in nest.events
            if op.own > 0
        ]
    if not kernels:
        raise UserError(f"{str(path)!r} holds no kernels and no operators: was anything run while it was recorded?")
    return Trace(kernels, phases, bool(works))


def _chrome_events(path: Path) -> tuple[list[dict[str, Any]], dict[_Moment, _Moment]]:
    """What took time, and the arrows from operators of backward to those of forward; times in seconds since the first.

    (A float of microseconds since the machine was started cannot tell nanoseconds apart.)
    """
    found = _trace_events(path)
    events = [event for event in found if event.get("ph") == "X"]
    if problem := next(filter(None, map(_problem, events)), None):
        raise UserError(f"{str(path)!r} is not a trace of torch.profiler: an event {problem}")
    first = min((event["ts"] for event in events), default=0.0)
    for event in events:
        event["start"], event["duration"] = (event["ts"] - first) * US, event.get("dur", 0) * US
    ends: dict[Any, dict[str, _Moment]] = defaultdict(dict)
    for event in _of(found, "fwdbwd"):
        if event.get("ph") in ("s", "f") and isinstance(event.get("ts"), int | float):
            ends[event.get("id")][event["ph"]] = (event["ts"] - first) * US, event.get("tid")
    return events, {arrow["f"]: arrow["s"] for arrow in ends.values() if len(arrow) == 2}


def _problem(event: dict[str, Any]) -> str | None:
    """What keeps it from being read."""
    numbers = (event.get("ts"), event.get("dur", 0))
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        return "without a time"
    if not isinstance(event.get("name"), str):
        return "without a name"
    if not isinstance(event.get("args", {}), dict):
        return f"whose arguments are {type(event['args']).__name__}"
    return None if "tid" in event else "without a thread"


def _trace_events(path: Path) -> list[dict[str, Any]]:
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        document = json.loads(data)
    except OSError as error:
        if error.strerror:
            raise UserError(f"cannot read {str(path)!r}: {error.strerror}") from None
        raise UserError(f"{str(path)!r} is cut off: {error}") from None
    except (EOFError, zlib.error):
        raise UserError(f"{str(path)!r} is cut off; record it again") from None
    except ValueError as error:
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
    where = (None, None) if launch is None else attribute(launch["start"], launch["tid"])
    return Kernel(event["name"], event["start"], event["duration"], *where)


def _nests(events: list[dict[str, Any]], arrows: dict[_Moment, _Moment] | None = None) -> dict[Any, _Nest]:
    """Thread -> its events."""
    nests: dict[Any, _Nest] = defaultdict(_Nest)
    for event in sorted(events, key=lambda event: (event["start"], -event["duration"])):
        span, arguments = _span(event), event.get("args", {})
        nests[span.thread].add(
            _Event(
                span.name,
                span.start,
                span.end,
                own=event["duration"],
                sequence=arguments.get("Sequence number"),
                is_backward=bool(arguments.get("Fwd thread id")),
                forward=(arrows or {}).get((span.start, span.thread)),
            )
        )
    return nests


class _Attribution:
    """(phase, part) of what the host launched at some time from some thread."""

    def __init__(self, phases: list[Span], parts: dict[Any, _Nest], operators: dict[Any, _Nest]):
        self._phases = phases
        self._parts = parts
        self._operators = operators
        self._forward: dict[int, _Moment] = {}
        """Number of an operator -> when it began, and on which thread."""
        for thread, nest in operators.items():
            for event in nest.events:
                # Several carry the number of the next node; the last of them made it.
                if event.sequence is not None and not event.is_backward:
                    self._forward[event.sequence] = event.start, thread

    def __call__(self, time: float, thread: Any, operator: _Event | None = None) -> tuple[str | None, str | None]:
        phase = phase_at(self._phases, time)
        part = self._part(time, thread)
        if part is None and phase == "backward":
            part = self._part_of_forward(operator or self._innermost(time, thread))
        return phase, part

    def _part(self, time: float, thread: Any) -> str | None:
        found = self._parts[thread].at(time) if thread in self._parts else None
        return found.name if found else None

    def _innermost(self, time: float, thread: Any) -> _Event | None:
        return self._operators[thread].at(time) if thread in self._operators else None

    def _part_of_forward(self, operator: _Event | None) -> str | None:
        by_number = None
        while operator is not None:
            if operator.forward is not None:
                return self._part(*operator.forward)
            if operator.is_backward and by_number is None:
                by_number = self._forward.get(operator.sequence)  # type: ignore[arg-type]
            operator = operator.parent
        # Numbers are counted on each thread: where some are used twice, as by recomputation, arrows are safer.
        return self._part(*by_number) if by_number else None
