"""Checkpoints that are whole or not there: written beside, hashed, and renamed into place when all of it is on disk.

    checkpoints/
      step-00000040/            renamed from step-00000040.tmp-<nonce> when it is complete
        __0_0.distcp ...        the tensors, written by all ranks (torch.distributed.checkpoint)
        .metadata               where in these files each tensor lies
        manifest.json           size and SHA-256 of every file, the step, the configuration; written last

Tensors are saved under the names they have in the unwrapped model, shards as parts of the whole. So a checkpoint can be
loaded by another number of ranks, and under another wrapper. The newest whose files have the sizes and hashes of its
manifest is the one that counts: torch itself does not notice a flipped byte.
"""

import hashlib
import json
import os
import secrets
import shutil
import threading
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from cs336_systems.config import UserError
from cs336_systems.kernels.fused.packed_adamw import PackedAdamW
from cs336_systems.parallel import ShardedOptimizer

FORMAT = 1
MANIFEST = "manifest.json"
_READ_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Checkpoint:
    """One that is complete and verified."""

    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return self.manifest["step"]


class Store:
    """The checkpoints of one training run. What it does it does on all ranks together."""

    def __init__(self, folder: Path, *, keep: int = 2, keep_every: int = 0, beside: bool = False):
        """`beside`: saves may run beside the training, so their messages need a group of their own."""
        self.folder = folder
        self.keep = keep
        self.keep_every = keep_every
        self._ranks = _Ranks(dist.new_group(backend="gloo") if beside and dist.is_initialized() else None)
        self._thread: threading.Thread | None = None
        self._saved: Path | None = None
        self._damaged: set[Path] = set()
        """Those that `newest` has found so; rank 0's."""

    # -- writing ------------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the folder, and remove what an interrupted save has left."""
        problem = None
        if _rank() == 0:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                probe = self.folder / f".write-{secrets.token_hex(4)}"
                probe.touch()
                probe.unlink()
                for stray in self.folder.glob("step-*.tmp-*"):
                    shutil.rmtree(stray, ignore_errors=True)
            except OSError as error:
                problem = f"cannot write to {str(self.folder)!r}: {error.strerror}; choose another --output"
        agreed(problem)

    def save(self, state: dict[str, Any], manifest: dict[str, Any]) -> Path | None:
        """Save `state`; `manifest` has at least the step. None if it could not be: the older ones are as they were."""
        step = manifest["step"]
        final = self.folder / _name(step)
        if self._ranks.from_first(
            final.exists() and _verified(final)[1] is None
        ):  # the same step was saved before a restart
            return final
        unfinished = self.folder / self._ranks.from_first(f"{_name(step)}.tmp-{secrets.token_hex(4)}")
        problem = self._write(state, unfinished)
        hashes = self._ranks.gathered(_hashes(unfinished, _own_files(unfinished)) if problem is None else {})
        if problem is None and _rank() == 0:
            files = {name: entry for part in hashes for name, entry in part.items()}
            try:
                if final.exists():  # a damaged one of the same step
                    shutil.rmtree(final)
                _publish(unfinished, final, {"format": FORMAT, **manifest, "files": files})
                self._damaged.discard(final)
            except OSError as error:
                problem = str(error)
        if problem := self._ranks.from_first(problem):
            if _rank() == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
                warnings.warn(f"checkpoint of step {step} not saved: {problem}; training goes on", stacklevel=2)
            return None
        self._tidy()
        return final

    def start(self, state: dict[str, Any], manifest: dict[str, Any]) -> None:
        """Save beside what goes on; `state` must not change meanwhile. `finish` says how it went."""
        assert self._thread is None

        def work() -> None:
            self._saved = self.save(state, manifest)

        self._saved = None
        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    @property
    def is_saving(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> Path | None:
        """Wait for what was started: where it is, or None if it could not be saved."""
        assert self._thread is not None
        self._thread.join()
        self._thread = None
        return self._saved

    def _write(self, state: dict[str, Any], folder: Path) -> str | None:
        """Why it failed on some rank, on all ranks alike; None if it did not."""
        problem = None
        try:
            writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
            dcp.save(state, storage_writer=writer, process_group=self._ranks.group, no_dist=not dist.is_initialized())
        except CheckpointException as error:  # what happened on any rank, a full disk among it; not an Exception
            causes = [cause for cause, _ in error.failures.values()]
            problem = " ".join(str(causes[0] if causes else error).split())[:200]
        except Exception as error:
            problem = " ".join(str(error).split())[:200] or type(error).__name__
        return next((found for found in self._ranks.gathered(problem) if found), None)

    def _tidy(self) -> None:
        """Remove what is neither among the last ones nor a multiple of `keep_every`."""
        if _rank() != 0:
            return
        whole = [path for path in sorted(self.folder.glob("step-????????")) if path not in self._damaged]
        for path in whole[: -self.keep]:
            if self.keep_every and _step_of(path) % self.keep_every == 0:
                continue
            try:
                shutil.rmtree(path)
            except OSError as error:
                warnings.warn(f"old checkpoint {str(path)!r} not removed: {error.strerror}", stacklevel=2)

    # -- reading ------------------------------------------------------------------------------------------------------

    def newest(self) -> Checkpoint | None:
        """The newest that is whole; rank 0 looks, and all ranks take what it found."""
        found, newer = None, None
        for path in sorted(self.folder.glob("step-????????"), reverse=True) if _rank() == 0 else ():
            manifest, problem = _verified(path)
            if problem is None:
                found = (str(path), manifest)
                newer = manifest["format"] if manifest["format"] > FORMAT else None
                break
            self._damaged.add(path)
            warnings.warn(f"checkpoint {str(path)!r} is damaged and left out: {problem}", stacklevel=2)
        found, newer = self._ranks.from_first((found, newer))
        if newer:
            raise UserError(f"{found[0]!r} was written by a newer cs336 (format {newer}): upgrade, or change --output")
        return Checkpoint(Path(found[0]), found[1]) if found else None

    def load(self, checkpoint: Checkpoint, state: dict[str, Any]) -> None:
        """Fill the tensors of `state`."""
        dcp.load(state, storage_reader=FileSystemReader(checkpoint.path), no_dist=not dist.is_initialized())


# -- what is saved ----------------------------------------------------------------------------------------------------


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer, *, as_copy: bool = False) -> dict[str, Tensor]:
    """Tensors of the model and of AdamW, by name; those of shards as parts of the whole. They are the ones in use, so
    loading into them is loading into the model; only of weights that are kept in low precision they are fp32 copies,
    which `take_weights` gives back. `as_copy`: copies of all, in the host's memory, which training does not change.
    """
    inner = getattr(model, "module", model)
    names = {p: name for name, p in inner.named_parameters()}
    shards = [p for p in names if hasattr(p, "is_shard")]
    device = "cpu" if as_copy else shards[0].device.type if shards else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),)) if shards else None
    weights = optimizer.masters("cpu") if isinstance(optimizer, PackedAdamW) else {p: p.detach() for p in names}
    state: dict[str, Tensor] = {f"model/{name}": _as_saved(weights[p], p, mesh, as_copy) for p, name in names.items()}
    for name, buffer in inner.named_buffers():
        if _is_persistent(inner, name):
            state[f"buffer/{name}"] = _as_saved(buffer, buffer, mesh, as_copy)
    owned = optimizer.owned if isinstance(optimizer, ShardedOptimizer) else names
    for p in owned:
        if p.requires_grad:
            moments = _adamw_state(optimizer, p)
            state |= {f"optimizer/{names[p]}/{name}": _as_saved(t, p, mesh, as_copy) for name, t in moments.items()}
    return state


