"""Atomic checkpoints: written under a temporary name, hashed, and renamed when everything is on disk.

    checkpoints/
      step-00000040/            renamed from step-00000040.tmp-<nonce> when it is complete
        __0_0.distcp ...        the tensors, written by all ranks (torch.distributed.checkpoint)
        .metadata               the file and offset of each tensor
        manifest.json           size and SHA-256 of every file, the step, the configuration; written last

Tensors are saved under their names in the unwrapped model, shards as parts of the whole tensor: a checkpoint can be
loaded by another number of ranks and under another wrapper. The newest checkpoint whose files have the sizes and
hashes of its manifest is loaded: torch itself does not detect a flipped byte.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from cs336_systems.config import UserError
from cs336_systems.parallel.collectives import persistent_buffers
from cs336_systems.record import MIB
from cs336_systems.step.updates import adapt

FORMAT = 1
MANIFEST = "manifest.json"


class Checkpoint(NamedTuple):
    """A checkpoint that is complete and verified."""

    path: Path
    manifest: dict[str, Any]


class Store:
    """The checkpoints of one training run. Every method is called by all ranks together."""

    def __init__(
        self, folder: Path, *, keep: int = 2, keep_every: int = 0, keep_best: int = 0, timeout: float | None = None
    ):
        """`timeout`: seconds for each collective of a save, which may run in a thread; it gets a process group of its
        own then, because its collectives must not mix with those of the training."""
        self.folder = folder
        self.keep = keep
        self.keep_every = keep_every
        self.keep_best = keep_best
        self.timeout = timeout
        self.progress_at = 0.0
        """Time of the last collective of a save: between two of them a rank works by itself."""
        self.is_given_up = False
        """True: the save that is running has exceeded its time limit and must not be published."""
        self._save_group: dist.ProcessGroup | None = None
        self.renew_group()
        self._damaged: set[Path] = set()
        """Checkpoints that `newest` has found damaged, on rank 0."""

    def renew_group(self) -> None:
        """Create the process group of saves. One in which a collective has failed cannot be used again."""
        if self.timeout is None:
            return
        if self._save_group is not None:
            dist.destroy_process_group(self._save_group)
        self._save_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))
        self.is_given_up = False

    @property
    def _group(self) -> dist.ProcessGroup | None:
        """The group of the next collective. Using it is progress, and the end of a save that was given up."""
        if self.is_given_up:
            raise TimeoutError("the save was given up")
        self.progress_at = time.monotonic()
        return self._save_group

    # -- writing ------------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Create the folder, and remove what an interrupted save has left."""
        problem = None
        if dist.get_rank() == 0:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                probe = self.folder / f".write-{secrets.token_hex(4)}"
                probe.touch()
                probe.unlink()
                for stray in self.folder.glob("step-*.tmp-*"):
                    shutil.rmtree(stray, ignore_errors=True)
            except OSError as error:
                problem = f"cannot write to {str(self.folder)!r}: {error.strerror}; choose another --output"
        raise_together(problem)

    def save(self, state: dict[str, Any], manifest: dict[str, Any]) -> Path | None:
        """Save `state`; `manifest` has at least the step. Return None if it failed: older checkpoints are untouched."""
        step = manifest["step"]
        final = self.folder / _name(step)
        if from_first(final.exists() and _verify(final).problem is None, self._group):  # saved before a restart
            return final
        unfinished = self.folder / from_first(f"{_name(step)}.tmp-{secrets.token_hex(4)}", self._group)
        problem = self._write(state, unfinished)
        hashes = gather(_own_hashes(unfinished) if problem is None else {}, self._group)
        if problem is None and dist.get_rank() == 0:
            files = {name: entry for part in hashes for name, entry in part.items()}
            try:
                if final.exists():  # a damaged one of the same step
                    shutil.rmtree(final)
                _publish(unfinished, final, {"format": FORMAT, **manifest, "files": files})
                self._damaged.discard(final)
            except OSError as error:
                problem = str(error)
        if problem := from_first(problem, self._group):
            if dist.get_rank() == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
                warnings.warn(f"checkpoint of step {step} not saved: {problem}; training continues", stacklevel=2)
            return None
        self._tidy(final)
        return final

    def discard(self, step: int) -> None:
        """Remove what an unfinished save of `step` has left; only rank 0 does."""
        if dist.get_rank() == 0:
            for stray in self.folder.glob(f"{_name(step)}.tmp-*"):
                shutil.rmtree(stray, ignore_errors=True)

    def _write(self, state: dict[str, Any], folder: Path) -> str | None:
        """Write the tensors; return, on all ranks, why it failed on any of them, or None."""
        problem = None
        try:
            writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
            dcp.save(state, storage_writer=writer, process_group=self._group)
        except CheckpointException as error:  # a failure on any rank, such as a full disk; it is no Exception
            causes = [cause for cause, _ in error.failures.values()]
            problem = _reason(causes[0] if causes else error, state, self.folder)
        except Exception as error:
            problem = _reason(error, state, self.folder)
        return next((found for found in gather(problem, self._group) if found), None)

    def _tidy(self, saved: Path) -> None:
        """Remove checkpoints that are neither the one just saved, nor among the latest or the best, nor of a multiple
        of `keep_every`."""
        if dist.get_rank() != 0:
            return
        intact = [path for path in sorted(self.folder.glob("step-????????")) if path not in self._damaged]
        losses = (
            {path: loss for path in intact if (loss := _validation_loss(path)) is not None} if self.keep_best else {}
        )
        best = sorted(losses, key=lambda path: (losses[path], -_step(path)))[: self.keep_best]
        kept = {saved, *intact[-self.keep :], *best}
        for path in intact:
            if path in kept or (self.keep_every and _step(path) % self.keep_every == 0):
                continue
            try:
                shutil.rmtree(path)
            except OSError as error:
                warnings.warn(f"old checkpoint {str(path)!r} not removed: {error.strerror}", stacklevel=2)

    def set_aside(self, step: int) -> Path | None:
        """Move checkpoints later than `step` out of the folder; return where they are, None if there are none."""
        target, problem = None, None
        if dist.get_rank() == 0:
            later = [path for path in sorted(self.folder.glob("step-????????")) if _step(path) > step]
            number = 1
            while (folder := self.folder.with_name(f"superseded-{number}")).exists():
                number += 1
            try:
                for path in reversed(later):
                    folder.mkdir(exist_ok=True)
                    target = folder
                    os.rename(path, folder / path.name)
            except OSError as error:
                problem = f"cannot move the checkpoints after step {step} to {str(folder)!r}: {error.strerror}"
        raise_together(problem)
        return from_first(target)

    # -- reading ------------------------------------------------------------------------------------------------------

    def newest(self) -> Checkpoint | None:
        """Return the newest intact checkpoint, which rank 0 looks for; None if there is none."""
        found, newer = None, None
        for path in sorted(self.folder.glob("step-????????"), reverse=True) if dist.get_rank() == 0 else ():
            manifest, problem = _verify(path)
            if problem is None:
                found = (str(path), manifest)
                newer = manifest["format"] if manifest["format"] > FORMAT else None
                break
            self._damaged.add(path)
            warnings.warn(f"checkpoint {str(path)!r} is damaged and ignored: {problem}", stacklevel=2)
        found, newer = from_first((found, newer), self._group)
        if newer:
            raise UserError(f"{found[0]!r} was written by a newer cs336 (format {newer}): upgrade, or change --output")
        return Checkpoint(Path(found[0]), found[1]) if found else None

    def at(self, step: int) -> Checkpoint:
        """Return the checkpoint of a step; raise UserError if it is missing or damaged."""
        path, problem = self.folder / _name(step), None
        manifest: dict[str, Any] = {}
        if dist.get_rank() == 0 and not path.is_dir():
            there = ", ".join(str(_step(other)) for other in sorted(self.folder.glob("step-????????")))
            problem = f"no checkpoint of step {step} in {str(self.folder)!r}; there are: {there or 'none'}"
        elif dist.get_rank() == 0:
            manifest, damage = _verify(path)
            newer = damage is None and manifest["format"] > FORMAT
            reason = (
                f"was written by a newer cs336 (format {manifest.get('format')})" if newer else f"is damaged: {damage}"
            )
            problem = f"checkpoint {str(path)!r} {reason}" if newer or damage else None
        raise_together(problem)
        return Checkpoint(path, from_first(manifest))

    def load(self, checkpoint: Checkpoint, state: dict[str, Any]) -> None:
        """Load into the tensors of `state`."""
        dcp.load(state, storage_reader=FileSystemReader(checkpoint.path))


