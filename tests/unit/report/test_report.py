"""The report as a function of records: derived numbers, rows, order, and what is remarked on."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.config import MODES, RunConfig, model_config
from cs336_systems.record import CELL_TIME, Environment
from cs336_systems.report.cells import group
from cs336_systems.report.referee import remarks
from cs336_systems.report.sections import tables
from cs336_systems.table import FORMATS
from tests import helpers

GIB = 2**30
GPU = Environment(gpu="H200", gpu_count=1, gpu_memory=140 * GIB, tf32=False, other_gpu_processes=0)
CPU = Environment(cpu="Xeon", cpu_cores=8)

# A step of 100 ms over 4 x 512 tokens at 50 TFLOP/s, half the peak; memory predicted 1% too high.
CLEAN = {
    "forward_time": (0.030, 0.031, 0.029),
    "backward_time": (0.060, 0.061, 0.059),
    "optimizer_time": (0.010, 0.010, 0.010),
    "step_time": (0.100, 0.102, 0.098),
    "step_event_time": (0.099, 0.101, 0.097),
    "warmup_time": (0.900, 0.101),
    "flops": (5e12,),
    "peak_flops": (1e14,),
    "peak_memory": (10 * GIB,),
    "predicted_memory": (10.1 * GIB,),
}


def entries(experiment, config, metrics, status="ok", environment=GPU):
    return helpers.entries(experiment, config, metrics, status, environment)


def cell(
    experiment="bench", *, size="small", context=512, vocab=10_000, status="ok", environment=GPU, metrics=None, **run
):
    """A cell like CLEAN, with some metrics replaced (or left out: None) and some fields of its configuration."""
    model = model_config(size, context_length=context, vocab_size=vocab)
    config = RunConfig(model=model, size=size, **{"device": "cuda", **run}).to_dict()
    kept = {name: samples for name, samples in {**CLEAN, **(metrics or {})}.items() if samples is not None}
    return entries(experiment, config, kept, status, environment)


def step(seconds, **others):
    return {"step_time": (seconds,) * 3, "step_event_time": (seconds,) * 3, **others}


def column(table, heading):
    (index,) = [i for i, column in enumerate(table.columns) if column.heading == heading]
    return [row[index] for row in table.rows]


def rows(table, *headings):
    return list(zip(*(column(table, heading) for heading in headings), strict=True))


def notes_of(*cells):
    return remarks(group(itertools.chain(*cells)))


# -- all tables -------------------------------------------------------------------------------------------------------


def test_no_records_give_no_tables():
    assert tables([]) == []


def memory_model_cell():
    names = ("parameter", "gradient", "optimizer", "activation", "loss", "predicted", "traced")
    metrics = {f"{name}_memory": ((1 + i) * GIB,) for i, name in enumerate(names)}
    metrics |= {"block_activation_memory": (192 * 2**20,), "residual_memory": (6 * 2**20,), "peak_phase": ("backward",)}
    return entries("memory_model", RunConfig(device="cuda").to_dict(), metrics, environment=CPU)


def accumulation_cell(accumulator="fp16", total=9.953125, status="ok"):
    config = {"accumulator": accumulator, "term": "fp16", "value": 0.01, "count": 1000}
    return entries("accumulation", config, {"sum": (total,), "term": (0.0100021362,)}, status, CPU)


def dtypes_cell(autocast="bf16", model="toy", status="ok"):
    metrics = {"dtype of fc1 output": ("bfloat16",), "dtype of loss": ("float32",)}
    return entries("autocast_dtypes", {"model": model, "autocast": autocast, "device": "cuda"}, metrics, status)


DO_BENCH = {"do_bench_forward_time": (0.03,), "do_bench_backward_time": (0.05,), "do_bench_step_time": (0.101,)}
ALL = [
    *cell("bench"),
    *cell("end_to_end", mode="inference"),
    *cell("warmup", warmup_steps=0),
    *cell("precision", precision="bf16"),
    *cell("compile", compile=True, metrics={"compile_time": (12.34,), "graph_breaks": (2.0,)}),
    *cell("peak_memory"),
    *cell("timing_agreement", metrics=DO_BENCH),
    *memory_model_cell(),
    *accumulation_cell(),
    *dtypes_cell(),
    *entries("from_the_future", {"knob": 3}, {"speed": (1.0, 2.0)}),
]


@pytest.mark.parametrize("format", FORMATS)
def test_every_experiment_renders_in_every_format(format):
    found = tables(ALL)
    assert len(found) == 13, "two each for bench and end_to_end, one for each of the others"
    for table in found:
        assert {len(row) for row in table.rows} == {len(table.columns)}
        assert all(isinstance(value, str) for row in table.rows for value in row)
        assert table.render(format)


def test_tables_of_failures_alone_render_too():
    failed = [dataclasses.replace(item, status="oom: needs 99.9 GiB of 24.0 GiB", samples=()) for item in ALL]
    for table in tables([item for item in failed if item.metric == CELL_TIME]):
        assert {len(row) for row in table.rows} <= {len(table.columns)}
        assert table.render("terminal")


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(6)))
def test_rows_are_in_the_same_order_whatever_order_cells_were_measured_in(order):
    cells = [
        cell(size=size, context=context, mode=mode)
        for size, context, mode in [
            ("small", 128, "forward"),
            ("small", 128, "train-step"),
            ("small", 1024, "inference"),
            ("large", 128, "inference"),
            ("2.7B", 128, "inference"),
            ("2.7B", 256, "inference"),
        ]
    ]
    assert tables(itertools.chain(*(cells[i] for i in order))) == tables(itertools.chain(*cells))


def test_rows_go_by_size_then_context_then_mode():
    """By width and not by name: `2.7B` and `large` come before `medium` and `small` in the alphabet."""
    grid = list(itertools.product(["2.7B", "large", "small", "xl", "medium"], [512, 128, 1024], reversed(MODES)))
    records = [item for size, context, mode in grid for item in cell(size=size, context=context, mode=mode)]
    _, summary = tables(records)
    in_order = itertools.product(["small", "medium", "large", "xl", "2.7B"], ["128", "512", "1024"], MODES)
    assert rows(summary, "size", "context", "mode") == list(in_order)


@pytest.mark.parametrize(
    "difference",
    [
        {"context": 256},
        {"batch_size": 8},
        {"mode": "forward"},
        {"precision": "bf16"},
        {"attention": "sdpa"},
        {"checkpoint_blocks": 4},
        {"compile": True},
        {"warmup_steps": 1},
        {"model_factory": "package.module:build"},
        {"vocab": 50_257},
    ],
    ids=str,
)
class TestDifferentWorkLooksDifferent:
    def test_as_rows_of_one_table(self, difference):
        _, summary = tables([*cell(), *cell(**difference)])
        assert len(summary.rows) == 2
        assert summary.rows[0] != summary.rows[1]

    def test_as_two_tables(self, difference):
        """A setting that is the same in all rows belongs in the title."""
        plain, different = (tables(cell(**fields))[1] for fields in ({}, difference))

        def settings_shown(table):
            cells = zip(table.columns, table.rows[0], strict=True)
            return [table.title, *(value for column, value in cells if not column.numeric)]

        assert settings_shown(plain) != settings_shown(different)


def test_the_title_names_the_machine_and_what_all_rows_share():
    _, summary = tables([*cell(mode="forward"), *cell(mode="train-step")])
    for part in ("bench", "H200", "context 512", "batch 4", "fp32"):
        assert part in summary.title
    assert "train-step" not in summary.title
    assert column(summary, "mode") == ["forward", "train-step"]


# -- time and throughput ----------------------------------------------------------------------------------------------


def test_throughput_is_derived_from_time_work_and_peak():
    _, summary = tables(cell())
    assert rows(summary, "step (ms)", "tokens/s", "TFLOP/s", "MFU") == [("100.00", "20,480", "50.0", "50.0%")]
    assert column(summary, "backward / forward") == ["2.00x"]
    assert rows(summary, "peak (GiB)", "predicted (GiB)", "error") == [("10.00", "10.10", "+1.0%")]
    assert summary.notes == []


def test_tokens_count_the_whole_batch_and_the_context():
    _, summary = tables(cell(batch_size=8, context=1024, metrics=step(0.5)))
    assert column(summary, "tokens/s") == ["16,384"]


def test_without_a_peak_there_is_no_mfu():
    _, summary = tables(cell(metrics={"peak_flops": None}))
    assert rows(summary, "TFLOP/s", "MFU") == [("50.0", "N/A")]


def test_a_slow_machine_has_more_digits():
    _, summary = tables(cell(metrics={"flops": (1.2345e9,)}))
    assert column(summary, "TFLOP/s") == ["0.012"]


def test_what_was_not_measured_is_left_empty():
    missing = dict.fromkeys(("peak_memory", "predicted_memory", "flops", "backward_time"))
    _, summary = tables(cell(mode="forward", metrics=missing))
    headings = ("TFLOP/s", "MFU", "backward / forward", "peak (GiB)", "predicted (GiB)", "error")
    assert rows(summary, *headings) == [("N/A", "N/A", "", "", "", "")]


def test_the_phases_of_a_step_with_their_spread():
    phases, _ = tables(cell(metrics={"step_time": (0.1, 0.2, 0.3, 0.4)}))
    assert column(phases, "phase") == ["forward", "backward", "optimizer", "step"]
    spread = rows(phases, "mean (ms)", "std (ms)", "min (ms)", "max (ms)", "n")
    assert spread[0] == ("30.00", "1.00", "29.00", "31.00", "3")
    assert spread[3] == ("250.00", "129.10", "100.00", "400.00", "4")


def test_a_step_of_a_single_phase_is_shown_once():
    phases, _ = tables(cell(mode="forward", metrics={"backward_time": None, "optimizer_time": None}))
    assert column(phases, "phase") == ["forward"]


def test_the_warm_up_table_tells_when_a_run_became_steady():
    (table,) = tables(
        [
            *cell("warmup", warmup_steps=2, metrics={"warmup_time": (0.9, 0.5), "step_time": (0.1,) * 8}),
            *cell("warmup", warmup_steps=0, metrics={"warmup_time": (), "step_time": (0.9, *(0.1,) * 9)}),
        ]
    )
    assert column(table, "warm-up") == ["0", "2"]
    assert column(table, "first step (ms)") == ["900.00", "900.00"]
    assert column(table, "steady from step") == ["2", "3"]
    assert column(table, "step (ms)") == ["180.00 ± 252.98", "100.00 ± 0.00"]
    assert column(table, "forward (ms)") == ["30.00 ± 1.00"] * 2


def test_three_clocks_side_by_side():
    (table,) = tables([*cell("timing_agreement", metrics=DO_BENCH), *cell("timing_agreement", size="xl", status="oom")])
    assert rows(table, "size", "phase", "wall clock (ms)", "do_bench (ms)", "wall over do_bench")[:3] == [
        ("small", "forward", "30.00", "30.00", "+0.00%"),
        ("small", "backward", "60.00", "50.00", "+20.00%"),
        ("small", "step", "100.00", "101.00", "-0.99%"),
    ]
    assert column(table, "CUDA events (ms)")[:3] == ["", "", "99.00"]
    assert {(row[0], "OOM" in row) for row in table.rows[3:]} == {("xl", True)}
    assert table.notes == ["xl: oom"]


# -- comparisons ------------------------------------------------------------------------------------------------------


def test_lower_precision_is_compared_with_fp32_of_the_same_work():
    (table,) = tables(
        [
            *cell("precision", precision="bf16", metrics=step(0.05, peak_memory=(4 * GIB,))),
            *cell("precision", precision="fp32", metrics=step(0.20, peak_memory=(8 * GIB,))),
            *cell("precision", size="large", precision="bf16", metrics=step(0.5, peak_memory=(30 * GIB,))),
            *cell("precision", size="large", precision="fp32", metrics=step(0.8, peak_memory=(40 * GIB,))),
        ]
    )
    assert rows(table, "size", "precision", "speed-up", "memory") == [
        ("small", "fp32", "1.00x", "1.00x"),
        ("small", "bf16", "4.00x", "0.50x"),
        ("large", "fp32", "1.00x", "1.00x"),
        ("large", "bf16", "1.60x", "0.75x"),
    ]
    assert rows(table, "step (ms)", "std (ms)", "peak (GiB)")[1] == ("50.00", "0.00", "4.00")


def test_without_an_fp32_row_there_is_no_speed_up():
    (table,) = tables([*cell("precision", precision="bf16"), *cell("precision", context=128, precision="fp32")])
    assert rows(table, "context", "precision", "speed-up") == [("128", "fp32", "1.00x"), ("512", "bf16", "")]


def test_an_fp32_row_that_ran_out_of_memory_is_no_baseline():
    (table,) = tables([*cell("precision", status="oom: needs 30 GiB"), *cell("precision", precision="bf16")])
    assert rows(table, "precision", "forward (ms)", "speed-up") == [("fp32", "OOM", ""), ("bf16", "30.00", "")]


def test_each_machine_is_compared_with_itself():
    other = dataclasses.replace(GPU, gpu="RTX 4090")
    found = tables(
        [
            *cell("precision", precision="fp32", metrics=step(0.2)),
            *cell("precision", precision="bf16", metrics=step(0.1)),
            *cell("precision", precision="fp32", metrics=step(1.2), environment=other),
            *cell("precision", precision="bf16", metrics=step(0.3), environment=other),
        ]
    )
    own = [table for table in found if "side by side" not in table.title]
    assert [column(table, "speed-up") for table in own] == [["1.00x", "2.00x"], ["1.00x", "4.00x"]]
    assert ["H200" in own[0].title, "RTX 4090" in own[0].title, "RTX 4090" in own[1].title] == [True, False, True]


def test_a_larger_vocabulary_is_not_compared_with_a_smaller_one():
    (table,) = tables(
        [
            *cell("precision", precision="fp32", vocab=50_257, metrics=step(0.4)),
            *cell("precision", precision="fp32", metrics=step(0.2)),
            *cell("precision", precision="bf16", vocab=50_257, metrics=step(0.2)),
            *cell("precision", precision="bf16", metrics=step(0.1)),
        ]
    )
    assert sorted(column(table, "speed-up")) == ["1.00x", "1.00x", "2.00x", "2.00x"]


def test_a_compiled_model_is_compared_with_the_eager_one():
    compiling = {"compile_time": (12.34,), "graph_breaks": (0,), "predicted_memory": None}
    (table,) = tables(
        [
            *cell("compile", compile=True, metrics=step(0.05, **compiling)),
            *cell("compile", compile=False, metrics=step(0.10)),
        ]
    )
    assert rows(table, "compiled", "speed-up", "compile time (s)", "graph breaks") == [
        ("no", "1.00x", "", ""),
        ("yes", "2.00x", "12.3", "0"),
    ]


# -- memory -----------------------------------------------------------------------------------------------------------


def test_predicted_memory_is_held_against_measured_and_the_worst_is_named():
    def measured(predicted):
        return {"peak_memory": (10 * GIB,), "predicted_memory": (predicted * GIB,)}

    (table,) = tables(
        [
            *cell("peak_memory", size="small", metrics=measured(10.1)),
            *cell("peak_memory", size="medium", mode="inference", precision="bf16", metrics=measured(9.75)),
            *cell("peak_memory", size="large", metrics=measured(10.0)),
            *cell("peak_memory", size="xl", status="oom: needs 30.6 GiB of 24.0 GiB"),
        ]
    )
    assert rows(table, "size", "measured (GiB)", "predicted (GiB)", "error") == [
        ("small", "10.00", "10.10", "+1.00%"),
        ("medium", "10.00", "9.75", "-2.50%"),
        ("large", "10.00", "10.00", "+0.00%"),
        ("xl", "OOM", "", ""),
    ]
    assert table.notes[0] == "worst of 3: 2.50% (medium inference bf16)"
    assert table.notes[1].startswith("xl ")
    assert "needs 30.6 GiB of 24.0 GiB" in table.notes[1]
    assert len(table.notes) == 2


def test_what_saves_memory_has_a_table_of_its_own():
    plain, saving = tables(
        [
            *cell("peak_memory", attention="sdpa"),
            *cell("peak_memory", metrics={"predicted_memory": (9.9 * GIB,)}),
            *cell("peak_memory", checkpoint_blocks=4, metrics={"predicted_memory": (10.2 * GIB,)}),
        ]
    )
    assert column(plain, "error") == ["-1.00%"]
    assert rows(saving, "attention", "checkpoint", "error") == [("reference", "4", "+2.00%"), ("sdpa", "0", "+1.00%")]
    assert plain.notes[0].startswith("worst of 1: 1.00%")
    assert saving.notes[0].startswith("worst of 2: 2.00%")


def test_small_sizes_have_more_digits():
    memory = {"peak_memory": (5 * 2**20,), "predicted_memory": (5 * 2**20,)}
    (table,) = tables(cell("peak_memory", metrics=memory))
    assert column(table, "measured (GiB)") == ["0.0049"]


def test_the_memory_model_part_by_part():
    (table,) = tables(memory_model_cell())
    parts = ("parameters", "gradients", "optimizer", "activations", "logits, loss", "peak", "peak, traced")
    assert rows(table, *(f"{part} (GiB)" for part in parts)) == [tuple(f"{i}.00" for i in range(1, 8))]
    assert rows(table, "per block (MiB)", "residual tensor (MiB)", "peak in") == [("192", "6", "backward")]


# -- failures ---------------------------------------------------------------------------------------------------------

OOM = "oom: needs 138.7 GiB of 24.0 GiB (predicted, not tried)"


@pytest.mark.parametrize("experiment", ["bench", "end_to_end", "warmup", "precision", "compile", "peak_memory"])
def test_a_cell_that_ran_out_of_memory_is_a_row_and_a_remark(experiment):
    found = tables([*cell(experiment), *cell(experiment, size="2.7B", status=OOM)])
    for table in found:
        row = table.rows[-1]
        assert len(row) == len(table.columns)
        assert row[0] == "2.7B"
        assert row.count("OOM") == 1
        assert set(row[row.index("OOM") + 1 :]) == {""}
    (note,) = [note for note in found[-1].notes if OOM in note]
    assert note.startswith("2.7B")


def test_other_failures_are_told_apart_from_running_out_of_memory():
    crashed = "error: RuntimeError: mat1 and mat2 shapes cannot be multiplied"
    _, summary = tables([*cell(), *cell(size="large", status=crashed)])
    assert rows(summary, "size", "step (ms)") == [("small", "100.00"), ("large", "error")]
    assert summary.notes == [f"large: {crashed}"]


def test_an_interrupted_cell_is_not_shown_as_complete():
    interrupted = [item for item in cell(size="large") if item.metric != CELL_TIME]
    _, summary = tables([*cell(), *interrupted])
    assert rows(summary, "size", "step (ms)") == [("small", "100.00"), ("large", "error")]
    assert summary.notes == ["large: interrupted before it ended; run the same command again"]


@pytest.mark.parametrize(
    ("good", "failed"),
    [
        (accumulation_cell("fp32"), accumulation_cell("fp16", status="error: RuntimeError: no")),
        (dtypes_cell("bf16"), dtypes_cell("fp16", status="error: RuntimeError: no")),
    ],
    ids=["accumulation", "autocast_dtypes"],
)
def test_a_failure_among_the_number_formats_is_told(good, failed):
    (table,) = tables([*good, *failed])
    assert any("error: RuntimeError: no" in note for note in table.notes)


# -- number formats, and experiments without a section ----------------------------------------------------------------


def test_sums_by_accumulator():
    (table,) = tables([*accumulation_cell("fp16", 9.953125), *accumulation_cell("fp32", 10.002136)])
    assert rows(table, "accumulator", "one term is", "sum") == [
        ("fp16", "0.0100021", "9.9531"),
        ("fp32", "0.0100021", "10.0021"),
    ]


def test_dtypes_under_autocast_have_a_table_for_each_model():
    toy, transformer = tables([*dtypes_cell("fp16"), *dtypes_cell("bf16"), *dtypes_cell("bf16", "transformer")])
    assert toy.rows == [["fc1 output", "bfloat16", "bfloat16"], ["loss", "float32", "float32"]]
    assert [column.heading for column in toy.columns] == ["tensor", "autocast fp16", "autocast bf16"]
    assert "transformer" in transformer.title
    assert len(transformer.columns) == 2


def test_an_unknown_experiment_is_shown_metric_by_metric():
    records = [
        *cell("from_the_future", metrics={"overlap": (0.25, 0.75)}),
        *cell("from_the_future", size="large", status="oom"),
    ]
    (table,) = tables(records)
    assert table.title == "from_the_future"
    found = {(name, metric): values for name, metric, *values in table.rows}
    assert found["small 512 train-step fp32", "overlap"] == ["s", "0.5", "0.354", "2"]
    assert found["small 512 train-step fp32", "flops"] == ["FLOP", "5e+12", "0", "1"]
    assert found["large 512 train-step fp32", CELL_TIME] == ["s", "", "", "0"]
    assert table.notes == ["large 512 train-step fp32: oom"]


def test_known_experiments_come_in_their_order_and_unknown_ones_last():
    found = [table.title.split(":")[0] for table in tables([*entries("aaa", {}, {"x": (1.0,)}), *reversed(ALL)])]
    assert list(dict.fromkeys(found)) == [
        "bench", "end_to_end", "warmup", "precision", "compile", "peak_memory", "timing_agreement", "memory_model",
        "accumulation", "autocast_dtypes", "aaa", "from_the_future",
    ]  # fmt: skip


@pytest.mark.parametrize("samples", [(float("inf"), 1.0), (float("nan"), 1.0), (float("nan"),)], ids=str)
def test_a_loss_that_diverged_is_shown(samples):
    (table,) = tables(entries("from_the_future", {"knob": 3}, {"loss": samples}))
    assert rows(table, "metric", "n")[0] == ("loss", str(len(samples)))


# -- the referee ------------------------------------------------------------------------------------------------------


def test_a_clean_sweep_is_not_remarked_on():
    grid = itertools.product(["small", "large"], [128, 512], ["fp32", "bf16"])
    cells = [cell(size=size, context=context, precision=precision) for size, context, precision in grid]
    cells.append(cell(mode="forward", metrics=step(0.06)))
    cells.append(cell(mode="forward-backward", metrics=step(0.09)))
    assert notes_of(*cells) == []
    assert notes_of(cell(environment=CPU, device="cpu", metrics={"step_event_time": None})) == []


def gpu(**fields):
    return {"environment": dataclasses.replace(GPU, **fields)}


WRONG = {
    "above peak": ({"metrics": {"flops": (2e13,)}}, "200% of the hardware's peak"),
    "tf32 in fp32": (gpu(tf32=True), "TF32 was on in an fp32 row"),
    "tf32 on a CPU": ({"device": "cpu", "precision": "tf32"}, "a CPU has no TF32"),
    "cold": ({"metrics": {"step_time": (0.9, *(0.1,) * 9)}, "warmup_steps": 2}, "2 warm-up steps were too few"),
    "no warm-up": ({"metrics": {"step_time": (0.9, *(0.1,) * 9)}, "warmup_steps": 0}, "add --warmup_steps 5"),
    "noise": ({"metrics": {"step_time": (*(0.1,) * 9, 0.2, *(0.1,) * 9)}}, "compare medians"),
    "unsettled": ({"metrics": {"step_time": (0.1, 0.12, 0.15, 0.2, 0.27, 0.35, 0.5)}}, "never settle"),
    "throttled": (gpu(throttle_reasons=("power cap", "thermal")), "held its clocks down (power cap, thermal)"),
    "company": (gpu(other_gpu_processes=2), "another process was using the GPU"),
    "clocks": ({"metrics": {"step_event_time": (0.2,)}}, "exceeds the wall clock's"),
    "two graphs": ({"mode": "forward", "metrics": {"predicted_memory": (5 * GIB,)}}, "were two alive?"),
    "oom": ({"status": OOM}, OOM),
    "crash": ({"status": "error: crashed (SIGSEGV)"}, "error: crashed (SIGSEGV)"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_remarked_on_once_with_the_cell(what):
    fields, expected = WRONG[what]
    (note,) = notes_of(cell(**fields), cell(size="large"))
    assert expected in note
    assert note.startswith("small 512 ")
    assert len(note.splitlines()) == 1


NOT_WRONG = {
    "at the peak": {"metrics": {"flops": (9.99e12,)}},
    "tf32 on in a bf16 row": {**gpu(tf32=True), "precision": "bf16"},
    "tf32 in a tf32 row": {**gpu(tf32=True), "precision": "tf32"},
    "first step barely slower": {"metrics": {"step_time": (0.104, *(0.1,) * 9)}},
    "two samples say nothing of spread": {"metrics": {"step_time": (0.1, 0.12)}},
    "events within two percent of the wall clock": {"metrics": {"step_event_time": (0.1015,)}},
    "a training step above its prediction": {"metrics": {"predicted_memory": (6 * GIB,)}},
    "nobody knows of other processes": gpu(other_gpu_processes=None),
}


@pytest.mark.parametrize("what", NOT_WRONG)
def test_what_is_right_is_not_remarked_on(what):
    assert notes_of(cell(**NOT_WRONG[what])) == []


def test_a_cold_start_is_not_called_noise_as_well():
    (note,) = notes_of(cell(metrics={"step_time": (0.9, *(0.1,) * 9)}))
    assert "cold" in note


def test_forward_alone_cannot_be_slower_than_forward_and_backward():
    forward, both = cell(mode="forward", metrics=step(0.2)), cell(mode="forward-backward", metrics=step(0.1))
    assert notes_of(forward, both) == ["small 512 fp32: forward alone is slower than forward and backward together"]
    assert notes_of(cell(mode="forward", metrics=step(0.1)), cell(mode="forward-backward", metrics=step(0.2))) == []


@pytest.mark.parametrize(
    "difference",
    [
        {"size": "large"},
        {"context": 1024},
        {"batch_size": 8},
        {"precision": "bf16"},
        {"attention": "sdpa"},
        {"compile": True},
        {"checkpoint_blocks": 4},
        {"model_factory": "package.module:build"},
        {"vocab": 50_257},
    ],
    ids=str,
)
def test_forward_of_other_work_may_be_slower(difference):
    forward = cell(mode="forward", metrics=step(0.2), **difference)
    assert notes_of(forward, cell(mode="forward-backward", metrics=step(0.1))) == []


def test_two_machines_in_one_table_are_remarked_on():
    other = dataclasses.replace(GPU, gpu="RTX 4090")
    assert notes_of(cell(), cell(environment=other)) == ["results of 2 machines in one table: H200, RTX 4090"]
    assert len(group([*cell(), *cell(environment=other)])) == 2


def test_what_concerns_many_cells_is_one_line():
    throttled = gpu(throttle_reasons=("thermal",))
    sizes = ("tiny", "small", "medium", "large", "xl")
    wrong = [cell(size=size, **throttled) for size in sizes]
    text = "the GPU held its clocks down (thermal)"
    assert notes_of(*wrong) == [f"all rows: {text}"]
    names = ", ".join(f"{size} 512 train-step fp32" for size in sizes[:3])
    assert notes_of(*wrong, cell(size="2.7B")) == [f"{names} and 2 more: {text}"]
    assert notes_of(wrong[1]) == [f"small 512 train-step fp32: {text}"]


def test_remarks_stand_under_the_table():
    _, summary = tables(cell(**gpu(other_gpu_processes=1)))
    assert summary.notes == ["small: another process was using the GPU"]
    assert "another process was using the GPU" in summary.render("terminal")
