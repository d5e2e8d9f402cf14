"""Applies a memory budget to a model: `--memory_budget` becomes a plan for its blocks."""

import math
import os
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.config import RunConfig
from cs336_systems.model import TransformerLM
from cs336_systems.predict.fit import usable_bytes
from cs336_systems.predict.gpus import find_by_driver_name
from cs336_systems.predict.memory_planner import PlannedMemory, Rates, budget_bytes, plan_memory
from cs336_systems.step.block_memory import BlockMemory, ChoiceByBlock

HOST_SHARE = 0.8
"""Share of the host's free memory that activations may take."""
CGROUP = Path("/sys/fs/cgroup")


class Limits(NamedTuple):
    """Memory that a plan may use on this machine, and the machine's rates."""

    budget: int
    rates: Rates
    host_bytes: float


def apply_memory_budget(model: nn.Module, config: RunConfig, blocks: ChoiceByBlock | None = None) -> None:
    """Make the blocks of `model` keep, recompute and offload tensors within the memory budget of `config`.

    Fused blocks are planned here. `blocks` is the plan for whole blocks, which measure/block_planner.py makes.
    """
    if not config.memory_budget:
        return
    if config.plans_whole_blocks:
        assert blocks is not None, "measure.block_planner.build_step plans whole blocks"
        BlockMemory(model, blocks)
        return
    assert isinstance(model, TransformerLM)
    model.plan = plan_for_machine(config).plan


def plan_for_machine(config: RunConfig) -> PlannedMemory:
    """Return the plan for fused blocks on the GPU of `config` with the memory of its host."""
    return plan_memory(config, *machine_limits(config))


def machine_limits(config: RunConfig) -> Limits:
    """Return the limits of the device of `config`. Ranks share the memory of their host."""
    if config.device_type != "cuda":
        return Limits(budget_bytes(config.memory_budget), Rates.of(None), math.inf)
    device = torch.device(config.device)
    gpu = find_by_driver_name(torch.cuda.get_device_name(device))
    capacity = usable_bytes(torch.cuda.get_device_properties(device).total_memory)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    host_bytes = HOST_SHARE * free_host_memory() / ranks
    return Limits(budget_bytes(config.memory_budget, capacity), Rates.of(gpu, config.precision), host_bytes)


def host_memory() -> float:
    """Return the bytes of memory of the host, or of its container."""
    limit = _lines(CGROUP / "memory.max")
    whole = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(whole, float(limit[0])) if limit and limit[0].isdigit() else whole


def free_host_memory() -> float:
    """Return the bytes that the host has free, within the limit of its container."""
    limits = [host_memory()]
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            limits.append(1024.0 * int(line.split()[1]))
    limit, used = _lines(CGROUP / "memory.max"), _lines(CGROUP / "memory.current")
    if limit and used and limit[0].isdigit():
        limits.append(float(limit[0]) - float(used[0]))
    return min(limits)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
