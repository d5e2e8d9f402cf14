"""The tokenizer_config.json of a tokenizer.json that came without one, such as that of `cs336 tokenize`.

It names the class with which AutoTokenizer of transformers loads the tokenizer. Without it that is the class of the
model's family, and Qwen's replaces the pre-tokenizer: a text would have other tokens than in training. For `qwen2`
transformers 5 does so whatever class is named.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cs336_systems.files import LARGEST_FILE, foreign, read_json, write_file
from cs336_systems.train.tokens.token_store import TOKENIZER_FILE

TOKENIZER_CONFIG = "tokenizer_config.json"
_CLASS = "PreTrainedTokenizerFast"
_QWEN_CLASS = "Qwen2Tokenizer"
_NAMED = ("bos_token", "eos_token", "pad_token")
"""Special tokens that tokenizer_config.json names, and whose ids config.json has."""
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern with which Qwen 2.5 and Qwen 3 split a text."""


def describe_tokenizer(source: Path, target: Path, config: Mapping[str, Any]) -> str:
    """Write tokenizer_config.json into the folder `target`, whose config.json is `config`, if `source` has none for its
    tokenizer.json.

    Return how to load the tokenizer if AutoTokenizer would change it, or else an empty string.
    """
    path, described = source / TOKENIZER_FILE, source / TOKENIZER_CONFIG
    if not path.exists():
        return ""
    named = _CLASS
    if described.exists():
        with foreign(described, "a tokenizer_config.json"):
            named = str(read_json(described, LARGEST_FILE).get("tokenizer_class"))
    may_be_replaced = config["model_type"] == "qwen2" or named.removesuffix("Fast") == _QWEN_CLASS
    if described.exists() and not may_be_replaced:
        return ""
    with foreign(path, "a tokenizer.json"):
        tokenizer = read_json(path, LARGEST_FILE)
        values = {
            "tokenizer_class": _CLASS,
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
            **_named_tokens(tokenizer, config),
        }
        is_replaced = may_be_replaced and not _splits_as_qwen(tokenizer)
    if not described.exists():
        write_file(target / TOKENIZER_CONFIG, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
    if not is_replaced:
        return ""
    return f"load its tokenizer with {_CLASS}: AutoTokenizer of transformers 5 would split texts as Qwen's does"


def _named_tokens(tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, str]:
    """Return those special tokens of config.json that the tokenizer has."""
    contents = {one["id"]: one["content"] for one in tokenizer.get("added_tokens", [])}
    ids = {name: config.get(f"{name}_id") for name in _NAMED}  # an id may be a list, of several tokens that end a text
    return {name: contents[found] for name, found in ids.items() if type(found) is int and found in contents}


def _splits_as_qwen(tokenizer: Mapping[str, Any]) -> bool:
    """Return True if a tokenizer has the normalizer and the pattern of Qwen."""
    normalizer, splitter = tokenizer.get("normalizer") or {}, tokenizer.get("pre_tokenizer") or {}
    patterns = [step.get("pattern") for step in splitter.get("pretokenizers", [])]
    return normalizer.get("type") == "NFC" and patterns[:1] == [{"Regex": _QWEN_WORDS}]
