"""Saves a run and resumes it: weights, optimizer state, random state, and progress."""

import math
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cs336_systems.config import FAMILY_FIELDS, UserError
from cs336_systems.files import reason_of
from cs336_systems.flags import one_line
from cs336_systems.parallel.collectives import gather
from cs336_systems.parallel.launch import Rank
from cs336_systems.parallel.peers import is_connection_error
from cs336_systems.report.names import PARALLEL_SETTINGS, parallel_name
from cs336_systems.step import TrainStep
from cs336_systems.step.updates import LossScale, Update
from cs336_systems.train.checkpoint import (
    Checkpoint,
    DamagedCheckpointError,
    Store,
    load_copies,
    located,
    rng_state,
    set_rng_state,
    training_state,
)
from cs336_systems.train.data import Corpus
from cs336_systems.train.packed_batches import PackedCorpus
from cs336_systems.train.run_log import show
from cs336_systems.train.settings import TrainSettings
from cs336_systems.train.weight_files import CHECKPOINTS


@dataclass
class Progress:
    """The position of a run, all of which is in its checkpoints."""

    step: int = 0
    """Number of finished steps."""
    skipped: int = 0
    """Number of steps left out because they were not finite."""
    skipped_in_a_row: int = 0
    bf16_blocks: tuple[int, ...] = ()
    """Blocks of an FP8 run that compute in bf16."""

    def count(self, update: Update) -> None:
        """Count a step. A step that only lowers the loss scale neither adds to consecutive skipped steps nor ends
        them."""
        self.step += 1
        if update is Update.SKIPPED:
            self.skipped += 1
            self.skipped_in_a_row += 1
        elif update is Update.APPLIED:
            self.skipped_in_a_row = 0

    def to_manifest(self, scale: LossScale) -> dict[str, Any]:
        """Return the entry "progress" of a checkpoint's manifest."""
        entry = {**vars(self), "loss_scale": scale.value, "good_steps": scale.good_steps}
        if not entry.pop("bf16_blocks"):
            return entry
        return {**entry, "bf16_blocks": list(self.bf16_blocks)}

    @classmethod
    def from_manifest(cls, entry: dict[str, Any], scale: LossScale) -> "Progress":
        """Read the entry "progress" of a manifest, and set the loss scale to that of the run."""
        scale.value, scale.good_steps = entry["loss_scale"], entry["good_steps"]
        blocks = tuple(entry.get("bf16_blocks", ()))
        return cls(entry["step"], entry["skipped"], entry["skipped_in_a_row"], blocks)


class SaveThread(threading.Thread):
    """A save in the background: the `path` of the checkpoint, or the `problem` that ended it with an exception."""

    def __init__(self, store: Store, state: dict[str, Any], manifest: dict[str, Any], device: torch.device):
        super().__init__(daemon=True)
        self.step: int = manifest["step"]
        self.path: Path | None = None
        self.problem: str | None = None
        self._store, self._state, self._manifest, self._device = store, state, manifest, device
        store.progress_at = time.monotonic()

    def run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread starts with the first GPU
        try:
            self.path = self._store.save(self._state, self._manifest)
        except BaseException as error:  # torch's CheckpointException is no Exception
            self.problem = reason_of(error)
            self._store.discard(self.step)
        self._state = {}


class _Status(NamedTuple):
    """State of the last save on one rank."""

    running: bool = False
    overdue: bool = False
    """True if it is running and has made no progress within the time limit."""
    path: Path | None = None
    problem: str | None = None


