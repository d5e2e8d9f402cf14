"""Blocks that follow a memory plan in data-parallel training: the weights of one process, and of no plan."""

from functools import partial
from unittest.mock import patch

import pytest
import torch

from cs336_systems.config import ModelConfig, RunConfig
from cs336_systems.model import TransformerLM
from cs336_systems.parallel import DDP, FSDP, ShardedOptimizer
from cs336_systems.predict.activation_plan import KEEP, KEEP_ALL, OFFLOAD, RECOMPUTE, RECOMPUTE_ALL, BlockPlan
from cs336_systems.step import block_memory
from cs336_systems.step.block_memory import BlockMemory
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


def trained(plan, *, wrap=None, sharded=False, precision="fp32", blocks=None):
    """Return the losses and weights after three steps of two micro batches. `blocks`: a plan for a plain model."""
    torch.manual_seed(0)
    model = TransformerLM(SHAPE, attention="flash_torch", fused=blocks is None)
    model.plan = plan
    if blocks:
        BlockMemory(model, blocks)
    wrapped = model if wrap is None else wrap(model)
    kind = {"lr": 1e-2, "fused": True}
    adamw = torch.optim.AdamW
    optimizer = ShardedOptimizer(wrapped.parameters(), adamw, **kind) if sharded else adamw(model.parameters(), **kind)
    fast = "kernels,loss" if blocks is None else "off"
    config = RunConfig(model=SHAPE, fast=fast, attention="flash_torch", precision=precision)
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


MIXED = (OFFLOAD, OFFLOAD, RECOMPUTE, KEEP)
WRAPPERS = {
    "ddp": (DDP, "fp32"),
    "fsdp": (FSDP, "fp32"),
    "fsdp, bf16": (partial(FSDP, compute_dtype=torch.bfloat16), "bf16"),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_whole_blocks_in_a_wrapper_change_no_bit(name):
    """FSDP gathers the weights again for recomputation; gathered weights are not offloaded."""
    wrap, precision = WRAPPERS[name]
    with patch.object(block_memory, "SMALLEST", 256):
        expected, weights = trained(None, wrap=wrap, precision=precision, blocks=())
        losses, found = trained(None, wrap=wrap, precision=precision, blocks=MIXED)
    assert losses == expected
    assert all(torch.equal(a, b) for a, b in zip(found, weights, strict=True))


def test_gathered_weights_are_not_offloaded():
    torch.manual_seed(0)
    model = TransformerLM(SHAPE, attention="flash_torch")
    with patch.object(block_memory, "SMALLEST", 1):
        memory = BlockMemory(model, (OFFLOAD, KEEP, KEEP, KEEP))
        wrapped = FSDP(model)
        sent: list[torch.Size] = []
        send = memory.host.send
        with patch.object(memory.host, "send", lambda key, t: sent.append(t.numel()) or send(key, t)):
            wrapped(share(0, rank())[0, :1])
    rows, width, inner = 12, SHAPE.d_model, SHAPE.d_ff
    assert sent
    assert not {width * width, width * inner} & set(sent)
    assert {rows * width, rows * inner} <= set(sent)
