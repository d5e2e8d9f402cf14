"""`Text`: a phrase in English and Chinese, written once where it is used. Standard library only.

    PEAK = Text("peak", "峰值")
    said = say("{} is {}x faster", "{} 快 {} 倍", name, ratio)

A text without Chinese is a name that both languages share (`Text("MFU")`).
"""

import unicodedata
from collections.abc import Iterable
from typing import Literal, NamedTuple

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")


class Text(NamedTuple):
    """A phrase in both languages; with one given, it serves for both."""

    en: str
    zh: str = ""

    def in_(self, language: Language) -> str:
        return self.zh or self.en if language == "zh" else self.en


def as_texts(values: Iterable[str | Text]) -> list[Text]:
    return [value if isinstance(value, Text) else Text(value) for value in values]


def say(en: str, zh: str, *values: str | Text) -> Text:
    """Fill one template per language with the same values; a value that is a `Text` brings both languages."""
    texts = as_texts(values)
    return Text(en.format(*(text.en for text in texts)), zh.format(*(text.in_("zh") for text in texts)))


def listed(values: Iterable[str | Text], separators: tuple[str, str] = (", ", "、")) -> Text:
    """Join values by each language's own separator."""
    texts = as_texts(values)
    return Text(separators[0].join(text.en for text in texts), separators[1].join(text.in_("zh") for text in texts))


def counted(count: int, noun: str) -> str:
    """Return `1 step`, `0 steps` or `1,000 steps` for the noun "step"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def printable(text: str, keep: str = "") -> str:
    """Return a text from a file with control characters, escape sequences and marks that reorder a line written out as
    `\\x1b`, except the characters of `keep`: a terminal would obey them."""
    if text.isprintable():
        return text
    return "".join(char if _is_harmless(char) or char in keep else ascii(char)[1:-1] for char in text)


def _is_harmless(char: str) -> bool:
    return char.isprintable() or unicodedata.category(char) == "Zs"  # the wide space of Chinese texts, say
