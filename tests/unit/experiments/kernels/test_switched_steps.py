"""The experiment `switched_steps`: its instrument on hand-made traces and on a CPU, its grid, table and finding."""

import dataclasses
import re

import pytest

from cs336_systems.config import RunConfig, UserError, model_config
from cs336_systems.experiments.kernels.measure_switches import (
    Variant,
    measure_switch,
    predictions,
    read_variant,
    replayed,
)
from cs336_systems.experiments.kernels.switched_steps import PARTS, SWITCHED_STEPS, WITH_ATTENTION
from cs336_systems.measure.readers.kernel_classes import HOST
from cs336_systems.measure.readers.trace import read_chrome
from cs336_systems.measure.readers.trace_graph import graph_of
from cs336_systems.measure.readers.what_if import Setting, _power, selections
from tests.unit.experiments.kernels.samples import SAMPLES, switched
from tests.unit.measure.test_trace_launches import launched_every
from tests.unit.measure.test_trace_replay import FLASH, GEMM, H200, MAIN, MICRO, POINTWISE, Script, gpu_bound
from tests.unit.report.step_cells import CHINESE, OOM, notes, rows, stated, tables

MOST_POWER = _power().most
"""Power of matmuls at the highest clock, relative to that of a GPU at its limit."""


def variant(script, folder, name, step):
    """A traced step, and its microseconds without the profiler."""
    (folder / name).mkdir()
    return Variant([step * MICRO] * 3, script.graph(folder / name))


def metrics_of(found):
    return {metric.name: [sample / MICRO for sample in metric.samples] for metric in found if metric.unit == "s"}


def by_name(found):
    return {metric.name: metric.samples for metric in found}


# -- the instrument ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slowdown", [1, 1.5])
def test_launch_bound_variants_predict_each_other(slowdown, tmp_path):
    """Five attention kernels of 2 us become one of 10 us, and four launches of 10 us go. The profiler's share of the
    host's time does not matter."""
    several = launched_every(Script(), 10, [GEMM, FLASH] * 5, slowdown=slowdown)
    one = Script()
    at = [10 * slowdown * n for n in range(6)]
    for n, (name, took) in enumerate(zip([GEMM, FLASH, *[GEMM] * 4], [2, 10, 2, 2, 2, 2], strict=True)):
        one.kernel(name, at[n] + 4, took, launch=at[n], took=slowdown)
    before, after = variant(several, tmp_path, "before", 96), variant(one, tmp_path, "after", 56)
    found = predictions(before, after, "attention")
    assert metrics_of(found)["replayed_time"] == pytest.approx([56], rel=1e-3)
    assert metrics_of(found)["replayed_back_time"] == pytest.approx([96], rel=1e-3)
    assert metrics_of(found)["kernels_time"] == pytest.approx([10, 10])
    assert by_name(found)["kernels_number"] == [5, 1]
    assert by_name(found)["host_factor"] == pytest.approx([1 / slowdown] * 2, rel=1e-3)


def test_a_cuda_graph_is_predicted_from_the_step_without_it(tmp_path):
    """Without the host ten kernels of 2 us remain, 0.55 us apart, 4 us after their launch; the other trace is not
    used."""
    before = variant(launched_every(Script(), 10, [GEMM] * 10), tmp_path, "before", 60)
    found = predictions(before, Variant([20 * MICRO], before.graph), HOST)
    assert metrics_of(found) == {"replayed_time": pytest.approx([4 + 10 * 2 + 9 * 0.55], rel=1e-3)}


def test_groups_change_one_by_one(tmp_path):
    """Attention of 300 us becomes 200 us, matmuls of 300 us 330 us; the gaps between kernels stay."""
    before = variant(gpu_bound(Script()), tmp_path, "before", 631)
    other = Script()
    for n, (name, start) in enumerate(((GEMM, 10), (FLASH, 121), (GEMM, 222), (FLASH, 333), (GEMM, 434))):
        other.kernel(name, start, 110 if name == GEMM else 100, launch=2 * n)
    other.call("cudaDeviceSynchronize", 20, 529)
    other.call("cudaEventQuery", 559)
    after = variant(other, tmp_path, "after", 560)
    found = metrics_of(predictions(before, after, "attention,matmul"))
    assert found["kernels_time"] == pytest.approx([600, 530])
    at_unchanged_clocks, at_equal_power = found["replayed_time"]
    assert at_unchanged_clocks == pytest.approx(560, rel=0.005)
    assert at_equal_power == pytest.approx(631 * (300 + min(300, 200 * MOST_POWER)) / 600, rel=0.005)


