"""Instruments of attention alone: the float64 reference, error bounds, phases, interleaving, the leaderboard."""

import dataclasses
import functools
import itertools
import math
import statistics
import sys
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from cs336_systems import record
from cs336_systems.experiments import worker
from cs336_systems.experiments.attention import measure_attention as instrument
from cs336_systems.experiments.catalogue import catalogue
from cs336_systems.measure.memory_trace import StorageTracker
from cs336_systems.measure.timing import FEW_CALLS, time_calls
from cs336_systems.predict.attention_model import AttentionShape, naive_peak
from cs336_systems.report.sections import tables
from tests.unit.experiments.attention.attention_cells import attention_config, grid, passes_config
from tests.unit.experiments.scripted_worker import run

CPU = torch.device("cpu")
RESULTS = ("out", "dq", "dk", "dv")


def by_name(metrics):
    return {metric.name: metric.samples for metric in metrics if not metric.variant}


def by_variant(metrics):
    """(variant, metric) -> samples."""
    return {(metric.variant, metric.name): metric.samples for metric in metrics if metric.variant}


# -- float64 reference and inputs -------------------------------------------------------------------------------------


def test_flops_follow_the_convention_of_flash_attention():
    """Published for this shape: 3.69 ms = 521 TFLOP/s."""
    shape = AttentionShape(1, 16, 16384, 64, is_causal=True, precision="bf16")
    assert shape.flops / 3.69e-3 == pytest.approx(521e12, rel=2e-3)
    assert dataclasses.replace(shape, is_causal=False).flops == 2 * shape.flops


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_float64_reference_agrees_with_autograd(monkeypatch, is_causal, rows):
    monkeypatch.setattr(instrument, "SCORES_AT_ONCE", rows * 2 * 3 * 13)
    q, k, v, grad = (torch.randn(2, 3, 13, 4, dtype=torch.float64, requires_grad=True) for _ in range(4))
    scores = q @ k.mT / 2
    if is_causal:
        scores = scores.masked_fill(torch.ones(13, 13, dtype=torch.bool).triu(1), -math.inf)
    out = torch.softmax(scores, -1) @ v
    expected = [out, *torch.autograd.grad(out, (q, k, v), grad)]
    exact = instrument.attention_in_float64(q, k, v, grad, is_causal=is_causal)
    assert tuple(exact) == RESULTS
    for found, want in zip(exact.values(), expected, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


def test_float64_reference_never_holds_all_scores(monkeypatch):
    shape = AttentionShape(1, 1, 2048, 2, is_causal=True, precision="fp32")
    inputs = instrument.draw(shape, CPU, 0)
    monkeypatch.setattr(instrument, "SCORES_AT_ONCE", 2**16)
    with StorageTracker() as tracker:
        instrument.attention_in_float64(*inputs, is_causal=True)
    assert tracker.peak < 8 * 2**16 * 8 < 2048**2 * 8


def test_inputs_depend_on_the_seed_alone():
    shape = AttentionShape(1, 2, 16, 8, is_causal=True, precision="bf16")
    first, again, other = (instrument.draw(shape, CPU, seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert [t.requires_grad for t in first] == [True, True, True, False]
    assert {t.dtype for t in first} == {torch.bfloat16}


def test_implementations_of_one_shape_share_the_exact_results(monkeypatch):
    shapes = []
    compute = instrument.attention_in_float64

    def counted(q, *others, **fields):
        shapes.append(q.shape)
        return compute(q, *others, **fields)

    monkeypatch.setattr(instrument, "attention_in_float64", counted)
    instrument._exact.cache_clear()
    for size, name in itertools.product([(1, 1, 16, 8), (1, 1, 24, 8)], ["reference", "sdpa"]):
        instrument.measure_flash(attention_config(name, size))
    assert shapes == [(1, 1, 16, 8), (1, 1, 24, 8)]


# -- wrong results ----------------------------------------------------------------------------------------------------


def correct(q, k, v):
    return instrument.attention(q, k, v, is_causal=True, impl="reference")


MISTAKES = {
    "out": lambda q, k, v: correct(q, k, v) * (1 + 1e-4),
    "dq": lambda q, k, v: correct(q, k, v) + 1e-3 * (q - q.detach()),
    "dk": lambda q, k, v: correct(q, k, v) + 1e-3 * (k - k.detach()),
    "dv": lambda q, k, v: correct(q, k, v) + 1e-3 * (v - v.detach()),
}
"""Each is wrong in one result alone: x - x.detach() is 0, and its gradient is not."""


def builder(attend):
    return lambda shape, device, dynamic: nullcontext(attend)


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("experiment", ["flash", "pytorch_attention"])
def test_a_wrong_implementation_is_a_failed_cell(monkeypatch, name, experiment):
    monkeypatch.setitem(instrument.IMPLEMENTATIONS, "reference", builder(MISTAKES[name]))
    config = attention_config(warmup_steps=1, num_steps=1)
    measure = catalogue()[experiment].instrument.measure
    answer = worker._answer({"measure": measure, "config": config, "options": {}})
    assert answer["event"] == "failure"
    assert answer["status"].startswith(f"error: ArithmeticError: wrong result: {name} off by ")


def test_nan_is_a_wrong_result(monkeypatch):
    monkeypatch.setitem(instrument.IMPLEMENTATIONS, "reference", builder(lambda q, k, v: correct(q, k, v) * math.nan))
    with pytest.raises(ArithmeticError, match="out off by nan"):
        instrument.measure_flash(attention_config())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_rounding_is_within_the_bounds_of_its_own_precision_only(precision):
    config = attention_config(size=(1, 1, 128, 32), precision=precision)
    found = by_name(instrument.measure_flash(config))
    errors = [found[f"error_{name}"][0] for name in RESULTS]
    assert instrument.ERROR_BOUNDS["fp32"] < min(errors) <= max(errors) < instrument.ERROR_BOUNDS[precision] / 2


# -- instruments ------------------------------------------------------------------------------------------------------


def test_naive_passes_are_timed_by_phase():
    found = by_name(instrument.measure_pytorch_attention(passes_config()))
    counts = {"forward_time": 3, "backward_time": 3, "step_time": 3, "warmup_time": 1}
    assert {name: len(found[name]) for name in counts} == counts
    assert found["error_dq"][0] < 1e-5
    assert found["flops"] == [4 * 32 * 32 * 8 * 3.5]
    assert "memory_before_backward" not in found, "a CPU has no caching allocator"


def test_flash_times_forward_backward_and_both():
    found = by_name(instrument.measure_flash(attention_config()))
    assert {len(found[f"{phase}_time"]) for phase in ("forward", "backward", "forward_backward")} == {FEW_CALLS}
    assert {f"error_{name}" for name in RESULTS} <= found.keys()


def test_gradients_are_dropped_before_each_timed_call():
    x = torch.ones(3, requires_grad=True)
    seen = []

    def call():
        seen.append(x.grad)
        x.sum().backward()

    assert len(time_calls(call, device=CPU, warmup_ms=1, rep_ms=1, gradients=[x])) == FEW_CALLS
    assert set(seen) == {None}


def test_rivals_are_interleaved_and_a_failure_does_not_end_the_others(monkeypatch):
    calls = []

    def recording(name):
        def attend(q, k, v):
            calls.append(name)
            return correct(q, k, v)

        return builder(attend)

    for name in ("a", "b", "c"):
        monkeypatch.setitem(instrument.IMPLEMENTATIONS, name, recording(name))
    monkeypatch.setitem(instrument.IMPLEMENTATIONS, "wrong", builder(MISTAKES["dv"]))
    monkeypatch.setitem(instrument.IMPLEMENTATIONS, "absent", lambda *_: 1 / 0)
    config = attention_config(implementations=["a", "wrong", "b", "absent", "c"], rounds=4)
    metrics = instrument.measure_rivals(config)
    found = by_variant(metrics)
    assert "".join(name for name, _ in itertools.groupby(calls)) == "abc" + "abc" + "bca" + "cab" + "cba"
    for name in ("a", "b", "c"):
        assert {(name, f"error_{result}") for result in RESULTS} <= found.keys()
        assert len(found[name, "forward_time"]) == len(found[name, "forward_backward_time"]) == 4
    assert found["wrong", "status"][0].startswith("ArithmeticError: wrong result: dv off by ")
    assert found["absent", "status"] == ["ZeroDivisionError: division by zero"]
    assert Counter(variant for variant, _ in found)["wrong"] == Counter(variant for variant, _ in found)["absent"] == 1
    assert by_name(metrics).keys() == {"flops"}


@pytest.mark.parametrize("count", range(1, 9))
def test_interleaving_puts_each_after_each_other_equally_often(count):
    names = list("abcdefgh"[:count])
    order = list(instrument.interleave(names, count * (1 + count % 2)))
    neighbours = Counter()
    for start in range(0, len(order), count):
        one = order[start : start + count]
        assert sorted(one) == names
        neighbours.update(itertools.pairwise(one))
    assert set(neighbours) == set(itertools.permutations(names, 2))
    assert len(set(neighbours.values())) <= 1
    assert len({*order[::count]}) == count, "each comes first"


def test_flash_attention_4_takes_transposed_inputs_and_may_return_a_tuple(monkeypatch):
    def flash_attn_func(q, k, v, causal):
        assert q.shape == (2, 48, 3, 16)
        outs = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)
        return outs.transpose(1, 2), None

    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_func=flash_attn_func))
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    config = attention_config(size=(2, 3, 48, 16), implementations=["flash_attention_4"], rounds=1)
    assert by_variant(instrument.measure_rivals(config))["flash_attention_4", "error_dq"][0] < 1e-5


