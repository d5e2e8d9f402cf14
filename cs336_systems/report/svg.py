"""A chart as inline SVG for a page: every mark can be pointed at, focused and read out, every text is in two languages.

Colours are not here: series i has the class `s0` to `s11`, and the page says what these look like on light and on dark.
Texts that differ between languages stand twice, with the classes `en` and `zh`. What the page's script needs is in
`data-` attributes: of a mark its series, label, value, std, n and note; of a series and its legend entry an index.
"""

import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from itertools import pairwise

from cs336_systems.report.document import LANGUAGES, Chart, Point, Series, Text

WIDTH = 720
SIZE = 14
"""Of the letters: 11 pixels where a phone shows the chart 560 wide."""
LINE = 18
PLOT_HEIGHT = 290
NAME_LINES = 5
"""Of a name below its bars; a longer one is written on a slant."""
DENSE = 60
"""Points of a line from which on its markers are small."""
MOST_MARKS = 400
"""Of a line to be pointed at; one with more is drawn through all of its points."""
LEAST = 1e-150
"""Nothing measured is as small, or one over it as large, and no quotient of two numbers between overflows."""
COLORS = 12
"""How many classes the page defines; the next series starts over, with another marker or pattern."""
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
"""Of bars, drawn over the colour in 8 by 8: none, two slants, lines, dots."""
EMPTY = Text("no data", "没有数据")
KINDS = {
    "lines": Text("Line chart", "折线图"),
    "bars": Text("Bar chart", "条形图"),
    "stacked": Text("Stacked bar chart", "堆叠条形图"),
}


def svg(chart: Chart) -> str:
    """One `<svg>` element; the title is only its accessible name, to be shown by the page."""
    shown = [
        (index, series)
        for index, series in enumerate(chart.series)
        if any(_drawn(chart, point) or (point.note and _place_known(chart, point)) for point in series.points)
    ]
    if not shown:
        return _element(chart, 90, _words(WIDTH / 2, 50, EMPTY, WIDTH, anchor="middle", kind="muted"))
    return _Drawing(chart, shown).draw()


def _element(chart: Chart, height: float, inside: str) -> str:
    names = Text(*(_accessible_name(chart, language) for language in LANGUAGES))
    axes = "".join(
        f' data-{axis}-{language}="{escape(text.in_(language))}"'
        for axis, text in (("x", chart.x), ("y", chart.y))
        for language in LANGUAGES
    )
    return (
        f'<svg class="chart {chart.kind}" viewBox="0 0 {WIDTH} {height:.0f}" width="100%" font-size="{SIZE}" '
        f'role="img"{_aria(names)}{axes}{" data-horizontal" if chart.horizontal else ""}>{inside}</svg>'
    )


def _accessible_name(chart: Chart, language: str) -> str:
    def said(text: Text) -> str:
        return text.in_("zh" if language == "zh" else "en")

    names = [said(series.name) for series in chart.series if said(series.name)]
    if language == "zh":
        return f"{said(chart.title)}。{said(KINDS[chart.kind])}:{said(chart.x)} → {said(chart.y)}。" + "、".join(names)
    return f"{said(chart.title)}. {said(KINDS[chart.kind])} of {said(chart.y)} by {said(chart.x)}: " + ", ".join(names)


def _aria(names: Text) -> str:
    """The accessible name; where the languages differ the page's script puts the right one in its place."""
    both = "".join(f' data-aria-{language}="{escape(names.in_(language))}"' for language in LANGUAGES)
    return f' aria-label="{escape(names.en)}"' + (both if names.in_("zh") != names.en else "")


# Which points can be drawn


def _finite(value: float) -> bool:
    return math.isfinite(value) and abs(value) < 1 / LEAST


def _place_known(chart: Chart, point: Point) -> bool:
    if isinstance(point.x, str) or chart.kind != "lines":
        return isinstance(point.x, str) or _finite(point.x)
    return _finite(point.x) and (point.x > LEAST or not chart.log_x)


