"""Tables of the attention experiments from hand-made cells."""

import pytest

from cs336_systems.record import GIB
from tests.unit.experiments.attention.attention_cells import (
    OOM,
    WRONG,
    about,
    flash_cell,
    leaderboard_cell,
    passes_cell,
    rivals_cell,
    step_cell,
    tables,
)
from tests.unit.report.step_cells import column, notes


def test_eager_and_compiled_are_compared():
    (table,) = tables(
        passes_cell("reference", 0.004, 0.008),
        passes_cell("compiled", 0.002, 0.002),
        passes_cell("reference", size=(8, 1, 16384, 64), status=OOM),
        passes_cell("compiled", 0.5, 0.5, size=(8, 1, 16384, 64)),
    )
    assert column(table, "implementation") == ["reference", "compiled"] * 2
    assert column(table, "seq") == ["1024", "1024", "16384", "16384"]
    assert column(table, "forward (ms)") == ["4.000 ± 0.000", "2.000 ± 0.000", "OOM", "500.0 ± 0.000"]
    assert column(table, "forward speed-up") == ["1.00x", "2.00x", "", ""]
    assert column(table, "backward speed-up") == ["1.00x", "4.00x", "", ""]
    assert column(table, "before backward (GiB)")[:2] == ["1.50", "1.50"]
    assert "compiled: compiled once with dynamic shapes" in notes(table)
    assert f"d 64 seq 16384 reference: {OOM}" in notes(table)
    for setting in ("batch 8", "fp32", "causal no", "H200"):
        assert setting in table.title.en


def test_flash_has_implementations_as_columns_and_marks_the_best():
    found = tables(
        flash_cell("flash_triton", 2.0),
        flash_cell("reference", 8.0, peak_memory=9 * GIB),
        flash_cell("sdpa_flash", 1.0, error_dq=5e-3),
        flash_cell("flash_triton", 3.0, (1, 1, 2048, 64)),
        flash_cell("reference", size=(1, 1, 2048, 64), status=OOM),
        flash_cell("flash_triton", size=(1, 1, 1024, 128), status=WRONG),
        flash_cell("reference", size=(1, 1, 1024, 128), status="error: RuntimeError: no kernel"),
        flash_cell("sdpa_flash", 4.0, (1, 1, 1024, 128)),
    )
    both = about(found, "forward and backward (ms)")
    shapes = list(zip(column(both, "d"), column(both, "seq"), strict=True))
    assert shapes == [("64", "1024"), ("64", "2048"), ("128", "1024")]
    assert column(both, "flash_triton") == ["2.000", "3.000", "wrong"]
    assert column(both, "reference") == ["8.000", "OOM", "error"]
    assert column(both, "sdpa_flash") == ["1.000 *", "", "4.000"], "a single value is not marked"
    assert f"d 64 seq 2048 reference: {OOM}" in notes(both)
    assert any("wrong result: dq off by 3.1e-01" in note for note in notes(both))
    assert column(about(found, "forward (ms)"), "sdpa_flash")[0] == "0.250 *"
    assert column(about(found, "backward (ms)"), "reference")[0] == "6.000"
    rates = about(found, "forward and backward (TFLOP/s)")
    assert (column(rates, "flash_triton")[0], column(rates, "sdpa_flash")[0]) == ("250.0", "500.0 *")
    memory = about(found, "peak memory (GiB)")
    assert (column(memory, "flash_triton")[0], column(memory, "reference")[:2]) == ("2.00", ["9.00", "OOM"])
    assert column(about(found, "largest error against float64"), "sdpa_flash")[0] == "5.0e-03"


def test_a_quantity_that_was_not_measured_has_no_table():
    found = tables(flash_cell("reference", peak_memory=[]))
    assert len(found) == 5
    assert not any("memory" in table.title.en for table in found)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["compiled"], "compiled: compiled once with dynamic shapes"),
        (
            ["flex", "compiled"],
            "compiled and flex: compiled once with dynamic shapes; flex is faster compiled for one shape "
            "(attention_rivals)",
        ),
    ],
)
def test_a_note_says_how_implementations_were_compiled(names, said):
    assert said in notes(tables(*(flash_cell(name) for name in names))[0])


