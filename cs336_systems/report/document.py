"""What a report is made of, before it has a format: texts in two languages, charts as data, sections.

Sections are made from records (sections.py, charts/, findings/); page.py, build.py and chart_picture.py only write
them down. Nothing here knows of records, torch or files.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cs336_systems.table import Table
from cs336_systems.text import Text


@dataclass(frozen=True)
class Point:
    x: float | str
    """A number on a number line, or the name of a bar's place."""
    y: float
    std: float | None = None
    n: int | None = None
    note: Text | None = None
    """Shown where the value would be, "out of memory" for example; the point is then drawn as a mark at the top."""
    start: float | None = None
    """Of a span, which ends at y."""
    name: str = ""
    """What the point is, where x does not say it: the shape that has this intensity."""


@dataclass(frozen=True)
class Series:
    name: Text
    points: Sequence[Point]
    dashed: bool = False
    """A prediction, a fitted line, a bound: something that was not measured."""
    drawn: Literal["both", "line", "marks"] = "both"
    """Of a chart of lines: a line with its marks, the line alone, the marks alone. "marks" among bars stand on them."""
    over: int | None = None
    """The number of the series that this one is about: marks stand on its bars, a fitted line has its colour."""
    lane: int = 0
    """Of spans: 0 above, 1 below it, in every row."""


FAR = 4
"""Times its limit, beyond which a bar is cut off."""


@dataclass(frozen=True)
class Limit:
    """A line across the chart at a value that all are held against."""

    value: float
    text: Text


@dataclass(frozen=True)
class Chart:
    """`lines`: x are numbers. `bars`: x are names, series stand side by side. `stacked`: they are parts of one bar.
    `spans`: x are the names of rows, points last from `start` to y."""

    name: str
    """Of its file and its anchor: letters, digits, '-' and '_'."""
    title: Text
    kind: Literal["lines", "bars", "stacked", "spans"]
    x: Text
    y: Text
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    horizontal: bool = False
    """Of bars whose names are long; spans are always."""
    places: Sequence[str] = ()
    """Names of bars in their order; those that are not in it follow, as they come."""
    limit: Limit | None = None

    @property
    def sideways(self) -> bool:
        """Whether values grow to the right, beside names that stand one below the other."""
        return (self.horizontal and self.kind != "lines") or self.kind == "spans"

    @property
    def cut_at(self) -> float | None:
        """Where the axis of stacked bars ends at the latest, else what fits into the limit could not be read: a bar
        that goes on beyond says how far. Nowhere if crosses stand at that end."""
        value = self.limit.value if self.limit else 0.0
        notes = any(point.note for series in self.series for point in series.points)
        level = self.kind == "stacked" and self.horizontal and not self.log_y and not notes
        return FAR * value if level and math.isfinite(value) and value > 0 else None

    def on_bars(self, series: Series) -> bool:
        """Whether it is drawn as marks on the bars of others."""
        return self.kind in ("bars", "stacked") and series.drawn == "marks"

    def color_of(self, number: int) -> int:
        """The series whose colour that one has."""
        over = self.series[number].over
        return number if over is None or self.kind != "lines" else over

    def ordered(self, names: Iterable[str]) -> list[str]:
        found = dict.fromkeys(names)
        first = [name for name in dict.fromkeys(self.places) if name in found]
        return [*first, *(name for name in found if name not in self.places)]


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
    facts: Mapping[Text, str] = field(default_factory=dict)
    """Machine, GPU, versions and commit, for the header."""
    sections: Sequence[Section] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    """Experiment -> the command that would fill it."""
    remarks: Sequence[Text] = ()
    """On the file as a whole: lines that could not be read, cells that were interrupted."""
