"""Instrument of `kernel_rates` for eager steps: PyTorch's operators one by one, and a step that the host bounds."""

import statistics
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cs336_systems.config import ModelConfig, RunConfig
from cs336_systems.kernels import attention
from cs336_systems.measure.timing import STEP, time_as_configured
from cs336_systems.predict.time import eager_kernels as eager
from cs336_systems.predict.time.compiled_kernels import compiled_phases
from cs336_systems.predict.time.eager_time import parameter_tensors
from cs336_systems.predict.time.step_kernels import TRITON_WIDE, AttentionPass, Matmul, Pass
from cs336_systems.step.train_step import TrainStep, set_matmul_precision

Call = Callable[[int], object]
HOST_MODEL = ModelConfig(d_model=256, num_heads=4, d_ff=512, num_layers=8, context_length=64, vocab_size=512)
"""A model whose kernels are far shorter than their launches."""
HOST_STEPS = 15
HEADS, KEYS = 8, 512
ROTATED_BYTES, MOST_ROTATED = 200 << 20, 8
"""Sets of operands are rotated until they exceed these bytes, so that none stays in a cache; and the maximum number of
sets."""


# -- operators --------------------------------------------------------------------------------------------------------


def operator_calls(kernel: Pass, run: RunConfig, device: torch.device) -> list[Call]:
    """Return calls of an operator that moves as many bytes as the pass, in the way that the pass's name says; and,
    where it cannot run alone, of the part whose time is to be subtracted."""
    copies = rotated_sets(kernel.bytes)
    if kernel.name == eager.RMS_NORM_BACKWARD:
        both, forward = zip(*(_rms_norm_backward(kernel.bytes, run, device) for _ in range(copies)), strict=True)
        return [_rotated(both), _rotated(forward)]
    return [_rotated([_BUILDERS[kernel.name](kernel.bytes, run, device) for _ in range(copies)])]


