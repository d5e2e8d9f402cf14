"""The sharded optimizer computes the bits of the plain one."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from cs336_systems.parallel import DDP, ShardedOptimizer
from tests.distributed.compare import rank
from tests.distributed.fsdp.models import VOCABULARY, Tied
from tests.distributed.sharded_optimizer.models import (
    ADAMW,
    MIXTURE,
    Counting,
    Loose,
    Pair,
    Wandering,
    each_its_own,
    in_two,
    in_two_for_users,
    loose,
    noise,
)

pytestmark = pytest.mark.ranks(2)
AdamW, SGD = torch.optim.AdamW, torch.optim.SGD
MOMENTUM = {"lr": 0.1, "momentum": 0.9}


# -- optimizers and their options -------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 4)
def test_adamw():
    pair = Pair(loose())
    pair.train(3)
    pair.close()


OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
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
}


def test_an_optimizer_of_a_user():
    pair = Pair(loose(), Wandering, in_two_for_users, lr=0.1)
    pair.train(2)
    pair.train(1, without=[0, 3])
    pair.train(1)
    pair.close()


def with_an_empty_group(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": []}, *({"params": p, "lr": 0.01 * i} for i, p in enumerate(model.parameters()))]


def named_groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *rest = model.named_parameters()
    return [{"params": iter(rest), "lr": 0.3}, {"params": [first]}]


FORMS = {
    "generator": lambda model: (p for p in model.parameters()),
    "tuple": lambda model: tuple(model.parameters()),
    "iterator_of_groups": lambda model: iter([{"params": model.parameters()}]),
    "names": lambda model: model.named_parameters(),
    "named_groups": named_groups,
    "two_groups": in_two,
    "empty_group": with_an_empty_group,
}
OPTIONS = ({"foreach": True}, {"fused": True}, {"amsgrad": True, "maximize": True})
DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16
FEW = [(5, 3), (7,), (4, 4), (6,), (2, 2)]

TRAINED: dict[str, tuple[nn.Module, type[Optimizer], Any, dict[str, Any]]] = {
    **{"_".join(options): (loose(), AdamW, nn.Module.parameters, {**ADAMW, **options}) for options in OPTIONS},
    **{
        name: (loose(FEW), getattr(torch.optim, name), nn.Module.parameters, options)
        for name, options in OPTIMIZERS.items()
    },
    **{form: (loose(), AdamW, arrange, {}) for form, arrange in FORMS.items()},
    # Also on a rank that has no parameter in a group.
    "options_that_step_writes": (loose([(3,), (4, 2), (2,)]), Counting, each_its_own, {}),
    "mixed_dtypes": (loose([*MIXTURE, (3, 3), (2,)], DTYPES), AdamW, nn.Module.parameters, {}),
    "mixed_dtypes_sgd": (loose([*MIXTURE, (3, 3), (2,)], DTYPES), SGD, nn.Module.parameters, MOMENTUM),
    "without_elements": (loose([(0,), (3, 2), (0, 4), (2, 0, 3), (5,)]), AdamW, nn.Module.parameters, {}),
}


@pytest.mark.parametrize("case", TRAINED)
def test_optimizers_options_forms_and_dtypes(case):
    model, optimizer_cls, arrange, options = TRAINED[case]
    pair = Pair(copy.deepcopy(model), optimizer_cls, arrange, **options)
    pair.close()
    pair.train(3)
    pair.close()


def test_options_changed_by_hand():
    pair = Pair(loose(), AdamW, in_two)
    for step in range(3):
        for _, optimizer in pair:
            optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.param_groups[1]["weight_decay"] = 0.1 * step
            optimizer.param_groups[1]["betas"] = (0.5 + 0.1 * step, 0.9)
        pair.train(1)
    pair.close()


def test_a_learning_rate_in_a_tensor():
    """Changed in place: a copy of the options would not see it."""
    pair = Pair(loose(), lr=torch.tensor(0.1), foreach=False)
    pair.train(1)
    for _, optimizer in pair:
        optimizer.param_groups[0]["lr"].fill_(0.02)
    pair.train(1)
    pair.close()


def test_schedulers():
    """They change the learning rate, betas or momentum, and warn unless they see the optimizer's steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pairs = [
            (Pair(loose(), AdamW, in_two), lambda optimizer: LambdaLR(optimizer, [lambda k: 0.5**k] * 2)),
            (Pair(loose(), AdamW, lr=0.1), lambda optimizer: OneCycleLR(optimizer, max_lr=0.2, total_steps=6)),
            (Pair(loose(), SGD, **MOMENTUM), lambda optimizer: OneCycleLR(optimizer, max_lr=0.2, total_steps=6)),
        ]
        for pair, make in pairs:
            schedules = [make(optimizer) for _, optimizer in pair]
            for _ in range(4):
                pair.train(1)
                for schedule in schedules:
                    schedule.step()
            pair.close()
        assert math.isclose(pairs[0][0].optimizers[1].param_groups[0]["lr"], 1e-2 / 16)


