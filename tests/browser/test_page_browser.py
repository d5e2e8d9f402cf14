"""The page of a report in a browser: sorting, tooltips, folding, copying, both languages, print, no requests."""

import math
from dataclasses import replace

import pytest

from cs336_systems.report.document import Document, Point, Series
from cs336_systems.report.web.page import page
from cs336_systems.table import Column, Table
from cs336_systems.text import Text
from tests.browser.geometry import COLLISIONS, LAY_OUT, OVERLAPS, WIDTHS
from tests.unit.report import page_cases
from tests.unit.report.page_cases import KINDS, STEP, chart, long_names, stacked, with_charts, with_points, with_tables

pytestmark = pytest.mark.xdist_group("browser")  # one browser for all
DARK, LIGHT = "rgb(22, 24, 27)", "rgb(255, 255, 255)"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """Writes a document as a page; the path."""
    folder = tmp_path_factory.mktemp("pages")

    def write(document, name="page.html", language="en"):
        (folder / name).write_text(page(document, language), encoding="utf-8")
        return folder / name

    return write


@pytest.fixture(scope="module")
def path(write):
    return write(page_cases.sample(), "sample.html")


@pytest.fixture(scope="module")
def tables_path(write):
    return write(page_cases.many_tables(), "tables.html")


@pytest.fixture
def sample(browser, path):
    """The sample as on a first visit; nothing is requested and no error is logged."""
    yield browser.open(path)
    assert browser.errors == []
    assert set(browser.requests) <= {path.as_uri(), "data:,"}


@pytest.fixture
def tables(browser, tables_path):
    yield browser.open(tables_path)
    assert browser.errors == []


def test_nothing_hostile_runs(browser, write):
    path = write(page_cases.hostile_document(), "hostile.html")
    # The policy of the page refuses even a script that was not escaped.
    html = path.read_text(encoding="utf-8").replace("</main>", "<script>window.ran = true</script></main>")
    path.write_text(html, encoding="utf-8")
    browser.open(path)
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run("window.ran === undefined")
    assert browser.run("document.documentElement.dataset.language") == "en"
    browser.one("[data-value]", "e.focus()")
    assert browser.run("tooltip.querySelectorAll('script, img').length") == 0
    assert browser.run("tooltip.querySelector('b').textContent").startswith("</script><script>alert(1)")


# Sorting


def column(browser, index):
    return browser.each("tbody tr", f"e.cells[{index}].textContent")


def test_headings_sort_by_value_by_name_and_by_keyboard(browser, write):
    cells = ["1,234.5", "3.1 ± 0.2", "", "12.3%", "1.50x", "out of memory", "-2", "1e3", "−7.5", "–", "99 GiB", "fast"]
    rows = [[f"row {i}", cell, Text(str(i % 3), f"{i % 3} 个")] for i, cell in enumerate(cells)]
    columns = [Column(Text("name"), numeric=False), Column(Text("value")), Column(Text("same"))]
    browser.open(write(with_tables(Table(Text("t"), columns, rows))))
    numbers = ["−7.5", "-2", "1.50x", "3.1 ± 0.2", "12.3%", "99 GiB", "1e3", "1,234.5"]
    for state, expected in (
        ("ascending", [*numbers, "fast", "out of memory", "", "–"]),
        ("descending", [*reversed(numbers), "out of memory", "fast", "", "–"]),
        (None, cells),
    ):
        browser.click("thead button", 1)
        assert (browser.one("thead th", "e.ariaSort", 1), column(browser, 1)) == (state, expected)
    browser.click("thead button", 0)
    assert column(browser, 0) == [f"row {i}" for i in range(12)]  # 10 after 9
    browser.click("thead button", 2)
    assert column(browser, 0)[:4] == ["row 0", "row 3", "row 6", "row 9"]  # equal rows keep their order
    browser.one("thead button", "e.focus()", 1)
    for key, first in (("Enter", "−7.5"), (" ", "1,234.5")):
        browser.key(key)
        assert column(browser, 1)[0] == first
    assert browser.errors == []


