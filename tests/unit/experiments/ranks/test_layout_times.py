"""Step times in `cs336 plan`: kernels of a rank's own step, exposed communication, days and money of the cluster."""

from dataclasses import replace

import pytest

from cs336_systems.cli import main
from cs336_systems.config import RunConfig, model_config
from cs336_systems.experiments.ranks.layout_times import RankTime, missing_times, predicted_times, rank_time
from cs336_systems.experiments.ranks.plan_cells import Passes, PlanArguments, planned, plans
from cs336_systems.experiments.ranks.recommended_layout import recommendation
from cs336_systems.predict.gpus import find_card
from cs336_systems.predict.rank_shards import Mesh
from cs336_systems.predict.time.eager_time import time_of_phases
from cs336_systems.predict.time.engine_kernels import EngineKernels
from cs336_systems.predict.time.gpu_profile import profile_of
from cs336_systems.predict.time.on_gpu import predicted_on
from cs336_systems.predict.time.rank_time import added_seconds
from cs336_systems.predict.time.time_model import step_time
from cs336_systems.predict.training_cost import Cost

ARGUMENTS = PlanArguments(
    size="2.7B", context_length=2048, batch_size=4, checkpoint_blocks=0, gpus=8, gpu="h200", fast="on"
)
H200 = profile_of(find_card("h200"))
STEP = {"precision": "bf16", "attention": "auto", "device": "cuda"}


def run(fast: str, batch: int = 4) -> RunConfig:
    return RunConfig(model=model_config("2.7B", context_length=2048), batch_size=batch, fast=fast, **STEP)


def test_one_gpu_has_the_fast_step_itself():
    time = rank_time(planned(replace(ARGUMENTS, gpus=1)), "dp")
    expected = predicted_on(run("on"), find_card("h200")).time.seconds
    assert time == pytest.approx((expected,) * 3)


def test_a_rank_has_the_step_of_its_own_sequences_and_updates_its_shard():
    """By torch's AdamW, of fp32 weights that autocast, or fully_shard, casts."""
    cell = planned(replace(ARGUMENTS, strategy=("dp", "zero1", "zero2", "zero3", "zero3+replicate2")))
    whole = step_time(run("kernels,loss,optimizer"), H200)
    kernels = whole.seconds - whole.by_name()["adamw"]
    times = {name: rank_time(cell, name).kernels for name in cell.get("strategies")}
    added = added_seconds(run("off"), Mesh(), H200)
    assert times["dp"] == pytest.approx(kernels + added.gradients + added.update)
    assert times["zero1"] == times["zero2"] == pytest.approx(kernels + added.gradients + added.update / 8)
    for name, mesh in (("zero3", Mesh(dp_shard=8)), ("zero3+replicate2", Mesh(1, 2, 4))):
        sharded = added_seconds(run("off"), mesh, H200)
        assert times[name] == pytest.approx(kernels + sharded.gradients + sharded.update)
        assert sharded.update == pytest.approx(added.update / mesh.dp_shard, rel=0.02)


@pytest.mark.parametrize(("sharded", "measured"), [(False, 0.345), (True, 0.361)])
def test_the_fast_step_of_a_rank_takes_as_long_as_was_measured(sharded, measured):
    """On one H200 with torch 2.11: 2.7B, 4 x 2,048 tokens, vocabulary 32,000; by autocast and by fully_shard."""
    config = replace(run("kernels,loss"), model=model_config("2.7B", context_length=2048, vocab_size=32_000))
    fast = step_time(replace(config, fast="kernels,loss,optimizer"), H200)
    # A group of one rank shards nothing, but casts and copies: as replicas of one rank that have a second axis.
    added = added_seconds(config, Mesh(dp_replicate=2, cp=1, tp=1)._replace(pp=2) if sharded else Mesh(), H200)
    update = added.update * (2 if sharded else 1)
    found = fast.seconds - fast.by_name()["adamw"] + added.gradients + update
    assert found == pytest.approx(measured, rel=0.02)


