"""The fused model and the fast training step on the CPU, against the plain ones."""

import functools

import pytest
import torch
import torch.nn.functional as F

from cs336_systems.config import RunConfig
from cs336_systems.step.train_step import TrainStep
from tests.helpers import refused
from tests.unit.kernels.attention_cases import poisoned_memory
from tests.unit.kernels.fused_cases import SHAPE, compare, model_of, targets_of

# The model


def batch_of(length=SHAPE.context_length, batch=2):
    return targets_of(61, batch, length, seed=7), targets_of(61, batch, length, seed=8)


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@functools.cache
def plain_results(length=SHAPE.context_length, batch=2):
    tokens, targets = batch_of(length, batch)
    model = model_of().double()
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return {"logits": logits.detach(), "loss": loss.detach()} | gradients_of(model, loss)


MODELS = {
    "fused": ({"fused": True}, 12, 2),
    "fused, checkpoints": ({"fused": True, "checkpoint_blocks": 1}, 5, 2),
    "fused, larger checkpoints": ({"fused": True, "checkpoint_blocks": 2}, 1, 1),
    "fused, checkpoints within checkpoints": ({"fused": True, "checkpoint_blocks": 3, "checkpoint_inner": 1}, 12, 2),
    "fused, flash_torch": ({"fused": True, "attention": "flash_torch"}, 12, 2),
    "fused, sdpa": ({"fused": True, "attention": "sdpa"}, 12, 2),
    "unfused": ({}, 12, 2),
    "unfused, checkpoints": ({"checkpoint_blocks": 2}, 12, 2),
}


