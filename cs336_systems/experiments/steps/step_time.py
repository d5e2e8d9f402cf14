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
    beside,
    compared,
    error_text,
    having,
    in_mode,
    is_same,
    known,
    longer,
    median_of,
    named_values,
    naming,
    ranging,
    scale_of,
    size_of,
    speed_up,
    together,
    value_of,
    with_name,
    with_time,
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
    row_words,
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
    return longer(terms.BACKWARD, terms.FORWARD, backward / forward) if forward and backward else None


def _by_size(small: CellView, large: CellView, name: Callable[[CellView], Text]) -> Text:
    times = [known(cell, "step_time") for cell in (large, small)]
    mode = in_mode(large.get("mode"))
    other = with_time(Text(f"that of {name(small).en}", name(small).in_("zh")), ms(times[1]))
    return say(
        "{0} of {1} takes {2} ms: {3}",
        "{1} 的 {0} 用时 {2} ms，{3}",
        *(mode, name(large), ms(times[0]), beside(times[1] / times[0], other)),
    )


def _by_speed(first: CellView, fine: Cells) -> Text:
    last = max(fine, key=lambda cell: known(cell, "step_time"))
    times = [known(cell, "step_time") for cell in (first, last)]
    if len(fine) == 1:
        settings = listed(row_words(first, ("size", "context_length", "precision")), (", ", "，"))
        return say(
            "{} takes {} ms, {} tokens/s ({})",
            "{} 用时 {} ms，{} tokens/s（{}）",
            *(in_mode(first.get("mode")), ms(times[0]), number(first.tokens_per_second, 0), settings),
        )
    name = naming(fine)
    fastest = say(
        "the fastest of {} configurations takes {} ms a step ({})",
        "{} 个配置中最快的每步 {} ms（{}）",
        *(str(len(fine)), ms(times[0]), name(first)),
    )
    slowest = [(times[1] / times[0], name(last))]
    return together(fastest, compared(Text("it", "它"), Text("the slowest", "最慢配置"), slowest)) or fastest


def _mfu(cells: Cells) -> Text | None:
    return ranging("MFU is {}", "MFU 为 {}", named_values(_whole_steps(cells), lambda cell: cell.mfu), percent)


END_TO_END = Experiment(
    name="end_to_end",
    title=Text("Time of a step by size", "各规模的单步时间"),
    question=Text(
        "How long do forward, backward and the optimizer take, by size?", "各规模下前向、后向和优化器各用多少时间？"
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
    question=Text("How long does a step take, and how much memory?", "一步用多少时间，占多少显存？"),
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
    name = naming([cell for cell in fine if cell.get("warmup_steps") == 0])
    found = []
    for cold in (cell for cell in fine if cell.get("warmup_steps") == 0):
        steady = median_of(_warmest(cold, fine), "step_time")
        first = cold.metrics["step_time"].numbers[0]
        if steady and isfinite(first) and first > 0:
            found.append((steady / first, name(cold), first, steady))
    _, where, first, steady = min(found, key=lambda row: row[0])
    subject = Text("without warm-up the first step", "不预热时首步")
    said = compared(subject, Text("a steady one", "稳定步"), [(ratio, own) for ratio, own, *_ in found])
    times = say("it takes {} ms, a steady one {} ms", "首步 {} ms，稳定后 {} ms", ms(first), ms(steady))
    if len(found) > 1:
        times = say("for {} {}", "{} {}", where, times)
    return together(said, times)


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
    ratio = means[0] / means[1]
    if is_same(ratio):
        return say("it changes the mean of {} by less than 2%", "它使 {} 的均值变化不到 2%", size_of(cold))
    raised = Text("raises", "升高") if ratio > 1 else Text("lowers", "降低")
    return say(
        "it {1} the mean of {0} by {2}, from {4} ms to {3} ms",
        "它使 {0} 的均值{1} {2}：由 {4} ms 变为 {3} ms",
        *(size_of(cold), raised, percent(abs(ratio - 1), 0)),
        *(ms(seconds) for seconds in means),
    )


def _steady(cells: Cells) -> Text | None:
    fine = having(cells, "step_time")
    settled = [(steady_from(_all_steps(cell)), cell) for cell in fine]
    known_from = [(first + 1, cell) for first, cell in settled if first is not None]
    if not known_from:
        return say("none of {} runs settles", "{} 次运行均未稳定", str(len(fine))) if fine else None
    latest, cell = max(known_from, key=lambda pair: pair[0])
    if len(fine) == 1:
        return say("the run settles from step {} on", "运行从第 {} 步起趋于稳定", str(latest))
    runs = say("{} of {} runs settle", "{1} 次运行中 {0} 次趋于稳定", str(len(known_from)), str(len(fine)))
    if len(known_from) == len(fine):
        runs = say("all {} runs settle", "{} 次运行全部趋于稳定", str(len(fine)))
    return with_name(say("{}, the last from step {} on", "{}，最晚从第 {} 步起", runs, str(latest)), naming(fine)(cell))


WARMUP = Experiment(
    name="warmup",
    title=Text("Warm-up", "预热"),
    question=Text("What do too few warm-up steps do to the numbers?", "预热步数过少对结果有什么影响？"),
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
                name = say("{}, {}", "{}，{}", size_of(cell), {**terms.PHASE_NAMES, "step": terms.STEP}[phase])
                found.append((abs(wall / other - 1), name, cell))
    off, name, _ = max(found, key=lambda row: row[0])
    timers = Text("the wall clock and Triton's timer", "墙钟与 Triton 的计时器")
    said = say("{} differ by {} at most", "{}最多相差 {}", timers, error_text(off))
    largest = found[-1][2]
    own = [off for off, _, cell in found if cell is largest]
    if len(own) == len(found):
        return with_name(said, name)
    by = say("for {} they differ by {} at most", "{} 最多相差 {}", size_of(largest), error_text(max(own)))
    return together(with_name(said, name), by)


TIMING_AGREEMENT = Experiment(
    name="timing_agreement",
    title=Text("Agreement of timers", "计时器的一致性"),
    question=Text(
        "Does another timer give the same times for the same work?", "换一个计时器，同样的工作测得的时间是否相同？"
    ),
    grid=_timer_grid,
    instrument=Instrument("agreement", "cs336_systems.experiments.steps.measure_step:measure_agreement"),
    tables=_timer_tables,
    findings=(_largest_difference,),
    order=70,
)
