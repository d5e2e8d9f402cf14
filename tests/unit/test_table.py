"""One table in five formats and two languages: every cell arrives whole, whatever characters it holds."""

import csv
import io
import itertools
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cs336_systems.table import FORMATS, Column, Table, word
from cs336_systems.text import Text, listed, say

quick = settings(max_examples=60, deadline=None)

SPECIALS = "|&%$#_{}~^\\*[]<>@`"
CHINESE = "模型内存（峰值）"
text = st.text(alphabet=[*SPECIALS, *CHINESE, *" \n,;\"'±×a1."], max_size=12)


@st.composite
def tables(draw, cells=text):
    width = draw(st.integers(1, 4))
    columns = [
        Column(Text(draw(cells)), draw(st.sampled_from(["", "ms", "GiB", "%"])), draw(st.booleans()))
        for _ in range(width)
    ]
    rows = draw(st.lists(st.lists(cells, min_size=width, max_size=width), max_size=4))
    return Table(Text(draw(cells)), columns, rows, [Text(note) for note in draw(st.lists(cells, max_size=2))])


def table(rows, headings=("a",), notes=()):
    """A table of words under short headings."""
    return Table(Text("t"), [word(Text(name)) for name in headings], rows, [Text(note) for note in notes])


def one_line(cell):
    return " ".join(cell.split())


SMALL = Table(
    Text("bench: time · H200", "bench：时间 · H200"),
    [word(Text("size", "规模")), Column(Text("step", "单步"), "ms"), Column(Text("MFU"))],
    [["small", "12.50", "10%"], ["模型", Text("1,234.00", "慢"), "100%"]],
    [Text("a note about small_model", "附注"), Text("第二条")],
)

RENDERED = {
    "terminal": """\
bench: time · H200
size       step   MFU
           (ms)
─────────────────────
small     12.50   10%
模型   1,234.00  100%
  ! a note about small_model
  ! 第二条""",
    "md": """\
**bench: time · H200**

| size | step (ms) | MFU |
|:---|---:|---:|
| small | 12.50 | 10% |
| 模型 | 1,234.00 | 100% |

- a note about small_model
- 第二条""",
    "csv": """\
size,step (ms),MFU
small,12.50,10%
模型,1234.00,100%""",
    "latex": r"""\begin{table}
  \centering
  \caption{bench: time · H200}
  \begin{tabular}{lrr}
    \toprule
    size & step (ms) & MFU \\
    \midrule
    small & 12.50 & 10\% \\
    模型 & 1,234.00 & 100\% \\
    \bottomrule
  \end{tabular}
  \par\footnotesize a note about small\_model
  \par\footnotesize 第二条
\end{table}""",
    "typst": r"""#figure(
  table(
    columns: 3,
    align: (left, right, right,),
    table.header([size], [step (ms)], [MFU]),
    [small], [12.50], [10%],
    [模型], [1,234.00], [100%],
  ),
  caption: [bench: time · H200],
)
a note about small\_model
第二条""",
}


@pytest.mark.parametrize("format", FORMATS)
def test_formats(format):
    assert SMALL.render(format) == RENDERED[format]


@pytest.mark.parametrize("format", FORMATS)
def test_chinese(format):
    """Titles, headings, cells and notes; a text without Chinese serves for both languages."""
    rendered = SMALL.render(format, "zh")
    for chinese in ("规模", "单步 (ms)" if format != "terminal" else "单步", "MFU", "慢"):
        assert chinese in rendered
    for chinese in ("bench：时间 · H200", "附注", "第二条"):
        assert (chinese in rendered) == (format != "csv")
    assert "step" not in rendered


