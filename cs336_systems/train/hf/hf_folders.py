"""Folders of published models: read into a file of our weights, and written from one or from a checkpoint.

    config.json                        the model's configuration
    model.safetensors                  its weights, or
    model-00001-of-00004.safetensors   ... in several files, with model.safetensors.index.json
    tokenizer.json and others          copied along; a tokenizer.json alone gets a tokenizer_config.json

Tensors are read and written one at a time, so that models larger than the memory pass through.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cs336_systems.config import ModelConfig, UserError
from cs336_systems.files import LARGEST_FILE, foreign, read_json, sync_folder, write_failure, write_file
from cs336_systems.model import TransformerLM
from cs336_systems.train.hf.hf_config import config_of, is_like, model_of
from cs336_systems.train.hf.hf_tensors import IGNORED, from_hf, hf_name, to_hf
from cs336_systems.train.hf.hf_tokenizer import TOKENIZER_CONFIG, describe_tokenizer
from cs336_systems.train.hf.tensor_files import DTYPES, Described, opened, write_tensors
from cs336_systems.train.tokens.token_store import TOKENIZER_FILE, is_store, read_store
from cs336_systems.train.weight_files import WEIGHTS, require_published
from cs336_systems.train.weights import own_state

CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
"""File with sampling settings, including the tokens that end a text."""
TOKENIZER_FILES = (
    *(TOKENIZER_FILE, TOKENIZER_CONFIG, "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", GENERATION),
)
"""Files of a folder that are copied unchanged."""
_TOKENIZERS = (TOKENIZER_FILE, "tokenizer.model", "vocab.json")
"""Files of which each is a tokenizer."""
SHARD_BYTES = 5 * 10**9
"""Maximum bytes of a file of weights; larger models are written as several files."""
_FILE_NAME = re.compile(r"[\w.-]+\.safetensors")


# -- in ---------------------------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """A tensor of a folder: its file and its description."""

    file: Path
    described: Described


def import_folder(source: Path, target: Path) -> ModelConfig:
    """Write the weights of a published model in our format, its config.json and its tokenizer into a new folder."""
    require_published(source)
    values, config = _config_in(source)
    found = _tensors_in(source)
    described = _expected(config, found, source)
    with _new_folder(target) as fresh, _OneOpen() as files:

        def read(name: str) -> Tensor:
            return from_hf(name, files.read(found[hf_name(name)].file, hf_name(name)), config.head_dim)

        _require_tied(config, found, files)
        metadata = {"format": "pt", "model": json.dumps(config.to_dict())}
        write_tensors(fresh / WEIGHTS, described, read, metadata)
        write_file(fresh / CONFIG, json.dumps(values, indent=2) + "\n")
        _copy_tokenizer(source, fresh)
    return config


def _config_in(folder: Path) -> tuple[dict[str, Any], ModelConfig]:
    path = folder / CONFIG
    with foreign(path, "the configuration of a model"):
        values = read_json(path, LARGEST_FILE)
        try:
            return values, model_of(values)
        except UserError as error:
            raise UserError(f"{str(folder)!r} cannot be imported: {error}") from None


def _tensors_in(folder: Path) -> dict[str, _Found]:
    """Return the tensors of all files of a folder, from their headers."""
    found: dict[str, _Found] = {}
    for path in _files_in(folder):
        with opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                if name in found:
                    raise UserError(f"{str(path)!r}: the tensor {name!r} is in another file, too")
                part = file.get_slice(name)
                found[name] = _Found(path, Described(name, part.get_dtype(), tuple(part.get_shape())))
    return {name: one for name, one in found.items() if not IGNORED.fullmatch(name)}


def _files_in(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        with foreign(folder / INDEX, "an index of safetensors files"):
            named = sorted(set(read_json(folder / INDEX, LARGEST_FILE)["weight_map"].values()))
            for name in named:
                if not _FILE_NAME.fullmatch(name):  # no path leads out of the folder
                    raise ValueError(f"it names the file {name!r:.80}")
            return [folder / name for name in named]
    if not (folder / WHOLE).exists():
        raise UserError(f"{str(folder)!r} has neither {WHOLE} nor {INDEX}; other formats are not read")
    return [folder / WHOLE]


def _expected(config: ModelConfig, found: Mapping[str, _Found], source: Path) -> list[Described]:
    """Return our tensors with the element types of the folder; raise UserError for missing or additional tensors."""
    problems, described = [], []
    shapes = tensor_shapes(config, source / CONFIG)
    for name, shape in shapes.items():
        there = found[hf_name(name)].described if hf_name(name) in found else None
        if there is None:
            problems.append(f"{hf_name(name)!r} is missing")
        elif there.shape != shape:
            problems.append(f"{there.name!r} has the shape {there.shape} instead of {shape}")
        elif there.dtype not in DTYPES:
            problems.append(f"{there.name!r} has the element type {there.dtype}, none of {', '.join(DTYPES)}")
        else:
            described.append(Described(name, there.dtype, shape))
    known = {hf_name(name) for name in shapes} | ({"lm_head.weight"} if config.tied_embeddings else set())
    problems += [f"{name!r} is no tensor of the model" for name in found if name not in known]
    if problems:
        others = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UserError(f"the weights in {str(source)!r} do not fit its {CONFIG}: {problems[0]}{others}")
    return described


def tensor_shapes(config: ModelConfig, source: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of our tensors, each once; `source` is the file with the configuration."""
    with foreign(source, "the configuration of a model"), torch.device("meta"):
        return {name: tuple(value.shape) for name, value in own_state(TransformerLM(config)).items()}


