"""The kernels for Hopper GPUs, as far as they can be held without one: what they compile to, and when they are chosen.

Whether they are right is tests/gpu/test_gpu_attention.py's to say.
"""

import importlib
import json
import os
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cs336_systems.kernels import attention
from cs336_systems.kernels.flash.band import Band
from tests.helpers import ROOT
from tests.unit.kernels import compiled

module = importlib.import_module("cs336_systems.kernels.flash.dispatch")  # the package has a function of that name

needs_gluon = pytest.mark.skipif(
    find_spec("triton") is None or find_spec("triton.experimental.gluon") is None, reason="needs triton with Gluon"
)

# -- what they compile to ---------------------------------------------------------------------------------------------

LENGTH, UNEVEN, ODD = 4096, 6144, 1000
"""UNEVEN: without a mask its last blocks are cut into pieces."""
REQUESTS = {
    # All that makes another kernel: head dim, mask, tiles that a diagonal may cut, pieces, a ragged end, shared heads,
    # dtype.
    "forward": [
        ("forward", 64, "bfloat16", LENGTH, LENGTH, 0, 1),
        ("forward", 64, "bfloat16", LENGTH, LENGTH, None, 1),
        ("forward", 64, "float16", ODD, LENGTH, 17, 4),
        ("forward", 80, "bfloat16", ODD, LENGTH, 17, 1),
        ("forward", 96, "bfloat16", LENGTH, LENGTH, 0, 1),
        ("forward", 128, "bfloat16", LENGTH, LENGTH, 0, 1),
        ("forward", 128, "bfloat16", UNEVEN, UNEVEN, None, 1),
        ("forward", 128, "float16", LENGTH, LENGTH, 0, 1),
    ],
    "backward": [
        ("backward", 64, "bfloat16", LENGTH, LENGTH, 0, 1),
        ("backward", 64, "float16", ODD, ODD, 17, 4),
        ("backward", 128, "bfloat16", LENGTH, LENGTH, 0, 1),
        ("backward", 128, "bfloat16", LENGTH, LENGTH, None, 1),
        ("backward", 64, "bfloat16", UNEVEN, UNEVEN, None, 1),
        ("backward", 128, "bfloat16", UNEVEN, UNEVEN, None, 1),
        ("backward", 128, "bfloat16", LENGTH, LENGTH, 0, 4),
        ("backward", 80, "bfloat16", LENGTH, LENGTH, 0, 1),
        ("backward", 80, "float16", LENGTH, ODD, 17, 1),
        ("backward", 96, "bfloat16", LENGTH, LENGTH, None, 1),
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
        f"cs336_systems/kernels/flash/{name}.py"
        for name in ("hopper_forward", "hopper_backward", "hopper_launch", "launch_plan")
    ]
    found = compiled.results(
        REQUESTS[group],
        [*own, "tests/unit/kernels/compile_hopper.py", "tests/unit/kernels/sass.py"],
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
    ("backward", 64, "float16", ODD, ODD, 17, 4): 7,
}
"""Request -> instructions in its loops that move spilled registers, where a mask or the last keys may cut every tile:
the positions of queries and keys need registers, too."""


# -- when they are chosen ---------------------------------------------------------------------------------------------


CAUSAL = Band(None, 0)


@pytest.fixture
def on_a_hopper_gpu(monkeypatch):
    """As far as choosing goes."""
    for name in ("triton_problem", "gluon_problem"):
        monkeypatch.setattr(module, name, lambda device: None)


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


# -- how work is shared out --------------------------------------------------------------------------------------------


@needs_gluon
@pytest.mark.parametrize("tiles", [1, 2, 3, 17, 256])
@pytest.mark.parametrize("units", [1, 8, 100, 131, 132, 133, 192, 300, 704, 2048, 5000])
def test_pieces_pay_and_take_little_memory(units, tiles):
    from cs336_systems.kernels.flash.hopper_launch import MAX_SPLIT_ROUNDS, even_end

    split = even_end(units, tiles, 132, 0.0)
    assert split.programs == split.unsplit + (units - split.unsplit) * split.splits
    assert 0 <= split.unsplit <= units
    assert 1 <= split.splits <= tiles
    if split.split_units:
        assert split.unsplit % 132 == 0
        assert split.split_units * split.splits <= MAX_SPLIT_ROUNDS * 132
        # In tiles that the busiest multiprocessor goes through.
        pieces = -(-split.split_units * split.splits // 132) * -(-tiles // split.splits)
        assert split.unsplit // 132 * tiles + pieces < -(-units // 132) * tiles


@needs_gluon
def test_pieces_are_for_a_last_round_that_is_not_full():
    from cs336_systems.kernels.flash.hopper_launch import Split, even_end

    assert even_end(132, 128, 132, 0.0) == Split(132, 132, 1)
    assert even_end(8 * 132, 128, 132, 0.0) == Split(8 * 132, 8 * 132, 1)
    assert even_end(192, 48, 132, 0.0) == Split(192, 132, 2)
    assert even_end(32, 64, 132, 0.0) == Split(32, 0, 4)  # all at once, as many as there are multiprocessors
    assert even_end(32, 1, 132, 0.0) == Split(32, 32, 1)
    few = even_end(16 * 128, 128, 132, 0.0)
    assert few.split_units == 2048 % 132
    assert even_end(16 * 128, 128, 132, 0.04) == Split(2048, 2048, 1)  # saves 2%


@needs_gluon
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
def test_every_block_of_every_head_has_its_turn(batch, heads, blocks, fit):
    """As the kernel's `assignment` places them."""
    from cs336_systems.kernels.flash.hopper_launch import order

    units, section, of_heads, *divisors = order(blocks, batch, heads, fit)
    assert (units, of_heads) == (section * blocks, heads)
    assert batch * heads % section == 0
    assert section <= max(2 * fit, 1) or heads == 37  # a prime number of them: all, or one by one

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
def test_what_is_multiplied_of_a_head_dim(d, tile, depth):
    from cs336_systems.kernels.flash.hopper_launch import Problem

    q = torch.empty(1, 2, 256, d, dtype=torch.bfloat16, device="meta")
    problem = Problem(q, q, q, CAUSAL)
    assert (problem.block_d, problem.d_used) == (tile, depth)


@needs_gluon
@pytest.mark.parametrize("len_q", [1, 64, 65, 128, 192, 500, 16384])
@pytest.mark.parametrize("hi", [0, 100, None])
def test_every_query_is_in_one_block(len_q, hi):
    """As the kernel places them."""
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
