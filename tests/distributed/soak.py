"""A reliability soak of `cs336 train`: what takes too long for the tests. Two Gloo ranks, a tiny model, real processes.

    python -m tests.distributed.soak                                       # everything: an hour on two cores, or two
    python -m tests.distributed.soak --only R3,R8 --trials 5

    R1   40 steps at once against 20 and 20 more in new processes, for ten seeds and every way to share the work
    R2   stopped after each of 12 steps and gone on with, over the end of an epoch and with accumulation
    R3   one rank is killed at any moment, also in a start and in a save; the run is started again
    R4   all ranks and torchrun are killed in a save; the run is started again
    R7   SIGTERM, SIGINT and SIGUSR1 to torchrun in a start, a step, an evaluation and a save
    R8   torchrun restarts the ranks by itself, three times in a job
    R15  how long a save of 25 million parameters and their AdamW state keeps the training waiting
    R16  memory, open files, threads and shared memory after 100 steps and after 1,000
    R17  losses of 200 steps of ddp, ddp-sharded and fsdp against one process
    R18  an environment that cannot work: one line that names the variable, at once

In R3, R4 and R8 one folder is killed and gone on from again and again. When its run is done its losses, weights,
AdamW's moments and random numbers must be those of a run that nobody has disturbed, bit by bit. A line for each check,
and all figures in a JSON file, in which the results of checks that were not run this time are kept.
"""

import argparse
import contextlib
import dataclasses
import hashlib
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
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from cs336_systems.measure.environment import capture
from cs336_systems.parallel.launch import spawn, this_rank
from cs336_systems.record import MIB
from cs336_systems.train.loop import Trainer
from cs336_systems.train.settings import TrainSettings
from tests.distributed.test_train import checkpoints, leftovers, losses_of, text_of
from tests.distributed.test_train import fields as tiny_fields
from tests.distributed.train_cases import Run, play
from tests.helpers import CPU_ONLY, ROOT, Marked, clean_env

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
CS336 = ["-m", "cs336_systems"]
LIMIT = 240.0
"""Seconds for what needs ten on a quiet machine. Past it something hangs, and it is killed."""
GONE_LIMIT = 35.0
"""torchrun ends the other ranks with SIGTERM, and 30 s later with SIGKILL."""

STEPS = 80
SAVE_EVERY = 5
REACH = 10
"""Most steps that a start may train before the moment of its kill is looked for."""
RESTARTS = 3
GIVE_UP = 5
"""Failures after which a check ends: what is broken need not be shown a hundred times."""
HAS_ASYNC = "async_save" in {spec.name for spec in dataclasses.fields(TrainSettings)}
VARIANTS: list[dict[str, Any]] = [{"parallel": parallel} for parallel in ("ddp", "fsdp", "ddp-sharded")]
VARIANTS += [{"parallel": parallel, "async_save": True} for parallel in ("ddp", "fsdp") if HAS_ASYNC]
"""A new folder takes the next."""


class TrialError(Exception):
    """Of one trial: it is noted, and the next one goes on."""


@dataclass(frozen=True)
class Figure:
    name: str
    value: float
    limit: float | None = None
    unit: str = ""
    exact: bool = False
    """The limit is what must be reached, not what must not be passed."""

    @property
    def ok(self) -> bool:
        return self.limit is None or (self.value == self.limit if self.exact else self.value <= self.limit)

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        limit = "" if self.limit is None else f" of {self.limit:g}" if self.exact else f" (<= {self.limit:g})"
        return f"{self.name} {self.value:.3g}{unit}{limit}"


# -- processes --------------------------------------------------------------------------------------------------------


