"""Triton kernels that write FP8 operands. fp8.py allocates the results and has each formula in plain PyTorch; prefixes
in kernels are those of pointwise_triton.py.

e4m3 needs a GPU of compute capability 8.9 or newer.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.kernels.fused.pointwise_triton import launch, warps_of

COLUMNS = 4096
"""Elements of a row that a program holds at a time where it passes over the row twice."""
SCALES = 4096
"""Scales that a program reads at a time."""
TILE, TILE_WARPS = 128, 8
"""Rows and columns of a tile that a program transposes, and its warps. Triton (3.6, 3.7) transposes some other tiles,
such as 64 x 128 of fp32 with 4 warps, by ldmatrix, and puts words in wrong places."""
SLOTS, COUNTED_ROWS = tl.constexpr(32), tl.constexpr(16)
"""Equal to the constants of fp8.py; a test compares them."""
SMALLEST_SCALE = tl.constexpr(2.0**-126)
LARGEST_ZERO = tl.constexpr(2.0**-10)
"""The largest magnitude that becomes 0 in e4m3: half of its smallest number."""
SILU_SLOPE, SILU_NEGATIVE_SLOPE, SILU_NEGATIVE = tl.constexpr(1.1), tl.constexpr(0.5), tl.constexpr(0.28)
"""Equal to the constants of fp8.py."""


@triton.jit
def _exponent(largest):
    """Return the exponent of the scale of a row with this largest magnitude: see fp8.scale_of."""
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
    """Return 1 / scale, or NaN for a row that is not finite: e4m3 has no infinity, and casts would saturate."""
    return tl.where(largest < float("inf"), _power_of_2(-exponent), float("nan"))


@triton.jit
def _lost(i_row, b_before, inverse):
    """Return the number of elements that become 0 when multiplied by `inverse` and cast to e4m3; 0 in rows that are not
    counted."""
    count = tl.full((), 0, tl.int32)
    if i_row % COUNTED_ROWS == 0:
        count = tl.sum(((b_before != 0.0) & (tl.abs(b_before * inverse) <= LARGEST_ZERO)).to(tl.int32), 0)
    return count


@triton.jit
def _add_lost(lost, i_row, count):
    if i_row % COUNTED_ROWS == 0:
        tl.atomic_add(lost + (i_row // COUNTED_ROWS) % SLOTS, count.to(tl.int64), sem="relaxed")


@triton.jit
def _largest_of(b_values):
    """Return the largest magnitude; infinity if one of the values is NaN, which tl.max would ignore."""
    b_magnitude = tl.abs(b_values)
    return tl.max(tl.where(b_magnitude == b_magnitude, b_magnitude, float("inf")), 0)


@triton.jit
def _quantize(x, out, scale, lost, width, COUNTS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr):
    """Write one row in e4m3."""
    i_row = tl.program_id(0).to(tl.int64)
    x += i_row * width
    o_column = tl.arange(0, BLOCK)  # [BLOCK]
    b_x = tl.load(x + o_column, o_column < width, 0.0).to(tl.float32)
    b_rest = b_x
    if REST:
        o_rest = BLOCK + tl.arange(0, REST)  # [REST]
        b_rest = tl.load(x + o_rest, o_rest < width, 0.0).to(tl.float32)
    _store_row(b_x, b_rest, out, scale, lost, i_row, width, COUNTS, BLOCK, REST)


@triton.jit
def _store_row(
    b_x, b_rest, out, scale, lost, i_row, width,
    COUNTS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, WIDE: tl.constexpr = False,
):  # fmt: skip
    """Store one row from registers, and its scale. WIDE: the row is stored in a wider dtype."""
    largest = _largest_of(b_x)
    if REST:
        largest = tl.maximum(largest, _largest_of(b_rest))
    exponent = _exponent(largest)
    inverse = _inverse_scale(largest, exponent)
    factor = inverse
    if WIDE:
        factor = tl.full((), 1.0, tl.float32)
    out += i_row * width
    o_column = tl.arange(0, BLOCK)  # [BLOCK]
    tl.store(out + o_column, (b_x * factor).to(out.dtype.element_ty), o_column < width)
    if REST:
        o_rest = BLOCK + tl.arange(0, REST)  # [REST]
        tl.store(out + o_rest, (b_rest * factor).to(out.dtype.element_ty), o_rest < width)
    _store_scale(scale, i_row, largest, exponent)
    if COUNTS:
        count = _lost(i_row, b_x, inverse)
        if REST:
            count += _lost(i_row, b_rest, inverse)
        _add_lost(lost, i_row, count)


@triton.jit
def _sum_of(x, delta, out_x, o_x, m_column, HAS_DELTA: tl.constexpr):
    """Return part of a row of x + delta in fp32, and store it."""
    b_x = tl.load(x + o_x, m_column, 0.0).to(tl.float32)
    if HAS_DELTA:
        b_x += tl.load(delta + o_x, m_column, 0.0).to(tl.float32)
        b_x = b_x.to(out_x.dtype.element_ty).to(tl.float32)
        tl.store(out_x + o_x, b_x.to(out_x.dtype.element_ty), m_column)
    return b_x


@triton.jit
def _add_norm(
    x, delta, gain, out_x, out_y, out_scale, out_rstd, lost, width, eps,
    HAS_DELTA: tl.constexpr, WIDE: tl.constexpr, COUNTS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Compute one row of pointwise_triton._add_norm with the norm in e4m3; WIDE: in a wider dtype, with e4m3's
    scale."""
    i_row = tl.program_id(0).to(tl.int64)
    o_column = tl.arange(0, BLOCK)  # [BLOCK]
    m_column = o_column < width
    b_x = _sum_of(x, delta, out_x, i_row * width + o_column, m_column, HAS_DELTA)
    b_rest = b_x
    total = tl.sum(b_x * b_x, 0)
    if REST:
        o_rest = BLOCK + tl.arange(0, REST)  # [REST]
        b_rest = _sum_of(x, delta, out_x, i_row * width + o_rest, o_rest < width, HAS_DELTA)
        total += tl.sum(b_rest * b_rest, 0)
    rstd = tl.rsqrt(total / width + eps)
    tl.store(out_rstd + i_row, rstd)
    b_x = b_x * rstd * tl.load(gain + o_column, m_column, 0.0).to(tl.float32)
    if REST:
        o_rest = BLOCK + tl.arange(0, REST)  # [REST]
        b_rest = b_rest * rstd * tl.load(gain + o_rest, o_rest < width, 0.0).to(tl.float32)
    _store_row(b_x, b_rest, out_y, out_scale, lost, i_row, width, COUNTS, BLOCK, REST, WIDE)


