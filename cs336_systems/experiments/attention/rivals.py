"""Our kernels against the fastest others: interleaved, as the course timed them, and inside a training step."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cs336_systems.config import RunConfig
from cs336_systems.experiments.attention.implementations import (
    MODULE,
    OURS,
    Size,
    attention_config,
    contestants,
    exponential,
    fastest,
    label_shape,
    lead,
    medians,
    rate,
    roofline,
    shape_name,
    side_by_side,
    time_quantity,
    views,
    worst_error,
)
from cs336_systems.experiments.spec import Config, Experiment, Instrument, label_step, require_gpu, run_config
from cs336_systems.record import Statistics
from cs336_systems.report import entries
from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Chart, Point
from cs336_systems.report.names import attention_name
from cs336_systems.report.phrases import (
    SAME,
    beside,
    compared,
    having,
    is_same,
    known,
    together,
    with_time,
)
from cs336_systems.report.points import bar_name, measured, series_of
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import FIELDS, kernel_ms, ms, row_name, tflops, varying
from cs336_systems.report.terms import ERROR, MEAN, MS, TFLOPS
from cs336_systems.table import Table
from cs336_systems.text import Text, listed, say

# -- attention_rivals: interleaved in one process ---------------------------------------------------------------------


SHAPES = (
    (Size(1, 16, 16384, 64), True),
    (Size(1, 16, 16384, 128), True),
    (Size(1, 16, 16384, 64), False),
    (Size(1, 16, 16384, 128), False),
    (Size(4, 16, 2048, 64), True),
    (Size(4, 16, 2048, 128), True),
    (Size(4, 12, 512, 64), True),
)
"""Size and causal mask: long, medium, and that of the small model."""


def rivals_grid(preset: str, base: RunConfig) -> Iterable[Config]:
    require_gpu("attention_rivals", base, "the rivals are GPU kernels")
    # Without flex: it takes longer to compile than all others to run, and `flash` and the leaderboard measure it.
    rivals = [name for name in contestants() if name != "flex"]
    for size, is_causal in SHAPES[-1:] if preset == "quick" else SHAPES:
        # A multiple of twice the number of names: each then follows each other equally often.
        fields: dict[str, Any] = {"implementations": rivals, "rounds": 2 * len(rivals)}
        if size.seq_len <= 8192:
            # The host launches slower than the GPU computes, and it may be busy for a second: the rounds together take
            # longer than that. "auto" chooses the implementation that launches fastest.
            names = ["auto", *rivals]
            fields = {"implementations": names, "rounds": 4 * len(names), "replayed": True}
        yield attention_config(base, size, "bf16", is_causal=is_causal, warmup_ms=20, rep_ms=60, **fields)


def rivals_tables(cells: Cells) -> list[Table]:
    shown = varying(cells, always=("batch_size", "heads", "head_dim", "seq_len", "is_causal"))
    note = Text(
        "times: medians over rounds of each round's median of do_bench, the implementations interleaved",
        "时间：各轮 do_bench 中位数的中位数，各实现交替测量",
    )
    return side_by_side(cells, shown, [note], with_lead=True)


def rivals_charts(cells: Cells) -> list[Chart]:
    """Rates as bars, and a roofline per precision."""
    by_cell = [(cell, views(cell)) for cell in cells if cell.ok]
    names = list(dict.fromkeys(name for _, own in by_cell for name in own))
    series = [series_of(name, (_bar(cell, own[name]) for cell, own in by_cell if name in own)) for name in names]
    title = Text("Forward and backward, TFLOP/s, implementations interleaved", "前向与后向 TFLOP/s，各实现交替测量")
    shape = Text("batch x heads x tokens x d", "batch x 头数 x 长度 x d")
    found = [Chart("", title, "bars", shape, TFLOPS, series, horizontal=True)]
    for precision in dict.fromkeys(cell.get("precision") for cell in cells):
        chosen = [own for cell, own in by_cell if cell.get("precision") == precision]
        found += roofline([(name, own[name]) for name in names for own in chosen if name in own], precision)
    return found


def _bar(cell: CellView, view: CellView) -> list[Point]:
    per_second = rate(view)
    return [Point(shape_name(cell), per_second / 1e12)] if per_second else []


FASTEST_RIVAL = Text("the fastest rival", "最快对手")


def _won(ratios: Sequence[float]) -> list[str]:
    """The number of shapes in which ours is faster by more than noise, and that of all."""
    return [str(sum(ratio > SAME for ratio in ratios)), str(len(ratios))]


def _leads(cells: Cells, metric: str) -> list[tuple[float, Text]]:
    """The lead over the fastest rival in each shape, with the shape's name."""
    fine = [cell for cell in cells if cell.ok]
    return [(found.ratio, _shape(cell)) for cell in fine if (found := lead(medians(cell, metric)))]


