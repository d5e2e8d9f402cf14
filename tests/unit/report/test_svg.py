"""Charts as SVG: marks, axes, limits, names and spans of any values, in both languages."""

import math
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cs336_systems.report.document import FAR, Chart, Event, Limit, Point, Series
from cs336_systems.report.names import COLORS
from cs336_systems.report.web.svg import svg
from cs336_systems.report.web.svg.labels import text_width, wrap
from cs336_systems.report.web.svg.placement import NARROW, WIDTH
from cs336_systems.report.web.svg.scales import number
from cs336_systems.text import Text
from tests.unit.any_text import any_text
from tests.unit.report.page_cases import (
    HAS,
    KINDS,
    OOM,
    STEP,
    Page,
    boxes,
    chart,
    coordinates,
    hostile_charts,
    long_names,
    many_bars,
    marks,
    stacked,
    with_points,
)

every_kind = pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
every_width = pytest.mark.parametrize("width", [WIDTH, NARROW])


def root(drawing):
    (found,) = Page(drawing).all("svg")
    return found


def height(drawing):
    return float(re.search(r'viewBox="0 0 [\d.]+ ([\d.]+)"', drawing)[1])


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


def values(drawing):
    return [mark["data-value"] for mark in marks(drawing)]


# Marks


@every_kind
def test_marks_and_texts_carry_names_in_both_languages(fields):
    drawing = svg(chart(**fields))
    found = marks(drawing)
    assert len(found) == 6
    assert {(m["data-series"], m["data-label"], m["data-value"], m["data-std"], m["data-n"]) for m in found} == {
        (name, x, y, "0.50", "10") for name in ("first", "second") for x, y in (("1", "2"), ("2", "5"), ("4", "3"))
    }
    assert {m.get("data-series-zh") for m in found} == {"第一", None}
    assert root(drawing)["role"] == "img"
    assert re.match(r"Title\. .* of time \(ms\) by size", root(drawing)["aria-label"])
    assert "标题" in root(drawing)["data-aria-zh"]
    classes = {t["text"]: t.get("class", "").split() for t in Page(drawing).all("text")}
    assert "en" in classes["first"]
    assert "zh" in classes["第一"]
    assert not {"en", "zh"} & set(classes["second"])
    assert {"time (ms)", "时间", "size", "大小"} <= classes.keys()


ODD_POINTS = {
    "one": [Point(4, 3.0)],
    "zeros": [Point(4, 0.0), Point(8, 0.0)],
    "zero": [Point(4, 0.0)],
    "equal": [Point(4, 7.0), Point(8, 7.0), Point(16, 7.0)],
    "same place": [Point(4, 7.0), Point(4, 7.0)],
    "negative": [Point(4, -3.0), Point(8, 5.0)],
    "wide range": [Point(4, 1e-12), Point(8, 1e12)],
    "close": [Point(4, 1e9 + 1), Point(8, 1e9 + 2)],
    "denormal": [Point(4, 5e-324), Point(8, 5e-324)],
    "large std": [Point(4, 1.0, std=5.0)],
    "bad std": [Point(4, 1.0, std=math.nan), Point(8, 2.0, std=math.inf)],
    "notes": [Point(4, math.nan, note=OOM), Point(8, math.nan, note=OOM)],
}


@every_kind
@pytest.mark.parametrize("points", ODD_POINTS.values(), ids=ODD_POINTS)
def test_odd_values_are_drawn_inside_the_drawing(fields, points):
    for width in (WIDTH, NARROW):
        drawing = svg(with_points(*points, **fields), width)
        assert all(map(math.isfinite, coordinates(drawing)))
        for mark in marks(drawing):
            left, top, right, bottom = box(mark) if mark["tag"] == "rect" else at(mark) * 2
            assert 0 <= left <= right <= width
            assert 0 <= top <= bottom <= height(drawing)


