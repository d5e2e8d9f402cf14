"""Triton kernels that write FP8 operands. fp8.py allocates the results and has each formula in plain PyTorch; prefixes
in kernels are those of pointwise_triton.py.

e4m3 needs a GPU of compute capability 8.9 or newer.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.kernels.fused.pointwise_triton import launch, warps_of

COLUMNS = 4096
"""Elements of a row that a program holds at a time where it passes over the row twice."""
SCALES = 4096
"""Scales that a program reads at a time."""
TILE = 128
"""Rows and columns of a tile that a program transposes."""
SLOTS = tl.constexpr(32)
"""Equal to the constant of fp8.py; a test compares them."""


@triton.jit
def _exponent(largest):
    """The exponent of the scale of a row with this largest magnitude: see fp8.scale_of."""
    bits = largest.to(tl.int32, bitcast=True)
    return tl.maximum(((bits + 0x1FFFFF) >> 23) - 135, -126)


@triton.jit
def _power_of_2(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _store_scale(scale, i_row, largest, exponent):
    """Store a row's scale: NaN for a row that is not finite."""
    tl.store(scale + i_row, tl.where(largest < float("inf"), _power_of_2(exponent), float("nan")))


@triton.jit
def _inverse_scale(largest, exponent):
    """1 / scale, NaN for a row that is not finite: e4m3 has no infinity, and casts would saturate."""
    return tl.where(largest < float("inf"), _power_of_2(-exponent), float("nan"))


@triton.jit
def _lost(b_before, b_after):
    """The number of elements that became 0."""
    return tl.sum(((b_before != 0.0) & (b_after.to(tl.float32) == 0.0)).to(tl.int32), 0)


@triton.jit
def _largest_of(b_values):
    """The largest magnitude; infinity if one of the values is NaN, which tl.max would leave out."""
    b_magnitude = tl.abs(b_values)
    return tl.max(tl.where(b_magnitude == b_magnitude, b_magnitude, float("inf")), 0)


