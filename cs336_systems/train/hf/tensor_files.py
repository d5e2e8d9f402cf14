"""Reads and writes safetensors files one tensor at a time: a model may be larger than the memory.

The library `safetensors` reads and checks files. It writes only what is in memory, and its metadata in a random order;
so writing is done here, and the same weights give the same bytes.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cs336_systems.config import UserError
from cs336_systems.files import reason_of, replacing, require_regular

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Element types of weights, each of which converts to fp32 exactly."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8


class Described(NamedTuple):
    """A tensor in a file: its name, the name of its element type, its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def described(name: str, value: Tensor) -> Described:
    return Described(name, NAMES[value.dtype], tuple(value.shape))


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file with the library, which checks its header; raise UserError for anything else."""
    require_regular(path)
    with ExitStack() as stack:
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError, RuntimeError) as error:  # torch cannot map it into memory
            raise UserError(
                f"{str(path)!r} cannot be read as safetensors: {reason_of(error)}; copy or download it again"
            ) from None
        yield file


def write_tensors(
    path: Path, described: Sequence[Described], read: Callable[[str], Tensor], metadata: dict[str, str]
) -> None:
    """Write a safetensors file, whole or not at all; `read` returns one tensor after another by its name."""
    header: dict[str, Any] = {"__metadata__": metadata}
    place = 0
    for one in described:
        header[one.name] = {"dtype": one.dtype, "shape": one.shape, "data_offsets": [place, place + one.size]}
        place += one.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with replacing(path) as fresh, open(fresh, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for one in described:
            value = read(one.name).contiguous()
            assert (tuple(value.shape), value.dtype) == (one.shape, DTYPES[one.dtype]), one.name
            file.write(value.view(-1).view(torch.uint8).numpy().data)
