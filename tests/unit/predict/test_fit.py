"""Predictions before anything is paid for: what fits on a GPU, and the parts of a step's memory."""

import dataclasses
import re
from decimal import Decimal
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.benchmark.calculate_memory import describe, memory_table
from cs336_systems.config import MODES, PRECISIONS, ModelConfig, RunConfig, UserError, model_config
from cs336_systems.predict.fit import (
    CONTEXT_RESERVE,
    GPU_MEMORY,
    LARGEST_BATCH,
    MODEL_ERROR,
    FitArguments,
    fit_table,
    gpu_bytes,
    largest_batch,
)
from cs336_systems.predict.memory_model import breakdown, estimate
from cs336_systems.record import GIB

MINUTE = ModelConfig(vocab_size=16, context_length=1, d_model=8, num_layers=1, num_heads=1, d_ff=8)


def on_gpu(size, *, context=None, **fields):
    overrides = {"context_length": context} if context else {}
    return RunConfig(model=model_config(size, **overrides), device="cuda", **fields)


@cache
def peak(config, batch):
    return estimate(dataclasses.replace(config, batch_size=batch)).peak


# -- the GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * GIB),
        ("24 GiB", 24 * GIB),
        ("24gib", 24 * GIB),
        ("24", 24 * GIB),
        ("24G", 24 * GIB),
        ("0.5", GIB // 2),
        ("80GB", 80 * 10**9),
        ("80 gb", 80 * 10**9),
        ("141.5GB", 141_500_000_000),
    ],
)
def test_memory_by_number(text, size):
    assert gpu_bytes(text) == size


@pytest.mark.parametrize("text", ["4090", "RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090"])
def test_a_4090_is_a_card_and_not_4090_gib(text):
    assert gpu_bytes(text) == int(GPU_MEMORY["4090"] * GIB)
    assert 22 * GIB < gpu_bytes(text) < 24 * GIB


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [("H200", 130, 141), ("NVIDIA H200", 130, 141), ("a100", 78, 80), ("A100-40GB", 38, 40), ("Tesla T4", 14, 16)],
)
def test_memory_by_name(text, low, high):
    assert low * GIB < gpu_bytes(text) < high * GIB


@pytest.mark.parametrize("text", ["", "nonsense", "-24", "1e3GiB", "24MB", "24GiB!", "inf", "nan"])
def test_an_unknown_gpu_is_named_and_the_known_ones_listed(text):
    with pytest.raises(UserError) as refusal:
        gpu_bytes(text)
    message = str(refusal.value)
    assert repr(text) in message
    assert "24GiB" in message
    assert "4090" in message
    assert "H200" in message.upper()
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("text", ["0", "0GiB", "0.0", "0.0000000000001GB"])
def test_no_memory_is_refused(text):
    with pytest.raises(UserError, match="must be above 0"):
        gpu_bytes(text)


@pytest.mark.parametrize("text", ["RTX 4070", "4070", "RTX 3060", "1080", "9" * 400], ids=lambda text: text[:8])
def test_a_card_that_is_not_known_is_not_taken_for_thousands_of_gib(text):
    with pytest.raises(UserError):
        gpu_bytes(text)


# -- the largest batch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", MODES)
def test_the_largest_batch_is_the_one_that_trying_all_gives(mode, precision):
    config = on_gpu("tiny", context=64, mode=mode, precision=precision)
    peaks = {batch: peak(config, batch) for batch in range(1, 50)}
    budgets = [peaks[1] - 1, *(peaks[batch] + shift for batch in (1, 2, 3, 7, 16, 31, 40) for shift in (-1, 0, 1))]
    for budget in budgets:
        by_trying_all = max((batch for batch in peaks if peaks[batch] <= budget), default=0)
        assert largest_batch(config, budget) == by_trying_all


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["tiny", "small"]),
    st.sampled_from(MODES),
    st.sampled_from(PRECISIONS),
    st.sampled_from([0, 1, 4]),
    st.floats(0.1, 8),
)
def test_the_batch_fits_and_one_more_does_not(size, mode, precision, checkpoint_blocks, gib):
    config = on_gpu(size, context=128, mode=mode, precision=precision, checkpoint_blocks=checkpoint_blocks)
    batch = largest_batch(config, gib * GIB)
    assert batch == 0 or peak(config, batch) <= gib * GIB
    assert peak(config, batch + 1) > gib * GIB


