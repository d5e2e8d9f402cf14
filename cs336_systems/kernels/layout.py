"""How the results of the fused kernels lie in memory: said once, for the kernels and for their shape-only stand-ins."""

import torch
from torch import Tensor


def empty_like(t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised, in the layout of `t` where it is one that models use: heads or rows outermost. Else contiguous.

    A model's q is often a transposed view of (batch, seq, heads, d); an output of that layout flattens without a copy.
    """
    if t.is_contiguous() or t.transpose(1, 2).is_contiguous():
        return torch.empty_like(t, dtype=dtype)
    return torch.empty(t.shape, dtype=dtype or t.dtype, device=t.device)
