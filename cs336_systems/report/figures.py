"""Which pictures the records of a run give: those of its charts."""

from collections.abc import Iterable

from cs336_systems.record import Record
from cs336_systems.report.cells import by_experiment, group
from cs336_systems.report.chart_picture import picture
from cs336_systems.report.charts import charts
from cs336_systems.report.picture import Picture


def pictures(records: Iterable[Record]) -> list[Picture]:
    return [
        picture(chart)
        for experiment, cells in by_experiment(group(records)).items()
        if experiment != "bench"  # a few numbers, read from their table
        for chart in charts(experiment, cells)
    ]
