"""Gluon's and Triton's languages as far as the Hopper kernels use them, as Python functions on CPU tensors."""

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.unit.kernels.hopper_emulator.machine import Descriptor, EmulationError, Machine, Product, Shared

MACHINE = Machine()
DTYPES = ("int1", "int32", "int64", "float16", "bfloat16", "float32")


# -- values -----------------------------------------------------------------------------------------------------------


class ConstantInt(int):
    """An integer constant; Triton's have their value as an attribute."""

    value = property(int)


@functools.cache
def _constant_int(value: int) -> ConstantInt:
    return ConstantInt(value)


class constexpr:  # noqa: N801  # as Triton's
    def __new__(cls, value: Any) -> Any:
        return _constant_int(value) if isinstance(value, int) and not isinstance(value, bool) else value


class Block:
    """A tensor of a kernel, or a number that is known only when it runs (of no dimensions)."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    shape = property(lambda self: list(self.data.shape))
    dtype = property(lambda self: self.data.dtype)
    type = property(lambda self: SimpleNamespace(layout=None))

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        if isinstance(dtype, PointerType):
            return Pointer(self.data, dtype.element_ty)
        return Block(self.data.to(dtype))

    def __index__(self) -> int:
        return int(self.data)

    def __int__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __getitem__(self, key: Any) -> "Block":
        return Block(self.data[key])

    def __neg__(self) -> "Block":
        return Block(-self.data)

    def __invert__(self) -> "Block":
        return Block(~self.data)

    __hash__ = None  # type: ignore[assignment]


def _same_type(a: Any, b: Any) -> tuple[Any, Any]:
    """Operands as tensors of one dtype, or a tensor and a number."""
    a, b = (x.data if isinstance(x, Block) else x for x in (a, b))
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype != b.dtype:
        dtype = torch.promote_types(a.dtype, b.dtype)
        return a.to(dtype), b.to(dtype)
    for x, other in ((a, b), (b, a)):
        if isinstance(x, Tensor) and isinstance(other, float) and not x.dtype.is_floating_point:
            raise EmulationError("a fraction beside integers is not known here")
    return a, b


def _quotient(a: Any, b: Any) -> Tensor:
    """Integer division as processors do it: towards 0."""
    return torch.div(torch.as_tensor(a), torch.as_tensor(b), rounding_mode="trunc").to(_dtype_of(a, b))


def _dtype_of(a: Any, b: Any) -> torch.dtype:
    return next(x.dtype for x in (a, b) if isinstance(x, Tensor))


def _remainder(a: Any, b: Any) -> Tensor:
    return torch.fmod(torch.as_tensor(a), torch.as_tensor(b)).to(_dtype_of(a, b))


def _operator(compute: Callable[[Any, Any], Tensor], swapped: bool = False) -> Callable[[Block, Any], Any]:
    def apply(self: Block, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        a, b = _same_type(other, self) if swapped else _same_type(self, other)
        return Block(compute(a, b))

    return apply


for _name, _compute in {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "truediv": lambda a, b: a / b,
    "floordiv": _quotient, "mod": _remainder, "and": lambda a, b: a & b, "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b, "rshift": lambda a, b: a >> b, "lshift": lambda a, b: a << b,
}.items():  # fmt: skip
    setattr(Block, f"__{_name}__", _operator(_compute))
    setattr(Block, f"__r{_name}__", _operator(_compute, swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Block, f"__{_name}__", _operator(getattr(torch.Tensor, f"__{_name}__")))


class PointerType:
    def __init__(self, element_ty: torch.dtype) -> None:
        self.element_ty = element_ty


class Pointer:
    """Addresses of elements in global memory."""

    def __init__(self, addresses: Tensor, element: torch.dtype) -> None:
        self.addresses, self.dtype = addresses, PointerType(element)

    def __add__(self, offset: Any) -> "Pointer":
        offset = offset.data.to(torch.int64) if isinstance(offset, Block) else offset
        return Pointer(self.addresses + offset * self.dtype.element_ty.itemsize, self.dtype.element_ty)

    __radd__ = __add__

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Block:
        return Block(self.addresses)


# -- functions of blocks ----------------------------------------------------------------------------------------------


def _tensor(x: Any) -> Tensor:
    if isinstance(x, Block):
        return x.data
    return torch.tensor(x, dtype=torch.float32 if isinstance(x, float) else torch.int32)


def _elementwise(compute: Callable[..., Tensor]) -> Callable[[Any, Any], Any]:
    def apply(a: Any, b: Any) -> Any:
        if not isinstance(a, Block) and not isinstance(b, Block):
            return compute(torch.tensor(a), torch.tensor(b)).item()
        a, b = _same_type(a, b)
        dtype = _dtype_of(a, b)
        return Block(compute(torch.as_tensor(a, dtype=dtype), torch.as_tensor(b, dtype=dtype)))

    return apply


maximum, minimum = _elementwise(torch.fmax), _elementwise(torch.fmin)  # of a number and NaN: the number


def where(condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(condition, Block):
        return a if condition else b
    if not isinstance(a, Block) and not isinstance(b, Block):
        a, b = _tensor(a), _tensor(b)
    a, b = _same_type(a, b)
    dtype = _dtype_of(a, b)
    return Block(torch.where(condition.data, torch.as_tensor(a, dtype=dtype), torch.as_tensor(b, dtype=dtype)))


def cdiv(a: Any, b: Any) -> Any:
    return (a + b - 1) // b if isinstance(a, Block) or isinstance(b, Block) else -(-a // b)


def total(x: Block, axis: int) -> Block:
    if x.dtype == torch.bool:
        raise EmulationError("sums of booleans are not known here")
    return Block(x.data.sum(axis).to(x.dtype))


def largest(x: Block, axis: int) -> Block:
    if not x.dtype.is_floating_point:
        return Block(x.data.amax(axis))
    missing = x.data.isnan()
    found = x.data.masked_fill(missing, -torch.inf).amax(axis)
    return Block(found.masked_fill(missing.all(axis), torch.nan))  # of numbers and NaN: the largest number


def exp2(x: Block) -> Block:
    return Block(x.data.exp2())


def log2(x: Block) -> Block:
    return Block(x.data.log2())


def arange(start: int, end: int, layout: Any = None) -> Block:
    return Block(torch.arange(start, end, dtype=torch.int32))


def full(shape: Sequence[int], value: Any, dtype: torch.dtype, layout: Any = None) -> Block:
    return Block(torch.full(tuple(shape), value.data.item() if isinstance(value, Block) else value, dtype=dtype))


def zeros(shape: Sequence[int], dtype: torch.dtype, layout: Any = None) -> Block:
    return full(shape, 0, dtype)


def zeros_like(x: Block) -> Block:
    return Block(torch.zeros_like(x.data))


def reshape(x: Block, shape: Sequence[int]) -> Block:
    return Block(x.data.reshape(tuple(shape)))


def permute(x: Block, order: Sequence[int]) -> Block:
    return Block(x.data.permute(tuple(order)))


def broadcast(a: Block, b: Block) -> tuple[Block, Block]:
    first, second = torch.broadcast_tensors(a.data, b.data)
    return Block(first), Block(second)


def convert_layout(x: Block, layout: Any, assert_trivial: bool = False) -> Block:
    return x


def cast(x: Any, dtype: torch.dtype) -> Block:
    return Block(_tensor(x).to(dtype))


def inline_asm(asm: str, constraints: str, operands: list[Block], dtype: Any, pure: bool, pack: int) -> Block:
    """The only inline assembly multiplies its operands, unless all factors are 1."""
    x, factors = operands
    if "mul.f32" not in asm:
        raise EmulationError(f"inline assembly that is not known here: {asm}")
    return x * factors


def program_id(axis: int) -> Block:
    return Block(torch.tensor(MACHINE.program, dtype=torch.int32))


def num_programs(axis: int) -> Block:
    return Block(torch.tensor(MACHINE.programs, dtype=torch.int32))


def load(at: Pointer, mask: Any = None, other: float | None = None) -> Block:
    addresses, inside = _accessed(at, mask, at.addresses.shape)
    return Block(MACHINE.memory.load(addresses, inside, other, at.dtype.element_ty))


def store(at: Pointer, values: Any, mask: Any = None) -> None:
    data = _tensor(values).to(at.dtype.element_ty)
    addresses, inside = _accessed(at, mask, torch.broadcast_shapes(at.addresses.shape, data.shape))
    MACHINE.memory.store(addresses, inside, data.expand(addresses.shape))


def _accessed(at: Pointer, mask: Any, shape: Any) -> tuple[Tensor, Tensor]:
    inside = torch.tensor(True) if mask is None else _tensor(mask).bool()
    shape = torch.broadcast_shapes(shape, inside.shape)
    return at.addresses.expand(shape), inside.expand(shape)


# -- shared memory, barriers, copies, matmuls -------------------------------------------------------------------------


class Buffer(Shared):
    """Shared memory with Gluon's methods."""

    def load(self, layout: Any) -> Block:
        return Block(self.data.clone())

    def store(self, values: Block) -> None:
        MACHINE.store_shared(self, values.data)


