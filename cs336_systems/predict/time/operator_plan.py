"""The part of a calibration that is for eager steps: PyTorch's own operators, matmuls in 32 bits, attention of other
libraries, and the host. No torch.
"""

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cs336_systems.config import RunConfig
from cs336_systems.predict.time.eager_kernels import (
    ADAMW,
    CAST,
    COPY,
    EFFICIENT,
    FLASH_2,
    LOG_SOFTMAX,
    LOG_SOFTMAX_BACKWARD,
    MASKED,
    MIXED,
    NARROW,
    POINTWISE,
    RMS_NORM,
    RMS_NORM_BACKWARD,
    SOFTMAX,
    SOFTMAX_BACKWARD,
    STRIDED,
    STRIDED_MIXED,
    TRANSPOSED,
    TRIANGLE,
    eager_phases,
)
from cs336_systems.predict.time.eager_time import CLOSE_STEP, COMPILED, LAUNCH_BOUND_STEP
from cs336_systems.predict.time.fitting import Measured, Timed, fit_matmuls
from cs336_systems.predict.time.gpu_profile import GpuProfile, HostRates, MatmulRates, WideMatmuls
from cs336_systems.predict.time.step_kernels import TRITON_WIDE, AttentionPass, Matmul, Pass

OPERATORS, WIDE, LIBRARIES, HOST = "operators", "wide matmuls", "attention of libraries", "host"
"""Parts of the calibration."""
TIMED_PASSES = (
    POINTWISE, CAST, NARROW, MIXED, STRIDED, STRIDED_MIXED, TRANSPOSED, MASKED, COPY, TRIANGLE, SOFTMAX,
    SOFTMAX_BACKWARD, LOG_SOFTMAX, LOG_SOFTMAX_BACKWARD, RMS_NORM, RMS_NORM_BACKWARD, ADAMW,
)  # fmt: skip
SIZES_OF_A_PASS, RUNS_OF_A_PART = 8, 6
"""Number of sizes at which a pass is timed, and number of runs that provide the kernels of a part."""
LEAST_BYTES, MOST_BYTES, LARGEST_WIDE_MATMUL = 1 << 20, 2e9, 5e11
LIBRARY_SHAPES = ((4, 16, 256), (4, 16, 512), (16, 16, 512), (4, 16, 1024), (1, 16, 2048), (4, 16, 2048), (1, 16, 4096))
"""Batch size, heads and sequence length of each shape."""
LIBRARY_KERNELS, LIBRARY_HEAD_DIMS = (FLASH_2, EFFICIENT, TRITON_WIDE), (64, 128)
WIDE_PRECISIONS = ("fp32", "tf32")
CUDA_CORE_FLOPS = {"8.0": 128}
USUAL_CUDA_CORE_FLOPS = 256
"""FLOPs in fp32 per SM and clock cycle: by compute capability, and of all others."""
WIDE_BEGIN = MatmulRates(0.8, 10.0, 4e-6, 3e-6, 10.0, 1.0, 0.5)
"""Initial rates of fp32 matmuls for the search: their tiles run on CUDA cores, an order of magnitude slower."""
QUEUE_GAP, PHASE_START = 1.9e-6, 4e-4
"""Seconds between two kernels in the GPU's queue, including small kernels that are not listed, and seconds until the
first kernels of a phase run; measured on an H200."""
SPREADS = {
    "fp32": 0.08, "tf32": 0.25, "bf16": 0.08, COMPILED: 0.1, CLOSE_STEP: 0.25, LAUNCH_BOUND_STEP: 0.55,
}  # fmt: skip
"""Relative half widths of intervals, from the errors of recorded steps on an H200; TF32 has none, and its interval is a
guess."""

RandomRun = Callable[[random.Random], RunConfig]


def operator_cells(device: str) -> Iterator[dict[str, Any]]:
    """Return the configurations of the cells."""
    yield {"device": device, "part": OPERATORS, "number": 0}
    for number, precision in enumerate(WIDE_PRECISIONS):
        yield {"device": device, "part": WIDE, "number": number, "precision": precision}
    for number, library in enumerate(LIBRARY_KERNELS):
        yield {"device": device, "part": LIBRARIES, "number": number, "library": library}
    yield {"device": device, "part": HOST, "number": 0}


