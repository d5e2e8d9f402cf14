"""Ways to train on several ranks, side by side: the instrument of `ddp`, `bucket_model`, `optimizer_sharding`, `fsdp`.

An arrangement is a wrapper and an optimizer, ours or torch's. All arrangements of a cell train the same model on the
same data in one group of ranks, in turns, a step each: what disturbs the machine disturbs all of them.

Between processes of one machine sending takes the cores that backward needs, and hides nothing. `link` stands in for a
network: all-reduces take as long as they would on one of that latency and bandwidth (measure/wire.py).
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.config import RunConfig, UserError
from cs336_systems.measure.timing import STEP, time_steps
from cs336_systems.measure.wire import Link, Wire
from cs336_systems.parallel import DDP, FSDP, FlatDDP, NaiveDDP, ShardedOptimizer, gather_full_params
from cs336_systems.parallel.collectives import message_device
from cs336_systems.parallel.launch import in_ranks, this_rank
from cs336_systems.step.train_step import TrainStep, Watch, build_model

BUCKET_MB = 25
"""Where the buckets are not the subject."""
LEARNING_RATE = 1e-3


def measure_arrangements(config: dict[str, Any]) -> list[list[Any]]:
    return in_ranks(_measure, config)


def _measure(config: dict[str, Any]) -> list[list[Any]]:
    rank = this_rank(config["device"].split(":")[0])
    run = RunConfig.of({**config, "device": str(rank.device)})
    generator = torch.Generator().manual_seed(run.seed + rank.rank)  # every rank has its own part of the batch
    shape = (2, run.batch_size, run.model.context_length)
    batch = torch.randint(run.model.vocab_size, shape, generator=generator).to(rank.device)
    steps: dict[str, TrainStep] = {}
    allocated: dict[str, dict[str, int]] = {}
    for name in config["arrangements"]:
        steps[name], allocated[name] = _build_and_step(name, run, batch)
    times: dict[str, dict[str, list[float]]] = {name: {} for name in steps}
    alone: dict[str, list[float]] = {name: [] for name in steps}
    memory: dict[str, dict[str, int]] = {}
    link = config.get("link")
    with Wire(link).tapped() if link else nullcontext():  # on the machine as it is nothing stands between
        for number in range(run.warmup_steps + config["rounds"]):
            for name, step in steps.items():
                found = _time(lambda watch, step=step: step(*batch, watch=watch), rank.device)
                if number >= run.warmup_steps:
                    for phase, samples in found.items():
                        times[name].setdefault(phase, []).extend(samples)
        for name, step in steps.items():
            if hasattr(step.model, "no_sync") and hasattr(step.model, "finish_gradient_synchronization"):
                alone[name] = [_communication(step, batch, rank.device) for _ in range(config["rounds"])]
    lanes: dict[str, list[list[Any]]] = {}
    for name, step in steps.items():
        lanes[name] = _lanes(step, batch, link)
        memory[name] = _bytes(step, batch) | allocated[name]
    errors = _errors(steps)
    return [
        row
        for name in steps
        for row in (
            *([f"{name}: {phase}_time", "s", samples] for phase, samples in times[name].items()),
            *([[f"{name}: communication_time", "s", alone[name]]] if alone[name] else []),
            *([f"{name}: {part}", "B", [size]] for part, size in memory[name].items()),
            *([f"{name}: {metric}", unit, samples] for metric, unit, samples in lanes[name]),
            [f"{name}: weight_error", "1", [errors[name]]],
        )
    ]


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


def _lanes(step: TrainStep, batch: Tensor, link: Link | None) -> list[list[Any]]:
    """When this rank computed and when it sent, in one step more; seconds since its beginning."""
    phases: list[tuple[str, float, float]] = []

    @contextmanager
    def watch(phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if batch.device.type == "cuda":
            torch.cuda.synchronize()
        phases.append((phase, start, time.perf_counter()))

    as_watch: Watch = watch
    dist.barrier()
    with Wire(link).tapped() as wire:
        begin = time.perf_counter()
        step(batch[0], batch[1], watch=as_watch)
    rows: list[list[Any]] = [
        ["phase", "", [phase for phase, *_ in phases]],
        ["phase_start", "s", [start - begin for _, start, _ in phases]],
        ["phase_end", "s", [end - begin for *_, end in phases]],
    ]
    if sent := [message for message in wire.messages if message.end is not None]:
        rows += [
            ["message", "", [message.collective for message in sent]],
            ["message_size", "B", [message.nbytes for message in sent]],
            ["message_start", "s", [message.start - begin for message in sent]],
            ["message_end", "s", [message.end - begin for message in sent if message.end is not None]],
        ]
    return rows


def _build_and_step(name: str, run: RunConfig, batch: Tensor) -> tuple[TrainStep, dict[str, int]]:
    """An arrangement after its first step; and what CUDA's allocator says it took, the arrangements before it apart."""
    if batch.device.type != "cuda":
        step = _build(name, run)
        step(batch[0], batch[1])
        return step, {}
    before = torch.cuda.memory_allocated()
    step = _build(name, run)
    found = {"init_memory": torch.cuda.memory_allocated() - before}
    step(batch[0], batch[1])  # the first one makes the state of the optimizer: measured is the second

    @contextmanager
    def watch(phase: str) -> Iterator[None]:
        if phase == "optimizer":
            found["before_update_memory"] = torch.cuda.memory_allocated() - before
        yield

    as_watch: Watch = watch
    torch.cuda.reset_peak_memory_stats()
    step(batch[0], batch[1], watch=as_watch)
    found["after_update_memory"] = torch.cuda.memory_allocated() - before
    found["peak_memory"] = torch.cuda.max_memory_allocated() - before
    return step, _largest(found)


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
    return _largest(found)


def _largest(sizes: dict[str, int]) -> dict[str, int]:
    """Over ranks, which all have the same names in the same order."""
    largest = torch.tensor(list(sizes.values()), device=message_device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return dict(zip(sizes, largest.tolist(), strict=True))


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
