"""Attention backward for Hopper GPUs, in Gluon. How it works, drawn: docs/ATTENTION.md.

A program owns 128 keys, 64 for each of two consumer warpgroups, and visits the blocks of queries that see them. All is
transposed: rows are keys, columns are queries, so that P and dS are operands of dV += P dO and dK += dS Q where they
are, in registers.

    S = K Q^T    dP = V dO^T    P = exp2(S - lse)    dS = P (dP - delta)    dV += P dO    dK += dS Q    dQ += dS^T K

Only dQ needs the dS of both warpgroups: they exchange it through shared memory, and each warpgroup computes half of dQ
one tile later, when the other has long stored its part. A third warpgroup, the producer, has the copy engine (TMA) load
the queries, and add each dQ to fp32 sums in global memory. The order of these additions differs from run to run, and so
do the last bits of dQ; those of dK and dV do not.

The consumers run in ping-pong order: a warpgroup starts a tile when the other has its dS of the tile before. Without it
they fall into step, and want the tensor cores at the same time, and then the exponentials.

`prepare_kernel` computes what the loop reads for each query, and zeros dQ; `finish_kernel` rounds dQ. Without a mask
the queries of the last blocks of keys may be split over several programs, as the keys are in forward. With a mask and
few KV heads, the query heads that share one may be. `combine_kernel` adds up the dK and dV of split programs.

A window to the left bounds the blocks of queries from above. Where it, or a causal mask on grouped heads, cuts blocks
that are not the first ones, all that are cut are visited first, and the main loop has no mask.

Packed documents: as in hopper_forward.py. In scratch memory each document's queries are padded to a multiple of 128, so
that no tile of them belongs to two documents; `prepare_kernel` and `finish_kernel` find theirs in a table of all blocks
of 128 queries in the order of the documents.

Names: desc_ TMA descriptor, p_ pointer to global memory, s_ shared memory, b_ block in registers, m_ mask.
Shapes: BLOCK_N = 128 keys of a program, ROWS = 64 of a warpgroup, BLOCK_M queries of a tile, D head dim padded to 64 or
128, W warpgroup.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
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
    ROWS,
    SCALAR,
    accumulator_layout,
    await_turn,
    block_and_head,
    origin_of,
    outer_of,
    part_of,
    place,
    split_of_program,
    start_matmul,
    start_products,
    store_sums,
    tile_shape,
    tile_shapes,
    used_columns,
    zero_sums,
)
from cs336_systems.kernels.flash.packing_triton import (
    FIELDS,
    FIRST_K,
    FIRST_Q,
    LEN_K,
    LEN_Q,
    PADDED_Q,
    PADDING,
    ROW,
    SHIFT,
)
from cs336_systems.kernels.triton_compat import RAGGED_ROWS, Value, aggregate, specialize_warps, tma_reduce_add

BLOCK_N = gl.constexpr(128)
STAGES = gl.constexpr(2)
"""Buffers of queries, and of dS: one is worked on, the other is being loaded or still read."""
WARP = gl.constexpr(32)
HALF = gl.constexpr(64)
"""Rows, and columns, of the part of dQ that a warpgroup computes."""
BATCH, KV_HEAD, COLUMN, PARTIAL, PARKED = (gl.constexpr(i) for i in range(5))
"""Slots of `Outputs.s_parked`, and their number."""


@aggregate
class Config:
    """Compile-time constants of the backward kernel."""

    CAUSAL: gl.constexpr
    EVEN: gl.constexpr
    """True if len_k is a multiple of BLOCK_N."""
    D: gl.constexpr
    D_USED: gl.constexpr
    """Columns that matmuls compute; the others of D are zero padding."""
    BLOCK_M: gl.constexpr
    MASKED_TILES: gl.constexpr
    """Number of blocks of queries, the first ones, that the causal mask may cut; at least 1."""
    WINDOW_TILES: gl.constexpr
    """Number of blocks of queries, the last ones, that a window to the left may cut."""
    HEADS: gl.constexpr
    """Largest number of query heads that a program visits."""
    EVEN_HEADS: gl.constexpr
    """True if every program visits HEADS query heads."""
    WINDOW: gl.constexpr
    """True if a window hides keys far to the left of a query."""
    CUT_FIRST: gl.constexpr
    """True if the blocks that a mask may cut, of all query heads, are visited first."""
    SPLIT: gl.constexpr
    """True if some programs see only a part of the queries."""
    PACKED: gl.constexpr
    """True if documents are packed along the sequence."""


@aggregate
class Work:
    """The block of keys and range of queries of a program."""

    batch: Value
    kv_head: Value
    head: Value
    """First query head."""
    heads: Value
    """Number of query heads."""
    column: Value
    """First key."""
    first: Value
    """First block of queries of each query head."""
    count: Value
    """Blocks of queries of each query head."""
    start: Value
    """First tile, if the queries are split."""
    tiles: Value
    """Blocks of queries, of all query heads that the program visits."""
    batch_q: Value
    """With packed documents `outer_of` the document for queries, as `batch` is for keys; None otherwise."""
    origin_q: Value
    """With packed documents `origin_of` the document for queries; 0 otherwise."""
    loaded_k: Value
    """With packed documents `origin_of` the document for loading keys, or RAGGED_ROWS (zeros are loaded) if it has no
    queries; 0 otherwise."""
    padded_q: Value
    """With packed documents the queries of a head before the document, in scratch memory; 0 otherwise."""


@aggregate
class Sizes:
    len_k: Value
    lo: Value
    """Query i sees keys from i + lo on; None: from the first on."""
    hi: Value
    """Query i sees keys up to i + hi."""
    scale: Value


@aggregate
class Inputs:
    """TMA descriptors of the tensors that the producer loads."""

    q: Value
    k: Value
    v: Value
    do: Value
    lse: Value
    delta: Value


@aggregate
class Buffers:
    s_q: Value  # [STAGES, 1, 1, BLOCK_M, D]
    s_do: Value  # [STAGES, 1, 1, BLOCK_M, D]
    s_lse: Value  # [STAGES, BLOCK_M]
    s_delta: Value  # [STAGES, BLOCK_M]
    s_k: Value  # [1, 1, BLOCK_N, D]
    s_v: Value  # [1, 1, 1, BLOCK_N, D]; one dimension more: see `_step`
    s_ds: Value  # [STAGES, BLOCK_M, BLOCK_N], transposed, for dQ
    s_dq: Value  # [2 * buffers of dQ, 4 * WARP, WARP]


@aggregate
class Barriers:
    kv_full: Value
    full: Value
    """Barrier: a stage of queries was loaded."""
    done: Value
    """Barrier: both consumers have read a stage's queries and stored its dS."""
    dq_free: Value
    """Barrier: a buffer of dQ was added to global memory."""
    last_dq: Value
    """Barrier: both consumers have stored dQ of the last tile. `done` cannot say so: with one or two tiles they may do
    that before the producer waits for a stage that they have used, and it would miss a phase."""
    ping_pong: Value