def operator_kernels(config: Mapping[str, Any], random_run: RandomRun) -> list[tuple[RunConfig, Timed]]:
    """Return the kernels that a cell times, each with a run that contains it."""
    part = config["part"]
    if part == LIBRARIES:
        return list(_library_kernels(config["library"], random_run(random.Random(part))))
    if part not in (OPERATORS, WIDE):
        return []
    rng = random.Random(f"{part} {config['number']}")
    found: dict[Timed, RunConfig] = {}
    for number in range(RUNS_OF_A_PART):
        precision = config.get("precision", ("fp32", "bf16")[number % 2])
        run = _reference(random_run(rng), precision)
        for kernels in eager_phases(run).values():
            for kernel in kernels:
                if part == WIDE and isinstance(kernel, Matmul) and kernel.flops <= LARGEST_WIDE_MATMUL:
                    found.setdefault(kernel._replace(name="matmul", times=1), run)
                if part == OPERATORS and isinstance(kernel, Pass) and _is_timed(kernel, found, run):
                    found.setdefault(kernel._replace(times=1), run)
    return [(run, kernel) for kernel, run in found.items()]


def _is_timed(kernel: Pass, found: Mapping[Timed, RunConfig], run: RunConfig) -> bool:
    is_known = kernel.name in TIMED_PASSES and LEAST_BYTES <= kernel.bytes <= MOST_BYTES
    if kernel.name in (RMS_NORM, RMS_NORM_BACKWARD) and kernel.elements != run.model.d_model:
        return False  # norms of heads: rows of the residual stream are timed
    if kernel.name in (STRIDED, MASKED) and kernel.bytes < 8 * kernel.programs:
        return False  # operands of 16 bits: those of 32 are timed
    return is_known and sum(own.name == kernel.name for own in found) < SIZES_OF_A_PASS


def _reference(run: RunConfig, precision: str) -> RunConfig:
    """Return the run as an eager step with naive attention and scores of moderate size."""
    model = dataclasses.replace(
        run.model, num_kv_heads=0, context_length=min(run.model.context_length, 1024), num_layers=1
    )
    batch = max(1, min(run.tokens, 1 << 14) // model.context_length)
    return dataclasses.replace(
        run, model=model, batch_size=batch, precision=precision, attention="reference", fast="off"
    )


def _library_kernels(library: str, run: RunConfig) -> Iterator[tuple[RunConfig, Timed]]:
    for dim in LIBRARY_HEAD_DIMS:
        for batch, heads, length in LIBRARY_SHAPES:
            for name in ("forward", "backward"):
                yield run, AttentionPass(f"{name} {library}", batch, heads, heads, length, dim)


# -- the profile ------------------------------------------------------------------------------------------------------


def with_eager_rates(
    profile: GpuProfile, kernels: Sequence[Measured], host: Sequence[float], capability: str, clock: float
) -> GpuProfile:
    """Return the profile with rates of eager steps. `host`: seconds measured by the part HOST; `clock`: the highest
    clock in Hz. The profile already has the passes and the attention of other libraries."""
    cores = profile.sms * CUDA_CORE_FLOPS.get(capability, USUAL_CUDA_CORE_FLOPS) * clock
    wide = {}
    for precision, peak, begin in (("fp32", cores, WIDE_BEGIN), ("tf32", profile.peak / 2, profile.matmul)):
        own = [one for one in kernels if isinstance(one.kernel, Matmul) and one.kernel.precision == precision]
        if own:
            first = dataclasses.replace(profile, wide={precision: WideMatmuls(peak, begin)})
            wide[precision] = WideMatmuls(peak, fit_matmuls(own, first, precision))
    forward, inference, backward, parameter, release, step, compiled = host
    rates = HostRates(forward, inference, backward, parameter, release, step, QUEUE_GAP, compiled, PHASE_START)
    return dataclasses.replace(profile, wide=wide, host=rates, spreads=SPREADS)
