"""The fast step on a GPU: its Triton kernels against formulas in fp64, its CUDA graph against the step without one."""

import dataclasses
import gc
import random

import pytest
import torch
import torch.nn.functional as F

from cs336_systems.config import RunConfig, model_config
from cs336_systems.kernels.fused import nodes as fused
from cs336_systems.kernels.fused import pointwise
from cs336_systems.measure.block_planner import build_step, predict_step
from cs336_systems.measure.memory_trace import predict_by_tracing
from cs336_systems.measure.timing import time_as_configured
from cs336_systems.model import TransformerLM
from cs336_systems.predict.activation_plan import KEEP, KEEP_ALL, OFFLOAD, RECOMPUTE, BlockPlan
from cs336_systems.predict.building_memory import building_peak
from cs336_systems.predict.memory_model import estimate
from cs336_systems.predict.memory_planner import block_plans, budget_bytes, least_peak
from cs336_systems.record import GIB
from cs336_systems.step import block_memory
from cs336_systems.step.block_memory import BlockMemory
from cs336_systems.step.memory_budget import plan_for_machine
from cs336_systems.step.module_trace import Tracer
from cs336_systems.step.replay import ReplayError
from cs336_systems.step.train_step import TrainStep
from cs336_systems.step.updates import Update
from tests.unit.kernels.attention_cases import poisoned_memory, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clean_gpu")]

SHAPES = {
    "narrow": model_config("tiny", d_model=96, num_heads=4, d_ff=200, vocab_size=301, context_length=77),
    "small": model_config("small", num_layers=2),
    "2.7B": model_config("2.7B", num_layers=1),
}
WITHOUT_GRAPH = "kernels,loss,optimizer"


def batch_of(config, rows=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (2, rows, config.context_length)
    inputs, targets = torch.randint(config.vocab_size, shape, generator=generator).cuda()
    targets[0, :5] = -100
    return inputs, targets


def gradients(model, inputs, targets, *, fused_loss):
    model.zero_grad()
    loss = model(inputs, targets) if fused_loss else F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_model_against_fp64(name, dtype, bound):
    config = SHAPES[name]
    oracle = TransformerLM(config, attention="reference").cuda()
    for p in oracle.parameters():
        if p.dim() < 2:
            p.data.uniform_(0.5, 1.5)
    fast = TransformerLM(config, attention="flash_triton", fused=True).cuda()
    fast.load_state_dict(oracle.state_dict())
    if dtype == torch.bfloat16:
        for p in fast.parameters():
            p.data = p.data.to(dtype)
        oracle.load_state_dict(fast.state_dict())  # the same weights: only the arithmetic differs
    inputs, targets = batch_of(config)
    expected_loss, expected = gradients(oracle.double(), inputs, targets, fused_loss=False)
    with poisoned_memory():
        loss, found = gradients(fast, inputs, targets, fused_loss=True)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=bound / 10)
    wrong = {
        n: relative_error(found[n], expected[n]) for n in expected if relative_error(found[n], expected[n]) > bound
    }
    assert wrong == {}


@pytest.mark.parametrize("vocabulary", [1, 11, 5000, 50257])
def test_loss_in_chunks(vocabulary, monkeypatch):
    x = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(vocabulary, (300,), device="cuda")
    targets[::7] = -100
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = F.cross_entropy(exact[0] @ exact[1].T, targets)
    (expected * 3).backward()
    for chunk in (1 << 30, 70 * 2 * vocabulary):
        monkeypatch.setattr(fused, "CHUNK_BYTES", chunk)
        x.grad = weight.grad = None
        loss = fused.linear_cross_entropy(x, weight, targets)
        (loss * 3).backward()
        assert loss.item() == pytest.approx(expected.item(), rel=5e-3, abs=1e-6)
        if vocabulary > 1:  # else there is nothing to learn
            assert relative_error(x.grad, exact[0].grad) < 0.02
            assert relative_error(weight.grad, exact[1].grad) < 0.02


