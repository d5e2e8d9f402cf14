"""The training loop: the same on a laptop's CPU and on many nodes under torchrun, and the same after a restart.

    cs336 train --data text.txt --output runs/mine
    torchrun --nproc_per_node 8 -m cs336_systems train --data tokens.bin --parallel fsdp --output runs/mine

Everything that a step depends on is a function of the configuration and the step's number, or is in the checkpoint. A
signal (SIGTERM, SIGINT, SIGUSR1) ends the step, saves, and leaves with STOPPED; the same command goes on from there.
"""

import contextlib
import dataclasses
import fcntl
import importlib.util
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems import record
from cs336_systems.config import RunConfig, UserError
from cs336_systems.kernels.fused.packed_adamw import PackedAdamW
from cs336_systems.measure.environment import capture
from cs336_systems.model import TransformerLM
from cs336_systems.parallel import DDP, FSDP, ShardedOptimizer, clip_grad_norm_
from cs336_systems.parallel.collectives import message_device
from cs336_systems.parallel.launch import Rank, RankError, process_group
from cs336_systems.predict.flops import model_flops
from cs336_systems.predict.gpus import peak_flops
from cs336_systems.record import GIB, Record
from cs336_systems.step.train_step import (
    AUTOCAST_DTYPES,
    TrainStep,
    build_model,
    cosine_lr,
    require_attention,
    require_device,
)
from cs336_systems.train.checkpoint import (
    Checkpoint,
    Store,
    agreed,
    rng_state,
    set_rng_state,
    take_weights,
    training_state,
)
from cs336_systems.train.data import Corpus
from cs336_systems.train.settings import TrainSettings

STOPPED = 75
"""Exit code of a run that was asked to stop and can go on: sysexits' "temporary failure, try again"."""
BUCKET_MB = 25


@dataclass
class Progress:
    """Where a run stands; all of it is in its checkpoints."""

    step: int = 0
    """Steps done."""
    loss_scale: float = 1.0
    good_steps: int = 0
    """Since the loss scale was changed."""
    skipped: int = 0
    skipped_in_a_row: int = 0


def train(settings: TrainSettings) -> int:
    """Train to the end, or until told to stop; the exit code."""
    device = settings.device and settings.device.split(":")[0]
    try:
        with process_group(device=device, timeout=settings.rank_timeout) as rank:
            corpus = _checked(settings, rank)  # before anything is written
            with _one_run(settings, rank):
                trainer = Trainer(settings, rank, corpus)
                trainer.resume()
                return trainer.run()
    except RankError as error:
        print(f"cs336 train: {error}; the same command goes on from the last checkpoint", file=sys.stderr)
        return 1


def _checked(settings: TrainSettings, rank: Rank) -> Corpus:
    """The data; UserError for what would fail later."""
    settings.micro_batches(rank.world_size)
    if settings.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UserError("--tensorboard: it is not installed; pip install tensorboard, or leave the flag out")
    require_attention(settings.run_config(str(rank.device), rank.world_size))
    return Corpus.open(
        settings.data,
        context_length=settings.model.context_length,
        vocab_size=settings.model.vocab_size,
        validation_share=settings.validation_share,
    )


