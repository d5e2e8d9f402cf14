"""Files of weights that `cs336 train --init` names: their location, and the model in their metadata. No torch.

A file of `cs336 export` and the folder of `cs336 import` hold the configuration of the model in their metadata; a file
from elsewhere may not.
"""

import json
import re
import shlex
from pathlib import Path

from safetensors import SafetensorError, safe_open

from cs336_systems.config import ModelConfig, UserError
from cs336_systems.files import reason_of, require_regular
from cs336_systems.train.tokens.token_store import TOKENIZER_FILE

WEIGHTS = "weights.safetensors"
"""The file of weights in a folder of `cs336 import`."""
CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints."""
MANIFEST = "manifest.json"
"""The file in each folder of a checkpoint that describes it."""
_PUBLISHED = "name a folder of a published model, with config.json and model.safetensors"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def weights_file(path: Path) -> Path:
    """Return the file of weights that `--init` names directly or by its folder; raise UserError that says how to get
    one."""
    if not path.exists():
        advice = download_advice(path) or (
            "; name a file of cs336 export or a folder of cs336 import; weights that only another machine has need the "
            "flags of their shape, such as --size"
        )
        raise UserError(f"--init: no file or folder {str(path)!r}{advice}")
    if not path.is_dir():
        return path
    if (path / WEIGHTS).is_file():
        return path / WEIGHTS
    if (path / CHECKPOINTS).is_dir() or (path / MANIFEST).is_file():
        run = path.parent.parent if (path / MANIFEST).is_file() else path
        file = f"{run}.safetensors"
        how = f"cs336 export {shlex.quote(str(path))} {shlex.quote(file)}"
        raise UserError(f"--init {str(path)!r} is a run; export its weights first: {how}, then give --init {file}")
    if (path / "config.json").is_file():
        how = f"cs336 import {shlex.quote(str(path))} {shlex.quote(f'weights/{path.name}')}"
        raise UserError(f"--init {str(path)!r} is in the format of Hugging Face; import it first: {how}")
    raise UserError(f"--init {str(path)!r} has no {WEIGHTS}; name a file, or a folder of cs336 import")


def require_published(path: Path) -> None:
    """Raise UserError if there is no folder of a published model at `path`."""
    if not path.is_dir():
        advice = download_advice(path) or f"; {_PUBLISHED}"
        raise UserError(f"no folder {str(path)!r}{advice}")
    if not (path / "config.json").is_file():
        raise UserError(f"{str(path)!r} has no config.json; {_PUBLISHED}")


def require_source(path: Path, *, may_be_file: bool) -> None:
    """Raise UserError for a path that cannot be exported: it does not exist, or is a folder without checkpoints."""
    advice = "name the --output of a run of cs336 train"
    if not path.is_dir() and not (may_be_file and path.is_file()):
        raise UserError(f"no folder {str(path)!r}; {advice}")
    if path.is_dir() and not any(inside.is_dir() or inside.name in (WEIGHTS, MANIFEST) for inside in path.iterdir()):
        raise UserError(f"no intact checkpoint in {str(path)!r}; {advice}")


def download_advice(path: Path) -> str:
    """Return how to get a model for a path that does not exist but may be its name on the Hugging Face Hub."""
    if not _HUB_NAME.fullmatch(str(path)) or path.parent.exists():
        return ""
    local = shlex.quote(path.name)
    how = f"hf download {path} --local-dir {local}, then cs336 import {local} weights/{local}"
    return f"; published models are imported from a local folder: {how}"


def model_of_weights(path: Path) -> ModelConfig | None:
    """Return the model in the metadata of the weights that `--init` names; None for a file without it."""
    file = weights_file(path)
    require_regular(file)
    try:
        with safe_open(file, framework="np") as opened:
            text = (opened.metadata() or {}).get("model")
    except (SafetensorError, OSError) as error:
        raise unreadable(file, error) from None
    if text is None:
        return None
    try:
        return ModelConfig(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        raise UserError(f"--init {str(file)!r} has metadata that is not the configuration of a model") from None


def unreadable(path: Path, error: Exception) -> UserError:
    """Return the error to raise for a file that the library cannot read."""
    return UserError(f"--init {str(path)!r} cannot be read as safetensors: {reason_of(error)}")


def tokenizer_of_weights(path: Path) -> Path | None:
    """Return the tokenizer beside the weights in a folder of `cs336 import`; None if there is none."""
    file = path / TOKENIZER_FILE
    return file if file.is_file() else None
