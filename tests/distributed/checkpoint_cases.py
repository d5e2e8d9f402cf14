"""A tiny checkpoint, what a forger or a failing disk makes of it, and what may fail while it is saved."""

import contextlib
import errno
import hashlib
import io
import itertools
import json
import os
import pickle
import random
import shutil
import sys
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from cs336_systems.config import UserError
from cs336_systems.train import checkpoint_files
from cs336_systems.train.checkpoint import DamagedCheckpointError, Store, rng_state
from cs336_systems.train.checkpoint_files import HashedFiles, digest_of

SHARD = "__0_0.distcp"


def tiny_state(step: int) -> dict[str, Tensor]:
    """Return tensors of several shapes and dtypes, with other values at every step; the same on all ranks."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model/weight": torch.randn(4, 3, generator=generator),
        "model/turned": torch.randn(3, 5, generator=generator).t(),
        "buffer/bf16": torch.randn(7, generator=generator).to(torch.bfloat16),
        "optimizer/weight/exp_avg": torch.randn(4, 3, generator=generator),
        "optimizer/weight/exp_avg_sq": torch.randn(4, 3, generator=generator),
        "optimizer/weight/step": torch.tensor(float(step)),
    }


def tiny_manifest(step: int) -> dict[str, Any]:
    progress = {"step": step, "skipped": 0, "skipped_in_a_row": 0, "loss_scale": 1.0, "good_steps": step}
    settings = {"data": "text.txt", "model": {"d_model": 4}}
    return {"step": step, "progress": progress, "settings": settings, "data": "0123456789abcdef", "rng": ["rng/0/cpu"]}


def save(store: Store | Path, step: int) -> Path | None:
    torch.manual_seed(step)
    store = store if isinstance(store, Store) else Store(store)
    return store.save({**tiny_state(step), **rng_state()}, tiny_manifest(step))


def loaded_step(store: Store | Path) -> int:
    """Load as a run does: the newest checkpoint that can be loaded. Return its step, with 0 for none, or -1 if a value
    differs from what was saved."""
    store = store if isinstance(store, Store) else Store(store)
    while (found := store.newest()) is not None:
        own = {name: torch.zeros_like(value) for name, value in rng_state().items()}
        state = {**{name: torch.zeros_like(value) for name, value in tiny_state(0).items()}, **own}
        try:
            store.load(found, state)
        except DamagedCheckpointError:
            continue
        step = found.manifest["step"]
        torch.manual_seed(step)
        expected = {**tiny_state(step), **rng_state()}
        return step if all(torch.equal(value, expected[name]) for name, value in state.items()) else -1
    return 0


# -- forgers ----------------------------------------------------------------------------------------------------------


def rehash(path: Path, **changes: Any) -> None:
    """Make the manifest match the files, as someone does who wants a change to go unnoticed."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest = {**manifest, **changes}
    del manifest["sha256"]
    for name, entry in manifest["files"].items():
        with contextlib.suppress(OSError):
            data = (path / name).read_bytes()
            entry |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "manifest.json").write_text(json.dumps({**manifest, "sha256": digest_of(manifest)}))


