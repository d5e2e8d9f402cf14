"""Runs of the trainer, faults that disturb them, and readers of what they leave behind.

A `Run` is one trainer with its settings and a fault; ranks perform many runs in one start, each with an `Outcome`. All
of it is at the top level, because it is sent to other processes by name.
"""

import contextlib
import ctypes
import functools
import hashlib
import itertools
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from cs336_systems import record
from cs336_systems.cli import main
from cs336_systems.config import UserError
from cs336_systems.flags import build
from cs336_systems.parallel.fsdp import FSDP, gather_full_params
from cs336_systems.parallel.launch import Rank, this_rank
from cs336_systems.parallel.torch_engine import whole
from cs336_systems.train.loop import Trainer
from cs336_systems.train.saving import SaveThread
from cs336_systems.train.settings import TrainSettings
from tests.distributed.rank_group import tidy

SHAPE = {"context_length": 16, "d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 32}
STEPS = 8
STALLED = 120.0
"""Seconds after which a training that is held by a stalled save is taken to hang."""


def text_of(length: int, seed: int = 0) -> bytes:
    letters = random.Random(seed)
    return "".join(letters.choice("abcde fghij\n") for _ in range(length)).encode()


def fields(output: Path, data: str = "short.txt", **changes: Any) -> dict[str, Any]:
    """Return the flags of the smallest run; `data` is a file beside the output folder."""
    return {
        "data": str(output.parent / data),
        "output": str(output),
        **SHAPE,
        "steps": STEPS,
        "batch_size": 4,
        "warmup_steps": 1,
        "learning_rate": 1e-2,
        "log_every": 1,
        "eval_every": 0,
        "save_every": 100,
        "device": "cpu",
        "parallel": "none",
        **changes,
    }


# -- runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    fields: dict[str, Any]
    stop_after: int | None = None
    fault: str = ""
    """A key of FAULTS."""
    trains: bool = True
    """False: the run only loads its checkpoint."""


@dataclass
class Outcome:
    code: int | None = None
    error: str = ""
    """The message of a UserError."""
    crash: str = ""
    """The traceback of any other exception."""
    printed: str = ""
    resumed_at: int = -1
    step: int = -1
    skipped: int = -1
    loss_scale: float = 0.0
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Full weights, gathered from shards."""
    states: list[Tensor] = field(default_factory=list)
    """This rank's part of the optimizer state; gathered from all ranks where torch's engine shards it."""


def perform_all(runs: dict[str, Run]) -> dict[str, Outcome]:
    return {name: tidy(perform, run) for name, run in runs.items()}


def perform(run: Run) -> Outcome:
    rank = this_rank("cpu")
    outcome = Outcome()
    with captured_output(outcome):
        try:
            trainer = Trainer(build(TrainSettings, run.fields), rank)
            trainer.resume()
            outcome.resumed_at = trainer.progress.step
            with FAULTS[run.fault](trainer, rank):
                outcome.code = trainer.run(stop_after=run.stop_after) if run.trains else None
        except UserError as error:
            outcome.error = str(error)
            return outcome
        except BaseException:  # torch's CheckpointException is no Exception
            outcome.crash = traceback.format_exc()
            return outcome
    outcome.step, outcome.skipped = trainer.progress.step, trainer.progress.skipped
    outcome.loss_scale = float(trainer.step.loss_scale.value)
    outcome.weights = weights_of(trainer.step.model)
    optimizer = trainer.step.optimizer
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]
    states = [optimizer.state[p] for p in parameters]
    outcome.states = [whole(torch.as_tensor(state[name])).clone() for state in states for name in sorted(state)]
    return outcome


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the full weights by the names of the unwrapped model. For all ranks together."""
    found = gather_full_params(model) if isinstance(model, FSDP) else model.state_dict()
    return {name.removeprefix("module."): whole(value.detach()).clone() for name, value in found.items()}


@contextlib.contextmanager
def captured_output(outcome: Outcome) -> Iterator[None]:
    """Collect what this process prints or warns of in `outcome.printed`."""
    with (
        tempfile.TemporaryFile("w+", buffering=1) as file,
        warnings.catch_warnings(record=True) as caught,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        warnings.simplefilter("always")
        try:
            yield
        finally:
            file.flush()
            file.seek(0)
            outcome.printed = file.read() + "".join(f"{warning.message}\n" for warning in caught)


def command(argv: list[str], folder: str, variables: dict[str, str]) -> None:
    """Run `cs336 ...` in this process, with its output in two files of `folder`."""
    os.environ.update(variables)
    torch.set_num_threads(1)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job would ignore Ctrl-C
    sys.exit(main(argv))


def with_private_output(argv: list[str], folder: str, variables: dict[str, str]) -> None:
    """Run `command`; on rank 1 the output folder is a file system that other processes do not see."""
    if variables["RANK"] == "1":
        output = argv[argv.index("--output") + 1].encode()
        libc = ctypes.CDLL(None, use_errno=True)
        recursive_and_private = 0x4000 | 0x40000  # MS_REC | MS_PRIVATE
        failed = libc.unshare(0x00020000)  # CLONE_NEWNS
        failed = failed or libc.mount(None, b"/", None, recursive_and_private, None)
        failed = failed or libc.mount(b"tmpfs", output, b"tmpfs", 0, None)
        assert not failed, os.strerror(ctypes.get_errno())
    command(argv, folder, variables)


def argv_of(settings: dict[str, Any]) -> list[str]:
    """Return the command line of a run."""
    flags = [[f"--{name}"] if value is True else [f"--{name}", str(value)] for name, value in settings.items()]
    return ["train", *itertools.chain.from_iterable(flags)]


# -- faults -----------------------------------------------------------------------------------------------------------


def at_forward(trainer: Trainer, when: Callable[[int], bool], do: Callable[[Tensor], Any]) -> AbstractContextManager:
    """Call `do` with the embedded tokens, in those training forwards of this trainer (from 1) that `when` selects."""
    (embedding,) = (part for part in trainer.step.model.modules() if isinstance(part, nn.Embedding))
    forwards = itertools.count(1)

    def hook(module: nn.Module, inputs: Any, out: Tensor) -> None:
        if out.requires_grad and when(next(forwards)):
            do(out)

    stack = contextlib.ExitStack()
    stack.callback(embedding.register_forward_hook(hook).remove)
    return stack


def poison(value: float, when: Callable[[int], bool], on: int, trainer: Trainer, rank: Rank) -> AbstractContextManager:
    """Put `value` into the gradient of one embedding row on one rank; under FSDP another rank may own that row."""

    def poisoned(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad[0, 0] = value
        return grad

    if rank.rank != on:
        return contextlib.nullcontext()
    return at_forward(trainer, when, lambda out: out.register_hook(poisoned))


def send_signal(number: int, when: int, on: int, trainer: Trainer, rank: Rank) -> AbstractContextManager:
    """Ask one rank to stop, in the middle of a step."""
    if rank.rank != on:
        return contextlib.nullcontext()
    return at_forward(trainer, lambda forward: forward == when, lambda out: os.kill(os.getpid(), number))


def fail(
    owner: Any, name: str, times: int, where: Callable[..., bool], trainer: Trainer, rank: Rank
) -> AbstractContextManager:
    """Let the first `times` calls of `owner.name` that `where` selects raise as on a full disk."""
    real, failed = getattr(owner, name), itertools.count()

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if where(rank, *args) and next(failed) < times:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    return mock.patch.object(owner, name, stand_in)


def stall(on: int, until: int, is_overdue: bool, trainer: Trainer, rank: Rank) -> AbstractContextManager:
    """Let the saves of one rank wait in fsync until the training is in its forward `until`. The training waits for the
    first save, of step 2, to come that far.

    `is_overdue`: the time limit of the save passes at once.
    """
    reached, released, real = threading.Event(), threading.Event(), os.fsync

    def stand_in(descriptor: int) -> None:
        if isinstance(threading.current_thread(), SaveThread) and not released.is_set():
            if is_overdue:
                trainer.saver.store.progress_at = -math.inf
            reached.set()
            assert released.wait(STALLED), "the training did not go on"
        real(descriptor)

    if rank.rank != on:
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(os, "fsync", stand_in))
    stack.callback(released.set)
    stack.enter_context(at_forward(trainer, lambda forward: forward == 3, lambda out: reached.wait(STALLED)))
    stack.enter_context(at_forward(trainer, lambda forward: forward == until, lambda out: released.set()))
    return stack


def anywhere(rank: Rank, *args: Any) -> bool:
    return True


def is_publication(rank: Rank, source: Any, target: Any, *args: Any) -> bool:
    """Select the rename of a checkpoint from its temporary to its final name."""
    return ".tmp-" in str(source) and Path(target).name.startswith("step-")


FAULTS: dict[str, Callable[[Trainer, Rank], AbstractContextManager]] = {
    "": lambda trainer, rank: contextlib.nullcontext(),
    "nan in the first step on rank 1": functools.partial(poison, float("nan"), lambda forward: forward == 1, 1),
    "inf in the first step on rank 1": functools.partial(poison, float("inf"), lambda forward: forward == 1, 1),
    "nan in every step": functools.partial(poison, float("nan"), lambda forward: True, 0),
    "nan in every other step": functools.partial(poison, float("nan"), lambda forward: forward % 2 == 0, 0),
    "another gradient in forward 2 on rank 1": functools.partial(poison, 1.0, lambda forward: forward == 2, 1),
    "SIGTERM on rank 1 in forward 3": functools.partial(send_signal, signal.SIGTERM, 3, 1),
    "one save": functools.partial(fail, torch.distributed.checkpoint, "save", 1, anywhere),
    "every save": functools.partial(fail, torch.distributed.checkpoint, "save", 10**9, anywhere),
    "one rename": functools.partial(fail, os, "rename", 1, is_publication),
    "one write": functools.partial(fail, FileSystemWriter, "write_data", 1, anywhere),
    "one write on rank 1": functools.partial(fail, os, "fsync", 1, lambda rank, *args: rank.rank == 1),
    "one hash": functools.partial(fail, hashlib, "file_digest", 1, anywhere),
    "one record": functools.partial(fail, record, "append", 1, anywhere),
    "stalled disk": functools.partial(stall, 0, 7, False),
    "stalled disk on rank 1": functools.partial(stall, 1, 7, False),
    "stalled disk, overdue": functools.partial(stall, 0, 7, True),
    "every delete": functools.partial(fail, shutil, "rmtree", 10**9, anywhere),
}


# -- what a run leaves behind -----------------------------------------------------------------------------------------


def lines_of(output: str | Path) -> list[dict[str, Any]]:
    """Return the complete lines of records.jsonl."""
    lines = (Path(output) / "records.jsonl").read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def recorded(output: str | Path, metric: str) -> dict[int, float]:
    """Return step -> value; later records replace earlier ones."""
    found = {}
    for line in lines_of(output):
        if line["experiment"] == "train" and line["metric"] == metric:
            first = line["config"]["first_step"]
            found |= {first + i: float(sample) for i, sample in enumerate(line["samples"])}
    return found


def losses_of(output: str | Path) -> list[float]:
    found = recorded(output, "loss")
    assert list(found) == [*range(min(found), max(found) + 1)]
    return list(found.values())


def checkpoints(output: str | Path) -> dict[int, Path]:
    found = (Path(output) / "checkpoints").glob("step-*")
    return {int(path.name.removeprefix("step-")): path for path in sorted(found) if ".tmp" not in path.name}


def newest(output: str | Path) -> int:
    return max(checkpoints(output), default=0)


def temporaries(output: str | Path) -> list[str]:
    return [path.name for path in (Path(output) / "checkpoints").glob("*tmp*")]


def is_intact(checkpoint: Path) -> bool:
    """Compare the hashes of the manifest, by other code than that under test."""
    try:
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
        hashes = {name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in files}
        return all(hashes[name] == entry["sha256"] for name, entry in files.items())
    except (OSError, ValueError):
        return False


def newest_intact(output: str) -> int:
    return max((step for step, path in checkpoints(output).items() if is_intact(path)), default=0)


def state_of(checkpoint: Path) -> dict[str, Tensor]:
    """Return all tensors: weights, moments and random state of all ranks."""
    reader = FileSystemReader(checkpoint)
    entries = reader.read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it should be here
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def is_same_run(output: str, other: str, steps: int) -> bool:
    """Compare losses, weights, moments and random state to the bit."""
    found, expected = (state_of(checkpoints(each)[steps]) for each in (output, other))
    return (
        found.keys() == expected.keys()
        and all(torch.equal(value, expected[name]) for name, value in found.items())
        and losses_of(output) == losses_of(other)
    )
