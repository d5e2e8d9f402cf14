"""The marks of a drawing: lines, bars, spans, dots, crosses. Each carries its value for the tooltip and for screen
readers; the values of bars are written at their ends."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from html import escape

from cs336_systems.report.document import Chart, Event, Limit, Point, Series, finite, precise
from cs336_systems.report.web.svg.labels import text_elements, text_width
from cs336_systems.report.web.svg.placement import NARROW, BarValue, Layout, spread
from cs336_systems.text import LANGUAGES, Text

MOST_NAMES = 16
"""Maximum points whose names stand beside them."""
DENSE = 60
"""Lines with more points than this have small markers."""
MOST_MARKS = 120
"""Maximum markers of a line. The line itself passes through all of its points."""
MARKERS = (
    "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z",
    "M-4-4h8v8h-8z",
    "M0-5.5L5.2 4H-5.2z",
    "M0-6L5 0L0 6L-5 0z",
    "M0 5.5L5.2-4H-5.2z",
    "M-1.7-5.5h3.4v3.8h3.8v3.4h-3.8v3.8h-3.4v-3.8h-3.8v-3.4h3.8z",
    "M-5.5 0L-2.7-4.8H2.7L5.5 0L2.7 4.8H-2.7z",
    "M0-6L1.7-1.9L6-1.9L2.6 .9L3.8 5L0 2.6L-3.8 5L-2.6 .9L-6-1.9L-1.7-1.9z",
)
CROSS = "M-5-5L5 5M-5 5L5-5"
HATCHES = (
    "",
    "M-2 2L2-2M0 8L8 0M6 10L10 6",
    "M0 4h8",
    "M-2 6L2 10M0 0L8 8M6-2L10 2",
    "M4 0v8",
    "M4 0v8M0 4h8",
    "M2 2h3",
)
"""Patterns over the colour of bars, in tiles of 8 by 8."""
HOLLOW = ' style="fill:var(--page);stroke:var(--text);stroke-width:1.5"'
"""Style of marks on bars: readable on any colour."""
THIN = 1.5
"""Minimum length of a bar: a value of zero is drawn as a thin line."""
INVISIBLE = ' style="fill:transparent"'
"""Style of the markers of a line drawn without them: visible only under the pointer."""


def limit_style(limit: Limit) -> str:
    return f' class="bound{" dashed" * limit.dashed}"'


def drawing_id(chart: Chart, what: str, width: int) -> str:
    """Return an id; the wide and the narrow drawing of a chart are on the same page."""
    return f"{what}-{re.sub(r'[^A-Za-z0-9_-]', '', chart.name)}{'-narrow' * (width == NARROW)}"


def fine(place: float, base: float = 0.0) -> str:
    """Return a coordinate with enough digits for its distance from `base`, because the script enlarges small marks when
    it hides large ones."""
    distance = abs(place - base)
    digits = max(1, math.ceil(2.7 - math.log10(distance))) if distance > 1e-6 else 1
    return f"{place:.{digits}f}"


# Colours and patterns


def marker(index: int) -> str:
    return MARKERS[index % len(MARKERS)]


def swatch(chart: Chart, index: int, series: Series, x: float, y: float, width: int) -> str:
    """Return the sample of a series in the legend: 26 wide, centred at `y`."""
    mark = f'<path class="mark" transform="translate({x + 13:.1f} {y:.1f})" d="{marker(index)}"'
    if chart.kind == "dots":
        return f"{mark}/>"
    if chart.kind == "lines":
        line = f'<path class="line{" dashed" if series.dashed else ""}" d="M{x:.1f} {y:.1f}h26"/>'
        return {"both": f"{line}{mark}/>", "line": line, "marks": f"{mark}/>"}[series.drawn]
    if chart.on_bars(series):
        return f"{mark}{HOLLOW}/>"
    return f'<rect x="{x + 4:.1f}" y="{y - 7:.1f}" width="20" height="14"{_fill(chart, index, series, width)}/>'


def patterns(layout: Layout) -> str:
    """Return definitions of the hatches that distinguish bars besides their colour, and of the clip at the end of the
    axis."""
    chart = layout.chart
    if chart.kind == "lines":
        return ""
    hatch, clip = (drawing_id(chart, what, layout.width) for what in ("hatch", "clip"))
    found = [
        f'<pattern id="{hatch}-{index}" class="s{chart.color_of(index)}" width="8" height="8" '
        f'patternUnits="userSpaceOnUse"><rect class="fill" width="8" height="8"/>'
        f'<path class="hatch" d="{_hatch(chart, index)}"/></pattern>'
        for index, series in chart.shown
        if index in chart.bars and not series.dashed and _hatch(chart, index)
    ]
    if layout.beyond:
        found.append(
            f'<clipPath id="{clip}"><rect x="{layout.left:.1f}" y="{layout.top:.1f}" '
            f'width="{layout.right - layout.left:.1f}" height="{layout.bottom - layout.top:.1f}"/></clipPath>'
        )
    return f"<defs>{''.join(found)}</defs>" if found else ""


def _fill(chart: Chart, index: int, series: Series, width: int) -> str:
    if series.dashed:
        return ' class="hollow"'
    hatched = _hatch(chart, index)
    return f' class="bar" fill="url(#{drawing_id(chart, "hatch", width)}-{index})"' if hatched else ' class="bar fill"'


def _hatch(chart: Chart, index: int) -> str:
    """Return the pattern of bars whose colour an earlier series has, too; empty for the first series of a colour."""
    earlier = [before for before in chart.bars if before < index and chart.color_of(before) == chart.color_of(index)]
    return HATCHES[len(earlier) % len(HATCHES)]


# Marks


class Marks:
    def __init__(self, layout: Layout):
        self.at = layout
        self.chart = layout.chart
        self.notes_at: Counter[str] = Counter()

    def draw(self) -> str:
        """Draw all series, and the limits above them."""
        groups = []
        for index, series in self.chart.shown:
            draw = self._line if self.chart.kind == "lines" else self._bars
            draw = self._on_bars if self.chart.on_bars(series) else self._dots if self.chart.kind == "dots" else draw
            marks = draw(index, series) + self._notes(index, series)
            name = _in_both("series", series.name)
            groups.append(f'<g class="series s{self.chart.color_of(index)}" data-index="{index}"{name}>{marks}</g>')
        whole = "".join(groups)
        if self.at.beyond:
            whole = f'<g clip-path="url(#{drawing_id(self.chart, "clip", self.at.width)})">{whole}</g>'
        named = self._names() if self.chart.kind == "lines" else ""
        limits = "".join(map(self._limit, self.chart.shown_limits))
        return whole + named + self._values() + limits + self._events()

    def _along(self, value: float) -> str:
        """Return the position of a value, as text."""
        return fine(self.at.along_value(value), self.at.base)

    def _exact(self, place: float) -> str:
        """Return a position that may be that of zero, with all digits: the script may enlarge its rounding error,
        too."""
        return fine(place, self.at.base) if abs(place - self.at.base) > 1e-6 else f"{place:.6f}"

    def _drawn(self, series: Series) -> list[Point]:
        return [point for point in series.points if self.chart.can_draw(point)]

    def _line(self, index: int, series: Series) -> str:
        points = [point for point in series.points if self.chart.has_place(point)]
        points.sort(key=lambda point: self.at.along_place(point.x))
        path, errors, marks, joined = [], [], [], False
        every = math.ceil(len(points) / MOST_MARKS)
        small = " scale(.4)" if len(points) > DENSE else ""
        invisible = INVISIBLE if series.drawn == "line" else ""
        for place, point in enumerate(points):
            if not self.chart.can_draw(point):
                joined = False  # a gap shows that a point is missing
                continue
            x, y = self.at.along_place(point.x), self._along(point.y)
            path.append(f"{'L' if joined else 'M'}{x:.1f} {y}")
            joined = True
            if place % every:
                continue
            errors.append(self._error(point, x))
            marks.append(
                f'<path class="mark" transform="translate({x:.1f} {y}){small}" d="{marker(index)}"{invisible}'
                f"{self._data(point)}/>"
            )
        kind = "line dashed" if series.dashed else "line"
        error = "".join(errors)
        return (
            (f'<path class="{kind}" d="{"".join(path)}"/>' if path and series.drawn != "marks" else "")
            + (f'<path class="error" d="{error}"/>' if error else "")
            + "".join(marks)
        )

    def _error(self, point: Point, across: float, reach: float = 4) -> str:
        """Return the path of an error bar: one standard deviation to each side of the value."""
        if not spread(point):
            return ""
        low, high = self._along(point.y - spread(point)), self._along(point.y + spread(point))
        if self.at.horizontal:
            ends = "".join(f"M{at} {across - reach:.1f}v{2 * reach:.1f}" for at in (low, high))
            return f"M{low} {across:.1f}H{high}{ends}"
        ends = "".join(f"M{across - reach:.1f} {at}h{2 * reach:.1f}" for at in (low, high))
        return f"M{across:.1f} {low}V{high}{ends}"

    def _bars(self, index: int, series: Series) -> str:
        found, errors = [], []
        for point, middle, width, begin, end in self._boxes(index, series):
            ends = self.at.along_value(begin), self.at.along_value(end)
            found.append(self._bar(index, series, point, middle, width, *ends))
            if self.chart.kind == "bars":
                errors.append(self._error(point, middle, min(4, (width + 1) / 3)))
        error = "".join(errors)
        return "".join(found) + (f'<path class="error over" d="{error}"/>' if error else "")

    def _boxes(self, index: int, series: Series) -> Iterator[tuple[Point, float, float, float, float]]:
        """Yield each bar: its point, the middle of its width, its width, and the values between which it lies."""
        at, axis = self.at, self.at.value_axis
        if self.chart.kind == "stacked":
            for point, begin, end in self.chart.stacks[index]:
                if begin != end:
                    bottom = max(begin, axis.low) if axis.log else begin
                    yield point, at.along_place(point.x), at.bar_width(1), bottom, end
            return
        for point in self._drawn(series):
            if self.chart.kind == "spans":
                yield point, at.lane(series, point.x), 16.0, point.start or 0.0, point.y
            else:
                base = 0 if at.has_zero() else axis.low
                yield point, at.beside(index, point.x), at.bar_width(len(self.chart.bars)) - 1, base, point.y

    def _bar(
        self, index: int, series: Series, point: Point, middle: float, width: float, begin: float, end: float
    ) -> str:
        length = abs(end - begin)
        thin = length < THIN
        near = fine(min(begin, end), self.at.base)
        if thin and not self.at.horizontal:
            near = f"{min(begin, end) - THIN:.1f}"
        width = max(width, 1.0)
        box = (near, f"{middle - width / 2:.1f}", f"{THIN}" if thin else fine(length), f"{width:.1f}")
        x, y, across, down = box if self.at.horizontal else (box[1], box[0], box[3], box[2])
        place = self.chart.bar_names.index(point.place)
        way = 1 if (end - begin) * (1 if self.at.horizontal else -1) >= 0 else -1
        whence = f' data-way="{way}"' if self.chart.kind != "spans" else ""
        whence += f' data-place="{place}"' if self.chart.kind == "stacked" else ""
        size = f' data-size="{fine(length)}"' if thin else ""
        return (
            f'<rect x="{x}" y="{y}" width="{across}" height="{down}"'
            f"{_fill(self.chart, index, series, self.at.width)}"
            f"{whence}{size}{self._data(point)}/>"
        )

    def _dots(self, index: int, series: Series) -> str:
        """Draw dots beside the names of their rows, with their intervals; a row of many dots has small ones."""
        points = self._drawn(series)
        crowded = len(points) > 2 * len({point.place for point in points})
        lines, marks = [], []
        for point in points:
            x, y = self._along(point.y), self.at.beside(index, point.x)
            if interval := self.chart.interval_of(point):
                low, high = map(self._along, interval)
                lines.append(f"M{low} {y:.1f}H{high}M{low} {y - 4:.1f}v8M{high} {y - 4:.1f}v8")
            small = " scale(.55)" if crowded else ""
            marks.append(
                f'<path class="mark" transform="translate({x} {y:.1f}){small}" d="{marker(index)}"{self._data(point)}/>'
            )
        line = f'<path class="line" d="{"".join(lines)}"/>' if lines else ""
        return line + "".join(marks)

    def _on_bars(self, index: int, series: Series) -> str:
        found = []
        for point in self._drawn(series):
            along, across = self._along(point.y), f"{self.at.beside(series.over, point.x):.1f}"
            x, y = (along, across) if self.at.horizontal else (across, along)
            place = f'transform="translate({x} {y})"'
            found.append(f'<path class="mark" {place} d="{marker(index)}"{HOLLOW}{self._data(point)}/>')
        return "".join(found)

    def _notes(self, index: int, series: Series) -> str:
        """Draw crosses at the far edge of the plot, in place of values that could not be measured."""
        found = []
        for point in series.points:
            if not point.note or not self.chart.has_place(point):
                continue
            if self.chart.kind == "lines":
                x, y = self.at.along_place(point.x), self.at.top - 8 - 13 * self.notes_at[point.place]
                self.notes_at[point.place] += 1
            elif self.at.horizontal:
                x, y = self.at.right + 10, self.at.beside(index, point.x)
            else:
                x, y = self.at.beside(index, point.x), self.at.top - 8
            found.append(f'<path class="cross" transform="translate({x:.1f} {y:.1f})" d="{CROSS}"{self._data(point)}/>')
        return "".join(found)

    def _limit(self, limit: Limit) -> str:
        at = self.at.along_value(limit.value)
        path = f"M{at:.1f} {self.at.top:.1f}V{self.at.bottom:.1f}"
        if not self.at.horizontal:
            path = f"M{self.at.left:.1f} {at:.1f}H{self.at.right:.1f}"
        name, said = _in_both("series", limit.text), self._data(Point("–", limit.value))
        return f'<g class="limit"{name}><path{limit_style(limit)} d="{path}"/><path class="mark" d="{path}"{said}/></g>'

    def _values(self) -> str:
        """Write the values of bars at their ends, and the sums of stacked ones."""
        return "".join(
            f'<g class="value{" turned" * self.at.turned}" data-at="{self._exact(value.at)}" '
            f'data-{"sum" if self.chart.kind == "stacked" else "for"}="{value.key}">' + self._value_text(value) + "</g>"
            for value in self.at.bar_values
        )

    def _value_text(self, value: BarValue) -> str:
        at, text = self.at, Text(value.text)
        if at.horizontal:
            x = value.at + 6 if value.up else value.at - 6
            return text_elements(x, value.across + 4.5, text, at.width, anchor="start" if value.up else "end")
        if at.turned:
            y, anchor = (value.at - 5, "start") if value.up else (value.at + 5, "end")
            return text_elements(value.across + 4, y, text, at.width, anchor=anchor, angle=-90)
        y = value.at - 5 if value.up else value.at + 14
        return text_elements(value.across, y, text, at.width, anchor="middle")

    def _names(self) -> str:
        """Write the names of a few points beside their marks, unless another text is in the way."""
        points = [point for _, series in self.chart.shown for point in self._drawn(series) if point.name]
        if len(points) > MOST_NAMES:
            return ""
        taken: list[tuple[float, float, float]] = []
        found = []
        for point in points:
            x, y, width = self.at.along_place(point.x) + 8, self.at.along_value(point.y) - 7, text_width(point.name)
            if x + width > self.at.right:
                x -= width + 16
            free = all(abs(y - other_y) > 14 or x > right or x + width < left for left, right, other_y in taken)
            if free:
                taken.append((x, x + width, y))
                found.append(text_elements(x, y, Text(point.name), self.at.width, kind="muted"))
        return f'<g class="names">{"".join(found)}</g>' if found else ""

    def _events(self) -> str:
        """Draw dotted vertical lines, each with its text at the top unless the previous text is in the way."""
        at, free, found = self.at, -math.inf, []
        for event in sorted(self.chart.events, key=lambda event: event.x):
            if self.chart.kind != "lines" or not self._inside(event):
                continue
            x = at.along_place(event.x)
            width = max(text_width(event.text.in_(language)) for language in LANGUAGES)
            anchor, left = ("end", x - 4 - width) if x + width > at.right else ("start", x + 4)
            label = ""
            if left > free:
                label = text_elements(
                    x + (4 if anchor == "start" else -4), at.top + 11, event.text, at.width, anchor=anchor
                )
                free = left + width + 6
            found.append(f'<path class="event" d="M{x:.1f} {at.top:.1f}V{at.bottom:.1f}"/>{label}')
        return f'<g class="events">{"".join(found)}</g>' if found else ""

    def _inside(self, event: Event) -> bool:
        axis = None if self.at.places is not None else self.at.number_axis
        return axis is not None and axis.low <= event.x <= axis.high

    def _data(self, point: Point) -> str:
        """Return attributes for the tooltip and for screen readers."""
        fields = {"value": "" if point.note else self._value(point)}
        name = f" ({point.name})" if point.name else ""
        label = Text(*(point.label.in_(language) + name for language in LANGUAGES))
        if point.note:
            fields |= {"note": point.note.en, "note-zh": point.note.in_("zh")}
        elif point.std is not None and finite(point.std):
            fields["std"] = precise(point.std, self.chart.digits)
        if point.n is not None:
            fields["n"] = str(point.n)
        return _in_both("label", label) + "".join(f' data-{name}="{escape(value)}"' for name, value in fields.items())

    def _value(self, point: Point) -> str:
        ends = [point.start, point.y] if point.start is not None else [point.y]
        said = " – ".join(precise(end, self.chart.digits) for end in ends)
        if not (interval := self.chart.interval_of(point)):
            return said
        return f"{said} ({' – '.join(precise(end, self.chart.digits) for end in interval)})"


def _in_both(name: str, text: Text) -> str:
    """Return a data attribute, and another one for the Chinese text if it differs."""
    chinese = f' data-{name}-zh="{escape(text.zh)}"' if text.in_("zh") != text.en else ""
    return f' data-{name}="{escape(text.en)}"{chinese}'
