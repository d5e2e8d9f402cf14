"""The config.json of Llama 3, Qwen 2.5 and Qwen 3 as a ModelConfig, and back. Standard library only.

Every setting that would change the computation and that our model does not support raises an error with its name.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from cs336_systems.config import ModelConfig, UserError
from cs336_systems.files import shown

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Model types that are read and written, with their classes."""
_FIELDS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
    "hidden_size": "d_model",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "d_ff",
    "rms_norm_eps": "norm_eps",
}
_OTHER_NAMES = {
    "num_kv_heads": "num_key_value_heads",
    "d_head": "head_dim",
    "tied_embeddings": "tie_word_embeddings",
}
"""Fields of ours that are not always copied -> their names in config.json."""
_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Entries of Llama 3's `rope_scaling`, in the order of ModelConfig's."""
_QWEN3_HEAD_DIM = 128
"""Qwen 3's head dimension if its config.json gives none."""
_ROPE_THETA = 10_000.0
_REPLACED = ("rope_parameters", "layer_types", "dtype")
"""Fields of transformers 5 that are written in the form of version 4, which both versions read."""


def model_of(config: Any) -> ModelConfig:
    """Return the model of a config.json; raise UserError for one that is not supported."""
    if not isinstance(config, Mapping):
        raise UserError(f"config.json is no JSON object, but {shown(config)}")
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise UserError(f"config.json has the model_type {shown(family)}; supported are {', '.join(FAMILIES)}")
    _require_supported(config)
    fields = {ours: _required(config, theirs) for theirs, ours in _FIELDS.items()}
    fields["num_kv_heads"] = config.get("num_key_value_heads") or (
        fields["num_heads"] if family == "llama" else _required(config, "num_key_value_heads")
    )
    fields["d_head"] = config.get("head_dim") or (_QWEN3_HEAD_DIM if family == "qwen3" else 0)
    theta, scaling = _rope_of(config)
    try:
        return ModelConfig(
            **fields,
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            tied_embeddings=config.get("tie_word_embeddings", False),
            rope_theta=theta,
            rope_scaling=scaling,
        )
    except UserError as error:
        raise UserError(f"config.json: {_in_their_names(str(error))}") from None


def _in_their_names(message: str) -> str:
    """Return a message on fields of ModelConfig with the names of config.json."""
    theirs = {ours: name for name, ours in _FIELDS.items()} | _OTHER_NAMES
    return re.sub(rf"\b({'|'.join(theirs)})\b", lambda found: theirs[found[0]], message)


def _required(config: Mapping[str, Any], name: str) -> Any:
    if name not in config:
        raise UserError(f"config.json has no {name}")
    return config[name]


def _require_supported(config: Mapping[str, Any]) -> None:
    """Raise UserError for features that our model does not have."""
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"config.json has the activation {shown(config['hidden_act'])}; supported is silu")
    unsupported = {
        "attention_bias": "a bias of o_proj",
        "mlp_bias": "biases in the feed-forward network",
        "quantization_config": "quantized weights",
        "use_sliding_window": "a sliding window",
    }
    for name, what in unsupported.items():
        if config.get(name):
            raise UserError(f"config.json has {name} {shown(config[name])}: {what}, which is not supported")
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise UserError(f"config.json has the layer_types {shown(kinds)}; supported is full_attention")


def _rope_of(config: Mapping[str, Any]) -> tuple[float, str]:
    """Return the base and the scaling of rotary embeddings, as transformers 4 and 5 write them."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        raise UserError(f"config.json has rope parameters that are no JSON object, but {shown(found)}")
    theta = found.get("rope_theta") or config.get("rope_theta") or _ROPE_THETA
    if (share := found.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1) != 1:
        raise UserError(f"config.json rotates a share of {shown(share)} of each head; supported is 1")
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind == "default":
        return theta, ""
    if kind != "llama3":
        raise UserError(f"config.json has the rope type {shown(kind)}; supported are default and llama3")
    values = [_required(found, name) for name in _SCALING]
    if not all(type(value) in (int, float) and math.isfinite(value) for value in values):
        raise UserError(f"config.json has the rope parameters {shown(values)}, which are no numbers")
    return theta, ",".join(f"{value:.17g}" for value in values)


def config_of(model: ModelConfig, dtype: str, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the config.json of a model; fields of `like` that do not affect the computation are kept.

    The fields of another family, including the tokens that begin and end a text, are left out.
    """
    family = _family_of(model)
    kept = {name: value for name, value in (like or {}).items() if name not in _REPLACED and is_like(model, like)}
    config = {
        "bos_token_id": None,
        "eos_token_id": None,
        **kept,
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "hidden_act": "silu",
        **{theirs: getattr(model, ours) for theirs, ours in _FIELDS.items()},
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "tie_word_embeddings": model.tied_embeddings,
        "rope_theta": model.rope_theta,
        "rope_scaling": _scaling_of(model),
        "torch_dtype": dtype,
    }
    if family != "qwen2":
        config["attention_bias"] = False
    longest = kept.get("max_position_embeddings")
    if type(longest) is int and longest > model.context_length:  # training on shorter sequences takes nothing away
        config["max_position_embeddings"] = longest
    return config


def is_like(model: ModelConfig, like: Mapping[str, Any] | None) -> bool:
    """Return True if the config.json `like` is of the model's family; also if it names no family, or is None."""
    family = _family_of(model)
    return (like or {}).get("model_type", family) == family


def _family_of(model: ModelConfig) -> str:
    if model.qk_norm and model.qkv_bias:
        raise UserError("the model has qkv_bias and qk_norm; none of Llama 3, Qwen 2.5 and Qwen 3 has both")
    return "qwen3" if model.qk_norm else "qwen2" if model.qkv_bias else "llama"


def _scaling_of(model: ModelConfig) -> dict[str, Any] | None:
    if (values := model.frequency_scaling) is None:
        return None
    found: dict[str, Any] = dict(zip(_SCALING, values, strict=True))
    return {"rope_type": "llama3", **found, _SCALING[-1]: int(values[-1])}
