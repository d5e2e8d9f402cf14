"""Triton's attention kernels without a GPU, under Triton's interpreter.

The interpreter knows nothing of races, alignment or shared memory; tests/gpu/test_gpu_attention.py covers those. In
fp32 tiles are read through pointers, in fp16 through tensor descriptors.
"""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from importlib.util import find_spec

import pytest

from cs336_systems.kernels.flash import tiles
from tests.helpers import ROOT, clean_env
from tests.unit.kernels.attention_cases import CASES, LAYOUTS, LONG, Case

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")]


@pytest.fixture(scope="module")
def check():
    """Sends cases to one process under the interpreter: starting it takes longer than most of them."""
    command = [sys.executable, "-m", "tests.unit.kernels.interpret_attention"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=clean_env(TRITON_INTERPRET="1"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def check(case, dtype="float32", deterministic=False, **options):
        request = {"fields": asdict(case), "dtype": dtype, "deterministic": deterministic, **options}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, f"the interpreter's process ended with {process.wait()}"
        wrong = json.loads(answer)
        assert not wrong, "\n".join(wrong)

    yield check
    process.stdin.close()
    process.wait()


def shortened(case):
    """The case with lengths cut by whole tiles, to two and a rest, and one head where heads share no keys: the edges
    are the same, the time a fifth."""
    tile = tiles.INTERPRETED.block_m
    lengths = {name: getattr(case, name) for name in ("len_q", "len_k")}
    heads = {"heads": 1, "kv_heads": 1} if case.heads == case.kv_heads else {}
    return replace(case, **{name: n % tile + 2 * tile if n > 3 * tile else n for name, n in lengths.items()}, **heads)


@pytest.mark.parametrize("number", range(len(CASES)), ids=list(CASES))
def test_case(check, number):
    """Every case once, with alternating dtype, backward and gradient of the logsumexp."""
    check(
        shortened(list(CASES.values())[number]),
        ("float32", "float16")[number % 2],
        deterministic=number % 3 == 0,
        through_lse=number % 5 < 2,
    )


@pytest.mark.parametrize("number", range(len(LONG)), ids=list(LONG))
def test_whole_length(check, number):
    check([*LONG.values()][number], ("float32", "float16")[number % 2])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(check, layout):
    check(Case(40, 64, d=8, is_causal="top-left", kv_heads=1), layout=layout, dout_layout=layout)


@pytest.mark.parametrize("lengths", [(5, 5), (0, 5), (5, 0), (0, 0)], ids=["no batch", "no queries", "no keys", "none"])
def test_empty(check, lengths):
    check(Case(*lengths, batch=int(lengths != (5, 5))), through_lse=True)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("length", [1, 2, 5, 17])
def test_short_and_large(check, length, is_causal):
    """Keys beyond the end must be masked: at score 0 they overflow against a very negative logsumexp."""
    check(Case(length, length, is_causal=is_causal), "float16", deterministic=is_causal, magnitude=5, large=True)


def test_large_scores_in_a_window(check):
    check(Case(113, 113, window=9), magnitude=50, large=True)
