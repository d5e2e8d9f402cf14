"""Every block of memory of one step, labelled: parameter, gradient, optimizer state, activation (of which module), ...

What a block *is* comes from the operators (`StorageTracker`): which module ran, which line called, what became a
gradient. Which blocks there *are* comes from CUDA's allocator, whose history also holds what no operator returns; each
of its blocks is given the label of the tensor that lay at its address at that time. Without a GPU the operators' own
account serves for both.
"""

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cs336_systems.measure.memory_trace import StorageTracker, labelled
from cs336_systems.measure.where import ModuleStack, calling_line
from cs336_systems.predict.memory_model import CUBLAS_WORKSPACE, ROUNDING
from cs336_systems.record import MIB
from cs336_systems.step.train_step import TrainStep, Watch
from cs336_systems.timeline import Block, Span, Timeline

UNLABELLED = "unlabelled"
TEMPORARY = "temporary"
MOST_EVENTS = 1_000_000
"""Of the allocator's history: a step of the largest model has a hundred thousand."""


@dataclass
class _Entry:
    """What the operators know of a block."""

    label: str
    size: int
    address: int
    start: float
    end: float | None = None
    module: str = ""
    what: str = ""
    line: str = ""


class BlockLog:
    """Listens to a StorageTracker. Times are of the epoch, as the allocator's are."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.phases: list[Span] = []
        self.modules = ModuleStack()
        self._alive: dict[int, _Entry] = {}

    def born(self, key: int, label: str, tensor: Tensor, operator: Any) -> None:
        storage = tensor.untyped_storage()
        entry = _Entry(label, storage.nbytes(), storage.data_ptr(), time.time())
        if operator is not None:
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            entry.what = f"{operator.name()} {shape} {str(tensor.dtype).removeprefix('torch.')}"
            entry.module, entry.line = self.modules.innermost, calling_line()
            if label == TEMPORARY and not self.modules.is_empty:  # a forward inside backward: activations come back
                entry.label = "activations"
        self.entries.append(entry)
        self._alive[key] = entry

    def relabelled(self, key: int, label: str) -> None:
        self._alive[key].label = label

    def died(self, key: int) -> None:
        self._alive.pop(key).end = time.time()

    @contextmanager
    def watch(self, phase: str) -> Iterator[None]:
        start = time.time()
        yield
        self.phases.append(Span(phase, start, time.time()))


@dataclass(frozen=True)
class MemoryTrace:
    timeline: Timeline
    peak: int
    """Bytes, by the allocator; of tensors where there is none."""
    parts: dict[str, int]
    """Of the peak, by label; they add up to it."""
    phase: str
    """In which the peak was."""
    largest: list[Block]


def trace_memory(step: TrainStep, batch: tuple[Tensor, Tensor], *, largest: int = 20) -> MemoryTrace:
    """One step of one that has been warmed up, followed block by block; it takes several times as long as another."""
    log = BlockLog()
    tracker = StorageTracker(log=log)
    with ExitStack() as stack:
        for tensor in batch:
            tracker.track(tensor, "inputs")
        stack.enter_context(labelled(step, tracker))
        stack.enter_context(log.modules.following(step.model))
        history = stack.enter_context(_History.recorded()) if step.device.type == "cuda" else None
        begin = time.time()
        with tracker:
            step(*batch, watch=_both(tracker.watch, log.watch))
        if history is not None:
            history.stop()
    blocks = _tensors(log, begin) if history is None else _allocated(log, history, begin)
    phases = [Span(span.name, span.start - begin, span.end - begin) for span in log.phases]
    timeline = Timeline(_title(step), _device_name(step.device), blocks, phases)
    moment, requested = timeline.peak()
    parts = timeline.parts_at(moment)
    peak = requested if history is None else history.peak
    if beyond := peak - requested:
        parts[ROUNDING] = beyond
    phase = next((span.name for span in phases if span.start <= moment < span.end), "")
    made = [block for block in blocks if block.start > 0]
    return MemoryTrace(timeline, peak, parts, phase, sorted(made, key=lambda block: -block.size)[:largest])


def _title(step: TrainStep) -> str:
    run = step.config
    shape = f"batch {run.batch_size}, context {run.model.context_length}"
    recomputed = f", checkpoint {run.checkpoint_blocks}" if run.checkpoint_blocks else ""
    return (
        f"{run.model_factory or run.size}, {run.mode}, {run.precision}, {shape}, attention {run.attention}{recomputed}"
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _both(first: Watch, second: Watch) -> Watch:
    @contextmanager
    def watch(phase: str) -> Iterator[None]:
        with first(phase), second(phase):
            yield

    as_watch: Watch = watch
    return as_watch


def _tensors(log: BlockLog, begin: float) -> list[Block]:
    return [
        Block(
            entry.label,
            entry.size,
            max(0.0, entry.start - begin),
            None if entry.end is None else max(0.0, entry.end - begin),
            entry.module,
            entry.what,
            entry.line,
        )
        for entry in log.entries
        if entry.size
    ]


# -- CUDA's allocator -------------------------------------------------------------------------------------------------


class _History:
    """What the allocator held before, and what it did while recorded."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.before = _held()
        self.events: list[dict[str, Any]] = []
        self.peak = 0

    @classmethod
    @contextmanager
    def recorded(cls) -> Iterator["_History"]:
        history = cls()
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=MOST_EVENTS)
        try:
            yield history
        finally:
            torch.cuda.memory._record_memory_history(None)

    def stop(self) -> None:
        torch.cuda.synchronize()
        self.peak = torch.cuda.max_memory_allocated()
        self.events = [event for trace in torch.cuda.memory._snapshot()["device_traces"] for event in trace]


