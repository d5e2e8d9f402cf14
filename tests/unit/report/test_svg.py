"""What charts hold besides plain lines and bars, as SVG: spans, limits, marks on bars, lines alone; of any values."""

import math
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cs336_systems.report.document import FAR, Chart, Limit, Point, Series
from cs336_systems.report.web.svg import svg
from cs336_systems.report.web.svg.labels import text_width
from cs336_systems.report.web.svg.placement import WIDTH
from cs336_systems.text import Text
from tests.unit.report.test_page import EVIL, Page, boxes, chart, coordinates, marks

HAS = Limit(10.0, Text("what one has", "一个所有"))


def spans(*series, **fields):
    return Chart("lanes", Text("Lanes", "泳道"), "spans", Text("wrapper", "封装"), Text("ms since"), series, **fields)


def box(mark):
    x, y, width, height = (float(mark[name]) for name in ("x", "y", "width", "height"))
    return x, y, x + width, y + height


def at(mark):
    return tuple(map(float, re.findall(r"-?[\d.]+", mark["transform"])[:2]))


def by_series(drawing):
    found = {}
    for mark in marks(drawing):
        found.setdefault(mark["data-series"], []).append(mark)
    return found


# Spans

STEP = spans(
    Series(Text("forward", "前向"), [Point("naive", 4.0, start=0.0), Point("flat", 4.0, start=0.0)]),
    Series(Text("backward"), [Point("naive", 10.0, start=4.0), Point("flat", 8.0, start=4.0)]),
    Series(Text("all-reduce"), [Point("naive", 12.0, start=10.0), Point("naive", 16.0, start=12.0)], lane=1),
)


def test_a_span_says_when_it_began_and_ended():
    found = by_series(svg(STEP))
    assert [m["data-value"] for m in found["backward"]] == ["4 – 10", "4 – 8"]
    assert found["forward"][0]["aria-label"] == "forward, naive: 0 – 4"
    assert found["forward"][0]["data-aria-zh"] == "前向, naive: 0 – 4"
    assert all(m["role"] == "img" and m["tabindex"] == "0" for group in found.values() for m in group)
    (root,) = Page(svg(STEP)).all("svg")
    assert root["aria-label"] == "Lanes. Spans of ms since by wrapper: forward, backward, all-reduce"
    assert "时间段图" in root["data-aria-zh"]


def test_spans_are_as_long_as_they_took_and_follow_each_other():
    found = by_series(svg(STEP))
    forward, backward = box(found["forward"][0]), box(found["backward"][0])
    assert forward[2] == pytest.approx(backward[0], abs=0.2)
    assert (backward[2] - backward[0]) / (forward[2] - forward[0]) == pytest.approx(6 / 4, rel=0.01)
    first, second = map(box, found["all-reduce"])
    assert first[2] == pytest.approx(second[0], abs=0.2)


def test_messages_are_below_what_was_computed_and_rows_below_each_other():
    found = by_series(svg(STEP))
    (naive, flat), message = map(box, found["forward"]), box(found["all-reduce"][0])
    assert naive[3] <= message[1]
    assert message[3] <= flat[1]


def test_without_a_second_lane_there_is_room_for_one():
    one = svg(replace(STEP, series=STEP.series[:2]))
    assert float(Page(one).all("svg")[0]["viewbox"].split()[3]) < float(
        Page(svg(STEP)).all("svg")[0]["viewbox"].split()[3]
    )


@pytest.mark.parametrize(
    ("point", "drawn"),
    [
        (Point("a", 3.0, start=1.0), 1),
        (Point("a", 3.0, start=3.0), 1),
        (Point("a", 1.0, start=3.0), 1),
        (Point("a", 3.0, start=-1.0), 1),
        (Point("a", 3.0), 0),
        (Point("a", 3.0, start=math.nan), 0),
        (Point("a", math.inf, start=0.0), 0),
        (Point("a", math.nan, start=0.0), 0),
    ],
    ids=str,
)
def test_spans_of_odd_values(point, drawn):
    drawing = svg(spans(Series(Text("s"), [point])))
    assert len(marks(drawing)) == drawn
    assert (">no data<" in drawing) == (not drawn)
    for mark in marks(drawing):
        left, top, right, bottom = box(mark)
        assert 0 <= left < right <= WIDTH
        assert top < bottom
    assert all(map(math.isfinite, coordinates(drawing)))


