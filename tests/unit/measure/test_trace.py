"""Kernels of a step: their kinds, phases and parts, from synthetic traces, an H200's and this CPU's.

`slow_reading` is a second reader, written from the format alone. Both must agree on traces too large to check by hand.
"""

import ast
import gzip
import itertools
import json
import random
import re
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, record_function

from cs336_systems.config import ModelConfig, RunConfig
from cs336_systems.measure import kernel_trace
from cs336_systems.measure.kernel_trace import profile_steps
from cs336_systems.measure.readers import trace
from cs336_systems.measure.readers.kernel_classes import KINDS, OUTPUT, SCORES, SOFTMAX, classify
from cs336_systems.measure.readers.recorded_tables import KernelRow, KindRow, PartRow, rows_of
from cs336_systems.measure.readers.trace import read_chrome, trace_metrics
from cs336_systems.record import Metric
from cs336_systems.step.train_step import TrainStep
from tests.helpers import PACKAGE, ROOT, refused
from tests.unit.any_text import any_text

H200 = ROOT / "tests" / "golden" / "trace_h200.json.gz"
PHASES = ("forward", "loss", "backward", "sync", "optimizer")
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
MICRO = 1e-6

# -- kinds ------------------------------------------------------------------------------------------------------------

AT = "void at::native::"
ANONYMOUS = AT + "(anonymous namespace)::"
COPY_LAMBDA = "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda(float)#1}"

KERNELS = {
    "matmul": [
        "nvjet_sm90_tst_64x8_64x16_1x4_h_bz_TNT",
        "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x256_16x3_tn_align4>(cutlass::Params)",
        "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage4_warpsize2x2x1_tensor16x8x8_kernel",
        "ampere_sgemm_128x64_tn",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>(cublasGemvParamsEx<int>)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, true, false, false>(int, float*)",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t>>(params)",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float>::Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x64x64_4x1x1_kernel0_0",
    ],
    "elementwise": [
        AT + "vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, float, MulFunctor> >(int)",
        AT + "unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>, 4>(int)",
        AT + "elementwise_kernel<128, 4, gpu_kernel_impl_nocast<(anonymous namespace)::masked_fill_kernel()> >(int)",
        AT + "triu_tril_kernel<bool, int, true, 8, false>(at::cuda::detail::TensorInfo<bool, int>)",
        "triton_poi_fused__softmax_masked_fill_5",
        "triton_poi_fused__to_copy_2",
        "triton_poi_fused__scaled_dot_product_flash_attention_4",
    ],
    "softmax/reduction": [
        AT + "(anonymous namespace)::cunn_SoftMaxForward<8, c10::BFloat16, float, c10::BFloat16>(c10::BFloat16*)",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 6, false, false>(float*, float const*)",
        AT + "reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float> > >(float)",
        ANONYMOUS + "vectorized_layer_norm_kernel<float, float, true>(int, float, float const*)",
        ANONYMOUS + "GammaBetaBackwardCUDAKernelTemplate<float, float, 32u, 32u, 256u, false, true, true>(long)",
        ANONYMOUS + "nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(float*, float*)",
        "triton_red_fused__to_copy_mean_pow_1",
        "triton_per_fused__scaled_dot_product_flash_attention_backward_add_9",
    ],
    "copy": [
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        AT + f"unrolled_elementwise_kernel<at::native::{COPY_LAMBDA}, std::array<char*, 2ul>, 4>(int)",
        AT + "vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)>(int)",
        AT + "vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >(int)",
        ANONYMOUS + "CatArrayBatchedCopy_aligned16_contig<OpaqueType<4u>, unsigned int, 3, 128, 1>(char*)",
    ],
    "optimizer": [
        ANONYMOUS + "multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4> >()",
    ],
    "communication": [
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    ],
    "other": [
        AT + "vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)",
        ANONYMOUS + "embedding_backward_feature_kernel<float, float, long>(long const*, float const*, float*)",
        "void at_cuda_detail::cub::DeviceRadixSortSingleTileKernel<at_cuda_detail::cub::Policy900>(long const*, long*)",
        "void at_cuda_detail::cub::DeviceScanKernel<at_cuda_detail::cub::Policy900, int const*>(int const*, int*)",
    ],
    "unknown": ["my_secret_kernel_v2", "void zorp::quux<float>(float*)", ""],
}  # fmt: skip

