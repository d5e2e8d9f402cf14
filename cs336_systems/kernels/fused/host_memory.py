"""Moves activations to pinned host memory during forward and back during backward, on a stream of its own.

Copies run beside the computation. The GPU's memory of a sent tensor is freed one block later, when the stream of the
computation has waited for the copy; memory for a fetch is allocated one block before it is needed. Both happen at fixed
points of the step, so its peak can be predicted and a CUDA graph can capture it.
"""

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cs336_systems.kernels import ranges
from cs336_systems.kernels.flash.operators import is_plain

OFFLOADED, FETCHED = "activations, offloaded", "activations, fetched"
"""Labels of tensors in memory profiles."""

Key = tuple[int, str]
"""Index of a block, and the kind of a tensor in it."""


class _Transfer(NamedTuple):
    """A GPU tensor that a copy reads or writes, and the event at the end of the copy."""

    tensor: Tensor
    done: torch.cuda.Event | None


class _Form(NamedTuple):
    """The arguments with which a tensor is allocated again."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class HostMemory:
    """Host memory for the activations of one model. Micro batches use it one after the other."""

    def __init__(self) -> None:
        self._buffers: dict[Key, Tensor] = {}
        self._captured: list[Tensor] = []
        """Buffers whose addresses a CUDA graph holds. They are kept even after a larger buffer has replaced them."""
        self.passes = 0
        """Forward passes so far."""
        self._forms: dict[Key, _Form] = {}
        self._sent: dict[Key, _Transfer] = {}
        self._fetched: dict[Key, _Transfer] = {}
        self._stream: torch.cuda.Stream | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers in use."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def begin(self) -> None:
        """Start a forward pass; drop tensors of an earlier pass that backward did not use."""
        self.passes += 1
        for key in [*self._sent]:
            self._release(key)
        for key in [*self._fetched]:
            self.take(key)

    def send(self, key: Key, tensor: Tensor) -> None:
        """Start to copy a tensor to the host. It must not change afterwards."""
        ranges.name(tensor, OFFLOADED)
        self._forms[key] = _Form(tensor.shape, tensor.dtype, tensor.device)
        self._sent[key] = _Transfer(tensor, self._copy(key, tensor, to_host=True))

    def release(self, number: int) -> None:
        """Free the GPU memory of the tensors that block `number` has sent."""
        for key in [key for key in self._sent if key[0] == number]:
            self._release(key)

    def fetch(self, keys: Iterable[Key]) -> None:
        """Start to copy tensors back. Tensors that were not released yet are still on the GPU."""
        for key in keys:
            if key in self._sent or key in self._fetched:
                continue
            form = self._forms[key]
            tensor = ranges.name(torch.empty(form.shape, dtype=form.dtype, device=form.device), FETCHED)
            self._fetched[key] = _Transfer(tensor, self._copy(key, tensor, to_host=False))

    def require_last_pass(self, number: int) -> None:
        """Raise RuntimeError if forward pass `number` is not the last: a later one has overwritten its activations."""
        if number != self.passes:
            raise RuntimeError(
                "activations in host memory were overwritten by a later forward pass: with offloading, run the "
                "backward pass of each forward pass before the next one"
            )

    def take(self, key: Key) -> Tensor:
        """Return a tensor that was sent or fetched, for use on the computation's stream."""
        transfer = self._sent.pop(key, None) or self._fetched.pop(key)
        _wait(transfer.done)
        return transfer.tensor

    def _release(self, key: Key) -> None:
        _wait(self._sent.pop(key).done)

    def _copy(self, key: Key, tensor: Tensor, *, to_host: bool) -> torch.cuda.Event | None:
        if not is_plain(tensor):  # a trace: the host's memory does not count
            return None
        buffer = self._buffer(key, tensor)
        target, source = (buffer, tensor) if to_host else (tensor, buffer)
        if not tensor.is_cuda:
            target.copy_(source)
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        if torch.cuda.is_current_stream_capturing():
            self._captured.append(buffer)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        return done

    def _buffer(self, key: Key, tensor: Tensor) -> Tensor:
        """Return host memory for a tensor; smaller batches reuse the memory of larger ones."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.nbytes < tensor.nbytes:
            self._buffers[key] = buffer = pinned(tensor.nbytes, tensor.device)
        return buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _wait(event: torch.cuda.Event | None) -> None:
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def pinned(size: int, device: torch.device) -> Tensor:
    """Allocate bytes of host memory, pinned for copies to and from a GPU.

    torch's own pinned memory is rounded up to a power of two, which would take up to twice the memory.
    """
    buffer = torch.zeros(size, dtype=torch.uint8)  # zeros: the pages have to exist before they are pinned
    if device.type == "cuda":
        runtime: Any = torch.cuda.cudart()
        address = buffer.data_ptr()
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, buffer.nbytes, 0)))
        weakref.finalize(buffer.untyped_storage(), runtime.cudaHostUnregister, address)
    return buffer
