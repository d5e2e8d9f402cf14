"""Finds out which rank is missing when a connection between ranks breaks.

A dead rank breaks the connections of its neighbours only. The other ranks wait for these neighbours until their own
time limit and would be taken for dead as well. So every rank runs a thread that answers a roll call through the
process group's store, also while the rank computes or waits, and that reads the outcome: the process that hosts the
store may end soon after.
"""

import contextlib
import threading
import time
from typing import Any

import torch.distributed as dist

ROLL_CALL = 2.0
"""Seconds in which ranks answer a roll call."""
POLL_INTERVAL = 0.3
"""Seconds between two looks at the store."""


def is_connection_error(text: str) -> bool:
    """True for an error that is only the consequence of another rank's end."""
    consequences = ("Connection closed", "Connection reset", "Timed out", "gloo/transport", "caused pair closure")
    return any(words in text for words in consequences)


class Peers:
    """The ranks of a group, as one of them sees them through the store."""

    def __init__(self, store: dist.Store, rank: int, world_size: int):
        self._store, self._rank, self._world_size = store, rank, world_size
        self._missing = ""
        """Missing ranks as another rank has reported them."""
        self._closed = threading.Event()

    def __enter__(self) -> "Peers":
        if self._world_size > 1:
            # A clone has its own connection: a call that waits blocks the other one.
            store: Any = self._store
            threading.Thread(target=self._listen, args=(store.clone(),), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def describe_loss(self) -> str:
        """The line that reports the missing ranks: those that do not answer or, if all answer, do not end as this."""
        of_all = f"of {self._world_size}"
        try:
            missing = self._missing or self._call_roll()
            if missing:
                self._store.set("missing", missing)
                if self._rank == 0:  # rank 0 may host the store: other ranks read it first
                    time.sleep(3 * POLL_INTERVAL)
        except RuntimeError:
            missing = self._missing
            if not missing:
                return f"rank {self._rank} {of_all} lost its peers, and the store at MASTER_ADDR is gone, too"
        if not missing:
            return f"rank {self._rank} {of_all} lost a connection, but all ranks answer; check the network"
        return f"rank {missing} {of_all} died or does not answer; rank {self._rank} stops"

    def _call_roll(self) -> str:
        until = time.monotonic() + ROLL_CALL
        for key in (f"here-{self._rank}", f"ended-{self._rank}", "roll-call"):
            self._store.set(key, "yes")
        dead = running = list(range(self._world_size))
        while running and time.monotonic() < until and not self._missing:
            dead = [rank for rank in dead if not self._store.check([f"here-{rank}"])]
            running = [rank for rank in running if not self._store.check([f"ended-{rank}"])]
            time.sleep(0.05)
        return self._missing or ", ".join(map(str, dead or running))

    def _listen(self, store: dist.Store) -> None:
        with contextlib.suppress(RuntimeError):  # the process that hosts the store has ended
            if self._wait_for(store, "roll-call"):
                store.set(f"here-{self._rank}", "yes")
                if self._wait_for(store, "missing"):
                    self._missing = store.get("missing").decode()

    def _wait_for(self, store: dist.Store, key: str) -> bool:
        """True once the key is set; False when this rank leaves the group first."""
        while not store.check([key]):
            if self._closed.wait(POLL_INTERVAL):
                return False
        return True
