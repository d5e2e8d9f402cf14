"""Instrument on steps within a memory budget: time, peak and host memory, beside what was predicted."""

from typing import Any

from torch._functorch.config import patch

from cs336_systems.config import RunConfig
from cs336_systems.experiments.memory.budgets import OFFLOAD_ONLY
from cs336_systems.experiments.steps.measure_step import disable_compile_caches
from cs336_systems.measure.memory_trace import measure_peak
from cs336_systems.measure.timing import time_as_configured
from cs336_systems.model import TransformerLM
from cs336_systems.predict.activation_plan import KEEP, OFFLOAD
from cs336_systems.predict.memory_model import estimate
from cs336_systems.predict.memory_planner import PlannedMemory, budget_bytes, plan_memory
from cs336_systems.record import Metric
from cs336_systems.step.memory_budget import plan_for_machine
from cs336_systems.step.train_step import TrainStep


def measure_budget(config: dict[str, Any]) -> list[Metric]:
    """Measure a step within a budget, with recomputed groups of blocks, or compiled under `torch_budget`."""
    run = RunConfig.of(config)
    if run.compile:
        disable_compile_caches()
        with patch(activation_memory_budget=config["torch_budget"]):
            return _measured(TrainStep.build(run))
    step = TrainStep.build(run)
    if not run.memory_budget:
        return [*_measured(step), Metric("predicted_memory", "B", [estimate(run).peak])]
    assert isinstance(step.model, TransformerLM)
    planned = _planned(run, config["way"])
    step.model.plan = planned.plan
    return [
        *_measured(step),
        Metric("predicted_memory", "B", [planned.estimate.peak]),
        Metric("predicted_added_time", "s", [planned.added_seconds]),
        Metric("host_memory", "B", [step.model.host.nbytes]),
    ]


def _planned(run: RunConfig, way: str) -> PlannedMemory:
    if way == OFFLOAD_ONLY:
        return plan_memory(run, budget_bytes(run.memory_budget), choices=(KEEP, OFFLOAD))
    return plan_for_machine(run)


def _measured(step: TrainStep) -> list[Metric]:
    batch = step.random_batch()
    timings = time_as_configured(step, batch)
    peak = measure_peak(step, batch) if timings.peak_memory is None else timings.peak_memory
    return [*timings.metrics, Metric("peak_memory", "B", [peak])]
