"""State dicts of the sharded optimizer, the size of its shares, what it sends, and other numbers of ranks."""

import copy
import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from cs336_systems.parallel import ShardedOptimizer
from tests.distributed.compare import everywhere, rank, recorded
from tests.distributed.sharded_optimizer.models import (
    ADAMW,
    MIXTURE,
    Pair,
    Wandering,
    assert_same,
    each_its_own,
    give_gradients,
    in_two,
    in_two_for_users,
    loose,
    owners,
    transformer,
)

ranks = pytest.mark.ranks(2)
AdamW = torch.optim.AdamW
JOBS: dict[str, tuple[type[Optimizer], Callable[[nn.Module], Any], dict[str, Any]]] = {
    "AdamW": (AdamW, in_two, ADAMW),
    "SGD": (torch.optim.SGD, in_two, {"lr": 0.1, "momentum": 0.9}),
    "user": (Wandering, in_two_for_users, {"lr": 0.1}),
}


# -- state dicts ------------------------------------------------------------------------------------------------------


@ranks
@pytest.mark.parametrize("job", ["AdamW", "user"])
def test_back_to_an_earlier_state(job):
    """The dict that was loaded is not changed by later steps."""
    optimizer_cls, arrange, arguments = JOBS[job]
    pair = Pair(loose(), optimizer_cls, arrange, **arguments)
    pair.train(2)
    saved = [copy.deepcopy((module.state_dict(), optimizer.state_dict())) for module, optimizer in pair]
    snapshot = copy.deepcopy(saved[1][1])
    pair.train(2)
    expected = [p.detach().clone() for p in pair.parameters[0]]
    for (module, optimizer), (weights, state) in zip(pair, saved, strict=True):
        module.load_state_dict(weights)
        optimizer.load_state_dict(state)
    pair.clock -= 2
    pair.close()
    pair.train(2)
    assert_same("the loaded dict", saved[1][1], snapshot)
    assert_same("the second time", [q.data for q in pair.parameters[1]], expected)
    for _, optimizer in pair:  # step() still reads these options
        optimizer.param_groups[0]["lr"] = 0.5
    pair.train(1)
    pair.close()


@ranks
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adafactor", "Wandering"])
def test_from_and_to_the_plain_optimizer(name):
    optimizer_cls = Wandering if name == "Wandering" else getattr(torch.optim, name)
    arguments = {"lr": 0.1, **({"momentum": 0.9} if name == "SGD" else {})}
    pair = Pair(loose([*MIXTURE, (3, 3)]), optimizer_cls, **arguments)
    pair.train(2, without=[2])
    plain, sharded = (copy.deepcopy(optimizer.state_dict()) for optimizer in pair.optimizers)
    crossed = Pair(copy.deepcopy(pair.models[0]), optimizer_cls, **{**arguments, "lr": 0.7})
    crossed.clock = pair.clock
    crossed.optimizers[0].load_state_dict(sharded)
    crossed.optimizers[1].load_state_dict(plain)
    crossed.train(2)
    crossed.close()
    pair.train(2)
    assert_same("after the exchange", [q.data for q in crossed.parameters[1]], [p.data for p in pair.parameters[0]])


@ranks
def test_a_state_dict_in_a_file():
    """With weights_only, and without slack: a view of a larger buffer would take the whole buffer into the file."""
    pair = Pair(transformer(2))
    pair.train(1)
    files = []
    for _, optimizer in pair:
        files.append(io.BytesIO())
        torch.save(optimizer.state_dict(), files[-1])
    assert len(files[1].getvalue()) < 1.05 * len(files[0].getvalue())
    files[1].seek(0)
    assert_same("from the file", torch.load(files[1], weights_only=True), pair.optimizers[0].state_dict())


@ranks
def test_loading_an_empty_state_drops_the_old_one():
    pair = Pair(loose(), AdamW, in_two)
    pair.close()
    fresh = [copy.deepcopy(optimizer.state_dict()) for _, optimizer in pair]
    pair.train(2)
    for (_, optimizer), state in zip(pair, fresh, strict=True):
        optimizer.load_state_dict(state)
    assert not any(pair.owners())
    pair.train(1)
    pair.close()