def test_nothing_to_span():
    assert ">no data<" in svg(spans())
    assert ">no data<" in svg(spans(Series(Text("s"), [])))


# A limit


def stacked(*sizes, limit=HAS, **fields):
    names = [f"bar {number}" for number in range(len(sizes))]
    halves = [Series(Text(part), [Point(n, s / 2) for n, s in zip(names, sizes, strict=True)]) for part in "xy"]
    return Chart(
        "plan", Text("Plan"), "stacked", Text("strategy"), Text("GiB"), halves, horizontal=True, limit=limit, **fields
    )


def limit_marks(drawing):
    return [mark for mark in marks(drawing) if mark["data-series"] == "what one has"]


@pytest.mark.parametrize("kind", ["lines", "bars", "stacked"])
@pytest.mark.parametrize("horizontal", [False, True])
def test_a_limit_is_a_line_that_says_what_it_is(kind, horizontal):
    drawing = svg(chart(kind, horizontal=horizontal, limit=HAS))
    (mark,) = limit_marks(drawing)
    assert mark["data-value"] == "10"
    assert mark["aria-label"] == "what one has, –: 10"
    assert mark["data-aria-zh"] == "一个所有, –: 10"
    texts = {e["text"]: e for e in Page(drawing).all("text")}
    assert {"what one has", "一个所有"} <= texts.keys()
    assert "g" not in texts["what one has"]["within"]  # no button: it cannot be hidden
    assert "what one has" in Page(drawing).all("svg")[0]["aria-label"]
    across = "V" in mark["d"]
    assert across == (horizontal and kind != "lines")


def test_the_limit_stands_where_a_bar_of_its_size_ends():
    drawing = svg(stacked(10.0, 3.0))
    end = box(by_series(drawing)["y"][0])[2]
    (mark,) = limit_marks(drawing)
    assert float(re.match(r"M([\d.]+)", mark["d"])[1]) == pytest.approx(end, abs=0.2)


def test_a_bar_beyond_the_axis_says_how_far():
    drawing = svg(stacked(12_345.0, 36.0, 8.0, 99.0))
    found = Page(drawing)
    texts = [e["text"] for e in found.all("text") if e["text"].startswith("→")]
    assert texts == ["→ 12,345", "→ 99"]
    (clip,) = found.all("clippath")
    (group,) = [e for e in found.all("g") if "clip-path" in e]
    assert group["clip-path"] == f"url(#{clip['id']})"
    assert len([m for m in marks(drawing) if m["tag"] == "rect"]) == 8  # of bars that were cut, too
    numbers = [float(e["text"]) for e in found.all("text") if e.get("class") == "muted"]
    assert max(numbers) == FAR * HAS.value
    for text, _, right, _, _ in boxes(drawing, "en"):
        assert right <= WIDTH, text


def test_bars_within_reach_are_not_cut():
    drawing = svg(stacked(36.0, 8.0))
    assert "clip" not in drawing
    assert ">→" not in drawing


def test_crosses_at_the_far_end_keep_bars_whole():
    plan = stacked(12_345.0, 8.0)
    noted = Series(Text("z"), [Point("bar 1", math.nan, note=Text("out of memory"))])
    assert "clip" not in svg(replace(plan, series=[*plan.series, noted]))


@pytest.mark.parametrize("value", [0.0, -5.0, math.nan, math.inf, -math.inf, 1e-300, 1e300])
@pytest.mark.parametrize("fields", [{}, {"log_y": True}], ids=["linear", "log"])
def test_limits_of_odd_values(value, fields):
    for kind in ("lines", "bars", "stacked"):
        drawing = svg(chart(kind, limit=Limit(value, Text("l")), **fields))
        assert all(map(math.isfinite, coordinates(drawing)))
        assert not re.search(r"nan|inf", drawing)
        assert len(marks(drawing)) >= 6
    assert all(map(math.isfinite, coordinates(svg(stacked(1.0, 2.0, limit=Limit(value, Text("l")), **fields)))))


