"""A chart drawn by matplotlib, for formats that cannot hold the SVG of the page."""

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from cs336_systems.report.document import Chart, Series, beyond_text
from cs336_systems.report.picture import MORE, PALETTE, Picture, can_write_chinese, fonts
from cs336_systems.text import Language

MARKERS = "os^Dvp*Xh"
MARKERS_ON_BARS = "D^so"
COLORS = (*PALETTE, *MORE)
INK = "black"
"""Colour of all elements that do not belong to a series."""


def picture(chart: Chart, language: Language = "en") -> Picture:
    one_row = {"stacked": 0.3, "spans": 0.45}.get(chart.kind, 0.17 * max(1, len(chart.series)) + 0.12)
    size = (7.2, min(11.0, max(2.2, 1.3 + one_row * len(chart.bar_names)))) if chart.sideways else (7.2, 3.8)
    return Picture(chart.name, chart.title.in_(language), partial(_draw, chart=chart, language=language), size)


def _draw(figure: Any, chart: Chart, language: Language) -> None:
    if language == "zh" and not can_write_chinese():
        language = "en"  # without a font every character would be a box
    with fonts(language):
        axes = figure.subplots()
        kinds = {"lines": _lines, "bars": _bars, "stacked": _stacked, "spans": _spans, "dots": _dots}
        kinds[chart.kind](axes, chart, language)
        if chart.kind != "lines":
            _name_bars(axes, chart, language)
        _limits(axes, chart, language)
        x, y = _plain(chart.x.in_(language)), _plain(chart.y.in_(language))
        axes.set(xlabel=y if chart.sideways else x, ylabel="" if chart.sideways else y)
        axes.set_title(_plain(chart.title.in_(language)))
        names = [_plain(series.name.in_(language)) for _, series in chart.shown]
        names += [_plain(limit.text.in_(language)) for limit in chart.shown_limits]
        if chart.has_legend:
            # matplotlib lists lines before bars; the order of the series is restored.
            found = sorted(zip(*axes.get_legend_handles_labels(), strict=True), key=lambda pair: names.index(pair[1]))
            figure.legend(*zip(*found, strict=True), loc="outside lower center", ncols=_columns(names))


def _plain(text: str) -> str:
    """Escape dollar signs, which matplotlib would read as formulas."""
    return text.replace("$", r"\$")


def _columns(names: Sequence[str]) -> int:
    """Return the number of columns at which the legend is no wider than the picture."""
    for count in range(min(4, len(names)), 1, -1):
        rows = math.ceil(len(names) / count)
        widths = [8 + max(map(len, names[first : first + rows])) for first in range(0, len(names), rows)]
        if sum(widths) <= 105:
            return count
    return 1


def _style(chart: Chart, number: int, language: Language) -> dict[str, Any]:
    color, series = COLORS[chart.color_of(number)], chart.series[number]
    return {"color": color, "label": _plain(series.name.in_(language))}


def _lines(axes: Any, chart: Chart, language: Language) -> None:
    for number, series in chart.shown:
        points = [point for point in series.points if chart.can_draw(point)]
        style = _style(chart, number, language)
        marker = MARKERS[number % len(MARKERS)] if len(points) < 60 else ""
        if series.drawn == "marks":
            style |= {"linestyle": "", "marker": marker or ".", "markersize": 4}
        elif series.dashed or series.drawn == "line":
            style |= {"linestyle": "--" if series.dashed else "-", "linewidth": 1}
        else:
            style |= {"marker": marker, "markersize": 4, "linewidth": 1.3}
        axes.plot([p.x for p in points], [p.y for p in points], **style)
    if chart.log_x:
        axes.set_xscale("log")
    if chart.log_y:
        axes.set_yscale("log")
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    for number, series in chart.shown:  # crosses at the top edge, whose position is now known
        for point in series.points:
            if point.note and chart.has_place(point):
                axes.plot([point.x], [1.0], "x", color=COLORS[chart.color_of(number)], clip_on=False,
                          transform=axes.get_xaxis_transform())  # fmt: skip


def _bars(axes: Any, chart: Chart, language: Language) -> None:
    width = 0.8 / max(1, len(chart.bars))
    shifts = {number: (place - (len(chart.bars) - 1) / 2) * width for place, number in enumerate(chart.bars)}
    draw, error = (axes.barh, "xerr") if chart.horizontal else (axes.bar, "yerr")
    for number, series in chart.shown:
        if number not in chart.bars:
            _marks(axes, chart, series, language, shifts.get(series.over, 0.0) if series.over is not None else 0.0)
            continue
        points = [point for point in series.points if chart.can_draw(point)]
        rows = [chart.bar_names.index(point.place) + shifts[number] for point in points]
        style = _style(chart, number, language) | {error: [point.std or 0.0 for point in points]}
        draw(rows, [point.y for point in points], width, error_kw={"elinewidth": 0.8}, **style)