def test_the_batch_of_the_configuration_itself_does_not_matter():
    config = on_gpu("tiny")
    assert largest_batch(config, GIB) == largest_batch(dataclasses.replace(config, batch_size=999), GIB) > 0


def test_a_batch_without_end_is_given_as_the_limit_or_exactly():
    config = RunConfig(model=MINUTE, mode="inference", device="cuda")
    assert peak(config, LARGEST_BATCH) < 24 * GIB
    batch = largest_batch(config, 24 * GIB)
    assert batch == LARGEST_BATCH or peak(config, batch) <= 24 * GIB < peak(config, batch + 1)


# -- the table --------------------------------------------------------------------------------------------------------


def test_each_cell_of_the_table_is_the_largest_batch_and_its_peak():
    arguments = FitArguments(gpu="2GiB", sizes=("tiny", "small"), context_lengths=(64, 256), precision="bf16")
    table = fit_table(arguments)
    budget = (2 * GIB - CONTEXT_RESERVE) / (1 + MODEL_ERROR)
    assert [column.heading for column in table.columns] == ["size", "context 64", "context 256"]
    for size, *cells in table.rows:
        for context, cell in zip((64, 256), cells, strict=True):
            config = on_gpu(size, context=context, precision="bf16")
            batch = largest_batch(config, budget)
            assert cell == f"{batch or '-'} ({peak(config, batch or 1) / GIB:.1f})"
    assert [row[0] for row in table.rows] == ["tiny", "small"]
    assert table.rows[0][1] > "1"
    assert table.rows[1][1].startswith("- (")


def test_the_table_names_the_largest_model_that_fits():
    table = fit_table(FitArguments(gpu="24GiB", context_lengths=(128, 1024, 2048)))
    rows = {row[0]: row[1:] for row in table.rows}
    assert list(rows) == ["small", "medium", "large", "xl", "2.7B"]
    batch = rows["large"][1].split()[0]
    assert batch.isdigit()
    assert rows["large"][2].startswith("-")
    assert all(cell.startswith("-") for cell in [*rows["xl"], *rows["2.7B"]])
    assert table.notes[0] == f"largest model that fits: large, up to context 1024 with batch {batch}"


def test_the_largest_model_is_found_in_whatever_order_sizes_are_given():
    table = fit_table(FitArguments(gpu="24GiB", sizes=("large", "tiny", "small"), context_lengths=(256, 128)))
    assert table.notes[0].startswith("largest model that fits: large, up to context 256 ")


def test_on_1_gib_nothing_of_the_course_fits_and_the_table_says_so():
    table = fit_table(FitArguments(gpu="1GiB", context_lengths=(128, 512)))
    assert all(cell.startswith("- (") for row in table.rows for cell in row[1:])
    assert "none of these fits" in table.notes
    assert not any("largest model" in note for note in table.notes)


def test_the_way_out_that_is_offered_does_fit():
    table = fit_table(FitArguments(gpu="24GiB", sizes=("medium",), context_lengths=(1024, 4096)))
    (offer,) = [note for note in table.notes if "would fit with" in note]
    found = re.fullmatch(r"medium at context 4096 would fit with (.*) \(batch (\d+)\)", offer)
    words = found[1].split()
    flags = dict(zip((word.removeprefix("--") for word in words[::2]), words[1::2], strict=True))
    config = on_gpu("medium", context=4096, attention=flags.pop("attention"))
    assert flags == {}
    budget = (24 * GIB - CONTEXT_RESERVE) / (1 + MODEL_ERROR)
    assert int(found[2]) == largest_batch(config, budget) > 0


def test_no_way_out_is_offered_where_all_fits():
    table = fit_table(FitArguments(gpu="24GiB", sizes=("tiny",), context_lengths=(128,)))
    assert not any("would fit with" in note for note in table.notes)


@pytest.mark.parametrize(
    "wrong", [{"sizes": ("huge",)}, {"context_lengths": (0,)}, {"checkpoint_blocks": -1}, {"gpu": "toaster"}], ids=str
)
def test_a_mistake_is_the_users(wrong):
    with pytest.raises(UserError):
        fit_table(FitArguments(**{"sizes": ("tiny",), "context_lengths": (128,), **wrong}))


