"""Attention forward for Hopper GPUs, in Gluon. How it works, drawn: docs/ATTENTION.md.

A program owns the queries of one to three consumer warpgroups, 64 each. One more warpgroup, the producer, has the copy
engine (TMA) load keys and values into a ring of stages in shared memory; it needs few registers, and the consumers get
them. Programs with one consumer are small: several of them run on a multiprocessor, and each hides the start and end of
the others, which take as long as four tiles.

Stage t holds the keys of tile t and the values of tile t - 1, because these are multiplied together: a consumer starts
S = Q K^T of a tile and O += P V of the tile before, then computes the softmax of the scores while another consumer has
the tensor cores. P never leaves registers. Three consumers run in ping-pong order: without it they fall into step, and
all want the tensor cores at the same time, and then the exponentials.

Tiles are visited from the last to the first: what a causal mask or the end of the keys cuts off lies in the first tile
or two, which are peeled off, and the main loop has no mask.

Nor does it update the running maximum, unless P is fp16. The maximum only keeps numbers in range, and bf16 has the
range of fp32: P is computed against the maximum of the first tiles and 2^56 more, later scores may exceed that maximum
by 2^166 (115 nats), and the result is as exact. After the last tile the row sums tell whether they overflowed. If so,
which takes inputs far from any model's, the program makes a second pass over the keys with a running maximum.

A window to the left bounds the tiles from below: each warpgroup ends with the last tile that it sees.

Split-KV: without a mask all programs take equally long, and the last ones would leave most multiprocessors idle. The
keys of these blocks are split over several programs; `combine_kernel` combines their partial results.

Packed documents: with `p_table` (packing_triton.py) a program reads there which block of which document it has. Rows
are then counted inside the document, and descriptors are those of `TensorDescription.ragged`, which the copy engine
bounds by the document: beyond its end it reads zeros and writes nothing.

Names: desc_ TMA descriptor, p_ pointer to global memory, s_ shared memory, b_ block in registers, m_ mask.
Shapes: ROWS = 64 queries of a warpgroup, BLOCK_N keys of a tile, D head dim padded to 64, 128 or 256, W warpgroup.
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

from cs336_systems.kernels.flash.packing_triton import FIELDS, FIRST_K, FIRST_Q, LEN_K, LEN_Q, ROW, SHIFT
from cs336_systems.kernels.triton_compat import RAGGED_ROWS, Value, aggregate, specialize_warps

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)
"""Queries of a warpgroup: the rows of its matrix instruction."""
SLACK = gl.constexpr(8.0)
"""Powers of 2 by which the running maximum may be too small. P stays below 2^8, in range for fp16 too."""
HEADROOM = gl.constexpr(56.0)
"""Powers of 2 that are added to the first maximum where it is not updated, so that later scores may exceed it by more.
The row sum is then at least 2^-56, which is its own term; what rounding to 0 loses is below 2^-70 of that."""
LIMIT = gl.constexpr(2.0**110)
"""Row sums from here on count as overflow. The output before its division by them is then finite for values up to
2^17."""
HEAD, CLEAR, TAIL = (gl.constexpr(i) for i in range(3))
"""Kinds of tiles: those that the causal mask may cut, those that no mask cuts, and those that only a window cuts."""
LOWEST = gl.constexpr(-3.4028234663852886e38)
SCALAR = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
"""Layout of one number that all threads hold."""


@aggregate
class Config:
    """Compile-time constants of the forward kernel."""

    CAUSAL: gl.constexpr
    D: gl.constexpr
    D_USED: gl.constexpr
    """Columns that S = Q K^T multiplies; the others of D are zero padding."""
    O_USED: gl.constexpr
    """Columns of O that are computed: all, except where D_USED is 192 of 256. Of 128 and fewer, narrower matmuls take
    as long, because they read P from registers as often."""
    BLOCK_N: gl.constexpr
    WARPGROUPS: gl.constexpr
    """Number of consumer warpgroups."""
    STAGES: gl.constexpr
    MASKED_TILES: gl.constexpr
    """Number of tiles of a warpgroup that the causal mask may cut."""
    PING_PONG: gl.constexpr
    """True if a consumer starts its matmuls only when the one before it has its scores."""
    Q_IN_REGISTERS: gl.constexpr
    WINDOW: gl.constexpr
    """True if a window hides keys far to the left."""
    PACKED: gl.constexpr
    """True if documents are packed along the sequence."""


@aggregate
class Work:
    """The block of queries and range of keys of a program."""

    batch: Value
    """Batch index; with packed documents `outer_of` the document for queries."""
    batch_k: Value
    """With packed documents `outer_of` the document for keys; None otherwise."""
    origin_q: Value
    """With packed documents `origin_of` the document for queries; 0 otherwise."""
    origin_k: Value
    lse_at: Value
    """With packed documents the position of the document's first logsumexp in this head; None otherwise."""
    head: Value
    kv_head: Value
    index: Value
    """Index of the query head among those of all batches."""
    row: Value
    """First query; negative if the first block is not full."""
    end: Value
    """First query beyond the last warpgroup that has queries."""
    column: Value
    """First key."""
    tiles: Value
    """Number of tiles of keys; tiles are counted from the last keys."""


