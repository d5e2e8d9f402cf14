"""The experiments with several ranks: their instruments on the smallest problems, and what their tables derive."""

import time

import pytest
import torch
import torch.distributed as dist

from cs336_systems.config import RunConfig, UserError
from cs336_systems.experiments import catalogue
from cs336_systems.experiments.ranks.measure_arrangements import measure_arrangements
from cs336_systems.experiments.ranks.measure_collectives import measure_collectives
from cs336_systems.measure.wire import Wire
from cs336_systems.parallel import collectives
from cs336_systems.record import CELL_TIME, Environment, Record
from cs336_systems.report import parallel
from cs336_systems.report.sections import tables
from tests.helpers import tiny_config

pytestmark = pytest.mark.xdist_group("ranks")  # one at a time: a test has up to four busy processes

LINK = {"backend": "gloo", "device": "cpu", "ranks": 2}


def records(experiment: str, config: dict, metrics: list) -> list[Record]:
    rows = [*metrics, [CELL_TIME, "s", [1.0]]]
    return [Record(experiment, config, name, unit, tuple(found), "ok", Environment()) for name, unit, found in rows]


def text(found: list[Record]) -> str:
    return "\n".join(table.render("md") for table in tables(found))


def test_collectives_are_timed_and_shown():
    config = {**LINK, "collectives": list(catalogue.COLLECTIVES), "sizes": [4096, 40960], "calls": 3}
    metrics = measure_collectives(config)
    assert [name for name, _, _ in metrics] == [f"{c} {s}: time" for c in catalogue.COLLECTIVES for s in (4096, 40960)]
    assert all(len(samples) == 3 and min(samples) > 0 for _, _, samples in metrics)
    shown = text(records("collectives", config, metrics))
    assert all(words in shown for words in ("busbw", "latency and bandwidth", "stands in for a network"))


def test_columns_are_those_of_nccl_tests():
    """4 ranks, 100 MB in 0.1 s: algbw 1 GB/s, and over the busiest link 1.5 times that for an all-reduce."""
    config = {
        **LINK,
        "ranks": 4,
        "collectives": ["all_reduce", "all_gather", "broadcast"],
        "sizes": [10**8],
        "calls": 1,
    }
    metrics = [[f"{name} {10**8}: time", "s", [0.1]] for name in config["collectives"]]
    rows = {row[2]: row[-2:] for row in parallel.collectives(_cells("collectives", config, metrics))[0].rows}
    assert rows == {"all_reduce": ["1.00", "1.50"], "all_gather": ["1.00", "0.75"], "broadcast": ["1.00", "1.00"]}


def _cells(experiment: str, config: dict, metrics: list) -> list:
    from cs336_systems.report.cells import group

    return group(records(experiment, config, metrics))


def test_fit_finds_latency_and_bandwidth():
    points = [(size, 3e-4 + size / 2e9) for size in (1e4, 1e6, 1e7, 1e8)]
    latency, per_byte, misfit = parallel.fit(points)
    assert latency == pytest.approx(3e-4)
    assert 1 / per_byte == pytest.approx(2e9)
    assert misfit < 1e-9
    # Times that grow faster than the size would give a latency below 0.
    latency, per_byte, _ = parallel.fit([(1.0, 1.0), (2.0, 4.0)])
    assert latency == 0
    assert per_byte > 0
    assert parallel.fit([(1.0, 2.0), (2.0, 1.0)])[1] == 0, "and noise a bandwidth below 0"


@pytest.mark.parametrize(
    ("bucket", "backward", "expected"),
    [
        (100.0, 10.0, 1 + 100 / 10),  # one bucket: nothing is hidden
        (50.0, 10.0, 1 + 5 + 1),  # the second waits for the first, which ends 1 s after backward
        (10.0, 1000.0, 1 + 1.0),  # a slow backward hides all but the last
        (10.0, 0.0, 10 * (1 + 1.0)),  # none hides nothing
    ],
)
def test_exposed_follows_the_buckets(bucket, backward, expected):
    """100 bytes at 10 bytes a second, 1 s for each message."""
    assert parallel.exposed(100.0, bucket, backward, 1.0, 10.0) == pytest.approx(expected)


def test_the_best_bucket_is_near_the_formula():
    total, bandwidth, latency = 100e6, 1e9, 1e-3
    sizes = [2.0**n * 1e5 for n in range(11)]
    times = [parallel.exposed(total, size, total / bandwidth, latency, bandwidth) for size in sizes]
    best, formula = sizes[times.index(min(times))], (total * bandwidth * latency) ** 0.5
    assert 0.5 <= best / formula <= 2


ARRANGEMENTS = ["none", "naive", "flat", "overlap", "bucketed 0.01", "torch DDP", "sharded", "torch ZeRO", "fsdp"]