@pytest.mark.parametrize("warm", [0, 2])
def test_a_group_added_during_training(warm):
    """Parameters keep their owners."""
    model = loose([*MIXTURE, (6, 2), (3,), (8, 8), ()])
    for p in list(model.parameters())[8:]:
        p.requires_grad_(False)
    pair = Pair(model, AdamW, lambda model: list(model.parameters())[:8])
    pair.train(warm)
    before = pair.owners()
    for module, optimizer in pair:
        late = [p.requires_grad_() for p in list(module.parameters())[8:]]
        optimizer.add_param_group({"params": iter(late[:3]), "lr": 0.3})
        optimizer.add_param_group({"params": late[3]})
    assert pair.owners() == before
    pair.train(2)
    assert not warm or [[i for i in owned if i < 8] for owned in pair.owners()] == before
    for _, optimizer in pair:
        optimizer.param_groups[1]["lr"] = 0.1
    pair.train(1)
    pair.close()


def test_a_bad_group_is_refused_and_forgotten():
    pair = Pair(loose())
    for module, optimizer in pair:
        there = next(module.parameters())
        for group, error in (
            ({"params": [there]}, ValueError),
            ({"params": [there * 2]}, ValueError),
            ({"params": ["text"]}, TypeError),
            ([there], TypeError),
        ):
            with pytest.raises(error):
                optimizer.add_param_group(group)
    pair.train(1)
    pair.close()


@pytest.mark.parametrize("shapes", [MIXTURE, [(3, 3)]], ids=["all_own", "one_owns"])
def test_closures(shapes):
    """Called once, also on a rank that owns nothing."""
    for optimizer_cls, arguments in ((AdamW, ADAMW), (Wandering, {"lr": 0.1})):
        pair = Pair(loose(shapes), optimizer_cls, **arguments)
        for step in range(2):
            losses: list[list[float]] = []
            for module, optimizer in pair:
                calls: list[float] = []

                def closure(module=module, optimizer=optimizer, calls=calls, step=step):
                    optimizer.zero_grad()
                    loss = sum(((p - step) ** 2).sum() for p in module.parameters())
                    loss.backward()
                    calls.append(loss.item())
                    return loss

                returned = optimizer.step(closure=closure)
                assert [returned.item()] == calls
                losses.append(calls)
            assert losses[0] == losses[1]
            pair.compare()
        pair.close()


