"""`cs336 train --data` on a folder of `cs336 tokenize`: the same run as on a file of its tokens; damage is refused."""

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from cs336_systems.cli import main
from cs336_systems.config import UserError
from cs336_systems.flags import build
from cs336_systems.parallel.launch import process_group
from cs336_systems.train.settings import TrainSettings
from cs336_systems.train.tokens.token_store import read_store
from tests.distributed.train_cases import Outcome, Run, argv_of, fields, perform
from tests.helpers import assert_refused, refused
from tests.unit.train.stores_by_hand import write_store

TOKENS = np.arange(400) * 7919 % 97
LENGTHS = [100, 0, 250, 50]


def performed(run: Run) -> Outcome:
    with process_group("gloo", "cpu"):
        return perform(run)


@pytest.fixture
def store(tmp_path) -> Path:
    (tmp_path / "store").mkdir()
    write_store(tmp_path / "store", TOKENS, LENGTHS)
    return tmp_path / "store"


def test_the_vocabulary_is_that_of_the_store(store):
    settings = build(TrainSettings, {"data": str(store)})
    assert (settings.model.vocab_size, settings.data.is_text) == (97, False)
    assert build(TrainSettings, {"data": str(store), "vocab_size": 128}).model.vocab_size == 128
    assert build(TrainSettings, {"data": str(store), "size": "qwen3/0.6B"}).model.vocab_size == 151_936


def test_a_published_vocabulary_that_the_data_does_not_fill_is_named(store, elsewhere, capsys):
    shape = "--d_model 8 --num_layers 1 --num_heads 2 --num_kv_heads 1 --d_head 4 --d_ff 8 --context_length 16"
    run = f"--steps 1 --batch_size 1 --eval_every 0 --device cpu --output {elsewhere / 'run'}"
    assert main(f"train --data {store} --size qwen3/0.6B {shape} {run}".split()) == 0
    remark = "the vocabulary of 151,936 tokens is that of --size qwen3/0.6B, and the data has 97; --vocab_size 97 makes"
    assert capsys.readouterr().out.count(remark) == 1


def test_a_vocabulary_that_fits_the_data_has_no_remark(store):
    """Nor one that was asked for, nor that of a published size's own tokenizer, which leaves a few tokens unused."""
    for flags in ({}, {"size": "qwen3/0.6B", "vocab_size": 200}):
        assert build(TrainSettings, {"data": str(store), **flags}).unused_vocabulary == ""
    own = dataclasses.replace(read_store(store), vocab_size=151_669)
    (store / "store.json").write_text(own.to_json())
    assert build(TrainSettings, {"data": str(store), "size": "qwen3/0.6B"}).unused_vocabulary == ""


def test_a_folder_that_holds_stores_names_one(store):
    with pytest.raises(UserError, match=r"did you mean '.*/store'"):
        build(TrainSettings, {"data": str(store.parent)})


def test_resuming_with_another_vocabulary_names_both(store, tmp_path):
    run = fields(tmp_path / "run", "store", steps=4, save_every=2)
    assert performed(Run(run, stop_after=2)).code == 75
    write_store(store, TOKENS % 89, LENGTHS)
    error = performed(Run(run)).error
    assert "vocab_size was 97 and is 89" in error
    assert "(a vocabulary of 89)" in error


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_run_is_that_of_a_file_of_the_same_tokens(dtype, tmp_path):
    """To the bit, and one resumes the other."""
    (tmp_path / "store").mkdir()
    write_store(tmp_path / "store", TOKENS, LENGTHS, dtype)
    np.save(tmp_path / "tokens.npy", TOKENS)
    runs = [
        fields(tmp_path / name, data, vocab_size=97, steps=4) for name, data in (("a", "store"), ("b", "tokens.npy"))
    ]
    first, second = (performed(Run(one)) for one in runs)
    assert first.code == second.code == 0, first
    assert all(torch.equal(value, second.weights[name]) for name, value in first.weights.items())
    resumed = performed(Run({**runs[0], "data": str(tmp_path / "tokens.npy"), "steps": 4}))
    assert (resumed.resumed_at, resumed.error) == (4, "")


def test_a_changed_store_is_refused_on_resume(store, tmp_path):
    run = fields(tmp_path / "run", "store", steps=4, save_every=2)
    assert performed(Run(run, stop_after=2)).code == 75
    write_store(store, np.roll(TOKENS, 1), LENGTHS)
    assert "has other tokens" in performed(Run(run)).error
    write_store(store, TOKENS, LENGTHS)
    assert performed(Run(run)).resumed_at == 2


