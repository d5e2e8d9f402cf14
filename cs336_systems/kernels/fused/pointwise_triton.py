"""Everything of a training step that is no matrix product, in Triton: each kernel reads its inputs once and writes its
results once, where separate operators would go through memory several times.

Results are allocated by the caller, in pointwise.py, which also has each formula in plain PyTorch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.kernels.flash.operators import is_plain

ROW_PROGRAMS = 264
"""Programs that share the rows of a norm's backward pass: each leaves one partial sum of the gain's gradient. Twice as
many where there are MANY_ROWS."""
MANY_ROWS = 8192
SUMMED = (64, 16)
"""Rows and columns of partial sums that a program takes at a time."""
TURNED = 4096
"""Elements that a program turns."""
GATED = 1024
"""Elements of a row that a program gates."""
LOGITS = 2048
"""Logits that a program holds at a time."""
WEIGHTS = 1024
"""Weights that a program updates."""


@triton.jit
def _add_norm(
    x, delta, gain, out_x, out_y, out_rstd, width, eps, ADDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    at = row * width + columns
    value = tl.load(x + at, inside, 0.0).to(tl.float32)
    if ADDS:
        value += tl.load(delta + at, inside, 0.0).to(tl.float32)
        # What later blocks read is the rounded sum, so this one is normed from it, too.
        value = value.to(out_x.dtype.element_ty).to(tl.float32)
        tl.store(out_x + at, value.to(out_x.dtype.element_ty), inside)
    rstd = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    y = value * rstd * tl.load(gain + columns, inside, 0.0).to(tl.float32)
    tl.store(out_y + at, y.to(out_y.dtype.element_ty), inside)
    tl.store(out_rstd + row, rstd)


@triton.jit
def _add_norm_backward(
    grad_y, grad_x, x, rstd, gain, out_x, out_gain, rows, width,
    ADDS: tl.constexpr, REMAKES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    g = tl.load(gain + columns, inside, 0.0).to(tl.float32)
    grad_gain = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * width + columns
        scale = tl.load(rstd + row)
        normed = tl.load(x + at, inside, 0.0).to(tl.float32) * scale
        grad = tl.load(grad_y + at, inside, 0.0).to(tl.float32)
        grad_gain += grad * normed
        pulled = grad * g
        found = scale * (pulled - normed * (tl.sum(pulled * normed, 0) / width))
        if ADDS:
            found += tl.load(grad_x + at, inside, 0.0).to(tl.float32)
        tl.store(out_x + at, found.to(out_x.dtype.element_ty), inside)
        if REMAKES:  # the gradient has been read: its memory takes the norm's output, which nobody kept
            tl.store(grad_y + at, (normed * g).to(grad_y.dtype.element_ty), inside)
    tl.store(out_gain + program * width + columns, grad_gain, inside)


@triton.jit
def _column_sums(rows_of, out, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        total += tl.load(rows_of + row * width + columns, (row < rows) & (columns < width), 0.0)
    tl.store(out + columns, tl.sum(total, 0)[None, :], columns < width)


@triton.jit
def _turn(
    q, k, v, out, cos, sin, length, heads, half_dim,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    SIGN: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """(batch, row, head, dim) of q and k turned, of v as it is, into (batch, row, 3, head, dim)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    batch, position = row // length, row % length
    if part == 0:
        source, head_stride = q + batch * q_batch + position * q_row, q_head
    elif part == 1:
        source, head_stride = k + batch * k_batch + position * k_row, k_head
    else:
        source, head_stride = v + batch * v_batch + position * v_row, v_head
    # Dimensions, then heads: the compiler sees that a row's numbers follow each other, and moves 16 bytes at a time.
    head = (tl.program_id(2) * HEADS + tl.arange(0, HEADS))[:, None]
    dim = tl.arange(0, 2 * PAIRS)[None, :]
    inside = (head < heads) & (dim < 2 * half_dim)
    values = tl.load(source + head * head_stride + dim, inside, 0.0)
    if part < 2:
        a, b = tl.split(values.to(tl.float32).reshape(HEADS, PAIRS, 2))
        pair = tl.arange(0, PAIRS)
        angle = position * 2 * half_dim + 2 * pair
        c = tl.load(cos + angle, pair < half_dim, 0.0)[None, :]
        s = tl.load(sin + angle + 1, pair < half_dim, 0.0)[None, :] * SIGN  # the even ones are its negative
        values = tl.join(a * c - b * s, b * c + a * s).reshape(HEADS, 2 * PAIRS).to(values.dtype)
    target = out + (row * 3 + part) * heads * 2 * half_dim + head * 2 * half_dim + dim
    tl.store(target, values.to(out.dtype.element_ty), inside)


