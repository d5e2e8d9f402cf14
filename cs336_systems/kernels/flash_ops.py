"""The fused implementations as PyTorch operators, and as the two autograd Functions of the course's interface.

As operators (`torch.ops.cs336.flash_triton_forward` and so on) they are opaque to torch.compile, which keeps a graph
whole around them; each has its shape-only version, its gradient, its cast under autocast and its FLOPs.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from cs336_systems.kernels import flash_torch, layout
from cs336_systems.kernels.band import Band, resolve

_library = torch.library.Library("cs336", "DEF")


def flash(
    name: str, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention, and its logsumexp where wanted, by "flash_torch" or "flash_triton", of arguments that were checked."""
    q, k, v = cast_for_autocast(q, k, v)
    return _Flash.apply(name, q, k, v, scale, band, return_lse)


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band, return_lse: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        out, lse = _forward(name, q, k, v, scale, *band)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = name, scale, *band
        if not return_lse:
            return out
        ctx.set_materialize_grads(False)  # either result may have no gradient, and zeros would cost a pass over it
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None = None) -> Any:
        name, *settings = ctx.settings
        return None, *_gradients(name, ctx.saved_tensors, settings, grad, grad_lse), None, None, None


def _gradients(
    name: str, saved: tuple[Tensor, ...], settings: list[Any], grad: Tensor | None, grad_lse: Tensor | None
) -> tuple[Any, Any, Any]:
    q, k, v, out, lse = saved
    if grad is None and grad_lse is None:
        return None, None, None
    grad = torch.zeros_like(out) if grad is None else grad
    return _backward(name, grad, grad_lse, q, k, v, out, lse, *settings)


# -- operators --------------------------------------------------------------------------------------------------------


def _forward(name: str, *arguments: Any) -> tuple[Tensor, Tensor]:
    if _must_be_seen(arguments[0]):
        return getattr(torch.ops.cs336, f"{name}_forward").default(*arguments)
    return _run_forward(name, *arguments)


def _backward(name: str, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    if _must_be_seen(arguments[0]):
        return getattr(torch.ops.cs336, f"{name}_backward").default(*arguments)
    return _run_backward(name, *arguments)


def _must_be_seen(t: Tensor) -> bool:
    """Whether anyone looks on: a compiler, a counter of FLOPs or memory, a tensor that is not plain.

    They see operators. For nobody the operator would be called in vain, and a call costs more than a small kernel.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or not is_plain(t)
    )  # fmt: skip


def is_plain(t: Tensor) -> bool:
    """Not a subclass, such as the fake tensors of a trace."""
    return type(t) in (Tensor, nn.Parameter)


def _run_forward(name: str, q: Tensor, k: Tensor, v: Tensor, scale: float, lo: int | None, hi: int | None) -> Any:
    return _kernels(name).forward(q, k, v, scale, Band(lo, hi))


def _run_backward(name: str, *arguments: Any) -> Any:
    *tensors, scale, lo, hi = arguments
    return _kernels(name).backward(*tensors, scale, Band(lo, hi))


@functools.cache
def _kernels(name: str) -> Any:
    """The module; that of the Triton kernels imports triton, so only when it is called for."""
    if name == "flash_torch":
        return flash_torch
    from cs336_systems.kernels import flash_launch

    return flash_launch


def _register(name: str) -> None:
    _library.define(
        f"{name}_forward(Tensor q, Tensor k, Tensor v, float scale, int? lo, int? hi) -> (Tensor, Tensor)",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    _library.define(
        f"{name}_backward(Tensor grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        f"float scale, int? lo, int? hi) -> (Tensor, Tensor, Tensor)",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    forward_op = getattr(torch.ops.cs336, f"{name}_forward")
    backward_op = getattr(torch.ops.cs336, f"{name}_backward")

    def run_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return _run_forward(name, *arguments)

    def run_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _run_backward(name, *arguments)

    for device in ("CPU", "CUDA"):
        _library.impl(f"{name}_forward", run_forward, device)
        _library.impl(f"{name}_backward", run_backward, device)
        _library.impl(f"{name}_forward", _with_cast(forward_op.default, device), f"Autocast{device}")
    torch.library.register_fake(f"cs336::{name}_forward", _forward_shapes, lib=_library)
    torch.library.register_fake(f"cs336::{name}_backward", _backward_shapes, lib=_library)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:3], *output)
        ctx.settings = inputs[3:]
        ctx.set_materialize_grads(False)

    def gradients(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        return *_gradients(name, ctx.saved_tensors, ctx.settings, grad, grad_lse), None, None, None

    torch.library.register_autograd(f"cs336::{name}_forward", gradients, setup_context=keep, lib=_library)
    register_flop_formula(forward_op)(_forward_flops)
    register_flop_formula(backward_op)(_backward_flops)


def _forward_shapes(
    q: Tensor, k: Tensor, v: Tensor, scale: float, lo: int | None, hi: int | None
) -> tuple[Tensor, Tensor]:
    return layout.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))


def _backward_shapes(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return layout.empty_like(q), layout.empty_like(k), layout.empty_like(v)


def _with_cast(op: Callable, device: str) -> Callable:
    """Under autocast fp32 becomes its dtype, as for torch's own attention."""
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device}"))

    def cast_and_call(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
        q, k, v = cast_for_autocast(q, k, v)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return op(q, k, v, *settings)

    return cast_and_call


def cast_for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.dtype in (torch.float32, torch.float16, torch.bfloat16) else t for t in tensors)


def _products(q: torch.Size, k: torch.Size) -> int:
    """FLOPs of one matrix product over all scores; as in torch's counter, a mask does not make it less."""
    batch, heads, len_q, d = q
    return 2 * batch * heads * len_q * k[2] * d


def _forward_flops(q: torch.Size, k: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * _products(q, k)


def _backward_flops(grad: torch.Size, grad_lse: Any, q: torch.Size, k: torch.Size, *_: Any, **__: Any) -> int:
    """Five: the scores again, and two for each of forward's."""
    return 5 * _products(q, k)


for _name in ("flash_torch", "flash_triton"):
    _register(_name)


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
        return _course_backward(ctx, "flash_torch", grad)


class FlashAttentionTriton(torch.autograd.Function):
    """The same by the Triton kernels."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        return _course_forward(ctx, "flash_triton", q, k, v, is_causal)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _course_backward(ctx, "flash_triton", grad)


def _course_forward(ctx: Any, name: str, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    if q.dim() < 3 or q.shape[:-2] != k.shape[:-2] or k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q, k and v must be (..., seq, d) with the same leading dimensions and d, "
            f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    ctx.settings = (q.shape[-1] ** -0.5, *resolve(is_causal, None, q.shape[-2], k.shape[-2]))
    out, lse = _forward(name, _four(q), _four(k), _four(v), *ctx.settings)
    out, lse = out.view(q.shape), lse.view(q.shape[:-1])
    ctx.save_for_backward(q, k, v, out, lse)
    return out


def _course_backward(ctx: Any, name: str, grad: Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    lse = lse.view(-1, 1, lse.shape[-1])
    found = _backward(name, _four(grad), None, _four(q), _four(k), _four(v), _four(out), lse, *ctx.settings)
    return *(g.view(t.shape) for g, t in zip(found, (q, k, v), strict=True)), None


def _four(t: Tensor) -> Tensor:
    """(..., seq, d) -> (batch, 1 head, seq, d)."""
    return t.reshape(-1, 1, *t.shape[-2:])
