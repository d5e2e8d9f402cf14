"""Models, a record of collectives and memory, and the comparison with one process that has all weights."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cs336_systems.parallel import FSDP, collectives, gather_full_params
from cs336_systems.parallel.fsdp import AHEAD
from tests.distributed.compare import assert_close, assert_same_on_all_ranks, rank, world

TOLERANCE = 1e-6
"""In float32: the sums over a batch are taken in another order."""
VOCABULARY = 11
ROWS = 12
"""Rows of the batch of all ranks: 1, 2, 3 and 4 ranks get equal parts."""


# -- collectives and memory -------------------------------------------------------------------------------------------


class Late:
    """A collective that begins only when it is waited for."""

    def __init__(self, output: Tensor, begin: Callable[[], Any]):
        output.fill_(math.nan)
        self.begin = begin

    def wait(self) -> None:
        self.begin().wait()


class Event(NamedTuple):
    what: str
    elements: int
    nbytes: int = 0


class Watch:
    """Records the collectives of forward and backward, and the full weights that are in memory."""

    def __init__(self) -> None:
        self.active = False
        self.late = False
        """True if all-gathers are to complete only when they are waited for."""
        self.clear()

    def clear(self) -> None:
        self.events: list[Event] = []
        self.full: dict[int, torch.UntypedStorage] = {}
        self.most = 0
        """The largest number of full weights in memory at a time."""

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Record here only: gather_full_params returns full weights, too."""
        gather, scatter, reduce = collectives.all_gather, collectives.reduce_scatter, dist.all_reduce

        def all_gather(output: Tensor, shard: Tensor, **kwargs: Any) -> Any:
            self.events.append(Event("gather", output.numel(), output.nbytes))
            self.look(output)
            if self.late:
                return Late(output, partial(gather, output, shard, **kwargs))
            return gather(output, shard, **kwargs)

        def reduce_scatter(output: Tensor, whole: Tensor, **kwargs: Any) -> Any:
            self.events.append(Event("scatter", whole.numel(), whole.nbytes))
            self.look()
            return scatter(output, whole, **kwargs)

        def all_reduce(tensor: Tensor, **kwargs: Any) -> Any:
            self.events.append(Event("reduce", tensor.numel(), tensor.nbytes))
            return reduce(tensor, **kwargs)

        with (
            patch.multiple(collectives, all_gather=all_gather, reduce_scatter=reduce_scatter),
            patch.object(dist, "all_reduce", all_reduce),
            patch.object(self, "active", True),
        ):
            yield

    def of(self, what: str) -> list[Event]:
        return [event for event in self.events if event.what == what]

    def elements(self, what: str) -> list[int]:
        return sorted(event.elements for event in self.of(what))

    def nbytes(self, what: str) -> int:
        return sum(event.nbytes for event in self.of(what))

    def look(self, *weights: Tensor) -> None:
        if self.active:
            for weight in weights:
                storage = weight.untyped_storage()
                self.full[storage._cdata] = storage
            self.most = max(self.most, self.in_memory())

    def in_memory(self) -> int:
        return sum(storage.nbytes() > 0 for storage in self.full.values())

    def assert_nothing_left(self, when: str) -> None:
        assert self.full, f"{when}: no full weight was seen"
        assert self.in_memory() == 0, f"{when}: {self.in_memory()} full weights are in memory"

    def forward(self, when: str, wrapped: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run forward: one weight is in use and at most AHEAD are prefetched; none is left."""
        self.most = 0
        with self.passes():
            out = wrapped(*args, **kwargs)
        assert self.most <= 1 + AHEAD, f"{when}: {self.most} full weights were in memory at a time"
        self.assert_nothing_left(f"after {when}")
        return out


WATCH = Watch()


# -- models -----------------------------------------------------------------------------------------------------------


class Linear(nn.Module):
    """A user's own, recognised by its name; records when it runs."""

    def __init__(self, d_in: int, d_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d_out, d_in) / d_in**0.5)

    def forward(self, x: Tensor) -> Tensor:
        if WATCH.active:
            WATCH.events.append(Event("run", self.weight.numel()))
        WATCH.look(self.weight)
        return x @ self.weight.T


class Net(nn.Module):
    """Every kind of parameter. 11, 7, 5 and 1 rows: no number of ranks divides them all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.first = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(7)
        self.gate = nn.Linear(7, 1)
        self.mix = nn.Parameter(torch.randn(7, 7) / 3)  # a matrix, but of no Linear
        self.last = Linear(7, 5)
        self.register_buffer("shift", torch.randn(5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.first(self.embed(tokens)).tanh())
        x = x + self.gate(x).sigmoid() * (x @ self.mix)
        return self.last(x) + self.shift


class Stack(nn.Module):
    """An embedding and layers; `order` lists those that run, and may change."""

    def __init__(
        self, layers: int = 4, order: Iterable[int] | None = None, frozen: Iterable[str] = (), reentrant: Any = None
    ):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))
        self.head = nn.Linear(6, 5, bias=False)
        self.order = list(range(layers) if order is None else order)
        self.wasted: list[int] = []
        """Layers that run, too, but whose output is not used."""
        self.reentrant: bool | None = reentrant
        """How activations are recomputed, if at all."""
        freeze(self, *frozen)

    def block(self, number: int, x: Tensor) -> Tensor:
        return x + self.layers[number](x).tanh()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for number in self.order:
            if self.reentrant is None:
                x = self.block(number, x)
            else:
                x = checkpoint(self.block, number, x, use_reentrant=self.reentrant)
            if number in self.wasted:
                self.layers[number](x.detach() + 1)
        for number in self.wasted:
            self.layers[number](x)
        return self.head(x)


class Tied(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.mix = nn.Linear(6, 6, bias=bias)
        self.other = nn.Linear(6, 6, bias=bias)
        self.head = nn.Linear(6, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.other.weight = self.mix.weight  # with a bias of its own

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.other(self.mix(x).tanh()))


def freeze(module: nn.Module, *names: str, requires_grad: bool = False) -> None:
    for name in names:
        module.get_parameter(name).requires_grad_(requires_grad)


def is_sharded(module: nn.Module) -> bool:
    known = isinstance(module, nn.Linear | nn.Embedding) or type(module).__name__ in ("Linear", "Embedding")
    return known and module.weight.dim() == 2


def sharded_names(whole: nn.Module) -> set[str]:
    return {f"{name}.weight" for name, m in whole.named_modules(remove_duplicate=False) if is_sharded(m)}


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make()


def rows(whole: Tensor) -> Tensor:
    """This rank's rows of a weight."""
    each = math.ceil(whole.shape[0] / world())
    return whole[each * rank() : each * (rank() + 1)]


