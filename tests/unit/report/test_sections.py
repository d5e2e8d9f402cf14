"""Tables, charts and findings of any records: order, machines, unknown experiments, odd data; both languages."""

import dataclasses
import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.config import MODES
from cs336_systems.experiments.catalogue import catalogue
from cs336_systems.record import CELL_TIME, Metric
from cs336_systems.report.cells import CellView, by_experiment, group
from cs336_systems.report.presentation import Presentation, every_metric, presentation_of
from cs336_systems.report.sections import charts_of, findings_of, in_order
from cs336_systems.table import FORMATS
from cs336_systems.text import Text
from tests.helpers import records_of_h200
from tests.unit.experiments.attention.attention_cells import SAMPLES as ATTENTION
from tests.unit.experiments.attention.attention_cells import records_of
from tests.unit.experiments.kernels.samples import SAMPLES as KERNELS
from tests.unit.experiments.memory.samples import SAMPLES as MEMORY
from tests.unit.experiments.ranks.samples import SAMPLES as RANKS
from tests.unit.experiments.steps.samples import SAMPLES as STEPS
from tests.unit.report.step_cells import (
    CHINESE,
    GPU,
    OOM,
    cell,
    column,
    entries,
    findings,
    notes,
    numbers,
    rows,
    stated,
    step,
    tables,
)
from tools.pages import CHARTS

SAMPLES = {**STEPS, **KERNELS, **MEMORY}
SAMPLES |= {name: records_of(cells) for name, cells in {**ATTENTION, **RANKS}.items()}
OTHER = dataclasses.replace(GPU, gpu="RTX 4090")


@pytest.mark.parametrize("experiment", SAMPLES)
def test_every_table_renders_in_every_format_and_language(experiment):
    failed = [dataclasses.replace(r, status=OOM, samples=()) for r in SAMPLES[experiment] if r.metric == CELL_TIME]
    found = tables(SAMPLES[experiment])
    assert found
    for table in [*found, *tables(failed)]:
        assert {len(row) for row in table.rows} <= {len(table.columns)}
        for format in FORMATS:  # names of implementations alone are the same in both languages
            assert table.render(format, "en") != table.render(format, "zh") or format == "csv"


# -- order ------------------------------------------------------------------------------------------------------------


def test_experiments_are_in_the_order_of_the_catalogue_and_unknown_ones_last():
    assert in_order(["zzz", *reversed(catalogue()), "aaa"], catalogue()) == [*catalogue(), "aaa", "zzz"]
    records = [*entries("aaa", {}, {"x": (1.0,)}), *cell("precision"), *cell("end_to_end")]
    names = [table.title.en.split(":")[0] for table in tables(records)]
    assert names == ["end_to_end", "end_to_end", "precision", "aaa"]
    assert tables([]) == []


def test_rows_are_sorted_by_size_then_context_then_mode():
    """By width, not by name: `2.7B` and `large` come before `medium` and `small` in the alphabet."""
    grid = itertools.product(["2.7B", "large", "small"], [512, 128, 1024], reversed(MODES))
    _, summary = tables(*(cell(size=size, context=context, mode=mode) for size, context, mode in grid))
    in_rows = itertools.product(["small", "large", "2.7B"], ["128", "512", "1024"], MODES)
    assert rows(summary, "size", "context", "mode") == list(in_rows)


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(4)))
def test_rows_do_not_depend_on_the_order_of_measuring(order):
    fields = [("small", "forward"), ("small", "train-step"), ("large", "inference"), ("2.7B", "inference")]
    cells = [cell(size=size, mode=mode) for size, mode in fields]
    assert tables(*(cells[i] for i in order)) == tables(*cells)


# -- machines ---------------------------------------------------------------------------------------------------------


def two_machines():
    """A faster machine whose cells must not become the baseline of the slower one."""
    times = ((GPU, "fp32", 0.2), (GPU, "bf16", 0.1), (OTHER, "fp32", 0.02), (OTHER, "bf16", 0.005))
    return [
        record
        for machine, precision, seconds in times
        for record in cell("precision", precision=precision, metrics=step(seconds), environment=machine)
    ]


