"""FP8 operands and matmuls against float64, and models whose blocks compute with them.

test_pointwise_interpreter.py tests the Triton kernels against the formulas that run here.
"""

import math
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn

from cs336_systems.config import ModelConfig, RunConfig, UserError
from cs336_systems.kernels.fused import fp8, fp8_run
from cs336_systems.kernels.fused.fp8_blocks import Fp8Blocks
from cs336_systems.measure.memory_trace import predict_by_tracing
from cs336_systems.model import PackedTokens, TransformerLM
from cs336_systems.predict import fp8_nodes
from cs336_systems.predict.activation_plan import KEEP_ALL, RECOMPUTE_ALL, BlockPlan
from cs336_systems.step.train_step import TrainStep
from cs336_systems.step.updates import Update
from tests.unit.kernels.attention_cases import poisoned_memory

MODEL = ModelConfig(vocab_size=61, context_length=32, d_model=64, num_layers=3, num_heads=4, d_ff=96)
FAMILIES = {
    "plain": MODEL,
    "qwen2.5": replace(MODEL, num_kv_heads=2, qkv_bias=True, tied_embeddings=True),
    "qwen3": replace(MODEL, num_kv_heads=2, qk_norm=True, d_head=32),
}
LEAST_COSINE = {"plain": 0.99, "qwen2.5": 0.96, "qwen3": 0.99}
"""Between gradients in FP8 and in fp32. A tied embedding begins small: most of the residual stream is then the output
of blocks, with its rounding."""
HALF_STEP = 2.0**-4
"""Largest rounding of an e4m3 number, relative to it."""


