"""The timing loop."""

import os
import tempfile
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

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


def _rank(rank, world_size, rendezvous, results):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    try:

        def run(watch):
            with watch("work"):
                time.sleep(0.05 if rank == 1 else 0.0)

        timings = time_steps(run, device=CPU, warmup_steps=1, num_steps=3)
        torch.save(timings.wall, os.path.join(results, str(rank)))
    finally:
        dist.destroy_process_group()


@pytest.mark.xdist_group("ranks")
def test_a_sample_is_the_maximum_over_ranks(tmp_path):
    """Rank 0 does nothing and rank 1 is slow: both report the slow rank's time."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(2, os.path.join(folder, "rendezvous"), str(tmp_path)), nprocs=2)
    ranks = [torch.load(tmp_path / str(rank)) for rank in (0, 1)]
    assert ranks[0] == ranks[1]
    assert all(sample >= 0.05 for sample in ranks[0]["work"])


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
