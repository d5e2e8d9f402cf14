"""The layout of a drawing, computed from the top down: axes, positions of bars, total height."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from cs336_systems.report.document import Chart, Point, Series, beyond_text, finite
from cs336_systems.report.web.svg.labels import LINE, line_count, text_width, widest
from cs336_systems.report.web.svg.scales import Axis, linear_axis, log_axis, numbers
from cs336_systems.text import Text

WIDTH = 720
NARROW = 400
"""Width of the drawing for phones, with the same font size."""
PLOT_HEIGHT = 290
NAMES_SHARE = 0.35
"""Maximum share of the width that names beside bars may take."""
WIDER_SHARE = 0.48
"""Maximum share for the names of dots, whose rows are many and whose names are long."""
NAME_LINES = 5
"""Maximum lines of a name below its bars; longer names are rotated."""
TURNED_ROOM = 11
"""Minimum width of a bar whose value stands on it, turned."""
LANE = 18
"""Height of a lane of spans with the gap below it."""


def spread(point: Point) -> float:
    """Return the standard deviation, or 0 where it is unknown."""
    return point.std if point.std is not None and finite(point.std) and point.std > 0 else 0.0


class BarValue(NamedTuple):
    """The text at the end of a bar."""

    text: str
    at: float
    """Position of the bar's end on the axis of values."""
    across: float
    up: bool
    """True if the bar grows from zero towards larger values."""
    key: str
    """Identifies the bar: the index of its series; for stacked bars the number of its place and 1 or -1 (above or below
    zero)."""


