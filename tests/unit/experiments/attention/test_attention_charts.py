"""Charts of attention: lengths, bars and the roofline."""

from functools import cache

import pytest

from cs336_systems.experiments.catalogue import catalogue
from cs336_systems.record import Environment, load
from cs336_systems.report.cells import group
from cs336_systems.report.sections import charts_of
from tests.helpers import ROOT
from tests.unit.experiments.attention.attention_cells import (
    OOM,
    flash_cell,
    leaderboard_cell,
    passes_cell,
    rivals_cell,
    step_cell,
)

NAMES = ("pytorch_attention", "flash", "attention_rivals", "flash_leaderboard", "attention_step")


def charts(*cells):
    return {chart.name: chart for chart in charts_of(catalogue()[cells[0].experiment], cells)}


def names(chart):
    return [series.name.en for series in chart.series]


def attended(implementation="flash_triton", length=1024, **fields):
    """One cell of 2 x 4 heads that takes 1 ms."""
    size = (2, 4, length, 64)
    fields = {"flops": 14 * 2 * 4 * length**2 * 64, "is_causal": False, "forward_backward_time": 1e-3, **fields}
    return flash_cell(implementation, size=size, **fields)


def roofline(*cells):
    return charts(*cells).get("flash-roofline")


def test_times_and_rates_go_by_length_and_head_dim():
    sizes = [(1, 1, length, dim) for dim in (16, 64, 128) for length in (2048, 1024)]
    found = charts(*(flash_cell(name, 2.0, size) for name in ("flash_triton", "reference") for size in sizes))
    assert list(found) == ["flash-1", "flash-2", "flash-3", "flash-4", "flash-roofline"]
    assert [chart.title.en for chart in found.values()] == [
        "Attention forward and backward, d = 64, bf16",
        "Attention, TFLOP/s, d = 64, bf16",
        "Attention forward and backward, d = 128, bf16",
        "Attention, TFLOP/s, d = 128, bf16",
        "Roofline, forward and backward, d = 128, bf16",
    ]
    assert names(found["flash-1"]) == ["flash_triton", "reference"]
    assert [point.x for point in found["flash-1"].series[0].points] == [1024, 2048]
    assert [point.y for point in found["flash-2"].series[0].points] == [250.0, 250.0]


def test_naive_attention_has_backward_times_alone():
    found = charts(passes_cell("reference", 0.001, 0.003), passes_cell("compiled", 0.001, 0.002))
    (chart,) = found.values()
    assert chart.title.en == "Naive attention, backward, d = 64, fp32"
    assert [series.points[0].y for series in chart.series] == [3.0, 2.0]


def test_out_of_memory_is_a_point_with_a_note():
    chart = charts(flash_cell("reference"), flash_cell("reference", size=(1, 1, 65536, 64), status=OOM))["flash-1"]
    (series,) = chart.series
    assert [point.note is not None for point in series.points] == [False, True]


def test_intensity_counts_the_least_traffic():
    chart = roofline(attended("flash_triton"), attended("reference"), attended("compiled"))
    fused, reference, compiled = (series.points[0] for series in chart.series[:3])
    flops, tensor, scores = 14 * 8 * 1024**2 * 64, 8 * 1024 * 64 * 2, 8 * 1024**2 * 2
    assert fused.x == pytest.approx(flops / (8 * tensor))
    assert reference.x == compiled.x == pytest.approx(flops / (8 * tensor + 8 * scores))
    assert fused.y == pytest.approx(flops / 1e-3 / 1e12)
    assert fused.name == "2 x 4 x 1024 x 64"
    assert (chart.log_x, chart.log_y) == (True, True)
    full = roofline(attended("flash_triton", precision="fp32"))
    assert full.series[0].points[0].x == pytest.approx(fused.x / 2)


def test_the_roof_is_the_smaller_of_peak_and_bandwidth():
    *_, roof = roofline(attended(length=32), attended(length=65536)).series
    assert roof.dashed
    assert "989 TFLOP/s, 4.8 TB/s" in roof.name.en
    for point in roof.points:
        assert point.y == pytest.approx(min(989.4, 4.8 * point.x))
    assert [point.x for point in roof.points][1] == pytest.approx(989.4 / 4.8)
    assert [roof.points[0].x, roof.points[-1].x] == pytest.approx([28, 57344])
    assert len(roofline(attended(length=65536)).series[-1].points) == 3, "both parts are in view"


@pytest.mark.parametrize("gpu", ["NVIDIA RTX 9999", "NVIDIA B200", None])
def test_an_unknown_gpu_has_no_roof(gpu):
    assert names(roofline(attended(environment=Environment(gpu=gpu)))) == ["flash_triton"]


def test_a_cpu_has_no_roofline():
    assert roofline(attended(device="cpu")) is None


def test_every_shape_of_the_rivals_is_a_bar_and_a_point():
    time = {"forward_backward_time": 1e-3}
    found = charts(
        rivals_cell((1, 16, 512, 64), is_causal=False, flash_triton=time, flex={}),
        rivals_cell((1, 16, 1024, 64), flash_triton=time, flex=time),
        rivals_cell((1, 16, 2048, 64), is_causal=False, flash_triton=time, flex=time),
    )
    bars, roof = found["attention-rivals-1"], found["attention-rivals-roofline"]
    assert [len(series.points) for series in bars.series] == [3, 2]
    assert [len(series.points) for series in roof.series] == [3, 2, 3]
    assert roof.series[1].points[0].name == bars.series[1].points[0].x == "1 x 16 x 1024 x 64 causal"


def test_leaderboard_and_step_are_bars_in_milliseconds():
    (board,) = charts(leaderboard_cell("flash_triton", 0.004), leaderboard_cell("flex", 0.006)).values()
    assert [(point.x, point.y) for point in board.series[0].points] == [("flash_triton", 4.0), ("flex", 6.0)]
    (step,) = charts(step_cell(flash_triton=[200, 210, 220], sdpa_flash="RuntimeError: no kernel")).values()
    assert {series.name.en: [(p.x, p.y) for p in series.points] for series in step.series} == {
        "flash_triton": [("2.7B, 4096", pytest.approx(210.0))],
        "sdpa_flash": [],
    }


@cache
def h200():
    records = load(ROOT / "results/h200/records.jsonl").records
    return group(record for record in records if record.experiment in NAMES)


@pytest.mark.parametrize("experiment", ["flash", "attention_rivals"])
def test_no_implementation_on_the_h200_is_above_the_roof(experiment):
    found = charts(*(cell for cell in h200() if cell.experiment == experiment))
    (chart,) = [chart for name, chart in found.items() if name.endswith("roofline")]
    *measured, _ = chart.series
    assert all(0 < point.y < min(989.4, 4.8 * point.x) for series in measured for point in series.points)
    assert sum(len(series.points) for series in measured) > 25