# Charts


def test_tooltips_of_the_pointer_and_of_the_focus(sample):
    sample.point_at("#attention-time .series path.mark", 3)
    assert sample.tooltip() == [
        *("sequence length: 1024", "PyTorch", "1.20 ± 0.096 (n = 10)", "compiled", "0.66 ± 0.0528 (n = 10)"),
        *("FlashAttention-2 (Triton)", "0.18 ± 0.0144 (n = 10)", "quadratic fit", "0.18", "time (ms)"),
    ]
    assert sample.visible(".hair") == 1
    sample.mouse("mouseMoved", 2, 2)
    assert (sample.tooltip(), sample.visible(".hair")) == (None, 0)
    sample.point_at("#attention-time .series .cross")
    assert sample.tooltip()[:3] == ["sequence length: 8192", "PyTorch", "out of memory"]
    sample.choose("language", "zh")
    sample.point_at("#attention-time .series .cross")
    assert sample.tooltip()[:3] == ["序列长度: 8192", "PyTorch 朴素实现", "显存不足"]
    assert sample.tooltip()[-1] == "时间(毫秒)"


def test_the_tooltip_of_a_bar_lists_its_group_and_that_of_a_dot_is_its_own(browser, write):
    rows = [Series(Text(name), [Point("a", y), Point("b", y + 1)]) for name, y in (("x", 1.0), ("y", 5.0))]
    charts = [replace(chart(kind, rows), name=kind) for kind in ("bars", "stacked", "dots")]
    browser.open(write(with_charts(*charts)))
    for kind in ("bars", "stacked"):
        browser.point_at(f"#{kind} .series rect", 1)
        assert browser.tooltip() == ["size: b", "x", "2", "y", "6", "time (ms)"]
    browser.point_at("#dots .series .mark", 1)
    assert browser.tooltip() == ["size: b", "x", "2", "time (ms)"]
    browser.click("#bars .entry")
    browser.point_at("#bars .series:not(.off) rect", 1)
    assert browser.tooltip() == ["size: b", "y", "6", "time (ms)"]


def test_arrow_keys_move_along_and_between_series(sample):
    chart = "#attention-time svg:not(.narrow)"
    sample.one(f"{chart} .entry", "e.focus()")
    for key, series, length in (
        ("Tab", "PyTorch", 128),
        ("ArrowRight", "PyTorch", 256),
        ("ArrowLeft", "PyTorch", 128),
        ("ArrowLeft", "PyTorch", 16384),
        ("ArrowDown", "compiled", 16384),
        ("ArrowLeft", "compiled", 8192),
        ("ArrowDown", "FlashAttention-2 (Triton)", 8192),
        ("ArrowUp", "compiled", 8192),
    ):
        sample.key(key)
        assert sample.tooltip()[:2] == [f"sequence length: {length}", series]
        name = sample.run("document.activeElement.ariaLabel")
        assert name.startswith(f"{series}, {length}: ")
        left, top, right, _ = sample.box("#tooltip")
        mark = sample.run("(b => [b.left, b.top])(document.activeElement.getBoundingClientRect())")
        assert left <= mark[0] <= right
        assert top < mark[1]
    assert len(sample.each(f"{chart} [data-value][tabindex='0']", "0")) == 1
    sample.key("Escape")
    assert sample.tooltip() is None
    sample.key("Tab")
    assert sample.run("document.activeElement.closest('#attention-time')") is None  # one tab stop


def test_arrow_keys_move_between_entries_and_headings(sample):
    for row, count in (
        ("#attention-time svg:not(.narrow) .entry", 4),
        ("#table-Attention-forward-and-backward thead button", 6),
    ):
        assert len(sample.each(row, "0")) == count
        assert sample.each(row, "e.tabIndex") == [0, *[-1] * (count - 1)]
        sample.one(row, "e.focus()")
        for key, place in (("ArrowRight", 1), ("ArrowLeft", 0), ("ArrowLeft", count - 1)):
            sample.key(key)
            assert sample.one(row, "e === document.activeElement", place)
        assert sample.each(row, "e.tabIndex") == [*[-1] * (count - 1), 0]


