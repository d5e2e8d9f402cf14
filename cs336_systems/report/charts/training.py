"""Charts of what `cs336 train` recorded."""

from collections.abc import Sequence

from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Chart, Point, Series, Text


def _train(cells: Sequence[CellView]) -> list[Chart]:
    """Loss curves, a line for each run; a run's cells are the stretches between two lines of its log."""
    runs: dict[str, dict[int, float]] = {}
    for cell in cells:
        record = cell.metrics.get("loss")
        if record is not None:
            first = cell.get("first_step") or 1
            runs.setdefault(_run_name(cell), {}).update({first + i: v for i, v in enumerate(record.numbers)})
    series = [
        Series(Text(name), [Point(step, value) for step, value in sorted(curve.items())])
        for name, curve in runs.items()
    ]
    title, axes = Text("Loss curves", "损失曲线"), (Text("step", "步"), Text("loss", "损失"))
    return [Chart("", title, "lines", *axes, series, log_y=True)]


def _run_name(cell: CellView) -> str:
    return str(cell.get("output") or "run").rstrip("/").rsplit("/", 1)[-1]


MAKERS = {"train": _train}