@ranks
def test_state_of_mixed_dtypes():
    """Loading casts to the dtype of the parameter, except the number of steps."""
    other = Pair(loose(dtypes=(torch.float64,)))
    other.train(2)
    pair = Pair(loose(dtypes=(torch.float32, torch.bfloat16)))
    for _, optimizer in pair:
        optimizer.load_state_dict(copy.deepcopy(other.optimizers[0].state_dict()))
    pair.train(2)
    pair.close()


@ranks
def test_a_state_dict_that_does_not_fit():
    pair = Pair(loose([(2, 2), (3,)]))
    pair.train(1)
    for shapes, arrange in (([(2, 2)], nn.Module.parameters), ([(2, 2), (3,)], in_two)):
        other = AdamW(arrange(loose(shapes)), lr=0.5)
        with pytest.raises(ValueError, match="build it with the same groups"):
            pair.optimizers[1].load_state_dict(other.state_dict())
    pair.train(1)
    pair.close()


@ranks
def test_a_group_added_then_saved_then_loaded():
    """The optimizer that loads has other owners."""
    pair = Pair(loose([*MIXTURE, (3, 3), (2,)]), AdamW, lambda model: list(model.parameters())[:8])
    pair.train(1, without=[8, 9])
    for module, optimizer in pair:
        optimizer.add_param_group({"params": list(module.parameters())[8:], "lr": 0.2})
    pair.train(2)
    state = copy.deepcopy(pair.optimizers[1].state_dict())

    def together(model: nn.Module) -> list[dict[str, Any]]:
        parameters = list(model.parameters())
        return [{"params": parameters[:8]}, {"params": parameters[8:]}]

    again = Pair(copy.deepcopy(pair.models[0]), AdamW, together, lr=0.7)
    again.clock = pair.clock
    for _, optimizer in again:
        optimizer.load_state_dict(copy.deepcopy(state))
    again.train(2)
    again.close()
    pair.train(2)
    assert_same("after loading", [q.data for q in again.parameters[1]], [p.data for p in pair.parameters[0]])


@ranks
def test_state_dict_hooks():
    pair = Pair(loose())
    pair.train(1)
    logs: list[list[str]] = [[], []]
    for (_, optimizer), log in zip(pair, logs, strict=True):
        optimizer.register_state_dict_pre_hook(lambda caller, log=log: log.append("before saving"))
        optimizer.register_state_dict_post_hook(lambda caller, state, log=log: log.append("after saving"))
        optimizer.register_load_state_dict_pre_hook(lambda caller, state, log=log: log.append("before loading"))
        optimizer.register_load_state_dict_post_hook(lambda caller, log=log: log.append("after loading"))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert logs[1] == logs[0] == ["before saving", "after saving", "before loading", "after loading"]


# -- shares and communication -----------------------------------------------------------------------------------------


def reversed_parameters(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())[::-1]


arrangements = pytest.mark.parametrize(
    ("arrange", "dtypes"),
    [(nn.Module.parameters, 1), (nn.Module.parameters, 2), (in_two, 1), (reversed_parameters, 1), (each_its_own, 1)],
    ids=["in_a_row", "two_dtypes", "two_groups", "reversed", "a_group_each"],
)


def transformer_of(dtypes: int) -> nn.Module:
    model = transformer()
    for p in list(model.parameters())[::2] if dtypes == 2 else []:
        p.data = p.data.bfloat16()
    return model


def assert_equal_shares(optimizer: Optimizer) -> None:
    """The rank with the most state has at most 2% above the ideal share."""
    by_rank = everywhere(sum(v.nbytes for state in optimizer.state.values() for v in state.values()))
    assert max(by_rank) * len(by_rank) <= 1.02 * sum(by_rank), by_rank


@pytest.mark.ranks(2, 4)
@arrangements
def test_equal_shares(arrange, dtypes):
    model = transformer_of(dtypes)
    optimizer = ShardedOptimizer(arrange(model), AdamW)
    give_gradients(model.parameters(), 1)
    optimizer.step()
    assert_equal_shares(optimizer)


