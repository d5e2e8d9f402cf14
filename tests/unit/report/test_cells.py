"""Cells: records grouped by configuration, variants, and derived quantities."""

import dataclasses
import math

import pytest

from cs336_systems.record import CELL_TIME, GIB, Metric
from cs336_systems.report.cells import CellView, by_experiment, by_machine, group
from tests.unit.report.step_cells import CPU, GPU, OOM, cell, entries, step


def one(**fields) -> CellView:
    (found,) = group(cell(**fields))
    return found


def test_rates_and_ratios():
    found = one()
    assert found.tokens_per_second == pytest.approx(20_480)
    assert found.flops_per_second == pytest.approx(5e13)
    assert found.mfu == pytest.approx(0.5)
    assert found.memory_error == pytest.approx(0.01)


def test_tokens_count_the_whole_batch_and_the_context():
    assert one(batch_size=8, context=1024, metrics=step(0.5)).tokens_per_second == pytest.approx(16_384)


@pytest.mark.parametrize(
    ("missing", "unknown"),
    [
        ("step_time", {"tokens_per_second", "flops_per_second", "mfu"}),
        ("flops", {"flops_per_second", "mfu"}),
        ("peak_flops", {"mfu"}),
        ("predicted_memory", {"memory_error"}),
        ("peak_memory", {"memory_error"}),
    ],
)
def test_a_quantity_is_unknown_where_an_input_is_missing(missing, unknown):
    found = one(metrics={missing: None})
    derived = ("tokens_per_second", "flops_per_second", "mfu", "memory_error")
    assert {name for name in derived if getattr(found, name) is None} == unknown


def test_statistics_of_metrics():
    found = one(metrics={"step_time": (0.1, 0.2, 0.9), "empty": (), "word": ("a",), "diverged": (math.inf, 1.0)})
    assert found.value("step_time") == pytest.approx(0.4)
    assert found.median("step_time") == pytest.approx(0.2)
    assert [found.value(name) for name in ("empty", "word", "absent")] == [None] * 3
    assert math.isnan(found.value("diverged"))


def test_a_recorded_table_is_read_row_by_row():
    found = one(metrics={"table": ("a", 1.0, "b", 2.0)})
    assert found.rows("table", 2) == [["a", 1.0], ["b", 2.0]]
    assert found.rows("absent", 2) == []


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
    assert len(cells) == 4
    assert cells[0].value("step_time") == pytest.approx(0.5), "the later record counts"
    assert {name: len(own) for name, own in by_experiment(cells).items()} == {"bench": 3, "warmup": 1}
    assert {name: len(own) for name, own in by_machine(cells).items()} == {"H200": 3, "RTX 4090": 1}


def test_fields_of_the_model_are_fields_of_the_cell():
    found = one(size="xl", context=128)
    assert [found.get(name) for name in ("d_model", "context_length", "mode", "fast", "absent")] == [
        1600, 128, "train-step", "off", None,
    ]  # fmt: skip
    assert found.name == "xl 128 train-step fp32"
    assert group(entries("x", {"knob": 1}, {"y": (1.0,)}))[0].name == ""


# -- variants ---------------------------------------------------------------------------------------------------------


def variants() -> CellView:
    metrics = [Metric("flops", "FLOP", [8.0])]
    metrics += [Metric("step_time", "s", [seconds], name) for name, seconds in (("naive", 2.0), ("flat", 1.0))]
    return CellView.of("ddp", {"ranks": 2}, [*metrics, Metric("peak_memory", "B", [GIB], "flat")])


def test_variants_have_metrics_of_their_own():
    found = variants()
    assert list(found.variants) == ["naive", "flat"]
    assert "step_time" not in found.metrics
    assert [found.variant(name).value("step_time") for name in ("naive", "flat", "absent")] == [2.0, 1.0, None]
    assert found.variant("naive").value("peak_memory") is None
    assert found.variant("flat").value("flops") is None


def test_a_variant_ends_as_its_cell():
    found = variants()
    assert found.ok
    assert found.variant("naive").ok
    assert found.variant("absent").ok
    assert len(found.records) == 5
