"""Attention as the formula says it: the oracle of the fused kernels, and the baseline they are measured against."""

import math

import torch
from torch import Tensor


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """softmax(q k^T * scale) v with the whole score matrix in memory; causal masks are aligned top-left."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    # Scaling q instead of the scores, masking in place and keeping one name spares three (seq, seq) matrices.
    weights = (q * scale) @ k.transpose(-2, -1)
    if is_causal:
        future = torch.ones(weights.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        weights.masked_fill_(future, -torch.inf)
    weights = torch.softmax(weights, dim=-1, dtype=torch.promote_types(weights.dtype, torch.float32))
    return weights.to(v.dtype) @ v
