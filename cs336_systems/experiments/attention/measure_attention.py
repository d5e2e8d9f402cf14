"""Instruments of the attention experiments: each implementation is checked against float64 before it is timed.

`measure_pytorch_attention` times naive attention, eager and compiled; `measure_flash` one implementation;
`measure_rivals` several, interleaved; `measure_leaderboard` one the way the course timed it. All share the inputs, the
implementations and the clock below. `measure_attention_step` times training steps, their attention interleaved.
"""

import importlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, lru_cache, partial
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from cs336_systems.config import ATTENTIONS, RunConfig
from cs336_systems.experiments.steps.measure_step import disable_compile_caches
from cs336_systems.kernels import attention
from cs336_systems.kernels.flash.reference import attention_reference
from cs336_systems.measure.timing import STEP, release_memory, time_calls, time_steps
from cs336_systems.model import Attention
from cs336_systems.predict.attention_model import AttentionShape, naive_peak
from cs336_systems.record import Metric
from cs336_systems.step.train_step import AUTOCAST_DTYPES, TrainStep, Watch, require_device, set_matmul_precision

Results = dict[str, Tensor]
"""out, dq, dk and dv by name."""

ERROR_BOUNDS = {"bf16": 2e-2, "fp16": 4e-3, "tf32": 2e-3, "fp32": 1e-5}
"""The largest ||x - exact|| / ||exact|| of a correct result. Weights and score gradients are rounded once or twice to
the input's precision, so the error is a few unit roundoffs u at any length: 10 u of bf16 (2^-9), 16 u of fp16 (2^-12),
4 u of tf32 (2^-11). fp32 has u = 6e-8, but its sums have up to 65536 terms; TF32 in its place would be off by 5e-4."""

SCORES_AT_ONCE = 2**25
"""Scores that the float64 reference holds at a time: 256 MiB, and it needs about five such matrices."""

LEADERBOARD_PARTS = 10
"""Number of means that are recorded instead of thousands of samples."""

STEPS_PER_ROUND = 2
"""Steps timed per round. One untimed step comes first, because caches and clocks are left from another
implementation."""


