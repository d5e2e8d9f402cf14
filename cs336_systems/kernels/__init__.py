"""Attention and fused kernels: plain torch in, plain torch out. `attention` chooses between its implementations."""

from cs336_systems.kernels.flash.dispatch import attention
from cs336_systems.kernels.flash.operators import FlashAttentionTorch, FlashAttentionTriton
from cs336_systems.kernels.flash.varlen import Packing

__all__ = ["FlashAttentionTorch", "FlashAttentionTriton", "Packing", "attention"]
