"""FlashAttention-2 in Triton: the device code. How it is launched is in flash_launch.py.

The algorithm is that of flash_torch.py. What is added here is what makes it fast:

- The scale and log2(e) are one factor and exponentials are powers of 2: one multiply-add and one `ex2` for each score.
- Tiles wholly inside the band run in a loop of their own, without a mask; tiles outside it are not visited.
- Blocks with the most work start first, in sections of a few heads that share the L2 cache.
- With DESCRIPTORS the tiles are moved by the GPU's copy engine (TMA), which also fills with zeros beyond the edges.

Backward is two kernels, each the only owner of what it writes, so that it is bitwise repeatable: `grad_q_kernel` holds
a block of queries and visits the keys, `grad_kv_kernel` holds a block of keys and visits the queries. They form the
scores twice, seven matrix products where a fused backward has five. But a fused one adds its parts of dQ by atomics,
and where this was tuned the bytes and registers for that cost more than two products (docs/LOG.md). `grad_kernel` does
the work of both in one launch, for small problems.

Rows beyond a length read as zeros. For queries that is harmless everywhere: their dO, logsumexp and D are zeros too, so
they add nothing. For keys the scores are masked: a row of large negative scores would make exp(0 - logsumexp) infinite.

Words: `band` is (lo, hi), None where there is no bound; `place` is (batch, head); strides are of (batch, head, row),
and the elements of a row are contiguous.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
PIECE = tl.constexpr(64)
"""Columns of wide heads in fp32 that are multiplied at a time: see `_is_wide`."""


# -- forward ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["band", "section"])
def forward_kernel(
    q, k, v, out, lse, q_strides, k_strides, v_strides, out_strides,
    heads, group, len_q, len_k, d, band, scale, blocks, all_heads, section,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Output and logsumexp of BLOCK_M queries."""
    block, index = _assignment(blocks, all_heads, section)
    if band[1] is not None:
        block = blocks - 1 - block  # the last queries see the most keys
    place, kv_place = _places(index, heads, group)
    row = block * BLOCK_M
    begin, full_begin, full_end, end = _key_tiles(row, len_q, len_k, band, BLOCK_M, BLOCK_N)
    queries = (q, q_strides, place, row, len_q)
    q_tile = _operand(queries, d, BLOCK_M, BLOCK_D, DESCRIPTORS, PRODUCTS)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if band[0] is not None:
        acc, m, l = _attend(
            acc, m, l, queries, q_tile, k, v, k_strides, v_strides, kv_place, row, begin, full_begin, len_k, d, band,
            scale, True, BLOCK_M, BLOCK_N, BLOCK_D, DESCRIPTORS, PRODUCTS,
        )  # fmt: skip
    acc, m, l = _attend(
        acc, m, l, queries, q_tile, k, v, k_strides, v_strides, kv_place, row, full_begin, full_end, len_k, d, band,
        scale, False, BLOCK_M, BLOCK_N, BLOCK_D, DESCRIPTORS, PRODUCTS,
    )  # fmt: skip
    acc, m, l = _attend(
        acc, m, l, queries, q_tile, k, v, k_strides, v_strides, kv_place, row, full_end, end, len_k, d, band, scale,
        True, BLOCK_M, BLOCK_N, BLOCK_D, DESCRIPTORS, PRODUCTS,
    )  # fmt: skip
    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    _store(out, acc / l[:, None], out_strides, place, row, len_q, d, BLOCK_M, BLOCK_D, DESCRIPTORS)
    offsets, inside = _row_offsets(index, row, len_q, BLOCK_M)
    tl.store(lse + offsets, tl.where(empty, float("-inf"), (m + tl.math.log2(l)) * LN2), mask=inside)


