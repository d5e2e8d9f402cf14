"""One meaning, several implementations: `attention(q, k, v, impl=...)`."""

import torch.nn.functional as F
from torch import Tensor

from cs336_systems.kernels.reference import attention_reference

IMPLEMENTATIONS = ("auto", "reference", "sdpa")


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, scale: float | None = None, impl: str = "auto"
) -> Tensor:
    """Scaled dot-product attention over (batch, heads, seq, d). `scale` defaults to 1 / sqrt(d).

    `impl`: "reference" forms the whole score matrix; "sdpa" is PyTorch's fused kernel; "auto" is the best for the
    machine, at present always "sdpa".
    """
    match impl:
        case "reference":
            return attention_reference(q, k, v, is_causal=is_causal, scale=scale)
        case "sdpa" | "auto":
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
    raise ValueError(f"unknown attention implementation {impl!r}; choose one of: {', '.join(IMPLEMENTATIONS)}")
