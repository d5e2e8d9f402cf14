"""How long does a step take, by size, by warm-up, and by another timer? Also shows what `cs336 bench` measured."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from math import isfinite

from cs336_systems.config import COURSE_SIZES, MODES, RunConfig
from cs336_systems.experiments.spec import (
    Config,
    Experiment,
    Instrument,
    label_step,
    require_gpu,
    run_config,
    step_is_cold,
    step_memory,
)
from cs336_systems.record import steady_from
from cs336_systems.report import entries, terms
from cs336_systems.report.cells import PHASES, CellView
from cs336_systems.report.document import Chart, Point, Series
from cs336_systems.report.phrases import (
    MODE_WORDS,
    extremes,
    having,
    known,
    median_of,
    named_values,
    naming,
    scale_of,
    size_of,
    speed_up,
    times_text,
    together,
    value_of,
    worst_prediction,
)
from cs336_systems.report.points import FEW, measured, series_of
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import (
    failed_row,
    ms,
    number,
    percent,
    ratio,
    remarks_on,
    row_name,
    rows_table,
    settings_of,
    signed,
    tflops,
    varying,
)
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, listed, say

STEP = Instrument(
    name="step",
    measure="cs336_systems.experiments.steps.measure_step:measure_step",
    label=label_step,
    label_has_name=False,
    memory=step_memory,
    needs_fresh_process=step_is_cold,
    takes_peak_tflops=True,
)
"""Times a training step; several experiments share it."""


def sizes(preset: str, base: RunConfig) -> tuple[str, ...]:
    """The course's sizes; small ones for a quick run."""
    if preset != "quick":
        return COURSE_SIZES
    return ("small", "medium") if base.device_type == "cuda" else ("tiny",)


# -- end_to_end and bench: by size ------------------------------------------------------------------------------------


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    contexts: tuple[int | None, ...] = (512, 128, 256, 1024) if preset == "full" else (None,)
    for context, size, mode in product(contexts, sizes(preset, base), MODES):
        yield run_config(base, size, context, mode=mode)


def _tables(cells: Cells) -> list[Table]:
    return [_by_phase(cells), _throughput(cells)]


def _by_phase(cells: Cells) -> Table:
    statistics = (terms.MEAN, terms.STD, terms.MIN, terms.MAX)
    columns = [word(terms.PHASE), *(Column(name, "ms") for name in statistics), Column(terms.COUNT)]

    def rows(cell: CellView) -> Iterable[list[str | Text]]:
        if not cell.ok:
            yield failed_row(cell, columns)
        # A step of one phase has no sum: the row of the step would repeat the phase's.
        phases = [phase for phase in PHASES if f"{phase}_time" in cell.metrics]
        for phase in phases[:-1] if len(phases) == 2 else phases:
            if found := cell.statistics(f"{phase}_time"):
                yield [phase, *map(ms, (found.mean, found.std, found.min, found.max)), str(found.n)]

    return rows_table(Text("time by phase", "各阶段时间"), cells, columns, rows)


def _throughput(cells: Cells) -> Table:
    def backward_over_forward(cell: CellView) -> str:
        return ratio(cell.value("backward_time"), cell.value("forward_time"))

    columns = [
        entries.ms(terms.STEP, "step_time"),
        entries.of(terms.TOKENS_PER_SECOND, lambda cell: number(cell.tokens_per_second, 0)),
        entries.of(terms.TFLOPS, lambda cell: tflops(cell.flops_per_second)),
        entries.of(terms.MFU, lambda cell: percent(cell.mfu)),
        entries.of(Text("backward / forward", "后向 / 前向"), backward_over_forward),
        entries.gib(terms.PEAK, "peak_memory"),
        *entries.reserved(cells),
        entries.gib(terms.PREDICTED, "predicted_memory"),
        entries.of(terms.ERROR, lambda cell: signed(cell.memory_error, 1)),
    ]
    return entries.cell_table(Text("throughput and memory", "吞吐与显存"), cells, columns)


def _charts(cells: Cells) -> list[Chart]:
    chosen = [cell for cell in cells if cell.ok and cell.get("mode") in (None, "train-step")] or [*cells]
    if len(chosen) > FEW:
        return []
    shown = varying(chosen)
    named = [(cell, row_name(cell, shown).en) for cell in chosen]
    series = [
        series_of(name, (measured(cell, f"{phase}_time", row) for cell, row in named))
        for phase, name in terms.PHASE_NAMES.items()
    ]
    title = Text("A training step by phase", "训练步各阶段耗时")
    kept = [one for one in series if one.points]
    return [Chart("", title, "stacked", terms.SIZE, terms.MS, kept, horizontal=len(chosen) > 6)]


