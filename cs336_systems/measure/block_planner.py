"""Plans whole blocks for a memory budget: any model, its own bytes and FLOPs, its peak by tracing.

Plans form a chain from the fastest, which keeps everything, to the one with the lowest peak. Each recomputes or
offloads one block more than the one before, by the method that costs less time per byte as long as it can. A trace
takes seconds, so the search interpolates between peaks that it knows: the peak falls almost linearly along the chain.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from cs336_systems.config import RunConfig
from cs336_systems.measure.flop_counter import count_flops
from cs336_systems.measure.memory_trace import fake_step, predict_by_tracing
from cs336_systems.model import TransformerLM
from cs336_systems.predict.activation_plan import KEEP, OFFLOAD, RECOMPUTE
from cs336_systems.predict.memory_model import MemoryEstimate
from cs336_systems.predict.memory_planner import BACKWARD_RATIO, COPY_SLOWDOWN, Rates, not_enough
from cs336_systems.step.block_memory import BlockMemory, ChoiceByBlock, find_blocks
from cs336_systems.step.memory_budget import machine_limits
from cs336_systems.step.train_step import TrainStep


@dataclass(frozen=True)
class PlannedBlocks:
    """A plan for whole blocks with its prediction."""

    plan: ChoiceByBlock
    budget: int
    estimate: MemoryEstimate
    host_bytes: int
    """Pinned host memory."""


class BlockCosts(NamedTuple):
    """Bytes that one block saves for backward, and its computation."""

    blocks: int
    saved: int
    """Bytes that offloading can move to the host."""
    inputs: int
    """Bytes of the block's arguments, which recomputation keeps."""
    flops: int
    """FLOPs of the forward pass."""


def build_step(config: RunConfig) -> TrainStep:
    """Build a step with random weights, within the memory budget of `config` on this machine."""
    return TrainStep.build(config, blocks_for_machine(config))


def blocks_for_machine(config: RunConfig) -> ChoiceByBlock | None:
    """Return the plan for whole blocks; None if the configuration has no such plan."""
    return plan_blocks(config, *machine_limits(config)).plan if config.plans_whole_blocks else None


def predict_step(step: TrainStep) -> MemoryEstimate:
    """Return the peak of a step by tracing its configuration, with its plan if it has one."""
    bare = dataclasses.replace(step.config, memory_budget="")
    plan = step.model.plan if isinstance(step.model, TransformerLM) else None
    return predict_by_tracing(bare, None if step.blocks is None else partial(_apply, step.blocks), plan)


@lru_cache(maxsize=64)
def plan_blocks(config: RunConfig, budget: int, rates: Rates, host_limit: float = math.inf) -> PlannedBlocks:
    """Return the fastest plan of the chain whose predicted peak is within `budget` bytes; else UserError."""
    bare = dataclasses.replace(config, memory_budget="")
    costs = block_costs(bare)
    most = int(min(costs.blocks - 1, host_limit // max(1, costs.saved))) if config.device_type == "cuda" else 0
    plans = _chain(costs.blocks, most, offloads_first=_offloading_is_cheaper(costs, rates))

    @cache
    def estimate(number: int) -> MemoryEstimate:
        return predict_by_tracing(bare, partial(_apply, plans[number]))

    found = _first_within(budget, lambda number: estimate(number).peak, len(plans))
    if found is None:
        raise not_enough(budget, estimate(len(plans) - 1).peak)
    plan = plans[found]
    return PlannedBlocks(plan, budget, estimate(found), plan.count(OFFLOAD) * costs.saved)


def block_costs(config: RunConfig) -> BlockCosts:
    """Return the costs of a block in the middle of the model, by tracing a forward pass."""
    with fake_step(config) as (step, batch):
        blocks = find_blocks(step.model)
        middle = len(blocks) // 2
        flops: list[int] = []
        inputs: list[int] = []
        blocks[middle].forward = partial(_counted, blocks[middle].forward, flops, inputs)
        plan = tuple(OFFLOAD if number == middle else KEEP for number in range(len(blocks)))
        memory = BlockMemory(step.model, plan)
        logits = step.logits(batch[0])
        saved = max(memory.offloaded_bytes, default=0)
        del logits
    return BlockCosts(len(blocks), saved, inputs[0] if inputs else 0, flops[0] if flops else 0)


def _counted(forward: Callable[..., Any], flops: list[int], inputs: list[int], *args: Any, **kwargs: Any) -> Any:
    """Run a block; append its FLOPs and the bytes of its arguments."""
    results: list[Any] = []
    flops.append(count_flops(lambda: results.append(forward(*args, **kwargs))))
    inputs.append(sum(leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)))
    return results[0]


def _apply(plan: ChoiceByBlock, step: TrainStep) -> None:
    BlockMemory(step.model, plan)


def _offloading_is_cheaper(costs: BlockCosts, rates: Rates) -> bool:
    """Return True if offloading a block takes fewer seconds per byte than recomputing it."""
    forward, copy = costs.flops / rates.matmul, costs.saved / rates.host
    waiting = max(0.0, copy - forward) + max(0.0, copy - BACKWARD_RATIO * forward) + 2 * COPY_SLOWDOWN * copy
    return waiting * max(0, costs.saved - costs.inputs) < forward * costs.saved


def _chain(blocks: int, most: int, *, offloads_first: bool) -> list[ChoiceByBlock]:
    """Return plans by falling memory. At most `most` blocks offload. Blocks that keep the most come last: backward
    reaches them first, while the memory of the others is still in use."""

    def plan(offloaded: int, recomputed: int) -> ChoiceByBlock:
        kept = blocks - offloaded - recomputed
        return (*[OFFLOAD] * offloaded, *[RECOMPUTE] * recomputed, *[KEEP] * kept)

    if offloads_first:
        return [*(plan(n, 0) for n in range(most + 1)), *(plan(most, n) for n in range(1, blocks - most + 1))]
    return [*(plan(0, n) for n in range(blocks + 1)), *(plan(n, blocks - n) for n in range(1, most + 1))]


def _first_within(budget: int, peak: Callable[[int], int], count: int) -> int | None:
    """Return the first of `count` indices whose peak is within the budget, for falling peaks; None if the last is
    not."""
    before, last = 0, count - 1
    if peak(before) <= budget:
        return before
    if peak(last) > budget:
        return None
    while last - before > 1:
        share = (peak(before) - budget) / (peak(before) - peak(last))
        guess = min(max(before + math.ceil(share * (last - before)), before + 1), last - 1)
        if peak(guess) <= budget:
            last = guess
        else:
            before = guess
    return last
