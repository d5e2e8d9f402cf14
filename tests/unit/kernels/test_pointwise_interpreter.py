"""The pointwise Triton kernels against their formulas, under Triton's interpreter. Needs no GPU.

The interpreter models neither races nor alignment nor shared memory. One process runs all cases: it takes seconds to
start, most cases less than a tenth of one.
"""

import math
from importlib.util import find_spec

import pytest

from tests.helpers import interpret

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="needs triton"),
    pytest.mark.xdist_group("pointwise_interpreter"),
]

DTYPES = ("float32", "float16")
LAYOUTS = ("transposed", "padded_rows", "unaligned", "every_other", "broadcast")
ROWS = [{"rows": 1, "width": 1}, {"rows": 5, "width": 24}, {"rows": 3, "width": 1000}]
HEADS = [
    {"batch": 1, "rows": 1, "heads": 1, "dim": 2},
    {"batch": 2, "rows": 3, "heads": 3, "dim": 8, "context": 9},
    {"batch": 1, "rows": 2, "heads": 5, "dim": 40},
    {"batch": 1, "rows": 2, "heads": 20, "dim": 128},
    {"batch": 2, "rows": 3, "heads": 6, "kv_heads": 2, "dim": 16},
    {"batch": 1, "rows": 2, "heads": 40, "kv_heads": 8, "dim": 128},
]
"""`context`: rows of the rotary table, where it has more than the tensors."""
HALVES = [
    {"batch": 2, "rows": 3, "heads": 3, "dim": 20, "halves": True},
    {"batch": 2, "rows": 2, "heads": 6, "kv_heads": 2, "dim": 16, "halves": True},
]


def product(name, *options, dtypes=DTYPES):
    """A case for each dtype and each combination of the lists of options."""
    cases = [{"name": name, "dtype": dtype} for dtype in dtypes]
    for choices in options:
        cases = [case | choice for case in cases for choice in choices]
    return cases


def flags(name):
    return [{name: False}, {name: True}]


CASES = [
    *product("add_norm", ROWS, flags("delta"), [{"out": "float16"}]),
    *product("add_norm", ROWS[1:2], [{"delta": True, "delta_dtype": "float16", "out": "float32"}], dtypes=["float32"]),
    *product("add_norm_backward", [{"rows": 5, "width": 24}], flags("has_grad_x"), flags("recompute_y")),
    *product("add_norm_backward", [{"rows": 8, "width": 100, "has_grad_x": True, "recompute_y": True, "programs": 3}]),
    *product("rotate", [*HEADS, *HALVES]),
    *product("rotate_backward", [*HEADS, *HALVES], flags("heads_first")),
    *product("norm_rotate", [*HEADS, *HALVES]),
    *product("norm_rotate_backward", [*HEADS[1:], *HALVES], flags("heads_first")),
    *product("norm_rotate_backward", [HEADS[1] | {"heads_first": True, "programs": 3}]),
    *product("swiglu", [*ROWS[:2], {"rows": 2, "width": 1025}]),
    *product("swiglu_backward", [*ROWS[:2], {"rows": 2, "width": 1025}]),
    *product("cross_entropy", [{"rows": 7, "vocabulary": n} for n in (1, 11, 4096, 4097)]),
    *product("cross_entropy", [{"rows": 7, "vocabulary": 5000, "ignored": 3, "size": 1e4}]),
    *product("cross_entropy", [{"rows": 7, "vocabulary": 11}], [{"bad": bad} for bad in (-1, -99, 11, 10**6)]),
    *product("adamw", [{"count": n} for n in (7, 1024, 3000)], flags("split"), dtypes=["float32"]),
    *product("adamw", [{"count": 1025, "split": True, "grads": "bfloat16"}], dtypes=["float32"]),
    *product("adamw", [{"count": 1025, "split": False, "grads": "bfloat16", "state": "bfloat16"}], dtypes=["float32"]),
    *product("adamw", [{"count": 1025, "update": 0.0}], flags("split"), dtypes=["float32"]),
    *product("checksums", [{"count": n} for n in (1, 1025, 16384, 40000)], dtypes=[*DTYPES, "float64"]),
    *product("fp8_quantize", [*ROWS, {"rows": 40, "width": 16}, {"rows": 5, "width": 24, "bad": math.inf}]),
    *product("fp8_quantize", [ROWS[1] | {"bad": bad} for bad in (math.nan, -math.inf)], dtypes=["float32"]),
    *product("fp8_add_norm", [{"rows": 4, "width": 16}, {"rows": 20, "width": 1000}], flags("delta")),
    *product("fp8_add_norm", [{"rows": 132, "width": 144, "delta": True}]),
    *product("fp8_swiglu", [*ROWS[:2], {"rows": 3, "width": 2600}]),
    *product("fp8_transposed", [{"rows": 16, "width": 16}, {"rows": 144, "width": 272}]),
    *product("fp8_transposed", [{"rows": 32, "width": 48, "bad": math.nan}], dtypes=["float32"]),
    # Autograd nodes convert tensors of any layout to what the kernels take.
    *product("node", [{"part": name} for name in ("add_norm", "norm_linear", "swiglu_linear", "linear_cross_entropy")],
             [{"layout": layout} for layout in LAYOUTS], dtypes=["float32"]),
    *product("node", [{"part": name, "layout": "contiguous"} for name in ("norm_linear-biases", "rotary_heads-norms")]),
    *product("node", [{"part": "rotary_heads"}], [{"layout": x} for x in ("transposed", "broadcast")]),
    *product("node", [{"part": "norm_linear", "layout": "contiguous", "gain": "every_other"}]),
]  # fmt: skip


def case_id(case):
    return "-".join(str(value) if isinstance(value, str) else f"{key}{value}" for key, value in case.items())


@pytest.fixture(scope="module")
def failures():
    """Case -> lines that say what is wrong."""
    found = interpret("tests.unit.kernels.interpret_pointwise", CASES)
    return dict(zip(map(case_id, CASES), found, strict=True))


@pytest.mark.parametrize("name", map(case_id, CASES))
def test_kernel_matches_the_formula(failures, name):
    assert not failures[name], "\n".join(failures[name])
