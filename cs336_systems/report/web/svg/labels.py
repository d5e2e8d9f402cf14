"""Texts of a drawing in both languages: their width, their line breaks, their accessible names."""

import re
import unicodedata
from functools import lru_cache
from html import escape

from cs336_systems.text import LANGUAGES, Text

SIZE = 14
"""Font size in units of the drawing: 11 pixels when the chart is shown 560 pixels wide."""
LINE = 18
"""Distance between the baselines of two lines."""


@lru_cache(maxsize=4096)
def text_width(text: str, size: float = SIZE) -> float:
    """Estimate the width of a text, rather too large, because the reader's fonts are unknown."""
    return size * sum(map(_character_width, text))


def _character_width(char: str) -> float:
    if unicodedata.east_asian_width(char) in "WF":
        return 1.03
    if unicodedata.combining(char):
        return 0.0
    if char in "iljtfrI.,:;'|!()[] ":
        return 0.4
    return 0.97 if char in "mwMW@%—" else 0.72 if char.isupper() else 0.63


_TOKENS = re.compile(r"(?:[⺀-￯]|[^\s⺀-￯_/:,<>-]*[_/:,<>-]+|[^\s⺀-￯_/:,<>-]+|\s+)[，。、；：！？）》]*")
"""Parts of a text between which a line may break; no line begins with a closing mark of Chinese."""


def wrap(text: str, room: float, most: int = 4) -> list[str]:
    """Break a text into at most `most` lines no wider than `room`, the last one cut with an ellipsis. Lines break at
    spaces, after punctuation and between Chinese characters, and inside a word only if it does not fit alone."""
    if most == 1:
        return [shortened(text, room)]
    lines, line = [], ""
    for token in _TOKENS.findall(text):
        if text_width(line + token.rstrip()) > room:
            lines.append(line)
            line = ""
        line += token if line.strip() or not token.isspace() else ""
        while text_width(line.rstrip()) > room and len(line) > 1:
            cut = max(1, next((i for i in range(1, len(line)) if text_width(line[: i + 1]) > room), len(line)))
            lines.append(line[:cut])
            line = line[cut:]
    lines = [kept for kept in (one.strip() for one in [*lines, line]) if kept] or [""]
    return lines if len(lines) <= most else [*lines[: most - 1], shortened(lines[most - 1] + "…", room)]


def shortened(text: str, room: float) -> str:
    if text_width(text) <= room:
        return text
    text = text.removesuffix("…")
    while text and text_width(text + "…") > room:
        text = text[:-1]
    return text.rstrip() + "…"


def line_count(text: Text, room: float, most: int = 4) -> int:
    return max(len(wrap(text.in_(language), room, most)) for language in LANGUAGES)


def widest(text: Text) -> float:
    return max(text_width(text.in_(language)) for language in LANGUAGES)


def text_elements(
    x: float, y: float, text: Text, room: float, *, anchor: str = "start", kind: str = "", most: int = 4, angle: int = 0
) -> str:
    """Return text elements with the first baseline at `y`: one, or one for each language if they differ."""
    same = text.in_("zh") == text.en
    found = []
    for language in ("en",) if same else LANGUAGES:
        whole = text.in_(language)
        lines = wrap(whole, room, most)
        classes = " ".join(filter(None, (kind, "" if same else language)))
        spans = escape(lines[0]) + "".join(f'<tspan x="{x:.1f}" dy="{LINE}">{escape(t)}</tspan>' for t in lines[1:])
        cut = f"<title>{escape(whole)}</title>" if lines[-1].endswith("…") else ""
        found.append(
            f'<text x="{x:.1f}" y="{y:.1f}"'
            + (f' class="{classes}"' if classes else "")
            + (f' text-anchor="{anchor}"' if anchor != "start" else "")
            + (f' transform="rotate({angle} {x:.1f} {y:.1f})"' if angle else "")
            + f">{cut}{spans}</text>"
        )
    return "".join(found)


def aria(names: Text) -> str:
    """Return the attributes of the accessible name; if the languages differ, the page's script switches between
    them."""
    chinese = names.in_("zh")
    return f' aria-label="{escape(names.en)}"' + (f' data-aria-zh="{escape(chinese)}"' if chinese != names.en else "")
