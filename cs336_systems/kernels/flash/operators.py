"""The fused implementations as PyTorch operators, and as the two autograd Functions of the course's interface.

As operators (`torch.ops.cs336.flash_triton_forward` and so on) they are opaque to torch.compile, which keeps a graph
whole around them; each has its shape-only version, its gradient, its cast under autocast and its FLOPs. They are
registered by dispatch.py.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from cs336_systems.kernels.cache import Cache
from cs336_systems.kernels.flash import strides as layout
from cs336_systems.kernels.flash.band import Band, resolve

CAST = (torch.float32, torch.float16, torch.bfloat16)
"""Floating-point dtypes that autocast casts."""

LIBRARY = torch.library.Library("cs336", "DEF")
"""The package's operators."""


class Kernels(Protocol):
    """A fused implementation for tensors of one layout."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> tuple[Tensor, Tensor]:
        """Return output and logsumexp."""

    def backward(
        self, grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        scale: float, band: Band,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the gradients of q, k and v."""


KernelsFor = Callable[[Tensor, Tensor, Tensor, Band], Kernels]
"""Builds the kernels for tensors like q, k and v."""


class Call(NamedTuple):
    """A resolved call of a fused implementation, without its tensors."""

    name: str
    kernels: Any
    """Kernels, or Operators under tracing."""
    scale: float
    band: Band
    return_lse: bool


def fused(name: str, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band, return_lse: bool) -> Callable[..., Any]:
    """Return attention by a fused implementation as a function of tensors that were checked and have these tensors'
    layout."""
    dtype = autocast_dtype(q)
    if dtype is not None and any(t.dtype in CAST and t.dtype != dtype for t in (q, k, v)):

        def cast_first(q: Tensor, k: Tensor, v: Tensor) -> Any:
            q, k, v = cast_for_autocast(q, k, v)
            return fused(name, q, k, v, scale, band, return_lse)(q, k, v)

        return cast_first
    if is_traced(q):
        call = Call(name, OPERATORS[name], scale, band, return_lse)
        return lambda q, k, v: _Flash.apply(q, k, v, call)
    return functools.partial(_run_eagerly, Call(name, kernels_for(name, q, k, v, band), scale, band, return_lse))


def _run_eagerly(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _apply(q, k, v, call)
    _, kernels, scale, band, return_lse = call
    out, lse = kernels.forward(q, k, v, scale, band)
    return (out, lse) if return_lse else out


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | tuple[Tensor, Tensor]:
        _, kernels, scale, band, return_lse = call
        out, lse = kernels.forward(q, k, v, scale, band)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        if not return_lse:
            return out
        ctx.set_materialize_grads(False)  # either result may have no gradient, and zeros would cost a pass over it
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None = None) -> Any:
        dq, dk, dv = _gradients(ctx.call, ctx.saved_tensors, grad, grad_lse)
        return dq, dk, dv, None


_apply: Callable[..., Any] = super(torch.autograd.Function, _Flash).apply  # type: ignore[misc]
"""`_Flash.apply` without its handling of functorch transforms, for calls that are not traced."""


def _gradients(
    call: Call, saved: Sequence[Tensor], grad: Tensor | None, grad_lse: Tensor | None
) -> tuple[Any, Any, Any]:
    name, kernels, scale, band, _ = call
    if grad is None:
        if grad_lse is None:
            return None, None, None
        grad = torch.zeros_like(saved[3])
    if is_traced(grad):
        kernels = OPERATORS[name]
    return kernels.backward(grad, grad_lse, *saved, scale, band)


def is_traced(t: Tensor) -> bool:
    """Return True if calls must go through PyTorch's dispatcher: under torch.compile, a counter of FLOPs or memory, a
    functorch transform, or with a tensor subclass. Other calls skip it: an operator costs more than a small kernel."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or not is_plain(t)
    )


def is_plain(t: Tensor) -> bool:
    """Return True unless `t` is of a subclass, such as the fake tensors of a trace."""
    return type(t) in (Tensor, nn.Parameter)


# -- kernels by layout ------------------------------------------------------------------------------------------------


_factories: dict[str, KernelsFor] = {}
_kernels: Cache[tuple[Any, ...], Kernels] = Cache()
"""Name, layout, band and fp32 precision -> kernels with their launch plans, for calls that dispatch.py does not
resolve: the operators and the course's Functions. One lookup for both passes saved 10 us."""


def kernels_for(name: str, q: Tensor, k: Tensor, v: Tensor, band: Band) -> Kernels:
    key = (name, layout.layout_key(q, k, v), band, torch.get_float32_matmul_precision())
    found = _kernels.get(key)
    if found is None:
        found = _kernels[key] = _factories[name](q, k, v, band)
    return found


# -- operators --------------------------------------------------------------------------------------------------------


