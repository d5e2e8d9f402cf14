"""Charts of the experiments: cells in, `Chart`s out. What fits the question, no more than a few for each.

A maker leaves a chart's name empty, or gives it a word of its own: `charts` names it after its experiment.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from cs336_systems.report.cells import CellView, by_machine
from cs336_systems.report.charts import attention, profiles, ranks, steps, training
from cs336_systems.report.charts.pieces import is_oom
from cs336_systems.report.document import Chart
from cs336_systems.text import Text


def charts(experiment: str, cells: Sequence[CellView]) -> list[Chart]:
    """Of one experiment; those of several machines apart."""
    make = _MAKERS.get(experiment)
    if make is None:
        return []
    shown = [cell for cell in cells if cell.ok or is_oom(cell) or experiment == "train"]  # training has no end to note
    machines = by_machine(shown)
    found: list[Chart] = []
    for machine, chosen in machines.items():
        for chart in make(chosen):
            if any(series.points for series in chart.series):
                found.append(_named(chart, experiment, found, machine if len(machines) > 1 else ""))
    return found


def _named(chart: Chart, experiment: str, others: Sequence[Chart], machine: str) -> Chart:
    """With a file name of its own, and the machine in its title where there are several."""
    title = Text(f"{chart.title.en} · {machine}", f"{chart.title.in_('zh')} · {machine}") if machine else chart.title
    name = f"{experiment.replace('_', '-')}-{chart.name or len(others) + 1}"
    if name in {other.name for other in others}:
        name += f"-{len(others) + 1}"
    return replace(chart, name=name, title=title)


_MAKERS: dict[str, Callable[[Sequence[CellView]], list[Chart]]] = {
    experiment: make
    for room in (steps, profiles, attention, ranks, training)
    for experiment, make in room.MAKERS.items()
}
