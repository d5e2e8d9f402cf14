"""Instrument of `switched_steps`: a step in two variants. Each is timed, and predicted from the other one's trace.

The traces are kept, so that predictions can be made again with other rules:

    before = read_variant(Path("files/.../before.json.gz"), step_times)
    after = read_variant(Path("files/.../after.json.gz"), switched_times)
    predictions(before, after, "attention,elementwise+copy")
"""

import dataclasses
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

from cs336_systems.config import RunConfig
from cs336_systems.measure.block_planner import build_step
from cs336_systems.measure.kernel_trace import profile_steps
from cs336_systems.measure.readers.kernel_classes import HOST
from cs336_systems.measure.readers.trace import read_chrome
from cs336_systems.measure.readers.trace_graph import graph_of
from cs336_systems.measure.readers.trace_replay import Graph
from cs336_systems.measure.readers.unprofiled import Unprofiled, unprofiled
from cs336_systems.measure.readers.what_if import Scenario, Setting, outcome, selections
from cs336_systems.measure.timing import STEP, release_memory, time_as_configured
from cs336_systems.record import Metric
from cs336_systems.step.train_step import TrainStep, require_attention

TRACED_STEPS = 2


@dataclass(frozen=True)
class Variant:
    """A step that ran without and with the profiler."""

    seconds: Sequence[float]
    """Times of steps without it."""
    graph: Graph

    @cached_property
    def factors(self) -> Unprofiled:
        return unprofiled(self.graph, self.graph.replay(), median(self.seconds))


def measure_switch(config: dict[str, Any], *, folder: str | None = None) -> list[Metric]:
    """Time both variants, then trace both: after a profiler has run, the host may stay slower. Traces go to `folder`.

    Groups of kernels (`kernels`, separated by commas) take the time and the number that they have in the other variant.
    """
    run = RunConfig.of(config)
    field, _, value = config["switch"].partition("=")
    runs = {"before": run, "after": dataclasses.replace(run, **{field: value})}
    times = {name: _timed(own) for name, own in runs.items()}
    graphs = {name: _traced(own, Path(folder) / f"{name}.json.gz" if folder else None) for name, own in runs.items()}
    before, after = (Variant(times[name], graphs[name]) for name in runs)
    return [
        Metric("step_time", "s", before.seconds),
        Metric("switched_time", "s", after.seconds),
        *predictions(before, after, config["kernels"]),
    ]


def read_variant(path: Path, seconds: Sequence[float]) -> Variant:
    """Return a variant from its kept trace and the times of its steps."""
    return Variant(seconds, graph_of(read_chrome(path)))


def predictions(before: Variant, after: Variant, kernels: str) -> list[Metric]:
    """Predict each variant from the other. A CUDA graph (`kernels` is the host) is predicted only from the step without
    one: a trace of the graph does not show what the host would take."""
    if kernels == HOST:
        factors = [Metric("host_factor", "1", [before.factors.host])]
        return [*factors, Metric("replayed_time", "s", replayed(before, [Setting(HOST, 0.0, None)]))]
    names = kernels.split(",")
    found = [selections(own.graph, names) for own in (before, after)]
    scales = [own.factors.scale for own in (before, after)]
    back, forth = (
        [Setting(name, None, scale * own.seconds, max(1, own.kernels)) for name, own in zip(names, groups, strict=True)]
        for groups, scale in zip(found, scales, strict=True)
    )
    return [
        Metric("host_factor", "1", [before.factors.host, after.factors.host]),
        Metric("kernels_time", "s", [sum(own.seconds for own in groups) for groups in found]),
        Metric("kernels_number", "1", [sum(own.kernels for own in groups) for groups in found]),
        Metric("replayed_time", "s", replayed(before, forth)),
        Metric("replayed_back_time", "s", replayed(after, back)),
    ]


def replayed(source: Variant, settings: Sequence[Setting]) -> list[float]:
    """Return the predicted seconds of the other variant: at unchanged clocks, and at equal power where a kernel runs
    nearly all the time in both."""
    found = outcome(source.graph, source.graph.replay(), Scenario("", tuple(settings)), source.factors)
    return [found.step, found.at_limit] if found.may_be_limited else [found.step]


def _timed(run: RunConfig) -> list[float]:
    step, batch = _built(run)
    seconds = time_as_configured(step, batch).wall[STEP]
    del step, batch
    _release()
    return seconds


def _traced(run: RunConfig, keep: Path | None) -> Graph:
    step, batch = _built(run)
    for _ in range(max(1, run.warmup_steps)):
        step(*batch)
    trace = profile_steps(step, batch, num_steps=TRACED_STEPS, keep=keep).trace
    del step, batch
    _release()
    return graph_of(trace)


def _built(run: RunConfig) -> tuple[TrainStep, tuple[Tensor, Tensor]]:
    require_attention(run)
    step = build_step(run)
    return step, step.random_batch()


def _release() -> None:
    gc.collect()
    release_memory()