# -- implementations --------------------------------------------------------------------------------------------------

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps q, k and v of (batch, heads, seq, d) to an output of the same shape."""
Builder = Callable[[AttentionShape, torch.device, bool], AbstractContextManager[Attend]]
"""(shape, device, dynamic) -> a context manager that yields an Attend; `dynamic`: compile for all shapes."""


def _ours(name: str, shape: AttentionShape, device: torch.device, dynamic: bool) -> AbstractContextManager[Attend]:
    return nullcontext(partial(attention, is_causal=shape.is_causal, impl=name))


def _compiled(shape: AttentionShape, device: torch.device, dynamic: bool) -> AbstractContextManager[Attend]:
    return nullcontext(partial(_compile(attention_reference, dynamic=dynamic), is_causal=shape.is_causal))


@contextmanager
def _sdpa(backend: SDPBackend, shape: AttentionShape, device: torch.device, dynamic: bool) -> Iterator[Attend]:
    # Around all calls, not inside each: choosing a backend takes longer than a small kernel.
    with sdpa_kernel(backend):
        yield partial(F.scaled_dot_product_attention, is_causal=shape.is_causal)


def _flex(shape: AttentionShape, device: torch.device, dynamic: bool) -> AbstractContextManager[Attend]:
    from torch.nn.attention.flex_attention import flex_attention

    mask = _causal_block_mask(shape.seq_len, device) if shape.is_causal else None
    return nullcontext(partial(_compile(flex_attention, dynamic=dynamic), block_mask=mask))


def _flash_attention_4(shape: AttentionShape, device: torch.device, dynamic: bool) -> AbstractContextManager[Attend]:
    flash_attn_func = importlib.import_module("flash_attn.cute").flash_attn_func

    @torch.compiler.disable  # it compiles its kernels by itself
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=shape.is_causal)
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out.transpose(1, 2)

    return nullcontext(attend)


SDPA_BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
}
IMPLEMENTATIONS: dict[str, Builder] = {
    **{name: partial(_ours, name) for name in ATTENTIONS},
    "compiled": _compiled,
    **{name: partial(_sdpa, backend) for name, backend in SDPA_BACKENDS.items()},
    "flash_attention_4": _flash_attention_4,
    "flex": _flex,
}
"""`sdpa` lets PyTorch choose the backend; `sdpa_*` force one."""


def implementation(
    name: str, shape: AttentionShape, device: torch.device, *, dynamic: bool = True
) -> AbstractContextManager[Attend]:
    """Return a context manager that yields the implementation; compilation and other slow set-up happen on entry."""
    return IMPLEMENTATIONS[name](shape, device, dynamic)


@cache
def _compile(function: Callable[..., Tensor], *, dynamic: bool) -> Callable[..., Tensor]:
    """Compile once per process. Without dynamic shapes, the 80 shapes of a grid would take an hour to compile."""
    # Dtypes, head dimensions and 64-bit indices still recompile. Beyond the limit dynamo would silently run the
    # function eagerly; with fullgraph it raises.
    torch._dynamo.config.recompile_limit = 64
    # A backward that may overwrite saved tensors cannot be timed repeatedly on one graph.
    torch._functorch.config.donated_buffer = False
    return torch.compile(function, dynamic=dynamic, fullgraph=True)


@lru_cache(maxsize=1)
def _causal_block_mask(seq_len: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(_sees, None, None, seq_len, seq_len, device=device)


def _sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


# -- inputs and exact results -----------------------------------------------------------------------------------------


def prepare(config: Mapping[str, Any]) -> tuple[AttentionShape, torch.device]:
    require_device(config["device"])
    device = torch.device(config["device"])
    if device.index is not None:  # Triton launches on the current device, not on that of its tensors
        torch.cuda.set_device(device)
    shape = AttentionShape.of(config)
    set_matmul_precision(shape.precision)
    return shape, device


def torch_dtype(shape: AttentionShape) -> torch.dtype:
    return AUTOCAST_DTYPES.get(shape.precision, torch.float32)


def draw(shape: AttentionShape, device: torch.device, seed: int) -> list[Tensor]:
    """Return q, k, v, which require gradients, and the gradient of the output; equal arguments give equal tensors."""
    generator = torch.Generator(device).manual_seed(seed)
    tensors = [torch.randn(shape.size, generator=generator, device=device, dtype=torch_dtype(shape)) for _ in range(4)]
    return [tensor.requires_grad_() for tensor in tensors[:3]] + tensors[3:]


@torch.no_grad()
def attention_in_float64(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *, is_causal: bool) -> Results:
    """Return output and gradients in float64, in chunks of query rows: the whole score matrix never exists."""
    q, k, v, grad = (tensor.double() for tensor in (q, k, v, grad))
    scale = q.shape[-1] ** -0.5
    length = q.shape[-2]
    out, dq, dk, dv = (torch.zeros_like(q) for _ in range(4))
    chunk = max(1, SCORES_AT_ONCE // (q.shape[:-2].numel() * length))
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        rows, visible = slice(start, end), slice(0, end if is_causal else length)
        scores = scale * q[..., rows, :] @ k[..., visible, :].mT
        if is_causal:
            query, key = (torch.arange(part.start, part.stop, device=q.device) for part in (rows, visible))
            scores.masked_fill_(key > query[:, None], -torch.inf)
        weights = torch.softmax(scores, dim=-1)
        out[..., rows, :] = weights @ v[..., visible, :]
        delta = (grad[..., rows, :] * out[..., rows, :]).sum(-1, keepdim=True)
        grad_scores = scale * weights * (grad[..., rows, :] @ v[..., visible, :].mT - delta)
        dq[..., rows, :] = grad_scores @ k[..., visible, :]
        dk[..., visible, :] += grad_scores.mT @ q[..., rows, :]
        dv[..., visible, :] += weights.mT @ grad[..., rows, :]
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


@lru_cache(maxsize=1)  # a grid has the implementations of one shape next to each other
def _exact(shape: AttentionShape, device: torch.device, seed: int) -> Results:
    """Return exact results in host memory: on the GPU they would count towards the measured peak."""
    exact = attention_in_float64(*draw(shape, device, seed), is_causal=shape.is_causal)
    found = {name: tensor.cpu() for name, tensor in exact.items()}
    del exact
    release_memory()
    return found


def _errors(results: Results, exact: Results, precision: str) -> list[Metric]:
    """Return the relative error of each result; raises ArithmeticError if one exceeds its bound."""
    metrics = []
    for name, result in results.items():
        expected = exact[name].to(result.device)
        off = (result.detach().double() - expected).norm() / expected.norm()
        error, bound = off.item(), ERROR_BOUNDS[precision]
        if not error <= bound:  # NaN too
            raise ArithmeticError(f"wrong result: {name} off by {error:.1e}, more than {bound:g} in {precision}")
        metrics.append(Metric(f"error_{name}", "1", [error]))
    return metrics


def check_errors(attend: Attend, inputs: Sequence[Tensor], exact: Results, precision: str) -> list[Metric]:
    """Return the errors of one forward and backward pass, which is also the warm-up (compilation, autotuning)."""
    q, k, v, grad = inputs
    out = attend(q, k, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad)
    return _errors({"out": out, "dq": dq, "dk": dk, "dv": dv}, exact, precision)


# -- instruments ------------------------------------------------------------------------------------------------------


def measure_pytorch_attention(config: dict[str, Any]) -> list[Metric]:
    """Time forward and backward passes separately, and measure the memory in use between them."""
    shape, device = prepare(config)
    q, k, v, grad = inputs = draw(shape, device, config["seed"])

    def forward_backward(watch: Watch) -> None:
        q.grad = k.grad = v.grad = None
        with watch("forward"):
            out = attend(q, k, v)
        with watch("backward"):
            out.backward(grad)

    with implementation(config["implementation"], shape, device) as attend:
        errors = check_errors(attend, inputs, _exact(shape, device, config["seed"]), shape.precision)
        release_memory()  # the check compares in float64
        timings = time_steps(
            forward_backward, device=device, warmup_steps=config["warmup_steps"], num_steps=config["num_steps"]
        )
        metrics = [*(Metric(*metric) for metric in timings.metrics), *errors, Metric("flops", "FLOP", [shape.flops])]
        if timings.peak_memory is not None:
            q.grad = k.grad = v.grad = None
            graph = attend(q, k, v)
            metrics.append(Metric("memory_before_backward", "B", [torch.cuda.memory_allocated(device)]))
            del graph
            metrics += _memory_metrics(config["implementation"], shape, timings.peak_memory)
    return metrics


def measure_flash(config: dict[str, Any]) -> list[Metric]:
    """Time forward, backward and both with do_bench, as in training: the autograd graph is built."""
    shape, device = prepare(config)
    q, k, v, grad = inputs = draw(shape, device, config["seed"])
    with implementation(config["implementation"], shape, device) as attend:
        metrics = check_errors(attend, inputs, _exact(shape, device, config["seed"]), shape.precision)
        if device.type == "cuda":
            release_memory()  # the check compares in float64
            torch.cuda.reset_peak_memory_stats(device)
            attend(q, k, v).backward(grad)
            metrics += _memory_metrics(config["implementation"], shape, torch.cuda.max_memory_allocated(device))
            metrics.append(Metric("reserved_memory", "B", [torch.cuda.max_memory_reserved(device)]))
        for phase, call in timed_calls(attend, inputs):
            metrics.append(Metric(f"{phase}_time", "s", times_of(call, config, device, inputs)))
    return [*metrics, Metric("flops", "FLOP", [shape.flops])]


def timed_calls(
    attend: Attend, inputs: Sequence[Tensor], phases: Sequence[str] = ("forward", "forward_backward", "backward")
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield (phase, call) pairs one by one, so that the autograd graph of the backward phase exists only in that
    phase."""
    q, k, v, grad = inputs
    for phase in phases:
        match phase:
            case "forward":
                yield phase, lambda: attend(q, k, v)
            case "forward_backward":
                yield phase, lambda: attend(q, k, v).backward(grad)
            case "backward":
                yield phase, partial(attend(q, k, v).backward, grad, retain_graph=True)


