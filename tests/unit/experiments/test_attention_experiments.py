"""The attention experiments: their grids, what an implementation is held against, what is recorded, and the tables."""

import dataclasses
import importlib.metadata
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
from cs336_systems.config import RunConfig, UserError
from cs336_systems.experiments import runner as runner_module
from cs336_systems.experiments import worker
from cs336_systems.experiments.attention import measure_attention as instrument
from cs336_systems.experiments.catalogue import ATTENTION_INSTRUMENTS, EXPERIMENTS, cells
from cs336_systems.experiments.runner import Cell, Runner, gather
from cs336_systems.measure.memory_trace import StorageTracker
from cs336_systems.measure.timing import FEW_CALLS, time_calls
from cs336_systems.predict.attention_model import AttentionShape, naive_peak
from cs336_systems.record import CELL_TIME, GIB, Environment, Record
from cs336_systems.report.sections import tables
from cs336_systems.table import FORMATS
from tests.helpers import CPU_ONLY

CPU = torch.device("cpu")
GPU = Environment(gpu="H200", gpu_memory=24 * GIB, tf32=False)


def grid(experiment, preset="course", device="cuda", **fields):
    return [config for _, config in cells([experiment], preset, RunConfig(device=device, **fields))]


def attention_config(implementation="reference", size=(1, 1, 32, 8), *, is_causal=True, precision="fp32", **fields):
    shape = AttentionShape(*size, is_causal=is_causal, precision=precision)
    measuring = {"implementation": implementation, "device": "cpu", "seed": 0, "warmup_ms": 1, "rep_ms": 1}
    return {**dataclasses.asdict(shape), **measuring, **fields}


def passes_config(implementation="reference", **fields):
    config = attention_config(implementation, is_causal=False, warmup_steps=1, num_steps=3, **fields)
    return {name: value for name, value in config.items() if not name.endswith("_ms")}


def by_metric(metrics):
    return {metric: samples for metric, _, samples in metrics}


# -- grids ------------------------------------------------------------------------------------------------------------


def test_the_courses_grid_of_the_plain_formula():
    configs = grid("pytorch_attention")
    shapes = {(c["batch_size"], c["heads"], c["seq_len"], c["head_dim"]) for c in configs}
    lengths, dims = (256, 1024, 4096, 8192, 16384), (16, 32, 64, 128)
    assert shapes == {(8, 1, length, dim) for length, dim in itertools.product(lengths, dims)}
    assert Counter(c["implementation"] for c in configs) == {"reference": 20, "compiled": 20}
    assert {(c["is_causal"], c["precision"], c["num_steps"]) for c in configs} == {(False, "fp32", 100)}
    assert {c["num_steps"] for c in grid("pytorch_attention", num_steps=7)} == {7}


def test_the_flash_grid_has_every_shape_and_nothing_impossible():
    configs = grid("flash")
    assert len(configs) == 10 * 4 * (8 + 5), "fp32 without those that have none"
    assert {c["seq_len"] for c in configs} == {2**n for n in range(7, 17)}
    assert {c["head_dim"] for c in configs} == {16, 32, 64, 128}
    fp32 = {c["implementation"] for c in configs if c["precision"] == "fp32"}
    bf16 = {c["implementation"] for c in configs if c["precision"] == "bf16"}
    assert bf16 - fp32 == {"sdpa_flash", "sdpa_cudnn", "flex"}
    assert fp32 <= bf16
    assert all(c["is_causal"] and c["batch_size"] == c["heads"] == 1 for c in configs)


def test_implementations_of_one_shape_are_adjacent():
    """Only the last shape's truth is kept."""
    shapes = [shape for shape, _ in itertools.groupby(AttentionShape.of(config) for config in grid("flash"))]
    assert len(shapes) == len(set(shapes)) == 80


def test_a_cpu_is_not_asked_for_gpu_kernels():
    for preset in ("quick", "course"):
        names = {c["implementation"] for c in grid("flash", preset, "cpu")}
        assert names == {"reference", "flash_torch", "compiled", "sdpa"}
    quick = grid("flash", "quick", "cpu")
    assert {(c["seq_len"], c["head_dim"]) for c in quick} == set(itertools.product((64, 256), (16, 64)))
    assert {c["precision"] for c in quick} == {"fp32"}


