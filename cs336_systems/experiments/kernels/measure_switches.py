"""Instrument of `switched_steps`: a step in two variants. Each is timed, and predicted from the other one's trace."""

import dataclasses
import gc
from statistics import median
from typing import Any, NamedTuple

from cs336_systems.config import RunConfig
from cs336_systems.measure.block_planner import build_step
from cs336_systems.measure.kernel_trace import profile_steps
from cs336_systems.measure.readers.kernel_classes import HOST
from cs336_systems.measure.readers.trace_graph import graph_of
from cs336_systems.measure.readers.trace_replay import Graph
from cs336_systems.measure.readers.what_if import (
    Scenario,
    Setting,
    may_be_power_limited,
    outcome,
    selected_seconds,
)
from cs336_systems.measure.timing import STEP, release_memory, time_as_configured
from cs336_systems.record import Metric
from cs336_systems.step.train_step import require_attention

TRACED_STEPS = 2


class Recorded(NamedTuple):
    """A step that ran without and with the profiler."""

    seconds: list[float]
    graph: Graph


def measure_switch(config: dict[str, Any]) -> list[Metric]:
    """Time both variants; predict each from the trace of the other, and from what the kernels take that change. A CUDA
    graph is predicted from the step without one alone: its own trace does not show what the host would take."""
    run = RunConfig.of(config)
    field, _, value = config["switch"].partition("=")
    before, after = (_record(own) for own in (run, dataclasses.replace(run, **{field: value})))
    metrics = [Metric("step_time", "s", before.seconds), Metric("switched_time", "s", after.seconds)]
    if config["kernels"] == HOST:
        return [*metrics, Metric("replayed_time", "s", replayed(before, Setting(HOST, 0.0, None)))]
    kernels = [selected_seconds(own.graph, config["kernels"]) for own in (before, after)]
    forth, back = (Setting(config["kernels"], None, seconds) for seconds in reversed(kernels))
    return [
        *metrics,
        Metric("kernels_time", "s", kernels),
        Metric("replayed_time", "s", replayed(before, forth)),
        Metric("replayed_back_time", "s", replayed(after, back)),
    ]


def replayed(source: Recorded, setting: Setting) -> list[float]:
    """Return the predicted seconds of the other variant: at unchanged clocks, and at equal power where a kernel runs
    nearly all the time. The profiler slows a step, so the untraced step is scaled by the change of the traced one."""
    recorded = source.graph.replay()
    found = outcome(source.graph, recorded, Scenario("", (setting,)))
    times = [found.step, found.at_limit] if may_be_power_limited(recorded) else [found.step]
    return [median(source.seconds) * time * source.graph.steps / recorded.span for time in times]


def _record(run: RunConfig) -> Recorded:
    require_attention(run)
    step = build_step(run)
    batch = step.random_batch()
    seconds = time_as_configured(step, batch).wall[STEP]
    trace = profile_steps(step, batch, num_steps=TRACED_STEPS).trace
    del step, batch
    gc.collect()
    release_memory()
    return Recorded(seconds, graph_of(trace))