class Trainer:
    def __init__(self, settings: TrainSettings, rank: Rank, corpus: Corpus | None = None):
        self.settings = settings
        self.rank = rank
        self.micro_batches = settings.micro_batches(rank.world_size)
        self.corpus = corpus or _checked(settings, rank)
        self.run_config = settings.run_config(str(rank.device), rank.world_size)
        require_device(self.run_config.device)
        torch.manual_seed(settings.seed)
        with rank.device:
            model = build_model(self.run_config)
        wrapped: nn.Module
        self.optimizer: torch.optim.Optimizer
        if "optimizer" in self.run_config.fast_parts:
            wrapped, self.optimizer = model, _packed_optimizer(model, settings)
        else:
            wrapped = _wrapped(model, settings, rank)
            self.optimizer = _optimizer(wrapped, settings)
        self.step = TrainStep(wrapped, self.run_config, self.optimizer)
        self.progress = Progress(loss_scale=2.0**16 if settings.precision == "fp16" else 1.0)
        self.store = Store(
            settings.folder / "checkpoints",
            keep=settings.keep,
            keep_every=settings.keep_every,
            beside=settings.async_save,
        )
        self._saved_at: int | None = None
        self._saving: int | None = None
        """Step of the checkpoint that is being written beside the training."""
        self.store.prepare()
        self.log = Log(settings, rank, self.run_config) if rank.rank == 0 else None

    # -- coming back --------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        found = self.store.newest()
        if found is None:
            return
        _require_same_work(self.settings, self.corpus, found)
        state = {**training_state(self.step.model, self.optimizer), **self._own_rng(found)}
        self.store.load(found, state)
        take_weights(self.step.model, self.optimizer, state)
        set_rng_state({name: value for name, value in state.items() if name.startswith("rng/")})
        self.progress = Progress(**found.manifest["progress"])
        self._say(f"resumed at step {self.progress.step} from {found.path}")

    def _own_rng(self, found: Checkpoint) -> dict[str, Tensor]:
        """Of a rank that was there when it was saved, on the same kind of device."""
        return {name: value for name, value in rng_state().items() if name in found.manifest["rng"]}

    def save(self, *, wait: bool = True) -> None:
        """Beside the training where the settings say so, unless the caller will `wait` for it."""
        self._end_save()
        if self.log is not None:
            self.log.flush()  # a run that is killed goes on from here, and would never record these steps
        beside = self.settings.async_save and not wait
        own = rng_state()
        state = {**training_state(self.step.model, self.optimizer, as_copy=beside), **own}
        names: list[Any] = [None] * self.rank.world_size
        dist.all_gather_object(names, list(own))
        manifest = {
            "step": self.progress.step,
            "progress": dataclasses.asdict(self.progress),
            "settings": self.settings.to_dict(),
            "data": self.corpus.fingerprint,
            "world_size": self.rank.world_size,
            "rng": [name for of_rank in names for name in of_rank],
        }
        self._saving = self.progress.step
        if beside:
            self.store.start(state, manifest)
        else:
            self._note_saved(self.store.save(state, manifest))

    def _end_save(self) -> None:
        """Of what was started beside."""
        if self._saving is not None:
            self._note_saved(self.store.finish())

    def _note_saved(self, path: Path | None) -> None:
        if path is not None:
            self._saved_at = self._saving
            self._say(f"saved {path}")
        self._saving = None

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self, stop_after: int | None = None) -> int:
        """To the end, or until told to stop, or to the step `stop_after`; the exit code."""
        settings, progress = self.settings, self.progress
        if progress.step >= settings.steps:
            self._say(f"nothing to do: all {settings.steps} steps are done")
            return 0
        self._saved_at = progress.step
        with _Signals() as signals:
            while progress.step < settings.steps:
                stop = self._train_step(signals) or progress.step == stop_after
                if settings.eval_every and progress.step % settings.eval_every == 0:
                    self._evaluate()
                is_last = stop or progress.step == settings.steps
                if is_last or progress.step % settings.save_every == 0:
                    self.save(wait=is_last)
                elif self._saving is not None and not self.store.is_saving:
                    self._end_save()
                if progress.skipped_in_a_row >= settings.most_skipped:
                    self._end_save()
                    raise UserError(
                        f"{progress.skipped_in_a_row} steps in a row had a loss or gradient that is not finite; the "
                        f"last checkpoint is of step {self._saved_at}, in {str(self.store.folder)!r}; try a smaller "
                        f"--learning_rate"
                    )
                if stop:
                    break
        if self.log is not None:
            self.log.flush()
        if progress.step < settings.steps:
            self._say(f"stopped after step {progress.step}; the same command goes on from step {self._saved_at}")
            return STOPPED
        if self._saved_at != progress.step:
            self._say(f"all {settings.steps} steps are done, but the last checkpoint is of step {self._saved_at}")
            return 1
        self._say(f"done: {settings.steps} steps")
        return 0

    def _train_step(self, signals: "_Signals") -> bool:
        """One step; whether some rank was told to stop."""
        settings, progress = self.settings, self.progress
        begin = time.perf_counter()
        rate = cosine_lr(
            progress.step,
            peak=settings.learning_rate,
            floor=settings.learning_rate * settings.final_share,
            warmup_steps=settings.warmup_steps,
            total_steps=settings.steps,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if isinstance(self.optimizer, PackedAdamW):  # clips, and leaves out a step that is not finite, by itself
            loss = self.step.train(self._batches())
            assert self.optimizer.grad_norm is not None
            norm = self.optimizer.grad_norm.item()
        else:
            loss = self.step.accumulate(self._batches(), loss_scale=progress.loss_scale)
            norm = self._unscaled_norm()
        # One message for all that ranks must agree on.
        shared = torch.tensor([loss.item(), float(signals.stop)], dtype=torch.float64, device=message_device())
        dist.all_reduce(shared)
        mean, stop = shared[0].item() / self.rank.world_size, bool(shared[1].item())
        self._update(math.isfinite(norm) and math.isfinite(mean))
        progress.step += 1
        if self.log is not None:
            self.log.step(progress, mean, norm, rate, time.perf_counter() - begin)
        return stop

    def _batches(self) -> list[tuple[Tensor, Tensor]]:
        """This rank's part of the step's sequences, in micro batches."""
        settings = self.settings
        per_rank = settings.batch_size // self.rank.world_size
        first = self.progress.step * settings.batch_size + self.rank.rank * per_rank
        inputs, targets = self.corpus.training(settings.seed, first, per_rank)
        parts = zip(inputs.chunk(self.micro_batches), targets.chunk(self.micro_batches), strict=True)
        return [(a.to(self.rank.device), b.to(self.rank.device)) for a, b in parts]

    @torch.no_grad()
    def _unscaled_norm(self) -> float:
        """Gradients as if the loss had not been scaled, and clipped; their norm over the whole model before that. It is
        the same on all ranks, and not finite if any gradient is not."""
        grads = [p.grad for p in self.step.model.parameters() if p.grad is not None]
        if self.progress.loss_scale != 1.0:
            torch._foreach_mul_(grads, 1 / self.progress.loss_scale)
        limit = self.settings.max_grad_norm or math.inf
        if isinstance(self.step.model, FSDP):
            return clip_grad_norm_(self.step.model, limit).item()
        return nn.utils.clip_grad_norm_(self.step.model.parameters(), limit).item()

    def _update(self, is_finite: bool) -> None:
        progress = self.progress
        progress.good_steps += 1
        if is_finite:
            if not isinstance(self.optimizer, PackedAdamW):
                self.optimizer.step()
            progress.skipped_in_a_row = 0
            if self.settings.precision == "fp16" and progress.good_steps >= self.settings.loss_scale_growth:
                progress.loss_scale, progress.good_steps = progress.loss_scale * 2, 0
        elif self.settings.precision == "fp16" and progress.loss_scale > 1:
            progress.loss_scale, progress.good_steps = progress.loss_scale / 2, 0  # how the scale is found: no fault
        else:
            progress.skipped += 1
            progress.skipped_in_a_row += 1
            self._say(f"step {progress.step + 1}: loss or gradient is not finite; weights left as they were")
        if not isinstance(self.optimizer, PackedAdamW):
            self.optimizer.zero_grad(set_to_none=True)

    # -- looking at it ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _evaluate(self) -> None:
        settings = self.settings
        total = torch.zeros((), dtype=torch.float64, device=message_device())
        for number in range(settings.eval_batches):
            first = (number * self.rank.world_size + self.rank.rank) * settings.micro_batch_size
            inputs, targets = self.corpus.validation(first, settings.micro_batch_size)
            total += self.step.evaluate(inputs.to(self.rank.device), targets.to(self.rank.device)).to(total)
        dist.all_reduce(total)
        loss = total.item() / (settings.eval_batches * self.rank.world_size)
        if self.log is not None:
            self.log.evaluation(self.progress.step, loss)
        if settings.is_text:
            text = self.sample(settings.sample_prompt, settings.sample_tokens)
            self._say(f"sample: {text!r}")

    @torch.no_grad()
    def sample(self, prompt: str, count: int) -> str:
        """`count` bytes that the model goes on with, each the likeliest of 256 by a throw of its own dice."""
        tokens = [byte for byte in prompt.encode() if byte < self.settings.model.vocab_size] or [0]
        dice = torch.Generator().manual_seed(self.settings.seed)  # not the run's: looking changes nothing
        context = self.settings.model.context_length
        for _ in range(count):
            recent = torch.tensor([tokens[-context:]], device=self.rank.device)
            with self.step.autocast():  # not compiled: each would be of another length
                logits = self.step.model(recent)[0, -1, :256].float().cpu()
            if not logits.isfinite().all():
                return "(the model's logits are not finite)"
            tokens.append(int(torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=dice)))
        return bytes(tokens).decode(errors="replace")

    def _say(self, text: str) -> None:
        if self.rank.rank == 0:
            show(text)


