"""A chart as inline SVG for a page: every mark has a tooltip and takes the focus, every text is in both languages.

Colours belong to page.css: series have the classes `s0` to `s11`. A text that differs between the languages appears
twice, with the classes `en` and `zh`. The page's script reads `data-` attributes: label, value, std, n and note of a
mark, name and index of a series, the axis of values. It makes marks and legend entries reachable by keyboard.
"""

import re
from html import escape

from cs336_systems.report.document import Chart, Limit, Series
from cs336_systems.report.web.svg.labels import LINE, SIZE, aria, line_count, text_elements, widest
from cs336_systems.report.web.svg.marks import CROSS, Marks, limit_style, patterns, swatch
from cs336_systems.report.web.svg.placement import NAME_LINES, NARROW, WIDTH, Layout
from cs336_systems.text import LANGUAGES, Language, Text

EMPTY = Text("no data", "没有数据")
COORDINATES = re.compile(r' (?:x|y|width|height|d)="[^"]*"')
KINDS = {
    "lines": Text("Line chart", "折线图"),
    "bars": Text("Bar chart", "条形图"),
    "stacked": Text("Stacked bar chart", "堆叠条形图"),
    "spans": Text("Spans", "时间段图"),
    "dots": Text("Dot plot", "点图"),
}


def svg(chart: Chart, width: int = WIDTH) -> str:
    """Return one `<svg>` element; the title is its accessible name, and the page shows it as a caption."""
    if not chart.shown:
        return _element(chart, width, 90, text_elements(width / 2, 50, EMPTY, width, anchor="middle", kind="muted"))
    legend, height = _legend(chart, width)
    layout = Layout(chart, height, width)
    parts = [patterns(layout), legend, _axes(layout), Marks(layout).draw()]
    return _element(chart, width, layout.height, "".join(parts), _scale(layout))


def _element(chart: Chart, width: int, height: float, inside: str, scale: str = "") -> str:
    names = Text(*(_accessible_name(chart, language) for language in LANGUAGES))
    axes = "".join(
        f' data-{axis}-{language}="{escape(text.in_(language))}"'
        for axis, text in (("x", chart.x), ("y", chart.y))
        for language in LANGUAGES
    )
    kind = f"{chart.kind} narrow" if width == NARROW else chart.kind
    inside = COORDINATES.sub(lambda found: re.sub(r"\.0(?!\d)", "", found.group()), inside)  # a page has thousands
    return (
        f'<svg class="chart {kind}" viewBox="0 0 {width} {height:.0f}" width="100%" font-size="{SIZE}" '
        f'role="img"{aria(names)}{axes}{" data-horizontal" if chart.sideways else ""}{scale}>{inside}</svg>'
    )


def _scale(at: Layout) -> str:
    """Return the axis of values for the script, which rescales it when series are hidden: its range and where it is
    drawn."""
    axis = at.value_axis
    keeps_zero = at.chart.from_zero or at.chart.kind not in ("lines", "dots")
    numbers = (axis.low, axis.high, at.along_value(axis.low), at.along_value(axis.high))
    return f' data-scale="{" ".join(f"{number:.12g}" for number in numbers)} {int(axis.log)} {int(keeps_zero)}"'


def _accessible_name(chart: Chart, language: Language) -> str:
    texts = [*(series.name for series in chart.series), *(limit.text for limit in chart.limits)]
    names = [text.in_(language) for text in texts if text.in_(language)]
    title, kind, x, y = (text.in_(language) for text in (chart.title, KINDS[chart.kind], chart.x, chart.y))
    if language == "zh":
        return f"{title}。{kind}:{x} → {y}。" + "、".join(names)
    return f"{title}. {kind} of {y} by {x}: " + ", ".join(names)


