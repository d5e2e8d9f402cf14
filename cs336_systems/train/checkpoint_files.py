"""The files of a checkpoint: what its folder must hold, how they are written, and how they are verified.

A folder that someone else has written is data. Nothing in it is followed, waited for or believed before it is checked;
whatever is wrong is a DamageError, which names the reason.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.checkpoint.filesystem import FileSystem

from cs336_systems.files import open_regular, require_shallow, sync_folder
from cs336_systems.flags import one_line
from cs336_systems.train.weight_files import MANIFEST

T = TypeVar("T")

FORMAT = 1
METADATA = ".metadata"
"""Name of the index of the tensors, written by torch.distributed.checkpoint."""

_MANIFEST_BYTES = 2**22
_MANIFEST_DEPTH = 5
_METADATA_BYTES = 2**26
"""Maximum bytes of the index: hundreds of thousands of shards; reading it takes 50 times its size in memory."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
_LARGEST = 2**53
"""Maximum number in a manifest."""


class DamageError(Exception):
    """The files of a checkpoint are not as they were written, or not a checkpoint of ours; the message says why."""


# -- names ------------------------------------------------------------------------------------------------------------


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint's folder, or None for any other name."""
    found = re.fullmatch(r"step-([0-9]{8,15})", name)
    step = int(found[1]) if found else -1
    return step if name == name_of(step) else None


def temporary_name(step: int) -> str:
    return f"{name_of(step)}.tmp-{secrets.token_hex(4)}"


