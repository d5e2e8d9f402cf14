"""The fastest tiles of the Triton attention kernels for this GPU, found on request and kept for later runs.

Every candidate must give the shipped tile's result before it is timed. What is kept counts for this GPU and this Triton
alone.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from cs336_systems.config import UserError
from cs336_systems.kernels.flash import tiles
from cs336_systems.kernels.flash.band import Band
from cs336_systems.kernels.flash.dispatch import MAX_HEAD_DIM, triton_problem
from cs336_systems.kernels.flash.tiles import KERNELS, Tile
from cs336_systems.measure.timing import time_calls
from cs336_systems.step.train_step import AUTOCAST_DTYPES
from cs336_systems.table import Column, Table

BATCH, HEADS, LENGTH = 4, 8, 4096
"""Enough to fill a large GPU, and little enough to time hundreds of candidates."""
LEAST_GAIN = 0.02
"""A tile must be this much faster than the shipped one to take its place: less is noise."""
SAME = 1e-2
"""Largest relative distance from the shipped tile's result: another tile sums in another order."""


def tune(head_dims: Sequence[int], precisions: Sequence[str], seconds: float) -> Table:
    """Search until the time is over, keep what was found, and say what it was."""
    _require_sense(head_dims, precisions, seconds)
    if not torch.cuda.is_available():
        raise UserError("tune needs a CUDA GPU: there is nothing to time on this machine")
    device = torch.device("cuda", torch.cuda.current_device())
    problem = triton_problem(device)
    if problem is not None:
        raise UserError(problem)
    deadline = time.monotonic() + seconds
    rows = []
    for precision, d, causal in itertools.product(precisions, head_dims, (True, False)):
        drawn = Problem.draw(precision, d, Band(hi=0) if causal else Band(), device)
        mask = "causal" if causal else "full"
        rows += [[kernel, precision, str(d), mask, *_search(kernel, drawn, deadline)] for kernel in KERNELS]
    words = [Column(name, numeric=False) for name in ("kernel", "precision", "head dim", "mask", "shipped")]
    columns = [*words, Column("shipped", "ms"), Column("best", numeric=False), Column("best", "ms"), Column("speed-up")]
    notes = ["a tile: queries x keys, warps, stages", f"kept in {tiles.tuned_file()}"]
    title = f"tune: tiles of the attention kernels · {torch.cuda.get_device_name(device)}"
    return Table(title, [*columns, Column("tried", numeric=False)], rows, notes)


def _require_sense(head_dims: Sequence[int], precisions: Sequence[str], seconds: float) -> None:
    for d in head_dims:
        if not 1 <= d <= MAX_HEAD_DIM:
            raise UserError(f"--head_dims {d} is out of range; use head dims from 1 to {MAX_HEAD_DIM}")
    for precision in precisions:
        if precision not in ("bf16", "fp16", "fp32"):
            raise UserError(f"unknown precision {precision!r}; choose from: bf16, fp16, fp32")
    if not 0 < seconds <= 1e6:
        raise UserError(f"--seconds must be above 0 and at most 1e6, got {seconds!r}")


@dataclass(frozen=True)
class Problem:
    """Tensors for all three kernels."""

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
        from cs336_systems.kernels.flash import portable_launch as flash_launch

        dtype = AUTOCAST_DTYPES.get(precision, torch.float32)
        q, k, v, grad = (torch.randn(BATCH, HEADS, LENGTH, d, dtype=dtype, device=device) for _ in range(4))
        out, lse = flash_launch.Problem(q, k, v, band).forward(q, k, v, d**-0.5, band)
        return cls(q, k, v, grad, out, lse, (out.float() * grad.float()).sum(-1), band)

    def launcher(self, kernel: str, tile: Tile) -> tuple[Callable[[], None], list[Tensor]]:
        """A call of the kernel with this tile, and the tensors that it writes."""
        from cs336_systems.kernels.flash import portable_launch as flash_launch

        q, k, v, out, grad = self.q, self.k, self.v, self.out, self.grad
        tensors: list[Tensor]
        rows: list[Tensor | None]
        match kernel:
            case "forward":
                outputs = [torch.empty_like(q), torch.empty_like(self.lse)]
                tensors, rows = [q, k, v, outputs[0]], [outputs[1]]
            case "grad_q":
                outputs = [torch.empty_like(q), torch.empty_like(self.lse)]
                tensors, rows = [q, k, v, out, grad, outputs[0]], [self.lse, None, outputs[1]]
            case _:
                outputs = [torch.empty_like(k), torch.empty_like(v)]
                tensors, rows = [q, k, v, grad, *outputs], [self.lse, self.delta]
        launch = flash_launch.plan(kernel, tensors, self.band, tile)
        return lambda: launch(tensors, rows, q.shape[-1] ** -0.5), outputs


def _search(kernel: str, problem: Problem, deadline: float) -> list[str]:
    """Cells of the table: the shipped tile and the best one, each with its time."""
    from cs336_systems.kernels.flash import portable_launch as flash_launch

    device = problem.q.device
    key = flash_launch.tile_key(kernel, (problem.q, problem.k, problem.v, problem.out), problem.band)
    shipped = tiles.shipped(tiles.family(torch.cuda.get_device_capability(device)), key)
    expected = _results(kernel, problem, shipped)
    best, shortest = shipped, _time(kernel, problem, shipped)
    shipped_time, tried = shortest, 0
    candidates = list(_candidates(kernel, key.bits))
    for tile in candidates:
        if time.monotonic() > deadline:
            break
        tried += 1
        if _is_right(kernel, problem, tile, expected):
            seconds = _time(kernel, problem, tile)
            if seconds < min(shortest, (1 - LEAST_GAIN) * shipped_time):
                best, shortest = tile, seconds
    if best != shipped:
        tiles.keep(torch.cuda.get_device_name(device), {key: best})
    times = [f"{seconds * 1e3:.3f}" for seconds in (shipped_time, shortest)]
    gain = f"{shipped_time / shortest:.2f}x"
    return [_text(shipped), times[0], _text(best), times[1], gain, f"{tried} of {len(candidates)}"]


def _candidates(kernel: str, bits: int) -> Iterator[Tile]:
    """Likely ones first: a search that is cut short has then seen the best of them."""
    owned, visited = (64, 128) if bits == 16 else (64, 32, 128), (64, 128, 32)
    for stages, warps, own, other in itertools.product((2, 3, 1), (4, 8), owned, visited):
        if warps == 4 or own * other >= 64 * 64:  # eight warps find no work in a small tile
            yield Tile(other, own, warps, stages) if kernel == "grad_kv" else Tile(own, other, warps, stages)


def _is_right(kernel: str, problem: Problem, tile: Tile, expected: list[Tensor]) -> bool:
    """Also False for a tile that does not compile or fit this GPU."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    try:
        results = _results(kernel, problem, tile)
    except (CompilationError, OutOfResources, PTXASError):
        return False
    pairs = zip(results, expected, strict=True)
    return all((found - right).float().norm() <= SAME * right.float().norm() for found, right in pairs)


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
