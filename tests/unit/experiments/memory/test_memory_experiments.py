"""Tables, charts and findings of the experiments on memory."""

import pytest

from cs336_systems.record import GIB
from tests.unit.experiments.memory.samples import SAMPLES, memory, predicted, recomputed, saved
from tests.unit.report.step_cells import OOM, charts, column, notes, rows, stated, tables, values

STATED = {
    "memory": [
        "The worst of 2 predicted peaks is off by 8.18%: 10.10 GiB predicted, 11.00 GiB measured (small, context "
        "1024).",
        "The highest peak is 11.00 GiB (small, context 1024): 82% activations, 18% parameters.",
        "The largest block of a step is 64.0 MiB of activations, made at reference.py:49 (small, context 512).",
    ],
    "checkpointing": [
        "In fp32 groups of 1 need the least memory of all groups: 20.00 GiB, against 60.00 GiB without recomputation.",
        "A step with recomputation takes 1.2 (groups of 4, fp32) to 1.3 (groups of 1, fp32) times as long as one "
        "without. A step with nested groups takes 1.2 times as long as one without nesting (groups of 4 with groups "
        "of 1 inside, fp32).",
        "4 peaks predicted by tracing are off by less than 0.01% at most.",
    ],
    "saved_tensors": [
        "Naive attention keeps 200.0 MiB for backward (small, 1 block, fp32). Compared with that, fused attention "
        "keeps 75%, recomputation keeps 25%, torch.compile keeps 90%.",
        "The largest tensor kept has 64.0 MiB (4x8x8 float32), made at reference.py:23.",
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


def test_small_parts_are_drawn_as_one_and_nothing_is_lost():
    parts = ("weights", 60 * GIB, "a", GIB / 10, "b", GIB / 5)
    (chart,) = charts(memory(part_memory=parts, predicted_memory=(61 * GIB,)))
    weights, other, marks = chart.series
    assert [series.name.en for series in chart.series] == ["weights", "other", "predicted peak"]
    assert sum(values(series)["small"] for series in (weights, other)) == pytest.approx(60.3)
    assert values(marks) == {"small": 61.0}
    assert chart.on_bars(marks)
    assert charts(memory(part_memory=())) == []


# -- checkpointing ----------------------------------------------------------------------------------------------------


def test_groups_are_compared_with_no_recomputation():
    (table,) = tables(SAMPLES["checkpointing"], recomputed(16, 0, 0, status=OOM))
    assert rows(table, "group", "inside it", "step (ms)", "over none", "peak (GiB)", "traced, error") == [
        ("none", "", "1,000.0", "1.00x", "60.00", "+0.00%"),
        ("1", "", "1,300.0", "1.30x", "20.00", "+0.00%"),
        ("4", "", "1,250.0", "1.25x", "30.00", "+0.00%"),
        ("16", "", "OOM", "", "", ""),
        ("4", "1", "1,500.0", "1.50x", "20.00", "+0.00%"),
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


def test_predicted_peaks_are_marks_on_their_bars():
    peaks, times = charts(
        recomputed(0, 30, 0.5, predicted=31),
        recomputed(4, 10, 0.5, inner=1, predicted=11),
        recomputed(0, 20, 0.5, precision="bf16", predicted=21),
        recomputed(2, 8, 0.5, precision="bf16", predicted=9),
    )
    assert [(series.name.en, series.drawn, series.over) for series in peaks.series] == [
        ("fp32", "both", None),
        ("bf16", "both", None),
        ("fp32: predicted", "marks", 0),
        ("bf16: predicted", "marks", 1),
    ]
    assert values(peaks.series[2]) == {"none": 31.0, "4/1": 11.0}
    assert values(peaks.series[3]) == {"none": 21.0, "2": 9.0}
    assert [values(series) for series in times.series] == [{"none": 500, "4/1": 500}, {"none": 500, "2": 500}]


# -- saved_tensors, memory_model --------------------------------------------------------------------------------------


def test_saved_tensors_and_the_largest():
    kept, largest = tables(saved(200), saved(0, status=OOM, checkpoint_blocks=1))
    assert rows(kept, "checkpoint", "kept (MiB)", "tensors", "parameters, too (MiB)") == [
        ("0", "200.0", "5", "3.0"),
        ("1", "OOM", "", ""),
    ]
    assert rows(largest, "size (MiB)", "module", "what") == [("64.0", "layers.0.attn", "4x8x8 float32")]


def test_the_memory_model_part_by_part():
    (table,) = tables(predicted())
    parts = ("parameters", "gradients", "optimizer", "activations", "logits, loss", "peak", "peak, traced")
    assert rows(table, *(f"{part} (GiB)" for part in parts)) == [tuple(f"{i}.00" for i in range(1, 8))]
    assert rows(table, "per block (MiB)", "residual tensor (MiB)", "peak in") == [("192", "6", "backward")]
