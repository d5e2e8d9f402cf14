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
        return _RENDERERS[format](self if format == "csv" else self._on_single_lines())

    def _on_single_lines(self) -> "Table":
        """A line break inside a cell would end its row in every format but CSV."""

        def flat(text: str) -> str:
            return " ".join(text.splitlines())

        columns = [Column(flat(column.name), flat(column.unit), column.numeric) for column in self.columns]
        rows = [[flat(cell) for cell in row] for row in self.rows]
        return Table(flat(self.title), columns, rows, [flat(note) for note in self.notes])


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
    def text(raw: str) -> str:
        return raw.replace("<", "&lt;")  # Markdown lets HTML through, and a name may be any

    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(text(cell.replace("\\", "\\\\").replace("|", "\\|")) for cell in cells) + " |"

    lines = [f"**{text(table.title)}**", "", row([column.heading for column in table.columns])]
    lines.append("|" + "|".join("---:" if column.numeric else ":---" for column in table.columns) + "|")
    lines += [row(cells) for cells in table.rows]
    if table.notes:
        lines += ["", *(f"- {text(note)}" for note in table.notes)]
    return "\n".join(lines)


def _csv(table: Table) -> str:
    text = io.StringIO()
    cells = [cell for row in table.rows for cell in row]
    # Python 3.11 does not quote a lone carriage return, and readers split the row at it.
    quote_all = any("\r" in cell for cell in cells)
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL if quote_all else csv.QUOTE_MINIMAL)
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
    """Escaped; empty groups keep `--` two dashes, and a leading bracket or star from being taken for an argument."""
    escaped = "".join(_LATEX.get(char) or (f"\\{char}" if char in "&%$#_{}" else char) for char in text)
    escaped = re.sub(r"-(?=-)", "-{}", escaped)
    return "{}" + escaped if escaped.startswith(("[", "*")) else escaped


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
    """Escaped content; a dash, slash, plus or equals sign may begin a list, a comment, a term or a heading."""
    escaped = re.sub(r"([\\#*_`$<>@\[\]~]|-(?=-)|(?<=-)-|/(?=/)|(?<=/)/|^[-+=/])", r"\\\1", text)
    return f"[{escaped}]"


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
