"""Attention alone: implementations side by side on given shapes, each held against float64 before it is timed.

Four instruments, for the experiments of the same names: `measure_pytorch_attention` (passes of the naive formula, eager
and compiled), `measure_flash` (one implementation), `measure_rivals` (several, in turns) and `measure_leaderboard` (as
the course timed it). All take their inputs, their implementations and their clock from here.
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
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cs336_systems.benchmark.benchmark import start_compiling_from_nothing
from cs336_systems.config import ATTENTIONS
from cs336_systems.kernels import attention
from cs336_systems.kernels.flash.reference import attention_reference
from cs336_systems.measure.timing import time_calls, time_steps
from cs336_systems.predict.attention_model import AttentionShape, naive_peak
from cs336_systems.step.train_step import AUTOCAST_DTYPES, Watch, require_device, set_matmul_precision

Metrics = list[list[Any]]
"""[metric, unit, samples] rows for records."""
Results = dict[str, Tensor]
"""out, dq, dk, dv."""

ERROR_BOUNDS = {"bf16": 2e-2, "fp16": 4e-3, "tf32": 2e-3, "fp32": 1e-5}
"""The largest ||x - truth|| / ||truth|| that still counts as right. Weights and score gradients are rounded once or
twice to the input's precision, so the error is a few unit roundoffs u whatever the length: 10 u of bf16 (2^-9), 16 u of
fp16 (2^-12), 4 u of tf32 (2^-11). fp32's own is 6e-8, but its sums run over up to 65536 terms; TF32 in its place would
be 5e-4 off."""

ORACLE_SCORES = 2**25
"""Scores that the oracle holds at a time: 256 MiB in float64, and it needs about five such matrices."""

LEADERBOARD_PARTS = 10


# -- implementations --------------------------------------------------------------------------------------------------

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q, k, v) of (batch, heads, seq, d) -> output of that shape."""
Builder = Callable[[AttentionShape, torch.device, bool], AbstractContextManager[Attend]]
"""(shape, device, whether what is compiled is compiled for all shapes) -> a context with the callable in it."""


def _ours(name: str, shape: AttentionShape, device: torch.device, dynamic: bool) -> AbstractContextManager[Attend]:
    return nullcontext(partial(attention, is_causal=shape.is_causal, impl=name))


def _compiled(shape: AttentionShape, device: torch.device, dynamic: bool) -> AbstractContextManager[Attend]:
    return nullcontext(partial(_compile(attention_reference, dynamic=dynamic), is_causal=shape.is_causal))


@contextmanager
def _sdpa(backend: SDPBackend, shape: AttentionShape, device: torch.device, dynamic: bool) -> Iterator[Attend]:
    # Around all calls and not in each: choosing a backend takes longer than a small kernel.
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
"""`sdpa` is PyTorch's own choice of a backend; the others of that name are held to one."""


def implementation(
    name: str, shape: AttentionShape, device: torch.device, *, dynamic: bool = True
) -> AbstractContextManager[Attend]:
    """`with implementation(...) as attend:`; whatever is slow to set up is set up on entering."""
    return IMPLEMENTATIONS[name](shape, device, dynamic)


@cache
def _compile(function: Callable[..., Tensor], *, dynamic: bool) -> Callable[..., Tensor]:
    """Compiled once in this process, with dynamic shapes: one by one, the 80 shapes of a grid would take an hour."""
    # Dtypes, head dimensions and 64-bit indices still need versions of their own. Beyond the limit dynamo would quietly
    # run the function eagerly; with fullgraph it raises.
    torch._dynamo.config.recompile_limit = 64
    # A backward that may overwrite what forward saved cannot be timed again and again on one graph.
    torch._functorch.config.donated_buffer = False
    return torch.compile(function, dynamic=dynamic, fullgraph=True)


