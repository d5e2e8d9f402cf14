"""`attention(q, k, v, cu_seqlens_q=...)`: documents packed one after another, each of which sees only itself.

The kernels are those of the batched call: tensors (tokens, heads, d) become (1, heads, tokens, d), and the documents
are ranges of that one sequence. `dispatch.attention` calls `packed_attention`. The fused implementations are operators
here too (`torch.ops.cs336.flash_triton_varlen_forward` and so on), for torch.compile.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cs336_systems.config import HOPPER_ATTENTIONS
from cs336_systems.kernels.cache import Cache
from cs336_systems.kernels.flash import dispatch, flash_torch
from cs336_systems.kernels.flash import strides as layout
from cs336_systems.kernels.flash.band import Band, Window, resolve
from cs336_systems.kernels.flash.operators import (
    CAST,
    LIBRARY,
    autocast_dtype,
    cast_for_autocast,
    is_traced,
    with_cast,
)
from cs336_systems.kernels.flash.packing import PackedMask, Packing, most_blocks
from cs336_systems.kernels.flash.reference import packed_attention_and_lse
from cs336_systems.predict.attention_programs import packing_suits_hopper

# -- a call -----------------------------------------------------------------------------------------------------------


class Options(NamedTuple):
    """All arguments of a call except its tensors."""

    is_causal: bool | str
    scale: float | None
    window: Window
    impl: str
    deterministic: bool
    return_lse: bool


class Call(NamedTuple):
    """A resolved call, without its tensors."""

    impl: str
    kernels: Any
    """PackedKernels; None for the reference and under tracing."""
    scale: float
    mask: PackedMask
    sign: int
    """Factor of q: 0 or -1 if the scale is 0 or negative, since fused kernels need a positive scale."""


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | Packing, cu_seqlens_k: Tensor | None, options: Options
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `attention` of packed documents."""
    packing = packing_of(cu_seqlens_q, cu_seqlens_k)
    if is_traced(q):
        call = _resolve(q, k, v, packing, options)
    else:
        key = (
            layout.layout_key(q, k, v), packing.offsets_q.shape, packing.offsets_q.device, packing.offsets_k.device,
            packing.is_shared, options, autocast_dtype(q), torch.get_float32_matmul_precision(),
        )  # fmt: skip
        if key not in _resolved:
            _resolved[key] = _resolve(q, k, v, packing, options)
        call = _resolved[key]
    if call.sign != 1:
        q = q * call.sign
        call = _resolve(q, k, v, packing, options._replace(scale=call.scale))
    out, lse = _run(call, q, k, v, packing)
    return (out, lse) if options.return_lse else out


_resolved: Cache[tuple, Call] = Cache()


def packing_of(cu_seqlens_q: Tensor | Packing, cu_seqlens_k: Tensor | None) -> Packing:
    if not isinstance(cu_seqlens_q, Packing):
        return Packing(cu_seqlens_q, cu_seqlens_k)
    if cu_seqlens_k is not None:
        raise ValueError("a Packing has the offsets of the keys too; leave out cu_seqlens_k")
    return cu_seqlens_q


def _resolve(q: Tensor, k: Tensor, v: Tensor, packing: Packing, options: Options) -> Call:
    """Check a call and choose its kernels; ValueError where its arguments are wrong."""
    check(q, k, v, packing)
    mask, scale = _mask(packing, options), dispatch.checked_scale(q, options.scale)
    q4, k4 = batched(q), batched(k)
    impl = options.impl
    if impl == "auto":
        impl = choose(q4, k4, mask, packing.documents, options.deterministic)
    elif impl == "flash_hopper":
        impl = dispatch.hopper_kernels(options.deterministic)
    request = dispatch.Request(q4, k4, options.deterministic, options.return_lse)
    problem = _problem(impl, request, packing.documents)
    if problem is not None:
        raise ValueError(f"impl={impl!r}: {problem}")
    if scale <= 0:
        return Call(impl, None, -scale or 1.0, mask, -1 if scale else 0)
    kernels = None
    if impl in KERNELS and not is_traced(q):
        dtype = autocast_dtype(q)
        casts = dtype is not None and any(t.dtype in CAST and t.dtype != dtype for t in (q, k, v))
        kernels = None if casts else kernels_for(impl, q, k, v, mask, packing.documents)
    return Call(impl, kernels, scale, mask, 1)


