"""The page of a memory timeline in a browser: tooltips, zooming, the legend, languages, themes."""

import re
from dataclasses import replace

import pytest

from cs336_systems.report.timeline_reduction import LABEL_COLORS
from cs336_systems.report.web.timeline_page import write_page
from cs336_systems.timeline import Timeline
from tests.unit.report.test_timeline_page import training_step

pytestmark = pytest.mark.xdist_group("browser")  # one browser for all
RANGE = "document.getElementById('range').textContent"
TITLE = "2.7B, train-step, bf16, batch 4, context 512, attention reference, checkpoint 2"
WATCH_CANVAS = """
window.drawn = [];
window.fillText ??= CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  const [wide, align] = [this.measureText(text).width, { left: 0, center: 0.5, right: 1 }[this.textAlign]];
  drawn.push([text, x - wide * align, x + wide * (1 - align)]);
  fillText.call(this, text, x, y);
};"""
"""Keeps each text of the canvas with its left and right edge."""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    write_page(replace(training_step(), title=TITLE), path)
    return path


@pytest.fixture
def opened(browser, path):
    yield browser.open(path)
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
    assert browser.requests[0] == path.as_uri()


def redrawn(browser):
    """The texts of the canvas after a redraw, each with its left and right edge."""
    browser.run(WATCH_CANVAS)
    browser.click("#reset")
    return browser.run("drawn")


def where(browser, time, share):
    """Coordinates on the chart: at a time in seconds, and a share of the memory at the peak."""
    left, top, right, bottom = browser.box("#pointer")
    view = browser.run("timelinePage.view()")
    left, right, height = left + 58, right - 14, bottom - top - 40 - 42
    x = left + (time - view["start"]) / (view["end"] - view["start"]) * (right - left)
    return x, bottom - 40 - share / 1.1 * height


def label_at(browser, x, y):
    return browser.run(f"timelinePage.labelAt({x}, {y})")


def drag(browser, start, end):
    browser.mouse("mousePressed", *start, button="left", clickCount=1)
    browser.mouse("mouseMoved", *end, button="left")
    browser.mouse("mouseReleased", *end, button="left", clickCount=1)


def test_the_label_and_the_block_under_the_pointer(opened):
    timeline = training_step()
    when, most = timeline.peak()
    assert opened.run("timelinePage.peak()") == most
    height = 0
    for label, size in sorted(timeline.parts_at(when).items(), key=lambda part: list(LABEL_COLORS).index(part[0])):
        assert label_at(opened, *where(opened, when + 1e-4, (height + size / 2) / most)) == label
        height += size
    assert label_at(opened, *where(opened, when + 1e-4, 1.05)) is None
    assert label_at(opened, 1, 1) is None

    opened.mouse("mouseMoved", *map(round, where(opened, 0.0615, 0.01)))  # the first parameter is the lowest block
    lines = opened.tooltip()
    assert lines[0].endswith("ms, backward")
    assert float(lines[0].split()[0]) == pytest.approx(61.5, abs=0.1)
    assert lines[1:] == [
        f"total {sum(timeline.parts_at(0.0615).values()) / 2**30:.3f} GiB",
        "parameters: 822.00 MiB",
        "block of 150.00 MiB",
        "empty (32000, 1024) float32",
        "embedding",
        "alive: whole step (from 0.00 ms)",
    ]
    opened.mouse("mouseMoved", 5, 5)
    assert opened.tooltip() is None


