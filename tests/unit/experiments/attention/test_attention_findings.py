"""Findings of the attention experiments: their sentences."""

import pytest

from tests.unit.experiments.attention.attention_cells import SAMPLES, flash_cell, records_of, step_cell
from tests.unit.report import step_cells

STATED = {
    "pytorch_attention": [
        "At 1024 tokens, d 64, forward takes 2.000 ms and backward 6.000; 1.50 GiB are held before backward.",
        "Compiled, forward is 2.0x and backward 1.00x as fast; its peak is 4.00 GiB against 8.00.",
        "1 of 3 do not fit in memory, the shortest of 4096 tokens.",
    ],
    "flash": [
        "bf16: flash_triton is the fastest of 3 in 1 of 2 shapes: from 4096 tokens on with d 64; at 4096 "
        "tokens its speed is 1.5x that of sdpa_flash, 10x that of reference.",
        "At 4096 tokens, d 64, bf16, it needs 1.00 GiB, naive attention 7.00.",
    ],
    "attention_rivals": [
        "flash_triton is ahead of the best rival in 0 of 2 shapes, forward and backward: 0.50 (4 x 12 x 512 x 64, "
        "sdpa_flash) to 0.90 (1 x 16 x 4096 x 64, sdpa_cudnn) times as fast.",
        "It is ahead of sdpa_flash in 1 of 2 (at best 1.5x), sdpa_cudnn in 1 of 2 (at best 2.0x).",
        "Forward alone is ahead of the best in 0 of 2: 0.50 to 0.90 times as fast.",
    ],
    "flash_leaderboard": ["flash_triton takes 4.000 ms; its speed is 1.5x that of sdpa_flash (6.000 ms)."],
    "attention_step": [
        "2.7B, context 4096: a step takes 200.00 ms with flash_triton; 300.00 with sdpa_flash (1.50x, ahead of it "
        "in 3 of 3 rounds), 190.00 with sdpa_cudnn (0.95x, ahead of it in 1 of 3 rounds)."
    ],
}


def stated(*cells):
    return step_cells.stated(records_of(cells))


@pytest.mark.parametrize("experiment", SAMPLES)
def test_findings(experiment):
    assert stated(*SAMPLES[experiment]) == STATED[experiment]


def test_without_a_gpu_flash_torch_is_ours():
    assert stated(flash_cell("flash_torch", 2.0), flash_cell("reference", 1.0), flash_cell("sdpa", 0.5))[0] == (
        "bf16: flash_torch is the fastest of 3 in 0 of 1 shapes; "
        "at 1024 tokens its speed is 0.25x that of sdpa, 0.50x that of reference."
    )


@pytest.mark.parametrize("rounds", [-1, 0, 4, 8])
def test_samples_that_do_not_fill_the_rounds_give_no_finding(rounds):
    assert stated(step_cell(flash_triton=[200] * 6, sdpa_flash=[300] * 6))
    assert not stated(step_cell(rounds, flash_triton=[200] * 6, sdpa_flash=[300] * 6))
