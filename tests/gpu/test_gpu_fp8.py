"""FP8 on a GPU: kernels against their formulas, matmuls against float64, and steps in CUDA graphs."""

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch

from cs336_systems.config import ModelConfig, RunConfig, model_config
from cs336_systems.kernels.fused import fp8
from cs336_systems.measure.memory_trace import predict_by_tracing
from cs336_systems.step.train_step import FP8_CAPABILITY, TrainStep
from cs336_systems.step.updates import Update
from tests.unit.kernels.test_fp8 import FAMILIES, LEAST_COSINE, bounds_of, cosine, gradients, product_bound, rows_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("clean_gpu"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < FP8_CAPABILITY, reason="this GPU has no FP8"
    ),
]

SHAPES = [(16, 16), (144, 272), (1000, 2560), (8192, 1280), (48, 18944)]
MODEL = ModelConfig(vocab_size=512, context_length=256, d_model=256, num_layers=4, num_heads=4, d_ff=768)


def bits(t):
    return t.view(torch.uint8) if t.dtype == fp8.E4M3 else t


def both(call):
    """The result of a call by kernels and by formulas."""
    by_kernels = call()
    with mock.patch.object(fp8, "_triton", return_value=None):
        return by_kernels, call()


def assert_equal(found, expected, share=1.0):
    same = (bits(found) == bits(expected)) | (found.float().isnan() & expected.float().isnan())
    assert same.float().mean() >= share


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_kernels_agree_with_formulas(rows, width):
    x = rows_of(rows, width, 1).cuda()
    x[rows // 2] = 0
    counters = [torch.zeros(fp8.SLOTS, dtype=torch.int64, device="cuda") for _ in range(2)]
    given = iter(counters)
    found, expected = both(lambda: fp8.quantize(x, next(given)))
    assert_equal(found.scale, expected.scale)
    assert_equal(found.values, expected.values)
    assert counters[0].sum() == counters[1].sum()
    by_columns = both(lambda: fp8.transposed(found.values))
    assert_equal(*by_columns)
    one_scale = fp8.largest_scale(found.scale)[0, 0]
    assert_equal(*(weight.values for weight in both(lambda: fp8.transposed_weight(x, one_scale))))
    gain = torch.randn(width, device="cuda")
    normed, expected_norm = both(lambda: fp8.add_norm(x, x, gain, 1e-5))
    assert_equal(normed.total, expected_norm.total)
    assert_equal(normed.y, expected_norm.y, share=0.999)  # sums in another order
    for stream in (x, x.float()):
        total, y, scale, rstd = fp8.add_norm(stream, stream, gain, 1e-5, counters[0])
        assert_equal(fp8.transposed_norm(total, rstd, gain, scale), y.t().contiguous())
        wide, expected_wide = both(lambda x=stream: fp8.add_norm(x, x, gain, 1e-5, dtype=torch.bfloat16))
        assert_equal(wide.scale, scale)
        assert_equal(wide.y, expected_wide.y, share=0.999)
    gate_up, grad = rows_of(rows, 2 * width, 2, 1.0).cuda(), rows_of(rows, width, 3).cuda()
    gated, expected_gated = both(lambda: fp8.swiglu(gate_up))
    assert_equal(gated.values, expected_gated.values, share=0.999)
    back, expected_back = both(lambda: fp8.swiglu_backward(grad, gate_up, gated.scale, counters[0]))
    assert_equal(back.gate_up.values, expected_back.gate_up.values, share=0.999)
    assert_equal(back.gated, gated.values, share=0.999)


@pytest.mark.parametrize(("rows", "width", "columns"), [(32, 64, 48), (1024, 2560, 7680), (2048, 10240, 2560)])
def test_matmuls_are_within_the_rounding_of_their_operands(rows, width, columns):
    x, weight, grad = rows_of(rows, width, 1, 2.0), rows_of(columns, width, 2, 1.0), rows_of(rows, columns, 3, 2.0)
    x, weight, grad = x.cuda(), weight.cuda(), grad.cuda()
    x8, weight8, grad8 = map(fp8.quantize, (x, weight, grad))
    bound = product_bound(x, bounds_of(x, x8), weight, bounds_of(weight, weight8))
    exact = x.double() @ weight.double().T
    # Tensor cores add FP8 products with fewer bits than fp32 has ("fast accumulation").
    sums = x.double().abs() @ weight.double().abs().T
    assert ((fp8.matmul(x8, weight8).double() - exact).abs() <= bound + sums * 2.0**-11).all()
    out = torch.full((columns, width), math.nan, dtype=torch.bfloat16, device="cuda")
    found = fp8.weight_gradient(grad8, fp8.transposed(x8.values), x8.scale, out)
    assert found.data_ptr() == out.data_ptr()
    expected = grad.double().T @ x.double()
    assert (found.double() - expected).norm() / expected.norm() < 0.06


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_fp32_but_for_rounding(family):
    model = replace(FAMILIES[family], context_length=128)
    plain = TrainStep.build(RunConfig(model=model, batch_size=2, device="cuda"))
    batch = plain.random_batch()
    loss, expected = gradients(plain, batch)
    step = TrainStep.build(
        RunConfig(model=model, batch_size=2, device="cuda", precision="fp8", fast="kernels,loss", attention="auto")
    )
    own_loss, found = gradients(step, batch)
    assert own_loss == pytest.approx(loss, rel=0.01)
    for number in range(model.num_layers):
        own = {name: grad for name, grad in expected.items() if name.startswith(f"layers.{number}.")}
        assert cosine(found, own) > LEAST_COSINE[family]


def graph_step(**fields):
    return TrainStep.build(
        RunConfig(
            model=MODEL, batch_size=4, device="cuda", precision="fp8", fast="on", attention="auto", max_grad_norm=1.0,
            **fields,
        )
    )  # fmt: skip


def test_a_captured_step_learns_counts_and_leaves_out_what_is_not_finite():
    step = graph_step()
    batch = step.random_batch()
    losses = [step.train([batch], learning_rate=1e-3).loss for _ in range(20)]
    assert losses[-1] < 0.7 * losses[0]
    step.model.fp8.reset_parameters()
    step.train([batch], learning_rate=1e-3)
    assert step.model.fp8.work.tolist() == [1024, 1]
    assert all(0 <= share.share < 0.5 for share in step.model.fp8.take_shares())
    weight = step.model.layers[1].ffn.w1.weight
    kept = weight.detach().clone()
    weight.data[3, 3] = math.inf
    assert step.train([batch], learning_rate=1e-3).update is Update.SKIPPED
    weight.data.copy_(kept)
    assert step.train([batch], learning_rate=1e-3).update is Update.APPLIED


def test_micro_batches_in_graphs():
    step, plain = graph_step(), graph_step()
    inputs, targets = step.random_batch()
    halves = [(inputs[:2].contiguous(), targets[:2].contiguous()), (inputs[2:].contiguous(), targets[2:].contiguous())]
    found = [step.train(halves, learning_rate=1e-3).loss for _ in range(6)]
    assert found == pytest.approx(
        [plain.train([(inputs, targets)], learning_rate=1e-3).loss for _ in range(6)], rel=0.02
    )


def test_a_block_returns_to_bf16_in_a_captured_step():
    step = graph_step()
    batch = step.random_batch()
    for _ in range(4):
        step.train([batch], learning_rate=1e-3)
    step.model.fp8.numbers.discard(2)
    step.graph.forget()
    before = step.train([batch], learning_rate=0.0).loss
    step.model.fp8.numbers.clear()
    step.graph.forget()
    assert step.train([batch], learning_rate=0.0).loss != before


@pytest.mark.parametrize("size", ["small", "qwen3/0.6B"])
def test_the_predicted_peak_is_that_of_the_gpu(size):
    run = RunConfig(
        model=model_config(size, context_length=512), batch_size=4, device="cuda", precision="fp8", fast="on",
        attention="auto",
    )  # fmt: skip
    step = TrainStep.build(run)
    batch = step.random_batch()
    for _ in range(3):
        step(*batch)
    torch.cuda.synchronize()
    assert predict_by_tracing(run).peak == pytest.approx(step.graph.peak_memory, rel=0.02)