def padded(whole: Tensor) -> int:
    """Elements of a weight when every rank sends the same number of rows."""
    return math.ceil(whole.shape[0] / world()) * world() * whole[0].numel()


# -- training ---------------------------------------------------------------------------------------------------------


def tokens(step: int, vocabulary: int = VOCABULARY, length: int = 3) -> Tensor:
    return torch.randint(vocabulary, (ROWS, length), generator=torch.Generator().manual_seed(step))


def floats(step: int, width: int = 4) -> Tensor:
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(step))


def part(batch: Tensor, of_rank: int | None = None) -> Tensor:
    return batch.chunk(world())[rank() if of_rank is None else of_rank]


def loss_of(out: Tensor) -> Tensor:
    """A mean over rows, with another target in each column."""
    out = out if out.dtype == torch.float64 else out.float()
    return (out - torch.linspace(-2, 2, out.shape[-1], dtype=out.dtype)).square().mean()


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """With a large eps: the sign of a gradient that is zero up to rounding must not count."""
    return torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3)


class Pair:
    """The same weights twice: whole with the whole batch, and sharded with this rank's part."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
        *,
        inputs: Callable[[int], Tensor] = tokens,
        tolerance: float = TOLERANCE,
    ):
        self.whole = seeded(make)
        self.module = seeded(make, rank())  # rank 0's values count
        self.wrapped = FSDP(self.module)
        assert self.wrapped.module is self.module
        self.sharded = sharded_names(self.whole)
        self.inputs, self.tolerance = inputs, tolerance
        self.theirs, self.ours = optimizer(self.whole), optimizer(self.wrapped)
        WATCH.clear()
        self.compare_weights("at the start")

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        return self.whole, self.module

    def expected(self, name: str, whole: Tensor) -> Tensor:
        return rows(whole) if name in self.sharded else whole

    def forward(self, step: int) -> tuple[Tensor, Tensor]:
        """Return both losses; the outputs are compared."""
        batch = self.inputs(step)
        theirs = self.whole(batch)
        ours = WATCH.forward(f"forward {step}", self.wrapped, part(batch))
        assert_close(f"forward {step}", ours.detach(), part(theirs.detach()), 10 * self.tolerance)
        return loss_of(theirs), loss_of(ours)

    def backward(self, step: int) -> None:
        self.backward_of(*self.forward(step))

    def backward_of(self, theirs: Tensor, ours: Tensor) -> None:
        theirs.backward()
        with WATCH.passes():
            ours.backward()

    def finish(self, when: str) -> None:
        with WATCH.passes():
            self.wrapped.finish_gradient_synchronization()
        WATCH.assert_nothing_left(f"{when}: after finish")
        self.compare_gradients(when)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.ours.zero_grad(set_to_none=set_to_none)
        self.theirs.zero_grad(set_to_none=set_to_none)

    def step(self, when: str) -> None:
        self.ours.step()
        self.theirs.step()
        self.compare_weights(when)

    def compare_gradients(self, when: str) -> None:
        ours, theirs = (dict(module.named_parameters()) for module in (self.module, self.whole))
        assert list(ours) == list(theirs)
        for name, p in theirs.items():
            size = 0.0 if p.grad is None else float(p.grad.abs().max())
            expected = None if p.grad is None else self.expected(name, p.grad)
            assert_close(f"{when}: gradient of {name}", ours[name].grad, expected, self.tolerance * max(1.0, size))

    def compare_weights(self, when: str) -> None:
        ours, theirs = self.wrapped.state_dict(), self.whole.state_dict()
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            assert_close(f"{when}: {name}", ours[name], self.expected(name, value), self.tolerance)

    def compare_gathered(self, when: str) -> None:
        """Compare gather_full_params with the whole model, and all ranks bit by bit."""
        theirs, gathered = self.whole.state_dict(), gather_full_params(self.wrapped)
        assert set(gathered) == {name for name, _ in self.whole.named_parameters(remove_duplicate=False)}
        for name, full in gathered.items():
            assert_close(f"{when}: gathered {name}", full, theirs[name], self.tolerance)
        assert_same_on_all_ranks(f"{when}: parameter", gathered.values())

    def train(
        self,
        steps: int = 3,
        before: Callable[[int, Any], None] = lambda step, module: None,
        set_to_none: bool = True,
        start: int = 0,
    ) -> None:
        """Train both; `before(step, module)` may change both models."""
        for step in range(start, start + steps):
            for module in self.both:
                before(step, module)
            self.zero_grad(set_to_none)
            self.backward(step)
            self.finish(f"step {step}")
            self.step(f"step {step}")
        self.compare_gathered(f"after {steps} steps")