@every_kind
def test_values_without_a_position_are_omitted(fields):
    for bad in (math.nan, math.inf, -math.inf):
        assert values(svg(with_points(Point(1, 2.0), Point(2, bad), Point(4, 3.0), **fields))) == ["2", "3"]
        assert values(svg(with_points(Point(1, 2.0), Point(bad, 5.0), Point(4, 3.0), **fields))) == ["2", "3"]
    for series in ([], [Series(Text("empty"), [])], [Series(Text("bad"), [Point(1, math.nan)])]):
        drawing = svg(chart(series=series, **fields))
        assert ">no data<" in drawing
        assert ">没有数据<" in drawing
        assert marks(drawing) == []
    series = [Series(Text("empty"), []), Series(Text("full"), [Point(1, 2.0)])]
    groups = [e for e in Page(svg(chart(series=series, **fields))).all("g") if "data-index" in e]
    assert [(g["class"], g["data-index"]) for g in groups] == [("series s1", "1")]  # colours do not move up


def test_values_that_a_logarithmic_axis_cannot_show_are_omitted():
    points = [Point(0, 2.0), Point(2, 0.0), Point(4, 3.0), Point(8, -1.0)]
    assert values(svg(with_points(*points, log_x=True, log_y=True))) == ["3"]


def test_a_bar_of_zero_is_visible():
    found = marks(svg(with_points(Point("a", 0.0), Point("b", 4.0), kind="bars")))
    assert [m["data-value"] for m in found] == ["0", "4"]
    assert float(found[0]["height"]) > 1


def test_a_line_has_a_gap_at_a_missing_point():
    drawing = svg(with_points(Point(1, 2.0), Point(2, math.nan), Point(4, 3.0), Point(8, 3.0)))
    (line,) = [e for e in Page(drawing).elements if e.get("class") == "line"]
    assert (line["d"].count("M"), line["d"].count("L")) == (2, 1)


@every_kind
def test_notes_are_crosses(fields):
    points = [Point(1, 2.0), Point(2, math.nan, note=OOM), Point(4, 9.0, note=OOM)]
    found = marks(svg(with_points(*points, **fields)))
    assert [m["data-value"] for m in found] == ["2", "", ""]
    crosses = [m for m in found if m["class"] == "cross"]
    assert [(m["data-note"], m["data-note-zh"]) for m in crosses] == [tuple(OOM)] * 2


def test_crosses_of_two_series_do_not_overlap():
    both = [Series(Text(name), [Point(1, 2.0), Point(2, math.nan, note=OOM)]) for name in "ab"]
    first, second = (m["transform"] for m in marks(svg(chart(series=both))) if m["class"] == "cross")
    assert first != second


def test_series_differ_by_more_than_colour():
    series = [Series(Text(f"s{i}"), [Point(1, 1.0 + i)], dashed=i == 7) for i in range(20)]
    drawing = svg(chart(series=series))
    groups = [e["class"] for e in Page(drawing).all("g") if "data-index" in e]
    assert {g.split()[1] for g in groups} == {f"s{i}" for i in range(COLORS)}
    assert len({(m["d"], group) for m, group in zip(marks(drawing), groups, strict=True)}) == 20
    assert 'class="line dashed"' in drawing
    bars = Page(svg(chart("bars", series)))
    assert len([m for m in bars.elements if m.get("class") == "hollow" and "data-value" in m]) == 1
    patterns = {e["id"] for e in bars.all("pattern")}
    assert len(patterns) == 20 - COLORS  # those that repeat a colour
    assert {name for e in bars.elements for name in re.findall(r"url\(#(.*?)\)", e.get("fill", ""))} <= patterns


def test_stacked_parts_touch():
    series = [Series(Text(n), [Point("a", y), Point("b", -y)]) for n, y in (("x", 1.0), ("y", 2.0), ("z", 3.0))]
    found = marks(svg(chart("stacked", series)))
    ups, downs = ([m for m in found if m["data-way"] == way] for way in ("1", "-1"))
    for upper, lower in [*pairwise(reversed(ups)), *pairwise(downs)]:
        assert box(upper)[3] == pytest.approx(box(lower)[1], abs=0.2)
    assert float(ups[2]["height"]) == pytest.approx(3 * float(ups[0]["height"]), rel=0.02)


def test_a_long_line_has_a_bounded_number_of_marks():
    drawing = svg(with_points(*(Point(i, float(i % 7)) for i in range(10_000))))
    assert 60 < len(marks(drawing)) <= 120
    assert drawing.count("L") > 9_000


