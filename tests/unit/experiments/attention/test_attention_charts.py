"""Charts of attention: lengths, bars and the roofline."""

from functools import cache

import pytest

from cs336_systems.experiments.catalogue import catalogue
from cs336_systems.record import GIB, Environment
from cs336_systems.report.cells import group
from cs336_systems.report.sections import charts_of
from tests.helpers import records_of_h200
from tests.unit.experiments.attention.attention_cells import (
    OOM,
    flash_cell,
    leaderboard_cell,
    passes_cell,
    rivals_cell,
    step_cell,
)
from tests.unit.report.step_cells import values

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


def both(dim=64, **seconds):
    """Cells of one shape whose forward takes a fifth of the time."""
    passes = {name: {"forward_time": time / 5, "backward_time": 4 / 5 * time} for name, time in seconds.items()}
    return [flash_cell(name, size=(1, 1, 1024, dim), flops=7e12, **own) for name, own in passes.items()]


def test_rates_have_forward_and_backward_apart_for_each_head_dim():
    found = charts(*(cell for dim in (16, 64, 128) for cell in both(dim, auto=1.0, sdpa_cudnn=2.0)))
    assert list(found) == ["flash-1", "flash-2", "flash-3", "flash-4", "flash-roofline"]
    assert [chart.title.en for chart in found.values()] == [
        "Attention forward, d 64, causal, bf16",
        "Attention backward, d 64, causal, bf16",
        "Attention forward, d 128, causal, bf16",
        "Attention backward, d 128, causal, bf16",
        "Roofline, forward and backward, d 128, causal, bf16",
    ]
    forward, backward = found["flash-1"], found["flash-2"]
    assert names(forward) == ["ours", "cuDNN"]
    assert [values(series) for series in forward.series] == [{"1k": pytest.approx(rate)} for rate in (10, 5)]
    assert [values(series) for series in backward.series] == [{"1k": pytest.approx(rate)} for rate in (6.25, 3.125)]
    assert forward.kind == "bars"
    assert not forward.log_y


def test_the_fastest_of_our_kernels_is_ours():
    forward = charts(*both(auto=2.0, flash_triton=1.0, flash_torch=9.0, reference=3.0))["flash-1"]
    assert {series.name.en: values(series)["1k"] for series in forward.series} == {
        "ours": pytest.approx(10),
        "naive": pytest.approx(10 / 3),
    }
    on_cpu = charts(*both(flash_torch=2.0, reference=4.0))["flash-1"]
    assert names(on_cpu) == ["ours, in PyTorch", "naive"]


def test_lengths_that_leave_the_gpu_idle_are_left_out():
    lengths = {1024: 0.1, 2048: 1.0, 4096: 5.0, 8192: 5.0}
    cells = [flash_cell("auto", 1.0, (1, 1, length, 64), flops=rate * 1e12) for length, rate in lengths.items()]
    chart = charts(*cells)["flash-1"]
    assert chart.bar_names == ["2k", "4k", "8k"]


def test_the_peak_of_the_gpu_is_a_limit():
    (limit,) = charts(flash_cell("auto"))["flash-1"].limits
    assert limit.value == pytest.approx(989.4)
    assert charts(flash_cell("auto", environment=Environment(gpu="NVIDIA RTX 9999")))["flash-1"].limits == []
    assert charts(attended(device="cpu"))["flash-1"].limits == []


def test_naive_attention_has_backward_times_alone():
    found = charts(passes_cell("reference", 0.001, 0.003), passes_cell("compiled", 0.001, 0.002))
    (chart,) = found.values()
    assert chart.title.en == "Naive attention, backward, d 64, fp32"
    assert {series.name.en: series.points[0].y for series in chart.series} == {"naive": 3.0, "naive, compiled": 2.0}
    assert "means of 3 passes" in chart.note.en


def test_out_of_memory_is_a_point_with_a_note():
    chart = charts(flash_cell("reference"), flash_cell("reference", size=(1, 1, 65536, 64), status=OOM))["flash-1"]
    (series,) = chart.series
    assert [point.note is not None for point in series.points] == [False, True]
    chart = charts(passes_cell("reference"), passes_cell("reference", size=(8, 1, 4096, 64), status=OOM))
    (series,) = chart["pytorch-attention-1"].series
    assert [point.note is not None for point in series.points] == [False, True]


def test_intensity_counts_the_least_traffic():
    chart = roofline(attended("flash_triton"), attended("reference"), attended("compiled"))
    assert names(chart)[:3] == ["ours", "naive", "naive, compiled"]
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
    assert names(roofline(attended(environment=Environment(gpu=gpu)))) == ["ours"]


def test_a_cpu_has_no_roofline():
    assert roofline(attended(device="cpu")) is None


def test_rivals_are_compared_shape_by_shape():
    times = {"forward_time": 1e-3, "forward_backward_time": 4e-3}
    slower = {name: 2 * seconds for name, seconds in times.items()}
    found = charts(
        rivals_cell((1, 16, 16384, 64), flops=7e12, flash_triton=slower, sdpa_cudnn=slower, flash_hopper=times),
        rivals_cell((1, 16, 16384, 64), flops=7e12, is_causal=False, flash_triton=times, sdpa_cudnn={}),
    )
    forward, combined = found.values()
    assert names(forward) == names(combined) == ["ours", "cuDNN"]
    assert [values(series) for series in forward.series] == [
        {"1 x 16k, d 64, causal": pytest.approx(2000), "1 x 16k, d 64": pytest.approx(2000)},
        {"1 x 16k, d 64, causal": pytest.approx(1000)},
    ]
    assert values(combined.series[1]) == {"1 x 16k, d 64, causal": pytest.approx(875)}


