"""The fused implementations as PyTorch operators, and as the two autograd Functions of the course's interface.

As operators (`torch.ops.cs336.flash_triton_forward` and so on) they are opaque to torch.compile, which keeps a graph
whole around them; each has its shape-only version, its gradient, its cast under autocast and its FLOPs.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from cs336_systems.kernels import flash_torch, layout
from cs336_systems.kernels.band import Band, resolve

LAUNCHERS = {"flash_triton": "flash_launch", "flash_hopper": "hopper_launch"}

_library = torch.library.Library("cs336", "DEF")


def flash(settings: tuple[str, float, Band, bool], q: Tensor, k: Tensor, v: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    """Attention, of arguments that were checked. `settings`: which of OPERATORS, the scale, the band, and whether the
    logsumexp is wanted, too."""
    q, k, v = cast_for_autocast(q, k, v)
    if not _must_be_seen(q) and not (
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    ):
        name, scale, band, return_lse = settings
        out, lse = _bare(name, q, k, v, band).forward(q, k, v, scale, band)
        return (out, lse) if return_lse else out
    return _Flash.apply(q, k, v, settings)


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, settings: tuple[str, float, Band, bool]
    ) -> Tensor | tuple[Tensor, Tensor]:
        name, scale, band, return_lse = settings
        kernels = _kernels(name, q, k, v, band)
        out, lse = kernels.forward(q, k, v, scale, band)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = name, kernels, scale, band
        if not return_lse:
            return out
        ctx.set_materialize_grads(False)  # either result may have no gradient, and zeros would cost a pass over it
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None = None) -> Any:
        return *_gradients(ctx.settings, ctx.saved_tensors, grad, grad_lse), None


def _gradients(
    settings: tuple[str, Any, float, Band], saved: Sequence[Tensor], grad: Tensor | None, grad_lse: Tensor | None
) -> tuple[Any, Any, Any]:
    name, kernels, scale, band = settings
    if grad is None:
        if grad_lse is None:
            return None, None, None
        grad = torch.zeros_like(saved[3])
    if _must_be_seen(grad):
        kernels = OPERATORS[name]
    return kernels.backward(grad, grad_lse, *saved, scale, band)


# -- which kernels ----------------------------------------------------------------------------------------------------


def _kernels(name: str, q: Tensor, k: Tensor, v: Tensor, band: Band) -> Any:
    """Something with `forward` and `backward`."""
    return OPERATORS[name] if _must_be_seen(q) else _bare(name, q, k, v, band)


def _bare(name: str, q: Tensor, k: Tensor, v: Tensor, band: Band) -> Any:
    return flash_torch if name == "flash_torch" else _launcher(name).problem(q, k, v, band)


@functools.cache
def _launcher(name: str) -> Any:
    """The module; it imports triton, so only when it is called for."""
    return importlib.import_module(f"cs336_systems.kernels.{LAUNCHERS[name]}")


class Operators:
    """The kernels by way of PyTorch's dispatcher."""

    def __init__(self, name: str):
        self._forward = getattr(torch.ops.cs336, f"{name}_forward").default
        self._backward = getattr(torch.ops.cs336, f"{name}_backward").default

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> tuple[Tensor, Tensor]:
        return self._forward(q, k, v, scale, *band)

    def backward(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, scale, band = arguments
        return self._backward(*tensors, scale, *band)


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


# -- operators --------------------------------------------------------------------------------------------------------


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

    def run_forward(
        q: Tensor, k: Tensor, v: Tensor, scale: float, lo: int | None, hi: int | None
    ) -> tuple[Tensor, Tensor]:
        band = Band(lo, hi)
        return _bare(name, q, k, v, band).forward(q, k, v, scale, band)

    def run_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, scale, lo, hi = arguments
        q, k, v = tensors[2:5]
        band = Band(lo, hi)
        return _bare(name, q, k, v, band).backward(*tensors, scale, band)

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
        scale, lo, hi = ctx.settings
        settings = name, OPERATORS[name], scale, Band(lo, hi)
        return *_gradients(settings, ctx.saved_tensors, grad, grad_lse), None, None, None

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
    if not is_under_autocast(tensors[0]):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(t.to(dtype) if t.dtype in (torch.float32, torch.float16, torch.bfloat16) else t for t in tensors)


def is_under_autocast(t: Tensor) -> bool:
    return torch.is_autocast_enabled("cuda" if t.is_cuda else t.device.type)  # a device's `type` takes a while


def _products(q: torch.Size, k: torch.Size) -> int:
    """FLOPs of one matrix product over all scores; as in torch's counter, a mask does not make it less."""
    batch, heads, len_q, d = q
    return 2 * batch * heads * len_q * k[2] * d


def _forward_flops(q: torch.Size, k: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * _products(q, k)


def _backward_flops(grad: torch.Size, grad_lse: Any, q: torch.Size, k: torch.Size, *_: Any, **__: Any) -> int:
    """Five: the scores again, and two for each of forward's."""
    return 5 * _products(q, k)


OPERATORS = {}
for _name in ("flash_torch", *LAUNCHERS):
    _register(_name)
    OPERATORS[_name] = Operators(_name)


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
    """The same by the Triton kernels."""

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
    scale, band = q.shape[-1] ** -0.5, resolve(is_causal, None, q.shape[-2], k.shape[-2])
    four = _four(q), _four(k), _four(v)
    kernels = _kernels(name, *four, band)
    out, lse = kernels.forward(*four, scale, band)
    out, lse = out.view(q.shape), lse.view(q.shape[:-1])
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.settings = name, kernels, scale, band
    return out


def _course_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    four = _four(q), _four(k), _four(v), _four(out), lse.view(-1, 1, lse.shape[-1])
    found = _gradients(ctx.settings, four, _four(grad), None)
    return *(g.view(t.shape) for g, t in zip(found, (q, k, v), strict=True)), None


def _four(t: Tensor) -> Tensor:
    """(..., seq, d) -> (batch, 1 head, seq, d)."""
    return t.reshape(-1, 1, *t.shape[-2:])
