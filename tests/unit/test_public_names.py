"""The names that `cs336_systems` exports: imported on first use, the same objects as in their modules."""

import importlib

import pytest

import cs336_systems

MODULES = {
    "config": ["ModelConfig", "RunConfig", "SIZES"],
    "record": ["Metric", "Record", "load", "append"],
    "model": ["TransformerLM"],
    "step": ["TrainStep"],
    "kernels": ["attention", "FlashAttentionTorch", "FlashAttentionTriton"],
    "hugging_face": ["accelerate", "register_attention"],
    "parallel": ["NaiveDDP", "FlatDDP", "DDP", "ShardedOptimizer", "FSDP", "gather_full_params", "clip_grad_norm_"],
}


@pytest.mark.parametrize("module", MODULES)
def test_public_names_are_those_of_their_modules(module):
    found = importlib.import_module(f"cs336_systems.{module}")
    for name in MODULES[module]:
        assert getattr(cs336_systems, name) is getattr(found, name)
        assert name in cs336_systems.__all__
        assert name in dir(cs336_systems)


def test_every_exported_name_exists():
    assert [name for name in cs336_systems.__all__ if not hasattr(cs336_systems, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = cs336_systems.nothing
