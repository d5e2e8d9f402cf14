"""Instruments of the topic: a training step as configured, the rate of a large matmul beside it, `do_bench` on the same
callables; accumulation in different precisions, and dtypes under autocast."""

import dataclasses
import functools
import gc
import os
import statistics
import tempfile
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from cs336_systems.config import ModelConfig, RunConfig
from cs336_systems.measure import memory_trace
from cs336_systems.measure.block_planner import build_step, predict_step
from cs336_systems.measure.flop_counter import count_flops
from cs336_systems.measure.timing import STEP, time_as_configured, time_calls, time_steps
from cs336_systems.model import TransformerLM
from cs336_systems.predict.fast_memory import fast_estimate
from cs336_systems.predict.flops import causal_model_flops, model_flops
from cs336_systems.predict.gpus import peak_flops
from cs336_systems.predict.memory_model import estimate
from cs336_systems.predict.time.on_gpu import predicted_of
from cs336_systems.record import Metric, summarize
from cs336_systems.step.train_step import AUTOCAST_DTYPES, TrainStep, require_attention

LARGE = {"cuda": 8192, "cpu": 1024}
"""Rows and columns of square matrices that are large enough for the highest rate."""
LEADERBOARD_RATE = 1e-4
"""Learning rate of the leaderboard's step. At AdamW's default of 1e-3 a dozen steps on one batch make the attention
scores of this model grow without bound."""
CALLS = 10
"""Calls that `do_bench` times."""
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def measure_step(config: dict[str, Any], peak_tflops: float | None = None) -> list[Metric]:
    """Time the configured step; measure and predict its peak memory."""
    run = RunConfig.from_dict(config)
    timed = time_built_step(config, peak_tflops)
    return [*timed.metrics, *_memory_metrics(run, timed.step, timed.batch, timed.peak_memory)]


class TimedStep(NamedTuple):
    """A step that was built and timed, ready for more."""

    step: TrainStep
    batch: tuple[Tensor, Tensor]
    metrics: list[Metric]
    """All but those of memory."""
    peak_memory: int | None
    """Bytes, measured by the allocator of a GPU."""


def time_built_step(config: dict[str, Any], peak_tflops: float | None = None) -> TimedStep:
    """Build and time the configured step; predict its time."""
    run = RunConfig.of(config)
    require_attention(run)
    if run.compile:
        disable_compile_caches()
    step = build_step(run)
    batch = step.random_batch()
    timings = time_as_configured(step, batch)
    parameters = sum(parameter.numel() for parameter in step.model.parameters())
    metrics = [*timings.metrics, Metric("parameters", "1", [parameters])]
    if run.compile:
        metrics += _compile_metrics(timings.warmup or timings.wall[STEP], timings.wall[STEP])
    metrics += _predicted_time(config, step)
    metrics += _work_metrics(run, step, batch, peak_tflops)
    return TimedStep(step, batch, metrics, timings.peak_memory)


def disable_compile_caches() -> None:
    """Compile from scratch. A cached compile time would be that of an earlier run, and so might the code be: the cache
    key does not include the SDPA backend."""
    torch._dynamo.reset()
    torch._inductor.config.force_disable_caches = True
    torch._functorch.config.enable_autograd_cache = False


def _compile_metrics(first_steps: list[float], steps: list[float]) -> list[Metric]:
    """Return the compile time: the first step's time beyond that of a steady step."""
    return [
        Metric("compile_time", "s", [max(0.0, first_steps[0] - statistics.median(steps))]),
        Metric("graph_breaks", "1", [sum(counters["graph_break"].values())]),
    ]


def _work_metrics(run: RunConfig, step: TrainStep, batch: Any, peak_tflops: float | None) -> list[Metric]:
    """Return the FLOPs of the step, counted for a user's model, and the peak of the device if it is known."""
    flops = model_flops(run) if run.model_factory is None else count_flops(lambda: step(*batch))
    peak = peak_tflops * 1e12 if peak_tflops else peak_flops(_gpu_name(step), run.precision)
    return [Metric("flops", "FLOP", [flops]), *([Metric("peak_flops", "FLOP/s", [peak])] if peak else [])]


def _predicted_time(config: dict[str, Any], step: TrainStep) -> list[Metric]:
    """Return the predicted time of the step, if its kernels and the GPU's rates are known."""
    found = predicted_of(config, _gpu_name(step))
    return [Metric("predicted_time", "s", [found.time.seconds])] if found else []


def _gpu_name(step: TrainStep) -> str | None:
    return torch.cuda.get_device_name(step.device) if step.device.type == "cuda" else None


