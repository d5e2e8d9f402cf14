"""`train`: whole runs, put together from the cells that `cs336 train` records; their charts, tables and sentences."""

import math

import pytest

from cs336_systems.config import model_config
from cs336_systems.experiments.catalogue import catalogue, runnable
from cs336_systems.experiments.training import curves
from cs336_systems.experiments.training.curves import MOST_POINTS, runs_of, sampled, smoothed, thinned
from cs336_systems.record import GIB, Environment, Record, load
from cs336_systems.report.cells import group
from cs336_systems.report.sections import charts_of, findings_of, tables_of
from tests.helpers import ROOT

TRAIN = catalogue()["train"]
FIRST, SECOND, THIRD = (f"2026-01-0{day}T00:00:00" for day in (1, 2, 3))
NAN = math.nan
SETTINGS = {"batch_size": 4, "context_length": 8, "max_grad_norm": 1.0}


def stretch(run, first_step, losses, utc=FIRST, metric="loss", gpu=None, **config):
    config = {**SETTINGS, "output": f"runs/{run}/", "first_step": first_step, **config}
    return Record("train", config, metric, "1", tuple(losses), environment=Environment(utc=utc, gpu=gpu))


def whole(run, losses, *, utc=FIRST, seconds=0.5, validation=(), **config):
    """The records of a run in one stretch; validation losses are of the last steps."""
    count = len(losses)
    metrics = {"gradient_norm": [0.5] * count, "learning_rate": [1e-3] * count, "step_time": [seconds] * count}
    found = [stretch(run, 1, losses, utc, **config)]
    found += [stretch(run, 1, values, utc, metric, **config) for metric, values in metrics.items()]
    steps = range(count - len(validation) + 1, count + 1)
    found += [
        stretch(run, step, [loss], utc, "validation_loss", **config)
        for step, loss in zip(steps, validation, strict=True)
    ]
    return found


def started(run, step, utc, ranks=1, **config):
    """The records of a start, as `RunLog.start` writes them."""
    metrics = {"ranks": ranks, "flops": 8e12, "peak_flops": 32e12 * ranks}
    return [stretch(run, step + 1, [value], utc, name, started=utc, **config) for name, value in metrics.items()]


def curves_of(records):
    return {run.name: run.losses for run in runs_of(group(records))}


def charts(records):
    return {chart.name.removeprefix("train-"): chart for chart in charts_of(TRAIN, group(records))}


def drawn(chart):
    return {series.name.en: {point.x: point.y for point in series.points} for series in chart.series}


def row_of(table, number=0):
    return dict(zip([column.name.en for column in table.columns], table.rows[number], strict=True))


# -- runs from cells --------------------------------------------------------------------------------------------------


def test_stretches_of_a_run_become_one_curve():
    records = [stretch("a", 3, [1.0, 0.5]), stretch("a", 1, [3.0, 2.0]), stretch("b", 1, [9.0])]
    assert curves_of(records) == {"a": {1: 3.0, 2: 2.0, 3: 1.0, 4: 0.5}, "b": {1: 9.0}}


def test_a_step_trained_again_keeps_its_last_loss():
    records = [stretch("a", 2, [5.0], SECOND), stretch("a", 1, [3.0, 2.0, 1.0])]
    assert curves_of(records) == {"a": {1: 3.0, 2: 5.0, 3: 1.0}}


def test_runs_in_folders_of_the_same_name_are_kept_apart():
    records = [stretch("x/same", 1, [1.0]), stretch("y/same", 1, [2.0], SECOND)]
    assert list(curves_of(records)) == ["x/same", "y/same"]


def test_restarts_are_the_processes_after_the_first():
    cells = [stretch("a", 1, [3.0, 2.0, 1.5]), stretch("a", 3, [1.0], SECOND), *started("a", 0, FIRST)]
    cells += [*started("a", 2, SECOND), *started("a", 2, THIRD, ranks=2)]  # the third has not got to a step
    (run,) = runs_of(group(cells))
    assert run.restarts == [(2, None), (2, 2)]
    events = charts(cells)["loss"].events
    assert [(event.x, event.text.en) for event in events] == [(2, "restart"), (2, "restart: 2 ranks")]


