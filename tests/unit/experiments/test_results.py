"""The measurements in results/h200: tables that agree with the records, predictions that agree with both."""

import pytest

from cs336_systems.config import RunConfig
from cs336_systems.experiments.catalogue import catalogue
from cs336_systems.measure.readers.recorded_tables import BlockRow, LabelRow, rows_of
from cs336_systems.predict.memory_model import estimate
from cs336_systems.record import MIB
from cs336_systems.report.cells import group
from cs336_systems.report.sections import tables
from tests.helpers import ROOT, records_of_h200

H200 = ROOT / "results" / "h200"


@pytest.fixture(scope="module")
def records():
    return records_of_h200()


@pytest.fixture(scope="module")
def cells(records):
    return group(records)


def test_tables_are_not_stale(records):
    text = "\n\n".join(table.render("md") for table in tables(records, catalogue())) + "\n"
    remedy = "cs336 table results/h200/records.jsonl --format md --output results/h200/tables.md"
    assert (H200 / "tables.md").read_text() == text, f"stale; make it again: {remedy}"


def test_every_cell_is_filled(cells):
    """All cells of the courses' grids fit but the 10B of 2026, and 2.7B at context 2048 with nothing recomputed."""
    out_of_memory = [cell for cell in cells if not cell.ok]
    assert all(cell.status.startswith("oom: needs") for cell in out_of_memory)
    small = {(cell.get("size"), cell.get("context_length")) for cell in out_of_memory if cell.get("size") != "2026/10B"}
    assert small == {("2.7B", 2048)}
    assert {cell.get("checkpoint_blocks") for cell in out_of_memory} == {0}
    assert {cell.machine for cell in cells} == {"NVIDIA H200"}
    assert {"end_to_end", "precision", "compile", "warmup", "peak_memory"} <= {cell.experiment for cell in cells}


def test_kernels_have_a_kind_and_a_phase(cells):
    found = [cell for cell in cells if cell.experiment == "kernels"]
    assert len(found) == 44
    total = sum(cell.value("kernel_time") for cell in found)
    assert sum(cell.value("unknown_kernel_time") for cell in found) < 0.01 * total
    assert sum(cell.value("kernel_time_outside_phases") for cell in found) < 0.02 * total


def test_peaks_are_predicted_and_labelled(cells):
    found = [cell for cell in cells if cell.experiment == "memory" and cell.ok]
    assert len(found) == 26
    for cell in found:
        peak = cell.value("peak_memory")
        assert abs(cell.memory_error) < 0.02
        assert sum(size for _, size in rows_of(cell.samples("part_memory"), LabelRow)) == pytest.approx(peak, rel=0.01)
        assert cell.value("unlabelled_memory") < 0.02 * peak


def test_the_largest_block_of_forward_is_the_score_matrix_and_gone_with_flash(cells):
    def largest(mode, attention):
        (cell,) = [
            cell
            for cell in cells
            if cell.experiment == "memory"
            and (cell.get("mode"), cell.get("attention"), cell.get("context_length"), cell.get("precision"))
            == (mode, attention, 512, "fp32")
        ]
        return rows_of(cell.samples("largest_blocks"), BlockRow)

    size, label, module, what, line = largest("forward", "reference")[0]
    assert (size, label, module) == (128 * MIB, "activations", "layers.0.attn")
    assert "bmm 128x512x512 float32" in what
    assert line.startswith("reference.py:")
    assert not any("512x512" in row[3] for row in largest("train-step", "auto"))


def test_checkpointing_is_predicted(cells):
    found = [cell for cell in cells if cell.experiment == "checkpointing" and cell.ok]
    assert len(found) == 39
    for cell in found:
        assert cell.value("predicted_by_tracing_memory") == pytest.approx(cell.value("peak_memory"), rel=0.03)
        one_level = cell.memory_error  # the closed form has one level of groups
        assert one_level is None or abs(one_level) < 0.03


def test_todays_memory_model_predicts_the_measured_peaks(cells):
    """Within 2%. The records hold the predictions of the day they were made, which were within 3%."""
    found = [cell for cell in cells if cell.experiment == "peak_memory"]
    assert max(abs(cell.memory_error) for cell in found) < 0.03
    errors = {
        cell.name: estimate(RunConfig.from_dict(cell.config)).peak / cell.value("peak_memory") - 1 for cell in found
    }
    assert max(map(abs, errors.values())) < 0.02, errors


def test_fp32_eager_is_no_slower_and_no_larger_than_the_reference_model(cells):
    """Step time in ms and peak in GiB of the course's staff model on the same GPU."""
    bar = {
        "small": (75.5, 5.08),
        "medium": (192.8, 13.8),
        "large": (422.2, 27.5),
        "xl": (800.7, 49.9),
        "2.7B": (1168, 65.5),
    }
    steps = {c.get("size"): c for c in cells if c.ok and c.experiment == "end_to_end" and c.get("mode") == "train-step"}
    assert steps.keys() == bar.keys()
    for size, (milliseconds, gib) in bar.items():
        assert steps[size].value("step_time") * 1e3 < milliseconds
        assert steps[size].value("peak_memory") / 2**30 < gib


def test_our_clock_agrees_with_do_bench_on_2_7b(cells):
    (cell,) = [c for c in cells if c.experiment == "timing_agreement" and c.get("size") == "2.7B"]
    for phase in ("forward", "backward", "step"):
        assert cell.value(f"{phase}_time") / cell.value(f"do_bench_{phase}_time") == pytest.approx(1, abs=0.02)
