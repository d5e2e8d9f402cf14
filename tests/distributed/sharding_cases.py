"""What ranks do in the tests of the sharded optimizer.

A rank holds the same parameters twice and trains them with the plain optimizer and with the sharded one. What differs
is written down and not raised: a rank that leaves early lets the others wait for ever.
"""

import copy
import io
import math
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from cs336_systems.parallel import DDP, ShardedOptimizer

Shape = tuple[int, ...]
MIXTURE: list[Shape] = [(5, 3), (7,), (4, 4), (), (2, 3, 2), (9,), (3, 5), (1,)]
CASES: dict[str, Callable[[], None]] = {}
COMPLAINTS: list[str] = []
"""Of the case that runs."""


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def expect(fact: bool, otherwise: str) -> None:
    if not fact:
        COMPLAINTS.append(otherwise)


def run_cases(names: Iterable[str]) -> list[str]:
    """The complaints of this rank."""
    found = []
    for name in names:
        COMPLAINTS.clear()
        try:
            CASES[name]()
        except Exception:
            COMPLAINTS.append(traceback.format_exc())
            print(f"rank {dist.get_rank()}, {name}: {COMPLAINTS[-1]}", file=sys.stderr)  # the others may hang
        found += [f"rank {dist.get_rank()} of {dist.get_world_size()}, {name}: {text}" for text in COMPLAINTS]
    return found


