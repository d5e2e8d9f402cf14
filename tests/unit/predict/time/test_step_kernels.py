"""The list of a step's kernels against the step itself: every matmul, every pass over memory."""

import dataclasses
from collections import Counter
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cs336_systems.config import ModelConfig, RunConfig
from cs336_systems.kernels.fused import fp8, nodes, pointwise
from cs336_systems.predict.flops import model_flops
from cs336_systems.predict.time import step_kernels
from cs336_systems.predict.time.step_kernels import (
    ADD,
    AttentionPass,
    Matmul,
    Pass,
    gradient_kernels,
    update_kernels,
)
from cs336_systems.step.train_step import TrainStep
from tests.unit.kernels.test_fp8 import FAMILIES as FP8_FAMILIES
from tests.unit.test_families import FAMILIES

NAMES = ("add_norm", "add_norm_backward", "rotate_", "rotate_backward", "norm_rotate", "norm_rotate_backward", "swiglu",
         "swiglu_backward", "cross_entropy_", "adamw_")  # fmt: skip


class Matmuls(TorchDispatchMode):
    """Counts matmuls by rows, columns and depth."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            a, b = args[-2:] if len(args) in (2, 3) else args[1:3]
            self.found[len(a), b.shape[1], a.shape[1]] += 1
        return function(*args, **(kwargs or {}))


def run_of(config, **fields):
    return RunConfig(model=config, batch_size=2, attention="flash_torch", fast="kernels,loss,optimizer", **fields)


@pytest.fixture
def passes(monkeypatch):
    """Count calls of the fused passes."""
    found = Counter()
    for name in NAMES:
        own = getattr(pointwise, name)

        def counted(*args, own=own, name=name, **options):
            found[name.removesuffix("_")] += 1
            return own(*args, **options)

        monkeypatch.setattr(pointwise, name, counted)
    return found


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_matmul_and_pass_of_a_step_is_listed(name, micro_batches, passes):
    run = run_of(FAMILIES[name])
    step = TrainStep.build(run)
    batch = step.random_batch()
    with Matmuls() as seen:
        step.launch([batch] * micro_batches)
    listed = [kernel for number in range(micro_batches) for kernel in gradient_kernels(run, adds=number > 0)]
    matmuls = Counter()
    for kernel in listed:
        if isinstance(kernel, Matmul):
            matmuls[kernel.rows, kernel.columns, kernel.depth] += kernel.times
    assert matmuls == seen.found
    counts = Counter()
    for kernel in (*listed, *update_kernels(run)):
        if isinstance(kernel, Pass) and kernel.name in passes:
            counts[kernel.name] += kernel.times
    updates = passes.pop("adamw")
    assert (counts.pop("adamw"), updates) == (1, 1)
    assert counts == passes


def test_the_loss_in_chunks(monkeypatch):
    run = run_of(FAMILIES["llama"])
    for module in (nodes, step_kernels):
        monkeypatch.setattr(module, "CHUNK_BYTES", 4 * run.model.vocab_size * 10)
    step = TrainStep.build(run)
    with Matmuls() as seen:
        step.launch([step.random_batch()])
    listed = Counter()
    for kernel in gradient_kernels(run):
        if isinstance(kernel, Matmul):
            listed[kernel.rows, kernel.columns, kernel.depth] += kernel.times
    assert listed == seen.found


@pytest.mark.parametrize("name", FAMILIES)
def test_flops_are_those_of_the_model(name):
    """The list has the half of attention's scores that a causal mask shows, and recomputes them in backward."""
    run = run_of(FAMILIES[name])
    length = run.model.context_length
    found = sum(kernel.flops * kernel.times for kernel in gradient_kernels(run) if isinstance(kernel, Matmul))
    attention = [kernel for kernel in gradient_kernels(run) if isinstance(kernel, AttentionPass)]
    forward = next(kernel.flops * kernel.times for kernel in attention if kernel.name == "forward")
    assert found + 3 * forward * 2 * length // (length + 1) == model_flops(run)
    assert sum(kernel.flops * kernel.times for kernel in attention) == forward * 7 // 2