@pytest.mark.parametrize(("width", "drawings"), [(390, "svg.narrow"), (1400, "svg:not(.narrow)")])
def test_tooltips_stay_in_the_window(browser, path, width, drawings):
    browser.open(path, width=width, height=844)
    marks = f"{drawings} [data-value]"
    for index in range(0, len(browser.each(marks, "0")), 17):
        browser.one(marks, "(e.setAttribute('tabindex', '0'), e.focus())", index)
        browser.frame()
        left, top, right, bottom = browser.box("#tooltip")
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= 844


def test_a_legend_entry_hides_and_shows_its_series(sample):
    def state():
        return sample.visible("#attention-time svg:not(.narrow) .series"), sample.one(
            "#attention-time .entry", "e.ariaPressed"
        )

    x, y = sample.point_at("#attention-time .entry text.en")
    for kind in ("mousePressed", "mouseReleased"):
        sample.mouse(kind, x, y, button="left", clickCount=1)
    assert state() == (3, "false")
    sample.one("#attention-time .entry", "e.focus()")
    sample.key("Enter")
    assert state() == (4, "true")
    sample.key(" ")
    assert state() == (3, "false")
    stops = sample.each("#attention-time svg:not(.narrow) [data-value][tabindex='0']", "e.parentElement.dataset.series")
    assert stops == ["compiled"]  # a chart keeps its tab stop
    sample.resize(390)
    sample.frame()
    assert sample.visible("#attention-time svg.narrow .series") == 3  # in the drawing for phones, too


@pytest.mark.parametrize(("figure", "edge"), [("memory-across", 0), ("memory-up", 3)])
def test_stacked_parts_close_the_gap_of_a_hidden_part(sample, figure, edge):
    def edges():
        count = len(sample.each(f"#{figure} .series:not(.off)", "0"))
        return [sample.box(f"#{figure} .series:not(.off) rect:first-of-type", index)[edge] for index in range(count)]

    def sums():
        return sample.each(f"#{figure} svg:not(.narrow) .value:not(.off)", "e.textContent")

    before = edges()
    assert sums() == ["10.8", "7.20", "5.40"]
    sample.click(f"#{figure} .entry")
    assert edges()[0] == pytest.approx(before[0], abs=1)
    assert sums() == ["9.60", "6.40", "4.80"]  # without the parameters
    sample.click(f"#{figure} .entry")
    assert edges() == pytest.approx(before, abs=0.1)
    assert sums() == ["10.8", "7.20", "5.40"]


TICKS = "[...e.querySelectorAll('.ticks text')].map(t => t.textContent)"
PLACES = """(grid => [...e.querySelectorAll('.series:not(.off) [data-value]')].map(m => m.getBoundingClientRect())
  .map(b => e.matches('[data-horizontal]') ? (b.right - grid.left) / grid.width : (grid.bottom - b.top) / grid.height)
)(e.querySelector('.grid').getBoundingClientRect())"""
"""Where the marks of a drawing end, from 0 to 1 along the axis of values."""


@pytest.mark.parametrize("fields", [*KINDS.values(), {"kind": "dots"}, {"kind": "dots", "log_y": True}], ids=str)
def test_hiding_series_draws_the_axis_of_the_others(browser, write, fields):
    """As in a chart without them, also if they are a thousand times as large."""

    def times(size):
        xs = (2**i if fields["kind"] == "lines" else f"bar {i}" for i in range(4))
        interval = {"low": size, "high": size * 6} if fields["kind"] == "dots" else {"std": size / 5}
        return Series(Text(f"times {size}"), [Point(x, size * (i + 2), **interval) for i, x in enumerate(xs)])

    whole = chart(series=[times(1000.0), times(1.3), times(0.004)], **fields)
    parts = [replace(whole, name=f"from-{first}", series=whole.series[first:]) for first in range(3)]
    browser.open(write(with_charts(*parts)))
    for first in (1, 2):
        browser.click("#from-0 svg:not(.narrow) .entry", first - 1)
        for expression in (PLACES,) if fields["kind"] == "dots" or "horizontal" in fields else (TICKS, PLACES):
            found, expected = (browser.one(f"#from-{n} svg:not(.narrow)", expression) for n in (0, first))
            assert found == (expected if expression == TICKS else pytest.approx(expected, abs=0.02))
        assert browser.run(OVERLAPS) == []
    for entry in (0, 1):
        browser.click("#from-0 svg:not(.narrow) .entry", entry)
    assert browser.one("#from-0 svg:not(.narrow)", TICKS)[-1] == browser.one("#from-0 svg.narrow", TICKS)[-1]
    assert browser.errors == []


