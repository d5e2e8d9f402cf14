"""A file of tokens, read on request, and the fingerprint of all its tokens. No torch here.

Sequences are read from the open file, not memory-mapped: a file that has become shorter is an error and not a SIGBUS.
"""

import hashlib
import os
import warnings
import weakref
from collections.abc import Iterable
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cs336_systems.config import UserError

_CHUNK = 1 << 22
"""Tokens that are hashed at a time."""
_THREADS = 16
"""Maximum number of threads that hash."""
_PROBES, _PROBE_TOKENS = 64, 1 << 14
"""The fingerprint of earlier versions covers this number of places, each with this many tokens."""
OLD_DIGITS = 16
"""Number of digits of that fingerprint."""


class Tokens(NamedTuple):
    """The summary of all tokens of a file."""

    fingerprint: str = ""
    least: int = 0
    largest: int = 0


class TokenFile:
    """An open file of integers. Its content is read on request, and must not change."""

    def __init__(self, path: Path, dtype: str | None = None, *, flag: str = "--data "):
        """Open the file; raise UserError, which names the `flag`, if it holds no tokens.

        `dtype` is the type of the tokens in a file without a header; by default the suffix decides.
        """
        self.path = path
        self._name = f"{flag}{str(path)!r}"
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)
            self.state = state_of(self._descriptor)
            self._dtype, self._offset, self.count = _layout(path, self.state.size, dtype)
        except OSError as error:
            raise UserError(f"cannot read {self._name}: {error.strerror or error}") from None
        except ValueError as error:  # an empty file, or one of another format
            raise UserError(f"{self._name} holds no tokens: {error}") from None

    @property
    def identity(self) -> tuple[int, ...]:
        """Numbers that are equal for two processes of one machine only if they opened the same file."""
        return (*self.state, self._offset, self.count, self._dtype.itemsize)

    def read(self, start: int, count: int) -> np.ndarray:
        """Return `count` tokens; raise UserError if the file has become shorter."""
        wanted, position, parts = count * self._dtype.itemsize, self._offset + start * self._dtype.itemsize, []
        while wanted:
            try:
                part = os.pread(self._descriptor, wanted, position)
            except OSError as error:
                raise UserError(f"cannot read {self._name}: {error.strerror}") from None
            if not part:
                raise UserError(
                    f"{self._name} has become shorter than the {self.count:,} tokens it had; "
                    "restore it, and the same command resumes from the last checkpoint"
                )
            parts.append(part)
            wanted, position = wanted - len(part), position + len(part)
        return np.frombuffer(b"".join(parts), self._dtype)

    def summary(self) -> Tokens:
        """Read all tokens once, with several threads."""
        from cs336_systems.parallel.peers import in_background

        starts, threads = self.chunks(), min(_THREADS, os.cpu_count() or 1)
        parts = [in_background(partial(self._summaries, starts[first::threads])) for first in range(threads)]
        rows = zip_longest(*(part.result() for part in parts))
        return combined(self.count, [chunk for row in rows for chunk in row if chunk is not None])

    def chunks(self) -> range:
        """Return the first token of each chunk that is hashed separately."""
        return range(0, self.count, _CHUNK)

    def _summaries(self, starts: range) -> list[Tokens]:
        return [self.chunk_summary(start) for start in starts]

    def chunk_summary(self, start: int) -> Tokens:
        """Return the summary of the chunk that begins at `start`."""
        tokens = self.read(start, min(_CHUNK, self.count - start))
        least, largest = int(tokens.min()), int(tokens.max())
        # The smallest type that holds them: the same whatever the type in the file, and fewest bytes to hash.
        dtype = np.min_scalar_type(largest) if least >= 0 else np.dtype(np.int64)
        tokens = tokens.astype(dtype.newbyteorder("<"), copy=False)
        return Tokens(hashlib.sha256(tokens.data).hexdigest(), least, largest)

    def probes(self) -> str:
        """Return the fingerprint of earlier versions: a hash of the tokens at evenly spaced places."""
        digest = hashlib.sha256(str(self.count).encode())
        width = min(_PROBE_TOKENS, self.count)
        for probe in range(_PROBES):
            start = (self.count - width) * probe // (_PROBES - 1)
            digest.update(self.read(start, width).astype(np.int64).tobytes())
        return digest.hexdigest()[:OLD_DIGITS]

    def require_unchanged(self, fingerprint: str) -> None:
        """Raise UserError if the file was written to and now holds other tokens than at the start of the run."""
        if (now := state_of(self._descriptor)) == self.state:
            return
        if self.summary().fingerprint != fingerprint:
            raise UserError(
                f"{self._name} was changed while it was trained on; "
                "restore it, and the same command resumes from the last checkpoint"
            )
        said = "its tokens are the same"
        if now.size > self.state.size:
            said = "what was added is not used, and resuming this run needs the file as it was"
        warnings.warn(f"{self._name} was written to; {said}", stacklevel=2)
        self.state = now


def combined(count: int, chunks: Iterable[Tokens]) -> Tokens:
    """Return the summary of a file from those of its chunks: it depends on the tokens, not on the format."""
    found = list(chunks)
    digest = hashlib.sha256(f"{count} {_CHUNK}".encode())
    for chunk in found:
        digest.update(bytes.fromhex(chunk.fingerprint))
    return Tokens(digest.hexdigest(), min(c.least for c in found), max(c.largest for c in found))


class FileState(NamedTuple):
    """The identity of an open file, and attributes that change when it is written to."""

    device: int
    inode: int
    size: int
    mtime_ns: int


def state_of(descriptor: int) -> FileState:
    """Return the present state of an open file."""
    found = os.fstat(descriptor)
    return FileState(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _array_in(path: Path) -> np.memmap:
    """Map the array of a .npy file, of which only the header is read; raise ValueError for another file."""
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError):  # numpy speaks of its own arguments
        raise ValueError("it is no .npy array of integers, or it is cut off") from None


def _layout(path: Path, size: int, given: str | None) -> tuple[np.dtype, int, int]:
    """Return the type of the tokens in a file, the offset of the first, and their number."""
    if given is None and path.suffix == ".npy":
        array = _array_in(path)
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            kind = f"{array.dtype} of {array.shape}"
            raise ValueError(f"they must be a one-dimensional array of integers, got {kind}")
        return array.dtype, array.offset, len(array)
    dtype = np.dtype(given or ("<u2" if path.suffix == ".bin" else np.uint8))
    if size % dtype.itemsize or not size:
        raise ValueError(f"its {size:,} bytes are not a multiple of {dtype.itemsize}" if size else "it is empty")
    return dtype, 0, size // dtype.itemsize