def test_constants_are_those_of_the_kernels():
    from cs336_systems.kernels.flash import tiles
    from cs336_systems.kernels.fused import pointwise_triton

    for name in ("ROTARY_ELEMENTS", "LOGITS", "NORM_PROGRAMS", "MANY_ROWS"):
        assert getattr(step_kernels, name) == getattr(pointwise_triton, name)
    for name in ("LAUNCH_BOUND", "WIDEST_GRAD"):
        assert getattr(step_kernels, name) == getattr(tiles, name)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize(
    ("batch", "length", "heads", "head_dim"),
    [(1, 512, 8, 64), (1, 1024, 8, 64), (4, 512, 16, 64), (1, 2048, 2, 64), (64, 32, 16, 64), (1, 1536, 16, 128),
     (1, 128, 2, 160), (2, 256, 4, 256)],
)  # fmt: skip
def test_attention_has_the_kernels_of_its_launch(batch, length, heads, head_dim):
    from cs336_systems.kernels.flash import portable_launch
    from cs336_systems.kernels.flash.band import Band

    model = ModelConfig(
        d_model=heads * head_dim, num_heads=heads, d_ff=64, num_layers=1, context_length=length, vocab_size=64
    )
    run = RunConfig(model=model, batch_size=batch, precision="bf16", attention="flash_triton", fast="on", device="cuda")
    q = torch.empty(batch, heads, length, head_dim, dtype=torch.bfloat16, device="meta")
    bound = {"INTERPRETED": False, "SMALLEST_FOR_DESCRIPTORS": step_kernels.SMALLEST_FOR_DESCRIPTORS}
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(torch.cuda, "get_device_name", return_value="NVIDIA H200"),
        mock.patch.multiple(portable_launch, **bound),
    ):
        by_pointer = not portable_launch.tile_key("forward", (q, q, q, q), Band(None, 0)).descriptors
        with mock.patch.object(portable_launch, "plan", side_effect=lambda name, *rest: name):
            kernels = portable_launch._plan_backward((q,) * 8, Band(None, 0))
    assert portable_launch.LONG_FOR_DESCRIPTORS == step_kernels.LONG_FOR_DESCRIPTORS
    assert (step_kernels.attention_path(run, is_backward=False) == step_kernels.SMALL_PATH) == by_pointer
    assert (step_kernels.attention_path(run, is_backward=True) == step_kernels.SMALL_PATH) == (kernels == ["grad"])


def test_bf16_halves_the_bytes_of_passes():
    wide, narrow = (
        sum(kernel.bytes * kernel.times for kernel in gradient_kernels(run) if isinstance(kernel, Pass))
        for run in (run_of(FAMILIES["qwen3"], precision=precision) for precision in ("fp32", "bf16"))
    )
    assert wide == 2 * narrow
    assert (step_kernels.CHUNK_BYTES, step_kernels.MATMUL_MULTIPLE) == (nodes.CHUNK_BYTES, nodes.MATMUL_MULTIPLE)
    kept = dataclasses.replace(run_of(FAMILIES["qwen3"], precision="bf16"), max_grad_norm=1.0)
    assert [kernel.name for kernel in update_kernels(kept)] == ["norm of gradients", "adamw", "factors of the update"]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", FP8_FAMILIES)
def test_every_matmul_and_pass_in_fp8_is_listed(name, micro_batches, passes, monkeypatch):
    """Bytes of casts and transposes are counted at the calls, so that no tensor is forgotten."""
    run = RunConfig(
        model=FP8_FAMILIES[name], batch_size=2, attention="auto", fast="kernels,loss,optimizer", precision="fp8"
    )
    step, found = TrainStep.build(run), Counter()

    def count(function, describe):
        own = getattr(fp8, function)

        def counted(*args, **options):
            found[describe(*args, **options)] += 1
            return own(*args, **options)

        monkeypatch.setattr(fp8, function, counted)

    count("quantize", lambda x, *_: ("fp8_cast", 3 * x.numel()))
    count("_transposed", lambda x, **_: ("fp8_transpose", (x.element_size() + 1) * x.numel()))
    count("_scaled_matmul", lambda a, b, *_, **options: ("matmul", len(a), len(b), a.shape[1]))
    count("largest_scale", lambda *_, **options: "largest scale")
    count("swiglu", lambda gate_up, *_: ("fp8_swiglu", gate_up.numel() * 5 // 2))
    count("swiglu_backward", lambda grad, *_: ("fp8_swiglu_backward", 9 * grad.numel()))
    count(
        "add_norm",
        lambda x, delta, gain, eps, lost, dtype: (
            "fp8_add_norm",
            x.numel() * ((2 if delta is None else 6) + dtype.itemsize),
        ),
    )
    batch = step.random_batch()
    with Matmuls() as seen:
        step.launch([batch] * micro_batches)
    listed, plain = Counter(), Counter()
    for kernel in (kernel for number in range(micro_batches) for kernel in gradient_kernels(run, adds=number > 0)):
        if isinstance(kernel, Matmul):
            assert not kernel.adds or not kernel.precision, "the sum is a pass of its own"
            shape = kernel.rows, kernel.columns, kernel.depth
            found_in = listed if kernel.precision else plain
            found_in[("matmul", *shape) if kernel.precision else shape] += kernel.times
        elif kernel.name.startswith("fp8_") and kernel.name != ADD:
            listed[kernel.name, kernel.bytes] += kernel.times
        elif kernel.name == "largest scale of a matrix":
            listed["largest scale"] += kernel.times
    assert found == +listed
    # Formulas of FP8 matmuls on a CPU are matmuls in fp32, of the same shapes.
    in_fp8 = Counter({shape[1:]: times for shape, times in found.items() if shape[0] == "matmul"})
    assert seen.found - in_fp8 == plain
    norms = sum(k.times for k in gradient_kernels(run) if isinstance(k, Pass) and k.name == "add_norm")
    assert norms * micro_batches == passes["add_norm"] == micro_batches