def test_restarts_of_records_without_starts():
    """Older records: a restart is seen by the time at which the environment was captured."""
    runs = {run.name: run for run in runs_of(group(load(ROOT / "results/h200/loss_curves.jsonl").records))}
    assert {name: run.restarts for name, run in runs.items() if run.restarts} == {"bf16-fast": [(150, None)]}
    assert all(len(run.losses) == 300 and len(run.validation) == 3 for run in runs.values())
    assert not any(run.speeds or run.utilization or run.memory or run.saves for run in runs.values())


def test_speed_and_utilization_of_each_process():
    """32 tokens in 0.5 s; 8 TFLOP a step, and a peak of 32 TFLOP/s a rank."""
    records = [*whole("a", [3.0, 2.0]), *started("a", 0, FIRST), *started("a", 1, SECOND, ranks=2)]
    records += [stretch("a", 2, [0.25], SECOND, "step_time")]
    (run,) = runs_of(group(records))
    assert run.speeds == {1: 64.0, 2: 128.0}
    assert run.utilization == {1: 0.5, 2: 0.5}
    assert run.tokens == 64


def test_skipped_steps_have_a_loss_or_a_gradient_that_is_not_finite():
    records = [stretch("a", 1, [3.0, NAN, 2.0, 1.0]), stretch("a", 1, [1, 1, math.inf, 1], metric="gradient_norm")]
    (run,) = runs_of(group(records))
    assert run.skipped == [2, 3]
    crosses = [point.x for point in charts(records)["loss"].series[0].points if point.note]
    assert crosses == [2, 3]


def test_wall_time_is_the_sum_over_processes():
    times = [stretch("a", 1, [10.0], metric="elapsed_time"), stretch("a", 5, [30.0], metric="elapsed_time")]
    times += [stretch("a", 5, [7.0], SECOND, "elapsed_time", seed=1)]
    (run,) = runs_of(group([stretch("a", 1, [1.0]), *times]))
    assert run.wall_time == 37.0


# -- smoothing and thinning -------------------------------------------------------------------------------------------


def test_running_medians_and_their_ends():
    curve = dict(enumerate([9.0, 5.0, 4.0, 100.0, 3.0, 2.0, 1.0], start=1))
    assert smoothed(curve, 3) == {1: 9.0, 2: 5.0, 3: 5.0, 4: 4.0, 5: 3.0, 6: 2.0, 7: 1.5}
    assert smoothed({**curve, 4: NAN}, 1) == {step: value for step, value in curve.items() if step != 4}


def test_long_curves_are_thinned_and_keep_ends_and_extremes():
    curve = {step: float(step % 7) for step in range(1, 100_001)} | {31_234: 50.0}
    assert len(thinned(curve)) == len(smoothed(curve, 5)) == MOST_POINTS
    assert {1, 100_000} <= thinned(curve).keys()
    some = sampled(curve)
    assert len(some) <= MOST_POINTS
    assert some[31_234] == 50.0
    assert list(some) == sorted(some)
    assert sampled({1: 1.0, 2: NAN, 3: 2.0}) == {1: 1.0, 3: 2.0}


def test_windows_are_odd_and_grow_with_the_run():
    def window(count):
        return runs_of(group([stretch("a", 1, [1.0] * count)]))[0].window

    assert [window(count) for count in (1, 49, 50, 300, 100_000)] == [1, 1, 3, 13, curves.WIDEST]


# -- charts -----------------------------------------------------------------------------------------------------------