def test_each_machine_has_its_own_tables_charts_and_findings():
    records = two_machines()
    shared, *_, ours, theirs = tables(records)
    assert "side by side" in shared.title.en
    assert [column(table, "speed-up") for table in (ours, theirs)] == [["1.00x", "2.00x"], ["1.00x", "4.00x"]]
    assert ["RTX 4090" in table.title.en for table in (ours, theirs)] == [False, True]
    charts = charts_of(catalogue()["precision"], group(records))
    assert [(chart.name, chart.title.zh.partition(" · ")[2]) for chart in charts] == [
        ("precision-step_time-ratio", ""),
        ("precision-step_time-values", ""),
        ("precision-peak_memory-ratio", ""),
        ("precision-peak_memory-values", ""),
    ]
    assert [text.split(". ")[0] for text in stated(records)] == [
        "Step: RTX 4090 is 14.14 times as fast as H200 (geometric mean of 2).",
        "Peak memory: RTX 4090 and H200 are equal within 2% (geometric mean of 2).",
        "H200: bf16 is 2.0 times as fast as fp32 (small)",
        "RTX 4090: bf16 is 4.0 times as fast as fp32 (small)",
    ]


# -- findings ---------------------------------------------------------------------------------------------------------


def test_at_most_three_findings_for_each_machine_in_their_order():
    sentences = [lambda cells: None, *(lambda cells, n=n: Text(f"sentence {n}", f"第 {n} 句") for n in range(5))]
    experiment = Presentation(name="x", title=Text("x"), question=Text("?"), findings=sentences)
    compared, memory, *found = findings_of(experiment, group([*cell("x"), *cell("x", environment=OTHER)]))
    assert (compared.en.split(":")[0], memory.en.split(":")[0]) == ("Step", "Peak memory")
    assert [text.en for text in found] == [f"{gpu}: Sentence {n}." for gpu in ("H200", "RTX 4090") for n in range(3)]
    assert found[0].zh == "H200：第 0 句。"


def test_no_findings_of_nothing():
    assert all(findings_of(experiment, []) == [] for experiment in catalogue().values())
    assert findings_of(catalogue()["bench"], [CellView("bench", {}, {})]) == []


# -- unknown experiments ----------------------------------------------------------------------------------------------


def test_an_unknown_experiment_is_shown_metric_by_metric():
    found = tables(cell("future", metrics={"overlap": (0.25, 0.75)}), cell("future", size="large", status="oom"))
    (table,) = found
    by_metric = {(name, metric): values for name, metric, *values in table.rows}
    assert by_metric["small 512 train-step fp32", "overlap"] == ["s", "0.5", "0.354", "2"]
    assert by_metric["small 512 train-step fp32", "flops"] == ["FLOP", "5e+12", "0", "1"]
    assert by_metric["large 512 train-step fp32", CELL_TIME] == ["s", "", "", "0"]
    assert (table.title.en, notes(table)) == ("future", ["large 512 train-step fp32: oom"])
    assert findings_of(presentation_of("future", catalogue()), group(cell("future"))) == []


def test_variants_of_an_unknown_experiment_are_named():
    metrics = [Metric("time", "s", [1.0], "naive"), Metric("time", "s", [2.0], "flat"), Metric("kind", "", ["word"])]
    (table,) = every_metric([CellView.of("future", {"size": "small"}, metrics)])
    assert rows(table, "metric", "mean") == [
        ("kind", "word"), (CELL_TIME, "0"), ("naive: time", "1"), ("flat: time", "2"),
    ]  # fmt: skip


# -- odd data ---------------------------------------------------------------------------------------------------------

ODD_SAMPLES = [(), (float("nan"),), (float("inf"), 1.0), (0.0,), (-1.0, -2.0), ("text",), ("a", "b", 4.0), (None,)]


@pytest.mark.parametrize("experiment", SAMPLES)
@pytest.mark.parametrize("samples", ODD_SAMPLES, ids=repr)
def test_odd_samples_raise_nothing(experiment, samples):
    """In each metric alone, and in all."""
    records = SAMPLES[experiment]
    for metric in {record.metric for record in records} - {CELL_TIME}:
        findings(dataclasses.replace(r, samples=samples) if r.metric == metric else r for r in records)
    findings(dataclasses.replace(record, samples=samples) for record in records)


@pytest.mark.parametrize("experiment", SAMPLES)
def test_missing_metrics_and_single_cells_raise_nothing(experiment):
    records = SAMPLES[experiment]
    for metric in {record.metric for record in records}:
        stated(record for record in records if record.metric != metric)
    for one in group(records):
        assert len(stated(one.records)) <= 3