# -- calculate_memory -------------------------------------------------------------------------------------------------


def printed_sizes(description):
    """The six figures as printed: four parts, all else, and the total."""
    figures = re.findall(r"^   (?:memory: |内存占用: )?(-?\d+\.\d\d) GiB$", description, re.MULTILINE)
    assert len(figures) == 6
    return [Decimal(figure) for figure in figures]


def check_description(config, lang):
    description = describe(config, lang)
    *parts, total = printed_sizes(description)
    assert sum(parts) == total
    assert min(parts) >= 0
    assert float(total) == pytest.approx(estimate(config).peak / GIB, abs=0.00501)
    assert float(parts[0]) == pytest.approx(breakdown(config).parameters / GIB, abs=0.00501)
    label = {"en": "number of parameters", "zh": "总参数数"}[lang]
    assert f"({label}: {config.model.parameters:,})" in description


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("size", "fields"),
    [
        ("2.7B", {"context": 256}),
        ("xl", {"batch_size": 1}),
        ("small", {"mode": "forward-backward", "batch_size": 3}),
        ("medium", {"mode": "inference"}),
        ("large", {"attention": "sdpa", "checkpoint_blocks": 4}),
        ("tiny", {"mode": "forward", "batch_size": 1}),
    ],
    ids=str,
)
def test_the_printed_parts_add_up_to_the_printed_total(size, fields, precision, lang):
    check_description(on_gpu(size, precision=precision, **fields), lang)


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        ModelConfig,
        vocab_size=st.integers(1, 50_000),
        context_length=st.integers(1, 512),
        d_model=st.integers(1, 48).map(lambda width: 16 * width),
        num_layers=st.integers(1, 8),
        num_heads=st.sampled_from([1, 2, 4, 8]),
        d_ff=st.integers(1, 4096),
    ),
    st.sampled_from(MODES),
    st.sampled_from(PRECISIONS),
    st.integers(1, 16),
    st.sampled_from(["en", "zh"]),
)
def test_the_printed_parts_add_up_whatever_the_shape(model, mode, precision, batch_size, lang):
    config = RunConfig(model=model, mode=mode, precision=precision, batch_size=batch_size, device="cuda")
    check_description(config, lang)


def test_the_description_names_the_run_in_both_languages():
    config = on_gpu("2.7B", context=256, precision="bf16", batch_size=7)
    for lang in ("en", "zh"):
        title = describe(config, lang).splitlines()[1]
        for value in ("2.7B", "bf16", "train-step", "batch 7", "context 256"):
            assert value in title
    assert "3,406,809,600" in describe(config, "zh")
    assert "模型参数" in describe(config, "zh")
    assert "模型" not in describe(config, "en")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_memory_table_shows_the_breakdown(mode, precision):
    config = on_gpu("small", mode=mode, precision=precision)
    table, full = memory_table(config, trace=False), breakdown(config)
    assert [column.heading for column in table.columns] == ["part", "in full (GiB)", "at the peak (GiB)"]
    rows = {name: (in_full, at_peak) for name, in_full, at_peak in table.rows}
    assert len(rows) == len(table.rows)
    assert list(rows)[-1] == "peak"
    assert rows.pop("peak") == ("", f"{full.peak.peak / GIB:.3f}")
    assert {name: at_peak for name, (_, at_peak) in rows.items() if at_peak} == {
        name: f"{size / GIB:.3f}" for name, size in full.peak.parts.items()
    }
    assert rows["parameters"][0] == f"{full.parameters / GIB:.3f}"
    assert ("gradients" in rows) == ("backward" in mode or mode == "train-step")
    assert ("optimizer state" in rows) == (mode == "train-step")
    assert ("weight casts" in rows) == (precision == "bf16")
    assert "128,625,408 parameters" in table.notes
    assert any(f"the peak occurs in {full.peak.where}" in note for note in table.notes)
    assert any("--trace" in note for note in table.notes)
    for value in ("small", mode, precision, "batch 4", "context 512"):
        assert value in table.title
