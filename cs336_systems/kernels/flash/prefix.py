"""Causal attention of queries at the end of a sequence of keys, as separate forward and backward passes: the caller's
autograd function chooses what to keep between them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cs336_systems.kernels.flash.band import resolve
from cs336_systems.kernels.flash.dispatch import IMPLEMENTATIONS, attention, choose
from cs336_systems.kernels.flash.operators import OPERATORS, is_traced, kernels_for

ALIGNED = "bottom-right"


class PrefixAttention(NamedTuple):
    """The passes of an implementation, or of the best one for q and k ("auto")."""

    impl: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return output and logsumexp; the logsumexp is None if the implementation has no separate backward pass."""
        impl = self._resolved(q, k)
        if IMPLEMENTATIONS[impl].kernels is None:
            return attention(q, k, v, is_causal=ALIGNED, impl=impl), None
        return attention(q, k, v, is_causal=ALIGNED, impl=impl, return_lse=True)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return the gradients of q, k and v. Without a logsumexp the forward pass is recomputed."""
        impl = self._resolved(q, k)
        if lse is None:
            with torch.enable_grad():
                inputs = [t.detach().requires_grad_() for t in (q, k, v)]
                return torch.autograd.grad(attention(*inputs, is_causal=ALIGNED, impl=impl), inputs, grad)
        band = resolve(ALIGNED, None, q.shape[2], k.shape[2])
        kernels: Any = OPERATORS[impl] if is_traced(q) else kernels_for(impl, q, k, v, band)
        return kernels.backward(grad, None, q, k, v, out, lse, q.shape[-1] ** -0.5, band)

    def _resolved(self, q: Tensor, k: Tensor) -> str:
        if self.impl != "auto":
            return self.impl
        return choose(q, k, resolve(ALIGNED, None, q.shape[2], k.shape[2]), return_lse=True)