def test_arrangements_agree_and_are_shown():
    """Also the memory of each, to the byte: what is sharded has half of the parameters, gradients or state."""
    run = tiny_config(device="cpu", warmup_steps=1)
    config = {**run, **LINK, "arrangements": [*ARRANGEMENTS, "torch fully_shard"], "rounds": 2, "link": None}
    metrics = measure_arrangements(config)
    found = {name: samples for name, _, samples in metrics}
    for name in config["arrangements"]:
        assert len(found[f"{name}: step_time"]) == 2
        if name != "none":
            assert found[f"{name}: weight_error"][0] <= 1e-6, name
    assert found["none: weight_error"][0] > 1e-6, "ranks have different data, so averaging must matter"
    for name, first_sends_in in (("naive", "sync"), ("flat", "sync"), ("overlap", "backward"), ("fsdp", "forward")):
        times = zip(*(found[f"{name}: {m}"] for m in ("phase", "phase_start", "phase_end")), strict=True)
        during = [phase for phase, start, end in times if start <= found[f"{name}: message_start"][0] < end]
        assert during == [first_sends_in], name
    assert sum(found["naive: message_size"]) >= found["naive: parameter_memory"][0]
    whole = found["flat: parameter_memory"][0]
    assert found["flat: gradient_memory"][0] == whole
    assert found["sharded: parameter_memory"][0] == whole
    assert found["sharded: optimizer_memory"][0] < 0.6 * found["flat: optimizer_memory"][0]
    assert found["fsdp: parameter_memory"][0] < 0.6 * whole
    assert found["fsdp: gradient_memory"][0] == found["fsdp: parameter_memory"][0]
    for experiment in ("ddp", "optimizer_sharding"):
        assert all(name in text(records(experiment, config, metrics)) for name in config["arrangements"])


def test_an_unknown_arrangement_is_named():
    config = {**tiny_config(device="cpu"), **LINK, "ranks": 1, "arrangements": ["zero"], "rounds": 1, "link": None}
    with pytest.raises(RuntimeError, match="unknown arrangement 'zero'"):
        measure_arrangements(config)


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_slow_wire_takes_its_time_and_hides_behind_work(group_of_one):
    """Two messages of 10 ms each, begun together: over 20 ms later, whatever is done meanwhile."""
    before = dist.all_reduce
    with Wire(link=(0.005, 4e5)).tapped() as wire:
        start = time.perf_counter()
        works = [dist.all_reduce(torch.zeros(500), async_op=True) for _ in range(2)]
        assert time.perf_counter() - start < 0.01
        for work in works:
            work.wait()
        assert 0.02 <= time.perf_counter() - start < 0.2
    assert dist.all_reduce is before
    first, second = (message.end - start for message in wire.messages)
    assert 0.01 <= first < second <= 0.2
    assert first <= second - 0.009, "one after another"


def test_a_wire_logs_every_collective_of_ours(group_of_one):
    whole, part = torch.ones(8), torch.zeros(8)
    with Wire().tapped() as wire:
        dist.all_reduce(whole)
        dist.broadcast(whole, 0)
        collectives.all_gather(whole, part)
        collectives.reduce_scatter(part, whole.double().float(), async_op=True).wait()
    assert [(m.collective, m.nbytes) for m in wire.messages] == [
        ("all_reduce", 32),
        ("broadcast", 32),
        ("all_gather", 32),
        ("reduce_scatter", 32),
    ]
    assert all(m.start <= m.end for m in wire.messages)
    assert torch.equal(whole, torch.zeros(8)), "and each was done"


@pytest.mark.parametrize("name", ["collectives", "ddp", "bucket_model", "optimizer_sharding", "fsdp"])
@pytest.mark.parametrize("preset", catalogue.PRESETS)
def test_grids_name_what_the_instruments_know(name, preset):
    cells = catalogue.cells([name], preset, RunConfig(device="cpu"))
    assert cells
    for _, config in cells:
        assert config["ranks"] >= 2
        assert name == "collectives" or len(set(config["arrangements"])) == len(config["arrangements"])


def test_nccl_without_gpus_is_one_line():
    from cs336_systems.parallel import spawn

    for arguments, complaint in (
        ({"backend": "nccl"}, "nccl needs CUDA"),
        ({"device": "cuda"}, "sees none"),
        ({"backend": "mpi"}, "'mpi'"),
    ):
        if torch.cuda.is_available() and "cuda" in str(arguments):
            continue
        with pytest.raises(UserError, match=complaint):
            spawn(print, 2, **arguments)
    with pytest.raises(UserError, match="at least 1, got 0"):
        spawn(print, 0)
