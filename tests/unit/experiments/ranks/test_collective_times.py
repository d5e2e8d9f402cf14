"""`collectives`: the instrument, the columns of nccl-tests, the fit and its curve."""

import pytest

from cs336_systems.config import RunConfig
from cs336_systems.experiments.catalogue import cells
from cs336_systems.experiments.ranks.collective_times import COLLECTIVES, Timing, fit
from cs336_systems.experiments.ranks.measure_ranks import measure_collectives
from cs336_systems.experiments.spec import PRESETS
from cs336_systems.record import BUS_FACTOR, Metric
from cs336_systems.report.cells import CellView
from tests.unit.experiments.ranks.samples import charts, collective_cell, tables

LINK = {"backend": "gloo", "device": "cpu", "ranks": 2}


@pytest.mark.xdist_group("ranks")
def test_collectives_are_timed_and_shown():
    config = {**LINK, "collectives": list(COLLECTIVES), "sizes": [4096, 40960], "calls": 3}
    metrics = measure_collectives(config)
    assert [(m.variant, m.name) for m in metrics] == [(f"{c} {s}", "time") for c in COLLECTIVES for s in (4096, 40960)]
    assert all(len(metric.samples) == 3 and min(metric.samples) > 0 for metric in metrics)
    times, fits = tables([CellView.of("collectives", config, metrics)])
    assert len(times.rows) == 8
    assert [row[2] for row in fits.rows] == list(COLLECTIVES)
    assert any("stands in for a network" in note.en for note in times.notes)


def test_columns_are_those_of_nccl_tests():
    """4 ranks, 100 MB in 0.1 s: algbw 1 GB/s, and over the busiest link 1.5 times that for an all-reduce."""
    names = ["all_reduce", "all_gather", "broadcast"]
    config = {**LINK, "ranks": 4, "collectives": names, "sizes": [10**8], "calls": 1}
    metrics = [Metric("time", "s", [0.1], f"{name} {10**8}") for name in names]
    times, _ = tables([CellView.of("collectives", config, metrics)])
    rows = {row[2]: row[-2:] for row in times.rows}
    assert rows == {"all_reduce": ["1.00", "1.50"], "all_gather": ["1.00", "0.75"], "broadcast": ["1.00", "1.00"]}


def test_fit_finds_latency_and_bandwidth():
    found = fit([Timing(size, 3e-4 + size / 2e9) for size in (1e4, 1e6, 1e7, 1e8)])
    assert found.latency == pytest.approx(3e-4)
    assert found.gigabytes_per_second == pytest.approx(2)
    assert found.error < 1e-9


def test_fit_has_no_negative_term():
    growing = fit([Timing(1.0, 1.0), Timing(2.0, 4.0)])
    assert growing.latency == 0
    assert growing.seconds_per_byte > 0
    assert fit([Timing(1.0, 2.0), Timing(2.0, 1.0)]).seconds_per_byte == 0


def test_the_fit_is_drawn_as_a_curve_through_its_points():
    (chart,) = charts(collective_cell([10**k for k in range(3, 9)], ranks=4, latency=2e-5, rate=1e-10))
    seen, curve = chart.series
    assert (seen.drawn, curve.drawn, curve.dashed, curve.over) == ("marks", "line", True, 0)
    assert [curve.points[0].x, curve.points[-1].x] == pytest.approx([1e-3, 100])
    for point in [*seen.points, *curve.points]:
        size = point.x * 1e6
        assert point.y == pytest.approx(size / (2e-5 + 1e-10 * size) / 1e9 * BUS_FACTOR["all_reduce"](4), rel=1e-6)
    (chart,) = charts(collective_cell([1000]))
    assert len(chart.series) == 1, "one size has no fit"


@pytest.mark.parametrize("preset", PRESETS)
def test_grid_has_several_ranks_and_sizes(preset):
    for _, config in cells(["collectives"], preset, RunConfig(device="cpu")):
        assert config["ranks"] >= 2
        assert len(config["sizes"]) == 4
