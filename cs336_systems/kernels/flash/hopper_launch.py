"""Launches the kernels of hopper_forward.py and hopper_backward.py.

They take 16-bit tensors, causal masks of any alignment or none, grouped heads, any lengths, and head dims up to 128
that the copy engine can move, which it pads to 64 or 128 with zeros. `attention.hopper_problem` says so of a call; all
else is flash_launch.py's.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cs336_systems.kernels.cache import Cache
from cs336_systems.kernels.flash import hopper_backward, hopper_forward
from cs336_systems.kernels.flash import strides as layout
from cs336_systems.kernels.flash.band import Band
from cs336_systems.kernels.flash.launch_plan import Description, Plan, suits_tma

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
L2_SHARE = {"forward": 32 << 20, "backward": 16 << 20}
"""Bytes that the heads of a section read or add to again and again; with more in flight they evict each other's."""
ROWS = 64
"""Of a warpgroup: what its matrix instruction takes."""
KEYS = 128
"""In a tile of either kernel."""
DEPTHS = (80, 96)
"""Head dims, between the two that tiles have, up to which scores are multiplied: 64 and another power of 2."""
PREPARED, FINISHED = 32, 128
"""Queries of a program that goes over them before backward, and of one that does after it. The number of queries is
rounded up to a multiple of both."""


@dataclass(frozen=True)
class Shape:
    """Of the forward kernel."""

    warpgroups: int
    stages: int
    turns: bool
    held: bool
    """Queries are kept in registers."""
    registers: int