class Layout:
    def __init__(self, chart: Chart, legend_height: float, width: int):
        self.chart = chart
        self.width = width
        self.horizontal = chart.sideways
        points = [point for _, series in chart.shown for point in series.points if chart.has_place(point)]
        by_name = chart.kind != "lines" or any(isinstance(point.x, str | Text) for point in points)
        self.places = chart.bar_names if by_name else None
        self.value_axis = self._values(points)
        self.value_labels = numbers(self.value_axis.ticks)
        self.beyond = self._beyond()
        if not by_name:
            values = [float(point.x) for point in points if not isinstance(point.x, Text)]
            self.number_axis = (
                log_axis(values, snap=False) if chart.log_x else linear_axis(values, zero=False, snap=False)
            )
        self._lay_out(points, legend_height)

    # Axes

    def _values(self, points: Sequence[Point]) -> Axis:
        chart = self.chart
        drawn = [point for point in points if chart.can_draw(point)]
        if chart.kind == "stacked":
            values = [part.end for parts in chart.stacks.values() for part in parts]
            marked = (point for _, series in chart.shown if chart.on_bars(series) for point in series.points)
            values += [point.y for point in marked if chart.can_draw(point)]
        elif chart.kind == "spans":
            values = [end for point in drawn for end in (point.start or 0.0, point.y)]
        else:
            values = [end for p in drawn for end in (p.y - spread(p), p.y + spread(p), *(chart.interval_of(p) or ()))]
        if chart.shown_limits:
            farthest = math.inf if chart.cut_at is None else chart.cut_at
            values = [*(min(value, farthest) for value in values), *(limit.value for limit in chart.shown_limits)]
        if chart.log_y:
            # A std close to its mean would extend the axis decades below all values.
            least = min((p.y for p in drawn), default=1.0)
            return log_axis([least, *(max(value, least / 5) for value in values)], snap=True)
        if chart.from_zero:
            values = [*values, 0.0]
        return linear_axis(values or [0.0, 1.0], zero=chart.kind not in ("lines", "dots"), snap=True)

    def _beyond(self) -> dict[str, float]:
        """Return the bars that continue beyond the axis, with their ends."""
        ends: dict[str, float] = {}
        for parts in self.chart.stacks.values() if self.chart.cut_at else ():
            for part in parts:
                ends[part.point.place] = max(part.end, ends.get(part.point.place, part.end))
        slack = 1 + 1e-9  # for rounding errors of the sums
        return {name: end for name, end in ends.items() if end > self.value_axis.high * slack}

    # Positions

    def _lay_out(self, points: Sequence[Point], legend_height: float) -> None:
        chart = self.chart
        above, below = (chart.x, chart.y) if self.horizontal else (chart.y, chart.x)
        self.above, self.below = above, below
        self.above_y = legend_height + LINE
        self.top = self.above_y + LINE * (line_count(above, self.width, 2) - 1) + 18
        if not any(above):
            self.top = legend_height + 12
        stacked_notes = Counter(p.x for p in points if p.note) if chart.kind == "lines" else Counter()
        self.turned = False
        if any(p.note for p in points) and not self.horizontal:
            self.top += 16 + 13 * (max(stacked_notes.values(), default=1) - 1)
        self.right = self.width - 16.0
        if self.horizontal:
            names = self.places or []
            labels = [chart.labels[name] for name in names]
            share = NAMES_SHARE if chart.kind != "dots" else WIDER_SHARE
            room = min(max(map(widest, labels), default=0), share * self.width) + 2
            self.name_room = room
            lines = max(line_count(label, room) for label in labels)
            self.slot = max(lines * LINE, self._thickness()) + (8.0 if chart.kind == "dots" else 12.0)
            self.left = max(room + 12, text_width(self.value_labels[0]) / 2)
            self.right -= text_width(self.value_labels[-1]) / 2 + (14 if any(p.note for p in points) else 0)
            self.right -= max((text_width(text) for text in self._value_texts), default=-8) + 8
            self.bottom = self.top + self.slot * len(names)
            self.below_y = self.bottom + 2 * LINE + 6
        else:
            others = ["0.05"] if len(chart.shown) > 1 else []  # on the axis of what is left when series are hidden
            self.left = max(map(text_width, [*self.value_labels, *others])) + 12.0
            self.top += self._turn_values()
            self.bottom = self.top + PLOT_HEIGHT
            self.names_y = self.bottom + self._room_below_zero()
            self.below_y = self.names_y + self._lay_out_names() + LINE + 6
        self.below_room = min(self.left + self.right, 2 * self.width - self.left - self.right)
        self.height = self.below_y + LINE * (line_count(below, self.below_room, 2) - 1) + 10

    def _thickness(self) -> float:
        """Return height of the bars or lanes beside one name."""
        return {
            "bars": len(self.chart.bars) * 16,
            "dots": len(self.chart.bars) * 16,
            "spans": len(self.chart.lanes) * LANE,
        }.get(self.chart.kind, 24)

    @cached_property
    def _ends(self) -> list[tuple[Point, float, str, float | str | Text, int | None]]:
        """The ends of bars that have their value written: point, end, key, place, series."""
        chart = self.chart
        if chart.kind == "bars":
            return [
                (point, point.y, str(index), point.x, index)
                for index in chart.bars
                for point in chart.series[index].points
                if chart.can_draw(point)
            ]
        if chart.kind != "stacked":
            return []
        sums: dict[tuple[str, bool], tuple[Point, float]] = {}
        for parts in chart.stacks.values():
            for part in parts:
                sums[part.point.place, part.end < 0] = (part.point, part.end)
        ends = [end for _, end in sums.values()]
        if len(ends) > 1 and not self.beyond and max(ends) - min(ends) <= 1e-6 * abs(max(ends)):
            return []  # shares of a whole: 100 on every bar says nothing
        places = chart.bar_names
        return [
            (point, end, f"{places.index(point.place)} {-1 if down else 1}", point.x, None)
            for (_, down), (point, end) in sums.items()
        ]

    @cached_property
    def _value_texts(self) -> list[str]:
        texts = self.chart.texts_of([end for _, end, *_ in self._ends])
        return [
            beyond_text(end) if point.place in self.beyond and end > 0 else text
            for text, (point, end, *_) in zip(texts, self._ends, strict=True)
        ]

    def _turn_values(self) -> float:
        """Decide how the values of upright bars are written; return the room that they need above the bars."""
        texts = self._value_texts
        if not texts or not self.places:
            return 0
        self.slot = (self.right - self.left) / len(self.places)
        widest_text = max(map(text_width, texts))
        self.turned = widest_text > self._bar_thickness()
        return widest_text if self.turned else 14

    def _room_below_zero(self) -> float:
        """Return the room between the plot and the names below it that values of negative bars need."""
        ends = zip(self._value_texts, self._ends, strict=True)
        widths = [text_width(text) for text, (_, end, *_) in ends if end < 0]
        return 0 if not widths else max(widths) + 8 if self.turned else 16

    def _bar_thickness(self) -> float:
        return self.bar_width(len(self.chart.bars) if self.chart.kind == "bars" else 1)

    @property
    def bar_values(self) -> list[BarValue]:
        """The values of bars; none where bars are too thin for text."""
        chart, found = self.chart, []
        if chart.kind not in ("bars", "stacked") or self._bar_thickness() < TURNED_ROOM:
            return []
        for text, (point, end, key, x, index) in zip(self._value_texts, self._ends, strict=True):
            reach = spread(point) if chart.kind == "bars" else 0.0
            far = min(end + reach, self.value_axis.high)
            # Beside a bar that grows to the left its name would be in the way: the value stands on the other side.
            at = self.along_value(max(far, 0.0) if self.horizontal and self.has_zero() else far)
            if end < 0 and not self.horizontal:
                at = self.along_value(end - reach)
            found.append(BarValue(text, at, self.beside(index, x), end >= 0 or self.horizontal, key))
        return found

    def _lay_out_names(self) -> float:
        """Lay out the names below the axis and return their height. Long names are rotated; where there are too many
        names, only every second or third is shown."""
        if self.places is None:
            self.names = numbers(self.number_axis.ticks)
            self.right = min(self.right, self.width - text_width(self.names[-1]) / 2 if self.names else self.width)
            self.rotated = False
            self.stride = _stride([self.along_place(tick) for tick in self.number_axis.ticks], self.names)
            return LINE
        self.names = self.places
        self.slot = (self.right - self.left) / len(self.names)
        labels = [self.chart.labels[name] for name in self.names]
        whole_words = max(text_width(word) for name in self.names for word in [*re.split(r"\s+", name), ""])
        lines = max(line_count(label, self.slot - 8, NAME_LINES + 1) for label in labels)
        self.rotated = whole_words > self.slot - 8 or lines > NAME_LINES
        self.stride = 1
        self.name_room = self.slot - 8
        if not self.rotated:
            return LINE * lines
        self.name_room = 190
        widths = [min(widest(label), self.name_room) * 0.72 for label in labels]
        for index, width in enumerate(widths):
            self.left = max(self.left, width - self.slot * (index + 0.4))
        self.slot = (self.right - self.left) / len(self.names)
        self.stride = math.ceil(24 / self.slot)
        return max(widths) + 14

    @property
    def value_stride(self) -> int:
        """Interval, in ticks, at which numbers are written on the axis of values."""
        ticks = self.value_axis.ticks
        return _stride([self.along_value(tick) for tick in ticks], self.value_labels) if self.horizontal else 1

    # From values to coordinates

    def along_value(self, value: float) -> float:
        share = self.value_axis.share(value)
        if self.horizontal:
            return self.left + share * (self.right - self.left)
        return self.bottom - share * (self.bottom - self.top)

    def along_place(self, x: float | str | Text) -> float:
        """Return the middle of a bar's slot, or the position of a number: inside the ends, so that no marker is cut."""
        if self.places is not None:
            start = self.top if self.horizontal else self.left
            return start + self.slot * (self.places.index(Point(x, 0).place) + 0.5)
        assert not isinstance(x, Text)
        return self.left + 16 + self.number_axis.share(float(x)) * (self.right - self.left - 32)

    @property
    def base(self) -> float:
        """The place of zero, or of the axis's end where it has no zero."""
        return self.along_value(0.0 if self.has_zero() else self.value_axis.low)

    def has_zero(self) -> bool:
        return not self.value_axis.log and self.value_axis.low <= 0 <= self.value_axis.high

    def bar_width(self, count: int) -> float:
        return min(self.slot * 0.82 / max(count, 1), 28 if self.horizontal else 56)

    def beside(self, index: int | None, x: float | str | Text) -> float:
        """Return the middle of a series' bar among the bars of one slot; the middle of the slot if it has none."""
        bars = self.chart.bars
        if index not in bars or self.chart.kind == "stacked" or (self.chart.kind == "dots" and len(bars) <= 2):
            return self.along_place(x)
        return self.along_place(x) + self.bar_width(len(bars)) * (bars.index(index) - (len(bars) - 1) / 2)

    def lane(self, series: Series, x: float | str | Text) -> float:
        lanes = self.chart.lanes
        return self.along_place(x) + LANE * (lanes.index(series.lane) - (len(lanes) - 1) / 2)


def _stride(centres: Sequence[float], texts: Sequence[str]) -> int:
    """Return the smallest stride at which no two texts in a row touch."""
    for stride in range(1, len(centres) + 1):
        kept = list(zip(centres, texts, strict=True))[::stride]
        ends = [(x - text_width(text) / 2, x + text_width(text) / 2) for x, text in kept]
        if all(after[0] - before[1] > 8 for before, after in pairwise(ends)):
            return stride
    return 1
