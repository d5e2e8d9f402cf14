"""Chooses what each block keeps, recomputes and offloads, so that a step is fastest within a memory budget. No torch.

A block has 162 possible plans. Each costs memory between forward and backward, and time: matmuls and attention that are
computed twice, and copies that take longer than the computation beside them. The search is exact for these costs:
`_fastest` finds the least time for every amount of memory by dynamic programming over the blocks. The simulation of
fast_memory.py then says which of those amounts has a peak within the budget.
"""

import dataclasses
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from cs336_systems.config import RunConfig, UserError
from cs336_systems.predict.activation_plan import CHOICES, KEEP, KEEP_ALL, KINDS, OFFLOAD, RECOMPUTE, BlockPlan, Plan
from cs336_systems.predict.fast_memory import fast_estimate
from cs336_systems.predict.gpus import GIGA, GPU, TERA
from cs336_systems.predict.memory_model import MemoryEstimate, Tensors
from cs336_systems.record import GIB

MATMUL_SHARE, ATTENTION_SHARE = 0.68, 0.66
"""Shares of the dense peak that matmuls and causal attention reach on an H200."""
PASS_SECONDS_PER_BYTE = 1 / 3e12
BACKWARD_RATIO = 2.3
"""Time of a block's backward pass without recomputation, over that of its forward pass."""
COPY_SLOWDOWN = 0.02
"""Share of a hidden copy's time by which the computation beside it gets slower."""
POINTS = 4096
"""Amounts of memory that the search tells apart."""


class Rates(NamedTuple):
    """What the predicted times are computed from."""

    matmul: float
    """FLOP/s."""
    attention: float
    """FLOP/s of causal attention's forward pass."""
    host: float
    """Bytes per second between the GPU and pinned host memory, each way."""

    @classmethod
    def of(cls, gpu: GPU | None, precision: str = "bf16") -> "Rates":
        """Return the rates of a GPU; those of an H200 for an unknown one."""
        peak = (gpu.peak_flops(precision) if gpu else None) or 989.4 * TERA
        return cls(MATMUL_SHARE * peak, ATTENTION_SHARE * peak, (gpu.host_link if gpu else 54.0) * GIGA)


@dataclass(frozen=True)
class PlannedMemory:
    """A plan with its prediction."""

    plan: Plan
    budget: int
    estimate: MemoryEstimate
    added_seconds: float
    """Time that recomputation and exposed copies add to a micro batch."""
    host_bytes: int
    """Pinned host memory."""


class Choice(NamedTuple):
    """A plan for one block with its costs."""

    kept: int
    """Bytes on the GPU between forward and backward."""
    seconds: float
    """Time that it adds."""
    plan: BlockPlan


# -- the budget -------------------------------------------------------------------------------------------------------


def budget_bytes(text: str, capacity: float | None = None) -> int:
    """Return the bytes of a budget such as 130GiB; `auto` is what a GPU of `capacity` bytes can safely use."""
    if text == "auto":
        if capacity is None:
            raise UserError("memory_budget auto needs a GPU to look at; give a size such as 130GiB", "memory_budget")
        return int(capacity)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(GiB|GB)", text)
    assert match, "RunConfig has checked it"
    return int(float(match[1]) * (GIB if match[2] == "GiB" else 10**9))


@lru_cache(maxsize=256)
def plan_memory(
    config: RunConfig,
    budget: int,
    rates: Rates | None = None,
    host_limit: float = math.inf,
    choices: tuple[str, ...] = CHOICES,
) -> PlannedMemory:
    """Return the fastest plan whose predicted peak is within `budget` bytes.

    It takes at most `host_limit` bytes of host memory, and makes no choices but `choices`. UserError if there is none:
    the message says how much the most economical plan needs.
    """
    bare = dataclasses.replace(config, memory_budget="")
    everything = fast_estimate(bare, (KEEP_ALL,) * config.model.num_layers)
    if everything.peak <= budget:
        return PlannedMemory((KEEP_ALL,) * config.model.num_layers, budget, everything, 0.0, 0)
    costs = BlockCosts(bare, rates or Rates.of(None), choices)
    found = _fastest_of(costs, budget, {0, _most_offloading(costs, host_limit), config.model.num_layers - 1})
    if found is not None and found.host_bytes > host_limit:
        found = _fastest_of(costs, budget, range(config.model.num_layers), host_limit)
    if found is None:
        least = _least(costs, host_limit)
        raise UserError(
            f"memory_budget {budget / GIB:.2f} GiB is not enough: this step needs at least {least / GIB:.2f} GiB; "
            f"use a smaller batch_size or context_length",
            *("memory_budget", "batch_size", "context_length"),
        )
    return found


