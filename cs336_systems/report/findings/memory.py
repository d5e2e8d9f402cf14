"""Sentences on memory."""

import re
from typing import Any

from cs336_systems.record import MIB
from cs336_systems.report.cells import CellView
from cs336_systems.report.findings.phrases import (
    Cells,
    Sentence,
    having,
    listed,
    naming,
    pairs_of,
    say,
    settings_of,
    span,
    speed_up,
    together,
    value_of,
    word,
)
from cs336_systems.report.rows import gib, number, percent
from cs336_systems.text import Text


def prediction(cells: Cells) -> Text | None:
    fine = having(cells, "peak_memory", "predicted_memory")
    if not fine:
        return None
    worst = max(fine, key=_off)
    values = [percent(_off(worst), 2), *(gib(value_of(worst, name)) for name in ("predicted_memory", "peak_memory"))]
    if len(fine) == 1:
        return say(
            "the predicted peak is off by {}: {} GiB, measured {}", "预测的峰值误差 {}：{} GiB，实测 {}", *values
        )
    return say(
        "the worst of {0} predicted peaks is off by {2} ({1}: {3} GiB, measured {4})",
        "{0} 个峰值预测的最大误差为 {2}（{1}：{3} GiB，实测 {4}）",
        str(len(fine)),
        naming(fine)(worst),
        *values,
    )


def _off(cell: CellView) -> float:
    return abs(cell.memory_error or 0.0)


def _savers(cells: Cells) -> Text | None:
    """Predictions of what saves memory, apart from the plain ones."""
    fine = having(cells, "peak_memory", "predicted_memory")
    saving = [cell for cell in fine if cell.get("attention") != "reference" or cell.get("checkpoint_blocks")]
    plain = [cell for cell in fine if cell not in saving]
    if not saving or not plain:
        return None
    return say(
        "those with fused attention or checkpointing ({}) are off by {} at most, the plain ones ({}) by {}",
        "使用融合注意力或检查点的（{} 个）最大误差 {}，普通的（{} 个）{}",
        *(str(len(saving)), percent(max(map(_off, saving)), 2), str(len(plain)), percent(max(map(_off, plain)), 2)),
    )


def _composition(cells: Cells) -> Text | None:
    fine = having(cells, "peak_memory")
    highest = max(fine, key=lambda cell: value_of(cell, "peak_memory") or 0.0)
    peak = value_of(highest, "peak_memory") or 1.0
    parts = sorted(highest.rows("part_memory", 2), key=lambda part: -part[1])[:3]
    if not parts:
        return None
    shares = listed(say("{} {}", "{} {}", percent(size / peak, 0), word(str(label))) for label, size in parts)
    return say(
        "at the highest peak, {} GiB ({}), are {}",
        "最高的峰值 {} GiB（{}）中：{}",
        *(gib(peak), naming(fine)(highest), shares),
    )


def _largest_block(cells: Cells) -> Text | None:
    fine = [cell for cell in cells if cell.ok]
    blocks = [(row, cell) for cell in fine for row in cell.rows("largest_blocks", 5)[:1]]
    if not blocks:
        return None
    (size, label, _, what, line), cell = max(blocks, key=lambda pair: pair[0][0])
    made = say(", made at {}", "，由 {} 产生", str(line)) if line else Text("")
    return say(
        "the largest block of a step is {} MiB of {}: {}{} ({})",
        "一步中最大的块为 {} MiB 的{}：{}{}（{}）",
        *(number(size / MIB, 1), word(str(label)), str(what), made, naming(fine)(cell)),
    )


def _least_memory(cells: Cells) -> Text | None:
    said = None
    for precision in dict.fromkeys(cell.get("precision") for cell in cells):
        chosen = [cell for cell in cells if cell.get("precision") == precision]
        said = together(said, _best_group(str(precision), chosen))
    return said


def _best_group(precision: str, cells: Cells) -> Text | None:
    fine = [cell for cell in having(cells, "peak_memory") if cell.get("checkpoint_blocks")]
    if not fine:
        return None
    least = min(value_of(cell, "peak_memory") or 0.0 for cell in fine)
    # The simplest of those that are equal to a thousandth.
    near = [cell for cell in fine if (value_of(cell, "peak_memory") or 0.0) <= 1.001 * least]
    best = min(near, key=lambda cell: (cell.get("inner") or 0, cell.get("checkpoint_blocks")))
    said = say(
        "in {} groups of {} need the least memory, {} GiB",
        "{} 下每组 {} 块最省显存，{} GiB",
        *(precision, str(best.get("checkpoint_blocks")), gib(value_of(best, "peak_memory"))),
    )
    whole = _without_checkpoints(cells)
    return say("{}, against {}", "{}，{}", said, whole) if whole else said


def _without_checkpoints(cells: Cells) -> Text | None:
    for cell in (cell for cell in cells if not cell.get("checkpoint_blocks")):
        if peak := value_of(cell, "peak_memory"):
            return say("{} without", "不重计算为 {}", gib(peak))
        if needed := re.match(r"oom: needs ([\d.,]+) GiB", cell.status):
            return say("{} without, which do not fit", "不重计算为 {}，放不下", needed[1])
    return None


