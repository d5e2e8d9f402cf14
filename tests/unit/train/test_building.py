"""Tests of what `cs336 train` builds from its settings."""

import dataclasses

import pytest
import torch

from cs336_systems import model
from cs336_systems.config import ModelConfig, RunConfig, UserError
from cs336_systems.flags import build
from cs336_systems.parallel.launch import process_group
from cs336_systems.train import building
from cs336_systems.train.building import _repeatable_attention, build_step
from cs336_systems.train.settings import TrainSettings


def run_of(attention: str, head_dim: int, device: str = "cuda") -> RunConfig:
    model = ModelConfig(vocab_size=256, context_length=16, d_model=2 * head_dim, num_layers=1, num_heads=2, d_ff=64)
    return RunConfig(model=model, attention=attention, device=device, precision="bf16")


@pytest.mark.parametrize(
    ("attention", "head_dim", "device"),
    [("flash_hopper_repeatable", 64, "cuda"), ("flash_triton", 64, "cuda"), ("sdpa", 64, "cpu")],
)
def test_a_replay_keeps_attention_with_repeatable_gradients(attention, head_dim, device):
    assert _repeatable_attention(run_of(attention, head_dim, device)) == attention


@pytest.mark.parametrize("head_dim", [64, 192])
def test_a_replay_takes_the_repeatable_hopper_kernels(head_dim):
    assert _repeatable_attention(run_of("flash_hopper", head_dim)) == "flash_hopper_repeatable"


@pytest.mark.parametrize(
    ("best", "precision", "head_dim", "name"),
    [
        ("flash_hopper", "bf16", 128, "flash_hopper_repeatable"),
        ("flash_hopper", "bf16", 64, "flash_triton"),  # as fast
        ("flash_triton", "bf16", 128, "flash_triton"),
        ("flash_hopper", "fp32", 128, "flash_triton"),  # the Hopper kernels take 16 bits
    ],
)
def test_a_replay_with_auto_takes_the_best_repeatable_kernels(monkeypatch, best, precision, head_dim, name):
    monkeypatch.setattr(building, "triton_problem", lambda device: None)
    monkeypatch.setattr(building, "best_attention", lambda run: best)
    run = dataclasses.replace(run_of("auto", head_dim), precision=precision)
    assert _repeatable_attention(run) == name


def test_a_replay_refuses_attention_whose_gradients_differ_from_run_to_run():
    with pytest.raises(UserError, match=r"--replay_every .* --attention sdpa .* use --attention auto"):
        _repeatable_attention(run_of("sdpa", 64))


@pytest.mark.parametrize("replay_every", [0, 3])
@pytest.mark.parametrize("is_packed", [False, True])
def test_calls_of_a_run_with_replays_ask_for_repeatable_gradients(tmp_path, monkeypatch, replay_every, is_packed):
    """Packed documents choose their kernels in each call."""
    data = tmp_path / "text.txt"
    data.write_text("abcd " * 100)
    fields = {"data": str(data), "output": str(tmp_path / "run"), "device": "cpu", "replay_every": replay_every}
    shape = {"context_length": 16, "d_model": 16, "num_layers": 2, "num_heads": 2, "d_ff": 32}
    with process_group("gloo", "cpu") as rank:
        step = build_step(build(TrainSettings, fields | shape), rank)
    real, asked = model.attention, []
    monkeypatch.setattr(
        model, "attention", lambda *qkv, **call: asked.append(call["deterministic"]) or real(*qkv, **call)
    )
    tokens = torch.zeros(1, 16, dtype=torch.long)
    positions = torch.cat([torch.arange(5), torch.arange(11)])[None]
    step.model(
        model.PackedTokens(tokens, positions, torch.tensor([0, 5, 16], dtype=torch.int32)) if is_packed else tokens
    )
    assert asked == [replay_every > 0] * 2
