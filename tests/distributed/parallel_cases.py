"""What the ranks of the data-parallel tests do: sent to other processes by name, so all of it is at the top level.

Weights and inputs are small whole numbers and every mean is over a power of two: all sums are exact, in any order. So
what ranks find together is compared bit by bit with what one process finds for the whole batch.
"""

import contextlib
import copy
import gc
import itertools
import math
import os
import random
import re
import signal
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cs336_systems.parallel import DDP, FlatDDP, NaiveDDP


@dataclass(frozen=True)
class Variant:
    wrap: Callable[[nn.Module], Any]
    overlaps: bool
    """Whether it communicates during backward."""
    collectives: Callable[[int, int], Iterable[int]]
    """How many all-reduces a step may take, of so many equal parameters in so many dtypes."""


VARIANTS = {
    "naive": Variant(NaiveDDP, False, lambda parameters, dtypes: [parameters]),
    "flat": Variant(FlatDDP, False, lambda parameters, dtypes: [dtypes]),
    "each": Variant(DDP, True, lambda parameters, dtypes: [parameters]),
    # 64 bytes: of seven floats two fit in, and with a third it is full.
    "buckets": Variant(
        partial(DDP, bucket_size_mb=64 / 2**20),
        True,
        lambda parameters, dtypes: range(math.ceil(parameters / 3), math.ceil(parameters / 2) + dtypes),
    ),
    "bucket": Variant(partial(DDP, bucket_size_mb=100.0), True, lambda parameters, dtypes: [dtypes]),
}
"""The last has a bucket for the whole model."""


@dataclass
class Check:
    """Collects what is wrong: a rank that stopped at its first finding would leave the others waiting."""

    failures: list[str] = field(default_factory=list)
    made: int = 0
    kept: dict[str, list[Tensor | None]] = field(default_factory=dict)

    def true(self, what: str, condition: Any) -> None:
        self.made += 1
        if not condition:
            self.failures.append(what)

    def tensor(self, what: str, found: Tensor | None, expected: Tensor | None, tolerance: float = 0.0) -> None:
        if found is None or expected is None:
            good = found is expected
        else:
            good = (found.shape, found.dtype) == (expected.shape, expected.dtype) and torch.allclose(
                found, expected, rtol=tolerance, atol=tolerance, equal_nan=True
            )
        self.true(f"{what} is {found}, not {expected}", good)

    def parameters(self, when: str, found: nn.Module, expected: nn.Module, tolerance: float = 0.0) -> None:
        for (name, parameter), other in zip(expected.named_parameters(), found.parameters(), strict=True):
            self.tensor(f"{when}: {name}", other.detach(), parameter.detach(), tolerance)
        self.same_on_all_ranks(f"{when}: parameters", [parameter.detach() for parameter in found.parameters()])

    def gradients(self, when: str, found: nn.Module, expected: nn.Module, tolerance: float = 0.0) -> None:
        for (name, parameter), other in zip(expected.named_parameters(), found.parameters(), strict=True):
            self.tensor(f"{when}: gradient of {name}", other.grad, parameter.grad, tolerance)
        self.same_on_all_ranks(f"{when}: gradients", [parameter.grad for parameter in found.parameters()])

    def same_on_all_ranks(self, what: str, tensors: list[Tensor | None]) -> None:
        """To the bit; looked at by `settle`, for all of a case at once."""
        self.kept[what] = [None if tensor is None else tensor.clone() for tensor in tensors]

    def settle(self) -> None:
        everywhere: list[Any] = [None] * world()
        dist.all_gather_object(everywhere, self.kept)
        self.true(
            f"rank 0 compared {list(everywhere[0])}, this one {list(self.kept)}", [*everywhere[0]] == [*self.kept]
        )
        for what, tensors in self.kept.items():
            for number, (here, first) in enumerate(zip(tensors, everywhere[0].get(what, tensors), strict=True)):
                self.tensor(f"{what}, number {number}, unlike rank 0's:", here, first)


def rank() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


Case = Callable[[Variant, Check], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def run_cases(variant: str, names: list[str]) -> dict[str, list[str]]:
    """What is wrong, by case. An exception ends all of it: the other ranks are in a collective that will not come."""
    found = {}
    for name in names:
        check = Check()
        try:
            CASES[name](VARIANTS[variant], check)
            check.settle()
        except Exception as error:
            error.add_note(f"in the case {name!r}, after {check.failures}")
            raise
        found[name] = check.failures if check.made > 1 else ["nothing was checked"]
    return found


# -- models and training ----------------------------------------------------------------------------------------------


def whole_numbers(module: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))
    return module


ROWS = 2
"""Of the batch, for each rank."""


def share(step: int, of_rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + of_rank)
    return torch.randint(-2, 3, (ROWS, 3), generator=generator).float()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def weigh(out: Tensor) -> Tensor:
    return (out * torch.arange(1, 1 + out.shape[-1], dtype=out.dtype)).sum(-1).mean()


def plain_loss(module: nn.Module, step: int, of_rank: int) -> Tensor:
    return weigh(module(share(step, of_rank)))


def with_rank(module: nn.Module, step: int, of_rank: int) -> Tensor:
    """For modules that do something else on every rank."""
    return weigh(module(share(step, of_rank), of_rank))


def mean_loss(module: nn.Module, step: int, loss: Callable = plain_loss) -> Tensor:
    return torch.stack([loss(module, step, of_rank) for of_rank in range(world())]).mean()


def whole_batch(module: nn.Module, step: int, loss: Callable = plain_loss) -> Tensor:
    return weigh(module(torch.cat([share(step, of_rank) for of_rank in range(world())])))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.5)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.1)


def compare_training(
    variant: Variant,
    check: Check,
    make: Callable[[int], nn.Module],
    loss: Callable[[nn.Module, int, int], Tensor] = plain_loss,
    expected_loss: Callable[[nn.Module, int, Callable], Tensor] = mean_loss,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    steps: int = 3,
    tolerance: float = 0.0,
    set_to_none: bool = True,
    before: Callable[[int, nn.Module], None] = lambda step, module: None,
    wrap: Callable[[nn.Module], Any] | None = None,
) -> None:
    """Training with a wrapper beside training of a plain module, of which rank 0 has the weights to start from."""
    plain, module = make(0), make(rank())
    wrapped = (wrap or variant.wrap)(module)
    check.parameters("at the start", wrapped, plain)
    ours, theirs = optimizer(wrapped), optimizer(plain)
    for step in range(steps):
        when = f"step {step}"
        ours.zero_grad(set_to_none=set_to_none)
        theirs.zero_grad(set_to_none=set_to_none)
        before(step, module)
        before(step, plain)
        expected_loss(plain, step, loss).backward()
        loss(wrapped, step, rank()).backward()
        wrapped.finish_gradient_synchronization()
        check.gradients(when, wrapped, plain, tolerance)
        ours.step()
        theirs.step()
        check.parameters(when, wrapped, plain, tolerance)