class Operators:
    """Kernels called through PyTorch's dispatcher."""

    def __init__(self, name: str):
        self._forward = getattr(torch.ops.cs336, f"{name}_forward").default
        self._backward = getattr(torch.ops.cs336, f"{name}_backward").default

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> tuple[Tensor, Tensor]:
        return self._forward(q, k, v, scale, *band)

    def backward(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, scale, band = arguments
        return self._backward(*tensors, scale, *band)


OPERATORS: dict[str, Operators] = {}


def register(name: str, kernels: KernelsFor) -> None:
    """Define the operators of a fused implementation."""
    _factories[name] = kernels
    LIBRARY.define(
        f"{name}_forward(Tensor q, Tensor k, Tensor v, float scale, int? lo, int? hi) -> (Tensor, Tensor)",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    LIBRARY.define(
        f"{name}_backward(Tensor grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        f"float scale, int? lo, int? hi) -> (Tensor, Tensor, Tensor)",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    forward_op = getattr(torch.ops.cs336, f"{name}_forward")
    backward_op = getattr(torch.ops.cs336, f"{name}_backward")

    def run_forward(
        q: Tensor, k: Tensor, v: Tensor, scale: float, lo: int | None, hi: int | None
    ) -> tuple[Tensor, Tensor]:
        band = Band(lo, hi)
        return kernels_for(name, q, k, v, band).forward(q, k, v, scale, band)

    def run_backward(
        grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        scale: float, lo: int | None, hi: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        band = Band(lo, hi)
        return kernels_for(name, q, k, v, band).backward(grad, grad_lse, q, k, v, out, lse, scale, band)

    for device in ("CPU", "CUDA"):
        LIBRARY.impl(f"{name}_forward", run_forward, device)
        LIBRARY.impl(f"{name}_backward", run_backward, device)
        LIBRARY.impl(f"{name}_forward", with_cast(forward_op.default, device), f"Autocast{device}")
    torch.library.register_fake(f"cs336::{name}_forward", _forward_shapes, lib=LIBRARY)
    torch.library.register_fake(f"cs336::{name}_backward", _backward_shapes, lib=LIBRARY)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, scale, lo, hi = inputs
        ctx.save_for_backward(q, k, v, *output)
        ctx.call = Call(name, OPERATORS[name], scale, Band(lo, hi), True)
        ctx.set_materialize_grads(False)

    def gradients(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        return *_gradients(ctx.call, ctx.saved_tensors, grad, grad_lse), None, None, None

    torch.library.register_autograd(f"cs336::{name}_forward", gradients, setup_context=setup_context, lib=LIBRARY)
    register_flop_formula(forward_op)(_forward_flops)
    register_flop_formula(backward_op)(_backward_flops)
    OPERATORS[name] = Operators(name)


def _forward_shapes(
    q: Tensor, k: Tensor, v: Tensor, scale: float, lo: int | None, hi: int | None
) -> tuple[Tensor, Tensor]:
    return layout.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))


def _backward_shapes(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return layout.empty_like(q), layout.empty_like(k), layout.empty_like(v)


def with_cast(op: Callable, device: str) -> Callable:
    """Return the operator with inputs cast to autocast's dtype, as in torch's own attention."""
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device}"))

    def cast_and_call(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
        q, k, v = cast_for_autocast(q, k, v)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return op(q, k, v, *settings)

    return cast_and_call


def cast_for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    dtype = autocast_dtype(tensors[0])
    return tensors if dtype is None else tuple(t.to(dtype) if t.dtype in CAST else t for t in tensors)


def autocast_dtype(t: Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast casts; None if it is off."""
    if not torch._C._is_any_autocast_enabled():  # a tenth of the time that the query for one device type takes
        return None
    device = t.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _matmul_flops(q: torch.Size, k: torch.Size) -> int:
    """Return the FLOPs of one matmul over all scores; as in torch's counter, a mask does not reduce them."""
    batch, heads, len_q, d = q
    return 2 * batch * heads * len_q * k[2] * d


def _forward_flops(q: torch.Size, k: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * _matmul_flops(q, k)


def _backward_flops(grad: torch.Size, grad_lse: Any, q: torch.Size, k: torch.Size, *_: Any, **__: Any) -> int:
    """Return the FLOPs of backward's five matmuls: the scores again, and two for each of forward's two."""
    return 5 * _matmul_flops(q, k)


# -- the course's interface -------------------------------------------------------------------------------------------


class FlashAttentionTorch(torch.autograd.Function):
    """`apply(q, k, v, is_causal=False)` on (..., seq, d), tiled in plain PyTorch.

    Keeps q, k, v, the output, and one tensor of shape (..., seq): the logsumexp, in natural logarithm.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        return _course_forward(ctx, "flash_torch", q, k, v, is_causal)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _course_backward(ctx, grad)


class FlashAttentionTriton(torch.autograd.Function):
    """`apply(q, k, v, is_causal=False)` on (..., seq, d), by the Triton kernels."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        return _course_forward(ctx, "flash_triton", q, k, v, is_causal)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _course_backward(ctx, grad)


def _course_forward(ctx: Any, name: str, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    if q.dim() < 3 or q.shape[:-2] != k.shape[:-2] or k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q, k and v must be (..., seq, d) with the same leading dimensions and d, "
            f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if name == "flash_triton" and q.is_cpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "FlashAttentionTriton runs on a CUDA GPU and these tensors are on the CPU; use FlashAttentionTorch"
        )
    scale, band = q.shape[-1] ** -0.5, resolve(is_causal, None, q.shape[-2], k.shape[-2])
    four = _as_4d(q), _as_4d(k), _as_4d(v)
    kernels = OPERATORS[name] if is_traced(q) else kernels_for(name, *four, band)
    out, lse = kernels.forward(*four, scale, band)
    out, lse = out.view(q.shape), lse.view(q.shape[:-1])
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.call = Call(name, kernels, scale, band, False)
    return out


def _course_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    four = _as_4d(q), _as_4d(k), _as_4d(v), _as_4d(out), lse.view(-1, 1, lse.shape[-1])
    found = _gradients(ctx.call, four, _as_4d(grad), None)
    return *(g.view(t.shape) for g, t in zip(found, (q, k, v), strict=True)), None


def _as_4d(t: Tensor) -> Tensor:
    """Return (..., seq, d) as (batch, 1 head, seq, d)."""
    return t.reshape(-1, 1, *t.shape[-2:])
