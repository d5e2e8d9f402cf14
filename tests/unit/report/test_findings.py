"""The report's words: what the findings say of hand-made records, and that the Chinese has the same numbers."""

import dataclasses
import itertools
import re
import time
from functools import cache

import pytest

from cs336_systems.config import RunConfig, model_config
from cs336_systems.experiments.catalogue import EXPERIMENTS
from cs336_systems.record import CELL_TIME, MIB, Record, load
from cs336_systems.report.cells import CellView, group
from cs336_systems.report.findings import findings
from cs336_systems.report.sections import tables
from cs336_systems.report.words import NAMES, QUESTIONS, TITLES, in_chinese
from cs336_systems.text import Text
from tests.helpers import ROOT
from tests.unit.report.test_report import ALL, CPU, GIB, GPU, WRONG, cell, entries, step

H200 = ROOT / "results" / "h200" / "records.jsonl"
OOM = "oom: needs 64.5 GiB of 24.0 GiB (predicted, not tried)"
CHINESE = re.compile(r"[\u4e00-\u9fff]")


def numbers(text: str) -> list[str]:
    return sorted(re.findall(r"\d+(?:[.,]\d+)*", text))


def of(experiment: str, *records: list[Record]) -> list[str]:
    """The English; that the Chinese has the same numbers is checked on the way."""
    found = findings(experiment, group(itertools.chain(*records)))
    for text in found:
        assert text.en.endswith(".")
        assert text.zh.endswith("。")
        assert numbers(text.en) == numbers(text.zh), text
        assert CHINESE.search(text.zh), text
    return [text.en for text in found]


# -- records ----------------------------------------------------------------------------------------------------------


def kernels(experiment, size="small", mode="inference", *, matmul=0.008, other=0.002, softmax=0.001, **metrics):
    """A forward of 10 ms kernels in 20 ms; attention: 3 ms scores, 1 ms mask, some softmax, 2 ms output."""
    parts = ("attention scores", "matmul", 0.003, "attention scores", "elementwise", 0.001)
    parts += ("attention softmax", "softmax/reduction", softmax, "attention output", "matmul", 0.002)
    tables = {
        "kind_table: forward": ("matmul", 100.0, matmul, "elementwise", 50.0, other),
        "part_table: forward": parts,
        "kernel_table: forward": ("gemm", 100.0, matmul, 8e-5, 7e-5, 9e-5),
        "kernel_time": (matmul + other,),
        "busy_time: forward": (matmul + other,),
        "forward_event_time": (0.02,),
        "profiled_step_time": (0.15,),
        "kernels_on_gpu": (1.0,),
    }
    return cell(experiment, size=size, mode=mode, metrics={**tables, **metrics})


def memory(context, peak, **metrics):
    parts = ("parameters", 2.0 * GIB, "activations", (peak - 2.0) * GIB)
    blocks = (64.0 * MIB, "activations", "layers.0.attn", "aten::bmm 4x8", "reference.py:49 in scores")
    found = {"peak_memory": (peak * GIB,), "part_memory": parts, "largest_blocks": blocks, "peak_phase": ("forward",)}
    return cell("memory", context=context, metrics={**found, "predicted_memory": (10.1 * GIB,), **metrics})


def checkpointing(blocks, peak, seconds, inner=0, status="ok"):
    config = RunConfig(model=model_config("small"), size="small", device="cuda", checkpoint_blocks=blocks).to_dict()
    metrics = {"peak_memory": (peak * GIB,), "step_time": (seconds,), "predicted_by_tracing_memory": (peak * GIB,)}
    return entries("checkpointing", {**config, "inner": inner}, metrics, status)


def saved(mebibytes, **fields):
    metrics = {"saved_memory": (mebibytes * MIB,), "saved_tensors": (5.0,)}
    metrics["largest_saved"] = (64.0 * MIB, "layers.0.attn", "4x8x8 float32", "reference.py:23 in attention")
    config = RunConfig(model=model_config("small", num_layers=1), device="cuda", **fields).to_dict()
    return entries("saved_tensors", config, metrics)