def rows_of(rows, width, seed, spread=6.0):
    """Rows whose sizes differ by many orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(spread * torch.randn(rows, 1, generator=generator))
    return (torch.randn(rows, width, generator=generator) * sizes).bfloat16()


def bounds_of(x, quantized):
    """The largest difference that rounding may make in each element: of normal numbers, and of those near 0."""
    return x.double().abs() * HALF_STEP + quantized.scale.double()[:, None] * 2.0**-10


def product_bound(a, a_bound, b, b_bound):
    """The largest error of a @ b^T from those of its operands, and of rounding the sum to bf16."""
    a, b = a.double().abs(), b.double().abs()
    return (a_bound @ b.T + a @ b_bound.T + a_bound @ b_bound.T) * 1.01 + (a @ b.T) * 2.0**-8


def step_of(model=MODEL, precision="fp8", **fields):
    fields = {"fast": "kernels,loss,optimizer", "attention": "auto", "batch_size": 2, **fields}
    return TrainStep.build(RunConfig(model=model, precision=precision, **fields))


def gradients(step, batch):
    step.model.zero_grad(set_to_none=True)
    loss = step._one_batch(*batch, lambda loss: loss, nullcontext)
    return loss.item(), {name: p.grad.double() for name, p in step.model.named_parameters()}


def cosine(found, expected):
    flat = [torch.cat([grads[name].flatten() for name in expected]) for grads in (found, expected)]
    return nn.functional.cosine_similarity(*flat, dim=0).item()


# -- operands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [1e-30, 2.0**-20, 0.9, 1.0, 1.75, 1.7500001, 2.0, 447.9, 448.0, 448.1, 3e38])
def test_a_scale_is_the_smallest_power_of_two_that_fits(largest):
    scale = fp8.scale_of(torch.tensor([largest])).item()
    assert math.log2(scale).is_integer()
    assert largest / scale <= 448
    assert largest / (scale / 2) > 448


def test_rows_that_are_zero_or_not_finite():
    scales = fp8.scale_of(torch.tensor([0.0, math.inf, math.nan])).tolist()
    assert 0 < scales[0] < 1
    assert all(map(math.isnan, scales[1:]))
    x = torch.ones(4, 16)
    x[1], x[2, 3], x[3, 5] = 0.0, math.inf, math.nan
    found = fp8.quantize(x).wide()
    assert torch.equal(found[:2], x[:2])
    assert found[2:].isnan().all(), "the whole row: its other elements have no scale"


def test_rounding_is_to_nearest_and_small_elements_are_counted():
    x, lost = rows_of(800, 64, seed=1), torch.zeros(fp8.SLOTS, dtype=torch.int64)
    x[:, 0] = x.abs().amax(1) * 2.0**-20
    with poisoned_memory():
        found = fp8.quantize(x, lost)
    assert ((found.wide().double() - x.double()).abs() <= bounds_of(x, found)).all()
    assert lost.sum() == ((x != 0) & (found.values.float() == 0))[:: fp8.COUNTED_ROWS].sum() >= 50


# -- matmuls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_matmuls_are_within_the_rounding_of_their_operands(seed):
    x, weight, grad = rows_of(32, 64, seed), rows_of(48, 64, seed + 10, spread=1.0), rows_of(32, 48, seed + 20)
    x8, weight8, grad8 = map(fp8.quantize, (x, weight, grad))
    with poisoned_memory():
        out = fp8.matmul(x8, weight8)
        largest = fp8.largest_scale(weight8.scale)[0, 0]
        grad_x = fp8.matmul(grad8, fp8.transposed_weight(weight, largest))
    bound = product_bound(x, bounds_of(x, x8), weight, bounds_of(weight, weight8))
    assert ((out.double() - x.double() @ weight.double().T).abs() <= bound).all()
    # The transposed copy has the largest scale everywhere.
    one_scale = fp8.Rows(weight8.values, weight8.scale.max().expand(len(weight)))
    bound = product_bound(grad, bounds_of(grad, grad8), weight.T, bounds_of(weight, one_scale).T)
    assert ((grad_x.double() - grad.double() @ weight.double()).abs() <= bound).all()


def test_a_bias_is_added():
    x, weight, bias = rows_of(16, 32, 1, 1.0), rows_of(48, 32, 2, 1.0), torch.randn(48).bfloat16()
    operands = fp8.quantize(x), fp8.quantize(weight)
    torch.testing.assert_close(fp8.matmul(*operands, bias), fp8.matmul(*operands) + bias, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("seed", range(3))
def test_weight_gradients_are_within_the_rounding_of_their_operands(seed):
    x, grad = rows_of(64, 32, seed), rows_of(64, 48, seed + 10)
    x8, grad8 = fp8.quantize(x), fp8.quantize(grad)
    lost, out = torch.zeros(fp8.SLOTS, dtype=torch.int64), torch.full((48, 32), math.nan, dtype=torch.bfloat16)
    with poisoned_memory():
        found = fp8.weight_gradient(grad8, fp8.transposed(x8.values), x8.scale, out, lost)
    assert found.data_ptr() == out.data_ptr()
    # Elements of the gradient's copy are multiplied by both scales, relative to the largest product.
    scales = grad8.scale.double() * x8.scale.double()
    moved = (scales.max() * 2.0**-10 / x8.scale.double())[:, None]
    bound = product_bound(grad.T, (bounds_of(grad, grad8) + moved).T, x.T, bounds_of(x, x8).T)
    assert ((found.double() - grad.double().T @ x.double()).abs() <= bound).all()
    assert lost.sum() > 0, "rows of very different sizes"


def test_what_is_not_finite_reaches_every_result():
    x, grad = rows_of(32, 16, 1), rows_of(32, 48, 2)
    grad[7, 3] = math.inf
    grad8, x8 = fp8.quantize(grad), fp8.quantize(x)
    assert fp8.weight_gradient(grad8, fp8.transposed(x8.values), x8.scale, None).isnan().all()


# -- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_fp32_but_for_rounding(family):
    model = FAMILIES[family]
    plain = TrainStep.build(RunConfig(model=model, batch_size=2))
    batch = plain.random_batch()
    expected_loss, expected = gradients(plain, batch)
    step = step_of(model)
    loss, found = gradients(step, batch)
    assert loss == pytest.approx(expected_loss, rel=0.01)
    for number in range(model.num_layers):
        own = {name: grad for name, grad in expected.items() if name.startswith(f"layers.{number}.")}
        assert cosine(found, own) > LEAST_COSINE[family]
    assert all(grad.isfinite().all() for grad in found.values())


def test_forward_of_qkv_is_not_in_fp8():
    """Its rounding would make half of the error of all gradients."""
    step, weights = step_of(MODEL), []
    batch = step.random_batch()

    def matmul(a, b, bias=None):
        weights.append(len(b.values))
        return by_formula(a, b, bias)

    by_formula = fp8.matmul
    with mock.patch.object(fp8, "matmul", matmul):
        step.evaluate(*batch)
    model = step.config.model
    assert weights == [model.d_model, 2 * model.d_ff, model.d_model] * model.num_layers


PLANS = {
    "recompute": (RECOMPUTE_ALL,) * 3,
    "offload": (BlockPlan(*["offload"] * 5),) * 3,
    "mixed": (KEEP_ALL, RECOMPUTE_ALL, BlockPlan("keep", "recompute", "keep", "recompute", "keep")),
}


@pytest.mark.parametrize("plan", PLANS)
def test_plans_change_no_bit(plan):
    step = step_of(FAMILIES["qwen3"])
    batch = step.random_batch()
    loss, expected = gradients(step, batch)
    counts = step.model.fp8.take_shares()
    step.model.plan = PLANS[plan]
    again, found = gradients(step, batch)
    assert again == loss
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())
    assert step.model.fp8.take_shares() == counts, "what is computed again is not counted again"


def test_gradients_of_micro_batches_are_added():
    step = step_of()
    batch = step.random_batch()
    _, once = gradients(step, batch)
    step._one_batch(*batch, lambda loss: loss, nullcontext)
    for name, parameter in step.model.named_parameters():
        torch.testing.assert_close(parameter.grad.double(), 2 * once[name], rtol=0.02, atol=1e-6)


def test_fp8_learns_as_bf16_does():
    losses = {}
    for precision in ("bf16", "fp8"):
        step = step_of(precision=precision, max_grad_norm=1.0)
        batch = step.random_batch()
        losses[precision] = [step.train([batch], learning_rate=3e-3).loss for _ in range(25)]
    assert losses["bf16"][-1] < 0.5 * losses["bf16"][0]
    assert losses["fp8"] == pytest.approx(losses["bf16"], abs=0.05)


def test_a_step_that_is_not_finite_leaves_nothing_behind():
    step, twin = step_of(max_grad_norm=1.0), step_of(max_grad_norm=1.0)
    batch = step.random_batch()
    kept = step.model.layers[1].ffn.w1.weight.detach().clone()
    for planted in (math.inf, math.nan):
        step.model.layers[1].ffn.w1.weight.data[3, 3] = planted
        assert step.train([batch], learning_rate=1e-3).update is Update.SKIPPED
        step.model.layers[1].ffn.w1.weight.data.copy_(kept)
    assert [step.train([batch], learning_rate=1e-3).loss for _ in range(3)] == [
        twin.train([batch], learning_rate=1e-3).loss for _ in range(3)
    ]


def test_a_block_without_fp8_computes_in_bf16():
    step, plain = step_of(), step_of(precision="bf16")
    batch = step.random_batch()
    step.model.fp8.numbers.clear()
    loss, found = gradients(step, batch)
    expected_loss, expected = gradients(plain, batch)
    assert loss == expected_loss
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())


def test_evaluation_computes_in_fp8_and_counts_nothing():
    step = step_of()
    batch = step.random_batch()
    assert step.evaluate(*batch).item() == gradients(step, batch)[0]
    assert step.model.fp8.work.tolist() == [64, 1]


def test_shares_are_of_the_elements_that_were_cast():
    blocks = Fp8Blocks(MODEL)
    assert blocks.take_shares() == []
    blocks.count(64)
    blocks.numbers.discard(0)
    position = fp8_run.TENSORS.index
    blocks.lost[1, position("gated"), 3] = 64 * 96 // 2 // fp8.COUNTED_ROWS
    blocks.lost[1, position("weight of gate_up"), 0] = 64 * 2 * 96 // fp8.COUNTED_ROWS
    blocks.lost[0] = 5
    shares = {(share.block, share.tensor): share.share for share in blocks.take_shares()}
    assert {block for block, _ in shares} == {1, 2}
    assert {key: share for key, share in shares.items() if share} == {(1, "gated"): 0.5, (1, "weight of gate_up"): 1.0}
    assert not blocks.lost.any()
    assert not blocks.work.any()


def test_constants_agree():
    assert len(fp8_run.TENSORS) == fp8_nodes.COUNTED_TENSORS
    assert fp8_nodes.SLOTS == fp8.SLOTS


def test_constants_of_the_kernels_agree():
    pytest.importorskip("triton")
    from cs336_systems.kernels.fused import fp8_triton

    for name in ("SLOTS", "COUNTED_ROWS", "SILU_SLOPE", "SILU_NEGATIVE_SLOPE", "SILU_NEGATIVE"):
        assert getattr(fp8_triton, name).value == getattr(fp8, name)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fast": "off"}, "needs the kernels of the fast step"),
        ({"attention": "sdpa"}, "needs the fused attention"),
        ({"checkpoint_blocks": 1}, "leave checkpoint_blocks out"),
        ({"model": replace(MODEL, d_ff=100)}, "got d_ff 100"),
        ({"model": replace(MODEL, context_length=30)}, "got context_length 30"),
    ],
)
def test_what_fp8_cannot_do_is_refused(fields, message):
    fields = {"model": MODEL, "fast": "kernels", "attention": "auto", **fields}
    with pytest.raises(UserError, match=message):
        RunConfig(precision="fp8", **fields)


def test_a_trace_computes_no_matmul_into_memory(monkeypatch):
    """torch 2.11 would run it on the CPU, with tensors of full size."""
    scaled_mm = torch._scaled_mm

    def without_out(*args, **kwargs):
        assert "out" not in kwargs
        return scaled_mm(*args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", without_out)
    run = RunConfig(model=MODEL, batch_size=2, device="cuda", precision="fp8", fast="on", attention="auto")
    assert predict_by_tracing(run).peak > 0


def test_packed_documents_are_refused():
    model = TransformerLM(MODEL, fused=True, fp8=True)
    tokens = torch.zeros(1, 32, dtype=torch.long)
    packed = PackedTokens(tokens, torch.arange(32)[None], torch.tensor([0, 32], dtype=torch.int32))
    with pytest.raises(UserError, match="precision fp8 cannot train on packed documents"):
        model(packed)
