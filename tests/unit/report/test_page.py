"""The page of a report as text: its parts, both languages, and that no text of the records can run."""

import json
import re

import pytest

from cs336_systems.report.document import Document, Link, Section
from cs336_systems.report.names import COLORS
from cs336_systems.report.web.assets import asset
from cs336_systems.report.web.page import MOST_ROWS, page, safe_href
from cs336_systems.table import Column, Table
from cs336_systems.text import Text
from tests.unit.report import page_cases
from tests.unit.report.page_cases import EVIL, Page, chart, with_charts, with_tables


@pytest.fixture(scope="module")
def html():
    return page(page_cases.sample())


@pytest.fixture(scope="module")
def parsed(html):
    return Page(html)


def ids(found):
    return [element["id"] for element in found.elements if "id" in element]


def test_the_page_has_its_parts(html, parsed):
    assert [e["text"] for e in parsed.all("h2")][:2] == ["In short概要", "Time of a training step训练一步的时间"]
    sections = ["summary", "step-time", "attention", "memory", "remarks"]
    assert [e["id"] for e in parsed.all("section")] == sections
    assert [e["href"][1:] for e in parsed.all("a") if "nav" in e["within"]] == sections
    counts = {tag: len(parsed.all(tag)) for tag in ("header", "nav", "main", "figure", "svg", "table")}
    assert counts == {"header": 1, "nav": 1, "main": 1, "figure": 5, "svg": 10, "table": 3}  # narrow drawings, too
    assert {"traces/step.html", "https://example.org/guide"} <= {e.get("href") for e in parsed.all("a")}
    (command,) = parsed.all("code")
    assert command["text"] == "cs336 run ddp-overlap --preset course"
    assert "details" in command["within"]  # folded
    assert "2 lines could not be read." in html
    (machine, commit) = parsed.all("dd")
    assert (machine["text"], commit["text"]) == ("NVIDIA H200, 139.8 GiB", "0123abc")
    assert "details" in machine["within"]
    assert parsed.all("summary")[0]["text"] == "NVIDIA H200, 139.8 GiB Versions and commits版本与提交"
    assert "bfloat16 is 2.4x as fast as float32 at xl." in html
    assert "<li>x against eager</li>" in html
    assert page(page_cases.sample()) == html


def test_ids_are_unique_and_anchors_resolve(parsed):
    found = ids(parsed)
    assert len(set(found)) == len(found)
    assert {e["href"][1:] for e in parsed.all("a") if e["href"].startswith("#")} <= set(found)
    assert {e["aria-labelledby"] for e in parsed.elements if "aria-labelledby" in e} <= set(found)
    names = ("a b", "a-b", "main", "时间", "tooltip", "a-b-2")
    clashing = ids(Page(page(Document(Text("t"), sections=[Section(name, Text(name), Text("")) for name in names]))))
    assert len(set(clashing)) == len(clashing)
    assert all(re.fullmatch(r"[\w-]+", one, re.ASCII) for one in clashing)


def test_everything_has_an_accessible_name(parsed):
    for element in parsed.elements:
        if element["tag"] in ("svg", "select") or element.get("role") in ("region", "button", "img"):
            assert element["aria-label"], element
        if element["tag"] in ("button", "a", "th", "summary", "option"):
            assert element["text"].strip(), element
    assert parsed.all("html")[0]["lang"] == "en"
    assert parsed.all("a")[0]["href"] == "#main"


def test_every_english_text_has_a_chinese_one(html):
    shown = [re.findall(rf'class="(?:[a-z]+ )?{language}"', html) for language in ("en", "zh")]
    assert len(shown[0]) == len(shown[1]) > 50


def test_the_language_it_opens_in():
    found = Page(page(page_cases.sample(), "zh"))
    (root,), (title,) = found.all("html"), found.all("title")
    assert (root["lang"], root["data-language"]) == ("zh-CN", "zh")
    assert (title["text"], title["data-en"]) == ("时间与显存花在哪里", "Where time and memory go")


# Safety


def test_nothing_is_loaded(html, parsed):
    without_links = re.sub(r'<a href="https://example.org[^>]*>', "", html)
    assert not re.search(r"https?://|<link[^>]*stylesheet|<script[^>]* src|@import|url\((?!#)|\bfetch\(", without_links)
    assert [e["href"] for e in parsed.all("link")] == ["data:,"]
    assert "default-src 'none'" in html
    assert len(re.findall(r"'sha256-[\w+/]{43}='", html)) == 3