def test_quick_grids_are_small():
    sizes = {name: len(grid(name, "quick")) for name in ATTENTION_INSTRUMENTS}
    assert sizes == {"pytorch_attention": 8, "flash": 32, "attention_rivals": 1, "flash_leaderboard": 5}


def test_the_rivals_shapes_and_the_leaderboards():
    shapes = [AttentionShape.of(config) for config in grid("attention_rivals")]
    assert len(set(shapes)) == 7
    assert [str(s) for s in shapes[:3]] == [
        "1x16x16384x64 bf16 causal", "1x16x16384x128 bf16 causal", "1x16x16384x64 bf16",
    ]  # fmt: skip
    course, quick = grid("flash_leaderboard"), grid("flash_leaderboard", "quick")
    assert {(str(AttentionShape.of(c)), c["warmup_ms"], c["rep_ms"]) for c in course} == {
        ("1x16x16384x64 bf16 causal", 1000, 10_000)
    }
    assert {(c["warmup_ms"], c["rep_ms"]) for c in quick} == {(200, 1000)}
    assert [c["implementation"] for c in course] == ["flash_hopper", "flash_triton", "sdpa_flash", "sdpa_cudnn", "flex"]


def test_flash_attention_4_is_a_rival_where_it_is_installed(monkeypatch):
    """It has heads inside the sequence, and gives the logsumexp, too."""
    assert "flash_attention_4" not in grid("attention_rivals")[0]["implementations"]
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"flash-attn-4": "4.0"}[name])
    for experiment in ("attention_rivals", "flash_leaderboard"):
        names = [name for c in grid(experiment) for name in c.get("implementations") or [c["implementation"]]]
        assert "flash_attention_4" in names

    def flash_attn_func(q, k, v, causal):
        assert q.shape == (2, 48, 3, 16)
        outs = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)
        return outs.transpose(1, 2), None

    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_func=flash_attn_func))
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    config = attention_config(size=(2, 3, 48, 16), implementations=["flash_attention_4"], rounds=1)
    found = by_metric(instrument.measure_rivals(config))
    assert found["flash_attention_4_error_dq"][0] < 1e-5


@pytest.mark.parametrize("experiment", ATTENTION_INSTRUMENTS)
def test_every_implementation_of_a_grid_exists(experiment):
    devices = ("cuda", "cpu") if experiment in ("pytorch_attention", "flash") else ("cuda",)
    for device, config in ((d, c) for d in devices for c in grid(experiment, "full", d)):
        names = config.get("implementations") or [config["implementation"]]
        assert set(names) <= instrument.IMPLEMENTATIONS.keys(), device
        assert config["device"] == device


@pytest.mark.parametrize("experiment", ["attention_rivals", "flash_leaderboard"])
def test_what_needs_a_gpu_says_so(experiment):
    with pytest.raises(UserError, match=f"{experiment} needs a CUDA GPU"):
        grid(experiment, "quick", "cpu")


def test_cells_have_names_one_can_read():
    names = {name: Cell(EXPERIMENTS[name].instrument, grid(name)[0]).name for name in ATTENTION_INSTRUMENTS}
    assert names == {
        "pytorch_attention": "pytorch_attention 8x1x256x16 fp32 reference",
        "flash": "flash 1x1x128x16 bf16 causal flash_triton",
        "attention_rivals": "attention_rivals 1x16x16384x64 bf16 causal in turns",
        "flash_leaderboard": "flash_leaderboard 1x16x16384x64 bf16 causal flash_hopper",
    }


def test_flops_as_they_are_counted_for_attention():
    """FlashAttention's convention: ANCHORS has 3.69 ms = 521 TFLOP/s for this shape."""
    shape = AttentionShape(1, 16, 16384, 64, is_causal=True, precision="bf16")
    assert shape.flops / 3.69e-3 == pytest.approx(521e12, rel=2e-3)
    assert dataclasses.replace(shape, is_causal=False).flops == 2 * shape.flops


