"""One meaning, several implementations: `attention(q, k, v, impl=...)`, the only dispatch."""

import functools
import importlib
import importlib.util
import math
import os
import warnings
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from cs336_systems.kernels.cache import Cache
from cs336_systems.kernels.flash import strides as layout
from cs336_systems.kernels.flash.band import Band, Window, resolve, visible
from cs336_systems.kernels.flash.operators import autocast_dtype, fused, is_plain, is_watched
from cs336_systems.kernels.flash.reference import attention_and_lse, attention_reference
from cs336_systems.kernels.flash.tiles import LAUNCH_BOUND

IMPLEMENTATIONS = ("auto", "reference", "flash_torch", "flash_triton", "flash_hopper", "sdpa")
MAX_HEAD_DIM = 256
TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HOPPER_DTYPES = (torch.float16, torch.bfloat16)
HOPPER_WORTH = 1 << 33
"""Elements of q times keys from which on they are the faster: their programs are large, and too few fill no GPU."""
HOPPER_MAX_QUERIES = 1 << 28
"""Of all heads together: places in their scratch memory are 32 bits wide."""
DTYPES = (*TRITON_DTYPES, torch.float64)
SDPA_BANDS = (Band(), Band(hi=0))
"""Those that torch's own attention takes without a mask."""


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
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
    - `scale` defaults to 1 / sqrt(d).
    - `impl`: "reference" forms the whole score matrix; "flash_torch" goes tile by tile in plain PyTorch; "flash_triton"
      by Triton kernels (fp32, fp16, bf16 on GPUs of compute capability 8.0 or more); "flash_hopper" by kernels for
      GPUs of 9.0 alone (fp16, bf16, d of 40, 48, ... 128, no window to the left); "sdpa" is torch's own; "auto" is the
      best for the device, dtype and shape.
    - `deterministic`: gradients are the same to the bit in every run. Those of all but "flash_hopper" and "sdpa" are.
    - `return_lse`: also the logsumexp of the scaled scores, (batch, heads, len_q), differentiable.

    A query that sees no key gives 0 (logsumexp -inf), and gradients of 0.
    """
    if isinstance(window, list):
        window = tuple(window)
    if is_watched(q):
        return _settle(q, k, v, is_causal, scale, window, impl, deterministic, return_lse)(q, k, v)
    # What was found right and chosen once need not be again: that would take longer than a small problem does.
    key = (
        layout.kind(q, k, v), is_causal, scale, window, impl, deterministic, return_lse, autocast_dtype(q),
        torch.get_float32_matmul_precision() if q.dtype == torch.float32 else None,
    )  # fmt: skip
    settled = _settled.get(key)
    if settled is None:
        settled = _settled[key] = _settle(q, k, v, is_causal, scale, window, impl, deterministic, return_lse)
    return settled(q, k, v)


Attend = Callable[[Tensor, Tensor, Tensor], Any]

_settled: Cache[tuple, Attend] = Cache()


def _settle(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool | str, scale: float | None, window: Window, impl: str,
    deterministic: bool, return_lse: bool,
) -> Attend:  # fmt: skip
    """What a call means, as a function of q, k and v; ValueError where it means nothing that can be done."""
    check(q, k, v)
    band = resolve(is_causal, window, q.shape[2], k.shape[2])
    scale = _checked_scale(q, scale)
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"unknown attention implementation {impl!r}; choose one of: {', '.join(IMPLEMENTATIONS)}")
    if impl == "auto":
        impl = choose(q, k, band, deterministic, return_lse)
    if impl == "flash_triton" and is_plain(q):  # of one that is traced only the shape matters
        require_triton(q)
    if impl == "flash_hopper" and is_plain(q):
        require_hopper(q, k, band)
        if deterministic:
            raise ValueError("impl='flash_hopper' adds up dq in no fixed order; use impl='auto' or 'flash_triton'")
    if impl == "sdpa" and return_lse:
        raise ValueError("impl='sdpa' has no logsumexp to return; use impl='auto', 'flash_torch' or 'flash_triton'")
    if impl == "sdpa" and deterministic and q.is_cuda:
        raise ValueError("impl='sdpa' is not deterministic on a GPU; use impl='auto' or 'flash_triton'")
    if scale > 0:
        return _attend(impl, q, k, v, scale, band, return_lse)
    # Fused kernels take the largest score before they scale, so they need a scale above 0: its sign goes into q.
    # (torch's own give NaN for a negative one on a CPU.)
    sign = -1 if scale else 0
    scale = -scale or 1.0

    def with_sign(q: Tensor, k: Tensor, v: Tensor) -> Any:
        q = q * sign  # it need not lie as q does
        return _attend(impl, q, k, v, scale, band, return_lse)(q, k, v)

    return with_sign


def _attend(impl: str, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band, return_lse: bool) -> Attend:
    """An implementation for tensors like these."""
    match impl:
        case "flash_hopper" | "flash_triton" | "flash_torch":
            return fused(impl, q, k, v, scale, band, return_lse)
        case "reference":
            return functools.partial(_reference, band, scale, return_lse)
    if band not in SDPA_BANDS:
        return functools.partial(_sdpa_masked, band, scale)
    return functools.partial(
        F.scaled_dot_product_attention, is_causal=band.hi == 0, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


# -- implementations --------------------------------------------------------------------------------------------------


def choose(q: Tensor, k: Tensor, band: Band, deterministic: bool = False, return_lse: bool = False) -> str:
    """What "auto" means for these tensors."""
    dtype = _dtype_of_products(q)
    # On a GPU SDPA's fast kernels take no other mask, and their gradients differ from run to run.
    sdpa_can = not return_lse and (not q.is_cuda or (band in SDPA_BANDS and not deterministic))
    # In fp32 wide heads leave the Triton kernels no registers; and torch's own attention is launched from C++.
    sdpa_is_faster = (dtype == torch.float32 and q.shape[-1] > 64) or q.numel() * k.shape[2] < LAUNCH_BOUND
    if q.is_cuda and dtype in TRITON_DTYPES and not (sdpa_can and sdpa_is_faster):
        problem = triton_problem(q.device)
        if problem is None:
            is_large = q.numel() * k.shape[2] >= HOPPER_WORTH
            on_hopper = is_large and not deterministic and hopper_problem(q, k, band, dtype) is None
            return "flash_hopper" if on_hopper else "flash_triton"
        _say_once(f"attention: {problem}; using torch's own kernels instead")
    return "sdpa" if sdpa_can else "flash_torch"


def _dtype_of_products(q: Tensor) -> torch.dtype:
    return autocast_dtype(q) or q.dtype


def _reference(
    band: Band, scale: float, return_lse: bool, q: Tensor, k: Tensor, v: Tensor
) -> Tensor | tuple[Tensor, Tensor]:
    plain = q.shape[1] == k.shape[1] and band in SDPA_BANDS and k.shape[2] > 0
    if plain and not return_lse:
        return attention_reference(q, k, v, is_causal=band.hi == 0, scale=scale)
    out, lse = attention_and_lse(q, k, v, band, scale)
    return (out, lse) if return_lse else out


def _sdpa_masked(band: Band, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Torch's own attention under a mask that it must be given."""
    mask, empty = visible(band, slice(0, q.shape[2]), slice(0, k.shape[2]), q.device), None
    if band.has_empty_rows(q.shape[2], k.shape[2]):
        # Some backends give NaN for a row that sees no key: it is shown all of them, then its result is dropped.
        empty = ~mask.any(-1, keepdim=True)
        mask |= empty
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )  # fmt: skip
    return out if empty is None else out.masked_fill(empty, 0.0)