def test_a_cut_bar_that_shrinks_below_the_cut_has_its_whole_length(browser, write):
    browser.open(write(with_charts(replace(stacked(93.0, 8.0), name="plan"))))
    texts = "#plan svg:not(.narrow) .value"
    assert browser.each(texts, "e.textContent") == ["→ 93", "8"]
    series = list(stacked(93.0, 8.0).series)
    series[0] = replace(series[0], points=[Point("bar 0", 80.0), Point("bar 1", 4.0)])
    series[1] = replace(series[1], points=[Point("bar 0", 13.0), Point("bar 1", 4.0)])
    browser.open(write(with_charts(replace(stacked(1.0), series=series))))
    browser.click(".entry")
    assert browser.each(texts, "e.textContent") == ["13", "4"]
    assert browser.box(texts)[0] == pytest.approx(browser.box("#plan .series:not(.off) rect")[2], abs=9)


def test_texts_of_charts_do_not_overlap_in_the_browsers_fonts(browser, write):
    charts = [chart for section in page_cases.sample().sections for chart in section.charts]
    for number, fields in enumerate(KINDS.values()):
        charts += [replace(long_names(**fields), name=f"long-{number}", x=Text("长" * 90)), chart(**fields)]
    browser.open(write(with_charts(*charts)))
    browser.run(LAY_OUT)
    for width in WIDTHS:
        browser.resize(width)
        for language in ("en", "zh"):
            browser.choose("language", language)
            assert browser.run(OVERLAPS) == []
            assert browser.run(COLLISIONS) == []


@pytest.mark.parametrize("case", [page_cases.sample, page_cases.first_screen, page_cases.many_tables])
def test_parts_of_the_page_do_not_overlap(browser, write, case):
    browser.open(write(case()))
    browser.run(LAY_OUT)
    for width in WIDTHS:
        browser.resize(width)
        for language in ("en", "zh"):
            browser.choose("language", language)
            assert browser.run(COLLISIONS) == []


def test_spans_limits_and_cut_bars(browser, write):
    browser.open(write(with_charts(STEP, stacked(12_345.0, 36.0, 8.0))))
    assert browser.run(OVERLAPS) == []
    assert not any(browser.each(".plot", "e.scrollWidth > e.clientWidth + 1"))  # a cut bar does not widen the page
    for figure, key, text in (
        ("lanes", "ArrowDown", "wrapper: naivebackward4 – 10ms since"),
        ("plan", "ArrowUp", "GPU memory10GiB"),
    ):
        browser.one(f"#{figure} svg:not(.narrow) [data-value][tabindex='0']", "e.focus()")
        browser.key(key)
        assert browser.run("tooltip.textContent") == text
    browser.key("ArrowRight")
    assert browser.run("document.activeElement.parentElement.dataset.series") == "GPU memory"
    browser.click(".entry", 3)
    assert [browser.visible(selector) for selector in (".entry", ".series.off", ".limit path")] == [5, 0, 2]
    assert browser.errors == []


def test_pages_without_values_run(browser, write):
    for document in (Document(Text("nothing")), with_charts(with_points(Point(1, math.nan)))):
        browser.open(write(document))
        assert browser.errors == []


# Language and theme


