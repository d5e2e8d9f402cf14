"""A report as one HTML file that needs no network: both languages, light and dark, tables to sort, charts to point at.

Without scripts it can still be read, in the language it was written in. No text of the records can run: all of it is
escaped, links lead only to files beside the page and to http, and the page itself forbids scripts that are not its own.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape

from cs336_systems.report.document import Chart, Document, Link, Section
from cs336_systems.report.web.page_script import EARLY_SCRIPT, SCRIPT
from cs336_systems.report.web.page_style import STYLE
from cs336_systems.report.web.svg import svg
from cs336_systems.report.web.svg.placement import NARROW
from cs336_systems.table import Column, Table
from cs336_systems.text import LANGUAGES, Language, Text

FIRST_ROWS = 12
"""Of a tall table; the others are shown when asked for."""
TALL = 16
"""Rows from which on a table is tall: to fold away two or three would not be worth a button."""
MANY_COLUMNS = 12
"""From which on a table is set smaller."""
LONG_CELL = 32
"""Letters from which on a cell may have several lines: a kernel's name has hundreds."""
MOST_ROWS = 2000
"""A browser holds thousands of rows, not hundreds of thousands."""

_CONTENTS = Text("Contents", "目录")
_MISSING = Text("Not measured yet", "尚未测量")
_MISSING_HELP = Text("Run these to fill the report:", "运行以下命令补全报告:")
_REMARKS = Text("Remarks on the data", "数据说明")
_LINKS = Text("See also", "另见")
_SKIP = Text("Skip to the content", "跳到正文")
_LANGUAGE = Text("Language", "语言")
_THEME = Text("Theme", "主题")
_THEMES = {"system": Text("System", "跟随系统"), "light": Text("Light", "浅色"), "dark": Text("Dark", "深色")}
_COPY_MARKDOWN = Text("Copy as Markdown", "复制为 Markdown")
_COPY_LATEX = Text("Copy as LaTeX", "复制为 LaTeX")
_SCROLLED = Text("table", "表格")
_SUMMARY = Text("In short", "概要")
_FEWER = Text("Show fewer", "收起")
_NOTHING = Text("There are no measurements in this report.", "此报告中没有测量结果。")


def page(document: Document, language: Language = "en", translate: Callable[[str], str] = str) -> str:
    """The whole file. `translate` gives the Chinese of what a table has in English: titles, headings, notes."""
    return _Page(language, lambda english: Text(english, translate(english))).write(document)


