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
