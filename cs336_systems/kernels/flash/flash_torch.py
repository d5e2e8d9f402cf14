"""FlashAttention-2's tiling in plain PyTorch, on any device: the version to learn from, and the one for CPUs.

Forward makes one pass over tiles of keys and keeps, for each query, the running maximum of its scores (m), the sum of
exp(score - m) (l) and the weighted sum of values (acc). When a tile has a larger score, the sums so far are rescaled by
exp(m_old - m_new). Only the output and the logsumexp m + log(l) are saved.

Backward computes the weights again, tile by tile, as P = exp(S - logsumexp). With dP = dO V^T the gradient of the
scores is dS = P * (dP - D), where D = rowsum(O * dO) is the sum over the whole row in softmax's derivative.

Shapes: q (batch, kv_heads, group, len_q, d); k, v (batch, kv_heads, 1, len_k, d): query heads that share a KV head are
one dimension of q, so that grouped-query attention broadcasts and nothing is copied.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from cs336_systems.kernels.flash import strides as layout
from cs336_systems.kernels.flash.band import Band, visible
from cs336_systems.kernels.flash.packing import PackedMask, Packing

TILE_Q, TILE_K = 256, 512
"""Queries and keys of a tile: small enough for a core's cache at common head dims, large enough to hide Python's
overhead."""
MAX_TILES = 32
"""Maximum number of tiles along a sequence. Longer ones get larger tiles: each costs a dozen kernel launches."""


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> tuple[Tensor, Tensor]:
    """Return the output in q's dtype and the logsumexp (natural logarithm) for q (batch, heads, len_q, d) and grouped
    k, v."""
    with torch.autocast(q.device.type, enabled=False):  # it would round the scores and weights of 16-bit inputs
        return _forward(q, k, v, scale, band)


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> tuple[Tensor, Tensor]:
    out = layout.empty_like(q)
    lse = q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
    grouped_out, grouped_lse = _group(out, k), _group(lse, k)
    q, k, v = _group(q, k), k[:, :, None], v[:, :, None]
    for rows, tiles in _tiles(q.shape[-2], k.shape[-2], band):
        q_tile = q[..., rows, :].to(lse.dtype) * scale
        m = torch.full(q_tile.shape[:-1], -torch.inf, dtype=lse.dtype, device=q.device)
        l = torch.zeros_like(m)
        acc = torch.zeros_like(q_tile)
        for columns in tiles:
            s = q_tile @ k[..., columns, :].to(lse.dtype).mT
            _mask(s, rows, columns, band)
            m_new = torch.maximum(m, s.amax(-1))
            shift = m_new.clamp_min(torch.finfo(m.dtype).min)  # a row that has seen no key: exp(-inf - shift) is 0
            p = torch.exp(s - shift[..., None])
            old = torch.exp(m - shift)
            l = l * old + p.sum(-1)
            acc = acc * old[..., None] + p @ v[..., columns, :].to(lse.dtype)
            m = m_new
        grouped_out[..., rows, :] = torch.where(l[..., None] > 0, acc / l[..., None], 0.0).to(out.dtype)
        grouped_lse[..., rows] = m + torch.log(l)
    return out, lse


def backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    band: Band,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    wide = lse.dtype
    delta = (out.to(wide) * grad.to(wide)).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse.to(wide)  # d lse / d S is P, so its gradient is subtracted from D
    dq, dk, dv = (layout.empty_like(t, dtype=wide).zero_() for t in (q, k, v))
    q_all, grad_all, lse_all, delta_all, dq_all = (_group(t, k) for t in (q, grad, lse, delta, dq))
    k_all, v_all = k[:, :, None], v[:, :, None]
    for rows, tiles in _tiles(q.shape[-2], k.shape[-2], band):
        q_tile, grad_tile = q_all[..., rows, :].to(wide), grad_all[..., rows, :].to(wide)
        # Rows that saw no key have -inf here; all their scores are hidden, and exp(-inf - 0) is 0.
        lse_tile = torch.nan_to_num(lse_all[..., rows], neginf=0.0)[..., None]
        delta_tile = delta_all[..., rows, None]
        for columns in tiles:
            k_tile, v_tile = k_all[..., columns, :].to(wide), v_all[..., columns, :].to(wide)
            s = (q_tile * scale) @ k_tile.mT
            _mask(s, rows, columns, band)
            p = torch.exp(s - lse_tile)
            ds = p * (grad_tile @ v_tile.mT - delta_tile)
            dq_all[..., rows, :] += ds @ k_tile
            dk[..., columns, :] += (ds.mT @ q_tile).sum(2)
            dv[..., columns, :] += (p.mT @ grad_tile).sum(2)
    return (dq * scale).to(q.dtype), (dk * scale).to(k.dtype), dv.to(v.dtype)


# -- packed documents -------------------------------------------------------------------------------------------------


def forward_packed(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, mask: PackedMask
) -> tuple[Tensor, Tensor]:
    """Compute `forward` within each document; documents lie along the sequence of a batch of 1. Waits for the device,
    once."""
    out = layout.empty_like(q).zero_()
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    for document in packing.slices(q.shape[2], k.shape[2]):
        rows, keys = document
        own = (q[:, :, rows], k[:, :, keys], v[:, :, keys])
        out[:, :, rows], lse[:, :, rows] = forward(*own, scale, mask.of(document))
    return out, lse


def backward_packed(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    packing: Packing,
    scale: float,
    mask: PackedMask,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `backward` within each document."""
    dq, dk, dv = (layout.empty_like(t).zero_() for t in (q, k, v))
    for document in packing.slices(q.shape[2], k.shape[2]):
        rows, keys = document
        seen = (k[:, :, keys], v[:, :, keys], out[:, :, rows], lse[:, :, rows])
        own_lse = None if grad_lse is None else grad_lse[:, :, rows]
        found = backward(grad[:, :, rows], own_lse, q[:, :, rows], *seen, scale, mask.of(document))
        dq[:, :, rows], dk[:, :, keys], dv[:, :, keys] = found
    return dq, dk, dv


# -- tiles ------------------------------------------------------------------------------------------------------------


def _group(t: Tensor, k: Tensor) -> Tensor:
    """Return a view of (batch, heads, ...) as (batch, kv_heads, group, ...)."""
    kv_heads = k.shape[1]
    return t.unflatten(1, (kv_heads, t.shape[1] // kv_heads if kv_heads else 0))


def _tiles(len_q: int, len_k: int, band: Band) -> Iterator[tuple[slice, list[slice]]]:
    """Yield slices of queries, each with the slices of keys that any of its queries sees."""
    tile_q, tile_k = max(TILE_Q, -(-len_q // MAX_TILES)), max(TILE_K, -(-len_k // MAX_TILES))
    for first in range(0, len_q, tile_q):
        last = min(first + tile_q, len_q) - 1
        start, stop = band.keys_of(first, last, len_k)
        yield slice(first, last + 1), [slice(n, min(n + tile_k, stop)) for n in range(start, stop, tile_k)]


def _mask(s: Tensor, rows: slice, columns: slice, band: Band) -> None:
    """Set the scores outside the band to -inf, in place."""
    first, last = columns.start - (rows.stop - 1), columns.stop - 1 - rows.start  # the smallest and largest j - i
    if (band.hi is None or last <= band.hi) and (band.lo is None or first >= band.lo):
        return
    s.masked_fill_(~visible(band, rows, columns, s.device), -torch.inf)
