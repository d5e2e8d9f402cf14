"""Searches the tiles of a Triton attention kernel on this GPU.

A candidate must reproduce the shipped tile's result before it is timed. Tiles are kept per GPU and Triton version.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cs336_systems.kernels.flash import portable_launch, tiles
from cs336_systems.kernels.flash.band import Band
from cs336_systems.kernels.flash.tiles import Tile
from cs336_systems.measure.timing import time_calls
from cs336_systems.step.train_step import AUTOCAST_DTYPES

BATCH, HEADS, LENGTH = 4, 8, 4096
"""Enough to fill a large GPU, and little enough to time hundreds of candidates."""
LEAST_GAIN = 0.02
"""The relative gain over the shipped tile below which a candidate is not kept: less is noise."""
TOLERANCE = 1e-2
"""Largest relative distance from the shipped tile's result: another tile sums in another order."""


@dataclass(frozen=True)
class Problem:
    """Inputs of all three kernels."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    out: Tensor
    lse: Tensor
    delta: Tensor
    band: Band

    @classmethod
    def draw(cls, precision: str, d: int, band: Band, device: torch.device) -> "Problem":
        dtype = AUTOCAST_DTYPES.get(precision, torch.float32)
        q, k, v, grad = (torch.randn(BATCH, HEADS, LENGTH, d, dtype=dtype, device=device) for _ in range(4))
        out, lse = portable_launch.Problem(q, k, v, band).forward(q, k, v, d**-0.5, band)
        return cls(q, k, v, grad, out, lse, (out.float() * grad.float()).sum(-1), band)

    def launcher(self, kernel: str, tile: Tile) -> tuple[Callable[[], None], list[Tensor]]:
        """Return a call of the kernel with this tile, and the tensors that it writes."""
        q, k, v, out, grad = self.q, self.k, self.v, self.out, self.grad
        tensors: list[Tensor]
        rows: list[Tensor | None]
        outputs: list[Tensor]
        match kernel:
            case "forward":
                outputs = [torch.empty_like(q), torch.empty_like(self.lse)]
                tensors = [q, k, v, outputs[0]]
                rows = [outputs[1]]
            case "grad_q":
                outputs = [torch.empty_like(q), torch.empty_like(self.lse)]
                tensors = [q, k, v, out, grad, outputs[0]]
                rows = [self.lse, None, outputs[1]]
            case _:
                outputs = [torch.empty_like(k), torch.empty_like(v)]
                tensors = [q, k, v, grad, *outputs]
                rows = [self.lse, self.delta]
        launch = portable_launch.plan(kernel, tensors, self.band, tile)
        return lambda: launch(tensors, rows, q.shape[-1] ** -0.5), outputs


class Choice(NamedTuple):
    """The shipped tile and the best one found, with their times in seconds."""

    shipped: str
    shipped_time: float
    best: str
    best_time: float
    tried: int
    candidates: int


def search(kernel: str, problem: Problem, deadline: float) -> Choice:
    """Time candidates until the deadline (of `time.monotonic`) and keep the best one."""
    device = problem.q.device
    key = portable_launch.tile_key(kernel, (problem.q, problem.k, problem.v, problem.out), problem.band)
    shipped = tiles.shipped(tiles.family(torch.cuda.get_device_capability(device)), key)
    expected = _results(kernel, problem, shipped)
    best, best_time = shipped, _time(kernel, problem, shipped)
    shipped_time, tried = best_time, 0
    found = list(candidates(kernel, key.bits))
    for tile in found:
        if time.monotonic() > deadline:
            break
        tried += 1
        if _is_correct(kernel, problem, tile, expected):
            seconds = _time(kernel, problem, tile)
            if seconds < min(best_time, (1 - LEAST_GAIN) * shipped_time):
                best, best_time = tile, seconds
    if best != shipped:
        tiles.keep(torch.cuda.get_device_name(device), {key: best})
    return Choice(_text(shipped), shipped_time, _text(best), best_time, tried, len(found))


def candidates(kernel: str, bits: int) -> Iterator[Tile]:
    """Yield tiles to try, likely ones first, because the time may run out."""
    owned, visited = (64, 128) if bits == 16 else (64, 32, 128), (64, 128, 32)
    for stages, warps, own, other in itertools.product((2, 3, 1), (4, 8), owned, visited):
        if warps == 4 or own * other >= 64 * 64:  # a small tile has no work for eight warps
            yield Tile(other, own, warps, stages) if kernel == "grad_kv" else Tile(own, other, warps, stages)


def _is_correct(kernel: str, problem: Problem, tile: Tile, expected: list[Tensor]) -> bool:
    """Return False also for a tile that does not compile or does not fit this GPU."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    try:
        results = _results(kernel, problem, tile)
    except (CompilationError, OutOfResources, PTXASError):
        return False
    pairs = zip(results, expected, strict=True)
    return all((result - shipped).float().norm() <= TOLERANCE * shipped.float().norm() for result, shipped in pairs)


def _results(kernel: str, problem: Problem, tile: Tile) -> list[Tensor]:
    launch, outputs = problem.launcher(kernel, tile)
    for output in outputs:
        output.fill_(math.nan)
    launch()
    return outputs


def _time(kernel: str, problem: Problem, tile: Tile) -> float:
    launch, _ = problem.launcher(kernel, tile)
    launch()
    return statistics.median(time_calls(launch, device=problem.q.device, warmup_ms=5, rep_ms=20))


def _text(tile: Tile) -> str:
    block_m, block_n, warps, stages = astuple(tile)
    return f"{block_m}x{block_n}, {warps}, {stages}"
