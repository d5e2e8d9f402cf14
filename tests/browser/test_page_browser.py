"""The page of a report in a browser: it sorts, shows, hides, copies and speaks two languages, and loads nothing."""

import math

import pytest

from cs336_systems.report.document import Chart, Document, Point, Section, Series
from cs336_systems.report.web.page import page as write_page
from cs336_systems.table import Column, Table
from cs336_systems.text import Text
from tests.unit.report import page_cases
from tests.unit.report.test_page import EVIL, KINDS, NAMES, chart, evil_document
from tests.unit.report.test_svg import STEP, stacked
from tests.unit.report.test_timeline_page import Browser, running

pytestmark = pytest.mark.xdist_group("report page")  # one browser for all


class Watched(Browser):
    """Keeps what the page complains about and what it asks for."""

    def __init__(self, folder):
        self.complaints, self.requests = [], []
        super().__init__(folder)
        for domain in ("Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)  # else a focus set by a script is not told

    def _wait_for(self, wanted):
        def noted(message):
            method, parameters = message.get("method"), message.get("params", {})
            if method == "Runtime.exceptionThrown" or (
                method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert")
            ):
                self.complaints.append(parameters)
            elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                self.complaints.append(parameters["entry"])
            elif method == "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            return wanted(message)

        return super()._wait_for(noted)

    def press(self, key):
        """A key as a user has it: with the text that makes buttons and selects act."""
        more = {"Enter": {"text": "\r", "windowsVirtualKeyCode": 13}, " ": {"text": " ", "windowsVirtualKeyCode": 32}}
        codes = {"Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, "Escape": 27}
        extra = more.get(key) or {"windowsVirtualKeyCode": codes[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **extra)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.frame()

    def choose(self, select, value):
        self.run(f"{select}.value = {value!r}; {select}.dispatchEvent(new Event('change'))")
        self.frame()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    yield from running(Watched, tmp_path_factory)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(write_page(page_cases.sample(), "en", page_cases.chinese), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser, path):
    return fresh(browser, path)


def fresh(browser, path, **how):
    """As seen for the first time, and with no complaint."""
    browser.call("Storage.clearDataForOrigin", origin="file://", storageTypes="local_storage")
    browser.complaints.clear()
    browser.requests.clear()
    browser.open(path, **how)
    return browser


SHOWN_CHARTS = "[...document.querySelectorAll('.chart')].filter(e => getComputedStyle(e).display !== 'none')"
SHOWN = "e.checkVisibility() && getComputedStyle(e).display !== 'none'"  # the first alone is wrong for SVG groups


def visible(browser, selector):
    return browser.run(f"[...document.querySelectorAll({selector!r})].filter(e => {SHOWN}).length")


def test_no_complaint_and_no_request(opened, path):
    opened.run("document.querySelector('[data-value]').focus()")
    opened.run("document.querySelector('thead button').click()")
    opened.run("document.querySelector('.entry').dispatchEvent(new MouseEvent('click', {bubbles: true}))")
    opened.choose("language", "zh")
    opened.frame()
    assert opened.complaints == []
    assert set(opened.requests) <= {path.as_uri(), "data:,"}


def test_nothing_hostile_runs(browser, tmp_path):
    hostile = tmp_path / "hostile.html"
    html = write_page(evil_document(), "en", lambda english: english + EVIL)
    # Even what got through would be refused by the page's own policy.
    hostile.write_text(html.replace("</main>", "<script>window.ran = true</script></main>"), encoding="utf-8")
    fresh(browser, hostile)
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run("window.ran === undefined")
    assert browser.run("document.documentElement.dataset.language") == "en"
    browser.run("document.querySelector('[data-value]').focus()")
    assert browser.run("tooltip.querySelectorAll('script, img').length") == 0
    assert browser.run("tooltip.querySelector('b').textContent").startswith("</script><script>alert(1)")


def column(browser, table, index):
    return browser.run(
        f"[...document.querySelectorAll('table')[{table}].tBodies[0].rows].map(r => r.cells[{index}].textContent)"
    )


@pytest.fixture(scope="module")
def sortable(tmp_path_factory):
    cells = ["1,234.5", "3.1 ± 0.2", "", "12.3%", "1.50x", "out of memory", "-2", "1e3", "−7.5", "–", "99 GiB", "fast"]
    rows = [[f"row {i}", cell, str(i % 3)] for i, cell in enumerate(cells)]
    columns = [Column("name", numeric=False), Column("value"), Column("same")]
    table = Table("t", columns, rows)
    path = tmp_path_factory.mktemp("sortable") / "page.html"
    section = Section("s", Text("s"), Text(""), tables=[table])
    path.write_text(write_page(Document(Text("t"), sections=[section])), encoding="utf-8")
    return path


def test_headings_sort_by_value_and_leave_nothing_last(browser, sortable):
    fresh(browser, sortable)
    before = column(browser, 0, 1)
    click = "document.querySelectorAll('thead button')[1].click()"
    state = "document.querySelectorAll('thead th')[1].ariaSort"
    numbers = ["−7.5", "-2", "1.50x", "3.1 ± 0.2", "12.3%", "99 GiB", "1e3", "1,234.5"]
    browser.run(click)
    assert column(browser, 0, 1) == [*numbers, "fast", "out of memory", "", "–"]
    assert browser.run(state) == "ascending"
    browser.run(click)
    assert column(browser, 0, 1) == [*reversed(numbers), "out of memory", "fast", "", "–"]
    assert browser.run(state) == "descending"
    browser.run(click)
    assert column(browser, 0, 1) == before
    assert browser.run(state) is None


def test_names_sort_as_people_count_and_equal_rows_stay_in_order(browser, sortable):
    fresh(browser, sortable)
    browser.run("document.querySelectorAll('thead button')[0].click()")
    assert column(browser, 0, 0) == [f"row {i}" for i in range(12)]
    browser.run("document.querySelectorAll('thead button')[2].click()")
    assert column(browser, 0, 0)[:4] == ["row 0", "row 3", "row 6", "row 9"]


def test_headings_sort_by_the_keyboard(browser, sortable):
    fresh(browser, sortable)
    browser.run("document.querySelectorAll('thead button')[1].focus()")
    browser.press("Enter")
    assert column(browser, 0, 1)[0] == "−7.5"
    browser.press(" ")
    assert column(browser, 0, 1)[0] == "1,234.5"


def tooltip(browser):
    return browser.run("tooltip.hidden ? null : tooltip.innerText.split('\\n')")


def middle(browser, selector, index=0):
    mark = f"document.querySelectorAll({selector!r})[{index}]"
    browser.run(f"{mark}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    browser.frame()
    x, y = browser.run(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({mark}.getBoundingClientRect())")
    return x, y


def test_a_mark_under_the_pointer_is_told(opened):
    x, y = middle(opened, "#attention-time .series path.mark", 3)
    opened.mouse("mouseMoved", x, y)
    assert tooltip(opened) == ["PyTorch", "sequence length: 1024", "time (ms): 1.2 ± 0.096", "n = 10"]
    opened.mouse("mouseMoved", 2, 2)
    assert tooltip(opened) is None
    opened.mouse("mouseMoved", *middle(opened, "#attention-time .cross"))
    assert tooltip(opened) == ["PyTorch", "sequence length: 8192", "out of memory"]
    opened.choose("language", "zh")
    opened.mouse("mouseMoved", 2, 2)
    opened.mouse("mouseMoved", *middle(opened, "#attention-time .cross"))
    assert tooltip(opened) == ["PyTorch 朴素实现", "序列长度: 8192", "显存不足"]


def test_a_mark_in_focus_is_told_and_arrows_move_along_the_series(opened):
    opened.run("[...document.querySelectorAll('#attention-time svg:not(.narrow) .entry')].at(-1).focus()")
    opened.press("Tab")
    assert tooltip(opened)[:2] == ["PyTorch", "sequence length: 128"]
    opened.press("ArrowRight")
    assert tooltip(opened)[:2] == ["PyTorch", "sequence length: 256"]
    opened.press("ArrowLeft")
    opened.press("ArrowLeft")
    assert tooltip(opened)[:2] == ["PyTorch", "sequence length: 16384"]
    opened.press("Tab")
    assert tooltip(opened)[:2] == ["compiled", "sequence length: 128"]
    opened.press("Escape")
    assert tooltip(opened) is None


@pytest.mark.parametrize("width", [390, 1400])
def test_the_tooltip_stays_on_the_screen(browser, path, width):
    fresh(browser, path, width=width, height=844)
    drawings = "svg.narrow" if width == 390 else "svg:not(.narrow)"
    count = browser.run(f"document.querySelectorAll('{drawings} [data-value]').length")
    for index in range(0, count, 17):
        browser.run(f"document.querySelectorAll('{drawings} [data-value]')[{index}].focus()")
        browser.frame()
        assert tooltip(browser)
        box = browser.run(
            "(({left, right, top, bottom}) => [left, right, top, bottom])(tooltip.getBoundingClientRect())"
        )
        assert box[0] >= 0
        assert box[1] <= width
        assert box[2] >= 0
        assert box[3] <= 844


def test_a_legend_entry_hides_and_shows_its_series(opened):
    series = "(e => " + SHOWN + ")(document.querySelector('#attention-time .series'))"
    pressed = "document.querySelector('#attention-time .entry').ariaPressed"
    opened.mouse("mousePressed", *middle(opened, "#attention-time .entry text.en"), button="left", clickCount=1)
    opened.mouse("mouseReleased", *middle(opened, "#attention-time .entry text.en"), button="left", clickCount=1)
    assert (opened.run(series), opened.run(pressed)) == (False, "false")
    opened.run("document.querySelector('#attention-time .entry').focus()")
    opened.press("Enter")
    assert (opened.run(series), opened.run(pressed)) == (True, "true")
    opened.press(" ")
    assert (opened.run(series), opened.run(pressed)) == (False, "false")


@pytest.mark.parametrize(("figure", "edge"), [("memory-across", "left"), ("memory-up", "bottom")])
def test_what_stands_on_a_hidden_part_moves_in_its_place(opened, figure, edge):
    def edges():
        return opened.run(
            f"[...document.querySelectorAll('#{figure} .series:not(.off)')]"
            f".map(s => s.querySelector('rect').getBoundingClientRect().{edge})"
        )

    before = edges()
    toggle = f"document.querySelector('#{figure} .entry').dispatchEvent(new MouseEvent('click', {{bubbles: true}}))"
    opened.run(toggle)
    assert edges()[0] == pytest.approx(before[0], abs=1)
    opened.run(toggle)
    assert edges() == pytest.approx(before, abs=0.1)


def test_the_language_is_switched_and_kept(opened, path):
    assert visible(opened, ".zh") == 0
    english = visible(opened, ".en")
    assert english > 50
    opened.choose("language", "zh")
    assert visible(opened, ".en") == 0
    assert visible(opened, ".zh") == english
    assert opened.run("[document.documentElement.lang, document.title]") == ["zh-CN", "时间与显存花在哪里"]
    assert "注意力前向加反向" in opened.run("document.querySelector('#attention-time svg').ariaLabel")
    assert opened.run("theme.options[1].textContent") == "浅色"
    opened.open(path)
    assert opened.run("document.documentElement.dataset.language + language.value") == "zhzh"
    opened.choose("language", "en")
    assert visible(opened, ".zh") == 0
    assert "Attention, forward" in opened.run("document.querySelector('#attention-time svg').ariaLabel")


def test_the_theme_is_the_systems_until_one_is_chosen_and_kept(browser, path):
    background = "getComputedStyle(document.body).backgroundColor"
    light, dark = "rgb(255, 255, 255)", "rgb(22, 24, 27)"
    fresh(browser, path, scheme="dark")
    assert browser.run(background) == dark
    browser.choose("theme", "light")
    assert browser.run(background) == light
    browser.open(path, scheme="dark")
    assert (browser.run(background), browser.run("theme.value")) == (light, "light")
    browser.choose("theme", "dark")
    browser.open(path, scheme="light")
    assert browser.run(background) == dark
    browser.choose("theme", "system")
    assert browser.run(background) == light


def test_a_page_without_storage_still_switches(browser, path, tmp_path):
    refused = tmp_path / "refused.html"
    # As a browser does that keeps nothing for files.
    html = path.read_text(encoding="utf-8").replace("localStorage.", "window.noStorage.")
    refused.write_text(html.replace("Content-Security-Policy", "x-none"), encoding="utf-8")
    fresh(browser, refused)
    browser.choose("language", "zh")
    browser.choose("theme", "dark")
    assert visible(browser, ".en") == 0
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 27)"
    assert browser.complaints == []


@pytest.mark.parametrize("api", [True, False])
def test_tables_are_copied(opened, api):
    if api:
        opened.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    else:
        opened.run("navigator.clipboard.writeText = async () => { throw new Error('refused'); }")
        opened.run("document.execCommand = () => { window.copied = document.activeElement.value; return true; }")
    table = page_cases.step_table()
    for index, format in enumerate(("md", "latex")):
        opened.run(f"document.querySelectorAll('.copy button')[{index}].click()")
        opened.frame()
        assert opened.run("copied") == table.render(format)
        assert opened.run("document.querySelector('.copy output').textContent") == "copied"
    assert opened.run("document.querySelectorAll('textarea').length") == 0


def test_a_copy_that_fails_says_so(opened):
    opened.run("navigator.clipboard.writeText = async () => { throw new Error('refused'); }")
    opened.run("document.execCommand = () => false; document.querySelector('.copy button').click()")
    opened.frame()
    assert opened.run("document.querySelector('.copy output').textContent") == "could not copy"


def test_anchors_lead_to_their_sections(opened):
    opened.run("document.documentElement.style.scrollBehavior = 'auto'")
    for link in ("attention", "memory"):
        opened.run(f"document.querySelector('nav a[href=\"#{link}\"]').click()")
        opened.frame()
        assert opened.run("location.hash") == f"#{link}"
        assert 0 <= opened.run(f"document.getElementById({link!r}).getBoundingClientRect().top") < 40
        assert opened.run("document.querySelector('nav').getBoundingClientRect().top") >= 0
    assert opened.run("document.querySelector('nav [aria-current]').hash") == "#memory"


def test_contents_are_folded_on_a_phone_only(browser, path):
    fresh(browser, path, width=390)
    assert browser.run("document.querySelector('nav details').open") is False
    browser.run("document.querySelector('nav summary').click()")
    browser.frame()
    assert visible(browser, "nav a") == 6
    browser.run("document.querySelector('nav a').click()")
    assert browser.run("document.querySelector('nav details').open") is False
    fresh(browser, path, width=1400)
    assert visible(browser, "nav a") == 6


def test_the_first_stop_skips_to_the_content(opened):
    opened.press("Tab")
    assert opened.run("document.activeElement.className") == "skip"
    assert opened.run("document.activeElement.getBoundingClientRect().left") >= 0
    opened.press("Enter")
    assert opened.run("document.activeElement.id") == "main"


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("width", [390, 800, 1400])
def test_nothing_is_cut_off(browser, path, width, language):
    fresh(browser, path, width=width, height=844)
    browser.choose("language", language)
    assert browser.run("document.documentElement.scrollWidth") <= width
    outside = """[...document.querySelectorAll("h1, h2, h3, p, select, .scroll, .plot, .copy button, dd, nav")]
        .filter(e => e.checkVisibility()).filter(e => {
            const box = e.getBoundingClientRect();
            return box.left < 0 || box.right > innerWidth;
        }).map(e => e.outerHTML.slice(0, 200))"""
    assert browser.run(outside) == []
    assert browser.run(f"Math.min(...{SHOWN_CHARTS}.map(c => c.clientWidth))") >= min(560, width - 60)


def test_the_first_column_stays_when_a_table_is_scrolled(browser, path):
    fresh(browser, path, width=390)
    cell = "document.querySelector('tbody th').getBoundingClientRect().left"
    before = browser.run(cell)
    browser.run("document.querySelector('.scroll').scrollLeft = 200")
    browser.frame()
    assert browser.run("document.querySelector('.scroll').scrollLeft") == 200
    assert browser.run(cell) == before


OVERLAPS = """[...document.querySelectorAll("svg")].flatMap((svg) => {
  const view = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].filter(e => e.checkVisibility() && !e.hasAttribute("transform"));
  const boxes = texts.map(e => [e.textContent, e.getBoundingClientRect()]);
  const found = boxes.filter(([, b]) => b.left < view.left - 2 || b.right > view.right + 2
    || b.top < view.top - 2 || b.bottom > view.bottom + 2).map(([text]) => "outside: " + text);
  boxes.forEach(([text, a], i) => boxes.slice(i + 1).forEach(([other, b]) => {
    if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
        Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 5) found.push(text + " on " + other);
  }));
  return found;
})"""


@pytest.mark.parametrize("language", ["en", "zh"])
def test_texts_of_charts_are_apart_as_the_browser_draws_them(browser, tmp_path, language):
    charts = [*page_cases.sample().sections[0].charts, *page_cases.sample().sections[1].charts]
    charts += page_cases.sample().sections[2].charts
    for number, fields in enumerate(KINDS):
        lines = fields["kind"] == "lines"
        points = [Point(10.0**i if lines else name, 1e6 * (i + 1)) for i, name in enumerate(NAMES)]
        series = [Series(Text(name, f"中文{name}"), points) for name in NAMES]
        charts.append(Chart(f"long-{number}", Text("t"), fields["kind"], Text("长" * 90), Text(NAMES[2]), series))
        charts.append(chart(**fields))
    path = tmp_path / "charts.html"
    path.write_text(
        write_page(Document(Text("t"), sections=[Section("s", Text("s"), Text(""), charts=charts)]), language),
        encoding="utf-8",
    )
    fresh(browser, path, width=1400)
    assert browser.run(OVERLAPS) == []


def test_on_paper_everything_is_shown_and_light(browser, path):
    fresh(browser, path, scheme="dark")
    browser.choose("theme", "dark")
    browser.run("document.querySelector('.entry').dispatchEvent(new MouseEvent('click', {bubbles: true}))")
    browser.call("Emulation.setEmulatedMedia", media="print")
    browser.run("window.dispatchEvent(new Event('beforeprint'))")
    browser.frame()
    try:
        assert visible(browser, "select, .copy button, nav") == 0
        assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert visible(browser, ".series") == browser.run(
            "document.querySelectorAll('svg:not(.narrow) .series').length"
        )
        assert visible(browser, "tbody tr") == 12 + 30 + 450
    finally:
        browser.call("Emulation.setEmulatedMedia", media="")


def test_marks_and_legend_are_there_for_screen_readers(opened):
    opened.call("Accessibility.enable")
    nodes = opened.call("Accessibility.getFullAXTree")["nodes"]
    names = {(n.get("role", {}).get("value"), n.get("name", {}).get("value")) for n in nodes if not n["ignored"]}
    opened.call("Accessibility.disable")
    assert ("navigation", "Contents") in names
    assert any(role == "image" and name.startswith("Attention, forward and backward") for role, name in names)
    assert any(name == "PyTorch, 1024: 1.2 ± 0.096, n = 10" for _, name in names)
    assert any(name == "PyTorch" and role in ("button", "ToggleButton") for role, name in names)


def test_an_empty_page_and_charts_without_values_run(browser, tmp_path):
    empty = Chart("e", Text("e"), "lines", Text("x"), Text("y"), [Series(Text("s"), [Point(1, math.nan)])])
    for number, sections in enumerate(([], [Section("s", Text("s"), Text(""), charts=[empty])])):
        path = tmp_path / f"{number}.html"
        path.write_text(write_page(Document(Text("nothing"), sections=sections)), encoding="utf-8")
        fresh(browser, path)
        assert browser.complaints == []


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    path = tmp_path_factory.mktemp("tables") / "page.html"
    path.write_text(write_page(page_cases.many_tables()), encoding="utf-8")
    return path


def rows_seen(browser, table):
    """As they are drawn: inside of the box that cuts them off."""
    return browser.run(
        f"""(box => [...box.querySelectorAll("tbody tr")].filter(
          row => row.getBoundingClientRect().bottom <= box.getBoundingClientRect().bottom + 1
        ).map(row => row.cells[1].textContent))(document.querySelector('#{table} .scroll'))"""
    )


def test_a_tall_table_shows_its_first_rows_and_all_when_asked(browser, tables):
    fresh(browser, tables)
    button = "document.querySelector('#table-tall .rows')"
    first = [f"tall {i}.1" for i in range(12)]
    browser.run("document.documentElement.style.scrollBehavior = 'auto'")
    assert rows_seen(browser, "table-tall") == first
    assert browser.run(f"{button}.innerText") == "Show all 40 rows"
    browser.run(f"{button}.focus()")
    browser.press("Enter")
    assert rows_seen(browser, "table-tall") == [f"tall {i}.1" for i in range(40)]
    assert browser.run(f"[{button}.innerText, {button}.ariaExpanded]") == ["Show fewer", "true"]
    top = browser.run(f"{button}.scrollIntoView({{block: 'center'}}), {button}.getBoundingClientRect().top")
    browser.press(" ")
    assert rows_seen(browser, "table-tall") == first
    assert browser.run(f"[{button}.innerText, {button}.ariaExpanded]") == ["Show all 40 rows", "false"]
    assert browser.run(f"{button}.getBoundingClientRect().top") == pytest.approx(top, abs=2)
    browser.choose("language", "zh")
    assert browser.run(f"{button}.innerText") == "显示全部 40 行"
    assert browser.complaints == []


@pytest.mark.parametrize("width", [390, 800, 1400])
def test_the_cut_is_below_a_row_at_any_width_and_in_a_table_that_was_folded_away(browser, tables, width):
    fresh(browser, tables, width=width)
    browser.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    browser.frame()
    for table in ("table-tall", "table-forward", "table-last", "table-wide"):
        assert len(rows_seen(browser, table)) == 12, table
        # Nothing of the next one is seen.
        below = f"""(box => box.querySelectorAll("tbody tr")[12].getBoundingClientRect().top
          - box.getBoundingClientRect().top - box.clientTop - box.clientHeight)(
            document.querySelector('#{table} .scroll'))"""
        assert browser.run(below) >= -1, table


def test_sorting_takes_all_rows_of_a_folded_table(browser, tables):
    fresh(browser, tables)
    heading = "document.querySelectorAll('#table-tall thead button')[1]"
    browser.run(f"{heading}.click(); {heading}.click()")
    browser.frame()
    assert rows_seen(browser, "table-tall") == [f"tall {i}.1" for i in range(39, 27, -1)]


def test_a_search_that_finds_a_folded_row_shows_it(browser, tables):
    """As a search does it: what holds the row is scrolled, hidden overflow or not."""
    fresh(browser, tables)
    browser.run("document.documentElement.style.scrollBehavior = 'auto'")
    row = "document.querySelectorAll('#table-tall tbody tr')[33]"
    browser.run(f"{row}.scrollIntoView({{block: 'center'}})")
    browser.frame()
    assert len(rows_seen(browser, "table-tall")) == 40
    assert browser.run("document.querySelector('#table-tall .rows').ariaExpanded") == "true"
    top, bottom = browser.run(f"(({{top, bottom}}) => [top, bottom])({row}.getBoundingClientRect())")
    assert top >= 0
    assert bottom <= 900


def test_rows_that_begin_alike_are_marked_as_a_group_also_when_sorted(browser, tables):
    fresh(browser, tables)
    starts = "[...document.querySelectorAll('#table-tall tbody tr')].flatMap((r, i) => r.matches('.first') ? [i] : [])"
    grouped = "document.querySelector('#table-tall table').classList.contains('grouped')"
    assert (browser.run(grouped), browser.run(starts)) == (True, list(range(0, 40, 5)))
    browser.run("document.querySelectorAll('#table-tall thead button')[2].click()")
    assert browser.run(starts) == list(range(0, 40, 5))
    assert browser.run("document.querySelector('#table-first table').classList.contains('grouped')") is False


def test_an_anchor_in_what_is_folded_opens_it(browser, tables):
    fresh(browser, tables)
    browser.run("document.documentElement.style.scrollBehavior = 'auto'")
    top = "document.getElementById('table-peak').getBoundingClientRect().top"
    assert visible(browser, "#table-peak") == 0
    assert visible(browser, "#table-last") == 0
    browser.run("location.hash = '#table-peak'")
    browser.frame()
    browser.frame()
    assert visible(browser, "#table-peak") == 1
    assert visible(browser, "#table-last") == 0
    assert 0 <= browser.run(top) < 40
    # The address is that anchor already.
    browser.run("document.querySelector('.others').open = false; scrollTo(0, 0)")
    browser.run("document.body.insertAdjacentHTML('beforeend', '<a id=again href=#table-peak>x</a>'); again.click()")
    browser.frame()
    assert 0 <= browser.run(top) < 40
    # Opened with it.
    browser.call("Page.navigate", url="about:blank")
    browser.call("Page.navigate", url=tables.as_uri() + "#table-peak")
    browser._wait_for(lambda found: found.get("method") == "Page.loadEventFired")
    browser.frame()
    assert visible(browser, "#table-peak") == 1
    assert 0 <= browser.run(top) < 40
    assert browser.complaints == []


def test_tables_in_what_is_folded_are_listed_and_copied(browser, tables):
    fresh(browser, tables)
    browser.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    browser.run("document.querySelector('.others summary').click()")
    browser.frame()
    names = browser.run(
        "[...document.querySelectorAll('.others ol a')].filter(e => e.checkVisibility()).map(e => e.innerText)"
    )
    assert [name.split()[0] for name in names] == ["Forward", "Backward", "Peak"]
    browser.run("document.querySelector('#table-backward .copy button').click()")
    browser.frame()
    copied = browser.run("copied")
    assert copied == page_cases.many_tables().sections[0].tables[2].render("md")
    assert copied.count("\n") == 2 + 1 + 20


def test_the_summary_leads_to_the_sections(browser, tables):
    fresh(browser, tables)
    browser.run("document.documentElement.style.scrollBehavior = 'auto'")
    lines = browser.run("[...document.querySelectorAll('#summary li')].map(e => e.innerText.split('\\n'))")
    assert lines == [[f"About {name}", f"{name} is 2 times as fast."] for name in ("flash", "two", "three", "wide")]
    browser.run("document.querySelectorAll('#summary a')[2].click()")
    browser.frame()
    assert browser.run("location.hash") == "#three"
    assert 0 <= browser.run("document.getElementById('three').getBoundingClientRect().top") < 40


def shadows(browser, selector):
    frame = f"document.querySelector({selector!r})"
    return tuple(browser.run(f"Number(getComputedStyle({frame}, '::{side}').opacity)") for side in ("before", "after"))


@pytest.mark.parametrize("width", [390, 1400])
def test_a_shadow_says_on_which_side_a_table_goes_on(browser, tables, width):
    fresh(browser, tables, width=width)
    scroll = "(box => { box.scrollLeft = %s; })(document.querySelector('#table-wide .scroll'))"
    assert shadows(browser, "#table-wide .frame") == (0, 1)
    browser.run(scroll % 300)
    browser.frame()
    assert shadows(browser, "#table-wide .frame") == (1, 1)
    left = "document.querySelector('#table-wide .frame').style.getPropertyValue('--first')"
    assert browser.run(left) == f"{browser.run('document.querySelector(`#table-wide tbody th`).offsetWidth')}px"
    browser.run(scroll % 1e6)
    browser.frame()
    assert shadows(browser, "#table-wide .frame") == (1, 0)
    if width == 1400:
        assert shadows(browser, "#table-tall .frame") == (0, 0)


def test_only_what_scrolls_is_a_stop_of_the_tab_key(browser, tables):
    fresh(browser, tables)
    stop = "document.querySelector('#table-{} .scroll').tabIndex"
    assert [browser.run(stop.format(name)) for name in ("tall", "wide")] == [-1, 0]


def test_headings_of_a_long_table_stay_at_the_top_of_the_window(browser, tables):
    fresh(browser, tables)
    browser.run("document.documentElement.style.scrollBehavior = 'auto'")
    browser.run("document.querySelector('#table-tall .rows').click()")
    browser.run("document.querySelectorAll('#table-tall tbody tr')[25].scrollIntoView({block: 'center'})")
    browser.frame()
    assert browser.run("document.querySelector('#table-tall thead th').getBoundingClientRect().top") == pytest.approx(0)


def test_charts_stand_beside_each_other_and_can_be_read(browser, path):
    def boxes(section):
        return browser.run(
            f"[...document.querySelectorAll('#{section} .board > *')].map(e => e.getBoundingClientRect())"
            ".map(({left, right, top}) => [left, right, top])"
        )

    fresh(browser, path, width=1400)
    findings, first, second = boxes("step-time")
    assert first[2] == second[2] > findings[2]
    assert first[1] < second[0]
    assert findings[:2] == [first[0], second[1]]
    findings, first, second, third = boxes("attention")
    assert findings[2] == first[2] < second[2] == third[2]
    letters = f"Math.min(...{SHOWN_CHARTS}.map(c => 14 * c.clientWidth / c.viewBox.baseVal.width))"
    for width in (390, 800, 1200, 1400, 1920):
        fresh(browser, path, width=width)
        assert browser.run(letters) >= 11, width
        assert browser.run("document.documentElement.scrollWidth") <= width
    fresh(browser, path, width=1200)
    lefts = {box[0] for box in boxes("attention")}
    assert len(lefts) == 1


def test_on_paper_nothing_is_folded(browser, tables):
    fresh(browser, tables)
    browser.call("Emulation.setEmulatedMedia", media="print")
    browser.run("window.dispatchEvent(new Event('beforeprint'))")
    browser.frame()
    try:
        rows = {"tall": 40, "forward": 20, "backward": 20, "peak": 20, "other": 15, "last": 30, "wide": 60}
        assert {name: len(rows_seen(browser, f"table-{name}")) for name in rows} == rows
        assert visible(browser, ".table") == 11
        assert visible(browser, ".rows, .others > summary, nav") == 0
        assert (
            browser.run("getComputedStyle(document.querySelector('#table-wide .frame'), '::after').content") == "none"
        )
    finally:
        browser.run("window.dispatchEvent(new Event('afterprint'))")
        browser.call("Emulation.setEmulatedMedia", media="")
    browser.frame()
    assert visible(browser, "#table-forward") == 0


def test_without_scripts_everything_is_there(browser, tables):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.call("Page.navigate", url=tables.as_uri())
        browser._wait_for(lambda found: found.get("method") == "Page.loadEventFired")
        assert len(rows_seen(browser, "table-tall")) == 40
        assert visible(browser, ".rows, .copy button, select") == 0
        assert browser.run("document.documentElement.classList.contains('js')") is False
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


def test_the_bar_of_a_phone_says_where_one_is(browser, tables):
    fresh(browser, tables, width=390)
    browser.run("document.documentElement.style.scrollBehavior = 'auto'")
    browser.run("location.hash = '#three'")
    browser.frame()
    browser.frame()
    assert browser.run("document.querySelector('nav summary').innerText").endswith("About three")
    bar = browser.run("(({top, bottom}) => [top, bottom])(document.querySelector('nav').getBoundingClientRect())")
    assert bar[0] == pytest.approx(0, abs=1)
    assert browser.run("document.querySelector('#three h2').getBoundingClientRect().top") >= bar[1]


def test_motion_only_where_it_is_wanted(browser, tables):
    fresh(browser, tables)
    behavior = "getComputedStyle(document.documentElement).scrollBehavior"
    assert browser.run(behavior) == "smooth"
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    assert browser.run(behavior) == "auto"
    browser.call("Emulation.setEmulatedMedia", features=[])


def test_spans_limits_and_what_is_cut_answer(browser, tmp_path):
    charts = [STEP, stacked(12_345.0, 36.0, 8.0)]
    path = tmp_path / "spans.html"
    sections = [Section("s", Text("s"), Text(""), charts=charts)]
    path.write_text(write_page(Document(Text("t"), sections=sections)), encoding="utf-8")
    fresh(browser, path, width=1400)
    assert browser.run(OVERLAPS) == []
    wider = "[...document.querySelectorAll('.plot')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
    assert browser.run(wider) == 0  # what goes on beyond the axis does not stretch the page
    for mark, said in (
        ("[data-series=backward]", "backwardwrapper: naivems since: 4 – 10"),
        (".limit [data-value]", "what one hasstrategy: –GiB: 10"),
    ):
        browser.run(f"document.querySelector('{mark}').focus()")
        browser.frame()
        assert browser.run("document.getElementById('tooltip').textContent") == said
    browser.press("ArrowRight")
    assert browser.run("document.activeElement.dataset.series") == "what one has"
    entries = visible(browser, ".entry")
    browser.run("document.querySelectorAll('.entry')[3].dispatchEvent(new MouseEvent('click', {bubbles: true}))")
    browser.frame()
    assert (entries, visible(browser, ".series.off"), visible(browser, ".limit path")) == (5, 0, 2)
    assert browser.complaints == []


def test_a_phone_has_drawings_that_fit(browser, path):
    fresh(browser, path, width=390)
    assert browser.run(f"{SHOWN_CHARTS}.length") == browser.run("document.querySelectorAll('figure').length")
    assert browser.run(f"{SHOWN_CHARTS}.every(e => e.classList.contains('narrow'))")
    assert browser.run("[...document.querySelectorAll('.plot')].every(e => e.scrollWidth <= e.clientWidth)")
    fresh(browser, path)
    assert browser.run(f"{SHOWN_CHARTS}.some(e => e.classList.contains('narrow'))") is False
    assert browser.run("new Set([...document.querySelectorAll('[id]')].map(e => e.id)).size") == browser.run(
        "document.querySelectorAll('[id]').length"
    )
