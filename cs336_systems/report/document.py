"""The parts of a report before it has a format: texts in both languages, tables, charts as data, sections.

The topics of `experiments/` make sections from records; web/page.py, build.py and chart_picture.py write them. Nothing
here depends on records, torch or files. Whatever both writers of charts must agree on is a method of `Chart`.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from cs336_systems.table import Table
from cs336_systems.text import Text

LEAST = 1e-150
"""Values nearer to zero, or above its reciprocal, are not drawn: quotients of all others stay finite."""
FAR = 4
"""A bar is cut off at this multiple of the chart's limit."""


def finite(value: float) -> bool:
    return math.isfinite(value) and abs(value) < 1 / LEAST


def exact(value: float) -> str:
    """A number with six digits, without an exponent unless it is very large or very small."""
    text = f"{value:.6g}"
    return f"{value:.0f}" if "e+" in text and abs(value) < 1e15 else text


@dataclass(frozen=True)
class Point:
    x: float | str
    """A number on the axis of a line chart, or the name of a bar."""
    y: float
    std: float | None = None
    n: int | None = None
    note: Text | None = None
    """Replaces the value, for example "out of memory"; the point is drawn as a cross at the far edge."""
    start: float | None = None
    """Start of a span, which ends at y."""
    name: str = ""
    """Further identification of the point, for example the shape that has this arithmetic intensity."""

    @property
    def place(self) -> str:
        """Its x as text: the name of its bar, the label in its tooltip."""
        return self.x if isinstance(self.x, str) else exact(self.x)


@dataclass(frozen=True)
class Series:
    name: Text
    points: Sequence[Point]
    dashed: bool = False
    """Not measured: a prediction, a fitted line, a bound."""
    drawn: Literal["both", "line", "marks"] = "both"
    """In a line chart: a line with markers, the line alone, markers alone. In a bar chart "marks" are drawn on bars."""
    over: int | None = None
    """Index of the series that this one refers to: marks are drawn on its bars, a fitted line has its colour."""
    lane: int = 0
    """Row of a span within its bar: 0 is above 1."""


@dataclass(frozen=True)
class Limit:
    """A line across the chart at a value that every bar is compared with."""

    value: float
    text: Text


class Part(NamedTuple):
    """One part of a stacked bar."""

    point: Point
    begin: float
    end: float


@dataclass(frozen=True)
class Chart:
    """`lines`: x are numbers. `bars`: x are names, series are side by side. `stacked`: series are parts of one bar.
    `spans`: x are the names of rows, points last from `start` to y."""

    name: str
    """Name of its file and anchor: letters, digits, '-' and '_'."""
    title: Text
    kind: Literal["lines", "bars", "stacked", "spans"]
    x: Text
    y: Text
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    horizontal: bool = False
    """Horizontal bars, for long names; spans are always horizontal."""
    places: Sequence[str] = ()
    """Names of bars in their order; names that are not listed follow in order of appearance."""
    limit: Limit | None = None

    @property
    def sideways(self) -> bool:
        """True if values grow to the right, beside names that are listed from top to bottom."""
        return (self.horizontal and self.kind != "lines") or self.kind == "spans"

    @property
    def cut_at(self) -> float | None:
        """The value beyond which stacked bars are cut off, so that bars within the limit stay readable. None if no
        bar is cut, also where crosses occupy that end of the axis."""
        value = self.limit.value if self.limit else 0.0
        notes = any(point.note for series in self.series for point in series.points)
        level = self.kind == "stacked" and self.horizontal and not self.log_y and not notes
        return FAR * value if level and math.isfinite(value) and value > 0 else None

    @cached_property
    def shown(self) -> list[tuple[int, Series]]:
        """The series with anything to draw, with their indices."""
        return [(i, series) for i, series in enumerate(self.series) if any(map(self._has_mark, series.points))]

    @cached_property
    def bars(self) -> list[int]:
        """Indices of the series that have bars, side by side in this order."""
        return [index for index, series in self.shown if not self.on_bars(series)]

    @cached_property
    def stacks(self) -> dict[int, list[Part]]:
        """The parts of stacked bars by series index; negative parts are stacked downwards."""
        ends: defaultdict[tuple[str, bool], float] = defaultdict(float)
        found: dict[int, list[Part]] = {}
        for index in self.bars:
            found[index] = []
            for point in filter(self.can_draw, self.series[index].points):
                key = (point.place, point.y < 0)
                begin = ends[key]
                ends[key] += point.y
                found[index].append(Part(point, begin, ends[key]))
        return found

    @cached_property
    def lanes(self) -> list[int]:
        return sorted({series.lane for _, series in self.shown})

    @cached_property
    def bar_names(self) -> list[str]:
        """Names of the bars, in order."""
        points = (point for _, series in self.shown for point in series.points)
        found = dict.fromkeys(point.place for point in points if self.has_place(point))
        first = [name for name in dict.fromkeys(self.places) if name in found]
        return [*first, *(name for name in found if name not in self.places)]

    @property
    def shown_limit(self) -> Limit | None:
        """The limit, if it has a place on the axis."""
        return self.limit if self.limit and self._on_axis(self.limit.value) else None

    def has_place(self, point: Point) -> bool:
        """True if the point has a position on the axis of x."""
        if isinstance(point.x, str):
            return True
        return finite(point.x) and (point.x > LEAST or not self.log_x or self.kind != "lines")

    def can_draw(self, point: Point) -> bool:
        """True if the point has a value with a position on both axes."""
        ends = [point.y] if self.kind != "spans" else [math.nan if point.start is None else point.start, point.y]
        return self.has_place(point) and not point.note and all(map(self._on_axis, ends))

    def _has_mark(self, point: Point) -> bool:
        return self.can_draw(point) or (point.note is not None and self.has_place(point))

    def _on_axis(self, value: float) -> bool:
        return finite(value) and (value > LEAST or not self.log_y)

    def on_bars(self, series: Series) -> bool:
        """True if the series is drawn as marks on the bars of others."""
        return self.kind in ("bars", "stacked") and series.drawn == "marks"

    def color_of(self, number: int) -> int:
        """Index of the series whose colour series `number` has."""
        over = self.series[number].over
        return number if over is None or self.kind != "lines" else over


def beyond_text(end: float) -> str:
    """The label of a bar that is cut off: an arrow and where the bar ends."""
    return f"→ {end:,.0f}" if end >= 100 else f"→ {end:.3g}"


@dataclass(frozen=True)
class Link:
    text: Text
    href: str


@dataclass(frozen=True)
class Section:
    name: str
    """Name of the experiment."""
    title: Text
    question: Text
    findings: Sequence[Text] = ()
    """Conclusions computed from the data, one sentence each."""
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
    """Experiments without records -> the command that measures them."""
    remarks: Sequence[Text] = ()
    """Remarks on the records as a whole: lines that could not be read, cells that were interrupted."""
