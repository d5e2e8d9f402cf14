"""Seconds of one kernel on a GPU at its highest clock, from the GPU's profile. No torch."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from cs336_systems.predict.attention_programs import (
    L2_SHARE,
    WIDEST_IN_ONE_PASS,
    causal_tiles,
    heads_of_part,
    heads_of_section,
    padded_head_dim,
    parts_of_group,
)
from cs336_systems.predict.time.gpu_profile import AttentionRates, GpuProfile, MatmulRates, PassRates
from cs336_systems.predict.time.step_kernels import (
    FORWARD,
    INPUT,
    PORTABLE,
    SHORT,
    SMALL_PATH,
    TRITON_TF32,
    TRITON_WIDE,
    WEIGHT,
    AttentionPass,
    Kernel,
    Matmul,
    Pass,
    power_of_2,
)

MATMUL, ATTENTION, PASS, SMALL = "matmul", "attention", "pass", "small"
"""Kinds of kernels."""
TILES = sorted(
    {
        (rows, columns, rows * columns, rows + columns)
        for a in (64, 128, 256)
        for b in (64, 96, 128, 160, 192, 256)
        for rows, columns in ((a, b), (b, a))
        if rows * columns <= 128 * 256
    }
)
"""Tiles of results that a program of cuBLAS may compute (it has more, with similar times): rows, columns, elements, and
the sum of rows and columns."""
SPLITS = (1, 2, 3, 4, 6, 8)
"""Numbers of programs among which the depth of a tile may be split (split-K)."""
LEAST_DEPTH = 256
"""Minimum depth of a program in split-K."""
SPLIT_BANDWIDTH = 5e12
"""Bytes per second at which split-K's partial results are written and added: they stay in the L2 cache."""
SPLIT_KERNEL = 2e-6
"""Seconds of the additional kernel that adds split-K's partial results."""
OPERAND_BYTES = {"": 2, "fp8": 1, "tf32": 4, "fp32": 4}
"""Bytes of an element of a matmul's operands, by the precision of the matmul."""
OVERLAP = 4.0
"""Exponent p of (compute^p + move^p)^(1/p), the time of computing and moving together: 1 would be their sum, infinity
the longer one."""
RESIDENT_ELEMENTS = 8192
"""Elements of rows that the registers of an SM hold, over all concurrent programs."""
TILE = 128
"""Queries of a program of attention, and keys of a tile."""
SMALL_TILES = {
    "forward" + SMALL_PATH: {64: (64, 64), 128: (64, 64)},
    "backward" + SMALL_PATH: {64: (64, 64)},
    "forward" + PORTABLE: {64: (64, 128), 128: (64, 64)},
    "backward" + PORTABLE: {64: (64, 64), 128: (64, 64)},
    "forward" + SHORT: {64: (64, 64), 128: (64, 64)},
}
"""Queries and keys of a tile of the portable kernels and of Hopper's small programs, by the largest head dim that uses
it; in backward, for programs of queries. Equal to those of sm_90 in kernels/flash/tiles.py and hopper_launch.py; a test
compares them."""
SPLIT_HEADS_KERNEL = 4e-6
"""Seconds of the additional kernel that adds the results of programs with a part of a group's heads each, beside its
traffic."""
KEY_TILES = {64: (128, 64), 128: (64, 64)}
"""Queries and keys of a tile in programs of keys, if these have a separate kernel."""
KEY_TILE_TIME = 4 / 3
"""Time of a tile in a program of keys relative to one in a program of queries: four matmuls, not three."""
PASSES_TIME = 1.7
"""Time of the Hopper kernels' backward with a pass for each gradient, relative to one pass: it has 8 matmuls in place
of 5, which are 6% slower; measured on an H200."""
UPDATE_SHARE = 0.85
"""Share of the bandwidth that updates of sums in memory reach."""