def test_charts_of_one_run():
    losses = [5.0 - step / 50 for step in range(100)]
    memory = stretch("a", 1, [2 * GIB], metric="peak_memory")
    save = stretch("a", 60, [0.2], metric="save_time")
    found = charts([*whole("a", losses, validation=[3.5]), memory, save])
    assert list(found) == ["loss", "speed", "norm", "rate", "memory"]
    assert not any(chart.log_y for chart in found.values())
    loss = drawn(found["loss"])
    assert list(loss) == ["single steps", "running mean", "validation"]
    assert loss["validation"] == {100: 3.5}
    assert loss["single steps"] == dict(enumerate(losses, start=1))
    assert loss["running mean"][50] == pytest.approx(losses[49])
    assert [(event.x, event.text.en) for event in found["speed"].events] == [(60, "save")]
    assert [limit.value for limit in found["norm"].limits] == [1.0]
    assert not found["rate"].has_legend
    assert drawn(found["memory"])["memory"] == {100: 2.0}


def test_the_axis_is_logarithmic_where_the_range_needs_it():
    assert charts(whole("a", [100.0, 3.0, 2.0]))["loss"].log_y
    assert not charts(whole("a", [10.0, 3.0, 2.0]))["loss"].log_y
    spike = [4.0] * 30 + [1000.0] + [4.0] * 69
    assert charts(whole("a", spike))["speed"].log_y is False
    assert charts(whole("a", spike))["loss"].log_y


def test_many_saves_are_not_marked():
    saves = [stretch("a", step, [0.1], metric="save_time") for step in range(1, 30)]
    assert charts([*whole("a", [1.0] * 60), *saves])["speed"].events == []


def test_charts_of_several_runs_have_a_series_for_each():
    """The second differs from the first by -1 in every step, and has the same learning rates."""
    first, second = [5.0, 4.0, 6.0] * 20, [4.0, 3.0, 5.0] * 20
    found = charts([*whole("a", first, validation=[5.5]), *whole("b", second, utc=SECOND, validation=[4.5])])
    assert list(found) == ["loss", "difference", "validation", "speed", "norm", "rate"]
    assert "a" in found["difference"].title.en
    assert set(drawn(found["difference"])["b"].values()) == {-1.0}
    assert set(drawn(found["difference"])["a"].values()) == {0.0}
    assert [series.name.en for _, series in found["rate"].shown] == ["a, b"]
    colors = {name: [chart.color_of(number) for number in range(2)] for name, chart in found.items()}
    assert len(set(map(tuple, colors.values()))) == 1  # a run has one colour


def test_runs_without_common_steps_have_no_difference():
    assert "difference" not in charts([stretch("a", 1, [2.0, 1.0]), stretch("b", 11, [2.0, 1.0], SECOND)])


def test_charts_of_long_runs_leave_the_first_drop_out():
    losses = [10.0] * 20 + [2.0] * 1980
    found = charts(whole("a", losses))
    assert min(min(curve) for curve in drawn(found["loss"]).values() if curve) == 21
    assert set(drawn(found["loss"])["single steps"].values()) == {2.0}
    assert "step 21" in found["loss"].note.en
    assert min(drawn(found["rate"])["a"]) == 1
    assert all(len(series.points) <= MOST_POINTS for chart in found.values() for series in chart.series)


# -- tables and sentences ---------------------------------------------------------------------------------------------


def test_tables_of_one_run():
    losses, progress, settings = tables_of(TRAIN, group([*whole("a", [3.0, 1.0, 2.0], validation=[2.5, 2.75])]))
    assert row_of(losses) == {
        **{"run": "a", "steps": "3", "tokens": "96", "first loss": "3.0000", "last loss": "2.0000"},
        **{"lowest loss": "1.0000", "lowest validation loss": "2.5000", "at step": "2"},
        "last validation loss": "2.7500",
    }
    assert row_of(progress) == {"run": "a", "median tokens/s": "64", "restarts": "0", "skipped steps": "0"}
    assert ["batch", "4"] in [[getattr(cell, "en", cell) for cell in row] for row in settings.rows]


