"""A traced step as it would run without the profiler, given the time that it takes then.

A profiler slows the host and hardly the kernels. So the host's times are scaled by the factor with which the replay
takes the time without the profiler, and only what this cannot explain (another clock of the GPU) scales the whole step.
A step that waits for its kernels does not tell what the profiler costs the host; the usual factor is taken there.
"""

from typing import NamedTuple

from cs336_systems.measure.readers.trace_replay import Change, Graph, Replay

USUAL_HOST = 0.6
"""Host time without torch.profiler over host time with it. Steps of an H200 whose kernels run for less than 65% of the
time took 0.47 to 0.75 of their traced time; the median of 13 was 0.58."""
HOST_SHARE = 0.1
"""Minimum share of the recorded time that is bound by the host for the time without the profiler to determine the
host's factor."""
LEAST_HOST, MOST_HOST = 0.25, 2.0
"""Bounds of the factor. Above 1: between two runs of a step the host's time varies."""
HALVINGS = 16


class Unprofiled(NamedTuple):
    """Factors from the recorded times to those without the profiler."""

    host: float = 1.0
    scale: float = 1.0
    """Factor of all times, after that of the host."""


AS_RECORDED = Unprofiled()


def unprofiled(graph: Graph, recorded: Replay, step_seconds: float) -> Unprofiled:
    """Return the factors with which the recorded step takes `step_seconds`."""
    if not recorded.span:
        return AS_RECORDED
    if not graph.on_gpu:  # the profiler slows operators and Python alike
        return Unprofiled(1.0, step_seconds * graph.steps / recorded.span)
    host = _host_factor(graph, recorded, step_seconds * graph.steps)
    return Unprofiled(host, step_seconds * graph.steps / _span(graph, host))


def _host_factor(graph: Graph, recorded: Replay, span: float) -> float:
    if recorded.span - _span(graph, 0.0) < HOST_SHARE * recorded.span:
        return USUAL_HOST
    low, high = LEAST_HOST, MOST_HOST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _span(graph, middle) >= span else (middle, high)
    return high


def _span(graph: Graph, host: float) -> float:
    return graph.replay(Change(host=host)).span
