"""A memory budget on a machine: its limits, and the plan that a step gets."""

import math
from unittest import mock

import pytest
import torch.distributed as dist

from cs336_systems.config import ModelConfig, RunConfig
from cs336_systems.predict.fast_memory import fast_estimate
from cs336_systems.predict.memory_planner import least_peak
from cs336_systems.record import GIB
from cs336_systems.step import memory_budget
from cs336_systems.step.memory_budget import free_host_memory, machine_limits, plan_for_machine
from cs336_systems.step.train_step import TrainStep
from tests.helpers import refused

SHAPE = ModelConfig(vocab_size=61, context_length=64, d_model=48, num_layers=4, num_heads=3, d_ff=96)
FUSED = RunConfig(model=SHAPE, batch_size=8, fast="on", attention="flash_torch")


def within(size):
    return RunConfig(**{**vars(FUSED), "memory_budget": f"{size / GIB:.6f}GiB"})


def test_a_built_step_follows_the_plan():
    config = within((least_peak(FUSED) + fast_estimate(FUSED).peak) / 2)
    step, plain = TrainStep.build(config), TrainStep.build(FUSED)
    assert step.model.plan == plan_for_machine(config).plan
    assert not all(own.keeps_all for own in step.model.plan)
    assert plain.model.plan is None
    batch = step.random_batch()
    assert [step(*batch).item() for _ in range(2)] == [plain(*batch).item() for _ in range(2)]


def test_a_budget_that_is_too_small_stops_the_build():
    with refused("memory_budget", "at least"):
        TrainStep.build(within(GIB // 10_000))


def test_a_cpu_has_no_automatic_budget_and_no_limit_of_host_memory():
    assert machine_limits(within(GIB)).host_bytes == math.inf
    with refused("memory_budget auto"):
        machine_limits(RunConfig(**{**vars(FUSED), "memory_budget": "auto"}))


@pytest.mark.parametrize(
    ("limit", "used", "expected"), [("9000", "3000", 6000.0), ("max", "3000", None), (None, "1", None)]
)
def test_free_memory_is_within_the_limit_of_the_container(limit, used, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_budget, "CGROUP", tmp_path)
    without = free_host_memory()
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    found = free_host_memory()
    assert found == expected if expected is not None else found > without / 2
    assert without > 2**20
    whole = memory_budget.host_memory()
    assert whole == 9000 if limit == "9000" else whole >= without


def test_ranks_share_the_memory_of_the_host(monkeypatch):
    monkeypatch.setattr(memory_budget, "free_host_memory", lambda: 1000.0)
    config = RunConfig(**{**vars(FUSED), "device": "cuda", "memory_budget": "1GiB"})
    properties = mock.Mock(total_memory=80 * GIB)
    with mock.patch.multiple(
        "torch.cuda", get_device_name=lambda _: "NVIDIA H200", get_device_properties=lambda _: properties
    ):
        alone = machine_limits(config)
        with mock.patch.multiple(dist, is_initialized=lambda: True, get_world_size=lambda: 4):
            assert machine_limits(config).host_bytes == alone.host_bytes / 4
        automatic = machine_limits(RunConfig(**{**vars(config), "memory_budget": "auto"}))
    assert alone.budget == GIB
    assert 70 * GIB < automatic.budget < 80 * GIB
