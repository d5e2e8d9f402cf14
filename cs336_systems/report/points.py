"""Shared by the charts of all experiments: units, names, and points made from statistics."""

import math
from collections.abc import Iterable, Sequence

from cs336_systems.record import Statistics
from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Point, Series
from cs336_systems.report.rows import row_words
from cs336_systems.text import Text, listed, say

FEW = 24
"""The largest number of bars that can be read in one chart."""


def point(x: float | str | Text, found: Statistics | None, unit: float = 1e-3) -> list[Point]:
    """Return one point, or none if nothing was measured."""
    if found is None or not math.isfinite(found.mean):
        return []
    return [Point(x, found.mean / unit, found.std / unit if found.n > 1 else None, found.n)]


def measured(cell: CellView, metric: str, x: float | str | Text, unit: float = 1e-3) -> list[Point]:
    return point(x, cell.statistics(metric), unit)


def joined(points: Iterable[list[Point]]) -> list[Point]:
    return [point for found in points for point in found]


def series_of(name: Text | str, points: Iterable[list[Point]]) -> Series:
    return Series(name if isinstance(name, Text) else Text(name), joined(points))


def bar_name(cell: CellView, shown: Sequence[str]) -> Text:
    """Return the name of a cell in a chart: the values of the fields `shown`, in readers' words."""
    return listed(row_words(cell, shown), (", ", "，"))


def means_of(cells: Iterable[CellView], metric: str = "step_time") -> Text:
    """Return the name of the statistic in charts of means, with the number of steps if it is the same everywhere."""
    counts = {found.n for cell in cells if (found := cell.statistics(metric))}
    return say("means of {} steps", "{} 步的均值", str(*counts)) if len(counts) == 1 else Text("means", "均值")