def _memory_metrics(run: RunConfig, step: TrainStep, batch: Any, measured: int | None) -> list[Metric]:
    """Return the peak memory: measured, by the allocator on a GPU and by tracking tensors on a CPU, and predicted."""
    if run.compile:  # inductor decides what a compiled model keeps, and its tensors are not dispatched one by one
        return [Metric("peak_memory", "B", [measured])] if measured is not None else []
    if measured is None:
        measured = memory_trace.measure_peak(step, batch)
    return [Metric("peak_memory", "B", [measured]), Metric("predicted_memory", "B", [_predicted_peak(run, step)])]


def _predicted_peak(run: RunConfig, step: TrainStep) -> int:
    if run.memory_budget and not run.plans_whole_blocks:  # the step's own plan: the host has less free memory by now
        assert isinstance(step.model, TransformerLM)
        return fast_estimate(dataclasses.replace(run, memory_budget=""), step.model.plan).peak
    by_closed_form = run.model_factory is None and run.fast == "off" and not run.memory_budget
    return estimate(run).peak if by_closed_form else predict_step(step).peak


# -- the 2026 leaderboard ---------------------------------------------------------------------------------------------


def measure_leaderboard_step(config: dict[str, Any], peak_tflops: float | None = None) -> list[Metric]:
    """Time whole steps over micro batches by do_bench, from empty compile caches; on a CPU by the timing loop."""
    run, count = RunConfig.of(config), config["micro_batches"]
    require_attention(run)
    begin = timeit.default_timer()
    with empty_compile_caches():
        step = TrainStep.build(run)
        assert step.optimizer is not None
        for group in step.optimizer.param_groups:
            group["lr"] = LEADERBOARD_RATE
        batches = _micro_batches(step, count)
        losses = [step.launch(batches).item()]
        cold_start = timeit.default_timer() - begin
        if step.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(step.device)
        times = time_calls(
            lambda: step.launch(batches), device=step.device, warmup_ms=config["warmup_ms"], rep_ms=config["rep_ms"]
        )
        measured = torch.cuda.max_memory_allocated(step.device) if step.device.type == "cuda" else None
        losses.append(step.launch(batches).item())
    whole = dataclasses.replace(run, batch_size=count * run.batch_size)
    return [
        Metric("step_time", "s", times),
        *_predicted_time(config, step),
        Metric("cold_start_time", "s", [cold_start]),
        *(Metric(name, "1", [loss]) for name, loss in zip(("first_loss", "last_loss"), losses, strict=True)),
        *_work_metrics(whole, step, batches[0], peak_tflops),
        Metric("causal_flops", "FLOP", [causal_model_flops(whole)]),
        *_memory_metrics(run, step, batches[0], measured),
    ]


# -- steps of many micro batches --------------------------------------------------------------------------------------


def measure_accumulated_step(config: dict[str, Any], peak_tflops: float | None = None) -> list[Metric]:
    """Time whole steps over micro batches. The steps that warm up have one micro batch each."""
    run, count = RunConfig.of(config), config["micro_batches"]
    require_attention(run)
    step = TrainStep.build(run)
    batches = _micro_batches(step, count)
    for _ in range(run.warmup_steps):
        step.launch(batches[:1])
    if step.graph is not None:
        step.graph.prepare(batches)
    timings = time_steps(lambda _: step.launch(batches), device=step.device, warmup_steps=0, num_steps=run.num_steps)
    measured = timings.peak_memory
    if measured is not None and step.graph is not None:  # a replay allocates nothing
        measured = max(measured, step.graph.peak_memory)
    whole = dataclasses.replace(run, batch_size=count * run.batch_size)
    return [
        Metric("step_time", "s", timings.wall[STEP]),
        *_predicted_time(config, step),
        Metric("tokens", "1", [whole.tokens]),
        Metric("parameters", "1", [run.model.parameters]),
        *_work_metrics(whole, step, batches[0], peak_tflops),
        Metric("causal_flops", "FLOP", [causal_model_flops(whole)]),
        *_memory_metrics(run, step, batches[0], measured),
    ]


@contextmanager
def empty_compile_caches() -> Iterator[None]:
    """Let Triton and inductor compile into an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        names = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
        with mock.patch.dict(os.environ, {name: f"{folder}/{name.lower()}" for name in names}):
            yield


def _micro_batches(step: TrainStep, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return random tokens and targets, the same for every number of micro batches."""
    run = step.config
    generator = torch.Generator().manual_seed(run.seed)
    shape = (count * run.batch_size, 2, run.model.context_length)
    tokens = torch.randint(run.model.vocab_size, shape, generator=generator).to(step.device)
    return [(part[:, 0].contiguous(), part[:, 1].contiguous()) for part in tokens.chunk(count)]


# -- beside a step: the best matmul, another timer --------------------------------------------------------------------


