"""The Hopper kernels without a GPU: when they are chosen, and how their work is divided.

tests/gpu/test_gpu_attention.py tests their results, test_kernel_resources.py the compiled code.
"""

import importlib
import math
import os
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.kernels import attention
from cs336_systems.kernels.flash.band import Band
from cs336_systems.predict.attention_programs import causal_tiles, heads_of_part, parts_of_group

module = importlib.import_module("cs336_systems.kernels.flash.dispatch")  # the package has a function of that name

needs_gluon = pytest.mark.skipif(
    find_spec("triton") is None or find_spec("triton.experimental.gluon") is None, reason="needs triton with Gluon"
)

# -- when they are chosen ---------------------------------------------------------------------------------------------


CAUSAL = Band(None, 0)


@pytest.fixture
def on_a_hopper_gpu(monkeypatch):
    """Make the dispatcher believe that the tensors' device is a Hopper GPU."""
    for name in ("triton_problem", "gluon_problem"):
        monkeypatch.setattr(module, name, lambda device: None)


def on_a_gpu(*shape):
    """Return a stand-in for a tensor of a Hopper GPU."""
    q = mock.Mock(is_cuda=True, dtype=torch.bfloat16, shape=shape, device=torch.device("cpu"))
    q.numel.return_value = math.prod(shape)
    return q


def problem(dtype=torch.bfloat16, len_q=2048, len_k=2048, d=64, heads=16):
    q, k = (torch.empty(4, heads, length, d, dtype=dtype, device="meta") for length in (len_q, len_k))
    return module.hopper_problem(q, k, dtype)


@pytest.mark.parametrize("d", [40, 64, 72, 80, 96, 128, 136, 192, 256])
def test_supported_calls(on_a_hopper_gpu, d):
    assert problem(d=d) is None


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"dtype": torch.float32}, "float32"),
        ({"d": 32}, "32"),
        ({"d": 68}, "68"),
        ({"d": 132}, "132"),
        ({"d": 264}, "264"),
        ({"len_q": 0}, "queries"),
        ({"len_q": 1, "heads": 1 << 21}, "multiple of 128"),
        ({"len_k": 0}, "key"),
    ],
    ids=str,
)
def test_unsupported_calls(on_a_hopper_gpu, arguments, reason):
    assert reason in problem(**arguments)


@pytest.mark.parametrize(
    ("length", "d", "name"),
    [
        *((4096, 64, "flash_hopper"), (1024, 64, "flash_triton"), (1024, 128, "flash_triton")),
        *((1024, 136, "flash_hopper"), (1024, 256, "flash_hopper"), (512, 256, "flash_triton")),
        (4096, 36, "flash_triton"),
    ],
)
def test_large_problems_use_the_hopper_kernels(on_a_hopper_gpu, length, d, name):
    elements = 4 * 1024 * length
    assert module.best_fused(elements, length, d, torch.device("cpu")) == name
    q = on_a_gpu(1, elements // length // d, length, d)
    assert module.choose(q, q, Band(-length, 0), return_lse=True) == name


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter takes CPU tensors")
def test_cpu_tensors_are_refused():
    with pytest.raises(ValueError, match=r"flash_hopper.*cpu") as caught:
        attention(*torch.zeros(3, 1, 2, 5, 64), impl="flash_hopper")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("d", "band", "name"),
    [
        *((64, CAUSAL, "flash_triton"), (64, Band(), "flash_triton"), (64, Band(-1024, 0), "flash_hopper_repeatable")),
        *((72, CAUSAL, "flash_hopper_repeatable"), (256, CAUSAL, "flash_hopper_repeatable")),
    ],
)
def test_deterministic_calls_use_the_repeatable_kernels_that_are_faster(on_a_hopper_gpu, d, band, name):
    q = on_a_gpu(4, 16, 16384, d)
    assert module.choose(q, q, band, deterministic=True) == name
    assert module.choose(q, q, band) == "flash_hopper"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("deterministic", "name"), [(False, "flash_hopper"), (True, "flash_hopper_repeatable")])