def test_step_hooks():
    """Called once a step with the sharded optimizer, not for each of its inner ones; they may change parameters."""
    pair = Pair(loose(), AdamW, in_two)
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
    callers: list[Any] = []
    handles.append(register_optimizer_step_post_hook(lambda caller, args, kwargs: callers.append(caller)))
    pair.train(2)
    for handle in handles:
        handle.remove()
    pair.train(1)
    assert logs[1] == logs[0]
    assert [entry[:2] for entry in logs[1]] == [("before", True), ("after", True)] * 2
    assert [sum(caller is optimizer for caller in callers) for optimizer in pair.optimizers] == [2, 2]
    pair.close()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none):
    """With zeros the state goes on; without gradients nothing happens."""
    pair = Pair(loose(), AdamW, in_two)
    pair.train(1)
    for _, optimizer in pair:
        optimizer.zero_grad(set_to_none=set_to_none)
    assert all((q.grad is None) if set_to_none else not q.grad.any() for q in pair.parameters[1])
    pair.step()
    pair.close()


@pytest.mark.parametrize("fused", [False, True])
def test_scaled_gradients(fused):
    """A GradScaler skips the step in which a gradient overflows."""
    pair = Pair(loose(), AdamW, in_two, **ADAMW, fused=fused)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in pair]
    for factor in (1.0, math.inf, 1.0):
        pair.gradients(scale=1024.0 * factor if factor > 1 else scalers[0].get_scale())
        before = [q.detach().clone() for q in pair.parameters[1]]
        for scaler, (_, optimizer) in zip(scalers, pair, strict=True):
            scaler.scale(torch.ones(()))
            if not fused:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()  # the fused one leaves its gradients as it likes
        assert all(map(torch.equal, before, pair.parameters[1])) == (factor > 1)
        pair.compare()
    assert scalers[1].get_scale() == scalers[0].get_scale() == 512.0
    pair.close()


# -- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arrange", [nn.Module.parameters, in_two, nn.Module.named_parameters])
def test_tied_weights_after_data_parallel(arrange):
    """They are moved together and stay one parameter. Every rank has data of its own."""
    pair = Pair(Tied(), AdamW, arrange)
    wrapped = [DDP(module) for module in pair.models]
    for step in range(2):
        tokens = (torch.arange(6) * (2 + rank()) + step) % VOCABULARY
        for (_, optimizer), model in zip(pair, wrapped, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens), tokens.roll(-1)).backward()
            model.finish_gradient_synchronization()
        pair.step()
    assert pair.models[1].head.weight is pair.models[1].embed.weight
    pair.close()


def test_two_parameters_in_the_same_memory_are_refused():
    """They are not tied by one Parameter: moved one by one they would be one no more."""
    one = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="two parameters share memory"):
        ShardedOptimizer([one, nn.Parameter(one.data)], AdamW)


def test_frozen_parameters():
    """Frozen from the start, frozen and unfrozen later; one that is always frozen never moves.

    The plain optimizer goes on with those that still have gradients when they are frozen: the gradient counts.
    """
    model = loose()
    for i in (0, 3, 5):
        model.items[i].requires_grad_(False)
    pair = Pair(model)
    pair.train(2)
    for i, trained in ((0, True), (3, True), (1, False), (2, False)):
        for module in pair.models:
            module.items[i].requires_grad_(trained).grad = None
    pair.train(2)
    for module in pair.models:
        module.items[1].requires_grad_()
    pair.train(2)
    assert torch.equal(pair.parameters[1][5], noise((9,), 5).float())
    for module in pair.models:
        for p in module.parameters():
            p.requires_grad_(False)
    pair.step()
    pair.close()


def test_unused_parameters():
    """Steps in which some, or all, have no gradient."""
    pair = Pair(loose(), AdamW, in_two)
    everything = range(len(MIXTURE))
    for without in (everything, [0, 1, 7], [0, 2, 3, 4], everything, [0]):
        pair.train(1, without=without)
    pair.close()


