"""Weights as safetensors files: `cs336 export` writes one from a checkpoint, `cs336 train --init` starts from one.

Tensors have the names of the unwrapped model. The metadata of the file holds the configuration of the model as JSON and
the step; `train.settings` takes the shape of the model from it. A file from elsewhere needs no metadata, only the names
and shapes of the model.
"""

import json
import os
from collections.abc import Container, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from cs336_systems.config import ModelConfig, UserError
from cs336_systems.files import require_regular, sync_folder, write_failure
from cs336_systems.model import TransformerLM
from cs336_systems.parallel.collectives import on_first
from cs336_systems.parallel.launch import process_group
from cs336_systems.step.initialise import StoreWeight
from cs336_systems.train.checkpoint import Checkpoint, Store, located
from cs336_systems.train.hf.tensor_files import DTYPES as READABLE
from cs336_systems.train.hf.tensor_files import described, write_tensors
from cs336_systems.train.weight_files import unreadable, weights_file

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_NO_SHAPE = (
    "; the file has no configuration of a model, so the flags must give its shape: --size, or --vocab_size, --d_model, "
    "--num_layers, --num_heads and --d_ff"
)


# -- out --------------------------------------------------------------------------------------------------------------


def export(run: Path, target: Path, *, step: int | None = None, dtype: str = "fp32", force: bool = False) -> str:
    """Write the weights of a run's newest checkpoint, or of that of `step`; return a line that says what was written.

    The file is written under a temporary name, forced to disk and renamed when it is complete.
    """
    if target.is_dir() or not target.parent.is_dir():
        problem = f"{str(target)!r} is a folder" if target.is_dir() else f"no folder {str(target.parent)!r}"
        raise UserError(f"{problem}; name a file to write, in a folder that exists")
    if not force and os.path.lexists(target):
        raise UserError(f"{str(target)!r} exists; --force overwrites it")
    with process_group("gloo", "cpu"):
        found = checkpoint_of(run, step)
        state, config = saved_weights(found)
    tensors = {name: converted(name, value, dtype) for name, value in state.items()}
    metadata = {"format": "pt", "model": json.dumps(config.to_dict()), "step": str(found.manifest["step"])}
    _write(tensors, target, metadata)
    count = sum(value.numel() for value in tensors.values())
    return f"{target}: {count:,} weights in {dtype}, from {found.path}"


def checkpoint_of(run: Path, step: int | None) -> Checkpoint:
    """Return the newest intact checkpoint of a run, or that of a step."""
    folder, named = located(run)
    if named is not None and step not in (None, named):
        raise UserError(f"{str(run)!r} is the checkpoint of another step than --step {step}; name the run's folder")
    if not folder.is_dir():
        raise UserError(f"no folder {str(folder)!r}; name the --output of a run of cs336 train")
    store, step = Store(folder), named if step is None else step
    found = store.newest() if step is None else store.at(step)
    if found is None:
        raise UserError(f"no intact checkpoint in {str(folder)!r}; name the --output of a run of cs336 train")
    return found


def saved_weights(found: Checkpoint) -> tuple[dict[str, Tensor], ModelConfig]:
    """Read the weights and persistent buffers, under the names of the model's state dict."""
    config = ModelConfig(**found.manifest["settings"]["model"])
    with torch.device("meta"):
        model = TransformerLM(config)
    parameters = {name for name, _ in model.named_parameters()}
    state = {
        f"{'model' if name in parameters else 'buffer'}/{name}": torch.empty(value.shape, dtype=value.dtype)
        for name, value in own_state(model).items()
    }
    Store(found.path.parent).load(found, state)
    return {name.partition("/")[2]: value for name, value in state.items()}, config


