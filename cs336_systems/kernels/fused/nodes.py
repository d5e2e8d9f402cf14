"""Parts of a Transformer block as single autograd nodes: a matmul together with the operations around it.

Matmuls stay with cuBLAS. Backward recomputes the outputs of norms and gates instead of keeping them: the pass that
needs them writes them into memory that it has just read.

Weights that multiply the same input are one matrix, without a copy where they are adjacent in memory (PackedAdamW
allocates them so). The matmul writes the gradient of a weight that has a `grad_memory` there; autograd accumulates the
others as usual.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cs336_systems.kernels.fused import pointwise

CHUNK_BYTES = 512 << 20
"""Maximum size of the logits that are in memory at a time."""
LOGIT_ALIGNMENT = 64
"""Rows of logits begin at multiples of this many elements."""
MATMUL_MULTIPLE = 8
"""A vocabulary that is no multiple of this is split: cuBLAS needs 16-byte multiples in every matrix for its fast
kernels, and has 95 to 140 TFLOP/s without them where an H200 has 700. GPT-2's vocabulary, 50,257, is such a one."""


def add_norm(x: Tensor, delta: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + delta, and its RMS norm times `gain`."""
    with no_autocast(x):
        return _AddNorm.apply(x, delta, gain, eps, x.dtype)


def norm_linear(
    x: Tensor, delta: Tensor | None, gain: Tensor, eps: float, *weights: Tensor, biases: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor]:
    """Return x + delta, and the matmuls of its RMS norm with all weights, concatenated; plus biases, one for each
    weight."""
    dtype = matmul_dtype(x)
    with no_autocast(x):
        return _NormLinear.apply(x, delta, gain, eps, dtype, len(weights), *weights, *biases)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight^T + bias."""
    dtype = matmul_dtype(x)
    with no_autocast(x):
        out = _Linear.apply(x.to(dtype), weight)
        return out if bias is None else out + bias.to(dtype)


def swiglu_linear(gate_up: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return (silu(gate) * up) @ weight^T + bias; gates are the first half of `gate_up`."""
    dtype = matmul_dtype(gate_up)
    with no_autocast(gate_up):
        out = _SwigluLinear.apply(gate_up.to(dtype), weight)
        return out if bias is None else out + bias.to(dtype)


class HeadNorms(NamedTuple):
    """Gains of the RMS norms of every head's queries and keys."""

    q_gain: Tensor
    k_gain: Tensor
    eps: float


def rotary_heads(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, norms: HeadNorms | None = None, *, halves: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and k with rotary embedding, after their norms if there are any, and v: (batch, heads, rows, dim) each,
    k and v of kv_heads. qkv: (batch, rows, (heads + 2 * kv_heads) * dim).

    They are views of `qkv`, which is rotated in place where it is contiguous: the caller must not use it afterwards.
    With norms q and k are new, and `qkv` is kept for backward. `halves`: see `pointwise.rotate_`.
    """
    with no_autocast(qkv):
        if norms is None:
            return _RotaryHeads.apply(qkv.contiguous(), cos, sin, heads, halves)
        return _NormRotaryHeads.apply(qkv.contiguous(), cos, sin, heads, *norms, halves)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, *, ignored: int = pointwise.IGNORED, count: Tensor | None = None
) -> Tensor:
    """Return the mean cross entropy of the logits x @ weight^T over the targets that are not `ignored`.

    `count`, a scalar on the device, replaces the number of these targets as the divisor. The logits are computed in
    chunks of CHUNK_BYTES, and each chunk's gradient in the same pass; the chunks' gradients are added up in fp32. A
    target outside the vocabulary that is not `ignored` makes the loss NaN.
    """
    dtype, trains = matmul_dtype(x), torch.is_grad_enabled()
    with no_autocast(x):
        return _LinearCrossEntropy.apply(as_rows(x).to(dtype), weight, targets.reshape(-1), ignored, trains, count)


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of the matmuls: autocast's, if it is enabled."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def no_autocast(x: Tensor) -> AbstractContextManager:
    """Disable autocast: it does not support matmuls with `out=`, and the nodes cast for themselves."""
    return torch.autocast(x.device.type, enabled=False)


# -- weights and their gradients --------------------------------------------------------------------------------------


def joined(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return matrices concatenated along their rows in `dtype`: a view if they are adjacent in memory, else a copy."""
    first = parts[0]
    if len(parts) == 1:
        return first.detach().to(dtype)
    offset = first.storage_offset()
    for part in parts:
        is_next = part.storage_offset() == offset and part.is_contiguous() and _same_storage(part, first)
        if part.dtype != dtype or not is_next:
            return torch.cat([part.detach().to(dtype) for part in parts])
        offset += part.numel()
    rows = sum(len(part) for part in parts)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def _same_storage(a: Tensor, b: Tensor) -> bool:
    """Return True for views of one storage, compared by its handle: tensors of a trace have no address."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def deposit(parameter: Tensor, gradient: Tensor) -> Tensor | None:
    """Add to the parameter's `grad_memory` and return None; without one, return the gradient for autograd."""
    memory = getattr(parameter, "grad_memory", None)
    if memory is None:
        return gradient.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = memory.copy_(gradient)
    else:
        parameter.grad.add_(gradient)
    return None


class GradientProduct(Protocol):
    """A matmul that computes the gradient of joined weights."""

    def __call__(self, out: Tensor | None, *, adds: bool) -> Tensor:
        """Return the product: in `out`, if given, or added to it."""


def gradient_product(grad: Tensor, x: Tensor) -> GradientProduct:
    """Return grad^T @ x. grad: of a matmul's output; x: its input."""

    def product(out: Tensor | None, *, adds: bool) -> Tensor:
        if out is None:
            return torch.mm(grad.t(), x)
        return out.addmm_(grad.t(), x) if adds else torch.mm(grad.t(), x, out=out)

    return product


def weight_gradients(
    weights: Sequence[Tensor], needed: Sequence[bool], product: GradientProduct, dtype: torch.dtype
) -> list[Tensor | None]:
    """Return the gradients of the joined weights of a matmul, in `dtype`; `needed`: those to compute."""
    if not any(needed):
        return [None] * len(weights)
    memories: list[Tensor] = [weight.grad_memory for weight in weights if hasattr(weight, "grad_memory")]
    if all(needed) and len(memories) == len(weights):
        fresh = [weight.grad is None for weight in weights]
        if all(fresh) or not any(fresh):
            memory = joined(memories, dtype)
            if _same_storage(memory, memories[0]):
                product(memory, adds=not all(fresh))
                for weight, own in zip(weights, memories, strict=True):
                    weight.grad = own
                return [None] * len(weights)
    found = product(None, adds=False).split([len(weight) for weight in weights])
    return [deposit(w, part) if need else None for w, part, need in zip(weights, found, needed, strict=True)]


def _gradients(weights: Sequence[Tensor], needed: Sequence[bool], grad: Tensor, x: Tensor) -> list[Tensor | None]:
    return weight_gradients(weights, needed, gradient_product(grad, x), grad.dtype)


def bias_gradients(biases: Sequence[Tensor], needed: Sequence[bool], grad: Tensor) -> list[Tensor | None]:
    """Return the gradients of the biases of joined weights, given that of the matmul's output, (rows, width)."""
    if not any(needed):
        return [None] * len(biases)
    found = grad.sum(0, dtype=torch.float32).split([len(bias) for bias in biases])
    return [deposit(b, part) if need else None for b, part, need in zip(biases, found, needed, strict=True)]


def product_with(y: Tensor, matrix: Tensor, biases: Sequence[Tensor]) -> Tensor:
    """Return y @ matrix^T plus the concatenated biases."""
    if not biases:
        return torch.mm(y, matrix.t())
    return torch.addmm(joined(biases, y.dtype), y, matrix.t())


# -- nodes ------------------------------------------------------------------------------------------------------------


def as_rows(t: Tensor) -> Tensor:
    """Return (..., width) as contiguous (rows, width)."""
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1]).contiguous()


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor | None, gain: Tensor, eps: float, dtype: torch.dtype) -> Any:
        total, y, rstd = pointwise.add_norm(as_rows(x), None if delta is None else as_rows(delta), gain, eps, dtype)
        ctx.save_for_backward(total, rstd)
        ctx.gain, ctx.has_delta = gain, delta is not None
        ctx.set_materialize_grads(False)
        return total.view(x.shape), y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor | None, grad_y: Tensor | None) -> Any:
        if grad_y is None:
            return grad_total, grad_total if ctx.has_delta else None, None, None, None
        total, rstd = ctx.saved_tensors
        with no_autocast(total):
            grad_x = None if grad_total is None else as_rows(grad_total)
            dx, grad_gain = pointwise.add_norm_backward(
                as_rows(grad_y), grad_x, total, rstd, ctx.gain, recompute_y=False
            )
            dx = dx.view(grad_y.shape)
            return dx, dx if ctx.has_delta else None, deposit(ctx.gain, grad_gain), None, None


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, gain: Tensor, eps: float, dtype: torch.dtype, count: int,
        *weights_and_biases: Tensor,
    ) -> Any:  # fmt: skip
        total, y, rstd = pointwise.add_norm(as_rows(x), None if delta is None else as_rows(delta), gain, eps, dtype)
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        matrix = joined(weights, dtype)
        ctx.save_for_backward(total, rstd, matrix)
        ctx.gain, ctx.weights, ctx.biases, ctx.has_delta, ctx.shape = gain, weights, biases, delta is not None, x.shape
        ctx.set_materialize_grads(False)
        return total.view(x.shape), product_with(y, matrix, biases).view(*x.shape[:-1], len(matrix))

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor | None, grad_out: Tensor | None) -> Any:
        if grad_out is None:
            others = 4 + len(ctx.weights) + len(ctx.biases)
            return grad_total, grad_total if ctx.has_delta else None, *(None,) * others
        total, rstd, matrix = ctx.saved_tensors
        with no_autocast(total):
            grad_x = None if grad_total is None else as_rows(grad_total)
            grad_out = as_rows(grad_out)
            grad_y = torch.mm(grad_out, matrix)
            dx, grad_gain = pointwise.add_norm_backward(grad_y, grad_x, total, rstd, ctx.gain, recompute_y=True)
            y = grad_y  # add_norm_backward has overwritten it
            first_bias = 6 + len(ctx.weights)
            grads = _gradients(ctx.weights, ctx.needs_input_grad[6:first_bias], grad_out, y)
            grads += bias_gradients(ctx.biases, ctx.needs_input_grad[first_bias:], grad_out)
            dx = dx.view(ctx.shape)
            return dx, dx if ctx.has_delta else None, deposit(ctx.gain, grad_gain), None, None, None, *grads


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        matrix = joined((weight,), x.dtype)
        ctx.save_for_backward(x, matrix)
        ctx.weight = weight
        return torch.mm(as_rows(x), matrix.t()).view(*x.shape[:-1], len(matrix))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, matrix = ctx.saved_tensors
        with no_autocast(x):
            rows = as_rows(grad)
            dx = torch.mm(rows, matrix).view(x.shape)
            (grad_weight,) = _gradients((ctx.weight,), ctx.needs_input_grad[1:], rows, as_rows(x))
            return dx, grad_weight