def net(seed: int) -> nn.Module:
    return whole_numbers(Net(), seed)


class Parts(nn.Module):
    """A loss that is linear in each parameter: `uses` says which take part, in which order, and how much."""

    SHAPES = ((3,), (2, 2), (5,), (1,), (2, 3))

    def __init__(self, dtypes: Iterable[torch.dtype] = (torch.float32,)) -> None:
        super().__init__()
        pairs = zip(self.SHAPES, itertools.cycle(dtypes), strict=False)
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in pairs)

    def forward(self, uses: list[tuple[int, float]]) -> Tensor:
        # A leaf of its own: a loss without any parameter has a backward too.
        loss = torch.zeros((), requires_grad=True) + 0.0
        for number, factor in uses:
            loss = loss + (self.parts[number] * self.slope(number, factor)).sum().float()
        return loss

    def slope(self, number: int, factor: float) -> Tensor:
        """The gradient of one use."""
        parameter = self.parts[number]
        return (factor * torch.arange(1, 1 + parameter.numel()).reshape(parameter.shape)).to(parameter.dtype)


def parts(seed: int) -> Parts:
    return whole_numbers(Parts(), seed)


def step_of(wrapped: Any, uses: list[tuple[int, float]]) -> None:
    wrapped(uses).backward()
    wrapped.finish_gradient_synchronization()


class Counter:
    """Counts the calls of all_reduce."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    @property
    def calls(self) -> list[tuple[int, bool]]:
        """Elements, and whether the call was asynchronous."""
        return [entry for entry in self.log if isinstance(entry, tuple)]

    def taken(self) -> int:
        number = len(self.calls)
        self.log.clear()
        return number


@contextlib.contextmanager
def counted() -> Iterator[Counter]:
    counter, original = Counter(), dist.all_reduce

    def all_reduce(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        counter.log.append((tensor.numel(), options.get("async_op", False)))
        return original(tensor, *arguments, **options)

    dist.all_reduce = all_reduce
    try:
        yield counter
    finally:
        dist.all_reduce = original


# -- training ---------------------------------------------------------------------------------------------------------


@case
def sgd_on_the_whole_batch(variant: Variant, check: Check) -> None:
    compare_training(variant, check, net, expected_loss=whole_batch, steps=4)


class Smooth(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x / 3).tanh()).sin()


def smooth(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Smooth()


@case
def adamw_on_the_whole_batch(variant: Variant, check: Check) -> None:
    compare_training(variant, check, smooth, expected_loss=whole_batch, optimizer=adamw, steps=5, tolerance=1e-6)


@case
def gradients_set_to_zero(variant: Variant, check: Check) -> None:
    compare_training(variant, check, net, set_to_none=False, steps=4)


@case
def arguments_and_results_are_the_modules(variant: Variant, check: Check) -> None:
    class Talkative(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((2,), 3.0))

        def forward(self, x: Tensor, *more: Any, sign: int = 1, **options: Any) -> dict[str, Any]:
            return {"out": (self.scale * x * sign, more), "options": options}

    module = Talkative()
    wrapped = variant.wrap(module)
    check.true("it is a Module", isinstance(wrapped, nn.Module))
    check.true("it has the module", wrapped.module is module)
    result = wrapped(torch.tensor([1.0, 2.0]), "more", 5, sign=-1, option="yes")
    check.tensor("the output", result["out"][0], torch.tensor([-3.0, -6.0]))
    check.true(f"what else was given: {result}", result["out"][1] == ("more", 5))
    check.true(f"options: {result}", result["options"] == {"option": "yes"})
    wrapped.eval()
    check.true("eval reaches the module", not module.training)


class Everything(nn.Module):
    """Each kind of tensor that has to be sent at the start."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def numbers(*shape: int) -> Tensor:
            return torch.randint(0, 100, shape, generator=generator)

        self.singles = nn.Parameter(numbers(3).float())
        self.doubles = nn.Parameter(numbers(2, 2).double())
        self.brains = nn.Parameter(numbers(4).bfloat16())
        self.halves = nn.Parameter(numbers(1).half())
        self.transposed = nn.Parameter(numbers(3, 2).float().t())
        self.frozen = nn.Parameter(numbers(2).float(), requires_grad=False)
        self.empty = nn.Parameter(numbers(0, 3).float())
        self.scalar = nn.Parameter(numbers().float())
        self.register_buffer("mean", numbers(3).double())
        self.register_buffer("steps", numbers())
        self.register_buffer("mask", numbers(5) % 2 == 0)
        self.register_buffer("table", numbers(2).float().reshape(1, 2).t(), persistent=False)
        self.register_buffer("nothing", None)


@case
def starts_from_rank_0(variant: Variant, check: Check) -> None:
    module, expected = Everything(rank()), Everything(0)
    given = dict(module.named_parameters())
    wrapped = variant.wrap(module)
    for kind in ("named_parameters", "named_buffers"):
        theirs = dict(getattr(expected, kind)())
        check.true("there is something to compare", len(theirs) >= 4)
        for name, tensor in getattr(wrapped.module, kind)():
            check.tensor(name, tensor.detach(), theirs[name].detach())
            check.true(f"strides of {name}", tensor.stride() == theirs[name].stride())
    for name, parameter in wrapped.module.named_parameters():
        check.true(f"{name} is another object now", parameter is given[name])
        check.true(f"{name} has a gradient", parameter.grad is None)
    check.true("frozen stays frozen", not wrapped.module.frozen.requires_grad)


