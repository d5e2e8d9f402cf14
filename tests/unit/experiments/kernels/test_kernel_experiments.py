"""Tables, charts and findings of the experiments on kernels."""

import dataclasses

import pytest

from cs336_systems.config import RunConfig
from cs336_systems.experiments.catalogue import cells
from cs336_systems.record import GIB, Environment
from cs336_systems.text import Text
from tests.unit.experiments.kernels.samples import SAMPLES, profiled
from tests.unit.report.step_cells import OOM, charts, column, notes, rows, stated, tables, values

STATED = {
    "switched_steps": [
        "Switches predicted from a trace (5): median error 2.5%, at most 18.8% too long (eager with naive attention to "
        "eager with our attention)."
    ],
    "kernel_rates": ["The rates are off by 2.0% for a matmul, at the median of 263."],
    "kernels": [
        "In inference matmuls take 80.0% (small) to 90.0% (2.7B) of kernel time. In a training step matmuls take "
        "80.0% (small) to 90.0% (2.7B) of kernel time.",
        "Apart from matmuls, in a training step elementwise kernels take up to 20.0% (small).",
        "In forward the GPU is idle for 0.0% (2.7B, inference) to 50.0% (2.7B, training step) of the time.",
    ],
    "attention_ops": [
        "The scores' matmul has 42.7 to 53.3 times the FLOPs of softmax. It takes 1.5 (2.7B) to 3.0 (small) times as "
        "long as softmax.",
        "Scale, mask and softmax take 29% (small) to 38% (2.7B) of the time of attention.",
    ],
    "profiler_agreement": [
        "By CUDA events, kernels run for 50.0% of forward and backward (small). The rest of the time the GPU waits "
        "for the host.",
        "A profiled step takes 1.5 times as long as one without the profiler (small).",
    ],
}


# -- kernels ----------------------------------------------------------------------------------------------------------


def test_kinds_of_kernels_by_phase():
    backward = {"kind_table: backward": ("copy", 3.0, 0.004), "backward_event_time": (0.01,)}
    by_kind, *_ = tables(profiled(mode="train-step", **backward), profiled(size="xl", status=OOM))
    assert rows(by_kind, "phase", "wall (ms)", "kernels (ms)", "GPU idle", "launches")[:2] == [
        ("forward", "30.00", "10.00", "50.0%", "150"),
        ("backward", "60.00", "4.00", "N/A", "3"),
    ]
    assert rows(by_kind, "matmul", "elementwise", "copy")[:2] == [
        ("80.0%", "20.0%", "0.0%"),
        ("0.0%", "0.0%", "100.0%"),
    ]
    assert by_kind.rows[-1][:3] == ["xl", Text("inference", "推理"), "OOM"]
    assert any(OOM in note for note in notes(by_kind))


@pytest.mark.parametrize(("fast", "is_shown"), [("kernels,loss,optimizer", True), ("on", True), ("off", False)])
def test_kernels_of_a_fast_step_are_beside_their_prediction(fast, is_shown):
    """A profile leaves out the CUDA graph, and its kernels are those of a step with one."""
    how = {"fast": fast, "precision": "bf16", "attention": "auto", "device": "cuda"}
    gpu = Environment(gpu="NVIDIA H200", compute_capability="9.0")
    records = profiled(mode="train-step")
    found = tables([dataclasses.replace(own, config={**own.config, **how}, environment=gpu) for own in records])
    shown = [table for table in found if "measured and predicted" in table.title.en]
    assert len(shown) == is_shown
    if is_shown:
        assert column(shown[0], "kernels") == ["matmul", "attention", "other"]
        assert float(column(shown[0], "predicted (ms)")[0]) > 0


def test_unassigned_kernel_time_is_noted():
    lost = {"unknown_kernel_time": (0.001,), "kernel_time_outside_phases": (0.002,)}
    assert "of all kernel time 90.00% is of a known kind and 80.00% in a phase" in notes(tables(profiled(**lost))[0])


def test_without_a_gpu_operators_take_the_place_of_kernels():
    by_kind, *_ = tables(profiled(kernels_on_gpu=(0.0,)))
    assert "GPU idle" not in [column.heading() for column in by_kind.columns]
    assert any(note.startswith("no GPU: CPU operators") for note in notes(by_kind))


def test_kernels_of_a_single_cell_are_listed_by_name():
    _, by_name = tables(profiled())
    assert by_name.title.en.startswith("kernels: forward, by name · H200")
    assert rows(by_name, "share", "total (ms)", "instances", "mean (us)", "median (us)", "kind", "name") == [
        ("80.0%", "8.00", "100", "80.0", "80.0", "matmul", "gemm"),
        ("20.0%", "2.00", "50", "40.0", "40.0", "unknown", "add"),
    ]


def by_phase(size, **milliseconds):
    """Phase -> milliseconds of matmul and of copies."""
    kinds = {
        f"kind_table: {phase}": ("matmul", 2, matmul / 1e3, "copy", 1, copy / 1e3)
        for phase, (matmul, copy) in milliseconds.items()
    }
    return profiled(size=size, mode="train-step", **kinds)