def test_the_hopper_kernels_with_and_without_deterministic(on_a_hopper_gpu, monkeypatch, deterministic, name, packed):
    from cs336_systems.kernels.flash import varlen

    asked = []
    monkeypatch.setattr(module, "fused", lambda name, *_: asked.append(name) or (lambda q, k, v: q))
    monkeypatch.setitem(
        module.IMPLEMENTATIONS,
        name,
        module.IMPLEMENTATIONS[name]._replace(build=lambda *_: lambda *_: asked.append(name)),
    )
    monkeypatch.setattr(
        varlen, "kernels_for", lambda name, *_: asked.append(name) or mock.Mock(forward=lambda q, *_: (q, q))
    )
    q = torch.zeros(100, 2, 64, dtype=torch.bfloat16)
    if packed:
        offsets = {"cu_seqlens_q": torch.tensor([0, 60, 100], dtype=torch.int32)}
        attention(q, q, q, **offsets, impl="flash_hopper", deterministic=deterministic)
    else:
        q = q.transpose(0, 1)[None]
        attention(q, q, q, impl="flash_hopper", deterministic=deterministic)
    assert asked == [name]


class TracedError(Exception):
    pass


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_one_node_in_a_compiled_graph(on_a_hopper_gpu, dynamic):
    """With dynamic shapes all sizes are symbols: checks of shapes must be traceable."""
    torch._dynamo.reset()
    seen = []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        raise TracedError

    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, is_causal=True, impl="flash_hopper"),
        fullgraph=True,
        dynamic=dynamic,
        backend=backend,
    )
    with pytest.raises(Exception, match="TracedError"):
        compiled(*torch.zeros(3, 2, 4, 384, 64, dtype=torch.bfloat16))
    assert any("flash_hopper_forward" in name for name in seen), seen


# -- how work is divided -----------------------------------------------------------------------------------------------


