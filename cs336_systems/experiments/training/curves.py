"""Training runs put together from their cells: curves by step, restarts and saves; smoothing and thinning of curves."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import Any

from cs336_systems.config import recorded_size
from cs336_systems.files import is_number
from cs336_systems.report.cells import CellView, grouped
from cs336_systems.report.document import finite

Curve = dict[int, float]
"""Step -> value, in ascending order of steps."""
MOST_POINTS = 200
"""Maximum points of a curve in a chart."""
WINDOWS = 25
"""A run is divided into this many parts; a smoothed value is the mean or median over the steps of one part ..."""
WIDEST = 1001
"""... but over at most this many steps."""
LONG = 2000
"""Charts of runs with at least this many steps leave out the first hundredth, where the loss falls so steeply that
later changes would be invisible."""
TYPICAL, PARTS = 150, 25
"""Single steps in a chart: the number of equally spaced steps, and the number of parts of the run whose lowest and
highest values are added."""
_TASK = ("vocab_size", "context_length")
"""Fields of a model that change what is predicted, from what."""


@dataclass(frozen=True)
class Run:
    """One training run. For a step that was trained again after a restart, the last values count."""

    name: str
    cells: Sequence[CellView]
    """Cells of the run, in the order of its processes."""

    def curve(self, metric: str) -> Curve:
        return self._joined(lambda cell: _numbers(cell, metric))

    @cached_property
    def losses(self) -> Curve:
        return self.curve("loss")

    @cached_property
    def validation(self) -> Curve:
        return finite_values(self.curve("validation_loss"))

    @cached_property
    def speeds(self) -> Curve:
        """Tokens per second of each step; without evaluations and saves."""
        tokens = self.tokens_per_step
        return {step: tokens / time for step, time in self._step_times.items()} if tokens else {}

    @cached_property
    def utilization(self) -> Curve:
        """MFU of each step, by the peak of all GPUs that the process of the step had."""
        rates = {process: _rate(cells) for process, cells in grouped(self.cells, process_of).items()}

        def shares(cell: CellView) -> list[float]:
            flops, peak = rates[process_of(cell)]
            times = _numbers(cell, "step_time")
            return [flops / time / peak if time > 0 else math.nan for time in times] if flops and peak else []

        return finite_values(self._joined(shares))

    @cached_property
    def memory(self) -> Curve:
        """Peak memory in bytes, at the last step of each stretch."""
        found = {_last_step(cell): value for cell in self.cells for value in _numbers(cell, "peak_memory")}
        return finite_values(dict(sorted(found.items())))

    @cached_property
    def saves(self) -> Curve:
        """Steps that were saved -> seconds that training waited."""
        return finite_values(self.curve("save_time"))

    @cached_property
    def starts(self) -> dict[str, int]:
        """Process -> the step that it began after. All but the first are restarts."""
        processes = grouped(self.cells, process_of)
        return {process: min(map(first_step, cells)) - 1 for process, cells in processes.items()}

    @cached_property
    def restarts(self) -> list[tuple[int, int | None]]:
        """The step of each restart, and the number of ranks if it changed."""
        ranks = self.ranks
        found = []
        for (before, now), step in zip(itertools.pairwise(self.starts), list(self.starts.values())[1:], strict=True):
            changed = ranks.get(now) if before in ranks and ranks.get(now) != ranks[before] else None
            found.append((step, changed))
        return found

    @cached_property
    def ranks(self) -> dict[str, int]:
        """Process -> the number of its ranks, where that was recorded."""
        return {process_of(cell): int(value) for cell in self.cells for value in _numbers(cell, "ranks")}

    @cached_property
    def skipped(self) -> list[int]:
        """Steps with a loss or gradient that is not finite: their update was left out."""
        curves = (self.losses, self.curve("gradient_norm"))
        return sorted({step for curve in curves for step in curve.keys() - finite_values(curve).keys()})

    @cached_property
    def wall_time(self) -> float | None:
        """Seconds in which the run's processes ran, if they recorded it; evaluations and saves included."""
        last: dict[str, float] = {}
        for cell in self.cells:
            for seconds in filter(finite, _numbers(cell, "elapsed_time")):
                last[process_of(cell)] = max(seconds, last.get(process_of(cell), 0.0))
        return sum(last.values()) if last else None

    @cached_property
    def is_finished(self) -> bool:
        """True if the last of `--steps` was trained, or `--steps` was not recorded."""
        return self.planned is None or max(self.losses) >= self.planned

    @property
    def planned(self) -> int | None:
        """Number of steps that the last process was to end with."""
        steps = self.get("steps")
        return int(steps) if is_number(steps) else None

    @property
    def validated_on(self) -> tuple[object, ...]:
        """The settings that two runs must share for their validation losses to be comparable."""
        return (PurePath(str(self.get("data"))), *map(self.get, ("validation_share", "pack", *_TASK)))

    @property
    def trained_on(self) -> tuple[object, ...]:
        """The settings that two runs must share for their training losses at the end to be comparable."""
        return (*self.validated_on, self.get("batch_size"), len(self.losses))

    @cached_property
    def tokens_per_step(self) -> int | None:
        batch, context = self.get("batch_size"), self.get("context_length")
        return batch * context if is_number(batch) and is_number(context) and batch * context > 0 else None

    @property
    def tokens(self) -> int | None:
        """Tokens of the recorded steps."""
        return self.tokens_per_step * len(self.losses) if self.tokens_per_step else None

    @cached_property
    def window(self) -> int:
        """Number of steps in the window of a smoothed value: odd, and 1 in a short run."""
        return min(len(self.losses) // WINDOWS, WIDEST) // 2 * 2 + 1

    @cached_property
    def drawn_from(self) -> int:
        """First step that charts show."""
        steps = list(self.losses)
        return steps[len(steps) // 100 if len(steps) >= LONG else 0]

    def drawn(self, curve: Curve) -> Curve:
        """Return the part of a curve that charts show."""
        return {step: value for step, value in curve.items() if step >= self.drawn_from}

    @cached_property
    def smoothed_losses(self) -> Curve:
        return smoothed(self.losses, self.window, statistics.fmean)

    def get(self, name: str) -> Any:
        """Return a setting as in the last process."""
        return self.settings.get(name)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings of the last process; `size` only if the model has its shape."""
        last = self.cells[-1]
        model = last.config.get("model")
        size = {"size": recorded_size(last.get("size"), model)} if isinstance(model, Mapping) else {}
        return {**last.fields, **size}

    @cached_property
    def _step_times(self) -> Curve:
        return {step: time for step, time in finite_values(self.curve("step_time")).items() if time > 0}

    def _joined(self, values: Callable[[CellView], Sequence[float]]) -> Curve:
        found: Curve = {}
        for cell in self.cells:
            found.update(enumerate(values(cell), start=first_step(cell)))
        return dict(sorted(found.items()))


def runs_of(cells: Iterable[CellView]) -> list[Run]:
    """Return the runs that have losses, in the order in which they began."""
    by_time = sorted((cell for cell in cells if cell.records), key=process_of)
    found = grouped(by_time, lambda cell: str(cell.get("output") or "run"))
    names = _names(list(found))
    runs = [Run(names[output], own) for output, own in found.items()]
    return [run for run in runs if run.losses]


def _names(outputs: Sequence[str]) -> dict[str, str]:
    """Return the last part of each folder's path, or as many parts as make the names of runs differ."""
    parts = {output: [part for part in PurePath(output).parts if part != "/"] or [output] for output in outputs}
    for count in range(1, max(map(len, parts.values()), default=0) + 1):
        names = {output: "/".join(path[-count:]) for output, path in parts.items()}
        if len(set(names.values())) == len(outputs):
            return names
    return {output: output for output in outputs}


def process_of(cell: CellView) -> str:
    """Return the start time of the process that recorded a cell, which identifies it."""
    return cell.environment.utc or ""


def first_step(cell: CellView) -> int:
    found = cell.get("first_step")
    return found if isinstance(found, int) else 1


def _last_step(cell: CellView) -> int:
    return first_step(cell) + max(len(cell.samples("loss")), 1) - 1


def _numbers(cell: CellView, metric: str) -> list[float]:
    return cell.metrics[metric].numbers if metric in cell.metrics else []


def _rate(cells: Sequence[CellView]) -> tuple[float, float]:
    """Return the FLOPs of a step and the peak FLOP/s of a process; 0 if unknown."""
    flops, peak = ([value for cell in cells for value in _numbers(cell, name)] for name in ("flops", "peak_flops"))
    return (*flops, 0.0)[0], (*peak, 0.0)[0]


# -- smoothing and thinning -------------------------------------------------------------------------------------------


def finite_values(curve: Curve) -> Curve:
    values = curve.values()
    if all(map(math.isfinite, values)) and all(map(finite, (min(values, default=0), max(values, default=0)))):
        return curve  # by far the most, and many have 100,000 steps
    return {step: value for step, value in curve.items() if finite(value)}


def smoothed(curve: Curve, width: int, statistic: Callable[[Sequence[float]], float] = statistics.median) -> Curve:
    """Return running medians over `width` steps, or another statistic, at no more steps than a chart can show. The
    window shrinks towards the beginning, where a loss falls fast, to stay symmetric; at the end only its first half is
    used."""
    kept = finite_values(curve)
    steps, values = list(kept), list(kept.values())
    found: Curve = {}
    for place in _places(len(steps)):
        reach = min(width // 2, place)
        found[steps[place]] = statistic(values[place - reach : place + reach + 1])
    return found


def thinned(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """Return the finite values of equally spaced steps, the first and the last among them."""
    kept = finite_values(curve)
    steps = list(kept)
    return {steps[place]: kept[steps[place]] for place in _places(len(steps), most)}


def sampled(curve: Curve) -> Curve:
    """Return all finite values, or if there are too many for a chart, equally spaced ones and extremes from all over
    the run."""
    kept = finite_values(curve)
    steps = list(kept)
    if len(steps) <= MOST_POINTS:
        return kept
    chosen = set(thinned(kept, TYPICAL))
    for part in range(PARTS):
        own = steps[part * len(steps) // PARTS : (part + 1) * len(steps) // PARTS]
        chosen |= {min(own, key=kept.__getitem__), max(own, key=kept.__getitem__)}
    return {step: kept[step] for step in sorted(chosen)}


def difference(curve: Curve, base: Curve) -> Curve:
    """Return the value of one curve minus that of another, at the steps that both have."""
    return {step: value - base[step] for step, value in curve.items() if step in base}


def _places(count: int, most: int = MOST_POINTS) -> list[int]:
    if count <= most:
        return list(range(count))
    return [place * (count - 1) // (most - 1) for place in range(most)]
