"""Attention inside packed documents on a GPU: `pytest -m gpu tests/gpu/test_gpu_varlen.py`.

350 random packings in 14 families; a family shares its compiled kernels. Results are compared with a loop over
documents in float64.
"""

import functools
import importlib
import math
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch

from cs336_systems.kernels import Packing, attention
from cs336_systems.kernels.flash import varlen
from tests.helpers import ROOT
from tests.unit.kernels.attention_cases import differentiate, poisoned_memory
from tests.unit.kernels.packed_cases import Packed, compare_packed, make_packed, offsets_of, truth_of

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SEEDS = 25
"""Packings of a family."""


@dataclass(frozen=True)
class Family:
    """Calls that share compiled kernels."""

    d: int
    dtype: torch.dtype
    is_causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    group: int = 1
    own_keys: bool = False
    """Documents have other numbers of keys than of queries."""


FAMILIES = {
    "causal-64": Family(64, BF16, True),
    "causal-128": Family(128, BF16, True, group=2),
    "full-64": Family(64, BF16),
    "full-128": Family(128, FP16, own_keys=True),
    "end-64": Family(64, FP16, "bottom-right", group=4, own_keys=True),
    "end-128": Family(128, BF16, "bottom-right", own_keys=True),
    "window-80": Family(80, BF16, "bottom-right", (40, 8), own_keys=True),
    "sliding-64": Family(64, BF16, True, (200, 0), group=4),
    "causal-256": Family(256, BF16, True, group=2),
    "end-192": Family(192, FP16, "bottom-right", group=4, own_keys=True),
    "window-256": Family(256, BF16, "bottom-right", (40, 8), own_keys=True),
    "full-160": Family(160, BF16, own_keys=True),
    "left-256": Family(256, BF16, "top-left", (70, None), own_keys=True),
    "fp32-64": Family(64, FP32, True, (70, None), group=2),
}


def drawn(family: Family, seed: int) -> Packed:
    """A packing: short documents, some empty, a giant; rows after the last document make the tokens a multiple of 16,
    so that Triton compiles one variant."""
    draw = random.Random(seed)
    kind = ("short", "mixed", "giant", "edges", "one")[seed % 5]
    count = {"short": 12, "mixed": 8, "giant": 6, "edges": 10, "one": 1}[kind]

    def length() -> int:
        match kind:
            case "short":
                return draw.randint(0, 20)
            case "edges":
                return draw.choice((0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 257))
            case _:
                return min(700, int(draw.lognormvariate(math.log(120), 1.2)))

    lengths = [length() for _ in range(count)]
    if kind == "giant":
        lengths[draw.randrange(count)] = draw.randint(900, 1700)
    other = None
    if family.own_keys:
        other = tuple(max(0, n + draw.choice((0, -n, -1, 1, draw.randint(-n, 300)))) for n in lengths)
    after = draw.choice((0, 0, 16, 48))
    total_k = sum(lengths if other is None else other)
    return Packed(
        tuple(lengths),
        other,
        d=family.d,
        is_causal=family.is_causal,
        window=family.window,
        heads=2 * family.group,
        kv_heads=2,
        after_q=-sum(lengths) % 16 + after,
        after_k=-total_k % 16 + after,
    )


def covered(family: Family) -> bool:
    return torch.cuda.get_device_capability() == (9, 0) and family.dtype != FP32


def implementation(impl, **options):
    return lambda q, k, v, **call: attention(q, k, v, impl=impl, return_lse=True, **options, **call)


