"""Instruments on number formats: sums in low precision, dtypes under autocast."""

import pytest

from cs336_systems.config import RunConfig
from cs336_systems.experiments.catalogue import cells
from cs336_systems.experiments.steps.measure_step import measure_accumulation, measure_dtypes


def test_an_fp16_accumulator_drifts_and_an_fp32_one_keeps_the_error_of_its_terms():
    grid = [config for _, config in cells(["accumulation"], "quick", RunConfig(device="cpu"))]
    sums = {(c["accumulator"], c["term"]): measure_accumulation(c)[0].samples[0] for c in grid}
    assert sums == {
        ("fp32", "fp32"): pytest.approx(10.0001, abs=1e-4),
        ("fp16", "fp16"): 9.953125,
        ("fp32", "fp16"): pytest.approx(10.0021, abs=1e-4),
        ("fp32", "fp16 cast to fp32"): pytest.approx(10.0021, abs=1e-4),
    }


@pytest.mark.parametrize(("model", "linear"), [("toy", "fc1"), ("transformer", "layers.0.ffn.w1")])
def test_matmuls_are_in_low_precision_and_weights_and_loss_in_float32(model, linear):
    metrics = measure_dtypes({"model": model, "autocast": "bf16", "device": "cpu"})
    found = {metric.variant: metric.samples[0] for metric in metrics}
    assert found[f"{linear} output"] == found["logits"] == "bfloat16"
    assert {found[name] for name in ("parameters", "loss", "gradients")} == {"float32"}
