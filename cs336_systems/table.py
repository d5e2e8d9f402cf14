"""The one table type, and the formats it is written in: terminal, Markdown, CSV, LaTeX, Typst."""

import csv
import io
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cs336_systems.text import Language, Text, printable

FORMATS = ("terminal", "md", "csv", "latex", "typst")


@dataclass(frozen=True)
class Column:
    name: Text
    unit: str = ""
    numeric: bool = True

    def heading(self, language: Language = "en") -> str:
        name = self.name.in_(language)
        return f"{name} ({self.unit})" if self.unit else name


def word(name: Text) -> Column:
    """Return a column of words, aligned left."""
    return Column(name, numeric=False)


@dataclass(frozen=True)
class Table:
    """A table independent of format and language. Cells are formatted; notes stand under it in every format."""

    title: Text
    columns: Sequence[Column]
    rows: Sequence[Sequence[str | Text]]
    notes: Sequence[Text] = field(default_factory=tuple)

    def render(self, format: str, language: Language = "en") -> str:
        return _RENDERERS[format](self.plain(language, keep_lines=format == "csv"))

    def plain(self, language: Language = "en", *, keep_lines: bool = False) -> "PlainTable":
        """Return the table in one language, with line breaks inside cells replaced by spaces unless `keep_lines`.

        A line break would end a row in every format but CSV. Control characters, which names from foreign files may
        contain, are written out, so that none reaches a terminal.
        """

        def text(value: str | Text) -> str:
            said = value.in_(language) if isinstance(value, Text) else value
            return printable(said, "\n") if keep_lines else printable(" ".join(said.splitlines()))

        return PlainTable(
            title=text(self.title),
            columns=[Column(Text(text(c.name)), text(c.unit), c.numeric) for c in self.columns],
            rows=[[text(cell) for cell in row] for row in self.rows],
            notes=[text(note) for note in self.notes],
        )


class PlainTable(NamedTuple):
    """A table in one language."""

    title: str
    columns: list[Column]
    rows: list[list[str]]
    notes: list[str]


def _terminal(table: PlainTable) -> str:
    """Return aligned columns, with headings of up to two lines. Lines are not wrapped: a number broken over two lines
    misleads."""
    heads = [(column.name.en, f"({column.unit})" if column.unit else "") for column in table.columns]
    grid = [[name for name, _ in heads], *([[unit for _, unit in heads]] if any(unit for _, unit in heads) else [])]
    lines = [*grid, *table.rows]
    widths = [max(_width(line[index]) for line in lines) for index in range(len(heads))]

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
    """Return the width on a screen: Chinese characters take two columns."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def _markdown(table: PlainTable) -> str:
    def text(raw: str) -> str:
        """Escaped: a name must not become a link, an image, code or HTML, which Markdown lets through."""
        return re.sub(r"([\\\[\]`]|:(?=//)|(?<=\bwww)\.)", r"\\\1", raw).replace("<", "&lt;")

    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(text(cell).replace("|", "\\|") for cell in cells) + " |"

    lines = [f"**{text(table.title)}**", "", row([column.heading() for column in table.columns])]
    lines.append("|" + "|".join("---:" if column.numeric else ":---" for column in table.columns) + "|")
    lines += [row(cells) for cells in table.rows]
    if table.notes:
        lines += ["", *(f"- {text(note)}" for note in table.notes)]
    return "\n".join(lines)


_NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+(e[-+]?\d+)?( ?[%x])?( ± [\d.,]+)?|-", re.IGNORECASE)


def _csv_cell(text: str) -> str:
    """Return a cell that no spreadsheet executes: one that begins like a formula, and is no number, gets an
    apostrophe."""
    is_formula = text.lstrip()[:1] in tuple("=+-@＝＋－＠") and not _NUMBER.fullmatch(text)
    return f"'{text}" if is_formula else text


_GROUPED = re.compile(r"(?<![\d,.])\d{1,3}(,\d{3})+(?![\d,])")


def _ungrouped(text: str) -> str:
    """Return a cell of numbers without separators of thousands, with which a program reads 10,240 as text."""
    return _GROUPED.sub(lambda found: found[0].replace(",", ""), text)


def _csv(table: PlainTable) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_csv_cell(column.heading()) for column in table.columns])
    for row in table.rows:
        plain = [_ungrouped(cell) if column.numeric else cell for cell, column in zip(row, table.columns, strict=True)]
        writer.writerow(map(_csv_cell, plain))
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


def _latex(table: PlainTable) -> str:
    alignment = "".join("r" if column.numeric else "l" for column in table.columns)

    def row(cells: Sequence[str]) -> str:
        return "    " + " & ".join(_latex_text(cell) for cell in cells) + r" \\"

    lines = [r"\begin{table}", r"  \centering", rf"  \caption{{{_latex_text(table.title)}}}"]
    lines += [rf"  \begin{{tabular}}{{{alignment}}}", r"    \toprule"]
    lines += [row([column.heading() for column in table.columns]), r"    \midrule"]
    lines += [*(row(cells) for cells in table.rows), r"    \bottomrule", r"  \end{tabular}"]
    lines += [rf"  \par\footnotesize {_latex_text(note)}" for note in table.notes]
    return "\n".join([*lines, r"\end{table}"])


def _typst_text(text: str) -> str:
    """Escaped content; a dash, slash, plus or equals sign may begin a list, a comment, a term or a heading."""
    escaped = re.sub(r"([\\#*_`$<>@\[\]~]|-(?=-)|(?<=-)-|/(?=/)|(?<=/)/|^[-+=/])", r"\\\1", text)
    return f"[{escaped}]"


def _typst(table: PlainTable) -> str:
    alignment = ", ".join("right" if column.numeric else "left" for column in table.columns)
    lines = ["#figure(", "  table(", f"    columns: {len(table.columns)},", f"    align: ({alignment},),"]
    lines.append("    table.header(" + ", ".join(_typst_text(column.heading()) for column in table.columns) + "),")
    lines += ["    " + ", ".join(_typst_text(cell) for cell in cells) + "," for cells in table.rows]
    lines += ["  ),", f"  caption: {_typst_text(table.title)},", ")"]
    lines += [_typst_text(note)[1:-1] for note in table.notes]
    return "\n".join(lines)


_RENDERERS: dict[str, Callable[[PlainTable], str]] = {
    "terminal": _terminal,
    "md": _markdown,
    "csv": _csv,
    "latex": _latex,
    "typst": _typst,
}
