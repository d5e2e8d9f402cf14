"""Kernel launches that are cheap to repeat.

A small problem takes the GPU less time than Python takes to launch it. So everything a call derives from shapes and
strides (kernel, grid, integer arguments, compiled code) is kept in a Plan, and further calls of that kind go straight
to the driver.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cs336_systems.kernels.cache import Cache
from cs336_systems.kernels.triton_compat import INTERPRETED, Launch, TensorDescription, launch_of


@dataclass
class Plan:
    """One kernel for tensors of given shapes, strides and alignment.

    The kernel's arguments are, in this order: tensors, pointers, the integers `before`, per-call numbers, and `after`.
    """

    kernel: Any
    programs: int
    device: int | None
    copied: tuple[int, ...]
    """Indices of the tensors whose layout the kernel does not support: it gets a copy."""
    descriptions: list[TensorDescription] | None
    """A descriptor for each tensor, if TMA moves them."""
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    options: dict[str, int]
    launch: Launch | None = None
    """Set by the first call, which compiles the kernel."""
    cache: Cache[tuple[Any, ...], tuple[Any, ...]] = field(default_factory=Cache)
    """(stream, addresses, numbers) -> all arguments of a launch, about 70. Allocators reuse addresses; this took a
    launch from 3.0 to 1.9 us and the whole call from 18 to 15."""

    def __call__(self, tensors: Sequence[Tensor], pointers: Sequence[Tensor | None], *numbers: float) -> None:
        if self.device is not None and self.device != torch._C._cuda_getDevice():
            with torch.cuda.device(self.device):
                return self(tensors, pointers, *numbers)
        if self.copied:
            # Not `contiguous()`, which would keep a contiguous tensor that is only misaligned.
            tensors = [
                t.clone(memory_format=torch.contiguous_format) if i in self.copied else t for i, t in enumerate(tensors)
            ]
        if self.launch is None:
            compiled = self.kernel[(self.programs,)](*self.arguments(tensors, pointers, *numbers), **self.options)
            if not INTERPRETED:
                self.launch = launch_of(compiled, self.programs, self.descriptions)
            return
        launch, stream = self.launch, torch._C._cuda_getCurrentRawStream(self.device or 0)
        parts: list[Any] = [stream, *numbers]
        for t in tensors:
            parts.append(t.data_ptr())
        for pointer in pointers:
            parts.append(None if pointer is None else pointer.data_ptr())
        key = tuple(parts)
        arguments = self.cache.get(key)
        if arguments is None:
            # Addresses are passed as integers: for a tensor the launcher would query the driver.
            addresses = key[1 + len(numbers) :]
            if self.descriptions is not None:
                described = zip(self.descriptions, tensors, strict=True)
                addresses = (*(part for d, t in described for part in d.encoded(t)), *addresses[len(tensors) :])
            arguments = launch.arguments(stream, (*addresses, *self.before, *numbers, *self.after))
            if launch.takes_addresses:
                self.cache[key] = arguments
        # The last step of `kernel[grid](...)`, without looking up again which specialisation the arguments need.
        launch.function(*arguments)

    def arguments(self, tensors: Sequence[Any], pointers: Sequence[Any], *numbers: float) -> tuple[Any, ...]:
        """Return the kernel's arguments in its order."""
        if self.descriptions is not None:
            tensors = [description(t) for description, t in zip(self.descriptions, tensors, strict=True)]
        return (*tensors, *pointers, *self.before, *numbers, *self.after)


def suits_tma(t: Tensor) -> bool:
    """Return True if TMA can move tiles of `t`: contiguous rows; address and other strides multiples of 16 bytes, not
    0."""
    unit = 16 // t.element_size()
    strides = zip(t.shape[:-1], t.stride()[:-1], strict=True)
    return t.data_ptr() % 16 == 0 and t.stride(-1) == 1 and all(n == 1 or (s > 0 and s % unit == 0) for n, s in strides)
