"""`--what_if "attention=0.8,optimizer=1.2ms"`: the time of a step if some of its kernels took another time.

A factor scales the kernels; 0 removes them, with the gaps before them and the host's time for them (trace_launches.py).
A time is the new total of one step, gaps between kernels that follow one another included, as a benchmark of the
replacement would measure it. `3.1ms/48` also says in how many kernels: of more recorded ones an even selection stays,
each with the time of those that go after it; where fewer were recorded, the host's time grows by the usual launches.

At the power limit of a GPU a faster kernel does not make the step faster by as much: the same arithmetic takes the same
energy, and the clock falls until the mean power of the step is the limit. `time_at_limit` is the time in which the step
draws the recorded power. It is an estimate of first order, with the powers that were fitted to steps of an H200; how
far the clock moves can only be measured, so it is shown beside the time at unchanged clocks.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from cs336_systems.config import UserError, nearest
from cs336_systems.measure.readers.kernel_classes import ATTENTION, HOST, KINDS, MATMUL, OPTIMIZER
from cs336_systems.measure.readers.trace import PHASES
from cs336_systems.measure.readers.trace_launches import Launches
from cs336_systems.measure.readers.trace_replay import Change, Graph, Node, Replay
from cs336_systems.measure.readers.unprofiled import AS_RECORDED, Unprofiled
from cs336_systems.predict.time.gpu_profile import shipped_profiles

FLAG = "--what_if"
EXAMPLE = 'such as "attention=0.8,optimizer=1.2ms"'
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_VALUE = re.compile(rf"(?P<number>[^a-z]+(?:e[-+]?\d+)?)\s*(?P<unit>{'|'.join(UNITS)})?", re.IGNORECASE)
MOST_KERNELS = 10**7

BUSY = 0.8
"""The power limit may matter if a kernel runs for at least this share of the time."""
CLOCK_BOUND = (MATMUL, ATTENTION)
"""Kinds of kernels whose FLOPs, and so whose energy, do not change when they become faster or slower."""


@dataclass(frozen=True)
class Setting:
    """A new time for the kernels that `name` selects: a factor, or the seconds of one step."""

    name: str
    factor: float | None
    seconds: float | None
    kernels: int | None = None
    """Number of kernels that take these seconds; None: as many as were recorded."""


@dataclass(frozen=True)
class Scenario:
    text: str
    settings: tuple[Setting, ...]


@dataclass(frozen=True)
class Outcome:
    """The predicted times of one step, in seconds."""

    scenario: Scenario
    selected: float
    """Recorded time of the kernels that change."""
    changed: float
    """Time of these kernels in the scenario."""
    step: float
    at_limit: float
    """Time of the step at the power with which it was recorded."""
    idle: float
    """Share of the time without a running kernel: the larger of the values before and after the change."""

    @property
    def may_be_limited(self) -> bool:
        """Return whether a kernel runs nearly all the time, before the change and after it."""
        return self.idle <= 1 - BUSY


def parse_scenario(text: str) -> Scenario:
    """Return the scenario of a flag's value, or raise UserError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise UserError(f"{FLAG} {text!r} changes nothing; name kernels and a factor or a time, {EXAMPLE}")
    return Scenario(text.strip(), tuple(_setting(part) for part in parts))


def _setting(part: str) -> Setting:
    name, equals, value = (word.strip() for word in part.rpartition("="))
    if not equals or not name:
        raise UserError(f"{FLAG} {part!r} is not of the form NAME=FACTOR or NAME=TIME, {EXAMPLE}")
    time, slash, count = (word.strip() for word in value.partition("/"))
    number, unit = _number_and_unit(time)
    if not (math.isfinite(number) and number >= 0):
        raise UserError(f"{FLAG} {part!r}: {time!r} is neither a factor from 0 on nor a time in s, ms or us, {EXAMPLE}")
    if unit is None and slash:
        raise UserError(f"{FLAG} {part!r}: a number of kernels belongs to a time, such as {name}=3.1ms/48")
    if unit is None:
        return Setting(name, number, None)
    if name == HOST:
        raise UserError(f"{FLAG} {part!r}: the host's time is scaled, not set; give a factor, such as {HOST}=0.5")
    return Setting(name, None, number * UNITS[unit.lower()], _count(part, count) if slash else None)


def _count(part: str, count: str) -> int:
    kernels = int(count) if count.isascii() and count.isdigit() and len(count) <= len(str(MOST_KERNELS)) else 0
    if not 1 <= kernels <= MOST_KERNELS:
        raise UserError(f"{FLAG} {part!r}: {count!r} is not a number of kernels from 1 on, such as 3.1ms/48")
    return kernels


