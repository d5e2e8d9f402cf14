"""Training runs that are killed in every start until they are done, and compared with undisturbed runs."""

import concurrent.futures
import dataclasses
import itertools
import math
import random
import re
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cs336_systems import record
from cs336_systems.config import UserError
from cs336_systems.train.loop import STOPPED
from tests.distributed.forked_starts import End, Forker, Kill, Seen, Start, build_library
from tests.distributed.train_cases import (
    argv_of,
    checkpoints,
    fields,
    is_intact,
    is_same_run,
    losses_of,
    newest_intact,
    state_of,
    temporaries,
    text_of,
)

STEPS = 12
SAVE_EVERY = 2
REACH = 3
"""A start is killed in the first of this many equal parts of a run, so that a run is killed several times."""
RUN = {"steps": STEPS, "save_every": SAVE_EVERY, "batch_size": 6}  # which can be divided by 1, 2 and 3 ranks
RUN |= {"keep_best": 1, "eval_every": 2 * SAVE_EVERY, "eval_batches": 1, "sample_tokens": 1}
RANDOM_SHARE = 0.3
"""Share of the kills that come at a random time."""
TOLERANCE = 1e-6
EXPECTED_NAMES = re.compile(rf"\.lock|{record.RECORDS}|checkpoints|step-\d{{8}}")
"""Names of the files in the folders of a finished run."""
PATIENCE = 6.0
"""Seconds that ranks have to end by themselves after one was killed; every other time, torchrun's 0.1 s."""
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


AT_RANDOM = "at a random time"
PROBLEMS = (
    "hangs",
    "processes left",
    "unexpected ends",
    "resumed from another checkpoint",
    "temporaries after a start",
    "saved checkpoints lost",
    "damaged checkpoints",
    "too many steps lost",
    "records that cannot be read",
    "results that differ",
)


class FailedTrialError(Exception):
    """One of PROBLEMS, and what was seen of it."""

    def __init__(self, problem: str, details: object = ""):
        super().__init__(f"{problem}: {details}")
        self.problem = problem


