"""How long does a step take, by size, by warm-up, and by another timer? Also shows what `cs336 bench` measured."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from math import isfinite
from statistics import median

from cs336_systems.config import COURSE_SIZES, MODES, SIZES_2026, RunConfig
from cs336_systems.experiments.spec import (
    HANDOUT_2026,
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
from cs336_systems.report.cells import PHASES, CellView, grouped
from cs336_systems.report.document import Chart, Highlight, Point, Series
from cs336_systems.report.names import size_name
from cs336_systems.report.phrases import (
    SAME,
    beside,
    compared,
    error_text,
    having,
    in_mode,
    known,
    longer,
    median_of,
    mode_name,
    named_values,
    naming,
    ranging,
    scale_of,
    size_of,
    speed_up,
    times_text,
    together,
    value_of,
    with_name,
    with_time,
    worst_prediction,
)
from cs336_systems.report.points import FEW, bar_name, means_of, measured, series_of
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import (
    failed_row,
    keys,
    ms,
    number,
    percent,
    ratio,
    remarks_on,
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
    """Return the sizes of the handout; small ones for a quick run."""
    if preset != "quick":
        return SIZES_2026 if preset == HANDOUT_2026 else COURSE_SIZES
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
                yield [terms.phase_name(phase), *map(ms, (found.mean, found.std, found.min, found.max)), str(found.n)]

    return rows_table(Text("time by phase", "各阶段时间"), cells, columns, rows)


def _throughput(cells: Cells) -> Table:
    def backward_over_forward(cell: CellView) -> str:
        return ratio(cell.value("backward_time"), cell.value("forward_time"))

    columns = [
        entries.ms(terms.STEP, "step_time"),
        *entries.predicted_time(cells),
        entries.of(terms.TOKENS_PER_SECOND, lambda cell: number(cell.tokens_per_second, 0)),
        entries.of(terms.TFLOPS, lambda cell: tflops(cell.flops_per_second)),
        entries.of(terms.MFU, lambda cell: percent(cell.mfu)),
        entries.of(Text("backward / forward", "反向 / 前向"), backward_over_forward),
        entries.gib(terms.PEAK, "peak_memory"),
        *entries.reserved(cells),
        entries.gib(terms.PREDICTED, "predicted_memory"),
        entries.of(terms.ERROR, lambda cell: signed(cell.memory_error, 1)),
    ]
    return entries.cell_table(Text("throughput and memory", "吞吐与显存"), cells, columns)


def _charts(cells: Cells) -> list[Chart]:
    """Return charts of phases, MFU and tokens/s by size, and of every single step: for training steps, or for the
    longest mode measured."""
    chosen = _whole_steps(cells)
    if not chosen or len(chosen) > FEW:
        return []
    what = mode_name(chosen[0].get("mode"))
    found = [_phases_chart(chosen, what), _deviations(chosen)]
    if len(chosen) > 1:
        mfu = say("MFU: {}", "MFU：{}", what)
        rate = say("Tokens per second: {}", "每秒处理的 token 数：{}", what)
        percent_of_peak = Text("% of the dense peak", "占稠密峰值的 %")
        found += [
            _by_size_chart(chosen, mfu, percent_of_peak, lambda cell: 100 * cell.mfu if cell.mfu else None, 1),
            _by_size_chart(chosen, rate, terms.TOKENS_PER_SECOND, lambda cell: cell.tokens_per_second, 0),
        ]
    return found


def _phases_chart(cells: Cells, what: Text) -> Chart:
    shown = varying(cells)
    series = [
        series_of(name, (measured(cell, f"{phase}_time", bar_name(cell, shown)) for cell in cells))
        for phase, name in terms.PHASE_NAMES.items()
    ]
    title = say("Time by phase: {}", "各阶段时间：{}", what)
    kept = [one for one in series if one.points]
    return Chart("", title, "stacked", _bars_are(shown), terms.MS, kept, horizontal=True, note=means_of(cells))


def _by_size_chart(cells: Cells, title: Text, y: Text, value: Callable[[CellView], float | None], digits: int) -> Chart:
    """Chart bars by size, with a series per value of the other settings that differ; with one size, bars by those
    settings."""
    shown = varying(cells, always=())
    named = ["size"] if "size" in shown else shown
    others = [name for name in shown if name not in named]
    series = []
    for members in grouped(cells, lambda cell: tuple(keys(cell, others))).values():
        points = [Point(bar_name(cell, named), found) for cell in members if (found := value(cell))]
        series.append(Series(bar_name(members[0], others) if others else y, points))
    note = say("from {}", "由 {}计算", means_of(cells))
    return Chart("", title, "bars", _bars_are(named), y, series, horizontal=True, digits=digits, note=note)


def _bars_are(named: Sequence[str]) -> Text:
    """Return the heading of bars that are named by these fields."""
    return terms.SIZE if named == ["size"] else Text("configuration", "配置")


def _deviations(cells: Cells) -> Chart:
    """Chart every step's deviation from the mean of its configuration, which tables show."""
    shown, steps, medians = varying(cells), [], []
    for cell in cells:
        name, mean = bar_name(cell, shown), known(cell, "step_time")
        times = cell.metrics["step_time"].numbers
        steps += [Point(name, 100 * (seconds / mean - 1)) for seconds in times if isfinite(seconds)]
        medians.append(Point(name, 100 * ((cell.median("step_time") or mean) / mean - 1)))
    series = [Series(Text("one step", "一步"), steps), Series(terms.MEDIAN, medians)]
    title = Text("How far single steps are from their mean", "单步时间与均值的偏差")
    away = Text("% from the mean", "与均值的偏差 %")
    note = Text("0: the mean of the configuration", "0：该配置的均值")
    return Chart("", title, "dots", _bars_are(shown), away, series, digits=2, note=note)


