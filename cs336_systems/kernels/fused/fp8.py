"""Matmuls of FP8 (e4m3) operands with fp32 sums and bf16 results, and the passes that write such operands.

Every row of an operand has one scale, the smallest power of two that brings its largest element to at most 448. It is
computed from the row itself: nothing is carried from one step to the next, and no value can overflow. An element
becomes 0 if it is below 2^-18 of the largest element of its row.

A tensor core takes FP8 operands along the dimension that is summed over, so a weight's gradient needs both its operands
transposed: it sums over rows. The scales of rows are then inside the sum. The gradient's copy is multiplied by them,
relative to the largest product: a change of exponents, exact for all but the smallest elements.

Each function runs as Triton kernels where Triton supports the device, else as the formula in PyTorch. `lost`, if given,
is an int64 tensor of SLOTS numbers: their sum grows by the elements that became 0, counted in every 16th row.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cs336_systems.kernels.flash.dispatch import triton_problem
from cs336_systems.kernels.flash.operators import is_plain

E4M3 = torch.float8_e4m3fn
SLOTS = 32
"""Counters of lost elements of one tensor. Programs that add to one address wait for each other."""
COUNTED_ROWS = 16
"""One of this many rows is searched for elements that became 0: counting all of them took 15% of a pass's time."""
SMALLEST_EXPONENT = -126
"""Smallest exponent of a scale."""


SILU_SLOPE, SILU_NEGATIVE_SLOPE, SILU_NEGATIVE = 1.1, 0.5, 0.28
"""Upper bounds: of silu's slope, of its slope left of 0, and of |silu| left of 0. Right of 0 silu(x) is at most x."""


class Rows(NamedTuple):
    """An FP8 matrix: values * scale[:, None]."""

    values: Tensor
    """e4m3. (rows, width)"""
    scale: Tensor
    """fp32, powers of two; NaN in a row that is not finite. (rows,)"""

    def wide(self) -> Tensor:
        """Return the matrix in fp32."""
        return self.values.float() * self.scale[:, None]


class AddNorm(NamedTuple):
    total: Tensor
    """x + delta. (rows, width)"""
    y: Tensor
    """RMS norm of `total`, times the gain: in e4m3, divided by `scale`; in a wider dtype as it is. (rows, width)"""
    scale: Tensor
    """FP8 scales of the norm's rows. (rows,)"""
    rstd: Tensor
    """1 / RMS of every row of `total`, fp32. (rows,)"""


class SwigluGradients(NamedTuple):
    gate_up: Rows
    gated: Tensor
    """Recomputed values of `swiglu`, e4m3. (rows, width)"""


def _triton(t: Tensor) -> Any:
    """Return the module of kernels, or None if they cannot run on this tensor's device."""
    if triton_problem(t.device) is not None:
        return None
    from cs336_systems.kernels.fused import fp8_triton

    return fp8_triton


# -- matmuls ----------------------------------------------------------------------------------------------------------


def matmul(a: Rows, b: Rows, bias: Tensor | None = None) -> Tensor:
    """Return a @ b^T + bias in bf16."""
    return _scaled_matmul(a.values, b.values, a.scale[:, None], b.scale[None, :], bias)


