"""Tile sizes of the portable Triton kernels, by *padded* head dim: 16, 32, 64, 128 or 256.

The kernels pad the head dim to a power of 2, at least 16, so d 72, 80 and 96 have the tiles of 128. `choose` takes the
first tile that it finds, in this order:

1. `_SPARING`: tiles for calls with a window, grouped heads, a padded head dim or packed documents, where the tile of 2
   or 3 would spill registers. They come before tuned tiles, which were measured without these traits.
2. Tiles that `cs336 tune` measured on this machine.
3. `_SHIPPED`: the table of this package.

Nothing is tuned when a kernel runs. The tiles of sm_90 were measured on an H200. Those of the other families fit their
shared memory and are unmeasured: `cs336 tune` is for them. tests/unit/kernels/test_kernel_tables.py compiles every one,
and lists what spills registers.
"""

import functools
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cs336_systems.files import read_json, reason_of, write_file

KERNELS = ("forward", "grad_q", "grad_kv")
"""Kernels of large problems. A small one has "grad" in place of the last two: with pointers, in 16 bits, up to a padded
head dim of WIDEST_GRAD."""
WIDEST_GRAD = 64
"""With a head dim of 128, two kernels take 0.36 to 0.75 of the time of one, in problems of 2^28 to 2^31 multiply-adds
on an H200."""
BLOCK_DIMS = (16, 32, 64, 128, 256)
"""Supported padded head dims."""
LAUNCH_BOUND = 1 << 31
"""Multiply-adds of one matmul below which a call takes a large GPU less time than Python takes to launch it."""


@dataclass(frozen=True)
class Tile:
    block_m: int
    """Queries of a tile."""
    block_n: int
    """Keys of a tile."""
    num_warps: int
    num_stages: int
    """Depth of the load pipeline."""


class Key(NamedTuple):
    kernel: str
    bits: int
    """Width of an element: 16 or 32."""
    block_d: int
    """Padded head dim, one of BLOCK_DIMS."""
    causal: bool
    descriptors: bool
    """TMA moves the tiles, which needs no registers for addresses."""


SHARED_MEMORY = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "sm_120": 99 << 10}
"""Family of GPUs -> bytes of shared memory that a program may use."""


def family(capability: tuple[int, int]) -> str:
    """Return the family of a compute capability. sm_86 and sm_89 have as little shared memory as sm_120; unknown GPUs
    may, too."""
    match capability:
        case (8, 0) | (8, 7):
            return "sm_80"
        case (9, _):
            return "sm_90"
        case (10, _):
            return "sm_100"
    return "sm_120"


def choose(key: Key, device: torch.device, traits: frozenset[str] = frozenset()) -> Tile:
    """Return the tile for a call, by the order of precedence in the module's docstring. `traits`: which of "window",
    "grouped", "padded" and "packed" hold for the call; each takes registers."""
    if device.type != "cuda":
        return INTERPRETED
    name = family(torch.cuda.get_device_capability(device))
    return sparing(name, key, traits) or tuned(torch.cuda.get_device_name(device)).get(key) or shipped(name, key)


def sparing(name: str, key: Key, traits: frozenset[str]) -> Tile | None:
    """Return the tile that leaves registers for these traits, if they need another than the usual one; else None."""
    found = _SPARING.get(name, {}).get((key.kernel, _kind(key), key.block_d))
    return found.tile if found and traits & found.traits else None


def shipped(name: str, key: Key) -> Tile:
    rows = _SHIPPED[name]
    full, causal = rows.get(_kind(key), rows["pointers"])[key.kernel][BLOCK_DIMS.index(key.block_d)]
    return causal if key.causal else full


def _kind(key: Key) -> str:
    return "descriptors" if key.descriptors else "pointers" if key.bits == 16 else "fp32"


INTERPRETED = Tile(32, 32, 4, 1)
"""Tile under Triton's interpreter, which has no registers to run out of; small tiles test more edges."""


def _tiles(*entries: tuple) -> list[tuple[Tile, Tile]]:
    """Return (full, causal) tiles for each padded head dim of BLOCK_DIMS ("grad": up to WIDEST_GRAD); an entry is one
    tile for both, or a pair."""
    return [
        (Tile(*entry[0]), Tile(*entry[1])) if isinstance(entry[0], tuple) else (Tile(*entry),) * 2 for entry in entries
    ]


# family -> how tiles are moved -> kernel -> (queries, keys, warps, stages) by padded head dim: 16, 32, 64, 128, 256
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
            "grad": _tiles((64, 64, 4, 1), (64, 64, 4, 1), (64, 64, 4, 1)),
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
            "grad": _tiles((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),
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
            "grad": _tiles((64, 64, 4, 1), (64, 64, 4, 1), (32, 64, 8, 2)),
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
            "grad": _tiles((64, 64, 4, 1), (64, 64, 4, 1), (32, 64, 8, 2)),
        },
        "fp32": {
            "forward": _tiles((64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 4, 1), (32, 16, 4, 1), (32, 16, 8, 1)),
            "grad_q": _tiles((64, 32, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1), (16, 32, 4, 1), (32, 16, 8, 1)),
            "grad_kv": _tiles((32, 64, 4, 1), (32, 64, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1), (32, 16, 8, 1)),
        },
    },
}


