"""Instrument: the kernels of a step by phase, kind and name."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cs336_systems.config import RunConfig, UserError
from cs336_systems.measure.block_planner import build_step
from cs336_systems.measure.kernel_trace import profile_steps
from cs336_systems.measure.readers.nsys import find_nsys, profile_with_nsys
from cs336_systems.measure.readers.trace import PHASES, trace_metrics
from cs336_systems.measure.timing import STEP, time_as_configured, time_queued
from cs336_systems.record import Metric

TORCH, NSYS, BOTH = "torch", "nsys", "both"
NSYS_TIMEOUT = 600.0
TRACED_STEPS = 2


def measure_kernels(config: dict[str, Any], *, folder: str | None = None) -> list[Metric]:
    """Time steps without a profiler, then record the kernels with it, per step. The trace goes to `folder`.

    `profiler` in the configuration is torch, nsys, or both (where nsys is installed), which compares the two with each
    other and with CUDA events of steps that run as in training.
    """
    profiler = config.get("profiler", TORCH)
    run = RunConfig.of(config)
    nsys = find_nsys() if profiler != TORCH else None
    if profiler == NSYS and nsys is None:
        raise UserError("nsys is not installed, or not on PATH; leave out --nsys to use torch.profiler")
    step = build_step(run)
    batch = step.random_batch()
    timings = time_as_configured(step, batch)
    metrics = timings.metrics
    if profiler == BOTH:
        queued = time_queued(lambda watch: step(*batch, watch=watch), device=step.device, num_steps=run.num_steps)
        metrics += [Metric(f"queued_{phase}_event_time", "s", samples) for phase, samples in queued.items()]
    if profiler != NSYS:
        keep = Path(folder) / "trace.json.gz" if folder else None
        profile = profile_steps(step, batch, num_steps=TRACED_STEPS, keep=keep)
        metrics += [Metric("profiled_step_time", "s", profile.wall[STEP]), *trace_metrics(profile.trace)]
    if nsys is not None:
        del step, batch  # the program that nsys runs needs the memory
        with TemporaryDirectory() as other:
            place = Path(folder or other)
            trace = profile_with_nsys(run, num_steps=TRACED_STEPS, folder=place, nsys=nsys, timeout=NSYS_TIMEOUT)
        if profiler == NSYS:
            metrics += trace_metrics(trace)
        metrics += [Metric(f"nsys_busy_time: {p}", "s", [trace.busy(p) / trace.steps]) for p in PHASES if trace.of(p)]
    return metrics