def _scaled_matmul(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Return (a @ b^T) * scale_a * scale_b + bias in bf16, in `out` if given."""
    if is_plain(a) and not a.is_cuda:  # torch's own for a CPU takes many times as long
        wide = torch.mm(a.float(), b.float().t()) * scale_a * scale_b
        wide = wide if bias is None else wide + bias
        return wide.bfloat16() if out is None else out.copy_(wide)
    if out is not None and not is_plain(a):  # a trace: torch 2.11 would compute this form on the CPU, for minutes
        return out
    into = {} if out is None else {"out": out}
    return torch._scaled_mm(
        a, b.t(), scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True, **into
    )


def weight_gradient(grad: Rows, x: Tensor, x_scale: Tensor, out: Tensor | None, lost: Tensor | None = None) -> Tensor:
    """Return grad^T @ x in bf16, in `out` if given. x: the transposed values of the matmul's input, (width, rows);
    x_scale: its scales, (rows,)."""
    largest = largest_scale(grad.scale, x_scale)
    columns = _transposed(grad.values, up=grad.scale, more=x_scale, down=largest[0, 0], lost=lost)
    return _scaled_matmul(columns, x, largest[0, 0], largest[1, 0], out=out)


# -- passes that write operands ---------------------------------------------------------------------------------------


def quantize(x: Tensor, lost: Tensor | None = None) -> Rows:
    """Return a contiguous matrix in FP8."""
    out = _new_rows(x, x.shape[1])
    if kernels := _triton(x):
        kernels.quantize(x, *out, lost)
        return out
    return _fill(out, x.float(), lost)


def add_norm(
    x: Tensor,
    delta: Tensor | None,
    gain: Tensor,
    eps: float,
    lost: Tensor | None = None,
    dtype: torch.dtype = E4M3,
) -> AddNorm:
    """Compute `pointwise.add_norm` with its result in FP8, or in a wider dtype together with the scales that FP8 would
    have."""
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale, rstd = (torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(2))
    total = x if delta is None else torch.empty_like(x)
    if kernels := _triton(x):
        kernels.add_norm(x, delta, gain.contiguous(), eps, total, y, scale, rstd, lost)
        return AddNorm(total, y, scale, rstd)
    if delta is not None:
        total.copy_(x.float() + delta)
    wide = total.float()
    torch.rsqrt(wide.square().mean(-1) + eps, out=rstd)
    wide = wide * rstd[:, None] * gain
    if dtype == E4M3:
        _fill(Rows(y, scale), wide, lost)
    else:
        y.copy_(wide)
        _fill(Rows(torch.empty_like(y, dtype=E4M3), scale), wide, lost)
    return AddNorm(total, y, scale, rstd)


def swiglu(gate_up: Tensor, lost: Tensor | None = None) -> Rows:
    """Compute `pointwise.swiglu` with its result in FP8."""
    out = _new_rows(gate_up, gate_up.shape[1] // 2)
    if kernels := _triton(gate_up):
        kernels.swiglu(gate_up, *out, lost)
        return out
    gate, up = gate_up.float().chunk(2, dim=-1)
    return _fill(out, F.silu(gate) * up, lost)


def swiglu_backward(grad: Tensor, gate_up: Tensor, scale: Tensor, lost: Tensor | None = None) -> SwigluGradients:
    """Return the gradient of `gate_up`, and the values of `swiglu(gate_up)`, whose scale is given. The scale of a
    gradient row comes from an upper bound of its elements, which can be computed without sigmoid."""
    out = _new_rows(gate_up, gate_up.shape[1])
    gated = torch.empty(grad.shape, dtype=E4M3, device=grad.device)
    if kernels := _triton(grad):
        kernels.swiglu_backward(grad, gate_up, scale, *out, gated, lost)
        return SwigluGradients(out, gated)
    gate, up = gate_up.float().chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    found = torch.cat((grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu), dim=-1)
    gated.copy_(F.silu(gate) * up / scale[:, None])
    slope = torch.where(gate < 0, SILU_NEGATIVE_SLOPE, SILU_SLOPE)
    bound = torch.maximum(up.abs() * slope, gate.clamp(min=SILU_NEGATIVE)) * grad.abs()
    return SwigluGradients(_fill(out, found, lost, bound), gated)


def transposed(values: Tensor) -> Tensor:
    """Return e4m3 values (rows, width) transposed, as contiguous (width, rows)."""
    return _transposed(values)


def transposed_rows(x: Tensor, scale: Tensor) -> Tensor:
    """Return the values of `quantize(x)`, whose scale is given, as contiguous (width, rows)."""
    return _transposed(x, down=scale)


def transposed_norm(x: Tensor, rstd: Tensor, gain: Tensor, scale: Tensor) -> Tensor:
    """Return the values of the norm of x that `add_norm` computed, as contiguous (width, rows)."""
    return _transposed(x, up=rstd, down=scale, gain=gain.contiguous())


def transposed_weight(weight: Tensor, scale: Tensor) -> Rows:
    """Return a matrix in FP8, transposed. All rows have one scale, the scalar `largest_scale` of the matrix's own
    rows."""
    scales = torch.empty(weight.shape[1], dtype=torch.float32, device=weight.device)
    return Rows(_transposed(weight, down=scale, out_scale=scales), scales)


def largest_scale(scale: Tensor, other: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Return the largest scale, or the largest product of the scales of two matrices with the same rows, and the number
    1: at `[0, 0]` and `[1, 0]` of the (2, 4) result, 16 bytes apart, as cuBLAS reads them. NaN if a scale is NaN."""
    out = torch.empty((2, 4), dtype=torch.float32, device=scale.device) if out is None else out
    if kernels := _triton(scale):
        kernels.largest(scale, other, out)
        return out
    out[0].fill_((scale if other is None else scale * other).amax().clamp(min=2.0**SMALLEST_EXPONENT))
    out[1].fill_(1.0)
    return out


def _new_rows(like: Tensor, width: int) -> Rows:
    values = torch.empty((len(like), width), dtype=E4M3, device=like.device)
    return Rows(values, torch.empty(len(like), dtype=torch.float32, device=like.device))


def _fill(out: Rows, wide: Tensor, lost: Tensor | None, bound: Tensor | None = None) -> Rows:
    """Write an fp32 matrix in FP8. The scale of a row follows from its largest element, or from the largest of
    `bound`."""
    out.scale.copy_(scale_of((wide if bound is None else bound).abs().amax(-1)))
    out.values.copy_(wide / out.scale[:, None])
    _count_lost(wide, out.values, lost)
    return out


def _count_lost(before: Tensor, after: Tensor, lost: Tensor | None) -> None:
    if lost is not None:
        before, after = before[::COUNTED_ROWS], after[::COUNTED_ROWS]
        lost[0] += ((before != 0) & (after.float() == 0)).sum()


def scale_of(largest: Tensor) -> Tensor:
    """Return the fp32 scale of rows with these largest magnitudes."""
    bits = largest.view(torch.int32)
    # 448 is 1.75 * 2^8: a larger fraction of `largest` needs the next exponent.
    exponent = ((bits + 0x1FFFFF) >> 23) - 127 - 8
    scale = torch.ldexp(torch.ones_like(largest), exponent.clamp(min=SMALLEST_EXPONENT))
    return torch.where(largest < torch.inf, scale, torch.nan)


def _transposed(
    x: Tensor,
    *,
    up: Tensor | None = None,
    more: Tensor | None = None,
    down: Tensor | None = None,
    gain: Tensor | None = None,
    out_scale: Tensor | None = None,
    lost: Tensor | None = None,
) -> Tensor:
    """Return x * (up * more / down)[:, None] * gain in e4m3, transposed: (rows, width) -> (width, rows). `down` is a
    vector over rows or a scalar, with which `out_scale` is filled."""
    rows, width = x.shape
    out = torch.empty((width, rows), dtype=E4M3, device=x.device)
    if kernels := _triton(x):
        kernels.transposed(x, up, more, down, gain, out, out_scale, lost)
        return out
    wide = x.float()
    for factor in (up, more):
        wide = wide if factor is None else wide * factor[:, None]
    wide = wide if gain is None else wide * gain
    if down is not None:
        wide = wide / (down[:, None] if down.dim() else down)
    out.copy_(wide.t())
    _count_lost(x.float(), out.t(), lost)
    if out_scale is not None and down is not None:
        out_scale.fill_(down)
    return out
