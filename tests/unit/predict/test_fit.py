"""Predictions for a GPU that is not there: the largest batch that fits, and the parts of a step's memory."""

import dataclasses
import re
from decimal import Decimal
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cs336_systems.config import FAST_PARTS, MODES, PLAIN_PRECISIONS, ModelConfig, RunConfig, UserError, model_config
from cs336_systems.experiments.memory.calculator import describe, memory_table, memory_tables
from cs336_systems.experiments.ranks.plan_cells import PlanArguments, plan_config, plans
from cs336_systems.flags import build
from cs336_systems.predict.activation_plan import RECOMPUTE_ALL
from cs336_systems.predict.building_memory import building_peak
from cs336_systems.predict.fast_memory import fast_estimate
from cs336_systems.predict.fit import (
    CONTEXTS_2026,
    FAST_ERROR,
    LARGEST_BATCH,
    FitArguments,
    fit_tables,
    gpu_bytes,
    largest_batch,
    largest_contexts,
    longest_context,
    safe_peak,
    usable_bytes,
)
from cs336_systems.predict.memory_model import breakdown, estimate
from cs336_systems.predict.memory_planner import block_plans, least_peak, most_economical, plan_memory
from cs336_systems.predict.model_flags import LIMITS, ShapeArguments
from cs336_systems.record import GIB
from cs336_systems.table import Table
from cs336_systems.train.settings import TrainSettings
from tests.helpers import refused


def fit_table(arguments: FitArguments) -> Table:
    """The only table, or that of the first GPU."""
    return fit_tables(arguments)[0]


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
        *((text, 24 * GIB) for text in ("24GiB", "24 GiB", "24gib", "24G")),
        ("0.5GiB", GIB // 2),
        ("80GB", 80 * 10**9),
        ("80 gb", 80 * 10**9),
        ("141.5GB", 141_500_000_000),
        *((text, int(23.5 * GIB)) for text in ("4090", "RTX 4090", "NVIDIA GeForce RTX 4090")),
        ("H200", int(139.8 * GIB)),
        ("a100", int(79.2 * GIB)),
        ("A100-40GB", int(39.4 * GIB)),
        ("Tesla T4", int(14.6 * GIB)),
    ],
)
def test_memory_by_number_or_card(text, size):
    assert gpu_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", "-24", "1e3GiB", "24KB", "24GiB!", "inf", "nan", "RTX 3060", "3060", "4070", "960", "9" * 400],
)
def test_an_unknown_gpu_is_named_and_the_known_ones_listed(text):
    with refused(repr(text), "24GiB", "4090", "h200"):
        gpu_bytes(text)


@pytest.mark.parametrize(
    "text", ["0GiB", "0.0MiB", "0.0000000000001GB", "4070GiB", "9" * 400 + "GB"], ids=lambda text: text[:8]
)
def test_impossible_amounts_of_memory_are_refused(text):
    with pytest.raises(UserError, match="must be above 0"):
        gpu_bytes(text)


@pytest.mark.parametrize("text", ["24", "0.5", "0", "512"])
def test_a_size_of_memory_needs_a_unit(text):
    with refused(f"--gpu '{text}' has no unit; use {text}GiB or {text}GB"):
        gpu_bytes(text)


def test_an_unknown_card_has_the_nearest_one():
    with refused("unknown --gpu 'h101' (did you mean 'h100'?)"):
        gpu_bytes("h101")


# -- the largest batch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", MODES)
def test_bisection_finds_the_largest_batch(mode, precision):
    config = on_gpu("tiny", context=64, mode=mode, precision=precision)
    peaks = {batch: peak(config, batch) for batch in range(1, 34)}
    budgets = [peaks[1] - 1, *(peaks[batch] + shift for batch in (1, 2, 3, 7, 16, 31) for shift in (-1, 0, 1))]
    for budget in budgets:
        expected = max((batch for batch in peaks if peaks[batch] <= budget), default=0)
        assert largest_batch(dataclasses.replace(config, batch_size=999), budget) == expected


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(["tiny", "small"]),
    st.sampled_from(MODES),
    st.sampled_from(PLAIN_PRECISIONS),
    st.sampled_from([0, 1, 4]),
    st.floats(0.1, 8),
)
def test_the_batch_fits_and_one_more_does_not(size, mode, precision, checkpoint_blocks, gib):
    config = on_gpu(size, context=128, mode=mode, precision=precision, checkpoint_blocks=checkpoint_blocks)
    batch = largest_batch(config, gib * GIB)
    assert batch == 0 or peak(config, batch) <= gib * GIB
    assert peak(config, batch + 1) > gib * GIB


