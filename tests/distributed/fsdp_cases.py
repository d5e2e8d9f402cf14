"""What ranks do in the tests of the fully sharded wrapper.

A rank holds the same weights twice: whole, trained on the whole batch as one process would, and sharded, trained on
this rank's part. What differs is written down and not raised: a rank that leaves early lets the others wait.
"""

import copy
import hashlib
import math
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cs336_systems.config import ModelConfig
from cs336_systems.model import TransformerLM
from cs336_systems.parallel import FSDP, clip_grad_norm_, collectives, gather_full_params

TOLERANCE = 1e-6
"""In float32: the sums over a batch are taken in another order."""
VOCABULARY = 11
ROWS = 12
"""Of the batch of all ranks: 1, 2, 3 and 4 of them get equal parts."""
AHEAD = 2
"""Weights that may be gathered before their turn."""

GROUPS: dict[str, dict[str, Callable[[], None]]] = {}
COMPLAINTS: list[str] = []
"""Of the case that runs."""


def case(group: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def enter(function: Callable[[], None]) -> Callable[[], None]:
        GROUPS.setdefault(group, {})[function.__name__] = function
        return function

    return enter


def run_cases(*groups: str) -> list[str]:
    """The complaints of this rank."""
    found: list[str] = []
    with WATCH.listening():
        for name, function in chain.from_iterable(GROUPS[group].items() for group in groups):
            COMPLAINTS.clear()
            torch.manual_seed(0)
            try:
                function()
            except Exception:
                COMPLAINTS.append(traceback.format_exc())
            found += [f"rank {rank()} of {world()}, {name}: {text}" for text in COMPLAINTS]
            try:
                dist.monitored_barrier(timeout=timedelta(seconds=30))
            except RuntimeError as error:  # the others wait in the middle of the case: no way to go on
                raise RuntimeError("\n".join(found)) from error
    return found


def expect(fact: Any, otherwise: str) -> None:
    if not fact:
        COMPLAINTS.append(otherwise)


def rank() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


def everywhere(value: Any) -> list[Any]:
    """By rank."""
    values = [None] * world()
    dist.all_gather_object(values, value)
    return values


def close(what: str, found: Tensor | None, expected: Tensor | None, tolerance: float = TOLERANCE) -> None:
    """Shape, dtype, and values up to `tolerance`."""
    if found is None or expected is None:
        expect(found is expected, f"{what} is {found} instead of {expected}")
    elif (found.shape, found.dtype) != (expected.shape, expected.dtype):
        expect(False, f"{what}: {found.dtype} {[*found.shape]} instead of {expected.dtype} {[*expected.shape]}")
    elif found.numel():
        off = (found.double() - expected.double()).abs().max().item()
        expect(off <= tolerance, f"{what} is off by {off:.3g}, of {expected.abs().max():.3g}")  # also when off is NaN


def same_bits(what: str, tensors: Iterable[Tensor | None]) -> None:
    """On all ranks."""
    parts = [b"None" if t is None else t.detach().contiguous().view(-1).view(torch.uint8).numpy() for t in tensors]
    digests = torch.tensor([list(hashlib.md5(part).digest()) for part in parts], dtype=torch.uint8)
    of_all = [torch.empty_like(digests) for _ in range(world())]
    dist.all_gather(of_all, digests)
    unlike = [number for number, digest in enumerate(digests) if not torch.equal(digest, of_all[0][number])]
    expect(not unlike, f"{what}: numbers {unlike} of {len(parts)} are not those of rank 0")


# -- what is sent, and what is in memory ------------------------------------------------------------------------------


class Late:
    """A collective under way that has not begun."""

    def __init__(self, output: Tensor, begin: Callable[[], Any]):
        output.fill_(math.nan)
        self.begin = begin

    def wait(self) -> None:
        self.begin().wait()


class Watch:
    """Overhears the collectives of the wrapper's passes, and knows which full weights are in memory."""

    def __init__(self) -> None:
        self.active = False
        self.slow = False
        self.clear()

    def clear(self) -> None:
        self.events: list[tuple[str, Any, int]] = []
        """What, elements or name, bytes."""
        self.full: dict[int, torch.UntypedStorage] = {}
        self.most = 0
        """Full weights in memory at a time."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        real = collectives.all_gather, collectives.reduce_scatter, dist.all_reduce

        def all_gather(*args: Any, **kwargs: Any) -> Any:
            output = args[0] if args else kwargs["output_tensor"]
            self.event("gather", output.numel(), output.nbytes)
            self.look(output)
            if self.slow and kwargs.get("async_op"):
                return Late(output, partial(real[0], *args, **kwargs))
            return real[0](*args, **kwargs)

        def reduce_scatter(*args: Any, **kwargs: Any) -> Any:
            whole = args[1] if len(args) > 1 else kwargs["input"]
            self.event("scatter", whole.numel(), whole.nbytes)
            self.look()
            return real[1](*args, **kwargs)

        def all_reduce(*args: Any, **kwargs: Any) -> Any:
            tensor = args[0] if args else kwargs["tensor"]
            self.event("reduce", tensor.numel(), tensor.nbytes)
            return real[2](*args, **kwargs)

        collectives.all_gather, collectives.reduce_scatter, dist.all_reduce = all_gather, reduce_scatter, all_reduce
        try:
            yield
        finally:
            collectives.all_gather, collectives.reduce_scatter, dist.all_reduce = real

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Only here: gather_full_params gives whole weights away."""
        self.active = True
        try:
            yield
        finally:
            self.active = False

    @contextmanager
    def slowly(self) -> Iterator[None]:
        """What is gathered comes when it is waited for, and not before."""
        self.slow = True
        try:
            yield
        finally:
            self.slow = False

    def event(self, what: str, which: Any, size: int = 0) -> None:
        if self.active:
            self.events.append((what, which, size))

    def of(self, what: str) -> list[tuple[Any, int]]:
        return [(which, size) for kind, which, size in self.events if kind == what]

    def look(self, *weights: Tensor) -> None:
        if self.active:
            for weight in weights:
                storage = weight.untyped_storage()
                self.full[storage._cdata] = storage
            self.most = max(self.most, self.in_memory())

    def in_memory(self) -> int:
        return sum(storage.nbytes() > 0 for storage in self.full.values())

    def nothing_left(self, when: str) -> None:
        if world() > 1:  # a rank alone may work with its rows themselves
            expect(self.in_memory() == 0, f"{when}: {self.in_memory()} full weights are in memory")
            expect(self.full, f"{when}: no full weight was seen")

    def forward(self, when: str, wrapped: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """In forward one weight is used and no more than two are ahead; after it none is left."""
        self.most = 0
        with self.passes():
            out = wrapped(*args, **kwargs)
        if world() > 1:
            expect(self.most <= 1 + AHEAD, f"{when}: {self.most} full weights were in memory at a time")
        self.nothing_left(f"after {when}")
        return out


WATCH = Watch()


# -- models -----------------------------------------------------------------------------------------------------------


class Linear(nn.Module):
    """A user's own: known by its name. Says when it runs, and with which weight."""

    def __init__(self, d_in: int, d_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d_out, d_in) / d_in**0.5)

    def forward(self, x: Tensor) -> Tensor:
        WATCH.event("run", self.weight.numel())
        WATCH.look(self.weight)
        return x @ self.weight.T


class Net(nn.Module):
    """A bit of everything. 11, 7, 5 and 1 rows: no number of ranks divides them all."""

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
    """An embedding and layers; `order` says which of them run, and may change."""

    def __init__(self, layers: int = 4, order: Iterable[int] | None = None, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 5, bias=False)
        self.order = list(range(layers) if order is None else order)
        self.wasted: list[int] = []
        """These run too, and nothing comes of it."""
        self.reentrant: bool | None = None
        """How activations are recomputed, if at all."""

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


class Calls(nn.Module):
    """Takes and gives more than a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 5)
        self.right = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor, *, scale: float, extra: dict[str, Tensor]) -> dict[str, Any]:
        return {"both": (self.left(x) * scale, self.right(extra["y"])), "scale": scale}


class Branches(nn.Module):
    """A Linear of each dtype, side by side: the error of one is not in another."""

    DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 7, dtype=dtype) for dtype in self.DTYPES)

    def forward(self, x: Tensor) -> Tensor:
        outs = [branch(x.to(branch.bias.dtype)).double() for branch in self.branches]
        return torch.cat(outs, dim=-1)


class Odd(nn.Module):
    """What is sharded and what is not, by class and name."""

    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(VOCABULARY, 6))
            self.bias = nn.Parameter(torch.randn(VOCABULARY, 6))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.weight[tokens] * self.bias[tokens]

    class Projection(nn.Linear):
        pass

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    def __init__(self) -> None:
        super().__init__()
        self.embed = Odd.Embedding()
        self.projection = Odd.Projection(6, 6)
        self.scale = Odd.Scale()
        self.flat = type("Linear", (nn.LayerNorm,), {})(6)  # its weight is a vector
        self.head = nn.Sequential(nn.Sequential(nn.Linear(6, 5)))

    SHARDED = ("embed.weight", "projection.weight", "head.0.0.weight")

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.flat(self.scale(self.projection(self.embed(tokens)))))


def is_sharded(module: nn.Module) -> bool:
    named = type(module).__name__ in ("Linear", "Embedding")
    known = isinstance(module, nn.Linear | nn.Embedding) or named
    return known and isinstance(getattr(module, "weight", None), Tensor) and module.weight.dim() == 2


def sharded_names(whole: nn.Module) -> set[str]:
    modules = whole.named_modules(remove_duplicate=False)
    return {f"{name}.weight" for name, module in modules if is_sharded(module)}


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def rows(whole: Tensor, of_rank: int | None = None) -> Tensor:
    """Those that a rank has of a weight."""
    each = math.ceil(whole.shape[0] / world())
    start = each * (rank() if of_rank is None else of_rank)
    return whole[start : start + each]


def padded(whole: Tensor) -> int:
    """Elements, when every rank sends as many rows."""
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


OPTIMIZERS = (sgd, adamw)


class Pair:
    """The same weights, whole with the whole batch and sharded with this rank's part."""

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
        before = dict(self.module.named_modules())
        self.wrapped = FSDP(self.module)
        expect(self.wrapped.module is self.module, "the module was not changed in place")
        expect(dict(self.module.named_modules()) == before, "its parts are others")
        self.sharded = sharded_names(self.whole)
        self.inputs, self.tolerance = inputs, tolerance
        self.theirs, self.ours = optimizer(self.whole), optimizer(self.wrapped)
        WATCH.clear()
        self.compare_weights("at the start")
        self.compare_gathered("at the start")

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        return self.whole, self.module

    def expected(self, name: str, whole: Tensor) -> Tensor:
        return rows(whole) if name in self.sharded else whole

    def forward(self, step: int) -> tuple[Tensor, Tensor]:
        """Both losses. Also compares what was computed."""
        batch = self.inputs(step)
        theirs = self.whole(batch)
        ours = WATCH.forward(f"forward {step}", self.wrapped, part(batch))
        close(f"forward {step}", ours.detach(), part(theirs.detach()), 10 * self.tolerance)
        return loss_of(theirs), loss_of(ours)

    def backward(self, step: int) -> None:
        theirs, ours = self.forward(step)
        theirs.backward()
        with WATCH.passes():
            ours.backward()

    def finish(self) -> None:
        with WATCH.passes():
            self.wrapped.finish_gradient_synchronization()
        WATCH.nothing_left("after finish")

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.ours.zero_grad(set_to_none=set_to_none)
        self.theirs.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        self.ours.step()
        self.theirs.step()

    def compare_gradients(self, when: str) -> None:
        ours = dict(self.module.named_parameters())
        theirs = dict(self.whole.named_parameters())
        expect(list(ours) == list(theirs), f"parameters {list(ours)} instead of {list(theirs)}")
        for name, p in theirs.items():
            expected, size = (None, 0.0) if p.grad is None else (self.expected(name, p.grad), float(p.grad.abs().max()))
            close(f"{when}: gradient of {name}", ours[name].grad, expected, self.tolerance * max(1.0, size))
        same_bits(f"{when}: gradient", [p.grad for name, p in ours.items() if name not in self.sharded])

    def compare_weights(self, when: str) -> None:
        ours, theirs = self.wrapped.state_dict(), self.whole.state_dict()
        expect(list(ours) == list(theirs), f"state_dict() has {list(ours)} instead of {list(theirs)}")
        for name, value in theirs.items():
            close(f"{when}: {name}", ours[name], self.expected(name, value), self.tolerance)
        same_bits(f"{when}: value", [value for name, value in ours.items() if name not in self.sharded])

    def compare_gathered(self, when: str) -> None:
        theirs = self.whole.state_dict()
        gathered = gather_full_params(self.wrapped)
        names = {name for name, _ in self.whole.named_parameters(remove_duplicate=False)}
        expect(set(gathered) == names, f"gather_full_params has {set(gathered)} instead of {names}")
        for name in names & set(gathered):
            close(f"{when}: gathered {name}", gathered[name].detach(), theirs[name], self.tolerance)
        same_bits(f"{when}: gathered", [gathered[name] for name in sorted(gathered)])

    def train(
        self,
        steps: int = 3,
        before: Callable[[int, nn.Module], None] = lambda step, module: None,
        set_to_none: bool = True,
        start: int = 0,
    ) -> None:
        for step in range(start, start + steps):
            for module in self.both:
                before(step, module)
            self.zero_grad(set_to_none)
            self.backward(step)
            self.finish()
            self.compare_gradients(f"step {step}")
            self.step()
            self.compare_weights(f"step {step}")
        self.compare_gathered(f"after {steps} steps")


def freeze(module: nn.Module, *names: str, requires_grad: bool = False) -> None:
    for name in names:
        module.get_parameter(name).requires_grad_(requires_grad)


# -- cases: like one process ------------------------------------------------------------------------------------------


@case("training")
def a_bit_of_everything() -> None:
    for optimizer in OPTIMIZERS:
        Pair(Net, optimizer).train(5)


@case("training")
def shapes_of_shards() -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(4, n) for n in (7, 1, 8, 5)), nn.Embedding(7, 3))

    module = FSDP(seeded(make))
    heights = {
        1: {7: [7], 1: [1], 8: [8], 5: [5]},
        2: {7: [4, 3], 1: [1, 0], 8: [4, 4], 5: [3, 2]},
        3: {7: [3, 3, 1], 1: [1, 0, 0], 8: [3, 3, 2], 5: [2, 2, 1]},
        4: {7: [2, 2, 2, 1], 1: [1, 0, 0, 0], 8: [2, 2, 2, 2], 5: [2, 2, 1, 0]},
    }[world()]
    expected = [
        (heights[n][rank()], width, n)
        for n, width in ((7, 4), (1, 4), (8, 4), (5, 4), (7, 3))  # in the order of the layers
    ]
    for i, (height, width, n) in enumerate(expected):
        weight = module.module[i].weight
        expect(isinstance(weight, nn.Parameter) and weight.requires_grad, f"layer {i}: no parameter to train")
        expect(tuple(weight.shape) == (height, width), f"layer {i}: {[*weight.shape]}, not {[height, width]}")
        bytes_kept, bytes_due = weight.untyped_storage().nbytes(), 4 * math.ceil(n / world()) * width
        expect(bytes_kept <= bytes_due, f"layer {i} keeps {bytes_kept} bytes, its rows have {bytes_due}")
        if i != 4:
            expect(tuple(module.module[i].bias.shape) == (n,), f"layer {i}: bias {[*module.module[i].bias.shape]}")


