"""A training step whose attention changes in turns: what a faster kernel gives where it is used."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.nn as nn
from torch.nn.attention import sdpa_kernel

from cs336_systems.config import RunConfig
from cs336_systems.experiments.attention.measure_attention import SDPA_BACKENDS, Metrics, failure_of, in_turns
from cs336_systems.measure.timing import STEP, Timings, time_steps
from cs336_systems.model import Attention
from cs336_systems.step.train_step import TrainStep

STEPS = 2
"""Timed in a turn, after one that is not: the first meets the caches and clocks that another left behind."""


def measure_attention_step(config: dict[str, Any]) -> Metrics:
    """One model, one batch: all else is the same for all of them, and so is what they leave the GPU's clocks at."""
    step = TrainStep.build(RunConfig.of(config))
    batch = step.random_batch()

    def turn(name: str) -> Timings:
        with attending(step.model, name):
            return time_steps(
                lambda watch: step(*batch, watch=watch), device=step.device, warmup_steps=1, num_steps=STEPS
            )

    metrics: Metrics = []
    able: list[str] = []
    for name in config["implementations"]:
        try:
            turn(name)  # what compiles does so here
        except Exception as error:  # what one cannot do is a result, and does not end the others
            metrics.append(failure_of(name, error))
        else:
            able.append(name)
    times: dict[str, list[float]] = defaultdict(list)
    for name in in_turns(able, config["rounds"]):
        times[name] += turn(name).wall[STEP]
    return metrics + [[f"{name}_step_time", "s", samples] for name, samples in times.items()]


@contextmanager
def attending(model: nn.Module, name: str) -> Iterator[None]:
    """The model's attention is the one of that name, until the next one is."""
    backend = SDPA_BACKENDS.get(name)
    for module in model.modules():
        if isinstance(module, Attention):
            module.impl = name if backend is None else "sdpa"
    with nullcontext() if backend is None else sdpa_kernel(backend):
        yield