@case
def state_dict_is_the_modules(variant: Variant, check: Check) -> None:
    wrapped, plain = variant.wrap(net(0)), net(7)
    keys = ["first.weight", "first.bias", "second.weight", "second.bias"]
    check.true(f"keys {list(wrapped.state_dict())}", list(wrapped.state_dict()) == keys)
    check.true("the tensors are the module's", wrapped.state_dict()["first.bias"].equal(wrapped.module.first.bias))
    answer = wrapped.load_state_dict(plain.state_dict())
    check.true(f"loading: {answer}", not answer.missing_keys and not answer.unexpected_keys)
    check.parameters("loaded", wrapped, plain)
    copied = net(3)
    copied.load_state_dict(wrapped.state_dict())
    check.parameters("loaded into a plain one", wrapped, copied)
    plain_loss(wrapped, 0, rank()).backward()
    wrapped.finish_gradient_synchronization()
    mean_loss(plain, 0).backward()
    check.gradients("after loading", wrapped, plain)
    try:
        wrapped.load_state_dict({f"module.{key}": tensor for key, tensor in plain.state_dict().items()})
        check.true("a prefix is refused", False)
    except RuntimeError as error:
        check.true(f"a prefix: {error}", "module.first.weight" in str(error))


# -- parameters of all kinds ------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Even ranks use one branch, odd ranks the other, nobody the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Linear(3, 2)
        self.nobody = nn.Linear(3, 5)
        self.odd = nn.Linear(3, 2, bias=False)
        self.common = nn.Linear(2, 2)

    def forward(self, x: Tensor, of_rank: int) -> Tensor:
        return self.common((self.odd if of_rank % 2 else self.even)(x))


def branches(seed: int) -> nn.Module:
    return whole_numbers(Branches(), seed)


@case
def unused_parameters(variant: Variant, check: Check) -> None:
    compare_training(variant, check, branches, with_rank)
    compare_training(variant, check, branches, with_rank, set_to_none=False)


@case
def unused_by_other_ranks_in_each_step(variant: Variant, check: Check) -> None:
    def loss(module: nn.Module, step: int, of_rank: int) -> Tensor:
        return weigh(module(share(step, of_rank), of_rank + step))

    compare_training(variant, check, branches, loss, steps=4)


@case
def each_rank_in_its_own_order(variant: Variant, check: Check) -> None:
    """Gradients become ready in another order on every rank, and of other sizes."""
    plain, wrapped = parts(0), variant.wrap(parts(rank()))

    def uses(of_rank: int) -> list[tuple[int, float]]:
        order = list(range(5))
        random.Random(of_rank).shuffle(order)
        return [(number, of_rank + 1.0) for number in order]

    for step in range(3):
        step_of(wrapped, uses(rank()))
        (sum(plain(uses(of_rank)) for of_rank in range(world())) / world()).backward()
        check.gradients(f"step {step}", wrapped, plain)


@case
def rank_without_any_parameter_in_its_loss(variant: Variant, check: Check) -> None:
    for calls_backward in (True, False):
        plain, wrapped = parts(0), variant.wrap(parts(rank()))
        for step in range(2):
            loss = wrapped([(0, 2.0), (3, float(rank()))] if rank() else [])
            if rank() or calls_backward:
                loss.backward()
            wrapped.finish_gradient_synchronization()
            theirs = [plain([(0, 2.0), (3, float(other))]) for other in range(1, world())]
            if theirs:
                (torch.stack(theirs).sum() / world()).backward()
            check.gradients(f"backward on rank 0 {calls_backward}, step {step}", wrapped, plain)


@case
def nobody_calls_backward(variant: Variant, check: Check) -> None:
    plain, wrapped = net(0), variant.wrap(net(rank()))
    wrapped.finish_gradient_synchronization()
    check.gradients("before any forward", wrapped, plain)
    plain_loss(wrapped, 0, rank())
    wrapped.finish_gradient_synchronization()
    check.gradients("after a forward alone", wrapped, plain)
    plain_loss(wrapped, 1, rank()).backward()
    wrapped.finish_gradient_synchronization()
    mean_loss(plain, 1).backward()
    check.gradients("after a step", wrapped, plain)


@case
def frozen_at_the_start(variant: Variant, check: Check) -> None:
    def make(seed: int) -> nn.Module:
        module = net(seed)
        module.first.weight.requires_grad_(False)
        module.second.bias.requires_grad_(False)
        return module

    compare_training(variant, check, make)


@case
def frozen_and_unfrozen_on_the_way(variant: Variant, check: Check) -> None:
    def make(seed: int) -> nn.Module:
        module = net(seed)
        module.first.bias.requires_grad_(False)
        return module

    def before(step: int, module: nn.Module) -> None:
        module.first.bias.requires_grad_(step in (1, 2, 5))
        module.second.weight.requires_grad_(step not in (2, 3))

    compare_training(variant, check, make, before=before, steps=6, tolerance=1e-6)


@case
def everything_frozen(variant: Variant, check: Check) -> None:
    wrapped, plain = variant.wrap(net(rank()).requires_grad_(False)), net(0)
    with counted() as counter:
        check.tensor("the output", wrapped(share(0, 0)), plain(share(0, 0)).detach())
        wrapped.finish_gradient_synchronization()
        check.true(f"sent {counter.calls}", not counter.calls)
    check.gradients("afterwards", wrapped, plain)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 3, bias=False)
        self.middle = nn.Linear(3, 3)
        self.leave = nn.Linear(3, 3)
        self.leave.weight = self.enter.weight

    def forward(self, x: Tensor) -> Tensor:
        # The one in the middle is used twice.
        return self.leave(self.middle(self.middle(self.enter(x)).relu()))


@case
def tied_weights_and_modules_used_twice(variant: Variant, check: Check) -> None:
    def make(seed: int) -> nn.Module:
        # Powers of weights: in float64 they stay exact.
        return whole_numbers(Tied(), seed).double()

    def loss(module: nn.Module, step: int, of_rank: int) -> Tensor:
        return weigh(module(share(step, of_rank).double()))

    compare_training(variant, check, make, loss, steps=2)


@case
def mixed_dtypes(variant: Variant, check: Check) -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

    def make(seed: int) -> nn.Module:
        return whole_numbers(Parts(dtypes), seed)

    def loss(module: nn.Module, step: int, of_rank: int) -> Tensor:
        # Each dtype is missing somewhere at some time.
        return module([(number, of_rank - 1.0) for number in range(5) if (number + step + of_rank) % 3])

    compare_training(variant, check, make, loss, steps=4)


