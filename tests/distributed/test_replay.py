"""A step that is run twice on two ranks, under every wrapper."""

import pytest
import torch

from cs336_systems.flags import build
from cs336_systems.parallel.launch import this_rank
from cs336_systems.step.module_trace import Tracer
from cs336_systems.step.replay import ReplayError
from cs336_systems.step.updates import Update
from cs336_systems.train.building import build_step
from cs336_systems.train.settings import TrainSettings
from tests.distributed.train_cases import SHAPE

pytestmark = pytest.mark.ranks(2)
every_wrapper = pytest.mark.parametrize("wrapper", ["ddp", "ddp-sharded", "fsdp"])


def step_of(wrapper):
    fields = {"data": __file__, **SHAPE, "device": "cpu", "parallel": wrapper, "batch_size": 4}
    rank = this_rank("cpu")
    step = build_step(build(TrainSettings, fields), rank)
    tokens = torch.randint(256, (2, 4, 16), generator=torch.Generator().manual_seed(rank.rank))
    return step, rank.rank, [(tokens[0, :2], tokens[1, :2]), (tokens[0, 2:], tokens[1, 2:])]


@every_wrapper
def test_a_replayed_step_is_the_same_step(wrapper):
    found = []
    for replay in (False, True):
        step, _, batches = step_of(wrapper)
        found.append([step.train(batches, learning_rate=1e-3, replay=replay) for _ in range(3)])
    assert found[0] == found[1]


@every_wrapper
def test_a_bit_that_flips_on_one_rank_stops_all(wrapper):
    step, rank, batches = step_of(wrapper)
    step.train(batches)
    inner, runs = step._accumulate, []

    def accumulate(*arguments):
        loss = inner(*arguments)
        runs.append(loss)
        if rank == 1 and len(runs) == 1:
            next(p for p in step.model.parameters() if p.grad is not None).grad.view(-1).view(torch.int32)[0] ^= 1
        return loss

    step._accumulate = accumulate
    with pytest.raises(ReplayError, match=r"first seen in the gradient of .* on rank 1$"):
        step.train(batches, replay=True)


@pytest.mark.parametrize("wrapper", ["ddp", "ddp-sharded"])
def test_a_bit_that_flipped_in_an_earlier_step_is_found_by_the_other_rank(wrapper):
    step, rank, batches = step_of(wrapper)
    step.train(batches)
    if rank == 1:
        with torch.no_grad():
            step.model.module.layers[0].ffn.w2.weight.view(-1).view(torch.int32)[7] ^= 1
    with pytest.raises(ReplayError, match=r"the weight layers.0.ffn.w2.weight differs between rank 0 and rank 1"):
        step.train(batches, replay=True)


@every_wrapper
def test_the_module_that_is_not_finite_is_named_with_its_rank(wrapper):
    step, rank, batches = step_of(wrapper)
    if rank == 1:
        embedding = next(m for m in step.model.modules() if type(m).__name__ == "Embedding")
        hook = embedding.register_forward_hook(lambda module, inputs, out: out * torch.nan)
    result = step.train(batches)
    assert result.update is Update.SKIPPED
    text = Tracer().explain(step, result, batches, lambda: batches)
    if rank == 1:
        hook.remove()
    assert text is not None
    assert text.startswith("not finite first in the ")
    assert "(rank " in text
