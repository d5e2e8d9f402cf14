"""Plans with pipeline stages, context parallelism and replicas of shards, compared with schedules that are simulated
step by step and with lists of messages."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.config import ModelConfig, RunConfig
from cs336_systems.predict.parallel_model import Cluster, Plan, in_flight, stage_layers, transformer
from cs336_systems.predict.strategy import Strategy

MODEL = ModelConfig(vocab_size=96, context_length=8, d_model=16, num_layers=8, num_heads=2, d_ff=32)


def plan(strategy: str, gpus: int, micro: int = 0, **fields) -> Plan:
    run = RunConfig(**{"model": MODEL, "batch_size": 1, "precision": "fp32", "attention": "sdpa", **fields})
    return Plan(transformer(run), Cluster(gpus, 80e9, 1e15, 8, 4e11, 5e10), Strategy.parse(strategy), micro)


# -- schedules, simulated ---------------------------------------------------------------------------------------------


class Task(NamedTuple):
    kind: str
    micro_batch: int
    chunk: int


def order(stages: int, stage: int, micro_batches: int, chunks: int) -> list[Task]:
    """Return the tasks of a stage in the order in which it runs them, as Megatron's schedules do."""
    if chunks == 1:
        warmup = min(micro_batches, stages - stage - 1)
        places = [(number, 0) for number in range(micro_batches)]
        backwards = places
    else:
        warmup = min(micro_batches * chunks, 2 * (stages - stage - 1) + (chunks - 1) * stages)
        groups = range(0, micro_batches, stages)
        places = [(first + i, c) for first in groups for c in range(chunks) for i in range(stages)]
        backwards = [(first + i, c) for first in groups for c in reversed(range(chunks)) for i in range(stages)]
    found = [Task("forward", *place) for place in places[:warmup]]
    for forward, backward in zip(places[warmup:], backwards, strict=False):
        found += [Task("forward", *forward), Task("backward", *backward)]
    return found + [Task("backward", *place) for place in backwards[len(places) - warmup :]]


class Simulated(NamedTuple):
    length: float
    """Time of the step; forward and backward of a chunk take 1 / chunks each."""
    most: list[int]
    """The most tasks between forward and backward, by stage."""


def simulate(stages: int, micro_batches: int, chunks: int) -> Simulated:
    """Run all tasks: each begins when the one before it on its stage and the one that it reads from have ended."""
    queues = [order(stages, stage, micro_batches, chunks) for stage in range(stages)]
    done: dict[tuple[int, Task], int] = {}
    free, place, alive, most = [0] * stages, [0] * stages, [0] * stages, [0] * stages
    while any(place[stage] < len(queues[stage]) for stage in range(stages)):
        moved = False
        for stage in range(stages):
            if place[stage] == len(queues[stage]):
                continue
            task = queues[stage][place[stage]]
            needs = source(stages, chunks, stage, task)
            if needs is not None and needs not in done:
                continue
            begins = max(free[stage], done[needs] if needs is not None else 0)
            free[stage] = done[(stage, task)] = begins + 1
            place[stage] += 1
            alive[stage] += 1 if task.kind == "forward" else -1
            most[stage] = max(most[stage], alive[stage])
            moved = True
        assert moved, "the schedule is stuck"
    return Simulated(max(free) / chunks, most)


