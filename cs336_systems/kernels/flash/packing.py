"""Packed documents: where each begins, for attention that stays inside them."""

import importlib
import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cs336_systems.kernels.cache import Cache
from cs336_systems.kernels.flash.band import Band

FIELDS = 8
"""Number of fields in a line of a table of blocks; see packing_triton.py."""


class Document(NamedTuple):
    """Row ranges of one document among the queries and among the keys."""

    queries: slice
    keys: slice


class Blocks(NamedTuple):
    """The blocks assigned to a kernel's programs, and their order."""

    rows: int
    of_keys: bool
    """True for blocks of keys, False for blocks of queries."""
    order: str
    """Order of the blocks: "AS_PACKED", "LONGEST_FIRST" or "DIAGONAL"; see packing_triton.py."""


class PackedMask(NamedTuple):
    """Mask inside every document."""

    band: Band
    """Band aligned to the first query and the first key of a document."""
    bottom_right: bool
    """True if the band is aligned to the last query and the last key instead."""

    @property
    def order(self) -> str:
        """Order in which the blocks with the most work come first."""
        return "LONGEST_FIRST" if self.band.hi is None else "DIAGONAL"

    def of(self, document: Document) -> Band:
        """Return the band of one document."""
        (lo, hi), shift = self.band, _length(document.keys) - _length(document.queries) if self.bottom_right else 0
        return Band(None if lo is None else lo + shift, None if hi is None else hi + shift)


def _length(rows: slice) -> int:
    return rows.stop - rows.start


class Packing:
    """Documents that lie one after another in (tokens, heads, d) tensors.

    `cu_seqlens_q`, int32 on the tensors' device, has the first row of every document and the end of the last: 0, 5, 9
    for documents of 5 and 4 rows. Equal neighbours are an empty document. Rows after the last offset belong to no
    document. `cu_seqlens_k` has the same for the keys; without it they are packed as the queries are.

    `attention` takes a Packing in place of the offsets. The tables that tell each program of a kernel its block are
    then made once, and not for every layer of a model. They hold for the offsets as they were at the first use: after a
    change of the offsets in place make a new Packing, and under a CUDA graph make it inside the graph.
    """

    def __init__(self, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None) -> None:
        for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            if offsets is not None or name == "cu_seqlens_q":
                _check(name, offsets)
        if cu_seqlens_k is not None and cu_seqlens_k.shape != cu_seqlens_q.shape:
            raise ValueError(
                f"cu_seqlens_q and cu_seqlens_k must have as many documents, got {cu_seqlens_q.shape[0] - 1} and "
                f"{cu_seqlens_k.shape[0] - 1}; repeat an offset for a document without rows"
            )
        self.is_shared = cu_seqlens_k is None or cu_seqlens_k is cu_seqlens_q
        """True if keys are packed like queries, so that both alignments of a mask are equal."""
        self.offsets_q = cu_seqlens_q.contiguous()
        self.offsets_k = self.offsets_q if cu_seqlens_k is None else cu_seqlens_k.contiguous()
        self._tables: dict[tuple[Any, ...], Tensor] = {}

    @property
    def documents(self) -> int:
        return self.offsets_q.shape[0] - 1

    def table(self, blocks: Blocks, queries: int, keys: int, bottom_right: bool) -> Tensor:
        """Return the table of blocks for this number of queries and keys, made by the GPU without waiting for it."""
        key = (*blocks, queries, keys, bottom_right)
        if key not in self._tables:
            self._tables[key] = _make_table(self, blocks, queries, keys, bottom_right)
        return self._tables[key]

    def slices(self, queries: int, keys: int) -> list[Document]:
        """Return the documents, on the host; raise ValueError if offsets are not in order. Waits for the device."""
        both = [_ranges("cu_seqlens_q", self.offsets_q, queries), _ranges("cu_seqlens_k", self.offsets_k, keys)]
        return [Document(*pair) for pair in zip(*both, strict=True)]


def most_blocks(rows: int, tokens: int, documents: int) -> int:
    """Return the maximum number of blocks of `rows` rows for any documents with this many tokens: each document, and
    the rows after the last, may end in a partial block. Rounded up to a multiple of 16, so that Triton compiles one
    kernel."""
    return -(-(tokens // rows + documents + 1) // 16) * 16


_plans: Cache[tuple[Any, ...], Any] = Cache()
"""Sizes and options -> launch of the kernel that fills a table."""


def _make_table(packing: Packing, blocks: Blocks, queries: int, keys: int, bottom_right: bool) -> Tensor:
    device, documents = packing.offsets_q.device, packing.documents
    lines = most_blocks(blocks.rows, keys if blocks.of_keys else queries, documents)
    key = (device, documents, blocks, queries, keys, bottom_right)
    plan = _plans.get(key)
    if plan is None:
        kernels = importlib.import_module("cs336_systems.kernels.flash.packing_triton")
        launching = importlib.import_module("cs336_systems.kernels.flash.launch_plan")
        plan = _plans[key] = launching.Plan(
            kernels.documents_kernel, documents + 1, device.index, (), None,
            before=(documents, queries, keys, lines),
            after=(blocks.rows, blocks.of_keys, getattr(kernels, blocks.order).value, bottom_right),
            options={"num_warps": 4},
        )  # fmt: skip
    table = torch.zeros(lines * FIELDS, dtype=torch.int32, device=device)
    plan((table, packing.offsets_q, packing.offsets_k), ())
    return table


def _ranges(name: str, offsets: Tensor, tokens: int) -> list[slice]:
    found = offsets.tolist()
    if found[0] != 0 or found[-1] > tokens or any(a > b for a, b in itertools.pairwise(found)):
        shown = ", ".join(map(str, found[:8])) + (", ..." if len(found) > 8 else "")
        raise ValueError(
            f"{name} must begin with 0, never decrease and end at {tokens} tokens or before, got {shown}; "
            f"it has the first row of every document and the end of the last"
        )
    return [slice(a, b) for a, b in itertools.pairwise(found)]


def _check(name: str, offsets: Any) -> None:
    if not isinstance(offsets, Tensor):
        raise ValueError(
            f"{name} must be an int32 tensor of offsets, got {type(offsets).__name__}; "
            f"use torch.tensor([0, ...], dtype=torch.int32, device=q.device)"
        )
    if offsets.dtype != torch.int32:
        kind = str(offsets.dtype).removeprefix("torch.")
        raise ValueError(f"{name} must be int32, got {kind}; cast it with .to(torch.int32)")
    if offsets.dim() != 1 or offsets.shape[0] == 0:
        raise ValueError(
            f"{name} must have the shape (documents + 1,), got {tuple(offsets.shape)}; "
            f"begin with 0 and give the end of every document"
        )