# Marks on bars, lines without marks


def test_marks_stand_on_the_bars_they_are_about():
    series = [
        Series(Text("a"), [Point("x", 4.0), Point("y", 6.0)]),
        Series(Text("b"), [Point("x", 8.0), Point("y", 2.0)]),
        Series(Text("a: predicted"), [Point("x", 4.0), Point("y", 6.0)], drawn="marks", over=0),
        Series(Text("b: predicted"), [Point("x", 8.0), Point("y", 2.0)], drawn="marks", over=1),
        Series(Text("of all"), [Point("x", 6.0)], drawn="marks"),
    ]
    found = by_series(svg(chart("bars", series)))
    for name in "ab":
        for bar, mark in zip(found[name], found[f"{name}: predicted"], strict=True):
            left, top, right, _ = box(bar)
            x, y = at(mark)
            assert x == pytest.approx((left + right) / 2, abs=0.2)
            assert y == pytest.approx(top, abs=0.2)
    alone = by_series(svg(chart("bars", series[:2])))
    assert [box(m)[2] - box(m)[0] for m in alone["a"]] == [box(m)[2] - box(m)[0] for m in found["a"]]
    assert box(found["a"][0])[2] <= at(found["of all"][0])[0] <= box(found["b"][0])[0]


@pytest.mark.parametrize("horizontal", [False, True])
def test_marks_add_nothing_to_stacked_bars(horizontal):
    parts = [Series(Text(name), [Point("x", 4.0)]) for name in "ab"]
    predicted = Series(Text("predicted"), [Point("x", 8.0)], drawn="marks")
    found = by_series(svg(chart("stacked", [*parts, predicted], horizontal=horizontal)))
    end = box(found["b"][0])
    x, y = at(found["predicted"][0])
    assert (x if horizontal else y) == pytest.approx(end[2] if horizontal else end[1], abs=0.2)


def test_marks_alone_and_a_line_alone():
    points = [Point(1, 2.0), Point(2, 5.0), Point(4, 3.0)]
    drawings = {
        drawn: svg(chart("lines", [Series(Text("only"), points, drawn=drawn)])) for drawn in ("both", "line", "marks")
    }
    lines = {drawn: drawing.count('class="line"') for drawn, drawing in drawings.items()}
    assert lines == {"both": 2, "line": 2, "marks": 0}  # in the legend, and of the series
    seen = {drawn: [m for m in marks(drawing) if "style" not in m] for drawn, drawing in drawings.items()}
    assert [len(found) for found in seen.values()] == [3, 0, 3]
    assert all(len(marks(drawing)) == 3 for drawing in drawings.values())  # all can be pointed at


def test_a_fitted_line_has_the_colour_of_what_it_was_fitted_to():
    points = [Point(1, 2.0), Point(2, 5.0)]
    series = [Series(Text(f"s{i}"), points, over=None if i < 2 else 0) for i in range(3)]
    groups = [e["class"] for e in Page(svg(chart("lines", series))).all("g") if "data-index" in e]
    assert groups == ["series s0", "series s1", "series s0"]


def test_a_point_with_a_name_says_it():
    (mark,) = marks(svg(chart("lines", [Series(Text("s"), [Point(28.0, 3.0, name="1 x 16 x 64")])])))
    assert mark["data-label"] == "28 (1 x 16 x 64)"
    assert mark["aria-label"] == "s, 28 (1 x 16 x 64): 3"


# Order, texts


@pytest.mark.parametrize("kind", ["bars", "stacked"])
def test_places_stand_in_the_order_that_is_given(kind):
    series = [
        Series(Text("ours"), [Point("slow", 9.0), Point("fast", 1.0)]),
        Series(Text("rival"), [Point("middle", 5.0)]),
    ]
    drawing = svg(chart(kind, series, places=["slow", "middle", "nowhere", "fast", "slow"]))
    left = {m["data-label"]: box(m)[0] for m in marks(drawing)}
    assert sorted(left, key=lambda name: left[name]) == ["slow", "middle", "fast"]
    some = svg(chart(kind, series, places=["middle"]))
    left = {m["data-label"]: box(m)[0] for m in marks(some)}
    assert sorted(left, key=lambda name: left[name]) == ["middle", "slow", "fast"]