def _mask(packing: Packing, options: Options) -> PackedMask:
    is_causal, window = options.is_causal, options.window
    if window is not None and not packing.is_shared and isinstance(is_causal, bool):
        raise ValueError(
            f"window={window!r} with cu_seqlens_k needs an alignment, since documents may have more keys than queries: "
            f"say is_causal='top-left' or is_causal='bottom-right'"
        )
    return PackedMask(resolve(is_causal, window, 0, 0), is_causal == "bottom-right" and not packing.is_shared)


def choose(q: Tensor, k: Tensor, mask: PackedMask, documents: int, deterministic: bool) -> str:
    """Return the implementation that "auto" selects."""
    if q.is_cuda and (autocast_dtype(q) or q.dtype) in dispatch.TRITON_DTYPES:
        problem = dispatch.triton_problem(q.device)
        if problem is None:
            dtype = autocast_dtype(q) or q.dtype
            length, keys = q.shape[2] / max(documents, 1), mask.band.most_keys(q.shape[2])
            on_hopper = (
                packing_suits_hopper(q.numel(), length, keys, q.shape[3])
                and dispatch.hopper_problem(q, k, dtype) is None
                and _fits_hopper(q, documents)
            )
            return dispatch.hopper_kernels(deterministic) if on_hopper else "flash_triton"
        dispatch.warn(f"attention: {problem}; using plain PyTorch instead")
    return "flash_torch"


def _fits_hopper(q: Tensor, documents: int) -> bool:
    """Return True if offsets into the scratch memory of the Hopper kernels' backward fit 32 bits."""
    padded = dispatch.HOPPER_PADDING * most_blocks(dispatch.HOPPER_PADDING, q.shape[2], documents)
    return q.shape[1] * padded <= dispatch.HOPPER_MAX_QUERIES


def _problem(impl: str, request: "dispatch.Request", documents: int) -> str | None:
    """Return why an implementation cannot take a call, and what to use instead; None if it can."""
    if impl not in dispatch.IMPLEMENTATIONS:
        choices = ", ".join(("auto", *(name for name in dispatch.IMPLEMENTATIONS if name in (*KERNELS, "reference"))))
        return f"there is no such attention implementation; choose one of: {choices}"
    if impl != "reference" and impl not in KERNELS:
        return "it takes no packed documents; use impl='auto', or call it for each document"
    if impl in HOPPER_ATTENTIONS and not _fits_hopper(request.q, documents):
        padding = dispatch.HOPPER_PADDING
        return f"it pads each of {documents} documents to a multiple of {padding} queries; use impl='auto'"
    return dispatch.IMPLEMENTATIONS[impl].problem(request)


