"""How it computes: plain torch in, plain torch out. `attention` is the only dispatch."""

from cs336_systems.kernels.attention import attention

__all__ = ["attention"]