def measure_fast_step(config: dict[str, Any], peak_tflops: float | None = None) -> list[Metric]:
    run = RunConfig.of(config)
    ceiling = matmul_ceiling(run.device, AUTOCAST_DTYPES.get(run.precision, torch.float32))
    return [*measure_step(config, peak_tflops), Metric("matmul_ceiling", "FLOP/s", [ceiling])]


@functools.cache
def matmul_ceiling(device: str, dtype: torch.dtype) -> float:
    """Return the measured FLOP/s of a large square matmul: an upper bound for a step."""
    where = torch.device(device)
    size = LARGE[where.type]
    a, b = (torch.randn(size, size, device=where, dtype=dtype) for _ in range(2))
    torch.mm(a, b)
    times = time_calls(lambda: torch.mm(a, b), device=where, warmup_ms=100, rep_ms=300)
    return 2 * size**3 / summarize(times).mean


def measure_agreement(config: dict[str, Any]) -> list[Metric]:
    run = RunConfig.from_dict(config)
    step = TrainStep.build(run)
    inputs, targets = step.random_batch()
    timings = time_as_configured(step, (inputs, targets))
    metrics = timings.metrics
    expected = {phase: sum(samples) / len(samples) for phase, samples in timings.wall.items()}
    for phase, call, gradients in _callables(step, inputs, targets):
        # do_bench takes the number of repetitions as a time
        expected_ms = expected[phase] * 1e3
        samples = time_calls(
            call, device=step.device, warmup_ms=3 * expected_ms, rep_ms=CALLS * expected_ms, gradients=gradients
        )
        metrics.append(Metric(f"do_bench_{phase}_time", "s", samples))
        gc.collect()
    return metrics


def _callables(step: TrainStep, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
    """Yield (phase, callable, tensors whose gradients are dropped before each call). A generator, so that a retained
    graph is not alive beside the next callable."""
    yield "forward", lambda: step.logits(inputs), ()
    yield "backward", _repeated_backward(step, inputs, targets), list(step.model.parameters())
    step.model.zero_grad(set_to_none=True)
    yield "step", lambda: step(inputs, targets), ()


def _repeated_backward(step: TrainStep, inputs: torch.Tensor, targets: torch.Tensor) -> Callable[[], None]:
    loss = step.loss(step.logits(inputs), targets)
    return lambda: loss.backward(retain_graph=True)


# -- number formats ---------------------------------------------------------------------------------------------------


def measure_accumulation(config: dict[str, Any]) -> list[Metric]:
    """Add `count` terms of `value` to an accumulator, one at a time."""
    total = torch.tensor(0, dtype=DTYPES[config["accumulator"]])
    term = torch.tensor(config["value"], dtype=DTYPES[config["term"].split()[0]])
    if config["term"].endswith("cast to fp32"):
        term = term.to(torch.float32)  # keeps the rounding to fp16
    for _ in range(config["count"]):
        total += term
    return [Metric("sum", "1", [total.item()]), Metric("term", "1", [term.item()])]


class ToyModel(nn.Module):
    """The handout's toy model: fc1 -> relu -> LayerNorm -> fc2."""

    def __init__(self, d_in: int = 20, d_out: int = 5):
        super().__init__()
        self.fc1 = nn.Linear(d_in, 10, bias=False)
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, d_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.ln(F.relu(self.fc1(x))))


def measure_dtypes(config: dict[str, Any]) -> list[Metric]:
    """Record the dtypes of parameters, outputs, logits, loss and gradients of one step by hooks."""
    device = torch.device(config["device"])
    model, inputs, targets = _toy(device) if config["model"] == "toy" else _transformer(device)
    seen: dict[str, str] = {"parameters": _name(next(model.parameters()))}
    for name, module in model.named_modules():
        if not list(module.children()) and (name.startswith("layers.0.") or "layers" not in name):
            module.register_forward_hook(_remember(seen, f"{name} output"))
    with torch.autocast(device.type, DTYPES[config["autocast"]]):
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
    loss.backward()
    gradient = next(p.grad for p in model.parameters() if p.grad is not None)
    seen |= {"logits": _name(logits), "loss": _name(loss), "gradients": _name(gradient)}
    return [Metric("dtype", "", [dtype], variant=tensor) for tensor, dtype in seen.items()]


def _toy(device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    return ToyModel().to(device), torch.randn(8, 20, device=device), torch.randint(5, (8,), device=device)


def _transformer(device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    shape = ModelConfig(vocab_size=64, context_length=16, d_model=32, num_layers=1, num_heads=2, d_ff=64)
    tokens = torch.randint(64, (2, 16), device=device)
    return TransformerLM(shape, attention="reference").to(device), tokens, tokens


def _remember(seen: dict[str, str], what: str) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        seen.setdefault(what, _name(output))

    return hook


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
