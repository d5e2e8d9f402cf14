"""When attention uses the kernels for Hopper GPUs, and how these divide their work among programs: rules of the kernels
and of predicted times.

No torch.
"""

import functools
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

# -- when they are chosen ---------------------------------------------------------------------------------------------

WIDEST_IN_ONE_PASS = 128
"""Largest head dim whose backward computes all gradients in one pass, which adds up dQ in no fixed order. Wider heads
have a pass for each gradient."""
HOPPER_WORTH, WIDE_HOPPER_WORTH = 1 << 33, 1 << 31
"""Least product of q's elements and the keys that a query may see from which the Hopper kernels are taken, for head
dims up to WIDEST_IN_ONE_PASS and above. Up to 128, fewer of their large programs do not fill the GPU. Above, they are
faster at any size (both passes 1.1 to 1.5 times with 256 queries), but take longer to launch than small calls run."""
HOPPER_LENGTH, WIDE_HOPPER_LENGTH = 128, 64
"""Mean length of packed documents, and width of windows in them, from which the Hopper kernels are taken, likewise.
Forward and backward they are 1.3 to 1.5 times as fast as the portable ones at a mean of 134 tokens and a head dim up to
128, 1.6 to 2.4 times at a mean of 64 above; with 32 tokens in every document they are slower."""
HOPPER_ELEMENTS = 1 << 22
"""Elements of q from which the Hopper kernels' programs for packed documents fill the GPU."""


def suits_hopper(work: int, head_dim: int) -> bool:
    """Return True if "auto" takes the Hopper kernels for a call with this product of q's elements and keys."""
    return work >= (HOPPER_WORTH if head_dim <= WIDEST_IN_ONE_PASS else WIDE_HOPPER_WORTH)


def packing_suits_hopper(elements: int, length: float, keys: int, head_dim: int) -> bool:
    """Return True if "auto" takes the Hopper kernels for packed documents, given the elements of q, the mean length of
    a document and the number of keys that a query may see."""
    least = HOPPER_LENGTH if head_dim <= WIDEST_IN_ONE_PASS else WIDE_HOPPER_LENGTH
    return min(length, keys) >= least and elements >= HOPPER_ELEMENTS


def repeatable_suits_hopper(head_dim: int, has_window: bool) -> bool:
    """Return True if "auto" takes the Hopper kernels for repeatable gradients in a batch, if it takes them at all. With
    64 columns and no window the portable kernels take 0.96 to 1.00 of their time, for packed documents 2.8 times as
    long. Measured at head dims of 64 and 128."""
    return head_dim > 64 or has_window


# -- forward ----------------------------------------------------------------------------------------------------------

SHORT_KEYS = {
    64: {"full": 1024, "causal": 4096, "window": 8192},
    128: {"full": 256, "causal": 512, "window": 4096},
}
"""Largest number of keys that a query sees for which small programs are faster, by padded head dim and mask; measured
on an H200. With a head dim of 256 there are no small programs: an SM's shared memory holds one program."""
LONGER_THAN_MEAN = 2
"""Length of the document of a mean token over that of a mean document, where lengths are distributed exponentially.
Texts have heavier tails."""


def padded_head_dim(head_dim: int) -> int:
    """Return the head dim to which the Hopper kernels pad."""
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


def sees_few_keys(head_dim: int, keys: float, mask: str) -> bool:
    """Return True if small programs are faster for queries that see up to `keys` keys.

    Besides its tiles a program takes as long as four of them: start, first loads, last stores. Several small programs
    on a multiprocessor hide that from each other, but each loads the keys for half or a third as many queries.
    """
    limits = SHORT_KEYS.get(padded_head_dim(head_dim))
    return limits is not None and keys <= limits[mask]


# -- backward ---------------------------------------------------------------------------------------------------------

KEYS = 128
"""Keys of a program."""
QUERIES = {64: 128, 128: 64}
"""Queries of a tile by padded head dim: as many as registers can hold beside the gradients of the keys."""
START_COST, COMBINE_COST, SPLITS_PER_COMBINE_COST = 4, 2, 40
"""Costs in units of tiles, about 2 us each: of a program beside its tiles, and of a combine kernel; and the number of
splits that add 1 to the latter."""
MAX_SPLIT_ROUNDS = 4
"""Maximum number of rounds of split programs on all multiprocessors: each program needs scratch memory."""
PARTS_PER_COMBINE_COST = 30
"""As SPLITS_PER_COMBINE_COST, for programs that share the heads of a group."""
ONE_HEAD = 0.83
"""Relative time of a tile where a program visits one head, for head dims below 128: the loops over several heads need
more registers there than there are."""
MAX_SPLITS = 16
"""Maximum number of splits of a unit of work."""
MAX_HEAD_ROUNDS = 8
"""Maximum number of rounds where the heads of a group are split: 138 MB of scratch memory with a head dim of 128, on an
H200."""
LEAST_SAVING = 0.1
"""Minimum relative saving that justifies splitting a group's heads."""
CLOSE = 0.1
"""Relative difference of estimates within which programs are simulated."""


def parts_of_group(group: int, head_dim: int, tiles: Sequence[int], kv_heads: int, multiprocessors: int) -> int:
    """Return the number of programs of backward that share the query heads of a KV head.

    A program computes the gradients of KEYS keys from all queries that see them, and visits the query heads that share
    a KV head one after another. That leaves few, long programs: 64 for 132 multiprocessors with 16 query heads, 4 KV
    heads and 2,048 tokens. Then the heads of a group are split over several programs, whose results are added up. Seven
    heads are split into two parts of three and four, for example.

    `tiles`: for each block of keys the tiles of queries of one head that see it; `kv_heads`: those of all batches.
    """
    return 1 if group == 1 else _parts_of_group(group, head_dim < 128, tuple(tiles), kv_heads, multiprocessors)


