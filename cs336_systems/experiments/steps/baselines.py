"""Experiments on what lower precision and torch.compile gain and cost, against fp32 and against eager."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from typing import Any

from cs336_systems.config import PLAIN_PRECISIONS, SIZES_2026, RunConfig
from cs336_systems.experiments.spec import HANDOUT_2026, Config, Experiment, run_config
from cs336_systems.experiments.steps.step_time import STEP, sizes
from cs336_systems.report import entries, terms
from cs336_systems.report.cells import CellView, grouped
from cs336_systems.report.document import Chart, Highlight, Limit, Point, Series
from cs336_systems.report.names import size_name
from cs336_systems.report.phrases import (
    MOST,
    compared,
    having,
    known,
    memory_beside,
    named_speed_ups,
    pairs_of,
    scale_of,
    size_of,
    speed_up,
    times_text,
    together,
)
from cs336_systems.report.points import bar_name, means_of
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import ms, number, varying
from cs336_systems.table import Table
from cs336_systems.text import Text, say

Pair = tuple[CellView, CellView]
"""A cell and its baseline."""


def against(cells: Cells, field: str, baseline: Any, what: Text, extra: Sequence[entries.Entry] = ()) -> list[Table]:
    """Return rows with their speed-up over the row that differs from them in `field` alone."""
    base_of = entries.baselines(cells, lambda cell: cell.get(field) == baseline, field)
    columns = [
        entries.ms(terms.FORWARD, "forward_time"),
        entries.ms(terms.BACKWARD, "backward_time"),
        entries.ms(terms.OPTIMIZER, "optimizer_time"),
        entries.ms(terms.STEP, "step_time"),
        entries.std(terms.STD, "step_time"),
        entries.speed_up(terms.SPEED_UP, "step_time", base_of),
        entries.gib(terms.PEAK, "peak_memory"),
        entries.over_base(terms.MEMORY, "peak_memory", base_of),
        *extra,
    ]
    return [entries.cell_table(what, cells, columns, shown=varying(cells, always=("size", field)))]


def speed_up_chart(cells: Cells, field: str, baseline: Any, title: Text) -> Chart:
    """Chart the speed-up of each value of `field` over the baseline, by size."""
    pairs = [pair for pair in pairs_of(cells, field, baseline) if pair[0].get("mode") == "train-step"]
    series = []
    for members in grouped((cell for cell, _ in pairs), lambda cell: cell.get(field)).values():
        points = [Point(size_name(pair[0].get("size")), speed_up(pair)) for pair in pairs if pair[0] in members]
        series.append(Series(bar_name(members[0], [field]), points))
    base = Text("eager") if baseline is False else Text(str(baseline))
    times = say("times as fast as {}", "速度为 {} 的倍数", base)
    note = say("training steps; ratios of {}", "训练步；{}之比", means_of(cells))
    limits = [Limit(1.0, base)]
    return Chart("", title, "bars", terms.SIZE, times, series, horizontal=True, digits=2, note=note, limits=limits)


def largest_pair(cells: Cells, field: str, value: Any, baseline: Any) -> Pair | None:
    """Return the largest model's training step with this value, and its baseline."""
    pairs = [pair for pair in pairs_of(cells, field, baseline) if pair[0].get("mode") == "train-step"]
    return next((pair for pair in reversed(pairs) if pair[0].get(field) == value), None)


def highlight(rank: int, pair: Pair | None, what: Text, base: Text) -> list[Highlight]:
    """Return the speed-up of a pair for the first screen, or the slow-down if it is slower."""
    if pair is None:
        return []
    gain = speed_up(pair)
    size, times = size_name(pair[0].get("size")), [ms(known(cell, "step_time")) for cell in pair]
    value = Text(f"{times_text(max(gain, 1 / gain))}x")
    faster = say("faster with {} than with {}", "{} 与 {} 的速度之比", what, base)
    slower = say("slower with {} than with {}", "{} 与 {} 的步时之比", what, base)
    detail = say("{} training step: {} ms against {} ms", "{} 训练步：{} ms 对 {} ms", size, *times)
    return [Highlight(rank, value, faster if gain >= 1 else slower, detail)]


def compared_with(ours: Text, other: Text, pairs: Sequence[Pair]) -> Text | None:
    """Compare the step times of pairs, and their peak memory where it was measured."""
    ratios = [1 / speed_up(pair, "peak_memory") for pair in pairs if len(having(pair, "peak_memory")) == 2]
    return together(compared(ours, other, named_speed_ups(pairs)), memory_beside(ratios, other))


# -- precision --------------------------------------------------------------------------------------------------------


