"""Launches the kernels of flash_triton.py: chooses tiles and describes tensors."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cs336_systems.kernels.cache import Cache
from cs336_systems.kernels.flash import flash_triton, tiles
from cs336_systems.kernels.flash import strides as layout
from cs336_systems.kernels.flash.band import Band
from cs336_systems.kernels.flash.launch_plan import Plan, suits_tma
from cs336_systems.kernels.flash.packing import Blocks, PackedMask, Packing, most_blocks
from cs336_systems.kernels.flash.tiles import LAUNCH_BOUND, WIDEST_GRAD, Key, Tile
from cs336_systems.kernels.triton_compat import INTERPRETED, TensorDescription

FP32_PRECISION = "tf32x3"
"""`input_precision` of fp32 matmuls where torch's own may not use TF32. "tf32x3" adds three TF32 matmuls of the upper
and lower halves of the operands, on the tensor cores, and its error is that of fp32; "ieee" multiplies and adds in
fp32."""

L2_SHARE = 16 << 20
"""Bytes that the heads of a section may read repeatedly; with more they evict each other from the L2 cache."""
SMALLEST_FOR_DESCRIPTORS = 0 if INTERPRETED else 1 << 21
"""Elements of q below which descriptors save less time than it takes to encode them, in problems below LAUNCH_BOUND."""
LONG_FOR_DESCRIPTORS = 2048
"""Number of keys from which descriptors pay off even in small problems: a program visits that many one tile after
another."""
WIDE_FOR_DESCRIPTORS = 1 << 28
"""Multiply-adds of one matmul from which descriptors pay off with head dims above WIDEST_GRAD. With smaller ones it is
LAUNCH_BOUND."""
WITH_TMA = (9, 10)
"""Major compute capabilities on which descriptors help. 12.x has the copy engine too, but no matrix instructions that
read shared memory, and its tiles pass through registers either way."""
UNUSED = 16
"""Placeholder for a size that a kernel does not read; a real number of keys would make Triton specialize on its
divisibility."""
LARGEST_ROW_STRIDE = 1 << 22
"""Largest row stride: offsets within a tile are 32 bits wide, so the tile's rows times this must fit."""


