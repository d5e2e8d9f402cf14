"""Fused parts of a block on the CPU against their formulas: values, gradients, layouts, autocast, loss.

test_pointwise_interpreter.py tests the Triton kernels, test_fused_model.py the model and the training step.
"""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cs336_systems.kernels.fused import nodes as fused
from tests.unit.kernels.attention_cases import poisoned_memory
from tests.unit.kernels.fused_cases import (
    FEW,
    LIMITS,
    PARTS,
    backward,
    check,
    compare,
    cross_entropy,
    differentiate,
    in_double,
    laid,
    make,
    make_seeds,
    norm_linear,
    targets_of,
)

DTYPES = pytest.mark.parametrize("dtype", LIMITS, ids=str)
STRIDES = ("transposed", "padded_rows", "unaligned", "every_other", "broadcast")


def by_name(parts):
    return pytest.mark.parametrize("part", parts.values(), ids=list(parts))


# Values and gradients


@by_name(PARTS)
@DTYPES
def test_like_the_formula(dtype, part):
    found = check(part, dtype)
    outs = [x.dtype for name, x in found.items() if name[:3] == "out"]
    assert set(outs) <= {dtype, torch.float32} if part.outputs == 1 else set(outs) == {dtype}


@by_name(FEW)
def test_gradients_of_two_calls_add_up(part):
    check(part, calls=2)


@by_name(FEW)
def test_backward_twice_through_one_graph(part):
    inputs = make(part)
    seeds = make_seeds(part, inputs)
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    with poisoned_memory():
        outs = part.call(leaves)
        backward(outs, seeds, retain_graph=True)
        backward(outs, [2 * seed for seed in seeds])
    found = {f"d{name}": leaf.grad for name, leaf in leaves.items()}
    expected = in_double(part, inputs, [3 * seed.double() for seed in seeds])
    compare(found, {name: expected[name] for name in found}, LIMITS[torch.float32])


@by_name({name: part for name, part in PARTS.items() if part.outputs > 1 and ("-" not in name or "no_delta" in name)})
def test_an_output_that_the_loss_does_not_use(part):
    inputs = make(part)
    seeds = make_seeds(part, inputs)
    for used in range(part.outputs):
        check(part, inputs=inputs, seeds=[seed if number == used else None for number, seed in enumerate(seeds)])


@by_name({name: part for name, part in FEW.items() if len(part.shapes) > 1})
def test_frozen_inputs(part):
    """Each input alone is frozen, and each alone is not."""
    for name in part.shapes:
        others = [other for other in part.shapes if other != name]
        assert check(part, frozen=(name,))[f"d{name}"] is None
        found = check(part, frozen=others)
        assert all(found[f"d{other}"] is None for other in others)


@by_name(FEW)
def test_without_gradients(part):
    inputs = make(part)
    seeds = make_seeds(part, inputs)
    expected = in_double(part, inputs, seeds)
    with torch.no_grad():
        quiet = part.call({name: x.requires_grad_() for name, x in inputs.items()})
    with torch.inference_mode():
        inferred = part.call({name: x.detach().clone() for name, x in inputs.items()})
    still = part.call({name: x.detach() for name, x in inputs.items()})
    for outs in (quiet, inferred, still):
        assert not any(out.requires_grad for out in outs)
        found = {f"out{number}": out for number, out in enumerate(outs)}
        compare(found, {name: expected[name] for name in found}, 1e-5)


@by_name(FEW)
def test_inputs_and_gradients_are_left_alone(part):
    """Except for the input of rotary_heads, which is rotated in place."""
    inputs = make(part)
    seeds = make_seeds(part, inputs)
    kept = [*(() if "qkv" in inputs else inputs.values()), *seeds]
    before = [(x.clone(), x._version) for x in kept]
    differentiate(part.call, inputs, seeds)
    assert all(torch.equal(x, old) and x._version == version for x, (old, version) in zip(kept, before, strict=True))


# Layouts of tensors in memory


@pytest.mark.parametrize("layout", STRIDES)
@pytest.mark.parametrize("name", FEW)
def test_strides(name, layout):
    part, inputs, seeds = laid(name, layout)
    check(part, inputs=inputs, seeds=seeds)


@by_name(FEW)
def test_expanded_gradients(part):
    """As (a + b).sum() passes them: a single number with strides of 0."""
    inputs = make(part)
    ones = [torch.full((), 0.7).expand(x.shape) for x in make_seeds(part, inputs)]
    check(part, inputs=inputs, seeds=ones)


ORDERS = {"adjacent": ([0, 1, 2], 0), "in_another_order": ([2, 0, 1], 0), "with_gaps": ([0, 1, 2], 24)}


