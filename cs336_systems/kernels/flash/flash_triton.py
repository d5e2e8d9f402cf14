"""FlashAttention-2 in Triton: the device code. portable_launch.py launches it.

The algorithm is that of flash_torch.py. What is added here makes it fast:

- The scale and log2(e) are one factor and exponentials are powers of 2: one multiply-add and one `ex2` for each score.
- Tiles wholly inside the band run in a loop of their own, without a mask; tiles outside it are not visited.
- Blocks with the most work start first, in sections of a few heads that share the L2 cache.
- With DESCRIPTORS the tiles are moved by the GPU's copy engine (TMA), which also fills with zeros beyond the edges.

Backward is two kernels, each the only one that writes its results, so that it is bitwise repeatable: `grad_q_kernel`
holds a block of queries and visits the keys, `grad_kv_kernel` holds a block of keys and visits the queries. They
compute the scores twice, seven matmuls where a fused backward has five. But a fused one adds its parts of dQ by
atomics, and where this was tuned the bytes and registers for that cost more than two matmuls (docs/LOG.md).
`grad_kernel` does the work of both in one launch, for small problems.

Packed documents: with a `table` (packing_triton.py) a program reads there which block of which document it has. All
positions are then inside the document, lengths are those of the document, and only memory is addressed from the
document's first row on. Tiles are read through pointers, because descriptors know nothing of where a document ends.

Rows beyond a length read as zeros. For queries that is harmless everywhere: their dO, logsumexp and D are zeros too, so
they add nothing. For keys the scores are masked: a row of large negative scores would make exp(0 - logsumexp) infinite.

Names: b_ block in registers, m_ mask. Kernel parameters are, in this order: tensors, rows of numbers, strides of the
tensors, sizes, schedule, constants.
Shapes: BLOCK_M queries and BLOCK_N keys of a tile, BLOCK_D head dim padded to a power of 2.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from cs336_systems.kernels.flash.packing_triton import FIELDS, FIRST_K, FIRST_Q, LEN_K, LEN_Q, ROW, SHIFT

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
CHUNK = tl.constexpr(64)
"""Columns of wide heads in fp32 that are multiplied at a time: see `_is_wide`."""


class Rows(NamedTuple):
    """Rows of one head of a (batch, heads, length, d) tensor, from `row` on. Elements of a row are contiguous.

    Of packed documents: `row` and `length` are inside the document, which begins at row `first` of the tensor."""

    memory: Any
    """Pointer or, with DESCRIPTORS, tensor descriptor."""
    strides: Any
    """Strides of batch, head and row."""
    batch: Any
    head: Any
    row: Any
    length: Any
    first: Any


class Sizes(NamedTuple):
    """Sizes of a sequence, or of the document that a program has a block of."""

    len_q: Any
    len_k: Any
    first_q: Any
    """Row of the document's first query in its tensor; 0 without documents."""
    first_k: Any
    queries: Any
    """Queries of a head in memory: `len_q`, or those of all documents."""
    d: Any
    band: Any
    """A band.Band: query i sees key j when lo <= j - i - shift <= hi; None: no bound on that side."""
    shift: Any
    """Offset of the document's mask alignment; 0 without documents."""
    scale: Any


