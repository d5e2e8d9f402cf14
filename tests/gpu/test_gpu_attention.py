"""Triton's attention kernels on a GPU: `pytest -m gpu tests/gpu/test_gpu_attention.py`.

Most of the time is Triton compiling; with several cores `-n 8` helps.
"""

import gc
import importlib
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.kernels import FlashAttentionTriton, attention
from cs336_systems.kernels.flash import operators as flash_operators
from cs336_systems.kernels.flash.dispatch import HOPPER_DTYPES, is_hopper_head_dim
from cs336_systems.predict.attention_programs import WIDEST_IN_ONE_PASS
from tests.unit.kernels.attention_cases import (
    CASES,
    LAYOUTS,
    Case,
    Inputs,
    check,
    check_autocast,
    compare,
    differentiate,
    make_inputs,
    naive,
    poisoned_memory,
    relative_error,
    visible,
)

pytestmark = pytest.mark.gpu
dispatch = importlib.import_module("cs336_systems.kernels.flash.dispatch")  # the package has a function of that name

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PLAIN = Case(384, 384, is_causal=True, batch=2, heads=4, kv_heads=4)
GROUPED = Case(512, 512, d=128, is_causal=True, heads=8, kv_heads=2)
WINDOW = Case(257, 257, window=(64, 16), batch=2, heads=4, kv_heads=2)
WIDE = Case(384, 384, d=256, is_causal=True, batch=2, heads=4, kv_heads=2)


KERNELS = {
    "portable": {"impl": "flash_triton"},
    "deterministic": {"impl": "flash_triton", "deterministic": True},
    "hopper": {"impl": "flash_hopper"},
    "hopper_large": {"impl": "flash_hopper"},
    "hopper_repeatable": {"impl": "flash_hopper_repeatable"},
}
"""Options of `attention`. With "hopper_large" forward runs in large programs, as it does with many keys."""


def triton(kernels="portable"):
    def implementation(q, k, v, **mask):
        return attention(q, k, v, return_lse=True, **KERNELS[kernels], **mask)

    return implementation


def run(case, inputs, kernels="portable"):
    return differentiate(lambda q, k, v: triton(kernels)(q, k, v, **case.mask), inputs)


@pytest.fixture(autouse=True)
def of_hopper(request, monkeypatch):
    """The Hopper kernels pass the same tests as the others, in the cases that they take."""
    given = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if not given.get("kernels", "").startswith("hopper"):
        return
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for compute capability 9.0")
    case = given.get("case", PLAIN)
    covered = is_hopper_head_dim(case.d) and given.get("dtype", BF16) in HOPPER_DTYPES
    if not covered or 0 in (case.batch, case.len_q, case.len_k):
        pytest.skip("only the portable kernels take it")
    if given["kernels"] == "hopper_large":
        monkeypatch.setattr(hopper_launch(), "sees_few_keys", lambda *_: False)
    dispatch._resolved.clear()
    flash_operators._kernels.clear()


def hopper_launch():
    return importlib.import_module("cs336_systems.kernels.flash.hopper_launch")


def assert_right(found, inputs, case):
    wrong = compare(found, inputs, case)
    assert not wrong, "\n".join(wrong)


def describe(value):
    return value.name if isinstance(value, Case) else str(value)


@pytest.fixture
def empty_gpu():
    """For tests that need or count gigabytes."""
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def ieee_fp32():
    """The oracles' fp32 matmuls do not use TF32, whatever ran before."""
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision("highest")


# Against the oracle

TABLE = list(CASES.values())
"""All cases in bf16, some in the other dtypes: each compiles kernels, which takes seconds."""
MATRIX = [
    *((case, BF16, "portable") for case in TABLE),
    *((case, BF16, "deterministic") for case in TABLE[::3]),
    *((case, BF16, "hopper") for case in TABLE),
    *((case, FP16, "portable") for case in TABLE[1::4]),
    *((case, FP32, "portable") for case in TABLE[::4]),
    *((case, FP16, "deterministic") for case in TABLE[5::8]),
    *((case, FP32, "deterministic") for case in TABLE[::8]),
    *((case, FP16, "hopper") for case in TABLE[::3]),
    *((case, BF16, "hopper_large") for case in TABLE),
    *((case, FP16, "hopper_large") for case in TABLE[1::3]),
    *((case, BF16, "hopper_repeatable") for case in TABLE),
    *((case, FP16, "hopper_repeatable") for case in TABLE[2::3]),
]


