"""Predicted step times beside measured ones: as a metric, in tables, and in sentences."""

import dataclasses
from types import SimpleNamespace

import pytest

from cs336_systems.config import RunConfig, model_config
from cs336_systems.experiments.steps import measure_step
from cs336_systems.predict.gpus import find_card
from cs336_systems.predict.time.on_gpu import predicted_on
from cs336_systems.report.cells import group
from cs336_systems.report.phrases import predictions_hold, worst_step_time
from tests.unit.report.step_cells import CPU, cell, column, step, tables

FAST = {"precision": "bf16", "attention": "auto", "fast": "on"}


def predicted(seconds, expected, **fields):
    return cell(**{**FAST, **fields}, metrics=step(seconds, predicted_time=(expected,)))


@pytest.mark.parametrize("experiment", ["bench", "fast_step"])
def test_tables_have_the_prediction_and_its_error(experiment):
    rows = [*cell(experiment=experiment, metrics=step(0.5)), *predicted(0.2, 0.19, experiment=experiment)]
    table = tables(rows)[-1]
    assert column(table, "predicted step (ms)") == ["", "190.00"]
    assert column(table, "time error") == ["", "-5.0%"]


@pytest.mark.parametrize("fields", [{}, {"environment": CPU, "device": "cpu", **FAST}])
def test_there_are_no_columns_where_nothing_is_predicted(fields):
    headings = [column.heading() for column in tables(cell(**fields))[-1].columns]
    assert "step (ms)" in headings
    assert not {"predicted step (ms)", "time error"} & set(headings)


def test_a_step_records_its_prediction_on_a_known_gpu_only(monkeypatch):
    run = RunConfig(model=model_config("small"), device="cuda", **FAST)
    expected = predicted_on(run, find_card("h200"), 1, run.warmup_steps + run.num_steps).time.seconds

    def metrics(name, **fields):
        monkeypatch.setattr(measure_step, "_gpu_name", lambda step: name)
        return measure_step._predicted_time({**run.to_dict(), **fields}, SimpleNamespace())

    (metric,) = metrics("NVIDIA H200")
    assert (metric.name, metric.unit, list(metric.samples)) == ("predicted_time", "s", [expected])
    (longer,) = metrics("NVIDIA H200", micro_batches=4)
    assert longer.samples[0] > 2 * expected
    (compiled,) = metrics("NVIDIA H200", compile=True, fast="off")
    assert compiled.samples[0] > expected
    assert metrics(None) == metrics("Another GPU") == metrics("NVIDIA H200", fast="kernels") == []


def test_a_step_on_a_cpu_records_none():
    run = RunConfig(model=model_config("tiny", context_length=16), batch_size=1, warmup_steps=1, num_steps=1)
    run = dataclasses.replace(run, fast="on", attention="auto")
    assert "predicted_time" not in {metric.name for metric in measure_step.measure_step(run.to_dict())}


def test_the_largest_error_is_named_with_both_times():
    cells = group([*predicted(0.2, 0.19), *predicted(0.1, 0.099, size="large"), *cell(metrics=step(0.5))])
    said = worst_step_time(cells)
    assert said.en.startswith("the worst of 2 predicted step times is off by 5.0%: 190.00 ms predicted, 200.00 ms")
    assert "(small)" in said.en
    assert "Matmuls are the largest part" in said.en
    assert predictions_hold(cells).en == "predicted times of 2 fast steps are off by 5.0% at most"
    assert worst_step_time(group(cell())) is predictions_hold(group(cell())) is None


def test_the_kind_of_kernels_that_makes_the_difference_is_named():
    config = RunConfig(model=model_config("small"), device="cuda", **FAST)
    kinds = predicted_on(config, find_card("h200"), 1, config.warmup_steps + config.num_steps).time.by_kind()
    rest = sum(kinds.values()) - kinds["matmul"] - kinds["attention"]
    half = (
        "matmul",
        10.0,
        kinds["matmul"] / 2,
        "attention",
        1.0,
        kinds["attention"] + 2e-3,
        "elementwise",
        5.0,
        rest / 2,
    )
    tabled = {
        "kind_table: forward": half,
        "kind_table: backward": ("matmul", 10.0, kinds["matmul"] / 2, "optimizer", 5.0, rest / 2),
    }
    found = tables(cell("kernels", **FAST, metrics=tabled), cell("kernels", metrics=tabled))
    (table,) = [table for table in found if "measured and predicted" in table.title.en]
    assert column(table, "kernels") == ["matmul", "attention", "other"]
    assert column(table, "largest difference") == ["", "yes", ""]
    errors = [float(text.rstrip("%")) for text in column(table, "error")]
    expected = 100 * (kinds["attention"] / (kinds["attention"] + 2e-3) - 1)
    assert errors == [pytest.approx(0, abs=0.1), pytest.approx(expected, abs=0.1), pytest.approx(0, abs=0.1)]