class Saver:
    """Writes and reads the checkpoints of one run. Every method is called by all ranks together.

    Every save runs in a thread, so that a disk that stalls cannot hold the training for much longer than
    `--rank_timeout`. A synchronous save is waited for; an asynchronous one writes copies of the tensors. A separate
    process would not disturb the training less: writing and hashing do not hold the interpreter's lock.
    """

    def __init__(self, settings: TrainSettings, rank: Rank, corpus: Corpus | PackedCorpus, step: TrainStep):
        self.settings, self.rank, self.corpus, self.step = settings, rank, corpus, step
        chosen, self._timeout = settings.checkpoint, settings.parallel.rank_timeout
        self.store = Store(
            settings.folder / CHECKPOINTS,
            keep=chosen.keep,
            keep_every=chosen.keep_every,
            keep_best=chosen.keep_best,
            timeout=self._timeout,
        )
        self.saved_at: int | None = None
        """Step of the last checkpoint that was saved."""
        self._thread: SaveThread | None = None
        """The last save, until it has been reported."""
        self._copies: dict[str, Tensor] = {}
        """Copies of all tensors in host memory, reused by the next asynchronous save."""
        self._init = settings.init
        """File of weights from which the run was started."""
        self.store.prepare()

    # -- resuming -----------------------------------------------------------------------------------------------------

    def resume(self) -> Progress | None:
        """Load the newest intact checkpoint or the one that the user asks for; return None if there is none."""
        while (found := self._choose()) is not None:
            try:
                return self._load(found)
            except DamagedCheckpointError:  # reported; the one before it is next
                if self.settings.checkpoint.resume_from is not None:
                    raise
        if left := len(self.store.listed()):
            raise UserError(
                f"there are checkpoints in {str(self.store.folder)!r} ({left}), and none can be loaded; repair one, or "
                f"choose another --output"
            )
        return None

    def _load(self, found: Checkpoint) -> Progress:
        """Continue from a checkpoint; raise DamagedCheckpointError, with the run as it was, if it does not fit."""
        _require_same_run(self.settings, self.corpus, found)
        # A rank has a random state of its own if it took part in the save, on the same kind of device.
        own_rng = {name: value for name, value in rng_state().items() if name in found.manifest["rng"]}
        state: dict[str, Tensor] = {**training_state(self.step.model, self._optimizer), **own_rng}
        self.store.load(found, state)
        load_copies(self.step.model, self._optimizer, state)
        set_rng_state({name: value for name, value in state.items() if name.startswith("rng/")})
        progress = Progress.from_manifest(found.manifest["progress"], self.step.loss_scale)
        self._show(f"resumed at step {progress.step} from {found.path}")
        self._init = found.manifest.get("init")
        if self.settings.init is not None:
            self._show(f"--init {self.settings.init!r} was for the start of this run and is not loaded again")
        if self.settings.checkpoint.resume_from is not None and (aside := self.store.set_aside(progress.step)):
            self._show(f"checkpoints of later steps are now in {aside}")
        ranks = found.manifest["world_size"], self.rank.world_size
        before, now = map(_with_mesh, (found.manifest["settings"], self.settings.to_dict()), ranks)
        changeable = [name for name in now if name in before and name not in ("init", "resume_from")]
        if changed := _changes({name: (before[name], now[name]) for name in changeable}):
            self._show(f"changed since that checkpoint: {'; '.join(changed)}")
        return progress

    def _choose(self) -> Checkpoint | None:
        """Return the newest checkpoint, or that of `--resume_from` unless the same command has used it already."""
        newest, asked = self.store.newest(), self.settings.checkpoint.resume_from
        if asked is None:
            return newest
        if newest is not None and newest.manifest["settings"] == self.settings.to_dict():
            self._show(f"--resume_from {asked} was done before; this run goes on from its newest checkpoint")
            return newest
        own = self.store.folder
        if not asked.isdecimal() and not Path(asked).exists():
            raise UserError(f"--resume_from {asked!r}: no such step or path; name a step, or another run's --output")
        folder, step = (own, int(asked)) if asked.isdecimal() else located(Path(asked))
        is_own = folder.resolve() == own.resolve()
        if newest is not None and not is_own:
            raise UserError(
                f"{str(self.settings.folder)!r} holds a run that did not resume from {asked!r}; choose another "
                f"--output, or leave --resume_from out to continue that run"
            )
        store = self.store if is_own else Store(folder)
        found = store.newest() if step is None else store.at(step)
        if found is None:
            raise UserError(
                f"--resume_from {asked!r}: no intact checkpoint there; name a step, or another run's --output"
            )
        if found.manifest["step"] >= self.settings.steps:
            raise UserError(
                f"--resume_from {asked!r} is of step {found.manifest['step']}, and --steps is {self.settings.steps}: "
                f"nothing would be trained"
            )
        return found

    # -- saving -------------------------------------------------------------------------------------------------------

    def save(self, progress: Progress, *, wait: bool, validation_loss: float | None = None) -> None:
        """Save a checkpoint. Return at once if it is asynchronous and the caller need not `wait`.

        If the last save is still running it is waited for, or this one is left out if the caller need not wait.
        """
        if not self._is_free(progress.step, wait=wait):
            return
        in_background = self.settings.checkpoint.async_save and not wait
        own_rng = rng_state()
        copies = self._copies if in_background else None
        state = {**training_state(self.step.model, self._optimizer, copies=copies), **own_rng}
        manifest = {
            "step": progress.step,
            "progress": progress.to_manifest(self.step.loss_scale),
            "settings": self.settings.to_dict(),
            "data": self.corpus.fingerprint,
            "world_size": self.rank.world_size,
            "rng": [name for names in gather(list(own_rng)) for name in names],
            "init": self._init,
            "validation_loss": validation_loss if math.isfinite(validation_loss or 0.0) else None,
        }
        if self.rank.device.type == "cuda":
            torch.cuda.synchronize()  # copies and the last update are asynchronous, and the thread uses another stream
        self._thread = SaveThread(self.store, state, manifest, self.rank.device)
        self._thread.start()
        if not in_background:
            self.finish()

    def has(self, step: int) -> bool:
        """Return True if the checkpoint of a step is saved, or is being written."""
        return self.saved_at == step or (self._thread is not None and self._thread.step == step)

    def finish(self) -> None:
        """Wait for the save that is running, if there is one, up to the time limit, and report it."""
        self._wait()
        self._report()

    def poll(self) -> None:
        """Report a save that succeeded. A failure is reported with the next save, when ranks agree on its cause."""
        if self._thread is not None and not self._thread.is_alive():
            self._note(self._thread.step, self._thread.path)

    def _is_free(self, step: int, *, wait: bool) -> bool:
        """Report the last save; return False, on all ranks, if it is still running on any."""
        if wait:
            self._wait()
        running = self._report()
        if running and self._thread is not None:
            self._warn(step, f"the save of step {self._thread.step} is still running on rank {running}")
        return not running

    def _wait(self) -> None:
        """Wait for this rank's part of the save, as long as it makes progress; wait once more for a save that was given
        up."""
        if self._thread is not None and self.store.is_given_up:
            self._thread.join(self._timeout / 2)  # other ranks, which need not wait, wait for this one in a collective
        while self._status().running and not self._status().overdue and self._thread is not None:
            self._thread.join(min(1.0, self._timeout / 10))

    def _status(self) -> _Status:
        thread = self._thread
        if thread is None:
            return _Status()
        if not thread.is_alive():
            return _Status(path=thread.path, problem=thread.problem)
        # Ranks that wait for another one give up first, by the time limit of their collective.
        return _Status(running=True, overdue=time.monotonic() - self.store.progress_at > 1.25 * self._timeout)

    def _report(self) -> str:
        """Agree with the other ranks on the last save and report it; return the ranks on which it is still running.

        If a rank died, the run ends here with that rank's name, and consequent errors in other ranks' saves are not
        reported.
        """
        statuses = gather(self._status())
        if self._thread is None:
            return ""
        overdue = ", ".join(str(rank) for rank, status in enumerate(statuses) if status.overdue)
        if overdue and not self.store.is_given_up:
            self.store.is_given_up = True
            self._warn(self._thread.step, f"no progress on rank {overdue} for --rank_timeout {self._timeout:g} s")
        running = ", ".join(str(rank) for rank, status in enumerate(statuses) if status.running)
        if not running:
            self._conclude(statuses)
        return running

    def _conclude(self, statuses: list[_Status]) -> None:
        """Report a save that has finished on all ranks."""
        assert self._thread is not None
        step, self._thread = self._thread.step, None
        self._note(step, statuses[0].path)
        failures = [(rank, status.problem) for rank, status in enumerate(statuses) if status.problem]
        if failures:
            if statuses[0].path is None and not self.store.is_given_up:
                rank, problem = min(failures, key=lambda failure: is_connection_error(failure[1]))
                self._warn(step, f"rank {rank}: {problem}")
            self.store.renew_group()

    def _note(self, step: int, path: Path | None) -> None:
        """Report a checkpoint once."""
        if path is not None and self.saved_at != step:
            self.saved_at = step
            self._show(f"saved {path}")

    @property
    def _optimizer(self) -> Any:
        return self.step.optimizer

    def _show(self, text: str) -> None:
        if self.rank.rank == 0:
            show(text)

    def _warn(self, step: int, reason: str) -> None:
        if self.rank.rank == 0:
            warnings.warn(f"checkpoint of step {step} not saved: {reason}; training continues", stacklevel=3)