@case
def transposed_parameters(variant: Variant, check: Check) -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 3).t())
            self.square = nn.Parameter(torch.zeros(2, 2).t())
            self.image = nn.Parameter(torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight @ self.square + (self.image.sum((2, 3)) * torch.arange(3)).sum(1)

    def make(seed: int) -> nn.Module:
        return whole_numbers(Transposed(), seed)

    check.true("they are not contiguous", not any(parameter.is_contiguous() for parameter in make(0).parameters()))
    compare_training(variant, check, make)
    compare_training(variant, check, make, set_to_none=False)


@case
def parameters_of_no_elements(variant: Variant, check: Check) -> None:
    class Hollow(Net):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.idle = nn.Parameter(torch.zeros(0))
            self.scalar = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + (x @ self.empty.t()).sum() + self.scalar

    compare_training(variant, check, lambda seed: whole_numbers(Hollow(), seed))


class Counting(nn.Module):
    """Its buffers say which forwards they have seen, on which rank."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.full((2,), 10.0 * seed))
        self.register_buffer("steps", torch.tensor(100 * seed))
        self.register_buffer("wide", torch.tensor(0.5 * seed, dtype=torch.float64))

    def forward(self, x: Tensor, amount: int) -> Tensor:
        for buffer in self.buffers():
            buffer.add_(amount)
        return (x * self.weight).sum(-1)


@case
def buffers_come_from_rank_0(variant: Variant, check: Check) -> None:
    wrapped, mine = variant.wrap(Counting(1 + rank())), rank() + 1
    starts = [10.0, 100, 0.5]

    def compare(when: str, added: int) -> None:
        for (name, buffer), start in zip(wrapped.module.named_buffers(), starts, strict=True):
            check.tensor(f"{when}: {name}", buffer, torch.full_like(buffer, start + added))

    compare("at the start", 0)
    wrapped(share(0, rank()), mine)
    compare("after the first", mine)
    wrapped(share(0, rank()), mine)
    compare("after the second", 1 + mine)
    with wrapped.no_sync():
        wrapped(share(0, rank()), mine)
    compare("without synchronisation", 1 + 2 * mine)
    wrapped(share(0, rank()), mine)
    compare("with it again", 3 + mine)


@case
def batch_norm_keeps_rank_0s_statistics(variant: Variant, check: Check) -> None:
    def make() -> nn.Module:
        return nn.Sequential(whole_numbers(nn.Linear(3, 2), 0), nn.BatchNorm1d(2))

    first, wrapped = make(), variant.wrap(make())
    for step in range(3):
        plain_loss(first, step, 0)
        plain_loss(wrapped, step, rank()).backward()
        wrapped.finish_gradient_synchronization()
    wrapped.eval()
    wrapped(share(0, 0))
    for name, buffer in wrapped.module.named_buffers():
        check.tensor(name, buffer, dict(first.named_buffers())[name])
    check.true("three batches were counted", wrapped.module[1].num_batches_tracked == 3)


# -- gradients that add up --------------------------------------------------------------------------------------------


@case
def several_backwards_before_one_finish(variant: Variant, check: Check) -> None:
    plain, wrapped = net(0), variant.wrap(net(rank()))
    for step in range(3):
        plain.zero_grad()
        wrapped.zero_grad()
        for part in range(3):
            plain_loss(wrapped, 10 * step + part, rank()).backward()
            mean_loss(plain, 10 * step + part).backward()
        wrapped.finish_gradient_synchronization()
        check.gradients(f"in turn, step {step}", wrapped, plain)
        plain.zero_grad()
        wrapped.zero_grad()
        for loss in [plain_loss(wrapped, 10 * step + part, rank()) for part in range(3)]:
            loss.backward()
        for part in range(3):
            mean_loss(plain, 10 * step + part).backward()
        wrapped.finish_gradient_synchronization()
        check.gradients(f"forwards first, step {step}", wrapped, plain)


@case
def twice_through_one_graph(variant: Variant, check: Check) -> None:
    plain, wrapped = net(0), variant.wrap(net(rank()))
    loss, expected = plain_loss(wrapped, 0, rank()), mean_loss(plain, 0)
    for _ in range(2):
        loss.backward(retain_graph=True)
        expected.backward(retain_graph=True)
    wrapped.finish_gradient_synchronization()
    check.gradients("twice", wrapped, plain)


@case
def two_steps_after_two_forwards(variant: Variant, check: Check) -> None:
    """No forward comes between the first finish and the second backward."""
    plain, wrapped = net(0), variant.wrap(net(rank()))
    for step, loss in enumerate([plain_loss(wrapped, step, rank()) for step in range(2)]):
        loss.backward()
        wrapped.finish_gradient_synchronization()
        mean_loss(plain, step).backward()
        check.gradients(f"step {step}", wrapped, plain)


@case
def gradients_that_are_not_zeroed(variant: Variant, check: Check) -> None:
    plain, wrapped = branches(0), variant.wrap(branches(rank()))
    for step in range(4):
        with_rank(wrapped, step, rank()).backward()
        wrapped.finish_gradient_synchronization()
        mean_loss(plain, step, with_rank).backward()
        check.gradients(f"step {step}", wrapped, plain)
        if step == 1:  # as by clipping
            for parameter in itertools.chain(plain.parameters(), wrapped.parameters()):
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)


@case
def finish_twice(variant: Variant, check: Check) -> None:
    plain, wrapped = net(0), variant.wrap(net(rank()))
    for step in range(2):
        plain_loss(wrapped, step, rank()).backward()
        wrapped.finish_gradient_synchronization()
        # The second does not even notice that ranks have gone their own ways since.
        for parameter in wrapped.parameters():
            parameter.grad.add_(rank())
        with counted() as counter:
            wrapped.finish_gradient_synchronization()
        check.true(f"the second sent {counter.calls}", not counter.calls)
        for parameter in wrapped.parameters():
            parameter.grad.sub_(rank())
        mean_loss(plain, step).backward()
        check.gradients(f"step {step}", wrapped, plain)


@case
def validation_between_backward_and_finish(variant: Variant, check: Check) -> None:
    plain, wrapped = net(0), variant.wrap(net(rank()))
    for step in range(2):
        plain_loss(wrapped, step, rank()).backward()
        with torch.no_grad():
            wrapped(share(9, rank()))
        wrapped.finish_gradient_synchronization()
        mean_loss(plain, step).backward()
        check.gradients(f"step {step}", wrapped, plain)


@case
def gradients_that_are_not_accumulated(variant: Variant, check: Check) -> None:
    """torch.autograd.grad leaves .grad alone, and so do we."""
    plain, wrapped = net(0), variant.wrap(net(rank()))
    found = torch.autograd.grad(plain_loss(wrapped, 0, rank()), list(wrapped.parameters()))
    expected = torch.autograd.grad(plain_loss(plain, 0, rank()), list(plain.parameters()))
    for number, pair in enumerate(zip(found, expected, strict=True)):
        check.tensor(f"local gradient {number}", *pair)
    wrapped.finish_gradient_synchronization()
    check.gradients("nothing", wrapped, plain)
    plain_loss(wrapped, 1, rank()).backward()
    wrapped.finish_gradient_synchronization()
    mean_loss(plain, 1).backward()
    check.gradients("a step", wrapped, plain)


@case
def without_synchronisation(variant: Variant, check: Check) -> None:
    plain, wrapped = net(0), variant.wrap(net(rank()))
    for step, last_is_synchronised in enumerate((True, False, True)):
        local = net(0)
        wrapped.zero_grad()
        plain.zero_grad()
        with counted() as counter:
            with wrapped.no_sync():
                for part in range(2):
                    plain_loss(wrapped, 10 * step + part, rank()).backward()
                    plain_loss(local, 10 * step + part, rank()).backward()
                    mean_loss(plain, 10 * step + part).backward()
            check.true(f"sent {counter.calls}", not counter.calls)
            for (name, found), expected in zip(wrapped.module.named_parameters(), local.parameters(), strict=True):
                check.tensor(f"before the average: gradient of {name}", found.grad, expected.grad)
            if last_is_synchronised:
                plain_loss(wrapped, 10 * step + 2, rank()).backward()
                mean_loss(plain, 10 * step + 2).backward()
            wrapped.finish_gradient_synchronization()
            check.true("nothing was sent", counter.calls)
        check.gradients(f"step {step}", wrapped, plain)


@case
def backward_inside_decides(variant: Variant, check: Check) -> None:
    """Not where the forward was."""
    plain, wrapped = net(0), variant.wrap(net(rank()))
    outside = plain_loss(wrapped, 0, rank())
    with counted() as counter, wrapped.no_sync():
        outside.backward()
        inside = plain_loss(wrapped, 1, rank())
    check.true(f"sent {counter.calls}", not counter.calls)
    inside.backward()
    wrapped.finish_gradient_synchronization()
    mean_loss(plain, 0).backward()
    mean_loss(plain, 1).backward()
    check.gradients("afterwards", wrapped, plain)


@case
def used_only_without_synchronisation(variant: Variant, check: Check) -> None:
    """Of rank 0 the last backward does not touch what an earlier one has left to be averaged."""
    plain, wrapped = parts(0), variant.wrap(parts(rank()))
    for step in range(2):
        with wrapped.no_sync():
            wrapped([(1, 2.0), (4, 1.0)] if rank() == 0 else [(2, 4.0)]).backward()
        wrapped([(0, float(rank()))]).backward()
        wrapped.finish_gradient_synchronization()
        total = plain([(1, 2.0), (4, 1.0)])
        for other in range(1, world()):
            total = total + plain([(2, 4.0), (0, float(other))])
        (total + plain([(0, 0.0)])).div(world()).backward()
        check.gradients(f"step {step}", wrapped, plain)


@case
def without_synchronisation_after_a_synchronised_one(variant: Variant, check: Check) -> None:
    """What was sent already grows on one rank only: finish has to average it again on all."""
    plain, wrapped = parts(0), variant.wrap(parts(rank()))
    everything = [(number, 2.0) for number in range(5)]
    for step, first in enumerate([[[], *[[(4, 2.0), (1, 1.0)]] * (world() - 1)], [everything] * world()]):
        then = [[(0, 8.0)], *[[(4, 4.0)]] * (world() - 1)]
        wrapped(first[rank()]).backward()
        with wrapped.no_sync():
            wrapped(then[rank()]).backward()
        wrapped.finish_gradient_synchronization()
        (sum(plain(uses) for uses in first + then) / world()).backward()
        check.gradients(f"step {step}", wrapped, plain)


@case
def no_sync_ends_with_an_exception(variant: Variant, check: Check) -> None:
    plain, wrapped = net(0), variant.wrap(net(rank()))
    try:
        with wrapped.no_sync():
            raise KeyError("from inside")
    except KeyError as error:
        check.true("the same exception", "from inside" in str(error))
    with counted() as counter:
        plain_loss(wrapped, 0, rank()).backward()
        check.true("communicates in backward again", bool(counter.calls) == variant.overlaps)
        wrapped.finish_gradient_synchronization()
        check.true("communicates again", counter.calls)
    mean_loss(plain, 0).backward()
    check.gradients("afterwards", wrapped, plain)


@case
def no_sync_inside_no_sync(variant: Variant, check: Check) -> None:
    plain, wrapped = net(0), variant.wrap(net(rank()))
    with counted() as counter, wrapped.no_sync():
        with wrapped.no_sync():
            plain_loss(wrapped, 0, rank()).backward()
        plain_loss(wrapped, 1, rank()).backward()
        check.true(f"sent {counter.calls}", not counter.calls)
    wrapped.finish_gradient_synchronization()
    mean_loss(plain, 0).backward()
    mean_loss(plain, 1).backward()
    check.gradients("afterwards", wrapped, plain)


@case
def random_walk(variant: Variant, check: Check) -> None:
    """Any parameters in any order on any rank, several backwards with and without synchronisation, gradients kept or
    zeroed or dropped: the sum of the means. Only where several backwards of a step communicate do ranks use the same
    parameters in the same order, as that is all they are promised for."""
    plan = random.Random(world())  # the same on all ranks
    wrapped = variant.wrap(parts(rank()))
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
        done = []
        # Those without synchronisation come first, as in training; the other order has a case of its own.
        quiet_ones = sorted((plan.random() < 0.4 for _ in range(plan.randint(1, 3))), reverse=True)
        for quietly in quiet_ones:
            chosen = [plan.sample(range(count), plan.randint(0, count)) for _ in range(world())]
            if quiet_ones.count(False) > 1:
                chosen = chosen[:1] * world()
            uses = [[(number, float(plan.randint(-3, 3))) for number in numbers] for numbers in chosen]
            with wrapped.no_sync() if quietly else contextlib.nullcontext():
                wrapped(uses[rank()]).backward()
            done.append((quietly, uses))
            for number, factor in itertools.chain(*uses):
                more = wrapped.module.slope(number, factor) / world()
                before = expected[number]
                expected[number] = more if before is None else before + more
        wrapped.finish_gradient_synchronization()
        for number, parameter in enumerate(wrapped.module.parts):
            check.tensor(f"step {step}, after {done}: {number}", parameter.grad, expected[number])
        check.same_on_all_ranks(f"step {step}", [parameter.grad for parameter in wrapped.parameters()])


# -- autograd ---------------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Both blocks under a checkpoint, the second one twice."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 3)
        self.one = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.two = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in (self.one, self.two, self.two):
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@case
def activation_checkpointing(variant: Variant, check: Check) -> None:
    def loss(module: nn.Module, step: int, of_rank: int) -> Tensor:
        return weigh(module(share(step, of_rank).double()))

    for reentrant in (False, True):
        plain = whole_numbers(Checkpointed(None), 0).double()
        wrapped = variant.wrap(whole_numbers(Checkpointed(reentrant), rank()).double())
        for step in range(3):
            plain.zero_grad()
            wrapped.zero_grad()
            if step == 2:
                with wrapped.no_sync():
                    loss(wrapped, 7, rank()).backward()
                mean_loss(plain, 7, loss).backward()
            loss(wrapped, step, rank()).backward()
            wrapped.finish_gradient_synchronization()
            mean_loss(plain, step, loss).backward()
            check.gradients(f"reentrant {reentrant}, step {step}", wrapped, plain)
        largest = max(parameter.grad.abs().max() for parameter in plain.parameters())
        check.true("there is a gradient", largest > 0)


@case
def nan_reaches_all(variant: Variant, check: Check) -> None:
    def loss(module: nn.Module, step: int, of_rank: int) -> Tensor:
        bad = step == 1 and of_rank == world() - 1
        return plain_loss(module, step, of_rank) * (math.nan if bad else 1.0)

    plain, wrapped = net(0), variant.wrap(net(rank()))
    for step in range(3):
        plain.zero_grad()
        wrapped.zero_grad(set_to_none=step == 1)
        loss(wrapped, step, rank()).backward()
        wrapped.finish_gradient_synchronization()
        mean_loss(plain, step, loss).backward()
        check.gradients(f"step {step}", wrapped, plain)
        isnan = [bool(parameter.grad.isnan().any()) for parameter in wrapped.parameters()]
        check.true(f"step {step}: NaN in {isnan}", isnan == [step == 1] * 4)


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, now: bool) -> Tensor:
        ctx.now = now
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.now:
            raise ArithmeticError("backward broke")
        return gradient, None


class Fragile(Net):
    """Its backward can break between its two layers. A buffer has forwards communicate too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.tensor(0))

    def forward(self, x: Tensor, breaks: bool) -> Tensor:
        self.forwards.add_(1)
        return self.second(Breaks.apply(self.first(x).relu(), breaks))