FORWARD = {
    64: Shape(3, 4, turns=True, held=False, registers=160),
    128: Shape(2, 3, turns=False, held=True, registers=240),
}
"""By head dim. What a warpgroup holds of the output at 128 leaves registers for two of them, and for their queries."""
PIECES = 16
"""Into which a unit of work is cut at most."""
ROUNDS_OF_PIECES = 4
"""That multiprocessors work on pieces at most: each takes memory."""
LEAST_SAVING = {"forward": 0.01, "backward": 0.04}
"""Of the time, that makes pieces worth it: backward that may leave pieces is 1% slower where there are none."""
STARTING, JOINING, PIECES_JOINED = 4, 2, 40
"""What a program takes beside its tiles, what it takes to put pieces together, and how many of them for one more: in
tiles, about 2 us each."""
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
        self.depth = next((depth for depth in DEPTHS if self.d <= depth < self.block_d), self.block_d)
        self.device = q.device.index
        self.group = self.heads // self.kv_heads
        self.padded = triton.cdiv(self.len_q, FINISHED) * FINISHED
        self.all_queries = self.batch * self.heads * self.padded
        self.causal = band.hi is not None and band.hi < self.len_k - 1  # else every query sees every key
        self.hi = band.hi if self.causal and band.hi is not None else 0
        self._results = layout.Results(q, k, v)
        self._forward: Forward | None = None
        self._backward: Cache[tuple[Any, ...], Backward] = Cache()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> tuple[Tensor, Tensor]:
        """Output, in q's layout, and logsumexp."""
        out, lse = self._results.like_q(q), self._results.logsumexp()
        tensors = (q, k, v, out)
        plans = self._forward
        if plans is None:
            plans = self._forward = self.plan_forward(tensors)
        partial = None if plans.pieces is None else plans.pieces.room(q.device)
        plans.main(tensors, (lse, partial), scale)
        if plans.pieces is not None:
            plans.pieces.join((out,), (lse, partial))
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
        partial = None if plans.pieces is None else plans.pieces.room(q.device)
        plans.main((q, k, v, own, scratch, scratch, scratch, dk, dv), (partial,), scale)
        plans.finish((dq,), (scratch,), scale)
        if plans.pieces is not None:
            plans.pieces.join((dk, dv), (partial,))
        return dq, dk, dv

    def scratch(self, device: torch.device) -> Tensor:
        """For every query: its logsumexp; its delta; and fp32 sums for dQ."""
        return torch.empty(self.all_queries * (2 + self.block_d), dtype=torch.float32, device=device)

    def plan_forward(self, tensors: Sequence[Tensor]) -> "Forward":
        """tensors: q, k, v, out."""
        d, shape, all_heads = self.block_d, FORWARD[self.block_d], self.batch * self.heads
        rows, groups = shape.warpgroups * ROWS, triton.cdiv(self.len_q, ROWS)
        blocks = triton.cdiv(groups, shape.warpgroups)
        # The block that is not full is the first, which sees the fewest keys, or the last, which starts last.
        shift = blocks * rows - groups * ROWS if self.causal else 0
        split = self._split("forward", blocks * all_heads, triton.cdiv(self.len_k, KEYS))
        places = order(blocks, self.batch, self.heads, L2_SHARE["forward"] // (4 * d * self.len_k))
        main = self._plan(
            hopper_forward.forward_kernel,
            split.programs,
            tensors,
            [(1, 1, rows, d) for rows in (ROWS, KEYS, KEYS, ROWS)],
            before=(self.group, self.len_q, self.len_k, self.hi),
            after=(
                *(blocks, places, shift, split.whole, split.pieces),
                *(self.causal, d, self.depth, KEYS, shape.warpgroups, shape.stages, self._cut(ROWS, KEYS)),
                *(shape.turns, shape.held, shape.registers),
            ),
        )
        if split.cut == 0:
            return Forward(main)
        join = Plan(
            hopper_forward.join_kernel, split.cut * shape.warpgroups, self.device, (), None,
            before=(tensors[3].stride()[:3], self.len_q, self.d, places, split.whole, split.pieces),
            after=(d, rows), options={"num_warps": 4},
        )  # fmt: skip
        return Forward(main, Pieces(join, split.cut * split.pieces * rows * (d + 1)))

    def plan_backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
    ) -> "Backward":
        d, all_heads = self.block_d, self.batch * self.kv_heads
        queries = QUERIES[d]
        even = self.len_k % KEYS == 0
        blocks, q_blocks = triton.cdiv(self.len_k, KEYS), triton.cdiv(self.len_q, queries)
        copies, meta = not suits_tma(grad), torch.device("meta")
        own = torch.empty(q.shape, dtype=q.dtype, device=meta) if copies else grad
        scratch = self.scratch(meta)
        lse, sums = scratch[: self.all_queries], scratch[2 * self.all_queries :].view(-1, 32)  # 32: as a thread has it
        prepare = Plan(
            hopper_backward.prepare_kernel, self.all_queries // PREPARED, self.device, (), None,
            before=(
                *(out.stride(), grad.stride(), self.heads, self.len_q, self.d),
                *(self.padded // PREPARED, self.all_queries),
            ),
            after=(d, PREPARED), options={"num_warps": 4},
        )  # fmt: skip
        finish = Plan(
            hopper_backward.finish_kernel, self.all_queries // FINISHED, self.device, (), None,
            before=(
                *(dq.stride()[:3], self.heads, self.len_q, self.d),
                *(self.padded // FINISHED, self.all_queries),
            ),
            after=(d, FINISHED), options={"num_warps": 8, "launch_pdl": True},
        )  # fmt: skip
        split = self._split("backward", blocks * all_heads, q_blocks * self.group)
        fit = L2_SHARE["backward"] // (8 * d * self.len_q * self.group)
        place = (order(blocks, self.batch, self.kv_heads, fit), split.whole, split.pieces)
        main = self._plan(
            hopper_backward.backward_kernel,
            split.programs,
            (q, k, v, own, lse, lse, sums, dk, dv),
            [
                *((1, 1, rows, d) for rows in (queries, KEYS, KEYS, queries)),
                *((queries,), (queries,), (128, 32), (1, 1, ROWS, d), (1, 1, ROWS, d)),
            ],
            before=(self.heads, self.group, self.len_k, self.padded, self.hi),
            after=(
                *(q_blocks, *place),
                *(self.causal, even, d, self.depth, queries, self._cut(KEYS, queries), self.group > 1),
            ),
            starts={4: 0, 5: self.all_queries, 6: 2 * self.all_queries},
            options={"launch_pdl": True},
        )
        if split.cut == 0:
            return Backward(prepare, main, finish, copies)
        join = Plan(
            hopper_backward.join_kernel, split.cut * 4, self.device, (), None,
            before=(dk.stride()[:3], dv.stride()[:3], self.len_k, self.d, *place),
            after=(d,), options={"num_warps": 4},
        )  # fmt: skip
        return Backward(prepare, main, finish, copies, Pieces(join, split.cut * split.pieces * 2 * KEYS * d))

    def _split(self, kernel: str, units: int, tiles: int) -> "Split":
        if self.causal:  # the last programs are the shortest, and the end is even
            return Split(units, units, 1)
        return even_end(units, tiles, _multiprocessors(self.device), LEAST_SAVING[kernel])

    def _plan(
        self, kernel: Any, programs: int, tensors: Sequence[Tensor], blocks: Sequence[tuple[int, ...]],
        before: tuple[Any, ...], after: tuple[Any, ...], starts: Mapping[int, int] = MappingProxyType({}),
        options: Mapping[str, int] = MappingProxyType({}),
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
        return Plan(kernel, programs, self.device, copied, descriptors, before, after, {"num_warps": 4, **options})

    def _cut(self, own: int, visited: int) -> int:
        """In how many of the tiles that it visits, `visited` wide, the diagonal may cut `own` rows of a program."""
        if not self.causal:
            return 1
        shift = self.hi % visited  # where the diagonal begins in a tile; programs begin at multiples of `own`
        return max(1, *(triton.cdiv((start + shift) % visited + own, visited) for start in range(0, visited, own)))


@dataclass(frozen=True)
class Split:
    """Units of work that take equally long, for programs: the first `whole` have one each, others a piece of one."""

    units: int
    whole: int
    pieces: int
    """Of each unit that is not whole."""

    @property
    def cut(self) -> int:
        """Units in pieces."""
        return self.units - self.whole

    @property
    def programs(self) -> int:
        return self.whole + self.cut * self.pieces


def even_end(units: int, tiles: int, multiprocessors: int, least_saving: float) -> Split:
    """How to cut units of so many tiles each, so that all multiprocessors end at about the same time.

    1.1 times as many units as there are multiprocessors would take twice as long as exactly as many.
    """

    def end(split: Split) -> int:
        """In tiles, were all of a round to begin together."""
        rounds, pieces = (
            triton.cdiv(split.whole, multiprocessors),
            triton.cdiv(split.cut * split.pieces, multiprocessors),
        )
        joining = JOINING + split.cut * split.pieces // PIECES_JOINED if split.cut else 0
        return rounds * (tiles + STARTING) + pieces * (triton.cdiv(tiles, split.pieces) + STARTING) + joining

    uncut, rounds = Split(units, units, 1), units // multiprocessors
    splits = [
        Split(units, whole * multiprocessors, pieces)
        for whole in range(rounds, max(rounds - 2, -1), -1)
        for pieces in range(2, min(PIECES, tiles) + 1)
    ]
    small = [split for split in splits if split.cut * split.pieces <= ROUNDS_OF_PIECES * multiprocessors]
    best = min([uncut, *small], key=end)
    return best if end(best) <= (1 - least_saving) * end(uncut) else uncut


@functools.cache
def _multiprocessors(device: int | None) -> int:
    return 132 if device is None else torch.cuda.get_device_properties(device).multi_processor_count


def order(blocks: int, batch: int, heads: int, fit: int) -> tuple[int, ...]:
    """In what order programs take the blocks of all heads, for `hopper_forward.assignment`: units of work in a section,
    heads in a section, heads; and how to divide by each of these.

    Heads of a section run side by side: about as many as `fit` the L2 cache. All sections are alike, since a last one
    of few heads would keep few multiprocessors busy.
    """
    all_heads = batch * heads
    divisors = [n for n in range(1, all_heads + 1) if all_heads % n == 0]
    section = min(divisors, key=lambda n: max(n, fit) / min(n, max(fit, 1)))
    numbers = (section * blocks, section, heads)
    return (*numbers, *(part for n in numbers for part in reciprocal(n)))


def reciprocal(n: int) -> tuple[int, int]:
    """(multiplier, shift) with x // n == x * multiplier >> shift for all x from 0 to 2^31 - 1, in 64 bits."""
    shift = 31 + (n - 1).bit_length()
    return -(-(1 << shift) // n), shift


@dataclass
class Pieces:
    """Of units that `main` does not finish."""

    join: Plan
    numbers: int
    """That they leave for `join`, all of them."""

    def room(self, device: torch.device) -> Tensor:
        return torch.empty(self.numbers, dtype=torch.float32, device=device)


@dataclass
class Forward:
    main: Plan
    pieces: Pieces | None = None


@dataclass
class Backward:
    prepare: Plan
    main: Plan
    finish: Plan
    copies: bool
    """TMA cannot read the gradient as it lies: `prepare` makes a copy."""
    pieces: Pieces | None = None


_known: Cache[tuple[Any, ...], Problem] = Cache()
