"""Blocks that keep, recompute or offload their activations by a plan: the same bits as blocks that keep everything."""

import gc
import random
import weakref
from unittest import mock

import pytest
import torch
from torch import Tensor

from cs336_systems.config import RunConfig
from cs336_systems.kernels.fused import block_run as planned
from cs336_systems.predict.activation_plan import KEEP, KEEP_ALL, OFFLOAD, RECOMPUTE, RECOMPUTE_ALL, BlockPlan
from cs336_systems.predict.memory_planner import block_plans
from cs336_systems.step.train_step import TrainStep
from tests.unit.kernels.attention_cases import poisoned_memory
from tests.unit.kernels.fused_cases import SHAPE, model_of, targets_of

OFFLOAD_ALL = BlockPlan(*[OFFLOAD] * 5)
PLANS = block_plans()


def random_plan(seed):
    return tuple(random.Random(seed).choices(PLANS, k=SHAPE.num_layers))


def batch_of(batch=2, length=SHAPE.context_length):
    return targets_of(61, batch, length, seed=7), targets_of(61, batch, length, seed=8)


def planned_model(plan):
    model = model_of(attention="flash_torch", fused=True)
    model.plan = plan
    return model


def results_of(model, batch, precision=torch.float32):
    """Loss and gradients."""
    model.zero_grad()
    with poisoned_memory():
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            loss = model(*batch)
        loss.backward()
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **grads}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
        else:
            assert torch.equal(found[name], value), name
            assert torch.isfinite(value).all(), name


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("batch", "length"), [(2, 12), (3, 7), (1, 1)])
def test_random_plans_change_no_bit(precision, batch, length):
    given = batch_of(batch, length)
    expected = results_of(planned_model(None), given, precision)
    model = planned_model(None)
    for seed in range(8):
        model.plan = random_plan(seed)
        assert_same(results_of(model, given, precision), expected)


@pytest.mark.parametrize("plan", PLANS[::13], ids=lambda plan: " ".join(choice[0] for choice in plan))
def test_every_choice_in_all_blocks_changes_no_bit(plan):
    given = batch_of()
    assert_same(results_of(planned_model((plan,) * 3), given), results_of(planned_model(None), given))


FROZEN = {
    "embedding": ["token_embeddings"],
    "first block": ["token_embeddings", "layers.0"],
    "all blocks": ["token_embeddings", "layers"],
    "gains": ["layers.0.ln1", "layers.1.ln2", "ln_final"],
    "one projection": ["layers.1.attn.k_proj", "layers.2.ffn.w3", "layers.0.attn.output_proj"],
    "head": ["lm_head"],
}


@pytest.mark.parametrize("frozen", FROZEN.values(), ids=list(FROZEN))
def test_frozen_weights(frozen):
    given, models = batch_of(), [planned_model(None), planned_model(random_plan(3)), planned_model((OFFLOAD_ALL,) * 3)]
    for model in models:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(tuple(frozen)))
    expected = results_of(models[0], given)
    assert any(value is None for value in expected.values())
    for model in models[1:]:
        for _ in range(2):
            assert_same(results_of(model, given), expected)


def test_gradients_add_up_over_micro_batches():
    batches = [batch_of(2, 12), batch_of(2, 12), batch_of(1, 5)]
    found = []
    for plan in (None, random_plan(1), (OFFLOAD_ALL, RECOMPUTE_ALL, KEEP_ALL)):
        model = planned_model(plan)
        for batch in batches:
            model(*batch).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


STEPS = {
    "packed": {"fast": "on"},
    "packed, bf16": {"fast": "on", "precision": "bf16", "max_grad_norm": 0.5},
    "unpacked": {"fast": "kernels,loss"},
    "unpacked, bf16": {"fast": "kernels,loss", "precision": "bf16"},
    "kernels alone": {"fast": "kernels", "precision": "bf16", "max_grad_norm": 0.5},
    "packed, without the fused loss": {"fast": "kernels,optimizer"},
}


def trained(plan, fields, steps=3):
    step = TrainStep.build(RunConfig(model=SHAPE, batch_size=2, attention="flash_torch", **fields))
    step.model.plan = plan
    with poisoned_memory():
        losses = [step.launch([batch_of(), batch_of(2, 5)]).item() for _ in range(steps)]
    return losses, dict(step.model.named_parameters()), step


@pytest.mark.parametrize("fields", STEPS.values(), ids=list(STEPS))
def test_steps_of_two_micro_batches(fields):
    expected, weights, _ = trained(None, fields)
    for seed in (0, 2):
        losses, found, _ = trained(random_plan(seed), fields)
        assert losses == expected
        assert_same(found, weights)


@pytest.mark.parametrize("fields", [{"update_in_backward": True}, {"optimizer_state": "bf16"}], ids=str)
def test_steps_of_optimizers_with_less_memory(fields):
    results = []
    for plan in (None, random_plan(1)):
        config = RunConfig(model=SHAPE, attention="flash_torch", fast="on", precision="bf16", **fields)
        step = TrainStep.build(config)
        step.model.plan = plan
        losses = [step.launch([batch_of()]).item() for _ in range(3)]
        results.append((losses, dict(step.model.named_parameters())))
    assert results[0][0] == results[1][0]
    assert_same(results[1][1], results[0][1])


def test_host_memory_is_allocated_once():
    _, _, step = trained((OFFLOAD_ALL, OFFLOAD_ALL, KEEP_ALL), STEPS["packed"], steps=1)
    host = step.model.host
    rows, width, inner = 2 * SHAPE.context_length, SHAPE.d_model, SHAPE.d_ff
    assert host.nbytes == 2 * 4 * rows * (6 * width + 2 * inner)  # input, qkv, attention, middle; gate and up
    buffers = {key: buffer.data_ptr() for key, buffer in host._buffers.items()}
    for batch in (batch_of(), batch_of(1, 3), batch_of()):
        step.launch([batch])
    assert {key: buffer.data_ptr() for key, buffer in host._buffers.items()} == buffers