# -- truth ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_the_oracle_agrees_with_autograd(monkeypatch, is_causal, rows):
    size = (2, 3, 13, 4)
    monkeypatch.setattr(instrument, "ORACLE_SCORES", rows * 2 * 3 * 13)
    q, k, v, grad = (torch.randn(size, dtype=torch.float64, requires_grad=True) for _ in range(4))
    scores = q @ k.mT / 2
    if is_causal:
        scores = scores.masked_fill(torch.ones(13, 13, dtype=torch.bool).triu(1), -math.inf)
    out = torch.softmax(scores, -1) @ v
    expected = [out, *torch.autograd.grad(out, (q, k, v), grad)]
    truth = instrument.attention_in_float64(q, k, v, grad, is_causal=is_causal)
    assert list(truth) == ["out", "dq", "dk", "dv"]
    for found, want in zip(truth.values(), expected, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


def test_the_oracle_never_holds_all_scores():
    shape = AttentionShape(1, 1, 2048, 2, is_causal=True, precision="fp32")
    inputs = instrument.draw(shape, CPU, 0)
    tracker = StorageTracker()
    with pytest.MonkeyPatch.context() as patch, tracker:
        patch.setattr(instrument, "ORACLE_SCORES", 2**16)
        instrument.attention_in_float64(*inputs, is_causal=True)
    assert tracker.peak < 8 * 2**16 * 8 < 2048**2 * 8


def test_inputs_are_the_same_again_and_other_for_another_seed():
    shape = AttentionShape(1, 2, 16, 8, is_causal=True, precision="bf16")
    first, again, other = (instrument.draw(shape, CPU, seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert [t.requires_grad for t in first] == [True, True, True, False]
    assert {t.dtype for t in first} == {torch.bfloat16}


def right(q, k, v):
    return instrument.attention(q, k, v, is_causal=True, impl="reference")


MISTAKES = {
    "out": lambda q, k, v: right(q, k, v) * (1 + 1e-4),
    "dq": lambda q, k, v: right(q, k, v) + 1e-3 * (q - q.detach()),
    "dk": lambda q, k, v: right(q, k, v) + 1e-3 * (k - k.detach()),
    "dv": lambda q, k, v: right(q, k, v) + 1e-3 * (v - v.detach()),
}
"""Each wrong in one result alone: x - x.detach() is 0, and its gradient is not."""


def build(attend):
    return lambda shape, device, dynamic: nullcontext(attend)


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("experiment", ["flash", "pytorch_attention"])
def test_a_wrong_implementation_is_an_error_row(monkeypatch, name, experiment):
    monkeypatch.setitem(instrument.IMPLEMENTATIONS, "reference", build(MISTAKES[name]))
    config = attention_config(warmup_steps=1, num_steps=1)
    answer = worker._answer({"instrument": experiment, "config": config, "options": {}})
    assert answer["event"] == "failure"
    assert answer["status"].startswith(f"error: ArithmeticError: wrong result: {name} off by ")


def test_nan_is_a_wrong_result(monkeypatch):
    monkeypatch.setitem(instrument.IMPLEMENTATIONS, "reference", build(lambda q, k, v: right(q, k, v) * math.nan))
    with pytest.raises(ArithmeticError, match="out off by nan"):
        instrument.measure_flash(attention_config())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_plain_rounding_is_not_a_wrong_result(precision):
    """And the bounds are not so wide that one precision would pass for another."""
    config = attention_config(size=(1, 2, 512, 64), precision=precision)
    errors = [samples[0] for name, samples in by_metric(instrument.measure_flash(config)).items() if "error" in name]
    assert len(errors) == 4
    assert instrument.ERROR_BOUNDS["fp32"] < min(errors) <= max(errors) < instrument.ERROR_BOUNDS[precision] / 2


# -- instruments ------------------------------------------------------------------------------------------------------


def test_passes_are_timed_by_phase():
    found = by_metric(instrument.measure_pytorch_attention(passes_config()))
    assert {name: len(found[name]) for name in ("forward_time", "backward_time", "step_time", "warmup_time")} == {
        "forward_time": 3, "backward_time": 3, "step_time": 3, "warmup_time": 1,
    }  # fmt: skip
    assert found["error_dq"][0] < 1e-5
    assert found["flops"] == [4 * 32 * 32 * 8 * 3.5]
    assert "memory_before_backward" not in found, "there is no allocator to ask on a CPU"


def test_flash_is_timed_in_three_ways():
    found = by_metric(instrument.measure_flash(attention_config()))
    assert {len(found[f"{phase}_time"]) for phase in ("forward", "backward", "forward_backward")} == {FEW_CALLS}
    assert {f"error_{name}" for name in ("out", "dq", "dk", "dv")} <= found.keys()


def test_implementations_of_one_shape_share_the_truth(monkeypatch):
    shapes = []
    oracle = instrument.attention_in_float64

    def counted(q, *others, **fields):
        shapes.append(q.shape)
        return oracle(q, *others, **fields)

    monkeypatch.setattr(instrument, "attention_in_float64", counted)
    instrument._truth.cache_clear()
    for size, name in itertools.product([(1, 1, 16, 8), (1, 1, 24, 8)], ["reference", "sdpa"]):
        instrument.measure_flash(attention_config(name, size))
    assert shapes == [(1, 1, 16, 8), (1, 1, 24, 8)]


def test_calls_are_timed_after_gradients_were_dropped():
    x = torch.ones(3, requires_grad=True)
    seen = []

    def call():
        seen.append(x.grad)
        x.sum().backward()

    times = time_calls(call, device=CPU, warmup_ms=1, rep_ms=1, gradients=[x])
    assert len(times) == FEW_CALLS
    assert set(seen) == {None}


def test_rivals_take_turns_and_one_that_fails_does_not_end_the_others(monkeypatch):
    calls = []

    def named(name):
        def attend(q, k, v):
            calls.append(name)
            return right(q, k, v)

        return build(attend)

    for name in ("a", "b", "c"):
        monkeypatch.setitem(instrument.IMPLEMENTATIONS, name, named(name))
    monkeypatch.setitem(instrument.IMPLEMENTATIONS, "wrong", build(MISTAKES["dv"]))
    monkeypatch.setitem(instrument.IMPLEMENTATIONS, "absent", lambda *_: 1 / 0)
    config = attention_config(implementations=["a", "wrong", "b", "absent", "c"], rounds=4)
    found = by_metric(instrument.measure_rivals(config))
    order = [name for name, _ in itertools.groupby(calls)]
    assert "".join(order) == "abc" + "abc" + "bca" + "cab" + "cba"
    for name in ("a", "b", "c"):
        assert {f"{name}_error_out", f"{name}_error_dv"} <= found.keys()
        assert len(found[f"{name}_forward_time"]) == len(found[f"{name}_forward_backward_time"]) == 4
    assert found["wrong_status"][0].startswith("ArithmeticError: wrong result: dv off by ")
    assert found["absent_status"] == ["ZeroDivisionError: division by zero"]
    assert not [name for name in found if name.startswith(("wrong_", "absent_")) and not name.endswith("status")]


@pytest.mark.parametrize("count", range(1, 9))
def test_each_comes_after_each_other_equally_often(count):
    names = list("abcdefgh"[:count])
    rounds = count * (1 + count % 2)
    turns = list(instrument.in_turns(names, rounds))
    neighbours = Counter()
    for start in range(0, len(turns), count):
        one = turns[start : start + count]
        assert sorted(one) == names
        neighbours.update(itertools.pairwise(one))
    assert set(neighbours) == set(itertools.permutations(names, 2))
    assert len(set(neighbours.values())) <= 1
    assert len({*turns[::count]}) == count  # and each comes first


def test_the_leaderboards_lines(monkeypatch):
    """Compiling is replaced: what is compiled, and that a wrong gradient is seen, is the question here."""
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append(function) or function)
    found = by_metric(instrument.measure_leaderboard(attention_config(size=(1, 2, 16, 8))))
    assert len(compiled) == 1
    assert len(found["leaderboard_time"]) == FEW_CALLS
    assert max(found[f"error_{name}"][0] for name in ("out", "dq", "dk", "dv")) < 1e-5
    monkeypatch.setitem(instrument.IMPLEMENTATIONS, "reference", build(MISTAKES["dk"]))
    with pytest.raises(ArithmeticError, match="dk off by"):
        instrument.measure_leaderboard(attention_config(size=(1, 2, 16, 8)))


def test_thousands_of_samples_become_ten_with_the_same_mean():
    times = [math.sin(n) + 2 for n in range(2000)]
    parts = instrument.means_of_parts(times)
    assert len(parts) == 10
    assert statistics.fmean(parts) == pytest.approx(statistics.fmean(times), rel=1e-12)
    uneven = [100.0, *times]
    assert instrument.means_of_parts(uneven) == parts, "the first is the one left out"
    assert instrument.means_of_parts([3.0, 4.0]) == [3.0, 4.0]


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(2, 3, 256, 16), (1, 1, 512, 8), (1, 1, 128, 128)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_naive_peak_is_what_tensors_take(size, is_causal, precision):
    shape = AttentionShape(*size, is_causal=is_causal, precision=precision)
    inputs = instrument.draw(shape, CPU, 0)
    tracker = StorageTracker()
    for tensor in inputs:
        tracker.track(tensor, "inputs")
    with instrument.implementation("reference", shape, CPU) as attend, tracker:
        attend(*inputs[:3]).backward(inputs[3])
    assert naive_peak(shape, on_cuda=False) == pytest.approx(tracker.peak, rel=0.01)


class NoMemory:
    """A worker on a GPU of 24 GiB on which everything that is tried runs out of memory."""

    asked: list

    def __init__(self):
        self.used = False
        self.machine = {"event": "ready", "device": "cuda", "environment": dataclasses.asdict(GPU)}

    def ask(self, request, timeout):
        self.asked.append(request["config"]["implementation"])
        return {"event": "failure", "status": "oom"}

    def stop(self):
        pass


def test_what_does_not_fit_says_what_it_needs_and_is_not_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(runner_module, "Worker", NoMemory)
    NoMemory.asked = []
    plain = [c for c in grid("pytorch_attention") if (c["seq_len"], c["head_dim"]) == (16384, 64)]
    fused = attention_config("flash_torch", device="cuda")
    with Runner(tmp_path / "r.jsonl", quiet=True) as runner:
        runner.run(gather([*(("pytorch_attention", config) for config in plain), ("flash", fused)]))
    statuses = {r.config["implementation"]: r.status for r in record.load(tmp_path / "r.jsonl").records}
    assert statuses == {
        "reference": "oom: needs 32.3 GiB of 24.0 GiB (predicted, not tried)",
        "compiled": "oom: needs at least 16.2 GiB of 24.0 GiB",
        "flash_torch": "oom: out of memory",
    }
    assert NoMemory.asked == ["compiled", "flash_torch"]


# -- a run on a CPU, for real -----------------------------------------------------------------------------------------


def run_on_cpu(path, requests):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CPU_ONLY.items():
            patch.setenv(name, value)
        with Runner(path, quiet=True) as runner:
            outcome = runner.run(gather(requests))
    return outcome, record.load(path).records


@pytest.mark.timeout(120)
def test_the_quick_presets_run_on_a_cpu(tmp_path):
    """All but the compiled cells, which take seconds each to compile."""
    requests = [(name, c) for name in ("pytorch_attention", "flash") for c in grid(name, "quick", "cpu")]
    requests = [(name, config) for name, config in requests if config["implementation"] != "compiled"]
    outcome, records = run_on_cpu(tmp_path / "r.jsonl", requests)
    assert (outcome.done, outcome.failed) == (4 + 12, 0), {r.status for r in records}
    found = tables(records)
    assert {table.title.split(":")[0] for table in found} == {"pytorch_attention", "flash"}
    assert not any(text in ("error", "OOM", "wrong") for table in found for row in table.rows for text in row)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_compiled_cells_run_on_a_cpu_and_compile_once(tmp_path):
    shapes = [(2, 1, 64, 16), (2, 1, 128, 16), (2, 1, 64, 32)]
    requests = [("pytorch_attention", passes_config("compiled", size=size)) for size in shapes]
    outcome, records = run_on_cpu(tmp_path / "r.jsonl", requests)
    assert outcome.failed == 0
    first, *others = [r.numbers[0] for r in records if r.metric == CELL_TIME]
    assert max(others) < first / 3


# -- tables -----------------------------------------------------------------------------------------------------------

UNITS = {"flops": "FLOP", "peak_memory": "B", "predicted_memory": "B", "memory_before_backward": "B"}


def entries(experiment, config, metrics, status="ok"):
    metrics = {**metrics, CELL_TIME: (1.0,)} if status == "ok" else {CELL_TIME: ()}
    config = {**config, "device": "cuda"}
    return [
        Record(experiment, config, name, UNITS.get(name, "" if name.endswith("status") else "s"), samples, status, GPU)
        for name, samples in metrics.items()
    ]


def flash_cell(implementation, milliseconds=1.0, *, size=(1, 1, 1024, 64), status="ok", precision="bf16", **metrics):
    config = attention_config(implementation, size, precision=precision)
    both = milliseconds / 1e3
    defaults = {
        "forward_time": (both / 4,),
        "backward_time": (both * 3 / 4,),
        "forward_backward_time": (both, both, 50 * both),
        "flops": (5e11,),
        "peak_memory": (2 * GIB,),
        "error_out": (1e-3,),
        "error_dq": (4e-3,),
    }
    return entries("flash", config, {**defaults, **metrics}, status)


def passes_cell(implementation, forward, backward, *, size=(8, 1, 1024, 64), status="ok"):
    metrics = {
        "forward_time": (forward, forward),
        "backward_time": (backward, backward),
        "step_time": (forward + backward,) * 2,
        "memory_before_backward": (1.5 * GIB,),
        "peak_memory": (3 * GIB,),
    }
    return entries("pytorch_attention", passes_config(implementation, size=size), metrics, status)


def rivals_cell(size=(4, 12, 512, 64), status="ok", **metrics):
    names = ["flash_triton", "sdpa_flash", "sdpa_cudnn", "flex"]
    config = attention_config(size=size, precision="bf16", implementations=names, rounds=2)
    return entries("attention_rivals", config, {"flops": (1e12,), **metrics}, status)


def leaderboard_cell(implementation, *times, status="ok"):
    config = attention_config(implementation, (1, 16, 16384, 64), precision="bf16")
    metrics = {"leaderboard_time": times, "flops": (1.924e12,), "error_out": (2e-3,), "error_dv": (1e-3,)}
    return entries("flash_leaderboard", config, metrics, status)


def column(table, heading):
    (index,) = [i for i, found in enumerate(table.columns) if found.heading == heading]
    return [row[index] for row in table.rows]


def titled(found, what):
    (table,) = [table for table in found if table.title.split(": ")[1].startswith(f"{what} ·")]
    return table


OOM = "oom: needs 64.5 GiB of 24.0 GiB (predicted, not tried)"
WRONG = "error: ArithmeticError: wrong result: dq off by 3.1e-01, more than 0.02 in bf16"


def test_eager_and_compiled_side_by_side():
    (table,) = tables(
        [
            *passes_cell("reference", 0.004, 0.008),
            *passes_cell("compiled", 0.002, 0.002),
            *passes_cell("reference", 0, 0, size=(8, 1, 16384, 64), status=OOM),
            *passes_cell("compiled", 0.5, 0.5, size=(8, 1, 16384, 64)),
        ]
    )
    assert column(table, "implementation") == ["reference", "compiled"] * 2
    assert column(table, "seq") == ["1024", "1024", "16384", "16384"]
    assert column(table, "forward (ms)") == ["4.000 ± 0.000", "2.000 ± 0.000", "OOM", "500.0 ± 0.000"]
    assert column(table, "forward speed-up") == ["1.00x", "2.00x", "", ""]
    assert column(table, "backward speed-up") == ["1.00x", "4.00x", "", ""]
    assert column(table, "before backward (GiB)")[:2] == ["1.50", "1.50"]
    assert "compiled: compiled once with dynamic shapes" in table.notes
    assert f"seq 16384 reference: {OOM}" in [note.removeprefix("d 64 ") for note in table.notes]
    for setting in ("batch 8", "fp32", "causal no", "H200"):
        assert setting in table.title


def test_rows_of_shapes_go_by_dimension_then_length():
    sizes = [(8, 1, length, dim) for length, dim in [(1024, 64), (256, 128), (16384, 16), (256, 64)]]
    (table,) = tables(itertools.chain(*(passes_cell("reference", 1, 1, size=size) for size in sizes)))
    rows = list(zip(column(table, "d"), column(table, "seq"), strict=True))
    assert rows == [("16", "16384"), ("64", "256"), ("64", "1024"), ("128", "256")]


def test_flash_tables_have_implementations_as_columns_and_the_best_marked():
    found = tables(
        [
            *flash_cell("flash_triton", 2.0),
            *flash_cell("reference", 8.0, peak_memory=(9 * GIB,)),
            *flash_cell("sdpa_flash", 1.0, error_dq=(5e-3,)),
            *flash_cell("flash_triton", 3.0, size=(1, 1, 2048, 64)),
            *flash_cell("reference", size=(1, 1, 2048, 64), status=OOM),
            *flash_cell("flash_triton", size=(1, 1, 1024, 128), status=WRONG),
            *flash_cell("reference", size=(1, 1, 1024, 128), status="error: RuntimeError: no kernel"),
            *flash_cell("sdpa_flash", 4.0, size=(1, 1, 1024, 128)),
        ]
    )
    both = titled(found, "forward and backward (ms)")
    assert list(zip(column(both, "d"), column(both, "seq"), strict=True)) == [
        ("64", "1024"), ("64", "2048"), ("128", "1024"),
    ]  # fmt: skip
    assert column(both, "flash_triton") == ["2.000", "3.000", "wrong"]
    assert column(both, "reference") == ["8.000", "OOM", "error"]
    assert column(both, "sdpa_flash") == ["1.000 *", "", "4.000"], "an only value has nobody to be better than"
    assert f"d 64 seq 2048 reference: {OOM}" in both.notes
    assert any("wrong result: dq off by 3.1e-01" in note for note in both.notes)
    assert column(titled(found, "forward (ms)"), "sdpa_flash")[0] == "0.250 *"
    assert column(titled(found, "backward (ms)"), "reference")[0] == "6.000"
    rates = titled(found, "forward and backward (TFLOP/s)")
    assert (column(rates, "flash_triton")[0], column(rates, "sdpa_flash")[0]) == ("250.0", "500.0 *")
    memory = titled(found, "peak memory (GiB)")
    assert (column(memory, "flash_triton")[0], column(memory, "reference")[:2]) == ("2.00", ["9.00", "OOM"])
    assert column(titled(found, "largest error against float64"), "sdpa_flash")[0] == "5.0e-03"
    assert "bf16" in both.title


def test_each_precision_has_its_own_flash_tables():
    found = tables([*flash_cell("reference", 1.0), *flash_cell("reference", 2.0, precision="fp32")])
    both = [table for table in found if table.title.startswith("flash: forward and backward (ms)")]
    assert {("fp32" in table.title): column(table, "reference") for table in both} == {
        True: ["2.000"], False: ["1.000"],
    }  # fmt: skip


def test_what_was_not_measured_has_no_table():
    found = tables(flash_cell("reference", peak_memory=()))
    assert not any("memory" in table.title for table in found)
    assert len(found) == 5


RIVALS = {
    "flash_triton_forward_backward_time": (0.001, 0.002, 0.009),
    "sdpa_cudnn_forward_backward_time": (0.003, 0.003, 0.003),
    "flex_forward_backward_time": (0.005, 0.005, 0.005),
    "flash_triton_forward_time": (0.0010,),
    "sdpa_cudnn_forward_time": (0.0005,),
    "flash_triton_error_out": (1e-3,),
    "sdpa_cudnn_error_dq": (2e-3,),
    "sdpa_flash_status": ("RuntimeError: No available kernel. Aborting execution.",),
}


def test_rivals_are_compared_with_ours():
    found = tables([*rivals_cell(**RIVALS), *rivals_cell((1, 16, 16384, 64), status="error: timeout after 5 s")])
    both = titled(found, "forward and backward (ms)")
    assert column(both, "batch") == ["1", "4"]
    assert column(both, "flash_triton") == ["error", "2.000 *"]
    assert column(both, "sdpa_flash") == ["error", "error"]
    assert column(both, "best rival / ours") == ["", "1.50x"]
    forward = titled(found, "forward (ms)")
    assert column(forward, "best rival / ours") == ["", "0.50x"]
    assert column(forward, "flex") == ["error", ""]
    assert column(titled(found, "forward and backward (TFLOP/s)"), "flash_triton")[1] == "500.0 *"
    assert column(titled(found, "largest error against float64"), "sdpa_cudnn")[1] == "2.0e-03"
    failed = "batch 4 heads 12 d 64 seq 512 causal yes sdpa_flash: RuntimeError: No available kernel"
    assert any(note.startswith(failed) for note in both.notes)
    assert any("timeout after 5 s" in note for note in both.notes)


def test_times_from_a_cuda_graph_stand_where_they_were_taken():
    replayed = {"flash_triton_replayed_time": (0.00004,), "sdpa_cudnn_replayed_time": (0.00006,)}
    long = {name: samples for name, samples in RIVALS.items() if not name.endswith("_status")}
    found = tables([*rivals_cell(**RIVALS, **replayed), *rivals_cell((1, 16, 16384, 64), **long)])
    table = titled(found, "forward and backward, from a CUDA graph (ms)")
    assert column(table, "seq") == ["512"]
    assert column(table, "flash_triton") == ["0.040 *"]
    assert column(table, "best rival / ours") == ["1.50x"]
    assert "replayed" not in grid("attention_rivals")[0]
    short = grid("attention_rivals", "quick")[0]
    assert short["replayed"]
    assert short["implementations"][0] == "auto"


def test_without_ours_there_is_no_comparison():
    failed = {name: samples for name, samples in RIVALS.items() if not name.startswith("flash_triton")}
    found = tables(rivals_cell(**failed, flash_triton_status=("ArithmeticError: wrong result: dq off by 1.0e+00",)))
    both = titled(found, "forward and backward (ms)")
    assert (column(both, "flash_triton"), column(both, "best rival / ours")) == (["wrong"], [""])


def test_the_leaderboard_shows_means():
    (table,) = tables(
        [*leaderboard_cell("flash_triton", 0.003, 0.005), *leaderboard_cell("sdpa_cudnn", status="error: no kernel")]
    )
    assert column(table, "implementation") == ["flash_triton", "sdpa_cudnn"]
    assert column(table, "mean (ms)") == ["4.000", "error"]
    assert column(table, "std of tenths (ms)") == ["1.414", ""]
    assert column(table, "TFLOP/s") == ["481.0", ""]
    assert column(table, "error") == ["2.0e-03", ""]
    assert "sdpa_cudnn: error: no kernel" in table.notes


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("status", ["ok", OOM])
def test_every_attention_table_renders(format, status):
    records = [
        *passes_cell("reference", 1, 1, status=status),
        *flash_cell("reference", status=status),
        *rivals_cell(status=status, **RIVALS),
        *leaderboard_cell("flex", 0.1, status=status),
    ]
    found = tables(records)
    assert [title for title, _ in itertools.groupby(t.title.split(":")[0] for t in found)] == list(
        ATTENTION_INSTRUMENTS
    )
    for table in found:
        assert {len(row) for row in table.rows} == {len(table.columns)}
        assert table.render(format)


# -- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("config", grid("flash", "quick")[:8], ids=lambda config: config["implementation"])
def test_every_implementation_is_right_and_timed_on_a_gpu(config):
    found = by_metric(instrument.measure_flash(config))
    assert all(min(found[f"{phase}_time"]) > 0 for phase in ("forward", "backward", "forward_backward"))
    assert found["peak_memory"][0] > 0
    if config["implementation"] == "reference":
        assert found["predicted_memory"][0] == pytest.approx(found["peak_memory"][0], rel=0.15)


@pytest.mark.gpu
def test_rivals_and_leaderboard_on_a_gpu():
    (config,) = grid("attention_rivals", "quick")
    found = by_metric(instrument.measure_rivals({**config, "rounds": 1}))
    assert not [name for name in found if name.endswith("_status")]
    for config in grid("flash_leaderboard", "quick"):
        shorter = {**config, "seq_len": 2048, "warmup_ms": 10, "rep_ms": 50}
        assert len(by_metric(instrument.measure_leaderboard(shorter))["leaderboard_time"]) == 10
