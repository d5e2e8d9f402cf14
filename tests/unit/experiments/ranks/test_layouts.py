"""`parallel_plan`: tables and chart of a plan; the formulas are tested in predict/test_plan.py."""

import math
import re
from dataclasses import replace

import pytest

from cs336_systems.config import RunConfig
from cs336_systems.experiments.catalogue import cells
from cs336_systems.experiments.ranks.layouts import tables_of
from cs336_systems.experiments.ranks.plan_cells import (
    PlanArguments,
    fewest_gpus,
    impossible_layouts,
    measure_plan,
    plan_config,
    plan_fits,
    planned,
    plans,
    required_axes,
    total,
)
from cs336_systems.predict.engine_memory import engine_estimate, engine_peak
from cs336_systems.predict.engine_messages import engine_messages
from cs336_systems.predict.rank_shards import Mesh, of_replica
from cs336_systems.report.cells import CellView
from cs336_systems.text import Text
from tests.unit.experiments.ranks.samples import charts, plan_cell, tables
from tests.unit.report.step_cells import values

ARGUMENTS = PlanArguments(
    size="xl", num_heads=20, gpus=8, gpu="24GiB", tflops=100, link=25, network=3, fast="off",
    strategy=("dp", "zero3+tp2"),
)  # fmt: skip


def test_strategies_are_variants():
    metrics = measure_plan(plan_config(ARGUMENTS))
    assert list(dict.fromkeys(metric.variant for metric in metrics)) == ["dp", "zero3+tp2"]
    assert {"parameter_memory", "forward_compute_time", "fits"} <= {metric.name for metric in metrics}
    memory, times = tables_of(ARGUMENTS)
    assert [row[0] for row in memory.rows] == [row[0] for row in times.rows] == ["DP", "ZeRO-3 + TP 2"]


def test_a_layout_that_torchs_engine_runs_has_its_peak():
    strategies = ("dp", "zero1", "zero3+tp2", "zero3+cp2", "zero1+pp2", "zero3+replicate2")
    arguments = replace(ARGUMENTS, size="large", strategy=strategies)
    config = plan_config(arguments)
    found = {metric.variant: metric.samples for metric in measure_plan(config) if metric.name == "engine_peak_memory"}
    run, split = RunConfig.of(config), Mesh(dp_shard=4, cp=2)
    meshes = {
        "dp": Mesh(dp_replicate=8),
        "zero3+tp2": Mesh(dp_shard=4, tp=2),
        "zero3+replicate2": Mesh(dp_replicate=2, dp_shard=4),
    }
    # Ranks that split sequences share one in each micro batch, so that there are two for each sequence of a GPU.
    of_context = engine_peak(run, split, 2 * run.batch_size, 1)
    assert found == {
        **{name: [engine_estimate(run, mesh).peak] for name, mesh in meshes.items()},
        "zero3+cp2": [of_context],
    }
    shown = [row[7] for row in tables_of(arguments)[0].rows]
    assert [cell == "-" for cell in shown] == [False, True, False, False, True, False]


def test_layouts_of_torchs_engine_fit_by_its_peak():
    """The inputs of matmuls that tensor parallelism gathers are not in the sum of the plan's parts."""
    arguments = PlanArguments(size="qwen2.5/7B", context_length=32_768, gpus=8, gpu="h100", strategy=("zero3+tp4",))
    cell = planned(arguments)
    (plan,) = plans(cell.config)
    own = cell.variant("zero3+tp4")
    assert plan.fits
    assert plan.total < plan.cluster.memory < own.value("engine_peak_memory")
    assert not own.value("fits")
    assert total(cell, "zero3+tp4") == own.value("engine_peak_memory")
    ours = planned(replace(arguments, context_length=4096, fast="off", strategy=("zero3",)))
    assert total(ours, "zero3") != ours.variant("zero3").value("engine_peak_memory")


