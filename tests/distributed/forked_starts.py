"""Starts ranks that are killed at a chosen call of the operating system, or after a time.

    python -m tests.distributed.forked_starts        # one start for each line of JSON on its input

This process has torch imported and forks the ranks, so that a start takes a second. `kill_at_call.c` is loaded into it:
in a rank, it counts the calls that concern files of the run, and kills the rank or the whole group before, within or
after one of them.
"""

import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import itertools
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cs336_systems.train.agreement import _source_hash
from tests.distributed.train_cases import command
from tests.helpers import ROOT, clean_env

CALLS = ("open", "write", "fsync", "close", "rename", "mkdir", "unlink", "rmdir", "link", "stat", "lock", "truncate")
"""In the order of `enum kind` of kill_at_call.c."""
FILES = ("manifest", "index", "tensors", "records", "lock", "shared test", "temporary", "checkpoint", "folder")
"""In the order of `patterns`."""
MOMENTS = ("before", "halfway", "after")
"""In the order of `enum moment`. Only a write can be cut off halfway."""
REPORT = struct.Struct(f"{len(CALLS) * len(FILES)}ll1024s")
"""`struct report`."""
HANG = 300.0
"""Seconds after which a start that needs two is taken to hang: each rank shows its stack and exits."""


@dataclass(frozen=True)
class Kill:
    """When a start is killed: at a call of a rank, or if `call` is empty, after a time."""

    rank: int
    call: str = ""
    file: str = "folder"
    number: int = 0
    """The number of the call, from 1, among those of this kind on this kind of file."""
    moment: str = "before"
    delay: float = 0.0
    everyone: bool = False
    """Kill all ranks at once; else only this one."""

    def __str__(self) -> str:
        who = "all ranks" if self.everyone else f"rank {self.rank}"
        if not self.call:
            return f"{who} after {self.delay:.3f} s"
        return f"{who} {self.moment} {self.call} {self.number} of the {self.file} by rank {self.rank}"


@dataclass(frozen=True)
class Start:
    """A start of a run, as it is sent to the process that forks the ranks."""

    argv: list[str]
    ranks: int
    output: str
    folder: str
    """Folder of the ranks' outputs and counts."""
    variables: dict[str, str]
    kill: dict[str, Any] | None = None
    patience: float = 0.0
    """Seconds from the end of a rank to the SIGTERM that torchrun would send to the others."""


@dataclass
class End:
    """How a start has ended."""

    codes: list[int]
    """Exit codes by rank; negative: the signal that has killed it."""
    left: bool = False
    """True if a process has outlived the ranks."""
    seconds: float = 0.0
    is_terminated: bool = False
    """True if ranks needed a SIGTERM to end."""


# -- in the process that forks, and in the ranks -----------------------------------------------------------------------


def serve() -> None:
    """Perform the starts that come in, one at a time."""
    _source_hash()  # kept for all starts, also if someone edits a file meanwhile
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: what outlives a rank is found here
    gc.collect()
    gc.freeze()  # a collection in a rank would copy the memory that it shares with this process
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot fork ranks"
    for line in sys.stdin:
        print(json.dumps(dataclasses.asdict(perform(Start(**json.loads(line)), libc))), flush=True)


def perform(start: Start, libc: ctypes.CDLL) -> End:
    """Start the ranks, wait for them as torchrun does, and kill them if it is time."""
    begin = time.monotonic()
    ready, go = os.pipe()
    pids: list[int] = []
    for rank in range(start.ranks):
        if (pid := os.fork()) == 0:
            os.setpgid(0, pids[0] if pids else 0)
            os.close(go)
            os.read(ready, 1)  # until all have started
            os.close(ready)
            libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
            be_rank(start, rank, libc)
        pids.append(pid)
        os.setpgid(pid, pids[0])
    os.close(ready)
    os.close(go)
    kill = Kill(**start.kill) if start.kill else None
    codes: dict[int, int] = {}
    first_end, is_terminated = 0.0, False
    while len(codes) < start.ranks:
        now = time.monotonic()
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            codes[pid] = os.waitstatus_to_exitcode(status)
            first_end = first_end or now
        elif pid == 0:
            time.sleep(0.002)
        if kill is not None and not kill.call and now - begin > kill.delay:
            send(signal.SIGKILL, [pid for pid in (pids if kill.everyone else [pids[kill.rank]]) if pid not in codes])
            kill = None
        if any(codes.values()) and now > first_end + start.patience and not is_terminated:
            is_terminated = len(codes) < start.ranks
            send(signal.SIGTERM, [pid for pid in pids if pid not in codes])
    seconds = time.monotonic() - begin
    return End([codes[pid] for pid in pids], outlived(pids[0]), seconds, is_terminated)


