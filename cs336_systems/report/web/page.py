"""A report as one HTML file without network access: both languages, light and dark, sortable tables, charts in SVG.

Without JavaScript the page is readable in the language it was written in. No text of the records can run as code: every
text is escaped, links lead only to relative paths and http(s), and the page's policy forbids foreign scripts.
"""

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from cs336_systems.report.document import Chart, Document, Link, Section
from cs336_systems.report.web.assets import asset, embedded_json, policy
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
LONG_CELL = 32
"""Minimum characters of a cell that may wrap: the name of a kernel has hundreds."""
MOST_ROWS = 2000
"""Maximum rows of a table on the page: browsers handle thousands, not hundreds of thousands."""

_CONTENTS = Text("Contents", "目录")
_MISSING = Text("Not measured yet", "尚未测量")
_MISSING_HELP = Text("Run these to fill the report:", "运行以下命令补全报告:")
_REMARKS = Text("Remarks on the data", "数据说明")
_LINKS = Text("See also", "另见")
_SKIP = Text("Skip to the content", "跳到正文")
_LANGUAGE = Text("Language", "语言")
_THEME = Text("Theme", "主题")
_THEMES = {"system": Text("System", "跟随系统"), "light": Text("Light", "浅色"), "dark": Text("Dark", "深色")}
_COPY = (Text("Copy as Markdown", "复制为 Markdown"), Text("Copy as LaTeX", "复制为 LaTeX"))
_SUMMARY = Text("In short", "概要")
_FEWER = Text("Show fewer", "收起")
_NOTHING = Text("There are no measurements in this report.", "此报告中没有测量结果。")


def page(document: Document, language: Language = "en") -> str:
    """The whole file; `language` is the one it opens in."""
    return _Page(language).write(document)


class _Folded(NamedTuple):
    """A table on the page: its id, title and HTML."""

    anchor: str
    title: Text
    html: str