@aggregate
class Outputs:
    desc_dk: Value
    desc_dv: Value
    s_parked: Value
    """Values that only the code after the loop needs, kept in shared memory to save registers during the loop."""


@gluon.jit(do_not_specialize=["schedule", "unsplit", "splits"])
def backward_kernel(
    desc_q, desc_k, desc_v, desc_do, desc_lse, desc_delta, desc_dq, desc_dk, desc_dv, p_partial, p_table,
    heads, len_k, padded, lo, hi, scale, q_blocks, schedule, unsplit, splits,
    CAUSAL: gl.constexpr, EVEN: gl.constexpr, D: gl.constexpr, D_USED: gl.constexpr, BLOCK_M: gl.constexpr,
    MASKED_TILES: gl.constexpr, WINDOW_TILES: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of BLOCK_N keys, and their part of dQ, from up to HEADS of the GROUP query heads of a KV head.
    Programs from `unsplit` on see one of `splits` parts of the queries, or of the query heads if HEADS < GROUP, and
    write dK and dV to `p_partial`. `padded`: queries of a head in scratch memory."""
    SPLIT: gl.constexpr = p_partial is not None
    PACKED: gl.constexpr = p_table is not None
    WINDOW: gl.constexpr = lo is not None
    CUT_FIRST: gl.constexpr = WINDOW or (CAUSAL and HEADS > 1)
    config = Config(
        CAUSAL=CAUSAL, EVEN=EVEN, D=D, D_USED=D_USED, BLOCK_M=BLOCK_M, MASKED_TILES=MASKED_TILES,
        WINDOW_TILES=WINDOW_TILES, HEADS=HEADS, EVEN_HEADS=GROUP % HEADS == 0, WINDOW=WINDOW, CUT_FIRST=CUT_FIRST,
        SPLIT=SPLIT, PACKED=PACKED,
    )  # fmt: skip
    unit = gl.program_id(0)
    if SPLIT:
        unit, split, of = split_of_program(unit, unsplit, splits)
    block, _, batch, kv_head = block_and_head(unit, schedule)
    column = block * BLOCK_N
    batch_q, origin_q, origin_k, loaded_k, padded_q = None, 0, 0, 0, 0
    if PACKED:
        line = p_table + block * FIELDS
        len_q, len_k = gl.load(line + LEN_Q), gl.load(line + LEN_K)
        if len_k == 0:  # documents may have fewer blocks than there are programs
            return
        column, padded_q = gl.load(line + ROW), gl.load(line + PADDED_Q)
        hi += gl.load(line + SHIFT)
        if WINDOW:
            lo += gl.load(line + SHIFT)
        batch, batch_q = outer_of(gl.load(line + FIRST_K), len_k), outer_of(gl.load(line + FIRST_Q), len_q)
        origin_q, origin_k = origin_of(len_q), origin_of(len_k)
        q_blocks = gl.maximum(gl.cdiv(len_q, BLOCK_M), 1)
        # Without queries one block is visited. It, its place in scratch memory and the keys read are then outside of
        # all documents, and zeros: the keys themselves may hold anything.
        loaded_k = gl.where(len_q == 0, RAGGED_ROWS, origin_k)
        padded_q = gl.where(len_q == 0, heads * padded, padded_q)
    first, count = 0, q_blocks
    if CAUSAL:  # where no query sees these keys the last block is visited, and adds nothing
        first = gl.minimum(gl.maximum(column - hi, 0) // BLOCK_M, q_blocks - 1)
        count -= first
    if WINDOW:
        beyond = gl.maximum(column + BLOCK_N - 1 - lo, 0) // BLOCK_M + 1
        count = gl.maximum(gl.minimum(beyond, q_blocks) - first, 1)
    head, visited, start, tiles = kv_head * GROUP, HEADS, 0, HEADS * count
    if GROUP % HEADS != 0:
        first_head, visited = part_of(GROUP, split, of)
        head, tiles = head + first_head, visited * count
    elif HEADS < GROUP:
        head += split * HEADS
    elif SPLIT:
        start, tiles = part_of(tiles, split, of)
    work = Work(
        batch=batch, kv_head=kv_head, head=head, heads=visited, column=column, first=first, count=count, start=start,
        tiles=tiles, batch_q=batch_q, origin_q=origin_q, loaded_k=loaded_k, padded_q=padded_q,
    )  # fmt: skip
    sizes = Sizes(len_k=len_k, lo=lo, hi=hi, scale=scale)

    s_q = gl.allocate_shared_memory(desc_q.dtype, tile_shapes(STAGES, BLOCK_M, D, PACKED), desc_q.layout)
    s_do = gl.allocate_shared_memory(desc_q.dtype, tile_shapes(STAGES, BLOCK_M, D, PACKED), desc_q.layout)
    s_k = gl.allocate_shared_memory(desc_k.dtype, tile_shape(BLOCK_N, D, PACKED), desc_k.layout)
    s_v = gl.allocate_shared_memory(desc_v.dtype, tile_shapes(1, BLOCK_N, D, PACKED), desc_v.layout)
    s_lse = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], desc_lse.layout)
    s_delta = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], desc_delta.layout)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_N], desc_q.dtype)
    s_ds = gl.allocate_shared_memory(desc_q.dtype, [STAGES, BLOCK_M, BLOCK_N], DS_LAYOUT)
    # With two buffers of dQ one can be stored to while the other is read: measured, 2 to 3% faster for 128.
    DQ_BUFFERS: gl.constexpr = 2 if D == 128 else 1
    s_dq = gl.allocate_shared_memory(gl.float32, [DQ_BUFFERS * 2, 4 * WARP, WARP], desc_dq.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dq_free = gl.allocate_shared_memory(gl.int64, [DQ_BUFFERS, 1], mbarrier.MBarrierLayout())
    last_dq = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ping_pong = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    s_parked = gl.allocate_shared_memory(gl.int64, [PARKED, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    _park(s_parked, BATCH, batch)
    _park(s_parked, KV_HEAD, kv_head)
    _park(s_parked, COLUMN, origin_k + column)
    if SPLIT:  # address of the partial results; 0 for a program that is not split
        number = gl.program_id(0) - unsplit
        address = p_partial.to(gl.int64, bitcast=True) + number.to(gl.int64) * (2 * BLOCK_N * D * 4)
        _park(s_parked, PARTIAL, gl.where(number < 0, 0, address))
    mbarrier.init(kv_full, count=1)
    mbarrier.init(last_dq, count=2)
    for i in gl.static_range(DQ_BUFFERS):
        mbarrier.init(dq_free.index(i), count=1)
    for w in gl.static_range(2):
        mbarrier.init(ping_pong.index(w), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(done.index(stage), count=2)
    fence_async_shared()
    gdc_wait()  # so far this ran beside `prepare_kernel`; `finish_kernel` will begin where multiprocessors are free
    gdc_launch_dependents()
    inputs = Inputs(q=desc_q, k=desc_k, v=desc_v, do=desc_do, lse=desc_lse, delta=desc_delta)
    buffers = Buffers(s_q=s_q, s_do=s_do, s_lse=s_lse, s_delta=s_delta, s_k=s_k, s_v=s_v, s_ds=s_ds, s_dq=s_dq)
    barriers = Barriers(kv_full=kv_full, full=full, done=done, dq_free=dq_free, last_dq=last_dq, ping_pong=ping_pong)
    outputs = Outputs(desc_dk=desc_dk, desc_dv=desc_dv, s_parked=s_parked)
    specialize_warps(
        _produce, (inputs, desc_dq, buffers, barriers, work, heads, padded, config),
        _consume, (outputs, buffers, barriers, work, sizes, config),
        2, 240,
    )  # fmt: skip


# -- producer ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _produce(inputs, desc_dq, buffers, barriers, work, heads, padded, config):
    """Load keys and values, then queries tile by tile; add each tile's dQ to global memory."""
    D: gl.constexpr = config.D
    BLOCK_M: gl.constexpr = config.BLOCK_M
    mbarrier.expect(barriers.kv_full, 2 * BLOCK_N * D * 2)
    at = place(work.batch, work.kv_head, work.loaded_k + work.column, config.PACKED)
    tma.async_copy_global_to_shared(inputs.k, at, barriers.kv_full, buffers.s_k)
    tma.async_copy_global_to_shared(inputs.v, at, barriers.kv_full, buffers.s_v.index(0))
    # Places are computed one iteration ahead: with grouped heads that takes divisions, which would delay the loads.
    head, row = _head_and_row(0, work, config)
    flat = _place_in_scratch(head, row, work, heads, padded, config)
    added = flat
    for t in range(work.tiles + STAGES):
        slot = t % STAGES
        mbarrier.wait(barriers.done.index(slot), (t // STAGES & 1) ^ 1)
        if t < work.tiles:
            at = _place_of_queries(head, row, work, config)
            bar = barriers.full.index(slot)
            mbarrier.expect(bar, 2 * BLOCK_M * D * 2 + 2 * BLOCK_M * 4)
            tma.async_copy_global_to_shared(inputs.q, at, bar, buffers.s_q.index(slot))
            tma.async_copy_global_to_shared(inputs.lse, [flat], bar, buffers.s_lse.index(slot))
            tma.async_copy_global_to_shared(inputs.do, at, bar, buffers.s_do.index(slot))
            tma.async_copy_global_to_shared(inputs.delta, [flat], bar, buffers.s_delta.index(slot))
        if t > STAGES:  # the stage of tile t - STAGES has just become free: dQ of the tile before is complete
            _add_dq(t - STAGES - 1, added, desc_dq, buffers.s_dq, barriers.dq_free, config)
        head, row = _head_and_row(t - STAGES, work, config)
        added = _place_in_scratch(head, row, work, heads, padded, config)
        head, row = _head_and_row(t + 1, work, config)
        flat = _place_in_scratch(head, row, work, heads, padded, config)
    mbarrier.wait(barriers.last_dq, 0)
    _add_dq(work.tiles - 1, added, desc_dq, buffers.s_dq, barriers.dq_free, config)


@gluon.jit
def _place_of_queries(head, row, work, config):
    """Return the TMA coordinates of a query."""
    if config.PACKED:
        return place(work.batch_q, head, work.origin_q + row, True)
    else:
        return place(work.batch, head, row, False)


@gluon.jit
def _place_in_scratch(head, row, work, heads, padded, config):
    """Return the index of a query in scratch memory."""
    if config.PACKED:
        return head * padded + work.padded_q + row
    else:
        return (work.batch * heads + head) * padded + row


@gluon.jit
def _add_dq(tile, flat, desc_dq, s_dq, dq_free, config):
    """Add the dQ of a tile to global memory. `flat`: index in scratch memory of the tile's first query."""
    DQ_BUFFERS: gl.constexpr = dq_free.shape[0]
    block = flat // HALF * (config.D // HALF)
    for w in gl.static_range(2):
        tma_reduce_add(desc_dq, [(block + w) * (4 * WARP), 0], s_dq.index(tile % DQ_BUFFERS * 2 + w))
    tma.store_wait(0)
    mbarrier.arrive(dq_free.index(tile % DQ_BUFFERS))


@gluon.jit
def _head_and_row(t, work, config):
    """Return the query head and first query of tile t. Blocks are ordered by query head; with CUT_FIRST the blocks of
    all heads that a mask may cut come first."""
    if config.CUT_FIRST:
        cut = _cut_blocks(work, config)
        number, block = _of_heads(t, cut, config)
        block = _cut_block(block, cut, work, config)
        late, clear = t - work.heads * cut, gl.maximum(work.count - cut, 1)
        if late >= 0:
            number, block = _of_heads(late, clear, config)
            block += config.MASKED_TILES
    else:
        number, block = _of_heads(t + work.start, work.count, config)
    return work.head + number, (work.first + block) * config.BLOCK_M


@gluon.jit
def _of_heads(t, blocks, config):
    """Return the query head of tile t and the tile's index in that head, if each head has `blocks` tiles."""
    if config.HEADS == 1:
        return 0, t
    else:
        return t // blocks, t % blocks


@gluon.jit
def _cut_blocks(work, config):
    """Return the number of blocks of each query head that a mask may cut."""
    return gl.minimum(config.MASKED_TILES + config.WINDOW_TILES, work.count)


@gluon.jit
def _cut_block(i, cut, work, config):
    """Return the index, among all blocks of a head, of the i-th block that a mask may cut: the first blocks, then the
    last ones."""
    return gl.where(i < config.MASKED_TILES, i, work.count - cut + i)


# -- consumers --------------------------------------------------------------------------------------------------------


@gluon.jit
def _consume(W: gl.constexpr, outputs, buffers, barriers, work, sizes, config):
    """Compute dK and dV of the keys of warpgroup W, and half of every dQ."""
    D: gl.constexpr = config.D
    BLOCK_M: gl.constexpr = config.BLOCK_M
    ROW_DIM: gl.constexpr = 3 if config.PACKED else 2
    s_v = buffers.s_v.index(0)
    first, tiles = work.first, work.tiles
    b_dk = zero_sums(D, config.D_USED)  # [ROWS, D_USED]
    b_dv = zero_sums(D, config.D_USED)  # [ROWS, D_USED]
    IS_CUT: gl.constexpr = config.CAUSAL or config.WINDOW
    mbarrier.wait(barriers.kv_full, 0)
    b_dk, b_dv = _step(
        0, first * BLOCK_M, buffers, barriers, work, sizes, b_dk, b_dv, IS_CUT, True, W, config
    )  # fmt: skip
    # Tiles are counted from a constant on: else ptxas counts in registers of threads, moves the number to those of the
    # warp for every matmul, and starts dQ after all exponentials, not among them. At 128 that took 6% longer.
    if config.CUT_FIRST:
        CUT: gl.constexpr = config.HEADS * (config.MASKED_TILES + config.WINDOW_TILES)
        cut = _cut_blocks(work, config)
        for t in range(1, gl.minimum(CUT, tiles)):
            if config.EVEN_HEADS:
                _, block = _of_heads(t, cut, config)
                row = (first + _cut_block(block, cut, work, config)) * BLOCK_M
            else:  # with fewer heads, the last of these tiles may be clear ones
                _, row = _head_and_row(t, work, config)
            b_dk, b_dv = _step(t, row, buffers, barriers, work, sizes, b_dk, b_dv, True, False, W, config)
        for t in range(CUT, tiles):
            b_dk, b_dv = _step(t, 0, buffers, barriers, work, sizes, b_dk, b_dv, False, False, W, config)
    else:
        for t in gl.static_range(1, config.MASKED_TILES):
            if t < tiles:
                row = (first + t) * BLOCK_M
                b_dk, b_dv = _step(t, row, buffers, barriers, work, sizes, b_dk, b_dv, True, False, W, config)
        for t in range(config.MASKED_TILES, tiles):
            b_dk, b_dv = _step(t, 0, buffers, barriers, work, sizes, b_dk, b_dv, False, False, W, config)

    if config.SPLIT:
        _store_partial(b_dv, 1, outputs.s_parked, W, D)
    # Each warpgroup reads only its own part of V, and has done so for the last time.
    store_sums(s_v.reshape((BLOCK_N, D)).slice(W * ROWS, ROWS), b_dv)
    _store(outputs.desc_dv, s_v.slice(W * ROWS, ROWS, dim=ROW_DIM), outputs.s_parked, W, config)
    last = tiles - 1
    mbarrier.wait(barriers.done.index(last % STAGES), last // STAGES & 1)
    dq_token = _start_half_of_dq(last, buffers, W, config)
    b_dk = scaled(b_dk, sizes.scale)
    if config.SPLIT:
        _store_partial(b_dk, 0, outputs.s_parked, W, D)
    # Both warpgroups are done with the last queries, and no more will be loaded: their buffer takes dK.
    s_dk = buffers.s_q.index(W)
    store_sums(s_dk.reshape((BLOCK_M, D)).slice(0, ROWS), b_dk)
    _store(outputs.desc_dk, s_dk.slice(0, ROWS, dim=ROW_DIM), outputs.s_parked, W, config)
    b_dq = warpgroup_mma_wait(0, deps=[dq_token])
    _store_dq(b_dq, last, buffers.s_dq, barriers.dq_free, W)
    fence_async_shared()
    mbarrier.arrive(barriers.last_dq)
    tma.store_wait(0)


@gluon.jit
def _step(
    t, row, buffers, barriers, work, sizes, b_dk, b_dv,
    MASKED: gl.constexpr, FIRST: gl.constexpr, W: gl.constexpr, config,
):  # fmt: skip
    """Process one block of queries, which begins at `row` if MASKED, and compute dQ of the previous block unless
    FIRST."""
    D: gl.constexpr = config.D
    BLOCK_M: gl.constexpr = config.BLOCK_M
    S_LAYOUT: gl.constexpr = accumulator_layout(BLOCK_M)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 2)
    dtype: gl.constexpr = buffers.s_q.dtype
    slot = t % STAGES
    mbarrier.wait(barriers.full.index(slot), t // STAGES & 1)
    s_q = buffers.s_q.index(slot).reshape((BLOCK_M, D))
    s_do = buffers.s_do.index(slot).reshape((BLOCK_M, D))
    s_k = buffers.s_k.reshape((BLOCK_N, D)).slice(W * ROWS, ROWS)
    # V has one buffer, 0. Were that known to the compiler, it would keep V's matrix descriptors in registers over the
    # loop, 16 of them, and spill others.
    s_v = buffers.s_v.index(t >> 30).reshape((BLOCK_N, D)).slice(W * ROWS, ROWS)
    zeros = gl.zeros((ROWS, BLOCK_M), gl.float32, S_LAYOUT)
    await_turn(barriers.ping_pong, t, W)
    s_token = start_matmul(used_columns(s_k, config.D_USED), s_q, zeros)
    v_parts = used_columns(s_v, config.D_USED)
    dp_token = start_matmul(v_parts, s_do, zeros)
    b_s = warpgroup_mma_wait(len(v_parts), deps=[s_token])  # [ROWS, BLOCK_M]
    # Not before: held over the matmuls, it would displace accumulators from registers. The same for delta.
    b_lse = of_queries(buffers.s_lse.index(slot), BLOCK_M, S_LAYOUT)  # [BLOCK_M]
    if MASKED or not config.EVEN:
        keys = work.column + W * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))[:, None]
        m_s = keys < sizes.len_k
        if MASKED:
            queries = row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, S_LAYOUT))[None, :]
            if config.CAUSAL:
                m_s = m_s & (keys <= queries + sizes.hi)
            if config.WINDOW:
                m_s = m_s & (keys >= queries + sizes.lo)
        b_s = gl.where(m_s, b_s, float("-inf"))
    b_p = gl.exp2(b_s * (sizes.scale * LOG2E) - b_lse[None, :])
    b_p16 = gl.convert_layout(b_p.to(dtype), OPERAND, assert_trivial=True)
    b_dp = warpgroup_mma_wait(0, deps=[dp_token])  # [ROWS, BLOCK_M]
    b_delta = of_queries(buffers.s_delta.index(slot), BLOCK_M, S_LAYOUT)  # [BLOCK_M]
    b_ds = (b_p * (b_dp - b_delta[None, :])).to(dtype)
    b_ds16 = gl.convert_layout(b_ds, OPERAND, assert_trivial=True)
    mbarrier.arrive(barriers.ping_pong.index(W))
    s_ds = buffers.s_ds.index(slot).slice(W * ROWS, ROWS, dim=1)  # [BLOCK_M, ROWS]
    if FIRST:
        dv_token = start_products(b_p16, s_do, b_dv)
        dk_token = start_products(b_ds16, s_q, b_dk)
        b_dv, b_dk = waited_both(dv_token, dk_token, b_p16, b_ds16)
        s_ds.store(gl.permute(b_ds, (1, 0)))
    else:
        # Both have stored their dS of the tile before, and have read the one before that, which is overwritten here.
        mbarrier.wait(barriers.done.index((t - 1) % STAGES), (t - 1) // STAGES & 1)
        dq_token = _start_half_of_dq(t - 1, buffers, W, config)
        if D == 64:  # measured: here for 64, below for 128
            s_ds.store(gl.permute(b_ds, (1, 0)))
        dv_token = start_products(b_p16, s_do, b_dv)
        if D != 64:
            s_ds.store(gl.permute(b_ds, (1, 0)))
        dk_token = start_products(b_ds16, s_q, b_dk)
        b_dq = warpgroup_mma_wait(2 * len(b_dk), deps=[dq_token])
        _store_dq(b_dq, t - 1, buffers.s_dq, barriers.dq_free, W)
        b_dv, b_dk = waited_both(dv_token, dk_token, b_p16, b_ds16)
    fence_async_shared()
    # Also that the queries were read for the last time: the store above lies between their matmuls and this.
    mbarrier.arrive(barriers.done.index(slot))
    return b_dk, b_dv


@gluon.jit
def waited_both(dv_tokens, dk_tokens, b_p16, b_ds16):
    """Return dV and dK after their matmuls have read P and dS."""
    if len(dv_tokens) == 1:
        b_dv, b_dk, b_p16, b_ds16 = warpgroup_mma_wait(0, deps=[dv_tokens[0], dk_tokens[0], b_p16, b_ds16])
        return (b_dv,), (b_dk,)
    else:
        b_dv, more_dv, b_dk, more_dk, b_p16, b_ds16 = warpgroup_mma_wait(
            0, deps=[dv_tokens[0], dv_tokens[1], dk_tokens[0], dk_tokens[1], b_p16, b_ds16]
        )
        return (b_dv, more_dv), (b_dk, more_dk)


@gluon.constexpr_function
def _queries_of_threads(block_m):
    """Return the layout in which a thread has four of every sixteen queries, by the lowest two bits of its index."""
    far = [[1 << bit] for bit in range(4, block_m.bit_length() - 1)]
    return gl.DistributedLinearLayout([[1], [2], *far], [[4], [8], [0], [0], [0]], [[0], [0]], [], [block_m])


@gluon.jit
def of_queries(s_rows, BLOCK_M: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Load one number per query in the order of `prepare_kernel`. A thread needs two neighbours of every eight queries;
    those of sixteen queries are stored side by side and loaded at once."""
    return gl.convert_layout(in_order(s_rows, BLOCK_M), gl.SliceLayout(0, S_LAYOUT), assert_trivial=True)


@gluon.jit
def in_order(s_rows, BLOCK_M: gl.constexpr):
    """Load the numbers that `prepare_kernel` stored for BLOCK_M queries, in the order of the queries."""
    x = gl.reshape(s_rows.load(_queries_of_threads(BLOCK_M)), [BLOCK_M // 16, 4, 2, 2])
    return gl.reshape(gl.permute(x, (0, 2, 1, 3)), [BLOCK_M])


@gluon.jit
def _start_half_of_dq(t, buffers, W: gl.constexpr, config):
    """Start half of dQ of tile t: half of its rows or, if it has only 64, half of its columns; the second half may be
    narrower."""
    s_k = buffers.s_k.reshape((BLOCK_N, config.D))
    s_ds = buffers.s_ds.index(t % STAGES)
    COLUMNS: gl.constexpr = config.D_USED - HALF if W == 1 and config.BLOCK_M != 128 else HALF
    if config.BLOCK_M == 128:
        s_ds = s_ds.slice(W * HALF, HALF)
    else:
        s_k = s_k.slice(W * HALF, COLUMNS, dim=1)
    zeros = gl.zeros((HALF, COLUMNS), gl.float32, accumulator_layout(COLUMNS))
    return warpgroup_mma(s_ds, s_k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _store_dq(b_dq, t, s_dq, dq_free, W: gl.constexpr):
    """Store dQ in its register layout: a row for each thread, of its 32 numbers. `finish_kernel` reorders them. If dQ
    is narrower, the rest of the row belongs to unused columns and may hold anything."""
    COLUMNS: gl.constexpr = b_dq.shape[1]
    DQ_BUFFERS: gl.constexpr = dq_free.shape[0]
    mbarrier.wait(dq_free.index(t % DQ_BUFFERS), ~(t // DQ_BUFFERS) & 1)  # the buffer's last content was added
    # warp, row / 8 % 2, row % 8, column / 8, column / 2 % 4, column % 2
    x = gl.reshape(b_dq, [4, 2, 8, COLUMNS // 8, 4, 2])
    x = gl.reshape(gl.permute(x, (0, 2, 4, 3, 1, 5)), [4 * WARP, COLUMNS // 2])
    s_dq.index(t % DQ_BUFFERS * 2 + W).slice(0, COLUMNS // 2, dim=1).store(x)


# -- after the loop ---------------------------------------------------------------------------------------------------


@gluon.jit
def _park(s_parked, slot: gl.constexpr, x):
    s_parked.index(slot).store(gl.full([1], x.to(gl.int64), gl.int64, SCALAR))


@gluon.jit
def _parked(s_parked, slot: gl.constexpr):
    return gl.sum(s_parked.index(slot).load(SCALAR), 0)


@gluon.jit
def _store(desc, s_rows, s_parked, W: gl.constexpr, config):
    """Copy dK or dV of a warpgroup's keys from shared to global memory."""
    fence_async_shared()
    batch, kv_head = _parked(s_parked, BATCH).to(gl.int32), _parked(s_parked, KV_HEAD).to(gl.int32)
    column = _parked(s_parked, COLUMN).to(gl.int32)
    tma.async_copy_shared_to_global(desc, place(batch, kv_head, column + W * ROWS, config.PACKED), s_rows)


@gluon.jit
def scaled(sums, scale):
    return (sums[0] * scale,) if len(sums) == 1 else (sums[0] * scale, sums[1] * scale)


@gluon.jit
def _store_partial(sums, which: gl.constexpr, s_parked, W: gl.constexpr, D: gl.constexpr):
    """Store a split program's dK (0) or dV (1) for `combine_kernel`. The store is masked, because a branch would cost
    the loop registers. The caller also stores the part as if it were complete; `combine_kernel` overwrites that."""
    target = _parked(s_parked, PARTIAL)
    pointer = target.to(gl.pointer_type(gl.float32), bitcast=True) + (which * 2 + W) * (ROWS * D)
    for i in gl.static_range(len(sums)):
        rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, sums[i].type.layout))[:, None]
        columns = gl.arange(0, sums[i].shape[1], layout=gl.SliceLayout(0, sums[i].type.layout))[None, :]
        gl.store(pointer + i * (D // 2) + rows * D + columns, sums[i], mask=target != 0)


# -- before and after the main kernel ---------------------------------------------------------------------------------


@triton.jit
def _queries(p_table, row, len_q, BLOCK: tl.constexpr):
    """Return the rows of the queries at positions `row` and after in a head's scratch memory, and a mask of the
    existing ones."""
    if p_table is None:
        rows = row + tl.arange(0, BLOCK)
        return rows, rows < len_q
    else:
        line = p_table + row // PADDING * FIELDS
        own = tl.load(line + ROW) + row % PADDING + tl.arange(0, BLOCK)
        return tl.load(line + FIRST_Q) + own, own < tl.load(line + LEN_Q)


@triton.jit
def prepare_kernel(
    p_o, p_do, p_lse, p_dlse, p_scratch, p_copy, p_table, o_strides, do_strides, heads, len_q, d, passes, queries,
    D: tl.constexpr, BLOCK: tl.constexpr, HAS_SUMS: tl.constexpr,
):  # fmt: skip
    """Compute for BLOCK queries: lse in powers of 2; delta = rowsum(O dO) minus the gradient of lse; zeros for dQ if
    scratch memory HAS_SUMS; and, if TMA cannot read dO's layout (expanded from one number, say), a copy of it.
    `queries`: of all heads, padded."""
    gdc_launch_dependents()
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # forward has just left the last outputs in the L2 cache
    index, row = program // passes, program % passes * BLOCK
    scratch_rows, columns = row + tl.arange(0, BLOCK), tl.arange(0, D)
    rows, m_rows = _queries(p_table, row, len_q, BLOCK)
    m_tile = m_rows[:, None] & (columns < d)[None, :]
    batch, head = tl.cast(index // heads, tl.int64), tl.cast(index % heads, tl.int64)
    far = tl.cast(rows, tl.int64)[:, None]
    o_at = batch * o_strides[0] + head * o_strides[1] + far * o_strides[2] + columns[None, :] * o_strides[3]
    do_at = batch * do_strides[0] + head * do_strides[1] + far * do_strides[2] + columns[None, :] * do_strides[3]
    b_o = tl.load(p_o + o_at, mask=m_tile, other=0.0)  # [BLOCK, D]
    b_do = tl.load(p_do + do_at, mask=m_tile, other=0.0)  # [BLOCK, D]
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)  # [BLOCK]
    at = tl.cast(index, tl.int64) * len_q + rows
    if p_dlse is not None:
        b_delta -= tl.load(p_dlse + at, mask=m_rows, other=0.0)
    b_lse = tl.load(p_lse + at, mask=m_rows, other=0.0)  # [BLOCK]
    # A query that sees no key has -inf: with +inf instead its P is 0.
    b_lse = tl.where(b_lse == float("-inf"), float("inf"), b_lse * 1.4426950408889634)
    # In every sixteen, (half, pair, place in the pair) becomes (pair, half, place in the pair): see `of_queries`.
    in_16 = scratch_rows % 8 // 2 * 4 + scratch_rows % 16 // 8 * 2 + scratch_rows % 2
    before = tl.cast(index, tl.int64) * passes * BLOCK + scratch_rows // 16 * 16  # queries of other heads, and of this
    tl.store(p_scratch + before + in_16, b_lse)
    tl.store(p_scratch + queries + before + in_16, b_delta)
    if HAS_SUMS:
        sums = p_scratch + 2 * tl.cast(queries, tl.int64)
        first = tl.cast(index, tl.int64) * passes * BLOCK + row
        tl.store(sums + first * D + tl.arange(0, BLOCK * D), tl.zeros([BLOCK * D], tl.float32))
    if p_copy is not None:
        tl.store(p_copy + at[:, None] * d + columns[None, :], b_do, mask=m_tile)


@triton.jit
def finish_kernel(
    p_dq, p_scratch, p_table, strides, heads, len_q, d, passes, queries, scale, D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Reorder, scale, round and store dQ of BLOCK queries."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # the last sums are still in the L2 cache
    index, row = program // passes, program % passes * BLOCK
    gdc_wait()
    sums = p_scratch + 2 * tl.cast(queries, tl.int64)
    b_dq = tl.load(sums + (tl.cast(index, tl.int64) * passes * BLOCK + row) * D + tl.arange(0, BLOCK * D))
    # dQ of 64 x 64: warp, row % 8, column / 2 % 4, column / 8, row / 8 % 2, column % 2. See `_store_dq`.
    b_dq = tl.reshape(b_dq, [BLOCK // 64, D // 64, 4, 8, 4, 8, 2, 2])
    b_dq = tl.reshape(tl.permute(b_dq, (0, 2, 6, 3, 1, 5, 4, 7)), [BLOCK, D])
    columns = tl.arange(0, D)
    rows, m_rows = _queries(p_table, row, len_q, BLOCK)
    m_tile = m_rows[:, None] & (columns < d)[None, :]
    batch, head = tl.cast(index // heads, tl.int64), tl.cast(index % heads, tl.int64)
    at = batch * strides[0] + head * strides[1] + tl.cast(rows, tl.int64)[:, None] * strides[2] + columns[None, :]
    tl.store(p_dq + at, (b_dq * scale).to(p_dq.dtype.element_ty), mask=m_tile)


@gluon.jit(do_not_specialize=["schedule", "unsplit", "splits"])
def combine_kernel(
    p_dk, p_dv, p_partial, dk_strides, dv_strides, len_k, d, schedule, unsplit, splits,
    D: gl.constexpr,
):  # fmt: skip
    """Add up dK, or dV, of 64 keys of a block whose queries `backward_kernel` split."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [256 // D, D // 8], [4, 1], [1, 0])
    beyond, which, half = gl.program_id(0) // 4, gl.program_id(0) // 2 % 2, gl.program_id(0) % 2
    block, _, batch, head = block_and_head(unsplit + beyond, schedule)
    inside = half * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    at = p_partial + (beyond * splits * 2 + which) * (BLOCK_N * D) + inside[:, None] * D + columns
    x = gl.zeros((ROWS, D), gl.float32, LAYOUT)
    for split in range(splits):
        x += gl.load(at + split * (2 * BLOCK_N * D))
    keys = (block * BLOCK_N + inside)[:, None]
    m_tile = (keys < len_k) & (columns < d)
    batch, head, far = batch.to(gl.int64), head.to(gl.int64), keys.to(gl.int64)
    if which == 0:
        target = p_dk + batch * dk_strides[0] + head * dk_strides[1] + far * dk_strides[2] + columns
        gl.store(target, x.to(p_dk.dtype.element_ty), mask=m_tile)
    else:
        target = p_dv + batch * dv_strides[0] + head * dv_strides[1] + far * dv_strides[2] + columns
        gl.store(target, x.to(p_dv.dtype.element_ty), mask=m_tile)
