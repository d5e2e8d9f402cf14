"""Blocks that follow a memory plan in data-parallel training: the weights of one process, and of no plan."""

import pytest
import torch

from cs336_systems.config import ModelConfig, RunConfig
from cs336_systems.model import TransformerLM
from cs336_systems.parallel import DDP, ShardedOptimizer
from cs336_systems.predict.activation_plan import KEEP, KEEP_ALL, OFFLOAD, RECOMPUTE, RECOMPUTE_ALL, BlockPlan
from cs336_systems.step.train_step import TrainStep
from tests.distributed.compare import assert_same_on_all_ranks, rank, world

pytestmark = pytest.mark.ranks(2)

SHAPE = ModelConfig(vocab_size=61, context_length=12, d_model=24, num_layers=4, num_heads=3, d_ff=40)
PLAN = (
    BlockPlan(*[OFFLOAD] * 5),
    BlockPlan(KEEP, OFFLOAD, RECOMPUTE, OFFLOAD, RECOMPUTE),
    RECOMPUTE_ALL,
    KEEP_ALL,
)


def share(step, of_rank):
    generator = torch.Generator().manual_seed(100 * step + of_rank)
    return torch.randint(61, (2, 2, 12), generator=generator)


def trained(plan, *, wrap=None, sharded=False, precision="fp32"):
    """Return the losses and weights after three steps of two micro batches."""
    torch.manual_seed(0)
    model = TransformerLM(SHAPE, attention="flash_torch", fused=True)
    model.plan = plan
    wrapped = model if wrap is None else wrap(model)
    kind = {"lr": 1e-2, "fused": True}
    adamw = torch.optim.AdamW
    optimizer = ShardedOptimizer(wrapped.parameters(), adamw, **kind) if sharded else adamw(model.parameters(), **kind)
    config = RunConfig(model=SHAPE, fast="kernels,loss", attention="flash_torch", precision=precision)
    step = TrainStep(wrapped, config, optimizer)
    losses = []
    for number in range(3):
        ranks = range(world()) if wrap is None else [rank()]
        batches = [tuple(share(10 * number + part, own)) for part in range(2) for own in ranks]
        losses.append(step.train(batches, learning_rate=1e-2).loss)
    return losses, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "ddp-sharded"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_plan_changes_no_bit(sharded, precision):
    expected, weights = trained(None, wrap=DDP, sharded=sharded, precision=precision)
    losses, found = trained(PLAN, wrap=DDP, sharded=sharded, precision=precision)
    assert losses == expected
    assert all(torch.equal(a, b) for a, b in zip(found, weights, strict=True))
    assert_same_on_all_ranks("weight", found)


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "ddp-sharded"])
def test_a_plan_on_two_ranks_trains_as_one_process(sharded):
    expected, weights = trained(PLAN)
    losses, found = trained(PLAN, wrap=DDP, sharded=sharded)
    assert losses == pytest.approx(expected, rel=1e-4)
    for ours, theirs in zip(found, weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-4)
