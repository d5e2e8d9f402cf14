"""Steps drawn at random: the draw, the instrument, tables and findings."""

import dataclasses
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from cs336_systems import record
from cs336_systems.config import SIZES, RunConfig
from cs336_systems.experiments.catalogue import catalogue, cells
from cs336_systems.experiments.runner import Runner, gather
from cs336_systems.experiments.spec import MissingError
from cs336_systems.experiments.steps import drawn_steps, measure_unseen
from cs336_systems.experiments.steps.drawn_steps import EAGER, FAST, SEED, TINY, eager_steps, fast_steps
from cs336_systems.experiments.steps.unseen_steps import UNSEEN_STEPS, short_count, within
from cs336_systems.measure.kernel_trace import Profile
from cs336_systems.measure.readers.recorded_tables import ComparedRow, rows_of
from cs336_systems.measure.readers.trace import Kernel, Trace, read_chrome
from cs336_systems.predict.fit import usable_bytes
from cs336_systems.predict.memory_model import estimate
from cs336_systems.predict.time.eager_time import eager_step_time, kind_of_step
from cs336_systems.predict.time.gpu_profile import shipped_profiles
from cs336_systems.predict.time.on_gpu import predicted_of
from cs336_systems.predict.time.time_model import step_time
from cs336_systems.record import GIB, Metric
from cs336_systems.report.sections import tables as tables_of
from cs336_systems.report.step_errors import recorded_errors
from tests.helpers import ROOT
from tests.unit.experiments.steps.samples import DRAWN, MEASURED_AT, SAMPLES, unseen
from tests.unit.report.step_cells import (
    CPU,
    OOM,
    charts,
    column,
    entries,
    highlights,
    large_numbers,
    notes,
    rows,
    stated,
    tables,
    values,
)

H200_TRACE = ROOT / "tests" / "golden" / "trace_h200.json.gz"
FAST_DRAWN, EAGER_DRAWN = DRAWN[:60], DRAWN[60:]


def grid(preset: str, device: str) -> list[dict]:
    return [config for _, config in cells(["unseen_steps"], preset, RunConfig(device=device))]


def seconds(run: RunConfig) -> float | None:
    """The predicted time of a step, by the H200's profile that comes with the package."""
    profile = shipped_profiles()["h200"]
    found = step_time(run, profile) if run.fast == "on" else eager_step_time(run, profile)
    return found.seconds if found else None


# -- the draw ---------------------------------------------------------------------------------------------------------


def test_the_draw_is_the_same_every_time():
    assert fast_steps.__wrapped__(60) == FAST_DRAWN
    assert eager_steps.__wrapped__(40) == EAGER_DRAWN
    assert fast_steps.__wrapped__(60, seed=SEED + 1) != FAST_DRAWN
    first, last = FAST_DRAWN[1], EAGER_DRAWN[-1]
    assert (first.size, first.batch_size, first.model.context_length) == (
        "384/1600/26/4/kv1/head64/qknorm/tied",
        1,
        256,
    )
    assert (last.size, last.precision, last.attention) == ("1664/8320/29/7/head128/qknorm", "fp32", "sdpa")


def test_a_step_that_is_drawn_again_leaves_the_others(monkeypatch):
    """A step that does not fit another GPU is drawn again, and one that does is the same."""
    monkeypatch.setattr(drawn_steps, "MEMORY", 110 * GIB)
    other = fast_steps.__wrapped__(60)
    small = [drawn_steps.fits(run) for run in FAST_DRAWN]
    assert 0 < small.count(False) < 10
    for before, after, stays in zip(FAST_DRAWN, other, small, strict=True):
        assert (before == after) is stays


def test_the_draw_sees_no_rates(monkeypatch):
    """Rates are measured: neither those of the package nor those of this machine may change which steps are drawn."""
    for module in ("time_model", "eager_time"):
        monkeypatch.delattr(f"cs336_systems.predict.time.{module}.kernel_seconds")
    with pytest.raises(NameError):
        seconds(FAST_DRAWN[0])
    assert fast_steps.__wrapped__(60) == FAST_DRAWN
    assert eager_steps.__wrapped__(40) == EAGER_DRAWN


