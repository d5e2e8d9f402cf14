"""Attention inside packed documents on the CPU, against a loop over documents in float64."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.kernels import Packing, attention
from cs336_systems.kernels.flash import varlen
from cs336_systems.kernels.flash.band import Band
from cs336_systems.kernels.flash.packing import Document, PackedMask
from tests.unit.kernels.attention_cases import differentiate, poisoned_memory, relative_error
from tests.unit.kernels.packed_cases import (
    PACKED,
    Packed,
    compare_packed,
    looped,
    make_packed,
    offsets_of,
    packed_failures,
    random_packed,
)

OURS = ("reference", "flash_torch")
CAUSAL = Packed((33, 0, 64, 1, 17), is_causal=True, d=16)


def implementation(impl, **options):
    return lambda q, k, v, **call: attention(q, k, v, impl=impl, return_lse=True, **options, **call)


def assert_right(impl, case, dtype, **options):
    with poisoned_memory():
        wrong = packed_failures(implementation(impl), case, dtype, **options)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("number", range(len(PACKED)))
@pytest.mark.parametrize("impl", OURS)
def test_cases(impl, number):
    assert_right(impl, PACKED[number], torch.float64 if number % 2 else torch.float32, through_lse=number % 3 == 0)


@pytest.mark.parametrize("impl", OURS)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_random_packings(impl, seed):
    assert_right(impl, random_packed(seed), torch.float64, seed=seed, through_lse=seed % 2 == 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("impl", OURS)
def test_low_precision(impl, dtype):
    with torch.backends.mkldnn.flags(enabled=False):  # it emulates 16 bits on some CPUs
        assert_right(impl, CAUSAL, dtype)


@pytest.mark.parametrize("impl", OURS)
def test_the_gradient_of_the_logsumexp_alone(impl):
    inputs = make_packed(CAUSAL, torch.float64, through_lse=True)
    inputs.dout.zero_()
    expected, _ = looped(CAUSAL, inputs)
    q, k = inputs.q.requires_grad_(), inputs.k.requires_grad_()
    _, lse = implementation(impl)(q, k, inputs.v, **CAUSAL.offsets(), **CAUSAL.mask)
    found = torch.autograd.grad(lse, (q, k), inputs.dlse)
    assert all(relative_error(x, expected[name]) < 1e-10 for name, x in zip(("dq", "dk"), found, strict=True))


def test_equal_documents_are_a_batch():
    lengths, heads = (24,) * 3, 4
    case = Packed(lengths, d=16, is_causal=True, heads=heads, kv_heads=heads)
    inputs = make_packed(case, torch.float32)
    batch = [x.view(3, 24, heads, 16).transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v)]
    out = attention(inputs.q, inputs.k, inputs.v, is_causal=True, **case.offsets())
    expected = attention(*batch, is_causal=True, impl="reference")
    assert torch.allclose(out.view(3, 24, heads, 16).transpose(1, 2), expected, atol=1e-5)


@pytest.mark.parametrize("impl", OURS)
def test_a_packing_gives_the_same_as_its_offsets(impl):
    case = Packed((20, 0, 40, 7), (31, 5, 0, 90), is_causal="bottom-right", d=16)
    inputs = make_packed(case, torch.float32)
    packing = Packing(*case.offsets().values())
    found = [
        differentiate(lambda q, k, v, offsets=offsets: implementation(impl)(q, k, v, **offsets, **case.mask), inputs)
        for offsets in (case.offsets(), {"cu_seqlens_q": packing})
    ]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_offsets_may_be_views():
    spread = torch.zeros(CAUSAL.offsets()["cu_seqlens_q"].shape[0], 3, dtype=torch.int32)
    spread[:, 1] = CAUSAL.offsets()["cu_seqlens_q"]
    inputs = make_packed(CAUSAL, torch.float32)
    found = attention(inputs.q, inputs.k, inputs.v, cu_seqlens_q=spread[:, 1], **CAUSAL.mask)
    assert torch.equal(found, attention(inputs.q, inputs.k, inputs.v, **CAUSAL.offsets(), **CAUSAL.mask))


def test_parts_of_one_tensor_keep_its_layout():
    """q, k and v of a model are often slices of one tensor; outputs and gradients are (tokens, heads, d) without
    gaps."""
    qkv = torch.randn(50, 3, 2, 16, requires_grad=True)
    q, k, v = qkv.unbind(1)
    out, lse = implementation("flash_torch")(q, k, v, cu_seqlens_q=offsets_of((20, 30)))
    assert out.is_contiguous()
    assert lse.shape == (2, 50)
    assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape


def test_autocast():
    inputs = make_packed(CAUSAL, torch.float32)
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(*leaves, **CAUSAL.offsets(), **CAUSAL.mask)
    assert out.dtype == torch.bfloat16
    gradients = torch.autograd.grad(out, leaves, inputs.dout.bfloat16())
    found = {"out": out.detach(), **{f"d{name}": x.bfloat16() for name, x in zip("qkv", gradients, strict=True)}}
    assert compare_packed(found, inputs.cast(torch.bfloat16), CAUSAL) == []


# As operators


@pytest.mark.parametrize("impl", OURS)
def test_compiled(impl):
    torch._dynamo.reset()
    case = Packed((20, 0, 9), (20, 4, 30), is_causal="bottom-right", d=8)
    inputs = make_packed(case, torch.float32)

    def run(q, k, v, cu_seqlens_q, cu_seqlens_k):
        both = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        out, lse = implementation(impl)(q, k, v, **both, **case.mask)
        return out * 2, lse

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    found = differentiate(lambda q, k, v: compiled(q, k, v, *case.offsets().values()), inputs)
    expected = differentiate(lambda q, k, v: run(q, k, v, *case.offsets().values()), inputs)
    assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in found)


def test_operator_checks():
    case = Packed((5, 0, 9), d=8)
    inputs = make_packed(case, torch.float32)
    offsets = case.offsets()["cu_seqlens_q"]
    tensors = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    operator = torch.ops.cs336.flash_torch_varlen_forward.default
    torch.library.opcheck(operator, (*tensors, offsets, offsets, 0.3, None, 0, False))


def test_flops_are_those_of_equal_documents():
    from torch.utils.flop_counter import FlopCounterMode

    q = torch.zeros(64, 2, 8, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        attention(q, q, q, cu_seqlens_q=offsets_of((16,) * 4), impl="flash_torch").sum().backward()
    assert counter.get_total_flops() == 7 * 2 * 2 * 64 * 16 * 8


# Which implementation


def test_auto_on_a_cpu_is_the_tiled_version():
    q = torch.zeros(1, 2, 9, 8)
    assert varlen.choose(q, q, PackedMask(Band(), False), 1, False) == "flash_torch"


def test_sdpa_refuses():
    with pytest.raises(ValueError, match=r"impl='sdpa'.*packed.*impl='auto'"):
        attention(*torch.zeros(3, 9, 2, 8), cu_seqlens_q=offsets_of((9,)), impl="sdpa")


# Masks


def test_the_band_of_a_document():
    document = Document(slice(10, 15), slice(3, 11))
    assert PackedMask(Band(-4, 0), False).of(document) == Band(-4, 0)
    assert PackedMask(Band(-4, 0), True).of(document) == Band(-1, 3)
    assert PackedMask(Band(None, 2), True).of(document) == Band(None, 5)


# Errors

Q = torch.zeros(9, 2, 8)
GOOD = offsets_of((4, 5))
WRONG = {
    "a list": ((Q, Q, Q), {"cu_seqlens_q": [0, 9]}, "cu_seqlens_q.*list.*torch.tensor"),
    "int64": ((Q, Q, Q), {"cu_seqlens_q": GOOD.long()}, r"cu_seqlens_q.*int64.*\.to\(torch.int32\)"),
    "two dimensions": ((Q, Q, Q), {"cu_seqlens_q": GOOD[None]}, r"cu_seqlens_q.*\(1, 3\)"),
    "no offsets": ((Q, Q, Q), {"cu_seqlens_q": GOOD[:0]}, r"cu_seqlens_q.*\(0,\)"),
    "another device": ((Q, Q, Q), {"cu_seqlens_q": GOOD.to("meta")}, r"cu_seqlens_q.*cpu.*meta.*\.to\(q.device\)"),
    "keys' device": (
        (Q, Q, Q),
        {"cu_seqlens_q": GOOD, "cu_seqlens_k": GOOD.to("meta")},
        r"cu_seqlens_k.*meta.*\.to\(q.device\)",
    ),
    "a batch": ((Q[None],) * 3, {"cu_seqlens_q": GOOD}, r"3 dimensions.*\(1, 9, 2, 8\).*leave out cu_seqlens_q"),
    "keys alone": ((Q, Q, Q), {"cu_seqlens_k": GOOD}, "cu_seqlens_k.*without cu_seqlens_q"),
    "more keys": ((Q, Q.repeat(2, 1, 1), Q.repeat(2, 1, 1)), {"cu_seqlens_q": GOOD}, "9 queries and 18.*cu_seqlens_k"),
    "other documents": ((Q, Q, Q), {"cu_seqlens_q": GOOD, "cu_seqlens_k": GOOD[:2]}, "2 and 1.*repeat an offset"),
    "offsets twice": ((Q, Q, Q), {"cu_seqlens_q": Packing(GOOD), "cu_seqlens_k": GOOD}, "leave out cu_seqlens_k"),
    "no alignment": (
        (Q, Q, Q),
        {"cu_seqlens_q": GOOD, "cu_seqlens_k": GOOD.clone(), "window": 3},
        "window=3.*alignment.*bottom-right",
    ),
    "an unknown name": ((Q, Q, Q), {"cu_seqlens_q": GOOD, "impl": "best"}, "'best'.*choose one of: auto, reference"),
    "offsets that begin late": ((Q, Q, Q), {"cu_seqlens_q": GOOD + 1}, "cu_seqlens_q must begin with 0.*1, 5, 10"),
    "offsets that decrease": ((Q, Q, Q), {"cu_seqlens_q": offsets_of((4, -2, 5))}, "never decrease.*0, 4, 2, 7"),
    "offsets beyond the end": ((Q, Q, Q), {"cu_seqlens_q": offsets_of((4, 50))}, "9 tokens.*0, 4, 54"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_value_and_the_way_out(name):
    tensors, options, message = WRONG[name]
    with pytest.raises(ValueError, match=message) as caught:
        attention(*tensors, **options)
    assert "\n" not in str(caught.value)
    assert re.search("[;:]", str(caught.value))
