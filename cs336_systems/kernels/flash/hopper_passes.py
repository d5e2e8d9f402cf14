"""Attention backward for Hopper GPUs in several passes, in Gluon. How it works: docs/ATTENTION.md.

hopper_backward.py computes all gradients in one pass, and adds up dQ in an order that differs from run to run. Here
each gradient has a pass of its own, which recomputes the scores:

    dV: rows are keys, queries are visited.    S = K Q^T    P = exp2(S - lse)    dV += P dO
    dK: rows are keys, queries are visited.    S = K Q^T    dP = V dO^T    dS = P (dP - delta)    dK += dS Q
    dQ: rows are queries, keys are visited.    S = Q K^T    dP = dO V^T    dS = P (dP - delta)    dQ += dS K

That is 8 matmuls in place of 5. All have operands that TMA has loaded, nothing is exchanged between warpgroups, and all
three gradients are bitwise repeatable. Head dims above 128 always take these passes: with 256 columns, dK and dV of 128
keys alone would fill the registers of a multiprocessor. Others take them for repeatable gradients, with dK and dV in
one pass: 7 matmuls.

A program owns 128 rows, 64 for each of two consumer warpgroups, and visits tiles of 64 queries or keys. The producer
loads them into a ring. The consumers run in ping-pong order, as in hopper_backward.py. Masks are applied to the first
and last tiles, which they may cut; the tiles between have a loop without masks. Packed documents: as in
hopper_forward.py.

Names: s_a1, s_a2 operands of the program's rows (K and V, or Q and dO); s_b1, s_b2 those of a tile (Q and dO, or K and
V); others as in hopper_forward.py. Shapes: ROWS = 64 rows of a warpgroup and of a tile, D head dim padded to 64, 128 or
256, W warpgroup.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from cs336_systems.kernels.flash.hopper_backward import in_order, of_queries, scaled, waited_both
from cs336_systems.kernels.flash.hopper_forward import (
    LOG2E,
    ROWS,
    accumulator_layout,
    await_turn,
    block_and_head,
    origin_of,
    outer_of,
    place,
    start_matmul,
    start_products,
    store_sums,
    tile_shapes,
    used_columns,
    waited,
    zero_sums,
)
from cs336_systems.kernels.flash.packing_triton import (
    FIELDS,
    FIRST_K,
    FIRST_Q,
    LEN_K,
    LEN_Q,
    PADDED_Q,
    ROW,
    SHIFT,
)
from cs336_systems.kernels.triton_compat import Value, aggregate, specialize_warps

OF_V, OF_K, OF_Q, OF_KV = (gl.constexpr(i) for i in range(4))
"""Which gradient a pass computes; OF_KV: those of keys and of values, for head dims up to 128."""
WARPGROUPS = gl.constexpr(2)
BLOCK = gl.constexpr(128)
"""Rows of a program."""
STAGES = gl.constexpr(2)
"""Buffers of s_b1."""


@aggregate
class Config:
    """Compile-time constants of a pass."""

    GRADIENT: gl.constexpr
    """OF_V, OF_K, OF_Q or OF_KV."""
    D: gl.constexpr
    D_USED: gl.constexpr
    """Columns that matmuls compute; the others of D are zero padding."""
    STAGES_2: gl.constexpr
    """Buffers of s_b2: with 256 columns, only dV has memory for a second one, where the others have s_a2."""
    BELOW: gl.constexpr
    """True if the mask hides columns to the left of a row."""
    ABOVE: gl.constexpr
    """True if the mask hides columns to the right of a row."""
    HEADS: gl.constexpr
    """Heads that a program visits: those that share its KV head, or one."""
    PACKED: gl.constexpr
    """True if documents are packed along the sequence."""


@aggregate
class Work:
    """The rows of a program and the tiles that it visits."""

    batch: Value
    """Batch index of the rows; with packed documents `outer_of` the document."""
    head: Value
    """Head of the rows."""
    origin: Value
    """With packed documents `origin_of` the document for the rows; 0 otherwise."""
    row: Value
    """First row."""
    batch_b: Value
    """As `batch`, `head` and `origin`, for the visited tiles; of several heads the first."""
    head_b: Value
    origin_b: Value
    first: Value
    """First tile of each visited head."""
    count: Value
    """Tiles of each visited head; 0 if the rows see nothing."""
    scratch: Value
    """Index in scratch memory of the first query of the first query head."""


@aggregate
class Sizes:
    low: Value
    """Row i sees columns from i + low on, if BELOW."""
    high: Value
    """Row i sees columns up to i + high, if ABOVE."""
    columns: Value
    """Number of columns."""
    padded: Value
    """Queries of a head in scratch memory."""
    scale: Value


@aggregate
class Descriptors:
    a1: Value
    a2: Value
    b1: Value
    b2: Value
    lse: Value
    delta: Value


@aggregate
class Buffers:
    s_a1: Value  # [WARPGROUPS, 1, 1, ROWS, D]
    s_a2: Value  # as s_a1; None for dV
    s_b1: Value  # [STAGES, 1, 1, ROWS, D]
    s_b2: Value  # [STAGES_2, 1, 1, ROWS, D]
    s_lse: Value  # [2, ROWS], of the stages; for dQ of the warpgroups
    s_delta: Value


@aggregate
class Barriers:
    rows_full: Value
    """Barrier: the rows of a warpgroup were loaded."""
    full_1: Value
    """Barrier: a stage of s_b1 was loaded."""
    empty_1: Value
    """Barrier: both consumers are done with a stage of s_b1."""
    full_2: Value
    empty_2: Value
    ping_pong: Value


@gluon.jit(do_not_specialize=["schedule"])
def gradient_kernel(
    desc_q, desc_k, desc_v, desc_do, desc_lse, desc_delta, desc_out, desc_dv, p_table,
    heads, len_q, len_k, padded, lo, hi, scale, blocks, schedule,
    GRADIENT: gl.constexpr, CAUSAL: gl.constexpr, D: gl.constexpr, D_USED: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Compute the gradient of BLOCK queries, or of BLOCK keys or values from the GROUP query heads of their KV head.
    `desc_dv`: for OF_KV the gradient of the values, and `desc_out` that of the keys; not used otherwise. `heads`: query
    heads; `padded`: queries of a head in scratch memory."""
    WINDOW: gl.constexpr = lo is not None
    PACKED: gl.constexpr = p_table is not None
    QUERIES: gl.constexpr = GRADIENT == OF_Q
    config = Config(
        GRADIENT=GRADIENT, D=D, D_USED=D_USED, STAGES_2=2 if GRADIENT == OF_V or D < 256 else 1,
        BELOW=WINDOW if QUERIES else CAUSAL, ABOVE=CAUSAL if QUERIES else WINDOW, HEADS=1 if QUERIES else GROUP,
        PACKED=PACKED,
    )  # fmt: skip
    block, _, batch, head = block_and_head(gl.program_id(0), schedule)
    row, batch_b, origin, origin_b, padded_q = block * BLOCK, batch, 0, 0, 0
    if PACKED:
        line = p_table + block * FIELDS
        row, len_q, len_k = gl.load(line + ROW), gl.load(line + LEN_Q), gl.load(line + LEN_K)
        if (len_q if QUERIES else len_k) == 0:  # documents may have fewer blocks than there are programs
            return
        padded_q = gl.load(line + PADDED_Q)
        hi += gl.load(line + SHIFT)
        if WINDOW:
            lo += gl.load(line + SHIFT)
        of_q, of_k = outer_of(gl.load(line + FIRST_Q), len_q), outer_of(gl.load(line + FIRST_K), len_k)
        batch, batch_b = (of_q, of_k) if QUERIES else (of_k, of_q)
        origin, origin_b = origin_of(len_q), origin_of(len_k)
        if not QUERIES:
            origin, origin_b = origin_b, origin
    elif QUERIES and CAUSAL:
        row = (blocks - 1 - block) * BLOCK  # the last queries see the most keys
    low, high, columns = (lo, hi, len_k) if QUERIES else (-hi, None if lo is None else -lo, len_q)
    first_head = head if QUERIES else head * GROUP
    scratch = first_head * padded + padded_q
    if not PACKED:
        scratch += batch * (heads * padded)
    first, beyond = 0, gl.cdiv(columns, ROWS)
    if config.BELOW:
        first = gl.minimum(gl.maximum(row + low, 0) // ROWS, beyond)
    if config.ABOVE:
        beyond = gl.minimum(beyond, gl.cdiv(gl.maximum(row + BLOCK + high, 0), ROWS))
    work = Work(
        batch=batch, head=head, origin=origin, row=row, batch_b=batch_b,
        head_b=head // GROUP if QUERIES else first_head, origin_b=origin_b, first=first,
        count=gl.maximum(beyond - first, 0), scratch=scratch,
    )  # fmt: skip
    sizes = Sizes(low=low, high=high, columns=columns, padded=padded, scale=scale)

    dtype: gl.constexpr = desc_q.dtype
    s_a1 = gl.allocate_shared_memory(dtype, tile_shapes(WARPGROUPS, ROWS, D, PACKED), desc_q.layout)
    s_a2 = None
    if GRADIENT != OF_V:
        s_a2 = gl.allocate_shared_memory(dtype, tile_shapes(WARPGROUPS, ROWS, D, PACKED), desc_q.layout)
    s_b1 = gl.allocate_shared_memory(dtype, tile_shapes(STAGES, ROWS, D, PACKED), desc_q.layout)
    s_b2 = gl.allocate_shared_memory(dtype, tile_shapes(config.STAGES_2, ROWS, D, PACKED), desc_q.layout)
    s_lse = gl.allocate_shared_memory(gl.float32, [2, ROWS], desc_lse.layout)
    s_delta = gl.allocate_shared_memory(gl.float32, [2, ROWS], desc_lse.layout)
    rows_full = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], mbarrier.MBarrierLayout())
    full_1 = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_1 = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_2 = gl.allocate_shared_memory(gl.int64, [config.STAGES_2, 1], mbarrier.MBarrierLayout())
    empty_2 = gl.allocate_shared_memory(gl.int64, [config.STAGES_2, 1], mbarrier.MBarrierLayout())
    ping_pong = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], mbarrier.MBarrierLayout())
    for w in gl.static_range(WARPGROUPS):
        mbarrier.init(rows_full.index(w), count=1)
        mbarrier.init(ping_pong.index(w), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full_1.index(stage), count=1)
        mbarrier.init(empty_1.index(stage), count=WARPGROUPS)
    for stage in gl.static_range(config.STAGES_2):
        mbarrier.init(full_2.index(stage), count=1)
        mbarrier.init(empty_2.index(stage), count=WARPGROUPS)
    fence_async_shared()
    if QUERIES:
        descriptors = Descriptors(a1=desc_q, a2=desc_do, b1=desc_k, b2=desc_v, lse=desc_lse, delta=desc_delta)
    else:
        descriptors = Descriptors(a1=desc_k, a2=desc_v, b1=desc_q, b2=desc_do, lse=desc_lse, delta=desc_delta)
    buffers = Buffers(s_a1=s_a1, s_a2=s_a2, s_b1=s_b1, s_b2=s_b2, s_lse=s_lse, s_delta=s_delta)
    barriers = Barriers(
        rows_full=rows_full, full_1=full_1, empty_1=empty_1, full_2=full_2, empty_2=empty_2, ping_pong=ping_pong
    )
    specialize_warps(
        _produce, (descriptors, buffers, barriers, work, sizes, config),
        _consume, (desc_out, desc_dv, buffers, barriers, work, sizes, config),
        WARPGROUPS, 240,
    )  # fmt: skip


