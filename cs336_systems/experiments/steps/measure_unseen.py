"""Instrument of `unseen_steps`: a step, its prediction, and which kind of kernels makes the difference."""

from typing import Any

import torch

from cs336_systems.config import RunConfig
from cs336_systems.experiments.steps.measure_step import TimedStep, time_built_step
from cs336_systems.measure.kernel_trace import profile_steps
from cs336_systems.measure.readers.kernel_classes import compared_kinds
from cs336_systems.measure.readers.recorded_tables import flatten
from cs336_systems.measure.readers.trace import Trace, trace_metrics
from cs336_systems.measure.timing import STEP
from cs336_systems.predict.memory_model import estimate
from cs336_systems.predict.time.on_gpu import predicted_of
from cs336_systems.record import Metric


def measure_unseen_step(config: dict[str, Any], peak_tflops: float | None = None) -> list[Metric]:
    """Time the configured step; on a GPU record the kernels of one more step with torch.profiler."""
    timed = time_built_step(config, peak_tflops)
    metrics = [*timed.metrics, *_memory_metrics(RunConfig.of(config), timed.peak_memory)]
    if timed.step.device.type == "cuda":
        profile = profile_steps(timed.step, timed.batch, num_steps=1)
        metrics.append(Metric("profiled_step_time", "s", profile.wall[STEP]))
        metrics += kernel_metrics(config, profile.trace, _gpu_name(timed))
    return metrics


def kernel_metrics(config: dict[str, Any], trace: Trace, gpu: str | None) -> list[Metric]:
    """Return the kernels of a traced step by kind, with the predicted ones if there are any. Return nothing if the
    profiler recorded no kernels of a GPU."""
    if not trace.on_gpu:
        return []
    metrics = trace_metrics(trace.in_a_phase())
    if found := predicted_of(config, gpu):
        measured = {kind: total.seconds for kind, total in trace.by_kind().items()}
        metrics.append(Metric("compared_kinds", "", flatten(compared_kinds(measured, found.time.by_kind()))))
        metrics.append(Metric("launch_bound", "1", [int(found.time.is_launch_bound)]))
    return metrics


def _memory_metrics(run: RunConfig, measured: int | None) -> list[Metric]:
    """Return the peak on a GPU, and the closed form's prediction unless the model is compiled. A trace of a deep model
    would take longer than its steps."""
    if measured is None:
        return []
    predicted = [] if run.compile else [Metric("predicted_memory", "B", [estimate(run).peak])]
    return [Metric("peak_memory", "B", [measured]), *predicted]


def _gpu_name(timed: TimedStep) -> str:
    return torch.cuda.get_device_name(timed.step.device)