def test_the_leaderboard_compiles_once_and_checks_gradients(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append(function) or function)
    found = by_name(instrument.measure_leaderboard(attention_config(size=(1, 2, 16, 8))))
    assert len(compiled) == 1
    assert len(found["leaderboard_time"]) == FEW_CALLS
    assert max(found[f"error_{name}"][0] for name in RESULTS) < 1e-5
    monkeypatch.setitem(instrument.IMPLEMENTATIONS, "reference", builder(MISTAKES["dk"]))
    with pytest.raises(ArithmeticError, match="dk off by"):
        instrument.measure_leaderboard(attention_config(size=(1, 2, 16, 8)))


def test_means_of_parts_keep_the_mean_and_leave_out_the_first():
    times = [math.sin(n) + 2 for n in range(2000)]
    parts = instrument.means_of_parts(times)
    assert len(parts) == 10
    assert statistics.fmean(parts) == pytest.approx(statistics.fmean(times), rel=1e-12)
    assert instrument.means_of_parts([100.0, *times]) == parts
    assert instrument.means_of_parts([3.0, 4.0]) == [3.0, 4.0]


@pytest.mark.parametrize("size", [(2, 3, 256, 16), (1, 1, 512, 8), (1, 1, 128, 128)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_predicted_naive_peak_equals_the_traced_one(size, is_causal, precision):
    shape = AttentionShape(*size, is_causal=is_causal, precision=precision)
    inputs = instrument.draw(shape, CPU, 0)
    tracker = StorageTracker()
    for tensor in inputs:
        tracker.track(tensor, "inputs")
    with instrument.implementation("reference", shape, CPU) as attend, tracker:
        attend(*inputs[:3]).backward(inputs[3])
    assert naive_peak(shape, on_cuda=False) == pytest.approx(tracker.peak, rel=0.01)


# -- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
@pytest.mark.xdist_group("ranks")
def test_quick_presets_run_on_a_cpu(elsewhere, forked_python, monkeypatch):
    """All but the compiled cells, which take seconds each to compile."""
    monkeypatch.setattr(sys, "executable", str(forked_python))
    requests = [(name, c) for name in ("pytorch_attention", "flash") for c in grid(name, "quick", "cpu")]
    requests = [(name, config) for name, config in requests if config["implementation"] != "compiled"]
    outcome = run(elsewhere / "r.jsonl", *requests)
    records = record.load(elsewhere / "r.jsonl").records
    assert (outcome.done, outcome.failed) == (4 + 12, 0), {r.status for r in records}
    found = tables(records, catalogue())
    assert {table.title.en.split(":")[0] for table in found} == {"pytorch_attention", "flash"}
    assert not any(text in ("error", "OOM", "wrong") for table in found for row in table.rows for text in row)


def test_compiled_cells_of_different_shapes_share_one_graph(monkeypatch):
    """Dynamo makes the graph, so its backend need not compile: inductor takes 40 s for it."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.utils.counters.clear()
    for size in [(2, 1, 64, 16), (2, 1, 128, 16), (2, 1, 64, 32)]:
        instrument.measure_pytorch_attention(passes_config("compiled", size=size))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("config", grid("flash", "quick")[:8], ids=lambda config: config["implementation"])
def test_every_implementation_is_correct_and_timed_on_a_gpu(config):
    found = by_name(instrument.measure_flash(config))
    assert all(min(found[f"{phase}_time"]) > 0 for phase in ("forward", "backward", "forward_backward"))
    assert found["peak_memory"][0] > 0
    if config["implementation"] == "reference":
        assert found["predicted_memory"][0] == pytest.approx(found["peak_memory"][0], rel=0.15)


@pytest.mark.gpu
def test_rivals_and_leaderboard_on_a_gpu():
    (config,) = grid("attention_rivals", "quick")
    found = by_variant(instrument.measure_rivals({**config, "rounds": 1}))
    assert not [samples for (_, metric), samples in found.items() if metric == "status"]
    assert {name for name, metric in found if metric == "replayed_time"} == set(config["implementations"])
    for config in grid("flash_leaderboard", "quick"):
        shorter = {**config, "seq_len": 2048, "warmup_ms": 10, "rep_ms": 50}
        assert len(by_name(instrument.measure_leaderboard(shorter))["leaderboard_time"]) == 10