def memory_model(size, peak):
    names = ("parameter", "gradient", "optimizer", "activation", "loss", "traced")
    metrics = {f"{name}_memory": ((1 + i) * GIB,) for i, name in enumerate(names)}
    metrics |= {"predicted_memory": (peak * GIB,), "peak_phase": ("backward",)}
    config = RunConfig(model=model_config(size), size=size, device="cuda").to_dict()
    return entries("memory_model", config, metrics, environment=CPU)


def accumulation(accumulator, total):
    config = {"accumulator": accumulator, "term": "fp16", "value": 0.01, "count": 1000}
    return entries("accumulation", config, {"sum": (total,), "term": (0.01,)}, environment=CPU)


def dtypes(autocast):
    metrics = {"dtype of fc1 output": (f"{autocast}loat",), "dtype of loss": ("float32",)}
    return entries("autocast_dtypes", {"model": "toy", "autocast": autocast, "device": "cuda"}, metrics)


SDPA = {"attention": "sdpa"}
COLD = {"step_time": (0.9, 0.1, 0.1), "warmup_time": ()}
AGREE = {f"do_bench_{phase}_time": (seconds,) for phase, seconds in (("forward", 0.03), ("step", 0.08))}
FAST = [
    *cell("fast_step", fast="off", metrics=step(0.1)),
    *cell("fast_step", fast="on", metrics=step(0.01, peak_memory=(5 * GIB,))),
    *cell("fast_step", fast="kernels,loss,optimizer", metrics=step(0.05)),
    *cell("fast_step", fast="loss,optimizer,graph", metrics=step(0.02)),
    *cell("fast_step", compile=True, model_factory="cs336_systems.experiments.steps.llama:build", metrics=step(0.04)),
    *cell("fast_step", size="2.7B", fast="off", metrics=step(0.3)),
    *cell("fast_step", size="2.7B", fast="on", metrics=step(0.2)),
]

SAMPLES: dict[str, list[Record]] = {
    "bench": cell("bench"),
    "end_to_end": cell("end_to_end") + cell("end_to_end", size="2.7B", metrics=step(0.4)),
    "warmup": cell("warmup", warmup_steps=0, metrics=COLD) + cell("warmup", warmup_steps=5),
    "precision": cell("precision")
    + cell("precision", precision="bf16", metrics=step(0.08, peak_memory=(9 * GIB,)))
    + cell("precision", size="2.7B", metrics=step(0.9))
    + cell("precision", size="2.7B", precision="bf16", metrics=step(0.3)),
    "compile": cell("compile") + cell("compile", compile=True, metrics=step(0.09, compile_time=(20.0,))),
    "fast_step": FAST,
    "peak_memory": cell("peak_memory") + cell("peak_memory", **SDPA, metrics={"predicted_memory": (9.5 * GIB,)}),
    "timing_agreement": cell("timing_agreement", metrics=AGREE)
    + cell("timing_agreement", size="2.7B", metrics={**AGREE, "do_bench_step_time": (0.099,)}),
    "kernels": kernels("kernels")
    + kernels("kernels", mode="train-step")
    + kernels("kernels", "2.7B", matmul=0.018)
    + kernels("kernels", "2.7B", mode="train-step", matmul=0.009, other=0.001),
    "attention_ops": kernels("attention_ops") + kernels("attention_ops", "2.7B", softmax=0.002),
    "profiler_agreement": kernels("profiler_agreement"),
    "memory": memory(512, 10.0) + memory(1024, 11.0),
    "checkpointing": checkpointing(0, 60.0, 1.0)
    + checkpointing(1, 20.0, 1.3)
    + checkpointing(4, 30.0, 1.25)
    + checkpointing(4, 20.0, 1.5, inner=1),
    "saved_tensors": saved(200) + saved(150, **SDPA) + saved(50, checkpoint_blocks=1) + saved(180, compile=True),
<<<<<<< HEAD
    "pytorch_attention": attention(
        "pytorch_attention",
        "reference",
        forward_time=0.002,
        backward_time=0.006,
        memory_before_backward=2 * GIB,
        peak_memory=8 * GIB,
    )
    + attention("pytorch_attention", "compiled", forward_time=0.001, backward_time=0.006, peak_memory=4 * GIB)
    + attention("pytorch_attention", "reference", (1, 1, 4096, 64), OOM),
    "flash": flash("flash_triton", 1.0)
    + flash("sdpa_flash", 0.5)
    + flash("flash_triton", 2.0, 4096, peak_memory=GIB)
    + flash("sdpa_flash", 3.0, 4096)
    + flash("reference", 20.0, 4096, peak_memory=7 * GIB),
    "attention_rivals": rivals((1, 16, 4096, 64), flash_triton=2.0, sdpa_flash=3.0, sdpa_cudnn=1.8)
    + rivals((4, 12, 512, 64), flash_triton=0.2, sdpa_flash=0.1, sdpa_cudnn=0.4),
    "flash_leaderboard": attention("flash_leaderboard", "flash_triton", leaderboard_time=0.004)
    + attention("flash_leaderboard", "sdpa_flash", leaderboard_time=0.006),
    "attention_step": steps_in_turns(
        flash_triton=[200, 200, 200, 200, 200, 200],
        sdpa_flash=[300, 300, 300, 300, 300, 300],
        sdpa_cudnn=[180, 190, 190, 180, 300, 190],
    ),
=======
    "collectives": collectives(),
    "ddp": ranks("ddp", DDP, none=100, naive=400, **{"bucketed 1": 200, "torch DDP": 250}),
    "bucket_model": ranks(
        "bucket_model",
        ["none", "bucketed 1", "bucketed 4"],
        [1e-3, 1e8],
        none=100,
        **{"bucketed 1": 130, "bucketed 4": 200},
    ),
    "optimizer_sharding": ranks("optimizer_sharding", ["ddp", "sharded"], ddp=200, sharded=300),
    "fsdp": ranks("fsdp", ["ddp", "fsdp", "torch fully_shard"], ddp=200, fsdp=100, **{"torch fully_shard": 150}),
    "parallel_plan": plan() + plan(64, fits=False) + plan(16384, "feed-forward"),
>>>>>>> wt-attention
    "memory_model": memory_model("small", 9) + memory_model("2.7B", 30),
    "accumulation": accumulation("fp32", 10.002) + accumulation("fp16", 9.9531),
    "autocast_dtypes": dtypes("fp16") + dtypes("bf16"),
}

