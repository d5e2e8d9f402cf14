"""Tables with one row per cell: each column is one object with its heading, its unit and the text of a cell in it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cs336_systems.report import rows, terms
from cs336_systems.report.cells import CellView
from cs336_systems.table import Column, Table
from cs336_systems.text import Text


class Entry(NamedTuple):
    """A column, and the function that gives a cell's text in it."""

    column: Column
    text: Callable[[CellView], str | Text]


def of(name: Text, text: Callable[[CellView], str | Text], unit: str = "") -> Entry:
    return Entry(Column(name, unit), text)


def ms(name: Text, metric: str) -> Entry:
    """Return the mean of a time."""
    return of(name, lambda cell: rows.ms(cell.value(metric)), "ms")


def std(name: Text, metric: str) -> Entry:
    return of(name, lambda cell: rows.ms(found.std if (found := cell.statistics(metric)) else None), "ms")


def mean_and_std(name: Text, metric: str, show: Callable[[float | None], str] = rows.ms) -> Entry:
    return of(name, lambda cell: rows.spread(cell.statistics(metric), show), "ms")


def gib(name: Text, metric: str) -> Entry:
    return of(name, lambda cell: rows.gib(cell.value(metric)), "GiB")


def reserved(cells: Sequence[CellView]) -> list[Entry]:
    """Return a column with the peak memory held by the caching allocator; none if no cell has it, as on a CPU."""
    metric = "reserved_memory"
    return [gib(terms.RESERVED, metric)] if any(metric in cell.metrics for cell in cells) else []


def predicted_time(cells: Sequence[CellView]) -> list[Entry]:
    """Return columns with the predicted time of a step and its error; none if no step is predicted."""
    if not any(cell.ok and cell.predicted_time for cell in cells):
        return []
    return [
        of(terms.PREDICTED_STEP, lambda cell: rows.ms(cell.predicted_time), "ms"),
        of(terms.TIME_ERROR, lambda cell: rows.signed(cell.time_error, 1)),
    ]


def cell_table(
    what: Text,
    cells: Sequence[CellView],
    entries: Sequence[Entry],
    *,
    shown: Sequence[str] | None = None,
    notes: Sequence[Text] = (),
    on_spread: bool = True,
) -> Table:
    """Return a table with one row per cell, or its verdict where it failed; the referee's remarks follow the notes."""
    columns = [column for column, _ in entries]

    def row(cell: CellView) -> list[Sequence[str | Text]]:
        return [[text(cell) for _, text in entries] if cell.ok else rows.failed_row(cell, columns)]

    notes = [*notes, *rows.remarks_on(cells, shown, on_spread=on_spread)]
    return rows.rows_table(what, cells, columns, row, shown=shown, notes=notes)


# -- one setting against its baseline ---------------------------------------------------------------------------------

FindBase = Callable[[CellView], CellView | None]
"""Finds the cell that a cell is compared with."""


def baselines(cells: Sequence[CellView], is_base: Callable[[CellView], bool], *without: str) -> FindBase:
    """Return a function that finds a cell's baseline among the cells: the one that differs only in the fields
    `without`."""
    found = {rows.settings_of(cell, *without): cell for cell in cells if cell.ok and is_base(cell)}
    return lambda cell: found.get(rows.settings_of(cell, *without))


def speed_up(name: Text, metric: str, base_of: FindBase) -> Entry:
    """Return a speed-up column: the baseline's time over the cell's."""
    return of(name, lambda cell: rows.ratio(_value(base_of(cell), metric), cell.value(metric)))


def over_base(name: Text, metric: str, base_of: FindBase) -> Entry:
    return of(name, lambda cell: rows.ratio(cell.value(metric), _value(base_of(cell), metric)))


def _value(cell: CellView | None, metric: str) -> float | None:
    return cell.value(metric) if cell else None
