"""The module where a value becomes not finite, or jumps, is named."""

import pytest
import torch

from cs336_systems.config import ModelConfig, RunConfig
from cs336_systems.step.module_trace import FEWEST, Tracer, first_jump, first_not_finite, trace
from cs336_systems.step.train_step import StepResult, TrainStep
from cs336_systems.step.updates import Update

SHAPE = ModelConfig(vocab_size=61, context_length=8, d_model=16, num_layers=3, num_heads=2, d_ff=24)


@pytest.fixture(params=["off", "kernels,loss"])
def step(request):
    return TrainStep.build(RunConfig(model=SHAPE, batch_size=2, fast=request.param))


def test_a_healthy_step_has_nothing_to_explain(step):
    batch = step.random_batch()
    seen = trace(step, [batch])
    assert first_not_finite(seen) is None
    assert all(p.grad is None for p in step.model.parameters())
    result = step.train([batch])
    assert Tracer().explain(step, result, [batch], lambda: [batch]) is None


@pytest.mark.parametrize(
    "name", ["token_embeddings.weight", "layers.1.attn.k_proj.weight", "layers.2.ffn.w2.weight", "ln_final.weight"]
)
def test_a_weight_that_is_not_finite_is_named(step, name):
    batch = step.random_batch()
    with torch.no_grad():
        dict(step.model.named_parameters())[name].view(-1)[3] = torch.nan
    result = step.train([batch])
    assert result.update is Update.SKIPPED
    assert Tracer().explain(step, result, [batch], lambda: [batch]) == f"not finite first in the weight {name}"


def test_the_first_module_that_overflows_is_named(step):
    """Weights are finite, and the product is not."""
    batch = step.random_batch()
    with torch.no_grad():
        step.model.layers[1].ffn.w1.weight.mul_(1e25)
        step.model.layers[1].ffn.w3.weight.mul_(1e25)
    result = step.train([batch])
    explained = Tracer().explain(step, result, [batch], lambda: [batch])
    assert explained == "not finite first in the input of layers.1.ffn.w2"


def test_a_gradient_that_is_not_finite_is_named():
    """Everything is finite in forward: the gradient of a square root at 0 is not."""
    step = TrainStep.build(RunConfig(model=SHAPE, batch_size=2))
    block = step.model.layers[1]
    inner = block.ffn.forward
    block.ffn.forward = lambda x: inner(x) + (x - x.detach()).abs().sqrt()
    batch = step.random_batch()
    result = step.train([batch])
    assert result.update is Update.SKIPPED
    explained = Tracer().explain(step, result, [batch], lambda: [batch])
    assert explained == "not finite first in the gradient of the output of layers.1.ln2"


def test_a_jump_is_traced_to_the_first_module_that_shows_it(step):
    usual = step.random_batch()
    rare = (torch.full_like(usual[0], 60), usual[1])
    usual = (usual[0].clamp(max=59), usual[1])
    with torch.no_grad():
        step.model.token_embeddings.weight[60] *= 100
    found = first_jump(trace(step, [rare]), trace(step, [usual]))
    assert found is not None
    assert found.startswith("the output of token_embeddings: ")
    tracer = Tracer()
    quiet = StepResult(1.0, 1.0, Update.APPLIED, False)
    for _ in range(FEWEST):
        assert tracer.explain(step, quiet, [usual], lambda: [usual]) is None
    spike = StepResult(1.0, 20.0, Update.APPLIED, False)
    text = tracer.explain(step, spike, [rare], lambda: [usual])
    assert text is not None
    assert text.startswith("the gradient's norm is 20, 20.0 times the median of recent steps; first seen in the output")
    text = tracer.explain(step, spike, [usual], lambda: [usual])
    assert text is not None
    assert text.endswith("no module stands out: the weights have changed, not the data")


def test_recomputed_blocks_are_traced_once():
    step = TrainStep.build(RunConfig(model=SHAPE, batch_size=2, checkpoint_blocks=1))
    plain = TrainStep.build(RunConfig(model=SHAPE, batch_size=2))
    batch = step.random_batch()
    names = [name for name, _ in trace(step, [batch])]
    assert len(names) == len(set(names))
    assert set(names) == {name for name, _ in trace(plain, [batch])}
