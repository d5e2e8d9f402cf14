"""What the repository shows of its own measurements is what the records say."""

from pathlib import Path

import pytest

from cs336_systems.config import RunConfig
from cs336_systems.measure.memory_model import estimate
from cs336_systems.record import load
from cs336_systems.report.cells import group
from cs336_systems.report.sections import tables

H200 = Path(__file__).parents[1] / "results" / "h200"


@pytest.fixture(scope="module")
def cells():
    return group(load(H200 / "records.jsonl").records)


def test_tables_are_not_stale():
    text = "\n\n".join(table.render("md") for table in tables(load(H200 / "records.jsonl").records)) + "\n"
    remedy = "cs336 table results/h200/records.jsonl --format md --output results/h200/tables.md"
    assert (H200 / "tables.md").read_text() == text, f"stale; make it again: {remedy}"


def test_every_cell_is_filled(cells):
    assert {cell.status for cell in cells} == {"ok"}
    assert {cell.machine for cell in cells} == {"NVIDIA H200"}
    assert {"end_to_end", "precision", "compile", "warmup", "peak_memory"} <= {cell.experiment for cell in cells}


def test_predicted_peaks_are_within_two_and_three_percent(cells):
    found = [cell for cell in cells if cell.experiment == "peak_memory"]
    plain = [cell for cell in found if cell.get("attention") == "reference" and not cell.get("checkpoint_blocks")]
    assert len(plain) == 42
    assert max(abs(cell.memory_error) for cell in plain) < 0.02
    assert max(abs(cell.memory_error) for cell in found) < 0.03


def test_the_model_as_it_is_now_predicts_them_too(cells):
    """The records hold what was predicted on that day; the model has to be right today."""
    found = [cell for cell in cells if cell.experiment == "peak_memory"]
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
    steps = {c.get("size"): c for c in cells if c.experiment == "end_to_end" and c.get("mode") == "train-step"}
    assert steps.keys() == bar.keys()
    for size, (milliseconds, gib) in bar.items():
        assert steps[size].value("step_time") * 1e3 < milliseconds
        assert steps[size].value("peak_memory") / 2**30 < gib


def test_our_clock_agrees_with_do_bench_on_2_7b(cells):
    (cell,) = [c for c in cells if c.experiment == "timing_agreement" and c.get("size") == "2.7B"]
    for phase in ("forward", "backward", "step"):
        assert cell.value(f"{phase}_time") / cell.value(f"do_bench_{phase}_time") == pytest.approx(1, abs=0.02)
