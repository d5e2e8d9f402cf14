"""Which pictures the records of a run give: those of its charts."""

from collections.abc import Iterable

from cs336_systems.record import Record
from cs336_systems.report.cells import CellView, group
from cs336_systems.report.chart_picture import picture
from cs336_systems.report.charts import charts
from cs336_systems.report.picture import Picture


def pictures(records: Iterable[Record]) -> list[Picture]:
    by_experiment: dict[str, list[CellView]] = {}
    for cell in group(records):
        if cell.experiment != "bench":  # a few numbers, read from their table
            by_experiment.setdefault(cell.experiment, []).append(cell)
    return [picture(chart) for experiment, cells in by_experiment.items() for chart in charts(experiment, cells)]
