"""Launches the kernels of hopper_forward.py and hopper_backward.py.

They take 16-bit tensors, causal masks of any alignment or none, grouped heads, any lengths, and head dims up to 128
that the copy engine can move, which it pads to 64 or 128 with zeros. `attention.hopper_problem` says so of a call; all
else is flash_launch.py's.
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
from cs336_systems.kernels.plan import Description, Plan, backward_key, forward_key, suits_tma

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
L2_SHARE = {"forward": 32 << 20, "backward": 16 << 20}
"""Bytes that the heads of a section read or add to again and again; with more in flight they evict each other's."""
ROWS = 64
"""Of a warpgroup: what its matrix instruction takes."""
KEYS = 128
"""In a tile of either kernel."""
ROWS_AT_ONCE = 128
"""Of a program that goes over queries before or after backward."""


@dataclass(frozen=True)
class Shape:
    """Of the forward kernel."""

    warpgroups: int
    stages: int
    overlap: bool
    registers: int


FORWARD = {64: Shape(3, 4, False, 160), 128: Shape(2, 3, True, 240)}
"""By head dim. What a warpgroup holds of the output at 128 leaves registers for two of them, and two keep the tensor
cores busy only if each overlaps its own products with its softmax."""
BACKWARD_QUERIES = {64: 128, 128: 64}
"""Head dim -> queries in a tile: what registers hold beside the gradients of the keys."""


def problem(q: Tensor, k: Tensor, v: Tensor, band: Band) -> "Problem":
    """Attention of tensors like these. q: (batch, heads, len_q, d); k, v: (batch, kv_heads, len_k, d)."""
    key = forward_key(q, k, v, band)
    found = _known.get(key)
    if found is None:
        found = _known[key] = Problem(q, k, band)
    return found


