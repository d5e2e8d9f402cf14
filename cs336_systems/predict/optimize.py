"""Chooses how a GPU runs a fast training step of given tokens: micro batches, recomputation, a plan of what is kept and
offloaded, a CUDA graph, the optimizer's state. No torch, no GPU.

`Search` predicts the time of every candidate whose peak fits. Peaks rise with the micro batch, so that a bisection
finds the largest that fits. Searching a plan takes a second, so only plans whose lower bound of the time is below the
best candidate's time are searched.
"""

import dataclasses
import math
import timeit
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

from cs336_systems.config import OPTIMIZER_STATES, RunConfig, UserError
from cs336_systems.predict.activation_plan import KEEP_ALL
from cs336_systems.predict.building_memory import building_peak
from cs336_systems.predict.fit import FAST_ERROR, MODEL_ERROR, usable_bytes
from cs336_systems.predict.gpus import GPU
from cs336_systems.predict.memory_model import estimate
from cs336_systems.predict.memory_planner import (
    LIMITS,
    BlockCosts,
    NotEnoughMemoryError,
    PlannedMemory,
    Rates,
    budget_bytes,
    least_peak,
    plan_memory,
)
from cs336_systems.predict.time.gpu_profile import GpuProfile, profile_of
from cs336_systems.predict.time.step_kernels import AttentionPass, Matmul
from cs336_systems.predict.time.step_times import StepTimes
from cs336_systems.predict.time.time_model import step_time
from cs336_systems.record import GIB
from cs336_systems.text import Text, say

KEEP, RECOMPUTE, PLAN = "keep", "recompute", "plan"
"""Choices for activations: all kept; recomputed in groups of blocks; a plan within a memory budget."""
MICRO_BATCH, ACTIVATIONS, GRAPH, STATE, LAYOUT = "micro batch", "activations", "graph", "optimizer state", "layout"
"""Respects in which candidates differ."""
PRECISION = "precision"
"""Respect in which all candidates of a task agree."""
WITHOUT_GRAPH = "kernels,loss,optimizer"
RECOMPUTED_MATMULS = ("qkv", "out", "gate and up")
"""Matmuls that a plan may recompute."""


class Candidate(NamedTuple):
    """A way to run the step."""

    micro_batch: int
    """Sequences per micro batch."""
    micro_batches: int
    group: int = 0
    """Blocks that are recomputed together; 0: none."""
    state: str = OPTIMIZER_STATES[0]
    graph: bool = True
    budget: str = ""
    """Memory budget of a plan, such as 130.00GiB."""
    layout: str = ""
    """How several GPUs share the model, such as zero1."""

    @property
    def activations(self) -> str:
        return PLAN if self.budget else RECOMPUTE if self.group else KEEP


class Prediction(NamedTuple):
    candidate: Candidate
    seconds: float
    plan: PlannedMemory | None = None

    @property
    def order(self) -> tuple:
        """Sort key: the fastest first; of equally fast ones the one with a CUDA graph."""
        return self.seconds, not self.candidate.graph, self.candidate.group


class Alternative(NamedTuple):
    """The best candidate that differs from the chosen one in one respect."""

    dimension: str
    value: int | str | bool
    best: Prediction | None
    """Best candidate that differs in this respect; None if none fits, or if its plan was not searched."""
    unfit: int | None = None
    """Peak bytes of the chosen candidate with only this changed, if that does not fit."""
    least_seconds: float | None = None
    """Lower bound of the time of a plan that was not searched and may be faster."""


