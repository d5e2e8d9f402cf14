"""Attention over the ranks of a context-parallel group against attention in one process, with gradients."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from cs336_systems.config import ModelConfig
from cs336_systems.kernels import attention
from cs336_systems.kernels.flash.operators import cast_for_autocast
from cs336_systems.kernels.flash.prefix import PrefixAttention
from cs336_systems.model import TransformerLM
from cs336_systems.parallel import context_parallel
from cs336_systems.parallel.context_parallel import ContextParallel
from tests.distributed.compare import assert_close, rank, world

SHAPES = [(1, 1, 1, 8, 2), (2, 4, 2, 24, 3), (1, 3, 3, 600, 8)]
"""Batch, heads, heads of keys, tokens, width of a head. The last has chunks of more than one tile."""


def split() -> ContextParallel:
    return ContextParallel(init_device_mesh("cpu", (world(),)))


def inputs_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    """Return q, k, v and the gradient of the output, the same on all ranks."""
    batch, heads, kv_heads, length, width = shape
    generator = torch.Generator().manual_seed(length)

    def normal(count: int) -> Tensor:  # rows outermost, as in the model
        drawn = torch.randn(batch, length, count, width, generator=generator, dtype=torch.float64)
        return drawn.to(dtype).transpose(1, 2)

    return [normal(count).detach().requires_grad_() for count in (heads, kv_heads, kv_heads)], normal(heads)


def own_rows(parts: ContextParallel, whole: Tensor) -> Tensor:
    return parts.own(whole.detach().transpose(1, 2)).transpose(1, 2)


def attended(parts: ContextParallel, whole: list[Tensor], grad: Tensor, impl: str) -> list[Tensor]:
    """Return this rank's part of the output and of the gradients of q, k and v."""
    own = [own_rows(parts, t).requires_grad_() for t in whole]
    out = parts.attend(*cast_for_autocast(*own), PrefixAttention(impl))
    out.backward(own_rows(parts, grad))
    return [out.detach(), *(t.grad for t in own)]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_attention_is_that_of_one_process(shape, impl):
    parts, (whole, grad) = split(), inputs_of(shape)
    expected = attention(*whole, is_causal=True, impl="reference")
    expected.backward(grad)
    found = attended(parts, whole, grad, impl)
    for name, own, other in zip(("output", "dq", "dk", "dv"), found, [expected, *(t.grad for t in whole)], strict=True):
        assert_close(name, own, own_rows(parts, other), 1e-12)


@pytest.mark.ranks(2)
def test_attention_in_autocast_is_in_its_dtype():
    parts, (whole, grad) = split(), inputs_of((1, 2, 2, 8, 4), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, dq, _, _ = attended(parts, whole, grad.bfloat16(), "auto")
    assert (out.dtype, dq.dtype) == (torch.bfloat16, torch.float32)
    assert_close("output", out.float(), own_rows(parts, attention(*whole, is_causal=True)), 0.03)


@pytest.mark.ranks(4)
def test_it_sends_what_the_plan_counts():
    """Keys and values of the whole sequence are gathered in each pass; their gradients are scattered once."""
    parts, (whole, grad) = split(), inputs_of((2, 2, 2, 16, 4))
    calls = []
    real = {name: getattr(context_parallel, name) for name in ("all_gather", "reduce_scatter")}

    def counting(name, larger):
        def call(*tensors, group):
            calls.append((name, tensors[larger].numel()))
            real[name](*tensors, group=group)

        return call

    stand_ins = {"all_gather": counting("all_gather", 0), "reduce_scatter": counting("reduce_scatter", 1)}
    with patch.multiple(context_parallel, **stand_ins):
        attended(parts, whole, grad, "auto")
    count = whole[1].numel() + whole[2].numel()
    assert calls == [("all_gather", count), ("all_gather", count), ("reduce_scatter", count)]


@pytest.mark.ranks(4)
def test_nothing_of_the_whole_sequence_is_kept_for_backward():
    parts, (whole, _) = split(), inputs_of((1, 2, 2, 16, 4))
    own = [own_rows(parts, t).requires_grad_() for t in whole]
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        parts.attend(*own, PrefixAttention("auto"))
    assert sum(saved) == 4 * own[0].numel() + own[0].numel() // 4  # q, k, v, output and logsumexp


@pytest.mark.ranks(2)
def test_sequences_are_split_and_joined():
    parts, tokens = split(), torch.arange(16).view(2, 8)
    own = parts.own(tokens)
    assert own.tolist() == ([[0, 1, 6, 7], [8, 9, 14, 15]] if rank() == 0 else [[2, 3, 4, 5], [10, 11, 12, 13]])
    assert torch.equal(parts.joined(own), tokens)
    assert torch.equal(torch.cat([torch.arange(8)[span] for span in parts.positions(4)]), own[0])


@pytest.mark.ranks(2)
def test_a_loss_of_the_whole_has_gradients_of_each_part():
    """Ranks with the same loss each add theirs; averaged, as gradients of weights are, they are those of one."""
    parts = split()
    own = parts.own(torch.arange(8.0).view(1, 8)).requires_grad_()
    parts.joined(own).square().sum().backward()
    assert torch.equal(own.grad, 2 * 2 * own.detach())


@pytest.mark.ranks(2)
def test_recomputed_blocks_gather_again():
    config = ModelConfig(vocab_size=16, context_length=8, d_model=8, num_layers=1, num_heads=2, d_ff=16)
    torch.manual_seed(0)
    model, parts = TransformerLM(config), split()
    parts.install(model)
    block, gradients = model.layers[0], []
    for recompute in (False, True):
        x = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(rank())).requires_grad_()
        out = checkpoint(block, x, model.rotate, use_reentrant=False) if recompute else block(x, model.rotate)
        out.square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
