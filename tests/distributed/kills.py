"""Training runs that are killed at a chosen call of the operating system or at a random time, and started again.

    python -m tests.distributed.kills        # a process that starts ranks, one start for each line of JSON on its input

That process has torch imported and forks the ranks, so that a start takes a second. `kill_at_call.c` is loaded into it:
in a rank, it counts the calls that concern files of the run, and kills the rank or the whole group before, within or
after one of them. `Campaign` kills each run again and again until it is done, and compares it with an undisturbed run.
"""

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from cs336_systems import record
from cs336_systems.train.loop import STOPPED
from tests.distributed.train_cases import (
    argv_of,
    checkpoints,
    command,
    fields,
    is_intact,
    is_same_run,
    losses_of,
    newest_intact,
    state_of,
    temporaries,
    text_of,
)
from tests.helpers import ROOT, clean_env

CALLS = ("open", "write", "fsync", "close", "rename", "mkdir", "unlink", "rmdir", "link", "stat", "lock", "truncate")
"""In the order of `enum kind` of kill_at_call.c."""
FILES = ("manifest", "index", "tensors", "records", "lock", "shared test", "temporary", "checkpoint", "folder")
"""In the order of `patterns`."""
MOMENTS = ("before", "halfway", "after")
"""In the order of `enum moment`. Only a write can be cut off halfway."""
REPORT = struct.Struct(f"{len(CALLS) * len(FILES)}ll1024s")
"""`struct report`."""
HANG = 120.0
"""Seconds after which a start that needs two is taken to hang: each rank shows its stack and exits."""
STEPS = 12
SAVE_EVERY = 2
REACH = 3
"""A start is killed in the first of this many equal parts of a run, so that a run is killed several times."""
RUN = {"steps": STEPS, "save_every": SAVE_EVERY, "batch_size": 6}  # which can be divided by 1, 2 and 3 ranks
RUN |= {"keep_best": 1, "eval_every": 2 * SAVE_EVERY, "eval_batches": 1, "sample_tokens": 1}
RANDOM_SHARE = 0.3
"""Of the kills, at a random time."""
TOLERANCE = 1e-6
EXPECTED_NAMES = re.compile(rf"\.lock|{record.RECORDS}|checkpoints|step-\d{{8}}")
"""Of the files in the folders of a finished run."""
WORKERS = 3
"""Runs at a time. Ranks that have lost one of them wait for two seconds before they end."""


class Way(NamedTuple):
    """How a run is started."""

    wrapper: str
    ranks: int
    is_async: bool

    def __str__(self) -> str:
        return f"{self.wrapper} on {self.ranks}{' async' * self.is_async}"


WRAPPERS = ("ddp", "ddp-sharded", "fsdp")
FIXED = [Way("none", 1, False), Way("none", 1, True)]
FIXED += [Way(wrapper, 2, is_async) for wrapper in WRAPPERS for is_async in (False, True)]
EVERY = FIXED + [Way(*one) for one in itertools.product(WRAPPERS, (1, 3), (False, True))]
CHANGING = None
VARIANTS = [*FIXED, CHANGING, CHANGING, CHANGING]
"""Each new run takes the next one: a way, or CHANGING, where each start takes a random way of EVERY."""


class FailedTrialError(Exception):
    """What was expected of a start, and was not so."""


# -- the process that forks ranks -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """When a start is killed: at a call of a rank, or if `call` is empty, after a time."""

    rank: int
    call: str = ""
    file: str = "folder"
    number: int = 0
    """Of the calls of this kind that concern this kind of file, from 1."""
    moment: str = "before"
    delay: float = 0.0
    everyone: bool = False
    """Kill all ranks at once; else only this one."""

    def __str__(self) -> str:
        when = f"{self.moment} {self.call} {self.number} of {self.file}" if self.call else f"after {self.delay:.3f} s"
        return f"{'all ranks' if self.everyone else f'rank {self.rank}'} {when} of rank {self.rank}"


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
    left: int = 0
    """Processes that outlived the ranks."""
    seconds: float = 0.0
    is_terminated: bool = False
    """Whether ranks needed a SIGTERM to end."""