def check(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> None:
    """Raise a ValueError, in one line, for tensors that packed attention does not support, a TypeError for others."""
    layout.require_tensors(q, k, v)
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        raise ValueError(
            f"with cu_seqlens_q q, k and v must have 3 dimensions (tokens, heads, d), got {shapes}; "
            f"pack the sequences of a batch one after another, or leave out cu_seqlens_q"
        )
    dispatch.check(batched(q), batched(k), batched(v))
    for name, offsets in (("cu_seqlens_q", packing.offsets_q), ("cu_seqlens_k", packing.offsets_k)):
        if offsets.device != q.device:
            raise ValueError(f"{name} must be on {q.device} as q is, got {offsets.device}; move it with .to(q.device)")
    if packing.is_shared and q.shape[0] != k.shape[0]:
        raise ValueError(
            f"{q.shape[0]} queries and {k.shape[0]} keys cannot be packed alike; give cu_seqlens_k for the keys"
        )


def batched(t: Tensor) -> Tensor:
    """Return a view of (tokens, heads, d) as (1, heads, tokens, d)."""
    return t.transpose(0, 1)[None]


def unbatched(t: Tensor) -> Tensor:
    """Return a view of (1, heads, tokens, d) as (tokens, heads, d)."""
    return t[0].transpose(0, 1)


def _run(call: Call, q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    impl, kernels, scale, mask, _ = call
    if impl == "reference":
        out, lse = packed_attention_and_lse(batched(q), batched(k), batched(v), packing, mask, scale)
        return unbatched(out), lse[0]
    if is_traced(q):
        return OPERATORS[impl].forward(q, k, v, packing.offsets_q, packing.offsets_k, scale, *_flat(mask))
    if kernels is None:
        q, k, v = cast_for_autocast(q, k, v)
        kernels = kernels_for(impl, q, k, v, mask, packing.documents)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        found: tuple[Tensor, Tensor] = _PackedFlash.apply(q, k, v, packing, call._replace(kernels=kernels))
        return found
    return kernels.forward(q, k, v, packing, scale, mask)


class _PackedFlash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, packing: Packing, call: Call
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse = call.kernels.forward(q, k, v, packing, call.scale, call.mask)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.packing, ctx.call = packing, call
        ctx.set_materialize_grads(False)  # either result may have no gradient, and zeros would cost a pass over it
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> Any:
        call, saved = ctx.call, ctx.saved_tensors  # read once: a second time recomputation refuses
        grad = _gradient_of_output(grad, grad_lse, saved)
        if grad is None:
            return (None,) * 5
        if is_traced(grad):
            offsets = ctx.packing.offsets_q, ctx.packing.offsets_k
            operators = OPERATORS[call.impl]
            return *operators.backward(
                grad, grad_lse, *saved, *offsets, call.scale, *_flat(call.mask)
            ), None, None  # fmt: skip
        found = call.kernels.backward(grad, grad_lse, *saved, ctx.packing, call.scale, call.mask)
        return *found, None, None


def _gradient_of_output(grad: Tensor | None, grad_lse: Tensor | None, saved: Sequence[Tensor]) -> Tensor | None:
    """Return the gradient of the output, zeros if only the logsumexp has a gradient; None if neither has."""
    return torch.zeros_like(saved[3]) if grad is None and grad_lse is not None else grad


# -- kernels by layout ------------------------------------------------------------------------------------------------


class FourDimensional(Protocol):
    """A fused implementation of packed attention on (1, heads, tokens, d)."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, mask: PackedMask
    ) -> tuple[Tensor, Tensor]:
        """Return output and logsumexp."""

    def backward(
        self, grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        packing: Packing, scale: float, mask: PackedMask,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the gradients of q, k and v."""


class PackedKernels:
    """A fused implementation on (tokens, heads, d), for tensors of one layout."""

    def __init__(self, kernels: FourDimensional) -> None:
        self._kernels = kernels

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, mask: PackedMask
    ) -> tuple[Tensor, Tensor]:
        out, lse = self._kernels.forward(batched(q), batched(k), batched(v), packing, scale, mask)
        return unbatched(out), lse[0]

    def backward(
        self, grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        packing: Packing, scale: float, mask: PackedMask,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        tensors = (batched(q), batched(k), batched(v), batched(out), lse[None])
        own_lse = None if grad_lse is None else grad_lse[None]
        found = self._kernels.backward(batched(grad), own_lse, *tensors, packing, scale, mask)
        return tuple(map(unbatched, found))


class _Torch:
    """The tiled PyTorch version, which needs no plans."""

    forward = staticmethod(flash_torch.forward_packed)
    backward = staticmethod(flash_torch.backward_packed)


def _from_module(name: str, **options: Any) -> Callable[..., FourDimensional]:
    """Return the `PackedProblem` of a module that imports Triton; the module is imported on first use."""

    def kernels(*arguments: Any) -> FourDimensional:
        return importlib.import_module(f"cs336_systems.kernels.flash.{name}").PackedProblem(*arguments, **options)

    return kernels


KERNELS: dict[str, Callable[..., FourDimensional]] = {
    "flash_torch": lambda *_: _Torch(),
    "flash_triton": _from_module("portable_launch"),
    "flash_hopper": _from_module("hopper_launch"),
    "flash_hopper_repeatable": _from_module("hopper_launch", repeatable=True),
}
"""Fused implementation -> its kernels for (q, k, v, mask, documents)."""

_kernels: Cache[tuple[Any, ...], PackedKernels] = Cache()


def kernels_for(name: str, q: Tensor, k: Tensor, v: Tensor, mask: PackedMask, documents: int) -> PackedKernels:
    key = (name, layout.layout_key(q, k, v), mask, documents, torch.get_float32_matmul_precision())
    found = _kernels.get(key)
    if found is None:
        made = KERNELS[name](batched(q), batched(k), batched(v), mask, documents)
        found = _kernels[key] = PackedKernels(made)
    return found


# -- operators --------------------------------------------------------------------------------------------------------


class Operators(NamedTuple):
    """Kernels called through PyTorch's dispatcher."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


OPERATORS: dict[str, Operators] = {}
_MASK = "float scale, int? lo, int? hi, bool bottom_right"


def _flat(mask: PackedMask) -> tuple[int | None, int | None, bool]:
    lo, hi = mask.band
    return lo, hi, mask.bottom_right


def _register(name: str) -> None:
    """Define the operators of a fused implementation."""
    forward_name, backward_name = f"{name}_varlen_forward", f"{name}_varlen_backward"
    tags = (torch.Tag.pt2_compliant_tag,)
    LIBRARY.define(
        f"{forward_name}(Tensor q, Tensor k, Tensor v, Tensor offsets_q, Tensor offsets_k, {_MASK}) "
        f"-> (Tensor, Tensor)",
        tags=tags,
    )
    LIBRARY.define(
        f"{backward_name}(Tensor grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        f"Tensor offsets_q, Tensor offsets_k, {_MASK}) -> (Tensor, Tensor, Tensor)",
        tags=tags,
    )
    forward_op, backward_op = (getattr(torch.ops.cs336, own) for own in (forward_name, backward_name))

    def run_forward(
        q: Tensor, k: Tensor, v: Tensor, offsets_q: Tensor, offsets_k: Tensor,
        scale: float, lo: int | None, hi: int | None, bottom_right: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        packing, mask = Packing(offsets_q, offsets_k), PackedMask(Band(lo, hi), bottom_right)
        return kernels_for(name, q, k, v, mask, packing.documents).forward(q, k, v, packing, scale, mask)

    def run_backward(
        grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        offsets_q: Tensor, offsets_k: Tensor, scale: float, *settings: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        lo, hi, bottom_right = settings
        packing, mask = Packing(offsets_q, offsets_k), PackedMask(Band(lo, hi), bottom_right)
        kernels = kernels_for(name, q, k, v, mask, packing.documents)
        return kernels.backward(grad, grad_lse, q, k, v, out, lse, packing, scale, mask)

    for device in ("CPU", "CUDA"):
        LIBRARY.impl(forward_name, run_forward, device)
        LIBRARY.impl(backward_name, run_backward, device)
        LIBRARY.impl(forward_name, with_cast(forward_op.default, device), f"Autocast{device}")
    torch.library.register_fake(f"cs336::{forward_name}", _forward_shapes, lib=LIBRARY)
    torch.library.register_fake(f"cs336::{backward_name}", _backward_shapes, lib=LIBRARY)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, offsets_q, offsets_k, *ctx.settings = inputs
        ctx.save_for_backward(q, k, v, *output, offsets_q, offsets_k)
        ctx.set_materialize_grads(False)

    def gradients(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        grad = _gradient_of_output(grad, grad_lse, saved)
        if grad is None:
            return (None,) * 9
        found = backward_op.default(grad, grad_lse, *saved, *ctx.settings)
        return *found, *(None,) * 6

    torch.library.register_autograd(f"cs336::{forward_name}", gradients, setup_context=setup_context, lib=LIBRARY)
    register_flop_formula(forward_op)(_forward_flops)
    register_flop_formula(backward_op)(_backward_flops)
    OPERATORS[name] = Operators(forward_op.default, backward_op.default)


def _forward_shapes(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.promote_types(q.dtype, torch.float32))
    return unbatched(layout.empty_like(batched(q))), lse


def _backward_shapes(
    grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return tuple(unbatched(layout.empty_like(batched(t))) for t in (q, k, v))


def _matmul_flops(q: torch.Size, k: torch.Size, offsets: torch.Size) -> int:
    """Return the FLOPs of one matmul over the scores, as if all documents were equally long: a counter sees only
    shapes."""
    tokens, heads, d = q
    return 2 * heads * tokens * k[0] * d // max(1, offsets[0] - 1)


def _forward_flops(
    q: torch.Size, k: torch.Size, v: torch.Size, offsets_q: torch.Size, *_: Any, **__: Any
) -> int:  # fmt: skip
    return 2 * _matmul_flops(q, k, offsets_q)


def _backward_flops(
    grad: torch.Size, grad_lse: Any, q: torch.Size, k: torch.Size, v: torch.Size, out: torch.Size, lse: torch.Size,
    offsets_q: torch.Size, *_: Any, **__: Any,
) -> int:  # fmt: skip
    return 5 * _matmul_flops(q, k, offsets_q)


for _name in KERNELS:
    _register(_name)