def gathered(value: Any) -> list[Any]:
    """By rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# -- models and gradients ---------------------------------------------------------------------------------------------


class Loose(nn.Module):
    """Parameters, and nothing to do with them."""

    def __init__(self, tensors: Iterable[Tensor]):
        super().__init__()
        self.items = nn.ParameterList(tensors)


def noise(shape: Shape, *seed: int) -> Tensor:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(sum(part * 1009**power for power, part in enumerate(seed, 1)))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def loose(shapes: Iterable[Shape] = MIXTURE, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> Loose:
    return Loose(noise(shape, i).to(dtypes[i % len(dtypes)]) for i, shape in enumerate(shapes))


def transformer(layers: int = 12, d: int = 32) -> Loose:
    """The tensors of a small one: 9 in a layer, an embedding and a norm."""
    layer = [(d, d)] * 4 + [(3 * d, d), (d, 3 * d), (3 * d, d), (d,), (d,)]
    return loose([(500, d), *layer * layers, (d,)])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 11, bias=False)
        for i, parameter in enumerate(self.parameters()):
            parameter.data = noise(parameter.shape, i).float()
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(self.embed(tokens)).tanh())


def give_gradients(parameters: Iterable[Tensor], step: int, without: Iterable[int] = (), scale: float = 1.0) -> None:
    """Those of the trainable ones, in the layout that autograd gives them; None for the numbers in `without`."""
    for i, p in enumerate(parameters):
        if i in without:
            p.grad = None
        elif p.requires_grad:
            p.grad = torch.empty_like(p).copy_(noise(p.shape, i, step) * scale)


# -- comparison -------------------------------------------------------------------------------------------------------


def differences(ours: Any, plain: Any, where: str = "") -> list[str]:
    """Between two state dicts, or what is in them: types and bits."""
    if type(ours) is not type(plain):
        return [f"{where}: {type(ours).__name__} instead of {type(plain).__name__}"]
    if isinstance(plain, dict):
        if ours.keys() != plain.keys():
            return [f"{where}: keys {list(ours)} instead of {list(plain)}"]
        return [line for key in plain for line in differences(ours[key], plain[key], f"{where}[{key!r}]")]
    if isinstance(plain, (list, tuple)):
        if len(ours) != len(plain):
            return [f"{where}: {len(ours)} entries instead of {len(plain)}"]
        return [
            line for i, pair in enumerate(zip(ours, plain, strict=True)) for line in differences(*pair, f"{where}[{i}]")
        ]
    if isinstance(plain, Tensor):
        if (ours.dtype, ours.shape) != (plain.dtype, plain.shape):
            return [f"{where}: {ours.dtype} {tuple(ours.shape)} instead of {plain.dtype} {tuple(plain.shape)}"]
        if not torch.equal(ours, plain):
            return [f"{where}: off by up to {(ours.double() - plain.double()).abs().max():.3g}"]
        return []
    return [] if ours == plain else [f"{where}: {ours!r} instead of {plain!r}"]


def options(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def tensor_bytes(tensors: Iterable[Any]) -> int:
    return sum(t.nbytes for t in tensors if isinstance(t, Tensor))


def owners(optimizer: Optimizer, parameters: Iterable[Tensor]) -> list[list[int]]:
    """For each rank the numbers of the parameters whose state it has."""
    numbers = {p: i for i, p in enumerate(parameters)}
    expect(set(optimizer.state) <= set(numbers), "there is state of something that is not a parameter")
    return gathered(sorted(numbers[p] for p, state in optimizer.state.items() if p in numbers and state))


class Pair:
    """The same parameters under the plain optimizer and under the sharded one."""

    def __init__(
        self,
        model: nn.Module,
        optimizer_cls: type[Optimizer],
        arrange: Callable[[nn.Module], Any] = nn.Module.parameters,
        **arguments: Any,
    ):
        self.models = copy.deepcopy(model), model  # in the order of `optimizers`
        plain = optimizer_cls(arrange(self.models[0]), **copy.deepcopy(arguments))
        sharded = ShardedOptimizer(arrange(self.models[1]), optimizer_cls, **arguments)
        self.optimizers: tuple[Optimizer, Optimizer] = plain, sharded
        self.clock = 0
        expect(isinstance(sharded, Optimizer), "not an Optimizer")
        expect(not differences(sharded.defaults, plain.defaults), f"defaults {sharded.defaults}, not {plain.defaults}")

    def __iter__(self) -> Iterator[tuple[nn.Module, Optimizer]]:
        return zip(self.models, self.optimizers, strict=True)

    @property
    def parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        plain, sharded = (list(model.parameters()) for model in self.models)
        return plain, sharded

    def gradients(self, without: Iterable[int] = (), scale: float = 1.0) -> None:
        self.clock += 1
        for parameters in self.parameters:
            give_gradients(parameters, self.clock, without, scale)

    def compare(self) -> None:
        when = f"after step {self.clock}"
        for i, (p, q) in enumerate(zip(*self.parameters, strict=True)):
            COMPLAINTS.extend(differences(q.data, p.data, f"{when}, parameter {i}"))
            COMPLAINTS.extend(differences(q.grad, p.grad, f"{when}, gradient {i}"))
            expect(q.requires_grad == p.requires_grad, f"{when}, parameter {i}: requires_grad changed")
        ours, plain = (options(optimizer) for optimizer in self.optimizers[::-1])
        COMPLAINTS.extend(differences(ours, plain, f"{when}, param_groups"))

    def step(self) -> None:
        """Also compares, at once: nothing may still be on its way."""
        for optimizer in self.optimizers:
            expect(optimizer.step() is None, "step() without a closure returned something")
        self.compare()

    def train(self, steps: int = 2, without: Iterable[int] = ()) -> None:
        for _ in range(steps):
            self.gradients(without)
            self.step()

    def owners(self) -> list[list[int]]:
        return owners(self.optimizers[1], self.parameters[1])

    def close(self) -> None:
        """What holds after any training: the same bits everywhere, state on one rank each, the plain state dict."""
        self.compare()
        plain, sharded = self.optimizers
        places = [[id(p) for p in model.parameters()] for model in self.models]
        in_groups = [
            [place.index(id(p)) for group in optimizer.param_groups for p in group["params"]]
            for place, optimizer in zip(places, self.optimizers, strict=True)
        ]
        expect(in_groups[0] == in_groups[1], "param_groups hold other parameters, or in another order")

        flat = [q.detach().contiguous().view(-1).view(torch.uint8) for q in self.parameters[1] if q.numel()]
        bits = torch.cat(flat)
        others = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
        dist.all_gather(others, bits)
        expect(all(torch.equal(other, bits) for other in others), "ranks hold different bits")

        with_state = sorted(i for i, p in enumerate(self.parameters[0]) if plain.state.get(p))
        state = sharded.state_dict()
        COMPLAINTS.extend(differences(state, plain.state_dict(), "state_dict()"))
        owned = self.owners()  # after state_dict(): what that has gathered must not stay
        expect(
            sorted(chain.from_iterable(owned)) == with_state,
            f"state of {with_state} expected on one rank each, is on {owned}",
        )


# -- optimizers of a user ---------------------------------------------------------------------------------------------


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
    """Writes options as it goes, as optimizers without a schedule do."""

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


ADAMW = {"lr": 1e-2, "weight_decay": 0.1}


def in_two(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay, the rest with another learning rate and without."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return [
        {"params": matrices, "weight_decay": 0.3},
        {"params": (p for p in model.parameters() if p.dim() < 2), "lr": 0.05},
    ]


# -- cases: like the plain optimizer ----------------------------------------------------------------------------------


@case
def adamw() -> None:
    for fast in ({}, {"foreach": False}, {"foreach": True}, {"fused": True}, {"amsgrad": True, "maximize": True}):
        pair = Pair(loose(), torch.optim.AdamW, **ADAMW, **fast)
        pair.train(3)
        pair.close()


@case
def every_optimizer_of_torch() -> None:
    for name, arguments in {
        "SGD": {"lr": 0.1},
        "Adam": {"weight_decay": 0.1},
        "Adamax": {},
        "NAdam": {},
        "RAdam": {},
        "RMSprop": {"centered": True, "momentum": 0.5},
        "Adagrad": {"initial_accumulator_value": 0.5},  # has state before the first step
        "Adadelta": {},
        "ASGD": {"t0": 1},
        "Rprop": {},
        "Adafactor": {},  # state of rows and columns
    }.items():
        pair = Pair(loose([(5, 3), (7,), (4, 4), (6,), (2, 2)]), getattr(torch.optim, name), **arguments)
        pair.close()
        pair.train(2)
        pair.close()


@case
def sgd_with_momentum() -> None:
    pair = Pair(loose(), torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    pair.train(4)
    pair.close()


@case
def of_a_user() -> None:
    pair = Pair(loose(), Wandering, in_two_for_users, lr=0.1)
    pair.train(2)
    pair.train(1, without=[0, 3])
    pair.train(2)
    pair.close()


def in_two_for_users(model: nn.Module) -> list[dict[str, Any]]:
    first, *rest = model.parameters()
    return [{"params": rest, "decay": 0.5, "note": "kept"}, {"params": first, "plan": (2.0,)}]


@case
def options_that_step_writes() -> None:
    pair = Pair(loose([(3,), (4, 2), (2,)]), Counting, lambda model: [{"params": [p]} for p in model.parameters()])
    pair.train(3)
    pair.close()


@case
def groups() -> None:
    pair = Pair(loose(), torch.optim.AdamW, in_two, **ADAMW)
    pair.train(3)
    pair.close()

    def with_an_empty_one(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": []}, *({"params": p, "lr": 0.01 * i} for i, p in enumerate(model.parameters()))]

    pair = Pair(loose(), torch.optim.SGD, with_an_empty_one, lr=0.1, momentum=0.5)
    pair.train(3)
    pair.close()


@case
def forms_of_the_parameters() -> None:
    def named_groups(model: nn.Module) -> list[dict[str, Any]]:
        first, *rest = model.named_parameters()
        return [{"params": iter(rest), "lr": 0.3}, {"params": [first]}]

    forms: list[Callable[[nn.Module], Any]] = [
        lambda model: (p for p in model.parameters()),
        lambda model: list(model.parameters()),
        lambda model: tuple(model.parameters()),
        lambda model: [{"params": list(model.parameters())}],
        lambda model: iter([{"params": model.parameters()}]),
        lambda model: model.named_parameters(),
        lambda model: list(model.named_parameters()),
        named_groups,
    ]
    for form in forms:
        pair = Pair(loose(), torch.optim.AdamW, form, **ADAMW)
        pair.train(1)
        pair.close()


@case
def options_changed_by_hand() -> None:
    pair = Pair(loose(), torch.optim.AdamW, in_two, **ADAMW)
    for step in range(4):
        for _, optimizer in pair:
            optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.param_groups[1]["weight_decay"] = 0.1 * step
            optimizer.param_groups[1]["betas"] = (0.5 + 0.1 * step, 0.9)
        pair.train(1)
    for _, optimizer in pair:
        optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    still = [q.detach().clone() for q in pair.parameters[1] if q.dim() > 1]
    pair.train(1)
    expect(not differences([q.data for q in pair.parameters[1] if q.dim() > 1], still), "lr 0, and yet it moved")
    pair.close()


@case
def a_learning_rate_in_a_tensor() -> None:
    pair = Pair(loose(), torch.optim.AdamW, lr=torch.tensor(0.1), foreach=False)
    pair.train(1)
    for _, optimizer in pair:
        optimizer.param_groups[0]["lr"].fill_(0.02)
    pair.train(1)
    pair.close()


@case
def schedulers() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler warns if it does not see the optimizer's steps
        pair = Pair(loose(), torch.optim.AdamW, in_two, **ADAMW)
        schedules = [LambdaLR(optimizer, [lambda k: 0.5**k, lambda k: 1 / (1 + k)]) for _, optimizer in pair]
        for _ in range(4):
            pair.train(1)
            for schedule in schedules:
                schedule.step()
        expect(math.isclose(pair.optimizers[1].param_groups[0]["lr"], 1e-2 / 16), "LambdaLR did not act")
        pair.close()

        for optimizer_cls, option in ((torch.optim.AdamW, "betas"), (torch.optim.SGD, "momentum")):
            momentum = {"momentum": 0.9} if option == "momentum" else {}
            pair = Pair(loose(), optimizer_cls, lr=0.1, **momentum)
            schedules = [OneCycleLR(optimizer, max_lr=0.2, total_steps=6) for _, optimizer in pair]
            seen = set()
            for _ in range(5):
                pair.train(1)
                for schedule in schedules:
                    schedule.step()
                seen.add(pair.optimizers[1].param_groups[0][option])
            expect(len(seen) > 3, f"OneCycleLR did not change {option}")
            pair.close()


@case
def a_group_added_in_mid_training() -> None:
    model = loose([*MIXTURE, (6, 2), (3,), (8, 8), ()])
    for p in list(model.parameters())[8:]:
        p.requires_grad_(False)
    for warm in (0, 2):
        pair = Pair(copy.deepcopy(model), torch.optim.AdamW, lambda model: list(model.parameters())[:8], **ADAMW)
        pair.train(warm)
        before = pair.owners()
        for module, optimizer in pair:
            late = [p.requires_grad_() for p in list(module.parameters())[8:]]
            optimizer.add_param_group({"params": iter(late[:3]), "lr": 0.3})
            optimizer.add_param_group({"params": late[3]})
        added = pair.owners()
        expect(added == before, f"state moved as a group was added: {before}, {added}")
        pair.train(3)
        after = [[i for i in owned if i < 8] for owned in pair.owners()]
        expect(not warm or after == before, f"owners changed: {before}, {after}")
        for _, optimizer in pair:
            optimizer.param_groups[1]["lr"] = 0.1
        pair.train(1)
        pair.close()


@case
def a_bad_group_is_refused_and_forgotten() -> None:
    pair = Pair(loose(), torch.optim.AdamW, **ADAMW)
    pair.train(1)
    for module, optimizer in pair:
        there = next(module.parameters())
        for group, error in (
            ({"params": [there]}, ValueError),
            ({"params": [there * 2]}, ValueError),
            ({"params": ["text"]}, TypeError),
            ([there], TypeError),
        ):
            try:
                optimizer.add_param_group(group)
                expect(False, f"took the group {group}")
            except error:
                pass
    pair.train(1)
    pair.close()


@case
def closures() -> None:
    for shapes in (MIXTURE, [(3, 3)]):  # with one parameter most ranks own nothing
        for optimizer_cls, arguments in ((torch.optim.AdamW, ADAMW), (Wandering, {"lr": 0.1})):
            pair = Pair(loose(shapes), optimizer_cls, **arguments)
            for step in range(3):
                losses = []
                for module, optimizer in pair:
                    calls = []

                    def closure(module=module, optimizer=optimizer, calls=calls, step=step):
                        optimizer.zero_grad()
                        loss = sum(((p - step) ** 2).sum() for p in module.parameters())
                        loss.backward()
                        calls.append(loss.item())
                        return loss

                    returned = optimizer.step(closure) if step < 2 else optimizer.step(closure=closure)
                    expect(len(calls) == 1, f"closure called {len(calls)} times")
                    expect(isinstance(returned, Tensor) and [returned.item()] == calls[:1], f"step() gave {returned}")
                    losses.append(calls)
                expect(losses[0] == losses[1], f"losses {losses}")
                pair.compare()
            pair.close()


@case
def hooks() -> None:
    pair = Pair(loose(), torch.optim.AdamW, in_two, **ADAMW)
    logs: list[list[Any]] = [[], []]
    handles = []
    for (module, optimizer), log in zip(pair, logs, strict=True):

        def before(caller, args, kwargs, module=module, optimizer=optimizer, log=log):
            log.append(("before", caller is optimizer, next(module.parameters()).sum().item()))
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)

        def after(caller, args, kwargs, module=module, optimizer=optimizer, log=log):
            log.append(("after", caller is optimizer, [p.sum().item() for p in module.parameters()]))
            with torch.no_grad():
                for p in module.parameters():
                    p.clamp_(-0.5, 0.5)

        handles += [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    everywhere: list[Any] = []
    everyone = register_optimizer_step_post_hook(lambda caller, args, kwargs: everywhere.append(caller))
    pair.train(2)
    everyone.remove()
    expect(logs[1] == logs[0], f"hooks saw {logs[1]} instead of {logs[0]}")
    expect([entry[:2] for entry in logs[1]] == [("before", True), ("after", True)] * 2, f"hooks: {logs[1]}")
    for name, optimizer in zip(("plain", "sharded"), pair.optimizers, strict=True):
        calls = sum(caller is optimizer for caller in everywhere)
        expect(calls == 2, f"hook for all optimizers: called {calls} times with the {name} one")
    for handle in handles:
        handle.remove()
    pair.train(1)
    expect(len(logs[1]) == 4, "a hook that was removed is called")
    pair.close()


@case
def hooks_of_state_dicts() -> None:
    pair = Pair(loose(), torch.optim.AdamW, **ADAMW)
    pair.train(1)
    logs: list[list[str]] = [[], []]
    for (_, optimizer), log in zip(pair, logs, strict=True):
        optimizer.register_state_dict_pre_hook(lambda caller, log=log: log.append("before saving"))
        optimizer.register_state_dict_post_hook(lambda caller, state, log=log: log.append("after saving"))
        optimizer.register_load_state_dict_pre_hook(lambda caller, state, log=log: log.append("before loading"))
        optimizer.register_load_state_dict_post_hook(lambda caller, log=log: log.append("after loading"))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    expect(logs[1] == logs[0], f"hooks {logs[1]} instead of {logs[0]}")
    pair.train(1)
    pair.close()


@case
def zero_grad() -> None:
    pair = Pair(loose(), torch.optim.AdamW, in_two, **ADAMW)
    for how in ({}, {"set_to_none": True}, {"set_to_none": False}):
        pair.train(1)
        for _, optimizer in pair:
            optimizer.zero_grad(**how)
        found = [q.grad for q in pair.parameters[1]]
        if how.get("set_to_none", True):
            expect(found == [None] * len(found), f"zero_grad({how}) left gradients")
        else:
            expect(all(g is not None and not g.any() for g in found), f"zero_grad({how}) gave {found}")
        pair.step()  # with zeros state goes on, without gradients nothing happens
    pair.close()


@case
def mixed_dtypes() -> None:
    dtypes = torch.float32, torch.float64, torch.bfloat16, torch.float16
    for optimizer_cls, arguments in ((torch.optim.AdamW, ADAMW), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})):
        pair = Pair(loose([*MIXTURE, (3, 3), (2,)], dtypes), optimizer_cls, **arguments)
        pair.train(3)
        pair.close()


@case
def frozen() -> None:
    model = loose()
    for i in (0, 3, 5):
        model.items[i].requires_grad_(False)
    pair = Pair(model, torch.optim.AdamW, **ADAMW)
    pair.train(2)
    for i, thawed in ((0, True), (3, True), (1, False), (2, False)):
        for module in pair.models:
            module.items[i].requires_grad_(thawed).grad = None
    pair.train(2)
    for module in pair.models:
        module.items[1].requires_grad_()
    pair.train(2)
    expect(torch.equal(pair.parameters[1][5], noise((9,), 5).float()), "a parameter that was always frozen moved")
    pair.close()


@case
def frozen_with_its_gradient_still_there() -> None:
    """The plain optimizer goes on with it: what counts is the gradient."""
    pair = Pair(loose(), torch.optim.AdamW, **ADAMW)
    pair.train(1)
    for module in pair.models:
        for p in module.parameters():
            p.requires_grad_(False)
    pair.step()
    pair.close()


@case
def without_gradients() -> None:
    pair = Pair(loose(), torch.optim.AdamW, in_two, **ADAMW)
    everything = range(len(MIXTURE))
    pair.train(1, without=everything)
    pair.train(1, without=[0, 1, 7])
    pair.train(1, without=[0, 2, 3, 4])
    pair.train(1, without=everything)
    pair.train(1, without=[0])
    pair.close()


@case
def tied() -> None:
    tokens = torch.arange(6) % 11
    for arrange in (nn.Module.parameters, in_two, nn.Module.named_parameters):
        pair = Pair(Tied(), torch.optim.AdamW, arrange, **ADAMW)
        for _ in range(3):
            pair.clock += 1
            for module, optimizer in pair:
                optimizer.zero_grad()
                nn.functional.cross_entropy(module(tokens), tokens.roll(-1)).backward()
            pair.step()
        expect(pair.models[1].head.weight is pair.models[1].embed.weight, "no longer tied")
        pair.close()


def strides_of(pair: Pair) -> list[tuple[int, ...]]:
    return [q.stride() for q in pair.parameters[1]]


@case
def other_layouts() -> None:
    model = Loose(
        [
            noise((3, 5), 0).float().t(),
            noise((4,), 1).float(),
            noise((2, 3, 4), 2).float().permute(2, 0, 1),
            noise((2, 3, 2, 2), 3).float().to(memory_format=torch.channels_last),
            noise((6, 4), 4).float()[::2, 1:3],  # a part of other memory
            noise((5,), 5).bfloat16()[1:],
        ]
    )
    for optimizer_cls, arguments in ((torch.optim.AdamW, ADAMW), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})):
        pair = Pair(copy.deepcopy(model), optimizer_cls, **arguments)
        around = torch.zeros(6, 4)
        pair.models[1].items[4].data = around[::2, 1:3].copy_(pair.models[0].items[4].data)
        strides = strides_of(pair)
        pair.train(3)
        kept = [now == before or i == 4 for i, (now, before) in enumerate(zip(strides_of(pair), strides, strict=True))]
        expect(all(kept), f"layouts of dense memory kept: {kept}")
        expect(not around[1::2].any() and not around[:, ::3].any(), "wrote beside a parameter")
        pair.close()


@case
def without_elements() -> None:
    pair = Pair(loose([(0,), (3, 2), (0, 4), (2, 0, 3), (5,)]), torch.optim.AdamW, **ADAMW)
    pair.train(2)
    pair.close()


@case
def fewer_parameters_than_ranks() -> None:
    for shapes in ([(4, 3)], [(3,), (2, 2)], [(0,), (2,)]):
        for optimizer_cls, arguments in (
            (torch.optim.AdamW, ADAMW),
            (Wandering, {"lr": 0.1}),
            (torch.optim.Adagrad, {}),
        ):
            if (0,) in shapes and optimizer_cls is Wandering:
                continue
            pair = Pair(loose(shapes), optimizer_cls, **arguments)
            pair.train(2)
            pair.close()
            for _, optimizer in pair:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            pair.train(1)
            pair.close()


@case
def moved_before_the_first_step() -> None:
    for arrange in (nn.Module.parameters, in_two):
        pair = Pair(loose(), torch.optim.AdamW, arrange, **ADAMW)
        for module in pair.models:
            module.double()
        pair.train(2)
        expect(all(q.dtype == torch.float64 for q in pair.parameters[1]), "not double")
        pair.close()


@case
def changed_from_outside() -> None:
    """Between steps parameters belong to the user."""
    pair = Pair(loose(), torch.optim.AdamW, **ADAMW)
    saved = copy.deepcopy(pair.models[0].state_dict())
    pair.train(2)
    for module in pair.models:
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(0.5)
    pair.train(1)
    for module in pair.models:
        module.load_state_dict(saved)
    pair.train(1)
    pair.close()


@case
def memory_changed_from_outside() -> None:
    pair = Pair(loose(), torch.optim.AdamW, **ADAMW)
    for _ in range(2):
        for module in pair.models:
            vector = nn.utils.parameters_to_vector(module.parameters()).detach()
            nn.utils.vector_to_parameters(vector * 0.5, module.parameters())  # now all are parts of one tensor
        pair.train(2)
    for module in pair.models:
        for p in module.parameters():
            p.data = p.data.clone()
    pair.train(2)
    pair.close()

    pair = Pair(loose(), torch.optim.SGD, lr=0.1)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for module in pair.models:
            module.to(dtype).zero_grad()
        pair.train(2)
    pair.close()

    model = loose([(4,), (2, 3), (5,)])
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector, model.parameters())
    pair = Pair(model, torch.optim.AdamW, **ADAMW)
    pair.train(2)
    pair.close()


@case
def scaled_gradients() -> None:
    for fused in (False, True):
        pair = Pair(loose(), torch.optim.AdamW, in_two, **ADAMW, fused=fused)
        scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in pair]
        for factor in (1.0, 1.0, math.inf, 1.0):
            pair.gradients(scale=1024.0 * factor if factor > 1 else scalers[0].get_scale())
            before = [q.detach().clone() for q in pair.parameters[1]]
            for scaler, (_, optimizer) in zip(scalers, pair, strict=True):
                scaler.scale(torch.ones(()))
                if not fused:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            moved = any(differences([q.data for q in pair.parameters[1]], before))
            expect(moved == (factor == 1), f"factor {factor}: moved {moved}")
            expect(scalers[1].get_scale() == scalers[0].get_scale(), "another scale")
            for _, optimizer in pair:  # the fused one leaves its gradients as it likes
                optimizer.zero_grad()
            pair.compare()
        expect(scalers[1].get_scale() == 512.0, f"scale {scalers[1].get_scale()}")
        pair.close()


@case
def after_data_parallel() -> None:
    """Every rank has data of its own."""
    pair = Pair(Tied(), torch.optim.AdamW, in_two, **ADAMW)
    wrapped = [DDP(module) for module in pair.models]
    for step in range(3):
        tokens = (torch.arange(6) * (2 + dist.get_rank()) + step) % 11
        pair.clock += 1
        for (_, optimizer), model in zip(pair, wrapped, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens), tokens.roll(-1)).backward()
            model.finish_gradient_synchronization()
        pair.step()
    pair.close()


# -- cases: state dicts -----------------------------------------------------------------------------------------------


def loaded_as_given(optimizer: Optimizer, state: dict[str, Any]) -> Callable[[], None]:
    """Load `state`; call what comes back to see that it is still as it was."""
    snapshot = copy.deepcopy(state)
    optimizer.load_state_dict(state)

    def check() -> None:
        COMPLAINTS.extend(differences(state, snapshot, "the dict given to load_state_dict()"))

    check()
    return check


@case
def back_to_an_earlier_state() -> None:
    for optimizer_cls, arguments in ((torch.optim.AdamW, ADAMW), (Wandering, {"lr": 0.1})):
        arrange = in_two if optimizer_cls is torch.optim.AdamW else in_two_for_users
        pair = Pair(loose(), optimizer_cls, arrange, **arguments)
        pair.train(2)
        saved = [copy.deepcopy((module.state_dict(), optimizer.state_dict())) for module, optimizer in pair]
        pair.train(2)
        expected = [p.detach().clone() for p in pair.parameters[0]]
        checks = []
        for (module, optimizer), (weights, state) in zip(pair, saved, strict=True):
            module.load_state_dict(weights)
            checks.append(loaded_as_given(optimizer, state))
        pair.clock -= 2
        pair.close()
        pair.train(2)
        checks[1]()  # training goes on in memory of its own
        COMPLAINTS.extend(differences([q.data for q in pair.parameters[1]], expected, "the second time"))
        for _, optimizer in pair:  # options are still those that step() reads
            optimizer.param_groups[0]["lr"] = 0.5
        pair.train(1)
        pair.close()


@case
def from_and_to_the_plain_optimizer() -> None:
    for optimizer_cls, arguments in (
        (torch.optim.AdamW, ADAMW),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adafactor, {}),
        (Wandering, {"lr": 0.1}),
    ):
        pair = Pair(loose([*MIXTURE, (3, 3)]), optimizer_cls, **arguments)
        pair.train(2, without=[2])
        plain, sharded = (copy.deepcopy(optimizer.state_dict()) for optimizer in pair.optimizers)
        crossed = Pair(copy.deepcopy(pair.models[0]), optimizer_cls, **{**arguments, "lr": 0.7})
        crossed.clock = pair.clock
        crossed.optimizers[0].load_state_dict(sharded)
        check = loaded_as_given(crossed.optimizers[1], plain)
        crossed.train(2)
        check()
        crossed.close()
        pair.train(2)
        for p, q in zip(pair.parameters[0], crossed.parameters[1], strict=True):
            COMPLAINTS.extend(differences(q.data, p.data, "after the exchange"))


@case
def a_state_dict_travels() -> None:
    pair = Pair(loose(), Wandering, in_two_for_users, lr=0.1)
    pair.train(2)
    state = pair.optimizers[1].state_dict()
    expect(sorted(state) == ["param_groups", "state"], f"keys {sorted(state)}")
    expect(sorted(state["state"]) == list(range(len(MIXTURE))), f"state of {sorted(state['state'])}")
    file = io.BytesIO()
    torch.save(state, file)
    for copied in (
        copy.deepcopy(state),
        pickle.loads(pickle.dumps(state)),
        torch.load(io.BytesIO(file.getvalue()), weights_only=True),
    ):
        COMPLAINTS.extend(differences(copied, state, "a copy"))


@case
def state_of_nothing() -> None:
    """Before the first step there is none, and to load it takes away what there is."""
    pair = Pair(loose(), torch.optim.AdamW, in_two, **ADAMW)
    pair.close()
    fresh = [copy.deepcopy(optimizer.state_dict()) for _, optimizer in pair]
    pair.train(2)
    for (_, optimizer), state in zip(pair, fresh, strict=True):
        optimizer.load_state_dict(state)
    expect(not any(pair.owners()), "old state is still there")
    pair.train(1)
    pair.close()


@case
def state_of_other_types() -> None:
    """Loading casts to the parameter's type, but for the number of steps."""
    other = Pair(loose(dtypes=(torch.float64,)), torch.optim.AdamW, **ADAMW)
    other.train(2)
    state = copy.deepcopy(other.optimizers[0].state_dict())
    pair = Pair(loose(dtypes=(torch.float32, torch.bfloat16)), torch.optim.AdamW, **ADAMW)
    pair.optimizers[0].load_state_dict(copy.deepcopy(state))
    loaded_as_given(pair.optimizers[1], state)
    pair.train(2)
    pair.close()


