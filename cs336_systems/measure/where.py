"""Locates events in the model's code: the running module, the calling line, the shape of a tensor."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

_TORCH = str(Path(torch.__file__).parent)
_INSTRUMENTS = str(Path(__file__).parent)


class ModuleStack:
    """The names of the modules that are running, the innermost last."""

    def __init__(self) -> None:
        self._names: list[str] = []

    @property
    def innermost(self) -> str:
        return self._names[-1] if self._names else ""

    @property
    def is_empty(self) -> bool:
        return not self._names

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        def leave(*_: Any) -> None:
            self._names.pop()

        handles: list[Any] = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._names.append(name)))
            # Recomputation of a checkpoint ends with an exception; always_call runs the hook nevertheless.
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def calling_line() -> str:
    """Return the nearest line outside torch and the instruments; empty in autograd's own thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _INSTRUMENTS, "<")):
            return f"{Path(file).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def describe_tensor(tensor: Tensor) -> str:
    """Return the shape and dtype of a tensor: `4x512x768 float32`."""
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}"