def fragile(seed: int) -> nn.Module:
    return whole_numbers(Fragile(), seed)


def fragile_loss(module: nn.Module, step: int, of_rank: int, breaks: bool = False) -> Tensor:
    return weigh(module(share(step, of_rank), breaks))


def broken_backward(wrapped: nn.Module, step: int, check: Check) -> None:
    try:
        fragile_loss(wrapped, step, rank(), breaks=True).backward()
        check.true("backward did not break", False)
    except ArithmeticError as error:
        check.true(f"error {error}", "backward broke" in str(error))


def good_step(wrapped: Any, plain: nn.Module, step: int, check: Check, dropped: bool = False) -> None:
    """With gradients zeroed beforehand, unless the wrapper was to drop them."""
    plain.zero_grad()
    if not dropped:
        wrapped.zero_grad()
    loss = fragile_loss(wrapped, step, rank())
    if dropped:
        gradients = [parameter.grad for parameter in wrapped.parameters()]
        check.true(f"step {step}: forward left {gradients}", gradients == [None] * len(gradients))
    loss.backward()
    wrapped.finish_gradient_synchronization()
    mean_loss(plain, step, fragile_loss).backward()
    check.gradients(f"step {step}", wrapped, plain)
    with torch.no_grad():
        for parameter in itertools.chain(plain.parameters(), wrapped.parameters()):
            parameter.sub_(parameter.grad / 4)
    check.parameters(f"step {step}", wrapped, plain)