@case
def a_state_dict_that_does_not_fit() -> None:
    pair = Pair(loose([(2, 2), (3,)]), torch.optim.AdamW, **ADAMW)
    pair.train(1)
    for shapes, arrange in (([(2, 2)], nn.Module.parameters), ([(2, 2), (3,)], in_two)):
        other = torch.optim.AdamW(arrange(loose(shapes)), lr=0.5)
        for _, optimizer in pair:
            try:
                optimizer.load_state_dict(other.state_dict())
                expect(False, "took the state dict of other parameters")
            except ValueError:
                pass
    pair.train(1)
    pair.close()


@case
def a_group_added_then_saved_then_loaded() -> None:
    shapes = [*MIXTURE, (3, 3), (2,)]
    pair = Pair(loose(shapes), torch.optim.AdamW, lambda model: list(model.parameters())[:8], **ADAMW)
    pair.train(1, without=[8, 9])
    for module, optimizer in pair:
        optimizer.add_param_group({"params": list(module.parameters())[8:], "lr": 0.2})
    pair.train(2)
    state = copy.deepcopy(pair.optimizers[1].state_dict())

    def together(model: nn.Module) -> list[dict[str, Any]]:
        parameters = list(model.parameters())
        return [{"params": parameters[:8]}, {"params": parameters[8:]}]

    again = Pair(copy.deepcopy(pair.models[0]), torch.optim.AdamW, together, lr=0.7)
    again.clock = pair.clock
    for _, optimizer in again:
        optimizer.load_state_dict(copy.deepcopy(state))
    again.train(2)
    again.close()
    pair.train(2)
    for p, q in zip(pair.parameters[0], again.parameters[1], strict=True):
        COMPLAINTS.extend(differences(q.data, p.data, "after loading"))


