"""A Transformer block as one autograd node whose plan says what is kept, recomputed or offloaded for backward."""

from typing import Any

import torch
from torch import Tensor

from cs336_systems.kernels.fused import nodes
from cs336_systems.kernels.fused.block_run import Run, Setting, Weights
from cs336_systems.kernels.fused.fp8_run import Fp8Run


def planned_block(x: Tensor, delta: Tensor | None, setting: Setting, weights: Weights) -> tuple[Tensor, Tensor]:
    """Return the block's output as the residual stream and the branch output that is still to be added to it, as
    `Block.fused` does."""
    dtype = nodes.matmul_dtype(x)
    with nodes.no_autocast(x):
        return _PlannedBlock.apply(x, delta, setting, dtype, *weights)


class _PlannedBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor | None, setting: Setting, dtype: torch.dtype, *weights: Any) -> Any:
        run = (Fp8Run if setting.fp8 else Run)(setting, Weights(*weights), dtype, x.shape)
        middle, out = run.forward(nodes.as_rows(x), None if delta is None else nodes.as_rows(delta))
        ctx.run, ctx.has_delta = run, delta is not None
        ctx.set_materialize_grads(False)
        return middle.view(x.shape), out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad_middle: Tensor | None, grad_out: Tensor | None) -> Any:
        run: Run | None = ctx.run
        ctx.run = None
        if run is None:
            raise RuntimeError("a planned block supports one backward pass: its activations are freed on the way")
        if grad_out is None:
            grad_out = torch.zeros(run.shape, dtype=run.dtype, device=run.setting.cos.device)
        with nodes.no_autocast(grad_out):
            dx, grads = run.backward(grad_middle, grad_out, ctx.needs_input_grad[4:])
        dx = dx.view(run.shape)
        return dx, dx if ctx.has_delta else None, None, None, *grads