@pytest.mark.parametrize(("options", "length", "batch"), MODELS.values(), ids=list(MODELS))
def test_logits_loss_and_gradients(options, length, batch):
    tokens, targets = batch_of(length, batch)
    expected = plain_results(length, batch)
    model = model_of(**options)
    with poisoned_memory():
        logits, loss = model(tokens), model(tokens, targets)
        by_logits = gradients_of(model, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
        by_loss = gradients_of(model, loss)
    for gradients in (by_logits, by_loss):
        compare({"logits": logits.detach(), "loss": loss.detach()} | gradients, expected, 1e-5)


@pytest.mark.parametrize("checkpoint_blocks", [0, 2])
def test_the_fused_model_under_autocast(checkpoint_blocks):
    """Its error is about that of the plain model."""
    tokens, targets = batch_of()
    expected = plain_results()
    found = []
    for is_fused in (False, True):
        model = model_of(checkpoint_blocks, fused=is_fused)
        with torch.autocast("cpu", torch.bfloat16):
            logits, loss = model(tokens), model(tokens, targets)
        found.append({"logits": logits.detach(), "loss": loss.detach()} | gradients_of(model, loss))
    assert all(found[1][name].dtype == torch.float32 for name in expected if name not in ("logits", "loss"))
    for name, truth in expected.items():
        plain, ours = ((x[name].double() - truth).norm() / truth.norm() for x in found)
        assert ours <= 1.5 * plain + 2**-8, name


def test_names_of_the_weights():
    plain, ours = model_of(), model_of(fused=True)
    assert list(plain.state_dict()) == list(ours.state_dict())
    ours.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("is_fused", [False, True], ids=["plain", "fused"])
def test_packing_order(is_fused):
    model = model_of(fused=is_fused)
    order = [id(parameter) for parameter in model.in_packing_order()]
    assert sorted(order) == sorted(id(parameter) for parameter in model.parameters())
    for block in model.layers:
        attn, ffn = block.attn, block.ffn
        for together in ((attn.q_proj, attn.k_proj, attn.v_proj), (ffn.w1, ffn.w3)):
            indices = [order.index(id(module.weight)) for module in together]
            assert indices == list(range(indices[0], indices[0] + len(indices)))


# The fast step


@functools.cache
def losses_of(steps=3, **fields):
    step = TrainStep.build(RunConfig(model=SHAPE, batch_size=2, **fields))
    batch = step.random_batch()
    return [step(*batch).item() for _ in range(steps)]


FAST = ["kernels", "loss", "optimizer", "kernels,loss", "on"]
STEPS = {
    **{fast: (fast, {}) for fast in FAST},
    "clipped": ("on", {"max_grad_norm": 0.5}),
    "clipped-optimizer": ("optimizer", {"max_grad_norm": 0.5}),
    "checkpoints": ("on", {"checkpoint_blocks": 2}),
    "checkpoints-kernels": ("kernels", {"checkpoint_blocks": 2}),
    "bf16": ("on", {"precision": "bf16", "max_grad_norm": 1.0}),
    "bf16-kernels-loss": ("kernels,loss", {"precision": "bf16", "max_grad_norm": 1.0}),
}


@pytest.mark.parametrize(("fast", "fields"), STEPS.values(), ids=list(STEPS))
def test_losses_of_the_fast_step(fast, fields):
    expected = losses_of(**fields)
    assert expected[-1] < expected[0]
    assert losses_of(fast=fast, **fields) == pytest.approx(expected, rel=5e-3 if "precision" in fields else 1e-5)


@pytest.mark.parametrize("mode", ["inference", "forward", "forward-backward"])
def test_modes_without_an_update(mode):
    config = RunConfig(model=SHAPE, batch_size=2, mode=mode, fast="kernels,loss")
    step, plain = (TrainStep.build(c) for c in (config, RunConfig(model=SHAPE, batch_size=2, mode=mode)))
    batch = plain.random_batch()
    found, expected = step(*batch), plain(*batch)
    assert (found is None) == (expected is None) == (mode != "forward-backward")
    if found is not None:
        assert found.item() == pytest.approx(expected.item(), rel=1e-5)
        gradients = [{n: p.grad for n, p in s.model.named_parameters()} for s in (step, plain)]
        compare(gradients[0], {name: x.double() for name, x in gradients[1].items()}, 1e-5)


REFUSED = {
    "graph on a cpu": {"fast": "graph"},
    "graph among others": {"fast": "kernels,loss,graph"},
    "kernels and compile": {"fast": "kernels", "compile": True},
    "optimizer in fp16": {"fast": "optimizer", "precision": "fp16"},
    "kernels of another model": {"fast": "kernels", "model_factory": "package.module:build"},
    "loss of another model": {"fast": "loss", "model_factory": "package.module:build"},
    "optimizer of another model": {"fast": "optimizer", "model_factory": "package.module:build"},
    "unknown": {"fast": "kernel"},
    "unknown among others": {"fast": "kernels,speed"},
    "capitals": {"fast": "Kernels"},
    "on with others": {"fast": "on,kernels"},
    "off with others": {"fast": "kernels,off"},
    "nothing": {"fast": ""},
    "nothing among others": {"fast": "kernels,,loss"},
}


@pytest.mark.parametrize("fields", REFUSED.values(), ids=list(REFUSED))
def test_refused_parts(fields):
    with refused("fast"):
        RunConfig(model=SHAPE, **fields)


def test_on_is_all_supported_parts():
    assert RunConfig(model=SHAPE, fast="on").fast_parts == {"kernels", "loss", "optimizer"}
    assert "kernels" not in RunConfig(model=SHAPE, fast="on", compile=True).fast_parts
    assert "optimizer" not in RunConfig(model=SHAPE, fast="on", precision="fp16").fast_parts
    assert RunConfig(model=SHAPE, fast="on", model_factory="package.module:build").fast_parts == frozenset()
    assert RunConfig(model=SHAPE).fast_parts == frozenset()


@pytest.mark.parametrize("text", ["loss,kernels", " kernels , loss ", "kernels, loss", "loss,kernels,loss"])
def test_order_and_spaces_do_not_matter(text):
    config = RunConfig(model=SHAPE, fast=text)
    assert config.fast_parts == {"kernels", "loss"}
    assert config == RunConfig(model=SHAPE, fast="kernels,loss")


@pytest.mark.parametrize("fast", ["off", *FAST])
def test_fast_in_a_dict(fast):
    config = RunConfig(model=SHAPE, fast=fast)
    values = config.to_dict()
    assert ("fast" in values) == (fast != "off")
    assert RunConfig.from_dict(values) == config
    assert RunConfig.of(values).fast_parts == config.fast_parts