def test_settings_that_differ_come_first_and_stand_beside_the_losses():
    records = [*whole("a", [3.0], keep=2, seed=1), *whole("b", [3.0], utc=SECOND, keep=3, seed=1)]
    losses, _, settings = tables_of(TRAIN, group(records))
    assert [getattr(cell, "en", cell) for cell in settings.rows[0]] == ["--keep", "2", "3"]
    assert [row_of(losses, number)["--keep"] for number in (0, 1)] == ["2", "3"]


def test_findings_of_one_run():
    records = [*whole("a", [3.0, 2.5, 2.0], validation=[2.0, 2.5]), *started("a", 0, FIRST), *started("a", 2, SECOND)]
    assert [text.en for text in findings_of(TRAIN, group(records))] == [
        "3 steps, 96 tokens: the loss fell from 3.000 to 2.000.",
        "The validation loss is lowest at step 2, 2.000. At the end it is 2.500.",
        "64 tokens/s, 50.0% MFU. 1 restart, no step skipped.",
    ]


def test_findings_of_several_runs():
    records = [
        *whole("a", [3.0], validation=[2.5]),
        *whole("b", [3.0], utc=SECOND, validation=[2.0], seconds=0.25),
        *whole("c", [NAN, 3.0], utc=THIRD, validation=[3.0]),
    ]
    assert [text.en for text in findings_of(TRAIN, group(records))] == [
        "The lowest validation loss is 2.000 in b, the best run, and 3.000 in c, the worst.",
        "The fastest run is b, 128 tokens/s (2.00x); the slowest a, 64.",
        "In 3 runs: no restart, 1 step skipped.",
    ]


def test_highlights():
    records = [*whole("a", [3.0, 2.5], validation=[2.0]), *started("a", 0, FIRST), *started("a", 1, SECOND)]
    found = TRAIN.highlights(group(records))
    assert [highlight.value.en for highlight in found] == ["2.000", "64 tokens/s", "50.0%", "1"]
    assert [highlight.rank for highlight in found] == sorted(highlight.rank for highlight in found)
    records += whole("b", [3.0, 2.5], utc=THIRD, validation=[1.5])
    assert TRAIN.highlights(group(records))[0].detail.en.startswith("b: ")


def test_only_finished_runs_are_ranked():
    """`packed` was stopped where its loss was below that of `q25`, which went on."""
    packed = whole("packed", [6.5, 6.3], validation=[6.287], steps=200, data="tokens")
    records = [*packed, *whole("q25", [6.5, 6.3], utc=SECOND, validation=[6.306], steps=2, data="tokens")]
    losses, *_ = tables_of(TRAIN, group(records))
    assert [getattr(row[1], "en", row[1]) for row in losses.rows] == ["2 of 200", "2"]
    assert [getattr(row[1], "zh", row[1]) for row in losses.rows] == ["2 / 200", "2"]
    assert "not finished: packed" in [note.en for note in losses.notes]
    found = findings_of(TRAIN, group(records))
    assert found[0].en.startswith("Losses are not ranked: fewer than two runs have finished")
    assert found[0].zh.startswith("未给损失排名")
    assert TRAIN.highlights(group(records)) == []
    (alone, *_) = findings_of(TRAIN, group(packed))
    assert alone.en == "2 of 200 steps, not finished, 64 tokens: the loss fell from 6.500 to 6.300."

    records += whole("q50", [6.5, 6.4], utc=THIRD, validation=[6.4], steps=2, data="tokens")
    found = findings_of(TRAIN, group(records))
    assert found[0].en == "2 of 3 runs can be compared: the lowest validation loss is 6.306 in q25, 6.400 in q50."
    assert TRAIN.highlights(group(records))[0].detail.en.startswith("q25: ")


