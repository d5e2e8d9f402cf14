"""The Hopper kernels without a GPU, in the emulator of hopper_emulator/: forward and backward, against float64.

tests/gpu runs many more cases on a GPU; this finds wrong indices and faults of synchronization on any machine.
"""

from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import pytest

from tests.unit.kernels.attention_cases import CASES, Case
from tests.unit.kernels.attention_worker import started
from tests.unit.kernels.packed_cases import Packed, random_packed, shortened

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")]

WIDE = (136, 160, 192, 200, 256)
"""Head dims with a pass for each gradient."""
NARROW = (40, 64, 72, 80, 96, 128)
ONE_HEAD = {"heads": 1, "kv_heads": 1}
DOCUMENTS = Packed((40, 3, 70), (90, 3, 300), d=192, **ONE_HEAD)
SPLIT = {d: Case(300, 520, d=d, heads=3, kv_heads=1) for d in (64, 128)}
"""With few multiprocessors keys are split in forward, queries in backward."""
FAR = {d: Case(200, 600, d=d, **ONE_HEAD) for d in (64, 128, 256)}
FEW_QUERIES = {d: Case(64, 200, d=d, is_causal="bottom-right", window=(0, 9), **ONE_HEAD) for d in (64, 136)}
OVERFLOWING = {"magnitude": 30, "large": True, "multiprocessors": 1}
"""Scores far above those of the first keys; with more multiprocessors keys are split, and programs see few."""
SUM = "        sums, _, _ = waited(start_products(b_ds16, s_b1, sums), b_ds16, b_ds16)\n"
SUMS_KV = "        sums_v, sums = waited_both(v_tokens, start_products(b_ds16, s_b1, sums), b_p16, b_ds16)\n"
FREE_1 = "        mbarrier.arrive(barriers.empty_1.index(slot))\n"
FREE_2 = "        mbarrier.arrive(barriers.empty_2.index(slot_2))\n"
END = "        return sums, sums_v\n"


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


