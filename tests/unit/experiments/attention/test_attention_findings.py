"""Findings of the attention experiments: their sentences."""

import pytest

from tests.unit.experiments.attention.attention_cells import SAMPLES, flash_cell, records_of, step_cell
from tests.unit.report import step_cells

STATED = {
    "pytorch_attention": [
        "At 1024 tokens, head dim 64, forward of naive attention takes 2.000 ms and backward 6.000 ms. Before "
        "backward it holds 1.50 GiB.",
        "Compiled forward is 2.0 times as fast as eager forward. Compiled backward is as fast as eager backward, "
        "within 2%. Peak memory is 4.00 GiB, eager 8.00 GiB.",
        "1 of 3 cells ran out of memory, the shortest at 4096 tokens.",
    ],
    "flash": [
        "In bf16, our portable kernel is the fastest of 3 implementations in 1 of 2 shapes: at every head dim from "
        "4096 tokens on. At 4096 tokens it is 1.5 times as fast as FlashAttention-2 in SDPA (head dim 64).",
        "At 4096 tokens, head dim 64, our portable kernel needs 1.00 GiB, naive attention 7.00 GiB.",
    ],
    "attention_rivals": [
        "In forward and backward, our attention is faster than the fastest rival in 0 of 2 shapes. It takes 1.11 (1 x"
        " 4k, d 64, causal) to 2.0 (4 x 512, d 64, causal) times as long as the fastest rival.",
        "It is faster than FlashAttention-2 in SDPA in 1 of 2 shapes, than cuDNN in 1 of 2 shapes.",
        "Forward alone takes 1.11 (1 x 4k, d 64, causal) to 2.0 (4 x 512, d 64, causal) times as long as the fastest "
        "rival.",
    ],
    "attention_varlen": [
        "Our attention inside packed documents is 1.2 (short documents, d 64) to 2.0 (documents around 1k, d 64) times "
        "as fast as the fastest rival. Forward alone is 1.2 (short documents, d 64) to 2.0 (documents around 1k, d 64) "
        "times as fast as the fastest rival.",
        "Packing is 6.0 (documents around 1k, d 64) to 8.0 (short documents, d 64) times as fast as padding to the "
        "longest document.",
        "Our Hopper kernel is at best 1.6 times as fast as our portable kernel (documents around 1k, d 64), and at "
        "worst takes 1.6 times as long (short documents, d 64).",
    ],
    "flash_leaderboard": [
        "Our portable kernel takes 4.000 ms: 1.5 times as fast as FlashAttention-2 in SDPA (6.000 ms).",
    ],
    "attention_step": [
        "With our portable kernel, a training step takes 200.00 ms (2.7B, context 4096). It is 1.5 times as fast as "
        "with FlashAttention-2 in SDPA (faster in 3 of 3 rounds). It takes 1.05 times as long as with cuDNN (slower "
        "in 2 of 3 rounds).",
    ],
}


def stated(*cells):
    return step_cells.stated(records_of(cells))


@pytest.mark.parametrize("experiment", SAMPLES)
def test_findings(experiment):
    assert stated(*SAMPLES[experiment]) == STATED[experiment]


def test_without_a_gpu_flash_torch_is_ours():
    assert stated(flash_cell("flash_torch", 2.0), flash_cell("reference", 1.0), flash_cell("sdpa", 0.5))[0] == (
        "In bf16, our attention in PyTorch is the fastest of 3 implementations in none of 1 shapes. "
        "At 1024 tokens it takes 4.0 times as long as SDPA (head dim 64)."
    )


@pytest.mark.parametrize("rounds", [-1, 0, 4, 8])
def test_samples_that_do_not_fill_the_rounds_give_no_finding(rounds):
    assert stated(step_cell(flash_triton=[200] * 6, sdpa_flash=[300] * 6))
    assert not stated(step_cell(rounds, flash_triton=[200] * 6, sdpa_flash=[300] * 6))
