"""Charts of the experiments on the time of a step."""

import pytest

from cs336_systems.experiments.steps.fast_steps import LLAMA
from cs336_systems.record import GIB
from tests.unit.experiments.steps.samples import DO_BENCH, SAMPLES
from tests.unit.report.step_cells import OOM, cell, charts, step, values

# -- end_to_end, bench ------------------------------------------------------------------------------------------------


def test_a_step_is_stacked_by_phase_in_the_order_of_size():
    chart, *_ = charts(cell("end_to_end", size="xl"), cell("end_to_end"), cell("end_to_end", mode="inference"))
    assert chart.kind == "stacked"
    assert [series.name.en for series in chart.series] == ["forward", "backward", "optimizer"]
    assert values(chart.series[1]) == pytest.approx({"small": 60.0, "xl": 60.0}), "training steps alone"
    assert chart.bar_names == ["small", "xl"]
    assert chart.note.en == "means of 3 steps"


def test_single_steps_are_shown_by_their_distance_from_the_mean():
    _, chart = charts(cell("end_to_end", metrics={"step_time": (0.1, 0.1, 0.13)}))
    steps, medians = chart.series
    assert [point.y for point in steps.points] == pytest.approx([-100 / 11, -100 / 11, 200 / 11])
    assert values(medians) == pytest.approx({"small": -100 / 11})


def test_mfu_and_tokens_per_second_by_size():
    *_, mfu, rate = charts(SAMPLES["end_to_end"])
    assert values(*mfu.series) == pytest.approx({"small": 50.0, "2.7B": 12.5})
    assert values(*rate.series) == pytest.approx({"small": 20_480.0, "2.7B": 5120.0})
    assert (mfu.digits, rate.digits) == (1, 0), "as in the table"


def test_contexts_are_series_and_a_single_size_is_named_by_what_differs():
    *_, rate = charts(*(cell("end_to_end", size=s, context=c) for s in ("small", "xl") for c in (128, 512)))
    assert [series.name.en for series in rate.series] == ["context 128", "context 512"]
    *_, rate = charts(cell(), cell(attention="flash_hopper"))
    assert rate.bar_names == ["naive attention", "our Hopper kernel"]


def test_without_a_known_peak_there_is_no_mfu():
    assert len(charts(*(cell("end_to_end", size=size, metrics={"peak_flops": None}) for size in ("small", "xl")))) == 3


def test_too_many_bars_are_not_drawn():
    assert charts(*(cell("end_to_end", batch_size=size) for size in range(1, 26))) == []


# -- warmup, timing_agreement -----------------------------------------------------------------------------------------


def test_steps_from_a_cold_start_are_compared_with_a_steady_one():
    steps, means = charts(SAMPLES["warmup"], cell("warmup", warmup_steps=1, metrics={"step_time": (0.12, 0.12)}))
    assert values(*steps.series) == pytest.approx({1: 9.0, 2: 1.0, 3: 1.0})
    assert values(*means.series) == pytest.approx({"0": 100 * (1.1 / 0.3 - 1), "1": 20.0})


def test_timers_are_compared_by_phase_and_size():
    (chart,) = charts(cell("timing_agreement", size="xl", metrics=DO_BENCH), SAMPLES["timing_agreement"])
    found = {series.name.en: values(series) for series in chart.series}
    assert found["step"] == pytest.approx({"small": 25.0, "xl": -100 / 101, "2.7B": 100 / 99})
    assert found["backward"] == pytest.approx({"xl": 20.0})
    assert chart.bar_names == ["small", "xl", "2.7B"]


# -- precision, compile -----------------------------------------------------------------------------------------------


def test_speed_ups_over_the_baseline():
    (chart,) = charts(SAMPLES["precision"], cell("precision", size="xl", precision="bf16"))
    (series,) = chart.series
    assert (series.name.en, values(series)) == ("bf16", pytest.approx({"small": 1.25, "2.7B": 3.0}))
    assert [(limit.value, limit.text.en) for limit in chart.limits] == [(1.0, "fp32")]