def test_a_damaged_store_is_refused(store, tmp_path):
    with (store / "tokens.bin").open("r+b") as file:
        file.write(b"\1")
    assert "is damaged" in performed(Run(fields(tmp_path / "run", "store"))).error


def test_an_unfinished_or_cut_store(store, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    argv = argv_of({**fields(tmp_path / "run", "store"), "output": "run", "data": "store"})
    os.truncate(store / "tokens.bin", 700)
    assert_refused(argv, ["'store/tokens.bin'", "700 bytes", "800", "--force"], capfd)
    for name in ("tokens.bin", "documents.bin"):
        (store / name).unlink()
        with refused(f"'store/{name}' is missing", "tokenize again, with --force"):
            read_store(Path("store"))
        (store / name).write_bytes(bytes({"tokens.bin": 800, "documents.bin": 40}[name]))
    (store / "store.json").unlink()
    assert_refused(argv, ["'store'", "cs336 tokenize"], capfd)


HEADERS = {
    "text": "no JSON",
    "list": "[]",
    "other format": '{"format": "other"}',
    "no fields": '{"format": "cs336 tokens", "version": 1}',
    "version": '{"format": "cs336 tokens", "version": 2}',
    "deep": "[" * 100_000,
}
FIELDS = {"dtype": "object", "tokens": -1, "documents": 1e300, "vocab_size": True, "fingerprint": None, "work": [1]}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_is_none(name, store):
    (store / "store.json").write_text(HEADERS[name])
    with refused(
        "store.json", "another format" if name in ("list", "other format") else "tokenize again, with --force"
    ):
        read_store(store)


@pytest.mark.parametrize("name", FIELDS)
def test_a_header_with_a_wrong_field(name, store):
    values = json.loads((store / "store.json").read_text())
    (store / "store.json").write_text(json.dumps({**values, name: FIELDS[name]}))
    with refused("store.json", name):
        read_store(store)


# -- packed documents -------------------------------------------------------------------------------------------------

MANY = [30, 0, 3, 1, 66, 100, 7, 43, 100, 50]
"""Lengths of documents, most of them shorter than a sequence."""


@pytest.fixture
def packed_store(tmp_path) -> Path:
    (tmp_path / "store").mkdir()
    write_store(tmp_path / "store", TOKENS, MANY)
    return tmp_path / "store"


@pytest.mark.parametrize("fast", ["off", "kernels,loss,optimizer"])
def test_packed_documents_resume_to_the_bit(fast, packed_store, tmp_path):
    options = {"pack": "documents", "steps": 4, "save_every": 2, "fast": fast}
    whole = performed(Run(fields(tmp_path / "whole", "store", **options)))
    cut = fields(tmp_path / "cut", "store", **options)
    assert performed(Run(cut, stop_after=2)).code == 75
    resumed = performed(Run(cut))
    assert (whole.code, resumed.code, resumed.resumed_at) == (0, 0, 2)
    assert all(torch.equal(value, resumed.weights[name]) for name, value in whole.weights.items())


def test_packing_changes_what_is_computed_and_belongs_to_the_run(packed_store, tmp_path):
    options = {"steps": 2, "save_every": 2}
    plain, packed = (
        performed(Run(fields(tmp_path / pack, "store", pack=pack, **options))) for pack in ("none", "documents")
    )
    assert any(not torch.equal(value, packed.weights[name]) for name, value in plain.weights.items())
    other = fields(tmp_path / "none", "store", **{**options, "pack": "documents", "steps": 3})
    assert "pack was none and is documents" in performed(Run(other)).error


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ({"data": "text.txt"}, "--pack documents needs a folder of cs336 tokenize"),
        ({"compile": True}, "--pack documents cannot be combined with --compile"),
        ({"precision": "fp8"}, "--pack documents cannot be combined with --precision fp8"),
        ({"attention": "sdpa"}, "--attention sdpa has no packed documents"),
        ({"engine": "torch", "parallel": "ddp", "cp": 2}, "cannot be combined with --tp, --cp and --pp"),
        ({"pack": "all"}, "--pack must be one of none, documents"),
        ({"data": "lines.jsonl"}, "has documents to tokenize first: cs336 tokenize .*lines.jsonl"),
    ],
)
def test_what_cannot_be_packed_is_refused(flags, names, packed_store, tmp_path):
    for name in ("text.txt", "lines.jsonl"):
        (tmp_path / name).write_text("text " * 100)
    data = str(tmp_path / flags.get("data", "store"))
    with pytest.raises(UserError, match=names):
        build(TrainSettings, {"pack": "documents", **flags, "data": data})
