"""Everything that depends on Triton's internals, so that a new version of Triton is one module to check.

Works with Triton 3.6 and 3.7.1. The launcher parts check what they find and fall back to Triton's own launcher, which
is slower and always right. The Gluon parts are absent where Triton has no Gluon: importing them raises ImportError,
which `dispatch.gluon_problem` reports.

| internal | used by | if it changes |
|---|---|---|
| `CompiledKernel.run`, its `launch` and closure | `launch_of` | Triton's launcher, in Python, is called |
| `make_tensordesc_arg`, `metadata.tensordesc_meta` | `TensorDescription.encoded` | Triton encodes for every call |
| `triton.language.core._aggregate` | `aggregate` | no Hopper kernels |
| Gluon's `builtin`, `_semantic` | `specialize_warps`, `tma_reduce_add` | no Hopper kernels |
"""

import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, dataclass_transform

import triton
from torch import Tensor
from triton.language.core import base_value as Value
from triton.language.core import constexpr

from cs336_systems.kernels.cache import Cache

__all__ = ["INTERPRETED", "RAGGED_ROWS", "Launch", "TensorDescription", "Value", "aggregate", "launch_of"]

INTERPRETED: bool = triton.knobs.runtime.interpret
"""True if kernels run under Triton's interpreter (TRITON_INTERPRET=1)."""


# -- launching a compiled kernel --------------------------------------------------------------------------------------


RAGGED_ROWS = constexpr(1 << 30)
"""Number of rows of a ragged description: more than any document has."""
WIDEST_DIMENSION = 0x7FFF0000


class TensorDescription:
    """A host-side TMA descriptor without its tensor: validated once, then filled in for each call.

    It describes a whole tensor or, with `start`, a part of a flat one: `t`, that many elements after its beginning.
    """

    def __init__(self, kind: type, t: Tensor, block_shape: list[int], *layout: Any, start: int | None = None):
        # The stride of a dimension of size 1 has no meaning, but must still be a multiple of 16 bytes.
        strides = [s if n > 1 else 8 for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)] + [1]
        self._describe(kind, t, list(t.shape), strides, block_shape, layout, start)

    def _describe(
        self, kind: type, t: Tensor, shape: list[int], strides: list[int], block_shape: list[int],
        layout: Sequence[Any], start: int | None,
    ) -> None:  # fmt: skip
        self.kind = kind
        self.fields = dict(vars(kind(t, shape, strides, block_shape, *layout)))
        del self.fields["base"]
        self.start = start
        self.encode: Callable[[Any], Sequence[Any]] | None = None
        self.cache: Cache[int, Sequence[Any]] = Cache()
        """Address -> encoded descriptor. Allocators reuse addresses; encoding the 13 of a forward and backward for
        each call took 4 x 16 x 2048 x 64 from 0.34 ms to at least 0.55."""

    @classmethod
    def ragged(cls, kind: type, t: Tensor, block_shape: list[int], *layout: Any) -> "TensorDescription":
        """Describe packed documents, rows of a (1, heads, rows, d) tensor, as Triton's tools/ragged_tma.py does.

        Coordinates: RAGGED_ROWS, a document's end, head, row, column. The row counts from RAGGED_ROWS - length on, so
        that the copy engine itself bounds reads and writes by the document. The first two dimensions have strides that
        cancel this offset: addresses are 64 bits wide and wrap around.
        """
        _, heads, rows, d = t.shape
        far, near = t.stride(1) if heads > 1 else 8, t.stride(2) if rows > 1 else 8
        shape = [WIDEST_DIMENSION, WIDEST_DIMENSION, heads, RAGGED_ROWS.value, d]
        made = cls.__new__(cls)
        made._describe(kind, t, shape, [(1 << 34) - near, near, far, near, 1], block_shape, layout, None)
        return made

    def __call__(self, base: Tensor) -> Any:
        if self.start is not None:
            base = base.as_strided(self.fields["shape"], self.fields["strides"], base.storage_offset() + self.start)
        descriptor: Any = object.__new__(self.kind)
        descriptor.__dict__.update(self.fields, base=base)
        return descriptor

    def encoded(self, base: Tensor) -> Sequence[Any]:
        """Return the kernel arguments for this descriptor of `base`; the descriptor itself if Triton has to encode
        it."""
        if self.encode is None:
            return (self(base),)
        address = base.data_ptr()
        found = self.cache.get(address)
        if found is None:
            found = self.cache[address] = self.encode(self(base))
        return found


@dataclass(frozen=True)
class Launch:
    """The call that launches a compiled kernel: `function(*arguments(stream, kernel_arguments))`."""

    function: Callable[..., Any]
    programs: int
    constants: tuple[Any, ...]
    """Arguments between the stream and the kernel's own."""
    as_tuple: bool = False
    """True if the kernel's arguments are passed as one tuple."""
    takes_addresses: bool = True
    """True if no argument is a tensor or holds one, so that arguments can be cached."""

    def arguments(self, stream: int, own: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.programs, 1, 1, stream, *self.constants, *((own,) if self.as_tuple else own))


