"""`cs336 export --format hf`: the weights of a training run, or of a file of our weights, for other libraries."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from cs336_systems.config import ModelConfig, UserError
from cs336_systems.files import reason_of
from cs336_systems.parallel.launch import process_group
from cs336_systems.train.hf.hf_folders import export_folder, is_settings_of, tensor_shapes
from cs336_systems.train.hf.tensor_files import DTYPES, NAMES, Described, opened
from cs336_systems.train.weight_files import WEIGHTS
from cs336_systems.train.weights import DTYPES as BY_FLAG
from cs336_systems.train.weights import checkpoint_of, converted, saved_weights


def export_hf(source: Path, target: Path, *, step: int | None, dtype: str | None, like: Path | None) -> str:
    """Write a run's checkpoint, or a file of weights, as a folder; return a line that says what was written."""
    with ExitStack() as stack:
        file = source / WEIGHTS if (source / WEIGHTS).is_file() else source
        if file.is_file():
            if step is not None:
                raise UserError(f"--step is for runs, and {str(source)!r} is a file of weights; leave it out")
            config, tensors, read = _file_of_weights(file, dtype, stack)
        else:
            config, tensors, read = _checkpoint(source, step, dtype or "fp32")
        if like is None and file.name == WEIGHTS and is_settings_of(file.parent, config):
            like = file.parent  # a folder of cs336 import has all that was published with the weights
        remark = export_folder(config, tensors, read, target, like=like)
    count = sum(one.size // DTYPES[one.dtype].itemsize for one in tensors)
    written = f"{target}: {count:,} weights in the format of Hugging Face, from {source}"
    return f"{written}; {remark}" if remark else written


Weights = tuple[ModelConfig, list[Described], Callable[[str], Tensor]]
"""The model, descriptions of our tensors, and a function that reads a tensor by name."""


def _checkpoint(run: Path, step: int | None, dtype: str) -> Weights:
    with process_group("gloo", "cpu"):
        state, config = saved_weights(checkpoint_of(run, step))
    tensors = [Described(name, NAMES[BY_FLAG[dtype]], tuple(value.shape)) for name, value in state.items()]
    return config, tensors, lambda name: converted(name, state[name], dtype)


def _file_of_weights(path: Path, dtype: str | None, stack: ExitStack) -> Weights:
    file = stack.enter_context(opened(path))
    try:
        config = ModelConfig(**json.loads((file.metadata() or {})["model"]))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        problem = "has no configuration of a model in its metadata"
        raise UserError(f"{str(path)!r} {problem}: {reason_of(error)}; name a file of cs336 import or export") from None
    shapes, tensors = tensor_shapes(config, path), []
    for name in file.keys():  # noqa: SIM118 - it is no dict
        part = file.get_slice(name)
        if part.get_dtype() not in DTYPES:
            raise UserError(f"{str(path)!r}: {name!r} has the element type {part.get_dtype()}")
        if shapes.pop(name, None) != tuple(part.get_shape()):
            raise UserError(f"{str(path)!r}: {name!r} of {tuple(part.get_shape())} is not a tensor of its model")
        tensors.append(Described(name, NAMES[BY_FLAG[dtype]] if dtype else part.get_dtype(), tuple(part.get_shape())))
    if shapes:
        raise UserError(f"{str(path)!r} has no tensor {next(iter(shapes))!r}")

    def read(name: str) -> Tensor:
        return converted(name, file.get_tensor(name), dtype) if dtype else file.get_tensor(name)

    return config, tensors, read
