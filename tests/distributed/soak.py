"""A reliability soak of `cs336 train`, too long for the tests: two Gloo ranks, a tiny model, real processes.

    python -m tests.distributed.soak                                       # all checks: one to two hours on two cores
    python -m tests.distributed.soak --only R3,R8 --trials 5

    R1   40 steps at once against 20 and 20 more in new processes, for ten seeds and every wrapper
    R2   stopped after each of 12 steps and resumed, over the end of an epoch and with accumulation
    R3   one rank is killed at any moment, also in a start and in a save; the run is started again
    R4   all ranks and torchrun are killed in a save; the run is started again
    R7   SIGTERM, SIGINT and SIGUSR1 to torchrun in a start, a step, an evaluation and a save
    R8   torchrun restarts the ranks by itself, three times in a job
    R15  how long a save of 25 million parameters and their AdamW state stalls the training, also on a disk that stalls
    R16  memory, open files, threads and shared memory after 100 steps and after 1,000
    R17  losses of 200 steps of ddp, ddp-sharded and fsdp against one process
    R18  an environment that cannot work: one line that names the variable
    R19  random changes of manifests, indices and shards, half of them with hashes that match
    R20  each error at each phase of a save, on either of two ranks
    R23  ranks are killed at chosen calls of the operating system and at random times; wrapper and ranks change
    R24  two torchruns, as on two nodes: a rank is killed on one, then on the other
    R28  20 steps of torch's engine on 20 meshes of 2 to 8 ranks against one process
    R29  one run that changes engine, mesh and ranks 30 times, at random
    R30  torchrun restarts the ranks of torch's engine by itself, three times in a job
    R31  the predicted peak of 40 random layouts of torch's engine against a trace of its operators

In R3, R4, R8 and R23 one folder is killed and resumed again and again. The losses, weights, moments and random state of
its finished run must equal those of an undisturbed run to the bit. Prints a line for each check and writes all figures
to a JSON file, which keeps the results of checks that were not run. Times are reported and have no limit.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from cs336_systems.flags import build
from cs336_systems.measure.environment import capture
from cs336_systems.parallel.launch import process_group, spawn, this_rank
from cs336_systems.record import MIB
from cs336_systems.train.loop import Trainer
from cs336_systems.train.saving import SaveThread
from cs336_systems.train.settings import TrainSettings
from tests.distributed import meshes
from tests.distributed.checkpoint_cases import faults, saves_with_faults, survive_mutations
from tests.distributed.kills import AT_RANDOM, PROBLEMS, TOLERANCE, Campaign
from tests.distributed.train_cases import (
    Run,
    argv_of,
    checkpoints,
    is_same_run,
    losses_of,
    newest_intact,
    perform_all,
    temporaries,
    text_of,
)
from tests.distributed.train_cases import fields as tiny_fields
from tests.helpers import CPU_ONLY, ROOT, Marked
from tests.unit.predict import test_engine_memory

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
CS336 = ["-m", "cs336_systems"]
HANG = 600.0
"""Seconds after which a command that needs ten is taken to hang, and is killed."""

STEPS = 80
SAVE_EVERY = 5
REACH = 10
"""Most steps that a start trains before it is killed."""
RESTARTS = 3
GIVE_UP = 5
"""Failures after which a check ends."""
WRAPPERS = ("ddp", "ddp-sharded", "fsdp")
VARIANTS: list[dict[str, Any]] = [{"parallel": wrapper} for wrapper in WRAPPERS]
VARIANTS += [{"parallel": wrapper, "async_save": True} for wrapper in ("ddp", "fsdp")]
"""Each new folder takes the next one."""
AXES: list[dict[str, Any]] = [
    {"dp_replicate": 2},
    {"dp_shard": 2},
    {"tp": 2},
    {"cp": 2},
    {"pp": 2, "micro_batch_size": 1},
]
ENGINE_VARIANTS = [{"parallel": "ddp", "engine": "torch", "num_layers": 2, **axes} for axes in AXES]


class TrialError(Exception):
    """A failed trial: it is noted, and the next one starts."""


@dataclass(frozen=True)
class Figure:
    name: str
    value: float
    limit: float | None = None
    unit: str = ""
    exact: bool = False
    """True: the value must equal the limit; else it must not exceed it."""

    @property
    def ok(self) -> bool:
        return self.limit is None or (self.value == self.limit if self.exact else self.value <= self.limit)

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        limit = "" if self.limit is None else f" of {self.limit:g}" if self.exact else f" (<= {self.limit:g})"
        value = f"{self.value:,}" if isinstance(self.value, int) else f"{self.value:.3g}"
        return f"{self.name} {value}{unit}{limit}"


# -- processes --------------------------------------------------------------------------------------------------------


class Job(Marked):
    """A command, its output in one file, and the ranks it starts."""

    def text(self, since: int = 0) -> str:
        return self.log.read_bytes()[since:].decode(errors="replace")

    def last(self, pattern: str, since: int = 0) -> int | None:
        found = re.findall(pattern, self.text(since), re.MULTILINE)
        return int(found[-1]) if found else None

    def last_step(self, since: int = 0) -> int | None:
        return self.last(r"^step (\d+)/", since)

    def children(self) -> dict[int, dict[str, str]]:
        """Return the process ids of torchrun's own children, and the environment of each."""
        found = {}
        for pid in self.alive():
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
                parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == self.process.pid:
                    found[pid] = dict(entry.split("=", 1) for entry in variables if "=" in entry)
        return found

    def ranks(self, attempt: int = 0) -> dict[int, int]:
        """Return rank -> process id of torchrun's own children in this attempt."""
        each = self.children().items()
        return {int(ours["RANK"]): pid for pid, ours in each if ours.get("TORCHELASTIC_RESTART_COUNT") == str(attempt)}

    def wait(self) -> int:
        try:
            return self.process.wait(timeout=HANG)
        except subprocess.TimeoutExpired:
            raise TrialError(f"not ended after {HANG:g} s; its last output: {self.tail()}") from None

    def until(self, condition: Callable[[], bool], pause: float = 0.01) -> None:
        """Wait for a condition that comes true before the command ends."""
        deadline = time.monotonic() + HANG
        while not condition():
            if self.ended or time.monotonic() > deadline:
                raise TrialError(f"ended, or waited in vain; its last output: {self.tail()}")
            time.sleep(pause)

    def require_success(self) -> None:
        if (code := self.wait()) != 0:
            raise TrialError(f"exit code {code}: {self.tail()}")

    def tail(self) -> str:
        """Return the last output of the ranks, before torchrun's report of it."""
        printed = self.text().rpartition("failed (exitcode")[0] or self.text()
        return " | ".join(printed.strip().splitlines()[-8:])[-1500:]