@triton.jit
def _gated(gate_up, o_gate, width, m_column):
    """Return part of a row of silu(gate) * up."""
    b_gate = tl.load(gate_up + o_gate, m_column, 0.0).to(tl.float32)
    b_up = tl.load(gate_up + o_gate + width, m_column, 0.0).to(tl.float32)
    return b_gate * tl.sigmoid(b_gate) * b_up


@triton.jit
def _swiglu(gate_up, out, scale, lost, width, COUNTS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr):
    """Compute one row of silu(gate) * up in e4m3."""
    i_row = tl.program_id(0).to(tl.int64)
    o_column = tl.arange(0, BLOCK)  # [BLOCK]
    b_out = _gated(gate_up, i_row * 2 * width + o_column, width, o_column < width)
    b_rest = b_out
    if REST:
        o_rest = BLOCK + tl.arange(0, REST)  # [REST]
        b_rest = _gated(gate_up, i_row * 2 * width + o_rest, width, o_rest < width)
    _store_row(b_out, b_rest, out, scale, lost, i_row, width, COUNTS, BLOCK, REST)


@triton.jit
def _swiglu_backward(
    grad, gate_up, gated_scale, out, scale, gated, lost, width, COUNTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute for one row the gradients of gate and up in e4m3 with one scale, and silu(gate) * up. The row is read
    twice, first for an upper bound of the gradients' elements; the second time it is in the cache."""
    i_row = tl.program_id(0).to(tl.int64)
    grad += i_row * width
    gate_up += i_row * 2 * width
    out += i_row * 2 * width
    o_block = tl.arange(0, BLOCK)  # [BLOCK]
    b_largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        o_column = start + o_block
        m_column = o_column < width
        b_gate = tl.load(gate_up + o_column, m_column, 0.0).to(tl.float32)
        b_up = tl.load(gate_up + o_column + width, m_column, 0.0).to(tl.float32)
        b_grad = tl.load(grad + o_column, m_column, 0.0).to(tl.float32)
        b_slope = tl.where(b_gate < 0, SILU_NEGATIVE_SLOPE, SILU_SLOPE)
        b_bound = tl.maximum(tl.abs(b_up) * b_slope, tl.maximum(b_gate, SILU_NEGATIVE))
        b_largest = tl.maximum(b_largest, b_bound * tl.abs(b_grad), propagate_nan=tl.PropagateNan.ALL)
    largest = _largest_of(b_largest)
    exponent = _exponent(largest)
    inverse = _inverse_scale(largest, exponent)
    gated_inverse = 1.0 / tl.load(gated_scale + i_row)
    count = tl.full((), 0, tl.int32)
    for start in range(0, width, BLOCK):
        o_column = start + o_block
        m_column = o_column < width
        b_gate = tl.load(gate_up + o_column, m_column, 0.0).to(tl.float32)
        b_up = tl.load(gate_up + o_column + width, m_column, 0.0).to(tl.float32)
        b_grad = tl.load(grad + o_column, m_column, 0.0).to(tl.float32)
        b_sigmoid = tl.sigmoid(b_gate)
        b_silu = b_gate * b_sigmoid
        b_grad_gate = b_grad * b_up * (b_sigmoid + b_silu * (1 - b_sigmoid))
        b_grad_up = b_grad * b_silu
        tl.store(out + o_column, (b_grad_gate * inverse).to(tl.float8e4nv), m_column)
        tl.store(out + o_column + width, (b_grad_up * inverse).to(tl.float8e4nv), m_column)
        b_gated = b_silu * b_up * gated_inverse
        tl.store(gated + i_row * width + o_column, b_gated.to(tl.float8e4nv), m_column)
        if COUNTS:
            count += _lost(i_row, b_grad_gate, inverse) + _lost(i_row, b_grad_up, inverse)
    _store_scale(scale, i_row, largest, exponent)
    if COUNTS:
        _add_lost(lost, i_row, count)


@triton.jit
def _largest(scale, other, out, rows, HAS_OTHER: tl.constexpr, BLOCK: tl.constexpr):
    """Store the largest scale, or product of scales (NaN if one is NaN), and the number 1, 16 bytes later."""
    o_block = tl.arange(0, BLOCK)  # [BLOCK]
    b_largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, rows, BLOCK):
        m_row = start + o_block < rows
        b_scale = tl.load(scale + start + o_block, m_row, 0.0)
        if HAS_OTHER:
            b_scale *= tl.load(other + start + o_block, m_row, 0.0)
        b_largest = tl.maximum(b_largest, b_scale, propagate_nan=tl.PropagateNan.ALL)
    largest = tl.maximum(_largest_of(b_largest), SMALLEST_SCALE)
    tl.store(out, tl.where(largest < float("inf"), largest, float("nan")))
    tl.store(out + 4, 1.0)


