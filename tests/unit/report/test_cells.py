"""Cells: records grouped by configuration, variants, and derived quantities."""

import dataclasses
import math

import pytest

from cs336_systems.record import CELL_TIME, Metric
from cs336_systems.report.cells import CellView, by_experiment, by_machine, group
from tests.unit.report.step_cells import CPU, GPU, OOM, cell, step

DERIVED = {"tokens_per_second": 20_480, "flops_per_second": 5e13, "mfu": 0.5, "memory_error": 0.01}
"""Quantities of the usual cell."""


def one(**fields) -> CellView:
    (found,) = group(cell(**fields))
    return found


@pytest.mark.parametrize(
    ("missing", "unknown"),
    [
        ("nothing", ()),
        ("step_time", ("tokens_per_second", "flops_per_second", "mfu")),
        ("flops", ("flops_per_second", "mfu")),
        ("peak_flops", ("mfu",)),
        ("predicted_memory", ("memory_error",)),
        ("peak_memory", ("memory_error",)),
    ],
)
def test_derived_quantities_are_unknown_where_an_input_is_missing(missing, unknown):
    found = one(metrics={missing: None})
    expected = {name: None if name in unknown else pytest.approx(value) for name, value in DERIVED.items()}
    assert {name: getattr(found, name) for name in DERIVED} == expected


def test_tokens_count_the_whole_batch_and_the_context():
    assert one(batch_size=8, context=1024, metrics=step(0.5)).tokens_per_second == pytest.approx(16_384)


def test_statistics_and_recorded_tables():
    table, diverged = ("a", 1.0, "b", 2.0), (math.inf, 1.0)
    found = one(metrics={"step_time": (0.1, 0.2, 0.9), "empty": (), "table": table, "diverged": diverged})
    assert (found.value("step_time"), found.median("step_time")) == pytest.approx((0.4, 0.2))
    assert [found.value(name) for name in ("empty", "absent")] == [None, None]
    assert math.isnan(found.value("diverged"))
    assert (found.samples("table"), found.samples("absent")) == (("a", 1.0, "b", 2.0), ())


@pytest.mark.parametrize(
    ("records", "verdict"),
    [
        (cell(), "ok"),
        (cell(status=OOM), "OOM"),
        (cell(status="error: RuntimeError: no"), "error"),
        ([record for record in cell() if record.metric != CELL_TIME], "error"),
    ],
    ids=["complete", "out of memory", "crashed", "interrupted"],
)
def test_verdict(records, verdict):
    (found,) = group(records)
    assert (found.verdict, found.ok, found.is_oom) == (verdict, verdict == "ok", verdict == "OOM")


def test_the_machine_is_the_device_that_did_the_work():
    both = dataclasses.replace(GPU, cpu="Xeon")
    assert one(environment=both).machine == "H200"
    assert one(environment=both, device="cpu").machine == one(environment=CPU).machine == "Xeon"
    assert group(cell(), "night")[0].machine == "H200 · night"


def test_cells_are_grouped_by_machine_experiment_and_work():
    other = dataclasses.replace(GPU, gpu="RTX 4090")
    cells = group([*cell(), *cell("warmup"), *cell(context=128), *cell(environment=other), *cell(metrics=step(0.5))])
    assert cells[0].value("step_time") == pytest.approx(0.5), "the later record counts"
    assert {name: len(own) for name, own in by_experiment(cells).items()} == {"bench": 3, "warmup": 1}
    assert {name: len(own) for name, own in by_machine(cells).items()} == {"H200": 3, "RTX 4090": 1}


def test_variants_have_metrics_of_their_own_and_end_as_their_cell():
    times = [Metric("step_time", "s", [seconds], name) for name, seconds in (("naive", 2.0), ("flat", 1.0))]
    found = CellView.of("ddp", {"ranks": 2}, [Metric("flops", "FLOP", [8.0]), *times])
    assert (list(found.variants), "step_time" in found.metrics, len(found.records)) == (["naive", "flat"], False, 4)
    views = [found.variant(name) for name in ("naive", "flat", "absent")]
    assert [(view.value("step_time"), view.value("flops"), view.ok) for view in views] == [
        (2.0, None, True),
        (1.0, None, True),
        (None, None, True),
    ]


FAST = {"precision": "bf16", "attention": "auto", "fast": "on"}


def test_a_fast_step_is_predicted_from_its_configuration_unless_the_prediction_was_recorded():
    (found,) = group(cell(size="large", context=1024, batch_size=16, **FAST, metrics=step(0.197)))
    assert found.predicted_time == pytest.approx(0.19, rel=0.1)
    assert found.time_error == pytest.approx(found.predicted_time / 0.197 - 1)
    (found,) = group(cell(**FAST, metrics=step(0.2, predicted_time=(0.19,))))
    assert (found.predicted_time, found.time_error) == (0.19, pytest.approx(-0.05))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {**FAST, "fast": "kernels,loss,optimizer"},
        {**FAST, "attention": "sdpa"},
        {**FAST, "environment": CPU, "device": "cpu"},
        {**FAST, "environment": dataclasses.replace(GPU, gpu="Another GPU")},
        {**FAST, "metrics": {"step_time": None}},
    ],
)
def test_other_steps_have_no_predicted_time(fields):
    (found,) = group(cell(**fields))
    assert (found.predicted_time, found.time_error) == (None, None)


@pytest.mark.parametrize(
    "change",
    [
        *({"micro_batches": count} for count in ("many", 0, 10**400)),
        *({"inner": 2}, {"model": None}, {"fast": 3}, {"batch_size": 2**31}),
    ],
)
def test_configurations_that_are_not_understood_have_no_predicted_time(change):
    records = [dataclasses.replace(one, config={**one.config, **change}) for one in cell(**FAST)]
    (found,) = group(records)
    assert found.predicted_time is None


def test_micro_batches_count():
    one, two = (
        group([dataclasses.replace(r, config={**r.config, "micro_batches": count}) for r in cell(**FAST)])[0]
        for count in (1, 2)
    )
    assert 1.5 < two.predicted_time / one.predicted_time < 2
