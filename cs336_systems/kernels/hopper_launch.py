"""Launches the kernels of hopper_forward.py and hopper_backward.py; what a call works out from shapes is kept.

They cover what large problems on Hopper GPUs are mostly made of: 16-bit elements, head dims 64 and 128, causal masks of
any alignment or none, grouped heads, any lengths. `covers` says so of a call; all else is flash_launch.py's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cs336_systems.kernels import hopper_backward, hopper_forward, layout
from cs336_systems.kernels.band import Band
from cs336_systems.kernels.cache import Cache

HEAD_DIMS = (64, 128)
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
KEYS = 128
"""In a tile of either kernel."""
SECTION = 4
"""Heads that run side by side, so that they share the L2 cache. More evict each other's keys, fewer leave SMs idle."""
ROWS_AT_ONCE = 128
"""Of a program that goes over queries before or after backward."""


@dataclass(frozen=True)
class Shape:
    """Of the forward kernel."""

    warpgroups: int
    stages: int
    overlap: bool
    registers: int


FORWARD = {64: Shape(3, 4, False, 160), 128: Shape(2, 2, True, 240)}
BACKWARD_QUERIES = {64: 128, 128: 64}
"""Head dim -> queries in a tile: what registers hold beside the gradients of the keys."""


def covers(q: Tensor, k: Tensor, band: Band) -> bool:
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[3] in HEAD_DIMS
        and band.lo is None
        and q.numel() > 0
        and k.numel() > 0
        and torch.cuda.get_device_capability(q.device) == (9, 0)
    )


def problem(q: Tensor, k: Tensor, v: Tensor, band: Band) -> "Problem":
    key = (band, q.dtype, q.device, q.shape, k.shape, *(_lies(t) for t in (q, k, v)))
    found = _known.get(key)
    if found is None:
        found = _known[key] = Problem(q, k, band)
    return found


_known: Cache[tuple[Any, ...], "Problem"] = Cache()


def _lies(t: Tensor) -> tuple[Any, ...]:
    return t.stride(), t.data_ptr() % 16


def _for_tma(t: Tensor) -> Tensor:
    """The copy engine wants contiguous rows, and all else apart by multiples of 16 bytes."""
    suits = t.data_ptr() % 16 == 0 and t.stride(-1) == 1
    suits = suits and all(n == 1 or (s > 0 and s % 8 == 0) for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True))
    return t if suits else t.contiguous()


def descriptor(t: Tensor, *block: int) -> TensorDescriptor:
    # The stride of a dimension of 1 means nothing, but must be a multiple of 16 bytes all the same.
    strides = [s if n > 1 else 8 for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)] + [1]
    tile = gl.NVMMASharedLayout.get_default_for(list(block), DTYPES[t.dtype])
    return TensorDescriptor(t, list(t.shape), strides, list(block), tile)


class Problem:
    """Tensors of certain shapes."""

    def __init__(self, q: Tensor, k: Tensor, band: Band):
        (self.batch, self.heads, self.len_q, self.d), (_, self.kv_heads, self.len_k, _) = q.shape, k.shape
        self.group = self.heads // self.kv_heads
        self.causal = band.hi is not None and band.hi < self.len_k - 1  # else every query sees every key
        self.hi = band.hi if self.causal and band.hi is not None else 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> tuple[Tensor, Tensor]:
        q, k, v = _for_tma(q), _for_tma(k), _for_tma(v)
        out = layout.empty_like(q)
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        shape, rows = FORWARD[self.d], 64
        blocks = triton.cdiv(self.len_q, rows * shape.warpgroups)
        hopper_forward.forward_kernel[(blocks * self.batch * self.heads,)](
            descriptor(q, 1, 1, rows, self.d), descriptor(k, 1, 1, KEYS, self.d), descriptor(v, 1, 1, KEYS, self.d),
            descriptor(out, 1, 1, rows, self.d), lse,
            self.heads, self.group, self.len_q, self.len_k, self.hi, scale, blocks, self.batch * self.heads, SECTION,
            self.causal, self.d, KEYS, shape.warpgroups, shape.stages, self._cut(rows, KEYS), shape.overlap,
            shape.registers, num_warps=4,
        )  # fmt: skip
        return out, lse

    def backward(
        self, grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        scale: float, band: Band,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        q, k, v = _for_tma(q), _for_tma(k), _for_tma(v)
        dq, dk, dv = layout.empty_like(q), layout.empty_like(k), layout.empty_like(v)
        all_heads, d = self.batch * self.heads, self.d
        padded = triton.cdiv(self.len_q, ROWS_AT_ONCE) * ROWS_AT_ONCE
        lse2, delta = torch.empty((2, all_heads, padded), dtype=torch.float32, device=q.device)
        sums = torch.empty((self.batch, self.heads, self.len_q, d), dtype=torch.float32, device=q.device)
        lies_well = _for_tma(grad) is grad if grad.stride(-1) == 1 else False
        copy = None if lies_well else torch.empty(q.shape, dtype=q.dtype, device=q.device)
        passes = (padded // ROWS_AT_ONCE, all_heads)
        hopper_backward.prepare_kernel[passes](
            out, grad, lse, None if grad_lse is None else grad_lse.contiguous(), lse2, delta, sums, copy,
            out.stride(), grad.stride(), self.heads, self.len_q, padded, d, ROWS_AT_ONCE, num_warps=8,
        )  # fmt: skip
        rows = BACKWARD_QUERIES[d]
        blocks, q_blocks = triton.cdiv(self.len_k, KEYS), triton.cdiv(self.len_q, rows)
        hopper_backward.backward_kernel[(blocks * self.batch * self.kv_heads,)](
            descriptor(q, 1, 1, rows, d), descriptor(k, 1, 1, KEYS, d), descriptor(v, 1, 1, KEYS, d),
            descriptor(grad if copy is None else copy, 1, 1, rows, d), descriptor(lse2, 1, rows),
            descriptor(delta, 1, rows), descriptor(sums, 1, 1, 64, 64), descriptor(dk, 1, 1, 64, d),
            descriptor(dv, 1, 1, 64, d),
            self.heads, self.kv_heads, self.group, self.len_k, self.hi, scale, blocks, q_blocks,
            self.batch * self.kv_heads, SECTION,
            self.causal, self.len_k % KEYS == 0, d, rows, self._cut(KEYS, rows), self.group > 1, num_warps=4,
        )  # fmt: skip
        hopper_backward.finish_kernel[passes](
            sums, dq, dq.stride()[:3], self.heads, self.len_q, scale, d, ROWS_AT_ONCE, num_warps=8
        )
        return dq, dk, dv

    def _cut(self, own: int, visited: int) -> int:
        """In how many of the tiles that it visits, `visited` wide, the diagonal may cut `own` rows of a program."""
        if not self.causal:
            return 1
        shift = self.hi % visited  # where the diagonal begins in a tile; programs begin at multiples of `own`
        return max(1, *(triton.cdiv((start + shift) % visited + own, visited) for start in range(0, visited, own)))
