"""Several machines and runs: a column for each, rows of the same work only, published results beside them."""

import dataclasses

import pytest

from cs336_systems import record
from cs336_systems.cli import main
from cs336_systems.config import SIZES
from cs336_systems.experiments.catalogue import catalogue
from cs336_systems.record import Environment, Loaded, Metric, Record
from cs336_systems.report.build import document
from cs336_systems.report.cells import group
from cs336_systems.report.published import PUBLISHED, published
from cs336_systems.report.sections import tables_of
from cs336_systems.report.side_by_side import charts_of_shared, compared, side_by_side
from tests.golden.report_goldens import H200
from tests.unit.report.step_cells import GIB, GPU, cell, column, notes, rows, step, tables

OTHER = dataclasses.replace(GPU, gpu="RTX 4090")


def shared(*cells, experiment="bench"):
    """The tables side by side, by the quantity they show."""
    chosen = group([one for each in cells for one in each if one.experiment == experiment])
    found = side_by_side(catalogue()[experiment], chosen)
    return {table.title.en.split(": ")[1].split(", side by side")[0]: table for table in found}


def test_one_machine_has_nothing_beside_it():
    assert shared(cell(), cell(size="medium")) == {}


def test_a_column_for_each_machine_and_ratios_to_the_first():
    slow = cell(metrics=step(0.25, peak_memory=(5 * GIB,)), environment=OTHER)
    found = shared(cell(metrics=step(0.1)), slow)
    assert rows(found["step"], "H200 (ms)", "RTX 4090 (ms)", "RTX 4090 / H200") == [("100.00", "250.00", "2.50x")]
    assert column(found["peak memory"], "RTX 4090 / H200") == ["0.50x"]
    assert notes(found["step"]) == ["means"]
    reverse = shared(slow, cell())["step"]
    assert [c.heading() for c in reverse.columns][-3:] == ["H200 / RTX 4090", "RTX 4090 (ms)", "H200 (ms)"]


def test_chinese():
    for table in shared(cell(), cell(environment=OTHER)).values():
        for text in (table.title, *table.notes):
            assert text.zh not in ("", text.en)


def widened(records):
    return [dataclasses.replace(r, config={**r.config, "model": {**r.config["model"], "d_ff": 4096}}) for r in records]


OTHER_WORK = {
    "size": cell(size="medium", environment=OTHER),
    "context": cell(context=256, environment=OTHER),
    "batch size": cell(batch_size=8, environment=OTHER),
    "precision": cell(precision="bf16", environment=OTHER),
    "attention": cell(attention="sdpa", environment=OTHER),
    "compiled": cell(compile=True, environment=OTHER),
    "checkpoint": cell(checkpoint_blocks=2, environment=OTHER),
    "vocabulary": cell(vocab=50_257, environment=OTHER),
    "fast": cell(fast="loss", environment=OTHER),
    "mode": cell(mode="inference", environment=OTHER),
    "another shape under the same name": widened(cell(environment=OTHER)),
}


@pytest.mark.parametrize("difference", OTHER_WORK)
def test_other_work_is_no_row(difference):
    assert shared(cell(), OTHER_WORK[difference]) == {}


@pytest.mark.parametrize("same", [{"warmup_steps": 2}, {"num_steps": 50}, {"seed": 3}], ids=str)
def test_how_it_was_measured_may_differ(same):
    assert "step" in shared(cell(), cell(environment=OTHER, **same))


def test_the_warm_up_distinguishes_rows_where_it_is_the_question():
    pair = cell("warmup", warmup_steps=0), cell("warmup", warmup_steps=5, environment=OTHER)
    assert shared(*pair, experiment="warmup") == {}


def test_a_pass_is_the_same_with_and_without_an_update_but_a_step_is_not():
    found = shared(cell(mode="forward-backward"), cell(mode="train-step", environment=OTHER))
    assert set(found) == {"forward", "backward"}
    assert "train-step" not in found["forward"].title.en
    both = cell(mode="forward-backward", metrics={"forward_time": (0.030,)})
    both += cell(mode="train-step", metrics={"forward_time": (0.999,)})
    found = shared(both, cell(mode="forward-backward", environment=OTHER))
    assert column(found["forward"], "H200 (ms)") == ["30.00"]  # the first of two


def test_failed_cells_have_a_verdict_and_no_ratio():
    third = dataclasses.replace(GPU, gpu="L4")
    failed = cell(environment=third, status="oom: needs 30 GiB")
    medium = [*cell(size="medium"), *cell(size="medium", environment=third)]
    found = shared(cell(), cell(environment=OTHER), failed, medium, cell(size="large"))
    assert rows(found["step"], "size", "L4 (ms)", "L4 / H200") == [("small", "OOM", ""), ("medium", "100.00", "1.00x")]