@needs_gluon
@settings(deadline=None)  # the first call imports Triton
@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_division_by_multiplication(n, x):
    from cs336_systems.kernels.flash.hopper_launch import reciprocal

    multiplier, shift = reciprocal(n)
    # Always beyond 31 bits: one kernel serves all numbers. Below 32, so that products fit 63.
    assert 2**31 <= multiplier < 2**32
    for value in {x, x // n * n, max(0, x // n * n - 1), 2**31 - 1}:
        assert value * multiplier >> shift == value // n


@needs_gluon
@pytest.mark.parametrize("fit", [0, 1, 5, 31, 1000])
@pytest.mark.parametrize(("batch", "heads", "blocks"), [(1, 16, 128), (4, 12, 11), (1, 37, 16), (2, 1, 1)])
def test_every_block_of_every_head_is_assigned_once(batch, heads, blocks, fit):
    """Mirrors the kernel's `assignment`."""
    from cs336_systems.kernels.flash.hopper_launch import order

    units, section, of_heads, *divisors = order(blocks, batch, heads, fit)
    assert (units, of_heads) == (section * blocks, heads)
    assert batch * heads % section == 0
    assert section <= max(2 * fit, 1) or heads == 37  # a prime number of them: all, or one by one
    assert order(blocks, batch, heads, fit, 3 * blocks).section >= min(3, batch * heads)

    def quotient(x, i):
        return x * divisors[2 * i] >> divisors[2 * i + 1]

    found = []
    for unit in range(batch * heads * blocks):
        number = quotient(unit, 0)
        inside = unit - number * units
        block = quotient(inside, 1)
        index = number * section + inside - block * section
        found.append((quotient(index, 2), index - quotient(index, 2) * heads, block))
    assert len(found) == len(set(found))
    assert max(found) == (batch - 1, heads - 1, blocks - 1)


@needs_gluon
@pytest.mark.parametrize(
    ("d", "tile", "depth"),
    [(40, 64, 64), (64, 64, 64), (72, 128, 80), (80, 128, 80), (88, 128, 96), (96, 128, 96), (104, 128, 128)],
)
def test_head_dims_are_padded(d, tile, depth):
    from cs336_systems.kernels.flash.hopper_launch import Problem

    q = torch.empty(1, 2, 256, d, dtype=torch.bfloat16, device="meta")
    problem = Problem(q, q, q, CAUSAL)
    assert (problem.block_d, problem.d_used) == (tile, depth)


@needs_gluon
@pytest.mark.parametrize("len_q", [1, 64, 65, 128, 192, 500, 16384])
@pytest.mark.parametrize("hi", [0, 100, None])
def test_every_query_is_in_one_block(len_q, hi):
    """Mirrors the kernel's indices."""
    from cs336_systems.kernels.flash.hopper_launch import ROWS, Problem

    q = torch.empty(1, 2, len_q, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(1, 2, 20000, 64, dtype=torch.bfloat16, device="meta")
    plan = Problem(q, k, k, Band(None, hi)).plan_forward((q, k, k, q)).main
    blocks, _, shift, _, _, causal, _, _, _, warpgroups = plan.after[:10]
    assert causal == (hi is not None)
    begins = []
    for block in range(blocks):
        row = block * warpgroups * ROWS - shift
        end = min(row + warpgroups * ROWS, -(-len_q // ROWS) * ROWS)
        begins += [own for own in range(row, row + warpgroups * ROWS, ROWS) if 0 <= own < end]
    assert begins == list(range(0, len_q, ROWS))
    if hi is not None:  # the block that is not full is the one that sees the fewest keys
        assert blocks * warpgroups * ROWS - shift == -(-len_q // ROWS) * ROWS


@needs_gluon
@pytest.mark.parametrize(
    ("length", "d", "band", "is_small"),
    [
        (4096, 64, CAUSAL, True),
        (8192, 64, CAUSAL, False),
        (16384, 64, Band(-511, 0), True),
        (16384, 64, Band(-12000, 0), False),
        (1024, 64, Band(), True),
        (2048, 64, Band(), False),
        (512, 96, CAUSAL, True),
        (1024, 128, CAUSAL, False),
    ],
)
def test_queries_that_see_few_keys_have_small_programs(length, d, band, is_small):
    from cs336_systems.kernels.flash.hopper_launch import SHORT, Problem

    q = torch.empty(1, 2, length, d, dtype=torch.bfloat16, device="meta")
    plan = Problem(q, q, q, band).plan_forward((q, q, q, q)).main
    assert ("maxnreg" in plan.options) == is_small
    if is_small:
        shape = SHORT[64 if d <= 64 else 128]
        threads = 128 * (shape.warpgroups + 1)
        assert shape.residents * threads * plan.options["maxnreg"] <= 1 << 16


@needs_gluon
@pytest.mark.parametrize("length", [1000, 2048, 6400])
@pytest.mark.parametrize("group", [2, 3, 4, 5, 6, 7, 8, 12])
@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 1), (1, 2), (1, 4), (8, 4)])
def test_the_heads_of_a_group_are_divided_among_programs(batch, kv_heads, group, length):
    """Mirrors `split_of_program`, `part_of` and the kernel's choice between equal and unequal parts: each query head of
    a block of keys has one program."""
    from cs336_systems.kernels.flash.hopper_launch import KEYS, Problem

    k = torch.empty(batch, kv_heads, length, 128, dtype=torch.bfloat16, device="meta")
    q = torch.empty(batch, kv_heads * group, length, 128, dtype=torch.bfloat16, device="meta")
    parts = parts_of_group(group, 128, causal_tiles(length, 128), batch * kv_heads, 132)
    plans = Problem(q, k, k, CAUSAL).plan_backward(q, k, k, q, q, q, k, k)
    *_, unsplit, splits = plans.main.after[: plans.main.after.index(True)]
    assert plans.main.after[-2:] == (group, heads_of_part(group, parts)), "predicted times count the same programs"
    largest, units = plans.main.after[-1], batch * kv_heads * -(-length // KEYS)
    assert (plans.split is None) == (largest == group)
    assert plans.main.programs == units * parts
    if plans.split is None:
        return
    assert (unsplit, splits) == (0, parts)
    assert plans.split.numbers == plans.main.programs * 2 * KEYS * 128
    visited: list[int] = []
    for part in (program % splits for program in range(plans.main.programs)):
        if group % largest != 0:
            first, count = group * part // splits, group * (part + 1) // splits - group * part // splits
        else:
            first, count = part * largest, largest
        assert 1 <= count <= largest
        visited += range(first, first + count)
    assert sorted(visited) == sorted(list(range(group)) * units)


# -- backward in passes: head dims above 128, and repeatable gradients -------------------------------------------------


@needs_gluon
@pytest.mark.parametrize(("d", "columns"), [(136, 192), (192, 192), (200, 256), (256, 256)])
def test_each_gradient_of_wide_heads_has_a_pass(d, columns):
    """Programs own 128 queries or keys, and scratch memory has no sums of dQ."""
    from cs336_systems.kernels.flash.hopper_launch import BackwardInPasses, Problem

    q = torch.empty(2, 6, 1000, d, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 2, 700, d, dtype=torch.bfloat16, device="meta")
    problem = Problem(q, k, k, CAUSAL)
    plans = problem.plan_backward(q, k, k, q, q, q, k, k)
    assert isinstance(plans, BackwardInPasses)
    assert [each.plan.programs for each in plans.passes] == [2 * 6 * 8, 2 * 2 * 6, 2 * 2 * 6]
    assert all(each.plan.after[-3:] == (256, columns, 3) for each in plans.passes)
    assert problem.scratch(q.device).numel() == 2 * (2 * 6 * 1024)


@needs_gluon
@pytest.mark.parametrize(("d", "padded", "columns"), [(64, 64, 64), (72, 128, 80), (128, 128, 128)])
def test_repeatable_gradients_of_keys_and_values_share_a_pass(d, padded, columns):
    """Up to 128; scratch memory has no sums of dQ."""
    from cs336_systems.kernels.flash.hopper_launch import BackwardInPasses, Problem

    q = torch.empty(2, 6, 1000, d, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 2, 700, d, dtype=torch.bfloat16, device="meta")
    problem = Problem(q, k, k, CAUSAL, repeatable=True)
    plans = problem.plan_backward(q, k, k, q, q, q, k, k)
    assert isinstance(plans, BackwardInPasses)
    assert [(each.plan.programs, each.of.results) for each in plans.passes] == [
        (2 * 6 * 8, (0, 0)),
        (2 * 2 * 6, (1, 2)),
    ]
    assert all(each.plan.after[-3:] == (padded, columns, 3) for each in plans.passes)
    assert problem.scratch(q.device).numel() == 2 * (2 * 6 * 1024)


@needs_gluon
def test_more_documents_than_keys():
    from cs336_systems.kernels.flash.hopper_launch import PackedProblem
    from cs336_systems.kernels.flash.packing import PackedMask

    for d in (64, 128, 256):
        q = torch.empty(1, 2, 16, d, dtype=torch.bfloat16, device="meta")
        problem = PackedProblem(q, q, q, PackedMask(CAUSAL, False), 20)
        assert problem.plan_forward((q, q, q, q)).programs > 0


@needs_gluon
def test_packed_documents_of_wide_heads_have_programs_for_every_block():
    from cs336_systems.kernels.flash.hopper_launch import PackedProblem
    from cs336_systems.kernels.flash.packing import PackedMask, most_blocks

    q, k = (torch.empty(1, heads, 5000, 256, dtype=torch.bfloat16, device="meta") for heads in (6, 2))
    problem = PackedProblem(q, k, k, PackedMask(CAUSAL, False), 20)
    passes = problem.plan_backward(q, k, k, q, q, q, k, k).passes
    blocks = most_blocks(128, 5000, 20)
    assert [each.plan.programs for each in passes] == [6 * blocks, 2 * blocks, 2 * blocks]


@needs_gluon
@pytest.mark.parametrize(("band", "is_small"), [(Band(), True), (CAUSAL, False), (Band(-500, None), False)], ids=str)
def test_sections_of_192_columns_are_small_without_a_mask(band, is_small):
    """Measured: see attention_programs.L2_SHARE_192."""
    from cs336_systems.kernels.flash.hopper_launch import Problem, Schedule

    def section(d):
        q = torch.empty(1, 16, 8192, d, dtype=torch.bfloat16, device="meta")
        after = Problem(q, q, q, band).plan_forward((q, q, q, q)).main.after
        return next(x for x in after if isinstance(x, Schedule)).section

    assert section(256) == 4
    assert section(192) == (1 if is_small else 4)


# -- packed documents --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "documents", "band", "name"),
    [
        (32768, 64, CAUSAL, "both"),
        (32768, 256, CAUSAL, "both"),
        (32768, 512, CAUSAL, "wide"),  # short documents
        (32768, 513, CAUSAL, "neither"),
        (32768, 64, Band(-512, 0), "both"),
        (512, 1, CAUSAL, "neither"),  # too few of them to fill a GPU
        (32768, 64, Band(-80, 0), "wide"),
        (32768, 64, Band(-40, 0), "neither"),
    ],
)
def test_long_documents_use_the_hopper_kernels(on_a_hopper_gpu, tokens, documents, band, name):
    """With head dims above and up to 128 ("both"), or only above ("wide")."""
    from cs336_systems.kernels.flash import varlen
    from cs336_systems.kernels.flash.packing import PackedMask

    for d, deterministic in ((64, False), (64, True), (128, False), (136, True), (256, False)):
        on_hopper = name == "both" if d <= 128 else name != "neither"
        chosen = module.hopper_kernels(deterministic) if on_hopper else "flash_triton"
        q = on_a_gpu(1, 16, tokens, d)
        assert varlen.choose(q, q, PackedMask(band, False), documents, deterministic) == chosen


@needs_gluon
@pytest.mark.parametrize(
    ("d", "documents", "is_small"),
    [(64, 244, True), (64, 26, True), (128, 244, True), (128, 26, False), (128, 110, False)],
)
def test_forward_of_short_documents_runs_in_small_programs(d, documents, is_small):
    """The mixes that were measured: docs/ATTENTION_MEASURED.md. With 110 documents one has half of the tokens."""
    from cs336_systems.kernels.flash.hopper_launch import FORWARD, SHORT, PackedProblem
    from cs336_systems.kernels.flash.packing import PackedMask

    q = torch.empty(1, 16, 32768, d, dtype=torch.bfloat16, device="meta")
    after = PackedProblem(q, q, q, PackedMask(CAUSAL, False), documents).plan_forward((q, q, q, q)).after
    warpgroups = (SHORT if is_small else FORWARD)[d].warpgroups
    assert after[9] == warpgroups


@needs_gluon
@pytest.mark.parametrize(
    ("tokens", "heads", "section"), [(8192, 16, 8), (16384, 16, 4), (32768, 16, 2), (65536, 16, 1)]
)
def test_sections_of_packed_documents_fill_the_gpu_several_times(tokens, heads, section):
    """Else the longest document's programs of the last head would be among the last to start."""
    from cs336_systems.kernels.flash.hopper_launch import PackedProblem, Schedule
    from cs336_systems.kernels.flash.packing import PackedMask

    for d in (128, 256):
        q = torch.empty(1, heads, tokens, d, dtype=torch.bfloat16, device="meta")
        plans = PackedProblem(q, q, q, PackedMask(CAUSAL, False), 100).plan_backward(q, q, q, q, q, q, q, q)
        for plan in [plans.main] if d == 128 else [each.plan for each in plans.passes]:
            schedule = next(x for x in plan.after if isinstance(x, Schedule))
            assert schedule.section == section


def test_scratch_memory_of_many_documents_is_refused(on_a_hopper_gpu):
    q = torch.zeros(1, 128, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"flash_hopper.*40000 documents.*impl='auto'"):
        attention(q, q, q, cu_seqlens_q=torch.zeros(40001, dtype=torch.int32), impl="flash_hopper")


@needs_gluon
@given(st.integers(0, 3), st.integers(0, 400), st.integers(1, 100), st.integers(0, 99), st.integers(0, 39))
def test_ragged_descriptors_address_a_document(head, first, length, row, column):
    """Addresses wrap around at 64 bits; rows beyond the document are outside of the last dimension but one."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from cs336_systems.kernels.triton_compat import RAGGED_ROWS, TensorDescription

    t = torch.empty(600, 3, 4, 40, dtype=torch.bfloat16)[:, 1].transpose(0, 1)[None]
    fields = TensorDescription.ragged(TensorDescriptor, t, [1, 1, 1, 64, 64]).fields
    coordinates = (RAGGED_ROWS.value, first + length, head, RAGGED_ROWS.value - length + row, column)
    inside = all(x < size for x, size in zip(coordinates, fields["shape"], strict=True))
    assert inside == (row < length)
    at = sum(x * 2 * stride for x, stride in zip(coordinates, fields["strides"], strict=True)) % 2**64
    assert at == 2 * (head * t.stride(1) + (first + row) * t.stride(2) + column)


@needs_gluon
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("hi", [0, 5, 100])
@pytest.mark.parametrize("bottom_right", [False, True], ids=["begin", "end"])
def test_tiles_that_the_diagonal_of_a_document_may_cut(d, hi, bottom_right):
    from cs336_systems.kernels.flash.hopper_launch import KEYS, QUERIES, ROWS, PackedProblem
    from cs336_systems.kernels.flash.packing import PackedMask

    q = torch.empty(1, 2, 4096, d, dtype=torch.bfloat16, device="meta")
    problem = PackedProblem(q, q, q, PackedMask(Band(None, hi), bottom_right), 8)
    for own, visited in ((ROWS, KEYS), (KEYS, QUERIES[d])):
        cut = 0
        for shift in range(-visited, visited) if bottom_right else (0,):
            for row in range(0, 4 * own, own):
                first, last = (row + hi + shift) // visited, (row + own - 1 + hi + shift) // visited
                cut = max(cut, last - first + 1)
        assert problem._masked_tiles(own, visited) >= cut