def launch_of(compiled: Any, programs: int, descriptions: list[TensorDescription] | None) -> Launch:
    """Return the fastest way to launch `programs` programs of a compiled kernel."""
    launcher = _without_encoding(compiled.run, descriptions, compiled.metadata)
    fixed = compiled.function, compiled.packed_metadata, None, None, None
    takes_addresses = all(description.encode is not None for description in descriptions or ())
    found = _direct(launcher, compiled.metadata, programs, fixed) or Launch(launcher, programs, fixed)
    return replace(found, takes_addresses=takes_addresses)


def _direct(launcher: Any, metadata: Any, programs: int, fixed: tuple[Any, ...]) -> Launch | None:
    """Return the C function that Triton's launcher, a Python function, calls with additional constant arguments.

    The constants and their order differ between versions, so the launcher is called once with a probe for the stream
    and one for the argument. Return None if the launcher does anything else than pass its arguments on.
    """
    stream, argument = object(), object()
    passed: list[tuple[Any, ...]] = []
    try:
        if metadata.global_scratch_size or metadata.profile_scratch_size:  # allocated for each launch
            return None
        launch, probed = launcher.launch, copy.copy(launcher)
        probed.launch = lambda *arguments: passed.append(arguments)
        probed(programs, 1, 1, stream, *fixed, argument)
    except (AttributeError, TypeError):
        return None
    match passed:
        case [(int(), 1, 1, on, *constants, last)] if on is stream and last is argument:  # Triton 3.6
            return Launch(launch, programs, tuple(constants))
        case [(int(), 1, 1, on, *constants, (last,))] if on is stream and last is argument:  # Triton 3.7
            return Launch(launch, programs, tuple(constants), as_tuple=True)
    return None


def _without_encoding(launcher: Any, descriptions: list[TensorDescription] | None, metadata: Any) -> Any:
    """Return Triton's launcher or, for a kernel with descriptors, the launcher that it wraps, which takes encoded
    descriptors. Triton's own would encode them for every call."""
    if descriptions is None:
        return launcher
    try:
        driver = importlib.import_module("triton.backends.nvidia.driver")
        wrapped = inspect.getclosurevars(launcher.launch).nonlocals["launcher"]
        kinds = metadata.tensordesc_meta
        if len(kinds) != len(descriptions) or None in kinds:  # None: lowered to pointers
            return launcher
        inner = copy.copy(launcher)
        inner.launch = wrapped
        encode = driver.make_tensordesc_arg
    except (ImportError, AttributeError, KeyError, TypeError):
        return launcher
    for description, kind in zip(descriptions, kinds, strict=True):
        description.encode = functools.partial(encode, metadata=kind)
    return inner


# -- the kernel language ----------------------------------------------------------------------------------------------


T = TypeVar("T")


@dataclass_transform(kw_only_default=True)
def aggregate(cls: type[T]) -> type[T]:
    """Make a class a struct of device values, constructed in a kernel with one keyword for each annotated field.

    Fields annotated `Value` hold a tensor, a buffer, another aggregate, or a constant. `constexpr` fields stay compile-
    time constants when the aggregate is passed to a function or a warp-specialised partition.
    """

    def construct(self: Any, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(self, name, value if isinstance(value, Value) else constexpr(value))

    cls.__init__ = construct  # type: ignore[method-assign]
    made = triton.language.core._aggregate(cls)
    made.hash_attrs = []  # it has no device code that would belong to a kernel's hash
    return made


try:
    from triton._C.libtriton import ir
    from triton.experimental.gluon.language._core import builtin
except ImportError:  # a Triton without Gluon
    pass
else:
    __all__ += ["specialize_warps", "tma_reduce_add"]

    @builtin
    def specialize_warps(
        producer: Any, producer_args: Any, consumer: Any, consumer_args: Any, consumers: Any, registers: Any,
        _semantic: Any = None, _generator: Any = None,
    ) -> Any:  # fmt: skip
        """Run `producer(*producer_args)` in the program's own warpgroup, and `consumer(w, *consumer_args)` in each of
        `consumers` more, w = 0, 1, ..., with that many registers per thread."""
        count, registers = consumers.value, registers.value
        partitions = [(producer, producer_args), *((consumer, (constexpr(w), *consumer_args)) for w in range(count))]
        return _semantic.warp_specialize(partitions, [4] * count, [registers] * count, _generator)

    @builtin
    def tma_reduce_add(desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
        """Add a tile in shared memory to one in global memory. Gluon's compiler supports it, its language does not
        yet."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)