@dataclass(frozen=True)
class Task:
    """A step to run, its GPU and its limits."""

    config: RunConfig
    """The step without micro batches: a fast step that keeps all activations, as a CUDA graph."""
    gpu: GPU
    profile: GpuProfile
    sequences: int
    """Number of sequences per GPU and step."""
    capacity: float
    """Memory of the GPU in bytes."""
    memory: float = math.inf
    """Upper limit of the peak in bytes, besides the GPU's memory."""
    host_memory: float = math.inf
    """Bytes of host memory that a plan may use."""
    states: tuple[str, ...] = OPTIMIZER_STATES[:1]
    """Optimizer states that may be chosen."""
    gpus: int = 1

    @property
    def limit(self) -> float:
        """Largest predicted peak that fits. Predictions have larger errors except for a fast step without a plan."""
        return min(self.memory, usable_bytes(self.capacity, self.error))

    @property
    def error(self) -> float:
        """Error of predicted peaks that `limit` allows for."""
        return FAST_ERROR if self.gpus == 1 else MODEL_ERROR

    @property
    def budget(self) -> str:
        """Memory budget of a plan, as a flag spells it."""
        size = min(self.memory, usable_bytes(self.capacity))
        digits = 2 if size >= GIB else 6
        parts = math.floor(size / GIB * 10**digits + 1e-6)  # 2.3 GiB are 229.99... hundredths
        return f"{parts / 10**digits:.{digits}f}GiB"

    @property
    def tokens(self) -> int:
        """Tokens of a step on all GPUs."""
        return self.gpus * self.sequences * self.config.model.context_length

    def run_config(self, candidate: Candidate) -> RunConfig:
        """Return the configuration of a micro batch."""
        return dataclasses.replace(
            self.config,
            batch_size=candidate.micro_batch,
            checkpoint_blocks=candidate.group,
            optimizer_state=candidate.state,
            fast="on" if candidate.graph else WITHOUT_GRAPH,
            memory_budget=candidate.budget,
        )


