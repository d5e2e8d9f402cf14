"""Finds silent corruption: the gradients of a step are computed twice from one state and must be equal to the bit.

Fingerprints are compared, not the tensors: a second copy of all gradients may not fit. A fingerprint is two 64-bit
numbers, one by rows and one by columns of a tensor's bits, and any single flipped bit changes both. Weights and
optimizer state are compared as well: a flipped bit in a row of the embedding that no token reads leaves the gradients
as they are. Ranks that hold the same weights compare them with each other, which also finds a bit that flipped in an
earlier step.
"""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.parallel.collectives import gather
from cs336_systems.parallel.peers import ranks_by_value, ranks_named

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by bytes of an element."""
WIDTH = 4096
"""Columns of the matrix that a fingerprint sees in a tensor."""


Fingerprint = tuple[int, ...]


class ReplayError(RuntimeError):
    """A step gave two results. The same on all ranks; nothing was updated."""


class Replay:
    """Compares two runs of a step. `model` may be wrapped; `extra` is optimizer state that `Optimizer.state` lacks."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, extra: list[Tensor]):
        self._parameters = dict(getattr(model, "module", model).named_parameters())
        self._optimizer, self._extra = optimizer, extra

    def check(self, run: Callable[[], Tensor], drop: Callable[[], None]) -> Tensor:
        """Compute gradients by `run` twice, `drop` between; return the loss, or raise ReplayError on all ranks."""
        state = fingerprints(self._state())
        before = fingerprints({"the loss": run(), **self._gradients()})
        drop()
        loss = run()
        after = fingerprints({"the loss": loss, **self._gradients()})
        found = _first_difference(before, after) or _first_difference(state, fingerprints(self._state()))
        shared = [name for name, p in self._parameters.items() if not hasattr(p, "is_shard")]
        _raise_together(found, {name: state[f"the weight {name}"] for name in shared})
        return loss

    def _gradients(self) -> dict[str, Tensor]:
        return {f"the gradient of {name}": p.grad for name, p in self._parameters.items() if p.grad is not None}

    def _state(self) -> dict[str, Tensor]:
        """Return weights and optimizer state, with names for messages."""
        found = {f"the weight {name}": p.detach() for name, p in self._parameters.items()}
        for name, parameter in self._parameters.items():
            for kind, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found[f"the optimizer's {kind} of {name}"] = value
        return found | {f"the low bits of the weights, part {n}": tensor for n, tensor in enumerate(self._extra)}


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, Fingerprint]:
    """Return the two sums of each tensor; the host waits for the device once."""
    if not tensors:
        return {}
    devices = {tensor.device for tensor in tensors.values()}
    main = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
    sums = torch.stack([_sums(tensor).to(main, non_blocking=True) for tensor in tensors.values()]).tolist()
    return {name: tuple(pair) for name, pair in zip(tensors, sums, strict=True)}


@torch.no_grad()
def _sums(tensor: Tensor) -> Tensor:
    """Return two numbers that any single bit of a tensor changes.

    The bits are seen as a matrix whose rows, then columns, are combined by XOR, and the results are added with odd
    weights modulo 2^64: an odd multiple of a number that is not 0 modulo 2^64 is not 0 either.
    """
    flat = tensor.detach().reshape(-1).view(BITS[tensor.element_size()])
    whole = flat.numel() // WIDTH * WIDTH
    parts = [flat[:whole].view(-1, WIDTH), flat[whole:].view(1, -1)]
    none = torch.zeros((), dtype=torch.int64, device=flat.device)  # a rank may own no row of a tensor
    sums = [[_weighted(part, dim) for part in parts if part.numel()] for dim in (0, 1)]
    return torch.stack([sum(found, start=none) for found in sums])


def _weighted(bits: Tensor, dim: int) -> Tensor:
    combined = torch.hash_tensor(bits, dim).view(torch.int64)  # in one pass: `sum` would first copy all bits to int64
    return (combined * (2 * torch.arange(len(combined), device=bits.device) + 1)).sum()


def _first_difference(before: Mapping[str, Fingerprint], after: Mapping[str, Fingerprint]) -> str | None:
    return next((name for name in before if before[name] != after.get(name)), None)


def _raise_together(found: str | None, weights: Mapping[str, Fingerprint]) -> None:
    """Raise ReplayError on all ranks if one has found a difference, or if their weights differ."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if found:
            raise ReplayError(f"two runs of it gave different results, first seen in {found}")
        return
    every = gather((found, weights))
    bad = [f"{name} on rank {rank}" for rank, (name, _) in enumerate(every) if name]
    if bad:
        raise ReplayError(f"two runs of it gave different results, first seen in {', '.join(bad)}")
    for name in weights:
        groups = ranks_by_value((rank, theirs[name]) for rank, (_, theirs) in enumerate(every))
        if len(groups) > 1:
            sides = " and ".join(map(ranks_named, groups.values()))
            raise ReplayError(f"the weight {name} differs between {sides}")
