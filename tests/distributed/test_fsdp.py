"""The fully sharded wrapper against one process that has all weights and the whole batch. Starting ranks takes seconds:
each test starts one group and goes through many cases of tests/distributed/fsdp_cases.py in it."""

from itertools import chain

import pytest
from torch import nn

from cs336_systems.parallel import FSDP
from cs336_systems.parallel.launch import spawn
from tests.distributed.fsdp_cases import run_cases

pytestmark = pytest.mark.xdist_group("ranks")  # one at a time: a test has up to four busy processes

PATIENCE = 120.0
"""Seconds. Ranks that disagree about what comes next wait for each other."""


def no_complaints(world_size, *groups):
    __tracebackhide__ = True
    found = list(chain.from_iterable(spawn(run_cases, world_size, *groups, timeout=PATIENCE)))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_like_one_process(world_size):
    no_complaints(world_size, "training", "passes")


def test_messages_memory_low_precision_and_transformers():
    no_complaints(2, "messages", "low precision", "transformer")


def test_messages_memory_and_low_precision_of_uneven_parts():
    no_complaints(3, "messages", "low precision")


def test_needs_a_process_group():
    with pytest.raises(RuntimeError, match="process group"):
        FSDP(nn.Linear(2, 2))
