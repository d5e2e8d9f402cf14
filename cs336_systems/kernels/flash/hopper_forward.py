"""Attention forward for Hopper GPUs, in Gluon. How it works, drawn: docs/ATTENTION.md.

A program owns the queries of two or three warpgroups, 64 each. One more warpgroup, the producer, has the copy engine
(TMA) bring keys and values through a ring of stages in shared memory; it needs few registers, and the others get them.

Stage t holds the keys of tile t and the values of tile t - 1, because these are multiplied together: a warpgroup forms
the scores of a tile and adds up the values of the tile before in one go, then turns the scores into weights while
another warpgroup has the tensor cores. Weights never leave registers. Three warpgroups take turns: left alone they fall
into step, and all want the tensor cores at the same time, and then the exponentials.

Tiles are visited from the last to the first: what a causal mask or the end of the keys cuts off lies in the first tile
or two, which are peeled off, and the loop has no mask.

Nor does it look for larger scores, unless weights are fp16. The maximum only keeps numbers in range, and bf16 has the
range of fp32: whatever the largest score of the first tiles is, later ones may exceed it by 2^64 and all is as exact.
After the last tile row sums tell whether they did. If so, which takes inputs far from any model's, the program starts
again, and this time the maximum follows.

Without a mask all programs take equally long, and the last ones would leave most multiprocessors idle. These blocks are
cut into pieces, each a program for a part of the keys; `join_kernel` puts their results together.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)
"""Of a warpgroup: what its matrix instruction takes."""
SLACK = gl.constexpr(8.0)
"""Powers of 2 by which a maximum that follows may be behind. Weights stay below 2^8, in range for fp16 too."""
LIMIT = gl.constexpr(2.0**64)
"""Of row sums under a maximum that does not follow. They are 1 at least, since it is one of the scores."""
LOWEST = gl.constexpr(-3.4028234663852886e38)
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
"""Of a number that all threads have."""


@gluon.jit(do_not_specialize=["order", "shift", "whole", "pieces"])
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse, partial,
    group, len_q, len_k, hi, scale, blocks, order, shift, whole, pieces,
    CAUSAL: gl.constexpr, D: gl.constexpr, DEPTH: gl.constexpr, BLOCK_N: gl.constexpr, WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr, DIAGONALS: gl.constexpr, TURNS: gl.constexpr, HELD: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Output and logsumexp of 64 * WARPGROUPS queries; from the `whole`-th program on, those of a part of the keys, to
    `partial`. The first block begins at -`shift`. DIAGONALS: in how many tiles of a warpgroup a mask may cut. TURNS: a
    warpgroup multiplies when the one before it has its scores. HELD: queries are kept in registers. DEPTH: of the D
    columns the others are padding, and scores do without them."""
    unit = gl.program_id(0)
    if partial is not None:
        unit, piece, of = share(unit, whole, pieces)
    block, index, batch, head = assignment(unit, order)
    if CAUSAL:
        block = blocks - 1 - block  # the last queries see the most keys
    row = block * (WARPGROUPS * ROWS) - shift
    end = gl.minimum(row + WARPGROUPS * ROWS, gl.cdiv(len_q, ROWS) * ROWS)
    tiles = _tiles(end - 1, len_k, hi, CAUSAL, BLOCK_N)
    column = 0
    if partial is not None:
        start, tiles = portion(tiles, piece, of)
        column = start * BLOCK_N
    place = (batch, head, head // group, index, row, end, column, tiles)
    problem = (len_q, len_k, hi, scale * LOG2E)

    q_smem = gl.allocate_shared_memory(q_desc.dtype, [WARPGROUPS, 1, 1, ROWS, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, D], v_desc.layout)
    q_bars = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], mbarrier.MBarrierLayout())
    for w in gl.static_range(WARPGROUPS):
        mbarrier.init(q_bars.index(w), count=1)
    buffers = (q_smem, k_smem, v_smem, q_bars)
    shared = buffers + _barriers(WARPGROUPS, STAGES, TURNS)
    again = _again(buffers, WARPGROUPS, STAGES, TURNS) if q_desc.dtype == gl.bfloat16 else ()
    walks = (shared, again)
    fence_async_shared()

    outs = (out_desc, lse, partial, whole)
    # Constants must stand in the call itself.
    if WARPGROUPS == 3:
        gl.warp_specialize(
            [
                (_produce, (q_desc, k_desc, v_desc, walks, place, D, BLOCK_N, WARPGROUPS, STAGES)),
                (_consume, (outs, walks, place, problem, 0, CAUSAL, D, DEPTH, BLOCK_N, STAGES, DIAGONALS, TURNS, HELD)),
                (_consume, (outs, walks, place, problem, 1, CAUSAL, D, DEPTH, BLOCK_N, STAGES, DIAGONALS, TURNS, HELD)),
                (_consume, (outs, walks, place, problem, 2, CAUSAL, D, DEPTH, BLOCK_N, STAGES, DIAGONALS, TURNS, HELD)),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_produce, (q_desc, k_desc, v_desc, walks, place, D, BLOCK_N, WARPGROUPS, STAGES)),
                (_consume, (outs, walks, place, problem, 0, CAUSAL, D, DEPTH, BLOCK_N, STAGES, DIAGONALS, TURNS, HELD)),
                (_consume, (outs, walks, place, problem, 1, CAUSAL, D, DEPTH, BLOCK_N, STAGES, DIAGONALS, TURNS, HELD)),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )


@gluon.jit
def _barriers(WARPGROUPS: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr):
    """Of one walk over the keys."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=WARPGROUPS)
    if TURNS:
        for w in gl.static_range(WARPGROUPS):
            mbarrier.init(turns.index(w), count=1)
    return full, empty, turns


@gluon.jit
def _again(buffers, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr):
    """What a second walk takes: which warpgroups want it, a barrier at which all have said so, and its own barriers."""
    doubts = gl.allocate_shared_memory(gl.int32, [WARPGROUPS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    judged = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(judged, count=WARPGROUPS)
    return doubts, judged, buffers + _barriers(WARPGROUPS, STAGES, TURNS)


@gluon.jit
def share(program, whole, pieces):
    """Which unit of work a program has, which piece of it, and of how many: the first `whole` programs have one each,
    the others a piece of one."""
    beyond = gl.maximum(program - whole, 0)
    of = 1
    if program >= whole:
        of = pieces
    return program - beyond + beyond // pieces, beyond % of, of


@gluon.jit
def portion(tiles, piece, of):
    """The first tile of a piece, and how many it has."""
    start = tiles * piece // of
    return start, tiles * (piece + 1) // of - start


@gluon.jit
def assignment(unit, order):
    """Block, number of the head among all, batch and head of a unit of work: a block of every head of a section, then
    the next block; then the next section. `order`: see `hopper_launch.order`."""
    units, section, heads = order[0], order[1], order[2]
    number = _quotient(unit, order[3], order[4])
    inside = unit - number * units
    block = _quotient(inside, order[5], order[6])
    index = number * section + inside - block * section
    batch = _quotient(index, order[7], order[8])
    return block, index, batch, index - batch * heads


@gluon.jit
def _quotient(n, multiplier, shift):
    """Three divisions one after another would take a tenth of the time that a program has beside its tiles."""
    return ((n.to(gl.int64) * multiplier) >> shift).to(gl.int32)


@gluon.jit
def _tiles(last_row, len_k, hi, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr):
    """How many tiles of keys the queries up to `last_row` see; one where they see none, so that all do something."""
    end = len_k
    if CAUSAL:
        end = gl.minimum(len_k, last_row + hi + 1)
    return gl.maximum(gl.cdiv(end, BLOCK_N), 1)


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, walks, place,
    D: gl.constexpr, BLOCK_N: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    shared, again = walks
    q_smem, q_bars = shared[0], shared[3]
    batch, head, _, _, row, _, _, _ = place
    for w in gl.static_range(WARPGROUPS):
        mbarrier.expect(q_bars.index(w), ROWS * D * 2)
        tma.async_copy_global_to_shared(q_desc, [batch, head, row + w * ROWS, 0], q_bars.index(w), q_smem.index(w))
        if w == 0:  # the first warpgroup begins while the queries of the others are on their way
            _bring_first(k_desc, shared, place, D, BLOCK_N)
    _bring_others(k_desc, v_desc, shared, place, D, BLOCK_N, STAGES)
    if len(again) > 0:
        doubts, judged, others = again
        mbarrier.wait(judged, 0)
        if _any(doubts):
            _bring_first(k_desc, others, place, D, BLOCK_N)
            _bring_others(k_desc, v_desc, others, place, D, BLOCK_N, STAGES)


@gluon.jit
def _bring_first(k_desc, shared, place, D: gl.constexpr, BLOCK_N: gl.constexpr):
    _, k_smem, _, _, full, _, _ = shared
    batch, _, kv_head, _, _, _, first_column, tiles = place
    column = first_column + (tiles - 1) * BLOCK_N
    mbarrier.expect(full.index(0), BLOCK_N * D * 2)
    tma.async_copy_global_to_shared(k_desc, [batch, kv_head, column, 0], full.index(0), k_smem.index(0))


@gluon.jit
def _bring_others(k_desc, v_desc, shared, place, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """Keys of all tiles but the first, and the values of the tile before each."""
    _, k_smem, v_smem, _, full, empty, _ = shared
    batch, _, kv_head, _, _, _, first_column, tiles = place
    TILE: gl.constexpr = BLOCK_N * D * 2  # bytes
    for t in range(1, tiles + 1):
        slot = t % STAGES
        bar = full.index(slot)
        mbarrier.wait(empty.index(slot), (t // STAGES & 1) ^ 1)
        has_k = t < tiles
        if has_k:
            mbarrier.expect(bar, 2 * TILE)
        else:
            mbarrier.expect(bar, TILE)
        column = first_column + (tiles - 1 - t) * BLOCK_N
        tma.async_copy_global_to_shared(k_desc, [batch, kv_head, column, 0], bar, k_smem.index(slot), pred=has_k)
        tma.async_copy_global_to_shared(v_desc, [batch, kv_head, column + BLOCK_N, 0], bar, v_smem.index(slot))


@gluon.jit
def _any(doubts):
    WARPGROUPS: gl.constexpr = doubts.shape[0]
    found = gl.sum(doubts.index(0).load(ONE), 0)
    for w in gl.static_range(1, WARPGROUPS):
        found += gl.sum(doubts.index(w).load(ONE), 0)
    return found > 0


@gluon.jit
def _consume(
    outs, walks, place, problem,
    W: gl.constexpr, CAUSAL: gl.constexpr, D: gl.constexpr, DEPTH: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, DIAGONALS: gl.constexpr, TURNS: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """The queries of warpgroup W, if it has any."""
    shared, again = walks
    FOLLOWS: gl.constexpr = len(again) == 0
    row = place[4] + W * ROWS
    own = (row >= 0) & (row < place[5])
    doubt = _walk(
        outs, shared, place, problem, own, W, CAUSAL, D, DEPTH, BLOCK_N, STAGES, DIAGONALS, TURNS, HELD, FOLLOWS
    )
    if not FOLLOWS:
        doubts, judged, others = again
        doubts.index(W).store(gl.full([1], doubt, gl.int32, ONE))
        mbarrier.arrive(judged)
        mbarrier.wait(judged, 0)
        if _any(doubts):
            own = doubt > 0
            _walk(outs, others, place, problem, own, W, CAUSAL, D, DEPTH, BLOCK_N, STAGES, DIAGONALS, TURNS, HELD, True)


@gluon.jit
def _walk(
    outs, shared, place, problem, own,
    W: gl.constexpr, CAUSAL: gl.constexpr, D: gl.constexpr, DEPTH: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, DIAGONALS: gl.constexpr, TURNS: gl.constexpr, HELD: gl.constexpr, FOLLOWS: gl.constexpr,
):  # fmt: skip
    """Over all tiles, with the warpgroup's `own` queries or with none. 1: results are in doubt, and were not stored."""
    _, _, _, _, full, empty, turns = shared
    doubt = 0
    if own:
        doubt = _attend(
            outs, shared, place, problem, W, CAUSAL, D, DEPTH, BLOCK_N, STAGES, DIAGONALS, TURNS, HELD, FOLLOWS
        )
    else:
        for t in range(place[7]):
            _pass_on(t, full, empty, turns, W, STAGES, TURNS)
    return doubt