def test_the_search_stops_at_the_limit():
    model = ModelConfig(vocab_size=16, context_length=1, d_model=8, num_layers=1, num_heads=1, d_ff=8)
    assert largest_batch(RunConfig(model=model, mode="inference", device="cuda"), 24 * GIB) == LARGEST_BATCH


# -- the table --------------------------------------------------------------------------------------------------------


def test_a_cell_is_the_largest_batch_and_its_peak():
    arguments = FitArguments(gpu="2GiB", sizes=("tiny", "small"), context_lengths=(64, 256), precision="bf16")
    table = fit_table(arguments).plain()
    assert [column.heading() for column in table.columns] == ["size", "context 64", "context 256"]
    assert [row[0] for row in table.rows] == ["tiny", "small"]
    for size, *cells in table.rows:
        for context, cell in zip((64, 256), cells, strict=True):
            config = on_gpu(size, context=context, precision="bf16")
            batch = largest_batch(config, usable_bytes(2 * GIB))
            assert cell == f"{batch or '-'} ({peak(config, batch or 1) / GIB:.1f})"
    assert table.rows[1][1].startswith("- (")


def test_notes_name_the_largest_model_and_a_way_to_fit_the_next():
    arguments = FitArguments(gpu="24GiB", sizes=("xl", "medium", "large"), context_lengths=(1024, 2048))
    table = fit_table(arguments).plain()
    rows = {size: cells for size, *cells in table.rows}
    assert all(cell.startswith("-") for cell in [*rows["xl"], rows["large"][1]])
    batch = rows["large"][0].split()[0]
    assert table.notes[0] == f"largest model that fits: large, up to context 1024 with batch {batch}"
    found = re.fullmatch(r"(\w+) at context (\d+) would fit with (.*) \(batch (\d+)\)", table.notes[-1])
    words = found[3].split()
    flags = dict(zip((word.removeprefix("--") for word in words[::2]), words[1::2], strict=True))
    flags["checkpoint_blocks"] = int(flags.get("checkpoint_blocks", 0))
    config = on_gpu(found[1], context=int(found[2]), **flags)
    assert int(found[4]) == largest_batch(config, usable_bytes(24 * GIB)) > 0


