"""A GPU's rates: the input of `kernel_seconds`. Measured by `cs336 calibrate`, or from a data sheet. No torch.

Rates are those of a GPU at its highest clock; `Power` says how the clock falls when a step needs more than the GPU's
power limit.
"""

import dataclasses
import functools
import json
import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from cs336_systems.config import UserError
from cs336_systems.files import reason_of, write_file
from cs336_systems.predict.gpus import GIGA, GPU, H200, HOPPER, card_name, find_by_driver_name

MEASURED, DATA_SHEET = "measured", "data sheet"
VERSION = 3
"""Version of profiles, which defines the meaning of their rates. Profiles that `cs336 calibrate` of another version
stored are ignored."""


@dataclass(frozen=True)
class MatmulRates:
    """Rates of a matmul, modelled as a grid of tiles, one at a time per SM."""

    efficiency: float
    """Share of the tensor cores' peak that a very large tile reaches."""
    perimeter: float
    """Time to load a tile's operands, as a number of additional rows and columns of the result."""
    epilogue: float
    """Seconds to write a tile of 128 x 256 results in 16 bits."""
    fixed: float
    """Seconds of a kernel without its tiles."""
    more_depth: float
    """Depth by which the beginning and end of a tile lengthen it."""
    wide_epilogue: float
    """Time to write or read the same number of bytes again, relative to the epilogue."""
    overlap: float
    """Share of the last, incomplete round of tiles that other work hides: 0 if a round always takes its full time, 1 if
    time is proportional to the tiles."""
    input: float = 1.0
    """Time of a tile in the gradient of an input relative to forward: one operand is transposed."""
    weight: float = 1.0
    """Time of a tile in the gradient of a weight relative to forward."""
    least: float = 0.0
    """Minimum seconds of a tile per unit of depth: small tiles wait for their operands."""


@dataclass(frozen=True)
class PassRates:
    bandwidth: float
    """Bytes per second of large passes."""
    fixed: float
    """Seconds of an empty pass."""
    program: float = 0.0
    """SM seconds per program, or per row if a program processes rows one after another."""
    element: float = 0.0
    """SM seconds per element that a program holds."""


@dataclass(frozen=True)
class AttentionRates:
    """Rates of attention, modelled as programs of 128 queries, each with tiles of 128 keys, one program at a time per
    SM."""

    tile: float
    """Seconds of a tile."""
    program: float
    """Seconds of a program without its tiles."""
    fixed: float
    """Seconds of a call without its programs."""
    queries: float = 0.0
    """SM seconds per TILE queries of a head in helper kernels, which prepare and finish the gradients."""
    alone: float = 1.0
    """Programs that an SM runs concurrently: a program running alone takes this many times its share of SM time."""


@dataclass(frozen=True)
class Power:
    """The clock at which a step stays within the power limit.

    A step draws `static` watts plus the energy of its work. A lower clock saves energy (by its `exponent`-th power) and
    makes kernels slower, by `1 + slowdown * (1 / clock - 1)`, where the highest clock is 1.
    """

    limit: float
    """Power limit in watts."""
    static: float
    per_flop: dict[str, float]
    """Joules per FLOP at the highest clock, by kind of kernel."""
    per_byte: float
    """Joules per byte that a pass moves."""
    exponent: float
    slowdown: dict[str, float]
    """Sensitivity to the clock, by kind of kernel: 1 if a kernel's time is all computation, 0 if it waits for
    memory."""
    warming: float = 0.0
    """Additional watts of a warm GPU, from leakage currents."""
    warm_after: float = 1.0
    """Time constant of warming: seconds of work after which two thirds of these watts are reached."""

    def static_after(self, seconds: float) -> float:
        """Return the static power of a GPU that has worked at its limit for this many seconds."""
        return self.static + self.warming * (1 - math.exp(-seconds / self.warm_after))


@dataclass(frozen=True)
class WideMatmuls:
    """Peak and rates of matmuls with 32-bit operands, in fp32 or TF32."""

    peak: float
    """FLOP/s at the highest clock."""
    rates: MatmulRates


@dataclass(frozen=True)
class HostRates:
    """Host seconds of a step that is launched operator by operator. They vary from run to run by a third and more,
    because other work on the machine and the speed of its Python matter."""

    forward: float
    """Seconds per forward kernel with autograd."""
    inference: float
    """Seconds per forward kernel without autograd."""
    backward: float
    """Seconds per backward kernel."""
    parameter: float
    """Seconds per parameter in the optimizer, before its kernels begin."""
    release: float
    """Seconds to free the autograd graph of one block after backward."""
    step: float
    """Seconds of everything else in a step, while the GPU waits."""
    gap: float
    """Seconds between two kernels that are queued on the GPU."""
    compiled: float
    """Seconds per kernel of a compiled model, forward or backward."""
    start: float = 0.0
    """Seconds until the first kernel of forward or backward runs, while the GPU waits."""


