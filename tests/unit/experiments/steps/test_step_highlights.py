"""Results of the experiments on the time of a step for the first screen, and why to trust them."""

import pytest

from cs336_systems.experiments.catalogue import catalogue
from cs336_systems.record import GIB
from tests.unit.experiments.steps.samples import SAMPLES
from tests.unit.report.step_cells import OOM, cell, highlights, large_numbers, step, trusted


def test_the_fast_step_is_compared_with_its_rival_the_largest_model_first():
    assert large_numbers(SAMPLES["fast_step"]) == [
        (
            20,
            "1.50x",
            "2.7B step, against eager PyTorch",
            "2.7B, 4 x 512 tokens, fp32: ours 200.00 ms, eager PyTorch 300.00 ms",
        ),
        (
            25,
            "4.00x",
            "small step, against compiled Llama",
            "small, 4 x 512 tokens, fp32: ours 10.00 ms, compiled Llama 40.00 ms",
        ),
        (
            40,
            "500.0%",
            "of the GPU's peak FLOP/s in a step (MFU)",
            "small, 4 x 512 tokens, fp32: 10.00 ms a step",
        ),
    ]
    assert [one.ratio for one in highlights(SAMPLES["fast_step"])] == [pytest.approx(1.5), pytest.approx(4.0), None]


def test_a_fast_step_that_is_slower_is_called_slower():
    plain, fast = (cell("fast_step", fast=parts, metrics=step(time)) for parts, time in (("off", 0.1), ("on", 0.2)))
    assert large_numbers(plain, fast)[0][:2] == (20, "2.0x slower")


def test_throughput_of_the_largest_model():
    assert large_numbers(SAMPLES["end_to_end"]) == [
        (50, "5,120 tokens/s", "2.7B, training step", "4 x 512 tokens a step, fp32"),
        (51, "400.00 ms", "2.7B, training step", "forward 30.00, backward 60.00, optimizer 10.00 ms"),
    ]
    fastest, _ = large_numbers(cell(metrics=step(0.05)), cell(attention="sdpa"))
    assert fastest[1] == "40,960 tokens/s"


def test_precision_and_compile_have_speed_ups():
    assert large_numbers(SAMPLES["precision"]) == [
        (60, "3.0x", "faster with bf16 than with fp32", "2.7B training step: 300.00 ms against 900.00 ms")
    ]
    assert large_numbers(SAMPLES["compile"])[0][:2] == (70, "1.11x")
    emulated = cell("precision", precision="bf16", metrics=step(1.0))
    assert large_numbers(cell("precision"), emulated)[0][1:3] == ("10x", "slower with bf16 than with fp32")


def test_the_largest_error_of_the_predictions():
    (found,) = large_numbers(SAMPLES["peak_memory"])
    assert found[:3] == (30, "5.0%", "largest error of 2 predicted peak memories")
    assert found[3] == "small, training step, SDPA: 9.50 GiB predicted, 10.00 GiB measured"
    exact = cell("peak_memory", metrics={"predicted_memory": (10 * GIB,)})
    assert large_numbers(exact)[0][1] == "<0.1%"


def test_the_first_step_without_warm_up():
    assert large_numbers(SAMPLES["warmup"]) == [
        (70, "9.0x", "first step without warm-up, against a steady one", "small: first 900.00 ms, steady 100.00 ms")
    ]


@pytest.mark.parametrize("experiment", ["end_to_end", "fast_step", "precision", "compile", "peak_memory", "warmup"])
def test_a_failed_cell_has_no_result(experiment):
    assert highlights(cell(experiment, status=OOM, metrics=dict.fromkeys(("step_time", "peak_memory")))) == []


def test_why_to_trust_the_numbers():
    assert trusted(SAMPLES["peak_memory"]) == "2 peak memories predicted within 5.0%"
    assert trusted(SAMPLES["timing_agreement"]) == "wall clock and Triton's do_bench differ by 1.0% at most for 2.7B"
    assert trusted(cell("end_to_end")) == "steps of one configuration vary by 2.0% of their mean"
    assert trusted(cell("bench")) is None


def test_every_experiment_has_a_heading():
    groups = {name: catalogue()[name].group for name in SAMPLES}
    assert {name for name, group in groups.items() if group == "speed"} == {
        *("end_to_end", "bench", "precision", "compile", "fast_step", "train_leaderboard", "published_models"),
        *("accelerate", "optimized_steps"),
    }
    assert set(groups.values()) == {"speed", "trust"}