def _wrapped(model: nn.Module, settings: TrainSettings, rank: Rank) -> nn.Module:
    match settings.parallel:
        case "none":
            if rank.world_size > 1:
                raise UserError(f"--parallel none is for one rank, and there are {rank.world_size}; use ddp or fsdp")
            return model
        case "ddp" | "ddp-sharded":
            return DDP(model, bucket_size_mb=BUCKET_MB)
        case _:
            return FSDP(model, compute_dtype=AUTOCAST_DTYPES.get(settings.precision))


def _groups(parameters: Iterable[nn.Parameter], settings: TrainSettings) -> list[dict[str, Any]]:
    """Weights of products decay, gains of norms do not."""
    every = list(parameters)
    decayed, others = [p for p in every if p.dim() >= 2], [p for p in every if p.dim() < 2]
    options = {"lr": settings.learning_rate, "betas": (settings.beta1, settings.beta2)}
    return [
        {"params": decayed, "weight_decay": settings.weight_decay, **options},
        {"params": others, "weight_decay": 0.0, **options},
    ]


def _packed_optimizer(model: nn.Module, settings: TrainSettings) -> PackedAdamW:
    assert isinstance(model, TransformerLM)
    return PackedAdamW(
        _groups(model.in_packing_order(), settings),
        dtype=AUTOCAST_DTYPES.get(settings.precision, torch.float32),
        max_grad_norm=settings.max_grad_norm,
        check_finite=True,
    )


