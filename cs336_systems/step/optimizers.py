"""One interface to every optimizer, for the training step, its checkpoints and the memory tracer.

`PackedAdamW` implements it; torch's optimizers and `ShardedOptimizer` are adapted here.
"""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class StepOptimizer(Protocol):
    clips_itself: bool
    """`step` clips the gradients itself and leaves out a non-finite update, on the device."""
    grad_norm: Tensor | None
    """Norm of the gradients in the last step, before clipping, if the optimizer computes it."""

    def upload_rates(self) -> None:
        """Copy the learning rates of the groups to the device, where a captured step reads them."""

    def masters(self, device: torch.device | str | None = None) -> dict[nn.Parameter, Tensor]:
        """Return fp32 copies of the weights that the model does not hold in fp32 memory of its own."""

    def load_masters(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Replace the weights that `masters` returns; parameters that it does not return are ignored."""

    @property
    def owned(self) -> list[Tensor]:
        """Parameters whose optimizer state is on this rank."""

    @property
    def unlisted_state(self) -> list[Tensor]:
        """Tensors kept between steps that `Optimizer.state` does not hold."""


class TorchOptimizer:
    """Adapts a torch optimizer or `ShardedOptimizer`: the step clips the gradients, and the model has the weights."""

    clips_itself = False
    grad_norm: Tensor | None = None

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer

    def upload_rates(self) -> None:
        """Do nothing: the learning rates are read on the host."""

    def masters(self, device: torch.device | str | None = None) -> dict[nn.Parameter, Tensor]:
        return {}

    def load_masters(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Do nothing: the weights were loaded in place."""

    @property
    def owned(self) -> list[Tensor]:
        every = [p for group in self.optimizer.param_groups for p in group["params"]]
        return getattr(self.optimizer, "owned", every)

    @property
    def unlisted_state(self) -> list[Tensor]:
        return []


def adapt(optimizer: torch.optim.Optimizer) -> StepOptimizer:
    """Return the optimizer itself if it implements the interface, else an adapter."""
    return optimizer if isinstance(optimizer, StepOptimizer) else TorchOptimizer(optimizer)
