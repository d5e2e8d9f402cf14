"""Attention on the CPU against an oracle in float64: what all implementations share, and its edges."""

import itertools
import math
import os
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.config import ATTENTIONS
from cs336_systems.kernels import FlashAttentionTorch, FlashAttentionTriton, attention
from cs336_systems.kernels.flash.dispatch import IMPLEMENTATIONS, constant_when_compiled
from tests.unit.kernels.attention_cases import (
    CASES,
    LAYOUTS,
    Case,
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

OURS = ("reference", "flash_torch")
EVERY = ("auto", "reference", "flash_torch", "sdpa")
PLAIN = CASES["2x2-128x128-d64-causal"]
BLIND = CASES["1x2-203x113-d64-bottom-right-w4"]
"""Rows that see no key, and keys that no row sees."""
FEW = (
    PLAIN,
    BLIND,
    CASES["1x2-203x203-d64-causal-w64_5"],
    CASES["2x4-kv2-113x113-d64-causal"],
    CASES["1x2-257x257-d128"],
    CASES["1x2-113x203-d8"],
    CASES["1x2-239x1-d64-top-left-w5_any"],
)


def implementation(impl, **options):
    return lambda q, k, v, **mask: attention(q, k, v, impl=impl, return_lse=True, **options, **mask)


def without_lse(impl):
    return lambda q, k, v, **mask: (attention(q, k, v, impl=impl, **mask), None)


def by_name(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


# The oracle


@by_name(
    [Case(5, 7, 3, "bottom-right", (2, 1)), Case(7, 4, 3, "bottom-right", heads=4), Case(6, 6, 3, False, (None, 2))]
)
def test_the_oracle_one_weight_at_a_time(case):
    q, k, v, *_ = vars(make_inputs(case, torch.float64)).values()
    out, lse = naive(q, k, v, visible(case), scale=-0.7)
    before, after = (math.inf if side is None else side for side in case.window or (None, None))
    for head, i in itertools.product(range(case.heads), range(case.len_q)):
        group = head // (case.heads // case.kv_heads)
        p = i + case.len_k - case.len_q if case.is_causal == "bottom-right" else i
        keys = [j for j in range(case.len_k) if p - before <= j <= p + (min(after, 0) if case.is_causal else after)]
        weights = {j: math.exp(-0.7 * float(q[0, head, i] @ k[0, group, j])) for j in keys}
        total = sum(weights.values())
        assert lse[0, head, i] == pytest.approx(math.log(total) if keys else -math.inf, abs=1e-12)
        expected = sum((weights[j] / total * v[0, group, j] for j in keys), torch.zeros(3, dtype=torch.float64))
        assert torch.allclose(out[0, head, i], expected, atol=1e-12)


# Against the oracle


@by_name(CASES.values())
@pytest.mark.parametrize("impl", OURS)
def test_float32(impl, case):
    """Every second case also has a gradient of the logsumexp; for the two implementations, alternately."""
    through_lse = (list(CASES).index(case.name) + OURS.index(impl)) % 2 == 0
    with poisoned_memory():
        check(implementation(impl), case, torch.float32, through_lse=through_lse)


LOW_PRECISION = [
    (impl, dtype, case)
    for (i, impl), (j, dtype), (n, case) in itertools.product(
        enumerate(OURS), enumerate((torch.float16, torch.bfloat16)), enumerate(CASES.values())
    )
    if case in FEW or n % 8 == 4 * ((i + j) % 2)
]
"""A few cases in both dtypes, and every fourth in one: for the two implementations, alternately."""


@pytest.mark.parametrize(("impl", "dtype", "case"), LOW_PRECISION, ids=lambda value: getattr(value, "name", str(value)))
def test_low_precision(impl, dtype, case):
    # Some CPUs emulate bf16, hundreds of times slower than fp32: one sequence and head, unless heads share keys.
    is_plain = dtype == torch.bfloat16 and case.heads == case.kv_heads
    with torch.backends.mkldnn.flags(enabled=False):  # it emulates fp16 on some CPUs, where torch's own matmul does not
        check(implementation(impl), replace(case, batch=1, heads=1, kv_heads=1) if is_plain else case, dtype)


@by_name(CASES.values())
def test_sdpa(case):
    """On a CPU "auto" is SDPA, too."""
    check(without_lse("auto" if case in FEW else "sdpa"), case, torch.float32)


@by_name(FEW)
@pytest.mark.parametrize("impl", OURS)
def test_gradient_of_the_logsumexp_alone(impl, case):
    inputs = make_inputs(case, torch.float64, through_lse=True)
    q, k = inputs.q.requires_grad_(), inputs.k.requires_grad_()
    _, lse = implementation(impl)(q, k, inputs.v, **case.mask)
    _, truth = naive(q, k, inputs.v, visible(case), case.scale)
    found, expected = (torch.autograd.grad(x, (q, k), inputs.dlse) for x in (lse, truth))
    assert all(relative_error(*pair) < 1e-10 for pair in zip(found, expected, strict=True))


SIDES = st.none() | st.integers(0, 70)


@st.composite
def random_cases(draw):
    len_q, len_k = draw(st.integers(0, 140)), draw(st.integers(0, 140))
    if draw(st.booleans()):
        len_k = len_q
    is_causal = draw(st.sampled_from([False, True, "top-left", "bottom-right"]))
    aligned = len_q == len_k or isinstance(is_causal, str)
    window = draw(st.none() | st.integers(0, 70) | st.tuples(SIDES, SIDES)) if aligned else None
    scale = draw(st.none() | st.floats(-2, 2))
    kv_heads = draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 3))
    return Case(
        len_q, len_k, draw(st.integers(1, 12)), is_causal, window, scale, draw(st.integers(0, 2)), heads, kv_heads
    )


