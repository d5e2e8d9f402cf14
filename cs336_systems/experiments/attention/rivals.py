"""Our kernels against the fastest others: interleaved, as the course timed them, and inside a training step."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cs336_systems.config import RunConfig
from cs336_systems.experiments.attention.implementations import (
    BOTH,
    CAUSAL,
    IN_CHARTS,
    MODULE,
    OURS,
    Contest,
    Size,
    attention_config,
    contest_series,
    contestants,
    exponential,
    failure,
    fastest,
    label_shape,
    lead,
    length_name,
    medians,
    rates_chart,
    side_by_side,
    time_quantity,
    views,
    worst_error,
)
from cs336_systems.experiments.spec import Config, Experiment, Instrument, label_step, require_gpu, run_config
from cs336_systems.predict.attention_model import AttentionShape
from cs336_systems.record import Statistics
from cs336_systems.report import entries
from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Chart, Highlight, Point, Series
from cs336_systems.report.names import attention_name, implementation_name, size_name
from cs336_systems.report.phrases import (
    SAME,
    beside,
    compared,
    having,
    is_same,
    known,
    together,
    value_of,
    with_time,
)
from cs336_systems.report.points import bar_name, measured, series_of
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import FIELDS, kernel_ms, ms, row_name, tflops, varying
from cs336_systems.report.terms import ERROR, FORWARD_AND_BACKWARD, MEAN, MS, STEP, TFLOPS
from cs336_systems.table import Table
from cs336_systems.text import Text, listed, say

# -- attention_rivals: interleaved in one process ---------------------------------------------------------------------


LEADERBOARD = Size(1, 16, 16384, 64)
"""The shape of the course's leaderboard, with a causal mask."""
SHAPES = (
    (LEADERBOARD, True),
    (Size(1, 16, 16384, 128), True),
    (Size(1, 16, 16384, 64), False),
    (Size(1, 16, 16384, 128), False),
    (Size(4, 16, 2048, 64), True),
    (Size(4, 16, 2048, 128), True),
    (Size(4, 12, 512, 64), True),
)
"""Size and causal mask of each shape: long ones, medium ones, and that of the small model."""


def rivals_grid(preset: str, base: RunConfig) -> Iterable[Config]:
    require_gpu("attention_rivals", base, "the rivals are GPU kernels")
    # Without flex: it takes longer to compile than all others to run, and `flash` and the leaderboard measure it.
    rivals = [name for name in contestants() if name != "flex"]
    for size, is_causal in SHAPES[-1:] if preset == "quick" else SHAPES:
        # A multiple of twice the number of names, so that each follows every other equally often.
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


REPLAYED = "replayed_time"
SHAPE = Text("batch x tokens, head dim, mask", "batch x 长度，头维度，掩码")
MEDIANS = Text("medians over rounds, implementations interleaved", "各轮的中位数，各实现交替测量")


def rivals_charts(cells: Cells) -> list[Chart]:
    """Return charts: TFLOP/s of shapes that keep the GPU busy; times of short ones, which the host's launches may
    bound."""
    fine = [cell for cell in cells if cell.ok]
    short = [cell for cell in fine if any(REPLAYED in view.metrics for view in views(cell).values())]
    long = [cell for cell in fine if cell not in short]
    found = []
    for metric in ("forward_time", BOTH) if long else ():
        contests = [Contest(_shape(cell), views(cell), metric) for cell in long]
        found.append(rates_chart(contests, Text(str(long[0].get("precision"))), SHAPE, MEDIANS))
    by_host = Text("Short sequences, forward and backward", "短序列，前向加反向")
    by_graph = Text("Short sequences, forward and backward, as a CUDA graph", "短序列，前向加反向，作为 CUDA graph")
    return [*found, *(_times(what, short, metric) for what, metric in ((by_host, BOTH), (by_graph, REPLAYED)))]


