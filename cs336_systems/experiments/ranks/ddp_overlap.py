"""`ddp` and `bucket_model`: what does averaging gradients cost, how much of it is hidden, and which bucket is best?

Between processes of one machine communication takes the cores that backward needs, and hides nothing. A second cell
emulates a network: its all-reduces take as long as they would on one of that latency and bandwidth (measure/wire.py).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import isfinite
from typing import NamedTuple

from cs336_systems.config import RunConfig
from cs336_systems.experiments.ranks.multi_rank import (
    ARRANGEMENT,
    INTERLEAVED,
    NONE,
    SLOW_LINK,
    TORCH_DDP,
    WEIGHT_ERROR,
    Arrangement,
    arrangement_grid,
    arrangements_of,
    cell_title,
    chart_place,
    chart_title,
    charts_per_cell,
    collective_name,
    gloo_notes,
    paired_steps,
    per_link,
    tables_per_cell,
)
from cs336_systems.experiments.spec import Config, Experiment
from cs336_systems.record import MIB
from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Chart, Highlight, Point, Series
from cs336_systems.report.phrases import compared, median_of, times_text, together, with_time
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import ms, number, percent
from cs336_systems.report.terms import BACKWARD, MEASURED, MS, PHASE_NAMES, PREDICTED, STEP, SYNC
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, say

TITLE = Text("Averaging gradients", "梯度平均")
EXPOSED = Text("exposed", "未掩盖")
WRAPPER = Text("wrapper", "封装")
NAIVE = Arrangement("naive")


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    """Yield cells on the machine's own link and on an emulated slow network. torch's all-reduces are left out of the
    latter: they are sent from C++ and cannot be slowed down."""
    ours = [NONE, NAIVE, Arrangement("flat"), Arrangement("overlapped")]
    ours += [Arrangement("bucketed", bucket_size_mb=size) for size in (5, 25)]
    yield from arrangement_grid(preset, base, [*ours, TORCH_DDP])
    yield from arrangement_grid(preset, base, ours, SLOW_LINK)


class Exposure(NamedTuple):
    """Seconds of an arrangement's communication: measured alone, and the part that lengthens a step."""

    arrangement: Arrangement
    alone: float | None
    exposed: float | None

    @property
    def hidden(self) -> float | None:
        """Share of communication that is hidden behind computation."""
        return 1 - self.exposed / self.alone if self.alone and self.exposed is not None else None


def exposures(cell: CellView) -> list[Exposure]:
    """Return the exposed communication of every arrangement but `none`, the baseline."""
    baseline, found = cell.variant(NONE.name), []
    for arrangement in arrangements_of(cell):
        if arrangement != NONE:
            own = cell.variant(arrangement.name)
            exposed = paired_steps(own, baseline, lambda a, b: a - b)
            found.append(Exposure(arrangement, own.median("communication_time"), exposed))
    return found


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
            "被掩盖：1 - 未掩盖 / 通信；通信占用反向的核时会低于 0",
        ),
        *gloo_notes([cell]),
    ]
    return Table(cell_title(cell, Text("averaging gradients", "梯度平均")), columns, rows, notes)


def _exposed(cell: CellView) -> Chart:
    rows = exposures(cell)
    alone = [Point(row.arrangement.label, 1e3 * row.alone) for row in rows if row.alone is not None]
    exposed = [Point(row.arrangement.label, 1e3 * max(0.0, row.exposed)) for row in rows if row.exposed is not None]
    series = [Series(Text("communication alone", "单独通信"), alone), Series(EXPOSED, exposed)]
    note = Text(
        "medians; exposed: how much longer a step is than without a wrapper",
        "中位数；未掩盖：单步比不封装时长出的时间",
    )
    return Chart("", chart_title(cell, TITLE), "bars", WRAPPER, MS, series, digits=2, note=note)