def _shape(cell: CellView) -> Text:
    sizes = [str(cell.get(name)) for name in ("batch_size", "seq_len", "head_dim")]
    return say("{} x {} tokens, head dim {}", "{} x {} 个 token，头维度 {}", *sizes)


def against_fastest(cells: Cells) -> Text | None:
    """Our lead over the fastest rival, forward and backward together."""
    leads = _leads(cells, "forward_backward_time")
    won, shapes = _won([ratio for ratio, _ in leads])
    said = say(
        "in forward and backward together, our attention is faster than the fastest rival in {} of {} shapes",
        "前向加后向，本项目的注意力在 {1} 个形状中有 {0} 个快于最快对手",
        *(won, shapes),
    )
    return together(said, compared(Text("it", "它"), FASTEST_RIVAL, leads))


def against_each(cells: Cells) -> Text | None:
    ratios: dict[str, list[float]] = {}
    for cell in (cell for cell in cells if cell.ok):
        times = medians(cell, "forward_backward_time")
        ours = fastest(times, ours=True)
        if ours is None:
            continue
        for name in (name for name in times if name not in OURS):
            ratios.setdefault(name, []).append(times[name] / times[ours])
    each = [
        say("than {} in {} of {} shapes", "{} {}/{}", attention_name(name), *_won(found))
        for name, found in ratios.items()
    ]
    return say("it is faster {}", "它快于各对手的形状数：{}", listed(each)) if each else None


def forward_alone(cells: Cells) -> Text | None:
    return compared(Text("forward alone", "单独前向"), FASTEST_RIVAL, _leads(cells, "forward_time"))


ATTENTION_RIVALS = Experiment(
    name="attention_rivals",
    title=Text("Attention interleaved with the fastest kernels", "与最快实现交替对比"),
    question=Text(
        "Is our kernel faster than the fastest others, measured interleaved?",
        "交替测量时，本项目的内核是否快于其他最快的实现？",
    ),
    instrument=Instrument("attention_rivals", f"{MODULE}:measure_rivals", label=label_shape),
    grid=rivals_grid,
    tables=rivals_tables,
    charts=rivals_charts,
    findings=(against_fastest, against_each, forward_alone),
    statistic="median",
    order=30,
)

# -- flash_leaderboard: the course's timing ---------------------------------------------------------------------------


TIME = "leaderboard_time"


def leaderboard_grid(preset: str, base: RunConfig) -> Iterable[Config]:
    require_gpu("flash_leaderboard", base, "the course timed it on one")
    warmup_ms, rep_ms = (200, 1000) if preset == "quick" else (1000, 10_000)
    for name in contestants():
        size = Size(1, 16, 16384, 64)
        yield attention_config(base, size, "bf16", implementation=name, warmup_ms=warmup_ms, rep_ms=rep_ms)


