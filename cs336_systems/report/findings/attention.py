"""Sentences on attention."""

from collections.abc import Mapping, Sequence
from functools import partial
from math import isfinite

from cs336_systems.report.attention import OURS, Source, fastest
from cs336_systems.report.cells import CellView
from cs336_systems.report.findings.phrases import (
    Cells,
    Sentence,
    extremes,
    having,
    listed,
    median_of,
    pairs_of,
    say,
    span,
    speed_up,
    times_text,
    together,
    value_of,
)
from cs336_systems.report.rows import gib, kernel_ms, ms
from cs336_systems.text import Text


def _longest(cells: Cells) -> list[CellView]:
    """Those with the most tokens and, of these, the widest heads."""
    shape = max((cell.get("seq_len"), cell.get("head_dim")) for cell in cells)
    return [cell for cell in cells if (cell.get("seq_len"), cell.get("head_dim")) == shape]


def _by_formula(cells: Cells) -> Text | None:
    fine = having(cells, "forward_time", "backward_time")
    by_name = {cell.get("implementation"): cell for cell in _longest(fine)}
    cell = by_name.get("reference") or next(iter(by_name.values()))
    times = [kernel_ms(value_of(cell, f"{phase}_time")) for phase in ("forward", "backward")]
    said = say(
        "at {} tokens, d {}, forward takes {} ms and backward {}",
        "{} 个 token、d {} 时前向 {} ms，后向 {}",
        *(str(cell.get("seq_len")), str(cell.get("head_dim")), *times),
    )
    kept = value_of(cell, "memory_before_backward")
    return together(said, say("{} GiB are held before backward", "后向之前占用 {} GiB", gib(kept))) if kept else said


def _by_formula_compiled(cells: Cells) -> Text | None:
    pairs = pairs_of(cells, "implementation", "reference", "backward_time")
    if not pairs:
        return None
    longest = _longest([cell for cell, _ in pairs])
    cell, base = chosen = next(pair for pair in pairs if pair[0] in longest)
    ratios = [times_text(speed_up(chosen, f"{phase}_time")) for phase in ("forward", "backward")]
    said = say(
        "{}, forward is {}x and backward {}x as fast",
        "{} 的前向速度为 {} 倍，后向 {} 倍",
        *(str(cell.get("implementation")), *ratios),
    )
    peaks = [value_of(found, "peak_memory") for found in (cell, base)]
    if not all(peaks):
        return said
    return together(said, say("its peak is {} GiB against {}", "峰值 {} GiB，原为 {}", *map(gib, peaks)))


def _out_of_memory(cells: Cells) -> Text | None:
    failed = [cell for cell in cells if cell.status.startswith("oom")]
    if not failed:
        return None
    least = min(failed, key=lambda cell: (cell.get("seq_len") or 0, cell.get("head_dim") or 0))
    return say(
        "{} of {} do not fit in memory, the shortest of {} tokens",
        "{} 个（共 {} 个）显存不足，最短的为 {} 个 token",
        *(str(len(failed)), str(len(cells)), str(least.get("seq_len"))),
    )


Times = dict[str, float]
"""Implementation -> seconds."""


def _flash_times(cells: Cells) -> dict[tuple[int, int], Times]:
    """(head dimension, tokens) -> forward and backward of each implementation."""
    found: dict[tuple[int, int], Times] = {}
    for cell in cells:
        seconds = median_of(cell, "forward_backward_time") if cell.ok else None
        if seconds:
            found.setdefault((cell.get("head_dim"), cell.get("seq_len")), {})[cell.get("implementation")] = seconds
    return dict(sorted(found.items()))


def _flash(cells: Cells, which: int) -> Text | None:
    """Of the first or the second precision: where ours is the fastest, and how fast at the greatest length."""
    precision = list(dict.fromkeys(cell.get("precision") for cell in cells))[which]
    times = _flash_times([cell for cell in cells if cell.get("precision") == precision])
    ours = next(name for name in (*OURS, "flash_torch") if any(name in found for found in times.values()))
    times = {shape: found for shape, found in times.items() if ours in found and len(found) > 1}
    if not times:
        return None
    return say("{}: {}", "{}：{}", str(precision), together(_wins(times, ours), _longest_lead(times, ours)) or "")