def _drawn(chart: Chart, point: Point) -> bool:
    """Whether it has a value that stands somewhere on the axis."""
    return _place_known(chart, point) and not point.note and _finite(point.y) and (point.y > LEAST or not chart.log_y)


def _spread(point: Point) -> float:
    return point.std if point.std is not None and _finite(point.std) and point.std > 0 else 0.0


# Numbers and axes


def number(value: float, digits: int = 3) -> str:
    """As short as an axis wants it: 0.1, 20, 1k, 1024, 10M."""
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if 1e3 <= size < 1e6 and float(f"{value:.3g}") != value:
        return f"{value:.6g}"
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= scale:
            return f"{float(f'{value / scale:.{digits}g}'):g}{letter}"
    return f"{float(f'{value:.{digits}g}'):g}"


def _exact(value: float) -> str:
    """Six digits, without an exponent unless it is far from one."""
    text = f"{value:.6g}"
    return f"{value:.0f}" if "e+" in text and abs(value) < 1e15 else text


def _numbers(values: Sequence[float]) -> list[str]:
    """Of ticks: with so many digits that no two look the same."""
    for digits in range(3, 12):
        texts = [number(value, digits) for value in values]
        if len(set(texts)) == len(texts):
            break
    return texts


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    log: bool
    ticks: Sequence[float]

    def share(self, value: float) -> float:
        """How far along: 0 at the low end, 1 at the high one."""
        if not self.log:
            return (value - self.low) / (self.high - self.low)
        value = min(max(value, self.low), self.high)
        return math.log(value / self.low) / math.log(self.high / self.low)


def _linear_axis(values: Sequence[float], *, zero: bool, snap: bool) -> _Axis:
    """From zero where that is near enough to the values, or asked for; snapped outward to ticks if asked for."""
    low, high = min(values), max(values)
    if zero or (snap and 0 <= low <= 0.6 * high):
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(low), abs(high), LEAST):
        margin = abs(high) / 10 if abs(high) > LEAST else 0.5
        low, high = (low - margin, high + margin) if high or not snap else (0.0, 1.0)
    step = _step((high - low) / (5 if snap else 7))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if snap:
        low, high = first * step, last * step
    ticks = [float(f"{k * step:.12g}") for k in range(first, last + 1)]
    slack = (high - low) * 1e-9
    return _Axis(low, high, False, [tick for tick in ticks if low - slack <= tick <= high + slack])


def _step(about: float) -> float:
    power = float(f"1e{math.floor(math.log10(about))}")
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= about * 0.999)


def _log_axis(values: Sequence[float], *, snap: bool) -> _Axis:
    low, high = min(values), max(values)
    if high / low < 1 + 1e-9:
        low, high = low / 3, high * 3
    if all(math.log2(value).is_integer() and value >= 1 for value in values) and not snap:
        powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
        return _Axis(low, high, True, [2.0**power for power in powers])
    decades = math.log10(high / low)
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    marks = [float(f"{m}e{e}") for e in exponents for m in ((1, 2, 5) if decades <= 2.5 else (1,))]
    if snap:
        low = max(mark for mark in marks if mark <= low * (1 + 1e-9))
        high = min(mark for mark in marks if mark >= high * (1 - 1e-9))
    ticks = [mark for mark in marks if low * (1 - 1e-9) <= mark <= high * (1 + 1e-9)]
    if len(ticks) < 2:
        ticks = [tick for tick in _linear_axis([low, high], zero=False, snap=False).ticks if tick > 0]
    return _Axis(low, high, True, ticks[:: math.ceil(len(ticks) / 9)])


# Texts and how wide they are


@lru_cache(maxsize=4096)
def text_width(text: str, size: float = SIZE) -> float:
    """An estimate, on the large side, as nobody knows the reader's fonts; a Chinese character is as wide as two."""
    return size * sum(map(_character_width, text))


def _character_width(char: str) -> float:
    if unicodedata.east_asian_width(char) in "WF":
        return 1.03
    if unicodedata.combining(char):
        return 0.0
    if char in "iljtfrI.,:;'|!()[] ":
        return 0.4
    return 0.97 if char in "mwMW@%—" else 0.72 if char.isupper() else 0.63