def graph_steps(attention):
    """Two steps, each of them one CUDA graph with 100 us of matmul, 300 us of other work and some attention."""
    script = Script()
    for n in range(2):
        at = (420 + attention) * n
        script.event("user_annotation", f"ProfilerStep#{n}", at, 420 + attention, MAIN)
        number = script.call("cudaGraphLaunch", at, 10)
        script.kernel(GEMM, at + 15, 100, number=number)
        script.kernel(FLASH, at + 116, attention, number=number)
        script.kernel(POINTWISE, at + 117 + attention, 300, number=number)
        script.call("cudaDeviceSynchronize", at + 11, 408 + attention)
    return script


def test_steps_in_cuda_graphs_are_counted(tmp_path):
    """They have no phases. Kernels are those of one step, and what the step takes without the profiler is met."""
    before, after = (variant(graph_steps(took), tmp_path, str(took), 420 + took) for took in (200, 100))
    assert before.graph.steps == 2
    found = predictions(before, after, "attention")
    assert metrics_of(found)["kernels_time"] == pytest.approx([200, 100])
    assert by_name(found)["kernels_number"] == [1, 1]
    assert metrics_of(found)["replayed_time"][0] == pytest.approx(520, rel=0.002)
    assert metrics_of(found)["replayed_back_time"][0] == pytest.approx(620, rel=0.002)


def test_at_equal_power_only_where_kernels_run_nearly_all_the_time(tmp_path):
    busy = variant(gpu_bound(Script()), tmp_path, "busy", 631)
    assert len(replayed(busy, [Setting("attention", 0.9, None)])) == 2
    assert len(replayed(busy, [Setting("*", 0.05, None)])) == 1


def test_a_group_that_a_trace_does_not_have_is_refused(tmp_path):
    before = variant(gpu_bound(Script()), tmp_path, "before", 631)
    with pytest.raises(UserError, match="no such kernel"):
        predictions(before, before, "communication")


def test_a_step_of_an_h200_is_predicted_from_itself():
    """With its own times and numbers of kernels, and the time without the profiler, a step takes that time."""
    graph = graph_of(read_chrome(H200))
    step = 0.6 * graph.replay().span / graph.steps
    own = Variant([step] * 3, graph)
    kernels = "attention,elementwise+copy"
    found = by_name(predictions(own, own, kernels))
    assert found["replayed_time"] == pytest.approx([step], rel=1e-3)
    assert found["replayed_back_time"] == found["replayed_time"]
    assert found["kernels_number"][0] == sum(group.kernels for group in selections(graph, kernels.split(",")))