@given(case=random_cases(), seed=st.integers(0, 1000), through_lse=st.booleans())
@settings(max_examples=60, deadline=None)
def test_random_shapes_and_masks(case, seed, through_lse):
    for impl in OURS:
        check(implementation(impl), case, torch.float64, seed=seed, through_lse=through_lse)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("impl", OURS)
def test_gradients_by_finite_differences(impl, is_causal):
    inputs = make_inputs(Case(3, 4, 2, heads=2, kv_heads=1), torch.float64)
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    assert torch.autograd.gradcheck(lambda q, k, v: implementation(impl)(q, k, v, is_causal=is_causal), leaves)


# Edges


@by_name(
    [BLIND, Case(113, 203, is_causal="bottom-right", window=3), Case(239, 17, is_causal="top-left", window=(9, 0))]
)
@pytest.mark.parametrize("through_lse", [False, True], ids=["out", "out+lse"])
@pytest.mark.parametrize("impl", OURS)
def test_unseen_rows_and_keys_give_exactly_zero(impl, through_lse, case):
    """A rounding error is within the tolerance elsewhere; here the values are 0, not nearly so."""
    inputs = make_inputs(case, torch.float32, through_lse=through_lse)
    with poisoned_memory():
        found = differentiate(lambda q, k, v: implementation(impl)(q, k, v, **case.mask), inputs)
    blind, unseen = (~visible(case).any(dim) for dim in (1, 0))
    assert blind.any() or unseen.any()
    assert not any(found[name][:, :, blind].any() for name in ("out", "dq"))
    assert not any(found[name][:, :, unseen].any() for name in ("dk", "dv"))


@pytest.mark.parametrize("grouped", [False, True])
@by_name([Case(5, 5, 8, batch=0), Case(0, 5, 8), Case(5, 0, 8), Case(0, 0, 8), Case(5, 0, 8, "bottom-right", 3)])
@pytest.mark.parametrize("impl", EVERY)
def test_empty(impl, case, grouped):
    case = Case(**{**vars(case), "heads": 4, "kv_heads": 2 if grouped else 4})
    function = implementation(impl) if impl in OURS else without_lse(impl)
    with poisoned_memory():
        check(function, case, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("impl", OURS)
def test_large_logits(impl, dtype):
    """exp of a score overflows unless the row's maximum goes first. In fp32, too, plain PyTorch sets the tolerance."""
    for case in (PLAIN, BLIND):
        check(implementation(impl), case, dtype, magnitude=50, large=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1, 2, 5, 17])
@pytest.mark.parametrize("impl", OURS)
def test_short_and_large(impl, length, dtype):
    """Keys beyond the end, at score 0, overflow against a very negative logsumexp: FlashAttention had NaN in dQ."""
    for is_causal in (False, True):
        check(implementation(impl), Case(length, length, is_causal=is_causal), dtype, magnitude=5, large=True)


# Memory layouts


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("impl", EVERY)
def test_strides(impl, layout):
    function = implementation(impl) if impl in OURS else without_lse(impl)
    check(function, PLAIN, torch.float32, layout=layout, dout_layout=layout)
    check(function, PLAIN, torch.float32, layout="heads_inside", dout_layout=layout)


