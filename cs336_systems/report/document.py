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

from cs336_systems.report.names import COLORS, color_of_name
from cs336_systems.table import Table
from cs336_systems.text import Text

LEAST = 1e-150
"""Values nearer to zero, or above its reciprocal, are not drawn, so that quotients of all others stay finite."""
FAR = 4
"""A bar is cut off at this multiple of the chart's limit."""


def finite(value: float) -> bool:
    return math.isfinite(value) and abs(value) < 1 / LEAST


def exact(value: float) -> str:
    """Return a number with six digits, without an exponent unless it is very large or very small."""
    text = f"{value:.6g}"
    return f"{value:.0f}" if "e+" in text and abs(value) < 1e15 else text


def precise(value: float, digits: int | None = None) -> str:
    """Return a value as tables write it: whole numbers as they are, two digits after the point, one from 1,000 on, and
    three significant digits below 0.1."""
    if abs(value) >= 1e12 or not math.isfinite(value):
        return exact(value)
    if digits is None:
        if 0 < abs(value) < 0.1:
            return exact(float(f"{value:.3g}"))
        digits = 0 if value == int(value) else 2 if abs(value) < 1000 else 1
    return f"{value:,.{digits}f}"


def short(value: float) -> str:
    """Return a value on its bar: three significant digits, all those before the point."""
    size = abs(value)
    if size >= 1e12 or 0 < size < 0.1:
        return exact(float(f"{value:.3g}"))
    return f"{value:,.{0 if size >= 100 or size == 0 else 1 if size >= 10 else 2}f}"


@dataclass(frozen=True)
class Point:
    x: float | str | Text
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
    low: float | None = None
    """Lower end of its interval (`dots`), such as a confidence interval."""
    high: float | None = None

    @property
    def place(self) -> str:
        """Its x as text: the bar's English name, or the label in the tooltip."""
        return self.label.en

    @property
    def label(self) -> Text:
        if isinstance(self.x, Text):
            return self.x
        return Text(self.x if isinstance(self.x, str) else exact(self.x))


@dataclass(frozen=True)
class Series:
    name: Text
    points: Sequence[Point]
    dashed: bool = False
    """True for series that were not measured: a prediction, a fitted line, a bound."""
    drawn: Literal["both", "line", "marks"] = "both"
    """How the series is drawn. In a line chart: line with markers, line alone, or markers alone. In a bar chart "marks"
    are drawn on bars."""
    over: int | None = None
    """Index of the series that this one refers to: marks are drawn on that one's bars, a fitted line has its colour."""
    lane: int = 0
    """Row of a span within its bar: 0 is above 1."""


@dataclass(frozen=True)
class Limit:
    """A line across the chart at a value that every bar or curve is compared with."""

    value: float
    text: Text
    dashed: bool = False
    """True for limits that were not measured: a floor, a prediction."""


@dataclass(frozen=True)
class Event:
    """An event at one x of a line chart, such as a restart: a vertical line."""

    x: float
    text: Text


class Part(NamedTuple):
    """One part of a stacked bar."""

    point: Point
    begin: float
    end: float