class Job(Marked):
    """A command, all it says in one file, and the ranks it starts."""

    def __init__(self, command: list[str], log: Path, variables: dict[str, str]):
        self.mark = f"CS336_SOAK_MARK={uuid.uuid4().hex}"
        self.log = log
        name, value = self.mark.split("=")
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=clean_env(**{name: value}, **variables),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self, since: int = 0) -> str:
        return self.log.read_bytes()[since:].decode(errors="replace")

    def last_step(self, since: int = 0) -> int | None:
        """The last that rank 0 has told of."""
        found = re.findall(r"^step (\d+)/", self.text(since), re.MULTILINE)
        return int(found[-1]) if found else None

    def resumed_at(self) -> int | None:
        found = re.findall(r"^resumed at step (\d+)", self.text(), re.MULTILINE)
        return int(found[-1]) if found else None

    def ranks(self, attempt: int = 0) -> dict[int, int]:
        """Rank -> process id, of torchrun's own children: a rank may have started others, which inherit its rank."""
        found = {}
        for pid in self.alive():
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
                parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
                ours = dict(entry.split("=", 1) for entry in variables if "=" in entry)
                if int(parent) == self.process.pid and ours.get("TORCHELASTIC_RESTART_COUNT") == str(attempt):
                    found[int(ours["RANK"])] = pid
        return found

    def wait(self, seconds: float = LIMIT) -> int:
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise TrialError(f"not ended after {seconds:g} s; it said last: {self.tail()}") from None

    def until(self, condition: Callable[[], bool], pause: float = 0.01) -> bool:
        """Whether `condition` came true before the command ended."""
        deadline = time.monotonic() + LIMIT
        while not condition():
            if self.ended:
                return condition()
            if time.monotonic() > deadline:
                raise TrialError(f"waited {LIMIT:g} s for nothing; it said last: {self.tail()}")
            time.sleep(pause)
        return True

    def tail(self) -> str:
        """The last of what the ranks have said, before torchrun's long account of it."""
        said = self.text().rpartition("failed (exitcode")[0] or self.text()
        return " | ".join(said.strip().splitlines()[-8:])[-1500:]


@contextlib.contextmanager
def started(command: list[str], log: Path, **variables: str) -> Iterator[Job]:
    job = Job(command, log, variables)
    try:
        yield job
    finally:
        deadline = time.monotonic() + 10
        while (pids := job.alive()) and time.monotonic() < deadline:  # again: one may have started another meanwhile
            kill(*pids)
            time.sleep(0.01)
        job.process.wait(timeout=10)