@aggregate
class Sizes:
    len_q: Value
    len_k: Value
    lo: Value
    """Query i sees keys from i + lo on; None: from the first on."""
    hi: Value
    """Query i sees keys up to i + hi."""
    factor: Value
    """scale * log2(e)."""


@aggregate
class Outputs:
    desc_o: Value
    p_lse: Value
    p_partial: Value
    """Partial results of split-KV for `combine_kernel`; None without split-KV."""
    unsplit: Value
    """Number of programs, the first ones, that visit all of their keys."""


@aggregate
class Pass:
    """Buffers and barriers of one pass over the keys."""

    s_q: Value  # [WARPGROUPS, 1, 1, ROWS, D]
    s_k: Value  # [STAGES, 1, 1, BLOCK_N, D]
    s_v: Value  # [STAGES, 1, 1, BLOCK_N, D]
    q_full: Value
    full: Value
    """Barrier: a stage was loaded."""
    empty: Value
    """Barrier: all consumers are done with a stage."""
    ping_pong: Value


@aggregate
class Retry:
    """State of the second pass over the keys, after an overflow in the first; all None if the first has a running
    maximum."""

    overflow: Value  # [WARPGROUPS, 1]
    voted: Value
    """Barrier: all consumers have written `overflow`."""
    second: Value
    """Pass with barriers of its own, for the second pass."""