@pytest.mark.parametrize(("case", "dtype", "kernels"), MATRIX, ids=describe)
def test_against_the_oracle(case, dtype, kernels):
    with poisoned_memory():
        check(triton(kernels), case, dtype, device="cuda", through_lse=case.len_q % 2 == 0)


LARGE = (
    # Above some size a kernel may read by tensor descriptors, whose bounds the hardware checks.
    Case(1029, 1029, is_causal=True, batch=4, heads=16, kv_heads=16),
    Case(1024, 1024, is_causal=True, batch=5, heads=16, kv_heads=4),
    Case(2049, 2049, d=128, heads=17, kv_heads=17),
    Case(1023, 1024, d=128, is_causal="bottom-right", batch=2, heads=17, kv_heads=17),
    Case(1024, 1023, is_causal="bottom-right", batch=4, heads=17, kv_heads=1),
    Case(2049, 2049, is_causal=True, window=(255, 0), heads=34, kv_heads=2),
    Case(1029, 1029, d=80, is_causal=True, batch=4, heads=16, kv_heads=16),
    Case(1024, 1024, d=96, is_causal=True, batch=4, heads=16, kv_heads=16),
    Case(1024, 1030, d=128, is_causal="bottom-right", batch=5, heads=16, kv_heads=4),
    # Much longer one way than the other.
    Case(4224, 4224, is_causal=True),
    Case(799, 3),
    Case(3, 4111, heads=4),
    # Numbers of blocks that do not fill the last round: split-KV, and split queries in backward.
    Case(1500, 1300, d=80, batch=3, heads=12, kv_heads=3),
    Case(1500, 1300, d=96, batch=3, heads=12, kv_heads=12),
    Case(3072, 3072, heads=8, kv_heads=8),
    # Windows with tiles before, on and between both bounds.
    Case(1200, 1200, is_causal=True, window=(500, 0), heads=4, kv_heads=2),
    Case(1200, 1200, d=128, is_causal=True, window=(511, 0), heads=8, kv_heads=2),
    Case(1111, 1111, d=80, window=(300, 200), heads=3, kv_heads=3),
    Case(1111, 1111, d=128, window=(299, None), heads=3, kv_heads=1),
    Case(700, 1300, d=128, is_causal="bottom-right", window=(400, 0), heads=4, kv_heads=4),
    Case(1300, 700, d=96, is_causal="bottom-right", window=(65, 63), heads=4, kv_heads=4),
    Case(700, 1300, is_causal="bottom-right", window=(333, 100), heads=6, kv_heads=2),
    # Head dims above 128.
    Case(1029, 1029, d=192, is_causal=True, batch=2, heads=8, kv_heads=8),
    Case(1024, 1030, d=256, is_causal="bottom-right", batch=3, heads=8, kv_heads=2),
    Case(1500, 1300, d=256, batch=3, heads=12, kv_heads=12),
    Case(1300, 1500, d=160, batch=2, heads=12, kv_heads=3),
    Case(1111, 1111, d=192, window=(300, 200), heads=3, kv_heads=1),
    Case(700, 1300, d=256, is_causal="bottom-right", window=(400, 0), heads=4, kv_heads=4),
    Case(1300, 700, d=136, is_causal="bottom-right", window=(65, 63), heads=4, kv_heads=2),
    Case(1300, 700, d=256, is_causal="top-left", window=(None, 63), heads=4, kv_heads=1),
    Case(60, 2000, d=200, window=(1900, 0), is_causal="bottom-right", heads=2, kv_heads=2),
)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, BF16) for case in LARGE), (LARGE[0], FP16), (LARGE[1], FP32)], ids=describe
)
def test_large(case, dtype, kernels, empty_gpu):
    with poisoned_memory():
        check(triton(kernels), case, dtype, device="cuda")