def test_a_line_can_lack_marks_and_marks_a_line():
    points = [Point(1, 2.0), Point(2, 5.0), Point(4, 3.0)]
    drawings = [svg(chart("lines", [Series(Text("only"), points, drawn=drawn)])) for drawn in ("both", "line", "marks")]
    assert [drawing.count('class="line"') for drawing in drawings] == [1, 1, 0]
    assert [len([m for m in marks(drawing) if "style" not in m]) for drawing in drawings] == [3, 0, 3]
    assert [len(marks(drawing)) for drawing in drawings] == [3, 3, 3]  # all have tooltips


def test_a_fitted_line_has_the_colour_of_its_data():
    points = [Point(1, 2.0), Point(2, 5.0)]
    series = [Series(Text(f"s{i}"), points, over=None if i < 2 else 0) for i in range(3)]
    groups = [e["class"] for e in Page(svg(chart("lines", series))).all("g") if "data-index" in e]
    assert groups == ["series s0", "series s1", "series s0"]


def test_the_label_of_a_mark_includes_the_name_of_its_point():
    (mark,) = marks(svg(chart("lines", [Series(Text("s"), [Point(28.0, 3.0, name="1 x 16 x 64")])])))
    assert mark["data-label"] == "28 (1 x 16 x 64)"


def test_marks_on_bars_are_centred_on_their_bars():
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
            assert at(mark) == pytest.approx(((left + right) / 2, top), abs=0.2)
    alone = by_series(svg(chart("bars", series[:2])))
    assert list(map(box, alone["a"])) == list(map(box, found["a"]))
    assert box(found["a"][0])[2] <= at(found["of all"][0])[0] <= box(found["b"][0])[0]


@pytest.mark.parametrize("horizontal", [False, True])
def test_marks_add_nothing_to_stacked_bars(horizontal):
    parts = [Series(Text(name), [Point("x", 4.0)]) for name in "ab"]
    predicted = Series(Text("predicted"), [Point("x", 8.0)], drawn="marks")
    found = by_series(svg(chart("stacked", [*parts, predicted], horizontal=horizontal)))
    end, mark = box(found["b"][0]), at(found["predicted"][0])
    assert (mark[0] if horizontal else mark[1]) == pytest.approx(end[2] if horizontal else end[1], abs=0.2)


@pytest.mark.parametrize("kind", ["bars", "stacked"])
@pytest.mark.parametrize(
    ("places", "expected"),
    [
        (["slow", "middle", "nowhere", "fast", "slow"], ["slow", "middle", "fast"]),
        (["middle"], ["middle", "slow", "fast"]),
    ],
)
def test_bars_are_in_the_given_order(kind, places, expected):
    series = [
        Series(Text("ours"), [Point("slow", 9.0), Point("fast", 1.0)]),
        Series(Text("rival"), [Point("middle", 5.0)]),
    ]
    left = {m["data-label"]: box(m)[0] for m in marks(svg(chart(kind, series, places=places)))}
    assert sorted(left, key=lambda name: left[name]) == expected


# Axes and texts


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0"), (0.1, "0.1"), (0.25, "0.25"), (20, "20"), (1000, "1k"), (1024, "1024"), (1500, "1.5k"),
        (16384, "16384"), (10_000_000, "10M"), (2_500_000_000, "2.5G"), (-2000, "-2k"), (0.00001, "1e-5"),
        (999.96, "1000"),
    ],
)  # fmt: skip
def test_numbers_on_axes_are_short(value, expected):
    assert number(value) == expected


def ticks(drawing):
    return [e["text"] for e in Page(drawing).all("text") if "muted" in e["classes"]]


def test_ticks_are_round_numbers():
    assert " ".join(ticks(svg(with_points(Point(0, 0.0), Point(100, 9.7))))) == "0 2 4 6 8 10 0 20 40 60 80 100"
    powers = svg(with_points(*(Point(2**i, 10.0**i) for i in range(7, 12)), log_x=True, log_y=True))
    assert ticks(powers) == ["10M", "100M", "1G", "10G", "100G", "128", "256", "512", "1024", "2048"]
    assert len(set(ticks(svg(with_points(Point(1, 1e9 + 1), Point(2, 1e9 + 2))))[:6])) == 6
    large_std = svg(with_points(Point(1, 1.0, std=0.999999), Point(2, 8.0, std=9.0), log_y=True))
    assert ticks(large_std)[:7] == ["0.2", "0.5", "1", "2", "5", "10", "20"]


