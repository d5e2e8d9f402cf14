"""Names and layout of weights in Hugging Face's format and in ours.

Our rotary embedding rotates the pairs (2i, 2i + 1) of a head's dimensions, Hugging Face's the pairs (i, i + K/2). So
the rows of q and k are permuted within each head: weights, biases, and gains of their norms. No value changes.
"""

import re

import torch
from torch import Tensor

_LAYER = {
    "ln1.weight": "input_layernorm.weight",
    "ln2.weight": "post_attention_layernorm.weight",
    "attn.q_proj.weight": "self_attn.q_proj.weight",
    "attn.k_proj.weight": "self_attn.k_proj.weight",
    "attn.v_proj.weight": "self_attn.v_proj.weight",
    "attn.q_proj.bias": "self_attn.q_proj.bias",
    "attn.k_proj.bias": "self_attn.k_proj.bias",
    "attn.v_proj.bias": "self_attn.v_proj.bias",
    "attn.output_proj.weight": "self_attn.o_proj.weight",
    "attn.q_norm.weight": "self_attn.q_norm.weight",
    "attn.k_norm.weight": "self_attn.k_norm.weight",
    "ffn.w1.weight": "mlp.gate_proj.weight",
    "ffn.w2.weight": "mlp.down_proj.weight",
    "ffn.w3.weight": "mlp.up_proj.weight",
}
_OUTSIDE = {
    "token_embeddings.weight": "model.embed_tokens.weight",
    "ln_final.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_ROTATED = re.compile(r"layers\.\d+\.attn\.[qk]_(proj|norm)\.")
IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Tables in old folders that can be computed from config.json."""


def hf_name(name: str) -> str:
    """Return the name in Hugging Face's format of one of our tensors."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, number, inside = name.split(".", 2)
    return f"model.layers.{number}.{_LAYER[inside]}"


def from_hf(name: str, value: Tensor, head_dim: int) -> Tensor:
    """Return a tensor of Hugging Face's format in ours; `name` is ours."""
    return _permuted(value, _pairs(head_dim)) if _ROTATED.match(name) else value


def to_hf(name: str, value: Tensor, head_dim: int) -> Tensor:
    """Return one of our tensors in Hugging Face's format."""
    return _permuted(value, _pairs(head_dim).argsort()) if _ROTATED.match(name) else value


def _pairs(head_dim: int) -> Tensor:
    """Return, for each of our dimensions of a head, the dimension in Hugging Face's format: 0, K/2, 1, K/2 + 1, ..."""
    return torch.arange(head_dim).view(2, -1).T.flatten()


def _permuted(value: Tensor, order: Tensor) -> Tensor:
    return value.unflatten(0, (-1, len(order))).index_select(1, order).flatten(0, 1)
