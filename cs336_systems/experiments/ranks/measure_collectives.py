"""Instrument of the `collectives` experiment: times each collective at each size."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from cs336_systems.measure.timing import STEP, time_steps
from cs336_systems.parallel.collectives import all_gather, reduce_scatter
from cs336_systems.parallel.launch import in_ranks, this_rank
from cs336_systems.record import Metric
from cs336_systems.step.train_step import Watch

WARMUP_CALLS = 3


def measure_collectives(config: dict[str, Any]) -> list[Metric]:
    """Seconds of each call on the slowest rank; one variant for each collective and size in bytes."""
    return in_ranks(_time, config)


def _time(config: dict[str, Any]) -> list[Metric]:
    device = this_rank(config["device"]).device
    metrics = []
    for name in config["collectives"]:
        for size in config["sizes"]:
            run = _call(name, size // 4, device)
            timings = time_steps(run, device=device, warmup_steps=WARMUP_CALLS, num_steps=config["calls"])
            metrics.append(Metric("time", "s", timings.wall[STEP], variant=f"{name} {size}"))
    return metrics


def _call(name: str, elements: int, device: torch.device) -> Callable[[Watch], Any]:
    """A collective on fp32; `elements` counts the whole array: all-gather's output, reduce-scatter's input."""
    ranks = dist.get_world_size()
    part = torch.ones(elements // ranks, device=device)
    whole = torch.ones(elements // ranks * ranks, device=device)
    calls: dict[str, Callable[[Watch], Any]] = {
        "all_reduce": lambda watch: dist.all_reduce(whole),
        "broadcast": lambda watch: dist.broadcast(whole, 0),
        "all_gather": lambda watch: all_gather(whole, part),
        "reduce_scatter": lambda watch: reduce_scatter(part, whole),
    }
    return calls[name]
