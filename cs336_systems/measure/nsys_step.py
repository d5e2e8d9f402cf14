"""The program that nsys records: `python -m cs336_systems.measure.nsys_step REQUEST.json`, started by nsys.py.

The request is {"config": a RunConfig's fields, "num_steps": how many steps to record}.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

from cs336_systems.config import RunConfig, UserError
from cs336_systems.kernels.ranges import ranges_enabled
from cs336_systems.measure.timing import Stopwatch
from cs336_systems.step.train_step import TrainStep


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    try:
        record_steps(RunConfig.from_dict(request["config"]), request["num_steps"])
    except UserError as error:
        sys.exit(str(error))


def record_steps(config: RunConfig, num_steps: int) -> None:
    """Warm up unseen, then let nsys see `num_steps` steps."""
    step = TrainStep.build(config)
    batch = step.random_batch()
    # Phases begin and end with an idle device, as in all other measurements of them.
    stopwatch = Stopwatch(step.device)
    # Ranges break a compiled model's graph: it would be another model that is recorded.
    with nullcontext() if config.compile else ranges_enabled():
        for _ in range(config.warmup_steps):
            step(*batch, watch=stopwatch.watch)
        stopwatch.synchronize()
        with torch.cuda.profiler.profile():
            for _ in range(num_steps):
                step(*batch, watch=stopwatch.watch)
            stopwatch.synchronize()


if __name__ == "__main__":
    main()
