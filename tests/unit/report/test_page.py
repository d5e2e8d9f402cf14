"""The page of a report and its charts, as text: what is in them, in both languages, and that nothing in them runs."""

import json
import math
import re
import time
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from cs336_systems.report.document import Chart, Document, Link, Point, Section, Series
from cs336_systems.report.web.page import page, safe_href
from cs336_systems.report.web.page_style import DARK, LIGHT, STYLE
from cs336_systems.report.web.svg import svg
from cs336_systems.report.web.svg.labels import text_width
from cs336_systems.report.web.svg.marks import COLORS
from cs336_systems.report.web.svg.placement import NARROW, WIDTH
from cs336_systems.report.web.svg.scales import number
from cs336_systems.table import Column, Table
from cs336_systems.text import Text
from tests.unit.report import page_cases

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"' onload=alert(1) <!-- & \ud800"
LONG = "a very long name of a method that says everything there is to say about it, twice over " * 3
VOID = {"meta", "link", "rect", "path", "br", "img", "input"}


class Page(HTMLParser):
    """Elements with their attributes and text, and an error where they do not nest."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        element = {"tag": tag, "text": "", "within": [e["tag"] for e in self.open], **dict(attributes)}
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attributes):
        self.elements.append({"tag": tag, "text": "", "within": [e["tag"] for e in self.open], **dict(attributes)})

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, tag=None, **attributes):
        names = {name.replace("_", "-"): value for name, value in attributes.items()}
        return [
            element
            for element in self.elements
            if tag in (None, element["tag"]) and all(element.get(name) == value for name, value in names.items())
        ]


def chart(kind="lines", series=None, **fields):
    points = [Point(x, y, std=0.5, n=10) for x, y in ((1, 2.0), (2, 5.0), (4, 3.0))]
    given = series if series is not None else [Series(Text("first", "第一"), points), Series(Text("second"), points)]
    return Chart("c", Text("Title", "标题"), kind, Text("size", "大小"), Text("time (ms)", "时间"), given, **fields)


def marks(drawing):
    return [element for element in Page(drawing).elements if "data-value" in element]


def with_points(*points, kind="lines", **fields):
    return chart(kind, [Series(Text("only"), points)], **fields)


def coordinates(drawing):
    """Every number that places something."""
    found = re.findall(r' (?:x|y|width|height|x1|d|transform|viewBox)="([^"]*)"', drawing)
    return [float(text) for value in found for text in re.findall(r"-?\d*\.?\d+(?:e-?\d+)?", value)]


KINDS = [
    {"kind": "lines"},
    {"kind": "lines", "log_x": True, "log_y": True},
    {"kind": "bars"},
    {"kind": "bars", "log_y": True},
    {"kind": "bars", "horizontal": True},
    {"kind": "stacked"},
    {"kind": "stacked", "horizontal": True},
]
every_kind = pytest.mark.parametrize("fields", KINDS, ids=lambda fields: "-".join(map(str, fields.values())))
every_width = pytest.mark.parametrize("width", [WIDTH, NARROW])


# Charts


@every_kind
def test_every_mark_says_what_it_is(fields):
    found = marks(svg(chart(**fields)))
    assert len(found) == 6
    assert {(m["data-series"], m["data-label"], m["data-value"], m["data-std"], m["data-n"]) for m in found} == {
        (name, x, y, "0.5", "10") for name in ("first", "second") for x, y in (("1", "2"), ("2", "5"), ("4", "3"))
    }
    assert all(m["tabindex"] == "0" for m in found)
    assert "first, 2: 5 ± 0.5, n = 10" in {m["aria-label"] for m in found}
    assert "第一, 2: 5 ± 0.5, n = 10" in {m.get("data-aria-zh") for m in found}


@every_kind
def test_the_drawing_has_a_name_and_both_languages(fields):
    (root,) = Page(svg(chart(**fields))).all("svg")
    assert root["role"] == "img"
    assert "Title" in root["aria-label"]
    assert "time (ms) by size" in root["aria-label"]
    assert "标题" in root["data-aria-zh"]
    texts = Page(svg(chart(**fields))).all("text")
    classes = {t["text"]: t.get("class", "").split() for t in texts}
    assert "en" in classes["first"]
    assert "zh" in classes["第一"]
    assert not {"en", "zh"} & set(classes["second"])
    assert {"time (ms)", "时间", "size", "大小"} <= classes.keys()


@every_kind
@pytest.mark.parametrize(
    "points",
    [
        [Point(4, 3.0)],
        [Point(4, 0.0), Point(8, 0.0)],
        [Point(4, 0.0)],
        [Point(4, 7.0), Point(8, 7.0), Point(16, 7.0)],
        [Point(4, 7.0), Point(4, 7.0)],
        [Point(4, -3.0), Point(8, 5.0)],
        [Point(4, 1e-12), Point(8, 1e12)],
        [Point(4, 1e9 + 1), Point(8, 1e9 + 2)],
        [Point(4, 5e-324), Point(8, 5e-324)],
        [Point(4, 1.0, std=5.0)],
        [Point(4, 1.0, std=math.nan), Point(8, 2.0, std=math.inf)],
        [Point(4, math.nan, note=Text("out of memory")), Point(8, math.nan, note=Text("out of memory"))],
    ],
    ids=str,
)
@every_width
def test_any_values_can_be_drawn(fields, points, width):
    drawing = svg(with_points(*points, **fields), width)
    assert all(map(math.isfinite, coordinates(drawing)))
    assert not re.search(r"nan|inf", drawing)
    (root,) = Page(drawing).all("svg")
    height = float(root["viewbox"].split()[3])
    for mark in marks(drawing):
        if mark["tag"] == "rect":
            assert 0 <= float(mark["x"]) <= float(mark["x"]) + float(mark["width"]) <= width
            assert 0 <= float(mark["y"]) <= float(mark["y"]) + float(mark["height"]) <= height
        else:
            x, y = map(float, re.findall(r"-?[\d.]+", mark["transform"])[:2])
            assert 0 <= x <= width
            assert 0 <= y <= height


@every_kind
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_left_out(fields, bad):
    found = marks(svg(with_points(Point(1, 2.0), Point(2, bad), Point(4, 3.0), **fields)))
    assert [m["data-value"] for m in found] == ["2", "3"]
    found = marks(svg(with_points(Point(1, 2.0), Point(bad, 5.0), Point(4, 3.0), **fields)))
    assert [m["data-value"] for m in found] == ["2", "3"]


def test_zero_has_no_place_on_a_logarithmic_axis():
    points = [Point(0, 2.0), Point(2, 0.0), Point(4, 3.0), Point(8, -1.0)]
    assert [m["data-value"] for m in marks(svg(with_points(*points, log_x=True, log_y=True)))] == ["3"]


def test_a_bar_of_zero_can_be_seen():
    found = marks(svg(with_points(Point("a", 0.0), Point("b", 4.0), kind="bars")))
    assert [m["data-value"] for m in found] == ["0", "4"]
    assert float(found[0]["height"]) > 1


def test_a_line_has_a_gap_where_a_point_was_left_out():
    drawing = svg(with_points(Point(1, 2.0), Point(2, math.nan), Point(4, 3.0), Point(8, 3.0)))
    (line,) = [e for e in Page(drawing).elements if e.get("class") == "line" and "entry" not in str(e["within"])][1:]
    assert line["d"].count("M") == 2
    assert line["d"].count("L") == 1


@every_kind
@pytest.mark.parametrize("series", [[], [Series(Text("empty"), [])], [Series(Text("bad"), [Point(1, math.nan)])]])
def test_nothing_to_draw_says_so(fields, series):
    drawing = svg(chart(series=series, **fields))
    assert ">no data<" in drawing
    assert ">没有数据<" in drawing
    assert marks(drawing) == []


@every_kind
def test_an_empty_series_leaves_the_colours_of_the_others(fields):
    series = [Series(Text("empty"), []), Series(Text("full"), [Point(1, 2.0)])]
    groups = [e for e in Page(svg(chart(series=series, **fields))).all("g") if "data-index" in e]
    assert [(g["class"], g["data-index"]) for g in groups] == [("series s1", "1")]


@every_kind
def test_notes_are_crosses_at_the_far_edge(fields):
    oom = Text("out of memory", "显存不足")
    points = [Point(1, 2.0), Point(2, math.nan, note=oom), Point(4, 9.0, note=oom)]
    found = marks(svg(with_points(*points, **fields)))
    assert [m["data-value"] for m in found] == ["2", "", ""]
    crosses = [m for m in found if m["class"] == "cross"]
    assert [(m["data-note"], m["data-note-zh"]) for m in crosses] == [("out of memory", "显存不足")] * 2
    assert crosses[0]["aria-label"] == "only, 2: out of memory"


def test_crosses_at_one_place_do_not_cover_each_other():
    oom = Text("out of memory")
    both = [Series(Text(name), [Point(1, 2.0), Point(2, math.nan, note=oom)]) for name in "ab"]
    first, second = (m["transform"] for m in marks(svg(chart(series=both))) if m["class"] == "cross")
    assert first != second


def test_lines_and_bars_differ_by_more_than_colour():
    series = [Series(Text(f"s{i}"), [Point(1, 1.0 + i)], dashed=i == 7) for i in range(20)]
    lines = marks(svg(chart(series=series)))
    groups = [e["class"] for e in Page(svg(chart(series=series))).all("g") if "data-index" in e]
    assert {g.split()[1] for g in groups} == {f"s{i}" for i in range(COLORS)}
    assert len({(m["d"], group) for m, group in zip(lines, groups, strict=True)}) == 20
    assert 'class="line dashed"' in svg(chart(series=series))
    bars = Page(svg(chart("bars", series)))
    assert len([m for m in bars.elements if m.get("class") == "hollow" and "data-value" in m]) == 1
    assert len(bars.all("pattern")) > 10
    for mark in bars.elements:
        used = re.findall(r"url\(#(.*?)\)", mark.get("fill", ""))
        assert all(bars.all("pattern", id=name) for name in used)


def test_parts_are_stacked_on_each_other():
    series = [Series(Text(n), [Point("a", y), Point("b", -y)]) for n, y in (("x", 1.0), ("y", 2.0), ("z", 3.0))]
    found = marks(svg(chart("stacked", series)))
    ups = [m for m in found if m["data-way"] == "1"]
    downs = [m for m in found if m["data-way"] == "-1"]
    for below, above in pairwise(ups):
        assert float(above["y"]) + float(above["height"]) == pytest.approx(float(below["y"]), abs=0.2)
    for above, below in pairwise(downs):
        assert float(above["y"]) + float(above["height"]) == pytest.approx(float(below["y"]), abs=0.2)
    assert float(ups[2]["height"]) == pytest.approx(3 * float(ups[0]["height"]), rel=0.02)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0"),
        (0.1, "0.1"),
        (0.25, "0.25"),
        (20, "20"),
        (1000, "1k"),
        (1024, "1024"),
        (1500, "1.5k"),
        (16384, "16384"),
        (10_000_000, "10M"),
        (2_500_000_000, "2.5G"),
        (-2000, "-2k"),
        (0.00001, "1e-5"),
        (999.96, "1000"),
    ],
)
def test_numbers_on_axes_are_short(value, expected):
    assert number(value) == expected


def tick_texts(drawing):
    return [e["text"] for e in Page(drawing).all("text") if "muted" in e.get("class", "").split()]


def test_ticks_are_round_numbers():
    texts = tick_texts(svg(with_points(Point(0, 0.0), Point(100, 9.7))))
    assert " ".join(texts) == "0 2 4 6 8 10 0 20 40 60 80 100"
    powers = [Point(2**i, 10.0**i) for i in range(7, 12)]
    texts = tick_texts(svg(with_points(*powers, log_x=True, log_y=True)))
    assert texts == ["10M", "100M", "1G", "10G", "100G", "128", "256", "512", "1024", "2048"]
    close = tick_texts(svg(with_points(Point(1, 1e9 + 1), Point(2, 1e9 + 2), kind="lines")))
    assert len(set(close[:6])) == 6


def test_a_large_std_does_not_stretch_a_logarithmic_axis():
    points = [Point(1, 1.0, std=0.999999), Point(2, 8.0, std=9.0)]
    assert tick_texts(svg(with_points(*points, log_y=True)))[:7] == ["0.2", "0.5", "1", "2", "5", "10", "20"]


def boxes(drawing, language):
    """Of texts that are level: their lines' left, right, top and bottom, by the estimate of width."""
    for element in re.finditer(r"<text ([^>]*)>(.*?)</text>", drawing):
        attributes = dict(re.findall(r'([\w-]+)="([^"]*)"', element[1]))
        shown = {"en", "zh"} & set(attributes.get("class", "").split()) or {language}
        if "transform" in attributes or language not in shown:
            continue
        lines = re.sub(r"<title>.*?</title>", "", element[2]).replace("</tspan>", "").split("<tspan")
        for i, line in enumerate(lines):
            text = unescape(line.split(">", 1)[-1] if i else line)
            width = text_width(text)
            shift = {"middle": width / 2, "end": width}.get(attributes.get("text-anchor", ""), 0)
            x, y = float(attributes["x"]) - shift, float(attributes["y"]) + i * 18
            yield text, x, x + width, y - 11, y + 3