def test_the_language_is_switched_and_kept(sample, path):
    chart = "#attention-time svg"
    english = sample.visible(".en")
    assert (english > 50, sample.visible(".zh")) == (True, 0)
    sample.choose("language", "zh")
    assert (sample.visible(".en"), sample.visible(".zh")) == (0, english)
    assert sample.run("[document.documentElement.lang, document.title]") == ["zh-CN", "时间与显存花在哪里"]
    assert "注意力前向加反向" in sample.one(chart, "e.ariaLabel")
    assert sample.run("theme.options[1].textContent") == "主题：浅色"
    sample.open(path, fresh=False)
    assert sample.run("document.documentElement.dataset.language + language.value") == "zhzh"
    sample.choose("language", "en")
    assert sample.visible(".zh") == 0
    assert "Attention, forward" in sample.one(chart, "e.ariaLabel")


def test_the_theme_follows_the_system_until_one_is_chosen_and_kept(browser, path):
    browser.open(path, scheme="dark")
    assert browser.run(BACKGROUND) == DARK
    browser.choose("theme", "light")
    assert browser.run(BACKGROUND) == LIGHT
    browser.open(path, scheme="dark", fresh=False)
    assert (browser.run(BACKGROUND), browser.run("theme.value")) == (LIGHT, "light")
    browser.media(scheme="light")
    browser.choose("theme", "dark")
    assert browser.run(BACKGROUND) == DARK
    browser.choose("theme", "system")
    assert browser.run(BACKGROUND) == LIGHT


def test_a_page_without_storage_still_switches(browser, path, tmp_path):
    html = path.read_text(encoding="utf-8").replace("localStorage.", "window.noStorage.")
    (tmp_path / "refused.html").write_text(html.replace("Content-Security-Policy", "x-none"), encoding="utf-8")
    browser.open(tmp_path / "refused.html")
    browser.choose("language", "zh")
    browser.choose("theme", "dark")
    assert browser.visible(".en") == 0
    assert browser.run(BACKGROUND) == DARK
    assert browser.errors == []


# Copying


@pytest.mark.parametrize("clipboard", ["granted", "denied", "denied and no selection"])
def test_tables_are_copied(sample, clipboard):
    sample.run("window.setTimeout = () => 0")  # the message below the table stays
    if clipboard == "granted":
        sample.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    else:
        sample.run("navigator.clipboard.writeText = async () => { throw new Error('denied'); }")
        done = str(clipboard == "denied").lower()
        sample.run(f"document.execCommand = () => {{ window.copied = document.activeElement.value; return {done}; }}")
    for index, format in enumerate(("md", "latex")):
        sample.click(".copy button", index)
        assert sample.run("copied") == page_cases.step_table().render(format)
        message = sample.one(".copy output", "e.textContent")
        assert message == ("could not copy" if clipboard == "denied and no selection" else "copied")
    assert sample.run("document.querySelectorAll('textarea').length") == 0


def test_copies_have_the_rows_in_the_order_shown(sample):
    sample.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    for _ in range(2):
        sample.click("thead button", 1)
    shown = sample.each("#table-Attention-forward-and-backward tbody tr", "e.cells[2].innerText")
    table = page_cases.step_table()
    assert shown != [row[2] for row in table.rows]
    by_time = {row[2]: row for row in table.rows}
    for index, format in enumerate(("md", "latex")):
        sample.click(".copy button", index)
        assert sample.run("copied") == replace(table, rows=[by_time[text] for text in shown]).render(format)


# Navigation and layout


def test_contents_lead_to_their_sections(sample):
    sample.key("Tab")
    assert sample.run("document.activeElement.className") == "skip"
    assert sample.box(".skip")[0] >= 0
    sample.key("Enter")
    assert sample.run("document.activeElement.id") == "main"
    for link in ("attention", "memory"):
        sample.one(f'nav a[href="#{link}"]', "e.click()")
        sample.frame()
        assert sample.run("location.hash") == f"#{link}"
        assert 0 <= sample.box(f"#{link}")[1] < 40
        assert sample.box("nav")[1] >= 0
    assert sample.one("nav [aria-current]", "e.hash") == "#memory"
    assert sample.visible("nav a") == 5


