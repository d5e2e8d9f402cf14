"""Brings together the ranks that torchrun has started, and compares what they must have in common.

Rank 0 collects an entry from each rank in the store at MASTER_ADDR: its settings, or the error with which it ends. It
answers all of them with one verdict: the name of the new group, or the problem, which every rank then raises.

torchrun restarts its ranks on the same store, where the entries of dead ranks are still to be found, and counts
restarts on each node by itself. So an entry counts only when its rank has confirmed it to the present rank 0.
"""

import contextlib
import json
import os
import secrets
import socket
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from cs336_systems.config import UserError
from cs336_systems.files import reason_of
from cs336_systems.parallel.peers import RankError, ranks_by_value, ranks_named, within

TELL_WITHIN = 60.0
"""Seconds that a rank with an error waits for the other ranks to read it."""
GRACE = 3.0
"""Seconds by which the answer of rank 0 may be late."""
MOST_VALUES, MOST_DIFFERENCES = 4, 8
"""Maximum number of values of a setting, and of settings, that an error names."""


class Place(NamedTuple):
    """The rank of a process in its group, and its local rank on its machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    hosts_store: bool = False
    """True if the store is in the process of this rank, not in torchrun's."""


def torchrun_place() -> Place:
    """Read the place of this rank, all of which torchrun sets."""
    world_size, local_size = (_environment(name, least=1) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    rank = _environment("RANK", least=0, below=world_size)
    local_rank = _environment("LOCAL_RANK", least=0, below=local_size)
    hosts_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return Place(rank, world_size, local_rank, local_size, hosts_store)


def is_under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


@dataclass(frozen=True)
class Facts:
    """Names and values that ranks compare before they form a group."""

    required: Mapping[str, str] = field(default_factory=dict)
    """Facts that must be equal on all ranks."""
    expected: Mapping[str, str] = field(default_factory=dict)
    """Facts whose differences are only reported."""


def join(place: Place, facts: Facts, timeout: float, failure: str = "") -> dist.Store:
    """Return the store of a new group, once all ranks have come with the same facts.

    Raises UserError if ranks differ or one has a `failure`, RankError if some do not come within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    where = f"MASTER_ADDR {os.environ.get('MASTER_ADDR', '')!r}, MASTER_PORT {os.environ.get('MASTER_PORT', '')}"
    store = _connect(place, timeout, where)
    entry = Entry(secrets.token_hex(8), place.world_size, dict(facts.required), dict(facts.expected), failure)
    try:
        verdict = within(
            deadline - time.monotonic() + 3 * GRACE,
            lambda: Meeting(store, place, entry).hold(deadline - time.monotonic()),
        )
    except TimeoutError:
        raise RankError(f"the rendezvous at {where} did not answer within {timeout:g} s") from None
    except RuntimeError:  # of torch: the process that hosts the store has ended
        raise RankError(f"the rendezvous at {where} ended before all {place.world_size} ranks had come") from None
    if verdict.absent:
        names, came = ranks_named(verdict.absent), verdict.expected - len(verdict.absent)
        came_to = f"{came} of {verdict.expected} ranks came to the rendezvous at {where} within {timeout:g} s"
        raise RankError(f"{came_to}; missing: {names}")
    if verdict.problem:
        raise UserError(verdict.problem)
    if verdict.warning and place.rank == 0:
        warnings.warn(verdict.warning, stacklevel=3)
    return dist.PrefixStore(verdict.group, store)


def tell_failure(message: str) -> None:
    """Tell the other ranks of torchrun that this one ends with an error, before it has joined them."""
    if is_under_torchrun():
        with contextlib.suppress(UserError, RankError):  # this rank has its own error to show
            place = torchrun_place()
            if place.world_size > 1:
                join(place, Facts(), TELL_WITHIN, failure=message)


def differences(values: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Return `NAME: VALUE on ranks ... and VALUE on rank ...` for each name whose value differs between ranks."""
    names = dict.fromkeys(name for found in values.values() for name in found)
    return [f"{name}: {shown}" for name in names if (shown := _difference(name, values))]


def _difference(name: str, values: Mapping[int, Mapping[str, str]]) -> str:
    by_value = ranks_by_value((rank, found.get(name, "unknown")) for rank, found in sorted(values.items()))
    if len(by_value) == 1:
        return ""
    shown = [f"{value} on {ranks_named(ranks)}" for value, ranks in by_value.items()][:MOST_VALUES]
    others = len(by_value) - len(shown)
    return " and ".join([*shown, *([f"{others} other values"] if others else [])])


# -- the store --------------------------------------------------------------------------------------------------------


def _connect(place: Place, timeout: float, where: str) -> dist.Store:
    address, port = os.environ.get("MASTER_ADDR", ""), _environment("MASTER_PORT", least=1, below=1 << 16)
    if not address:
        raise UserError("the environment variable MASTER_ADDR is not set; torchrun sets it")
    try:
        socket.getaddrinfo(address, port)
    except OSError as error:  # torch would retry until the time limit
        raise UserError(f"no rendezvous at MASTER_ADDR {address!r}: {error.strerror}") from None

    def connect() -> dist.Store:
        limit = timedelta(seconds=timeout)
        return dist.TCPStore(
            address, port, place.world_size, is_master=place.hosts_store, timeout=limit, wait_for_workers=False
        )

    try:
        return within(timeout + GRACE, connect)
    except TimeoutError:
        if not _listens(address, port):
            raise RankError(f"nothing listens at {where} after {timeout:g} s; was rank 0 started?") from None
        raise UserError(
            f"no rendezvous at {where}: connected, but no answer within {timeout:g} s; is this the port of torchrun?"
        ) from None
    except RuntimeError as error:  # DistNetworkError is one
        raise UserError(f"no rendezvous at {where}: {reason_of(error)}") from None


def _listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), 2.0).close()
    except OSError:
        return False
    return True