@pytest.mark.parametrize(("optimizer_cls", "options"), [(AdamW, ADAMW), (SGD, MOMENTUM)], ids=["adamw", "sgd"])
def test_parameters_that_are_not_contiguous(optimizer_cls, options):
    """Layouts of dense memory are kept; a slice of other memory is not written around."""
    tensors = [
        noise((3, 5), 0).float().t(),
        noise((4,), 1).float(),
        noise((2, 3, 4), 2).float().permute(2, 0, 1),
        noise((2, 3, 2, 2), 3).float().to(memory_format=torch.channels_last),
        noise((6, 4), 4).float()[::2, 1:3],
        noise((5,), 5).bfloat16()[1:],
    ]
    pair = Pair(Loose(tensors), optimizer_cls, **options)
    around = torch.zeros(6, 4)
    pair.models[1].items[4].data = around[::2, 1:3].copy_(pair.models[0].items[4].data)
    strides = [q.stride() for q in pair.parameters[1]]
    pair.train(2)
    kept = [q.stride() == before for q, before in zip(pair.parameters[1], strides, strict=True)]
    assert all(kept[:4] + kept[5:])
    assert not around[1::2].any()
    assert not around[:, ::3].any()
    pair.close()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("shapes", [[(4, 3)], [(3,), (2, 2)], [(0,), (2,)]], ids=["one", "two", "empty"])
def test_fewer_parameters_than_ranks(shapes):
    """A rank that owns nothing takes part in steps, saving and loading."""
    jobs: list[tuple[Any, Any]] = [(AdamW, ADAMW), (Wandering, {"lr": 0.1}), (torch.optim.Adagrad, {})]
    for optimizer_cls, arguments in jobs[:: 2 if (0,) in shapes else 1]:
        pair = Pair(loose(shapes), optimizer_cls, **arguments)
        pair.train(2)
        for _, optimizer in pair:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        pair.train(1)
        pair.close()


def test_model_moved_before_the_first_step():
    pair = Pair(loose(), AdamW, in_two)
    for module in pair.models:
        module.double()
    pair.train(2)
    assert all(q.dtype == torch.float64 for q in pair.parameters[1])
    pair.close()


def test_values_changed_between_steps():
    """Between steps parameters belong to the user."""
    pair = Pair(loose())
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


def flattened(module: nn.Module) -> None:
    """Make all parameters parts of one tensor."""
    vector = nn.utils.parameters_to_vector(module.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.5, module.parameters())


def test_memory_changed_between_steps():
    """Parameters that are no longer views of the flat tensor are moved back."""
    model = loose()
    flattened(model)
    pair = Pair(model)
    for change in (flattened, lambda module: [setattr(p, "data", p.data.clone()) for p in module.parameters()]):
        for module in pair.models:
            change(module)
        pair.train(2)
    pair.close()


def test_dtype_changed_between_steps():
    pair = Pair(loose(), SGD, lr=0.1)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for module in pair.models:
            module.to(dtype).zero_grad()
        pair.train(2)
    pair.close()


# -- errors -----------------------------------------------------------------------------------------------------------

W = nn.Parameter(torch.ones(2, 2))
BAD: dict[str, tuple[Any, Any, dict[str, Any], type[Exception]]] = {
    "lr": ([W], AdamW, {"lr": -1.0}, ValueError),
    "lr_of_a_user": ([W], Wandering, {"lr": -1.0}, ValueError),
    "missing_lr": ([W], Wandering, {}, TypeError),
    "unknown_option": ([W], AdamW, {"learning_rate": 0.1}, TypeError),
    "no_parameters": ([], AdamW, {}, ValueError),
    "a_tensor": (W, AdamW, {}, TypeError),
    "text": (["w"], AdamW, {}, TypeError),
    "not_a_leaf": ([W * 2], AdamW, {}, ValueError),
    "twice": ([{"params": [W]}, {"params": [W]}], AdamW, {}, ValueError),
    "not_an_optimizer": ([W], nn.Linear, {}, TypeError),
    "a_name": ([W], "AdamW", {}, TypeError),
    "an_instance": ([W], AdamW([W]), {}, TypeError),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    """Every rank raises the error, also one that would own nothing."""
    params, optimizer_cls, arguments, error = BAD[name]
    with pytest.raises(error):
        ShardedOptimizer(params, optimizer_cls, **arguments)