def _lanes(cell: CellView) -> Chart:
    """Chart one step of each wrapper: computation above, communication below."""
    lanes: list[dict[str, list[Point]]] = [{phase: [] for phase in PHASE_NAMES}, {}]
    for name, metrics in cell.variants.items():
        if "phase_start" not in metrics:
            continue
        place = _at_medians(cell.variant(name))
        for lane, kind in zip(lanes, ("phase", "message"), strict=True):
            whats, starts, ends = (cell.variant(name).samples(f"{kind}{what}") for what in ("", "_start", "_end"))
            for what, start, end in zip(whats, starts, ends, strict=True):
                span = Point(Arrangement.named(name).label, 1e3 * place(end), start=1e3 * place(start))
                lane.setdefault(str(what), []).append(span)
    series = [
        Series(PHASE_NAMES.get(what) or collective_name(what), points, lane=number)
        for number, lane in enumerate(lanes)
        for what, points in lane.items()
        if points
    ]
    title = Text("Computation and communication in a step", "一步中的计算与通信")
    since = Text("ms of the host's clock; above: computation, below: communication", "主机时钟，ms；上：计算，下：通信")
    note = Text(
        "phases: medians; collectives: of one step, placed within its phases (those of torch are not recorded)",
        "阶段：中位数；集合通信：来自其中一步，按其在阶段中的位置绘制（未记录 torch 的）",
    )
    return Chart("lanes", chart_title(cell, title), "spans", WRAPPER, since, series, note=note)


def _at_medians(own: CellView) -> Callable[[float], float]:
    """Return a function that maps a time in the recorded step to a step whose phases take their median times.

    One recorded step may be unusual: a phase can take three times its median.
    """
    knots, shift = [(0.0, 0.0)], 0.0
    for phase, start, end in zip(*(own.samples(name) for name in ("phase", "phase_start", "phase_end")), strict=True):
        usual = own.median(f"{phase}_time")
        knots.append((start, start + shift))
        shift += (end - start if usual is None else usual) - (end - start)
        knots.append((end, end + shift))

    def place(seconds: float) -> float:
        for (left, at), (right, then) in pairwise(knots):
            if seconds <= right:
                return at + (then - at) * (seconds - left) / (right - left) if right > left else then
        return seconds + shift

    return place


def _highlights(cells: Cells) -> list[Highlight]:
    """Return the fastest of our wrappers beside the one that averages parameter by parameter after backward."""
    fine = sorted((c for c in cells if c.ok and not c.get("link")), key=lambda c: c.get("backend") != "nccl")
    for cell in fine[:1]:
        ours = [one for one in arrangements_of(cell) if one != NONE and one.library == "ours"]
        times = {one: seconds for one in ours if (seconds := median_of(cell.variant(one.name), "step_time"))}
        naive = times.pop(Arrangement("naive"), None)
        best = min(times, key=lambda one: times[one], default=None)
        if naive and best:
            return [_against_naive(cell, best, times[best], naive)]
    return []


def _against_naive(cell: CellView, best: Arrangement, seconds: float, naive: float) -> Highlight:
    what = say("training step with {}, against naive DDP", "训练步（{}），相对朴素 DDP", best.label)
    detail = say("{}: {} ms, {} ms", "{}：{} ms，{} ms", chart_place(cell), ms(seconds), ms(naive))
    return Highlight(65, Text(f"{times_text(naive / seconds)}x"), what, detail)


def _fastest(cell: CellView) -> Text | None:
    ours = [one for one in arrangements_of(cell) if one != NONE and one.library == "ours"]
    times = {one: seconds for one in ours if (seconds := median_of(cell.variant(one.name), "step_time"))}
    best = min(times, key=lambda one: times[one])
    said: Text | None = say(
        "{} is the fastest of our {} wrappers with {} ms a step",
        "{} 在本项目的 {} 种封装中最快，每步 {} ms",
        *(best.label, str(len(times)), ms(times[best])),
    )
    for other in (NAIVE, TORCH_DDP):
        seconds = median_of(cell.variant(other.name), "step_time")
        if seconds and other != best:
            name = with_time(other.label, ms(seconds))
            said = together(said, compared(Text("it", "它"), name, [(seconds / times[best], Text(""))]))
    return said