def _whole_steps(cells: Cells) -> list[CellView]:
    """Training steps where there are any, else the longest mode measured; by size."""
    fine = sorted(having(cells, "step_time"), key=scale_of)
    modes = [cell.get("mode") for cell in fine]
    mode = next((mode for mode in reversed(MODES) if mode in modes), None)
    return [cell for cell in fine if cell.get("mode") == mode]


def _step(cells: Cells) -> Text | None:
    fine = _whole_steps(cells)
    large = fine[-1]
    small = next(cell for cell in fine if settings_of(cell, "size") == settings_of(large, "size"))
    if scale_of(small) < scale_of(large):
        return together(_by_size(small, large, naming(fine)), _backward(large))
    first = min(fine, key=lambda cell: known(cell, "step_time"))
    return together(_by_speed(first, fine), _backward(first))


def _backward(cell: CellView) -> Text | None:
    forward, backward = (value_of(cell, f"{phase}_time") for phase in ("forward", "backward"))
    if not forward or not backward:
        return None
    return say("backward takes {} times forward", "后向是前向的 {} 倍", times_text(backward / forward))


def _by_size(small: CellView, large: CellView, name: Callable[[CellView], Text]) -> Text:
    times = [known(cell, "step_time") for cell in (large, small)]
    return say(
        "{0}'s {1} takes {2} ms, {3} times {4}'s ({5} ms)",
        "{0} 的{1}为 {2} ms，是 {4}（{5} ms）的 {3} 倍",
        *(name(large), MODE_WORDS.get(str(large.get("mode")), Text("step", "一步")), ms(times[0])),
        *(times_text(times[0] / times[1]), name(small), ms(times[1])),
    )


def _by_speed(first: CellView, fine: Cells) -> Text:
    last = max(fine, key=lambda cell: known(cell, "step_time"))
    times = [known(cell, "step_time") for cell in (first, last)]
    if len(fine) == 1:
        rate = number(first.tokens_per_second, 0)
        return say(
            "a step of {} takes {} ms: {} tokens/s", "{} 每步 {} ms：{} tokens/s", first.name, ms(times[0]), rate
        )
    name = naming(fine)
    return say(
        "of {0} configurations {1} is the fastest with {2} ms a step, {3} times as fast as {4} ({5} ms)",
        "{0} 个配置中 {1} 最快，每步 {2} ms，速度是 {4}（{5} ms）的 {3} 倍",
        *(str(len(fine)), name(first), ms(times[0]), times_text(times[1] / times[0]), name(last), ms(times[1])),
    )


def _mfu(cells: Cells) -> Text | None:
    found = named_values(_whole_steps(cells), lambda cell: cell.mfu)
    return say("MFU: {}", "MFU 为 {}", extremes(found, percent))


END_TO_END = Experiment(
    name="end_to_end",
    title=Text("Time of a step by size", "各规模一步的时间"),
    question=Text(
        "How long do forward, backward and the optimizer take, by size?", "各规模的前向、后向和优化器各要多久？"
    ),
    grid=_grid,
    instrument=STEP,
    tables=_tables,
    charts=_charts,
    findings=(_step, _mfu, worst_prediction),
    order=10,
)
BENCH = replace(
    END_TO_END,
    name="bench",
    title=Text("Single configurations", "单个配置"),
    question=Text("How long does a step take, and how much memory?", "一步要多久，用多少显存？"),
    runnable=False,
    charts_after_run=False,
    order=90,
)
"""Cells of `cs336 bench`."""

# -- warmup: too few steps before measuring ---------------------------------------------------------------------------


def _warmup_grid(preset: str, base: RunConfig) -> Iterable[Config]:
    chosen = sizes("quick", base)[:1] if preset == "quick" else COURSE_SIZES if preset == "full" else ("small", "2.7B")
    for size, steps in product(chosen, (0, 1, 2, 5)):
        yield run_config(base, size, warmup_steps=steps)


def _warmup_tables(cells: Cells) -> list[Table]:
    def settled(cell: CellView) -> str:
        steady = steady_from(_all_steps(cell))
        return "never" if steady is None else str(steady + 1)

    columns = [
        entries.mean_and_std(terms.FORWARD, "forward_time"),
        entries.mean_and_std(terms.BACKWARD, "backward_time"),
        entries.mean_and_std(terms.STEP, "step_time"),
        entries.of(Text("first step", "首步"), lambda cell: ms(_all_steps(cell)[0]), "ms"),
        entries.of(Text("steady from step", "从第几步起稳定"), settled),
    ]
    what = Text("mean ± std by warm-up steps", "各预热步数下的均值 ± 标准差")
    return [entries.cell_table(what, cells, columns, shown=varying(cells, always=("size", "warmup_steps")))]