@case("training")
def what_is_sharded() -> None:
    pair = Pair(Odd)
    expect(pair.sharded == set(Odd.SHARDED), f"the test expects {pair.sharded}")
    for name, p in pair.module.named_parameters():
        expect(type(p) is nn.Parameter and p.is_leaf, f"{name} is a {type(p)}")
    pair.train(2)


@case("training")
def tied() -> None:
    for optimizer in OPTIMIZERS:
        pair = Pair(Tied, optimizer)
        count = len(list(pair.wrapped.parameters()))
        expect(count == 4, f"{count} parameters: two weights and two biases have 4 places in the optimizer")
        pair.train(4)
        expect(pair.module.head.weight is pair.module.embed.weight, "no longer tied")


@case("training")
def used_twice() -> None:
    for order in ([0, 0], [0, 1, 0], [1, 0, 0, 1, 1]):
        Pair(partial(Stack, 2, order), adamw).train(3)

    def make() -> nn.Module:
        module = Stack(2, [0, 1, 2])
        module.layers.append(module.layers[0])  # under a second name
        return module

    Pair(make).train(3)


@case("training")
def in_another_order_each_time() -> None:
    """What is expected to come next does not come, or comes later, or twice."""
    orders = [[0, 1, 2, 3], [3, 2, 1, 0], [0], [], [2, 2], [0, 1, 2, 3], [1, 3], [0, 1, 2, 3]]

    def before(step: int, module: nn.Module) -> None:
        module.order = orders[step]

    Pair(Stack, adamw).train(len(orders), before)