def _shape(cell: CellView) -> Text:
    size = f"{cell.get('batch_size')} x {length_name(cell.get('seq_len'))}"
    return listed([size, f"d {cell.get('head_dim')}", *([CAUSAL] if cell.get("is_causal") else [])], (", ", "，"))


def _times(title: Text, cells: Cells, metric: str) -> Chart:
    def milliseconds(view: CellView, metric: str) -> float | None:
        seconds = view.median(metric)
        return seconds * 1e3 if seconds else None

    series = contest_series([Contest(_shape(cell), views(cell), metric) for cell in cells], milliseconds)
    return Chart("", title, "bars", SHAPE, MS, series, digits=3, note=MEDIANS)


def rivals_highlights(cells: Cells) -> list[Highlight]:
    """Return our speed against each rival on the leaderboard's shape, or else on the causal shape with the most
    FLOPs."""
    fine = [cell for cell in cells if cell.ok and lead(medians(cell, BOTH))]
    if not fine:
        return []
    cell = max(fine, key=_importance)
    times = medians(cell, BOTH)
    ours = min(times[name] for name in times if name in OURS)
    found = []
    for number, name in enumerate(name for name in IN_CHARTS if name in times):
        rival, ratio = implementation_name(name), times[name] / ours
        detail = say(
            "forward and backward, {}: ours {} ms, {} {} ms",
            "前向加反向，{}：本项目 {} ms，{} {} ms",
            *(_shape(cell), kernel_ms(ours), rival, kernel_ms(times[name])),
        )
        what = say("attention, against {}", "注意力，相对 {}", rival)
        bar = say(
            "attention, {} tokens, against {}", "注意力，{} token，相对 {}", length_name(cell.get("seq_len")), rival
        )
        found.append(Highlight(10 + 2 * number, Text(f"{ratio:.2f}x"), what, detail, ratio, bar))
    return found


def _importance(cell: CellView) -> tuple[bool, bool, float]:
    causal = bool(cell.get("is_causal"))
    return causal and AttentionShape.of(cell.config).size == LEADERBOARD, causal, cell.value("flops") or 0.0


def interleaved(cells: Cells) -> Text | None:
    said = Text("attention and its rivals ran in turn in one process", "本项目与各对手的注意力在同一进程内交替计时")
    return said if any(cell.ok for cell in cells) else None


FASTEST_RIVAL = Text("the fastest rival", "最快对手")


def _won(ratios: Sequence[float]) -> list[str]:
    """Return the number of shapes in which ours is faster by more than noise, and the number of all shapes."""
    return [str(sum(ratio > SAME for ratio in ratios)), str(len(ratios))]


def _leads(cells: Cells, metric: str) -> list[tuple[float, Text]]:
    """Return the lead over the fastest rival in each shape, with the shape's name."""
    fine = [cell for cell in cells if cell.ok]
    return [(found.ratio, _shape(cell)) for cell in fine if (found := lead(medians(cell, metric)))]


def leads_over_fastest(cells: Cells, metric: str, what: Text) -> Text:
    """State in how many shapes ours is faster than the fastest rival, and by how much."""
    leads = _leads(cells, metric)
    won, shapes = _won([ratio for ratio, _ in leads])
    said = say(
        "in {}, our attention is faster than the fastest rival in {} of {} shapes",
        "{0}：本项目的注意力在 {2} 个形状中有 {1} 个快于最快对手",
        *(what, won, shapes),
    )
    return together(said, compared(Text("it", "它"), FASTEST_RIVAL, leads)) or said


