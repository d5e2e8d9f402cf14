"""Every experiment by name: what it asks, its grid of cells, and the instrument that measures a cell. No torch here."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

from cs336_systems.config import COURSE_SIZES, MODES, PRECISIONS, RunConfig, UserError, model_config

PRESETS = ("quick", "course", "full")

INSTRUMENTS = {
    "step": "cs336_systems.benchmark.benchmark:measure_step",
    "agreement": "cs336_systems.benchmark.agreement:measure_agreement",
    "memory_model": "cs336_systems.benchmark.calculate_memory:measure_prediction",
    "accumulation": "cs336_systems.benchmark.precision:measure_accumulation",
    "autocast_dtypes": "cs336_systems.benchmark.precision:measure_dtypes",
}
"""Name -> function(config) -> list of [metric, unit, samples]; imported in the worker only."""

Grid = Callable[[str, RunConfig], Iterable[dict[str, Any]]]


@dataclass(frozen=True)
class Experiment:
    question: str
    instrument: str
    grid: Grid
    """(preset, base) -> configurations; `base` carries the device and whatever the user set for all cells."""


def cells(names: Iterable[str], preset: str, base: RunConfig) -> list[tuple[str, dict[str, Any]]]:
    """(experiment, configuration) for every cell of the named experiments."""
    if preset not in PRESETS:
        raise UserError(f"unknown preset {preset!r}; choose one of: {', '.join(PRESETS)}")
    requests = []
    for name in names:
        if name not in RUNNABLE:
            raise UserError(f"unknown experiment {name!r}; choose from: {', '.join(RUNNABLE)}")
        requests += [(name, config) for config in EXPERIMENTS[name].grid(preset, base)]
    return requests


def _sizes(preset: str, base: RunConfig) -> tuple[str, ...]:
    if preset != "quick":
        return COURSE_SIZES
    return ("small", "medium") if base.device_type == "cuda" else ("tiny",)


def _run(base: RunConfig, size: str, context: int | None = None, **fields: Any) -> dict[str, Any]:
    overrides = {"context_length": context} if context else {}
    return dataclasses.replace(base, model=model_config(size, **overrides), size=size, **fields).to_dict()


def _end_to_end(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    contexts: tuple[int | None, ...] = (512, 128, 256, 1024) if preset == "full" else (None,)
    for context, size, mode in product(contexts, _sizes(preset, base), MODES):
        yield _run(base, size, context, mode=mode)


def _warmup(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    if preset == "quick":
        sizes: tuple[str, ...] = ("small",) if base.device_type == "cuda" else ("tiny",)
    else:
        sizes = COURSE_SIZES if preset == "full" else ("small", "2.7B")
    for size, steps in product(sizes, (0, 1, 2, 5)):
        yield _run(base, size, warmup_steps=steps)


def _precision(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    on_cpu_quickly = preset == "quick" and base.device_type == "cpu"
    precisions = PRECISIONS if preset == "full" or on_cpu_quickly else ("fp32", "bf16")
    modes = MODES if on_cpu_quickly else ("train-step",)
    for size, precision, mode in product(_sizes(preset, base), precisions, modes):
        yield _run(base, size, precision=precision, mode=mode)


def _compile(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    for size, compiled in product(_sizes(preset, base), (False, True)):
        yield _run(base, size, compile=compiled)


def _peak_memory(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    modes = ("inference", "forward", "train-step")
    for size, mode, precision in product(_sizes(preset, base), modes, ("fp32", "bf16")):
        yield _run(base, size, mode=mode, precision=precision)
    if preset == "quick":
        return
    for context, mode, precision in product((128, 256), modes, ("fp32", "bf16")):
        yield _run(base, "2.7B", context, mode=mode, precision=precision)
    for size, precision in product(("small", "large", "2.7B"), ("fp32", "bf16")):
        yield _run(base, size, precision=precision, attention="sdpa")
        yield _run(base, size, precision=precision, checkpoint_blocks=1)
        yield _run(base, size, precision=precision, checkpoint_blocks=4)
        yield _run(base, size, precision=precision, attention="sdpa", checkpoint_blocks=2)


def _timing_agreement(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    if base.device_type != "cuda":
        raise UserError("timing_agreement needs a CUDA GPU: do_bench times with CUDA events")
    for size in ("small",) if preset == "quick" else ("small", "large", "2.7B"):
        yield _run(base, size)


def _memory_model(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    """Predictions are for a GPU whatever this machine is: that is what they are for."""
    gpu = dataclasses.replace(base, device="cuda")
    sizes = ("small", "2.7B") if preset == "quick" else COURSE_SIZES
    contexts = (128, 256, 512) if preset != "quick" else (512,)
    for size, context, precision in product(sizes, contexts, ("fp32", "bf16")):
        yield _run(gpu, size, context, precision=precision)


def _accumulation(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    for accumulator, term in (("fp32", "fp32"), ("fp16", "fp16"), ("fp32", "fp16"), ("fp32", "fp16 cast to fp32")):
        yield {"accumulator": accumulator, "term": term, "value": 0.01, "count": 1000}


def _autocast_dtypes(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    for model, dtype in product(("toy", "transformer"), ("fp16", "bf16")):
        yield {"model": model, "autocast": dtype, "device": base.device}


def _none(preset: str, base: RunConfig) -> Iterable[dict[str, Any]]:
    return ()


EXPERIMENTS: dict[str, Experiment] = {
    "bench": Experiment("How long does a step take, and how much memory?", "step", _none),
    "end_to_end": Experiment("How long do forward, backward and the optimizer take, by size?", "step", _end_to_end),
    "warmup": Experiment("What do too few warm-up steps do to the numbers?", "step", _warmup),
    "precision": Experiment("What does lower precision give, in time and memory?", "step", _precision),
    "compile": Experiment("What does torch.compile give, and cost?", "step", _compile),
    "peak_memory": Experiment("Does the predicted peak agree with the measured one?", "step", _peak_memory),
    "timing_agreement": Experiment(
        "Does another timer give the same times for the same work?", "agreement", _timing_agreement
    ),
    "memory_model": Experiment("What needs how much memory, before a GPU is paid for?", "memory_model", _memory_model),
    "accumulation": Experiment("Where does precision get lost when adding up?", "accumulation", _accumulation),
    "autocast_dtypes": Experiment("Which dtype has what under autocast?", "autocast_dtypes", _autocast_dtypes),
}
RUNNABLE = tuple(name for name in EXPERIMENTS if name != "bench")
