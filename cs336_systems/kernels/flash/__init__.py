"""FlashAttention: dispatch, reference, portable Triton kernels, Hopper kernels, and their launchers."""
