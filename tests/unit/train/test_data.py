"""The corpus: formats, the order of sequences, and files that cannot be used."""

import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.config import UserError
from cs336_systems.train import token_file
from cs336_systems.train.data import Corpus, shuffled
from cs336_systems.train.token_file import TokenFile
from tests.helpers import refused

CONTEXT = 16


def open_corpus(path: Path, vocab_size: int = 256, share: float = 0.1) -> Corpus:
    corpus = Corpus.open(str(path), context_length=CONTEXT, validation_share=share)
    return corpus.checked(corpus.tokens.summary(), vocab_size)


@pytest.fixture
def counting(tmp_path) -> Corpus:
    """A corpus in which every token is its own position."""
    np.save(tmp_path / "count.npy", np.arange(1000))
    return open_corpus(tmp_path / "count.npy", vocab_size=1000)


def test_every_epoch_visits_every_sequence_once(counting):
    each = counting.training_sequences
    assert 54 <= each <= 56  # of 900 tokens, 16 to a sequence
    epochs = []
    for epoch in range(3):
        inputs, targets = counting.training(seed=5, first=epoch * each, count=each)
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.shape == targets.shape == (each, CONTEXT)
        assert torch.equal(targets, inputs + 1)
        assert len(inputs.unique()) == each * CONTEXT
        epochs.append(inputs[:, 0].tolist())
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert all(epoch != sorted(epoch) for epoch in epochs)


def test_a_sequence_depends_on_seed_and_number_alone(counting):
    each = counting.training_sequences
    inputs, targets = counting.training(seed=5, first=0, count=3 * each)
    for parts in (1, 7, each + 1):
        for first in range(0, 3 * each, parts):
            count = min(parts, 3 * each - first)
            some, shifted = counting.training(seed=5, first=first, count=count)
            assert torch.equal(some, inputs[first : first + count])
            assert torch.equal(shifted, targets[first : first + count])
    assert not torch.equal(counting.training(seed=6, first=0, count=each)[0], inputs[:each])
    far = 10**9
    assert torch.equal(counting.training(5, far, 2)[0][1], counting.training(5, far + 1, 1)[0][0])


@pytest.mark.parametrize(("share", "trained"), [(0.1, 900), (0.5, 500), (0.05, 950)])
def test_the_end_of_the_file_is_held_out(share, trained, tmp_path):
    np.save(tmp_path / "count.npy", np.arange(1000))
    corpus = open_corpus(tmp_path / "count.npy", vocab_size=1000, share=share)
    assert abs(corpus.training_sequences - trained / CONTEXT) <= 1
    last_trained = max(int(t.max()) for t in corpus.training(seed=0, first=0, count=corpus.training_sequences))
    inputs, targets = corpus.validation(0, 2)
    assert inputs.shape == (2, CONTEXT)
    assert torch.equal(targets, inputs + 1)
    assert last_trained < inputs.min()
    assert torch.equal(inputs[1], corpus.validation(1, 1)[0][0])
    assert torch.equal(corpus.validation(corpus.validation_sequences, 1)[0][0], inputs[0])  # starts over


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "uint64", ".bin", "text"])
def test_formats(dtype, tmp_path):
    tokens = np.random.default_rng(0).integers(0, 250, 800)
    path = tmp_path / {".bin": "t.bin", "text": "t.txt"}.get(dtype, "t.npy")
    if path.suffix == ".npy":
        np.save(path, tokens.astype(dtype))
    else:
        tokens.astype("<u2" if dtype == ".bin" else np.uint8).tofile(path)
    corpus = open_corpus(path)
    inputs, targets = corpus.training(seed=0, first=0, count=corpus.training_sequences)
    windows = {tokens[i : i + CONTEXT + 1].tobytes() for i in range(len(tokens) - CONTEXT)}
    for row, shifted in zip(inputs, targets, strict=True):
        assert np.append(row.numpy(), shifted[-1].numpy()).tobytes() in windows


