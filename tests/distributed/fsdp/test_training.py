"""Fully sharded training computes what one process computes with all weights and the whole batch."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.parallel import FSDP, clip_grad_norm_, gather_full_params
from tests.distributed.compare import assert_close, assert_same_on_all_ranks, rank, world
from tests.distributed.fsdp.models import (
    VOCABULARY,
    WATCH,
    Net,
    Pair,
    Stack,
    Tied,
    adamw,
    floats,
    freeze,
    loss_of,
    part,
    rows,
    seeded,
    sgd,
    tokens,
)

pytestmark = pytest.mark.ranks(2)
optimizers = pytest.mark.parametrize("optimizer", [sgd, adamw])


def test_ranks_with_different_models():
    with pytest.raises(ValueError, match="ranks 0 and 1 hold different models"):
        FSDP(nn.Linear(2, 3 + rank()))


# -- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 3)
@optimizers
def test_every_kind_of_parameter(optimizer):
    Pair(Net, optimizer).train(3)


@pytest.mark.ranks(1, 2, 3, 4)
def test_shapes_of_uneven_and_empty_shards():
    """Shards are views of nothing: a shard that kept the full weight alive would save no memory."""
    wrapped = FSDP(seeded(lambda: nn.Sequential(*(nn.Linear(4, n) for n in (7, 1, 8, 5)))))
    heights = {
        1: {7: [7], 1: [1], 8: [8], 5: [5]},
        2: {7: [4, 3], 1: [1, 0], 8: [4, 4], 5: [3, 2]},
        3: {7: [3, 3, 1], 1: [1, 0, 0], 8: [3, 3, 2], 5: [2, 2, 1]},
        4: {7: [2, 2, 2, 1], 1: [1, 0, 0, 0], 8: [2, 2, 2, 2], 5: [2, 2, 1, 0]},
    }[world()]
    for layer, (n, by_rank) in zip(wrapped.module, heights.items(), strict=True):
        assert isinstance(layer.weight, nn.Parameter)
        assert layer.weight.requires_grad
        assert tuple(layer.weight.shape) == (by_rank[rank()], 4)
        assert layer.weight.untyped_storage().nbytes() <= 4 * 4 * math.ceil(n / world())
        assert tuple(layer.bias.shape) == (n,)


class Odd(nn.Module):
    """Modules that are sharded, or not, by class and name."""

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

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.flat(self.scale(self.projection(self.embed(tokens)))))


def test_which_modules_are_sharded():
    pair = Pair(Odd)
    assert pair.sharded == {"embed.weight", "projection.weight", "head.0.0.weight"}
    assert all(type(p) is nn.Parameter and p.is_leaf for p in pair.module.parameters())
    pair.train(2)


@optimizers
def test_tied_weights(optimizer):
    """One shard for both modules, which the optimizer sees once."""
    pair = Pair(Tied, optimizer)
    assert len(list(pair.wrapped.parameters())) == 4
    pair.train(3)
    assert pair.module.head.weight is pair.module.embed.weight


def under_two_names() -> nn.Module:
    module = Stack(2, [0, 1, 2])
    module.layers.append(module.layers[0])
    return module


def wasted(step: int, module: nn.Module) -> None:
    """A weight may be prefetched for a backward that never comes, and must not stay in memory."""
    module.wasted = [[1, 2], [0], [], [3]][step]


def reordered(step: int, module: nn.Module) -> None:
    """The module that was prefetched does not run, or runs later, or twice."""
    module.order = [[0, 1, 2, 3], [3, 2, 1, 0], [0], [], [2, 2], [0, 1, 2, 3], [1, 3], [0, 1, 2, 3]][step]


def refrozen(step: int, module: nn.Module) -> None:
    if step == 1:
        freeze(module, "layers.1.weight", "layers.3.bias", "head.weight")
    if step == 2:
        freeze(module, "layers.2.weight", "layers.2.bias", "layers.1.weight", requires_grad=True)
    if step == 3:
        freeze(module, "embed.weight", "head.weight", "layers.3.bias", requires_grad=True)
        freeze(module, "layers.0.weight")
    if step == 4:
        freeze(module, *(name for name, _ in module.named_parameters() if "head" not in name))


STACKS: dict[str, tuple[Any, ...]] = {
    "used_twice": (partial(Stack, 2, [0, 0]), 2),
    "used_twice_with_another_between": (partial(Stack, 2, [0, 1, 0]), 2),
    "used_five_times": (partial(Stack, 2, [1, 0, 0, 1, 1]), 2),
    "under_two_names": (under_two_names, 2),
    "outputs_not_used": (partial(Stack, 4, [0, 3]), 4, wasted),
    "another_order_in_each_step": (Stack, 8, reordered),
    "frozen_and_unfrozen": (partial(Stack, frozen=["embed.weight", "layers.2.weight", "layers.2.bias"]), 5, refrozen),
}
"""Model, number of steps, and what changes it before each step."""


@pytest.mark.parametrize("name", STACKS)
def test_modules_that_run_in_other_ways(name):
    make, *training = STACKS[name]
    Pair(make, adamw).train(*training)


def test_unused_parameters_have_no_gradient():
    pair = Pair(partial(Stack, 4, [0, 3]))
    pair.train(2)
    assert all(p.grad is None for number in (1, 2) for p in pair.module.layers[number].parameters())


def test_a_shorter_pass_before_the_update():
    """A weight that was prefetched and not used then must not be used after the update."""
    pair = Pair(Stack)
    for step in range(2):
        pair.zero_grad()
        pair.backward(step)
        pair.finish(f"step {step}")
        for module in pair.both:
            module.order = [0]
        with torch.no_grad():
            pair.forward(50 + step)
        for module in pair.both:
            module.order = [0, 1, 2, 3]
        pair.step(f"step {step}")


def test_a_forward_that_raises():
    """The weights that were prefetched for the rest of it are freed."""
    pair = Pair(Stack)
    pair.train(1)
    pair.module.order = [0, 9]
    WATCH.clear()
    with pytest.raises(IndexError), WATCH.passes():
        pair.wrapped(part(tokens(1)))
    WATCH.assert_nothing_left("after the error")
    pair.module.order = [0, 1, 2, 3]
    pair.train(1, start=1)


@pytest.mark.parametrize(
    "names",
    [
        ["embed.weight", "layers.0.weight", "layers.0.bias"],  # no gradient flows that far
        ["layers.0.bias", "layers.2.weight", "head.weight"],
        ["layers.0.weight", "layers.1.weight", "layers.1.bias", "layers.3.weight"],
    ],
    ids=["first", "last", "middle"],
)
def test_frozen_parameters(names):
    """A frozen weight has no gradient that would free it in backward."""
    pair = Pair(partial(Stack, frozen=names), adamw)
    pair.train(2)
    for name, p in pair.module.named_parameters():
        assert p.requires_grad == (name not in names), name
        assert (p.grad is None) == (name in names), name


class Branches(nn.Module):
    """A Linear of each dtype, side by side: the error of one is not in another."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        self.branches = nn.ModuleList(nn.Linear(4, 7, dtype=dtype) for dtype in dtypes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x.to(branch.bias.dtype)).double() for branch in self.branches], dim=-1)