def times_of(
    call: Callable[[], object], config: Mapping[str, Any], device: torch.device, inputs: Sequence[Tensor]
) -> list[float]:
    return time_calls(call, device=device, warmup_ms=config["warmup_ms"], rep_ms=config["rep_ms"], gradients=inputs[:3])


def _memory_metrics(name: str, shape: AttentionShape, peak: int) -> list[Metric]:
    predicted = [Metric("predicted_memory", "B", [naive_peak(shape, on_cuda=True)])] if name == "reference" else []
    return [Metric("peak_memory", "B", [peak]), *predicted]


def measure_rivals(config: dict[str, Any]) -> list[Metric]:
    """Time several implementations interleaved, one sample of each per round.

    A busy GPU lowers its clocks to stay within its power limit, so the implementation that ran before influences the
    next one: see `interleave`. Rivals are compiled for this very shape, which is their fastest form.

    With `replayed` in the configuration they are also timed as CUDA graphs: small problems are bound by the host.
    `phases` are what is timed, else forward, and forward and backward together.
    """
    shape, device = prepare(config)
    inputs = draw(shape, device, config["seed"])
    exact = _exact(shape, device, config["seed"])
    metrics = [Metric("flops", "FLOP", [shape.flops])]
    able: list[str] = []
    for name in config["implementations"]:
        try:
            with implementation(name, shape, device, dynamic=False) as attend:
                errors = check_errors(attend, inputs, exact, shape.precision)
        except Exception as error:  # a failure is a result, and does not end the others
            metrics.append(failure_of(name, error))
        else:
            metrics += [metric._replace(variant=name) for metric in errors]
            able.append(name)
    medians: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for name in interleave(able, config["rounds"]):
        with implementation(name, shape, device, dynamic=False) as attend:
            for phase, call in timed_calls(attend, inputs, config.get("phases", ("forward", "forward_backward"))):
                medians[name, f"{phase}_time"].append(statistics.median(times_of(call, config, device, inputs)))
    if config.get("replayed"):
        graphs = {name: _captured(name, shape, device, inputs) for name in able}
        for name in interleave(able, config["rounds"]):
            times = times_of(graphs[name].replay, config, device, inputs)
            medians[name, "replayed_time"].append(statistics.median(times))
    return metrics + [Metric(metric, "s", samples, variant=name) for (name, metric), samples in medians.items()]


