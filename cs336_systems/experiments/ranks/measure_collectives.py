"""How long collectives take, by size and number of ranks: the instrument of the `collectives` experiment."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from cs336_systems.measure.timing import STEP, time_steps
from cs336_systems.parallel.collectives import all_gather, reduce_scatter
from cs336_systems.parallel.launch import in_ranks, this_rank
from cs336_systems.step.train_step import Watch

WARM_UP = 3


def measure_collectives(config: dict[str, Any]) -> list[list[Any]]:
    """Seconds of each call of every collective at every size, the slowest rank's."""
    return in_ranks(_time, config)


def _time(config: dict[str, Any]) -> list[list[Any]]:
    device = this_rank(config["device"]).device
    metrics = []
    for name in config["collectives"]:
        for size in config["sizes"]:
            run = _call(name, size // 4, device)
            timings = time_steps(run, device=device, warmup_steps=WARM_UP, num_steps=config["calls"])
            metrics.append([f"{name} {size}: time", "s", timings.wall[STEP]])
    return metrics


def _call(name: str, elements: int, device: torch.device) -> Callable[[Watch], Any]:
    """On fp32. `elements` are those of the whole array: what all-gather ends with and reduce-scatter begins with."""
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
