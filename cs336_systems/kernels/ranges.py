"""Named ranges for the parts of a computation, for profilers. They cost nothing unless they are enabled."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch.profiler import record_function

_enabled = False


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
    """A range around a part of a computation."""
    return _range(name) if _enabled else nullcontext()


@contextmanager
def _range(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(record_function(name))
        if torch.cuda.is_available():
            stack.enter_context(torch.cuda.nvtx.range(name))
        yield