def _marks(axes: Any, chart: Chart, series: Series, language: Language, shift: float = 0.0) -> None:
    """Draw hollow marks on the bars of other series, readable on any colour."""
    points = [point for point in series.points if chart.can_draw(point)]
    rows, values = [chart.bar_names.index(p.place) + shift for p in points], [p.y for p in points]
    marker = MARKERS_ON_BARS[(series.over or 0) % len(MARKERS_ON_BARS)]
    style = {"linestyle": "", "markersize": 5, "markerfacecolor": "white", "markeredgecolor": INK, "zorder": 3}
    ends = (values, rows) if chart.horizontal else (rows, values)
    axes.plot(*ends, marker=marker, label=_plain(series.name.in_(language)), **style)


def _stacked(axes: Any, chart: Chart, language: Language) -> None:
    for number, series in chart.shown:
        if number not in chart.bars:
            _marks(axes, chart, series, language)
            continue
        parts = chart.stacks[number]
        rows = [chart.bar_names.index(part.point.place) for part in parts]
        lengths, starts = [part.point.y for part in parts], [part.begin for part in parts]
        style = _style(chart, number, language)
        if chart.horizontal:
            axes.barh(rows, lengths, 0.65, left=starts, **style)
        else:
            axes.bar(rows, lengths, 0.65, bottom=starts, **style)
    if chart.limits and chart.cut_at:
        ends = dict.fromkeys(chart.bar_names, 0.0)
        for part in itertools.chain.from_iterable(chart.stacks.values()):
            ends[part.point.place] = max(ends[part.point.place], part.end)
        shown = max(1.15 * chart.limits[0].value, 1.05 * min(max(ends.values(), default=0.0), chart.cut_at))
        axes.set_xlim(0, shown)
        for row, end in enumerate(ends.values()):
            if end > shown:
                axes.text(shown, row, f" {beyond_text(end)}", va="center")


def _spans(axes: Any, chart: Chart, language: Language) -> None:
    lowest = 0.0
    for number, series in chart.shown:
        shift = 0.4 * (chart.lanes.index(series.lane) - (len(chart.lanes) - 1) / 2)
        points = [point for point in series.points if chart.can_draw(point)]
        rows = [chart.bar_names.index(point.place) + shift for point in points]
        starts = [point.start or 0.0 for point in points]
        lowest = min([lowest, *starts])
        lengths = [point.y - start for point, start in zip(points, starts, strict=True)]
        # Collectives follow each other closely and need an edge; phases may be too short for one.
        style = _style(chart, number, language) | {"edgecolor": "white", "linewidth": 0.3 if series.lane else 0}
        axes.barh(rows, lengths, 0.34, left=starts, **style)
    axes.set_xlim(left=lowest)


def _dots(axes: Any, chart: Chart, language: Language) -> None:
    step = 0.7 / max(1, len(chart.bars))
    for number, series in chart.shown:
        shift = (chart.bars.index(number) - (len(chart.bars) - 1) / 2) * step
        points = [point for point in series.points if chart.can_draw(point)]
        rows = [chart.bar_names.index(point.place) + shift for point in points]
        style = _style(chart, number, language)
        for row, point in zip(rows, points, strict=True):
            if interval := chart.interval_of(point):
                axes.plot(interval, [row, row], color=style["color"], linewidth=1.2)
        axes.plot(
            [p.y for p in points], rows, linestyle="", marker=MARKERS[number % len(MARKERS)], markersize=4, **style
        )
    if chart.log_y:
        axes.set_xscale("log")


def _limits(axes: Any, chart: Chart, language: Language) -> None:
    line = axes.axvline if chart.sideways else axes.axhline
    for limit in chart.shown_limits:
        style = "--" if limit.dashed else "-"
        line(limit.value, color=INK, linewidth=1.3, linestyle=style, label=_plain(limit.text.in_(language)))
    for event in chart.events:
        axes.axvline(event.x, color=INK, linewidth=0.8, linestyle=":")


def _name_bars(axes: Any, chart: Chart, language: Language) -> None:
    names = [_plain(chart.labels[name].in_(language)) for name in chart.bar_names]
    if chart.sideways:
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
    else:
        axes.set_xticks(range(len(names)), names, fontsize=8)
        axes.grid(axis="x", visible=False)