def test_contents_are_folded_on_a_phone(browser, tables_path):
    browser.open(tables_path, width=390)
    is_open = "document.querySelector('nav details').open"
    assert browser.run(is_open) is False
    browser.one("nav summary", "e.click()")
    browser.frame()
    assert browser.visible("nav a") == 5
    browser.one("nav a", "e.click()")
    assert browser.run(is_open) is False
    browser.run("location.hash = '#three'")
    browser.frame()
    browser.frame()
    assert browser.one("nav summary", "e.innerText").endswith("About three")
    _, top, _, bottom = browser.box("nav")
    assert top == pytest.approx(0, abs=1)
    assert browser.box("#three h2")[1] >= bottom


def test_screen_readers_get_names(sample):
    sample.call("Accessibility.enable")
    nodes = sample.call("Accessibility.getFullAXTree")["nodes"]
    sample.call("Accessibility.disable")
    names = {(n.get("role", {}).get("value"), n.get("name", {}).get("value")) for n in nodes if not n["ignored"]}
    assert ("navigation", "Contents") in names
    assert any(role == "group" and name.startswith("Attention, forward and backward") for role, name in names)
    assert ("image", "PyTorch, 128: 0.22 ± 0.0173 (n = 10)") in names  # the tab stop
    assert any(name == "PyTorch" and role in ("button", "ToggleButton") for role, name in names)


@pytest.mark.parametrize("width", [390, 800, 1200, 1400, 1920])
def test_everything_fits_and_can_be_read(browser, path, width):
    browser.open(path, width=width, height=844)
    for language in ("en", "zh"):
        browser.choose("language", language)
        assert browser.run("document.documentElement.scrollWidth") <= width
        edges = "(b => e.checkVisibility() ? [b.left, b.right] : [0, 0])(e.getBoundingClientRect())"
        found = browser.each("h1, h2, h3, p, select, .scroll, .plot, .copy button, dd, nav", edges)
        assert all(left >= 0 and right <= width for left, right in found)
    size = "getComputedStyle(e).display === 'none' ? null : [e.classList.contains('narrow'), e.clientWidth, " \
        "14 * e.clientWidth / e.viewBox.baseVal.width]"  # fmt: skip
    charts = [found for found in browser.each(".chart", size) if found]
    assert len(charts) == 5
    for narrow, chart_width, letters in charts:
        assert narrow == (width == 390)
        assert chart_width >= min(560, width - 60)
        assert letters >= 11
    if width == 390:
        assert all(browser.each(".plot", "e.scrollWidth <= e.clientWidth"))
        before = browser.box("tbody th")[0]
        browser.run("document.querySelector('.scroll').scrollLeft = 100")
        browser.frame()
        assert browser.one(".scroll", "e.scrollLeft") == 100
        assert browser.box("tbody th")[0] == before  # the first column is sticky


def test_charts_are_side_by_side_on_a_wide_window(sample):
    def boxes(section):
        count = len(sample.each(f"#{section} .board > *", "0"))
        return [sample.box(f"#{section} .board > *", index) for index in range(count)]

    findings, first, second = boxes("step-time")
    assert first[1] == second[1] > findings[1]
    assert first[2] < second[0]
    assert (findings[0], findings[2]) == (first[0], second[2])
    findings, first, second, third = boxes("attention")
    assert findings[1] == first[1] < second[1] == third[1]
    sample.resize(1200)
    sample.frame()
    assert len({box[0] for box in boxes("attention")}) == 1


def test_scrolling_is_animated_unless_motion_is_reduced(tables):
    behavior = "getComputedStyle(document.documentElement).scrollBehavior"
    assert tables.run(behavior) == "auto"
    tables.media(motion="no-preference")
    assert tables.run(behavior) == "smooth"


# Tables that are folded or scroll