def against_fastest(cells: Cells) -> Text | None:
    return leads_over_fastest(cells, "forward_backward_time", FORWARD_AND_BACKWARD)


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
    highlights=rivals_highlights,
    trust=interleaved,
    group="attention",
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
        yield attention_config(base, LEADERBOARD, "bf16", implementation=name, warmup_ms=warmup_ms, rep_ms=rep_ms)


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
            "按课程的方式对前向、求和与反向计时；do_bench 的均值",
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
    """Return charts with bars from the fastest to the slowest, ours in their own colour."""
    ranked = sorted(having(cells, TIME), key=lambda cell: value_of(cell, TIME) or 0.0)
    names = [implementation_name(cell.get("implementation")) for cell in ranked]
    points = [(cell, measured(cell, TIME, name)) for cell, name in zip(ranked, names, strict=True)]
    series = [
        series_of(who, (own for cell, own in points if (cell.get("implementation") in OURS) == is_ours))
        for who, is_ours in ((implementation_name("auto"), True), (Text("rival", "对手"), False))
    ]
    title = say("The course's leaderboard: {}, bf16", "课程排行榜：{}，bf16", _shape(cells[0]))
    note = Text("means; forward, sum and backward, 16 heads", "均值；前向、求和与反向，16 个头")
    places, what = [name.en for name in names], FIELDS["implementation"]
    return [Chart("", title, "stacked", what, MS, series, horizontal=True, places=places, digits=3, note=note)]


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
    group="attention",
    findings=(leaderboard_speed,),
    order=40,
)

# -- attention_step: inside a training step ---------------------------------------------------------------------------


STEP_TIME = "step_time"


def step_grid(preset: str, base: RunConfig) -> Iterable[Config]:
    """Yield cells with long contexts: the longer the context, the larger attention's share of a step."""
    on_cuda = base.device_type == "cuda"
    names = ["flash_hopper", "flash_triton", "sdpa_flash", "sdpa_cudnn"] if on_cuda else ["flash_torch", "sdpa"]
    run = dataclasses.replace(base, precision="bf16" if on_cuda else base.precision, batch_size=1)
    sizes: tuple[tuple[str, int | None], ...] = (("small", 4096), ("large", 4096), ("2.7B", 4096))
    if preset == "quick":
        sizes = (("small", 1024),) if on_cuda else (("tiny", None),)
    for size, context in sizes:
        # A multiple of the number of names, so that each follows every other equally often.
        yield {**run_config(run, size, context), "implementations": names, "rounds": 2 * len(names)}


def step_tables(cells: Cells) -> list[Table]:
    """Return tables of median step times; the notes give the extremes, which show how reliable a lead is."""
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
    """Return a chart per model: the median step, with a line from the fastest to the slowest step."""
    note = Text(
        "medians, interleaved; lines from the fastest to the slowest step", "中位数，交替测量；横线为最快到最慢的步"
    )
    found = []
    for cell in (cell for cell in cells if cell.ok):
        own = {name: view.statistics(STEP_TIME) for name, view in views(cell).items() if not failure(view)}
        dots = [_dot(implementation_name(name), stats) for name, stats in own.items() if stats]
        values = (size_name(cell.get("size")), str(cell.get("context_length")))
        title = say("Training step by its attention: {}, context {}", "不同注意力下的训练步：{}，上下文 {}", *values)
        found.append(Chart("", title, "dots", FIELDS["attention"], MS, [Series(STEP, dots)], note=note))
    return found


def _dot(name: Text, stats: Statistics) -> Point:
    low, middle, high = (1e3 * value for value in (stats.min, stats.median, stats.max))
    return Point(name, middle, n=stats.n, low=low, high=high)


def step_speed(cells: Cells) -> Text | None:
    """State the step times of the last cell: that of our fastest kernel, and those of its rivals."""
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
    """Return the number of rounds in which ours is faster.

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
    """Return the sums of `width` consecutive samples: the steps of one round."""
    return [sum(samples[start : start + width]) for start in range(0, len(samples), width)]


ATTENTION_STEP = Experiment(
    name="attention_step",
    title=Text("A training step by its attention", "不同注意力实现下的训练步"),
    question=Text("How much faster is a training step with a faster attention?", "更快的注意力能让训练步快多少？"),
    instrument=Instrument("attention_step", f"{MODULE}:measure_attention_step", label=label_step),
    grid=step_grid,
    tables=step_tables,
    charts=step_charts,
    group="attention",
    findings=(step_speed,),
    statistic="median",
    order=50,
)
