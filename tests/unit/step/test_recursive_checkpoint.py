"""Recomputation by halves: gradients of a plain chain; runs and block inputs as docs/CHECKPOINTING.md derives them."""

import math
import weakref

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.config import ModelConfig
from cs336_systems.model import TransformerLM
from cs336_systems.step.recursive_checkpoint import run_by_halves

DEPTHS = (1, 2, 3, 5, 8, 16, 32)


class Chain:
    """Linear layers with a nonlinearity, as callables that count their runs and the inputs that are alive."""

    def __init__(self, depth: int):
        torch.manual_seed(0)
        self.layers = [nn.Linear(4, 4).double() for _ in range(depth)]
        self.runs = 0
        self.most_inputs = 0
        self._inputs: dict[int, weakref.ref[Tensor]] = {}

    def block(self, number: int):
        def run(x: Tensor) -> tuple[Tensor]:
            self.runs += 1
            self._inputs[number] = weakref.ref(x.untyped_storage())
            alive = sum(held() is not None for held in self._inputs.values())
            self.most_inputs = max(self.most_inputs, alive)
            return (torch.tanh(self.layers[number](x)),)

        return run

    @property
    def gradients(self) -> list[Tensor]:
        return [layer.weight.grad for layer in self.layers]


def trained(depth: int, *, by_halves: bool) -> tuple[Chain, Tensor]:
    chain = Chain(depth)
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    blocks = [chain.block(number) for number in range(depth)]
    if by_halves:
        (y,) = run_by_halves(blocks, x)
    else:
        y = x
        for block in blocks:
            (y,) = block(y)
    y.sum().backward()
    assert x.grad is not None
    return chain, x.grad


@pytest.mark.parametrize("depth", DEPTHS)
def test_gradients_are_those_of_the_plain_chain(depth):
    (halves, grad), (plain, expected) = (trained(depth, by_halves=by_halves) for by_halves in (True, False))
    assert torch.equal(grad, expected)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(halves.gradients, plain.gradients, strict=True))


@pytest.mark.parametrize("depth", [2, 4, 8, 16, 32])
def test_runs_are_those_of_the_derivation(depth):
    chain, _ = trained(depth, by_halves=True)
    assert chain.runs == 2 * depth + depth * (math.log2(depth) - 1) / 2


@pytest.mark.parametrize("depth", [8, 32])
def test_few_block_inputs_are_alive(depth):
    halves, _ = trained(depth, by_halves=True)
    plain, _ = trained(depth, by_halves=False)
    assert plain.most_inputs == depth
    assert halves.most_inputs <= math.log2(depth) + 3, "one a level, and those that a running block has in hand"


@pytest.mark.parametrize("group", [1, 2, 3])
def test_a_model_by_halves_has_equal_gradients(group):
    shape = ModelConfig(vocab_size=32, context_length=8, d_model=16, num_layers=5, num_heads=2, d_ff=32)
    tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(0))

    def gradients(blocks: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = TransformerLM(shape, attention="reference", checkpoint_blocks=blocks)
        model.checkpoint_recursive = bool(blocks)
        model(tokens).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    assert all(torch.equal(ours, plain) for ours, plain in zip(gradients(group), gradients(0), strict=True))
