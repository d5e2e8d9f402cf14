"""`attention(q, k, v, impl=...)`: one operation with several implementations, registered in IMPLEMENTATIONS.

A call is resolved once: its arguments are checked, "auto" chooses an implementation, and the result is a function of q,
k and v. Resolved calls are cached by shape, stride, dtype and options. From there a call of a fused implementation goes
through `operators._run_eagerly` to its kernels' `forward`, which launches a `Plan`.
"""

import functools
import importlib
import importlib.util
import math
import os
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from cs336_systems.kernels.cache import Cache
from cs336_systems.kernels.flash import flash_torch
from cs336_systems.kernels.flash import strides as layout
from cs336_systems.kernels.flash.band import Band, Window, resolve, visible
from cs336_systems.kernels.flash.operators import KernelsFor, autocast_dtype, fused, is_plain, is_traced, register
from cs336_systems.kernels.flash.packing import Packing
from cs336_systems.kernels.flash.reference import attention_and_lse, attention_reference
from cs336_systems.kernels.flash.tiles import LAUNCH_BOUND
from cs336_systems.predict.attention_programs import repeatable_suits_hopper, suits_hopper

P = ParamSpec("P")
R = TypeVar("R")

MAX_HEAD_DIM = 256
TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HOPPER_DTYPES = (torch.float16, torch.bfloat16)
HOPPER_PADDING = 128
"""The backward of the Hopper kernels pads the queries of a head, or of a document, to a multiple of this."""
HOPPER_MAX_QUERIES = 1 << 28
"""Maximum number of padded queries of all heads: offsets into the scratch memory are 32 bits wide."""
DTYPES = (*TRITON_DTYPES, torch.float64)
SDPA_BANDS = (Band(), Band(hi=0))
"""Bands that torch's own attention supports without a mask."""


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | Packing | None = None,
    cu_seqlens_k: Tensor | None = None,
    is_causal: bool | str = False,
    scale: float | None = None,
    window: Window = None,
    impl: str = "auto",
    deterministic: bool = False,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | Packing | None = None,
    cu_seqlens_k: Tensor | None = None,
    is_causal: bool | str = False,
    scale: float | None = None,
    window: Window = None,
    impl: str = "auto",
    deterministic: bool = False,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | Packing | None = None,
    cu_seqlens_k: Tensor | None = None,
    is_causal: bool | str = False,
    scale: float | None = None,
    window: Window = None,
    impl: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T * scale) v over q (batch, heads, len_q, d) and k, v (batch, kv_heads, len_k, d).

    - Grouped query: heads is a multiple of kv_heads; query heads share KV heads in order, nothing is copied.
    - `is_causal`: True or "top-left" hides keys j > i from query i, as in torch's SDPA; "bottom-right" aligns the last
      query with the last key: j > i + len_k - len_q.
    - `window`: w or (left, right) hides keys further than that from the query's own position; None: no bound.
    - `cu_seqlens_q`: q is (tokens, heads, d), k and v are (tokens_k, kv_heads, d), documents one after another, and a
      query sees keys of its own document alone. int32 offsets on the tensors' device, (documents + 1,): 0, the end of
      the first document, ... the end of the last; equal neighbours are an empty document, rows after the last offset
      belong to none. `cu_seqlens_k` has those of the keys, by default the same. A `Packing` of both in place of
      `cu_seqlens_q` saves work in models of several layers. Masks are aligned inside each document.
    - `scale` defaults to 1 / sqrt(d).
    - `impl`: "reference" computes the whole score matrix; "flash_torch" is tiled, in plain PyTorch; "flash_triton" uses
      Triton kernels (fp32, fp16, bf16 on GPUs of compute capability 8.0 or more); "flash_hopper" kernels for GPUs of
      9.0 alone (fp16, bf16, d of 40, 48, ... 256); "flash_hopper_repeatable" is "flash_hopper" with
      `deterministic=True`; "sdpa" is torch's own; "auto" is the fastest for the device, dtype and shape.
    - `deterministic`: gradients are bitwise equal in every run; "sdpa" refuses that on a GPU. Without it those of
      "sdpa" and, up to a head dim of 128, of "flash_hopper" differ from run to run.
    - `return_lse`: also return the logsumexp of the scaled scores, (batch, heads, len_q) or, of packed documents,
      (heads, tokens), differentiable.

    A query that sees no key gives 0 (logsumexp -inf), and gradients of 0.
    """
    if isinstance(window, list):
        window = cast(Window, tuple(window))
    if cu_seqlens_q is not None:
        from cs336_systems.kernels.flash import varlen  # it imports this module

        options = varlen.Options(is_causal, scale, window, impl, deterministic, return_lse)
        return varlen.packed_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    if cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_k was given without cu_seqlens_q; give both, or neither for a batch of sequences")
    if is_traced(q):
        return _resolve_call(q, k, v, is_causal, scale, window, impl, deterministic, return_lse)(q, k, v)
    key = (
        layout.layout_key(q, k, v), is_causal, scale, window, impl, deterministic, return_lse, autocast_dtype(q),
        torch.get_float32_matmul_precision() if q.dtype == torch.float32 else None,
    )  # fmt: skip
    resolved = _resolved.get(key)
    if resolved is None:
        resolved = _resolved[key] = _resolve_call(q, k, v, is_causal, scale, window, impl, deterministic, return_lse)
    return resolved(q, k, v)


Attend = Callable[[Tensor, Tensor, Tensor], Any]

_resolved: Cache[tuple, Attend] = Cache()
"""Cache of resolved calls: with it a call spends 4 us before its kernels, without it 8."""


def _resolve_call(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool | str, scale: float | None, window: Window, impl: str,
    deterministic: bool, return_lse: bool,
) -> Attend:  # fmt: skip
    """Resolve a call into a function of q, k and v; raise ValueError if its arguments are wrong."""
    check(q, k, v)
    band = resolve(is_causal, window, q.shape[2], k.shape[2])
    scale = checked_scale(q, scale)
    if impl == "auto":
        impl = choose(q, k, band, deterministic, return_lse)
    elif impl == "flash_hopper":
        impl = hopper_kernels(deterministic)
    elif impl not in IMPLEMENTATIONS:
        choices = ", ".join(("auto", *IMPLEMENTATIONS))
        raise ValueError(f"unknown attention implementation {impl!r}; choose one of: {choices}")
    implementation = IMPLEMENTATIONS[impl]
    problem = implementation.problem(Request(q, k, deterministic, return_lse))
    if problem is not None:
        raise ValueError(f"impl={impl!r}: {problem}")
    if scale > 0:
        return implementation.build(q, k, v, scale, band, return_lse)
    # Fused kernels take the maximum before they scale, so they need a scale above 0: its sign goes into q.
    # (torch's own give NaN for a negative one on a CPU.)
    sign = -1 if scale else 0
    scale = -scale or 1.0

    def with_sign(q: Tensor, k: Tensor, v: Tensor) -> Any:
        q = q * sign  # its layout may differ from q's
        return implementation.build(q, k, v, scale, band, return_lse)(q, k, v)

    return with_sign


def choose(q: Tensor, k: Tensor, band: Band, deterministic: bool = False, return_lse: bool = False) -> str:
    """Return the implementation that "auto" selects."""
    dtype = autocast_dtype(q) or q.dtype
    # On a GPU SDPA's fast kernels take no other mask, and their gradients differ from run to run.
    sdpa_can = not return_lse and (not q.is_cuda or (band in SDPA_BANDS and not deterministic))
    if q.is_cuda and dtype == torch.float32 and q.shape[1] != k.shape[1]:
        sdpa_can = False  # its only kernel for grouped heads in fp32 forms the whole score matrix
    # In fp32 wide heads leave the Triton kernels no registers; and torch's own attention is launched from C++.
    sdpa_is_faster = (dtype == torch.float32 and q.shape[-1] > 64) or q.numel() * k.shape[2] < LAUNCH_BOUND
    if q.is_cuda and dtype in TRITON_DTYPES and not (sdpa_can and sdpa_is_faster):
        problem = triton_problem(q.device)
        if problem is None:
            suits = suits_hopper(q.numel() * band.most_keys(k.shape[2]), q.shape[3])
            if deterministic:
                suits = suits and repeatable_suits_hopper(q.shape[3], band.lo is not None)
            on_hopper = suits and hopper_problem(q, k, dtype) is None
            return hopper_kernels(deterministic) if on_hopper else "flash_triton"
        warn(f"attention: {problem}; using torch's own kernels instead")
    return "sdpa" if sdpa_can else "flash_torch"


def hopper_kernels(deterministic: bool) -> str:
    """Return the name of the Hopper kernels for a call."""
    return "flash_hopper_repeatable" if deterministic else "flash_hopper"


# -- implementations --------------------------------------------------------------------------------------------------


def _build_reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band, return_lse: bool
) -> Attend:  # fmt: skip
    if q.shape[1] == k.shape[1] and band in SDPA_BANDS and k.shape[2] > 0 and not return_lse:
        return functools.partial(attention_reference, is_causal=band.hi == 0, scale=scale)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        out, lse = attention_and_lse(q, k, v, band, scale)
        return (out, lse) if return_lse else out

    return attend


def _build_sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band, return_lse: bool) -> Attend:
    grouped = q.shape[1] != k.shape[1]
    if band in SDPA_BANDS:
        return functools.partial(
            F.scaled_dot_product_attention, is_causal=band.hi == 0, scale=scale, enable_gqa=grouped
        )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask, empty = visible(band, slice(0, q.shape[2]), slice(0, k.shape[2]), q.device), None
        if band.has_empty_rows(q.shape[2], k.shape[2]):
            # Some backends give NaN for a row that sees no key: it gets all of them, then its result is dropped.
            empty = ~mask.any(-1, keepdim=True)
            mask |= empty
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
        return out if empty is None else out.masked_fill(empty, 0.0)

    return attend


class Request(NamedTuple):
    """The properties of a call that decide which implementations support it."""

    q: Tensor
    k: Tensor
    deterministic: bool
    return_lse: bool


def _no_problem(request: Request) -> str | None:
    return None


def _sdpa_problem(request: Request) -> str | None:
    if request.return_lse:
        return "it has no logsumexp to return; use impl='auto', 'flash_torch' or 'flash_triton'"
    if request.deterministic and request.q.is_cuda:
        return "it is not deterministic on a GPU; use impl='auto' or 'flash_triton'"
    return None


def _flash_triton_problem(request: Request) -> str | None:
    q = request.q
    if not is_plain(q):  # traced: only its shape matters
        return None
    problem = triton_problem(q.device)
    if problem is None and q.dtype not in TRITON_DTYPES:
        problem = f"the Triton kernels take fp32, fp16 or bf16, got {_name(q.dtype)}"
    return problem and f"{problem}; use impl='auto' or impl='flash_torch'"


def _flash_hopper_problem(request: Request) -> str | None:
    q, k, *_ = request
    if not is_plain(q):
        return None
    problem = triton_problem(q.device) or hopper_problem(q, k, autocast_dtype(q) or q.dtype)
    return problem and f"{problem}; use impl='auto'"


def _from_module(name: str, **options: Any) -> KernelsFor:
    """Return the `Problem` of a module that imports Triton; the module is imported on first use."""

    def kernels(q: Tensor, k: Tensor, v: Tensor, band: Band) -> Any:
        return importlib.import_module(f"cs336_systems.kernels.flash.{name}").Problem(q, k, v, band, **options)

    return kernels


class Implementation(NamedTuple):
    build: Callable[[Tensor, Tensor, Tensor, float, Band, bool], Attend]
    """(q, k, v, scale, band, return_lse) -> attention as a function of tensors like q, k and v."""
    problem: Callable[[Request], str | None] = _no_problem
    """Returns why it cannot take a call and what to use instead; None if it can."""
    kernels: KernelsFor | None = None
    """Set for the fused implementations, which are also operators."""

    @classmethod
    def fused(cls, name: str, kernels: KernelsFor, problem: Callable[[Request], str | None] = _no_problem) -> Any:
        return cls(functools.partial(fused, name), problem, kernels)


IMPLEMENTATIONS = {
    "reference": Implementation(_build_reference),
    "flash_torch": Implementation.fused("flash_torch", lambda *_: flash_torch),
    "flash_triton": Implementation.fused("flash_triton", _from_module("portable_launch"), _flash_triton_problem),
    "flash_hopper": Implementation.fused("flash_hopper", _from_module("hopper_launch"), _flash_hopper_problem),
    "flash_hopper_repeatable": Implementation.fused(
        "flash_hopper_repeatable", _from_module("hopper_launch", repeatable=True), _flash_hopper_problem
    ),
    "sdpa": Implementation(_build_sdpa, _sdpa_problem),
}
"""All implementations; "auto" chooses one of them. `config.ATTENTIONS` lists the names for flags, without torch."""

for _implementation_name, _implementation in IMPLEMENTATIONS.items():
    if _implementation.kernels is not None:
        register(_implementation_name, _implementation.kernels)


# -- where the kernels run --------------------------------------------------------------------------------------------


def hopper_problem(q: Tensor, k: Tensor, dtype: torch.dtype) -> str | None:
    """Return why the Hopper kernels cannot take a call that the Triton kernels can; None if they can."""
    if dtype not in HOPPER_DTYPES:
        return f"it takes fp16 or bf16, got {_name(dtype)}"
    if not is_hopper_head_dim(q.shape[3]):
        return f"it takes head dims from 40 to 256 in steps of 8, got {q.shape[3]}"
    queries = q.shape[0] * q.shape[1] * (-(-q.shape[2] // HOPPER_PADDING) * HOPPER_PADDING)
    if queries == 0 or queries > HOPPER_MAX_QUERIES or k.shape[2] == 0:
        return (
            f"it takes at least one query and one key, and up to {HOPPER_MAX_QUERIES} queries in all heads, those of "
            f"each head counted up to a multiple of {HOPPER_PADDING}, as backward pads them"
        )
    return gluon_problem(q.device)


def is_hopper_head_dim(d: int) -> bool:
    """Return True if the copy engine can move rows of this width; narrower rows would be padded to more than twice
    their width."""
    return 40 <= d <= 256 and d % 8 == 0


def best_fused(elements: int, keys: int, head_dim: int, device: torch.device) -> str:
    """Return the fused implementation that is fastest for 16-bit causal attention, given the number of elements of q
    and the number of keys that a query may see."""
    for_hopper = suits_hopper(elements * keys, head_dim) and is_hopper_head_dim(head_dim)
    return "flash_hopper" if for_hopper and gluon_problem(device) is None else "flash_triton"


def fused_implementation(impl: str, x: Tensor, heads: int, head_dim: int) -> str:
    """Return the fused implementation for causal attention in a model with this residual stream: `impl`, or the best
    for "auto".

    x: (batch, rows, width).
    """
    if impl != "auto":
        return impl
    dtype = autocast_dtype(x) or x.dtype
    if not is_plain(x) or triton_problem(x.device) is not None:
        return "flash_torch"
    is_narrow = dtype in HOPPER_DTYPES
    if not is_narrow:
        return "flash_triton"
    return best_fused(x.shape[0] * x.shape[1] * heads * head_dim, x.shape[1], head_dim, x.device)


def constant_when_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function as `torch.compiler.assume_constant_result` does, which imports torch's compiler: 2 s of CPU."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_problems: dict[torch.device, str | None] = {}
"""Cache of `triton_problem`, which every fused pointwise kernel calls: 0.2 us instead of 9. Not functools.cache:
torch.compile would trace through it."""


@constant_when_compiled
def triton_problem(device: torch.device) -> str | None:
    """Return why the Triton kernels cannot run on a device; None if they can."""
    if device not in _problems:
        _problems[device] = _find_problem(device)
    return _problems[device]


@constant_when_compiled
def gluon_problem(device: torch.device) -> str | None:
    """Return why the Hopper kernels cannot run on a GPU that runs the Triton kernels; None if they can."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "Triton's interpreter does not support its language, Gluon"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        return f"it is for compute capability 9.0, {torch.cuda.get_device_name(device)} has {major}.{minor}"
    try:
        importlib.import_module("cs336_systems.kernels.flash.hopper_launch")
    except ImportError as error:  # Gluon is young: an older or newer Triton may have other names
        return f"the installed Triton lacks what it needs ({error})"
    return None


