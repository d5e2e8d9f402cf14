"""How many blocks should be recomputed together, predicted and measured?"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from cs336_systems.config import ModelConfig, RunConfig, model_config
from cs336_systems.experiments.memory.peak_parts import gpu_limit
from cs336_systems.experiments.spec import HANDOUT_2026, Config, Experiment, Instrument, step_memory
from cs336_systems.record import GIB
from cs336_systems.report import terms
from cs336_systems.report.cells import CellView, grouped
from cs336_systems.report.document import Chart, Point, Series
from cs336_systems.report.names import blocks, size_name
from cs336_systems.report.phrases import (
    compared,
    error_text,
    having,
    known,
    pairs_of,
    size_of,
    speed_up,
    together,
    value_of,
)
from cs336_systems.report.points import joined, measured
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import gib, ms, remarks_on, settings_of, title_of
from cs336_systems.table import Column, Table
from cs336_systems.text import Text, listed, say


class Groups(NamedTuple):
    """Numbers of blocks that are recomputed together."""

    outer: int
    """Blocks per group; 0: no recomputation."""
    inner: int = 0
    """Blocks per inner group, nested in such a group; 0: no nesting."""
    recursive: bool = False
    """Groups are recomputed by halves."""

    @property
    def fields(self) -> Config:
        """Fields of a cell besides those of its step; without recursion they equal those of older records."""
        return {"inner": self.inner, **({"recursive": True} if self.recursive else {})}

    @classmethod
    def of(cls, cell: CellView) -> "Groups":
        return cls(cell.get("checkpoint_blocks"), cell.get("inner"), bool(cell.config.get("recursive")))

    @property
    def is_flat(self) -> bool:
        return not self.inner and not self.recursive


FLAT = tuple(map(Groups, (0, 1, 2, 4, 8, 16)))
NESTED = (Groups(4, 1), Groups(8, 1), Groups(8, 2), Groups(16, 4))
HALVES = Groups(1, recursive=True)
BETWEEN = (Groups(3), Groups(6))
"""Group sizes between the powers of two; 6 is about the square root of 32 blocks."""
DEPTHS = (8, 16, 32)
NARROW = {"d_model": 512, "d_ff": 2048, "num_heads": 8, "vocab_size": 1000, "context_length": 8192}
"""A model whose activations take more memory than its parameters: recomputation decides the peak at every depth."""

# -- grid -------------------------------------------------------------------------------------------------------------


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    if preset == "quick":
        model = model_config("tiny", num_layers=8, vocab_size=1000)
        yield from _cells(base, model, ("fp32",), (*FLAT[:4], Groups(4, 1), HALVES))
        return
    groups = (*FLAT, *NESTED, *((*BETWEEN, HALVES) if preset == HANDOUT_2026 else ()))
    yield from _cells(base, model_config("2.7B", context_length=2048), ("fp32", "bf16"), groups)
    if preset == HANDOUT_2026:
        long = dataclasses.replace(base, attention="auto", batch_size=8)
        for depth in DEPTHS:
            model = model_config("tiny", num_layers=depth, **NARROW)
            yield from _cells(long, model, ("bf16",), (*FLAT[:4], HALVES))


def _cells(
    base: RunConfig, model: ModelConfig, precisions: Iterable[str], groups: Iterable[Groups]
) -> Iterable[Config]:
    for precision, own in product(precisions, groups):
        run = dataclasses.replace(base, model=model, size="", precision=precision, checkpoint_blocks=own.outer)
        yield {**run.to_dict(), **own.fields}


def _label(config: Mapping[str, Any], experiments: Sequence[str]) -> str:
    by_halves = " by halves" if config.get("recursive") else ""
    groups = f"groups {config['checkpoint_blocks']}/{config['inner']}{by_halves}"
    return f"{config['size']} {config['precision']} {groups}"


# -- cells ------------------------------------------------------------------------------------------------------------


def _families(cells: Cells) -> list[Cells]:
    """Return cells that differ only in their groups and number of blocks, ordered by these."""
    names = ("d_model", "d_ff", "context_length", "batch_size", "attention", "precision")
    families = grouped(cells, lambda cell: tuple(cell.get(name) for name in names))
    return [sorted(own, key=_place) for own in families.values()]


def _place(cell: CellView) -> tuple[int, bool, bool, int, int]:
    groups = Groups.of(cell)
    return cell.get("num_layers"), groups.recursive, groups.inner > 0, groups.outer, groups.inner


def _by_depth(cells: Cells) -> Mapping[int, Cells]:
    return grouped(cells, lambda cell: cell.get("num_layers"))


def _flat(cells: Cells) -> list[CellView]:
    return [cell for cell in cells if Groups.of(cell).is_flat]


# -- tables -----------------------------------------------------------------------------------------------------------


def _tables(cells: Cells) -> list[Table]:
    return [_table(own) for own in _families(cells)]


def _table(cells: Cells) -> Table:
    depths = _by_depth(cells)
    several = len(depths) > 1
    columns = [Column(Text("blocks", "块数"))] if several else []
    columns += [Column(Text("group", "组")), Column(Text("inside it", "组内")), Column(terms.STEP, "ms")]
    columns += [Column(Text("over none", "相对不重计算"))]
    columns += [Column(name, "GiB") for name in (terms.PEAK, terms.PREDICTED, terms.TRACED)]
    columns += [Column(terms.ERROR), Column(Text("traced, error", "追踪，误差"))]
    plain = {cell.get("num_layers"): cell.value("step_time") for cell in cells if cell.ok and not Groups.of(cell).outer}
    rows: list[list[str | Text]] = []
    for cell in cells:
        groups, base = Groups.of(cell), plain.get(cell.get("num_layers"))
        inside = Text("halves", "二分") if groups.recursive else str(groups.inner or "")
        group = [*([str(cell.get("num_layers"))] if several else []), str(groups.outer or "none"), inside]
        if not cell.ok:
            rows.append([*group, cell.verdict, *[""] * 6])
            continue
        step, peak = cell.value("step_time"), cell.value("peak_memory") or 1.0
        found = [cell.value(name) for name in ("predicted_memory", "predicted_by_tracing_memory")]
        errors = ["" if size is None else f"{size / peak - 1:+.2%}" for size in found]
        over = f"{step / base:.2f}x" if step and base else ""
        rows.append([*group, ms(step), over, *map(gib, (peak, *found)), *errors])
    shown = ["checkpoint_blocks", *(["size"] if several else [])]
    title = title_of(cells[0].experiment, Text("blocks recomputed together", "一起重计算的块"), cells, shown)
    return Table(title, columns, rows, [*_best(depths[max(depths)]), *remarks_on(cells, shown, on_spread=False)])


def _best(cells: Cells) -> list[Text]:
    """Return notes on the group with the least memory, predicted and measured."""
    ok = [cell for cell in cells if cell.ok]
    flat, nested = Text("flat", "不嵌套"), Text("of all", "全部")
    notes = []
    for what, chosen in ((flat, _flat(ok)), (nested, ok)):
        if chosen:
            names = [_group_name(_least(chosen, metric)) for metric in ("predicted_by_tracing_memory", "peak_memory")]
            notes.append(
                say(
                    "least memory, {}: groups of {} predicted, {} measured",
                    "显存最少（{}）：预测每组 {}，实测 {}",
                    *(what, *names),
                )
            )
    return [*notes, *_beside_best(ok)]


def _beside_best(cells: Cells) -> list[Text]:
    """Return a note on the best groups without nesting, and on the next smaller and next larger ones."""
    flat = [cell for cell in _flat(cells) if Groups.of(cell).outer]
    if len(flat) < 2:
        return []
    best = flat.index(_least(flat, "peak_memory"))
    chosen = [flat[place] for place in (best, best - 1, best + 1) if 0 <= place < len(flat)]
    each = (say("{}: {} GiB", "{}：{} GiB", _group_name(cell), gib(cell.value("peak_memory"))) for cell in chosen)
    en = "one level, measured: the best group, then those beside it: {}"
    return [say(en, "一层分组，实测：最好的一组，然后是相邻的：{}", listed(each))]


def _least(cells: Cells, metric: str) -> CellView:
    """Return the simplest of the cells whose memory is within 0.1% of the least."""
    least = min(cell.value(metric) or float("inf") for cell in cells)
    near = [cell for cell in cells if (cell.value(metric) or float("inf")) <= 1.001 * least]
    return min(near, key=_complexity)


def _complexity(cell: CellView) -> tuple[bool, int, float]:
    outer, inner, recursive = Groups.of(cell)
    return recursive, inner, outer or float("inf")


def _group_name(cell: CellView) -> Text:
    outer, inner, recursive = Groups.of(cell)
    if not outer:
        return Text("none", "不重计算")
    if recursive:
        return say("{} by halves", "{}（二分）", str(outer))
    return say("{} with {} inside", "{}（组内 {}）", str(outer), str(inner)) if inner else Text(str(outer))


# -- charts -----------------------------------------------------------------------------------------------------------


def _charts(cells: Cells) -> list[Chart]:
    """Return, for each model and precision, a chart of time against memory, or of the peak by number of blocks; then
    the peaks."""
    families = _families(cells)
    of_one_depth = [cell for own in families if len(_by_depth(own)) == 1 for cell in own]
    found = [_trade_off(own) if own[0] in of_one_depth else _peak_by_depth(own) for own in families]
    return [*found, _peaks(of_one_depth)] if of_one_depth else found


def _peak_by_depth(cells: Cells) -> Chart:
    series = [
        Series(_bar(own[0]), [Point(cell.get("num_layers"), known(cell, "peak_memory") / GIB) for cell in own])
        for own in grouped(having(cells, "peak_memory"), Groups.of).values()
    ]
    values = (str(cells[0].get(name)) for name in ("d_model", "batch_size", "context_length", "precision"))
    where = say("width {}, {} x {} tokens, {}", "宽度 {}，{} x {} 个 token，{}", *values)
    title = say("Peak by the number of blocks: {}", "峰值与块数：{}", where)
    note = Text("a line for each number of blocks recomputed together", "每条线：一起重计算的块数")
    return Chart("", title, "lines", Text("blocks", "块数"), terms.GIB_TEXT, series, digits=2, note=note)


def _trade_off(cells: Cells) -> Chart:
    fine = sorted(having(cells, "peak_memory", "step_time"), key=lambda cell: known(cell, "peak_memory"))
    flat = [_point(cell) for cell in _flat(fine)]
    nested = [_point(cell) for cell in fine if not Groups.of(cell).is_flat]
    series = [
        Series(Text("one level of groups", "一层分组"), flat),
        Series(Text("groups inside groups", "组内再分组"), nested, drawn="marks"),
    ]
    front = best_trade_off([*flat, *nested])
    if len(front) > 1:
        series.append(Series(Text("best trade-off", "最佳权衡"), front, drawn="line"))
    title = say("Recomputation, time against memory: {}", "重计算，时间与显存：{}", _settings(cells[0]))
    along = listed(map(_bar, _flat(fine)), (", ", "、"))
    note = say("means; blocks in a group, along the line: {}", "均值；沿线各点的每组块数：{}", along)
    return Chart("", title, "lines", Text("peak, GiB", "峰值，GiB"), terms.MS, series, digits=1, note=note)


def _settings(cell: CellView) -> Text:
    size, precision = size_name(cell.get("size")), str(cell.get("precision"))
    values = (size, str(cell.get("batch_size")), str(cell.get("context_length")), precision)
    return say("{}, {} x {} tokens, {}", "{}，{} x {} 个 token，{}", *values)


def _point(cell: CellView) -> Point:
    return Point(known(cell, "peak_memory") / GIB, 1e3 * known(cell, "step_time"), name=_bar(cell).en)


def best_trade_off(points: Iterable[Point]) -> list[Point]:
    """Return the Pareto-optimal points in time and memory, ordered by memory."""
    found: list[Point] = []
    for point in sorted(points, key=lambda point: (point.x, point.y)):
        if not found or point.y < found[-1].y:
            found.append(point)
    return found


def _peaks(cells: Cells) -> Chart:
    def points(own: Cells, metric: str) -> list[Point]:
        return joined(measured(cell, metric, _bar(cell), GIB) for cell in own)

    series = []
    for name, own in grouped(cells, lambda cell: str(cell.get("precision"))).items():
        failed = [Point(_bar(cell), 0.0, note=terms.OUT_OF_MEMORY) for cell in own if cell.is_oom]
        series.append(Series(Text(name), [*failed, *points(own, "peak_memory")]))
    highest = max((value_of(cell, "peak_memory") or 0.0 for cell in cells), default=0.0)
    title = Text("Peak by blocks recomputed together", "峰值与一起重计算的块数")
    x = Text(
        "blocks in a group; 8/2: groups of 8, and inside them of 2", "每组块数；8/2：每组 8 块，组内再以 2 块为一组"
    )
    return Chart("", title, "bars", x, terms.GIB_TEXT, series, limits=gpu_limit(cells, highest), digits=2)


def _bar(cell: CellView) -> Text:
    outer, inner, recursive = Groups.of(cell)
    if recursive:
        return say("{}, halves", "{}，二分", str(outer))
    return Text(f"{outer}/{inner}" if inner else str(outer)) if outer else Text("none", "不重计算")


# -- findings ---------------------------------------------------------------------------------------------------------


def _least_memory(cells: Cells) -> Text | None:
    said = None
    for own in _families(cells):
        depths = _by_depth(own)
        if len(depths) == 1:
            said = together(said, _best_group(str(own[0].get("precision")), own))
        said = together(said, _halves_beside_flat(depths[max(depths)]))
    return said


def _halves_beside_flat(cells: Cells) -> Text | None:
    """Compare the peak of recomputation by halves with that of the best groups without nesting."""
    fine = [cell for cell in having(cells, "peak_memory") if cell.get("checkpoint_blocks")]
    flat, halves = _flat(fine), [cell for cell in fine if Groups.of(cell).recursive]
    if not flat or not halves:
        return None
    best = _least(flat, "peak_memory")
    return say(
        "with {} recomputation by halves needs {} GiB and the best groups of one level, of {}, {} GiB ({})",
        "{} 时二分重计算需要 {} GiB，一层分组中最好者每组 {} 块，需要 {} GiB（{}）",
        *(blocks(cells[0].get("num_layers")), gib(known(halves[0], "peak_memory"))),
        *(str(best.get("checkpoint_blocks")), gib(known(best, "peak_memory")), str(best.get("precision"))),
    )


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
    """Return the groups of a cell with recomputation as part of a sentence."""
    sizes = (str(cell.get("checkpoint_blocks")), str(cell.get("inner")))
    if Groups.of(cell).recursive:
        return say("groups of {} by halves", "每组 {} 块、二分重计算", sizes[0])
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
    """State the cost of recomputation against none, and of nested groups against the same groups without nesting."""
    fine = having(cells, "step_time")
    flat = {settings_of(cell): cell for cell in _flat(fine)}
    deep = [cell for cell in fine if not Groups.of(cell).is_flat]
    nested = [_pair(cell, base) for cell in deep if (base := flat.get(settings_of(cell)))]
    grouped = [_pair(*pair) for pair in pairs_of(list(flat.values()), "checkpoint_blocks", 0)]
    step, plain = Text("a step with recomputation", "重计算时每步"), Text("one without", "不重计算时")
    deeper, flat_step = Text("a step with nested groups", "嵌套分组时每步"), Text("one without nesting", "不嵌套时")
    said = compared(step, plain, grouped) if grouped else None
    return together(said, compared(deeper, flat_step, nested)) if nested else said


def _pair(cell: CellView, base: CellView) -> tuple[float, Text]:
    """Return the speed-up over the baseline with the cell's group, for `compared`."""
    return speed_up((cell, base)), say("{}, {}, {}", "{}，{}，{}", _groups(cell), size_of(cell), cell.get("precision"))


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
