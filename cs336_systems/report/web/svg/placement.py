"""Where everything in a drawing goes, found from the top down: the axes, the places of bars, how high it all is."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

from cs336_systems.report.document import Chart, Point, Series
from cs336_systems.report.web.svg.labels import LINE, line_count, text_width, wrap
from cs336_systems.report.web.svg.scales import LEAST, Axis, exact, finite, linear_axis, log_axis, numbers

WIDTH = 720
NARROW = 400
"""Of the drawing for a phone: the same letters in half the room."""
PLOT_HEIGHT = 290
NAMES_SHARE = 0.35
"""Of the width, for names beside bars."""
NAME_LINES = 5
"""Of a name below its bars; a longer one is written on a slant."""
LANE = 18
"""A lane of spans and the gap below it."""


# Which points can be drawn


def place_name(x: float | str) -> str:
    return x if isinstance(x, str) else exact(x)


def place_known(chart: Chart, point: Point) -> bool:
    if isinstance(point.x, str) or chart.kind != "lines":
        return isinstance(point.x, str) or finite(point.x)
    return finite(point.x) and (point.x > LEAST or not chart.log_x)


def is_drawn(chart: Chart, point: Point) -> bool:
    """Whether it has a value that stands somewhere on the axis."""
    ends = [point.y] if chart.kind != "spans" else [math.nan if point.start is None else point.start, point.y]
    known = all(finite(end) and (end > LEAST or not chart.log_y) for end in ends)
    return place_known(chart, point) and not point.note and known


def spread(point: Point) -> float:
    return point.std if point.std is not None and finite(point.std) and point.std > 0 else 0.0


Part = tuple[Point, float, float]
"""Of a stacked bar: where it begins and ends."""


class Layout:
    def __init__(self, chart: Chart, series: Sequence[tuple[int, Series]], legend_height: float, width: int):
        self.chart = chart
        self.width = width
        self.series = series
        self.bars = [index for index, one in series if not chart.on_bars(one)]
        """Series that have bars, by their numbers."""
        self.lanes = sorted({one.lane for _, one in series})
        self.horizontal = chart.sideways
        self.limit = chart.limit if chart.limit and self._can_show(chart.limit.value) else None
        self.stacks = self._stacks() if chart.kind == "stacked" else {}
        points = [point for _, one in series for point in one.points if place_known(chart, point)]
        by_name = chart.kind != "lines" or any(isinstance(point.x, str) for point in points)
        self.places = chart.ordered(place_name(point.x) for point in points) if by_name else None
        self.value_axis = self._values(points)
        self.value_labels = numbers(self.value_axis.ticks)
        self.beyond = self._beyond()
        if not by_name:
            values = [float(point.x) for point in points]
            self.number_axis = (
                log_axis(values, snap=False) if chart.log_x else linear_axis(values, zero=False, snap=False)
            )
        self._lay_out(points, legend_height)

    def _can_show(self, value: float) -> bool:
        return finite(value) and (value > LEAST or not self.chart.log_y)

    # Axes

    def _values(self, points: Sequence[Point]) -> Axis:
        chart = self.chart
        drawn = [point for point in points if is_drawn(chart, point)]
        if chart.kind == "stacked":
            values = [end for parts in self.stacks.values() for _, _, end in parts]
            values += [p.y for _, one in self.series if chart.on_bars(one) for p in one.points if is_drawn(chart, p)]
        elif chart.kind == "spans":
            values = [end for point in drawn for end in (point.start or 0.0, point.y)]
        else:
            values = [end for p in drawn for end in (p.y - spread(p), p.y + spread(p))]
        if self.limit:
            farthest = math.inf if chart.cut_at is None else chart.cut_at
            values = [*(min(value, farthest) for value in values), self.limit.value]
        if chart.log_y:
            # A std near its mean would take the axis decades below all values.
            least = min((p.y for p in drawn), default=1.0)
            return log_axis([least, *(max(value, least / 5) for value in values)], snap=True)
        return linear_axis(values or [0.0, 1.0], zero=chart.kind != "lines", snap=True)

    def _beyond(self) -> dict[str, float]:
        """Of bars that do, how far."""
        ends: dict[str, float] = {}
        for parts in self.stacks.values() if self.chart.cut_at else ():
            for point, _, end in parts:
                name = place_name(point.x)
                ends[name] = max(end, ends.get(name, end))
        slack = 1 + 1e-9  # sums are rounded
        return {name: end for name, end in ends.items() if end > self.value_axis.high * slack}

    def _stacks(self) -> dict[int, list[Part]]:
        """Of each series its points with where their part of the bar begins and ends; negative parts go down."""
        ends: defaultdict[tuple[str, bool], float] = defaultdict(float)
        found = {}
        for index, series in self.series:
            parts: list[Part] = []
            for point in series.points if index in self.bars else ():
                if is_drawn(self.chart, point):
                    key = (place_name(point.x), point.y < 0)
                    begin = ends[key]
                    ends[key] += point.y
                    parts.append((point, begin, ends[key]))
            found[index] = parts
        return found

    # Where everything goes

    def _lay_out(self, points: Sequence[Point], legend_height: float) -> None:
        chart = self.chart
        above, below = (chart.x, chart.y) if self.horizontal else (chart.y, chart.x)
        self.above, self.below = above, below
        self.above_y = legend_height + LINE
        self.top = self.above_y + LINE * (line_count(above, self.width, 2) - 1) + 18
        stacked_notes = Counter(p.x for p in points if p.note) if chart.kind == "lines" else Counter()
        if any(p.note for p in points) and not self.horizontal:
            self.top += 16 + 13 * (max(stacked_notes.values(), default=1) - 1)
        self.right = self.width - 16.0
        if self.horizontal:
            names = self.places or []
            room = min(max(map(text_width, names), default=0), NAMES_SHARE * self.width) + 2
            self.name_room = room
            lines = max(len(wrap(name, room)) for name in names)
            self.slot = max(lines * LINE, self._thickness()) + 12.0
            self.left = max(room + 12, text_width(self.value_labels[0]) / 2)
            self.right -= text_width(self.value_labels[-1]) / 2 + (14 if any(p.note for p in points) else 0)
            self.right = min(self.right, self.width - 8 - max(map(text_width, self.beyond_texts().values()), default=0))
            self.bottom = self.top + self.slot * len(names)
            self.below_y = self.bottom + 2 * LINE + 6
        else:
            self.left = max(map(text_width, self.value_labels)) + 12.0
            self.bottom = self.top + PLOT_HEIGHT
            self.below_y = self.bottom + self._lay_out_names() + LINE + 6
        self.below_room = min(self.left + self.right, 2 * self.width - self.left - self.right)
        self.height = self.below_y + LINE * (line_count(below, self.below_room, 2) - 1) + 10

    def _thickness(self) -> float:
        """Of what stands beside one name."""
        return {"bars": len(self.bars) * 16, "spans": len(self.lanes) * LANE}.get(self.chart.kind, 24)

    def beyond_texts(self) -> dict[str, str]:
        return {name: f"→ {end:,.0f}" if end >= 100 else f"→ {end:.3g}" for name, end in self.beyond.items()}

    def _lay_out_names(self) -> float:
        """Of the axis below: beside each other, on a slant where they are long, every second or third where they are
        many. The height they need."""
        if self.places is None:
            self.names = numbers(self.number_axis.ticks)
            self.right = min(self.right, self.width - text_width(self.names[-1]) / 2 if self.names else self.width)
            self.turned = False
            self.stride = self._number_stride()
            return LINE
        self.names = self.places
        self.slot = (self.right - self.left) / len(self.names)
        whole_words = max(text_width(word) for name in self.names for word in [*re.split(r"\s+", name), ""])
        lines = max(len(wrap(name, self.slot - 8, NAME_LINES + 1)) for name in self.names)
        self.turned = whole_words > self.slot - 8 or lines > NAME_LINES
        self.stride = 1
        self.name_room = self.slot - 8
        if not self.turned:
            return LINE * lines
        self.name_room = 190
        widths = [min(text_width(name), self.name_room) * 0.72 for name in self.names]
        for index, width in enumerate(widths):
            self.left = max(self.left, width - self.slot * (index + 0.4))
        self.slot = (self.right - self.left) / len(self.names)
        self.stride = math.ceil(24 / self.slot)
        return max(widths) + 14

    def _number_stride(self) -> int:
        """So that no two numbers touch."""
        centres = [self.along_place(tick) for tick in self.number_axis.ticks]
        for stride in range(1, len(centres) + 1):
            kept = list(zip(centres, self.names, strict=True))[::stride]
            ends = [(x - text_width(name) / 2, x + text_width(name) / 2) for x, name in kept]
            if all(after[0] - before[1] > 8 for before, after in pairwise(ends)):
                return stride
        return 1

    # From values to places

    def along_value(self, value: float) -> float:
        share = self.value_axis.share(value)
        if self.horizontal:
            return self.left + share * (self.right - self.left)
        return self.bottom - share * (self.bottom - self.top)

    def along_place(self, x: float | str) -> float:
        """The middle of a place; of a number its point, a little inside the ends so that no marker is cut."""
        if self.places is not None:
            start = self.top if self.horizontal else self.left
            return start + self.slot * (self.places.index(place_name(x)) + 0.5)
        return self.left + 16 + self.number_axis.share(float(x)) * (self.right - self.left - 32)

    def has_zero(self) -> bool:
        return not self.value_axis.log and self.value_axis.low <= 0 <= self.value_axis.high

    def bar_width(self, count: int) -> float:
        return min(self.slot * 0.82 / max(count, 1), 56)

    def beside(self, index: int | None, x: float | str) -> float:
        """The middle of a series' own bar among those at one place."""
        if index not in self.bars:
            return self.along_place(x)
        width = self.bar_width(len(self.bars))
        return self.along_place(x) + width * (self.bars.index(index) - (len(self.bars) - 1) / 2)

    def lane(self, series: Series, x: float | str) -> float:
        return self.along_place(x) + LANE * (self.lanes.index(series.lane) - (len(self.lanes) - 1) / 2)
