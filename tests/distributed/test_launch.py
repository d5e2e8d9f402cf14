"""Starting ranks: results, reports of failures, and processes that end with their parent."""

import math
import os
import signal
import socket
import sys
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from cs336_systems.config import UserError
from cs336_systems.parallel import DDP, FSDP, FlatDDP, NaiveDDP
from cs336_systems.parallel.launch import RankError, Ranks, process_group, spawn
from tests.helpers import ROOT, running, wait_until

pytestmark = pytest.mark.xdist_group("ranks")
PATIENCE = 240.0
"""Seconds in which even a busy machine does what these tests wait for."""


def scaled_sum(factor):
    t = torch.tensor([factor * dist.get_rank()])
    dist.all_reduce(t)
    return dist.get_rank(), t


def failing_on_rank_1():
    if dist.get_rank() == 1:
        raise ZeroDivisionError("the cause")
    dist.all_reduce(torch.zeros(1))


def test_results_come_by_rank_and_by_value():
    with Ranks(2) as ranks:
        for factor in (10.0, 20.0):
            (first, one), (second, other) = ranks.call(scaled_sum, factor)
            assert (first, second) == (0, 1)
            assert one.item() == other.item() == factor


def ending_before_a_barrier(end):
    if dist.get_rank() == 0:
        end()
    dist.barrier()  # fails, too, as its peer is gone


def end_with_code_7():
    os._exit(7)


def end_by_a_signal():
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_cause_is_reported():
    with pytest.raises(RankError, match="rank 1 of 2 failed") as caught:
        spawn(failing_on_rank_1, 2)
    assert "ZeroDivisionError: the cause" in str(caught.value)


@pytest.mark.parametrize(("end", "cause"), [(end_with_code_7, "exit code 7"), (end_by_a_signal, "SIGKILL")])
def test_a_rank_that_ends_is_reported_and_not_its_peer(end, cause):
    """At once, and not after the time limit of the others."""
    with pytest.raises(RankError, match=rf"rank 0 of 2 failed(.|\n)*{cause}"):
        spawn(ending_before_a_barrier, 2, end)


def stalled():
    time.sleep(300)


def stalling_on_rank_1():
    if dist.get_rank() == 1:
        stalled()
    dist.barrier()


def test_a_rank_that_stalls():
    """The report has the stack of every rank."""
    with Ranks(2) as group:
        group.call(scaled_sum, 1.0)  # started, and this module imported
        group.timeout = 10.0
        with pytest.raises(RankError, match="did not end within 10 s") as caught:
            group.call(stalling_on_rank_1)
    waiting, stalling = str(caught.value).split("-- rank 1")
    assert "in stalled" in stalling
    assert "in barrier" in waiting
    assert "in stalled" not in waiting


@pytest.mark.parametrize(
    ("wrap", "error"),
    [
        *((wrap, (RuntimeError, "process group")) for wrap in (NaiveDDP, FlatDDP, DDP, FSDP)),
        *((partial(DDP, bucket_size_mb=size), (ValueError, "bucket_size_mb must be above 0"))
          for size in (0, -1.0, -math.inf, math.nan)),
    ],
)  # fmt: skip
def test_wrappers_outside_of_a_group_and_with_bad_buckets(wrap, error):
    with pytest.raises(error[0], match=error[1]):
        wrap(torch.nn.Linear(2, 2))


SLEEPING = """
import time
from cs336_systems.parallel import spawn

def sleep():
    print("asleep", file=__import__("sys").stderr, flush=True)
    time.sleep(1000)

if __name__ == "__main__":
    spawn(sleep, 2)
"""


def test_ranks_end_with_their_parent(tmp_path):
    """Even if it is killed."""
    script = tmp_path / "sleeping.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{SLEEPING}")
    with running([sys.executable, str(script)], tmp_path) as marked:
        assert wait_until(lambda: marked.log.read_text().count("asleep") == 2, PATIENCE), marked.log.read_text()
        os.kill(marked.process.pid, signal.SIGKILL)
        marked.process.wait(timeout=PATIENCE)
        assert wait_until(lambda: not marked.alive(), PATIENCE)


def test_a_process_alone_is_a_group_of_one():
    with process_group(device="cpu") as rank:
        assert (rank.rank, rank.world_size, str(rank.device)) == (0, 1, "cpu")
        dist.barrier()
    assert not dist.is_initialized()


@pytest.fixture
def as_torchrun(monkeypatch):
    environment = "TORCHELASTIC_RUN_ID=test RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1"
    for assignment in environment.split():
        monkeypatch.setenv(*assignment.split("="))
    return monkeypatch


def test_a_port_in_use_is_one_line(as_torchrun):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        as_torchrun.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(UserError, match=r"no rendezvous at MASTER_ADDR '127\.0\.0\.1', MASTER_PORT"):
            process_group(device="cpu", timeout=5.0).__enter__()


@pytest.mark.parametrize(
    ("name", "value", "reported"),
    [
        ("WORLD_SIZE", "two", "must be a whole number, got 'two'"),
        ("WORLD_SIZE", "0", "must be at least 1, got 0"),
        ("WORLD_SIZE", None, "is not set"),
        ("RANK", "", "is not set"),
        ("RANK", "99", "must be at least 0 and below"),
        ("LOCAL_RANK", None, "is not set"),
        ("MASTER_PORT", "70000", "below 65536, got 70000"),
        ("MASTER_ADDR", None, "is not set"),
        ("MASTER_ADDR", "no-such-host.invalid", "no-such-host.invalid"),
    ],
)
def test_an_invalid_environment_is_named(as_torchrun, name, value, reported):
    """torch alone would wait for peers that cannot come; the time limit here is below the test's."""
    as_torchrun.setenv("MASTER_PORT", "1")
    if value is None:
        as_torchrun.delenv(name, raising=False)
    else:
        as_torchrun.setenv(name, value)
    with pytest.raises(UserError, match=f"{name}.*{reported}"):
        process_group(device="cpu", timeout=10 * PATIENCE).__enter__()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"backend": "nccl"}, "nccl needs CUDA"),
        ({"device": "cuda"}, "sees none"),
        ({"backend": "mpi"}, "'mpi'"),
        ({"world_size": 0}, "at least 1, got 0"),
    ],
)
def test_ranks_that_cannot_start_are_one_line(arguments, complaint):
    with pytest.raises(UserError, match=complaint):
        spawn(print, **{"world_size": 2, **arguments})