@pytest.mark.parametrize(("order", "gap"), ORDERS.values(), ids=list(ORDERS))
@DTYPES
def test_weights_in_one_buffer(dtype, order, gap):
    part = FEW["norm_linear"]
    inputs = make(part, dtype)
    memory, start = torch.full((1000,), math.nan, dtype=dtype), 0
    for number in order:
        weight = inputs[f"w{number}"]
        inputs[f"w{number}"] = memory[start : start + weight.numel()].view_as(weight).copy_(weight)
        start += weight.numel() + gap
    check(part, dtype, inputs=inputs)
    joined = fused.joined([inputs[f"w{number}"] for number in range(3)], dtype)
    assert torch.equal(joined, torch.cat([inputs[f"w{number}"] for number in range(3)]))
    assert (joined.data_ptr() == inputs["w0"].data_ptr()) == (order == [0, 1, 2] and not gap)


def test_weights_that_only_seem_adjacent():
    """The distance of their first elements is that of adjacent matrices."""
    memory = torch.arange(64.0)
    cases = [
        [memory[:16].view(4, 4).T, memory[16:32].view(4, 4)],
        [memory[:16].view(4, 4), memory[16:32].view(4, 4).T],
        [memory[:32].view(4, 8)[:, :4], memory[16:48].view(4, 8)[:, :4]],
        [memory[:16].view(4, 4), memory[:16].view(4, 4)],
        [memory[:4].expand(4, 4), memory[16:32].view(4, 4)],
        [memory[:16].view(4, 4), memory.clone()[16:32].view(4, 4)],
    ]
    for parts in cases:
        assert torch.equal(fused.joined(parts, torch.float32), torch.cat(parts))
    assert torch.equal(fused.joined(cases[0], torch.bfloat16), torch.cat(cases[0]).bfloat16())


def test_one_weight_twice():
    part = norm_linear(2, 5, 24, delta=True, rows=(9, 9))
    inputs = make(part)
    weight = inputs["w1"]
    seeds = make_seeds(part, inputs)
    results = []
    for function, dtype in ((part.call, torch.float32), (part.formula, torch.float64)):
        leaf = weight.to(dtype).detach().requires_grad_()
        given = {name: x.to(dtype) for name, x in inputs.items()} | {"w0": leaf, "w1": leaf}
        backward(function(given), [seed.to(dtype) for seed in seeds])
        results.append({"dw": leaf.grad})
    compare(*results, 1e-5)


# Autocast


@pytest.mark.parametrize("inside", [False, True], ids=["backward_outside", "backward_inside"])
@by_name(FEW)
def test_autocast(part, inside):
    """Weights are fp32, matmuls bf16."""
    inputs = make(part)
    seeds = make_seeds(part, inputs)
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    with torch.autocast("cpu", torch.bfloat16):
        outs = part.call(leaves)
        if inside:
            backward(outs, seeds)
    if not inside:
        backward(outs, seeds)
    if part.weights:
        assert outs[-1].dtype == (torch.bfloat16 if outs[-1].dim() else torch.float32)
    found = {f"out{number}": out.detach() for number, out in enumerate(outs)}
    found |= {f"d{name}": leaf.grad for name, leaf in leaves.items()}
    assert all(leaf.grad.dtype == torch.float32 for leaf in leaves.values())
    compare(found, in_double(part, inputs, seeds), LIMITS[torch.bfloat16])


@pytest.mark.parametrize("name", ["add_norm", "norm_linear"])
def test_a_bf16_delta_to_an_fp32_stream(name):
    """As under autocast: embeddings are fp32, the output of a block is that of a matmul."""
    part = FEW[name]
    inputs = make(part)
    inputs["delta"] = inputs["delta"].bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        check(part, inputs=inputs, limit=LIMITS[torch.bfloat16])


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("name", ["add_norm", "norm_linear"])
def test_an_fp32_gain_among_bf16_tensors(name, autocast):
    """As PackedAdamW stores the weights."""
    part = FEW[name]
    inputs = make(part, torch.bfloat16)
    inputs["gain"] = inputs["gain"].float()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = check(part, torch.bfloat16, inputs=inputs)
    assert {found["out0"].dtype, found["out1"].dtype} == {torch.bfloat16}
    assert found["dgain"].dtype == torch.float32


@pytest.mark.parametrize("name", ["linear", "swiglu_linear", "linear_cross_entropy"])
def test_a_bf16_input_to_fp32_weights_under_autocast(name):
    part = FEW[name]
    inputs = make(part)
    first = next(iter(inputs))
    inputs[first] = inputs[first].bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = check(part, inputs=inputs, limit=LIMITS[torch.bfloat16])
    assert (found[f"d{first}"].dtype, found["dw"].dtype) == (torch.bfloat16, torch.float32)


# The loss


def with_ignored(count, value=-100, rows=(4, 6), vocabulary=11):
    """Targets of which all but `count` are ignored."""
    targets = targets_of(vocabulary, *rows)
    order = torch.randperm(targets.numel(), generator=torch.Generator().manual_seed(3))
    targets.view(-1)[order[count:]] = value
    return targets