def own_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model, in which a weight that is used twice has one name only."""
    once, every = dict(model.named_parameters()), dict(model.named_parameters(remove_duplicate=False))
    return {name: value for name, value in model.state_dict().items() if name in once or name not in every}


def converted(name: str, value: Tensor, dtype: str) -> Tensor:
    """Return a tensor in another element type; raise UserError if a weight is beyond its range."""
    if not value.is_floating_point():
        return value
    found = value.to(DTYPES[dtype])
    if not torch.equal(found.isfinite(), value.isfinite()):
        raise UserError(f"{name!r} has weights beyond the range of {dtype}; use --dtype bf16 or fp32")
    return found


def _write(tensors: dict[str, Tensor], target: Path, metadata: dict[str, str]) -> None:
    try:
        write_tensors(
            target, [described(name, value) for name, value in tensors.items()], tensors.__getitem__, metadata
        )
        sync_folder(target.resolve().parent)
    except OSError as error:
        raise write_failure(error, target, is_flag=False) from None


# -- in ---------------------------------------------------------------------------------------------------------------


def load_weights(path: Path, model: nn.Module) -> None:
    """Replace the weights of a model that is not wrapped yet by those of a file, which rank 0 reads.

    The wrappers give rank 0's weights to all ranks, and the packed optimizer takes its fp32 masters from the model.
    Raises UserError on all ranks if the file does not fit.
    """
    on_first(lambda: _load(path, own_state(model)))


def load_each(path: Path, model: nn.Module, config: ModelConfig, device: torch.device, store: StoreWeight) -> None:
    """Replace the weights of a model that is split over ranks: rank 0 reads them, one at a time, for `store`.

    Raises UserError on all ranks if the file does not fit or cannot be read.
    """
    on_first(lambda: require_weights(path, config))
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape, dtype=torch.float32, device=device)
        on_first(partial(_read_into, path, name, whole))
        store(parameter, whole)


def _read_into(path: Path, name: str, whole: Tensor) -> None:
    with _opened(path) as file:
        whole.copy_(_finite(path, name, file.get_tensor(name)))


def require_weights(path: Path, config: ModelConfig) -> None:
    """Raise UserError if a file cannot be read or does not fit the model; read its header only."""
    with torch.device("meta"):
        model = TransformerLM(config)
    _load(path, own_state(model))


@torch.no_grad()
def _load(path: Path, state: dict[str, Tensor]) -> None:
    with _opened(path) as file:
        _require_same_tensors(path, file, state)
        for name, value in state.items():
            if value.device.type != "meta":
                value.copy_(_finite(path, name, file.get_tensor(name)))


def _finite(path: Path, name: str, value: Tensor) -> Tensor:
    """Return a tensor that has been read; raise UserError if it holds a value that is not finite.

    The sum shows that without a tensor of booleans. It may also overflow, so the values are counted before an error.
    """
    if not value.is_floating_point() or value.sum(dtype=torch.float32).isfinite():
        return value
    if count := int((~value.isfinite()).sum()):
        raise UserError(
            f"--init {str(path)!r}: {count:,} of {value.numel():,} values of {name!r} are not finite (NaN or "
            f"infinite); name other weights, such as those of an earlier step: cs336 export RUN FILE --step STEP"
        )
    return value


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    path = weights_file(path)
    require_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise unreadable(path, error) from None


def _require_same_tensors(path: Path, file: Any, state: dict[str, Tensor]) -> None:
    names = dict.fromkeys(file.keys())
    problems = [problem for name, value in state.items() if (problem := _mismatch(name, value, file, names))]
    problems += [f"{name!r} is not a tensor of the model" for name in names if name not in state]
    if problems:
        others = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        advice = "" if "model" in (file.metadata() or {}) else _NO_SHAPE
        raise UserError(f"--init {str(path)!r} does not fit the model: {problems[0]}{others}{advice}")


def _mismatch(name: str, value: Tensor, file: Any, names: Container[str]) -> str | None:
    if name not in names:
        return f"{name!r} is missing"
    found = file.get_slice(name)
    if (shape := tuple(found.get_shape())) != tuple(value.shape):
        return f"{name!r} has the shape {shape} instead of {tuple(value.shape)}"
    if value.is_floating_point() and found.get_dtype() not in READABLE:
        return f"{name!r} has the element type {found.get_dtype()}, which is none of {', '.join(READABLE)}"
    return None