def require_triton(q: Tensor) -> None:
    problem = triton_problem(q.device)
    if problem is None and q.dtype not in TRITON_DTYPES:
        problem = f"the Triton kernels take fp32, fp16 or bf16, got {_name(q.dtype)}"
    if problem is not None:
        raise ValueError(f"impl='flash_triton': {problem}; use impl='auto' or impl='flash_torch'")


def require_hopper(q: Tensor, k: Tensor, band: Band) -> None:
    problem = triton_problem(q.device) or hopper_problem(q, k, band, _dtype_of_products(q))
    if problem is not None:
        raise ValueError(f"impl='flash_hopper': {problem}; use impl='auto'")


def hopper_problem(q: Tensor, k: Tensor, band: Band, dtype: torch.dtype) -> str | None:
    """Why the kernels for Hopper GPUs do not take a call that the Triton kernels would; None where they do."""
    if dtype not in HOPPER_DTYPES:
        return f"it takes fp16 or bf16, got {_name(dtype)}"
    if not is_hopper_head_dim(q.shape[3]):
        return f"it takes head dims from 40 to 128 in steps of 8, got {q.shape[3]}"
    if band.lo is not None:
        return "it has no window to the left"
    queries = q.shape[0] * q.shape[1] * q.shape[2]
    if queries == 0 or queries > HOPPER_MAX_QUERIES or k.shape[2] == 0:
        return f"it takes 1 to {HOPPER_MAX_QUERIES} queries in all heads, and at least one key"
    return gluon_problem(q.device)


def is_hopper_head_dim(d: int) -> bool:
    """What the copy engine can move. Narrower ones would be padded to twice their width and more."""
    return 40 <= d <= 128 and d % 8 == 0


def best_fused(elements: int, keys: int, head_dim: int, device: torch.device) -> str:
    """Of our kernels for 16-bit causal attention, launching aside; by elements of q, and keys that a query may see."""
    for_hopper = elements * keys >= HOPPER_WORTH and is_hopper_head_dim(head_dim)
    return "flash_hopper" if for_hopper and gluon_problem(device) is None else "flash_triton"


_problems: dict[torch.device, str | None] = {}
_gluon_problems: dict[torch.device, str | None] = {}


@torch.compiler.assume_constant_result
def triton_problem(device: torch.device) -> str | None:
    """Why the Triton kernels cannot run on a device; None where they can."""
    if device not in _problems:  # not functools.cache: torch.compile would trace through it
        _problems[device] = _find_problem(device)
    return _problems[device]


@torch.compiler.assume_constant_result
def gluon_problem(device: torch.device) -> str | None:
    """Why the kernels for Hopper GPUs cannot run on one that runs the Triton kernels; None where they can."""
    if device not in _gluon_problems:
        _gluon_problems[device] = _find_gluon_problem(device)
    return _gluon_problems[device]


def _find_gluon_problem(device: torch.device) -> str | None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "Triton's interpreter does not know its language"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        return f"it is for compute capability 9.0, {torch.cuda.get_device_name(device)} has {major}.{minor}"
    try:
        importlib.import_module("cs336_systems.kernels.flash.hopper_launch")
    except ImportError as error:  # its language is young, and an older or newer Triton may name things otherwise
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


@functools.cache
def _say_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)


# -- what a user can get wrong ----------------------------------------------------------------------------------------


def check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """ValueError, in one line, for tensors that attention does not take."""
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(f"q, k and v must have 4 dimensions (batch, heads, seq, d), got {_shapes(q, k, v)}")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q, k and v must agree in batch and d, and k and v in all dimensions, got {_shapes(q, k, v)}")
    heads, kv_heads, d = q.shape[1], k.shape[1], q.shape[3]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"{heads} query heads cannot share {kv_heads} KV heads evenly; make one a multiple of the other"
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


def _checked_scale(q: Tensor, scale: float | None) -> float:
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
