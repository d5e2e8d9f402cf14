"""A cache of results on tensors without memory, faster than that of torch, which halves the time of a trace.

A trace repeats the same operators on the same shapes: in every block, in every step, in every plan. FakeTensorMode has
a cache for that, but describes all tensors in full to look something up. Here an operator is looked up by the shapes,
strides, offsets and dtypes of its tensors and by its other arguments. Results are stored only where these determine
them: one new tensor or one view of an argument. Everything else is left to torch.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

LIMIT = 50_000
"""Stored results; a trace has a few hundred."""
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class _Result:
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    viewed: int | None
    """The position of the argument whose storage it has; None: a new tensor."""


_RESULTS: dict[Any, _Result | None] = {}
"""None: left to torch."""


def call(func: Any, args: Any, kwargs: Any) -> Any:
    """Return `func(*args, **kwargs)`, from the cache where the arguments are tensors without memory."""
    first = args[0] if args else None
    if type(first) is not FakeTensor or (key := _key(func, first.fake_mode, args, kwargs)) is None:
        return func(*args, **kwargs)
    if key in _RESULTS:
        stored = _RESULTS[key]
        return func(*args, **kwargs) if stored is None else _make(stored, first.fake_mode, args)
    result = func(*args, **kwargs)
    if len(_RESULTS) >= LIMIT:
        _RESULTS.clear()
    _RESULTS[key] = _described(func, result, args)
    return result


def _key(func: Any, mode: Any, args: Any, kwargs: Any) -> Any:
    """Return what determines the result; None if there is anything else than tensors and plain values."""
    if mode.shape_env is not None:
        return None
    key = [func, torch.is_inference_mode_enabled()]
    for arg in args:
        kind = type(arg)
        if kind is FakeTensor:
            if arg.constant is not None or arg.fake_mode is not mode:
                return None
            key.append((arg.shape, arg.stride(), arg.storage_offset(), arg.dtype, arg.fake_device, arg.is_inference()))
        elif kind in _PLAIN:
            key.append((kind, arg))
        elif kind is list and all(type(item) in (int, bool) for item in arg):
            key.append((*arg,))
        else:
            return None
    for name, value in kwargs.items():
        if type(value) not in _PLAIN:
            return None
        key.append((name, type(value), value))
    return tuple(key)


def _described(func: Any, result: Any, args: Any) -> _Result | None:
    if type(result) is not FakeTensor or func._schema.is_mutable or result.constant is not None:
        return None
    if result.layout is not torch.strided or result.is_conj() or result.is_neg():
        return None
    storage = result.untyped_storage()
    same = [
        number
        for number, arg in enumerate(args)
        if isinstance(arg, Tensor) and arg.untyped_storage()._cdata == storage._cdata
    ]
    if any(result is args[number] for number in same):
        return None
    found = _Result(
        tuple(result.shape), result.stride(), int(result.storage_offset()), result.dtype, result.fake_device,
        same[0] if same else None,
    )  # fmt: skip
    is_same_size = same or (_empty(found, result.fake_mode).untyped_storage().nbytes() == storage.nbytes())
    return found if is_same_size and (same or not found.offset) else None


def _empty(result: _Result, mode: Any) -> Tensor:
    with in_kernel_invocation_manager(mode):
        return torch.empty_strided(result.size, result.stride, dtype=result.dtype, device="meta")


def _make(result: _Result, mode: Any, args: Any) -> Tensor:
    if result.viewed is None:
        return FakeTensor(mode, _empty(result, mode), result.device)
    storage = args[result.viewed].untyped_storage()
    with in_kernel_invocation_manager(mode):
        view = torch.empty(0, dtype=result.dtype, device="meta")
        view.set_(storage, result.offset, result.size, result.stride)
    return FakeTensor(mode, view, result.device)