def leaderboard_tables(cells: Cells) -> list[Table]:
    shown = varying(cells, always=("implementation",))

    def rate_of(cell: CellView) -> str:
        seconds, flops = cell.value(TIME), cell.value("flops")
        return tflops(flops / seconds if flops and seconds else None)

    def of_time(show: Callable[[Statistics], float]) -> Callable[[CellView], str]:
        return lambda cell: kernel_ms(show(found)) if (found := cell.statistics(TIME)) else ""

    columns = [
        entries.of(MEAN, of_time(lambda found: found.mean), "ms"),
        entries.of(Text("std of tenths", "十等份的标准差"), of_time(lambda found: found.std), "ms"),
        entries.of(TFLOPS, rate_of),
        entries.of(ERROR, lambda cell: exponential(worst_error(cell))),
    ]
    notes = [
        Text(
            "forward, sum and backward as the course timed them; mean of do_bench",
            "按课程的方式对前向、求和与后向计时；do_bench 的均值",
        ),
        Text(
            "recorded are the means of ten equal parts of the run; std is the standard deviation of these",
            "保留的是整个运行十等份各自的均值：标准差由它们算出",
        ),
    ]
    return [
        entries.cell_table(Text("the course's leaderboard", "课程排行榜"), cells, columns, shown=shown, notes=notes)
    ]


def leaderboard_charts(cells: Cells) -> list[Chart]:
    times = series_of(Text("time", "耗时"), (measured(cell, TIME, str(cell.get("implementation"))) for cell in cells))
    title = Text("The course's leaderboard test", "课程排行榜测试")
    return [Chart("", title, "bars", FIELDS["implementation"], MS, [times], horizontal=True)]


def leaderboard_speed(cells: Cells) -> Text | None:
    times = {str(cell.get("implementation")): known(cell, TIME) for cell in having(cells, TIME)}
    ours, rival = fastest(times, ours=True), fastest(times, ours=False)
    if ours is None:
        return None
    said = say("{} takes {} ms", "{} 用时 {} ms", attention_name(ours), kernel_ms(times[ours]))
    if rival is None:
        return said
    name = with_time(attention_name(rival), kernel_ms(times[rival]))
    said = say("{}: {}", "{}，{}", said, beside(times[rival] / times[ours], name))
    others = [(times[name] / times[ours], attention_name(name)) for name in times if name not in (*OURS, rival)]
    return together(said, compared(Text("it", "它"), Text("the others", "其余实现"), others)) if others else said


FLASH_LEADERBOARD = Experiment(
    name="flash_leaderboard",
    title=Text("The course's leaderboard", "课程排行榜"),
    question=Text(
        "How fast is attention as the course's leaderboard timed it?", "按课程排行榜的计时方式，注意力有多快？"
    ),
    instrument=Instrument("flash_leaderboard", f"{MODULE}:measure_leaderboard", label=label_shape),
    grid=leaderboard_grid,
    tables=leaderboard_tables,
    charts=leaderboard_charts,
    findings=(leaderboard_speed,),
    order=40,
)

# -- attention_step: inside a training step ---------------------------------------------------------------------------


STEP_TIME = "step_time"


def step_grid(preset: str, base: RunConfig) -> Iterable[Config]:
    """Long contexts: the longer the context, the larger attention's share of a step."""
    on_cuda = base.device_type == "cuda"
    names = ["flash_hopper", "flash_triton", "sdpa_flash", "sdpa_cudnn"] if on_cuda else ["flash_torch", "sdpa"]
    run = dataclasses.replace(base, precision="bf16" if on_cuda else base.precision, batch_size=1)
    sizes: tuple[tuple[str, int | None], ...] = (("small", 4096), ("large", 4096), ("2.7B", 4096))
    if preset == "quick":
        sizes = (("small", 1024),) if on_cuda else (("tiny", None),)
    for size, context in sizes:
        # A multiple of the number of names: each then follows each other equally often.
        yield {**run_config(run, size, context), "implementations": names, "rounds": 2 * len(names)}


def step_tables(cells: Cells) -> list[Table]:
    """Median step times; the notes have the extremes, which show how far to trust a lead."""
    shown = varying(cells, always=("size", "context_length"))
    notes = [
        Text(
            "medians of steps of one model on one batch, its attention implementations interleaved",
            "同一模型、同一批数据上各步的中位数，各注意力实现交替测量",
        ),
        *(_extremes(cell, row_name(cell, shown)) for cell in cells if cell.ok),
    ]
    step = time_quantity(Text("training step", "训练步"), STEP_TIME, ms)
    with_lead = any(name in OURS for cell in cells for name in views(cell))
    return side_by_side(cells, shown, notes, with_lead=with_lead, quantities=(step,))


