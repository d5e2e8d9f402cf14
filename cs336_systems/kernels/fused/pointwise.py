"""What a training step computes between its matrix products, without gradients of its own: by a Triton kernel where one
can run, else by the formula in PyTorch. Rows are tokens; sums and exponentials are taken in fp32 whatever the dtype.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cs336_systems.kernels.flash.dispatch import triton_problem
from cs336_systems.kernels.flash.operators import is_plain

IGNORED = -100
"""The target that does not count, as in torch."""


def _triton(t: Tensor) -> Any:
    """The module of kernels, where they can run on this tensor's device."""
    if triton_problem(t.device) is not None:
        return None
    from cs336_systems.kernels.fused import pointwise_triton

    return pointwise_triton


def add_norm(
    x: Tensor, delta: Tensor | None, gain: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """x + delta; its RMS norm times `gain`, in `dtype`; and the norm's factor of each row. (rows, width)."""
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    rstd = torch.empty(len(x), dtype=torch.float32, device=x.device)
    total = x if delta is None else torch.empty_like(x)
    if kernels := _triton(x):
        kernels.add_norm(x, delta, gain.contiguous(), eps, total, y, rstd)
        return total, y, rstd
    if delta is not None:
        total.copy_(x.float() + delta)
    wide = total.float()
    torch.rsqrt(wide.square().mean(-1) + eps, out=rstd)
    return total, y.copy_(wide * rstd[:, None] * gain), rstd


def add_norm_backward(
    grad_y: Tensor, grad_x: Tensor | None, x: Tensor, rstd: Tensor, gain: Tensor, *, remake: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of x (and so of delta), and of `gain` in fp32. With `remake` the norm's output replaces `grad_y`."""
    out = torch.empty_like(x)
    if kernels := _triton(x):
        return out, kernels.add_norm_backward(grad_y, grad_x, x, rstd, gain.contiguous(), out, remake)
    normed = x.float() * rstd[:, None]
    pulled = grad_y.float() * gain
    found = rstd[:, None] * (pulled - normed * (pulled * normed).mean(-1, keepdim=True))
    out.copy_(found if grad_x is None else found + grad_x)
    grad_gain = (grad_y.float() * normed).sum(0)
    if remake:
        grad_y.copy_(normed * gain)
    return out, grad_gain


def turn_(qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding, in place, of the q and k of (batch, rows, 3, heads, dim). `cos`, `sin`: RotaryEmbedding's."""
    q, k, _ = qkv.unbind(2)
    if kernels := _triton(qkv):
        kernels.turn(q, k, None, cos, sin, qkv, 1.0)
        return
    for t in (q, k):
        t.copy_(_turned(t, cos, sin))


def turned_back(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of what `turn_` was given, from those of q, k and v: (batch, rows, heads, dim) each."""
    batch, rows, heads, dim = dq.shape
    out = torch.empty((batch, rows, 3, heads, dim), dtype=dq.dtype, device=dq.device)
    if kernels := _triton(dq):
        dq, dk, dv = (t if t.stride(-1) == 1 else t.contiguous() for t in (dq, dk, dv))
        kernels.turn(dq, dk, dv, cos, sin, out, -1.0)
        return out
    for part, t in enumerate((_turned(dq, cos, -sin), _turned(dk, cos, -sin), dv)):
        out[:, :, part].copy_(t)
    return out


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    swapped = x.float().unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(x * cos[: x.shape[1]], swapped, sin[: x.shape[1]])


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, of (rows, 2 * width) with the gates first."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if kernels := _triton(gate_up):
        kernels.swiglu(gate_up, out)
        return out
    gate, up = gate_up.float().chunk(2, dim=-1)
    return out.copy_(F.silu(gate) * up)


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of `gate_up`; `swiglu(gate_up)` replaces `grad`."""
    out = torch.empty_like(gate_up)
    if kernels := _triton(grad):
        kernels.swiglu_backward(grad, gate_up, out)
        return out
    gate, up = gate_up.float().chunk(2, dim=-1)
    share = torch.sigmoid(gate)
    out.copy_(torch.cat((grad * up * (share + gate * share * (1 - share)), grad * gate * share), dim=-1))
    grad.copy_(gate * share * up)
    return out


def cross_entropy_(logits: Tensor, targets: Tensor, weight: Tensor, ignored: int = IGNORED) -> Tensor:
    """The loss of each row, fp32. `logits` becomes the gradient of the sum of all times `weight` (one number, fp32, on
    the device). A target that is no token gives NaN."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if kernels := _triton(logits):
        kernels.cross_entropy(logits, targets, losses, weight, ignored)
        return losses
    wide = logits.float()
    lse = wide.logsumexp(-1)
    known = (targets >= 0) & (targets < logits.shape[-1])
    column = torch.where(known, targets, 0)[:, None]
    hit = wide.gather(-1, column)[:, 0].where(known, torch.nan)
    counts = targets != ignored
    losses.copy_((lse - hit).where(counts, 0.0))
    gradient = (wide - lse[:, None]).exp_()
    gradient.scatter_add_(-1, column, -known.to(gradient.dtype)[:, None])
    logits.copy_((gradient * weight).where(counts[:, None], 0.0))
    return losses


def adamw_(
    weights: Tensor, rest: Tensor | None, grads: Tensor, mean: Tensor, square: Tensor, scalars: Tensor,
    betas: tuple[float, float], eps: float, decay: float,
) -> None:  # fmt: skip
    """AdamW's update of flat tensors, as in torch. `scalars`, on the device: learning rate, factor of the gradient,
    1 - beta1^t, sqrt(1 - beta2^t), and 0 where nothing is to be done. With `rest` the weights are `split`."""
    if kernels := _triton(weights):
        kernels.adamw(weights, rest, grads, mean, square, scalars, betas, eps, decay)
        return
    # Those of a trace have no values: then any step will do.
    rate, factor, correction, root_correction, is_due = scalars.tolist() if is_plain(scalars) else [1.0] * 5
    if not is_due:
        return
    gradient = grads.float() * factor
    mean.lerp_(gradient, 1 - betas[0])
    square.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    whole = weights if rest is None else united(weights, rest)
    whole.mul_(1 - rate * decay)
    whole.addcdiv_(mean, (square.sqrt() / root_correction).add_(eps), value=-rate / correction)
    if rest is not None:
        split_(whole, weights, rest)


def split_(whole: Tensor, weights: Tensor, rest: Tensor) -> None:
    """An fp32 tensor as bf16 `weights`, rounded to nearest with ties away from 0, and the 16 bits by which it differs:
    no more memory than the fp32 tensor, and not a bit is lost."""
    bits = whole.view(torch.int32)
    high = (bits + 0x8000) >> 16
    weights.view(torch.int16).copy_(high)
    rest.copy_(bits - (high << 16))


def united(weights: Tensor, rest: Tensor) -> Tensor:
    """The fp32 tensor that `split_` was given."""
    return ((weights.view(torch.int16).int() << 16) + rest).view(torch.float32)