@pytest.mark.parametrize(("drawn", "ranges"), [(FAST_DRAWN, FAST), (EAGER_DRAWN, EAGER)], ids=["fast", "eager"])
def test_every_step_is_valid_predicted_and_within_the_limits(drawn, ranges):
    assert len(set(drawn)) == len(drawn)
    for run in drawn:
        model = run.model
        assert RunConfig.from_dict(run.to_dict()) == run
        assert run.size not in SIZES
        assert ranges.parameters[0] <= model.parameters <= ranges.parameters[1]
        assert ranges.contexts[0] <= model.context_length <= ranges.contexts[1]
        assert ranges.vocabularies[0] <= model.vocab_size <= ranges.vocabularies[1]
        assert model.context_length % 128 == model.d_model % 64 == model.d_ff % 64 == 0
        assert model.head_dim in (64, 128)
        assert run.tokens <= 65_536
        assert (run.warmup_steps, run.num_steps) == (3, 5)
        assert 0 < seconds(run) <= ranges.seconds
        assert estimate(dataclasses.replace(run, compile=False)).peak <= usable_bytes(139 * GIB)
    assert 8 * sum(map(seconds, drawn)) < 240


def quarters(found: list[float], least: float, most: float) -> list[int]:
    """How many values are in each quarter of the range, on a log scale."""
    edges = [least * (most / least) ** (quarter / 4) for quarter in (1, 2, 3)]
    counts = Counter(sum(value > edge for edge in edges) for value in found)
    return [counts[quarter] for quarter in range(4)]


def test_fast_steps_are_spread_over_the_ranges():
    models = [run.model for run in FAST_DRAWN]
    assert {(run.fast, run.precision, run.attention, run.compile) for run in FAST_DRAWN} == {
        ("on", "bf16", "auto", False)
    }
    assert min(quarters([model.parameters for model in models], *FAST.parameters)) >= 14
    assert min(quarters([model.context_length for model in models], *FAST.contexts)) >= 7
    of_draws = [run.model.vocab_size for seed in range(4) for run in fast_steps(60, seed=seed)]  # few are in the first
    assert min(quarters(of_draws, *FAST.vocabularies)) >= 8
    assert min(quarters([run.tokens for run in FAST_DRAWN], 128, 65_536)) >= 2
    assert max(model.context_length for model in models) > 24_000
    assert sum(seconds(run) > 0.2 for run in FAST_DRAWN) >= 20
    for has in (
        lambda model: model.kv_heads < model.num_heads,
        lambda model: model.qkv_bias,
        lambda model: model.qk_norm,
        lambda model: model.tied_embeddings,
        lambda model: model.head_dim == 128,
        lambda model: model.q_width != model.d_model,
        lambda model: model.vocab_size % 8 != 0,
    ):
        assert 5 <= sum(map(has, models)) <= 50


def test_eager_steps_have_all_settings_and_sizes():
    assert min(quarters([run.model.parameters for run in EAGER_DRAWN], *EAGER.parameters)) >= 9
    assert min(quarters([run.model.context_length for run in EAGER_DRAWN], *EAGER.contexts)) >= 5
    for name, choices in (("precision", ("fp32", "tf32", "bf16")), ("attention", ("reference", "sdpa", "auto"))):
        counts = Counter(getattr(run, name) for run in EAGER_DRAWN)
        assert set(counts) == set(choices)
        assert min(counts.values()) == 13
    assert Counter(run.compile for run in EAGER_DRAWN) == {False: 30, True: 10}
    before = eager_steps(40, seed=SEED - 1)
    assert {run.precision for run in (*EAGER_DRAWN, *before) if run.compile} == {"fp32", "tf32", "bf16"}
    assert max(run.model.num_layers for run in EAGER_DRAWN if run.compile) <= 12
    profile = shipped_profiles()["h200"]
    kinds = Counter(kind_of_step(eager_step_time(run, profile)) for run in EAGER_DRAWN)
    assert kinds["launch-bound"] >= 4
    assert kinds["fp32"] + kinds["tf32"] + kinds["bf16"] >= 10


# -- the grid ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["course", "full"])
def test_the_grid_has_the_seed_and_predictions(preset):
    configs = grid(preset, "cuda:1")
    assert [RunConfig.of(config).fast for config in configs] == ["on"] * 60 + ["off"] * 40
    assert {(config["draw_seed"], config["device"]) for config in configs} == {(SEED, "cuda:1")}
    assert all(predicted_of(config, "NVIDIA H200") for config in configs)
    assert len(gather(("unseen_steps", config) for config in configs)) == 100