@case
def backward_breaks_on_all_ranks(variant: Variant, check: Check) -> None:
    plain, wrapped = fragile(0), variant.wrap(fragile(rank()))
    broken_backward(wrapped, 0, check)
    good_step(wrapped, plain, 1, check, dropped=True)
    good_step(wrapped, plain, 2, check)
    broken_backward(wrapped, 3, check)  # on top of gradients of the step before
    broken_backward(wrapped, 3, check)
    good_step(wrapped, plain, 4, check, dropped=True)
    broken_backward(wrapped, 5, check)
    wrapped.zero_grad(set_to_none=False)
    good_step(wrapped, plain, 6, check, dropped=True)
    good_step(wrapped, plain, 7, check)


@case
def backward_breaks_on_one_rank(variant: Variant, check: Check) -> None:
    if world() == 1:
        check.true("then it is the case before", True)
        return
    plain, wrapped = fragile(0), variant.wrap(fragile(rank()))
    broke = None
    for step, breaking in enumerate((None, world() - 1, None, 0, None)):
        if breaking is None:
            good_step(wrapped, plain, step, check, dropped=rank() == broke)
            continue
        broke = breaking
        plain.zero_grad()
        wrapped.zero_grad()
        mean_loss(plain, step, fragile_loss).backward()
        if rank() == broke:
            broken_backward(wrapped, step, check)
            continue
        fragile_loss(wrapped, step, rank()).backward()
        wrapped.finish_gradient_synchronization()
        spoiled = 0
        for (name, found), expected in zip(wrapped.module.named_parameters(), plain.parameters(), strict=True):
            isnan = found.grad is not None and bool(found.grad.isnan().all())
            spoiled += isnan
            if not isnan:  # sent before it broke, perhaps
                check.tensor(f"step {step}: gradient of {name}", found.grad, expected.grad)
        check.true(f"step {step}: {spoiled} gradients are NaN", spoiled >= 2)


@case
def sparse_gradients_are_refused(variant: Variant, check: Check) -> None:
    module = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 2))
    try:
        wrapped = variant.wrap(module)
        weigh(wrapped(torch.tensor([1, 3]))).backward()
        wrapped.finish_gradient_synchronization()
        check.true("a sparse gradient was taken", False)
    except ValueError as error:
        check.true(f"the error says {error}", "sparse" in str(error))


# -- what is sent, and when -------------------------------------------------------------------------------------------


class Equal(nn.Module):
    """A chain of parameters of seven floats, and perhaps as many of doubles."""

    def __init__(self, number: int, doubles: int = 0) -> None:
        super().__init__()
        self.chain = nn.ParameterList(
            nn.Parameter(torch.ones(7, dtype=torch.float64 if i < doubles else torch.float32)) for i in range(number)
        )
        self.frozen = nn.Parameter(torch.ones(1000), requires_grad=False)

    def forward(self, x: Tensor, watch: Callable[[int], None] | None = None) -> Tensor:
        for number, parameter in enumerate(self.chain):
            x = x * parameter.float() + self.frozen[:7]
            if watch:
                # Called when the gradient of this parameter is about to be made.
                x.register_hook(lambda gradient, number=number: watch(number))
        return x.sum()


