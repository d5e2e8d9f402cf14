"""The all-reduces that the wrappers send, when they send them, and the life of a wrapper."""

import copy
import weakref
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.parallel import DDP
from tests.distributed.compare import assert_close, rank
from tests.distributed.ddp.models import (
    VARIANTS,
    Net,
    Pair,
    all_reduces,
    every_variant,
    plain_loss,
    whole_numbers,
    wrapped_parts,
)

pytestmark = pytest.mark.ranks(2)


class Equal(nn.Module):
    """A chain of parameters of seven floats, the first of them doubles."""

    def __init__(self, number: int, doubles: int = 0) -> None:
        super().__init__()
        self.chain = nn.ParameterList(
            nn.Parameter(torch.ones(7, dtype=torch.float64 if i < doubles else torch.float32)) for i in range(number)
        )
        self.frozen = nn.Parameter(torch.ones(1000), requires_grad=False)

    def forward(self, x: Tensor, watch=None) -> Tensor:
        for number, p in enumerate(self.chain):
            x = x * p.float() + self.frozen[:7]
            if watch:  # called when the gradient of this parameter is about to be computed
                x.register_hook(lambda gradient, number=number: watch(number))
        return x.sum()


@pytest.mark.parametrize(("number", "doubles"), [(6, 0), (6, 2), (1, 0)])
@every_variant
def test_number_of_all_reduces(name, number, doubles):
    """None in no_sync; frozen parameters are not sent."""
    wrapped = VARIANTS[name].wrap(Equal(number, doubles))
    for step in range(3):
        with all_reduces() as log:
            if step == 1:
                with wrapped.no_sync():
                    wrapped(torch.ones(7)).backward()
                assert not log
            wrapped(torch.ones(7)).backward()
            wrapped.finish_gradient_synchronization()
        assert 7 * number <= sum(sent.elements for _, sent in log) < 1000
        assert len(log) in VARIANTS[name].all_reduces(number, 2 if doubles else 1), log


