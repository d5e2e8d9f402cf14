"""The training loop: the same on one CPU and on many nodes under torchrun, and the same after a restart.

    cs336 train --data text.txt --output runs/mine
    torchrun --nproc_per_node 8 -m cs336_systems train --data tokens.bin --parallel fsdp --output runs/mine

Everything that a step depends on is a function of the configuration and the step's number, or is in the checkpoint. A
signal (SIGTERM, SIGINT, SIGUSR1) ends the run after the current step with a checkpoint and exit code STOPPED; the same
command resumes it.
"""

import contextlib
import importlib.util
import math
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
from cs336_systems.files import locked, made_folder
from cs336_systems.parallel.collectives import communication_device, on_first, together
from cs336_systems.parallel.launch import Rank, RankError, default_device, process_group
from cs336_systems.parallel.rendezvous import is_under_torchrun, torchrun_place
from cs336_systems.step.memory_budget import host_memory
from cs336_systems.step.module_trace import Tracer
from cs336_systems.step.replay import ReplayError
from cs336_systems.step.train_step import cosine_lr, require_attention
from cs336_systems.step.updates import Update
from cs336_systems.text import counted
from cs336_systems.train.agreement import facts_of, read_once_per_host, require_shared
from cs336_systems.train.building import build_step
from cs336_systems.train.checkpoint_files import checkpoints_in
from cs336_systems.train.data import Corpus
from cs336_systems.train.enough_memory import Memory, ran_out, require_batch, require_memory
from cs336_systems.train.fp8_watch import Fp8Watch
from cs336_systems.train.packed_batches import PackedBatch, PackedCorpus
from cs336_systems.train.run_log import RunLog, show
from cs336_systems.train.saving import Progress, Saver
from cs336_systems.train.settings import TrainSettings
from cs336_systems.train.weight_files import CHECKPOINTS
from cs336_systems.train.weights import require_weights

STOPPED = 75
"""Exit code of a run that was asked to stop and can be resumed: sysexits' "temporary failure, try again"."""
LOCK = ".lock"
"""The file that a run locks in its output folder."""
DIVERGED = 2.0
"""At the end of a run, a loss above this multiple of a uniform guess's loss is a failure."""


def train(settings: TrainSettings) -> int:
    """Train to the end, or until asked to stop; return the exit code."""
    device = (settings.compute.device or default_device()).split(":")[0]
    limit = settings.parallel.rank_timeout
    try:
        with process_group(device=device, timeout=limit, facts=facts_of(settings, device)) as rank:
            corpus = _open_corpus(settings, rank)  # before anything is written
            with _exclusive(settings.folder):
                require_shared(settings.folder)
                with _memory_errors(settings, rank):
                    trainer = Trainer(settings, rank, corpus)
                    trainer.introduce()
                    trainer.resume()
                    return trainer.run()
    except RankError as error:
        print(f"cs336 train: {error}; the same command resumes from the last checkpoint", file=sys.stderr)
        return 1
    except ReplayError as error:
        print(f"cs336 train: {error}", file=sys.stderr)
        return 1


def _open_corpus(settings: TrainSettings, rank: Rank) -> Corpus | PackedCorpus:
    """Open the data; raise UserError, on all ranks, for settings that would fail later on any rank."""
    together(lambda: _require_possible(settings, rank))
    data, model = settings.data, settings.model
    kind = PackedCorpus if data.pack == "documents" else Corpus
    corpus = together(
        lambda: kind.open(data.path, context_length=model.context_length, validation_share=data.validation_share)
    )
    together(lambda: require_memory(settings, str(rank.device), rank.world_size, _memory(rank)))
    return corpus.checked(read_once_per_host(corpus.tokens), model.vocab_size)