@pytest.mark.parametrize(
    "other", [{"data": "b.txt"}, {"vocab_size": 100}, {"context_length": 16}, {"validation_share": 0.2}]
)
def test_runs_on_other_data_are_not_ranked(other):
    own = {"data": "a.txt", "vocab_size": 256, "validation_share": 0.1}
    records = whole("a", [5.0], validation=[5.0], **own)
    records += whole("b", [4.6], utc=SECOND, validation=[4.603], **{**own, **other})
    assert findings_of(TRAIN, group(records))[0].en.startswith("Losses are not ranked")
    assert TRAIN.highlights(group(records)) == []


def test_final_training_losses_are_compared_at_equal_steps_and_batches():
    records = [*whole("a", [3.0, 2.0]), *whole("b", [3.0, 2.5], utc=SECOND)]
    assert findings_of(TRAIN, group(records))[0].en == "The loss at the end is 2.000 in a, 2.500 in b."
    records = [*whole("a", [3.0, 2.0]), *whole("b", [1.0], utc=SECOND, batch_size=1)]
    assert findings_of(TRAIN, group(records))[0].en.startswith("Losses are not ranked")


@pytest.mark.parametrize(
    ("replaced", "name"),
    [
        ({}, "qwen2.5/0.5B"),
        ({"d_model": 128, "num_layers": 2, "num_heads": 4}, "width 128, 2 blocks (kv2, bias, tied)"),
    ],
)
def test_a_model_has_the_name_of_a_size_only_with_its_shape(replaced, name):
    model = model_config("qwen2.5/0.5B", **replaced).to_dict()
    records = whole("a", [3.0], size="QWEN2.5/0.5b", model=model)
    settings = tables_of(TRAIN, group(records))[-1]
    assert ("model", name) in [(row[0].en, getattr(row[1], "en", row[1])) for row in settings.rows]
    details = [highlight.detail.en for highlight in TRAIN.highlights(group(records))]
    assert details[1].startswith(f"{name}, 4 x ")


def test_the_engine_and_its_mesh_are_shown_as_one_setting():
    ours = {"parallel": "ddp", "engine": "ours", "tp": 1, "dp_shard": 1}
    torch = {"parallel": "ddp", "engine": "torch", "tp": 2, "dp_shard": 0}
    records = [*whole("a", [3.0], **ours), *whole("b", [3.0], utc=SECOND, **torch)]
    records += started("b", 0, SECOND, ranks=4, **torch)
    settings = tables_of(TRAIN, group(records))[-1]
    shown = {row[0].en: [getattr(cell, "en", cell) for cell in row[1:]] for row in settings.rows}
    assert shown["parallel"] == ["ddp", "torch, dp_shard 2 x tp 2"]
    assert not shown.keys() & {"--engine", "--tp", "--dp_shard"}


# -- odd records ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("records", "count"),
    [
        ([Record("train", {}, "step_time", "s", (1.0,))], 0),
        ([stretch("a", 1, [1.0])], 1),
        ([stretch("a", 1, [NAN])], 1),
        ([stretch("a", 1, [NAN] * 200)], 1),
        ([stretch("a", None, [1.0, 2.0], batch_size="many", max_grad_norm=[1])], 1),
        ([stretch("a", 1, [1e308, 1e308, 2.0] * 40)], 1),
        ([stretch("a", 1, [2.0]), stretch("b", 1, [NAN], SECOND)], 2),
        ([stretch("a", 1, [2.0, 1.0]), stretch("a", 1, [0.0, 0.0], metric="step_time", batch_size=1)], 1),
        ([stretch("a", 1, [1.0], None), stretch("b", 5, [1.0] * 3000, None)], 2),
    ],
)
def test_odd_records(records, count):
    cells = group(records)
    tables = tables_of(TRAIN, cells)
    assert len(tables[0].rows) == count if count else tables == []
    for chart in charts_of(TRAIN, cells):
        assert chart.shown
    findings_of(TRAIN, cells)
    TRAIN.highlights(cells)


def test_training_comes_last_and_is_not_run():
    assert list(catalogue())[-1] == "train"
    assert "train" not in runnable()
