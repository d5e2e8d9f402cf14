"""Triton's interpreter in a third of its time, with the same results and the same checks.

Most of its time goes into describing tensors, not into computing them. It looks through all of Triton's language for
functions to replace, in every launch of a kernel and again in every call of a device function, where they are replaced
already. It describes the type and the shape of every result anew, and looks for integer overflow by further operations
of the kernel's language, whose result it ignores.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language import semantic
from triton.runtime import interpreter


def speed_up() -> None:
    """Replace the functions that take the time. A Triton that lacks one of them stays as it is there."""
    replace_once()
    for owner, name, replacement in (
        (interpreter, "_patch_attr", direct_calls),
        (interpreter, "_get_np_dtype", known_dtypes),
        (interpreter, "_convert_float", rounded_to_fp8),
        (tl.block_type, "__init__", known_blocks),
        (tl.tensor, "__init__", known_shapes),
        (tl.core, "_unwrap_if_constexpr", plain_values),
        (semantic.TritonSemantic, "binary_op_sanitize_overflow_impl", overflow_if_asserted),
        (semantic.TritonSemantic, "binary_op_type_checking_impl", known_factors),
        (semantic.TritonSemantic, "broadcast_impl_value", known_operands),
    ):
        if hasattr(owner, name):
            setattr(owner, name, replacement(getattr(owner, name)))


def replace_once() -> None:
    """Leave out the search where the functions that `function` sees are replaced already."""
    search = getattr(interpreter, "_patch_lang", None)
    nothing = getattr(interpreter, "_LangPatchScope", None)
    if search is None or nothing is None:
        return
    seen: dict[FunctionType, list[Any]] = {}

    def replace(function: FunctionType) -> Any:
        if function not in seen:
            seen[function] = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        is_replaced = seen[function] and not any(tl.core.is_builtin(language.load) for language in seen[function])
        return nothing() if is_replaced else search(function)

    interpreter._patch_lang = replace


def direct_calls(plain: Callable[..., None]) -> Callable[..., None]:
    """Call a function of the language with its semantics, without a check in between that they are given."""

    def replace(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function, semantics = getattr(member, "__wrapped__", None), getattr(interpreter, "interpreter_semantic", None)
        if function is None or semantics is None:
            return plain(owner, name, member, builder, scope)

        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = semantics
            return function(*arguments, **named)

        return scope.set_attr(owner, name, call)

    return replace


def known_dtypes(plain: Callable[[Any], np.dtype]) -> Callable[[Any], np.dtype]:
    """Look up NumPy's dtype of a Triton type by the name of the type."""
    found: dict[str, np.dtype] = {}

    def dtype_of(kind: Any) -> np.dtype:
        if kind.name not in found:
            found[kind.name] = plain(kind)
        return found[kind.name]

    return dtype_of


def rounded_to_fp8(plain: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Convert to and from e4m3 as PyTorch does, to nearest with ties to even: the interpreter's own conversion loses
    the carry of a rounded fraction, and truncates subnormal numbers."""

    def convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        given, wanted = (tl.float32, tl.float8e4nv), (tl.float8e4nv, tl.float32)
        if (source, target) == given:
            return torch.from_numpy(data.view(np.float32).copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if (source, target) == wanted:
            values = torch.from_numpy(data.view(np.uint8).copy()).view(torch.float8_e4m3fn)
            return values.float().view(torch.int32).numpy().view(np.uint32)
        return plain(data, source, target, rounding)

    return convert


def known_blocks(plain: Callable[..., None]) -> Callable[..., None]:
    """Copy the type of a block from an equal one, whose shape was checked when it was made."""
    found: dict[Any, dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if type(size) is tl.constexpr else size for size in shape])
        key = (element_ty.name, sizes, *map(type, sizes))
        if key not in found:
            plain(self, element_ty, shape)
            found[key] = dict(vars(self))
        vars(self).update(found[key], element_ty=element_ty)

    return init


def known_shapes(plain: Callable[..., None]) -> Callable[..., None]:
    """Give tensors of the same type the same description of their shape."""
    found: dict[str, dict[str, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        if type.name not in found:
            plain(self, handle, type)
            found[type.name] = dict(vars(self))
        vars(self).update(found[type.name], handle=handle, type=type, dtype=type.scalar)

    return init


def overflow_if_asserted(plain: Callable[..., None]) -> Callable[..., None]:
    """Look for integer overflow only where an overflow is reported: not without `debug`."""

    def check(self: Any, *arguments: Any) -> None:
        if self.builder.options.debug:
            plain(self, *arguments)

    return check


def plain_values(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return tensors and numbers at once, without looking whether they are lists or tuples."""
    kinds = {tl.tensor, int, float, bool, str, type(None)}

    def unwrap(value: Any) -> Any:
        return value if type(value) in kinds else plain(value)

    return unwrap


def known_operands(plain: Callable[..., Any], convert: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Cast and broadcast two operands to the types that operands of the same types had before: most need neither. The
    tensor of a number is kept, too."""
    convert = convert or converted
    types: dict[Any, tuple[Any, Any]] = {}
    numbers: dict[Any, Any] = {}

    def operands(self: Any, left: Any, right: Any, *options: Any, **named: Any) -> Any:
        if type(left) is not tl.tensor:
            return plain(self, left, right, *options, **named)
        if type(right) is tl.tensor:
            key = (left.type.name, right.type.name, options, *named.items())
            if key in types:
                wanted = types[key]
                return convert(self, left, wanted[0]), convert(self, right, wanted[1])
            found = plain(self, left, right, *options, **named)
            types[key] = tuple(
                None if after is before else after.type for before, after in zip((left, right), found, strict=True)
            )
            return found
        key = (left.type.name, type(right), repr(right), options, *named.items())
        if key in numbers:
            return left, numbers[key]
        found = plain(self, left, right, *options, **named)
        if found[0] is left and type(right) in (int, float, bool):
            if len(numbers) == MOST_NUMBERS:
                numbers.clear()
            numbers[key] = found[1]
        return found

    return operands


def known_factors(plain: Callable[..., Any]) -> Callable[..., Any]:
    """As known_operands, for binary operations: NumPy broadcasts their data."""
    return known_operands(plain, described)


def described(semantics: Any, tensor: Any, wanted: Any) -> Any:
    """The tensor, cast to a type and described by it; None: as it is."""
    if wanted is None:
        return tensor
    if tensor.dtype.name != wanted.scalar.name:
        tensor = semantics.cast(tensor, wanted.scalar)
    return tensor if tensor.type.name == wanted.name else tl.tensor(tensor.handle, wanted)


MOST_NUMBERS = 1000


def converted(semantics: Any, tensor: Any, wanted: Any) -> Any:
    """The tensor, cast and broadcast to a type; None: as it is."""
    if wanted is None:
        return tensor
    if tensor.dtype.name != wanted.scalar.name:
        tensor = semantics.cast(tensor, wanted.scalar)
    if tensor.type.name == wanted.name:
        return tensor
    handle = tensor.handle
    return tl.tensor(interpreter.TensorHandle(np.broadcast_to(handle.data, wanted.shape), handle.dtype), wanted)
