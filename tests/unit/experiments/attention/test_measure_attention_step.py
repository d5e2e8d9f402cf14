"""The instrument that interleaves attention implementations in a training step."""

from collections import Counter
from unittest import mock

import pytest
import torch

from cs336_systems import model as model_module
from cs336_systems.config import ModelConfig, RunConfig
from cs336_systems.experiments.attention import measure_attention as instrument
from cs336_systems.step.train_step import TrainStep
from tests.unit.experiments.attention.attention_cells import grid

SMALL = ModelConfig(vocab_size=32, context_length=16, d_model=16, num_layers=2, num_heads=2, d_ff=32)


@pytest.fixture
def used():
    """The implementations that the model called, in order."""
    asked: list[str] = []
    real = model_module.attention

    def attention(*tensors, impl, **fields):
        asked.append(impl)
        return real(*tensors, impl=impl, **fields)

    with mock.patch.object(model_module, "attention", attention):
        yield asked


def measure(names, rounds, **fields):
    config = {**RunConfig(model=SMALL, **fields).to_dict(), "implementations": names, "rounds": rounds}
    found = instrument.measure_attention_step(config)
    return {(metric.variant, metric.name): metric.samples for metric in found}


def test_implementations_are_interleaved_and_have_their_own_steps(used):
    names, rounds = ["flash_torch", "sdpa"], 4
    found = measure(names, rounds, batch_size=2)
    assert found.keys() == {(name, "step_time") for name in names}
    assert all(len(times) == rounds * instrument.STEPS_PER_ROUND and min(times) > 0 for times in found.values())
    calls = (1 + instrument.STEPS_PER_ROUND) * SMALL.num_layers
    assert Counter(used) == dict.fromkeys(names, (rounds + 1) * calls)
    assert used[2 * calls :: calls] == ["flash_torch", "sdpa", "sdpa", "flash_torch"] * 2


def test_a_failed_implementation_does_not_end_the_others():
    found = measure(["flash_hopper", "sdpa"], 1)
    assert found.keys() == {("flash_hopper", "status"), ("sdpa", "step_time")}
    assert found["flash_hopper", "status"][0].startswith("ValueError: impl='flash_hopper': ")


def test_an_sdpa_backend_is_forced_only_inside_its_context():
    model = TrainStep.build(RunConfig(model=SMALL)).model
    enabled = torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.flash_sdp_enabled

    def implementations():
        return {module.impl for module in model.modules() if isinstance(module, model_module.Attention)}

    before = [is_enabled() for is_enabled in enabled]
    with instrument.attention_set_to(model, "sdpa_flash"):
        assert [is_enabled() for is_enabled in enabled] == [False, True]
        assert implementations() == {"sdpa"}
    assert [is_enabled() for is_enabled in enabled] == before
    with instrument.attention_set_to(model, "flash_torch"):
        assert implementations() == {"flash_torch"}


@pytest.mark.gpu
def test_the_quick_grid_runs_on_a_gpu():
    (config,) = grid("attention_step", "quick")
    able = {m.variant for m in instrument.measure_attention_step(config) if m.name == "step_time"}
    assert able >= set(config["implementations"]) - {"flash_hopper"}
