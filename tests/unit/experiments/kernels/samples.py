"""Hand-made records of the experiments on kernels."""

import dataclasses

from cs336_systems.config import RunConfig, model_config
from cs336_systems.experiments.kernels.kernel_rates import profile_records
from cs336_systems.experiments.kernels.switched_steps import PARTS, WITH_ATTENTION
from cs336_systems.predict.time.calibration_plan import (
    ATTENTIONS,
    KERNEL_TIME,
    MATMULS,
    calibration_cells,
    kernels_of,
)
from cs336_systems.predict.time.gpu_profile import shipped_profiles
from cs336_systems.predict.time.kernel_seconds import kernel_seconds
from cs336_systems.record import CELL_TIME, Environment, Record
from tests.unit.report.step_cells import cell, entries


def profiled(
    experiment="kernels",
    size="small",
    mode="inference",
    *,
    matmul=0.008,
    other=0.002,
    softmax=0.001,
    status="ok",
    context=512,
    **metrics,
) -> list[Record]:
    """A forward of 10 ms kernels in 20 ms; attention: 3 ms scores, 1 ms mask, some softmax, 2 ms output."""
    parts = ("attention scores", "matmul", 0.003, "attention scores", "elementwise", 0.001)
    parts += ("attention softmax", "softmax/reduction", softmax, "attention output", "matmul", 0.002)
    recorded = {
        "kind_table: forward": ("matmul", 100.0, matmul, "elementwise", 50.0, other),
        "part_table: forward": parts,
        "kernel_table: forward": ("gemm", 100.0, matmul, 8e-5, 7e-5, 9e-5, "add", 50.0, other, 4e-5, 3e-5, 5e-5),
        "kernel_time": (matmul + other,),
        "busy_time: forward": (matmul + other,),
        "forward_event_time": (0.02,),
        "profiled_step_time": (0.15,),
        "kernels_on_gpu": (1.0,),
    }
    return cell(experiment, size=size, mode=mode, context=context, status=status, metrics={**recorded, **metrics})


def kernel_rates() -> list[Record]:
    """Attention of a GPU that is 10% slower than the shipped profile says, and that profile."""
    profile = shipped_profiles()["h200"]
    environment = Environment(gpu="NVIDIA H200", compute_capability="9.0")
    config = next(config for config in calibration_cells("cuda") if config["part"] == ATTENTIONS)
    times = tuple(1.1 * kernel_seconds(kernel, profile) + profile.gap for _, kernel in kernels_of(config))
    found = Record("kernel_rates", config, KERNEL_TIME, "s", times, environment=environment)
    end = dataclasses.replace(found, metric=CELL_TIME, samples=(1.0,))
    matmuls = next(config for config in calibration_cells("cuda") if config["part"] == MATMULS)
    products = tuple(1.02 * kernel_seconds(kernel, profile) + profile.gap for _, kernel in kernels_of(matmuls))
    more = dataclasses.replace(found, config=matmuls, samples=products)
    return [found, end, more, dataclasses.replace(end, config=matmuls), *profile_records(profile, found)]


def switched(
    first: float,
    second: float,
    forth: tuple[float, ...],
    back: tuple[float, ...] = (),
    *,
    status: str = "ok",
    switch: str = "attention=auto",
    **fields: object,
) -> list[Record]:
    """A step of medium in two variants; milliseconds of both, and those predicted of the second and of the first."""
    run = RunConfig(
        model=model_config("medium", context_length=1024), size="medium", batch_size=8, precision="bf16", device="cuda",
        **{"attention": "auto", **fields},
    )  # fmt: skip
    milliseconds = {"step_time": (first,) * 3, "switched_time": (second,) * 3, "replayed_time": forth}
    milliseconds |= {"replayed_back_time": back} if back else {}
    metrics = {name: tuple(time / 1e3 for time in times) for name, times in milliseconds.items()}
    kernels = WITH_ATTENTION if "attention" in switch else PARTS["graph"][1]
    return entries("switched_steps", {**run.to_dict(), "switch": switch, "kernels": kernels}, metrics, status)


SAMPLES: dict[str, list[Record]] = {
    "switched_steps": switched(160, 80, (100, 90), (168,), attention="reference")
    + switched(45, 44, (44.44, 44.44), (44.1, 45.0), attention="sdpa", fast="on")
    + switched(75, 44, (42.9,), switch="fast=on", fast=PARTS["graph"][0]),
    "kernel_rates": kernel_rates(),
    "kernels": profiled()
    + profiled(mode="train-step")
    + profiled(size="2.7B", matmul=0.018, forward_event_time=(0.019,))
    + profiled(size="2.7B", mode="train-step", matmul=0.009, other=0.001),
    "attention_ops": profiled("attention_ops") + profiled("attention_ops", "2.7B", softmax=0.002),
    "profiler_agreement": profiled("profiler_agreement"),
}