MEASURED = {
    "flash_triton": {"forward_backward_time": [0.001, 0.002, 0.009], "forward_time": 0.0010, "error_out": 1e-3},
    "sdpa_flash": {"status": "RuntimeError: No available kernel. Aborting execution."},
    "sdpa_cudnn": {"forward_backward_time": [0.003] * 3, "forward_time": 0.0005, "error_dq": 2e-3},
    "flex": {"forward_backward_time": [0.005] * 3},
}


def test_rivals_are_compared_with_ours():
    failed = rivals_cell((1, 16, 16384, 64), status="error: timeout after 5 s", **MEASURED)
    found = tables(rivals_cell(**MEASURED), failed)
    both = about(found, "forward and backward (ms)")
    assert column(both, "batch") == ["1", "4"]
    assert column(both, "flash_triton") == ["error", "2.000 *"]
    assert column(both, "sdpa_flash") == ["error", "error"]
    assert column(both, "best rival / ours") == ["", "1.50x"]
    forward = about(found, "forward (ms)")
    assert column(forward, "best rival / ours") == ["", "0.50x"]
    assert column(forward, "flex") == ["error", ""]
    assert column(about(found, "forward and backward (TFLOP/s)"), "flash_triton")[1] == "500.0 *"
    assert column(about(found, "largest error against float64"), "sdpa_cudnn")[1] == "2.0e-03"
    reason = "batch 4 heads 12 d 64 seq 512 causal yes sdpa_flash: RuntimeError: No available kernel"
    assert any(note.startswith(reason) for note in notes(both))
    assert any("timeout after 5 s" in note for note in notes(both))


def test_times_from_a_cuda_graph_have_rows_only_where_they_were_taken():
    replayed = {name: {**own, "replayed_time": 4e-5} for name, own in MEASURED.items() if "status" not in own}
    replayed["sdpa_cudnn"]["replayed_time"] = 6e-5
    long = {name: own for name, own in MEASURED.items() if "status" not in own}
    found = tables(rivals_cell(**replayed), rivals_cell((1, 16, 16384, 64), **long))
    table = about(found, "forward and backward, from a CUDA graph (ms)")
    assert column(table, "seq") == ["512"]
    assert column(table, "flash_triton") == ["0.040 *"]
    assert column(table, "best rival / ours") == ["1.00x"]


def test_no_comparison_where_ours_failed():
    wrong = {"flash_triton": {"status": "ArithmeticError: wrong result: dq off by 1.0e+00"}}
    both = about(tables(rivals_cell(**{**MEASURED, **wrong})), "forward and backward (ms)")
    assert (column(both, "flash_triton"), column(both, "best rival / ours")) == (["wrong"], [""])


def test_the_leaderboard_shows_means():
    failed = leaderboard_cell("sdpa_cudnn", status="error: no kernel")
    (table,) = tables(leaderboard_cell("flash_triton", 0.003, 0.005), failed)
    assert column(table, "implementation") == ["flash_triton", "sdpa_cudnn"]
    assert column(table, "mean (ms)") == ["4.000", "error"]
    assert column(table, "std of tenths (ms)") == ["1.414", ""]
    assert column(table, "TFLOP/s") == ["481.0", ""]
    assert column(table, "error") == ["2.0e-03", ""]
    assert "sdpa_cudnn: error: no kernel" in notes(table)


def test_step_times_have_a_lead_and_their_extremes():
    (table,) = tables(
        step_cell(
            flash_hopper=[230, 240, 235],
            flash_triton=[250, 250, 250],
            sdpa_flash="RuntimeError: no kernel",
            sdpa_cudnn=[240, 250, 245],
        )
    )
    assert dict(zip([c.heading() for c in table.columns], table.rows[0], strict=True)) == {
        "size": "2.7B",
        "context": "4096",
        "flash_hopper": "235.00 *",
        "flash_triton": "250.00",
        "sdpa_flash": "error",
        "sdpa_cudnn": "245.00",
        "best rival / ours": "1.04x",
    }
    said = "\n".join(notes(table))
    assert "flash_hopper 230.00 - 240.00, flash_triton 250.00 - 250.00, sdpa_cudnn 240.00 - 250.00" in said
    assert "sdpa_flash: RuntimeError: no kernel" in said


def test_no_lead_column_without_ours():
    """On a CPU the step compares flash_torch and sdpa."""
    (table,) = tables(step_cell(flash_torch=[2, 2, 2], sdpa=[1, 1, 1]))
    assert [c.heading() for c in table.columns] == ["size", "context", "flash_torch", "sdpa"]
