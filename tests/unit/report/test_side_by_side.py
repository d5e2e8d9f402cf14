"""Several machines and runs: a column for each, rows of the same work only, and what others have published beside."""

import dataclasses
import sys

import pytest

from cs336_systems import record
from cs336_systems.config import SIZES
from cs336_systems.record import CELL_TIME, Environment, Loaded, Record
from cs336_systems.report.build import document
from cs336_systems.report.cells import group
from cs336_systems.report.published import PUBLISHED, published
from cs336_systems.report.sections import tables, tables_of
from cs336_systems.report.side_by_side import side_by_side
from cs336_systems.report.words import in_chinese
from tests.golden.report_goldens import H200
from tests.helpers import execute
from tests.unit.report.test_report import GIB, GPU, cell, column, rows, step

OTHER = dataclasses.replace(GPU, gpu="RTX 4090")


def shared(*cells, experiment="bench"):
    """The tables side by side, by the quantity they show."""
    found = side_by_side(group([one for each in cells for one in each if one.experiment == experiment]))
    return {table.title.split(": ")[1].split(", side by side")[0]: table for table in found}


def test_one_machine_has_nothing_beside_it():
    assert shared(cell(), cell(size="medium")) == {}


def test_a_column_for_each_machine_and_how_many_times_the_first():
    found = shared(cell(metrics=step(0.1)), cell(metrics=step(0.25, peak_memory=(5 * GIB,)), environment=OTHER))
    table = found["step"]
    assert rows(table, "H200 (ms)", "RTX 4090 (ms)", "RTX 4090 / H200") == [("100.00", "250.00", "2.50x")]
    assert column(found["peak memory"], "RTX 4090 / H200") == ["0.50x"]
    assert table.notes == ["means"]


def test_the_first_machine_is_the_one_named_first():
    found = shared(cell(environment=OTHER), cell())
    assert [c.heading for c in found["step"].columns][-3:] == ["RTX 4090 (ms)", "H200 (ms)", "H200 / RTX 4090"]


@pytest.mark.parametrize(
    "difference",
    [
        {"size": "medium"},
        {"context": 256},
        {"batch_size": 8},
        {"precision": "bf16"},
        {"attention": "sdpa"},
        {"compile": True},
        {"checkpoint_blocks": 2},
        {"vocab": 50_257},
        {"fast": "loss"},
        {"mode": "inference"},
    ],
    ids=str,
)
def test_other_work_is_no_row(difference):
    assert shared(cell(), cell(environment=OTHER, **difference)) == {}


def test_a_shape_of_ones_own_under_a_known_name_is_other_work():
    def widened(found):
        model = {**found.config["model"], "d_ff": 4096}
        return dataclasses.replace(found, config={**found.config, "model": model})

    assert shared(cell(), [widened(one) for one in cell(environment=OTHER)]) == {}


@pytest.mark.parametrize("same", [{"warmup_steps": 2}, {"num_steps": 50}, {"seed": 3}], ids=str)
def test_how_it_was_measured_may_differ(same):
    assert "step" in shared(cell(), cell(environment=OTHER, **same))


def test_but_warm_up_is_the_question_of_its_experiment():
    pair = cell("warmup", warmup_steps=0), cell("warmup", warmup_steps=5, environment=OTHER)
    assert shared(*pair, experiment="warmup") == {}


def test_a_pass_is_the_same_with_and_without_an_update_but_a_step_is_not():
    found = shared(cell(mode="forward-backward"), cell(mode="train-step", environment=OTHER))
    assert set(found) == {"forward", "backward"}
    assert "train-step" not in found["forward"].title


def test_two_modes_of_one_machine_are_one_row_the_first_of_them():
    both = cell(mode="forward-backward", metrics={"forward_time": (0.030,)})
    both += cell(mode="train-step", metrics={"forward_time": (0.999,)})
    found = shared(both, cell(mode="forward-backward", environment=OTHER))
    assert column(found["forward"], "H200 (ms)") == ["30.00"]


def test_what_did_not_fit_is_said_and_has_no_ratio():
    third = dataclasses.replace(GPU, gpu="L4")
    found = shared(cell(), cell(environment=OTHER), cell(environment=third, status="oom: needs 30 GiB"),
                   cell(size="medium"), cell(size="medium", environment=third))  # fmt: skip
    assert rows(found["step"], "size", "L4 (ms)", "L4 / H200") == [("small", "OOM", ""), ("medium", "100.00", "1.00x")]


def test_work_of_one_machine_alone_is_left_to_its_own_table():
    found = shared(cell(), cell(size="medium"), cell(environment=OTHER))
    assert column(found["step"], "size") == ["small"]


def rivals(environment, flash, cudnn):
    config = {"batch_size": 1, "heads": 16, "seq_len": 512, "head_dim": 64, "is_causal": True, "precision": "bf16"}
    config |= {"device": "cuda", "implementations": ["flash_triton", "sdpa_cudnn"]}
    metrics = {"flash_triton_forward_time": flash, "sdpa_cudnn_forward_time": cudnn, CELL_TIME: (1.0,)}
    return [Record("attention_rivals", config, m, "s", tuple(v), "ok", environment) for m, v in metrics.items()]


def test_what_was_measured_in_turns_has_a_row_each_and_medians():
    here, there = rivals(GPU, (1e-3, 1e-3, 9e-3), (2e-3,)), rivals(OTHER, (3e-3,), (4e-3,))
    table = shared(here, there, experiment="attention_rivals")["forward"]
    assert rows(table, "of", "H200 (ms)", "RTX 4090 (ms)") == [
        ("flash_triton", "1.000", "3.000"),
        ("sdpa_cudnn", "2.000", "4.000"),
    ]
    assert table.notes == ["medians"]