def _whole_steps(cells: Cells) -> list[CellView]:
    """Return training steps if there are any, else the longest mode measured, ordered by size."""
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
        settings = bar_name(first, ("size", "context_length", "precision"))
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


# -- end_to_end and bench: first screen -------------------------------------------------------------------------------


def _highlights(cells: Cells) -> list[Highlight]:
    """Return the tokens per second and the time of a step: of the largest model, with its fastest settings."""
    steps = _whole_steps(cells)
    if not steps:
        return []
    largest = max(steps, key=lambda cell: (scale_of(cell), cell.tokens_per_second))
    return [_rate(largest), _time(largest)]


def _rate(cell: CellView) -> Highlight:
    shape = f"{cell.get('batch_size')} x {cell.get('context_length')}"
    detail = say("{} tokens a step, {}", "每步 {} token，{}", shape, str(cell.get("precision")))
    value = say("{} tokens/s", "{} tokens/s", number(cell.tokens_per_second, 0))
    return Highlight(50, value, _step_name(cell), detail)


def _time(cell: CellView) -> Highlight:
    phases = [(name, value_of(cell, f"{phase}_time")) for phase, name in terms.PHASE_NAMES.items()]
    detail = listed(say("{} {}", "{} {}", name, ms(seconds)) for name, seconds in phases if seconds)
    return Highlight(51, Text(f"{ms(known(cell, 'step_time'))} ms"), _step_name(cell), say("{} ms", "{} ms", detail))


def _step_name(cell: CellView) -> Text:
    return say("{}, {}", "{} {}", size_name(cell.get("size")), mode_name(cell.get("mode")))


def _noise(cells: Cells) -> Text | None:
    """State how much the steps of one configuration vary."""
    found = [cell.statistics("step_time") for cell in _whole_steps(cells)]
    spreads = [one.std / one.mean for one in found if one and one.n > 1]
    return say(
        "steps of one configuration vary by {} of their mean",
        "同一配置的单步时间波动为均值的 {}",
        percent(median(spreads)),
    )


END_TO_END = Experiment(
    name="end_to_end",
    title=Text("Time of a step by size", "各规模的单步时间"),
    question=Text(
        "How long do forward, backward and the optimizer take, by size?", "各规模下前向、反向和优化器各用多少时间？"
    ),
    grid=_grid,
    instrument=STEP,
    tables=_tables,
    charts=_charts,
    findings=(_step, _mfu, worst_prediction),
    highlights=_highlights,
    trust=_noise,
    group="speed",
    problems_2026=("benchmarking_script",),
    order=10,
)
BENCH = replace(
    END_TO_END,
    name="bench",
    title=Text("Single configurations", "单个配置"),
    question=Text("How long does a step take, and how much memory?", "一步用多少时间，占多少显存？"),
    runnable=False,
    charts_after_run=False,
    trust=lambda cells: None,  # that of end_to_end says it
    order=90,
)
"""Cells of `cs336 bench`."""