OPERATORS = {
    "matmul": ["aten::mm", "aten::bmm", "aten::addmm"],
    "attention": ["aten::_scaled_dot_product_flash_attention_for_cpu"],
    "elementwise": ["aten::mul", "aten::add", "aten::silu", "aten::masked_fill_", "aten::triu"],
    "softmax/reduction": ["aten::_softmax", "aten::_log_softmax", "aten::_softmax_backward_data", "aten::sum"],
    "copy": ["aten::copy_", "aten::fill_", "aten::cat"],
    "optimizer": ["aten::_fused_adamw_"],
    "other": ["aten::embedding", "aten::index_select"],
}


CASES = [(kind, name) for table in (KERNELS, OPERATORS) for kind, names in table.items() for name in names]


@pytest.mark.parametrize(("kind", "name"), CASES, ids=str)
def test_kind_of_a_kernel(kind, name):
    """Most names match several kinds (a reduction inside NCCL, CUTLASS inside attention), so the order matters."""
    assert classify(name) == kind


def attention_kernels() -> list[str]:
    """Return the kernels of attention, read from the source: it cannot be imported without Triton. Device functions
    that kernels call have other names."""
    trees = [ast.parse(path.read_text()) for path in (PACKAGE / "kernels" / "flash").glob("*.py")]
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    kernels = [f.name for f in functions if f.name.endswith("_kernel") and not f.name.startswith("_")]
    assert {"forward_kernel", "gradient_kernel", "combine_kernel"} <= {*kernels}
    return sorted({*kernels})


@pytest.mark.parametrize("name", attention_kernels())
def test_kind_of_this_packages_kernels(name):
    """A profile shows a Triton kernel under the name of its function."""
    assert classify(name) == "attention"


@settings(max_examples=50, deadline=None)
@given(any_text())
def test_every_name_has_a_kind(name):
    assert classify(name) in KINDS


# -- synthetic traces -------------------------------------------------------------------------------------------------

MAIN, OTHER, STREAM = 100, 200, 7


class Script:
    """A trace in the format of torch.profiler. Times in microseconds."""

    def __init__(self):
        self.events = []
        self.correlation = itertools.count(1)

    def event(self, category, name, start, stop, thread, **args):
        times = {"ts": start, "dur": round(stop - start, 6)}
        self.events.append({"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, **times, "args": args})

    def range(self, name, start, stop, thread=MAIN):
        self.event("user_annotation", name, start, stop, thread)

    def operator(self, name, start, stop, *, sequence=None, forward_thread=0, thread=MAIN):
        known = {} if sequence is None else {"Sequence number": sequence, "Fwd thread id": forward_thread}
        self.event("cpu_op", name, start, stop, thread, **known)

    def kernel(self, name, start, stop, *, launch=None, thread=MAIN, category="kernel", call="cuda_runtime"):
        number = next(self.correlation)
        if launch is not None:
            self.event(call, "cudaLaunchKernel", launch, launch + 1, thread, correlation=number)
        self.event(category, name, start, stop, STREAM, correlation=number, device=0, stream=STREAM)

    def document(self):
        extras = [
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "python3"}},
            {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 1, "pid": 1, "tid": MAIN, "ts": 1},
            {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 5},
        ]
        return {"schemaVersion": 1, "traceEvents": [*extras, *self.events], "displayTimeUnit": "ms"}

    def read(self, folder):
        path = folder / "trace.json"
        path.write_text(json.dumps(self.document()))
        return read_chrome(path)


def by_name(trace):
    return {kernel.name: kernel for kernel in trace.kernels}


@pytest.fixture
def step_script():
    """The ranges of one step: forward 0-100, loss 100-200, backward 200-400, optimizer 400-500."""
    script = Script()
    for name, start, stop in (("forward", 0, 99), ("loss", 100, 199), ("backward", 200, 399), ("optimizer", 400, 499)):
        script.range(name, start, stop)
    return script


def test_the_phase_is_that_of_the_launch(step_script, tmp_path):
    """The GPU runs behind the host: most kernels of forward start while Python is in backward."""
    step_script.kernel("late", 250, 300, launch=10)
    step_script.kernel("prompt", 120, 130, launch=110)
    step_script.kernel("after the step", 900, 950, launch=410)
    step_script.kernel("driver", 300, 301, launch=20, call="cuda_driver")
    step_script.kernel("between", 600, 601, launch=550)
    step_script.kernel("no launch", 50, 60)
    step_script.kernel("autograd thread", 500, 510, launch=300, thread=OTHER)
    trace = step_script.read(tmp_path)
    assert {name: kernel.phase for name, kernel in by_name(trace).items()} == {
        "late": "forward",
        "prompt": "loss",
        "after the step": "optimizer",
        "driver": "forward",
        "between": None,
        "no launch": None,
        "autograd thread": "backward",
    }
    assert trace.on_gpu
    assert {kernel.name for kernel in trace.of("forward")} == {"late", "driver"}
    assert trace.of("sync") == []


