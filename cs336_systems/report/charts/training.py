"""Charts of what `cs336 train` recorded."""

from collections.abc import Sequence

from cs336_systems.report.cells import CellView, loss_curves
from cs336_systems.report.document import Chart, Point, Series
from cs336_systems.text import Text


def _train(cells: Sequence[CellView]) -> list[Chart]:
    """Loss curves, a line for each run."""
    series = [
        Series(Text(name), [Point(step, value) for step, value in curve.items()])
        for name, curve in loss_curves(cells).items()
    ]
    title, axes = Text("Loss curves", "损失曲线"), (Text("step", "步"), Text("loss", "损失"))
    return [Chart("", title, "lines", *axes, series, log_y=True)]


MAKERS = {"train": _train}
