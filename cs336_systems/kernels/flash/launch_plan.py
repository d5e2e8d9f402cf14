"""A launch that is cheap to repeat.

A small problem is over before Python has launched it. So what a call works out from shapes and strides (which kernel,
grid, whole-number arguments, the compiled code) is kept, and the next call of that kind goes straight to the driver.
"""

import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton
from torch import Tensor

from cs336_systems.kernels.cache import Cache

INTERPRETED = triton.knobs.runtime.interpret


@dataclass
class Plan:
    """One kernel for tensors of certain shapes, strides and alignment. Its arguments are, in this order: tensors,
    pointers, the whole numbers `before`, numbers that differ from call to call, and `after`."""

    kernel: Any
    programs: int
    device: int | None
    copied: tuple[int, ...]
    """Which tensors are not as the kernel wants them."""
    descriptors: list["Description"] | None
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    options: dict[str, int]
    launch: "Launch | None" = None
    """There from the second call on: the first one compiles."""
    known: Cache[tuple[Any, ...], tuple[Any, ...]] = field(default_factory=Cache)
    """Stream, addresses and numbers -> all that is launched with. Allocators hand out the same addresses again and
    again, and to put that many arguments together takes a quarter of the time that a launch does."""

    def __call__(self, tensors: Sequence[Tensor], pointers: Sequence[Tensor | None], *numbers: float) -> None:
        if self.device is not None and self.device != torch._C._cuda_getDevice():
            with torch.cuda.device(self.device):
                return self(tensors, pointers, *numbers)
        if self.copied:
            # Not `contiguous()`: what is wrong may be but where the tensor begins.
            tensors = [
                t.clone(memory_format=torch.contiguous_format) if i in self.copied else t for i, t in enumerate(tensors)
            ]
        if self.launch is None:
            compiled = self.kernel[(self.programs,)](*self.arguments(tensors, pointers, *numbers), **self.options)
            if not INTERPRETED:
                self.launch = _launch(compiled, self.programs, self.descriptors)
            return
        launch, stream = self.launch, torch._C._cuda_getCurrentRawStream(self.device or 0)
        key: list[Any] = [stream, *numbers]
        for t in tensors:
            key.append(t.data_ptr())
        for pointer in pointers:
            key.append(None if pointer is None else pointer.data_ptr())
        whole = tuple(key)
        arguments = self.known.get(whole)
        if arguments is None:
            # Addresses are given as numbers: of a tensor the launcher would ask the driver.
            moved = whole[1 + len(numbers) :]
            if self.descriptors is not None:
                described = zip(self.descriptors, tensors, strict=True)
                moved = (*(part for d, t in described for part in d.encoded(t)), *moved[len(tensors) :])
            arguments = launch.arguments(stream, (*moved, *self.before, *numbers, *self.after))
            if launch.takes_addresses:
                self.known[whole] = arguments
        # What `kernel[grid](...)` ends in, without finding out again which of its specialisations these arguments need.
        launch.function(*arguments)

    def arguments(self, tensors: Sequence[Any], pointers: Sequence[Any], *numbers: float) -> tuple[Any, ...]:
        """The kernel's, in its order."""
        if self.descriptors is not None:
            tensors = [described(t) for described, t in zip(self.descriptors, tensors, strict=True)]
        return (*tensors, *pointers, *self.before, *numbers, *self.after)


class Description:
    """A tensor descriptor, all but the tensor: checked once, when it is made, and copied for every call.

    It describes all of the tensor, or with `start` a part of a flat one: `t`, that many elements after its begin.
    """

    def __init__(self, kind: type, t: Tensor, block_shape: list[int], *layout: Any, start: int | None = None):
        self.kind = kind
        # The stride of a dimension of 1 means nothing, but must be a multiple of 16 bytes all the same.
        strides = [s if n > 1 else 8 for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True)] + [1]
        self.fields = dict(vars(kind(t, list(t.shape), strides, block_shape, *layout)))
        del self.fields["base"]
        self.start = start
        self.encode: Callable[[Any], Sequence[Any]] | None = None
        self.known: Cache[int, Sequence[Any]] = Cache()

    def __call__(self, base: Tensor) -> Any:
        if self.start is not None:
            base = base.as_strided(self.fields["shape"], self.fields["strides"], base.storage_offset() + self.start)
        descriptor: Any = object.__new__(self.kind)
        descriptor.__dict__.update(self.fields, base=base)
        return descriptor

    def encoded(self, base: Tensor) -> Sequence[Any]:
        """As the kernel gets it. Allocators hand out the same addresses again and again, so these are kept: to encode
        one takes longer than to launch a kernel."""
        if self.encode is None:
            return (self(base),)
        address = base.data_ptr()
        found = self.known.get(address)
        if found is None:
            found = self.known[address] = self.encode(self(base))
        return found