def test_no_table_has_two_machines():
    """In a column, that is: a table names one machine in its title, or each in a heading of its own."""
    cells = [
        one
        for mode in ("inference", "train-step")
        for env in (GPU, OTHER)
        for one in cell("end_to_end", mode=mode, environment=env)
    ]
    for table in tables(cells):
        titled = [name for name in ("H200", "RTX 4090") if name in table.title]
        assert len(titled) == (0 if "side by side" in table.title else 1)
        assert not [note for note in table.notes if "machines in one table" in note]


# -- runs -------------------------------------------------------------------------------------------------------------


def section(*loaded, references=(), name="bench"):
    (found,) = [one for one in document(loaded, references=references).sections if one.name == name]
    return found


def test_two_runs_of_one_machine_are_told_apart_by_their_folders():
    found = section(Loaded(cell(metrics=step(0.1)), [], "before"), Loaded(cell(metrics=step(0.2)), [], "after"))
    table = next(table for table in found.tables if "step, side" in table.title)
    assert rows(table, "H200 · before (ms)", "H200 · after (ms)") == [("100.00", "200.00")]
    assert len(found.charts) == 2
    assert ["before" in chart.title.en for chart in found.charts] == [True, False]


def test_folders_of_one_name_are_numbered():
    runs = [Loaded(cell(metrics=step(time)), [], "quick") for time in (0.1, 0.2)]
    table = next(table for table in section(*runs).tables if "step, side" in table.title)
    assert column(table, "H200 · quick (2) (ms)") == ["200.00"]


def test_files_that_share_no_work_are_one_run():
    found = section(Loaded(cell(), [], "a"), Loaded(cell(size="medium"), [], "b"))
    assert column(found.tables[1], "size") == ["small", "medium"]
    assert "H200," in found.tables[1].title


def test_the_command_names_runs(tmp_path):
    for name, seconds in (("before", 0.1), ("after", 0.3)):
        record.append(tmp_path / name / "records.jsonl", cell("end_to_end", metrics=step(seconds)))
    words = ["-m", "cs336_systems", "report", "before", "after", "-o", "out", "--formats", "md"]
    done = execute(sys.executable, *words, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "| small | 100.00 | 300.00 | 3.00x |" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")


# -- what others have published ---------------------------------------------------------------------------------------


def test_published_work_is_named_by_its_gpu_and_comes_last():
    own = record.load(H200 / "records.jsonl").records
    tables_shown = tables_of(
        "end_to_end",
        group([r for r in own if r.experiment == "end_to_end"]),
        group([r for r in published() if r.experiment == "end_to_end"], PUBLISHED),
    )
    assert ["side by side" in table.title for table in tables_shown] == [False, False, True, True]
    forward = tables_shown[2]
    assert column(forward, "NVIDIA H800 PCIe · published (ms)") == ["27.24", "84.28", "161.45", "326.48", "490.07"]
    assert column(forward, "size") == ["small", "medium", "large", "xl", "2.7B"]
    assert any(note.startswith("published: ") for note in forward.notes)


def test_without_being_asked_for_it_is_not_there():
    assert not [
        table for table in section(Loaded(cell("end_to_end"), []), name="end_to_end").tables if "side" in table.title
    ]
    beside = section(Loaded(cell("end_to_end", mode="forward-backward"), []), references=published(), name="end_to_end")
    assert [table for table in beside.tables if "side by side" in table.title]


def test_published_records_are_records():
    found = published()
    assert [Record.from_dict({**dataclasses.asdict(r), "samples": list(r.samples)}) for r in found] == found
    assert (
        {r.config["size"] for r in found if "size" in r.config}
        == {"small", "medium", "large", "xl", "2.7B"}
        <= set(SIZES)
    )
    assert {r.environment for r in found} == {
        Environment(gpu="NVIDIA H800 PCIe"),
        Environment(gpu="NVIDIA GeForce RTX 4090 D"),
    }
    cells = group(found)
    assert all(one.ok or one.verdict == "OOM" for one in cells)
    # The speed-ups of the write-ups themselves, which they rounded.
    passes = {
        (c.get("size"), c.get("precision")): c.value("backward_time") for c in cells if c.experiment == "precision"
    }
    assert round(passes["2.7B", "fp32"] / passes["2.7B", "bf16"], 2) == 3.04
    attention = {
        (c.get("head_dim"), c.get("seq_len"), c.get("implementation")): c.value("forward_time")
        for c in cells
        if c.experiment == "pytorch_attention" and "H800" in c.machine
    }
    for shape, speedup in {(16, 16384): 2.701, (32, 256): 0.516, (64, 8192): 2.140, (128, 16384): 1.781}.items():
        assert attention[(*shape, "reference")] / attention[(*shape, "compiled")] == pytest.approx(speedup, abs=2e-3)
    # A hundred passes.
    (once,) = [c for c in cells if "4090" in c.machine and (c.get("head_dim"), c.get("seq_len")) == (128, 8192)
               and c.get("implementation") == "compiled"]  # fmt: skip
    assert once.value("backward_time") == pytest.approx(34.0381e-3)


def test_titles_headings_and_notes_in_chinese():
    found = shared(cell(), cell(environment=OTHER))
    for table in found.values():
        for text in (table.title, *table.notes):
            assert in_chinese(text) != text
    assert in_chinese("NVIDIA H800 PCIe · published") == "NVIDIA H800 PCIe · 已发表"