def send(number: signal.Signals, pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, number)


def outlived(group: int) -> bool:
    """Wait for the end of the processes of a group; if there are any after a minute, kill them and return True."""
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        try:
            os.killpg(group, signal.SIGKILL if time.monotonic() > deadline else 0)
        except ProcessLookupError:
            return time.monotonic() > deadline
        time.sleep(0.01)


def be_rank(start: Start, rank: int, libc: ctypes.CDLL) -> None:
    """Run the command of the start as one of its ranks; does not return."""
    kill = Kill(**start.kill) if start.kill else Kill(rank=-1)
    folder = Path(start.folder) / str(rank)
    folder.mkdir()
    call = CALLS.index(kill.call) if kill.call and kill.rank == rank else -1
    faulthandler.dump_traceback_later(HANG, exit=True, file=2)
    paths = (os.fsencode(path) for path in (folder / "calls", start.output))
    file, number = FILES.index(kill.file), ctypes.c_long(kill.number)
    libc.kill_at_call(*paths, call, file, number, MOMENTS.index(kill.moment), kill.everyone)
    command(start.argv, str(folder), {**start.variables, "RANK": str(rank), "LOCAL_RANK": str(rank)})


# -- in the process that decides --------------------------------------------------------------------------------------


class Forker:
    """The process that forks ranks, for one start at a time."""

    def __init__(self, library: Path):
        variables = {"LD_PRELOAD": str(library), "GLOO_SOCKET_IFNAME": "lo", "CS336_GIT_COMMIT": "soak"}
        words, env = [sys.executable, "-m", "tests.distributed.forked_starts"], clean_env(**variables)
        self.process = subprocess.Popen(words, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        """As torchrun keeps one over all restarts."""

    def perform(self, start: Start) -> End:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(dataclasses.asdict(start)).encode() + b"\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that forks ranks has ended with {self.process.wait()}")
        return End(**json.loads(answer))

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def build_library(folder: Path) -> Path:
    """Compile kill_at_call.c."""
    path = folder / "kill_at_call.so"
    source = Path(__file__).with_name("kill_at_call.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(path), str(source), "-ldl"], check=True)
    return path


@dataclass
class Seen:
    """The output of a start, and the number of its calls."""

    printed: list[str]
    errors: list[str]
    counts: list[dict[tuple[str, str], int]]
    """Rank -> call and file -> number of calls."""
    is_killed: bool
    where: str
    """Path of the call at which a rank was killed."""

    @classmethod
    def of(cls, folder: Path, ranks: int) -> "Seen":
        reports = [_report(folder / str(rank) / "calls") for rank in range(ranks)]
        texts = {name: [_text(folder / str(rank) / name) for rank in range(ranks)] for name in ("stdout", "stderr")}
        killed = [report for report in reports if report[-2]]
        return cls(
            texts["stdout"],
            texts["stderr"],
            [dict(zip(itertools.product(CALLS, FILES), report, strict=False)) for report in reports],
            bool(killed),
            killed[0][-1].rstrip(b"\0").decode() if killed else "",
        )

    def last(self, pattern: str) -> int | None:
        """Return the number in the last line of rank 0 that has this pattern."""
        found = re.findall(pattern, self.printed[0], re.MULTILINE)
        return int(found[-1]) if found else None

    @property
    def step(self) -> int | None:
        return self.last(r"^step (\d+)/")

    @property
    def saved(self) -> int:
        return self.last(r"^saved .*/step-(\d+)$") or 0

    @property
    def resumed_at(self) -> int | None:
        """The step at which training went on; None if the start was killed before."""
        first = re.search(r"^(?:step (\d+)/|nothing to do: all (\d+) steps)", self.printed[0], re.MULTILINE)
        found = self.last(r"^resumed at step (\d+)")
        return found if found is not None or first is None else int(first[2] or int(first[1]) - 1)

    def phase(self, kill: Kill) -> str:
        if kill.file == "records":
            return "record"
        if self.step is None:
            return "start"
        is_removal = kill.call in ("unlink", "rmdir") or (kill.call, kill.file) == ("rename", "checkpoint")
        return "removal" if is_removal else "save"


def _report(path: Path) -> tuple[Any, ...]:
    data = path.read_bytes() if path.exists() else b""  # a rank may be killed before it has made the file
    return REPORT.unpack(data.ljust(REPORT.size, b"\0"))


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


if __name__ == "__main__":
    serve()
