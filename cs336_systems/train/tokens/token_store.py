"""The folder that `cs336 tokenize` writes and `cs336 train --data` reads. Standard library only.

    tokens.bin       tokens of all documents, one after another: little-endian uint16, or uint32 for large vocabularies
    documents.bin    where documents begin, int64: one more than there are documents, the last is the number of tokens
    tokenizer.json   the tokenizer
    store.json       written last: counts, hashes, inputs

A folder without store.json is unfinished.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cs336_systems.config import LARGEST_NUMBER, UserError
from cs336_systems.files import LARGEST_FILE, foreign, is_number, read_failure, read_json, shown

FORMAT, VERSION = "cs336 tokens", 1
HEADER, TOKENS_FILE, DOCUMENTS_FILE, TOKENIZER_FILE = "store.json", "tokens.bin", "documents.bin", "tokenizer.json"
UNFINISHED = ".parts"
"""Folder of the finished parts of a store that is not complete yet."""
LITTLE_ENDIAN = {"uint16": "<u2", "uint32": "<u4"}
ITEM_BYTES = {"uint16": 2, "uint32": 4}
OFFSET_BYTES = 8
REPAIRED_BY = "run cs336 tokenize again, with --force"
_MOST = 1 << 50
"""Maximum number of tokens and of documents in a store: a larger number is an error in the file."""


@dataclass(frozen=True)
class TokenStore:
    """The content of store.json."""

    dtype: str
    tokens: int
    documents: int
    vocab_size: int
    end_token: int | None
    fingerprint: str
    """Fingerprint of the tokens, as of every token file (`train/token_file.py`)."""
    documents_hash: str
    tokenizer_hash: str
    work: str
    """Hash of the inputs' names, sizes and times, of the tokenizer and of the settings."""
    settings: dict[str, Any] = field(default_factory=dict)
    inputs: tuple[dict[str, Any], ...] = ()
    """Path, size and time of the last change of each input."""

    def to_json(self) -> str:
        values = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        return json.dumps(values, ensure_ascii=False, indent=1) + "\n"


def dtype_for(vocab_size: int) -> str:
    """Return the smallest integer type that holds every token of a vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def is_store(path: Path) -> bool:
    """Return True if a path is a finished store."""
    return (path / HEADER).is_file()


def read_store(folder: Path) -> TokenStore:
    """Return the header of a store; raise UserError unless it is valid and matches the sizes of the files."""
    path = folder / HEADER
    with foreign(path, "a store of cs336 tokenize", REPAIRED_BY):
        values = read_json(path, LARGEST_FILE)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise UserError(f"{str(path)!r} is not a store of cs336 tokenize: it names another format")
        if (version := values.get("version")) != VERSION:
            raise UserError(
                f"{str(path)!r} is of version {shown(version)}, and this package reads version {VERSION}; "
                f"use the package that wrote it, or {REPAIRED_BY}"
            )
        found = _checked(values)
    require_size(folder / TOKENS_FILE, found.tokens * ITEM_BYTES[found.dtype])
    require_size(folder / DOCUMENTS_FILE, (found.documents + 1) * OFFSET_BYTES)
    return found


def require_size(path: Path, size: int | None = None) -> None:
    """Raise UserError for a file of a store that is missing or has another size."""
    try:
        there = path.stat().st_size
    except FileNotFoundError:
        raise UserError(f"{str(path)!r} is missing; {REPAIRED_BY}") from None
    except OSError as error:
        raise read_failure(error, path) from error
    if size is not None and there != size:
        raise UserError(f"{str(path)!r} has {there:,} bytes and should have {size:,}; {REPAIRED_BY}")


def _checked(values: dict[str, Any]) -> TokenStore:
    known = {spec.name for spec in dataclasses.fields(TokenStore)}
    found = TokenStore(**{name: values[name] for name in known if name in values})
    if found.dtype not in ITEM_BYTES:
        raise ValueError(f"its dtype is {shown(found.dtype)}")
    for name, most in (("tokens", _MOST), ("documents", _MOST), ("vocab_size", LARGEST_NUMBER)):
        value = getattr(found, name)
        if not (type(value) is int and is_number(value, 1, most)):
            raise ValueError(f"its {name} is {shown(value)}")
    for name in ("fingerprint", "documents_hash", "tokenizer_hash", "work"):
        if not isinstance(getattr(found, name), str):
            raise ValueError(f"its {name} is {shown(getattr(found, name))}")
    return found