@pytest.mark.parametrize(
    ("gpu", "fields", "flags", "gpus"),
    [
        ("h100", {"precision": "bf16", "attention": "auto", "fast": "on"}, "--optimizer_state bf16", 2),
        ("a100", {}, "--attention auto --precision bf16 --fast on --optimizer_state bf16", 2),
        ("4090", {"precision": "bf16", "attention": "auto", "fast": "on"}, "", 8),
    ],
)
def test_where_weights_and_state_are_too_large_bf16_states_and_more_gpus_are_named(gpu, fields, flags, gpus):
    """Nothing on one GPU with fp32 states fits; both ways out are those of the same commands with these flags."""
    given = {"gpu": gpu, "size": "qwen2.5/7B", "context_lengths": (512, 1024), **fields}
    table = fit_table(FitArguments(**given)).plain()
    assert table.notes[0] == "none of these fits"
    (plan,) = [note for note in table.notes if "ZeRO-3" in note]
    assert plan == f"qwen2.5/7B at context 512 would fit on {gpus} GPUs by ZeRO-3: see cs336 plan --gpus {gpus}"
    for count in (gpus, gpus // 2):
        asked = PlanArguments(size="qwen2.5/7B", context_length=512, gpu=gpu, gpus=count, strategy=("zero3",))
        (found,) = plans(plan_config(asked))
        assert found.fits == (count == gpus)
    named = [note for note in table.notes if "would fit with" in note]
    assert len(named) == bool(flags)
    if flags:
        batch = re.fullmatch(rf"qwen2.5/7B at context 512 would fit with {flags} \(batch (\d+)\)", named[0])[1]
        words = flags.split()
        changed = dict(zip((word.removeprefix("--") for word in words[::2]), words[1::2], strict=True))
        assert fit_table(FitArguments(**{**given, **changed})).plain().rows[0][1].startswith(f"{batch} (")


def test_fp8_is_kept_where_it_can_be():
    """A step in FP8 with a budget fits at least as many sequences as one in bf16."""
    given = {"gpu": "80GiB", "size": "2.7B", "context_length": 16384, "attention": "auto", "fast": "on"}
    note = fit_table(FitArguments(**given, precision="fp8")).plain().notes[-1]
    batch = re.fullmatch(r"2.7B at context 16384 would fit with --memory_budget auto \(batch (\d+)\)", note)[1]
    others = {}
    for precision in ("fp8", "bf16"):
        planned = FitArguments(**given, precision=precision, memory_budget="auto")
        others[precision] = int(fit_table(planned).plain().rows[0][1].split()[0])
    assert int(batch) == others["fp8"] >= others["bf16"]


def test_a_shape_of_ones_own_is_one_row_and_several_gpus_are_rows():
    shape = {"d_model": 512, "num_layers": 6, "num_heads": 8, "d_ff": 1536, "vocab_size": 50304}
    table, times = fit_tables(FitArguments(gpu="4090, 8GiB,h100", context_lengths=(256, 512), **shape))
    assert {row[0] for row in times.rows} == {"4090, 23.5 GiB", "h100, 79.2 GiB"}, "a size of memory has no rates"
    assert [row[0] for row in table.rows] == ["4090, 23.5 GiB", "8GiB", "h100, 79.2 GiB"]
    assert "512/1536/6/8" in table.title.en
    batches = [int(row[1].split()[0]) for row in table.rows]
    assert batches[1] < batches[0] < batches[2]
    tables = fit_tables(FitArguments(gpu="4090,h100", sizes=("tiny", "small"), context_length=128))
    assert [len(found.rows) for found in tables] == [2, 2, 2, 2]
    assert all("on h100, 79.2 GiB" in found.title.en for found in tables[2:])
    assert [row[0] for row in fit_table(FitArguments(size="xl", context_length=128)).rows] == ["xl"]


def test_a_given_batch_fits_or_does_not():
    table = fit_table(FitArguments(gpu="24GiB", sizes=("small", "xl"), context_length=512, batch_size=8)).plain()
    config = on_gpu("small", context=512)
    assert [row[1] for row in table.rows] == [f"8 ({peak(config, 8) / GIB:.1f})", table.rows[1][1]]
    assert table.rows[1][1].startswith("- (")
    assert table.title.startswith("batch (peak GiB)")


def test_building_the_model_is_said_where_it_is_the_peak():
    fields = {"precision": "bf16", "attention": "auto", "fast": "on", "context_length": 128}
    table = fit_table(FitArguments(gpu="h100", size="2.7B", vocab_size=151936, batch_size=1, **fields)).plain()
    assert table.rows[0][1] == "1 (59.7*)"
    assert any("building the model" in note for note in table.notes)
    small = fit_table(FitArguments(gpu="56GiB", size="2.7B", vocab_size=151936, **fields)).plain()
    assert small.rows[0][1].startswith("- (")


@pytest.mark.parametrize("name", LIMITS)
def test_absurd_sizes_end_at_once(name):
    with pytest.raises(UserError, match=name):
        fit_table(FitArguments(**{name: 10**12, **({"num_heads": 2} if name == "d_model" else {})}))


def test_a_table_where_nothing_fits_and_one_where_all_does():
    small = fit_table(FitArguments(gpu="1GiB", sizes=("xl", "2.7B"), context_lengths=(512,))).plain()
    assert all(cell.startswith("- (") for row in small.rows for cell in row[1:])
    assert small.notes[0] == "none of these fits"
    large = fit_table(FitArguments(gpu="24GiB", sizes=("tiny",), context_lengths=(128,))).plain()
    assert not any("would fit with" in note for note in large.notes)


def test_flags_that_fit_more_are_named_where_everything_fits():
    """With the batch that the same command finds with them; not where they are on, or a batch is asked for."""
    flags = {"gpu": "80GiB", "sizes": ("small",), "context_lengths": (256, 512), "precision": "bf16"}
    table = fit_table(FitArguments(**flags)).plain()
    found = re.fullmatch(r"small at context 512: batch (\d+) -> (\d+) with --attention auto --fast on", table.notes[-1])
    assert found is not None
    assert table.rows[0][2].startswith(f"{found[1]} (")
    fast = fit_table(FitArguments(**flags, attention="auto", fast="on")).plain()
    assert fast.rows[0][2].startswith(f"{found[2]} (")
    others = ({"attention": "auto", "fast": "on"}, {"batch_size": 2}, {"mode": "forward"}, {"memory_budget": "auto"})
    for other in others:
        assert not any("->" in note for note in fit_table(FitArguments(**flags, **other)).plain().notes), other


def test_the_table_in_chinese():
    table = fit_table(FitArguments(gpu="24GiB", sizes=("medium",), context_lengths=(4096,))).plain("zh")
    assert [column.heading() for column in table.columns] == ["规模", "上下文 4096"]
    assert "最大 batch" in table.title
    assert table.notes[0] == "以上配置都放不下"
    assert "--attention auto" in table.notes[-1]


# -- calculate_memory -------------------------------------------------------------------------------------------------


def check_description(config, lang):
    """The four parts, the rest and the total, as printed, add up."""
    description = describe(config, lang)
    figures = re.findall(r"^   (?:memory: |内存占用: )?(-?\d+\.\d\d) GiB$", description, re.MULTILINE)
    assert len(figures) == 6
    *parts, total = map(Decimal, figures)
    assert sum(parts) == total
    assert min(parts) >= 0
    assert float(total) == pytest.approx(estimate(config).peak / GIB, abs=0.00501)
    assert float(parts[0]) == pytest.approx(breakdown(config).parameters / GIB, abs=0.00501)
    label = {"en": "number of parameters", "zh": "总参数数"}[lang]
    assert f"({label}: {config.model.parameters:,})" in description


@settings(max_examples=30, deadline=None)
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
    st.sampled_from(PLAIN_PRECISIONS),
    st.sampled_from(["reference", "sdpa"]),
    st.sampled_from([0, 4]),
    st.integers(1, 16),
    st.sampled_from(["en", "zh"]),
)
@example(model_config("2.7B", context_length=256), "train-step", "fp32", "reference", 0, 4, "en")
@example(model_config("xl"), "train-step", "bf16", "reference", 0, 1, "zh")
def test_the_printed_parts_add_up_for_any_shape(model, mode, precision, attention, checkpoint_blocks, batch_size, lang):
    fields = {"mode": mode, "precision": precision, "attention": attention, "checkpoint_blocks": checkpoint_blocks}
    check_description(RunConfig(model=model, batch_size=batch_size, device="cuda", **fields), lang)