class Bomb:
    """Leaves a file when it is unpickled."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def change_metadata(path: Path, change: Callable[[Any], Any]) -> None:
    """Replace the index by what `change` returns, or by what it has made of it in place."""
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    file.write_bytes(pickle.dumps(change(metadata) or metadata))
    rehash(path)


def change_place(path: Path, **changes: Any) -> None:
    def change(metadata: Any) -> None:
        first = next(iter(metadata.storage_data.values()))
        for name, value in changes.items():
            setattr(first, name, value)

    change_metadata(path, change)


def share_a_place(path: Path) -> None:
    """Have two tensors of one shape read the same bytes."""

    def change(metadata: Any) -> None:
        first, second = (key for key in metadata.storage_data if "exp_avg" in key.fqn)
        metadata.storage_data[second] = metadata.storage_data[first]

    change_metadata(path, change)


def change_tensor(path: Path, name: str, **changes: Any) -> None:
    def change(metadata: Any) -> None:
        for key, value in changes.items():
            setattr(metadata.state_dict_metadata[name], key, value)

    change_metadata(path, change)


def bytes_entry(path: Path, canary: Path) -> None:
    """Store a bomb where torch would call torch.load(weights_only=False)."""
    buffer = io.BytesIO()
    torch.save(Bomb(canary), buffer)
    shard = path / SHARD
    begin = shard.stat().st_size
    shard.write_bytes(shard.read_bytes() + buffer.getvalue())

    def change(metadata: Any) -> None:
        metadata.state_dict_metadata["model/weight"] = BytesStorageMetadata()
        (key,) = (key for key in metadata.storage_data if key.fqn == "model/weight")
        place = metadata.storage_data[key]
        place.offset, place.length = begin, len(buffer.getvalue())

    change_metadata(path, change)


def bomb_in_a_shard(path: Path, canary: Path) -> None:
    """Replace the only file of tensors by a bomb, and point all tensors to it."""
    buffer = io.BytesIO()
    torch.save(Bomb(canary), buffer)
    (path / SHARD).write_bytes(buffer.getvalue())

    def change(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            place.offset, place.length = 0, len(buffer.getvalue())

    change_metadata(path, change)


def moved(path: Path, name: str, link: bool) -> None:
    """Move a file out of the folder, and leave a link to it or nothing."""
    target = path.parents[1] / f"outside-{name}"
    os.replace(path / name, target)
    if link:
        (path / name).symlink_to(target)


def replaced(path: Path, name: str, make: Callable[[Path], object]) -> None:
    (path / name).unlink()
    make(path / name)


def renamed_in_manifest(path: Path, new: str) -> None:
    """Have the manifest name a file by another path that leads to it."""
    manifest = json.loads((path / "manifest.json").read_text())
    files = manifest["files"]
    rehash(path, files={**{name: entry for name, entry in files.items() if name != SHARD}, new: files[SHARD]})


def manifest_text(path: Path, text: str) -> None:
    (path / "manifest.json").write_text(text)


def entry_of(name: str, value: Any) -> Callable[[Path, Path], None]:
    return lambda path, canary: rehash(path, **{name: value})


def zip_bomb(path: Path) -> None:
    """Point a tensor to an archive whose contents are far larger than the file."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 2**24)
        archive.writestr("archive/data/0", b"\0" * 2**24)
        archive.writestr("archive/byteorder", sys.byteorder)
    shard = path / SHARD
    begin = shard.stat().st_size
    shard.write_bytes(shard.read_bytes() + buffer.getvalue())
    change_place(path, offset=begin, length=len(buffer.getvalue()))


PROGRESS = tiny_manifest(2)["progress"]

