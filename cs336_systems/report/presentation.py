"""`Presentation`: how the records of one experiment are shown. The experiments fill it in; the report only reads it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Chart, Highlight
from cs336_systems.report.referee import remarks
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text

Cells = Sequence[CellView]
"""Cells of one experiment, measured on one machine."""
MakeTables = Callable[[Cells], list[Table]]
MakeCharts = Callable[[Cells], list[Chart]]
MakeHighlights = Callable[[Cells], list[Highlight]]
Sentence = Callable[[Cells], Text | None]
"""States one finding without its full stop. Where the data do not show it, it returns None or raises what missing data
raise: the maximum of nothing is a ValueError, an absent cell a LookupError."""


def every_metric(cells: Cells) -> list[Table]:
    """One table of every metric in its base unit, for an experiment that brings no tables of its own."""
    columns = [word(Text("cell", "配置")), word(Text("metric", "指标")), word(Text("unit", "单位"))]
    columns += [Column(Text("mean", "均值")), Column(Text("std", "标准差")), Column(Text("n"))]
    rows = []
    for cell in cells:
        for found in cell.records:
            stats = (cell.variant(found.variant) if found.variant else cell).statistics(found.metric)
            text = str(found.samples[0]) if found.samples else ""
            values = [text, "", str(len(found.samples))]
            if stats:
                values = [f"{stats.mean:.6g}", f"{stats.std:.3g}", str(stats.n)]
            name = f"{found.variant}: {found.metric}" if found.variant else found.metric
            rows.append([cell.name or cell.verdict, name, found.unit, *values])
    return [Table(Text(cells[0].experiment), columns, rows, [remark.text for remark in remarks(cells)])]


@dataclass(frozen=True, kw_only=True)
class Presentation:
    """Title, question, tables, charts and findings of one experiment, in both languages."""

    name: str
    title: Text
    question: Text
    tables: MakeTables = every_metric
    charts: MakeCharts = lambda cells: []
    findings: Sequence[Sentence] = ()
    """At most three are shown, in this order."""
    highlights: MakeHighlights = lambda cells: []
    """Results for the first screen."""
    trust: Sentence = lambda cells: None
    """Why numbers can be trusted, without a full stop; those of all experiments are one line of the first screen."""
    group: Literal["speed", "attention", "memory", "ranks", "training", "trust", ""] = ""
    """The heading that its section stands under."""
    statistic: Literal["mean", "median"] = "mean"
    """The statistic that the experiment's tables show; tables of several machines side by side show the same."""
    identity: tuple[str, ...] = ()
    """Fields that make work different, besides the usual ones: the warm-up, where that is the subject."""
    charts_after_run: bool = True
    """Draw the charts beside the records after a run."""
    machines_together: bool = False
    """One chart and one sentence for the cells of all machines: training runs are compared wherever they ran."""
    complete_cells_only: bool = True
    """Charts leave out cells that did not end; a training run's cells have no end."""
    order: int = 50
    """Position among the experiments of its topic, in reports and lists."""

    @property
    def command(self) -> str:
        """The command that measures it; empty where no command of its own does."""
        return ""


Catalogue = Mapping[str, Presentation]
"""Experiments by name, in the order of the report."""


def presentation_of(name: str, catalogue: Catalogue) -> Presentation:
    """The experiment's own, or a plain one for records of an experiment that this version does not know."""
    return catalogue.get(name) or Presentation(name=name, title=Text(name), question=Text(""))