def _optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    groups = _groups(model.parameters(), settings)
    options: dict[str, Any] = {"fused": True}
    if settings.parallel == "ddp-sharded":
        return ShardedOptimizer(groups, torch.optim.AdamW, **options)
    return torch.optim.AdamW(groups, **options)


def _require_same_work(settings: TrainSettings, corpus: Corpus, found: Checkpoint) -> None:
    """UserError that names what differs, where it would make another run of it."""
    before, now = found.manifest["settings"], settings.to_dict()
    pairs = {name: (before.get(name), now[name]) for name in TrainSettings.FIXED}
    pairs |= {name: (before["model"].get(name), value) for name, value in now["model"].items()}
    said = [f"{name} was {old} and is {new}" for name, (old, new) in pairs.items() if old != new]
    if found.manifest["data"] != corpus.fingerprint:
        said.append(f"data {settings.data!r} has other tokens than {before['data']!r} had")
    if said:
        raise UserError(f"{str(found.path)!r} is of another run: {'; '.join(said)}; choose another --output")


@contextlib.contextmanager
def _one_run(settings: TrainSettings, rank: Rank) -> Iterator[None]:
    """Two runs in one folder would overwrite each other's checkpoints."""
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
        agreed(problem)
        yield


class _Signals:
    """SIGTERM, SIGINT and SIGUSR1 (Slurm's usual warning) ask for an end after the step; a second one ends at once."""

    def __init__(self) -> None:
        self.stop = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Signals":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._asked)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _asked(self, number: int, frame: Any) -> None:
        if self.stop:
            os._exit(128 + number)
        self.stop = True
        print(
            f"{signal.Signals(number).name}: ending this step, then saving; once more to end at once", file=sys.stderr
        )