@every_kind
@every_width
def test_texts_neither_overlap_nor_leave_the_drawing(fields, width):
    drawing = svg(long_names(**fields), width)
    for language in ("en", "zh"):
        found = list(boxes(drawing, language))
        for i, (text, left, right, top, bottom) in enumerate(found):
            assert left >= -1, text
            assert right <= width + 1, text
            assert 0 <= top <= bottom <= height(drawing), text
            for other, left2, right2, top2, bottom2 in found[i + 1 :]:
                assert right <= left2 or right2 <= left or bottom <= top2 or bottom2 <= top, (text, other)


def test_a_label_of_two_lines_below_the_axis_fits():
    """Its room is what is centred below the plot, not the whole width."""
    words = "as long as it can be "
    below = words * int((WIDTH - 4) / text_width(words))
    drawing = svg(replace(chart("lines"), x=Text(below)))
    assert all(bottom <= height(drawing) for *_, bottom in boxes(drawing, "en"))


def test_no_line_begins_with_a_closing_mark_of_chinese():
    lines = wrap("批大小 4，头数 16，头维度 64，序列长度 2048，因果，前向加反向（中位数），本项目", 90, 20)
    assert len(lines) > 4
    assert not [line for line in lines if line[0] in "，。、；：）"]


def test_long_names_below_bars_are_rotated_and_thinned_out():
    rotated = re.findall(r"rotate\(-45 ([\d.]+)", svg(many_bars(count=200)))
    assert 10 < len(rotated) < 40
    assert all(float(b) - float(a) > 20 for a, b in pairwise(rotated))
    assert "rotate" not in svg(with_points(Point("a", 1.0), Point("b", 2.0), kind="bars"))
    shortened = svg(with_points(Point("w" * 200, 1.0), kind="bars", horizontal=True))
    assert f"<title>{'w' * 200}</title>" in shortened


# Spans


def spans(*series):
    return replace(STEP, series=series)


def test_spans_have_their_start_end_and_lane():
    drawing = svg(STEP)
    found = by_series(drawing)
    assert [m["data-value"] for m in found["backward"]] == ["4 – 10", "4 – 8"]
    assert found["forward"][0]["data-series-zh"] == "前向"
    assert root(drawing)["aria-label"] == "Lanes. Spans of ms since by wrapper: forward, backward, all-reduce"
    forward, backward = box(found["forward"][0]), box(found["backward"][0])
    assert forward[2] == pytest.approx(backward[0], abs=0.2)
    assert (backward[2] - backward[0]) / (forward[2] - forward[0]) == pytest.approx(6 / 4, rel=0.01)
    first, second = map(box, found["all-reduce"])
    assert first[2] == pytest.approx(second[0], abs=0.2)
    assert forward[3] <= first[1] < first[3] <= box(found["forward"][1])[1]
    assert height(svg(spans(*STEP.series[:2]))) < height(drawing)  # without the second lane


@pytest.mark.parametrize(
    ("point", "drawn"),
    [
        (Point("a", 3.0, start=1.0), True),
        (Point("a", 3.0, start=3.0), True),
        (Point("a", 1.0, start=3.0), True),
        (Point("a", 3.0, start=-1.0), True),
        (Point("a", 3.0), False),
        (Point("a", 3.0, start=math.nan), False),
        (Point("a", math.inf, start=0.0), False),
        (Point("a", math.nan, start=0.0), False),
    ],
    ids=str,
)
def test_spans_of_odd_values(point, drawn):
    drawing = svg(spans(Series(Text("s"), [point])))
    assert (len(marks(drawing)), ">no data<" in drawing) == (drawn, not drawn)
    for left, top, right, bottom in map(box, marks(drawing)):
        assert 0 <= left < right <= WIDTH
        assert top < bottom
    assert all(map(math.isfinite, coordinates(drawing)))


# Limits


def limit_marks(drawing):
    return [mark for mark in marks(drawing) if mark["data-series"] == HAS.text.en]