class Problem:
    """What is known of tensors of certain shapes, strides and alignment."""

    def __init__(self, q: Tensor, k: Tensor, band: Band):
        (self.batch, self.heads, self.len_q, self.d), (_, self.kv_heads, self.len_k, _) = q.shape, k.shape
        self.block_d = 64 if self.d <= 64 else 128
        self.device = q.device.index
        self.group = self.heads // self.kv_heads
        self.padded = triton.cdiv(self.len_q, ROWS_AT_ONCE) * ROWS_AT_ONCE
        self.causal = band.hi is not None and band.hi < self.len_k - 1  # else every query sees every key
        self.hi = band.hi if self.causal and band.hi is not None else 0
        self._forward: Plan | None = None
        self._backward: Cache[tuple[Any, ...], Backward] = Cache()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> tuple[Tensor, Tensor]:
        """Output, in q's layout, and logsumexp."""
        out = layout.empty_like(q)
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        tensors = (q, k, v, out)
        if self._forward is None:
            self._forward = self.plan_forward(tensors)
        self._forward(tensors, (lse,), scale)
        return out, lse

    def backward(
        self, grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        scale: float, band: Band,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of q, k and v, each in the layout of its tensor."""
        dq, dk, dv = layout.empty_like(q), layout.empty_like(k), layout.empty_like(v)
        if grad_lse is not None:
            grad_lse = grad_lse.contiguous()
        rows, sums = self.scratch(q.device)
        copy = None if suits_tma(grad) else torch.empty(q.shape, dtype=q.dtype, device=q.device)
        own = grad if copy is None else copy
        moved = (q, k, v, own, rows[0], rows[1], sums, dk, dv)
        key = backward_key(grad, grad_lse, out, lse)
        plans = self._backward.get(key)
        if plans is None:
            plans = self._backward[key] = self.plan_backward(out, grad, dq, moved)
        plans.prepare((out, grad), (lse, grad_lse, rows, sums, copy))
        plans.main(moved, (), scale)
        plans.finish((dq,), (sums,), scale)
        return dq, dk, dv

    def scratch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Logsumexp and delta of every query, and fp32 sums for dQ, as rows of what a thread holds of it."""
        queries = self.batch * self.heads * self.padded
        rows = torch.empty((2, queries), dtype=torch.float32, device=device)
        return rows, torch.empty((queries * self.block_d // 32, 32), dtype=torch.float32, device=device)

    def plan_forward(self, tensors: Sequence[Tensor]) -> Plan:
        """tensors: q, k, v, out."""
        d, shape, all_heads = self.block_d, FORWARD[self.block_d], self.batch * self.heads
        blocks = triton.cdiv(self.len_q, ROWS * shape.warpgroups)
        return self._plan(
            hopper_forward.forward_kernel,
            blocks * all_heads,
            tensors,
            [(1, 1, rows, d) for rows in (ROWS, KEYS, KEYS, ROWS)],
            before=(self.heads, self.group, self.len_q, self.len_k, self.hi),
            after=(
                *(blocks, all_heads, _section("forward", all_heads, 4 * d * self.len_k)),
                *(self.causal, d, KEYS, shape.warpgroups, shape.stages, self._cut(ROWS, KEYS)),
                *(shape.overlap, shape.registers),
            ),
        )

    def plan_backward(self, out: Tensor, grad: Tensor, dq: Tensor, moved: Sequence[Tensor]) -> "Backward":
        """moved: what the main kernel reads and writes, in its order."""
        d, queries, all_heads = self.block_d, BACKWARD_QUERIES[self.block_d], self.batch * self.kv_heads
        blocks, q_blocks = triton.cdiv(self.len_k, KEYS), triton.cdiv(self.len_q, queries)
        passes, all_queries = self.padded // ROWS_AT_ONCE, self.batch * self.heads * self.padded
        prepare = Plan(
            hopper_backward.prepare_kernel, passes * self.batch * self.heads, self.device, (), None,
            before=(out.stride(), grad.stride(), self.heads, self.len_q, self.d, passes, all_queries),
            after=(d, ROWS_AT_ONCE), options={"num_warps": 8},
        )  # fmt: skip
        finish = Plan(
            hopper_backward.finish_kernel, passes * self.batch * self.heads, self.device, (), None,
            before=(dq.stride()[:3], self.heads, self.len_q, self.d, passes),
            after=(d, ROWS_AT_ONCE), options={"num_warps": 8},
        )  # fmt: skip
        main = self._plan(
            hopper_backward.backward_kernel,
            blocks * all_heads,
            moved,
            [
                *((1, 1, rows, d) for rows in (queries, KEYS, KEYS, queries)),
                *((queries,), (queries,), (128, 32), (1, 1, ROWS, d), (1, 1, ROWS, d)),
            ],
            before=(self.heads, self.kv_heads, self.group, self.len_k, self.padded, self.hi),
            after=(
                *(blocks, q_blocks, all_heads, _section("backward", all_heads, 8 * d * self.len_q * self.group)),
                *(self.causal, self.len_k % KEYS == 0, d, queries, self._cut(KEYS, queries), self.group > 1),
            ),
        )
        return Backward(prepare, main, finish)

    def _plan(
        self, kernel: Any, programs: int, tensors: Sequence[Tensor], blocks: Sequence[tuple[int, ...]],
        before: tuple[Any, ...], after: tuple[Any, ...],
    ) -> Plan:  # fmt: skip
        copied = tuple(i for i, t in enumerate(tensors) if not suits_tma(t))
        descriptors = [
            Description(
                TensorDescriptor,
                t.new_empty(t.shape) if i in copied else t,
                list(block),
                gl.NVMMASharedLayout.get_default_for(list(block), DTYPES[t.dtype]),
            )
            for i, (t, block) in enumerate(zip(tensors, blocks, strict=True))
        ]
        return Plan(kernel, programs, self.device, copied, descriptors, before, after, {"num_warps": 4})

    def _cut(self, own: int, visited: int) -> int:
        """In how many of the tiles that it visits, `visited` wide, the diagonal may cut `own` rows of a program."""
        if not self.causal:
            return 1
        shift = self.hi % visited  # where the diagonal begins in a tile; programs begin at multiples of `own`
        return max(1, *(triton.cdiv((start + shift) % visited + own, visited) for start in range(0, visited, own)))


def _section(kernel: str, all_heads: int, bytes_of_head: int) -> int:
    """How many heads run side by side: those whose bytes the L2 cache holds."""
    return max(1, min(all_heads, L2_SHARE[kernel] // bytes_of_head))


@dataclass
class Backward:
    prepare: Plan
    main: Plan
    finish: Plan


_known: Cache[tuple[Any, ...], Problem] = Cache()