def _precision_grid(preset: str, base: RunConfig) -> Iterable[Config]:
    on_cpu = base.device_type == "cpu"  # which has no TF32, and runs fp16 a hundred times slower than fp32
    precisions = PLAIN_PRECISIONS if preset == "full" and not on_cpu else ("fp32", "bf16")
    modes = ("inference", "train-step") if preset == "quick" and on_cpu else ("train-step",)
    for size, precision, mode in product(sizes(preset, base), precisions, modes):
        yield run_config(base, size, precision=precision, mode=mode)
    if preset == HANDOUT_2026:  # whose largest model fits on one GPU only without an optimizer
        for precision in precisions:
            yield run_config(base, SIZES_2026[-1], precision=precision, mode="forward-backward")


def _precision_gain(cells: Cells, which: int) -> Text | None:
    """Compare the first, second or third lower precision with fp32."""
    pairs = pairs_of(cells, "precision", "fp32")
    precision = list(dict.fromkeys(cell.get("precision") for cell, _ in pairs))[which]
    chosen = [pair for pair in pairs if pair[0].get("precision") == precision]
    return compared_with(Text(str(precision)), Text("fp32"), chosen)


PRECISION = Experiment(
    name="precision",
    title=Text("Precision", "精度"),
    question=Text("How much time and memory does lower precision save?", "降低精度能节省多少时间和显存？"),
    grid=_precision_grid,
    instrument=STEP,
    tables=lambda cells: against(
        cells, "precision", "fp32", Text("time and memory against fp32", "时间与显存，与 fp32 相比")
    ),
    charts=lambda cells: [
        speed_up_chart(cells, "precision", "fp32", Text("Speed-up over fp32 by size", "各规模相对 fp32 的加速比"))
    ],
    findings=tuple(partial(_precision_gain, which=number) for number in range(MOST)),
    highlights=lambda cells: highlight(
        60, largest_pair(cells, "precision", "bf16", "fp32"), Text("bf16"), Text("fp32")
    ),
    group="speed",
    problems_2026=("benchmarking_mixed_precision",),
    order=30,
)

# -- torch.compile ----------------------------------------------------------------------------------------------------


def _compile_grid(preset: str, base: RunConfig) -> Iterable[Config]:
    for size, compiled in product(sizes(preset, base), (False, True)):
        yield run_config(base, size, compile=compiled)


def _compile_tables(cells: Cells) -> list[Table]:
    def counted(metric: str, digits: int) -> Callable[[CellView], str]:
        return lambda cell: "" if cell.value(metric) is None else number(cell.value(metric), digits)

    extra = (
        entries.of(Text("compile time", "编译时间"), counted("compile_time", 1), "s"),
        entries.of(Text("graph breaks", "图中断"), counted("graph_breaks", 0)),
    )
    what = Text("eager against torch.compile", "eager 与 torch.compile 对比")
    return against(cells, "compile", False, what, extra)


def _compile_charts(cells: Cells) -> list[Chart]:
    compiled = sorted(having(cells, "compile_time"), key=scale_of)
    points = [Point(size_name(cell.get("size")), known(cell, "compile_time")) for cell in compiled]
    title = Text("Compile time", "编译时间")
    note = Text("the first step, less a steady one", "首步减去稳定的一步")
    return [
        speed_up_chart(cells, "compile", False, Text("Speed-up by torch.compile", "torch.compile 的加速比")),
        Chart("", title, "bars", terms.SIZE, Text("s"), [Series(title, points)], horizontal=True, digits=1, note=note),
    ]


def _compile_gains(cells: Cells) -> Text | None:
    step, eager = Text("a compiled step", "编译后训练步"), Text("an eager one", "eager")
    return compared_with(step, eager, pairs_of(cells, "compile", False))


def _compile_cost(cells: Cells) -> Text | None:
    pairs = [pair for pair in pairs_of(cells, "compile", False) if having(pair[:1], "compile_time")]
    worst, _ = max(pairs, key=lambda pair: known(pair[0], "compile_time"))
    seconds = number(known(worst, "compile_time"), 1)
    said = say("compiling takes up to {} s ({})", "编译最多需要 {} s（{}）", seconds, size_of(worst))
    cell, base = pairs[-1]
    saved = known(base, "step_time") - known(cell, "step_time")
    if saved <= 0:
        return together(said, say("for {} it never pays off", "{} 无法收回编译时间", size_of(cell)))
    steps = number(known(cell, "compile_time") / saved, 0)
    return together(said, say("for {} it pays off after {} steps", "{} 在 {} 步之后收回编译时间", size_of(cell), steps))


COMPILE = Experiment(
    name="compile",
    title=Text("torch.compile"),
    question=Text("What does torch.compile give, and cost?", "torch.compile 的收益和代价是什么？"),
    grid=_compile_grid,
    instrument=STEP,
    tables=_compile_tables,
    charts=_compile_charts,
    findings=(_compile_gains, _compile_cost),
    highlights=lambda cells: highlight(
        70, largest_pair(cells, "compile", True, False), Text("torch.compile"), Text("eager PyTorch")
    ),
    group="speed",
    problems_2026=("torch_compile",),
    order=40,
)
