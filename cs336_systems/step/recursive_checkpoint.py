"""Recomputation by halves: the minimum memory for the activations of a chain of blocks.

A chain of n blocks keeps the inputs of its two halves and recomputes each half, by halves again, when backward reaches
it. At any time the tensors of one block and 1 + log2 n block inputs are in memory; the blocks of a step run forward 2 n
+ n (log2 n - 1) / 2 times instead of n. docs/CHECKPOINTING.md derives both.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint

State = tuple[Any, ...]
"""The values that one block passes to the next."""
Block = Callable[..., State]


def run_by_halves(blocks: Sequence[Block], *state: Any) -> State:
    """Run the blocks one after another on `state` and return the result; backward recomputes them by halves."""
    for half in _halves(blocks):
        if half:
            run = partial(run_by_halves, half) if len(half) > 1 else half[0]
            # Tensors as arguments of their own: inside a tuple every one would stay in memory until backward.
            state = checkpoint(run, *state, use_reentrant=False, preserve_rng_state=False)
    return state


def _halves(blocks: Sequence[Block]) -> tuple[Sequence[Block], Sequence[Block]]:
    """Return both halves. The second is longer: it is recomputed first, and fewer blocks run again to reach it."""
    middle = len(blocks) // 2
    return blocks[:middle], blocks[middle:]
