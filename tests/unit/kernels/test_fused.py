"""Fused parts of a block, the fused model, and the fast training step on the CPU, against plain formulas.

Formulas are in float64, with gradients by autograd. test_pointwise_interpreter.py tests the Triton kernels.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from cs336_systems.config import ModelConfig, RunConfig, UserError
from cs336_systems.kernels.fused import nodes as fused
from cs336_systems.model import RotaryEmbedding, TransformerLM
from cs336_systems.step.train_step import TrainStep
from tests.unit.kernels.attention_cases import LAYOUTS, poisoned_memory

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Allowed error relative to the norm: bf16 rounds a few times, by up to 2^-9."""
DTYPES = pytest.mark.parametrize("dtype", LIMITS, ids=str)
STRIDES = ("transposed", "padded_rows", "unaligned", "every_other", "broadcast")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Part:
    """A fused function of named tensors, and its formula."""

    shapes: dict[str, tuple[int, ...]]
    call: Callable
    formula: Callable
    outputs: int = 1

    @property
    def weights(self):
        return [name for name in self.shapes if name[0] == "w"]


def norm(x, gain, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * gain


def total(t):
    return t["x"] + t["delta"] if "delta" in t else t["x"]


def side_by_side(t):
    return torch.cat([t[name] for name in t if name[0] == "w"])


def add_norm(*shape, delta, eps=1e-5):
    return Part(
        {"x": shape, **dict.fromkeys(["delta"] * delta, shape), "gain": shape[-1:]},
        lambda t: fused.add_norm(t["x"], t.get("delta"), t["gain"], eps),
        lambda t: (total(t), norm(total(t), t["gain"], eps)),
        2,
    )


def norm_linear(*shape, delta, rows, eps=1e-5):
    weights = {f"w{number}": (count, shape[-1]) for number, count in enumerate(rows)}

    def call(t):
        given = [t[name] for name in weights]
        return fused.norm_linear(t["x"], t.get("delta"), t["gain"], eps, *given)

    return Part(
        {"x": shape, **dict.fromkeys(["delta"] * delta, shape), "gain": shape[-1:], **weights},
        call,
        lambda t: (total(t), norm(total(t), t["gain"], eps) @ side_by_side(t).T),
        2,
    )


def linear(*shape, rows):
    return Part(
        {"x": shape, "w": (rows, shape[-1])},
        lambda t: (fused.linear(t["x"], t["w"]),),
        lambda t: (t["x"] @ t["w"].T,),
    )


def swiglu_linear(*shape, rows):
    def formula(t):
        gate, up = t["gate_up"].chunk(2, -1)
        return ((gate * torch.sigmoid(gate) * up) @ t["w"].T,)

    return Part(
        {"gate_up": (*shape[:-1], 2 * shape[-1]), "w": (rows, shape[-1])},
        lambda t: (fused.swiglu_linear(t["gate_up"], t["w"]),),
        formula,
    )


class Strided(torch.autograd.Function):
    """The same values in memory of another layout that is no view: rotary_heads may rotate it in place."""

    @staticmethod
    def forward(ctx, x, layout):
        laid = LAYOUTS[layout](x.clone())
        return x.new_empty(0).set_(laid.untyped_storage(), laid.storage_offset(), laid.shape, laid.stride())

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def rotary(batch, rows, heads, dim, context=None, layout="contiguous"):
    rotate = RotaryEmbedding(context or rows, dim, 100.0)

    def formula(t):
        q, k, v = t["qkv"].view(batch, rows, 3, heads, dim).unbind(2)
        return tuple(x.transpose(1, 2) for x in (rotate(q), rotate(k), v))

    def call(t):
        return fused.rotary_heads(Strided.apply(t["qkv"], layout), rotate.cos, rotate.sin, heads)

    return Part({"qkv": (batch, rows, 3 * heads * dim)}, call, formula, 3)


def targets_of(vocabulary, *shape, seed=5):
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def cross_entropy(*shape, vocabulary, targets=None, **options):
    targets = targets_of(vocabulary, *shape[:-1]) if targets is None else targets
    ignored = options.get("ignored", -100)

    def formula(t):
        logits = (t["x"] @ t["w"].T).flatten(0, -2)
        return (F.cross_entropy(logits, targets.flatten(), ignore_index=ignored),)

    return Part(
        {"x": shape, "w": (vocabulary, shape[-1])},
        lambda t: (fused.linear_cross_entropy(t["x"], t["w"], targets, **options),),
        formula,
    )


FEW = {
    "add_norm": add_norm(2, 5, 24, delta=True),
    "norm_linear": norm_linear(2, 5, 24, delta=True, rows=(9, 16, 3)),
    "linear": linear(2, 5, 24, rows=7),
    "swiglu_linear": swiglu_linear(2, 5, 24, rows=7),
    "rotary_heads": rotary(2, 5, 3, 8),
    "linear_cross_entropy": cross_entropy(2, 5, 24, vocabulary=11),
}
PARTS = {
    **FEW,
    "add_norm-no_delta": add_norm(2, 5, 24, delta=False),
    "add_norm-1x1x1": add_norm(1, 1, 1, delta=True),
    "add_norm-1x70x1000": add_norm(1, 70, 1000, delta=False),
    "add_norm-eps": add_norm(2, 5, 24, delta=True, eps=0.5),
    "norm_linear-one_weight": norm_linear(2, 5, 24, delta=True, rows=(9,)),
    "norm_linear-no_delta": norm_linear(2, 5, 24, delta=False, rows=(9, 16, 3)),
    "norm_linear-1x1x7": norm_linear(1, 1, 7, delta=True, rows=(1, 2)),
    "norm_linear-6x100": norm_linear(6, 100, delta=False, rows=(31, 31, 31)),
    "linear-1x1x7": linear(1, 1, 7, rows=1),
    "swiglu_linear-1x1x7": swiglu_linear(1, 1, 7, rows=1),
    "rotary_heads-one_row": rotary(2, 1, 3, 8),
    "rotary_heads-one_head": rotary(2, 5, 1, 8),
    "rotary_heads-dim_2": rotary(1, 5, 3, 2),
    "rotary_heads-dim_6": rotary(2, 7, 5, 6),
    "rotary_heads-longer_table": rotary(2, 5, 3, 8, context=9),
    "linear_cross_entropy-vocabulary_1": cross_entropy(2, 5, 24, vocabulary=1),
    "linear_cross_entropy-vocabulary_5000": cross_entropy(2, 5, 24, vocabulary=5000),
    "linear_cross_entropy-1x1x7": cross_entropy(1, 1, 7, vocabulary=11),
}


def by_name(parts):
    return pytest.mark.parametrize("part", parts.values(), ids=list(parts))


def make(part, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(name, shape):
        x = torch.randn(shape, generator=generator)
        return (x / math.sqrt(shape[-1]) if name[0] == "w" else 1 + 0.3 * x if name == "gain" else x).to(dtype)

    return {name: random(name, shape) for name, shape in part.shapes.items()}


def make_seeds(part, inputs, dtype=torch.float32):
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        outs = part.formula({name: x.double() for name, x in inputs.items()})
    return [torch.randn(x.shape, generator=generator).to(dtype) for x in outs]


def backward(outs, seeds, **options):
    used = [(out, seed) for out, seed in zip(outs, seeds, strict=True) if out.requires_grad and seed is not None]
    roots, given = zip(*((out, seed.to(out.dtype)) for out, seed in used), strict=True)
    torch.autograd.backward(roots, given, **options)


def differentiate(function, inputs, seeds, frozen=(), calls=1):
    leaves = {name: x.detach().requires_grad_(name not in frozen) for name, x in inputs.items()}
    for _ in range(calls):
        outs = function(leaves)
        backward(outs, seeds)
    found = {f"out{number}": out.detach() for number, out in enumerate(outs)}
    return found | {f"d{name}": leaf.grad for name, leaf in leaves.items()}


def in_double(part, inputs, seeds, **options):
    wide = {name: x.double() for name, x in inputs.items()}
    return differentiate(part.formula, wide, [None if s is None else s.double() for s in seeds], **options)


def compare(found, expected, limit):
    wrong = []
    for name, truth in expected.items():
        x = found[name]
        if truth is None or x is None:
            if any(y is not None and bool(y.any()) for y in (x, truth)):
                wrong.append(f"{name} is {'missing' if x is None else 'not nothing'}")
            continue
        if x.shape != truth.shape:
            wrong.append(f"{name} is {tuple(x.shape)} instead of {tuple(truth.shape)}")
            continue
        error, size = (x.double() - truth).norm().item(), truth.norm().item()
        if not error <= limit * size + 1e-9 * math.sqrt(x.numel()):
            wrong.append(f"{name} is off by {error:.2e} of {size:.2e}")
    assert not wrong, "\n".join(wrong)


def check(part, dtype=torch.float32, *, inputs=None, seeds=None, limit=None, **options):
    inputs = inputs or make(part, dtype)
    seeds = seeds or make_seeds(part, inputs, dtype)
    with poisoned_memory():
        found = differentiate(part.call, inputs, seeds, **options)
    compare(found, in_double(part, inputs, seeds, **options), limit or LIMITS[dtype])
    return found


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


FROZEN = [("w0",), ("w0", "w1"), ("gain", "w0", "w1", "w2"), ("x", "delta", "gain"), ("x", "delta", "gain", "w0", "w2")]


@pytest.mark.parametrize("frozen", FROZEN, ids="+".join)
def test_frozen_inputs_of_norm_linear(frozen):
    part = FEW["norm_linear"]
    found = check(part, frozen=frozen)
    assert all((found[f"d{name}"] is None) == (name in frozen) for name in part.shapes)


@by_name({name: part for name, part in FEW.items() if len(part.shapes) > 1 and name != "norm_linear"})
def test_one_frozen_input(part):
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


def lay(x, layout):
    """Apply one of LAYOUTS, which expect more dimensions. The rows of a broadcast matrix stay different."""
    if x.dim() > 2 or (x.dim() == 2 and layout != "broadcast"):
        return LAYOUTS[layout](x)
    if layout == "broadcast":
        return x[..., :1].expand(x.shape)
    return x if layout == "contiguous" else LAYOUTS["every_other"](x)


@pytest.mark.parametrize("layout", STRIDES)
@by_name({name: part for name, part in FEW.items() if name != "rotary_heads"})
def test_strides(part, layout):
    inputs = {name: lay(x, layout) for name, x in make(part).items()}
    seeds = [lay(x, layout) if x.dim() else x for x in make_seeds(part, inputs)]
    check(part, inputs=inputs, seeds=seeds)


@pytest.mark.parametrize("layout", STRIDES)
def test_strides_of_rotary_heads(layout):
    part = rotary(2, 5, 3, 8, layout="contiguous" if layout == "broadcast" else layout)
    inputs = make(part)
    check(part, inputs=inputs, seeds=[LAYOUTS[layout](x) for x in make_seeds(part, inputs)])


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
    assert largest(part.call) <= max(16 * vocabulary, width * vocabulary)


# The model

SHAPE = ModelConfig(vocab_size=61, context_length=12, d_model=24, num_layers=3, num_heads=3, d_ff=40)


def model_of(checkpoint_blocks=0, attention="reference", **options):
    model = TransformerLM(SHAPE, attention=attention, checkpoint_blocks=checkpoint_blocks, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3, generator=generator)
    return model


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


@pytest.mark.parametrize(("checkpoint_blocks", "length", "batch"), [(0, 12, 2), (1, 5, 2), (2, 1, 1)], ids=str)
def test_the_fused_model(checkpoint_blocks, length, batch):
    tokens, targets = batch_of(length, batch)
    expected = plain_results(length, batch)
    model = model_of(checkpoint_blocks, fused=True)
    with poisoned_memory():
        logits, loss = model(tokens), model(tokens, targets)
        by_logits = gradients_of(model, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
        by_loss = gradients_of(model, loss)
    for gradients in (by_logits, by_loss):
        compare({"logits": logits.detach(), "loss": loss.detach()} | gradients, expected, 1e-5)


@pytest.mark.parametrize("checkpoint_blocks", [0, 2])
def test_the_loss_of_the_unfused_model(checkpoint_blocks):
    tokens, targets = batch_of()
    expected = {name: x for name, x in plain_results().items() if name != "logits"}
    model = model_of(checkpoint_blocks)
    loss = model(tokens, targets)
    compare({"loss": loss.detach()} | gradients_of(model, loss), expected, 1e-5)


@pytest.mark.parametrize("attention", ["flash_torch", "sdpa"])
def test_the_fused_model_with_every_attention(attention):
    tokens, targets = batch_of()
    expected = plain_results()
    model = model_of(attention=attention, fused=True)
    loss = model(tokens, targets)
    found = {"logits": model(tokens).detach(), "loss": loss.detach()} | gradients_of(model, loss)
    compare(found, expected, 1e-5)


def test_checkpoints_within_checkpoints():
    tokens, targets = batch_of()
    model = model_of(3, fused=True)
    model.checkpoint_inner = 1
    expected = plain_results()
    gradients = gradients_of(model, model(tokens, targets))
    compare(gradients, {name: expected[name] for name in gradients}, 1e-5)


def test_gradients_of_the_fused_model_add_up():
    tokens, targets = batch_of()
    model = model_of(fused=True)
    once = gradients_of(model, model(tokens, targets))
    model(tokens, targets).backward()
    twice = {name: parameter.grad for name, parameter in model.named_parameters()}
    compare(twice, {name: 2 * x.double() for name, x in once.items()}, 1e-6)


def test_the_fused_model_without_gradients():
    tokens, targets = batch_of()
    expected = plain_results()
    with torch.no_grad():
        model = model_of(fused=True)
        found = {"logits": model(tokens), "loss": model(tokens, targets)}
    assert not found["loss"].requires_grad
    compare(found, {name: expected[name] for name in found}, 1e-5)


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
}


@pytest.mark.parametrize(("fast", "fields"), STEPS.values(), ids=list(STEPS))
def test_losses_of_the_fast_step(fast, fields):
    expected = losses_of(**fields)
    assert expected[-1] < expected[0]
    assert losses_of(fast=fast, **fields) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("fast", ["kernels,loss", "on"])
def test_losses_of_the_fast_step_in_bf16(fast):
    expected = losses_of(precision="bf16", max_grad_norm=1.0)
    assert losses_of(precision="bf16", max_grad_norm=1.0, fast=fast) == pytest.approx(expected, rel=5e-3)


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


@pytest.mark.parametrize("fast", ["kernels", "loss", "on"])
def test_accumulated_batches(fast):
    steps = [TrainStep.build(RunConfig(model=SHAPE, batch_size=2, fast=name)) for name in (fast, "off")]
    batches = [steps[1].random_batch() for _ in range(3)]
    losses = [step.accumulate(batches, loss_scale=4.0).item() for step in steps]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    gradients = [{n: p.grad for n, p in step.model.named_parameters()} for step in steps]
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
    with pytest.raises(UserError) as refusal:
        RunConfig(model=SHAPE, **fields)
    assert "\n" not in str(refusal.value)
    assert "fast" in str(refusal.value)


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
