"""Triton's attention kernels without a GPU, under Triton's interpreter.

The interpreter knows nothing of races, alignment or shared memory; tests/gpu/test_gpu_attention.py covers those. In
fp32 tiles are read through pointers, in fp16 through tensor descriptors.
"""

from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import product

import pytest

from cs336_systems.kernels.flash import tiles
from cs336_systems.kernels.flash.packing import most_blocks
from tests.unit.kernels.attention_cases import CASES, LAYOUTS, LONG, Case
from tests.unit.kernels.attention_worker import started
from tests.unit.kernels.packed_cases import PACKED, Packed, random_packed
from tests.unit.kernels.packed_cases import shortened as with_few_heads

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")]


@pytest.fixture(scope="module")
def ask():
    """Sends requests to one process under the interpreter: starting it takes longer than most of them."""
    with started("tests.unit.kernels.interpret_attention", TRITON_INTERPRET="1") as ask:
        yield ask


@pytest.fixture
def check(ask):
    def check(case, dtype="float32", deterministic=False, **options):
        wrong = ask(fields=asdict(case), dtype=dtype, deterministic=deterministic, **options)
        assert not wrong, "\n".join(wrong)

    return check


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


# -- packed documents -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(PACKED)))
def test_packed_documents(check, number):
    """At most 12 documents: test_table_of_blocks has tables of many more."""
    case = with_few_heads(PACKED[number])
    case = replace(case, lengths_q=case.lengths_q[:12])
    check(case, ("float16", "float32")[number % 2], through_lse=number % 3 == 0)


@pytest.mark.parametrize("seed", range(6))
def test_random_packings(check, seed):
    case = with_few_heads(random_packed(seed, longest=70, head_dims=(8, 16)))
    check(case, ("float32", "float16")[seed % 2], seed=seed, through_lse=seed % 3 == 0)


def odd_and(fives):
    """Documents with and without keys and queries, full blocks and others, and as many of five rows."""
    lengths_q, lengths_k = (3, 0, 41, 16, 17, 1, 33, *(5,) * fives), (9, 4, 41, 0, 80, 1, 7, *(5,) * fives)
    return Packed(lengths_q, lengths_k, after_q=20, after_k=3)


def expected_lines(case, rows, of_keys, bottom_right):
    """(lines in the order of the documents, place of each for a causal mask, blocks of its document)"""
    found, padded = [], 0
    documents = [(own_q, own_k) for _, own_q, own_k in case.documents()]
    last_q, last_k = sum(case.lengths_q), sum(case.keys)
    documents.append((slice(last_q, case.tokens_q), slice(last_k, case.tokens_k)))
    for number, (own_q, own_k) in enumerate(documents):
        len_q, len_k = own_q.stop - own_q.start, own_k.stop - own_k.start
        blocks, padding = -(-(len_k if of_keys else len_q) // rows), -(-len_q // 128) * 128
        if number == len(case.lengths_q):  # rows after the last document see nothing
            len_q, len_k = (0, len_k) if of_keys else (len_q, 0)
        shift = len_k - len_q if bottom_right else 0
        for block in range(blocks):
            line = [block * rows, own_q.start, len_q, own_k.start, len_k, shift, padded, 0]
            found.append((line, blocks - 1 - block if of_keys else block, blocks))
        padded += padding
    return found


TABLES = (odd_and(fives=13), Packed((0, 0)), Packed((70,)))
ORDERS = [*product(TABLES, (False, True), ("AS_PACKED", "LONGEST_FIRST", "DIAGONAL"), (16,))]
ORDERS += [(odd_and(fives=125), True, "LONGEST_FIRST", None)]

NAMES = [f"{len(case.lengths_q)}-{'keys' if of_keys else 'queries'}-{order}" for case, of_keys, order, _ in ORDERS]


@pytest.mark.parametrize(("case", "of_keys", "order", "at_once"), ORDERS, ids=NAMES)
def test_table_of_blocks(ask, case, of_keys, order, at_once):
    """Every block has one line, in an order that starts with the most work; other lines are 0. There are more documents
    than a program looks at together: with `at_once` it is made to look at that many only."""
    rows, bottom_right = 16, order == "DIAGONAL"
    lines = ask(fields=asdict(case), blocks=[rows, of_keys, order], bottom_right=bottom_right, at_once=at_once)
    expected = expected_lines(case, rows, of_keys, bottom_right)
    if order == "LONGEST_FIRST":
        expected.sort(key=lambda found: -found[2])
    elif order == "DIAGONAL":
        expected.sort(key=lambda found: -found[1])
    assert lines[: len(expected)] == [line for line, _, _ in expected]
    tokens = case.tokens_k if of_keys else case.tokens_q
    assert lines[len(expected) :] == [[0] * 8] * (most_blocks(rows, tokens, len(case.lengths_q)) - len(expected))