@case("training")
def a_shorter_way_before_the_step() -> None:
    """What was gathered and not used then must not be used after the step, when it is old."""
    pair = Pair(Stack)
    for step in range(3):
        pair.zero_grad()
        pair.backward(step)
        pair.finish()
        for module in pair.both:
            module.order = [0]
        with torch.no_grad():
            pair.forward(50 + step)
        for module in pair.both:
            module.order = [0, 1, 2, 3]
        pair.step()
        pair.compare_weights(f"step {step}")


@case("training")
def unused() -> None:
    pair = Pair(partial(Stack, 4, [0, 3]))
    pair.train(3)
    for number in (1, 2):
        expect(pair.module.layers[number].weight.grad is None, f"layer {number} has a gradient")
        expect(pair.module.layers[number].bias.grad is None, f"the bias of layer {number} has a gradient")


@case("training")
def run_for_nothing() -> None:
    """Its weight may be gathered in backward too, and must not stay."""

    def before(step: int, module: nn.Module) -> None:
        module.wasted = [[1, 2], [0], [], [3]][step]

    Pair(partial(Stack, 4, [0, 3]), adamw).train(4, before)


@case("training")
def frozen() -> None:
    choices = [
        (sgd, "layers.1.weight"),
        (adamw, "embed.weight", "layers.0.weight", "layers.0.bias"),  # no gradient flows that far
        (sgd, "layers.0.bias", "layers.2.weight", "head.weight"),
        (adamw, "layers.0.weight", "layers.1.weight", "layers.1.bias", "layers.3.weight"),
    ]
    for optimizer, *names in choices:

        def make(names: list[str] = names) -> nn.Module:
            module = Stack()
            freeze(module, *names)
            return module

        pair = Pair(make, optimizer)
        pair.train(2)
        for name, p in pair.module.named_parameters():
            expect(p.requires_grad == (name not in names), f"{name}: requires_grad is {p.requires_grad}")
            expect((p.grad is None) == (name in names), f"{name}: the gradient is {p.grad}")


