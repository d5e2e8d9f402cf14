"""Data parallel training computes what one process computes with the batch of all ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.parallel import DDP, FlatDDP, NaiveDDP
from tests.distributed.compare import assert_close, rank, world
from tests.distributed.ddp.models import (
    VARIANTS,
    Net,
    Pair,
    Parts,
    Tied,
    all_reduces,
    compare_parts,
    double_loss,
    every_variant,
    share,
    whole_numbers,
    wrapped_parts,
)

pytestmark = [pytest.mark.ranks(2), every_variant]


@pytest.mark.ranks(1, 2, 4)
def test_sgd_on_the_whole_batch(name):
    Pair(name).train()
    Pair(name).train(set_to_none=False)


def test_arguments_and_results_are_the_modules_own(name):
    class Talkative(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((2,), 3.0))

        def forward(self, x: Tensor, *more: Any, sign: int = 1, **options: Any) -> dict[str, Any]:
            return {"out": self.scale * x * sign, "more": more, "options": options}

    module = Talkative()
    wrapped = VARIANTS[name].wrap(module)
    assert isinstance(wrapped, nn.Module)
    assert wrapped.module is module
    result = wrapped(torch.tensor([1.0, 2.0]), "more", 5, sign=-1, option="yes")
    assert_close("output", result["out"], torch.tensor([-3.0, -6.0]))
    assert (result["more"], result["options"]) == (("more", 5), {"option": "yes"})
    wrapped.eval()
    assert not module.training


class Everything(nn.Module):
    """Every kind of tensor that is broadcast at the start."""

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


def test_parameters_and_buffers_start_from_rank_0(name):
    """In place: an optimizer that was made before keeps its parameters."""
    module, expected = Everything(rank()), Everything(0)
    given = dict(module.named_parameters())
    VARIANTS[name].wrap(module)
    theirs = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    for key, tensor in (*module.named_parameters(), *module.named_buffers()):
        assert_close(key, tensor.detach(), theirs[key].detach())
        assert tensor.stride() == theirs[key].stride(), key
    for key, p in module.named_parameters():
        assert p is given[key], key
        assert p.grad is None, key
    assert not module.frozen.requires_grad


def test_state_dict_is_the_modules_own(name):
    """A prefix `module.` would tie checkpoints to the wrapper."""
    pair, other = Pair(name), whole_numbers(Net(), 7)
    assert list(pair.wrapped.state_dict()) == ["first.weight", "first.bias", "second.weight", "second.bias"]
    for model in (pair.plain, pair.wrapped):
        answer = model.load_state_dict(other.state_dict())
        assert not answer.missing_keys
        assert not answer.unexpected_keys
    pair.train(1)
    whole_numbers(Net(), 3).load_state_dict(pair.wrapped.state_dict())
    with pytest.raises(RuntimeError, match=r"module\.first\.weight"):
        pair.wrapped.load_state_dict({f"module.{key}": tensor for key, tensor in other.state_dict().items()})


def test_a_rank_that_does_not_call_backward(name):
    """It sends zeros: the others would wait for ever. In the second step its loss has no parameters."""
    plain, wrapped = wrapped_parts(name)
    for step in range(2):
        loss = wrapped([(0, 2.0), (3, float(rank()))] if rank() else [])
        if rank() or step == 1:
            loss.backward()
        wrapped.finish_gradient_synchronization()
        (sum(plain([(0, 2.0), (3, float(other))]) for other in range(1, world())) / world()).backward()
        compare_parts(f"step {step}", wrapped, plain)


def test_finish_without_backward(name):
    pair = Pair(name)
    pair.finish("before any forward")
    pair.loss(pair.wrapped, 0, rank())
    pair.finish("after a forward alone")
    pair.train(1)


def test_frozen_parameters(name):
    """Frozen from the start, and frozen and unfrozen later: the buckets are made anew."""

    def make() -> nn.Module:
        module = Net()
        module.first.weight.requires_grad_(False)
        module.second.bias.requires_grad_(False)
        return module

    def before(step: int, module: nn.Module) -> None:
        module.first.bias.requires_grad_(step in (1, 2))
        module.second.weight.requires_grad_(step != 2)

    Pair(name, make).train(2)
    Pair(name).train(5, before=before)


def test_everything_frozen(name):
    wrapped, plain = VARIANTS[name].wrap(whole_numbers(Net(), rank()).requires_grad_(False)), whole_numbers(Net(), 0)
    with all_reduces() as log:
        assert_close("output", wrapped(share(0, 0)), plain(share(0, 0)).detach())
        wrapped.finish_gradient_synchronization()
    assert not log


def test_tied_weights_and_modules_used_twice(name):
    """Autograd adds to such a gradient several times; it is averaged once and sent once."""
    Pair(name, lambda: Tied().double(), double_loss).train(2)
    pair = Pair(name, Tied)
    with all_reduces() as log:
        pair.backward(0)
        pair.finish()
    if VARIANTS[name].wrap in (NaiveDDP, DDP):
        assert len(log) == 4
    elif VARIANTS[name].wrap is FlatDDP:
        assert [sent.elements for _, sent in log] == [9 + 9 + 3 + 3 + 4]  # and a flag for each parameter


@pytest.mark.ranks(2, 4)
def test_mixed_dtypes(name):
    """Each dtype is missing on some rank in some step."""
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

    def loss(module: nn.Module, step: int, of_rank: int) -> Tensor:
        return module([(number, of_rank - 1.0) for number in range(5) if (number + step + of_rank) % 3])

    Pair(name, lambda: Parts(dtypes), loss).train(4)


def test_parameters_that_are_not_contiguous(name):
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 3).t())
            self.square = nn.Parameter(torch.zeros(2, 2).t())
            self.image = nn.Parameter(torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight @ self.square + (self.image.sum((2, 3)) * torch.arange(3)).sum(1)

    for set_to_none in (True, False):
        Pair(name, Transposed).train(2, set_to_none=set_to_none)


def test_parameters_without_elements(name):
    class Hollow(Net):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.idle = nn.Parameter(torch.zeros(0))
            self.scalar = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + (x @ self.empty.t()).sum() + self.scalar

    Pair(name, Hollow).train(2)


def test_buffers_come_from_rank_0(name):
    """Before every synchronised forward, and not in `no_sync`."""

    class Counting(nn.Module):
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

    wrapped, mine = VARIANTS[name].wrap(Counting(1 + rank())), rank() + 1

    def compare(when: str, added: int) -> None:
        for (key, buffer), start in zip(wrapped.module.named_buffers(), (10.0, 100, 0.5), strict=True):
            assert_close(f"{when}: {key}", buffer, torch.full_like(buffer, start + added))

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