# -- cases: bad arguments ---------------------------------------------------------------------------------------------


@case
def bad_arguments() -> None:
    """With one parameter all ranks but one own nothing, and must object as well."""
    w = nn.Parameter(torch.ones(2, 2))
    adamw = torch.optim.AdamW
    bad: list[tuple[Any, Any, dict[str, Any], tuple[type[Exception], ...]]] = [
        ([w], adamw, {"lr": -1.0}, (ValueError,)),
        ([w], adamw, {"betas": (1.5, 0.9)}, (ValueError,)),
        ([w], Wandering, {"lr": -1.0}, (ValueError,)),
        ([w], Wandering, {}, (TypeError,)),  # lr is missing
        ([w], adamw, {"learning_rate": 0.1}, (TypeError,)),
        ([], adamw, {}, (ValueError,)),
        (iter([]), adamw, {}, (ValueError,)),
        (w, adamw, {}, (TypeError,)),
        (["w"], adamw, {}, (TypeError,)),
        ([w * 2], adamw, {}, (ValueError,)),
        ([{"params": [w]}, {"params": [w]}], adamw, {}, (ValueError,)),
        ([w], nn.Linear, {}, (TypeError, ValueError)),
        ([w], "AdamW", {}, (TypeError, ValueError)),
        ([w], adamw([w]), {}, (TypeError, ValueError)),
        ([w], None, {}, (TypeError, ValueError)),
        ([w], dict, {}, (TypeError, ValueError)),
    ]
    for params, optimizer_cls, arguments, errors in bad:
        asked = f"{params}, {optimizer_cls}, {arguments}"
        try:
            ShardedOptimizer(params, optimizer_cls, **arguments)
            raised: type[BaseException] | None = None
        except Exception as error:
            raised = type(error)
        everywhere = gathered(raised)
        expect(all(one in errors for one in everywhere), f"{asked}: {everywhere} instead of {errors}")
    pair = Pair(loose([(2, 2)]), torch.optim.AdamW, **ADAMW)  # nothing is left of all that
    pair.train(1)
    pair.close()