def test_zoom_in_time_and_back(opened):
    whole = {"start": 0, "end": 0.151}

    def seen():
        view = opened.run("timelinePage.view()")
        assert whole["start"] <= view["start"] < view["end"] <= whole["end"]
        return view

    def width():
        return seen()["end"] - seen()["start"]

    assert seen() == whole
    x, y = where(opened, 0.05, 0.5)
    opened.mouse("mouseWheel", x, y, deltaX=0, deltaY=-120)
    assert width() == pytest.approx(0.151 / 1.25)
    assert where(opened, 0.05, 0.5)[0] == pytest.approx(x, abs=1)  # the time under the pointer stays there
    for _ in range(70):
        opened.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=-120)
    assert width() == pytest.approx(1e-7)
    assert label_at(opened, x, where(opened, 0.05, 0.01)[1]) == "parameters"

    opened.run("pointer.focus()")
    opened.key("Escape")
    assert seen() == whole
    opened.key("+")
    zoomed = seen()
    assert width() == pytest.approx(0.151 / 1.5)
    opened.key("ArrowRight")
    assert seen()["start"] > zoomed["start"]
    opened.key("ArrowLeft")
    assert seen()["start"] == pytest.approx(zoomed["start"])
    opened.key("-")
    assert seen() == whole

    drag(opened, where(opened, 0.04, 0.5), where(opened, 0.08, 0.5))
    assert seen() == pytest.approx({"start": 0.04, "end": 0.08}, abs=1e-6)
    for count in (1, 2):  # a double click
        opened.mouse("mousePressed", x, y, button="left", clickCount=count)
        opened.mouse("mouseReleased", x, y, button="left", clickCount=count)
    assert seen() == whole
    opened.click("#zoom-in")
    assert seen() != whole
    opened.click("#reset")
    assert seen() == whole


def test_zoom_in_memory_and_back(opened):
    whole = "0.00 to 151.00 ms"
    assert opened.run(RANGE) == whole
    x, y = map(round, where(opened, 0.05, 0.5))
    label = label_at(opened, x, y)
    opened.mouse("mouseWheel", x, y, deltaX=0, deltaY=-120, modifiers=8)  # with shift
    assert re.fullmatch(r"0\.00 to 151\.00 ms, .* [GM]iB to .* GiB", opened.run(RANGE))
    assert label_at(opened, x, y) == label
    opened.run("pointer.focus()")
    opened.key("Escape")
    assert opened.run(RANGE) == whole

    parameters = sum(b.size for b in training_step().blocks if b.label == "parameters")
    drag(opened, where(opened, 0.04, 0), where(opened, 0.08, parameters / training_step().peak()[1]))
    assert re.fullmatch(r"40\.\d* to 80\.\d* ms, 0 B to 8\d\d\.\d* MiB", opened.run(RANGE))
    assert label_at(opened, x, y) == "parameters"
    opened.click("#reset")
    assert opened.run(RANGE) == whole


def test_a_label_is_hidden_and_shown_by_its_button(opened):
    place = where(opened, 0.06, 0.01)
    assert label_at(opened, *place) == "parameters"
    for pressed, label in (("false", "optimizer state"), ("true", "parameters")):
        opened.click("#legend button")
        assert opened.one("#legend button", "e.ariaPressed") == pressed
        assert label_at(opened, *place) == label
    opened.each("#legend button", "e.click()")
    opened.frame()
    assert label_at(opened, *place) is None


def test_the_theme_follows_the_system_until_it_is_switched(opened, path):
    background = "getComputedStyle(document.body).backgroundColor"
    light = opened.run(background)
    opened.media(scheme="dark")
    dark = opened.run(background)
    assert light != dark
    for theme, expected in (("light", light), ("dark", dark), ("system", dark), ("light", light)):
        opened.choose("theme", theme)
        assert opened.run(background) == expected
    opened.open(path, scheme="dark", fresh=False)
    assert opened.run("theme.value") == "light"
    assert opened.run(background) == light


def test_the_canvas_is_drawn_in_the_colours_of_the_theme(opened):
    pixels = "document.getElementById('picture').toDataURL()"
    light = opened.run(pixels)
    opened.choose("theme", "dark")
    assert opened.run(pixels) != light
    opened.choose("theme", "light")
    assert opened.run(pixels) == light


