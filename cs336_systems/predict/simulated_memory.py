"""Memory of a simulated step: blocks that are freed with their last reference, and extrapolated repetitions.

A simulated step is written like the step itself: it allocates a `Block` where PyTorch allocates a tensor, and CPython
frees it where PyTorch frees the tensor. No torch.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from cs336_systems.predict.allocator import ALIGNMENT, CachingAllocator


@dataclass(frozen=True)
class Snapshot:
    """Allocated bytes, or a change of them."""

    live: Counter[str]
    """Bytes of tensors by label."""
    total: float
    """Total bytes, including the rounding of CUDA's allocator."""

    def since(self, before: "Snapshot", times: int) -> "Snapshot":
        """Return the mean change in each of `times` repetitions."""
        live = Counter({label: (size - before.live[label]) // times for label, size in self.live.items()})
        return Snapshot(live, (self.total - before.total) / times)


class Memory:
    """Allocated bytes by label, and their peak. On CUDA the total is that of the caching allocator's blocks."""

    def __init__(self, *, on_cuda: bool):
        self.allocator = CachingAllocator() if on_cuda else None
        self.live: Counter[str] = Counter()
        self.phase = ""
        self.peak, self.where, self.peak_parts = 0, "", dict[str, int]()
        self._extrapolated, self._whole_extrapolated = 0.0, 0

    @property
    def total(self) -> int:
        if self.allocator is None:
            return self.live.total()
        return self.allocator.allocated + self._whole_extrapolated

    def new(self, label: str, elements: int, width: int) -> "Block":
        """Allocate a tensor."""
        return Block(self, label, self.rounded(elements, width))

    def rounded(self, elements: int, width: int) -> int:
        """Return the bytes of a tensor, on CUDA rounded up to the alignment."""
        size = elements * width
        return size if self.allocator is None else -(-size // ALIGNMENT) * ALIGNMENT

    def update_peak(self) -> None:
        if (total := self.total) > self.peak:
            self.peak, self.where, self.peak_parts = total, self.phase, dict(self.live)

    def snapshot(self) -> Snapshot:
        return Snapshot(self.live.copy(), self.total)

    def add(self, change: Snapshot, times: int) -> None:
        """Add a change of memory `times` times without simulating it."""
        for label, size in change.live.items():
            self.live[label] += times * size
        self._extrapolated += times * change.total
        self._whole_extrapolated = round(self._extrapolated)
        self.update_peak()


class Block:
    """The memory of a tensor and of its views, freed with its last reference."""

    __slots__ = ("address", "label", "memory", "size")

    def __init__(self, memory: Memory, label: str, size: int):
        self.memory, self.label, self.size = memory, label, size
        memory.live[label] += size
        allocator = memory.allocator
        self.address = -1 if allocator is None else allocator.allocate(size)
        if allocator is None or memory.total > memory.peak:
            memory.update_peak()

    def __del__(self) -> None:
        memory = self.memory
        memory.live[self.label] -= self.size
        if memory.allocator is not None:
            memory.allocator.release(self.address)


class Node(NamedTuple):
    """A node of the backward pass with the blocks that it saves; None stands for memory with another owner."""

    backward: Callable[..., None]
    saved: tuple[Block | None, ...]


class Tape(list[Node]):
    """The nodes of a forward pass in order."""

    def run_backward(self) -> None:
        while self:
            node = self.pop()
            node.backward(*node.saved)
            del node  # frees what it saves before the next node allocates


@dataclass(frozen=True)
class Repetitions:
    """Indices of the repetitions to simulate, out of `count` equal ones. Those between `head` and `tail` are
    extrapolated from those of `head` except the first."""

    count: int
    head: int
    tail: int

    @property
    def skipped(self) -> int:
        return max(0, self.count - self.head - self.tail)

    def is_after_skipped(self, number: int) -> bool:
        """Return True for the first repetition after the extrapolated ones."""
        return self.skipped > 0 and number == self.count - self.tail

    def run(self, memory: Memory, body: Callable[[int], None]) -> list[Snapshot]:
        """Run `body(number)` for each. Return the change per extrapolated repetition, if any was extrapolated."""
        if not self.skipped:
            for number in range(self.count):
                body(number)
            return []
        body(0)
        before = memory.snapshot()
        for number in range(1, self.head):
            body(number)
        change = memory.snapshot().since(before, self.head - 1)
        memory.add(change, self.skipped)
        for number in range(self.count - self.tail, self.count):
            body(number)
        return [change]
