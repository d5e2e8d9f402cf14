"""Starting ranks: what comes back, what a failure looks like, and that nothing is left behind."""

import os
import signal
import socket
import sys
import time

import pytest
import torch
import torch.distributed as dist

from cs336_systems.config import UserError
from cs336_systems.parallel.launch import RankError, process_group, spawn
from tests.helpers import ROOT, clean_env, execute, running, wait_until

pytestmark = pytest.mark.xdist_group("ranks")


def summed(factor):
    found = torch.tensor([factor * dist.get_rank()])
    dist.all_reduce(found)
    return dist.get_rank(), found


def failing_on_rank_1():
    if dist.get_rank() == 1:
        raise ZeroDivisionError("the cause")
    dist.all_reduce(torch.zeros(1))  # fails too, as its peer is gone: an echo


def leaving():
    if dist.get_rank() == 0:
        os._exit(7)
    dist.barrier()


def test_results_come_by_rank_and_by_value():
    (first, one), (second, other) = spawn(summed, 2, 10.0)
    assert (first, second) == (0, 1)
    assert one.item() == other.item() == 10.0


def test_the_cause_is_told_and_not_its_echo():
    with pytest.raises(RankError, match="rank 1 of 2 failed") as caught:
        spawn(failing_on_rank_1, 2)
    assert "ZeroDivisionError: the cause" in str(caught.value)


def test_a_rank_that_leaves_without_a_word_is_named():
    with pytest.raises(RankError, match=r"rank 0 of 2 failed:\nit ended with exit code 7"):
        spawn(leaving, 2)


SLEEPING = """
import time
from cs336_systems.parallel import spawn

def sleep():
    print("asleep", file=__import__("sys").stderr, flush=True)
    time.sleep(300)

if __name__ == "__main__":
    spawn(sleep, 2)
"""


def test_ranks_end_with_their_parent(tmp_path):
    """Also when it is killed, and can do nothing about it."""
    script = tmp_path / "sleeping.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{SLEEPING}")
    with running([sys.executable, str(script)], tmp_path) as marked:
        assert wait_until(lambda: marked.log.read_text().count("asleep") == 2, 60), marked.log.read_text()
        os.kill(marked.process.pid, signal.SIGKILL)
        marked.process.wait(timeout=10)
        assert wait_until(lambda: not marked.alive(), 10)


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
    done = execute(*torchrun, cwd=tmp_path, env=clean_env(), timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(path.name for path in tmp_path.glob("rank-*")) == ["rank-0", "rank-1"]


def test_a_process_alone_is_a_group_of_one():
    with process_group(device="cpu") as rank:
        assert (rank.rank, rank.world_size, str(rank.device)) == (0, 1, "cpu")
        dist.barrier()
    assert not dist.is_initialized()


@pytest.fixture
def as_torchrun(monkeypatch):
    for name, value in (
        ("TORCHELASTIC_RUN_ID", "test"),
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("LOCAL_RANK", "0"),
        ("LOCAL_WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
    ):
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_port_in_use_is_one_line(as_torchrun):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        as_torchrun.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        start = time.monotonic()
        with pytest.raises(UserError, match=r"no rendezvous at MASTER_ADDR '127\.0\.0\.1', MASTER_PORT"):
            process_group(device="cpu", timeout=5.0).__enter__()
        assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("WORLD_SIZE", "two", "must be a whole number, got 'two'"),
        ("WORLD_SIZE", "0", "must be at least 1, got 0"),
        ("WORLD_SIZE", None, "is not set"),
        ("RANK", "", "is not set"),
        ("RANK", "-1", "must be at least 0 and below"),
        ("RANK", "99", "must be at least 0 and below"),
        ("LOCAL_RANK", None, "is not set"),
        ("MASTER_PORT", "", "is not set"),
        ("MASTER_PORT", "70000", "below 65536, got 70000"),
        ("MASTER_ADDR", None, "is not set"),
        ("MASTER_ADDR", "no-such-host.invalid", "no-such-host.invalid"),
        ("TORCHELASTIC_RESTART_COUNT", "x", "must be a whole number, got 'x'"),
    ],
)
def test_an_environment_without_sense_is_named(as_torchrun, name, value, said):
    """At once: torch alone would wait for peers that cannot come."""
    as_torchrun.setenv("MASTER_PORT", "1")
    if value is None:
        as_torchrun.delenv(name, raising=False)
    else:
        as_torchrun.setenv(name, value)
    start = time.monotonic()
    with pytest.raises(UserError, match=f"{name}.*{said}"):
        process_group(device="cpu", timeout=5.0).__enter__()
    assert time.monotonic() - start < 10


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