def everything(browser):
    """All that the page says in the chosen language except the words of the traced program, as one text."""
    program = {word for b in training_step().blocks for word in (b.module, b.what, b.line) if word}
    pieces = browser.run("document.body.innerText").replace("\t", "\n").split("\n") + browser.tooltip()
    pieces += [text for text, _, _ in redrawn(browser)]
    pieces += browser.each("[aria-label]", "e.ariaLabel") + browser.each("option:not([value=en])", "e.textContent")
    return "\n".join([browser.run("document.title"), *(one for one in pieces if one.strip() not in program)])


SHARED = {"English", "NVIDIA", "H200", "GiB", "MiB", "B", "ms", "bf16", "Shift", "Esc", "logits"}
"""Words that Chinese pages have in English."""


def test_every_text_is_in_the_chosen_language(opened):
    def point():
        opened.mouse("mouseMoved", *map(round, where(opened, 0.0615, 0.01)))

    point()
    english = everything(opened)
    assert not re.search("[\u4e00-\u9fff]", english.replace("中文", ""))
    assert "train-step" not in english
    opened.choose("language", "zh")
    point()
    chinese = everything(opened)
    assert set(re.findall(r"[A-Za-z][\w-]*", chinese)) <= SHARED
    assert {"参数", "优化器状态", "激活"} <= set(opened.each("#legend button", "e.innerText"))
    assert label_at(opened, *where(opened, 0.0615, 0.01)) == "参数"
    assert opened.run("document.documentElement.lang") == "zh-CN"
    opened.choose("language", "en")
    point()
    assert everything(opened) == english


def test_choosing_a_language_redraws_the_chart_and_is_kept(opened, path):
    described = opened.one("#pointer", "e.ariaLabel")
    opened.run(WATCH_CANVAS)
    opened.choose("language", "zh")
    drawn = {text for text, _, _ in opened.run("drawn")}
    assert {"前向", "反向", "优化器"} <= drawn
    assert "forward" not in drawn
    assert opened.one("#pointer", "e.ariaLabel") != described
    opened.open(path, fresh=False)
    assert opened.run("language.value") == "zh"
    assert "前向" in {text for text, _, _ in redrawn(opened)}


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("width", [390, 1400])
def test_texts_of_the_chart_lie_inside_it(opened, width, language):
    opened.resize(width)
    opened.choose("language", language)
    texts = redrawn(opened)
    chart = opened.one("#chart", "e.offsetWidth")
    assert [text for text, left, right in texts if left < 0 or right > chart + 0.5] == []


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("width", [390, 1400])
def test_everything_fits_into_the_window(browser, path, width, language):
    browser.open(path, width=width, height=844)
    browser.choose("language", language)
    assert browser.run("document.documentElement.scrollWidth") <= width
    edges = browser.each(
        "button, select, h1, p, .scroll, #chart", "(b => [b.left, b.right])(e.getBoundingClientRect())"
    )
    assert all(left >= 0 and right <= width for left, right in edges)
    browser.mouse("mouseMoved", *where(browser, 0.149, 0.1))
    left, _, right, _ = browser.box("#tooltip")
    assert 0 <= left < right <= width
    browser.mouse("mouseMoved", 5, 5)
    assert browser.tooltip() is None
    x, y = where(browser, 0.06, 0.01)
    browser.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
    browser.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    browser.frame()
    name = {"en": "parameters", "zh": "参数"}[language]
    assert any(name in line for line in browser.tooltip())  # lifting a finger keeps the tooltip


def test_an_empty_page_runs_without_errors(browser, tmp_path):
    write_page(Timeline("nothing", "cpu", []), tmp_path / "empty.html")
    browser.open(tmp_path / "empty.html")
    assert "No memory was recorded" in browser.run("document.body.innerText")
    assert browser.run("timelinePage.peak()") == 0
    assert label_at(browser, 300, 300) is None
    assert browser.one("#chart", "e.offsetHeight") == 0
    assert browser.errors == []
