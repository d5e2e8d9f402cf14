"""Instrument: time and memory of one training step, as configured."""

import statistics
from typing import Any

import torch
import torch._functorch.config
from torch._dynamo.utils import counters

from cs336_systems.config import RunConfig
from cs336_systems.measure import memory_trace
from cs336_systems.measure.flop_counter import count_flops
from cs336_systems.measure.timing import STEP, time_as_configured
from cs336_systems.predict.flops import model_flops
from cs336_systems.predict.gpus import peak_flops
from cs336_systems.predict.memory_model import estimate
from cs336_systems.record import Metric
from cs336_systems.step.train_step import TrainStep, require_attention


def measure_step(config: dict[str, Any], peak_tflops: float | None = None) -> list[Metric]:
    """Time the configured step; measure and predict its peak memory."""
    run = RunConfig.from_dict(config)
    require_attention(run)
    if run.compile:
        disable_compile_caches()
    step = TrainStep.build(run)
    batch = step.random_batch()
    timings = time_as_configured(step, batch)
    parameters = sum(parameter.numel() for parameter in step.model.parameters())
    metrics = [*timings.metrics, Metric("parameters", "1", [parameters])]
    if run.compile:
        metrics += _compile_metrics(timings.warmup or timings.wall[STEP], timings.wall[STEP])
    metrics += _work_metrics(run, step, batch, peak_tflops)
    metrics += _memory_metrics(run, step, batch, timings.peak_memory)
    return metrics


def disable_compile_caches() -> None:
    """Compile from scratch. A cached compile time would be that of an earlier run, and so might the code be: the cache
    key does not include the SDPA backend."""
    torch._dynamo.reset()
    torch._inductor.config.force_disable_caches = True
    torch._functorch.config.enable_autograd_cache = False


def _compile_metrics(first_steps: list[float], steps: list[float]) -> list[Metric]:
    """Compilation happens in the first step: its time beyond that of a steady step."""
    return [
        Metric("compile_time", "s", [max(0.0, first_steps[0] - statistics.median(steps))]),
        Metric("graph_breaks", "1", [sum(counters["graph_break"].values())]),
    ]


def _work_metrics(run: RunConfig, step: TrainStep, batch: Any, peak_tflops: float | None) -> list[Metric]:
    """FLOPs of the step, counted for a user's model, and the peak of the device where it is known."""
    flops = model_flops(run) if run.model_factory is None else count_flops(lambda: step(*batch))
    gpu = torch.cuda.get_device_name(step.device) if step.device.type == "cuda" else None
    peak = peak_tflops * 1e12 if peak_tflops else peak_flops(gpu, run.precision)
    return [Metric("flops", "FLOP", [flops]), *([Metric("peak_flops", "FLOP/s", [peak])] if peak else [])]


def _memory_metrics(run: RunConfig, step: TrainStep, batch: Any, measured: int | None) -> list[Metric]:
    """Peak memory, measured by the allocator on a GPU and by tracking tensors on a CPU, and predicted."""
    if run.compile:  # inductor decides what a compiled model keeps, and its tensors are not dispatched one by one
        return [Metric("peak_memory", "B", [measured])] if measured is not None else []
    if measured is None:
        measured = memory_trace.measure_peak(step, batch)
    by_closed_form = run.model_factory is None and run.fast == "off"
    predicted = estimate(run).peak if by_closed_form else memory_trace.predict_by_tracing(run).peak
    return [Metric("peak_memory", "B", [measured]), Metric("predicted_memory", "B", [predicted])]
