"""Tests of what `cs336 train` builds from its settings."""

import dataclasses

import pytest

from cs336_systems.config import ModelConfig, RunConfig, UserError
from cs336_systems.train import building
from cs336_systems.train.building import _repeatable_attention


def run_of(attention: str, head_dim: int, device: str = "cuda") -> RunConfig:
    model = ModelConfig(vocab_size=256, context_length=16, d_model=2 * head_dim, num_layers=1, num_heads=2, d_ff=64)
    return RunConfig(model=model, attention=attention, device=device, precision="bf16")


@pytest.mark.parametrize(
    ("attention", "head_dim", "device"),
    [("flash_hopper_repeatable", 64, "cuda"), ("flash_triton", 64, "cuda"), ("sdpa", 64, "cpu")],
)
def test_a_replay_keeps_attention_with_repeatable_gradients(attention, head_dim, device):
    assert _repeatable_attention(run_of(attention, head_dim, device), False) == attention


@pytest.mark.parametrize("head_dim", [64, 192])
def test_a_replay_takes_the_repeatable_hopper_kernels(head_dim):
    assert _repeatable_attention(run_of("flash_hopper", head_dim), False) == "flash_hopper_repeatable"


@pytest.mark.parametrize(
    ("best", "precision", "head_dim", "is_packed", "name"),
    [
        ("flash_hopper", "bf16", 128, False, "flash_hopper_repeatable"),
        ("flash_hopper", "bf16", 64, False, "flash_triton"),  # as fast
        ("flash_hopper", "bf16", 64, True, "flash_hopper_repeatable"),
        ("flash_triton", "bf16", 128, False, "flash_triton"),
        ("flash_hopper", "fp32", 128, False, "flash_triton"),  # the Hopper kernels take 16 bits
    ],
)
def test_a_replay_with_auto_takes_the_best_repeatable_kernels(monkeypatch, best, precision, head_dim, is_packed, name):
    monkeypatch.setattr(building, "triton_problem", lambda device: None)
    monkeypatch.setattr(building, "best_attention", lambda run: best)
    run = dataclasses.replace(run_of("auto", head_dim), precision=precision)
    assert _repeatable_attention(run, is_packed) == name


def test_a_replay_refuses_attention_whose_gradients_differ_from_run_to_run():
    with pytest.raises(UserError, match=r"--replay_every .* --attention sdpa .* use --attention auto"):
        _repeatable_attention(run_of("sdpa", 64), False)
