"""Triton's attention kernels without a GPU: each group of cases in a process under Triton's interpreter.

The interpreter knows nothing of races, alignment or shared memory; tests/gpu/test_gpu_attention.py is for those.
"""

from dataclasses import asdict, replace
from importlib.util import find_spec

import pytest

from cs336_systems.kernels.flash import tiles
from tests.helpers import interpret
from tests.unit.kernels.attention_cases import CASES, INTERPRETED, LAYOUTS, Case

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")]


def check(runs: list[tuple[Case, dict[str, object]]]) -> None:
    arguments = [
        {"fields": asdict(case), "dtype": "float32", "deterministic": False, **others} for case, others in runs
    ]
    report = interpret("tests.unit.kernels.interpret_attention", arguments)
    assert report["runs"] == len(runs) > 0
    assert not report["wrong"], "\n".join(report["wrong"])


def shortened(case: Case) -> Case:
    """By whole tiles of the interpreter's, to two and a rest: the edges are the same, the time a fifth."""
    tile = tiles.INTERPRETED.block_m
    lengths = {name: getattr(case, name) for name in ("len_q", "len_k")}
    return replace(case, **{name: n % tile + 2 * tile if n > 3 * tile else n for name, n in lengths.items()})


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_kind_of_kernel(dtype):
    """In fp32 tiles are read through pointers, in fp16 through tensor descriptors. As long as they are: the longest,
    and those in which it matters whether there are more queries or more keys."""
    longest = max(INTERPRETED, key=lambda case: case.len_q * case.len_k)
    whole = [case for case in INTERPRETED if case is longest or case.len_q != case.len_k]
    check([(case if case in whole else shortened(case), {"dtype": dtype}) for case in INTERPRETED])


@pytest.mark.parametrize("group", range(4))
def test_every_case(group):
    """Each once, with dtypes, ways of the backward and gradients of the logsumexp in turn."""
    check(
        [
            (
                with_few_heads(shortened(case)),
                {"dtype": ("float32", "float16")[i % 2], "deterministic": i % 3 == 0, "through_lse": i % 5 < 2},
            )
            for i, case in enumerate(list(CASES.values())[group::4])
        ]
    )


def with_few_heads(case: Case) -> Case:
    """One where heads share no keys. Those of `INTERPRETED` are as they are, some with several."""
    return replace(case, heads=1, kv_heads=1) if case.heads == case.kv_heads else case


def test_edges():
    """Strides, nothing at all, and values that overflow where a key beyond the end is not left out."""
    strided = Case(64, 128, d=8, is_causal="top-left", kv_heads=1)
    runs = [(strided, {"layout": layout, "dout_layout": layout}) for layout in LAYOUTS]
    runs += [(case, {"through_lse": True}) for case in (Case(5, 5, batch=0), Case(0, 5), Case(5, 0), Case(0, 0))]
    large = [Case(length, length, is_causal=is_causal) for length in (1, 2, 5, 17) for is_causal in (False, True)]
    runs += [(case, {"magnitude": 5, "large": True, "dtype": "float16"}) for case in large]
    runs += [(Case(113, 113, window=9), {"magnitude": 50, "large": True})]
    check([(case, {**others, "deterministic": bool(i % 2)}) for i, (case, others) in enumerate(runs)])
