"""Tokens from a file, in an order that depends on the seed alone.

Text is read as bytes: 256 tokens, no vocabulary to build. Tokenized files are `.bin` (16-bit integers), `.npy`, or a
store of `cs336 tokenize`.

The training part is cut into sequences, and every epoch visits each sequence once, in random order. The n-th sequence
of a run is a function of seed and n, so the data of a step depends neither on the number of ranks nor on restarts.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cs336_systems.config import UserError
from cs336_systems.text import counted
from cs336_systems.train.token_file import OLD_DIGITS, TokenFile, Tokens
from cs336_systems.train.tokens.token_store import HEADER, LITTLE_ENDIAN, TOKENS_FILE, is_store, read_store


@dataclass(frozen=True)
class Corpus:
    """A file of tokens, the end of which is held out for validation."""

    tokens: TokenFile
    context_length: int
    validation_share: float
    fingerprint: str = ""
    """Hash of all tokens, independent of the file's name and format; set by `checked`."""
    expected: str = ""
    """The fingerprint that a store of `cs336 tokenize` gives for its tokens."""

    @classmethod
    def open(cls, name: str, *, context_length: int, validation_share: float = 0.1) -> "Corpus":
        """Open a file, or a store of `cs336 tokenize`; its tokens are verified by `checked`."""
        path = Path(name)
        if is_store(path):
            store = read_store(path)
            tokens = TokenFile(path / TOKENS_FILE, LITTLE_ENDIAN[store.dtype])
            corpus = cls(tokens, context_length, validation_share, expected=store.fingerprint)
        else:
            corpus = cls(TokenFile(path), context_length, validation_share)
        for part, count in (("training", corpus.training_sequences), ("validation", corpus.validation_sequences)):
            if count < 1:
                raise UserError(
                    f"--data {name!r} has {counted(corpus.tokens.count, 'token')}: too few for one {part} sequence of "
                    f"{context_length}; use a longer file, {corpus._other_share(part)}or a smaller --context_length"
                )
        return corpus

    def _other_share(self, short_of: str) -> str:
        """Return the advice to change the share of validation if the file is long enough for a sequence of each."""
        if self.tokens.count < 2 * (self.context_length + 1):
            return ""
        return f"a {'larger' if short_of == 'validation' else 'smaller'} --validation_share, "

    def checked(self, found: Tokens, vocab_size: int) -> "Corpus":
        """Return the corpus with its fingerprint, from a summary of all tokens; raise UserError for unknown tokens."""
        name = str(self.tokens.path)
        if self.expected and self.expected != found.fingerprint:
            raise UserError(
                f"--data {name!r} is damaged: its tokens are not those of {HEADER}; run cs336 tokenize --force"
            )
        if found.least < 0:
            raise UserError(f"--data {name!r} holds token {found.least}: tokens are integers of at least 0")
        if found.largest >= vocab_size:
            raise UserError(
                f"--data {name!r} holds token {found.largest}, and the model has a vocabulary of {vocab_size} tokens; "
                f"give a larger --vocab_size, or data of the model's own tokenizer"
            )
        return replace(self, fingerprint=found.fingerprint)

    def has_fingerprint(self, fingerprint: object) -> bool:
        """Return whether these are the tokens of a checkpoint, which may have been written by the first version."""
        if isinstance(fingerprint, str) and len(fingerprint) == OLD_DIGITS:
            return fingerprint == self._probes
        return fingerprint == self.fingerprint

    @cached_property
    def _probes(self) -> str:
        return self.tokens.probes()

    @property
    def training_tokens(self) -> int:
        """Number of tokens before the held-out ones."""
        return self.tokens.count - int(self.tokens.count * self.validation_share)

    @property
    def training_sequences(self) -> int:
        """Number of training sequences. The last target of one is the first input of the next."""
        return (self.training_tokens - 1) // self.context_length

    @property
    def validation_sequences(self) -> int:
        return (self.tokens.count - self.training_tokens - 1) // self.context_length

    def training(self, seed: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the sequences `first` to `first + count` of a run, (count, context) each."""
        tokens = self.rows(self.training_starts(seed, first, count))
        return tokens[:, :-1], tokens[:, 1:]

    def validation(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return validation sequences in the order of the file, starting over at its end."""
        tokens = self.rows(self.validation_starts(first, count))
        return tokens[:, :-1], tokens[:, 1:]

    def training_starts(self, seed: int, first: int, count: int) -> list[int]:
        """Return the first token of each of these training sequences."""
        numbers = (shuffled(n, self.training_sequences, seed) for n in range(first, first + count))
        return [number * self.context_length for number in numbers]

    def validation_starts(self, first: int, count: int) -> list[int]:
        """Return the first token of each of these validation sequences."""
        numbers = (n % self.validation_sequences for n in range(first, first + count))
        return [self.training_tokens + number * self.context_length for number in numbers]

    def rows(self, starts: list[int]) -> Tensor:
        """Return the tokens of sequences and the one after each, (count, context + 1)."""
        self.tokens.require_unchanged(self.fingerprint)
        found = np.stack([self.tokens.read(start, self.context_length + 1) for start in starts])
        return torch.from_numpy(found.astype(np.int64))


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