class _Sparing(NamedTuple):
    traits: frozenset[str]
    """Traits any of which makes the usual tile spill registers."""
    tile: Tile


_WINDOW, _GROUPED, _PADDED, _PACKED = (frozenset({trait}) for trait in ("window", "grouped", "padded", "packed"))
# family -> (kernel, how tiles are moved, padded head dim) -> traits, and (queries, keys, warps, stages) for them
_SPARING: dict[str, dict[tuple[str, str, int], _Sparing]] = {
    "sm_90": {
        ("forward", "pointers", 64): _Sparing(_PADDED, Tile(64, 32, 4, 2)),
        ("forward", "pointers", 256): _Sparing(_PADDED, Tile(32, 16, 8, 2)),
        ("grad_q", "pointers", 256): _Sparing(_PADDED, Tile(32, 32, 8, 2)),
        ("grad_kv", "pointers", 128): _Sparing(_WINDOW, Tile(32, 64, 8, 2)),
        ("grad_kv", "pointers", 256): _Sparing(_PADDED | _WINDOW, Tile(32, 16, 8, 1)),
        ("grad", "pointers", 32): _Sparing(_PADDED, Tile(64, 64, 8, 1)),
        ("grad", "pointers", 64): _Sparing(_PADDED, Tile(32, 64, 8, 1)),
        ("grad_kv", "descriptors", 64): _Sparing(_WINDOW, Tile(64, 64, 4, 3)),
        ("grad_kv", "descriptors", 128): _Sparing(_WINDOW, Tile(32, 64, 4, 2)),
        ("grad_kv", "descriptors", 256): _Sparing(_WINDOW | _GROUPED, Tile(16, 64, 8, 2)),
        ("grad_q", "fp32", 64): _Sparing(_PACKED, Tile(64, 32, 8, 1)),
    },
    "sm_80": {
        ("forward", "pointers", 128): _Sparing(_PACKED, Tile(64, 32, 4, 2)),
    },
}


# -- tiles tuned on this machine --------------------------------------------------------------------------------------


def tuned_file() -> Path:
    """Return the file in which `cs336 tune` stores tiles."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("CS336_TILES") or Path(cache) / "cs336_systems" / "tiles.json")


LARGEST_TUNED_FILE = 1 << 20
"""Bytes of a file of tuned tiles; an entry has 100, and a GPU a few dozen entries."""


@functools.cache
def tuned(gpu: str) -> Mapping[Key, Tile]:
    """Return the tiles tuned for this GPU and this Triton: another version may prefer other tiles, or miscompile
    these."""
    try:
        entries = _tuned_entries().get(_section(gpu), [])
        return {_checked_key(key): _checked_tile(tile) for key, tile in entries}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        where, reason = str(tuned_file()), reason_of(error)
        warnings.warn(f"tuned tiles of {where!r} are not used: {reason}; run cs336 tune again", stacklevel=2)
        return {}


def keep(gpu: str, found: Mapping[Key, Tile]) -> None:
    """Add tiles to the file, atomically: a process that reads it meanwhile sees the old file or the new one."""
    entries = {**tuned(gpu), **found}
    try:
        known = dict(_tuned_entries())
    except (ValueError, TypeError, RecursionError):
        known = {}
    known[_section(gpu)] = [[list(key), list(astuple(tile))] for key, tile in entries.items()]
    path = tuned_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(known, indent=1))
    tuned.cache_clear()


def _tuned_entries() -> dict[str, Any]:
    """Return (GPU and Triton version) -> [key, tile] pairs, unchecked."""
    return read_json(tuned_file(), LARGEST_TUNED_FILE) if tuned_file().exists() else {}


def _section(gpu: str) -> str:
    import triton

    return f"{gpu}, triton {triton.__version__}"


def _checked_key(values: list[Any]) -> Key:
    key = Key(*values)
    known = key.kernel in (*KERNELS, "grad") and key.bits in (16, 32) and key.block_d in BLOCK_DIMS
    if not (known and isinstance(key.causal, bool) and isinstance(key.descriptors, bool)):
        raise ValueError(f"there is no kernel {values!r:.80}")
    return key


def _checked_tile(values: list[int]) -> Tile:
    """Return a tile that a kernel can be compiled for; a file may hold any numbers."""
    tile = Tile(*values)
    blocks = {tile.block_m, tile.block_n} <= {16, 32, 64, 128, 256}
    if not (blocks and tile.num_warps in (1, 2, 4, 8, 16) and tile.num_stages in range(1, 9)):
        raise ValueError(f"{values!r:.80} is not a tile")
    return tile