@case("training")
def frozen_and_unfrozen_later() -> None:
    def make() -> nn.Module:
        module = Stack()
        freeze(module, "embed.weight", "layers.2.weight", "layers.2.bias")
        return module

    def before(step: int, module: nn.Module) -> None:
        if step == 1:
            freeze(module, "layers.1.weight", "layers.3.bias", "head.weight")
        if step == 2:
            freeze(module, "layers.2.weight", "layers.2.bias", "layers.1.weight", requires_grad=True)
        if step == 3:
            freeze(module, "embed.weight", "head.weight", "layers.3.bias", requires_grad=True)
            freeze(module, "layers.0.weight")
        if step == 4:
            freeze(module, *(name for name, _ in module.named_parameters() if "head" not in name))

    Pair(make, adamw).train(5, before)


@case("training")
def gradients_kept_as_zeros() -> None:
    Pair(Net).train(3, set_to_none=False)
    Pair(Tied, adamw).train(3, set_to_none=False)


@case("passes")
def accumulation() -> None:
    """Several backward passes for one step of the optimizer."""
    for make, optimizer in ((Net, adamw), (Tied, sgd), (partial(Stack, 2, [0, 1, 0]), adamw)):
        pair = Pair(make, optimizer)
        pair.train(1)
        pair.zero_grad()
        for micro in range(3):
            pair.backward(10 + micro)
        pair.finish()
        pair.compare_gradients("three passes and one finish")
        pair.step()
        pair.zero_grad(set_to_none=False)
        for micro in range(3):
            pair.backward(20 + micro)
            pair.finish()
            pair.compare_gradients(f"finish {micro} of three")
        pair.step()
        pair.compare_weights("after two steps of three passes")
        pair.backward(30)  # no zero_grad between steps either
        pair.finish()
        pair.compare_gradients("on top of the last step's")


@case("passes")
def passes_that_overlap() -> None:
    """Forward twice, then backward of both, in either order, in one go, and with a finish between."""
    for make in (Net, Tied):
        pair = Pair(make)
        for step, order in enumerate([(0, 1), (1, 0), None]):
            for between in (False, True) if order else (False,):
                pair.zero_grad()
                losses = [pair.forward(2 * step), pair.forward(2 * step + 1)]
                graphs = [losses[i] for i in order] if order else [tuple(map(sum, zip(*losses, strict=True)))]
                for number, (theirs, ours) in enumerate(graphs):
                    theirs.backward()
                    with WATCH.passes():
                        ours.backward()
                    if between and number == 0:
                        pair.finish()
                        pair.compare_gradients(f"step {step}, after one of two")
                pair.finish()
                pair.compare_gradients(f"step {step}, order {order}, finish between {between}")
                pair.step()
                pair.compare_weights(f"step {step}")


@case("passes")
def recomputed_activations() -> None:
    def make(reentrant: bool, order: list[int], frozen: list[str]) -> nn.Module:
        module = Stack(order=order)
        module.reentrant = reentrant
        freeze(module, *frozen)
        return module

    for reentrant in (False, True):
        for order, names in (([0, 1, 2, 3], []), ([0, 1, 0, 2], []), ([3, 2, 1, 0], ["layers.1.weight"])):
            Pair(partial(make, reentrant, order, names), adamw).train(2)
        pair = Pair(partial(make, reentrant, [0, 1, 2, 3], []))
        for step in range(2):
            pair.backward(step)
        pair.finish()
        pair.compare_gradients("two passes and one finish")


@case("passes")
def mixed_dtypes() -> None:
    """Each branch as exact as its dtype; gradients and weights stay in it."""
    pair = Pair(Branches, inputs=floats, tolerance=0.02)
    for step in range(3):
        pair.train(1, start=step)
        gathered = gather_full_params(pair.wrapped)
        for i, (branch, tolerance) in enumerate(zip(pair.whole.branches, (1e-12, 1e-6, 0.02, 0.003), strict=True)):
            name = f"branches.{i}.weight"
            close(f"step {step}: gathered {name}", gathered[name].detach(), branch.weight.detach(), tolerance)
            ours = pair.module.get_parameter(name).grad
            close(f"step {step}: gradient of {name}", ours, rows(branch.weight.grad), tolerance)


@case("passes")
def without_gradients() -> None:
    """Before, between and in the middle of training."""
    pair = Pair(Net, adamw)
    for step in range(3):
        pair.whole.eval()
        pair.wrapped.eval()
        with torch.no_grad():
            expected = pair.whole(tokens(100 + step))
            out = WATCH.forward(f"step {step}: no_grad", pair.wrapped, part(tokens(100 + step)))
        expect(not out.requires_grad, "no_grad gave something with a graph")
        close(f"step {step}: no_grad", out, part(expected))
        pair.whole.train()
        pair.wrapped.train()
        expect(step or all(p.grad is None for p in pair.wrapped.parameters()), "gradients without backward")
        pair.forward(50 + step)  # a graph that no backward goes through
        pair.train(1, start=step)

        pair.zero_grad()
        theirs, ours = pair.forward(200 + step)
        with torch.no_grad():
            WATCH.forward("no_grad between forward and backward", pair.wrapped, part(tokens(300)))
        theirs.backward()
        with WATCH.passes():
            ours.backward()
        pair.finish()
        pair.compare_gradients(f"step {step}, after no_grad between forward and backward")
        pair.step()
    pair.compare_weights("at the end")


