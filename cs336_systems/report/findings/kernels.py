"""Sentences on clocks and kernels."""

from collections.abc import Mapping, Sequence

from cs336_systems.config import MODES
from cs336_systems.measure.readers.kernel_classes import MATMUL, OUTPUT, SCORES, SOFTMAX
from cs336_systems.report.cells import PHASES, CellView
from cs336_systems.report.findings.phrases import (
    Cells,
    Sentence,
    extremes,
    having,
    in_mode,
    listed,
    naming,
    say,
    scale_of,
    size_of,
    span,
    together,
    value_of,
    word,
)
from cs336_systems.report.kernels import SOFTMAX_FLOPS, kind_seconds, phases_of, rows_of
from cs336_systems.report.rows import percent
from cs336_systems.text import Text


def _do_bench(cells: Cells) -> Text | None:
    found = []
    for cell in sorted((cell for cell in cells if cell.ok), key=scale_of):
        for phase in ("forward", "backward", "step"):
            wall, other = (value_of(cell, name) for name in (f"{phase}_time", f"do_bench_{phase}_time"))
            if wall and other:
                found.append((abs(wall / other - 1), say("{} {}", "{} {}", size_of(cell), word(phase)), cell))
    if not found:
        return None
    off, name, _ = max(found, key=lambda row: row[0])
    said = say(
        "the clock and do_bench differ by {} at most ({})", "墙钟与 do_bench 最多相差 {}（{}）", percent(off, 2), name
    )
    largest = found[-1][2]
    own = [off for off, _, cell in found if cell is largest]
    if len(own) == len(found):
        return said
    return together(said, say("for {} by {}", "{} 最多 {}", size_of(largest), percent(max(own), 2)))


def _matmul_share(cells: Cells) -> Text | None:
    said = []
    fine = [cell for cell in cells if cell.ok]
    for mode in dict.fromkeys(cell.get("mode") for cell in fine):
        chosen = [cell for cell in fine if cell.get("mode") == mode]
        name = naming(chosen)
        shares = [(share, name(cell)) for cell in chosen if (share := _shares(cell).get(MATMUL))]
        if shares:
            said.append(say("{1} in {0}", "{0}中 {1}", in_mode(mode), extremes(shares, percent)))
    return say("matrix products take, of kernel time, {}", "矩阵乘占内核时间：{}", listed(said)) if said else None


def _shares(cell: CellView) -> Mapping[str, float]:
    """Kind -> share of a step's kernel time."""
    seconds = kind_seconds(cell, phases_of(cell))
    total = sum(seconds.values())
    return {kind: found / total for kind, found in seconds.items()} if total else {}


def _other_kinds(cells: Cells) -> Text | None:
    """The most that each other kind takes of a step, where that is not little."""
    fine = [cell for cell in cells if cell.ok]
    mode = next((mode for mode in reversed(MODES) if any(cell.get("mode") == mode for cell in fine)), None)
    chosen = [cell for cell in fine if cell.get("mode") == mode]
    most: dict[str, tuple[float, CellView]] = {}
    for cell in chosen:
        for kind, share in _shares(cell).items():
            if kind != MATMUL and share > max(0.02, most.get(kind, (0.0, cell))[0]):
                most[kind] = share, cell
    name = naming(chosen)
    each = [
        say("{} up to {} ({})", "{}最多 {}（{}）", word(kind), percent(share), name(cell))
        for kind, (share, cell) in sorted(most.items(), key=lambda item: -item[1][0])[:3]
    ]
    return say("what else counts in {}: {}", "{}中其余的类别：{}", in_mode(mode), listed(each)) if each else None


def _idle(cells: Cells) -> Text | None:
    fine = [cell for cell in cells if cell.ok]
    name = naming(fine)
    found = []
    for cell in fine:
        events, busy = value_of(cell, "forward_event_time"), value_of(cell, "busy_time: forward")
        if events and busy:
            found.append((max(0.0, 1 - busy / events), name(cell)))
    return say("in forward the GPU is idle for {}", "前向中 GPU 空闲 {}", extremes(found, percent)) if found else None


