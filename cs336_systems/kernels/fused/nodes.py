"""Parts of a Transformer block as single nodes of the graph: a matrix product together with what surrounds it.

Matrix products stay with cuBLAS. What is cheap to compute again is not kept: backward remakes the norms' outputs and
the gated products in the pass that needs them anyway, in memory that it has just read.

Weights that multiply the same input are one matrix, without a copy where they lie one behind the other (PackedAdamW
lays them so). A weight with a `grad_memory` has its gradient written there by the product itself; others get theirs by
autograd as usual.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from cs336_systems.kernels.fused import pointwise

CHUNK_BYTES = 512 << 20
"""Of logits that are in memory at a time."""


def add_norm(x: Tensor, delta: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta, and its RMS norm."""
    with _plain(x):
        return _AddNorm.apply(x, delta, gain, eps, _dtype(x))


def norm_linear(x: Tensor, delta: Tensor | None, gain: Tensor, eps: float, *weights: Tensor) -> tuple[Tensor, Tensor]:
    """x + delta, and the products of its RMS norm with all weights, side by side."""
    dtype = _dtype(x)
    with _plain(x):
        return _NormLinear.apply(x, delta, gain, eps, dtype, *weights)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    dtype = _dtype(x)
    with _plain(x):
        return _Linear.apply(x.to(dtype), weight)


def swiglu_linear(gate_up: Tensor, weight: Tensor) -> Tensor:
    """The product of silu(gate) * up with a weight; gates are the first half of `gate_up`."""
    dtype = _dtype(gate_up)
    with _plain(gate_up):
        return _SwigluLinear.apply(gate_up.to(dtype), weight)


def rotary_heads(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q and k, turned by their positions, and v, (batch, heads, rows, dim) each, of (batch, rows, 3 * heads * dim).

    They are views of `qkv`, which is turned in place where it is contiguous: nobody else may need it.
    """
    with _plain(qkv):
        return _RotaryHeads.apply(qkv.contiguous(), cos, sin, heads)


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, *, ignored: int = pointwise.IGNORED) -> Tensor:
    """The mean loss of the logits x @ weight^T, which are never in memory as a whole, over targets that count.

    The gradient is formed in the same pass, chunk by chunk, and added up in fp32. A target that is no token and not
    `ignored` makes the loss NaN.
    """
    dtype, trains = _dtype(x), torch.is_grad_enabled()
    with _plain(x):
        return _LinearCrossEntropy.apply(_rows(x).to(dtype), weight, targets.reshape(-1), ignored, trains)


def _dtype(x: Tensor) -> torch.dtype:
    """What products are computed in."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _plain(x: Tensor) -> AbstractContextManager:
    """Casts are ours here: autocast takes no products that write into given memory."""
    return torch.autocast(x.device.type, enabled=False)


# -- weights and their gradients --------------------------------------------------------------------------------------


def joined(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The matrices below each other, in `dtype`: a view where they lie so already, else a copy."""
    first = parts[0]
    if len(parts) == 1:
        return first.detach().to(dtype)
    at = first.storage_offset()
    for part in parts:
        if part.dtype != dtype or not part.is_contiguous() or part.storage_offset() != at or not _share(part, first):
            return torch.cat([part.detach().to(dtype) for part in parts])
        at += part.numel()
    rows = sum(len(part) for part in parts)
    return first.detach().as_strided((rows, first.shape[1]), (first.shape[1], 1))


def _share(a: Tensor, b: Tensor) -> bool:
    """Whether they are views of one piece of memory. By its handle: tensors of a trace have no address."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def deposit(parameter: Tensor, gradient: Tensor) -> Tensor | None:
    """For autograd to add up; or None, where the parameter has memory for it, and it is there now."""
    memory = getattr(parameter, "grad_memory", None)
    if memory is None:
        return gradient.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = memory.copy_(gradient)
    else:
        parameter.grad.add_(gradient)
    return None


def _weight_gradients(
    weights: Sequence[Tensor], needed: Sequence[bool], grad: Tensor, x: Tensor
) -> list[Tensor | None]:
    """Of the joined weights of a product, from the gradient of its output and from its input."""
    if not any(needed):
        return [None] * len(weights)
    memories: list[Tensor] = [weight.grad_memory for weight in weights if hasattr(weight, "grad_memory")]
    if all(needed) and len(memories) == len(weights):
        fresh = [weight.grad is None for weight in weights]
        if all(fresh) or not any(fresh):
            memory = joined(memories, grad.dtype)
            if _share(memory, memories[0]):
                if all(fresh):
                    torch.mm(grad.t(), x, out=memory)
                else:
                    memory.addmm_(grad.t(), x)
                for weight, own in zip(weights, memories, strict=True):
                    weight.grad = own
                return [None] * len(weights)
    found = torch.mm(grad.t(), x).split([len(weight) for weight in weights])
    return [deposit(w, part) if need else None for w, part, need in zip(weights, found, needed, strict=True)]


# -- nodes ------------------------------------------------------------------------------------------------------------


def _rows(t: Tensor) -> Tensor:
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1]).contiguous()


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor | None, gain: Tensor, eps: float, dtype: torch.dtype) -> Any:
        total, y, rstd = pointwise.add_norm(_rows(x), None if delta is None else _rows(delta), gain, eps, dtype)
        ctx.save_for_backward(total, rstd)
        ctx.gain, ctx.adds = gain, delta is not None
        ctx.set_materialize_grads(False)
        return total.view(x.shape), y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor | None, grad_y: Tensor | None) -> Any:
        if grad_y is None:
            return grad_total, grad_total if ctx.adds else None, None, None, None
        total, rstd = ctx.saved_tensors
        with _plain(total):
            above = None if grad_total is None else _rows(grad_total)
            dx, grad_gain = pointwise.add_norm_backward(_rows(grad_y), above, total, rstd, ctx.gain, remake=False)
            dx = dx.view(grad_y.shape)
            return dx, dx if ctx.adds else None, deposit(ctx.gain, grad_gain), None, None


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, gain: Tensor, eps: float, dtype: torch.dtype, *weights: Tensor
    ) -> Any:
        total, y, rstd = pointwise.add_norm(_rows(x), None if delta is None else _rows(delta), gain, eps, dtype)
        matrix = joined(weights, dtype)
        ctx.save_for_backward(total, rstd, matrix)
        ctx.gain, ctx.weights, ctx.adds, ctx.shape = gain, weights, delta is not None, x.shape
        ctx.set_materialize_grads(False)
        return total.view(x.shape), torch.mm(y, matrix.t()).view(*x.shape[:-1], len(matrix))

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor | None, grad_out: Tensor | None) -> Any:
        nothing = (None,) * (3 + len(ctx.weights))
        if grad_out is None:
            return grad_total, grad_total if ctx.adds else None, *nothing
        total, rstd, matrix = ctx.saved_tensors
        with _plain(total):
            above = None if grad_total is None else _rows(grad_total)
            grad_out = _rows(grad_out)
            grad_y = torch.mm(grad_out, matrix)
            dx, grad_gain = pointwise.add_norm_backward(grad_y, above, total, rstd, ctx.gain, remake=True)
            y = grad_y
            grads = _weight_gradients(ctx.weights, ctx.needs_input_grad[5:], grad_out, y)
            dx = dx.view(ctx.shape)
            return dx, dx if ctx.adds else None, deposit(ctx.gain, grad_gain), None, None, *grads


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        matrix = joined((weight,), x.dtype)
        ctx.save_for_backward(x, matrix)
        ctx.weight = weight
        return torch.mm(_rows(x), matrix.t()).view(*x.shape[:-1], len(matrix))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, matrix = ctx.saved_tensors
        with _plain(x):
            rows = _rows(grad)
            dx = torch.mm(rows, matrix).view(x.shape)
            (grad_weight,) = _weight_gradients((ctx.weight,), ctx.needs_input_grad[1:], rows, _rows(x))
            return dx, grad_weight


