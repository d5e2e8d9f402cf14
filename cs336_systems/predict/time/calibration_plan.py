"""The kernels that `cs336 calibrate` times, and the profile that is fitted to their times. No torch.

A cell is a list of runs whose kernels are timed one by one, at the GPU's highest clock; its record has one sample for
each kernel of `kernels_of(cell)`. The last cell has sustained work, whose clock shows the power limit.
"""

import dataclasses
import itertools
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cs336_systems.config import ModelConfig, RunConfig, UserError
from cs336_systems.predict.time.fitting import Measured, Timed, fit_attention, fit_matmuls, fit_passes
from cs336_systems.predict.time.gpu_profile import MEASURED, VERSION, GpuProfile, MatmulRates, Power
from cs336_systems.predict.time.kernel_seconds import (
    ATTENTION,
    MATMUL,
    PASS,
    SMALL,
    kernel_seconds,
)
from cs336_systems.predict.time.operator_plan import HOST, operator_cells, operator_kernels, with_eager_rates
from cs336_systems.predict.time.step_kernels import (
    AttentionPass,
    Matmul,
    Pass,
    gradient_kernels,
    update_kernels,
)
from cs336_systems.record import Record

KERNEL_TIME, SUSTAINED_TIME, CLOCK, WATTS = "kernel_time", "sustained_time", "clock", "watts"
POWER_LIMIT, MULTIPROCESSORS = "power_limit", "multiprocessors"
"""Names of metrics."""
MATMULS, PASSES, ATTENTIONS, LAUNCHES, POWER = "matmuls", "passes", "attention", "launches", "power"
PROFILE = "profile"
"""Parts of a calibration; and the metric of its result, whose only sample is a profile as JSON."""
CELLS = {MATMULS: 4, PASSES: 2}
"""Number of cells of a part; each cell has its own share of the runs."""
RUNS = {MATMULS: 64, PASSES: 24}
LARGEST_MATMUL, LARGEST_ATTENTION, LARGEST_PASS = 8e12, 6e12, 2e10
"""FLOPs, and bytes, of the largest kernels that are timed: larger ones reach the same rates."""
WIDTHS = (512, 640, 768, 896, 1024, 1280, 1536, 1600, 2048, 2560, 3072, 3584, 4096)
VOCABULARIES = (10_000, 32_000, 50_304, 128_256, 151_936)
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
HEAD_DIMS, GROUPS = (64, 128), (1, 4)
"""Head dims, and query heads per KV head, for which attention is timed: each compiles its own kernels."""
ATTENTION_LENGTHS, ATTENTION_HEADS = (128, 256, 512, 1024, 2048, 8192, 32_768), ((1, 16), (8, 32))
"""Sequence lengths; and pairs of batch size and heads."""
SUSTAINED_SIZE, SUSTAINED_BYTES = 8192, 1 << 29
SUSTAINED_ATTENTION = AttentionPass("forward", 4, 32, 32, 4096, 128)
"""Sustained work: square matmuls of this size, copies of this many bytes, and both passes of attention."""
PLAN = 3
"""Version of the plan: cells of other versions time other kernels."""
STATIC, EXPONENT = 0.4, 1.43
"""Share of the power limit that an idle GPU draws, and the exponent with which energy falls with the clock: fitted to
steps of an H200, and assumed for other GPUs."""
FULL_CLOCK, USUAL_SLOWDOWN = 0.98, 0.5
"""Above this relative clock work does not slow down; and the assumed slowdown at lower clocks, which is not
measured."""
TENSOR_FLOPS = {"8.0": 2048, "8.6": 512, "8.9": 1024, "9.0": 4096, "10.0": 8192, "12.0": 1024}
"""Dense 16-bit FLOPs per SM and clock cycle, by compute capability."""

# -- cells ------------------------------------------------------------------------------------------------------------


def calibration_cells(device: str) -> Iterator[dict[str, Any]]:
    """Return the configurations of all cells, the same for every GPU."""
    for config in _cells(device):
        yield {**config, "plan": PLAN}


