"""The kernels for Hopper GPUs, as far as they can be held without one: what they compile to, and when they are chosen.

Whether they are right is tests/test_gpu_attention.py's to say.
"""

import importlib
import json
import os
from importlib.util import find_spec

import pytest
import torch

from cs336_systems.kernels import attention
from cs336_systems.kernels.band import Band
from tests import compiled
from tests.helpers import ROOT

module = importlib.import_module("cs336_systems.kernels.attention")  # the package has a function of that name

needs_gluon = pytest.mark.skipif(
    find_spec("triton") is None or find_spec("triton.experimental.gluon") is None, reason="needs triton with Gluon"
)

# -- what they compile to ---------------------------------------------------------------------------------------------

LENGTH, ODD = 4096, 1000
REQUESTS = {
    # All that makes another kernel: head dim, mask, tiles that a diagonal may cut, a ragged end, shared heads, dtype.
    "forward": [
        ("forward", 64, "bfloat16", LENGTH, LENGTH, 0, 1),
        ("forward", 64, "bfloat16", LENGTH, LENGTH, None, 1),
        ("forward", 64, "float16", ODD, LENGTH, 17, 4),
        ("forward", 80, "bfloat16", ODD, LENGTH, 17, 1),
    ],
    "backward": [
        ("backward", 64, "bfloat16", LENGTH, LENGTH, 0, 1),
        ("backward", 64, "float16", ODD, ODD, 17, 4),
        ("backward", 128, "bfloat16", LENGTH, LENGTH, 0, 1),
        ("backward", 128, "bfloat16", LENGTH, LENGTH, None, 1),
        ("backward", 80, "float16", LENGTH, ODD, 17, 1),
    ],
}
OLDER = ROOT / ".triton-3.6"
SHARED_MEMORY = 227 << 10
"""Bytes that a program can have on a GPU of compute capability 9.0."""


def compile_all(requests, **env):
    """Triton's version, and a report for each."""
    return compiled.compile_apart("compile_hopper", json.dumps(requests), **env)


def reports(group):
    """Of each request."""
    own = [
        f"cs336_systems/kernels/{name}.py" for name in ("hopper_forward", "hopper_backward", "hopper_launch", "plan")
    ]
    found = compiled.results(
        REQUESTS[group],
        [*own, "tests/compile_hopper.py", "tests/sass.py"],
        compiled.triton_version(),
        lambda chosen: compile_all(chosen)[1],
        sample=True,
    )
    return zip(REQUESTS[group], found, strict=True)


@pytest.mark.skipif(not OLDER.exists(), reason="`make older-triton` installs it beside the other")
def test_the_code_compiled_by_the_oldest_triton_that_can():
    """Names in this language still change from one version to the next."""
    chosen = [requests[0] for requests in REQUESTS.values()]
    version, found = compile_all(chosen, PYTHONPATH=str(OLDER))
    assert version == "3.6.0"
    for request, report in zip(chosen, found, strict=True):
        assert (report["findings"], report["remarks"]) == ([], []), f"{request}: {report}"


@needs_gluon
@pytest.mark.parametrize("group", REQUESTS)
def test_the_compiled_code(group):
    """No operand of a matrix product overwritten too early, no signal before products are done, no spilled register
    read or written in a loop over tiles, and nothing that made the assembler run products one after another."""
    for request, report in reports(group):
        where = f"{request}: {report}"
        assert report["findings"] == [], where
        assert report["remarks"] == [], where
        assert report["shared"] <= SHARED_MEMORY, where
        assert report["loops"], where
        assert report["spills_in_loops"] <= ALLOWED_SPILLS.get(request, 0), where


ALLOWED_SPILLS = {
    ("backward", 64, "float16", ODD, ODD, 17, 4): 1,
    ("backward", 80, "float16", LENGTH, ODD, 17, 1): 16,
}
"""Request -> instructions in its loops that move spilled registers, over tiles that a mask may cut: there the positions
of queries and keys need registers, too."""


# -- when they are chosen ---------------------------------------------------------------------------------------------


CAUSAL = Band(None, 0)


@pytest.fixture
def on_a_hopper_gpu(monkeypatch):
    """As far as choosing goes."""
    for name in ("_problems", "_gluon_problems"):
        monkeypatch.setitem(getattr(module, name), torch.device("meta"), None)
        monkeypatch.setitem(getattr(module, name), torch.device("cpu"), None)


def problem(band=CAUSAL, dtype=torch.bfloat16, len_q=2048, len_k=2048, d=64):
    q, k = (torch.empty(4, 16, length, d, dtype=dtype, device="meta") for length in (len_q, len_k))
    return module.hopper_problem(q, k, band, dtype)


