"""Naive attention: the oracle of the fused kernels, and the baseline they are measured against."""

import math

import torch
from torch import Tensor

from cs336_systems.kernels.flash.band import Band
from cs336_systems.kernels.flash.packing import PackedMask, Packing
from cs336_systems.kernels.ranges import part
from cs336_systems.predict.attention_model import OUTPUT, SCORES, SOFTMAX

CAUSAL = Band(hi=0)


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """Compute softmax(q k^T * scale) v with the whole score matrix in memory; causal masks are aligned top-left."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    with part(SCORES):
        weights = scores(q, k, CAUSAL if is_causal else Band(), scale)
    with part(SOFTMAX):
        weights = torch.softmax(weights, dim=-1, dtype=_wide(weights.dtype))
    with part(OUTPUT):
        return weights.to(v.dtype) @ v


def attention_and_lse(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
    """Compute naive attention with any band and grouped heads, and its logsumexp; rows that see no key give 0 and
    -inf."""
    k, v = _for_each_head(q, k), _for_each_head(q, v)
    logits = scores(q, k, band, scale).to(_wide(q.dtype))
    if band.has_empty_rows(q.shape[2], k.shape[2]):
        return _attend_with_empty_rows(logits, v)
    return torch.softmax(logits, dim=-1).to(v.dtype) @ v, torch.logsumexp(logits, dim=-1)


def packed_attention_and_lse(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, mask: PackedMask, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute naive attention within packed documents: one score matrix of all tokens, masked outside the documents."""
    seen = _visible_in_documents(packing, mask, q.shape[2], k.shape[2])
    # Rows after the last document may hold anything, and 0 times NaN is NaN: they and their gradients become 0.
    after_q, after_k = (
        (torch.arange(t.shape[2], device=t.device) >= offsets[-1])[:, None]
        for t, offsets in ((q, packing.offsets_q), (k, packing.offsets_k))
    )
    q, k, v = q.masked_fill(after_q, 0.0), k.masked_fill(after_k, 0.0), v.masked_fill(after_k, 0.0)
    k, v = _for_each_head(q, k), _for_each_head(q, v)
    logits = ((q * scale) @ k.mT).to(_wide(q.dtype)).masked_fill(~seen, -torch.inf)
    out, lse = _attend_with_empty_rows(logits, v)
    return out.masked_fill(after_q, 0.0), lse


def _for_each_head(q: Tensor, k: Tensor) -> Tensor:
    """Return keys, or values, repeated for each query head."""
    groups = q.shape[1] // k.shape[1] if k.shape[1] else 1
    return k.repeat_interleave(groups, dim=1) if groups > 1 else k


def _attend_with_empty_rows(logits: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    # softmax of a row of -inf is NaN, in its gradient too: such a row gets scores of 0, then its result is dropped.
    empty = (logits == -torch.inf).all(-1)
    logits = logits.masked_fill(empty[..., None], 0.0)
    lse = torch.logsumexp(logits, dim=-1).masked_fill(empty, -torch.inf)
    weights = torch.softmax(logits, dim=-1).masked_fill(empty[..., None], 0.0)
    return weights.to(v.dtype) @ v, lse


def _visible_in_documents(packing: Packing, mask: PackedMask, queries: int, keys: int) -> Tensor:
    """Return a (queries, keys) mask, True where the query sees the key."""
    of_query, position = _place(packing.offsets_q, queries, mask.bottom_right)
    of_key, key_position = _place(packing.offsets_k, keys, mask.bottom_right)
    distance = key_position - position[:, None]
    seen = (of_key == of_query[:, None]) & (of_key < packing.documents)
    if mask.band.lo is not None:
        seen = seen & (distance >= mask.band.lo)
    if mask.band.hi is not None:
        seen = seen & (distance <= mask.band.hi)
    return seen


def _place(offsets: Tensor, tokens: int, from_end: bool) -> tuple[Tensor, Tensor]:
    """Return the index of each row's document, and the row's distance from the document's first row, or from its
    end."""
    row = torch.arange(tokens, device=offsets.device)
    document = torch.searchsorted(offsets, row, right=True) - 1
    edge = offsets[(document + from_end).clamp(max=offsets.shape[0] - 1)]
    return document, row - edge


def scores(q: Tensor, k: Tensor, band: Band, scale: float) -> Tensor:
    """Return q k^T * scale, -inf outside the band."""
    # Scaling q instead of the scores, masking in place and reusing one name saves three (seq, seq) matrices.
    weights = (q * scale) @ k.transpose(-2, -1)
    if band.hi is not None:
        weights.masked_fill_(_ones_like_scores(weights).triu(band.hi + 1), -torch.inf)
    if band.lo is not None:
        weights.masked_fill_(_ones_like_scores(weights).tril(band.lo - 1), -torch.inf)
    return weights


def _ones_like_scores(weights: Tensor) -> Tensor:
    return torch.ones(weights.shape[-2:], dtype=torch.bool, device=weights.device)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
