"""attention_rivals: our kernels against the fastest others, all measured interleaved in one process."""

from collections.abc import Iterable, Sequence
from typing import Any

from cs336_systems.config import RunConfig
from cs336_systems.experiments.attention.attention_charts import roofline, shape_name
from cs336_systems.experiments.attention.implementations import (
    MODULE,
    OURS,
    Row,
    Size,
    attention_config,
    contestants,
    failure_notes,
    fastest,
    label_shape,
    lead,
    medians,
    rate,
    side_by_side,
    views,
)
from cs336_systems.experiments.spec import Config, Experiment, Instrument, require_gpu
from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Chart, Point
from cs336_systems.report.phrases import extremes, span, times_text
from cs336_systems.report.points import series_of
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import keys, remarks_on, varying
from cs336_systems.report.terms import TFLOPS
from cs336_systems.table import Table
from cs336_systems.text import Text, listed, say

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


def grid(preset: str, base: RunConfig) -> Iterable[Config]:
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


def tables(cells: Cells) -> list[Table]:
    shown = varying(cells, always=("batch_size", "heads", "head_dim", "seq_len", "is_causal"))
    rows = [Row(keys(cell, shown), views(cell)) for cell in cells]
    notes = [
        Text(
            "times: medians over rounds of each round's median of do_bench, the implementations interleaved",
            "时间：各轮 do_bench 中位数的中位数，各实现交替测量",
        ),
        *failure_notes(rows, shown),
        *remarks_on(cells, shown),
    ]
    return side_by_side(cells, shown, rows, notes, with_lead=True)


def charts(cells: Cells) -> list[Chart]:
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


# -- findings ---------------------------------------------------------------------------------------------------------


def _won(ratios: Sequence[float]) -> tuple[str, str]:
    return str(sum(ratio > 1 for ratio in ratios)), str(len(ratios))


def against_fastest(cells: Cells) -> Text | None:
    """Our lead over the fastest rival, forward and backward together."""
    used, leads = set(), []
    for cell in cells:
        found = lead(medians(cell, "forward_backward_time")) if cell.ok else None
        if found:
            used.add(found.ours)
            size = " x ".join(str(cell.get(name)) for name in ("batch_size", "heads", "seq_len", "head_dim"))
            leads.append((found.ratio, Text(f"{size}, {found.rival}")))
    if not leads:
        return None
    names = [Text(name) for name in OURS if name in used]
    return say(
        "{0} is ahead of the best rival in {1} of {2} shapes, forward and backward: {3} times as fast",
        "前向加后向，{0} 在 {2} 个形状中有 {1} 个快于最快的对手：速度为 {3} 倍",
        names[0] if len(names) == 1 else say("the faster of {}", "{} 中较快者", listed(names)),
        *(*_won([ratio for ratio, _ in leads]), extremes(leads, "{:.2f}".format)),
    )


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
        say("{} in {} of {} (at best {}x)", "{} {}/{} 个（最多 {} 倍）", name, *_won(found), times_text(max(found)))
        for name, found in ratios.items()
    ]
    return say("it is ahead of {}", "分别快于 {}", listed(each)) if each else None


def forward_alone(cells: Cells) -> Text | None:
    leads = [found.ratio for cell in cells if cell.ok and (found := lead(medians(cell, "forward_time")))]
    if not leads:
        return None
    return say(
        "forward alone is ahead of the best in {} of {}: {} times as fast",
        "单独的前向快于最快对手的有 {}/{} 个：速度为 {} 倍",
        *(*_won(leads), span(leads, "{:.2f}".format)),
    )


ATTENTION_RIVALS = Experiment(
    name="attention_rivals",
    title=Text("Attention interleaved with the fastest kernels", "与最快实现交替对比"),
    question=Text(
        "Is our kernel faster than the fastest others, measured interleaved?",
        "交替测量时，我们的内核是否比最快的其他实现更快？",
    ),
    instrument=Instrument("attention_rivals", f"{MODULE}:measure_rivals", label=label_shape),
    grid=grid,
    tables=tables,
    charts=charts,
    findings=(against_fastest, against_each, forward_alone),
    statistic="median",
    order=30,
)
