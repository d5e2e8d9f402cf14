"""Times of many steps: the same as those of `step_time`, one by one."""

import dataclasses
from itertools import product

import pytest

from cs336_systems.config import RunConfig, model_config
from cs336_systems.predict.gpus import find_card
from cs336_systems.predict.time.gpu_profile import profile_of
from cs336_systems.predict.time.step_times import StepTimes
from cs336_systems.predict.time.time_model import step_time

PROFILE = profile_of(find_card("h200"))


def fast_step(size="small", **fields):
    return RunConfig(model=model_config(size), precision="bf16", attention="auto", fast="on", device="cuda", **fields)


@pytest.mark.parametrize("size", ["small", "qwen2.5/0.5B", "qwen3/0.6B"])
@pytest.mark.parametrize("profile", [PROFILE, dataclasses.replace(PROFILE, power=None)], ids=["power", "no power"])
def test_a_step_takes_as_long_as_step_time_says(size, profile):
    config = fast_step(size, max_grad_norm=1.0)
    times = StepTimes(config, profile)
    for batch, count, group, state in product((1, 3), (1, 5), (0, 2), ("fp32", "bf16")):
        for fast in ("on", "kernels,loss,optimizer"):
            own = dataclasses.replace(
                config, batch_size=batch, checkpoint_blocks=group, optimizer_state=state, fast=fast
            )
            expected = step_time(own, profile, count).seconds
            found = times.seconds(batch, count, recomputes=group > 0, state=state, graph=fast == "on")
            assert found == pytest.approx(expected, rel=1e-9)


def test_launches_bound_a_step_without_a_graph():
    slow = dataclasses.replace(PROFILE, launch=1.0)
    times = StepTimes(fast_step(), slow)
    assert times.seconds(1, graph=False) > 100 > times.seconds(1)


@pytest.mark.parametrize("size", ["small", "2.7B"])
def test_a_graph_never_makes_a_step_longer(size):
    times = StepTimes(fast_step(size), PROFILE)
    for batch in (1, 4, 16):
        assert times.seconds(batch, graph=True) <= times.seconds(batch, graph=False)


def test_each_kernel_is_timed_once(monkeypatch):
    from cs336_systems.predict.time import step_times

    timed = []
    own = step_times.kernel_seconds
    monkeypatch.setattr(step_times, "kernel_seconds", lambda *given: timed.append(given[0]) or own(*given))
    times = StepTimes(fast_step(), PROFILE)
    for count, recomputes in product(range(1, 5), (False, True)):
        times.seconds(2, count, recomputes=recomputes)
    assert timed
    assert len(timed) == len(set(timed))