def grouped(d, group):
    return Case(640, 640, d, is_causal=True, batch=2, heads=2 * group, kv_heads=2)


PARTS = [
    (grouped(64, 7), 2),
    (grouped(64, 7), 3),
    (grouped(80, 3), 2),
    (grouped(96, 5), 2),
    (grouped(128, 8), 3),
    *((grouped(128, 7), parts) for parts in (2, 3, 4, 7)),
    (Case(700, 1300, 128, is_causal="bottom-right", heads=7, kv_heads=1), 4),
    (Case(60, 60, 128, is_causal=True, heads=14, kv_heads=2), 3),
    (Case(1200, 1200, 64, is_causal=True, window=(300, 0), heads=7, kv_heads=1), 2),
    (Case(1111, 1111, 128, window=(299, 77), heads=5, kv_heads=1), 3),
]


@pytest.mark.parametrize("kernels", ["hopper"])
@pytest.mark.parametrize(("case", "parts"), PARTS, ids=describe)
def test_parts_of_a_group_of_heads(case, parts, kernels, monkeypatch):
    """Backward may split the query heads of a KV head over any number of programs, evenly or not."""
    monkeypatch.setattr(hopper_launch(), "parts_of_group", lambda *_: parts)
    with poisoned_memory():
        check(triton(kernels), case, BF16, device="cuda")


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", [PLAIN, LARGE[0], WIDE], ids=describe)
def test_strides(case, layout, kernels):
    check(triton(kernels), case, BF16, device="cuda", layout=layout, dout_layout=layout)
    check(triton(kernels), case, BF16, device="cuda", layout="heads_inside", dout_layout=layout)


@pytest.mark.parametrize("kernels", ["portable", "hopper"])
@pytest.mark.parametrize("case", [PLAIN, LARGE[0]], ids=describe)
def test_slices_of_packed_qkv_and_a_gradient_of_ones(case, kernels):
    shape = (case.batch, case.len_q, 3, case.heads, case.d)
    packed = torch.randn(shape, device="cuda", dtype=BF16, requires_grad=True)
    q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
    out, lse = triton(kernels)(q, k, v, is_causal=True)
    out.sum().backward()
    gradients = dict(zip(("dq", "dk", "dv"), (x.transpose(1, 2) for x in packed.grad.unbind(2)), strict=True))
    inputs = Inputs(q.detach(), k.detach(), v.detach(), torch.ones_like(out), None)
    assert_right({"out": out.detach(), "lse": lse.detach(), **gradients}, inputs, case)