# -- cases: shares, and what is sent ----------------------------------------------------------------------------------


def share(optimizer: Optimizer) -> float:
    """State of the fullest rank, of what it would be if it could be cut anywhere."""
    mine = sum(tensor_bytes(state.values()) for state in optimizer.state.values())
    bytes_by_rank = gathered(mine)
    return max(bytes_by_rank) * len(bytes_by_rank) / sum(bytes_by_rank)


def transformers() -> Iterator[tuple[str, Loose, Callable[[nn.Module], Any]]]:
    yield "in a row", transformer(), nn.Module.parameters
    yield "in two groups", transformer(), in_two
    half = transformer()
    for p in list(half.parameters())[::2]:
        p.data = p.data.bfloat16()
    yield "of two types", half, nn.Module.parameters
    yield "backwards", transformer(), lambda model: list(model.parameters())[::-1]
    yield "a group for each", transformer(), lambda model: [{"params": [p]} for p in model.parameters()]


@case
def equal_shares() -> None:
    for name, model, arrange in transformers():
        optimizer = ShardedOptimizer(arrange(model), torch.optim.AdamW, **ADAMW)
        give_gradients(model.parameters(), 1)
        optimizer.step()
        expect(share(optimizer) <= 1.02, f"{name}: the fullest rank has {share(optimizer):.4f} of the ideal")


