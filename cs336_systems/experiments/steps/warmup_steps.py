"""What do too few warm-up steps do to the numbers?"""

from collections.abc import Iterable
from itertools import product
from math import isfinite

from cs336_systems.config import COURSE_SIZES, RunConfig
from cs336_systems.experiments.spec import Config, Experiment, run_config
from cs336_systems.experiments.steps.instruments import STEP
from cs336_systems.record import steady_from
from cs336_systems.report import terms
from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Chart, Point, Series
from cs336_systems.report.phrases import (
    having,
    median_of,
    naming,
    scale_of,
    settings_of,
    size_of,
    speed_up,
    times_text,
    value_of,
)
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import cell_table, ms, percent, spread, varying
from cs336_systems.table import Column, Table
from cs336_systems.text import Text, listed, say


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    if preset == "quick":
        sizes: tuple[str, ...] = ("small",) if base.device_type == "cuda" else ("tiny",)
    else:
        sizes = COURSE_SIZES if preset == "full" else ("small", "2.7B")
    for size, steps in product(sizes, (0, 1, 2, 5)):
        yield run_config(base, size, warmup_steps=steps)


def _tables(cells: Cells) -> list[Table]:
    shown = varying(cells, always=("size", "warmup_steps"))
    columns = [Column(name, "ms") for name in (terms.FORWARD, terms.BACKWARD, terms.STEP)]
    columns += [Column(Text("first step", "首步"), "ms"), Column(Text("steady from step", "从第几步起稳定"))]

    def row(cell: CellView) -> list[str]:
        steps = cell.metrics["warmup_time"].numbers + cell.metrics["step_time"].numbers
        steady = steady_from(steps)
        times = [spread(cell.statistics(f"{phase}_time")) for phase in ("forward", "backward", "step")]
        return [*times, ms(steps[0]), "never" if steady is None else str(steady + 1)]

    what = Text("mean ± std by warm-up steps", "各预热步数下的均值 ± 标准差")
    return [cell_table(what, cells, shown, columns, row)]


def _charts(cells: Cells) -> list[Chart]:
    """Step times without warm-up, by size: measuring may begin where a curve becomes flat."""
    series = []
    for cell in cells:
        if cell.ok and cell.get("warmup_steps") == 0:
            times = cell.metrics["step_time"].numbers
            points = [Point(number, 1e3 * seconds) for number, seconds in enumerate(times, start=1)]
            series.append(Series(Text(str(cell.get("size"))), points))
    title = Text("Steps from a cold start, without warm-up", "无预热时从冷启动开始的各步")
    return [Chart("", title, "lines", Text("step", "步"), terms.MS, series, log_y=True)]


def _first_step(cells: Cells) -> Text | None:
    """Compare the first step without warm-up with a steady one, for every size."""
    fine = sorted(having(cells, "step_time"), key=scale_of)
    said = []
    for cold in (cell for cell in fine if cell.get("warmup_steps") == 0):
        steady = median_of(_warmest(cold, fine), "step_time")
        first = cold.metrics["step_time"].numbers[0]
        if steady and isfinite(first):
            values = (size_of(cold), times_text(first / steady), ms(first), ms(steady))
            said.append(
                say("{1} times as long for {0} ({2} against {3} ms)", "{0} 为 {1} 倍（{2} 与 {3} ms）", *values)
            )
    if not said:
        return None
    return say(
        "without warm-up the first step takes, against a steady one, {}", "不预热时首步与稳定一步之比：{}", listed(said)
    )


def _warmest(cell: CellView, cells: Cells) -> CellView:
    """The run of the same work with the most warm-up steps."""
    same = [other for other in cells if settings_of(other, "warmup_steps") == settings_of(cell, "warmup_steps")]
    return max(same, key=lambda other: other.get("warmup_steps"))


def _distorted_mean(cells: Cells) -> Text | None:
    """State how far the cold first step shifts the mean, for the size where it does most."""
    fine = having(cells, "step_time")
    pairs = [(_warmest(cell, fine), cell) for cell in fine if cell.get("warmup_steps") == 0]
    warm, cold = max(pairs, key=speed_up)
    if warm is cold:
        return None
    means = [value_of(cell, "step_time") or 0.0 for cell in (cold, warm)]
    off = percent(means[0] / means[1] - 1, 0)
    return say(
        "it puts the mean of {0} off by {1}: {2} ms, after {4} warm-up steps {3} ms",
        "它使 {0} 的均值偏差 {1}：{2} ms，预热 {4} 步后为 {3} ms",
        *(size_of(cold), off, ms(means[0]), ms(means[1]), str(warm.get("warmup_steps"))),
    )


def _steady(cells: Cells) -> Text | None:
    fine = having(cells, "step_time")
    found = []
    for cell in fine:
        steps = [r for name in ("warmup_time", "step_time") if name in cell.metrics for r in cell.metrics[name].numbers]
        found.append((steady_from(steps), cell))
    known = [(first + 1, cell) for first, cell in found if first is not None]
    if not known:
        return None
    latest, cell = max(known, key=lambda pair: pair[0])
    return say(
        "of {} runs {} settle, the last from step {} on ({})",
        "{} 次运行中 {} 次稳定，最晚从第 {} 步起（{}）",
        *(str(len(found)), str(len(known)), str(latest), naming(fine)(cell)),
    )


WARMUP = Experiment(
    name="warmup",
    title=Text("Warm-up", "预热"),
    question=Text("What do too few warm-up steps do to the numbers?", "预热步数太少会怎样影响数字？"),
    grid=_grid,
    instrument=STEP,
    identity=("warmup_steps",),
    tables=_tables,
    charts=_charts,
    findings=(_first_step, _distorted_mean, _steady),
    order=20,
)