@gluon.jit(do_not_specialize=["schedule", "shift", "unsplit", "splits"])
def forward_kernel(
    desc_q, desc_k, desc_v, desc_o, p_lse, p_partial, p_table,
    group, len_q, len_k, lo, hi, scale, blocks, schedule, shift, unsplit, splits,
    CAUSAL: gl.constexpr, D: gl.constexpr, D_USED: gl.constexpr, BLOCK_N: gl.constexpr, WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr, MASKED_TILES: gl.constexpr, PING_PONG: gl.constexpr, Q_IN_REGISTERS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute output and logsumexp of ROWS * WARPGROUPS queries. The first block begins at -`shift`. Programs from
    `unsplit` on see one of `splits` parts of the keys and write to `p_partial`."""
    WINDOW: gl.constexpr = lo is not None
    PACKED: gl.constexpr = p_table is not None
    config = Config(
        CAUSAL=CAUSAL, D=D, D_USED=D_USED, O_USED=D if D <= 128 else D_USED, BLOCK_N=BLOCK_N, WARPGROUPS=WARPGROUPS,
        STAGES=STAGES, MASKED_TILES=MASKED_TILES, PING_PONG=PING_PONG, Q_IN_REGISTERS=Q_IN_REGISTERS, WINDOW=WINDOW,
        PACKED=PACKED,
    )  # fmt: skip
    unit = gl.program_id(0)
    if p_partial is not None:
        unit, split, of = split_of_program(unit, unsplit, splits)
    block, index, batch, head = block_and_head(unit, schedule)
    batch_k, origin_q, origin_k, lse_at = None, 0, 0, None
    if PACKED:
        line = p_table + block * FIELDS
        first_q = gl.load(line + FIRST_Q)
        lse_at = index.to(gl.int64) * len_q + first_q
        row, len_q, len_k = gl.load(line + ROW), gl.load(line + LEN_Q), gl.load(line + LEN_K)
        if len_q == 0:  # documents may have fewer blocks than there are programs
            return
        hi += gl.load(line + SHIFT)
        if WINDOW:
            lo += gl.load(line + SHIFT)
        batch, batch_k = outer_of(first_q, len_q), outer_of(gl.load(line + FIRST_K), len_k)
        origin_q, origin_k = origin_of(len_q), origin_of(len_k)
    else:
        if CAUSAL:
            block = blocks - 1 - block  # the last queries see the most keys
        row = block * (WARPGROUPS * ROWS) - shift
    end = gl.minimum(row + WARPGROUPS * ROWS, gl.cdiv(len_q, ROWS) * ROWS)
    tiles = _visible_tiles(end - 1, len_k, hi, CAUSAL, BLOCK_N)
    column = 0
    if p_partial is not None:
        start, tiles = part_of(tiles, split, of)
        column = start * BLOCK_N
    if WINDOW:
        # The first query that exists counts. Otherwise no query would see the last tiles, nor wait for their copies.
        start = gl.minimum(gl.maximum(gl.maximum(row, 0) + lo, 0) // BLOCK_N, tiles - 1)
        tiles -= start
        column = start * BLOCK_N
    work = Work(
        batch=batch, head=head, kv_head=head // group, index=index, row=row, end=end, column=column, tiles=tiles,
        batch_k=batch_k, origin_q=origin_q, origin_k=origin_k, lse_at=lse_at,
    )  # fmt: skip
    sizes = Sizes(len_q=len_q, len_k=len_k, lo=lo, hi=hi, factor=scale * LOG2E)

    s_q = gl.allocate_shared_memory(desc_q.dtype, tile_shapes(WARPGROUPS, ROWS, D, PACKED), desc_q.layout)
    s_k = gl.allocate_shared_memory(desc_k.dtype, tile_shapes(STAGES, BLOCK_N, D, PACKED), desc_k.layout)
    s_v = gl.allocate_shared_memory(desc_v.dtype, tile_shapes(STAGES, BLOCK_N, D, PACKED), desc_v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], mbarrier.MBarrierLayout())
    for w in gl.static_range(WARPGROUPS):
        mbarrier.init(q_full.index(w), count=1)
    first = _pass(s_q, s_k, s_v, q_full, config)
    retry = _retry(first, config)
    fence_async_shared()

    outputs = Outputs(desc_o=desc_o, p_lse=p_lse, p_partial=p_partial, unsplit=unsplit)
    specialize_warps(
        _produce, (desc_q, desc_k, desc_v, first, retry, work, config),
        _consume, (outputs, first, retry, work, sizes, config),
        WARPGROUPS, REGISTERS,
    )  # fmt: skip


@gluon.jit
def _pass(s_q, s_k, s_v, q_full, config):
    full = gl.allocate_shared_memory(gl.int64, [config.STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [config.STAGES, 1], mbarrier.MBarrierLayout())
    ping_pong = gl.allocate_shared_memory(gl.int64, [config.WARPGROUPS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(config.STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=config.WARPGROUPS)
    if config.PING_PONG:
        for w in gl.static_range(config.WARPGROUPS):
            mbarrier.init(ping_pong.index(w), count=1)
    return Pass(s_q=s_q, s_k=s_k, s_v=s_v, q_full=q_full, full=full, empty=empty, ping_pong=ping_pong)


@gluon.jit
def _retry(first, config):
    if first.s_q.dtype == gl.bfloat16:
        overflow = gl.allocate_shared_memory(gl.int32, [config.WARPGROUPS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        voted = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(voted, count=config.WARPGROUPS)
        second = _pass(first.s_q, first.s_k, first.s_v, first.q_full, config)
        return Retry(overflow=overflow, voted=voted, second=second)
    else:
        return Retry(overflow=None, voted=None, second=None)


# -- which work a program has -----------------------------------------------------------------------------------------


@gluon.jit
def split_of_program(program, unsplit, splits):
    """Return the unit of work of a program, its split of that unit, and the unit's number of splits: 1 for the first
    `unsplit` programs, `splits` for the others."""
    beyond = gl.maximum(program - unsplit, 0)
    of = 1
    if program >= unsplit:
        of = splits
    return program - beyond + beyond // splits, beyond % of, of


@gluon.jit
def part_of(count, part, parts):
    """Return the start and the length of one of almost equal parts of `count` things."""
    start = count * part // parts
    return start, count * (part + 1) // parts - start


@gluon.jit
def block_and_head(unit, schedule):
    """Return the block, the head's index among all heads, the batch, and the head of a unit of work. Units take one
    block of every head of a section, then the next block, then the next section. `schedule`: a
    hopper_launch.Schedule."""
    number = _quotient(unit, schedule.units_multiplier, schedule.units_shift)
    inside = unit - number * schedule.units
    block = _quotient(inside, schedule.section_multiplier, schedule.section_shift)
    index = number * schedule.section + inside - block * schedule.section
    batch = _quotient(index, schedule.heads_multiplier, schedule.heads_shift)
    return block, index, batch, index - batch * schedule.heads


@gluon.jit
def _quotient(n, multiplier, shift):
    """Divide by multiplication with a `hopper_launch.reciprocal`. Three integer divisions in sequence would take a
    tenth of the time that a program spends outside its tiles."""
    return ((n.to(gl.int64) * multiplier) >> shift).to(gl.int32)


@gluon.jit
def _visible_tiles(last_row, len_k, hi, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return the number of tiles of keys that the queries up to `last_row` see; at least 1, so that every program has
    work."""
    end = len_k
    if CAUSAL:
        end = gl.minimum(len_k, last_row + hi + 1)
    return gl.maximum(gl.cdiv(end, BLOCK_N), 1)


# -- where tiles are in memory ----------------------------------------------------------------------------------------


@gluon.constexpr_function
def tile_shape(rows, d, packed):
    """Return the shape of a tile in its descriptor: batch and head, or the two outer dimensions of a document and head,
    come first."""
    return [1] * (3 if packed else 2) + [rows, d]


@gluon.constexpr_function
def tile_shapes(count, rows, d, packed):
    """Return the shape of `count` buffers for such tiles."""
    return [count] + [1] * (3 if packed else 2) + [rows, d]


@gluon.jit
def outer_of(first, length):
    """Return the coordinate that identifies a document in a ragged descriptor: the document's end."""
    return first + length


@gluon.jit
def origin_of(length):
    """Return the coordinate of a document's first row, such that its last row is the last of the ragged descriptor."""
    return RAGGED_ROWS - length


@gluon.jit
def place(batch, head, row, PACKED: gl.constexpr):
    """Return the TMA coordinates of a row. With packed documents `batch` is `outer_of` the document, and `row` counts
    from `origin_of` on."""
    if PACKED:
        return (RAGGED_ROWS, batch, head, row, 0)
    else:
        return (batch, head, row, 0)


@gluon.jit
def _place_of_keys(work, column, config):
    if config.PACKED:
        return place(work.batch_k, work.kv_head, work.origin_k + column, True)
    else:
        return place(work.batch, work.kv_head, column, False)


# -- producer ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _produce(desc_q, desc_k, desc_v, first, retry, work, config):
    """Load queries once, and keys and values for each pass."""
    for w in gl.static_range(config.WARPGROUPS):
        bar = first.q_full.index(w)
        mbarrier.expect(bar, ROWS * config.D * 2)
        at = place(work.batch, work.head, work.origin_q + work.row + w * ROWS, config.PACKED)
        tma.async_copy_global_to_shared(desc_q, at, bar, first.s_q.index(w))
        if w == 0:  # the first consumer starts while the queries of the others are on their way
            _load_first_keys(desc_k, first, work, config)
    _load_tiles(desc_k, desc_v, first, work, config)
    if retry.second is not None:
        mbarrier.wait(retry.voted, 0)
        if _any(retry.overflow):
            _load_first_keys(desc_k, retry.second, work, config)
            _load_tiles(desc_k, desc_v, retry.second, work, config)


@gluon.jit
def _load_first_keys(desc_k, over, work, config):
    column = work.column + (work.tiles - 1) * config.BLOCK_N
    bar = over.full.index(0)
    mbarrier.expect(bar, config.BLOCK_N * config.D * 2)
    tma.async_copy_global_to_shared(desc_k, _place_of_keys(work, column, config), bar, over.s_k.index(0))


@gluon.jit
def _load_tiles(desc_k, desc_v, over, work, config):
    """Load the keys of all tiles but the first, and the values of the tile before each."""
    BYTES: gl.constexpr = config.BLOCK_N * config.D * 2
    for t in range(1, work.tiles + 1):
        slot = t % config.STAGES
        bar = over.full.index(slot)
        mbarrier.wait(over.empty.index(slot), (t // config.STAGES & 1) ^ 1)
        has_k = t < work.tiles
        if has_k:
            mbarrier.expect(bar, 2 * BYTES)
        else:
            mbarrier.expect(bar, BYTES)
        column = work.column + (work.tiles - 1 - t) * config.BLOCK_N
        at = _place_of_keys(work, column, config)
        tma.async_copy_global_to_shared(desc_k, at, bar, over.s_k.index(slot), pred=has_k)
        at = _place_of_keys(work, column + config.BLOCK_N, config)
        tma.async_copy_global_to_shared(desc_v, at, bar, over.s_v.index(slot))


@gluon.jit
def _any(flags):
    WARPGROUPS: gl.constexpr = flags.shape[0]
    found = gl.sum(flags.index(0).load(SCALAR), 0)
    for w in gl.static_range(1, WARPGROUPS):
        found += gl.sum(flags.index(w).load(SCALAR), 0)
    return found > 0


# -- consumers --------------------------------------------------------------------------------------------------------


@gluon.jit
def _consume(W: gl.constexpr, outputs, first, retry, work, sizes, config):
    """Compute attention of the queries of warpgroup W, if it has any."""
    RUNNING_MAX: gl.constexpr = retry.second is None
    row = work.row + W * ROWS
    has_queries = (row >= 0) & (row < work.end)
    overflow = _visit_keys(W, outputs, first, work, sizes, config, has_queries, RUNNING_MAX)
    if not RUNNING_MAX:
        retry.overflow.index(W).store(gl.full([1], overflow, gl.int32, SCALAR))
        mbarrier.arrive(retry.voted)
        mbarrier.wait(retry.voted, 0)
        if _any(retry.overflow):
            _visit_keys(W, outputs, retry.second, work, sizes, config, overflow > 0, True)


@gluon.jit
def _visit_keys(W: gl.constexpr, outputs, over, work, sizes, config, active, RUNNING_MAX: gl.constexpr):
    """Make one pass over the keys; a warpgroup that is not `active` only signals barriers. Return 1 after an overflow,
    in which case nothing was stored."""
    overflow = 0
    if active:
        overflow = _attend(W, outputs, over, work, sizes, config, RUNNING_MAX)
    else:
        mbarrier.wait(over.q_full.index(W), 0)  # a copy that arrives after the program's end would meet another program
        for t in range(work.tiles):
            _skip_tile(t, over, W, config)
    return overflow


@gluon.jit
def _skip_tile(t, over, W: gl.constexpr, config):
    """Signal the barriers that other warpgroups wait for, on behalf of one that does not use tile t."""
    mbarrier.wait(over.full.index(t % config.STAGES), t // config.STAGES & 1)
    mbarrier.arrive(over.empty.index(t % config.STAGES))
    if config.PING_PONG:
        await_turn(over.ping_pong, t, W)
        mbarrier.arrive(over.ping_pong.index(W))


@gluon.jit
def _attend(W: gl.constexpr, outputs, over, work, sizes, config, RUNNING_MAX: gl.constexpr):
    S_LAYOUT: gl.constexpr = accumulator_layout(config.BLOCK_N)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(config.D), 2)
    STAGES: gl.constexpr = config.STAGES
    MORE: gl.constexpr = 0.0 if RUNNING_MAX else HEADROOM
    row = work.row + W * ROWS
    first, clear, stop = _own_tiles(row, work, sizes, config)
    q = used_columns(over.s_q.index(W).reshape((ROWS, config.D)), config.D_USED)
    b_m = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))  # [ROWS], maximum, in powers of 2
    b_o = zero_sums(config.D, config.O_USED)  # [ROWS, O_USED]

    for t in range(first):  # only later queries see these
        _skip_tile(t, over, W, config)
    mbarrier.wait(over.q_full.index(W), 0)
    if config.Q_IN_REGISTERS:
        q = _loaded(q, gl.DotOperandLayout(0, S_LAYOUT, 2))
    slot = first % STAGES
    mbarrier.wait(over.full.index(slot), first // STAGES & 1)
    s_k = over.s_k.index(slot).reshape((config.BLOCK_N, config.D))
    zeros = gl.zeros((ROWS, config.BLOCK_N), gl.float32, S_LAYOUT)
    if config.PING_PONG:
        await_turn(over.ping_pong, first, W)
    b_s = warpgroup_mma_wait(0, deps=[start_matmul(q, s_k, zeros)])  # [ROWS, BLOCK_N]
    mbarrier.arrive(over.empty.index(slot))
    if config.PING_PONG:
        mbarrier.arrive(over.ping_pong.index(W))
    b_s = _masked(b_s, row, _column(first, work, config), sizes, config)
    b_p, b_m, _ = _softmax(b_s, b_m, sizes.factor, MORE, True)
    b_l = _partial_sums(b_p, config.BLOCK_N)  # [ROWS, 4], row sums
    b_p16 = gl.convert_layout(b_p.to(over.s_q.dtype), P_LAYOUT, assert_trivial=True)
    begin = first + 1
    if config.MASKED_TILES > 1:
        begin = gl.minimum(first + config.MASKED_TILES, stop)
        for t in range(first + 1, begin):
            b_o, b_p16, b_m, b_l = _step(
                t, q, over, work, sizes, b_o, b_p16, b_m, b_l, row, W, config, HEAD, MORE, True
            )  # fmt: skip
    b_m = gl.maximum(b_m, LOWEST)  # with -inf, of infinite inputs, further scores of -inf would make NaN
    for t in range(begin, clear):
        b_o, b_p16, b_m, b_l = _step(
            t, q, over, work, sizes, b_o, b_p16, b_m, b_l, row, W, config, CLEAR, MORE, RUNNING_MAX
        )  # fmt: skip
    if config.WINDOW:
        for t in range(gl.maximum(begin, clear), stop):
            b_o, b_p16, b_m, b_l = _step(
                t, q, over, work, sizes, b_o, b_p16, b_m, b_l, row, W, config, TAIL, MORE, RUNNING_MAX
            )  # fmt: skip
    slot = stop % STAGES
    mbarrier.wait(over.full.index(slot), stop // STAGES & 1)
    s_v = over.s_v.index(slot).reshape((config.BLOCK_N, config.D))
    b_o, b_p16, _ = waited(start_products(b_p16, s_v, b_o), b_p16, b_p16)
    for t in range(stop, work.tiles):  # only earlier queries see these
        _skip_tile(t, over, W, config)

    b_m = _by_rows(b_m, b_o[0])
    b_l = _by_rows(gl.sum(b_l, 1), b_o[0])  # [ROWS]
    overflow = 0
    if not RUNNING_MAX:
        overflow = gl.max(gl.where(b_l < LIMIT, 0, 1), 0)
        overflow = gl.where(begin < stop, overflow, 0)  # the first tiles had a running maximum
    if overflow == 0:
        _store(b_o, b_m, b_l, outputs, over.s_q.index(W), work, sizes.len_q, row, config)
    return overflow


@gluon.jit
def _own_tiles(row, work, sizes, config):
    """Return the indices of three tiles: the first that the queries of a warpgroup from `row` on see, the first that
    only the window cuts, and the one after the last that they see."""
    BLOCK_N: gl.constexpr = config.BLOCK_N
    above = work.column // BLOCK_N + work.tiles
    own = gl.minimum(_visible_tiles(row + ROWS - 1, sizes.len_k, sizes.hi, config.CAUSAL, BLOCK_N), above)
    first, clear, stop = above - own, work.tiles, work.tiles
    if config.WINDOW:
        stop = above - gl.minimum(gl.maximum(row + sizes.lo, 0) // BLOCK_N, own - 1)
        clear = gl.minimum(above - gl.cdiv(gl.maximum(row + ROWS - 1 + sizes.lo, 0), BLOCK_N), stop)
    return first, clear, stop


@gluon.jit
def _column(t, work, config):
    """Return the first key of tile t."""
    return work.column + (work.tiles - 1 - t) * config.BLOCK_N


@gluon.jit
def _step(
    t, q, over, work, sizes, b_o, b_p16, b_m, b_l, row,
    W: gl.constexpr, config, KIND: gl.constexpr, MORE: gl.constexpr, RUNNING_MAX: gl.constexpr,
):  # fmt: skip
    """Compute S and P of tile t, and O += P V of the tile before."""
    S_LAYOUT: gl.constexpr = accumulator_layout(config.BLOCK_N)
    slot = t % config.STAGES
    mbarrier.wait(over.full.index(slot), t // config.STAGES & 1)
    s_k = over.s_k.index(slot).reshape((config.BLOCK_N, config.D))
    s_v = over.s_v.index(slot).reshape((config.BLOCK_N, config.D))
    zeros = gl.zeros((ROWS, config.BLOCK_N), gl.float32, S_LAYOUT)
    if config.PING_PONG:
        await_turn(over.ping_pong, t, W)
    s_token = start_matmul(q, s_k, zeros)
    o_tokens = start_products(b_p16, s_v, b_o)
    b_s = warpgroup_mma_wait(len(b_o), deps=[s_token])  # [ROWS, BLOCK_N]
    if config.PING_PONG:
        mbarrier.arrive(over.ping_pong.index(W))
    if KIND == HEAD:
        b_s = _masked(b_s, row, _column(t, work, config), sizes, config)
    elif KIND == TAIL:
        b_s = _cut_left(b_s, row, _column(t, work, config), sizes.lo)
    if RUNNING_MAX:
        b_p, b_m, rescale = _softmax(b_s, b_m, sizes.factor, MORE, KIND == HEAD)
        b_l = b_l * gl.convert_layout(rescale, gl.SliceLayout(1, b_l.type.layout), assert_trivial=True)[:, None]
    else:
        b_p = gl.exp2(b_s * sizes.factor - b_m[:, None])
    b_l += _partial_sums(b_p, config.BLOCK_N)
    next_p16 = gl.convert_layout(b_p.to(b_p16.dtype), b_p16.type.layout, assert_trivial=True)
    # `next_p16` too, which nothing waits for: it keeps pairs of P in one register over the loop's end.
    b_o, b_p16, next_p16 = waited(o_tokens, b_p16, next_p16)
    mbarrier.arrive(over.empty.index(slot))
    if RUNNING_MAX:
        b_o = _rescaled(b_o, rescale)
    return b_o, next_p16, b_m, b_l


@gluon.jit
def _store(b_o, b_m, b_l, outputs, s_o, work, len_q, row, config):
    """Store output and logsumexp. `s_o` is the buffer of the queries, which are not read again."""
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, b_o[0].type.layout)
    BLOCK: gl.constexpr = config.WARPGROUPS * ROWS
    D: gl.constexpr = config.D
    sees_none = b_l == 0.0
    b_l = gl.where(sees_none, 1.0, b_l)
    b_o = _divided(b_o, b_l)
    b_lse = gl.where(sees_none, float("-inf"), (b_m + gl.log2(b_l)) * LN2)
    if outputs.p_partial is None or gl.program_id(0) < outputs.unsplit:
        store_sums(s_o.reshape((ROWS, D)), b_o)
        fence_async_shared()
        at = place(work.batch, work.head, work.origin_q + row, config.PACKED)
        tma.async_copy_shared_to_global(outputs.desc_o, at, s_o)
        rows = row + gl.arange(0, ROWS, layout=ROW_LAYOUT)  # not before the fence, which would wait for this store
        lse_at = work.lse_at if config.PACKED else work.index.to(gl.int64) * len_q
        gl.store(outputs.p_lse + lse_at + rows, b_lse, mask=rows < len_q)
        tma.store_wait(0)
    else:
        rows = row - work.row + gl.arange(0, ROWS, layout=ROW_LAYOUT)
        p_split = outputs.p_partial + (gl.program_id(0) - outputs.unsplit) * (BLOCK * (D + 1))
        for i in gl.static_range(len(b_o)):
            columns = i * (D // 2) + gl.arange(0, b_o[i].shape[1], layout=gl.SliceLayout(0, b_o[i].type.layout))
            gl.store(p_split + _by_rows(rows, b_o[i])[:, None] * D + columns[None, :], b_o[i])
        gl.store(p_split + BLOCK * D + rows, b_lse)


# -- matmuls ----------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def accumulator_layout(columns):
    """Return the register layout of a (64, columns) result of a warpgroup's matmul."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def used_columns(x, D_USED: gl.constexpr):
    """Return the first D_USED columns of a tile in shared memory, as one or two slices whose widths are powers of 2."""
    HALF: gl.constexpr = x.shape[1] // 2
    return (x,) if x.shape[1] == D_USED else (x.slice(0, HALF, dim=1), x.slice(HALF, D_USED - HALF, dim=1))


@gluon.jit
def _loaded(parts, LAYOUT: gl.constexpr):
    return (parts[0].load(LAYOUT),) if len(parts) == 1 else (parts[0].load(LAYOUT), parts[1].load(LAYOUT))


@gluon.jit
def start_matmul(a, b, zeros):
    """Start a b^T, one matmul for each of the `used_columns` of a."""
    FIRST: gl.constexpr = a[0].shape[1]
    token = warpgroup_mma(a[0], b.slice(0, FIRST, dim=1).permute((1, 0)), zeros, use_acc=False, is_async=True)
    if len(a) > 1:
        token = warpgroup_mma(a[1], b.slice(FIRST, a[1].shape[1], dim=1).permute((1, 0)), token, is_async=True)
    return token


@gluon.jit
def zero_sums(D: gl.constexpr, D_USED: gl.constexpr):
    """Return zeroed accumulators for the `used_columns` of (ROWS, D)."""
    if D == D_USED:
        return (gl.zeros((ROWS, D), gl.float32, accumulator_layout(D)),)
    else:
        FIRST: gl.constexpr = D // 2
        REST: gl.constexpr = D_USED - FIRST
        first = gl.zeros((ROWS, FIRST), gl.float32, accumulator_layout(FIRST))
        return (first, gl.zeros((ROWS, REST), gl.float32, accumulator_layout(REST)))


@gluon.jit
def start_products(a, b, sums):
    """Start `sums` += a b, one matmul for each of the `used_columns` of b."""
    if len(sums) == 1:
        return (warpgroup_mma(_operand(a, sums[0]), b, sums[0], is_async=True),)
    else:
        FIRST: gl.constexpr = sums[0].shape[1]
        token = warpgroup_mma(_operand(a, sums[0]), b.slice(0, FIRST, dim=1), sums[0], is_async=True)
        rest = b.slice(FIRST, sums[1].shape[1], dim=1)
        return (token, warpgroup_mma(_operand(a, sums[1]), rest, sums[1], is_async=True))


@gluon.jit
def _operand(a, sums):
    return gl.convert_layout(a, gl.DotOperandLayout(0, sums.type.layout, 2), assert_trivial=True)


@gluon.jit
def store_sums(s_rows, sums):
    """Store accumulators to shared memory."""
    for i in gl.static_range(len(sums)):
        s_rows.slice(i * (s_rows.shape[1] // 2), sums[i].shape[1], dim=1).store(sums[i].to(s_rows.dtype))


@gluon.jit
def waited(tokens, b_p16, next_p16):
    """Return O after its matmuls, the P that they have read, and the next P."""
    if len(tokens) == 1:
        b_o, b_p16, next_p16 = warpgroup_mma_wait(0, deps=[tokens[0], b_p16, next_p16])
        return (b_o,), b_p16, next_p16
    else:
        b_o, more_o, b_p16, next_p16 = warpgroup_mma_wait(0, deps=[tokens[0], tokens[1], b_p16, next_p16])
        return (b_o, more_o), b_p16, next_p16


@gluon.jit
def _by_rows(x, sums):
    """Return a number per row in the layout of an accumulator's rows."""
    return gl.convert_layout(x, gl.SliceLayout(1, sums.type.layout), assert_trivial=True)


@gluon.jit
def _divided(sums, b_l):
    if len(sums) == 1:
        return (sums[0] / b_l[:, None],)
    else:
        return (sums[0] / b_l[:, None], sums[1] / _by_rows(b_l, sums[1])[:, None])


@gluon.jit
def await_turn(ping_pong, t, W: gl.constexpr):
    """Wait until warpgroup W - 1 has started tile t or, for the first warpgroup, until the last has started t - 1."""
    if W == 0:
        mbarrier.wait(ping_pong.index(ping_pong.shape[0] - 1), t & 1 ^ 1)
    else:
        mbarrier.wait(ping_pong.index(W - 1), t & 1)


# -- softmax ----------------------------------------------------------------------------------------------------------


@gluon.jit
def _masked(b_s, row, column, sizes, config):
    S_LAYOUT: gl.constexpr = b_s.type.layout
    columns = column + gl.arange(0, config.BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT))[None, :]
    m_s = columns < sizes.len_k  # [ROWS, BLOCK_N] or [1, BLOCK_N]
    if config.CAUSAL:
        rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))[:, None]
        m_s = m_s & (columns <= rows + sizes.hi)
    b_s = gl.where(m_s, b_s, float("-inf"))
    return _cut_left(b_s, row, column, sizes.lo) if config.WINDOW else b_s


@gluon.jit
def _cut_left(b_s, row, column, lo):
    """Hide the keys to the left of a window."""
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, b_s.type.layout))[:, None]
    columns = gl.arange(0, b_s.shape[1], layout=gl.SliceLayout(0, b_s.type.layout))[None, :]
    return gl.where(columns >= rows + (row + lo - column), b_s, float("-inf"))