def failure_of(name: str, error: Exception) -> Metric:
    """Return the status of an implementation that failed."""
    reason = " ".join(str(error).split())[:300]
    return Metric("status", "", [f"{type(error).__name__}: {reason}"], variant=name)


def interleave(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Yield all names in each round, in an order in which each name follows every other one equally often.

    That takes as many rounds as there are names, or twice as many for an odd number of names. With a plain rotation a
    name would follow the same other name in all rounds but one, which at a GPU's power limit biases by several percent.
    """
    count = len(names)
    zigzag = [(step + 1) // 2 * (1 if step % 2 else -1) for step in range(count)]  # 0, 1, -1, 2, -2, ...
    for number in range(rounds):
        order = [names[(step + number) % count] for step in zigzag]
        if count % 2 and number // count % 2:
            order.reverse()
        yield from order


def _captured(name: str, shape: AttentionShape, device: torch.device, inputs: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
    """Capture forward and backward as one CUDA graph, whose time does not include the host's launches."""
    q, k, v, grad = inputs
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    with implementation(name, shape, device, dynamic=False) as attend:
        # Once more on the stream of the capture: libraries allocate a workspace per stream.
        side.wait_stream(torch.cuda.current_stream(device))
        for stage in (torch.cuda.stream(side), torch.cuda.graph(graph, stream=side)):
            with stage:
                torch.autograd.grad(attend(q, k, v), (q, k, v), grad)
    return graph


def measure_leaderboard(config: dict[str, Any]) -> list[Metric]:
    """Time the course's own lines: one leaf, views, torch.compile, sum and backward, gradients accumulating."""
    shape, device = prepare(config)
    disable_compile_caches()  # otherwise one SDPA backend would run code compiled for another
    torch.manual_seed(config["seed"])
    leaf = torch.randn(
        3, shape.heads, shape.seq_len, shape.head_dim, device=device, dtype=torch_dtype(shape), requires_grad=True
    )
    q, k, v = leaf
    with _leaderboard_entry(config["implementation"], shape, device) as flash:

        def flash_forward_backward() -> None:
            o = flash(q, k, v, True)
            loss = o.sum()
            loss.backward()

        out = flash(q, k, v, True)
        out.sum().backward()
        assert leaf.grad is not None
        results = dict(zip(("out", "dq", "dk", "dv"), (out, *leaf.grad.clone()), strict=True))
        exact = attention_in_float64(q, k, v, torch.ones_like(q), is_causal=True)
        errors = _errors(results, exact, shape.precision)
        del out, results, exact
        times = time_calls(
            flash_forward_backward, device=device, warmup_ms=config["warmup_ms"], rep_ms=config["rep_ms"]
        )
    return [
        Metric("leaderboard_time", "s", means_of_parts(times)),
        *errors,
        Metric("flops", "FLOP", [shape.flops]),
    ]


@contextmanager
def _leaderboard_entry(name: str, shape: AttentionShape, device: torch.device) -> Iterator[Callable[..., Tensor]]:
    """Yield the compiled `flash(q, k, v, is_causal)` on (heads, seq, d)."""
    if name == "flash_triton":
        from cs336_systems.kernels import FlashAttentionTriton

        yield torch.compile(FlashAttentionTriton.apply)
        return
    with implementation(name, shape, device, dynamic=False) as attend:

        def entry(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
            return attend(q[None], k[None], v[None])[0]

        yield torch.compile(entry)


def means_of_parts(times: list[float], parts: int = LEADERBOARD_PARTS) -> list[float]:
    """Return the means of equal parts of the samples. The first few are left out where the samples do not divide
    evenly."""
    if len(times) <= parts:
        return times
    size = len(times) // parts
    times = times[len(times) % parts :]
    return [statistics.fmean(times[start : start + size]) for start in range(0, len(times), size)]


def measure_attention_step(config: dict[str, Any]) -> list[Metric]:
    """Time steps of one model on one batch, so that the implementations differ in nothing else."""
    step = TrainStep.build(RunConfig.of(config))
    batch = step.random_batch()

    def step_times(name: str) -> list[float]:
        with attention_set_to(step.model, name):
            return time_steps(
                lambda watch: step(*batch, watch=watch), device=step.device, warmup_steps=1, num_steps=STEPS_PER_ROUND
            ).wall[STEP]

    failed: list[Metric] = []
    able: list[str] = []
    for name in config["implementations"]:
        try:
            step_times(name)  # compilation happens here
        except Exception as error:  # a failure is a result, and does not end the others
            failed.append(failure_of(name, error))
        else:
            able.append(name)
    times: defaultdict[str, list[float]] = defaultdict(list)
    for name in interleave(able, config["rounds"]):
        times[name] += step_times(name)
    return failed + [Metric("step_time", "s", samples, variant=name) for name, samples in times.items()]


@contextmanager
def attention_set_to(model: nn.Module, name: str) -> Iterator[None]:
    """Set the model's attention implementation; an SDPA backend is forced inside the context."""
    backend = SDPA_BACKENDS.get(name)
    for module in model.modules():
        if isinstance(module, Attention):
            module.impl = name if backend is None else "sdpa"
    with nullcontext() if backend is None else sdpa_kernel(backend):
        yield
