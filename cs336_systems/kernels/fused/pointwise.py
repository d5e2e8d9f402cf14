"""The operations of a training step between its matmuls, forward and backward, without autograd.

Each runs as a Triton kernel where Triton supports the device, else as the formula in PyTorch. Rows are tokens; sums and
exponentials are computed in fp32 for every dtype. A name that ends in `_` changes its first argument in place.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cs336_systems.kernels.flash.dispatch import triton_problem
from cs336_systems.kernels.flash.operators import is_plain

IGNORED = -100
"""Target that does not count towards the loss, as in torch."""
CHECKED = 16384
"""Number of elements that one checksum covers."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by bytes of an element."""


def _triton(t: Tensor) -> Any:
    """Return the module of kernels, or None if they cannot run on this tensor's device."""
    if triton_problem(t.device) is not None:
        return None
    from cs336_systems.kernels.fused import pointwise_triton

    return pointwise_triton


class AddNorm(NamedTuple):
    total: Tensor
    """x + delta. (rows, width)"""
    y: Tensor
    """RMS norm of `total`, times the gain. (rows, width)"""
    rstd: Tensor
    """1 / RMS of every row of `total`, fp32. (rows,)"""


class AddNormGradients(NamedTuple):
    x: Tensor
    """Gradient of x, and so of delta. (rows, width)"""
    gain: Tensor
    """Gradient of the gain, fp32. (width,)"""


def add_norm(x: Tensor, delta: Tensor | None, gain: Tensor, eps: float, dtype: torch.dtype) -> AddNorm:
    """Add `delta` to x and normalise. x, delta: (rows, width); gain: (width,); dtype: of the norm's output."""
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    rstd = torch.empty(len(x), dtype=torch.float32, device=x.device)
    total = x if delta is None else torch.empty_like(x)
    if kernels := _triton(x):
        kernels.add_norm(x, delta, gain.contiguous(), eps, total, y, rstd)
        return AddNorm(total, y, rstd)
    if delta is not None:
        total.copy_(x.float() + delta)
    wide = total.float()
    torch.rsqrt(wide.square().mean(-1) + eps, out=rstd)
    return AddNorm(total, y.copy_(wide * rstd[:, None] * gain), rstd)


def add_norm_backward(
    grad_y: Tensor, grad_x: Tensor | None, x: Tensor, rstd: Tensor, gain: Tensor, *, recompute_y: bool
) -> AddNormGradients:
    """Return the gradients of `add_norm`, where x is its total. With `recompute_y` the norm's output replaces
    `grad_y`."""
    out = torch.empty_like(x)
    if kernels := _triton(x):
        grad_gain = kernels.add_norm_backward(grad_y, grad_x, x, rstd, gain.contiguous(), out, recompute_y)
        return AddNormGradients(out, grad_gain)
    normed = x.float() * rstd[:, None]
    grad_normed = grad_y.float() * gain
    found = rstd[:, None] * (grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True))
    out.copy_(found if grad_x is None else found + grad_x)
    grad_gain = (grad_y.float() * normed).sum(0)
    if recompute_y:
        grad_y.copy_(normed * gain)
    return AddNormGradients(out, grad_gain)