def _hidden(cell: CellView) -> Text | None:
    shares = {row.arrangement: row.hidden for row in exposures(cell)}
    found = {one: share for one, share in shares.items() if share is not None and isfinite(share)}
    most, least = max(found, key=lambda one: found[one]), min(found, key=lambda one: found[one])
    said = _hides(most, found[most])
    return say("{}, {}", "{}，{}", said, _hides(least, found[least])) if least != most else said


def _hides(arrangement: Arrangement, share: float) -> Text:
    """State the share of communication that a wrapper hides: noise may put it below 0 or above 1."""
    name = arrangement.label
    if share < 0.005:
        return say("{} hides no communication", "{} 未能掩盖通信", name)
    if share > 0.995:
        return say("{} hides all of its communication", "{} 掩盖了全部通信", name)
    return say("{} hides {} of its communication", "{} 掩盖了 {} 的通信", name, percent(share, 0))


DDP = Experiment(
    name="ddp",
    title=TITLE,
    question=Text(
        "What does averaging gradients cost, and how much of it is hidden?", "梯度平均的代价是多少，其中多少被掩盖？"
    ),
    instrument=INTERLEAVED,
    grid=_grid,
    tables=tables_per_cell(_table),
    charts=charts_per_cell(_exposed, _lanes),
    highlights=_highlights,
    group="ranks",
    findings=per_link(_fastest, _hidden),
    statistic="median",
    problems_2026=(
        "naive_ddp_benchmarking",
        "minimal_ddp_flat_benchmarking",
        "ddp_overlap_individual_parameters_benchmarking",
    ),
    order=20,
)

# -- bucket_model -----------------------------------------------------------------------------------------------------
# The prediction follows the buckets through a backward pass on an emulated network. Letters: S bytes of gradients in
# n buckets, bandwidth w, overhead o of each collective.

BUCKETS = [Arrangement("bucketed", bucket_size_mb=size) for size in (0.5, 1, 2, 4, 8, 16, 32)]


def exposed(total: float, bucket: float, backward: float, latency: float, bandwidth: float) -> float:
    """Return the seconds from the end of backward to the end of the last bucket's all-reduce."""
    sent, free_at = 0.0, 0.0
    while sent < total:
        size = min(bucket, total - sent)
        sent += size
        free_at = max(free_at, backward * sent / total) + latency + size / bandwidth
    return free_at - backward


@dataclass(frozen=True)
class BucketRow:
    """A bucket size in bytes, the number of buckets, exposed seconds from three sources, and seconds of a step."""

    size: float
    count: int
    predicted: float
    formula: float
    measured: float
    step: float


