"""The choice of how to run a step: the least predicted time of all that fits, found without predicting it all."""

import dataclasses
import math
from functools import cache
from itertools import product

import pytest

from cs336_systems.config import OPTIMIZER_STATES, RunConfig, model_config
from cs336_systems.predict.building_memory import building_peak
from cs336_systems.predict.gpus import find_card
from cs336_systems.predict.memory_model import estimate
from cs336_systems.predict.memory_planner import NotEnoughMemoryError, budget_bytes
from cs336_systems.predict.optimize import (
    ACTIVATIONS,
    GRAPH,
    KEEP,
    MICRO_BATCH,
    PLAN,
    PRECISION,
    RECOMPUTE,
    STATE,
    WITHOUT_GRAPH,
    Candidate,
    Search,
    Task,
    divisors,
    group_sizes,
    predicted_seconds,
    predictions_per_second,
)
from cs336_systems.predict.time.gpu_profile import profile_of
from cs336_systems.predict.time.time_model import step_time
from cs336_systems.record import GIB
from cs336_systems.report.cells import group
from tests.helpers import records_of_h200

H200 = find_card("h200")
PROFILE = profile_of(H200)
SEQUENCES = 12
CAPACITY = 139.8 * GIB


def task(memory=math.inf, profile=PROFILE, sequences=SEQUENCES, **fields):
    model = model_config("medium", context_length=1024, num_layers=6)
    fast = {"precision": "bf16", "attention": "auto", "fast": "on", "device": "cuda"}
    config = RunConfig(model=model, batch_size=1, max_grad_norm=1.0, **fast)
    return Task(config, H200, profile, sequences, CAPACITY, memory, **fields)


@cache
def every_peak(config):
    return max(estimate(config).peak, building_peak(config).peak)


@cache
def seconds_of(config, micro_batches):
    return step_time(config, PROFILE, micro_batches).seconds