@triton.jit
def _swiglu(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, inside, 0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + row * width + columns, value.to(out.dtype.element_ty), inside)


@triton.jit
def _swiglu_backward(grad, gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate_at = row * 2 * width + columns
    gate = tl.load(gate_up + gate_at, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + gate_at + width, inside, 0.0).to(tl.float32)
    d = tl.load(grad + row * width + columns, inside, 0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = gate * share
    tl.store(out + gate_at, (d * up * (share + silu * (1 - share))).to(out.dtype.element_ty), inside)
    tl.store(out + gate_at + width, (d * silu).to(out.dtype.element_ty), inside)
    # The gradient has been read: its memory takes the gated product, which nobody kept.
    tl.store(grad + row * width + columns, (silu * up).to(grad.dtype.element_ty), inside)


@triton.jit
def _cross_entropy(logits, targets, losses, weight, vocabulary, ignored, BLOCK: tl.constexpr):
    """Losses of rows; their logits become the gradient of the sum of `weight` times each."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    target = tl.load(targets + row)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = tl.load(logits + columns, columns < vocabulary, float("-inf")).to(tl.float32)
        above = tl.maximum(largest, z)
        # A lane that has seen nothing yet, or only -inf, has no difference to take.
        shift = tl.where(above == float("-inf"), 0.0, above)
        total = total * tl.exp(largest - shift) + tl.exp(z - shift)
        largest = above
    peak = tl.max(largest, 0)
    lse = tl.log(tl.sum(total * tl.exp(largest - peak), 0)) + peak
    known = (target >= 0) & (target < vocabulary)
    hit = tl.load(logits + target, known, float("nan")).to(tl.float32)  # a target that is no token must not go unseen
    counts = target != ignored
    tl.store(losses + row, tl.where(counts, lse - hit, 0.0))
    factor = tl.where(counts, tl.load(weight), 0.0)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        z = tl.load(logits + columns, inside, 0.0).to(tl.float32)
        gradient = (tl.exp(z - lse) - tl.where(columns == target, 1.0, 0.0)) * factor
        tl.store(logits + columns, tl.where(counts, gradient, 0.0).to(logits.dtype.element_ty), inside)


@triton.jit
def _adamw(
    weights, rest, grads, mean, square, scalars, count, beta1, beta2, eps, decay,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`scalars`: learning rate, factor of the gradient, 1 - beta1^t, sqrt(1 - beta2^t), and 0 for no update."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if tl.load(scalars + 4) != 0:
        inside = at < count
        rate = tl.load(scalars)
        g = tl.load(grads + at, inside, 0.0).to(tl.float32) * tl.load(scalars + 1)
        m = tl.load(mean + at, inside, 0.0)
        m += (g - m) * (1 - beta1)
        v = tl.load(square + at, inside, 0.0) * beta2 + g * g * (1 - beta2)
        if SPLIT:
            high = tl.load(weights + at, inside, 0.0).to(tl.int16, bitcast=True).to(tl.int32)
            low = tl.load(rest + at, inside, 0).to(tl.int32)
            w = ((high << 16) + low).to(tl.float32, bitcast=True)
        else:
            w = tl.load(weights + at, inside, 0.0)
        w *= 1 - rate * decay
        w -= rate / tl.load(scalars + 2) * m / (tl.sqrt_rn(v) / tl.load(scalars + 3) + eps)
        tl.store(mean + at, m, inside)
        tl.store(square + at, v, inside)
        if SPLIT:
            bits = w.to(tl.int32, bitcast=True)
            high = (bits + 0x8000) >> 16
            tl.store(weights + at, high.to(tl.int16).to(tl.bfloat16, bitcast=True), inside)
            tl.store(rest + at, (bits - (high << 16)).to(tl.int16), inside)
        else:
            tl.store(weights + at, w, inside)


# -- launches ---------------------------------------------------------------------------------------------------------


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **meta: Any) -> None:
    """Nothing to do for tensors without memory, such as those of a trace: what the kernel writes is there already."""
    if 0 in grid or not is_plain(arguments[0]):
        return
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, **meta)


def _warps(block: int) -> int:
    return max(1, min(16, block // 256))


def add_norm(
    x: Tensor, delta: Tensor | None, gain: Tensor, eps: float, out_x: Tensor, out_y: Tensor, rstd: Tensor
) -> None:
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _launch(
        _add_norm, (rows,), x, x if delta is None else delta, gain, out_x, out_y, rstd, width, eps,
        ADDS=delta is not None, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip


def add_norm_backward(
    grad_y: Tensor, grad_x: Tensor | None, x: Tensor, rstd: Tensor, gain: Tensor, out_x: Tensor, remake: bool
) -> Tensor:
    """The gain's gradient, fp32."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    programs = min(rows, ROW_PROGRAMS if rows < MANY_ROWS else 2 * ROW_PROGRAMS)
    partial = torch.empty((programs, width), dtype=torch.float32, device=x.device)
    _launch(
        _add_norm_backward, (len(partial),), grad_y, x if grad_x is None else grad_x, x, rstd, gain, out_x, partial,
        rows, width, ADDS=grad_x is not None, REMAKES=remake, BLOCK=block, num_warps=8,
    )  # fmt: skip
    total = torch.empty(width, dtype=torch.float32, device=x.device)
    _launch(
        _column_sums, (triton.cdiv(width, SUMMED[1]),), partial, total, len(partial), width,
        ROWS=SUMMED[0], COLUMNS=SUMMED[1], num_warps=4,
    )  # fmt: skip
    return total


def turn(q: Tensor, k: Tensor, v: Tensor | None, cos: Tensor, sin: Tensor, out: Tensor, sign: float) -> None:
    """q, k, v: (batch, rows, heads, dim), any strides but the last; out: (batch, rows, 3, heads, dim). With v None its
    part of `out` stays as it is."""
    batch, length, heads, dim = q.shape
    pairs = triton.next_power_of_2(dim // 2)
    together = max(1, min(TURNED // (2 * pairs), triton.next_power_of_2(heads)))
    grid = (batch * length, 2 if v is None else 3, triton.cdiv(heads, together))
    third = k if v is None else v
    strides = [stride for t in (q, k, third) for stride in t.stride()[:3]]
    _launch(
        _turn, grid, q, k, third, out, cos, sin, length, heads, dim // 2, *strides,
        SIGN=sign, HEADS=together, PAIRS=pairs, num_warps=4,
    )  # fmt: skip


def swiglu(gate_up: Tensor, out: Tensor) -> None:
    rows, width = out.shape
    block = min(GATED, triton.next_power_of_2(width))
    _launch(_swiglu, (rows, triton.cdiv(width, block)), gate_up, out, width, BLOCK=block, num_warps=_warps(block))


def swiglu_backward(grad: Tensor, gate_up: Tensor, out: Tensor) -> None:
    rows, width = grad.shape
    block = min(GATED, triton.next_power_of_2(width))
    _launch(
        _swiglu_backward, (rows, triton.cdiv(width, block)), grad, gate_up, out, width,
        BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip


def cross_entropy(logits: Tensor, targets: Tensor, losses: Tensor, weight: Tensor, ignored: int) -> None:
    rows, vocabulary = logits.shape
    block = min(LOGITS, triton.next_power_of_2(vocabulary))
    _launch(
        _cross_entropy, (rows,), logits, targets, losses, weight, vocabulary, ignored,
        BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip


def adamw(
    weights: Tensor, rest: Tensor | None, grads: Tensor, mean: Tensor, square: Tensor, scalars: Tensor,
    betas: tuple[float, float], eps: float, decay: float,
) -> None:  # fmt: skip
    count = weights.numel()
    _launch(
        _adamw, (triton.cdiv(count, WEIGHTS),), weights, weights if rest is None else rest, grads, mean,
        square, scalars, count, *betas, eps, decay, SPLIT=rest is not None, BLOCK=WEIGHTS, num_warps=4,
    )  # fmt: skip