@pytest.mark.parametrize("impl", OURS)
def test_inputs_are_not_modified(impl):
    inputs = make_inputs(BLIND, torch.float32, through_lse=True)
    before = {name: x.clone() for name, x in vars(inputs).items()}
    differentiate(lambda q, k, v: implementation(impl)(q, k, v, **BLIND.mask), inputs)
    assert all(torch.equal(x, before[name]) for name, x in vars(inputs).items())


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "kv", ""])
@pytest.mark.parametrize("impl", EVERY)
def test_only_some_gradients_wanted(impl, wanted):
    inputs = make_inputs(PLAIN, torch.float32)
    every = differentiate(lambda q, k, v: without_lse(impl)(q, k, v, **PLAIN.mask), inputs)
    leaves = {name: getattr(inputs, name).detach().requires_grad_(name in wanted) for name in "qkv"}
    out = attention(*leaves.values(), impl=impl, is_causal=True)
    assert torch.allclose(out, every["out"], atol=1e-6)
    assert out.requires_grad == bool(wanted)
    if wanted:
        out.backward(inputs.dout)
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == (name in wanted)
        assert leaf.grad is None or relative_error(leaf.grad, every[f"d{name}"].double()) < 1e-6


# Autograd, autocast, torch.compile


@pytest.mark.parametrize("impl", OURS)
def test_backward_is_repeatable(impl):
    inputs = make_inputs(CASES["2x4-kv2-113x113-d64-causal"], torch.float32)
    runs = [differentiate(implementation(impl, deterministic=True), inputs) for _ in range(3)]
    assert all(torch.equal(run[name], runs[0][name]) for run in runs for name in run)


@pytest.mark.parametrize("impl", EVERY)
def test_autocast(impl):
    check_autocast(lambda q, k, v: attention(q, k, v, impl=impl, is_causal=True), PLAIN)


@by_name([PLAIN, BLIND, CASES["2x4-kv2-113x113-d64-causal"]])
def test_compiled_in_one_graph(case):
    torch._dynamo.reset()
    function = implementation("flash_torch")
    compiled = torch.compile(lambda q, k, v: function(q, k, v, **case.mask), fullgraph=True, backend="aot_eager")
    inputs = make_inputs(case, torch.float32, through_lse=True)
    wrong = compare(differentiate(compiled, inputs), inputs, case)
    assert not wrong, wrong


def test_constants_carry_the_mark_of_torchs_own_decorator():
    def ours() -> None: ...

    def torchs() -> None: ...

    constant_when_compiled(ours)
    torch.compiler.assume_constant_result(torchs)
    assert vars(ours) == vars(torchs) != {}


# The course's interface


