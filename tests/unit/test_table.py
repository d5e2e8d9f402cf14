"""One table in five formats: every cell arrives whole, whatever characters it holds."""

import csv
import io
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cs336_systems.table import FORMATS, Column, Table

quick = settings(max_examples=150, deadline=None)

SPECIALS = "|&%$#_{}~^\\*[]<>@`"
CHINESE = "模型内存（峰值）"
text = st.text(alphabet=[*SPECIALS, *CHINESE, *" \n,;\"'±×a1."], max_size=12)


@st.composite
def tables(draw, cells=text):
    width = draw(st.integers(1, 4))
    columns = [
        Column(draw(cells), draw(st.sampled_from(["", "ms", "GiB", "%"])), draw(st.booleans())) for _ in "x" * width
    ]
    rows = draw(st.lists(st.lists(cells, min_size=width, max_size=width), max_size=4))
    return Table(draw(cells), columns, rows, draw(st.lists(cells, max_size=2)))


def one_line(cell):
    return " ".join(cell.split())


SMALL = Table(
    "bench: time · H200",
    [Column("size", numeric=False), Column("step", "ms"), Column("share")],
    [["small", "12.50", "10%"], ["模型", "1,234.00", "100%"]],
    ["a note about small_model", "第二条"],
)


def test_terminal():
    assert SMALL.render("terminal").splitlines() == [
        "bench: time · H200",
        "size       step  share",
        "           (ms)",
        "──────────────────────",
        "small     12.50    10%",
        "模型   1,234.00   100%",
        "  ! a note about small_model",
        "  ! 第二条",
    ]


def test_markdown():
    assert SMALL.render("md").splitlines() == [
        "**bench: time · H200**",
        "",
        "| size | step (ms) | share |",
        "|:---|---:|---:|",
        "| small | 12.50 | 10% |",
        "| 模型 | 1,234.00 | 100% |",
        "",
        "- a note about small_model",
        "- 第二条",
    ]


def test_csv():
    assert SMALL.render("csv").splitlines() == ["size,step (ms),share", "small,12.50,10%", '模型,"1,234.00",100%']


def test_latex():
    assert SMALL.render("latex").splitlines() == [
        r"\begin{table}",
        r"  \centering",
        r"  \caption{bench: time · H200}",
        r"  \begin{tabular}{lrr}",
        r"    \toprule",
        r"    size & step (ms) & share \\",
        r"    \midrule",
        r"    small & 12.50 & 10\% \\",
        r"    模型 & 1,234.00 & 100\% \\",
        r"    \bottomrule",
        r"  \end{tabular}",
        r"  \par\footnotesize a note about small\_model",
        r"  \par\footnotesize 第二条",
        r"\end{table}",
    ]


def test_typst():
    lines = SMALL.render("typst").splitlines()
    assert lines[:4] == ["#figure(", "  table(", "    columns: 3,", "    align: (left, right, right,),"]
    assert lines[4:7] == [
        "    table.header([size], [step (ms)], [share]),",
        "    [small], [12.50], [10%],",
        "    [模型], [1,234.00], [100%],",
    ]
    assert lines[7:10] == ["  ),", "  caption: [bench: time · H200],", ")"]
    assert r"a note about small\_model" in lines[10:]


@pytest.mark.parametrize("format", FORMATS)
def test_a_table_without_rows_still_has_its_headings(format):
    rendered = Table("empty", [Column("size", numeric=False), Column("step", "ms")], []).render(format)
    assert "size" in rendered
    assert "step" in rendered


@quick
@given(tables(), st.sampled_from([name for name in FORMATS if name != "csv"]))
def test_every_format_keeps_the_chinese_text_of_every_part(table, format):
    rendered = table.render(format)
    parts = [
        table.title,
        *(column.name for column in table.columns),
        *(c for row in table.rows for c in row),
        *table.notes,
    ]
    for part in parts:
        for run in re.findall(f"[{CHINESE}]+", part):
            assert run in rendered


# -- terminal ---------------------------------------------------------------------------------------------------------


def screen(line):
    """What stands in each column of the screen: Chinese characters fill two."""
    return [part for char in line for part in ((char, "") if char in CHINESE else (char,))]


