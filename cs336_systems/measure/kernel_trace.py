"""Records the kernels of a step with torch.profiler, and keeps the trace for a viewer such as Perfetto."""

import gzip
import json
import tempfile
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from cs336_systems.config import RunConfig
from cs336_systems.files import write_file
from cs336_systems.kernels.ranges import ranges_enabled
from cs336_systems.measure.readers.trace import PROFILER_STEP, Trace, read_chrome
from cs336_systems.measure.timing import STEP, Stopwatch
from cs336_systems.step.train_step import TrainStep

LARGEST_TRACE = 20 * 10**6
"""Traces up to this many compressed bytes are kept whole; viewers open larger ones slowly."""


@dataclass(frozen=True)
class Profile:
    trace: Trace
    wall: dict[str, list[float]]
    """Seconds by phase of the traced steps, which are slower than untraced ones."""


def profile_steps(
    step: TrainStep, batch: tuple[Tensor, Tensor], *, num_steps: int, keep: Path | None = None
) -> Profile:
    """Trace `num_steps` of a warmed-up step; write the trace to `keep` (a .json.gz), if given."""
    activities = [ProfilerActivity.CPU]
    if step.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities):  # the first start loads CUPTI, which takes a second
            torch.cuda.synchronize()
    stopwatch = Stopwatch(step.device)
    with profile(activities=activities) as profiler, part_ranges(step.config):
        for number in range(num_steps):
            # A step in CUDA graphs has no phases; by these ranges readers count its steps.
            with record_function(f"{PROFILER_STEP}#{number}"), stopwatch.watch(STEP):
                step(*batch, watch=stopwatch.watch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = read_chrome(path, is_own=True)
        if keep is not None:
            keep.parent.mkdir(parents=True, exist_ok=True)
            write_file(keep, _compressed(path))
    return Profile(trace, dict(stopwatch.wall))


def part_ranges(config: RunConfig) -> AbstractContextManager:
    """Name the parts of the model in traces, except under torch.compile, where ranges would break the graph."""
    return nullcontext() if config.compile else ranges_enabled()


def _compressed(path: Path) -> bytes:
    """Return the compressed trace; a large one without the host's operators, which take most of the bytes."""
    whole = gzip.compress(path.read_bytes(), compresslevel=6)
    if len(whole) <= LARGEST_TRACE:
        return whole
    document = json.loads(path.read_bytes())
    document["traceEvents"] = [
        event for event in document["traceEvents"] if event.get("cat") not in ("cpu_op", "fwdbwd", "ac2g")
    ]
    return gzip.compress(json.dumps(document, separators=(",", ":")).encode())