INTERCHANGEABLE = ("bf16", "fp8")
"""Precisions that a run may switch between: weights and optimizer state are the same in both."""


def _with_mesh(settings: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Return the settings with the engine and its mesh as one value, `parallel`."""
    others = {name: value for name, value in settings.items() if name not in PARALLEL_SETTINGS}
    return {**others, "parallel": parallel_name(settings, ranks)}


def _changes(pairs: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Name each setting whose value has changed, with both values."""
    return [one_line(f"{name} was {old} and is {new}") for name, (old, new) in pairs.items() if old != new]


def _require_same_run(settings: TrainSettings, corpus: Corpus | PackedCorpus, found: Checkpoint) -> None:
    """Raise UserError naming each setting whose change would make this another run."""
    before, now = found.manifest["settings"], settings.to_dict()
    pairs = {name: (before.get(name), now[name]) for name in TrainSettings.FIXED}
    if set(pairs["precision"]) <= set(INTERCHANGEABLE):
        del pairs["precision"]
    models = [{**FAMILY_FIELDS, **model} for model in (before["model"], now["model"])]
    pairs |= {name: (models[0].get(name), value) for name, value in models[1].items()}
    pairs["pack"] = before.get("pack", "none"), now["pack"]
    changes = _changes(pairs)
    is_packed_alike = pairs["pack"][0] == pairs["pack"][1]
    if is_packed_alike and not corpus.has_fingerprint(found.manifest["data"]):
        vocabulary = f" (a vocabulary of {settings.data.vocab_size})" if settings.data.is_store else ""
        changes.append(f"data {settings.data.path!r}{vocabulary} has other tokens than {before['data']!r} had")
    started_from = found.manifest.get("init")
    if changes:
        asked = settings.checkpoint.resume_from is not None
        if settings.init is None and started_from and models[0] != models[1] and not asked:
            way_out = f"give --init {started_from} again, which has the shape"
        else:
            way_out = "restore what differs"
        way_out += "" if asked else ", or choose another --output"
        raise UserError(f"{str(found.path)!r} belongs to another run: {'; '.join(changes)}; {way_out}")
    if settings.init is not None and settings.init != started_from:
        raise UserError(
            f"{str(found.path)!r} belongs to a run that started from {started_from or 'random weights'}, not from "
            f"--init {settings.init}; leave --init out to continue it, or choose another --output"
        )