SAID = {
    "bench": [
        "A step of small 512 train-step fp32 takes 100.00 ms: 20,480 tokens/s; backward takes 2.0 times forward.",
        "MFU: 50.0% (small).",
        "The predicted peak is off by 1.00%: 10.10 GiB, measured 10.00.",
    ],
    "end_to_end": [
        "2.7B's training step takes 400.00 ms, 4.0 times small's (100.00 ms); backward takes 2.0 times forward.",
        "MFU: 12.5% (2.7B) to 50.0% (small).",
        "The worst of 2 predicted peaks is off by 1.00% (small: 10.10 GiB, measured 10.00).",
    ],
    "warmup": [
        (
            "Without warm-up the first step takes, against a steady one, 9.0 times as long for small (900.00 "
            "against 100.00 ms)."
        ),
        "It puts the mean of small off by 267%: 366.67 ms, after 5 warm-up steps 100.00 ms.",
        "Of 2 runs 2 settle, the last from step 2 on (small warm-up 0).",
    ],
    "precision": [
        "bf16 speeds up 2.7B 3.0x, small 1.2x, with 0.90 to 1.00 times the memory of fp32.",
    ],
    "compile": [
        "torch.compile speeds up small 1.11x, with 1.00 times the memory of eager.",
        "Compiling takes up to 20.0 s (small); for small 2,000 steps earn it back.",
    ],
    "fast_step": [
        (
            "All parts together take 10.00 ms for small, 4.0x less than the compiled Llama of transformers (40.00"
            " ms), with 5.00 GiB against 10.00."
        ),
        "For larger work it is 1.5x for 2.7B 4 x 512 (200.00 ms).",
        "Of small with one part left out, a step takes: graph 50.00 ms, kernels 20.00 ms.",
    ],
    "peak_memory": [
        "The worst of 2 predicted peaks is off by 5.00% (small sdpa: 9.50 GiB, measured 10.00).",
        "Those with fused attention or checkpointing (1) are off by 5.00% at most, the plain ones (1) by 1.00%.",
    ],
    "timing_agreement": [
        "The clock and do_bench differ by 25.00% at most (small step); for 2.7B by 1.01%.",
    ],
    "kernels": [
        (
            "Matrix products take, of kernel time, 80.0% (small) to 90.0% (2.7B) in inference, 80.0% (small) to "
            "90.0% (2.7B) in a training step."
        ),
        "What else counts in a training step: elementwise up to 20.0% (small).",
        "In forward the GPU is idle for 0.0% (2.7B inference) to 50.0% (2.7B train-step).",
    ],
    "attention_ops": [
        (
            "The scores' matmul has 42.7 to 53.3 times the FLOPs of softmax, but takes only 1.50 (2.7B) to 3.00 "
            "(small) times as long."
        ),
        "Scale, mask and softmax take 29% (small) to 38% (2.7B) of the time of attention.",
    ],
    "profiler_agreement": [
        "Kernels fill 50.0% (small) of forward and backward by CUDA events: the rest is the GPU waiting for the host.",
        "A step that is profiled takes 1.50 (small) times as long.",
    ],
    "memory": [
        "The worst of 2 predicted peaks is off by 8.18% (small context 1024: 10.10 GiB, measured 11.00).",
        "At the highest peak, 11.00 GiB (small context 1024), are 82% activations, 18% parameters.",
        (
            "The largest block of a step is 64.0 MiB of activations: aten::bmm 4x8, made at reference.py:49 in "
            "scores (small context 512)."
        ),
    ],
    "checkpointing": [
        "In fp32 groups of 1 need the least memory, 20.00 GiB, against 60.00 without.",
        (
            "Recomputing makes a step 1.25 to 1.30 times as long; nesting groups once more makes a step 1.20 "
            "times as long."
        ),
        "4 peaks predicted by tracing are off by 0.00% at most.",
    ],
    "saved_tensors": [
        (
            "Of 1 block in fp32 attention by the formula keeps 200.0 MiB for backward, fused attention 150.0 "
            "(75%), checkpointed 50.0 (25%), compiled 180.0 (90%)."
        ),
        "The largest is 4x8x8 float32 with 64.0 MiB, made at reference.py:23 in attention.",
    ],
<<<<<<< HEAD
    "pytorch_attention": [
        "At 1024 tokens, d 64, forward takes 2.000 ms and backward 6.000; 2.00 GiB are held before backward.",
        "Compiled, forward is 2.0x and backward 1.00x as fast; its peak is 4.00 GiB against 8.00.",
        "1 of 3 do not fit in memory, the shortest of 4096 tokens.",
    ],
    "flash": [
        (
            "bf16: flash_triton is the fastest of 3 in 1 of 2 shapes: from 4096 tokens on with d 64; at 4096 "
            "tokens its speed is 1.5x that of sdpa_flash, 10x that of reference."
        ),
        "At 4096 tokens, d 64, bf16, it needs 1.00 GiB, the formula 7.00.",
    ],
    "attention_rivals": [
        (
            "flash_triton is ahead of the best rival in 0 of 2 shapes, forward and backward: 0.50 (4 x 12 x 512 x"
            " 64, sdpa_flash) to 0.90 (1 x 16 x 4096 x 64, sdpa_cudnn) times as fast."
        ),
        "It is ahead of sdpa_flash in 1 of 2 (at best 1.5x), sdpa_cudnn in 1 of 2 (at best 2.0x).",
        "Forward alone is ahead of the best in 0 of 2: 0.50 to 0.90 times as fast.",
    ],
    "flash_leaderboard": [
        "flash_triton takes 4.000 ms; its speed is 1.5x that of sdpa_flash (6.000 ms).",
    ],
    "attention_step": [
        (
            "2.7B, context 4096: a step takes 200.00 ms with flash_triton; 300.00 with sdpa_flash (1.50x, ahead of it "
            "in 3 of 3 rounds), 190.00 with sdpa_cudnn (0.95x, ahead of it in 1 of 3 rounds)."
        ),
    ],
=======
    "collectives": [
        (
            "2 ranks of one machine through Gloo (cpu): all_reduce of 100 MB takes 101.00 ms, 0.99 GB/s over the "
            "busiest link; fitted bandwidth in GB/s: 1.00 (all_reduce); latency 1,000 us."
        ),
    ],
    "ddp": [
        (
            "2 ranks of one machine through Gloo (cuda): bucketed 1 is the fastest of 2, 200.00 ms a step, 2.0 "
            "times as fast as naive (400.00 ms); torch DDP takes 250.00 ms; of communication bucketed 1 hides "
            "50%, naive -50%."
        ),
    ],
    "bucket_model": [
        (
            "2 ranks of one machine through Gloo (cuda), emulated network of 0.1 GB/s and 1 ms: the best bucket "
            "is 1 MB predicted (11.49 ms exposed) and 1 MB measured (30.00 ms); of 2 sizes the prediction is "
            "worst for 1 MB: 11.49 ms, measured 30.00."
        ),
    ],
    "optimizer_sharding": [
        (
            "2 ranks of one machine through Gloo (cuda): sharded holds 300.0 MiB on a rank, 25% less than ddp "
            "(400.0), and takes 300.00 ms a step, 1.5 times as long."
        ),
    ],
    "fsdp": [
        (
            "2 ranks of one machine through Gloo (cuda): fsdp holds 200.0 MiB on a rank, 50% less than ddp "
            "(400.0), and takes 100.00 ms a step, 0.50 times as long; torch fully_shard 400.0 MiB and 150.00 ms."
        ),
    ],
    "parallel_plan": [
        (
            "Of 2 layouts of xxl on 1,024 x h100 1 fit: zero3 has the shortest step, 1,000.0 ms, with 30.0 GiB on"
            " a GPU; of 2 layouts of xxl on 64 x h100 0 fit."
        ),
        "On 1,024 GPUs these wait for messages: zero3.",
    ],
>>>>>>> wt-attention
    "memory_model": [
        "2.7B needs 30.00 GiB: parameters 1.00, gradients 2.00, optimizer state 3.00, and what forward keeps.",
        "Of 2 configurations small needs the least, 9.00 GiB.",
    ],
    "accumulation": [
        (
            "0.01 added 1000 times, the worst first: fp16 += fp16 gives 9.9531 (-0.469%), fp32 += fp16 gives "
            "10.0020 (+0.020%)."
        ),
    ],
    "autocast_dtypes": [
        "Under autocast to fp16/bf16, 1 of 2 tensors of the toy model are float32: loss.",
    ],
}