@pytest.mark.parametrize("count", [1, 1023, 1 << 20])
def test_adamw_against_torchs(count):
    values, tensors = torch.randn(count, device="cuda"), {}
    for split in (False, True):
        weights, rest = values.clone(), None
        if split:
            weights, rest = values.to(torch.bfloat16), torch.empty(count, dtype=torch.int16, device="cuda")
            pointwise.split_(values, weights, rest)
        tensors[split] = weights, rest, torch.zeros(count, device="cuda"), torch.zeros(count, device="cuda")
    plain = torch.nn.Parameter(values.clone())
    optimizer = torch.optim.AdamW([plain], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(1, 6):
        gradient = torch.randn(count, device="cuda").to(torch.bfloat16)
        plain.grad = gradient.float()
        optimizer.step()
        scalars = torch.tensor([1e-2, 1.0, 1 - 0.9**step, (1 - 0.95**step) ** 0.5, 1.0], device="cuda")
        for weights, rest, mean, square in tensors.values():
            pointwise.adamw_(weights, rest, gradient, mean, square, scalars, (0.9, 0.95), 1e-8, 0.1)
    for weights, rest, _, _ in tensors.values():
        whole = weights if rest is None else pointwise.united(weights, rest)
        torch.testing.assert_close(whole, plain.data, rtol=1e-6, atol=1e-7)
    rounded, _, *_ = tensors[True]
    assert (rounded.float() - plain.data).abs().max() <= plain.data.abs().max() / 256


def test_adamw_of_a_bf16_state():
    """torch's fused AdamW computes in fp32, too, and rounds bf16 parameters and moments once."""
    weights = torch.randn(100_003, device="cuda").to(torch.bfloat16)
    mean, square = torch.zeros_like(weights), torch.zeros_like(weights)
    plain = torch.nn.Parameter(weights.clone())
    optimizer = torch.optim.AdamW([plain], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(1, 6):
        plain.grad = torch.randn_like(weights)
        optimizer.step()
        scalars = torch.tensor([1e-2, 1.0, 1 - 0.9**step, (1 - 0.95**step) ** 0.5, 1.0], device="cuda")
        pointwise.adamw_(weights, None, plain.grad, mean, square, scalars, (0.9, 0.95), 1e-8, 0.1)
    assert (weights != plain.data).float().mean() < 0.01  # fp32 results close to the middle of two bf16 numbers
    torch.testing.assert_close(weights, plain.data, rtol=2**-6, atol=1e-6)
    for ours, name in ((mean, "exp_avg"), (square, "exp_avg_sq")):
        theirs = optimizer.state[plain][name]
        assert (ours != theirs).float().mean() < 0.01
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-7)  # where terms of different sign cancel


# -- the graph --------------------------------------------------------------------------------------------------------


def trained(fast, *, steps=6, micro_batches=1, config=SHAPES["narrow"], poison_at=None, plan=None, **fields):
    """Return losses, weights and step of a run with another batch and another learning rate in every step."""
    run = RunConfig(
        model=config, batch_size=3, device="cuda", precision="bf16", attention="flash_triton", fast=fast, **fields
    )
    step = TrainStep.build(run)
    step.model.plan = plan
    losses = []
    for number in range(steps):
        for group in step.optimizer.param_groups:
            group["lr"] = 1e-3 * (number + 1)
        if number == poison_at:
            kept, gain = [p.detach().clone() for p in step.model.parameters()], step.model.ln_final.weight
            gain.data.fill_(float("nan"))
        batches = [batch_of(config, seed=10 * number + part) for part in range(micro_batches)]
        losses.append(step.launch(batches).item())
        if number == poison_at:
            gain.data.copy_(kept[[id(p) for p in step.model.parameters()].index(id(gain))])
            for p, before in zip(step.model.parameters(), kept, strict=True):
                assert torch.equal(p, before)
    return losses, [p.detach().clone() for p in step.model.parameters()], step


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_graph_is_the_step_to_the_bit(micro_batches):
    expected, weights, _ = trained(WITHOUT_GRAPH, micro_batches=micro_batches, max_grad_norm=0.5)
    losses, found, step = trained("on", micro_batches=micro_batches, max_grad_norm=0.5)
    assert step.graph is not None
    assert step.graph.peak_memory > 0
    assert losses == expected
    assert all(torch.equal(a, b) for a, b in zip(found, weights, strict=True))


@pytest.mark.parametrize("state", ["fp32", "bf16"])
@pytest.mark.parametrize("fast", ["on", WITHOUT_GRAPH])
def test_an_update_in_backward_is_the_ordinary_step_to_the_bit(fast, state):
    expected, weights, _ = trained(WITHOUT_GRAPH, optimizer_state=state)
    losses, found, step = trained(fast, optimizer_state=state, update_in_backward=True)
    assert losses == expected
    assert all(torch.equal(a, b) for a, b in zip(found, weights, strict=True))
    assert step.optimizer.state_dict()["state"][0]["step"].item() == 6


def test_graph_skips_a_step_that_is_not_finite():
    losses, _, step = trained("on", steps=8, poison_at=5, max_grad_norm=1.0)
    assert [number for number, loss in enumerate(losses) if loss != loss] == [5]
    assert step.optimizer.state_dict()["state"][0]["step"].item() == 7


def test_graph_trains_as_the_eager_step():
    """`train` reports the same loss, norm and update for a captured step."""
    results = []
    for fast in ("on", WITHOUT_GRAPH):
        run = RunConfig(
            model=SHAPES["narrow"], batch_size=3, device="cuda", precision="bf16", fast=fast, max_grad_norm=0.5
        )
        step = TrainStep.build(dataclasses.replace(run, attention="flash_triton"))
        batches = [[batch_of(SHAPES["narrow"], seed=number)] for number in range(5)]
        results.append([step.train(batch, learning_rate=1e-3) for batch in batches])
    assert results[0] == results[1]
    assert all(result.update is Update.APPLIED and result.gradient_norm > 0 for result in results[0])


@pytest.mark.parametrize("fast", ["on", WITHOUT_GRAPH, "off"])
@pytest.mark.parametrize(
    ("precision", "attention"),
    [("bf16", "flash_triton"), ("fp32", "flash_triton"), ("bf16", "flash_hopper_repeatable")],
)
def test_a_replayed_step_is_the_same_step_and_finds_a_flipped_bit(fast, precision, attention):
    """The first steps of a graph run eagerly; the flipped bit is in a gradient, then in a weight, of a later one."""
    config = SHAPES["small"]
    run = RunConfig(model=config, batch_size=3, device="cuda", precision=precision, fast=fast, max_grad_norm=0.5)
    if attention != "flash_triton" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for compute capability 9.0")
    run = dataclasses.replace(run, attention=attention)
    batches = [[batch_of(config, seed=number), batch_of(config, seed=number + 100)] for number in range(12)]
    results = []
    for replay in (False, True):
        step = TrainStep.build(run)
        results.append([step.train(batch, learning_rate=1e-3, replay=replay) for batch in batches])
    assert results[0] == results[1]
    for pool in ([p.grad_memory if hasattr(p, "grad_memory") else None, p] for p in step.model.parameters()):
        for tensor in (tensor for tensor in pool if tensor is not None):
            _flip_after_the_first_run(step, tensor.detach())
            with pytest.raises(ReplayError):
                step.train(batches[0], replay=True)


def _flip_after_the_first_run(step, tensor):
    name = "_gradients" if step._adapted.clips_itself else "_accumulate"
    inner = getattr(type(step), name)

    def run(*arguments):
        loss = inner(step, *arguments)
        tensor.view(-1).view({2: torch.int16, 4: torch.int32}[tensor.element_size()])[-1] ^= 1
        setattr(step, name, lambda *again: inner(step, *again))
        return loss

    setattr(step, name, run)


def test_the_module_of_a_captured_step_that_is_not_finite():
    _, _, step = trained("on", max_grad_norm=1.0)
    with torch.no_grad():
        step.model.layers[0].ffn.w2.weight.view(-1)[5] = torch.inf
    batch = [batch_of(SHAPES["narrow"])]
    result = step.train(batch)
    assert result.update is Update.SKIPPED
    assert (
        Tracer().explain(step, result, batch, lambda: batch) == "not finite first in the weight layers.0.ffn.w2.weight"
    )


def test_batches_of_another_shape_run_without_the_graph():
    _, _, step = trained("on")
    loss = step.launch([batch_of(SHAPES["narrow"], rows=2)])
    again = step.launch([batch_of(SHAPES["narrow"], rows=3)])
    assert torch.isfinite(loss)
    assert torch.isfinite(again)


@pytest.mark.parametrize("part", ["kernels", "loss", "optimizer", "graph"])
def test_each_part_alone_learns_as_the_plain_step(part):
    expected, *_ = trained("off", config=SHAPES["small"])
    losses, *_ = trained(part, config=SHAPES["small"])
    assert losses == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_predicted_peak_of_building(precision):
    run = RunConfig(model=model_config("medium"), device="cuda", precision=precision, fast="on")
    gc.collect()  # steps of other tests
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    TrainStep.build(run)
    measured = torch.cuda.max_memory_allocated() - before
    assert building_peak(run).peak == pytest.approx(measured, rel=0.002)  # large blocks are rounded up to 2 MiB


# -- memory budgets ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [WITHOUT_GRAPH, "on", "kernels"])
@pytest.mark.parametrize("seed", range(3))
def test_random_plans_change_no_bit(fast, seed):
    """Kept, recomputed and offloaded tensors, with two micro batches, eagerly and in the CUDA graph."""
    config = dataclasses.replace(SHAPES["small"], num_layers=5)
    plan = (*random.Random(seed).choices(block_plans(), k=4), KEEP_ALL)
    assert any(own.offloads for own in plan)
    expected, weights, _ = trained(fast, micro_batches=2, config=config, max_grad_norm=0.5)
    losses, found, step = trained(fast, micro_batches=2, config=config, max_grad_norm=0.5, plan=plan)
    assert step.model.host.nbytes > 0
    assert losses == expected
    assert all(torch.equal(a, b) for a, b in zip(found, weights, strict=True))


def test_a_larger_batch_beside_the_graph_leaves_its_host_memory_alone():
    """The graph holds addresses of host memory; a larger batch, which runs eagerly, gets memory of its own."""
    config, plan = SHAPES["small"], (BlockPlan(*[OFFLOAD] * 5), KEEP_ALL)
    results = []
    for own in (None, plan):
        losses, _, step = trained("on", config=config, plan=own)
        for rows in (7, 3, 3):
            losses.append(step.launch([batch_of(config, rows=rows, seed=rows)]).item())
        results.append(losses)
    assert results[0] == results[1]


WHOLE = dataclasses.replace(SHAPES["small"], num_layers=5)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_whole_blocks_change_no_bit(precision, monkeypatch):
    """The plain model: blocks offloaded, recomputed and kept, over steps of two micro batches."""
    monkeypatch.setattr(block_memory, "SMALLEST", 1 << 16)
    run = RunConfig(model=WHOLE, batch_size=3, device="cuda", precision=precision, attention="flash_triton")
    results = []
    for plan in (None, (OFFLOAD, OFFLOAD, RECOMPUTE, OFFLOAD, KEEP)):
        step = TrainStep.build(run)
        memory = None if plan is None else BlockMemory(step.model, plan)
        batches = [batch_of(WHOLE, seed=seed) for seed in range(2)]
        losses = [step.launch(batches).item() for _ in range(6)]
        results.append((losses, [p.detach().clone() for p in step.model.parameters()]))
    assert memory.host.nbytes > 0
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


@pytest.mark.parametrize("share", [0.6, 0.8])
def test_measured_peak_within_a_budget_by_blocks(share):
    run = RunConfig(
        model=dataclasses.replace(WHOLE, context_length=1024), batch_size=8, device="cuda", precision="bf16",
        attention="flash_triton", warmup_steps=2, num_steps=2,
    )  # fmt: skip
    run = dataclasses.replace(run, memory_budget=f"{share * estimate(run).peak / GIB:.4f}GiB")
    gc.collect()  # steps of other tests
    before = torch.cuda.memory_allocated()
    step = build_step(run)
    peak = time_as_configured(step, step.random_batch()).peak_memory - before
    assert set(step.blocks) != {KEEP}
    assert peak <= budget_bytes(run.memory_budget)
    assert predict_step(step).peak == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize("share", [0.1, 0.4, 0.8])
@pytest.mark.parametrize(("size", "batch_size"), [("small", 8), ("medium", 4), ("qwen3/0.6B", 4), ("qwen2.5/0.5B", 4)])
def test_measured_peak_within_a_budget(size, batch_size, share):
    run = RunConfig(
        model=model_config(size, context_length=2048), batch_size=batch_size, device="cuda", precision="bf16",
        attention="flash_triton", fast="on", warmup_steps=4, num_steps=2,
    )  # fmt: skip
    least, most = least_peak(run), estimate(run).peak
    run = dataclasses.replace(run, memory_budget=f"{(least + share * (most - least)) / GIB:.4f}GiB")
    budget = budget_bytes(run.memory_budget)
    gc.collect()  # steps of other tests
    before = torch.cuda.memory_allocated()
    step = TrainStep.build(run)
    peak = time_as_configured(step, step.random_batch()).peak_memory - before
    assert peak <= budget
    assert plan_for_machine(run).estimate.peak == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize("fields", [{}, {"fast": WITHOUT_GRAPH}, {"checkpoint_blocks": 1}, {"precision": "fp32"}])
def test_predicted_peak_of_the_fast_step(fields):
    config = {"precision": "bf16", "attention": "flash_triton", "fast": "on", **fields}
    run = RunConfig(model=model_config("small"), device="cuda", warmup_steps=4, num_steps=2, **config)
    before = torch.cuda.memory_allocated()
    step = TrainStep.build(run)
    peak = time_as_configured(step, step.random_batch()).peak_memory - before
    assert predict_by_tracing(run).peak / peak == pytest.approx(1, abs=0.03)
