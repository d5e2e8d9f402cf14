"""The training loop: the same on one CPU and on many nodes under torchrun, and the same after a restart.

    cs336 train --data text.txt --output runs/mine
    torchrun --nproc_per_node 8 -m cs336_systems train --data tokens.bin --parallel fsdp --output runs/mine

Everything that a step depends on is a function of the configuration and the step's number, or is in the checkpoint. A
signal (SIGTERM, SIGINT, SIGUSR1) ends the run after the current step with a checkpoint and exit code STOPPED; the same
command resumes it.
"""

import contextlib
import fcntl
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.config import UserError
from cs336_systems.parallel.collectives import communication_device
from cs336_systems.parallel.launch import Rank, RankError, process_group
from cs336_systems.step.train_step import cosine_lr, require_attention
from cs336_systems.step.updates import Update
from cs336_systems.train.building import build_step
from cs336_systems.train.checkpoint import raise_together
from cs336_systems.train.data import Corpus
from cs336_systems.train.run_log import RunLog, show
from cs336_systems.train.saving import Progress, Saver
from cs336_systems.train.settings import TrainSettings
from cs336_systems.train.weights import require_weights

STOPPED = 75
"""Exit code of a run that was asked to stop and can be resumed: sysexits' "temporary failure, try again"."""


def train(settings: TrainSettings) -> int:
    """Train to the end, or until asked to stop; return the exit code."""
    device = settings.compute.device and settings.compute.device.split(":")[0]
    try:
        with process_group(device=device, timeout=settings.parallel.rank_timeout) as rank:
            corpus = _open_corpus(settings, rank)  # before anything is written
            with _exclusive(settings, rank):
                trainer = Trainer(settings, rank, corpus)
                trainer.introduce()
                trainer.resume()
                return trainer.run()
    except RankError as error:
        print(f"cs336 train: {error}; the same command resumes from the last checkpoint", file=sys.stderr)
        return 1


def _open_corpus(settings: TrainSettings, rank: Rank) -> Corpus:
    """Open the data; raise UserError for settings that would fail later."""
    settings.data.micro_batches(rank.world_size)
    if settings.log.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UserError("--tensorboard: it is not installed; pip install tensorboard, or leave the flag out")
    require_attention(settings.run_config(str(rank.device), rank.world_size))
    if settings.init is not None:
        require_weights(Path(settings.init), settings.model)
    return Corpus.open(
        settings.data.path,
        context_length=settings.model.context_length,
        vocab_size=settings.model.vocab_size,
        validation_share=settings.data.validation_share,
    )


