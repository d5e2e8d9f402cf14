"""What a report is made of, before it has a format: texts in two languages, charts as data, sections.

Sections are made from records (sections.py, charts.py, findings/); page.py, build.py and chart_picture.py only write
them down. Nothing here knows of records, torch or files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from cs336_systems.table import Table

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")


class Text(NamedTuple):
    """The same in both languages; with one given, it serves for both."""

    en: str
    zh: str = ""

    def in_(self, language: Language) -> str:
        return self.zh or self.en if language == "zh" else self.en


@dataclass(frozen=True)
class Point:
    x: float | str
    """A number on a number line, or the name of a bar's place."""
    y: float
    std: float | None = None
    n: int | None = None
    note: Text | None = None
    """Shown where the value would be, "out of memory" for example; the point is then drawn as a mark at the top."""


@dataclass(frozen=True)
class Series:
    name: Text
    points: Sequence[Point]
    dashed: bool = False
    """A prediction, a fitted line, a bound: something that was not measured."""


@dataclass(frozen=True)
class Chart:
    """`lines`: x are numbers. `bars`: x are names, series stand side by side. `stacked`: they are parts of one bar."""

    name: str
    """Of its file and its anchor: letters, digits, '-' and '_'."""
    title: Text
    kind: Literal["lines", "bars", "stacked"]
    x: Text
    y: Text
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    horizontal: bool = False
    """Of bars whose names are long."""


@dataclass(frozen=True)
class Link:
    text: Text
    href: str


@dataclass(frozen=True)
class Section:
    name: str
    """The experiment's."""
    title: Text
    question: Text
    findings: Sequence[Text] = ()
    """What the data show, computed from them, in a sentence each."""
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    links: Sequence[Link] = ()


@dataclass(frozen=True)
class Document:
    title: Text
    facts: Mapping[str, str] = field(default_factory=dict)
    """Machine, GPU, versions, commit: what the header says."""
    sections: Sequence[Section] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    """Experiment -> the command that would fill it."""
    remarks: Sequence[Text] = ()
    """On the file as a whole: lines that could not be read, cells that were interrupted."""