@given(count=st.integers(1, 400), seed=st.integers(0, 2**40), epoch=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_every_epoch_is_a_permutation(count, seed, epoch):
    assert sorted(shuffled(epoch * count + n, count, seed) for n in range(count)) == list(range(count))


def test_the_shuffle_mixes_well():
    """Every position is equally likely for every sequence, and neighbours do not stay neighbours."""
    count, epochs = 8, 1000
    order = np.array([[shuffled(e * count + n, count, 3) for n in range(count)] for e in range(epochs)])
    for column in order.T:
        frequency = np.bincount(column, minlength=count) / epochs
        assert 0.07 < frequency.min() <= frequency.max() < 0.19
    assert (np.diff(order, axis=1) == 1).mean() < 0.2  # 1/8 by chance


BAD_FILES = {
    "empty.txt": lambda path: path.write_bytes(b""),
    "empty.npy": lambda path: path.write_bytes(b""),
    "no_tokens.npy": lambda path: np.save(path, np.zeros(0, int)),
    "short.txt": lambda path: path.write_bytes(b"a" * CONTEXT),
    "short.bin": lambda path: path.write_bytes(b"a" * 2 * CONTEXT),
    "odd.bin": lambda path: path.write_bytes(b"\0" * 2001),
    "matrix.npy": lambda path: np.save(path, np.zeros((100, 100), int)),
    "float.npy": lambda path: np.save(path, np.zeros(10_000)),
    "objects.npy": lambda path: np.save(path, np.array([1, "a"] * 1000, object)),
    "high.bin": lambda path: np.full(10_000, 256, "<u2").tofile(path),
    "negative.npy": lambda path: np.save(path, np.full(10_000, -1)),
    "not_an_array.npy": lambda path: path.write_bytes(b"this is not an array" * 1000),
    "archive.npy": lambda path: np.savez(path.open("wb"), tokens=np.zeros(10_000, int)),
    "truncated.npy": lambda path: (np.save(path, np.zeros(10_000, int)), os.truncate(path, 4000)),
    "missing.txt": lambda path: None,
    "folder.txt": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_cannot_be_used(name, tmp_path):
    BAD_FILES[name](tmp_path / name)
    with refused(name):
        open_corpus(tmp_path / name)


@pytest.mark.parametrize("name", ["empty.npy", "objects.npy", "not_an_array.npy", "truncated.npy", "archive.npy"])
def test_a_file_that_is_no_array_is_named_as_such(name, tmp_path):
    """And not by what numpy says of its arguments."""
    BAD_FILES[name](tmp_path / name)
    with pytest.raises(UserError, match=f"{name}' holds no tokens: it is no .npy array of integers, or it is cut off$"):
        open_corpus(tmp_path / name)


@pytest.mark.parametrize("position", [0, 450, 899, 999])
def test_one_token_outside_the_vocabulary_is_found(position, tmp_path):
    tokens = np.zeros(1000, int)
    tokens[position] = 300
    np.save(tmp_path / "high.npy", tokens)
    with pytest.raises(UserError, match="300"):
        open_corpus(tmp_path / "high.npy", vocab_size=300)


@pytest.mark.parametrize(
    ("count", "share", "part", "advice"),
    [
        (2 * CONTEXT + 2, 0.1, "validation", "a larger --validation_share, "),
        (2 * CONTEXT + 2, 0.9, "training", "a smaller --validation_share, "),
        (2 * CONTEXT + 1, 0.1, "validation", ""),
        (1, 0.1, "training", ""),
    ],
)
def test_another_share_is_advised_where_it_helps(count, share, part, advice, tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(b"a" * count)
    tokens = "1 token" if count == 1 else f"{count} tokens"
    with pytest.raises(UserError) as caught:
        open_corpus(path, share=share)
    problem = f"has {tokens}: too few for one {part} sequence of {CONTEXT}; use a longer file, {advice}or a smaller"
    assert problem in str(caught.value)
    if advice:
        open_corpus(path, share=0.5)


# -- the fingerprint --------------------------------------------------------------------------------------------------


def fingerprint(path: Path) -> str:
    return TokenFile(path).summary().fingerprint


def test_the_fingerprint_depends_on_the_tokens_and_not_on_the_format(tmp_path, monkeypatch):
    """In several chunks, some of which need more bits than others."""
    monkeypatch.setattr(token_file, "_CHUNK", 100)
    tokens = np.arange(1000) % 250
    tokens.astype(np.uint8).tofile(tmp_path / "t.txt")
    tokens.astype("<u2").tofile(tmp_path / "t.bin")
    for dtype in ("<i8", ">i4", "<u2", "<u8"):
        np.save(tmp_path / f"{dtype[1:]}.npy", tokens.astype(dtype))
    assert len({fingerprint(path) for path in tmp_path.iterdir()}) == 1
    one = fingerprint(tmp_path / "t.bin")
    for changed in (tokens[:-1], tokens[::-1], np.append(tokens, 0), np.where(tokens == 249, 66_000, tokens)):
        np.save(tmp_path / "changed.npy", changed)
        assert fingerprint(tmp_path / "changed.npy") != one


@pytest.mark.parametrize("position", [0, 1_234_567, 4_194_303, 4_194_304, 7_999_999])
def test_one_changed_token_of_8_mb_changes_the_fingerprint(position, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "eight.txt"
    if not path.exists():
        path.write_bytes(bytes(range(250)) * 32_000)
    before = fingerprint(path)
    with path.open("r+b") as file:
        file.seek(position)
        (old,) = file.read(1)
        file.seek(position)
        file.write(bytes([old ^ 1]))
    assert fingerprint(path) != before


def test_a_fingerprint_of_the_first_version_is_recognized(tmp_path):
    """It covers 64 places only. The literal was computed by the first version."""
    tokens = (np.arange(200_000) * 7919 % 251).astype("<u2")
    tokens.tofile(tmp_path / "t.bin")
    corpus = open_corpus(tmp_path / "t.bin")
    assert corpus.has_fingerprint("8c8b6549f65d9a1c")
    assert corpus.has_fingerprint(corpus.fingerprint)
    for other in ("8c8b6549f65d9a1d", corpus.fingerprint[:16], corpus.fingerprint[:-1] + "x", "", None, 7, []):
        assert not corpus.has_fingerprint(other)


# -- files that change ------------------------------------------------------------------------------------------------


def test_a_file_that_shrinks_is_an_error_and_no_signal(counting):
    path = counting.tokens.path
    os.truncate(path, path.stat().st_size // 2)
    with refused("count.npy", "shorter", "1,000 tokens"):
        counting.training(seed=0, first=0, count=1)


def test_a_file_that_is_deleted_or_replaced_is_read_on(counting):
    """The open file is still there; the next start sees the new one."""
    expected = counting.training(seed=0, first=0, count=50)[0]
    path = counting.tokens.path
    path.unlink()
    path.write_bytes(b"other")
    assert torch.equal(counting.training(seed=0, first=0, count=50)[0], expected)


def test_a_file_with_other_tokens_is_an_error(counting):
    with counting.tokens.path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    with refused("count.npy", "was changed while it was trained on"):
        counting.validation(0, 1)


def test_a_file_with_the_same_tokens_is_a_warning(counting):
    path = counting.tokens.path
    os.utime(path, ns=(0, 1))
    with pytest.warns(UserWarning, match=r"count\.npy.* was written to; its tokens are the same"):
        counting.training(seed=0, first=0, count=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        counting.training(seed=0, first=0, count=1)  # said once


def test_a_file_that_cannot_be_read_on(counting, monkeypatch):
    def failing(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", failing)
    with refused("count.npy", "Input/output error"):
        counting.training(seed=0, first=0, count=1)