def test_fully_shard_on_one_gpu_takes_as_long_as_was_measured():
    """413 ms on an H200 with torch 2.11: 2.7B, 4 x 2,048 tokens, vocabulary 32,000, operator by operator."""
    config = replace(run("off"), model=model_config("2.7B", context_length=2048, vocab_size=32_000))
    step = EngineKernels(config, Mesh())
    step.sharded, step.stream_width = True, 2  # a group of one rank shards nothing, but casts and copies all the same
    assert time_of_phases(step.phases(), config, H200).seconds == pytest.approx(0.413, rel=0.02)


@pytest.mark.parametrize("name", ["dp+tp8", "zero3+tp2", "zero3+cp2", "zero1+pp4"])
def test_micro_batches_repeat_the_kernels_but_not_the_update(name):
    """Twice as many micro batches of one size; then the same tokens in micro batches of twice the size."""

    def kernels(batch, micro_batches):
        fields = {"batch_size": batch, "micro_batches": micro_batches, "strategy": (name,)}
        return rank_time(planned(replace(ARGUMENTS, **fields)), name).kernels

    once, twice, larger = kernels(4, 4), kernels(8, 8), kernels(8, 4)
    assert 1.8 * once < twice < 2.01 * once
    assert 0.85 * twice < larger < twice


def test_ranks_that_share_layers_wait_for_what_they_gather():
    """Their communication does not overlap, and each has the kernels of its part of 8 times the sequences."""
    cell = planned(replace(ARGUMENTS, micro_batches=1, strategy=("dp+tp8", "zero3+cp8", "zero3+ring8", "zero3")))
    split, gathered, ring, whole = (rank_time(cell, name) for name in cell.get("strategies"))
    (plan,) = plans({**cell.config, "strategies": ["dp+tp8"]})
    sent = plan.communication("forward") + plan.communication("backward")
    assert split.overlapped == pytest.approx(split.kernels + sent) == pytest.approx(split.sequential)
    assert 1.2 * whole.kernels < split.kernels < 1.6 * whole.kernels  # without the fused kernels
    assert gathered.kernels < gathered.overlapped < gathered.sequential
    assert ring.kernels == pytest.approx(gathered.kernels)
    (table,) = predicted_times(cell, Cost())
    assert any(note.en.startswith("communication of TP and CP never overlaps") for note in table.notes)


def test_steps_that_are_bound_by_launches_and_uneven_micro_batches_are_not_predicted():
    small = planned(
        replace(ARGUMENTS, size="small", context_length=128, batch_size=1, strategy=("zero3+tp2", "dp+tp4"))
    )
    assert missing_times(small).en.startswith(
        "Step time: not predicted for ZeRO-3 + TP 2, DP + TP 4, whose step is bound by the launches of the host"
    )
    uneven = planned(replace(ARGUMENTS, micro_batches=3, strategy=("dp", "zero3")))
    assert missing_times(uneven).en == (
        "Step time: not predicted for DP, ZeRO-3, whose micro batches are not of one size."
    )


def test_micro_batches_are_those_of_a_rank():
    time = rank_time(planned(replace(ARGUMENTS, micro_batches=2)), "dp")
    fast = step_time(run("kernels,loss,optimizer", batch=2), H200, micro_batches=2)
    added = added_seconds(run("off"), Mesh(), H200)
    expected = fast.seconds - fast.by_name()["adamw"] + 2 * added.gradients + added.update
    assert time.kernels == pytest.approx(expected)
    assert rank_time(planned(replace(ARGUMENTS, micro_batches=3)), "dp") is None


def test_launches_of_the_host_bound_small_steps_of_ranks():
    small = replace(ARGUMENTS, size="small", context_length=128, batch_size=1)
    alone, among = (rank_time(planned(replace(small, gpus=gpus)), "dp").kernels for gpus in (1, 8))
    assert among > 2 * alone


def test_communication_is_exposed_where_it_is_longer_than_its_pass():
    passes = Passes([1.0, 3.0], [4.0, 2.0])
    assert RankTime.of(8.0, passes) == (8.0, 8.0 + (4.0 - 2.0), 8.0 + 6.0)
    assert RankTime.of(40.0, passes) == (40.0, 40.0, 46.0)
    waiting = passes._replace(waiting=(1.0, 0.5))
    assert RankTime.of(8.0, waiting) == (8.0, 8.0 + 1.5 + (4.0 - 1.0 - 2.0), 14.0)