@case("passes")
def finished_twice() -> None:
    pair = Pair(Net)
    with WATCH.passes():
        pair.wrapped.finish_gradient_synchronization()  # nothing to do yet
    expect(all(p.grad is None for p in pair.wrapped.parameters()), "gradients without backward")
    for step in range(2):
        pair.zero_grad()
        pair.backward(step)
        pair.finish()
        before = copy.deepcopy([p.grad for p in pair.wrapped.parameters()])
        WATCH.clear()
        with WATCH.passes():
            pair.wrapped.finish_gradient_synchronization()
        expect(WATCH.events == [], f"the second finish sent {WATCH.events}")
        after = [p.grad for p in pair.wrapped.parameters()]
        expect(all(map(torch.equal, before, after)), "the second finish changed gradients")
        pair.compare_gradients(f"step {step}")
        pair.step()
    pair.compare_weights("at the end")


@case("passes")
def arguments_and_their_gradients() -> None:
    """Of any kind. An input's gradient is that of this rank's own loss."""
    pair = Pair(Calls, inputs=floats)
    for step in range(2):
        pair.zero_grad()
        found = []
        for module, cut in ((pair.whole, lambda batch: batch), (pair.wrapped, part)):
            x, y = (cut(floats(2 * step + i)).requires_grad_() for i in range(2))
            with WATCH.passes():
                out = module(x, scale=1.5, extra={"y": y})
                (loss_of(out["both"][0]) + loss_of(out["both"][1])).backward()
            expect(out["scale"] == 1.5, f"{out}")
            found.append((x.grad, y.grad))
        pair.finish()
        pair.compare_gradients(f"step {step}")
        for theirs, ours in zip(*found, strict=True):
            close("an input's gradient", ours / world(), part(theirs))
        pair.step()
        pair.compare_weights(f"step {step}")


@case("passes")
def independent_of_each_other() -> None:
    """Two wrapped models at once."""
    one, other = Pair(Net), Pair(Stack, adamw)
    for step in range(3):
        for pair in (one, other):
            pair.zero_grad()
        losses = [pair.forward(step) for pair in (one, other)]
        for theirs, ours in losses:
            theirs.backward()
            with WATCH.passes():
                ours.backward()
        for pair in (other, one):
            pair.finish()
            pair.compare_gradients(f"step {step}")
            pair.step()
            pair.compare_weights(f"step {step}")


# -- cases: the gradient's norm ---------------------------------------------------------------------------------------


@case("passes")
def clipping() -> None:
    forms: dict[str, Callable[[FSDP], Any]] = {
        "the wrapper": lambda wrapped: wrapped,
        "a generator": lambda wrapped: wrapped.parameters(),
        "a list": lambda wrapped: list(wrapped.parameters()),
    }
    makes = Net, Tied, partial(Stack, 3, [0, 2])
    for make, optimizer, (form, parameters) in zip(makes, (sgd, adamw, adamw), forms.items(), strict=True):
        pair = Pair(make, optimizer)
        nothing = clip_grad_norm_(parameters(pair.wrapped), 1.0)
        expect(float(nothing) == 0.0, f"{form}: the norm of nothing is {nothing}")
        for step, share in enumerate((0.1, 0.9, 1.5, math.inf)):
            pair.zero_grad()
            pair.backward(step)
            pair.finish()
            norms = [p.grad.double().norm() for p in pair.whole.parameters() if p.grad is not None]
            limit = share * float(torch.stack(norms).norm())
            expected = torch.nn.utils.clip_grad_norm_(pair.whole.parameters(), limit)
            found = clip_grad_norm_(parameters(pair.wrapped), limit)
            off = abs(float(found) / float(expected) - 1)
            expect(off < 1e-6, f"{form}, step {step}: norm {found} instead of {expected}")
            same_bits(f"{form}: norm", [found])
            pair.compare_gradients(f"{form}, clipped to {share} of the norm")
            pair.step()
            pair.compare_weights(f"{form}, step {step}")
        pair.compare_gathered(form)


@case("passes")
def clipping_of_some() -> None:
    pair = Pair(Net)
    pair.backward(0)
    pair.finish()
    parts = ["gate.weight"], ["embed.weight", "last.weight"], ["mix", "norm.bias"], ["first.weight", "first.bias"]
    for names in parts:
        theirs, ours = ([module.get_parameter(name) for name in names] for module in pair.both)
        expected = torch.nn.utils.clip_grad_norm_(theirs, 0.01)
        found = clip_grad_norm_(iter(ours), 0.01)
        expect(abs(float(found) / float(expected) - 1) < 1e-6, f"{names}: norm {found} instead of {expected}")
        same_bits(f"{names}: norm", [found])
        pair.compare_gradients(f"{names} clipped")


# -- cases: in place --------------------------------------------------------------------------------------------------


