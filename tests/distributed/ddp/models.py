"""Variants of data parallel, models with exact arithmetic, and the comparison with one process.

Weights and inputs are small whole numbers and every mean is over a power of two, so all sums are exact in any order.
Gradients and weights of the ranks are compared bit by bit with those of one process that has the whole batch.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.parallel import DDP, FlatDDP, NaiveDDP
from tests.distributed.compare import assert_close, rank, recorded, world


class Variant(NamedTuple):
    wrap: Callable[[nn.Module], Any]
    overlaps: bool
    """True if it communicates during backward."""

    def all_reduces(self, parameters: int, dtypes: int) -> range:
        """Possible numbers of all-reduces in a step, for parameters of 28 bytes."""
        if self.wrap in (NaiveDDP, DDP):
            return range(parameters, parameters + 1)
        if self.wrap == VARIANTS["buckets"].wrap:
            return range(math.ceil(parameters / 3), math.ceil(parameters / 2) + dtypes)
        return range(dtypes, dtypes + 1)


VARIANTS = {
    "naive": Variant(NaiveDDP, False),
    "flat": Variant(FlatDDP, False),
    "overlapped": Variant(DDP, True),
    "buckets": Variant(partial(DDP, bucket_size_mb=64 / 2**20), True),  # two parameters of 28 bytes
    "one_bucket": Variant(partial(DDP, bucket_size_mb=100.0), True),
}
every_variant = pytest.mark.parametrize("name", VARIANTS)


def whole_numbers(module: nn.Module, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randint(-2, 3, p.shape, generator=generator))
    return module


def share(step: int, of_rank: int) -> Tensor:
    """The part of the batch of one rank."""
    generator = torch.Generator().manual_seed(100 * step + of_rank)
    return torch.randint(-2, 3, (2, 3), generator=generator).float()


def weigh(out: Tensor) -> Tensor:
    return (out * torch.arange(1, 1 + out.shape[-1], dtype=out.dtype)).sum(-1).mean()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


class Branches(nn.Module):
    """Uses one branch for even numbers, the other for odd ones, and a third never."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Linear(3, 2)
        self.unused = nn.Linear(3, 5)
        self.odd = nn.Linear(3, 2, bias=False)
        self.common = nn.Linear(2, 2)

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.common((self.odd if number % 2 else self.even)(x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 3, bias=False)
        self.middle = nn.Linear(3, 3)
        self.leave = nn.Linear(3, 3)
        self.leave.weight = self.enter.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.middle(self.middle(self.enter(x)).relu()))


Uses = list[tuple[int, float]]


class Parts(nn.Module):
    """A loss that is linear in each parameter: `uses` says which take part, in which order, and with which factor."""

    SHAPES = ((3,), (2, 2), (5,), (1,), (2, 3))

    def __init__(self, dtypes: Iterable[torch.dtype] = (torch.float32,)) -> None:
        super().__init__()
        pairs = zip(self.SHAPES, itertools.cycle(dtypes), strict=False)
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in pairs)

    def forward(self, uses: Uses) -> Tensor:
        loss = torch.zeros((), requires_grad=True) + 0.0  # a leaf: a loss without any parameter has a backward, too
        for number, factor in uses:
            loss = loss + (self.parts[number] * self.slope(number, factor)).sum().float()
        return loss

    def slope(self, number: int, factor: float) -> Tensor:
        """The gradient of one use."""
        p = self.parts[number]
        return (factor * torch.arange(1, 1 + p.numel()).reshape(p.shape)).to(p.dtype)


def plain_loss(module: nn.Module, step: int, of_rank: int) -> Tensor:
    return weigh(module(share(step, of_rank)))


def branch_loss(module: nn.Module, step: int, of_rank: int) -> Tensor:
    return weigh(module(share(step, of_rank), of_rank))


def double_loss(module: nn.Module, step: int, of_rank: int) -> Tensor:
    """For products of many weights, which are exact in float64."""
    return weigh(module(share(step, of_rank).double()))


class Pair:
    """One model twice: plain with the batch of all ranks, and wrapped with the batch of this one."""

    def __init__(
        self,
        name: str,
        make: Callable[[], nn.Module] = Net,
        loss: Callable[[nn.Module, int, int], Tensor] = plain_loss,
        wrap: Callable[[nn.Module], Any] | None = None,
    ):
        self.variant, self.loss = VARIANTS[name], loss
        self.plain = whole_numbers(make(), 0)
        self.wrapped = (wrap or self.variant.wrap)(whole_numbers(make(), rank()))  # rank 0's values count
        self.compare_weights("at the start")

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.plain.zero_grad(set_to_none)
        self.wrapped.zero_grad(set_to_none)

    def expect(self, step: int) -> None:
        """Backward of the plain model alone."""
        torch.stack([self.loss(self.plain, step, other) for other in range(world())]).mean().backward()

    def backward(self, step: int) -> None:
        self.loss(self.wrapped, step, rank()).backward()
        self.expect(step)

    def finish(self, when: str = "") -> None:
        self.wrapped.finish_gradient_synchronization()
        self.compare_gradients(when)

    def compare_gradients(self, when: str = "") -> None:
        for (name, p), other in zip(self.plain.named_parameters(), self.wrapped.parameters(), strict=True):
            assert_close(f"{when}: gradient of {name}", other.grad, p.grad)

    def compare_weights(self, when: str = "") -> None:
        for (name, p), other in zip(self.plain.named_parameters(), self.wrapped.parameters(), strict=True):
            assert_close(f"{when}: {name}", other.detach(), p.detach())

    def train(self, steps: int = 3, *, set_to_none: bool = True, before: Any = lambda step, module: None) -> None:
        """Steps of SGD; `before(step, module)` may change both models."""
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (self.plain, self.wrapped)]
        for step in range(steps):
            self.zero_grad(set_to_none)
            before(step, self.plain)
            before(step, self.wrapped.module)
            self.backward(step)
            self.finish(f"step {step}")
            for optimizer in optimizers:
                optimizer.step()
            self.compare_weights(f"step {step}")


class AllReduce(NamedTuple):
    elements: int
    asynchronous: bool


@contextmanager
def all_reduces() -> Iterator[list[tuple[str, AllReduce]]]:
    with recorded(all_reduce=lambda t, *_, async_op=False, **__: AllReduce(t.numel(), async_op)) as log:
        yield log


def wrapped_parts(name: str) -> tuple[Parts, Any]:
    return whole_numbers(Parts(), 0), VARIANTS[name].wrap(whole_numbers(Parts(), rank()))


def compare_parts(when: str, wrapped: Any, plain: Parts) -> None:
    for number, (found, expected) in enumerate(zip(wrapped.parameters(), plain.parameters(), strict=True)):
        assert_close(f"{when}: gradient {number}", found.grad, expected.grad)
