"""Batches of packed documents against a plain construction, for documents of any length."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.train import packed_batches
from cs336_systems.train.packed_batches import IGNORED, Documents, PackedBatch, PackedCorpus
from tests.helpers import refused
from tests.unit.train.stores_by_hand import write_store

CONTEXT = 8


def opened(folder: Path, share: float = 0.3) -> PackedCorpus:
    corpus = PackedCorpus.open(str(folder), context_length=CONTEXT, validation_share=share)
    return corpus.checked(corpus.corpus.tokens.summary(), 60_000)


def expected(start: int, lengths: list[int]) -> tuple[list[int], list[int], list[int], list[int]]:
    """Inputs, targets, positions and documents of one sequence, token by token; every token is its own place."""
    owner = [number for number, length in enumerate(lengths) for _ in range(length)]
    window = range(start, start + CONTEXT)
    targets = [n + 1 if owner[n] == owner[n + 1] else IGNORED for n in window]
    positions = [sum(owner[m] == owner[n] for m in range(start, n)) for n in window]
    return list(window), targets, positions, [owner[n] for n in window]


def assert_packed(batch: PackedBatch, starts: list[int], lengths: list[int]) -> None:
    rows = [expected(start, lengths) for start in starts]
    assert batch.inputs.tolist() == [row[0] for row in rows]
    assert batch.targets.tolist() == [row[1] for row in rows]
    assert batch.positions.tolist() == [row[2] for row in rows]
    sizes = [len(list(group)) for row in rows for _, group in itertools.groupby(row[3])]
    found = batch.cu_seqlens.tolist()
    assert (found[0], found[-1]) == (0, CONTEXT * len(starts))
    assert [b - a for a, b in itertools.pairwise(found) if b > a] == sizes
    assert found == sorted(found)


@given(lengths=st.lists(st.integers(0, 20), min_size=4, max_size=40).filter(lambda found: sum(found) >= 40))
@settings(max_examples=40, deadline=None)
def test_batches_of_documents_of_any_length(lengths, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    write_store(folder, np.arange(sum(lengths)), lengths)
    corpus = opened(folder)
    plain = corpus.corpus
    count = plain.training_sequences
    sizes = set()
    for first in (0, 1):
        batch = corpus.training(3, first, count)
        assert torch.equal(batch.inputs, plain.training(3, first, count)[0])
        assert_packed(batch, plain.training_starts(3, first, count), lengths)
        sizes.add(len(batch.cu_seqlens))
    assert sizes == {count * corpus.most_documents + 1}
    assert_packed(corpus.validation(0, 2), plain.validation_starts(0, 2), lengths)


def test_the_size_is_the_least_that_every_batch_fits(tmp_path, monkeypatch):
    """Offsets are read in chunks, and a sequence may have documents of several."""
    monkeypatch.setattr(packed_batches, "_AT_ONCE", 3)
    lengths = [10, 1, 1, 0, 0, 1, 1, 1, 30, 5, 35]
    write_store(tmp_path, np.arange(sum(lengths)), lengths)
    corpus = opened(tmp_path, share=0.2)
    starts = range(0, corpus.corpus.training_sequences * CONTEXT, CONTEXT)
    assert corpus.most_documents == max(len(set(expected(start, lengths)[3])) for start in starts) == 7


def test_the_dtypes_that_attention_and_the_loss_take(tmp_path):
    write_store(tmp_path, np.arange(100), [50, 50])
    batch = opened(tmp_path).training(0, 0, 2)
    assert [value.dtype for value in batch] == [torch.int64] * 3 + [torch.int32]
    logits = torch.randn(2 * CONTEXT, 100)
    loss = torch.nn.functional.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORED)
    assert loss.isfinite()


def test_the_fingerprint_covers_boundaries(tmp_path):
    for name, lengths in (("a", [50, 50]), ("b", [50, 50]), ("c", [51, 49])):
        (tmp_path / name).mkdir()
        write_store(tmp_path / name, np.arange(100), lengths)
    a, b, c = (opened(tmp_path / name) for name in "abc")
    assert a.fingerprint == b.fingerprint != c.fingerprint
    assert a.corpus.fingerprint == c.corpus.fingerprint


@pytest.mark.parametrize("offsets", [[0, 60, 50, 100], [0, 50, 100, 99], [1, 50, 60, 100], [0, 50, 60, 101]])
def test_damaged_offsets(offsets, tmp_path):
    write_store(tmp_path, np.arange(100), [50, 10, 40])
    np.array(offsets, "<i8").tofile(tmp_path / "documents.bin")
    with refused("documents.bin", "damaged"):
        Documents(tmp_path)


def test_offsets_that_do_not_ascend_are_refused_also_with_their_hash(tmp_path):
    write_store(tmp_path, np.arange(100), [60, -10, 50])
    with refused("documents.bin", "damaged"):
        Documents(tmp_path)


def test_a_file_without_boundaries(tmp_path):
    (tmp_path / "t.txt").write_bytes(bytes(1000))
    with refused("t.txt", "cs336 tokenize"):
        PackedCorpus.open(str(tmp_path / "t.txt"), context_length=CONTEXT)
