"""Refuses a run that cannot fit into memory, by prediction, before anything is built. No torch.

It must never refuse a run that fits: where a rank's peak is not predicted, only a lower bound counts, which is the
weights, gradients and AdamW's state that a rank holds, and the tokens of its batch. Of ranks of torch's engine that
split layers, but do not shard weights, it is the peak of one micro batch.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from cs336_systems.config import RunConfig, UserError
from cs336_systems.predict.building_memory import building_peak
from cs336_systems.predict.engine_memory import engine_peak, is_predicted
from cs336_systems.predict.fit import FIT_MARGIN, LARGER_GROUPS, usable_bytes
from cs336_systems.predict.memory_model import estimate
from cs336_systems.record import GIB
from cs336_systems.train.settings import TrainSettings

TOKEN_BYTES = 8
"""Bytes of a token in a batch, whose inputs and targets share memory on a CPU."""
WEIGHT_BYTES = 8
"""Bytes of a weight and its gradient, in fp32."""
GRADIENT_BYTES = 4
"""Bytes of a gradient, in fp32."""
MOMENT_BYTES = 8
"""Bytes of AdamW's two moments of a weight, in fp32."""
LARGEST_BATCH = 1024 * GIB
"""Bytes of a rank's batch that no machine has."""


class Memory(NamedTuple):
    """The memory that ranks share, and its name in errors."""

    capacity: float
    owner: str
    ranks: int = 1
    """Ranks that share it."""

    def may_hold(self, need: "Need") -> bool:
        return self._of_all(need) <= FIT_MARGIN * self.capacity

    def surely_holds(self, need: "Need") -> bool:
        return self._of_all(need) + need.uncertain <= usable_bytes(self.capacity)

    def gib(self, need: "Need") -> str:
        return f"{self._of_all(need) / GIB:,.1f} GiB"

    def _of_all(self, need: "Need") -> float:
        """Return the bytes that all ranks need while one of them is at its peak."""
        return need.peak + (self.ranks - 1) * need.lasting


class Need(NamedTuple):
    """Bytes that a rank needs."""

    peak: float
    lasting: float
    """The part that all ranks hold at the same time: weights, gradients, AdamW's state and tokens."""
    uncertain: float = 0.0
    """Bytes by which the peak may be larger, because `peak` is only a lower bound."""

    @property
    def is_predicted(self) -> bool:
        return not self.uncertain


class Share(NamedTuple):
    """Sequences of a step on one rank."""

    sequences: int
    micro_batch: int


def require_memory(settings: TrainSettings, device: str, world_size: int, memory: Memory) -> None:
    """Raise UserError if `memory` cannot hold a step of this run."""
    run, share = settings.run_config(device, world_size), _share(settings, world_size)
    need = _need(settings, run, share, world_size)
    if memory.may_hold(need):
        return
    advice = _way_out(settings, run, share, world_size, memory)
    raise UserError(f"a step of this model needs {_compared(need, memory)} (predicted, not tried); {advice}")


def ran_out(settings: TrainSettings, device: str, world_size: int, memory: Memory) -> UserError:
    """Return the error for a step that ran out of memory although it was not refused."""
    run, share = settings.run_config(device, world_size), _share(settings, world_size)
    need = _need(settings, run, share, world_size)
    if math.isinf(need.uncertain):
        there = f"and {memory.owner} has {memory.capacity / GIB:,.1f} GiB"
        return UserError(f"out of memory: what a step needs is not predicted here, {there}; {_attempt(run, share)}")
    others = "; other programs may use it, too: nvidia-smi lists them" if memory.surely_holds(need) else ""
    advice = _way_out(settings, run, share, world_size, memory)
    predicted = f"a step of this model is predicted to need {_compared(need, memory)}"
    return UserError(f"out of memory: {predicted}{others}; {advice}")


def _attempt(run: RunConfig, share: Share) -> str:
    """Return what to try where nothing is predicted."""
    flags = [f"--micro_batch_size {own.micro_batch}" for own in list(_smaller(share))[1:2]]
    with contextlib.suppress(UserError):  # recomputation that this configuration does not support
        if dataclasses.replace(run, checkpoint_blocks=1) != run:
            flags.append("--checkpoint_blocks 1")
    return f"try {' or '.join([*flags, 'a smaller --size'])}"


def _compared(need: Need, memory: Memory) -> str:
    sharing = f" for the {memory.ranks} ranks of this machine" if memory.ranks > 1 else ""
    bound = "" if need.is_predicted else "at least "
    return f"{bound}{memory.gib(need)} of memory{sharing}, and {memory.owner} has {memory.capacity / GIB:,.1f} GiB"


def require_batch(settings: TrainSettings, world_size: int, memory: Memory | None = None) -> None:
    """Raise UserError if the tokens of a step alone are more than `memory`, or than any machine has.

    It may be called before anything else is known of the settings, such as whether ranks can share the batch.
    """
    _, shares = settings.parallel.data_place(0, world_size)
    sequences = settings.data.batch_size // max(shares, 1)
    needed = _batch_bytes(settings, sequences) * (memory.ranks if memory else 1)
    if needed <= (FIT_MARGIN * memory.capacity if memory else LARGEST_BATCH):
        return
    there = f"{memory.owner} has {memory.capacity / GIB:,.1f} GiB" if memory else "no machine has that"
    raise UserError(
        f"--batch_size {settings.data.batch_size}: the tokens of a step alone need {needed / GIB:,.1f} GiB of memory, "
        f"and {there}; use a smaller --batch_size"
    )