def test_torch_compile_has_a_gain_and_a_cost():
    gain, cost = charts(SAMPLES["compile"])
    assert gain.y.en == "times as fast as eager"
    assert values(*gain.series) == pytest.approx({"small": 1.0 / 0.9})
    assert values(*cost.series) == {"small": 20.0}
    assert charts(cell("compile"), cell("compile", compile=True, status=OOM)) == []


# -- fast_step --------------------------------------------------------------------------------------------------------


def fast(parts, seconds, **others):
    return cell("fast_step", fast=parts, precision="bf16", metrics=step(seconds, matmul_ceiling=(1e15,)), **others)


def test_the_build_up_has_one_order_in_every_panel():
    records = [
        fast("on", 0.02),
        fast("loss,optimizer,graph", 0.03),
        fast("graph", 0.05),
        fast("kernels", 0.2),
        fast("off", 0.1),
        cell("fast_step", compile=True, precision="bf16", metrics=step(0.15)),
    ]
    full, partial, _ = charts(*records, fast("on", 0.3, size="2.7B"), fast("off", 0.4, size="2.7B"))
    order = ["eager PyTorch", "torch.compile", "+ CUDA graph", "+ fused loss, optimizer", "all parts (+ kernels)"]
    assert full.bar_names == order, "also where a bar of the build-up is longer than the one above"
    assert partial.bar_names == [order[0], order[-1]]
    assert [values(series) for series in full.series] == [
        pytest.approx({order[0]: 100.0, order[1]: 150.0}),
        pytest.approx({order[2]: 50.0, order[3]: 30.0, order[4]: 20.0}),
    ]


def test_the_rival_and_the_floor_are_lines_across():
    (chart,) = charts(
        fast("on", 0.02),
        cell("fast_step", model_factory=LLAMA, compile=True, precision="bf16", metrics=step(0.04)),
    )
    rival, floor = chart.limits
    assert (rival.value, rival.text.en, rival.dashed) == (40.0, "Llama of transformers, compiled: 40.00 ms", False)
    assert (floor.value, floor.dashed) == (pytest.approx(5.0), True), "5 TFLOP at 1,000 TFLOP/s"
    assert chart.bar_names == ["all parts (+ kernels)"]


def test_a_part_saves_the_time_that_a_step_without_it_takes_longer():
    *_, chart = charts(SAMPLES["fast_step"])
    assert {series.name.en: values(series) for series in chart.series} == {
        "small, 4 x 512": pytest.approx({"CUDA graph": 40.0, "fused kernels": 10.0}),
        "2.7B, 4 x 512": {},
    }


def test_without_graphs_the_build_up_starts_with_loss_and_optimizer():
    records = [fast(parts, 0.1, device="cpu") for parts in ("off", "kernels", "loss,optimizer", "kernels,loss", "on")]
    build_up, savings = charts(*records)
    assert build_up.bar_names == ["eager PyTorch", "+ fused loss, optimizer", "all parts (+ kernels)"]
    assert savings.bar_names == ["fused optimizer", "fused kernels"]


# -- peak_memory, accumulation ----------------------------------------------------------------------------------------


def test_predictions_are_shown_by_their_errors():
    off = {"predicted_memory": (9.5 * GIB,)}
    (chart,) = charts(
        cell("peak_memory", checkpoint_blocks=4, metrics=off),
        SAMPLES["peak_memory"],
        cell("peak_memory", mode="inference", precision="bf16", metrics=off),
    )
    assert {series.name.en: values(series) for series in chart.series} == {
        "fp32": pytest.approx(
            {"training step": 1.0, "training step, SDPA": -5.0, "training step, checkpointing": -5.0}
        ),
        "bf16": pytest.approx({"inference": -5.0}),
    }
    rows = ["inference", "training step", "training step, checkpointing", "training step, SDPA"]
    assert chart.bar_names == rows, "short modes first, then what saves memory"
    assert [limit.value for limit in chart.limits] == [-2, 2]


def test_errors_of_sums():
    (chart,) = charts(SAMPLES["accumulation"])
    assert values(*chart.series) == pytest.approx({"fp32 += fp16": 0.02, "fp16 += fp16": -0.469})
    assert chart.note.en == "0.01 added 1000 times"