class _SwigluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor) -> Tensor:
        matrix = joined((weight,), gate_up.dtype)
        ctx.save_for_backward(gate_up, matrix)
        ctx.weight = weight
        return torch.mm(pointwise.swiglu(as_rows(gate_up)), matrix.t()).view(*gate_up.shape[:-1], len(matrix))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate_up, matrix = ctx.saved_tensors
        with no_autocast(gate_up):
            rows = as_rows(grad)
            grad_gated = torch.mm(rows, matrix)
            grad_gate_up = pointwise.swiglu_backward(grad_gated, as_rows(gate_up))
            gated = grad_gated  # swiglu_backward has overwritten it
            (grad_weight,) = _gradients((ctx.weight,), ctx.needs_input_grad[1:], rows, gated)
            return grad_gate_up.view(gate_up.shape), grad_weight


class _RotaryHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, halves: bool) -> Any:
        parts = qkv.detach().unflatten(-1, (-1, cos.shape[-1]))
        pointwise.rotate_(parts, cos, sin, heads, halves)
        ctx.save_for_backward(cos, sin)
        ctx.halves = halves
        return tuple(t.transpose(1, 2) for t in pointwise.heads_of(parts, heads))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        cos, sin = ctx.saved_tensors
        found = pointwise.rotate_backward(dq, dk, dv, cos, sin, ctx.halves)
        return found.flatten(2), None, None, None, None