@dataclass(frozen=True)
class Launch:
    """What launches a compiled kernel: `function(*arguments(stream, own))`, `own` being the kernel's."""

    function: Callable[..., Any]
    programs: int
    constants: tuple[Any, ...]
    """Between the stream and the kernel's arguments."""
    as_one: bool = False
    """The kernel's arguments are one tuple."""
    takes_addresses: bool = True
    """None of them is a tensor, or holds one."""

    def arguments(self, stream: int, own: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.programs, 1, 1, stream, *self.constants, *((own,) if self.as_one else own))


def _launch(compiled: Any, programs: int, descriptors: "list[Description] | None") -> Launch:
    """What launches that many programs of a compiled kernel."""
    launcher = _launcher(compiled.run, descriptors, compiled.metadata)
    fixed = compiled.function, compiled.packed_metadata, None, None, None
    takes_addresses = all(described.encode is not None for described in descriptors or ())
    found = _direct(launcher, compiled.metadata, programs, fixed) or Launch(launcher, programs, fixed)
    return replace(found, takes_addresses=takes_addresses)


def _direct(launcher: Any, metadata: Any, programs: int, fixed: tuple[Any, ...]) -> Launch | None:
    """Without Triton's own launcher, which is Python and passes what it got, and some constants, to a function in C.

    The constants and their order differ between versions, so it is asked: what does it pass for two marks? None where
    it does more than that, or something not known here.
    """
    stream, argument = object(), object()
    passed: list[tuple[Any, ...]] = []
    try:
        if metadata.global_scratch_size or metadata.profile_scratch_size:  # memory for each launch
            return None
        launch, asked = launcher.launch, copy.copy(launcher)
        asked.launch = lambda *arguments: passed.append(arguments)
        asked(programs, 1, 1, stream, *fixed, argument)
    except (AttributeError, TypeError):
        return None
    match passed:
        case [(int(), 1, 1, on, *constants, last)] if on is stream and last is argument:
            return Launch(launch, programs, tuple(constants))
        case [(int(), 1, 1, on, *constants, (last,))] if on is stream and last is argument:
            return Launch(launch, programs, tuple(constants), as_one=True)
    return None


def _launcher(launcher: Any, descriptors: "list[Description] | None", metadata: Any) -> Any:
    """Triton's, or where the kernel takes descriptors, what is beneath: it takes them `encoded`.

    Triton's would encode them again for every call. Where its insides are not what they were in 3.6 and 3.7, it may.
    """
    if descriptors is None:
        return launcher
    try:
        driver = importlib.import_module("triton.backends.nvidia.driver")
        inside = inspect.getclosurevars(launcher.launch).nonlocals["launcher"]
        kinds = metadata.tensordesc_meta
        if len(kinds) != len(descriptors) or None in kinds:  # None: lowered to pointers
            return launcher
        beneath = copy.copy(launcher)
        beneath.launch = inside
        encode = driver.make_tensordesc_arg
    except (ImportError, AttributeError, KeyError, TypeError):
        return launcher
    for described, kind in zip(descriptors, kinds, strict=True):
        described.encode = functools.partial(encode, metadata=kind)
    return beneath


def suits_tma(t: Tensor) -> bool:
    """The copy engine wants contiguous rows, and all else apart by multiples of 16 bytes, not by 0."""
    unit = 16 // t.element_size()
    strides = zip(t.shape[:-1], t.stride()[:-1], strict=True)
    return t.data_ptr() % 16 == 0 and t.stride(-1) == 1 and all(n == 1 or (s > 0 and s % unit == 0) for n, s in strides)