# -- findings ---------------------------------------------------------------------------------------------------------


def test_every_experiment_of_the_catalogue_has_a_sample():
    assert SAMPLES.keys() == EXPERIMENTS.keys()


@pytest.mark.parametrize("experiment", SAMPLES)
def test_what_is_said(experiment):
    assert of(experiment, SAMPLES[experiment]) == SAID[experiment]


@pytest.mark.parametrize("experiment", SAMPLES)
def test_a_single_cell_is_enough_or_says_nothing(experiment):
    for one in group(SAMPLES[experiment]):
        assert len(of(experiment, list(one.metrics.values()))) <= 3


def test_a_failed_cell_costs_its_sentences_only():
    alone = of("end_to_end", cell("end_to_end"))
    assert of("end_to_end", cell("end_to_end"), cell("end_to_end", size="2.7B", status=OOM)) == alone
    assert of("end_to_end", cell("end_to_end", status=OOM)) == []


def test_unknown_experiments_and_nothing_at_all_say_nothing():
    assert of("from_the_future", cell("from_the_future")) == []
    assert all(findings(experiment, []) == [] for experiment in EXPERIMENTS)
    assert findings("bench", [CellView("bench", {}, {})]) == []


def test_machines_are_spoken_of_one_at_a_time():
    """The faster machine's cells must not become the slower one's speed-up."""
    other = dataclasses.replace(GPU, gpu="B200")
    found = of(
        "precision",
        cell("precision") + cell("precision", precision="bf16", metrics=step(0.05)),
        cell("precision", environment=other, metrics=step(0.02))
        + cell("precision", precision="bf16", environment=other, metrics=step(0.005)),
    )
    assert [text.split(",")[0] for text in found] == [
        "H200: bf16 speeds up small 2.0x",
        "B200: bf16 speeds up small 4.0x",
    ]


