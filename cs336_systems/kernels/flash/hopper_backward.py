"""Attention backward for Hopper GPUs, in Gluon. How it works, drawn: docs/ATTENTION.md.

A program owns 128 keys, 64 for each of two warpgroups, and visits the blocks of queries that see them. All is
transposed: rows are keys, columns are queries, so that weights P and score gradients dS are operands of dV += P dO and
dK += dS Q where they are, in registers.

    S = K Q^T    dP = V dO^T    P = exp2(S - lse)    dS = P (dP - delta)    dV += P dO    dK += dS Q    dQ += dS^T K

Only dQ needs the dS of both warpgroups: they meet in shared memory, and each warpgroup forms half of dQ, one tile
later, when the other has long stored its part. A third warpgroup, the producer, has the copy engine (TMA) bring the
queries, and add each dQ to fp32 sums in global memory. The order of these additions differs from run to run, and so do
the last bits of dQ; those of dK and dV do not.

A warpgroup begins a tile when the other has its dS of the tile before: left alone they fall into step, and want the
tensor cores at the same time, and then the exponentials.

`prepare_kernel` makes what the loop reads for each query, and zeros for dQ; `finish_kernel` rounds dQ. Without a mask
the last blocks of keys may be cut into pieces, as in forward, each a program for a part of the queries; `join_kernel`
adds up what they have of dK and dV.
"""

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cs336_systems.kernels.flash.hopper_forward import (
    LOG2E,
    ONE,
    ROWS,
    assignment,
    await_turn,
    columns_of,
    portion,
    row_by_row,
    share,
)

BLOCK_N = gl.constexpr(128)
STAGES = gl.constexpr(2)
"""Of queries, and of dS: a tile is worked on, and the next is on its way, or the one before still read."""
WARP = gl.constexpr(32)
HALF = gl.constexpr(64)
"""Rows, and columns, of what a warpgroup forms of dQ."""


