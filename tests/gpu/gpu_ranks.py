"""Training of the small model with every wrapper, in ranks that share a GPU, compared with one rank."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.config import RunConfig, model_config
from cs336_systems.parallel import DDP, FSDP, FlatDDP, NaiveDDP, ShardedOptimizer, gather_full_params
from cs336_systems.step.train_step import TrainStep, build_model, set_matmul_precision

STEPS = 3
SGD = {"lr": 0.1, "momentum": 0.9}
WRAPPERS = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlap": DDP,
    "bucketed": lambda model: DDP(model, bucket_size_mb=25),
    "sharded": DDP,
    "fsdp": FSDP,
}


class Difference(NamedTuple):
    """Largest distance from the run of one rank."""

    weights: float
    loss: float


def differences() -> dict[str, Difference]:
    """Train with each wrapper, by name, and compare with one rank that has the whole batch."""
    set_matmul_precision("fp32")
    run = RunConfig(model=model_config("small"), device="cuda", mode="train-step", batch_size=2)
    data = torch.Generator().manual_seed(1)
    shape = (STEPS, 2, dist.get_world_size(), run.batch_size, run.model.context_length)
    tokens = torch.randint(run.model.vocab_size, shape, generator=data).cuda()

    def weights_after(name: str | None) -> tuple[list[torch.Tensor], float]:
        torch.manual_seed(0)
        with torch.device("cuda"):
            model: nn.Module = build_model(run)
        wrapped = WRAPPERS[name](model) if name else model
        make = ShardedOptimizer if name == "sharded" else lambda parameters, cls, **kwargs: cls(parameters, **kwargs)
        step = TrainStep(wrapped, run, make(wrapped.parameters(), torch.optim.SGD, **SGD))
        for inputs, targets in tokens:
            mine = (inputs[dist.get_rank()], targets[dist.get_rank()])
            loss = step(*mine) if name else step(inputs.flatten(0, 1), targets.flatten(0, 1))
        if name:
            loss = loss.cpu()
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        found = list(gather_full_params(wrapped).values()) if name == "fsdp" else list(model.parameters())
        return [p.detach().clone() for p in found], loss.item()

    expected, loss_alone = weights_after(None)
    found = {}
    for name in WRAPPERS:
        weights, loss = weights_after(name)
        apart = max((a - b).abs().max().item() for a, b in zip(weights, expected, strict=True))
        found[name] = Difference(apart, abs(loss - loss_alone))
    return found