def test_what_does_not_fit_is_named_with_what_it_needed():
    said = of("checkpointing", checkpointing(0, 0, 0, status=OOM) + checkpointing(1, 20.0, 1.3))
    assert said[0] == "In fp32 groups of 1 need the least memory, 20.00 GiB, against 64.5 without, which do not fit."


def test_several_contexts_are_told_apart():
    grid = [cell("end_to_end", size=size, context=context) for size in ("small", "2.7B") for context in (128, 512)]
    assert of("end_to_end", *grid)[0].startswith("2.7B context 512's training step takes 100.00 ms, 1.00 times small")


def test_the_fastest_is_named_where_only_settings_differ():
    said = of("bench", cell("bench"), cell("bench", attention="sdpa", metrics=step(0.05)))
    expected = (
        "Of 2 configurations small sdpa is the fastest with 50.00 ms a step, 2.0 times as fast as small reference"
    )
    assert said[0].startswith(expected)


def test_both_profilers_are_compared_where_both_ran():
    said = of("profiler_agreement", kernels("profiler_agreement", **{"nsys_busy_time: forward": (0.008,)}))
    assert said[-1] == "torch.profiler and nsys differ by 25.00% at most (small forward)."


def test_kernels_are_held_against_events_of_queued_steps():
    said = of("profiler_agreement", kernels("profiler_agreement", **{"queued_forward_event_time": (0.0102,)}))
    assert said[1] == (
        "Of steps that are not synchronised between phases kernels and CUDA events differ by 1.96% (small)."
    )