def _require_possible(settings: TrainSettings, rank: Rank) -> None:
    settings.parallel.require_processes(rank.world_size)
    require_batch(settings, rank.world_size, _memory(rank))
    settings.require_ranks(rank.world_size)
    if settings.log.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UserError("--tensorboard: it is not installed; pip install tensorboard, or leave the flag out")
    require_attention(settings.run_config(str(rank.device), rank.world_size))
    if settings.init is not None and rank.rank == 0:  # which reads them for all
        require_weights(Path(settings.init), settings.model)


@contextlib.contextmanager
def _memory_errors(settings: TrainSettings, rank: Rank) -> Iterator[None]:
    """Turn a GPU's lack of memory into an error that says what would fit: of the user, or where steps have already
    been saved, of this rank, which another attempt may resume."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        found = ran_out(settings, str(rank.device), rank.world_size, _memory(rank))
        if checkpoints_in(settings.folder / CHECKPOINTS):
            raise RankError(str(found)) from error
        raise found from error


def _memory(rank: Rank) -> Memory:
    """Return the memory of this rank: that of its GPU, or that of the machine, which its ranks share."""
    if rank.device.type == "cuda":
        return Memory(torch.cuda.get_device_properties(rank.device).total_memory, "this GPU")
    return Memory(host_memory(), "this machine", torchrun_place().local_size if is_under_torchrun() else 1)


class Trainer:
    """Runs the steps of a training run on this rank. Every method is called by all ranks together."""

    def __init__(self, settings: TrainSettings, rank: Rank, corpus: Corpus | PackedCorpus | None = None):
        self.settings = settings
        self.rank = rank
        self.share, self.shares = settings.parallel.data_place(rank.rank, rank.world_size)
        """The share of every batch that this rank computes, and the number of shares."""
        self.corpus = corpus or _open_corpus(settings, rank)
        self.step = build_step(settings, rank)
        self.progress = Progress()
        self.saver = Saver(settings, rank, self.corpus, self.step)
        self.tracer = Tracer() if settings.faults.find_nan else None
        self.fp8 = Fp8Watch(self.step, settings.faults.fp8_check_every)
        self._loss, self._norm = 0.0, 0.0
        """Results of the last step; the loss is the validation loss if it was evaluated."""
        share = self.corpus.attention_share(settings.seed) if isinstance(self.corpus, PackedCorpus) else 1.0
        self.log = RunLog(settings, rank, self.step.config, share) if rank.rank == 0 else None

    def introduce(self) -> None:
        """Print the model, the data and the ranks, because the first step may take a while."""
        model, tokens = self.settings.model, self.corpus.tokens.count
        shape = f"{model.parameters:,} parameters (vocabulary {model.vocab_size:,}, context {model.context_length:,})"
        ranks = f"{counted(self.rank.world_size, 'rank')} on {self.rank.device}"
        if self.settings.parallel.engine == "torch":
            mesh = self.settings.parallel.axes(self.rank.world_size)._asdict()
            ranks += f", torch's engine: {' x '.join(f'{name} {size}' for name, size in mesh.items())}"
        self._show(f"training {shape} on {tokens:,} tokens of {self.corpus.tokens.path}; {ranks}")
        if self.settings.has_other_tokenizer:
            self._show("--data was tokenized with another tokenizer.json than that of --init: are its tokens the same?")
        if unused := self.settings.unused_vocabulary:
            self._show(unused)
        if self.settings.checkpoint.keep_best and self.settings.first_compared == self.settings.steps:
            every = f"evaluated every {self.settings.log.eval_every}, saved every {self.settings.checkpoint.save_every}"
            self._show(f"--keep_best: only the last step is both evaluated and saved ({every} steps)")

    def resume(self) -> None:
        """Continue from the newest intact checkpoint or the one of `--resume_from`, if there is one."""
        self.progress = self.saver.resume() or self.progress
        self.fp8.leave(self.progress.bf16_blocks)

    def run(self, stop_after: int | None = None) -> int:
        """Train to the end, until asked to stop, or to the step `stop_after`; return the exit code."""
        settings, progress, saver = self.settings, self.progress, self.saver
        if progress.step >= settings.steps:
            self._show(f"nothing to do: {self._all_done}")
            return 0
        saver.saved_at = progress.step
        if self.log is not None:
            self.log.start(progress.step)
        with _Signals() as signals:
            while progress.step < settings.steps:
                stop = self._train_step(signals) or progress.step == stop_after
                is_done = progress.step == settings.steps
                validation_loss = None
                if settings.log.eval_every and (is_done or progress.step % settings.log.eval_every == 0):
                    validation_loss = self._evaluate()
                is_last = stop or is_done
                # After skipped steps the weights are those of the last good step, which older checkpoints may lead to.
                is_due = progress.step % settings.checkpoint.save_every == 0 and not progress.skipped_in_a_row
                if is_last or is_due:
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
        replay_every = settings.faults.replay_every
        replay = replay_every > 0 and (progress.step + 1) % replay_every == 0
        batches = self._batches(progress.step)
        self.fp8.before(progress.step + 1)
        try:
            result = self.step.train(batches, learning_rate=rate, stop=lambda: signals.stop, replay=replay)
        except ReplayError as error:
            self.saver.finish()
            raise ReplayError(
                f"step {progress.step + 1}: {error}; it was not applied, and the last checkpoint is of step "
                f"{self.saver.saved_at}. Check this machine (on a GPU: nvidia-smi -q -d ECC,ROW_REMAPPER) before you "
                f"resume"
            ) from None
        progress.count(result.update)
        self._check_fp8()
        self._loss, self._norm = result.loss, result.gradient_norm
        if result.update is Update.SKIPPED:
            self._show(f"step {progress.step}: loss or gradient is not finite; weights left as they were")
        if self.tracer is not None and progress.skipped_in_a_row <= 1:  # once for steps in a row
            text = self.tracer.explain(self.step, result, batches, lambda: self._batches(max(progress.step - 2, 0)))
            if text:
                self._show(f"step {progress.step}: {text}")
        if self.log is not None:
            self.log.step(progress.step, result.loss, result.gradient_norm, rate, time.perf_counter() - begin)
        return result.stop

    def _check_fp8(self) -> None:
        """Record the shares of elements that FP8 has lost, if this step is checked; return blocks that lost too much to
        bf16."""
        step = self.progress.step
        shares = self.fp8.read(step)
        if shares and self.log is not None:
            self.log.fp8(step, shares)
        for block, tensor, share in self.fp8.leave_lossy(shares):
            self.progress.bf16_blocks += (block,)
            self._show(f"step {step}: block {block} returns to bf16: FP8 lost {share:.0%} of its tensor {tensor!r}")

    def _batches(self, step: int) -> list[tuple[Any, Tensor]]:
        """Return this rank's share of the sequences of a step, in micro batches: inputs of the model, and targets."""
        data = self.settings.data
        per_rank, count = data.batch_size // self.shares, data.micro_batches(self.shares)
        first, size = step * data.batch_size + self.share * per_rank, per_rank // count
        firsts = range(first, first + per_rank, size)
        return [self._on_device(self.corpus.training(self.settings.seed, begin, size)) for begin in firsts]

    def _on_device(self, batch: PackedBatch | tuple[Tensor, Tensor]) -> tuple[Any, Tensor]:
        if isinstance(batch, PackedBatch):
            return batch.to(self.rank.device)
        inputs, targets = batch
        return inputs.to(self.rank.device), targets.to(self.rank.device)

    def _evaluate(self) -> float:
        """Report the validation loss, which is returned, and a sampled text, without changing the run."""
        loss = self._loss = self._validation_loss()
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
            first = (number * self.shares + self.share) * size
            total += self.step.evaluate(*self._on_device(self.corpus.validation(first, size))).to(total)
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
        begin = time.perf_counter()
        self.saver.save(self.progress, wait=wait, validation_loss=validation_loss)
        if self.log is not None and self.saver.has(self.progress.step):
            self.log.saved(self.progress.step, time.perf_counter() - begin)

    def _require_finite_steps(self) -> None:
        """Raise UserError after too many non-finite steps in a row."""
        count = self.progress.skipped_in_a_row
        if count < self.settings.optimizer.max_skipped:
            return
        self.saver.finish()
        raise UserError(
            f"{counted(count, 'step')} in a row had a loss or gradient that is not finite; the last checkpoint is of "
            f"step {self.saver.saved_at}, in {str(self.saver.store.folder)!r}; try a smaller --learning_rate, and "
            f"--resume_from an earlier step if it fails again"
        )

    def _exit_code(self) -> int:
        steps, done, saved = self.settings.steps, self.progress.step, self.saver.saved_at
        if done < steps:
            self._show(f"stopped after step {done}; the same command resumes from step {saved}")
            return STOPPED
        if saved != done:
            last = f"the last checkpoint is of step {saved}" if saved else "no checkpoint was saved"
            self._show(f"{self._all_done}, but {last}")
            return 1
        if ruin := self._ruin():
            self._show(f"{self._all_done}, but the run has diverged: {ruin}; try a smaller --learning_rate")
            return 1
        self._show(f"done: {counted(steps, 'step')}")
        return 0

    @property
    def _all_done(self) -> str:
        return "the only step is done" if self.settings.steps == 1 else f"all {self.settings.steps} steps are done"

    def _ruin(self) -> str:
        """Return why the model of a finished run is unusable, or an empty string."""
        guess = math.log(self.settings.model.vocab_size)
        if not self._loss < DIVERGED * guess:  # NaN is not below it, either
            return f"the last loss is {self._loss:.4g}, and guessing gives {guess:.4g}"
        if 2 * self.progress.skipped > self.progress.step:
            return f"{self.progress.skipped} of {counted(self.progress.step, 'step')} were skipped as not finite"
        return "the gradient is 0" if self._norm == 0 else ""

    def _show(self, text: str) -> None:
        if self.rank.rank == 0:
            show(text)


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Lock the output folder: two runs in one folder would overwrite each other's checkpoints.

    Rank 0 makes it. What was made is removed again by a run that fails before it writes anything.
    """
    with contextlib.ExitStack() as stack:

        def lock() -> None:
            try:
                stack.enter_context(made_folder(folder))
                stack.enter_context(_removed_if_unused(folder))
                stack.enter_context(locked(folder / LOCK))
            except BlockingIOError:
                raise UserError(f"another run is training in {str(folder)!r}; choose another --output") from None
            except OSError as error:
                problem = f"cannot write to {str(folder)!r}: {error.strerror}; choose another --output"
                raise UserError(problem) from None

        on_first(lock)
        yield


@contextlib.contextmanager
def _removed_if_unused(folder: Path) -> Iterator[None]:
    """Remove the folder of checkpoints and the lock at the end if they were made here and nothing else was."""
    before = set(os.listdir(folder))
    try:
        yield
    finally:
        if CHECKPOINTS not in before:
            with contextlib.suppress(OSError):  # one was saved, or the run has failed before
                (folder / CHECKPOINTS).rmdir()
        with contextlib.suppress(OSError):
            if set(os.listdir(folder)) - before == {LOCK}:
                (folder / LOCK).unlink()


class _Signals:
    """SIGTERM, SIGINT and SIGUSR1 (Slurm's usual warning) request a stop after the step. A second one exits at once,
    unless it comes with the first: launchers pass a signal on to processes that already have it."""

    TOGETHER = 1.0
    """Seconds within which signals count as one."""

    def __init__(self) -> None:
        self.stop = False
        self._first = 0.0
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
            if time.monotonic() - self._first >= self.TOGETHER:
                os._exit(128 + number)
            return
        self.stop, self._first = True, time.monotonic()
        name = signal.Signals(number).name
        print(f"{name}: ending this step, then saving; send it again to exit at once", file=sys.stderr)