def test_the_grid_needs_a_gpu():
    with pytest.raises(
        MissingError, match=r"^unseen_steps needs a CUDA GPU: its steps have up to 8 billion parameters$"
    ):
        grid("course", "cpu")


def test_quick_steps_are_small():
    on_gpu, on_cpu = ([RunConfig.of(config) for config in grid("quick", device)] for device in ("cuda", "cpu"))
    assert [run.fast for run in on_gpu] == ["on", "on", "off", "off"]
    assert all(run.model.parameters <= 60e6 and seconds(run) < 0.1 for run in on_gpu)
    assert [(run.fast, run.precision, run.device) for run in on_cpu] == [("on", "fp32", "cpu"), ("off", "fp32", "cpu")]
    assert all(run.model.parameters <= TINY.parameters[1] for run in on_cpu)


def test_steps_that_wait_for_the_host_start_in_a_process_without_a_profiler():
    fresh = [UNSEEN_STEPS.instrument.needs_fresh_process(config) for config in grid("course", "cuda")]
    for run, is_fresh in zip(DRAWN, fresh, strict=True):
        if run.compile or estimate(run).peak > 100 * GIB:
            assert is_fresh
        elif run.fast == "on":
            assert not is_fresh
    assert 10 < sum(fresh[60:]) < 40
    assert not any(map(UNSEEN_STEPS.instrument.needs_fresh_process, grid("quick", "cpu")))


def test_memory_is_predicted_for_all_but_compiled_steps():
    for config in grid("course", "cuda"):
        memory = UNSEEN_STEPS.instrument.memory(config)
        assert memory.at_least == config["compile"]
        assert memory.predicted <= usable_bytes(139 * GIB)


# -- the instrument ---------------------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
@pytest.mark.xdist_group("ranks")
def test_the_quick_preset_runs_on_a_cpu(elsewhere, forked_python, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(forked_python))
    with Runner(elsewhere / "r.jsonl", quiet=True) as runner:
        outcome = runner.run(gather(cells(["unseen_steps"], "quick", RunConfig())))
    records = record.load(elsewhere / "r.jsonl").records
    assert (outcome.done, outcome.failed) == (2, 0), {r.status for r in records}
    assert {"step_time", "parameters", "flops"} <= {r.metric for r in records}
    assert not {"predicted_time", "compared_kinds", "kernel_time"} & {r.metric for r in records}
    (table,) = tables_of(records, catalogue())
    assert rows(table, "predicted (ms)", "error", "furthest off") == [("N/A", "N/A", "")] * 2
    assert any(note.startswith("no prediction: the rates of this device are not known") for note in notes(table))


def config_of(run: RunConfig) -> dict:
    return {**run.to_dict(), "draw_seed": SEED}


def compared(metrics: list[Metric]) -> dict[str, ComparedRow]:
    (found,) = [metric.samples for metric in metrics if metric.name == "compared_kinds"]
    return {row.kind: row for row in rows_of(found, ComparedRow)}


def test_kernels_of_a_recorded_trace_are_compared_by_kind():
    trace, run = read_chrome(H200_TRACE), EAGER_DRAWN[0]
    found = measure_unseen.kernel_metrics(config_of(run), trace, "NVIDIA H200")
    kinds, expected = compared(found), predicted_of(config_of(run), "NVIDIA H200").time
    assert list(kinds) == ["matmul", "attention", "other"]
    assert sum(row.measured for row in kinds.values()) == pytest.approx(sum(k.duration for k in trace.kernels))
    assert sum(row.predicted for row in kinds.values()) == pytest.approx(sum(own for _, own in expected.kernels))
    assert kinds["matmul"].measured == pytest.approx(trace.by_kind()["matmul"].seconds)
    assert kinds["matmul"].predicted == expected.by_kind()["matmul"]
    names = {metric.name for metric in found}
    assert {"kind_table: forward", "kernel_table: backward", "launch_bound"} <= names
    unknown = measure_unseen.kernel_metrics(config_of(run), trace, "Another GPU")
    assert {metric.name for metric in unknown} == names - {"compared_kinds", "launch_bound"}
    assert measure_unseen.kernel_metrics(config_of(run), dataclasses.replace(trace, on_gpu=False), "NVIDIA H200") == []


