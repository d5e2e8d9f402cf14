"""The timing loop."""

import os
import tempfile
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from cs336_systems.measure.timing import time_queued, time_steps

CPU = torch.device("cpu")


def test_phases_add_up_and_warm_up_is_apart():
    calls = []

    def run(watch):
        calls.append(time.perf_counter())
        with watch("first"):
            time.sleep(0.02)
        with watch("second"):
            time.sleep(0.01)

    timings = time_steps(run, device=CPU, warmup_steps=2, num_steps=3)
    assert len(calls) == 5
    assert len(timings.warmup) == 2
    assert {name: len(samples) for name, samples in timings.wall.items()} == {"first": 3, "second": 3, "step": 3}
    for first, second, step in zip(timings.wall["first"], timings.wall["second"], timings.wall["step"], strict=True):
        assert 0.02 <= first < 0.05
        assert 0.01 <= second < 0.04
        assert step >= first + second
    assert timings.events == {}
    assert timings.peak_memory is None


def test_a_phase_that_fails_is_not_swallowed():
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


def test_a_sample_is_the_maximum_over_ranks(tmp_path):
    """Rank 0 does nothing and rank 1 is slow: both must report the slow rank's time, the same numbers."""
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


def test_queued_phases_are_timed_by_events_without_waiting(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "Event", Ticks)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    steps = []

    def run(watch):
        assert not waits
        steps.append(len(steps))
        for phase, work in (("forward", 3), ("backward", 7 + steps[-1])):
            with watch(phase):
                Ticks.done += work

    found = time_queued(run, device=torch.device("cuda"), num_steps=2)
    assert steps == [0, 1, 2], "one more, before which nothing was queued"
    assert found == {"forward": [0.003, 0.003], "backward": [0.008, 0.009]}
    assert len(waits) == 1