@quick
@given(tables(st.text(alphabet=[*SPECIALS, *CHINESE, *" ab±"], max_size=10)))
def test_terminal_columns_line_up_on_the_screen(table):
    columns = [*table.columns, Column("end")]  # a last cell that is never blank, so that no line is stripped
    rows = [[*row, "1"] for row in table.rows]
    heads = [[column.name for column in columns]]
    if any(column.unit for column in columns):
        heads.append([f"({column.unit})" if column.unit else "" for column in columns])
    lines = Table("title", columns, rows).render("terminal").splitlines()[1:]
    rule = lines.pop(len(heads))
    grid = [*heads, *rows]
    assert set(rule) == {"─"}
    assert len(lines) == len(grid)
    widths = [max(len(screen(cells[index])) for cells in grid) for index in range(len(columns))]
    assert len(rule) == sum(widths) + 2 * (len(widths) - 1)
    for line, cells in zip(lines, grid, strict=True):
        shown = screen(line)
        shown += [" "] * (len(rule) - len(shown))
        assert len(shown) == len(rule)
        start = 0
        for cell, width, column in zip(cells, widths, columns, strict=True):
            padding = [" "] * (width - len(screen(cell)))
            assert shown[start : start + width] == (
                padding + screen(cell) if column.numeric else screen(cell) + padding
            )
            start += width + 2


# -- CSV --------------------------------------------------------------------------------------------------------------


@quick
@given(tables())
@example(Table("t", [Column("a")], [[""], ["\n"], [""]]))
def test_csv_reads_back_to_the_same_cells(table):
    found = list(csv.reader(io.StringIO(table.render("csv"), newline=""), strict=True))
    assert found == [[column.heading for column in table.columns], *map(list, table.rows)]


def test_csv_reads_back_a_carriage_return():
    """Before Python 3.13 the csv module leaves \\r unquoted unless it is part of the line terminator."""
    table = Table("t", [Column("a"), Column("b")], [["one\rtwo", "three"]])
    assert list(csv.reader(io.StringIO(table.render("csv"), newline="")))[1:] == [["one\rtwo", "three"]]


# -- Markdown ---------------------------------------------------------------------------------------------------------


def unescaped_pipes(line):
    """Pipes after an even number of backslashes: two backslashes are a backslash, and the pipe then divides cells."""
    return sum(len(before) % 2 == 0 for before in re.findall(r"(\\*)\|", line))


@quick
@given(tables(st.text(alphabet=[*SPECIALS.replace("\\", ""), *CHINESE, *" \nab"], max_size=12)))
def test_every_markdown_row_has_a_pipe_on_each_side_of_every_cell(table):
    bare = Table("title", table.columns, table.rows)
    lines = bare.render("md").splitlines()[2:]
    assert len(lines) == 2 + len(table.rows)
    assert {unescaped_pipes(line) for line in lines} == {len(table.columns) + 1}


def test_a_backslash_before_a_pipe_does_not_unescape_it():
    row = Table("title", [Column("a"), Column("b")], [["left\\|right", "x"]]).render("md").splitlines()[-1]
    assert unescaped_pipes(row) == 3
    assert row.count("\\") == 3, "one for the pipe, and the backslash of the cell twice"


# -- a newline where a format has none --------------------------------------------------------------------------------

TWO_LINES = Table("a\ntitle", [Column("x\ny", numeric=False), Column("z", "ms")], [["a\nb", "1"]], ["first\nsecond"])


def test_a_newline_does_not_break_the_lines_of_the_terminal():
    lines = TWO_LINES.render("terminal").splitlines()
    assert len(lines) == 6, "title, two of headings, rule, row, note"


def test_a_newline_does_not_break_the_lines_of_markdown():
    lines = TWO_LINES.render("md").splitlines()
    assert len(lines) == 7, "title, blank, headings, rule, row, blank, note"


# -- LaTeX ------------------------------------------------------------------------------------------------------------

LATEX_TOKEN = re.compile(
    r"\\text(?P<named>backslash|asciitilde|asciicircum)\{\}"
    r"|\\(?P<escaped>[&%$#_{}])"
    r"|\$\\(?P<symbol>pm|times)\$"
    r"|(?P<group>[{}])"
    r"|(?P<plain>[^&%$#_~^\\])"
)
LATEX_NAMED = {"backslash": "\\", "asciitilde": "~", "asciicircum": "^", "pm": "±", "times": "×"}