class _Page:
    def __init__(self, language: Language):
        self.language = language
        self.copies: list[list[str]] = []
        self.taken = {"main", "contents", "copies", "tooltip", "language", "theme", "summary", "missing", "remarks"}

    def write(self, document: Document) -> str:
        anchors = [self._anchor(section.name) for section in document.sections]
        main = [self._section(one, anchor) for one, anchor in zip(document.sections, anchors, strict=True)]
        entries = [(anchor, one.title) for one, anchor in zip(document.sections, anchors, strict=True)]
        if any(section.findings for section in document.sections):
            main.insert(0, _summary(document.sections, anchors))
            entries.insert(0, ("summary", _SUMMARY))
        if document.missing:
            main.append(_missing(document.missing))
            entries.append(("missing", _MISSING))
        if document.remarks:
            items = _items(document.remarks)
            main.append(f'<section id="remarks"><h2>{_text(_REMARKS)}</h2><ul>{items}</ul></section>')
            entries.append(("remarks", _REMARKS))
        body = (
            f'<a class="skip" href="#main">{_text(_SKIP)}</a>\n'
            f"{self._header(document)}\n"
            f'<div class="layout">\n{_contents(entries)}\n'
            f'<main id="main" tabindex="-1" data-rows="{FIRST_ROWS}">\n'
            f"{''.join(main) or f'<p>{_text(_NOTHING)}</p>'}</main>\n</div>\n"
            '<div id="tooltip" aria-hidden="true" hidden></div>\n'
        )
        scripts = (
            f'<script id="copies" type="application/json">{embedded_json(self.copies)}</script>\n'
            f"<script>{asset('page.js')}</script>\n"
        )
        whole = f"{self._head(document.title)}<body>\n{body}{scripts}</body>\n</html>\n"
        return whole.encode("utf-8", "replace").decode("utf-8")  # lone surrogates of a broken log have no encoding

    def _head(self, title: Text) -> str:
        lang = "zh-CN" if self.language == "zh" else "en"
        early = asset("page_early.js")
        return (
            f'<!doctype html>\n<html lang="{lang}" data-language="{self.language}">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy(early, asset("page.js"))}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title{_attributes('data-', title)}>{escape(title.in_(self.language))}</title>\n"
            f'<link rel="icon" href="data:,">\n<style>{asset("page.css")}</style>\n'
            f"<script>{early}</script>\n</head>\n"
        )

    def _header(self, document: Document) -> str:
        facts = "".join(
            f"<div><dt>{_text(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in document.facts.items()
        )
        themes = "".join(
            f'<option value="{value}"{_attributes("data-", name)}>{escape(name.in_(self.language))}</option>'
            for value, name in _THEMES.items()
        )
        languages = '<option value="en">English</option><option value="zh">中文</option>'
        return (
            f'<header><div class="top"><h1>{_text(document.title)}</h1><div class="controls">'
            f'<select id="language"{self._aria(_LANGUAGE)}>{languages}</select>'
            f'<select id="theme"{self._aria(_THEME)}>{themes}</select></div></div>'
            + (f'<dl class="facts">{facts}</dl>' if facts else "")
            + "</header>"
        )

    def _section(self, section: Section, anchor: str) -> str:
        heading = f"{anchor}-title"
        parts = [f'<section id="{anchor}" aria-labelledby="{heading}"><h2 id="{heading}">{_text(section.title)}</h2>']
        if any(section.question):
            parts.append(f'<p class="question">{_text(section.question)}</p>')
        parts += [*self._board(section), *self._tables(section)]
        if section.links:
            links = "".join(f"<li>{_link(link)}</li>" for link in section.links)
            parts.append(f'<h3 class="see">{_text(_LINKS)}</h3><ul class="links">{links}</ul>')
        return "\n".join([*parts, "</section>\n"])

    def _board(self, section: Section) -> list[str]:
        """Findings and charts in two columns on a wide window. Findings take a whole row unless that would leave a
        chart alone in its row."""
        cells = [self._figure(chart) for chart in section.charts]
        if section.findings:
            whole = "" if len(cells) % 2 else " whole"
            cells.insert(0, f'<ul class="findings{whole}">{_items(section.findings)}</ul>')
        return ['<div class="board">', *cells, "</div>"] if cells else []

    def _figure(self, chart: Chart) -> str:
        return (
            f'<figure id="{self._anchor(chart.name)}"><figcaption>{_text(chart.title)}</figcaption>'
            f'<div class="frame"><div class="plot">{svg(chart)}{svg(chart, NARROW)}</div></div></figure>'
        )

    def _tables(self, section: Section) -> list[str]:
        """The first table, or the first two if both are short; the others are folded into one element."""
        tables = []
        for table in section.tables:
            anchor = self._anchor(f"table-{table.title.en.split(' · ')[0]}")
            title = _without_prefix(table.title, section.name)
            tables.append(_Folded(anchor, title, self._table(table, title, anchor)))
        first = 2 if all(len(table.rows) < TALL for table in section.tables[:2]) else 1
        return [table.html for table in tables[:first]] + _folded(tables[first:])

    def _table(self, whole: Table, title: Text, anchor: str) -> str:
        table = _cut(whole)
        number = len(self.copies)
        self.copies.append([table.render(format) for format in ("md", "latex")])
        buttons = "".join(
            f'<button type="button" data-copy="{number} {format}">{_text(text)}</button>'
            for format, text in enumerate(_COPY)
        )
        heads = "".join(_heading(column) for column in table.columns)
        rows = "\n".join(_row(row, table.columns) for row in table.rows)
        region = say("{} (table)", "{} (表格)", title)
        tall = len(table.rows) >= TALL
        dense = ' class="dense"' if len(table.columns) >= MANY_COLUMNS else ""
        return (
            f'<div class="table{" short" if tall else ""}" id="{anchor}"><h3>{_title(title)}</h3>'
            f'<div class="frame"><div class="scroll" tabindex="0" role="region"{self._aria(region)}><table{dense}>'
            f"<thead><tr>{heads}</tr></thead><tbody>\n{rows}\n</tbody></table></div></div>"
            + f'<div class="foot">{_rows_button(len(table.rows), anchor) if tall else ""}'
            + f'<div class="copy">{buttons}<output></output></div></div>'
            + (f'<ul class="notes">{_items(table.notes)}</ul>' if table.notes else "")
            + "</div>"
        )

    def _aria(self, name: Text) -> str:
        label = f' aria-label="{escape(name.in_(self.language))}"'
        return label + (_attributes("data-aria-", name) if name.in_("zh") != name.en else "")

    def _anchor(self, name: str) -> str:
        """An id made from a name, unique on the page."""
        plain = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "part"
        found, number = plain, 1
        while found in self.taken or f"{found}-title" in self.taken:
            number += 1
            found = f"{plain}-{number}"
        self.taken |= {found, f"{found}-title"}
        return found


def _text(text: str | Text) -> str:
    """Escaped HTML. Where the languages differ it holds both, and the page shows one."""
    if isinstance(text, str):
        return escape(text)
    if text.in_("zh") == text.en:
        return escape(text.en)
    return f'<span class="en">{escape(text.en)}</span><span class="zh" lang="zh-CN">{escape(text.zh)}</span>'


def _items(texts: Sequence[Text]) -> str:
    return "".join(f"<li>{_text(text)}</li>" for text in texts)


def _attributes(prefix: str, text: Text) -> str:
    return "".join(f' {prefix}{language}="{escape(text.in_(language))}"' for language in LANGUAGES)


