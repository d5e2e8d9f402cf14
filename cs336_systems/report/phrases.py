"""Building blocks of findings: phrases in both languages, and values of cells that may be missing."""

import re
from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from typing import Any, TypeVar

from cs336_systems.report.cells import CellView
from cs336_systems.report.entries import baselines
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import as_text, gib, number, percent, row_name, varying
from cs336_systems.text import Text, say

MOST = 3
"""Findings shown for one machine."""

Given = TypeVar("Given")
Answer = TypeVar("Answer")


_ODD = (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError)
"""Errors that data of an unexpected shape raise."""


def safely(make: Callable[[Given], Answer], given: Given) -> Answer | None:
    try:
        return make(given)
    except _ODD:
        return None


def together(first: Text | None, second: Text | None) -> Text | None:
    """Join two halves of a sentence, or return the one there is."""
    if first is None or second is None:
        return first or second
    return say("{}; {}", "{}；{}", first, second)


def ended(text: Text) -> Text:
    """The sentence with a capital, unless it begins with a name, and a full stop."""
    first = text.en.split(maxsplit=1)[0].rstrip(",:;")
    en = text.en[:1].upper() + text.en[1:] if first.isalpha() else text.en
    # A bracket of Chinese has its space built in.
    return Text(f"{en}.", re.sub(r"(?<=）) (?=[\u4e00-\u9fff])", "", f"{text.in_('zh')}。"))


MODE_WORDS = {
    "inference": Text("inference", "推理"),
    "forward": Text("forward", "前向"),
    "forward-backward": Text("forward and backward", "前向加后向"),
    "train-step": Text("training step", "训练步"),
}


def in_mode(mode: Any) -> Text:
    found = MODE_WORDS.get(str(mode), Text("step", "一步"))
    return Text(f"a {found.en}", found.zh) if found.en.endswith("step") else found


def times_text(ratio: float) -> str:
    """A ratio with as many digits as distinguish it from 1."""
    return number(ratio, 0 if ratio >= 10 else 1 if ratio >= 1.15 else 2)


def value_of(cell: CellView, metric: str) -> float | None:
    """The mean of a metric if it is finite and above 0, as everything measured here must be."""
    found = safely(lambda cell: cell.value(metric), cell)
    return found if found is not None and isfinite(found) and found > 0 else None


def known(cell: CellView, metric: str) -> float:
    """The same where it must be there; a LookupError leaves the sentence out."""
    found = value_of(cell, metric)
    if found is None:
        raise LookupError(metric)
    return found


def median_of(cell: CellView, metric: str) -> float | None:
    found = cell.median(metric)
    return found if found is not None and isfinite(found) and found > 0 else None


def having(cells: Iterable[CellView], *metrics: str) -> list[CellView]:
    """Cells that succeeded and have all of these metrics."""
    return [cell for cell in cells if cell.ok and all(value_of(cell, metric) for metric in metrics)]


def scale_of(cell: CellView) -> float:
    width, layers = cell.get("d_model"), cell.get("num_layers")
    return width * width * layers if isinstance(width, int) and isinstance(layers, int) else 0


def size_of(cell: CellView) -> str:
    return as_text(cell.get("size")) or cell.name or "?"


def naming(cells: Cells) -> Callable[[CellView], Text]:
    """A function that names a cell's row among these cells."""
    shown = varying(cells)

    def name(cell: CellView) -> Text:
        text = row_name(cell, shown)
        return text if text.en else Text(size_of(cell))

    return name


def named_values(cells: Cells, value: Callable[[CellView], float | None]) -> list[tuple[float, Text]]:
    """The value of each cell that succeeded and has one, with the cell's name; for `extremes`."""
    fine = [cell for cell in cells if cell.ok]
    name = naming(fine)
    return [(found, name(cell)) for cell in fine if (found := value(cell)) is not None and isfinite(found)]


def pairs_of(cells: Cells, field: str, baseline: Any, metric: str = "step_time") -> list[tuple[CellView, CellView]]:
    """(cell, the cell that differs from it only in having the baseline value), by size."""
    fine = sorted(having(cells, metric), key=scale_of)
    base_of = baselines(fine, lambda cell: cell.get(field) == baseline, field)
    return [(cell, base) for cell in fine if cell.get(field) != baseline and (base := base_of(cell))]


def speed_up(pair: tuple[CellView, CellView], metric: str = "step_time") -> float:
    cell, base = pair
    return (value_of(base, metric) or 0.0) / (value_of(cell, metric) or 1.0)


def span(values: Sequence[float], show: Callable[[float], str]) -> Text:
    least, most = show(min(values)), show(max(values))
    return Text(least) if least == most else say("{} to {}", "{} 到 {}", least, most)


def extremes(found: Sequence[tuple[float, Text]], show: Callable[[float], str]) -> Text:
    """The smallest and the largest value, each with its name."""
    (least, least_name), (most, most_name) = (pick(found, key=lambda pair: pair[0]) for pick in (min, max))
    if len(found) == 1:
        return say("{} ({})", "{}（{}）", show(least), least_name)
    return say("{} ({}) to {} ({})", "{}（{}）到 {}（{}）", show(least), least_name, show(most), most_name)


def worst_prediction(cells: Cells) -> Text | None:
    """State the largest error of predicted peak memory."""
    fine = having(cells, "peak_memory", "predicted_memory")
    worst = max(fine, key=lambda cell: abs(cell.memory_error or 0.0))
    values = [percent(abs(worst.memory_error or 0.0), 2)]
    values += [gib(value_of(worst, name)) for name in ("predicted_memory", "peak_memory")]
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
