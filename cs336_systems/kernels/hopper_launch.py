"""Launches the kernels of hopper_forward.py and hopper_backward.py.

They take 16-bit tensors, causal masks of any alignment or none, grouped heads, any lengths, and head dims up to 128
that the copy engine can move, which it pads to 64 or 128 with zeros. `attention.hopper_problem` says so of a call; all
else is flash_launch.py's.
"""

import functools
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cs336_systems.kernels import hopper_backward, hopper_forward, layout
from cs336_systems.kernels.band import Band
from cs336_systems.kernels.cache import Cache
from cs336_systems.kernels.plan import Description, Plan, suits_tma

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
    turns: bool
    registers: int


FORWARD = {
    (64, False): Shape(3, 4, True, True, 160),
    (64, True): Shape(3, 4, False, True, 160),
    (128, False): Shape(2, 3, True, False, 240),
    (128, True): Shape(2, 3, True, False, 240),
}
"""By head dim, and whether a mask cuts. What a warpgroup holds of the output at 128 leaves registers for two of them,
and two keep the tensor cores busy only if each overlaps its own products with its softmax."""
NARROW = {3: 0.7, 2: 0.6}
"""Warpgroups of a block -> what a block of one less takes of its time."""
QUERIES = {64: 128, 128: 64}
"""Head dim -> queries in a tile of backward: what registers hold beside the gradients of the keys."""


def problem(q: Tensor, k: Tensor, v: Tensor, band: Band) -> "Problem":
    """Attention of tensors like these. q: (batch, heads, len_q, d); k, v: (batch, kv_heads, len_k, d)."""
    key = (layout.kind(q, k, v), band)
    found = _known.get(key)
    if found is None:
        found = _known[key] = Problem(q, k, v, band)
    return found


