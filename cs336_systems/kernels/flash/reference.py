"""Naive attention: the oracle of the fused kernels, and the baseline they are measured against."""

import math

import torch
from torch import Tensor

from cs336_systems.kernels.flash.band import Band
from cs336_systems.kernels.ranges import part
from cs336_systems.predict.attention_model import OUTPUT, SCORES, SOFTMAX

CAUSAL = Band(hi=0)


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """softmax(q k^T * scale) v with the whole score matrix in memory; causal masks are aligned top-left."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    with part(SCORES):
        weights = scores(q, k, CAUSAL if is_causal else Band(), scale)
    with part(SOFTMAX):
        weights = torch.softmax(weights, dim=-1, dtype=_wide(weights.dtype))
    with part(OUTPUT):
        return weights.to(v.dtype) @ v


def attention_and_lse(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
    """Naive attention with any band and grouped heads, and its logsumexp; rows that see no key give 0 and -inf."""
    groups = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = (t.repeat_interleave(groups, dim=1) if groups > 1 else t for t in (k, v))
    logits = scores(q, k, band, scale).to(_wide(q.dtype))
    lse = torch.logsumexp(logits, dim=-1)
    if band.has_empty_rows(q.shape[2], k.shape[2]):
        # softmax of a row of -inf is NaN, in its gradient too: such a row gets scores of 0, then its result is dropped.
        empty = lse == -torch.inf
        logits = logits.masked_fill(empty[..., None], 0.0)
        lse = torch.logsumexp(logits, dim=-1).masked_fill(empty, -torch.inf)
        weights = torch.softmax(logits, dim=-1).masked_fill(empty[..., None], 0.0)
    else:
        weights = torch.softmax(logits, dim=-1)
    return weights.to(v.dtype) @ v, lse


def scores(q: Tensor, k: Tensor, band: Band, scale: float) -> Tensor:
    """q k^T * scale, -inf outside the band."""
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
