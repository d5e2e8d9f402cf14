"""Random steps of random families of models: closed form, trace and GPU predict or measure the same ones."""

import random

from cs336_systems.config import ModelConfig, RunConfig

FAST = ("off", "on", "on", "kernels,loss", "loss,optimizer")


def family_config(seed: int, scale: int = 1, **fields) -> RunConfig:
    """A step on a GPU; `scale` makes its sizes those of models that people train."""
    draw = random.Random(seed)
    kv_heads, group = draw.choice((1, 2, 3)), draw.choice((1, 2, 4, 7))
    heads, head_dim = kv_heads * group, draw.choice((16, 32, 64)) * (2 if scale > 1 else 1)
    own_dim = draw.random() < 0.4
    d_model = 32 * scale * draw.choice((3, 4, 6)) if own_dim else heads * head_dim
    model = ModelConfig(
        vocab_size=draw.choice((301, 1000, 3008)) * scale,
        context_length=draw.choice((64, 128)) * scale,
        d_model=d_model,
        num_layers=draw.choice((2, 5, 8)),
        num_heads=heads,
        d_ff=64 * draw.choice((3, 5, 9)) * scale,
        num_kv_heads=kv_heads,
        d_head=head_dim,
        qkv_bias=draw.random() < 0.5,
        qk_norm=draw.random() < 0.4,
        tied_embeddings=draw.random() < 0.5,
    )
    fast, state = draw.choice(FAST), draw.choice(("fp32", "bf16"))
    chosen = {
        "batch_size": draw.choice((1, 2, 4)),
        "precision": draw.choice(("bf16", "bf16", "fp32")),
        "attention": draw.choice(("auto", "flash_triton")),
        "checkpoint_blocks": draw.choice((0, 0, 1, 2)),
        "fast": fast,
    } | fields
    if chosen["fast"] == "on" and chosen["precision"] == "bf16":
        chosen["optimizer_state"] = state
    return RunConfig(model=model, device="cuda", **chosen)
