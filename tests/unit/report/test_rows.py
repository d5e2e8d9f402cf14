"""Rows: how numbers are written, how rows and tables are named."""

import pytest

from cs336_systems.record import GIB, summarize
from cs336_systems.report.cells import group
from cs336_systems.report.rows import (
    FIELDS,
    as_text,
    cell_table,
    gib,
    kernel_ms,
    ms,
    number,
    percent,
    ratio,
    row_name,
    shortened,
    spread,
    tflops,
    title_of,
    titled,
    varying,
)
from cs336_systems.table import Column
from cs336_systems.text import Text
from tests.unit.report.step_cells import OOM, cell

WRITTEN = [
    (number, (1234.567,), "1,234.57"),
    (number, (1234.567, 0), "1,235"),
    (number, (None,), "N/A"),
    (ms, (0.0123456,), "12.35"),
    (ms, (1.5,), "1,500.0"),
    (ms, (None,), ""),
    (kernel_ms, (0.0123456,), "12.346"),
    (kernel_ms, (0.25,), "250.0"),
    (kernel_ms, (None,), ""),
    (tflops, (50e12,), "50.0"),
    (tflops, (12.345e9,), "0.012"),
    (tflops, (1.234e9,), "0.0012"),
    (tflops, (None,), "N/A"),
    (gib, (10 * GIB,), "10.00"),
    (gib, (5 * 2**20,), "0.0049"),
    (gib, (None,), ""),
    (percent, (0.1234,), "12.3%"),
    (percent, (0.1234, 2), "12.34%"),
    (percent, (None,), "N/A"),
    (ratio, (3.0, 2.0), "1.50x"),
    (ratio, (3.0, None), ""),
    (ratio, (3.0, 0.0), ""),
    (spread, (summarize([0.1, 0.3]),), "200.00 ± 141.42"),
    (spread, (None,), ""),
    (as_text, (True,), "yes"),
    (as_text, (None,), ""),
    (as_text, ("cs336_systems.experiments.steps.llama:build",), "llama:build"),
    (as_text, ("cs336_systems.benchmark.llama:build",), "llama:build"),
    (shortened, ("a" * 91,), "a" * 89 + "…"),
    (shortened, ("a" * 90,), "a" * 90),
]


@pytest.mark.parametrize(("write", "arguments", "text"), WRITTEN, ids=lambda value: getattr(value, "__name__", None))
def test_written_as(write, arguments, text):
    assert write(*arguments) == text


# -- names ------------------------------------------------------------------------------------------------------------

DIFFERENCES = {
    "context_length": {"context": 256},
    "batch_size": {"batch_size": 8},
    "mode": {"mode": "forward"},
    "precision": {"precision": "bf16"},
    "attention": {"attention": "sdpa"},
    "checkpoint_blocks": {"checkpoint_blocks": 4},
    "compile": {"compile": True},
    "warmup_steps": {"warmup_steps": 1},
    "model_factory": {"model_factory": "package.module:build"},
    "vocab_size": {"vocab": 50_257},
}


def titles(*records) -> Text:
    cells = group(record for own in records for record in own)
    return title_of("bench", Text("subject", "主题"), cells, varying(cells))


@pytest.mark.parametrize("field", DIFFERENCES)
class TestDifferentWork:
    def test_differs_in_a_column(self, field):
        cells = group([*cell(), *cell(**DIFFERENCES[field])])
        assert varying(cells) == [name for name in FIELDS if name in ("size", field)]
        shown = varying(cells)
        assert row_name(cells[0], shown) != row_name(cells[1], shown)

    def test_differs_in_the_title_where_all_rows_agree(self, field):
        assert titles(cell(**DIFFERENCES[field])) != titles(cell())


def test_the_title_names_the_machine_and_the_settings_of_all_rows():
    assert titles(cell(mode="forward"), cell(mode="train-step")) == Text(
        "bench: subject · H200, context 512, batch 4, fp32, attention reference",
        "bench：主题 · H200，context 512，batch 4，fp32，注意力 reference",
    )
    assert titled("bench", Text("subject", "主题")) == Text("bench: subject", "bench：主题")


def test_numbers_and_yes_or_no_in_a_row_name_have_their_heading():
    (found,) = group(cell(compile=True, context=128))
    assert row_name(found, ["size", "context_length", "compile"]) == Text(
        "small context 128 compiled yes", "small context 128 编译 是"
    )


def test_a_row_is_its_fields_then_its_values_or_its_verdict():
    cells = group([*cell(), *cell(size="xl", status=OOM)])
    columns = [Column(Text("step"), "ms"), Column(Text("peak"), "GiB")]
    table = cell_table(Text("subject"), cells, ["size"], columns, lambda cell: [ms(cell.value("step_time")), "1"])
    assert table.rows == [["small", "100.00", "1"], ["xl", "OOM", ""]]
    assert [column.heading("zh") for column in table.columns] == ["规模", "step (ms)", "peak (GiB)"]
    assert [note.en for note in table.notes] == [f"xl: {OOM}"]
