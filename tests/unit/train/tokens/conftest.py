"""A small tokenizer, and the command in a folder of its own."""

import os
from pathlib import Path

import pytest

from cs336_systems.train.tokens import inputs
from cs336_systems.train.tokens.vocabulary import train_tokenizer

SENTENCES = [f"The {n}th cat sat on mat {n * n}.\nIt's fine, isn't it?\n\n  Déjà vu: 猫が好き。\n" for n in range(40)]
END = "<|endoftext|>"


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory) -> Path:
    """Byte-level BPE of 300 tokens, trained on a page of text."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_bytes(train_tokenizer(SENTENCES, 300))
    return path


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Forcing files to disk is for power failures, which no test has; here it takes most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def small_parts(monkeypatch) -> int:
    """Parts of 700 bytes, so that little text has many."""
    monkeypatch.setattr(inputs, "PART_BYTES", 700)
    return 700
