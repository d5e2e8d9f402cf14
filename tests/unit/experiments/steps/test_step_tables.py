"""Tables of the experiments on the time of a step."""

import dataclasses

import pytest

from cs336_systems.record import CELL_TIME, GIB
from tests.unit.experiments.steps.samples import DO_BENCH, accumulation, dtypes
from tests.unit.report.step_cells import GPU, OOM, cell, column, notes, rows, step, tables


@pytest.mark.parametrize("experiment", ["bench", "end_to_end", "warmup", "precision", "compile", "peak_memory"])
def test_a_cell_that_ran_out_of_memory_is_a_row_and_a_remark(experiment):
    found = tables(cell(experiment), cell(experiment, size="2.7B", status=OOM))
    for table in found:
        row = table.rows[-1]
        assert (row[0], row.count("OOM"), set(row[row.index("OOM") + 1 :])) == ("2.7B", 1, {""})
    (note,) = [note for note in notes(found[-1]) if OOM in note]
    assert note.startswith("2.7B")


# -- end_to_end, bench ------------------------------------------------------------------------------------------------


def test_throughput_and_memory_are_empty_where_not_measured():
    missing = dict.fromkeys(("peak_memory", "predicted_memory", "flops", "backward_time"))
    _, summary = tables(cell(), cell(size="xl", metrics=missing))
    headings = ("tokens/s", "TFLOP/s", "MFU", "backward / forward", "peak (GiB)", "predicted (GiB)", "error")
    assert rows(summary, *headings) == [
        ("20,480", "50.0", "50.0%", "2.00x", "10.00", "10.10", "+1.0%"),
        ("20,480", "N/A", "N/A", "", "", "", ""),
    ]


def test_a_step_of_a_single_phase_is_shown_once():
    phases, _ = tables(cell(mode="forward", metrics={"backward_time": None, "optimizer_time": None}))
    assert column(phases, "phase") == ["forward"]


@pytest.mark.parametrize(
    ("records", "remark"),
    [
        (cell(size="large", status="error: RuntimeError: shapes"), "large: error: RuntimeError: shapes"),
        (
            [record for record in cell(size="large") if record.metric != CELL_TIME],
            "large: interrupted before it ended; run the same command again",
        ),
    ],
    ids=["crashed", "interrupted"],
)
def test_a_failed_cell_shows_no_numbers(records, remark):
    _, summary = tables(cell(), records)
    assert rows(summary, "size", "step (ms)") == [("small", "100.00"), ("large", "error")]
    assert notes(summary) == [remark]


# -- warmup, timing_agreement -----------------------------------------------------------------------------------------


def test_warm_up_states_when_a_run_became_steady():
    (table,) = tables(
        cell("warmup", warmup_steps=2, metrics={"warmup_time": (0.9, 0.5), "step_time": (0.1,) * 8}),
        cell("warmup", warmup_steps=0, metrics={"warmup_time": (), "step_time": (0.9, *(0.1,) * 9)}),
        cell("warmup", warmup_steps=5, metrics={"warmup_time": (), "step_time": (0.1, 0.2, 0.4, 0.8)}),
    )
    assert rows(table, "warm-up", "first step (ms)", "steady from step") == [
        ("0", "900.00", "2"),
        ("2", "900.00", "3"),
        ("5", "100.00", "never"),
    ]
    assert column(table, "step (ms)")[:2] == ["180.00 ± 252.98", "100.00 ± 0.00"]


def test_three_clocks_side_by_side():
    (table,) = tables(cell("timing_agreement", metrics=DO_BENCH), cell("timing_agreement", size="xl", status="oom"))
    assert rows(table, "size", "phase", "wall clock (ms)", "do_bench (ms)", "wall over do_bench")[:3] == [
        ("small", "forward", "30.00", "30.00", "+0.00%"),
        ("small", "backward", "60.00", "50.00", "+20.00%"),
        ("small", "step", "100.00", "101.00", "-0.99%"),
    ]
    assert column(table, "CUDA events (ms)")[:3] == ["", "", "99.00"]
    assert {(row[0], "OOM" in row) for row in table.rows[3:]} == {("xl", True)}
    assert notes(table) == ["xl: oom"]


# -- precision, compile, fast_step ------------------------------------------------------------------------------------


