"""A model of PyTorch's CUDA caching allocator: how many bytes a tensor is charged for. No torch, no GPU.

`torch.cuda.memory_allocated` counts blocks, not tensors. A block stays larger than its tensor when the remainder is too
small to split off: up to 1 MiB for every tensor above 1 MiB. For some shapes this is 4% of all memory, so a prediction
accurate to 2% must include it.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

from cs336_systems.record import MIB

ALIGNMENT = 512
SMALL = MIB
"""Tensors up to this size share segments of 2 MiB; up to 10 MiB, segments of 20 MiB; above, each has its own."""


@dataclass(slots=True)
class Block:
    address: int
    size: int
    small: bool
    free: bool = False
    before: "Block | None" = None
    after: "Block | None" = None


class CachingAllocator:
    """Best fit with splitting and merging on one stream. `allocated` predicts torch.cuda.memory_allocated."""

    def __init__(self) -> None:
        self.allocated = 0
        self._blocks: dict[int, Block] = {}
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._next_segment = 0

    def allocate(self, size: int) -> int:
        """Allocate a block for `size` bytes and return its address."""
        size = -(-size // ALIGNMENT) * ALIGNMENT or ALIGNMENT
        small = size <= SMALL
        candidates = self._free[small]
        index = bisect_left(candidates, (size, -1))
        fits = index < len(candidates)
        block = self._blocks[candidates.pop(index)[1]] if fits else self._new_segment(size, small)
        rest = block.size - size
        if rest >= ALIGNMENT if small else rest > SMALL:
            self._split(block, size)
        block.free = False
        self.allocated += block.size
        return block.address

    def release(self, address: int) -> None:
        block = self._blocks[address]
        self.allocated -= block.size
        block.free = True
        before, after = block.before, block.after
        if before is not None and before.free:
            self._remove_free(before)
            block = self._merge(before, block)
        if after is not None and after.free:
            self._remove_free(after)
            block = self._merge(block, after)
        insort(self._free[block.small], (block.size, block.address))

    def size(self, address: int) -> int:
        return self._blocks[address].size

    def _new_segment(self, size: int, small: bool) -> Block:
        segment = 20 * MIB if SMALL < size < 10 * MIB else round_up(size, 2 * MIB)
        block = Block(self._next_segment, segment, small)
        self._next_segment += segment
        self._blocks[block.address] = block
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.small, True, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._blocks[rest.address] = rest
        insort(self._free[rest.small], (rest.size, rest.address))

    def _remove_free(self, block: Block) -> None:
        listed = self._free[block.small]
        del listed[bisect_left(listed, (block.size, block.address))]

    def _merge(self, left: Block, right: Block) -> Block:
        del self._blocks[right.address]
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        return left


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
