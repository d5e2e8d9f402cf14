"""Finds out why a connection between ranks broke: which rank failed and with which error, or which rank is missing.

A dead rank breaks the connections of its neighbours only. The other ranks wait for these neighbours until their own
time limit and would be taken for dead as well. So every rank runs a thread that watches the process group's store, also
while the rank computes or waits: a rank that fails leaves its error there, and a rank that loses a connection calls a
roll that all living ranks answer. The thread reads the outcome, because the process that hosts the store may end soon
after.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed as dist

from cs336_systems.commands import flags_named
from cs336_systems.config import UserError

ROLL_CALL = 2.0
"""Seconds in which ranks answer a roll call."""
POLL_INTERVAL = 0.3
"""Seconds between two polls of the store."""
LEAVE_WITHIN = 30.0
"""Seconds in which a rank must leave the group after another rank has failed; then its process is ended."""
CONNECTION_ERRORS = (
    "Connection closed",
    "Connection reset",
    "caused pair closure",
    "Timed out",
    "gloo/transport",
    "ncclRemoteError",
)
"""Substrings of messages from torch, Gloo and NCCL that mean a broken connection."""
LONGEST_REASON = 400
"""Maximum characters of another rank's error that are shown."""

T = TypeVar("T")
V = TypeVar("V", bound=Hashable)


class RankError(RuntimeError):
    """A rank failed, died or exceeded the time limit; the message carries its error or its traceback."""


def is_connection_error(text: str) -> bool:
    """Return True for an error that is only the consequence of another rank's end."""
    return any(words in text for words in CONNECTION_ERRORS)


def ranks_named(ranks: Iterable[int]) -> str:
    """Return `rank 1`, or `ranks 0, 2-7`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    is_one = len(runs) == 1 and len(runs[0]) == 1
    return f"rank{'' if is_one else 's'} " + ", ".join("-".join(map(str, run)) for run in runs)


def ranks_by_value(values: Iterable[tuple[int, V]]) -> dict[V, list[int]]:
    """Return the ranks of each value, given pairs of a rank and its value."""
    found: dict[V, list[int]] = {}
    for rank, value in values:
        found.setdefault(value, []).append(rank)
    return found


def in_background(work: Callable[[], T]) -> Future[T]:
    """Start `work` in a thread that does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def within(seconds: float, work: Callable[[], T]) -> T:
    """Return `work()`, or raise TimeoutError: calls to a store whose host does not answer never return."""
    return in_background(work).result(seconds)


def error_line(error: BaseException) -> str:
    """Return an error as one line: the message of a UserError, else the type and the beginning of the message."""
    text = " ".join((flags_named(error) if isinstance(error, UserError) else str(error)).split())
    text = text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}..."
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}".removesuffix(": ")


class Peers:
    """The ranks of a group, as one of them sees them through the store."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, *, hosts_store: bool = False):
        """Describe the group. `hosts_store`: the store ends with this process."""
        self._store, self._rank, self._world_size = store, rank, world_size
        self._hosts_store = hosts_store
        self._failure: dict[str, Any] | None = None
        """The first error that a rank has reported: its rank, its text, and whether the user can fix it."""
        self._missing = ""
        """Names of missing ranks, as another rank has reported them."""
        self._closed = threading.Event()

    def __enter__(self) -> "Peers":
        if self._world_size > 1:
            # A clone has its own connection: a call that waits blocks the other one.
            store: Any = self._store
            threading.Thread(target=self._listen, args=(store.clone(),), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def report(self, error: BaseException) -> None:
        """Leave the error of this rank for the others, which then name it as the cause of their own end."""
        if self._world_size > 1:
            with contextlib.suppress(RuntimeError, TimeoutError):
                within(ROLL_CALL + 1.0, lambda: self._report(error))

    def loss(self) -> UserError | RankError:
        """Return the error that names the rank that failed or, if none has reported an error, the missing ranks."""
        of_all, gone = f"of {self._world_size}", "is gone, too"
        try:
            within(3 * ROLL_CALL, self._find_loss)
        except (RuntimeError, TimeoutError) as error:
            gone = "does not answer, either" if isinstance(error, TimeoutError) else gone
            if not self._missing and self._failure is None:
                return RankError(f"rank {self._rank} {of_all} lost its peers, and the store at MASTER_ADDR {gone}")
        if self._failure is not None:
            kind = UserError if self._failure["is_user"] else RankError
            return kind(self._describe_failure())
        if self._missing:
            return RankError(f"rank {self._missing} {of_all} died or does not answer; rank {self._rank} stops")
        return RankError(f"rank {self._rank} {of_all} lost a connection, but all ranks answer; check the network")

    def _describe_failure(self) -> str:
        assert self._failure is not None
        failed = f"rank {self._failure['rank']} of {self._world_size} failed: {self._failure['text']}"
        return f"{failed}; rank {self._rank} stops"

    def _report(self, error: BaseException) -> None:
        if self._store.add("failures", 1) == 1:
            failure = {"rank": self._rank, "text": error_line(error), "is_user": isinstance(error, UserError)}
            self._store.set("failed", json.dumps(failure))
        self._store.set("alarm", "yes")
        self._store.set(f"heard-{self._rank}", "yes")
        if self._hosts_store:  # until all others have read it
            self._wait_for_answers("heard", until=time.monotonic() + ROLL_CALL)

    def _find_loss(self) -> None:
        """Set the failure or the missing ranks, from the store or by a roll call."""
        if not self._read(self._store):
            self._missing = self._call_roll()
        if self._missing:
            self._store.set("missing", self._missing)
            if self._hosts_store:
                time.sleep(3 * POLL_INTERVAL)  # other ranks read it first

    def _call_roll(self) -> str:
        """Return the ranks that do not answer or, if all do, those that have not lost a connection as well."""
        until = time.monotonic() + ROLL_CALL
        for key in (f"here-{self._rank}", f"ended-{self._rank}", "alarm"):
            self._store.set(key, "yes")
        dead = self._wait_for_answers("here", "ended", until=until)
        return self._missing or ("" if self._failure else dead)

    def _wait_for_answers(self, *names: str, until: float) -> str:
        """Wait for an answer of each rank; return the ranks without the first answer, or else without the last."""
        silent = {name: list(range(self._world_size)) for name in names}
        while silent[names[-1]] and time.monotonic() < until:
            for name, ranks in silent.items():
                silent[name] = [rank for rank in ranks if not self._store.check([f"{name}-{rank}"])]
            if self._read(self._store) and "ended" in names:
                break
            time.sleep(0.05)
        return ", ".join(map(str, silent[names[0]] or silent[names[-1]]))

    def _read(self, store: dist.Store) -> bool:
        """Read the reports of other ranks; return True if there are any."""
        if store.check(["failed"]):
            self._failure = json.loads(store.get("failed"))
        elif store.check(["missing"]):
            self._missing = store.get("missing").decode()
        return bool(self._failure or self._missing)

    def _listen(self, store: dist.Store) -> None:
        with contextlib.suppress(RuntimeError):  # the process that hosts the store has ended
            while not self._closed.wait(POLL_INTERVAL):
                if store.check(["alarm"]):
                    store.set(f"here-{self._rank}", "yes")
                    if self._read(store):
                        store.set(f"heard-{self._rank}", "yes")
                        break
        # A collective of NCCL that a rank has left never returns, and nothing can interrupt it.
        if self._failure is not None and not self._closed.wait(LEAVE_WITHIN):
            print(f"cs336: {self._describe_failure()}", file=sys.stderr, flush=True)
            os._exit(2 if self._failure["is_user"] else 1)