def allocate_shared_memory(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
    buffer = Buffer.allocate(dtype, shape, layout)
    MACHINE.keep(buffer)
    return buffer


def _place(coordinates: Sequence[Any]) -> list[int]:
    return [int(at) for at in coordinates]


def load_tile(source: Descriptor, place: Sequence[Any], barrier: Shared, into: Shared, pred: Any = True) -> None:
    if pred:
        MACHINE.load_tile(source, _place(place), barrier, into)


def store_tile(target: Descriptor, place: Sequence[Any], source: Shared) -> None:
    MACHINE.store_tile(target, _place(place), source)


def reduce_add_tile(target: Descriptor, place: Sequence[Any], source: Shared) -> None:
    MACHINE.store_tile(target, _place(place), source, add=True)


def store_wait(pending: int = 0) -> None:
    if pending:
        raise EmulationError("only a wait for all stores is known here")
    MACHINE.warpgroup.await_stores()


def warpgroup_mma(a: Any, b: Shared, start: Any, use_acc: bool = True, is_async: bool = False) -> Product:
    left = a if isinstance(a, Shared) else a.data
    if left.shape[-1] != b.shape[0] or left.dtype != b.dtype:
        raise EmulationError(f"a matmul of {left.dtype} {left.shape} and {b.dtype} {b.shape}")
    if not is_async:
        raise EmulationError("only asynchronous matmuls are known here")
    start = start.data if isinstance(start, Block) else start
    return MACHINE.start_product(left, b, start if use_acc else None)


def warpgroup_mma_wait(pending: int, deps: Sequence[Any]) -> Any:
    MACHINE.wait_products(pending)
    found = []
    for x in deps:
        if isinstance(x, Product) and x.result is None:
            raise EmulationError("the result of a matmul that was not waited for")
        found.append(Block(x.result) if isinstance(x, Product) else x)
    return found[0] if len(found) == 1 else tuple(found)


def specialize_warps(
    producer: Any, producer_args: Any, consumer: Any, consumer_args: Any, consumers: int, registers: int
) -> None:  # fmt: skip
    partitions = {"the producer": lambda: producer(*producer_args)}
    for w in range(consumers):
        partitions[f"consumer {w}"] = lambda w=w: consumer(w, *consumer_args)
    MACHINE.specialize(partitions)


# -- kernels and descriptors ------------------------------------------------------------------------------------------


class Kernel:
    """A function in the kernel language: called by another, or launched over a grid."""

    seed = 0
    """Of the order in which things happen."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        names = self._function.__code__.co_varnames
        constants = {name for name, kind in self._function.__annotations__.items() if kind is constexpr}

        def launch(*arguments: Any, **options: Any) -> None:
            MACHINE.memory = type(MACHINE.memory)()
            own = [x if name in constants else _argument(x) for name, x in zip(names, arguments, strict=False)]
            for program in range(grid[0]):
                MACHINE.run(lambda: self._function(*own), program, grid[0], Kernel.seed)

        return launch


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    return Kernel(function) if function is not None else Kernel


def _argument(x: Any) -> Any:
    """An argument of a kernel that is not a constant."""
    if isinstance(x, Tensor):
        MACHINE.memory.add(x)
        return Pointer(torch.tensor(x.data_ptr()), x.dtype)
    if isinstance(x, TensorDescriptor):
        MACHINE.memory.add(x.base)
        return Descriptor(x.base, x.shape, x.strides, x.block_shape, x.layout)
    if isinstance(x, tuple):
        parts = [_argument(part) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    if isinstance(x, int) and not isinstance(x, bool):
        return Block(torch.tensor(x, dtype=torch.int32 if abs(x) < 1 << 31 else torch.int64))
    return Block(torch.tensor(x, dtype=torch.float32)) if isinstance(x, float) else x


class TensorDescriptor:
    """Gluon's description of a tensor for the copy engine, which `TensorDescription` of triton_compat.py fills in."""

    def __init__(
        self, base: Tensor, shape: list[int], strides: list[int], block_shape: list[int], layout: Any
    ) -> None:  # fmt: skip
        self.base, self.shape, self.strides, self.block_shape, self.layout = base, shape, strides, block_shape, layout


def aggregate(cls: type) -> type:
    def construct(self: Any, **fields: Any) -> None:
        if fields.keys() != cls.__annotations__.keys():
            raise EmulationError(f"{cls.__name__} has the fields {list(cls.__annotations__)}, got {list(fields)}")
        vars(self).update(fields)

    cls.__init__ = construct  # type: ignore[misc]
    return cls


# -- modules ----------------------------------------------------------------------------------------------------------


def _layout(*arguments: Any, **options: Any) -> None:
    return None


def _module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(members)
    sys.modules[name] = made
    parent, _, own = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], own, made)
    return made