def _wrap(text: str, room: float, most: int = 4) -> list[str]:
    """Lines no wider than `room`, broken at spaces, after signs and between Chinese characters, inside a word only if
    it alone is too wide; cut with an ellipsis after `most`."""
    if most == 1:
        return [_cut(text, room)]
    lines, line = [], ""
    for token in re.findall(r"[⺀-￯]|[^\s⺀-￯_/:,<>-]*[_/:,<>-]+|[^\s⺀-￯_/:,<>-]+|\s+", text):
        if text_width(line + token.rstrip()) > room:
            lines.append(line)
            line = ""
        line += token if line.strip() or not token.isspace() else ""
        while text_width(line.rstrip()) > room and len(line) > 1:
            cut = max(1, next((i for i in range(1, len(line)) if text_width(line[: i + 1]) > room), len(line)))
            lines.append(line[:cut])
            line = line[cut:]
    lines = [kept for kept in (one.strip() for one in [*lines, line]) if kept] or [""]
    return lines if len(lines) <= most else [*lines[: most - 1], _cut(lines[most - 1] + "…", room)]


def _cut(text: str, room: float) -> str:
    if text_width(text) <= room:
        return text
    text = text.removesuffix("…")
    while text and text_width(text + "…") > room:
        text = text[:-1]
    return text.rstrip() + "…"


def _lines(text: Text, room: float, most: int = 4) -> int:
    return max(len(_wrap(text.in_(language), room, most)) for language in LANGUAGES)


def _widest(text: Text) -> float:
    return max(text_width(text.in_(language)) for language in LANGUAGES)


def _words(
    x: float, y: float, text: Text, room: float, *, anchor: str = "start", kind: str = "", most: int = 4, turn: int = 0
) -> str:
    """A text, its first line's baseline at `y`; once, or once for each language."""
    same = text.in_("zh") == text.en
    found = []
    for language in ("en",) if same else LANGUAGES:
        whole = text.in_(language)
        lines = _wrap(whole, room, most)
        classes = " ".join(filter(None, (kind, "" if same else language)))
        spans = escape(lines[0]) + "".join(f'<tspan x="{x:.1f}" dy="{LINE}">{escape(t)}</tspan>' for t in lines[1:])
        cut = f"<title>{escape(whole)}</title>" if lines[-1].endswith("…") else ""
        found.append(
            f'<text x="{x:.1f}" y="{y:.1f}"'
            + (f' class="{classes}"' if classes else "")
            + (f' text-anchor="{anchor}"' if anchor != "start" else "")
            + (f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else "")
            + f">{cut}{spans}</text>"
        )
    return "".join(found)