def test_no_text_can_break_out():
    html = page(page_cases.hostile_document())
    found = Page(html)
    assert len(found.all("script")) == html.count("</script>") == 4
    assert EVIL not in html
    assert found.all("img") == []
    assert not [e for e in found.elements if any(name.startswith("on") for name in e)]
    assert not [e for e in found.all("a") if "javascript" in e["href"].lower()]
    assert html.encode("utf-8")


KEPT = ["traces/step.html", "../a b.html", "./x:y.html", "#memory", "https://example.org/?a=b:c", "HTTP://example.org",
        "page.html?next=javascript:1"]  # fmt: skip
REFUSED = ["javascript:alert(1)", " JavaScript:alert(1)", "java\nscript:alert(1)", "\x01javascript:alert(1)",
           "\tjava\tscript\t:alert(1)", "data:text/html,<script>", "vbscript:x", "file:///etc/passwd", "//example.org",
           "\\\\example.org", ""]  # fmt: skip


@pytest.mark.parametrize(("hrefs", "kept"), [(KEPT, True), (REFUSED, False)], ids=["kept", "refused"])
def test_links_lead_to_files_and_to_the_web_only(hrefs, kept):
    assert {href: bool(safe_href(href)) for href in hrefs} == dict.fromkeys(hrefs, kept)
    links = [Link(Text("here"), href) for href in hrefs]
    html = page(Document(Text("t"), sections=[Section("s", Text("s"), Text(""), links=links)]))
    assert len([e for e in Page(html).all("a") if e["text"] == "here"]) == (len(hrefs) if kept else 0)
    assert html.count("here</") == len(hrefs)


# Tables and findings


def test_copies_are_the_rendered_tables(html):
    copies = json.loads(re.search(r'<script id="copies"[^>]*>(.*?)</script>', html, re.DOTALL)[1])
    for (markdown, latex), rows in zip(copies, (12, 30, 50), strict=True):
        whole = page_cases.step_table(rows)
        for text, format, first in ((markdown, "md", 4), (latex, "latex", 7)):
            lines, expected = text.split("\n"), whole.render(format).split("\n")
            assert [line or right for line, right in zip(lines, expected, strict=True)] == expected
            assert lines[first : first + rows].count("") > rows / 2  # page.js makes them; a browser test does
    assert "Copy as Markdown" in html
    assert "Copy as LaTeX" in html


def summary_of(html):
    return html[html.index('<section id="summary"') :].split("</section>")[0]


def test_the_summary_has_the_first_finding_of_every_section(html):
    summary = summary_of(html)
    assert re.findall(r'href="#(.*?)"', summary) == ["step-time", "attention"]  # memory has no findings
    assert re.findall(r'<span><span class="en">(.*?)</span>', summary) == [
        "bfloat16 is 2.4x as fast as float32 at xl.",
        "PyTorch runs out of memory at 8192.",
    ]
    assert "<details" not in summary  # without numbers and a chart above them they are not folded
    assert 'id="summary"' not in page(Document(Text("t"), sections=[Section("s", Text("s"), Text(""))]))


def test_the_first_screen_has_numbers_a_chart_and_why_to_trust_them():
    summary = Page(summary_of(page(page_cases.first_screen())) + "</section>")
    first, link = [e for e in summary.all("a") if e["href"] == "#speed"]
    assert first["text"] == "1.3xa step单步93.1 ms, 124.6 ms"
    assert link["text"] == "About speed关于速度"
    assert [e["text"] for e in summary.all("b")] == ["1.3x", "0.5%"]
    (trusted,) = summary.all("p", **{"class": "trust"})
    assert trusted["text"] == "Alternating.交替测量。"
    assert len(summary.all("figure", id="hero")) == 1
    (every,) = summary.all("summary")
    assert every["text"] == "All findings, one line each (2)全部结论，每条一行（2）"
    assert len([e for e in summary.all("li") if "details" in e["within"]]) == 2


def test_sections_stand_under_the_headings_of_their_groups():
    found = Page(page(page_cases.first_screen()))
    heads = [(e["tag"], e["text"]) for e in found.elements if e["tag"] in ("h2", "h3", "h4") and e["text"]]
    assert heads == [
        ("h2", "In short概要"),
        ("h2", "Speed速度"),
        ("h3", "About speed关于速度"),
        ("h4", "Attention forward and backward注意力的前向与反向"),
        ("h2", "Memory显存"),
        ("h3", "About memory关于显存"),
        ("h2", "More其他"),
        ("h3", "About others关于其他"),
    ]
    contents = [e for e in found.all("li") if "nav" in e["within"]]
    assert [e["text"].split("关")[0] for e in contents if e.get("class") == "group"] == [
        "Speed速度",
        "Memory显存",
        "More其他",
    ]
    alone = page_cases.first_screen().sections[:1]
    assert [
        e["tag"] for e in Page(page(Document(Text("t"), sections=alone))).elements if e.get("class") == "group"
    ] == []