def _recompute_time(cells: Cells) -> Text | None:
    """What recomputing costs against none, and nesting against the same groups without it."""
    fine = having(cells, "step_time")
    flat = {settings_of(cell): cell for cell in fine if not cell.get("inner")}
    nested = [_over(cell, base) for cell in fine if cell.get("inner") and (base := flat.get(settings_of(cell)))]
    grouped = [_over(cell, base) for cell, base in pairs_of(list(flat.values()), "checkpoint_blocks", 0)]
    said = None
    for found, en, zh in (
        (grouped, "recomputing makes a step {} times as long", "重计算使单步时间为 {} 倍"),
        (nested, "nesting groups once more makes a step {} times as long", "组内再嵌套一层使单步时间为 {} 倍"),
    ):
        said = together(said, say(en, zh, span(found, "{:.2f}".format))) if found else said
    return said


def _over(cell: CellView, base: CellView) -> float:
    return 1 / speed_up((cell, base))


def _traced_prediction(cells: Cells) -> Text | None:
    found = [
        abs((value_of(cell, "predicted_by_tracing_memory") or 0.0) / (value_of(cell, "peak_memory") or 1.0) - 1)
        for cell in having(cells, "peak_memory", "predicted_by_tracing_memory")
    ]
    if not found:
        return None
    return say(
        "{} peaks predicted by tracing are off by {} at most",
        "{} 个由追踪预测的峰值最大误差为 {}",
        *(str(len(found)), percent(max(found), 2)),
    )


def _kept(cells: Cells) -> Text | None:
    fine = having(cells, "saved_memory")
    plain = [cell for cell in fine if _way(cell).en == "attention by the formula"]
    if not plain:
        return None
    base = plain[0]
    others = [cell for cell in fine if cell is not base and cell.get("precision") == base.get("precision")]
    whole = value_of(base, "saved_memory") or 1.0
    each = [
        say("{} {} ({})", "{} {}（{}）", _way(cell), number(kept / MIB, 1), percent(kept / whole, 0))
        for cell in others
        if (kept := value_of(cell, "saved_memory"))
    ]
    said = say(
        "of {} in {} attention by the formula keeps {} MiB for backward",
        "{}在 {} 下，公式注意力为后向保留 {} MiB",
        *(_blocks(base.get("num_layers")), str(base.get("precision")), number(whole / MIB, 1)),
    )
    return say("{}, {}", "{}，{}", said, listed(each)) if each else said


def _blocks(count: Any) -> Text:
    return Text(f"{count} block" if count == 1 else f"{count} blocks", f"{count} 个块")


def _way(cell: CellView) -> Text:
    if cell.get("checkpoint_blocks"):
        return Text("checkpointed", "检查点")
    if cell.get("compile"):
        return Text("compiled", "编译")
    if cell.get("attention") == "reference":
        return Text("attention by the formula", "公式注意力")
    return Text("fused attention", "融合注意力")


def _largest_kept(cells: Cells) -> Text | None:
    fine = having(cells, "saved_memory")
    rows = [(row, cell) for cell in fine for row in cell.rows("largest_saved", 4)[:1]]
    if not rows:
        return None
    (size, _, what, line), _ = max(rows, key=lambda pair: pair[0][0])
    return say(
        "the largest is {} with {} MiB, made at {}",
        "最大的是 {}，{} MiB，由 {} 产生",
        *(str(what), number(size / MIB, 1), str(line)),
    )


def _model_parts(cells: Cells) -> Text | None:
    """What the largest model needs, from its configuration alone."""
    fine = sorted(having(cells, "predicted_memory"), key=lambda cell: value_of(cell, "predicted_memory") or 0.0)
    cell = fine[-1]
    peak = value_of(cell, "predicted_memory") or 1.0
    metrics = {"parameters": "parameter", "gradients": "gradient", "optimizer state": "optimizer"}
    sizes = {label: size for label, part in metrics.items() if (size := value_of(cell, f"{part}_memory"))}
    said = say("{} needs {} GiB", "{} 需要 {} GiB", naming(fine)(cell), gib(peak))
    if not sizes:
        return said
    parts = listed(say("{} {}", "{} {}", word(label), gib(size)) for label, size in sizes.items())
    return say("{}: {}, and what forward keeps", "{}：{}，以及前向保留的部分", said, parts)


def _model_range(cells: Cells) -> Text | None:
    fine = having(cells, "predicted_memory")
    if len(fine) < 2:
        return None
    least = min(fine, key=lambda cell: value_of(cell, "predicted_memory") or 0.0)
    return say(
        "of {} configurations {} needs the least, {} GiB",
        "{} 个配置中 {} 需要最少，{} GiB",
        *(str(len(fine)), naming(fine)(least), gib(value_of(least, "predicted_memory"))),
    )


SENTENCES: dict[str, tuple[Sentence, ...]] = {
    "peak_memory": (prediction, _savers),
    "memory": (prediction, _composition, _largest_block),
    "checkpointing": (_least_memory, _recompute_time, _traced_prediction),
    "saved_tensors": (_kept, _largest_kept),
    "memory_model": (_model_parts, _model_range),
}
