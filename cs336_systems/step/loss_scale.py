"""The loss scale of fp16 training, and the outcome of an update that may be left out."""

from dataclasses import dataclass
from enum import Enum


class Update(Enum):
    """The outcome of a training step."""

    APPLIED = "applied"
    RESCALED = "rescaled"
    """Left out because a gradient overflowed fp16: the loss scale was halved. This is how the scale is found."""
    SKIPPED = "skipped"
    """Left out because the loss or a gradient is not finite."""


@dataclass
class LossScale:
    """Halved after a step that is not finite, doubled after `growth_interval` good ones; constant unless dynamic.

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
        """Adapt the scale to a step, and say what becomes of its update."""
        self.good_steps += 1
        if is_finite:
            if self.is_dynamic and self.good_steps >= self.growth_interval:
                self.value, self.good_steps = self.value * 2, 0
            return Update.APPLIED
        if self.is_dynamic and self.value > 1:
            self.value, self.good_steps = self.value / 2, 0
            return Update.RESCALED
        return Update.SKIPPED
