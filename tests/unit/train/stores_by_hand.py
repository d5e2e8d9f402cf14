"""Writes a store of tokens without a tokenizer."""

import hashlib
from pathlib import Path

import numpy as np

from cs336_systems.train.token_file import TokenFile, combined
from cs336_systems.train.tokens.token_store import LITTLE_ENDIAN, TokenStore


def write_store(folder: Path, tokens: np.ndarray, lengths: list[int], dtype: str = "uint16") -> TokenStore:
    """Write a store of documents of these lengths; its vocabulary is as large as its tokens need."""
    tokens.astype(LITTLE_ENDIAN[dtype]).tofile(folder / "tokens.bin")
    offsets = np.cumsum([0, *lengths]).astype("<i8")
    offsets.tofile(folder / "documents.bin")
    file = TokenFile(folder / "tokens.bin", LITTLE_ENDIAN[dtype])
    store = TokenStore(
        dtype=dtype,
        tokens=len(tokens),
        documents=len(lengths),
        vocab_size=int(tokens.max()) + 1,
        end_token=None,
        fingerprint=combined(file.count, map(file.chunk_summary, file.chunks())).fingerprint,
        documents_hash=hashlib.sha256(offsets.tobytes()).hexdigest(),
        tokenizer_hash="",
        work="",
    )
    (folder / "store.json").write_text(store.to_json())
    return store