@dataclass
class Tally:
    """The results of all trials."""

    kills: Counter[str] = field(default_factory=Counter)
    """By call, or AT_RANDOM."""
    files: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    """By wrapper and way of saving, and for runs whose wrapper and ranks change."""
    problems: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    """Kills after which a later start has trained on or found nothing to do."""
    left_alone: int = 0
    """Kills of one rank after which the others had seconds to end before SIGTERM."""
    ended_alone: int = 0
    """Those of them after which they ended in time. A rank that waits for the others to come does not."""
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
    """Duration of an undisturbed start, as it was lately."""
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
                    self.tally.problems[getattr(error, "problem", "others")] += 1
                    self.note(f"{type(error).__name__}: {error}")

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _undisturbed(self, forker: Forker, way: Way) -> None:
        """Train without a kill: for the comparison, and for the counts of calls."""
        output = self._output_of(way)
        end, seen = self._start(forker, way, output, None)
        if any(end.codes):
            raise FailedTrialError("unexpected ends", f"{way} without a kill: {end.codes}; {_tail(seen)}")
        with self._lock:
            self.counts[way], self.seconds[way] = seen.counts, end.seconds

    def _disturbed(self, forker: Forker, variant: Way | None) -> None:
        """Start a run until it is done, kill it in each start, and compare the result."""
        with self._lock:
            number = next(self._numbers)
        chance, output = random.Random(f"kills of run {number}"), self.folder / f"run-{number}"
        waiting, is_done = 0, False
        while not is_done:
            way = variant or chance.choice(EVERY)
            kill = None if self._is_enough() else self._choose(way, output, chance)
            before, strays, patience = newest_intact(str(output)), temporaries(output), chance.choice((0.1, PATIENCE))
            end, seen = self._start(forker, way, output, kill, patience)
            is_done = not any(end.codes)
            try:
                if kill is not None and (seen.is_killed if kill.call else -signal.SIGKILL in end.codes):
                    self._count(way, variant, kill, end, seen, patience)
                    waiting += 1
                if kill is not None and not kill.call:
                    self._learn(way, seen.resumed_at is None, is_done)
                _require_clean_end(end, seen)
                _require_resumed(output, before, strays, seen)
                self._require_kept(way, output, before, seen)
                if is_done:
                    self._compare(variant, output)
            except FailedTrialError as error:
                details = f"run {number}, {way}, {kill} at {seen.where!r}; {error}; {end.codes}; {_tail(seen)}"
                raise FailedTrialError(error.problem, details) from None
            if seen.resumed_at is not None:
                with self._lock:
                    self.tally.resumed += waiting
                waiting = 0
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

    def _learn(self, way: Way, was_early: bool, was_late: bool) -> None:
        """Adapt the times of kills to how busy the machine is: some hit before the training, few after its end."""
        with self._lock:
            self.seconds[way] *= 1.1 if was_early else 0.7 if was_late else 1.0

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

    def _count(self, way: Way, variant: Way | None, kill: Kill, end: End, seen: Seen, patience: float) -> None:
        with self._lock:
            tally = self.tally
            tally.kills[kill.call or AT_RANDOM] += 1
            if kill.call:
                tally.moments[kill.moment] += 1
                tally.files[kill.file] += 1
                tally.phases[seen.phase(kill)] += 1
            tally.ways[f"{way.wrapper}{' with async_save' * way.is_async}" if variant else "changing"] += 1
            tally.slowest = max(tally.slowest, end.seconds)
            if way.ranks > 1 and not kill.everyone and patience == PATIENCE:
                tally.left_alone += 1
                tally.ended_alone += not end.is_terminated

    def _require_kept(self, way: Way, output: Path, before: int, seen: Seen) -> None:
        """Require that no checkpoint is lost, and no more steps than those since the last one."""
        kept, reported = newest_intact(str(output)), max(before, seen.saved)
        if kept < reported:
            raise FailedTrialError("saved checkpoints lost", f"{reported} was saved, {kept} is the newest")
        if damaged := [step for step, path in checkpoints(output).items() if not is_intact(path)]:
            raise FailedTrialError("damaged checkpoints", damaged)
        # An asynchronous save may last until the next one is due, or longer: then that one is left out, and reported.
        left_out = seen.errors[0].count("is still running on rank")
        lost = max(seen.step or 0, before) - kept - SAVE_EVERY * left_out
        if lost > SAVE_EVERY * (2 if way.is_async else 1) or (left_out and not way.is_async):
            raise FailedTrialError("too many steps lost", lost)
        try:
            if (output / record.RECORDS).exists():
                record.load(output)
        except UserError as error:
            raise FailedTrialError("records that cannot be read", error) from None
        with self._lock:
            self.tally.lost[way.is_async] = max(self.tally.lost[way.is_async], lost)

    def _compare(self, variant: Way | None, output: Path) -> None:
        """Compare a finished run with an undisturbed one, whose saves were synchronous."""
        expected = self._output_of((variant or EVERY[0])._replace(is_async=False))
        paths = itertools.chain(output.iterdir(), (output / "checkpoints").iterdir())
        if odd := [path.name for path in paths if not EXPECTED_NAMES.fullmatch(path.name)]:
            raise FailedTrialError("temporaries after a start", odd)
        with self._lock:
            self.tally.runs += 1
            self.tally.changing += variant is None
            try:
                if variant is None:
                    difference = difference_of(output, expected)
                    self.tally.difference = max(self.tally.difference, difference)
                    is_same = difference <= TOLERANCE
                else:
                    difference, is_same = 0.0, is_same_run(str(output), str(expected), STEPS)
            except (ValueError, AssertionError) as error:
                raise FailedTrialError("records that cannot be read", error) from None
            if not is_same:
                raise FailedTrialError("results that differ", difference or "to the bit")
            self.tally.close += variant is None
            self.tally.equal += variant is not None


def _require_clean_end(end: End, seen: Seen) -> None:
    if any("Timeout (" in text for text in seen.errors):
        raise FailedTrialError("hangs")
    if end.left:
        raise FailedTrialError("processes left")
    is_killed = seen.is_killed or -signal.SIGKILL in end.codes
    expected = {0, 1, STOPPED, -signal.SIGKILL, -signal.SIGTERM} if is_killed else {0}
    if set(end.codes) - expected or any("Traceback" in text for text in seen.errors):
        raise FailedTrialError("unexpected ends")


def _require_resumed(output: Path, before: int, strays: list[str], seen: Seen) -> None:
    """Require that training went on at the newest checkpoint, and that the start has tidied up."""
    if seen.resumed_at is None:
        return
    if seen.resumed_at != before or "damaged" in seen.errors[0]:
        raise FailedTrialError("resumed from another checkpoint", f"of step {seen.resumed_at} instead of {before}")
    if left := set(strays) & set(temporaries(output)):
        raise FailedTrialError("temporaries after a start", sorted(left))


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
