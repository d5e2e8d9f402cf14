"""A training step whose attention changes in turns: its grid, the switch, what is recorded, the table."""

from collections import Counter
from unittest import mock

import pytest
import torch

from cs336_systems import model as model_module
from cs336_systems.config import ModelConfig, RunConfig
from cs336_systems.experiments.attention import measure_attention_step as instrument
from cs336_systems.experiments.attention.measure_attention import IMPLEMENTATIONS
from cs336_systems.experiments.catalogue import cells
from cs336_systems.experiments.runner import Cell
from cs336_systems.record import CELL_TIME, Environment, Record
from cs336_systems.report.sections import tables
from cs336_systems.step.train_step import TrainStep

SMALL = ModelConfig(vocab_size=32, context_length=16, d_model=16, num_layers=2, num_heads=2, d_ff=32)
GPU = Environment(gpu="H200", tf32=False)


def grid(preset="course", device="cuda"):
    return [config for _, config in cells(["attention_step"], preset, RunConfig(device=device))]


def test_the_grid():
    course = [RunConfig.of(config) for config in grid()]
    assert [(run.size, run.model.context_length) for run in course][-1] == ("2.7B", 4096)
    assert {(run.precision, run.batch_size, run.mode) for run in course} == {("bf16", 1, "train-step")}
    for config in (*grid(), *grid("quick"), *grid("quick", "cpu")):
        assert set(config["implementations"]) <= IMPLEMENTATIONS.keys()
        assert config["rounds"] % len(config["implementations"]) == 0, "each comes after each other equally often"
    assert Cell("attention_step", grid()[-1]).name == "attention_step 2.7B 4096 train-step bf16"


@pytest.fixture
def used():
    """Which attention the model asked for, call by call."""
    asked: list[str] = []

    def attention(*tensors, impl, **fields):
        asked.append(impl)
        return real(*tensors, impl=impl, **fields)

    real = model_module.attention
    with mock.patch.object(model_module, "attention", attention):
        yield asked


def test_each_has_its_turns_and_its_own_steps(used):
    names, rounds = ["flash_torch", "sdpa"], 4
    config = {**RunConfig(model=SMALL, batch_size=2).to_dict(), "implementations": names, "rounds": rounds}
    found = {metric: samples for metric, _, samples in instrument.measure_attention_step(config)}
    assert found.keys() == {"flash_torch_step_time", "sdpa_step_time"}
    steps = 1 + instrument.STEPS
    for name in names:
        assert len(found[f"{name}_step_time"]) == rounds * instrument.STEPS
        assert min(found[f"{name}_step_time"]) > 0
    assert Counter(used) == dict.fromkeys(names, (rounds + 1) * steps * SMALL.num_layers)
    turns = used[2 * steps * SMALL.num_layers :: steps * SMALL.num_layers]
    assert turns == ["flash_torch", "sdpa", "sdpa", "flash_torch"] * 2


def test_what_one_cannot_do_does_not_end_the_others():
    config = {**RunConfig(model=SMALL).to_dict(), "implementations": ["flash_hopper", "sdpa"], "rounds": 1}
    found = {metric: samples for metric, _, samples in instrument.measure_attention_step(config)}
    assert found.keys() == {"flash_hopper_status", "sdpa_step_time"}
    assert found["flash_hopper_status"][0].startswith("ValueError: impl='flash_hopper': ")


def test_a_backend_of_sdpa_is_held_to_while_it_has_its_turn():
    model = TrainStep.build(RunConfig(model=SMALL)).model
    enabled = torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.flash_sdp_enabled
    before = [f() for f in enabled]
    with instrument.attending(model, "sdpa_flash"):
        assert [f() for f in enabled] == [False, True]
        assert {m.impl for m in model.modules() if isinstance(m, model_module.Attention)} == {"sdpa"}
    assert [f() for f in enabled] == before
    with instrument.attending(model, "flash_torch"):
        assert {m.impl for m in model.modules() if isinstance(m, model_module.Attention)} == {"flash_torch"}


def records(**metrics):
    config = grid()[-1]
    metrics = {**metrics, CELL_TIME: (1.0,)}
    return [
        Record("attention_step", config, name, "" if name.endswith("status") else "s", samples, "ok", GPU)
        for name, samples in metrics.items()
    ]


def test_the_table_says_who_leads_and_by_how_much_times_vary():
    (table,) = tables(
        records(
            flash_hopper_step_time=(0.230, 0.240, 0.235),
            flash_triton_step_time=(0.25, 0.25, 0.25),
            sdpa_cudnn_step_time=(0.240, 0.250, 0.245),
            sdpa_flash_status=("RuntimeError: no kernel",),
        )
    )
    headings = [column.heading for column in table.columns]
    row = dict(zip(headings, table.rows[0], strict=True))
    assert row == {
        "size": "2.7B",
        "context": "4096",
        "flash_hopper": "235.00 *",
        "flash_triton": "250.00",
        "sdpa_flash": "error",
        "sdpa_cudnn": "245.00",
        "best rival / ours": "1.04x",
    }
    notes = "\n".join(table.notes)
    assert "flash_hopper 230.00 - 240.00, flash_triton 250.00 - 250.00, sdpa_cudnn 240.00 - 250.00" in notes
    assert "sdpa_flash: RuntimeError: no kernel" in notes


@pytest.mark.gpu
def test_all_of_the_quick_grid_on_a_gpu():
    (config,) = grid("quick")
    found = {metric: samples for metric, _, samples in instrument.measure_attention_step(config)}
    able = {name.removesuffix("_step_time") for name in found if name.endswith("_step_time")}
    assert able >= set(config["implementations"]) - {"flash_hopper"}