def test_shapes_that_the_host_launches_too_slowly_have_times_with_and_without_a_graph():
    ours, theirs = {"forward_backward_time": 3e-4, "replayed_time": 4e-5}, {"forward_backward_time": 2e-4}
    found = charts(rivals_cell((4, 12, 512, 64), flash_triton=ours, sdpa_flash=theirs))
    by_host, by_graph = found.values()
    assert [values(series) for series in by_host.series] == [
        {"4 x 512, d 64, causal": pytest.approx(0.3)},
        {"4 x 512, d 64, causal": pytest.approx(0.2)},
    ]
    assert values(by_graph.series[0]) == {"4 x 512, d 64, causal": pytest.approx(0.04)}


def test_the_leaderboard_is_sorted_and_tells_ours_from_rivals():
    (board,) = charts(leaderboard_cell("flex", 0.006), leaderboard_cell("flash_hopper", 0.004)).values()
    assert board.bar_names == ["ours, Hopper", "FlexAttention"]
    assert {series.name.en: values(series) for series in board.series} == {
        "ours": {"ours, Hopper": 4.0},
        "rival": {"FlexAttention": 6.0},
    }


def test_steps_are_medians_with_their_range():
    (step,) = charts(step_cell(flash_triton=[200, 210, 280], sdpa_flash="RuntimeError: no kernel")).values()
    (series,) = step.series
    (dot,) = series.points
    assert (dot.place, dot.y, dot.low, dot.high) == ("ours, portable", *map(pytest.approx, (210, 200, 280)))
    assert step.title.en == "Training step by its attention: 2.7B, context 4096"


# -- the first screen -------------------------------------------------------------------------------------------------


def highlights(*cells):
    return catalogue()[cells[0].experiment].highlights(cells)


def test_highlights_compare_with_each_rival_on_the_largest_causal_shape_or_the_leaderboards():
    times = {"flash_triton": 2.0, "flash_hopper": 1.0, "sdpa_flash": 3.0, "flash_attention_4": 1.1}
    made = {name: {"forward_backward_time": seconds / 1e3} for name, seconds in times.items()}
    double = {name: {"forward_backward_time": seconds / 500} for name, seconds in times.items()}
    cells = [
        rivals_cell((1, 16, 2048, 64), flops=1e11, **double),
        rivals_cell((1, 16, 16384, 128), flops=1e12, **made),
        rivals_cell((1, 16, 16384, 128), flops=2e12, is_causal=False, **double),
    ]
    found = highlights(*cells)
    assert [(one.rank, one.value.en, one.what.en) for one in found] == [
        (10, "1.10x", "attention, against FlashAttention-4"),
        (12, "3.00x", "attention, against FlashAttention-2 (SDPA)"),
    ]
    assert [one.ratio for one in found] == pytest.approx([1.1, 3.0])
    assert (
        found[0].detail.en == "forward and backward, 1 x 16k, d 128, causal: ours 1.000 ms, FlashAttention-4 1.100 ms"
    )
    found = highlights(*cells, rivals_cell((1, 16, 16384, 64), flops=5e11, **double))
    assert found[0].detail.en == "forward and backward, 1 x 16k, d 64, causal: ours 2.000 ms, FlashAttention-4 2.200 ms"
    alone = rivals_cell(flash_triton={"forward_backward_time": 1e-3})
    assert highlights(alone) == [], "no rival"
    trust = catalogue()["attention_rivals"].trust
    assert trust([alone])
    assert trust([]) is None


def test_memory_is_compared_with_naive_attention_at_the_greatest_length():
    cells = [
        flash_cell(name, size=(1, 1, length, 64), peak_memory=factor * length / 1024 * GIB)
        for length in (1024, 4096)
        for name, factor in (("auto", 0.5), ("reference", 10))
    ]
    (found,) = highlights(*cells)
    assert (found.rank, found.value.en, found.ratio) == (45, "20x", None)
    assert found.detail.en == "ours 2.00 GiB, naive 40.00 GiB (d 64, bf16)"
    assert highlights(*cells[::2]) == [], "nothing to compare with"


@cache
def h200():
    return group(record for record in records_of_h200() if record.experiment in NAMES)


def test_no_implementation_on_the_h200_is_above_the_roof():
    chart = roofline(*(cell for cell in h200() if cell.experiment == "flash"))
    *measured, _ = chart.series
    assert all(0 < point.y < min(989.4, 4.8 * point.x) for series in measured for point in series.points)
    assert sum(len(series.points) for series in measured) > 25


def test_charts_of_the_h200_can_be_read():
    for experiment in NAMES:
        for chart in charts(*(cell for cell in h200() if cell.experiment == experiment)).values():
            assert len(chart.shown) <= 7, chart.title.en
            assert chart.note is not None, chart.title.en
            shown = [text.en for text in (*(series.name for series in chart.series), *chart.labels.values())]
            assert not [text for text in shown if "_" in text], "names for readers"