# -- data of any shape ------------------------------------------------------------------------------------------------

ODD_SAMPLES = [(), (float("nan"),), (float("inf"), 1.0), (0.0,), (-1.0, -2.0), ("text",), ("a", "b", "c", 4.0), (None,)]


@pytest.mark.parametrize("experiment", SAMPLES)
@pytest.mark.parametrize("samples", ODD_SAMPLES, ids=repr)
def test_odd_samples_raise_nothing(experiment, samples):
    """In every metric alone, and in all."""
    records = SAMPLES[experiment]
    for metric in {record.metric for record in records} - {CELL_TIME}:
        replaced = [dataclasses.replace(r, samples=samples) if r.metric == metric else r for r in records]
        findings(experiment, group(replaced))
    findings(experiment, group([dataclasses.replace(r, samples=samples) for r in records]))


@pytest.mark.parametrize("experiment", SAMPLES)
def test_missing_metrics_raise_nothing(experiment):
    records = SAMPLES[experiment]
    for metric in {record.metric for record in records}:
        of(experiment, [record for record in records if record.metric != metric])


@pytest.mark.parametrize("experiment", SAMPLES)
@pytest.mark.parametrize("value", [None, "words", -1, [], {"a": 1}], ids=repr)
def test_odd_configurations_raise_nothing(experiment, value):
    for one in group(SAMPLES[experiment]):
        for name in one.config:
            findings(experiment, [CellView(experiment, {**one.config, name: value}, one.metrics)])
        findings(experiment, [CellView(experiment, dict.fromkeys(one.config, value), one.metrics)])
        findings(experiment, [CellView(experiment, {}, one.metrics)])


# -- this repository's own results ------------------------------------------------------------------------------------


@cache
def h200() -> dict[str, list[CellView]]:
    found: dict[str, list[CellView]] = {}
    for one in group(load(H200).records):
        found.setdefault(one.experiment, []).append(one)
    return found


def test_every_experiment_that_was_run_says_something_quickly():
    cells = h200()
    start = time.perf_counter()
    said = {experiment: findings(experiment, chosen) for experiment, chosen in cells.items()}
    assert time.perf_counter() - start < 2
    for experiment, texts in said.items():
        assert 1 <= len(texts) <= 3, experiment
        for text in texts:
            assert numbers(text.en) == numbers(text.zh), text
            assert CHINESE.search(text.zh), text


