"""Finds silent corruption: the gradients of a step are computed twice from one state and must be equal to the bit.

Checksums are compared, not the tensors: a second copy of all gradients may not fit. Weights and optimizer state are
compared as well: a flipped bit in a row of the embedding that no token reads leaves the gradients as they are. Ranks
that hold the same weights compare them with each other, which also finds a bit that flipped in an earlier step.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.kernels.fused.packed_adamw import PackedAdamW
from cs336_systems.kernels.fused.pointwise import CHECKED, checksums
from cs336_systems.parallel.collectives import gather, local_part
from cs336_systems.parallel.peers import ranks_by_value, ranks_named
from cs336_systems.step.updates import PlainOptimizer


class ReplayError(RuntimeError):
    """Two runs of a step gave different results. Raised on all ranks; nothing was updated."""


class _Part(NamedTuple):
    """A flat tensor of the state, or of the gradients."""

    kind: str
    """Kind of the tensor, such as "gradient" or "exp_avg"."""
    sums: Tensor
    starts: list[tuple[int, nn.Parameter]]
    """Start of each parameter in the tensor."""


class Replay:
    """Compares two runs of a step, also for a wrapped model."""

    def __init__(self, model: nn.Module, optimizer: PackedAdamW | PlainOptimizer):
        self._model, inner = model, getattr(model, "module", model)
        self._names = {parameter: name for name, parameter in inner.named_parameters()}
        self._optimizer = optimizer

    def check(self, run: Callable[[], Tensor], drop: Callable[[], None]) -> Tensor:
        """Compute gradients by `run` twice, `drop` between; return the loss, or raise ReplayError on all ranks.

        A model whose next pass adds up in another order (`TorchEngine.repeats_sums`) has one pass before.
        """
        if not getattr(self._model, "repeats_sums", True):
            run()
            drop()
        state = self._summed(gradients=False)
        first = checksums(run())
        gradients = self._summed(gradients=True)
        drop()
        loss = run()
        again, state_again = (self._summed(gradients=of) for of in (True, False))
        found = self._difference(gradients, again) or self._difference(state, state_again)
        if found is None and not torch.equal(first, checksums(loss)):
            found = "the loss"
        _raise_together(found, self._replicated(state))
        return loss

    def _summed(self, *, gradients: bool) -> list[_Part]:
        """Return the checksums of the gradients, or of the weights and the optimizer's state."""
        wanted = [part for part in self._optimizer.flat if (part[0] == "gradient") == gradients]
        return [_Part(kind, checksums(local_part(tensor)), starts) for kind, tensor, starts in wanted]

    def _difference(self, before: list[_Part], after: list[_Part]) -> str | None:
        """Return the name of the first tensor that differs."""
        if len(before) == len(after) and torch.equal(_joined(before), _joined(after)):
            return None
        for one, other in zip(before, after, strict=False):
            if not torch.equal(one.sums, other.sums):
                block = int((one.sums != other.sums).nonzero()[0])
                return f"the {one.kind} of {self._owners(one, block * CHECKED)}"
        return "the number of gradients"

    def _owners(self, part: _Part, first: int) -> str:
        """Name the parameters in the CHECKED elements of a part whose checksums differ."""
        ends = [start + parameter.numel() for start, parameter in part.starts]
        within = [
            self._names.get(parameter, "a parameter")
            for (start, parameter), end in zip(part.starts, ends, strict=True)
            if start < first + CHECKED and end > first
        ]
        return within[0] if len(within) == 1 else f"one of {len(within)} parameters from {within[0]} to {within[-1]}"

    def _replicated(self, parts: list[_Part]) -> dict[str, str]:
        """Return hashes of the weights that this rank holds whole, by name."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return {}
        weights = {part.starts[0][1]: part.sums for part in parts if part.kind == "weight"}
        return {
            self._names[parameter]: hashlib.sha256(str(sums.tolist()).encode()).hexdigest()
            for parameter, sums in weights.items()
            if parameter in self._names and not hasattr(parameter, "is_shard") and local_part(parameter) is parameter
        }


def _joined(parts: list[_Part]) -> Tensor:
    return torch.cat([part.sums for part in parts])


def _raise_together(found: str | None, weights: Mapping[str, str]) -> None:
    """Raise ReplayError on all ranks if one has found a difference, or if their weights differ."""
    every = gather((found, weights)) if dist.is_initialized() else [(found, weights)]
    bad = [f"{name} on rank {rank}" if len(every) > 1 else name for rank, (name, _) in enumerate(every) if name]
    if bad:
        raise ReplayError(f"two runs of it gave different results, first seen in {', '.join(bad)}")
    for name in dict.fromkeys(name for _, theirs in every for name in theirs):  # stages have different weights
        groups = ranks_by_value((rank, theirs[name]) for rank, (_, theirs) in enumerate(every) if name in theirs)
        if len(groups) > 1:
            sides = " and ".join(map(ranks_named, groups.values()))
            raise ReplayError(f"the weight {name} differs between {sides}")