class InPlace(nn.Module):
    """Outputs that are written over; of three dimensions they are views."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.layers = nn.Sequential(nn.Linear(6, 6, bias=bias), nn.ELU(inplace=True), nn.Linear(6, 6, bias=bias))
        self.head = nn.Linear(6, 5, bias=bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y = self.layers(x)
        y += x
        return self.head(y.tanh_())


@case("passes")
def outputs_changed_in_place() -> None:
    """A weight that nobody has waited for may be there by chance, so here it comes as late as can be."""
    with WATCH.slowly():
        for bias in (False, True):
            for inputs in (tokens, lambda step: tokens(step, length=1)[:, 0]):
                Pair(partial(InPlace, bias), inputs=inputs).train(2)


# -- cases: what is sent and kept -------------------------------------------------------------------------------------

CONFIG = ModelConfig(vocab_size=30, context_length=6, d_model=16, num_layers=2, num_heads=2, d_ff=28)


def transformer(**options: Any) -> TransformerLM:
    return TransformerLM(CONFIG, attention="reference", **options)


def text(step: int) -> Tensor:
    return tokens(step, CONFIG.vocab_size, CONFIG.context_length)


def language_loss(out: Tensor, batch: Tensor) -> Tensor:
    return F.cross_entropy(out.float().flatten(0, -2), batch.roll(-1, dims=-1).flatten())


@case("messages")
def counted() -> None:
    """A Linear's weight is gathered twice, an Embedding's once, each gradient is scattered once."""
    whole = seeded(transformer)
    linears = [m.weight for m in whole.modules() if isinstance(m, nn.Linear)]
    (embedding,) = (m.weight for m in whole.modules() if isinstance(m, nn.Embedding))
    expect(len(linears) == 15, f"{len(linears)} Linears")
    forward = sorted(map(padded, [*linears, embedding]))
    both = sorted(map(padded, [*linears, *linears, embedding]))
    replicated = sum(p.nbytes for p in whole.parameters() if p.dim() == 1)
    for dtype in (None, torch.bfloat16):
        wrapped = FSDP(seeded(transformer), dtype)
        size = 4 if dtype is None else 2
        for step in range(3):
            batch = part(text(step))
            wrapped.zero_grad()
            WATCH.clear()
            out = WATCH.forward(f"{dtype}, step {step}", wrapped, batch)
            with WATCH.passes():
                language_loss(out, batch).backward()
                wrapped.finish_gradient_synchronization()
            gathered, scattered, reduced = (WATCH.of(what) for what in ("gather", "scatter", "reduce"))
            when = f"{dtype}, step {step}"
            elements = sorted(n for n, _ in gathered)
            expect(elements == both, f"{when}: {len(elements)} all-gathers of {elements} instead of {both}")
            sent = sum(nbytes for _, nbytes in gathered)
            expect(sent == size * sum(both), f"{when}: {sent} bytes gathered instead of {size * sum(both)}")
            elements = sorted(n for n, _ in scattered)
            expect(elements == forward, f"{when}: reduce-scatters of {elements} instead of {forward}")
            sent = sum(nbytes for _, nbytes in scattered)
            expect(sent in (4 * sum(forward), size * sum(forward)), f"{when}: {sent} bytes scattered")
            sent = sum(nbytes for _, nbytes in reduced)
            # Beside the gradients there may be a word for each of them.
            expect(sent <= replicated + 40, f"{when}: {sent} bytes all-reduced, replicated are {replicated}")
            WATCH.nothing_left(when)

            WATCH.clear()
            with torch.no_grad():
                WATCH.forward(f"{when}, no_grad", wrapped, batch)
            elements = sorted(n for n, _ in WATCH.of("gather"))
            expect(elements == forward, f"{when}, no_grad: all-gathers of {elements} instead of {forward}")
            expect(len(WATCH.events) == len(elements), f"{when}, no_grad: {WATCH.events}")


@case("messages")
def counted_when_frozen_or_tied() -> None:
    def half_frozen() -> nn.Module:
        module = Stack()
        freeze(module, "layers.1.weight", "layers.1.bias", "layers.2.weight")
        return module

    for make, scatters in ((half_frozen, 4), (Tied, 2), (partial(Stack, 2, [0, 1, 0]), 4)):
        pair = Pair(make)
        for step in range(3):
            WATCH.clear()
            pair.backward(step)
            pair.finish()
            found = len(WATCH.of("scatter"))
            expect(found == scatters, f"{make}, step {step}: {found} reduce-scatters instead of {scatters}")
            pair.zero_grad()


class Chain(nn.Module):
    """Layers that tell by their size which one is gathered, and that say when they run."""

    WIDTHS = (5, 10, 15, 20, 25, 30, 35)  # no batch has so many rows

    def __init__(self) -> None:
        super().__init__()
        pairs = zip(self.WIDTHS, self.WIDTHS[1:], strict=False)
        self.layers = nn.ModuleList(Linear(d_in, d_out) for d_in, d_out in pairs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@case("messages")
def gathered_ahead() -> None:
    """From the second step on the next layer's weight is under way before a layer runs, and no more than two are."""
    pair = Pair(Chain, inputs=partial(floats, width=Chain.WIDTHS[0]))
    sizes = [padded(layer.weight) for layer in pair.whole.layers]
    names = [layer.weight.numel() for layer in pair.whole.layers]
    for step in range(4):
        pair.zero_grad()
        batch = pair.inputs(step)
        WATCH.clear()
        out = WATCH.forward(f"step {step}", pair.wrapped, part(batch))
        events = [(what, which) for what, which, _ in WATCH.events]
        runs = [events.index(("run", name)) for name in names]
        issued = [events.index(("gather", size)) for size in sizes]
        expect(len(events) == 2 * len(sizes), f"step {step}: {events}")
        expect(runs == sorted(runs), f"step {step}: ran in the order {runs}")
        for i, at in enumerate(runs):
            expect(issued[i] < at, f"step {step}: layer {i} ran before its weight was gathered: {events}")
            if step and i + 1 < len(runs):
                expect(issued[i + 1] < at, f"step {step}: layer {i + 1} was not under way when {i} ran: {events}")
            early = [j for j, when in enumerate(issued) if when < at and j > i + AHEAD]
            expect(not early, f"step {step}: {early} were gathered before layer {i} ran: {events}")
        with WATCH.passes():
            loss_of(out).backward()
        loss_of(pair.whole(batch)).backward()
        pair.finish()
        pair.compare_gradients(f"step {step}")
        pair.step()


@case("messages")
def in_memory_at_a_time() -> None:
    """Looked at from hooks of the inner modules and of their outputs; also when activations are recomputed."""
    for reentrant in (None, False, True):

        def make(reentrant: bool | None = reentrant) -> nn.Module:
            module = Stack(6)
            module.reentrant = reentrant
            return module

        pair = Pair(make)
        looks = []

        def look(*_: Any, looks: list[int] = looks) -> None:
            WATCH.look()
            if WATCH.active:
                looks.append(WATCH.in_memory())

        def look_later(module: nn.Module, args: Any, out: Tensor, look: Callable[..., None] = look) -> None:
            look()
            if out.requires_grad:
                out.register_hook(look)

        for module in pair.module.modules():
            if is_sharded(module):
                module.register_forward_pre_hook(look)
                module.register_forward_hook(look_later)
        for _ in range(3):
            WATCH.clear()
            looks.clear()
            pair.train(1)
            expect(len(looks) >= 24, f"{len(looks)} looks")
            expect(max(looks) >= 1, "no look saw a full weight")
            expect(max(looks) <= 1 + AHEAD, f"reentrant {reentrant}: {looks} full weights in memory")