def test_durations_are_exact_after_weeks_of_uptime(tmp_path):
    """Times count from boot: end minus start, both in seconds, would be off by up to half a nanosecond."""
    script, days = Script(), 45 * 86400e6
    script.range("forward", days, days + 1000)
    for index in range(50):
        script.kernel(f"nvjet_{index}", days + 10 * index, days + 10 * index + 1, launch=days + 10 * index)
        script.events[-1]["dur"] = 0.768
    kernels = script.read(tmp_path).kernels
    assert [kernel.duration for kernel in kernels] == pytest.approx([0.768 * MICRO] * 50, rel=1e-6)
    assert kernels[1].start - kernels[0].start == pytest.approx(10 * MICRO)


def test_copies_and_fills_are_kernels_and_operators_and_annotations_are_not(step_script, tmp_path):
    step_script.operator("aten::mm", 5, 20)
    step_script.kernel("Memcpy HtoD (Pageable -> Device)", 10, 12, launch=5, category="gpu_memcpy")
    step_script.kernel("Memset (Device)", 20, 22, launch=15, category="gpu_memset")
    step_script.kernel("nvjet_x", 30, 32, launch=25)
    step_script.event("gpu_user_annotation", "forward", 10, 32, STREAM)
    step_script.event("overhead", "Activity Buffer Request", 10, 32, 0)
    trace = step_script.read(tmp_path)
    assert Counter(kernel.kind for kernel in trace.kernels) == {"copy": 2, "matmul": 1}


def test_part_is_the_innermost_range_of_the_launching_thread(step_script, tmp_path):
    step_script.range("ProfilerStep#3", 0, 500)
    step_script.range("block", 10, 90)
    step_script.range("attention", 20, 60)
    step_script.range("scores", 30, 40)
    step_script.range("elsewhere", 60, 80, thread=OTHER)
    step_script.range("Optimizer.step#AdamW.step", 410, 490)
    step_script.kernel("in scores", 700, 701, launch=35)
    step_script.kernel("after scores", 702, 703, launch=45)
    step_script.kernel("in block", 704, 705, launch=70)
    step_script.kernel("in none", 706, 707, launch=95)
    step_script.kernel("update", 708, 709, launch=420)
    step_script.kernel("from elsewhere", 710, 711, launch=70, thread=OTHER)
    kernels = by_name(step_script.read(tmp_path))
    assert {name: kernel.part or None for name, kernel in kernels.items()} == {
        "in scores": "scores",
        "after scores": "attention",
        "in block": "block",
        "in none": None,
        "update": None,
        "from elsewhere": "elsewhere",
    }
    assert kernels["from elsewhere"].phase == "forward"


def test_part_in_backward_is_that_of_the_forward_operator(step_script, tmp_path):
    step_script.range("scores", 30, 40)
    step_script.operator("aten::matmul", 28, 39, sequence=5)  # begins outside the range: only the last counts
    step_script.operator("aten::bmm", 32, 38, sequence=5)
    step_script.operator("aten::mm", 50, 60, sequence=6)
    step_script.operator("evaluate_function: MmBackward0", 210, 230, sequence=6, forward_thread=1, thread=OTHER)
    step_script.operator("evaluate_function: BmmBackward0", 240, 270, sequence=5, forward_thread=1, thread=OTHER)
    step_script.operator("BmmBackward0", 242, 268, sequence=5, forward_thread=1, thread=OTHER)
    step_script.operator("aten::bmm", 250, 260, thread=OTHER)
    step_script.operator("AddBackward0", 280, 290, sequence=99, forward_thread=1, thread=OTHER)
    step_script.range("own", 300, 320, thread=OTHER)
    step_script.operator("BmmBackward0", 305, 315, sequence=5, forward_thread=1, thread=OTHER)
    # An operator without a gradient carries the number of the next one that has a gradient.
    step_script.range("first", 70, 75)
    step_script.range("second", 80, 90)
    step_script.operator("aten::silu", 82, 88, sequence=7)
    step_script.operator("aten::ones", 71, 74, sequence=7)  # earlier in time, later in the file
    step_script.operator("SiluBackward0", 340, 350, sequence=7, forward_thread=1, thread=OTHER)
    for name, launch in (("mm", 220), ("bmm", 255), ("unseen", 285), ("in its own", 310), ("bare", 330), ("silu", 345)):
        step_script.kernel(name, 600 + launch, 601 + launch, launch=launch, thread=OTHER)
    step_script.kernel("other thread", 950, 951, launch=255)
    step_script.operator("aten::relu", 62, 66, sequence=5, forward_thread=1)
    step_script.kernel("in forward", 960, 961, launch=64)  # sequence numbers apply in backward only
    parts = {kernel.name: kernel.part or None for kernel in step_script.read(tmp_path).kernels}
    assert parts == {
        "mm": None,
        "bmm": "scores",
        "unseen": None,
        "in its own": "own",
        "bare": None,
        "silu": "second",
        "other thread": None,
        "in forward": None,
    }