def _wins(times: Mapping[tuple[int, int], Times], ours: str) -> Text:
    ahead = {shape: min(found, key=lambda name: found[name]) == ours for shape, found in times.items()}
    said = say(
        "{0} is the fastest of {1} in {2} of {3} shapes",
        "{0} 在 {3} 个形状中有 {2} 个是 {1} 种实现里最快的",
        *(ours, str(max(map(len, times.values()))), str(sum(ahead.values())), str(len(times))),
    )
    each = [
        say("from {0} tokens on with d {1}", "d {1} 从 {0} 个 token 起", str(start), str(dim))
        for dim in dict.fromkeys(dim for dim, _ in times)
        if (start := _ahead_from(ahead, dim))
    ]
    return say("{}: {}", "{}：{}", said, listed(each)) if each else said


def _ahead_from(ahead: Mapping[tuple[int, int], bool], dim: int) -> int | None:
    """The length from which on ours is always first."""
    start = None
    for (found, length), is_first in ahead.items():
        if found == dim:
            start = (start or length) if is_first else None
    return start


SHOWN_RIVALS = ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa", "reference")
"""Those that a sentence has room for."""


def _longest_lead(times: Mapping[tuple[int, int], Times], ours: str) -> Text | None:
    """Against others at the greatest length, over all head dimensions."""
    length = max(length for _, length in times)
    chosen = [found for (_, seq), found in times.items() if seq == length]
    each = []
    for name in SHOWN_RIVALS:
        ratios = [found[name] / found[ours] for found in chosen if name in found]
        if ratios:
            each.append(say("{0}x that of {1}", "{1} 的 {0} 倍", span(ratios, times_text), name))
    where = (str(length), listed(each))
    return say("at {} tokens its speed is {}", "{} 个 token 时速度是 {}", *where) if each else None


def _flash_memory(cells: Cells) -> Text | None:
    longest = _longest(having(cells, "peak_memory"))
    where = [str(longest[0].get(name)) for name in ("seq_len", "head_dim", "precision")]
    same = [cell for cell in longest if str(cell.get("precision")) == where[-1]]
    by_name = {cell.get("implementation"): value_of(cell, "peak_memory") for cell in same}
    ours = next((by_name[name] for name in (*OURS, "flash_torch") if by_name.get(name)), None)
    formula = by_name.get("reference")
    if not ours or not formula:
        return None
    return say(
        "at {} tokens, d {}, {}, it needs {} GiB, the formula {}",
        "{} 个 token、d {}、{} 时需要 {} GiB，按公式则需要 {}",
        *(*where, gib(ours), gib(formula)),
    )


def _rival_times(cell: CellView, metric: str) -> Times:
    sources = {name: Source(cell, f"{name}_") for name in cell.get("implementations") or ()}
    found = {name: source.median(metric) for name, source in sources.items() if not source.failure}
    return {name: seconds for name, seconds in found.items() if seconds and isfinite(seconds)}


def _rivals(cells: Cells) -> Text | None:
    """Against the best of the others, forward and backward together."""
    fine = [cell for cell in cells if cell.ok]
    leads, used = [], set()
    for cell in fine:
        times = _rival_times(cell, "forward_backward_time")
        ours, best = fastest(times, ours=True), fastest(times, ours=False)
        if ours and best:
            used.add(ours)
            name = f"{cell.get('batch_size')} x {cell.get('heads')} x {cell.get('seq_len')} x {cell.get('head_dim')}"
            leads.append((times[best] / times[ours], Text(f"{name}, {best}")))
    if not leads:
        return None
    names = [Text(name) for name in OURS if name in used]
    return say(
        "{0} is ahead of the best rival in {1} of {2} shapes, forward and backward: {3} times as fast",
        "前向加后向，{0} 在 {2} 个形状中有 {1} 个快于最快的对手：速度为 {3} 倍",
        names[0] if len(names) == 1 else say("the faster of {}", "{} 中较快者", listed(names)),
        *(str(sum(lead > 1 for lead, _ in leads)), str(len(leads)), extremes(leads, "{:.2f}".format)),
    )


