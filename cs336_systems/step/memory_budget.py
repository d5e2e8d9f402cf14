"""Applies a memory budget to a model: `--memory_budget` becomes a plan for its blocks."""

import os
from pathlib import Path

import torch
from torch import nn

from cs336_systems.config import RunConfig
from cs336_systems.model import TransformerLM
from cs336_systems.predict.fit import usable_bytes
from cs336_systems.predict.gpus import find_by_driver_name
from cs336_systems.predict.memory_planner import PlannedMemory, Rates, budget_bytes, plan_memory

HOST_SHARE = 0.8
"""Share of the host's free memory that activations may take."""
CGROUP = Path("/sys/fs/cgroup")


def apply_memory_budget(model: nn.Module, config: RunConfig) -> PlannedMemory | None:
    """Plan what the blocks of `model` keep, recompute and offload on this machine; None without a budget."""
    if not config.memory_budget:
        return None
    assert isinstance(model, TransformerLM)
    planned = plan_for_machine(config)
    model.plan = planned.plan
    return planned


def plan_for_machine(config: RunConfig) -> PlannedMemory:
    """Return the plan for the GPU of `config` and the memory of its host."""
    if config.device_type != "cuda":
        return plan_memory(config, budget_bytes(config.memory_budget))
    device = torch.device(config.device)
    gpu = find_by_driver_name(torch.cuda.get_device_name(device))
    capacity = usable_bytes(torch.cuda.get_device_properties(device).total_memory)
    budget = budget_bytes(config.memory_budget, capacity)
    return plan_memory(config, budget, Rates.of(gpu, config.precision), HOST_SHARE * free_host_memory())


def free_host_memory() -> float:
    """Return the bytes that the host has free, within the limit of its container."""
    limits = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
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
