"""The page of the published results in a browser: its size, layout, keyboard, printing, and how fast it is."""

import importlib.util
import re
from pathlib import Path

import pytest

from cs336_systems.experiments.catalogue import catalogue
from cs336_systems.record import Loaded
from cs336_systems.report.build import document
from cs336_systems.report.web.page import page
from tests.browser.geometry import COLLISIONS, LAY_OUT, OVERLAPS, WIDTHS
from tests.helpers import records_of_h200
from tests.unit.report import page_cases

pytestmark = pytest.mark.xdist_group("browser")  # one browser for all
STOPS = """[...document.querySelectorAll("a[href], button, select, summary, [tabindex]")]
  .filter((e) => e.tabIndex >= 0 && e.checkVisibility() && getComputedStyle(e).display !== "none")"""
TWO_FRAMES = "await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("h200") / "index.html"
    path.write_text(page(document([Loaded(records_of_h200(), [], "h200")], catalogue())), encoding="utf-8")
    return path


@pytest.fixture
def h200(browser, path):
    """The page on a first visit; nothing is requested and no error is logged."""
    yield browser.open(path)
    assert browser.errors == []
    assert set(browser.requests) <= {path.as_uri(), "data:,"}


def test_the_page_is_small(path):
    assert path.stat().st_size < 2_000_000


@pytest.mark.parametrize("width", WIDTHS[::2])
def test_nothing_overlaps(browser, path, width):
    """On a large screen, a small one and a phone; smaller pages are looked at in all widths."""
    browser.open(path, width=width)
    browser.run(LAY_OUT)
    for language in ("en", "zh"):
        browser.choose("language", language)
        assert browser.run(OVERLAPS) == []
        assert browser.run(COLLISIONS) == []
    browser.each(".entry[data-toggle='0']", "e.dispatchEvent(new MouseEvent('click', {bubbles: true}))")
    browser.frame()
    assert browser.run(OVERLAPS) == []  # on the axes of the other series, too
    assert browser.errors == []


def test_contents_lead_to_their_sections(h200):
    """Sections above the target may never have been laid out."""
    for link in h200.each("nav a", "e.hash")[::5]:
        h200.one(f"nav a[href='{link}']", "e.click()")
        for _ in range(5):
            h200.frame()
        assert -1 <= h200.box(link)[1] < 60, link


def test_tab_stops(h200):
    """A chart, a legend and the headings of a table are one stop each."""
    h200.run(LAY_OUT)
    h200.frame()
    counts = {
        kind: h200.run(f"{STOPS}.filter((e) => e.matches('{kind}')).length")
        for kind in ("[data-value]", ".entry", "thead button", ".copy button", "a")
    }
    charts, tables = h200.visible("svg"), h200.visible(".table")
    assert counts["[data-value]"] == charts
    assert counts[".entry"] < charts
    assert counts["thead button"] == tables
    assert counts[".copy button"] == 2 * tables
    total = h200.run(f"{STOPS}.length")
    print(f"{total} tab stops: {charts} charts, {tables} tables, {counts['a']} links")
    others = total - sum(counts.values())  # tables that scroll or unfold, folded tables, controls of the page
    assert others < 2 * tables


def test_the_language_is_switched_faster_than_the_page_is_laid_out(h200):
    """Sections off the screen do not count."""

    def seconds(change):
        script = f"(async () => {{ const start = performance.now(); {change}; {TWO_FRAMES};"
        return h200.run(f"{script} return performance.now() - start; }})()") / 1000

    def switch(language):
        return seconds(f"language.value = '{language}'; language.dispatchEvent(new Event('change'))")

    switches = [switch(language) for language in ("zh", "en", "zh", "en")]
    whole = seconds(LAY_OUT)
    print(f"switches of the language: {', '.join(f'{one:.3f}' for one in switches)} s; layout: {whole:.3f} s")
    assert min(switches) < whole


def pages_of_headings(printed):
    """For every heading of a tagged file its page, and that of what follows. Elements are numbered in their order."""
    found = re.finditer(rb"(\d+) 0 obj\n<</Type /StructElem\n(.*?)endobj", printed, re.DOTALL)
    elements = sorted((int(one[1]), one[2]) for one in found)
    for index, (number, heading) in enumerate(elements):
        if not re.match(rb"/S /H[1-6]\b", heading):
            continue
        inside, own = {number}, None
        for other, element in elements[index + 1 :]:
            page = re.search(rb"/Pg (\d+)", element)
            if int(re.search(rb"/P (\d+)", element)[1]) in inside:
                inside.add(other)
                own = own or (page and page[1])
            elif page:
                yield own, page[1]
                break


def test_the_printed_page_is_small_and_complete(h200):
    """Headings are on the page of what follows."""
    printed = h200.print_pdf(generateTaggedPDF=True)  # with tags for screen readers, as browsers do by themselves
    print(f"printed: {len(printed):,} bytes")
    assert len(printed) < 3_000_000
    assert h200.each("details:not([open])", "0") != []  # folded again
    found = list(pages_of_headings(printed))
    assert len(found) > 50
    assert [pages for pages in found if pages[0] != pages[1]] == []


# Accessibility by rules


@pytest.fixture(scope="module")
def axe():
    found = importlib.util.find_spec("axe_core_python")
    if found is None:
        pytest.skip("needs axe-core: pip install axe-core-python")
    return Path(found.origin).with_name("axe.min.js").read_text(encoding="utf-8")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("case", [page_cases.sample, page_cases.first_screen], ids=lambda case: case.__name__)
def test_axe_finds_nothing_serious(browser, axe, tmp_path, case, scheme):
    path = tmp_path / "index.html"
    path.write_text(page(case()), encoding="utf-8")
    browser.open(path, scheme=scheme)
    browser.run(f"{axe}; 0")
    of_colors = ", runOnly: ['color-contrast']" if scheme == "dark" else ""  # all else is the same
    found = browser.run(
        f"axe.run({{resultTypes: ['violations']{of_colors}}}).then((all) => all.violations.map("
        "(one) => [one.impact, one.id, one.nodes[0].html, one.nodes[0].failureSummary]))"
    )
    assert [one for one in found if one[0] in ("serious", "critical")] == []