def kill(*pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def words(settings: dict[str, Any]) -> list[str]:
    """As flags of the command."""
    flags = [[f"--{name}"] if value is True else [f"--{name}", str(value)] for name, value in settings.items()]
    return ["train", *itertools.chain.from_iterable(flags)]


@dataclass
class Lab:
    """The folder of a check, and what went wrong in it."""

    folder: Path
    failures: list[str] = field(default_factory=list)
    undisturbed: dict[str, str] = field(default_factory=dict)
    """The way to share the work -> output of a run that nobody has disturbed."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def note(self, failure: str) -> None:
        failure = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", failure)  # where files lie is this machine's business
        self.failures.append(failure)
        print(f"     {failure}", file=sys.stderr, flush=True)

    def fields(self, **changes: Any) -> dict[str, Any]:
        """Of a new run in a folder of its own, as small as it gets."""
        (self.folder / "text.txt").write_bytes(text_of(5000))
        output = self.folder / f"run-{next(self._numbers)}"
        return tiny_fields(output, **{"data": "text.txt", "steps": STEPS, "save_every": SAVE_EVERY, **changes})

    def torchrun(self, settings: dict[str, Any], *options: str) -> contextlib.AbstractContextManager[Job]:
        return started([*TORCHRUN, *options, *CS336, *words(settings)], self.folder / "said.txt")

    def require_undisturbed(self, settings: dict[str, Any]) -> None:
        """What a finished run has left must be what it would have been."""
        parallel = settings["parallel"]
        if parallel not in self.undisturbed:
            expected = self.fields(parallel=parallel)
            with self.torchrun(expected) as job:
                if job.wait() != 0:
                    raise TrialError(f"an undisturbed run failed: {job.tail()}")
            self.undisturbed[parallel] = expected["output"]
        if not is_same_run(settings["output"], self.undisturbed[parallel], STEPS):
            raise TrialError("the result differs from that of an undisturbed run")


# -- checkpoints ------------------------------------------------------------------------------------------------------


def is_whole(checkpoint: Path) -> bool:
    """By the hashes of its manifest, read here by other code than that under test."""
    try:
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
        return all(
            hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() == entry["sha256"]
            for name, entry in files.items()
        )
    except (OSError, ValueError):
        return False


def newest_whole(output: str) -> int:
    return max((step for step, path in checkpoints(output).items() if is_whole(path)), default=0)


def temporaries(output: str) -> list[str]:
    return leftovers(output) if (Path(output) / "checkpoints").exists() else []


def state_of(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of it: weights, moments and random numbers, of whatever ranks."""
    reader = FileSystemReader(checkpoint)
    entries = reader.read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it should be here
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def is_same_run(output: str, other: str, steps: int) -> bool:
    """To the bit: losses, weights, moments and random numbers."""
    found, expected = (state_of(checkpoints(each)[steps]) for each in (output, other))
    return (
        found.keys() == expected.keys()
        and all(torch.equal(value, expected[name]) for name, value in found.items())
        and losses_of(output) == losses_of(other)
    )


# -- stops ------------------------------------------------------------------------------------------------------------


def halves(lab: Lab, trials: int) -> list[Figure]:
    steps = 40
    return gone_on(lab, [{"seed": seed, "steps": steps} for seed in range(trials)], [steps // 2])


def every_step(lab: Lab, trials: int) -> list[Figure]:
    """An epoch of 18 sequences ends within the fifth step and within the ninth."""
    short = lab.folder / "short.txt"
    short.write_bytes(text_of(330))
    return gone_on(lab, [{"data": str(short), "micro_batch_size": 1, "steps": trials + 1}], range(1, trials + 1))


def gone_on(lab: Lab, variants: Sequence[dict[str, Any]], stops: Sequence[int]) -> list[Figure]:
    """Each variant under each wrapper in one go, and stopped after each of `stops` and gone on with by new ranks."""
    whole, parts = {}, {}
    for variant, parallel in itertools.product(variants, ("ddp", "ddp-sharded", "fsdp")):
        same = {**variant, "parallel": parallel, "save_every": 1000}
        key = f"{parallel} {variant}"
        whole[key] = Run(lab.fields(**same))
        parts.update({(key, stop): Run(lab.fields(**same), stop_after=stop) for stop in stops})
    spawn(play, 2, {**whole, **parts}, timeout=4 * LIMIT)
    spawn(play, 2, {key: dataclasses.replace(run, stop_after=None) for key, run in parts.items()}, timeout=4 * LIMIT)
    equal = 0
    for (key, stop), run in parts.items():
        if is_same_run(run.fields["output"], whole[key].fields["output"], run.fields["steps"]):
            equal += 1
        else:
            lab.note(f"{key} stopped after step {stop}: differs")
    return [Figure("as in one go", equal, len(parts), exact=True)]


# -- kills ------------------------------------------------------------------------------------------------------------


def moment(job: Job, output: str, chance: random.Random, kind: str, since: int = 0) -> bool:
    """Wait for a moment to kill at, in a start, a step or a save; whether it came before the command ended."""
    if kind == "start":  # torch is imported, ranks meet, the checkpoint is loaded: 3 to 5 s
        time.sleep(chance.uniform(0, 5))
        return not job.ended
    at_least = chance.randint(1, REACH)
    first = None

    def has_come() -> bool:
        nonlocal first
        done = job.last_step(since)
        if first is None:
            first = done
        return done is not None and first is not None and done - first + 1 >= at_least

    if not job.until(has_come, pause=0.002):
        return False
    if kind == "save" and not job.until(lambda: bool(temporaries(output)), pause=0.0005):
        return False
    time.sleep(chance.uniform(0, 0.03))  # a step takes 10 ms, and a save 30 to 80
    return True


@dataclass
class Tally:
    kills: int = 0
    in_saves: int = 0
    """Those that left a temporary folder behind."""
    resumed: int = 0
    runs: int = 0
    equal: int = 0
    lost: dict[bool, int] = field(default_factory=dict)
    """Whether saves were asynchronous -> most steps."""
    gone: float = 0.0
    orphans: int = 0
    damaged: int = 0
    strays: int = 0


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
    strike: Callable[[Job, dict[int, int], random.Random], None]
    is_enough: Callable[[Tally], bool]
    tally: Tally = field(default_factory=Tally)

    def carry_out(self) -> Tally:
        for variant in itertools.cycle(VARIANTS):
            if self.is_enough(self.tally) or len(self.lab.failures) >= GIVE_UP:
                break
            settings = self.lab.fields(**variant)
            self.tally.runs += 1
            try:
                self._to_the_end(settings)
                self.lab.require_undisturbed(settings)
                self.tally.equal += 1
            except Exception as failure:  # also of what a run has left behind, and cannot be read
                self.lab.note(f"{variant}: {type(failure).__name__}: {failure}")
            shutil.rmtree(settings["output"], ignore_errors=True)
        return self.tally

    def _to_the_end(self, settings: dict[str, Any]) -> None:
        """Start the run until it is done. A kill counts as survived when a later start has trained on."""
        waiting, output = 0, settings["output"]
        while True:
            before, strays = newest_whole(output), temporaries(output)
            is_last = self.is_enough(self.tally) or before + REACH + 2 * SAVE_EVERY > STEPS
            with self.lab.torchrun(settings) as job:
                if is_last:
                    if job.wait() != 0:
                        raise TrialError(f"the last start failed: {job.tail()}")
                else:
                    self._kill(job, settings, before, strays)
                if self._has_resumed(job, before):
                    self.tally.resumed += waiting
                    waiting = 0
                    self.tally.strays += len(set(strays) & set(temporaries(output)))
            if is_last:
                return
            waiting += 1

    def _kill(self, job: Job, settings: dict[str, Any], before: int, strays: list[str]) -> None:
        tally, output = self.tally, settings["output"]
        has_ranks = job.until(lambda: len(job.ranks()) == 2)
        pids, kind = job.ranks(), self.chance.choice(self.moments)
        if not has_ranks or not moment(job, output, self.chance, kind):
            raise TrialError(f"it ended before it was killed: {job.tail()}")
        begin = time.monotonic()
        self.strike(job, pids, self.chance)
        while job.alive() and time.monotonic() - begin < 2 * GONE_LIMIT:
            time.sleep(0.01)
        tally.gone = max(tally.gone, time.monotonic() - begin)
        tally.orphans += len(job.alive())
        tally.kills += 1
        tally.in_saves += bool(set(temporaries(output)) - set(strays))
        kept = newest_whole(output)
        tally.damaged += sum(step > kept for step in checkpoints(output))
        lost, beside = max(job.last_step() or 0, before) - kept, "async_save" in settings
        tally.lost[beside] = max(tally.lost.get(beside, 0), lost)

    def _has_resumed(self, job: Job, before: int) -> bool:
        """From the newest checkpoint that is whole. Not yet, if it was killed as it started."""
        found = job.resumed_at()
        if found is None and job.last_step() is None:
            return False
        if (found or 0) != before or "damaged" in job.text():
            raise TrialError(f"resumed at step {found or 0} instead of {before}: {job.tail()}")
        return True


def figures_of(tally: Tally) -> list[Figure]:
    return [
        Figure("resumed", tally.resumed, tally.kills, exact=True),
        Figure("runs as undisturbed", tally.equal, tally.runs, exact=True),
        # Asynchronously, a checkpoint may be written until the next one is due.
        *(
            Figure(f"lost steps{' with async_save' * beside}", lost, SAVE_EVERY * (2 if beside else 1))
            for beside, lost in sorted(tally.lost.items())
        ),
        Figure("processes gone after", tally.gone, GONE_LIMIT, "s"),
        Figure("orphans", tally.orphans, 0),
        Figure("damaged checkpoints", tally.damaged, 0),
        Figure("temporaries after a start", tally.strays, 0),
        Figure("kills in saves", tally.in_saves),
    ]


def one_rank_killed(lab: Lab, trials: int) -> list[Figure]:
    moments = ("start", "step", "step", "save", "save")
    disturbance = Disturbance(lab, random.Random(3), moments, kill_one, lambda tally: tally.kills >= trials)
    return figures_of(disturbance.carry_out())


def all_killed_in_a_save(lab: Lab, trials: int) -> list[Figure]:
    """A kill that came when the save was done is one more, not one of the trials."""

    def is_enough(tally: Tally) -> bool:
        return tally.in_saves >= trials or tally.kills >= 3 * trials + 5

    tally = Disturbance(lab, random.Random(4), ("save",), kill_all, is_enough).carry_out()
    shown = [figure for figure in figures_of(tally) if figure.name != "kills in saves"]
    return [Figure("kills in saves", min(tally.in_saves, trials), trials, exact=True), *shown]


def restarted_by_torchrun(lab: Lab, trials: int) -> list[Figure]:
    chance = random.Random(8)
    finished = equal = 0
    back: list[float] = []
    for _, variant in zip(range(trials), itertools.cycle(VARIANTS), strict=False):
        if len(lab.failures) >= GIVE_UP:
            break
        settings = lab.fields(**variant)
        try:
            with lab.torchrun(settings, f"--max-restarts={RESTARTS}") as job:
                back += [seconds for seconds in killed_attempts(job, settings["output"], chance) if seconds]
                if job.wait() != 0:
                    raise TrialError(f"ended with an error: {job.tail()}")
            finished += 1
            lab.require_undisturbed(settings)
            equal += 1
        except Exception as failure:
            lab.note(f"{variant}: {type(failure).__name__}: {failure}")
        shutil.rmtree(settings["output"], ignore_errors=True)
    return [
        Figure("jobs finished", finished, trials, exact=True),
        Figure("as undisturbed", equal, trials, exact=True),
        Figure("kills in each", RESTARTS),
        Figure("longest until it trains again", max(back, default=0.0), unit="s"),
    ]


def killed_attempts(job: Job, output: str, chance: random.Random) -> Iterator[float]:
    """Kills a rank in every attempt but the last; seconds from a kill to the next step, where it was waited for."""
    killed_at = None
    for attempt in range(RESTARTS + 1):
        if not job.until(lambda attempt=attempt: len(job.ranks(attempt)) == 2):
            raise TrialError(f"ended in attempt {attempt}: {job.tail()}")
        since, pids = job.log.stat().st_size, job.ranks(attempt)
        kind = chance.choice(("start", "step", "save"))
        if kind != "start" or attempt == RESTARTS:
            if not job.until(lambda since=since: job.last_step(since) is not None):
                raise TrialError(f"no step in attempt {attempt}: {job.tail()}")
            yield time.monotonic() - killed_at if killed_at else 0.0
        if attempt == RESTARTS:
            return
        if not moment(job, output, chance, kind, since):
            raise TrialError(f"ended in attempt {attempt} before it was killed: {job.tail()}")
        kill_one(job, pids, chance)
        killed_at = time.monotonic()


# -- signals ----------------------------------------------------------------------------------------------------------

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
ENDS_WITHIN = 5.0


def signalled(lab: Lab, trials: int) -> list[Figure]:
    """Ends with a checkpoint of the step it was in, and gone on with it is the run that nobody has stopped."""
    chance, ways = random.Random(7), itertools.cycle(VARIANTS)
    cases = [*itertools.product(SIGNALS, ("start", "step", "evaluation", "save"))] * trials
    saved = equal = orphans = 0
    slowest = 0.0
    for number, kind in cases:
        settings = lab.fields(**next(ways), eval_every=2, eval_batches=20)
        try:
            seconds, left = end_by(lab, settings, number, kind, chance)
            slowest, orphans, saved = max(slowest, seconds), orphans + left, saved + 1
            with lab.torchrun(settings) as job:
                if job.wait() != 0:
                    raise TrialError(f"cannot be gone on with: {job.tail()}")
            lab.require_undisturbed(settings)
            equal += 1
        except Exception as failure:
            lab.note(f"{number.name} in a {kind}: {type(failure).__name__}: {failure}")
        shutil.rmtree(settings["output"], ignore_errors=True)
    return [
        Figure("saved and ended", saved, len(cases), exact=True),
        Figure("as undisturbed", equal, len(cases), exact=True),
        Figure("slowest end", slowest, ENDS_WITHIN, "s"),
        Figure("orphans", orphans, 0),
    ]


def end_by(lab: Lab, settings: dict[str, Any], number: signal.Signals, kind: str, chance: random.Random) -> tuple:
    """Seconds until all processes were gone, and how many were not."""
    handled = ",".join(one.name for one in SIGNALS)
    with lab.torchrun(settings, f"--signals-to-handle={handled}") as job:
        if not job.until(lambda: len(job.ranks()) == 2):
            raise TrialError(f"ended before the signal: {job.tail()}")
        if kind == "evaluation":  # which takes most of the time between two steps
            job.until(lambda: (job.last_step() or 0) % 2 == 0 and bool(job.last_step()))
        elif not moment(job, settings["output"], chance, kind):
            raise TrialError(f"ended before the signal: {job.tail()}")
        begin = time.monotonic()
        job.process.send_signal(number)
        code, seconds = job.wait(), time.monotonic() - begin
        if code == 0 or "Traceback" in job.text().partition("torch/distributed")[0]:
            raise TrialError(f"exit code {code}: {job.tail()}")
        told, kept = job.last_step() or 0, newest_whole(settings["output"])
        if told != kept:
            raise TrialError(f"told of step {told}, kept step {kept}: {job.tail()}")
        return seconds, len(job.alive())


# -- the cost of a save -----------------------------------------------------------------------------------------------

LARGE = {"context_length": 32, "d_model": 512, "num_layers": 8, "num_heads": 8, "d_ff": 1344, "batch_size": 2}
"""25 million parameters with a text's 256 tokens; little work in a step, and still longer than a save between two."""
SAVES = 5
STEPS_BETWEEN = 8


def stall_of_a_save(lab: Lab, trials: int) -> list[Figure]:
    shape = {**LARGE, "steps": (SAVES + 1) * STEPS_BETWEEN, "save_every": STEPS_BETWEEN}
    (parts,) = spawn(stalls, 1, lab.fields(**shape), timeout=4 * LIMIT)
    middle = {name: statistics.median(values) for name, values in parts.items()}
    figures = [
        Figure("stall", middle["all"], 1.0, "s"),
        Figure("longest stall", max(parts["all"]), unit="s"),
        *(Figure(name, middle[name], unit="s") for name in ("write", "fsync", "hash and rest")),
    ]
    if HAS_ASYNC:
        (beside,) = spawn(stalls, 1, lab.fields(**shape, async_save=True), timeout=4 * LIMIT)
        figures.append(Figure("stall with async_save", statistics.median(beside["all"]), 0.2, "s"))
        figures.append(Figure("longest stall with async_save", max(beside["all"]), unit="s"))
    return figures


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


Spans = list[tuple[float, float]]


def stalls(settings: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds between two steps, for each save, and what they went into. Runs in a rank."""
    trainer = Trainer(TrainSettings(**settings), this_rank())
    assert trainer.log is not None
    steps: Spans = []
    tell = trainer.log.step

    def noted(*arguments: Any) -> None:
        end = time.perf_counter()
        steps.append((end - arguments[-1], end))
        tell(*arguments)
        steps[-1] = (steps[-1][0], time.perf_counter())  # recording it is no part of the save

    trainer.log.step = noted
    with quiet(), timed(dcp, "save") as written, timed(os, "fsync") as synced:
        assert trainer.run() == 0
    parts: dict[str, list[float]] = {"all": [], "write": [], "fsync": [], "hash and rest": []}
    for step, ((_, begin), (end, _)) in enumerate(itertools.pairwise(steps), 1):
        if step % settings["save_every"] == 0:
            write, fsync = within(written, begin, end), within(synced, begin, end)
            of_write = sum(within(synced, *span) for span in written if begin <= span[0] < end)
            parts["all"].append(end - begin)
            parts["write"].append(write - of_write)
            parts["fsync"].append(fsync)
            parts["hash and rest"].append(end - begin - write - (fsync - of_write))
    return parts


@contextlib.contextmanager
def timed(owner: Any, name: str) -> Iterator[Spans]:
    """When each call of `owner.name` began and ended."""
    spans: Spans = []
    real = getattr(owner, name)

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return real(*args, **kwargs)
        finally:
            spans.append((begin, time.perf_counter()))

    with mock.patch.object(owner, name, stand_in):
        yield spans


def within(spans: Spans, begin: float, end: float) -> float:
    return sum(max(0.0, min(last, end) - max(first, begin)) for first, last in spans)


# -- many steps -------------------------------------------------------------------------------------------------------


def thousand_steps(lab: Lab, trials: int) -> list[Figure]:
    """With saves and evaluations all the time. Each figure is the worst of both ranks and of both kinds of save.

    torch keeps a record of the last 2,000 collectives, which is full after 1,000 steps and is 1 % of such a small
    process; here it is one of 100.
    """
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    shape = {"steps": 1000, "save_every": 25, "eval_every": 50, "sample_tokens": 8, "log_every": 10}
    variants = [{"parallel": "ddp"}, {"parallel": "fsdp", **({"async_save": True} if HAS_ASYNC else {})}]
    found = [pair for way in variants for pair in spawn(grown, 2, lab.fields(**shape, **way), timeout=4 * LIMIT)]
    more = {name: max(after[name] - before[name] for before, after in found) for name in found[0][0]}
    growth = max(100 * (after["memory"] / before["memory"] - 1) for before, after in found)
    return [
        Figure("memory growth", growth, 1.0, "%"),
        *(Figure(f"more {name}", more[name], 0) for name in ("open files", "threads", "entries in /dev/shm")),
        Figure("memory", max(after["memory"] for _, after in found) / MIB, unit="MiB"),
    ]


def grown(settings: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """What this rank holds after 100 steps, and at the end."""
    trainer = Trainer(TrainSettings(**settings), this_rank())
    with quiet():
        trainer.run(stop_after=100)
        before = held()
        assert trainer.run() == 0
        return before, held()


def held() -> dict[str, int]:
    return {
        "memory": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "entries in /dev/shm": len(os.listdir("/dev/shm")),
    }


def same_losses(lab: Lab, trials: int) -> list[Figure]:
    shape = {"steps": 200, "save_every": 200, "warmup_steps": 20, "batch_size": 8, "num_layers": 2, "d_model": 32}
    alone = lab.fields(**shape, parallel="none")
    shared = {parallel: lab.fields(**shape, parallel=parallel) for parallel in ("ddp", "ddp-sharded", "fsdp")}
    spawn(play, 1, {"alone": Run(alone)}, timeout=LIMIT)
    ranks = spawn(play, 2, {name: Run(settings) for name, settings in shared.items()}, timeout=2 * LIMIT)
    expected, figures = losses_of(alone["output"]), []
    assert len(expected) == 200
    for name, settings in shared.items():
        pairs = zip(losses_of(settings["output"]), expected, strict=True)
        figures.append(Figure(name, max(abs(one - other) / other for one, other in pairs), 1e-4))
    differing = sum(
        not torch.equal(value, ranks[1][name].weights[key])
        for name in shared
        for key, value in ranks[0][name].weights.items()
    )
    return [*figures, Figure("weights that differ between ranks", differing, 0)]


# -- environments that cannot work ------------------------------------------------------------------------------------

TORCHELASTIC = {
    "TORCHELASTIC_RUN_ID": "soak",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
}
"""Of rank 0 of two, as torchrun would set it; without the port."""
TOLD_WITHIN = 10.0


def bad_environments(lab: Lab, trials: int) -> list[Figure]:
    with socket.create_server(("", 0)) as taken, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        used, unused = (str(one.getsockname()[1]) for one in (taken, free))
        free.close()
        good = {**TORCHELASTIC, "MASTER_PORT": unused}
        cases: list[tuple[str, str | None]] = [("MASTER_PORT", used), ("MASTER_ADDR", "no-such-host.invalid")]
        cases += [(name, None) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")]
        cases += [("RANK", "two"), ("RANK", "2"), ("RANK", "-1"), ("WORLD_SIZE", "0"), ("LOCAL_RANK", "x")]
        cases += [("MASTER_PORT", "70000"), ("MASTER_PORT", "http"), ("TORCHELASTIC_RESTART_COUNT", "x")]
        slowest, told = 0.0, 0
        for name, value in cases:
            settings = lab.fields(steps=2)
            variables = {key: other for key, other in {**good, name: value}.items() if other is not None}
            shown = f"{name} {'missing' if value is None else 'in use' if value == used else value}"
            try:
                seconds = told_after(lab, settings, variables, name)
                if seconds > TOLD_WITHIN:  # was the machine busy?
                    seconds = min(seconds, told_after(lab, settings, variables, name))
                slowest, told = max(slowest, seconds), told + 1
            except TrialError as failure:
                lab.note(f"{shown}: {failure}")
    return [Figure("told", told, len(cases), exact=True), Figure("slowest", slowest, TOLD_WITHIN, "s")]


def told_after(lab: Lab, settings: dict[str, Any], variables: dict[str, str], name: str) -> float:
    """Seconds to a proper end: exit code 2, and one line that names the variable."""
    begin = time.monotonic()
    with started([sys.executable, *CS336, *words(settings)], lab.folder / "said.txt", **variables) as job:
        code, seconds = job.wait(3 * TOLD_WITHIN), time.monotonic() - begin
        if code != 2:
            raise TrialError(f"exit code {code}: {job.tail()}")
        if len(job.text().splitlines()) != 1 or not re.search(rf"\b{name}\b", job.text()):
            raise TrialError(f"not one line that names {name}: {job.tail()}")
    return seconds


# -- all of them ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    what: str
    work: Callable[[Lab, int], list[Figure]]
    trials: int = 1


CHECKS = {
    "R1": Check("two halves", halves, 10),
    "R2": Check("stopped after every step", every_step, 12),
    "R3": Check("one rank killed at any moment", one_rank_killed, 100),
    "R4": Check("all ranks killed in a save", all_killed_in_a_save, 100),
    "R7": Check("ended by signals", signalled),
    "R8": Check("restarts by torchrun", restarted_by_torchrun, 20),
    "R15": Check("a save of 25 million parameters", stall_of_a_save),
    "R16": Check("1,000 steps", thousand_steps),
    "R17": Check("losses against one process", same_losses),
    "R18": Check("environments that cannot work", bad_environments),
}


def perform(check: Check, trials: int) -> dict[str, Any]:
    begin = time.monotonic()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="cs336-soak-") as folder:
        lab = Lab(Path(folder))
        try:
            figures = check.work(lab, trials)
        except Exception as error:  # the other checks go on
            lab.note(f"{type(error).__name__}: {error}")
    environment = capture("cpu")
    return {
        "what": check.what,
        "ok": not lab.failures and all(figure.ok for figure in figures),
        "trials": trials,
        "seconds": round(time.monotonic() - begin, 1),
        "figures": [{**dataclasses.asdict(figure), "ok": figure.ok} for figure in figures],
        "failures": lab.failures,
        **{name: getattr(environment, name) for name in ("python", "torch", "cpu", "cpu_cores", "git_commit", "utc")},
    }


def line_of(name: str, result: dict[str, Any]) -> str:
    figures = [Figure(**{key: value for key, value in entry.items() if key != "ok"}) for entry in result["figures"]]
    said = ", ".join(str(figure) for figure in figures) or "no figures"
    return f"{name:4} {result['what']}: {said}  {'ok' if result['ok'] else 'FAILED'}  {result['seconds']:.0f} s"


def write(path: Path, results: dict[str, Any]) -> None:
    """All or nothing: it may hold hours of work."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    beside.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(beside, path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CHECKS), help="checks, with commas between")
    parser.add_argument("--trials", type=int, help="of R1, R2, R3, R4 and R8, instead of 10, 12, 100, 100 and 20")
    parser.add_argument("--output", type=Path, default=Path("results/reliability/soak.json"))
    arguments = parser.parse_args(argv)
    names = [name.strip() for name in arguments.only.split(",") if name.strip()]
    if unknown := [name for name in names if name not in CHECKS]:
        parser.error(f"no check {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    if arguments.trials is not None and arguments.trials < 1:
        parser.error("--trials must be at least 1")
    os.environ.update(CPU_ONLY)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended, as with Ctrl-C
    try:
        results = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    except ValueError:
        parser.error(f"{arguments.output} is not JSON; name another --output")
    all_ok = True
    for name in (name for name in CHECKS if name in names):
        check = CHECKS[name]
        trials = arguments.trials if arguments.trials and check.trials > 1 else check.trials
        result = perform(check, trials)
        results[name] = result
        write(arguments.output, results)
        print(line_of(name, result), flush=True)
        all_ok = all_ok and result["ok"]
    return 0 if all_ok else 1


if __name__ == "__main__":
    sys.exit(main())
