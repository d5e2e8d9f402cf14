"""Ways to train on several ranks, side by side: the instrument of `ddp`, `bucket_model`, `optimizer_sharding`, `fsdp`.

An arrangement is a wrapper and an optimizer, ours or torch's. All arrangements of a cell train the same model on the
same data in one group of ranks, in turns, a step each: what disturbs the machine disturbs all of them.

Between processes of one machine sending takes the cores that backward needs, and hides nothing. `link` stands in for a
network: all-reduces take as long as they would on one of that latency and bandwidth, most of it asleep.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.config import RunConfig, UserError
from cs336_systems.measure.timing import STEP, time_steps
from cs336_systems.parallel import DDP, FSDP, FlatDDP, NaiveDDP, ShardedOptimizer, gather_full_params
from cs336_systems.parallel.launch import spawn, this_rank
from cs336_systems.step import TrainStep, Watch, build_model

BUCKET_MB = 25
"""Where the buckets are not the subject."""
LEARNING_RATE = 1e-3


def measure_arrangements(config: dict[str, Any]) -> list[list[Any]]:
    device = config["device"].split(":")[0]
    (metrics, *_) = spawn(_measure, config["ranks"], config, backend=config["backend"], device=device)
    return metrics


def _measure(config: dict[str, Any]) -> list[list[Any]]:
    with emulated(*config["link"]) if config.get("link") else nullcontext():
        return _measure_on_link(config)


def _measure_on_link(config: dict[str, Any]) -> list[list[Any]]:
    own = ("ranks", "backend", "arrangements", "rounds", "link")
    rank = this_rank(config["device"].split(":")[0])
    run = RunConfig.from_dict({**{k: v for k, v in config.items() if k not in own}, "device": str(rank.device)})
    steps = {name: _build(name, run) for name in config["arrangements"]}
    torch.manual_seed(run.seed + rank.rank)  # every rank has its own part of the batch
    batch = torch.randint(run.model.vocab_size, (2, run.batch_size, run.model.context_length), device=rank.device)
    times: dict[str, dict[str, list[float]]] = {name: {} for name in steps}
    alone: dict[str, list[float]] = {name: [] for name in steps}
    memory: dict[str, dict[str, int]] = {}
    for number in range(run.warmup_steps + config["rounds"]):
        for name, step in steps.items():
            found = _time(lambda watch, step=step: step(*batch, watch=watch), rank.device)
            if number >= run.warmup_steps:
                for phase, samples in found.items():
                    times[name].setdefault(phase, []).extend(samples)
    for name, step in steps.items():
        memory[name] = _bytes(step, batch)
        if hasattr(step.model, "no_sync") and hasattr(step.model, "finish_gradient_synchronization"):
            alone[name] = [_communication(step, batch, rank.device) for _ in range(config["rounds"])]
    errors = _errors(steps)
    return [
        row
        for name in steps
        for row in (
            *([f"{name}: {phase}_time", "s", samples] for phase, samples in times[name].items()),
            *([[f"{name}: communication_time", "s", alone[name]]] if alone[name] else []),
            *([f"{name}: {part}", "B", [size]] for part, size in memory[name].items()),
            [f"{name}: weight_error", "1", [errors[name]]],
        )
    ]


# -- a slow network ---------------------------------------------------------------------------------------------------


@contextmanager
def emulated(latency: float, bandwidth: float) -> Iterator[None]:
    """All-reduces one after another, each of latency + bytes / bandwidth seconds at least."""
    all_reduce = dist.all_reduce
    free_at = 0.0

    def slow(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        nonlocal free_at
        free_at = max(free_at, time.monotonic()) + latency + tensor.nbytes / bandwidth
        work = _Slow(all_reduce(tensor, op, group, async_op=True), free_at)
        return work if async_op else work.wait()

    dist.all_reduce = slow
    try:
        yield
    finally:
        dist.all_reduce = all_reduce


@dataclass(frozen=True)
class _Slow:
    work: Any
    until: float

    def wait(self) -> None:
        self.work.wait()
        time.sleep(max(0.0, self.until - time.monotonic()))


# -- arrangements -----------------------------------------------------------------------------------------------------


def _build(name: str, run: RunConfig) -> TrainStep:
    torch.manual_seed(run.seed)
    with torch.device(run.device):
        model = build_model(run)
    match name.split():
        case ["none"]:
            wrapped = model
        case ["naive"]:
            wrapped = NaiveDDP(model)
        case ["flat"]:
            wrapped = FlatDDP(model)
        case ["overlap"]:
            wrapped = DDP(model)
        case ["bucketed", size]:
            wrapped = DDP(model, bucket_size_mb=float(size))
        case ["torch", "DDP"]:
            wrapped = nn.parallel.DistributedDataParallel(model)
        case ["ddp"] | ["sharded"] | ["torch", "ZeRO"]:
            wrapped = DDP(model, bucket_size_mb=BUCKET_MB)
        case ["fsdp"]:
            wrapped = FSDP(model)
        case ["torch", "fully_shard"]:
            wrapped = _fully_shard(model)
        case _:
            raise UserError(f"unknown arrangement {name!r}")
    return TrainStep(wrapped, run, _optimizer(name, wrapped.parameters()))


def _optimizer(name: str, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "sharded":
        return ShardedOptimizer(parameters, torch.optim.AdamW, lr=LEARNING_RATE)
    if name == "torch ZeRO":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=LEARNING_RATE)
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


def _fully_shard(model: nn.Module) -> nn.Module:
    """One group for each Linear and Embedding, as ours."""
    from torch.distributed.fsdp import fully_shard

    for part in model.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            fully_shard(part)
    fully_shard(model)
    return model


# -- what is measured -------------------------------------------------------------------------------------------------


def _time(run: Any, device: torch.device) -> dict[str, list[float]]:
    return time_steps(run, device=device, warmup_steps=0, num_steps=1).wall


def _communication(step: TrainStep, batch: Tensor, device: torch.device) -> float:
    """Seconds of averaging alone: of gradients that are all there, with nothing else to do."""
    model: Any = step.model
    with model.no_sync():
        step.loss(step.logits(batch[0]), batch[1]).backward()
    (seconds,) = _time(lambda watch: model.finish_gradient_synchronization(), device)[STEP]
    model.zero_grad(set_to_none=True)
    return seconds


def _bytes(step: TrainStep, batch: Tensor) -> dict[str, int]:
    """Of parameters, gradients and optimizer state, on the rank that has most; as they are just before an update."""
    found: dict[str, int] = {}

    @contextmanager
    def watch(phase: str) -> Iterator[None]:
        if phase == "optimizer":
            found["gradient_memory"] = _total(p.grad for p in step.model.parameters())
        yield

    as_watch: Watch = watch
    step(batch[0], batch[1], watch=as_watch)
    inner: Any = getattr(step.optimizer, "optim", step.optimizer)  # torch's ZeRO keeps its state in another
    found["parameter_memory"] = _total(step.model.parameters())
    found["optimizer_memory"] = _total(value for state in inner.state.values() for value in state.values())
    names = ("parameter_memory", "gradient_memory", "optimizer_memory")
    sizes = torch.tensor([found[name] for name in names])
    dist.all_reduce(sizes, op=dist.ReduceOp.MAX)
    return dict(zip(names, sizes.tolist(), strict=True))


def _total(tensors: Iterable[Any]) -> int:
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors if isinstance(t, Tensor))
    return sum(t.nbytes for t in local)


def _errors(steps: dict[str, TrainStep]) -> dict[str, float]:
    """Largest distance of a weight from that of torch's own arrangement, or of the last, after the same steps."""
    weights = {name: _weights(step.model) for name, step in steps.items()}
    reference = weights[next((name for name in weights if name.startswith("torch")), list(weights)[-1])]
    return {
        name: max((a - b).abs().max().item() for a, b in zip(found, reference, strict=True))
        for name, found in weights.items()
    }


def _weights(model: nn.Module) -> list[Tensor]:
    if isinstance(model, FSDP):
        return list(gather_full_params(model).values())
    return [p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]
