"""The update of a step: its outcome, the loss scale of fp16, and one interface to every optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from cs336_systems.kernels.fused.packed_adamw import PackedAdamW


class Update(Enum):
    """The outcome of a training step."""

    APPLIED = "applied"
    RESCALED = "rescaled"
    """Left out because a gradient overflowed fp16: the loss scale was halved. This is how the scale is found."""
    SKIPPED = "skipped"
    """Left out because the loss or a gradient is not finite."""


@dataclass
class LossScale:
    """The loss scale: halved after a step that is not finite, doubled after `growth_interval` good ones; constant
    unless dynamic.

    torch.amp.GradScaler decides on each rank alone. Here the caller decides for all ranks, and a checkpoint stores two
    numbers.
    """

    value: float = 1.0
    good_steps: int = 0
    """Steps since the value last changed."""
    growth_interval: int = 2000
    is_dynamic: bool = False

    @classmethod
    def of(cls, precision: str, growth_interval: int = 2000) -> "LossScale":
        is_dynamic = precision == "fp16"
        return cls(2.0**16 if is_dynamic else 1.0, 0, growth_interval, is_dynamic)

    def update(self, is_finite: bool) -> Update:
        """Adapt the scale to a step, and return the outcome of its update."""
        self.good_steps += 1
        if is_finite:
            if self.is_dynamic and self.good_steps >= self.growth_interval:
                self.value, self.good_steps = self.value * 2, 0
            return Update.APPLIED
        if self.is_dynamic and self.value > 1:
            self.value, self.good_steps = self.value / 2, 0
            return Update.RESCALED
        return Update.SKIPPED


class PlainOptimizer:
    """Gives a torch optimizer or `ShardedOptimizer` the interface of `PackedAdamW`.

    The training step, its checkpoints and the memory tracer use it.
    """

    clips_itself = False
    """True: `step` clips the gradients itself and leaves out a non-finite update, on the device."""
    grad_norm: Tensor | None = None
    """Norm of the gradients in the last step, before clipping, if the optimizer computes it."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer

    def upload_rates(self) -> None:
        """Do nothing: the learning rates are read on the host. A captured step reads them on the device."""

    def masters(self, device: torch.device | str | None = None) -> dict[nn.Parameter, Tensor]:
        """Return fp32 copies of the weights that the model does not hold in fp32 memory of its own: none."""
        return {}

    def load_masters(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Do nothing: the weights were loaded in place."""

    @property
    def owned(self) -> list[Tensor]:
        """Parameters whose optimizer state is on this rank."""
        every = [p for group in self.optimizer.param_groups for p in group["params"]]
        return getattr(self.optimizer, "owned", every)

    @property
    def flat(self) -> list[tuple[str, Tensor, list[tuple[int, nn.Parameter]]]]:
        """Weights, gradients and state on this rank: kind, tensor, and its parameter."""
        found = []
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                state = {kind: value for kind, value in self.optimizer.state.get(p, {}).items() if kind != "step"}
                tensors = {"weight": p.detach(), "gradient": p.grad, **state}
                found += [(kind, tensor, [(0, p)]) for kind, tensor in tensors.items() if tensor is not None]
        return found

    @property
    def unlisted_state(self) -> list[Tensor]:
        """Tensors kept between steps that `Optimizer.state` does not hold: none."""
        return []


def adapt(optimizer: torch.optim.Optimizer) -> PackedAdamW | PlainOptimizer:
    return optimizer if isinstance(optimizer, PackedAdamW) else PlainOptimizer(optimizer)