@pytest.mark.parametrize("kind", ["lines", "bars", "stacked"])
@pytest.mark.parametrize("horizontal", [False, True])
def test_a_limit_is_a_named_line(kind, horizontal):
    drawing = svg(chart(kind, horizontal=horizontal, limits=[HAS]))
    (mark,) = limit_marks(drawing)
    assert mark["data-value"] == "10"
    assert mark["data-series-zh"] == "显存容量"
    texts = {e["text"]: e for e in Page(drawing).all("text")}
    assert set(HAS.text) <= texts.keys()
    assert "g" not in texts["GPU memory"]["within"]  # no button: it cannot be hidden
    assert "GPU memory" in root(drawing)["aria-label"]
    assert ("V" in mark["d"]) == (horizontal and kind != "lines")


def test_a_bar_as_large_as_the_limit_ends_at_its_line():
    drawing = svg(stacked(10.0, 3.0))
    (mark,) = limit_marks(drawing)
    assert float(re.match(r"M([\d.]+)", mark["d"])[1]) == pytest.approx(box(by_series(drawing)["y"][0])[2], abs=0.2)


def test_bars_far_beyond_the_limit_are_cut_and_labelled():
    drawing = svg(stacked(12_345.0, 36.0, 8.0, 99.0))
    found = Page(drawing)
    assert [e["text"] for e in found.all("text") if e["text"].startswith("→")] == ["→ 12,345", "→ 99"]
    (clip,) = found.all("clippath")
    (group,) = [e for e in found.all("g") if "clip-path" in e]
    assert group["clip-path"] == f"url(#{clip['id']})"
    assert len([m for m in marks(drawing) if m["tag"] == "rect"]) == 8
    assert max(map(float, ticks(drawing))) == FAR * HAS.value
    assert all(right <= WIDTH for _, _, right, _, _ in boxes(drawing, "en"))
    plan = stacked(12_345.0, 8.0)
    noted = replace(plan, series=[*plan.series, Series(Text("z"), [Point("bar 1", math.nan, note=OOM)])])
    for whole in (svg(stacked(36.0, 8.0)), svg(noted)):  # within reach; crosses occupy the far end
        assert "clip" not in whole
        assert ">→" not in whole


def test_each_limit_has_its_line_and_its_entry():
    limits = [HAS, Limit(4.0, Text("floor", "下界"), dashed=True), Limit(math.nan, Text("unknown"))]
    drawing = svg(chart("bars", limits=limits))
    drawn = {m["data-series"]: m["data-value"] for m in marks(drawing) if m["data-series"] in ("GPU memory", "floor")}
    assert drawn == {"GPU memory": "10", "floor": "4"}
    assert drawing.count('class="bound dashed"') == 2  # the line and its entry
    assert float(ticks(drawing)[5]) >= 10  # the axis reaches them
    assert svg(chart("lines", limits=limits[2:])).count("bound") == 1  # without a place only the entry


# Values on bars, dots, events, digits, legends


def written(drawing):
    """The texts at the ends of bars, by their place along the axis of values."""
    found = Page(drawing)
    groups = [e for e in found.all("g") if e.get("class", "").split()[:1] == ["value"]]
    return {e["text"]: float(e["data-at"]) for e in groups}


@pytest.mark.parametrize("horizontal", [False, True])
def test_bars_have_their_values_at_their_ends(horizontal):
    points = [Point("a", 1234.5, std=100.0), Point("b", 0.01234), Point("c", 99.96)]
    drawing = svg(with_points(*points, kind="bars", horizontal=horizontal))
    assert written(drawing).keys() == {"1,234", "0.0123", "100.0"}
    longest = box(marks(drawing)[0])
    end = written(drawing)["1,234"]
    assert end > longest[2] if horizontal else end < longest[1]  # beyond the error bar
    shorter = box(marks(drawing)[2])
    assert written(drawing)["100.0"] == pytest.approx(shorter[2] if horizontal else shorter[1], abs=0.2)


def test_whole_values_are_written_whole_where_all_are():
    assert written(svg(with_points(Point("a", 7.0), Point("b", 12.0), kind="bars"))).keys() == {"7", "12"}


