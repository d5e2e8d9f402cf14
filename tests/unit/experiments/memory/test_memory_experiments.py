"""Tables, charts and findings of the experiments on memory."""

import pytest

from cs336_systems.config import RunConfig, model_config
from cs336_systems.experiments.catalogue import cells
from cs336_systems.experiments.memory.measure_budgets import measure_budget
from cs336_systems.predict.memory_model import estimate
from cs336_systems.predict.memory_planner import budget_bytes
from cs336_systems.record import GIB
from tests.unit.experiments.memory.samples import BLOCK, SAMPLES, budgeted, memory, predicted, recomputed, saved
from tests.unit.report.step_cells import OOM, charts, column, large_numbers, notes, rows, stated, tables, values

STATED = {
    "memory": [
        "The worst of 2 predicted peaks is off by 8.18%: 10.10 GiB predicted, 11.00 GiB measured (small, context "
        "1024).",
        "The highest peak is 11.00 GiB (small, context 1024): 82% activations, 18% parameters.",
        "The largest block of a step is 64.0 MiB of activations, made at reference.py:49 (small, context 512).",
    ],
    "checkpointing": [
        "In fp32 groups of 1 need the least memory of all groups: 20.00 GiB, against 60.00 GiB without recomputation. "
        "With 12 blocks recomputation by halves needs 20.00 GiB and the best groups of one level, of 1, 20.00 GiB "
        "(fp32).",
        "A step with recomputation takes 1.2 (groups of 4, small, fp32) to 1.3 (groups of 1, small, fp32) times as "
        "long as one without. A step with nested groups takes 1.2 (groups of 4 with groups of 1 inside, small, fp32) "
        "to 1.4 (groups of 1 by halves, small, fp32) times as long as one without nesting.",
        "5 peaks predicted by tracing are off by less than 0.01% at most.",
    ],
    "saved_tensors": [
        "One block keeps 100.0 MiB for backward (small, 1 block): softmax 60%, RMSNorm 40%. Its gradients take "
        "30.0 MiB.",
        "Naive attention keeps 200.0 MiB for backward (small, 1 block, fp32). Compared with that, fused attention "
        "keeps 75%, recomputation keeps 25%, torch.compile keeps 90%.",
        "The largest tensor kept has 64.0 MiB (4x8x8 float32), made at reference.py:23.",
    ],
    "memory_budgets": [
        "All 4 peaks are within their budgets. Predictions of planned peaks are off by 0.72% at most.",
        "A planned step is 1.2 (small, 4 x 512 tokens, 14.00 GiB) to 1.4 (small, 4 x 512 tokens, 18.00 GiB) times as "
        "fast as the fastest uniform group within the budget. Budgets that no uniform group can meet: 1.",
        "Offloading 0.50 GiB to the host makes a step 1.0% longer (small, 4 x 512 tokens). torch.compile with an "
        "activation memory budget takes 1.4 (budget 0.3) to 1.5 (budget 1.0) times as long as a planned step with no "
        "more memory.",
    ],
    "memory_model": [
        "The largest model needs 30.00 GiB (2.7B). It holds 1.00 GiB of parameters, 2.00 GiB of gradients, 3.00 GiB "
        "of optimizer state.",
        "The smallest of 2 configurations needs 9.00 GiB (small).",
    ],
}


@pytest.mark.parametrize("experiment", SAMPLES)
def test_findings(experiment):
    assert stated(SAMPLES[experiment]) == STATED[experiment]


# -- memory -----------------------------------------------------------------------------------------------------------


def test_peaks_parts_blocks_and_overheads():
    peaks, parts, largest, overheads = tables(SAMPLES["memory"])
    assert rows(peaks, "context", "measured (GiB)", "predicted (GiB)", "error", "parts / measured", "unlabelled") == [
        ("512", "10.00", "10.10", "+1.00%", "100.00%", "1.00%"),
        ("1024", "11.00", "10.10", "-8.18%", "100.00%", "0.91%"),
    ]
    assert rows(parts, "parameters (GiB)", "activations (GiB)") == [("2.00", "8.00"), ("2.00", "9.00")]
    assert rows(largest, "size (MiB)", "label", "line")[0] == ("64.0", "activations", "reference.py:49 in scores")
    assert rows(overheads, "with the allocator's history", "traced block by block")[0] == ("", "15.0x")