# -- warmup: too few steps before measuring ---------------------------------------------------------------------------


def _warmup_grid(preset: str, base: RunConfig) -> Iterable[Config]:
    chosen = sizes("quick", base)[:1] if preset == "quick" else COURSE_SIZES if preset == "full" else ("small", "2.7B")
    for size, steps in product(chosen, (0, 1, 2, 5)):
        yield run_config(base, size, warmup_steps=steps)


def _warmup_tables(cells: Cells) -> list[Table]:
    def settled(cell: CellView) -> str | Text:
        steady = steady_from(_all_steps(cell))
        return Text("never", "从未") if steady is None else str(steady + 1)

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
    """Return the seconds of the warm-up steps and of the measured ones."""
    recorded = [cell.metrics[name] for name in ("warmup_time", "step_time") if name in cell.metrics]
    return [seconds for record in recorded for seconds in record.numbers]


def _warmup_charts(cells: Cells) -> list[Chart]:
    fine = sorted(having(cells, "step_time"), key=scale_of)
    return [_from_cold(fine), _shifted_means(fine)]


def _from_cold(cells: Cells) -> Chart:
    """Chart steps without warm-up relative to a steady step, by size: measuring may begin where a curve reaches 1."""
    series = []
    for cell, steady in _cold_and_steady(cells):
        times = cell.metrics["step_time"].numbers
        points = [Point(number, seconds / steady) for number, seconds in enumerate(times, start=1)]
        series.append(Series(size_name(cell.get("size")), points))
    title = Text("Steps from a cold start, without warm-up", "无预热时从冷启动开始的各步")
    y = Text("times a steady step", "稳定一步的倍数")
    note = Text("a steady step: the median after the most warm-up steps", "稳定一步：预热步数最多时的中位数")
    return Chart("", title, "lines", Text("step", "步"), y, series, note=note)


def _shifted_means(cells: Cells) -> Chart:
    """Chart the error of the mean that too few warm-up steps cause."""
    series = []
    for members in grouped(cells, lambda cell: settings_of(cell, "warmup_steps")).values():
        warm = _warmest(members[0], members)
        others = sorted((cell for cell in members if cell is not warm), key=lambda cell: cell.get("warmup_steps"))
        points = [
            Point(str(cell.get("warmup_steps")), 100 * (known(cell, "step_time") / known(warm, "step_time") - 1))
            for cell in others
        ]
        series.append(Series(size_name(warm.get("size")), points))
    title = Text("Error of the mean by warm-up steps", "预热步数对均值的影响")
    steps, y = Text("warm-up steps", "预热步数"), Text("% off the mean", "均值偏差 %")
    note = say("{}, against the mean after the most warm-up steps", "{}，与预热步数最多时的均值相比", means_of(cells))
    return Chart("", title, "bars", steps, y, series, digits=1, note=note)


def _cold_and_steady(cells: Cells) -> list[tuple[CellView, float]]:
    """Return the runs without warm-up, each with the median step of the same work after the most warm-up steps."""
    cold = [cell for cell in cells if cell.get("warmup_steps") == 0]
    found = [(cell, median_of(_warmest(cell, cells), "step_time")) for cell in cold]
    return [(cell, steady) for cell, steady in found if steady]


def _cold_highlight(cells: Cells) -> list[Highlight]:
    """Return the largest ratio of a first step without warm-up to a steady step."""
    fine = having(cells, "step_time")
    found = [(cell.metrics["step_time"].numbers[0], steady, cell) for cell, steady in _cold_and_steady(fine)]
    if not found:
        return []
    first, steady, cell = max(found, key=lambda row: row[0] / row[1])
    what = Text("first step without warm-up, against a steady one", "不预热的首步与稳定一步之比")
    values = (size_name(cell.get("size")), ms(first), ms(steady))
    detail = say("{}: first {} ms, steady {} ms", "{}：首步 {} ms，稳定一步 {} ms", *values)
    return [Highlight(70, Text(f"{times_text(first / steady)}x"), what, detail)] if first > steady else []


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
    """Return the run of the same work with the most warm-up steps."""
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
    if ratio <= SAME:
        return say("it does not raise the mean of {}", "它没有抬高 {} 的均值", size_of(cold))
    return say(
        "it raises the mean of {} by {}, from {} ms to {} ms",
        "它使 {} 的均值升高 {}：由 {} ms 变为 {} ms",
        *(size_of(cold), percent(ratio - 1, 0), ms(means[1]), ms(means[0])),
    )