def test_mixed_dtypes():
    """Each branch is as exact as its dtype; gradients and weights stay in it."""
    pair = Pair(Branches, inputs=floats, tolerance=0.02)
    for step in range(2):
        pair.train(1, start=step)
        gathered = gather_full_params(pair.wrapped)
        for i, (branch, tolerance) in enumerate(zip(pair.whole.branches, (1e-12, 1e-6, 0.02, 0.003), strict=True)):
            name = f"branches.{i}.weight"
            assert_close(f"step {step}: gathered {name}", gathered[name], branch.weight.detach(), tolerance)
            ours = pair.module.get_parameter(name).grad
            assert_close(f"step {step}: gradient of {name}", ours, rows(branch.weight.grad), tolerance)


# -- passes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Net, Tied, partial(Stack, 2, [0, 1, 0])], ids=["net", "tied", "used_twice"])
def test_gradient_accumulation(make):
    """Several backwards and one finish, a finish after each, and gradients that are not zeroed."""
    pair = Pair(make, adamw)
    pair.train(1)
    pair.zero_grad()
    for micro in range(3):
        pair.backward(10 + micro)
    pair.finish("three passes and one finish")
    pair.step("first")
    pair.zero_grad(set_to_none=False)
    for micro in range(2):
        pair.backward(20 + micro)
        pair.finish(f"finish {micro}")
    pair.step("second")
    pair.backward(30)
    pair.finish("added to the last step's")


@pytest.mark.parametrize("order", [(0, 1), (1, 0), None], ids=["in_order", "reversed", "together"])
@pytest.mark.parametrize("make", [Net, Tied], ids=["net", "tied"])
def test_two_forwards_before_backward(make, order):
    """The backwards come in either order, with a finish between them, or in one graph."""
    pair = Pair(make)
    for finish_between in (False, True) if order else (False,):
        pair.zero_grad()
        losses = [pair.forward(0), pair.forward(1)]
        graphs = [losses[i] for i in order] if order else [tuple(map(sum, zip(*losses, strict=True)))]
        for number, (theirs, ours) in enumerate(graphs):
            pair.backward_of(theirs, ours)
            if finish_between and number == 0:
                pair.finish("after one of two")
        pair.finish(f"finish between: {finish_between}")
        pair.step("after")


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations(reentrant):
    """Recomputation runs forward hooks inside of backward, and may end them with an exception."""
    for order, names in (([0, 1, 2, 3], []), ([0, 1, 0, 2], []), ([3, 2, 1, 0], ["layers.1.weight"])):
        pair = Pair(partial(Stack, order=order, frozen=names, reentrant=reentrant), adamw)
        pair.train(2)
    for step in range(2):
        pair.backward(step)
    pair.finish("two passes and one finish")


