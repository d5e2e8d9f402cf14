"""Tile sizes of the Triton kernels: a table shipped with the package, and what `cs336 tune` found on this machine.

Nothing is tuned when a kernel runs. A tile is looked up first among those tuned here, then in the table. The tiles of
sm_90 were measured on an H200. Those of the other families fit their shared memory and are unmeasured: `cs336 tune` is
for them. tests/test_kernel_tables.py compiles every one, and lists what spills registers.
"""

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

KERNELS = ("forward", "grad_q", "grad_kv")
"""Those whose tiles matter. A small problem has "grad" in place of the last two: by pointers, in 16 bits, and up to a
head dim of 128."""
WIDEST_GRAD = 128
BLOCK_DIMS = (16, 32, 64, 128, 256)
LAUNCH_BOUND = 1 << 31
"""Multiply-adds of one matrix product below which a call is over before Python has launched it, on a large GPU."""


@dataclass(frozen=True)
class Tile:
    block_m: int
    """Queries."""
    block_n: int
    """Keys."""
    num_warps: int
    num_stages: int
    """Depth of the load pipeline."""


class Key(NamedTuple):
    kernel: str
    bits: int
    """Width of an element: 16 or 32."""
    block_d: int
    """Head dim, padded to a power of 2."""
    causal: bool
    descriptors: bool
    """Whether TMA moves the tiles: then no registers are needed for addresses."""


SHARED_MEMORY = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "sm_120": 99 << 10}
"""Family of GPUs -> bytes of shared memory that a block may use."""


def family(capability: tuple[int, int]) -> str:
    """That of a compute capability. sm_86 and sm_89 have as little shared memory as sm_120; so may cards not known."""
    match capability:
        case (8, 0) | (8, 7):
            return "sm_80"
        case (9, _):
            return "sm_90"
        case (10, _):
            return "sm_100"
    return "sm_120"


def choose(key: Key, device: torch.device, traits: frozenset[str] = frozenset()) -> Tile:
    """`traits`: what of "window", "grouped" and "padded" holds of the call. Each takes registers, and where those that
    a tile leaves are too few, another is used."""
    if device.type != "cuda":
        return INTERPRETED
    name = family(torch.cuda.get_device_capability(device))
    return roomier(name, key, traits) or tuned(torch.cuda.get_device_name(device)).get(key) or shipped(name, key)


def roomier(name: str, key: Key, traits: frozenset[str]) -> Tile | None:
    """The tile for calls of such traits, where they need one of their own."""
    found = _ROOMIER.get(name, {}).get((key.kernel, _kind(key), key.block_d))
    return Tile(*found[1]) if found and traits & found[0] else None


def _kind(key: Key) -> str:
    return "descriptors" if key.descriptors else "pointers" if key.bits == 16 else "fp32"


INTERPRETED = Tile(32, 32, 4, 1)
"""Triton's interpreter has no registers to run out of, and small tiles test more edges."""


def shipped(name: str, key: Key) -> Tile:
    rows = _SHIPPED[name]
    full, causal = rows.get(_kind(key), rows["pointers"])[key.kernel][BLOCK_DIMS.index(key.block_d)]
    return causal if key.causal else full


def _tiles(*entries: tuple) -> list[tuple[Tile, Tile]]:
    """One for each of BLOCK_DIMS ("grad": all but the last): a tile, or two, for full and for causal attention."""
    return [
        (Tile(*entry[0]), Tile(*entry[1])) if isinstance(entry[0], tuple) else (Tile(*entry),) * 2 for entry in entries
    ]


