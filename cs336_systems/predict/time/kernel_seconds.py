"""Seconds of one kernel on a GPU at its highest clock, from the GPU's profile. No torch."""

import dataclasses
import math

from cs336_systems.predict.time.gpu_profile import AttentionRates, GpuProfile
from cs336_systems.predict.time.step_kernels import AttentionPass, Kernel, Matmul, Pass

MATMUL, ATTENTION, PASS, SMALL = "matmul", "attention", "pass", "small"
"""Kinds of kernels."""
TILES = sorted(
    {
        (rows, columns)
        for a in (64, 128, 256)
        for b in (64, 96, 128, 160, 192, 256)
        for rows, columns in ((a, b), (b, a))
        if rows * columns <= 128 * 256
    }
)
"""Tiles of results that a program of cuBLAS may compute; it chooses among more, whose times are alike."""
SPLITS = (1, 2, 3, 4, 6, 8)
"""Numbers of programs that may share the depth of a tile."""
LEAST_DEPTH = 256
"""Depth that a program has at least where several share a tile."""
SPLIT_BANDWIDTH = 5e12
"""Bytes a second at which the parts of a split tile are written and added: they stay in the L2 cache."""
OPERAND_BYTES = {"": 2, "fp8": 1, "tf32": 4, "fp32": 4}
"""Bytes of an element of a matmul's operands, by the precision of the matmul."""
TILE = 128
"""Queries of a program of attention, and keys of a tile."""


def kernel_seconds(kernel: Kernel, profile: GpuProfile) -> float:
    """Return the seconds of one run of the kernel."""
    if isinstance(kernel, Matmul):
        if kernel.batch > 1 or kernel.precision:
            return operator_matmul_seconds(kernel, profile)
        return matmul_seconds(kernel.rows, kernel.columns, kernel.depth, kernel.adds, kernel.is_wide, profile)
    if isinstance(kernel, Pass):
        rates = profile.passes.get(kernel.name) or profile.passes["other"]
        return rates.fixed + kernel.bytes / rates.bandwidth
    if isinstance(kernel, AttentionPass):
        return attention_seconds(kernel, attention_rates(profile, kernel), profile.sms)
    return profile.small


def kind_of(kernel: Kernel) -> str:
    if isinstance(kernel, Matmul):
        return MATMUL
    if isinstance(kernel, AttentionPass):
        return ATTENTION
    return PASS if isinstance(kernel, Pass) else SMALL


def matmul_seconds(rows: int, columns: int, depth: int, adds: bool, is_wide: bool, profile: GpuProfile) -> float:
    """Return the time of the fastest tile and split, or that of moving the operands, whichever is longer.

    An SM computes one tile at a time, so that the number of rounds is a whole one, but for the part of the last round
    that overlaps.
    """
    rates, sms = profile.matmul, profile.sms
    result_bytes = (4 if is_wide else 2) * (2 if adds else 1)
    epilogue = rates.epilogue / (128 * 256) * (1 + rates.wide_epilogue * (result_bytes / 2 - 1))
    sm_rate = profile.peak / sms * rates.efficiency
    fastest = math.inf
    for tile_rows, tile_columns in TILES:
        area = tile_rows * tile_columns
        tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
        per_depth = 2 * (area + rates.perimeter * (tile_rows + tile_columns)) / sm_rate
        for split in SPLITS:
            if split > 1 and (depth < LEAST_DEPTH * split or tiles * split > 4 * sms):
                break
            rounds = tiles * split / sms
            rounds = 1.0 if rounds <= 1 else math.ceil(rounds) * (1 - rates.overlap) + rounds * rates.overlap
            seconds = rounds * (per_depth * (depth / split + rates.more_depth) + epilogue * area)
            if split > 1:
                seconds += 8 * rows * columns * split / SPLIT_BANDWIDTH
            fastest = min(fastest, seconds)
    moved = 2 * depth * (rows + columns) + rows * columns * result_bytes
    return max(fastest, moved / profile.bandwidth) + rates.fixed