@case
def number_of_collectives(variant: Variant, check: Check) -> None:
    for number, doubles in ((6, 0), (6, 2), (1, 0)):
        wrapped = variant.wrap(Equal(number, doubles))
        allowed = list(variant.collectives(number, 2 if doubles else 1))
        with counted() as counter:
            for step in range(3):
                if step == 1:
                    with wrapped.no_sync():
                        wrapped(torch.ones(7)).backward()
                    check.true(f"{counter.calls} without synchronisation", not counter.calls)
                wrapped(torch.ones(7)).backward()
                wrapped.finish_gradient_synchronization()
                sent = sum(size for size, _ in counter.calls)
                check.true(f"{sent} elements of {number} parameters", 7 * number <= sent < 1000)
                taken = counter.taken()
                check.true(f"{taken} for {number} parameters, {doubles} doubles: not in {allowed}", taken in allowed)


@case
def collectives_of_tied_weights(variant: Variant, check: Check) -> None:
    if variant.wrap not in (NaiveDDP, DDP):
        check.true("buckets of other sizes", True)
        return
    wrapped = variant.wrap(whole_numbers(Tied(), 0))
    with counted() as counter:
        plain_loss(wrapped, 0, rank()).backward()
        wrapped.finish_gradient_synchronization()
    check.true(f"{counter.calls} for four parameters", len(counter.calls) == 4)


