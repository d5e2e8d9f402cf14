"""Tiny models of transformers, plain and accelerated, on one batch."""

import copy

import torch
import transformers

from cs336_systems import accelerate

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "pad_token_id": 0,
}
FAMILIES = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 6},
}
LENGTH = 13


def build(family="Llama", head="ForCausalLM", **fields):
    """A model in training mode, with gains other than 1 and biases other than 0."""
    config = getattr(transformers, f"{family}Config")(**SHAPE | FAMILIES[family] | fields)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}{head}")(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def pair(family="Llama", **fields):
    """The same model twice, plain and accelerated, and what undoes the second."""
    plain = build(family, **fields)
    model = copy.deepcopy(plain)
    return plain, model, accelerate(model)


def batch(**more):
    tokens = torch.randint(1, SHAPE["vocab_size"], (2, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, :3] = -100
    return {"input_ids": tokens, "labels": labels} | more


def gradients(model, inputs):
    """The loss and all gradients by name."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


def error(found, exact):
    """The largest difference relative to the norm, over tensors of the same names."""
    assert found.keys() == exact.keys()
    differences = {name: (found[name].double() - x.double()).norm() / x.double().norm() for name, x in exact.items()}
    return max(value.item() for value in differences.values())