def _tensorboard(settings: TrainSettings) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(settings.folder / "tensorboard"))


def show(text: str) -> None:
    """A reader that has gone, as `| head` does, must not end the training."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Log:
    """A line for a person now and then, and records of every step; rank 0's."""

    def __init__(self, settings: TrainSettings, rank: Rank, run: RunConfig):
        self._settings = settings
        self._path = settings.folder / "records.jsonl"
        self._environment = capture(str(rank.device))
        self._device = rank.device
        self._flops = model_flops(dataclasses.replace(run, batch_size=settings.batch_size))
        peak = peak_flops(self._environment.gpu, settings.precision) if rank.device.type == "cuda" else None
        self._peak = peak * rank.world_size if peak else None
        self._waiting: dict[str, list[float]] = {}
        self._first = 0
        self._board = _tensorboard(settings) if settings.tensorboard else None

    def step(self, progress: Progress, loss: float, norm: float, rate: float, seconds: float) -> None:
        if not self._waiting:
            self._first = progress.step
        values = {"loss": loss, "gradient_norm": norm, "learning_rate": rate, "step_time": seconds}
        for name, value in values.items():
            self._waiting.setdefault(name, []).append(value)
        if progress.step % self._settings.log_every and progress.step != self._settings.steps:
            return
        self._show(progress)
        self.flush()

    def flush(self) -> None:
        """Record the steps since the last time."""
        if not self._waiting:
            return
        units = {"step_time": "s"}
        self._append(self._first, {name: (units.get(name, "1"), found) for name, found in self._waiting.items()})
        self._waiting = {}

    def evaluation(self, step: int, loss: float) -> None:
        show(f"step {step}: validation loss {loss:.4f}")
        self._append(step, {"validation_loss": ("1", [loss])})

    def _append(self, first: int, metrics: dict[str, tuple[str, list[float]]]) -> None:
        config = {**self._settings.to_dict(), "first_step": first}
        if self._board is not None:
            for name, (_, values) in metrics.items():
                for number, value in enumerate(values):
                    self._board.add_scalar(name, value, first + number)
            self._board.flush()
        rows = [
            Record("train", config, name, unit, tuple(values), "ok", self._environment)
            for name, (unit, values) in metrics.items()
        ]
        try:
            record.append(self._path, rows)
        except OSError as error:
            warnings.warn(f"{str(self._path)!r} not written: {error.strerror}; training goes on", stacklevel=2)

    def _show(self, progress: Progress) -> None:
        settings = self._settings
        seconds = sum(self._waiting["step_time"]) / len(self._waiting["step_time"])
        tokens = settings.batch_size * settings.model.context_length
        left = int(seconds * (settings.steps - progress.step))
        parts = [
            f"step {progress.step}/{settings.steps}",
            f"loss {self._waiting['loss'][-1]:.4f}",
            f"grad_norm {self._waiting['gradient_norm'][-1]:.3f}",
            f"lr {self._waiting['learning_rate'][-1]:.2e}",
            f"throughput(tps) {tokens / seconds:,.0f}",
            f"tflops {self._flops / seconds / 1e12:.3g}",
            f"mfu(%) {100 * self._flops / seconds / self._peak:.1f}" if self._peak else "mfu(%) N/A",
        ]
        if self._device.type == "cuda":
            parts.append(f"memory/max_active(GiB) {torch.cuda.max_memory_allocated() / GIB:.2f}")
        parts.append(f"ETA {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}")
        show("  ".join(parts))