def _all_steps(cell: CellView) -> list[float]:
    """Seconds of the warm-up steps and of the measured ones."""
    recorded = [cell.metrics[name] for name in ("warmup_time", "step_time") if name in cell.metrics]
    return [seconds for record in recorded for seconds in record.numbers]


def _warmup_charts(cells: Cells) -> list[Chart]:
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
    return (
        None
        if not said
        else say(
            "without warm-up the first step takes, against a steady one, {}",
            "不预热时首步与稳定一步之比：{}",
            listed(said),
        )
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
    means = [known(cell, "step_time") for cell in (cold, warm)]
    off = percent(means[0] / means[1] - 1, 0)
    return say(
        "it puts the mean of {0} off by {1}: {2} ms, after {4} warm-up steps {3} ms",
        "它使 {0} 的均值偏差 {1}：{2} ms，预热 {4} 步后为 {3} ms",
        *(size_of(cold), off, ms(means[0]), ms(means[1]), str(warm.get("warmup_steps"))),
    )


def _steady(cells: Cells) -> Text | None:
    fine = having(cells, "step_time")
    settled = [(steady_from(_all_steps(cell)), cell) for cell in fine]
    known_from = [(first + 1, cell) for first, cell in settled if first is not None]
    latest, cell = max(known_from, key=lambda pair: pair[0])
    return say(
        "of {} runs {} settle, the last from step {} on ({})",
        "{} 次运行中 {} 次稳定，最晚从第 {} 步起（{}）",
        *(str(len(fine)), str(len(known_from)), str(latest), naming(fine)(cell)),
    )


WARMUP = Experiment(
    name="warmup",
    title=Text("Warm-up", "预热"),
    question=Text("What do too few warm-up steps do to the numbers?", "预热步数太少会怎样影响数字？"),
    grid=_warmup_grid,
    instrument=STEP,
    identity=("warmup_steps",),
    tables=_warmup_tables,
    charts=_warmup_charts,
    findings=(_first_step, _distorted_mean, _steady),
    order=20,
)

# -- timing_agreement: another timer ----------------------------------------------------------------------------------


def _timer_grid(preset: str, base: RunConfig) -> Iterable[Config]:
    require_gpu(TIMING_AGREEMENT.name, base, "do_bench times with CUDA events")
    for size in ("small",) if preset == "quick" else ("small", "large", "2.7B"):
        yield run_config(base, size)


def _timer_tables(cells: Cells) -> list[Table]:
    columns = [word(terms.PHASE), Column(Text("wall clock", "墙钟"), "ms")]
    columns += [Column(Text("CUDA events", "CUDA event 计时"), "ms"), Column(Text("do_bench"), "ms")]
    columns += [Column(Text("wall over do_bench", "墙钟相对 do_bench"))]

    def rows(cell: CellView) -> Iterable[list[str]]:
        for phase in ("forward", "backward", "step"):
            names = (f"{phase}_time", f"{phase}_event_time", f"do_bench_{phase}_time")
            wall, events, other = (cell.value(name) for name in names)
            excess = f"{wall / other - 1:+.2%}" if wall and other else ("" if cell.ok else cell.verdict)
            yield [phase, ms(wall), ms(events), ms(other), excess]

    what = Text("the same work by three clocks (means)", "三种时钟测同样的工作（均值）")
    return [rows_table(what, cells, columns, rows, notes=remarks_on(cells))]


def _largest_difference(cells: Cells) -> Text | None:
    found = []
    for cell in sorted((cell for cell in cells if cell.ok), key=scale_of):
        for phase in ("forward", "backward", "step"):
            wall, other = (value_of(cell, name) for name in (f"{phase}_time", f"do_bench_{phase}_time"))
            if wall and other:
                name = say("{} {}", "{} {}", size_of(cell), {**terms.PHASE_NAMES, "step": terms.STEP}[phase])
                found.append((abs(wall / other - 1), name, cell))
    off, name, _ = max(found, key=lambda row: row[0])
    said = say(
        "the clock and do_bench differ by {} at most ({})", "墙钟与 do_bench 最多相差 {}（{}）", percent(off, 2), name
    )
    largest = found[-1][2]
    own = [off for off, _, cell in found if cell is largest]
    if len(own) == len(found):
        return said
    return together(said, say("for {} by {}", "{} 最多 {}", size_of(largest), percent(max(own), 2)))


TIMING_AGREEMENT = Experiment(
    name="timing_agreement",
    title=Text("Agreement of timers", "计时的一致性"),
    question=Text(
        "Does another timer give the same times for the same work?", "换一个计时器，同样的工作是否得到同样的时间？"
    ),
    grid=_timer_grid,
    instrument=Instrument("agreement", "cs336_systems.experiments.steps.measure_step:measure_agreement"),
    tables=_timer_tables,
    findings=(_largest_difference,),
    order=70,
)