def _extremes(cell: CellView, name: Text) -> Text:
    found = {name: view.statistics(STEP_TIME) for name, view in views(cell).items()}
    each = ", ".join(f"{name} {ms(stats.min)} - {ms(stats.max)}" for name, stats in found.items() if stats)
    return say("minimum and maximum in ms, {}: {}", "最小与最大（ms），{}：{}", name, each)


def step_charts(cells: Cells) -> list[Chart]:
    names = dict.fromkeys(name for cell in cells if cell.ok for name in views(cell))
    series = [
        series_of(
            name,
            (measured(c.variant(name), STEP_TIME, f"{c.get('size')}, {c.get('context_length')}") for c in cells),
        )
        for name in names
    ]
    title = Text("A training step, attention implementations interleaved", "训练步，各注意力实现交替测量")
    return [Chart("", title, "bars", Text("size, context", "规模，上下文"), MS, series, horizontal=True)]


def step_speed(cells: Cells) -> Text | None:
    """Step times of the last cell: that of our fastest kernel, and those of its rivals."""
    fine = [cell for cell in cells if cell.ok and fastest(medians(cell, STEP_TIME), ours=True)]
    cell = fine[-1]
    times = medians(cell, STEP_TIME)
    ours = fastest(times, ours=True)
    assert ours is not None
    said: Text | None = say(
        "with {}, a training step takes {} ms ({})",
        "使用 {} 时训练步用时 {} ms（{}）",
        *(attention_name(ours), ms(times[ours])),
        bar_name(cell, ("size", "context_length")),
    )
    for name in (name for name in times if name not in OURS):
        said = together(said, _step_against(cell, ours, name, times[name] / times[ours]))
    return said


def _step_against(cell: CellView, ours: str, other: str, ratio: float) -> Text:
    """Compare a step with one that uses another implementation; where they differ, with the rounds that agree."""
    rounds, ahead = cell.config["rounds"], rounds_ahead(cell, ours, other)
    said = compared(Text("it", "它"), say("with {}", "使用 {} 时", attention_name(other)), [(ratio, Text(""))])
    if is_same(ratio):
        return said
    agree, of = (str(ahead), Text("faster", "更快")) if ratio > 1 else (str(rounds - ahead), Text("slower", "更慢"))
    return say("{} ({} in {} of {} rounds)", "{0}（{3} 轮中 {2} 轮{1}）", said, of, agree, str(rounds))


def rounds_ahead(cell: CellView, ours: str, other: str) -> int:
    """The number of rounds in which ours is faster.

    Clocks and the host drift from round to round, within one round for both alike: this can separate two
    implementations whose step times, taken together, overlap.
    """
    rounds = cell.config["rounds"]
    steps = len(cell.variant(ours).metrics[STEP_TIME].samples) // rounds
    mine, theirs = (_sums(cell.variant(name).samples(STEP_TIME), steps) for name in (ours, other))
    if len(mine) != rounds:
        raise ValueError(f"{rounds} rounds, and samples for {len(mine)}")
    return sum(a < b for a, b in zip(mine, theirs, strict=True))


def _sums(samples: Sequence[float], width: int) -> list[float]:
    """The sums of `width` consecutive samples each: the steps of one round."""
    return [sum(samples[start : start + width]) for start in range(0, len(samples), width)]


ATTENTION_STEP = Experiment(
    name="attention_step",
    title=Text("A training step by its attention", "不同注意力实现下的训练步"),
    question=Text("How much faster is a training step with a faster attention?", "更快的注意力能让训练步快多少？"),
    instrument=Instrument("attention_step", f"{MODULE}:measure_attention_step", label=label_step),
    grid=step_grid,
    tables=step_tables,
    charts=step_charts,
    findings=(step_speed,),
    statistic="median",
    order=50,
)
