"""Instruments with several ranks: arrangements trained in one group, interleaved; collectives timed at each size.

`link` emulates a network: all-reduces take as long as they would on one of that latency and bandwidth.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.config import RunConfig
from cs336_systems.experiments.ranks.multi_rank import Arrangement
from cs336_systems.measure.timing import STEP, time_steps
from cs336_systems.measure.wire import Link, Transfer, Wire
from cs336_systems.parallel import DDP, FSDP, FlatDDP, NaiveDDP, ShardedOptimizer, gather_full_params
from cs336_systems.parallel.collectives import all_gather, communication_device, reduce_scatter
from cs336_systems.parallel.launch import in_ranks, this_rank
from cs336_systems.record import Metric
from cs336_systems.step.train_step import TrainStep, Watch, build_model

DEFAULT_BUCKET_MB = 25
LEARNING_RATE = 1e-3
WARMUP_CALLS = 3


@dataclass
class _Run:
    """An arrangement in training, and its measurements."""

    arrangement: Arrangement
    step: TrainStep
    memory: dict[str, int]
    """Bytes by metric, the largest over ranks."""
    times: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each round, by phase."""
    communication: list[float] = field(default_factory=list)
    lanes: list[Metric] = field(default_factory=list)


def measure_arrangements(config: dict[str, Any]) -> list[Metric]:
    return in_ranks(_measure, config)


def _measure(config: dict[str, Any]) -> list[Metric]:
    rank = this_rank(config["device"].split(":")[0])
    run_config = RunConfig.of({**config, "device": str(rank.device)})
    generator = torch.Generator().manual_seed(run_config.seed + rank.rank)  # every rank has its own part of the batch
    shape = (2, run_config.batch_size, run_config.model.context_length)
    batch = torch.randint(run_config.model.vocab_size, shape, generator=generator).to(rank.device)
    runs = [_start(Arrangement.named(name), run_config, batch) for name in config["arrangements"]]
    link = config.get("link")
    with Wire(link).tapped() if link else nullcontext():  # without a link nothing is intercepted
        for number in range(run_config.warmup_steps + config["rounds"]):
            for run in runs:
                times = _time(lambda watch, step=run.step: step(*batch, watch=watch), batch.device)
                if number >= run_config.warmup_steps:
                    for phase, samples in times.items():
                        run.times.setdefault(phase, []).extend(samples)
        for run in runs:
            if hasattr(run.step.model, "no_sync") and hasattr(run.step.model, "finish_gradient_synchronization"):
                run.communication = [_communication_time(run.step, batch) for _ in range(config["rounds"])]
    for run in runs:
        run.lanes = _lanes(run.step, batch, link)
        run.memory = _state_memory(run.step, batch) | run.memory
    errors = _weight_errors(runs)
    return [metric for run, error in zip(runs, errors, strict=True) for metric in _metrics(run, error)]


def _metrics(run: _Run, weight_error: float) -> list[Metric]:
    found = [Metric(f"{phase}_time", "s", samples) for phase, samples in run.times.items()]
    found += [Metric("communication_time", "s", run.communication)] if run.communication else []
    found += [Metric(part, "B", [size]) for part, size in run.memory.items()]
    found += [*run.lanes, Metric("weight_error", "1", [weight_error])]
    return [metric._replace(variant=run.arrangement.name) for metric in found]


# -- building arrangements --------------------------------------------------------------------------------------------


def _build(arrangement: Arrangement, run: RunConfig) -> TrainStep:
    torch.manual_seed(run.seed)
    with torch.device(run.device):
        model = build_model(run)
    wrapped = _wrap(arrangement, model)
    return TrainStep(wrapped, run, _optimizer(arrangement, wrapped.parameters()))


def _wrap(arrangement: Arrangement, model: nn.Module) -> nn.Module:
    if arrangement.library == "torch" and arrangement.optimizer != "sharded":
        return _fully_shard(model) if arrangement.wrapper == "fsdp" else nn.parallel.DistributedDataParallel(model)
    match arrangement.wrapper:
        case "none":
            return model
        case "naive":
            return NaiveDDP(model)
        case "flat":
            return FlatDDP(model)
        case "overlapped":
            return DDP(model)
        case "bucketed":
            size = arrangement.bucket_size_mb
            return DDP(model, bucket_size_mb=DEFAULT_BUCKET_MB if size is None else size)
        case "fsdp":
            return FSDP(model)