def rows_seen(browser, table):
    """The second cells of the rows inside the box that clips them."""
    bottom = f"document.querySelector('#{table} .scroll').getBoundingClientRect().bottom + 1"
    rows = browser.each(f"#{table} tbody tr", f"[e.getBoundingClientRect().bottom <= {bottom}, e.cells[1].textContent]")
    return [text for seen, text in rows if seen]


def test_a_tall_table_is_folded_until_asked(tables):
    button = "#table-tall .rows"
    state = "[e.innerText, e.ariaExpanded]"
    first = [f"tall {i}.1" for i in range(12)]
    assert rows_seen(tables, "table-tall") == first
    assert tables.one(button, state) == ["Show all 40 rows", "false"]
    tables.one(button, "e.focus()")
    tables.key("Enter")
    assert rows_seen(tables, "table-tall") == [f"tall {i}.1" for i in range(40)]
    assert tables.one(button, state) == ["Show fewer", "true"]
    tables.one("#table-tall tbody tr", "e.scrollIntoView({block: 'center'})", 25)
    tables.frame()
    assert tables.box("#table-tall thead th")[1] == pytest.approx(0)  # headings stick to the window
    tables.one(button, "e.scrollIntoView({block: 'center'})")
    top = tables.box(button)[1]
    tables.key(" ")
    assert rows_seen(tables, "table-tall") == first
    assert tables.one(button, state) == ["Show all 40 rows", "false"]
    assert tables.box(button)[1] == pytest.approx(top, abs=2)
    tables.choose("language", "zh")
    assert tables.one(button, "e.innerText") == "显示全部 40 行"


@pytest.mark.parametrize("width", [390, 800, 1400])
def test_a_folded_table_ends_below_a_row(browser, tables_path, width):
    browser.open(tables_path, width=width)
    browser.each("details", "e.open = true")
    browser.frame()
    for table in ("table-tall", "table-forward", "table-last", "table-wide"):
        browser.show(f"#{table}")
        assert len(rows_seen(browser, table)) == 12, table
        end = browser.one(f"#{table} .scroll", "e.getBoundingClientRect().top + e.clientTop + e.clientHeight")
        assert browser.box(f"#{table} tbody tr", 12)[1] - end >= -1, table


def test_sorting_a_folded_table_includes_hidden_rows_and_marks_groups(tables):
    def groups(table="table-tall"):
        starts = tables.each(f"#{table} tbody tr", "e.matches('.first')")
        return tables.one(f"#{table} table", "e.classList.contains('grouped')"), [i for i, s in enumerate(starts) if s]

    assert groups() == (True, list(range(0, 40, 5)))
    assert groups("table-first") == (False, [0])
    for _ in range(2):
        tables.click("#table-tall thead button", 1)
    assert rows_seen(tables, "table-tall") == [f"tall {i}.1" for i in range(39, 27, -1)]
    assert groups() == (True, list(range(0, 40, 5)))


def test_find_in_page_unfolds_a_table(tables):
    """A search scrolls the box of the row it found, even with hidden overflow."""
    tables.one("#table-tall tbody tr", "e.scrollIntoView({block: 'center'})", 33)
    tables.frame()
    assert len(rows_seen(tables, "table-tall")) == 40
    assert tables.one("#table-tall .rows", "e.ariaExpanded") == "true"
    _, top, _, bottom = tables.box("#table-tall tbody tr", 33)
    assert 0 <= top < bottom <= 900


def test_an_anchor_opens_folded_tables(tables, tables_path):
    def seen():
        return [tables.visible("#table-peak"), tables.visible("#table-last"), 0 <= tables.box("#table-peak")[1] < 40]

    assert seen()[:2] == [0, 0]
    tables.run("location.hash = '#table-peak'")
    tables.frame()
    tables.frame()
    assert seen() == [1, 0, True]
    # The address already ends in that anchor.
    tables.run("document.querySelector('.others').open = false; scrollTo(0, 0)")
    tables.run("document.body.insertAdjacentHTML('beforeend', '<a id=again href=#table-peak>x</a>'); again.click()")
    tables.frame()
    assert seen() == [1, 0, True]
    tables.open(tables_path, anchor="#table-peak")
    assert seen() == [1, 0, True]


