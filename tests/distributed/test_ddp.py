"""Data parallel: every wrapper against one process that trains on the whole batch, and what happens when ranks differ,
die or stall. Starting ranks takes time, so each start goes through many cases of `parallel_cases`."""

import time

import pytest

from cs336_systems.parallel.launch import RankError, process_group, spawn
from tests.distributed.parallel_cases import (
    CASES,
    VARIANTS,
    compiled,
    killed_in_backward,
    run_cases,
    stalled_in_a_step,
)

pytestmark = pytest.mark.xdist_group("ranks")  # one at a time: a test has up to four busy processes

LIMIT = 120.0
"""Seconds for ranks that need ten to twenty, more on a busy machine. Past it the traceback says where they hang."""


def assert_nothing_wrong(by_rank, names):
    for rank, found in enumerate(by_rank):
        assert list(found) == list(names)
        assert {name: failures for name, failures in found.items() if failures} == {}, f"rank {rank}"


every_variant = pytest.mark.parametrize("variant", VARIANTS)


@pytest.mark.parametrize("world_size", [2, 4])
@every_variant
def test_every_case(variant, world_size):
    found = spawn(run_cases, world_size, variant, list(CASES), timeout=LIMIT)
    assert len(found) == world_size
    assert_nothing_wrong(found, CASES)


@every_variant
def test_every_case_in_a_world_of_one(variant):
    with process_group("gloo", "cpu", timeout=LIMIT):
        assert_nothing_wrong([run_cases(variant, list(CASES))], CASES)


def test_compiled():
    found = spawn(compiled, 2, timeout=LIMIT)
    assert_nothing_wrong(found, [f"{variant} {way}" for variant in VARIANTS for way in ("inside", "outside")])


def test_a_rank_that_is_killed(tmp_path):
    note = tmp_path / "killed"
    with pytest.raises(RankError, match=r"rank 1 of 2 failed(.|\n)*SIGKILL"):
        spawn(killed_in_backward, 2, "each", 1, str(note), timeout=LIMIT)
    assert time.time() - float(note.read_text()) < 5


def test_a_rank_that_stalls():
    # Long enough for ranks to start on a busy machine: else the traceback is that of an import.
    with pytest.raises(RankError) as caught:
        spawn(stalled_in_a_step, 2, "flat", 1, 100.0, timeout=15.0)
    said = str(caught.value)
    assert "did not end within 15 s" in said
    waiting, stalled = said.split("-- rank 1")
    assert "in forget_to_finish" in stalled
    assert "in stalled_in_a_step" in stalled
    assert "in finish_gradient_synchronization" in waiting
    assert "in forget_to_finish" not in waiting