def parse_time(text: str) -> float | None:
    """Return the seconds of a positive time with its unit; None where the text is no such time."""
    number, unit = _number_and_unit(text.strip())
    seconds = number * UNITS[unit.lower()] if unit else math.nan
    return seconds if 0 < seconds < math.inf else None


def _number_and_unit(text: str) -> tuple[float, str | None]:
    """Return a number, NaN where there is none, and the unit after it."""
    found = _VALUE.fullmatch(text)
    try:
        return float(found["number"] if found else ""), found["unit"] if found else None
    except ValueError:
        return math.nan, None


def outcome(graph: Graph, recorded: Replay, scenario: Scenario, factors: Unprofiled = AS_RECORDED) -> Outcome:
    """Return the step of a scenario, with the factors for a run without the profiler; raise UserError if the scenario
    selects no kernel of the trace."""
    scenario = _as_traced(scenario, factors)
    change = change_of(graph, scenario)
    if factors.host != 1:
        recorded = graph.replay(Change(host=factors.host))
    replayed = graph.replay(dataclasses.replace(change, host=change.host * factors.host))
    selected = [number for number in graph.measured_kernels if number in change.seconds]
    steps = graph.steps
    return Outcome(
        scenario,
        factors.scale * sum(graph.nodes[number].own for number in selected) / steps,
        factors.scale * sum(change.seconds[number] for number in selected) / steps,
        factors.scale * replayed.span / steps,
        factors.scale * time_at_limit(graph, recorded, replayed, _in_place(graph, scenario, change)) / steps,
        max(map(_idle, (recorded, replayed))),
    )


def _as_traced(scenario: Scenario, factors: Unprofiled) -> Scenario:
    """Convert the times of a scenario, which are those without the profiler, to times as traced."""
    settings = (
        setting if setting.seconds is None else dataclasses.replace(setting, seconds=setting.seconds / factors.scale)
        for setting in scenario.settings
    )
    return Scenario(scenario.text, tuple(settings))


def _in_place(graph: Graph, scenario: Scenario, change: Change) -> Change:
    """Return the change without changing the number of kernels: each keeps its share of the FLOPs."""
    if all(setting.kernels is None for setting in scenario.settings):
        return change
    settings = tuple(dataclasses.replace(setting, kernels=None) for setting in scenario.settings)
    return change_of(graph, Scenario(scenario.text, settings))


class Selection(NamedTuple):
    """Kernels of one step."""

    seconds: float
    """Total time of the kernels, with the usual gaps between consecutive ones."""
    kernels: int


def selections(graph: Graph, names: Iterable[str]) -> list[Selection]:
    """Return time and number of the kernels that each name selects, without those of the names before it; raise
    UserError where a name selects none."""
    taken: set[int] = set()
    selected = []
    for name in names:
        found = graph.measured.intersection(_selected(graph, name)) - taken
        gaps = sum(_gap(graph, number) for number in _following(graph, found)) / graph.steps
        selected.append(Selection(_seconds(graph, found) + gaps, round(len(found) / graph.steps)))
        taken |= found
    return selected


def _gap(graph: Graph, number: int) -> float:
    """Return the usual gap before a kernel that follows another one on its stream."""
    nodes = graph.nodes
    earlier = ((nodes[point >> 1], lag) for point, lag in nodes[number].after)
    lags = [lag for other, lag in earlier if other.on_gpu and other.place == nodes[number].place]
    return max([0.0, *lags])


def _idle(replay: Replay) -> float:
    """Return the share of the time without a running kernel of a GPU."""
    if not replay.graph.on_gpu or not replay.span:
        return 1.0
    return 1 - replay.busy() / replay.span


def change_of(graph: Graph, scenario: Scenario) -> Change:
    """Return the new times of all kernels; one that several settings select takes the first."""
    launches = Launches(graph)
    seconds: dict[int, float] = {}
    joined: set[int] = set()
    removed: set[int] = set()
    host = 1.0
    for setting in scenario.settings:
        if setting.name == HOST:
            host = setting.factor if setting.factor is not None else 1.0
            continue
        found = [number for number in _selected(graph, setting.name) if number not in seconds]
        factor = _factor(graph, setting, found)
        new = {number: graph.nodes[number].own * factor for number in found}
        if factor == 0:
            removed.update(found)
        elif setting.seconds is not None:
            joined.update(_following(graph, found))
        if factor != 0 and setting.kernels is not None:
            kernels = [number for number in found if number in graph.measured]
            for kept, *others in _groups(kernels, setting.kernels * graph.steps):
                new |= {kept: new[kept] + sum(new[other] for other in others), **dict.fromkeys(others, 0.0)}
                removed.update(others)
            seconds |= _longer_launches(launches, kernels, setting.kernels * graph.steps / len(kernels))
        seconds |= new
    calls = {call for launch in launches.unused(removed) for call in launches.calls_for(launch)}
    seconds |= dict.fromkeys(calls, 0.0)
    return Change(seconds, frozenset(joined | removed), frozenset(calls), host)