def kernel_seconds(kernel: Kernel, profile: GpuProfile) -> float:
    """Return the seconds of one run of the kernel."""
    if isinstance(kernel, Matmul):
        unaligned = profile.unaligned.get(f"{kernel.precision or 'bf16'} {kernel.multiple}", 1.0)
        if kernel.batch > 1 or kernel.precision:
            return unaligned * operator_matmul_seconds(kernel, profile)
        shape = kernel.rows, kernel.columns, kernel.depth
        return unaligned * matmul_seconds(*shape, kernel.adds, kernel.is_wide, profile, kernel.layout)
    if isinstance(kernel, Pass):
        return pass_seconds(kernel, _pass_rates(kernel.name, profile), profile.sms)
    if isinstance(kernel, AttentionPass):
        if kernel.name in SMALL_TILES and not any(own.startswith(f"{kernel.name} ") for own in profile.attention):
            kernel = kernel._replace(name=kernel.name.partition(" ")[0])  # those of large problems stand in
        whole = attention_seconds(kernel, attention_rates(profile, kernel), profile.sms, profile.bandwidth)
        return whole / kernel.parts
    return profile.small


def kind_of(kernel: Kernel) -> str:
    if isinstance(kernel, Matmul):
        return MATMUL
    if isinstance(kernel, AttentionPass):
        return ATTENTION
    return PASS if isinstance(kernel, Pass) else SMALL


def _pass_rates(name: str, profile: GpuProfile) -> PassRates:
    """Return the rates of a pass; passes that the profile does not have use "other"."""
    passes = profile.passes
    return passes.get(name) or passes.get(name.removeprefix("inner_")) or passes["other"]


