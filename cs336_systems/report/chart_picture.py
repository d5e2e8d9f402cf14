"""A chart drawn by matplotlib, for formats that cannot hold a page's SVG."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from cs336_systems.report.document import Chart, Language, Point, Series
from cs336_systems.report.picture import MORE, PALETTE, Picture, can_write_chinese, letters

MARKERS = "os^Dvp*Xh"
COLORS = (*PALETTE, *MORE)


def picture(chart: Chart, language: Language = "en") -> Picture:
    names = _names(chart)
    bars = len(names) * (1 if chart.kind == "stacked" else max(1, len(chart.series)))
    height = 1.3 + (0.3 * len(names) if chart.kind == "stacked" else 0.17 * bars + 0.12 * len(names))
    size = (7.2, min(11.0, max(2.2, height))) if chart.horizontal else (7.2, 3.8)
    return Picture(chart.name, chart.title.in_(language), partial(_draw, chart=chart, language=language), size)


def _draw(figure: Any, chart: Chart, language: Language) -> None:
    if language == "zh" and not can_write_chinese():
        language = "en"  # boxes in place of letters help nobody
    with letters(language):
        axes = figure.subplots()
        {"lines": _lines, "bars": _bars, "stacked": _stacked}[chart.kind](axes, chart, language)
        x, y = chart.x.in_(language), chart.y.in_(language)
        axes.set(xlabel=y if chart.horizontal else x, ylabel="" if chart.horizontal else y)
        axes.set_title(chart.title.in_(language))
        if len(chart.series) > 1:
            figure.legend(loc="outside lower center", ncols=min(4, len(chart.series)))


def _finite(series: Series) -> list[Point]:
    return [point for point in series.points if point.note is None and math.isfinite(point.y)]


def _names(chart: Chart) -> list[str]:
    return list(dict.fromkeys(str(point.x) for series in chart.series for point in series.points))


def _lines(axes: Any, chart: Chart, language: Language) -> None:
    for number, series in enumerate(chart.series):
        points = [p for p in _finite(series) if not chart.log_y or p.y > 0]
        style = {"color": COLORS[number % len(COLORS)], "label": series.name.in_(language)}
        if series.dashed:
            axes.plot([p.x for p in points], [p.y for p in points], "--", linewidth=1, **style)
        else:
            marker = MARKERS[number % len(MARKERS)] if len(points) < 60 else ""
            axes.plot([p.x for p in points], [p.y for p in points], marker=marker, markersize=4, linewidth=1.3, **style)
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
    width = 0.8 / len(chart.series)
    for number, series in enumerate(chart.series):
        points = _finite(series)
        places = [names.index(str(p.x)) + (number - (len(chart.series) - 1) / 2) * width for p in points]
        values, errors = [p.y for p in points], [p.std or 0.0 for p in points]
        style = {
            "color": COLORS[number % len(COLORS)],
            "label": series.name.in_(language),
            "error_kw": {"elinewidth": 0.8},
        }
        if chart.horizontal:
            axes.barh(places, values, width, xerr=errors, **style)
        else:
            axes.bar(places, values, width, yerr=errors, **style)
    _name_places(axes, chart, names)


def _stacked(axes: Any, chart: Chart, language: Language) -> None:
    names = _names(chart)
    base = [0.0] * len(names)
    for number, series in enumerate(chart.series):
        by_name = {str(point.x): point.y for point in _finite(series)}
        sizes = [by_name.get(name, 0.0) for name in names]
        style = {"color": COLORS[number % len(COLORS)], "label": series.name.in_(language)}
        if chart.horizontal:
            axes.barh(range(len(names)), sizes, 0.65, left=base, **style)
        else:
            axes.bar(range(len(names)), sizes, 0.65, bottom=base, **style)
        base = [a + b for a, b in zip(base, sizes, strict=True)]
    _name_places(axes, chart, names)


def _name_places(axes: Any, chart: Chart, names: Sequence[str]) -> None:
    if chart.horizontal:
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
    else:
        axes.set_xticks(range(len(names)), names, fontsize=8)
        axes.grid(axis="x", visible=False)
