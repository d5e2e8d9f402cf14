"""Puts the finished parts together into a store: tokens and offsets first, store.json last.

Killed at any point, the folder has either a whole store or no store.json, and the parts are still there.
"""

import contextlib
import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cs336_systems.config import UserError
from cs336_systems.files import replacing, sync_folder, write_file
from cs336_systems.train.token_file import TokenFile, combined
from cs336_systems.train.tokens.inputs import Input
from cs336_systems.train.tokens.parts import Counts, PartFiles
from cs336_systems.train.tokens.token_store import (
    DOCUMENTS_FILE,
    HEADER,
    LITTLE_ENDIAN,
    TOKENIZER_FILE,
    TOKENS_FILE,
    TokenStore,
    dtype_for,
)
from cs336_systems.train.tokens.vocabulary import Vocabulary

_OFFSETS_AT_ONCE = 1 << 20


def assemble(
    folder: Path,
    parts: Sequence[tuple[PartFiles, Counts]],
    vocabulary: Vocabulary,
    *,
    inputs: Sequence[Input],
    settings: dict[str, Any],
    work: str,
) -> TokenStore:
    """Write the store of finished parts, in their order; a store that was there is replaced."""
    counts = [counts for _, counts in parts]
    total, documents = sum(one.tokens for one in counts), sum(one.documents for one in counts)
    if not total:
        raise UserError(f"the inputs hold no tokens: {len(inputs)} files, {documents} documents")
    dtype = dtype_for(vocabulary.size)
    with replacing(folder / TOKENS_FILE) as fresh, replacing(folder / DOCUMENTS_FILE) as offsets:
        with open(fresh, "wb") as file:
            for part, _ in parts:
                with open(part.tokens, "rb") as source:
                    shutil.copyfileobj(source, file, 1 << 20)
        documents_hash = _write_offsets(offsets, parts)
        written = TokenFile(fresh, LITTLE_ENDIAN[dtype], flag="")
        fingerprint = combined(total, map(written.chunk_summary, written.chunks())).fingerprint
        with contextlib.suppress(FileNotFoundError):
            (folder / HEADER).unlink()
    write_file(folder / TOKENIZER_FILE, vocabulary.content)
    store = TokenStore(
        dtype=dtype,
        tokens=total,
        documents=documents,
        vocab_size=vocabulary.size,
        end_token=vocabulary.end_token,
        fingerprint=fingerprint,
        documents_hash=documents_hash,
        tokenizer_hash=vocabulary.hash,
        work=work,
        settings=settings,
        inputs=tuple(one._asdict() for one in inputs),
    )
    sync_folder(folder)
    write_file(folder / HEADER, store.to_json())
    sync_folder(folder)
    return store


def _write_offsets(path: Path, parts: Sequence[tuple[PartFiles, Counts]]) -> str:
    """Write where documents begin, and where the last ends; return the hash of the file."""
    digest = hashlib.sha256()
    with open(path, "wb") as file:

        def add(offsets: np.ndarray) -> None:
            data = offsets.astype("<i8").tobytes()
            digest.update(data)
            file.write(data)

        add(np.zeros(1))
        before = 0
        for part, counts in parts:
            with open(part.ends, "rb") as source:
                while data := source.read(_OFFSETS_AT_ONCE * 8):
                    add(np.frombuffer(data, "<i8") + before)
            before += counts.tokens
    return digest.hexdigest()
