"""Sentences on several ranks, and on plans for many."""

from collections.abc import Callable
from functools import partial
from math import isfinite

from cs336_systems.record import BUS_FACTOR, GIB, MIB
from cs336_systems.report import parallel
from cs336_systems.report.cells import CellView
from cs336_systems.report.findings.phrases import (
    MOST,
    Cells,
    Sentence,
    extremes,
    listed,
    median_of,
    safely,
    say,
    span,
    times_text,
    together,
    value_of,
)
from cs336_systems.report.rows import ms, number, percent
from cs336_systems.text import Text


def _link(cell: CellView) -> Text:
    """How the ranks talk; Gloo between processes of one machine must not be taken for a network."""
    ranks, backend, device = (str(cell.get(name)) for name in ("ranks", "backend", "device"))
    said = say("{} ranks, {} on {}", "{} 个 rank、{}（{}）", ranks, backend, device)
    if backend == "gloo":
        said = say("{} ranks of one machine through Gloo ({})", "一台机器上 {} 个 rank、经 Gloo（{}）", ranks, device)
    link = cell.get("link")
    if not link:
        return said
    values = (f"{link[1] / 1e9:g}", f"{link[0] * 1e3:g}")
    return say("{}, emulated network of {} GB/s and {} ms", "{}，模拟 {} GB/s、{} ms 的网络", said, *values)


def _per_link(*facts: Callable[[CellView], Text | None]) -> tuple[Sentence, ...]:
    """A sentence for each way the ranks talk; those between GPUs come first."""

    def sentence(cells: Cells, place: int) -> Text | None:
        fine = sorted((cell for cell in cells if cell.ok), key=lambda cell: cell.get("backend") != "nccl")
        cell = fine[place]
        said = None
        for fact in facts:
            said = together(said, safely(fact, cell))
        return say("{}: {}", "{}：{}", _link(cell), said) if said else None

    return tuple(partial(sentence, place=place) for place in range(MOST))


def _largest_message(cell: CellView) -> Text | None:
    name = "all_reduce" if "all_reduce" in cell.get("collectives") else cell.get("collectives")[0]
    size, seconds = max(parallel.points(cell, name))
    bus = size / seconds / 1e9 * BUS_FACTOR[name](cell.get("ranks"))
    return say(
        "{} of {} MB takes {} ms, {} GB/s over the busiest link",
        "{} 传 {} MB 用 {} ms，最忙的链路 {} GB/s",
        *(name, f"{size / 1e6:g}", ms(seconds), number(bus)),
    )


def _fitted(cell: CellView) -> Text | None:
    rows = {name: parallel.fit(parallel.points(cell, name)) for name in cell.get("collectives")}
    rates = [(1e-9 / per_byte, Text(name)) for name, (_, per_byte, _) in rows.items() if per_byte]
    latencies = span([latency * 1e6 for latency, _, _ in rows.values()], lambda latency: number(latency, 0))
    if not rates:
        return None
    return say(
        "fitted bandwidth in GB/s: {}; latency {} us",
        "拟合的带宽（GB/s）：{}；延迟 {} us",
        *(extremes(rates, number), latencies),
    )


def _averaging(cell: CellView) -> Text | None:
    names = [name for name in cell.get("arrangements") if name not in ("none", "torch DDP")]
    times = {name: seconds for name in names if (seconds := median_of(cell, f"{name}: step_time"))}
    best = min(times, key=lambda name: times[name])
    said = say(
        "{} is the fastest of {}, {} ms a step",
        "{} 是 {} 种中最快的，每步 {} ms",
        best,
        str(len(times)),
        ms(times[best]),
    )
    if "naive" in times and best != "naive":
        values = (times_text(times["naive"] / times[best]), ms(times["naive"]))
        said = say("{}, {} times as fast as naive ({} ms)", "{}，速度是 naive 的 {} 倍（{} ms）", said, *values)
    if theirs := median_of(cell, "torch DDP: step_time"):
        said = say("{}; torch DDP takes {} ms", "{}；torch DDP 为 {} ms", said, ms(theirs))
    return said


def _hidden(cell: CellView) -> Text | None:
    found = {
        name: 1 - exposed / alone
        for name, alone, exposed in parallel.exposures(cell)
        if name != "none" and alone and exposed is not None and isfinite(exposed / alone)
    }
    if not found:
        return None
    most, least = max(found, key=lambda name: found[name]), min(found, key=lambda name: found[name])
    return say(
        "of communication {} hides {}, {} {}",
        "通信中 {} 掩盖 {}，{} 掩盖 {}",
        *(most, percent(found[most], 0), least, percent(found[least], 0)),
    )


def _buckets(cell: CellView) -> Text | None:
    rows = parallel.bucket_rows(cell)
    predicted = min(rows, key=lambda row: row.predicted)
    measured = min(rows, key=lambda row: row.measured)
    return say(
        "the best bucket is {} MB predicted ({} ms exposed) and {} MB measured ({} ms)",
        "最好的桶预测为 {} MB（未掩盖 {} ms），实测 {} MB（{} ms）",
        *(f"{predicted.size / MIB:g}", ms(predicted.predicted), f"{measured.size / MIB:g}", ms(measured.measured)),
    )