def test_the_description_names_the_run_in_both_languages():
    config = on_gpu("2.7B", context=256, precision="bf16", batch_size=7)
    for lang in ("en", "zh"):
        title = describe(config, lang).splitlines()[1]
        assert all(value in title for value in ("2.7B", "bf16", "train-step", "batch 7", "context 256"))
    assert "3,406,809,600" in describe(config, "zh")
    assert "模型参数" in describe(config, "zh")
    assert "模型" not in describe(config, "en")


@pytest.mark.parametrize(
    ("fields", "said"),
    [({}, True), ({"precision": "bf16"}, True), ({"attention": "auto"}, False), ({"fast": "on"}, False),
     ({"mode": "forward"}, False)],
)  # fmt: skip
def test_a_reference_step_is_told_from_that_of_train(fields, said):
    tables = memory_table(on_gpu("small", **fields), trace=False), fit_table(FitArguments(sizes=("small",), **fields))
    for table in tables:
        assert any("`cs336 train`" in note for note in table.plain().notes) == said, table.title
    trained = build(TrainSettings, {"data": __file__}).run_config("cuda", 1)
    assert (trained.attention, trained.fast_parts) == ("auto", frozenset(FAST_PARTS)), "the note says what train has"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_memory_table_shows_the_breakdown(mode, precision):
    config = on_gpu("small", mode=mode, precision=precision)
    table, full = memory_table(config, trace=False).plain(), breakdown(config)
    assert [column.heading() for column in table.columns] == ["part", "in full (GiB)", "at the peak (GiB)"]
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
    assert all(value in table.title for value in ("small", mode, precision, "batch 4", "context 512"))