@triton.jit
def _transposed(
    x, up, more, down, gain, out, out_scale, lost, rows, width,
    HAS_UP: tl.constexpr, HAS_MORE: tl.constexpr, DOWN: tl.constexpr, HAS_GAIN: tl.constexpr,
    FILLS_SCALE: tl.constexpr, COUNTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute a tile of x * (up * more / down)[:, None] * gain in e4m3, transposed. DOWN: 0 for none, 1 for a vector
    over rows, 2 for a scalar, with which out_scale is filled. `out` is int32: four rows of x form one word of the
    result, so that words are transposed, not bytes."""
    o_word = tl.program_id(0).to(tl.int64) * (TILE // 4) + tl.arange(0, TILE // 4)  # [TILE // 4]
    o_column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)  # [TILE]
    m_word, m_column = o_word < rows // 4, o_column < width
    m_tile = m_word[:, None] & m_column[None, :]
    b_words = tl.zeros((TILE // 4, TILE), tl.int32)
    for part in tl.static_range(4):
        o_row = o_word * 4 + part
        b_x = tl.load(x + o_row[:, None] * width + o_column[None, :], m_tile, 0.0)
        b_out = b_x
        if HAS_UP or DOWN:
            b_wide = b_x.to(tl.float32)
            if HAS_UP:
                b_factor = tl.load(up + o_row, m_word, 0.0)
                if HAS_MORE:
                    b_factor *= tl.load(more + o_row, m_word, 0.0)
                if DOWN == 2:
                    b_factor /= tl.load(down)
                b_wide *= b_factor[:, None]
            if HAS_GAIN:
                b_wide *= tl.load(gain + o_column, m_column, 0.0).to(tl.float32)[None, :]
            if DOWN == 1:  # last, in add_norm's order: up / down overflows in a row of zeros
                b_wide *= (1.0 / tl.load(down + o_row, m_word, 1.0))[:, None]
            if DOWN == 2 and not HAS_UP:
                b_wide *= 1.0 / tl.load(down)
            b_out = b_wide.to(tl.float8e4nv)
            if COUNTS and part == 0:
                b_lost = (b_x.to(tl.float32) != 0.0) & (tl.abs(b_wide) <= LARGEST_ZERO)
                b_lost &= (o_row % COUNTED_ROWS == 0)[:, None]
                count = tl.sum(tl.sum(b_lost.to(tl.int32), 1), 0).to(tl.int64)
                tl.atomic_add(lost + (tl.program_id(0) + tl.program_id(1)) % SLOTS, count, sem="relaxed")
        b_words |= b_out.to(tl.uint8, bitcast=True).to(tl.int32) << (8 * part)
    o_out = o_column[:, None] * (rows // 4) + o_word[None, :]
    tl.store(out + o_out, tl.trans(b_words), m_column[:, None] & m_word[None, :])
    if FILLS_SCALE and tl.program_id(0) == 0:
        b_scale = tl.full((TILE,), 0.0, tl.float32) + tl.load(down)
        tl.store(out_scale + o_column, b_scale, m_column)


# -- launches ---------------------------------------------------------------------------------------------------------


def _or(t: Tensor | None, other: Tensor) -> Tensor:
    """Return the tensor, or a placeholder for a tensor that the kernel does not read."""
    return other if t is None else t


def _blocks(width: int) -> dict[str, int]:
    """Return a row's width as two powers of two with few unused lanes: 2,560 = 2,048 + 512."""
    block = 1 << (width.bit_length() - 1)
    return {"BLOCK": block, "REST": triton.next_power_of_2(width - block) if width > block else 0}


def _row_options(width: int) -> dict[str, int]:
    blocks = _blocks(width)
    return {**blocks, "num_warps": max(1, min(16, blocks["BLOCK"] // 512))}


def quantize(x: Tensor, out: Tensor, scale: Tensor, lost: Tensor | None) -> None:
    rows, width = x.shape
    launch(
        _quantize, (rows,), x, out, scale, _or(lost, scale), width, COUNTS=lost is not None, **_row_options(width)
    )  # fmt: skip


def add_norm(
    x: Tensor, delta: Tensor | None, gain: Tensor, eps: float, out_x: Tensor, out_y: Tensor, out_scale: Tensor,
    out_rstd: Tensor, lost: Tensor | None,
) -> None:  # fmt: skip
    rows, width = x.shape
    launch(
        _add_norm, (rows,), x, _or(delta, x), gain, out_x, out_y, out_scale, out_rstd, _or(lost, out_scale), width, eps,
        HAS_DELTA=delta is not None, WIDE=out_y.element_size() > 1, COUNTS=lost is not None, **_row_options(width),
    )  # fmt: skip


def swiglu(gate_up: Tensor, out: Tensor, scale: Tensor, lost: Tensor | None) -> None:
    rows, width = out.shape
    launch(
        _swiglu, (rows,), gate_up, out, scale, _or(lost, scale), width, COUNTS=lost is not None, **_row_options(width)
    )  # fmt: skip


def swiglu_backward(
    grad: Tensor, gate_up: Tensor, gated_scale: Tensor, out: Tensor, scale: Tensor, gated: Tensor, lost: Tensor | None
) -> None:
    rows, width = grad.shape
    block = min(COLUMNS, triton.next_power_of_2(width))
    launch(
        _swiglu_backward, (rows,), grad, gate_up, gated_scale, out, scale, gated, _or(lost, scale), width,
        COUNTS=lost is not None, BLOCK=block, num_warps=max(1, block // 512),
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
    words = out.view(torch.int32)
    launch(
        _transposed, grid, x, *(_or(t, x) for t in (up, more, down, gain)), words, _or(out_scale, x), _or(lost, x),
        rows, width, **flags, TILE=TILE, num_warps=TILE_WARPS,
    )  # fmt: skip
