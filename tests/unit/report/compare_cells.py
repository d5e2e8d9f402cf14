"""Hand-made cells for tests of comparisons."""

from cs336_systems.config import RunConfig, model_config
from cs336_systems.record import Environment
from tests import helpers

GPU = Environment(gpu="H200", gpu_count=1, torch="2.11", driver="580", git_commit="a" * 40, git_dirty=False, tf32=False)
STEADY = (0.100, 0.101, 0.099, 0.100, 0.102, 0.098, 0.100, 0.101, 0.099, 0.100)


def times(factor=1.0):
    return tuple(factor * seconds for seconds in STEADY)


def entries(experiment, config, metrics, status="ok", environment=GPU):
    return helpers.entries(experiment, config, metrics, status, environment)


def cell(
    steps=STEADY, experiment="bench", *, size="small", context=512, status="ok", environment=GPU, metrics=(), **run
):
    """A cell whose steps took so long, with more metrics and other fields of its configuration."""
    config = RunConfig(
        model=model_config(size, context_length=context), size=size, **{"device": "cuda", **run}
    ).to_dict()
    return entries(experiment, config, {"step_time": steps, **dict(metrics)}, status, environment)
