"""Seconds of a training step before it runs: its kernels, at the clock that the power limit allows. No torch.

The host's work overlaps with the GPU's; without a CUDA graph the host's launches are a lower bound of the step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cs336_systems.config import LOW_PRECISIONS, RunConfig
from cs336_systems.predict.flops import causal_model_flops, model_flops
from cs336_systems.predict.time.gpu_profile import GpuProfile, Power
from cs336_systems.predict.time.kernel_seconds import ATTENTION, MATMUL, PASS, SMALL, kernel_seconds, kind_of
from cs336_systems.predict.time.step_kernels import (
    Kernel,
    Matmul,
    Pass,
    Small,
    forward_kernels,
    gradient_kernels,
    update_kernels,
)

KINDS = (MATMUL, ATTENTION, PASS, SMALL)
FLOP_ENERGY = {"fp32": 0.0, "tf32": 2.0, "fp8": 0.5}
"""Energy per FLOP relative to 16 bits. For fp32 it is 0, because its rates were measured at the clock that such work
has."""
FAST_KERNELS = frozenset(("kernels", "loss", "optimizer"))
"""Parts of the fast step that are required, because without them the step has other kernels."""
FP8_SPREAD = 0.1
"""Half the relative width of the interval around steps in FP8, whose rates come from one measured step."""
LOWEST_CLOCK = 0.4
"""Lowest relative clock in the search."""


class KernelTime(NamedTuple):
    """One kind of kernel in a step."""

    kernel: Kernel
    seconds: float
    """Seconds of all its runs in the step."""


class Work(NamedTuple):
    """Sums over kernels at the highest clock."""

    seconds: dict[str, float]
    """Seconds by kind of kernel."""
    joules: float
    launches: int

    @classmethod
    def of(cls, kernels: Sequence[Kernel], seconds: Sequence[float], power: Power | None) -> "Work":
        """Return the sums over kernels, whose times are those of all their runs."""
        by_kind = dict.fromkeys(KINDS, 0.0)
        for kernel, own in zip(kernels, seconds, strict=True):
            by_kind[kind_of(kernel)] += own
        joules = sum(_joules(kernel, power) for kernel in kernels) if power is not None else 0.0
        return cls(by_kind, joules, sum(kernel.times for kernel in kernels))


@dataclass(frozen=True)
class StepTime:
    config: RunConfig
    seconds: float
    low: float
    high: float
    """Upper bound of the interval in which a measurement is expected."""
    kernels: tuple[KernelTime, ...]
    clock: float
    """Mean clock relative to the highest."""
    gaps: float
    """Seconds between kernels, of the first launch, and of the wait for the end."""
    host: float
    """Seconds of the host's launches, a lower bound of a step without a CUDA graph; 0 with a graph."""
    micro_batches: int

    @property
    def is_launch_bound(self) -> bool:
        """True if the host needs longer to launch the kernels than the GPU to run them."""
        return 0 < sum(seconds for _, seconds in self.kernels) + self.gaps <= self.host

    @property
    def spread(self) -> float:
        """Half the relative width of the interval around the prediction."""
        return (self.high - self.low) / (2 * self.seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.config.tokens * self.micro_batches / self.seconds

    def mfu(self, peak: float, *, causal: bool = False) -> float:
        """Return the share of the peak FLOP/s that the model's own FLOPs reach."""
        flops = causal_model_flops(self.config) if causal else model_flops(self.config)
        return flops * self.micro_batches / self.seconds / peak

    def by_kind(self) -> dict[str, float]:
        """Return seconds by the kind of kernel, the largest first."""
        found: dict[str, float] = {}
        for kernel, seconds in self.kernels:
            found[kind_of(kernel)] = found.get(kind_of(kernel), 0.0) + seconds
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def by_name(self) -> dict[str, float]:
        """Return seconds by the name of the kernel, the largest first."""
        found: dict[str, float] = {}
        for kernel, seconds in self.kernels:
            found[_name(kernel)] = found.get(_name(kernel), 0.0) + seconds
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def step_time(
    config: RunConfig, profile: GpuProfile, micro_batches: int = 1, steps: int | None = None
) -> StepTime | None:
    """Predict a fast step in 16-bit precision or FP8; None if its kernels are not known. `steps`: number of steps
    before the measured ones; None for a warm GPU."""
    if not predicts(config):
        return None
    kernels = step_kernels(config, micro_batches)
    once = {kernel: kernel_seconds(kernel, profile) for kernel in set(kernels)}
    at_full_clock = [once[kernel] * kernel.times for kernel in kernels]
    work = Work.of(kernels, at_full_clock, profile.power)
    gaps = profile.gap * work.launches
    clock, times = 1.0, at_full_clock
    if profile.power is not None:
        clock = clock_after(steps, work, gaps, profile.power)
        slower = {kind: slowdown(profile.power, kind, clock) for kind in profile.power.slowdown}
        times = [seconds * slower[kind_of(kernel)] for kernel, seconds in zip(kernels, at_full_clock, strict=True)]
    gaps += profile.step
    host = 0.0 if "graph" in config.fast_parts else profile.launch * work.launches
    seconds = max(sum(times) + gaps, host)
    found = tuple(KernelTime(kernel, time) for kernel, time in zip(kernels, times, strict=True))
    spread = spread_of(config, profile)
    low, high = seconds * (1 - spread), seconds * (1 + spread)
    return StepTime(config, seconds, low, high, found, clock, gaps, host, micro_batches)


def spread_of(config: RunConfig, profile: GpuProfile) -> float:
    """Return half the relative width of the interval around the prediction of a fast step."""
    return max(profile.spread, FP8_SPREAD) if config.precision == "fp8" else profile.spread


def predicts(config: RunConfig) -> bool:
    """Return True if the kernels of this step are known: a fast training step in 16-bit precision or FP8, without a
    plan, with this package's attention."""
    return (
        config.fast_parts >= FAST_KERNELS
        and config.attention in ("auto", "flash_hopper")
        and config.mode == "train-step"
        and config.precision in LOW_PRECISIONS
        and not config.memory_budget
        and not config.compile
    )


def step_kernels(config: RunConfig, micro_batches: int = 1) -> list[Kernel]:
    """Return all kernels of a step: its micro batches, recomputation and the update."""
    found = gradient_kernels(config)
    if micro_batches > 1:
        more = gradient_kernels(config, adds=True)
        found += [kernel._replace(times=kernel.times * (micro_batches - 1)) for kernel in more]
    if config.checkpoint_blocks:
        found += recomputed_kernels(config, micro_batches)
    return [*found, *update_kernels(config)]


def recomputed_kernels(config: RunConfig, micro_batches: int = 1) -> list[Kernel]:
    """Return the kernels of forward that backward runs again: those of all blocks."""
    blocks = [kernel for kernel in forward_kernels(config) if kernel.times >= config.model.num_layers]
    return [kernel._replace(times=kernel.times * micro_batches) for kernel in blocks]


def clock_after(steps: int | None, work: Work, gaps: float, power: Power) -> float:
    """Return the clock of a step after this many others: a GPU that is still cool draws less power."""
    clock = highest_clock(work, gaps, power)
    if steps is None or clock == 1.0 or not power.warming:
        return clock
    seconds = gaps + sum(own * slowdown(power, kind, clock) for kind, own in work.seconds.items())
    return highest_clock(work, gaps, power, steps * seconds)


def highest_clock(work: Work, gaps: float, power: Power, worked: float = math.inf) -> float:
    """Return the highest clock, at most 1, at which the step's mean power is within the limit, on a GPU that has worked
    for this many seconds."""
    static = power.static_after(worked)
    computing = sum(power.slowdown[kind] * own for kind, own in work.seconds.items())
    waiting = gaps + sum(work.seconds.values()) - computing  # for memory: the same at every clock

    def excess(clock: float) -> float:
        return work.joules * clock**power.exponent - (power.limit - static) * (waiting + computing / clock)

    if excess(1.0) <= 0:
        return 1.0
    low, high = LOWEST_CLOCK, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) <= 0 else (low, middle)
    return low


def _joules(kernel: Kernel, power: Power) -> float:
    """Return the energy in joules of the kernel's work at the highest clock."""
    if isinstance(kernel, Pass):
        return kernel.times * kernel.bytes * power.per_byte
    if isinstance(kernel, Small):
        return 0.0
    if isinstance(kernel, Matmul) and kernel.precision:
        return kernel.times * kernel.flops * power.per_flop[MATMUL] * FLOP_ENERGY[kernel.precision]
    return kernel.times * kernel.flops * power.per_flop[kind_of(kernel)]


def slowdown(power: Power, kind: str, clock: float) -> float:
    """Return the time of a kind of kernel at a clock, relative to that at the highest clock."""
    return 1 + power.slowdown[kind] * (1 / clock - 1)


def _name(kernel: Kernel) -> str:
    """Return the name of a kernel's row in a table: matmuls by what they compute, attention by its pass."""
    return f"attention {kernel.name}" if kind_of(kernel) == "attention" else kernel.name