def install() -> None:
    """Put these functions in the place of Triton's modules, for all that is imported afterwards."""
    layouts = ("BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout", "DistributedLinearLayout")
    shared_layout = SimpleNamespace(get_default_for=_layout)
    members: dict[str, Any] = {
        "constexpr": constexpr, "static_range": range, "range": range, "program_id": program_id,
        "num_programs": num_programs, "maximum": maximum, "minimum": minimum, "where": where, "cdiv": cdiv,
        "sum": total, "max": largest, "exp2": exp2, "log2": log2, "arange": arange, "full": full, "zeros": zeros,
        "zeros_like": zeros_like, "reshape": reshape, "permute": permute, "broadcast": broadcast, "cast": cast,
        "convert_layout": convert_layout, "load": load, "store": store, "inline_asm_elementwise": inline_asm,
        "pointer_type": PointerType, "allocate_shared_memory": allocate_shared_memory,
        "NVMMASharedLayout": shared_layout, "SwizzledSharedLayout": _layout,
        **dict.fromkeys(layouts, _layout), **{name: getattr(torch, name) for name in DTYPES if name != "int1"},
    }  # fmt: skip
    barriers = SimpleNamespace(
        MBarrierLayout=_layout,
        init=lambda at, count: MACHINE.init_barrier(at, count),
        expect=lambda at, count: MACHINE.arrive(at, expected=int(count)),
        wait=lambda at, phase: MACHINE.wait(at, int(phase)),
        arrive=lambda at: MACHINE.arrive(at),
    )
    copies = SimpleNamespace(
        async_copy_global_to_shared=load_tile, async_copy_shared_to_global=store_tile, store_wait=store_wait
    )
    hopper = {
        "fence_async_shared": MACHINE.fence, "mbarrier": barriers, "tma": copies, "warpgroup_mma": warpgroup_mma,
        "warpgroup_mma_wait": warpgroup_mma_wait,
    }  # fmt: skip
    kernels = {"jit": jit, "constexpr_function": lambda function: function}
    runtime = SimpleNamespace(interpret=True)
    _module("triton", cdiv=cdiv, knobs=SimpleNamespace(runtime=runtime), **kernels)
    _module("triton.language", **members)
    _module("triton.language.core", base_value=object, constexpr=constexpr)
    _module("triton.language.extra")
    _module("triton.language.extra.cuda", gdc_launch_dependents=lambda: None, gdc_wait=lambda: None)
    _module("triton.experimental")
    _module("triton.experimental.gluon", **kernels)
    _module("triton.experimental.gluon.language", **members)
    _module("triton.experimental.gluon.language.nvidia")
    _module("triton.experimental.gluon.language.nvidia.hopper", **hopper)
    _module("triton.experimental.gluon.nvidia")
    _module("triton.experimental.gluon.nvidia.hopper", TensorDescriptor=TensorDescriptor)
    compat = importlib.import_module("cs336_systems.kernels.triton_compat")
    own = {"aggregate": aggregate, "specialize_warps": specialize_warps, "tma_reduce_add": reduce_add_tile}
    vars(compat).update(own)  # for the compiler; its descriptions of tensors are used as they are
