"""Findings of the experiments on the time of a step."""

import pytest

from cs336_systems.experiments.steps.fast_steps import LLAMA
from tests.unit.experiments.steps.samples import SAMPLES
from tests.unit.report.step_cells import OOM, cell, stated, step

STATED = {
    "bench": [
        "A step of small 512 train-step fp32 takes 100.00 ms: 20,480 tokens/s; backward takes 2.0 times forward.",
        "MFU: 50.0% (small).",
        "The predicted peak is off by 1.00%: 10.10 GiB, measured 10.00.",
    ],
    "end_to_end": [
        "2.7B's training step takes 400.00 ms, 4.0 times small's (100.00 ms); backward takes 2.0 times forward.",
        "MFU: 12.5% (2.7B) to 50.0% (small).",
        "The worst of 2 predicted peaks is off by 1.00% (small: 10.10 GiB, measured 10.00).",
    ],
    "warmup": [
        "Without warm-up the first step takes, against a steady one, 9.0 times as long for small (900.00 against "
        "100.00 ms).",
        "It puts the mean of small off by 267%: 366.67 ms, after 5 warm-up steps 100.00 ms.",
        "Of 2 runs 2 settle, the last from step 2 on (small warm-up 0).",
    ],
    "precision": ["bf16 speeds up 2.7B 3.0x, small 1.2x, with 0.90 to 1.00 times the memory of fp32."],
    "compile": [
        "torch.compile speeds up small 1.11x, with 1.00 times the memory of eager.",
        "Compiling takes up to 20.0 s (small); for small 2,000 steps earn it back.",
    ],
    "fast_step": [
        "All parts together take 10.00 ms for small, 4.0x faster than the compiled Llama of transformers (40.00 ms), "
        "with 5.00 GiB against 10.00.",
        "For larger work it is 1.5x for 2.7B 4 x 512 (200.00 ms).",
        "Of small with one part left out, a step takes: graph 50.00 ms, kernels 20.00 ms.",
    ],
    "peak_memory": [
        "The worst of 2 predicted peaks is off by 5.00% (small sdpa: 9.50 GiB, measured 10.00).",
        "Those with fused attention or checkpointing (1) are off by 5.00% at most, the plain ones (1) by 1.00%.",
    ],
    "timing_agreement": ["The clock and do_bench differ by 25.00% at most (small step); for 2.7B by 1.01%."],
    "accumulation": [
        "0.01 added 1000 times, the worst first: fp16 += fp16 gives 9.9531 (-0.469%), fp32 += fp16 gives 10.0020 "
        "(+0.020%).",
    ],
    "autocast_dtypes": ["Under autocast to fp16/bf16, 1 of 2 tensors of the toy model are float32: loss."],
}


@pytest.mark.parametrize("experiment", SAMPLES)
def test_findings(experiment):
    assert stated(SAMPLES[experiment]) == STATED[experiment]


def test_a_failed_cell_costs_its_sentences_only():
    alone = stated(cell("end_to_end"))
    assert stated(cell("end_to_end"), cell("end_to_end", size="2.7B", status=OOM)) == alone
    assert stated(cell("end_to_end", status=OOM)) == []


def test_contexts_are_named_where_they_differ():
    grid = [cell("end_to_end", size=size, context=context) for size in ("small", "2.7B") for context in (128, 512)]
    assert stated(*grid)[0].startswith("2.7B context 512's training step takes 100.00 ms, 1.00 times small context 512")


def test_the_fastest_is_named_where_only_settings_differ():
    said = stated(cell("bench"), cell("bench", attention="sdpa", metrics=step(0.05)))[0]
    fastest = "Of 2 configurations small sdpa is the fastest with 50.00 ms a step, 2.0 times as fast as small reference"
    assert said.startswith(fastest)


def test_without_another_model_the_plain_step_is_the_rival():
    plain, fast = (cell("fast_step", fast=fast, metrics=step(time)) for fast, time in (("off", 0.1), ("on", 0.05)))
    assert stated(plain, fast)[0].startswith("All parts together take 50.00 ms for small, 2.0x faster than the plain")
    own = cell("fast_step", model_factory="mine:build", metrics=step(0.2))
    assert "4.0x faster than mine:build (200.00 ms)" in stated(plain, own, fast)[0]
    eager = cell("fast_step", model_factory=LLAMA, metrics=step(0.2))
    assert "than llama:build" in stated(plain, eager, fast)[0]
