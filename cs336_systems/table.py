"""The one table type, and the formats it is written in: terminal, Markdown, CSV, LaTeX, Typst."""

import csv
import io
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

FORMATS = ("terminal", "md", "csv", "latex", "typst")


@dataclass(frozen=True)
class Column:
    name: str
    unit: str = ""
    numeric: bool = True

    @property
    def heading(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name


@dataclass(frozen=True)
class Table:
    """Cells are text already formatted; notes are remarks that belong under the table in every format."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default_factory=tuple)

    def render(self, format: str) -> str:
        return _RENDERERS[format](self)


def _terminal(table: Table) -> str:
    """Aligned columns, headings over two lines. Never wrapped: a number broken over two lines misleads."""
    heads = [(column.name, f"({column.unit})" if column.unit else "") for column in table.columns]
    grid = [[name for name, _ in heads], *([[unit for _, unit in heads]] if any(unit for _, unit in heads) else [])]
    lines = [*grid, *table.rows]
    widths = [max(_width(line[index]) for line in lines) for index in range(len(table.columns))]

    def draw(cells: Sequence[str]) -> str:
        padded = []
        for cell, width, column in zip(cells, widths, table.columns, strict=True):
            padding = " " * (width - _width(cell))
            padded.append(padding + cell if column.numeric else cell + padding)
        return "  ".join(padded).rstrip()

    rule = "─" * (sum(widths) + 2 * (len(widths) - 1))
    notes = [f"  ! {note}" for note in table.notes]
    return "\n".join([table.title, *map(draw, grid), rule, *map(draw, table.rows), *notes])


def _width(text: str) -> int:
    """Columns on a screen: Chinese characters take two."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def _markdown(table: Table) -> str:
    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    lines = [f"**{table.title}**", "", row([column.heading for column in table.columns])]
    lines.append("|" + "|".join("---:" if column.numeric else ":---" for column in table.columns) + "|")
    lines += [row(cells) for cells in table.rows]
    if table.notes:
        lines += ["", *(f"- {note}" for note in table.notes)]
    return "\n".join(lines)


def _csv(table: Table) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.heading for column in table.columns])
    writer.writerows(table.rows)
    return text.getvalue().rstrip("\n")


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "×": r"$\times$",
}


def _latex_text(text: str) -> str:
    return "".join(_LATEX.get(char) or (f"\\{char}" if char in "&%$#_{}" else char) for char in text)


def _latex(table: Table) -> str:
    alignment = "".join("r" if column.numeric else "l" for column in table.columns)

    def row(cells: Sequence[str]) -> str:
        return "    " + " & ".join(_latex_text(cell) for cell in cells) + r" \\"

    lines = [r"\begin{table}", r"  \centering", rf"  \caption{{{_latex_text(table.title)}}}"]
    lines += [rf"  \begin{{tabular}}{{{alignment}}}", r"    \toprule"]
    lines += [row([column.heading for column in table.columns]), r"    \midrule"]
    lines += [*(row(cells) for cells in table.rows), r"    \bottomrule", r"  \end{tabular}"]
    lines += [rf"  \par\footnotesize {_latex_text(note)}" for note in table.notes]
    return "\n".join([*lines, r"\end{table}"])


def _typst_text(text: str) -> str:
    return "[" + re.sub(r"([\\#*_`$<>@\[\]~])", r"\\\1", text) + "]"


def _typst(table: Table) -> str:
    alignment = ", ".join("right" if column.numeric else "left" for column in table.columns)
    lines = ["#figure(", "  table(", f"    columns: {len(table.columns)},", f"    align: ({alignment},),"]
    lines.append("    table.header(" + ", ".join(_typst_text(column.heading) for column in table.columns) + "),")
    lines += ["    " + ", ".join(_typst_text(cell) for cell in cells) + "," for cells in table.rows]
    lines += ["  ),", f"  caption: {_typst_text(table.title)},", ")"]
    lines += [_typst_text(note)[1:-1] for note in table.notes]
    return "\n".join(lines)


_RENDERERS: dict[str, Callable[[Table], str]] = {
    "terminal": _terminal,
    "md": _markdown,
    "csv": _csv,
    "latex": _latex,
    "typst": _typst,
}
