"""The log of a training run: a line now and then, a record of every step, and TensorBoard on request."""

import dataclasses
import os
import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from cs336_systems import record
from cs336_systems.config import FP8_LOST, RunConfig
from cs336_systems.kernels.fused.fp8_blocks import LostShare
from cs336_systems.measure.environment import capture
from cs336_systems.parallel.launch import Rank
from cs336_systems.predict.flops import model_flops
from cs336_systems.predict.gpus import peak_flops
from cs336_systems.record import GIB, RECORDS, Record
from cs336_systems.train.settings import TrainSettings

Metrics = Mapping[str, tuple[str, list[float]]]
"""Metric -> its unit and its values in consecutive steps."""


def show(text: str) -> None:
    """Print a line. A closed pipe, as after `| head`, does not end the training."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class RunLog:
    """Writes the log of a run; only rank 0 has one."""

    def __init__(self, settings: TrainSettings, rank: Rank, run: RunConfig, attention_share: float = 1.0):
        self._settings = settings
        self._path = settings.folder / RECORDS
        self._environment = capture(str(rank.device))
        self._device = rank.device
        self._flops = model_flops(dataclasses.replace(run, batch_size=settings.data.batch_size), attention_share)
        peak = peak_flops(self._environment.gpu, run.precision) if rank.device.type == "cuda" else None
        self._peak = peak * rank.world_size if peak else None
        self._ranks = rank.world_size
        self._begin = time.perf_counter()
        self._pending: dict[str, list[float]] = {}
        """Metric -> values of the steps since the last record."""
        self._unwritten: list[Record] = []
        """Records for the next write: events, and records that could not be written, for instance to a full disk."""
        self._first = 0
        self._board: Any = None
        if settings.log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(settings.folder / "tensorboard"))

    def start(self, step: int) -> None:
        """Record the step after which this process begins. It is written with its first steps, as a separate cell that
        no later start replaces: all processes but the first are restarts."""
        peak = {"peak_flops": ("FLOP/s", [self._peak])} if self._peak else {}
        metrics = {"ranks": ("1", [float(self._ranks)]), "flops": ("FLOP", [float(self._flops)]), **peak}
        self._queue(step + 1, metrics, started=self._environment.utc)
        self._plot(step + 1, metrics)

    def saved(self, step: int, seconds: float) -> None:
        """Record a checkpoint, and how long training waited for it."""
        metrics = {"save_time": ("s", [seconds])}
        self._queue(step, metrics)
        self._plot(step, metrics)

    def fp8(self, step: int, shares: list[LostShare]) -> None:
        """Record the share of elements that FP8 has lost of each tensor of the checked blocks, the first block
        first."""
        metrics: dict[str, tuple[str, list[float]]] = {}
        for share in shares:
            metrics.setdefault(f"{FP8_LOST}{share.tensor}", ("1", []))[1].append(share.share)
        self._queue(step, metrics, blocks=",".join(str(share.block) for share in shares if share.tensor == "input"))
        for share in shares:
            self._plot(step, {f"{FP8_LOST}{share.tensor}/block {share.block}": ("1", [share.share])})

    def step(self, step: int, loss: float, norm: float, rate: float, seconds: float) -> None:
        """Record a finished step; print and write at the intervals of the settings."""
        if not self._pending:
            self._first = step
        values = {"loss": loss, "gradient_norm": norm, "learning_rate": rate, "step_time": seconds}
        for name, value in values.items():
            self._pending.setdefault(name, []).append(value)
        if step % self._settings.log.log_every and step != self._settings.steps:
            return
        self._show(step)
        self.flush()

    def flush(self) -> None:
        """Record the steps and events since the last record."""
        if self._pending:
            units = {"step_time": "s"}
            metrics = {name: (units.get(name, "1"), values) for name, values in self._pending.items()}
            metrics["elapsed_time"] = ("s", [time.perf_counter() - self._begin])
            if self._device.type == "cuda":
                metrics["peak_memory"] = ("B", [float(torch.cuda.max_memory_allocated(self._device))])
                torch.cuda.reset_peak_memory_stats(self._device)
            self._queue_and_write(self._first, metrics)
            self._pending = {}
        elif self._unwritten:
            self._write()

    def evaluation(self, step: int, loss: float) -> None:
        show(f"step {step}: validation loss {loss:.4f}")
        self._queue_and_write(step, {"validation_loss": ("1", [loss])})

    def _queue_and_write(self, first: int, metrics: Metrics) -> None:
        self._queue(first, metrics)
        self._plot(first, metrics)
        self._write()

    def _plot(self, first: int, metrics: Metrics) -> None:
        """Add values of consecutive steps to the curves of TensorBoard, if there is one; `_write` flushes them."""
        if self._board is not None:
            for name, (_, values) in metrics.items():
                for number, value in enumerate(values):
                    self._board.add_scalar(name, value, first + number)

    def _queue(self, first: int, metrics: Metrics, **more: str | None) -> None:
        """Make records for the next write. Several values are those of consecutive steps, or of `blocks` in one."""
        config = {**self._settings.to_dict(), "first_step": first, **more}
        self._unwritten += [
            Record("train", config, name, unit, tuple(values), "ok", self._environment)
            for name, (unit, values) in metrics.items()
        ]

    def _write(self) -> None:
        """Write the queued records; those that cannot be written stay queued."""
        if self._board is not None:
            self._board.flush()
        try:
            record.append(self._path, self._unwritten)
            self._unwritten = []
        except OSError as error:
            warnings.warn(f"{str(self._path)!r} not written: {error.strerror}; training continues", stacklevel=3)

    def _show(self, step: int) -> None:
        settings = self._settings
        seconds = sum(self._pending["step_time"]) / len(self._pending["step_time"])
        tokens = settings.data.batch_size * settings.model.context_length
        left = int(seconds * (settings.steps - step))
        parts = [
            f"step {step}/{settings.steps}",
            f"loss {self._pending['loss'][-1]:.4f}",
            f"grad_norm {self._pending['gradient_norm'][-1]:.3f}",
            f"lr {self._pending['learning_rate'][-1]:.2e}",
            f"throughput(tps) {tokens / seconds:,.0f}",
            f"tflops {self._flops / seconds / 1e12:.3g}",
            f"mfu(%) {100 * self._flops / seconds / self._peak:.1f}" if self._peak else "mfu(%) N/A",
        ]
        if self._device.type == "cuda":
            parts.append(f"memory/max_active(GiB) {torch.cuda.max_memory_allocated(self._device) / GIB:.2f}")
        parts.append(f"ETA {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}")
        show("  ".join(parts))