def test_a_step_on_a_gpu_records_its_kernels(monkeypatch):
    """With stand-ins for the step and the profiler: the kernels of a CUDA graph have no phase."""
    run = FAST_DRAWN[0]
    step = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    kernels = [
        Kernel("nvjet_sm90_64x8", 0.0, 2e-3),
        Kernel("adamw_kernel", 3e-3, 1e-3),
        Kernel("Memset (Device)", 5e-3, 1e-6),
    ]
    timed = SimpleNamespace(step=step, batch=(), metrics=[Metric("step_time", "s", [4e-3] * 5)], peak_memory=2 * GIB)
    profile = Profile(Trace(kernels, [], on_gpu=True), {"step": [5e-3]})
    monkeypatch.setattr(measure_unseen, "time_built_step", lambda config, peak_tflops: timed)
    monkeypatch.setattr(
        measure_unseen, "profile_steps", lambda step, batch, num_steps: profile if num_steps == 1 else None
    )
    monkeypatch.setattr(measure_unseen.torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    found = measure_unseen.measure_unseen_step(config_of(run))
    by_name = {metric.name: metric.samples for metric in found}
    assert by_name["profiled_step_time"] == [5e-3]
    assert by_name["kernel_time"] == [pytest.approx(3.001e-3)]
    assert by_name["kind_table: step"][:3] == ["matmul", 1.0, 2e-3]
    assert by_name["predicted_memory"] == [estimate(run).peak]
    assert by_name["launch_bound"] == [0]
    assert {kind: row.measured for kind, row in compared(found).items()} == {
        "matmul": 2e-3, "attention": 0.0, "other": pytest.approx(1.001e-3),
    }  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("config", grid("quick", "cuda"), ids=lambda config: config.get("fast", "off"))
def test_quick_steps_record_their_kernels_on_a_gpu(config):
    by_name = {metric.name: metric.samples for metric in measure_unseen.measure_unseen_step(config)}
    assert len(by_name["step_time"]) == 5
    assert by_name["kernels_on_gpu"] == [1]
    assert 0 < by_name["kernel_time"][0] <= by_name["profiled_step_time"][0]
    assert any(name.startswith("kind_table: ") for name in by_name)
    assert ("compared_kinds" in by_name) == ("predicted_time" in by_name)


def test_drawn_steps_do_not_move_the_halves_of_fitted_steps():
    records = unseen(EAGER_DRAWN[3], 0.2, 0.2)
    assert recorded_errors(records) == []
    bare = [dataclasses.replace(r, config=EAGER_DRAWN[3].to_dict()) for r in records]
    assert len(recorded_errors(bare)) == 1


# -- tables, chart and findings ---------------------------------------------------------------------------------------


def test_the_largest_error_comes_first():
    _, table = tables(SAMPLES["unseen_steps"], unseen(DRAWN[8], 0.1, 0.1, status=OOM))
    assert column(table, "error") == ["-20.0%", "-5.0%", "+5.0%", "-2.0%", "+1.0%", ""]
    assert column(table, "predicted (ms)")[-1] == "OOM"
    assert column(table, "kind") == ["eager, launch-bound", "eager", "fast", "fast", "fast", "fast"]
    third = rows(table, "parameters", "context", "batch", "vocabulary", "predicted (ms)", "measured (ms)")[2]
    model = DRAWN[20].model
    assert third[:3] == (short_count(model.parameters), str(model.context_length), str(DRAWN[20].batch_size))
    assert third[3:] == (f"{model.vocab_size:,}", "210.00", "200.00")
    assert rows(table, "furthest off", "share", "of the error")[2] == ("matmuls", "54%", "+6.0%")
    assert rows(table, "furthest off", "share", "of the error")[0] == ("the time between kernels", "10%", "-20.0%")


def test_a_file_with_two_draws_shows_the_newest():
    older = unseen(DRAWN[40], 0.1, 0.2)
    for item in older:
        item.config["draw_seed"] = SEED - 1
    summary, steps = tables(older + unseen(DRAWN[5], 0.1, 0.098))
    assert column(summary, "number") == ["1"]
    assert column(steps, "predicted (ms)") == ["98.00"]
    for table in (summary, steps):
        assert f"steps of other draws are left out: seed {SEED - 1}" in notes(table)
    assert "100.0%" not in " ".join(stated(older + unseen(DRAWN[5], 0.1, 0.098)))


def test_compiled_steps_are_named():
    run = next(run for run in EAGER_DRAWN if run.compile)
    (_, table) = tables(unseen(run, 0.1, 0.1), unseen(EAGER_DRAWN[0], 0.1, 0.1))
    assert sorted(column(table, "kind")) == ["compiled", "eager"]


def test_the_summary_has_groups_that_do_not_overlap():
    (summary, table) = tables(SAMPLES["unseen_steps"])
    assert rows(summary, "steps", "number", "median error", "95% within", "largest") == [
        ("fast steps", "3", "2.0%", "5.0%", "+5.0%"),
        ("eager and compiled steps", "1", "5.0%", "5.0%", "-5.0%"),
        ("launch-bound steps", "1", "20.0%", "20.0%", "-20.0%"),
    ]
    assert rows(summary, "within 2%", "within 5%")[2] == ("0%", "0%")
    for one in (summary, table):
        assert f"drawn with seed {SEED}; measured at commit 0123456789ab" in notes(one)


def test_ninety_five_percent_are_within():
    errors = [number / 1000 for number in range(-50, 50)]
    most = within(errors, 0.95)
    assert sum(abs(error) <= most for error in errors) >= 95
    assert sum(abs(error) < most for error in errors) < 95
    assert within([0.1], 0.95) == 0.1


def test_errors_are_drawn_by_size():
    (chart,) = charts(SAMPLES["unseen_steps"])
    assert [series.name.en for series in chart.series] == [
        "fast steps",
        "eager and compiled steps",
        "launch-bound steps",
    ]
    assert all(series.drawn == "marks" for series in chart.series)
    assert values(chart.series[0])[DRAWN[20].model.parameters] == pytest.approx(5)
    assert charts(unpredicted()) == []


def unpredicted() -> list:
    run = dataclasses.replace(DRAWN[70], device="cpu")
    return entries("unseen_steps", config_of(run), {"step_time": (0.1, 0.1)}, environment=CPU)


def test_nothing_is_said_without_a_prediction():
    assert stated(unpredicted()) == []
    assert highlights(unpredicted()) == []
    (table,) = tables(unpredicted())
    assert column(table, "error") == ["N/A"]


def test_a_launch_bound_step_is_known_without_its_metric():
    run = next(run for run in EAGER_DRAWN if eager_step_time(run, shipped_profiles()["h200"]).is_launch_bound)
    kept = [one for one in unseen(run, 0.1, 0.1) if one.metric != "launch_bound"]
    assert column(tables(kept)[1], "kind")[0].endswith(", launch-bound")


def test_good_predictions_of_many_steps_are_a_result():
    good = [unseen(run, 0.1, 0.1 * (1 + 0.001 * (number % 20 + 0.4))) for number, run in enumerate(FAST_DRAWN)]
    least, most = (short_count(FAST_DRAWN[index].model.parameters) for index in (0, -1))
    assert large_numbers(*good) == [
        (
            31,
            "1.0%",
            "median error of the predicted time, 60 random steps",
            f"fast steps of {least} to {most} parameters: 95% within 1.8%",
        )
    ]
    assert stated(*good)[0] == "Random fast steps (60): median error 1.0%, 95% within 1.8%."
    assert highlights(*good[:10]) == [], "too few"
    assert highlights(*(unseen(run, 0.1, 0.103) for run in FAST_DRAWN)) == [], "the median is above 2%"
    far = [unseen(run, 0.1, 0.107) for run in FAST_DRAWN[:4]]
    assert highlights(*far, *good[4:]) == [], "fewer than 95% are within 5%"


@pytest.mark.parametrize(
    ("count", "text"),
    [(79_400, "79.4K"), (51.2e6, "51.2M"), (999.4e6, "999M"), (999.9e6, "1.00B"), (7.4752e9, "7.48B")],
)
def test_parameters_have_three_digits(count, text):
    assert short_count(count) == text


def test_the_commit_of_changed_files_says_so():
    records = [
        dataclasses.replace(r, environment=dataclasses.replace(MEASURED_AT, git_dirty=True))
        for r in unseen(DRAWN[0], 0.1, 0.1)
    ]
    assert f"drawn with seed {SEED}; measured at commit 0123456789ab (changed)" in notes(tables(records)[1])
