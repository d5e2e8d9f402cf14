"""Rows: how numbers are written, how rows and tables are named."""

import re

import pytest

from cs336_systems.config import MODES
from cs336_systems.record import GIB, summarize
from cs336_systems.report import entries, rows
from cs336_systems.report.cells import PHASES, group
from cs336_systems.report.rows import row_name, row_words, title_of, value_text, varying
from cs336_systems.report.terms import phase_name
from cs336_systems.text import Text
from tests.unit.report.step_cells import OOM, cell

LLAMA = "cs336_systems.experiments.steps.llama:build"
WRITTEN = {
    "number": {(1234.567,): "1,234.57", (1234.567, 0): "1,235", (None,): "N/A"},
    "ms": {(0.0123456,): "12.35", (1.5,): "1,500.0", (None,): ""},
    "kernel_ms": {(0.0123456,): "12.346", (0.25,): "250.0", (None,): ""},
    "tflops": {(50e12,): "50.0", (12.345e9,): "0.012", (1.234e9,): "0.0012", (None,): "N/A"},
    "gib": {(10 * GIB,): "10.00", (5 * 2**20,): "0.0049", (None,): ""},
    "percent": {(0.1234,): "12.3%", (0.1234, 2): "12.34%", (None,): "N/A"},
    "ratio": {(3.0, 2.0): "1.50x", (3.0, None): "", (3.0, 0.0): ""},
    "spread": {(summarize([0.1, 0.3]),): "200.00 ± 141.42", (None,): ""},
    "as_text": {(True,): "yes", (None,): "", (LLAMA,): "llama:build", (4,): "4"},
    "shortened": {("a" * 91,): "a" * 89 + "…", ("a" * 90,): "a" * 90},
}
DIFFERENCES = {
    "context_length": {"context": 256},
    "vocab_size": {"vocab": 50_257},
    "batch_size": {"batch_size": 8},
    "mode": {"mode": "forward"},
    "precision": {"precision": "bf16"},
    "attention": {"attention": "sdpa"},
    "checkpoint_blocks": {"checkpoint_blocks": 4},
    "compile": {"compile": True},
    "warmup_steps": {"warmup_steps": 1},
    "model_factory": {"model_factory": "package.module:build"},
}


@pytest.mark.parametrize("function", WRITTEN)
def test_written_as(function):
    written = {arguments: getattr(rows, function)(*arguments) for arguments in WRITTEN[function]}
    assert written == WRITTEN[function]


def title(*records) -> Text:
    cells = group(record for own in records for record in own)
    return title_of("bench", Text("subject", "主题"), cells, varying(cells))


@pytest.mark.parametrize("field", DIFFERENCES)
def test_different_work_differs_in_a_column_or_in_the_title(field):
    cells = group([*cell(), *cell(**DIFFERENCES[field])])
    shown = varying(cells)
    assert set(shown) == {"size", field}
    assert row_name(cells[0], shown) != row_name(cells[1], shown)
    assert title(cell(**DIFFERENCES[field])) != title(cell())


def test_the_title_names_the_machine_and_the_settings_of_all_rows():
    assert title(cell(mode="forward"), cell(mode="train-step")) == Text(
        "bench: subject · H200, context 512, batch 4, fp32, attention reference",
        "bench：主题 · H200，上下文长度 512，批大小 4，fp32，注意力 reference",
    )


def test_numbers_and_yes_or_no_in_a_row_name_have_their_heading():
    (found,) = group(cell(compile=True, context=128))
    name = row_name(found, ["size", "context_length", "compile"])
    assert name == Text("small context 128 compiled yes", "small 上下文长度 128 编译 是")


def test_words_for_a_row():
    (found,) = group(cell(compile=True, context=128, attention="reference"))
    assert row_words(found, ["size", "context_length", "mode", "attention", "compile"]) == [
        Text("small"),
        Text("context 128", "上下文长度 128"),
        Text("training step", "训练步"),
        Text("naive attention", "朴素注意力"),
        Text("compiled", "编译"),
    ]


@pytest.mark.parametrize("field", DIFFERENCES)
def test_words_for_a_row_have_no_identifiers(field):
    (found,) = group(cell(**DIFFERENCES[field]))
    assert not any(re.search(r"_|-step|:|/", word.en) for word in row_words(found, ["size", field]))


def test_a_row_has_its_fields_then_its_values_or_its_verdict():
    cells = group([*cell(), *cell(size="xl", status=OOM)])
    columns = [entries.of(Text("step"), lambda cell: cell.get("precision"), "ms")]
    columns += [entries.of(Text("peak"), lambda cell: "1", "GiB")]
    table = entries.cell_table(Text("subject"), cells, columns)
    assert table.rows == [["small", "fp32", "1"], ["xl", "OOM", ""]]
    assert [column.heading("zh") for column in table.columns] == ["规模", "step (ms)", "peak (GiB)"]
    assert [note.en for note in table.notes] == [f"xl: {OOM}"]


def test_modes_phases_and_answers_in_tables_are_words_in_chinese():
    """In English they are what flags take."""
    both = [value_text("mode", mode) for mode in MODES]
    assert [text.en for text in both] == list(MODES)
    assert [text.zh for text in both] == ["推理", "前向", "前向加反向", "训练步"]
    assert [value_text("compile", text) for text in ("yes", "no")] == [Text("yes", "是"), Text("no", "否")]
    assert value_text("precision", "bf16") == Text("bf16")
    names = [phase_name(phase) for phase in (*PHASES, "all")]
    assert [name.en for name in names] == [*PHASES, "all"]
    assert [name.in_("zh") for name in names] == ["前向", "损失", "反向", "同步", "优化器", "单步", "all"]
