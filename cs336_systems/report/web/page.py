"""A report as one HTML file without network access: both languages, light and dark, sortable tables, charts in SVG.

Without JavaScript the page is readable in the language it was written in. No text of the records can run as code: every
text is escaped, links lead only to relative paths and http(s), and the page's policy forbids foreign scripts.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from cs336_systems.report.document import Chart, Document, Highlight, Link, Section
from cs336_systems.report.web.assets import asset, embedded_json, policy
from cs336_systems.report.web.controls import aria_label, attributes, controls, html_attributes, html_text
from cs336_systems.report.web.svg import svg
from cs336_systems.report.web.svg.placement import NARROW
from cs336_systems.table import Column, Table
from cs336_systems.text import LANGUAGES, Language, Text, say

FIRST_ROWS = 12
"""Rows of a tall table that are visible before it is unfolded."""
TALL = 16
"""Minimum rows of a tall table: hiding only two or three rows would not be worth a button."""
MANY_COLUMNS = 12
"""Minimum columns of a table that is set in a smaller font."""
STYLED_COLUMNS = 24
"""Columns that page.css can align by a class of their table."""
LONG_CELL = 32
"""Minimum characters of a cell that may wrap: the name of a kernel has hundreds."""
MOST_ROWS = 2000
"""Maximum rows of a table on the page: browsers handle thousands, not hundreds of thousands."""

_CONTENTS = Text("Contents", "目录")
_REMARKS = Text("Remarks on the data", "数据说明")
_LINKS = Text("See also", "另见")
_SKIP = Text("Skip to the content", "跳到正文")
_COPY = (Text("Copy as Markdown", "复制为 Markdown"), Text("Copy as LaTeX", "复制为 LaTeX"))
_FIRST_ROW = (4, 7)
"""Lines before the rows of a table in Markdown and in LaTeX: the script copies rows in the order shown."""
_SUMMARY = Text("In short", "概要")
_FACTS = Text("Versions and commits", "版本与提交")
_OTHERS = Text("More", "其他")
_FEWER = Text("Show fewer", "收起")
_NOTHING = Text("There are no measurements in this report.", "此报告中没有测量结果。")


def page(document: Document, language: Language = "en") -> str:
    """Return the whole file; `language` is the one in which it opens."""
    return _Page(language).write(document)


class _Folded(NamedTuple):
    """A table on the page: its id, title and HTML."""

    anchor: str
    title: Text
    html: str


class _Entry(NamedTuple):
    """A line of the contents."""

    anchor: str
    title: Text
    is_group: bool = False


class _Page:
    def __init__(self, language: Language):
        self.language = language
        self.copies: list[list[str]] = []
        self.level = 2
        self.hero: Chart | None = None
        self.taken = {"main", "contents", "copies", "tooltip", "language", "theme", "summary", "missing", "remarks"}

    def write(self, document: Document) -> str:
        self.hero = document.hero
        anchors = {id(section): self._anchor(section.name) for section in document.sections}
        groups = _grouped(document.sections)
        main, entries = [], []
        if summary := self._summary(document, anchors):
            main.append(summary)
            entries.append(_Entry("summary", _SUMMARY))
        for group, sections in groups:
            level = 2
            if group:
                level, anchor = 3, self._anchor(f"group-{group.en}")
                main.append(f'<h2 class="group" id="{anchor}">{html_text(group)}</h2>\n')
                entries.append(_Entry(anchor, group, is_group=True))
            main += [self._section(section, anchors[id(section)], level) for section in sections]
            entries += [_Entry(anchors[id(section)], section.title) for section in sections]
        if document.remarks:
            items = _items(document.remarks)
            main.append(f'<section id="remarks"><h2>{html_text(_REMARKS)}</h2><ul>{items}</ul></section>')
            entries.append(_Entry("remarks", _REMARKS))
        if document.missing:
            main.append(_missing(document.missing))
        body = (
            f'<a class="skip" href="#main">{html_text(_SKIP)}</a>\n'
            f"{self._header(document)}\n"
            f'<div class="layout">\n{_contents(entries)}\n'
            f'<main id="main" tabindex="-1" data-rows="{FIRST_ROWS}">\n'
            f"{''.join(main) or f'<p>{html_text(_NOTHING)}</p>'}</main>\n</div>\n"
            '<div id="tooltip" aria-hidden="true" hidden></div>\n'
        )
        scripts = (
            f'<script id="copies" type="application/json">{embedded_json(self.copies)}</script>\n'
            f"<script>{asset('controls.js')}</script>\n<script>{asset('page.js')}</script>\n"
        )
        whole = f"{self._head(document.title)}<body>\n{body}{scripts}</body>\n</html>\n"
        return whole.encode("utf-8", "replace").decode("utf-8")  # lone surrogates of a broken log have no encoding

    def _head(self, title: Text) -> str:
        early = asset("page_early.js")
        allowed = policy(early, asset("controls.js"), asset("page.js"))
        return (
            f'<!doctype html>\n<html {html_attributes(self.language)}>\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{allowed}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title{attributes('data-', title)}>{escape(title.in_(self.language))}</title>\n"
            f'<link rel="icon" href="data:,">\n<style>{asset("page.css")}</style>\n'
            f"<script>{early}</script>\n</head>\n"
        )

    def _header(self, document: Document) -> str:
        facts = "".join(
            f"<div><dt>{html_text(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in document.facts.items()
        )
        first = html_text(next(iter(document.facts.values()), ""))
        return (
            f'<header><div class="top"><h1>{html_text(document.title)}</h1>{controls(self.language)}</div>'
            + (
                f'<details class="facts"><summary><b>{first}</b> <small>{html_text(_FACTS)}</small></summary>'
                f"<dl>{facts}</dl></details>"
                if facts
                else ""
            )
            + "</header>"
        )

    def _summary(self, document: Document, anchors: Mapping[int, str]) -> str:
        """Return the first screen: large numbers, one chart, why to trust them; all first findings are folded below."""
        by_name = {section.name: anchors[id(section)] for section in document.sections}
        numbers = "".join(_number(one, by_name.get(one.section, "")) for one in document.highlights)
        hero = self._figure(document.hero) if document.hero else ""
        found = [(anchors[id(section)], section) for section in document.sections if section.findings]
        lines = "".join(
            f'<li><a href="#{anchor}">{html_text(section.title)}</a><span>{html_text(section.findings[0])}</span></li>'
            for anchor, section in found
        )
        if not (numbers or hero or lines):
            return ""
        brief = f'<ul class="brief">{lines}</ul>' if lines else ""
        if numbers or hero:
            every = say("All findings, one line each ({})", "全部结论，每条一行（{}）", str(len(found)))
            brief = (
                f'<details class="all"><summary>{html_text(every)}</summary>{brief}</details>' if len(found) > 1 else ""
            )
        return (
            f'<section id="summary" aria-labelledby="summary-title"><h2 id="summary-title">{html_text(_SUMMARY)}</h2>'
            + (f'<ul class="numbers">{numbers}</ul>' if numbers else "")
            + (f'<div class="hero">{hero}</div>' if hero else "")
            + (f'<p class="trust">{html_text(document.trust)}</p>' if document.trust else "")
            + f"{brief}</section>\n"
        )

    def _section(self, section: Section, anchor: str, level: int) -> str:
        heading = f"{anchor}-title"
        self.level = level
        parts = [
            f'<section id="{anchor}" aria-labelledby="{heading}">'
            f'<h{level} class="title" id="{heading}">{html_text(section.title)}</h{level}>'
        ]
        if any(section.question):
            parts.append(f'<p class="question">{html_text(section.question)}</p>')
        parts += [*self._board(section), *self._tables(section)]
        if section.links:
            links = "".join(f"<li>{_link(link)}</li>" for link in section.links)
            heading = _heading_of(level + 1, html_text(_LINKS), "see") if len(parts) > 2 else ""
            parts.append(f'{heading}<ul class="links">{links}</ul>')
        return "\n".join([*parts, "</section>\n"])

    def _board(self, section: Section) -> list[str]:
        """Return findings and charts, in two columns on a wide window. Findings take a whole row unless that would
        leave a chart alone in its row. The chart of the first screen is not repeated."""
        cells = [self._figure(chart) for chart in section.charts if chart != self.hero]
        if section.findings:
            whole = "" if len(cells) % 2 else " whole"
            cells.insert(0, f'<ul class="findings{whole}">{_items(section.findings)}</ul>')
        return ['<div class="board">', *cells, "</div>"] if cells else []

    def _figure(self, chart: Chart) -> str:
        note = f"<small>{html_text(chart.note)}</small>" if chart.note else ""
        return (
            f'<figure id="{self._anchor(chart.name)}"><figcaption>{html_text(chart.title)}{note}</figcaption>'
            f'<div class="frame"><div class="plot">{svg(chart)}{svg(chart, NARROW)}</div></div></figure>'
        )

    def _tables(self, section: Section) -> list[str]:
        """Return the first table, or the first two if both are short and there is at most one chart; the others are
        folded into one element."""
        tables = []
        for table in section.tables:
            anchor = self._anchor(f"table-{table.title.en.split(' · ')[0]}")
            title = _without_prefix(table.title, section.name)
            region = say("{}: {} (table)", "{}：{}（表格）", section.title, title)
            tables.append(_Folded(anchor, title, self._table(table, title, anchor, region)))
        is_short = all(len(table.rows) < TALL for table in section.tables[:2])
        first = 2 if is_short and len(section.charts) < 2 else 1
        return [table.html for table in tables[:first]] + _folded(tables[first:])

    def _table(self, whole: Table, title: Text, anchor: str, region: Text) -> str:
        table = _cut(whole)
        number = len(self.copies)
        markdown, latex = (table.render(format) for format in ("md", "latex"))
        in_markdown = markdown.split("\n")[_FIRST_ROW[0] :][: len(table.rows)]
        copies = (markdown, map(_shown_row, table.rows)), (latex, map(_latex_row, in_markdown))
        self.copies.append([_without_lines(*copy, first) for copy, first in zip(copies, _FIRST_ROW, strict=True)])
        buttons = "".join(
            f'<button data-copy="{number} {format} {_FIRST_ROW[format]}">{html_text(text)}</button>'
            for format, text in enumerate(_COPY)
        )
        heads = "".join(_heading(column) for column in table.columns)
        rows = "".join(_row(row, table.columns) for row in table.rows)
        tall = len(table.rows) >= TALL
        classes = [*(["dense"] if len(table.columns) >= MANY_COLUMNS else []), *_word_columns(table.columns)]
        kind = f' class="{" ".join(classes)}"' if classes else ""
        return (
            f'<div class="table{" short" if tall else ""}" id="{anchor}">{_heading_of(self.level + 1, _title(title))}'
            f'<div class="frame"><div class="scroll" tabindex="0" role="region"{aria_label(region, self.language)}>'
            f"<table{kind}>"
            f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></div>"
            + f'<div class="foot">{_rows_button(len(table.rows), anchor) if tall else ""}'
            + f'<div class="copy">{buttons}<output></output></div></div>'
            + (f'<ul class="notes">{_items(table.notes)}</ul>' if table.notes else "")
            + "</div>"
        )

    def _anchor(self, name: str) -> str:
        """Return an id made from a name, unique on the page."""
        plain = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "part"
        found, number = plain, 1
        while found in self.taken or f"{found}-title" in self.taken:
            number += 1
            found = f"{plain}-{number}"
        self.taken |= {found, f"{found}-title"}
        return found


def _items(texts: Sequence[Text]) -> str:
    return "".join(f"<li>{html_text(text)}</li>" for text in texts)


def _without_lines(text: str, derived: Iterable[str], first: int) -> str:
    """Return the text with lines, from `first` on, emptied if page.js can derive them: nearly all rows."""
    lines = text.split("\n")
    for number, line in enumerate(derived, start=first):
        if lines[number] == line:
            lines[number] = ""
    return "\n".join(lines)


def _shown_row(cells: Sequence[str | Text]) -> str:
    """Return the row in Markdown as page.js makes it from the cells on the page."""
    return "| " + " | ".join(cell.en if isinstance(cell, Text) else cell for cell in cells) + " |"


def _latex_row(markdown: str) -> str:
    """Return the row in LaTeX as page.js makes it from the Markdown row."""
    escaped = re.sub(r"[&%$#_{}]", r"\\\g<0>", markdown[2:-2]).replace("±", r"$\pm$").replace("×", r"$\times$")
    return "    " + " & ".join(escaped.split(" | ")) + r" \\"


def _heading_of(level: int, inside: str, kind: str = "") -> str:
    return f"<h{level}{f' class={kind}' if kind else ''}>{inside}</h{level}>"


def _grouped(sections: Sequence[Section]) -> list[tuple[Text | None, list[Section]]]:
    """Return sections under their headings, in order of appearance; without headings if all sections share one."""
    groups: dict[Text, list[Section]] = {}
    for section in sections:
        groups.setdefault(section.group or _OTHERS, []).append(section)
    return [*groups.items()] if len(groups) > 1 else [(None, [*sections])]


def _number(highlight: Highlight, anchor: str) -> str:
    value = {one: highlight.value.in_(one).partition(" ") for one in LANGUAGES}
    number, unit = (Text(*(value[one][part] for one in LANGUAGES)) for part in (0, 2))
    inside = (
        f"<b>{html_text(number)}{f' <i>{html_text(unit)}</i>' if any(unit) else ''}</b>"
        f"<span>{html_text(highlight.what)}</span><small>{html_text(highlight.detail)}</small>"
    )
    return f'<li><a href="#{anchor}">{inside}</a></li>' if anchor else f"<li><div>{inside}</div></li>"


def _contents(entries: Sequence[_Entry]) -> str:
    items = "".join(
        f'<li{" class=group" if is_group else ""}><a href="#{anchor}">{html_text(title)}</a></li>'
        for anchor, title, is_group in entries
    )
    return (
        f'<nav id="contents" aria-label="{_CONTENTS.en}"{attributes("data-aria-", _CONTENTS)}>'
        f'<details open><summary>{html_text(_CONTENTS)}<span class="here"></span></summary>'
        f"<ol>{items}</ol></details></nav>"
    )


def _missing(missing: Mapping[str, str]) -> str:
    """Return one folded line: the experiments that were not measured, with the commands that measure them."""
    items = "".join(f"<li>{escape(name)}: <code>{escape(command)}</code></li>" for name, command in missing.items())
    count = str(len(missing))
    title = say("Not measured: {} experiments", "未测量：{} 项实验", count)
    if len(missing) == 1:
        title = Text("Not measured: 1 experiment", title.zh)
    return f'<details id="missing"><summary>{html_text(title)}</summary><ul class="missing">{items}</ul></details>\n'


def _folded(tables: Sequence[_Folded]) -> list[str]:
    """Return tables inside one element that opens. A single table is named by its summary, several by a list of
    links."""
    if not tables:
        return []
    if len(tables) == 1:
        summary, names = html_text(Text("One more table: ", "另有一张表：")) + _title(tables[0].title), ""
    else:
        summary = html_text(say("{} more tables", "另有 {} 张表", str(len(tables))))
        links = "".join(f'<li><a href="#{table.anchor}">{_title(table.title)}</a></li>' for table in tables)
        names = f"<ol>{links}</ol>"
    return [
        f'<details class="others"><summary>{summary}</summary>{names}',
        *(table.html for table in tables),
        "</details>",
    ]


def _without_prefix(title: Text, section: str) -> Text:
    """Return the title of a table without the name of its section in front."""
    return Text(*(re.sub(f"^{re.escape(section)}(: |：)(?=.)", "", title.in_(one)) for one in LANGUAGES))


def _title(title: Text) -> str:
    """Return the subject of a table and, in smaller letters after the first " · ", its machine and configuration."""
    parts = {one: title.in_(one).split(" · ", 1) for one in LANGUAGES}
    subject, where = (Text(*("".join(parts[one][i : i + 1]) for one in LANGUAGES)) for i in (0, 1))
    capital = subject.en[:1].upper() + subject.en[1:]
    return html_text(Text(capital, capital if subject.in_("zh") == subject.en else subject.zh)) + (
        f" <small>{html_text(where)}</small>" if any(where) else ""
    )


def _heading(column: Column) -> str:
    kind = ' class="r"' if column.numeric else ""
    name = Text(*(column.heading(one) for one in LANGUAGES))
    return f'<th scope="col"{kind}><button>{html_text(name)}</button></th>'


def _rows_button(count: int, anchor: str) -> str:
    every = say("Show all {} rows", "显示全部 {} 行", f"{count:,}")
    part = say("{} of {} rows", "{} 行，共 {} 行", str(FIRST_ROWS), f"{count:,}")
    return (
        f'<button class="rows" aria-expanded="false" aria-controls="{anchor}">'
        f'<span class="all">{html_text(every)}</span><span class="few">{html_text(_FEWER)}</span></button>'
        f'<span class="part">{html_text(part)}</span>'
    )


def _cut(table: Table) -> Table:
    if len(table.rows) <= MOST_ROWS:
        return table
    note = say(
        "the first {} of {} rows; all of them: --formats csv",
        "仅列出前 {} 行，共 {} 行；全部数据：--formats csv",
        f"{MOST_ROWS:,}",
        f"{len(table.rows):,}",
    )
    return Table(table.title, table.columns, table.rows[:MOST_ROWS], [*table.notes, note])


def _word_columns(columns: Sequence[Column]) -> list[str]:
    """Return the classes of a table for its columns of words; page.css has rules for the first of them."""
    return [f"l{index + 1}" for index, column in enumerate(columns[:STYLED_COLUMNS]) if index and not column.numeric]


def _row(cells: Sequence[str | Text], columns: Sequence[Column]) -> str:
    """Return the row, without end tags that HTML does not need: they are a twentieth of a large page."""
    found = []
    for index, cell in enumerate(cells):
        numeric = index < len(columns) and columns[index].numeric
        text = html_text(cell)
        if index == 0:
            kind = ' class="r"' if numeric else ""
            found.append(f'<th scope="row"{kind}><div>{text}</div>')
        else:
            long = len(cell.en if isinstance(cell, Text) else cell) > LONG_CELL
            kind = "" if numeric else ' class="w"' if long else ' class="l"' if index >= STYLED_COLUMNS else ""
            found.append(f"<td{kind}>{text}")
    return f"<tr>{''.join(found)}"


def _link(link: Link) -> str:
    href = safe_href(link.href)
    if not href:
        return html_text(link.text)
    outside = ' rel="noopener noreferrer"' if href.startswith("http") else ""
    return f'<a href="{escape(href)}"{outside}>{html_text(link.text)}</a>'


def safe_href(href: str) -> str:
    """Return the address if it is relative, http(s) or an anchor, else "". Browsers ignore line breaks and tabs inside
    an address and white space before it, so these are removed first."""
    clean = re.sub(r"[\t\r\n]", "", href).strip("".join(map(chr, range(33))))
    scheme = re.match(r"([^/?#\\]*?):", clean)
    if scheme and scheme[1].lower() not in ("http", "https"):
        return ""
    return "" if re.match(r"[/\\]{2}", clean) else clean