def pass_seconds(kernel: Pass, rates: PassRates, sms: int) -> float:
    """Return the time to move the bytes. It hides the work of programs that run once, unless that takes longer;
    programs that process one row after another wait for the bytes of each."""
    moving, own = kernel.bytes / rates.bandwidth, rates.program + rates.element * kernel.elements
    if kernel.together:
        resident = min(kernel.together, sms * max(1, RESIDENT_ELEMENTS // kernel.elements))
        return rates.fixed + moving + math.ceil(kernel.programs / resident) * own
    return rates.fixed + max(moving, kernel.programs / sms * own)


def matmul_seconds(
    rows: int, columns: int, depth: int, adds: bool, is_wide: bool, profile: GpuProfile, layout: str = FORWARD
) -> float:
    """Return the time of the fastest tile and split, overlapped with that of moving the operands.

    An SM computes one tile at a time, so the number of rounds is an integer, except for the part of the last round that
    overlaps.
    """
    rates = profile.matmul
    result_bytes = (4 if is_wide else 2) * (2 if adds else 1)
    epilogue = rates.epilogue * (1 + rates.wide_epilogue * (result_bytes / 2 - 1))
    sm_rate = profile.peak / profile.sms * rates.efficiency / _layout_time(rates, layout)
    computing = _computing(_tilings(1, rows, columns, depth, profile.sms), rates, sm_rate, epilogue)
    moved = 2 * depth * (rows + columns) + rows * columns * result_bytes
    return overlapped(computing, moved / profile.bandwidth) + rates.fixed


class Tiling(NamedTuple):
    """How the results of a matmul are divided among programs."""

    area: int
    """Elements of a tile."""
    edges: int
    """Sum of a tile's rows and columns."""
    depth: float
    """Depth of a program."""
    rounds: float
    """Programs per SM on average, at least 1."""
    whole_rounds: int
    """The same, rounded up."""
    adding: float
    """Seconds of adding split-K's partial results."""


@functools.lru_cache(maxsize=512)
def _tilings(batch: int, rows: int, columns: int, depth: int, sms: int) -> tuple[Tiling, ...]:
    """Return the tilings of a matmul, which do not depend on the rates; cached for searches for rates."""
    found: list[Tiling] = []
    adding, most = 8 * batch * rows * columns / SPLIT_BANDWIDTH, 4 * sms
    for tile_rows, tile_columns, area, edges in TILES:
        tiles = batch * -(-rows // tile_rows) * -(-columns // tile_columns)
        rounds = tiles / sms if tiles > sms else 1.0
        found.append(Tiling(area, edges, depth, rounds, math.ceil(rounds), 0.0))
        if 2 * tiles > most:  # enough programs without a split
            continue
        for split in SPLITS[1:]:
            if depth < LEAST_DEPTH * split or tiles * split > most:
                break
            rounds = max(1.0, tiles * split / sms)
            added = adding * split + SPLIT_KERNEL
            found.append(Tiling(area, edges, depth / split, rounds, math.ceil(rounds), added))
    return tuple(found)


def _computing(tilings: Iterable[Tiling], rates: MatmulRates, sm_rate: float, epilogue: float) -> float:
    """Return the seconds of the fastest tiling. `epilogue`: seconds of the largest tile's epilogue.

    Predictions spend most of their time in this loop: it reads a tiling as a tuple and calls nothing.
    """
    perimeter, more_depth, overlap, whole = rates.perimeter, rates.more_depth, rates.overlap, 1 - rates.overlap
    per_element, per_multiply_add, least = epilogue / (128 * 256), 2 / sm_rate, rates.least
    fastest = math.inf
    for area, edges, depth, rounds, whole_rounds, adding in tilings:
        per_depth = per_multiply_add * (area + perimeter * edges)
        if per_depth < least:
            per_depth = least
        tile = per_depth * (depth + more_depth) + per_element * area
        seconds = (whole_rounds * whole + rounds * overlap) * tile + adding
        if seconds < fastest:
            fastest = seconds
    return fastest


def overlapped(computing: float, moving: float) -> float:
    """Return the time of a kernel that computes while it moves its operands: the longer of both times, and up to a
    fifth more if they are similar, because neither hides the other from the first to the last tile."""
    return (computing**OVERLAP + moving**OVERLAP) ** (1 / OVERLAP)


def _layout_time(rates: MatmulRates, layout: str) -> float:
    return rates.input if layout == INPUT else rates.weight if layout == WEIGHT else 1.0


def operator_matmul_seconds(kernel: Matmul, profile: GpuProfile) -> float:
    """Return the time of matmuls batched in one kernel, each of the size in `kernel`, with 8-, 16- or 32-bit operands.
    8-bit matmuls have the rates of 16-bit ones at twice the peak."""
    wide = profile.wide.get(kernel.precision)
    rates, peak = (wide.rates, wide.peak) if wide else (profile.matmul, profile.peak)
    size, result_size = OPERAND_BYTES[kernel.precision], 4 if wide else 2
    if kernel.precision == "fp8":
        peak, rates = 2 * peak, dataclasses.replace(rates, least=rates.least / 2)  # half the bytes
    sm_rate = peak / profile.sms * rates.efficiency
    tilings = _tilings(kernel.batch, kernel.rows, kernel.columns, kernel.depth, profile.sms)
    fastest = _computing(tilings, rates, sm_rate, rates.epilogue)
    operands, results = kernel.depth * (kernel.rows + kernel.columns), kernel.rows * kernel.columns
    moved = kernel.batch * (size * operands + result_size * results)
    return max(fastest, moved / profile.bandwidth) + rates.fixed


def rates_name(kernel: AttentionPass) -> str:
    """Return the name of the kernel's rates: its pass and head dim; backward of grouped heads has its own."""
    return f"{pass_names(kernel)[0]} {kernel.head_dim}"


def pass_names(kernel: AttentionPass) -> list[str]:
    """Return possible names of the kernel's rates, the best first: its own, then those that an older profile has for
    all of this package's kernels."""
    first = kernel.name.partition(" ")[0]
    is_own = kernel.name in (first, first + PORTABLE, first + SMALL_PATH, first + SHORT)
    if not is_own:
        return [kernel.name, f"{first} {TRITON_WIDE}"] if kernel.name.endswith(TRITON_TF32) else [kernel.name]
    if _has_one_pass(kernel) and kernel.kv_heads < kernel.heads:
        return ["backward grouped", "backward"]
    return list(dict.fromkeys((kernel.name, first)))


def attention_rates(profile: GpuProfile, kernel: AttentionPass) -> AttentionRates:
    """Return the rates of the kernel's head dim. Other head dims are rounded up to a multiple of 32 and interpolated
    between measured neighbours; beyond the largest, the time of tiles is proportional to the head dim. Portable kernels
    and those in fp32 pad the head dim to a power of 2, and the Hopper kernels use 192 or 256 columns above 128."""
    dims: dict[str, list[int]] = {}
    for key in profile.attention:
        own, _, number = key.rpartition(" ")
        dims.setdefault(own, []).append(int(number))
    name = next(own for own in pass_names(kernel) if own in dims)
    known = sorted(dims[name])
    if kernel.head_dim in known or kernel.head_dim < known[0]:
        return profile.attention[f"{name} {max(kernel.head_dim, known[0])}"]
    pads = kernel.name.endswith((PORTABLE, SMALL_PATH, TRITON_WIDE, TRITON_TF32))
    is_wide = kernel.name in ("forward", "backward") and kernel.head_dim > WIDEST_IN_ONE_PASS
    unit = 64 if is_wide else 32
    dim = power_of_2(kernel.head_dim) if pads else -(-kernel.head_dim // unit) * unit
    if dim in known:
        return profile.attention[f"{name} {dim}"]
    below = profile.attention[f"{name} {max(own for own in known if own < kernel.head_dim)}"]
    above = next((own for own in known if own >= dim), None)
    if above is None:
        larger = dim / known[-1]
        if tiles := SMALL_TILES.get(kernel.name):
            larger *= math.prod(_portable_tile(kernel, tiles)) / math.prod(tiles[known[-1]])
        elif _is_hopper_backward(kernel) and known[-1] <= WIDEST_IN_ONE_PASS:
            larger *= PASSES_TIME
        return dataclasses.replace(below, tile=below.tile * larger)
    upper, lower = profile.attention[f"{name} {above}"], max(own for own in known if own < kernel.head_dim)
    share = (dim - lower) / (above - lower)
    pairs = zip(dataclasses.astuple(below), dataclasses.astuple(upper), strict=True)
    return AttentionRates(*(low + share * (high - low) for low, high in pairs))


def attention_seconds(kernel: AttentionPass, rates: AttentionRates, sms: int, bandwidth: float = math.inf) -> float:
    """Return the longest of: the time of all programs divided among the SMs, the longest program, and the programs'
    memory traffic. A backward program processes one KV head and the query heads of its group, or a part of them."""
    if kernel.name in SMALL_TILES:
        return small_program_seconds(kernel, rates, sms)
    blocks = -(-kernel.length // TILE)
    heads = kernel.batch * kernel.heads
    group = kernel.heads // kernel.kv_heads if kernel.is_backward else 1
    parts = head_parts(kernel, sms)
    visited = heads_of_part(group, parts)
    tiles, programs = heads * blocks * (blocks + 1) / 2, heads * blocks * parts / group
    shared = (tiles * rates.tile + programs * rates.program) / sms
    # Two kernels share the work of this package's backward in fp32; one has a program for each query head.
    in_turn = (1 + group) / 2 if kernel.name.endswith((TRITON_WIDE, TRITON_TF32)) else visited
    longest = rates.alone * (in_turn * blocks * rates.tile + rates.program)
    fixed = rates.fixed + heads * blocks * rates.queries / sms
    if parts > 1:
        fixed += SPLIT_HEADS_KERNEL + 16 * programs * TILE * padded_head_dim(kernel.head_dim) / bandwidth
    return fixed + max(shared, longest, gradient_traffic(kernel, sms) / (UPDATE_SHARE * bandwidth))


def head_parts(kernel: AttentionPass, sms: int) -> int:
    """Return the number of programs that share the query heads of a KV head."""
    group = kernel.heads // kernel.kv_heads
    if group == 1 or not _has_one_pass(kernel):
        return 1
    tiles = causal_tiles(kernel.length, kernel.head_dim)
    return parts_of_group(group, kernel.head_dim, tiles, kernel.batch * kernel.kv_heads, sms)


def _is_hopper_backward(kernel: AttentionPass) -> bool:
    return kernel.name == "backward"


def _has_one_pass(kernel: AttentionPass) -> bool:
    return _is_hopper_backward(kernel) and kernel.head_dim <= WIDEST_IN_ONE_PASS


def small_program_seconds(kernel: AttentionPass, rates: AttentionRates, sms: int) -> float:
    """Return the time of kernels with several programs on an SM: all programs divided among the SMs, or the longest
    program. Backward has programs of queries and programs of keys, in two kernels or, for small problems, in one."""
    queries, longest = _query_programs(kernel, rates, sms)
    if not kernel.is_backward:
        return rates.fixed + max(queries, longest)
    keys, longest_of_keys = _key_programs(kernel, rates, sms)
    if not kernel.name.endswith(SMALL_PATH):
        return 2 * rates.fixed + max(queries, longest) + max(keys, longest_of_keys)
    # The programs of keys come last, and wait for those of queries where the GPU does not hold all at once.
    rows, _ = _portable_tile(kernel, SMALL_TILES[kernel.name])
    is_full = kernel.batch * kernel.heads * -(-kernel.length // rows) >= rates.alone * sms
    return rates.fixed + max(queries + keys, longest, (queries if is_full else 0.0) + longest_of_keys)


def _query_programs(kernel: AttentionPass, rates: AttentionRates, sms: int) -> tuple[float, float]:
    """Return the seconds of all programs of queries, divided among the SMs, and of the longest one."""
    rows, columns = _portable_tile(kernel, SMALL_TILES[kernel.name])
    blocks = -(-kernel.length // rows)
    tiles = sum(-(-min(kernel.length, (block + 1) * rows) // columns) for block in range(blocks))
    shared = kernel.batch * kernel.heads * (tiles * rates.tile + blocks * rates.program) / sms
    return shared, rates.alone * (-(-kernel.length // columns) * rates.tile + rates.program)


def _key_programs(kernel: AttentionPass, rates: AttentionRates, sms: int) -> tuple[float, float]:
    """Return the seconds of all programs of keys, divided among the SMs, and of the longest one, which processes the
    queries of all heads of its group."""
    of_queries = SMALL_TILES[kernel.name]
    area = math.prod(_portable_tile(kernel, of_queries))
    rows, columns = _portable_tile(kernel, of_queries if kernel.name.endswith(SMALL_PATH) else KEY_TILES)
    tile = rates.tile * KEY_TILE_TIME * rows * columns / area
    blocks, kv_blocks, group = -(-kernel.length // rows), -(-kernel.length // columns), kernel.heads // kernel.kv_heads
    tiles = group * sum(blocks - block * columns // rows for block in range(kv_blocks))
    shared = kernel.batch * kernel.kv_heads * (tiles * tile + kv_blocks * rates.program) / sms
    return shared, rates.alone * (group * blocks * tile + rates.program)


def _portable_tile(kernel: AttentionPass, tiles: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
    """Return the queries and keys of a tile for the kernel's head dim."""
    return next((tile for head_dim, tile in tiles.items() if kernel.head_dim <= head_dim), tiles[max(tiles)])


def gradient_traffic(kernel: AttentionPass, sms: int) -> float:
    """Return the bytes that the tiles of backward move between memory and the L2 cache: queries and their gradients are
    read, and fp32 sums of dQ updated. Concurrent programs of one head share them. Only the Hopper kernels count, whose
    sections of heads kernels/flash/hopper_launch.py chooses."""
    if not _has_one_pass(kernel):
        return 0.0
    blocks, group = -(-kernel.length // TILE), kernel.heads // kernel.kv_heads
    per_head = 8 * kernel.head_dim * kernel.length * group
    section = heads_of_section(kernel.batch * kernel.kv_heads, blocks, L2_SHARE["backward"] // per_head, 2 * sms)
    tiles = kernel.batch * kernel.heads * blocks * (blocks + 1) / 2
    return tiles * TILE * kernel.head_dim * 12 / max(1.0, sms / section)
