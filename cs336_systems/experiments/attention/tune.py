"""`cs336 tune`: finds the fastest tiles of the Triton attention kernels for this GPU and keeps them for later runs."""

import itertools
import time
from collections.abc import Sequence

from cs336_systems.config import UserError
from cs336_systems.report.rows import FIELDS
from cs336_systems.report.terms import KERNEL, SPEED_UP
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, say

SHIPPED, FASTEST = Text("shipped", "自带"), Text("best", "最快")


def tune(head_dims: Sequence[int], precisions: Sequence[str], seconds: float) -> Table:
    """Search until the time is up, keep the tiles found, and return them as a table."""
    import torch

    from cs336_systems.kernels.flash import tiles
    from cs336_systems.kernels.flash.band import Band
    from cs336_systems.kernels.flash.dispatch import MAX_HEAD_DIM, triton_problem

    _require_valid(head_dims, precisions, seconds, MAX_HEAD_DIM)
    if not torch.cuda.is_available():
        raise UserError("tune needs a CUDA GPU: there is nothing to time on this machine")
    device = torch.device("cuda", torch.cuda.current_device())
    reason = triton_problem(device)
    if reason is not None:
        raise UserError(reason)
    from cs336_systems.experiments.attention.measure_tiles import Problem, search  # imports Triton

    deadline = time.monotonic() + seconds
    rows: list[list[str | Text]] = []
    for precision, d, causal in itertools.product(precisions, head_dims, (True, False)):
        problem = Problem.draw(precision, d, Band(hi=0) if causal else Band(), device)
        mask = Text("causal", "因果") if causal else Text("full", "无掩码")
        for kernel in tiles.KERNELS:
            found = search(kernel, problem, deadline)
            tiles_and_times = [found.shipped, _ms(found.shipped_time), found.best, _ms(found.best_time)]
            gain = f"{found.shipped_time / found.best_time:.2f}x"
            tried = say("{} of {}", "{} / {}", str(found.tried), str(found.candidates))
            rows.append([kernel, precision, str(d), mask, *tiles_and_times, gain, tried])
    columns = [word(KERNEL), word(FIELDS["precision"]), word(Text("head dim", "头维度")), word(Text("mask", "掩码"))]
    columns += [word(SHIPPED), Column(SHIPPED, "ms"), word(FASTEST), Column(FASTEST, "ms")]
    columns += [Column(SPEED_UP), word(Text("tried", "已尝试"))]
    notes = [
        Text("a tile: queries x keys, warps, stages", "tile：查询数 x 键数，warp 数，流水级数"),
        say("kept in {}", "保存于 {}", str(tiles.tuned_file())),
    ]
    gpu = torch.cuda.get_device_name(device)
    title = say("tune: tiles of the attention kernels · {}", "tune：注意力内核的 tile · {}", gpu)
    return Table(title, columns, rows, notes)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _require_valid(head_dims: Sequence[int], precisions: Sequence[str], seconds: float, widest: int) -> None:
    for d in head_dims:
        if not 1 <= d <= widest:
            raise UserError(f"--head_dims {d} is out of range; use head dims from 1 to {widest}")
    for precision in precisions:
        if precision not in ("bf16", "fp16", "fp32"):
            raise UserError(f"unknown precision {precision!r}; choose from: bf16, fp16, fp32")
    if not 0 < seconds <= 1e6:
        raise UserError(f"--seconds must be above 0 and at most 1e6, got {seconds!r}")