def test_lower_precision_is_compared_with_fp32_of_the_same_work():
    (table,) = tables(
        cell("precision", precision="bf16", metrics=step(0.05, peak_memory=(4 * GIB,))),
        cell("precision", precision="fp32", metrics=step(0.20, peak_memory=(8 * GIB,))),
        cell("precision", size="large", precision="bf16", metrics=step(0.5, peak_memory=(30 * GIB,))),
        cell("precision", size="large", precision="fp32", metrics=step(0.8, peak_memory=(40 * GIB,))),
    )
    assert rows(table, "size", "precision", "speed-up", "memory") == [
        ("small", "fp32", "1.00x", "1.00x"),
        ("small", "bf16", "4.00x", "0.50x"),
        ("large", "fp32", "1.00x", "1.00x"),
        ("large", "bf16", "1.60x", "0.75x"),
    ]
    assert rows(table, "step (ms)", "std (ms)", "peak (GiB)")[1] == ("50.00", "0.00", "4.00")


@pytest.mark.parametrize(
    "baseline",
    [{"context": 128}, {"vocab": 50_257}, {"status": OOM}, {"environment": dataclasses.replace(GPU, gpu="RTX 4090")}],
    ids=["another context", "another vocabulary", "out of memory", "another machine"],
)
def test_no_speed_up_without_a_baseline_of_the_same_work(baseline):
    found = tables(cell("precision", precision="fp32", **baseline), cell("precision", precision="bf16"))
    ours = [table for table in found if "H200" in table.title.en and "side by side" not in table.title.en]
    (speed_up,) = [row for table in ours for row in rows(table, "precision", "speed-up") if row[0] == "bf16"]
    assert speed_up == ("bf16", "")


def test_a_compiled_model_is_compared_with_the_eager_one():
    compiling = {"compile_time": (12.34,), "graph_breaks": (0,), "predicted_memory": None}
    (table,) = tables(cell("compile", compile=True, metrics=step(0.05, **compiling)), cell("compile"))
    assert rows(table, "compiled", "speed-up", "compile time (s)", "graph breaks") == [
        ("no", "1.00x", "", ""),
        ("yes", "2.00x", "12.3", "0"),
    ]


def test_the_fast_step_is_compared_with_the_plain_one_and_with_the_best_matmul():
    plain = cell("fast_step", fast="off", metrics={"matmul_ceiling": (1e14,)})
    (table,) = tables(plain, cell("fast_step", fast="on", metrics=step(0.05)))
    assert rows(table, "fast", "speed-up", "of the best matmul") == [("off", "1.00x", "50.0%"), ("on", "2.00x", "")]


# -- peak_memory ------------------------------------------------------------------------------------------------------


def predicted(gib):
    return {"peak_memory": (10 * GIB,), "predicted_memory": (gib * GIB,)}


def test_the_worst_prediction_is_named():
    (table,) = tables(
        cell("peak_memory", size="small", metrics={**predicted(10.1), "step_time": (*(0.1,) * 9, 0.2)}),
        cell("peak_memory", size="medium", mode="inference", precision="bf16", metrics=predicted(9.75)),
        cell("peak_memory", size="xl", status=OOM),
    )
    assert rows(table, "size", "measured (GiB)", "predicted (GiB)", "error") == [
        ("small", "10.00", "10.10", "+1.00%"),
        ("medium", "10.00", "9.75", "-2.50%"),
        ("xl", "OOM", "", ""),
    ]
    assert notes(table) == ["worst of 2: 2.50% (medium inference bf16)", f"xl train-step fp32: {OOM}"]


def test_settings_that_save_memory_have_a_table_of_their_own():
    plain, saving = tables(
        cell("peak_memory", attention="sdpa"),
        cell("peak_memory", metrics=predicted(9.9)),
        cell("peak_memory", checkpoint_blocks=4, metrics=predicted(10.2)),
    )
    assert column(plain, "error") == ["-1.00%"]
    assert rows(saving, "attention", "checkpoint", "error") == [("reference", "4", "+2.00%"), ("sdpa", "0", "+1.00%")]
    assert [notes(table)[0][:17] for table in (plain, saving)] == ["worst of 1: 1.00%", "worst of 2: 2.00%"]


# -- accumulation, autocast_dtypes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda name, **end: accumulation(name, 10.0, **end), dtypes], ids=["sum", "dtype"])
def test_a_failure_among_the_number_formats_is_noted(make):
    (table,) = tables(make("fp16"), make("bf16", status="error: RuntimeError: no"))
    assert any("error: RuntimeError: no" in note for note in notes(table))
