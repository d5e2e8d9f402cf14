"""Launches the kernels of hopper_forward.py, hopper_backward.py and hopper_passes.py.

They take 16-bit tensors, causal masks and windows of any alignment, grouped heads, any lengths, and head dims up to 256
that the copy engine can move, padded to 64, 128 or 256 with zeros. `dispatch.hopper_problem` checks a call for this;
portable_launch.py takes the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cs336_systems.kernels.cache import Cache
from cs336_systems.kernels.flash import hopper_backward, hopper_forward, hopper_passes
from cs336_systems.kernels.flash import strides as layout
from cs336_systems.kernels.flash.band import Band
from cs336_systems.kernels.flash.launch_plan import Plan, suits_tma
from cs336_systems.kernels.flash.packing import Blocks, PackedMask, Packing, most_blocks
from cs336_systems.kernels.triton_compat import TensorDescription
from cs336_systems.predict.attention_programs import (
    KEYS,
    L2_SHARE,
    L2_SHARE_192,
    LONGER_THAN_MEAN,
    QUERIES,
    WIDEST_IN_ONE_PASS,
    Split,
    even_end,
    heads_of_part,
    heads_of_section,
    numbers_of_parts,
    padded_head_dim,
    parts_of_group,
    sees_few_keys,
)

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
ROUNDS = {"forward": 0, "backward": 2}
"""Minimum number of rounds of programs, on all multiprocessors, that a section has with a causal mask: the longest
programs are the first of their section, and those of the last section should not be among the last ones."""
PACKED_ROUNDS = 3
"""As ROUNDS, for packed documents and all kernels: a few of the blocks may have most of the work."""
ROWS = 64
"""Rows of a warpgroup's matrix instruction."""
D_USED = (80, 96, 192)
"""Numbers of columns between the padded head dims that matmuls can have: 64 or 128, plus a power of 2."""
SM_REGISTERS = 1 << 16
UNUSED = 16
"""Placeholder for sizes that kernels read from a table of packed documents."""
PREPARED, FINISHED = 32, 128
"""Queries of a program of `prepare_kernel` and of `finish_kernel`. The number of queries is padded to a multiple of
both."""