def test_bars_of_equal_sums_have_none_written():
    shares = [Series(Text(n), [Point("a", y), Point("b", 100 - y)]) for n, y in (("x", 30.0), ("y", 70.0))]
    assert written(svg(chart("stacked", shares))) == {}


def test_stacked_bars_have_their_sums_above_and_below_zero():
    parts = [Series(Text(n), [Point("a", y), Point("b", -y)]) for n, y in (("x", 1.0), ("y", 2.5))]
    drawing = svg(chart("stacked", [*parts, Series(Text("z"), [Point("b", 7.0)])]))
    ends = {end for mark in marks(drawing) for end in (box(mark)[1], box(mark)[3])}
    assert written(drawing).keys() == {"3.50", "-3.50", "7.00"}
    assert all(min(abs(end - at) for end in ends) < 0.2 for at in written(drawing).values())


def test_values_of_negative_bars_leave_room_for_the_names():
    for fields in ({}, {"horizontal": True}):
        drawing = svg(with_points(Point("a", -5.0), Point("b", 3.0), Point("c", -0.25), kind="bars", **fields))
        found = list(boxes(drawing, "en"))
        for i, (text, left, right, top, bottom) in enumerate(found):
            for other, left2, right2, top2, bottom2 in found[i + 1 :]:
                assert right <= left2 or right2 <= left or bottom <= top2 or bottom2 <= top, (text, other)


def test_thin_bars_have_no_values_and_narrow_ones_turned_values():
    def bars(count):
        return svg(with_points(*(Point(f"{i}", 1000.0 + i) for i in range(count)), kind="bars"))

    assert 'class="value"' in bars(3)
    assert 'class="value turned"' in bars(25)
    assert 'class="value' not in bars(70)


def dots(*points, **fields):
    return with_points(*points, kind="dots", **fields)


def test_dots_have_their_intervals():
    drawing = svg(dots(Point("a", 5.0, low=4.0, high=8.0), Point("b", 6.0), Point("b", 7.0, low=1.0), digits=1))
    assert values(drawing) == ["5.0 (4.0 – 8.0)", "6.0", "7.0"]
    first, second, third = map(at, marks(drawing))
    assert first[0] < second[0] < third[0]
    assert first[1] < second[1] == third[1]  # a row for each name
    (line,) = [e for e in Page(drawing).elements if e.get("class") == "line"]
    low, high = re.match(r"M([\d.]+) [\d.]+H([\d.]+)", line["d"]).groups()
    assert float(low) < first[0] < float(high)


def test_the_axis_of_dots_reaches_the_ends_of_intervals_and_need_not_have_zero():
    drawing = svg(dots(Point("a", 100.0, low=95.0, high=110.0), Point("b", 101.0)))
    numbers = list(map(float, ticks(drawing)))
    assert numbers[0] <= 95
    assert numbers[-1] >= 110
    assert numbers[0] > 0


def test_events_are_named_vertical_lines():
    points = [Point(0, 1.0), Point(100, 2.0)]
    events = [Event(30, Text("restart", "重启")), Event(31, Text("again")), Event(500, Text("later"))]
    found = Page(svg(with_points(*points, events=events)))
    lines = [e["d"] for e in found.elements if e.get("class") == "event"]
    assert len(lines) == 2  # the third is not on the axis
    assert len({re.match(r"M([\d.]+)", line)[1] for line in lines}) == 2
    texts = {e["text"] for e in found.all("text")}
    assert {"restart", "重启"} <= texts
    assert "again" not in texts  # no room beside the first
    assert "event" not in svg(with_points(Point("a", 1.0), kind="bars", events=events))


@pytest.mark.parametrize(("digits", "value", "std"), [(None, "0.12", "0.0123"), (0, "0", "0"), (3, "0.123", "0.012")])
def test_values_have_the_digits_of_the_table(digits, value, std):
    (mark,) = marks(svg(with_points(Point(1, 0.1234, std=0.01234), digits=digits)))
    assert (mark["data-value"], mark["data-std"]) == (value, std)


def test_a_single_series_has_no_legend():
    alone = with_points(Point("a", 1.0), kind="bars")
    assert "data-toggle" not in svg(alone)
    assert ">only<" not in svg(alone)
    limited = svg(replace(alone, limits=[HAS]))
    assert ">GPU memory<" in limited
    assert "data-toggle" not in limited
    assert svg(chart("bars")).count("data-toggle") == 2


