"""The program that nsys records: `python -m cs336_systems.measure.nsys_step REQUEST.json`, started by nsys.py.

The request is {"config": a RunConfig's fields, "num_steps": how many steps to record}.
"""

import json
import sys
from pathlib import Path

import torch

from cs336_systems.config import RunConfig, UserError
from cs336_systems.measure.block_planner import build_step
from cs336_systems.measure.kernel_trace import part_ranges
from cs336_systems.measure.timing import Stopwatch


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    try:
        record_steps(RunConfig.from_dict(request["config"]), request["num_steps"])
    except UserError as error:
        sys.exit(str(error))


def record_steps(config: RunConfig, num_steps: int) -> None:
    """Warm up, then run `num_steps` steps inside the range that nsys captures."""
    step = build_step(config)
    batch = step.random_batch()
    stopwatch = Stopwatch(step.device)  # synchronises at the borders of phases, as in all other measurements
    with part_ranges(config):
        for _ in range(config.warmup_steps):
            step(*batch, watch=stopwatch.watch)
        stopwatch.synchronize()
        with torch.cuda.profiler.profile():
            for _ in range(num_steps):
                step(*batch, watch=stopwatch.watch)
            stopwatch.synchronize()


if __name__ == "__main__":
    main()