@contextlib.contextmanager
def started(command: list[str], log: Path, **variables: str) -> Iterator[Job]:
    job = Job(command, ROOT, log, **variables)
    try:
        yield job
    finally:
        while pids := job.alive():  # again: one may have started another meanwhile
            kill(*pids)
            time.sleep(0.01)
        job.process.wait()


def kill(*pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@dataclass
class Lab:
    """The folder of a check, and its failures."""

    folder: Path
    failures: list[str] = field(default_factory=list)
    undisturbed: dict[str, str] = field(default_factory=dict)
    """Settings of a variant -> output of an undisturbed run."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def note(self, failure: str) -> None:
        failure = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", failure)  # no paths of this machine
        self.failures.append(failure)
        print(f"     {failure}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def trial(self, name: Any, settings: dict[str, Any]) -> Iterator[None]:
        """Note a failure, and remove the output."""
        try:
            yield
        except Exception as failure:  # also of outputs that cannot be read
            self.note(f"{name}: {type(failure).__name__}: {failure}")
        shutil.rmtree(settings["output"], ignore_errors=True)

    def fields(self, **changes: Any) -> dict[str, Any]:
        """Return the flags of a new, small run in a folder of its own."""
        (self.folder / "text.txt").write_bytes(text_of(5000))
        output = self.folder / f"run-{next(self._numbers)}"
        return tiny_fields(output, **{"data": "text.txt", "steps": STEPS, "save_every": SAVE_EVERY, **changes})

    def torchrun(self, settings: dict[str, Any], *options: str) -> contextlib.AbstractContextManager[Job]:
        return started([*TORCHRUN, *options, *CS336, *argv_of(settings)], self.folder / "output.txt")

    def require_undisturbed(self, settings: dict[str, Any]) -> None:
        """Require that a finished run equals an undisturbed one to the bit."""
        same = {name: value for name, value in settings.items() if name not in ("data", "output", "async_save")}
        if (key := str(same)) not in self.undisturbed:
            expected = self.fields(**same)
            with self.torchrun(expected) as job:
                job.require_success()
            self.undisturbed[key] = expected["output"]
        if not is_same_run(settings["output"], self.undisturbed[key], STEPS):
            raise TrialError("the result differs from that of an undisturbed run")


# -- stops ------------------------------------------------------------------------------------------------------------


def two_halves(lab: Lab, trials: int) -> list[Figure]:
    steps = 40
    return stop_and_resume(lab, [{"seed": seed, "steps": steps} for seed in range(trials)], [steps // 2])


def every_step(lab: Lab, trials: int) -> list[Figure]:
    """An epoch of 18 sequences ends within the fifth step and within the ninth."""
    short = lab.folder / "short.txt"
    short.write_bytes(text_of(330))
    variant = {"data": str(short), "micro_batch_size": 1, "steps": trials + 1}
    return stop_and_resume(lab, [variant], range(1, trials + 1))


def stop_and_resume(lab: Lab, variants: Sequence[dict[str, Any]], stops: Sequence[int]) -> list[Figure]:
    """Train each variant under each wrapper at once, and stopped after each of `stops` and resumed by new ranks."""
    whole, parts = {}, {}
    for variant, wrapper in itertools.product(variants, WRAPPERS):
        same = {**variant, "parallel": wrapper, "save_every": 1000}
        key = f"{wrapper} {variant}"
        whole[key] = Run(lab.fields(**same))
        parts.update({(key, stop): Run(lab.fields(**same), stop_after=stop) for stop in stops})
    spawn(perform_all, 2, {**whole, **parts}, timeout=4 * HANG)
    again = {key: dataclasses.replace(run, stop_after=None) for key, run in parts.items()}
    spawn(perform_all, 2, again, timeout=4 * HANG)
    equal = 0
    for (key, stop), run in parts.items():
        if is_same_run(run.fields["output"], whole[key].fields["output"], run.fields["steps"]):
            equal += 1
        else:
            lab.note(f"{key} stopped after step {stop}: differs")
    return [Figure("as in one go", equal, len(parts), exact=True)]


# -- kills ------------------------------------------------------------------------------------------------------------


def await_moment(job: Job, output: str, chance: random.Random, kind: str, since: int = 0) -> None:
    """Wait for a moment to strike, in a start, a step or a save."""
    if kind == "start":  # torch is imported, ranks meet, the checkpoint is loaded: 3 to 5 s
        time.sleep(chance.uniform(0, 5))
    else:
        job.until(lambda: job.last_step(since) is not None)
        target = (job.last_step(since) or 0) + chance.randrange(REACH)
        job.until(lambda: (job.last_step(since) or 0) >= target, pause=0.002)
        if kind == "save":
            job.until(lambda: bool(temporaries(output)), pause=0.0005)
        time.sleep(chance.uniform(0, 0.03))  # a step takes 10 ms, and a save 30 to 80
    if job.ended:
        raise TrialError(f"ended before the moment came: {job.tail()}")


@dataclass
class Tally:
    kills: int = 0
    in_saves: int = 0
    """Kills that left a temporary folder behind."""
    resumed: int = 0
    runs: int = 0
    equal: int = 0
    lost: dict[bool, int] = field(default_factory=dict)
    """Most steps lost, by whether saves were asynchronous."""
    gone: float = 0.0
    damaged: int = 0
    strays: int = 0


Strike = Callable[[Job, dict[int, int], random.Random], None]


def kill_one(job: Job, pids: dict[int, int], chance: random.Random) -> None:
    kill(pids[chance.randrange(2)])


def kill_all(job: Job, pids: dict[int, int], chance: random.Random) -> None:
    kill(*pids.values(), job.process.pid)


@dataclass
class Disturbance:
    """Runs that are killed and started again, folder after folder, until `is_enough`."""

    lab: Lab
    chance: random.Random
    moments: tuple[str, ...]
    strike: Strike
    is_enough: Callable[[Tally], bool]
    tally: Tally = field(default_factory=Tally)

    def run(self) -> list[Figure]:
        for variant in itertools.cycle(VARIANTS):
            if self.is_enough(self.tally) or len(self.lab.failures) >= GIVE_UP:
                break
            settings = self.lab.fields(**variant)
            self.tally.runs += 1
            with self.lab.trial(variant, settings):
                self._to_the_end(settings)
                self.lab.require_undisturbed(settings)
                self.tally.equal += 1
        return self._figures()

    def _to_the_end(self, settings: dict[str, Any]) -> None:
        """Start the run until it is done. A kill is survived when a later start has trained on."""
        waiting, output = 0, settings["output"]
        is_last = False
        while not is_last:
            before, strays = newest_intact(output), temporaries(output)
            is_last = self.is_enough(self.tally) or before + REACH + 2 * SAVE_EVERY > STEPS
            with self.lab.torchrun(settings) as job:
                if is_last:
                    job.require_success()
                else:
                    self._kill(job, settings, before, strays)
                if self._has_resumed(job, before):
                    self.tally.resumed += waiting
                    waiting = 0
                    self.tally.strays += len(set(strays) & set(temporaries(output)))
            waiting += 1

    def _kill(self, job: Job, settings: dict[str, Any], before: int, strays: list[str]) -> None:
        tally, output = self.tally, settings["output"]
        job.until(lambda: len(job.ranks()) == 2)
        pids = job.ranks()
        await_moment(job, output, self.chance, self.chance.choice(self.moments))
        begin = time.monotonic()
        self.strike(job, pids, self.chance)
        while job.alive():
            if time.monotonic() - begin > HANG:
                raise TrialError("processes are left after a kill")
            time.sleep(0.01)
        tally.gone = max(tally.gone, time.monotonic() - begin)
        tally.kills += 1
        tally.in_saves += bool(set(temporaries(output)) - set(strays))
        kept, is_async = newest_intact(output), "async_save" in settings
        tally.damaged += sum(step > kept for step in checkpoints(output))
        tally.lost[is_async] = max(tally.lost.get(is_async, 0), max(job.last_step() or 0, before) - kept)

    def _has_resumed(self, job: Job, before: int) -> bool:
        """Require the newest intact checkpoint; return False if the job was killed before it had loaded one."""
        found = job.last(r"^resumed at step (\d+)")
        if found is None and job.last_step() is None:
            return False
        if (found or 0) != before or "damaged" in job.text():
            raise TrialError(f"resumed at step {found or 0} instead of {before}: {job.tail()}")
        return True

    def _figures(self) -> list[Figure]:
        tally = self.tally
        return [
            Figure("resumed", tally.resumed, tally.kills, exact=True),
            Figure("runs as undisturbed", tally.equal, tally.runs, exact=True),
            # An asynchronous save may last until the next two are due: the first of them is left out.
            *(
                Figure(f"lost steps{' with async_save' * is_async}", lost, SAVE_EVERY * (4 if is_async else 1))
                for is_async, lost in sorted(tally.lost.items())
            ),
            Figure("processes gone after", tally.gone, unit="s"),
            Figure("damaged checkpoints", tally.damaged, 0),
            Figure("temporaries after a start", tally.strays, 0),
            Figure("kills in saves", tally.in_saves),
        ]


def one_rank_killed(lab: Lab, trials: int) -> list[Figure]:
    moments = ("start", "step", "step", "save", "save")
    return Disturbance(lab, random.Random(3), moments, kill_one, lambda tally: tally.kills >= trials).run()


def all_killed_in_a_save(lab: Lab, trials: int) -> list[Figure]:
    """A kill that came after the save does not count among the trials."""

    def is_enough(tally: Tally) -> bool:
        return tally.in_saves >= trials or tally.kills >= 3 * trials + 5

    *figures, kills = Disturbance(lab, random.Random(4), ("save",), kill_all, is_enough).run()
    return [*figures, Figure(kills.name, min(kills.value, trials), trials, exact=True)]


def finished_as_undisturbed(
    lab: Lab, trials: int, disturb: Callable[[dict[str, Any]], None], variants: Sequence[dict[str, Any]] = VARIANTS
) -> Figure:
    """Disturb one run after another, each to its end, and count those that equal an undisturbed run."""
    equal = 0
    for variant in itertools.islice(itertools.cycle(variants), trials):
        if len(lab.failures) >= GIVE_UP:
            break
        settings = lab.fields(**variant)
        with lab.trial(variant, settings):
            disturb(settings)
            lab.require_undisturbed(settings)
            equal += 1
    return Figure("finished as undisturbed", equal, trials, exact=True)


def restarted_by_torchrun(lab: Lab, trials: int, variants: Sequence[dict[str, Any]] = VARIANTS) -> list[Figure]:
    chance = random.Random(8)

    def disturb(settings: dict[str, Any]) -> None:
        with lab.torchrun(settings, f"--max-restarts={RESTARTS}") as job:
            for attempt in range(RESTARTS):
                job.until(lambda attempt=attempt: len(job.ranks(attempt)) == 2)
                since, pids = job.log.stat().st_size, job.ranks(attempt)
                await_moment(job, settings["output"], chance, chance.choice(("start", "step", "save")), since)
                kill_one(job, pids, chance)
            job.require_success()

    return [finished_as_undisturbed(lab, trials, disturb, variants), Figure("kills in each", RESTARTS)]


def engine_restarted_by_torchrun(lab: Lab, trials: int) -> list[Figure]:
    return restarted_by_torchrun(lab, trials, ENGINE_VARIANTS)


def restarted_on_two_nodes(lab: Lab, trials: int) -> list[Figure]:
    """Two torchruns with a rank each, as on two nodes: a rank is killed on one, then on the other."""

    def disturb(settings: dict[str, Any]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        nodes = f"--nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint {endpoint} --rdzv_id soak"
        torchrun = [sys.executable, "-m", "torch.distributed.run", *nodes.split(), f"--max-restarts={RESTARTS}"]
        command, logs = [*torchrun, *CS336, *argv_of(settings)], [lab.folder / f"node-{n}.txt" for n in (0, 1)]
        with started(command, logs[0]) as one, started(command, logs[1]) as other:
            for job in (one, other):
                before = max(checkpoints(settings["output"]), default=0)
                job.until(lambda b=before: max(checkpoints(settings["output"]), default=0) > b)
                kill(*job.children())
            for job in (one, other):
                job.require_success()

    return [finished_as_undisturbed(lab, trials, disturb), Figure("kills in each", 2)]


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def ended_by_signals(lab: Lab, trials: int) -> list[Figure]:
    """A signal ends the run with a checkpoint of the current step; resumed, it equals an undisturbed run."""
    chance, variants = random.Random(7), itertools.cycle(VARIANTS)
    cases = [*itertools.product(SIGNALS, ("start", "step", "evaluation", "save"))] * trials
    equal, slowest = 0, 0.0
    for number, kind in cases:
        settings = lab.fields(**next(variants), eval_every=2, eval_batches=20)
        with lab.trial(f"{number.name} in a {kind}", settings):
            slowest = max(slowest, end_by(lab, settings, number, kind, chance))
            with lab.torchrun(settings) as job:
                job.require_success()
            lab.require_undisturbed(settings)
            equal += 1
    return [Figure("saved, ended and resumed", equal, len(cases), exact=True), Figure("slowest end", slowest, unit="s")]


def end_by(lab: Lab, settings: dict[str, Any], number: signal.Signals, kind: str, chance: random.Random) -> float:
    """Send a signal; return the seconds until the command ended."""
    handled = ",".join(one.name for one in SIGNALS)
    with lab.torchrun(settings, f"--signals-to-handle={handled}") as job:
        job.until(lambda: len(job.ranks()) == 2)
        if kind == "evaluation":  # which takes most of the time between two steps
            job.until(lambda: bool(job.last_step()) and (job.last_step() or 0) % 2 == 0)
        else:
            await_moment(job, settings["output"], chance, kind)
        begin = time.monotonic()
        job.process.send_signal(number)
        code, seconds = job.wait(), time.monotonic() - begin
        if code == 0 or "Traceback" in job.text().partition("torch/distributed")[0] or job.alive():
            raise TrialError(f"exit code {code}, {len(job.alive())} processes left: {job.tail()}")
        reported, kept = job.last_step() or 0, newest_intact(settings["output"])
        if reported != kept:
            raise TrialError(f"reported step {reported}, kept step {kept}: {job.tail()}")
        return seconds


# -- cost and growth --------------------------------------------------------------------------------------------------

LARGE = {"context_length": 32, "d_model": 512, "num_layers": 8, "num_heads": 8, "d_ff": 1344, "batch_size": 2}
"""25 million parameters with a text's 256 tokens."""
STALLED = 20.0
"""Seconds that a disk stalls for."""


def stall_of_a_save(lab: Lab, trials: int) -> list[Figure]:
    figures = []
    for is_async in (False, True):
        settings = lab.fields(**LARGE, steps=48, save_every=8, async_save=is_async)
        (stalls,) = spawn(stalls_of, 1, settings, timeout=4 * HANG)
        kind = " with async_save" * is_async
        figures += [Figure(f"stall{kind}", statistics.median(stalls), unit="s")]
        figures += [Figure(f"longest stall{kind}", max(stalls), unit="s")]
    settings = lab.fields(**LARGE, steps=96, save_every=8, async_save=True)
    (stalls,) = spawn(stalls_of, 1, settings, STALLED, timeout=4 * HANG)
    return [
        *figures,
        Figure(f"longest stall with async_save and a disk that stalls for {STALLED:g} s", max(stalls), unit="s"),
    ]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def stalls_of(settings: dict[str, Any], disk_stalls: float = 0.0) -> list[float]:
    """Return the seconds that each save kept the training waiting, on a disk that may stall once. Runs in a rank."""
    trainer = Trainer(build(TrainSettings, settings), this_rank())
    stalls, save, fsync, pauses = [], trainer.saver.save, os.fsync, iter([disk_stalls])

    def late(descriptor: int) -> None:
        if isinstance(threading.current_thread(), SaveThread):
            time.sleep(next(pauses, 0.0))
        fsync(descriptor)

    def timed(*args: Any, **kwargs: Any) -> None:
        begin = time.perf_counter()
        save(*args, **kwargs)
        stalls.append(time.perf_counter() - begin)

    trainer.saver.save = timed  # type: ignore[method-assign]
    with quiet(), mock.patch.object(os, "fsync", late):
        assert trainer.run() == 0
    return stalls[:-1]  # the last is always waited for


def thousand_steps(lab: Lab, trials: int) -> list[Figure]:
    """Save and evaluate all the time; each figure is the worst of both ranks and of both kinds of save.

    torch keeps a record of the last 2,000 collectives, which fills up in 1,000 steps and is 1% of such a small process;
    here it holds 100.
    """
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    shape = {"steps": 1000, "save_every": 25, "eval_every": 50, "sample_tokens": 8, "log_every": 10}
    variants = [{"parallel": "ddp"}, {"parallel": "fsdp", "async_save": True}]
    found = [pair for way in variants for pair in spawn(growth, 2, lab.fields(**shape, **way), timeout=4 * HANG)]
    more = {name: max(after[name] - before[name] for before, after in found) for name in found[0][0]}
    relative = max(100 * (after["memory"] / before["memory"] - 1) for before, after in found)
    return [
        Figure("memory growth", relative, 1.0, "%"),
        *(Figure(f"more {name}", more[name], 0) for name in ("open files", "threads", "entries in /dev/shm")),
        Figure("memory", max(after["memory"] for _, after in found) / MIB, unit="MiB"),
    ]


def growth(settings: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the resources of this rank after 100 steps, and at the end."""
    trainer = Trainer(build(TrainSettings, settings), this_rank())
    with quiet():
        trainer.run(stop_after=100)
        before = resources()
        assert trainer.run() == 0
        return before, resources()


def resources() -> dict[str, int]:
    return {
        "memory": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "entries in /dev/shm": len(os.listdir("/dev/shm")),
    }


def same_losses(lab: Lab, trials: int) -> list[Figure]:
    shape = {"steps": 200, "save_every": 200, "warmup_steps": 20, "batch_size": 8, "num_layers": 2, "d_model": 32}
    alone = lab.fields(**shape, parallel="none")
    shared = {wrapper: lab.fields(**shape, parallel=wrapper) for wrapper in WRAPPERS}
    spawn(perform_all, 1, {"alone": Run(alone)}, timeout=HANG)
    ranks = spawn(perform_all, 2, {name: Run(settings) for name, settings in shared.items()}, timeout=2 * HANG)
    expected, figures = losses_of(alone["output"]), []
    for name, settings in shared.items():
        pairs = zip(losses_of(settings["output"]), expected, strict=True)
        figures.append(Figure(name, max(abs(one - other) / other for one, other in pairs), 1e-4))
    zero, one = ({(name, key): w for name in shared for key, w in rank[name].weights.items()} for rank in ranks)
    differing = sum(not torch.equal(value, one[key]) for key, value in zero.items())
    return [*figures, Figure("weights that differ between ranks", differing, 0)]


def meshes_against_one_process(lab: Lab, trials: int) -> list[Figure]:
    found = meshes.against_one_process(lab.folder, 20, meshes.TORCH, lab.note)
    return [
        Figure("meshes", len(found), len(meshes.TORCH), exact=True),
        Figure("largest difference of a loss", max(each.losses for each in found.values()), TOLERANCE),
        Figure("largest difference of a weight", max(each.weights for each in found.values()), TOLERANCE),
        *(Figure(f"weights, {name}", each.weights, TOLERANCE) for name, each in found.items()),
    ]


def random_switches(lab: Lab, trials: int) -> list[Figure]:
    found, ways = meshes.switched(lab.folder, trials, seed=29)
    return [
        Figure("switches", len(ways) - 1),
        Figure("different ways", len(set(ways))),
        Figure("largest difference of a loss", found.losses, TOLERANCE),
        Figure("largest difference of a weight", found.weights, TOLERANCE),
    ]


def predicted_peaks(lab: Lab, trials: int) -> list[Figure]:
    largest = max(abs(test_engine_memory.error_of(seed)) for seed in range(trials))
    return [Figure("layouts", trials), Figure("largest error", largest, test_engine_memory.TOLERANCE)]


# -- environments that cannot work ------------------------------------------------------------------------------------

TORCHELASTIC = {
    "TORCHELASTIC_RUN_ID": "soak",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
}
"""The variables of rank 0 of two, as torchrun sets them; without the port."""


def bad_environments(lab: Lab, trials: int) -> list[Figure]:
    with socket.create_server(("", 0)) as taken, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        used, unused = (str(one.getsockname()[1]) for one in (taken, free))
        free.close()
        good = {**TORCHELASTIC, "MASTER_PORT": unused}
        cases: list[tuple[str, str | None]] = [("MASTER_PORT", used), ("MASTER_ADDR", "no-such-host.invalid")]
        cases += [(name, None) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")]
        cases += [("RANK", "two"), ("RANK", "2"), ("RANK", "-1"), ("WORLD_SIZE", "0"), ("LOCAL_RANK", "x")]
        cases += [("MASTER_PORT", "70000"), ("MASTER_PORT", "http")]
        reported = 0
        for name, value in cases:
            settings = lab.fields(steps=2)
            variables = {key: other for key, other in {**good, name: value}.items() if other is not None}
            shown = f"{name} {'missing' if value is None else 'in use' if value == used else value}"
            command = [sys.executable, *CS336, *argv_of(settings)]
            with lab.trial(shown, settings), started(command, lab.folder / "output.txt", **variables) as job:
                if job.wait() != 2 or len(job.text().splitlines()) != 1 or not re.search(rf"\b{name}\b", job.text()):
                    raise TrialError(f"not exit code 2 and one line that names {name}: {job.tail()}")
                reported += 1
    return [Figure("reported", reported, len(cases), exact=True)]


# -- changed checkpoints and failing disks ----------------------------------------------------------------------------


def random_changes(lab: Lab, trials: int) -> list[Figure]:
    with process_group("gloo", "cpu"):
        found = survive_mutations(lab.folder, trials)
    allowed = ("noticed", "loaded right")
    for outcome in found.keys() - set(allowed):
        lab.note(f"{found[outcome]} times {outcome}")
    return [Figure("noticed or loaded right", sum(found[name] for name in allowed), trials, exact=True)] + [
        Figure(name, found[name]) for name in allowed
    ]


def faults_in_saves(lab: Lab, trials: int) -> list[Figure]:
    for on in (0, 1):
        by_rank = spawn(saves_with_faults, 2, lab.folder, on, faults(on), timeout=HANG)
        for failure in itertools.chain.from_iterable(by_rank):
            lab.note(failure)
    return [Figure("faults", len(faults(0) + faults(1))), Figure("not survived", len(lab.failures), 0)]


# -- kills at calls of the operating system ---------------------------------------------------------------------------


def killed_at_calls(lab: Lab, trials: int) -> list[Figure]:
    tally = Campaign(lab.folder, trials, GIVE_UP, lab.note).run()
    kills = sum(tally.kills.values())
    counts = [
        *((call if call == AT_RANDOM else f"at {call}", count) for call, count in tally.kills.most_common()),
        *((f"{moment} the call", count) for moment, count in tally.moments.most_common()),
        *((f"call on {file}", count) for file, count in tally.files.most_common()),
        *((f"call in {phase}", count) for phase, count in tally.phases.most_common()),
        *((f"under {way}", count) for way, count in sorted(tally.ways.items())),
        ("one rank killed, the others left alone", tally.left_alone),
        ("the others ended by themselves", tally.ended_alone),
    ]
    return [
        Figure("kills", kills),
        Figure("resumed", tally.resumed, kills, exact=True),
        *(Figure(problem, tally.problems[problem], 0) for problem in PROBLEMS),
        Figure("runs as undisturbed to the bit", tally.equal, tally.runs - tally.changing, exact=True),
        Figure("runs as undisturbed with changing wrappers and ranks", tally.close, tally.changing, exact=True),
        Figure("their largest difference", tally.difference, TOLERANCE),
        *(Figure(f"lost steps{' with async_save' * is_async}", lost) for is_async, lost in tally.lost.items()),
        Figure("slowest start", tally.slowest, unit="s"),
        *(Figure(name, count) for name, count in counts),
    ]


# -- the command ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    what: str
    work: Callable[[Lab, int], list[Figure]]
    trials: int = 1


CHECKS = {
    "R1": Check("two halves", two_halves, 10),
    "R2": Check("stopped after every step", every_step, 12),
    "R3": Check("one rank killed at any moment", one_rank_killed, 100),
    "R4": Check("all ranks killed in a save", all_killed_in_a_save, 100),
    "R7": Check("ended by signals", ended_by_signals),
    "R8": Check("restarts by torchrun", restarted_by_torchrun, 20),
    "R15": Check("a save of 25 million parameters", stall_of_a_save),
    "R16": Check("1,000 steps", thousand_steps),
    "R17": Check("losses against one process", same_losses),
    "R18": Check("environments that cannot work", bad_environments),
    "R19": Check("random changes of checkpoints", random_changes, 2000),
    "R20": Check("faults at each phase of a save", faults_in_saves),
    "R23": Check("kills at calls of the operating system", killed_at_calls, 1000),
    "R24": Check("restarts on two nodes", restarted_on_two_nodes, 10),
    "R28": Check("meshes of torch's engine against one process", meshes_against_one_process),
    "R29": Check("random switches of engine, mesh and ranks", random_switches, 30),
    "R30": Check("restarts of torch's engine by torchrun", engine_restarted_by_torchrun, 10),
    "R31": Check("predicted peaks of torch's engine", predicted_peaks, 40),
}


def carry_out(name: str, check: Check, trials: int) -> dict[str, Any]:
    """Run a check, print its line, and return its entry in the JSON file."""
    begin = time.monotonic()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="cs336-soak-") as folder:
        lab = Lab(Path(folder))
        try:
            figures = check.work(lab, trials)
        except Exception as error:  # the other checks go on
            lab.note(f"{type(error).__name__}: {error}")
    environment, seconds = capture("cpu"), round(time.monotonic() - begin, 1)
    ok = not lab.failures and all(figure.ok for figure in figures)
    shown = ", ".join(str(figure) for figure in figures) or "no figures"
    print(f"{name:4} {check.what}: {shown}  {'ok' if ok else 'FAILED'}  {seconds:.0f} s", flush=True)
    return {
        "what": check.what,
        "ok": ok,
        "trials": trials,
        "seconds": seconds,
        "figures": [{**dataclasses.asdict(figure), "ok": figure.ok} for figure in figures],
        "failures": lab.failures,
        **{name: getattr(environment, name) for name in ("python", "torch", "cpu", "cpu_cores", "git_commit", "utc")},
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CHECKS), help="checks, separated by commas")
    parser.add_argument(
        "--trials",
        type=int,
        help="trials of R1, R2, R3, R4, R8, R19, R23, R24, R29, R30, R31: "
        "10, 12, 100, 100, 20, 2,000, 1,000, 10, 30, 10, 40",
    )
    parser.add_argument("--output", type=Path, default=Path("results/reliability/soak.json"))
    arguments = parser.parse_args(argv)
    names = [name.strip() for name in arguments.only.split(",") if name.strip()]
    if unknown := [name for name in names if name not in CHECKS]:
        parser.error(f"no check {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    if arguments.trials is not None and arguments.trials < 1:
        parser.error("--trials must be at least 1")
    os.environ.update(CPU_ONLY)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what was started, as Ctrl-C does
    path: Path = arguments.output
    try:
        results = json.loads(path.read_text()) if path.exists() else {}
    except ValueError:
        parser.error(f"{path} is not JSON; name another --output")
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in (name for name in CHECKS if name in names):
        check = CHECKS[name]
        results[name] = carry_out(
            name, check, arguments.trials if check.trials > 1 and arguments.trials else check.trials
        )
        temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
        temporary.write_text(json.dumps(results, indent=1) + "\n")
        os.replace(temporary, path)  # atomically: it may hold hours of work
    return 0 if all(results[name]["ok"] for name in names) else 1


if __name__ == "__main__":
    sys.exit(main())
