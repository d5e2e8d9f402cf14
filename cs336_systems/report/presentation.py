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
    """Return one table of every metric in its base unit, for experiments without tables of their own."""
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
    """Findings in order; at most three are shown."""
    highlights: MakeHighlights = lambda cells: []
    """Results for the first screen."""
    trust: Sentence = lambda cells: None
    """States why numbers can be trusted, without a full stop; the first screen joins those of all experiments in one
    line."""
    group: Literal["speed", "attention", "memory", "ranks", "training", "trust", ""] = ""
    """The heading that its section stands under."""
    statistic: Literal["mean", "median"] = "mean"
    """The statistic that the experiment's tables show; tables of several machines side by side show the same."""
    identity: tuple[str, ...] = ()
    """Fields that make work different, besides the usual ones, such as the warm-up in an experiment about warm-up."""
    charts_after_run: bool = True
    """True if charts are drawn beside the records after a run."""
    machines_together: bool = False
    """True if the cells of all machines share one chart and one sentence: training runs are compared across
    machines."""
    complete_cells_only: bool = True
    """True if charts leave out incomplete cells; False for training runs, whose cells have no end."""
    order: int = 50
    """Position among the experiments of its topic, in reports and lists."""

    @property
    def command(self) -> str:
        """The command that measures it; empty if it has no command of its own."""
        return ""


Catalogue = Mapping[str, Presentation]
"""Experiments by name, in the order of the report."""


def presentation_of(name: str, catalogue: Catalogue) -> Presentation:
    """Return the experiment's own presentation, or a plain one for experiments that this version does not know."""
    return catalogue.get(name) or Presentation(name=name, title=Text(name), question=Text(""))
