"""The 2026 leaderboard's job: its grid, its instrument on a small model, its table and chart."""

import dataclasses
import os

import pytest

from cs336_systems.config import ModelConfig, RunConfig
from cs336_systems.experiments.catalogue import catalogue
from cs336_systems.experiments.steps.leaderboard_step import BOARD, BOARD_GPUS, SEQUENCES
from cs336_systems.experiments.steps.measure_step import empty_compile_caches, measure_leaderboard_step
from cs336_systems.predict.flops import causal_model_flops, model_flops
from tests.unit.experiments.steps.samples import SAMPLES, board
from tests.unit.report.step_cells import OOM, charts, highlights, rows, tables, values

EXPERIMENT = catalogue()["train_leaderboard"]


def grid(preset, device):
    return list(EXPERIMENT.grid(preset, RunConfig(device=device)))


def test_the_grid_is_the_boards_job_in_both_optimizer_states():
    cells = grid("course", "cuda")
    assert BOARD.parameters == 8_125_698_048
    assert [(cell["micro_batches"], cell.get("optimizer_state", "fp32")) for cell in cells] == [
        *((1, "fp32"), (2, "fp32")),
        *((1, "bf16"), (2, "bf16")),
    ]
    for cell in cells:
        run = RunConfig.of(cell)
        assert (run.model, run.precision, run.memory_budget) == (BOARD, "bf16", "auto")
        assert run.batch_size * cell["micro_batches"] == SEQUENCES
        assert (cell["warmup_ms"], cell["rep_ms"]) == (10_000, 30_000)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_quick_grid_is_small(device):
    for cell in grid("quick", device):
        run = RunConfig.of(cell)
        assert run.model.parameters < 2e6
        assert bool(run.memory_budget) == (device == "cuda")


def test_a_gpu_that_cannot_hold_the_state_is_known_before_the_run():
    needs = [EXPERIMENT.instrument.memory(cell).predicted for cell in grid("course", "cuda")]
    fp32, bf16 = needs[:2], needs[2:]
    assert min(fp32) > 12 * BOARD.parameters
    assert max(bf16) < 9 * BOARD.parameters
    assert all(EXPERIMENT.instrument.memory(cell).at_least for cell in grid("course", "cuda"))


SMALL = ModelConfig(vocab_size=61, context_length=16, d_model=32, num_layers=2, num_heads=2, d_ff=64)


def measured(micro_batches):
    run = RunConfig(
        model=SMALL,
        batch_size=2 // micro_batches,
        attention="auto",
        fast="kernels,loss,optimizer",
        update_in_backward=micro_batches == 1,
        checkpoint_blocks=1,
    )
    config = {**run.to_dict(), "micro_batches": micro_batches, "warmup_ms": 1, "rep_ms": 1}
    return run, {metric.name: metric.samples for metric in measure_leaderboard_step(config)}


def test_one_and_two_micro_batches_are_the_same_step():
    (run, one), (_, two) = measured(1), measured(2)
    for name in ("flops", "causal_flops"):
        assert one[name] == two[name]
    assert one["flops"] == [model_flops(run)]
    for name in ("first_loss", "last_loss"):
        assert one[name] == pytest.approx(two[name], rel=1e-3)
    assert one["last_loss"] < one["first_loss"]
    for found in (one, two):
        assert found["predicted_memory"] == pytest.approx(found["peak_memory"], rel=0.02)
        assert min(*found["step_time"], *found["cold_start_time"]) > 0


def test_compile_caches_are_empty_and_put_back(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "before")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with empty_compile_caches():
        folders = [os.environ[name] for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")]
        assert not any(map(os.path.exists, folders))
        assert len({os.path.dirname(folder) for folder in folders}) == 1
    assert os.environ["TRITON_CACHE_DIR"] == "before"
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_masked_scores_are_no_work():
    """4.74 PFLOP, where 2.95 are matmuls."""
    run = RunConfig(model=BOARD, batch_size=SEQUENCES)
    assert causal_model_flops(run) == pytest.approx(4.74e15, rel=2e-3)
    matmuls = 6 * run.tokens * BOARD.linear_parameters
    assert causal_model_flops(run) - matmuls == pytest.approx((model_flops(run) - matmuls) / 2)
    forward = dataclasses.replace(run, mode="forward")
    assert 3 * causal_model_flops(forward) == causal_model_flops(run)


def test_table():
    (table,) = tables(SAMPLES["train_leaderboard"], board("bf16", 1, 0.0, status=OOM))
    names = ["fp32 masters"] * 2 + ["bf16 state (as on the board)"] * 2
    assert [row[0].en for row in table.rows] == names
    assert rows(table, "micro batches", "step (ms)", "causal MFU", "error") == [
        ("1", "8,500.0", "56.4%", "+0.10%"),
        ("2", "9,000.0", "53.3%", "+0.10%"),
        ("1", "OOM", "", ""),
        ("2", "8,000.0", "59.9%", "+0.10%"),
    ]


def test_chart_has_the_boards_entries_as_lines():
    (chart,) = charts(SAMPLES["train_leaderboard"])
    assert values(chart.series[0]) == {
        "fp32 masters, 1 micro batch": 8500.0,
        "fp32 masters, 2 micro batches": 9000.0,
        "bf16 state (as on the board), 2 micro batches": 8000.0,
    }
    assert [line.value for line in chart.limits] == [10_000.0, 3837.0]
    assert all(line.dashed and "B200" in line.text.en for line in chart.limits)
    assert BOARD_GPUS == 2


def test_the_first_screen_has_the_fastest_step():
    (found,) = highlights(SAMPLES["train_leaderboard"])
    assert found.value.en == "8.00 s"
