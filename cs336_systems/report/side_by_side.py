"""The same work on several machines or in several runs: one row per piece of work, one column per machine or run."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean
from typing import NamedTuple

from cs336_systems.record import GIB
from cs336_systems.report.cells import CellView, by_machine
from cs336_systems.report.document import Chart, Highlight, Limit, Point, Series
from cs336_systems.report.names import implementation_name
from cs336_systems.report.phrases import SAME, capital, is_same
from cs336_systems.report.points import FEW
from cs336_systems.report.presentation import Presentation
from cs336_systems.report.published import PUBLISHED
from cs336_systems.report.rows import (
    FIELDS,
    as_text,
    gib,
    kernel_ms,
    key_columns,
    key_texts,
    ms,
    ratio,
    row_words,
    title_of,
    varying,
)
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, listed, say

QUANTITIES = {
    "forward_time": Text("forward", "前向"),
    "backward_time": Text("backward", "反向"),
    "forward_backward_time": Text("forward and backward", "前向加反向"),
    "step_time": Text("step", "单步"),
    "leaderboard_time": Text("leaderboard", "排行榜"),
    "memory_before_backward": Text("memory before backward", "反向之前的显存"),
    "peak_memory": Text("peak memory", "峰值显存"),
}
"""Metric -> subject of its table."""
SHAPE = (
    *("d_model", "num_layers", "num_heads", "d_ff", "ranks", "backend"),
    *("fast", "optimizer_state", "update_in_backward", "inner"),
)
"""Fields that make work different, besides those that tables show."""
TIMES = ("step_time", "leaderboard_time", "forward_backward_time", "backward_time", "forward_time")
MEMORIES = ("peak_memory", "memory_before_backward")
"""Memory quantities, the most important first. One time and one memory are drawn and stated in sentences."""
PASSES = ("forward_time", "backward_time")
ONE_PASS = ("forward-backward", "train-step")
"""Modes whose forward and backward are the same work."""
WIDE = 30
"""Values that differ by more than this factor are drawn on a logarithmic axis."""
STATISTICS = {"mean": Text("means", "均值"), "median": Text("medians", "中位数")}
PUBLISHED_NOTE = Text(
    "published: from write-ups of the course's assignment, on software they do not name",
    "已发表：来自课程作业的报告，所用软件未注明",
)


class Row(NamedTuple):
    """The cell that names a row, and its variant (an implementation, a wrapper) that the row shows."""

    cell: CellView
    variant: str


@dataclass
class MachineColumn:
    """The texts and values of a quantity on one machine, by row."""

    texts: dict[tuple, str] = field(default_factory=dict)
    values: dict[tuple, float] = field(default_factory=dict)


class Shared(NamedTuple):
    """A quantity that at least two machines have measured for the same work."""

    metric: str
    rows: dict[tuple, Row]
    machines: dict[str, MachineColumn]

    def ratios(self, other: str) -> dict[tuple, float]:
        """Return the values of a machine over those of the first, for the rows that both have."""
        first, values = next(iter(self.machines.values())).values, self.machines[other].values
        return {key: values[key] / first[key] for key in self.rows if key in values and first.get(key)}


def side_by_side(experiment: Presentation, cells: Sequence[CellView]) -> list[Table]:
    """Return a table of each quantity that at least two machines have of the same work; none where there is one
    machine."""
    return [_table(experiment, found) for found in shared_work(experiment, cells)]


def shared_work(experiment: Presentation, cells: Sequence[CellView]) -> list[Shared]:
    machines = by_machine(cells)
    if len(machines) < 2:
        return []
    found = (_shared(experiment, metric, machines) for metric in QUANTITIES)
    return [one for one in found if one is not None]


def _shared(experiment: Presentation, metric: str, machines: dict[str, list[CellView]]) -> Shared | None:
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
    return Shared(metric, shared, present)


# -- tables -----------------------------------------------------------------------------------------------------------


def _table(experiment: Presentation, shared: Shared) -> Table:
    """Return a table: settings that differ, then ratios, then values."""
    metric, rows, machines = shared
    cells = [row.cell for row in rows.values()]
    telling, unsaid = _telling(experiment, shared)
    with_variants = any(row.variant for row in rows.values())
    first, *others = machines
    unit = _unit(metric)
    columns = [
        *key_columns(telling),
        *([word(Text("of", "范围"))] if with_variants else []),
        *(Column(Text(f"{_short(other)} / {_short(first)}")) for other in others),
        *(Column(_named(machine), unit) for machine in machines),
    ]
    base = machines[first].values
    lines = [
        [
            *key_texts(row.cell, telling),
            *([row.variant] if with_variants else []),
            *(ratio(machines[other].values.get(key), base.get(key)) for other in others),
            *(column.texts.get(key, "") for column in machines.values()),
        ]
        for key, row in rows.items()
    ]
    what = say("{}, side by side", "{}，并列", QUANTITIES[metric])
    notes = [STATISTICS[experiment.statistic]]
    if any(machine.endswith(PUBLISHED) for machine in machines):
        notes.append(PUBLISHED_NOTE)
    return Table(title_of(experiment.name, what, cells, [*telling, *unsaid], machines=()), columns, lines, notes)


def _telling(experiment: Presentation, shared: Shared) -> tuple[list[str], list[str]]:
    """Return the settings that distinguish the rows, and those that are left out: a pass is the same in two modes."""
    cells = [row.cell for row in shared.rows.values()]
    unsaid = ["warmup_steps"]
    if shared.metric in PASSES and all(cell.get("mode") in ONE_PASS for cell in cells):
        unsaid.append("mode")
    always = ("size",) if any(cell.get("size") for cell in cells) else ()
    telling = [
        name for name in varying(cells, always=always) if name not in unsaid or "warmup_steps" in experiment.identity
    ]
    return telling, unsaid


def _unit(metric: str) -> str:
    return "GiB" if "memory" in metric else "ms"


# -- charts -----------------------------------------------------------------------------------------------------------


def charts_of_shared(experiment: Presentation, cells: Sequence[CellView]) -> list[Chart]:
    """Return charts of the ratios to the first machine, and of all values, for the main quantities that machines
    share."""
    return [chart for shared in _main(shared_work(experiment, cells)) for chart in _charts(experiment, shared)]


def _main(found: Sequence[Shared]) -> list[Shared]:
    """Return the most important time and the most important memory."""
    by_metric = {shared.metric: shared for shared in found}
    chosen = (next((by_metric[name] for name in names if name in by_metric), None) for names in (TIMES, MEMORIES))
    return [shared for shared in chosen if shared is not None]


def _charts(experiment: Presentation, shared: Shared) -> list[Chart]:
    first, *others = shared.machines
    telling, _ = _telling(experiment, shared)
    rows = dict([*shared.rows.items()][:FEW])
    names = {key: _row_label(row, telling) for key, row in rows.items()}
    note = STATISTICS[experiment.statistic]
    if len(rows) < len(shared.rows):
        note = say("{}; the first {} of {} rows", "{}；前 {} 行，共 {} 行", note, str(len(rows)), str(len(shared.rows)))
    scale = GIB if _unit(shared.metric) == "GiB" else 1e-3

    def series(machine: str, found: Mapping[tuple, float], scale: float = 1.0) -> Series:
        return Series(Text(_short(machine)), [Point(names[key], found[key] / scale) for key in rows if key in found])

    ratios = [series(other, shared.ratios(other)) for other in others]
    values = [series(machine, column.values, scale) for machine, column in shared.machines.items()]
    work, what = Text("work", "工作负载"), QUANTITIES[shared.metric]
    over = say("{}: ratio to {}", "{}：与 {} 之比", capital(what), _short(first))
    level = Limit(1.0, say("as {}", "与 {} 相同", _short(first)))
    return [
        Chart(f"{shared.metric}-ratio", over, "dots", work, Text("ratio", "比值"), ratios,
              log_y=_is_wide(ratios), limits=[level], note=note, digits=2),
        Chart(f"{shared.metric}-values", say("{}, side by side", "{}，并列", capital(what)), "bars", work,
              Text(_unit(shared.metric)), values, log_y=_is_wide(values), horizontal=True, note=note),
    ]  # fmt: skip


def _row_label(row: Row, telling: Sequence[str]) -> Text:
    variant = [implementation_name(row.variant)] if row.variant else []
    return listed([*row_words(row.cell, telling), *variant], (", ", "，"))


def _is_wide(series: Sequence[Series]) -> bool:
    """True if values differ by more than a linear axis can show."""
    values = [point.y for one in series for point in one.points]
    return min(values, default=0.0) > 0 and max(values) / min(values) > WIDE


# -- in words ---------------------------------------------------------------------------------------------------------


class Compared(NamedTuple):
    """A quantity of one machine against that of the first: a sentence, and a number for the first screen."""

    sentence: Text
    highlight: Highlight


def compared(experiment: Presentation, cells: Sequence[CellView]) -> list[Compared]:
    """Compare each other machine with the first, by the main quantities that they share."""
    return [
        _compared(shared, other, list(ratios.values()))
        for shared in _main(shared_work(experiment, cells))
        for other in [*shared.machines][1:]
        if (ratios := shared.ratios(other))
    ]


def _compared(shared: Shared, other: str, ratios: Sequence[float]) -> Compared:
    """Return the geometric mean of all ratios, stated such that it is above 1."""
    mean = geometric_mean(ratios)
    first, second = _short(next(iter(shared.machines))), _short(other)
    less, more = (second, first) if mean < 1 else (first, second)
    factor = f"{max(mean, 1 / mean):.2f}"
    what = QUANTITIES[shared.metric]
    if is_same(mean):
        short = say(
            "{}: {} and {} are equal within {}", "{}：{} 与 {} 相差不到 {}", what, second, first, f"{SAME - 1:.0%}"
        )
        sentence = short
    elif _unit(shared.metric) == "ms":
        short = say("{}: {} is faster than {}", "{}：{} 快于 {}", what, less, more)
        sentence = say(
            "{0}: {1} is {3} times as fast as {2}", "{0}：{1} 的速度是 {2} 的 {3} 倍", what, less, more, factor
        )
    else:
        short = say("{}: {} needs more than {}", "{}：{} 多于 {}", what, more, less)
        sentence = say("{0}: {1} needs {3} times as much as {2}", "{0}：{1} 是 {2} 的 {3} 倍", what, more, less, factor)
    count = say("geometric mean of {}", "{} 项的几何平均", str(len(ratios)))
    rank = [*TIMES, *MEMORIES].index(shared.metric)
    return Compared(say("{} ({})", "{}（{}）", sentence, count), Highlight(rank, Text(f"{factor}x"), short, count))


# -- cells ------------------------------------------------------------------------------------------------------------


def _named(machine: str) -> Text:
    return Text(machine, machine.removesuffix(PUBLISHED) + "已发表" if machine.endswith(f" · {PUBLISHED}") else "")


def _short(machine: str) -> str:
    return re.sub(rf"^NVIDIA (GeForce )?| · {PUBLISHED}$", "", machine)


def _measured(experiment: Presentation, cell: CellView, metric: str) -> Iterator[tuple[str, float | None]]:
    """Yield (variant, value) pairs of a quantity in a cell. None: the cell failed."""
    if not cell.ok:
        yield "", None
        return
    for variant in ("", *cell.variants):
        view = cell.variant(variant) if variant else cell
        value = view.median(metric) if experiment.statistic == "median" else view.value(metric)
        if value is not None:
            yield variant, value


def _work(experiment: Presentation, cell: CellView, metric: str) -> tuple:
    """Return the key of a cell's work; rows with equal keys do the same work."""
    names = [name for name in FIELDS if name not in ("mode", "warmup_steps")]
    mode = cell.get("mode")
    whole = ONE_PASS if metric in PASSES and mode in ONE_PASS else mode
    own = tuple(cell.get(name) for name in experiment.identity)
    return (whole, own, *(as_text(cell.get(name)) for name in (*names, *SHAPE)))


def _format(cell: CellView, metric: str) -> Callable[[float | None], str]:
    if "memory" in metric:
        return gib
    return kernel_ms if cell.get("seq_len") else ms