@dataclass(frozen=True)
class Shape:
    """Launch parameters of the forward kernel."""

    warpgroups: int
    """Number of consumer warpgroups."""
    stages: int
    ping_pong: bool
    q_in_registers: bool
    registers: int
    """Registers per thread of a consumer."""
    keys: int = KEYS
    """Keys of a tile."""
    residents: int = 1
    """Programs that an SM runs at a time; with more than one, registers are limited."""

    @property
    def options(self) -> dict[str, int]:
        """Launch options; the limit of registers is the mean over the threads of a program."""
        threads = 128 * (self.warpgroups + 1)
        limit = {"maxnreg": SM_REGISTERS // (self.residents * threads) // 8 * 8} if self.residents > 1 else {}
        return {"num_warps": 4, **limit}


FORWARD = {
    64: Shape(3, 4, ping_pong=True, q_in_registers=False, registers=160),
    128: Shape(2, 3, ping_pong=False, q_in_registers=True, registers=240),
    256: Shape(2, 2, ping_pong=False, q_in_registers=False, registers=240, keys=64),
}
"""Launch parameters by padded head dim. At 128 the registers suffice for the output accumulators of two consumers and
their queries."""
WINDOWED = {**FORWARD, 64: Shape(2, 4, ping_pong=True, q_in_registers=False, registers=240)}
"""Launch parameters with a window to the left, whose mask needs too many registers for three consumers."""
SHORT = {
    64: Shape(1, 3, ping_pong=False, q_in_registers=False, registers=136, keys=64, residents=3),
    128: Shape(1, 3, ping_pong=False, q_in_registers=False, registers=232, keys=64, residents=2),
}
"""Launch parameters for queries that see few keys: several small programs on an SM."""
IN_ORDER = Blocks(FINISHED, False, "AS_PACKED")
"""Blocks of queries in the order of scratch memory, each document padded to a multiple of FINISHED."""
MIN_SAVING = {"forward": 0.01, "backward": 0.04}
"""Minimum relative saving that justifies splitting. Backward is 1% slower as a kernel that can split, even where
nothing is split."""


def forward_shape(block_d: int, keys: int, is_causal: bool, has_window: bool) -> Shape:
    """Return the launch parameters of forward for queries that see up to `keys` keys."""
    if sees_few_keys(block_d, keys, "window" if has_window else "causal" if is_causal else "full"):
        return SHORT[block_d]
    return (WINDOWED if has_window else FORWARD)[block_d]


class Problem:
    """Plans for attention of tensors with given shapes, strides and alignment.

    q: (batch, heads, len_q, d); k, v: (batch, kv_heads, len_k, d). `repeatable`: gradients are bitwise equal in every
    run, at any head dim.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, band: Band, repeatable: bool = False):
        (self.batch, self.heads, self.len_q, self.d), (_, self.kv_heads, self.len_k, _) = q.shape, k.shape
        self.block_d = padded_head_dim(self.d)
        self.in_passes = repeatable or self.block_d > WIDEST_IN_ONE_PASS
        self.d_used = next((used for used in D_USED if self.d <= used < self.block_d), self.block_d)
        self.device = q.device.index
        self.group = self.heads // self.kv_heads
        self.padded = triton.cdiv(self.len_q, FINISHED) * FINISHED
        self.all_queries = self.batch * self.heads * self.padded
        self.causal = band.hi is not None and band.hi < self.len_k - 1  # else every query sees every key
        self.hi = band.hi if self.causal and band.hi is not None else 0
        self.lo = band.lo if band.lo is not None and band.lo > 1 - self.len_q else None
        self._most_keys = band.most_keys(self.len_k)
        self._results = layout.Results(q, k, v)
        self._forward: Forward | None = None
        self._backward: Cache[tuple[Any, ...], AnyBackward] = Cache()
        """Layout of the gradient -> plans; making plans takes 339 us."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> tuple[Tensor, Tensor]:
        """Return the output, in q's layout, and the logsumexp."""
        out, lse = self._results.like_q(q), self._results.logsumexp()
        tensors = (q, k, v, out)
        plans = self._forward
        if plans is None:
            plans = self._forward = self.plan_forward(tensors)
        partial = None if plans.split is None else plans.split.allocate(q.device)
        plans.main(tensors, (lse, partial, None), scale)
        if plans.split is not None:
            plans.split.combine((out,), (lse, partial))
        return out, lse

    def backward(
        self, grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        scale: float, band: Band,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the gradients of q, k and v, each in the layout of its tensor."""
        dq, dk, dv = self._results.gradients(q, k, v)
        if grad_lse is not None:
            grad_lse = grad_lse.contiguous()
        key = layout.gradient_layout_key(grad, grad_lse, out, lse)
        plans = self._backward.get(key)
        if plans is None:
            plans = self._backward[key] = self.plan_backward(q, k, v, out, grad, dq, dk, dv)
        copy = torch.empty(q.shape, dtype=q.dtype, device=q.device) if plans.copies_grad else None
        own = grad if copy is None else copy
        scratch = self.scratch(q.device)
        plans.prepare((out, grad), (lse, grad_lse, scratch, copy, None))
        plans.run((q, k, v, own), scratch, (dq, dk, dv), NO_TABLES, scale)
        return dq, dk, dv

    def scratch(self, device: torch.device) -> Tensor:
        """Allocate memory for each query's logsumexp, its delta, and the fp32 sums of its dQ, if it is summed up."""
        return torch.empty(self.all_queries * (2 + self.sums), dtype=torch.float32, device=device)

    @property
    def sums(self) -> int:
        """Number of fp32 values in which scratch memory sums up the dQ of a query."""
        return 0 if self.in_passes else self.block_d

    def plan_forward(self, tensors: Sequence[Tensor]) -> "Forward":
        """Return the plans for (q, k, v, out)."""
        d, all_heads = self.block_d, self.batch * self.heads
        shape = forward_shape(d, self._most_keys, self.causal, self.lo is not None)
        rows, groups = shape.warpgroups * ROWS, triton.cdiv(self.len_q, ROWS)
        blocks = triton.cdiv(groups, shape.warpgroups)
        # The block that is not full is the first, which sees the fewest keys, or the last, which starts last.
        shift = blocks * rows - groups * ROWS if self.causal else 0
        split = self._split("forward", blocks * all_heads, triton.cdiv(self.len_k, shape.keys), shape.residents)
        in_small_sections = self.d_used == 192 and not self.causal and self.lo is None
        share = L2_SHARE_192 if in_small_sections else L2_SHARE["forward"]
        schedule = self._order("forward", blocks, self.heads, share // (4 * d * self.len_k))
        main = self._plan(
            hopper_forward.forward_kernel,
            split.programs,
            tensors,
            [(1, 1, rows, d) for rows in (ROWS, shape.keys, shape.keys, ROWS)],
            before=(self.group, self.len_q, self.len_k, self.lo, self.hi),
            after=(
                *(blocks, schedule, shift, split.unsplit, split.splits, self.causal, d, self.d_used, shape.keys),
                *(shape.warpgroups, shape.stages, self._masked_tiles(ROWS, shape.keys)),
                *(shape.ping_pong, shape.q_in_registers, shape.registers),
            ),
            options=shape.options,
        )
        if split.split_units == 0:
            return Forward(main)
        combine = Plan(
            hopper_forward.combine_kernel, split.split_units * shape.warpgroups, self.device, (), None,
            before=(tensors[3].stride()[:3], self.len_q, self.d, schedule, split.unsplit, split.splits),
            after=(d, rows), options={"num_warps": 4},
        )  # fmt: skip
        return Forward(main, SplitPlan(combine, split.split_units * split.splits * rows * (d + 1)))

    def plan_backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
    ) -> "AnyBackward":
        d, all_heads = self.block_d, self.batch * self.kv_heads
        copies_grad, meta = not suits_tma(grad), torch.device("meta")
        own = torch.empty(q.shape, dtype=q.dtype, device=meta) if copies_grad else grad
        scratch = self.scratch(meta)
        lse, sums = scratch[: self.all_queries], scratch[2 * self.all_queries :].view(-1, 32)  # a row: one thread's
        prepare = self._plan_prepare(out, grad)
        if self.in_passes:
            passes = [self._plan_pass((q, k, v, own, lse, lse), each, (dq, dk, dv)) for each in passes_of(d)]
            return BackwardInPasses(prepare, passes, copies_grad)
        queries = QUERIES[d]
        even = self.len_k % KEYS == 0
        blocks, q_blocks = triton.cdiv(self.len_k, KEYS), triton.cdiv(self.len_q, queries)
        finish = self._plan_finish(dq)
        parts = self._parts_of_group(blocks, queries)
        assert parts in numbers_of_parts(self.group), "the kernel knows from its largest part whether parts are equal"
        if parts > 1:
            split = Split(blocks * all_heads, 0, parts)
        else:
            split = self._split("backward", blocks * all_heads, q_blocks * self.group)
        fit = L2_SHARE["backward"] // (8 * d * self.len_q * self.group)
        section = self._order("backward", blocks, self.kv_heads, fit)
        schedule = (section, split.unsplit, split.splits)
        main = self._plan(
            hopper_backward.backward_kernel,
            split.programs,
            (q, k, v, own, lse, lse, sums, dk, dv),
            [
                *((1, 1, rows, d) for rows in (queries, KEYS, KEYS, queries)),
                *((queries,), (queries,), (128, 32), (1, 1, ROWS, d), (1, 1, ROWS, d)),
            ],
            before=(self.heads, self.len_k, self.padded, self.lo, self.hi),
            after=(
                *(q_blocks, *schedule),
                *(self.causal, even, d, self.d_used, queries),
                *(self._masked_tiles(KEYS, queries), self._window_tiles(queries), self.group),
                heads_of_part(self.group, parts),
            ),
            starts={4: 0, 5: self.all_queries, 6: 2 * self.all_queries},
            options={"launch_pdl": True},
        )
        if split.split_units == 0:
            return Backward(prepare, main, finish, copies_grad)
        combine = Plan(
            hopper_backward.combine_kernel, split.split_units * 4, self.device, (), None,
            before=(dk.stride()[:3], dv.stride()[:3], self.len_k, self.d, *schedule),
            after=(d,), options={"num_warps": 4},
        )  # fmt: skip
        numbers = split.split_units * split.splits * 2 * KEYS * d
        return Backward(prepare, main, finish, copies_grad, SplitPlan(combine, numbers))

    def _plan_prepare(self, out: Tensor, grad: Tensor) -> Plan:
        sizes = (self.heads, self.len_q, self.d, self.padded // PREPARED, self.all_queries)
        return Plan(
            hopper_backward.prepare_kernel, self.all_queries // PREPARED, self.device, (), None,
            before=(out.stride(), grad.stride(), *sizes), after=(self.block_d, PREPARED, self.sums > 0),
            options={"num_warps": 4},
        )  # fmt: skip

    def _plan_pass(self, tensors: Sequence[Tensor], of: "PassOf", gradients: Sequence[Tensor]) -> "Pass":
        """Return one pass with its plan. `tensors`: q, k, v, the gradient of the output, lse, delta."""
        d, tile = self.block_d, (1, 1, ROWS, self.block_d)
        of_q = of.has_rows_of_queries
        heads, rows, seen = (
            (self.heads, self.len_q, self.len_k) if of_q else (self.kv_heads, self.len_k, self.len_q * self.group)
        )
        blocks = triton.cdiv(rows, KEYS)
        plan = self._plan(
            hopper_passes.gradient_kernel,
            blocks * self.batch * heads,
            (*tensors, *(gradients[i] for i in of.results)),
            [tile] * 4 + [(ROWS,)] * 2 + [tile] * 2,
            before=(self.heads, self.len_q, self.len_k, self.padded, self.lo, self.hi),
            after=(
                *(blocks, self._order("forward", blocks, heads, L2_SHARE["forward"] // (4 * d * seen))),
                *(of.constant, self.causal, d, self.d_used, self.group),
            ),
            starts={4: 0, 5: self.all_queries},
        )
        return Pass(plan, of)

    def _plan_finish(self, dq: Tensor) -> Plan:
        sizes = (self.heads, self.len_q, self.d, self.padded // FINISHED, self.all_queries)
        return Plan(
            hopper_backward.finish_kernel, self.all_queries // FINISHED, self.device, (), None,
            before=(dq.stride()[:3], *sizes), after=(self.block_d, FINISHED),
            options={"num_warps": 8, "launch_pdl": True},
        )  # fmt: skip

    def _order(self, kernel: str, blocks: int, heads: int, fit: int) -> "Schedule":
        least = ROUNDS[kernel] * _multiprocessors(self.device) if self.causal else 0
        return order(blocks, self.batch, heads, fit, least)

    def _split(self, kernel: str, units: int, tiles: int, residents: int = 1) -> Split:
        # With a causal mask the last programs are the shortest, and all multiprocessors finish together.
        if self.causal or self.lo is not None:
            return Split(units, units, 1)
        return even_end(units, tiles, residents * _multiprocessors(self.device), MIN_SAVING[kernel])

    def _parts_of_group(self, blocks: int, queries: int) -> int:
        """Return the number of programs of backward that share the query heads of a KV head: several where a mask
        leaves few, long programs."""
        if self.group == 1 or (not self.causal and self.lo is None):
            return 1
        q_blocks, hi, lo = triton.cdiv(self.len_q, queries), self.hi if self.causal else self.len_k, self.lo
        tiles = []
        for column in range(0, blocks * KEYS, KEYS):
            first = min(max(column - hi, 0) // queries, q_blocks - 1)
            beyond = q_blocks if lo is None else min(max(column + KEYS - 1 - lo, 0) // queries + 1, q_blocks)
            tiles.append(max(beyond - first, 1))
        return parts_of_group(self.group, self.d, tiles, self.batch * self.kv_heads, _multiprocessors(self.device))

    def _plan(
        self, kernel: Any, programs: int, tensors: Sequence[Tensor], blocks: Sequence[tuple[int, ...]],
        before: tuple[Any, ...], after: tuple[Any, ...], starts: Mapping[int, int] = MappingProxyType({}),
        options: Mapping[str, int] = MappingProxyType({}),
    ) -> Plan:  # fmt: skip
        """Return a plan whose tensors TMA moves in `blocks`. `starts`: offsets of the tensors that are parts of
        others."""
        copied = tuple(i for i, t in enumerate(tensors) if not suits_tma(t))
        descriptions = [
            TensorDescription(
                TensorDescriptor,
                t.new_empty(t.shape) if i in copied else t,
                list(block),
                gl.NVMMASharedLayout.get_default_for(list(block), DTYPES[t.dtype]),
                start=starts.get(i),
            )
            for i, (t, block) in enumerate(zip(tensors, blocks, strict=True))
        ]
        return Plan(kernel, programs, self.device, copied, descriptions, before, after, {"num_warps": 4, **options})

    def _masked_tiles(self, own: int, visited: int) -> int:
        """Return number of tiles of width `visited` that the causal diagonal may cut for `own` rows, at least 1."""
        return _most_cut(own, visited, self.hi) if self.causal else 1

    def _window_tiles(self, queries: int) -> int:
        """Return number of tiles of queries that the window's left bound may cut for the keys of a program."""
        return 0 if self.lo is None else _most_cut(KEYS, queries, -self.lo)


# -- packed documents -------------------------------------------------------------------------------------------------


class PackedProblem:
    """Plans for attention inside packed documents, of tensors with given shapes, strides and alignment.

    Tensors are those of `Problem`, with a batch of 1; all documents lie along the sequence. Nothing is split: documents
    of several lengths end at several times anyway.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: PackedMask, documents: int, repeatable: bool = False):
        self._own = Problem(q, k, v, mask.band, repeatable)
        self._results = layout.Results(q, k, v)
        self._mask = mask
        self._documents = documents
        self._causal = mask.band.hi is not None
        self._hi = mask.band.hi or 0
        self._lo = mask.band.lo
        self._padded = KEYS * most_blocks(KEYS, self._own.len_q, documents)
        self._all_queries = self._own.heads * self._padded
        length = min(self._own.len_k, LONGER_THAN_MEAN * self._own.len_k // max(documents, 1))
        keys = mask.band.most_keys(length)
        self._shape = forward_shape(self._own.block_d, keys, self._causal, self._lo is not None)
        self._query_blocks = Blocks(self._shape.warpgroups * ROWS, False, mask.order)
        self._key_blocks = Blocks(KEYS, True, mask.order)
        self._pass_blocks = Blocks(KEYS, False, mask.order)
        self._forward: Plan | None = None
        self._backward: Cache[tuple[Any, ...], AnyBackward] = Cache()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, mask: PackedMask
    ) -> tuple[Tensor, Tensor]:
        """Return the output, in q's layout, and the logsumexp."""
        out, lse = self._results.like_q(q), self._results.logsumexp()
        tensors = (q, k, v, out)
        if self._forward is None:
            self._forward = self.plan_forward(tensors)
        self._forward(tensors, (lse, None, self._table(packing, self._query_blocks)), scale)
        return out, lse

    def backward(
        self, grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        packing: Packing, scale: float, mask: PackedMask,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the gradients of q, k and v, each in the layout of its tensor."""
        dq, dk, dv = self._results.gradients(q, k, v)
        if grad_lse is not None:
            grad_lse = grad_lse.contiguous()
        key = layout.gradient_layout_key(grad, grad_lse, out, lse)
        plans = self._backward.get(key)
        if plans is None:
            plans = self._backward[key] = self.plan_backward(q, k, v, out, grad, dq, dk, dv)
        in_order = self._table(packing, IN_ORDER)
        by_queries = self._table(packing, self._pass_blocks) if self._own.in_passes else None
        tables = Tables(in_order, by_queries, self._table(packing, self._key_blocks))
        copy = torch.empty(q.shape, dtype=q.dtype, device=q.device) if plans.copies_grad else None
        own = grad if copy is None else copy
        scratch = self.scratch(q.device)
        plans.prepare((out, grad), (lse, grad_lse, scratch, copy, in_order))
        plans.run((q, k, v, own), scratch, (dq, dk, dv), tables, scale)
        return dq, dk, dv

    def scratch(self, device: torch.device) -> Tensor:
        """Allocate memory for each query's logsumexp, its delta, and the fp32 sums of its dQ, if it is summed up."""
        return torch.empty(self._all_queries * (2 + self._own.sums), dtype=torch.float32, device=device)

    def plan_forward(self, tensors: Sequence[Tensor]) -> Plan:
        """Return the plan for (q, k, v, out)."""
        own, shape = self._own, self._shape
        d, blocks = own.block_d, most_blocks(self._query_blocks.rows, own.len_q, self._documents)
        fit = L2_SHARE["forward"] // (4 * d * own.len_k)
        schedule = self._order(blocks, own.len_q // self._query_blocks.rows, own.heads, fit)
        programs = blocks * own.heads
        return self._plan(
            hopper_forward.forward_kernel,
            programs,
            tensors,
            [(rows, d) for rows in (ROWS, shape.keys, shape.keys, ROWS)],
            before=(own.group, own.len_q, UNUSED, self._lo, self._hi),
            after=(
                *(blocks, schedule, 0, programs, 1, self._causal, d, own.d_used, shape.keys),
                *(shape.warpgroups, shape.stages, self._masked_tiles(ROWS, shape.keys)),
                *(shape.ping_pong, shape.q_in_registers, shape.registers),
            ),
            options=shape.options,
        )

    def plan_backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
    ) -> "AnyBackward":
        own, d = self._own, self._own.block_d
        copies_grad, meta = not suits_tma(grad), torch.device("meta")
        own_grad = torch.empty(q.shape, dtype=q.dtype, device=meta) if copies_grad else grad
        scratch, count = self.scratch(meta), self._all_queries
        lse, sums = scratch[:count], scratch[2 * count :].view(-1, 32)
        sizes = (own.heads, own.len_q, own.d)
        prepare = Plan(
            hopper_backward.prepare_kernel, count // PREPARED, own.device, (), None,
            before=(out.stride(), grad.stride(), *sizes, self._padded // PREPARED, count),
            after=(d, PREPARED, own.sums > 0), options={"num_warps": 4},
        )  # fmt: skip
        if own.in_passes:
            passes = [self._plan_pass((q, k, v, own_grad, lse, lse), each, (dq, dk, dv)) for each in passes_of(d)]
            return BackwardInPasses(prepare, passes, copies_grad)
        queries, blocks = QUERIES[d], most_blocks(KEYS, self._own.len_k, self._documents)
        programs = blocks * own.kv_heads
        fit = L2_SHARE["backward"] // (8 * d * own.len_q * own.group)
        main = self._plan(
            hopper_backward.backward_kernel,
            programs,
            (q, k, v, own_grad, lse, lse, sums, dk, dv),
            [
                *((rows, d) for rows in (queries, KEYS, KEYS, queries)),
                *((queries,), (queries,), (128, 32), (ROWS, d), (ROWS, d)),
            ],
            before=(own.heads, UNUSED, self._padded, self._lo, self._hi),
            after=(
                *(UNUSED, self._order(blocks, own.len_k // KEYS, own.kv_heads, fit), programs, 1),
                *(self._causal, False, d, own.d_used, queries),
                *(self._masked_tiles(KEYS, queries), self._window_tiles(queries), own.group, own.group),
            ),
            starts={4: 0, 5: count, 6: 2 * count},
            options={"launch_pdl": True},
        )
        finish = Plan(
            hopper_backward.finish_kernel, count // FINISHED, own.device, (), None,
            before=(dq.stride()[:3], *sizes, self._padded // FINISHED, count),
            after=(d, FINISHED), options={"num_warps": 8, "launch_pdl": True},
        )  # fmt: skip
        return Backward(prepare, main, finish, copies_grad)

    def _plan_pass(self, tensors: Sequence[Tensor], of: "PassOf", gradients: Sequence[Tensor]) -> "Pass":
        """Return one pass with its plan. `tensors`: q, k, v, the gradient of the output, lse, delta."""
        own, d = self._own, self._own.block_d
        of_q = of.has_rows_of_queries
        heads, rows, seen = (own.heads, own.len_q, own.len_k) if of_q else (own.kv_heads, own.len_k, own.len_q)
        blocks = most_blocks(KEYS, rows, self._documents)
        fit = L2_SHARE["forward"] // (4 * d * seen * (1 if of_q else own.group))
        schedule = self._order(blocks, rows // KEYS, heads, fit)
        plan = self._plan(
            hopper_passes.gradient_kernel,
            blocks * heads,
            (*tensors, *(gradients[i] for i in of.results)),
            [(ROWS, d)] * 4 + [(ROWS,)] * 2 + [(ROWS, d)] * 2,
            before=(own.heads, UNUSED, UNUSED, self._padded, self._lo, self._hi),
            after=(blocks, schedule, of.constant, self._causal, d, own.d_used, own.group),
            starts={4: 0, 5: self._all_queries},
        )
        return Pass(plan, of)

    def _plan(
        self, kernel: Any, programs: int, tensors: Sequence[Tensor], blocks: Sequence[tuple[int, ...]],
        before: tuple[Any, ...], after: tuple[Any, ...], starts: Mapping[int, int] = MappingProxyType({}),
        options: Mapping[str, int] = MappingProxyType({}),
    ) -> Plan:  # fmt: skip
        """Return a plan whose tensors TMA moves in `blocks`: (rows, d) of a document, or those of scratch memory:
        `starts`."""
        copied = tuple(i for i, t in enumerate(tensors) if not suits_tma(t))
        descriptions = []
        for i, (t, block) in enumerate(zip(tensors, blocks, strict=True)):
            shown = t.new_empty(t.shape) if i in copied else t
            shape = list(block) if i in starts else [1, 1, 1, *block]
            layout_of = gl.NVMMASharedLayout.get_default_for(shape, DTYPES[t.dtype])
            if i in starts:
                description = TensorDescription(TensorDescriptor, shown, shape, layout_of, start=starts[i])
            else:
                description = TensorDescription.ragged(TensorDescriptor, shown, shape, layout_of)
            descriptions.append(description)
        device, options = self._own.device, {"num_warps": 4, **options}
        return Plan(kernel, programs, device, copied, descriptions, before, after, options)

    def _order(self, blocks: int, full: int, heads: int, fit: int) -> "Schedule":
        """Return the schedule of a table of `blocks` lines for each head, of which at least `full` are blocks."""
        least = triton.cdiv(PACKED_ROUNDS * _multiprocessors(self._own.device) * blocks, max(full, 1))
        return order(blocks, 1, heads, fit, least)

    def _masked_tiles(self, own: int, visited: int) -> int:
        """Return number of tiles of width `visited` that the diagonal may cut for `own` rows, at least 1."""
        return _most_cut(own, visited, self._hi, self._mask.bottom_right) if self._causal else 1

    def _window_tiles(self, queries: int) -> int:
        return 0 if self._lo is None else _most_cut(KEYS, queries, -self._lo, self._mask.bottom_right)

    def _table(self, packing: Packing, blocks: Blocks) -> Tensor:
        return packing.table(blocks, self._own.len_q, self._own.len_k, self._mask.bottom_right)


def _most_cut(own: int, visited: int, bound: int, shifted: bool = False) -> int:
    """Return the maximum number of tiles of width `visited` that a bound of the band may cut for `own` rows. `shifted`:
    by any number of rows, as in documents with different numbers of queries and keys."""
    return max(_tiles_cut(own, visited, shift) for shift in (range(visited) if shifted else (bound % visited,)))


def _tiles_cut(own: int, visited: int, shift: int) -> int:
    """Return the maximum number of tiles of width `visited` that a diagonal cuts for `own` rows, which begin at a
    multiple of `own`."""
    return max(triton.cdiv((start + shift) % visited + own, visited) for start in range(0, max(own, visited), own))


def _multiprocessors(device: int | None) -> int:
    return 132 if device is None else torch.cuda.get_device_properties(device).multi_processor_count


# -- the order of units of work ---------------------------------------------------------------------------------------


class Schedule(NamedTuple):
    """Parameters with which `hopper_forward.block_and_head` finds a program's block and head."""

    units: int
    """Units of work in a section of heads."""
    section: int
    """Heads in a section, which run concurrently."""
    heads: int
    units_multiplier: int
    """Fixed-point reciprocals of the three numbers, by `reciprocal`."""
    units_shift: int
    section_multiplier: int
    section_shift: int
    heads_multiplier: int
    heads_shift: int


def order(blocks: int, batch: int, heads: int, fit: int, least: int = 0) -> Schedule:
    """Return the schedule of all blocks of all heads, in sections of about as many heads as `fit` the L2 cache, with at
    least so many units of work. All sections have the same size: a small last section would leave multiprocessors
    idle."""
    section = heads_of_section(batch * heads, blocks, fit, least)
    numbers = (section * blocks, section, heads)
    return Schedule(*numbers, *(part for n in numbers for part in reciprocal(n)))


def reciprocal(n: int) -> tuple[int, int]:
    """Return (multiplier, shift) with x // n == x * multiplier >> shift for all x from 0 to 2^31 - 1, in 64 bits."""
    shift = 31 + (n - 1).bit_length()
    return -(-(1 << shift) // n), shift


# -- plans of a call --------------------------------------------------------------------------------------------------


@dataclass
class SplitPlan:
    """The plan of a kernel that splits its work, with the plan of its combine kernel."""

    combine: Plan
    numbers: int
    """Number of fp32 values that the splits write for `combine`."""

    def allocate(self, device: torch.device) -> Tensor:
        return torch.empty(self.numbers, dtype=torch.float32, device=device)


@dataclass
class Forward:
    main: Plan
    split: SplitPlan | None = None


class Tables(NamedTuple):
    """Tables of the blocks of packed documents."""

    in_order: Tensor | None
    by_queries: Tensor | None
    by_keys: Tensor | None


NO_TABLES = Tables(None, None, None)


@dataclass
class Backward:
    prepare: Plan
    main: Plan
    finish: Plan
    copies_grad: bool
    """True if TMA cannot read the gradient's layout, so that `prepare` makes a copy."""
    split: SplitPlan | None = None

    def run(
        self, inputs: Sequence[Tensor], scratch: Tensor, gradients: Sequence[Tensor], tables: Tables, scale: float
    ) -> None:
        """Launch what follows `prepare`. `inputs`: q, k, v and the output's gradient."""
        dq, dk, dv = gradients
        partial = None if self.split is None else self.split.allocate(dq.device)
        self.main((*inputs, scratch, scratch, scratch, dk, dv), (partial, tables.by_keys), scale)
        self.finish((dq,), (scratch, tables.in_order), scale)
        if self.split is not None:
            self.split.combine((dk, dv), (partial,))


class PassOf(NamedTuple):
    """A pass of `gradient_kernel`: its constant and the gradients that it writes."""

    constant: Any
    results: tuple[int, int]
    """Which of (dq, dk, dv) it writes; a pass of one gradient names it twice, since the kernel takes two tensors."""

    @property
    def has_rows_of_queries(self) -> bool:
        return self.constant is hopper_passes.OF_Q


TWO_PASSES = (PassOf(hopper_passes.OF_Q, (0, 0)), PassOf(hopper_passes.OF_KV, (1, 2)))
THREE_PASSES = (TWO_PASSES[0], PassOf(hopper_passes.OF_K, (1, 1)), PassOf(hopper_passes.OF_V, (2, 2)))


def passes_of(block_d: int) -> tuple[PassOf, ...]:
    """Return the passes of a padded head dim: beyond 128 registers do not hold dK and dV together."""
    return THREE_PASSES if block_d > WIDEST_IN_ONE_PASS else TWO_PASSES


class Pass(NamedTuple):
    plan: Plan
    of: PassOf


@dataclass
class BackwardInPasses:
    """Gradients of queries, keys and values in two or three passes."""

    prepare: Plan
    passes: Sequence[Pass]
    copies_grad: bool

    def run(
        self, inputs: Sequence[Tensor], scratch: Tensor, gradients: Sequence[Tensor], tables: Tables, scale: float
    ) -> None:
        """Launch what follows `prepare`. `inputs`: q, k, v and the output's gradient."""
        for plan, of in self.passes:
            table = tables.by_queries if of.has_rows_of_queries else tables.by_keys
            plan((*inputs, scratch, scratch, *(gradients[i] for i in of.results)), (table,), scale)


AnyBackward = Backward | BackwardInPasses
