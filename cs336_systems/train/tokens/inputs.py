"""Input files of `cs336 tokenize`: which files, of which kind, and how they are divided into parts of work.

Parts depend on the names, sizes and times of the files alone, never on the number of worker processes.
"""

import glob
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cs336_systems.config import UserError
from cs336_systems.files import read_failure, require_regular
from cs336_systems.train.token_file import FileState

PART_BYTES = 4 << 20
"""Bytes of a part. A worker holds one part in memory; a killed run loses unfinished parts."""
LINES, PACKED_LINES, TOKENS, TEXT = "lines", "packed lines", "tokens", "text"
SUFFIXES = {".jsonl": LINES, ".jsonl.gz": PACKED_LINES, ".npy": TOKENS, ".bin": TOKENS, ".txt": TEXT, ".md": TEXT}
"""Suffixes of the files that are read from a folder, and their kinds."""


class Input(NamedTuple):
    """An input file in its state at the start of the command."""

    path: str
    size: int
    mtime_ns: int

    @property
    def kind(self) -> str:
        """Kind of the file by its suffix; a file that the user names is text unless its suffix is known."""
        return next((kind for suffix, kind in SUFFIXES.items() if self.path.endswith(suffix)), TEXT)

    def require_unchanged(self, now: FileState) -> None:
        """Raise UserError if the open file has changed since the start of the command."""
        if (now.size, now.mtime_ns) != (self.size, self.mtime_ns):
            raise UserError(f"{self.path!r} was changed while it was read; run the same command again")


class Span(NamedTuple):
    """A part of an input file with nominal bounds in bytes; readers move them to where text can be cut."""

    input: Input
    begin: int
    end: int


class Part(NamedTuple):
    """Consecutive spans that are tokenized by one worker and stored together."""

    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        return sum(span.end - span.begin for span in self.spans)

    def key(self, settings: str) -> str:
        """Return a name that is equal only for the same bytes of the same files under the same settings."""
        return hashlib.sha256(json.dumps([settings, self.spans]).encode()).hexdigest()[:32]


def find_inputs(names: Sequence[str], output: Path) -> list[Input]:
    """Return the files that names, folders and patterns match; those in the output folder are left out."""
    inside = os.path.realpath(output) + os.sep
    paths = [path for name in names for path in _paths_of(name) if not os.path.realpath(path).startswith(inside)]
    seen: set[str] = set()
    for path in paths:
        if (real := os.path.realpath(path)) in seen:
            raise UserError(f"input {path!r} is named twice; name every file once")
        seen.add(real)
    if not paths:
        raise UserError(f"no files to tokenize in {', '.join(names)}; folders are searched for {', '.join(SUFFIXES)}")
    return [_described(path) for path in paths]


def _paths_of(name: str) -> list[str]:
    if os.path.isdir(name):
        return sorted(_files_below(name))
    if os.path.lexists(name):
        return [name]
    found = sorted(path for path in glob.glob(name, recursive=True) if not os.path.isdir(path))
    if not found:
        raise UserError(f"no file or folder {name!r}, and no file that it matches as a pattern")
    return found


def _files_below(folder: str) -> Iterator[str]:
    for place, _, names in os.walk(folder):
        for name in names:
            if name.endswith(tuple(SUFFIXES)) and not name.startswith("."):
                yield os.path.join(place, name)


def _described(path: str) -> Input:
    require_regular(Path(path))
    try:
        status = os.stat(path)
    except OSError as error:
        raise read_failure(error, path) from None
    return Input(path, status.st_size, status.st_mtime_ns)


def divide(inputs: Sequence[Input]) -> list[Part]:
    """Divide files into parts of about PART_BYTES: large files are cut, small ones are combined.

    A compressed file can only be read from its beginning and is never cut.
    """
    parts: list[Part] = []
    waiting: list[Span] = []
    size = 0
    for span in (span for one in inputs for span in _spans_of(one)):
        waiting.append(span)
        size += span.end - span.begin
        if size >= PART_BYTES:
            parts.append(Part(tuple(waiting)))
            waiting, size = [], 0
    return [*parts, Part(tuple(waiting))] if waiting else parts


def _spans_of(found: Input) -> Iterator[Span]:
    step = max(found.size, 1) if found.kind == PACKED_LINES else PART_BYTES
    for begin in range(0, found.size, step):
        yield Span(found, begin, min(begin + step, found.size))