def exhaustive(own):
    """All candidates without a plan that fit: candidate -> seconds, by the slow functions."""
    assert own.profile is PROFILE
    found = {}
    for size in (size for size in range(1, own.sequences + 1) if own.sequences % size == 0):
        for blocks, state, graph in product(range(own.config.model.num_layers), own.states, (True, False)):
            candidate = Candidate(size, own.sequences // size, blocks, state, graph)
            config = own.run_config(candidate)
            if every_peak(config) <= own.limit:
                found[candidate] = seconds_of(config, candidate.micro_batches)
    return found


def keeping_peak(own, size):
    return every_peak(own.run_config(Candidate(size, own.sequences // size)))


# -- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gib", [1.9, 2.0, 2.3, 2.8, math.inf])
@pytest.mark.parametrize("states", [("fp32",), OPTIMIZER_STATES])
def test_the_choice_is_the_fastest_of_all_that_fit(gib, states):
    own = task(gib * GIB, states=states)
    search = Search(own)
    every = exhaustive(own)
    best = search.ranked[0]
    least = min(every.values(), default=math.inf)
    if best.plan is None:
        assert best.seconds == pytest.approx(least, rel=1e-9)
        assert every[best.candidate] == pytest.approx(best.seconds, rel=1e-9)
    else:
        assert best.seconds <= least
    found = {one.candidate for one in search.found if one.plan is None and one.candidate.state in states}
    assert {one for one in every if one.group in (0, *search.groups)} == found
    assert all(search.peak_of(one) <= own.limit for one in search.ranked)


@pytest.mark.parametrize("gib", [2.0, 2.3, 2.8, 3.2])
def test_plans_that_are_not_searched_would_not_have_been_chosen(gib):
    own = task(gib * GIB)
    search = Search(own)
    best, planned = search.ranked[0].seconds, 0
    for size in search.sizes:
        if keeping_peak(own, size) <= own.limit:
            continue
        config = own.run_config(Candidate(size, own.sequences // size, budget=own.budget))
        try:
            seconds = predicted_seconds(config, own.sequences // size, H200)
        except NotEnoughMemoryError:
            continue
        planned += 1
        assert seconds >= best * (1 - 1e-9)
        assert seconds >= search._least_seconds(Candidate(size, own.sequences // size, budget=own.budget)) * (1 - 1e-9)
    assert planned


def test_a_plan_is_chosen_where_it_is_the_fastest():
    own = task(sequences=8)
    own = dataclasses.replace(own, memory=0.97 * keeping_peak(own, 8))
    slow_batches = dataclasses.replace(PROFILE, small=2e-3)  # more micro batches cost more than the plan
    search = Search(dataclasses.replace(own, profile=slow_batches))
    best = search.ranked[0]
    assert best.candidate.activations == PLAN
    assert best.candidate.micro_batch == 8
    assert best.plan.estimate.peak <= budget_bytes(own.budget) <= own.memory
    assert own.run_config(best.candidate).memory_budget == own.budget


def test_recomputation_is_chosen_where_many_micro_batches_cost_more():
    """Every small kernel takes a second: one micro batch with recomputation beats two without."""
    own = task(sequences=8)
    memory = every_peak(own.run_config(Candidate(8, 1, 1))) * 1.01
    slow = dataclasses.replace(PROFILE, small=1.0)
    no_plans = dataclasses.replace(own, memory=memory, profile=slow, host_memory=0)
    search = Search(no_plans)
    assert keeping_peak(own, 8) > memory >= keeping_peak(own, 2)
    kept = min(one.seconds for one in search.found if one.candidate.activations == KEEP)
    recomputed = [one for one in search.ranked if one.candidate.activations == RECOMPUTE]
    assert recomputed[0].candidate.micro_batch == 8
    assert recomputed[0].seconds < kept


def test_states_that_change_the_numerics_are_chosen_only_if_allowed():
    tight = keeping_peak(task(), 1) * 0.8
    assert {one.candidate.state for one in Search(task(tight)).ranked} <= {"fp32"}
    allowed = Search(task(tight, states=OPTIMIZER_STATES)).ranked
    assert "bf16" in {one.candidate.state for one in allowed}


def test_the_group_of_recomputed_blocks_has_the_least_peak():
    search = Search(task())
    for one in search.ranked:
        own = one.candidate
        if own.group:
            assert search.peak(own) == min(search.peak(own._replace(group=group)) for group in search.groups)


def test_where_nothing_fits_the_least_memory_is_known():
    search = Search(task(1 * GIB))
    assert not search.ranked
    assert search.least_memory() > 1 * GIB
    enough = Search(task(search.least_memory() * 1.02))
    assert enough.ranked


# -- what each choice gives -------------------------------------------------------------------------------------------


def by_dimension(search):
    return {(found.dimension, found.value): found for found in search.alternatives(search.ranked[0])}


def test_alternatives_are_the_best_with_a_value():
    search = Search(task())
    found = by_dimension(search)
    assert {dimension for dimension, _ in found} == {MICRO_BATCH, ACTIVATIONS, GRAPH, STATE, PRECISION}
    chosen = search.ranked[0]
    in_fp8 = found.pop((PRECISION, "fp8")).best
    config = dataclasses.replace(search.task.run_config(in_fp8.candidate), precision="fp8")
    assert in_fp8.seconds == pytest.approx(
        step_time(config, search.task.profile, chosen.candidate.micro_batches).seconds
    )
    for (dimension, value), alternative in found.items():
        best = alternative.best
        assert best is not None, (dimension, value)
        same = {MICRO_BATCH: "micro_batch", ACTIVATIONS: "activations", GRAPH: "graph", STATE: "state"}[dimension]
        others = [one for one in search.found if getattr(one.candidate, same) == value]
        others = [one for one in others if dimension == STATE or one.candidate.state in search.task.states]
        assert best.seconds == min(one.seconds for one in others)
        assert dimension == STATE or best.seconds >= chosen.seconds


def test_an_alternative_that_does_not_fit_alone_says_what_it_needs():
    own = task(sequences=8)
    limit = keeping_peak(own, 4) * 1.001
    search = Search(dataclasses.replace(own, memory=limit, host_memory=0))
    assert search.ranked[0].candidate.micro_batch == 4
    assert by_dimension(search)[MICRO_BATCH, 8].unfit == keeping_peak(own, 8) > limit
    assert by_dimension(search)[MICRO_BATCH, 2].unfit is None


# -- parts ------------------------------------------------------------------------------------------------------------


def test_groups_lead_to_different_numbers_of_groups():
    assert group_sizes(1) == []
    assert group_sizes(6) == [1, 2, 3]
    for layers in (2, 7, 32, 80):
        numbers = [-(-layers // size) for size in group_sizes(layers)]
        assert len(set(numbers)) == len(numbers)
        assert set(numbers) == {-(-layers // size) for size in range(1, layers)}


def test_micro_batches_whose_residual_stream_exceeds_the_memory_are_left_out():
    own = task(sequences=2**20)
    sizes = Search(own).sizes
    assert len(sizes) < 21
    assert keeping_peak(own, sizes[-1]) > own.limit
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_the_configuration_of_a_candidate():
    own = task()
    config = own.run_config(Candidate(4, 3, 2, "bf16", graph=False))
    assert (config.batch_size, config.checkpoint_blocks, config.optimizer_state) == (4, 2, "bf16")
    assert config.fast == WITHOUT_GRAPH
    assert "graph" in own.run_config(Candidate(4, 3)).fast_parts


def test_the_budget_of_a_plan_is_at_most_the_limit():
    for memory in (3.14159 * GIB, 0.7 * GIB, math.inf):
        own = task(memory)
        assert 0 < budget_bytes(own.budget) <= own.limit
    assert task(2.3 * GIB).budget == "2.30GiB"


def test_predicted_seconds_are_those_of_the_search():
    own = task(2.0 * GIB)
    for one in Search(own).ranked:
        config = own.run_config(one.candidate)
        assert predicted_seconds(config, one.candidate.micro_batches, H200) == pytest.approx(one.seconds, rel=1e-9)


@pytest.mark.parametrize(
    ("size", "context", "budget"),
    [("large", 1024, "14.19GiB"), ("large", 4096, "23.42GiB"), ("2.7B", 2048, "54.11GiB")],
)
def test_times_of_plans_agree_with_an_h200(size, context, budget):
    """The steps that `memory_budgets` measured."""
    measured = [
        cell
        for cell in group(one for one in records_of_h200() if one.experiment == "memory_budgets")
        if (cell.get("size"), cell.get("context_length"), cell.get("memory_budget")) == (size, context, budget)
    ]
    (cell,) = measured
    predicted = predicted_seconds(RunConfig.of(cell.config), 1, H200)
    assert predicted == pytest.approx(cell.value("step_time"), rel=0.05)


def test_the_rate_is_that_of_real_predictions():
    assert predictions_per_second(task(), 50) > 0