@pytest.mark.parametrize(("value", "count"), [(-100, 17), (-100, 1), (3, 17), (-1, 17), (50, 1)])
def test_ignored_targets(value, count):
    options = {} if value == -100 else {"ignored": value}
    targets = with_ignored(count, value)
    part = cross_entropy(4, 6, 24, vocabulary=11, targets=targets, **options)
    assert not check(part)["dx"][targets == value].any()


def test_all_targets_ignored():
    """NaN, as in PyTorch."""
    part = cross_entropy(4, 6, 24, vocabulary=11, targets=with_ignored(0))
    inputs = make(part)
    assert torch.equal(part.call(inputs)[0].isnan(), part.formula(inputs)[0].isnan())


@pytest.mark.parametrize("size", [1, 4 * 11 * 5, 4 * 11 * 23], ids=["1_row", "5_rows", "23_rows"])
def test_loss_in_chunks(monkeypatch, size):
    part = cross_entropy(4, 6, 24, vocabulary=11, targets=with_ignored(15))
    inputs, seeds = make(part), [torch.tensor(3.0)]
    whole = differentiate(part.call, inputs, seeds)
    monkeypatch.setattr(fused, "CHUNK_BYTES", size)
    found = check(part, inputs=inputs, seeds=seeds)
    compare(found, {name: x.double() for name, x in whole.items()}, 1e-6)
    low = {name: x.bfloat16() for name, x in inputs.items()}
    check(part, torch.bfloat16, inputs=low, seeds=seeds)
    check(part, frozen=("w",))
    check(part, frozen=("x",))
    with torch.no_grad():
        assert torch.allclose(part.call(inputs)[0], whole["out0"], rtol=1e-6)


@pytest.mark.parametrize("bad", [11, 10**6, -1, -99])
@pytest.mark.parametrize("size", [1, 1 << 20], ids=["many_chunks", "one_chunk"])
def test_a_target_outside_the_vocabulary(monkeypatch, size, bad):
    monkeypatch.setattr(fused, "CHUNK_BYTES", size)
    for place in (0, 23):
        targets = with_ignored(20)
        targets.view(-1)[place] = bad
        part = cross_entropy(4, 6, 24, vocabulary=11, targets=targets)
        inputs = make(part)
        assert part.call(inputs)[0].isnan()
        assert part.call({name: x.requires_grad_() for name, x in inputs.items()})[0].isnan()


def test_minus_100_is_no_target_where_another_is_ignored():
    part = cross_entropy(4, 6, 24, vocabulary=11, targets=with_ignored(5), ignored=-1)
    assert part.call(make(part))[0].isnan()


@DTYPES
def test_large_logits(dtype):
    part = cross_entropy(4, 6, 24, vocabulary=5000)
    inputs = make(part, dtype)
    inputs["x"] *= 1e4
    logits = inputs["x"].double() @ inputs["w"].double().T
    assert logits.abs().max() > 1e4
    found = differentiate(part.call, inputs, [torch.tensor(1.0)])
    assert all(x.isfinite().all() for x in found.values())
    expected = in_double(part, inputs, [torch.tensor(1.0)])
    compare({"out0": found["out0"]}, {"out0": expected["out0"]}, LIMITS[dtype])


@DTYPES
def test_logits_are_padded_with_zeros(dtype):
    """With AMX, oneDNN's bf16 matmuls read the padding of rows, and NaN in memory that was freed made NaN of
    gradients."""
    rows, matrix = torch.randn(3, 8).to(dtype), torch.randn(61, 8).to(dtype)
    with poisoned_memory():
        logits = fused._logits(rows, matrix)
    padded = logits.as_strided((3, 64), logits.stride())
    assert (padded[:, 61:] == 0).all()
    assert logits.isfinite().all()


class Largest(TorchDispatchMode):
    """Number of elements of the largest tensor that operators return."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize("trains", [False, True])
def test_logits_are_never_whole(monkeypatch, trains):
    rows, vocabulary, width = 64, 500, 8
    part = cross_entropy(8, 8, width, vocabulary=vocabulary)
    leaves = {name: x.requires_grad_(trains) for name, x in make(part).items()}

    def largest(function):
        with Largest() as mode:
            (loss,) = function(leaves)
            if trains:
                loss.backward()
        return mode.elements

    assert largest(part.formula) >= rows * vocabulary
    assert largest(part.call) >= rows * vocabulary
    monkeypatch.setattr(fused, "CHUNK_BYTES", 4 * vocabulary * 16)
    row = -(-vocabulary // fused.LOGIT_ALIGNMENT) * fused.LOGIT_ALIGNMENT
    assert largest(part.call) <= max(16 * row, width * vocabulary)
