"""One training step: phases, modes, precisions, loss scaling, and that it trains."""

import dataclasses
import functools
import math

import pytest
import torch
from torch import nn

from cs336_systems.config import MODES, PRECISIONS, ModelConfig, RunConfig, UserError
from cs336_systems.step.train_step import TrainStep, cosine_lr, set_matmul_precision
from cs336_systems.step.updates import LossScale, PlainOptimizer, Update, adapt

SHAPE = ModelConfig(vocab_size=61, context_length=16, d_model=32, num_layers=2, num_heads=2, d_ff=48)

PHASES_OF_MODE = {
    "inference": ("forward",),
    "forward": ("forward",),
    "forward-backward": ("forward", "loss", "backward", "sync"),
    "train-step": ("forward", "loss", "backward", "sync", "optimizer"),
}


class Log:
    """A watcher that notes the phases."""

    def __init__(self):
        self.events = []

    def __call__(self, name):
        log = self

        class Range:
            def __enter__(self):
                log.events.append(f"+{name}")

            def __exit__(self, *_):
                log.events.append(f"-{name}")

        return Range()


def step_of(**fields):
    return TrainStep.build(RunConfig(model=SHAPE, batch_size=2, **fields))


@pytest.mark.parametrize("mode", MODES)
def test_phases_come_one_after_another(mode):
    step, log = step_of(mode=mode), Log()
    step(*step.random_batch(), watch=log)
    phases = [phase for phase in PHASES_OF_MODE[mode] if phase != "sync"]  # no wrapper, nothing to synchronise
    assert log.events == [event for phase in phases for event in (f"+{phase}", f"-{phase}")]


