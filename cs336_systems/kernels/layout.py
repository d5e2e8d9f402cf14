"""How the results of the fused kernels lie in memory: said once, for the kernels and for their shape-only stand-ins."""

import torch
from torch import Tensor


def empty_like(t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised, without gaps, and with heads or rows outermost as `t` has them.

    A model's q is often a transposed view of (batch, seq, heads, d), or of a part of that where q, k and v are one
    tensor; an output of that layout flattens without a copy.
    """
    batch, heads, rows, d = t.shape
    dtype = dtype or t.dtype
    if heads > 1 and rows > 1 and t.stride(1) < t.stride(2):
        return torch.empty((batch, rows, heads, d), dtype=dtype, device=t.device).transpose(1, 2)
    return torch.empty(t.shape, dtype=dtype, device=t.device)