@pytest.fixture(scope="module", autouse=True)
def compiled(request):
    """Compile the kernels of all families side by side, each in a process of its own, into Triton's cache on disk: one
    after another they take longer than all tests. With several workers (`-n`) these compile side by side anyway."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    chosen = " ".join(item.name for item in request.session.items)
    names = [(name, "flash_triton") for name in FAMILIES if "flash_triton" in chosen]
    names += [(name, IMPLS[1]) for name, family in FAMILIES.items() if IMPLS[1] in chosen and covered(family)]
    command = (sys.executable, "-m", "tests.gpu.test_gpu_varlen")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda pair: subprocess.run([*command, *pair], cwd=ROOT), names))  # the tests will show a failure


def compile_family(name, impl):
    """Run one packing of a family with and without a gradient of the logsumexp, each of which has its own kernels."""
    case = drawn(FAMILIES[name], 1)
    call = {**case.offsets("cuda"), **case.mask}
    for through_lse in (False, True):
        inputs = make_packed(case, FAMILIES[name].dtype, device="cuda", through_lse=through_lse)
        differentiate(lambda q, k, v: implementation(impl)(q, k, v, **call), inputs)


@functools.cache  # for all implementations: the oracle takes longer than they do
def problem(family, seed):
    case = drawn(family, seed)
    inputs = make_packed(case, family.dtype, seed=seed, device="cuda", through_lse=seed % 3 == 0)
    return case, inputs, truth_of(inputs, case)


def differences(impl, family, seed):
    case, inputs, truth = problem(family, seed)
    with poisoned_memory():
        call = {**case.offsets("cuda"), **case.mask}
        found = differentiate(lambda q, k, v: implementation(impl)(q, k, v, **call), inputs)
    return compare_packed(found, inputs, case, truth)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("impl", ["flash_triton", "flash_hopper", "flash_hopper large", "flash_hopper_repeatable"])
def test_random_packings(impl, name, monkeypatch):
    """With "large" forward runs in large programs, as it does with long documents."""
    family = FAMILIES[name]
    impl, _, size = impl.partition(" ")
    if size:
        launch = importlib.import_module("cs336_systems.kernels.flash.hopper_launch")
        monkeypatch.setattr(launch, "sees_few_keys", lambda *_: False)
    varlen._kernels.clear()
    varlen._resolved.clear()
    on_hopper = impl.startswith("flash_hopper")
    if on_hopper and not covered(family):
        pytest.skip("only the portable kernels take it")
    # The Hopper kernels refuse tensors without any row of keys; "auto" takes the portable ones for them.
    seeds = [seed for seed in range(SEEDS) if not on_hopper or problem(family, seed)[1].k.shape[0]]
    assert len(seeds) > SEEDS - 3
    wrong = [line for seed in seeds for line in differences(impl, family, seed)]
    assert not wrong, f"{len(wrong)} wrong\n" + "\n".join(wrong[:10])


@pytest.mark.parametrize("impl", ["reference", "flash_torch", "auto"])
def test_other_implementations(impl):
    for name in ("causal-64", "end-128"):
        wrong = [line for seed in range(3) for line in differences(impl, FAMILIES[name], seed)]
        assert not wrong, "\n".join(wrong[:10])


IMPLS = ["flash_triton", "flash_hopper", "flash_hopper_repeatable"]


by_head_dim = pytest.mark.parametrize("d", [64, 256])


def skip_unless_hopper(impl):
    if impl.startswith("flash_hopper") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for compute capability 9.0")


@by_head_dim
@pytest.mark.parametrize("impl", IMPLS)
def test_slices_of_one_tensor_and_a_gradient_of_ones(impl, d):
    skip_unless_hopper(impl)
    case = Packed((100, 0, 300, 1, 111), d=d, is_causal=True)
    qkv = torch.randn(512, 3, 2, d, device="cuda", dtype=BF16, requires_grad=True)
    found, _ = implementation(impl)(*qkv.unbind(1), **case.offsets("cuda"), **case.mask)
    found.sum().backward()
    q, k, v = (x.detach() for x in qkv.unbind(1))
    inputs = replace(make_packed(case, BF16, device="cuda"), q=q, k=k, v=v, dout=torch.ones_like(q))
    results = {"out": found.detach(), **dict(zip(("dq", "dk", "dv"), qkv.grad.unbind(1), strict=True))}
    wrong = compare_packed({name: x.contiguous() for name, x in results.items()}, inputs, case)
    assert not wrong, "\n".join(wrong)


@by_head_dim
@pytest.mark.parametrize("impl", IMPLS)
def test_neighbours_full_of_nan_do_not_matter(impl, d):
    """Every result of a document is as if the others were not there."""
    skip_unless_hopper(impl)
    lengths = (100, 77, 200, 7)
    case = Packed(lengths, d=d, is_causal=True)
    inputs = make_packed(case, BF16, device="cuda")
    call = {**case.offsets("cuda"), **case.mask}
    clean = differentiate(lambda q, k, v: implementation(impl)(q, k, v, **call), inputs)
    ends = [0, 100, 177, 377, 384]
    rows = slice(ends[2], ends[3])
    for x in (inputs.q, inputs.k, inputs.v, inputs.dout):
        x[: rows.start] = math.nan
        x[rows.stop :] = math.nan
    dirty = differentiate(lambda q, k, v: implementation(impl)(q, k, v, **call), inputs)
    for name in ("out", "dq", "dk", "dv"):
        assert dirty[name][rows].isfinite().all(), name
        assert torch.allclose(dirty[name][rows], clean[name][rows], atol=1e-2, rtol=2e-2), name
    assert torch.equal(dirty["lse"][:, rows], clean["lse"][:, rows])


@by_head_dim
@pytest.mark.parametrize("impl", IMPLS)
def test_a_cuda_graph_takes_other_documents(impl, d):
    """The offsets are read on the GPU: a captured graph serves every packing of its size."""
    skip_unless_hopper(impl)
    first, second = Packed((100, 28, 128), d=d, is_causal=True), Packed((1, 0, 250), d=d, is_causal=True, after_q=5)
    inputs = make_packed(first, BF16, device="cuda")
    offsets = first.offsets("cuda")["cu_seqlens_q"]
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]

    def run():
        packing = Packing(offsets)
        out = attention(*leaves, cu_seqlens_q=packing, is_causal=True, impl=impl)
        out = attention(out, *leaves[1:], cu_seqlens_q=packing, is_causal=True, impl=impl)
        return out, *torch.autograd.grad(out, leaves, inputs.dout)

    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    with torch.cuda.graph(graph, stream=side):
        results = run()
    for case in (second, first):
        offsets.copy_(offsets_of(case.lengths_q, "cuda"))
        graph.replay()
        torch.cuda.synchronize()
        expected = run()
        for found, truth in zip(results, expected, strict=True):
            assert torch.allclose(found, truth, atol=1e-2, rtol=2e-2), case
            assert found[sum(case.lengths_q) :].abs().max().item() == 0 if case.after_q else True


@pytest.mark.parametrize("impl", IMPLS)
def test_no_waiting_for_the_gpu(impl):
    skip_unless_hopper(impl)
    case = Packed((100, 28, 128), is_causal=True)
    inputs, offsets = make_packed(case, BF16, device="cuda"), case.offsets("cuda")
    call = {**offsets, **case.mask}
    differentiate(lambda q, k, v: implementation(impl)(q, k, v, **call), inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        differentiate(lambda q, k, v: implementation(impl)(q, k, v, **call), inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled():
    case = Packed((100, 0, 28, 128), is_causal=True)
    inputs, offsets = make_packed(case, BF16, device="cuda"), case.offsets("cuda")["cu_seqlens_q"]

    def run(q, k, v, offsets):
        out, lse = attention(q, k, v, cu_seqlens_q=offsets, is_causal=True, impl="flash_triton", return_lse=True)
        return out * 1.0, lse

    compiled = torch.compile(run, fullgraph=True)
    found = differentiate(lambda q, k, v: compiled(q, k, v, offsets), inputs)
    assert compare_packed(found, inputs, case) == []


@by_head_dim
@pytest.mark.parametrize("impl", IMPLS)
def test_operator_checks(impl, d):
    skip_unless_hopper(impl)
    case = Packed((100, 0, 28, 128), d=d, is_causal=True)
    inputs, offsets = make_packed(case, BF16, device="cuda"), case.offsets("cuda")["cu_seqlens_q"]
    tensors = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    operator = getattr(torch.ops.cs336, f"{impl}_varlen_forward").default
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, (*tensors, offsets, offsets, 0.125, None, 0, False), test_utils=checks)


def test_thousands_of_short_documents():
    lengths = tuple(random.Random(0).choices(range(30), k=2000))
    case = Packed(lengths, is_causal=True, after_q=-sum(lengths) % 16)
    inputs = make_packed(case, BF16, device="cuda")
    call = {**case.offsets("cuda"), **case.mask}
    found = differentiate(lambda q, k, v: implementation("auto")(q, k, v, **call), inputs)
    # The last documents alone: the loop of the oracle would take minutes for all.
    start = sum(lengths[:-50])
    rows = slice(start, None)
    few = replace(case, lengths_q=lengths[-50:])
    parts = replace(inputs, **{name: getattr(inputs, name)[rows] for name in ("q", "k", "v", "dout")})
    wanted = {name: x[:, rows] if name == "lse" else x[rows] for name, x in found.items()}
    wrong = compare_packed(wanted, parts, few)
    assert not wrong, "\n".join(wrong)


if __name__ == "__main__":
    compile_family(*sys.argv[1:])
