"""The Hopper kernels without a GPU, in the emulator of hopper_emulator/: forward and backward, against float64.

tests/gpu runs many more cases on a GPU; this finds wrong indices and faults of synchronization on any machine.
"""

from dataclasses import asdict, replace
from importlib.util import find_spec

import pytest

from tests.unit.kernels.attention_cases import CASES, Case
from tests.unit.kernels.attention_worker import started
from tests.unit.kernels.packed_cases import Packed, random_packed, shortened

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")]

WIDE = (136, 160, 192, 200, 256)
"""Head dims with a pass for each gradient."""
NARROW = (40, 64, 72, 80, 96, 128)


@pytest.fixture(scope="module")
def ask():
    with started("tests.unit.kernels.emulate_hopper") as ask:
        yield ask


@pytest.fixture
def check(ask):
    def check(case, dtype="bfloat16", **options):
        wrong = ask(fields=asdict(case), dtype=dtype, **options)
        assert not wrong, "\n".join(wrong)

    return check


@pytest.mark.parametrize("number", range(0, len(CASES), 3), ids=list(CASES)[::3])
def test_case(check, number):
    """Every third case; all head dims, both dtypes, programs of both sizes, gradients of the logsumexp."""
    case = [*CASES.values()][number]
    number //= 3
    d = (*NARROW, *WIDE)[number % 11]
    case = replace(case, d=d, scale=case.scale and case.scale * 8 * d**-0.5)
    dtype = ("bfloat16", "float16")[number // 2 % 2]
    check(case, dtype, small_programs=number % 2 == 0, seed=number, through_lse=number % 3 == 0)


@pytest.mark.parametrize("seed", range(12))
def test_random_packings(check, seed):
    case = shortened(random_packed(seed, longest=200, head_dims=WIDE if seed % 2 else NARROW))
    dtype = ("bfloat16", "float16")[seed // 2 % 2]
    check(case, dtype, small_programs=seed // 4 % 2 == 0, seed=seed, through_lse=seed % 3 == 0)


@pytest.mark.parametrize("d", [64, 128])
def test_split_keys_and_queries(check, d):
    """Without a mask, where the last programs would leave multiprocessors idle."""
    case = Case(300, 520, d=d, heads=3, kv_heads=1)
    check(case, multiprocessors=4, small_programs=False)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_second_pass_after_an_overflow(check, d):
    check(Case(200, 600, d=d, heads=1, kv_heads=1), magnitude=30, large=True, small_programs=d == 64)


# -- what the emulator finds ------------------------------------------------------------------------------------------


WIDE_SUMS = "    sums, _, _ = waited(start_products(b_left, s_b1 if HAS_DS else s_b2, sums), b_left, b_left)"
WIDE_FREE_2 = "    if not HAS_DS:\n        mbarrier.arrive(barriers.empty_2.index(slot_2))"
WIDE_FREE_1 = "    mbarrier.arrive(barriers.empty_1.index(slot))"
ONE_HEAD = {"heads": 1, "kv_heads": 1}
CASE_OF = {
    "hopper_forward": Packed((40, 3, 70), (90, 3, 300), d=192, **ONE_HEAD),
    "hopper_wide": Packed((40, 3, 70), (90, 3, 300), d=192, **ONE_HEAD),
    "hopper_backward": Case(300, 200, d=64, **ONE_HEAD),
}
FAULTS = {
    "no fence before a copy": (
        "hopper_forward",
        "        store_sums(s_o.reshape((ROWS, D)), b_o)\n        fence_async_shared()\n",
        "        store_sums(s_o.reshape((ROWS, D)), b_o)\n",
        "without a fence",
    ),
    "a copy that nothing waits for": (
        "hopper_forward",
        "        mbarrier.wait(over.q_full.index(W), 0)  # a copy",
        "        # a copy",
        "nothing waits for",
    ),
    "the other phase of a barrier": (
        "hopper_forward",
        "mbarrier.wait(over.empty.index(slot), (t // config.STAGES & 1) ^ 1)",
        "mbarrier.wait(over.empty.index(slot), t // config.STAGES & 1)",
        "deadlock",
    ),
    "fewer bytes announced than copied": (
        "hopper_forward",
        "mbarrier.expect(bar, 2 * BYTES)",
        "mbarrier.expect(bar, BYTES)",
        "more than announced",
    ),
    "a buffer is free before a matmul has read it": (
        "hopper_wide",
        f"{WIDE_SUMS}\n{WIDE_FREE_2}\n{WIDE_FREE_1}\n",
        f"{WIDE_FREE_1}\n{WIDE_SUMS}\n{WIDE_FREE_2}\n",
        "not finite",
    ),
    "a matmul before its operand is there": (
        "hopper_wide",
        "    mbarrier.wait(barriers.full_2.index(slot_2), t // config.STAGES_2 & 1)\n",
        "",
        "nothing waits for",
    ),
    "the rows of another document": (
        "hopper_wide",
        "            origin, origin_b = origin_b, origin\n",
        "            pass\n",
        "outside of all tensors",
    ),
    "dS before the other warpgroup has read it": (
        "hopper_backward",
        "        mbarrier.wait(barriers.done.index((t - 1) % STAGES), (t - 1) // STAGES & 1)\n",
        "",
        "dq",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(ask, name):
    *fault, message = FAULTS[name]
    fields = asdict(CASE_OF[fault[0]])
    found = []
    for seed in range(6):
        found += ask(fields=fields, dtype="float16", seed=seed, fault=fault)
        if any(message in line for line in found):
            return
    pytest.fail("\n".join(found))
