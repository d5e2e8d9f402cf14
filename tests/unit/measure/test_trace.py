"""Kernels of a step: their kinds, phases and parts, from traces written here, from a GPU's and from this processor's.

`reading` below is a second, slow reader written from the format alone. Where a trace is too large to be checked by
hand, both must say the same.
"""

import ast
import contextlib
import gzip
import itertools
import json
import random
import re
import shutil
from collections import Counter, defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, record_function

from cs336_systems.config import ModelConfig, RunConfig, UserError
from cs336_systems.experiments.kernels.measure_kernels import measure_kernels
from cs336_systems.measure.kernel_trace import profile_steps
from cs336_systems.measure.readers import trace
from cs336_systems.measure.readers.kernel_classes import KINDS, OUTPUT, SCORES, SOFTMAX, classify
from cs336_systems.measure.readers.trace import read_chrome
from cs336_systems.step.train_step import TrainStep
from tests.helpers import PACKAGE, ROOT, tiny_config

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
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT",
        "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x256_16x3_tn_align4>(cutlass::Params)",
        "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8",
        "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage4_warpsize2x2x1_tensor16x8x8_kernel",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        "ampere_sgemm_128x64_tn",
        "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_nn",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>(cublasGemvParamsEx<int>)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, true, false, false>(int, float*)",
        "void splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>(cublasSplitKParams<float>, float const*)",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t>>(params)",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64>>(params)",
        "void pytorch_flash::flash_fwd_splitkv_combine_kernel<cutlass::bfloat16_t>(params)",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float>::Params)",
        "fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel::Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x64x64_4x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_2_64x64x64_1x4x1_kernel0_0",
    ],
    "elementwise": [
        AT + "vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, float, MulFunctor> >(int)",
        AT + "unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>, 4>(int)",
        AT + "elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::addcmul_cuda_kernel()> >(int)",
        AT + "vectorized_elementwise_kernel<8, at::native::(anonymous namespace)::silu_kernel(at::Tensor&)>(int)",
        AT + "elementwise_kernel<128, 4, gpu_kernel_impl_nocast<(anonymous namespace)::masked_fill_kernel()> >(int)",
        AT + "triu_tril_kernel<bool, int, true, 8, false>(at::cuda::detail::TensorInfo<bool, int>)",
        "triton_poi_fused_mul_silu_3",
        "triton_poi_fused__softmax_masked_fill_5",
        "triton_poi_fused__to_copy_2",
        "triton_poi_fused_embedding_0",
        "triton_poi_fused__scaled_dot_product_flash_attention_4",
    ],
    "softmax/reduction": [
        AT + "(anonymous namespace)::cunn_SoftMaxForward<8, c10::BFloat16, float, c10::BFloat16>(c10::BFloat16*)",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 6, false, false>(float*, float const*)",
        "void (anonymous namespace)::softmax_warp_backward<float, float, float, 9, true, false>(float*, float const*)",
        AT + "reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float> > >(float)",
        ANONYMOUS + "vectorized_layer_norm_kernel<float, float, true>(int, float, float const*)",
        ANONYMOUS + "layer_norm_grad_input_kernel_vectorized<float, float, true>(float const*)",
        ANONYMOUS + "GammaBetaBackwardCUDAKernelTemplate<float, float, 32u, 32u, 256u, false, true, true>(long)",
        ANONYMOUS + "nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(float*, float*)",
        ANONYMOUS + "nll_loss_backward_reduce_cuda_kernel_2d<float, long>(float*, float const*)",
        "triton_red_fused__to_copy_mean_pow_1",
        "triton_per_fused_add_mul_sum_12",
        "triton_red_fused_embedding_mean_pow_0",
        "triton_per_fused__scaled_dot_product_flash_attention_backward_add_9",
    ],
    "copy": [
        "Memcpy DtoD (Device -> Device)",
        "Memcpy HtoD (Pageable -> Device)",
        "Memset (Device)",
        AT + f"unrolled_elementwise_kernel<at::native::{COPY_LAMBDA}, std::array<char*, 2ul>, 4>(int)",
        AT + f"elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::{COPY_LAMBDA}> >(int)",
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
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    ],
    "other": [
        AT + "vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)",
        ANONYMOUS + "embedding_backward_feature_kernel<float, float, long>(long const*, float const*, float*)",
        ANONYMOUS + "indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>(TensorInfo<float, unsigned int>)",
        AT + "index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<index_put_kernel_impl<4> >()>(long)",
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


def named(table: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(kind, name) for kind, names in table.items() for name in names]


@pytest.mark.parametrize(("kind", "name"), named(KERNELS), ids=str)
def test_kinds_of_gpu_kernels(kind, name):
    """Most names hold the words of several kinds (a reduction inside NCCL, CUTLASS inside attention, a copy inside an
    elementwise kernel), so the order in which they are looked at matters."""
    assert classify(name) == kind


@pytest.mark.parametrize(("kind", "name"), named(OPERATORS), ids=str)
def test_kinds_of_operators(kind, name):
    assert classify(name) == kind


def our_triton_kernels() -> list[str]:
    """The compiled functions that are launched, read from the source: it cannot be imported without Triton."""
    tree = ast.parse((PACKAGE / "kernels" / "flash" / "flash_triton.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    return [f.name for f in functions if any("triton.jit" in ast.unparse(line) for line in f.decorator_list)]


@pytest.mark.parametrize("name", our_triton_kernels())
def test_our_own_kernels_are_attention(name):
    """A profile shows a Triton kernel under the name of its function: it must be known under that one."""
    assert classify(name) == "attention"


def test_every_kind_is_known_and_tried():
    assert set(KERNELS) == set(KINDS)
    assert len(KINDS) == len(set(KINDS))


@given(st.text())
def test_any_name_has_a_kind(name):
    assert classify(name) in KINDS


# -- traces written by hand -------------------------------------------------------------------------------------------

MAIN, OTHER, STREAM = 100, 200, 7


class Script:
    """Writes a trace as torch.profiler does. Times in microseconds."""

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


def test_the_phase_is_that_of_the_launch_not_of_the_run(step_script, tmp_path):
    """The GPU runs behind: most kernels of forward start when Python is long in backward."""
    step_script.kernel("late", 250, 300, launch=10)
    step_script.kernel("prompt", 120, 130, launch=110)
    step_script.kernel("after it all", 900, 950, launch=410)
    step_script.kernel("driver", 300, 301, launch=20, call="cuda_driver")
    step_script.kernel("between", 600, 601, launch=550)
    step_script.kernel("no launch", 50, 60)
    trace = step_script.read(tmp_path)
    assert {name: kernel.phase for name, kernel in by_name(trace).items()} == {
        "late": "forward",
        "prompt": "loss",
        "after it all": "optimizer",
        "driver": "forward",
        "between": None,
        "no launch": None,
    }
    assert trace.on_gpu
    assert [kernel.name for kernel in trace.of("optimizer")] == ["after it all"]
    assert {kernel.name for kernel in trace.of("forward")} == {"late", "driver"}
    assert trace.of("sync") == []


def test_times_are_in_seconds(step_script, tmp_path):
    step_script.kernel("first", 1000, 1002.5, launch=10)
    step_script.kernel("second", 1010, 1020, launch=20)
    kernels = by_name(step_script.read(tmp_path))
    assert kernels["first"].duration == pytest.approx(2.5 * MICRO)
    assert kernels["second"].start - kernels["first"].start == pytest.approx(10 * MICRO)


def test_durations_are_those_of_the_file_however_long_the_machine_was_up(tmp_path):
    """Times count from long ago: end less start, both in seconds, would be wrong by up to half a nanosecond."""
    script, days = Script(), 45 * 86400e6
    script.range("forward", days, days + 1000)
    for index in range(50):
        script.kernel(f"nvjet_{index}", days + 10 * index, days + 10 * index + 1, launch=days + 10 * index)
        script.events[-1]["dur"] = 0.768
    durations = [kernel.duration for kernel in script.read(tmp_path).kernels]
    assert durations == pytest.approx([0.768 * MICRO] * 50, rel=1e-6)


def test_copies_and_fills_are_kernels_and_annotations_of_the_gpu_are_not(step_script, tmp_path):
    step_script.kernel("Memcpy HtoD (Pageable -> Device)", 10, 12, launch=5, category="gpu_memcpy")
    step_script.kernel("Memset (Device)", 20, 22, launch=15, category="gpu_memset")
    step_script.kernel("nvjet_x", 30, 32, launch=25)
    step_script.event("gpu_user_annotation", "forward", 10, 32, STREAM)
    step_script.event("overhead", "Activity Buffer Request", 10, 32, 0)
    trace = step_script.read(tmp_path)
    assert Counter(kernel.kind for kernel in trace.kernels) == {"copy": 2, "matmul": 1}


def test_operators_do_not_count_beside_kernels(step_script, tmp_path):
    step_script.operator("aten::mm", 5, 20)
    step_script.kernel("nvjet_x", 30, 40, launch=10)
    assert [kernel.name for kernel in step_script.read(tmp_path).kernels] == ["nvjet_x"]


def test_backward_runs_on_a_thread_of_its_own(step_script, tmp_path):
    """The range is the main thread's; autograd launches from another."""
    step_script.kernel("grad", 500, 510, launch=300, thread=OTHER)
    assert by_name(step_script.read(tmp_path))["grad"].phase == "backward"


def test_the_part_is_the_innermost_range_of_the_launching_thread(step_script, tmp_path):
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


def test_in_backward_the_part_is_that_of_the_forward_operator(step_script, tmp_path):
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
    for name, launch in (("mm", 220), ("bmm", 255), ("unseen", 285), ("in its own", 310), ("bare", 330)):
        step_script.kernel(name, 600 + launch, 601 + launch, launch=launch, thread=OTHER)
    step_script.kernel("other thread", 950, 951, launch=255)
    parts = {kernel.name: kernel.part or None for kernel in step_script.read(tmp_path).kernels}
    assert parts == {
        "mm": None,
        "bmm": "scores",
        "unseen": None,
        "in its own": "own",
        "bare": None,
        "other thread": None,
    }


def test_of_several_forward_operators_the_last_counts(step_script, tmp_path):
    """An operator without a gradient carries the number of the next one that has it."""
    step_script.range("first", 10, 20)
    step_script.range("second", 30, 40)
    step_script.operator("aten::silu", 32, 38, sequence=5)
    step_script.operator("aten::ones", 12, 18, sequence=5)  # earlier in time, later in the file
    step_script.operator("SiluBackward0", 210, 230, sequence=5, forward_thread=1, thread=OTHER)
    step_script.kernel("silu_grad", 600, 601, launch=220, thread=OTHER)
    assert by_name(step_script.read(tmp_path))["silu_grad"].part == "second"


def test_an_operator_around_a_launch_in_forward_gives_no_part(step_script, tmp_path):
    """Recomputed blocks aside, numbers tie backward to forward only."""
    step_script.range("scores", 30, 40)
    step_script.operator("aten::bmm", 32, 38, sequence=5)
    step_script.operator("aten::relu", 50, 60, sequence=5, forward_thread=1)
    step_script.kernel("relu", 600, 601, launch=55)
    assert not by_name(step_script.read(tmp_path))["relu"].part


def test_sums(step_script, tmp_path):
    """Two streams overlap: busy time is the union, the other sums are not."""
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


def test_steps_and_spans(tmp_path):
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


def test_operators_stand_in_with_their_own_time(step_script, tmp_path):
    """Of linear's 40, 30 are matmul's, of which 20 are mm's; grandchildren are not taken off twice."""
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


@given(st.integers(0, 10_000))
def test_own_times_add_up_to_what_the_outermost_operators_took(tmp_path_factory, seed):
    """However deep they nest and whatever the order in the file: nothing is counted twice, nothing is lost."""
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


def test_operators_that_touch_do_not_lie_inside_one_another(tmp_path):
    """One ends in the very microsecond in which the next begins, on a machine that was up for weeks: rounding must not
    make the next a child of the one before, whose time would then be taken off."""
    choose, wrong = random.Random(0), []
    for _ in range(50):
        script, base = Script(), choose.randint(10**9, 4 * 10**12)
        for index in range(40):
            script.operator(f"aten::op{index}", base + 3 * index, base + 3 * index + 3)
        durations = [kernel.duration for kernel in script.read(tmp_path).kernels]
        if durations != pytest.approx([3 * MICRO] * 40, rel=1e-3):
            wrong.append((base, len(durations)))
    assert wrong == []


# -- a second reader --------------------------------------------------------------------------------------------------


def reading(document):
    """(name, phase, part, microseconds) of every GPU kernel: each question answered by looking through all events."""
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


@pytest.mark.parametrize("seed", range(20))
def test_both_readers_agree_on_any_trace(seed, tmp_path):
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
    expected = [(*row[:3], round(row[3], 3)) for row in reading(script.document())]
    assert len({row[1:3] for row in expected}) > 5  # this is about something
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
"""What the names in that file can only be, by the first word found in them."""


def possible_kinds(name):
    return next(kinds for word, kinds in MADE_OF if word in name)


@pytest.fixture(scope="module")
def h200():
    return read_chrome(H200)


@pytest.fixture(scope="module")
def h200_by_hand():
    with gzip.open(H200) as file:
        return reading(json.load(file))


def test_the_stored_trace_names_no_machine():
    with gzip.open(H200, "rt") as file:
        text = file.read()
    assert not re.search(r'"(traceName|trace_id|hostname|host_name|username)"|/home/|/tmp/', text)


def test_h200_both_readers_agree(h200, h200_by_hand):
    expected = [(name, phase, part, round(time, 3)) for name, phase, part, time in h200_by_hand]
    assert len(expected) == 136
    assert Counter(as_read(h200)) == Counter(expected)
    assert h200.on_gpu
    assert h200.steps == 1


def test_h200_what_each_phase_holds(h200, h200_by_hand):
    """One block: 4 + 3 projections, the head and 2 products of attention; backward has two products for each."""
    phases = Counter(phase for _, phase, _, _ in h200_by_hand)
    assert phases == {"forward": 50, "loss": 3, "backward": 81, "optimizer": 2}
    assert {phase: len(h200.of(phase)) for phase in phases} == phases
    counts = {phase: {kind: count for kind, (_, count) in h200.by_kind(phase).items()} for phase in phases}
    assert (counts["forward"]["matmul"], counts["backward"]["matmul"]) == (10, 20)
    assert counts["loss"] == {"copy": 1, "softmax/reduction": 2}
    assert counts["forward"]["softmax/reduction"] == 3 + 1  # norms, softmax
    assert counts["backward"]["softmax/reduction"] == 2 * 3 + 1 + 2  # norms: input and weight; softmax; loss
    assert counts["backward"]["other"] >= 1  # the embedding's gradient
    assert sum(counts["optimizer"].values()) == 2


def test_h200_kinds(h200, h200_by_hand):
    wrong = {kernel.name: kernel.kind for kernel in h200.kernels if kernel.kind not in possible_kinds(kernel.name)}
    assert wrong == {}
    sure = defaultdict(Counter)
    for name, phase, _, time in h200_by_hand:
        if len(possible_kinds(name)) == 1:
            [kind] = possible_kinds(name)
            sure[phase][kind] += time
    for phase, kind in (("forward", "matmul"), ("backward", "matmul"), ("forward", "copy"), ("backward", "copy")):
        assert h200.by_kind(phase)[kind][0] >= sure[phase][kind] * MICRO * (1 - 1e-3)
    assert h200.by_kind("forward")["matmul"][0] == pytest.approx(20.83e-6, abs=0.03e-6)


def test_h200_hardly_anything_is_unknown_or_outside(h200):
    total = sum(kernel.duration for kernel in h200.kernels)
    unknown, _ = h200.by_kind().get("unknown", (0.0, 0))
    outside = sum(kernel.duration for kernel in h200.kernels if kernel.phase is None)
    assert unknown <= 0.01 * total
    assert outside <= 0.02 * total
    assert sum(seconds for seconds, _ in h200.by_kind().values()) == pytest.approx(total)


@pytest.mark.parametrize("phase", ["forward", "loss", "backward", "optimizer"])
def test_h200_tables_are_most_time_first(phase, h200, h200_by_hand):
    times = defaultdict(list)
    for name, where, _, time in h200_by_hand:
        if where == phase:
            times[name].append(time * MICRO)
    rows = h200.table(phase)
    totals = sorted((sum(t) for t in times.values()), reverse=True)
    assert [row.total for row in rows] == pytest.approx(totals, rel=1e-3)
    assert {row.name: sorted(row.durations) for row in rows} == {
        name: pytest.approx(sorted(durations), rel=1e-3) for name, durations in times.items()
    }
    top = {
        "forward": "bfloat16_copy_kernel_cuda",
        "loss": "nll_loss_forward_reduce",
        "backward": "unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda",
        "optimizer": "FusedAdamMathFunctor",
    }
    assert top[phase] in rows[0].name
    # One stream: nothing overlaps, so the union is the sum.
    assert h200.busy(phase) == pytest.approx(sum(row.total for row in rows))


def test_h200_parts_of_attention(h200):
    """One product each in forward, two in backward; the softmax is in its own part in both."""
    for phase, products in (("forward", 1), ("backward", 2)):
        inside = Counter((kernel.part, kernel.kind) for kernel in h200.of(phase))
        assert inside[SCORES, "matmul"] == inside[OUTPUT, "matmul"] == products
        assert inside[SOFTMAX, "softmax/reduction"] == 1
        assert inside[SOFTMAX, "matmul"] == 0
        assert {kernel.part for kernel in h200.of(phase) if kernel.part} == {SCORES, SOFTMAX, OUTPUT}
        sums = Counter()
        for kernel in h200.of(phase):
            sums[kernel.part, kernel.kind] += kernel.duration
        parts = {key: seconds for key, seconds in h200.by_part(phase).items() if key[0]}
        assert parts == {key: pytest.approx(seconds) for key, seconds in sums.items() if key[0]}


def test_plain_and_compressed_files_read_alike(h200, tmp_path):
    plain = tmp_path / "trace.json"
    plain.write_bytes(gzip.decompress(H200.read_bytes()))
    assert as_read(read_chrome(plain)) == as_read(h200)


# -- files that are no trace ------------------------------------------------------------------------------------------


def refused(path):
    with pytest.raises(UserError) as caught:
        read_chrome(path)
    message = str(caught.value)
    assert path.name in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", ["absent.json", "absent.json.gz"])
def test_a_missing_file(name, tmp_path):
    refused(tmp_path / name)


@pytest.mark.parametrize("name", ["empty.json", "empty.json.gz"])
def test_an_empty_file(name, tmp_path):
    (tmp_path / name).touch()
    refused(tmp_path / name)


def test_a_folder(tmp_path):
    (tmp_path / "trace.json").mkdir()
    refused(tmp_path / "trace.json")


@pytest.mark.parametrize("share", [0.0005, 0.5, 0.99, 0.9999])
def test_truncated_compression(share, tmp_path):
    """A run that was killed as it wrote: the header alone, half of it, all but the checksum."""
    content = H200.read_bytes()
    (tmp_path / "cut.json.gz").write_bytes(content[: int(len(content) * share)])
    refused(tmp_path / "cut.json.gz")


@pytest.mark.parametrize("share", [0.001, 0.5, 0.9999])
def test_truncated_json(share, tmp_path):
    content = gzip.decompress(H200.read_bytes())
    (tmp_path / "cut.json").write_bytes(content[: int(len(content) * share)])
    refused(tmp_path / "cut.json")


def test_damaged_compression(tmp_path):
    content = bytearray(H200.read_bytes())
    content[len(content) // 2] ^= 0xFF
    (tmp_path / "bad.json.gz").write_bytes(content)
    refused(tmp_path / "bad.json.gz")


COMPLETE = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0, "args": {}}


@pytest.mark.parametrize(
    "document",
    [
        {},
        [],
        [1, 2, 3],
        7,
        "text",
        None,
        {"results": [1, 2]},
        {"traceEvents": None},
        {"traceEvents": {"a": 1}},
        {"traceEvents": []},
        {"traceEvents": [{key: value for key, value in COMPLETE.items() if key != "ts"}]},
        {"traceEvents": [{key: value for key, value in COMPLETE.items() if key != "name"}]},
        {"traceEvents": [{**COMPLETE, "ts": "soon"}]},
        {"traceEvents": [{**COMPLETE, "ts": "12"}]},
        {"traceEvents": [{**COMPLETE, "name": None}]},
        {"traceEvents": ["a", "b"]},
        {"traceEvents": [{**COMPLETE, "cat": "user_annotation", "name": "forward"}]},
        {"traceEvents": [{**COMPLETE, "cat": "python_function"}]},
    ],
    ids=lambda document: json.dumps(document)[:60],
)
@pytest.mark.parametrize("compressed", [False, True])
def test_json_of_another_tool(document, compressed, tmp_path):
    content = json.dumps(document).encode()
    path = tmp_path / ("other.json.gz" if compressed else "other.json")
    path.write_bytes(gzip.compress(content) if compressed else content)
    refused(path)


@pytest.mark.parametrize("args", [None, []], ids=str)
@pytest.mark.parametrize("category", ["cpu_op", "kernel", "cuda_runtime"])
def test_events_with_odd_arguments_are_read_or_refused(category, args, tmp_path):
    """Either will do, a traceback will not."""
    path = tmp_path / "odd.json"
    path.write_text(json.dumps({"traceEvents": [COMPLETE, {**COMPLETE, "ts": 5.0, "cat": category, "args": args}]}))
    with contextlib.suppress(UserError):
        assert read_chrome(path).kernels


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n\x00", b"\xff\xfe\x00", b"\x1f\x8b", b"SQLite format 3\x00"])
def test_binary_files(content, tmp_path):
    (tmp_path / "trace.json").write_bytes(content)
    refused(tmp_path / "trace.json")


# -- profiles made here -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_thread():
    """On a busy machine two threads spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def cpu_step(one_thread):
    model = ModelConfig(vocab_size=64, context_length=16, d_model=32, num_layers=2, num_heads=2, d_ff=64)
    step = TrainStep.build(RunConfig(model=model, batch_size=2))
    batch = step.random_batch()
    step(*batch)
    return step, batch


def products(kernels):
    return sum(kernel.name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm") for kernel in kernels)


@pytest.fixture(scope="module")
def cpu_profile(cpu_step, tmp_path_factory):
    kept = tmp_path_factory.mktemp("kept") / "trace.json.gz"
    return profile_steps(*cpu_step, num_steps=2, keep=kept), kept


def test_profile_of_a_cpu(cpu_profile):
    """Two blocks: 2 * (4 + 3) projections, the head and 2 * 2 products of attention in forward, twice in backward."""
    profile, _ = cpu_profile
    trace = profile.trace
    assert not trace.on_gpu
    assert trace.steps == 2
    assert products(trace.of("forward")) == 2 * 19
    assert products(trace.of("backward")) == 2 * 38
    for phase, each in (("forward", 1), ("backward", 2)):
        for part in (SCORES, OUTPUT):
            inside = [kernel for kernel in trace.of(phase) if kernel.part == part]
            assert products(inside) == 2 * 2 * each, (phase, part)
    assert any(kernel.kind == "optimizer" for kernel in trace.of("optimizer"))
    starts = {phase: min(k.start for k in trace.of(phase)) for phase in ("forward", "loss", "backward", "optimizer")}
    assert list(starts) == sorted(starts, key=starts.get)
    unknown, _ = trace.by_kind().get("unknown", (0.0, 0))
    assert unknown <= 0.05 * sum(kernel.duration for kernel in trace.kernels)


def test_the_time_of_operators_is_less_than_the_clock(cpu_profile):
    """One thread runs the step, so its operators' own times fit into it."""
    profile, _ = cpu_profile
    inside = sum(kernel.duration for kernel in profile.trace.kernels if kernel.phase)
    assert len(profile.wall["step"]) == 2
    assert 0 < inside <= sum(profile.wall["step"]) * 1.01


def test_the_kept_file_is_the_same_trace(cpu_profile):
    profile, kept = cpu_profile
    again = read_chrome(kept)
    assert Counter((k.name, k.phase, k.part) for k in again.kernels) == Counter(
        (k.name, k.phase, k.part) for k in profile.trace.kernels
    )


def test_nothing_is_kept_unasked(cpu_step, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    profile = profile_steps(*cpu_step, num_steps=1, keep=None)
    assert profile.trace.steps == 1
    assert products(profile.trace.of("forward")) == 19
    assert list(tmp_path.rglob("*")) == []


def test_a_profile_the_user_made(cpu_step, tmp_path):
    """Read as well as ours, without our parts, and with a part of the user's own around the step."""
    step, batch = cpu_step
    path = tmp_path / "mine.json"
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("my part"):
        step(*batch)
    profiler.export_chrome_trace(str(path))
    trace = read_chrome(path)
    assert products(trace.of("forward")) == 19
    assert {kernel.part for kernel in trace.of("forward")} == {"my part"}


# -- metrics ----------------------------------------------------------------------------------------------------------


def rows_of(samples, width):
    assert len(samples) % width == 0
    return [tuple(samples[i : i + width]) for i in range(0, len(samples), width)]


def measured(config, folder=None):
    metrics = measure_kernels(config, folder=folder)
    names = [name for name, _, _ in metrics]
    assert len(names) == len(set(names))
    return {name: (unit, samples) for name, unit, samples in metrics}


def test_metrics_of_a_profile(one_thread, tmp_path, monkeypatch):
    """Counts and times are those of one step, on average over the steps of the kept trace."""
    monkeypatch.setattr(trace, "NAMES_KEPT", 1000)  # which are the longest is chance in so small a model
    metrics = measured(tiny_config(num_steps=1), str(tmp_path))
    kernels = rows_of(metrics["kernel_table: forward"][1], 6)
    kinds = rows_of(metrics["kind_table: forward"][1], 3)
    assert sum(count for name, count, *_ in kernels if name in ("aten::mm", "aten::bmm")) == 10
    for name, count, total, median, least, most in kernels:
        assert isinstance(name, str)
        assert least <= median <= most, name
        assert least * count <= total * (1 + 1e-9)
        assert total <= most * count * (1 + 1e-9)
    assert [row[2] for row in kernels] == sorted((row[2] for row in kernels), reverse=True)
    assert metrics["kernel_time"][0] == metrics["busy_time: forward"][0] == metrics["profiled_step_time"][0] == "s"
    [file] = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert file.name == "trace.json.gz"
    kept = read_chrome(file)
    steps = kept.steps
    assert {kind: (time, count) for kind, count, time in kinds} == {
        kind: (pytest.approx(time / steps), count / steps) for kind, (time, count) in kept.by_kind("forward").items()
    }
    top = kept.table("forward")[: len(kernels)]
    assert [row[:2] for row in kernels] == [(row.name, len(row.durations) / steps) for row in top]
    assert [row[2:] for row in kernels] == [
        pytest.approx((row.total / steps, row.median, min(row.durations), max(row.durations))) for row in top
    ]
    assert metrics["busy_time: forward"][1] == pytest.approx([kept.busy("forward") / steps])
    inside = sum(kernel.duration for kernel in kept.kernels if kernel.phase) / steps
    assert metrics["kernel_time"][1] == pytest.approx([inside], rel=0.05)
    assert inside <= max(metrics["profiled_step_time"][1])


@pytest.mark.parametrize(("mode", "absent"), [("inference", "backward"), ("forward-backward", "optimizer")])
def test_phases_a_mode_does_not_have_are_not_listed(mode, absent):
    metrics = measured({**tiny_config(num_steps=1, mode=mode), "profiler": "torch"})
    assert "kernel_table: forward" in metrics
    assert not [name for name in metrics if absent in name and metrics[name][1]]


@pytest.mark.skipif(shutil.which("nsys") is not None, reason="nsys is installed")
def test_nsys_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"(?i)nsys|nsight") as caught:
        measure_kernels({**tiny_config(num_steps=1), "profiler": "nsys"}, folder=None)
    assert "\n" not in str(caught.value)
