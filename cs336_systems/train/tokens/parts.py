"""Tokenizes each part of the inputs into separate files: finished parts are kept when a run is killed.

A part is three files: its tokens, the ends of its documents, and, written last, their sizes and hashes. Its name is a
hash of its inputs, so that a part of another run is never mistaken for it.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cs336_systems.files import replacing, write_file
from cs336_systems.train.tokens.documents import Piece, Reading, is_at_end, texts, tokens
from cs336_systems.train.tokens.inputs import TOKENS, Part, Span
from cs336_systems.train.tokens.token_store import LITTLE_ENDIAN
from cs336_systems.train.tokens.vocabulary import Vocabulary

BATCH_BYTES = 1 << 20
"""Bytes of text that are passed to the tokenizer at a time."""


class Counts(NamedTuple):
    """Number of tokens of a part, and of documents that end in it."""

    tokens: int
    documents: int


@dataclass(frozen=True)
class PartFiles:
    """The files of a part in a folder."""

    folder: Path
    key: str

    @property
    def tokens(self) -> Path:
        return self.folder / f"{self.key}.tokens"

    @property
    def ends(self) -> Path:
        """Ends of documents, int64, counted from the first token of the part."""
        return self.folder / f"{self.key}.ends"

    @property
    def manifest(self) -> Path:
        return self.folder / f"{self.key}.json"

    @property
    def every(self) -> tuple[Path, ...]:
        return self.tokens, self.ends, self.manifest

    def found(self) -> Counts | None:
        """Return the counts of a part if it is finished and undamaged."""
        try:
            saved = json.loads(self.manifest.read_bytes())
            if saved["hashes"] != [_hash_of(self.tokens), _hash_of(self.ends)]:
                return None
            return Counts(*saved["counts"])
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write(self, part: Part, vocabulary: Vocabulary, reading: Reading, dtype: str) -> Counts:
        """Tokenize a part into its files."""
        with replacing(self.tokens) as fresh, replacing(self.ends) as fresh_ends:
            with open(fresh, "wb") as file, open(fresh_ends, "wb") as ends:
                writer = _Writer(file, ends, dtype)
                for span in part.spans:
                    for found, stops in tokenized(span, vocabulary, reading):
                        writer.add(found, stops)
            hashes = [writer.tokens_hash.hexdigest(), writer.ends_hash.hexdigest()]
        counts = Counts(writer.tokens, writer.documents)
        write_file(self.manifest, json.dumps({"counts": counts, "hashes": hashes}))
        return counts

    def remove(self) -> None:
        for path in reversed(self.every):
            with contextlib.suppress(OSError):
                path.unlink()


class _Writer:
    """Appends tokens and ends of documents to two open files, and hashes the written bytes."""

    def __init__(self, file: Any, ends: Any, dtype: str):
        self._file, self._ends = file, ends
        self._dtype = LITTLE_ENDIAN[dtype]
        self.tokens = self.documents = 0
        self.tokens_hash, self.ends_hash = hashlib.sha256(), hashlib.sha256()

    def add(self, found: np.ndarray, stops: np.ndarray) -> None:
        """Add tokens, and the ends of documents among them."""
        data = found.astype(self._dtype).tobytes()
        ends = (stops + self.tokens).astype("<i8").tobytes()
        self._file.write(data)
        self._ends.write(ends)
        self.tokens_hash.update(data)
        self.ends_hash.update(ends)
        self.tokens += len(found)
        self.documents += len(stops)


def _hash_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tokenized(span: Span, vocabulary: Vocabulary, reading: Reading) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the tokens of a span, and with them the ends of documents, counted from the first of these tokens."""
    if span.input.kind == TOKENS:
        yield from _given_tokens(span, vocabulary)
        return
    batch: list[Piece] = []
    size = 0
    for piece in texts(span, reading):
        batch.append(piece)
        size += len(piece.text) + 1
        if size >= BATCH_BYTES:
            yield _encoded(batch, vocabulary)
            batch, size = [], 0
    if batch:
        yield _encoded(batch, vocabulary)


def _encoded(batch: list[Piece], vocabulary: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    found: list[int] = []
    stops: list[int] = []
    for piece, ids in zip(batch, vocabulary.encode([piece.text for piece in batch]), strict=True):
        found += ids
        if piece.is_last:
            if vocabulary.end_token is not None:
                found.append(vocabulary.end_token)
            stops.append(len(found))
    return np.array(found, np.int64), np.array(stops, np.int64)


def _given_tokens(span: Span, vocabulary: Vocabulary) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the tokens of a token file: a document ends with its end token, and with the file."""
    last: np.ndarray | None = None
    for found in tokens(span, vocabulary.size):
        if last is not None:
            yield last, _ends_in(last, vocabulary)
        last = found
    if last is not None:
        stops = _ends_in(last, vocabulary)
        if is_at_end(span) and (not len(stops) or stops[-1] != len(last)):
            stops = np.append(stops, len(last))
        yield last, stops


def _ends_in(found: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    if vocabulary.end_token is None:
        return np.zeros(0, np.int64)
    return np.flatnonzero(found == vocabulary.end_token) + 1


def remove_leftovers(folder: Path, keys: set[str]) -> None:
    """Remove the files of parts of other runs, and unfinished files of a killed run."""
    for path in folder.iterdir():
        if path.name.startswith(".tmp-") or path.stem not in keys:
            with contextlib.suppress(OSError):
                os.unlink(path)