def _cells(device: str) -> Iterator[dict[str, Any]]:
    for part in (MATMULS, PASSES):
        for number in range(CELLS[part]):
            yield {"device": device, "part": part, "number": number}
    for number, dim in enumerate(HEAD_DIMS):
        yield {"device": device, "part": ATTENTIONS, "number": number, "head_dim": dim}
    yield {"device": device, "part": LAUNCHES, "number": 0}
    yield from operator_cells(device)
    yield {"device": device, "part": POWER, "number": 0}


def kernels_of(config: Mapping[str, Any]) -> list[tuple[RunConfig, Timed]]:
    """Return the kernels that a cell times, each with a run that contains it."""
    part = config["part"]
    if part == ATTENTIONS:
        return list(_attention_kernels(config["head_dim"]))
    if part not in RUNS:
        return operator_kernels(config, _random_run)
    rng = random.Random(f"{part} {config['number']}")
    found: dict[Timed, RunConfig] = {}
    for _ in range(RUNS[part] // CELLS[part]):
        run = _random_run(rng)
        for kernel in (*gradient_kernels(run, adds=rng.random() < 0.3), *update_kernels(run)):
            if part == MATMULS and isinstance(kernel, Matmul) and kernel.flops <= LARGEST_MATMUL:
                found.setdefault(kernel._replace(name="matmul", times=1), run)
            if part == PASSES and isinstance(kernel, Pass) and kernel.bytes <= LARGEST_PASS:
                found.setdefault(kernel._replace(times=1), run)
    return [(run, kernel) for kernel, run in found.items()]


def _random_run(rng: random.Random) -> RunConfig:
    """Return a typical training run: its width, feed-forward layer, heads, vocabulary, and 512 to 65,536 tokens."""
    while True:
        width, head_dim, context = rng.choice(WIDTHS), rng.choice((64, 80, 128)), rng.choice(LENGTHS[:-1])
        tokens = int(2 ** rng.uniform(9, 16))
        if width % head_dim == 0 and tokens >= context:
            break
    heads = width // head_dim
    model = ModelConfig(
        vocab_size=rng.choice(VOCABULARIES),
        context_length=context,
        d_model=width,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=rng.choice([kv for kv in (heads, heads // 2, heads // 4) if kv and heads % kv == 0]),
        d_ff=int(rng.choice([8 / 3, 3.5, 4]) * width) // 64 * 64,
        qk_norm=rng.random() < 0.3,
        qkv_bias=rng.random() < 0.3,
    )
    return _run(model, tokens // context)


def _run(model: ModelConfig, batch: int) -> RunConfig:
    return RunConfig(model=model, batch_size=batch, precision="bf16", attention="auto", fast="on", device="cuda")


def _attention_kernels(dim: int) -> Iterator[tuple[RunConfig, Timed]]:
    for group, length, (batch, heads) in itertools.product(GROUPS, ATTENTION_LENGTHS, ATTENTION_HEADS):
        model = ModelConfig(
            d_model=heads * dim, num_heads=heads, num_kv_heads=heads // group, d_ff=64, num_layers=1,
            context_length=length, vocab_size=64,
        )  # fmt: skip
        run = _run(model, batch)
        for kernel in gradient_kernels(run):
            if isinstance(kernel, AttentionPass) and 3.5 * kernel.flops <= LARGEST_ATTENTION:
                yield run, kernel


# -- the profile ------------------------------------------------------------------------------------------------------


def profile_from(records: Iterable[Record]) -> GpuProfile:
    """Fit a profile to the records of a calibration. A missing part raises an error that names it."""
    own = [record for record in records if record.ok and record.config.get("plan") == PLAN]
    missing = {MATMULS, PASSES, ATTENTIONS, LAUNCHES} - {record.config["part"] for record in own}
    if missing:
        raise UserError(f"there are no times of {', '.join(sorted(missing))}; run cs336 calibrate again to complete it")
    small, gap, launch = _numbers(own, KERNEL_TIME, LAUNCHES)
    (sms,) = map(int, _numbers(own, MULTIPROCESSORS, LAUNCHES))
    kernels = [one._replace(seconds=one.seconds - gap) for one in measured_kernels(own) if one.seconds > gap]
    environment = own[-1].environment
    per_clock = TENSOR_FLOPS.get(environment.compute_capability or "", 1024)
    passes = fit_passes(kernels, sms)
    programs = {kernel.name for kernel, _ in kernels if isinstance(kernel, Pass) and kernel.programs}
    profile = GpuProfile(
        gpu=environment.gpu or "GPU",
        source=MEASURED,
        version=VERSION,
        sms=sms,
        peak=sms * per_clock * (environment.sm_clock_max_mhz or 1000) * 1e6,
        bandwidth=max(rates.bandwidth for name, rates in passes.items() if name not in programs),
        matmul=MatmulRates(0.9, 13.0, 9e-7, 2e-6, 48.0, 1.6, 0.5, least=2e-9),
        passes=passes,
        attention=fit_attention(kernels, sms),
        small=small,
        gap=gap,
        launch=launch,
        about=f"torch {environment.torch}, Triton {environment.triton}",
    )
    profile = dataclasses.replace(profile, matmul=fit_matmuls(kernels, profile))
    if any(record.config["part"] == HOST for record in own):  # older calibrations have no rates of eager steps
        host, capability = _numbers(own, KERNEL_TIME, HOST), environment.compute_capability or ""
        clock = (environment.sm_clock_max_mhz or 1000) * 1e6
        profile = with_eager_rates(profile, kernels, host, capability, clock)
    return dataclasses.replace(profile, power=_power(own), spread=spread_of(kernels, profile))


def measured_kernels(records: Iterable[Record]) -> list[Measured]:
    """Return the kernels that were timed one by one, by this version's plan; plans of other versions have other
    kernels."""
    found = []
    for record in records:
        is_listed = record.config.get("plan") == PLAN and record.config["part"] not in (LAUNCHES, HOST, POWER)
        if record.metric == KERNEL_TIME and record.ok and is_listed:
            pairs = zip(kernels_of(record.config), record.numbers, strict=True)
            found += [Measured(kernel, seconds) for (_, kernel), seconds in pairs]
    return found


def _numbers(records: Sequence[Record], metric: str, part: str) -> list[float]:
    return next(record.numbers for record in records if record.metric == metric and record.config["part"] == part)


def _power(records: Sequence[Record]) -> Power | None:
    """Return the power model from sustained work; None if the GPU's power could not be read."""
    found = {(record.metric, record.variant): record.numbers[0] for record in records if record.config["part"] == POWER}
    limit = found.get((POWER_LIMIT, ""))
    if not limit or (WATTS, "copy") not in found:
        return None
    static = STATIC * limit
    backward = SUSTAINED_ATTENTION._replace(name="backward")
    work = {MATMUL: 2 * SUSTAINED_SIZE**3, ATTENTION: SUSTAINED_ATTENTION.flops + backward.flops}
    per_flop, slowdown = {}, {PASS: 0.01, SMALL: 0.5}
    for kind, flops in work.items():
        seconds, first, clock = (found[metric, kind] for metric in (SUSTAINED_TIME, KERNEL_TIME, CLOCK))
        per_flop[kind] = (min(limit, found[WATTS, kind]) - static) * seconds / (flops * clock**EXPONENT)
        slower = max(0.0, seconds / first - 1)
        slowdown[kind] = min(1.0, slower / (1 / clock - 1)) if clock < FULL_CLOCK else USUAL_SLOWDOWN
    copied = 2 * SUSTAINED_BYTES / found[SUSTAINED_TIME, "copy"]
    per_byte = max(0.0, found[WATTS, "copy"] - static) / copied
    return Power(limit, static, per_flop, per_byte, EXPONENT, slowdown)


def spread_of(kernels: Sequence[Measured], profile: GpuProfile) -> float:
    """Return half the width of a step's interval: the mean error of its long kernels; in a sum the errors partly
    cancel."""
    errors = [
        abs(kernel_seconds(kernel, profile) / seconds - 1)
        for kernel, seconds in kernels
        if isinstance(kernel, Matmul) and not kernel.precision and seconds > 1e-4
    ]
    return max(0.03, 1.5 * statistics.mean(errors)) if errors else 0.1