class Problem:
    """What is known of tensors of certain shapes, strides and alignment."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, band: Band):
        (self.batch, self.heads, self.len_q, self.d), (_, self.kv_heads, self.len_k, _) = q.shape, k.shape
        self.block_d = 64 if self.d <= 64 else 128
        self.device = q.device.index
        self.group = self.heads // self.kv_heads
        self.padded = triton.cdiv(self.len_q, ROWS_AT_ONCE) * ROWS_AT_ONCE
        self.all_queries = self.batch * self.heads * self.padded
        self.causal = band.hi is not None and band.hi < self.len_k - 1  # else every query sees every key
        self.hi = band.hi if self.causal and band.hi is not None else 0
        self._results = layout.Results(q, k, v)
        self._forward: Plan | None = None
        self._backward: Cache[tuple[Any, ...], Backward] = Cache()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> tuple[Tensor, Tensor]:
        """Output, in q's layout, and logsumexp."""
        out, lse = self._results.like_q(q), self._results.logsumexp()
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
        dq, dk, dv = self._results.gradients(q, k, v)
        if grad_lse is not None:
            grad_lse = grad_lse.contiguous()
        key = layout.kind_of_gradient(grad, grad_lse, out, lse)
        plans = self._backward.get(key)
        if plans is None:
            plans = self._backward[key] = self.plan_backward(q, k, v, out, grad, dq, dk, dv)
        copy = torch.empty(q.shape, dtype=q.dtype, device=q.device) if plans.copies else None
        own = grad if copy is None else copy
        scratch = self.scratch(q.device)
        plans.prepare((out, grad), (lse, grad_lse, scratch, copy))
        plans.main((q, k, v, own, scratch, scratch, scratch, dk, dv), (), scale)
        plans.finish((dq,), (scratch,), scale)
        return dq, dk, dv

    def scratch(self, device: torch.device) -> Tensor:
        """For every query: its logsumexp; its delta; and fp32 sums for dQ."""
        return torch.empty(self.all_queries * (2 + self.block_d), dtype=torch.float32, device=device)

    def plan_forward(self, tensors: Sequence[Tensor]) -> Plan:
        """tensors: q, k, v, out."""
        d, shape, all_heads = self.block_d, FORWARD[self.block_d, self.causal], self.batch * self.heads
        groups = triton.cdiv(self.len_q, ROWS)
        blocks = wide = triton.cdiv(groups, shape.warpgroups)
        # The block that is not full is the first, which sees the fewest keys, or the last, which starts last.
        shift = (blocks * shape.warpgroups - groups) * ROWS if self.causal else 0
        if not self.causal:
            blocks, wide = split(groups, shape.warpgroups, all_heads, _multiprocessors(self.device))
        return self._plan(
            hopper_forward.forward_kernel,
            blocks * all_heads,
            tensors,
            [(1, 1, rows, d) for rows in (ROWS, KEYS, KEYS, ROWS)],
            before=(self.heads, self.group, self.len_q, self.len_k, self.hi),
            after=(
                *(blocks, all_heads, _section("forward", all_heads, 4 * d * self.len_k), shift, wide),
                *(self.causal, d, KEYS, shape.warpgroups, shape.stages, self._cut(ROWS, KEYS)),
                *(shape.overlap, shape.turns, shape.registers),
            ),
        )

    def plan_backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
    ) -> "Backward":
        d, all_heads = self.block_d, self.batch * self.kv_heads
        queries = QUERIES[d]
        even = self.len_k % KEYS == 0
        blocks, q_blocks = triton.cdiv(self.len_k, KEYS), triton.cdiv(self.len_q, queries)
        passes = self.padded // ROWS_AT_ONCE
        copies, meta = not suits_tma(grad), torch.device("meta")
        own = torch.empty(q.shape, dtype=q.dtype, device=meta) if copies else grad
        scratch = self.scratch(meta)
        lse, sums = scratch[: self.all_queries], scratch[2 * self.all_queries :].view(-1, 32)  # 32: as a thread has it
        prepare = Plan(
            hopper_backward.prepare_kernel, passes * self.batch * self.heads, self.device, (), None,
            before=(out.stride(), grad.stride(), self.heads, self.len_q, self.d, passes, self.all_queries),
            after=(d, ROWS_AT_ONCE), options={"num_warps": 8},
        )  # fmt: skip
        finish = Plan(
            hopper_backward.finish_kernel, passes * self.batch * self.heads, self.device, (), None,
            before=(dq.stride()[:3], self.heads, self.len_q, self.d, passes, self.all_queries),
            after=(d, ROWS_AT_ONCE), options={"num_warps": 8},
        )  # fmt: skip
        main = self._plan(
            hopper_backward.backward_kernel,
            blocks * all_heads,
            (q, k, v, own, lse, lse, sums, dk, dv),
            [
                *((1, 1, rows, d) for rows in (queries, KEYS, KEYS, queries)),
                *((queries,), (queries,), (128, 32), (1, 1, ROWS, d), (1, 1, ROWS, d)),
            ],
            before=(self.heads, self.kv_heads, self.group, self.len_k, self.padded, self.hi),
            after=(
                *(blocks, q_blocks, all_heads, _section("backward", all_heads, 8 * d * self.len_q * self.group)),
                *(self.causal, even, d, queries, self._cut(KEYS, queries), self.group > 1),
            ),
            starts={4: 0, 5: self.all_queries, 6: 2 * self.all_queries},
        )
        return Backward(prepare, main, finish, copies)

    def _plan(
        self, kernel: Any, programs: int, tensors: Sequence[Tensor], blocks: Sequence[tuple[int, ...]],
        before: tuple[Any, ...], after: tuple[Any, ...], starts: Mapping[int, int] = MappingProxyType({}),
    ) -> Plan:  # fmt: skip
        """`starts`: tensor -> where it begins, of those that are parts of another."""
        copied = tuple(i for i, t in enumerate(tensors) if not suits_tma(t))
        descriptors = [
            Description(
                TensorDescriptor,
                t.new_empty(t.shape) if i in copied else t,
                list(block),
                gl.NVMMASharedLayout.get_default_for(list(block), DTYPES[t.dtype]),
                start=starts.get(i),
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


def split(groups: int, warpgroups: int, heads: int, multiprocessors: int) -> tuple[int, int]:
    """Blocks for a head's groups of 64 queries, and how many are wide; the others, one group narrower, come last.

    All wide ones take equally long: 1.1 times as many as there are multiprocessors take twice as long as exactly as
    many do. Some narrow ones among the last make the end more even. Tried are a few numbers of them, up to two rounds.
    """

    def end(wide: int) -> float:
        """When the last one ends, each having begun where a multiprocessor was free."""
        free = [0.0] * multiprocessors
        for count, time in ((wide * heads, 1.0), (narrow(wide) * heads, NARROW[warpgroups])):
            rounds, count = divmod(count, multiprocessors)
            free = [t + rounds * time for t in free]
            for _ in range(count):
                heapq.heapreplace(free, free[0] + time)
        return max(free)

    def narrow(wide: int) -> int:
        return max(0, triton.cdiv(groups - wide * warpgroups, warpgroups - 1))

    most = triton.cdiv(groups, warpgroups)
    fewest = max(0, most - triton.cdiv(2 * multiprocessors, heads))
    wide = min(range(most, fewest - 1, -max(1, (most - fewest) // 16)), key=end)
    return wide + narrow(wide), wide


@functools.cache
def _multiprocessors(device: int | None) -> int:
    return 132 if device is None else torch.cuda.get_device_properties(device).multi_processor_count


def _section(kernel: str, all_heads: int, bytes_of_head: int) -> int:
    """How many heads run side by side: those whose bytes the L2 cache holds."""
    return max(1, min(all_heads, L2_SHARE[kernel] // bytes_of_head))


@dataclass
class Backward:
    prepare: Plan
    main: Plan
    finish: Plan
    copies: bool
    """TMA cannot read the gradient as it lies: `prepare` makes a copy."""


_known: Cache[tuple[Any, ...], Problem] = Cache()
