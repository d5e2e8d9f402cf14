"""How long do forward, backward and the optimizer take, by size? Also shows what `cs336 bench` measured."""

from collections.abc import Callable, Iterable
from itertools import product
from math import isfinite

from cs336_systems.config import COURSE_SIZES, MODES, RunConfig
from cs336_systems.experiments.spec import Config, Experiment, run_config
from cs336_systems.experiments.steps.instruments import STEP
from cs336_systems.report import terms
from cs336_systems.report.cells import PHASES, CellView
from cs336_systems.report.document import Chart
from cs336_systems.report.phrases import (
    MODE_WORDS,
    extremes,
    having,
    naming,
    scale_of,
    settings_of,
    times_text,
    together,
    value_of,
    worst_prediction,
)
from cs336_systems.report.points import FEW, measured, series_of
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import (
    cell_table,
    gib,
    key_columns,
    keys,
    ms,
    number,
    percent,
    ratio,
    row_name,
    tflops,
    title_of,
    varying,
)
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, say

# -- grid -------------------------------------------------------------------------------------------------------------


def sizes(preset: str, base: RunConfig) -> tuple[str, ...]:
    """The course's sizes; small ones for a quick run."""
    if preset != "quick":
        return COURSE_SIZES
    return ("small", "medium") if base.device_type == "cuda" else ("tiny",)


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    contexts: tuple[int | None, ...] = (512, 128, 256, 1024) if preset == "full" else (None,)
    for context, size, mode in product(contexts, sizes(preset, base), MODES):
        yield run_config(base, size, context, mode=mode)


# -- tables -----------------------------------------------------------------------------------------------------------


def _tables(cells: Cells) -> list[Table]:
    return [_by_phase(cells), _throughput(cells)]


def _by_phase(cells: Cells) -> Table:
    shown = varying(cells)
    statistics = (terms.MEAN, terms.STD, terms.MIN, terms.MAX)
    columns = [word(terms.PHASE), *(Column(name, "ms") for name in statistics), Column(terms.COUNT)]
    rows = []
    for cell in cells:
        if not cell.ok:
            rows.append([*keys(cell, shown), cell.verdict, *[""] * 5])
        # A step of one phase has no sum: the row of the step would repeat the phase's.
        phases = [phase for phase in PHASES if f"{phase}_time" in cell.metrics]
        for phase in phases[:-1] if len(phases) == 2 else phases:
            found = cell.statistics(f"{phase}_time")
            if found:
                times = (found.mean, found.std, found.min, found.max)
                rows.append([*keys(cell, shown), phase, *map(ms, times), str(found.n)])
    title = title_of(cells[0].experiment, Text("time by phase", "各阶段时间"), cells, shown)
    return Table(title, [*key_columns(shown), *columns], rows)


def _throughput(cells: Cells) -> Table:
    columns = [
        Column(terms.STEP, "ms"),
        Column(terms.TOKENS_PER_SECOND),
        Column(terms.TFLOPS),
        Column(terms.MFU),
        Column(Text("backward / forward", "后向 / 前向")),
        Column(terms.PEAK, "GiB"),
        Column(terms.PREDICTED, "GiB"),
        Column(terms.ERROR),
    ]

    def row(cell: CellView) -> list[str]:
        return [
            ms(cell.value("step_time")),
            number(cell.tokens_per_second, 0),
            tflops(cell.flops_per_second),
            percent(cell.mfu),
            ratio(cell.value("backward_time"), cell.value("forward_time")),
            gib(cell.value("peak_memory")),
            gib(cell.value("predicted_memory")),
            f"{cell.memory_error:+.1%}" if cell.memory_error is not None else "",
        ]

    return cell_table(Text("throughput and memory", "吞吐与显存"), cells, varying(cells), columns, row)


# -- charts -----------------------------------------------------------------------------------------------------------


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


# -- findings ---------------------------------------------------------------------------------------------------------


def _whole_steps(cells: Cells) -> list[CellView]:
    """Training steps where there are any, else the longest mode measured; by size."""
    fine = sorted(having(cells, "step_time"), key=scale_of)
    modes = [cell.get("mode") for cell in fine]
    mode = next((mode for mode in reversed(MODES) if mode in modes), None)
    return [cell for cell in fine if cell.get("mode") == mode]


def _step(cells: Cells) -> Text | None:
    fine = _whole_steps(cells)
    if not fine:
        return None
    large = fine[-1]
    small = next(cell for cell in fine if settings_of(cell, "size") == settings_of(large, "size"))
    if scale_of(small) < scale_of(large):
        return together(_by_size(small, large, naming(fine)), _backward(large))
    first = min(fine, key=lambda cell: value_of(cell, "step_time") or 0.0)
    return together(_by_speed(first, fine), _backward(first))


def _backward(cell: CellView) -> Text | None:
    forward, backward = (value_of(cell, f"{phase}_time") for phase in ("forward", "backward"))
    if not forward or not backward:
        return None
    return say("backward takes {} times forward", "后向是前向的 {} 倍", times_text(backward / forward))


def _by_size(small: CellView, large: CellView, name: Callable[[CellView], Text]) -> Text:
    times = [value_of(cell, "step_time") or 0.0 for cell in (large, small)]
    return say(
        "{0}'s {1} takes {2} ms, {3} times {4}'s ({5} ms)",
        "{0} 的{1}为 {2} ms，是 {4}（{5} ms）的 {3} 倍",
        *(name(large), MODE_WORDS.get(str(large.get("mode")), Text("step", "一步")), ms(times[0])),
        *(times_text(times[0] / times[1]), name(small), ms(times[1])),
    )


def _by_speed(first: CellView, fine: Cells) -> Text:
    last = max(fine, key=lambda cell: value_of(cell, "step_time") or 0.0)
    times = [value_of(cell, "step_time") or 0.0 for cell in (first, last)]
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
    fine = _whole_steps(cells)
    name = naming(fine)
    found = [(cell.mfu, name(cell)) for cell in fine if cell.mfu and isfinite(cell.mfu)]
    return say("MFU: {}", "MFU 为 {}", extremes(found, percent)) if found else None


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
BENCH = Experiment(
    name="bench",
    title=Text("Single configurations", "单个配置"),
    question=Text("How long does a step take, and how much memory?", "一步要多久，用多少显存？"),
    instrument=STEP,
    runnable=False,
    tables=_tables,
    charts=_charts,
    charts_after_run=False,
    findings=(_step, _mfu, worst_prediction),
    order=90,
)
"""Cells of `cs336 bench`."""
