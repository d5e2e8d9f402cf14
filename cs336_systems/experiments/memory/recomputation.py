"""How many blocks should be recomputed together, predicted and measured?"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from cs336_systems.config import RunConfig, model_config
from cs336_systems.experiments.memory.peak_parts import gpu_limit
from cs336_systems.experiments.spec import Config, Experiment, Instrument, step_memory
from cs336_systems.record import GIB
from cs336_systems.report import terms
from cs336_systems.report.cells import CellView, grouped
from cs336_systems.report.document import Chart, Point, Series
from cs336_systems.report.names import size_name
from cs336_systems.report.phrases import (
    compared,
    error_text,
    having,
    known,
    pairs_of,
    speed_up,
    together,
    value_of,
)
from cs336_systems.report.points import joined, measured
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import gib, ms, remarks_on, settings_of, title_of
from cs336_systems.table import Column, Table
from cs336_systems.text import Text, listed, say

GROUPS = ((0, 0), (1, 0), (2, 0), (4, 0), (8, 0), (16, 0), (4, 1), (8, 1), (8, 2), (16, 4))
"""(blocks recomputed together, blocks recomputed together once more inside such a group; 0: none)."""

# -- grid -------------------------------------------------------------------------------------------------------------


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    quick = preset == "quick"
    overrides = {"num_layers": 8, "vocab_size": 1000} if quick else {"context_length": 2048}
    model = model_config("tiny" if quick else "2.7B", **overrides)
    groups = ((0, 0), (1, 0), (2, 0), (4, 0), (4, 1)) if quick else GROUPS
    for precision, (outer, inner) in product(("fp32",) if quick else ("fp32", "bf16"), groups):
        run = dataclasses.replace(base, model=model, size="", precision=precision, checkpoint_blocks=outer)
        yield {**run.to_dict(), "inner": inner}


def _label(config: Mapping[str, Any], experiments: Sequence[str]) -> str:
    return f"{config['size']} {config['precision']} groups {config['checkpoint_blocks']}/{config['inner']}"


# -- tables -----------------------------------------------------------------------------------------------------------


def _tables(cells: Cells) -> list[Table]:
    return [_table(own) for own in grouped(cells, lambda cell: cell.get("precision")).values()]


def _table(cells: Cells) -> Table:
    columns = [Column(Text("group", "组")), Column(Text("inside it", "组内")), Column(terms.STEP, "ms")]
    columns += [Column(Text("over none", "相对不重计算"))]
    columns += [Column(name, "GiB") for name in (terms.PEAK, terms.PREDICTED, terms.TRACED)]
    columns += [Column(terms.ERROR), Column(Text("traced, error", "追踪，误差"))]
    base = next((cell.value("step_time") for cell in cells if cell.ok and not cell.get("checkpoint_blocks")), None)
    rows = []
    for cell in sorted(cells, key=lambda cell: (cell.get("inner") > 0, cell.get("checkpoint_blocks"))):
        group = [str(cell.get("checkpoint_blocks") or "none"), str(cell.get("inner") or "")]
        if not cell.ok:
            rows.append([*group, cell.verdict, *[""] * 6])
            continue
        step, peak = cell.value("step_time"), cell.value("peak_memory") or 1.0
        found = [cell.value(name) for name in ("predicted_memory", "predicted_by_tracing_memory")]
        errors = ["" if size is None else f"{size / peak - 1:+.2%}" for size in found]
        over = f"{step / base:.2f}x" if step and base else ""
        rows.append([*group, ms(step), over, *map(gib, (peak, *found)), *errors])
    shown = ["checkpoint_blocks"]
    title = title_of(cells[0].experiment, Text("blocks recomputed together", "一起重计算的块"), cells, shown)
    return Table(title, columns, rows, [*_best(cells), *remarks_on(cells, shown, on_spread=False)])


def _best(cells: Cells) -> list[Text]:
    """Notes on the group with the least memory, predicted and measured."""
    ok = [cell for cell in cells if cell.ok]
    flat, nested = Text("flat", "不嵌套"), Text("of all", "全部")
    notes = []
    for what, chosen in ((flat, [cell for cell in ok if not cell.get("inner")]), (nested, ok)):
        if chosen:
            names = [_group_name(_least(chosen, metric)) for metric in ("predicted_by_tracing_memory", "peak_memory")]
            notes.append(
                say(
                    "least memory, {}: groups of {} predicted, {} measured",
                    "显存最少（{}）：预测每组 {}，实测 {}",
                    *(what, *names),
                )
            )
    return notes


def _least(cells: Cells, metric: str) -> CellView:
    """The simplest of the cells whose memory is within a thousandth of the least."""
    least = min(cell.value(metric) or float("inf") for cell in cells)
    near = [cell for cell in cells if (cell.value(metric) or float("inf")) <= 1.001 * least]
    return min(near, key=lambda cell: (cell.get("inner"), cell.get("checkpoint_blocks") or float("inf")))


def _group_name(cell: CellView) -> Text:
    outer, inner = cell.get("checkpoint_blocks"), cell.get("inner")
    if not outer:
        return Text("none", "不重计算")
    return say("{} with {} inside", "{}（组内 {}）", str(outer), str(inner)) if inner else Text(str(outer))


# -- charts -----------------------------------------------------------------------------------------------------------


def _charts(cells: Cells) -> list[Chart]:
    """For each precision, time against memory; then the peaks, measured and predicted."""
    ordered = sorted(cells, key=lambda cell: (cell.get("inner") > 0, cell.get("checkpoint_blocks"), cell.get("inner")))
    by_precision = grouped(ordered, lambda cell: str(cell.get("precision")))
    return [*map(_trade_off, by_precision.values()), _peaks(ordered, by_precision)]


def _trade_off(cells: Cells) -> Chart:
    fine = sorted(having(cells, "peak_memory", "step_time"), key=lambda cell: known(cell, "peak_memory"))
    flat = [_place(cell) for cell in fine if not cell.get("inner")]
    nested = [_place(cell) for cell in fine if cell.get("inner")]
    series = [
        Series(Text("one level of groups", "一层分组"), flat),
        Series(Text("groups inside groups", "组内再分组"), nested, drawn="marks"),
    ]
    front = best_trade_off([*flat, *nested])
    if len(front) > 1:
        series.append(Series(Text("best trade-off", "最佳权衡"), front, drawn="line"))
    title = say("Recomputation, time against memory: {}", "重计算，时间与显存：{}", _settings(cells[0]))
    along = listed((_bar(cell) for cell in fine if not cell.get("inner")), (", ", "、"))
    note = say("means; blocks in a group, along the line: {}", "均值；沿线各点的每组块数：{}", along)
    return Chart("", title, "lines", Text("peak, GiB", "峰值，GiB"), terms.MS, series, digits=1, note=note)


def _settings(cell: CellView) -> Text:
    size, precision = size_name(cell.get("size")), str(cell.get("precision"))
    values = (size, str(cell.get("batch_size")), str(cell.get("context_length")), precision)
    return say("{}, {} x {} tokens, {}", "{}，{} x {} 个 token，{}", *values)


def _place(cell: CellView) -> Point:
    return Point(known(cell, "peak_memory") / GIB, 1e3 * known(cell, "step_time"), name=_bar(cell).en)


def best_trade_off(points: Iterable[Point]) -> list[Point]:
    """The points that no other beats in both time and memory, by memory."""
    found: list[Point] = []
    for point in sorted(points, key=lambda point: (point.x, point.y)):
        if not found or point.y < found[-1].y:
            found.append(point)
    return found


def _peaks(cells: Cells, by_precision: Mapping[str, Cells]) -> Chart:
    def points(own: Cells, metric: str) -> list[Point]:
        return joined(measured(cell, metric, _bar(cell), GIB) for cell in own)

    series = []
    for name, own in by_precision.items():
        failed = [Point(_bar(cell), 0.0, note=terms.OUT_OF_MEMORY) for cell in own if cell.is_oom]
        series.append(Series(Text(name), [*failed, *points(own, "peak_memory")]))
    highest = max((value_of(cell, "peak_memory") or 0.0 for cell in cells), default=0.0)
    title = Text("Peak by blocks recomputed together", "峰值与一起重计算的块数")
    x = Text(
        "blocks in a group; 8/2: groups of 8, and inside them of 2", "每组块数；8/2：每组 8 块，组内再以 2 块为一组"
    )
    return Chart("", title, "bars", x, terms.GIB_TEXT, series, limits=gpu_limit(cells, highest), digits=2)


def _bar(cell: CellView) -> Text:
    outer, inner = cell.get("checkpoint_blocks"), cell.get("inner")
    return Text(f"{outer}/{inner}" if inner else str(outer)) if outer else Text("none", "不重计算")


# -- findings ---------------------------------------------------------------------------------------------------------


def _least_memory(cells: Cells) -> Text | None:
    said = None
    for precision, own in grouped(cells, lambda cell: str(cell.get("precision"))).items():
        said = together(said, _best_group(precision, own))
    return said


def _best_group(precision: str, cells: Cells) -> Text | None:
    fine = [cell for cell in having(cells, "peak_memory") if cell.get("checkpoint_blocks")]
    if not fine:
        return None
    best = _least(fine, "peak_memory")
    said = say(
        "in {} {} need the least memory of all groups: {} GiB",
        "{} 下各种分组中 {} 最省显存：{} GiB",
        *(precision, _groups(best), gib(value_of(best, "peak_memory"))),
    )
    whole = _without_recomputation(cells)
    return say("{}, {}", "{}，{}", said, whole) if whole else said


def _groups(cell: CellView) -> Text:
    """The groups of a cell that recomputes, in a sentence."""
    sizes = (str(cell.get("checkpoint_blocks")), str(cell.get("inner")))
    if cell.get("inner"):
        return say("groups of {} with groups of {} inside", "每组 {} 块、内层每组 {} 块", *sizes)
    return say("groups of {}", "每组 {} 块", sizes[0])


def _without_recomputation(cells: Cells) -> Text | None:
    for cell in (cell for cell in cells if not cell.get("checkpoint_blocks")):
        if peak := value_of(cell, "peak_memory"):
            return say("against {} GiB without recomputation", "不重计算时为 {} GiB", gib(peak))
        if needed := re.match(r"oom: needs ([\d.,]+) GiB", cell.status):
            en = "against {} GiB without recomputation, which does not fit"
            return say(en, "不重计算时需要 {} GiB，放不下", needed[1])
    return None


def _recompute_time(cells: Cells) -> Text | None:
    """State what recomputing costs against none, and nesting against the same groups without it."""
    fine = having(cells, "step_time")
    flat = {settings_of(cell): cell for cell in fine if not cell.get("inner")}
    nested = [_pair(cell, base) for cell in fine if cell.get("inner") and (base := flat.get(settings_of(cell)))]
    grouped = [_pair(*pair) for pair in pairs_of(list(flat.values()), "checkpoint_blocks", 0)]
    step, plain = Text("a step with recomputation", "重计算时每步"), Text("one without", "不重计算时")
    deeper, flat_step = Text("a step with nested groups", "嵌套分组时每步"), Text("one without nesting", "不嵌套时")
    said = compared(step, plain, grouped) if grouped else None
    return together(said, compared(deeper, flat_step, nested)) if nested else said


def _pair(cell: CellView, base: CellView) -> tuple[float, Text]:
    """The speed-up over the baseline with the cell's group, for `compared`."""
    return speed_up((cell, base)), say("{}, {}", "{}，{}", _groups(cell), str(cell.get("precision")))


def _traced_prediction(cells: Cells) -> Text | None:
    found = [
        abs(known(cell, "predicted_by_tracing_memory") / known(cell, "peak_memory") - 1)
        for cell in having(cells, "peak_memory", "predicted_by_tracing_memory")
    ]
    values = (str(len(found)), error_text(max(found)))
    if len(found) == 1:
        return say("the peak predicted by tracing is off by {}", "由追踪预测的峰值误差 {}", values[1])
    return say("{} peaks predicted by tracing are off by {} at most", "{} 个由追踪预测的峰值最大误差 {}", *values)


CHECKPOINTING = Experiment(
    name="checkpointing",
    title=Text("Recomputing activations", "激活重计算"),
    question=Text(
        "How many blocks should be recomputed together, predicted and measured?", "应当几块一组重计算，预测与实测如何？"
    ),
    grid=_grid,
    instrument=Instrument(
        "checkpointing",
        "cs336_systems.experiments.memory.measure_memory:measure_recomputation",
        label=_label,
        memory=step_memory,
    ),
    tables=_tables,
    charts=_charts,
    group="memory",
    findings=(_least_memory, _recompute_time, _traced_prediction),
    problems_2026=("gradient_checkpointing",),
    order=20,
)