@case
def equal_shares_of_what_is_added() -> None:
    model = transformer()
    first, *rest = model.parameters()
    optimizer = ShardedOptimizer([first, *rest[:50]], torch.optim.AdamW, **ADAMW)
    give_gradients(model.parameters(), 1)
    optimizer.step()
    optimizer.add_param_group({"params": rest[50:]})
    optimizer.step()
    expect(share(optimizer) <= 1.02, f"the fullest rank has {share(optimizer):.4f} of the ideal")


@case
def a_file_without_slack() -> None:
    """A tensor that is a part of a larger buffer takes the whole buffer into the file."""
    sizes = []
    pair = Pair(transformer(2), torch.optim.AdamW, **ADAMW)
    pair.train(1)
    for _, optimizer in pair:
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        sizes.append(len(file.getvalue()))
    expect(sizes[1] < 1.05 * sizes[0], f"{sizes[1]} bytes instead of {sizes[0]}")
    pair.close()


COLLECTIVES = {
    # What this rank sends: all but a broadcast take their input from every rank.
    "broadcast": 0,
    "all_reduce": 0,
    "all_gather": 1,
    "all_gather_into_tensor": 1,
    "all_gather_object": None,
    "broadcast_object_list": None,
    "all_to_all": 1,
    "all_to_all_single": 1,
    "gather": 0,
    "gather_object": None,
    "reduce": 0,
    "reduce_scatter": 1,
    "reduce_scatter_tensor": 1,
    "scatter": 0,
    "send": 0,
    "isend": 0,
}


