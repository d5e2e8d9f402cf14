"""Tests of what `cs336 train` builds from its settings."""

import pytest

from cs336_systems.config import ModelConfig, RunConfig, UserError
from cs336_systems.train.building import _repeatable_attention


def run_of(attention: str, head_dim: int, device: str = "cuda") -> RunConfig:
    model = ModelConfig(vocab_size=256, context_length=16, d_model=2 * head_dim, num_layers=1, num_heads=2, d_ff=64)
    return RunConfig(model=model, attention=attention, device=device, precision="bf16")


@pytest.mark.parametrize(
    ("attention", "head_dim", "device"),
    [("flash_hopper", 192, "cuda"), ("flash_triton", 64, "cuda"), ("sdpa", 64, "cpu")],
)
def test_a_replay_keeps_attention_with_repeatable_gradients(attention, head_dim, device):
    assert _repeatable_attention(run_of(attention, head_dim, device)) == attention


@pytest.mark.parametrize("attention", ["flash_hopper", "sdpa"])
def test_a_replay_refuses_attention_whose_gradients_differ_from_run_to_run(attention):
    with pytest.raises(UserError, match=f"--replay_every .* --attention {attention} .* use --attention auto"):
        _repeatable_attention(run_of(attention, 64))
