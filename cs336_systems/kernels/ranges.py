"""Names for parts of a computation and for tensors, for profilers. They cost nothing unless they are enabled."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor
from torch.profiler import record_function

_enabled = False
_name_tensor: Callable[[Tensor, str], None] | None = None


@contextmanager
def ranges_enabled() -> Iterator[None]:
    """Enable the ranges of `part`: ranges of torch's profiler, and of NVTX on a GPU."""
    global _enabled
    before, _enabled = _enabled, True
    try:
        yield
    finally:
        _enabled = before


def part(name: str) -> AbstractContextManager:
    """Return a range around a part of a computation."""
    return _range(name) if _enabled else nullcontext()


@contextmanager
def _range(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(record_function(name))
        if torch.cuda.is_available():
            stack.enter_context(torch.cuda.nvtx.range(name))
        yield


@contextmanager
def tensors_named(name_tensor: Callable[[Tensor, str], None]) -> Iterator[None]:
    """Call `name_tensor(tensor, name)` for each tensor that is passed to `name` inside this context."""
    global _name_tensor
    before, _name_tensor = _name_tensor, name_tensor
    try:
        yield
    finally:
        _name_tensor = before


def name(tensor: Tensor, what: str) -> Tensor:
    """Tell a memory profiler the purpose of a tensor; return the tensor."""
    if _name_tensor is not None:
        _name_tensor(tensor, what)
    return tensor