def read_latex(source):
    """The text that a piece of LaTeX typesets; fails on a special character that is not escaped."""
    found, position = "", 0
    while position < len(source):
        token = LATEX_TOKEN.match(source, position)
        assert token, f"unescaped {source[position]!r} in {source!r}"
        name = token["named"] or token["symbol"]
        found += LATEX_NAMED[name] if name else token["escaped"] or token["plain"] or ""
        position = token.end()
    return found


def latex_rows(rendered):
    body = re.search(r"\\toprule\n(.*)\\midrule\n(.*)    \\bottomrule\n", rendered, re.DOTALL)
    rows = [row for part in body.groups() for row in part.split(" \\\\\n")[:-1]]
    return [[one_line(read_latex(cell)) for cell in re.split(r"(?<!\\)&", row)] for row in rows]


@quick
@given(tables())
@example(Table("t", [Column(SPECIALS)], [[SPECIALS], [SPECIALS[::-1]]], [SPECIALS]))
def test_latex_typesets_every_cell_as_it_was(table):
    rendered = table.render("latex")
    headings = [one_line(column.heading) for column in table.columns]
    assert latex_rows(rendered) == [headings, *([one_line(cell) for cell in row] for row in table.rows)]
    caption = re.search(r"\\caption\{(.*)\}\n  \\begin\{tabular\}", rendered, re.DOTALL)
    assert one_line(read_latex(caption[1])) == one_line(table.title)
    notes = rendered.removesuffix("\n\\end{table}").split("  \\par\\footnotesize ")[1:]
    assert [one_line(read_latex(note)) for note in notes] == [one_line(note) for note in table.notes]


@pytest.mark.parametrize("first", ["[x]", "*"])
def test_a_cell_is_not_taken_for_the_argument_of_the_command_before_it(first):
    r"""`\\` and `\toprule` look past the line's end for `[length]`, and `\\` for `*`."""
    column = Column(first, numeric=False)
    rendered = Table("t", [column, Column("b")], [[first, "1"], [first, "2"]]).render("latex")
    assert not re.search(r"(\\\\|\\toprule|\\midrule)\s*[\[*]", rendered)


# -- Typst ------------------------------------------------------------------------------------------------------------


def read_typst(source, count):
    """The text of the first `count` content blocks `[...]`, unescaped; fails on markup that is not escaped."""
    blocks, position = [], 0
    while len(blocks) < count:
        position = source.index("[", position) + 1
        found = ""
        while source[position] != "]":
            if source[position] == "\\":
                position += 1
            else:
                assert source[position] not in "#*_`$<>@[~", f"unescaped {source[position]!r} in {source!r}"
            found += source[position]
            position += 1
        blocks.append(one_line(found))
    return blocks


@quick
@given(tables())
@example(Table("t", [Column(SPECIALS)], [[SPECIALS], [SPECIALS[::-1]]], [SPECIALS]))
def test_typst_typesets_every_cell_as_it_was(table):
    cells = [*(column.heading for column in table.columns), *(cell for row in table.rows for cell in row), table.title]
    assert read_typst(table.render("typst"), len(cells)) == [one_line(cell) for cell in cells]


@pytest.mark.parametrize("cell", ["- (30.6)", "+ x", "= x", "/ x: y"])
def test_typst_does_not_take_a_cell_for_a_list_or_a_heading(cell):
    """`cs336 fit` writes `- (30.6)` where nothing fits; Typst would set a bullet."""
    rendered = Table("t", [Column("a")], [[cell]]).render("typst")
    assert f"[{cell}]" not in rendered


def test_typst_does_not_take_a_cell_for_a_comment():
    """A comment would swallow the closing bracket and with it the rest of the line."""
    rendered = Table("t", [Column("a")], [["a//b"], ["a/*b"]]).render("typst")
    assert "//" not in rendered
    assert "/*" not in rendered


@pytest.mark.parametrize("format", ["latex", "typst"])
def test_a_flag_in_a_note_keeps_its_two_dashes(format):
    """Both set `--` as one long dash, and the advice `add --warmup_steps 5` can then not be copied."""
    rendered = Table("t", [Column("a")], [["1"]], ["add --warmup_steps 5"]).render(format)
    assert "--" not in rendered