# -- forward ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["band", "section"])
def forward_kernel(
    q, k, v, out, lse, table,
    q_strides, k_strides, v_strides, out_strides,
    heads, group, len_q, len_k, d, band, scale,
    blocks, all_heads, section,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute output and logsumexp of BLOCK_M queries."""
    block, index = _block_and_head(blocks, all_heads, section)
    if band.hi is not None and table is None:
        block = blocks - 1 - block  # the last queries see the most keys
    batch, head, kv_head = _heads(index, heads, group)
    row, first_q, own_q, first_k, own_k, shift = _document(table, block, len_q, len_k, BLOCK_M)
    sizes = Sizes(
        len_q=own_q, len_k=own_k, first_q=first_q, first_k=first_k, queries=len_q, d=d, band=band, shift=shift,
        scale=scale,
    )  # fmt: skip
    begin, full_begin, full_end, end = _key_tiles(row, sizes, BLOCK_M, BLOCK_N)
    queries = Rows(memory=q, strides=q_strides, batch=batch, head=head, row=row, length=own_q, first=first_q)
    keys = Rows(memory=k, strides=k_strides, batch=batch, head=kv_head, row=0, length=own_k, first=first_k)
    values = Rows(memory=v, strides=v_strides, batch=batch, head=kv_head, row=0, length=own_k, first=first_k)
    b_q = _load_operand(queries, d, BLOCK_M, BLOCK_D, DESCRIPTORS, PRECISION)  # [BLOCK_M, BLOCK_D]
    b_m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_l = tl.zeros([BLOCK_M], tl.float32)
    b_o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if band.lo is not None:
        b_o, b_m, b_l = _attend(
            b_o, b_m, b_l, queries, b_q, keys, values, begin, full_begin, sizes, True,
            BLOCK_M, BLOCK_N, BLOCK_D, DESCRIPTORS, PRECISION,
        )  # fmt: skip
    b_o, b_m, b_l = _attend(
        b_o, b_m, b_l, queries, b_q, keys, values, full_begin, full_end, sizes, False,
        BLOCK_M, BLOCK_N, BLOCK_D, DESCRIPTORS, PRECISION,
    )  # fmt: skip
    b_o, b_m, b_l = _attend(
        b_o, b_m, b_l, queries, b_q, keys, values, full_end, end, sizes, True,
        BLOCK_M, BLOCK_N, BLOCK_D, DESCRIPTORS, PRECISION,
    )  # fmt: skip
    empty = b_l == 0.0
    b_l = tl.where(empty, 1.0, b_l)
    outputs = Rows(memory=out, strides=out_strides, batch=batch, head=head, row=row, length=own_q, first=first_q)
    _store(outputs, b_o / b_l[:, None], d, BLOCK_M, BLOCK_D, DESCRIPTORS)
    offsets, m_q = _row_offsets(index, row, sizes, BLOCK_M)
    tl.store(lse + offsets, tl.where(empty, float("-inf"), (b_m + tl.math.log2(b_l)) * LN2), mask=m_q)


@triton.jit
def _attend(
    b_o, b_m, b_l, queries, b_q, keys, values, begin, end, sizes,
    MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the keys of begin..end to the running maximum (of log2 scores), the row sums and the output."""
    factor = sizes.scale * LOG2E
    for column in tl.range(begin, end, BLOCK_N):
        b_s, _ = _matmul(
            queries, b_q, _from_row(keys, column), sizes.d, BLOCK_M, BLOCK_N, BLOCK_D, DESCRIPTORS, PRECISION
        )  # fmt: skip
        if MASKED:
            rows, columns = queries.row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
            m_s = _visible(rows[:, None], columns[None, :], sizes)  # [BLOCK_M, BLOCK_N]
            b_s = tl.where(m_s, b_s, float("-inf"))
        m_new = tl.maximum(b_m, tl.max(b_s, 1) * factor)
        # The maximum of a row that has seen no key yet is -inf, and -inf - -inf would be NaN.
        shift = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
        b_p = tl.math.exp2(b_s * factor - shift[:, None])  # [BLOCK_M, BLOCK_N]
        rescale = tl.math.exp2(b_m - shift)
        b_l = b_l * rescale + tl.sum(b_p, 1)
        b_o = b_o * rescale[:, None]
        b_v = _load(_from_row(values, column), sizes.d, BLOCK_N, BLOCK_D, DESCRIPTORS)  # [BLOCK_N, BLOCK_D]
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o, input_precision=PRECISION)
        b_m = m_new
    return b_o, b_m, b_l


