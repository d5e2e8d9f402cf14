"""The timing loop: warm-up, then steps with synchronised phases, on any device and any number of ranks.

Short calls are timed by Triton's do_bench (`time_calls`).
"""

import timeit
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.parallel.collectives import communication_device
from cs336_systems.record import Metric
from cs336_systems.step.train_step import TrainStep, Watch

STEP = "step"
FEW_CALLS = 3


@dataclass
class Timings:
    """Seconds of every measured step, by phase and in total (`step`), by the host's clock and by CUDA events."""

    wall: dict[str, list[float]] = field(default_factory=dict)
    events: dict[str, list[float]] = field(default_factory=dict)
    warmup: list[float] = field(default_factory=list)
    peak_memory: int | None = None
    """Peak bytes of CUDA memory allocated during the measured steps."""
    reserved_memory: int | None = None
    """Peak bytes that the caching allocator held during the measured steps, free blocks included."""

    @property
    def metrics(self) -> list[Metric]:
        wall = [Metric(f"{phase}_time", "s", samples) for phase, samples in self.wall.items()]
        events = [Metric(f"{phase}_event_time", "s", samples) for phase, samples in self.events.items()]
        reserved = [] if self.reserved_memory is None else [Metric("reserved_memory", "B", [self.reserved_memory])]
        return [*wall, *events, Metric("warmup_time", "s", self.warmup), *reserved]


class Stopwatch:
    """Times phases. It synchronises the device at both ends of a phase, so that no other work is counted."""

    def __init__(self, device: torch.device):
        self.device = device
        self.wall: defaultdict[str, list[float]] = defaultdict(list)
        self.events: defaultdict[str, list[float]] = defaultdict(list)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def watch(self, name: str) -> Iterator[None]:
        self.synchronize()
        events = _EventPair() if self.device.type == "cuda" else None
        start = timeit.default_timer()
        yield
        if events is not None:
            events.end.record()
        self.synchronize()
        self.wall[name].append(timeit.default_timer() - start)
        if events is not None:
            self.events[name].append(events.seconds)


def time_steps(run: Callable[[Watch], object], *, device: torch.device, warmup_steps: int, num_steps: int) -> Timings:
    """Call `run(watch)` for the warm-up and the measured steps; it wraps its phases in `watch(name)`.

    With several ranks each step begins at a barrier, and a sample is the maximum over ranks.
    """
    cold = Stopwatch(device)
    for _ in range(warmup_steps):
        _step(run, cold)
    stopwatch = Stopwatch(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(num_steps):
        _step(run, stopwatch)
    on_cuda = device.type == "cuda"
    return Timings(
        wall=_max_over_ranks(dict(stopwatch.wall)),
        events=_max_over_ranks(dict(stopwatch.events)),
        warmup=list(cold.wall[STEP]),
        peak_memory=torch.cuda.max_memory_allocated(device) if on_cuda else None,
        reserved_memory=torch.cuda.max_memory_reserved(device) if on_cuda else None,
    )


def release_memory() -> None:
    """Return cached blocks and cuBLAS workspaces to the GPU, so that the next measurement does not count them."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        with suppress(AttributeError):
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def time_queued(run: Callable[[Watch], object], *, device: torch.device, num_steps: int) -> dict[str, list[float]]:
    """Return the seconds of each phase by CUDA events, without synchronisation between phases.

    The host launches ahead of the GPU, as in training; its overhead counts only where the GPU runs out of work.
    """
    phases: list[tuple[str, _EventPair]] = []

    @contextmanager
    def watch(name: str) -> Iterator[None]:
        events = _EventPair()
        yield
        events.end.record()
        phases.append((name, events))

    run(watch)
    first = len(phases)  # the queue was empty before the first step, so it does not count
    for _ in range(num_steps):
        run(watch)
    torch.cuda.synchronize(device)
    found: defaultdict[str, list[float]] = defaultdict(list)
    for name, events in phases[first:]:
        found[name].append(events.seconds)
    return dict(found)


def time_as_configured(step: TrainStep, batch: tuple[Tensor, Tensor]) -> Timings:
    """Time as many steps as the configuration asks for, all on one batch."""
    timings = time_steps(
        lambda watch: step(*batch, watch=watch),
        device=step.device,
        warmup_steps=step.config.warmup_steps,
        num_steps=step.config.num_steps,
    )
    if step.graph is not None and timings.peak_memory is not None:  # replays of a graph allocate nothing
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
    """Return the seconds of each of many calls after a first one; the gradients of `gradients` are cleared before each.

    On a GPU `triton.testing.do_bench` clears the L2 cache before each call and queues calls ahead, which resolves
    microseconds. It makes at least eight calls; on a CPU, or if one call exceeds the time limit, the timing loop makes
    FEW_CALLS.
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


class _EventPair:
    """CUDA events around a phase; the first is recorded on construction."""

    def __init__(self) -> None:
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.begin.record()

    @property
    def seconds(self) -> float:
        return self.begin.elapsed_time(self.end) / 1e3


def _step(run: Callable[[Watch], object], stopwatch: Stopwatch) -> None:
    if dist.is_initialized():
        dist.barrier()
    with stopwatch.watch(STEP):
        run(stopwatch.watch)


def _max_over_ranks(samples: dict[str, list[float]]) -> dict[str, list[float]]:
    if not dist.is_initialized() or dist.get_world_size() == 1 or not samples:
        return samples
    table = torch.tensor([samples[name] for name in samples], dtype=torch.float64, device=communication_device())
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return dict(zip(samples, table.tolist(), strict=True))
