"""Chooses what each block keeps, recomputes and offloads, so that a step is fastest within a memory budget. No torch.

A block has 162 possible plans. Each costs memory between forward and backward, and time: matmuls and attention that are
computed twice, and copies that take longer than the computation beside them. For these costs the search is exact:
`_fastest` finds the least time for every amount of memory by dynamic programming over the blocks, and the simulation of
fast_memory.py says which of these amounts has a peak within the budget. Copies of several blocks share one stream, so a
block may copy for longer than its own forward pass if its neighbours copy less. The search tries several such limits,
and `added_seconds` simulates the stream to compare their plans.
"""

import contextlib
import dataclasses
import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product, zip_longest
from typing import NamedTuple

from cs336_systems.config import RunConfig, UserError, arg
from cs336_systems.predict.activation_plan import CHOICES, KEEP, KEEP_ALL, KINDS, OFFLOAD, RECOMPUTE, BlockPlan, Plan
from cs336_systems.predict.building_memory import building_peak
from cs336_systems.predict.fast_memory import fast_estimate
from cs336_systems.predict.gpus import GIGA, GPU, H200, memory_size
from cs336_systems.predict.memory_model import MemoryEstimate, Tensors
from cs336_systems.record import GIB

MATMUL_SHARE, ATTENTION_SHARE = 0.70, 0.645
"""Shares of the dense peak that matmuls and causal attention reach on an H200 in a long step."""
PASS_SECONDS_PER_BYTE = 1 / 4e12
"""Time of a pass over memory, per byte read or written."""
BACKWARD_RATIO = 2.3
"""Time of a block's backward pass without recomputation, over that of its forward pass."""
READY_SHARE = 0.85
"""Share of a block's forward pass after which most of what it offloads is ready."""
COPY_SLOWDOWN = 0.02
"""Share of a hidden copy's time by which the computation beside it gets slower."""
POINTS = 512
"""Number of different amounts of memory in the search."""
LIMITS = (0.9, 1.0, 1.12)
"""Limits that the search tries: time that a block may copy without cost, as a share of its forward pass."""
LOOK_AHEAD = 12
"""After the first amount of memory that does not fit, this many larger ones are tried, too: peaks do not rise
strictly."""


class NotEnoughMemoryError(UserError):
    """No plan is within the budget."""


class Rates(NamedTuple):
    """Rates from which times are predicted."""

    matmul: float
    """FLOP/s."""
    attention: float
    """FLOP/s of causal attention's forward pass."""
    host: float
    """Bytes per second between the GPU and pinned host memory, each way."""

    @classmethod
    def of(cls, gpu: GPU | None, precision: str = "bf16") -> "Rates":
        """Return the rates of a GPU; those of an H200 for an unknown GPU. Attention is never in FP8."""
        known = "bf16" if precision == "fp8" else precision
        peak = (gpu.peak_flops(known) if gpu else None) or H200.peak_flops("bf16")
        assert peak is not None
        matmul = 2 * peak if precision == "fp8" else peak
        return cls(MATMUL_SHARE * matmul, ATTENTION_SHARE * peak, (gpu or H200).host_link * GIGA)


@dataclass(frozen=True)
class PlannedMemory:
    """A plan with its prediction."""

    plan: Plan
    budget: int
    estimate: MemoryEstimate
    added_seconds: float
    """Time that recomputation and exposed copies add to a micro batch."""
    host_bytes: int
    """Bytes of pinned host memory."""


class Choice(NamedTuple):
    """A plan for one block with its costs."""

    kept: int
    """Bytes on the GPU between forward and backward."""
    cost: float
    """Seconds of recomputation and of copies."""
    plan: BlockPlan


# -- the budget -------------------------------------------------------------------------------------------------------


