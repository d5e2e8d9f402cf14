"""A chart drawn by matplotlib, for formats that cannot hold a page's SVG."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from cs336_systems.report.document import Chart, Point, Series
from cs336_systems.report.picture import MORE, PALETTE, Picture, can_write_chinese, letters
from cs336_systems.text import Language, Text

MARKERS = "os^Dvp*Xh"
MARKERS_ON_BARS = "D^so"
COLORS = (*PALETTE, *MORE)
INK = "black"
"""Of what belongs to no series."""


def picture(chart: Chart, language: Language = "en") -> Picture:
    names = _names(chart)
    one_row = {"stacked": 0.3, "spans": 0.45}.get(chart.kind, 0.17 * max(1, len(chart.series)) + 0.12)
    size = (7.2, min(11.0, max(2.2, 1.3 + one_row * len(names)))) if chart.sideways else (7.2, 3.8)
    return Picture(chart.name, chart.title.in_(language), partial(_draw, chart=chart, language=language), size)


def _draw(figure: Any, chart: Chart, language: Language) -> None:
    if language == "zh" and not can_write_chinese():
        language = "en"  # boxes in place of letters help nobody
    with letters(language):
        axes = figure.subplots()
        {"lines": _lines, "bars": _bars, "stacked": _stacked, "spans": _spans}[chart.kind](axes, chart, language)
        if chart.kind != "lines":
            _name_places(axes, chart)
        _limit(axes, chart, language)
        x, y = _said(chart.x, language), _said(chart.y, language)
        axes.set(xlabel=y if chart.sideways else x, ylabel="" if chart.sideways else y)
        axes.set_title(_said(chart.title, language))
        names = [_said(series.name, language) for series in chart.series]
        names += [_said(chart.limit.text, language)] if chart.limit else []
        if len(names) > 1:
            # matplotlib would put lines before bars.
            found = sorted(zip(*axes.get_legend_handles_labels(), strict=True), key=lambda pair: names.index(pair[1]))
            figure.legend(*zip(*found, strict=True), loc="outside lower center", ncols=_columns(names))


def _said(text: Text, language: Language) -> str:
    return _plain(text.in_(language))


def _plain(text: str) -> str:
    """Between dollars matplotlib would look for formulas."""
    return text.replace("$", r"\$")


def _columns(names: Sequence[str]) -> int:
    """Of a legend that is no wider than the picture."""
    for count in range(min(4, len(names)), 1, -1):
        rows = math.ceil(len(names) / count)
        widths = [8 + max(map(len, names[first : first + rows])) for first in range(0, len(names), rows)]
        if sum(widths) <= 105:
            return count
    return 1


def _finite(series: Series) -> list[Point]:
    return [point for point in series.points if point.note is None and math.isfinite(point.y)]


def _names(chart: Chart) -> list[str]:
    return chart.ordered(str(point.x) for series in chart.series for point in series.points)


def _style(chart: Chart, number: int, language: Language) -> dict[str, Any]:
    color, series = COLORS[chart.color_of(number) % len(COLORS)], chart.series[number]
    return {"color": color, "label": _said(series.name, language)}


def _lines(axes: Any, chart: Chart, language: Language) -> None:
    for number, series in enumerate(chart.series):
        points = [p for p in _finite(series) if not chart.log_y or p.y > 0]
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
    for number, series in enumerate(chart.series):  # at the top edge, once it is known where that is
        for point in series.points:
            if point.note is not None:
                axes.plot([point.x], [1.0], "x", color=COLORS[number % len(COLORS)], clip_on=False,
                          transform=axes.get_xaxis_transform())  # fmt: skip


def _bars(axes: Any, chart: Chart, language: Language) -> None:
    names = _names(chart)
    own = [number for number, series in enumerate(chart.series) if not chart.on_bars(series)]
    width = 0.8 / max(1, len(own))
    shifts = {number: (place - (len(own) - 1) / 2) * width for place, number in enumerate(own)}
    for number, series in enumerate(chart.series):
        points = _finite(series)
        shift = shifts.get(number if number in own else series.over, 0.0)  # type: ignore[arg-type]
        places = [names.index(str(p.x)) + shift for p in points]
        if number not in own:
            _marks(axes, chart, series, places, language)
            continue
        values, errors = [p.y for p in points], [p.std or 0.0 for p in points]
        style = _style(chart, number, language) | {"error_kw": {"elinewidth": 0.8}}
        if chart.horizontal:
            axes.barh(places, values, width, xerr=errors, **style)
        else:
            axes.bar(places, values, width, yerr=errors, **style)


def _marks(axes: Any, chart: Chart, series: Series, places: Sequence[float], language: Language) -> None:
    """On the bars of other series, whatever their colours."""
    values = [p.y for p in _finite(series)]
    marker = MARKERS_ON_BARS[(series.over or 0) % len(MARKERS_ON_BARS)]
    style = {"linestyle": "", "markersize": 5, "markerfacecolor": "white", "markeredgecolor": INK, "zorder": 3}
    ends = (values, places) if chart.horizontal else (places, values)
    axes.plot(*ends, marker=marker, label=_said(series.name, language), **style)


def _stacked(axes: Any, chart: Chart, language: Language) -> None:
    names = _names(chart)
    base = [0.0] * len(names)
    for number, series in enumerate(chart.series):
        if chart.on_bars(series):
            _marks(axes, chart, series, [names.index(str(p.x)) for p in _finite(series)], language)
            continue
        by_name = {str(point.x): point.y for point in _finite(series)}
        sizes = [by_name.get(name, 0.0) for name in names]
        own = [place for place, name in enumerate(names) if name in by_name]
        lengths, starts = [sizes[place] for place in own], [base[place] for place in own]
        style = _style(chart, number, language)
        if chart.horizontal:
            axes.barh(own, lengths, 0.65, left=starts, **style)
        else:
            axes.bar(own, lengths, 0.65, bottom=starts, **style)
        base = [a + b for a, b in zip(base, sizes, strict=True)]
    if chart.limit and chart.cut_at:
        shown = max(1.15 * chart.limit.value, 1.05 * min(max(base, default=0.0), chart.cut_at))
        axes.set_xlim(0, shown)
        for row, total in enumerate(base):
            if total > shown:  # a bar that goes on beyond the picture says how far
                axes.text(shown, row, f" → {total:,.0f}" if total >= 100 else f" → {total:.3g}", va="center")


def _spans(axes: Any, chart: Chart, language: Language) -> None:
    names = _names(chart)
    lanes = sorted({series.lane for series in chart.series})
    lowest = 0.0
    for number, series in enumerate(chart.series):
        shift = 0.4 * (lanes.index(series.lane) - (len(lanes) - 1) / 2)
        spans = [(names.index(str(p.x)) + shift, p.start, p.y) for p in _finite(series) if p.start is not None]
        known = [(place, start, end - start) for place, start, end in spans if math.isfinite(start)]
        lowest = min([lowest, *(start for _, start, _ in known)])
        places, starts, lengths = zip(*known, strict=True) if known else ((), (), ())
        # Messages follow each other closely; phases may be too short for an edge.
        style = _style(chart, number, language) | {"edgecolor": "white", "linewidth": 0.3 if series.lane else 0}
        axes.barh(places, lengths, 0.34, left=starts, **style)
    axes.set_xlim(left=lowest)


def _limit(axes: Any, chart: Chart, language: Language) -> None:
    if chart.limit and math.isfinite(chart.limit.value):
        line = axes.axvline if chart.sideways else axes.axhline
        line(chart.limit.value, color=INK, linewidth=1.3, label=_said(chart.limit.text, language))


def _name_places(axes: Any, chart: Chart) -> None:
    names = [_plain(name) for name in _names(chart)]
    if chart.sideways:
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
    else:
        axes.set_xticks(range(len(names)), names, fontsize=8)
        axes.grid(axis="x", visible=False)