@contextmanager
def overheard() -> Iterator[list[tuple[str, int]]]:
    """Name and bytes of each message that this rank sends."""
    messages: list[tuple[str, int]] = []
    inside = False

    def listen(name: str, where: int | None, function: Callable[..., Any]) -> Callable[..., Any]:
        def heard(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:  # some are made of others
                return function(*args, **kwargs)
            sends = True
            if name == "broadcast":
                source = args[1] if len(args) > 1 else kwargs.get("src", kwargs.get("group_src"))
                sends = source == dist.get_rank()
            if sends:
                tensor = None if where is None else args[where] if len(args) > where else kwargs.get("tensor")
                messages.append((name, tensor_bytes(tensor if isinstance(tensor, list) else [tensor])))
            inside = True
            try:
                return function(*args, **kwargs)
            finally:
                inside = False

        return heard

    with mock.patch.multiple(
        dist, **{name: listen(name, where, getattr(dist, name)) for name, where in COLLECTIVES.items()}
    ):
        yield messages


@case
def sent_once() -> None:
    """In few messages. What is frozen before the optimizer is made stays at home; later it may travel with others."""
    for name, model, arrange in transformers():
        parameters = list(model.parameters())
        expect(len(parameters) == 110, f"{len(parameters)} tensors")
        for p in parameters[:9]:
            p.requires_grad_(False)
        optimizer = ShardedOptimizer(arrange(model), torch.optim.AdamW, **ADAMW)
        for step, frozen in enumerate([9, 9, 0, 50]):
            for i, p in enumerate(parameters):
                p.requires_grad_(i >= frozen)
            optimizer.zero_grad()
            give_gradients(parameters, step)
            with overheard() as messages:
                optimizer.step()
            by_rank = gathered(messages)
            sent = sum(size for messages in by_rank for _, size in messages)
            least = tensor_bytes(p for p in parameters if p.requires_grad)
            most = tensor_bytes(parameters) if frozen == 50 else least
            where = f"{name}, step {step}"
            expect(least <= sent <= most, f"{where}: {sent} bytes sent instead of {least} to {most}: {by_rank}")
            few = 16 if name == "of two types" else 8
            expect(max(map(len, by_rank)) <= few, f"{where}: messages {[len(messages) for messages in by_rank]}")


OF_TRANSFORMERS = ["equal_shares", "equal_shares_of_what_is_added", "a_file_without_slack", "sent_once"]


# -- from one number of ranks to another ------------------------------------------------------------------------------

JOBS: dict[str, tuple[type[Optimizer], Callable[[nn.Module], Any], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, in_two, ADAMW),
    "SGD": (torch.optim.SGD, in_two, {"lr": 0.1, "momentum": 0.9}),
    "of a user": (Wandering, in_two_for_users, {"lr": 0.1}),
}
LEG = 3
"""Steps from one checkpoint to the next."""


def trained(job: str, checkpoint: dict[str, Any] | None, sharded: bool, steps: int = LEG) -> dict[str, Any]:
    """Train from a checkpoint, or from the beginning, to the next one."""
    optimizer_cls, arrange, arguments = JOBS[job]
    zero_size = [] if job == "of a user" else [(0, 2)]
    dtypes = (torch.float32,) if job == "of a user" else (torch.float32, torch.float32, torch.float64, torch.bfloat16)
    model = loose([*MIXTURE, *zero_size, (4, 6), (8,), (3, 3)], dtypes)
    parameters = list(model.parameters())
    parameters[6].requires_grad_(False)
    params = arrange(model)
    optimizer = ShardedOptimizer(params, optimizer_cls, **arguments) if sharded else optimizer_cls(params, **arguments)
    schedule = LambdaLR(optimizer, [lambda k: 0.8**k, lambda k: 1 / (1 + k)])
    start = 0
    check = None
    if checkpoint is not None:
        start = checkpoint["step"]
        model.load_state_dict(checkpoint["model"])
        check = loaded_as_given(optimizer, checkpoint["optimizer"]) if sharded else None
        if not sharded:
            optimizer.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))
        schedule.load_state_dict(checkpoint["schedule"])
    for step in range(start, start + steps):
        give_gradients(parameters, step, without=[step % 3])
        optimizer.step()
        schedule.step()
    if check:
        check()
    if sharded:
        owned = list(chain.from_iterable(owners(optimizer, parameters)))
        expect(len(owned) == len(set(owned)) > 0, f"{job}: state of a parameter is on two ranks")
    return copy.deepcopy(
        {
            "step": start + steps,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
        }
    )


def sharded_leg(checkpoints: dict[str, dict[str, Any]] | None) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """In a rank: one leg of every job, and complaints."""
    COMPLAINTS.clear()
    reached = {job: trained(job, checkpoints and checkpoints[job], sharded=True) for job in JOBS}
    return reached, list(COMPLAINTS)
