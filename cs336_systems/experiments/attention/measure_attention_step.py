"""Instrument of `attention_step`: a training step whose attention implementations are interleaved."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.nn as nn
from torch.nn.attention import sdpa_kernel

from cs336_systems.config import RunConfig
from cs336_systems.experiments.attention.measure_attention import SDPA_BACKENDS, failure_of, interleave
from cs336_systems.measure.timing import STEP, time_steps
from cs336_systems.model import Attention
from cs336_systems.record import Metric
from cs336_systems.step.train_step import TrainStep

STEPS = 2
"""Steps timed per round, after one that is not timed: it meets the caches and clocks that another left behind."""


def measure_attention_step(config: dict[str, Any]) -> list[Metric]:
    """Time steps of one model on one batch, so that the implementations differ in nothing else."""
    step = TrainStep.build(RunConfig.of(config))
    batch = step.random_batch()

    def step_times(name: str) -> list[float]:
        with attention_set_to(step.model, name):
            return time_steps(
                lambda watch: step(*batch, watch=watch), device=step.device, warmup_steps=1, num_steps=STEPS
            ).wall[STEP]

    failed: list[Metric] = []
    able: list[str] = []
    for name in config["implementations"]:
        try:
            step_times(name)  # compilation happens here
        except Exception as error:  # a failure is a result, and does not end the others
            failed.append(failure_of(name, error))
        else:
            able.append(name)
    times: defaultdict[str, list[float]] = defaultdict(list)
    for name in interleave(able, config["rounds"]):
        times[name] += step_times(name)
    return failed + [Metric("step_time", "s", samples, variant=name) for name, samples in times.items()]


@contextmanager
def attention_set_to(model: nn.Module, name: str) -> Iterator[None]:
    """Set the model's attention implementation; an SDPA backend is forced inside the context."""
    backend = SDPA_BACKENDS.get(name)
    for module in model.modules():
        if isinstance(module, Attention):
            module.impl = name if backend is None else "sdpa"
    with nullcontext() if backend is None else sdpa_kernel(backend):
        yield