@pytest.mark.parametrize("number", range(0, len(CASES), 5), ids=list(CASES)[::5])
def test_case(check, number):
    """Every fifth case; all head dims, both dtypes, programs of both sizes, gradients of the logsumexp."""
    case = [*CASES.values()][number]
    number //= 5
    d = (*NARROW, *WIDE)[number % 11]
    case = replace(case, d=d, scale=case.scale and case.scale * 8 * d**-0.5)
    dtype = ("bfloat16", "float16")[number // 2 % 2]
    check(case, dtype, small_programs=number % 2 == 0, seed=number, through_lse=number % 3 == 0)


@pytest.mark.parametrize("seed", range(8))
def test_random_packings(check, seed):
    case = shortened(random_packed(seed, longest=200, head_dims=WIDE if seed % 2 else NARROW))
    dtype = ("bfloat16", "float16")[seed // 2 % 2]
    check(case, dtype, small_programs=seed // 4 % 2 == 0, seed=seed, through_lse=seed % 3 == 0)


@pytest.mark.parametrize(("d", "multiprocessors"), [(64, 5), (128, 4)])
def test_split_keys_and_queries(check, d, multiprocessors):
    """Without a mask, where the last programs would leave multiprocessors idle."""
    check(SPLIT[d], multiprocessors=multiprocessors, small_programs=False)


@pytest.mark.parametrize(
    ("d", "heads", "multiprocessors"), [(64, 3, 132), (128, 7, 8)], ids=["each head", "uneven parts"]
)
def test_programs_share_the_heads_of_a_group(check, d, heads, multiprocessors):
    case = Case(200, 200, d=d, heads=heads, kv_heads=1, is_causal=True)
    check(case, multiprocessors=multiprocessors, small_programs=False)


@pytest.mark.parametrize("d", [64, 256])
def test_second_pass_after_an_overflow(check, d):
    check(FAR[d], **OVERFLOWING, small_programs=d == 64)


@pytest.mark.parametrize("d", [64, 136])
def test_windows_of_few_queries(check, d):
    """The first warpgroup of a program has no queries: only keys that the others see may be loaded."""
    check(FEW_QUERIES[d], small_programs=False)


@pytest.mark.parametrize(
    "case",
    [
        Case(150, 270, d=64, is_causal="bottom-right", heads=2, kv_heads=1),
        Case(270, 150, d=80, window=(60, 5), is_causal="top-left", **ONE_HEAD),
        Case(200, 200, d=96, heads=4, kv_heads=2),
        Case(65, 140, d=128, is_causal="top-left", **ONE_HEAD),
        Packed((40, 3, 70, 0, 129), (90, 3, 300, 5, 1), d=128, heads=2, kv_heads=1),
    ],
    ids=lambda case: case.name,
)
def test_repeatable_gradients(check, case):
    """At head dims up to 128 too, dK and dV have a pass, and dQ has one."""
    check(case, impl="flash_hopper_repeatable", through_lse=True)


def test_a_gradient_that_the_copy_engine_cannot_read(check):
    check(Case(70, 70, d=64), dout_layout="broadcast")


# -- what the emulator finds ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A change of a kernel's source, and what the emulator says in a case that meets it."""

    module: str
    old: str
    new: str
    message: str
    case: Case | Packed
    options: dict[str, Any] = field(default_factory=dict)


FAULTS = {
    "no fence before a copy": Fault(
        "hopper_forward",
        "        store_sums(s_o.reshape((ROWS, D)), b_o)\n        fence_async_shared()\n",
        "        store_sums(s_o.reshape((ROWS, D)), b_o)\n",
        "without a fence",
        DOCUMENTS,
    ),
    "a copy to shared memory that nothing waits for": Fault(
        "hopper_forward",
        "        mbarrier.wait(over.q_full.index(W), 0)  # a copy",
        "        # a copy",
        "a copy that nothing waits for",
        DOCUMENTS,
    ),
    "a copy to global memory that nothing waits for": Fault(
        "hopper_passes",
        "    tma.store_wait(0)\n",
        "",
        "a copy to global memory that nothing waits for",
        DOCUMENTS,
    ),
    "the other phase of a barrier": Fault(
        "hopper_forward",
        "mbarrier.wait(over.empty.index(slot), (t // config.STAGES & 1) ^ 1)",
        "mbarrier.wait(over.empty.index(slot), t // config.STAGES & 1)",
        "deadlock",
        DOCUMENTS,
    ),
    "a phase that does not exist": Fault(
        "hopper_forward",
        "mbarrier.wait(over.full.index(slot), t // config.STAGES & 1)\n    s_k",
        "mbarrier.wait(over.full.index(slot), t // config.STAGES)\n    s_k",
        "a wait for phase 2",
        FAR[256],
        {"multiprocessors": 1},
    ),
    "fewer bytes announced than copied": Fault(
        "hopper_forward",
        "mbarrier.expect(bar, 2 * BYTES)",
        "mbarrier.expect(bar, BYTES)",
        "more than announced",
        DOCUMENTS,
    ),
    "a buffer is free before a matmul has read it": Fault(
        "hopper_passes",
        SUM,
        FREE_1 + SUM + END,
        "not finite",
        DOCUMENTS,
    ),
    "a buffer is free before the second of two matmuls has read it": Fault(
        "hopper_passes",
        SUMS_KV,
        FREE_1 + SUMS_KV + FREE_2 + END,
        "not finite",
        Case(300, 300, d=64, is_causal=True, **ONE_HEAD),
        {"impl": "flash_hopper_repeatable"},
    ),
    "a matmul before its operand is there": Fault(
        "hopper_passes",
        "    mbarrier.wait(barriers.full_2.index(slot_2), t // config.STAGES_2 & 1)\n",
        "",
        "a copy that nothing waits for",
        DOCUMENTS,
    ),
    "the rows of another document": Fault(
        "hopper_passes",
        "            origin, origin_b = origin_b, origin\n",
        "            pass\n",
        "outside of all tensors",
        DOCUMENTS,
    ),
    "dS before the other warpgroup has stored it": Fault(
        "hopper_backward",
        "        mbarrier.wait(barriers.done.index((t - 1) % STAGES), (t - 1) // STAGES & 1)\n",
        "",
        "without a fence",
        Case(300, 200, d=64, **ONE_HEAD),
    ),
    "a signal at a barrier that the producer has not waited for yet": Fault(
        "hopper_backward",
        "    mbarrier.arrive(barriers.last_dq)\n",
        "    mbarrier.arrive(barriers.last_dq)\n    mbarrier.arrive(barriers.done.index((last + 1) % STAGES))\n",
        "deadlock",
        Case(70, 70, d=64, **ONE_HEAD),
    ),
    "tiles of keys that no query sees": Fault(
        "hopper_forward",
        "gl.maximum(gl.maximum(row, 0) + lo, 0)",
        "gl.maximum(row + lo, 0)",
        "a copy that nothing waits for",
        FEW_QUERIES[64],
        {"small_programs": False},
    ),
    "values beside a mask are used": Fault(
        "hopper_backward",
        "b_do = tl.load(p_do + do_at, mask=m_tile, other=0.0)",
        "b_do = tl.load(p_do + do_at, mask=m_tile)",
        "not finite",
        Case(70, 70, d=64, **ONE_HEAD),
    ),
    "a wrong sum of split keys": Fault(
        "hopper_forward", "        b_l += weight\n", "        b_l += 2 * weight\n", "out is off by", SPLIT[64],
        {"multiprocessors": 5, "small_programs": False},
    ),
    "a wrong sum of split queries": Fault(
        "hopper_backward",
        "        x += gl.load(at + split * (2 * BLOCK_N * D))",
        "        x += 2 * gl.load(at + split * (2 * BLOCK_N * D))",
        "dk is off by",
        SPLIT[128],
        {"multiprocessors": 4, "small_programs": False},
    ),
    "a second pass without keys": Fault(
        "hopper_forward",
        "            _load_tiles(desc_k, desc_v, retry.second, work, config)\n",
        "",
        "deadlock",
        FAR[128],
        {"dtype": "bfloat16", **OVERFLOWING},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(ask, name):
    """The order of events is random, so that some faults show in some runs only."""
    fault = FAULTS[name]
    options = {"dtype": "float16", **fault.options}
    found = set()
    for seed in range(40):
        wrong = ask(fields=asdict(fault.case), seed=seed, fault=[fault.module, fault.old, fault.new], **options)
        found |= {line.strip().splitlines()[-1] for line in wrong}
        if any(fault.message in line for line in found):
            return
    pytest.fail(f"not found: {fault.message}; but: {found}")