class _Drawing:
    """The places of all parts, found from the top down, and the parts drawn there."""

    def __init__(self, chart: Chart, series: Sequence[tuple[int, Series]]):
        self.chart = chart
        self.series = series
        self.horizontal = chart.horizontal and chart.kind != "lines"
        points = [point for _, one in series for point in one.points if _place_known(chart, point)]
        by_name = chart.kind != "lines" or any(isinstance(point.x, str) for point in points)
        self.places = list(dict.fromkeys(_place_name(p) for p in points)) if by_name else None
        self.value_axis = self._values(points)
        self.value_labels = _numbers(self.value_axis.ticks)
        if not by_name:
            numbers = [float(point.x) for point in points]
            self.number_axis = (
                _log_axis(numbers, snap=False) if chart.log_x else _linear_axis(numbers, zero=False, snap=False)
            )
        self._lay_out(points)

    def _values(self, points: Sequence[Point]) -> _Axis:
        drawn = [point for point in points if _drawn(self.chart, point)]
        if self.chart.kind == "stacked":
            values = [end for _, part in self._stacks() for _, _, end in part]
        else:
            values = [end for p in drawn for end in (p.y - _spread(p), p.y + _spread(p))]
        if self.chart.log_y:
            # A std near its mean would take the axis decades below all values.
            least = min((p.y for p in drawn), default=1.0)
            return _log_axis([least, *(max(value, least / 5) for value in values)], snap=True)
        return _linear_axis(values or [0.0, 1.0], zero=self.chart.kind != "lines", snap=True)

    def _stacks(self) -> list[tuple[int, list[tuple[Point, float, float]]]]:
        """Of each series its points with where their part of the bar begins and ends; negative parts go down."""
        ends: defaultdict[tuple[str, bool], float] = defaultdict(float)
        found = []
        for index, series in self.series:
            parts = []
            for point in series.points:
                if _drawn(self.chart, point):
                    key = (_place_name(point), point.y < 0)
                    begin = ends[key]
                    ends[key] += point.y
                    parts.append((point, begin, ends[key]))
            found.append((index, parts))
        return found

    # Where everything goes

    def _lay_out(self, points: Sequence[Point]) -> None:
        chart = self.chart
        self.legend, legend_height = self._legend()
        above, below = (chart.x, chart.y) if self.horizontal else (chart.y, chart.x)
        self.above, self.below = above, below
        self.above_y = legend_height + LINE
        self.top = self.above_y + LINE * (_lines(above, WIDTH, 2) - 1) + 18
        stacked_notes = Counter(p.x for p in points if p.note) if chart.kind == "lines" else Counter()
        if any(p.note for p in points) and not self.horizontal:
            self.top += 16 + 13 * (max(stacked_notes.values(), default=1) - 1)
        self.right = WIDTH - 16.0
        if self.horizontal:
            names = self.places or []
            room = min(max(map(text_width, names), default=0), 250) + 2
            self.name_room = room
            lines = max(len(_wrap(name, room)) for name in names)
            bars = len(self.series) * 16 if chart.kind == "bars" else 24
            self.slot = max(lines * LINE, bars) + 12.0
            self.left = max(room + 12, text_width(self.value_labels[0]) / 2)
            self.right -= text_width(self.value_labels[-1]) / 2 + (14 if any(p.note for p in points) else 0)
            self.bottom = self.top + self.slot * len(names)
            self.below_y = self.bottom + 2 * LINE + 6
        else:
            self.left = max(map(text_width, self.value_labels)) + 12.0
            self.bottom = self.top + PLOT_HEIGHT
            self.below_y = self.bottom + self._lay_out_names() + LINE + 6
        self.height = self.below_y + LINE * (_lines(below, WIDTH, 2) - 1) + 10

    def _lay_out_names(self) -> float:
        """Of the axis below: beside each other, on a slant where they are long, every second or third where they are
        many. The height they need."""
        if self.places is None:
            self.names = _numbers(self.number_axis.ticks)
            self.right = min(self.right, WIDTH - text_width(self.names[-1]) / 2 if self.names else WIDTH)
            self.turned = False
            self.stride = self._number_stride()
            return LINE
        self.names = self.places
        self.slot = (self.right - self.left) / len(self.names)
        whole_words = max(text_width(word) for name in self.names for word in [*re.split(r"\s+", name), ""])
        lines = max(len(_wrap(name, self.slot - 8, NAME_LINES + 1)) for name in self.names)
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

    def along_value(self, value: float) -> float:
        share = self.value_axis.share(value)
        if self.horizontal:
            return self.left + share * (self.right - self.left)
        return self.bottom - share * (self.bottom - self.top)

    def along_place(self, x: float | str) -> float:
        """The middle of a place; of a number its point, a little inside the ends so that no marker is cut."""
        if self.places is not None:
            start = self.top if self.horizontal else self.left
            return start + self.slot * (self.places.index(_name(x)) + 0.5)
        return self.left + 16 + self.number_axis.share(float(x)) * (self.right - self.left - 32)

    def _legend(self) -> tuple[str, float]:
        """The entries from left to right in rows, each a button for the page's script, and the height of all."""
        found, x, y, tallest = [], 0.0, 0.0, 0
        for index, series in self.series:
            if not any(series.name):
                continue
            room = min(_widest(series.name), WIDTH - 44) + 1
            lines = _lines(series.name, room)
            width = 34 + room + 14
            if x and x + width > WIDTH + 14:
                x, y, tallest = 0.0, y + tallest * LINE + 8, 0
            tallest = max(tallest, lines)
            found.append(
                f'<g class="entry s{index % COLORS}" role="button" tabindex="0" aria-pressed="true" '
                f'data-toggle="{index}"{_aria(series.name)}>'
                f'<rect class="hit" x="{x:.1f}" y="{y:.1f}" width="{width - 8:.1f}" height="{lines * LINE + 4}"/>'
                f"{self._swatch(index, series, x + 3, y + LINE / 2 + 2)}"
                f"{_words(x + 34, y + LINE - 3, series.name, room)}</g>"
            )
            x += width
        return "".join(found), y + tallest * LINE + (8 if found else 0)

    def _swatch(self, index: int, series: Series, x: float, y: float) -> str:
        if self.chart.kind == "lines":
            line = f'<path class="line{" dashed" if series.dashed else ""}" d="M{x:.1f} {y:.1f}h26"/>'
            return line + f'<path class="mark" transform="translate({x + 13:.1f} {y:.1f})" d="{_marker(index)}"/>'
        return f'<rect x="{x + 4:.1f}" y="{y - 7:.1f}" width="20" height="14"{self._fill(index, series)}/>'

    # What is drawn there

    def draw(self) -> str:
        draw = {"lines": self._line, "bars": self._bars, "stacked": self._stacked}[self.chart.kind]
        parts = [self._patterns(), self.legend, self._axes()]
        self.notes_at: Counter[float | str] = Counter()
        for order, (index, series) in enumerate(self.series):
            marks = draw(order, index, series) + self._notes(order, series)
            parts.append(f'<g class="series s{index % COLORS}" data-index="{index}">{marks}</g>')
        return _element(self.chart, self.height, "".join(parts))

    def _axes(self) -> str:
        grid, texts = [], []
        for tick, label in zip(self.value_axis.ticks, self.value_labels, strict=True):
            at = self.along_value(tick)
            if self.horizontal:
                grid.append(f"M{at:.1f} {self.top:.1f}V{self.bottom:.1f}")
                texts.append(_words(at, self.bottom + LINE, Text(label), WIDTH, anchor="middle", kind="muted"))
            else:
                grid.append(f"M{self.left:.1f} {at:.1f}H{self.right:.1f}")
                texts.append(_words(self.left - 8, at + 5, Text(label), WIDTH, anchor="end", kind="muted"))
        texts.append(_words(0, self.above_y, self.above, WIDTH, most=2))
        middle = (self.left + self.right) / 2
        room = 2 * min(middle, WIDTH - middle)
        texts.append(_words(middle, self.below_y, self.below, room, anchor="middle", most=2))
        base = f"M{self.left:.1f} {self.top:.1f}V{self.bottom:.1f}"
        if not self.horizontal:
            zero = self.along_value(0) if self._has_zero() else self.bottom
            base = f"M{self.left:.1f} {zero:.1f}H{self.right:.1f}"
        elif self._has_zero():
            base = f"M{self.along_value(0):.1f} {self.top:.1f}V{self.bottom:.1f}"
        lines = f'<path class="grid" d="{"".join(grid)}"/><path class="axis" d="{base}{self._tick_marks()}"/>'
        return lines + "".join(texts) + self._names()

    def _has_zero(self) -> bool:
        return not self.value_axis.log and self.value_axis.low <= 0 <= self.value_axis.high

    def _tick_marks(self) -> str:
        if self.places is not None:
            return ""
        ticks = self.number_axis.ticks[:: self.stride]
        return "".join(f"M{self.along_place(tick):.1f} {self.bottom:.1f}v5" for tick in ticks)

    def _names(self) -> str:
        found = []
        if self.horizontal:
            for name in self.places or []:
                lines = len(_wrap(name, self.name_room))
                y = self.along_place(name) + 5 - (lines - 1) * LINE / 2
                found.append(_words(self.left - 10, y, Text(name), self.name_room, anchor="end"))
        elif self.places is None:
            for tick, name in list(zip(self.number_axis.ticks, self.names, strict=True))[:: self.stride]:
                y = self.bottom + LINE + 2
                found.append(_words(self.along_place(tick), y, Text(name), WIDTH, anchor="middle", kind="muted"))
        else:
            y = self.bottom + (LINE if not self.turned else 14)
            for name in self.names[:: self.stride]:
                middle = self.along_place(name) + (4 if self.turned else 0)
                anchor, turn, most = ("end", -45, 1) if self.turned else ("middle", 0, NAME_LINES)
                found.append(_words(middle, y, Text(name), self.name_room, anchor=anchor, turn=turn, most=most))
        return "".join(found)

    def _patterns(self) -> str:
        """Bars have no markers: what tells them apart besides their colour is hatched over it."""
        if self.chart.kind == "lines":
            return ""
        found = [
            f'<pattern id="{self._pattern(index)}" class="s{index % COLORS}" width="8" height="8" '
            f'patternUnits="userSpaceOnUse"><rect class="fill" width="8" height="8"/>'
            f'<path class="hatch" d="{HATCHES[index % len(HATCHES)]}"/></pattern>'
            for index, series in self.series
            if not series.dashed and HATCHES[index % len(HATCHES)]
        ]
        return f"<defs>{''.join(found)}</defs>" if found else ""

    def _pattern(self, index: int) -> str:
        return f"hatch-{re.sub(r'[^A-Za-z0-9_-]', '', self.chart.name)}-{index}"

    def _fill(self, index: int, series: Series) -> str:
        if series.dashed:
            return ' class="hollow"'
        hatched = HATCHES[index % len(HATCHES)]
        return f' class="bar" fill="url(#{self._pattern(index)})"' if hatched else ' class="bar fill"'

    def _line(self, order: int, index: int, series: Series) -> str:
        points = [point for point in series.points if _place_known(self.chart, point)]
        points.sort(key=lambda point: self.along_place(point.x))
        path, errors, marks, joined = [], [], [], False
        every = math.ceil(len(points) / MOST_MARKS)
        small = " scale(.4)" if len(points) > DENSE else ""
        for place, point in enumerate(points):
            if not _drawn(self.chart, point):
                joined = False  # a gap says that something was left out
                continue
            x, y = self.along_place(point.x), self.along_value(point.y)
            path.append(f"{'L' if joined else 'M'}{x:.1f} {y:.1f}")
            joined = True
            if place % every:
                continue
            errors.append(self._error(point, x))
            marks.append(
                f'<path class="mark" transform="translate({x:.1f} {y:.1f}){small}" d="{_marker(index)}"'
                f"{_data(series, point)}/>"
            )
        kind = "line dashed" if series.dashed else "line"
        error = "".join(errors)
        return (
            (f'<path class="{kind}" d="{"".join(path)}"/>' if path else "")
            + (f'<path class="error" d="{error}"/>' if error else "")
            + "".join(marks)
        )

    def _error(self, point: Point, across: float, reach: float = 4) -> str:
        """A path from the value less its std to the value plus it, across the bar's or the marker's middle."""
        if not _spread(point):
            return ""
        low = self.along_value(point.y - _spread(point))
        high = self.along_value(point.y + _spread(point))
        if self.horizontal:
            ends = "".join(f"M{at:.1f} {across - reach:.1f}v{2 * reach:.1f}" for at in (low, high))
            return f"M{low:.1f} {across:.1f}H{high:.1f}{ends}"
        ends = "".join(f"M{across - reach:.1f} {at:.1f}h{2 * reach:.1f}" for at in (low, high))
        return f"M{across:.1f} {low:.1f}V{high:.1f}{ends}"

    def _bar_width(self, count: int) -> float:
        return min(self.slot * 0.82 / count, 56)

    def _beside(self, order: int, point: Point) -> float:
        """The middle of a series' own bar among those at one place."""
        width = self._bar_width(len(self.series))
        return self.along_place(point.x) + width * (order - (len(self.series) - 1) / 2)

    def _bars(self, order: int, index: int, series: Series) -> str:
        width = self._bar_width(len(self.series))
        base = self.along_value(0) if self._has_zero() else self.along_value(self.value_axis.low)
        bars, errors = [], []
        for point in series.points:
            if _drawn(self.chart, point):
                middle = self._beside(order, point)
                bars.append(self._bar(index, series, point, middle, width - 1, base, self.along_value(point.y)))
                errors.append(self._error(point, middle, min(4, width / 3)))
        error = "".join(errors)
        return "".join(bars) + (f'<path class="error over" d="{error}"/>' if error else "")

    def _stacked(self, order: int, index: int, series: Series) -> str:
        width = self._bar_width(1)
        own = dict(self._stacks())[index]
        start = self.value_axis.low if self.value_axis.log else 0.0
        return "".join(
            self._bar(
                index,
                series,
                point,
                self.along_place(point.x),
                width,
                self.along_value(max(begin, start) if self.value_axis.log else begin),
                self.along_value(end),
            )
            for point, begin, end in own
            if begin != end
        )

    def _bar(
        self, index: int, series: Series, point: Point, middle: float, width: float, begin: float, end: float
    ) -> str:
        length = max(abs(end - begin), 1.5)  # a value of zero is a thin line
        near = min(begin, end) if abs(end - begin) >= 1.5 or self.horizontal else min(begin, end) - 1.5
        width = max(width, 1.0)
        box = (near, middle - width / 2, length, width)
        x, y, across, down = box if self.horizontal else (box[1], box[0], box[3], box[2])
        place = (self.places or []).index(_place_name(point))
        way = 1 if (end - begin) * (1 if self.horizontal else -1) >= 0 else -1
        stacked = f' data-place="{place}" data-way="{way}"' if self.chart.kind == "stacked" else ""
        return (
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{across:.1f}" height="{down:.1f}"{self._fill(index, series)}'
            f"{stacked}{_data(series, point)}/>"
        )

    def _notes(self, order: int, series: Series) -> str:
        """Crosses at the far edge, where values too large to have been measured would be."""
        found = []
        for point in series.points:
            if not point.note or not _place_known(self.chart, point):
                continue
            if self.chart.kind == "lines":
                x, y = self.along_place(point.x), self.top - 8 - 13 * self.notes_at[point.x]
                self.notes_at[point.x] += 1
            elif self.horizontal:
                x, y = self.right + 10, self._beside(order, point)
            else:
                x, y = self._beside(order, point), self.top - 8
            found.append(
                f'<path class="cross" transform="translate({x:.1f} {y:.1f})" d="{CROSS}"{_data(series, point)}/>'
            )
        return "".join(found)