def _fully_shard(model: nn.Module) -> nn.Module:
    """Return a model in torch's `fully_shard`, with one group per Linear and Embedding, as in this package's FSDP."""
    from torch.distributed.fsdp import fully_shard

    for part in model.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            fully_shard(part)
    fully_shard(model)
    return model


def _optimizer(arrangement: Arrangement, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    if arrangement.optimizer == "AdamW":
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    if arrangement.library == "ours":
        return ShardedOptimizer(parameters, torch.optim.AdamW, lr=LEARNING_RATE)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=LEARNING_RATE)


def _start(arrangement: Arrangement, run: RunConfig, batch: Tensor) -> _Run:
    """Return the arrangement after its first steps, with the memory that CUDA's allocator gave to it alone."""
    if batch.device.type != "cuda":
        step = _build(arrangement, run)
        step(batch[0], batch[1])
        return _Run(arrangement, step, {})
    before = torch.cuda.memory_allocated()
    step = _build(arrangement, run)
    found = {"init_memory": torch.cuda.memory_allocated() - before}
    step(batch[0], batch[1])  # the first step creates the optimizer's state; the second is measured

    @contextmanager
    def watch(phase: str) -> Iterator[None]:
        if phase == "optimizer":
            found["before_update_memory"] = torch.cuda.memory_allocated() - before
        yield

    torch.cuda.reset_peak_memory_stats()
    step(batch[0], batch[1], watch=watch)
    found["after_update_memory"] = torch.cuda.memory_allocated() - before
    found["peak_memory"] = torch.cuda.max_memory_allocated() - before
    return _Run(arrangement, step, _largest_over_ranks(found))


# -- measurements -----------------------------------------------------------------------------------------------------


def _time(run: Any, device: torch.device) -> dict[str, list[float]]:
    return time_steps(run, device=device, warmup_steps=0, num_steps=1).wall


def _communication_time(step: TrainStep, batch: Tensor) -> float:
    """Return the seconds to average gradients that are all ready, with no computation beside it."""
    model: Any = step.model
    with model.no_sync():
        step.loss(step.logits(batch[0]), batch[1]).backward()
    (seconds,) = _time(lambda watch: model.finish_gradient_synchronization(), batch.device)[STEP]
    model.zero_grad(set_to_none=True)
    return seconds