# -- producer ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _produce(descriptors, buffers, barriers, work, sizes, config):
    """Load the rows of each warpgroup, then tile by tile."""
    TILE_BYTES: gl.constexpr = ROWS * config.D * 2
    NUMBER_BYTES: gl.constexpr = ROWS * 4
    QUERIES: gl.constexpr = config.GRADIENT == OF_Q
    for w in gl.static_range(WARPGROUPS):
        bar = barriers.rows_full.index(w)
        at = place(work.batch, work.head, work.origin + work.row + w * ROWS, config.PACKED)
        mbarrier.expect(bar, (1 if config.GRADIENT == OF_V else 2) * TILE_BYTES + (2 * NUMBER_BYTES if QUERIES else 0))
        tma.async_copy_global_to_shared(descriptors.a1, at, bar, buffers.s_a1.index(w))
        if config.GRADIENT != OF_V:
            tma.async_copy_global_to_shared(descriptors.a2, at, bar, buffers.s_a2.index(w))
        if QUERIES:
            flat = work.scratch + work.row + w * ROWS
            tma.async_copy_global_to_shared(descriptors.lse, [flat], bar, buffers.s_lse.index(w))
            tma.async_copy_global_to_shared(descriptors.delta, [flat], bar, buffers.s_delta.index(w))
    for number in range(config.HEADS):
        for i in range(work.count):
            t = number * work.count + i
            column = (work.first + i) * ROWS
            at = place(work.batch_b, work.head_b + number, work.origin_b + column, config.PACKED)
            slot = t % STAGES
            bar = barriers.full_1.index(slot)
            mbarrier.wait(barriers.empty_1.index(slot), (t // STAGES & 1) ^ 1)
            mbarrier.expect(bar, TILE_BYTES + (0 if QUERIES else 2 * NUMBER_BYTES))
            tma.async_copy_global_to_shared(descriptors.b1, at, bar, buffers.s_b1.index(slot))
            if not QUERIES:
                flat = work.scratch + number * sizes.padded + column
                tma.async_copy_global_to_shared(descriptors.lse, [flat], bar, buffers.s_lse.index(slot))
                tma.async_copy_global_to_shared(descriptors.delta, [flat], bar, buffers.s_delta.index(slot))
            slot = t % config.STAGES_2
            bar = barriers.full_2.index(slot)
            mbarrier.wait(barriers.empty_2.index(slot), (t // config.STAGES_2 & 1) ^ 1)
            mbarrier.expect(bar, TILE_BYTES)
            tma.async_copy_global_to_shared(descriptors.b2, at, bar, buffers.s_b2.index(slot))


# -- consumers --------------------------------------------------------------------------------------------------------


@gluon.jit
def _consume(W: gl.constexpr, desc_out, desc_dv, buffers, barriers, work, sizes, config):
    """Compute the gradient of the rows of warpgroup W."""
    D: gl.constexpr = config.D
    row = work.row + W * ROWS
    clear, cut = _clear_tiles(row, work, sizes, config)
    sums, sums_v = zero_sums(D, config.D_USED), ()  # [ROWS, D_USED]
    if config.GRADIENT == OF_KV:
        sums_v = zero_sums(D, config.D_USED)
    mbarrier.wait(barriers.rows_full.index(W), 0)
    b_lse, b_delta = None, None
    if config.GRADIENT == OF_Q:
        ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, accumulator_layout(ROWS))
        b_lse = gl.convert_layout(in_order(buffers.s_lse.index(W), ROWS), ROW_LAYOUT)
        b_delta = gl.convert_layout(in_order(buffers.s_delta.index(W), ROWS), ROW_LAYOUT)
    for number in range(config.HEADS):
        before = number * work.count
        if config.BELOW:
            for i in range(0, clear):
                sums, sums_v = _step(
                    before + i, i, sums, sums_v, b_lse, b_delta, row, buffers, barriers, work, sizes, True, W, config
                )  # fmt: skip
        for i in range(clear, cut):
            sums, sums_v = _step(
                before + i, i, sums, sums_v, b_lse, b_delta, row, buffers, barriers, work, sizes, False, W, config
            )  # fmt: skip
        if config.ABOVE or config.GRADIENT == OF_Q:
            for i in range(cut, work.count):
                sums, sums_v = _step(
                    before + i, i, sums, sums_v, b_lse, b_delta, row, buffers, barriers, work, sizes, True, W, config
                )  # fmt: skip
    if config.GRADIENT != OF_V:
        sums = scaled(sums, sizes.scale)
    at = place(work.batch, work.head, work.origin + row, config.PACKED)
    _store(desc_out, at, buffers.s_a1.index(W), sums, config)  # these rows are not read again
    if config.GRADIENT == OF_KV:
        _store(desc_dv, at, buffers.s_a2.index(W), sums_v, config)
    tma.store_wait(0)


@gluon.jit
def _store(desc, at, s_out, sums, config):
    store_sums(s_out.reshape((ROWS, config.D)), sums)
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, at, s_out)


@gluon.jit
def _clear_tiles(row, work, sizes, config):
    """Return the first tile in which every row of a warpgroup sees every column, and the first one after these,
    counted from the first tile that the program visits."""
    clear, cut = 0, work.count
    if config.BELOW:
        clear = gl.minimum(gl.maximum(gl.cdiv(gl.maximum(row + ROWS - 1 + sizes.low, 0), ROWS) - work.first, 0), cut)
    if config.ABOVE:
        cut = gl.minimum(cut, gl.maximum(row + 1 + sizes.high, 0) // ROWS - work.first)
    if config.GRADIENT == OF_Q:
        cut = gl.minimum(cut, sizes.columns // ROWS - work.first)
    return clear, gl.maximum(cut, clear)


@gluon.jit
def _step(
    t, i, sums, sums_v, b_lse, b_delta, row, buffers, barriers, work, sizes,
    MASKED: gl.constexpr, W: gl.constexpr, config,
):  # fmt: skip
    """Add the share of the i-th tile of a head, the t-th in all."""
    D: gl.constexpr = config.D
    S_LAYOUT: gl.constexpr = accumulator_layout(ROWS)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 2)
    HAS_DS: gl.constexpr = config.GRADIENT != OF_V
    HAS_BOTH: gl.constexpr = config.GRADIENT == OF_KV
    slot, slot_2 = t % STAGES, t % config.STAGES_2
    s_b1 = buffers.s_b1.index(slot).reshape((ROWS, D))
    s_b2 = buffers.s_b2.index(slot_2).reshape((ROWS, D))
    # The rows' buffers are the same in each step. If the compiler knew that, it would keep their matrix descriptors in
    # registers over the loop, and spill others.
    own = W + (t >> 24)
    a1 = used_columns(buffers.s_a1.index(own).reshape((ROWS, D)), config.D_USED)
    zeros = gl.zeros((ROWS, ROWS), gl.float32, S_LAYOUT)
    mbarrier.wait(barriers.full_1.index(slot), t // STAGES & 1)
    await_turn(barriers.ping_pong, t, W)
    s_token = start_matmul(a1, s_b1, zeros)
    mbarrier.wait(barriers.full_2.index(slot_2), t // config.STAGES_2 & 1)
    if HAS_DS:
        a2 = used_columns(buffers.s_a2.index(own).reshape((ROWS, D)), config.D_USED)
        dp_token = start_matmul(a2, s_b2, zeros)
        b_s = warpgroup_mma_wait(len(a2), deps=[s_token])  # [ROWS, ROWS]
    else:
        b_s = warpgroup_mma_wait(0, deps=[s_token])
    if config.GRADIENT == OF_Q:
        b_shift = b_lse[:, None]
    else:
        b_shift = of_queries(buffers.s_lse.index(slot), ROWS, S_LAYOUT)[None, :]
    if MASKED:
        b_s = _masked(b_s, row, (work.first + i) * ROWS, sizes, config)
    b_p = gl.exp2(b_s * (sizes.scale * LOG2E) - b_shift)
    b_p16 = gl.convert_layout(b_p.to(s_b1.dtype), OPERAND, assert_trivial=True)
    if HAS_DS:
        b_dp = warpgroup_mma_wait(0, deps=[dp_token])  # [ROWS, ROWS]
        if not HAS_BOTH:
            mbarrier.arrive(barriers.empty_2.index(slot_2))
        if config.GRADIENT == OF_Q:
            b_shift = b_delta[:, None]
        else:
            b_shift = of_queries(buffers.s_delta.index(slot), ROWS, S_LAYOUT)[None, :]
        b_ds16 = gl.convert_layout((b_p * (b_dp - b_shift)).to(s_b1.dtype), OPERAND, assert_trivial=True)
    mbarrier.arrive(barriers.ping_pong.index(W))
    if HAS_BOTH:
        v_tokens = start_products(b_p16, s_b2, sums_v)
        sums_v, sums = waited_both(v_tokens, start_products(b_ds16, s_b1, sums), b_p16, b_ds16)
    elif HAS_DS:
        sums, _, _ = waited(start_products(b_ds16, s_b1, sums), b_ds16, b_ds16)
    else:
        sums, _, _ = waited(start_products(b_p16, s_b2, sums), b_p16, b_p16)
    if HAS_BOTH or not HAS_DS:
        mbarrier.arrive(barriers.empty_2.index(slot_2))
    mbarrier.arrive(barriers.empty_1.index(slot))
    return sums, sums_v


@gluon.jit
def _masked(b_s, row, column, sizes, config):
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, b_s.type.layout))[:, None]
    columns = column + gl.arange(0, ROWS, layout=gl.SliceLayout(0, b_s.type.layout))[None, :]
    if config.BELOW:
        b_s = gl.where(columns >= rows + sizes.low, b_s, float("-inf"))
    if config.ABOVE:
        b_s = gl.where(columns <= rows + sizes.high, b_s, float("-inf"))
    if config.GRADIENT == OF_Q:  # hides keys beyond the end; queries there need no mask: their dO and delta are 0
        b_s = gl.where(columns < sizes.columns, b_s, float("-inf"))
    return b_s