def is_temporary(name: str) -> bool:
    """Return True for the name of an unfinished or half-removed checkpoint."""
    name, _, nonce = name.partition(".tmp-")
    return step_of(name) is not None and re.fullmatch(r"[0-9a-f]{8}", nonce) is not None


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, oldest first, whether intact or not."""
    steps = {path: step_of(path.name) for path in (folder.iterdir() if folder.is_dir() else ())}
    return sorted((path for path, step in steps.items() if step is not None), key=lambda path: steps[path] or 0)


# -- writing ----------------------------------------------------------------------------------------------------------


class HashedFiles(FileSystem):
    """Files that torch.distributed.checkpoint writes: hashed while they are written, and forced to disk."""

    def __init__(self) -> None:
        self.written: dict[str, dict[str, Any]] = {}
        """Size and SHA-256 by name, as in a manifest."""

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        with _HashedFile(io.FileIO(path, mode)) as file:
            yield file
            if not file.closed:
                file.close()
        self.written[Path(path).name] = {"size": file.size, "sha256": file.digest.hexdigest()}

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class _HashedFile(io.BufferedWriter):
    """A file that hashes the bytes written to it, and is on disk once it is closed.

    torch 2.13 calls fsync before the last bytes have left Python's buffer.
    """

    def __init__(self, raw: io.FileIO):
        super().__init__(raw)
        self.size, self.digest = 0, hashlib.sha256()

    def write(self, data: Any, /) -> int:
        self.digest.update(data)
        count = super().write(data)
        self.size += count
        return count

    def close(self) -> None:
        if not self.closed:
            try:
                self.flush()
                os.fsync(self.fileno())
            finally:
                super().close()


def publish(unfinished: Path, final: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest last, then rename the folder, each synced to disk before the next.

    An existing folder with the final name is damaged. It is moved aside, not deleted, because it may hold files of
    others.
    """
    with (unfinished / MANIFEST).open("x") as file:
        json.dump({**manifest, "sha256": digest_of(manifest)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(unfinished)
    if os.path.lexists(final):
        os.rename(final, final.with_name(f"damaged-{final.name}-{secrets.token_hex(4)}"))
    os.rename(unfinished, final)
    sync_folder(final.parent)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint. It loses its name first: an interrupted removal leaves nothing that looks like one."""
    step = step_of(checkpoint.name)
    assert step is not None
    temporary = checkpoint.with_name(temporary_name(step))
    os.rename(checkpoint, temporary)
    shutil.rmtree(temporary)


def digest_of(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


# -- verifying --------------------------------------------------------------------------------------------------------


def attempt(read: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return (the result of `read`, None), or (None, one line that says why it failed)."""
    try:
        return read(), None
    except DamageError as error:
        return None, one_line(str(error))
    except FileNotFoundError as error:
        return None, f"{Path(error.filename or '').name} is missing"
    except OSError as error:
        return None, f"{Path(error.filename or '').name} cannot be read ({error.strerror or error})".strip()
    except Exception as error:  # whatever a crafted file leads to
        return None, one_line(f"it cannot be read ({type(error).__name__}: {error})")


def opened(path: Path) -> io.BufferedReader:
    """Open a regular file for reading."""
    if not stat.S_ISREG(path.lstat().st_mode):  # not even opened: some devices act on it
        raise DamageError(f"{path.name} is not a regular file")
    return open(open_regular(path), "rb")  # it may have been exchanged meanwhile


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint if its digest holds. Its format may be a newer one."""
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise DamageError("it is not a folder")
    with opened(path / MANIFEST) as file:
        data = file.read(_MANIFEST_BYTES + 1)
    if len(data) > _MANIFEST_BYTES:
        raise DamageError(f"its {MANIFEST} has more than {_MANIFEST_BYTES} bytes")
    try:
        manifest = json.loads(data)
        require_shallow(manifest, _MANIFEST_DEPTH, "it")
    except (ValueError, RecursionError) as error:
        raise DamageError(f"its {MANIFEST} cannot be read ({error})") from None
    if not isinstance(manifest, dict):
        raise DamageError(f"its {MANIFEST} has an unknown structure")
    if manifest.pop("sha256", None) != digest_of(manifest):
        raise DamageError(f"its {MANIFEST} has changed since it was written")
    if not _is_count(manifest.get("format")) or manifest["format"] < 1:
        raise DamageError(f"its {MANIFEST} has no format")
    return manifest


def require_entries(path: Path, manifest: dict[str, Any]) -> None:
    """Raise DamageError unless the entries have the types that they are used with, and the folder has the files."""
    problems = [name for name, is_valid in _ENTRIES.items() if not is_valid(manifest.get(name))]
    if problems:
        raise DamageError(f"its {MANIFEST} has a wrong entry {problems[0]!r}")
    if not step_of(path.name) == manifest["step"] == manifest["progress"]["step"]:
        raise DamageError(f"its {MANIFEST} is of step {manifest['step']}")
    missing = {MANIFEST, *manifest["files"]}
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name not in missing:
                raise DamageError(f"{entry.name!r} is not in its {MANIFEST}")
            if not entry.is_file(follow_symlinks=False):
                raise DamageError(f"{entry.name} is not a regular file")
            missing.remove(entry.name)
    if missing:
        raise DamageError(f"{min(missing)} is missing")


def own_manifest(path: Path) -> dict[str, Any] | None:
    """Return the manifest of a folder with exactly the files of a checkpoint of ours, unread; None for any other."""

    def read() -> dict[str, Any]:
        manifest = read_manifest(path)
        require_entries(path, manifest)
        return manifest

    return attempt(read)[0]


def read_metadata(path: Path, manifest: dict[str, Any]) -> bytes:
    """Return the contents of the index, which have the size and hash of the manifest."""
    expected = manifest["files"][METADATA]
    if expected["size"] > _METADATA_BYTES:
        raise DamageError(f"{METADATA} has more than {_METADATA_BYTES} bytes")
    with opened(path / METADATA) as file:
        data = file.read(_METADATA_BYTES + 1)
    _require_same(METADATA, {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}, expected)
    return data


def require_file(path: Path, expected: dict[str, Any]) -> None:
    """Raise DamageError unless the file has this size and hash."""
    with opened(path) as file:
        _require_same(path.name, {"size": os.fstat(file.fileno()).st_size}, expected)
        _require_same(path.name, {"sha256": hashlib.file_digest(file, "sha256").hexdigest()}, expected)


def _require_same(name: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    if found.get("size", expected["size"]) != expected["size"]:
        raise DamageError(f"{name} has {found['size']} bytes instead of {expected['size']}")
    if found.get("sha256", expected["sha256"]) != expected["sha256"]:
        raise DamageError(f"{name} has changed since it was written")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _is_files(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and METADATA in value
        and MANIFEST not in value
        and all(_PLAIN_NAME.fullmatch(name) and name not in (".", "..") for name in value)
        and all(isinstance(entry, dict) and _is_count(entry.get("size")) for entry in value.values())
        and all(isinstance(entry.get("sha256"), str) for entry in value.values())
    )


def _is_progress(value: Any) -> bool:
    counts = ("step", "skipped", "skipped_in_a_row", "good_steps")
    if not isinstance(value, dict) or not all(_is_count(value.get(name)) for name in counts):
        return False
    scale = value.get("loss_scale")
    return isinstance(scale, int | float) and math.isfinite(scale) and scale > 0


def _is_settings(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("model"), dict) and isinstance(value.get("data"), str)


_ENTRIES: dict[str, Callable[[Any], bool]] = {
    "files": _is_files,
    "step": _is_count,
    "progress": _is_progress,
    "settings": _is_settings,
    "data": lambda value: isinstance(value, str),
    "rng": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
}
"""Entries of a manifest that are used after it was read."""