@builtin
def tma_reduce_add(desc, coord, src, _semantic=None):
    """Add a tile in shared memory to one in global memory: Gluon's compiler has it, its language does not yet."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@gluon.jit(do_not_specialize=["order", "whole", "pieces"])
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dq_desc, dk_desc, dv_desc, partial,
    heads, group, len_k, padded, hi, scale, q_blocks, order, whole, pieces,
    CAUSAL: gl.constexpr, EVEN: gl.constexpr, D: gl.constexpr, DEPTH: gl.constexpr, BLOCK_M: gl.constexpr,
    DIAGONALS: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    """dK and dV of 128 keys, and their part of dQ; from the `whole`-th program on, those of a part of the queries, dK
    and dV to `partial`. EVEN: len_k is a multiple of 128; GROUPED: heads share keys; DIAGONALS: in how many blocks of
    queries a mask may cut; DEPTH: of the D columns the others are padding, and S and dP do without them."""
    unit = gl.program_id(0)
    if partial is not None:
        unit, piece, of = share(unit, whole, pieces)
    block, _, batch, kv_head = assignment(unit, order)
    column = block * BLOCK_N
    first = 0
    if CAUSAL:  # where no query sees these keys the last block is visited, and adds nothing
        first = gl.minimum(gl.maximum(column - hi, 0) // BLOCK_M, q_blocks - 1)
    start, tiles = 0, group * (q_blocks - first)
    if partial is not None:
        start, tiles = portion(tiles, piece, of)
    place = (batch, kv_head, group, column, first, q_blocks - first, start, tiles)
    problem = (len_k, hi, scale)

    q_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_M, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_M, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [1, 1, BLOCK_N, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [1, 1, 1, BLOCK_N, D], v_desc.layout)  # why one more: `_tile`
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], delta_desc.layout)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_N], q_desc.dtype)
    ds_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BLOCK_M, BLOCK_N], DS_LAYOUT)  # transposed: for dQ
    # Of two places for dQ one can be stored to while the other is read: measured, 2 to 3% faster for 128.
    PLACES: gl.constexpr = 2 if D == 128 else 1
    dq_smem = gl.allocate_shared_memory(gl.float32, [PLACES * 2, 4 * WARP, WARP], dq_desc.layout)
    kv_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    late = gl.allocate_shared_memory(gl.int64, [4, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    _write(late, 0, batch)
    _write(late, 1, kv_head)
    _write(late, 2, column)
    if partial is not None:  # where a piece goes
        number = gl.program_id(0) - whole
        address = partial.to(gl.int64, bitcast=True) + number.to(gl.int64) * (2 * BLOCK_N * D * 4)
        _write(late, 3, gl.where(number < 0, 0, address))
    mbarrier.init(kv_bar, count=1)
    for i in gl.static_range(PLACES):
        mbarrier.init(free.index(i), count=1)
    for w in gl.static_range(2):
        mbarrier.init(turns.index(w), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(done.index(stage), count=2)
    fence_async_shared()
    gdc_wait()  # so far this ran beside `prepare_kernel`; `finish_kernel` will begin where multiprocessors are free
    gdc_launch_dependents()
    descs = (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc)
    smem = (q_smem, do_smem, lse_smem, delta_smem, k_smem, v_smem, ds_smem, dq_smem)
    bars = (kv_bar, full, done, free, turns)
    outs = (dk_desc, dv_desc, late)
    SPLIT: gl.constexpr = partial is not None
    # Constants must stand in the call itself.
    gl.warp_specialize(
        [
            (_produce, (descs, dq_desc, smem, bars, place, heads, padded, GROUPED, D, BLOCK_M)),
            (
                _consume,
                (outs, smem, bars, place, problem, 0, CAUSAL, EVEN, D, DEPTH, BLOCK_M, DIAGONALS, GROUPED, SPLIT),
            ),
            (
                _consume,
                (outs, smem, bars, place, problem, 1, CAUSAL, EVEN, D, DEPTH, BLOCK_M, DIAGONALS, GROUPED, SPLIT),
            ),
        ],
        [4, 4],
        [240, 240],
    )


@gluon.jit
def _produce(
    descs, dq_desc, smem, bars, place, heads, padded, GROUPED: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr
):  # fmt: skip
    """Brings queries, and takes dQ away."""
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc = descs
    q_smem, do_smem, lse_smem, delta_smem, k_smem, v_smem, _, dq_smem = smem
    kv_bar, full, done, free, _ = bars
    batch, kv_head, _, column, _, _, _, tiles = place
    mbarrier.expect(kv_bar, 2 * BLOCK_N * D * 2)
    tma.async_copy_global_to_shared(k_desc, [batch, kv_head, column, 0], kv_bar, k_smem)
    tma.async_copy_global_to_shared(v_desc, [batch, kv_head, column, 0], kv_bar, v_smem.index(0))
    for t in range(tiles + STAGES + 1):
        slot = t % STAGES
        mbarrier.wait(done.index(slot), (t // STAGES & 1) ^ 1)
        if t < tiles:
            head, row = _position(t, place, GROUPED, BLOCK_M)
            flat = (batch * heads + head) * padded + row
            bar = full.index(slot)
            mbarrier.expect(bar, 2 * BLOCK_M * D * 2 + 2 * BLOCK_M * 4)
            tma.async_copy_global_to_shared(q_desc, [batch, head, row, 0], bar, q_smem.index(slot))
            tma.async_copy_global_to_shared(lse_desc, [flat], bar, lse_smem.index(slot))
            tma.async_copy_global_to_shared(do_desc, [batch, head, row, 0], bar, do_smem.index(slot))
            tma.async_copy_global_to_shared(delta_desc, [flat], bar, delta_smem.index(slot))
        _take_dq(t, dq_desc, dq_smem, free, place, heads, padded, GROUPED, D, BLOCK_M)


@gluon.jit
def _take_dq(
    t, dq_desc, dq_smem, free, place, heads, padded, GROUPED: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr
):  # fmt: skip
    """The tile whose slot is free now, STAGES before t, left dQ of the tile before it."""
    if t > STAGES:
        PLACES: gl.constexpr = free.shape[0]
        tile = t - STAGES - 1
        head, row = _position(tile, place, GROUPED, BLOCK_M)
        block = ((place[0] * heads + head) * padded + row) // HALF * (D // HALF)
        for w in gl.static_range(2):
            tma_reduce_add(dq_desc, [(block + w) * (4 * WARP), 0], dq_smem.index(tile % PLACES * 2 + w))
        tma.store_wait(0)
        mbarrier.arrive(free.index(tile % PLACES))


@gluon.jit
def _position(t, place, GROUPED: gl.constexpr, BLOCK_M: gl.constexpr):
    """Head and first query of tile t: all blocks of a head, then the next of those that share these keys."""
    _, kv_head, group, _, first, count, start, _ = place
    t += start
    head, block = kv_head, first + t
    if GROUPED:
        head, block = kv_head * group + t // count, first + t % count
    return head, block * BLOCK_M


@gluon.jit
def _consume(
    outs, smem, bars, place, problem,
    W: gl.constexpr, CAUSAL: gl.constexpr, EVEN: gl.constexpr, D: gl.constexpr, DEPTH: gl.constexpr,
    BLOCK_M: gl.constexpr, DIAGONALS: gl.constexpr, GROUPED: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """The keys of warpgroup W."""
    KV_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dk_desc, dv_desc, late = outs
    v_smem = smem[5].index(0)
    _, _, group, _, first, count, _, tiles = place
    dk = gl.zeros((ROWS, D), gl.float32, KV_LAYOUT)
    dv = gl.zeros((ROWS, D), gl.float32, KV_LAYOUT)
    mbarrier.wait(bars[0], 0)
    dk, dv = _tile(0, first * BLOCK_M, smem, bars, place, problem, dk, dv, CAUSAL, True, W, EVEN, D, DEPTH, BLOCK_M)
    # Tiles are counted from a constant on: else ptxas counts in registers of threads, moves the number to those of the
    # warp for every product, and begins dQ after all exponentials, not among them. At 128 that took 6% longer.
    if GROUPED and CAUSAL:  # the mask cuts the first blocks of every query head
        t, cut = 1, gl.minimum(DIAGONALS, count)
        for head in range(group):
            for block in range(gl.where(head == 0, 1, 0), cut):
                row = (first + block) * BLOCK_M
                dk, dv = _tile(t, row, smem, bars, place, problem, dk, dv, True, False, W, EVEN, D, DEPTH, BLOCK_M)
                t += 1
            for _ in range(cut, count):
                dk, dv = _tile(t, 0, smem, bars, place, problem, dk, dv, False, False, W, EVEN, D, DEPTH, BLOCK_M)
                t += 1
    else:
        for t in gl.static_range(1, DIAGONALS):
            if t < tiles:
                row = (first + t) * BLOCK_M
                dk, dv = _tile(t, row, smem, bars, place, problem, dk, dv, True, False, W, EVEN, D, DEPTH, BLOCK_M)
        for t in range(DIAGONALS, tiles):
            dk, dv = _tile(t, 0, smem, bars, place, problem, dk, dv, False, False, W, EVEN, D, DEPTH, BLOCK_M)

    if SPLIT:
        _keep_piece(dv, 1, late, W, D)
    # Of V each warpgroup reads only its own part, and has done so for the last time.
    v_smem.reshape((BLOCK_N, D)).slice(W * ROWS, ROWS).store(dv.to(v_smem.dtype))
    _send(dv_desc, v_smem.slice(W * ROWS, ROWS, dim=2), late, W)
    last = tiles - 1
    mbarrier.wait(bars[2].index(last % STAGES), last // STAGES & 1)
    dq_token = _half_of_dq(last, smem, W, D, BLOCK_M)
    dk = dk * problem[2]
    if SPLIT:
        _keep_piece(dk, 0, late, W, D)
    # Both are through the last queries, and no more will come.
    spare = smem[0].index(W)
    spare.reshape((BLOCK_M, D)).slice(0, ROWS).store(dk.to(v_smem.dtype))
    _send(dk_desc, spare.slice(0, ROWS, dim=2), late, W)
    dq = warpgroup_mma_wait(0, deps=[dq_token])
    _store_dq(dq, last, smem[7], bars[3], W)
    fence_async_shared()
    mbarrier.arrive(bars[2].index((last + 1) % STAGES))
    tma.store_wait(0)


@gluon.jit
def _send(desc, part, late, W: gl.constexpr):
    """What a warpgroup has stored in shared memory, to where its keys are."""
    fence_async_shared()
    batch, kv_head, column = _read(late, 0).to(gl.int32), _read(late, 1).to(gl.int32), _read(late, 2).to(gl.int32)
    tma.async_copy_shared_to_global(desc, [batch, kv_head, column + W * ROWS, 0], part)


@gluon.jit
def _write(late, i: gl.constexpr, x):
    """Keeps a number in shared memory until after the loop: in a register it would push others out of theirs."""
    late.index(i).store(gl.full([1], x.to(gl.int64), gl.int64, ONE))


@gluon.jit
def _read(late, i: gl.constexpr):
    return gl.sum(late.index(i).load(ONE), 0)


@gluon.jit
def _keep_piece(x, which: gl.constexpr, late, W: gl.constexpr, D: gl.constexpr):
    """Stores dK (0) or dV (1) for `join_kernel` if it is but a piece. Masked, because a branch would cost the loop
    registers; so a piece is also stored as if it were whole, and `join_kernel` overwrites that."""
    target = _read(late, 3)
    rows = (which * 2 + W) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, x.type.layout))
    at = rows[:, None] * D + gl.arange(0, D, layout=gl.SliceLayout(0, x.type.layout))[None, :]
    gl.store(target.to(gl.pointer_type(gl.float32), bitcast=True) + at, x, mask=target != 0)


@gluon.jit
def _tile(
    t, row, smem, bars, place, problem, dk, dv,
    MASKED: gl.constexpr, FIRST: gl.constexpr, W: gl.constexpr, EVEN: gl.constexpr, D: gl.constexpr,
    DEPTH: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """One block of queries, from `row` on where it is MASKED; dQ of the block before, unless this is the FIRST."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    q_smem, do_smem, lse_smem, delta_smem, k_smem, v_smem, ds_smem, dq_smem = smem
    _, full, done, free, turns = bars
    column = place[3]
    len_k, hi, scale = problem
    dtype: gl.constexpr = q_smem.dtype
    slot = t % STAGES
    mbarrier.wait(full.index(slot), t // STAGES & 1)
    q = q_smem.index(slot).reshape((BLOCK_M, D))
    do = do_smem.index(slot).reshape((BLOCK_M, D))
    k = k_smem.reshape((BLOCK_N, D)).slice(W * ROWS, ROWS)
    # V has one place, 0. Were that known to the compiler, it would keep V's matrix descriptors in registers over the
    # loop, 16 of them, and spill others.
    v = v_smem.index(t >> 30).reshape((BLOCK_N, D)).slice(W * ROWS, ROWS)
    zeros = gl.zeros((ROWS, BLOCK_M), gl.float32, S_LAYOUT)
    await_turn(turns, t, W)
    s_token = row_by_row(columns_of(k, DEPTH), q, zeros)
    v = columns_of(v, DEPTH)
    dp_token = row_by_row(v, do, zeros)
    s = warpgroup_mma_wait(len(v), deps=[s_token])
    # Not before: held over the products, it would push accumulators out of registers. So for delta.
    lse = _of_queries(lse_smem.index(slot), BLOCK_M, S_LAYOUT)
    if MASKED or not EVEN:
        keys = column + W * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))[:, None]
        seen = keys < len_k
        if MASKED:
            queries = row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, S_LAYOUT))[None, :]
            seen = seen & (keys <= queries + hi)
        s = gl.where(seen, s, float("-inf"))
    p = gl.exp2(s * (scale * LOG2E) - lse[None, :])
    p16 = gl.convert_layout(p.to(dtype), OPERAND, assert_trivial=True)
    dp = warpgroup_mma_wait(0, deps=[dp_token])
    delta = _of_queries(delta_smem.index(slot), BLOCK_M, S_LAYOUT)
    ds = (p * (dp - delta[None, :])).to(dtype)
    ds16 = gl.convert_layout(ds, OPERAND, assert_trivial=True)
    mbarrier.arrive(turns.index(W))
    ds_place = ds_smem.index(slot).slice(W * ROWS, ROWS, dim=1)
    if FIRST:
        dv_token = warpgroup_mma(p16, do, dv, is_async=True)
        dk_token = warpgroup_mma(ds16, q, dk, is_async=True)
        dv, dk, p16, ds16 = warpgroup_mma_wait(0, deps=[dv_token, dk_token, p16, ds16])
        ds_place.store(gl.permute(ds, (1, 0)))
    else:
        # Both have stored their dS of the tile before, and have read the one before that, which is overwritten here.
        mbarrier.wait(done.index((t - 1) % STAGES), (t - 1) // STAGES & 1)
        dq_token = _half_of_dq(t - 1, smem, W, D, BLOCK_M)
        if D == 64:  # measured: here for 64, below for 128
            ds_place.store(gl.permute(ds, (1, 0)))
        dv_token = warpgroup_mma(p16, do, dv, is_async=True)
        if D != 64:
            ds_place.store(gl.permute(ds, (1, 0)))
        dk_token = warpgroup_mma(ds16, q, dk, is_async=True)
        dq = warpgroup_mma_wait(2, deps=[dq_token])
        _store_dq(dq, t - 1, dq_smem, free, W)
        dv, dk, p16, ds16 = warpgroup_mma_wait(0, deps=[dv_token, dk_token, p16, ds16])
    fence_async_shared()
    # Also that the queries were read for the last time: the store above lies between their products and this.
    mbarrier.arrive(done.index(slot))
    return dk, dv


@gluon.constexpr_function
def _queries_of_threads(block_m):
    """Four of every sixteen, by the lowest two bits of the thread's number."""
    far = [[1 << bit] for bit in range(4, block_m.bit_length() - 1)]
    return gl.DistributedLinearLayout([[1], [2], *far], [[4], [8], [0], [0], [0]], [[0], [0]], [], [block_m])


@gluon.jit
def _of_queries(rows, BLOCK_M: gl.constexpr, S_LAYOUT: gl.constexpr):
    """A number for each query, in the order of `prepare_kernel`: a thread needs two neighbours of every eight, and has
    those of sixteen side by side, to be read at once."""
    x = gl.reshape(rows.load(_queries_of_threads(BLOCK_M)), [BLOCK_M // 16, 4, 2, 2])
    x = gl.reshape(gl.permute(x, (0, 2, 1, 3)), [BLOCK_M])
    return gl.convert_layout(x, gl.SliceLayout(0, S_LAYOUT), assert_trivial=True)


@gluon.jit
def _half_of_dq(t, smem, W: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr):
    """Of tile t, begun: half of its rows, or where it has but 64, half of its columns."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    k = smem[4].reshape((BLOCK_N, D))
    ds = smem[6].index(t % STAGES)
    if BLOCK_M == 128:
        ds = ds.slice(W * HALF, HALF)
    else:
        k = k.slice(W * HALF, HALF, dim=1)
    zeros = gl.zeros((HALF, HALF), gl.float32, LAYOUT)
    return warpgroup_mma(ds, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _store_dq(dq, t, dq_smem, free, W: gl.constexpr):
    """As it lies in registers: a row for each thread, of its 32 numbers. `finish_kernel` puts them in order."""
    PLACES: gl.constexpr = free.shape[0]
    mbarrier.wait(free.index(t % PLACES), ~(t // PLACES) & 1)  # what was there before was taken away
    x = gl.reshape(dq, [4, 2, 8, HALF // 8, 4, 2])  # warp, row / 8 % 2, row % 8, column / 8, column / 2 % 4, column % 2
    dq_smem.index(t % PLACES * 2 + W).store(gl.reshape(gl.permute(x, (0, 2, 4, 3, 1, 5)), [4 * WARP, WARP]))


# -- before and after -------------------------------------------------------------------------------------------------


@triton.jit
def prepare_kernel(
    out, grad, lse, grad_lse, scratch, copy, out_strides, grad_strides, heads, len_q, d, passes, queries,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For BLOCK queries: lse in powers of 2, and delta = rowsum(O dO) less the gradient of lse; zeros for dQ; and where
    TMA cannot read dO as it lies (expanded from one number, say), a `copy` of it. `queries`: of all heads, padded."""
    gdc_launch_dependents()
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # forward has just left the last outputs in the L2 cache
    index, row = program // passes, program % passes * BLOCK
    own, columns = row + tl.arange(0, BLOCK), tl.arange(0, D)
    inside = own < len_q
    tile = inside[:, None] & (columns < d)[None, :]
    batch, head = tl.cast(index // heads, tl.int64), tl.cast(index % heads, tl.int64)
    far = tl.cast(own, tl.int64)[:, None]
    o_at = batch * out_strides[0] + head * out_strides[1] + far * out_strides[2] + columns[None, :] * out_strides[3]
    g_at = batch * grad_strides[0] + head * grad_strides[1] + far * grad_strides[2] + columns[None, :] * grad_strides[3]
    o = tl.load(out + o_at, mask=tile, other=0.0)
    g = tl.load(grad + g_at, mask=tile, other=0.0)
    delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    at = tl.cast(index, tl.int64) * len_q + own
    if grad_lse is not None:
        delta -= tl.load(grad_lse + at, mask=inside, other=0.0)
    natural = tl.load(lse + at, mask=inside, other=0.0)
    # A query that sees no key has -inf: with +inf in its place its weights are 0.
    powers = tl.where(natural == float("-inf"), float("inf"), natural * 1.4426950408889634)
    # In every sixteen, (half, pair, place in the pair) becomes (pair, half, place in the pair): see `_of_queries`.
    place = own // 16 * 16 + own % 8 // 2 * 4 + own % 16 // 8 * 2 + own % 2
    before = tl.cast(index, tl.int64) * passes * BLOCK  # queries of other heads
    tl.store(scratch + before + place, powers)
    tl.store(scratch + queries + before + place, delta)
    sums = scratch + 2 * tl.cast(queries, tl.int64)
    tl.store(sums + (before + row) * D + tl.arange(0, BLOCK * D), tl.zeros([BLOCK * D], tl.float32))
    if copy is not None:
        tl.store(copy + at[:, None] * d + columns[None, :], g, mask=tile)


@triton.jit
def finish_kernel(
    target, scratch, strides, heads, len_q, d, passes, queries, scale, D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """dQ of BLOCK queries, put in order, scaled and rounded, to where it belongs."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # the last sums are still in the L2 cache
    index, row = program // passes, program % passes * BLOCK
    gdc_wait()
    sums = scratch + 2 * tl.cast(queries, tl.int64)
    x = tl.load(sums + (tl.cast(index, tl.int64) * passes * BLOCK + row) * D + tl.arange(0, BLOCK * D))
    # Of 64 x 64: warp, row % 8, column / 2 % 4, column / 8, row / 8 % 2, column % 2. See `_store_dq`.
    x = tl.reshape(x, [BLOCK // 64, D // 64, 4, 8, 4, 8, 2, 2])
    x = tl.reshape(tl.permute(x, (0, 2, 6, 3, 1, 5, 4, 7)), [BLOCK, D])
    own, columns = row + tl.arange(0, BLOCK), tl.arange(0, D)
    tile = (own < len_q)[:, None] & (columns < d)[None, :]
    batch, head = tl.cast(index // heads, tl.int64), tl.cast(index % heads, tl.int64)
    at = batch * strides[0] + head * strides[1] + tl.cast(own, tl.int64)[:, None] * strides[2] + columns[None, :]
    tl.store(target + at, (x * scale).to(target.dtype.element_ty), mask=tile)


@gluon.jit(do_not_specialize=["order", "whole", "pieces"])
def join_kernel(
    dk, dv, partial, dk_strides, dv_strides, len_k, d, order, whole, pieces,
    D: gl.constexpr,
):  # fmt: skip
    """dK, or dV, of 64 keys of a block that `backward_kernel` left in pieces."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [256 // D, D // 8], [4, 1], [1, 0])
    beyond, which, half = gl.program_id(0) // 4, gl.program_id(0) // 2 % 2, gl.program_id(0) % 2
    block, _, batch, head = assignment(whole + beyond, order)
    inside = half * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    at = partial + (beyond * pieces * 2 + which) * (BLOCK_N * D) + inside[:, None] * D + columns
    x = gl.zeros((ROWS, D), gl.float32, LAYOUT)
    for piece in range(pieces):
        x += gl.load(at + piece * (2 * BLOCK_N * D))
    keys = (block * BLOCK_N + inside)[:, None]
    tile = (keys < len_k) & (columns < d)
    batch, head, far = batch.to(gl.int64), head.to(gl.int64), keys.to(gl.int64)
    if which == 0:
        target = dk + batch * dk_strides[0] + head * dk_strides[1] + far * dk_strides[2] + columns
        gl.store(target, x.to(dk.dtype.element_ty), mask=tile)
    else:
        target = dv + batch * dv_strides[0] + head * dv_strides[1] + far * dv_strides[2] + columns
        gl.store(target, x.to(dv.dtype.element_ty), mask=tile)