def _each_rival(cells: Cells) -> Text | None:
    ratios: dict[str, list[float]] = {}
    for cell in (cell for cell in cells if cell.ok):
        times = _rival_times(cell, "forward_backward_time")
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


def _won(ratios: Sequence[float]) -> tuple[str, str]:
    return str(sum(ratio > 1 for ratio in ratios)), str(len(ratios))


def _rivals_forward(cells: Cells) -> Text | None:
    leads = []
    for cell in (cell for cell in cells if cell.ok):
        times = _rival_times(cell, "forward_time")
        ours, best = fastest(times, ours=True), fastest(times, ours=False)
        if ours and best:
            leads.append(times[best] / times[ours])
    if not leads:
        return None
    return say(
        "forward alone is ahead of the best in {} of {}: {} times as fast",
        "单独的前向快于最快对手的有 {}/{} 个：速度为 {} 倍",
        *(*_won(leads), span(leads, "{:.2f}".format)),
    )


def _leaderboard(cells: Cells) -> Text | None:
    times = {
        str(cell.get("implementation")): value_of(cell, "leaderboard_time") or 0.0
        for cell in having(cells, "leaderboard_time")
    }
    name = fastest(times, ours=True)
    if name is None:
        return None
    ours = times.pop(name)
    said = say("{} takes {} ms", "{} 为 {} ms", name, kernel_ms(ours))
    each = [
        say("{0}x that of {1} ({2} ms)", "{1}（{2} ms）的 {0} 倍", times_text(seconds / ours), name, kernel_ms(seconds))
        for name, seconds in times.items()
    ]
    return say("{}; its speed is {}", "{}；速度是 {}", said, listed(each)) if each else said


def _step(cells: Cells) -> Text | None:
    """Of the longest, what the best of ours takes, and what the others do."""
    fine = [cell for cell in cells if cell.ok and fastest(_rival_times(cell, "step_time"), ours=True)]
    if not fine:
        return None
    cell = fine[-1]
    times = _rival_times(cell, "step_time")
    ours = fastest(times, ours=True)
    assert ours is not None
    each = [
        say(
            "{} with {} ({}x, ahead of it in {} of {} rounds)",
            "用 {1} 为 {0}（{2} 倍，{4} 轮中有 {3} 轮更快）",
            *(ms(seconds), name, f"{seconds / times[ours]:.2f}", *map(str, _rounds_ahead(cell, ours, name))),
        )
        for name, seconds in times.items()
        if name not in OURS
    ]
    said = say(
        "{}, context {}: a step takes {} ms with {}",
        "{0}、上下文 {1}：用 {3} 时一步 {2} ms",
        *(str(cell.get("size")), str(cell.get("context_length")), ms(times[ours]), ours),
    )
    return together(said, listed(each)) if each else said


def _rounds_ahead(cell: CellView, ours: str, other: str) -> tuple[int, int]:
    """In how many rounds, of how many. Clocks and host drift from round to round, and inside one they drift for both:
    it may tell two apart whose steps, all taken together, overlap."""
    rounds = cell.config["rounds"]
    steps = len(cell.metrics[f"{ours}_step_time"].samples) // rounds
    mine, theirs = ([sum(turn) for turn in cell.rows(f"{name}_step_time", steps)] for name in (ours, other))
    if len(mine) != rounds:
        raise ValueError(f"{rounds} rounds, and samples for {len(mine)}")
    return sum(a < b for a, b in zip(mine, theirs, strict=True)), rounds


SENTENCES: dict[str, tuple[Sentence, ...]] = {
    "pytorch_attention": (_by_formula, _by_formula_compiled, _out_of_memory),
    "flash": (partial(_flash, which=0), partial(_flash, which=1), _flash_memory),
    "attention_rivals": (_rivals, _each_rival, _rivals_forward),
    "flash_leaderboard": (_leaderboard,),
    "attention_step": (_step,),
}
