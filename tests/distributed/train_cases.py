"""What the processes of the training tests do: sent to other processes by name, so all of it is at the top level.

A `Run` says what one trainer does: which settings, where it stops, what goes wrong on the way. Ranks go through many of
them in one start, and each gives an `Outcome`.
"""

import contextlib
import functools
import itertools
import os
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter

from cs336_systems import record
from cs336_systems.cli import main
from cs336_systems.config import UserError
from cs336_systems.parallel.fsdp import FSDP, gather_full_params
from cs336_systems.parallel.launch import Rank, this_rank
from cs336_systems.train.loop import Trainer
from cs336_systems.train.settings import TrainSettings

NO_SPACE = OSError(28, "No space left on device")


@dataclass(frozen=True)
class Run:
    fields: dict[str, Any]
    """Of TrainSettings."""
    stop_after: int | None = None
    fault: str = ""
    """A name of FAULTS."""
    trains: bool = True
    """False: it only loads what is there."""


@dataclass
class Outcome:
    code: int | None = None
    error: str = ""
    """Of a UserError."""
    crash: str = ""
    """The traceback of any other: the other runs go on."""
    said: str = ""
    resumed_at: int = -1
    step: int = -1
    skipped: int = -1
    loss_scale: float = 0.0
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Whole ones, also of shards."""
    states: list[Tensor] = field(default_factory=list)
    """This rank's part of the optimizer's, in the order of its parameters."""


def play(runs: dict[str, Run]) -> dict[str, Outcome]:
    return {name: perform(run) for name, run in runs.items()}


def perform(run: Run) -> Outcome:
    rank = this_rank("cpu")
    outcome = Outcome()
    with heard(outcome):
        try:
            trainer = Trainer(TrainSettings(**run.fields), rank)
            trainer.resume()
            outcome.resumed_at = trainer.progress.step
            with FAULTS[run.fault](trainer, rank):
                outcome.code = trainer.run(stop_after=run.stop_after) if run.trains else None
        except UserError as error:
            outcome.error = str(error)
            return outcome
        except BaseException:  # torch's CheckpointException is one
            outcome.crash = traceback.format_exc()
            return outcome
    outcome.step, outcome.skipped = trainer.progress.step, trainer.progress.skipped
    outcome.loss_scale = float(trainer.progress.loss_scale)
    outcome.weights = weights_of(trainer.step.model)
    outcome.states = states_of(trainer.optimizer)
    return outcome


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy, by the names that the bare model has. For all ranks together."""
    found = gather_full_params(model) if isinstance(model, FSDP) else model.state_dict()
    return {name.removeprefix("module."): value.detach().clone() for name, value in found.items()}