@pytest.mark.parametrize(
    ("steps", "traced", "words"),
    [
        ((0.100, 0.101, 0.102), 1.5, []),
        ((0.100, 0.300, 0.900), 1.5, ["unreliable"]),
        ((7.5, 7.5, 7.5), 1.5, ["below 1x"]),
        ((1.0, 9.0, 20.0), 1.5, ["unreliable", "below 1x"]),
    ],
)
def test_slowdowns_on_a_busy_machine_are_doubted(steps, traced, words):
    """An instrument makes no step faster, and steps that vary by more than the referee's limit show nothing."""
    *_, overheads = tables(memory(step_time=steps, traced_step_time=(traced,)))
    assert [note.en.split(":")[0] for note in overheads.notes] == words
    assert all(note.zh for note in overheads.notes)


def test_small_parts_are_drawn_as_one_and_nothing_is_lost():
    parts = ("weights", 60 * GIB, "a", GIB / 10, "b", GIB / 5)
    (chart,) = charts(memory(part_memory=parts))
    weights, other = chart.series
    assert [series.name.en for series in chart.series] == ["weights", "other"]
    assert sum(values(series)["512"] for series in (weights, other)) == pytest.approx(60.3)
    assert charts(memory(part_memory=())) == []


def test_each_mode_has_a_chart_with_bars_by_context():
    step, inference = charts(memory(512), memory(256, mode="inference"), memory(256))
    assert [chart.title.en.split(": ")[1] for chart in (step, inference)] == ["training step", "inference"]
    assert step.bar_names == ["256", "512"]
    assert [series.name.en for series in step.series] == ["parameters", "activations"]


def test_bars_are_named_by_what_differs():
    (chart,) = charts(memory(attention="auto", precision="bf16"), memory(precision="bf16"), memory())
    assert chart.bar_names == ["512, fp32", "512, bf16", "512, bf16, ours"]
    assert chart.x.en == "context, precision, attention"


def test_what_did_not_fit_has_a_note_and_the_gpu_is_a_limit():
    (chart,) = charts(memory(256, peak=10.0), memory(512, status=OOM))
    assert [point.place for series in chart.series for point in series.points if point.note] == ["512"]
    assert [limit.value for limit in chart.limits] == [140.0]
    (low,) = charts(memory(peak=5.0))
    assert low.limits == [], "bars would be too low to read"


# -- checkpointing ----------------------------------------------------------------------------------------------------


def test_groups_are_compared_with_no_recomputation():
    (table,) = tables(SAMPLES["checkpointing"], recomputed(16, 0, 0, status=OOM))
    assert rows(table, "group", "inside it", "step (ms)", "over none", "peak (GiB)", "traced, error") == [
        ("none", "", "1,000.0", "1.00x", "60.00", "+0.00%"),
        ("1", "", "1,300.0", "1.30x", "20.00", "+0.00%"),
        ("4", "", "1,250.0", "1.25x", "30.00", "+0.00%"),
        ("16", "", "OOM", "", "", ""),
        ("4", "1", "1,500.0", "1.50x", "20.00", "+0.00%"),
        ("1", "halves", "1,800.0", "1.80x", "20.00", "+0.00%"),
    ]
    assert notes(table)[:2] == [
        "least memory, flat: groups of 1 predicted, 1 measured",
        "least memory, of all: groups of 1 predicted, 1 measured",
    ]


def test_precisions_have_tables_of_their_own():
    found = tables(recomputed(1, 20, 1.0), recomputed(1, 10, 0.5, precision="bf16"))
    assert [(column(table, "peak (GiB)"), "bf16" in table.title.en) for table in found] == [
        (["20.00"], False),
        (["10.00"], True),
    ]


def test_a_plain_step_that_does_not_fit_is_stated_with_what_it_needs():
    said = stated(recomputed(0, 0, 0, status=OOM), recomputed(1, 20.0, 1.3))
    assert said[0].endswith("20.00 GiB, against 64.5 GiB without recomputation, which does not fit.")