def heads_of(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of q, k and v of (batch, rows, heads + 2 * kv_heads, dim)."""
    kv_heads = (qkv.shape[2] - heads) // 2
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=2)
    return q, k, v


def rotate_(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, halves: bool = False) -> None:
    """Apply the rotary embedding to q and k of (batch, rows, heads + 2 * kv_heads, dim). cos, sin: tables of
    RotaryEmbedding.

    With `halves` the pairs are (i, i + dim / 2) in place of neighbours, and the tables those of transformers: (batch or
    1, rows, dim), contiguous, both halves of `dim` alike.
    """
    q, k, _ = heads_of(qkv, heads)
    if kernels := _triton(qkv):
        kernels.rotate(q, k, None, cos, sin, qkv, 1.0, halves)
        return
    for t in (q, k):
        t.copy_(_rotated(t, cos, sin, halves))


def rotate_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, halves: bool = False) -> Tensor:
    """Return the gradient of `rotate_`'s input, given those of q, k and v. dq: (batch, rows, heads, dim); dk, dv:
    kv_heads."""
    out = _qkv_like(dq, dk)
    if kernels := _triton(dq):
        dq, dk, dv = (_row_major(t) for t in (dq, dk, dv))
        kernels.rotate(dq, dk, dv, cos, sin, out, -1.0, halves)
        return out
    found = _rotated(dq, cos, -sin, halves), _rotated(dk, cos, -sin, halves), dv
    for part, t in zip(heads_of(out, dq.shape[2]), found, strict=True):
        part.copy_(t)
    return out


def _qkv_like(dq: Tensor, dk: Tensor) -> Tensor:
    batch, rows, heads, dim = dq.shape
    return torch.empty((batch, rows, heads + 2 * dk.shape[2], dim), dtype=dq.dtype, device=dq.device)


def _row_major(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def norm_rotate(
    qkv: Tensor, q_gain: Tensor, k_gain: Tensor, eps: float, cos: Tensor, sin: Tensor, heads: int, halves: bool = False
) -> Tensor:
    """Return q and k, each head normalised, times its gain and rotated: (batch, rows, heads + kv_heads, dim). qkv as in
    `rotate_`, but unchanged."""
    q, k, _ = heads_of(qkv, heads)
    batch, rows, _, dim = qkv.shape
    out = torch.empty((batch, rows, heads + k.shape[2], dim), dtype=qkv.dtype, device=qkv.device)
    if kernels := _triton(qkv):
        kernels.norm_rotate(q, k, q_gain.contiguous(), k_gain.contiguous(), eps, cos, sin, out, halves)
        return out
    for part, t, gain in zip(out.split((heads, k.shape[2]), dim=2), (q, k), (q_gain, k_gain), strict=True):
        normed = _head_norm(t, eps)[0] * gain
        part.copy_(_rotated(normed.to(qkv.dtype), cos, sin, halves))
    return out


class NormRotateGradients(NamedTuple):
    qkv: Tensor
    q_gain: Tensor
    """Gradient of the gain of q's norm, fp32. (dim,)"""
    k_gain: Tensor


def norm_rotate_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, q_gain: Tensor, k_gain: Tensor, eps: float,
    cos: Tensor, sin: Tensor, halves: bool = False,
) -> NormRotateGradients:  # fmt: skip
    """Return the gradients of `norm_rotate`, given those of its q and k; that of v is copied into the result."""
    out, heads = _qkv_like(dq, dk), dq.shape[2]
    if kernels := _triton(dq):
        dq, dk, dv = (_row_major(t) for t in (dq, dk, dv))
        gains = kernels.norm_rotate_backward(
            *(dq, dk, dv),
            *heads_of(qkv, heads)[:2],
            q_gain.contiguous(),
            k_gain.contiguous(),
            eps,
            cos,
            sin,
            out,
            halves,
        )
        return NormRotateGradients(out, *gains)
    d_q, d_k, d_v = heads_of(out, heads)
    found = []
    for t, grad, gain, into in zip(heads_of(qkv, heads), (dq, dk), (q_gain, k_gain), (d_q, d_k), strict=False):
        normed, rstd = _head_norm(t, eps)
        grad = _rotated(grad, cos, -sin, halves)
        found.append((grad * normed).sum((0, 1, 2)))
        grad_normed = grad * gain
        into.copy_(rstd * (grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True)))
    d_v.copy_(dv)
    return NormRotateGradients(out, *found)


