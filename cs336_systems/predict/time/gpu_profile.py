"""A GPU's rates: what `kernel_time` needs to know of it. Measured by `cs336 calibrate`, or from a data sheet. No torch.

Rates are those of a GPU at its highest clock; `Power` says how the clock falls when a step needs more than the GPU's
power limit.
"""

import dataclasses
import functools
import json
import math
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from cs336_systems.config import UserError
from cs336_systems.files import reason_of, write_file
from cs336_systems.predict.gpus import GIGA, GPU, TERA, card_name, find_by_driver_name

MEASURED, DATA_SHEET = "measured", "data sheet"
VERSION = 3
"""Of profiles: what their rates mean. One that `cs336 calibrate` of another version kept is not used."""
HOPPER = re.compile(r"\bG?H(100|200|800|20)")
"""Names of GPUs that have the H200's kernels."""


@dataclass(frozen=True)
class MatmulRates:
    """A matmul is a grid of tiles, one to an SM at a time."""

    efficiency: float
    """Share of the tensor cores' peak that a very large tile has."""
    perimeter: float
    """Time of loading a tile's operands: that of `perimeter` more rows and columns of the result."""
    epilogue: float
    """Seconds of writing a tile of 128 x 256 results in 16 bits."""
    fixed: float
    """Seconds of a kernel beside its tiles."""
    more_depth: float
    """Depth that a tile's beginning and end add to its own."""
    wide_epilogue: float
    """Time of writing or reading as many bytes again, relative to the epilogue."""
    overlap: float
    """Share of the last, incomplete round of tiles that other work hides: 0 for whole rounds, 1 for none."""
    input: float = 1.0
    """Time of a tile in the gradient of an input, over that in forward: an operand lies across the depth."""
    weight: float = 1.0
    """The same for the gradient of a weight."""
    least: float = 0.0
    """Least seconds of a tile for a unit of depth: small tiles wait for their operands."""


@dataclass(frozen=True)
class PassRates:
    bandwidth: float
    """Bytes a second of large passes."""
    fixed: float
    """Seconds of a pass over nothing."""
    program: float = 0.0
    """Seconds of an SM for a program, or for a row of one that takes its rows one after another."""
    element: float = 0.0
    """Seconds of an SM for an element that a program holds."""


@dataclass(frozen=True)
class AttentionRates:
    """Attention by programs of 128 queries, each over tiles of 128 keys, one program to an SM at a time."""

    tile: float
    """Seconds of a tile."""
    program: float
    """Seconds of a program beside its tiles."""
    fixed: float
    """Seconds of a call beside its programs."""
    queries: float = 0.0
    """Seconds of an SM for TILE queries of a head in helper kernels, which prepare and finish their gradients."""
    alone: float = 1.0
    """Programs that an SM runs side by side: a program alone takes so many times its share of an SM."""


@dataclass(frozen=True)
class Power:
    """The clock at which a step stays within the power limit.

    A step takes `static` watts and the energy of its work; a lower clock saves energy (by its `exponent`-th power) and
    makes kernels slower: by `1 + slowdown * (1 / clock - 1)`, where the highest clock is 1.
    """

    limit: float
    """Watts."""
    static: float
    per_flop: dict[str, float]
    """Joules of a FLOP at the highest clock, by kind of kernel."""
    per_byte: float
    """Joules of a byte that a pass moves."""
    exponent: float
    slowdown: dict[str, float]
    """By kind of kernel; 1 for a kernel whose time is all computation, 0 for one that waits for memory."""
    warming: float = 0.0
    """Watts that a GPU needs in addition once it is warm: currents leak."""
    warm_after: float = 1.0
    """Seconds of work after which it needs two thirds of them."""

    def static_after(self, seconds: float) -> float:
        """Return the static power of a GPU that has worked for so long at its limit."""
        return self.static + self.warming * (1 - math.exp(-seconds / self.warm_after))


@dataclass(frozen=True)
class WideMatmuls:
    """Matmuls of 32-bit operands, in fp32 or TF32."""

    peak: float
    """FLOP/s at the highest clock."""
    rates: MatmulRates


