"""The timing loop."""

import time

import pytest
import torch
import torch.distributed as dist

from cs336_systems.measure import timing
from cs336_systems.measure.timing import Timings, time_queued, time_steps
from cs336_systems.record import Metric

CPU = torch.device("cpu")


def test_phases_add_up_and_warm_up_is_separate():
    calls = []

    def run(watch):
        calls.append(1)
        with watch("first"):
            time.sleep(0.002)
        with watch("second"):
            time.sleep(0.001)

    timings = time_steps(run, device=CPU, warmup_steps=2, num_steps=3)
    assert len(calls) == 5
    assert len(timings.warmup) == 2
    assert {name: len(samples) for name, samples in timings.wall.items()} == {"first": 3, "second": 3, "step": 3}
    for first, second, step in zip(timings.wall["first"], timings.wall["second"], timings.wall["step"], strict=True):
        assert first >= 0.002
        assert second >= 0.001
        assert step >= first + second
    assert timings.events == {}
    assert timings.peak_memory is None


def test_metrics_of_timings():
    timings = Timings(wall={"forward": [1.0], "step": [2.0]}, events={"step": [1.5]}, warmup=[3.0])
    assert timings.metrics == [
        Metric("forward_time", "s", [1.0]),
        Metric("step_time", "s", [2.0]),
        Metric("step_event_time", "s", [1.5]),
        Metric("warmup_time", "s", [3.0]),
    ]


def test_an_exception_in_a_phase_is_raised():
    def run(watch):
        with watch("first"):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        time_steps(run, device=CPU, warmup_steps=0, num_steps=1)


def test_a_sample_is_the_maximum_over_ranks(monkeypatch):
    """Each step begins at a barrier; another rank is slow in its second step."""
    slow = torch.tensor([[0.0, 1e9, 0.0]], dtype=torch.float64)
    barriers = []

    def all_reduce(table, op):
        assert op is dist.ReduceOp.MAX
        table.copy_(torch.maximum(table, slow))

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "barrier", lambda: barriers.append(1))
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(timing, "communication_device", lambda: CPU)
    timings = time_steps(lambda watch: None, device=CPU, warmup_steps=1, num_steps=3)
    assert len(barriers) == 4
    first, second, third = timings.wall["step"]
    assert second == 1e9
    assert max(first, third) < 1e9
    assert len(timings.warmup) == 1


class Ticks:
    """CUDA events of a device on which a unit of work takes a millisecond, and the host no time."""

    done = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Ticks.done

    def elapsed_time(self, end):
        return float(end.at - self.at)


def test_queued_phases_are_timed_by_events_without_synchronisation(monkeypatch):
    waits, steps = [], []
    monkeypatch.setattr(torch.cuda, "Event", Ticks)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)

    def run(watch):
        assert not waits
        steps.append(len(steps))
        for phase, work in (("forward", 3), ("backward", 7 + steps[-1])):
            with watch(phase):
                Ticks.done += work

    found = time_queued(run, device=torch.device("cuda"), num_steps=2)
    assert steps == [0, 1, 2], "the first step starts with an empty queue and does not count"
    assert found == {"forward": [0.003, 0.003], "backward": [0.008, 0.009]}
    assert len(waits) == 1
