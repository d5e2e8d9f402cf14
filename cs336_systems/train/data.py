"""Tokens from a file, in an order that depends on the seed alone.

Text is read as bytes: 256 tokens, no vocabulary to build. Tokenized files are `.bin` (16-bit integers) or `.npy`. Each
sequence is read from the open file, not memory-mapped: a file that has become shorter is an error and not a SIGBUS.

The training part is cut into sequences, and every epoch visits each of them once, shuffled. The n-th sequence of a run
is a function of seed and n, so the data of a step depends neither on the number of ranks nor on restarts.
"""

import hashlib
import os
import warnings
import weakref
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cs336_systems.config import UserError
from cs336_systems.parallel.peers import in_background

_CHUNK = 1 << 22
"""Tokens that are hashed at a time."""
_THREADS = 16
"""Most threads that hash."""
_PROBES, _PROBE_TOKENS = 64, 1 << 14
"""The fingerprint of earlier versions covers this many places, of this many tokens each."""
_OLD_DIGITS = 16


class Tokens(NamedTuple):
    """The summary of all tokens of a file."""

    fingerprint: str = ""
    least: int = 0
    largest: int = 0


class TokenFile:
    """An open file of integers. Its content is read on request, and must not change."""

    def __init__(self, path: Path):
        """Open the file; raise UserError if it holds no tokens."""
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)
            self._seen = self._state()
            self._dtype, self._offset, self.count = _layout(path, self._seen.size)
        except OSError as error:
            raise UserError(f"cannot read --data {str(path)!r}: {error.strerror or error}") from None
        except (ValueError, EOFError) as error:  # an empty file, or one of another format
            raise UserError(f"--data {str(path)!r} holds no tokens: {error}") from None

    @property
    def identity(self) -> tuple[int, ...]:
        """Numbers that are equal for two processes of one machine only if they have opened the same file."""
        return (*self._seen, self._offset, self.count, self._dtype.itemsize)

    def read(self, start: int, count: int) -> np.ndarray:
        """Return `count` tokens; raise UserError if the file has become shorter."""
        wanted, position, parts = count * self._dtype.itemsize, self._offset + start * self._dtype.itemsize, []
        while wanted:
            try:
                part = os.pread(self._descriptor, wanted, position)
            except OSError as error:
                raise UserError(f"cannot read --data {str(self.path)!r}: {error.strerror}") from None
            if not part:
                raise UserError(
                    f"--data {str(self.path)!r} has become shorter than the {self.count:,} tokens it had; "
                    "restore it, and the same command resumes from the last checkpoint"
                )
            parts.append(part)
            wanted, position = wanted - len(part), position + len(part)
        return np.frombuffer(b"".join(parts), self._dtype)

    def summary(self) -> Tokens:
        """Read all tokens once. The fingerprint depends on the tokens, not on the format of the file."""
        starts, threads = range(0, self.count, _CHUNK), min(_THREADS, os.cpu_count() or 1)
        parts = [in_background(partial(self._summaries, starts[first::threads])) for first in range(threads)]
        chunks = [
            chunk for row in zip_longest(*(part.result() for part in parts)) for chunk in row if chunk is not None
        ]
        digest = hashlib.sha256(f"{self.count} {_CHUNK}".encode())
        for chunk in chunks:
            digest.update(bytes.fromhex(chunk.fingerprint))
        return Tokens(digest.hexdigest(), min(c.least for c in chunks), max(c.largest for c in chunks))

    def _summaries(self, starts: range) -> list[Tokens]:
        return [self._chunk_summary(start) for start in starts]

    def _chunk_summary(self, start: int) -> Tokens:
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
        return digest.hexdigest()[:_OLD_DIGITS]

    def require_unchanged(self, fingerprint: str) -> None:
        """Raise UserError if the file was written to and holds other tokens now than at the start of the run."""
        if (now := self._state()) == self._seen:
            return
        if self.summary().fingerprint != fingerprint:
            raise UserError(
                f"--data {str(self.path)!r} was changed while it was trained on; "
                "restore it, and the same command resumes from the last checkpoint"
            )
        said = "its tokens are the same"
        if now.size > self._seen.size:
            said = "what was added is not used, and resuming this run needs the file as it was"
        warnings.warn(f"--data {str(self.path)!r} was written to; {said}", stacklevel=2)
        self._seen = now

    def _state(self) -> "_State":
        found = os.fstat(self._descriptor)
        return _State(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


class _State(NamedTuple):
    device: int
    inode: int
    size: int
    mtime_ns: int


def _layout(path: Path, size: int) -> tuple[np.dtype, int, int]:
    """Return the type of the tokens in a file, the offset of the first, and their number."""
    if path.suffix == ".npy":
        array = np.load(path, mmap_mode="r")  # reads the header only
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            kind = f"{array.dtype} of {array.shape}"
            raise UserError(f"--data {str(path)!r} must be a one-dimensional array of integers, got {kind}")
        return array.dtype, array.offset, len(array)
    dtype = np.dtype("<u2" if path.suffix == ".bin" else np.uint8)
    if size % dtype.itemsize or not size:
        raise ValueError(f"its {size:,} bytes are not a multiple of {dtype.itemsize}" if size else "it is empty")
    return dtype, 0, size // dtype.itemsize


@dataclass(frozen=True)
class Corpus:
    """A file of tokens, the end of which is held out for validation."""

    tokens: TokenFile
    context_length: int
    validation_share: float
    fingerprint: str = ""
    """Hash of all tokens, whatever the name and the format of the file; set by `checked`."""

    @classmethod
    def open(cls, name: str, *, context_length: int, validation_share: float = 0.1) -> "Corpus":
        """Open a file whose tokens are to be `checked`."""
        corpus = cls(TokenFile(Path(name)), context_length, validation_share)
        for part, count in (("training", corpus.training_sequences), ("validation", corpus.validation_sequences)):
            if count < 1:
                raise UserError(
                    f"--data {name!r} has {corpus.tokens.count:,} tokens: too few for one {part} sequence of "
                    f"{context_length}; use a longer file, or a smaller --context_length"
                )
        return corpus

    def checked(self, found: Tokens, vocab_size: int) -> "Corpus":
        """Return the corpus with its fingerprint, from a summary of all tokens; raise UserError for unknown tokens."""
        name = str(self.tokens.path)
        if found.least < 0:
            raise UserError(f"--data {name!r} holds token {found.least}: tokens are integers of at least 0")
        if found.largest >= vocab_size:
            raise UserError(
                f"--data {name!r} holds token {found.largest}, and --vocab_size is {vocab_size}; it must be larger"
            )
        return replace(self, fingerprint=found.fingerprint)

    def has_fingerprint(self, fingerprint: object) -> bool:
        """Return whether these are the tokens of a checkpoint, which may have been written by the first version."""
        if isinstance(fingerprint, str) and len(fingerprint) == _OLD_DIGITS:
            return fingerprint == self._probes
        return fingerprint == self.fingerprint

    @cached_property
    def _probes(self) -> str:
        return self.tokens.probes()

    @property
    def _training_tokens(self) -> int:
        return self.tokens.count - int(self.tokens.count * self.validation_share)

    @property
    def training_sequences(self) -> int:
        """Number of training sequences. The last target of one is the first input of the next."""
        return (self._training_tokens - 1) // self.context_length

    @property
    def validation_sequences(self) -> int:
        return (self.tokens.count - self._training_tokens - 1) // self.context_length

    def training(self, seed: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the sequences `first` to `first + count` of a run, (count, context) each."""
        return self._sequences([shuffled(n, self.training_sequences, seed) for n in range(first, first + count)], 0)

    def validation(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return validation sequences in the order of the file, starting over at its end."""
        numbers = [n % self.validation_sequences for n in range(first, first + count)]
        return self._sequences(numbers, self._training_tokens)

    def _sequences(self, numbers: list[int], begin: int) -> tuple[Tensor, Tensor]:
        self.tokens.require_unchanged(self.fingerprint)
        length = self.context_length
        starts = [begin + number * length for number in numbers]
        rows = np.stack([self.tokens.read(start, length + 1) for start in starts]).astype(np.int64)
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1], tokens[:, 1:]


_ROUNDS = 4


def shuffled(n: int, count: int, seed: int) -> int:
    """Return the n-th index of an endless sequence of epochs, each a random permutation of range(count).

    A Feistel network permutes the integers of an even number of bits; results beyond `count` go through it again. It
    stores nothing, so an epoch of a billion sequences costs no memory.
    """
    epoch, index = divmod(n, count)
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (_mix(right, number, epoch, seed) & mask)
        index = left << half | right
        if index < count:
            return index


def _mix(*numbers: int) -> int:
    """Return a 64-bit hash (the mixing function of SplitMix64)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state
