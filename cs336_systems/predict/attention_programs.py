"""How attention on Hopper GPUs divides its work among programs: rules of the kernels and of predicted times.

No torch.
"""

import math
from collections.abc import Sequence

# -- forward ----------------------------------------------------------------------------------------------------------

SHORT_KEYS = {
    64: {"full": 1024, "causal": 4096, "window": 8192},
    128: {"full": 256, "causal": 512, "window": 4096},
}
"""Largest number of keys that a query sees for which small programs are faster, by padded head dim and mask; measured
on an H200."""


def padded_head_dim(head_dim: int) -> int:
    """Return the head dim to which the Hopper kernels pad."""
    return 64 if head_dim <= 64 else 128


def sees_few_keys(head_dim: int, keys: float, mask: str) -> bool:
    """Return True if small programs are faster for queries that see up to `keys` keys.

    Besides its tiles a program takes as long as four of them: start, first loads, last stores. Several small programs
    on a multiprocessor hide that from each other, but each loads the keys for half or a third as many queries.
    """
    return keys <= SHORT_KEYS[padded_head_dim(head_dim)][mask]


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
MAX_HEAD_ROUNDS = 8
"""The same where the heads of a group are split: 138 MB of scratch memory with a head dim of 128 on an H200."""
LEAST_SAVING = 0.1
"""Minimum relative saving that justifies splitting a group's heads."""


def parts_of_group(group: int, tiles: Sequence[int], kv_heads: int, multiprocessors: int) -> int:
    """Return the number of programs of backward that share the query heads of a KV head.

    A program computes the gradients of KEYS keys from all queries that see them, and visits the query heads that share
    a KV head one after another. That leaves few, long programs: 64 for 132 multiprocessors with 16 query heads, 4 KV
    heads and 2,048 tokens. Then the heads of a group are split over several programs, whose results are added up. Seven
    heads are split into two parts of three and four, for example.

    `tiles`: for each block of keys the tiles of queries of one head that see it; `kv_heads`: those of all batches.
    """
    if group == 1:
        return 1
    units, total, longest = len(tiles) * kv_heads, sum(tiles) * kv_heads * group, max(tiles)

    def cost(parts: int) -> float:
        """Return the estimated time in tiles: of the longest program, or of all programs on all multiprocessors."""
        programs = units * parts
        combining = COMBINE_COST + programs // SPLITS_PER_COMBINE_COST if parts > 1 else 0
        shared = (total + programs * START_COST) / multiprocessors
        return max(heads_of_part(group, parts) * longest + START_COST, shared) + combining

    most = MAX_HEAD_ROUNDS * multiprocessors
    best = min([1, *(parts for parts in range(2, group + 1) if units * parts <= most)], key=cost)
    return best if cost(best) <= (1 - LEAST_SAVING) * cost(1) else 1


def heads_of_part(group: int, parts: int) -> int:
    """Return the number of query heads in the largest of almost equal parts of a group."""
    return -(-group // parts)


def causal_tiles(length: int, head_dim: int) -> list[int]:
    """Return, for each block of keys, the tiles of queries of one head that see it, with a causal mask."""
    queries = QUERIES[padded_head_dim(head_dim)]
    blocks = math.ceil(length / queries)
    return [blocks - column // queries for column in range(0, length, KEYS)]