def _head_norm(t: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of every head, and 1 / RMS, in fp32."""
    wide = t.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * rstd, rstd


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, halves: bool) -> Tensor:
    if halves:
        first, second = x.float().chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return torch.addcmul(x * cos[:, :, None].float(), turned, sin[:, :, None].float())
    swapped = x.float().unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(x * cos[: x.shape[1]], swapped, sin[: x.shape[1]])


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up. gate_up: (rows, 2 * width), gates first."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if kernels := _triton(gate_up):
        kernels.swiglu(gate_up, out)
        return out
    gate, up = gate_up.float().chunk(2, dim=-1)
    return out.copy_(F.silu(gate) * up)


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient of `gate_up`; `swiglu(gate_up)` replaces `grad`."""
    out = torch.empty_like(gate_up)
    if kernels := _triton(grad):
        kernels.swiglu_backward(grad, gate_up, out)
        return out
    gate, up = gate_up.float().chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    out.copy_(torch.cat((grad * up * (sigmoid + silu * (1 - sigmoid)), grad * gate * sigmoid), dim=-1))
    grad.copy_(silu * up)
    return out


def cross_entropy_(logits: Tensor, targets: Tensor, weight: Tensor, ignored: int = IGNORED) -> Tensor:
    """Return the loss of each row, in fp32. `logits` becomes the gradient of the losses' sum times `weight`, an fp32
    scalar on the device. A target outside the vocabulary gives NaN."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if kernels := _triton(logits):
        kernels.cross_entropy(logits, targets, losses, weight, ignored)
        return losses
    wide = logits.float()
    lse = wide.logsumexp(-1)
    is_token = (targets >= 0) & (targets < logits.shape[-1])
    column = torch.where(is_token, targets, 0)[:, None]
    target_logit = wide.gather(-1, column)[:, 0].where(is_token, torch.nan)
    counts = targets != ignored
    losses.copy_((lse - target_logit).where(counts, 0.0))
    gradient = (wide - lse[:, None]).exp_()
    gradient.scatter_add_(-1, column, -is_token.to(gradient.dtype)[:, None])
    logits.copy_((gradient * weight).where(counts[:, None], 0.0))
    return losses


def adamw_(
    weights: Tensor, low_bits: Tensor | None, grads: Tensor, mean: Tensor, square: Tensor, scalars: Tensor,
    betas: tuple[float, float], eps: float, decay: float,
) -> None:  # fmt: skip
    """Update flat weights as torch's AdamW does. `scalars`, on the device: learning rate, factor of the gradient,
    1 - beta1^t, sqrt(1 - beta2^t), and 0 to skip the update. With `low_bits` the weights are those of `split_`. The
    arithmetic is fp32; weights and moments in bf16 are rounded to nearest, ties to even, when they are written."""
    if kernels := _triton(weights):
        kernels.adamw(weights, low_bits, grads, mean, square, scalars, betas, eps, decay)
        return
    # Tensors of a trace have no values: any will do.
    rate, factor, correction, root_correction, is_due = scalars.tolist() if is_plain(scalars) else [1.0] * 5
    if not is_due:
        return
    gradient = grads.float() * factor
    # For fp32 tensors float() returns the tensor itself.
    wide_mean, wide_square = mean.float(), square.float()
    wide_mean.lerp_(gradient, 1 - betas[0])
    wide_square.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    whole = weights.float() if low_bits is None else united(weights, low_bits)
    whole.mul_(1 - rate * decay)
    whole.addcdiv_(wide_mean, (wide_square.sqrt() / root_correction).add_(eps), value=-rate / correction)
    if low_bits is not None:
        split_(whole, weights, low_bits)
    elif whole is not weights:
        weights.copy_(whole)
    if wide_mean is not mean:
        mean.copy_(wide_mean)
        square.copy_(wide_square)


def checksums(tensor: Tensor) -> Tensor:
    """Return a 64-bit checksum for every CHECKED elements of a tensor, which any single flipped bit changes: the sum
    modulo 2^64 of their bits as integers, with odd weights. An odd multiple of a power of two is not 0 modulo 2^64."""
    bits = tensor.detach().reshape(-1).view(INTEGERS[tensor.element_size()])
    out = torch.empty(-(-len(bits) // CHECKED), dtype=torch.int64, device=bits.device)
    if len(bits) and (kernels := _triton(bits)):
        kernels.checksums(bits, out, CHECKED)
        return out
    weights = 2 * torch.arange(CHECKED, device=bits.device) + 1
    for number, block in enumerate(bits.split(CHECKED) if len(bits) else ()):
        out[number] = (block.long() * weights[: len(block)]).sum()
    return out


def split_(whole: Tensor, weights: Tensor, low_bits: Tensor) -> None:
    """Split an fp32 tensor into bf16 `weights`, rounded to nearest with ties away from 0, and the 16 bits by which they
    differ. Both take no more memory than the fp32 tensor, and together are exactly it. `whole` stays as it is."""
    bits = whole.view(torch.int32)
    high = (bits + 0x8000) >> 16
    weights.view(torch.int16).copy_(high)
    low_bits.copy_(bits - (high << 16))


def united(weights: Tensor, low_bits: Tensor) -> Tensor:
    """Return the fp32 tensor that `split_` was called with."""
    return ((weights.view(torch.int16).int() << 16) + low_bits).view(torch.float32)
