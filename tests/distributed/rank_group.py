"""Runs tests in ranks that are started once for a whole session.

A test marked `ranks(2, 4)` runs its body in each of 2 ranks, then in each of 4. The processes of a group wait between
tests. After a failure, a crash or a hang the group is killed, the test reports the tracebacks, and the next test starts
a new group.
"""

import gc
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from cs336_systems.measure.rehearsal import forget_groups
from cs336_systems.parallel.launch import RankError, Ranks

TIME_LIMIT = 240.0
"""Seconds for a test that needs less than one: only a hang takes longer, on the busiest machine as well."""


class RankGroups:
    """The groups of this session, by number of ranks."""

    def __init__(self) -> None:
        self._groups: dict[int, Ranks] = {}

    def call(self, world_size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return what `work(*arguments)` returns on each rank."""
        if world_size not in self._groups:
            self._groups[world_size] = Ranks(world_size, timeout=TIME_LIMIT)
        try:
            return self._groups[world_size].call(tidy, work, *arguments)
        except RankError:
            del self._groups[world_size]
            raise

    def run(self, world_size: int, module: str, function: str, arguments: dict[str, Any]) -> str:
        """Run the body of a test on each rank; return the traceback of the rank that failed, or an empty string."""
        try:
            self.call(world_size, run_test, module, function, arguments)
        except RankError as error:
            return str(error)
        return ""

    def close(self) -> None:
        for ranks in self._groups.values():
            ranks.close()


def tidy(work: Callable[..., Any], *arguments: Any) -> Any:
    """Call `work`, and destroy the process groups that it has left behind.

    Each has threads that look for messages a hundred times a second: those of a whole session take a core.
    """
    try:
        return work(*arguments)
    finally:
        left = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
        for group in left:
            dist.destroy_process_group(group)
        if left:
            forget_groups()
            left.clear()
            gc.collect()  # meshes, which hold groups, are held by modules that refer to each other


def run_test(module: str, function: str, arguments: dict[str, Any]) -> None:
    """Run the body of a test in this rank. The barrier finds ranks that disagree about the collectives of the test."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    getattr(importlib.import_module(module), function)(**arguments)
    dist.barrier()