@gluon.jit
def _softmax(b_s, b_m, factor, MORE: gl.constexpr, MASKED: gl.constexpr):
    """Return P of a tile, the running maximum (of log2 scores, plus MORE), and the factor that rescales the
    accumulators.

    The maximum only keeps numbers in range, so it is updated, and the accumulators rescaled, only if it is too small by
    more than a factor of 2^SLACK.
    """
    m_tile = gl.maximum(b_m, gl.max(b_s, 1) * factor + MORE)
    if MASKED:
        m_new = m_tile
        # The maximum of a row that has seen no key yet is -inf, and -inf - -inf would be NaN.
        shift = gl.where(m_new == float("-inf"), 0.0, m_new)
        rescale = gl.exp2(b_m - shift)
    else:
        grows = m_tile - b_m > SLACK
        m_new = gl.where(grows, m_tile, b_m)
        shift = m_new
        rescale = gl.where(grows, gl.exp2(b_m - m_tile), 1.0)
    return gl.exp2(b_s * factor - shift[:, None]), m_new, rescale


@gluon.jit
def _partial_sums(b_p, BLOCK_N: gl.constexpr):
    """Return the row sums of the columns that each of the four threads of a row holds; they are added up after the last
    tile."""
    return gl.sum(gl.sum(gl.reshape(b_p, [ROWS, BLOCK_N // 8, 4, 2]), 3), 1)


@gluon.jit
def _rescaled(sums, rescale):
    """Return sums * rescale; a warp whose factors are all 1 skips the multiplication."""
    if len(sums) == 1:
        return (_rescaled_part(sums[0], rescale),)
    else:
        return (_rescaled_part(sums[0], rescale), _rescaled_part(sums[1], rescale))


@gluon.jit
def _rescaled_part(b_o, rescale):
    COUNT: gl.constexpr = b_o.shape[1] // 2
    factors, _ = gl.broadcast(_by_rows(rescale, b_o)[:, None], b_o)
    return gl.inline_asm_elementwise(_rescale_asm(COUNT), _constraints(COUNT), [b_o, factors], gl.float32, False, COUNT)


@gluon.constexpr_function
def _rescale_asm(count):
    """Return PTX for the rescaling, because only PTX lets a single warp branch. A thread has `count` elements of the
    output: pairs of columns, alternately of one row and of another, so that its first and third factor are the only
    ones."""
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


# -- split-KV ---------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["schedule", "unsplit", "splits"])
def combine_kernel(
    p_o, p_lse, p_partial, strides, len_q, d, schedule, unsplit, splits,
    D: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """Combine output and logsumexp of 64 queries of a block of BLOCK queries whose keys `forward_kernel` split."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [256 // D, D // 8], [4, 1], [1, 0])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    beyond, part = gl.program_id(0) // (BLOCK // ROWS), gl.program_id(0) % (BLOCK // ROWS)
    block, index, batch, head = block_and_head(unsplit + beyond, schedule)
    inside = part * ROWS + gl.arange(0, ROWS, layout=ROW_LAYOUT)
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    first = p_partial + beyond * splits * (BLOCK * (D + 1))
    b_m = gl.full((ROWS,), float("-inf"), gl.float32, ROW_LAYOUT)
    for split in range(splits):
        b_m = gl.maximum(b_m, gl.load(first + split * (BLOCK * (D + 1)) + BLOCK * D + inside))
    b_m = gl.where(b_m == float("-inf"), 0.0, b_m)  # a query that sees no key
    b_l = gl.zeros((ROWS,), gl.float32, ROW_LAYOUT)
    b_o = gl.zeros((ROWS, D), gl.float32, LAYOUT)
    for split in range(splits):
        p_split = first + split * (BLOCK * (D + 1))
        weight = gl.exp2((gl.load(p_split + BLOCK * D + inside) - b_m) * LOG2E)
        b_l += weight
        b_o += weight[:, None] * gl.load(p_split + inside[:, None] * D + columns[None, :])
    rows = block * BLOCK + inside
    m_q = rows < len_q
    target = p_o + batch.to(gl.int64) * strides[0] + head.to(gl.int64) * strides[1]
    target += rows.to(gl.int64)[:, None] * strides[2] + columns[None, :]
    b_o = b_o / gl.where(b_l == 0.0, 1.0, b_l)[:, None]
    gl.store(target, b_o.to(p_o.dtype.element_ty), mask=m_q[:, None] & (columns < d)[None, :])
    b_lse = gl.where(b_l == 0.0, float("-inf"), b_m + gl.log2(b_l) * LN2)
    gl.store(p_lse + index.to(gl.int64) * len_q + rows, b_lse, mask=m_q)