def test_both_variants_run_on_a_cpu_and_their_traces_are_kept(tmp_path):
    model = model_config("tiny", num_layers=2, d_model=32, num_heads=2, d_ff=64, context_length=16, vocab_size=64)
    run = RunConfig(model=model, size="", batch_size=2, num_steps=3, warmup_steps=1, device="cpu")
    kernels = next(iter(SWITCHED_STEPS.grid("quick", run)))["kernels"]
    config = {**run.to_dict(), "switch": "attention=sdpa", "kernels": kernels}
    found = by_name(measure_switch(config, folder=str(tmp_path / "files")))
    assert [len(found[name]) for name in ("step_time", "switched_time")] == [3, 3]
    assert min(*found["replayed_time"], *found["replayed_back_time"]) > 0
    before = read_variant(tmp_path / "files" / "before.json.gz", found["step_time"])
    after = read_variant(tmp_path / "files" / "after.json.gz", found["switched_time"])
    again = by_name(predictions(before, after, kernels))
    assert again == {name: samples for name, samples in found.items() if name in again}
    assert before.graph.steps == 2


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("switch", "fast"), [("attention=sdpa", "off"), ("attention=sdpa", "on"), ("fast=on", "graph")]
)
def test_switches_on_a_gpu(switch, fast, tmp_path):
    """Steps in CUDA graphs are counted, so that the kernels of one step fit into its time."""
    run = RunConfig(
        model=model_config("small", context_length=512), size="small", batch_size=4, precision="bf16", device="cuda",
        attention="auto", fast=PARTS["graph"][0] if fast == "graph" else fast, num_steps=5,
    )  # fmt: skip
    kernels = HOST if fast == "graph" else WITH_ATTENTION
    found = by_name(measure_switch({**run.to_dict(), "switch": switch, "kernels": kernels}, folder=str(tmp_path)))
    graphs = [read_variant(tmp_path / f"{name}.json.gz", [1.0]).graph for name in ("before", "after")]
    assert [graph.steps for graph in graphs] == [2, 2]
    for seconds, graph in zip(found.get("kernels_time", ()), graphs, strict=False):
        assert 0 < seconds < graph.replay().span / graph.steps
        own = Variant([graph.replay().span / graph.steps] * 3, graph)  # with its own times it takes its own time
        assert by_name(predictions(own, own, kernels))["replayed_time"] == pytest.approx(own.seconds[:1], rel=0.01)
    assert min(found["replayed_time"]) > 0


# -- grid, table, finding ---------------------------------------------------------------------------------------------


def grid(preset, device):
    return list(SWITCHED_STEPS.grid(preset, RunConfig(device=device)))


@pytest.mark.parametrize(("preset", "device"), [("quick", "cpu"), ("quick", "cuda"), ("course", "cuda")])
def test_both_variants_of_every_cell_can_be_configured(preset, device):
    for config in grid(preset, device):
        field, _, value = config["switch"].partition("=")
        run = RunConfig.of(config)
        other = dataclasses.replace(run, **{field: value})
        assert run != other
        assert SWITCHED_STEPS.instrument.memory(config).predicted > 0


def test_cells_have_folders_of_their_own():
    """Traces of two cells in one folder would overwrite each other."""
    labels = [SWITCHED_STEPS.instrument.label(config, ["switched_steps"]) for config in grid("course", "cuda")]
    assert len({re.sub(r"[^\w.]+", "-", label) for label in labels}) == len(labels) == 9
    assert "medium 8 x 1024 eager, attention sdpa -> auto" in labels


def test_ten_switches_or_more_are_predicted():
    """All but those of a CUDA graph are predicted in both directions."""
    cells = grid("course", "cuda")
    assert sum(1 if config["kernels"] == HOST else 2 for config in cells) == 16
    assert {config["fast"] for config in cells if config["switch"] == "fast=on"} == {
        others for others, _ in PARTS.values()
    }


def test_a_profiler_has_not_run_before_in_the_process():
    assert all(map(SWITCHED_STEPS.instrument.needs_fresh_process, grid("course", "cuda")))


def test_the_table_has_a_row_for_each_direction():
    """The largest error first; two predictions of a step are shown by their middle."""
    (table,) = tables(SAMPLES["switched_steps"], switched(1, 1, (1,), status=OOM, attention="sdpa"))
    headings = ("traced", "predicted step", "traced step (ms)", "predicted (ms)", "measured (ms)", "error")
    assert rows(table, *headings) == [
        ("eager with naive attention", "eager with our attention", "160.00", "95.00", "80.00", "+18.8%"),
        ("eager with our attention", "eager with naive attention", "80.00", "168.00", "160.00", "+5.0%"),
        ("fast without graph", "fast", "75.00", "42.90", "44.00", "-2.5%"),
        ("fast with SDPA", "fast with our attention", "45.00", "44.44", "44.00", "+1.0%"),
        ("fast with our attention", "fast with SDPA", "44.00", "44.55", "45.00", "-1.0%"),
        ("eager with SDPA", "eager with our attention", "OOM", "", "", ""),
    ]
    assert any("known beforehand: a trace of one step and its time without the profiler" in n for n in notes(table))
    assert all(CHINESE.search(note.zh) for note in table.notes)


def test_without_a_whole_cell_nothing_is_stated():
    assert stated(switched(1, 1, (1,), status=OOM)) == []
