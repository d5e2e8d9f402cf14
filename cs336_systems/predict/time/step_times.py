"""Seconds of many steps of one model on one GPU: equal to `step_time`, at a small part of its cost. No torch.

A step consists of the first micro batch, later ones that add to its gradients, recomputation and the update. Each is
listed and timed once per micro batch size; a prediction adds the sums and determines the clock.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from cs336_systems.config import RunConfig
from cs336_systems.predict.time.gpu_profile import GpuProfile
from cs336_systems.predict.time.kernel_seconds import kernel_seconds
from cs336_systems.predict.time.step_kernels import Kernel, gradient_kernels, update_kernels
from cs336_systems.predict.time.time_model import KINDS, Work, highest_clock, recomputed_kernels, slowdown

FIRST, LATER, RECOMPUTED = "first", "later", "recomputed"
"""Parts of a step whose time depends on the size of a micro batch."""


class StepTimes:
    """Predicts steps that differ from `config` in their micro batches, recomputation, optimizer state and graph."""

    def __init__(self, config: RunConfig, profile: GpuProfile):
        self.config, self.profile = config, profile
        self._kernels: dict[Kernel, float] = {}
        self._works: dict[tuple[str, int | str], Work] = {}
        self._steps: dict[tuple[int, int, bool, str], tuple[float, float]] = {}

    def seconds(
        self,
        micro_batch: int,
        micro_batches: int = 1,
        *,
        recomputes: bool = False,
        state: str = "fp32",
        graph: bool = True,
    ) -> float:
        """Return the seconds of a step of `micro_batches` times `micro_batch` sequences."""
        key = micro_batch, micro_batches, recomputes, state
        if key not in self._steps:
            self._steps[key] = self._step(*key)
        seconds, host = self._steps[key]
        return seconds if graph else max(seconds, host)

    def _step(self, micro_batch: int, micro_batches: int, recomputes: bool, state: str) -> tuple[float, float]:
        """Return the seconds of the step's kernels, and those that the host needs to launch them."""
        parts = [(1, self._part(FIRST, micro_batch)), (1, self._update(state))]
        if micro_batches > 1:
            parts.append((micro_batches - 1, self._part(LATER, micro_batch)))
        if recomputes:
            parts.append((micro_batches, self._part(RECOMPUTED, micro_batch)))
        work, profile = _sum(parts), self.profile
        seconds = gaps = profile.gap * work.launches
        if profile.power is None:
            seconds += sum(work.seconds.values())
        else:
            clock = highest_clock(work, gaps, profile.power)
            seconds += sum(own * slowdown(profile.power, kind, clock) for kind, own in work.seconds.items())
        return seconds + profile.step, profile.launch * work.launches

    def update_seconds(self, state: str = "fp32") -> float:
        """Return the seconds of the update at the highest clock."""
        return sum(self._update(state).seconds.values())

    def _part(self, name: str, micro_batch: int) -> Work:
        """Return the work of one part of a step for one micro batch."""
        if (name, micro_batch) not in self._works:
            config = dataclasses.replace(self.config, batch_size=micro_batch)
            is_forward = name == RECOMPUTED
            kernels = recomputed_kernels(config) if is_forward else gradient_kernels(config, adds=name == LATER)
            self._works[name, micro_batch] = self._work(kernels)
        return self._works[name, micro_batch]

    def _update(self, state: str) -> Work:
        if ("update", state) not in self._works:
            self._works["update", state] = self._work(
                update_kernels(dataclasses.replace(self.config, optimizer_state=state))
            )
        return self._works["update", state]

    def _work(self, kernels: Sequence[Kernel]) -> Work:
        return Work.of(kernels, [kernel.times * self._seconds(kernel) for kernel in kernels], self.profile.power)

    def _seconds(self, kernel: Kernel) -> float:
        """Return the seconds of one run of a kernel, cached because parts of a step share many kernels."""
        once = kernel._replace(times=1)
        if once not in self._kernels:
            self._kernels[once] = kernel_seconds(once, self.profile)
        return self._kernels[once]


def _sum(parts: Iterable[tuple[int, Work]]) -> Work:
    """Return the sum of works, each multiplied by a count."""
    seconds, joules, launches = dict.fromkeys(KINDS, 0.0), 0.0, 0
    for times, work in parts:
        for kind, own in work.seconds.items():
            seconds[kind] += times * own
        joules += times * work.joules
        launches += times * work.launches
    return Work(seconds, joules, launches)