@pytest.mark.parametrize("name", ["zero3+tp2", "dp+tp4", "zero3+replicate2", "zero3"])
def test_the_fewest_gpus_are_those_on_which_a_layout_fits(name):
    config = plan_config(PlanArguments(size="2.7B", context_length=2048, gpus=64, gpu="3090", strategy=(name,)))
    unit = math.prod(map(int, re.findall(r"[pe](\d+)", name)))

    def fits(gpus):
        own = {**config, "gpus": gpus}
        return plan_fits(own, *plans(own))

    (plan,) = plans(config)
    numbers = range(unit, 65, unit)
    assert fewest_gpus(config, plan) == next((gpus for gpus in numbers if fits(gpus)), None)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [("zero3+replicate2", 1), ("zero3+tp2", 0), ("dp+tp2", 0), ("zero3+tp2+replicate2", 1), ("zero3+cp2", 1)],
)
def test_communication_is_that_of_torchs_engine(name, blocks):
    """Bytes of the plan's formulas against the messages that real ranks send; gradients are reduced in fp32."""
    arguments = PlanArguments(size="qwen2.5/1.5B", context_length=4096, gpus=8, gpu="h100", checkpoint_blocks=blocks)
    config = plan_config(replace(arguments, micro_batches=1, strategy=(name,)))
    (plan,), run = plans(config), RunConfig.of(config)
    mesh = required_axes(plan, run.model)
    messages = engine_messages(of_replica(run, mesh), mesh)
    for during in ("forward", "backward"):
        sent = sum(one.sent for one in messages if one.during == during)
        assert sum(one.sent for one in plan.collectives if one.during == during) == pytest.approx(sent, rel=0.2)
    of_matrices = ("gradients", "gradients of a shard")
    gradients, planned_gradients = (
        sum(one.sent for one in found if one.purpose in of_matrices) for found in (messages, plan.collectives)
    )
    assert planned_gradients == pytest.approx(gradients, rel=0.02)


def test_heads_that_do_not_divide_have_no_peak_of_torchs_engine():
    metrics = measure_plan(plan_config(replace(ARGUMENTS, num_heads=25)))
    assert {metric.variant for metric in metrics if metric.name == "engine_peak_memory"} == {"dp"}


def test_the_exercise_of_the_handout_has_no_peak_of_torchs_engine():
    metrics = measure_plan(plan_config(replace(ARGUMENTS, count="feed-forward")))
    assert "engine_peak_memory" not in {metric.name for metric in metrics}


def test_the_chart_shows_the_memory_of_one_gpu():
    config = plan_config(ARGUMENTS)
    (chart,) = charts(CellView.of("parallel_plan", config, measure_plan(config)))
    (limit,) = chart.limits
    assert 22.5 < limit.value < 24
    totals = {name: sum(values(series)[name] for series in chart.series) for name in chart.bar_names}
    fits = {row[0]: row[-2].en == "yes" for row in tables_of(ARGUMENTS)[0].rows}
    assert (
        fits == {name: total <= limit.value for name, total in totals.items()} == {"DP": False, "ZeRO-3 + TP 2": True}
    )


def test_layouts_that_cannot_split_the_model_say_why():
    """25 heads cannot be divided among 2 ranks; the exercise of the handout has no heads."""
    arguments = replace(ARGUMENTS, num_heads=25)
    memory, times = tables_of(arguments)
    assert [row[-2].en for row in memory.rows] == ["no", "impossible"]
    assert [row[-1].en for row in times.rows][1] == "impossible"
    assert set(times.rows[1][1:-1]) == {"-"}
    (why,) = [note for note in memory.notes if note.en.startswith("impossible: ")]
    assert why.en == "impossible: ZeRO-3 + TP 2: --num_heads 25 cannot be divided among --tp 2 ranks; use a multiple"
    assert why.zh.startswith("不可行：")
    config = plan_config(arguments)
    (chart,) = charts(CellView.of("parallel_plan", config, measure_plan(config)))
    assert list(chart.bar_names) == ["DP"]
    assert impossible_layouts(plan_config(replace(arguments, count="feed-forward"))) == {}


def test_tables_tell_what_a_step_waits_for():
    memory, times = tables([plan_cell(count="feed-forward")])
    assert [(row[0], row[-2]) for row in memory.rows] == [("DP", Text("no", "否")), ("ZeRO-3", Text("yes", "是"))]
    assert [row[-1].en for row in times.rows] == ["matmuls", "communication in forward and backward"]
    assert [row[5].en for row in times.rows] == ["400.00 to 600.00", "1,000.0 to 1,400.0"]
    assert memory.title.en.startswith("parallel_plan: memory on each GPU · xxl (feed-forward only) on 1,024 x H100, ")
    assert memory.title.zh.startswith("parallel_plan：每张 GPU 的显存 · xxl（仅前馈）在 1,024 x H100 上，")


def test_grid_is_predicted_for_every_cluster():
    found = [config for _, config in cells(["parallel_plan"], "course", RunConfig(device="cpu"))]
    assert [(config["count"], config["gpus"]) for config in found] == [
        (count, gpus) for count in ("feed-forward", "transformer") for gpus in (64, 1024, 16384)
    ]
