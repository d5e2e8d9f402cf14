"""Triton kernels for everything in a training step that is not a matmul. Each kernel reads its inputs once and writes
its results once, where separate operators would pass over memory several times.

The caller, pointwise.py, allocates the results; it also has each formula in plain PyTorch. Prefixes in kernels: i_ is
the index of a program or row, o_ offsets, m_ a mask, b_ a block of values in registers. Row offsets are 64 bits wide.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.kernels.flash.operators import is_plain

NORM_PROGRAMS = 264
"""Programs that share the rows of a norm's backward pass: each leaves one partial sum of the gain's gradient. Twice as
many from MANY_ROWS on."""
MANY_ROWS = 8192
SUM_ROWS, SUM_COLUMNS = 64, 16
"""Tile of partial sums that a program adds up at a time."""
ROTARY_ELEMENTS = 4096
"""Elements that a program rotates."""
SWIGLU_COLUMNS = 1024
"""Elements of a row that a program computes."""
LOGITS = 2048
"""Logits that a program holds at a time."""
ADAMW_WEIGHTS = 1024
"""Weights that a program updates."""
CHECKSUM_ELEMENTS = 1024
"""Elements that a program of a checksum reads at a time."""


@triton.jit
def _add_norm(
    x, delta, gain, out_x, out_y, out_rstd, width, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one row: out_x = x + delta, out_rstd = 1 / RMS(out_x), out_y = out_x * out_rstd * gain."""
    i_row = tl.program_id(0).to(tl.int64)
    o_column = tl.arange(0, BLOCK)  # [BLOCK]
    m_column = o_column < width
    o_x = i_row * width + o_column
    b_x = tl.load(x + o_x, m_column, 0.0).to(tl.float32)
    if HAS_DELTA:
        b_x += tl.load(delta + o_x, m_column, 0.0).to(tl.float32)
        # Later blocks read the rounded sum, so the norm is computed from the rounded sum, too.
        b_x = b_x.to(out_x.dtype.element_ty).to(tl.float32)
        tl.store(out_x + o_x, b_x.to(out_x.dtype.element_ty), m_column)
    rstd = tl.rsqrt(tl.sum(b_x * b_x, 0) / width + eps)
    b_y = b_x * rstd * tl.load(gain + o_column, m_column, 0.0).to(tl.float32)
    tl.store(out_y + o_x, b_y.to(out_y.dtype.element_ty), m_column)
    tl.store(out_rstd + i_row, rstd)


