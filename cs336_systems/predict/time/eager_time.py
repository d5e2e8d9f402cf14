"""Seconds of a step that the host launches operator by operator: in each phase the slower of host and GPU. No torch.

Phases are those of a measured step, which waits for the GPU between them.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from cs336_systems.config import ModelConfig, RunConfig
from cs336_systems.predict.time.compiled_kernels import compiled_phases
from cs336_systems.predict.time.eager_kernels import INNER_CAST, attention_pass, eager_phases, lists_operators
from cs336_systems.predict.time.gpu_profile import GpuProfile, HostRates
from cs336_systems.predict.time.kernel_seconds import kernel_seconds, kind_of, pass_names
from cs336_systems.predict.time.step_kernels import Kernel
from cs336_systems.predict.time.time_model import KINDS, KernelTime, StepTime, Work, clock_after, slowdown

LAUNCH_BOUND_STEP, CLOSE_STEP, COMPILED = "launch-bound", "host close to GPU", "compiled"
"""Kinds of steps besides precisions."""
CLOSE = 0.5
"""If the host takes at least this share of the GPU's time, a slow moment of the host makes a step longer."""


def host_seconds(phase: str, kernels: Sequence[Kernel], config: RunConfig, host: HostRates) -> tuple[float, float]:
    """Return the host's seconds that overlap with the GPU, and those in which the GPU waits for it."""
    launches = sum(kernel.times for kernel in kernels if kernel.name != INNER_CAST)
    if phase == "optimizer":
        return 0.0, host.parameter * parameter_tensors(config.model)
    if config.compile and phase != "loss":
        return host.compiled * launches, 0.0
    if phase == "backward":
        return host.backward * launches, 0.0
    return (host.inference if config.mode == "inference" else host.forward) * launches, 0.0


def waiting_seconds(config: RunConfig, host: HostRates) -> float:
    """Return the seconds between phases, in which autograd graphs are freed and Python runs."""
    if config.mode == "inference":
        return host.step
    return host.step + host.release * config.model.num_layers


def parameter_tensors(model: ModelConfig) -> int:
    """Return the number of tensors that the optimizer updates."""
    per_block = 9 + 3 * model.qkv_bias + 2 * model.qk_norm
    return model.num_layers * per_block + (2 if model.tied_embeddings else 3)


Phases = Mapping[str, Sequence[Kernel]]


def eager_step_time(config: RunConfig, profile: GpuProfile, steps: int | None = None) -> StepTime | None:
    """Predict a step without the fast parts; None if its operators or the rates of the host are not known. `steps`:
    number of steps before the measured ones; None for a warm GPU."""
    if not predicts_eager(config, profile):
        return None
    return time_of_phases(compiled_phases(config) if config.compile else eager_phases(config), config, profile, steps)


def time_of_phases(phases: Phases, config: RunConfig, profile: GpuProfile, steps: int | None = None) -> StepTime | None:
    """Return the time of a step whose phases have these kernels; None if the rates of the host are not known."""
    host = profile.host
    if host is None:
        return None
    kernels = [kernel for own in phases.values() for kernel in own]
    once = {kernel: kernel_seconds(kernel, profile) for kernel in set(kernels)}
    work = Work.of(kernels, [kernel.times * once[kernel] for kernel in kernels], profile.power)
    clock = 1.0 if profile.power is None else clock_after(steps, work, host.gap * work.launches, profile.power)
    slower = {kind: 1.0 if profile.power is None else slowdown(profile.power, kind, clock) for kind in KINDS}
    seconds = total_host = between = waiting_seconds(config, host)
    for name, own in phases.items():
        gpu = sum(kernel.times * (once[kernel] * slower[kind_of(kernel)] + host.gap) for kernel in own)
        gpu += host.start if name in ("forward", "backward") else 0.0
        beside, waits = host_seconds(name, own, config, host)
        seconds += waits + max(gpu, beside)
        total_host += waits + beside
    times = tuple(KernelTime(kernel, kernel.times * once[kernel] * slower[kind_of(kernel)]) for kernel in kernels)
    found = StepTime(config, seconds, 0, 0, times, clock, host.gap * work.launches, total_host - between, 1)
    spread = profile.spreads.get(kind_of_step(found), profile.spread)
    return dataclasses.replace(found, low=seconds * (1 - spread), high=seconds * (1 + spread))


def predicts_eager(config: RunConfig, profile: GpuProfile) -> bool:
    """Return True if the step's operators are listed, and the profile has rates for its matmuls and its attention."""
    if (
        profile.host is None
        or not lists_operators(config)
        or (config.precision != "bf16" and config.precision not in profile.wide)
    ):
        return False
    known = {name.rpartition(" ")[0] for name in profile.attention}
    return config.attention == "reference" or not known.isdisjoint(pass_names(attention_pass("forward", config)))


def kind_of_step(found: StepTime) -> str:
    """Return the kind of a step, which determines its error: launch-bound or close to it, compiled, or its precision.
    The time of the first two kinds depends on the host, which varies from run to run."""
    if found.is_launch_bound:
        return LAUNCH_BOUND_STEP
    if found.host > CLOSE * (sum(seconds for _, seconds in found.kernels) + found.gaps):
        return CLOSE_STEP
    return COMPILED if found.config.compile else found.config.precision
