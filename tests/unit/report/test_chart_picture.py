"""Charts drawn by matplotlib: every kind, odd values, hostile names."""

import math
from dataclasses import replace

import pytest

from cs336_systems.experiments.catalogue import catalogue
from cs336_systems.report.chart_picture import picture
from cs336_systems.report.document import Chart, Limit, Point, Series
from cs336_systems.report.picture import save
from cs336_systems.report.sections import pictures
from cs336_systems.text import Text
from tests.unit.experiments.steps.samples import SAMPLES
from tests.unit.report.page_cases import EVIL, HAS, STEP, hostile_charts, stacked


def chart(kind, *series, title="t", **fields):
    return Chart("c", Text(title), kind, Text("$x_$"), Text("$"), series, **fields)


def of_one(x, y, **fields):
    return Series(Text("$$"), [Point(x, y)], **fields)


def drawn(one, folder) -> str:
    (path,) = save([picture(one)], folder, ("svg",))
    return path.read_text(encoding="utf-8")


ODD = {
    "nothing": chart("lines"),
    "no spans": chart("spans", of_one("a", math.nan)),
    "no limit": stacked(8.0, limits=[Limit(math.nan, Text("l"))]),
    "over nothing": chart("bars", of_one("x", 4.0), of_one("x", 4.0, drawn="marks", over=7), limits=[HAS]),
    "only marks": chart("stacked", of_one("x", 4.0, drawn="marks")),
    "one point": chart("lines", of_one(1, 2.0, drawn="marks"), log_x=True, log_y=True),
    "dollars": chart("bars", of_one("$^$", 1.0), of_one("$^$", 2.0), title=r"$\frac$"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_charts_become_pictures(name, tmp_path):
    assert "</svg>" in drawn(ODD[name], tmp_path)


@pytest.mark.parametrize("hostile", hostile_charts(), ids=lambda chart: chart.kind)
def test_every_kind_with_hostile_names_becomes_a_picture(hostile, tmp_path):
    """No file can hold half a character; everything else is text."""
    text = Text(EVIL.encode("utf-8", "replace").decode("utf-8"))
    points = [
        replace(point, x=float(place) if hostile.kind == "lines" else f"{text.en}{place}")
        for place, point in enumerate(hostile.series[0].points)
    ]
    series = [replace(one, name=text, points=points) for one in hostile.series]
    odd = replace(hostile, name="c", title=text, x=text, y=text, series=series, limits=[Limit(2.0, text)])
    assert "<script>" not in drawn(odd, tmp_path)


def test_a_picture_shows_limit_lanes_and_values_beyond_the_axis(tmp_path):
    plan, lanes = drawn(stacked(12_345.0, 36.0, 8.0), tmp_path), drawn(STEP, tmp_path)
    assert "→ 12,345" in plan
    assert HAS.text.en in plan
    assert all(f">{name}<" in lanes for name in ("naive", "flat", "all-reduce", "0"))


def test_records_become_the_pictures_of_their_charts():
    found = pictures((record for own in SAMPLES.values() for record in own), catalogue())
    drawn = {one.name.rsplit("-", 1)[0] for one in found}
    assert drawn >= {"end-to-end", "warmup", "precision", "compile", "fast-step", "peak-memory", "timing-agreement"}
    assert "bench" not in drawn, "bench draws none after a run"
