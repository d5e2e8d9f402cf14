"""Which pictures the records of a run give."""

from collections.abc import Callable, Iterable, Sequence

from cs336_systems.record import Record
from cs336_systems.report import parallel_figures, profile_figures
from cs336_systems.report.cells import CellView, group
from cs336_systems.report.chart_picture import picture
from cs336_systems.report.charts import charts
from cs336_systems.report.picture import Picture

_SECTIONS: dict[str, Callable[[Sequence[CellView]], list[Picture]]] = {
    "fast_step": lambda cells: [picture(chart) for chart in charts("fast_step", cells)],
    "kernels": profile_figures.kernels,
    "memory": profile_figures.memory,
    "checkpointing": profile_figures.checkpointing,
    "collectives": parallel_figures.collectives,
    "ddp": parallel_figures.lanes,
    "bucket_model": parallel_figures.bucket_model,
    "optimizer_sharding": parallel_figures.sharding,
    "fsdp": parallel_figures.sharding,
    "parallel_plan": parallel_figures.plan,
}


def pictures(records: Iterable[Record]) -> list[Picture]:
    cells = [cell for cell in group(records) if cell.ok]
    return [
        found
        for experiment, section in _SECTIONS.items()
        for found in section([cell for cell in cells if cell.experiment == experiment])
    ]