NAMES = ["x", "融合的层归一化与残差相加" * 6, LONG, "w" * 200, "void at::native::elementwise_kernel<128, 4>"]


@pytest.mark.parametrize("language", ["en", "zh"])
@every_kind
@every_width
def test_texts_are_neither_cut_off_nor_on_top_of_each_other(fields, language, width):
    numbers = fields["kind"] == "lines"
    points = [Point(10.0**i if numbers else name, 1e6 * (i + 1)) for i, name in enumerate(NAMES)]
    series = [Series(Text(name, f"中文{name}"), points) for name in NAMES]
    drawing = svg(replace(chart(series=series, **fields), y=Text(LONG), x=Text("长" * 150)), width)
    (root,) = Page(drawing).all("svg")
    height = float(root["viewbox"].split()[3])
    found = list(boxes(drawing, language))
    for text, left, right, top, bottom in found:
        assert left >= -1, text
        assert right <= width + 1, text
        assert 0 <= top <= bottom <= height, text
    for i, (text, left, right, top, bottom) in enumerate(found):
        for other, left2, right2, top2, bottom2 in found[i + 1 :]:
            apart = right <= left2 or right2 <= left or bottom <= top2 or bottom2 <= top
            assert apart, (text, other)


def test_long_names_under_bars_are_turned_and_many_are_thinned_out():
    drawing = svg(page_cases.many_bars(count=200))
    turned = re.findall(r"rotate\(-45 ([\d.]+)", drawing)
    assert 10 < len(turned) < 40
    assert all(float(b) - float(a) > 20 for a, b in pairwise(turned))
    short = svg(with_points(Point("a", 1.0), Point("b", 2.0), kind="bars"))
    assert "rotate" not in short