def test_a_wrapper_is_synchronised_between_backward_and_optimizer():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module
            self.synced_with_gradients = None

        def forward(self, tokens):
            return self.module(tokens)

        def finish_gradient_synchronization(self):
            self.synced_with_gradients = all(p.grad is not None for p in self.module.parameters())

    wrapper, log = Wrapper(step_of().model), Log()
    step = TrainStep(wrapper, RunConfig(model=SHAPE, batch_size=2))
    step(*step.random_batch(), watch=log)
    assert wrapper.synced_with_gradients
    assert [e for e in log.events if e[0] == "+"] == ["+forward", "+loss", "+backward", "+sync", "+optimizer"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_learns_the_batch(precision):
    """fp16 scales the loss, and may skip its first steps."""
    model = dataclasses.replace(SHAPE, num_layers=1, d_model=32, d_ff=16, context_length=16)
    needs = {"fast": "kernels", "attention": "auto"} if precision == "fp8" else {}
    step = TrainStep.build(RunConfig(model=model, batch_size=2, precision=precision, max_grad_norm=1.0, **needs))
    for group in step.optimizer.param_groups:
        group["lr"] = 2e-2
    batch = step.random_batch()
    losses = [step(*batch).item() for _ in range(15)]
    assert losses[0] == pytest.approx(math.log(61), rel=0.3)
    assert losses[-1] < 0.7 * losses[0]
    assert all(parameter.dtype == torch.float32 for parameter in step.model.parameters())


def test_a_step_is_what_plain_pytorch_would_do():
    step = step_of(max_grad_norm=0.5)
    twin = step_of(max_grad_norm=0.5).model
    optimizer = torch.optim.AdamW(twin.parameters())
    inputs, targets = step.random_batch()
    for _ in range(3):
        loss = step(inputs, targets)
        expected = nn.functional.cross_entropy(twin(inputs).view(-1, 61), targets.view(-1))
        optimizer.zero_grad()
        expected.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach())
    for a, b in zip(step.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_inference_keeps_no_graph_and_forward_keeps_one():
    grad_enabled = []
    for mode in ("inference", "forward"):
        step = step_of(mode=mode)
        step.model.register_forward_hook(lambda _m, _i, output: grad_enabled.append(output.requires_grad))
        assert step(*step.random_batch()) is None
    assert grad_enabled == [False, True]


def test_no_graph_and_no_stale_gradient_outlives_a_step():
    """Two live graphs double the memory of a step: nothing of one step may be alive in the next."""
    step = step_of(mode="forward-backward")
    batch = step.random_batch()
    step(*batch)
    first = [p.grad.clone() for p in step.model.parameters()]
    step(*batch)
    assert all(torch.equal(p.grad, g) for p, g in zip(step.model.parameters(), first, strict=True))
    trained = step_of(mode="train-step")
    trained(*batch)
    assert all(p.grad is None for p in trained.model.parameters())


def test_fp32_means_fp32():
    set_matmul_precision("tf32")
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cudnn.allow_tf32
    step_of(precision="fp32")
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cudnn.allow_tf32


def test_cosine_schedule():
    def lr(step):
        return cosine_lr(step, peak=1.0, floor=0.1, warmup_steps=10, total_steps=110)

    assert [lr(0), lr(5), lr(10), lr(110), lr(500)] == pytest.approx([0, 0.5, 1.0, 0.1, 0.1])
    assert lr(60) == pytest.approx(0.55)
    assert all(lr(step) >= lr(step + 1) for step in range(10, 120))


def test_compiled_step_gives_the_same_loss(monkeypatch):
    """By the backend that compiles no C++; the default one is tested where it is measured."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    plain, compiled = step_of(), step_of(compile=True)
    batch = plain.random_batch()
    for _ in range(2):
        torch.testing.assert_close(plain(*batch), compiled(*batch), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fast", ["off", "optimizer", "loss", "kernels", "on"])
@pytest.mark.parametrize("parts", [1, 2])
def test_train_and_call_give_the_same_weights(parts, fast):
    """Micro batches add up to the whole batch, and clipping and update are the same."""
    called, trained = (step_of(max_grad_norm=0.5, fast=fast) for _ in range(2))
    inputs, targets = called.random_batch()
    for _ in range(3):
        loss = called(inputs, targets)
        result = trained.train([*zip(inputs.chunk(parts), targets.chunk(parts), strict=True)], learning_rate=1e-3)
        assert result.loss == pytest.approx(loss.item(), rel=1e-5)
        assert (result.update, result.stop) == (Update.APPLIED, False)
        assert result.gradient_norm > 0.5
    for a, b in zip(called.model.parameters(), trained.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("precision", "outcome"), [("fp32", Update.SKIPPED), ("fp16", Update.RESCALED)])
def test_train_leaves_out_a_non_finite_update(precision, outcome):
    step = step_of(precision=precision)
    before = [p.detach().clone() for p in step.model.parameters()]
    handle = step.model.token_embeddings.weight.register_hook(lambda grad: grad * math.nan)
    result = step.train([step.random_batch()], stop=lambda: True)
    assert (result.update, result.stop, math.isnan(result.gradient_norm)) == (outcome, True, True)
    assert step.loss_scale.value == (2.0**15 if precision == "fp16" else 1.0)
    assert all(torch.equal(p, b) for p, b in zip(step.model.parameters(), before, strict=True))
    assert all(p.grad is None for p in step.model.parameters())
    handle.remove()
    assert step.train([step.random_batch()]).update is Update.APPLIED


def test_loss_scale_doubles_and_halves():
    scale = LossScale.of("fp16", growth_interval=2)
    outcomes = [scale.update(is_finite) for is_finite in (True, True, False, True, False)]
    assert [outcome.value for outcome in outcomes] == ["applied", "applied", "rescaled", "applied", "rescaled"]
    assert (scale.value, scale.good_steps) == (2.0**15, 0)
    scale.value = 1.0
    assert scale.update(False) is Update.SKIPPED
    assert LossScale.of("bf16").update(False) is Update.SKIPPED


def test_optimizers_share_one_interface():
    plain, packed = step_of().optimizer, step_of(fast="optimizer", precision="bf16").optimizer
    assert adapt(packed) is packed
    assert isinstance(adapt(plain), PlainOptimizer)
    assert not adapt(plain).clips_itself
    assert adapt(plain).masters() == {}
    assert adapt(plain).unlisted_state == []
    assert len(adapt(plain).owned) == len(adapt(packed).owned) == len(packed.masters())
    assert [bits.dtype for bits in adapt(packed).unlisted_state] == [torch.int16]


# -- update in backward -----------------------------------------------------------------------------------------------

IN_BACKWARD = {
    "bf16": {"precision": "bf16"},
    "bf16 state": {"precision": "bf16", "optimizer_state": "bf16"},
    "fp32": {},
    "recomputed": {"precision": "bf16", "checkpoint_blocks": 1},
    "optimizer alone": {"fast": "optimizer", "attention": "reference"},
}


@pytest.mark.parametrize("fields", IN_BACKWARD.values(), ids=list(IN_BACKWARD))
def test_an_update_in_backward_is_the_ordinary_step_to_the_bit(fields):
    results = []
    for update_in_backward in (False, True):
        step = step_of(**{"fast": "on", **fields}, update_in_backward=update_in_backward)
        losses = [step(*step.random_batch()).item() for _ in range(4)]
        masters = step.optimizer.masters()
        results.append((losses, [masters[p] for p in step.model.parameters()]))
        assert all(p.grad is None for p in step.model.parameters())
    (losses, weights), (others, other_weights) = results
    assert losses == others
    assert losses[-1] < losses[0]
    assert all(torch.equal(*two) for two in zip(weights, other_weights, strict=True))


def test_an_update_in_backward_takes_one_micro_batch_and_no_check():
    step = step_of(fast="on", update_in_backward=True)
    with pytest.raises(UserError, match="one micro batch, got 2"):
        step.launch([step.random_batch()] * 2)
    with pytest.raises(UserError, match="not finite"):
        step.train([step.random_batch()])
