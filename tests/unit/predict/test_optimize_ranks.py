"""The choice of how several GPUs run a step: layout, micro batches and recomputation."""

import dataclasses
import math
from itertools import product

import pytest

from cs336_systems.config import RunConfig, model_config
from cs336_systems.predict.gpus import GIGA, find_card
from cs336_systems.predict.optimize import LAYOUT, Task
from cs336_systems.predict.optimize_ranks import LAYOUTS, RankSearch
from cs336_systems.predict.parallel_model import Cluster
from cs336_systems.predict.time.gpu_profile import profile_of
from cs336_systems.record import GIB

H200 = find_card("h200")


def search_of(gib=math.inf, *, gpus=4, sequences=8, link=450.0):
    model = model_config("medium", context_length=1024, num_layers=6)
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
    fitting = [one for one in every if search.plan_of(one).total <= search.task.limit]
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
    assert whole - sharded == pytest.approx(0.75 * search.times.update_seconds(), rel=0.02)


def test_a_layout_that_does_not_fit_says_what_it_needs():
    free = search_of()
    dp, sharded = (free.peak(free._sized(8, layout=layout)) for layout in ("dp", "zero1"))
    assert sharded < dp
    search = search_of((sharded + 0.1 * (dp - sharded)) / GIB)
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


def test_tokens_are_those_of_all_gpus():
    assert search_of().task.tokens == 4 * 8 * 1024
    assert dataclasses.replace(search_of().task, gpus=1).tokens == 8 * 1024