class Search:
    """Predicts all candidates of a task on one GPU."""

    layouts: tuple[str, ...] = ("",)
    states: tuple[str, ...] = OPTIMIZER_STATES
    graphs: tuple[bool, ...] = (True, False)

    def __init__(self, task: Task):
        self.task = task
        self.times = StepTimes(task.config, task.profile)
        stream = 2 * task.config.model.context_length * task.config.model.d_model
        self.sizes = [size for size in divisors(task.sequences) if size == 1 or size * stream <= task.limit]
        """Micro batch sizes, without those whose residual stream alone does not fit."""
        self.groups = [] if task.config.precision == "fp8" else group_sizes(task.config.model.num_layers)
        self.found: list[Prediction] = []
        """Predictions of candidates that fit, including optimizer states that may not be chosen."""
        self.not_searched: Prediction | None = None
        """The plan with the smallest lower bound that was not searched; its time is that bound."""
        self._peaks: dict[Candidate, int] = {}
        self.found += self._without_plans()
        self.found += self._plans()

    @property
    def considered(self) -> int:
        """Number of candidates, including those that do not fit."""
        plans = len(self.sizes) * len(self.states)
        return plans * ((1 + len(self.groups)) * len(self.graphs) * len(self.layouts) + 1)

    @cached_property
    def ranked(self) -> list[Prediction]:
        """Candidates that may be chosen, the fastest first. Of candidates that differ only in the number of blocks per
        group, only the one with the least peak is listed; of a step with and without a graph, only the faster one."""
        kinds: dict[tuple, Prediction] = {}
        for found in sorted(self.found, key=lambda found: found.order):
            own = found.candidate
            if own.state in self.task.states:
                kinds.setdefault((own.micro_batch, own.activations, own.state, own.layout), found)
        return [self._smallest_group(found) for found in kinds.values()]

    def peak(self, candidate: Candidate) -> int:
        """Return the predicted peak of a candidate without a plan, in bytes; building the model counts."""
        key = candidate._replace(micro_batches=1, graph=True)
        if key not in self._peaks:
            config = self.task.run_config(key)
            self._peaks[key] = max(estimate(config).peak, building_peak(config).peak)
        return self._peaks[key]

    def peak_of(self, prediction: Prediction) -> int:
        plan = prediction.plan
        return self.peak(prediction.candidate) if plan is None else plan.estimate.peak

    def least_memory(self) -> int:
        """Return the peak of the most economical plan of one sequence with the states that may be chosen."""
        return min(self._least_peak(self._sized(1, state=state)) for state in self.task.states)

    def _sized(
        self,
        size: int,
        *,
        group: int = 0,
        state: str = OPTIMIZER_STATES[0],
        graph: bool = True,
        budget: str = "",
        layout: str = "",
    ) -> Candidate:
        return Candidate(size, self.task.sequences // size, group, state, graph, budget, layout)

    def _smallest_group(self, found: Prediction) -> Prediction:
        own = found.candidate
        if not own.group:
            return found
        return found._replace(candidate=self._smallest(own))

    def _smallest(self, candidate: Candidate) -> Candidate:
        """Return the candidate whose recomputation groups have the least peak."""
        return min((candidate._replace(group=group) for group in self.groups), key=self.peak)

    def _least_peak(self, candidate: Candidate) -> int:
        """Return the peak of the most economical plan."""
        config = self.task.run_config(candidate)
        return max(least_peak(config, self.task.host_memory), building_peak(config).peak)

    # -- candidates that keep or recompute ----------------------------------------------------------------------------

    def _without_plans(self) -> Iterator[Prediction]:
        for layout, state, group in product(self.layouts, self.states, (0, *self.groups)):
            for size in self.sizes[: self._fitting(group, state, layout)]:
                for graph in self.graphs:
                    candidate = self._sized(size, group=group, state=state, graph=graph, layout=layout)
                    yield Prediction(candidate, self._seconds(candidate))

    def _fitting(self, group: int, state: str, layout: str = "") -> int:
        """Return the number of micro batch sizes that fit."""
        every = [self._sized(size, group=group, state=state, layout=layout) for size in self.sizes]
        return bisect_left(every, True, key=lambda own: self.peak(own) > self.task.limit)

    def _seconds(self, own: Candidate) -> float:
        return self.times.seconds(
            own.micro_batch, own.micro_batches, recomputes=own.group > 0, state=own.state, graph=own.graph
        )

    # -- plans --------------------------------------------------------------------------------------------------------

    def _plans(self) -> Iterator[Prediction]:
        """Yield plans of micro batches that do not fit without a plan, unless these cannot be the best."""
        fastest = min(
            (found.seconds for found in self.found if found.candidate.state in self.task.states), default=math.inf
        )
        bounds = []
        for state in self.task.states:
            for size in self.sizes[self._fitting(0, state) :]:
                candidate = self._sized(size, state=state, budget=self.task.budget)
                if self._least_peak(candidate) <= budget_bytes(self.task.budget):
                    bounds.append(Prediction(candidate, self._least_seconds(candidate)))
        for bound in sorted(bounds, key=lambda found: found.order):
            if bound.seconds >= fastest:
                self.not_searched = bound
                return
            for found in self._planned(bound.candidate):
                fastest = min(fastest, found.seconds)
                yield found

    def _least_seconds(self, candidate: Candidate) -> float:
        """Return a lower bound of the time of a plan that frees the memory above the budget."""
        bare = candidate._replace(budget="")
        config = self.task.run_config(bare)
        freed = self.peak(bare) - budget_bytes(self.task.budget)
        return self._seconds(bare) + bare.micro_batches * least_added_seconds(self._costs(config), freed)

    def _planned(self, candidate: Candidate) -> Iterator[Prediction]:
        """Yield the plan of a run of this configuration, with and without a graph; nothing if none fits."""
        config, bare = self.task.run_config(candidate), candidate._replace(budget="")
        rates = Rates.of(self.task.gpu, config.precision)
        try:
            plan = plan_memory(config, budget_bytes(self.task.budget), rates, self.task.host_memory)
        except NotEnoughMemoryError:
            return
        added = candidate.micro_batches * self._costs(self.task.run_config(bare)).added_seconds(plan.plan)
        for graph in (True, False):
            seconds = self._seconds(bare._replace(graph=graph)) + added
            yield Prediction(candidate._replace(graph=graph), seconds, plan)

    def _costs(self, bare: RunConfig) -> BlockCosts:
        return BlockCosts(bare, profile_rates(bare, self.task.profile, self.task.gpu))

    # -- what each choice gives ---------------------------------------------------------------------------------------

    def alternatives(self, chosen: Prediction) -> Iterator[Alternative]:
        """Yield, for each respect in which candidates differ, the best one that differs from the chosen candidate in
        it."""
        own = chosen.candidate
        at = self.sizes.index(own.micro_batch)
        for size in self.sizes[max(0, at - 1) : at] + self.sizes[at + 1 : at + 2]:
            alone = own._replace(micro_batch=size, micro_batches=self.task.sequences // size)
            yield self._alternative(MICRO_BATCH, size, alone)
        bare = own._replace(group=0, budget="")
        if own.activations != KEEP:
            yield self._alternative(ACTIVATIONS, KEEP, bare)
        if own.activations != RECOMPUTE and self.groups:
            yield self._alternative(ACTIVATIONS, RECOMPUTE, self._smallest(bare))
        if own.activations != PLAN:
            planned = self._alternative(ACTIVATIONS, PLAN, bare)._replace(unfit=None)
            if planned.best or self.not_searched:
                least = None if planned.best or self.not_searched is None else self.not_searched.seconds
                yield planned._replace(least_seconds=least)
        for graph in (graph for graph in self.graphs if graph != own.graph):
            yield self._alternative(GRAPH, graph, own._replace(graph=graph))
        for state in (state for state in self.states if state != own.state):
            yield self._alternative(STATE, state, own._replace(state=state), states=self.states)
        for layout in (layout for layout in self.layouts if layout != own.layout):
            yield self._alternative(LAYOUT, layout, own._replace(layout=layout))
        if task_in_fp8 := self._task_in_fp8:
            yield Alternative(PRECISION, "fp8", self._in_fp8(task_in_fp8, own))

    def fp8_problem(self, own: Candidate) -> Text | None:
        """Return why the chosen candidate has no alternative in FP8; None if it has, or is in FP8 already."""
        task = self.task
        if task.config.precision == "fp8" or self._task_in_fp8 is not None:
            return None
        if task.gpus > 1:
            return Text("it is predicted for one GPU only", "只对单张 GPU 作预测")
        if task.gpu.peak_flops("fp8") is None:
            return say("{} has no FP8", "{} 不支持 FP8", task.gpu.name)
        return say("the model {}", "该模型：{}", self._fp8_refusal)

    @cached_property
    def _task_in_fp8(self) -> Task | None:
        """The same task in FP8; None if the GPU or the model does not support it, or if it is in FP8 already."""
        task = self.task
        if task.gpus > 1 or task.config.precision != "bf16" or task.gpu.peak_flops("fp8") is None or self._fp8_refusal:
            return None
        return dataclasses.replace(task, config=dataclasses.replace(task.config, precision="fp8"))

    @cached_property
    def _fp8_refusal(self) -> str:
        """Why the model cannot have matmuls in FP8; "" if it can."""
        try:
            dataclasses.replace(self.task.config, precision="fp8")
        except UserError as error:
            return str(error).removeprefix("precision fp8 ").partition(";")[0]
        return ""

    def _in_fp8(self, task: Task, own: Candidate) -> Prediction | None:
        """Return the same candidate with matmuls in FP8, whose peak differs only by the scales. A candidate that
        recomputes or offloads has other costs in FP8: its place takes the best one of a search of its own."""
        if own.activations != KEEP:
            return next(iter(Search(task).ranked), None)
        times = StepTimes(task.config, task.profile)
        return Prediction(own, times.seconds(own.micro_batch, own.micro_batches, state=own.state, graph=own.graph))

    def _alternative(
        self, dimension: str, value: int | str | bool, alone: Candidate, states: tuple[str, ...] = ()
    ) -> Alternative:
        """Return the best candidate with a value. `alone` is the chosen one with only this changed."""
        states = states or self.task.states
        every = [found for found in self.found if found.candidate.state in states]
        every = [found for found in every if _value(found.candidate, dimension) == value]
        best = min(every, key=lambda found: found.order, default=None)
        return Alternative(
            dimension,
            value,
            None if best is None else self._smallest_group(best),
            self._unfit(alone),
            self._bound_below(alone, best) if dimension == MICRO_BATCH and not alone.layout else None,
        )

    def _unfit(self, candidate: Candidate) -> int | None:
        """Return the peak of a candidate that does not fit; None if it does."""
        peak, limit = self.peak(candidate._replace(budget="")), self.task.limit
        if candidate.budget and peak > limit:
            peak, limit = self._least_peak(candidate), budget_bytes(candidate.budget)
        return peak if peak > limit else None

    def _bound_below(self, alone: Candidate, best: Prediction | None) -> float | None:
        """Return the lower bound of the time of a plan for a micro batch that does not fit without one; None if a plan
        was searched or another candidate is faster."""
        planned = self._sized(alone.micro_batch, state=alone.state, budget=self.task.budget)
        keeping = planned._replace(budget="")
        if self.peak(keeping) <= self.task.limit or self._least_peak(planned) > budget_bytes(self.task.budget):
            return None
        if any(found.candidate == planned for found in self.found):
            return None
        least = self._least_seconds(planned)
        return least if best is None or least < best.seconds else None


def _value(candidate: Candidate, dimension: str) -> int | str | bool:
    found: dict[str, int | str | bool] = {
        MICRO_BATCH: candidate.micro_batch,
        ACTIVATIONS: candidate.activations,
        GRAPH: candidate.graph,
        STATE: candidate.state,
        LAYOUT: candidate.layout,
    }
    return found[dimension]


def divisors(number: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def group_sizes(layers: int) -> list[int]:
    """Return the sizes of groups of recomputed blocks that lead to different numbers of groups, at least two."""
    by_number = {-(-layers // size): size for size in range(layers - 1, 0, -1)}
    return sorted(by_number.values())


def profile_rates(config: RunConfig, profile: GpuProfile, gpu: GPU) -> Rates:
    """Return the rates of the work that a plan may recompute, as `step_time` predicts them for this step."""
    step = step_time(config, profile)
    assert step is not None
    matmuls = [found for found in step.kernels if found.kernel.name in RECOMPUTED_MATMULS]
    attention = [
        found for found in step.kernels if isinstance(found.kernel, AttentionPass) and not found.kernel.is_backward
    ]

    def rate(kernels: list) -> float:
        done = sum(
            own.kernel.times * own.kernel.flops for own in kernels if isinstance(own.kernel, Matmul | AttentionPass)
        )
        return done / sum(own.seconds for own in kernels)

    return Rates(rate(matmuls), rate(attention), Rates.of(gpu).host)


def least_added_seconds(costs: BlockCosts, freed: float) -> float:
    """Return a lower bound for the time that a plan adds to a micro batch in order to free `freed` bytes.

    All blocks have the same choices, so no combination costs less than the lower convex hull of memory and cost.
    """
    layers = costs.config.model.num_layers
    room = costs.kept(KEEP_ALL) - freed / layers
    choices = costs.choices(max(LIMITS), offloads=True)
    if room <= choices[0].kept:
        return layers * choices[0].cost
    enough = [choice.cost for choice in choices if choice.kept <= room]
    between = [
        less.cost + (more.cost - less.cost) * (room - less.kept) / (more.kept - less.kept)
        for less, more in product(choices, choices)
        if less.kept <= room < more.kept
    ]
    return layers * min([*enough, *between])


def predicted_seconds(config: RunConfig, micro_batches: int, gpu: GPU, host_memory: float = math.inf) -> float | None:
    """Return the predicted time of a step, with the plan of its memory budget; None where it is not known."""
    bare, profile = dataclasses.replace(config, memory_budget=""), profile_of(gpu, config.precision)
    step = step_time(bare, profile, micro_batches) if profile is not None else None
    if profile is None or step is None or not config.memory_budget:
        return step.seconds if step is not None else None
    budget, rates = budget_bytes(config.memory_budget), Rates.of(gpu, config.precision)
    plan = plan_memory(config, budget, rates, host_memory)
    costs = BlockCosts(bare, profile_rates(bare, profile, gpu))
    return step.seconds + micro_batches * costs.added_seconds(plan.plan)


def predictions_per_second(task: Task, count: int = 10_000) -> float:
    """Return how many different steps of a task this machine predicts per second, without cached results."""
    times = StepTimes(task.config, task.profile)
    kinds = list(product(range(1, 65), OPTIMIZER_STATES, (False, True), (False, True)))
    start = timeit.default_timer()
    for number in range(count):
        micro_batches, at = divmod(number, len(kinds))
        size, state, recomputes, graph = kinds[at]
        times.seconds(size, micro_batches + 1, recomputes=recomputes, state=state, graph=graph)
    return count / (timeit.default_timer() - start)
