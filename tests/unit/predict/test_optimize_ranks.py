"""The choice of how several GPUs run a step: layout, micro batches and recomputation."""

import dataclasses
import math
from itertools import product

import pytest

from cs336_systems.config import RunConfig, model_config
from cs336_systems.experiments.ranks.layout_times import rank_time
from cs336_systems.experiments.ranks.plan_cells import PlanArguments, needed_memory, plan_config, planned, plans
from cs336_systems.predict.gpus import GIGA, find_card
from cs336_systems.predict.optimize import LAYOUT, Task
from cs336_systems.predict.optimize_ranks import LAYOUTS, RankSearch
from cs336_systems.predict.parallel_model import Cluster
from cs336_systems.predict.time.gpu_profile import profile_of
from cs336_systems.record import GIB

H200 = find_card("h200")


def search_of(gib=math.inf, *, gpus=4, sequences=8, link=450.0, model=None):
    model = model or model_config("medium", context_length=1024, num_layers=6)
    config = RunConfig(model=model, batch_size=1, precision="bf16", attention="auto", fast="on", device="cuda")
    task = Task(config, H200, profile_of(H200), sequences, 139.8 * GIB, gib * GIB, gpus=gpus)
    return RankSearch(task, Cluster(gpus, task.limit, 1e15, 8, link * GIGA, 50 * GIGA))


@pytest.mark.parametrize("gib", [4.0, 5.0, 8.0, math.inf])
def test_the_choice_is_the_fastest_of_all_that_fit(gib):
    search = search_of(gib)
    every = [
        search._sized(size, group=group, graph=False, layout=layout)
        for size, group, layout in product((1, 2, 4, 8), (0, *search.groups), LAYOUTS)
    ]
    fitting = [one for one in every if search.peak(one) <= search.task.limit]
    assert {one.candidate for one in search.found} == set(fitting)
    assert fitting
    assert search.ranked[0].seconds == min(map(search._seconds, fitting))
    assert search.ranked[0].candidate.layout in LAYOUTS


def test_with_a_slow_link_layouts_that_send_more_are_slower():
    fast, slow = search_of(link=450.0), search_of(link=5.0)
    once, every_micro_batch = (slow._sized(1, graph=False, layout=layout) for layout in ("dp", "zero3"))
    assert slow.waiting(every_micro_batch) > slow.waiting(once) > 0
    assert slow._seconds(once) > fast._seconds(once)
    assert slow.ranked[0].candidate.micro_batch == 8
    assert slow.ranked[0].candidate.layout != "zero3"


def test_sharding_the_optimizer_shortens_the_update():
    search = search_of(link=1e6)
    whole, sharded = (search._seconds(search._sized(8, graph=False, layout=layout)) for layout in ("dp", "zero1"))
    assert whole - sharded == pytest.approx(0.75 * search._added["dp"].update, rel=0.02)


def test_a_layout_that_does_not_fit_says_what_it_needs():
    free = search_of(link=20.0)  # ZeRO-3 sends more and is slower than ZeRO-1
    dp, sharded = (free.peak(free._sized(8, layout=layout)) for layout in ("dp", "zero1"))
    assert sharded < dp
    search = search_of((sharded + 0.1 * (dp - sharded)) / GIB, link=20.0)
    chosen = search.ranked[0]
    assert chosen.candidate.layout == "zero1"
    found = {one.value: one for one in search.alternatives(chosen) if one.dimension == LAYOUT}
    assert found["dp"].unfit == dp
    assert found["dp"].best is None or found["dp"].best.seconds >= chosen.seconds


def test_where_nothing_fits_the_least_memory_is_known():
    search = search_of(0.5)
    assert not search.ranked
    least = search.least_memory()
    assert least > 0.5 * GIB
    assert search_of(least * 1.001 / GIB).ranked


@pytest.mark.parametrize("size", ["medium", "qwen2.5/1.5B", "llama3/8B"])
@pytest.mark.parametrize(("micro_batches", "group"), [(1, 0), (4, 0), (1, 2)])
def test_peaks_are_those_of_plan(size, micro_batches, group):
    """`cs336 plan --fast on` and `cs336 optimize --gpus` predict one peak for every layout that both have."""
    search = search_of(sequences=8, model=model_config(size, context_length=2048))
    arguments = PlanArguments(size=size, context_length=2048, gpus=4, gpu="h200", batch_size=8, fast="on")
    arguments = dataclasses.replace(arguments, checkpoint_blocks=group, micro_batches=micro_batches, strategy=LAYOUTS)
    config = plan_config(arguments)
    peaks = {found.strategy.name: int(needed_memory(config, found)) for found in plans(config)}
    candidates = {name: search._sized(8 // micro_batches, group=group, layout=name) for name in LAYOUTS}
    assert peaks == {name: search.peak(candidate) for name, candidate in candidates.items()}


@pytest.mark.parametrize("group", [0, 1])
def test_the_peak_of_a_micro_batch_does_not_depend_on_their_number(group):
    """The chunk of logits of the fast step's loss has one size for all micro batches."""
    model = model_config("qwen2.5/1.5B", context_length=4096)
    peaks = {
        count: search.peak(search._sized(8, group=group, layout="dp"))
        for count in (1, 2, 8)
        for search in [search_of(sequences=8 * count, model=model)]
    }
    assert peaks == pytest.approx(dict.fromkeys(peaks, peaks[1]), rel=1e-3)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_step_of_zero3_is_that_of_plan(micro_batches):
    """torch's engine gathers weights for the fused kernels; its casts and copies take about as long as autocast's."""
    search = search_of(model=model_config("2.7B", context_length=2048), link=1e6)
    sharded = search._sized(8 // micro_batches, graph=False, layout="zero3")
    arguments = PlanArguments(size="2.7B", context_length=2048, gpus=4, gpu="h200", batch_size=8, fast="on")
    arguments = dataclasses.replace(arguments, checkpoint_blocks=0, micro_batches=micro_batches, link=1e6)
    cell = planned(dataclasses.replace(arguments, strategy=("zero3",)))
    assert search._seconds(sharded) == pytest.approx(rank_time(cell, "zero3").overlapped, rel=0.03)
    assert 1 < search._seconds(sharded) / search._seconds(sharded._replace(layout="zero1")) < 1.02


def test_tokens_are_those_of_all_gpus():
    assert search_of().task.tokens == 4 * 8 * 1024
    assert dataclasses.replace(search_of().task, gpus=1).tokens == 8 * 1024