@pytest.mark.parametrize("kernels", ["portable", "hopper"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("case", [PLAIN, WINDOW, GROUPED, WIDE], ids=describe)
def test_large_logits(case, dtype, kernels):
    check(triton(kernels), case, dtype, device="cuda", magnitude=50, large=True)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("beyond", [30, 100, 130, -100])
def test_scores_far_from_those_seen_first(beyond, d, kernels):
    """The Hopper kernel visits the last keys first, and keeps their maximum as long as other scores exceed it by at
    most 115 nats. Else the warpgroups that overflowed make a second pass over the keys."""
    for case in (Case(512, 639, d, is_causal="bottom-right"), Case(300, 1300, d)):
        inputs = make_inputs(case, BF16, device="cuda")
        inputs.q[..., 0] = 0
        inputs.q[:, :, 64:128, 0] = math.sqrt(d)  # one warpgroup's
        inputs.k[..., 0] = beyond if beyond < 0 else 0
        inputs.k[:, :, :100, 0] = beyond
        with poisoned_memory():
            found = run(case, inputs, kernels)
        assert compare(found, inputs, case, large=True) == []


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_scores_of_minus_infinity_seen_first(dtype, d, kernels):
    """Several tiles of -inf leave no finite maximum: the Hopper kernel makes a second pass, and must not compute
    -inf - -inf. Forward only, since -inf times 0 makes NaN of dQ."""
    for case in (Case(512, 639, d, is_causal="bottom-right"), Case(300, 1300, d)):
        inputs = make_inputs(case, dtype, device="cuda")
        inputs.q[..., 0] = inputs.q[..., 1] = math.sqrt(d)
        inputs.k[..., 0] = 0
        inputs.k[:, :, 128:, 0] = -math.inf
        inputs.k[:, :, :128, 1] = -100
        with poisoned_memory(), torch.no_grad():
            out, lse = triton(kernels)(inputs.q, inputs.k, inputs.v, **case.mask)
        truth = naive(*(x.double() for x in (inputs.q, inputs.k, inputs.v)), visible(case, "cuda"), case.scale)
        for found, expected in zip((out, lse), truth, strict=True):
            assert relative_error(found, expected) < 4e-3


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("length", [1, 2, 5, 17])
def test_short_and_large(length, kernels):
    """Keys beyond the end, at score 0, overflow against a very negative logsumexp: FlashAttention had NaN in dQ."""
    for is_causal in (False, True):
        case = Case(length, length, is_causal=is_causal, batch=2)
        check(triton(kernels), case, FP16, device="cuda", magnitude=5, large=True)


@pytest.mark.parametrize(
    "case", [Case(5, 5, batch=0), Case(0, 5), Case(5, 0), Case(5, 0, is_causal=True)], ids=describe
)
def test_empty(case):
    with poisoned_memory():
        check(triton(), case, BF16, device="cuda", through_lse=True)


# Indices beyond 2**31


def spot_check(q, k, v, dout, found, places):
    """Compare a few heads with the oracle: a wrapped address reads another head's valid numbers, which are not NaN."""
    for batch, head in places:
        one = (slice(batch, batch + 1), slice(head, head + 1))
        inputs = Inputs(q[one], k[one], v[one], dout[one], None)
        case = Case(q.shape[2], k.shape[2], q.shape[3], True, heads=1, kv_heads=1)
        assert_right({name: x[one] for name, x in found.items()}, inputs, case)


@pytest.mark.xdist_group("gpu_memory")  # two of them at once do not fit
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("layout", ["packed", "separate", "row_stride"])
def test_beyond_two_to_the_31(layout, kernels, empty_gpu):
    if torch.cuda.get_device_properties(0).total_memory < 75 * 2**30:
        pytest.skip("needs about 60 GiB")
    if layout == "packed":
        packed = torch.randn(4500, 160, 3, 16, 64, device="cuda", dtype=BF16)
        views = [x.transpose(1, 2) for x in packed.unbind(2)]
    elif layout == "separate":
        views = [torch.randn(1100, 64, 512, 64, device="cuda", dtype=BF16) for _ in range(3)]
    else:  # One head, its rows far apart.
        base = torch.empty(1024, 2_200_064, device="cuda", dtype=BF16)
        views = [base[None, None, :, 64 * i : 64 * (i + 1)] for i in range(3)]
        for view in views:
            view.copy_(torch.randn(view.shape, device="cuda"))
    reach = 1 + sum((size - 1) * stride for size, stride in zip(views[0].shape, views[0].stride(), strict=True))
    assert reach > 2**31
    dout = torch.randn(views[0].shape, device="cuda", dtype=BF16)
    batch, heads = views[0].shape[:2]
    assert batch * heads > 65535 or layout == "row_stride"  # ... which is as far as the second grid axis goes
    found = differentiate(lambda *qkv: triton(kernels)(*qkv, is_causal=True), Inputs(*views, dout, None))
    last = (batch - 1, heads - 1)
    spot_check(*views, dout, found, {(0, 0), (batch // 2, heads // 2), (65535 // heads % batch, heads - 1), last})


# Races


@pytest.mark.parametrize(("case", "kernels"), [*((PLAIN, name) for name in KERNELS), (WIDE, "hopper")], ids=describe)
@pytest.mark.parametrize("magnitude", [0.2, 1.0, 3.0])
def test_a_thousand_seeds(magnitude, case, kernels):
    """A race or a missing barrier shows once in hundreds of runs, in a few elements: hence the largest error, too.

    The limits are at least twice the error of rounding P, dS, the output and the gradients to bf16 (0.0054 and 0.13).
    """
    seen, seeds = visible(case, "cuda"), 1000
    errors = torch.empty(seeds, 4, 2, device="cuda")
    for seed in range(seeds):
        inputs = make_inputs(case, BF16, seed=seed, device="cuda", magnitude=magnitude)
        found = run(case, inputs, kernels)
        truth = differentiate(lambda q, k, v: naive(q, k, v, seen), inputs.cast(FP32))
        for i, name in enumerate(("out", "dq", "dk", "dv")):
            difference, rms = found[name].float() - truth[name], truth[name].square().mean().sqrt()
            errors[seed, i, 0] = difference.square().mean().sqrt() / rms
            errors[seed, i, 1] = difference.abs().max() / rms
    bad = ~(errors < errors.new_tensor([0.012, 0.3]))  # NaN is bad
    assert not bad.any(), f"seeds {bad.any(2).any(1).nonzero().flatten().tolist()}, worst {errors.amax(0).tolist()}"


REPEATED = [
    *((case, dtype, "deterministic") for case in (PLAIN, GROUPED, WINDOW) for dtype in (BF16, FP32)),
    (LARGE[1], BF16, "deterministic"),
    *((case, BF16, "hopper") for case in (PLAIN, GROUPED, LARGE[1], WIDE)),
    *((case, BF16, "hopper_repeatable") for case in (PLAIN, GROUPED, WINDOW, LARGE[1], WIDE)),
]


@pytest.mark.parametrize(("case", "dtype", "kernels"), REPEATED, ids=describe)
def test_bitwise_repeatable(case, dtype, kernels):
    """All but dq of the Hopper kernels for head dims up to 128, which is added up in no fixed order."""
    inputs = make_inputs(case, dtype, device="cuda", through_lse=True)
    differs = {"dq"} if kernels == "hopper" and case.d <= WIDEST_IN_ONE_PASS else set()
    first = run(case, inputs, kernels)
    same = torch.ones((), dtype=torch.bool, device="cuda")
    for _ in range(50):
        again = run(case, inputs, kernels)
        for name in again.keys() - differs:
            same &= (again[name] == first[name]).all()
    assert same


# Precision of fp32


@pytest.mark.parametrize("case", [PLAIN, GROUPED, WINDOW], ids=describe)
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_fp32_and_tf32(precision, case):
    torch.set_float32_matmul_precision(precision)
    inputs = make_inputs(case, FP32, device="cuda")
    found = run(case, inputs)
    seen = visible(case, "cuda")
    truth = differentiate(lambda q, k, v: naive(q, k, v, seen), inputs.cast(torch.float64))
    errors = {name: relative_error(found[name], truth[name]) for name in found if name != "lse"}
    low, high = (0.0, 1e-5) if precision == "highest" else (1e-5, 5e-3)
    assert all(low < error < high for error in errors.values()), errors


# As part of PyTorch


class Operators(TorchDispatchMode):
    """Records the operators that ran, each with the arguments of its last call."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[str(function)] = (function, args, kwargs or {})
        return function(*args, **(kwargs or {}))


def operators(impl):
    return f"cs336.{impl}_forward.default", f"cs336.{impl}_backward.default"


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_auto_uses_the_fused_kernels_for_large_problems(dtype):
    on_hopper = torch.cuda.get_device_capability() == (9, 0)
    best, repeatable = ("flash_hopper", "flash_hopper_repeatable") if on_hopper else ("flash_triton", "flash_triton")
    large = Case(1024, 1024, d=256, batch=2, heads=16, kv_heads=16)
    calls = ((LARGE[2], False, best), (LARGE[2], True, repeatable), (LARGE[0], False, "flash_triton"))
    for case, deterministic, ours in (*calls, (PLAIN, False, None), (large, False, best), (large, True, repeatable)):
        inputs = make_inputs(case, dtype, device="cuda")
        with Operators() as seen:
            out = attention(inputs.q.requires_grad_(), inputs.k, inputs.v, is_causal=True, deterministic=deterministic)
            out.backward(inputs.dout)
        for impl in ("flash_hopper", "flash_hopper_repeatable", "flash_triton"):
            assert (set(operators(impl)) <= seen.calls.keys()) == (impl == ours)


def operator_calls(case, layout, through_lse, kernels):
    """The calls of both operators, with the arguments that the package passes."""
    inputs = make_inputs(case, BF16, device="cuda", layout=layout, dout_layout=layout, through_lse=through_lse)
    with Operators() as seen:
        run(case, inputs, kernels)
    forward, backward = operators(KERNELS[kernels]["impl"])
    function, *arguments = seen.calls[forward]
    yield function, *tree_map_only(torch.Tensor, lambda x: x.detach().requires_grad_(), arguments)
    function, *arguments = seen.calls[backward]  # has no derivative
    yield function, *tree_map_only(torch.Tensor, torch.Tensor.detach, arguments)


@pytest.mark.parametrize("kernels", ["deterministic", "hopper", "hopper_repeatable"])
@pytest.mark.parametrize("through_lse", [False, True], ids=["out", "out+lse"])
@pytest.mark.parametrize("layout", ["contiguous", "packed", "transposed"])
@pytest.mark.parametrize("case", [PLAIN, WINDOW, Case(17, 17, d=40), WIDE], ids=describe)
def test_operators_pass_opcheck(case, layout, through_lse, kernels):
    """Schema, shapes and strides under fake tensors, autograd, and the same again through AOTAutograd."""
    # dq of the Hopper kernels is added up in no fixed order: two calls differ in its last bits.
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if kernels == "hopper" else {}
    for function, args, kwargs in operator_calls(case, layout, through_lse, kernels):
        torch.library.opcheck(function, args, kwargs, **tolerance)


def test_double_precision_is_not_for_triton():
    inputs = make_inputs(PLAIN, torch.float64, device="cuda")
    with pytest.raises(ValueError, match="float64"):
        triton()(inputs.q, inputs.k, inputs.v)
    check(lambda *qkv, **mask: attention(*qkv, return_lse=True, **mask), PLAIN, torch.float64, device="cuda")


def test_two_devices():
    q, k, v = torch.zeros(3, 1, 2, 5, 8)
    with pytest.raises(ValueError, match="cuda") as caught:
        attention(q.cuda(), k, v)
    assert "cpu" in str(caught.value)


@pytest.mark.parametrize("kernels", ["portable", "hopper"])
def test_autocast(kernels):
    check_autocast(lambda q, k, v: attention(q, k, v, is_causal=True, **KERNELS[kernels]), PLAIN, "cuda")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("leading", [(4,), (2, 4)], ids=str)
def test_course_function(leading, is_causal, compiled):
    """The leaderboard compiles `apply`; the course's tests look for the logsumexp among the saved tensors."""
    torch._dynamo.reset()
    case = Case(384, 384, is_causal=is_causal, heads=math.prod(leading), kv_heads=math.prod(leading))
    inputs = make_inputs(case, BF16, device="cuda")
    apply = torch.compile(FlashAttentionTriton.apply) if compiled else FlashAttentionTriton.apply

    def function(q, k, v):
        q, k, v = (x.view(*leading, 384, 64) for x in (q, k, v))
        out = apply(q, k, v, is_causal)
        if compiled:
            return out.reshape(1, -1, 384, 64), None
        (lse,) = [x for x in out.grad_fn.saved_tensors if x.shape == q.shape[:-1]]
        return out.reshape(1, -1, 384, 64), lse.reshape(1, -1, 384)

    assert_right(differentiate(function, inputs), inputs, case)


@pytest.mark.parametrize("kernels", ["deterministic", "hopper", "hopper_repeatable"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", [PLAIN, WINDOW], ids=describe)
def test_compiled_in_one_graph(case, dynamic, kernels):
    """Bit for bit the eager result: the kernels are opaque to the compiler."""
    torch._dynamo.reset()
    mask = case.mask

    def function(q, k, v):
        return attention(q, k, v, return_lse=True, **KERNELS[kernels], **mask)

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    for length in (case.len_q, 203) if dynamic else (case.len_q,):
        resized = Case(**{**vars(case), "len_q": length, "len_k": length})
        inputs = make_inputs(resized, BF16, device="cuda", through_lse=True)
        found, eager = differentiate(compiled, inputs), differentiate(function, inputs)
        repeatable = [name for name in eager if not (kernels == "hopper" and name == "dq")]
        assert all(torch.equal(found[name], eager[name]) for name in repeatable)
        assert_right(found, inputs, resized)


@pytest.mark.parametrize("kernels", KERNELS)
def test_captured_in_a_cuda_graph(kernels):
    static = make_inputs(PLAIN, BF16, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(PLAIN, static, kernels)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(PLAIN, static, kernels)
    for seed in (1, 2, 3):
        fresh = make_inputs(PLAIN, BF16, device="cuda", seed=seed)
        for name in ("q", "k", "v", "dout"):
            getattr(static, name).copy_(getattr(fresh, name))
        graph.replay()
        assert_right(found, fresh, PLAIN)


def test_make_graphed_callables():
    def function(q, k, v):
        return attention(q, k, v, is_causal=True, impl="flash_triton")

    sample = make_inputs(PLAIN, BF16, device="cuda")
    graphed = torch.cuda.make_graphed_callables(
        function, tuple(x.clone().requires_grad_() for x in (sample.q, sample.k, sample.v))
    )
    inputs = make_inputs(PLAIN, BF16, device="cuda", seed=1)
    assert_right(differentiate(lambda q, k, v: (graphed(q, k, v), None), inputs), inputs, PLAIN)


def test_on_a_side_stream():
    """A launch on the default stream would not wait for the inputs."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        inputs = make_inputs(PLAIN, BF16, device="cuda")
        torch.cuda._sleep(50_000_000)
        inputs.q.mul_(2)
        found = run(PLAIN, inputs)
    stream.synchronize()
    assert_right(found, inputs, PLAIN)


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
def test_on_the_other_gpu():
    inputs = make_inputs(PLAIN, BF16, device="cuda:1")
    assert_right(run(PLAIN, inputs), inputs, PLAIN)


@pytest.mark.parametrize("kernels", ["portable", "hopper"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_counted_flops(is_causal, kernels):
    """FLOPs are counted as for PyTorch's attention: a mask saves nothing, backward has five matmuls, forward two."""
    b, h, sq, sk, d = 2, 4, 128, 256, 64
    inputs = make_inputs(Case(sq, sk, d, batch=b, heads=h, kv_heads=h), BF16, device="cuda")
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    with FlopCounterMode(display=False) as forward:
        out = attention(*leaves, is_causal=is_causal, **KERNELS[kernels])
    with FlopCounterMode(display=False) as backward:
        out.backward(inputs.dout)
    assert forward.get_total_flops() == 4 * b * h * sq * sk * d
    assert backward.get_total_flops() == 10 * b * h * sq * sk * d


@pytest.mark.parametrize("kernels", KERNELS)
def test_memory_is_linear_in_the_length(kernels, empty_gpu):
    """One matrix of scores alone would take 2 GiB."""
    case = Case(32768, 32768, is_causal=True, heads=1, kv_heads=1)
    before = torch.cuda.memory_allocated()
    inputs = make_inputs(case, BF16, device="cuda")
    run(case, inputs, kernels)  # allocations of the first call alone are not counted
    torch.cuda.reset_peak_memory_stats()
    run(case, inputs, kernels)
    assert torch.cuda.max_memory_allocated() - before < 200 * 2**20