FORGERIES: dict[str, Callable[[Path, Path], object]] = {
    "an index that calls os.system": lambda path, canary: change_metadata(path, lambda _: Bomb(canary)),
    "os.system in the planner's data": lambda path, canary: change_metadata(
        path, lambda found: setattr(found, "planner_data", Bomb(canary))
    ),
    "os.system as a name of a tensor": lambda path, canary: change_metadata(
        path, lambda found: found.storage_data.update({Bomb(canary): 1})
    ),
    "an entry of bytes": bytes_entry,
    "a shard that calls os.system": bomb_in_a_shard,
    "a compressed tensor": lambda path, _: zip_bomb(path),
    "a tensor of 2 ** 60 bytes": lambda path, _: change_tensor(path, "model/weight", size=torch.Size([2**30, 2**28])),
    "a tensor of another shape": lambda path, _: change_tensor(path, "model/weight", size=torch.Size([3, 4])),
    "two names exchanged": lambda path, _: change_metadata(
        path, lambda found: found.state_dict_metadata.update({"model/weight": found.state_dict_metadata["buffer/bf16"]})
    ),
    "a place outside of the file": lambda path, _: change_place(path, offset=10**9),
    "a negative place": lambda path, _: change_place(path, offset=-1),
    "two tensors at one place": lambda path, _: share_a_place(path),
    "bytes that belong to no tensor": lambda path, _: (
        (path / SHARD).write_bytes((path / SHARD).read_bytes() + b"more"),
        rehash(path),
    ),
    "an overlap": lambda path, _: change_place(path, length=10**4),
    "a place that is a text": lambda path, _: change_place(path, offset="0"),
    "a file in another folder": lambda path, _: change_place(path, relative_path="../step-00000001/__0_0.distcp"),
    "an absolute path": lambda path, _: change_place(path, relative_path="/etc/passwd"),
    "a transformation": lambda path, _: change_place(path, transform_descriptors=["stream.zstd"]),
    "an index that is no pickle": lambda path, _: ((path / ".metadata").write_bytes(b"\x80\x04garbage"), rehash(path)),
    "a memo of 32 GiB": lambda path, _: (
        (path / ".metadata").write_bytes(b"\x80\x04Nr\xff\xff\xff\xff."),
        rehash(path),
    ),
    "a file left out of the manifest": lambda path, _: rehash(
        path, files={SHARD: json.loads((path / "manifest.json").read_text())["files"][SHARD]}
    ),
    "no files in the manifest": entry_of("files", {}),
    "an additional file": lambda path, _: (path / "notes.txt").write_text("mine"),
    "an additional folder": lambda path, _: (path / "sub").mkdir(),
    "a missing file": lambda path, _: moved(path, SHARD, link=False),
    "a linked shard": lambda path, _: moved(path, SHARD, link=True),
    "a linked manifest": lambda path, _: moved(path, "manifest.json", link=True),
    "a linked folder": lambda path, _: (path.rename(path.with_name("real")), path.symlink_to("real")),
    "a FIFO as manifest": lambda path, _: replaced(path, "manifest.json", os.mkfifo),
    "a FIFO as shard": lambda path, _: replaced(path, SHARD, os.mkfifo),
    "/dev/zero as manifest": lambda path, _: replaced(path, "manifest.json", lambda p: p.symlink_to("/dev/zero")),
    "/dev/zero as index": lambda path, _: replaced(path, ".metadata", lambda p: p.symlink_to("/dev/zero")),
    "../ in a name": lambda path, _: renamed_in_manifest(path, f"../{path.name}/{SHARD}"),
    "an absolute name": lambda path, _: renamed_in_manifest(path, str(path / SHARD)),
    "./ in a name": lambda path, _: renamed_in_manifest(path, f"./{SHARD}"),
    "nesting of 10 ** 5": lambda path, _: manifest_text(path, "[" * 10**5 + "]" * 10**5),
    "nesting of 500": lambda path, _: rehash(path, settings=json.loads('{"a":' * 500 + "1" + "}" * 500)),
    "a manifest of 8 MiB": lambda path, _: rehash(path, more="x" * 2**23),
    "a manifest that is a list": lambda path, _: manifest_text(path, "[]"),
    "a manifest that is empty": lambda path, _: manifest_text(path, ""),
    "a number of 5,000 digits": lambda path, _: manifest_text(path, "1" * 5000),
    "another step than the folder": entry_of("step", 7),
    "another step in the progress": entry_of("progress", {**PROGRESS, "step": 7}),
    "a step that is a text": entry_of("step", "2"),
    "a step that is true": entry_of("step", True),
    "a progress that is a list": entry_of("progress", []),
    "a count that is negative": entry_of("progress", {**PROGRESS, "skipped": -1}),
    "a loss scale that is NaN": entry_of("progress", {**PROGRESS, "loss_scale": float("nan")}),
    "a loss scale that is huge": entry_of("progress", {**PROGRESS, "loss_scale": 10**400}),
    "settings that are a text": entry_of("settings", "x"),
    "a model that is a number": entry_of("settings", {"model": 1, "data": "x"}),
    "a random state that is a number": entry_of("rng", 5),
    "names of random states that are lists": entry_of("rng", [[]]),
    "data that is a dictionary": entry_of("data", {}),
    "no format": entry_of("format", None),
    "format 0": entry_of("format", 0),
    "a format of another type": entry_of("format", [2]),
    "a flipped bit in the format": lambda path, _: manifest_text(
        path, (path / "manifest.json").read_text().replace('"format": 1', '"format": 3')
    ),
}
"""What someone makes of the checkpoint at a path; the other path is a file that its code would leave."""


