"""`ddp`: what does averaging gradients cost, and how much of it is hidden behind the backward pass?

Between processes of one machine communication takes the cores that backward needs, and hides nothing. A second cell
emulates a network: its all-reduces take as long as they would on one of that latency and bandwidth (measure/wire.py).
"""

from collections.abc import Iterable
from math import isfinite
from typing import NamedTuple

from cs336_systems.config import RunConfig
from cs336_systems.experiments.ranks.arrangement import NONE, TORCH_DDP, Arrangement
from cs336_systems.experiments.ranks.multi_rank import (
    ARRANGEMENT,
    INTERLEAVED,
    SLOW_LINK,
    WEIGHT_ERROR,
    arrangement_grid,
    arrangements_of,
    cell_title,
    chart_title,
    gloo_notes,
    paired_steps,
    per_link,
    table_per_cell,
)
from cs336_systems.experiments.spec import Config, Experiment
from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Chart, Point, Series
from cs336_systems.report.phrases import median_of, times_text
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import ms, percent
from cs336_systems.report.terms import BACKWARD, MS, PHASE_NAMES, STEP, SYNC
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, say

TITLE = Text("Averaging gradients", "梯度平均")
EXPOSED = Text("exposed", "未掩盖")
WRAPPER = Text("wrapper", "封装")


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    """On the machine's own link and on a slow network, where torch's all-reduces, sent from C++, cannot be slowed."""
    ours = [NONE, Arrangement("naive"), Arrangement("flat"), Arrangement("overlapped")]
    ours += [Arrangement("bucketed", bucket_size_mb=size) for size in (5, 25)]
    yield from arrangement_grid(preset, base, [*ours, TORCH_DDP])
    yield from arrangement_grid(preset, base, ours, SLOW_LINK)


class Exposure(NamedTuple):
    """Seconds of an arrangement's communication: measured alone, and as it lengthens a step."""

    arrangement: Arrangement
    alone: float | None
    exposed: float | None

    @property
    def hidden(self) -> float | None:
        """The hidden share of communication."""
        return 1 - self.exposed / self.alone if self.alone and self.exposed is not None else None


def exposures(cell: CellView) -> list[Exposure]:
    """The exposure of every arrangement but `none`, the baseline."""
    baseline, found = cell.variant(NONE.name), []
    for arrangement in arrangements_of(cell):
        if arrangement != NONE:
            own = cell.variant(arrangement.name)
            exposed = paired_steps(own, baseline, lambda a, b: a - b)
            found.append(Exposure(arrangement, own.median("communication_time"), exposed))
    return found


# -- tables -----------------------------------------------------------------------------------------------------------


def ddp_tables(cells: Cells) -> list[Table]:
    return table_per_cell(cells, _table)


def _table(cell: CellView) -> Table:
    heads = (STEP, BACKWARD, SYNC, Text("communication", "通信"), EXPOSED)
    columns = [word(ARRANGEMENT), *(Column(head, "ms") for head in heads)]
    columns += [
        Column(Text("hidden", "被掩盖")),
        Column(Text("over torch DDP", "相对 torch DDP")),
        Column(WEIGHT_ERROR),
    ]
    by_arrangement = {exposure.arrangement: exposure for exposure in exposures(cell)}
    rows = []
    for arrangement in arrangements_of(cell):
        own = cell.variant(arrangement.name)
        times = [own.median(f"{phase}_time") for phase in ("step", "backward", "sync")]
        against = paired_steps(own, cell.variant(TORCH_DDP.name), lambda a, b: a / b)
        speed = "" if against is None else f"{against:.2f}x"
        communication, error = ["", "", ""], ""
        if exposure := by_arrangement.get(arrangement):
            hidden = "" if exposure.hidden is None else percent(exposure.hidden, 0)
            communication = [ms(exposure.alone), ms(exposure.exposed), hidden]
            error = f"{own.value('weight_error'):.1e}"
        rows.append([arrangement.name, *map(ms, times), *communication, speed, error])
    notes = [
        Text(
            "medians; communication: gradient averaging alone; exposed: step minus the step without a wrapper, paired",
            "中位数；通信：只做平均；未掩盖：单步减去不封装的单步，成对比较",
        ),
        Text(
            "hidden: 1 - exposed / communication; negative where communication takes cores from backward",
            "被掩盖：1 - 未掩盖 / 通信；通信占用后向的核时会低于 0",
        ),
        *gloo_notes([cell]),
    ]
    return Table(cell_title(cell, Text("averaging gradients", "梯度平均")), columns, rows, notes)