def states_of(optimizer: Any) -> list[Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    held = [optimizer.state[p] for p in parameters if p in optimizer.state]
    return [torch.as_tensor(state[name]).clone() for state in held for name in sorted(state)]


@contextlib.contextmanager
def heard(outcome: Outcome) -> Iterator[None]:
    """All that this process prints or warns of, by whatever way, into `outcome.said`."""
    with (
        tempfile.TemporaryFile("w+", buffering=1) as file,
        warnings.catch_warnings(record=True) as caught,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        warnings.simplefilter("always")
        kept = [(number, os.dup(number)) for number in (1, 2)]
        for number, _ in kept:
            os.dup2(file.fileno(), number)
        try:
            yield
        finally:
            for number, copy in kept:
                os.dup2(copy, number)
                os.close(copy)
            file.flush()
            file.seek(0)
            outcome.said = file.read() + "".join(f"{warning.message}\n" for warning in caught)


# -- what goes wrong --------------------------------------------------------------------------------------------------


def at_forward(trainer: Trainer, when: Callable[[int], bool], do: Callable[[Tensor], None]) -> AbstractContextManager:
    """`do` with the embedded tokens, in those training forwards of this trainer (from 1) that `when` names."""
    (embedding,) = (part for part in trainer.step.model.modules() if isinstance(part, nn.Embedding))
    forwards = itertools.count(1)

    def hook(module: nn.Module, inputs: Any, out: Tensor) -> None:
        if out.requires_grad and when(next(forwards)):
            do(out)

    handle = embedding.register_forward_hook(hook)
    stack = contextlib.ExitStack()
    stack.callback(handle.remove)
    return stack


def poisoned(
    value: float, when: Callable[[int], bool], on: int, trainer: Trainer, rank: Rank
) -> AbstractContextManager:
    """`value` in the gradient on one rank, in one row of the embedding: under FSDP another rank owns that row."""

    def poison(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad[0, 0] = value
        return grad

    if rank.rank != on:
        return contextlib.nullcontext()
    return at_forward(trainer, when, lambda out: out.register_hook(poison) and None)


def signalled(number: int, when: int, on: int, trainer: Trainer, rank: Rank) -> AbstractContextManager:
    """One rank alone is asked to stop, in the middle of a step."""
    if rank.rank != on:
        return contextlib.nullcontext()
    return at_forward(trainer, lambda forward: forward == when, lambda out: os.kill(os.getpid(), number))


def failing(
    owner: Any, name: str, times: int, where: Callable[..., bool], trainer: Trainer, rank: Rank
) -> AbstractContextManager:
    """The first `times` calls of `owner.name` that `where` picks raise."""
    real, failed = getattr(owner, name), itertools.count()

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if where(rank, *args) and next(failed) < times:
            raise NO_SPACE
        return real(*args, **kwargs)

    return mock.patch.object(owner, name, stand_in)


def anywhere(rank: Rank, *args: Any) -> bool:
    return True


def on_rank_1(rank: Rank, *args: Any) -> bool:
    return rank.rank == 1


def into_its_place(rank: Rank, source: Any, target: Any, *args: Any) -> bool:
    """Of a rename: from the temporary name of a checkpoint to its final one."""
    return ".tmp-" in str(source) and Path(target).name.startswith("step-")


def nothing(trainer: Trainer, rank: Rank) -> AbstractContextManager:
    return contextlib.nullcontext()


def first(forward: int) -> bool:
    return forward == 1


FAULTS: dict[str, Callable[[Trainer, Rank], AbstractContextManager]] = {
    "": nothing,
    "nan in the first step on rank 1": functools.partial(poisoned, float("nan"), first, 1),
    "inf in the first step on rank 1": functools.partial(poisoned, float("inf"), first, 1),
    "nan in every step": functools.partial(poisoned, float("nan"), lambda forward: True, 0),
    "nan in every other step": functools.partial(poisoned, float("nan"), lambda forward: forward % 2 == 0, 0),
    "SIGTERM on rank 1 in step 3": functools.partial(signalled, signal.SIGTERM, 3, 1),
    "SIGINT on rank 0 in step 2": functools.partial(signalled, signal.SIGINT, 2, 0),
    "one save": functools.partial(failing, torch.distributed.checkpoint, "save", 1, anywhere),
    "every save": functools.partial(failing, torch.distributed.checkpoint, "save", 10**9, anywhere),
    "one rename": functools.partial(failing, os, "rename", 1, into_its_place),
    "one write": functools.partial(failing, FileSystemWriter, "write_data", 1, anywhere),
    "one write on rank 1": functools.partial(failing, os, "fsync", 1, on_rank_1),
    "one record": functools.partial(failing, record, "append", 1, anywhere),
    "every delete": functools.partial(failing, shutil, "rmtree", 10**9, anywhere),
}


# -- commands ---------------------------------------------------------------------------------------------------------


def command(argv: list[str], folder: str, cwd: str) -> None:
    """`cs336 ...` as a process of its own; what it says goes into two files of `folder`."""
    os.chdir(cwd)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job would ignore Ctrl-C
    sys.exit(main(argv))