def _held() -> dict[int, int]:
    """Address -> bytes of what is allocated now."""
    return {
        block["address"]: block.get("requested_size", block["size"])
        for segment in torch.cuda.memory._snapshot()["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


def _allocated(log: BlockLog, history: _History, begin: float) -> list[Block]:
    """The allocator's blocks, each with the label of the tensor that lay there."""
    at_address: dict[int, list[_Entry]] = defaultdict(list)
    for entry in log.entries:
        at_address[entry.address].append(entry)
    found = [Block(UNLABELLED, size, 0.0, None) for size in history.before.values()]
    place = dict(zip(history.before, range(len(found)), strict=True))
    addresses = list(history.before)
    for event in history.events:
        now = max(0.0, event["time_us"] / 1e6 - begin)
        address = event["addr"]
        if event["action"] == "alloc":
            place[address] = len(found)
            addresses.append(address)
            found.append(Block(UNLABELLED, event["size"], now, None))
        elif event["action"] == "free_completed" and address in place:
            index = place.pop(address)
            found[index] = replace(found[index], end=now)
    return [_named(block, at_address[address], begin) for block, address in zip(found, addresses, strict=True)]


def _named(block: Block, entries: list[_Entry], begin: float) -> Block:
    """A tensor is known a moment after its block was allocated, and before another one lies there."""
    if block.start == 0:
        known = [entry for entry in entries if entry.start <= begin]
        entry = known[-1] if known else None
    else:
        index = bisect_left(entries, begin + block.start, key=lambda entry: entry.start)
        entry = entries[index] if index < len(entries) else None
        if entry is not None and block.end is not None and entry.start - begin > block.end:
            entry = None
    if entry is not None:
        return replace(block, label=entry.label, module=entry.module, what=entry.what, line=entry.line)
    if block.start == 0 and block.size in (CUBLAS_WORKSPACE, 8.125 * MIB):
        return replace(block, label="workspace")
    if block.end is not None:  # no operator returned it: it lived inside one
        return replace(block, label=TEMPORARY, what="inside an operator")
    return block
