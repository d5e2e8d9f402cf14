"""config.json of published models: both ways, and with any value in any field."""

import itertools
from typing import Any

import pytest

from cs336_systems.config import SIZES, UserError, model_config
from cs336_systems.train.hf.hf_config import config_of, model_of

ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 16}
SHAPE = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
VALID: dict[str, Any] = {
    "model_type": "qwen3",
    **SHAPE,
    "head_dim": 8,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "layer_types": ["full_attention"] * 2,
    "rope_parameters": ROPE,
}
VALUES: list[Any] = [None, -1, 0, 1.5, "x", "", [], [1], {}, {"a": 1}, float("inf"), float("nan"), True, 10**30]


@pytest.mark.parametrize("size", [size for size in SIZES if "3/" in size or "2.5/" in size])
def test_published_sizes_go_both_ways(size):
    model = model_config(size, context_length=4096)
    assert model_of(config_of(model, "bfloat16")) == model


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_any_value_in_any_field_is_read_or_refused(family):
    """With a UserError of one line: never another exception."""
    whole = {**VALID, "model_type": family}
    assert model_of(whole).rope_scaling == "8,1,4,16"
    changed = [{**whole, name: value} for name, value in itertools.product(VALID, VALUES)]
    changed += [{**whole, "rope_parameters": {**ROPE, name: value}} for name, value in itertools.product(ROPE, VALUES)]
    refused = []
    for config in [*VALUES, *changed]:
        try:
            config_of(model_of(config), "float32", config)
        except UserError as error:
            refused.append(str(error))
    assert 100 < len(refused) < len(changed)
    assert all(len(message.splitlines()) == 1 for message in refused)


def test_fields_that_do_not_change_the_computation_are_kept():
    kept = {"eos_token_id": [1, 2], "initializer_range": 0.1, "dtype": "float32", "rope_parameters": ROPE}
    found = config_of(model_config("qwen3/0.6B"), "bfloat16", kept)
    assert (found["eos_token_id"], found["initializer_range"], found["torch_dtype"]) == ([1, 2], 0.1, "bfloat16")
    assert "dtype" not in found
    assert "rope_parameters" not in found