def bucket_rows(cell: CellView) -> list[BucketRow]:
    latency, bandwidth = cell.get("link")
    baseline, total, rows = cell.variant(NONE.name), _gradient_bytes(cell), []
    backward = baseline.median("backward_time") or 0.0
    for arrangement in arrangements_of(cell):
        if arrangement.bucket_size_mb is not None:
            size, own = arrangement.bucket_size_mb * MIB, cell.variant(arrangement.name)
            count = -int(-total // size)
            row = BucketRow(
                size,
                count,
                predicted=exposed(total, size, backward, latency, bandwidth),
                formula=total / (count * bandwidth) + count * latency,
                measured=paired_steps(own, baseline, lambda a, b: a - b) or 0.0,
                step=own.median("step_time") or 0.0,
            )
            rows.append(row)
    return rows


def _gradient_bytes(cell: CellView) -> float:
    return cell.variant(NONE.name).value("gradient_memory") or 0.0


def _bucket_table(cell: CellView) -> Table:
    columns = [
        Column(Text("bucket", "桶"), "MB"),
        Column(Text("buckets", "桶数")),
        Column(Text("predicted exposed", "未掩盖，预测"), "ms"),
        Column(Text("formula", "按公式"), "ms"),
        Column(Text("measured exposed", "未掩盖，实测"), "ms"),
        Column(STEP, "ms"),
    ]
    found, rows = bucket_rows(cell), []
    for row in found:
        times = [ms(seconds) for seconds in (row.predicted, row.formula, row.measured, row.step)]
        rows.append([number(row.size / MIB, 1), str(row.count), *times])
    predicted, measured = _best(found)
    latency, bandwidth = cell.get("link")
    ideal = (_gradient_bytes(cell) * bandwidth * latency) ** 0.5 / MIB
    notes = [
        say(
            "best bucket: {} MB predicted, {} MB measured; sqrt(S w o) = {} MB",
            "最好的桶：预测 {} MB，实测 {} MB；sqrt(S w o) = {} MB",
            *(f"{predicted.size / MIB:g}", f"{measured.size / MIB:g}", f"{ideal:.1f}"),
        ),
        Text(
            "predicted: gradients arrive evenly over backward, and full buckets are sent one after another",
            "预测：梯度在反向中均匀产生，桶满即发送，一个接一个",
        ),
        Text(
            "formula: last bucket + overheads, S / (n w) + n o, assuming that all else is hidden",
            "按公式：最后一个桶 + 各次开销，S / (n w) + n o，假定其余全被掩盖",
        ),
    ]
    return Table(cell_title(cell, Text("which bucket size", "桶的大小")), columns, rows, notes)


def _best(rows: list[BucketRow]) -> tuple[BucketRow, BucketRow]:
    """Return the best row by prediction, and the best by measurement."""
    return min(rows, key=lambda row: row.predicted), min(rows, key=lambda row: row.measured)


def _bucket_chart(cell: CellView) -> Chart:
    rows = bucket_rows(cell)
    series = [
        Series(MEASURED, [Point(row.size / MIB, 1e3 * row.measured) for row in rows]),
        Series(PREDICTED, [Point(row.size / MIB, 1e3 * row.predicted) for row in rows], dashed=True),
        Series(Text("S / (n w) + n o"), [Point(row.size / MIB, 1e3 * row.formula) for row in rows], dashed=True),
    ]
    title = chart_title(cell, Text("Exposed communication by bucket size", "未掩盖的通信与桶大小"))
    note = Text("medians of differences within a round", "同一轮内差值的中位数")
    return Chart("", title, "lines", Text("bucket, MB", "桶，MB"), MS, series, log_x=True, digits=2, note=note)


def _best_bucket(cell: CellView) -> Text | None:
    predicted, measured = _best(bucket_rows(cell))
    sizes = [f"{row.size / MIB:g}" for row in (measured, predicted)]
    said = say("the best bucket has {} MB, as predicted", "最好的桶为 {} MB，与预测一致", sizes[0])
    if predicted is not measured:
        said = say("the best bucket has {} MB, predicted {} MB", "最好的桶为 {} MB，预测为 {} MB", *sizes)
    if measured.measured <= 0:
        return said
    return together(said, say("it leaves {} ms exposed", "其未掩盖的通信为 {} ms", ms(measured.measured)))


def _worst_prediction(cell: CellView) -> Text | None:
    rows = [row for row in bucket_rows(cell) if row.measured > 0 and row.predicted > 0]
    worst = max(rows, key=lambda row: abs(row.predicted / row.measured - 1))
    if len(rows) < 2:
        return None
    return say(
        "of {} sizes the prediction is worst for {} MB: {} ms, measured {} ms",
        "{} 种大小中预测误差最大的是 {} MB：预测 {} ms，实测 {} ms",
        *(str(len(rows)), f"{worst.size / MIB:g}", ms(worst.predicted), ms(worst.measured)),
    )


BUCKET_MODEL = Experiment(
    name="bucket_model",
    title=Text("Bucket size", "分桶大小"),
    question=Text("Which bucket size is best, predicted and measured?", "分桶多大最好，预测与实测是否一致？"),
    instrument=INTERLEAVED,
    grid=partial(arrangement_grid, arrangements=[NONE, *BUCKETS], link=SLOW_LINK),
    tables=tables_per_cell(_bucket_table),
    charts=charts_per_cell(_bucket_chart),
    group="ranks",
    findings=per_link(_best_bucket, _worst_prediction),
    order=30,
)
