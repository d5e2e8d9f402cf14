"""Step times in `cs336 fit`: of the step that the same flags would run, and days and money from them."""

import subprocess
import sys

import pytest

from cs336_systems.config import RunConfig, model_config
from cs336_systems.predict.fit import FitArguments, fit_tables
from cs336_systems.predict.gpus import find_card
from cs336_systems.predict.time.gpu_profile import profile_of
from cs336_systems.predict.time.time_model import step_time
from cs336_systems.predict.training_cost import Cost, CostArguments, parse_price, parse_tokens
from tests.helpers import refused

FAST = {"fast": "on", "precision": "bf16", "attention": "auto"}


def times_of(table):
    """Rows as numbers: context, batch, milliseconds, tokens per second, MFU in percent."""
    plain = table.plain()
    rows = [[cell.split(" ")[0].replace(",", "").rstrip("%") for cell in row[1:]] for row in plain.rows]
    return [list(map(float, row)) for row in rows]


def test_a_row_is_the_predicted_step_of_a_batch_that_fits():
    memory, times = fit_tables(FitArguments(gpu="h200", sizes=("small", "2.7B"), context_lengths=(512, 1024), **FAST))
    batches = [cell.split()[0] for row in memory.rows for cell in row[1:-1]]
    assert [row[2] for row in times.rows] == batches
    for row, (context, batch, ms, rate, mfu) in zip(times.rows, times_of(times), strict=True):
        model = model_config(row[0], context_length=int(context))
        found = step_time(
            RunConfig(model=model, batch_size=int(batch), device="cuda", **FAST), profile_of(find_card("h200"))
        )
        assert ms == pytest.approx(1e3 * found.seconds, rel=1e-3)
        assert rate == pytest.approx(found.tokens_per_second, rel=1e-3)
        assert mfu == pytest.approx(100 * found.mfu(989.4e12), abs=0.06)


def test_days_and_money_are_of_the_rate_in_the_same_row():
    arguments = FitArguments(gpu="h200", size="2.7B", context_length=1024, train_tokens="300B", price="2.5/h", **FAST)
    _, times = fit_tables(arguments)
    assert [column.heading() for column in times.columns][-2:] == ["days", "cost"]
    *_, rate, _, days, cost = times_of(times)[0]
    assert days == pytest.approx(300e9 / rate / 86_400, rel=0.01)
    assert cost == pytest.approx(days * 24 * 2.5, rel=0.01)
    _, without_price = fit_tables(FitArguments(gpu="h200", size="2.7B", train_tokens="1e9", **FAST))
    assert without_price.columns[-1].name.en == "days"


def test_eager_steps_have_a_time_and_launch_bound_ones_are_named():
    _, times = fit_tables(FitArguments(gpu="h200", sizes=("small", "2.7B"), context_length=256, batch_size=4))
    assert [row[0] for row in times.rows] == ["small", "2.7B"]
    (note,) = [note for note in times.notes if note.en.startswith("launch-bound")]
    assert "small, 4 x 256;" in note.en
    assert "2.7B" not in note.en
    assert note.zh != note.en


def test_configurations_that_do_not_fit_have_no_time():
    tables = fit_tables(FitArguments(gpu="4090", sizes=("small", "2.7B"), context_lengths=(512,), **FAST))
    assert [row[0] for row in tables[0].rows] == ["small", "2.7B"]
    assert [row[0] for row in tables[1].rows] == ["small"]


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_the_peak_that_mfu_in_fp8_is_relative_to_is_named(precision):
    fields = {**FAST, "precision": precision}
    table = fit_tables(FitArguments(gpu="h200", size="small", context_length=512, **fields))[1]
    assert any("dense peak of FP8, 1,979 TFLOP/s" in note.en for note in table.notes) == (precision == "fp8")


def test_rates_of_a_data_sheet_are_said_to_be_that_and_wider():
    tables = fit_tables(FitArguments(gpu="4090,h100,h200,24GiB", size="small", context_length=512, **FAST))
    rows = tables[1].rows
    assert [row[0].split(",")[0] for row in rows] == ["4090", "h100", "h200"]
    middle, half = ([float(text.replace(",", "")) for text in row[3].split(" ± ")] for row in (rows[0], rows[2]))
    assert middle[1] / middle[0] == pytest.approx(0.25, abs=0.01)
    assert half[1] / half[0] < 0.1
    (note,) = [note.en for note in tables[1].notes if "data sheet" in note.en]
    assert "RTX 4090, H100" in note
    assert "1.25" in note


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"gpu": "h200", "precision": "fp16"}, "--precision bf16 --attention auto --fast on"),
        ({"gpu": "h200", **FAST, "attention": "sdpa"}, "--attention auto"),
        ({"gpu": "h200", **FAST, "fast": "kernels,loss,optimizer"}, "--fast on"),
        ({"gpu": "h200", **FAST, "mode": "forward-backward"}, "--mode train-step"),
        ({"gpu": "h200", **FAST, "memory_budget": "auto"}, "memory budget"),
        ({"gpu": "80GiB", **FAST}, "--gpu h200"),
        ({"gpu": "b200", **FAST}, "b200"),
    ],
)
def test_a_step_that_is_not_predicted_has_one_note_and_no_table(fields, words):
    (table,) = fit_tables(FitArguments(size="small", context_length=256, **fields))
    (note,) = [note for note in table.notes if note.en.startswith("step time: ")]
    assert words in note.en
    assert note.zh != note.en


@pytest.mark.parametrize(
    ("text", "number"),
    [("300B", 3e11), ("1.5t", 1.5e12), ("20M", 2e7), ("7k", 7e3), ("1e9", 1e9), ("20,000", 2e4), ("15_000", 15e3)],
)
def test_numbers_of_tokens(text, number):
    assert parse_tokens(text) == number


@pytest.mark.parametrize("text", ["nan", "-1", "0", "B", "3 B B", "inf", "1e400", "1e30", "0x10", "300G"])
def test_other_texts_are_refused(text):
    with refused("--train_tokens", repr(text), "300B"):
        parse_tokens(text)


def test_prices():
    assert [parse_price(text) for text in ("2.5", "2.5/h", " 3 / H ")] == [2.5, 2.5, 3.0]
    for text in ("free", "0", "-2", "2.5/d", "nan", "1e99"):
        with refused("--price", repr(text), "2.5/h"):
            parse_price(text)
    with refused("--price", "--train_tokens"):
        CostArguments(price="2.5").cost()


@pytest.mark.parametrize(
    ("days", "text"),
    [(0.0123, "0.012"), (0.996, "1.0"), (14.3, "14.3"), (99.94, "99.9"), (99.96, "100"), (1234.5, "1,234")],
)
def test_days_below_a_hundred_have_a_decimal(days, text):
    assert Cost(tokens=days * 86_400e6).cells(1e6) == [text]


def test_many_gpus_cost_as_many_times_as_much():
    cost = Cost(tokens=86_400e6, price=2.0)
    assert cost.cells(1e6) == ["1.0", "48.0"]
    assert cost.cells(1e6, gpus=1024) == ["1.0", "49,152"]


def test_neither_torch_nor_numpy_is_imported():
    words = "fit --gpu h200 --size small --fast on --precision bf16 --attention auto --train_tokens 1B --price 2"
    code = f"import sys; from cs336_systems.cli import main; main({words.split()!r}); "
    code += "sys.exit(bool({'torch', 'numpy'} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "predicted time of a step" in found.stdout
