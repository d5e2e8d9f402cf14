"""Tokens from a file, in an order that depends on the seed alone.

Text is read as bytes: 256 tokens, no vocabulary to build. Tokenized files are `.bin` (16-bit integers) or `.npy`. All
are memory-mapped.

The training part is cut into sequences, and every epoch visits each of them once, shuffled. The n-th sequence of a run
is a function of seed and n, so the data of a step depends neither on the number of ranks nor on restarts.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cs336_systems.config import UserError

_CHUNK = 1 << 24
_PROBES, _PROBE_TOKENS = 64, 1 << 14
"""The fingerprint of a file covers this many places, of this many tokens each."""


@dataclass(frozen=True)
class Corpus:
    """A file of tokens, the end of which is held out for validation."""

    path: Path
    tokens: np.ndarray
    context_length: int
    validation_share: float

    @classmethod
    def open(cls, name: str, *, context_length: int, vocab_size: int, validation_share: float = 0.1) -> "Corpus":
        path = Path(name)
        corpus = cls(path, _read(path), context_length, validation_share)
        for part, count in (("training", corpus.training_sequences), ("validation", corpus.validation_sequences)):
            if count < 1:
                raise UserError(
                    f"--data {name!r} has {len(corpus.tokens):,} tokens: too few for one {part} sequence of "
                    f"{context_length}; use a longer file, or a smaller --context_length"
                )
        least, largest = _range(corpus.tokens)
        if least < 0:
            raise UserError(f"--data {name!r} holds token {least}: tokens are integers of at least 0")
        if largest >= vocab_size:
            raise UserError(
                f"--data {name!r} holds token {largest}, and --vocab_size is {vocab_size}; it must be larger"
            )
        return corpus

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the number of tokens and of the tokens at evenly spaced places, whatever the name of the file."""
        digest = hashlib.sha256(str(len(self.tokens)).encode())
        width = min(_PROBE_TOKENS, len(self.tokens))
        for probe in range(_PROBES):
            start = (len(self.tokens) - width) * probe // (_PROBES - 1)
            digest.update(np.ascontiguousarray(self.tokens[start : start + width]).astype(np.int64).tobytes())
        return digest.hexdigest()[:16]

    @property
    def _training_tokens(self) -> int:
        return len(self.tokens) - int(len(self.tokens) * self.validation_share)

    @property
    def training_sequences(self) -> int:
        """Number of training sequences. The last target of one is the first input of the next."""
        return (self._training_tokens - 1) // self.context_length

    @property
    def validation_sequences(self) -> int:
        return (len(self.tokens) - self._training_tokens - 1) // self.context_length

    def training(self, seed: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the sequences `first` to `first + count` of a run, (count, context) each."""
        return self._sequences([shuffled(n, self.training_sequences, seed) for n in range(first, first + count)], 0)

    def validation(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return validation sequences in the order of the file, starting over at its end."""
        numbers = [n % self.validation_sequences for n in range(first, first + count)]
        return self._sequences(numbers, self._training_tokens)

    def _sequences(self, numbers: list[int], begin: int) -> tuple[Tensor, Tensor]:
        length = self.context_length
        starts = [begin + number * length for number in numbers]
        rows = np.stack([self.tokens[start : start + length + 1] for start in starts]).astype(np.int64)
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1], tokens[:, 1:]


def _read(path: Path) -> np.ndarray:
    try:
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r")
        else:
            tokens = np.memmap(path, dtype=np.uint16 if path.suffix == ".bin" else np.uint8, mode="r")
    except OSError as error:
        raise UserError(f"cannot read --data {str(path)!r}: {error.strerror or error}") from None
    except (ValueError, EOFError) as error:  # an empty file, or one of another format
        raise UserError(f"--data {str(path)!r} holds no tokens: {error}") from None
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise UserError(
            f"--data {str(path)!r} must be a one-dimensional array of integers, got {tokens.dtype} of {tokens.shape}"
        )
    return tokens


def _range(tokens: np.ndarray) -> tuple[int, int]:
    """Return the minimum and the maximum."""
    chunks = [tokens[i : i + _CHUNK] for i in range(0, len(tokens), _CHUNK)]
    return min(int(chunk.min()) for chunk in chunks), max(int(chunk.max()) for chunk in chunks)


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