def _environment(name: str, *, least: int, below: int | None = None) -> int:
    """Return the whole number in an environment variable of torchrun."""
    value = os.environ.get(name, "")
    if not value:
        raise UserError(f"the environment variable {name} is not set; torchrun sets it")
    try:
        number = int(value)
    except ValueError:
        raise UserError(f"the environment variable {name} must be a whole number, got {value!r}") from None
    if number < least or (below is not None and number >= below):
        bound = f" and below {below}" if below is not None else ""
        raise UserError(f"the environment variable {name} must be at least {least}{bound}, got {number}")
    return number


# -- the meeting ------------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """The entry of a rank in the store."""

    nonce: str
    world_size: int
    required: dict[str, str]
    expected: dict[str, str]
    failure: str = ""
    """The error with which the rank ends, or an empty string."""


class Verdict(NamedTuple):
    """The result of the rendezvous, equal on all ranks."""

    group: str
    expected: int
    """Number of ranks."""
    absent: tuple[int, ...] = ()
    """Ranks that did not join; empty if there is another problem."""
    problem: str = ""
    warning: str = ""


class Meeting:
    """One rank's side of the rendezvous. Keys: `entry-RANK`, `roll` and `GROUP/verdict` of rank 0,
    `GROUP/here-NONCE`."""

    def __init__(self, store: dist.Store, place: Place, mine: Entry):
        self._store, self._place, self._mine = store, place, mine

    def hold(self, seconds: float) -> Verdict:
        """Return the verdict within this time plus a short grace period."""
        deadline = time.monotonic() + seconds
        self._store.set(f"entry-{self._place.rank}", json.dumps(self._mine))
        if self._place.rank != 0:
            return self._follow(deadline + GRACE)
        entries = self._collect(deadline)
        verdict = judge(self._mine.nonce, entries)
        self._store.set(f"{verdict.group}/verdict", json.dumps(verdict))
        if self._place.hosts_store and (verdict.problem or verdict.absent):
            self._wait_until_heard([entry for rank, entry in entries.items() if rank])
        return verdict

    def _wait_until_heard(self, entries: list[Entry]) -> None:
        """Wait for the other ranks to read the verdict: a store in this process must not end before."""
        until = time.monotonic() + GRACE
        while entries and time.monotonic() < until:
            entries = [entry for entry in entries if not self._has_answered("heard", entry)]
            time.sleep(0.02)

    def _collect(self, deadline: float) -> dict[int, Entry]:
        """Return, on rank 0, the entries of the ranks that joined."""
        living = {0: self._mine}
        called: dict[int, Entry] = {}
        pause = 0.01
        while True:
            sizes = {entry.world_size for entry in living.values()}
            if len(sizes) > 1:  # some ranks may not exist
                deadline = min(deadline, time.monotonic() + GRACE)
            absent = set(range(max(sizes))) - living.keys()
            if not absent or time.monotonic() > deadline:
                return living
            found = {rank: entry for rank in absent if (entry := self._entry(rank)) is not None}
            if found != called:
                called = found
                roll = {"group": self._mine.nonce, "nonces": [entry.nonce for entry in found.values()]}
                self._store.set("roll", json.dumps(roll))
            living |= {rank: entry for rank, entry in found.items() if self._has_answered("here", entry)}
            time.sleep(pause)
            pause = min(1.5 * pause, 0.3)

    def _follow(self, deadline: float) -> Verdict:
        """Return, on the other ranks, the verdict of rank 0."""
        group, pause = "", 0.01
        while time.monotonic() < deadline:
            if not group and self._store.check(["roll"]):
                roll = json.loads(self._store.get("roll"))
                if self._mine.nonce in roll["nonces"]:
                    group = roll["group"]
                    self._store.set(f"{group}/here-{self._mine.nonce}", "yes")
            if group and self._store.check([f"{group}/verdict"]):
                verdict = Verdict(*json.loads(self._store.get(f"{group}/verdict")))
                self._store.set(f"{group}/heard-{self._mine.nonce}", "yes")
                return verdict
            time.sleep(pause)
            pause = min(1.5 * pause, 0.3)
        entries = {rank: entry for rank in range(self._mine.world_size) if (entry := self._entry(rank)) is not None}
        first = entries.pop(0, None)
        if first is not None and first.world_size != self._mine.world_size:  # it may have started without the others
            return judge("", {0: first, self._place.rank: self._mine})
        return Verdict("", self._mine.world_size, tuple(sorted({*range(self._mine.world_size)} - entries.keys())))

    def _entry(self, rank: int) -> Entry | None:
        key = f"entry-{rank}"
        return Entry(*json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _has_answered(self, name: str, entry: Entry) -> bool:
        return self._store.check([f"{self._mine.nonce}/{name}-{entry.nonce}"])


def judge(group: str, entries: Mapping[int, Entry]) -> Verdict:
    """Return the verdict on the entries of the ranks that joined."""
    expected = max(entry.world_size for entry in entries.values())
    failures = ranks_by_value((rank, entry.failure) for rank, entry in sorted(entries.items()) if entry.failure)
    if failures:
        causes = (f"{ranks_named(ranks)} of {expected} failed: {failure}" for failure, ranks in failures.items())
        return Verdict(group, expected, problem="; ".join(causes))
    sizes = {rank: {"WORLD_SIZE": str(entry.world_size)} for rank, entry in entries.items()}
    required = {rank: {**sizes[rank], **entry.required} for rank, entry in entries.items()}
    if problem := _differ(required):
        return Verdict(group, expected, problem=problem)
    absent = tuple(sorted(set(range(expected)) - entries.keys()))
    return Verdict(group, expected, absent, warning=_differ({rank: entry.expected for rank, entry in entries.items()}))


def _differ(values: Mapping[int, Mapping[str, str]]) -> str:
    """Return a line that names all differences and the remedy, or an empty string."""
    found = differences(values)
    if not found:
        return ""
    others = f"; and in {len(found) - MOST_DIFFERENCES} other settings" if len(found) > MOST_DIFFERENCES else ""
    same = "command" if all(line.startswith("--") for line in found) else "command, packages and environment"
    return f"ranks differ in {'; '.join(found[:MOST_DIFFERENCES])}{others}; start all ranks with the same {same}"
