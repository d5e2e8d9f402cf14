"""Starting ranks: results, reports of failures, and processes that end with their parent."""

import os
import signal
import socket
import sys

import pytest
import torch
import torch.distributed as dist

from cs336_systems.config import UserError
from cs336_systems.parallel.launch import RankError, Ranks, process_group, spawn
from tests.helpers import ROOT, clean_env, execute, running, wait_until

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


def exiting():
    if dist.get_rank() == 0:
        os._exit(7)
    dist.barrier()  # fails, too, as its peer is gone


def test_results_come_by_rank_and_by_value():
    with Ranks(2) as ranks:
        for factor in (10.0, 20.0):
            (first, one), (second, other) = ranks.call(scaled_sum, factor)
            assert (first, second) == (0, 1)
            assert one.item() == other.item() == factor


def test_the_cause_is_reported():
    with pytest.raises(RankError, match="rank 1 of 2 failed") as caught:
        spawn(failing_on_rank_1, 2)
    assert "ZeroDivisionError: the cause" in str(caught.value)


def test_a_rank_that_exits_is_reported_and_not_its_peer():
    with pytest.raises(RankError, match=r"rank 0 of 2 failed:\nthe process ended with exit code 7"):
        spawn(exiting, 2)


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


UNDER_TORCHRUN = """
import torch
import torch.distributed as dist
from cs336_systems.parallel import process_group

with process_group(device="cpu") as rank:
    found = torch.ones(1)
    dist.all_reduce(found)
    assert rank.world_size == found.item() == 2
    open(f"rank-{rank.rank}", "w").close()
assert not dist.is_initialized()
"""


def test_torchruns_ranks_form_a_group(tmp_path):
    (tmp_path / "work.py").write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{UNDER_TORCHRUN}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "work.py"]
    done = execute(*torchrun, cwd=tmp_path, env=clean_env(), timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(path.name for path in tmp_path.glob("rank-*")) == ["rank-0", "rank-1"]


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
        ("TORCHELASTIC_RESTART_COUNT", "x", "must be a whole number, got 'x'"),
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