# family -> how tiles are moved -> kernel -> a tile for each of BLOCK_DIMS: (queries, keys, warps, stages)
_SHIPPED: dict[str, dict[str, dict[str, list[tuple[Tile, Tile]]]]] = {
    "sm_90": {
        "descriptors": {
            "forward": _tiles(
                (64, 128, 4, 3), (64, 128, 4, 3), (64, 128, 4, 2), ((128, 128, 8, 3), (64, 64, 4, 3)), (128, 64, 8, 2)
            ),
            "grad_q": _tiles(
                (64, 64, 4, 3),
                (64, 128, 4, 3),
                ((128, 64, 8, 3), (64, 64, 4, 2)),
                ((128, 64, 8, 3), (64, 64, 4, 2)),
                (128, 32, 8, 3),
            ),
            "grad_kv": _tiles(
                (128, 64, 4, 3), (128, 64, 4, 3), (128, 64, 4, 2), (64, 64, 4, 2), ((32, 64, 8, 2), (32, 64, 8, 3))
            ),
        },
        "pointers": {
            "forward": _tiles((64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 8, 2)),
            "grad_q": _tiles((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 4, 2), (64, 32, 8, 2)),
            "grad_kv": _tiles((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 64, 8, 2), (32, 32, 8, 1)),
            "grad": _tiles((64, 64, 4, 1), (64, 64, 4, 1), (64, 64, 4, 1), (32, 64, 8, 2)),
        },
        "fp32": {
            "forward": _tiles((64, 32, 4, 2), (64, 64, 4, 2), (128, 32, 8, 2), (32, 16, 4, 1), (32, 16, 8, 1)),
            "grad_q": _tiles((64, 32, 4, 1), (128, 32, 8, 1), (128, 64, 8, 2), (16, 32, 4, 1), (32, 16, 8, 1)),
            "grad_kv": _tiles((32, 64, 4, 1), (32, 64, 4, 1), (32, 128, 8, 1), (16, 16, 4, 1), (32, 16, 8, 1)),
        },
    },
    "sm_100": {
        "pointers": {
            "forward": _tiles((128, 64, 4, 3), (128, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 2), (128, 32, 8, 2)),
            "grad_q": _tiles((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 8, 2)),
            "grad_kv": _tiles((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (32, 64, 8, 1)),
            "grad": _tiles((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 1)),
        },
        "fp32": {
            "forward": _tiles((64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 4, 2), (32, 16, 4, 1), (32, 16, 8, 1)),
            "grad_q": _tiles((64, 32, 4, 1), (64, 32, 4, 1), (64, 32, 8, 1), (16, 32, 4, 1), (32, 16, 8, 1)),
            "grad_kv": _tiles((32, 64, 4, 1), (32, 64, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1), (32, 16, 8, 1)),
        },
    },
    "sm_80": {
        "pointers": {
            "forward": _tiles((128, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 8, 1)),
            "grad_q": _tiles((64, 64, 4, 2), (64, 64, 4, 2), (128, 64, 8, 2), (64, 32, 4, 2), (64, 32, 8, 1)),
            "grad_kv": _tiles((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 64, 8, 1), (32, 64, 8, 1)),
            "grad": _tiles((64, 64, 4, 1), (64, 64, 4, 1), (32, 64, 8, 2), (32, 64, 8, 1)),
        },
        "fp32": {
            "forward": _tiles((64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 4, 1), (32, 16, 4, 1), (32, 16, 8, 1)),
            "grad_q": _tiles((64, 32, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1), (16, 32, 4, 1), (32, 16, 8, 1)),
            "grad_kv": _tiles((32, 64, 4, 1), (32, 64, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1), (32, 16, 8, 1)),
        },
    },
    "sm_120": {
        "pointers": {
            "forward": _tiles((128, 64, 4, 2), (128, 64, 4, 2), (128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 1)),
            "grad_q": _tiles((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 4, 1), (32, 16, 4, 1)),
            "grad_kv": _tiles((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 64, 8, 1), (16, 32, 4, 1)),
            "grad": _tiles((64, 64, 4, 1), (64, 64, 4, 1), (32, 64, 8, 2), (32, 64, 8, 1)),
        },
        "fp32": {
            "forward": _tiles((64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 4, 1), (32, 16, 4, 1), (32, 16, 8, 1)),
            "grad_q": _tiles((64, 32, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1), (16, 32, 4, 1), (32, 16, 8, 1)),
            "grad_kv": _tiles((32, 64, 4, 1), (32, 64, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1), (32, 16, 8, 1)),
        },
    },
}

_WINDOW, _GROUPED, _PADDED = (frozenset({trait}) for trait in ("window", "grouped", "padded"))
# family -> (kernel, how tiles are moved, head dim) -> traits that do not fit, and the tile for them
_ROOMIER: dict[str, dict[tuple[str, str, int], tuple[frozenset[str], tuple[int, int, int, int]]]] = {
    "sm_90": {
        ("forward", "pointers", 64): (_PADDED, (64, 32, 4, 2)),
        ("forward", "pointers", 256): (_PADDED, (32, 16, 8, 2)),
        ("grad_q", "pointers", 256): (_PADDED, (32, 32, 8, 2)),
        ("grad_kv", "pointers", 128): (_WINDOW, (32, 64, 8, 2)),
        ("grad_kv", "pointers", 256): (_PADDED | _WINDOW, (32, 16, 8, 1)),
        ("grad", "pointers", 32): (_PADDED, (64, 64, 8, 1)),
        ("grad", "pointers", 64): (_PADDED, (32, 64, 8, 1)),
        ("grad", "pointers", 128): (_WINDOW, (32, 32, 8, 1)),
        ("grad_kv", "descriptors", 64): (_WINDOW, (64, 64, 4, 3)),
        ("grad_kv", "descriptors", 128): (_WINDOW, (32, 64, 4, 2)),
        ("grad_kv", "descriptors", 256): (_WINDOW | _GROUPED, (16, 64, 8, 2)),
    },
}


# -- tiles tuned on this machine --------------------------------------------------------------------------------------


def tuned_file() -> Path:
    """Where `cs336 tune` keeps its findings."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("CS336_TILES") or Path(cache) / "cs336_systems" / "tiles.json")


@functools.cache
def tuned(gpu: str) -> Mapping[Key, Tile]:
    """Of this GPU and this Triton: another version may want other tiles, or miscompile these."""
    import triton

    try:
        found = json.loads(tuned_file().read_text())
        return {Key(*key): Tile(*tile) for key, tile in found[f"{gpu}, triton {triton.__version__}"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def keep(gpu: str, found: Mapping[Key, Tile]) -> None:
    """Add to the file, in one step: a kernel that reads meanwhile sees the old file or the new one."""
    import triton

    path = tuned_file()
    try:
        known = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        known = {}
    entries = {**tuned(gpu), **found}
    known[f"{gpu}, triton {triton.__version__}"] = [[list(key), list(astuple(tile))] for key, tile in entries.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(known, indent=1))
    fresh.replace(path)
    tuned.cache_clear()