class _SwigluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor) -> Tensor:
        matrix = joined((weight,), gate_up.dtype)
        ctx.save_for_backward(gate_up, matrix)
        ctx.weight = weight
        return torch.mm(pointwise.swiglu(_rows(gate_up)), matrix.t()).view(*gate_up.shape[:-1], len(matrix))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate_up, matrix = ctx.saved_tensors
        with _plain(gate_up):
            rows = _rows(grad)
            gated = torch.mm(rows, matrix)
            grad_gate_up = pointwise.swiglu_backward(gated, _rows(gate_up))  # and `gated` is now what its name says
            (grad_weight,) = _weight_gradients((ctx.weight,), ctx.needs_input_grad[1:], rows, gated)
            return grad_gate_up.view(gate_up.shape), grad_weight


class _RotaryHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Any:
        parts = qkv.detach().unflatten(-1, (3, heads, -1))
        pointwise.turn_(parts, cos, sin)
        ctx.save_for_backward(cos, sin)
        return tuple(t.transpose(1, 2) for t in parts.unbind(2))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        return pointwise.turned_back(dq, dk, dv, *ctx.saved_tensors).flatten(2), None, None, None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, ignored: int, trains: bool) -> Tensor:
        matrix = joined((weight,), x.dtype)
        share = (targets != ignored).sum().float().reciprocal()
        chunks = max(1, -(-x.shape[0] * len(matrix) * x.element_size() // CHUNK_BYTES))
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        grad_x = torch.empty_like(x)
        grad_weight: Tensor | None = None
        for rows, wanted, grad_rows in zip(x.chunk(chunks), targets.chunk(chunks), grad_x.chunk(chunks), strict=True):
            logits = torch.mm(rows, matrix.t())
            total += pointwise.cross_entropy_(logits, wanted, share, ignored).sum()
            if trains:
                torch.mm(logits, matrix, out=grad_rows)
                grad_weight = _add_product(grad_weight, logits.t(), rows, wide=chunks > 1)
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.weight = weight
        return total * share

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad_x, grad_weight = ctx.saved_tensors
        with _plain(grad_x):
            dw = deposit(ctx.weight, grad_weight * grad) if ctx.needs_input_grad[1] else None
            return grad_x * grad, dw, None, None, None


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, wide: bool) -> Tensor:
    """total + a @ b; where it is one of several, in fp32."""
    if not wide or a.dtype not in (torch.bfloat16, torch.float16):
        return torch.mm(a, b) if total is None else total.addmm_(a, b)
    product = _wide_product(a, b)
    return product if total is None else total.add_(product)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.mm(a.float(), b.float())