def test_a_text_below_that_needs_two_lines_is_not_cut_off():
    """Its room is what is centred below the plot, not the whole width."""
    words = "as long as it can be "
    below = ""
    while text_width(below + words) < WIDTH - 4:
        below += words
    drawing = svg(replace(chart("lines"), x=Text(below)))
    height = float(Page(drawing).all("svg")[0]["viewbox"].split()[3])
    assert all(bottom <= height for *_, bottom in boxes(drawing, "en"))


def hostile_charts():
    text, limit = Text(EVIL, EVIL + "中"), Limit(2.0, Text(EVIL, EVIL + "中"))
    for kind in ("lines", "bars", "stacked", "spans"):
        points = [Point(EVIL, 9e9, start=1.0, name=EVIL), Point(EVIL + "b", 1.0, start=0.5, name=EVIL)]
        series = [Series(text, points), Series(text, points, drawn="marks", over=0), Series(text, points, drawn="line")]
        yield Chart(EVIL, text, kind, text, text, series, horizontal=True, places=[EVIL], limit=limit)


@pytest.mark.parametrize("hostile", list(hostile_charts()), ids=lambda one: one.kind)
def test_no_text_can_break_out_of_a_drawing(hostile):
    found = Page(svg(hostile))
    assert {e["tag"] for e in found.elements} <= {
        *("svg", "g", "path", "rect", "text", "tspan", "title", "defs", "pattern", "clippath")
    }
    assert not [e for e in found.elements if any(name.startswith("on") for name in e)]
    assert all(re.fullmatch(r"[\w-]+", e["id"], re.ASCII) for e in found.elements if "id" in e)


numbers = st.floats() | st.sampled_from([0.0, -1.0, 5e-324, 1e308, 128.0])
names = st.text(max_size=12)
texts = st.builds(Text, names, names)
points = st.builds(
    Point, numbers | names, numbers, st.none() | numbers, st.none() | st.integers(0, 9), st.none() | texts,
    st.none() | numbers, names,
)  # fmt: skip
drawn = st.sampled_from(["both", "line", "marks"])
series = st.builds(
    Series, texts, st.lists(points, max_size=6), st.booleans(), drawn, st.none() | st.integers(0, 3), st.integers(0, 2)
)
charts = st.builds(
    Chart, names, texts, st.sampled_from(["lines", "bars", "stacked", "spans"]), texts, texts,
    st.lists(series, max_size=4), st.booleans(), st.booleans(), st.booleans(), st.lists(names, max_size=3),
    st.none() | st.builds(Limit, numbers, texts),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(charts)
def test_any_chart_can_be_drawn(any_chart):
    drawing = svg(any_chart)
    Page(drawing)
    places = re.findall(r' (?:x|y|width|height|d|transform|viewBox)="([^"]*)"', drawing)
    assert not [place for place in places if re.search(r"nan|inf", place)]
    ends = [box(mark) for mark in marks(drawing) if mark["tag"] == "rect"]
    assert all(left <= right and top <= bottom for left, top, right, bottom in ends)


@example([0.10000000000000002], 0.1)
@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=8), st.floats(0.1, 1e6))
@settings(max_examples=100, deadline=None)
def test_what_is_cut_is_what_is_beyond_the_axis(sizes, limit):
    drawing = svg(stacked(*sizes, limit=Limit(limit, Text("l"))))
    found = Page(drawing)
    ticks = [e for e in found.all("text") if e.get("class") == "muted"]
    arrows = [e for e in found.all("text") if e["text"].startswith("→")]
    assert len(arrows) == 0 or max(sizes) > FAR * limit * 0.999
    assert len(arrows) >= sum(size > 2.5 * FAR * limit for size in sizes)
    assert len(ticks) >= 2
    right = [float(tick["x"]) for tick in ticks]
    assert all(a < b for a, b in pairwise(right))