@dataclass(frozen=True)
class GpuProfile:
    gpu: str
    source: str
    """Origin of the rates: MEASURED or DATA_SHEET."""
    sms: int
    peak: float
    """FLOP/s of the tensor cores at the highest clock."""
    bandwidth: float
    """Bytes per second of a large copy."""
    matmul: MatmulRates
    passes: dict[str, PassRates]
    """Rates of passes by name; "other" is for passes that are not listed."""
    attention: dict[str, AttentionRates]
    """Rates of attention by pass and head dim, such as "forward 64"."""
    small: float
    """Seconds of a small kernel."""
    gap: float
    """Seconds between two kernels of a CUDA graph."""
    launch: float
    """Host seconds per kernel without a CUDA graph."""
    power: Power | None = None
    about: str = ""
    """Software versions at the time of measurement."""
    spread: float = 0.05
    """Half the width of the interval around a prediction, relative."""
    wide: dict[str, WideMatmuls] = field(default_factory=dict)
    """Matmuls of 32-bit operands, by precision."""
    host: HostRates | None = None
    """Rates of the host; None if they were not measured: eager steps are not predicted then."""
    unaligned: dict[str, float] = field(default_factory=dict)
    """Slowdown of matmuls that run on kernels for older GPUs because of misaligned operands, by precision and the power
    of 2 that divides the contiguous dimensions."""
    spreads: dict[str, float] = field(default_factory=dict)
    """Half the width of the interval around steps without the fast parts, by their kind, relative."""
    step: float = 6e-5
    """Seconds of a step besides its kernels: its first launch, and the wait for its end."""
    version: int = 1
    """Version that defines the meaning of the rates; see VERSION."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, found: dict[str, Any]) -> "GpuProfile":
        """Return the profile in a JSON document; any other document raises an error of one line."""
        try:
            parts: dict[str, Any] = {
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
            return cls(**(found | parts))
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
    """Return the profile that `cs336 calibrate` stored on this machine; one that cannot be read is ignored with a
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
    """Return a card's profile: the one measured on this machine, the one in the package, or one derived from its data
    sheet; None if the sheet has no bandwidth or no matmul rate in this precision.

    A profile from a data sheet has the H200's shares of peak and bandwidth, and SMs in proportion to the peak.
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
    faster_math, faster_memory = narrow / _h200_peak("bf16"), gpu.bandwidth * GIGA / _h200_bandwidth()
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


def _h200_peak(precision: str) -> float:
    peak = H200.peak_flops(precision)
    assert peak is not None
    return peak


def _h200_bandwidth() -> float:
    assert H200.bandwidth is not None
    return H200.bandwidth * GIGA


def _unaligned(gpu: GPU) -> dict[str, float]:
    """Return the slowdown of matmuls that the Hopper kernels do not support: the same on all Hopper GPUs."""
    return shipped_profiles()["h200"].unaligned if gpu.architecture == HOPPER else {}


def _wide_ratios(model: GpuProfile, gpu: GPU) -> Iterator[tuple[str, WideMatmuls, float]]:
    """Yield the rates of matmuls with 32-bit operands, scaled to the GPU's peaks."""
    for name, own in model.wide.items():
        if (peak := gpu.peak_flops(name)) is not None:
            yield name, own, peak / _h200_peak(name)


def _scaled_attention(name: str, own: AttentionRates, faster_math: float, gpu: GPU) -> AttentionRates:
    """Return rates of attention scaled to the GPU; kernels in fp32 scale with the GPU's CUDA cores."""
    is_wide = any(word in WIDE_ATTENTION for word in name.split())
    ratio = gpu.peaks.fp32 / H200.peaks.fp32 if is_wide else faster_math
    return dataclasses.replace(own, tile=own.tile / ratio)


def _scaled_power(power: Power, faster_math: float, faster_memory: float) -> Power:
    """Return the power model of a GPU that draws the same share of its limit at the same share of its rates."""
    per_flop = {kind: joules / faster_math for kind, joules in power.per_flop.items()}
    return dataclasses.replace(power, per_flop=per_flop, per_byte=power.per_byte / faster_memory)


WIDE_ATTENTION = ("efficient", "wide")
"""Attention kernels in fp32."""
GUESSED = 0.25
"""Half the width of the interval around steps that are predicted from a data sheet, relative."""