@pytest.mark.parametrize("experiment", SAMPLES)
@pytest.mark.parametrize("value", [None, "words", -1, [], {"a": 1}, "{evil} {0}"], ids=repr)
def test_odd_configurations_raise_nothing(experiment, value):
    for one in group(SAMPLES[experiment]):
        odd = [{**one.config, name: value} for name in one.config]
        for config in (*odd, dict.fromkeys(one.config, value), {}):
            findings_of(catalogue()[experiment], [dataclasses.replace(one, config=config)])


# -- the records of this repository -----------------------------------------------------------------------------------

NAMES = {
    *("MFU", "TFLOP/s", "tokens/s", "busbw", "algbw"),
    *("nsys", "do_bench", "torch.profiler", "softmax"),
    *(
        "auto",
        "reference",
        "compiled",
        "flex",
        "flash_attention_4",
        "torch_varlen",
        "padded",
        "flash_hopper",
        "flash_torch",
        "flash_triton",
    ),
    *("sdpa_cudnn", "sdpa_efficient", "sdpa_flash"),
}
"""Headings that are the same in both languages."""


@pytest.fixture(scope="module")
def h200():
    return [r for file in ("records", "loss_curves") for r in records_of_h200(file)]


@pytest.fixture(scope="module")
def h200_tables(h200):
    return tables(h200)


@pytest.fixture(scope="module")
def h200_findings(h200):
    return {name: findings_of(catalogue()[name], cells) for name, cells in by_experiment(group(h200)).items()}


def test_headings_titles_notes_and_findings_have_chinese(h200_tables, h200_findings):
    headings = {column.name for table in h200_tables for column in table.columns}
    assert {name.en for name in headings if not CHINESE.search(name.zh)} <= NAMES
    texts = [text for table in h200_tables for text in (table.title, *table.notes)]
    texts += itertools.chain(*h200_findings.values())
    assert len(texts) > 100
    assert [text.en for text in texts if not CHINESE.search(text.zh)] == []


def test_every_experiment_has_findings_with_equal_numbers_in_both_languages(h200_findings):
    counts = {name: len(texts) for name, texts in h200_findings.items()}
    assert set(counts.values()) == {1, 2, 3}, counts
    for text in itertools.chain(*h200_findings.values()):
        assert numbers(text.en) == numbers(text.zh)


def test_numbers_of_findings_are_those_of_the_tables(h200_tables, h200_findings):
    """Each number with a unit of time or memory is in a table of its experiment, written the same."""
    shown: dict[str, str] = {}
    for table in h200_tables:
        experiment = table.title.en.split(":")[0]
        shown[experiment] = shown.get(experiment, "") + " ".join(str(text) for row in table.rows for text in row)
        shown[experiment] += " ".join(note.en for note in table.notes)
    medians = {"warmup": ("52.31", "995.85")}  # the table has means
    for experiment, texts in h200_findings.items():
        for number in re.findall(r"([\d.,]+) (?:ms|[MG]iB)\b", " ".join(text.en for text in texts)):
            assert number in shown[experiment] or number in medians.get(experiment, ()), (experiment, number)


def test_charts(h200):
    """The charts of the documents are among them."""
    found = {name: charts_of(catalogue()[name], cells) for name, cells in by_experiment(group(h200)).items()}
    assert {name for name, drawn in found.items() if drawn} >= {
        *("end_to_end", "warmup", "precision", "compile", "fast_step", "peak_memory", "kernels", "memory"),
        *("checkpointing", "pytorch_attention", "flash", "attention_rivals", "flash_leaderboard", "ddp"),
        *("optimizer_sharding", "fsdp", "train"),
    }
    drawn = list(itertools.chain(*found.values()))
    names = [chart.name for chart in drawn]
    assert set(CHARTS.values()) <= set(names)
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[\w-]+", name) for name in names)
    assert all(CHINESE.search(chart.title.zh) for chart in drawn)
    (speed,) = found["precision"]
    assert [point.place for point in speed.series[0].points] == ["small", "medium", "large", "xl", "2.7B"]
    assert speed.series[0].points[-1].y == pytest.approx(5.8, abs=0.05)
    curves = {series.name.en: len(series.points) for series in found["train"][0].series}
    assert curves == dict.fromkeys(("fp32-eager", "bf16-eager", "bf16-fast", "fp32-fast"), 200)
