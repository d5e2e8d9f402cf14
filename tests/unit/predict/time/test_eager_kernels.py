"""The list of an eager step's operators against the step itself: every matmul and every pass of every phase."""

import dataclasses
from collections import Counter, defaultdict
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cs336_systems.config import ModelConfig, RunConfig
from cs336_systems.kernels.flash import tiles
from cs336_systems.measure import fake_results
from cs336_systems.measure.memory_trace import fake_step
from cs336_systems.predict.time import eager_kernels
from cs336_systems.predict.time.eager_kernels import (
    CAST,
    COPY,
    INNER_CAST,
    LOG_SOFTMAX,
    LOG_SOFTMAX_BACKWARD,
    MASKED,
    MIXED,
    NARROW,
    POINTWISE,
    RMS_NORM,
    RMS_NORM_BACKWARD,
    SOFTMAX,
    SOFTMAX_BACKWARD,
    STRIDED,
    STRIDED_MIXED,
    TRANSPOSED,
    TRIANGLE,
    eager_phases,
    lists_operators,
)
from cs336_systems.predict.time.step_kernels import AttentionPass, Matmul, Pass
from tests.unit.test_families import FAMILIES

PLAIN = ModelConfig(vocab_size=1000, context_length=48, d_model=64, num_layers=2, num_heads=4, d_ff=160)
DEEP = dataclasses.replace(PLAIN, num_layers=5)
MATMULS = {"mm": slice(0, 2), "bmm": slice(0, 2), "addmm": slice(1, 3)}
ELEMENTWISE = ("mul", "add", "silu", "silu_backward", "addcmul", "flip", "clone", "add_")


class Operators(TorchDispatchMode):
    """Collects what the operators of each phase read and write."""

    def __init__(self):
        super().__init__()
        self.matmuls, self.passes, self.attention = (defaultdict(Counter) for _ in range(3))
        self.phase, self.in_norm = "", False

    @contextmanager
    def watch(self, phase):
        self.phase = phase
        yield
        self.phase = ""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = fake_results.call(function, args, kwargs or {})
        self._count(function.overloadpacket.__name__, args, result)
        return result

    def _count(self, name, args, result):
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if name in MATMULS:
            a, b = args[MATMULS[name]]
            batch = a.shape[0] if a.dim() == 3 else 1
            self.matmuls[self.phase][batch, a.shape[-2], b.shape[-1], a.shape[-1]] += 1
        elif "attention" in name or name.startswith("flash_"):
            self.attention[self.phase]["backward" if "backward" in name else "forward"] += 1
        elif isinstance(result, torch.Tensor):
            for found in self._passes(name, tensors, result, args):
                self.passes[self.phase][found] += 1

    def _passes(self, name, tensors, result, args):
        """Return the passes of an operator: what it reads and writes in full, and how."""
        if name == "embedding":
            return [("embedding", 2 * result.nbytes)]
        if name == "embedding_dense_backward":
            return [("fill", result.nbytes), ("embedding_backward_unsorted", 2 * args[0].nbytes)]
        if name in ("ones", "triu") and result.dtype == torch.bool:
            return [(TRIANGLE, result.nbytes + sum(t.nbytes for t in tensors))]
        if name == "new_empty" and result.shape[-1] == 1:  # with an empty_like it stands for the fused norm
            self.in_norm = True
            return [(RMS_NORM, 2 * tensors[0].nbytes)]
        if name == "empty_like":  # without, for the norm's gradients
            is_forward, self.in_norm = self.in_norm, False
            return [] if is_forward or result.dim() == 1 else [(RMS_NORM_BACKWARD, 3 * result.nbytes)]
        if name in ("sum",) and tensors[0].dim() == 2:
            return [("sum of biases' gradients", tensors[0].nbytes)]
        if name == "nll_loss_backward":
            return [("fill", result.nbytes)]
        if result.dim() < 2 or (name != "masked_fill_" and _is_view(result, tensors)):
            return []
        operands = [t for t in tensors if t.numel() == result.numel()]
        moved = result.nbytes + sum(t.nbytes for t in operands)
        if name == "_to_copy":
            is_narrow = result.dtype == torch.bfloat16 and _is_dense(args[0])
            return [(NARROW if is_narrow else CAST, moved)]
        if name == "_softmax_backward_data":  # CUDA multiplies first
            return [(POINTWISE, moved), (SOFTMAX_BACKWARD, moved)]
        known = {
            "_softmax": SOFTMAX, "_log_softmax": LOG_SOFTMAX, "_log_softmax_backward_data": LOG_SOFTMAX_BACKWARD,
        }  # fmt: skip
        if name in known:
            return [(known[name], moved)]
        if name in ("masked_fill", "masked_fill_"):
            copies = [(COPY, moved)] if name == "masked_fill" else []
            return [*copies, (MASKED, moved)]
        if name not in ELEMENTWISE or (result.dim() == 3 and result.shape[1] == 1):  # the rotary table
            return []
        dtypes = {t.dtype for t in (*operands, result)}
        if name == "clone":
            swapped = result.shape[-1] == args[0].shape[-1] and args[0].stride(-1) != 1
            return [(TRANSPOSED if swapped else STRIDED, moved)]
        if name == "addcmul" and len(dtypes) > 1:  # CUDA casts the operand of 16 bits first
            return [(INNER_CAST, 6 * result.numel()), (STRIDED, moved)]
        if name in ("flip", "addcmul") or len(tensors) > len(operands):
            return [(STRIDED_MIXED if name == "mul" and len(dtypes) > 1 else STRIDED, moved)]
        return [(POINTWISE if len(dtypes) == 1 else MIXED, moved)]