@every_variant
def test_overlap_with_backward(name):
    """All-reduces are asynchronous and begin before backward has come to the first half of the parameters."""
    number, variant = 8, VARIANTS[name]
    wrapped = variant.wrap(Equal(number))
    for _ in range(3):
        with all_reduces() as log:
            loss = wrapped(torch.ones(7), lambda number: log.append(("gradient", number)))
            log.clear()
            loss.backward()
            during = list(log)
            wrapped.finish_gradient_synchronization()
        names = [what for what, _ in during]
        if not variant.overlaps:
            assert "all_reduce" not in names
            continue
        assert len(log) == len(during), "finish sent what backward should have"
        assert all(value.asynchronous for what, value in log if what == "all_reduce")
        if name != "one_bucket":
            assert names.index("all_reduce") < during.index(("gradient", number // 2))


def test_buckets_are_sent_in_reverse_order_of_registration():
    """The order must not depend on that of the gradients, which differs over ranks."""
    for order in (range(5), reversed(range(5))):
        wrapped = DDP(wrapped_parts("naive")[0], bucket_size_mb=1e-6)
        with all_reduces() as log:
            wrapped([(number, 1.0) for number in order]).backward()
            wrapped.finish_gradient_synchronization()
        assert [sent.elements for _, sent in log] == [n + 1 for n in (6, 1, 5, 4, 3)]  # and a flag each


def counts(pair: Pair, step: int) -> tuple[int, int]:
    """All-reduces during backward, and in the whole step, which is compared with the plain model's."""
    pair.zero_grad()
    with all_reduces() as log:
        pair.backward(step)
        during = len(log)
        pair.finish(f"step {step}")
    return during, len(log)


@every_variant
def test_deep_copies(name):
    """A copy is a wrapper of its own: own parameters, buckets, hooks and no_sync."""
    for warm in (False, True):
        pair = Pair(name)
        usual = counts(pair, 4) if warm else None
        pair.zero_grad()
        twin = copy.copy(pair)
        twin.plain, twin.wrapped = copy.deepcopy(pair.plain), copy.deepcopy(pair.wrapped)
        assert type(twin.wrapped) is type(pair.wrapped)
        own = {p.data_ptr() for p in pair.wrapped.parameters()}
        assert not own & {p.data_ptr() for p in twin.wrapped.parameters()}
        found = counts(twin, 0)
        assert found == (usual or found)
        assert all(p.grad is None for p in pair.wrapped.parameters())
        assert counts(pair, 1) == found
        with pair.wrapped.no_sync():
            assert counts(twin, 2) == found
        del pair
        assert counts(twin, 3) == found


@pytest.mark.parametrize("previous", ["flat", "overlapped", "one_bucket"])
@every_variant
def test_hooks_are_removed_with_their_wrapper(name, previous):
    """Hooks of a wrapper that is gone would send everything a second time."""
    module = whole_numbers(Net(), rank())
    old = VARIANTS[previous].wrap(module)
    plain_loss(old, 0, rank()).backward()
    old.finish_gradient_synchronization()
    trace = weakref.ref(old)
    del old
    assert trace() is None, "something keeps the wrapper alive"
    with all_reduces() as log:
        plain_loss(module, 1, rank()).backward()
    assert not log
    assert counts(Pair(name, wrap=lambda _: VARIANTS[name].wrap(module)), 2) == counts(Pair(name), 2)


@every_variant
def test_two_wrappers_in_one_loss(name):
    one, two = Pair(name), Pair(name)
    for step in range(2):
        (plain_loss(one.wrapped, step, rank()) + plain_loss(two.wrapped, step + 5, rank())).backward()
        one.expect(step)
        two.expect(step + 5)
        one.finish(f"first, step {step}")
        two.finish(f"second, step {step}")


@pytest.mark.parametrize("compiled", ["inside", "outside"])
@pytest.mark.parametrize("name", ["flat", "buckets"])
def test_compiled(name, compiled):
    """torch.compile must not trace the wrapper's hooks."""
    compile_, wrap = partial(torch.compile, backend="aot_eager"), VARIANTS[name].wrap
    torch._dynamo.reset()
    pair = Pair(name, wrap=(lambda m: wrap(compile_(m))) if compiled == "inside" else (lambda m: compile_(wrap(m))))
    pair.zero_grad()
    with pair.wrapped.no_sync(), all_reduces() as log:
        pair.backward(0)
    assert not log
    with all_reduces() as log:
        pair.backward(1)
        assert bool(log) == pair.variant.overlaps
        pair.finish()
    for step in range(2, 4):
        counts(pair, step)


def with_linear(*, rows: int = 3, bias: bool = True, surplus: bool = False) -> nn.Module:
    module = nn.Module()
    module.early = nn.Linear(2, 2)
    module.odd = nn.Linear(2, rows, bias=bias)
    if surplus:
        module.surplus = nn.Parameter(torch.zeros(2))
    return module


def with_weight(weight: Tensor) -> nn.Module:
    module = with_linear()
    module.odd.weight = nn.Parameter(weight)
    return module


def frozen_bias() -> nn.Module:
    module = with_linear()
    module.odd.bias.requires_grad_(False)
    return module


def doubled() -> nn.Module:
    module = with_linear()
    module.odd.double()
    return module


MISMATCHES = {
    "one_more": ("surplus", with_linear, partial(with_linear, surplus=True)),
    "one_less": ("odd.bias", with_linear, partial(with_linear, bias=False)),
    "shape": ("odd.weight", with_linear, partial(with_linear, rows=4)),
    "transposed": ("odd.weight", with_linear, lambda: with_weight(torch.zeros(3, 2).t())),
    "strides": ("odd.weight", lambda: with_weight(torch.zeros(3, 3)), lambda: with_weight(torch.zeros(3, 3).t())),
    "dimensions": ("odd.weight", with_linear, lambda: with_weight(torch.zeros(6))),
    "dtype": ("odd.weight", with_linear, doubled),
    "frozen": ("odd.bias", with_linear, frozen_bias),
    "nothing": ("early.weight", with_linear, nn.Identity),
}
"""The parameter at fault, the module of most ranks, and that of the odd one."""


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", ["naive", "one_bucket"])
@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_ranks_with_different_models(name, mismatch):
    """Every rank raises the error: none waits, none averages other parameters."""
    parameter, usual, odd = MISMATCHES[mismatch]
    with pytest.raises(ValueError, match=r"ranks 0 and 1 hold different models") as caught:
        VARIANTS[name].wrap(odd() if rank() == 1 else usual())
    assert parameter in str(caught.value)
    assert_close("ranks still understand each other", Pair(name).wrapped.module.first.bias.grad, None)