def test_a_name_that_was_cut_is_there_in_full():
    drawing = svg(with_points(Point("w" * 200, 1.0), kind="bars", horizontal=True))
    assert f"<title>{'w' * 200}</title>" in drawing


def test_a_line_of_many_points_has_a_bounded_number_of_marks():
    many = with_points(*(Point(i, float(i % 7)) for i in range(10_000)))
    assert 100 < len(marks(svg(many))) <= 400
    assert svg(many).count("L") > 9_000


def test_the_same_chart_gives_the_same_text():
    assert svg(page_cases.memory_chart()) == svg(page_cases.memory_chart())


# Colours


def contrast(one, other):
    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted(map(luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def test_colours_can_be_told_from_the_background():
    assert len(set(LIGHT)) == len(set(DARK)) == COLORS
    variables = [dict(re.findall(r"--([a-z]\w*): (#\w{6})", part)) for part in re.split(r" color-scheme: ", STYLE)[1:]]
    assert [len(v) > 15 for v in variables] == [True] * 3
    for colors in variables:
        for index in range(COLORS):
            assert contrast(colors[f"c{index}"], colors["page"]) >= 3, index
        for name in ("text", "muted", "link"):
            assert contrast(colors[name], colors["page"]) >= 4.5, name
            assert contrast(colors[name], colors["panel"]) >= 4.5, name
    assert all(f".s{index} {{" in STYLE for index in range(COLORS))


# The page


@pytest.fixture(scope="module")
def html():
    return page(page_cases.sample(), "en", page_cases.chinese)


def test_the_page_has_its_parts(html):
    found = Page(html)
    assert [e["text"] for e in found.all("h2")][:2] == ["In short概要", "Time of a training step训练一步的时间"]
    for tag in ("header", "nav", "main"):
        assert len(found.all(tag)) == 1
    sections = ["summary", "step-time", "attention", "memory", "missing", "remarks"]
    assert [e["id"] for e in found.all("section")] == sections
    assert [e["href"][1:] for e in found.all("a") if "nav" in e["within"]] == sections
    assert [len(found.all(tag)) for tag in ("figure", "svg")] == [7, 14]  # each drawn wide, and narrow for a phone
    assert len(found.all("table")) == 3
    assert {"traces/step.html", "https://example.org/guide"} <= {e.get("href") for e in found.all("a")}
    assert "cs336 run ddp-overlap --preset course" in {e["text"] for e in found.all("code")}
    assert "2 lines could not be read." in html
    assert "NVIDIA H200, 139.8 GiB" in {e["text"] for e in found.all("dd")}
    assert "bfloat16 is 2.4x as fast as float32 at xl." in html
    assert "<li>x against eager</li>" in html


def test_ids_are_unique_and_anchors_lead_somewhere(html):
    found = Page(html)
    ids = [e["id"] for e in found.elements if "id" in e]
    assert len(set(ids)) == len(ids)
    assert {e["href"][1:] for e in found.all("a") if e["href"].startswith("#")} <= set(ids)
    for element in found.elements:
        if "aria-labelledby" in element:
            assert element["aria-labelledby"] in ids


def test_sections_of_the_same_name_have_their_own_anchors():
    sections = [Section(name, Text(name), Text("")) for name in ("a b", "a-b", "main", "时间", "tooltip", "a-b-2")]
    found = Page(page(Document(Text("t"), sections=sections)))
    ids = [e["id"] for e in found.elements if "id" in e]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[\w-]+", one, re.ASCII) for one in ids)


def test_everything_has_an_accessible_name(html):
    found = Page(html)
    for element in found.elements:
        if element["tag"] in ("svg", "select") or element.get("role") in ("region", "button", "img"):
            assert element["aria-label"], element
        if element["tag"] in ("button", "a", "th", "summary", "option"):
            assert element["text"].strip(), element
    assert found.all("html")[0]["lang"] == "en"
    assert found.all("a")[0]["href"] == "#main"


def test_both_languages_are_there_where_they_differ(html):
    assert '<span class="en">Attention</span><span class="zh" lang="zh-CN">注意力</span>' in html
    assert '<span class="en">step time (ms)</span><span class="zh" lang="zh-CN">单步时间 (ms)</span>' in html
    assert '<span class="en">means of 10 steps</span>' in html
    assert "<li>x against eager</li>" in html
    assert '<span class="zh" lang="zh-CN">机器</span>' in html
    shown = [re.findall(rf'class="(?:[a-z]+ )?{language}"', html) for language in ("en", "zh")]
    assert len(shown[0]) == len(shown[1]) > 50


def test_the_language_it_opens_in():
    found = Page(page(page_cases.sample(), "zh"))
    (root,) = found.all("html")
    assert (root["lang"], root["data-language"]) == ("zh-CN", "zh")
    assert found.all("title")[0]["text"] == "时间与显存花在哪里"
    assert found.all("title")[0]["data-en"] == "Where time and memory go"


def test_nothing_is_loaded(html):
    without_links = re.sub(r'<a href="https://example.org[^>]*>', "", html)
    assert not re.search(r"https?://|<link[^>]*stylesheet|<script[^>]* src|@import|url\((?!#)|\bfetch\(", without_links)
    assert [e["href"] for e in Page(html).all("link")] == ["data:,"]
    assert "default-src 'none'" in html


def evil_document():
    text = Text(EVIL, EVIL + "中")
    columns = [Column(EVIL, EVIL, numeric=False), Column(EVIL)]
    table = Table(EVIL, columns, [[EVIL, EVIL]], [EVIL])
    points = [Point(EVIL, 1.0), Point(EVIL + "b", math.nan, note=text)]
    charts = [
        Chart(EVIL, text, kind, text, text, [Series(text, points), Series(text, points)], horizontal=horizontal)
        for kind in ("lines", "bars", "stacked")
        for horizontal in (False, True)
    ]
    links = [Link(text, EVIL), Link(text, "javascript:alert(1)"), Link(text, '#" onclick="alert(1)')]
    section = Section(EVIL, text, text, [text], [table], charts, links)
    return Document(text, {EVIL: EVIL}, [section], {EVIL: EVIL}, [text])


def test_no_text_can_break_out():
    html = page(evil_document(), "en", lambda english: english + "<script>alert(2)</script>")
    found = Page(html)
    assert len(found.all("script")) == 3
    assert found.all("img") == []
    assert not [e for e in found.elements if any(name.startswith("on") for name in e)]
    assert html.count("</script>") == 3
    assert not [e for e in found.all("a") if "javascript" in e["href"].lower()]
    assert html.encode("utf-8")


def test_what_is_copied_is_what_the_table_renders(html):
    copies = json.loads(re.search(r'<script id="copies"[^>]*>(.*?)</script>', html, re.DOTALL)[1])
    table = page_cases.step_table()
    assert copies[0] == [table.render("md"), table.render("latex")]
    assert len(copies) == 3
    assert "Copy as Markdown" in html
    assert "Copy as LaTeX" in html


@pytest.mark.parametrize(
    ("href", "kept"),
    [
        ("traces/step.html", True),
        ("../a b.html", True),
        ("./x:y.html", True),
        ("#memory", True),
        ("https://example.org/?a=b:c", True),
        ("HTTP://example.org", True),
        ("page.html?next=javascript:1", True),
        ("javascript:alert(1)", False),
        (" JavaScript:alert(1)", False),
        ("java\nscript:alert(1)", False),
        ("\x01javascript:alert(1)", False),
        ("\tjava\tscript\t:alert(1)", False),
        ("data:text/html,<script>", False),
        ("vbscript:x", False),
        ("file:///etc/passwd", False),
        ("//example.org", False),
        ("\\\\example.org", False),
        ("", False),
    ],
)
def test_links_lead_to_files_and_to_the_web_only(href, kept):
    assert bool(safe_href(href)) == kept
    html = page(Document(Text("t"), sections=[Section("s", Text("s"), Text(""), links=[Link(Text("here"), href)])]))
    assert (len([e for e in Page(html).all("a") if e["text"] == "here"]) == 1) == kept
    assert "here" in html


def with_tables(*tables, name="s"):
    return Page(page(Document(Text("t"), sections=[Section(name, Text("s"), Text(""), tables=tables)])))


def test_it_begins_with_the_first_finding_of_every_section(html):
    lines = [e["text"] for e in Page(html).all("li") if "section" in e["within"] and e["within"][-1] == "ul"]
    assert lines[0] == (
        "Time of a training step训练一步的时间"
        "bfloat16 is 2.4x as fast as float32 at xl.在 xl 规模下,bfloat16 的速度是 float32 的 2.4 倍。"
    )
    assert lines[1].startswith("Attention注意力PyTorch")
    summary = html[html.index('<section id="summary">') :].split("</section>")[0]
    assert re.findall(r'href="#(.*?)"', summary) == ["step-time", "attention"]  # of memory nothing was found
    assert 'id="summary"' not in page(Document(Text("t"), sections=[Section("s", Text("s"), Text(""))]))


def test_a_tall_table_has_a_button_for_its_other_rows(html):
    assert [e["text"] for e in Page(html).all("summary")] == ["Contents目录"]
    buttons = [e for e in Page(html).all("button") if e.get("class") == "rows"]
    assert [e["text"] for e in buttons] == [
        "Show all 30 rows显示全部 30 行Show fewer收起",
        "Show all 450 rows显示全部 450 行Show fewer收起",
    ]
    assert all(e["aria-expanded"] == "false" for e in buttons)
    shown = [e for e in with_tables(page_cases.step_table(15)).all("button") if e.get("class") == "rows"]
    assert shown == []


def test_a_row_costs_nothing_but_its_cells():
    """So that a table of thousands stays small."""
    html = page(Document(Text("t"), sections=[Section("s", Text("s"), Text(""), tables=[page_cases.step_table(50)])]))
    body = html[html.index("<tbody>") : html.index("</tbody>")]
    assert set(re.findall(r"<tr[^>]*>", body)) == {"<tr>"}


def test_the_first_tables_are_shown_and_the_others_in_one_that_opens():
    found = Page(page(page_cases.many_tables(), "en", page_cases.chinese))
    summaries = [e["text"] for e in found.all("summary")]
    assert summaries == [
        "Contents目录",
        "3 more tables另有 3 张表",
        "One more table: 另有一张表：Last NVIDIA H200, batch 30",
    ]
    tables = [e for e in found.all("div") if e.get("class", "").split()[:1] == ["table"]]
    folded = [e["id"] for e in tables if "details" in e["within"]]
    assert folded == ["table-forward", "table-backward", "table-peak", "table-last"]
    assert len(tables) == 4 + 2 + 3 + 1 + 1
    inside = [e["href"] for e in found.all("a") if "details" in e["within"] and "nav" not in e["within"]]
    assert inside == ["#table-forward", "#table-backward", "#table-peak"]


def test_a_title_is_without_its_sections_name():
    titles = [e["text"] for e in with_tables(Table("s: time · H200, s: x", [], []), Table("s: ", [], [])).all("h3")]
    assert titles == ["Time H200, s: x", "S: "]
    titles = [e["text"] for e in with_tables(Table("s: time", [], []), name="t").all("h3")]
    assert titles == ["S: time"]


def test_findings_stand_beside_a_chart_that_would_be_alone():
    def classes(charts, findings=1):
        texts = [Text("found")] * findings
        section = Section("s", Text("s"), Text(""), texts, charts=[chart()] * charts)
        found = Page(page(Document(Text("t"), sections=[section])))
        return [e["class"] for e in found.all("ul") if "findings" in e.get("class", "")]

    assert [classes(count) for count in range(4)] == [
        ["findings whole"],
        ["findings"],
        ["findings whole"],
        ["findings"],
    ]
    assert classes(1, findings=0) == []


def test_an_empty_report_says_so():
    html = page(Document(Text("nothing")))
    assert "There are no measurements" in html
    assert Page(html).all("nav")


def test_rows_shorter_or_longer_than_their_heads():
    table = Table("t", [Column("a"), Column("b")], [["1"], [], ["2", "3", "4"]])
    found = Page(page(Document(Text("t"), sections=[Section("s", Text("s"), Text(""), tables=[table])])))
    assert [e["text"] for e in found.all("td")] == ["3", "4"]


def test_a_large_report_is_small_and_made_in_time():
    makers = (page_cases.scaling_chart, page_cases.loss_chart, page_cases.step_chart, page_cases.memory_chart)
    sections = [
        Section(
            f"section {i}",
            Text(f"Section {i}", f"第 {i} 节"),
            Text("Why?", "为什么?"),
            tables=[page_cases.step_table(30) for _ in range(6)],
            charts=[makers[(3 * i + j) % len(makers)](f"chart-{i}-{j}") for j in range(3)],
        )
        for i in range(10)
    ]
    began = time.process_time()
    html = page(Document(Text("large"), sections=sections), "en", page_cases.chinese)
    assert time.process_time() - began < 1
    assert len(html.encode()) < 5e6
    assert page(Document(Text("large"), sections=sections), "en", page_cases.chinese) == html
