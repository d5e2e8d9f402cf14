"""Gradients that add up over several backward passes, with and without `no_sync`."""

import contextlib
import itertools
import random

import pytest
import torch
from torch import Tensor

from tests.distributed.compare import assert_close, rank, world
from tests.distributed.ddp.models import (
    Branches,
    Net,
    Pair,
    Parts,
    all_reduces,
    branch_loss,
    compare_parts,
    every_variant,
    plain_loss,
    share,
    whole_numbers,
    wrapped_parts,
)

pytestmark = [pytest.mark.ranks(2), every_variant]


def test_several_backwards_before_one_finish(name):
    """Averaged gradients are not divided again; one micro batch after another, and with all forwards first."""
    pair = Pair(name)
    for step in range(2):
        pair.zero_grad()
        for micro in range(3):
            pair.backward(10 * step + micro)
        pair.finish(f"in turn, step {step}")
        pair.zero_grad()
        for loss in [plain_loss(pair.wrapped, 10 * step + micro, rank()) for micro in range(3)]:
            loss.backward()
        for micro in range(3):
            pair.expect(10 * step + micro)
        pair.finish(f"forwards first, step {step}")


def test_backward_twice_through_one_graph(name):
    pair = Pair(name)
    loss = plain_loss(pair.wrapped, 0, rank())
    for _ in range(2):
        loss.backward(retain_graph=True)
        pair.expect(0)
    pair.finish()


def test_two_steps_after_two_forwards(name):
    """No forward comes between the first finish and the second backward."""
    pair = Pair(name)
    for step, loss in enumerate([plain_loss(pair.wrapped, step, rank()) for step in range(2)]):
        loss.backward()
        pair.expect(step)
        pair.finish(f"step {step}")


def test_gradients_that_are_not_zeroed(name):
    """They may also have been scaled in between, as by clipping."""
    pair = Pair(name, Branches, branch_loss)
    for step in range(4):
        pair.backward(step)
        pair.finish(f"step {step}")
        if step == 1:
            for p in itertools.chain(pair.plain.parameters(), pair.wrapped.parameters()):
                if p.grad is not None:
                    p.grad.mul_(0.5)


def test_finish_twice(name):
    """The second does nothing, even if ranks have changed their gradients since."""
    pair = Pair(name)
    for step in range(2):
        pair.backward(step)
        pair.finish(f"step {step}")
        for p in pair.wrapped.parameters():
            p.grad.add_(rank())
        with all_reduces() as log:
            pair.wrapped.finish_gradient_synchronization()
        assert not log
        for p in pair.wrapped.parameters():
            p.grad.sub_(rank())


def test_validation_between_backward_and_finish(name):
    pair = Pair(name)
    for step in range(2):
        pair.backward(step)
        with torch.no_grad():
            pair.wrapped(share(9, rank()))
        pair.finish(f"step {step}")


def test_autograd_grad_leaves_gradients_alone(name):
    pair = Pair(name)
    found = torch.autograd.grad(plain_loss(pair.wrapped, 0, rank()), list(pair.wrapped.parameters()))
    expected = torch.autograd.grad(plain_loss(pair.plain, 0, rank()), list(pair.plain.parameters()))
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert_close(f"local gradient {i}", ours, theirs)
    pair.finish("nothing was accumulated")
    pair.backward(1)
    pair.finish("a step")


def test_no_sync(name):
    """Local gradients until the last micro batch, or until `finish` alone."""
    pair = Pair(name)
    for step, last_is_synchronised in enumerate((True, False, True)):
        local = whole_numbers(Net(), 0)
        pair.zero_grad()
        with all_reduces() as log:
            with pair.wrapped.no_sync():
                for micro in range(2):
                    pair.backward(10 * step + micro)
                    plain_loss(local, 10 * step + micro, rank()).backward()
            assert not log
            for (key, found), expected in zip(pair.wrapped.module.named_parameters(), local.parameters(), strict=True):
                assert_close(f"local gradient of {key}", found.grad, expected.grad)
            if last_is_synchronised:
                pair.backward(10 * step + 2)
            pair.finish(f"step {step}")
            assert log


def test_no_sync_applies_to_the_backward_inside(name):
    """Not to the forward inside."""
    pair = Pair(name)
    outside = plain_loss(pair.wrapped, 0, rank())
    with all_reduces() as log, pair.wrapped.no_sync():
        outside.backward()
        inside = plain_loss(pair.wrapped, 1, rank())
    assert not log
    inside.backward()
    pair.expect(0)
    pair.expect(1)
    pair.finish()


@pytest.mark.ranks(2, 4)
def test_no_sync_after_a_synchronised_backward(name):
    """A gradient sent already grows on one rank only: finish averages it again on all."""
    plain, wrapped = wrapped_parts(name)
    everything = [(number, 2.0) for number in range(5)]
    for step, first in enumerate([[[], *[[(4, 2.0), (1, 1.0)]] * (world() - 1)], [everything] * world()]):
        then = [[(0, 8.0)], *[[(4, 4.0)]] * (world() - 1)]
        wrapped(first[rank()]).backward()
        with wrapped.no_sync():
            wrapped(then[rank()]).backward()
        wrapped.finish_gradient_synchronization()
        (sum(plain(uses) for uses in first + then) / world()).backward()
        compare_parts(f"step {step}", wrapped, plain)


def test_no_sync_nested_and_left_by_an_exception(name):
    """The state from before is restored."""
    pair = Pair(name)
    with all_reduces() as log, pair.wrapped.no_sync():
        with pytest.raises(KeyError), pair.wrapped.no_sync():
            raise KeyError("from inside")
        pair.backward(0)
        assert not log
    with all_reduces() as log:
        pair.backward(1)
        assert bool(log) == pair.variant.overlaps
        pair.finish()
        assert log


@pytest.mark.ranks(1, 2, 4)
def test_random_sequences(name):
    """Any parameters in any order on any rank, also none or in no_sync alone; gradients kept, zeroed or dropped.

    Only where several backwards of a step communicate do ranks use the same parameters in the same order.
    """
    plan = random.Random(world())  # the same on all ranks
    _, wrapped = wrapped_parts(name)
    count = len(Parts.SHAPES)
    expected: list[Tensor | None] = [None] * count
    for step in range(25):
        match plan.choice(["keep", "zero", "drop"]):
            case "zero":
                wrapped.zero_grad(set_to_none=False)
                expected = [gradient if gradient is None else gradient * 0 for gradient in expected]
            case "drop":
                wrapped.zero_grad()
                expected = [None] * count
        # Those in no_sync come first, as in training; the other order has a test of its own.
        passes = sorted((plan.random() < 0.4 for _ in range(plan.randint(1, 3))), reverse=True)
        for in_no_sync in passes:
            chosen = [plan.sample(range(count), plan.randint(0, count)) for _ in range(world())]
            if passes.count(False) > 1:
                chosen = chosen[:1] * world()
            uses = [[(number, float(plan.randint(-3, 3))) for number in numbers] for numbers in chosen]
            with wrapped.no_sync() if in_no_sync else contextlib.nullcontext():
                wrapped(uses[rank()]).backward()
            for number, factor in itertools.chain(*uses):
                more = wrapped.module.slope(number, factor) / world()
                before = expected[number]
                expected[number] = more if before is None else before + more
        wrapped.finish_gradient_synchronization()
        for number, p in enumerate(wrapped.module.parts):
            assert_close(f"step {step}, passes in no_sync {passes}: gradient {number}", p.grad, expected[number])
