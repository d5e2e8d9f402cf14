"""Every allocation of one step, labelled: parameters, gradients, optimizer state, activations of a module, ...

Labels come from the operators (`StorageTracker`): the running module, the calling line, which tensors become gradients.
Blocks come from the history of CUDA's allocator, which also holds memory that no operator returns; each block gets the
label of the tensor at its address at that time. Without a GPU the operators' storages are the blocks.
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

from cs336_systems.kernels.ranges import tensors_named
from cs336_systems.measure.memory_trace import StorageTracker, labelled
from cs336_systems.measure.where import ModuleStack, calling_line, describe_tensor
from cs336_systems.predict.memory_model import CUBLAS_WORKSPACES, ROUNDING
from cs336_systems.step.train_step import TrainStep, Watch
from cs336_systems.timeline import Block, Span, Timeline

UNLABELLED = "unlabelled"
TEMPORARY = "temporary"
MOST_EVENTS = 1_000_000
"""Length limit of the allocator's history; a step of the largest model has a hundred thousand events."""


@dataclass
class _Entry:
    """A storage as seen by the operators."""

    label: str
    size: int
    address: int
    start: float
    end: float | None = None
    module: str = ""
    what: str = ""
    line: str = ""


class BlockLog:
    """Records the storages of a StorageTracker. Times are seconds since the epoch, as in the allocator's history."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.phases: list[Span] = []
        self.modules = ModuleStack()
        self._live: dict[int, _Entry] = {}

    def allocated(self, key: int, label: str, tensor: Tensor, operator: Any) -> None:
        storage = tensor.untyped_storage()
        entry = _Entry(label, storage.nbytes(), storage.data_ptr(), time.time())
        if operator is not None:
            entry.what = f"{operator.name()} {describe_tensor(tensor)}"
            entry.module, entry.line = self.modules.innermost, calling_line()
            if (
                label == TEMPORARY and not self.modules.is_empty
            ):  # a forward pass inside backward recomputes activations
                entry.label = "activations"
        self.entries.append(entry)
        self._live[key] = entry

    def relabelled(self, key: int, label: str) -> None:
        self._live[key].label = label

    def freed(self, key: int) -> None:
        self._live.pop(key).end = time.time()

    @contextmanager
    def watch(self, phase: str) -> Iterator[None]:
        start = time.time()
        yield
        self.phases.append(Span(phase, start, time.time()))


@dataclass(frozen=True)
class MemoryTrace:
    timeline: Timeline
    peak: int
    """Peak bytes of the allocator; of tensors on a CPU."""
    parts: dict[str, int]
    """Bytes by label at the peak; they add up to it."""
    phase: str
    """The phase in which the peak occurs."""
    largest: list[Block]


def trace_memory(step: TrainStep, batch: tuple[Tensor, Tensor], *, largest: int = 20) -> MemoryTrace:
    """Trace every allocation of a warmed-up step, which then takes several times as long."""
    log = BlockLog()
    tracker = StorageTracker(log=log)
    with ExitStack() as stack:
        for tensor in batch:
            tracker.track(tensor, "inputs")
        stack.enter_context(labelled(step, tracker))
        stack.enter_context(log.modules.following(step.model))
        stack.enter_context(tensors_named(lambda tensor, name: tracker.track(tensor, name, relabel=True)))
        history = stack.enter_context(_recorded_history()) if step.device.type == "cuda" else None
        begin = time.time()
        with tracker:
            step(*batch, watch=_both(tracker.watch, log.watch))
        if history is not None:
            history.stop()
    blocks = _storage_blocks(log, begin) if history is None else _allocator_blocks(log, history, begin)
    phases = [Span(span.name, span.start - begin, span.end - begin) for span in log.phases]
    device = "CPU" if history is None else torch.cuda.get_device_name(step.device)
    timeline = Timeline(_title(step), device, blocks, phases)
    moment, requested = timeline.peak()
    parts = timeline.parts_at(moment)
    peak = requested if history is None else history.peak
    if beyond := peak - requested:
        parts[ROUNDING] = beyond
    phase = next((span.name for span in phases if span.start <= moment < span.end), "")
    during = [block for block in blocks if block.start > 0]
    return MemoryTrace(timeline, peak, parts, phase, sorted(during, key=lambda block: -block.size)[:largest])


def _title(step: TrainStep) -> str:
    run = step.config
    shape = f"batch {run.batch_size}, context {run.model.context_length}"
    recomputed = f", checkpoint {run.checkpoint_blocks}" if run.checkpoint_blocks else ""
    return (
        f"{run.model_factory or run.size}, {run.mode}, {run.precision}, {shape}, attention {run.attention}{recomputed}"
    )


def _both(first: Watch, second: Watch) -> Watch:
    @contextmanager
    def watch(phase: str) -> Iterator[None]:
        with first(phase), second(phase):
            yield

    as_watch: Watch = watch
    return as_watch


def _storage_blocks(log: BlockLog, begin: float) -> list[Block]:
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
    """The blocks that the allocator held before a recording, and its events during it."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.before = _held()
        self.events: list[dict[str, Any]] = []
        self.peak = 0

    def stop(self) -> None:
        torch.cuda.synchronize()
        self.peak = torch.cuda.max_memory_allocated()
        snapshot: dict[str, Any] = dict(torch.cuda.memory._snapshot())
        self.events = [event for trace in snapshot["device_traces"] for event in trace]


@contextmanager
def _recorded_history() -> Iterator[_History]:
    history = _History()
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=MOST_EVENTS)
    try:
        yield history
    finally:
        torch.cuda.memory._record_memory_history(None)


def _held() -> dict[int, int]:
    """Return address -> bytes of the blocks that are allocated now."""
    return {
        block["address"]: block.get("requested_size", block["size"])
        for segment in torch.cuda.memory._snapshot()["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


def _allocator_blocks(log: BlockLog, history: _History, begin: float) -> list[Block]:
    """Return the allocator's blocks, each with the label of the tensor at its address."""
    at_address: dict[int, list[_Entry]] = defaultdict(list)
    for entry in log.entries:
        at_address[entry.address].append(entry)
    found = [Block(UNLABELLED, size, 0.0, None) for size in history.before.values()]
    index_at = dict(zip(history.before, range(len(found)), strict=True))
    addresses = list(history.before)
    for event in history.events:
        now = max(0.0, event["time_us"] / 1e6 - begin)
        address = event["addr"]
        if event["action"] == "alloc":
            index_at[address] = len(found)
            addresses.append(address)
            found.append(Block(UNLABELLED, event["size"], now, None))
        elif event["action"] == "free_completed" and address in index_at:
            index = index_at.pop(address)
            found[index] = replace(found[index], end=now)
    return [_label(block, at_address[address], begin) for block, address in zip(found, addresses, strict=True)]


def _label(block: Block, entries: list[_Entry], begin: float) -> Block:
    """Label a block by its tensor, which is seen after the block is allocated and before its address is reused."""
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
    if block.start == 0 and block.size in CUBLAS_WORKSPACES:
        return replace(block, label="workspace")
    if block.end is not None:  # no operator returned it: an operator allocated and freed it
        return replace(block, label=TEMPORARY, what="inside an operator")
    return block
