"""Tables, charts and findings of an experiment from its cells, separately for each machine."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from cs336_systems.config import MODES, PRECISIONS, UserError
from cs336_systems.files import is_number
from cs336_systems.record import Record
from cs336_systems.report.cells import CellView, by_experiment, by_machine, group
from cs336_systems.report.chart_picture import picture
from cs336_systems.report.document import Chart
from cs336_systems.report.phrases import MOST, ended, naming, safely
from cs336_systems.report.picture import Picture
from cs336_systems.report.presentation import Catalogue, Cells, Presentation, Sentence, presentation_of
from cs336_systems.report.referee import doubt, doubts
from cs336_systems.report.side_by_side import charts_of_shared, compared, side_by_side
from cs336_systems.table import Table
from cs336_systems.text import Text, say


def in_order(names: Iterable[str], catalogue: Catalogue) -> list[str]:
    """Return the names of experiments in the catalogue's order; unknown ones follow, sorted."""
    names = set(names)
    return [*(name for name in catalogue if name in names), *sorted(names - catalogue.keys())]


def tables(records: Iterable[Record], catalogue: Catalogue) -> list[Table]:
    """Return the tables of every experiment that the records hold; rows by size, context, mode and so on."""
    found = by_experiment(group(records))
    tables: list[Table] = []
    for name in in_order(found, catalogue):
        try:
            tables += tables_of(presentation_of(name, catalogue), found[name])
        except UserError:
            raise
        except Exception as error:  # records may come from anywhere
            what = f"{type(error).__name__}: {error}"[:200]
            raise UserError(f"the records of {name!r} cannot be shown ({what}); choose other --experiments") from error
    return tables


def tables_of(experiment: Presentation, cells: Sequence[CellView], references: Sequence[CellView] = ()) -> list[Table]:
    """Return the tables of each machine, and of what several machines share.

    With several machines the shared tables come first; published results (`references`) alone come last.
    """
    if experiment.machines_together:
        return list(map(_all_text, experiment.tables(sorted(cells, key=_position))))
    machines = [sorted(chosen, key=_position) for chosen in by_machine(cells).values()]
    shared = side_by_side(experiment, [*itertools.chain(*machines), *sorted(references, key=_position)])
    own = [table for chosen in machines for table in experiment.tables(chosen)]
    found = [*shared, *own] if len(machines) > 1 else [*own, *shared]
    return list(map(_all_text, found))


def _all_text(table: Table) -> Table:
    """Return the table with every heading and cell as text, because invalid records may put anything there."""
    columns = [replace(column, name=Text(*map(str, column.name))) for column in table.columns]
    rows = [[cell if isinstance(cell, Text) else str(cell) for cell in row] for row in table.rows]
    return Table(table.title, columns, rows, table.notes)


def charts_of(experiment: Presentation, cells: Sequence[CellView]) -> list[Chart]:
    """Return the charts that have points, with file names of their own: those of the work that several machines share,
    else those of each machine."""
    shown = [cell for cell in cells if cell.ok or cell.is_oom or not experiment.complete_cells_only]
    machines = {"": shown} if experiment.machines_together else by_machine(shown)
    found: list[Chart] = []
    for chart in charts_of_shared(experiment, shown) if len(machines) > 1 else ():
        found.append(_named(chart, experiment.name, found, ""))
    for machine, chosen in machines.items() if not found else ():
        for chart in experiment.charts(chosen):
            if any(series.points for series in chart.series):
                found.append(_named(chart, experiment.name, found, machine if len(machines) > 1 else ""))
    return found


def _named(chart: Chart, experiment: str, others: Sequence[Chart], machine: str) -> Chart:
    """Return the chart with a unique file name, and the machine in its title where there are several."""
    title = say("{} · {}", "{} · {}", chart.title, machine) if machine else chart.title
    name = f"{experiment.replace('_', '-')}-{chart.name or len(others) + 1}"
    if name in {other.name for other in others}:
        name += f"-{len(others) + 1}"
    return replace(chart, name=name, title=title)


def pictures(records: Iterable[Record], catalogue: Catalogue) -> list[Picture]:
    """Return the pictures of a run's records: those of its charts."""
    return [
        picture(chart)
        for name, cells in by_experiment(group(records)).items()
        if presentation_of(name, catalogue).charts_after_run
        for chart in charts_of(presentation_of(name, catalogue), cells)
    ]


def findings_of(experiment: Presentation, cells: Sequence[CellView]) -> list[Text]:
    """Return up to three sentences for each machine; odd or missing data drop sentences, but never raise an
    exception."""
    machines: dict[str, list[CellView]] = {}
    for cell in cells:
        machine = safely(lambda cell: cell.machine, cell) if cell.records else None
        if machine:
            machines.setdefault("" if experiment.machines_together else machine, []).append(cell)
    found = _warned(partial(_comparisons, experiment), cells) if len(machines) > 1 else []
    for machine, chosen in machines.items():
        texts = _warned(partial(_sentences, experiment), chosen)
        found += [say("{}: {}", "{}：{}", machine, text) for text in texts] if len(machines) > 1 else texts
    return found


Conclude = Callable[[Sequence[CellView]], list[Text | None]]


def _comparisons(experiment: Presentation, cells: Sequence[CellView]) -> list[Text | None]:
    return [ended(one.sentence) for one in safely(partial(compared, experiment), cells) or []]


def _sentences(experiment: Presentation, cells: Sequence[CellView]) -> list[Text | None]:
    return [safely(partial(_stated, sentence), cells) for sentence in experiment.findings]


def _warned(conclude: Conclude, cells: Sequence[CellView]) -> list[Text]:
    """Return the sentences from these cells, each with a warning if it depends on unreliable step times; the first has
    one, too, if most step times are unreliable."""
    texts = conclude(cells)
    warnings = safely(lambda cells: doubts(texts, conclude, cells, naming(cells)), cells) or [None] * len(texts)
    stated = [(text, warning) for text, warning in zip(texts, warnings, strict=True) if text is not None][:MOST]
    general = safely(doubt, cells) if not any(warning for _, warning in stated) else None
    found = []
    for number, (text, own) in enumerate(stated):
        warning = own or (general if number == 0 else None)
        found.append(say("{0} {1}", "{0}{1}", text, ended(warning)) if warning else text)
    return found


def _stated(sentence: Sentence, cells: Cells) -> Text | None:
    text = sentence(cells)
    return None if text is None else ended(text)


def _position(cell: CellView) -> tuple:
    """Return the sort key of a cell's row; cells without such fields keep the order in which they were recorded."""

    def place(name: str, order: Sequence[str]) -> int:
        value = cell.get(name)
        return order.index(value) if value in order else len(order)

    def number(name: str) -> float:
        value = cell.get(name)
        return value if is_number(value) else int(value is True)

    numbers = ("d_model", "num_layers", "context_length", "batch_size")
    return (
        cell.machine,
        *map(number, numbers),
        place("mode", MODES),
        place("precision", PRECISIONS),
        str(cell.get("attention")),
        *map(number, ("checkpoint_blocks", "compile", "warmup_steps")),
    )