@functools.lru_cache(maxsize=4096)
def _parts_of_group(group: int, is_narrow: bool, tiles: tuple[int, ...], kv_heads: int, multiprocessors: int) -> int:
    units, total, longest = len(tiles) * kv_heads, sum(tiles) * kv_heads * group, max(tiles)

    def of_tile(parts: int) -> float:
        return ONE_HEAD if is_narrow and parts == group else 1.0

    def combining(parts: int) -> float:
        return COMBINE_COST + units * parts / PARTS_PER_COMBINE_COST if parts > 1 else 0

    def cost(parts: int) -> float:
        """Return the estimated time in tiles: of the longest program, or of all programs on all multiprocessors."""
        shared = (total + units * parts * START_COST) / multiprocessors
        return of_tile(parts) * max(heads_of_part(group, parts) * longest + START_COST, shared) + combining(parts)

    def simulated(parts: int) -> float:
        return of_tile(parts) * _end(group, parts, tiles, kv_heads, multiprocessors) + combining(parts)

    most = MAX_HEAD_ROUNDS * multiprocessors
    costs = {parts: cost(parts) for parts in numbers_of_parts(group) if parts == 1 or units * parts <= most}
    least = min(costs.values())
    if least > (1 - LEAST_SAVING) * costs[1]:
        return 1
    close = [parts for parts, own in costs.items() if own <= (1 + CLOSE) * least]
    return min(close, key=simulated)


def _end(group: int, parts: int, tiles: Sequence[int], kv_heads: int, multiprocessors: int) -> int:
    """Return the time in tiles at which the last program ends, if each starts on the first free multiprocessor."""
    heads = [group * (part + 1) // parts - group * part // parts for part in range(parts)]
    free = [0] * multiprocessors
    for block in tiles:
        for number in heads * kv_heads:
            heapq.heapreplace(free, free[0] + number * block + START_COST)
    return max(free)


def numbers_of_parts(group: int) -> list[int]:
    """Return the numbers of parts that make sense: the fewest for each size of the largest part. Of four heads, three
    parts would take as long as two."""
    return sorted({-(-group // heads) for heads in range(1, group + 1)})


def heads_of_part(group: int, parts: int) -> int:
    """Return the number of query heads in the largest of almost equal parts of a group."""
    return -(-group // parts)


def causal_tiles(length: int, head_dim: int) -> list[int]:
    """Return, for each block of keys, the tiles of queries of one head that see it, with a causal mask."""
    queries = QUERIES[padded_head_dim(head_dim)]
    blocks = math.ceil(length / queries)
    return [blocks - column // queries for column in range(0, length, KEYS)]


# -- both -------------------------------------------------------------------------------------------------------------

L2_SHARE = {"forward": 32 << 20, "backward": 16 << 20}
"""Bytes that the heads of a section may read or update repeatedly; with more they evict each other from L2."""
L2_SHARE_192 = 8 << 20
"""As L2_SHARE["forward"], for head dims from 136 to 192 without a mask. Measured on an H200: 2.59 ms in place of 2.85
for 2 x 16 x 8192 x 192; with a causal mask 1.03 times as long."""


@functools.lru_cache(maxsize=4096)
def heads_of_section(heads: int, blocks: int, fit: int, least: int) -> int:
    """Return the number of heads whose programs run concurrently: a divisor of all heads, with at least `least` blocks,
    as close as possible to the number that fits the cache."""
    small = [number for number in range(1, math.isqrt(heads) + 1) if heads % number == 0]
    large = [own for number in small for own in (number, heads // number) if own * blocks >= least] or [heads]
    return min(sorted(large), key=lambda own: max(own, fit) / min(own, max(fit, 1)))


@dataclass(frozen=True)
class Split:
    """Assignment of equally long units of work to programs: each of the first `unsplit` units has one program."""

    units: int
    unsplit: int
    splits: int
    """Programs per unit for the other units."""

    @property
    def split_units(self) -> int:
        return self.units - self.unsplit

    @property
    def programs(self) -> int:
        return self.unsplit + self.split_units * self.splits


def even_end(units: int, tiles: int, multiprocessors: int, min_saving: float) -> Split:
    """Return the split of units of `tiles` tiles with which all multiprocessors finish at about the same time.

    Without splitting, 1.1 times as many units as multiprocessors take twice as long as exactly as many.
    """

    def cost(split: Split) -> int:
        """Return the estimated time in tiles, as if all programs of a round began together."""
        split_programs = split.split_units * split.splits
        rounds, split_rounds = (-(-n // multiprocessors) for n in (split.unsplit, split_programs))
        combining = COMBINE_COST + split_programs // SPLITS_PER_COMBINE_COST if split.split_units else 0
        split_tiles = -(-tiles // split.splits)
        return rounds * (tiles + START_COST) + split_rounds * (split_tiles + START_COST) + combining

    uncut, rounds = Split(units, units, 1), units // multiprocessors
    candidates = [
        Split(units, whole * multiprocessors, splits)
        for whole in range(rounds, max(rounds - 2, -1), -1)
        for splits in range(2, min(MAX_SPLITS, tiles) + 1)
    ]
    small = [split for split in candidates if split.split_units * split.splits <= MAX_SPLIT_ROUNDS * multiprocessors]
    best = min([uncut, *small], key=cost)
    return best if cost(best) <= (1 - min_saving) * cost(uncut) else uncut