def _require_tied(config: ModelConfig, found: Mapping[str, _Found], files: "_OneOpen") -> None:
    """Raise UserError if a folder with a tied head also holds a different head."""
    if not config.tied_embeddings or "lm_head.weight" not in found:
        return
    names = ("lm_head.weight", hf_name("token_embeddings.weight"))
    head, embedding = (files.read(found[name].file, name).clone() for name in names)
    if not torch.equal(head, embedding):
        raise UserError(f"{CONFIG} ties lm_head to the embedding, and the weights of both are different")


class _OneOpen:
    """Reads tensors from several files, of which only one is open at a time: an open file is mapped into memory."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._path: Path | None = None
        self._file: Any = None

    def __enter__(self) -> "_OneOpen":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, path: Path, name: str) -> Tensor:
        if path != self._path:
            self._stack.close()
            self._path, self._file = path, self._stack.enter_context(opened(path))
        return self._file.get_tensor(name)


def _copy_tokenizer(source: Path, target: Path, left_out: Sequence[str] = ()) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file() and name not in left_out:
            shutil.copyfile(source / name, target / name)


@contextlib.contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to write to, which becomes `target` when everything is written."""
    if os.path.lexists(target):
        raise UserError(f"{str(target)!r} exists; name a folder that does not exist")
    fresh = target.with_name(f".tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh.mkdir()
        yield fresh
        sync_folder(fresh)
        fresh.rename(target)
        sync_folder(target.parent)
    except OSError as error:
        raise write_failure(error, target, is_flag=False) from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


# -- out --------------------------------------------------------------------------------------------------------------


def export_folder(
    config: ModelConfig,
    tensors: Sequence[Described],
    read: Callable[[str], Tensor],
    target: Path,
    *,
    like: Path | None = None,
) -> str:
    """Write a model in Hugging Face's format into a new folder; return a remark on its tokenizer, or an empty string.

    `tensors` are ours, and `read` returns one by its name. The other fields of config.json, such as the tokens that end
    a text, and the tokenizer are those of the folder `like`: of a published model, or of `cs336 tokenize`. It must have
    the model's vocabulary; of a model of another family only the tokenizer is taken.
    """
    values = None if like is None else _settings_in(like, config)
    dtypes = Counter(one.dtype for one in tensors)
    dtype = str(DTYPES[dtypes.most_common(1)[0][0]]).removeprefix("torch.")
    fields = config_of(config, dtype, values)
    with _new_folder(target) as fresh:
        write_file(fresh / CONFIG, json.dumps(fields, indent=2) + "\n")
        names = {hf_name(one.name): one.name for one in tensors}
        shards = _shards([Described(hf_name(one.name), one.dtype, one.shape) for one in tensors])

        def converted(name: str) -> Tensor:
            return to_hf(names[name], read(names[name]), config.head_dim)

        places: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            file = WHOLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            write_tensors(fresh / file, shard, converted, {"format": "pt"})
            places |= {one.name: file for one in shard}
        if len(shards) > 1:
            index = {"metadata": {"total_size": sum(one.size for one in tensors)}, "weight_map": places}
            write_file(fresh / INDEX, json.dumps(index, indent=2) + "\n")
        if like is None:
            missing = "without a tokenizer and the tokens that begin and end a text"
            return f"{missing}: --like FOLDER copies both, also of cs336 tokenize"
        same_family = is_like(config, values)
        _copy_tokenizer(like, fresh, left_out=() if same_family else (GENERATION,))
        described = describe_tokenizer(like, fresh, fields)
        kept = "its tokenizer is copied, its ids of special tokens are not"
        missing = (
            "" if any((fresh / name).exists() for name in _TOKENIZERS) else f"without a tokenizer: {like} has none"
        )
        remarks = ("" if same_family else f"{like} is a model of another family: {kept}", described, missing)
        return "; ".join(remark for remark in remarks if remark)


def is_settings_of(folder: Path, config: ModelConfig) -> bool:
    """Return True if a folder has a config.json, or a store of tokens, of a model with this vocabulary."""
    try:
        _settings_in(folder, config)
    except UserError:
        return False
    return True


def _settings_in(folder: Path, config: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json that a folder gives to a model; raise UserError for another vocabulary."""
    if is_store(folder):
        store = read_store(folder)
        values, fits, count = {"eos_token_id": store.end_token}, store.vocab_size <= config.vocab_size, store.vocab_size
    else:
        values, theirs = _config_in(folder)
        fits, count = theirs.vocab_size == config.vocab_size, theirs.vocab_size
    if not fits:
        raise UserError(
            f"--like {str(folder)!r} has a vocabulary of {count:,} tokens, and the model one of {config.vocab_size:,}: "
            f"its tokenizer is not the model's; name the folder whose tokenizer the training data was made with"
        )
    return values


def _shards(tensors: Sequence[Described]) -> list[list[Described]]:
    shards: list[list[Described]] = [[]]
    size = 0
    for one in tensors:
        if shards[-1] and size + one.size > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(one)
        size += one.size
    return shards
