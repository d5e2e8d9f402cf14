"""The experiments of FP8: their grids, tables and findings from hand-made records, and the instrument on a CPU."""

import re
import time
from unittest import mock

import pytest

from cs336_systems.config import RunConfig, model_config
from cs336_systems.experiments.steps import fp8_steps
from cs336_systems.experiments.steps.fast_steps import LLAMA
from cs336_systems.experiments.steps.fp8_steps import FP8_LOSSES, FP8_STEP, TORCHAO
from tests.unit.experiments.steps.samples import LOSSES, falling, fp8_losses
from tests.unit.report.step_cells import entries, notes, rows, stated, tables

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
    assert "is 0.0100 above that of bf16" in text
    assert "differ by 0.0200" in text
    lower = [
        record
        for seed, loss in enumerate((1.5, 1.6))
        for precision, less in (("bf16", 0.0), ("fp8", 0.02))
        for record in fp8_losses(precision, seed, falling(loss - less))
    ]
    assert "is 0.0200 below that of bf16" in stated(lower)[0]
    (table,) = tables(LOSSES)
    assert rows(table, "precision", "seed", "held-out loss", "least cosine at the end")[-1] == (
        *("fp8", "2", "1.5600", "0.99500"),
    )


def reached(records):
    """The sentences on the time to an equal loss."""
    return [sentence for sentence in re.split(r"(?<=\.) ", " ".join(stated(records))) if " loss of bf16" in sentence]


def test_fp8_reaches_the_loss_of_bf16_after_more_but_shorter_steps():
    """Means of ten steps; that of bf16 after nine tenths of its 91 is reached at step 91, and 5 steps later in FP8."""
    late = (5.5,) * 5 + falling(1.5)[:-5]
    records = [*fp8_losses("bf16", 0, falling(1.5), seconds=0.4), *fp8_losses("fp8", 0, late, seconds=0.3)]
    share = 100 * (96 * 0.3) / (91 * 0.4)
    assert reached(records) == [f"Small in FP8 reaches the loss of bf16 in {share:.0f}% of its time."]


def test_times_of_seeds_are_added():
    late = (5.5,) * 5 + falling(1.5)[:-5]
    records = [record for seed in (0, 1) for record in fp8_losses("bf16", seed, falling(1.5), seconds=0.4)]
    records += [*fp8_losses("fp8", 0, late, seconds=0.3), *fp8_losses("fp8", 1, falling(1.5), seconds=0.1)]
    share = 100 * (96 * 0.3 + 91 * 0.1) / (2 * 91 * 0.4)
    assert reached(records) == [f"Small in FP8 reaches the loss of bf16 in {share:.0f}% of its time."]


def test_fp8_that_never_reaches_the_loss_of_bf16():
    """One seed that does not reach it decides."""
    records = [record for seed in (0, 1) for record in fp8_losses("bf16", seed, falling(1.5))]
    records += [*fp8_losses("fp8", 0, falling(1.4)), *fp8_losses("fp8", 1, falling(2.5))]
    assert reached(records) == ["Small in FP8 does not reach the loss of bf16."]


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_one_precision_alone_reaches_no_equal_loss(precision):
    assert reached(fp8_losses(precision, 0, falling(1.5))) == []


def test_a_seed_of_one_precision_does_not_count():
    records = [*fp8_losses("bf16", 0, falling(1.5)), *fp8_losses("fp8", 0, falling(1.5), seconds=0.2)]
    more = [*fp8_losses("bf16", 1, falling(1.5), seconds=9.0), *fp8_losses("fp8", 2, falling(5.0), seconds=9.0)]
    assert (
        reached([*records, *more]) == reached(records) == ["Small in FP8 reaches the loss of bf16 in 50% of its time."]
    )


def test_records_without_times_of_steps_say_nothing_on_it():
    records = [*fp8_losses("bf16", 0, falling(1.5), seconds=None), *fp8_losses("fp8", 0, falling(1.5), seconds=None)]
    assert reached(records) == []
    (table,) = tables(records)
    assert {row for (row,) in rows(table, "a step (ms)")} == {""}


def test_the_table_of_losses_has_the_time_of_a_step():
    (table,) = tables(LOSSES)
    assert rows(table, "precision", "a step (ms)")[-1] == ("fp8", "300.00")
    assert any("final loss: mean of the last tenth" in note for note in notes(table))


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
        begin = time.perf_counter()
        metrics = {metric.name: metric.samples for metric in measure_losses(config)}
        took = time.perf_counter() - begin
        found[config["precision"]] = metrics
        assert len(metrics["loss"]) == 6
        (train_time,) = metrics["train_time"]
        assert 0 < 3 * train_time < took, "the median of six steps; three of them take at least as long"
        assert metrics["loss"][-1] < metrics["loss"][0]
        assert len(metrics["cosine_start"]) == len(metrics["cosine_end"]) == 2
    assert min(found["fp8"]["cosine_start"]) > 0.98
    assert min(found["bf16"]["cosine_start"]) > 0.999
    assert found["fp8"]["loss"] == pytest.approx(found["bf16"]["loss"], abs=0.05)
    assert 0 <= found["fp8"]["lost_share"][0] < 0.5