def _is_dense(t):
    """Return whether the elements fill their memory without gaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _is_view(result, tensors):
    return any(result.untyped_storage()._cdata == t.untyped_storage()._cdata for t in tensors)


def run_of(model=PLAIN, **fields):
    return RunConfig(model=model, batch_size=2, device="cuda", **fields)


def traced(run):
    seen = Operators()
    with fake_step(run) as (step, batch), seen:
        step(*batch, watch=seen.watch)
    return seen


def listed(run):
    return counted(eager_phases(run))


def counted(phases):
    """Return the matmuls, passes and calls of attention of each phase; a rank that shares attention makes two calls."""
    matmuls, passes, attention = (defaultdict(Counter) for _ in range(3))
    for phase, kernels in phases.items():
        for kernel in kernels:
            if isinstance(kernel, Matmul):
                matmuls[phase][kernel.batch, kernel.rows, kernel.columns, kernel.depth] += kernel.times
            elif isinstance(kernel, Pass) and phase != "optimizer":
                passes[phase][kernel.name, kernel.bytes] += kernel.times
            elif isinstance(kernel, AttentionPass):
                attention[phase][kernel.name.split()[0]] += kernel.times * min(2, kernel.parts)
    return matmuls, passes, attention


def assert_listed(run):
    assert lists_operators(run)
    seen = traced(run)
    for found, expected in zip(listed(run), (seen.matmuls, seen.passes, seen.attention), strict=True):
        for phase in ("forward", "loss", "backward"):
            assert found[phase] == expected[phase], phase


@pytest.mark.parametrize("attention", ["reference", "sdpa", "flash_triton"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_every_operator_of_a_step_is_listed(precision, attention):
    assert_listed(run_of(precision=precision, attention=attention))


@pytest.mark.parametrize("mode", ["inference", "forward", "forward-backward"])
def test_modes_have_the_phases_that_they_run(mode):
    run = run_of(mode=mode, attention="reference", precision="bf16")
    assert_listed(run)
    assert list(eager_phases(run)) == ["forward", "loss", "backward"][: 3 if mode == "forward-backward" else 1]


@pytest.mark.parametrize("group", [1, 2, 5, 9])
def test_recomputed_blocks_stop_before_their_last_matmul(group):
    assert_listed(run_of(DEEP, checkpoint_blocks=group, attention="reference", precision="bf16"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_of_models(name, precision):
    assert_listed(run_of(FAMILIES[name], precision=precision, attention="flash_triton"))


def test_steps_that_are_not_listed():
    run = run_of()
    grouped = dataclasses.replace(run, model=FAMILIES["llama"], attention="reference")
    others = [
        grouped,
        *(dataclasses.replace(run, **fields) for fields in ({"max_grad_norm": 1.0}, {"precision": "fp16"})),
    ]
    assert not any(lists_operators(other) for other in others)


def test_the_choice_of_attention_kernels_is_that_of_the_dispatcher():
    assert eager_kernels.LAUNCH_BOUND == tiles.LAUNCH_BOUND
    small = run_of(attention="auto", precision="bf16")
    assert eager_kernels.attention_pass("forward", small).name == "forward flash2"
    large = dataclasses.replace(small, batch_size=64, model=dataclasses.replace(PLAIN, context_length=4096))
    assert eager_kernels.attention_pass("forward", large).name == "forward short"
    assert eager_kernels.attention_pass("backward", large).name == "backward"
    wide = dataclasses.replace(large, precision="fp32")
    assert eager_kernels.attention_pass("backward", wide).name == "backward wide"
    wide_heads = dataclasses.replace(wide, model=dataclasses.replace(wide.model, num_heads=1, d_head=128))
    assert eager_kernels.attention_pass("forward", wide_heads).name == "forward efficient"
