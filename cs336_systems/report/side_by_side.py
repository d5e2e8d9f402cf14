"""The same work on several machines or in several runs: one row per piece of work, one column per machine or run."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cs336_systems.report.cells import CellView, by_machine
from cs336_systems.report.presentation import Presentation
from cs336_systems.report.published import PUBLISHED
from cs336_systems.report.rows import FIELDS, as_text, gib, kernel_ms, key_columns, keys, ms, ratio, title_of, varying
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, say

QUANTITIES = {
    "forward_time": Text("forward", "前向"),
    "backward_time": Text("backward", "后向"),
    "forward_backward_time": Text("forward and backward", "前向加后向"),
    "step_time": Text("step", "单步"),
    "leaderboard_time": Text("leaderboard", "排行榜"),
    "memory_before_backward": Text("memory before backward", "后向之前的显存"),
    "peak_memory": Text("peak memory", "峰值显存"),
}
"""Metric -> subject of its table."""
SHAPE = ("d_model", "num_layers", "num_heads", "d_ff", "ranks", "backend", "fast", "inner")
"""Fields that make work different, besides those that tables show."""
PASSES = ("forward_time", "backward_time")
ONE_PASS = ("forward-backward", "train-step")
"""Modes whose forward and backward are the same work."""
STATISTICS = {"mean": Text("means", "均值"), "median": Text("medians", "中位数")}
PUBLISHED_NOTE = Text(
    "published: from write-ups of the course's assignment, on software they do not name",
    "已发表：来自课程作业的报告，所用软件未注明",
)


class Row(NamedTuple):
    """The cell that names a row, and the variant of that cell (an implementation, a wrapper) that it shows."""

    cell: CellView
    variant: str


@dataclass
class MachineColumn:
    """What one machine has of a quantity, by row."""

    texts: dict[tuple, str] = field(default_factory=dict)
    values: dict[tuple, float] = field(default_factory=dict)


def side_by_side(experiment: Presentation, cells: Sequence[CellView]) -> list[Table]:
    """A table of each quantity that at least two machines have of the same work; none where there is one machine."""
    machines = by_machine(cells)
    if len(machines) < 2:
        return []
    tables = (_table(experiment, metric, machines) for metric in QUANTITIES)
    return [table for table in tables if table is not None]


def _table(experiment: Presentation, metric: str, machines: dict[str, list[CellView]]) -> Table | None:
    rows: dict[tuple, Row] = {}
    columns = {machine: MachineColumn() for machine in machines}
    for machine, cells in machines.items():
        column = columns[machine]
        for cell in cells:
            for variant, value in _measured(experiment, cell, metric):
                key = (*_work(experiment, cell, metric), variant)
                if key not in column.texts:  # of two modes with the same pass the first counts
                    rows.setdefault(key, Row(cell, variant))
                    column.texts[key] = cell.verdict if value is None else _format(cell, metric)(value)
                    if value is not None:
                        column.values[key] = value
    shared = {key: row for key, row in rows.items() if sum(key in column.values for column in columns.values()) > 1}
    if not shared:
        return None
    present = {m: column for m, column in columns.items() if any(key in column.values for key in shared)}
    return _written(experiment, metric, shared, present)


def _written(
    experiment: Presentation, metric: str, rows: dict[tuple, Row], machines: dict[str, MachineColumn]
) -> Table:
    cells = [row.cell for row in rows.values()]
    unsaid = ["warmup_steps", *(["mode"] if metric in PASSES else [])]
    always = ("size",) if any(cell.get("size") for cell in cells) else ()
    telling = [
        name for name in varying(cells, always=always) if name not in unsaid or "warmup_steps" in experiment.identity
    ]
    with_variants = any(row.variant for row in rows.values())
    first, *others = machines
    unit = "GiB" if "memory" in metric else "ms"
    columns = [
        *key_columns(telling),
        *([word(Text("of", "范围"))] if with_variants else []),
        *(Column(_named(machine), unit) for machine in machines),
        *(Column(Text(f"{_short(other)} / {_short(first)}")) for other in others),
    ]
    base = machines[first].values
    lines = [
        [
            *keys(row.cell, telling),
            *([row.variant] if with_variants else []),
            *(column.texts.get(key, "") for column in machines.values()),
            *(ratio(machines[other].values.get(key), base.get(key)) for other in others),
        ]
        for key, row in rows.items()
    ]
    what = say("{}, side by side", "{}，并列", QUANTITIES[metric])
    notes = [STATISTICS[experiment.statistic]]
    if any(machine.endswith(PUBLISHED) for machine in machines):
        notes.append(PUBLISHED_NOTE)
    return Table(title_of(experiment.name, what, cells, [*telling, *unsaid], machines=()), columns, lines, notes)


def _named(machine: str) -> Text:
    return Text(machine, machine.removesuffix(PUBLISHED) + "已发表" if machine.endswith(f" · {PUBLISHED}") else "")


def _short(machine: str) -> str:
    return re.sub(rf"^NVIDIA (GeForce )?| · {PUBLISHED}$", "", machine)


def _measured(experiment: Presentation, cell: CellView, metric: str) -> Iterator[tuple[str, float | None]]:
    """(variant, value) pairs of a quantity in a cell. None: the cell failed."""
    if not cell.ok:
        yield "", None
        return
    for variant in ("", *cell.variants):
        view = cell.variant(variant) if variant else cell
        value = view.median(metric) if experiment.statistic == "median" else view.value(metric)
        if value is not None:
            yield variant, value


def _work(experiment: Presentation, cell: CellView, metric: str) -> tuple:
    """What must agree for two rows to be the same work."""
    names = [name for name in FIELDS if name not in ("mode", "warmup_steps")]
    mode = cell.get("mode")
    whole = ONE_PASS if metric in PASSES and mode in ONE_PASS else mode
    own = tuple(cell.get(name) for name in experiment.identity)
    return (whole, own, *(as_text(cell.get(name)) for name in (*names, *SHAPE)))


def _format(cell: CellView, metric: str) -> Callable[[float | None], str]:
    if "memory" in metric:
        return gib
    return kernel_ms if cell.get("seq_len") else ms