def test_no_grad_between_passes():
    """Before training, between forward and backward, and after a forward that no backward follows."""
    pair = Pair(Net, adamw)
    for step in range(2):
        with torch.no_grad():
            expected = pair.whole(tokens(100 + step))
            out = WATCH.forward("no_grad", pair.wrapped, part(tokens(100 + step)))
        assert not out.requires_grad
        assert_close("no_grad", out, part(expected), 1e-6)
        pair.forward(50 + step)
        pair.train(1, start=step)
        pair.zero_grad()
        theirs, ours = pair.forward(200 + step)
        with torch.no_grad():
            WATCH.forward("no_grad between forward and backward", pair.wrapped, part(tokens(300)))
        pair.backward_of(theirs, ours)
        pair.finish("after no_grad between forward and backward")
        pair.step("after")


def test_finish_twice():
    """The second does nothing, like one before any backward."""
    pair = Pair(Net)
    pair.wrapped.finish_gradient_synchronization()
    assert all(p.grad is None for p in pair.wrapped.parameters())
    pair.backward(0)
    pair.finish("first")
    WATCH.clear()
    with WATCH.passes():
        pair.wrapped.finish_gradient_synchronization()
    assert WATCH.events == []
    pair.compare_gradients("second")


class Calls(nn.Module):
    """Takes and returns more than a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 5)
        self.right = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor, *, scale: float, extra: dict[str, Tensor]) -> dict[str, Any]:
        return {"both": (self.left(x) * scale, self.right(extra["y"])), "scale": scale}


def test_arguments_and_their_gradients():
    """An input's gradient is that of this rank's own loss."""
    pair = Pair(Calls, inputs=floats)
    found = []
    for module, cut in ((pair.whole, lambda batch: batch), (pair.wrapped, part)):
        x, y = (cut(floats(i)).requires_grad_() for i in range(2))
        with WATCH.passes():
            out = module(x, scale=1.5, extra={"y": y})
            (loss_of(out["both"][0]) + loss_of(out["both"][1])).backward()
        assert out["scale"] == 1.5
        found.append((x.grad, y.grad))
    pair.finish("a step")
    for theirs, ours in zip(*found, strict=True):
        assert_close("an input's gradient", ours / world(), part(theirs), 1e-6)


def test_two_wrapped_models_at_once():
    one, two = Pair(Net), Pair(Stack, adamw)
    for step in range(2):
        losses = []
        for pair in (one, two):
            pair.zero_grad()
            losses.append(pair.forward(step))
        for theirs, ours in losses:
            one.backward_of(theirs, ours)
        for pair in (two, one):
            pair.finish(f"step {step}")
            pair.step(f"step {step}")


class InPlace(nn.Module):
    """Outputs that are overwritten; with three dimensions they are views."""

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


@pytest.mark.parametrize("bias", [False, True])
def test_outputs_changed_in_place(bias):
    """Hooks on the output would be lost. All-gathers are late: a weight that was not waited for is NaN."""
    WATCH.late = True
    try:
        for inputs in (tokens, lambda step: tokens(step, length=1)[:, 0]):
            Pair(partial(InPlace, bias), inputs=inputs).train(2)
    finally:
        WATCH.late = False


# -- the norm of the gradient -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Net, Tied, partial(Stack, 3, [0, 2])], ids=["net", "tied", "unused"])
def test_clip_grad_norm(make):
    """Replicated parameters count once. Takes the wrapper, a generator or a list."""
    pair = Pair(make, adamw)
    assert float(clip_grad_norm_(pair.wrapped, 1.0)) == 0.0
    forms = (pair.wrapped, pair.wrapped.parameters(), list(pair.wrapped.parameters()), pair.wrapped)
    for step, (share, parameters) in enumerate(zip((0.1, 0.9, 1.5, math.inf), forms, strict=True)):
        pair.zero_grad()
        pair.backward(step)
        pair.finish(f"step {step}")
        norms = [p.grad.double().norm() for p in pair.whole.parameters() if p.grad is not None]
        limit = share * float(torch.stack(norms).norm())
        expected = torch.nn.utils.clip_grad_norm_(pair.whole.parameters(), limit)
        found = clip_grad_norm_(parameters, limit)
        assert abs(float(found) / float(expected) - 1) < 1e-6
        assert_same_on_all_ranks("norm", [found])
        pair.compare_gradients(f"clipped to {share} of the norm")
        pair.step(f"step {step}")


def test_clip_grad_norm_of_some_parameters():
    """Also of one whose shard is empty on a rank."""
    pair = Pair(Net)
    pair.backward(0)
    pair.finish("a step")
    for names in (
        ["gate.weight"],
        ["embed.weight", "last.weight"],
        ["mix", "norm.bias"],
        ["first.weight", "first.bias"],
    ):
        theirs, ours = ([module.get_parameter(name) for name in names] for module in pair.both)
        expected, found = torch.nn.utils.clip_grad_norm_(theirs, 0.01), clip_grad_norm_(iter(ours), 0.01)
        assert abs(float(found) / float(expected) - 1) < 1e-6, names
        pair.compare_gradients(f"{names} clipped")