def _contents(entries: Sequence[tuple[str, Text]]) -> str:
    items = "".join(f'<li><a href="#{anchor}">{_text(title)}</a></li>' for anchor, title in entries)
    return (
        f'<nav id="contents" aria-label="{_CONTENTS.en}"{_attributes("data-aria-", _CONTENTS)}>'
        f'<details open><summary>{_text(_CONTENTS)}<span class="here"></span></summary>'
        f"<ol>{items}</ol></details></nav>"
    )


def _summary(sections: Sequence[Section], anchors: Sequence[str]) -> str:
    """The first finding of every section, at the top of the page."""
    lines = "".join(
        f'<li><a href="#{anchor}">{_text(section.title)}</a><span>{_text(section.findings[0])}</span></li>'
        for section, anchor in zip(sections, anchors, strict=True)
        if section.findings
    )
    return f'<section id="summary"><h2>{_text(_SUMMARY)}</h2><ul class="brief">{lines}</ul></section>\n'


def _missing(missing: Mapping[str, str]) -> str:
    items = "".join(f"<li>{escape(name)}: <code>{escape(command)}</code></li>" for name, command in missing.items())
    return (
        f'<section id="missing"><h2>{_text(_MISSING)}</h2><p class="question">{_text(_MISSING_HELP)}</p>'
        f'<ul class="missing">{items}</ul></section>'
    )


def _folded(tables: Sequence[_Folded]) -> list[str]:
    """Tables inside one element that opens. A single table is named by its summary, several by a list of links."""
    if not tables:
        return []
    if len(tables) == 1:
        summary, names = _text(Text("One more table: ", "另有一张表：")) + _title(tables[0].title), ""
    else:
        summary = _text(say("{} more tables", "另有 {} 张表", str(len(tables))))
        links = "".join(f'<li><a href="#{table.anchor}">{_title(table.title)}</a></li>' for table in tables)
        names = f"<ol>{links}</ol>"
    return [
        f'<details class="others"><summary>{summary}</summary>{names}',
        *(table.html for table in tables),
        "</details>",
    ]


def _without_prefix(title: Text, section: str) -> Text:
    """The title of a table without the name of its section in front."""
    return Text(*(re.sub(f"^{re.escape(section)}(: |：)(?=.)", "", title.in_(one)) for one in LANGUAGES))


def _title(title: Text) -> str:
    """The subject of a table and, in smaller letters after the first " · ", its machine and configuration."""
    parts = {one: title.in_(one).split(" · ", 1) for one in LANGUAGES}
    subject, where = (Text(*("".join(parts[one][i : i + 1]) for one in LANGUAGES)) for i in (0, 1))
    capital = subject.en[:1].upper() + subject.en[1:]
    return _text(Text(capital, capital if subject.in_("zh") == subject.en else subject.zh)) + (
        f" <small>{_text(where)}</small>" if any(where) else ""
    )


def _heading(column: Column) -> str:
    kind = ' class="r"' if column.numeric else ""
    name = Text(*(column.heading(one) for one in LANGUAGES))
    return f'<th scope="col"{kind}><button type="button">{_text(name)}</button></th>'


def _rows_button(count: int, anchor: str) -> str:
    every = say("Show all {} rows", "显示全部 {} 行", f"{count:,}")
    return (
        f'<button type="button" class="rows" aria-expanded="false" aria-controls="{anchor}">'
        f'<span class="all">{_text(every)}</span><span class="few">{_text(_FEWER)}</span></button>'
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


def _row(cells: Sequence[str | Text], columns: Sequence[Column]) -> str:
    found = []
    for index, cell in enumerate(cells):
        numeric = index < len(columns) and columns[index].numeric
        long = index > 0 and len(cell.en if isinstance(cell, Text) else cell) > LONG_CELL
        kind = ' class="r"' if numeric else ' class="w"' if long else ""
        text = _text(cell)
        found.append(f"<td{kind}>{text}</td>" if index else f'<th scope="row"{kind}><div>{text}</div></th>')
    return f"<tr>{''.join(found)}</tr>"


def _link(link: Link) -> str:
    href = safe_href(link.href)
    if not href:
        return _text(link.text)
    outside = ' rel="noopener noreferrer"' if href.startswith("http") else ""
    return f'<a href="{escape(href)}"{outside}>{_text(link.text)}</a>'


def safe_href(href: str) -> str:
    """The address if it is relative, http(s) or an anchor, else "". Browsers ignore line breaks and tabs inside an
    address and white space before it, so these are removed first."""
    clean = re.sub(r"[\t\r\n]", "", href).strip("".join(map(chr, range(33))))
    scheme = re.match(r"([^/?#\\]*?):", clean)
    if scheme and scheme[1].lower() not in ("http", "https"):
        return ""
    return "" if re.match(r"[/\\]{2}", clean) else clean
