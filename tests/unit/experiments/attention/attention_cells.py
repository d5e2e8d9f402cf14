"""Hand-made cells of the attention experiments."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from cs336_systems.config import RunConfig, model_config
from cs336_systems.experiments.catalogue import catalogue, cells
from cs336_systems.predict.attention_model import AttentionShape
from cs336_systems.record import CELL_TIME, GIB, Environment, Metric, Record
from cs336_systems.report.cells import CellView, group
from cs336_systems.report.sections import tables_of
from cs336_systems.table import Table

H200 = Environment(gpu="NVIDIA H200", gpu_count=1, gpu_memory=24 * GIB, tf32=False)
OOM = "oom: needs 64.5 GiB of 24.0 GiB (predicted, not tried)"
WRONG = "error: ArithmeticError: wrong result: dq off by 3.1e-01, more than 0.02 in bf16"


def grid(experiment, preset="course", device="cuda", *, num_steps=None, **fields):
    base = RunConfig(device=device, **fields)
    return [config for _, config in cells([experiment], preset, base, num_steps=num_steps)]


def attention_config(implementation="reference", size=(1, 1, 32, 8), *, is_causal=True, precision="fp32", **fields):
    shape = AttentionShape(*size, is_causal=is_causal, precision=precision)
    measuring = {"implementation": implementation, "device": "cpu", "seed": 0, "warmup_ms": 1, "rep_ms": 1}
    return {**dataclasses.asdict(shape), **measuring, **fields}


def passes_config(implementation="reference", **fields):
    config = attention_config(implementation, is_causal=False, warmup_steps=1, num_steps=3, **fields)
    return {name: value for name, value in config.items() if not name.endswith("_ms")}


def make_cell(
    experiment: str, config: dict[str, Any], metrics: list[Metric], status: str = "ok", environment: Environment = H200
) -> CellView:
    config = {**config, "device": config.get("device", "cuda")}
    metrics = [*metrics, Metric(CELL_TIME, "s", [1.0])] if status == "ok" else [Metric(CELL_TIME, "s", [])]
    (cell,) = group(
        Record(experiment, config, m.name, m.unit, tuple(m.samples), status, environment, m.variant) for m in metrics
    )
    return cell


def _unit(metric: str) -> str:
    return {"flops": "FLOP", "status": ""}.get(metric, "B" if "memory" in metric else "1" if "error" in metric else "s")


def records_of(cells: Iterable[CellView]) -> list[Record]:
    return [record for cell in cells for record in cell.records]


def metrics_of(variant: str = "", **values: Any) -> list[Metric]:
    """Metrics by name; one sample, or a list of samples."""
    found = {name: value if isinstance(value, list) else [value] for name, value in values.items()}
    return [Metric(name, _unit(name), samples, variant) for name, samples in found.items()]


def flash_cell(
    implementation, milliseconds=1.0, size=(1, 1, 1024, 64), status="ok", precision="bf16", environment=H200, **metrics
):
    fields = {"device": "cuda"} | {name: metrics.pop(name) for name in ("is_causal", "device") if name in metrics}
    config = attention_config(implementation, size, precision=precision, **fields)
    both = milliseconds / 1e3
    defaults = {
        "forward_time": both / 4,
        "backward_time": both * 3 / 4,
        "forward_backward_time": [both, both, 50 * both],
        "flops": 5e11,
        "peak_memory": 2 * GIB,
        "error_out": 1e-3,
        "error_dq": 4e-3,
    }
    return make_cell("flash", config, metrics_of(**{**defaults, **metrics}), status, environment)


def passes_cell(implementation, forward=1.0, backward=1.0, *, size=(8, 1, 1024, 64), status="ok", peak=3 * GIB):
    metrics = metrics_of(
        forward_time=[forward] * 2,
        backward_time=[backward] * 2,
        step_time=[forward + backward] * 2,
        memory_before_backward=1.5 * GIB,
        peak_memory=peak,
    )
    return make_cell("pytorch_attention", passes_config(implementation, size=size, device="cuda"), metrics, status)


def rivals_cell(size=(4, 12, 512, 64), status="ok", *, is_causal=True, flops=1e12, **implementations):
    """Implementation -> its metrics by name."""
    fields = {"implementations": list(implementations), "rounds": 2, "device": "cuda"}
    config = attention_config(size=size, precision="bf16", is_causal=is_causal, **fields)
    del config["implementation"]
    metrics = [metric for name, own in implementations.items() for metric in metrics_of(name, **own)]
    return make_cell("attention_rivals", config, [*metrics_of(flops=flops), *metrics], status)


def varlen_cell(mix, head_dim=64, status="ok", **implementations):
    """Implementation -> milliseconds of forward and backward, or the reason of its failure."""
    fields = {"implementations": list(implementations), "rounds": 2, "device": "cuda", "mix": mix}
    config = attention_config(size=(1, 16, 32768, head_dim), precision="bf16", **fields)
    del config["implementation"]
    metrics = metrics_of(flops=1e12, documents=40, longest_document=3000)
    for name, given in implementations.items():
        metrics += metrics_of(name, **({"status": given} if isinstance(given, str) else both_passes(given)))
    return make_cell("attention_varlen", config, metrics, status)


def leaderboard_cell(implementation, *times, status="ok"):
    config = attention_config(implementation, (1, 16, 16384, 64), precision="bf16", device="cuda")
    metrics = metrics_of(leaderboard_time=list(times), flops=1.924e12, error_out=2e-3, error_dv=1e-3)
    return make_cell("flash_leaderboard", config, metrics, status)


def step_cell(rounds=3, **implementations):
    """Implementation -> its step times in milliseconds, or the reason of its failure."""
    run = RunConfig(
        model=model_config("2.7B", context_length=4096), size="2.7B", device="cuda", precision="bf16", batch_size=1
    )
    config = {**run.to_dict(), "implementations": list(implementations), "rounds": rounds}
    metrics = []
    for name, given in implementations.items():
        own = {"status": given} if isinstance(given, str) else {"step_time": [time / 1e3 for time in given]}
        metrics += metrics_of(name, **own)
    return make_cell("attention_step", config, metrics)


# -- samples ---------------------------------------------------------------------------------------------------------


def both_passes(milliseconds):
    """Forward takes a quarter of both."""
    return {"forward_backward_time": milliseconds / 1e3, "forward_time": milliseconds / 4e3}


def interleaved(size, **milliseconds):
    return rivals_cell(size, **{name: both_passes(value) for name, value in milliseconds.items()})


SAMPLES = {
    "pytorch_attention": [
        passes_cell("reference", 0.002, 0.006, peak=8 * GIB),
        passes_cell("compiled", 0.001, 0.006, peak=4 * GIB),
        passes_cell("reference", size=(8, 1, 4096, 64), status=OOM),
    ],
    "flash": [
        flash_cell("flash_triton", 1.0),
        flash_cell("sdpa_flash", 0.5),
        flash_cell("flash_triton", 2.0, (1, 1, 4096, 64), peak_memory=GIB),
        flash_cell("sdpa_flash", 3.0, (1, 1, 4096, 64)),
        flash_cell("reference", 20.0, (1, 1, 4096, 64), peak_memory=7 * GIB),
    ],
    "attention_rivals": [
        interleaved((1, 16, 4096, 64), flash_triton=2.0, sdpa_flash=3.0, sdpa_cudnn=1.8),
        interleaved((4, 12, 512, 64), flash_triton=0.2, sdpa_flash=0.1, sdpa_cudnn=0.4),
    ],
    "attention_varlen": [
        varlen_cell("mixed", flash_hopper=1.0, flash_triton=1.6, torch_varlen=2.0, padded=6.0),
        varlen_cell("short", flash_hopper=0.8, flash_triton=0.5, torch_varlen=0.6, padded=4.0),
        varlen_cell("giant", 128, flash_hopper=2.0, flash_triton=3.0, torch_varlen=4.0, padded="ValueError: padding"),
    ],
    "flash_leaderboard": [leaderboard_cell("flash_triton", 0.004), leaderboard_cell("sdpa_flash", 0.006)],
    "attention_step": [
        step_cell(flash_triton=[200] * 6, sdpa_flash=[300] * 6, sdpa_cudnn=[190, 190, 190, 190, 205, 205])
    ],
}


# -- reading tables ---------------------------------------------------------------------------------------------------


def tables(*made: CellView) -> list[Table]:
    return tables_of(catalogue()[made[0].experiment], made)


def about(found: list[Table], what: str) -> Table:
    (table,) = [table for table in found if table.title.en.split(": ")[1].startswith(f"{what} ·")]
    return table