@triton.jit
def _quantize(x, out, scale, lost, width, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """One row in e4m3."""
    i_row = tl.program_id(0).to(tl.int64)
    o_column = tl.arange(0, BLOCK)  # [BLOCK]
    m_column = o_column < width
    b_x = tl.load(x + i_row * width + o_column, m_column, 0.0).to(tl.float32)
    _store_row(b_x, out, scale, lost, i_row, width, COUNTS, BLOCK)


@triton.jit
def _store_row(b_x, out, scale, lost, i_row, width, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """Store one row, which is in registers, and its scale."""
    o_column = tl.arange(0, BLOCK)  # [BLOCK]
    largest = _largest_of(b_x)
    exponent = _exponent(largest)
    b_out = (b_x * _inverse_scale(largest, exponent)).to(tl.float8e4nv)
    tl.store(out + i_row * width + o_column, b_out, o_column < width)
    _store_scale(scale, i_row, largest, exponent)
    if COUNTS:
        tl.atomic_add(lost + i_row % SLOTS, _lost(b_x, b_out).to(tl.int64))


@triton.jit
def _add_norm(
    x, delta, gain, out_x, out_y, out_scale, out_rstd, lost, width, eps,
    HAS_DELTA: tl.constexpr, COUNTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: as pointwise_triton._add_norm, with the norm in e4m3."""
    i_row = tl.program_id(0).to(tl.int64)
    o_column = tl.arange(0, BLOCK)  # [BLOCK]
    m_column = o_column < width
    o_x = i_row * width + o_column
    b_x = tl.load(x + o_x, m_column, 0.0).to(tl.float32)
    if HAS_DELTA:
        b_x += tl.load(delta + o_x, m_column, 0.0).to(tl.float32)
        b_x = b_x.to(out_x.dtype.element_ty).to(tl.float32)
        tl.store(out_x + o_x, b_x.to(out_x.dtype.element_ty), m_column)
    rstd = tl.rsqrt(tl.sum(b_x * b_x, 0) / width + eps)
    tl.store(out_rstd + i_row, rstd)
    b_y = b_x * rstd * tl.load(gain + o_column, m_column, 0.0).to(tl.float32)
    _store_row(b_y, out_y, out_scale, lost, i_row, width, COUNTS, BLOCK)


@triton.jit
def _swiglu(gate_up, out, scale, lost, width, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """One row: silu(gate) * up in e4m3."""
    i_row = tl.program_id(0).to(tl.int64)
    o_column = tl.arange(0, BLOCK)  # [BLOCK]
    m_column = o_column < width
    b_gate = tl.load(gate_up + i_row * 2 * width + o_column, m_column, 0.0).to(tl.float32)
    b_up = tl.load(gate_up + i_row * 2 * width + width + o_column, m_column, 0.0).to(tl.float32)
    _store_row(b_gate * tl.sigmoid(b_gate) * b_up, out, scale, lost, i_row, width, COUNTS, BLOCK)


@triton.jit
def _swiglu_gradients(grad, gate_up, o_gate, o_grad, width, m_column):
    """The gradients of gate and up, and silu(gate) * up."""
    b_gate = tl.load(gate_up + o_gate, m_column, 0.0).to(tl.float32)
    b_up = tl.load(gate_up + o_gate + width, m_column, 0.0).to(tl.float32)
    b_grad = tl.load(grad + o_grad, m_column, 0.0).to(tl.float32)
    b_sigmoid = tl.sigmoid(b_gate)
    b_silu = b_gate * b_sigmoid
    return b_grad * b_up * (b_sigmoid + b_silu * (1 - b_sigmoid)), b_grad * b_silu, b_silu * b_up


@triton.jit
def _swiglu_backward(
    grad, gate_up, gated_scale, out, scale, gated, lost, width, COUNTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: the gradients of gate and up in e4m3 with one scale, and silu(gate) * up. The row is read twice, first
    for its largest element; the second time it is in the cache."""
    i_row = tl.program_id(0).to(tl.int64)
    o_block = tl.arange(0, BLOCK)  # [BLOCK]
    b_largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        o_column = start + o_block
        o_gate, o_grad = i_row * 2 * width + o_column, i_row * width + o_column
        b_gate, b_up, _ = _swiglu_gradients(grad, gate_up, o_gate, o_grad, width, o_column < width)
        b_magnitude = tl.maximum(tl.abs(b_gate), tl.abs(b_up), propagate_nan=tl.PropagateNan.ALL)
        b_largest = tl.maximum(b_largest, b_magnitude, propagate_nan=tl.PropagateNan.ALL)
    largest = _largest_of(b_largest)
    exponent = _exponent(largest)
    inverse = _inverse_scale(largest, exponent)
    gated_inverse = 1.0 / tl.load(gated_scale + i_row)
    lost_count = tl.full((), 0, tl.int32)
    for start in range(0, width, BLOCK):
        o_column = start + o_block
        m_column = o_column < width
        o_gate, o_grad = i_row * 2 * width + o_column, i_row * width + o_column
        b_gate, b_up, b_gated = _swiglu_gradients(grad, gate_up, o_gate, o_grad, width, m_column)
        b_out_gate = (b_gate * inverse).to(tl.float8e4nv)
        b_out_up = (b_up * inverse).to(tl.float8e4nv)
        tl.store(out + o_gate, b_out_gate, m_column)
        tl.store(out + o_gate + width, b_out_up, m_column)
        tl.store(gated + o_grad, (b_gated * gated_inverse).to(tl.float8e4nv), m_column)
        if COUNTS:
            lost_count += _lost(b_gate, b_out_gate) + _lost(b_up, b_out_up)
    _store_scale(scale, i_row, largest, exponent)
    if COUNTS:
        tl.atomic_add(lost + i_row % SLOTS, lost_count.to(tl.int64))


@triton.jit
def _largest(scale, other, out, rows, HAS_OTHER: tl.constexpr, BLOCK: tl.constexpr):
    """The largest scale, or product of scales, NaN if one is; and the number 1, 16 bytes later."""
    o_block = tl.arange(0, BLOCK)  # [BLOCK]
    b_largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, rows, BLOCK):
        m_row = start + o_block < rows
        b_scale = tl.load(scale + start + o_block, m_row, 0.0)
        if HAS_OTHER:
            b_scale *= tl.load(other + start + o_block, m_row, 0.0)
        b_largest = tl.maximum(b_largest, b_scale, propagate_nan=tl.PropagateNan.ALL)
    largest = _largest_of(b_largest)
    tl.store(out, tl.where(largest < float("inf"), largest, float("nan")))
    tl.store(out + 4, 1.0)


@triton.jit
def _transposed(
    x, up, more, down, gain, out, out_scale, lost, rows, width,
    HAS_UP: tl.constexpr, HAS_MORE: tl.constexpr, DOWN: tl.constexpr, HAS_GAIN: tl.constexpr,
    FILLS_SCALE: tl.constexpr, COUNTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile: x * (up * more / down)[:, None] * gain in e4m3, transposed. DOWN: 0 for none, 1 for a vector over rows,
    2 for a scalar, with which out_scale is filled."""
    i_row = tl.program_id(0).to(tl.int64) * TILE
    i_column = tl.program_id(1).to(tl.int64) * TILE
    o_row = i_row + tl.arange(0, TILE)  # [TILE]
    o_column = i_column + tl.arange(0, TILE)  # [TILE]
    m_row, m_column = o_row < rows, o_column < width
    m_tile = m_row[:, None] & m_column[None, :]
    b_x = tl.load(x + o_row[:, None] * width + o_column[None, :], m_tile, 0.0)  # [TILE, TILE]
    b_out = b_x
    if HAS_UP or DOWN:
        b_factor = tl.full((TILE,), 1.0, tl.float32)
        if HAS_UP:
            b_factor = tl.load(up + o_row, m_row, 0.0)
        if HAS_MORE:
            b_factor *= tl.load(more + o_row, m_row, 0.0)
        if DOWN == 1:
            b_factor /= tl.load(down + o_row, m_row, 1.0)
        if DOWN == 2:
            b_factor /= tl.load(down)
        b_wide = b_x.to(tl.float32) * b_factor[:, None]
        if HAS_GAIN:
            b_wide *= tl.load(gain + o_column, m_column, 0.0).to(tl.float32)[None, :]
        b_out = b_wide.to(tl.float8e4nv)
        if COUNTS:
            b_lost = _lost(b_x.to(tl.float32), b_out)
            tl.atomic_add(lost + (tl.program_id(0) + tl.program_id(1)) % SLOTS, tl.sum(b_lost, 0).to(tl.int64))
    tl.store(out + o_column[:, None] * rows + o_row[None, :], tl.trans(b_out), m_column[:, None] & m_row[None, :])
    if FILLS_SCALE and tl.program_id(0) == 0:
        b_scale = tl.full((TILE,), 0.0, tl.float32) + tl.load(down)
        tl.store(out_scale + o_column, b_scale, m_column)


# -- launches ---------------------------------------------------------------------------------------------------------


def _or(t: Tensor | None, other: Tensor) -> Tensor:
    """The tensor, or one that stands for it in a kernel that does not read it."""
    return other if t is None else t


def quantize(x: Tensor, out: Tensor, scale: Tensor, lost: Tensor | None) -> None:
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    launch(
        _quantize, (rows,), x, out, scale, _or(lost, scale), width,
        COUNTS=lost is not None, BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip


def add_norm(
    x: Tensor, delta: Tensor | None, gain: Tensor, eps: float, out_x: Tensor, out_y: Tensor, out_scale: Tensor,
    out_rstd: Tensor, lost: Tensor | None,
) -> None:  # fmt: skip
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    launch(
        _add_norm, (rows,), x, _or(delta, x), gain, out_x, out_y, out_scale, out_rstd, _or(lost, out_scale), width, eps,
        HAS_DELTA=delta is not None, COUNTS=lost is not None, BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip


def swiglu(gate_up: Tensor, out: Tensor, scale: Tensor, lost: Tensor | None) -> None:
    rows, width = out.shape
    block = triton.next_power_of_2(width)
    launch(
        _swiglu, (rows,), gate_up, out, scale, _or(lost, scale), width,
        COUNTS=lost is not None, BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip


def swiglu_backward(
    grad: Tensor, gate_up: Tensor, gated_scale: Tensor, out: Tensor, scale: Tensor, gated: Tensor, lost: Tensor | None
) -> None:
    rows, width = grad.shape
    block = min(COLUMNS, triton.next_power_of_2(width))
    launch(
        _swiglu_backward, (rows,), grad, gate_up, gated_scale, out, scale, gated, _or(lost, scale), width,
        COUNTS=lost is not None, BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip


def largest(scale: Tensor, other: Tensor | None, out: Tensor) -> None:
    rows = len(scale)
    block = min(SCALES, triton.next_power_of_2(rows))
    launch(
        _largest, (1,), scale, _or(other, scale), out, rows,
        HAS_OTHER=other is not None, BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip


def transposed(
    x: Tensor, up: Tensor | None, more: Tensor | None, down: Tensor | None, gain: Tensor | None, out: Tensor,
    out_scale: Tensor | None, lost: Tensor | None,
) -> None:  # fmt: skip
    rows, width = x.shape
    flags: dict[str, Any] = {
        "HAS_UP": up is not None,
        "HAS_MORE": more is not None,
        "DOWN": 0 if down is None else 1 if down.dim() else 2,
        "HAS_GAIN": gain is not None,
        "FILLS_SCALE": out_scale is not None,
        "COUNTS": lost is not None,
    }
    grid = (triton.cdiv(rows, TILE), triton.cdiv(width, TILE))
    launch(
        _transposed, grid, x, *(_or(t, x) for t in (up, more, down, gain)), out, _or(out_scale, x), _or(lost, x),
        rows, width, **flags, TILE=TILE, num_warps=8,
    )  # fmt: skip
