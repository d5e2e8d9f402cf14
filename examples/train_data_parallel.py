"""Train with DDP and the sharded optimizer: two processes on one machine, or any number under torchrun.

python examples/train_data_parallel.py
torchrun --nproc_per_node 2 examples/train_data_parallel.py
"""

import os

import torch

from cs336_systems import DDP, RunConfig, ShardedOptimizer, TrainStep, TransformerLM, model_config
from cs336_systems.parallel import process_group, spawn
from cs336_systems.parallel.launch import this_rank

STEPS = 5


def train() -> list[float]:
    """Train a tiny model on random tokens, the same on every rank; the losses."""
    rank = this_rank("cpu")
    config = RunConfig(model=model_config("tiny", context_length=32, num_layers=2))
    torch.manual_seed(0)  # the same weights everywhere; DDP also broadcasts them from rank 0
    model = DDP(TransformerLM(config.model), bucket_size_mb=25)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    step = TrainStep(model, config, optimizer)
    batch = step.random_batch()
    losses = [step(*batch).item() for _ in range(STEPS)]
    if rank.rank == 0:
        print(f"{rank.world_size} ranks, losses: {', '.join(f'{loss:.4f}' for loss in losses)}")
    return losses


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun
        with process_group(device="cpu"):
            train()
    else:
        spawn(train, 2)