def test_a_chart_has_its_note_below_its_title():
    (caption,) = Page(page(with_charts(chart(note=Text("means of 10", "10 次的均值"))))).all("figcaption")
    assert caption["text"] == "Title标题means of 1010 次的均值"
    assert "small" not in {e["tag"] for e in Page(page(with_charts(chart()))).elements if "figcaption" in e["within"]}


def test_a_tall_table_can_be_unfolded(parsed):
    def buttons(found):
        return [e for e in found.all("button") if e.get("class") == "rows"]

    assert [(e["text"], e["aria-expanded"]) for e in buttons(parsed)] == [
        ("Show all 30 rows显示全部 30 行Show fewer收起", "false"),
        ("Show all 50 rows显示全部 50 行Show fewer收起", "false"),
    ]
    assert buttons(Page(page(with_tables(page_cases.step_table(15))))) == []


def test_a_huge_table_is_cut_and_its_rows_are_plain():
    table = Table(Text("t"), [Column(Text("a")), Column(Text("b"))], [["1", "2"]] * (MOST_ROWS + 1))
    html = page(with_tables(table))
    body = html[html.index("<tbody>") : html.index("</tbody>")]
    assert re.findall(r"<tr[^>]*>", body) == ["<tr>"] * MOST_ROWS  # no attributes: thousands of rows stay small
    assert "the first 2,000 of 2,001 rows" in html


def test_later_tables_are_folded():
    found = Page(page(page_cases.many_tables()))
    assert [e["text"] for e in found.all("summary")] == [
        "Contents目录",
        "3 more tables另有 3 张表",
        "One more table: 另有一张表：Last NVIDIA H200, batch 30",
    ]
    tables = [e for e in found.all("div") if e.get("class", "").split()[:1] == ["table"]]
    folded = [e["id"] for e in tables if "details" in e["within"]]
    assert folded == ["table-forward", "table-backward", "table-peak", "table-last"]
    assert len(tables) == 4 + 2 + 3 + 1
    inside = [e["href"] for e in found.all("a") if "details" in e["within"] and "nav" not in e["within"]]
    assert inside == ["#table-forward", "#table-backward", "#table-peak"]


@pytest.mark.parametrize(
    ("title", "shown"),
    [("s: time · H200, s: x", "Time H200, s: x"), ("s: ", "S: "), ("t: time", "T: time")],
    ids=["prefix", "prefix alone", "other prefix"],
)
def test_a_title_omits_the_name_of_its_section(title, shown):
    assert [e["text"] for e in Page(page(with_tables(Table(Text(title), [], [])))).all("h3")] == [shown]


@pytest.mark.parametrize(("charts", "kind"), [(0, "findings whole"), (1, "findings"), (2, "findings whole")])
def test_findings_fill_the_row_of_a_single_chart(charts, kind):
    section = Section("s", Text("s"), Text(""), [Text("found")], charts=[chart()] * charts)
    assert len(Page(page(Document(Text("t"), sections=[section]))).all("ul", **{"class": kind})) == 1
    assert 'class="findings' not in page(with_charts(*[chart()] * charts))


def test_an_empty_report_says_so():
    html = page(Document(Text("nothing")))
    assert "There are no measurements" in html
    assert Page(html).all("nav")


def test_rows_shorter_or_longer_than_their_heads():
    table = Table(Text("t"), [Column(Text("a")), Column(Text("b"))], [["1"], [], ["2", "3", "4"]])
    assert [e["text"] for e in Page(page(with_tables(table))).all("td")] == ["3", "4"]


# Colours


def contrast(one, other):
    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted(map(luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def test_colours_contrast_with_the_background():
    style = asset("page.css")
    light, *dark = [dict(re.findall(r"--([a-z]\w*): (#\w{6})", part)) for part in style.split("{ color-scheme: ")[1:]]
    assert dark[0] == dark[1]  # by the system's preference and by choice
    for colors in (light, dark[0]):
        series = [colors[f"c{index}"] for index in range(COLORS)]
        assert len(set(series)) == COLORS
        assert all(contrast(color, colors["page"]) >= 3 for color in series)
        for name in ("text", "muted", "link"):
            assert contrast(colors[name], colors["page"]) >= 4.5, name
            assert contrast(colors[name], colors["panel"]) >= 4.5, name
    assert all(f".s{index} {{" in style for index in range(COLORS))