def rotated_sets(size: int) -> int:
    """Return the number of sets of operands, each of `size` bytes, that successive runs of a kernel rotate through."""
    return max(1, min(MOST_ROTATED, ROTATED_BYTES // size))


def _rotated(calls: Sequence[Call]) -> Call:
    """Return a call that rotates through the operands of these calls."""
    return lambda number: calls[number % len(calls)](number)


def _random(elements: int, device: torch.device, *, columns: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    columns = min(columns, elements)
    return torch.randn((max(1, elements // columns), columns), device=device, dtype=dtype)


def _pointwise(size: int, run: RunConfig, device: torch.device) -> Call:
    a, b = (_random(size // 12, device) for _ in range(2))
    return lambda _: a * b


def _cast(size: int, run: RunConfig, device: torch.device) -> Call:
    a = _random(size // 6, device, dtype=torch.bfloat16)
    return lambda _: a.float()


def _narrow(size: int, run: RunConfig, device: torch.device) -> Call:
    a = _random(size // 6, device)
    return lambda _: a.to(torch.bfloat16)


def _mixed(size: int, run: RunConfig, device: torch.device) -> Call:
    a, b = _random(size // 10, device), _random(size // 10, device, dtype=torch.bfloat16)
    return lambda _: a + b


def _heads(size: int, run: RunConfig, device: torch.device) -> Tensor:
    """Return (1, T, H, K) of `size` bytes."""
    model = run.model
    length = max(1, size // 4 // model.q_width)
    return torch.randn((1, length, model.num_heads, model.head_dim), device=device)


def _strided(size: int, run: RunConfig, device: torch.device) -> Call:
    view = _heads(size // 2, run, device).transpose(1, 2)
    return lambda _: view.clone(memory_format=torch.contiguous_format)


def _strided_mixed(size: int, run: RunConfig, device: torch.device) -> Call:
    heads = _heads(size * 2 // 3, run, device).to(torch.bfloat16)
    table = torch.randn((heads.shape[1], 1, heads.shape[3]), device=device)
    return lambda _: heads * table


def _transposed(size: int, run: RunConfig, device: torch.device) -> Call:
    view = _heads(size // 2, run, device).permute(0, 2, 3, 1)
    return lambda _: view.clone(memory_format=torch.contiguous_format)


def _scores(elements: int, device: torch.device) -> Tensor:
    """Return scores of several heads, each over KEYS keys."""
    keys = min(KEYS, max(1, elements // HEADS))
    return torch.randn((HEADS, max(1, elements // (HEADS * keys)), keys), device=device)


def _masked(size: int, run: RunConfig, device: torch.device) -> Call:
    scores = _scores(size // 8, device)
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=device).triu(1)
    return lambda _: scores.masked_fill_(mask, 0.0)


def _copy(size: int, run: RunConfig, device: torch.device) -> Call:
    a = _random(size // 8, device)
    return lambda _: a.clone()


def _triangle(size: int, run: RunConfig, device: torch.device) -> Call:
    length = max(1, int((size // 2) ** 0.5))
    ones = torch.ones((length, length), dtype=torch.bool, device=device)
    return lambda _: ones.triu(1)


def _softmax(size: int, run: RunConfig, device: torch.device) -> Call:
    scores = _scores(size // 8, device)
    return lambda _: torch.softmax(scores, -1)


def _softmax_backward(size: int, run: RunConfig, device: torch.device) -> Call:
    """CUDA's operator also multiplies first, in a separate pass. So the gradient alone is timed by the kernel of
    log-softmax, which reads and writes the same bytes."""
    grad, weights = (_scores(size // 12, device) for _ in range(2))
    return lambda _: torch.ops.aten._log_softmax_backward_data(grad, weights, -1, torch.float32)


def _logits(elements: int, run: RunConfig, device: torch.device) -> Tensor:
    return _random(elements, device, columns=run.model.vocab_size)


def _log_softmax(size: int, run: RunConfig, device: torch.device) -> Call:
    logits = _logits(size // 8, run, device)
    return lambda _: torch.log_softmax(logits, -1)


def _log_softmax_backward(size: int, run: RunConfig, device: torch.device) -> Call:
    grad, out = (_logits(size // 12, run, device) for _ in range(2))
    return lambda _: torch.ops.aten._log_softmax_backward_data(grad, out, -1, torch.float32)


def _rms_norm(size: int, run: RunConfig, device: torch.device) -> Call:
    width = run.model.d_model
    x, gain = _random(size // 8, device, columns=width), torch.ones(min(width, size // 8), device=device)
    return lambda _: F.rms_norm(x, gain.shape, gain, 1e-5)


def _rms_norm_backward(size: int, run: RunConfig, device: torch.device) -> tuple[Call, Call]:
    """Return forward with backward, and forward. Autograd runs backward on the stream of its forward: a CUDA graph has
    to capture both."""
    x = _random(size // 12, device, columns=run.model.d_model).requires_grad_()
    gain = torch.ones(x.shape[1], device=device, requires_grad=True)
    grad = torch.randn_like(x)

    def forward(number: int) -> Tensor:
        return F.rms_norm(x, gain.shape, gain, 1e-5)

    return lambda number: torch.autograd.grad(forward(number), (x, gain), grad), forward


def _adamw(size: int, run: RunConfig, device: torch.device) -> Call:
    weight = torch.nn.Parameter(_random(size // 28, device))
    weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True, capturable=device.type == "cuda")
    return lambda _: optimizer.step()


_BUILDERS: dict[str, Callable[[int, RunConfig, torch.device], Call]] = {
    eager.POINTWISE: _pointwise,
    eager.CAST: _cast,
    eager.NARROW: _narrow,
    eager.MIXED: _mixed,
    eager.STRIDED: _strided,
    eager.STRIDED_MIXED: _strided_mixed,
    eager.TRANSPOSED: _transposed,
    eager.MASKED: _masked,
    eager.COPY: _copy,
    eager.TRIANGLE: _triangle,
    eager.SOFTMAX: _softmax,
    eager.SOFTMAX_BACKWARD: _softmax_backward,
    eager.LOG_SOFTMAX: _log_softmax,
    eager.LOG_SOFTMAX_BACKWARD: _log_softmax_backward,
    eager.RMS_NORM: _rms_norm,
    eager.ADAMW: _adamw,
}


def wide_matmul(kernel: Matmul, device: torch.device) -> Call:
    """Return matmuls of fp32 operands, in fp32 or TF32."""
    set_matmul_precision(kernel.precision)
    left = torch.randn((kernel.batch, kernel.rows, kernel.depth), device=device)
    right = torch.randn((kernel.batch, kernel.depth, kernel.columns), device=device)
    return lambda _: torch.bmm(left, right)


# -- attention of libraries -------------------------------------------------------------------------------------------

_LIBRARIES = {
    eager.FLASH_2: ("sdpa", torch.bfloat16),
    eager.EFFICIENT: ("sdpa", torch.float32),
    TRITON_WIDE: ("flash_triton", torch.float32),
}


def library_attention(kernel: AttentionPass, device: torch.device) -> tuple[Call, Call]:
    """Return forward, and forward with backward."""
    set_matmul_precision("fp32")
    impl, dtype = _LIBRARIES[kernel.name.split()[1]]
    if impl == "flash_triton" and device.type == "cpu":
        impl = "flash_torch"
    shape = kernel.batch, kernel.length, kernel.heads, kernel.head_dim
    q, k, v = (torch.randn(shape, device=device, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3))
    grad = torch.randn(shape, device=device, dtype=dtype).transpose(1, 2)

    def forward(number: int) -> None:
        with torch.no_grad():
            attention(q, k, v, is_causal=True, impl=impl)

    def both(number: int) -> None:
        torch.autograd.grad(attention(q, k, v, is_causal=True, impl=impl), (q, k, v), grad)

    return forward, both


# -- the host ---------------------------------------------------------------------------------------------------------


def host_times(device: torch.device) -> list[float]:
    """Return the host's seconds for one kernel of forward, of forward without autograd and of backward, for one
    parameter in the optimizer, for the graph of one block, for the rest of a step, and for one kernel of a compiled
    model. All are measured in a step that is bound by the host because its kernels are so short."""
    set_matmul_precision("fp32")
    step, inference = (_phases(_host_run(device, mode)) for mode in ("train-step", "inference"))
    run = _host_run(device)
    launches = {name: sum(kernel.times for kernel in own) for name, own in eager.eager_phases(run).items()}
    outside = inference[STEP] - inference["forward"]
    release = step[STEP] - sum(step[name] for name in launches) - outside
    forward = step["forward"] / launches["forward"]
    return [
        forward,
        inference["forward"] / launches["forward"],
        step["backward"] / launches["backward"],
        step["optimizer"] / parameter_tensors(run.model),
        max(0.0, release) / run.model.num_layers,
        max(0.0, outside),
        _compiled(device) if device.type == "cuda" else forward,  # compiling for a CPU would time a C++ compiler's code
    ]


def _compiled(device: torch.device) -> float:
    run = _host_run(device, compile=True)
    kernels = compiled_phases(run)["forward"]
    return _phases(run)["forward"] / sum(kernel.times for kernel in kernels)


def _host_run(device: torch.device, mode: str = "train-step", *, compile: bool = False) -> RunConfig:
    return RunConfig(
        model=HOST_MODEL, batch_size=1, mode=mode, attention="reference", compile=compile, device=str(device),
        warmup_steps=5, num_steps=HOST_STEPS,
    )  # fmt: skip


def _phases(run: RunConfig) -> dict[str, float]:
    """Return the median seconds of each phase and of the step."""
    step = TrainStep.build(run)
    timings = time_as_configured(step, step.random_batch())
    return {name: statistics.median(own) for name, own in timings.wall.items()}
