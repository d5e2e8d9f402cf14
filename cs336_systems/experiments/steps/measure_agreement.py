"""Instrument: this package's timing loop and `triton.testing.do_bench` on the same callables."""

import gc
from collections.abc import Callable
from typing import Any

import torch

from cs336_systems.config import RunConfig
from cs336_systems.measure.timing import time_as_configured, time_calls
from cs336_systems.record import Metric
from cs336_systems.step.train_step import TrainStep

CALLS = 10


def measure_agreement(config: dict[str, Any]) -> list[Metric]:
    run = RunConfig.from_dict(config)
    step = TrainStep.build(run)
    inputs, targets = step.random_batch()
    timings = time_as_configured(step, (inputs, targets))
    metrics = timings.metrics
    expected = {phase: sum(samples) / len(samples) for phase, samples in timings.wall.items()}
    for phase, call, gradients in _callables(step, inputs, targets):
        # do_bench takes the number of repetitions as a time
        expected_ms = expected[phase] * 1e3
        samples = time_calls(
            call, device=step.device, warmup_ms=3 * expected_ms, rep_ms=CALLS * expected_ms, gradients=gradients
        )
        metrics.append(Metric(f"do_bench_{phase}_time", "s", samples))
        gc.collect()
    return metrics


def _callables(step: TrainStep, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
    """Yield (phase, callable, tensors whose gradients are dropped before each call). A generator, so that a retained
    graph is not alive beside the next callable."""
    yield "forward", lambda: step.logits(inputs), ()
    yield "backward", _repeated_backward(step, inputs, targets), list(step.model.parameters())
    step.model.zero_grad(set_to_none=True)
    yield "step", lambda: step(inputs, targets), ()


def _repeated_backward(step: TrainStep, inputs: torch.Tensor, targets: torch.Tensor) -> Callable[[], None]:
    loss = step.loss(step.logits(inputs), targets)
    return lambda: loss.backward(retain_graph=True)