def test_time_is_drawn_against_memory_for_each_precision():
    fp32, bf16, peaks = charts(
        recomputed(0, 30, 0.4),
        recomputed(1, 8, 0.5),
        recomputed(4, 10, 0.6, inner=1),
        recomputed(2, 9, 0.5, precision="bf16"),
    )
    flat, nested, best = fp32.series
    assert [(point.name, point.x, point.y) for point in flat.points] == [("1", 8.0, 500.0), ("none", 30.0, 400.0)]
    assert [point.name for point in nested.points] == ["4/1"]
    assert [point.name for point in best.points] == ["1", "none"], "what no other beats in both"
    assert len(bf16.series[0].points) == 1
    assert len(bf16.series) == 2, "one point is no trade-off"
    assert {series.name.en: values(series) for series in peaks.series} == {
        "fp32": {"none": 30.0, "1": 8.0, "4/1": 10.0},
        "bf16": {"2": 9.0},
    }


def test_a_step_without_recomputation_that_does_not_fit_is_marked():
    *_, peaks = charts(recomputed(0, 0, 0, status=OOM), recomputed(1, 20.0, 1.3))
    assert [point.place for series in peaks.series for point in series.points if point.note] == ["none"]
    assert peaks.limits


def test_the_best_groups_of_one_level_stand_beside_their_neighbours():
    records = [recomputed(group, peak, 1.0) for group, peak in ((1, 30), (2, 20), (4, 25), (8, 40))]
    (table,) = tables(*records)
    assert notes(table)[-1] == (
        "one level, measured: the best group, then those beside it: 2: 20.00 GiB, 1: 30.00 GiB, 4: 25.00 GiB"
    )


def halves_by_depth():
    return [
        recomputed(blocks, peak, 1.0 + recursive, recursive=recursive, num_layers=layers)
        for layers, peaks in ((8, (10, 4, 3)), (16, (20, 8, 5)))
        for blocks, peak, recursive in zip((0, 1, 1), peaks, (False, False, True), strict=True)
    ]


def test_halves_are_beside_groups_of_one_level_by_depth():
    (table,) = tables(*halves_by_depth())
    assert rows(table, "blocks", "group", "inside it", "peak (GiB)") == [
        ("8", "none", "", "10.00"),
        ("8", "1", "", "4.00"),
        ("8", "1", "halves", "3.00"),
        ("16", "none", "", "20.00"),
        ("16", "1", "", "8.00"),
        ("16", "1", "halves", "5.00"),
    ]
    (chart,) = charts(*halves_by_depth())
    assert {series.name.en: values(series) for series in chart.series} == {
        "none": {8: 10.0, 16: 20.0},
        "1": {8: 4.0, 16: 8.0},
        "1, halves": {8: 3.0, 16: 5.0},
    }
    said = stated(*halves_by_depth())
    assert said[0] == (
        "With 16 blocks recomputation by halves needs 5.00 GiB and the best groups of one level, of 1, 8.00 GiB (fp32)."
    )
    assert "A step with nested groups takes 2.0" in said[1]


# -- saved_tensors, memory_model --------------------------------------------------------------------------------------


def test_saved_tensors_and_the_largest():
    kept, largest = tables(saved(200), saved(0, status=OOM, checkpoint_blocks=1))
    assert rows(kept, "checkpoint", "kept (MiB)", "tensors", "parameters, too (MiB)") == [
        ("0", "200.0", "5", "3.0"),
        ("1", "OOM", "", ""),
    ]
    assert rows(largest, "size (MiB)", "module", "what") == [("64.0", "layers.0.attn", "4x8x8 float32")]


def test_one_block_keeps_by_operation_and_its_gradients_follow_from_the_change():
    records = saved(200, metrics=BLOCK)
    *_, block, operations = tables(records)
    assert [row[-4:] for row in block.rows] == [["100.0", "-70.0", "30.0", "30.0"]]
    assert rows(operations, "size (MiB)", "share", "operation") == [
        ("60.0", "60.0%", "softmax"),
        ("40.0", "40.0%", "rms_norm"),
    ]
    assert stated(records)[0] == (
        "One block keeps 100.0 MiB for backward (small, 1 block): softmax 60%, RMSNorm 40%. "
        "Its gradients take 30.0 MiB."
    )