@dataclass(frozen=True)
class HostRates:
    """Seconds of the host in a step that it launches operator by operator. They vary from run to run, by a third and
    more: other work of the machine and its Python count."""

    forward: float
    """For one kernel of forward that autograd records."""
    inference: float
    """For one kernel of forward without autograd."""
    backward: float
    """For one kernel of backward."""
    parameter: float
    """For one parameter in the optimizer, before its kernels begin."""
    release: float
    """For the graph of one block, which is freed after backward."""
    step: float
    """For all else in a step, while the GPU waits."""
    gap: float
    """Between two kernels that wait in the GPU's queue."""
    compiled: float
    """For one kernel of a compiled model, forward or backward."""
    start: float = 0.0
    """Until the first kernels of forward or backward run, while the GPU waits."""


@dataclass(frozen=True)
class GpuProfile:
    gpu: str
    source: str
    """MEASURED or DATA_SHEET."""
    sms: int
    peak: float
    """FLOP/s of the tensor cores at the highest clock."""
    bandwidth: float
    """Bytes a second of a large copy."""
    matmul: MatmulRates
    passes: dict[str, PassRates]
    """By the name of the pass; "other" is for those that are not listed."""
    attention: dict[str, AttentionRates]
    """By pass and head dim, such as "forward 64"."""
    small: float
    """Seconds of a small kernel."""
    gap: float
    """Seconds between two kernels of a CUDA graph."""
    launch: float
    """Seconds that the host needs for one kernel without a CUDA graph."""
    power: Power | None = None
    about: str = ""
    """Versions that were measured."""
    spread: float = 0.05
    """Half of the interval around a prediction, relative."""
    wide: dict[str, WideMatmuls] = field(default_factory=dict)
    """Matmuls of 32-bit operands, by precision."""
    host: HostRates | None = None
    """None where it was not measured: eager steps are not predicted then."""
    unaligned: dict[str, float] = field(default_factory=dict)
    """Time of a matmul by kernels for older GPUs, over that by the fastest ones: by precision and the power of 2 that
    divides its contiguous dimensions."""
    spreads: dict[str, float] = field(default_factory=dict)
    """Half of the interval around steps without the fast parts, by their kind."""
    step: float = 6e-5
    """Seconds of a step beside its kernels: its first launch, and the wait for its end."""
    version: int = 1
    """Of what the rates mean."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, found: dict[str, Any]) -> "GpuProfile":
        """Return the profile in a JSON document; a document that is none is refused in one line."""
        try:
            parts = {
                "matmul": MatmulRates(**found["matmul"]),
                "passes": {name: PassRates(**rates) for name, rates in found["passes"].items()},
                "attention": {name: AttentionRates(**rates) for name, rates in found["attention"].items()},
                "power": Power(**found["power"]) if found.get("power") else None,
                "host": HostRates(**found["host"]) if found.get("host") else None,
                "wide": {
                    name: WideMatmuls(own["peak"], MatmulRates(**own["rates"]))
                    for name, own in found.get("wide", {}).items()
                },
            }
            return cls(**{**found, **parts})
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"not a GPU profile: {error}; make one with cs336 calibrate") from error


@functools.cache
def shipped_profiles() -> dict[str, GpuProfile]:
    """Return the profiles that come with the package, by card name."""
    folder = files("cs336_systems.predict.time") / "profiles"
    found = {}
    for path in folder.iterdir():
        if path.name.endswith(".json"):
            found[path.name.removesuffix(".json")] = GpuProfile.of(json.loads(path.read_text()))
    return found


def profile_file(card: str) -> Path:
    """Return the file in which `cs336 calibrate` keeps the profile of a card."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "cs336_systems" / "profiles" / f"{card}.json"


def keep_profile(profile: GpuProfile) -> Path:
    """Write the profile of this machine's GPU where later predictions look first; return the file."""
    known = find_by_driver_name(profile.gpu)
    path = profile_file(known.card if known else card_name(profile.gpu))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, (json.dumps(profile.to_dict(), indent=1) + "\n").encode())
    return path