@case
def overlap(variant: Variant, check: Check) -> None:
    number = 8
    wrapped = variant.wrap(Equal(number))
    for step in range(3):
        with counted() as counter:
            loss = wrapped(torch.ones(7), counter.log.append)
            counter.log.clear()
            loss.backward()
            log, during = list(counter.log), len(counter.calls)
            wrapped.finish_gradient_synchronization()
        if not variant.overlaps:
            check.true(f"step {step}: {log} during backward", not during)
            continue
        check.true(f"step {step}: {counter.calls} are not all asynchronous", all(later for _, later in counter.calls))
        check.true(f"step {step}: only {during} of {counter.log} before the end", during == len(counter.calls))
        first = next(place for place, entry in enumerate(log) if isinstance(entry, tuple))
        if variant.collectives(number, 1) != [1]:
            check.true(f"step {step}: the first of {log} comes late", first < log.index(number // 2))


@case
def smallest_buckets(variant: Variant, check: Check) -> None:
    """One parameter each, the last registered first, whatever their gradients' order."""
    if variant.wrap is not DDP:  # once is enough
        check.true("only the size matters", True)
        return
    wrapped = DDP(parts(rank()), bucket_size_mb=1e-6)
    for order in (range(5), reversed(range(5))):
        with counted() as counter:
            step_of(wrapped, [(number, 1.0) for number in order])
        sizes = [size for size, _ in counter.calls]
        extra = sizes[0] - 6  # something may travel along
        check.true(f"sizes {sizes} are not in reverse", [size - extra for size in sizes] == [6, 1, 5, 4, 3])


@case
def bucket_sizes_that_make_no_sense(variant: Variant, check: Check) -> None:
    for size in (0, 0.0, -1.0, -math.inf, math.nan):
        try:
            DDP(net(0), bucket_size_mb=size)
            check.true(f"{size} was taken", False)
        except ValueError as error:
            check.true(f"{size}: {error}", "bucket" in str(error))


# -- ranks that differ ------------------------------------------------------------------------------------------------


def with_linear(*, rows: int = 3, bias: bool = True, extra: bool = False) -> nn.Module:
    module = nn.Module()
    module.early = nn.Linear(2, 2)
    module.odd = nn.Linear(2, rows, bias=bias)
    if extra:
        module.surplus = nn.Parameter(torch.zeros(2))
    return module


def changed(change: Callable[[nn.Module], Any]) -> nn.Module:
    module = with_linear()
    change(module)
    return module


def set_weight(weight: Tensor, module: nn.Module) -> None:
    module.odd.weight = nn.Parameter(weight)


MISMATCHES: dict[str, tuple[str, Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "one more": ("surplus", with_linear, partial(with_linear, extra=True)),
    "one less": ("odd.bias", with_linear, partial(with_linear, bias=False)),
    "shape": ("odd.weight", with_linear, partial(with_linear, rows=4)),
    "transposed, another shape": (
        "odd.weight",
        with_linear,
        partial(changed, partial(set_weight, torch.zeros(3, 2).t())),
    ),
    "transposed, the same shape": (
        "odd.weight",
        partial(changed, partial(set_weight, torch.zeros(3, 3))),
        partial(changed, partial(set_weight, torch.zeros(3, 3).t())),
    ),
    "another number of dimensions": (
        "odd.weight",
        with_linear,
        partial(changed, partial(set_weight, torch.zeros(6))),
    ),
    "dtype": ("odd.weight", with_linear, partial(changed, lambda module: module.odd.double())),
    "frozen": ("odd.bias", with_linear, partial(changed, lambda module: module.odd.bias.requires_grad_(False))),
    "nothing at all": ("early.weight", with_linear, nn.Identity),
}
"""Which parameter is at fault, the module of all ranks but one, and that one's."""


@case
def ranks_that_do_not_fit(variant: Variant, check: Check) -> None:
    """Told to every rank, at once. That ranks still understand each other is for the next case to show."""
    odd_one = world() // 2
    for name, (parameter, usual, odd) in MISMATCHES.items():
        module = odd() if rank() == odd_one else usual()
        started = time.monotonic()
        try:
            variant.wrap(module)
            check.true(f"{name}: accepted", world() == 1)
        except ValueError as error:
            said = re.search(rf"\branks?\b.*\b{odd_one}\b", str(error)) and parameter in str(error)
            check.true(f"{name}: {error}", said and world() > 1)
        seconds = time.monotonic() - started
        check.true(f"{name}: after {seconds} s", seconds < 5)


# -- lives of wrappers ------------------------------------------------------------------------------------------------


@case
def deep_copies(variant: Variant, check: Check) -> None:
    for after in (0, 1):
        plain, wrapped = net(0), variant.wrap(net(rank()))
        if after:
            plain_loss(wrapped, 5, rank()).backward()
            wrapped.finish_gradient_synchronization()
            wrapped.zero_grad()
        with counted() as counter:
            plain_loss(wrapped, 4, rank()).backward()
            during = len(counter.calls)
            wrapped.finish_gradient_synchronization()
        usual = len(counter.calls)
        wrapped.zero_grad()
        twin = copy.deepcopy(wrapped)
        check.true("another kind", type(twin) is type(wrapped))
        check.parameters("the copy", twin, plain)
        ours, theirs = list(wrapped.parameters()), list(twin.parameters())
        check.true("parameters are shared", not {p.data_ptr() for p in ours} & {p.data_ptr() for p in theirs})
        other = copy.deepcopy(plain)
        for step in range(2):
            with counted() as counter:
                plain_loss(twin, step, rank()).backward()
                check.true("the copy overlaps otherwise", len(counter.calls) == during)
                twin.finish_gradient_synchronization()
                check.true(f"{counter.calls}, not {usual}", len(counter.calls) == usual)
            mean_loss(other, step).backward()
            check.gradients(f"copy, step {step}", twin, other)
            if step == 0:
                check.true("the original got gradients", all(parameter.grad is None for parameter in ours))
            plain_loss(wrapped, step + 2, rank()).backward()
            wrapped.finish_gradient_synchronization()
            mean_loss(plain, step + 2).backward()
            check.gradients(f"original, step {step}", wrapped, plain)
        with wrapped.no_sync(), counted() as counter:
            plain_loss(twin, 2, rank()).backward()
            twin.finish_gradient_synchronization()
            check.true("the original's no_sync reaches the copy", len(counter.calls) == usual)
        mean_loss(other, 2).backward()
        check.gradients("copy, the original quiet", twin, other)
        del wrapped, ours
        gc.collect()
        plain_loss(twin, 3, rank()).backward()
        twin.finish_gradient_synchronization()
        mean_loss(other, 3).backward()
        check.gradients("copy, the original gone", twin, other)


@case
def wrapped_again(variant: Variant, check: Check) -> None:
    """Hooks of a wrapper that is gone would send everything a second time."""
    for gone in (VARIANTS["flat"], VARIANTS["each"], VARIANTS["bucket"]):
        module, plain = net(rank()), net(0)
        old = gone.wrap(module)
        plain_loss(old, 0, rank()).backward()
        old.finish_gradient_synchronization()
        module.zero_grad()
        trace = weakref.ref(old)
        del old
        gc.collect()
        check.true("something holds on to the wrapper", trace() is None)
        with counted() as counter:
            plain_loss(module, 1, rank()).backward()
            check.true(f"{counter.calls} for a plain module", not counter.calls)
        module.zero_grad()
        fresh, wrapped = variant.wrap(net(rank())), variant.wrap(module)
        with counted() as counter:
            plain_loss(fresh, 2, rank()).backward()
            in_backward = len(counter.calls)
            fresh.finish_gradient_synchronization()
            usual = counter.taken()
            plain_loss(wrapped, 2, rank()).backward()
            check.true(f"{counter.calls} in backward, not {in_backward}", len(counter.calls) == in_backward)
            wrapped.finish_gradient_synchronization()
            check.true(f"{counter.calls}, not {usual}", len(counter.calls) == usual)
        mean_loss(plain, 2).backward()
        check.gradients("the second wrapper", wrapped, plain)


@case
def two_wrappers_in_one_loss(variant: Variant, check: Check) -> None:
    plains = [net(0), net(0)]
    pair = [variant.wrap(net(rank())), variant.wrap(net(rank()))]
    for step in range(2):
        (plain_loss(pair[0], step, rank()) + plain_loss(pair[1], step + 5, rank())).backward()
        for wrapped in pair:
            wrapped.finish_gradient_synchronization()
        for plain, wrapped, shift in zip(plains, pair, (0, 5), strict=True):
            mean_loss(plain, step + shift).backward()
            check.gradients(f"step {step}, {shift}", wrapped, plain)


# -- other rank functions ---------------------------------------------------------------------------------------------


def compiled() -> dict[str, list[str]]:
    """Both ways round, all variants: torch.compile takes long to import, so one start serves all."""
    found = {}
    ways: dict[str, Callable[[Variant, nn.Module], Any]] = {
        "inside": lambda variant, module: variant.wrap(torch.compile(module, backend="aot_eager")),
        "outside": lambda variant, module: torch.compile(variant.wrap(module), backend="aot_eager"),
    }
    for (name, variant), (way, wrap) in itertools.product(VARIANTS.items(), ways.items()):
        check = Check()
        torch._dynamo.reset()
        try:
            compare_training(variant, check, net, wrap=partial(wrap, variant))
            wrapped = wrap(variant, fragile(rank()))
            plain = fragile(0)
            with wrapped.no_sync(), counted() as counter:
                fragile_loss(wrapped, 0, rank()).backward()
            check.true(f"sent {counter.calls}", not counter.calls)
            with counted() as counter:
                fragile_loss(wrapped, 1, rank()).backward()
                check.true("communicates in backward", bool(counter.calls) == variant.overlaps)
                wrapped.finish_gradient_synchronization()
            mean_loss(plain, 0, fragile_loss).backward()
            mean_loss(plain, 1, fragile_loss).backward()
            check.gradients("accumulated", wrapped, plain)
            check.settle()
        except Exception as error:
            error.add_note(f"{name}, compiled {way}")
            raise
        found[f"{name} {way}"] = check.failures
    return found


class Deadly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, note: str | None) -> Tensor:
        ctx.note = note
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.note:
            Path(ctx.note).write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return gradient, None


def killed_in_backward(variant: str, victim: int, note: str) -> None:
    module = net(0)
    wrapped = VARIANTS[variant].wrap(module)
    for step in range(3):
        now = note if step == 1 and rank() == victim else None
        wrapped.zero_grad()
        hidden = wrapped(share(step, rank()))
        # Half of the gradients are there when it dies: the first layer's weights enter on the other side of it.
        loss = weigh(hidden) + Deadly.apply(module.first.weight, now).sum()
        loss.backward()
        wrapped.finish_gradient_synchronization()


def forget_to_finish(seconds: float) -> None:
    time.sleep(seconds)


def stalled_in_a_step(variant: str, sleeper: int, seconds: float) -> None:
    wrapped = VARIANTS[variant].wrap(net(0))
    plain_loss(wrapped, 0, rank()).backward()
    if rank() == sleeper:
        forget_to_finish(seconds)
    wrapped.finish_gradient_synchronization()