class _NormRotaryHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, q_gain: Tensor, k_gain: Tensor, eps: float,
        halves: bool,
    ) -> Any:  # fmt: skip
        parts = qkv.detach().unflatten(-1, (-1, cos.shape[-1]))
        normed = pointwise.norm_rotate(parts, q_gain, k_gain, eps, cos, sin, heads, halves)
        ctx.save_for_backward(parts, cos, sin)
        ctx.gains, ctx.eps, ctx.halves = (q_gain, k_gain), eps, halves
        v = pointwise.heads_of(parts, heads)[2]
        return tuple(t.transpose(1, 2) for t in (normed[:, :, :heads], normed[:, :, heads:], v))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        parts, cos, sin = ctx.saved_tensors
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        q_gain, k_gain = ctx.gains
        found = pointwise.norm_rotate_backward(dq, dk, dv, parts, q_gain, k_gain, ctx.eps, cos, sin, ctx.halves)
        gains = [deposit(gain, grad) for gain, grad in zip(ctx.gains, found[1:], strict=True)]
        return found.qkv.flatten(2), None, None, None, *gains, None, None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, ignored: int, trains: bool, count: Tensor | None
    ) -> Tensor:
        matrix = joined((weight,), x.dtype)
        row_weight = ((targets != ignored).sum() if count is None else count).float().reciprocal()
        chunks = max(1, -(-x.shape[0] * len(matrix) * x.element_size() // CHUNK_BYTES))
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        grad_x = torch.empty_like(x)
        grad_weight: Tensor | None = None
        for rows, labels, grad_rows in zip(x.chunk(chunks), targets.chunk(chunks), grad_x.chunk(chunks), strict=True):
            logits = _logits(rows, matrix)
            loss += pointwise.cross_entropy_(logits, labels, row_weight, ignored).sum()
            if trains:
                # cross_entropy_ has overwritten the logits with their gradient.
                _input_gradient(logits, matrix, grad_rows)
                grad_weight = _add_weight_gradient(grad_weight, logits, rows, wide=chunks > 1)
            del logits  # before the next chunk's are allocated
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.weight = weight
        return loss * row_weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad_x, grad_weight = ctx.saved_tensors
        with no_autocast(grad_x):
            dw = deposit(ctx.weight, _scaled(ctx.weight, grad_weight, grad)) if ctx.needs_input_grad[1] else None
            return grad_x * grad, dw, None, None, None, None


def _vocabulary_parts(width: int) -> list[slice]:
    """Return the columns of the logits up to a multiple of MATMUL_MULTIPLE, and the rest, if any."""
    even = width // MATMUL_MULTIPLE * MATMUL_MULTIPLE
    return [part for part in (slice(0, even), slice(even, width)) if part.stop > part.start]


def _logits(rows: Tensor, matrix: Tensor) -> Tensor:
    """Return rows @ matrix^T, with rows in memory that begin at multiples of LOGIT_ALIGNMENT."""
    width = len(matrix)
    memory = rows.new_empty(len(rows), -(-width // LOGIT_ALIGNMENT) * LOGIT_ALIGNMENT)
    if rows.device.type == "cpu":  # with AMX, bf16 matmuls read the padding: times 0, but NaN * 0 is NaN
        memory[:, width:] = 0
    for part in _vocabulary_parts(width):
        torch.mm(rows, matrix[part].t(), out=memory[:, part])
    return memory[:, :width]


def _input_gradient(logits: Tensor, matrix: Tensor, out: Tensor) -> None:
    """Write logits @ matrix into `out`."""
    first, *rest = _vocabulary_parts(len(matrix))
    torch.mm(logits[:, first], matrix[first], out=out)
    for part in rest:
        out.addmm_(logits[:, part], matrix[part])


def _add_weight_gradient(total: Tensor | None, logits: Tensor, rows: Tensor, wide: bool) -> Tensor:
    """Return total + logits^T @ rows, in place; with `wide` 16-bit operands give an fp32 result."""
    adds = total is not None
    if total is None:
        dtype = torch.float32 if wide else rows.dtype
        total = rows.new_empty(logits.shape[1], rows.shape[1], dtype=dtype)
    for part in _vocabulary_parts(len(total)):
        _matmul(logits[:, part].t(), rows, total[part], adds=adds)
    return total


def _scaled(weight: Tensor, gradient: Tensor, factor: Tensor) -> Tensor:
    """Return gradient * factor; in place for a weight with a `grad_memory`, because there backward runs once and memory
    is short."""
    return gradient.mul_(factor) if hasattr(weight, "grad_memory") else gradient * factor


def _matmul(a: Tensor, b: Tensor, out: Tensor, *, adds: bool) -> None:
    """Write a @ b into `out`, or add it; `out` may be fp32 where the operands are not."""
    if out.dtype != a.dtype:
        _wide_matmul(a, b, out, adds=adds)
    elif adds:
        out.addmm_(a, b)
    else:
        torch.mm(a, b, out=out)


def _wide_matmul(a: Tensor, b: Tensor, out: Tensor, *, adds: bool) -> None:
    """Write a @ b into `out`, or add it, with an fp32 result. cuBLAS adds in place, which saves a temporary and a pass
    over it."""
    if not a.is_cuda:
        _matmul(a.float(), b.float(), out, adds=adds)
    elif adds:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
