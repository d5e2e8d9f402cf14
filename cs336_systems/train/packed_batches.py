"""Batches that know where documents begin: attention stays within a document, and none predicts the next one.

Sequences are the windows of `Corpus` over the stream of tokens. A document that a window cuts is two documents: neither
part sees the other.
"""

import bisect
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cs336_systems.config import UserError
from cs336_systems.model import PackedTokens
from cs336_systems.train.data import Corpus
from cs336_systems.train.token_file import TokenFile, Tokens
from cs336_systems.train.tokens.token_store import DOCUMENTS_FILE, is_store, read_store

IGNORED = -100
"""Target of the last token of a document: cross entropy leaves it out."""
_AT_ONCE = 1 << 20
SAMPLED = 256
"""Number of sequences from which the share of attention is computed."""


class PackedBatch(NamedTuple):
    """Sequences of several documents each. B sequences, T tokens."""

    inputs: Tensor
    """(B, T), int64."""
    targets: Tensor
    """(B, T), int64; IGNORED at the last token of a document."""
    positions: Tensor
    """(B, T), int64: position of a token in its document, or in the part of the document inside the sequence."""
    cu_seqlens: Tensor
    """(S + 1,), int32: offsets of the documents among the B x T tokens, padded to a fixed size with B x T."""

    def to(self, device: torch.device) -> tuple[PackedTokens, Tensor]:
        """Return the input of the model and the targets."""
        inputs = PackedTokens(self.inputs, self.positions, self.cu_seqlens)
        return inputs.to(device), self.targets.to(device)


def packed(rows: Tensor, starts: list[np.ndarray], size: int) -> PackedBatch:
    """Return the batch of sequences and the targets after them, `rows` (B, T + 1).

    `starts` has, for each sequence, the positions 1 to T at which a document begins, in ascending order. `size`: of
    cu_seqlens.
    """
    count, length = rows.shape[0], rows.shape[1] - 1
    targets = rows[:, 1:].clone()
    positions = torch.arange(length).repeat(count, 1)
    bounds = []
    for row, begins in enumerate(starts):
        targets[row, begins - 1] = IGNORED
        inside = begins[begins < length]
        bounds += [row * length, *(row * length + inside).tolist()]
        for begin in inside.tolist():
            positions[row, begin:] = torch.arange(length - begin)
    if len(bounds) + 1 > size:
        raise ValueError(f"{len(bounds)} documents do not fit into cu_seqlens of size {size}")
    bounds += [count * length] * (size - len(bounds))
    return PackedBatch(rows[:, :-1], targets, positions, torch.tensor(bounds, dtype=torch.int32))


class Documents:
    """The offsets of documents in a store, read on request."""

    def __init__(self, folder: Path):
        """Open the file; raise UserError if the offsets are not those that store.json was written for."""
        self._store = read_store(folder)
        self._file = TokenFile(folder / DOCUMENTS_FILE, "<i8")
        digest, last, is_ascending = hashlib.sha256(), 0, True
        for offsets in self._chunks():
            digest.update(offsets.tobytes())
            is_ascending &= offsets[0] >= last and bool((np.diff(offsets) >= 0).all())
            last = int(offsets[-1])
        self.fingerprint = digest.hexdigest()
        if self.fingerprint != self._store.documents_hash or not is_ascending or last != self._store.tokens:
            raise UserError(f"--data {str(self._file.path)!r} is damaged; run cs336 tokenize --force")

    def _chunks(self) -> Iterator[np.ndarray]:
        for start in range(0, self._file.count, _AT_ONCE):
            yield self._file.read(start, min(_AT_ONCE, self._file.count - start))

    def starts(self, begin: int, end: int) -> np.ndarray:
        """Return the offsets after `begin` up to `end` at which documents begin or end, each once."""
        first = bisect.bisect_right(_Offsets(self._file), begin)
        last = bisect.bisect_right(_Offsets(self._file), end, lo=first)
        return np.unique(self._file.read(first, last - first)) if last > first else np.zeros(0, np.int64)

    def most_within(self, begin: int, length: int, count: int) -> int:
        """Return the largest number of documents, or parts of some, in one of `count` windows from `begin` on."""
        most, before, window = 0, 0, -1
        for chunk in self._chunks():
            offsets = np.unique(chunk) - begin
            offsets = offsets[(offsets > 0) & (offsets < count * length) & (offsets % length > 0)]
            windows, found = np.unique(offsets // length, return_counts=True)
            if len(windows):
                found[0] += before if windows[0] == window else 0
                most, before, window = max(most, int(found.max())), int(found[-1]), int(windows[-1])
        return most + 1


class _Offsets:
    """A file of offsets as a sequence, for bisect."""

    def __init__(self, file: TokenFile):
        self._file = file

    def __len__(self) -> int:
        return self._file.count

    def __getitem__(self, place: int) -> int:
        return int(self._file.read(place, 1)[0])


@dataclass(frozen=True)
class PackedCorpus:
    """A store of tokens whose batches contain the boundaries of documents."""

    corpus: Corpus
    documents: Documents

    @classmethod
    def open(cls, name: str, *, context_length: int, validation_share: float = 0.1) -> "PackedCorpus":
        """Open a store, whose tokens are verified by `checked`; raise UserError for data without documents."""
        if not is_store(Path(name)):
            raise UserError(f"--data {name!r} has no document boundaries; make a folder with cs336 tokenize")
        corpus = Corpus.open(name, context_length=context_length, validation_share=validation_share)
        return cls(corpus, Documents(Path(name)))

    def checked(self, found: Tokens, vocab_size: int) -> "PackedCorpus":
        return replace(self, corpus=self.corpus.checked(found, vocab_size))

    @property
    def fingerprint(self) -> str:
        """Hash of all tokens and of the boundaries of documents."""
        return hashlib.sha256(f"{self.corpus.fingerprint} {self.documents.fingerprint}".encode()).hexdigest()

    @cached_property
    def most_documents(self) -> int:
        """The largest number of documents, or parts of some, in a sequence."""
        corpus = self.corpus
        return max(
            self.documents.most_within(begin, corpus.context_length, count)
            for begin, count in (
                (0, corpus.training_sequences),
                (corpus.training_tokens, corpus.validation_sequences),
            )
        )

    @property
    def tokens(self) -> TokenFile:
        return self.corpus.tokens

    def has_fingerprint(self, fingerprint: object) -> bool:
        return fingerprint == self.fingerprint

    def attention_share(self, seed: int) -> float:
        """Return the share of all pairs of a sequence's tokens that are in one document, from the first sequences."""
        length, pairs = self.corpus.context_length, 0.0
        starts = self.corpus.training_starts(seed, 0, min(SAMPLED, self.corpus.training_sequences))
        for start in starts:
            bounds = np.concatenate([[0], self.documents.starts(start, start + length) - start, [length]])
            pairs += float((np.diff(bounds.clip(max=length)).astype(np.float64) ** 2).sum())
        return pairs / (len(starts) * length**2)

    def training(self, seed: int, first: int, count: int) -> PackedBatch:
        """Return the sequences `first` to `first + count` of a run, those of `Corpus.training`."""
        return self._packed(self.corpus.training_starts(seed, first, count))

    def validation(self, first: int, count: int) -> PackedBatch:
        """Return validation sequences in the order of the store, starting over at its end."""
        return self._packed(self.corpus.validation_starts(first, count))

    def _packed(self, starts: list[int]) -> PackedBatch:
        length = self.corpus.context_length
        found = [self.documents.starts(start, start + length) - start for start in starts]
        return packed(self.corpus.rows(starts), found, len(starts) * self.most_documents + 1)