@ranks
def test_equal_shares_of_added_parameters():
    first, *rest = (model := transformer()).parameters()
    optimizer = ShardedOptimizer([first, *rest[:50]], AdamW)
    optimizer.add_param_group({"params": rest[50:]})
    give_gradients(model.parameters(), 1)
    optimizer.step()
    assert_equal_shares(optimizer)


@ranks
@arrangements
def test_parameters_are_sent_once_in_few_broadcasts(arrange, dtypes):
    """Parameters frozen from the start are not sent; parameters frozen later may be sent with others."""
    parameters = list((model := transformer_of(dtypes)).parameters())
    for p in parameters[:9]:
        p.requires_grad_(False)
    optimizer = ShardedOptimizer(arrange(model), AdamW)
    for step, frozen in enumerate([9, 0, 50]):
        for i, p in enumerate(parameters):
            p.requires_grad_(i >= frozen)
        optimizer.zero_grad()
        give_gradients(parameters, step)
        with recorded(
            broadcast=lambda t, source, **_: t.nbytes if source == rank() else 0,
            **dict.fromkeys(("all_reduce", "all_gather", "all_gather_object", "broadcast_object_list")),
        ) as log:
            optimizer.step()
        by_rank = everywhere([nbytes for _, nbytes in log if nbytes])
        least = sum(p.nbytes for p in parameters if p.requires_grad)
        most = sum(p.nbytes for p in parameters) if frozen == 50 else least
        assert least <= sum(map(sum, by_rank)) <= most
        assert max(map(len, by_rank)) <= 8 * dtypes


# -- other numbers of ranks -------------------------------------------------------------------------------------------

LEG = 3
"""Steps from one checkpoint to the next."""


def leg(job: str, checkpoint: dict[str, Any] | None, sharded: bool, steps: int = LEG) -> dict[str, Any]:
    """Train from a checkpoint, or from the start, to the next one."""
    optimizer_cls, arrange, arguments = JOBS[job]
    shapes, dtypes = [*MIXTURE, (4, 6), (8,), (3, 3)], (torch.float32,)
    if job != "user":
        shapes, dtypes = [*shapes, (0, 2)], (torch.float32, torch.float32, torch.float64, torch.bfloat16)
    model = loose(shapes, dtypes)
    parameters = list(model.parameters())
    parameters[6].requires_grad_(False)
    params: Iterable[Any] = arrange(model)
    optimizer = ShardedOptimizer(params, optimizer_cls, **arguments) if sharded else optimizer_cls(params, **arguments)
    schedule = LambdaLR(optimizer, [lambda k: 0.8**k, lambda k: 1 / (1 + k)])
    start = 0
    if checkpoint is not None:
        start = checkpoint["step"]
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))
        schedule.load_state_dict(checkpoint["schedule"])
    for step in range(start, start + steps):
        give_gradients(parameters, step, without=[step % 3])
        optimizer.step()
        schedule.step()
    if sharded:
        owned = [i for of_rank in owners(optimizer, parameters) for i in of_rank]
        assert len(owned) == len(set(owned)) > 0, "state of a parameter is on two ranks"
    return copy.deepcopy(
        {
            "step": start + steps,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
        }
    )


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("route", [(4, 2), (2, 3, 0), (0, 2, 1)], ids=lambda route: "-".join(map(str, route)))
@pytest.mark.parametrize("job", JOBS)
def test_resumed_with_another_number_of_ranks(rank_groups, job, route):
    """Each leg has the bits of a run that was never interrupted; 0 ranks: the plain optimizer."""
    checkpoint = None
    for legs, world_size in enumerate(route, 1):
        expected = leg(job, None, sharded=False, steps=legs * LEG)
        if world_size == 0:
            reached = [leg(job, checkpoint, sharded=False)]
        else:
            reached = rank_groups.call(world_size, leg, job, checkpoint, True)
        for number, found in enumerate(reached):
            assert_same(f"rank {number} of {world_size}", found, expected)
        checkpoint = reached[0]
