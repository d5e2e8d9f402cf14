"""Training on several ranks: data parallel in four variants, a sharded optimizer (ZeRO-1), fully sharded (FSDP)."""

from cs336_systems.parallel.ddp import DDP, FlatDDP, NaiveDDP
from cs336_systems.parallel.fsdp import FSDP, clip_grad_norm_, gather_full_params
from cs336_systems.parallel.launch import process_group, spawn
from cs336_systems.parallel.sharded_optimizer import ShardedOptimizer

__all__ = [
    "DDP",
    "FSDP",
    "FlatDDP",
    "NaiveDDP",
    "ShardedOptimizer",
    "clip_grad_norm_",
    "gather_full_params",
    "process_group",
    "spawn",
]
