"""The one timing loop: warm-up, then steps whose phases are synchronised, on any device and any number of ranks.

Single calls, too short for that loop, are timed by Triton's (`time_calls`).
"""

import timeit
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.parallel.collectives import message_device
from cs336_systems.step.train_step import TrainStep, Watch

STEP = "step"
FEW_CALLS = 3


@dataclass
class Timings:
    """Seconds of every measured step: by phase and for the whole (`step`); by the host's clock and by CUDA events."""

    wall: dict[str, list[float]] = field(default_factory=dict)
    events: dict[str, list[float]] = field(default_factory=dict)
    warmup: list[float] = field(default_factory=list)
    peak_memory: int | None = None
    """Most bytes of CUDA memory allocated during the measured steps."""

    @property
    def metrics(self) -> list[list]:
        """[metric, unit, samples] rows for records."""
        wall = [[f"{phase}_time", "s", samples] for phase, samples in self.wall.items()]
        events = [[f"{phase}_event_time", "s", samples] for phase, samples in self.events.items()]
        return [*wall, *events, ["warmup_time", "s", self.warmup]]


class Stopwatch:
    """A watcher that times phases. The device is idle at both ends of each, so that a phase's time is its own."""

    def __init__(self, device: torch.device):
        self.device = device
        self.wall: defaultdict[str, list[float]] = defaultdict(list)
        self.events: defaultdict[str, list[float]] = defaultdict(list)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def watch(self, name: str) -> Iterator[None]:
        cuda = self.device.type == "cuda"
        self.synchronize()
        if cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
        start = timeit.default_timer()
        yield
        if cuda:
            end.record()
        self.synchronize()
        self.wall[name].append(timeit.default_timer() - start)
        if cuda:
            self.events[name].append(begin.elapsed_time(end) / 1e3)


def time_steps(run: Callable[[Watch], object], *, device: torch.device, warmup_steps: int, num_steps: int) -> Timings:
    """Call `run(watch)` for the warm-up and the measured steps; it wraps its phases in `watch(name)`.

    With several ranks each step begins at a barrier, and a sample is the maximum over ranks: a step is over when its
    slowest rank is.
    """
    cold = Stopwatch(device)
    for _ in range(warmup_steps):
        _step(run, cold)
    stopwatch = Stopwatch(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(num_steps):
        _step(run, stopwatch)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Timings(
        wall=_max_over_ranks(dict(stopwatch.wall)),
        events=_max_over_ranks(dict(stopwatch.events)),
        warmup=list(cold.wall[STEP]),
        peak_memory=peak,
    )


def time_queued(run: Callable[[Watch], object], *, device: torch.device, num_steps: int) -> dict[str, list[float]]:
    """Seconds of each phase by CUDA events alone: nothing waits between phases, so the host launches ahead, as in
    training, and what it needs for that counts only where the GPU has nothing left to do."""
    marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def watch(name: str) -> Iterator[None]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        marks.append((name, begin, end))

    run(watch)
    first = len(marks)  # nothing was queued before these
    for _ in range(num_steps):
        run(watch)
    torch.cuda.synchronize(device)
    found: defaultdict[str, list[float]] = defaultdict(list)
    for name, begin, end in marks[first:]:
        found[name].append(begin.elapsed_time(end) / 1e3)
    return dict(found)


def time_as_configured(step: TrainStep, batch: tuple[Tensor, Tensor]) -> Timings:
    """As many warm-up and measured steps as the step's configuration says, all on one batch."""
    timings = time_steps(
        lambda watch: step(*batch, watch=watch),
        device=step.device,
        warmup_steps=step.config.warmup_steps,
        num_steps=step.config.num_steps,
    )
    if step.graph is not None and timings.peak_memory is not None:  # replays allocate nothing
        timings.peak_memory = max(timings.peak_memory, step.graph.peak_memory)
    return timings


def time_calls(
    call: Callable[[], object],
    *,
    device: torch.device,
    warmup_ms: float,
    rep_ms: float,
    gradients: Sequence[Tensor] = (),
) -> list[float]:
    """Seconds of each of many calls that have been made before, with the gradients of `gradients` dropped before each.

    On a GPU by `triton.testing.do_bench`: the L2 cache is emptied before each call, and the next one is queued before
    the last has ended, so that microseconds count. It makes eight calls at least; where one alone takes longer than
    all should, and on a CPU, a few steps of the loop above do.
    """

    def run(watch: Watch) -> None:
        for tensor in gradients:
            tensor.grad = None
        call()

    def loop(calls: int) -> list[float]:
        return time_steps(run, device=device, warmup_steps=0, num_steps=calls).wall[STEP]

    (once,) = loop(1)
    if device.type != "cuda" or once * 1e3 > warmup_ms + rep_ms:
        return loop(FEW_CALLS)
    from triton.testing import do_bench

    times = do_bench(call, warmup=warmup_ms, rep=rep_ms, grad_to_none=list(gradients), return_mode="all")
    return [milliseconds / 1e3 for milliseconds in times]


def _step(run: Callable[[Watch], object], stopwatch: Stopwatch) -> None:
    if dist.is_initialized():
        dist.barrier()
    with stopwatch.watch(STEP):
        run(stopwatch.watch)


def _max_over_ranks(samples: dict[str, list[float]]) -> dict[str, list[float]]:
    if not dist.is_initialized() or dist.get_world_size() == 1 or not samples:
        return samples
    table = torch.tensor([samples[name] for name in samples], dtype=torch.float64, device=message_device())
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return dict(zip(samples, table.tolist(), strict=True))