def _groups(kernels: list[int], count: int) -> list[list[int]]:
    """Return kernels in `count` groups of neighbours, or each alone where there are fewer."""
    count = min(count, len(kernels))
    bounds = [len(kernels) * number // count for number in range(count + 1)]
    return [kernels[first:end] for first, end in pairwise(bounds)]


def _longer_launches(launches: Launches, kernels: list[int], times: float) -> dict[int, float]:
    """Return the new times of the launches of kernels, each of which stands for `times` kernels. Those of a CUDA graph
    cost the host nothing."""
    more = max(0.0, times - 1) * launches.usual_seconds
    found = {launches.own_launch(number) for number in kernels} if more else set()
    return {launch: launches.graph.nodes[launch].own + more for launch in found if launch is not None}


def _selected(graph: Graph, name: str) -> list[int]:
    """Return the kernels of a kind, phase or part of the model, or those whose names match a pattern; `+` joins
    selections."""
    kernels = [number for number, node in enumerate(graph.nodes) if node.kernel is not None]
    chosen: set[int] = set()
    for part in (word.strip() for word in name.split("+")):
        fits = _selector(part)
        found = [number for number in kernels if fits(graph.nodes[number])]
        if not found and (part not in KINDS or part == name):
            raise _no_such_kernel(part)
        chosen.update(found)
    return [number for number in kernels if number in chosen]


def _no_such_kernel(name: str) -> UserError:
    known = [*KINDS, *PHASES, HOST]
    return UserError(
        f"{FLAG} {name!r}{'' if name in known else nearest(name, known)}: the trace has no such kernel; name a kind "
        f"({', '.join(KINDS)}), a phase ({', '.join(PHASES)}), {HOST}, or a pattern of kernel names such as 'flash_*'"
    )


def _selector(name: str) -> Callable[[Node], bool]:
    def in_part(node: Node) -> bool:
        part = node.kernel.part if node.kernel else None
        return part is not None and (part == name or part.startswith(f"{name} "))

    def in_phase(node: Node) -> bool:
        return node.kernel is not None and node.kernel.phase == name

    if name == OPTIMIZER:
        return lambda node: node.kind == name or in_phase(node)
    if name in KINDS:
        return lambda node: node.kind == name or in_part(node)
    if name in PHASES:
        return in_phase
    matches = cache(lambda kernel_name: fnmatchcase(kernel_name, name))
    return lambda node: in_part(node) or matches(node.name)


def _factor(graph: Graph, setting: Setting, found: list[int]) -> float:
    if setting.factor is not None:
        return setting.factor
    total = _seconds(graph, found)
    if total <= 0:
        raise UserError(f"{FLAG} {setting.name!r}: these kernels take no time in a step, so no time can be set")
    return (setting.seconds or 0.0) / total


def _seconds(graph: Graph, found: Iterable[int]) -> float:
    """Return what some kernels take in one step."""
    return sum(graph.nodes[number].own for number in graph.measured.intersection(found)) / graph.steps


def _following(graph: Graph, found: Iterable[int]) -> Iterator[int]:
    """Yield the kernels that come directly after another one of them on a stream."""
    chosen = set(found)
    for number in chosen:
        node = graph.nodes[number]
        before = (dependency.point >> 1 for dependency in node.after)
        if any(other in chosen and graph.nodes[other].place == node.place for other in before):
            yield number


class _Power(NamedTuple):
    """Dynamic power, relative to a GPU at its limit, of memory-bound kernels, and maximum of matmuls and attention."""

    memory_bound: float
    most: float
    """Power of matmuls at the highest clock and rate."""


@cache
def _power() -> _Power:
    profile = shipped_profiles()["h200"]
    assert profile.power is not None
    at_limit = profile.power.limit - profile.power.static_after(math.inf)
    memory, arithmetic = profile.power.per_byte * profile.bandwidth, profile.power.per_flop[MATMUL] * profile.peak
    return _Power(memory / at_limit, arithmetic / at_limit)


def time_at_limit(graph: Graph, recorded: Replay, replayed: Replay, change: Change) -> float:
    """Return the seconds in which the changed steps draw the mean power of the recorded ones."""
    power = _power()
    before = after = 0.0
    for number in graph.measured_kernels:
        node = graph.nodes[number]
        new = change.seconds.get(number, node.own)
        if node.kind in CLOCK_BOUND:
            before, after = before + node.own, after + min(node.own, power.most * new)
        else:
            before, after = before + power.memory_bound * node.own, after + power.memory_bound * new
    return recorded.span * after / before if before > 0 else replayed.span
