"""A step that is run twice: any flipped bit is found before the update, and a healthy step is never stopped."""

import random

import pytest
import torch
from torch import Tensor

from cs336_systems.config import ModelConfig, RunConfig
from cs336_systems.kernels.fused.packed_adamw import PackedAdamW
from cs336_systems.kernels.fused.pointwise import CHECKED, checksums
from cs336_systems.step.replay import ReplayError
from cs336_systems.step.train_step import TrainStep

SHAPE = ModelConfig(vocab_size=61, context_length=8, d_model=16, num_layers=1, num_heads=2, d_ff=24)
FLIPS = 80


def step_of(**fields) -> TrainStep:
    return TrainStep.build(RunConfig(model=SHAPE, batch_size=2, max_grad_norm=1.0, **fields))


def packed_step() -> TrainStep:
    config = RunConfig(model=SHAPE, batch_size=2, fast="kernels,loss,optimizer")
    model = TrainStep.build(RunConfig(model=SHAPE, batch_size=2)).model
    return TrainStep(model, config, PackedAdamW(model.in_packing_order(), dtype=torch.float32, max_grad_norm=1.0))


def flip(tensor: Tensor, place: int, bit: int) -> None:
    """Flip one bit, in place."""
    flat = tensor.detach().view(-1).view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
    width = 8 * tensor.element_size()
    mask = (1 << bit) - (1 << width if bit == width - 1 else 0)
    flat[place] ^= mask


def snapshot(step: TrainStep) -> list[Tensor]:
    moments = [t for state in step.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return [t.detach().clone() for t in [*step.model.parameters(), *moments]]


class Planted:
    """Flips one bit after the n-th computation of gradients of a step."""

    def __init__(self, step: TrainStep, run: int, target):
        self.step, self.run, self.target, self.count = step, run, target, 0
        self.name = "_gradients" if step._adapted.clips_itself else "_accumulate"
        self.inner = getattr(step, self.name)

    def __enter__(self):
        setattr(self.step, self.name, self)

    def __exit__(self, *_):
        setattr(self.step, self.name, self.inner)

    def __call__(self, *arguments):
        loss = self.inner(*arguments)
        self.count += 1
        if self.count == self.run:
            self.target()
        return loss


@pytest.mark.parametrize("build", [step_of, packed_step], ids=["plain", "packed"])
def test_every_flipped_bit_is_found_and_nothing_is_updated(build):
    step, draw = build(), random.Random(0)
    batch = step.random_batch()
    step.train([batch])  # the optimizer has its state
    for _ in range(FLIPS // 2):
        parameters = list(step.model.parameters())
        of_gradients, run = draw.random() < 0.5, draw.choice((1, 2))

        def target(step=step, of_gradients=of_gradients, parameters=parameters):
            pool = [p.grad for p in parameters] if of_gradients else [*parameters, *snapshot_views(step)]
            tensor = draw.choice(pool)
            flip(tensor, draw.randrange(tensor.numel()), draw.randrange(8 * tensor.element_size()))

        before = snapshot(step)
        with Planted(step, run, target), pytest.raises(ReplayError, match="different results, first seen in the "):
            step.train([batch], replay=True)
        changed = sum(not torch.equal(a.view(-1), b.view(-1)) for a, b in zip(before, snapshot(step), strict=True))
        assert changed <= (0 if of_gradients else 1)  # the planted bit itself
        step = build()
        step.train([batch])


def snapshot_views(step: TrainStep) -> list[Tensor]:
    """The moments, as the optimizer holds them."""
    states = step.optimizer.state.values()
    return [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("build", [step_of, packed_step], ids=["plain", "packed"])
def test_a_replayed_run_is_the_same_run(build):
    found = []
    for every in (0, 1):
        step = build()
        batch = step.random_batch()
        results = [step.train([batch, batch], replay=bool(every)) for _ in range(4)]
        found.append(([(r.loss, r.gradient_norm) for r in results], snapshot(step)))
    (losses, weights), (again, replayed) = found
    assert losses == again
    assert all(torch.equal(a, b) for a, b in zip(weights, replayed, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4), (2, 3, 4), (3, CHECKED // 2 + 1)])
def test_a_checksum_changes_with_each_single_bit(dtype, shape):
    tensor = torch.randn(shape).mul(50).to(dtype)
    if tensor.dim() == 2:
        tensor = tensor.t()  # not contiguous
    before = checksums(tensor)
    assert len(before) == -(-tensor.numel() // CHECKED)
    bits = tensor.reshape(-1).view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    for place in random.Random(0).sample(range(tensor.numel()), min(tensor.numel(), 25)):
        for bit in (0, 3, 8 * tensor.itemsize - 1):
            changed = bits.clone()
            changed[place] ^= 1 << bit if bit < 8 * tensor.itemsize - 1 else torch.iinfo(bits.dtype).min
            differs = checksums(changed) != before
            assert differs.nonzero().tolist() == [[place // CHECKED]]


def test_swapped_elements_change_a_checksum():
    tensor = torch.arange(12, dtype=torch.float32)
    swapped = tensor[torch.tensor([0, 11, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1])]
    assert not torch.equal(checksums(tensor), checksums(swapped))
