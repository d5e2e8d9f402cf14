"""How it computes: plain torch in, plain torch out. `attention` is the only dispatch."""

from cs336_systems.kernels.flash.dispatch import attention
from cs336_systems.kernels.flash.operators import FlashAttentionTorch, FlashAttentionTriton

__all__ = ["FlashAttentionTorch", "FlashAttentionTriton", "attention"]