def test_variants_have_a_row_each():
    def rivals(environment, flash, cudnn):
        config = {"batch_size": 1, "heads": 16, "seq_len": 512, "head_dim": 64, "is_causal": True, "precision": "bf16"}
        metrics = [Metric("forward_time", "s", flash, "flash_triton"), Metric("forward_time", "s", cudnn, "sdpa_cudnn")]
        return [
            Record("attention_rivals", config, m.name, m.unit, tuple(m.samples), "ok", environment, m.variant)
            for m in [*metrics, Metric(record.CELL_TIME, "s", [1.0])]
        ]

    here, there = rivals(GPU, (1e-3, 1e-3, 9e-3), (2e-3,)), rivals(OTHER, (3e-3,), (4e-3,))
    table = shared(here, there, experiment="attention_rivals")["forward"]
    assert rows(table, "of", "H200 (ms)", "RTX 4090 (ms)") == [
        ("flash_triton", "1.000", "3.000"),
        ("sdpa_cudnn", "2.000", "4.000"),
    ]
    assert notes(table) == ["medians"]


def test_a_table_has_one_machine_in_its_title_or_several_in_its_headings():
    modes = ("inference", "train-step")
    for table in tables(*(cell("end_to_end", mode=m, environment=e) for m in modes for e in (GPU, OTHER))):
        titled = [name for name in ("H200", "RTX 4090") if name in table.title.en]
        assert len(titled) == (0 if "side by side" in table.title.en else 1)


# -- charts and sentences ---------------------------------------------------------------------------------------------


def machines(ours, theirs, **fields):
    """Cells of steps on two machines, by size: seconds of each, and further metrics of the second."""
    names = ("small", "medium", "large")
    both = zip(names, ours, strict=False), zip(names, theirs, strict=False)
    return group(
        [
            *(one for size, seconds in both[0] for one in cell(size=size, metrics=step(seconds))),
            *(r for size, s in both[1] for r in cell(size=size, metrics=step(s, **fields), environment=OTHER)),
        ]
    )


def test_charts_show_ratios_to_the_first_machine_and_all_values():
    cells = machines((0.1, 0.2, 0.3), (0.25, 0.4), peak_memory=(5 * GIB,))
    ratio, values, memory, _ = charts_of_shared(catalogue()["bench"], cells)
    assert (ratio.kind, [limit.value for limit in ratio.limits]) == ("dots", [1.0])
    (other,) = ratio.series
    assert (other.name.en, [point.place for point in other.points]) == ("RTX 4090", ["small", "medium"])
    assert [point.y for point in other.points] == pytest.approx([2.5, 2.0])
    assert {one.name.en: [point.y for point in one.points] for one in values.series} == {
        "H200": pytest.approx([100, 200]),
        "RTX 4090": pytest.approx([250, 400]),
    }
    assert [point.y for point in memory.series[0].points] == [0.5, 0.5]
    assert ratio.note.en == "means"
    assert not ratio.log_y


def test_widely_different_values_are_on_a_logarithmic_axis():
    ratio, values, *_ = charts_of_shared(catalogue()["bench"], machines((0.1, 9.0), (0.11, 9.0)))
    assert (ratio.log_y, values.log_y) == (False, True)


def test_charts_of_many_rows_say_how_many_they_show():
    lengths = range(1, 61)
    cells = [cell(context=128 * n, environment=where) for n in lengths for where in (GPU, OTHER)]
    ratio, *_ = charts_of_shared(catalogue()["bench"], group([one for each in cells for one in each]))
    shown = len(ratio.series[0].points)
    assert shown < 60
    assert ratio.note.en == f"means; the first {shown} of 60 rows"


@pytest.mark.parametrize(
    ("theirs", "sentence", "number"),
    [
        ((0.2, 0.8), "H200 is 4.00 times as fast as RTX 4090 (geometric mean of 2)", "4.00x"),
        ((0.05, 0.05), "RTX 4090 is 2.00 times as fast as H200 (geometric mean of 2)", "2.00x"),
        ((0.101, 0.1), "RTX 4090 and H200 are equal within 2% (geometric mean of 2)", "1.00x"),
    ],
)
def test_machines_are_compared_in_words(theirs, sentence, number):
    time, _ = compared(catalogue()["bench"], machines((0.1, 0.1), theirs))
    assert time.sentence.en == f"step: {sentence}"
    assert time.highlight.value.en == number
    assert time.sentence.zh != time.sentence.en
    assert compared(catalogue()["bench"], machines((0.1,), ())) == []


def test_more_memory_is_said_of_the_machine_that_needs_more():
    _, memory = compared(catalogue()["bench"], machines((0.1,), (0.1,), peak_memory=(40 * GIB,)))
    assert memory.sentence.en == "peak memory: RTX 4090 needs 4.00 times as much as H200 (geometric mean of 1)"
    assert memory.highlight.rank > 0  # after the time