def test_rates_days_and_money_are_those_of_the_cluster():
    cell = planned(ARGUMENTS)
    (table,) = predicted_times(cell, Cost(300e9, 2.5))
    rows = {row[0]: row for row in table.plain().rows}
    assert list(rows) == ["DP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "DP + TP 8", "ZeRO-3 + TP 8"]
    rate, mfu, days, cost = (float(text.replace(",", "").rstrip("%")) for text in rows["ZeRO-1"][3:])
    assert rate == pytest.approx(8 * 4 * 2048 / rank_time(cell, "zero1").overlapped, rel=1e-4)
    assert 50 < mfu < 75
    assert days == pytest.approx(300e9 / rate / 86_400, abs=0.5)
    assert cost == pytest.approx(300e9 / rate / 3600 * 8 * 2.5, rel=1e-3)
    (note,) = [note.en for note in table.notes if note.en.startswith("not predicted: ")]
    assert note.startswith("not predicted: ZeRO-3 + CP 4, whose step is bound by the launches of the host")


def test_layouts_that_do_not_fit_have_no_time():
    (table,) = predicted_times(planned(replace(ARGUMENTS, gpu="4090", batch_size=1, checkpoint_blocks=1)), Cost())
    assert [row[0] for row in table.rows] == ["ZeRO-3", "DP + TP 8", "ZeRO-3 + TP 8", "ZeRO-3 + CP 4"]
    assert any("data sheet" in note.en for note in table.notes)
    assert predicted_times(planned(replace(ARGUMENTS, gpu="t4", precision="fp16", strategy=("dp",))), Cost()) == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"fast": "off"}, "--fast on"),
        ({"fast": "kernels"}, "--fast on"),
        ({"attention": "sdpa"}, "--attention auto"),
        ({"precision": "fp32"}, "--precision bf16"),
        ({"count": "feed-forward"}, "--count transformer"),
        ({"gpu": "140GiB", "tflops": 500.0}, "140GiB"),
    ],
)
def test_plans_that_are_not_predicted_say_why(fields, words):
    cell = planned(replace(ARGUMENTS, **fields))
    assert predicted_times(cell, Cost()) == []
    said = missing_times(cell)
    assert words in said.en
    assert said.zh != said.en


def test_the_recommendation_has_the_predicted_step():
    cell = planned(ARGUMENTS)
    time = rank_time(cell, "zero1")
    assert f"{1e3 * time.overlapped:.0f} to {1e3 * time.sequential:.0f} ms" in recommendation(cell).en
    assert missing_times(cell) is None


def test_the_recommendation_has_days_and_cost():
    """They are those of the table; a layout without a predicted step says so, and with which flags there is one."""
    cell, cost = planned(ARGUMENTS), Cost(300e9, 2.5)
    (table,) = predicted_times(cell, cost)
    (row,) = [row for row in table.plain().rows if row[0] == "ZeRO-1"]
    assert f"300,000,000,000 tokens take {row[-2]} days and cost {row[-1]}." in recommendation(cell, cost).en
    assert f"take {row[-2]} days." in recommendation(cell, Cost(300e9)).en
    assert "days" not in recommendation(cell).en
    slow = planned(replace(ARGUMENTS, fast="off"))
    assert "Its days and cost are not predicted." in recommendation(slow, cost).en
    assert missing_times(slow, cost).en == "Step time, days and cost: predicted with --fast on."


def test_the_command_prints_times_and_refuses_a_price_without_tokens(capsys):
    words = ["plan", "--size", "small", "--gpus", "2", "--gpu", "h200", "--fast", "on", "--context_length", "512"]
    assert main([*words, "--train_tokens", "1B", "--price", "2/h"]) == 0
    assert "predicted time of a step" in capsys.readouterr().out
    assert main([*words, "--price", "2"]) == 2
    assert "--train_tokens" in capsys.readouterr().err