def _find_problem(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda":
        return f"the Triton kernels need a CUDA GPU, not {device.type!r}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 0):
        gpu = torch.cuda.get_device_name(device)
        return f"the Triton kernels need compute capability 8.0, {gpu} has {major}.{minor}"
    return None


def warn(message: str) -> None:
    warnings.warn(message, stacklevel=5)  # Python shows a warning once for each place that calls `attention`


# -- checks of the arguments ------------------------------------------------------------------------------------------


def check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise a ValueError, in one line, for tensors that attention does not support, a TypeError for others."""
    layout.require_tensors(q, k, v)
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(f"q, k and v must have 4 dimensions (batch, heads, seq, d), got {_shapes(q, k, v)}")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q, k and v must agree in batch and d, and k and v in all dimensions, got {_shapes(q, k, v)}")
    heads, kv_heads, d = q.shape[1], k.shape[1], q.shape[3]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"{heads} query heads cannot share {kv_heads} KV heads evenly; make query heads a multiple of KV heads"
        )
    if not 1 <= d <= MAX_HEAD_DIM:
        raise ValueError(f"head dim {d} is not supported; use one from 1 to {MAX_HEAD_DIM}")
    if not (q.device == k.device == v.device):
        raise ValueError(
            f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}; move them with .to()"
        )
    if any(t.dtype not in DTYPES for t in (q, k, v)):
        raise ValueError(f"attention takes fp32, fp16, bf16 or float64, got {_dtypes(q, k, v)}; cast them with .to()")
    if not (q.dtype == k.dtype == v.dtype) and autocast_dtype(q) is None:
        raise ValueError(f"q, k and v must have one dtype, got {_dtypes(q, k, v)}; cast them with .to()")


def checked_scale(q: Tensor, scale: float | None) -> float:
    if scale is None:
        return 1 / math.sqrt(q.shape[-1])
    if not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale!r}; leave it out for 1 / sqrt(d)")
    return float(scale)


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(tuple(t.shape)) for t in tensors)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtypes(*tensors: Tensor) -> str:
    return ", ".join(_name(t.dtype) for t in tensors)