# -- random changes ---------------------------------------------------------------------------------------------------

EXECUTABLE = b"cos\nsystem\n(S'touch CANARY'\ntR0"
"""A part of a pickle that runs a command, and leaves nothing on the stack."""


def mutated(data: bytes, chance: random.Random, canary: Path) -> bytes:
    """Return `data` with a random change."""
    size = len(data)
    begin, other = sorted(chance.randrange(size) for _ in range(2))
    width = min(chance.choice([1, 2, 8, 64]), size - other)
    kind = chance.randrange(8)
    if kind == 0:
        return data[:begin] + bytes([data[begin] ^ 1 << chance.randrange(8)]) + data[begin + 1 :]
    if kind == 1:
        return data[:begin] + chance.randbytes(width) + data[begin + width :]
    if kind == 2:
        return data[:begin]
    if kind == 3:
        return data[:begin] + data[begin + width :]
    if kind == 4:
        return data[:begin] + chance.randbytes(width) + data[begin:]
    if kind == 5:
        width = min(width, other - begin)
        swapped = data[other : other + width] + data[begin + width : other] + data[begin : begin + width]
        return data[:begin] + swapped + data[other + width :]
    if kind == 6:
        return data[:begin] + data[other : other + width] + data[begin:]
    return data[:begin] + EXECUTABLE.replace(b"CANARY", str(canary).encode()) + data[begin:]


def survive_mutations(folder: Path, count: int, seed: int = 0) -> Counter[str]:
    """Change a file of a checkpoint at random, `count` times, and load it; count what came of it.

    Half of the changes are hidden by a manifest that matches. Allowed are "noticed" and "loaded right".
    """
    chance, outcomes = random.Random(seed), Counter[str]()
    canary = folder / "canary"
    path = save(folder / "checkpoints", 2)
    assert path is not None
    intact = {file.name: file.read_bytes() for file in path.iterdir()}
    with warnings.catch_warnings(), no_unpickling():
        warnings.simplefilter("ignore")
        for number in range(count):
            name = chance.choice(sorted(intact))
            (path / name).write_bytes(mutated(intact[name], chance, canary))
            if number % 2:
                with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
                    rehash(path)
            try:
                outcomes[{0: "noticed", 2: "loaded right"}.get(loaded_step(path.parent), "loaded wrong")] += 1
            except UserError as error:  # a format that is newer, with a digest that holds
                outcomes["noticed" if "newer cs336" in str(error) else f"refused: {error}"] += 1
            except BaseException as error:  # torch's CheckpointException is no Exception
                outcomes[f"crash: {type(error).__name__}: {error}"] += 1
            for file, data in intact.items():
                (path / file).write_bytes(data)
    outcomes["executed"] += canary.exists()
    assert loaded_step(path.parent) == 2
    return +outcomes


