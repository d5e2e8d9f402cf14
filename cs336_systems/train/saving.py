"""Saves a run and resumes it: weights, optimizer state, random state, and progress."""

import contextlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from cs336_systems.config import UserError
from cs336_systems.flags import one_line
from cs336_systems.parallel.launch import Rank
from cs336_systems.step import TrainStep
from cs336_systems.step.updates import LossScale, Update
from cs336_systems.train.checkpoint import (
    Checkpoint,
    DamagedCheckpointError,
    Store,
    gather,
    load_masters,
    rng_state,
    set_rng_state,
    training_state,
)
from cs336_systems.train.data import Corpus
from cs336_systems.train.run_log import show
from cs336_systems.train.settings import TrainSettings


@dataclass
class Progress:
    """The position of a run; all of it is in its checkpoints."""

    step: int = 0
    """Steps done."""
    skipped: int = 0
    """Steps left out because they were not finite."""
    skipped_in_a_row: int = 0

    def count(self, update: Update) -> None:
        """Count a step. One that only lowers the loss scale neither adds to a row of skipped steps nor ends it."""
        self.step += 1
        if update is Update.SKIPPED:
            self.skipped += 1
            self.skipped_in_a_row += 1
        elif update is Update.APPLIED:
            self.skipped_in_a_row = 0

    def to_manifest(self, scale: LossScale) -> dict[str, Any]:
        """Return the entry "progress" of a checkpoint's manifest."""
        return {**vars(self), "loss_scale": scale.value, "good_steps": scale.good_steps}

    @classmethod
    def from_manifest(cls, entry: dict[str, Any], scale: LossScale) -> "Progress":
        """Read the entry "progress" of a manifest, and set the loss scale to that of the run."""
        scale.value, scale.good_steps = entry["loss_scale"], entry["good_steps"]
        return cls(entry["step"], entry["skipped"], entry["skipped_in_a_row"])


class Saver:
    """Writes and reads the checkpoints of one run. Every method is called by all ranks together."""

    def __init__(self, settings: TrainSettings, rank: Rank, corpus: Corpus, step: TrainStep):
        self.settings, self.rank, self.corpus, self.step = settings, rank, corpus, step
        chosen = settings.checkpoint
        folder = settings.folder / "checkpoints"
        self.store = Store(folder, keep=chosen.keep, keep_every=chosen.keep_every, is_async=chosen.async_save)
        self.saved_at: int | None = None
        """Step of the last checkpoint that was saved."""
        self._saving: int | None = None
        """Step of the checkpoint that is being written."""
        self._thread: threading.Thread | None = None
        self._saved: Path | None = None
        """The path that the last save has written, or None if it failed."""
        self.store.prepare()

    def resume(self) -> Progress | None:
        """Load the newest intact checkpoint, or return None if there is none."""
        while (found := self.store.newest()) is not None:
            with contextlib.suppress(DamagedCheckpointError):  # reported; the one before it is next
                return self._load(found)
        return None

    def _load(self, found: Checkpoint) -> Progress:
        """Continue from a checkpoint; raise DamagedCheckpointError, with the run as it was, if it does not fit."""
        _require_same_run(self.settings, self.corpus, found)
        # A rank has a random state of its own if it took part in the save, on the same kind of device.
        own_rng = {name: value for name, value in rng_state().items() if name in found.manifest["rng"]}
        state: dict[str, Tensor] = {**training_state(self.step.model, self._optimizer), **own_rng}
        self.store.load(found, state)
        load_masters(self.step.model, self._optimizer, state)
        set_rng_state({name: value for name, value in state.items() if name.startswith("rng/")})
        progress = Progress.from_manifest(found.manifest["progress"], self.step.loss_scale)
        self._show(f"resumed at step {progress.step} from {found.path}")
        before, now = found.manifest["settings"], self.settings.to_dict()
        if changed := _changes({name: (before[name], now[name]) for name in now if name in before}):
            self._show(f"changed since that checkpoint: {'; '.join(changed)}")
        return progress

    def save(self, progress: Progress, *, wait: bool) -> None:
        """Save a checkpoint, in the background if the settings say so and the caller need not wait for it."""
        self.finish()
        in_background = self.settings.checkpoint.async_save and not wait
        own_rng = rng_state()
        state = {**training_state(self.step.model, self._optimizer, as_copy=in_background), **own_rng}
        manifest = {
            "step": progress.step,
            "progress": progress.to_manifest(self.step.loss_scale),
            "settings": self.settings.to_dict(),
            "data": self.corpus.fingerprint,
            "world_size": self.rank.world_size,
            "rng": [name for names in gather(list(own_rng)) for name in names],
        }

        def write() -> None:
            self._saved = self.store.save(state, manifest)

        self._saving, self._saved = progress.step, None
        if in_background:
            self._thread = threading.Thread(target=write, daemon=True)
            self._thread.start()
        else:
            write()
            self.finish()

    def finish(self) -> None:
        """Wait for a save in the background, if there is one, and report the save."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._saved is not None:
            self.saved_at = self._saving
            self._show(f"saved {self._saved}")
            self._saved = None

    def poll(self) -> None:
        """Report a save in the background that is done."""
        if self._thread is not None and not self._thread.is_alive():
            self.finish()

    @property
    def _optimizer(self) -> Any:
        return self.step.optimizer

    def _show(self, text: str) -> None:
        if self.rank.rank == 0:
            show(text)


def _changes(pairs: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Name each setting whose value before differs from the value now."""
    return [one_line(f"{name} was {old} and is {new}") for name, (old, new) in pairs.items() if old != new]


def _require_same_run(settings: TrainSettings, corpus: Corpus, found: Checkpoint) -> None:
    """Raise UserError naming each setting whose change would make this another run."""
    before, now = found.manifest["settings"], settings.to_dict()
    pairs = {name: (before.get(name), now[name]) for name in TrainSettings.FIXED}
    pairs |= {name: (before["model"].get(name), value) for name, value in now["model"].items()}
    changes = _changes(pairs)
    if not corpus.has_fingerprint(found.manifest["data"]):
        changes.append(f"data {settings.data.path!r} has other tokens than {before['data']!r} had")
    if changes:
        raise UserError(f"{str(found.path)!r} belongs to another run: {'; '.join(changes)}; choose another --output")