@lru_cache(maxsize=1)
def _causal_block_mask(seq_len: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(_sees, None, None, seq_len, seq_len, device=device)


def _sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


# -- inputs and truth -------------------------------------------------------------------------------------------------


def _prepare(config: Mapping[str, Any]) -> tuple[AttentionShape, torch.device]:
    require_device(config["device"])
    device = torch.device(config["device"])
    if device.index is not None:  # Triton launches on the current device, wherever its tensors are
        torch.cuda.set_device(device)
    shape = AttentionShape.of(config)
    set_matmul_precision(shape.precision)
    return shape, device


def _dtype(shape: AttentionShape) -> torch.dtype:
    return AUTOCAST_DTYPES.get(shape.precision, torch.float32)


def draw(shape: AttentionShape, device: torch.device, seed: int) -> list[Tensor]:
    """q, k, v, which want gradients, and the gradient of the output; the same for the same arguments."""
    generator = torch.Generator(device).manual_seed(seed)
    tensors = [torch.randn(shape.size, generator=generator, device=device, dtype=_dtype(shape)) for _ in range(4)]
    return [tensor.requires_grad_() for tensor in tensors[:3]] + tensors[3:]


@torch.no_grad()
def attention_in_float64(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *, is_causal: bool) -> Results:
    """Output and gradients by the formulas, in chunks of query rows: the whole score matrix never exists."""
    q, k, v, grad = (tensor.double() for tensor in (q, k, v, grad))
    scale = q.shape[-1] ** -0.5
    length = q.shape[-2]
    out, dq, dk, dv = (torch.zeros_like(q) for _ in range(4))
    chunk = max(1, ORACLE_SCORES // (q.shape[:-2].numel() * length))
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        rows, seen = slice(start, end), slice(0, end if is_causal else length)
        scores = scale * q[..., rows, :] @ k[..., seen, :].mT
        if is_causal:
            query, key = (torch.arange(part.start, part.stop, device=q.device) for part in (rows, seen))
            scores.masked_fill_(key > query[:, None], -torch.inf)
        weights = torch.softmax(scores, dim=-1)
        out[..., rows, :] = weights @ v[..., seen, :]
        delta = (grad[..., rows, :] * out[..., rows, :]).sum(-1, keepdim=True)
        grad_scores = scale * weights * (grad[..., rows, :] @ v[..., seen, :].mT - delta)
        dq[..., rows, :] = grad_scores @ k[..., seen, :]
        dk[..., seen, :] += grad_scores.mT @ q[..., rows, :]
        dv[..., seen, :] += weights.mT @ grad[..., rows, :]
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


@lru_cache(maxsize=1)  # of the last shape: a grid has the implementations of one shape next to each other
def _truth(shape: AttentionShape, device: torch.device, seed: int) -> Results:
    """Kept in the host's memory: on the GPU it would count towards the peak of what is measured."""
    truth = attention_in_float64(*draw(shape, device, seed), is_causal=shape.is_causal)
    return {name: tensor.cpu() for name, tensor in truth.items()}


def _errors(results: Results, truth: Results, precision: str) -> Metrics:
    """How far each result is from the truth; an ArithmeticError if one is too far to be right."""
    metrics = []
    for name, result in results.items():
        expected = truth[name].to(result.device)
        off = (result.detach().double() - expected).norm() / expected.norm()
        error, bound = off.item(), ERROR_BOUNDS[precision]
        if not error <= bound:  # NaN too
            raise ArithmeticError(f"wrong result: {name} off by {error:.1e}, more than {bound:g} in {precision}")
        metrics.append([f"error_{name}", "1", [error]])
    return metrics


def _check(attend: Attend, inputs: Sequence[Tensor], truth: Results, precision: str) -> Metrics:
    """Also the warm-up: what compiles or tunes itself does so here."""
    q, k, v, grad = inputs
    out = attend(q, k, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad)
    return _errors({"out": out, "dq": dq, "dk": dk, "dv": dv}, truth, precision)


# -- instruments ------------------------------------------------------------------------------------------------------


def measure_pytorch_attention(config: dict[str, Any]) -> Metrics:
    """Forward and backward passes, timed apart, and the memory in use between them."""
    shape, device = _prepare(config)
    q, k, v, grad = inputs = draw(shape, device, config["seed"])

    def forward_backward(watch: Watch) -> None:
        q.grad = k.grad = v.grad = None
        with watch("forward"):
            out = attend(q, k, v)
        with watch("backward"):
            out.backward(grad)

    with implementation(config["implementation"], shape, device) as attend:
        errors = _check(attend, inputs, _truth(shape, device, config["seed"]), shape.precision)
        timings = time_steps(
            forward_backward, device=device, warmup_steps=config["warmup_steps"], num_steps=config["num_steps"]
        )
        metrics = [*timings.metrics, *errors, ["flops", "FLOP", [shape.flops]]]
        if device.type == "cuda":
            q.grad = k.grad = v.grad = None
            graph = attend(q, k, v)
            metrics.append(["memory_before_backward", "B", [torch.cuda.memory_allocated(device)]])
            del graph
            metrics += _memory_metrics(config["implementation"], shape, timings.peak_memory)
    return metrics


def measure_flash(config: dict[str, Any]) -> Metrics:
    """Forward, backward and both, by do_bench, as someone who trains calls them: the graph is built."""
    shape, device = _prepare(config)
    q, k, v, grad = inputs = draw(shape, device, config["seed"])
    with implementation(config["implementation"], shape, device) as attend:
        metrics = _check(attend, inputs, _truth(shape, device, config["seed"]), shape.precision)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            attend(q, k, v).backward(grad)
            metrics += _memory_metrics(config["implementation"], shape, torch.cuda.max_memory_allocated(device))
        for phase, call in _calls(attend, inputs):
            metrics.append([f"{phase}_time", "s", _times(call, config, device, inputs)])
    return [*metrics, ["flops", "FLOP", [shape.flops]]]


def _calls(
    attend: Attend, inputs: Sequence[Tensor], phases: Sequence[str] = ("forward", "forward_backward", "backward")
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Made when they are needed, so that the graph backward runs on is not alive during the others."""
    q, k, v, grad = inputs
    for phase in phases:
        match phase:
            case "forward":
                yield phase, lambda: attend(q, k, v)
            case "forward_backward":
                yield phase, lambda: attend(q, k, v).backward(grad)
            case "backward":
                yield phase, partial(attend(q, k, v).backward, grad, retain_graph=True)


def _times(
    call: Callable[[], object], config: Mapping[str, Any], device: torch.device, inputs: Sequence[Tensor]
) -> list[float]:
    return time_calls(call, device=device, warmup_ms=config["warmup_ms"], rep_ms=config["rep_ms"], gradients=inputs[:3])


def _memory_metrics(name: str, shape: AttentionShape, peak: int | None) -> Metrics:
    predicted = [["predicted_memory", "B", [naive_peak(shape, on_cuda=True)]]] if name == "reference" else []
    return [["peak_memory", "B", [peak]], *predicted]


def measure_rivals(config: dict[str, Any]) -> Metrics:
    """All implementations in turns, one sample of each in a round.

    A GPU that has been busy lowers its clocks to stay within its power limit, so who ran before decides how fast one
    looks: see `in_turns`. Compiled for this very shape: a rival is shown at its best.

    `replayed` in the configuration: also as CUDA graphs, since small problems are bound by the host that launches them.
    """
    shape, device = _prepare(config)
    inputs = draw(shape, device, config["seed"])
    truth = _truth(shape, device, config["seed"])
    metrics: Metrics = [["flops", "FLOP", [shape.flops]]]
    able: list[str] = []
    for name in config["implementations"]:
        try:
            with implementation(name, shape, device, dynamic=False) as attend:
                errors = _check(attend, inputs, truth, shape.precision)
        except Exception as error:  # what one cannot do is a result, and does not end the others
            metrics.append(failure_of(name, error))
        else:
            metrics += [[f"{name}_{metric}", unit, samples] for metric, unit, samples in errors]
            able.append(name)
    medians: dict[str, list[float]] = defaultdict(list)
    for name in in_turns(able, config["rounds"]):
        with implementation(name, shape, device, dynamic=False) as attend:
            for phase, call in _calls(attend, inputs, ("forward", "forward_backward")):
                median = statistics.median(_times(call, config, device, inputs))
                medians[f"{name}_{phase}_time"].append(median)
    if config.get("replayed"):
        graphs = {name: _captured(name, shape, device, inputs) for name in able}
        for name in in_turns(able, config["rounds"]):
            median = statistics.median(_times(graphs[name].replay, config, device, inputs))
            medians[f"{name}_replayed_time"].append(median)
    return metrics + [[metric, "s", samples] for metric, samples in medians.items()]


def failure_of(name: str, error: Exception) -> list[Any]:
    """The row that says why an implementation has no others."""
    reason = " ".join(str(error).split())[:300]
    return [f"{name}_status", "", [f"{type(error).__name__}: {reason}"]]


def in_turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """All of them in each round, in such orders that each comes after each other equally often.

    That takes as many rounds as there are names, or twice as many where their number is odd. Were they only rotated,
    one would follow the same other in all rounds but one, and at a GPU's power limit that decides by several percent.
    """
    count = len(names)
    zigzag = [(place + 1) // 2 * (1 if place % 2 else -1) for place in range(count)]  # 0, 1, -1, 2, -2, ...
    for number in range(rounds):
        turns = [names[(step + number) % count] for step in zigzag]
        if count % 2 and number // count % 2:
            turns.reverse()
        yield from turns


def _captured(name: str, shape: AttentionShape, device: torch.device, inputs: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
    """Forward and backward as one CUDA graph: what they take where the host launches nothing."""
    q, k, v, grad = inputs
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    with implementation(name, shape, device, dynamic=False) as attend:
        # Once more on the stream of the capture: libraries set up a workspace for each.
        side.wait_stream(torch.cuda.current_stream(device))
        for stage in (torch.cuda.stream(side), torch.cuda.graph(graph, stream=side)):
            with stage:
                torch.autograd.grad(attend(q, k, v), (q, k, v), grad)
    return graph


def measure_leaderboard(config: dict[str, Any]) -> Metrics:
    """The course's own lines: leaf, views, torch.compile, sum and backward, gradients adding up; rivals by the same."""
    shape, device = _prepare(config)
    start_compiling_from_nothing()  # else one SDPA backend would run what was compiled for another
    torch.manual_seed(config["seed"])
    leaf = torch.randn(
        3, shape.heads, shape.seq_len, shape.head_dim, device=device, dtype=_dtype(shape), requires_grad=True
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
        truth = attention_in_float64(q, k, v, torch.ones_like(q), is_causal=True)
        errors = _errors(results, truth, shape.precision)
        del out, results, truth
        times = time_calls(
            flash_forward_backward, device=device, warmup_ms=config["warmup_ms"], rep_ms=config["rep_ms"]
        )
    return [["leaderboard_time", "s", means_of_parts(times)], *errors, ["flops", "FLOP", [shape.flops]]]


@contextmanager
def _leaderboard_entry(name: str, shape: AttentionShape, device: torch.device) -> Iterator[Callable[..., Tensor]]:
    """flash(q, k, v, is_causal) on (heads, seq, d), compiled."""
    if name == "flash_triton":
        from cs336_systems.kernels import FlashAttentionTriton

        yield torch.compile(FlashAttentionTriton.apply)
        return
    with implementation(name, shape, device, dynamic=False) as attend:

        def entry(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
            return attend(q[None], k[None], v[None])[0]

        yield torch.compile(entry)


def means_of_parts(times: list[float], parts: int = LEADERBOARD_PARTS) -> list[float]:
    """The means of equal parts, in place of thousands of samples, with the same mean as these. Where they do not divide
    evenly the first few, fewer than there are parts, are left out."""
    if len(times) <= parts:
        return times
    size = len(times) // parts
    times = times[len(times) % parts :]
    return [statistics.fmean(times[start : start + size]) for start in range(0, len(times), size)]
