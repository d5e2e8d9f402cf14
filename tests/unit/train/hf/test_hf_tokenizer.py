"""The tokenizer of an exported folder, as transformers loads it, against the tokenizer.json that data was made with."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from cs336_systems.cli import main
from cs336_systems.config import ModelConfig
from cs336_systems.model import TransformerLM
from cs336_systems.train.hf.hf_tokenizer import _QWEN_WORDS
from cs336_systems.train.tokens.vocabulary import train_tokenizer
from tests.helpers import assert_refused

pytestmark = pytest.mark.usefixtures("elsewhere")

TEXT = "It's 1234567 cats, isn't it?\n\n  De\u0301ja\u0300 vu: 猫が好き。<|endoftext|> 1234567 "
SHAPES: dict[str, dict[str, Any]] = {"llama": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}


EXPORT = ["export", "weights.safetensors", "out", "--format", "hf", "--like", "store"]


def save_weights(family: str, folder: Path) -> None:
    """Write a file of weights of a small model."""
    config = ModelConfig(vocab_size=500, d_model=8, num_layers=1, num_heads=2, d_ff=8, **SHAPES[family])
    tensors = {name: value.contiguous() for name, value in TransformerLM(config).state_dict().items()}
    save_file(tensors, folder / "weights.safetensors", {"model": json.dumps(config.to_dict())})


def loader(name: str) -> Any:
    return getattr(pytest.importorskip("transformers"), name)


@pytest.mark.parametrize("family", SHAPES)
def test_the_ids_are_those_of_training(family, elsewhere, capsys):
    """AutoTokenizer of transformers 5 ignores the class that a folder of qwen2 names, and export says so."""
    (elsewhere / "text.txt").write_text(TEXT * 50)
    assert main(["tokenize", "text.txt", "--train_tokenizer", "500", "--output", "store"]) == 0
    save_weights(family, elsewhere)
    assert main(EXPORT) == 0
    name = "PreTrainedTokenizerFast" if family == "qwen2" else "AutoTokenizer"
    assert ("load its tokenizer with PreTrainedTokenizerFast" in capsys.readouterr().out) == (family == "qwen2")
    tokenizer = loader(name).from_pretrained("out")
    ours = Tokenizer.from_file("store/tokenizer.json").encode(TEXT).ids
    assert tokenizer(TEXT)["input_ids"] == ours
    assert tokenizer.decode(ours) == TEXT
    assert tokenizer(TEXT).keys() == {"input_ids", "attention_mask"}
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token) == ("<|endoftext|>", None, None)


@pytest.mark.parametrize(
    ("family", "named"),
    [("qwen2", None), ("qwen3", None), ("qwen3", "Qwen2Tokenizer"), ("qwen3", "Qwen2TokenizerFast")],
)
def test_an_exported_folder_names_its_problem_again(family, named, elsewhere, capsys):
    """Its tokenizer_config.json is copied as it is; the remark depends on what AutoTokenizer makes of the copy."""
    (elsewhere / "text.txt").write_text(TEXT * 50)
    assert main(["tokenize", "text.txt", "--train_tokenizer", "500", "--output", "store"]) == 0
    save_weights(family, elsewhere)
    assert main(EXPORT) == 0
    path = elsewhere / "out/tokenizer_config.json"
    if named is not None:
        path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": named}))
    capsys.readouterr()
    assert main(["export", "weights.safetensors", "again", "--format", "hf", "--like", "out"]) == 0
    is_named = "load its tokenizer with PreTrainedTokenizerFast" in capsys.readouterr().out
    assert (elsewhere / "again/tokenizer_config.json").read_bytes() == path.read_bytes()
    ours = Tokenizer.from_file("store/tokenizer.json").encode(TEXT).ids
    assert is_named == (loader("AutoTokenizer").from_pretrained("again")(TEXT)["input_ids"] != ours)
    assert is_named == (family == "qwen2" or named is not None)
    assert loader("PreTrainedTokenizerFast").from_pretrained("again")(TEXT)["input_ids"] == ours


def test_a_tokenizer_that_splits_as_qwen_is_loaded_by_its_class(elsewhere, capsys):
    """The published tokenizer.json of Qwen in a store: AutoTokenizer changes nothing, and there is no remark."""
    tokenizer = Tokenizer.from_str(train_tokenizer([TEXT] * 9, 400).decode())
    split = pre_tokenizers.Split(Regex(_QWEN_WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.save("qwen.json")
    (elsewhere / "text.txt").write_text(TEXT)
    assert main(["tokenize", "text.txt", "--tokenizer", "qwen.json", "--output", "store"]) == 0
    save_weights("qwen2", elsewhere)
    assert main(EXPORT) == 0
    assert "PreTrainedTokenizerFast" not in capsys.readouterr().out
    assert loader("AutoTokenizer").from_pretrained("out")(TEXT)["input_ids"] == tokenizer.encode(TEXT).ids


def test_special_tokens_are_those_of_config_json_that_the_tokenizer_has(elsewhere, capsys):
    """And a tokenizer_config.json that came with the weights is copied unchanged."""
    (elsewhere / "text.txt").write_text(TEXT * 50)
    assert main(["tokenize", "text.txt", "--train_tokenizer", "500", "--output", "store"]) == 0
    save_weights("llama", elsewhere)
    assert main(EXPORT) == 0
    path = elsewhere / "out/config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"bos_token_id": 0, "eos_token_id": [0], "pad_token_id": 9})
    )
    (elsewhere / "out/tokenizer_config.json").unlink()
    assert main(["export", "weights.safetensors", "again", "--format", "hf", "--like", "out"]) == 0
    found = json.loads((elsewhere / "again/tokenizer_config.json").read_text())
    assert {name: text for name, text in found.items() if name.endswith("_token")} == {"bos_token": "<|endoftext|>"}
    (elsewhere / "out/tokenizer_config.json").write_text('{"tokenizer_class": "Own"}')
    assert main(["export", "weights.safetensors", "kept", "--format", "hf", "--like", "out"]) == 0
    assert (elsewhere / "kept/tokenizer_config.json").read_text() == '{"tokenizer_class": "Own"}'


def test_a_tokenizer_that_cannot_be_read(elsewhere, capfd):
    (elsewhere / "text.txt").write_text(TEXT)
    assert main(["tokenize", "text.txt", "--train_tokenizer", "300", "--output", "store"]) == 0
    save_weights("llama", elsewhere)
    for damage in ("[]", "{", '{"added_tokens": 3}'):
        (elsewhere / "store/tokenizer.json").write_text(damage)
        capfd.readouterr()
        assert_refused(EXPORT, ["'store/tokenizer.json' is not a tokenizer.json"], capfd)