def test_larger_batches_get_more_host_memory():
    model = planned_model((OFFLOAD_ALL, OFFLOAD_ALL, RECOMPUTE_ALL))
    for batch in ((1, 3), (2, 12), (1, 12)):
        assert_same(results_of(model, batch_of(*batch)), results_of(planned_model(None), batch_of(*batch)))


def test_a_second_backward_pass_is_refused():
    loss = planned_model((RECOMPUTE_ALL,) * 3)(*batch_of())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        loss.backward()


def test_backward_after_a_later_forward_pass():
    """Offloaded activations are those of the last pass; without offloading every graph has its own."""
    given, other = batch_of(), batch_of(1, 5)
    model = planned_model((RECOMPUTE_ALL, BlockPlan(KEEP, RECOMPUTE, KEEP, KEEP, KEEP), KEEP_ALL))
    first, _ = model(*given), model(*other)
    first.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    expected = results_of(planned_model(None), given)
    assert_same(found, {name: value for name, value in expected.items() if name != "loss"})
    model.plan = (OFFLOAD_ALL, RECOMPUTE_ALL, KEEP_ALL)
    first, second = model(*given), model(*other)
    with pytest.raises(RuntimeError, match="later forward pass"):
        first.backward()
    second.backward()


def stored_tensors(monkeypatch):
    """Return weak references to what blocks keep or send, filled while models run."""
    references = []
    store = planned.Run._store

    def watched(run, kind, tensor):
        references.append(weakref.ref(tensor.untyped_storage()))
        store(run, kind, tensor)

    monkeypatch.setattr(planned.Run, "_store", watched)
    return references


@pytest.mark.parametrize("seed", range(4))
def test_a_graph_that_is_dropped_leaves_nothing(seed, monkeypatch):
    plan = (*random_plan(seed)[:2], BlockPlan(KEEP, RECOMPUTE, KEEP, RECOMPUTE, KEEP))
    stored, model, given = stored_tensors(monkeypatch), planned_model(plan), batch_of()
    loss = model(*given)
    assert any(reference() is not None for reference in stored)
    del loss
    gc.collect()
    assert all(reference() is None for reference in stored)
    assert not model.host._sent
    assert not model.host._fetched
    assert_same(results_of(model, given), results_of(planned_model(None), given))


def test_backward_frees_all_activations(monkeypatch):
    stored, model = stored_tensors(monkeypatch), planned_model((OFFLOAD_ALL, RECOMPUTE_ALL, KEEP_ALL))
    loss = model(*batch_of())
    loss.backward()  # the graph is still referred to by the loss
    assert stored
    assert all(reference() is None for reference in stored)


def test_evaluation_ignores_the_plan():
    model, given = planned_model((OFFLOAD_ALL,) * 3), batch_of()
    with torch.no_grad():
        loss = model(*given)
    assert torch.equal(loss, planned_model(None)(*given))
    assert model.host.nbytes == 0


def test_evaluation_between_forward_and_backward():
    model, given = planned_model((OFFLOAD_ALL, OFFLOAD_ALL, KEEP_ALL)), batch_of()
    loss = model(*given)
    with torch.no_grad():
        model(*batch_of(1, 4))
    loss.backward()
    found = {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}
    assert_same(found, results_of(planned_model(None), given))


RECOMPUTED = {
    (KEEP, KEEP, KEEP, RECOMPUTE, KEEP): (1, 0),
    (KEEP, RECOMPUTE, KEEP, KEEP, KEEP): (1, 0),
    (KEEP, KEEP, RECOMPUTE, KEEP, KEEP): (0, 1),
    (KEEP, KEEP, KEEP, KEEP, RECOMPUTE): (1, 0),
    (OFFLOAD, RECOMPUTE, OFFLOAD, OFFLOAD, RECOMPUTE): (2, 0),
    RECOMPUTE_ALL: (3, 1),
    OFFLOAD_ALL: (0, 0),
}


@pytest.mark.parametrize("plan", RECOMPUTED, ids=" ".join)
def test_only_what_the_plan_says_is_recomputed(plan):
    """Numbers of matmuls and of attentions in all blocks."""

    def calls(own):
        attend = mock.patch.object(planned.Run, "_attend", autospec=True, side_effect=planned.Run._attend)
        with attend as attentions, mock.patch.object(torch, "mm", wraps=torch.mm) as matmuls:
            planned_model((BlockPlan(*own),) * 3)(*batch_of()).backward()
        return matmuls.call_count, attentions.call_count

    nothing, found = calls(OFFLOAD_ALL), calls(plan)
    assert nothing[1] == 3
    assert tuple(more - less for more, less in zip(found, nothing, strict=True)) == tuple(
        3 * count for count in RECOMPUTED[plan]
    )


def test_saved_tensors_are_those_of_the_plan(monkeypatch):
    kept: dict[int, set[str]] = {}

    def spy(run, x, delta, forward=planned.Run.forward) -> tuple[Tensor, Tensor]:
        result = forward(run, x, delta)
        kept[run.setting.number] = set(run.kept)
        return result

    monkeypatch.setattr(planned.Run, "forward", spy)
    plan = random_plan(11)
    model = planned_model(plan)
    model(*batch_of())
    assert kept == {number: set(own.kinds(KEEP)) for number, own in enumerate(plan)}
    assert model.host._buffers.keys() == {
        (number, kind) for number, own in enumerate(plan) for kind in own.kinds(OFFLOAD)
    }
