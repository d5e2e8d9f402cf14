"""The pictures that the records of a run give: those of its charts."""

from collections.abc import Iterable

from cs336_systems.record import Record
from cs336_systems.report.cells import by_experiment, group
from cs336_systems.report.chart_picture import picture
from cs336_systems.report.picture import Picture
from cs336_systems.report.presentation import Catalogue, presentation_of
from cs336_systems.report.sections import charts_of


def pictures(records: Iterable[Record], catalogue: Catalogue) -> list[Picture]:
    return [
        picture(chart)
        for name, cells in by_experiment(group(records)).items()
        if presentation_of(name, catalogue).charts_after_run
        for chart in charts_of(presentation_of(name, catalogue), cells)
    ]