def least_peak(config: RunConfig, rates: Rates | None = None) -> int:
    """Return the predicted peak of the most economical plan."""
    bare = dataclasses.replace(config, memory_budget="")
    return _least(BlockCosts(bare, rates or Rates.of(None)), math.inf)


def _least(costs: "BlockCosts", host_limit: float) -> int:
    return min(_Plans(costs, number).estimate(0).peak for number in {0, _most_offloading(costs, host_limit)})


def _most_offloading(costs: "BlockCosts", host_limit: float) -> int:
    """Return the largest number of blocks for whose tensors the host has room, whatever they offload. The last block
    never offloads: its tensors are needed at once."""
    largest = max(costs.offloaded(choice.plan) for choice in costs.choices) or 1
    return int(min(costs.config.model.num_layers - 1, host_limit // largest))


def _fastest_of(
    costs: "BlockCosts", budget: int, numbers: Iterable[int], host_limit: float = math.inf
) -> PlannedMemory | None:
    """Return the fastest plan within the budget. The numbers are those of blocks that may offload: a fetched tensor
    takes memory in backward, so that offloading less may have the lower peak.

    The last block's backward comes first and needs all its tensors: where that is the peak, keeping them is free.
    """
    found = [_fitting(costs, budget, number, keeps) for number in sorted(set(numbers)) for keeps in (False, True)]
    allowed = [planned for planned in found if planned is not None and planned.host_bytes <= host_limit]
    return min(allowed, key=lambda planned: planned.added_seconds, default=None)


def _fitting(costs: "BlockCosts", budget: int, offloading: int, last_keeps_all: bool) -> PlannedMemory | None:
    """Return the fastest of these plans whose peak is within the budget, by bisection."""
    plans = _Plans(costs, offloading, last_keeps_all)
    fitting = bisect_right(range(len(plans.points)), 0, key=lambda number: plans.estimate(number).peak > budget)
    if not fitting:
        return None
    plan, estimate = plans.plan(fitting - 1), plans.estimate(fitting - 1)
    host = sum(costs.offloaded(own) for own in plan)
    return PlannedMemory(plan, budget, estimate, plans.points[fitting - 1].seconds, host)


class _Plans:
    """Plans by increasing memory, each the fastest for its own; at most `offloading` blocks offload."""

    def __init__(self, costs: "BlockCosts", offloading: int, last_keeps_all: bool = False):
        self.costs, self.last = costs, [KEEP_ALL] * last_keeps_all
        others = costs.config.model.num_layers - offloading - len(self.last)
        self.points = _fastest(costs, offloading, others)

    def plan(self, number: int) -> Plan:
        return _ordered([*self.points[number].plans(self.costs), *self.last])

    def estimate(self, number: int) -> MemoryEstimate:
        return fast_estimate(self.costs.config, self.plan(number))


def _ordered(plans: Iterable[BlockPlan]) -> Plan:
    """Put blocks that keep the least first: in backward their turn comes when the memory of the others is free. The
    last block never offloads: its tensors are needed at once."""
    return tuple(sorted(plans, key=lambda plan: (not plan.offloads, plan.count(KEEP))))


# -- costs ------------------------------------------------------------------------------------------------------------


class BlockCosts:
    """Bytes and times of the tensors of one block."""

    def __init__(self, config: RunConfig, rates: Rates, choices: tuple[str, ...] = CHOICES):
        t, model, rows = Tensors(config), config.model, config.tokens
        self.config, self.rates = config, rates
        stream = rows * model.d_model
        residual = stream * (t.s if "optimizer" in config.fast_parts else 4)
        self.bytes = {
            "input": residual,
            "qkv": 3 * stream * t.s,
            "attention": stream * t.s,
            "middle": residual,
            "gate_up": 2 * rows * model.d_ff * t.s,
        }
        attention = 2 * stream * model.context_length
        self.seconds = {
            "input": 0.0,
            "qkv": 6 * stream * model.d_model / rates.matmul,
            "attention": attention / rates.attention,
            "middle": 2 * stream * model.d_model / rates.matmul,
            "gate_up": 4 * stream * model.d_ff / rates.matmul,
        }
        self.norm = 2 * residual * PASS_SECONDS_PER_BYTE
        self.forward = sum(self.seconds.values()) + 2 * stream * model.d_ff / rates.matmul
        if config.device_type != "cuda":
            choices = tuple(choice for choice in choices if choice != OFFLOAD)
        self.choices = self._choices(choices)
        self.choices_without_offloading = self._choices(tuple(choice for choice in choices if choice != OFFLOAD))

    def _choices(self, allowed: tuple[str, ...]) -> list[Choice]:
        plans = block_plans(allowed)
        return _best_trade_offs(Choice(self.kept(plan), self.added(plan), plan) for plan in plans)

    def kept(self, plan: BlockPlan) -> int:
        return sum(self.bytes[kind] for kind in plan.kinds(KEEP))

    def offloaded(self, plan: BlockPlan) -> int:
        return sum(self.bytes[kind] for kind in plan.kinds(OFFLOAD))

    def added(self, plan: BlockPlan) -> float:
        """Return the seconds that a plan adds to a block's forward and backward pass."""
        again = sum(self.seconds[kind] for kind in plan.kinds(RECOMPUTE))
        again += self.norm * ((plan.qkv == RECOMPUTE) + (RECOMPUTE in (plan.middle, plan.gate_up)))
        copy = self.offloaded(plan) / self.rates.host
        exposed = max(0.0, copy - self.forward) + max(0.0, copy - BACKWARD_RATIO * self.forward - again)
        return again + exposed + 2 * COPY_SLOWDOWN * copy


def block_plans(allowed: tuple[str, ...] = CHOICES) -> list[BlockPlan]:
    """Return all plans of a block with these choices; its input is never recomputed."""
    inputs = [choice for choice in allowed if choice != RECOMPUTE]
    return [BlockPlan(*chosen) for chosen in product(inputs, *[allowed] * (len(KINDS) - 1))]


def _best_trade_offs(choices: Iterable[Choice]) -> list[Choice]:
    """Return the choices that no other one beats in both memory and time, by memory."""
    found: list[Choice] = []
    for choice in sorted(choices):
        if not found or choice.seconds < found[-1].seconds:
            found.append(choice)
    return found


# -- the search -------------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """The least time of some blocks for an amount of memory."""

    kept: int
    seconds: float
    last: int
    """The choice of the last of these blocks, by its number."""
    before: "Point | None"
    offloads: bool
    """Whether the last block's choice is one of those with offloading."""

    def plans(self, costs: BlockCosts) -> list[BlockPlan]:
        point, found = self, list[BlockPlan]()
        while point.before is not None:
            choices = costs.choices if point.offloads else costs.choices_without_offloading
            found.append(choices[point.last].plan)
            point = point.before
        return found


def _fastest(costs: BlockCosts, offloading: int, others: int) -> list[Point]:
    """Return, by increasing memory, the points of least time: `offloading` blocks may offload, `others` may not."""
    points = [Point(0, 0.0, -1, None, False)]
    for number in range(offloading + others):
        offloads = number < offloading
        choices: Sequence[Choice] = costs.choices if offloads else costs.choices_without_offloading
        longer = sorted(
            (point.kept + choice.kept, point.seconds + choice.seconds, index, number_of_point)
            for number_of_point, point in enumerate(points)
            for index, choice in enumerate(choices)
        )
        best: list[Point] = []
        for kept, seconds, index, number_of_point in longer:
            if not best or seconds < best[-1].seconds:
                best.append(Point(kept, seconds, index, points[number_of_point], offloads))
        points = _thinned(best)
    return points


def _thinned(points: list[Point]) -> list[Point]:
    """Return at most POINTS of the points, the first and the last among them."""
    if len(points) <= POINTS:
        return points
    step = (len(points) - 1) / (POINTS - 1)
    return [points[round(number * step)] for number in range(POINTS)]