def _legend(chart: Chart, width: int) -> tuple[str, float]:
    """Return the legend and its height. Its entries are in rows, each a button for the page's script."""
    if not chart.has_legend:
        return "", 0.0
    found, x, y, tallest = [], 0.0, 0.0, 0
    named = [(index, series) for index, series in chart.shown if any(series.name)]
    entries: list[tuple[int, Series | Limit | None, Text]] = [(i, one, one.name) for i, one in named if len(named) > 1]
    entries += [(0, limit, limit.text) for limit in chart.limits]  # no series, and cannot be hidden
    entries += [(0, None, note) for note in chart.notes]
    for index, series, text in entries:
        room = min(widest(text), width - 44) + 1
        lines = line_count(text, room)
        taken = 34 + room + 14
        if x and x + taken > width + 14:
            x, y, tallest = 0.0, y + tallest * LINE + 8, 0
        tallest = max(tallest, lines)
        middle, label = y + LINE / 2 + 2, text_elements(x + 34, y + LINE - 3, text, room)
        if series is None:
            cross = f'<path class="cross s6" transform="translate({x + 16:.1f} {middle:.1f})" d="{CROSS}"/>'
            found.append(f"{cross}{label}")
        elif isinstance(series, Limit):
            found.append(f'<path{limit_style(series)} d="M{x + 3:.1f} {middle:.1f}h26"/>{label}')
        else:
            found.append(
                f'<g class="entry s{chart.color_of(index)}" data-toggle="{index}">'
                f'<rect class="hit" x="{x:.1f}" y="{y:.1f}" width="{taken - 8:.1f}" height="{lines * LINE + 4}"/>'
                f"{swatch(chart, index, series, x + 3, middle, width)}{label}</g>"
            )
        x += taken
    return "".join(found), y + tallest * LINE + (8 if found else 0)


def _axes(at: Layout) -> str:
    grid, ticks, texts = [], [], []
    for number, (tick, whole) in enumerate(zip(at.value_axis.ticks, at.value_labels, strict=True)):
        place, label = at.along_value(tick), whole if number % at.value_stride == 0 else ""
        if at.horizontal:
            grid.append(f"M{place:.1f} {at.top:.1f}V{at.bottom:.1f}")
            ticks.append(text_elements(place, at.bottom + LINE, Text(label), at.width))
        else:
            grid.append(f"M{at.left:.1f} {place:.1f}H{at.right:.1f}")
            ticks.append(text_elements(at.left - 8, place + 5, Text(label), at.width))
    texts.append(text_elements(0, at.above_y, at.above, at.width, most=2))
    middle = (at.left + at.right) / 2
    texts.append(text_elements(middle, at.below_y, at.below, at.below_room, anchor="middle", most=2))
    base = f"M{at.left:.1f} {at.top:.1f}V{at.bottom:.1f}"
    if not at.horizontal:
        zero = at.along_value(0) if at.has_zero() else at.bottom
        base = f"M{at.left:.1f} {zero:.1f}H{at.right:.1f}"
    elif at.has_zero():
        base = f"M{at.along_value(0):.1f} {at.top:.1f}V{at.bottom:.1f}"
    marks = _tick_marks(at)
    lines = f'<path class="grid" d="{"".join(grid)}"/><path class="axis base" d="{base}"/>'
    lines += f'<path class="axis" d="{marks}"/>' if marks else ""
    anchor = "middle" if at.horizontal else "end"
    labels = f'<g class="ticks muted" text-anchor="{anchor}">{"".join(ticks)}</g>'
    return f"{lines}{labels}{''.join(texts)}{_names(at)}"


def _tick_marks(at: Layout) -> str:
    if at.places is not None:
        return ""
    return "".join(f"M{at.along_place(tick):.1f} {at.bottom:.1f}v5" for tick in at.number_axis.ticks[:: at.stride])


def _names(at: Layout) -> str:
    found = []
    if at.horizontal:
        for name in at.places or []:
            label = at.chart.labels[name]
            y = at.along_place(name) + 5 - (line_count(label, at.name_room) - 1) * LINE / 2
            found.append(text_elements(at.left - 10, y, label, at.name_room, anchor="end"))
    elif at.places is None:
        for tick, name in list(zip(at.number_axis.ticks, at.names, strict=True))[:: at.stride]:
            y = at.bottom + LINE + 2
            found.append(text_elements(at.along_place(tick), y, Text(name), at.width))
        return f'<g class="muted" text-anchor="middle">{"".join(found)}</g>'
    else:
        y = at.names_y + (LINE if not at.rotated else 14)
        for name in at.names[:: at.stride]:
            middle = at.along_place(name) + (4 if at.rotated else 0)
            anchor, angle, most = ("end", -45, 1) if at.rotated else ("middle", 0, NAME_LINES)
            label = at.chart.labels[name]
            found.append(text_elements(middle, y, label, at.name_room, anchor=anchor, angle=angle, most=most))
    return "".join(found)
