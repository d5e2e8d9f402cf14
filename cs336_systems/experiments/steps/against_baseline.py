"""Tables, charts and phrases for one setting against its baseline: a precision against fp32, compiled against eager."""

from collections.abc import Callable, Sequence
from typing import Any

from cs336_systems.report import terms
from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Chart, Point, Series
from cs336_systems.report.phrases import having, naming, span, speed_up, times_text
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import FIELDS, as_text, cell_table, gib, ms, ratio, varying
from cs336_systems.table import Column, Table
from cs336_systems.text import Text, listed, say

Extra = tuple[Column, Callable[[CellView], str]]
Pair = tuple[CellView, CellView]
"""A cell and its baseline."""


def against(cells: Cells, field: str, baseline: Any, what: Text, extra: Sequence[Extra] = ()) -> Table:
    """Rows with their speed-up over the row that differs from them in `field` alone."""
    shown = varying(cells, always=("size", field))

    def work(cell: CellView) -> tuple:
        return (cell.machine, *(as_text(cell.get(name)) for name in FIELDS if name != field))

    bases = {work(cell): cell for cell in cells if cell.get(field) == baseline and cell.ok}
    columns = [
        *(Column(name, "ms") for name in (terms.FORWARD, terms.BACKWARD, terms.OPTIMIZER, terms.STEP)),
        Column(terms.STD, "ms"),
        Column(terms.SPEED_UP),
        Column(terms.PEAK, "GiB"),
        Column(terms.MEMORY),
        *(column for column, _ in extra),
    ]

    def row(cell: CellView) -> list[str]:
        base = bases.get(work(cell))
        step = cell.statistics("step_time")
        return [
            *(ms(cell.value(f"{phase}_time")) for phase in ("forward", "backward", "optimizer", "step")),
            ms(step.std if step else None),
            ratio(base.value("step_time") if base else None, cell.value("step_time")),
            gib(cell.value("peak_memory")),
            ratio(cell.value("peak_memory"), base.value("peak_memory") if base else None),
            *(text(cell) for _, text in extra),
        ]

    return cell_table(what, cells, shown, columns, row)


def speed_up_chart(cells: Cells, field: str, baseline: Any, title: Text) -> list[Chart]:
    """Bars of the speed-up of each value of `field` over the baseline, by size."""
    chosen = [cell for cell in cells if cell.ok and cell.get("mode") == "train-step"]
    values = [v for v in dict.fromkeys(cell.get(field) for cell in chosen) if v != baseline]
    sizes = list(dict.fromkeys(cell.get("size") for cell in chosen))
    by = {(cell.get("size"), cell.get(field)): cell.value("step_time") for cell in chosen}
    series = []
    for value in values:
        pairs = [(size, by.get((size, baseline)), by.get((size, value))) for size in sizes]
        points = [Point(str(size), base / time) for size, base, time in pairs if base and time]
        series.append(Series(Text("compiled", "编译") if value is True else Text(str(value)), points))
    times = Text(f"times as fast as {'eager' if baseline is False else baseline}", "加速比")
    return [Chart("", title, "bars", terms.SIZE, times, series)]


def speed_ups(pairs: Sequence[Pair]) -> Text:
    """The speed-ups of the largest size and of the smallest."""
    name = naming([cell for cell, _ in pairs])
    chosen = [pairs[-1], *([pairs[0]] if len(pairs) > 1 else [])]
    return listed(say("{} {}x", "{} {} 倍", name(pair[0]), times_text(speed_up(pair))) for pair in chosen)


def with_memory(said: Text, pairs: Sequence[Pair], base: str) -> Text:
    """A sentence with the ratio of peak memories added where it was measured."""
    ratios = [1 / speed_up(pair, "peak_memory") for pair in pairs if len(having(pair, "peak_memory")) == 2]
    if not ratios:
        return said
    times = span(ratios, "{:.2f}".format)
    return say("{0}, with {1} times the memory of {2}", "{0}，显存为 {2} 的 {1} 倍", said, times, base)
