"""Instrument of `kernel_rates`: the kernels of training steps, one by one.

Kernels are captured in CUDA graphs, so that the host's launches do not count, and replayed after pauses, so that the
GPU has its highest clock. Sustained work then shows at which clock the GPU stays within its power limit.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cs336_systems.config import ModelConfig, RunConfig
from cs336_systems.experiments.kernels.measure_operators import (
    host_times,
    library_attention,
    operator_calls,
    rotated_sets,
    wide_matmul,
)
from cs336_systems.kernels import attention
from cs336_systems.kernels.fused import pointwise
from cs336_systems.measure.environment import GpuSensor, nvml_device
from cs336_systems.measure.timing import STEP, release_memory, time_steps
from cs336_systems.model import RotaryEmbedding
from cs336_systems.predict.time import calibration_plan as calibration
from cs336_systems.predict.time.calibration_plan import (
    CLOCK,
    KERNEL_TIME,
    MULTIPROCESSORS,
    SUSTAINED_TIME,
    WATTS,
    kernels_of,
)
from cs336_systems.predict.time.operator_plan import HOST, TIMED_PASSES
from cs336_systems.predict.time.step_kernels import (
    FORWARD,
    WEIGHT,
    AttentionPass,
    Kernel,
    Matmul,
    Pass,
    gradient_kernels,
    update_kernels,
)
from cs336_systems.record import Metric
from cs336_systems.step.train_step import TrainStep, require_device

BURST, SAMPLES = 2.5e-3, 3
"""Seconds of work in a replay, and number of replays."""
MOST_COPIES = 60
"""Maximum runs of a kernel in a graph."""
SUSTAINED_SECONDS, SAMPLE_SECONDS = 2.0, 0.02
TINY, TINY_COPIES = 1, 300
Call = Callable[[int], object]
"""Runs a kernel once; the argument, the number of the run, selects the operands."""


def measure_calibration(config: dict[str, Any]) -> list[Metric]:
    require_device(config["device"])
    device = torch.device(config["device"])
    part = config["part"]
    if part == calibration.POWER:
        return _power(device)
    if part == calibration.LAUNCHES:
        return [Metric(KERNEL_TIME, "s", _launches(device)), *_multiprocessors(device)]
    if part == HOST:
        return [Metric(KERNEL_TIME, "s", host_times(device))]
    times = []
    for run, kernel in kernels_of(config):
        times.append(_kernel_time(kernel, run, device))
        if len(times) % 20 == 0:
            release_memory()
    return [Metric(KERNEL_TIME, "s", times)]


def _kernel_time(kernel: Kernel, run: RunConfig, device: torch.device) -> float:
    if isinstance(kernel, Matmul):
        if kernel.precision:
            return _burst(wide_matmul(kernel, device), kernel.flops / 50e12, device)
        return _burst(_matmul(kernel, device), kernel.flops / 500e12, device)
    if isinstance(kernel, Pass):
        is_operator = kernel.name in TIMED_PASSES
        calls = operator_calls(kernel, run, device) if is_operator else [PASSES[kernel.name](run, kernel, device)]
        first, *subtracted = (_burst(call, kernel.bytes / 3e12, device) for call in calls)
        return first - sum(subtracted)
    assert isinstance(kernel, AttentionPass)
    is_own = kernel.name in ("forward", "backward")
    forward, both = _attention(kernel, device) if is_own else library_attention(kernel, device)
    if not kernel.is_backward:
        return _burst(forward, kernel.flops / 400e12, device)
    # Backward needs a forward; both are timed, then forward alone.
    return _burst(both, kernel.flops / 300e12, device) - _burst(forward, kernel.flops / 900e12, device)


def _burst(call: Call, expected: float, device: torch.device) -> float:
    """Return the seconds of one run, at the highest clock."""
    call(0)
    copies = max(1, min(MOST_COPIES, int(BURST / (expected + 4e-6))))
    replay = _captured(call, copies) if device.type == "cuda" else lambda: [call(number) for number in range(copies)]
    replay()
    found = []
    for _ in range(SAMPLES):
        time.sleep(max(4e-3, 2 * copies * expected))
        timings = time_steps(lambda _: replay(), device=device, warmup_steps=0, num_steps=1)
        found += (timings.events or timings.wall)[STEP]
    return sorted(found)[SAMPLES // 2] / copies


def _captured(call: Call, copies: int) -> Callable[[], None]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(copies):
            call(number)
    return graph.replay


# -- kernels ----------------------------------------------------------------------------------------------------------


def _matmul(kernel: Matmul, device: torch.device) -> Call:
    m, n, k = kernel.rows, kernel.columns, kernel.depth
    copies = rotated_sets(2 * k * (m + n))
    left = [_random((k, m) if kernel.layout == WEIGHT else (m, k), device) for _ in range(copies)]
    right = [_random((n, k) if kernel.layout == FORWARD else (k, n), device) for _ in range(copies)]
    out = torch.zeros((m, n), device=device, dtype=torch.float32 if kernel.is_wide else torch.bfloat16)

    def call(number: int) -> None:
        a, b = left[number % copies], right[number % copies]
        a, b = (a.t() if kernel.layout == WEIGHT else a), (b.t() if kernel.layout == FORWARD else b)
        how: dict[str, Any] = {"out_dtype": torch.float32} if kernel.is_wide else {}
        if kernel.adds:
            torch.addmm(out, a, b, out=out, **how)
        else:
            torch.mm(a, b, out=out, **how)

    return call


def _attention(kernel: AttentionPass, device: torch.device) -> tuple[Call, Call]:
    """Return forward, and forward with backward; q, k and v are views as in a step."""

    def heads(count: int) -> Tensor:
        shape = kernel.batch, kernel.length, count, kernel.head_dim
        return _random(shape, device).transpose(1, 2).requires_grad_()

    q, k, v = heads(kernel.heads), heads(kernel.kv_heads), heads(kernel.kv_heads)
    grad = _random((kernel.batch, kernel.length, kernel.heads, kernel.head_dim), device).transpose(1, 2)

    def forward(number: int) -> None:
        with torch.no_grad():
            attention(q, k, v, is_causal=True)

    def both(number: int) -> None:
        torch.autograd.grad(attention(q, k, v, is_causal=True), (q, k, v), grad)

    return forward, both


def _random(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


Builder = Callable[[RunConfig, Pass, torch.device], Call]


def _add_norm(run: RunConfig, kernel: Pass, device: torch.device) -> Call:
    x, delta, gain, first = _stream(run, device), _stream(run, device), _gain(run, device), _is_smaller(run, kernel, 4)
    return lambda _: pointwise.add_norm(x, None if first else delta, gain, run.model.norm_eps, x.dtype)


def _add_norm_backward(run: RunConfig, kernel: Pass, device: torch.device) -> Call:
    x, grad, grad_y = (_stream(run, device) for _ in range(3))
    gain = _gain(run, device)
    rstd = torch.ones(run.tokens, device=device)
    is_last = _is_smaller(run, kernel, 5)
    return lambda _: pointwise.add_norm_backward(
        grad_y, None if is_last else grad, x, rstd, gain, recompute_y=not is_last
    )


def _is_smaller(run: RunConfig, kernel: Pass, passes: int) -> bool:
    """Return True for the norm without a residual branch: it moves less than `passes` times the residual stream."""
    return kernel.bytes < passes * run.tokens * run.model.d_model * 2


def _stream(run: RunConfig, device: torch.device) -> Tensor:
    return _random((run.tokens, run.model.d_model), device)


def _gain(run: RunConfig, device: torch.device) -> Tensor:
    return torch.ones(run.model.d_model, device=device)


def _tables(run: RunConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    rotary = RotaryEmbedding(run.model.context_length, run.model.head_dim, run.model.rope_theta).to(device)
    return rotary.cos, rotary.sin


def _qkv(run: RunConfig, device: torch.device) -> Tensor:
    model = run.model
    heads = model.num_heads + 2 * model.kv_heads
    return _random((run.batch_size, model.context_length, heads, model.head_dim), device)


def _rotate(run: RunConfig, kernel: Pass, device: torch.device) -> Call:
    qkv, (cos, sin) = _qkv(run, device), _tables(run, device)
    return lambda _: pointwise.rotate_(qkv, cos, sin, run.model.num_heads)


def _rotate_backward(run: RunConfig, kernel: Pass, device: torch.device) -> Call:
    parts, (cos, sin) = pointwise.heads_of(_qkv(run, device), run.model.num_heads), _tables(run, device)
    return lambda _: pointwise.rotate_backward(*parts, cos, sin)


def _norm_rotate(run: RunConfig, kernel: Pass, device: torch.device) -> Call:
    qkv, (cos, sin) = _qkv(run, device), _tables(run, device)
    gain, model = torch.ones(run.model.head_dim, device=device), run.model
    return lambda _: pointwise.norm_rotate(qkv, gain, gain, model.norm_eps, cos, sin, model.num_heads)


def _norm_rotate_backward(run: RunConfig, kernel: Pass, device: torch.device) -> Call:
    qkv, (cos, sin) = _qkv(run, device), _tables(run, device)
    gain, model = torch.ones(run.model.head_dim, device=device), run.model
    parts = pointwise.heads_of(_qkv(run, device), model.num_heads)
    return lambda _: pointwise.norm_rotate_backward(*parts, qkv, gain, gain, model.norm_eps, cos, sin)


def _swiglu(run: RunConfig, kernel: Pass, device: torch.device) -> Call:
    gate_up = _random((run.tokens, 2 * run.model.d_ff), device)
    return lambda _: pointwise.swiglu(gate_up)


def _swiglu_backward(run: RunConfig, kernel: Pass, device: torch.device) -> Call:
    gate_up, grad = _random((run.tokens, 2 * run.model.d_ff), device), _random((run.tokens, run.model.d_ff), device)
    return lambda _: pointwise.swiglu_backward(grad, gate_up)


def _cross_entropy(run: RunConfig, kernel: Pass, device: torch.device) -> Call:
    vocabulary = run.model.vocab_size
    rows = kernel.bytes // (4 * vocabulary)
    logits, targets = _random((rows, vocabulary), device), torch.randint(vocabulary, (rows,), device=device)
    weight = torch.ones((), device=device)
    return lambda _: pointwise.cross_entropy_(logits, targets, weight)


def _scale(run: RunConfig, kernel: Pass, device: torch.device) -> Call:
    x, factor = _random((kernel.bytes // 4,), device), torch.ones((), device=device)
    return lambda _: x.mul_(factor)


def _scale_wide(run: RunConfig, kernel: Pass, device: torch.device) -> Call:
    x, factor = _random((kernel.bytes // 8,), device, torch.float32), torch.ones((), device=device)
    return lambda _: x.mul_(factor)


def _deposit(run: RunConfig, kernel: Pass, device: torch.device) -> Call:
    return _copies(kernel.bytes // 2, device)


def _copies(size: int, device: torch.device) -> Call:
    source = _random((size // 2,), device)
    target = torch.empty_like(source)
    return lambda _: target.copy_(source)


def _fill(run: RunConfig, kernel: Pass, device: torch.device) -> Call:
    x = torch.empty(kernel.bytes // 2, device=device, dtype=torch.bfloat16)
    return lambda _: x.zero_()


def _embedding(run: RunConfig, kernel: Pass, device: torch.device) -> Call:
    table, tokens = _embedding_operands(run, device)
    return lambda _: F.embedding(tokens, table)


def _embedding_backward(run: RunConfig, kernel: Pass, device: torch.device) -> Call:
    _, tokens = _embedding_operands(run, device)
    grad, size = _stream(run, device), run.model.vocab_size
    return lambda _: torch.ops.aten.embedding_dense_backward(grad, tokens, size, -1, False)


def _embedding_operands(run: RunConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    size = run.model.vocab_size
    return _random((size, run.model.d_model), device), torch.randint(size, (run.tokens,), device=device)


def _biases(run: RunConfig, kernel: Pass, device: torch.device) -> Call:
    width = run.model.q_width + 2 * run.model.kv_width
    grad = _random((run.tokens, width), device)
    return lambda _: grad.sum(0)


def _adamw(run: RunConfig, kernel: Pass, device: torch.device) -> Call:
    count = kernel.bytes // 26
    weights, grads = _random((count,), device), _random((count,), device)
    low_bits = torch.zeros(count, device=device, dtype=torch.int16)
    mean, square = (torch.zeros(count, device=device) for _ in range(2))
    scalars = torch.tensor([1e-3, 1.0, 0.1, 0.1, 1.0], device=device)
    return lambda _: pointwise.adamw_(weights, low_bits, grads, mean, square, scalars, (0.9, 0.95), 1e-8, 0.1)


PASSES: dict[str, Builder] = {
    "embedding": _embedding,
    "add_norm": _add_norm,
    "rotate": _rotate,
    "norm_rotate": _norm_rotate,
    "swiglu": _swiglu,
    "cross_entropy": _cross_entropy,
    "scale": _scale,
    "scale_wide": _scale_wide,
    "deposit": _deposit,
    "add_norm_backward": _add_norm_backward,
    "swiglu_backward": _swiglu_backward,
    "rotate_backward": _rotate_backward,
    "norm_rotate_backward": _norm_rotate_backward,
    "sum of biases' gradients": _biases,
    "fill": _fill,
    "embedding_backward": _embedding_backward,
    "embedding_backward_unsorted": _embedding_backward,
    "adamw": _adamw,
}


# -- launches, power --------------------------------------------------------------------------------------------------


def _launches(device: torch.device) -> list[float]:
    """Return seconds: of a small kernel, of the gap between two kernels of a graph, and of one launch on the host.

    A graph of tiny kernels gives the sum of the first two, of which a kernel takes at least a microsecond.
    """
    x = torch.zeros(TINY, device=device)

    def tiny(number: int) -> None:
        x.add_(1.0)

    both = _burst(tiny, 2e-6, device)
    gap = max(0.0, min(0.3 * both, both - 1e-6))
    run = RunConfig(
        model=ModelConfig(d_model=512, num_heads=8, d_ff=1024, num_layers=4, context_length=256, vocab_size=1000),
        batch_size=1, precision="bf16", attention="auto", fast="kernels,loss,optimizer", device=str(device),
    )  # fmt: skip
    step = TrainStep.build(run)
    batch = step.random_batch()
    wall = time_steps(lambda _: step(*batch), device=device, warmup_steps=3, num_steps=5).wall[STEP]
    kernels = sum(kernel.times for kernel in (*gradient_kernels(run), *update_kernels(run)))
    return [both - gap, gap, min(wall) / kernels]


def _multiprocessors(device: torch.device) -> list[Metric]:
    if device.type != "cuda":
        return []
    return [Metric(MULTIPROCESSORS, "1", [torch.cuda.get_device_properties(device).multi_processor_count])]


def _power(device: torch.device) -> list[Metric]:
    """Time each kind of work at once and after SUSTAINED_SECONDS; measure clock and power then."""
    with nvml_device(device) as gpu:
        metrics = [] if gpu is None else [Metric("power_limit", "W", [gpu.power_limit()])]
        for name, call in _sustained_work(device):
            first = _burst(call, BURST, device)
            with _sampled(gpu) as samples:
                last = _sustained(call, device)
            metrics += [
                Metric(KERNEL_TIME, "s", [first], variant=name),
                Metric(SUSTAINED_TIME, "s", [last], variant=name),
            ]
            if settled := samples[len(samples) // 2 :]:
                for metric, unit, values in zip((CLOCK, WATTS), ("1", "W"), zip(*settled, strict=True), strict=True):
                    metrics.append(Metric(metric, unit, [sum(values) / len(values)], variant=name))
            release_memory()
    return metrics


def _sustained_work(device: torch.device) -> Iterator[tuple[str, Call]]:
    size = calibration.SUSTAINED_SIZE
    kernel = Matmul("matmul", size, size, size, FORWARD)
    yield "matmul", _matmul(kernel, device)
    yield "copy", _copies(calibration.SUSTAINED_BYTES, device)
    yield "attention", _attention(calibration.SUSTAINED_ATTENTION, device)[1]


def _sustained(call: Call, device: torch.device) -> float:
    """Return the seconds of one call after SUSTAINED_SECONDS of calls."""
    seconds = _burst(call, BURST, device)
    calls = max(1, int(SAMPLE_SECONDS / seconds))
    end, found = time.monotonic() + SUSTAINED_SECONDS, []

    def group(_: object) -> None:
        for number in range(calls):
            call(number)

    while time.monotonic() < end:
        timings = time_steps(group, device=device, warmup_steps=0, num_steps=1)
        found += (timings.events or timings.wall)[STEP]
    settled = sorted(found[len(found) // 2 :])
    return settled[len(settled) // 2] / calls


@contextlib.contextmanager
def _sampled(gpu: GpuSensor | None) -> Iterator[list[tuple[float, float]]]:
    """Collect the clock, relative to the highest, and the watts every few milliseconds, in a thread."""
    samples: list[tuple[float, float]] = []
    if gpu is None:
        yield samples
        return
    done = threading.Event()

    def collect() -> None:
        while not done.wait(SAMPLE_SECONDS):
            samples.append((gpu.clock(), gpu.watts()))

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()
