"""What others have published of the same work: columns of reference, with their GPU named.

From write-ups of the course's assignment: figures of a table only, and only where it says on which GPU, at which batch,
context and precision. Means without their samples, on software that is not stated: a scale, not a measurement.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cs336_systems.config import RunConfig, model_config
from cs336_systems.record import CELL_TIME, GIB, MIB, Environment, Record

PUBLISHED = "published"
"""The run that these records are shown as."""
H800 = Environment(gpu="NVIDIA H800 PCIe")
RTX_4090_D = Environment(gpu="NVIDIA GeForce RTX 4090 D")

# size -> ms of forward and backward, fp32, batch 4, by context.
_PASSES = {
    "small": {128: (21.57, 23.02), 256: (21.86, 26.00), 512: (27.24, 54.23)},
    "medium": {128: (45.03, 46.51), 256: (44.37, 81.12), 512: (84.28, 164.97)},
    "large": {128: (64.98, 93.93), 256: (86.51, 170.95), 512: (161.45, 342.85)},
    "xl": {128: (87.18, 175.88), 256: (152.54, 321.49), 512: (326.48, 665.57)},
    "2.7B": {128: (119.78, 264.10), 256: (232.57, 487.16), 512: (490.07, 1003.19)},
}
# size -> the same under bf16 autocast at context 128.
_BF16_PASSES = {
    "small": (23.54, 24.97),
    "medium": (46.80, 49.65),
    "large": (68.18, 73.93),
    "xl": (92.29, 98.59),
    "2.7B": (62.11, 86.81),
}
# size -> the same in fp32 at context 512: compiled.
_COMPILED_PASSES = {
    "small": (19.828, 40.509),
    "medium": (68.714, 133.447),
    "large": (136.453, 281.020),
    "xl": (279.752, 566.427),
    "2.7B": (448.186, 916.464),
}
# context -> GiB at the peak of 2.7B in fp32 and in bf16, by mode.
_PEAKS = {
    "forward": {128: (18.08, 22.45), 256: (24.31, 26.50), 512: (39.77, 36.86)},
    "train-step": {128: (51.44, 51.44), 256: (51.44, 52.09), 512: (65.52, 62.69)},
}
# (d, tokens) -> ms of forward and backward of attention by the formula in fp32, batch 8: eager, then compiled;
# MiB before backward and at the peak: eager.
_H800_ATTENTION = {
    (16, 256): ((0.147, 0.417), (0.127, 0.351), (68.59, 76.71)),
    (16, 1024): ((0.334, 0.886), (0.195, 0.484), (131.09, 259.59)),
    (16, 4096): ((4.567, 14.395), (2.240, 6.302), (1112.38, 3162.38)),
    (16, 8192): ((17.767, 59.494), (8.721, 27.866), (4240.75, 12436.75)),
    (16, 16384): ((70.177, 233.282), (25.981, 98.637), (16737.50, 49513.50)),
    (32, 256): ((0.144, 0.545), (0.280, 0.735), (69.09, 77.34)),
    (32, 1024): ((0.346, 0.913), (0.412, 0.817), (133.09, 262.09)),
    (32, 4096): ((4.701, 14.639), (1.961, 5.887), (1120.38, 3172.38)),
    (32, 8192): ((18.430, 57.968), (7.396, 23.731), (4256.75, 12456.75)),
    (32, 16384): ((73.361, 230.936), (29.497, 97.754), (16769.50, 49553.50)),
    (64, 256): ((0.144, 0.551), (0.283, 0.733), (70.09, 78.59)),
    (64, 1024): ((0.379, 0.986), (0.435, 0.771), (137.09, 267.09)),
    (64, 4096): ((5.120, 15.918), (2.430, 7.224), (1136.38, 3192.38)),
    (64, 8192): ((19.990, 62.409), (9.340, 28.902), (4288.75, 12496.75)),
    (64, 16384): ((79.836, 250.914), (36.924, 119.268), (16833.50, 49633.50)),
    (128, 256): ((0.144, 0.420), (0.138, 0.336), (72.09, 81.09)),
    (128, 1024): ((0.469, 1.246), (0.415, 0.763), (145.09, 277.09)),
    (128, 4096): ((5.986, 18.652), (3.365, 10.599), (1168.38, 3232.38)),
    (128, 8192): ((24.207, 74.089), (13.864, 42.101), (4352.75, 12576.75)),
    (128, 16384): ((94.780, 291.347), (53.214, 163.079), (16961.50, 49793.50)),
}
# (d, tokens) -> ms of 100 passes; None: out of memory.
_4090_D_ATTENTION: Mapping[tuple[int, int], tuple[tuple[float, float] | None, tuple[float, float] | None]] = {
    (16, 256): ((9.80, 75.05), (31.73, 96.26)),
    (16, 1024): ((26.56, 113.99), (39.53, 121.09)),
    (16, 4096): ((381.23, 1176.45), (327.78, 892.84)),
    (16, 8192): ((1453.46, 4420.82), (1403.92, 3694.73)),
    (16, 16384): (None, (3892.81, 11068.14)),
    (32, 256): ((20.58, 81.62), (28.41, 83.87)),
    (32, 1024): ((28.02, 90.45), (89.37, 191.02)),
    (32, 4096): ((385.21, 1185.48), (436.34, 1064.99)),
    (32, 8192): ((1473.76, 4477.36), (1121.31, 3005.46)),
    (32, 16384): (None, None),
    (64, 256): ((14.52, 93.63), (35.62, 102.22)),
    (64, 1024): ((28.66, 99.31), (92.68, 194.52)),
    (64, 4096): ((391.25, 1205.10), (443.34, 1085.61)),
    (64, 8192): ((1488.09, 4545.52), (1142.18, 3069.71)),
    (64, 16384): (None, None),
    (128, 256): ((9.78, 50.73), (29.24, 88.36)),
    (128, 1024): ((29.00, 91.72), (94.58, 199.20)),
    (128, 4096): ((426.99, 1289.84), (477.61, 1165.66)),
    (128, 8192): ((1624.00, 4840.41), (1302.41, 3403.81)),
    (128, 16384): (None, None),
}
_IMPLEMENTATIONS = ("reference", "compiled")


def published() -> list[Record]:
    return [*_steps(), *_peaks(), *_attention()]


def _steps() -> Iterator[Record]:
    for size, by_context in _PASSES.items():
        for context, times in by_context.items():
            for experiment in ("end_to_end", "precision") if context == 128 else ("end_to_end",):
                yield from _passes(experiment, _run(size, context), times)
        yield from _passes("precision", _run(size, 128, precision="bf16"), _BF16_PASSES[size])
        yield from _passes("compile", _run(size, 512), by_context[512])
        yield from _passes("compile", _run(size, 512, compile=True), _COMPILED_PASSES[size])


def _run(size: str, context: int, mode: str = "forward-backward", **others: Any) -> dict[str, Any]:
    return RunConfig(model_config(size, context_length=context), mode=mode, device="cuda", **others).to_dict()


def _passes(experiment: str, config: Mapping[str, Any], times: Sequence[float]) -> Iterator[Record]:
    metrics = {f"{name}_time": ms / 1e3 for name, ms in zip(("forward", "backward"), times, strict=True)}
    return _cell(experiment, config, metrics, H800)


def _peaks() -> Iterator[Record]:
    for mode, by_context in _PEAKS.items():
        for context, sizes in by_context.items():
            for precision, gib in zip(("fp32", "bf16"), sizes, strict=True):
                config = _run("2.7B", context, mode, precision=precision)
                yield from _cell("memory", config, {"peak_memory": gib * GIB}, H800)


def _attention() -> Iterator[Record]:
    for shape, (eager, compiled, (before, peak)) in _H800_ATTENTION.items():
        sizes = {"memory_before_backward": before * MIB, "peak_memory": peak * MIB}
        for name, times, more in zip(_IMPLEMENTATIONS, (eager, compiled), (sizes, {}), strict=True):
            yield from _attention_cell(shape, name, H800, {**_times(times, 1e-3), **more})
    for shape, both in _4090_D_ATTENTION.items():
        for name, hundred in zip(_IMPLEMENTATIONS, both, strict=True):
            yield from _attention_cell(shape, name, RTX_4090_D, _times(hundred, 1e-5) if hundred else None)


def _times(both: Sequence[float], unit: float) -> dict[str, float]:
    return {"forward_time": both[0] * unit, "backward_time": both[1] * unit}


def _attention_cell(
    shape: tuple[int, int], implementation: str, environment: Environment, metrics: Mapping[str, float] | None
) -> Iterator[Record]:
    config: dict[str, Any] = {
        "batch_size": 8,
        "heads": 1,
        "head_dim": shape[0],
        "seq_len": shape[1],
        "is_causal": False,
    }
    config |= {"precision": "fp32", "device": "cuda", "implementation": implementation}
    return _cell("pytorch_attention", config, metrics, environment)


def _cell(
    experiment: str, config: Mapping[str, Any], metrics: Mapping[str, float] | None, environment: Environment
) -> Iterator[Record]:
    """`metrics` None: it ran out of memory."""
    for metric, value in (metrics or {}).items():
        yield Record(experiment, config, metric, "B" if "memory" in metric else "s", (value,), "ok", environment)
    yield Record(experiment, config, CELL_TIME, "s", (), "oom" if metrics is None else "ok", environment)