def test_totals_by_name_kind_and_part(step_script, tmp_path):
    """Two streams overlap: busy time is the union of the kernels, other totals are sums."""
    step_script.range("scores", 20, 50)
    step_script.kernel("nvjet_a", 1000, 1010, launch=10)
    step_script.kernel("nvjet_b", 1005, 1025, launch=30)
    step_script.kernel("nvjet_a", 1040, 1046, launch=40)
    step_script.kernel("nvjet_a", 1060, 1062, launch=60)
    step_script.kernel("Memset (Device)", 1007, 1009, launch=70, category="gpu_memset")
    step_script.kernel("nvjet_b", 1100, 1101, launch=150)
    trace = step_script.read(tmp_path)
    rows = trace.table("forward")
    assert [row.name for row in rows] == ["nvjet_b", "nvjet_a", "Memset (Device)"]
    assert sorted(rows[1].durations) == pytest.approx([2 * MICRO, 6 * MICRO, 10 * MICRO])
    assert (rows[1].total, rows[1].median) == pytest.approx((18 * MICRO, 6 * MICRO))
    assert {row.name: len(row.durations) for row in trace.table()} == {"nvjet_a": 3, "nvjet_b": 2, "Memset (Device)": 1}
    assert trace.by_kind("forward") == {
        "matmul": (pytest.approx(38 * MICRO), 4),
        "copy": (pytest.approx(2 * MICRO), 1),
    }
    assert trace.by_kind()["matmul"] == (pytest.approx(39 * MICRO), 5)
    parts = {key: seconds for key, seconds in trace.by_part("forward").items() if key[0]}
    assert parts == {("scores", "matmul"): pytest.approx(26 * MICRO)}
    assert trace.busy("forward") == pytest.approx((25 + 6 + 2) * MICRO)
    assert trace.busy("loss") == pytest.approx(1 * MICRO)
    assert trace.busy("sync") == 0


def test_steps_and_phases(tmp_path):
    script = Script()
    for number, start in enumerate((0, 1000, 2000)):
        script.range(f"ProfilerStep#{number}", start, start + 500)
        for index, name in enumerate(("forward", "loss", "backward", "optimizer")):
            script.range(name, start + 100 * index, start + 100 * index + 90)
        script.kernel("nvjet_a", start + 600, start + 610, launch=start + 210)
    trace = script.read(tmp_path)
    assert trace.steps == 3
    assert [span.name for span in sorted(trace.phases, key=lambda s: s.start)] == list(PHASES[:3] + PHASES[4:]) * 3
    assert all(span.end - span.start == pytest.approx(90 * MICRO) for span in trace.phases)
    assert len(trace.of("backward")) == 3


# -- without a GPU ----------------------------------------------------------------------------------------------------