# -- tensors ----------------------------------------------------------------------------------------------------------


def training_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, copies: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the tensors of the model and of AdamW by name, shards as parts of the whole.

    They are the tensors in use, so that loading into them loads into the model; except weights that the optimizer keeps
    as fp32 masters, which are copies that `load_masters` puts back. With `copies` all are copies in host memory, in the
    tensors that an earlier call has left there: allocating them takes longer than copying (0.1 to 0.3 s for 300 MB
    instead of 0.02). Copies from a GPU are complete when it is synchronized.
    """
    inner = getattr(model, "module", model)
    names = {p: name for name, p in inner.named_parameters()}
    shards = [p for p in names if hasattr(p, "is_shard")]
    device = "cpu" if copies is not None else shards[0].device.type if shards else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),)) if shards else None
    adapted = adapt(optimizer)
    masters = adapted.masters("cpu")

    def saved(name: str, tensor: Tensor, p: Tensor) -> Tensor:
        return _as_whole(tensor if copies is None else _copied(name, tensor, copies), p, mesh)

    state = {f"model/{name}": saved(f"model/{name}", masters.get(p, p.detach()), p) for p, name in names.items()}
    for name, buffer in persistent_buffers(inner).items():
        state[f"buffer/{name}"] = saved(f"buffer/{name}", buffer, buffer)
    for p in adapted.owned:
        if p.requires_grad:
            moments = {f"optimizer/{names[p]}/{name}": t for name, t in _adamw_state(optimizer, p).items()}
            state |= {name: saved(name, t, p) for name, t in moments.items()}
    return state


def load_masters(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Tensor]) -> None:
    """Give the optimizer its master weights after `state`, of `training_state`, was loaded."""
    inner = getattr(model, "module", model)
    adapt(optimizer).load_masters({p: state[f"model/{name}"] for name, p in inner.named_parameters()})


def rng_state() -> dict[str, Tensor]:
    """Return the random state of this rank."""
    found = {f"rng/{dist.get_rank()}/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found[f"rng/{dist.get_rank()}/cuda"] = torch.cuda.get_rng_state()
    return found


def set_rng_state(state: dict[str, Tensor]) -> None:
    for name, value in state.items():
        (torch.cuda.set_rng_state if name.endswith("cuda") else torch.set_rng_state)(value)


def _copied(name: str, tensor: Tensor, copies: dict[str, Tensor]) -> Tensor:
    """Copy a tensor into the one that `copies` has for it. Page-locked memory is what a GPU copies to fastest."""
    if name not in copies:
        copies[name] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return copies[name].copy_(tensor.detach(), non_blocking=True)


def _as_whole(tensor: Tensor, p: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Return a tensor shaped like the shard `p` as this rank's part of the whole, any other as it is."""
    if not hasattr(p, "is_shard") or tensor.shape != p.shape:
        return tensor
    shape = p.full_shape  # type: ignore[attr-defined]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def _adamw_state(optimizer: torch.optim.Optimizer, p: Tensor) -> dict[str, Tensor]:
    """Return the state of `p`, created as in AdamW's first step: a checkpoint is loaded before it."""
    state = optimizer.state[p]
    if not state:
        fused = optimizer.param_groups[0].get("fused")
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if fused else "cpu")
        state["exp_avg"] = torch.zeros_like(p)
        state["exp_avg_sq"] = torch.zeros_like(p)
    return state