def _attention_ratio(cells: Cells) -> Text | None:
    fine = [cell for cell in cells if cell.ok]
    name = naming(fine)
    times, flops = [], []
    for cell in fine:
        parts = _attention_parts(cell)
        if parts[SCORES, True] and parts[SOFTMAX, False]:
            times.append((parts[SCORES, True] / parts[SOFTMAX, False], name(cell)))
            flops.append(2 * cell.get("d_model") / cell.get("num_heads") / SOFTMAX_FLOPS)
    if not times:
        return None
    return say(
        "the scores' matmul has {} times the FLOPs of softmax, but takes only {} times as long",
        "scores 矩阵乘的 FLOPs 是 softmax 的 {} 倍，时间却只有 {} 倍",
        *(span(flops, "{:.1f}".format), extremes(times, "{:.2f}".format)),
    )


def _attention_parts(cell: CellView) -> dict[tuple[str, bool], float]:
    """(part, whether it is a matmul) -> seconds in forward; softmax has no matmul."""
    found = {(part, matmul): 0.0 for part in (SCORES, SOFTMAX, OUTPUT) for matmul in (True, False)}
    for part, kind, seconds in rows_of(cell, "part", "forward"):
        found[part, kind == MATMUL] += seconds
    return found


def _around_matmuls(cells: Cells) -> Text | None:
    fine = [cell for cell in cells if cell.ok]
    name = naming(fine)
    shares = []
    for cell in fine:
        parts = _attention_parts(cell)
        rest = sum(seconds for (_, matmul), seconds in parts.items() if not matmul)
        if rest:
            shares.append((rest / sum(parts.values()), name(cell)))
    if not shares:
        return None
    return say(
        "scale, mask and softmax take {} of the time of attention",
        "缩放、掩码与 softmax 占注意力时间的 {}",
        extremes(shares, lambda share: percent(share, 0)),
    )


def _filled(cells: Cells) -> Text | None:
    """How much of forward and backward kernels fill."""
    found = _kernels_over_events(cells, "{}_event_time", ("forward", "backward"))
    if not found:
        return None
    return say(
        "kernels fill {} of forward and backward by CUDA events: the rest is the GPU waiting for the host",
        "以 CUDA event 计，内核占前向与后向的 {}：其余是 GPU 在等主机",
        extremes(found, percent),
    )


def _queued(cells: Cells) -> Text | None:
    """How far kernels and events of steps that are not synchronised between phases are apart, in a whole step."""
    found = _kernels_over_events(cells, "queued_{}_event_time", PHASES)
    if not found:
        return None
    return say(
        "of steps that are not synchronised between phases kernels and CUDA events differ by {}",
        "阶段之间不同步的步中，内核与 CUDA event 相差 {}",
        extremes([(abs(share - 1), name) for share, name in found], lambda share: percent(share, 2)),
    )


def _kernels_over_events(cells: Cells, events: str, phases: Sequence[str]) -> list[tuple[float, Text]]:
    """For each cell, over those of the phases that have both."""
    found = []
    for cell in sorted((cell for cell in cells if cell.ok), key=scale_of):
        pairs = [(value_of(cell, f"busy_time: {phase}"), value_of(cell, events.format(phase))) for phase in phases]
        both = [(kernels, seconds) for kernels, seconds in pairs if kernels and seconds]
        if both:
            found.append((sum(row[0] for row in both) / sum(row[1] for row in both), Text(size_of(cell))))
    return found


def _profiled(cells: Cells) -> Text | None:
    found = [
        ((value_of(cell, "profiled_step_time") or 0.0) / (value_of(cell, "step_time") or 1.0), Text(size_of(cell)))
        for cell in having(cells, "profiled_step_time", "step_time")
    ]
    if not found:
        return None
    show = "{:.2f}".format
    return say("a step that is profiled takes {} times as long", "被分析时一步为 {} 倍长", extremes(found, show))


def _nsys(cells: Cells) -> Text | None:
    found = []
    for cell in (cell for cell in cells if cell.ok):
        for phase in phases_of(cell):
            theirs, ours = value_of(cell, f"nsys_busy_time: {phase}"), value_of(cell, f"busy_time: {phase}")
            if theirs and ours:
                found.append((abs(ours / theirs - 1), say("{} {}", "{} {}", size_of(cell), word(phase))))
    if not found:
        return None
    off, name = max(found, key=lambda pair: pair[0])
    return say(
        "torch.profiler and nsys differ by {} at most ({})",
        "torch.profiler 与 nsys 最多相差 {}（{}）",
        percent(off, 2),
        name,
    )


SENTENCES: dict[str, tuple[Sentence, ...]] = {
    "timing_agreement": (_do_bench,),
    "kernels": (_matmul_share, _other_kinds, _idle),
    "attention_ops": (_attention_ratio, _around_matmuls),
    "profiler_agreement": (_filled, _queued, _profiled, _nsys),
}