@case("messages")
def nothing_kept_for_backward() -> None:
    """No copy of a full weight either."""
    pair = Pair(Chain, inputs=partial(floats, width=Chain.WIDTHS[0]))
    shapes = {tuple(layer.weight.shape) for layer in pair.whole.layers}
    shapes |= {shape[::-1] for shape in shapes}
    for dtype in (None, torch.bfloat16):
        wrapped = pair.wrapped if dtype is None else FSDP(seeded(Chain), dtype)
        for step in range(2):
            kept: list[torch.UntypedStorage] = []

            def pack(tensor: Tensor, kept: list[torch.UntypedStorage] = kept) -> Tensor:
                if tuple(tensor.shape) in shapes:
                    kept.append(tensor.untyped_storage())
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                out = wrapped(part(pair.inputs(step)))
            sizes = [storage.nbytes() for storage in kept]
            expect(sum(sizes) == 0, f"{dtype}, step {step}: saved full weights have {sizes} bytes")
            wrapped.zero_grad()
            loss_of(out).backward()
            wrapped.finish_gradient_synchronization()
            expect(all(p.grad.isfinite().all() for p in wrapped.parameters()), "a gradient is not finite")


# -- cases: computing in another dtype --------------------------------------------------------------------------------


class Low(nn.Module):
    """Norms and sums in float32, products in what the Linears take."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.first = nn.Linear(6, 7, bias=False)
        self.norm = nn.LayerNorm(7)
        self.second = nn.Linear(7, 7, bias=bias)
        self.head = Linear(7, 5)
        self.dtypes: list[torch.dtype] = []

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embed(tokens)
        first = self.first(embedded)
        x = self.norm(first.float())
        second = self.second(x)
        out = self.head(x + second.float())
        self.dtypes = [embedded.dtype, first.dtype, second.dtype, out.dtype]
        return out


def cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """As one process would compute it."""
    for inner in module.modules():
        if isinstance(inner, nn.Embedding):
            inner.forward = lambda input, m=inner: F.embedding(input, m.weight.to(dtype))
        elif is_sharded(inner):
            inner.forward = lambda input, m=inner: F.linear(
                input.to(dtype), m.weight.to(dtype), None if getattr(m, "bias", None) is None else m.bias.to(dtype)
            )
    return module


def gradients_by_part(module: nn.Module, batch: Tensor) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {name: [] for name, _ in module.named_parameters()}
    for of_rank in range(world()):
        module.zero_grad()
        loss_of(module(part(batch, of_rank))).backward()
        for name, p in module.named_parameters():
            found[name].append(p.grad.clone())
    return found


def train_in_low_precision(make: Callable[[], nn.Module]) -> None:
    """Parts are rounded each for itself, so the reference computes them one by one."""
    for dtype in (torch.bfloat16, torch.float16):
        eps = torch.finfo(dtype).eps
        for number, optimizer in enumerate(OPTIMIZERS):
            whole = cast(seeded(make), dtype)
            wrapped = FSDP(seeded(make, rank()), compute_dtype=dtype)
            theirs, ours = optimizer(whole), optimizer(wrapped)
            names = sharded_names(whole)
            slack = dict.fromkeys(names, 0.0)
            lr = (0.1 / (1 - 0.9), 0.01 / 1e-3)[number]
            for step in range(4):
                batch = tokens(step)
                wrapped.zero_grad()
                WATCH.clear()
                out = WATCH.forward(f"{dtype}, step {step}", wrapped, part(batch))
                with torch.no_grad():
                    expected = whole(part(batch))
                close(f"{dtype}, step {step}: forward", out, expected, 4 * eps * float(expected.abs().max()))
                dtypes = wrapped.module.dtypes
                expect(dtypes == [dtype] * 4, f"modules gave {dtypes} for {dtype}")
                with WATCH.passes():
                    loss_of(out).backward()
                    wrapped.finish_gradient_synchronization()
                WATCH.nothing_left("after finish")
                for what, sizes in (("gather", 4), ("scatter", 4)):
                    expect(len(WATCH.of(what)) >= sizes, f"{what}: {WATCH.of(what)}")

                by_part = gradients_by_part(whole, batch)
                for name, p in whole.named_parameters():
                    p.grad = torch.stack(by_part[name]).mean(0)
                    largest = float(torch.stack(by_part[name]).abs().max())
                    expect(largest > 1e-3, f"{name}: the largest gradient is {largest}")
                    grad = wrapped.module.get_parameter(name).grad
                    expect(grad.dtype == torch.float32, f"gradient of {name} in {grad.dtype}")
                    bound = (4 if step == 0 else 16) * eps * largest
                    expected = rows(p.grad) if name in names else p.grad
                    close(f"{dtype}, step {step}: gradient of {name}", grad, expected, bound)
                    slack[name] = slack.get(name, 0.0) + lr * bound
                replicated = [p.grad for name, p in wrapped.module.named_parameters() if name not in names]
                same_bits("gradient", replicated)
                theirs.step()
                ours.step()
                gathered = gather_full_params(wrapped)
                for name, p in whole.named_parameters():
                    close(f"{dtype}, step {step}: {name}", gathered[name].detach(), p.detach(), slack[name])
                    expect(wrapped.module.get_parameter(name).dtype == torch.float32, f"{name} is not float32")


@case("low precision")
def low_precision() -> None:
    train_in_low_precision(Low)


@case("low precision")
def low_precision_with_biases() -> None:
    """They stay in float32, but the product is added to them in one operation."""
    train_in_low_precision(partial(Low, bias=True))


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.mix = nn.Linear(6, 5, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.mix(input=self.embed(input=tokens).float())


def forward_in_low_precision(*makes: Callable[[], nn.Module]) -> None:
    """The same bits as in one process."""
    for make in makes:
        for dtype in (torch.bfloat16, torch.float16):
            wrapped, reference = FSDP(seeded(make, rank()), dtype), cast(seeded(make), dtype)
            for step in range(2):
                batch = part(tokens(step))
                out = WATCH.forward(f"{make}, {dtype}", wrapped, batch)
                close(f"{make}, {dtype}", out.detach(), reference(batch).detach(), 0.0)
                loss_of(out).backward()
                wrapped.finish_gradient_synchronization()
                for name, p in wrapped.module.named_parameters():
                    expect(p.dtype == p.grad.dtype == torch.float32, f"{name}: {p.dtype}, gradient {p.grad.dtype}")


@case("low precision")
def low_precision_forward() -> None:
    forward_in_low_precision(Low, partial(Tied, bias=False))


@case("low precision")
def low_precision_of_inputs_with_names() -> None:
    forward_in_low_precision(Keywords)


# -- cases: a Transformer ---------------------------------------------------------------------------------------------


def adamw_of_transformers(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)


def twenty_steps(checkpoint_blocks: int, clip: bool) -> None:
    whole = seeded(transformer)
    wrapped = FSDP(seeded(partial(transformer, checkpoint_blocks=checkpoint_blocks), rank()))
    theirs, ours = adamw_of_transformers(whole), adamw_of_transformers(wrapped)
    losses = []
    for step in range(20):
        batch = text(step % 3)
        theirs.zero_grad()
        ours.zero_grad()
        expected = language_loss(whole(batch), batch)
        expected.backward()
        WATCH.clear()
        out = WATCH.forward(f"step {step}", wrapped, part(batch))
        with WATCH.passes():
            loss = language_loss(out, part(batch))
            loss.backward()
            wrapped.finish_gradient_synchronization()
        WATCH.nothing_left(f"step {step}")
        if clip:
            norms = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5), clip_grad_norm_(wrapped, 0.5)
            expect(torch.allclose(*norms, rtol=1e-5), f"step {step}: norms {norms}")
            same_bits("norm", [norms[1]])
        mean = torch.stack(everywhere(loss.detach())).mean()
        close(f"step {step}: loss", mean, expected.detach(), 1e-5)
        losses.append(float(mean))
        theirs.step()
        ours.step()
    expect(losses[19] < 0.8 * losses[1], f"it did not learn: {losses}")  # two losses of one batch
    gathered = gather_full_params(wrapped)
    for name, p in whole.named_parameters():
        close(f"after 20 steps: {name}", gathered[name].detach(), p.detach(), 1e-5)


@case("transformer")
def twenty_steps_of_a_transformer() -> None:
    twenty_steps(checkpoint_blocks=0, clip=True)


@case("transformer")
def twenty_steps_with_recomputation() -> None:
    twenty_steps(checkpoint_blocks=1, clip=False)


@case("transformer")
def from_the_meta_device() -> None:
    with torch.device("meta"):
        module = transformer()
    wrapped = FSDP(module)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        expect(tensor.device.type == "cpu", f"{name} is on {tensor.device}")
        expect(tensor.isfinite().all(), f"{name} is not finite")
    whole = seeded(transformer, 1)
    names = sharded_names(whole)
    for name, p in whole.named_parameters():
        shape = rows(p).shape if name in names else p.shape
        found = module.get_parameter(name)
        expect(found.shape == shape, f"{name}: {[*found.shape]} instead of {[*shape]}")
        expect(found.requires_grad, f"{name} is not trained")
    same_bits("replicated", [p for name, p in module.named_parameters() if name not in names])
    same_bits("buffer", module.buffers())

    gathered = gather_full_params(wrapped)
    same_bits("gathered", gathered.values())
    for name, fresh in whole.named_parameters():
        full = gathered[name]
        if name in names:  # each rank has drawn its own rows, as wide as those of a model that is built whole
            expect(len(full.unique(dim=0)) == len(full), f"{name} has equal rows")
            ratio = float(full.std() / fresh.std())
            expect(0.8 < ratio < 1.25, f"{name}: standard deviation {ratio} times that of a model built whole")
        else:
            close(name, full.detach(), torch.ones_like(fresh))
    whole.load_state_dict(gathered)
    with torch.no_grad():
        close("forward", wrapped(text(0)), whole(text(0)))

    optimizers = sgd(whole), sgd(wrapped)
    for step in range(3):
        for optimizer, model, batch in zip(optimizers, (whole, wrapped), (text(step), part(text(step))), strict=True):
            optimizer.zero_grad()
            language_loss(model(batch), batch).backward()
            if model is wrapped:
                wrapped.finish_gradient_synchronization()
            optimizer.step()
    gathered = gather_full_params(wrapped)
    for name, p in whole.named_parameters():
        close(f"trained {name}", gathered[name].detach(), p.detach())


class Homemade(nn.Module):
    """Cannot fill what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))