def test_operators_count_with_their_self_time(step_script, tmp_path):
    """matmul takes 30 of linear's 40, and mm 20 of those; a grandchild is not subtracted twice."""
    step_script.range("scores", 60, 80)
    step_script.operator("aten::linear", 10, 50)
    step_script.operator("aten::matmul", 15, 45, sequence=3)
    step_script.operator("aten::mm", 20, 40, sequence=4)
    step_script.operator("aten::bmm", 62, 78, sequence=5)
    step_script.operator("aten::mul", 62, 68, thread=OTHER)
    step_script.operator("BmmBackward0", 220, 240, sequence=5, forward_thread=1)
    step_script.operator("aten::bmm_grad", 225, 235)
    trace = step_script.read(tmp_path)
    assert not trace.on_gpu
    kernels = by_name(trace)
    own = {"aten::linear": 10, "aten::matmul": 10, "aten::mm": 20, "aten::bmm": 16, "aten::mul": 6, "BmmBackward0": 10}
    own["aten::bmm_grad"] = 10
    assert {name: kernel.duration for name, kernel in kernels.items()} == {
        name: pytest.approx(time * MICRO) for name, time in own.items()
    }
    assert {name: kernel.phase for name, kernel in kernels.items() if kernel.phase != "forward"} == {
        "BmmBackward0": "backward",
        "aten::bmm_grad": "backward",
    }
    parts = {name: kernel.part for name, kernel in kernels.items() if kernel.part}
    assert parts == {"aten::bmm": "scores", "BmmBackward0": "scores", "aten::bmm_grad": "scores"}


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_self_times_add_up_to_the_outermost_operators(tmp_path_factory, seed):
    """For any nesting and any order in the file, nothing is counted twice and nothing is lost."""
    choose = random.Random(seed)
    script = Script()
    script.range("forward", 0, 10_000)

    def fill(start, stop, depth):
        while stop - start > 4 and depth < 6:
            begin = start + choose.randint(1, 3)
            end = min(stop - 1, begin + choose.randint(2, max(2, (stop - start) // 2)))
            if end <= begin:
                return
            script.operator(f"aten::op{len(script.events)}", begin, end)
            fill(begin, end, depth + 1)
            start = end

    for start in range(0, 1000, 200):
        script.operator(f"aten::top{start}", start + 1, start + 151)
        fill(start + 1, start + 151, 0)
    choose.shuffle(script.events)
    trace = script.read(tmp_path_factory.mktemp("tree"))
    assert len(trace.kernels) == len(script.events) - 1
    assert all(kernel.duration >= 0 for kernel in trace.kernels)
    assert sum(kernel.duration for kernel in trace.kernels) == pytest.approx(5 * 150 * MICRO)


def test_adjacent_operators_are_not_nested(tmp_path):
    """One ends in the microsecond in which the next begins: rounding must not make the next its child."""
    choose = random.Random(0)
    for _ in range(20):
        script, base = Script(), choose.randint(10**9, 4 * 10**12)
        for index in range(40):
            script.operator(f"aten::op{index}", base + 3 * index, base + 3 * index + 3)
        durations = [kernel.duration for kernel in script.read(tmp_path).kernels]
        assert durations == pytest.approx([3 * MICRO] * 40, rel=1e-3), base


# -- a second reader --------------------------------------------------------------------------------------------------


def slow_reading(document):
    """Return (name, phase, part, microseconds) of every GPU kernel by searching all events each time."""
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    ranges = [event for event in events if event["cat"] == "user_annotation"]
    phases = [event for event in ranges if event["name"] in PHASES]
    parts = [r for r in ranges if r["name"] not in PHASES and not r["name"].startswith(("ProfilerStep#", "Optimizer."))]
    operators = [event for event in events if event["cat"] == "cpu_op"]
    launches = {
        event["args"]["correlation"]: event for event in events if event["cat"] in ("cuda_runtime", "cuda_driver")
    }

    def holding(candidates, event):
        found = [c for c in candidates if c["ts"] <= event["ts"] <= c["ts"] + c["dur"]]
        return min(found, key=lambda c: c["dur"], default=None)

    def of_thread(candidates, event):
        return [c for c in candidates if c["tid"] == event["tid"]]

    def part_of(launch, phase):
        part = holding(of_thread(parts, launch), launch)
        if part is None and phase == "backward":
            backward = [o for o in of_thread(operators, launch) if o["args"].get("Fwd thread id", 0) > 0]
            operator = holding(backward, launch)
            if operator is not None:
                number = operator["args"]["Sequence number"]
                forward = [
                    o
                    for o in operators
                    if o["args"].get("Sequence number") == number and o["args"]["Fwd thread id"] == 0
                ]
                if forward:
                    last = max(forward, key=lambda o: o["ts"])
                    part = holding(of_thread(parts, last), last)
        return part["name"] if part else None

    found = []
    for event in events:
        if event["cat"] in GPU_CATEGORIES:
            launch = launches.get(event["args"]["correlation"])
            phase = holding(phases, launch) if launch else None
            phase = phase["name"] if phase else None
            found.append((event["name"], phase, part_of(launch, phase) if launch else None, event["dur"]))
    return found


def as_read(trace):
    return [(k.name, k.phase, k.part or None, round(k.duration / MICRO, 3)) for k in trace.kernels]


@pytest.mark.parametrize("seed", range(5))
def test_both_readers_agree_on_a_random_trace(seed, tmp_path):
    choose = random.Random(seed)
    script = Script()
    for step in range(2):
        base = 10_000 * step
        script.range("forward", base, base + 2000)
        script.range("backward", base + 3000, base + 6000)
        script.range("sync", base + 6000.5, base + 6500)
        script.range("optimizer", base + 7000, base + 8000)
        for index in range(6):
            start = base + 300 * index + 10
            script.range(f"part {index}", start, start + 200)
            if choose.random() < 0.5:
                script.range("inner", start + 50, start + 150)
            number = 100 * step + index
            for _ in range(choose.randint(1, 3)):
                at = start + choose.randint(1, 260) + choose.random()
                script.operator("aten::mm", at, at + 5, sequence=number)
                script.kernel("nvjet_a", at + 4000, at + 4007, launch=at + 1)
            at = base + 5500 - 400 * index
            script.operator("outer", at, at + 300, sequence=number, forward_thread=1, thread=OTHER)
            script.operator("MmBackward0", at + 20, at + 200, sequence=number, forward_thread=1, thread=OTHER)
            for _ in range(3):
                launch = at + choose.randint(-50, 350) + choose.random()
                script.kernel("nvjet_b", launch + 3000, launch + 3010, launch=launch, thread=OTHER)
        at = base + choose.randint(6000, 9000) + choose.random()
        script.kernel("Memset (Device)", at + 100, at + 103, launch=at, category="gpu_memset")
    choose.shuffle(script.events)
    expected = [(*row[:3], round(row[3], 3)) for row in slow_reading(script.document())]
    assert len({row[1:3] for row in expected}) > 5, "the trace has many origins"
    assert Counter(as_read(script.read(tmp_path))) == Counter(expected)


# -- a trace of an H200 -----------------------------------------------------------------------------------------------

MADE_OF = [
    ("nvjet_", {"matmul"}),
    ("softmax_warp_", {"softmax/reduction"}),
    ("layer_norm", {"softmax/reduction"}),
    ("GammaBetaBackward", {"softmax/reduction"}),
    ("nll_loss_", {"softmax/reduction"}),
    ("copy_kernel_cuda", {"copy"}),
    ("FillFunctor", {"copy"}),
    ("Memcpy", {"copy"}),
    ("FusedAdamMathFunctor", {"optimizer"}),
    ("BinaryOpScalarFunctor", {"optimizer", "elementwise"}),  # counts the steps, by a foreach kernel
    ("gather_kernel", {"other"}),
    ("embedding_backward", {"other"}),
    ("flip_kernel", {"other", "elementwise", "copy"}),  # moves, by an index kernel
    ("triu_tril_kernel", {"elementwise"}),
    ("elementwise_kernel", {"elementwise"}),
]
"""The possible kinds of the names in that file, by the first word that matches."""


def possible_kinds(name):
    return next(kinds for word, kinds in MADE_OF if word in name)


@pytest.fixture(scope="module")
def h200():
    return read_chrome(H200)


def test_the_stored_trace_names_no_machine():
    with gzip.open(H200, "rt") as file:
        text = file.read()
    assert not re.search(r'"(traceName|trace_id|hostname|host_name|username)"|/home/|/tmp/', text)


def test_h200_both_readers_agree(h200):
    with gzip.open(H200) as file:
        expected = [(*row[:3], round(row[3], 3)) for row in slow_reading(json.load(file))]
    assert len(expected) == 136
    assert Counter(as_read(h200)) == Counter(expected)
    assert (h200.on_gpu, h200.steps) == (True, 1)


def test_h200_kernels_of_each_phase(h200):
    """One block: 4 + 3 projections, the head and 2 matmuls of attention; backward has two matmuls for each."""
    counts = {phase: {kind: n for kind, (_, n) in h200.by_kind(phase).items()} for phase in PHASES if h200.of(phase)}
    assert {phase: sum(kinds.values()) for phase, kinds in counts.items()} == {
        "forward": 50,
        "loss": 3,
        "backward": 81,
        "optimizer": 2,
    }
    assert (counts["forward"]["matmul"], counts["backward"]["matmul"]) == (10, 20)
    assert counts["loss"] == {"copy": 1, "softmax/reduction": 2}
    assert counts["forward"]["softmax/reduction"] == 3 + 1  # norms, softmax
    assert counts["backward"]["softmax/reduction"] == 2 * 3 + 1 + 2  # norms: input and weight; softmax; loss
    assert counts["backward"]["other"] >= 1  # the embedding's gradient
    wrong = {kernel.name: kernel.kind for kernel in h200.kernels if kernel.kind not in possible_kinds(kernel.name)}
    assert wrong == {}
    total = sum(kernel.duration for kernel in h200.kernels)
    assert sum(found.seconds for found in h200.by_kind().values()) == pytest.approx(total)
    assert sum(kernel.duration for kernel in h200.of(None)) <= 0.02 * total
    assert h200.by_kind("forward")["matmul"].seconds == pytest.approx(20.83e-6, abs=0.03e-6)


@pytest.mark.parametrize(("phase", "matmuls"), [("forward", 1), ("backward", 2)])
def test_h200_parts_of_attention(phase, matmuls, h200):
    """One matmul each in forward, two in backward; softmax is in its own part in both."""
    inside = Counter((kernel.part, kernel.kind) for kernel in h200.of(phase))
    assert inside[SCORES, "matmul"] == inside[OUTPUT, "matmul"] == matmuls
    assert inside[SOFTMAX, "softmax/reduction"] == 1
    assert inside[SOFTMAX, "matmul"] == 0
    assert {kernel.part for kernel in h200.of(phase) if kernel.part} == {SCORES, SOFTMAX, OUTPUT}
    sums = Counter()
    for kernel in h200.of(phase):
        sums[kernel.part, kernel.kind] += kernel.duration
    assert h200.by_part(phase) == {key: pytest.approx(seconds) for key, seconds in sums.items() if key[0]}


def test_h200_metrics_are_recorded_row_by_row(h200):
    """The recorded format: rows of recorded_tables.py, flattened."""
    metrics = {metric.name: metric for metric in trace_metrics(h200)}
    assert len(metrics) == len(trace_metrics(h200))
    for phase in ("forward", "loss", "backward", "optimizer"):
        assert metrics[f"busy_time: {phase}"] == Metric(f"busy_time: {phase}", "s", [h200.busy(phase)])
        kinds = rows_of(metrics[f"kind_table: {phase}"].samples, KindRow)
        assert {row.kind: (row.seconds, row.kernels) for row in kinds} == h200.by_kind(phase)
        names = rows_of(metrics[f"kernel_table: {phase}"].samples, KernelRow)
        for row, found in zip(names, h200.table(phase)[: trace.NAMES_KEPT], strict=True):
            times = found.durations
            assert row == (found.name, len(times), found.total, found.median, min(times), max(times))
    parts = rows_of(metrics["part_table: forward"].samples, PartRow)
    assert {(row.part, row.kind): row.seconds for row in parts} == h200.by_part("forward")
    assert not any("sync" in name for name in metrics), "a phase without kernels has no metrics"


def test_plain_and_compressed_files_read_alike(h200, tmp_path):
    plain = tmp_path / "trace.json"
    plain.write_bytes(gzip.decompress(H200.read_bytes()))
    assert as_read(read_chrome(plain)) == as_read(h200)


# -- unreadable files -------------------------------------------------------------------------------------------------

COMPLETE = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0, "args": {}}
DOCUMENTS = {
    "empty object": {},
    "list": [1, 2, 3],
    "number": 7,
    "text": "text",
    "null": None,
    "another object": {"results": [1, 2]},
    "events are null": {"traceEvents": None},
    "events are an object": {"traceEvents": {"a": 1}},
    "no events": {"traceEvents": []},
    "events are text": {"traceEvents": ["a", "b"]},
    "no time": {"traceEvents": [{key: value for key, value in COMPLETE.items() if key != "ts"}]},
    "time is text": {"traceEvents": [{**COMPLETE, "ts": "12"}]},
    "no name": {"traceEvents": [{key: value for key, value in COMPLETE.items() if key != "name"}]},
    "name is null": {"traceEvents": [{**COMPLETE, "name": None}]},
    "arguments are a list": {"traceEvents": [{**COMPLETE, "args": [1]}]},
    "only ranges": {"traceEvents": [{**COMPLETE, "cat": "user_annotation", "name": "forward"}]},
    "only Python functions": {"traceEvents": [{**COMPLETE, "cat": "python_function"}]},
}


def damaged_files():
    """Yield name and content of files that are no trace."""
    compressed = H200.read_bytes()
    plain = gzip.decompress(compressed)
    yield "empty", b""
    for share in (0.0005, 0.5, 0.99, 0.9999):
        yield f"gzip cut at {share}", compressed[: int(len(compressed) * share)]
    for share in (0.001, 0.5, 0.9999):
        yield f"JSON cut at {share}", plain[: int(len(plain) * share)]
    middle = len(compressed) // 2
    yield (
        "gzip with a flipped byte",
        compressed[:middle] + bytes([compressed[middle] ^ 0xFF]) + compressed[middle + 1 :],
    )
    for name, content in (("PNG", b"\x89PNG\r\n"), ("UTF-16", b"\xff\xfe\x00"), ("SQLite", b"SQLite format 3\x00")):
        yield name, content
    for name, document in DOCUMENTS.items():
        yield name, json.dumps(document).encode()
    yield "gzip of another object", gzip.compress(b"{}")


DAMAGED = dict(damaged_files())


@pytest.mark.parametrize("name", ["missing", "folder", *DAMAGED])
def test_an_unreadable_file_is_a_user_error(name, tmp_path):
    path = tmp_path / "trace.json"
    if name == "folder":
        path.mkdir()
    elif name in DAMAGED:
        path.write_bytes(DAMAGED[name])
    with refused(path.name):
        read_chrome(path)


# -- profiles of this CPU ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cpu_step():
    model = ModelConfig(vocab_size=64, context_length=16, d_model=32, num_layers=2, num_heads=2, d_ff=64)
    step = TrainStep.build(RunConfig(model=model, batch_size=2))
    batch = step.random_batch()
    step(*batch)
    return step, batch


@pytest.fixture(scope="module")
def cpu_profile(cpu_step, tmp_path_factory):
    kept = tmp_path_factory.mktemp("kept") / "trace.json.gz"
    return profile_steps(*cpu_step, num_steps=2, keep=kept), kept


def matmuls(kernels):
    return sum(kernel.name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm") for kernel in kernels)


def test_profile_of_a_cpu(cpu_profile):
    """Two blocks: 2 * (4 + 3) projections, the head and 2 * 2 matmuls of attention in forward, twice in backward.

    One thread runs the step, so the self times of its operators fit into its wall time.
    """
    found, wall = cpu_profile[0].trace, cpu_profile[0].wall["step"]
    assert len(wall) == 2
    assert 0 < sum(kernel.duration for kernel in found.kernels if kernel.phase) <= sum(wall) * 1.01
    assert (found.on_gpu, found.steps) == (False, 2)
    assert [span.name for span in found.profiler_steps] == ["ProfilerStep#0", "ProfilerStep#1"]
    assert matmuls(found.of("forward")) == 2 * 19
    assert matmuls(found.of("backward")) == 2 * 38
    for phase, each in (("forward", 1), ("backward", 2)):
        for part in (SCORES, OUTPUT):
            inside = [kernel for kernel in found.of(phase) if kernel.part == part]
            assert matmuls(inside) == 2 * 2 * each, (phase, part)
    assert any(kernel.kind == "optimizer" for kernel in found.of("optimizer"))
    starts = {phase: min(k.start for k in found.of(phase)) for phase in ("forward", "loss", "backward", "optimizer")}
    assert list(starts) == sorted(starts, key=starts.get)
    unknown = sum(kernel.duration for kernel in found.kernels if kernel.kind == "unknown")
    assert unknown <= 0.05 * sum(kernel.duration for kernel in found.kernels)


def test_metrics_are_means_over_steps(cpu_profile):
    found = cpu_profile[0].trace
    metrics = {metric.name: metric.samples for metric in trace_metrics(found)}
    kernels = rows_of(metrics["kernel_table: forward"], KernelRow)
    assert all(row.least <= row.median <= row.greatest for row in kernels)
    assert [row.seconds for row in kernels] == sorted((row.seconds for row in kernels), reverse=True)
    kinds = {row.kind: row for row in rows_of(metrics["kind_table: forward"], KindRow)}
    assert kinds["matmul"].kernels == found.by_kind("forward")["matmul"].kernels / 2
    assert kinds["matmul"].seconds == pytest.approx(found.by_kind("forward")["matmul"].seconds / 2)
    assert metrics["kernels_on_gpu"] == [0]


@pytest.mark.parametrize("limit", [kernel_trace.LARGEST_TRACE, 100], ids=["whole", "without operators"])
def test_the_kept_file(limit, cpu_profile, tmp_path, monkeypatch):
    """A large trace is kept without the host's operators, which a GPU's trace does not need."""
    profile, kept = cpu_profile
    monkeypatch.setattr(kernel_trace, "LARGEST_TRACE", limit)
    plain = tmp_path / "trace.json"
    plain.write_bytes(gzip.decompress(kept.read_bytes()))
    again = tmp_path / "again.json.gz"
    again.write_bytes(kernel_trace._compressed(plain))
    if limit == 100:
        categories = {event.get("cat") for event in json.loads(gzip.decompress(again.read_bytes()))["traceEvents"]}
        assert "user_annotation" in categories
        assert "cpu_op" not in categories
    else:
        origins = Counter((k.name, k.phase, k.part) for k in profile.trace.kernels)
        assert Counter((k.name, k.phase, k.part) for k in read_chrome(again).kernels) == origins


def test_a_trace_of_the_users_own_profiler(cpu_step, tmp_path):
    """It has none of this package's parts, and a range of the user's own around the step."""
    step, batch = cpu_step
    path = tmp_path / "mine.json"
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("my part"):
        step(*batch)
    profiler.export_chrome_trace(str(path))
    found = read_chrome(path)
    assert matmuls(found.of("forward")) == 19
    assert {kernel.part for kernel in found.of("forward")} == {"my part"}