def budget_bytes(text: str, capacity: float | None = None) -> int:
    """Return the bytes of a budget such as 130GiB; `auto` is what a GPU of `capacity` bytes can safely use."""
    if text == "auto":
        if capacity is None:
            raise UserError("memory_budget auto needs a GPU to look at; give a size such as 130GiB", "memory_budget")
        return int(capacity)
    found = memory_size(text)
    assert found, "RunConfig has checked it"
    return int(found[0])


@lru_cache(maxsize=256)
def plan_memory(
    config: RunConfig,
    budget: int,
    rates: Rates | None = None,
    host_limit: float = math.inf,
    choices: tuple[str, ...] = CHOICES,
) -> PlannedMemory:
    """Return the fastest plan whose predicted peak is within `budget` bytes, which must be enough to build the model.

    It uses at most `host_limit` bytes of host memory, and only the choices in `choices`. Raise UserError if there is no
    such plan: the message says how much the most economical plan needs.
    """
    bare = dataclasses.replace(config, memory_budget="")
    if (building := building_peak(bare).peak) > budget:
        raise _not_enough_to_build(bare, budget, building, host_limit)
    everything = _keeping_everything(bare)
    if everything.estimate.peak <= budget:
        return dataclasses.replace(everything, budget=budget)
    costs = BlockCosts(bare, rates or Rates.of(None), choices)
    last, surely = config.model.num_layers - 1, _most_offloading(costs, host_limit)
    found = _within(costs, budget, {0, surely, last})
    if found is not None and found.host_bytes > host_limit:
        between = {surely + part * (last - surely) // 4 for part in range(5)}
        found = _within(costs, budget, {0, *between}, host_limit)
    if found is None:
        found = _uniform_within(costs, budget, host_limit)
    if found is None:
        raise not_enough(budget, most_economical(bare, host_limit, choices).estimate.peak)
    return found


def not_enough(budget: int, least: int) -> NotEnoughMemoryError:
    return NotEnoughMemoryError(
        f"memory_budget {budget / GIB:.2f} GiB is not enough: this step needs at least {_rounded_up(least)} GiB; "
        f"use a smaller {arg('batch_size')} or {arg('context_length')}",
        "memory_budget",
    )


def _not_enough_to_build(config: RunConfig, budget: int, building: int, host_limit: float) -> NotEnoughMemoryError:
    """Return the error of a budget that no batch and no context can meet, with the ways out that are predicted to."""
    least, is_enough = least_peak(config, host_limit), False
    with contextlib.suppress(UserError):  # a precision or parts of the fast step that have no such state
        smaller = dataclasses.replace(config, optimizer_state="bf16")
        is_enough = max(building_peak(smaller).peak, least_peak(smaller, host_limit)) <= budget
    smaller_state = f"{arg('optimizer_state')} bf16, "
    also = f" and this step at least {_rounded_up(least)} GiB" if least > building else ""
    return NotEnoughMemoryError(
        f"memory_budget {budget / GIB:.2f} GiB is not enough: building this model needs {_rounded_up(building)} GiB"
        f"{also}; use {smaller_state if is_enough else ''}a larger budget or GPU, or a smaller model",
        "memory_budget",
    )


def _rounded_up(size: int) -> str:
    return f"{math.ceil(100 * size / GIB) / 100:.2f}"


def _most_offloading(costs: "BlockCosts", host_limit: float) -> int:
    """Return the largest number of blocks that may offload, such that the host has room for all of their tensors. The
    last block never offloads: its tensors are needed at once."""
    largest = max(costs.offloaded(choice.plan) for choice in costs.choices(1.0, offloads=True)) or 1
    return int(min(costs.config.model.num_layers - 1, host_limit // largest))


def _within(
    costs: "BlockCosts", budget: int, numbers: Iterable[int], host_limit: float = math.inf
) -> PlannedMemory | None:
    """Return the fastest plan within the budget. The numbers are those of blocks that may offload: a fetched tensor
    takes memory in backward, so that offloading less may have the lower peak.

    The last block's backward comes first and needs all its tensors: where that is the peak, keeping them is free.
    """
    best: PlannedMemory | None = None
    for offloading, last_keeps_all in product(sorted(set(numbers)), (True, False)):
        for limit in LIMITS if offloading else LIMITS[:1]:
            plans = _Plans(costs, offloading, limit, last_keeps_all=last_keeps_all)
            found = plans.fastest(budget, math.inf if best is None else best.added_seconds)
            if found is not None and found.host_bytes <= host_limit:
                best = found
    return best


class _Plans:
    """Plans in order of memory, each with the least cost for its memory; at most `offloading` blocks offload."""

    def __init__(self, costs: "BlockCosts", offloading: int, limit: float = 1.0, *, last_keeps_all: bool = False):
        self.costs, self.last = costs, [KEEP_ALL] * last_keeps_all
        others = costs.config.model.num_layers - offloading - len(self.last)
        self.points = _fastest(costs, limit, offloading, others)

    def plan(self, number: int) -> Plan:
        return _ordered([*self.points[number].plans(), *self.last], self.costs)

    def estimate(self, number: int) -> MemoryEstimate:
        return _estimate(self.costs.config, self.plan(number))

    def fastest(self, budget: int, seconds: float) -> PlannedMemory | None:
        """Return the fastest plan whose peak is within the budget and which adds less than these seconds."""
        numbers = range(len(self.points))
        first = bisect_left(numbers, True, key=lambda number: self.estimate(number).peak > budget)
        best: PlannedMemory | None = None
        for number in numbers[max(0, first - 1) : first + LOOK_AHEAD]:
            plan = self.plan(number)
            added = self.costs.added_seconds(plan)
            if added < seconds and (found := self.estimate(number)).peak <= budget:
                best, seconds = PlannedMemory(plan, budget, found, added, sum(map(self.costs.offloaded, plan))), added
        return best


_estimate = lru_cache(maxsize=4096)(fast_estimate)
"""Cached, because limits and numbers of offloading blocks often lead to the same plans."""


def _ordered(plans: Iterable[BlockPlan], costs: "BlockCosts") -> Plan:
    """Put blocks that offload first, because their copies have the most time; among them, blocks that copy more and
    blocks that copy less alternate. Of the others, those that keep the least come first: backward reaches them when the
    most memory is free."""
    plans = sorted(plans, key=lambda plan: (costs.offloaded(plan), costs.kept(plan)))
    copying = [plan for plan in plans if plan.offloads]
    others = sorted((plan for plan in plans if not plan.offloads), key=costs.kept)
    half = len(copying) // 2
    alternating = [plan for pair in zip_longest(copying[half:], copying[:half]) for plan in pair if plan is not None]
    return (*alternating, *others)


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
            "qkv": rows * model.qkv_width * t.s,
            "attention": rows * model.q_width * t.s,
            "middle": residual,
            "gate_up": 2 * rows * model.d_ff * t.s,
        }
        attention = 2 * rows * model.q_width * model.context_length
        self.seconds = {
            "input": 0.0,
            "qkv": 2 * stream * model.qkv_width / rates.matmul,
            "attention": attention / rates.attention,
            "middle": 2 * stream * model.q_width / rates.matmul,
            "gate_up": 4 * stream * model.d_ff / rates.matmul,
        }
        self.norm = 2 * residual * PASS_SECONDS_PER_BYTE
        elements = rows * (model.qkv_width + model.q_width + 3 * model.d_ff)
        passes = 4 * self.norm + elements * t.s * PASS_SECONDS_PER_BYTE
        self.forward = sum(self.seconds.values()) + 2 * stream * model.d_ff / rates.matmul + passes
        self.allowed = choices if config.device_type == "cuda" else tuple(c for c in choices if c != OFFLOAD)
        self.points: dict[tuple[float, int, int], list[Point]] = {}
        """Results of `_fastest` by its arguments, which several searches share."""
        self._sizes = {
            plan: tuple(sum(self.bytes[kind] for kind in plan.kinds(choice)) for choice in (KEEP, OFFLOAD))
            for plan in block_plans()
        }
        """Bytes that each plan keeps and offloads."""

    def choices(self, limit: float, *, offloads: bool) -> list[Choice]:
        """Return the choices of a block that are Pareto-optimal in memory and cost, by memory."""
        allowed = self.allowed if offloads else tuple(choice for choice in self.allowed if choice != OFFLOAD)
        found: list[Choice] = []
        for choice in sorted(
            Choice(self.kept(plan), self.recomputed(plan) + self._copied(plan, limit), plan)
            for plan in block_plans(allowed)
        ):
            if not found or choice.cost < found[-1].cost:
                found.append(choice)
        return found

    def kept(self, plan: BlockPlan) -> int:
        return self._sizes[plan][0]

    def offloaded(self, plan: BlockPlan) -> int:
        return self._sizes[plan][1]

    def recomputed(self, plan: BlockPlan) -> float:
        """Return the seconds of a block's recomputation."""
        norms = (plan.qkv == RECOMPUTE) + (RECOMPUTE in (plan.middle, plan.gate_up))
        return sum(self.seconds[kind] for kind in plan.kinds(RECOMPUTE)) + self.norm * norms

    def _copied(self, plan: BlockPlan, limit: float) -> float:
        """Return the seconds that a block's copies cost if they may take `limit` times its forward pass."""
        copy = self.offloaded(plan) / self.rates.host
        beyond = max(0.0, copy - limit * self.forward) + max(0.0, copy - BACKWARD_RATIO * self.forward)
        return beyond + 2 * COPY_SLOWDOWN * copy

    def added_seconds(self, plan: Plan) -> float:
        """Return the time that a plan adds to a micro batch: recomputation, and waiting for copies on their stream."""
        copies = [self.offloaded(own) / self.rates.host for own in plan]
        now = stream = 0.0
        done_before = 0.0
        for copy in copies:  # forward: a block's memory is freed when the next block ends, which waits for its copy
            stream = max(stream, now + READY_SHARE * self.forward) + copy
            now = max(now + self.forward, done_before)
            done_before = stream if copy else 0.0
        waited = now - len(plan) * self.forward
        backward, again = BACKWARD_RATIO * self.forward, [self.recomputed(own) for own in plan]
        for number in range(len(plan) - 1, 0, -1):  # backward: a block's tensors are fetched beside the next block
            waited += max(0.0, copies[number - 1] - backward - again[number])
        return waited + sum(again) + 2 * COPY_SLOWDOWN * sum(copies)


def block_plans(allowed: tuple[str, ...] = CHOICES) -> list[BlockPlan]:
    """Return all plans of a block with these choices; its input is never recomputed."""
    inputs = [choice for choice in allowed if choice != RECOMPUTE]
    return [BlockPlan(*chosen) for chosen in product(inputs, *[allowed] * (len(KINDS) - 1))]


# -- the search -------------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """The least cost of some blocks for a given amount of memory."""

    kept: int
    cost: float
    last: BlockPlan
    """The plan of the last of these blocks."""
    before: "Point | None"

    def plans(self) -> list[BlockPlan]:
        point, found = self, list[BlockPlan]()
        while point.before is not None:
            found.append(point.last)
            point = point.before
        return found


def _fastest(costs: BlockCosts, limit: float, offloading: int, others: int) -> list[Point]:
    """Return, by increasing memory, the points of least cost: `offloading` blocks may offload, `others` may not."""
    points = [Point(0, 0.0, KEEP_ALL, None)]
    choices = {offloads: costs.choices(limit, offloads=offloads) for offloads in (True, False)}
    for number in range(1, offloading + others + 1):
        key = limit, min(number, offloading), max(0, number - offloading)
        if key not in costs.points:
            costs.points[key] = _with_one_more(points, choices[number <= offloading])
        points = costs.points[key]
    return points


def _with_one_more(points: list[Point], choices: list[Choice]) -> list[Point]:
    """Return the points of least cost for one block more."""
    longer = sorted(
        (point.kept + choice.kept, point.cost + choice.cost, at, index)
        for at, point in enumerate(points)
        for index, choice in enumerate(choices)
    )
    best: list[Point] = []
    for kept, cost, at, index in longer:
        if not best or cost < best[-1].cost:
            best.append(Point(kept, cost, choices[index].plan, points[at]))
    return _thinned(best)


def _thinned(points: list[Point]) -> list[Point]:
    """Return at most POINTS of the points, the first and the last among them."""
    if len(points) <= POINTS:
        return points
    step = (len(points) - 1) / (POINTS - 1)
    return [points[round(number * step)] for number in range(POINTS)]


# -- the least memory -------------------------------------------------------------------------------------------------


def least_peak(config: RunConfig, host_limit: float = math.inf) -> int:
    """Return the predicted peak of the most economical plan."""
    return most_economical(config, host_limit).estimate.peak


@lru_cache(maxsize=4096)
def most_economical(
    config: RunConfig, host_limit: float = math.inf, choices: tuple[str, ...] = CHOICES
) -> PlannedMemory:
    """Return the plan with the lowest peak: blocks offload their input and recompute all else. What is fetched takes
    memory in backward, beside the tensors of the block after it. The plan's budget is its own peak.

    The peak of a small model is in the update, where no activation is alive: recomputation only leaves the allocator
    with other segments, which may be more than those of keeping everything.
    """
    bare = dataclasses.replace(config, memory_budget="")
    costs = BlockCosts(bare, Rates.of(None), choices)
    found = _uniform(costs, _plans_without_keeping(costs.allowed)[0], host_limit)
    return min(found, _keeping_everything(bare), key=lambda plan: plan.estimate.peak)


def _keeping_everything(config: RunConfig) -> PlannedMemory:
    plan = (KEEP_ALL,) * config.model.num_layers
    estimate = fast_estimate(config, plan)
    return PlannedMemory(plan, estimate.peak, estimate, 0.0, 0)


def _uniform_within(costs: BlockCosts, budget: int, host_limit: float) -> PlannedMemory | None:
    """Return the fastest plan within the budget among plans whose blocks all keep nothing and do the same."""
    every = [_uniform(costs, own, host_limit) for own in _plans_without_keeping(costs.allowed)]
    fitting = [dataclasses.replace(plan, budget=budget) for plan in every if plan.estimate.peak <= budget]
    return min(fitting, key=lambda plan: plan.added_seconds, default=None)


def _plans_without_keeping(allowed: tuple[str, ...]) -> list[BlockPlan]:
    """Return the block plans that keep the least that these choices allow, the one that recomputes most first."""
    others = [choice for choice in (RECOMPUTE, OFFLOAD) if choice in allowed] or [KEEP]
    first = OFFLOAD if OFFLOAD in allowed else KEEP
    return [BlockPlan(first, *chosen) for chosen in product(others, repeat=len(KINDS) - 1)]


def _uniform(costs: BlockCosts, own: BlockPlan, host_limit: float) -> PlannedMemory:
    """Return the plan in which as many blocks use `own` as the host has room for, and the others offload nothing. The
    last block is one of them: its tensors are needed at once."""
    layers, each = costs.config.model.num_layers, costs.offloaded(own)
    offloading = int(min(layers - 1, host_limit // each)) if each else layers - 1
    (without,) = _plans_without_keeping(tuple(choice for choice in costs.allowed if choice != OFFLOAD))
    plan = (own,) * offloading + (without,) * (layers - offloading)
    estimate = fast_estimate(costs.config, plan)
    return PlannedMemory(plan, estimate.peak, estimate, costs.added_seconds(plan), each * offloading)
