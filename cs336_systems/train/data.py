"""Tokens from a file, in an order that depends on the seed alone.

Text is read as bytes: 256 tokens, no vocabulary to build. Files of tokens that somebody has made already are `.bin`
(16-bit numbers, one after another) and `.npy`. None is read into memory.

The order. The training part is cut into sequences; every epoch goes through all of them once, shuffled. The n-th
sequence of a run is a function of seed and n, so what a step trains on does not depend on how many ranks share it, nor
on what was trained before a restart.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cs336_systems.config import UserError

_SCANNED_AT_ONCE = 1 << 24
_PLACES, _COMPARED = 64, 1 << 14
"""Where a file is looked at to know it again, and how many tokens there."""


@dataclass(frozen=True)
class Corpus:
    """A file of tokens, its last part kept for validation."""

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
            raise UserError(f"--data {name!r} holds token {least}: tokens are numbers from 0 on")
        if largest >= vocab_size:
            raise UserError(
                f"--data {name!r} holds token {largest}, and --vocab_size is {vocab_size}; it must be larger"
            )
        return corpus

    @cached_property
    def fingerprint(self) -> str:
        """Of the tokens, whatever the file is called: their number, and those at many places."""
        digest = hashlib.sha256(str(len(self.tokens)).encode())
        width = min(_COMPARED, len(self.tokens))
        for place in range(_PLACES):
            start = (len(self.tokens) - width) * place // (_PLACES - 1)
            digest.update(np.ascontiguousarray(self.tokens[start : start + width]).astype(np.int64).tobytes())
        return digest.hexdigest()[:16]

    @property
    def _training_tokens(self) -> int:
        return len(self.tokens) - int(len(self.tokens) * self.validation_share)

    @property
    def training_sequences(self) -> int:
        """The last token of each is only a target, and the first input of the next."""
        return (self._training_tokens - 1) // self.context_length

    @property
    def validation_sequences(self) -> int:
        return (len(self.tokens) - self._training_tokens - 1) // self.context_length

    def training(self, seed: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the sequences `first` to `first + count` of a run, (count, context) each."""
        places = [shuffled(n, self.training_sequences, seed) for n in range(first, first + count)]
        return self._sequences(places, 0)

    def validation(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """In the order of the file, from the beginning again when it is over."""
        places = [n % self.validation_sequences for n in range(first, first + count)]
        return self._sequences(places, self._training_tokens)

    def _sequences(self, places: list[int], begin: int) -> tuple[Tensor, Tensor]:
        length = self.context_length
        starts = [begin + place * length for place in places]
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
    except (ValueError, EOFError) as error:  # an empty file, or one of another kind
        raise UserError(f"--data {str(path)!r} holds no tokens: {error}") from None
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise UserError(f"--data {str(path)!r} must be a list of whole numbers, got {tokens.dtype} of {tokens.shape}")
    return tokens


def _range(tokens: np.ndarray) -> tuple[int, int]:
    """The least and the largest."""
    pieces = [tokens[i : i + _SCANNED_AT_ONCE] for i in range(0, len(tokens), _SCANNED_AT_ONCE)]
    return min(int(piece.min()) for piece in pieces), max(int(piece.max()) for piece in pieces)


# -- the order --------------------------------------------------------------------------------------------------------

_ROUNDS = 4


def shuffled(n: int, count: int, seed: int) -> int:
    """The n-th of `count` things that are gone through again and again, each time once and in another order.

    A Feistel network: it permutes the numbers of an even number of bits, and those beyond `count` are sent through
    again. Nothing is stored, so an epoch of a billion sequences costs no memory.
    """
    epoch, place = divmod(n, count)
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_mixed(right, turn, epoch, seed) & mask)
        place = left << half | right
        if place < count:
            return place


def _mixed(*numbers: int) -> int:
    """64 bits that look random (the mixing of SplitMix64)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state
