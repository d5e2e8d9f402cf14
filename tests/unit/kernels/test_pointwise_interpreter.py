"""Triton's kernels between the matrix products without a GPU: against their formulas, under Triton's interpreter.

The interpreter knows nothing of races, alignment or shared memory. One process does all runs: it takes seconds to
start, most runs do not take a tenth of one.
"""

from importlib.util import find_spec

import pytest

from tests.helpers import interpret

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="needs triton"),
    pytest.mark.xdist_group("pointwise_interpreter"),
]

DTYPES = ("float32", "float16")
LAYOUTS = ("contiguous", "transposed", "padded_rows", "unaligned", "every_other", "broadcast")
ROWS = [(1, 1), (1, 7), (5, 24), (3, 1000), (20, 33)]
"""Rows and width: a single number, powers of two or not."""
HEADS = [(1, 1, 1, 2), (2, 5, 3, 8), (1, 7, 1, 6), (1, 2, 5, 40), (1, 2, 20, 128)]
"""Batch, rows, heads and their dimension."""


def runs_of(name, names, shapes, dtypes=DTYPES, **options):
    shapes = [dict(zip(names, shape, strict=True)) for shape in shapes]
    return [{"name": name, "dtype": dtype, **shape, **options} for dtype in dtypes for shape in shapes]


def norms():
    names = ("rows", "width")
    runs = []
    for delta in (False, True):
        for out in DTYPES:
            runs += runs_of("add_norm", names, ROWS, delta=delta, out=out)
    options = {"delta": True, "delta_dtype": "float16", "out": "float16"}
    return runs + runs_of("add_norm", names, ROWS, ["float32"], **options)


def gradients_of_norms():
    names = ("rows", "width")
    runs = []
    for adds in (False, True):
        for remake in (False, True):
            runs += runs_of("add_norm_backward", names, ROWS, adds=adds, remake=remake)
    more_than_programs = {"dtypes": ["float32"], "adds": True, "remake": True}
    return runs + runs_of("add_norm_backward", names, [(600, 3)], **more_than_programs)


def rotary_embedding():
    names = ("batch", "rows", "heads", "dim")
    runs = runs_of("turn", names, HEADS) + runs_of("turned_back", names, HEADS)
    runs += runs_of("turned_back", names, HEADS, inside=True)
    for name in ("turn", "turned_back"):
        runs += runs_of(name, names, HEADS[1:3], context=9)
    return runs


def gates():
    names, shapes = ("rows", "width"), [*ROWS, (2, 1024), (2, 1025), (1, 3000)]
    return runs_of("swiglu", names, shapes) + runs_of("swiglu_backward", names, shapes)


def losses():
    names = ("rows", "vocabulary")
    runs = runs_of("cross_entropy", names, [(1, 1), (1, 2), (7, 1), (7, 2), (7, 11), (5, 4096), (5, 4097), (3, 9000)])
    runs += runs_of("cross_entropy", names, [(7, 11), (5, 5000)], ignored=3)
    runs += runs_of("cross_entropy", names, [(7, 11), (5, 5000)], size=1e4)
    for bad in (-1, -99, 11, 10**6):
        runs += runs_of("cross_entropy", names, [(7, 11)], bad=bad)
    return runs + runs_of("cross_entropy", names, [(4, 5000)], bad=5000)


def updates():
    names, shapes = ("count", "does"), [(count, does) for count in (1, 7, 1024, 1025, 3000) for does in (1.0, 0.0)]
    runs = runs_of("adamw", names, shapes, ["float32"], split=False)
    for grads in (*DTYPES, "bfloat16"):
        runs += runs_of("adamw", names, shapes, ["float32"], split=True, grads=grads)
    return runs + runs_of("halves", ["count"], [(1,), (1025,)], ["float32"])


def strides(*parts, layouts=LAYOUTS, **options):
    """Fused parts bring any tensor into the form that the kernels take."""
    return [run for part in parts for run in runs_of(f"fused.{part}", ["layout"], [(x,) for x in layouts], **options)]


RUNS = {
    "norms": norms(),
    "gradients of norms": gradients_of_norms(),
    "rotary embedding": rotary_embedding(),
    "gates": gates(),
    "losses": losses(),
    "updates": updates(),
    "strides": strides("add_norm", "norm_linear", "swiglu_linear", "linear_cross_entropy"),
    "strides of a gain": strides("add_norm", "norm_linear", layouts=["contiguous"], gain="every_other"),
    "a gain of one number": strides("add_norm", "norm_linear", layouts=["contiguous"], gain="broadcast"),
    "strides of heads": strides("rotary_heads"),
}


@pytest.fixture(scope="module")
def wrong():
    """Lines by name."""
    results = iter(interpret("tests.unit.kernels.interpret_pointwise", [run for runs in RUNS.values() for run in runs]))
    lines = {name: [line for _ in runs for line in next(results)] for name, runs in RUNS.items()}
    assert next(results, None) is None
    return lines


@pytest.mark.parametrize("name", RUNS)
def test_like_the_formula(wrong, name):
    assert RUNS[name]
    assert not wrong[name], "\n".join(wrong[name])