@gluon.jit
def _pass_on(t, full, empty, turns, W: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr):
    """What the others wait for of a warpgroup that has no use for tile t."""
    mbarrier.wait(full.index(t % STAGES), t // STAGES & 1)
    mbarrier.arrive(empty.index(t % STAGES))
    if TURNS:
        await_turn(turns, t, W)
        mbarrier.arrive(turns.index(W))


@gluon.jit
def _attend(
    outs, shared, place, problem,
    W: gl.constexpr, CAUSAL: gl.constexpr, D: gl.constexpr, DEPTH: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, DIAGONALS: gl.constexpr, TURNS: gl.constexpr, HELD: gl.constexpr, FOLLOWS: gl.constexpr,
):  # fmt: skip
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    q_smem, k_smem, v_smem, q_bars, full, empty, turns = shared
    tiles = place[7]
    len_q, len_k, hi, factor = problem
    row = place[4] + W * ROWS
    own = gl.minimum(_tiles(row + ROWS - 1, len_k, hi, CAUSAL, BLOCK_N), tiles)
    first = tiles - own
    q = columns_of(q_smem.index(W).reshape((ROWS, D)), DEPTH)
    m = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    o = gl.zeros((ROWS, D), gl.float32, O_LAYOUT)

    for t in range(first):  # only later queries see these
        _pass_on(t, full, empty, turns, W, STAGES, TURNS)
    mbarrier.wait(q_bars.index(W), 0)
    if HELD:
        q = _loaded(q, gl.DotOperandLayout(0, S_LAYOUT, 2))
    slot = first % STAGES
    mbarrier.wait(full.index(slot), first // STAGES & 1)
    k = k_smem.index(slot).reshape((BLOCK_N, D))
    zeros = gl.zeros((ROWS, BLOCK_N), gl.float32, S_LAYOUT)
    if TURNS:
        await_turn(turns, first, W)
    s = warpgroup_mma_wait(0, deps=[row_by_row(q, k, zeros)])
    mbarrier.arrive(empty.index(slot))
    if TURNS:
        mbarrier.arrive(turns.index(W))
    s = _masked(s, row, place[6] + (own - 1) * BLOCK_N, len_k, hi, CAUSAL, BLOCK_N, S_LAYOUT)
    p, m, _ = _softmax(s, m, factor, True)
    l = _partial_sums(p, BLOCK_N)
    weights = gl.convert_layout(p.to(q_smem.dtype), P_LAYOUT, assert_trivial=True)
    begin = first + 1
    if DIAGONALS > 1:
        begin = gl.minimum(first + DIAGONALS, tiles)
        for t in range(first + 1, begin):
            o, weights, m, l = _step(
                t, q, shared, place, problem, o, weights, m, l, row, W, True, True, CAUSAL, D, BLOCK_N, STAGES, TURNS
            )
    m = gl.maximum(m, LOWEST)  # with -inf, of infinite inputs, further scores of -inf would make NaN
    for t in range(begin, tiles):
        o, weights, m, l = _step(
            t, q, shared, place, problem, o, weights, m, l, row, W, False, FOLLOWS, CAUSAL, D, BLOCK_N, STAGES, TURNS
        )
    slot = tiles % STAGES
    mbarrier.wait(full.index(slot), tiles // STAGES & 1)
    v = v_smem.index(slot).reshape((BLOCK_N, D))
    o, weights = warpgroup_mma_wait(0, deps=[warpgroup_mma(weights, v, o, is_async=True), weights])

    m = gl.convert_layout(m, ROW_LAYOUT, assert_trivial=True)
    l = gl.convert_layout(gl.sum(l, 1), ROW_LAYOUT, assert_trivial=True)
    doubt = 0
    if not FOLLOWS:
        doubt = gl.max(gl.where(l < LIMIT, 0, 1), 0)
        doubt = gl.where(begin < tiles, doubt, 0)  # over the first tiles the maximum did follow
    if doubt == 0:
        _store(o, m, l, outs, q_smem.index(W), place, len_q, row, D, q_smem.shape[0] * ROWS)
    return doubt


@gluon.jit
def _store(o, m, l, outs, q_place, place, len_q, row, D: gl.constexpr, BLOCK: gl.constexpr):
    """Output and logsumexp, by way of the queries' place: these were read for the last time."""
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    out_desc, lse, partial, whole = outs
    batch, head, _, index, block_row, _, _, _ = place
    sees_none = l == 0.0
    l = gl.where(sees_none, 1.0, l)
    o = o / l[:, None]
    natural = gl.where(sees_none, float("-inf"), (m + gl.log2(l)) * LN2)
    if partial is None or gl.program_id(0) < whole:
        q_place.reshape((ROWS, D)).store(o.to(q_place.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [batch, head, row, 0], q_place)
        rows = row + gl.arange(0, ROWS, layout=ROW_LAYOUT)  # not before the fence, which would wait for this store
        gl.store(lse + index.to(gl.int64) * len_q + rows, natural, mask=rows < len_q)
        tma.store_wait(0)
    else:
        rows = row - block_row + gl.arange(0, ROWS, layout=ROW_LAYOUT)
        columns = gl.arange(0, D, layout=gl.SliceLayout(0, o.type.layout))
        piece = partial + (gl.program_id(0) - whole) * (BLOCK * (D + 1))
        gl.store(piece + rows[:, None] * D + columns[None, :], o)
        gl.store(piece + BLOCK * D + rows, natural)


@gluon.jit
def columns_of(x, DEPTH: gl.constexpr):
    """The first DEPTH columns of a tile in shared memory, in parts that are powers of 2."""
    HALF: gl.constexpr = x.shape[1] // 2
    return (x,) if x.shape[1] == DEPTH else (x.slice(0, HALF, dim=1), x.slice(HALF, DEPTH - HALF, dim=1))


@gluon.jit
def _loaded(parts, LAYOUT: gl.constexpr):
    return (parts[0].load(LAYOUT),) if len(parts) == 1 else (parts[0].load(LAYOUT), parts[1].load(LAYOUT))


@gluon.jit
def row_by_row(a, b, zeros):
    """a b^T, begun; a by its `columns_of`, and as many of b's. One product for each part."""
    FIRST: gl.constexpr = a[0].shape[1]
    token = warpgroup_mma(a[0], b.slice(0, FIRST, dim=1).permute((1, 0)), zeros, use_acc=False, is_async=True)
    if len(a) > 1:
        token = warpgroup_mma(a[1], b.slice(FIRST, a[1].shape[1], dim=1).permute((1, 0)), token, is_async=True)
    return token


@gluon.jit
def await_turn(turns, t, W: gl.constexpr):
    """Warpgroup W multiplies for tile t after the one before it has; the first, after the last has for tile t - 1."""
    if W == 0:
        mbarrier.wait(turns.index(turns.shape[0] - 1), t & 1 ^ 1)
    else:
        mbarrier.wait(turns.index(W - 1), t & 1)


@gluon.jit
def _step(
    t, q, shared, place, problem, o, weights, m, l, row,
    W: gl.constexpr, MASKED: gl.constexpr, FOLLOWS: gl.constexpr, CAUSAL: gl.constexpr, D: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Scores and weights of tile t; the values of the tile before, by its weights. FOLLOWS: the maximum does."""
    _, k_smem, v_smem, _, full, empty, turns = shared
    column, tiles = place[6], place[7]
    _, len_k, hi, factor = problem
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    slot = t % STAGES
    mbarrier.wait(full.index(slot), t // STAGES & 1)
    k = k_smem.index(slot).reshape((BLOCK_N, D))
    v = v_smem.index(slot).reshape((BLOCK_N, D))
    zeros = gl.zeros((ROWS, BLOCK_N), gl.float32, S_LAYOUT)
    if TURNS:
        await_turn(turns, t, W)
    s_token = row_by_row(q, k, zeros)
    o_token = warpgroup_mma(weights, v, o, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s_token])
    if TURNS:
        mbarrier.arrive(turns.index(W))
    if MASKED:
        s = _masked(s, row, column + (tiles - 1 - t) * BLOCK_N, len_k, hi, CAUSAL, BLOCK_N, S_LAYOUT)
    if FOLLOWS:
        p, m, rescale = _softmax(s, m, factor, MASKED)
        l = l * gl.convert_layout(rescale, gl.SliceLayout(1, l.type.layout), assert_trivial=True)[:, None]
    else:
        p = gl.exp2(s * factor - m[:, None])
    l += _partial_sums(p, BLOCK_N)
    new_weights = gl.convert_layout(p.to(weights.dtype), weights.type.layout, assert_trivial=True)
    # The new weights also, which nothing waits for: it keeps pairs of them in one register over the loop's end.
    o, weights, new_weights = warpgroup_mma_wait(0, deps=[o_token, weights, new_weights])
    mbarrier.arrive(empty.index(slot))
    if FOLLOWS:
        o = _rescaled(o, rescale, D)
    return o, new_weights, m, l


@gluon.jit
def _masked(
    s, row, column, len_k, hi, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr, S_LAYOUT: gl.constexpr
):  # fmt: skip
    columns = column + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT))[None, :]
    seen = columns < len_k
    if CAUSAL:
        rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))[:, None]
        seen = seen & (columns <= rows + hi)
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _softmax(s, m, factor, MASKED: gl.constexpr):
    """Weights of a tile, the running maximum (in powers of 2), and what all before is to be multiplied by.

    The maximum only keeps numbers in range: one that is 2^SLACK too small does as well, and with it what was added up
    so far can stay as it is. So it follows in steps.
    """
    m_tile = gl.maximum(m, gl.max(s, 1) * factor)
    if MASKED:
        m_new = m_tile
        # Of a row that has seen no key yet the maximum is -inf, and -inf - -inf would be NaN.
        shift = gl.where(m_new == float("-inf"), 0.0, m_new)
        rescale = gl.exp2(m - shift)
    else:
        grows = m_tile - m > SLACK
        m_new = gl.where(grows, m_tile, m)
        shift = m_new
        rescale = gl.where(grows, gl.exp2(m - m_tile), 1.0)
    return gl.exp2(s * factor - shift[:, None]), m_new, rescale


@gluon.jit
def _partial_sums(p, BLOCK_N: gl.constexpr):
    """Of the four threads that share a row, each for itself: they meet after the last tile."""
    return gl.sum(gl.sum(gl.reshape(p, [ROWS, BLOCK_N // 8, 4, 2]), 3), 1)


@gluon.jit
def _rescaled(o, rescale, D: gl.constexpr):
    """o * rescale, left out by a warp all of whose rows have 1."""
    rescale = gl.convert_layout(rescale, gl.SliceLayout(1, o.type.layout), assert_trivial=True)
    factors, _ = gl.broadcast(rescale[:, None], o)
    return gl.inline_asm_elementwise(
        _rescale_asm(D // 2), _constraints(D // 2), [o, factors], gl.float32, False, D // 2
    )


@gluon.constexpr_function
def _rescale_asm(count):
    """PTX, since only there a warp can branch by itself. A thread has `count` elements of the output: pairs of columns,
    of one row and of another in turn, so the first and the third factor are all that it has."""
    outs, ins, factors = (range(i * count, (i + 1) * count) for i in range(3))
    lines = [
        "{ .reg .pred p, q;",
        f"setp.neu.f32 p, ${factors[0]}, 0f3F800000;",
        f"setp.neu.or.f32 p, ${factors[2]}, 0f3F800000, p;",
        "vote.sync.any.pred q, p, 0xffffffff;",
        *(f"mov.f32 ${a}, ${b};" for a, b in zip(outs, ins, strict=True)),
        "@!q bra DONE;",
        *(f"mul.f32 ${a}, ${a}, ${b};" for a, b in zip(outs, factors, strict=True)),
        "DONE: }",
    ]
    return " ".join(lines)


@gluon.constexpr_function
def _constraints(count):
    return ",".join(["=&f"] * count + ["f"] * (2 * count))


# -- pieces, put together ---------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["order", "whole", "pieces"])
def join_kernel(
    out, lse, partial, strides, len_q, d, order, whole, pieces,
    D: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """Output and logsumexp of 64 queries of a block of BLOCK that `forward_kernel` left in pieces."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [256 // D, D // 8], [4, 1], [1, 0])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    beyond, group = gl.program_id(0) // (BLOCK // ROWS), gl.program_id(0) % (BLOCK // ROWS)
    block, index, batch, head = assignment(whole + beyond, order)
    inside = group * ROWS + gl.arange(0, ROWS, layout=ROW_LAYOUT)
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    first = partial + beyond * pieces * (BLOCK * (D + 1))
    m = gl.full((ROWS,), float("-inf"), gl.float32, ROW_LAYOUT)
    for piece in range(pieces):
        m = gl.maximum(m, gl.load(first + piece * (BLOCK * (D + 1)) + BLOCK * D + inside))
    m = gl.where(m == float("-inf"), 0.0, m)  # a query that sees no key
    l = gl.zeros((ROWS,), gl.float32, ROW_LAYOUT)
    o = gl.zeros((ROWS, D), gl.float32, LAYOUT)
    for piece in range(pieces):
        at = first + piece * (BLOCK * (D + 1))
        weight = gl.exp2((gl.load(at + BLOCK * D + inside) - m) * LOG2E)
        l += weight
        o += weight[:, None] * gl.load(at + inside[:, None] * D + columns[None, :])
    rows = block * BLOCK + inside
    seen = rows < len_q
    target = out + batch.to(gl.int64) * strides[0] + head.to(gl.int64) * strides[1]
    target += rows.to(gl.int64)[:, None] * strides[2] + columns[None, :]
    o = o / gl.where(l == 0.0, 1.0, l)[:, None]
    gl.store(target, o.to(out.dtype.element_ty), mask=seen[:, None] & (columns < d)[None, :])
    natural = gl.where(l == 0.0, float("-inf"), m + gl.log2(l) * LN2)
    gl.store(lse + index.to(gl.int64) * len_q + rows, natural, mask=seen)
