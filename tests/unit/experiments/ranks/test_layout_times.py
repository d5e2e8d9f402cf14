"""Step times in `cs336 plan`: kernels of a rank's own step, exposed communication, days and money of the cluster."""

from dataclasses import replace

import pytest

from cs336_systems.cli import main
from cs336_systems.config import RunConfig, model_config
from cs336_systems.experiments.ranks.layout_times import RankTime, missing_times, predicted_times, rank_time
from cs336_systems.experiments.ranks.plan_cells import Passes, PlanArguments, planned
from cs336_systems.experiments.ranks.recommended_layout import recommendation
from cs336_systems.predict.gpus import find_card
from cs336_systems.predict.time.eager_time import eager_step_time
from cs336_systems.predict.time.gpu_profile import profile_of
from cs336_systems.predict.time.on_gpu import predicted_on
from cs336_systems.predict.time.time_model import step_time
from cs336_systems.predict.training_cost import Cost

ARGUMENTS = PlanArguments(
    size="2.7B", context_length=2048, batch_size=4, checkpoint_blocks=0, gpus=8, gpu="h200", fast="on"
)
STEP = {"precision": "bf16", "attention": "auto", "device": "cuda"}


def run(fast: str, batch: int = 4) -> RunConfig:
    return RunConfig(model=model_config("2.7B", context_length=2048), batch_size=batch, fast=fast, **STEP)


def test_one_gpu_has_the_fast_step_itself():
    time = rank_time(planned(replace(ARGUMENTS, gpus=1)), "dp")
    expected = predicted_on(run("on"), find_card("h200")).time.seconds
    assert time == pytest.approx((expected,) * 3)


def test_a_rank_has_the_step_of_its_own_sequences_and_updates_its_shard():
    cell = planned(replace(ARGUMENTS, strategy=("dp", "zero1", "zero2", "zero3+replicate2")))
    whole = step_time(run("kernels,loss,optimizer"), profile_of(find_card("h200")))
    assert rank_time(cell, "dp").kernels == pytest.approx(whole.seconds)
    for name in ("zero1", "zero2", "zero3+replicate2"):
        shards = 4 if name.endswith("replicate2") else 8
        saved = (1 - 1 / shards) * whole.by_name()["adamw"]
        assert rank_time(cell, name).kernels == pytest.approx(whole.seconds - saved)


def test_a_rank_without_the_fused_kernels_has_the_step_of_single_operators():
    """FSDP of `cs336 train` runs without them."""
    cell = planned(ARGUMENTS)
    plain = eager_step_time(run("off"), profile_of(find_card("h200")))
    kernels = sum(seconds for _, seconds in plain.kernels) + plain.gaps
    found = rank_time(cell, "zero3").kernels
    assert found == pytest.approx(kernels - 7 / 8 * plain.by_name()["adamw_of_torch"])
    assert found > rank_time(cell, "dp").kernels
    (table,) = predicted_times(cell, Cost())
    assert any(note.en.startswith("of ZeRO-3: predicted operator by operator") for note in table.notes)
    in_parts = planned(replace(ARGUMENTS, micro_batches=2))
    assert rank_time(in_parts, "zero3") is None
    (table,) = predicted_times(in_parts, Cost())
    assert "not predicted: ZeRO-3, which runs without the fused kernels and loss" in [note.en for note in table.notes]
    alone = planned(replace(ARGUMENTS, micro_batches=2, strategy=("zero3", "tp2")))
    assert missing_times(alone).en == (
        "Step time: not predicted for ZeRO-3, which runs without the fused kernels and loss; DP + TP 2, whose GPUs "
        "share layers or sequences."
    )


def test_micro_batches_are_those_of_a_rank():
    time = rank_time(planned(replace(ARGUMENTS, micro_batches=2)), "dp")
    expected = step_time(run("kernels,loss,optimizer", batch=2), profile_of(find_card("h200")), micro_batches=2)
    assert time.kernels == pytest.approx(expected.seconds)
    assert rank_time(planned(replace(ARGUMENTS, micro_batches=3)), "dp") is None


def test_launches_of_the_host_bound_small_steps_of_ranks():
    small = replace(ARGUMENTS, size="small", context_length=128, batch_size=1)
    alone, among = (rank_time(planned(replace(small, gpus=gpus)), "dp").kernels for gpus in (1, 8))
    assert among > 2 * alone


def test_communication_is_exposed_where_it_is_longer_than_its_pass():
    passes = Passes([1.0, 3.0], [4.0, 2.0])
    assert RankTime.of(8.0, passes) == (8.0, 8.0 + (4.0 - 2.0), 8.0 + 6.0)
    assert RankTime.of(40.0, passes) == (40.0, 40.0, 46.0)


def test_rates_days_and_money_are_those_of_the_cluster():
    cell = planned(ARGUMENTS)
    (table,) = predicted_times(cell, Cost(300e9, 2.5))
    rows = {row[0]: row for row in table.plain().rows}
    assert list(rows) == ["DP", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
    rate, mfu, days, cost = (float(text.replace(",", "").rstrip("%")) for text in rows["ZeRO-1"][3:])
    assert rate == pytest.approx(8 * 4 * 2048 / rank_time(cell, "zero1").overlapped, rel=1e-4)
    assert 50 < mfu < 75
    assert days == pytest.approx(300e9 / rate / 86_400, abs=0.5)
    assert cost == pytest.approx(300e9 / rate / 3600 * 8 * 2.5, rel=1e-3)
    (note,) = [note.en for note in table.notes if note.en.startswith("not predicted: ")]
    assert all(name in note for name in ("DP + TP 8", "ZeRO-3 + TP 8", "ZeRO-3 + CP 4"))


def test_layouts_that_do_not_fit_have_no_time():
    (table,) = predicted_times(planned(replace(ARGUMENTS, gpu="4090", batch_size=1, checkpoint_blocks=1)), Cost())
    assert [row[0] for row in table.rows] == ["ZeRO-3"]
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
        ({"strategy": ("tp8",)}, "share layers"),
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
    """Those of the table; a layout without a predicted step says so, and with which flags there is one."""
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