@case("transformer")
def from_the_meta_device_without_values() -> None:
    with torch.device("meta"):
        homemade = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Homemade()))
        linear = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), Linear(3, 3))
        good = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7), nn.LayerNorm(7))
    for module, name in ((homemade, "gain"), (linear, "weight")):
        try:
            FSDP(module)
            answer: Any = "no error"
        except Exception as error:
            answer = error
        said = everywhere((type(answer).__name__, str(answer)))
        expect(all(kind == "ValueError" and name in text for kind, text in said), f"{name}: {said}")
    with torch.device("meta"):
        wrapped = FSDP(Tied())
    full = gather_full_params(wrapped)
    expect(torch.equal(full["head.weight"], full["embed.weight"]), "no longer tied")
    expect(full["head.weight"].std() > 0.1, f"{full}")
    count = len(list(wrapped.parameters()))
    expect(count == 4, f"{count} parameters")

    wrapped = FSDP(good)  # parts of torch can
    out = wrapped(part(torch.arange(ROWS) % 7))
    expect(out.shape == (ROWS // world(), 7), f"{out.shape}")
    expect(out.isfinite().all() and out.std() > 0, f"{out}")
    full = gather_full_params(wrapped)
    expect(tuple(full["0.weight"].shape) == (7, 3), f"{full}")
    bound = 1 / 3**0.5
    expect(full["1.weight"].abs().max() <= bound, "rows outside of what a whole Linear draws")
    expect(full["1.weight"].abs().max() > bound / 3, "rows smaller than what a whole Linear draws")