class Trainer:
    """Runs the steps of a training run on this rank. Every method is called by all ranks together."""

    def __init__(self, settings: TrainSettings, rank: Rank, corpus: Corpus | None = None):
        self.settings = settings
        self.rank = rank
        self.corpus = corpus or _open_corpus(settings, rank)
        self.step = build_step(settings, rank)
        self.progress = Progress()
        self.saver = Saver(settings, rank, self.corpus, self.step)
        self.log = RunLog(settings, rank, self.step.config) if rank.rank == 0 else None

    def introduce(self) -> None:
        """Show what is trained, on what: the first step may take a while."""
        parameters, tokens = self.settings.model.parameters, len(self.corpus.tokens)
        ranks = f"{self.rank.world_size} rank{'' if self.rank.world_size == 1 else 's'} on {self.rank.device}"
        self._show(f"training {parameters:,} parameters on {tokens:,} tokens of {self.corpus.path}; {ranks}")
        if self.settings.checkpoint.keep_best and self.settings.first_compared == self.settings.steps:
            every = f"evaluated every {self.settings.log.eval_every}, saved every {self.settings.checkpoint.save_every}"
            self._show(f"--keep_best: only the last step is both evaluated and saved ({every} steps)")

    def resume(self) -> None:
        """Continue from the newest intact checkpoint or the one of `--resume_from`, if there is one."""
        self.progress = self.saver.resume() or self.progress

    def run(self, stop_after: int | None = None) -> int:
        """Train to the end, until asked to stop, or to the step `stop_after`; return the exit code."""
        settings, progress, saver = self.settings, self.progress, self.saver
        if progress.step >= settings.steps:
            self._show(f"nothing to do: all {settings.steps} steps are done")
            return 0
        saver.saved_at = progress.step
        with _Signals() as signals:
            while progress.step < settings.steps:
                stop = self._train_step(signals) or progress.step == stop_after
                is_done = progress.step == settings.steps
                validation_loss = None
                if settings.log.eval_every and (is_done or progress.step % settings.log.eval_every == 0):
                    validation_loss = self._evaluate()
                is_last = stop or is_done
                if is_last or progress.step % settings.checkpoint.save_every == 0:
                    self._save(wait=is_last, validation_loss=validation_loss)
                else:
                    saver.poll()
                self._require_finite_steps()
                if stop:
                    break
        if self.log is not None:
            self.log.flush()
        return self._exit_code()

    def _train_step(self, signals: "_Signals") -> bool:
        """Run one step; return True if any rank was asked to stop."""
        settings, optimizer, progress = self.settings, self.settings.optimizer, self.progress
        begin = time.perf_counter()
        rate = cosine_lr(
            progress.step,
            peak=optimizer.learning_rate,
            floor=optimizer.learning_rate * optimizer.min_lr_share,
            warmup_steps=optimizer.lr_warmup_steps or 0,
            total_steps=settings.steps,
        )
        result = self.step.train(self._batches(), learning_rate=rate, stop=lambda: signals.stop)
        progress.count(result.update)
        if result.update is Update.SKIPPED:
            self._show(f"step {progress.step}: loss or gradient is not finite; weights left as they were")
        if self.log is not None:
            self.log.step(progress.step, result.loss, result.gradient_norm, rate, time.perf_counter() - begin)
        return result.stop

    def _batches(self) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's share of the step's sequences, in micro batches."""
        data, device = self.settings.data, self.rank.device
        per_rank = data.batch_size // self.rank.world_size
        first = self.progress.step * data.batch_size + self.rank.rank * per_rank
        inputs, targets = self.corpus.training(self.settings.seed, first, per_rank)
        count = data.micro_batches(self.rank.world_size)
        parts = zip(inputs.chunk(count), targets.chunk(count), strict=True)
        return [(a.to(device), b.to(device)) for a, b in parts]

    def _evaluate(self) -> float:
        """Report the validation loss, which is returned, and a sampled text. Neither changes the run."""
        loss = self._validation_loss()
        if self.log is not None:
            self.log.evaluation(self.progress.step, loss)
        if self.settings.data.is_text:
            self._show(f"sample: {self._sample()!r}")
        return loss

    @torch.no_grad()
    def _validation_loss(self) -> float:
        """Return the mean loss over the micro batches of all ranks."""
        count, size = self.settings.log.eval_batches, self.settings.data.micro_batch_size
        total = torch.zeros((), dtype=torch.float64, device=communication_device())
        for number in range(count):
            first = (number * self.rank.world_size + self.rank.rank) * size
            inputs, targets = self.corpus.validation(first, size)
            total += self.step.evaluate(inputs.to(self.rank.device), targets.to(self.rank.device)).to(total)
        dist.all_reduce(total)
        return total.item() / (count * self.rank.world_size)

    @torch.no_grad()
    def _sample(self) -> str:
        """Return the prompt and the bytes after it, each drawn from the model's distribution."""
        model, log = self.settings.model, self.settings.log
        tokens = [byte for byte in log.sample_prompt.encode() if byte < model.vocab_size] or [0]
        generator = torch.Generator().manual_seed(self.settings.seed)  # the run's own random state stays as it is
        for _ in range(log.sample_tokens):
            recent = torch.tensor([tokens[-model.context_length :]], device=self.rank.device)
            with self.step.autocast():  # not compiled: every prefix has another length
                logits = self.step.model(recent)[0, -1, :256].float().cpu()
            if not logits.isfinite().all():
                return "(the model's logits are not finite)"
            tokens.append(int(torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator)))
        return bytes(tokens).decode(errors="replace")

    def _save(self, *, wait: bool, validation_loss: float | None) -> None:
        if self.log is not None:
            self.log.flush()  # a killed run resumes from here and would never record these steps
        self.saver.save(self.progress, wait=wait, validation_loss=validation_loss)

    def _require_finite_steps(self) -> None:
        """Raise UserError after too many non-finite steps in a row."""
        count = self.progress.skipped_in_a_row
        if count < self.settings.optimizer.max_skipped:
            return
        self.saver.finish()
        raise UserError(
            f"{count} steps in a row had a loss or gradient that is not finite; the last checkpoint is of step "
            f"{self.saver.saved_at}, in {str(self.saver.store.folder)!r}; try a smaller --learning_rate"
        )

    def _exit_code(self) -> int:
        steps, done, saved = self.settings.steps, self.progress.step, self.saver.saved_at
        if done < steps:
            self._show(f"stopped after step {done}; the same command resumes from step {saved}")
            return STOPPED
        if saved != done:
            last = f"the last checkpoint is of step {saved}" if saved else "no checkpoint was saved"
            self._show(f"all {steps} steps are done, but {last}")
            return 1
        self._show(f"done: {steps} steps")
        return 0

    def _show(self, text: str) -> None:
        if self.rank.rank == 0:
            show(text)


@contextlib.contextmanager
def _exclusive(settings: TrainSettings, rank: Rank) -> Iterator[None]:
    """Lock the output folder: two runs in one folder would overwrite each other's checkpoints."""
    problem = None
    with contextlib.ExitStack() as stack:
        if rank.rank == 0:
            try:
                settings.folder.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context((settings.folder / ".lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                problem = f"another run is training in {str(settings.folder)!r}; choose another --output"
            except OSError as error:
                problem = f"cannot write to {str(settings.folder)!r}: {error.strerror}; choose another --output"
        raise_together(problem)
        yield


class _Signals:
    """SIGTERM, SIGINT and SIGUSR1 (Slurm's usual warning) request a stop after the step; a second one exits at once."""

    def __init__(self) -> None:
        self.stop = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Signals":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if self.stop:
            os._exit(128 + number)
        self.stop = True
        name = signal.Signals(number).name
        print(f"{name}: ending this step, then saving; send it again to exit at once", file=sys.stderr)