@triton.jit
def _add_norm_backward(
    grad_y, grad_x, x, rstd, gain, out_x, out_gain, rows, width,
    HAS_GRAD_X: tl.constexpr, RECOMPUTES_Y: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute for every num_programs-th row the gradient of x, and one partial sum of the gain's gradient."""
    i_program = tl.program_id(0)
    o_column = tl.arange(0, BLOCK)  # [BLOCK]
    m_column = o_column < width
    b_gain = tl.load(gain + o_column, m_column, 0.0).to(tl.float32)
    b_grad_gain = tl.zeros((BLOCK,), tl.float32)
    for i_row in range(i_program, rows, tl.num_programs(0)):
        o_x = tl.cast(i_row, tl.int64) * width + o_column
        row_rstd = tl.load(rstd + i_row)
        b_normed = tl.load(x + o_x, m_column, 0.0).to(tl.float32) * row_rstd
        b_grad_y = tl.load(grad_y + o_x, m_column, 0.0).to(tl.float32)
        b_grad_gain += b_grad_y * b_normed
        b_grad_normed = b_grad_y * b_gain
        b_grad_x = row_rstd * (b_grad_normed - b_normed * (tl.sum(b_grad_normed * b_normed, 0) / width))
        if HAS_GRAD_X:
            b_grad_x += tl.load(grad_x + o_x, m_column, 0.0).to(tl.float32)
        tl.store(out_x + o_x, b_grad_x.to(out_x.dtype.element_ty), m_column)
        if RECOMPUTES_Y:  # grad_y has been read: its memory takes the norm's output, which forward did not keep
            tl.store(grad_y + o_x, (b_normed * b_gain).to(grad_y.dtype.element_ty), m_column)
    tl.store(out_gain + i_program * width + o_column, b_grad_gain, m_column)


@triton.jit
def _column_sums(x, out, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the sums of COLUMNS columns over all rows."""
    o_column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]  # [1, COLUMNS]
    b_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rows, ROWS):
        o_row = start + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
        b_sum += tl.load(x + o_row * width + o_column, (o_row < rows) & (o_column < width), 0.0)
    tl.store(out + o_column, tl.sum(b_sum, 0)[None, :], o_column < width)


@triton.jit
def _rotate(
    q, k, v, out, cos, sin, length, heads, kv_heads, half_dim,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, angle_batch,
    SIGN: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads of one row of q or k, or copy those of v: (batch, row, head, dim) into (batch, row, heads + 2
    * kv_heads, dim). q_batch, q_row and so on are strides."""
    half_dim = _aligned(half_dim, HALVES)
    i_row = tl.program_id(0).to(tl.int64)
    i_part = tl.program_id(1)
    i_batch, i_position = i_row // length, i_row % length
    if i_part == 0:
        source, head_stride = q + i_batch * q_batch + i_position * q_row, q_head
        own_heads, first_head = heads, 0
    elif i_part == 1:
        source, head_stride = k + i_batch * k_batch + i_position * k_row, k_head
        own_heads, first_head = kv_heads, heads
    else:
        source, head_stride = v + i_batch * v_batch + i_position * v_row, v_head
        own_heads, first_head = kv_heads, heads + kv_heads
    # Heads, then dimensions: the compiler sees that a row's elements are contiguous, and moves 16 bytes at a time.
    o_head = (tl.program_id(2) * HEADS + tl.arange(0, HEADS))[:, None]  # [HEADS, 1]
    o_dim, m_dim = _dimensions(half_dim, PAIRS, HALVES)  # [1, 2 * PAIRS]
    m_head = (o_head < own_heads) & m_dim
    b_x = tl.load(source + o_head * head_stride + o_dim, m_head, 0.0)  # [HEADS, 2 * PAIRS]
    if i_part < 2:
        i_angle = _angle_row(i_batch, i_position, angle_batch, HALVES)
        b_rotated = _rotated(b_x.to(tl.float32), cos, sin, i_angle, half_dim, SIGN, HEADS, PAIRS, HALVES)
        b_x = b_rotated.to(b_x.dtype)
    o_row = i_row * (heads + 2 * kv_heads) + first_head
    tl.store(out + (o_row + o_head) * 2 * half_dim + o_dim, b_x.to(out.dtype.element_ty), m_head)


@triton.jit
def _dimensions(half_dim, PAIRS: tl.constexpr, HALVES: tl.constexpr):
    """Return the offsets of a head's dimensions, [1, 2 * PAIRS], and a mask of those that exist: in order to rotate
    neighbours; with HALVES to rotate (i, i + half_dim), each half padded to PAIRS."""
    o_dim = tl.arange(0, 2 * PAIRS)[None, :]
    if HALVES:
        o_pair = o_dim % PAIRS
        return o_dim // PAIRS * half_dim + o_pair, o_pair < half_dim
    return o_dim, o_dim < 2 * half_dim


@triton.jit
def _aligned(half_dim, HALVES: tl.constexpr):
    """Return half_dim, of which HALVES is a divisor: this tells the compiler the alignment of the second half."""
    if HALVES:
        return half_dim // HALVES * HALVES
    return half_dim


@triton.jit
def _angle_row(i_batch, i_position, angle_batch, HALVES: tl.constexpr):
    """Return the row in the tables of cos and sin. With HALVES each batch item may have its own rows."""
    if HALVES:
        return i_batch * angle_batch + i_position
    return i_position


@triton.jit
def _rotated(
    b_x, cos, sin, i_angle, half_dim,
    SIGN: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Return heads of one position in fp32, [HEADS, 2 * PAIRS], rotated forwards (SIGN 1) or backwards (-1)."""
    o_pair = tl.arange(0, PAIRS)
    if HALVES:
        b_first, b_second = tl.split(b_x.reshape(HEADS, 2, PAIRS).permute(0, 2, 1))  # [HEADS, PAIRS]
        o_half = i_angle * 2 * half_dim + o_pair
        b_cos_half = tl.load(cos + o_half, o_pair < half_dim, 0.0).to(tl.float32)[None, :]
        b_sin_half = tl.load(sin + o_half, o_pair < half_dim, 0.0).to(tl.float32)[None, :] * SIGN
        b_halves = tl.join(b_first * b_cos_half - b_second * b_sin_half, b_second * b_cos_half + b_first * b_sin_half)
        return b_halves.permute(0, 2, 1).reshape(HEADS, 2 * PAIRS)
    b_even, b_odd = tl.split(b_x.reshape(HEADS, PAIRS, 2))  # [HEADS, PAIRS]
    o_angle = i_angle * 2 * half_dim + 2 * o_pair
    b_cos = tl.load(cos + o_angle, o_pair < half_dim, 0.0)[None, :]
    # The table holds -sin at even and sin at odd positions.
    b_sin = tl.load(sin + o_angle + 1, o_pair < half_dim, 0.0)[None, :] * SIGN
    b_rotated = tl.join(b_even * b_cos - b_odd * b_sin, b_odd * b_cos + b_even * b_sin)
    return b_rotated.reshape(HEADS, 2 * PAIRS)


@triton.jit
def _norm_rotate(
    q, k, q_gain, k_gain, out, cos, sin, length, heads, kv_heads, half_dim, eps,
    batch_stride, row_stride, angle_batch, HEADS: tl.constexpr, PAIRS: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate HEADS heads of one row of q or k into (batch, row, heads + kv_heads, dim). q and k are parts
    of the same rows."""
    half_dim = _aligned(half_dim, HALVES)
    i_row = tl.program_id(0).to(tl.int64)
    i_batch, i_position = i_row // length, i_row % length
    if tl.program_id(1) == 0:
        source, gain, own_heads, first_head = q, q_gain, heads, 0
    else:
        source, gain, own_heads, first_head = k, k_gain, kv_heads, heads
    o_head = (tl.program_id(2) * HEADS + tl.arange(0, HEADS))[:, None]  # [HEADS, 1]
    o_dim, m_dim = _dimensions(half_dim, PAIRS, HALVES)  # [1, 2 * PAIRS]
    m_head = (o_head < own_heads) & m_dim
    o_source = i_batch * batch_stride + i_position * row_stride + o_head * 2 * half_dim + o_dim
    b_x = tl.load(source + o_source, m_head, 0.0).to(tl.float32)  # [HEADS, 2 * PAIRS]
    b_rstd = tl.rsqrt(tl.sum(b_x * b_x, 1) / (2 * half_dim) + eps)[:, None]
    b_gain = tl.load(gain + o_dim, m_dim, 0.0).to(tl.float32)
    # The norm's output is rounded, as that of a norm in memory would be.
    b_y = (b_x * b_rstd * b_gain).to(out.dtype.element_ty).to(tl.float32)
    i_angle = _angle_row(i_batch, i_position, angle_batch, HALVES)
    b_y = _rotated(b_y, cos, sin, i_angle, half_dim, 1.0, HEADS, PAIRS, HALVES)
    o_row = i_row * (heads + kv_heads) + first_head
    tl.store(out + (o_row + o_head) * 2 * half_dim + o_dim, b_y.to(out.dtype.element_ty), m_head)


@triton.jit
def _norm_rotate_backward(
    dq, dk, dv, q, k, q_gain, k_gain, out, partial, cos, sin, rows, length, heads, kv_heads, half_dim, eps,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, batch_stride, row_stride,
    angle_batch, HEADS: tl.constexpr, PAIRS: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Compute for every num_programs-th row of q, k or v the gradient before the norm, into (batch, row, heads + 2 *
    kv_heads, dim), and a partial sum of the gain's gradient. q_batch and so on are strides of the gradients; q and k
    are parts of the same rows."""
    half_dim = _aligned(half_dim, HALVES)
    i_program, i_part = tl.program_id(0), tl.program_id(1)
    if i_part == 0:
        grad, source, gain, own_heads, first_head = dq, q, q_gain, heads, 0
        grad_batch, grad_row, grad_head = q_batch, q_row, q_head
    elif i_part == 1:
        grad, source, gain, own_heads, first_head = dk, k, k_gain, kv_heads, heads
        grad_batch, grad_row, grad_head = k_batch, k_row, k_head
    else:
        grad, source, gain, own_heads, first_head = dv, k, k_gain, kv_heads, heads + kv_heads
        grad_batch, grad_row, grad_head = v_batch, v_row, v_head
    o_dim, m_dim = _dimensions(half_dim, PAIRS, HALVES)  # [1, 2 * PAIRS]
    b_gain = tl.load(gain + o_dim, m_dim, 0.0).to(tl.float32)
    b_grad_gain = tl.zeros((HEADS, 2 * PAIRS), tl.float32)
    for i_row in range(i_program, rows, tl.num_programs(0)):
        i_wide = tl.cast(i_row, tl.int64)
        i_batch, i_position = i_wide // length, i_wide % length
        for start in range(0, own_heads, HEADS):
            o_head = (start + tl.arange(0, HEADS))[:, None]  # [HEADS, 1]
            m_head = (o_head < own_heads) & m_dim
            o_grad = i_batch * grad_batch + i_position * grad_row + o_head * grad_head + o_dim
            b_grad = tl.load(grad + o_grad, m_head, 0.0).to(tl.float32)  # [HEADS, 2 * PAIRS]
            if i_part < 2:
                i_angle = _angle_row(i_batch, i_position, angle_batch, HALVES)
                b_grad = _rotated(b_grad, cos, sin, i_angle, half_dim, -1.0, HEADS, PAIRS, HALVES)
                o_x = i_batch * batch_stride + i_position * row_stride + o_head * 2 * half_dim + o_dim
                b_x = tl.load(source + o_x, m_head, 0.0).to(tl.float32)
                b_rstd = tl.rsqrt(tl.sum(b_x * b_x, 1) / (2 * half_dim) + eps)[:, None]
                b_normed = b_x * b_rstd
                b_grad_gain += b_grad * b_normed
                b_grad *= b_gain
                b_mean = (tl.sum(b_grad * b_normed, 1) / (2 * half_dim))[:, None]
                b_grad = b_rstd * (b_grad - b_normed * b_mean)
            o_row = i_wide * (heads + 2 * kv_heads) + first_head
            tl.store(out + (o_row + o_head) * 2 * half_dim + o_dim, b_grad.to(out.dtype.element_ty), m_head)
    if i_part < 2:
        o_partial = (i_part * tl.num_programs(0) + i_program) * 2 * half_dim + o_dim
        tl.store(partial + o_partial, tl.sum(b_grad_gain, 0)[None, :], m_dim)


@triton.jit
def _swiglu(gate_up, out, width, BLOCK: tl.constexpr):
    """Compute part of one row of silu(gate) * up."""
    i_row = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    m_column = o_column < width
    b_gate = tl.load(gate_up + i_row * 2 * width + o_column, m_column, 0.0).to(tl.float32)
    b_up = tl.load(gate_up + i_row * 2 * width + width + o_column, m_column, 0.0).to(tl.float32)
    b_out = b_gate * tl.sigmoid(b_gate) * b_up
    tl.store(out + i_row * width + o_column, b_out.to(out.dtype.element_ty), m_column)


@triton.jit
def _swiglu_backward(grad, gate_up, out, width, BLOCK: tl.constexpr):
    """Compute for part of one row the gradients of gate and up, and silu(gate) * up in place of `grad`."""
    i_row = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    m_column = o_column < width
    o_gate = i_row * 2 * width + o_column
    b_gate = tl.load(gate_up + o_gate, m_column, 0.0).to(tl.float32)
    b_up = tl.load(gate_up + o_gate + width, m_column, 0.0).to(tl.float32)
    b_grad = tl.load(grad + i_row * width + o_column, m_column, 0.0).to(tl.float32)
    b_sigmoid = tl.sigmoid(b_gate)
    b_silu = b_gate * b_sigmoid
    tl.store(out + o_gate, (b_grad * b_up * (b_sigmoid + b_silu * (1 - b_sigmoid))).to(out.dtype.element_ty), m_column)
    tl.store(out + o_gate + width, (b_grad * b_silu).to(out.dtype.element_ty), m_column)
    # `grad` has been read: its memory takes forward's output, which forward did not keep.
    tl.store(grad + i_row * width + o_column, (b_silu * b_up).to(grad.dtype.element_ty), m_column)


@triton.jit
def _cross_entropy(logits, targets, losses, weight, vocabulary, stride, ignored, BLOCK: tl.constexpr):
    """Compute the loss of one row; its logits become the gradient of `weight` times that loss."""
    i_row = tl.program_id(0).to(tl.int64)
    logits += i_row * stride
    target = tl.load(targets + i_row)
    b_max = tl.full((BLOCK,), float("-inf"), tl.float32)  # running maximum and sum of every lane
    b_sum = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        o_column = start + tl.arange(0, BLOCK)  # [BLOCK]
        b_logits = tl.load(logits + o_column, o_column < vocabulary, float("-inf")).to(tl.float32)
        b_new_max = tl.maximum(b_max, b_logits)
        # A lane that has seen nothing but -inf has no finite maximum to subtract.
        b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_sum = b_sum * tl.exp(b_max - b_shift) + tl.exp(b_logits - b_shift)
        b_max = b_new_max
    row_max = tl.max(b_max, 0)
    lse = tl.log(tl.sum(b_sum * tl.exp(b_max - row_max), 0)) + row_max
    is_token = (target >= 0) & (target < vocabulary)
    # A target outside the vocabulary must not pass unnoticed: its loss is NaN.
    target_logit = tl.load(logits + target, is_token, float("nan")).to(tl.float32)
    counts = target != ignored
    tl.store(losses + i_row, tl.where(counts, lse - target_logit, 0.0))
    row_weight = tl.where(counts, tl.load(weight), 0.0)
    for start in range(0, vocabulary, BLOCK):
        o_column = start + tl.arange(0, BLOCK)  # [BLOCK]
        m_column = o_column < vocabulary
        b_logits = tl.load(logits + o_column, m_column, 0.0).to(tl.float32)
        b_grad = (tl.exp(b_logits - lse) - tl.where(o_column == target, 1.0, 0.0)) * row_weight
        tl.store(logits + o_column, tl.where(counts, b_grad, 0.0).to(logits.dtype.element_ty), m_column)


@triton.jit
def _adamw(
    weights, low_bits, grads, mean, square, scalars, count, beta1, beta2, eps, decay,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update BLOCK weights. `scalars`: see pointwise.adamw_."""
    o_weight = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    if tl.load(scalars + 4) != 0:
        m_weight = o_weight < count
        rate = tl.load(scalars)
        b_grad = tl.load(grads + o_weight, m_weight, 0.0).to(tl.float32) * tl.load(scalars + 1)
        b_mean = tl.load(mean + o_weight, m_weight, 0.0).to(tl.float32)
        b_mean += (b_grad - b_mean) * (1 - beta1)
        b_square = tl.load(square + o_weight, m_weight, 0.0).to(tl.float32) * beta2 + b_grad * b_grad * (1 - beta2)
        if SPLIT:
            b_high = tl.load(weights + o_weight, m_weight, 0.0).to(tl.int16, bitcast=True).to(tl.int32)
            b_low = tl.load(low_bits + o_weight, m_weight, 0).to(tl.int32)
            b_weight = ((b_high << 16) + b_low).to(tl.float32, bitcast=True)
        else:
            b_weight = tl.load(weights + o_weight, m_weight, 0.0).to(tl.float32)
        b_weight *= 1 - rate * decay
        b_weight -= rate / tl.load(scalars + 2) * b_mean / (tl.sqrt_rn(b_square) / tl.load(scalars + 3) + eps)
        tl.store(mean + o_weight, b_mean, m_weight)
        tl.store(square + o_weight, b_square, m_weight)
        if SPLIT:
            b_bits = b_weight.to(tl.int32, bitcast=True)
            b_high = (b_bits + 0x8000) >> 16
            tl.store(weights + o_weight, b_high.to(tl.int16).to(tl.bfloat16, bitcast=True), m_weight)
            tl.store(low_bits + o_weight, (b_bits - (b_high << 16)).to(tl.int16), m_weight)
        else:
            tl.store(weights + o_weight, b_weight, m_weight)


@triton.jit
def _checksums(bits, out, count, ELEMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sum modulo 2^64 of ELEMENTS integers, each times an odd number."""
    i_program = tl.program_id(0).to(tl.int64)
    o_block = tl.arange(0, BLOCK)  # [BLOCK]
    b_sum = tl.zeros([BLOCK], tl.int64)
    for start in range(0, ELEMENTS, BLOCK):
        o_bits = i_program * ELEMENTS + start + o_block
        b_bits = tl.load(bits + o_bits, o_bits < count, 0).to(tl.int64)
        b_sum += b_bits * (2 * (start + o_block) + 1).to(tl.int64)
    tl.store(out + i_program, tl.sum(b_sum, 0))


# -- launches ---------------------------------------------------------------------------------------------------------


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **meta: Any) -> None:
    """Launch a kernel. Does nothing for tensors without memory, such as those of a trace: results are allocated."""
    if 0 in grid or not is_plain(arguments[0]):
        return
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, **meta)


def warps_of(block: int) -> int:
    """Return the warps of a program that holds this many elements of a row."""
    return max(1, min(16, block // 256))


def add_norm(
    x: Tensor, delta: Tensor | None, gain: Tensor, eps: float, out_x: Tensor, out_y: Tensor, out_rstd: Tensor
) -> None:
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    launch(
        _add_norm, (rows,), x, x if delta is None else delta, gain, out_x, out_y, out_rstd, width, eps,
        HAS_DELTA=delta is not None, BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip


def add_norm_backward(
    grad_y: Tensor, grad_x: Tensor | None, x: Tensor, rstd: Tensor, gain: Tensor, out_x: Tensor, recompute_y: bool
) -> Tensor:
    """Write the gradient of x and return the gain's gradient, in fp32."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    programs = min(rows, NORM_PROGRAMS if rows < MANY_ROWS else 2 * NORM_PROGRAMS)
    partial = torch.empty((programs, width), dtype=torch.float32, device=x.device)
    launch(
        _add_norm_backward, (programs,), grad_y, x if grad_x is None else grad_x, x, rstd, gain, out_x, partial,
        rows, width, HAS_GRAD_X=grad_x is not None, RECOMPUTES_Y=recompute_y, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return _summed(partial)


def _summed(partial: Tensor) -> Tensor:
    """Return the sum of the rows of an fp32 matrix."""
    programs, width = partial.shape
    out = torch.empty(width, dtype=torch.float32, device=partial.device)
    launch(
        _column_sums, (triton.cdiv(width, SUM_COLUMNS),), partial, out, programs, width,
        ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out


def rotate(
    q: Tensor, k: Tensor, v: Tensor | None, cos: Tensor, sin: Tensor, out: Tensor, sign: float, halves: bool
) -> None:
    """Rotate q and k, and copy v. q, k, v: (batch, rows, heads, dim) with contiguous rows; out: (batch, rows, heads + 2
    * kv_heads, dim). Without v its part of `out` stays as it is. sign: 1.0, or -1.0 to rotate backwards."""
    batch, length, heads, dim = q.shape
    pairs, block_heads = _rotary_block(heads, dim)
    grid = (batch * length, 2 if v is None else 3, triton.cdiv(heads, block_heads))
    third = k if v is None else v
    strides = [stride for t in (q, k, third) for stride in t.stride()[:3]]
    launch(
        _rotate, grid, q, k, third, out, cos, sin, length, heads, k.shape[2], dim // 2, *strides,
        _angle_batch(cos, halves), SIGN=sign, HEADS=block_heads, PAIRS=pairs, HALVES=_alignment(dim, halves),
        num_warps=4,
    )  # fmt: skip


def _rotary_block(heads: int, dim: int) -> tuple[int, int]:
    """Return the number of pairs of a head, and of heads, that a program rotates."""
    pairs = triton.next_power_of_2(dim // 2)
    return pairs, max(1, min(ROTARY_ELEMENTS // (2 * pairs), triton.next_power_of_2(heads)))


def _alignment(dim: int, halves: bool) -> int:
    """Return HALVES for the kernels: the largest power of 2, up to 16, that divides half of `dim`; 0 to rotate
    neighbours."""
    return math.gcd(dim // 2, 16) if halves else 0


def _angle_batch(cos: Tensor, halves: bool) -> int:
    """Return the rows between the tables of two batch items, (batch or 1, rows, dim)."""
    return cos.shape[1] if halves and len(cos) > 1 else 0


def norm_rotate(
    q: Tensor, k: Tensor, q_gain: Tensor, k_gain: Tensor, eps: float, cos: Tensor, sin: Tensor, out: Tensor,
    halves: bool,
) -> None:  # fmt: skip
    """Normalise and rotate q and k, parts of the same rows. (batch, rows, heads, dim)"""
    batch, length, heads, dim = q.shape
    pairs, block_heads = _rotary_block(heads, dim)
    grid = (batch * length, 2, triton.cdiv(heads, block_heads))
    launch(
        _norm_rotate, grid, q, k, q_gain, k_gain, out, cos, sin, length, heads, k.shape[2], dim // 2, eps,
        *q.stride()[:2], _angle_batch(cos, halves), HEADS=block_heads, PAIRS=pairs, HALVES=_alignment(dim, halves),
        num_warps=4,
    )  # fmt: skip


def norm_rotate_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, q: Tensor, k: Tensor, q_gain: Tensor, k_gain: Tensor, eps: float,
    cos: Tensor, sin: Tensor, out: Tensor, halves: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write the gradient of qkv and return those of the gains, in fp32."""
    batch, length, heads, dim = q.shape
    rows = batch * length
    pairs, block_heads = _rotary_block(heads, dim)
    programs = min(rows, NORM_PROGRAMS if rows < MANY_ROWS else 2 * NORM_PROGRAMS)
    partial = torch.empty((2, programs, dim), dtype=torch.float32, device=q.device)
    strides = [stride for t in (dq, dk, dv) for stride in t.stride()[:3]]
    launch(
        _norm_rotate_backward, (programs, 3), dq, dk, dv, q, k, q_gain, k_gain, out, partial, cos, sin,
        rows, length, heads, k.shape[2], dim // 2, eps, *strides, *q.stride()[:2], _angle_batch(cos, halves),
        HEADS=block_heads, PAIRS=pairs, HALVES=_alignment(dim, halves), num_warps=4,
    )  # fmt: skip
    return _summed(partial[0]), _summed(partial[1])


def swiglu(gate_up: Tensor, out: Tensor) -> None:
    rows, width = out.shape
    block = min(SWIGLU_COLUMNS, triton.next_power_of_2(width))
    grid = (rows, triton.cdiv(width, block))
    launch(_swiglu, grid, gate_up, out, width, BLOCK=block, num_warps=warps_of(block))


def swiglu_backward(grad: Tensor, gate_up: Tensor, out: Tensor) -> None:
    rows, width = grad.shape
    block = min(SWIGLU_COLUMNS, triton.next_power_of_2(width))
    grid = (rows, triton.cdiv(width, block))
    launch(_swiglu_backward, grid, grad, gate_up, out, width, BLOCK=block, num_warps=warps_of(block))


def cross_entropy(logits: Tensor, targets: Tensor, losses: Tensor, weight: Tensor, ignored: int) -> None:
    rows, vocabulary = logits.shape
    block = min(LOGITS, triton.next_power_of_2(vocabulary))
    launch(
        _cross_entropy, (rows,), logits, targets, losses, weight, vocabulary, logits.stride(0), ignored,
        BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip


def adamw(
    weights: Tensor, low_bits: Tensor | None, grads: Tensor, mean: Tensor, square: Tensor, scalars: Tensor,
    betas: tuple[float, float], eps: float, decay: float,
) -> None:  # fmt: skip
    count = weights.numel()
    launch(
        _adamw, (triton.cdiv(count, ADAMW_WEIGHTS),), weights, weights if low_bits is None else low_bits, grads, mean,
        square, scalars, count, *betas, eps, decay, SPLIT=low_bits is not None, BLOCK=ADAMW_WEIGHTS, num_warps=4,
    )  # fmt: skip


def checksums(bits: Tensor, out: Tensor, elements: int) -> None:
    """Write one sum for every `elements` integers of `bits`."""
    launch(
        _checksums, (len(out),), bits, out, len(bits), ELEMENTS=elements, BLOCK=CHECKSUM_ELEMENTS, num_warps=4,
    )  # fmt: skip