# -- runs -------------------------------------------------------------------------------------------------------------


def section(*loaded, references=(), name="bench"):
    (found,) = [one for one in document(loaded, catalogue(), references=references).sections if one.name == name]
    return found


def steps_of(found):
    return next(table for table in found.tables if "step, side" in table.title.en)


def test_two_runs_of_one_machine_are_named_by_their_folders():
    found = section(Loaded(cell(metrics=step(0.1)), [], "before"), Loaded(cell(metrics=step(0.2)), [], "after"))
    assert rows(steps_of(found), "H200 · before (ms)", "H200 · after (ms)") == [("100.00", "200.00")]
    (values,) = [chart for chart in found.charts if chart.name == "bench-step_time-values"]
    assert [series.name.en for series in values.series] == ["H200 · before", "H200 · after"]
    assert [series.points[0].y for series in values.series] == pytest.approx([100, 200])
    same_name = section(*(Loaded(cell(metrics=step(seconds)), [], "quick") for seconds in (0.1, 0.2)))
    assert column(steps_of(same_name), "H200 · quick (2) (ms)") == ["200.00"]


def test_files_that_share_no_work_are_one_run():
    found = section(Loaded(cell(), [], "a"), Loaded(cell(size="medium"), [], "b"))
    assert column(found.tables[1], "size") == ["small", "medium"]
    assert "H200," in found.tables[1].title.en


def test_report_of_two_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, seconds in (("before", 0.1), ("after", 0.3)):
        record.append(tmp_path / name / "records.jsonl", cell("end_to_end", metrics=step(seconds)))
    assert main(["report", "before", "after", "-o", "out", "--formats", "csv"]) == 0
    assert "small,3.00x,100.00,300.00" in "".join(path.read_text() for path in (tmp_path / "out" / "csv").iterdir())


# -- published results ------------------------------------------------------------------------------------------------


def test_published_results_are_named_by_their_gpu_and_come_last():
    own, others = (
        [r for r in records if r.experiment == "end_to_end"]
        for records in (record.load(H200 / "records.jsonl").records, published())
    )
    shown = tables_of(catalogue()["end_to_end"], group(own), group(others, PUBLISHED))
    assert ["side by side" in table.title.en for table in shown] == [False, False, True, True]
    forward = shown[2]
    assert column(forward, "NVIDIA H800 PCIe · published (ms)") == ["27.24", "84.28", "161.45", "326.48", "490.07"]
    assert column(forward, "size") == ["small", "medium", "large", "xl", "2.7B"]
    assert "NVIDIA H800 PCIe · 已发表 (ms)" in [c.heading("zh") for c in forward.columns]
    assert any(note.startswith("published: ") for note in notes(forward))


def test_published_results_are_shown_on_request_only():
    own = Loaded(cell("end_to_end", mode="forward-backward"), [])
    for references in ((), published()):
        titles = [t.title.en for t in section(own, references=references, name="end_to_end").tables]
        assert any("side by side" in title for title in titles) == bool(references)


def test_published_results_are_records():
    found = published()
    assert [Record.from_dict({**dataclasses.asdict(r), "samples": list(r.samples)}) for r in found] == found
    assert {r.config["size"] for r in found if "size" in r.config} == {"small", "medium", "large", "xl", "2.7B"}
    assert {r.config["size"] for r in found if "size" in r.config} <= set(SIZES)
    gpus = ("NVIDIA H800 PCIe", "NVIDIA GeForce RTX 4090 D")
    assert {r.environment for r in found} == {Environment(gpu=gpu) for gpu in gpus}
    assert all(one.ok or one.verdict == "OOM" for one in group(found))


def test_published_results_give_the_speed_ups_of_the_write_ups():
    """The published speed-ups are rounded."""
    cells = group(published())
    passes = {
        (c.get("size"), c.get("precision")): c.value("backward_time") for c in cells if c.experiment == "precision"
    }
    assert round(passes["2.7B", "fp32"] / passes["2.7B", "bf16"], 2) == 3.04
    attention = {
        (c.machine.split()[1], c.get("head_dim"), c.get("seq_len"), c.get("implementation")): c
        for c in cells
        if c.experiment == "pytorch_attention"
    }
    for shape, speedup in {(16, 16384): 2.701, (32, 256): 0.516, (64, 8192): 2.140, (128, 16384): 1.781}.items():
        eager, compiled = (
            attention[("H800", *shape, name)].value("forward_time") for name in ("reference", "compiled")
        )
        assert eager / compiled == pytest.approx(speedup, abs=2e-3)
    once = attention["GeForce", 128, 8192, "compiled"]  # published for a hundred passes
    assert once.value("backward_time") == pytest.approx(34.0381e-3)
