"""Instrument: a training step, and the rate that the device's matrix units reach at their best."""

import functools
from typing import Any

import torch

from cs336_systems.config import RunConfig
from cs336_systems.experiments.steps.measure_step import measure_step
from cs336_systems.measure.timing import time_calls
from cs336_systems.record import Metric, summarize
from cs336_systems.step.train_step import AUTOCAST_DTYPES

LARGE = {"cuda": 8192, "cpu": 1024}
"""Rows and columns of square matrices that are large enough for the highest rate."""


def measure_fast_step(config: dict[str, Any], peak_tflops: float | None = None) -> list[Metric]:
    run = RunConfig.of(config)
    ceiling = matmul_ceiling(run.device, AUTOCAST_DTYPES.get(run.precision, torch.float32))
    return [*measure_step(config, peak_tflops), Metric("matmul_ceiling", "FLOP/s", [ceiling])]


@functools.cache
def matmul_ceiling(device: str, dtype: torch.dtype) -> float:
    """Measured FLOP/s of a large square matmul: an upper bound for a step."""
    where = torch.device(device)
    size = LARGE[where.type]
    a, b = (torch.randn(size, size, device=where, dtype=dtype) for _ in range(2))
    torch.mm(a, b)
    times = time_calls(lambda: torch.mm(a, b), device=where, warmup_ms=100, rep_ms=300)
    return 2 * size**3 / summarize(times).mean