def source(stages: int, chunks: int, stage: int, task: Task) -> tuple[int, Task] | None:
    """Return the task whose result `task` reads; layers lie on stages 0, 1, ..., then again on stage 0."""
    kind, micro_batch, chunk = task
    number, last = chunk * stages + stage, stages * chunks - 1
    if kind == "forward":
        return None if number == 0 else ((number - 1) % stages, Task(kind, micro_batch, (number - 1) // stages))
    if number == last:
        return stage, Task("forward", micro_batch, chunk)
    return (number + 1) % stages, Task(kind, micro_batch, (number + 1) // stages)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3))
def test_bubble_and_micro_batches_in_flight_are_those_of_a_simulated_schedule(stages, groups, chunks):
    micro_batches = stages * groups
    if stages == 1:
        chunks = 1
    found = simulate(stages, micro_batches, chunks)
    assert [in_flight(stages, stage, micro_batches, chunks) for stage in range(stages)] == found.most
    layers = ModelConfig(**{**vars(MODEL), "num_layers": stages * chunks})
    strategy = Strategy(pipeline=stages, chunks=chunks)
    run = RunConfig(model=layers, batch_size=groups, precision="fp32")
    planned = Plan(transformer(run), Cluster(stages, 80e9, 1e15, 8, 4e11, 5e10), strategy, micro_batches)
    busy = 2 * micro_batches  # forward and backward of each
    assert planned.bubble == pytest.approx(1 - busy / found.length)


@given(st.integers(1, 5), st.integers(1, 9))
def test_few_micro_batches_under_1f1b(stages, micro_batches):
    """The number of micro batches need not be a multiple of the stages."""
    found = simulate(stages, micro_batches, 1)
    assert [in_flight(stages, stage, micro_batches) for stage in range(stages)] == found.most
    assert found.length == 2 * (micro_batches + stages - 1)


# -- memory -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 200), st.integers(1, 16))
def test_layers_of_stages(layers, stages):
    found = stage_layers(layers, stages)
    assert sum(found) == layers
    assert max(found) - min(found) <= 1
    assert found[-1] == min(found), "the last stage has the head, too"


def weights_of_stages(layers: list[int]) -> Iterator[int]:
    """Yield the parameters of each stage, tensor by tensor."""
    width, inner, vocabulary = MODEL.d_model, MODEL.d_ff, MODEL.vocab_size
    for stage, count in enumerate(layers):
        sizes = [size for _ in range(count) for size in ([width] * 2 + [width * width] * 4 + [width * inner] * 3)]
        sizes += [vocabulary * width] * (stage == 0) + [width, vocabulary * width] * (stage == len(layers) - 1)
        yield sum(sizes)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_stages_hold_their_own_weights(stages):
    found = plan(f"dp+pp{stages}", stages)
    expected = list(weights_of_stages(stage_layers(MODEL.num_layers, stages)))
    assert [stage.matrices + stage.replicated for stage in found.stages] == pytest.approx(expected)
    assert sum(expected) == MODEL.parameters
    assert sum(stage.share for stage in found.stages) == pytest.approx(1)
    held = [found._memory(stage)[0]["parameter"] for stage in found.stages]
    assert held == pytest.approx([4 * size for size in expected])


@pytest.mark.parametrize("checkpoint", [0, 1, 2])
@pytest.mark.parametrize("strategy", ["dp+pp4", "dp+pp2x2"])
def test_activations_are_those_of_the_micro_batches_in_flight(strategy, checkpoint):
    found = plan(strategy, 4, checkpoint_blocks=checkpoint, batch_size=2)
    stages, chunks = found.strategy.pipeline, found.strategy.chunks
    assert found.micro_batches == 2 * stages
    one = transformer(RunConfig(model=MODEL, batch_size=1, attention="sdpa", checkpoint_blocks=checkpoint))
    simulated, per_chunk = simulate(stages, found.micro_batches, chunks), MODEL.num_layers // (stages * chunks)
    per_group = per_chunk // checkpoint if checkpoint else per_chunk
    kept = per_group * (one.group_input if checkpoint else one.block)
    expected = [most * kept + checkpoint * one.block for most in simulated.most]
    expected[-1] += one.ends
    # A micro batch has one sequence; `kept` is that of a GPU's two.
    assert [stage.kept * found.tokens_at_once for stage in found.stages] == pytest.approx(expected)


def test_one_stage_and_one_micro_batch_are_the_plan_without():
    assert plan("dp+pp1", 4).memory == plan("dp", 4).memory
    work = plan("dp", 4).workload
    assert plan("dp", 4).memory["activation"] == work.activations
    assert plan("dp", 4, micro=2, batch_size=2).memory["activation"] == pytest.approx(work.activations)


def test_context_parallel_holds_a_share_of_a_sequence():
    """Four GPUs process four sequences one by one: a quarter of one at a time on each."""
    alone, split, ring = plan("dp", 8), plan("dp+cp4", 8), plan("dp+ring4", 8)
    assert split.memory["activation"] == alone.memory["activation"] / 4
    assert split.memory["parameter"] == alone.memory["parameter"]
    key = MODEL.context_length * MODEL.d_model * 4
    assert split.memory["working"] - alone.memory["working"] == 4 * key, "keys, values and gradients of a sequence"
    assert ring.memory["working"] - alone.memory["working"] == 4 * key / 4, "those of one GPU of four"


# -- messages ---------------------------------------------------------------------------------------------------------


def sent(found: Plan, axis: str) -> float:
    return sum(message.sent for message in found.collectives if message.axis == axis)


@pytest.mark.parametrize(("strategy", "gpus"), [("dp+pp4", 4), ("dp+pp4x2", 4), ("dp+tp2+pp2", 4), ("dp+pp2", 8)])
def test_messages_between_stages(strategy, gpus):
    """Every boundary between chunks is crossed by each micro batch once in forward and once in backward."""
    found = plan(strategy, gpus)
    stages, chunks, tensor = found.strategy.pipeline, found.strategy.chunks, found.strategy.tensor
    array = MODEL.context_length * MODEL.d_model * 4 / tensor
    by_stage = dict.fromkeys(range(stages), 0.0)
    for _ in range(found.micro_batches):
        for number in range(stages * chunks - 1):
            by_stage[number % stages] += array  # to the chunk after it
            by_stage[(number + 1) % stages] += array  # and its gradient back
    first, last = by_stage[0], by_stage[stages - 1]
    # The prediction is for a stage that sends both ways for all of its chunks; the ends of the model send less.
    both_ways = sent(found, "pipeline")
    assert both_ways == pytest.approx(2 * found.micro_batches * chunks * array)
    assert first == last == both_ways - found.micro_batches * array
    assert all(by_stage[stage] == both_ways for stage in range(1, stages - 1))


@pytest.mark.parametrize("kind", ["cp", "ring"])
def test_messages_of_keys_and_values(kind):
    """Every GPU must see the keys and values of the others, in forward and in backward, and send gradients home."""
    degree, found = 4, plan(f"dp+{kind}4", 4)
    share = 2 * MODEL.context_length * MODEL.d_model * 4 / degree  # keys and values of one GPU's tokens of a sequence
    messages = []
    for _ in range(found.micro_batches * MODEL.num_layers):
        messages += [share] * (degree - 1)  # forward: to or past each other GPU
        messages += [share] * (degree - 1)  # backward: the same again
        messages += [share] * (degree if kind == "ring" else degree - 1)  # gradients: in a ring home by one more hop
    assert sent(found, "context") == pytest.approx(sum(messages))


def test_shards_of_replicas():
    """HSDP on 16 GPUs, 2 x 8: weights are gathered within a node, gradients of a shard cross it once."""
    hybrid, full = plan("zero3+replicate2", 16), plan("zero3", 16)
    in_node = [found for found in hybrid.collectives if found.axis == "shard"]
    assert {hybrid.bandwidth(found) for found in in_node} == {hybrid.cluster.link}
    assert {found.ranks for found in in_node} == {8}
    (across,) = (found for found in hybrid.collectives if found.axis == "replicate")
    assert (across.ranks, across.nbytes) == (2, hybrid.workload.matrices * 4 / 8)
    assert hybrid.bandwidth(across) == hybrid.cluster.network
    norms = 4 * hybrid.workload.replicated
    assert hybrid.memory["parameter"] - norms == 2 * (full.memory["parameter"] - norms)


def test_stage_3_gathers_for_every_micro_batch_and_stage_1_does_not():
    def of_weights(strategy: str, micro: int) -> float:
        return sent(plan(strategy, 4, micro, batch_size=4), "shard") + sent(
            plan(strategy, 4, micro, batch_size=4), "data"
        )

    norms = sum(m.sent for m in plan("zero3", 4).collectives if m.purpose == "gradients of norms")
    assert of_weights("zero3", 4) - norms == pytest.approx(4 * (of_weights("zero3", 1) - norms))
    assert of_weights("zero1", 4) == of_weights("zero1", 1)


def test_links_by_axis():
    """32 GPUs in nodes of 8, tp2 x cp2 x pp2: layers and contexts are split in a node, stages are nodes apart."""
    found = plan("dp+tp2+cp2+pp2", 32)
    rates = {message.axis: found.bandwidth(message) for message in found.collectives}
    link, network = found.cluster.link, found.cluster.network
    assert rates == {"tensor": link, "context": link, "pipeline": network, "data": 4 * network}


def test_the_smallest_cluster_fits():
    for strategy in ("zero3+pp2", "zero3+cp4", "zero3+replicate2", "zero1+tp2+pp4"):
        found = plan(strategy, 64)
        small = Cluster(64, found.total * 0.9, *list(vars(found.cluster).values())[2:])
        needed = Plan(found.workload, small, found.strategy).smallest_cluster
        if needed is not None:
            assert Plan(found.workload, Cluster(needed, *list(vars(small).values())[1:]), found.strategy).fits
            assert needed % found.strategy.group == 0