# -- backward ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["band", "section"])
def grad_q_kernel(
    q, k, v, out, grad, dq, lse, grad_lse, delta, table,
    q_strides, k_strides, v_strides, out_strides, grad_strides, dq_strides,
    heads, group, len_q, len_k, d, band, scale,
    blocks, all_heads, section,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dQ of BLOCK_M queries, and their D = rowsum(O * dO) for `grad_kv_kernel`."""
    block, index = _block_and_head(blocks, all_heads, section)
    if band.hi is not None and table is None:
        block = blocks - 1 - block
    row, first_q, own_q, first_k, own_k, shift = _document(table, block, len_q, len_k, BLOCK_M)
    sizes = Sizes(
        len_q=own_q, len_k=own_k, first_q=first_q, first_k=first_k, queries=len_q, d=d, band=band, shift=shift,
        scale=scale,
    )  # fmt: skip
    _grad_q_block(
        q, k, v, out, grad, dq, lse, grad_lse, delta,
        q_strides, k_strides, v_strides, out_strides, grad_strides, dq_strides,
        heads, group, sizes, row, index,
        BLOCK_M, BLOCK_N, BLOCK_D, DESCRIPTORS, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["band", "section"])
def grad_kv_kernel(
    q, k, v, grad, dk, dv, lse, delta, table,
    q_strides, k_strides, v_strides, grad_strides, dk_strides, dv_strides,
    kv_heads, group, len_q, len_k, d, band, scale,
    blocks, all_heads, section,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of BLOCK_N keys, over all the query heads that share them."""
    # Blocks ascend: under a causal mask the first keys have the most work.
    block, index = _block_and_head(blocks, all_heads, section)
    column, first_q, own_q, first_k, own_k, shift = _document(table, block, len_q, len_k, BLOCK_N)
    sizes = Sizes(
        len_q=own_q, len_k=own_k, first_q=first_q, first_k=first_k, queries=len_q, d=d, band=band, shift=shift,
        scale=scale,
    )  # fmt: skip
    _grad_kv_block(
        q, k, v, None, grad, dk, dv, lse, None, delta,
        q_strides, k_strides, v_strides, None, grad_strides, dk_strides, dv_strides,
        kv_heads, group, sizes, column, index,
        BLOCK_M, BLOCK_N, BLOCK_D, DESCRIPTORS, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["band", "blocks", "kv_blocks"])
def grad_kernel(
    q, k, v, out, grad, dq, dk, dv, lse, grad_lse,
    q_strides, k_strides, v_strides, out_strides, grad_strides, dq_strides, dk_strides, dv_strides,
    heads, group, len_q, len_k, d, band, scale,
    blocks, kv_blocks, all_heads, all_kv_heads,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dQ, dK and dV in one launch, for problems that take less time than a second launch.

    A block of keys cannot wait for the D that blocks of queries compute, so it computes D itself, for each tile.
    """
    program = tl.program_id(0)
    sizes = Sizes(
        len_q=len_q, len_k=len_k, first_q=0, first_k=0, queries=len_q, d=d, band=band, shift=0, scale=scale
    )  # fmt: skip
    if program < blocks * all_heads:
        block = program // all_heads
        if band.hi is not None:
            block = blocks - 1 - block
        _grad_q_block(
            q, k, v, out, grad, dq, lse, grad_lse, None,
            q_strides, k_strides, v_strides, out_strides, grad_strides, dq_strides,
            heads, group, sizes, block * BLOCK_M, program % all_heads,
            BLOCK_M, BLOCK_N, BLOCK_D, False, PRECISION,
        )  # fmt: skip
    else:
        program -= blocks * all_heads
        _grad_kv_block(
            q, k, v, out, grad, dk, dv, lse, grad_lse, None,
            q_strides, k_strides, v_strides, out_strides, grad_strides, dk_strides, dv_strides,
            heads // group, group, sizes, program // all_kv_heads * BLOCK_N, program % all_kv_heads,
            BLOCK_M, BLOCK_N, BLOCK_D, False, PRECISION,
        )  # fmt: skip


@triton.jit
def _grad_q_block(
    q, k, v, out, grad, dq, lse, grad_lse, delta,
    q_strides, k_strides, v_strides, out_strides, grad_strides, dq_strides,
    heads, group, sizes, row, index,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    batch, head, kv_head = _heads(index, heads, group)
    d, band = sizes.d, sizes.band
    len_q, len_k, first_q, first_k = sizes.len_q, sizes.len_k, sizes.first_q, sizes.first_k
    begin, full_begin, full_end, end = _key_tiles(row, sizes, BLOCK_M, BLOCK_N)
    queries = Rows(memory=q, strides=q_strides, batch=batch, head=head, row=row, length=len_q, first=first_q)
    grads = Rows(memory=grad, strides=grad_strides, batch=batch, head=head, row=row, length=len_q, first=first_q)
    outputs = Rows(memory=out, strides=out_strides, batch=batch, head=head, row=row, length=len_q, first=first_q)
    keys = Rows(memory=k, strides=k_strides, batch=batch, head=kv_head, row=0, length=len_k, first=first_k)
    values = Rows(memory=v, strides=v_strides, batch=batch, head=kv_head, row=0, length=len_k, first=first_k)
    b_q = _load_operand(queries, d, BLOCK_M, BLOCK_D, DESCRIPTORS, PRECISION)  # [BLOCK_M, BLOCK_D]
    b_do = _load(grads, d, BLOCK_M, BLOCK_D, DESCRIPTORS)  # [BLOCK_M, BLOCK_D]
    offsets, m_q = _row_offsets(index, row, sizes, BLOCK_M)
    b_delta = _delta(outputs, b_do, grad_lse, offsets, m_q, d, BLOCK_M, BLOCK_D, DESCRIPTORS)  # [BLOCK_M]
    if _is_wide(BLOCK_D, PRECISION):
        b_do = ()
    if delta is not None:
        tl.store(delta + offsets, b_delta, mask=m_q)
    b_lse = tl.load(lse + offsets, mask=m_q, other=0.0) * LOG2E  # [BLOCK_M]
    b_dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if band.lo is not None:
        b_dq = _accumulate_dq(
            b_dq, queries, grads, b_q, b_do, b_lse, b_delta, keys, values, begin, full_begin, sizes, True,
            BLOCK_M, BLOCK_N, BLOCK_D, DESCRIPTORS, PRECISION,
        )  # fmt: skip
    b_dq = _accumulate_dq(
        b_dq, queries, grads, b_q, b_do, b_lse, b_delta, keys, values, full_begin, full_end, sizes, False,
        BLOCK_M, BLOCK_N, BLOCK_D, DESCRIPTORS, PRECISION,
    )  # fmt: skip
    b_dq = _accumulate_dq(
        b_dq, queries, grads, b_q, b_do, b_lse, b_delta, keys, values, full_end, end, sizes, True,
        BLOCK_M, BLOCK_N, BLOCK_D, DESCRIPTORS, PRECISION,
    )  # fmt: skip
    target = Rows(memory=dq, strides=dq_strides, batch=batch, head=head, row=row, length=len_q, first=first_q)
    _store(target, b_dq * sizes.scale, d, BLOCK_M, BLOCK_D, DESCRIPTORS)


@triton.jit
def _delta(
    outputs, b_do, grad_lse, offsets, m_q, d,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Compute D = rowsum(O * dO). d lse / d S is P, so the gradient of the logsumexp is subtracted from it."""
    b_o = _load(outputs, d, BLOCK_M, BLOCK_D, DESCRIPTORS)  # [BLOCK_M, BLOCK_D]
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
    if grad_lse is not None:
        b_delta -= tl.load(grad_lse + offsets, mask=m_q, other=0.0)
    return b_delta


@triton.jit
def _accumulate_dq(
    b_dq, queries, grads, b_q, b_do, b_lse, b_delta, keys, values, begin, end, sizes,
    MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add dS K of the keys of begin..end to dQ."""
    factor, d = sizes.scale * LOG2E, sizes.d
    for column in tl.range(begin, end, BLOCK_N):
        own_keys, own_values = _from_row(keys, column), _from_row(values, column)
        b_s, b_k = _matmul(queries, b_q, own_keys, d, BLOCK_M, BLOCK_N, BLOCK_D, DESCRIPTORS, PRECISION)
        b_p = tl.math.exp2(b_s * factor - b_lse[:, None])  # [BLOCK_M, BLOCK_N]
        if MASKED:
            rows, columns = queries.row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
            b_p = tl.where(_visible(rows[:, None], columns[None, :], sizes), b_p, 0.0)
        b_dp, _ = _matmul(grads, b_do, own_values, d, BLOCK_M, BLOCK_N, BLOCK_D, DESCRIPTORS, PRECISION)
        b_ds = b_p * (b_dp - b_delta[:, None])  # [BLOCK_M, BLOCK_N]
        if _is_wide(BLOCK_D, PRECISION):
            b_k = _load(own_keys, d, BLOCK_N, BLOCK_D, DESCRIPTORS)  # [BLOCK_N, BLOCK_D]
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
    return b_dq


@triton.jit
def _grad_kv_block(
    q, k, v, out, grad, dk, dv, lse, grad_lse, delta,
    q_strides, k_strides, v_strides, out_strides, grad_strides, dk_strides, dv_strides,
    kv_heads, group, sizes, column, index,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of a block of keys. Without `delta`, D is computed here from `out`."""
    batch, kv_head = index // kv_heads, index % kv_heads
    d, band = sizes.d, sizes.band
    len_k, first_k = sizes.len_k, sizes.first_k
    begin, full_begin, full_end, end = _query_tiles(column, sizes, BLOCK_M, BLOCK_N)
    keys = Rows(memory=k, strides=k_strides, batch=batch, head=kv_head, row=column, length=len_k, first=first_k)
    values = Rows(memory=v, strides=v_strides, batch=batch, head=kv_head, row=column, length=len_k, first=first_k)
    b_k = _load_operand(keys, d, BLOCK_N, BLOCK_D, DESCRIPTORS, PRECISION)  # [BLOCK_N, BLOCK_D]
    b_v = _load_operand(values, d, BLOCK_N, BLOCK_D, DESCRIPTORS, PRECISION)  # [BLOCK_N, BLOCK_D]
    b_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    b_dk, b_dv = _accumulate_dkv(
        b_dk, b_dv, keys, values, b_k, b_v, q, out, grad, lse, grad_lse, delta, q_strides, out_strides, grad_strides,
        index, group, begin, full_begin, sizes, True, BLOCK_M, BLOCK_N, BLOCK_D, DESCRIPTORS, PRECISION,
    )  # fmt: skip
    b_dk, b_dv = _accumulate_dkv(
        b_dk, b_dv, keys, values, b_k, b_v, q, out, grad, lse, grad_lse, delta, q_strides, out_strides, grad_strides,
        index, group, full_begin, full_end, sizes, False, BLOCK_M, BLOCK_N, BLOCK_D, DESCRIPTORS, PRECISION,
    )  # fmt: skip
    if band.lo is not None:
        b_dk, b_dv = _accumulate_dkv(
            b_dk, b_dv, keys, values, b_k, b_v, q, out, grad, lse, grad_lse, delta, q_strides, out_strides,
            grad_strides, index, group, full_end, end, sizes, True, BLOCK_M, BLOCK_N, BLOCK_D, DESCRIPTORS, PRECISION,
        )  # fmt: skip
    target = Rows(memory=dk, strides=dk_strides, batch=batch, head=kv_head, row=column, length=len_k, first=first_k)
    _store(target, b_dk * sizes.scale, d, BLOCK_N, BLOCK_D, DESCRIPTORS)
    target = Rows(memory=dv, strides=dv_strides, batch=batch, head=kv_head, row=column, length=len_k, first=first_k)
    _store(target, b_dv, d, BLOCK_N, BLOCK_D, DESCRIPTORS)


@triton.jit
def _accumulate_dkv(
    b_dk, b_dv, keys, values, b_k, b_v, q, out, grad, lse, grad_lse, delta, q_strides, out_strides, grad_strides,
    index, group, begin, end, sizes,
    MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add dS^T Q and P^T dO of the queries of begin..end, of every query head that shares these keys.

    One loop over heads and tiles: loads run ahead across heads as they do across tiles.
    """
    factor, d, len_q, first_q = sizes.scale * LOG2E, sizes.d, sizes.len_q, sizes.first_q
    span = end - begin
    for step in tl.range(0, span * group, BLOCK_M):
        member, row = 0, begin + step
        if group != 1:  # known when compiling where it is 1
            member = step // span
            row -= member * span
        batch, head = keys.batch, keys.head * group + member
        offsets, m_q = _row_offsets(index * group + member, row, sizes, BLOCK_M)
        # Scores are transposed, [BLOCK_N, BLOCK_M]: P^T and dS^T are then left operands as they are in registers.
        queries = Rows(memory=q, strides=q_strides, batch=batch, head=head, row=row, length=len_q, first=first_q)
        grads = Rows(memory=grad, strides=grad_strides, batch=batch, head=head, row=row, length=len_q, first=first_q)
        b_s, b_q = _matmul(keys, b_k, queries, d, BLOCK_N, BLOCK_M, BLOCK_D, DESCRIPTORS, PRECISION)
        b_lse = tl.load(lse + offsets, mask=m_q, other=0.0) * LOG2E  # [BLOCK_M]
        b_p = tl.math.exp2(b_s * factor - b_lse[None, :])  # [BLOCK_N, BLOCK_M]
        if MASKED:
            rows, columns = row + tl.arange(0, BLOCK_M), keys.row + tl.arange(0, BLOCK_N)
            b_p = tl.where(_visible(rows[None, :], columns[:, None], sizes), b_p, 0.0)
        b_dp, b_do = _matmul(values, b_v, grads, d, BLOCK_N, BLOCK_M, BLOCK_D, DESCRIPTORS, PRECISION)
        if _is_wide(BLOCK_D, PRECISION):
            b_do = _load(grads, d, BLOCK_M, BLOCK_D, DESCRIPTORS)  # [BLOCK_M, BLOCK_D]
        b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
        if delta is None:
            outputs = Rows(
                memory=out, strides=out_strides, batch=batch, head=head, row=row, length=len_q, first=first_q
            )  # fmt: skip
            b_delta = _delta(outputs, b_do, grad_lse, offsets, m_q, d, BLOCK_M, BLOCK_D, DESCRIPTORS)
        else:
            b_delta = tl.load(delta + offsets, mask=m_q, other=0.0)  # [BLOCK_M]
        b_ds = b_p * (b_dp - b_delta[None, :])  # [BLOCK_N, BLOCK_M]
        if _is_wide(BLOCK_D, PRECISION):
            b_q = _load(queries, d, BLOCK_M, BLOCK_D, DESCRIPTORS)  # [BLOCK_M, BLOCK_D]
        b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)
    return b_dk, b_dv


# -- matmuls over the head dim ----------------------------------------------------------------------------------------


@triton.constexpr_function
def _is_wide(block_d, precision):
    """Return True if a left operand of a matmul over the head dim would fill a thread's registers: fp32 and 256
    columns."""
    return precision != "ieee" and block_d > 128


@triton.jit
def _load_operand(
    rows, d, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Load a left operand that stays in registers; load nothing if it is too wide for that."""
    if _is_wide(BLOCK_D, PRECISION):
        return ()
    else:  # without it the compiler would go on
        return _load(rows, d, ROWS, BLOCK_D, DESCRIPTORS)


@triton.jit
def _matmul(
    left, b_left, right, d, LEFT_ROWS: tl.constexpr, RIGHT_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return left right^T and the tile of `right`. Wide operands are multiplied in chunks, and no tile is returned."""
    if _is_wide(BLOCK_D, PRECISION):
        result = tl.zeros([LEFT_ROWS, RIGHT_ROWS], tl.float32)
        for column in tl.range(0, BLOCK_D, CHUNK):
            a = _load_chunk(left, column, d, LEFT_ROWS)
            b = _load_chunk(right, column, d, RIGHT_ROWS)
            result = tl.dot(a, b.T, result, input_precision=PRECISION)
        return result, ()
    else:
        b_right = _load(right, d, RIGHT_ROWS, BLOCK_D, DESCRIPTORS)
        return tl.dot(b_left, b_right.T, input_precision=PRECISION), b_right


# -- which tiles ------------------------------------------------------------------------------------------------------


@triton.jit
def _block_and_head(blocks, all_heads, section):
    """Return the block and head of this program: programs take one block of every head of a section, then the next
    block, and then the next section."""
    program = tl.program_id(0)
    first_head = program // (section * blocks) * section
    width = tl.minimum(section, all_heads - first_head)
    inside = program - first_head * blocks
    return inside // width, first_head + inside % width


@triton.jit
def _document(table, block, len_q, len_k, BLOCK: tl.constexpr):
    """Return the first row of a block; first row and length of its document among the queries and among the keys; and
    the shift of the band. Without a `table` there is one document."""
    if table is None:
        return block * BLOCK, 0, len_q, 0, len_k, 0
    else:
        line = table + block * FIELDS
        queries = tl.load(line + FIRST_Q), tl.load(line + LEN_Q)
        keys = tl.load(line + FIRST_K), tl.load(line + LEN_K)
        return tl.load(line + ROW), queries[0], queries[1], keys[0], keys[1], tl.load(line + SHIFT)


@triton.jit
def _heads(index, heads, group):
    """Return the batch, the query head, and the KV head that it reads."""
    batch, head = index // heads, index % heads
    return batch, head, head // group


@triton.jit
def _key_tiles(row, sizes, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the bounds of the tiles of keys for BLOCK_M queries: masked from begin, full, masked up to end."""
    len_q, len_k, band, shift = sizes.len_q, sizes.len_k, sizes.band, sizes.shift
    last = tl.minimum(row + BLOCK_M, len_q) - 1
    begin, full_begin = 0, 0
    stop, full_stop = len_k, len_k
    if band.lo is not None:
        begin = tl.maximum(row + (band.lo + shift), 0) // BLOCK_N * BLOCK_N
        full_begin = tl.cdiv(tl.maximum(last + (band.lo + shift), 0), BLOCK_N) * BLOCK_N
    if band.hi is not None:
        stop = tl.minimum(stop, last + (band.hi + shift) + 1)
        full_stop = tl.minimum(full_stop, row + (band.hi + shift) + 1)
    return _ordered(begin, full_begin, full_stop, stop, BLOCK_N)


@triton.jit
def _query_tiles(column, sizes, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the bounds of the tiles of queries for BLOCK_N keys, in the same order."""
    len_q, len_k, band, shift = sizes.len_q, sizes.len_k, sizes.band, sizes.shift
    last = tl.minimum(column + BLOCK_N, len_k) - 1
    begin, full_begin = 0, 0
    stop, full_stop = len_q, len_q + BLOCK_M  # queries beyond the length do no harm
    if band.hi is not None:
        begin = tl.maximum(column - (band.hi + shift), 0) // BLOCK_M * BLOCK_M
        full_begin = tl.cdiv(tl.maximum(last - (band.hi + shift), 0), BLOCK_M) * BLOCK_M
    if band.lo is not None:
        stop = tl.minimum(stop, last - (band.lo + shift) + 1)
        full_stop = tl.minimum(full_stop, column - (band.lo + shift) + 1)
    if column + BLOCK_N > len_k:
        full_begin = len_q + BLOCK_M  # some of these keys are beyond the length, in every tile
    return _ordered(begin, full_begin, full_stop, stop, BLOCK_M)


@triton.jit
def _ordered(begin, full_begin, full_stop, stop, STEP: tl.constexpr):
    """Return the bounds in whole tiles from `begin`, in ascending order; a part may be empty."""
    end = begin + tl.cdiv(tl.maximum(stop - begin, 0), STEP) * STEP
    full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
    full_end = tl.minimum(tl.maximum(tl.maximum(full_stop, 0) // STEP * STEP, full_begin), end)
    return begin, full_begin, full_end, end


@triton.jit
def _visible(rows, columns, sizes):
    """Return the mask of the keys inside the length and the band; rows and columns are shaped to broadcast."""
    band, shift = sizes.band, sizes.shift
    seen = columns < sizes.len_k
    if band.lo is not None:
        seen = seen & (columns - rows >= band.lo + shift)
    if band.hi is not None:
        seen = seen & (columns - rows <= band.hi + shift)
    return seen


# -- memory -----------------------------------------------------------------------------------------------------------


@triton.jit
def _from_row(rows, row):
    return Rows(
        memory=rows.memory, strides=rows.strides, batch=rows.batch, head=rows.head, row=row, length=rows.length,
        first=rows.first,
    )  # fmt: skip


@triton.jit
def _load(rows, d, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIPTORS: tl.constexpr):
    """Load a [ROWS, COLUMNS] tile, with zeros beyond the tensor's length and `d` columns."""
    if DESCRIPTORS:
        tile = rows.memory.load([rows.batch, rows.head, rows.row, 0]).reshape([ROWS, COLUMNS])
    else:
        pointers, inside = _pointers(rows, 0, d, ROWS, COLUMNS)
        tile = tl.load(pointers, mask=inside, other=0.0)
    return tile


@triton.jit
def _store(rows, value, d, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIPTORS: tl.constexpr):
    target = rows.memory
    if DESCRIPTORS:
        target.store([rows.batch, rows.head, rows.row, 0], value.to(target.dtype).reshape([1, 1, ROWS, COLUMNS]))
    else:
        pointers, inside = _pointers(rows, 0, d, ROWS, COLUMNS)
        tl.store(pointers, value.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _load_chunk(rows, column, d, ROWS: tl.constexpr):
    """Load CHUNK columns of a tile."""
    pointers, inside = _pointers(rows, column, d, ROWS, CHUNK)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _pointers(rows, column, d, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return pointers to a [ROWS, COLUMNS] tile from `column` on, and the mask of those inside the tensor."""
    # Where a tile begins takes 64 bits: a tensor may have more than 2^31 elements. Inside a tile 32 bits do.
    strides = rows.strides
    first = tl.cast(rows.batch, tl.int64) * strides[0] + tl.cast(rows.head, tl.int64) * strides[1]
    first += tl.cast(rows.first + rows.row, tl.int64) * strides[2]
    inner, columns = tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    inside = (rows.row + inner < rows.length)[:, None] & (columns < d)[None, :]
    return rows.memory + first + inner[:, None] * strides[2] + columns[None, :], inside


@triton.jit
def _row_offsets(index, row, sizes, ROWS: tl.constexpr):
    """Return offsets and mask for one number per query in a contiguous (batch, heads, len_q) tensor."""
    rows = row + tl.arange(0, ROWS)
    return tl.cast(index, tl.int64) * sizes.queries + (sizes.first_q + rows), rows < sizes.len_q
