"""Parameters, gradients, optimizers of a user, and the comparison with the plain optimizer, bit by bit."""

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cs336_systems.parallel import ShardedOptimizer
from tests.distributed.compare import everywhere

Shape = tuple[int, ...]
MIXTURE: list[Shape] = [(5, 3), (7,), (4, 4), (), (2, 3, 2), (9,), (3, 5), (1,)]
ADAMW = {"lr": 1e-2, "weight_decay": 0.1}


class Loose(nn.Module):
    """Parameters without a forward."""

    def __init__(self, tensors: Iterable[Tensor]):
        super().__init__()
        self.items = nn.ParameterList(tensors)


def noise(shape: Shape, *seed: int) -> Tensor:
    """Random numbers that are the same on every rank."""
    generator = torch.Generator().manual_seed(sum(part * 1009**power for power, part in enumerate(seed, 1)))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def loose(shapes: Iterable[Shape] = MIXTURE, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> Loose:
    return Loose(noise(shape, i).to(dtypes[i % len(dtypes)]) for i, shape in enumerate(shapes))


def transformer(layers: int = 12, d: int = 32) -> Loose:
    """The tensors of a small one: 9 in a layer, an embedding and a norm."""
    layer = [(d, d)] * 4 + [(3 * d, d), (d, 3 * d), (3 * d, d), (d,), (d,)]
    return loose([(500, d), *layer * layers, (d,)])


def in_two(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay; the rest with another learning rate and without."""
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.3},
        {"params": (p for p in model.parameters() if p.dim() < 2), "lr": 0.05},
    ]


def in_two_for_users(model: nn.Module) -> list[dict[str, Any]]:
    first, *rest = model.parameters()
    return [{"params": rest, "decay": 0.5, "note": "kept"}, {"params": first, "plan": (2.0,)}]


def each_its_own(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p]} for p in model.parameters()]


def give_gradients(parameters: Iterable[Tensor], step: int, without: Iterable[int] = (), scale: float = 1.0) -> None:
    """Set the gradients of trainable parameters in the layout of autograd; None for the numbers in `without`."""
    for i, p in enumerate(parameters):
        if i in without:
            p.grad = None
        elif p.requires_grad:
            p.grad = torch.empty_like(p).copy_(noise(p.shape, i, step) * scale)


class Wandering(Optimizer):
    """State of all kinds: a number, a list, None, and a tensor that is not shaped like the parameter."""

    def __init__(self, params: Any, lr: float, decay: float = 0.9, plan: tuple[float, ...] = (1.0, 0.5, 0.25)):
        if lr < 0:
            raise ValueError(f"lr {lr}")
        super().__init__(params, {"lr": lr, "decay": decay, "plan": plan})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(count=0, norms=[], nothing=None, average=torch.zeros_like(p), ends=p.new_zeros(2))
                factor = group["plan"][state["count"] % len(group["plan"])]
                state["count"] += 1
                state["norms"].append(round(float(p.grad.double().square().sum()), 6))
                state["average"].mul_(group["decay"]).add_(p.grad)
                state["ends"].add_(torch.stack([p.grad.sum(), p.grad.abs().sum()]))
                p.add_(state["average"], alpha=-group["lr"] * factor / (1 + len(state["norms"])))
                p.sub_(state["ends"][1], alpha=1e-3)
        return loss


class Counting(Optimizer):
    """Writes options of its groups, as optimizers without a schedule do."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["last"] = p.grad.clone()
                    p.sub_(p.grad, alpha=group["lr"] / group["k"])


# -- comparison -------------------------------------------------------------------------------------------------------


def assert_same(where: str, found: Any, expected: Any) -> None:
    """Assert equal types, keys and bits of two state dicts, or of what is in them."""
    assert type(found) is type(expected), f"{where}: {type(found).__name__}, not {type(expected).__name__}"
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), f"{where}: keys {list(found)}, not {list(expected)}"
        for key in expected:
            assert_same(f"{where}[{key!r}]", found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), f"{where}: {len(found)} entries, not {len(expected)}"
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(f"{where}[{i}]", one, other)
    elif isinstance(expected, Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), f"{where}: {found}, not {expected}"
        assert torch.equal(found, expected), f"{where}: {found}, not {expected}"
    else:
        assert found == expected, f"{where}: {found!r}, not {expected!r}"


def owners(optimizer: Optimizer, parameters: Iterable[Tensor]) -> list[list[int]]:
    """For each rank the numbers of the parameters whose state it has."""
    numbers = {p: i for i, p in enumerate(parameters)}
    assert set(optimizer.state) <= set(numbers), "there is state of something that is not a parameter"
    return everywhere(sorted(numbers[p] for p, state in optimizer.state.items() if state))


class Pair:
    """The same parameters under the plain optimizer and under the sharded one."""

    def __init__(
        self,
        model: nn.Module,
        optimizer_cls: type[Optimizer] = torch.optim.AdamW,
        arrange: Callable[[nn.Module], Any] = nn.Module.parameters,
        **arguments: Any,
    ):
        arguments = arguments or (ADAMW if optimizer_cls is torch.optim.AdamW else {})
        self.models = copy.deepcopy(model), model  # in the order of `optimizers`
        plain = optimizer_cls(arrange(self.models[0]), **copy.deepcopy(arguments))
        sharded = ShardedOptimizer(arrange(self.models[1]), optimizer_cls, **arguments)
        self.optimizers: tuple[Optimizer, Optimizer] = plain, sharded
        self.clock = 0
        assert isinstance(sharded, Optimizer)
        assert_same("defaults", sharded.defaults, plain.defaults)

    def __iter__(self) -> Iterator[tuple[Any, Optimizer]]:
        return zip(self.models, self.optimizers, strict=True)

    @property
    def parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        plain, sharded = (list(model.parameters()) for model in self.models)
        return plain, sharded

    def compare(self) -> None:
        when = f"after step {self.clock}"
        for i, (p, q) in enumerate(zip(*self.parameters, strict=True)):
            assert_same(f"{when}, parameter {i}", q.data, p.data)
            assert_same(f"{when}, gradient {i}", q.grad, p.grad)
            assert q.requires_grad == p.requires_grad
        plain, ours = (
            [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
            for optimizer in self.optimizers
        )
        assert_same(f"{when}, param_groups", ours, plain)

    def step(self) -> None:
        """Update and compare at once: no parameter may still be on its way."""
        for optimizer in self.optimizers:
            assert optimizer.step() is None
        self.compare()

    def gradients(self, without: Iterable[int] = (), scale: float = 1.0) -> None:
        self.clock += 1
        for parameters in self.parameters:
            give_gradients(parameters, self.clock, without, scale)

    def train(self, steps: int = 2, without: Iterable[int] = ()) -> None:
        for _ in range(steps):
            self.gradients(without)
            self.step()

    def owners(self) -> list[list[int]]:
        return owners(self.optimizers[1], self.parameters[1])

    def close(self) -> None:
        """Compare what holds after any training: the plain state dict, and state on one rank each."""
        self.compare()
        plain, sharded = self.optimizers
        for groups in zip(plain.param_groups, sharded.param_groups, strict=True):
            numbers = [
                [[id(p) for p in model.parameters()].index(id(p)) for p in group["params"]]
                for model, group in zip(self.models, groups, strict=True)
            ]
            assert numbers[0] == numbers[1], "param_groups hold other parameters, or in another order"
        assert_same("state_dict()", sharded.state_dict(), plain.state_dict())
        owned = self.owners()  # after state_dict(): what that has gathered must not stay
        with_state = sorted(i for i, p in enumerate(self.parameters[0]) if plain.state.get(p))
        assert sorted(chain.from_iterable(owned)) == with_state, f"{with_state} on one rank each, not {owned}"
