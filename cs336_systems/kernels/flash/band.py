"""Causal masks and sliding windows, aligned either way, as one band of the score matrix."""

from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENTS = ("top-left", "bottom-right")

Window = int | tuple[int | None, int | None] | None


class Band(NamedTuple):
    """Query i sees key j when lo <= j - i <= hi; None: no bound on that side."""

    lo: int | None = None
    hi: int | None = None

    def has_empty_rows(self, len_q: int, len_k: int) -> bool:
        """True if some query sees no key: its output is 0, its logsumexp -inf."""
        before_first = self.hi is not None and self.hi < 0 < len_q
        after_last = self.lo is not None and len_q - 1 + self.lo > len_k - 1
        crossed = self.lo is not None and self.hi is not None and self.lo > self.hi
        return len_k == 0 or before_first or after_last or crossed

    def most_keys(self, len_k: int) -> int:
        """Return the largest number of keys that a query may see."""
        return len_k if self.lo is None or self.hi is None else max(0, min(len_k, self.hi - self.lo + 1))

    def keys_of(self, first: int, last: int, len_k: int) -> tuple[int, int]:
        """Return the half-open range of the keys that any query of first..last (both included) sees."""
        start = 0 if self.lo is None else max(0, first + self.lo)
        stop = len_k if self.hi is None else min(len_k, last + self.hi + 1)
        return start, max(start, stop)


def visible(band: Band, queries: slice, keys: slice, device: torch.device) -> Tensor:
    """Return a mask of shape (queries, keys), True where the query sees the key."""
    i = torch.arange(queries.start, queries.stop, device=device)[:, None]
    distance = torch.arange(keys.start, keys.stop, device=device) - i
    seen = torch.ones_like(distance, dtype=torch.bool)
    if band.lo is not None:
        seen &= distance >= band.lo
    if band.hi is not None:
        seen &= distance <= band.hi
    return seen


def resolve(is_causal: bool | str, window: Window, len_q: int, len_k: int) -> Band:
    """Return the band for `attention`'s arguments; raise ValueError if they are wrong."""
    if not isinstance(is_causal, bool) and is_causal not in ALIGNMENTS:
        raise ValueError(f"is_causal must be True, False, 'top-left' or 'bottom-right', got {is_causal!r}")
    left, right = _sides(window)
    if window is not None and len_q != len_k and isinstance(is_causal, bool):
        raise ValueError(
            f"window={window!r} on {len_q} queries and {len_k} keys needs an alignment: "
            f"say is_causal='top-left' or is_causal='bottom-right'"
        )
    if is_causal:
        right = 0 if right is None else min(right, 0)
    shift = len_k - len_q if is_causal == "bottom-right" else 0
    return Band(None if left is None else shift - left, None if right is None else shift + right)


def _sides(window: Window) -> tuple[int | None, int | None]:
    sides = window if isinstance(window, tuple) else (window, window)
    if len(sides) != 2 or not all(side is None or (type(side) is int and side >= 0) for side in sides):
        raise ValueError(
            f"window must be None, a whole number of at least 0, or a pair (left, right) of those, got {window!r}"
        )
    return sides