def test_folded_tables_are_listed_and_copied(tables):
    tables.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    tables.one(".others summary", "e.click()")
    tables.frame()
    names = tables.each(".others ol a", "e.checkVisibility() ? e.innerText.split(' ')[0] : ''")
    assert names == ["Forward", "Backward", "Peak"]
    tables.click("#table-backward .copy button")
    assert tables.run("copied") == page_cases.many_tables().sections[0].tables[2].render("md")


def test_the_summary_leads_to_the_sections(tables):
    lines = tables.each("#summary li", "e.innerText.split('\\n')")
    assert lines == [[f"About {name}", f"{name} is 2 times as fast."] for name in ("flash", "two", "three", "wide")]
    tables.one("#summary a", "e.click()", 2)
    tables.frame()
    assert tables.run("location.hash") == "#three"
    assert 0 <= tables.box("#three")[1] < 40


@pytest.mark.parametrize("width", [390, 1400])
def test_a_shadow_marks_the_side_on_which_a_table_continues(browser, tables_path, width):
    def shadows(table="table-wide"):
        opacity = "['::before', '::after'].map(side => Number(getComputedStyle(e, side).opacity))"
        return browser.one(f"#{table} .frame", opacity)

    browser.open(tables_path, width=width)
    browser.show("#table-wide")
    for scroll, expected in ((0, [0, 1]), (300, [1, 1]), (1e6, [1, 0])):
        browser.one("#table-wide .scroll", f"e.scrollLeft = {scroll}")
        browser.frame()
        assert shadows() == expected
    first = browser.one("#table-wide .frame", "e.style.getPropertyValue('--first')")
    assert first == f"{browser.one('#table-wide tbody th', 'e.offsetWidth')}px"
    if width == 1400:
        assert shadows("table-tall") == [0, 0]
        stops = [browser.one(f"#table-{name} .scroll", "e.tabIndex") for name in ("tall", "wide")]
        assert stops == [-1, 0]  # only a box that scrolls is a tab stop


# Print, and no scripts


def test_paper_has_what_the_page_shows_on_white(browser, path, tables_path):
    browser.open(path, scheme="dark")
    browser.choose("theme", "dark")
    browser.click(".entry")
    browser.run("dispatchEvent(new Event('beforeprint'))")
    browser.media("print", scheme="dark")
    assert browser.visible("select, .copy button, nav") == 0
    assert browser.run(BACKGROUND) == LIGHT
    assert browser.visible(".series") == len(browser.each("svg:not(.narrow) .series", "0"))
    assert browser.visible("tbody tr") == 3 * 12
    assert browser.visible(".part") == 2
    browser.run("dispatchEvent(new Event('afterprint'))")
    assert browser.each(".series.off", "e.dataset.index") == ["0", "0"]  # in both drawings

    browser.open(tables_path)
    browser.media("print")
    browser.run("dispatchEvent(new Event('beforeprint'))")
    browser.frame()
    assert [browser.visible(f"#table-{name} tbody tr") for name in ("tall", "other")] == [12, 15]
    assert browser.visible("#table-forward") == 0  # one of the tables that were not opened
    assert browser.visible(".rows, .others > summary, nav") == 0
    assert browser.one("#table-wide .frame", "getComputedStyle(e, '::after').content") == "none"
    browser.run("dispatchEvent(new Event('afterprint'))")
    browser.media()
    browser.frame()
    assert browser.visible("#table-forward") == 0


def test_without_scripts_everything_is_readable(browser, tables_path):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.call("Page.navigate", url=tables_path.as_uri())
        browser.wait_for(lambda found: found.get("method") == "Page.loadEventFired")
        assert len(rows_seen(browser, "table-tall")) == 40
        assert browser.visible(".rows, .copy button, select") == 0
        assert browser.run("document.documentElement.classList.contains('js')") is False
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