def test_the_numbers_are_those_of_the_tables():
    """Each number with a unit of time or memory stands in a table of its experiment, written the same."""
    shown: dict[str, str] = {}
    for table in tables([record for cells in h200().values() for one in cells for record in one.metrics.values()]):
        experiment = table.title.split(":")[0]
        shown[experiment] = shown.get(experiment, "") + " ".join(text for row in table.rows for text in row)
    derived = {"warmup": {"52.31", "995.85"}}  # medians; the table has means
    for experiment, cells in h200().items():
        for text in findings(experiment, cells):
            for number in re.findall(r"([\d.,]+) (?:ms|MiB)\b", text.en):
                assert number in shown[experiment] or number in derived.get(experiment, ()), (number, text.en)


# -- words ------------------------------------------------------------------------------------------------------------


def test_every_experiment_has_a_title_and_its_question():
    assert TITLES.keys() == QUESTIONS.keys() == EXPERIMENTS.keys()
    assert {name: text.en for name, text in QUESTIONS.items()} == {n: e.question for n, e in EXPERIMENTS.items()}
    assert all(CHINESE.search(text.zh) for text in QUESTIONS.values())
    assert all(CHINESE.search(text.zh) for name, text in TITLES.items() if name != "compile")


def is_translated(text: str) -> bool:
    name = re.sub(r" \([\w/]+\)$", "", text)
    return bool(CHINESE.search(in_chinese(text))) or name in NAMES


def share_translated(texts: list[str]) -> float:
    found = list(dict.fromkeys(texts))
    for text in found:
        assert numbers(text) == numbers(in_chinese(text)), text
    return sum(map(is_translated, found)) / len(found)


@cache
def all_tables() -> list:
    ours = [record for cells in h200().values() for one in cells for record in one.metrics.values()]
    return [table for records in (ours, ALL, *SAMPLES.values()) for table in tables(records)]


def test_headings_titles_and_remarks_are_translated():
    found = all_tables()
    assert share_translated([column.heading for table in found for column in table.columns]) >= 0.95
    assert share_translated([table.title for table in found]) >= 0.9
    assert share_translated([note for table in found for note in table.notes]) >= 0.9


@pytest.mark.parametrize("what", WRONG)
def test_the_referees_remarks_are_translated(what):
    fields, _ = WRONG[what]
    (found,) = tables(cell("precision", **fields) + cell("precision", size="large"))
    assert share_translated(list(found.notes)) == 1


TRANSLATED = {
    "fast_step: the step by what is switched on · NVIDIA H200, context 512, batch 4, train-step, bf16": (
        "fast_step：按启用部分比较训练步 · NVIDIA H200，context 512，batch 4，train-step，bf16"
    ),
    "small warm-up 0: the first measured step is far above the rest (cold): add --warmup_steps 5": (
        "small 预热 0：第一个测量步远高于其余（冷启动）：加上 --warmup_steps 5"
    ),
    "d 16 compiled, d 32 flex and 16 more: the GPU held its clocks down (power cap, thermal)": (
        "d 16 compiled，d 32 flex 及另外 16 行：GPU 降频（功率上限、温度）"
    ),
    "small: error: timeout after 600 s": "small：超时：超过 600 s",
    "small: error: crashed (SIGSEGV): last words": "small：出错：崩溃（SIGSEGV）: last words",
    "peak (GiB)": "峰值 (GiB)",
    "softmax/reduction, train-step": "softmax/归约，train-step",
    "sdpa_flash": "sdpa_flash",
    "a heading of the future (furlongs)": "a heading of the future (furlongs)",
    "from_the_future": "from_the_future",
    "": "",
}


@pytest.mark.parametrize("text", TRANSLATED)
def test_chinese(text):
    assert in_chinese(text) == TRANSLATED[text]


def test_a_text_with_braces_is_no_template():
    assert in_chinese("{0} {x}: TF32 was on in an fp32 row") == "{0} {x}：fp32 行里开着 TF32"
    config = {**cell("bench")[0].config, "size": "{evil} {0}"}
    (one,) = group(cell("bench"))
    assert isinstance(findings("bench", [CellView("bench", config, one.metrics)])[0], Text)


@pytest.mark.parametrize("text", ["a: " * 20_000, "kernels: " + "(x) " * 20_000, ", " * 50_000, "x\ny: z", "·", ": "])
def test_long_and_odd_texts_are_soon_given_back(text):
    start = time.perf_counter()
    assert numbers(in_chinese(text)) == numbers(text)
    assert time.perf_counter() - start < 1
