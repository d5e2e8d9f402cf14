"""Findings of the attention experiments: their sentences, and that odd records cost sentences, not an exception."""

import re

import pytest

from cs336_systems.experiments.catalogue import catalogue
from cs336_systems.record import GIB
from cs336_systems.report.cells import CellView
from cs336_systems.report.sections import findings_of, tables_of
from tests.unit.experiments.attention.attention_cells import (
    OOM,
    flash_cell,
    leaderboard_cell,
    passes_cell,
    rivals_cell,
    step_cell,
)
from tests.unit.experiments.attention.test_attention_charts import NAMES, h200


def findings(*cells: CellView):
    return findings_of(catalogue()[cells[0].experiment], cells)


def numbers(text: str) -> list[str]:
    return sorted(re.findall(r"\d+(?:[.,]\d+)*", text))


def stated(*cells: CellView) -> list[str]:
    """The English; the Chinese must have the same numbers."""
    found = findings(*cells)
    for text in found:
        assert text.en.endswith(".")
        assert text.zh.endswith("。")
        assert numbers(text.en) == numbers(text.zh), text
    return [text.en for text in found]


def both_passes(milliseconds):
    """Forward takes a quarter of both."""
    return {"forward_backward_time": milliseconds / 1e3, "forward_time": milliseconds / 4e3}


def interleaved(size, **milliseconds):
    return rivals_cell(size, **{name: both_passes(value) for name, value in milliseconds.items()})


SAMPLES = {
    "pytorch_attention": [
        passes_cell("reference", 0.002, 0.006, peak=8 * GIB),
        passes_cell("compiled", 0.001, 0.006, peak=4 * GIB),
        passes_cell("reference", size=(8, 1, 4096, 64), status=OOM),
    ],
    "flash": [
        flash_cell("flash_triton", 1.0),
        flash_cell("sdpa_flash", 0.5),
        flash_cell("flash_triton", 2.0, (1, 1, 4096, 64), peak_memory=GIB),
        flash_cell("sdpa_flash", 3.0, (1, 1, 4096, 64)),
        flash_cell("reference", 20.0, (1, 1, 4096, 64), peak_memory=7 * GIB),
    ],
    "attention_rivals": [
        interleaved((1, 16, 4096, 64), flash_triton=2.0, sdpa_flash=3.0, sdpa_cudnn=1.8),
        interleaved((4, 12, 512, 64), flash_triton=0.2, sdpa_flash=0.1, sdpa_cudnn=0.4),
    ],
    "flash_leaderboard": [leaderboard_cell("flash_triton", 0.004), leaderboard_cell("sdpa_flash", 0.006)],
    "attention_step": [
        step_cell(flash_triton=[200] * 6, sdpa_flash=[300] * 6, sdpa_cudnn=[190, 190, 190, 190, 205, 205])
    ],
}
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


@pytest.mark.parametrize("experiment", NAMES)
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


@pytest.mark.parametrize("experiment", NAMES)
@pytest.mark.parametrize("value", [None, "words", -1, [], {"a": 1}], ids=repr)
def test_odd_configurations_raise_nothing(experiment, value):
    for one in SAMPLES[experiment]:
        odd = [{**one.config, name: value} for name in one.config]
        for config in (*odd, dict.fromkeys(one.config, value), {}):
            findings(CellView(experiment, config, one.metrics, variants=one.variants))


@pytest.mark.parametrize("experiment", NAMES)
def test_numbers_on_the_h200_are_those_of_the_tables(experiment):
    cells = [cell for cell in h200() if cell.experiment == experiment]
    shown = " ".join(
        str(text) for table in tables_of(catalogue()[experiment], cells) for row in table.rows for text in row
    )
    found = findings(*cells)
    assert 1 <= len(found) <= 3
    for text in found:
        assert numbers(text.en) == numbers(text.zh)
        assert all(number in shown for number in re.findall(r"([\d.,]+) (?:ms|GiB)\b", text.en)), text.en
