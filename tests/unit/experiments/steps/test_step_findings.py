"""Findings of the experiments on the time of a step."""

import pytest

from cs336_systems.experiments.steps.fast_steps import LLAMA
from tests.unit.experiments.steps.samples import SAMPLES
from tests.unit.report.step_cells import OOM, cell, stated, step

STATED = {
    "bench": [
        "A training step takes 100.00 ms, 20,480 tokens/s (small, context 512, fp32). Backward takes 2.0 times as "
        "long as forward.",
        "MFU is 50.0% (small).",
        "The predicted peak is off by 1.00%: 10.10 GiB predicted, 10.00 GiB measured.",
    ],
    "end_to_end": [
        "A training step of 2.7B takes 400.00 ms: 4.0 times as long as that of small (100.00 ms). Backward takes 2.0 "
        "times as long as forward.",
        "MFU is 12.5% (2.7B) to 50.0% (small).",
        "The worst of 2 predicted peaks is off by 1.00%: 10.10 GiB predicted, 10.00 GiB measured (small).",
    ],
    "warmup": [
        "Without warm-up the first step takes 9.0 times as long as a steady one (small). It takes 900.00 ms, a steady"
        " one 100.00 ms.",
        "It raises the mean of small by 267%, from 100.00 ms to 366.67 ms.",
        "All 2 runs settle, the last from step 2 on (small, 0 warm-up steps).",
    ],
    "precision": [
        "bf16 is 1.2 (small) to 3.0 (2.7B) times as fast as fp32. Its peak memory is 0.90 to 1.00 times that of fp32.",
    ],
    "compile": [
        "A compiled step is 1.11 times as fast as an eager one (small). Its peak memory is that of an eager one, "
        "within 2%.",
        "Compiling takes up to 20.0 s (small). For small it pays off after 2,000 steps.",
    ],
    "fast_step": [
        "The fast step of small takes 10.00 ms: 4.0 times as fast as the compiled Llama of transformers (40.00 ms). "
        "Its peak memory is 5.00 GiB against 10.00 GiB.",
        "For larger work the fast step is 1.5 times as fast as the plain step (2.7B, 4 x 512 tokens).",
        "Without the CUDA graph a step of small takes 50.00 ms, without the fused kernels 20.00 ms.",
    ],
    "accelerate": [
        "Accelerated, a step of 2.7B, 4 x 2048 tokens takes 331.65 ms. It is 1.2 times as fast as Liger; it is 1.3 "
        "times as fast as torch.compile; it is 1.4 times as fast as transformers.",
        "Its peak memory is 48.00 GiB (Liger 52.00 GiB, torch.compile 56.00 GiB, transformers 60.00 GiB).",
        "With the packed optimizer a step takes 329.64 ms, as fast as with torch's AdamW, within 2%. Its peak memory "
        "is 0.92 times that of the step with torch's AdamW.",
    ],
    "published_models": [
        "qwen2.5/0.5B trains at 154.2 thousand tokens/s (LLMQ 149.0). qwen2.5/7B trains at 14.7 thousand tokens/s "
        "(LLMQ 14.0).",
        "With fp32 masters a step of qwen2.5/0.5B takes 0.6% more.",
        "The worst of 3 predicted step times is off by 2.9%: 3,300.0 ms predicted, 3,400.0 ms measured (qwen2.5/0.5B, "
        "batch 64, vocabulary 151936, bf16 state). Matmuls are the largest part of its predicted time.",
    ],
    "optimized_steps": [
        "The choice by prediction is 0.5% slower than the fastest of 8 ways, the fastest of its best three 0.0%. "
        "Within 8 GiB the choice by prediction is 0.0% slower than the fastest of 5 ways, the fastest of its best "
        "three 0.0%.",
        "Measuring all 8 ways takes 72 s of the GPU, the best three 27 s.",
        "The median error of 8 predicted times is 1.9%, the largest 2.4%.",
    ],
    "train_leaderboard": [
        "With fp32 masters a step takes 8,500.0 ms (1 micro batch), a causal MFU of 56.4%. With bf16 state (as on the "
        "board) a step takes 8,000.0 ms (2 micro batches), a causal MFU of 59.9%.",
        "The board's best entry takes 3,837.0 ms on two B200 GPUs, 27.5% of their dense peak; this GPU reaches 59.9% "
        "of its own.",
        "From empty compile caches the first step ends after 60.0 s, the longest run after 9.0 s; the board allows "
        "600 s.",
    ],
    "fp8_losses": [
        "The held-out loss of small in FP8 is 0.0100 above that of bf16, and seeds of bf16 differ by 0.0200 (standard "
        "deviation).",
        "Small in FP8 reaches the loss of bf16 in 76% of its time.",
    ],
    "unseen_steps": [
        "Random fast steps (3): median error 2.0%, 95% within 5.0%.",
        "Random eager and compiled steps (1): median error 5.0%, 95% within 5.0%. Random launch-bound steps (1): "
        "median error 20.0%, 95% within 20.0%.",
        "The largest error of fast steps is that of 287M, 117 x 384 tokens: predicted 5.0% too long. Most of the "
        "difference is in matmuls.",
    ],
    "peak_memory": [
        "The worst of 2 predicted peaks is off by 5.00%: 9.50 GiB predicted, 10.00 GiB measured (small, SDPA).",
        "Peaks with fused attention or recomputation (1) are off by 5.00% at most, the others (1) by 1.00%.",
    ],
    "timing_agreement": [
        "The wall clock and Triton's timer differ by 25.00% at most (small, step). For 2.7B they differ by 1.01% at "
        "most.",
    ],
    "accumulation": [
        "0.01 added 1000 times: fp16 terms in an fp16 accumulator give 9.9531, 0.469% too low. fp16 terms in an fp32 "
        "accumulator give 10.0020, 0.020% too high.",
    ],
    "autocast_dtypes": [
        "Under autocast to fp16 and bf16, 1 of 2 tensors of the toy model are float32: loss.",
    ],
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
    assert stated(*grid)[0].startswith(
        "A training step of 2.7B, context 512 takes 100.00 ms: as fast as that of small, "
    )


def test_the_fastest_is_named_where_only_settings_differ():
    said = stated(cell("bench"), cell("bench", attention="sdpa", metrics=step(0.05)))[0]
    fastest = (
        "The fastest of 2 configurations takes 50.00 ms a step (small, SDPA). It is 2.0 times as fast as the slowest"
    )
    assert said.startswith(fastest)


def test_without_another_model_the_plain_step_is_the_rival():
    plain, fast = (cell("fast_step", fast=fast, metrics=step(time)) for fast, time in (("off", 0.1), ("on", 0.05)))
    assert "2.0 times as fast as the plain step (100.00 ms)" in stated(plain, fast)[0]
    own = cell("fast_step", model_factory="mine:build", metrics=step(0.2))
    assert "4.0 times as fast as the other eager model (200.00 ms)" in stated(plain, own, fast)[0]
    eager = cell("fast_step", model_factory=LLAMA, metrics=step(0.2))
    assert "as the eager Llama of transformers" in stated(plain, eager, fast)[0]
