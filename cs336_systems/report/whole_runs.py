"""Joins the cells of a training run, one for each stretch of its log, into one cell that can be compared.

A joined cell has the time of every step, and the losses at the end of the run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from cs336_systems.record import CELL_TIME, Record, cell_key
from cs336_systems.report.cells import CellView, grouped

OF_A_STRETCH = ("first_step", "started", "blocks")
"""Fields that differ between the cells of one run."""
WHERE = ("output", "resume_from")
"""Fields that say where a run's files are, which is not part of the work."""
AT_END = ("final_loss", "final_validation_loss")
"""Metrics of a joined cell that are compared beside the time of its steps."""
WINDOWS, LEAST_STEPS = 25, 10
"""The loss at the end is that of the last 1 / 25 of the steps, and of this many steps at least."""


def joined_runs(cells: Sequence[CellView]) -> list[CellView]:
    """Return the cells with each training run as one cell; other cells as they are."""
    stretches = [cell for cell in cells if is_stretch(cell)]
    others = [cell for cell in cells if not is_stretch(cell)]
    runs = grouped(stretches, lambda cell: cell_key(_work(cell)))
    return others + [_joined(found) for found in runs.values()]


def is_stretch(cell: CellView) -> bool:
    """Return True for a cell of `cs336 train`."""
    return cell.experiment == "train" and "first_step" in cell.config and CELL_TIME not in cell.metrics


def _work(cell: CellView) -> dict[str, Any]:
    """Return the configuration of the whole run. Elsewhere `warmup_steps` are steps before a measurement, which are not
    part of the work; here they belong to the learning rate."""
    renamed = {"warmup_steps": "learning_rate_warmup"}
    work = {name: value for name, value in cell.config.items() if name not in (*OF_A_STRETCH, *WHERE)}
    return {renamed.get(name, name): value for name, value in work.items()}


def _joined(stretches: Sequence[CellView]) -> CellView:
    config, first = _work(stretches[0]), stretches[0].records[0]
    losses, count = _by_step(stretches, "loss"), len(_by_step(stretches, "step_time"))
    last = losses[-max(LEAST_STEPS, count // WINDOWS) :]
    samples = {
        "step_time": ("s", _by_step(stretches, "step_time")),
        "peak_memory": ("B", [max(found)] if (found := _numbers(stretches, "peak_memory")) else []),
        AT_END[0]: ("1", last),
        AT_END[1]: ("1", _by_step(stretches, "validation_loss")[-1:]),
        CELL_TIME: ("s", [0.0]),
    }
    own = replace(first, config=config, status="ok", variant="")
    return CellView("train", config, {name: _record(own, name, *found) for name, found in samples.items() if found[1]})


def _record(own: Record, metric: str, unit: str, values: Iterable[float]) -> Record:
    return replace(own, metric=metric, unit=unit, samples=tuple(values))


def _by_step(stretches: Sequence[CellView], metric: str) -> list[float]:
    """Return the values of a metric in the order of steps; of a step that was trained twice the last counts."""
    found: dict[int, float] = {}
    for cell in stretches:
        first = cell.config["first_step"]
        values = cell.metrics[metric].numbers if metric in cell.metrics else []
        found |= enumerate(values, first if isinstance(first, int) else 1)
    return [found[step] for step in sorted(found)]


def _numbers(stretches: Sequence[CellView], metric: str) -> list[float]:
    return [value for cell in stretches if metric in cell.metrics for value in cell.metrics[metric].numbers]