def test_the_chart_of_one_cell_has_a_bar_for_each_phase():
    chart, *_ = charts(by_phase("small", forward=(3, 1), backward=(9, 1), optimizer=(0, 0)))
    matmul, copy = chart.series
    assert values(matmul) == {"forward, 4.0 ms": 75.0, "backward, 10.0 ms": 90.0}
    assert values(copy) == pytest.approx({"forward, 4.0 ms": 25.0, "backward, 10.0 ms": 10.0})
    assert chart.title.en.endswith("small, training step, context 512")


def test_each_mode_has_a_chart_with_a_bar_for_each_size_at_one_context():
    training, inference, _ = charts(
        by_phase("xl", forward=(9, 1), backward=(9, 1)),
        by_phase("small", forward=(3, 1)),
        profiled(),
        profiled(context=128),
    )
    assert values(training.series[0]) == {"small, 4.0 ms": 75.0, "xl, 20.0 ms": 90.0}
    assert training.bar_names == ["small, 4.0 ms", "xl, 20.0 ms"]
    assert inference.title.en.endswith("small, inference, context 512")


def test_the_share_of_a_step_without_a_kernel():
    both = {
        "kind_table: backward": ("copy", 3.0, 0.004),
        "backward_event_time": (0.01,),
        "busy_time: backward": (0.008,),
    }
    *_, chart = charts(profiled(mode="train-step", **both), profiled(size="xl", mode="inference", matmul=0.013))
    assert {series.name.en: values(series) for series in chart.series} == {
        "training step": pytest.approx({"small": 40.0}),
        "inference": pytest.approx({"xl": 25.0}),
    }
    assert len(charts(profiled(kernels_on_gpu=(0.0,)))) == 1, "a CPU has no idle GPU"


# -- attention_ops, profiler_agreement --------------------------------------------------------------------------------


def test_time_and_flops_inside_attention():
    (table,) = tables(SAMPLES["attention_ops"])
    headings = ("scores matmul (ms)", "scale and mask (ms)", "softmax (ms)", "final matmul (ms)")
    assert rows(table, *headings)[0] == ("3.00", "1.00", "1.00", "2.00")
    assert rows(table, "matmul / softmax, time", "matmul / softmax, FLOPs") == [("3.00x", "42.7x"), ("1.50x", "53.3x")]


def test_operations_inside_attention_are_stacked():
    (chart,) = charts(SAMPLES["attention_ops"])
    assert {series.name.en: values(series)["2.7B"] for series in chart.series} == pytest.approx(
        {"scores matmul": 3.0, "scale and mask": 1.0, "softmax": 2.0, "final matmul": 2.0}
    )


def test_the_gpu_is_idle_for_less_as_in_training():
    (chart,) = charts(profiled("profiler_agreement", **{"queued_forward_event_time": (0.0125,)}))
    waiting, queued = map(values, chart.series)
    assert (waiting, queued) == (pytest.approx({"small": 50.0}), pytest.approx({"small": 20.0}))


def test_kernels_are_compared_with_queued_events_where_there_are_any():
    (table,) = tables(profiled("profiler_agreement"))
    assert rows(table, "phase", "kernels over queued events", "launch-bound (ms)", "step, profiled") == [
        (phase, "-50.00%", "10.00", "1.50x") for phase in ("forward", "all")
    ]
    queued = profiled("profiler_agreement", **{"queued_forward_event_time": (0.0102,)})
    assert column(tables(queued)[0], "kernels over queued events")[0] == "-1.96%"
    assert stated(queued)[1] == (
        "Without synchronisation between phases, kernels and CUDA events differ by 1.96% (small)."
    )


def test_both_profilers_are_compared_where_both_ran():
    said = stated(profiled("profiler_agreement", **{"nsys_busy_time: forward": (0.008,)}))
    assert said[-1] == "torch.profiler and nsys differ by 25.00% at most (small, forward)."


@pytest.mark.parametrize("experiment", SAMPLES)
def test_findings(experiment):
    assert stated(SAMPLES[experiment]) == STATED[experiment]


# -- the contexts of 2026 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "modes"), [("kernels", 2), ("attention_ops", 1), ("profiler_agreement", 1)])
def test_2026_profiles_two_sizes_with_the_three_largest_contexts_that_fit(name, modes):
    found = [config for _, config in cells([name], "2026", RunConfig(device="cuda"), 140 * GIB)]
    contexts = {(config["size"], config["model"]["context_length"]) for config in found}
    assert contexts == {("small", 1024), ("small", 2048), ("small", 4096), ("2.7B", 256), ("2.7B", 512), ("2.7B", 1024)}
    assert len(found) == len(contexts) * modes
    smaller = [config for _, config in cells([name], "2026", RunConfig(device="cuda"), 24 * GIB)]
    assert max(c["model"]["context_length"] for c in smaller if c["size"] == "small") == 2048


def test_charts_show_the_context_that_most_sizes_have():
    chart, *_ = charts(*(profiled(size=size, context=context) for size, context in SIZES_AND_CONTEXTS))
    assert len(chart.bar_names) == 2


SIZES_AND_CONTEXTS = (("small", 1024), ("small", 2048), ("2.7B", 512), ("2.7B", 1024))
