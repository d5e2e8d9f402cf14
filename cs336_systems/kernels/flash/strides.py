"""Memory layouts: cache keys for tensors that kernels treat alike, and layouts of the results."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def layout_key(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """Return all that plans for attention of q, k and v depend on, including alignment, because compiled code depends
    on it."""
    try:
        return (
            q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
            q.data_ptr() % 16, k.data_ptr() % 16, v.data_ptr() % 16,
        )  # fmt: skip
    except AttributeError:  # a check before would cost every call
        require_tensors(q, k, v)
        raise


def require_tensors(q: Any, k: Any, v: Any) -> None:
    """Raise TypeError, in one line, for an argument of attention that is no tensor."""
    for name, value in (("q", q), ("k", k), ("v", v)):
        if not isinstance(value, Tensor):
            raise TypeError(f"attention takes tensors, and {name} is of type {type(value).__name__}")


def gradient_layout_key(grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor) -> tuple[Any, ...]:
    """Return all that plans for the backward pass depend on, besides q, k and v."""
    return (
        grad.stride(), out.stride(), grad.data_ptr() % 16, out.data_ptr() % 16, lse.data_ptr() % 16,
        None if grad_lse is None else grad_lse.data_ptr() % 16,
    )  # fmt: skip


def empty_like(t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialised dense tensor, with heads or rows outermost as in `t`.

    A model's q is often a transposed view of (batch, seq, heads, d), or of a part of that where q, k and v are one
    tensor; an output of that layout flattens without a copy.
    """
    batch, heads, rows, d = t.shape
    dtype = dtype or t.dtype
    if heads > 1 and rows > 1 and t.stride(1) < t.stride(2):
        return torch.empty((batch, rows, heads, d), dtype=dtype, device=t.device).transpose(1, 2)
    return torch.empty(t.shape, dtype=dtype, device=t.device)


class Results:
    """Allocates the results of attention of tensors like q, k and v."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor):
        self.device = q.device
        self.rows = q.shape[:-1]
        self.row_strides = torch.empty(self.rows, device="meta").stride()
        self.like_q, self.like_k, self.like_v = _allocator(q), _allocator(k), _allocator(v)

    def logsumexp(self) -> Tensor:
        # Half the time that `torch.empty` takes.
        return torch.empty_strided(self.rows, self.row_strides, dtype=torch.float32, device=self.device)

    def gradients(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.like_q(q), self.like_k(k), self.like_v(v)


def _allocator(t: Tensor) -> Callable[[Tensor], Tensor]:
    """Return `torch.empty_like`, which takes a third of the time, if it gives the same layout; else `empty_like`."""
    shadow = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    return torch.empty_like if torch.empty_like(shadow).stride() == empty_like(shadow).stride() else empty_like