@contextlib.contextmanager
def no_unpickling() -> Iterator[None]:
    """Raise if a file is unpickled, by pickle or by torch."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a file is unpickled")

    with mock.patch.object(pickle, "load", refuse), mock.patch.object(torch, "load", refuse):
        yield


# -- saves that fail --------------------------------------------------------------------------------------------------


PHASES: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "creating the temporary folder": (Path, "mkdir", lambda path, *_: ".tmp-" in path),
    "writing shards": (HashedFiles, "create_stream", lambda _, path, *__: path.endswith(".distcp")),
    "syncing shards": (os, "fsync", lambda *_: True),
    "writing metadata": (HashedFiles, "create_stream", lambda _, path, *__: ".metadata" in path),
    "renaming metadata": (HashedFiles, "rename", lambda *_: True),
    "looking for the files": (Path, "lstat", lambda path: ".tmp-" in path),
    "hashing": (hashlib, "file_digest", lambda *_: True),
    "writing the manifest": (Path, "open", lambda path, *_: path.endswith("manifest.json")),
    "renaming": (os, "rename", lambda source, target: ".tmp-" in source and ".tmp-" not in target),
    "syncing the folder": (checkpoint_files, "sync_folder", lambda folder: ".tmp-" not in folder),
    "listing old checkpoints": (Path, "iterdir", lambda *_: True),
    "renaming an old checkpoint": (os, "rename", lambda source, target: ".tmp-" in target and ".tmp-" not in source),
    "removing an old checkpoint": (shutil, "rmtree", lambda *_: True),
}
ON_EVERY_RANK = (
    "creating the temporary folder",
    "writing shards",
    "syncing shards",
    "looking for the files",
    "hashing",
)
"""Phases that are not rank 0's alone."""
AFTER_RENAME = (*PHASES,)[-4:]
"""Phases at which the checkpoint is in place."""
ERRORS = {name: getattr(errno, name) for name in ("ENOSPC", "EIO", "EACCES")}
VANISHED = "vanished"
"""The temporary folder is removed by someone else."""


def faults(on: int) -> list[tuple[str, str]]:
    """Return the phases of a save and the errors that they can meet on the rank `on`."""
    phases = PHASES if on == 0 else ON_EVERY_RANK
    without_folder = ("creating the temporary folder", *AFTER_RENAME[:3])
    vanishing = [(phase, VANISHED) for phase in phases if phase not in without_folder]
    return [*itertools.product(phases, ERRORS), *vanishing]


@contextlib.contextmanager
def failing(phase: str, error: str, folder: Path) -> Iterator[None]:
    """Let one call of a phase fail on this rank; raise if there is none."""
    owner, name, where = PHASES[phase]
    real, calls = getattr(owner, name), itertools.count()
    is_placed = False

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_placed
        if where(*map(str, args)) and next(calls) == 0:
            if error != VANISHED:
                is_placed = True
                raise OSError(ERRORS[error], os.strerror(ERRORS[error]), str(folder))
            for path in folder.glob("*.tmp-*"):
                is_placed = True
                Path.replace(path, folder.parent / f"taken-{path.name}")
        return real(*args, **kwargs)

    with mock.patch.object(owner, name, stand_in):
        yield
    if not is_placed:
        raise AssertionError(f"{error} while {phase} did not happen")


def saves_with_faults(folder: Path, on: int, chosen: list[tuple[str, str]]) -> list[str]:
    """Save twice, the second time with each fault on the rank `on`; return what was not as it must be."""
    wrong: list[str] = []
    first = folder / f"first-{on}"
    assert save(first, 1) is not None
    for number, (phase, error) in enumerate(chosen):
        path = folder / f"{on}-{number}" / "checkpoints"
        if dist.get_rank() == 0:
            shutil.copytree(first, path)
        dist.barrier()
        found = _save_with_fault(Store(path, keep=1), phase, error if dist.get_rank() == on else "")
        wrong += [f"{error} while {phase} on rank {on}: {problem}" for problem in found]
    return wrong


def _save_with_fault(store: Store, phase: str, error: str) -> list[str]:
    """`error`: empty on a rank without a fault."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with failing(phase, error, store.folder) if error else contextlib.nullcontext():
                saved = save(store, 2)
        except BaseException as raised:  # torch's CheckpointException is no Exception
            return [f"raised {type(raised).__name__}: {raised}"]
        lines = [str(warning.message) for warning in caught]
        caught.clear()
        step = loaded_step(store)
        wrong = [str(warning.message) for warning in caught]
    if any("\n" in line for line in lines) or (saved is None and dist.get_rank() == 0 and len(lines) != 1):
        wrong.append(f"not one line: {lines}")
    if step != 2 and (step != 1 or saved is not None):
        wrong.append(f"saved {saved}, then loaded step {step}")
    if save(store, 3) is None:
        wrong.append("the next save failed")
    return wrong
