"""Reads stores and the documents in them, for tests."""

import itertools
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from cs336_systems.train.tokens.token_store import LITTLE_ENDIAN, read_store
from tests.helpers import exit_code


def run(*words: object) -> int:
    """Run `cs336 tokenize` in this process."""
    return exit_code(["tokenize", *map(str, words)])


def documents(folder: Path) -> list[list[int]]:
    """The tokens of every document of a store."""
    store = read_store(folder)
    tokens = np.fromfile(folder / "tokens.bin", LITTLE_ENDIAN[store.dtype]).tolist()
    offsets = np.fromfile(folder / "documents.bin", "<i8").tolist()
    assert (offsets[0], offsets[-1], len(offsets)) == (0, len(tokens), store.documents + 1)
    return [tokens[a:b] for a, b in itertools.pairwise(offsets)]


def texts(folder: Path) -> list[str]:
    """The text of every document; each must end with the end token, which is not shown."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = read_store(folder).end_token
    found = documents(folder)
    assert all(tokens[-1] == end for tokens in found)
    return [tokenizer.decode(tokens[:-1], skip_special_tokens=False) for tokens in found]


def write_lines(path: Path, texts: list[str], **others: object) -> None:
    path.write_text("".join(json.dumps({"text": text, **others}) + "\n" for text in texts), encoding="utf-8")
