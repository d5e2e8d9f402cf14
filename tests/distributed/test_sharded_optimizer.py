"""The sharded optimizer against the plain one in the same process, bit by bit. Starting ranks takes seconds: each test
starts one group, or two, and goes through many cases of tests/distributed/sharding_cases.py in it."""

from itertools import chain

import pytest
import torch

from cs336_systems.parallel.launch import spawn
from tests.distributed.sharding_cases import (
    CASES,
    JOBS,
    LEG,
    OF_TRANSFORMERS,
    differences,
    run_cases,
    sharded_leg,
    trained,
)

pytestmark = pytest.mark.xdist_group("ranks")  # one at a time: a test has up to four busy processes

PATIENCE = 120.0
"""Seconds. Ranks that disagree about what comes next wait for each other."""


def no_complaints(world_size, names):
    __tracebackhide__ = True
    found = list(chain.from_iterable(spawn(run_cases, world_size, list(names), timeout=PATIENCE)))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_like_the_plain_optimizer(world_size):
    no_complaints(world_size, [name for name in CASES if name not in OF_TRANSFORMERS])


@pytest.mark.parametrize("world_size", [2, 4])
def test_shares_and_messages(world_size):
    no_complaints(world_size, OF_TRANSFORMERS)


# Checkpoints


def uninterrupted(legs):
    return {job: trained(job, None, sharded=False, steps=legs * LEG) for job in JOBS}


def next_leg(world_size, checkpoints, legs):
    """What rank 0 reached, once every rank is seen to have what the plain optimizer has after so many legs."""
    answers = spawn(sharded_leg, world_size, checkpoints, timeout=PATIENCE)
    expected = uninterrupted(legs)
    for rank, (reached, complaints) in enumerate(answers):
        assert complaints == []
        assert differences(reached, expected, f"rank {rank} of {world_size}") == []
    return answers[0][0]


def test_from_four_ranks_to_two():
    next_leg(2, next_leg(4, None, 1), 2)


def test_from_two_ranks_to_three_to_the_plain_optimizer():
    checkpoints = next_leg(3, next_leg(2, None, 1), 2)
    plain = {job: trained(job, checkpoints[job], sharded=False) for job in JOBS}
    assert differences(plain, uninterrupted(3)) == []


def test_from_the_plain_optimizer_to_two_ranks_to_one(tmp_path):
    torch.save(next_leg(2, uninterrupted(1), 2), tmp_path / "checkpoint")
    next_leg(1, torch.load(tmp_path / "checkpoint", weights_only=True), 3)