def _name(x: float | str) -> str:
    return x if isinstance(x, str) else _exact(x)


def _place_name(point: Point) -> str:
    return _name(point.x)


def _marker(index: int) -> str:
    return MARKERS[index % len(MARKERS)]


def _data(series: Series, point: Point) -> str:
    """What the tooltip shows and a screen reader says."""
    fields = {"series": series.name.en, "label": _name(point.x), "value": "" if point.note else _exact(point.y)}
    if series.name.in_("zh") != series.name.en:
        fields["series-zh"] = series.name.zh
    if point.note:
        fields |= {"note": point.note.en, "note-zh": point.note.in_("zh")}
    elif point.std is not None and _finite(point.std):
        fields["std"] = _exact(point.std)
    if point.n is not None:
        fields["n"] = str(point.n)
    said = Text(*(_said(series.name.in_(language), fields, point.note, language) for language in LANGUAGES))
    attributes = "".join(f' data-{name}="{escape(value)}"' for name, value in fields.items())
    return f'{attributes} tabindex="0" role="img"{_aria(said)}'


def _said(name: str, fields: dict[str, str], note: Text | None, language: str) -> str:
    value = note.in_("zh" if language == "zh" else "en") if note else fields["value"]
    std = f" ± {fields['std']}" if "std" in fields else ""
    n = f", n = {fields['n']}" if "n" in fields else ""
    return f"{name}, {fields['label']}: {value}{std}{n}"