@pytest.mark.parametrize("leading", [(3,), (2, 3), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("lengths", [(113, 113), (64, 128), (33, 5)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_course_function(leading, lengths, is_causal):
    case = Case(*lengths, d=40, is_causal=is_causal, heads=math.prod(leading), kv_heads=math.prod(leading))
    inputs = make_inputs(case, torch.float32)

    def function(q, k, v):
        q, k, v = (x.reshape(*leading, *x.shape[2:]) for x in (q, k, v))
        out = FlashAttentionTorch.apply(q, k, v, is_causal)
        assert out.shape == q.shape
        (lse,) = [x for x in out.grad_fn.saved_tensors if x.shape == q.shape[:-1]]
        return out.flatten(0, -3)[None], lse.flatten(0, -2)[None]

    wrong = compare(differentiate(function, inputs), inputs, case)
    assert not wrong, wrong


def test_course_function_is_not_causal_by_default_and_has_no_gradient_for_is_causal():
    inputs = make_inputs(Case(20, 20, d=16), torch.float32)
    leaves = [x[0].requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out, causal = FlashAttentionTorch.apply(*leaves), FlashAttentionTorch.apply(*leaves, True)
    assert torch.equal(out, FlashAttentionTorch.apply(*leaves, False))
    assert not torch.allclose(out, causal)
    out.sum().backward()
    assert leaves[0].grad.isfinite().all()
    with torch.no_grad():
        *gradients, last = causal.grad_fn.apply(inputs.dout[0])
    assert last is None
    assert [x.shape for x in gradients] == [x.shape for x in leaves]


# Bad inputs

Q = (2, 4, 5, 8)
BAD = {
    "batch": ({"k": (7, 4, 5, 8), "v": (7, 4, 5, 8)}, "7"),
    "length of k and v": ({"v": (2, 4, 6, 8)}, "6"),
    "head dimension": ({"k": (2, 4, 5, 9), "v": (2, 4, 5, 9)}, "9"),
    "head dimension of v": ({"v": (2, 4, 5, 9)}, "9"),
    "heads of k and v": ({"v": (2, 11, 5, 8)}, "11"),
    "heads that do not divide": ({"k": (2, 3, 5, 8), "v": (2, 3, 5, 8)}, "3"),
    "more heads of k than of q": ({"k": (2, 12, 5, 8), "v": (2, 12, 5, 8)}, "12"),
    "no heads of k": ({"k": (2, 0, 5, 8), "v": (2, 0, 5, 8)}, "0"),
    "head dimension above 256": (dict.fromkeys("qkv", (1, 1, 5, 257)), "257"),
    "head dimension 0": (dict.fromkeys("qkv", (1, 1, 5, 0)), "0"),
    "three dimensions": (dict.fromkeys("qkv", (4, 5, 8)), "(4, 5, 8)"),
    "five dimensions": (dict.fromkeys("qkv", (1, 2, 4, 5, 8)), "(1, 2, 4, 5, 8)"),
    "k of three dimensions": ({"k": (4, 5, 8)}, "(4, 5, 8)"),
    "no dimensions": (dict.fromkeys("qkv", ()), "()"),
    "dtype of k": ({"k": torch.zeros(Q, dtype=torch.float16)}, "float16"),
    "dtype of v": ({"v": torch.zeros(Q, dtype=torch.bfloat16)}, "bfloat16"),
    "integers": (dict.fromkeys("qkv", torch.zeros(Q, dtype=torch.int64)), "int64"),
    "booleans": (dict.fromkeys("qkv", torch.zeros(Q, dtype=torch.bool)), "bool"),
    "complex numbers": (dict.fromkeys("qkv", torch.zeros(Q, dtype=torch.complex64)), "complex64"),
    "device of k": ({"k": torch.zeros(Q, device="meta")}, "meta"),
    "device of v": ({"v": torch.zeros(Q, device="meta")}, "meta"),
    "causal word": ({"is_causal": "upper-left"}, "upper-left"),
    "empty causal word": ({"is_causal": ""}, "''"),
    "negative window": ({"window": -1}, "-1"),
    "negative side": ({"window": (3, -2)}, "-2"),
    "three sides": ({"window": (1, 2, 3)}, "(1, 2, 3)"),
    "one side": ({"window": (1,)}, "(1,)"),
    "half a key": ({"window": 2.5}, "2.5"),
    "half a key on one side": ({"window": (1.5, None)}, "1.5"),
    "window in words": ({"window": "16"}, "16"),
    "window on unequal lengths": ({"q": (2, 4, 9, 8), "window": 3}, "9"),
    "window on unequal lengths, causal": ({"q": (2, 4, 9, 8), "window": 3, "is_causal": True}, "9"),
    "infinite scale": ({"scale": math.inf}, "inf"),
    "scale that is not a number": ({"scale": math.nan}, "nan"),
}


@pytest.mark.parametrize(("arguments", "named"), BAD.values(), ids=BAD)
def test_bad_inputs(arguments, named):
    merged = {**dict.fromkeys("qkv", Q), **arguments}
    merged = {name: torch.zeros(x) if name in "qkv" and isinstance(x, tuple) else x for name, x in merged.items()}
    with pytest.raises(ValueError, match=re.escape(named)) as caught:
        attention(**merged)
    assert type(caught.value) is ValueError
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", ["q", None, [1.0], np.zeros(Q)], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "documents"])
def test_an_argument_that_is_no_tensor(wrong, name, packed):
    tensors = {**dict.fromkeys("qkv", torch.zeros(Q[1:] if packed else Q)), name: wrong}
    offsets = torch.tensor([0, Q[1]], dtype=torch.int32) if packed else None
    message = f"^attention takes tensors, and {name} is of type {type(wrong).__name__}$"
    with pytest.raises(TypeError, match=message):
        attention(**tensors, cu_seqlens_q=offsets)


@pytest.mark.parametrize("impl", ["flash", "FLASH_TORCH", ""])
def test_unknown_implementation(impl):
    with pytest.raises(ValueError, match=re.escape(repr(impl))) as caught:
        attention(*torch.zeros(3, *Q), impl=impl)
    assert all(name in str(caught.value) for name in (*EVERY, "flash_triton"))


def test_registry_and_flags_list_the_same_implementations():
    assert list(ATTENTIONS) == ["auto", *IMPLEMENTATIONS]


def test_sdpa_has_no_logsumexp():
    with pytest.raises(ValueError, match="sdpa"):
        attention(*torch.zeros(3, *Q), impl="sdpa", return_lse=True)


@pytest.mark.parametrize(
    "shapes", [((5, 8),) * 3, ((4, 5, 8), (2, 5, 8), (2, 5, 8)), ((2, 5, 8), (2, 5, 9), (2, 5, 9))]
)
def test_course_function_takes_equal_heads(shapes):
    with pytest.raises(ValueError, match=re.escape(str(shapes[1]))) as caught:
        FlashAttentionTorch.apply(*map(torch.zeros, shapes))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter takes CPU tensors")
def test_triton_needs_a_gpu():
    with pytest.raises(ValueError, match="cpu") as caught:
        attention(*torch.zeros(3, *Q), impl="flash_triton")
    assert "\n" not in str(caught.value)


def test_the_triton_function_on_a_cpu_names_the_other(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q = torch.randn(2, 8, 16)
    with pytest.raises(ValueError, match=r"on the CPU; use FlashAttentionTorch$"):
        FlashAttentionTriton.apply(q, q, q, True)