def take_weights(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Tensor]) -> None:
    """After `state`, of `training_state`, was loaded."""
    if isinstance(optimizer, PackedAdamW):
        optimizer.load_masters({p: state[f"model/{name}"] for name, p in model.named_parameters()})


def rng_state() -> dict[str, Tensor]:
    """Of this rank."""
    found = {f"rng/{_rank()}/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found[f"rng/{_rank()}/cuda"] = torch.cuda.get_rng_state()
    return found


def set_rng_state(state: dict[str, Tensor]) -> None:
    for name, value in state.items():
        (torch.cuda.set_rng_state if name.endswith("cuda") else torch.set_rng_state)(value)


def _as_saved(tensor: Tensor, p: Tensor, mesh: DeviceMesh | None, as_copy: bool) -> Tensor:
    """A tensor shaped like a shard as this rank's part of the whole; another as it is."""
    if as_copy:
        tensor = tensor.detach().to("cpu", copy=True)
    if not hasattr(p, "is_shard") or tensor.shape != p.shape:
        return tensor
    shape = p.full_shape  # type: ignore[attr-defined]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def _adamw_state(optimizer: torch.optim.Optimizer, p: Tensor) -> dict[str, Tensor]:
    """As AdamW makes it in its first step: a checkpoint is loaded before there was one."""
    state = optimizer.state[p]
    if not state:
        fused = optimizer.param_groups[0].get("fused")
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if fused else "cpu")
        state["exp_avg"] = torch.zeros_like(p)
        state["exp_avg_sq"] = torch.zeros_like(p)
    return state