@dataclass(frozen=True)
class Chart:
    """`lines`: x are numbers. `bars`: x are names, series are side by side. `stacked`: series are parts of one bar.
    `spans`: x are the names of rows, points last from `start` to y. `dots`: x are the names of rows, a point is a dot
    at y, with a line from `low` to `high`; a series may have many points in a row."""

    name: str
    """Name of its file and anchor: letters, digits, '-' and '_'."""
    title: Text
    kind: Literal["lines", "bars", "stacked", "spans", "dots"]
    x: Text
    y: Text
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    horizontal: bool = False
    """Horizontal bars, for long names; spans and dots are always horizontal."""
    places: Sequence[str] = ()
    """English names of bars in their order; names that are not listed follow in order of appearance."""
    limits: Sequence[Limit] = ()
    events: Sequence[Event] = ()
    from_zero: bool = False
    """The axis of values of a line chart starts at zero."""
    digits: int | None = None
    """Digits after the point of a value, as in the table beside it; None: as `precise` chooses."""
    note: Text | None = None
    """Smaller text below the title: the statistic that is drawn, how it was measured."""

    @property
    def sideways(self) -> bool:
        """True if values grow to the right, beside names that are listed from top to bottom."""
        return (self.horizontal and self.kind != "lines") or self.kind in ("spans", "dots")

    @property
    def cut_at(self) -> float | None:
        """The value beyond which stacked bars are cut off, so that bars within the limit stay readable. None if no
        bar is cut, also where crosses occupy that end of the axis."""
        value = next((limit.value for limit in self.limits if not limit.dashed), 0.0)
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

    def texts_of(self, values: Sequence[float]) -> list[str]:
        """Return values as they are written on bars. Whole numbers stay whole if all values are whole."""
        whole = all(value == int(value) for value in values)
        return [f"{value:,.0f}" if whole and abs(value) < 1e12 else short(value) for value in values]

    @cached_property
    def labels(self) -> dict[str, Text]:
        """Names of the bars in both languages, by their English name."""
        return {point.place: point.label for _, series in self.shown for point in series.points}

    @property
    def shown_limits(self) -> list[Limit]:
        """The limits that have a place on the axis."""
        return [limit for limit in self.limits if self._on_axis(limit.value)]

    @property
    def has_legend(self) -> bool:
        """False for a single series: the title names it."""
        return len([series for _, series in self.shown if any(series.name)]) > 1 or bool(self.limits or self.notes)

    @cached_property
    def notes(self) -> list[Text]:
        """The texts of crosses that stand in place of values."""
        points = (point for _, series in self.shown for point in series.points)
        return list(dict.fromkeys(point.note for point in points if point.note and self.has_place(point)))

    def has_place(self, point: Point) -> bool:
        """True if the point has a position on the axis of x."""
        if isinstance(point.x, str | Text):
            return True
        return finite(point.x) and (point.x > LEAST or not self.log_x or self.kind != "lines")

    def can_draw(self, point: Point) -> bool:
        """True if the point has a value with a position on both axes."""
        ends = [point.y] if self.kind != "spans" else [math.nan if point.start is None else point.start, point.y]
        return self.has_place(point) and not point.note and all(map(self._on_axis, ends))

    def interval_of(self, point: Point) -> tuple[float, float] | None:
        """Return the ends of a point's interval, if both have a position on the axis."""
        if point.low is None or point.high is None or not all(map(self._on_axis, (point.low, point.high))):
            return None
        return point.low, point.high

    def _has_mark(self, point: Point) -> bool:
        return self.can_draw(point) or (point.note is not None and self.has_place(point))

    def _on_axis(self, value: float) -> bool:
        return finite(value) and (value > LEAST or not self.log_y)

    def on_bars(self, series: Series) -> bool:
        """True if the series is drawn as marks on the bars of others."""
        return self.kind in ("bars", "stacked") and series.drawn == "marks"

    def color_of(self, number: int) -> int:
        """Return the number of a series' colour: that of its category in every chart, else the next free one."""
        over = self.series[number].over
        refers = self.kind == "lines" and over is not None and over < len(self.series)
        return self._colors[over if refers and over is not None else number]

    @cached_property
    def _colors(self) -> list[int]:
        fixed = [color_of_name(series.name.en) for series in self.series]
        free = [color for color in range(COLORS) if color not in fixed] or [*range(COLORS)]
        found, taken = [], 0
        for color in fixed:
            found.append(free[taken % len(free)] if color is None else color)
            taken += color is None
        return found


def beyond_text(end: float) -> str:
    """Return the label of a bar that is cut off: an arrow and where the bar ends."""
    return f"→ {end:,.0f}" if end >= 100 else f"→ {end:.3g}"


@dataclass(frozen=True)
class Link:
    text: Text
    href: str


@dataclass(frozen=True)
class Highlight:
    """A result for the first screen: a large number, and what it is compared with."""

    rank: int
    """Order on the first screen, smallest first; there is room for five."""
    value: Text
    """The large number with its unit: "1.3x", "0.5%"."""
    what: Text
    """Subject of the result, such as "attention, against FlashAttention-4"."""
    detail: Text
    """Both values and the settings, such as "2.7B, 4 x 512 tokens: 93.1 ms, 124.6 ms"."""
    ratio: float | None = None
    """Speed-up for the chart of speed-ups: the rival's time over ours, above 1 if ours is faster."""
    bar: Text | None = None
    """Name of its bar in that chart."""
    section: str = ""
    """Name of its section."""


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
    group: Text | None = None
    """Heading under which the section stands, with others."""


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
    highlights: Sequence[Highlight] = ()
    """The large numbers of the first screen."""
    hero: Chart | None = None
    """The chart of the first screen."""
    trust: Text | None = None
    """Why the numbers can be trusted, in one line."""