@pytest.mark.parametrize("d", [40, 64, 72, 80, 96, 128])
@pytest.mark.parametrize("band", [Band(), Band(None, 0), Band(None, -3)], ids=str)
def test_what_they_take(on_a_hopper_gpu, band, d):
    assert problem(band, d=d) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dtype": torch.float32}, "float32"),
        ({"d": 32}, "32"),
        ({"d": 68}, "68"),
        ({"d": 136}, "136"),
        ({"band": Band(-5, 0)}, "window"),
        ({"len_q": 0}, "queries"),
        ({"len_k": 0}, "key"),
    ],
    ids=str,
)
def test_what_they_do_not_take(on_a_hopper_gpu, arguments, said):
    assert said in problem(**arguments)


@pytest.mark.parametrize(("length", "name"), [(4096, "flash_hopper"), (1024, "flash_triton")])
def test_best_for_large_problems(on_a_hopper_gpu, length, name):
    assert module.best_fused(4 * 1024 * length, length, 64, torch.device("cpu")) == name
    assert module.best_fused(4 * 1024 * length, length, 200, torch.device("cpu")) == "flash_triton"


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter takes CPU tensors")
def test_they_want_a_gpu():
    with pytest.raises(ValueError, match=r"flash_hopper.*cpu") as caught:
        attention(*torch.zeros(3, 1, 2, 5, 64), impl="flash_hopper")
    assert "\n" not in str(caught.value)


def test_they_are_not_deterministic(on_a_hopper_gpu):
    with pytest.raises(ValueError, match=r"flash_hopper.*flash_triton"):
        attention(*torch.zeros(3, 1, 2, 5, 64, dtype=torch.bfloat16), impl="flash_hopper", deterministic=True)


class TracedError(Exception):
    pass


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_they_are_one_node_of_a_compiled_graph(on_a_hopper_gpu, dynamic):
    """Also where all sizes are symbols: what is asked of a shape must be something a compiler can ask."""
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


# -- how queries are shared out ----------------------------------------------------------------------------------------


@needs_gluon
@pytest.mark.parametrize("warpgroups", [2, 3])
@pytest.mark.parametrize("heads", [1, 7, 16, 64, 1000])
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 5, 32, 256, 1023])
def test_blocks_hold_all_queries_and_no_block_is_for_nothing(groups, heads, warpgroups):
    from cs336_systems.kernels.hopper_launch import split

    blocks, wide = split(groups, warpgroups, heads, 132)
    held = wide * warpgroups + (blocks - wide) * (warpgroups - 1)
    assert held >= groups
    last = warpgroups if blocks == wide else warpgroups - 1
    assert held - last < groups


@needs_gluon
def test_narrow_blocks_are_for_a_last_round_that_is_not_full():
    from cs336_systems.kernels.hopper_launch import split

    assert split(132 * 3, 3, 1, 132) == (132, 132)
    assert split(8 * 132 * 3, 3, 1, 132) == (8 * 132, 8 * 132)
    blocks, wide = split(256, 3, 16, 132)  # 10.3 rounds of wide ones would take 11
    assert blocks > wide > 70
    assert split(5, 3, 8, 132) == (3, 0)  # all at once: the narrower, the sooner


@needs_gluon
@pytest.mark.parametrize("len_q", [1, 64, 65, 128, 192, 500, 16384])
@pytest.mark.parametrize("hi", [0, 100, None])
def test_every_query_is_in_one_block(len_q, hi):
    """As the kernel places them."""
    from cs336_systems.kernels.hopper_launch import ROWS, Problem

    q = torch.empty(1, 2, len_q, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(1, 2, 20000, 64, dtype=torch.bfloat16, device="meta")
    plan = Problem(q, k, k, Band(None, hi)).plan_forward((q, k, k, q))
    blocks, _, _, shift, wide, causal, _, _, warpgroups = plan.after[:9]
    assert causal == (hi is not None)
    begins = []
    for block in range(blocks):
        row = block * warpgroups * ROWS - max(block - wide, 0) * ROWS - shift
        end = min(row + (warpgroups - (block >= wide)) * ROWS, -(-len_q // ROWS) * ROWS)
        begins += [own for own in range(row, row + warpgroups * ROWS, ROWS) if 0 <= own < end]
    assert begins == list(range(0, len_q, ROWS))
    if hi is not None:  # the block that is not full is the one that sees the fewest keys
        assert blocks * warpgroups * ROWS - shift == -(-len_q // ROWS) * ROWS
