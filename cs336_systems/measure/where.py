"""Where in the model's code something happens: the module that runs, and the line that called."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

_TORCH = str(Path(torch.__file__).parent)
_INSTRUMENTS = str(Path(__file__).parent)


class ModuleStack:
    """The modules of a model that are running, by name, the innermost last."""

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
            # Recomputation of a checkpoint is ended by an exception: the module is left all the same.
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def calling_line() -> str:
    """The nearest line that is neither torch's nor an instrument's; backward's own thread has none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _INSTRUMENTS, "<")):
            return f"{Path(file).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