def operator_matmul_seconds(kernel: Matmul, profile: GpuProfile) -> float:
    """Return the time of matmuls in one kernel, each as large as `kernel` says, in 8, 16 or 32 bits. Those of 8 bits
    have the rates of 16 at twice the peak."""
    wide = profile.wide.get(kernel.precision)
    rates, peak = (wide.rates, wide.peak) if wide else (profile.matmul, profile.peak)
    size, result_size = OPERAND_BYTES[kernel.precision], 4 if wide else 2
    peak = 2 * peak if kernel.precision == "fp8" else peak
    sm_rate = peak / profile.sms * rates.efficiency
    epilogue = rates.epilogue / (128 * 256)
    fastest = math.inf
    for tile_rows, tile_columns in TILES:
        area = tile_rows * tile_columns
        tiles = kernel.batch * -(-kernel.rows // tile_rows) * -(-kernel.columns // tile_columns)
        per_depth = 2 * (area + rates.perimeter * (tile_rows + tile_columns)) / sm_rate
        for split in SPLITS:
            if split > 1 and (kernel.depth < LEAST_DEPTH * split or tiles * split > 4 * profile.sms):
                break
            rounds = tiles * split / profile.sms
            rounds = 1.0 if rounds <= 1 else math.ceil(rounds) * (1 - rates.overlap) + rounds * rates.overlap
            seconds = rounds * (per_depth * (kernel.depth / split + rates.more_depth) + epilogue * area)
            if split > 1:
                seconds += 8 * kernel.batch * kernel.rows * kernel.columns * split / SPLIT_BANDWIDTH
            fastest = min(fastest, seconds)
    operands, results = kernel.depth * (kernel.rows + kernel.columns), kernel.rows * kernel.columns
    moved = kernel.batch * (size * operands + result_size * results)
    return max(fastest, moved / profile.bandwidth) + rates.fixed


def rates_name(kernel: AttentionPass) -> str:
    """Return the name of the kernel's rates: its pass and head dim; backward of grouped heads has its own."""
    return f"{_pass_name(kernel)} {kernel.head_dim}"


def _pass_name(kernel: AttentionPass) -> str:
    is_grouped = kernel.name == "backward" and kernel.kv_heads < kernel.heads
    return "backward grouped" if is_grouped else kernel.name


def attention_rates(profile: GpuProfile, kernel: AttentionPass) -> AttentionRates:
    """Return the rates of the kernel's head dim. Those of a head dim that was not measured lie between its neighbours',
    as those of the next multiple of 32; beyond the largest, tiles take as much longer as the head dim is larger."""
    name = _pass_name(kernel)
    known = sorted(int(key.rpartition(" ")[2]) for key in profile.attention if key.rpartition(" ")[0] == name)
    if kernel.head_dim in known or kernel.head_dim < known[0]:
        return profile.attention[f"{name} {max(kernel.head_dim, known[0])}"]
    dim = -(-kernel.head_dim // 32) * 32
    below = profile.attention[f"{name} {max(own for own in known if own < kernel.head_dim)}"]
    above = next((own for own in known if own >= dim), None)
    if above is None:
        return AttentionRates(below.tile * dim / known[-1], below.program, below.fixed)
    upper, lower = profile.attention[f"{name} {above}"], max(own for own in known if own < kernel.head_dim)
    share = (dim - lower) / (above - lower)
    pairs = zip(dataclasses.astuple(below), dataclasses.astuple(upper), strict=True)
    return AttentionRates(*(low + share * (high - low) for low, high in pairs))


def attention_seconds(kernel: AttentionPass, rates: AttentionRates, sms: int) -> float:
    """Return the time of all programs shared by the SMs, or of the longest program. A program of backward works on one
    KV head and all queries of its group."""
    blocks = -(-kernel.length // TILE)
    heads = kernel.batch * kernel.heads
    group = kernel.heads // kernel.kv_heads if kernel.is_backward else 1
    tiles, programs = heads * blocks * (blocks + 1) / 2, heads * blocks / group
    shared = (tiles * rates.tile + programs * rates.program) / sms
    return rates.fixed + max(shared, group * blocks * rates.tile + rates.program)
