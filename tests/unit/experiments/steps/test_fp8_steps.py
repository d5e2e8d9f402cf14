"""The experiments of FP8: their grids, tables and findings from hand-made records, and the instrument on a CPU."""

from unittest import mock

import pytest

from cs336_systems.config import RunConfig, model_config
from cs336_systems.experiments.steps import fp8_steps
from cs336_systems.experiments.steps.fast_steps import LLAMA
from cs336_systems.experiments.steps.fp8_steps import FP8_LOSSES, FP8_STEP, TORCHAO
from tests.unit.report.step_cells import entries, rows, stated, tables

MODEL = model_config("2.7B", context_length=2048, vocab_size=32_000)


def fp8_run(precision, seconds, **fields):
    run = RunConfig(
        model=MODEL, size="2.7B", batch_size=4, precision=precision, attention="auto", device="cuda", fast="on"
    )
    rate = {"flops": (200e12,), "peak_flops": (1979e12 if precision == "fp8" else 989.4e12,)}
    return entries("fp8_step", run.to_dict() | fields, {"step_time": (seconds, seconds), **rate})


STEPS = [
    *fp8_run("bf16", 0.32),
    *fp8_run("fp8", 0.24),
    *fp8_run("bf16", 0.42, fast="off", compile=True, model_factory=LLAMA),
    *fp8_run("bf16", 0.36, fast="off", compile=True, model_factory=TORCHAO[1]),
]


def losses(precision, seed, final, cosine=0.995):
    run = RunConfig(
        model=model_config("small", vocab_size=256), size="small", batch_size=16, precision=precision, fast="on",
        attention="auto", device="cuda", seed=seed,
    )  # fmt: skip
    curve = tuple(5.5 - (5.5 - final) * number / 99 for number in range(100))
    metrics = {"loss": curve, "held_out_loss": (final,), "skipped_steps": (0.0,)}
    metrics |= {f"cosine_{when}": (0.999, cosine) for when in ("start", "end")}
    return entries("fp8_losses", {**run.to_dict(), "steps": 100, "learning_rate": 1e-3}, metrics)


LOSSES = [
    *(record for seed, final in enumerate((1.50, 1.52, 1.54)) for record in losses("bf16", seed, final, 0.99999)),
    *(record for seed, final in enumerate((1.51, 1.52, 1.56)) for record in losses("fp8", seed, final)),
]


def test_steps_are_compared_with_bf16_and_with_both_peaks():
    (table,) = tables(STEPS)
    headings = ("step by", "step (ms)", "speed-up", "of the FP8 peak", "of the bf16 peak")
    assert rows(table, *headings) == [
        ("ours, bf16", "320.00", "1.00x", "31.6%", "63.2%"),
        ("compiled Llama", "420.00", "0.76x", "24.1%", "48.1%"),
        ("torchao rowwise, compiled", "360.00", "0.89x", "28.1%", "56.2%"),
        ("ours, fp8", "240.00", "1.33x", "42.1%", "84.2%"),
    ]


def test_the_finding_names_bf16_and_the_fastest_rival():
    text = " ".join(stated(STEPS))
    assert "takes 240.00 ms: 1.3 times as fast as bf16 (320.00 ms)" in text
    assert "1.5 times as fast as torchao rowwise, compiled (360.00 ms)" in text


def test_losses_are_compared_with_the_spread_of_seeds():
    text = " ".join(stated(LOSSES))
    assert "+0.0100" in text
    assert "0.0200" in text
    (table,) = tables(LOSSES)
    assert rows(table, "precision", "seed", "held-out loss", "least cosine at the end")[-1] == (
        *("fp8", "2", "1.5600", "0.99500"),
    )


@pytest.mark.parametrize("preset", ["quick", "course"])
def test_rivals_are_measured_where_they_are_installed(preset):
    base = RunConfig(device="cuda")
    with mock.patch.object(fp8_steps.importlib.util, "find_spec", return_value=True):
        grid = list(FP8_STEP.grid(preset, base))
    factories = {config["model_factory"] for config in grid}
    assert factories == ({None} if preset == "quick" else {None, LLAMA, *TORCHAO})
    for config in grid:
        if config["precision"] == "fp8":
            RunConfig.of(config)  # is valid


def test_the_instrument_trains_and_compares_gradients():
    from cs336_systems.experiments.steps.measure_fp8 import measure_losses

    configs = [config for config in FP8_LOSSES.grid("quick", RunConfig(device="cpu")) if config["seed"] == 0]
    small = {"num_layers": 2, "d_model": 64, "d_ff": 96, "context_length": 32}
    found = {}
    for config in configs:
        config = {**config, "size": "", "model": {**config["model"], **small}, "steps": 6, "batch_size": 2}
        metrics = {metric.name: metric.samples for metric in measure_losses(config)}
        found[config["precision"]] = metrics
        assert len(metrics["loss"]) == 6
        assert metrics["loss"][-1] < metrics["loss"][0]
        assert len(metrics["cosine_start"]) == len(metrics["cosine_end"]) == 2
    assert min(found["fp8"]["cosine_start"]) > 0.98
    assert min(found["bf16"]["cosine_start"]) > 0.999
    assert found["fp8"]["loss"] == pytest.approx(found["bf16"]["loss"], abs=0.05)
    assert 0 <= found["fp8"]["lost_share"][0] < 0.5