def test_contexts_have_charts_of_their_own():
    model = model_config("small", num_layers=1, context_length=128)
    assert len(charts(saved(200), saved(20, model=model))) == 2


def test_the_memory_model_part_by_part():
    (table,) = tables(predicted())
    parts = ("parameters", "gradients", "optimizer", "activations", "logits, loss", "peak", "peak, traced")
    assert rows(table, *(f"{part} (GiB)" for part in parts)) == [tuple(f"{i}.00" for i in range(1, 8))]
    assert rows(table, "per block (MiB)", "residual tensor (MiB)", "peak in") == [("192", "6", "backward")]


def test_kept_memory_is_drawn_by_how_the_block_runs():
    (chart,) = charts(saved(200), saved(50, checkpoint_blocks=1), saved(100, precision="bf16"))
    assert {series.name.en: values(series) for series in chart.series} == {
        "fp32": {"naive attention": 200.0, "recomputation": 50.0},
        "bf16": {"naive attention": 100.0},
    }


# -- memory_budgets ---------------------------------------------------------------------------------------------------


def test_a_budget_is_compared_with_the_fastest_uniform_group_within_it():
    planned, others = tables(SAMPLES["memory_budgets"])
    assert rows(planned, "memory budget", "plan", "added (ms)", "fastest group", "its step (ms)", "speed-up") == [
        ("10GiB", "planned", "30.00", "none fits", "", ""),
        ("14GiB", "planned", "12.00", "groups of 8", "138.00", "1.23x"),
        ("18GiB", "planned", "2.00", "groups of 8", "138.00", "1.35x"),
        ("19GiB", "offloading only", "1.00", "groups of 8", "138.00", "1.37x"),
    ]
    assert column(others, "over keeping everything") == ["1.00x", "1.40x", "1.38x", "1.60x", "1.50x"]


def test_a_budget_that_is_not_kept_is_told():
    found = stated(budgeted("plan", 9.9, 0.1, budget=10), budgeted("plan", 12.5, 0.1, budget=12))
    assert found[0].startswith("1 of 2 peaks are within their budgets.")


def test_works_of_budgets_are_not_mixed():
    short = budgeted("groups", 9.0, 0.05, checkpoint_blocks=1, context=256)
    (planned, _) = tables(budgeted("plan", 9.9, 0.1, budget=10), short)
    assert column(planned, "fastest group") == ["none fits"]
    assert large_numbers(budgeted("plan", 9.9, 0.1, budget=10), short) == []


def test_time_against_memory_ends_with_the_step_that_keeps_everything():
    (chart,) = charts(SAMPLES["memory_budgets"])
    named = {series.name.en: values(series) for series in chart.series}
    assert named["planned"] == pytest.approx({9.9: 130.0, 13.9: 112.0, 17.8: 102.0, 20.0: 100.0})
    assert named["uniform groups"] == pytest.approx({11.0: 140.0, 13.0: 138.0})
    assert len(named["torch.compile with a budget"]) == 2


def test_budgets_are_spread_between_the_most_economical_plan_and_keeping_everything():
    requests = [config for _, config in cells(["memory_budgets"], "course", RunConfig(device="cuda"))]
    planned = [config for config in requests if config["way"] == "plan"]
    assert len(planned) == 20
    for config in planned[1::18]:  # a plan of 36 blocks takes seconds
        run = RunConfig.of(config)
        assert 0.95 < estimate(run).peak / budget_bytes(run.memory_budget) <= 1
    ways = [config["way"] for config in requests]
    assert all(ways[place + 1] == "groups" for place, way in enumerate(ways) if way == "plan")


def test_the_peak_of_a_planned_step_on_a_cpu_is_between_those_of_uniform_steps():
    requests = [config for _, config in cells(["memory_budgets"], "quick", RunConfig())]
    found = {}
    for config in requests[-3:]:  # one budget and both uniform steps
        metrics = measure_budget({**config, "warmup_steps": 0, "num_steps": 1})
        found[config.get("memory_budget", config["checkpoint_blocks"])] = next(
            metric.samples[0] for metric in metrics if metric.name == "peak_memory"
        )
    assert found[1] < min(size for name, size in found.items() if isinstance(name, str))
    assert found[0] > max(size for name, size in found.items() if isinstance(name, str))
