"""Instrument of `optimized_steps`: a step of many micro batches, measured and predicted."""

from typing import Any

import torch

from cs336_systems.config import RunConfig
from cs336_systems.experiments.steps.measure_step import measure_accumulated_step
from cs336_systems.predict.gpus import find_by_driver_name
from cs336_systems.predict.optimize import predicted_seconds
from cs336_systems.record import Metric
from cs336_systems.step.memory_budget import HOST_SHARE, free_host_memory


def measure_optimized_step(config: dict[str, Any], peak_tflops: float | None = None) -> list[Metric]:
    """Time whole steps; predict their time where the GPU is known."""
    run = RunConfig.of(config)
    host_memory = HOST_SHARE * free_host_memory()
    measured = [found for found in measure_accumulated_step(config, peak_tflops) if found.name != "predicted_time"]
    gpu = find_by_driver_name(torch.cuda.get_device_name(run.device)) if run.device_type == "cuda" else None
    seconds = predicted_seconds(run, config["micro_batches"], gpu, host_memory) if gpu is not None else None
    return measured if seconds is None else [*measured, Metric("predicted_time", "s", [seconds])]