class _Page:
    def __init__(self, language: Language, both: Callable[[str], Text]):
        self.language = language
        self.both = both
        self.copies: list[tuple[str, str]] = []
        self.taken = {"main", "contents", "copies", "tooltip", "language", "theme", "summary", "missing", "remarks"}

    def write(self, document: Document) -> str:
        anchors = [self._anchor(section.name) for section in document.sections]
        main = [self._section(one, anchor) for one, anchor in zip(document.sections, anchors, strict=True)]
        entries = [(anchor, one.title) for one, anchor in zip(document.sections, anchors, strict=True)]
        if any(section.findings for section in document.sections):
            main.insert(0, _summary(document.sections, anchors))
            entries.insert(0, ("summary", _SUMMARY))
        if document.missing:
            main.append(self._missing(document.missing))
            entries.append(("missing", _MISSING))
        if document.remarks:
            remarks = "".join(f"<li>{_text(remark)}</li>" for remark in document.remarks)
            main.append(f'<section id="remarks"><h2>{_text(_REMARKS)}</h2><ul>{remarks}</ul></section>')
            entries.append(("remarks", _REMARKS))
        body = (
            f'<a class="skip" href="#main">{_text(_SKIP)}</a>\n'
            f"{self._header(document)}\n"
            f'<div class="layout">\n{_contents(entries)}\n'
            f'<main id="main" tabindex="-1" data-rows="{FIRST_ROWS}">\n'
            f"{''.join(main) or f'<p>{_text(_NOTHING)}</p>'}</main>\n</div>\n"
            '<div id="tooltip" aria-hidden="true" hidden></div>\n'
        )
        whole = f"{self._head(document.title)}<body>\n{body}{self._scripts()}</body>\n</html>\n"
        return whole.encode("utf-8", "replace").decode(
            "utf-8"
        )  # half a character, from a broken log, can be in no file

    def _head(self, title: Text) -> str:
        policy = (
            "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
            f"script-src {_fingerprint(EARLY_SCRIPT)} {_fingerprint(SCRIPT)}"
        )
        lang = "zh-CN" if self.language == "zh" else "en"
        return (
            f'<!doctype html>\n<html lang="{lang}" data-language="{self.language}">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<title data-en="{escape(title.en)}" data-zh="{escape(title.in_("zh"))}">'
            f"{escape(title.in_(self.language))}</title>\n"
            f'<link rel="icon" href="data:,">\n<style>{STYLE}</style>\n<script>{EARLY_SCRIPT}</script>\n</head>\n'
        )

    def _scripts(self) -> str:
        # No text in it can end the element or open a comment.
        data = json.dumps(self.copies, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
        return f'<script id="copies" type="application/json">{data}</script>\n<script>{SCRIPT}</script>\n'

    def _header(self, document: Document) -> str:
        facts = "".join(
            f"<div><dt>{_text(self.both(name))}</dt><dd>{escape(value)}</dd></div>"
            for name, value in document.facts.items()
        )
        themes = "".join(
            f'<option value="{value}"{_both_attributes("data-", name)}>{escape(name.in_(self.language))}</option>'
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
        """Findings and charts, two beside each other where the window is wide: the findings have a row to themselves
        unless a chart would be left alone."""
        cells = [self._figure(chart) for chart in section.charts]
        if section.findings:
            whole = "" if len(cells) % 2 else " whole"
            items = "".join(f"<li>{_text(one)}</li>" for one in section.findings)
            cells.insert(0, f'<ul class="findings{whole}">{items}</ul>')
        return ['<div class="board">', *cells, "</div>"] if cells else []

    def _figure(self, chart: Chart) -> str:
        return (
            f'<figure id="{self._anchor(chart.name)}"><figcaption>{_text(chart.title)}</figcaption>'
            f'<div class="frame"><div class="plot">{svg(chart)}{svg(chart, NARROW)}</div></div></figure>'
        )

    def _tables(self, section: Section) -> list[str]:
        """The first one, or two that are short; the others together in one that can be opened."""
        titles = [self._title(table, section.name) for table in section.tables]
        anchors = [self._anchor(f"table-{table.title.split(' · ')[0]}") for table in section.tables]
        tables = [self._table(*one) for one in zip(section.tables, titles, anchors, strict=True)]
        first = 2 if all(len(table.rows) < TALL for table in section.tables[:2]) else 1
        return tables[:first] + _folded(list(zip(anchors, titles, tables, strict=True))[first:])

    def _title(self, table: Table, section: str) -> Text:
        """In both languages, without the name of the section it is in."""
        both = self.both(table.title)
        return Text(*(re.sub(f"^{re.escape(section)}(: |：)(?=.)", "", both.in_(one)) for one in LANGUAGES))

    def _table(self, whole: Table, title: Text, anchor: str) -> str:
        table = _cut(whole)
        number = len(self.copies)
        self.copies.append((table.render("md"), table.render("latex")))
        buttons = "".join(
            f'<button type="button" data-copy="{number} {format}">{_text(text)}</button>'
            for format, text in enumerate((_COPY_MARKDOWN, _COPY_LATEX))
        )
        heads = "".join(self._heading(column) for column in table.columns)
        rows = "\n".join(_row(row, table.columns) for row in table.rows)
        region = Text(*(f"{title.in_(one)} ({_SCROLLED.in_(one)})" for one in LANGUAGES))
        tall = len(table.rows) >= TALL
        dense = ' class="dense"' if len(table.columns) >= MANY_COLUMNS else ""
        notes = "".join(f"<li>{_text(self.both(note))}</li>" for note in table.notes)
        return (
            f'<div class="table{" short" if tall else ""}" id="{anchor}"><h3>{_title(title)}</h3>'
            f'<div class="frame"><div class="scroll" tabindex="0" role="region"{self._aria(region)}><table{dense}>'
            f"<thead><tr>{heads}</tr></thead><tbody>\n{rows}\n</tbody></table></div></div>"
            + f'<div class="foot">{_rows_button(len(table.rows), anchor) if tall else ""}'
            + f'<div class="copy">{buttons}<output></output></div></div>'
            + (f'<ul class="notes">{notes}</ul>' if notes else "")
            + "</div>"
        )

    def _heading(self, column: Column) -> str:
        name = self.both(column.heading)
        if name.in_("zh") == column.heading and column.unit:  # the name may be known where name and unit are not
            name = Text(column.heading, f"{self.both(column.name).in_('zh')} ({column.unit})")
        kind = ' class="r"' if column.numeric else ""
        return f'<th scope="col"{kind}><button type="button">{_text(name)}</button></th>'

    def _missing(self, missing: Mapping[str, str]) -> str:
        items = "".join(
            f"<li>{_text(self.both(name))}: <code>{escape(command)}</code></li>" for name, command in missing.items()
        )
        return (
            f'<section id="missing"><h2>{_text(_MISSING)}</h2><p class="question">{_text(_MISSING_HELP)}</p>'
            f'<ul class="missing">{items}</ul></section>'
        )

    def _aria(self, name: Text) -> str:
        label = f' aria-label="{escape(name.in_(self.language))}"'
        return label + (_both_attributes("data-aria-", name) if name.in_("zh") != name.en else "")

    def _anchor(self, name: str) -> str:
        """A name as an id that nothing else on the page has."""
        plain = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "part"
        found, number = plain, 1
        while found in self.taken or f"{found}-title" in self.taken:
            number += 1
            found = f"{plain}-{number}"
        self.taken |= {found, f"{found}-title"}
        return found


def _text(text: Text) -> str:
    """Escaped; in both languages where they differ, of which the page shows one."""
    if text.in_("zh") == text.en:
        return escape(text.en)
    return f'<span class="en">{escape(text.en)}</span><span class="zh" lang="zh-CN">{escape(text.zh)}</span>'


def _both_attributes(prefix: str, text: Text) -> str:
    return f' {prefix}en="{escape(text.en)}" {prefix}zh="{escape(text.in_("zh"))}"'


def _contents(entries: Sequence[tuple[str, Text]]) -> str:
    items = "".join(f'<li><a href="#{anchor}">{_text(title)}</a></li>' for anchor, title in entries)
    return (
        f'<nav id="contents" aria-label="{_CONTENTS.en}"{_both_attributes("data-aria-", _CONTENTS)}>'
        f'<details open><summary>{_text(_CONTENTS)}<span class="here"></span></summary>'
        f"<ol>{items}</ol></details></nav>"
    )


def _summary(sections: Sequence[Section], anchors: Sequence[str]) -> str:
    """What comes first: of every section the first of its findings."""
    lines = "".join(
        f'<li><a href="#{anchor}">{_text(section.title)}</a><span>{_text(section.findings[0])}</span></li>'
        for section, anchor in zip(sections, anchors, strict=True)
        if section.findings
    )
    return f'<section id="summary"><h2>{_text(_SUMMARY)}</h2><ul class="brief">{lines}</ul></section>\n'


def _folded(tables: Sequence[tuple[str, Text, str]]) -> list[str]:
    """Anchor, title and text of each. One alone is named by what opens it, several by a list inside."""
    if not tables:
        return []
    if len(tables) == 1:
        name = Text("One more table: ", "另有一张表：")
        summary, names = _text(name) + _title(tables[0][1]), ""
    else:
        summary = _text(Text(f"{len(tables)} more tables", f"另有 {len(tables)} 张表"))
        links = "".join(f'<li><a href="#{anchor}">{_title(title)}</a></li>' for anchor, title, _ in tables)
        names = f"<ol>{links}</ol>"
    return [
        f'<details class="others"><summary>{summary}</summary>{names}',
        *(text for _, _, text in tables),
        "</details>",
    ]


def _title(title: Text) -> str:
    """What a table shows, and smaller what it was measured on."""
    parts = {one: title.in_(one).split(" · ", 1) for one in LANGUAGES}
    what, where = (Text(*("".join(parts[one][i : i + 1]) for one in LANGUAGES)) for i in (0, 1))
    capital = what.en[:1].upper() + what.en[1:]
    return _text(Text(capital, capital if what.in_("zh") == what.en else what.zh)) + (
        f" <small>{_text(where)}</small>" if any(where) else ""
    )


def _rows_button(count: int, anchor: str) -> str:
    every = Text(f"Show all {count:,} rows", f"显示全部 {count:,} 行")
    return (
        f'<button type="button" class="rows" aria-expanded="false" aria-controls="{anchor}">'
        f'<span class="all">{_text(every)}</span><span class="few">{_text(_FEWER)}</span></button>'
    )


def _cut(table: Table) -> Table:
    if len(table.rows) <= MOST_ROWS:
        return table
    note = f"the first {MOST_ROWS:,} of {len(table.rows):,} rows; all of them: --formats csv"
    return Table(table.title, table.columns, table.rows[:MOST_ROWS], [*table.notes, note])


def _row(cells: Sequence[str], columns: Sequence[Column]) -> str:
    found = []
    for index, cell in enumerate(cells):
        numeric = index < len(columns) and columns[index].numeric
        kind = ' class="r"' if numeric else ' class="w"' if index and len(cell) > LONG_CELL else ""
        text = escape(cell)
        found.append(f"<td{kind}>{text}</td>" if index else f'<th scope="row"{kind}><div>{text}</div></th>')
    return f"<tr>{''.join(found)}</tr>"


def _link(link: Link) -> str:
    href = safe_href(link.href)
    if not href:
        return _text(link.text)
    outside = ' rel="noopener noreferrer"' if href.startswith("http") else ""
    return f'<a href="{escape(href)}"{outside}>{_text(link.text)}</a>'


def safe_href(href: str) -> str:
    """The address if it is relative, http(s) or an anchor, else nothing. A browser drops line breaks and tabs in an
    address and blanks before it, so they go first."""
    clean = re.sub(r"[\t\r\n]", "", href).strip("".join(map(chr, range(33))))
    scheme = re.match(r"([^/?#\\]*?):", clean)
    if scheme and scheme[1].lower() not in ("http", "https"):
        return ""
    return "" if re.match(r"[/\\]{2}", clean) else clean


def _fingerprint(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