def _kept_profile(card: str) -> GpuProfile | None:
    """Return the profile that `cs336 calibrate` kept on this machine; one that cannot be read is ignored with a
    warning."""
    path = profile_file(card)
    try:
        found = GpuProfile.of(json.loads(path.read_text()))
        if found.version != VERSION:
            raise UserError("another version of cs336_systems made it; run cs336 calibrate again")
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        warnings.warn(f"the profile in {str(path)!r} is not used: {reason_of(error)}", stacklevel=2)
        return None


def profile_of(gpu: GPU, precision: str = "bf16") -> GpuProfile | None:
    """Return a card's profile: the one measured on this machine, the one that comes with the package, or one from its
    data sheet; None where the sheet has no bandwidth or no matmul rate in this precision.

    A data sheet's profile has the H200's shares of peak and bandwidth and its SMs, in proportion.
    """
    shipped = shipped_profiles()
    if (kept := _kept_profile(gpu.card)) is not None:
        return dataclasses.replace(kept, unaligned=kept.unaligned or _unaligned(gpu))  # calibrate has no such cells
    if gpu.card in shipped:
        return shipped[gpu.card]
    model, peak = shipped["h200"], gpu.peak_flops(precision)
    narrow = peak if precision in ("bf16", "fp16") else gpu.peak_flops("bf16") or gpu.peak_flops("fp16")
    if peak is None or narrow is None or gpu.bandwidth is None:
        return None
    faster_math, faster_memory = narrow / (H200_PEAK * TERA), gpu.bandwidth * GIGA / H200_BANDWIDTH
    return dataclasses.replace(
        model,
        gpu=gpu.name,
        source=DATA_SHEET,
        peak=model.peak * faster_math,
        bandwidth=model.bandwidth * faster_memory,
        matmul=dataclasses.replace(model.matmul, least=model.matmul.least / max(1.0, faster_math)),
        passes={
            name: dataclasses.replace(own, bandwidth=own.bandwidth * faster_memory)
            for name, own in model.passes.items()
        },
        attention={name: _scaled_attention(name, own, faster_math, gpu) for name, own in model.attention.items()},
        power=_scaled_power(model.power, faster_math, faster_memory) if model.power else None,
        unaligned=_unaligned(gpu),
        about="",
        spread=GUESSED,
        wide={name: WideMatmuls(own.peak * ratio, own.rates) for name, own, ratio in _wide_ratios(model, gpu)},
        spreads={name: max(GUESSED, own) for name, own in model.spreads.items()},
    )


def _unaligned(gpu: GPU) -> dict[str, float]:
    """Return how much longer matmuls take that the kernels for Hopper cannot do."""
    return shipped_profiles()["h200"].unaligned if HOPPER.search(gpu.name) else {}


def _wide_ratios(model: GpuProfile, gpu: GPU) -> Iterator[tuple[str, WideMatmuls, float]]:
    """Return the matmuls of 32-bit operands, and how much faster they are on the GPU."""
    for name, own in model.wide.items():
        if (peak := gpu.peak_flops(name)) is not None:
            yield name, own, peak / (H200_WIDE_PEAKS[name] * TERA)


def _scaled_attention(name: str, own: AttentionRates, faster_math: float, gpu: GPU) -> AttentionRates:
    """Return rates of attention; kernels in fp32 are as much faster as the GPU's CUDA cores are."""
    is_wide = any(word in WIDE_ATTENTION for word in name.split())
    ratio = gpu.peaks.fp32 / H200_WIDE_PEAKS["fp32"] if is_wide else faster_math
    return dataclasses.replace(own, tile=own.tile / ratio)


def _scaled_power(power: Power, faster_math: float, faster_memory: float) -> Power:
    """Return the power of a GPU that draws the same share of its limit at the same share of its rates."""
    per_flop = {kind: joules / faster_math for kind, joules in power.per_flop.items()}
    return dataclasses.replace(power, per_flop=per_flop, per_byte=power.per_byte / faster_memory)


H200_PEAK, H200_BANDWIDTH = 989.4, 4800 * GIGA
"""The H200's own data sheet: dense bf16 TFLOP/s, bytes a second."""
H200_WIDE_PEAKS = {"fp32": 66.9, "tf32": 494.7}
WIDE_ATTENTION = ("efficient", "wide")
"""Attention kernels in fp32."""
GUESSED = 0.25
"""Half of the interval around steps that are predicted from a data sheet."""