def serve() -> None:
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
    return End([codes[pid] for pid in pids], remaining(pids[0]), seconds, is_terminated)


def send(number: signal.Signals, pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, number)


def remaining(group: int) -> int:
    """Wait for the processes of a group; return 1 if there are any after some seconds, and kill them."""
    deadline = time.monotonic() + 10
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        try:
            os.killpg(group, signal.SIGKILL if time.monotonic() > deadline else 0)
        except ProcessLookupError:
            return int(time.monotonic() > deadline)
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


# -- the process that decides -----------------------------------------------------------------------------------------


class Forker:
    """The process that forks ranks, for one start at a time."""

    def __init__(self, library: Path):
        variables = {"LD_PRELOAD": str(library), "GLOO_SOCKET_IFNAME": "lo", "CS336_GIT_COMMIT": "soak"}
        words, env = [sys.executable, "-m", "tests.distributed.kills"], clean_env(**variables)
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
class Tally:
    """What all trials have shown."""

    kills: Counter[str] = field(default_factory=Counter)
    """By call, or "random time"."""
    files: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    """By wrapper and way of saving, and for runs whose wrapper and ranks change."""
    resumed: int = 0
    """Kills after which a later start has trained on or found nothing to do."""
    ended_alone: int = 0
    """Kills of one rank after which the others ended before SIGTERM."""
    runs: int = 0
    equal: int = 0
    """Runs that equal an undisturbed one to the bit."""
    changing: int = 0
    """Runs whose wrapper and ranks changed."""
    close: int = 0
    """Those of them that are within TOLERANCE of an undisturbed run."""
    difference: float = 0.0
    """Largest relative difference of those."""
    lost: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    """Most steps lost that were not to be saved by a save that was left out, by whether saves were asynchronous."""
    slowest: float = 0.0
    """Most seconds of a start."""


@dataclass
class Seen:
    """What a start has printed, and what its calls were."""

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


