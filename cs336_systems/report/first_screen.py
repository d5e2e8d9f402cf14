"""The first screen of a report: large numbers, one chart, and one line on why to trust them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Chart, Highlight, Limit, Point, Section, Series
from cs336_systems.report.phrases import ended, naming, safely
from cs336_systems.report.presentation import Presentation
from cs336_systems.report.referee import doubt, doubts
from cs336_systems.report.side_by_side import compared
from cs336_systems.text import Text, listed, say

MOST_NUMBERS = 5
MOST_BARS = 10
"""Speed-ups in the chart of the first screen."""


def highlights_of(experiments: Mapping[str, Presentation], cells: Mapping[str, Sequence[CellView]]) -> list[Highlight]:
    """Return the results of all experiments for the first screen, the most important first.

    For several machines or runs these are comparisons of the work that they share.
    """
    found: list[Highlight] = []
    for name, chosen in cells.items():
        machines = {safely(lambda cell: cell.machine, cell) for cell in chosen if cell.records}
        is_one = len(machines) == 1 or experiments[name].machines_together
        make = experiments[name].highlights if is_one else partial(_comparisons, experiments[name])
        fine = [cell for cell in chosen if cell.ok or not experiments[name].complete_cells_only]

        results = partial(_results, make)
        made, general = results(fine), safely(doubt, fine)
        warnings = safely(partial(_warnings, made, results), fine) or [None] * len(made)
        for one, own in zip(made, warnings, strict=True):
            warning = own or general
            detail = say("{}; {}", "{}；{}", one.detail, warning) if warning else one.detail
            found.append(replace(one, section=name, detail=detail))
    return sorted(found, key=lambda highlight: highlight.rank)


def _results(make: Callable[[Sequence[CellView]], list[Highlight]], cells: Sequence[CellView]) -> list[Highlight]:
    return safely(make, cells) or []


def _warnings(
    made: Sequence[Highlight], results: Callable[[Sequence[CellView]], list[Highlight]], cells: Sequence[CellView]
) -> list[Text | None]:
    return doubts(made, results, cells, naming(cells))


def _comparisons(experiment: Presentation, cells: Sequence[CellView]) -> list[Highlight]:
    return [found.highlight for found in compared(experiment, cells)]


def numbers_of(highlights: Sequence[Highlight]) -> list[Highlight]:
    """Return the results to show: the first speed-up and the first other result of each section, until the screen is
    full."""
    firsts: dict[tuple[str, bool], Highlight] = {}
    for highlight in highlights:
        firsts.setdefault((highlight.section, highlight.ratio is None), highlight)
    others = [highlight for highlight in highlights if highlight not in firsts.values()]
    return sorted([*firsts.values(), *others][:MOST_NUMBERS], key=lambda highlight: highlight.rank)


def hero_of(highlights: Sequence[Highlight], sections: Sequence[Section]) -> Chart | None:
    """Return a bar chart of the speed-ups; with fewer than two, the first chart that is not too tall for a screen."""
    faster = [(one.bar, one.ratio) for one in highlights if one.bar and one.ratio]
    if len(faster) < 2:
        charts = (chart for section in sections for chart in section.charts)
        return next((chart for chart in charts if not chart.sideways or len(chart.bar_names) <= MOST_BARS), None)
    points = [Point(name, ratio) for name, ratio in faster[:MOST_BARS]]
    return Chart(
        "hero",
        Text("Speed against other implementations", "相对其他实现的加速比"),
        "bars",
        Text(""),
        Text("times as fast", "加速比"),
        [Series(Text("ours", "本项目"), points)],
        horizontal=True,
        limits=[Limit(1.0, Text("1: as fast as the other", "1：持平"))],
        note=Text("time of the other over ours: above 1, ours is faster", "对比实现用时 / 本项目用时：大于 1 表示更快"),
    )


def trust_of(experiments: Iterable[Presentation], cells: Mapping[str, Sequence[CellView]]) -> Text | None:
    """Return why the numbers can be trusted: one phrase from each experiment that has one."""
    stated = [
        said
        for experiment in experiments
        if (said := safely(experiment.trust, [cell for cell in cells[experiment.name] if cell.ok])) is not None
    ]
    if not stated:
        return None
    return ended(say("how far to trust it: {}", "可信度：{}", listed(stated, ("; ", "；"))))