class Problem:
    """Plans for attention of tensors with given shapes, strides and alignment.

    q: (batch, heads, len_q, d); k, v: (batch, kv_heads, len_k, d). Forward has one plan, backward one for each layout
    of its gradient.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> None:
        self._results = layout.Results(q, k, v)
        self._has_keys = k.shape[2] > 0
        self._forward: list[Plan] | None = None
        self._backward: Cache[tuple[Any, ...], list[Plan]] = Cache()
        """Layout of the gradient -> plans; making plans takes 73 us."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> tuple[Tensor, Tensor]:
        """Return the output, in q's layout, and the logsumexp."""
        out, lse = self._results.like_q(q), self._results.logsumexp()
        tensors = (q, k, v, out)
        if self._forward is None:
            self._forward = _plan_forward(tensors, band)
        for launch in self._forward:
            launch(tensors, (lse, None), scale)
        if self._has_keys:
            return out, lse
        return out.zero_(), lse.fill_(-torch.inf)

    def backward(
        self, grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        scale: float, band: Band,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the gradients of q, k and v, each in the layout of its tensor."""
        dq, dk, dv = self._results.gradients(q, k, v)
        tensors = (q, k, v, out, grad, dq, dk, dv)
        if grad_lse is not None:
            grad_lse = grad_lse.contiguous()
        key = layout.gradient_layout_key(grad, grad_lse, out, lse)
        plans = self._backward.get(key)
        if plans is None:
            plans = self._backward[key] = _plan_backward(tensors, band)
        if len(plans) == 1:
            plans[0](tensors, (lse, grad_lse), scale)
        elif plans:
            launch_q, launch_kv = plans
            delta = torch.empty_like(lse)
            launch_q((q, k, v, out, grad, dq), (lse, grad_lse, delta, None), scale)
            launch_kv((q, k, v, grad, dk, dv), (lse, delta, None), scale)
        else:
            return dq.zero_(), dk.zero_(), dv.zero_()
        return dq, dk, dv


class PackedProblem:
    """Plans for attention inside packed documents, of tensors with given shapes, strides and alignment.

    Tensors are those of `Problem`, with a batch of 1; all documents lie along the sequence.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: PackedMask, documents: int) -> None:
        self._results = layout.Results(q, k, v)
        self._is_empty = not (q.numel() and k.numel())
        self._documents = documents
        self._plans: Cache[tuple[Any, ...], tuple[Plan, Blocks]] = Cache()
        """(kernel, layout of the gradient) -> plan and blocks."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, mask: PackedMask
    ) -> tuple[Tensor, Tensor]:
        """Return the output, in q's layout, and the logsumexp."""
        out, lse = self._results.like_q(q), self._results.logsumexp()
        if self._is_empty:
            return out.zero_(), lse.fill_(-torch.inf)
        tensors = (q, k, v, out)
        launch, blocks = self._plan("forward", tensors, mask, ())
        launch(tensors, (lse, self._table(blocks, tensors, packing, mask)), scale)
        return out, lse

    def backward(
        self, grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        packing: Packing, scale: float, mask: PackedMask,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the gradients of q, k and v, each in the layout of its tensor."""
        dq, dk, dv = self._results.gradients(q, k, v)
        if self._is_empty:
            return dq.zero_(), dk.zero_(), dv.zero_()
        if grad_lse is not None:
            grad_lse = grad_lse.contiguous()
        key, delta = layout.gradient_layout_key(grad, grad_lse, out, lse), torch.empty_like(lse)
        for_q, for_kv = (q, k, v, out, grad, dq), (q, k, v, grad, dk, dv)
        launch, blocks = self._plan("grad_q", for_q, mask, key)
        launch(for_q, (lse, grad_lse, delta, self._table(blocks, for_q, packing, mask)), scale)
        launch, blocks = self._plan("grad_kv", for_kv, mask, key)
        launch(for_kv, (lse, delta, self._table(blocks, for_kv, packing, mask)), scale)
        return dq, dk, dv

    def _plan(
        self, kernel: str, tensors: Sequence[Tensor], mask: PackedMask, key: tuple[Any, ...]
    ) -> tuple[Plan, Blocks]:
        """Return the plan of a kernel, and the blocks of its programs."""
        found = self._plans.get((kernel, key))
        if found is None:
            of, band = tile_key(kernel, tensors, mask.band, True), mask.band
            tile = tiles.choose(of, tensors[0].device, traits(kernel, tensors, band, True))
            of_keys = kernel == "grad_kv"
            blocks = Blocks(tile.block_n if of_keys else tile.block_m, of_keys, mask.order)
            found = self._plans[kernel, key] = plan(kernel, tensors, band, tile, self._documents), blocks
        return found

    def _table(self, blocks: Blocks, tensors: Sequence[Tensor], packing: Packing, mask: PackedMask) -> Tensor:
        return packing.table(blocks, tensors[0].shape[2], tensors[1].shape[2], mask.bottom_right)


def fp32_precision() -> str:
    """Return the `input_precision` of fp32 matmuls; torch's own setting decides whether it may be TF32."""
    return FP32_PRECISION if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _is_usable(t: Tensor) -> bool:
    """Return True if the kernels can read `t`: contiguous rows, not too far apart. Otherwise they get a copy."""
    return t.stride(-1) == 1 and 0 < t.stride(-2) < LARGEST_ROW_STRIDE


# -- plans ------------------------------------------------------------------------------------------------------------


SIDES = {"forward": "qkkq", "grad_q": "qkkqqq", "grad_kv": "qkkqkk", "grad": "qkkqqqkk"}
"""For each kernel, q or k for each tensor that it moves in tiles: whether the tensor's rows are queries or keys."""


def plan(
    kernel: str, tensors: Sequence[Tensor], band: Band, tile: Tile | None = None, documents: int | None = None
) -> Plan:
    """Return the plan of a kernel for the tensors of SIDES, in the kernel's order; they begin with q and k.
    `documents`: the number of documents, if they are packed along the sequence."""
    copied = tuple(i for i, t in enumerate(tensors) if not _is_usable(t))
    tensors = [t if _is_usable(t) else t.contiguous() for t in tensors]
    q, k = tensors[:2]
    (batch, heads, len_q, d), (_, kv_heads, len_k, _) = q.shape, k.shape
    packed = documents is not None
    read_k = UNUSED if packed else len_k
    key = tile_key(kernel, tensors, band, packed)
    tile = tile or tiles.choose(key, q.device, traits(kernel, tensors, band, packed))
    # A program owns a block of queries and reads keys repeatedly, or the other way round.
    if kernel == "grad_kv":
        owners, blocks = kv_heads, _blocks(len_k, tile.block_n, documents)
        bytes_read = 2 * len_q * d * q.element_size() * heads / kv_heads
    else:
        owners, blocks = heads, _blocks(len_q, tile.block_m, documents)
        bytes_read = 2 * len_k * d * q.element_size() * kv_heads / heads
    by_descriptor = key.descriptors
    block_d = padded(d)
    programs = blocks * batch * owners
    schedule: tuple[int, ...] = (blocks, batch * owners, max(1, min(batch * owners, int(L2_SHARE / bytes_read))))
    if kernel == "grad":  # all blocks of keys come after all blocks of queries
        kv_blocks = triton.cdiv(len_k, tile.block_n)
        programs += kv_blocks * batch * kv_heads
        schedule = (blocks, kv_blocks, batch * heads, batch * kv_heads)
    constants = (tile.block_m, tile.block_n, block_d, *(() if kernel == "grad" else (by_descriptor,)))
    rows = {"q": tile.block_m, "k": tile.block_n}
    return Plan(
        kernel=getattr(flash_triton, f"{kernel}_kernel"),
        programs=programs,
        device=q.device.index,
        copied=copied,
        descriptions=[
            TensorDescription(TensorDescriptor, t, [1, 1, rows[side], block_d])
            for t, side in zip(tensors, SIDES[kernel], strict=True)
        ]
        if by_descriptor
        else None,
        before=(*(tuple(t.stride()[:3]) for t in tensors), owners, heads // kv_heads, len_q, read_k, d, band),
        after=(*schedule, *constants, fp32_precision() if q.dtype == torch.float32 else "ieee"),
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
    )


def padded(d: int) -> int:
    """Return the padded head dim: tensor cores need at least 16 columns, Triton's tiles are powers of 2."""
    return max(16, triton.next_power_of_2(d))


def _blocks(length: int, rows: int, documents: int | None) -> int:
    return triton.cdiv(length, rows) if documents is None else most_blocks(rows, length, documents)


def tile_key(kernel: str, tensors: Sequence[Tensor], band: Band, packed: bool = False) -> Key:
    q, by_descriptor = tensors[0], not packed and _by_descriptor(kernel, tensors)
    return Key(kernel, 8 * q.element_size(), padded(q.shape[3]), band.hi is not None, by_descriptor)


def traits(kernel: str, tensors: Sequence[Tensor], band: Band, packed: bool = False) -> frozenset[str]:
    """Return the traits of a call for `tiles.choose`. Padding by descriptors takes no registers."""
    q, k = tensors[:2]
    holds = {
        "window": band.lo is not None,
        "grouped": q.shape[1] != k.shape[1],
        "packed": packed,
        "padded": q.shape[3] != padded(q.shape[3]) and (packed or not _by_descriptor(kernel, tensors)),
    }
    return frozenset(trait for trait, held in holds.items() if held)


def _by_descriptor(kernel: str, tensors: Sequence[Tensor]) -> bool:
    """Return True if TMA can, and should, move all of these tensors."""
    q, keys = tensors[0], tensors[1].shape[2]
    work = LAUNCH_BOUND if q.shape[3] <= WIDEST_GRAD else WIDE_FOR_DESCRIPTORS
    return (
        kernel != "grad"
        and (INTERPRETED or torch.cuda.get_device_capability(q.device)[0] in WITH_TMA)
        and q.element_size() == 2
        and (q.numel() >= SMALLEST_FOR_DESCRIPTORS or keys >= LONG_FOR_DESCRIPTORS or q.numel() * keys >= work)
        and all(map(suits_tma, tensors))
    )


def _plan_forward(tensors: Sequence[Tensor], band: Band) -> list[Plan]:
    """Return the plan of forward; none without queries or without keys."""
    return [plan("forward", tensors, band)] if all(t.numel() for t in tensors) else []


def _plan_backward(tensors: Sequence[Tensor], band: Band) -> list[Plan]:
    """Return the plans of backward: one kernel for small problems, else two."""
    q, k, v, out, grad, dq, dk, dv = tensors
    if not all(t.numel() for t in tensors):
        return []
    if q.numel() * k.shape[2] < LAUNCH_BOUND and q.element_size() == 2 and q.shape[3] <= WIDEST_GRAD:
        return [plan("grad", tensors, band)]
    return [plan("grad_q", (q, k, v, out, grad, dq), band), plan("grad_kv", (q, k, v, grad, dk, dv), band)]