def test_texts_are_filled_and_joined_in_both_languages():
    name = Text("forward", "前向")
    assert say("{} takes {}", "{} 用时 {}", name, "5 ms") == Text("forward takes 5 ms", "前向 用时 5 ms")
    assert listed([name, "loss"]) == Text("forward, loss", "前向、loss")
    assert [Text("MFU").in_(language) for language in ("en", "zh")] == ["MFU", "MFU"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_table_without_rows_still_has_its_headings(format):
    rendered = table([], ["size", "step"]).render(format)
    assert "size" in rendered
    assert "step" in rendered


@quick
@given(tables(), st.sampled_from([name for name in FORMATS if name != "csv"]))
def test_every_format_keeps_the_chinese_text_of_every_part(table, format):
    rendered = table.render(format)
    parts = [
        table.title.en,
        *(column.name.en for column in table.columns),
        *(c for row in table.rows for c in row),
        *(note.en for note in table.notes),
    ]
    for part in parts:
        for run in re.findall(f"[{CHINESE}]+", part):
            assert run in rendered


# -- terminal ---------------------------------------------------------------------------------------------------------


def screen(line):
    """The characters by column of the screen: Chinese characters fill two."""
    return [part for char in line for part in ((char, "") if char in CHINESE else (char,))]


@quick
@given(tables(st.text(alphabet=[*SPECIALS, *CHINESE, *" ab±"], max_size=10)))
def test_terminal_columns_line_up_on_the_screen(table):
    columns = [*table.columns, Column(Text("end"))]  # a last cell that is never blank, so that no line is stripped
    rows = [[*row, "1"] for row in table.rows]
    heads = [[column.name.en for column in columns]]
    if any(column.unit for column in columns):
        heads.append([f"({column.unit})" if column.unit else "" for column in columns])
    lines = Table(Text("title"), columns, rows).render("terminal").splitlines()[1:]
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


@pytest.mark.parametrize(
    ("cell", "plain"),
    [
        ("10,240", "10240"),
        ("-1,234.5", "-1234.5"),
        ("1,234 ± 1,001", "1234 ± 1001"),
        ("1,234,567.0 to 2,345.6", "1234567.0 to 2345.6"),
        ("11.956, 10.371", "11.956, 10.371"),
        ("2,4,8", "2,4,8"),
        ("0.123,456", "0.123,456"),
    ],
)
def test_numbers_in_csv_have_no_separators(cell, plain):
    """Programs read them as numbers; words stay as they are."""
    numbers = Table(Text("t"), [Column(Text("a")), word(Text("b"))], [[cell, cell]])
    assert list(csv.reader(io.StringIO(numbers.render("csv"))))[1] == [plain, cell]
    assert cell in numbers.render("md")


@quick
@given(tables())
@example(table([[""], ["\n"], [""]]))
@example(table([["'@"], ["@"], ["=1"]]))
def test_csv_reads_back_to_the_same_cells(table):
    """With an apostrophe before what a spreadsheet would run."""
    found = list(csv.reader(io.StringIO(table.render("csv"), newline=""), strict=True))
    expected = [[column.heading() for column in table.columns], *table.rows]
    assert list(map(len, found)) == list(map(len, expected))
    for read, cell in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        assert read == cell or (read == f"'{cell}" and cell.lstrip()[:1] in tuple("=+-@＝＋－＠"))


# -- Markdown ---------------------------------------------------------------------------------------------------------


def unescaped_pipes(line):
    """Pipes after an even number of backslashes: two backslashes are a backslash, and the pipe then divides cells."""
    return sum(len(before) % 2 == 0 for before in re.findall(r"(\\*)\|", line))


@quick
@given(tables(st.text(alphabet=[*SPECIALS.replace("\\", ""), *CHINESE, *" \nab"], max_size=12)))
def test_every_markdown_row_has_a_pipe_on_each_side_of_every_cell(table):
    bare = Table(Text("title"), table.columns, table.rows)
    lines = bare.render("md").splitlines()[2:]
    assert len(lines) == 2 + len(table.rows)
    assert {unescaped_pipes(line) for line in lines} == {len(table.columns) + 1}


def test_a_backslash_before_a_pipe_does_not_unescape_it():
    row = table([["left\\|right", "x"]], ["a", "b"]).render("md").splitlines()[-1]
    assert unescaped_pipes(row) == 3
    assert row.count("\\") == 3, "one for the pipe, and the backslash of the cell twice"


@pytest.mark.parametrize(("format", "lines"), [("terminal", 6), ("md", 7)])
def test_a_newline_in_a_text_does_not_break_a_line(format, lines):
    columns = [word(Text("x\ny")), Column(Text("z"), "ms")]
    broken = Table(Text("a\ntitle"), columns, [["a\nb", "1"]], [Text("first\nsecond")])
    assert len(broken.render(format).splitlines()) == lines


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
@example(table([[SPECIALS], [SPECIALS[::-1]]], [SPECIALS], [SPECIALS]))
def test_latex_typesets_every_cell_as_it_was(table):
    rendered = table.render("latex")
    headings = [one_line(column.heading()) for column in table.columns]
    assert latex_rows(rendered) == [headings, *([one_line(cell) for cell in row] for row in table.rows)]
    caption = re.search(r"\\caption\{(.*)\}\n  \\begin\{tabular\}", rendered, re.DOTALL)
    assert one_line(read_latex(caption[1])) == one_line(table.title.en)
    notes = rendered.removesuffix("\n\\end{table}").split("  \\par\\footnotesize ")[1:]
    assert [one_line(read_latex(note)) for note in notes] == [one_line(note.en) for note in table.notes]


@pytest.mark.parametrize("first", ["[x]", "*"])
def test_a_cell_is_not_taken_for_the_argument_of_the_command_before_it(first):
    r"""`\\` and `\toprule` look past the line's end for `[length]`, and `\\` for `*`."""
    rendered = table([[first, "1"], [first, "2"]], [first, "b"]).render("latex")
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
@example(table([[SPECIALS], [SPECIALS[::-1]]], [SPECIALS], [SPECIALS]))
def test_typst_typesets_every_cell_as_it_was(table):
    cells = [
        *(column.heading() for column in table.columns),
        *(cell for row in table.rows for cell in row),
        table.title.en,
    ]
    assert read_typst(table.render("typst"), len(cells)) == [one_line(cell) for cell in cells]


@pytest.mark.parametrize("cell", ["- (30.6)", "+ x", "= x", "/ x: y", "a//b", "a/*b"])
def test_typst_takes_no_cell_for_a_list_a_heading_or_a_comment(cell):
    """`cs336 fit` writes `- (30.6)` where nothing fits; Typst would set a bullet."""
    assert f"[{cell}]" not in table([[cell]]).render("typst")


@pytest.mark.parametrize("format", ["latex", "typst"])
def test_a_flag_in_a_note_keeps_its_two_dashes(format):
    """Both set `--` as one long dash, and the advice `add --warmup_steps 5` can then not be copied."""
    assert "--" not in table([["1"]], notes=["add --warmup_steps 5"]).render(format)
