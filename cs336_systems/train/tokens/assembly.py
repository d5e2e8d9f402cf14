"""Assembles the finished parts into a store: tokens and offsets first, store.json last.

After a kill at any point, the folder has either a whole store or no store.json, and the parts still exist.
"""

import contextlib
import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

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
    """Write the store of finished parts, in their order; a store that was there is replaced.

    Its files are written beside the parts and moved into the folder when all are complete.
    """
    place = parts[0][0].folder
    dtype = dtype_for(vocabulary.size)
    with replacing(place / TOKENS_FILE) as fresh, open(fresh, "wb") as file:
        for part, _ in parts:
            with open(part.tokens, "rb") as source:
                shutil.copyfileobj(source, file, 1 << 20)
    written = TokenFile(place / TOKENS_FILE, LITTLE_ENDIAN[dtype], flag="")
    store = TokenStore(
        dtype=dtype,
        tokens=written.count,
        documents=sum(counts.documents for _, counts in parts),
        vocab_size=vocabulary.size,
        end_token=vocabulary.end_token,
        fingerprint=combined(written.count, map(written.chunk_summary, written.chunks())).fingerprint,
        documents_hash=_write_offsets(place / DOCUMENTS_FILE, parts),
        tokenizer_hash=vocabulary.hash,
        work=work,
        settings=settings,
        inputs=tuple(one._asdict() for one in inputs),
    )
    write_file(place / TOKENIZER_FILE, vocabulary.content)
    write_file(place / HEADER, store.to_json())
    _publish(place, folder)
    return store


def _publish(place: Path, folder: Path) -> None:
    """Move a store into its folder: an older header is removed first, the new one is moved last."""
    with contextlib.suppress(FileNotFoundError):
        (folder / HEADER).unlink()
        sync_folder(folder)
    for name in (TOKENS_FILE, DOCUMENTS_FILE, TOKENIZER_FILE):
        (place / name).replace(folder / name)
    sync_folder(folder)
    (place / HEADER).replace(folder / HEADER)
    sync_folder(folder)


def _write_offsets(path: Path, parts: Sequence[tuple[PartFiles, Counts]]) -> str:
    """Write the offsets of the documents and the end of the last; return the hash of the file."""
    digest = hashlib.sha256()
    with replacing(path) as fresh, open(fresh, "wb") as file:

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
