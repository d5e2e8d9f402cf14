"""Records the kernels of a step with torch.profiler, and keeps the trace for a viewer (Perfetto opens it)."""

import gzip
import json
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from cs336_systems.kernels.ranges import ranges_enabled
from cs336_systems.measure.readers.trace import Trace, read_chrome
from cs336_systems.measure.timing import STEP, Stopwatch
from cs336_systems.step.train_step import TrainStep

LARGEST_TRACE = 20 * 10**6
"""Bytes that a kept trace may have, compressed: more than that no viewer opens in a moment."""


@dataclass(frozen=True)
class Profile:
    trace: Trace
    wall: dict[str, list[float]]
    """Seconds by phase, of the steps that were traced: slower than others."""


def profile_steps(
    step: TrainStep, batch: tuple[Tensor, Tensor], *, num_steps: int, keep: Path | None = None
) -> Profile:
    """Trace `num_steps` steps of one that has been warmed up; the trace goes to `keep` (a .json.gz), if named."""
    activities = [ProfilerActivity.CPU]
    if step.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities):  # its first start loads CUPTI, which takes a second
            torch.cuda.synchronize()
    stopwatch = Stopwatch(step.device)
    # Ranges break a compiled model's graph: it would be another model that is traced.
    parts = nullcontext() if step.config.compile else ranges_enabled()
    with profile(activities=activities) as profiler, parts:
        for _ in range(num_steps):
            with stopwatch.watch(STEP):
                step(*batch, watch=stopwatch.watch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = read_chrome(path)
        if keep is not None:
            keep.parent.mkdir(parents=True, exist_ok=True)
            keep.write_bytes(_compressed(path))
    return Profile(trace, dict(stopwatch.wall))


def _compressed(path: Path) -> bytes:
    """The trace; where it is too large without the host's operators, which are most of it."""
    whole = gzip.compress(path.read_bytes(), compresslevel=6)
    if len(whole) <= LARGEST_TRACE:
        return whole
    document = json.loads(path.read_bytes())
    document["traceEvents"] = [
        event for event in document["traceEvents"] if event.get("cat") not in ("cpu_op", "fwdbwd", "ac2g")
    ]
    return gzip.compress(json.dumps(document, separators=(",", ":")).encode())
