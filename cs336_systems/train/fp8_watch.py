"""Watches the FP8 tensors of a training run, and returns blocks to bf16 that lose too much.

The rule: in every N-th step the elements that became 0 are counted. A block of which some tensor has lost more than
LARGEST_LOST_SHARE of its elements computes in bf16 from the next step on, for the rest of the run. Overflow needs no
rule: scales are those of the step itself, and a step with values that are not finite is left out, as in any precision.
Counts are summed over ranks, so that all ranks decide alike.
"""

from collections.abc import Iterable

import torch.distributed as dist

from cs336_systems.config import LARGEST_LOST_SHARE
from cs336_systems.kernels.fused.fp8_blocks import Fp8Blocks, LostShare
from cs336_systems.model import TransformerLM
from cs336_systems.parallel.collectives import Wrapper, communication_device
from cs336_systems.step.train_step import TrainStep


class Fp8Watch:
    """`before` comes before every step, `read` after it. Only the counters of the checked step are read, so that a
    resumed run makes the same decisions as an uninterrupted one."""

    def __init__(self, step: TrainStep, every: int):
        model = step.model.module if isinstance(step.model, Wrapper) else step.model
        self.blocks: Fp8Blocks | None = model.fp8 if isinstance(model, TransformerLM) else None
        self._step, self._every = step, every

    def leave(self, numbers: Iterable[int]) -> None:
        """Switch blocks to bf16 from now on."""
        own = set(numbers)
        if self.blocks is None or not own & self.blocks.numbers:
            return
        self.blocks.numbers -= own
        if self._step.graph is not None:
            self._step.graph.forget()

    def before(self, step: int) -> None:
        """Reset the counters before a checked step; steps count from 1."""
        if self.blocks is not None and self._is_checked(step):
            self.blocks.reset_parameters()

    def read(self, step: int) -> list[LostShare]:
        """Return the shares of a checked step, over all ranks; none for other steps."""
        if self.blocks is None or not self._is_checked(step):
            return []
        counts = self.blocks.take_counts().to(communication_device())
        dist.all_reduce(counts)
        return self.blocks.shares_of(counts)

    def leave_lossy(self, shares: Iterable[LostShare]) -> list[LostShare]:
        """Return the blocks that have lost too much to bf16; return the largest share of each of them."""
        worst: dict[int, LostShare] = {}
        for share in shares:
            if share.share > max(LARGEST_LOST_SHARE, worst[share.block].share if share.block in worst else 0.0):
                worst[share.block] = share
        self.leave(worst)
        return list(worst.values())

    def _is_checked(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0