def _lanes(step: TrainStep, batch: Tensor, link: Link | None) -> list[Metric]:
    """Return the phases and collectives of one more step on this rank, in seconds since its start; for FSDP also its
    gathers."""
    phases: list[tuple[str, float, float]] = []

    @contextmanager
    def watch(phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if batch.device.type == "cuda":
            torch.cuda.synchronize()
        phases.append((phase, start, time.perf_counter()))

    dist.barrier()
    with Wire(link).tapped() as wire, _sharded_uses(step.model, batch.device) as uses:
        begin = time.perf_counter()
        step(batch[0], batch[1], watch=watch)
    metrics = [
        Metric("phase", "", [phase for phase, *_ in phases]),
        Metric("phase_start", "s", [start - begin for _, start, _ in phases]),
        Metric("phase_end", "s", [end - begin for *_, end in phases]),
    ]
    if sent := [transfer for transfer in wire.transfers if transfer.end is not None]:
        metrics += [
            Metric("message", "", [transfer.collective for transfer in sent]),
            Metric("message_size", "B", [transfer.nbytes for transfer in sent]),
            Metric("message_start", "s", [transfer.start - begin for transfer in sent]),
            Metric("message_end", "s", [transfer.end - begin for transfer in sent if transfer.end is not None]),
        ]
    return [*metrics, *_gather_metrics(uses, wire.transfers, begin)]


@dataclass
class _Use:
    """The forward pass of a module whose weight is sharded."""

    module: str
    needed: float
    """Time at which forward reaches the module."""
    ready: float = 0.0
    """Time at which the weight is gathered."""
    done: float = 0.0


@contextmanager
def _sharded_uses(model: nn.Module, device: torch.device) -> Iterator[list[_Use]]:
    """Record the modules with sharded weights, in the order of forward. On CUDA the host waits for every module."""
    uses: list[_Use] = []

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return time.perf_counter()

    def ready(module: nn.Module, inputs: Any) -> None:
        uses[-1].ready = now()

    def done(module: nn.Module, inputs: Any, output: Any) -> None:
        uses[-1].done = now()

    handles: list[Any] = []
    for name, module in model.named_modules() if isinstance(model, FSDP) else ():
        if hasattr(module._parameters.get("weight"), "is_shard"):

            def reached(module: nn.Module, inputs: Any, name: str = name) -> None:
                uses.append(_Use(name, now()))

            handles.append(module.register_forward_pre_hook(reached, prepend=True))  # before the wrapper waits
            handles += [module.register_forward_pre_hook(ready), module.register_forward_hook(done)]
    try:
        yield uses
    finally:
        for handle in handles:
            handle.remove()


def _gather_metrics(uses: list[_Use], transfers: list[Transfer], begin: float) -> list[Metric]:
    """Pair each weight's use with its all-gather. Weights are gathered in the order of use, so the first all-gathers
    belong to forward."""
    gathers = [transfer for transfer in transfers if transfer.collective == "all_gather"][: len(uses)]
    if not uses or len(gathers) < len(uses):
        return []
    # The host does not learn when NCCL ends: at the latest when the module has its weight.
    by_host = dist.get_backend() != "nccl"
    pairs = list(zip(uses, gathers, strict=True))
    ends = [gather.end if by_host and gather.end is not None else use.ready for use, gather in pairs]
    times = {
        "gather_start": [gather.start for gather in gathers],
        "gather_end": ends,
        "weight_needed": [use.needed for use in uses],
        "weight_ready": [use.ready for use in uses],
        "weight_done": [use.done for use in uses],
    }
    found = [Metric(name, "s", [moment - begin for moment in moments]) for name, moments in times.items()]
    return [Metric("weight", "", [use.module.removeprefix("module.") for use in uses]), *found]


def _state_memory(step: TrainStep, batch: Tensor) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer state just before an update, on the rank with the
    most."""
    found: dict[str, int] = {}

    @contextmanager
    def watch(phase: str) -> Iterator[None]:
        if phase == "optimizer":
            found["gradient_memory"] = _total(p.grad for p in step.model.parameters())
        yield

    step(batch[0], batch[1], watch=watch)
    inner: Any = getattr(step.optimizer, "optim", step.optimizer)  # torch's ZeRO wraps the optimizer with the state
    found["parameter_memory"] = _total(step.model.parameters())
    found["optimizer_memory"] = _total(value for state in inner.state.values() for value in state.values())
    return _largest_over_ranks(found)


def _largest_over_ranks(sizes: dict[str, int]) -> dict[str, int]:
    """Return the maximum of each size over ranks; all ranks have the same names in the same order."""
    largest = torch.tensor(list(sizes.values()), device=communication_device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return dict(zip(sizes, largest.tolist(), strict=True))


def _total(tensors: Iterable[Any]) -> int:
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors if isinstance(t, Tensor))
    return sum(t.nbytes for t in local)


def _weight_errors(runs: list[_Run]) -> list[float]:
    """Return the largest difference of any weight, after the same steps, from torch's arrangement, or from the last one
    without torch's."""
    weights = [_weights(run.step.model) for run in runs]
    reference = next((own for own, run in zip(weights, runs, strict=True) if run.arrangement.library == "torch"), None)
    return [
        max((a - b).abs().max().item() for a, b in zip(own, reference or weights[-1], strict=True)) for own in weights
    ]


def _weights(model: nn.Module) -> list[Tensor]:
    if isinstance(model, FSDP):
        return list(gather_full_params(model).values())
    return [p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


# -- collectives ------------------------------------------------------------------------------------------------------


def measure_collectives(config: dict[str, Any]) -> list[Metric]:
    """Return the seconds of each call on the slowest rank; one variant for each collective and size in bytes."""
    return in_ranks(_time_collectives, config)


def _time_collectives(config: dict[str, Any]) -> list[Metric]:
    device = this_rank(config["device"]).device
    metrics = []
    for name in config["collectives"]:
        for size in config["sizes"]:
            run = _call(name, size // 4, device)
            timings = time_steps(run, device=device, warmup_steps=WARMUP_CALLS, num_steps=config["calls"])
            metrics.append(Metric("time", "s", timings.wall[STEP], variant=f"{name} {size}"))
    return metrics


def _call(name: str, elements: int, device: torch.device) -> Callable[[Watch], Any]:
    """Return a collective on fp32; `elements` counts the whole array: all-gather's output, reduce-scatter's input."""
    ranks = dist.get_world_size()
    part = torch.ones(elements // ranks, device=device)
    whole = torch.ones(elements // ranks * ranks, device=device)
    calls: dict[str, Callable[[Watch], Any]] = {
        "all_reduce": lambda watch: dist.all_reduce(whole),
        "broadcast": lambda watch: dist.broadcast(whole, 0),
        "all_gather": lambda watch: all_gather(whole, part),
        "reduce_scatter": lambda watch: reduce_scatter(part, whole),
    }
    return calls[name]