# -- the largest contexts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["small", "large", "2.7B"])
@pytest.mark.parametrize("gib", [1, 24, 80, 140])
def test_the_largest_contexts_end_with_the_last_that_fits(size, gib):
    config = RunConfig(model=model_config(size), device="cuda")

    def peak(context: int) -> int:
        return estimate(dataclasses.replace(config, model=model_config(size, context_length=context))).peak

    found = largest_contexts(config, gib * GIB)
    assert len(found) == 3
    assert [b // a for a, b in pairwise(found)] == [2, 2]
    fitting = [context for context in CONTEXTS_2026 if peak(context) <= gib * GIB]
    assert found == (fitting[-3:] if len(fitting) >= 3 else list(CONTEXTS_2026[:3]))


def test_a_gpu_on_which_all_contexts_fit_has_the_largest():
    assert largest_contexts(RunConfig(model=model_config("tiny"), device="cuda"), 1e15) == list(CONTEXTS_2026[-3:])


# -- memory budgets ---------------------------------------------------------------------------------------------------

PLANNED = {"fast": "on", "precision": "bf16", "attention": "auto", "memory_budget": "auto"}


def test_a_budget_fits_more_than_keeping_everything_and_its_plan_exists():
    arguments = FitArguments(gpu="2GiB", sizes=("tiny",), context_lengths=(64, 256), **PLANNED)
    table = fit_table(arguments).plain()
    assert "memory budget auto" in table.title
    for context, text in zip((64, 256), table.rows[0][1:], strict=False):
        batch, budget = int(text.split()[0]), int(usable_bytes(2 * GIB))
        config = on_gpu("tiny", context=context, **PLANNED)
        assert batch > largest_batch(dataclasses.replace(config, memory_budget=""), budget)
        fitting, beyond = (dataclasses.replace(config, batch_size=batch + more) for more in (0, 1))
        assert plan_memory(fitting, budget).estimate.peak <= budget
        with refused("is not enough"):
            plan_memory(beyond, budget)


def test_a_budget_below_the_memory_of_the_gpu_counts():
    found = [
        fit_table(
            FitArguments(gpu="8GiB", sizes=("tiny",), context_lengths=(128,), **{**PLANNED, "memory_budget": budget})
        ).rows[0][1]
        for budget in ("1GiB", "auto", "99GiB")
    ]
    assert int(found[0].split()[0]) < int(found[1].split()[0])
    assert found[1] == found[2]


def test_host_memory_limits_what_is_offloaded():
    config = on_gpu("small", context=1024, **PLANNED)
    free, limited, without = (largest_batch(config, 8 * GIB, host) for host in (float("inf"), GIB, 0))
    assert free > limited > without > 0
    planned = most_economical(dataclasses.replace(config, batch_size=limited), host_limit=GIB)
    assert 0 < planned.host_bytes <= GIB
    with refused("--host_memory", "--memory_budget auto"):
        fit_tables(FitArguments(host_memory="64GiB"))
    with refused("--host_memory 'much'", "128GiB"):
        fit_tables(FitArguments(host_memory="much", **PLANNED))


def test_a_budget_that_is_no_size_is_refused():
    with refused("memory_budget '70%' is not a size"):
        fit_tables(FitArguments(sizes=("small",), **{**PLANNED, "memory_budget": "70%"}))


def test_the_longest_context_fits_and_128_tokens_more_do_not():
    for fields in ({**PLANNED, "memory_budget": ""}, PLANNED):
        config = on_gpu("tiny", batch_size=3, **fields)
        budget = GIB // 2
        context = longest_context(config, budget)
        peaks = [
            (most_economical(longer).estimate if longer.memory_budget else estimate(longer)).peak
            for longer in (on_gpu("tiny", context=context + more, batch_size=3, **fields) for more in (0, 128))
        ]
        assert context % 128 == 0
        assert peaks[0] <= budget < peaks[1]
    assert longest_context(config, 1.0) == 0


def test_the_longest_context_is_a_column_of_the_fast_step():
    arguments = FitArguments(gpu="1GiB", sizes=("tiny",), context_lengths=(64,), fast="on", attention="auto")
    table = fit_table(arguments).plain()
    assert table.columns[-1].heading() == "longest, batch 1"
    config = on_gpu("tiny", fast="on", attention="auto", batch_size=1)
    assert table.rows[0][-1] == f"{longest_context(config, usable_bytes(GIB, FAST_ERROR)):,}"


def test_the_longest_context_is_the_one_that_an_h200_ran():
    """It ran 42,624 tokens of 2.7B; 42,752, the next that `fit` tries, were out of memory."""
    arguments = FitArguments(
        gpu="h200", sizes=("2.7B",), context_lengths=(4096,), fast="on", precision="bf16", attention="auto"
    )
    assert fit_table(arguments).plain().rows[0][-1] == "42,624"


def test_a_plan_is_suggested_before_recomputing_everything():
    arguments = FitArguments(gpu="24GiB", sizes=("large",), context_lengths=(16384,), batch_size=0)
    note = fit_table(arguments).plain().notes[-1]
    assert "--fast on --memory_budget auto" in note
    batch = int(re.search(r"batch (\d+)", note)[1])
    assert batch == largest_batch(on_gpu("large", context=16384, **PLANNED), usable_bytes(24 * GIB))


def test_the_plan_names_each_block_once_and_adds_up():
    config = on_gpu("small", context=1024, **{**PLANNED, "memory_budget": "2.2GiB"})
    parts, plan = (table.plain() for table in memory_tables(config))
    numbers = []
    for row in plan.rows:
        for text in row[0].split("; "):
            first, *_, last = re.findall(r"\d+", text) * 2
            step = int(re.findall(r"\d+", text)[1]) - int(first) if "..." in text else 1
            numbers += range(int(first), int(last) + 1, step)
    assert sorted(numbers) == list(range(12))
    planned = plan_memory(config, int(2.2 * GIB))
    assert f"{planned.estimate.peak / GIB:.2f} GiB" in plan.notes[0]
    assert f"{planned.host_bytes / GIB:.2f} GiB" in plan.notes[1]
    kept = {row[0]: row for row in parts.rows}["activations"]
    everything = memory_table(dataclasses.replace(config, memory_budget=""), trace=False).plain()
    assert float(kept[1]) < float({row[0]: row for row in everything.rows}["activations"][1])


@pytest.mark.parametrize(
    ("fields", "gpu"),
    [
        ({}, "h200"),
        ({}, "24GiB"),
        ({"fast": "off"}, "4090"),
        ({"batch_size": 1, "size": "llama3/8B"}, "h100"),  # building is the peak
        ({"memory_budget": "20GiB"}, "4090"),
    ],
)
def test_memory_says_whether_a_step_fits_on_a_card(fields, gpu):
    """With the memory that `fit` counts as usable: both say the same."""
    given = {"size": "large", "context_length": 1024, "batch_size": 8, "precision": "bf16", "attention": "auto"}
    given |= {"fast": "on", **fields}
    config = ShapeArguments(**given).predicted_config()
    note = memory_tables(config, gpu=gpu)[0].plain().notes[0]
    peak = max(estimate(config).peak, building_peak(config).peak)
    usable = safe_peak(gpu_bytes(gpu), config)
    fits = peak <= usable
    figures = f"{peak / GIB:.1f} of {usable / GIB:.1f} GiB usable ({(usable - peak) / GIB:.1f} GiB to spare)"
    assert note.startswith("fits on" if fits else "does not fit on")
    assert (figures in note) == fits
    if not config.memory_budget:
        text = fit_table(FitArguments(**{**given, "gpu": gpu})).plain().rows[0][1]
        assert text.startswith("-") == (not fits)


def test_auto_needs_a_card():
    config = on_gpu("small", context=1024, **PLANNED)
    with refused("--memory_budget auto", "--gpu h200"):
        memory_tables(config)
    with refused("unknown --gpu 'h900'"):
        memory_tables(config, gpu="h900")
    with refused("unknown --gpu 'h900'"):
        memory_tables(dataclasses.replace(config, memory_budget=""), gpu="h900")
    _, plan = memory_tables(config, gpu="4090")
    assert "22.45 GiB on 4090" in plan.title.en


@pytest.mark.parametrize("context", [128, 4096])
def test_no_plan_has_a_lower_peak_than_the_most_economical(context):
    config = on_gpu("small", context=context, batch_size=8, **{**PLANNED, "memory_budget": ""})
    least = most_economical(config).estimate.peak
    for own in block_plans():
        assert fast_estimate(config, (own,) * 11 + (RECOMPUTE_ALL,)).peak >= least


def test_every_budget_from_the_least_peak_on_has_a_plan():
    config = on_gpu("small", context=4096, batch_size=64, **{**PLANNED, "memory_budget": ""})
    least = least_peak(config)
    everything = estimate(config).peak
    for share in (0.0, 0.01, 0.03, 0.1, 0.5):
        budget = int(least + share * (everything - least))
        assert plan_memory(config, budget).estimate.peak <= budget
    with refused("is not enough", f"{least / GIB:.2f} GiB"):
        plan_memory(config, least - 1)
