"""Recomputed activations, NaN, and backward passes and models that fail."""

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.compare import assert_close, rank, world
from tests.distributed.ddp.models import VARIANTS, Net, Pair, double_loss, every_variant, plain_loss, share, weigh

pytestmark = pytest.mark.ranks(2)


class Checkpointed(nn.Module):
    """Both blocks under a checkpoint, the second one twice."""

    reentrant: bool | None = None

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 3)
        self.one = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.two = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in (self.one, self.two, self.two):
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
@every_variant
def test_activation_checkpointing(name, reentrant):
    """A reentrant checkpoint runs a backward inside of backward, which ends more than once."""
    pair = Pair(name, lambda: Checkpointed().double(), double_loss)
    pair.wrapped.module.reentrant = reentrant
    for step in range(3):
        pair.zero_grad()
        if step == 2:
            with pair.wrapped.no_sync():
                pair.backward(7)
        pair.backward(step)
        pair.finish(f"step {step}")
    assert max(p.grad.abs().max() for p in pair.plain.parameters()) > 0


@every_variant
def test_nan_reaches_all_ranks(name):
    """And only in the step in which it arose: the buffers are used again."""

    def loss(module: nn.Module, step: int, of_rank: int) -> Tensor:
        bad = step == 1 and of_rank == world() - 1
        return plain_loss(module, step, of_rank) * (float("nan") if bad else 1.0)

    pair = Pair(name, loss=loss)
    for step in range(3):
        pair.plain.zero_grad()
        pair.wrapped.zero_grad(set_to_none=step == 1)
        pair.backward(step)
        pair.finish(f"step {step}")
        assert [bool(p.grad.isnan().any()) for p in pair.wrapped.parameters()] == [step == 1] * 4


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, now: bool) -> Tensor:
        ctx.now = now
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        if ctx.now:
            raise ArithmeticError("backward broke")
        return gradient, None


class Fragile(Net):
    """Its backward can break between its two layers. With a buffer its forward communicates, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.tensor(0))

    def forward(self, x: Tensor, breaks: bool = False) -> Tensor:
        self.forwards.add_(1)
        return self.second(Breaks.apply(self.first(x).relu(), breaks))


def broken_backward(pair: Pair, step: int) -> None:
    with pytest.raises(ArithmeticError, match="backward broke"):
        weigh(pair.wrapped(share(step, rank()), True)).backward()


def good_step(pair: Pair, step: int, dropped: bool = False) -> None:
    """With gradients zeroed beforehand, unless the wrapper was to drop them."""
    pair.plain.zero_grad()
    if not dropped:
        pair.wrapped.zero_grad()
    loss = plain_loss(pair.wrapped, step, rank())
    assert not dropped or all(p.grad is None for p in pair.wrapped.parameters()), "forward left old gradients"
    loss.backward()
    pair.expect(step)
    pair.finish(f"step {step}")
    with torch.no_grad():
        for p in itertools.chain(pair.plain.parameters(), pair.wrapped.parameters()):
            p.sub_(p.grad / 4)


@every_variant
def test_backward_breaks_on_all_ranks(name):
    """The next forward drops what the broken one left, also on top of gradients of the step before."""
    pair = Pair(name, Fragile)
    broken_backward(pair, 0)
    good_step(pair, 1, dropped=True)
    good_step(pair, 2)
    broken_backward(pair, 3)
    broken_backward(pair, 3)
    good_step(pair, 4, dropped=True)
    broken_backward(pair, 5)
    with pytest.raises(RuntimeError, match="the last backward raised an error"):
        pair.wrapped.finish_gradient_synchronization()
    good_step(pair, 6, dropped=True)


@pytest.mark.ranks(2, 4)
@every_variant
def test_backward_breaks_on_one_rank(name):
    """The others get NaN for what that rank could not send, and do not wait for it."""
    pair = Pair(name, Fragile)
    broke = None
    for step, breaking in enumerate((None, world() - 1, None, 0, None)):
        if breaking is None:
            good_step(pair, step, dropped=rank() == broke)
            continue
        broke = breaking
        pair.zero_grad()
        pair.expect(step)
        if rank() == broke:
            broken_backward(pair, step)
            continue
        plain_loss(pair.wrapped, step, rank()).backward()
        pair.wrapped.finish_gradient_synchronization()
        spoiled = 0
        for (key, found), expected in zip(pair.wrapped.module.named_parameters(), pair.plain.parameters(), strict=True):
            if found.grad is not None and found.grad.isnan().all():
                spoiled += 1
            else:  # sent before it broke
                assert_close(f"step {step}: gradient of {key}", found.grad, expected.grad)
        assert spoiled >= 2


@every_variant
def test_sparse_gradients_are_refused(name):
    wrapped = VARIANTS[name].wrap(nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 2)))

    def step() -> None:  # some variants send in backward, some in finish
        weigh(wrapped(torch.tensor([1, 3]))).backward()
        wrapped.finish_gradient_synchronization()

    with pytest.raises(ValueError, match="sparse"):
        step()