def _misjudged(cell: CellView) -> Text | None:
    rows = [row for row in parallel.bucket_rows(cell) if row.measured > 0 and row.predicted > 0]
    worst = max(rows, key=lambda row: abs(row.predicted / row.measured - 1))
    return say(
        "of {} sizes the prediction is worst for {} MB: {} ms, measured {}",
        "{} 种大小中预测最差的是 {} MB：{} ms，实测 {}",
        *(str(len(rows)), f"{worst.size / MIB:g}", ms(worst.predicted), ms(worst.measured)),
    )


def _held(cell: CellView, name: str) -> float:
    sizes = [value_of(cell, f"{name}: {part}_memory") for part in ("parameter", "gradient", "optimizer")]
    return sum(size or 0.0 for size in sizes)


def _sharded(cell: CellView) -> Text | None:
    """Ours against plain averaging, and torch's own beside it."""
    names = cell.get("arrangements")
    ours = "fsdp" if "fsdp" in names else "sharded"
    theirs = next((name for name in ("torch fully_shard", "torch ZeRO") if name in names), None)
    base, held = _held(cell, "ddp"), _held(cell, ours)
    if not base or not held:
        return None
    said = say(
        "{0} holds {1} MiB on a rank, {2} less than ddp ({3})",
        "{0} 在每个 rank 上占 {1} MiB，比 ddp（{3}）少 {2}",
        *(ours, number(held / MIB, 1), percent(1 - held / base, 0), number(base / MIB, 1)),
    )
    steps = [median_of(cell, f"{name}: step_time") for name in (ours, "ddp", theirs or "")]
    if steps[0] and steps[1]:
        cost = (ms(steps[0]), times_text(steps[0] / steps[1]))
        said = say("{}, and takes {} ms a step, {} times as long", "{}，每步 {} ms，时间是其 {} 倍", said, *cost)
    if theirs and steps[2]:
        values = (theirs, number(_held(cell, theirs) / MIB, 1), ms(steps[2]))
        said = say("{}; {} {} MiB and {} ms", "{}；{} 为 {} MiB、{} ms", said, *values)
    return said


def _layouts(cells: Cells) -> Text | None:
    """Of the whole model, where it was counted, on each cluster."""
    said = None
    for cell in _whole_models(cells)[:MOST]:
        said = together(said, safely(_layout, cell))
    return said


def _whole_models(cells: Cells) -> list[CellView]:
    fine = [cell for cell in cells if cell.ok]
    return [cell for cell in fine if cell.get("count") == "transformer"] or fine


def _layout(cell: CellView) -> Text:
    names = list(cell.get("strategies"))
    fitting = [name for name in names if cell.value(f"{name}: fits")]
    only = Text("", "") if cell.get("count") == "transformer" else Text(" (feed-forward only)", "（仅前馈）")
    said = say(
        "of {0} layouts of {1}{2} on {3} x {4} {5} fit",
        "{1}{2} 在 {3} x {4} 上的 {0} 种布局中 {5} 种放得下",
        *(
            str(len(names)),
            str(cell.get("size")),
            only,
            f"{cell.get('gpus'):,}",
            str(cell.get("gpu")),
            str(len(fitting)),
        ),
    )
    if not fitting:
        return said
    best = min(fitting, key=lambda name: _plan_seconds(cell, name))
    return say(
        "{}: {} has the shortest step, {} ms, with {} GiB on a GPU",
        "{}：{} 的一步最短，{} ms，每张 GPU {} GiB",
        *(said, best, ms(_plan_seconds(cell, best)), number(_plan_bytes(cell, best) / GIB, 1)),
    )


def _plan_seconds(cell: CellView, name: str) -> float:
    """With every message beside products."""
    return sum(
        max(cell.value(f"{name}: {during}_{what}_time") or 0.0 for what in ("compute", "communication"))
        for during in ("forward", "backward")
    )


def _plan_bytes(cell: CellView, name: str) -> float:
    return sum(cell.value(f"{name}: {part}_memory") or 0.0 for part in parallel.PLAN_PARTS.values())


def _waits(cells: Cells) -> Text | None:
    """Which layouts are bound by messages, on the largest cluster."""
    cell = max(_whole_models(cells), key=lambda cell: cell.get("gpus"))
    late = [name for name in cell.get("strategies") if _is_late(cell, name)]
    where = f"{cell.get('gpus'):,}"
    if not late:
        return say("on {} GPUs no layout waits for messages", "{} 张 GPU 上没有布局在等通信", where)
    return say("on {} GPUs these wait for messages: {}", "{} 张 GPU 上等待通信的有：{}", where, listed(late))


def _is_late(cell: CellView, name: str) -> bool:
    return any(
        (cell.value(f"{name}: {during}_communication_time") or 0.0)
        > (cell.value(f"{name}: {during}_compute_time") or 0.0)
        for during in ("forward", "backward")
    )


SENTENCES: dict[str, tuple[Sentence, ...]] = {
    "collectives": _per_link(_largest_message, _fitted),
    "ddp": _per_link(_averaging, _hidden),
    "bucket_model": _per_link(_buckets, _misjudged),
    "optimizer_sharding": _per_link(_sharded),
    "fsdp": _per_link(_sharded),
    "parallel_plan": (_layouts, _waits),
}