@triton.jit
def _attend(
    acc, m, l, queries, q_tile, k, v, k_strides, v_strides, kv_place, row, begin, end, len_k, d, band, scale,
    MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Take the keys of begin..end into the running maximum `m` (in powers of 2), sum `l` and weighted values `acc`."""
    factor = scale * LOG2E
    for column in tl.range(begin, end, BLOCK_N):
        keys = (k, k_strides, kv_place, column, len_k)
        s, _ = _product(queries, q_tile, keys, d, BLOCK_M, BLOCK_N, BLOCK_D, DESCRIPTORS, PRODUCTS)
        if MASKED:
            rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
            s = tl.where(_visible(rows[:, None], columns[None, :], len_k, band), s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * factor)
        # Of a row that has seen no key yet the maximum is -inf, and -inf - -inf would be NaN.
        shift = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
        p = tl.math.exp2(s * factor - shift[:, None])
        rescale = tl.math.exp2(m - shift)
        l = l * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        v_tile = _load(v, v_strides, kv_place, column, len_k, d, BLOCK_N, BLOCK_D, DESCRIPTORS)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRODUCTS)
        m = m_new
    return acc, m, l


# -- backward ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["band", "section"])
def grad_q_kernel(
    q, k, v, out, grad, dq, lse, grad_lse, delta,
    q_strides, k_strides, v_strides, out_strides, grad_strides, dq_strides,
    heads, group, len_q, len_k, d, band, scale, blocks, all_heads, section,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """dQ of BLOCK_M queries, and D = rowsum(O * dO) of these, which it leaves to `grad_kv_kernel`."""
    block, index = _assignment(blocks, all_heads, section)
    if band[1] is not None:
        block = blocks - 1 - block
    _grad_q_block(
        q, k, v, out, grad, dq, lse, grad_lse, delta,
        q_strides, k_strides, v_strides, out_strides, grad_strides, dq_strides,
        heads, group, len_q, len_k, d, band, scale, block, index,
        BLOCK_M, BLOCK_N, BLOCK_D, DESCRIPTORS, PRODUCTS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["band", "section"])
def grad_kv_kernel(
    q, k, v, grad, dk, dv, lse, delta,
    q_strides, k_strides, v_strides, grad_strides, dk_strides, dv_strides,
    kv_heads, group, len_q, len_k, d, band, scale, blocks, all_heads, section,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """dK and dV of BLOCK_N keys, over all the query heads that share them."""
    # Blocks ascend: under a causal mask the first keys have the most work.
    block, index = _assignment(blocks, all_heads, section)
    _grad_kv_block(
        q, k, v, None, grad, dk, dv, lse, None, delta,
        q_strides, k_strides, v_strides, None, grad_strides, dk_strides, dv_strides,
        kv_heads, group, len_q, len_k, d, band, scale, block, index,
        BLOCK_M, BLOCK_N, BLOCK_D, DESCRIPTORS, PRODUCTS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["band", "blocks", "kv_blocks"])
def grad_kernel(
    q, k, v, out, grad, dq, dk, dv, lse, grad_lse,
    q_strides, k_strides, v_strides, out_strides, grad_strides, dq_strides, dk_strides, dv_strides,
    heads, group, len_q, len_k, d, band, scale, blocks, kv_blocks, all_heads, all_kv_heads,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Both in one launch, for problems that are over sooner than a second launch takes.

    A block of keys cannot wait for the D that blocks of queries compute, so it computes its own, again for each tile.
    """
    program = tl.program_id(0)
    if program < blocks * all_heads:
        block = program // all_heads
        if band[1] is not None:
            block = blocks - 1 - block
        _grad_q_block(
            q, k, v, out, grad, dq, lse, grad_lse, None,
            q_strides, k_strides, v_strides, out_strides, grad_strides, dq_strides,
            heads, group, len_q, len_k, d, band, scale, block, program % all_heads,
            BLOCK_M, BLOCK_N, BLOCK_D, False, PRODUCTS,
        )  # fmt: skip
    else:
        program -= blocks * all_heads
        _grad_kv_block(
            q, k, v, out, grad, dk, dv, lse, grad_lse, None,
            q_strides, k_strides, v_strides, out_strides, grad_strides, dk_strides, dv_strides,
            heads // group, group, len_q, len_k, d, band, scale, program // all_kv_heads, program % all_kv_heads,
            BLOCK_M, BLOCK_N, BLOCK_D, False, PRODUCTS,
        )  # fmt: skip


@triton.jit
def _grad_q_block(
    q, k, v, out, grad, dq, lse, grad_lse, delta,
    q_strides, k_strides, v_strides, out_strides, grad_strides, dq_strides,
    heads, group, len_q, len_k, d, band, scale, block, index,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    place, kv_place = _places(index, heads, group)
    row = block * BLOCK_M
    begin, full_begin, full_end, end = _key_tiles(row, len_q, len_k, band, BLOCK_M, BLOCK_N)
    queries, grads = (q, q_strides, place, row, len_q), (grad, grad_strides, place, row, len_q)
    q_tile = _operand(queries, d, BLOCK_M, BLOCK_D, DESCRIPTORS, PRODUCTS)
    grad_tile = _load(grad, grad_strides, place, row, len_q, d, BLOCK_M, BLOCK_D, DESCRIPTORS)
    offsets, inside = _row_offsets(index, row, len_q, BLOCK_M)
    delta_row = _delta(
        out, out_strides, grad_tile, grad_lse, place, row, offsets, inside, len_q, d, BLOCK_M, BLOCK_D, DESCRIPTORS
    )  # fmt: skip
    if _is_wide(BLOCK_D, PRODUCTS):
        grad_tile = ()
    if delta is not None:
        tl.store(delta + offsets, delta_row, mask=inside)
    lse_row = tl.load(lse + offsets, mask=inside, other=0.0) * LOG2E
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if band[0] is not None:
        acc = _gather_q(
            acc, queries, grads, q_tile, grad_tile, lse_row, delta_row, k, v, k_strides, v_strides, kv_place, row,
            begin, full_begin, len_k, d, band, scale, True, BLOCK_M, BLOCK_N, BLOCK_D, DESCRIPTORS, PRODUCTS,
        )  # fmt: skip
    acc = _gather_q(
        acc, queries, grads, q_tile, grad_tile, lse_row, delta_row, k, v, k_strides, v_strides, kv_place, row,
        full_begin, full_end, len_k, d, band, scale, False, BLOCK_M, BLOCK_N, BLOCK_D, DESCRIPTORS, PRODUCTS,
    )  # fmt: skip
    acc = _gather_q(
        acc, queries, grads, q_tile, grad_tile, lse_row, delta_row, k, v, k_strides, v_strides, kv_place, row,
        full_end, end, len_k, d, band, scale, True, BLOCK_M, BLOCK_N, BLOCK_D, DESCRIPTORS, PRODUCTS,
    )  # fmt: skip
    _store(dq, acc * scale, dq_strides, place, row, len_q, d, BLOCK_M, BLOCK_D, DESCRIPTORS)


@triton.jit
def _delta(
    out, out_strides, grad_tile, grad_lse, place, row, offsets, inside, len_q, d,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """D = rowsum(O * dO). d lse / d S is P, so the gradient of the logsumexp joins it with the other sign."""
    out_tile = _load(out, out_strides, place, row, len_q, d, BLOCK_M, BLOCK_D, DESCRIPTORS)
    delta_row = tl.sum(out_tile.to(tl.float32) * grad_tile.to(tl.float32), 1)
    if grad_lse is not None:
        delta_row -= tl.load(grad_lse + offsets, mask=inside, other=0.0)
    return delta_row


@triton.jit
def _gather_q(
    acc, queries, grads, q_tile, grad_tile, lse_row, delta_row, k, v, k_strides, v_strides, kv_place, row, begin, end,
    len_k, d, band, scale,
    MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Add dS K of the keys of begin..end."""
    factor = scale * LOG2E
    for column in tl.range(begin, end, BLOCK_N):
        keys, values = (k, k_strides, kv_place, column, len_k), (v, v_strides, kv_place, column, len_k)
        s, k_tile = _product(queries, q_tile, keys, d, BLOCK_M, BLOCK_N, BLOCK_D, DESCRIPTORS, PRODUCTS)
        p = tl.math.exp2(s * factor - lse_row[:, None])
        if MASKED:
            rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
            p = tl.where(_visible(rows[:, None], columns[None, :], len_k, band), p, 0.0)
        dp, _ = _product(grads, grad_tile, values, d, BLOCK_M, BLOCK_N, BLOCK_D, DESCRIPTORS, PRODUCTS)
        ds = p * (dp - delta_row[:, None])
        if _is_wide(BLOCK_D, PRODUCTS):
            k_tile = _load(k, k_strides, kv_place, column, len_k, d, BLOCK_N, BLOCK_D, DESCRIPTORS)
        acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRODUCTS)
    return acc


@triton.jit
def _grad_kv_block(
    q, k, v, out, grad, dk, dv, lse, grad_lse, delta,
    q_strides, k_strides, v_strides, out_strides, grad_strides, dk_strides, dv_strides,
    kv_heads, group, len_q, len_k, d, band, scale, block, index,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Without `delta` it is computed here, from `out`."""
    kv_place = (index // kv_heads, index % kv_heads)
    column = block * BLOCK_N
    begin, full_begin, full_end, end = _query_tiles(column, len_q, len_k, band, BLOCK_M, BLOCK_N)
    keys, values = (k, k_strides, kv_place, column, len_k), (v, v_strides, kv_place, column, len_k)
    k_tile = _operand(keys, d, BLOCK_N, BLOCK_D, DESCRIPTORS, PRODUCTS)
    v_tile = _operand(values, d, BLOCK_N, BLOCK_D, DESCRIPTORS, PRODUCTS)
    dk_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dk_sum, dv_sum = _gather_kv(
        dk_sum, dv_sum, keys, values, k_tile, v_tile, q, out, grad, lse, grad_lse, delta, q_strides, out_strides,
        grad_strides, kv_place, index, group, column, begin, full_begin, len_q, len_k, d, band, scale,
        True, BLOCK_M, BLOCK_N, BLOCK_D, DESCRIPTORS, PRODUCTS,
    )  # fmt: skip
    dk_sum, dv_sum = _gather_kv(
        dk_sum, dv_sum, keys, values, k_tile, v_tile, q, out, grad, lse, grad_lse, delta, q_strides, out_strides,
        grad_strides, kv_place, index, group, column, full_begin, full_end, len_q, len_k, d, band, scale,
        False, BLOCK_M, BLOCK_N, BLOCK_D, DESCRIPTORS, PRODUCTS,
    )  # fmt: skip
    if band[0] is not None:
        dk_sum, dv_sum = _gather_kv(
            dk_sum, dv_sum, keys, values, k_tile, v_tile, q, out, grad, lse, grad_lse, delta, q_strides, out_strides,
            grad_strides, kv_place, index, group, column, full_end, end, len_q, len_k, d, band, scale,
            True, BLOCK_M, BLOCK_N, BLOCK_D, DESCRIPTORS, PRODUCTS,
        )  # fmt: skip
    _store(dk, dk_sum * scale, dk_strides, kv_place, column, len_k, d, BLOCK_N, BLOCK_D, DESCRIPTORS)
    _store(dv, dv_sum, dv_strides, kv_place, column, len_k, d, BLOCK_N, BLOCK_D, DESCRIPTORS)


@triton.jit
def _gather_kv(
    dk, dv, keys, values, k_tile, v_tile, q, out, grad, lse, grad_lse, delta, q_strides, out_strides, grad_strides,
    kv_place, index, group, column, begin, end, len_q, len_k, d, band, scale,
    MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Add dS^T Q and P^T dO of the queries of begin..end, of every query head that shares these keys.

    One loop over heads and tiles: loads run ahead across heads as they do across tiles.
    """
    factor = scale * LOG2E
    span = end - begin
    for step in tl.range(0, span * group, BLOCK_M):
        member, row = 0, begin + step
        if group != 1:  # known when compiling where it is 1
            member = step // span
            row -= member * span
        place = (kv_place[0], kv_place[1] * group + member)
        offsets, inside = _row_offsets(index * group + member, row, len_q, BLOCK_M)
        # Scores are formed transposed, (keys, queries): P^T and dS^T are then left operands as they stand in registers.
        queries, grads = (q, q_strides, place, row, len_q), (grad, grad_strides, place, row, len_q)
        s, q_tile = _product(keys, k_tile, queries, d, BLOCK_N, BLOCK_M, BLOCK_D, DESCRIPTORS, PRODUCTS)
        lse_row = tl.load(lse + offsets, mask=inside, other=0.0) * LOG2E
        p = tl.math.exp2(s * factor - lse_row[None, :])
        if MASKED:
            rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
            p = tl.where(_visible(rows[None, :], columns[:, None], len_k, band), p, 0.0)
        dp, grad_tile = _product(values, v_tile, grads, d, BLOCK_N, BLOCK_M, BLOCK_D, DESCRIPTORS, PRODUCTS)
        if _is_wide(BLOCK_D, PRODUCTS):
            grad_tile = _load(grad, grad_strides, place, row, len_q, d, BLOCK_M, BLOCK_D, DESCRIPTORS)
        dv = tl.dot(p.to(grad_tile.dtype), grad_tile, dv, input_precision=PRODUCTS)
        if delta is None:
            delta_row = _delta(
                out, out_strides, grad_tile, grad_lse, place, row, offsets, inside, len_q, d,
                BLOCK_M, BLOCK_D, DESCRIPTORS,
            )  # fmt: skip
        else:
            delta_row = tl.load(delta + offsets, mask=inside, other=0.0)
        ds = p * (dp - delta_row[None, :])
        if _is_wide(BLOCK_D, PRODUCTS):
            q_tile = _load(q, q_strides, place, row, len_q, d, BLOCK_M, BLOCK_D, DESCRIPTORS)
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=PRODUCTS)
    return dk, dv


# -- products over the head dim ---------------------------------------------------------------------------------------


@triton.constexpr_function
def _is_wide(block_d, products):
    """Whether a left operand of a product over the head dim would fill a thread's registers: fp32, and 256 columns."""
    return products != "ieee" and block_d > 128


@triton.jit
def _operand(
    rows, d, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, DESCRIPTORS: tl.constexpr, PRODUCTS: tl.constexpr
):  # fmt: skip
    """A left operand, to be kept; nothing where it is too wide. `rows`: (memory, strides, place, row, length)."""
    if _is_wide(BLOCK_D, PRODUCTS):
        return ()
    else:  # the compiler would read on
        return _load(rows[0], rows[1], rows[2], rows[3], rows[4], d, ROWS, BLOCK_D, DESCRIPTORS)


@triton.jit
def _product(
    left, left_tile, right, d, LEFT_ROWS: tl.constexpr, RIGHT_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """left right^T, and the tile of `right`; of wide ones piece by piece, and nothing: they are read again."""
    if _is_wide(BLOCK_D, PRODUCTS):
        result = tl.zeros([LEFT_ROWS, RIGHT_ROWS], tl.float32)
        for column in tl.range(0, BLOCK_D, PIECE):
            a = _load_piece(left, column, d, LEFT_ROWS)
            b = _load_piece(right, column, d, RIGHT_ROWS)
            result = tl.dot(a, b.T, result, input_precision=PRODUCTS)
        return result, ()
    else:
        right_tile = _load(right[0], right[1], right[2], right[3], right[4], d, RIGHT_ROWS, BLOCK_D, DESCRIPTORS)
        return tl.dot(left_tile, right_tile.T, input_precision=PRODUCTS), right_tile


# -- which tiles ------------------------------------------------------------------------------------------------------


@triton.jit
def _assignment(blocks, all_heads, section):
    """This program's block and head: a block of every head of a section, then the next block; then the next section."""
    program = tl.program_id(0)
    first_head = program // (section * blocks) * section
    width = tl.minimum(section, all_heads - first_head)
    inside = program - first_head * blocks
    return inside // width, first_head + inside % width


@triton.jit
def _places(index, heads, group):
    """(batch, head) of a query head and of the KV head it reads."""
    batch, head = index // heads, index % heads
    return (batch, head), (batch, head // group)


@triton.jit
def _key_tiles(row, len_q, len_k, band, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where tiles of keys begin and end for BLOCK_M queries: begin, masked, full, masked, end."""
    last = tl.minimum(row + BLOCK_M, len_q) - 1
    begin, full_begin = 0, 0
    stop, full_stop = len_k, len_k
    if band[0] is not None:
        begin = tl.maximum(row + band[0], 0) // BLOCK_N * BLOCK_N
        full_begin = tl.cdiv(tl.maximum(last + band[0], 0), BLOCK_N) * BLOCK_N
    if band[1] is not None:
        stop = tl.minimum(stop, last + band[1] + 1)
        full_stop = tl.minimum(full_stop, row + band[1] + 1)
    return _ordered(begin, full_begin, full_stop, stop, BLOCK_N)


@triton.jit
def _query_tiles(column, len_q, len_k, band, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The same for tiles of queries, for BLOCK_N keys."""
    last = tl.minimum(column + BLOCK_N, len_k) - 1
    begin, full_begin = 0, 0
    stop, full_stop = len_q, len_q + BLOCK_M  # queries beyond the length do no harm
    if band[1] is not None:
        begin = tl.maximum(column - band[1], 0) // BLOCK_M * BLOCK_M
        full_begin = tl.cdiv(tl.maximum(last - band[1], 0), BLOCK_M) * BLOCK_M
    if band[0] is not None:
        stop = tl.minimum(stop, last - band[0] + 1)
        full_stop = tl.minimum(full_stop, column - band[0] + 1)
    if column + BLOCK_N > len_k:
        full_begin = len_q + BLOCK_M  # some of these keys are beyond the length, in every tile
    return _ordered(begin, full_begin, full_stop, stop, BLOCK_M)


@triton.jit
def _ordered(begin, full_begin, full_stop, stop, STEP: tl.constexpr):
    """Bounds in whole tiles from `begin`, in ascending order; a part may be empty."""
    end = begin + tl.cdiv(tl.maximum(stop - begin, 0), STEP) * STEP
    full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
    full_end = tl.minimum(tl.maximum(tl.maximum(full_stop, 0) // STEP * STEP, full_begin), end)
    return begin, full_begin, full_end, end


@triton.jit
def _visible(rows, columns, len_k, band):
    """Whether each key is inside the length and the band; rows and columns are shaped to broadcast."""
    seen = columns < len_k
    if band[0] is not None:
        seen = seen & (columns - rows >= band[0])
    if band[1] is not None:
        seen = seen & (columns - rows <= band[1])
    return seen


# -- memory -----------------------------------------------------------------------------------------------------------


@triton.jit
def _load(
    source, strides, place, row, length, d, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIPTORS: tl.constexpr
):  # fmt: skip
    """A (ROWS, COLUMNS) tile, zeros beyond `length` rows and `d` columns."""
    if DESCRIPTORS:
        tile = source.load([place[0], place[1], row, 0]).reshape([ROWS, COLUMNS])
    else:
        pointers, inside = _tile(source, strides, place, row, length, 0, d, ROWS, COLUMNS)
        tile = tl.load(pointers, mask=inside, other=0.0)
    return tile


@triton.jit
def _store(
    target, value, strides, place, row, length, d, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIPTORS: tl.constexpr
):  # fmt: skip
    if DESCRIPTORS:
        target.store([place[0], place[1], row, 0], value.to(target.dtype).reshape([1, 1, ROWS, COLUMNS]))
    else:
        pointers, inside = _tile(target, strides, place, row, length, 0, d, ROWS, COLUMNS)
        tl.store(pointers, value.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _load_piece(rows, column, d, ROWS: tl.constexpr):
    """PIECE columns of a tile. `rows`: as for `_operand`."""
    pointers, inside = _tile(rows[0], rows[1], rows[2], rows[3], rows[4], column, d, ROWS, PIECE)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _tile(source, strides, place, row, length, column, d, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # Where a tile begins takes 64 bits: a tensor may have more than 2^31 elements. Inside a tile 32 bits do.
    first = tl.cast(place[0], tl.int64) * strides[0] + tl.cast(place[1], tl.int64) * strides[1]
    first += tl.cast(row, tl.int64) * strides[2]
    rows, columns = tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    inside = (row + rows < length)[:, None] & (columns < d)[None, :]
    return source + first + rows[:, None] * strides[2] + columns[None, :], inside


@triton.jit
def _row_offsets(index, row, length, ROWS: tl.constexpr):
    """Of values that there is one of for each query, (batch, heads, len_q) contiguous."""
    rows = row + tl.arange(0, ROWS)
    return tl.cast(index, tl.int64) * length + rows, rows < length