# -- files ------------------------------------------------------------------------------------------------------------


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def located(path: Path) -> tuple[Path, int | None]:
    """Return the folder of checkpoints and the step that a path names: a run, that folder, or a checkpoint in it."""
    if re.fullmatch(r"step-\d{8}", path.name):
        return path.parent, _step(path)
    return (path / "checkpoints" if (path / "checkpoints").is_dir() else path), None


def _validation_loss(path: Path) -> float | None:
    """Return the validation loss in the manifest of a checkpoint, None if there is none."""
    try:
        loss = json.loads((path / MANIFEST).read_text()).get("validation_loss")
    except (OSError, ValueError, AttributeError):
        return None
    return loss if isinstance(loss, float) and math.isfinite(loss) else None


def _reason(error: BaseException, state: dict[str, Any], folder: Path) -> str:
    """Return why a save failed. On a full disk torch's own message is about positions in a file."""
    needed = sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(folder).free
        if free < needed:
            sizes = f"{free / MIB:.1f} MiB are free in {str(folder)!r}, a checkpoint takes {needed / MIB:.1f}"
            return f"{os.strerror(errno.ENOSPC)} ({sizes})"
    return " ".join(str(error).split())[:200] or type(error).__name__


def _own_hashes(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the size and hash of the files that this rank has written."""
    files = sorted(folder.glob(f"__{dist.get_rank()}_*.distcp"))
    files += [folder / ".metadata"] if dist.get_rank() == 0 else []
    return {file.name: {"size": file.stat().st_size, "sha256": _sha256(file)} for file in files}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _publish(unfinished: Path, final: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest last, then rename the folder, each synced to disk before the next."""
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


class _Verdict(NamedTuple):
    manifest: dict[str, Any]
    problem: str | None = None


def _verify(path: Path) -> _Verdict:
    """Check the manifest, and the size and hash of every file that it names."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["format"] > FORMAT:  # its other entries are unknown
            return _Verdict(manifest)
        digest, files = manifest.pop("sha256"), manifest["files"]
        if digest != _digest(manifest):
            return _Verdict({}, f"its {MANIFEST} has changed since it was written")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return _Verdict({}, f"its {MANIFEST} cannot be read ({error})")
    for name, entry in files.items():
        file = path / name
        if not file.exists():
            return _Verdict(manifest, f"{name} is missing")
        if file.stat().st_size != entry["size"]:
            return _Verdict(manifest, f"{name} has {file.stat().st_size} bytes instead of {entry['size']}")
        if _sha256(file) != entry["sha256"]:
            return _Verdict(manifest, f"{name} has changed since it was written")
    return _Verdict(manifest)


# -- ranks ------------------------------------------------------------------------------------------------------------


def raise_together(problem: str | None) -> None:
    """Raise UserError on all ranks if rank 0 has a problem."""
    if problem := from_first(problem):
        raise UserError(problem)


def from_first(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return rank 0's value, on all ranks."""
    box = [value]
    dist.broadcast_object_list(box, 0, group=group)
    return box[0]


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, by rank."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value, group=group)
    return every