def test_names_of_bars_are_in_both_languages():
    drawing = svg(with_points(Point(Text("one", "一"), 1.0), Point("two", 2.0), kind="bars"))
    assert {"one", "一", "two"} <= {e["text"] for e in Page(drawing).all("text")}
    first, second = marks(drawing)
    assert (first["data-label"], first["data-label-zh"]) == ("one", "一")
    assert "data-label-zh" not in second


def test_small_values_keep_their_digits_beside_large_ones():
    """The script enlarges them when the large ones are hidden."""
    series = [Series(Text(name), [Point("a", y), Point("b", y)]) for name, y in (("large", 5000.0), ("small", 0.123))]
    drawing = svg(chart("bars", series))
    low, high, start, end, *_ = map(float, root(drawing)["data-scale"].split())
    (size, _) = [float(m["data-size"]) for m in by_series(drawing)["small"]]
    assert size * (high - low) / (start - end) == pytest.approx(0.123, rel=2e-3)
    drawing = svg(chart("lines", [replace(one, points=[Point(1, one.points[0].y)]) for one in series]))
    low, high, start, end, *_ = map(float, root(drawing)["data-scale"].split())
    assert (start - at(by_series(drawing)["small"][0])[1]) * (high - low) / (start - end) == pytest.approx(
        0.123, rel=2e-3
    )


# Any chart


@pytest.mark.parametrize("hostile", list(hostile_charts()), ids=lambda one: one.kind)
def test_no_text_breaks_out_of_a_drawing(hostile):
    found = Page(svg(hostile))
    assert {e["tag"] for e in found.elements} <= {
        *("svg", "g", "path", "rect", "text", "tspan", "title", "defs", "pattern", "clippath")
    }
    assert not [e for e in found.elements if any(name.startswith("on") for name in e)]
    assert all(re.fullmatch(r"[\w-]+", e["id"], re.ASCII) for e in found.elements if "id" in e)


numbers = st.floats() | st.sampled_from([0.0, -1.0, 5e-324, 1e308, 128.0])
names = any_text(max_size=12)
texts = st.builds(Text, names, names)
points = st.builds(
    Point, numbers | names, numbers, st.none() | numbers, st.none() | st.integers(0, 9), st.none() | texts,
    st.none() | numbers, names, st.none() | numbers, st.none() | numbers,
)  # fmt: skip
drawn = st.sampled_from(["both", "line", "marks"])
series = st.builds(
    Series, texts, st.lists(points, max_size=6), st.booleans(), drawn, st.none() | st.integers(0, 3), st.integers(0, 2)
)
charts = st.builds(
    Chart, names, texts, st.sampled_from(["lines", "bars", "stacked", "spans", "dots"]), texts, texts,
    st.lists(series, max_size=4), st.booleans(), st.booleans(), st.booleans(), st.lists(names, max_size=3),
    st.lists(st.builds(Limit, numbers, texts, st.booleans()), max_size=2),
    st.lists(st.builds(Event, numbers, texts), max_size=3),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(charts)
def test_any_chart_can_be_drawn(any_chart):
    drawing = svg(any_chart)
    coordinates(drawing)
    ends = [box(mark) for mark in marks(drawing) if mark["tag"] == "rect"]
    assert all(left <= right and top <= bottom for left, top, right, bottom in ends)


@example([0.10000000000000002], 0.1)
@example([2.0, 2.0], 0.125)
@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=8), st.floats(0.1, 1e6))
@settings(max_examples=30, deadline=None)
def test_only_bars_beyond_the_axis_are_cut(sizes, limit):
    found = Page(svg(stacked(*sizes, limits=[Limit(limit, Text("l"))])))
    arrows = [e for e in found.all("text") if e["text"].startswith("→")]
    assert not arrows or max(sizes) > FAR * limit * 0.999
    assert len(arrows) >= sum(size > 2.5 * FAR * limit for size in sizes)
    right = [float(e["x"]) for e in found.all("text") if "muted" in e["classes"]]
    assert len(right) >= 2
    assert all(a < b for a, b in pairwise(right))