@dataclass
class Campaign:
    """Runs that are killed and started again, until there were `trials` kills or too many failures."""

    folder: Path
    trials: int
    give_up: int
    note: Callable[[str], None]
    tally: Tally = field(default_factory=Tally)
    counts: dict[Way, list[dict[tuple[str, str], int]]] = field(default_factory=dict)
    """Calls of an undisturbed run, by rank."""
    seconds: dict[Way, float] = field(default_factory=dict)
    """Duration of the last start that was not killed."""
    failures: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _attempts: Iterator[int] = field(default_factory=itertools.count)

    def run(self) -> Tally:
        (self.folder / "text.txt").write_bytes(text_of(5000))
        library = build_library(self.folder)
        forkers = [Forker(library) for _ in range(WORKERS)]
        try:
            with concurrent.futures.ThreadPoolExecutor(WORKERS) as threads:
                ways = iter(EVERY)
                list(threads.map(lambda forker: self._each(self._undisturbed, forker, ways), forkers))
                variants = itertools.cycle(VARIANTS)
                list(threads.map(lambda forker: self._each(self._disturbed, forker, variants), forkers))
        finally:
            for forker in forkers:
                forker.close()
        return self.tally

    def _each(self, work: Callable[[Forker, Any], None], forker: Forker, items: Iterator[Any]) -> None:
        """Work on one item after another, beside the other threads."""
        while True:
            with self._lock:
                if self.failures >= self.give_up or self._is_enough():
                    return
                try:
                    item = next(items)
                except StopIteration:
                    return
            try:
                work(forker, item)
            except Exception as error:
                with self._lock:
                    self.failures += 1
                    self.note(f"{type(error).__name__}: {error}")

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _undisturbed(self, forker: Forker, way: Way) -> None:
        """Train without a kill: for the comparison, and for the counts of calls."""
        output = self._output_of(way)
        end, seen = self._start(forker, way, output, None)
        if any(end.codes):
            raise FailedTrialError(f"{way} without a kill: exit codes {end.codes}: {_tail(seen)}")
        with self._lock:
            self.counts[way], self.seconds[way] = seen.counts, end.seconds

    def _disturbed(self, forker: Forker, variant: Way | None) -> None:
        """Start a run until it is done, kill it in each start, and compare the result."""
        number, waiting = next(self._numbers), 0
        chance, output = random.Random(f"kills of run {number}"), self.folder / f"run-{number}"
        is_done = False
        while not is_done:
            way = variant or chance.choice(EVERY)
            kill = None if self._is_enough() else self._choose(way, output, chance)
            before, strays = newest_intact(str(output)), temporaries(output)
            end, seen = self._start(forker, way, output, kill, chance.choice((0.1, 6.0)))
            is_done = not any(end.codes)
            try:
                waiting += self._count(way, variant, kill, end, seen)
                _require_clean_end(end, seen)
                _require_resumed(output, before, strays, seen)
                self._require_kept(way, output, before, seen)
            except Exception as error:
                text = f"{type(error).__name__}: {error}; exit codes {end.codes}; {_tail(seen)}"
                raise FailedTrialError(f"run {number}, {way}, {kill} at {seen.where!r}: {text}") from None
            if seen.resumed_at is not None:
                with self._lock:
                    self.tally.resumed += waiting
                waiting = 0
        self._compare(number, variant, output)
        shutil.rmtree(output)

    def _choose(self, way: Way, output: Path, chance: random.Random) -> Kill:
        everyone = way.ranks > 1 and chance.random() < 0.5
        if chance.random() < RANDOM_SHARE:
            delay = chance.uniform(0, self.seconds[way] * 2 / REACH)
            return Kill(chance.randrange(way.ranks), delay=delay, everyone=everyone)
        counts = {(rank, *point): n for rank, each in enumerate(self.counts[way]) for point, n in each.items() if n}
        if _is_torn(output / record.RECORDS) and chance.random() < 0.5:  # the next append cuts the last line off
            counts = {(0, "truncate", "records"): 1}
        points = [(point, moment) for point in counts for moment in ("before", "after")]
        points += 4 * [(point, "halfway") for point in counts if "write" in point]  # leaves a torn file
        point, moment = chance.choice(points)
        number = chance.randint(1, math.ceil(counts[point] / REACH))
        return Kill(*point, number, moment, everyone=everyone)

    def _start(
        self, forker: Forker, way: Way, output: Path, kill: Kill | None, patience: float = 0.1
    ) -> tuple[End, Seen]:
        with self._lock:
            attempt = next(self._attempts)
        folder = self.folder / f"start-{attempt}"
        is_async = {"async_save": True} if way.is_async else {}
        flags = fields(output, "text.txt", **RUN, parallel=way.wrapper, **is_async)
        torchrun = {
            "TORCHELASTIC_RUN_ID": "kills",
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(way.ranks),
            "LOCAL_WORLD_SIZE": str(way.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(forker.store.port),
        }
        variables = {} if way.wrapper == "none" else torchrun
        plan = None if kill is None else dataclasses.asdict(kill)
        folder.mkdir()
        start = Start(argv_of(flags), way.ranks, str(output), str(folder), variables, plan, patience)
        end = forker.perform(start)
        seen = Seen.of(folder, way.ranks)
        shutil.rmtree(folder)
        return end, seen

    def _output_of(self, way: Way) -> Path:
        return self.folder / str(way).replace(" ", "-")

    def _is_enough(self) -> bool:
        return sum(self.tally.kills.values()) >= self.trials

    # -- checks -------------------------------------------------------------------------------------------------------

    def _count(self, way: Way, variant: Way | None, kill: Kill | None, end: End, seen: Seen) -> bool:
        """Count the kill; return False if the start has ended before."""
        with self._lock:
            tally = self.tally
            tally.slowest = max(tally.slowest, end.seconds)
            if kill is None or not (seen.is_killed if kill.call else -signal.SIGKILL in end.codes):
                return False
            tally.kills[kill.call or "random time"] += 1
            if kill.call:
                tally.moments[kill.moment] += 1
                tally.files[kill.file] += 1
                tally.phases[seen.phase(kill)] += 1
            tally.ways[f"{way.wrapper}{' async' * way.is_async}" if variant else "changing"] += 1
            tally.ended_alone += way.ranks > 1 and not kill.everyone and not end.is_terminated
            return True

    def _require_kept(self, way: Way, output: Path, before: int, seen: Seen) -> None:
        """Require that no checkpoint is lost, and no more steps than those since the last one."""
        kept, reported = newest_intact(str(output)), max(before, seen.saved)
        damaged = [step for step, path in checkpoints(output).items() if not is_intact(path)]
        if kept < reported or damaged:
            raise FailedTrialError(f"step {kept} is the newest, {reported} was saved, damaged are {damaged}")
        # An asynchronous save may last until the next one is due, or longer: then that one is left out, and reported.
        left_out = seen.errors[0].count("is still running on rank")
        lost, limit = (
            max(seen.step or 0, before) - kept - SAVE_EVERY * left_out,
            SAVE_EVERY * (2 if way.is_async else 1),
        )
        if lost > limit or (left_out and not way.is_async):
            raise FailedTrialError(f"{lost} steps are lost, more than {limit}")
        if (output / record.RECORDS).exists():
            record.load(output)
        with self._lock:
            self.tally.lost[way.is_async] = max(self.tally.lost[way.is_async], lost)

    def _compare(self, number: int, variant: Way | None, output: Path) -> None:
        """Compare a finished run with an undisturbed one."""
        expected = self._output_of(variant or EVERY[0])
        with self._lock:
            self.tally.runs += 1
            names = {path.name for path in output.iterdir()} | {
                path.name for path in (output / "checkpoints").iterdir()
            }
            if odd := sorted(name for name in names if not EXPECTED_NAMES.fullmatch(name)):
                raise FailedTrialError(f"run {number}: {odd} are left in its folder")
            if variant is not None:
                if not is_same_run(str(output), str(expected), STEPS):
                    raise FailedTrialError(f"run {number}, {variant}: the result differs from an undisturbed run's")
                self.tally.equal += 1
                return
            difference = difference_of(output, expected)
            self.tally.changing += 1
            self.tally.difference = max(self.tally.difference, difference)
            if difference > TOLERANCE:
                raise FailedTrialError(f"run {number}, changing: a difference of {difference:.2g}")
            self.tally.close += 1


def _require_clean_end(end: End, seen: Seen) -> None:
    if any("Timeout (" in text for text in seen.errors):
        raise FailedTrialError("a rank hangs")
    if end.left:
        raise FailedTrialError("processes are left after the ranks")
    if any("Traceback" in text for text in seen.errors):
        raise FailedTrialError("a rank shows a traceback")
    if unknown := set(end.codes) - {0, 1, STOPPED, -signal.SIGKILL, -signal.SIGTERM}:
        raise FailedTrialError(f"unexpected exit codes {unknown}")
    if any(end.codes) and not seen.is_killed and -signal.SIGKILL not in end.codes:
        raise FailedTrialError("a start that was not killed has failed")


def _require_resumed(output: Path, before: int, strays: list[str], seen: Seen) -> None:
    """Require that training went on at the newest checkpoint, and that the start has tidied up."""
    if seen.resumed_at is None:
        return
    if seen.resumed_at != before or "damaged" in seen.errors[0]:
        raise FailedTrialError(f"resumed at step {seen.resumed_at} instead of {before}")
    if left := set(strays) & set(temporaries(output)):
        raise FailedTrialError(f"{sorted(left)} are left after a start")


def _is_torn(path: Path) -> bool:
    return path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0


def _tail(seen: Seen) -> str:
    """Return the last output of each rank."""
    texts = [
        " | ".join((out + err).strip().splitlines()[-40:])[-2500:]
        for out, err in zip(seen.printed, seen.errors, strict=True)
    ]
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))


def difference_of(output: Path, other: Path) -> float:
    """Return the largest relative difference of the losses, and of the weights, each to the largest of its tensor."""
    pairs = list(zip(losses_of(output), losses_of(other), strict=True))
    found, expected = (state_of(checkpoints(each)[STEPS]) for each in (output, other))
    weights = [name for name in expected if name.startswith("model/")]
    return max(
        *(abs(one - two) / abs(two) for one, two in pairs),
        *(float((found[name] - expected[name]).abs().max() / expected[name].abs().max()) for name in weights),
    )


if __name__ == "__main__":
    serve()