def _is_persistent(module: nn.Module, name: str) -> bool:
    *path, last = name.split(".")
    return last not in module.get_submodule(".".join(path))._non_persistent_buffers_set


# -- files ------------------------------------------------------------------------------------------------------------


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _own_files(folder: Path) -> list[Path]:
    mine = sorted(folder.glob(f"__{_rank()}_*.distcp"))
    return [*mine, folder / ".metadata"] if _rank() == 0 else mine


def _hashes(folder: Path, files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    return {file.name: {"size": file.stat().st_size, "sha256": _sha256(file)} for file in files}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_READ_AT_ONCE):
            digest.update(piece)
    return digest.hexdigest()


def _publish(unfinished: Path, final: Path, manifest: dict[str, Any]) -> None:
    """The manifest last, then the name; on disk in that order."""
    with (unfinished / MANIFEST).open("w") as file:
        json.dump({**manifest, "sha256": _digest(manifest)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(unfinished)
    os.rename(unfinished, final)
    _sync_folder(final.parent)


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _verified(path: Path) -> tuple[dict[str, Any], str | None]:
    """The manifest, and what is wrong with the files it names, or None."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["format"] > FORMAT:  # what else it holds is not known here
            return manifest, None
        digest, files = manifest.pop("sha256"), manifest["files"]
        if digest != _digest(manifest):
            return {}, f"its {MANIFEST} has changed since it was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, f"its {MANIFEST} cannot be read ({error})"
    for name, entry in files.items():
        file = path / name
        if not file.exists():
            return manifest, f"{name} is missing"
        if file.stat().st_size != entry["size"]:
            return manifest, f"{name} has {file.stat().st_size} bytes instead of {entry['size']}"
        if _sha256(file) != entry["sha256"]:
            return manifest, f"{name} has changed since it was written"
    return manifest, None


# -- ranks ------------------------------------------------------------------------------------------------------------


def agreed(problem: str | None) -> None:
    """UserError on all ranks, if rank 0 has a problem."""
    if problem := _Ranks().from_first(problem):
        raise UserError(problem)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@dataclass(frozen=True)
class _Ranks:
    """Those of a group (None: all), or this process alone."""

    group: dist.ProcessGroup | None = None

    def from_first(self, value: Any) -> Any:
        if not dist.is_initialized():
            return value
        box = [value]
        dist.broadcast_object_list(box, 0, group=self.group)
        return box[0]

    def gathered(self, value: Any) -> list[Any]:
        if not dist.is_initialized():
            return [value]
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, value, group=self.group)
        return every