def _share(settings: TrainSettings, world_size: int) -> Share:
    _, shares = settings.parallel.data_place(0, world_size)
    sequences = settings.data.batch_size // shares
    return Share(sequences, sequences // settings.data.micro_batches(shares))


def _batch_bytes(settings: TrainSettings, sequences: int) -> int:
    return TOKEN_BYTES * sequences * settings.model.context_length


def _need(settings: TrainSettings, run: RunConfig, share: Share, world_size: int) -> Need:
    """Return what a rank needs for a step in micro batches of `share`."""
    run = dataclasses.replace(run, batch_size=share.micro_batch)
    parallel, weights = settings.parallel, run.model.parameters
    packs = "optimizer" in run.fast_parts
    sharded, waiting = 0.0, _batch_bytes(settings, share.sequences - share.micro_batch)
    if parallel.engine == "torch":
        axes = parallel.axes(world_size)
        sharded = (WEIGHT_BYTES + MOMENT_BYTES) * weights * (1 - axes.dp_replicate / world_size)
    elif parallel.wrapper == "fsdp":
        sharded = (WEIGHT_BYTES + MOMENT_BYTES) * weights * (1 - 1 / world_size)
    elif parallel.wrapper == "ddp-sharded":
        sharded = MOMENT_BYTES * weights * (1 - 1 / world_size)
    lasting = (WEIGHT_BYTES + MOMENT_BYTES) * weights - sharded + waiting
    if packs:
        lasting = building_peak(run).peak + waiting
    if (peak := _engine_peak(settings, run, share, world_size)) is not None:
        axes = parallel.axes(world_size)
        gradients = GRADIENT_BYTES * weights * axes.dp_replicate / world_size
        # Without shards the peak is that of the first micro batch, which finds no gradients.
        accumulates = share.sequences > share.micro_batch and axes.of_weights.dp_shard == 1
        return Need(max(lasting, peak + waiting), lasting, gradients if accumulates else 0.0)
    splits_weights = parallel.engine == "torch" or (parallel.wrapper == "fsdp" and not packs)
    if splits_weights or run.compile or run.memory_budget or settings.data.pack == "documents":
        return Need(lasting, lasting, math.inf)
    return Need(max(lasting, estimate(run).peak - sharded + waiting), lasting)


def _engine_peak(settings: TrainSettings, run: RunConfig, share: Share, world_size: int) -> int | None:
    """Return the peak of a step on a rank of torch's engine, or without shards that of its first micro batch. None: it
    is not predicted."""
    if settings.parallel.engine == "ours":
        return None
    mesh = settings.parallel.axes(world_size)
    is_known = run.precision in ("fp32", "bf16") and run.attention in ("auto", "reference", "sdpa")
    is_known = is_known and run.device_type == "cuda" and settings.data.pack == "none"
    is_sharded = mesh.of_weights.dp_shard > 1
    has_kernels = is_sharded or run.fast == "off"  # fused kernels are predicted under fully_shard only
    if not (is_known and has_kernels and is_predicted(run, mesh, share.micro_batch)):
        return None
    micro_batches = share.sequences // share.micro_batch if is_sharded else 1
    return engine_peak(run, mesh, micro_batches, share.micro_batch)


def _way_out(settings: TrainSettings, run: RunConfig, share: Share, world_size: int, memory: Memory) -> str:
    """Return what to do instead: smaller micro batches, then recomputation, if either is predicted to be enough."""
    need = _need(settings, run, share, world_size)
    is_hopeless = not memory.may_hold(need._replace(peak=need.lasting))
    recomputed = () if is_hopeless else dict.fromkeys((run.checkpoint_blocks, 1, *LARGER_GROUPS))
    for blocks, smaller in product(recomputed, _smaller(share)):
        with contextlib.suppress(UserError):  # recomputation that this configuration does not support
            changed = dataclasses.replace(run, checkpoint_blocks=blocks)
            if (changed, smaller) == (run, share):
                continue
            if memory.surely_holds(_need(settings, changed, smaller, world_size)):
                flags = [f"--checkpoint_blocks {blocks}"] if blocks != run.checkpoint_blocks else []
                flags += [f"--micro_batch_size {smaller.micro_batch}"] if smaller != share else []
                return f"it is predicted to fit with {' '.join(flags)}"
    on_gpu, ours = run.device_type == "cuda", settings.parallel.engine == "ours"
    ways = ["a smaller --size"]
    if on_gpu and ours and not (is_hopeless or run.memory_budget or run.compile):
        ways.append("--memory_budget auto")
    if ours and world_size > 1 and settings.parallel.wrapper != "fsdp":
        ways.append("--parallel fsdp")
    elif ours and on_gpu:
        ways.append("more ranks with --parallel fsdp")
    return f"use {' or '.join(ways)}; cs336 {'fit shows what fits' if on_gpu else 'memory shows what a step needs'}"


def _smaller(share: Share) -> Iterator[Share]:
    """Yield the share in micro batches of its size, half of it, a quarter, and so on."""
    size = share.micro_batch
    while size and share.sequences % size == 0:
        yield share._replace(micro_batch=size)
        size //= 2
