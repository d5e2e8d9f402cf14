"""What sentences are put together from: words in both languages, and what cells say."""

import re
from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from typing import Any, TypeVar

from cs336_systems.report.cells import CellView
from cs336_systems.report.rows import FIELDS, as_text, number, row_name, varying
from cs336_systems.report.words import in_chinese, settings_in_chinese
from cs336_systems.text import Text

MOST = 3
"""Sentences for one machine."""

Cells = Sequence[CellView]
Sentence = Callable[[Cells], Text | None]
Given = TypeVar("Given")
Answer = TypeVar("Answer")


_ODD = (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError)
"""What data of another shape than expected can lead to."""


def safely(make: Callable[[Given], Answer], given: Given) -> Answer | None:
    try:
        return make(given)
    except _ODD:
        return None


def say(en: str, zh: str, *values: str | Text) -> Text:
    """One template for each language, the same values in both; a value that is a word brings both languages."""
    texts = [value if isinstance(value, Text) else Text(value) for value in values]
    return Text(en.format(*(text.en for text in texts)), zh.format(*(text.in_("zh") for text in texts)))


def listed(values: Iterable[str | Text]) -> Text:
    texts = [value if isinstance(value, Text) else Text(value) for value in values]
    return Text(", ".join(text.en for text in texts), "、".join(text.in_("zh") for text in texts))


def together(first: Text | None, second: Text | None) -> Text | None:
    """Two halves of a sentence, where both can be said."""
    if first is None or second is None:
        return first or second
    return say("{}; {}", "{}；{}", first, second)


def ended(text: Text | None) -> Text | None:
    """Begins with a capital, unless with a name, and ends with a full stop."""
    if text is None:
        return None
    first = text.en.split(maxsplit=1)[0].rstrip(",:;")
    en = text.en[:1].upper() + text.en[1:] if first.isalpha() else text.en
    # A bracket of Chinese has its space built in.
    return Text(f"{en}.", re.sub(r"(?<=）) (?=[\u4e00-\u9fff])", "", f"{text.in_('zh')}。"))


def sentence(make: Sentence) -> Sentence:
    return lambda cells: ended(make(cells))


def word(text: str) -> Text:
    return Text(text, in_chinese(text))


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
    """As many digits as tell it from 1."""
    return number(ratio, 0 if ratio >= 10 else 1 if ratio >= 1.15 else 2)


def value_of(cell: CellView, metric: str) -> float | None:
    """The mean, where it is a number above 0: nothing that is measured here can be less."""
    found = safely(lambda cell: cell.value(metric), cell)
    return found if found is not None and isfinite(found) and found > 0 else None


def median_of(cell: CellView, metric: str) -> float | None:
    found = cell.median(metric)
    return found if found is not None and isfinite(found) and found > 0 else None


def having(cells: Iterable[CellView], *metrics: str) -> list[CellView]:
    """Those that went well and have all of these."""
    return [cell for cell in cells if cell.ok and all(value_of(cell, metric) for metric in metrics)]


def scale_of(cell: CellView) -> float:
    width, layers = cell.get("d_model"), cell.get("num_layers")
    return width * width * layers if isinstance(width, int) and isinstance(layers, int) else 0


def size_of(cell: CellView) -> str:
    return as_text(cell.get("size")) or cell.name or "?"


def naming(cells: Cells) -> Callable[[CellView], Text]:
    """What a cell's row is called among these."""
    shown = varying(cells)

    def name(cell: CellView) -> Text:
        text = row_name(cell, shown) or size_of(cell)
        return Text(text, settings_in_chinese(text))

    return name


def settings_of(cell: CellView, *without: str) -> tuple[str, ...]:
    return tuple(as_text(cell.get(name)) for name in FIELDS if name not in without)


def pairs_of(cells: Cells, field: str, baseline: Any, metric: str = "step_time") -> list[tuple[CellView, CellView]]:
    """(cell, the one that differs from it only in having the baseline), by size."""
    fine = sorted(having(cells, metric), key=scale_of)
    bases = {settings_of(cell, field): cell for cell in fine if cell.get(field) == baseline}
    own = [cell for cell in fine if cell.get(field) != baseline]
    return [(cell, bases[key]) for cell in own if (key := settings_of(cell, field)) in bases]


def speed_up(pair: tuple[CellView, CellView], metric: str = "step_time") -> float:
    cell, base = pair
    return (value_of(base, metric) or 0.0) / (value_of(cell, metric) or 1.0)


def span(values: Sequence[float], show: Callable[[float], str]) -> Text:
    least, most = show(min(values)), show(max(values))
    return Text(least) if least == most else say("{} to {}", "{} 到 {}", least, most)


def extremes(found: Sequence[tuple[float, Text]], show: Callable[[float], str]) -> Text:
    """The least and the most, each with its name."""
    (least, least_name), (most, most_name) = (pick(found, key=lambda pair: pair[0]) for pick in (min, max))
    if len(found) == 1:
        return say("{} ({})", "{}（{}）", show(least), least_name)
    return say("{} ({}) to {} ({})", "{}（{}）到 {}（{}）", show(least), least_name, show(most), most_name)