def _steady(cells: Cells) -> Text | None:
    fine = having(cells, "step_time")
    settled = [(steady_from(_all_steps(cell)), cell) for cell in fine]
    known_from = [(first + 1, cell) for first, cell in settled if first is not None]
    if not known_from:
        return say("of {} runs none settles", "{} 次运行均未稳定", str(len(fine))) if fine else None
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
    problems_2026=("benchmarking_script",),
    tables=_warmup_tables,
    charts=_warmup_charts,
    findings=(_first_step, _distorted_mean, _steady),
    highlights=_cold_highlight,
    group="trust",
    order=20,
)

# -- timing_agreement: another timer ----------------------------------------------------------------------------------


def _timer_grid(preset: str, base: RunConfig) -> Iterable[Config]:
    require_gpu(TIMING_AGREEMENT.name, base, "do_bench times with CUDA events")
    for size in ("small",) if preset == "quick" else ("small", "large", "2.7B"):
        yield run_config(base, size)


TIMED = ("forward", "backward", "step")
"""Phases that both timers measure."""


def _excess(cell: CellView, phase: str) -> float | None:
    """Return wall-clock time over do_bench's time, minus one."""
    wall, other = (value_of(cell, name) for name in (f"{phase}_time", f"do_bench_{phase}_time"))
    return wall / other - 1 if wall and other else None


def _timer_tables(cells: Cells) -> list[Table]:
    columns = [word(terms.PHASE), Column(Text("wall clock", "墙钟"), "ms")]
    columns += [Column(Text("CUDA events", "CUDA event 计时"), "ms"), Column(Text("do_bench"), "ms")]
    columns += [Column(Text("wall over do_bench", "墙钟相对 do_bench"))]

    def rows(cell: CellView) -> Iterable[list[str | Text]]:
        for phase in TIMED:
            names = (f"{phase}_time", f"{phase}_event_time", f"do_bench_{phase}_time")
            wall, events, other = (cell.value(name) for name in names)
            excess = f"{wall / other - 1:+.2%}" if wall and other else ("" if cell.ok else cell.verdict)
            yield [terms.phase_name(phase), ms(wall), ms(events), ms(other), excess]

    what = Text("the same work by three clocks (means)", "三种时钟测同样的工作（均值）")
    return [rows_table(what, cells, columns, rows, notes=remarks_on(cells))]


def _timer_charts(cells: Cells) -> list[Chart]:
    fine = sorted((cell for cell in cells if cell.ok), key=scale_of)
    series = []
    for phase in TIMED:
        found = [(size_name(cell.get("size")), _excess(cell, phase)) for cell in fine]
        points = [Point(size, 100 * excess) for size, excess in found if excess is not None]
        series.append(Series({**terms.PHASE_NAMES, "step": terms.STEP}[phase], points))
    title = Text("Wall clock over do_bench", "墙钟相对 do_bench")
    y = Text("% longer by the wall clock", "墙钟多出的 %")
    note = Text("means; the wall clock waits for the GPU after every phase", "均值；墙钟在每个阶段之后等待 GPU")
    return [Chart("", title, "bars", terms.SIZE, y, series, horizontal=True, digits=2, note=note)]


def _agreement(cells: Cells) -> Text | None:
    """State the largest difference of the two timers for the largest model: small ones wait for the host."""
    fine = sorted((cell for cell in cells if cell.ok), key=scale_of)
    found = [([abs(off) for phase in TIMED if (off := _excess(cell, phase)) is not None], cell) for cell in fine]
    offs, cell = [pair for pair in found if pair[0]][-1]
    return say(
        "wall clock and Triton's do_bench differ by {1} at most for {0}",
        "{0} 的墙钟时间与 Triton do_bench 最多相差 {1}",
        *(size_name(cell.get("size")), percent(max(offs))),
    )


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
    charts=_timer_charts,
    findings=(_largest_difference,),
    trust=_agreement,
    group="trust",
    order=70,
)