# -- charts -----------------------------------------------------------------------------------------------------------


def ddp_charts(cells: Cells) -> list[Chart]:
    return [chart for cell in cells if cell.ok for chart in (_exposed(cell), _lanes(cell))]


def _exposed(cell: CellView) -> Chart:
    rows = exposures(cell)
    alone = [Point(row.arrangement.name, 1e3 * row.alone) for row in rows if row.alone is not None]
    exposed = [Point(row.arrangement.name, 1e3 * max(0.0, row.exposed)) for row in rows if row.exposed is not None]
    series = [Series(Text("communication alone", "单独通信"), alone), Series(EXPOSED, exposed)]
    return Chart("", chart_title(cell, TITLE), "bars", WRAPPER, MS, series)


def _lanes(cell: CellView) -> Chart:
    """One step of each wrapper: computation above, communication below."""
    lanes: list[dict[str, list[Point]]] = [{phase: [] for phase in PHASE_NAMES}, {}]
    for name, metrics in cell.variants.items():
        if "message_start" not in metrics:
            continue
        for lane, kind in zip(lanes, ("phase", "message"), strict=True):
            starts, ends = metrics[f"{kind}_start"].numbers, metrics[f"{kind}_end"].numbers
            for what, start, end in zip(metrics[kind].samples, starts, ends, strict=True):
                lane.setdefault(str(what), []).append(Point(name, 1e3 * end, start=1e3 * start))
    series = [
        Series(PHASE_NAMES.get(what) or Text(what.replace("_", "-")), points, lane=number)
        for number, lane in enumerate(lanes)
        for what, points in lane.items()
        if points
    ]
    title = Text("Computation and communication in one step of each wrapper", "各封装一步中的计算与通信")
    since = Text(
        "ms since the step began; above: computation, below: communication", "自该步开始的毫秒；上：计算，下：通信"
    )
    return Chart("lanes", chart_title(cell, title), "spans", WRAPPER, since, series)


# -- findings ---------------------------------------------------------------------------------------------------------


def _fastest(cell: CellView) -> Text | None:
    names = [one.name for one in arrangements_of(cell) if one != NONE and one.library == "ours"]
    times = {name: seconds for name in names if (seconds := median_of(cell.variant(name), "step_time"))}
    best = min(times, key=lambda name: times[name])
    said = say(
        "{} is the fastest of {}, {} ms a step",
        "{} 是 {} 种中最快的，每步 {} ms",
        *(best, str(len(times)), ms(times[best])),
    )
    if "naive" in times and best != "naive":
        values = (times_text(times["naive"] / times[best]), ms(times["naive"]))
        said = say("{}, {} times as fast as naive ({} ms)", "{}，速度是 naive 的 {} 倍（{} ms）", said, *values)
    if theirs := median_of(cell.variant(TORCH_DDP.name), "step_time"):
        said = say("{}; torch DDP takes {} ms", "{}；torch DDP 为 {} ms", said, ms(theirs))
    return said


def _hidden(cell: CellView) -> Text | None:
    shares = {row.arrangement.name: row.hidden for row in exposures(cell)}
    found = {name: share for name, share in shares.items() if share is not None and isfinite(share)}
    if not found:
        return None
    most, least = max(found, key=lambda name: found[name]), min(found, key=lambda name: found[name])
    return say(
        "of communication {} hides {}, {} {}",
        "通信中 {} 掩盖 {}，{} 掩盖 {}",
        *(most, percent(found[most], 0), least, percent(found[least], 0)),
    )


DDP = Experiment(
    name="ddp",
    title=TITLE,
    question=Text(
        "What does averaging gradients cost, and how much of it is hidden?", "梯度平均的代价是多少，其中多少被掩盖？"
    ),
    instrument=INTERLEAVED,
    grid=_grid,
    tables=ddp_tables,
    charts=ddp_charts,
    findings=per_link(_fastest, _hidden),
    statistic="median",
    order=20,
)
