"""Names for the parts of a computation, seen in profiles. They cost nothing unless an instrument looks on."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch.profiler import record_function

_looked_at = False


@contextmanager
def looked_at() -> Iterator[None]:
    """While this is open, parts are ranges of the profiler, and of NVTX on a GPU."""
    global _looked_at
    before, _looked_at = _looked_at, True
    try:
        yield
    finally:
        _looked_at = before


def part(name: str) -> AbstractContextManager:
    return _range(name) if _looked_at else nullcontext()


@contextmanager
def _range(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(record_function(name))
        if torch.cuda.is_available():
            stack.enter_context(torch.cuda.nvtx.range(name))
        yield
