"""Atomic checkpoints: written under a temporary name, hashed, and renamed when everything is on disk.

    checkpoints/
      step-00000040/            renamed from step-00000040.tmp-<nonce> when it is complete
        __0_0.distcp ...        the tensors, written by all ranks (torch.distributed.checkpoint)
        .metadata               the file and offset of each tensor
        manifest.json           size and SHA-256 of every file, the step, the configuration; written last

Tensors are saved under their names in the unwrapped model, shards as parts of the whole tensor: a checkpoint can be
loaded by another number of ranks and under another wrapper. The newest checkpoint that is exactly as its manifest says
is loaded. Hashes detect damage; they do not say who has written a checkpoint, so its files are read as data only
(`checkpoint_files`, `checkpoint_reader`).
"""

import contextlib
import errno
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from cs336_systems.config import UserError
from cs336_systems.files import reason_of
from cs336_systems.flags import one_line
from cs336_systems.parallel.collectives import from_first, gather, held_slices, local_part, on_first, persistent_buffers
from cs336_systems.record import MIB
from cs336_systems.step.updates import adapt
from cs336_systems.train.agreement import MUST_BE_SHARED
from cs336_systems.train.checkpoint_files import (
    FORMAT,
    METADATA,
    DamageError,
    HashedFiles,
    attempt,
    checkpoints_in,
    is_temporary,
    name_of,
    own_manifest,
    publish,
    read_manifest,
    read_metadata,
    remove,
    require_entries,
    require_file,
    step_of,
    temporary_name,
)
from cs336_systems.train.checkpoint_reader import Index, Reader, check_parts, read_index
from cs336_systems.train.weight_files import CHECKPOINTS


class Checkpoint(NamedTuple):
    """A checkpoint that is complete and verified."""

    path: Path
    manifest: dict[str, Any]


class DamagedCheckpointError(UserError):
    """A checkpoint that cannot be loaded. Nothing of it was loaded; `Store.newest` finds the one before it."""


class Store:
    """The checkpoints of one training run. Every method is called by all ranks together."""

    def __init__(
        self, folder: Path, *, keep: int = 2, keep_every: int = 0, keep_best: int = 0, timeout: float | None = None
    ):
        """`timeout`: seconds for each collective of a save, which may run in a thread; it then gets its own process
        group, because its collectives must not mix with those of the training."""
        self.folder = folder
        self.keep = keep
        self.keep_every = keep_every
        self.keep_best = keep_best
        self.timeout = timeout
        self.progress_at = 0.0
        """Time of the last collective of a save; between two collectives the ranks work independently."""
        self.is_given_up = False
        """True if the running save has exceeded its time limit and must not be published."""
        self._save_group: dist.ProcessGroup | None = None
        self.renew_group()
        self._damaged: set[Path] = set()
        """Checkpoints that were found damaged."""

    def renew_group(self) -> None:
        """Create the process group of saves. One in which a collective has failed cannot be used again."""
        if self.timeout is None:
            return
        if self._save_group is not None:
            dist.destroy_process_group(self._save_group)
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))
        assert isinstance(group, dist.ProcessGroup), "every rank is a member"
        self._save_group = group
        self.is_given_up = False

    @property
    def _group(self) -> dist.ProcessGroup | None:
        """The process group for the next collective. Reading it counts as progress, and raises an error in a save that
        was given up."""
        if self.is_given_up:
            raise TimeoutError("the save was given up")
        self.progress_at = time.monotonic()
        return self._save_group

    # -- writing ------------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Create the folder, and remove the files of an interrupted save."""

        def make() -> None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                probe = self.folder / temporary_name(0)  # removed by the next start if this one is killed here
                probe.mkdir()
                probe.rmdir()
                for stray in self.folder.iterdir():
                    if is_temporary(stray.name):
                        shutil.rmtree(stray, ignore_errors=True)
            except OSError as error:
                problem = f"cannot write to {str(self.folder)!r}: {error.strerror}; choose another --output"
                raise UserError(problem) from None

        on_first(make)

    def save(self, state: dict[str, Any], manifest: dict[str, Any]) -> Path | None:
        """Save `state`; `manifest` has at least the step. Return None if it failed: older checkpoints are untouched."""
        step = manifest["step"]
        final = self.folder / name_of(step)
        if from_first(os.path.lexists(final), self._group):
            verdict = self._verify(final)
            if verdict.problem is None and verdict.manifest["format"] == FORMAT and final not in self._damaged:
                return final  # saved before a restart
        unfinished = self.folder / from_first(temporary_name(step), self._group)
        problem, hashes = self._write(state, unfinished)
        problem = problem or self._see(unfinished, hashes)
        if problem is None and dist.get_rank() == 0:
            files = {name: entry for written in hashes for name, entry in written.items()}
            problem = _failure_of(publish, unfinished, final, {"format": FORMAT, **manifest, "files": files})
        if problem := from_first(problem, self._group):
            shutil.rmtree(unfinished, ignore_errors=True)  # on every rank: a folder that is not shared has several
            if dist.get_rank() == 0:
                warnings.warn(f"checkpoint of step {step} not saved: {problem}; training continues", stacklevel=2)
            return None
        self._damaged.discard(final)
        self._tidy(final)
        return final

    def discard(self, step: int) -> None:
        """Remove the files of an unfinished save of `step`; only rank 0 does."""
        if dist.get_rank() == 0:
            for stray in self.folder.glob(f"{name_of(step)}.*"):
                if is_temporary(stray.name):
                    shutil.rmtree(stray, ignore_errors=True)

    def _write(self, state: dict[str, Any], folder: Path) -> tuple[str | None, list[dict[str, Any]]]:
        """Write the tensors; return, on all ranks, why it failed on any of them, and the hashes by rank."""
        problem = None
        files = HashedFiles()
        try:
            writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=False)
            writer.fs = files
            dcp.save(state, storage_writer=writer, process_group=self._group)
        except CheckpointException as error:  # a failure on any rank, such as a full disk; it is no Exception
            causes = [cause for cause, _ in error.failures.values()]
            problem = _reason(causes[0] if causes else error, state, self.folder)
        except Exception as error:
            problem = _reason(error, state, self.folder)
        found = gather((problem, files.written), self._group)
        return next((problem for problem, _ in found if problem), None), [written for _, written in found]

    def _see(self, folder: Path, hashes: list[dict[str, Any]]) -> str | None:
        """Return, on all ranks, which files differ from what was written or are missing, or None.

        Rank 0 looks for every file and its size; each rank hashes the files of the rank before it.
        """
        rank, problem = dist.get_rank(), None
        before = (rank - 1) % len(hashes)
        if rank == 0:
            problem = next(filter(None, (_unseen(folder, files, who, rank) for who, files in enumerate(hashes))), None)
        problem = problem or _unseen(folder, hashes[before], before, rank, with_hash=True)
        return next(filter(None, gather(problem, self._group)), None)

    def _tidy(self, saved: Path) -> None:
        """Remove checkpoints that are neither the one just saved, nor among the latest or the best, nor of a multiple
        of `keep_every`."""
        if dist.get_rank() != 0:
            return
        try:
            paths = [path for path in checkpoints_in(self.folder) if path not in self._damaged]
            manifests = {path: manifest for path in paths if (manifest := own_manifest(path)) is not None}
            losses = {path: loss for path, found in manifests.items() if (loss := _validation_loss(found)) is not None}
            best = sorted(losses, key=lambda path: (losses[path], -manifests[path]["step"]))[: self.keep_best]
            kept = {saved, *list(manifests)[-self.keep :], *best}
            for path, manifest in manifests.items():
                is_multiple = self.keep_every and manifest["step"] % self.keep_every == 0
                if path not in kept and not is_multiple:
                    remove(path)
        except OSError as error:
            warnings.warn(f"an old checkpoint in {str(self.folder)!r} not removed: {error.strerror}", stacklevel=2)

    def set_aside(self, step: int) -> Path | None:
        """Move checkpoints later than `step` out of the folder; return where they are, None if there are none."""

        def move() -> Path | None:
            later = [path for path in checkpoints_in(self.folder) if (step_of(path.name) or 0) > step]
            number = 1
            while (folder := self.folder.with_name(f"superseded-{number}")).exists():
                number += 1
            try:
                for path in reversed(later):
                    folder.mkdir(exist_ok=True)
                    os.rename(path, folder / path.name)
            except OSError as error:
                problem = f"cannot move the checkpoints after step {step} to {str(folder)!r}: {error.strerror}"
                raise UserError(problem) from None
            return folder if later else None

        return on_first(move)

    # -- reading ------------------------------------------------------------------------------------------------------

    def newest(self) -> Checkpoint | None:
        """Return the newest intact checkpoint; None if there is none."""
        for path in reversed(self.listed()):
            if path in self._damaged:
                continue
            manifest, problem = self._verify(path)
            if problem is not None:
                self._ignore(path, problem)
                continue
            return self._known(Checkpoint(path, manifest))
        return None

    def at(self, step: int) -> Checkpoint:
        """Return the checkpoint of a step; raise UserError if it is missing or damaged."""
        paths = {step_of(path.name): path for path in self.listed()}
        if step not in paths:
            there = ", ".join(map(str, paths)) or "none"
            raise UserError(f"no checkpoint of step {step} in {str(self.folder)!r}; there are: {there}")
        manifest, problem = self._verify(paths[step])
        if problem is not None:
            raise UserError(f"checkpoint {str(paths[step])!r} is damaged: {problem}")
        return self._known(Checkpoint(paths[step], manifest))

    def _known(self, found: Checkpoint) -> Checkpoint:
        """Return a checkpoint whose format is known; raise UserError for a newer one."""
        if found.manifest["format"] > FORMAT:
            newer = f"format {found.manifest['format']}"
            raise UserError(f"{str(found.path)!r} was written by a newer cs336 ({newer}): upgrade, or change --output")
        return found

    def load(self, checkpoint: Checkpoint, state: dict[str, Any]) -> None:
        """Load into the tensors of `state`; raise DamagedCheckpointError, before any is changed, if it does not fit."""
        index, problem = attempt(lambda: _index(checkpoint.path, checkpoint.manifest, state))
        self._require_intact(checkpoint, problem)
        assert index is not None
        reader = Reader(checkpoint.path, index)
        rng = {name: value for name, value in state.items() if name.startswith("rng/")}
        _load(rng, reader)  # first: torch refuses some random states, and the model must be as it was then
        self._require_intact(checkpoint, rng_problem(rng))
        _load({name: value for name, value in state.items() if name not in rng}, reader)

    def _require_intact(self, checkpoint: Checkpoint, problem: str | None) -> None:
        """Raise DamagedCheckpointError on all ranks if any has a problem, and have `newest` ignore the checkpoint."""
        if problem := self._first_problem(problem):
            self._ignore(checkpoint.path, problem)
            raise DamagedCheckpointError(f"checkpoint {str(checkpoint.path)!r} is damaged: {problem}")

    def listed(self) -> list[Path]:
        """Return the checkpoints that rank 0 sees, oldest first; raise UserError on all ranks if it cannot."""

        def find() -> list[Path]:
            try:
                return checkpoints_in(self.folder)
            except OSError as error:  # a run that has checkpoints must not start anew
                raise UserError(f"cannot read {str(self.folder)!r}: {error.strerror}") from None

        return on_first(find, self._group)

    def _verify(self, path: Path) -> "_Verdict":
        """Check a checkpoint: rank 0 its manifest and names, all ranks together the contents of its files."""

        def read() -> dict[str, Any]:
            manifest = read_manifest(path)
            if manifest["format"] <= FORMAT:  # the entries of a newer one are unknown
                require_entries(path, manifest)
            return manifest

        manifest, problem = from_first(attempt(read) if dist.get_rank() == 0 else None, self._group)
        if problem is not None or manifest["format"] > FORMAT:
            return _Verdict(manifest or {}, problem)
        share = sorted(manifest["files"])[dist.get_rank() :: dist.get_world_size()]
        _, problem = attempt(lambda: _check_files(path, manifest, share))
        return _Verdict(manifest, self._first_problem(problem))

    def _first_problem(self, problem: str | None) -> str | None:
        """Return, on all ranks, the problem of the first rank that has one."""
        found = enumerate(gather(problem, self._group))
        return next((f"{each} (rank {rank})" if rank else each for rank, each in found if each), None)

    def _ignore(self, path: Path, problem: str) -> None:
        self._damaged.add(path)
        if dist.get_rank() == 0:
            warnings.warn(f"checkpoint {str(path)!r} is damaged and ignored: {problem}", stacklevel=3)


class _Verdict(NamedTuple):
    manifest: dict[str, Any]
    problem: str | None = None


# -- tensors ----------------------------------------------------------------------------------------------------------


def training_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, copies: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the tensors of the model and of AdamW by name, shards as parts of the whole.

    They are the tensors in use, so that loading into them loads into the model; except weights that the optimizer keeps
    as fp32 masters and moments that it keeps in bf16, which are fp32 copies that `load_copies` puts back: a checkpoint
    is the same for every precision of the optimizer's state. With `copies` all are copies in host memory, which reuse
    the tensors of an earlier call: allocating them takes longer than copying (0.1 to 0.3 s for 300 MB instead of 0.02).
    Copies from a GPU are complete when it is synchronized.
    """
    inner = getattr(model, "module", model)
    names = {p: name for name, p in inner.named_parameters()}
    shards = [p for p in names if hasattr(p, "is_shard")]
    device = "cpu" if copies is not None else shards[0].device.type if shards else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),)) if shards else None
    adapted = adapt(optimizer)
    masters = adapted.masters("cpu")

    def saved(name: str, tensor: Tensor, p: Tensor) -> Tensor:
        return _placed(_as_whole(tensor if copies is None else _copied(name, tensor, copies), p, mesh))

    state = {f"model/{name}": saved(f"model/{name}", masters.get(p, p.detach()), p) for p, name in names.items()}
    for name, buffer in persistent_buffers(inner).items():
        state[f"buffer/{name}"] = saved(f"buffer/{name}", buffer, buffer)
    for p in adapted.owned:
        if p.requires_grad:
            moments = {f"optimizer/{names[p]}/{name}": t for name, t in _adamw_state(optimizer, p).items()}
            wide = {name: t.to("cpu", torch.float32) if t.dtype == torch.bfloat16 else t for name, t in moments.items()}
            state |= {name: saved(name, t, p) for name, t in wide.items()}
    return state


def load_copies(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Tensor]) -> None:
    """Set the optimizer's master weights and bf16 moments from `state`, of `training_state`, after it was loaded."""
    inner = getattr(model, "module", model)
    names = {p: name for name, p in inner.named_parameters()}
    adapted = adapt(optimizer)
    adapted.load_masters({p: state[f"model/{name}"] for p, name in names.items()})
    for p in adapted.owned:
        for name, t in optimizer.state.get(p, {}).items():
            if t.dtype == torch.bfloat16:
                t.copy_(state[f"optimizer/{names[p]}/{name}"])


def rng_state() -> dict[str, Tensor]:
    """Return the random state of this rank."""
    found = {f"rng/{dist.get_rank()}/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found[f"rng/{dist.get_rank()}/cuda"] = torch.cuda.get_rng_state()
    return found


def set_rng_state(state: dict[str, Tensor]) -> None:
    for name, value in state.items():
        (torch.cuda.set_rng_state if name.endswith("cuda") else torch.set_rng_state)(value)


def rng_problem(state: dict[str, Tensor]) -> str | None:
    """Return why torch refuses this random state, or None."""
    for name, value in state.items():
        try:
            torch.Generator("cuda" if name.endswith("cuda") else "cpu").set_state(value)
        except RuntimeError as error:
            return one_line(f"{name}: {error}")
    return None


def _copied(name: str, tensor: Tensor, copies: dict[str, Tensor]) -> Tensor:
    """Copy a tensor into its tensor in `copies`. Page-locked memory is the fastest target of copies from a GPU."""
    if name not in copies:
        copies[name] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return copies[name].copy_(tensor.detach(), non_blocking=True)


def _as_whole(tensor: Tensor, p: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Return a tensor shaped like the shard `p` as this rank's part of the whole tensor, any other as it is."""
    if not hasattr(p, "is_shard") or tensor.shape != p.shape:
        return tensor
    shape = p.full_shape  # type: ignore[attr-defined]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def _placed(tensor: Tensor) -> Tensor:
    """Tell torch which part of the whole a DTensor holds, because it is wrong when two axes split the rows unevenly."""
    if not isinstance(tensor, DTensor):
        return tensor
    slices, local = held_slices(tensor), local_part(tensor)
    offsets, sizes = torch.Size(one.start for one in slices), torch.Size(one.stop - one.start for one in slices)
    assert sizes == local.shape
    chunks = [ChunkStorageMetadata(offsets, sizes)] if local.numel() else []

    def write_items(name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(local)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, tensor.size()),
            )
            for chunk in chunks
        ]

    hooks = {"__create_chunk_list__": lambda: chunks, "__create_write_items__": write_items}
    for name, hook in hooks.items():
        setattr(tensor, name, hook)
    return tensor


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


def located(path: Path) -> tuple[Path, int | None]:
    """Return the folder of checkpoints and the step that a path names: a run, its folder of checkpoints, or one
    checkpoint."""
    step = step_of(path.name)
    if step is not None:
        return path.parent, step
    return (path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path), None


def _validation_loss(manifest: Mapping[str, Any]) -> float | None:
    """Return the validation loss in the manifest of a checkpoint, None if there is none."""
    loss = manifest.get("validation_loss")
    return loss if isinstance(loss, float) and math.isfinite(loss) else None


def _reason(error: BaseException, state: dict[str, Any], folder: Path) -> str:
    """Return why a save failed. On a full disk torch's own message only mentions positions in a file."""
    needed = sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(folder).free
        if free < needed:
            sizes = f"{free / MIB:.1f} MiB are free in {str(folder)!r}, a checkpoint takes {needed / MIB:.1f}"
            return f"{os.strerror(errno.ENOSPC)} ({sizes})"
    return reason_of(error)


def _failure_of(work: Callable[..., object], *arguments: Any) -> str | None:
    """Return why `work(*arguments)` failed, or None. An exception on one rank would leave the others waiting."""
    try:
        work(*arguments)
    except Exception as error:
        return one_line(str(error)) or type(error).__name__
    return None


def _unseen(folder: Path, files: dict[str, Any], writer: int, rank: int, *, with_hash: bool = False) -> str | None:
    """Return which of the files written by `writer` this rank does not see with their sizes, or hashes."""
    remedy = f"; {MUST_BE_SHARED}" if writer != rank else ""
    for name, entry in files.items():
        try:
            if with_hash:
                require_file(folder / name, entry)
            elif (size := (folder / name).lstat().st_size) != entry["size"]:
                raise DamageError(f"{name} has {size} bytes instead of {entry['size']}")
        except (DamageError, FileNotFoundError) as error:
            reason = str(error) if isinstance(error, DamageError) else f"{name} is missing"
            return f"rank {rank} does not see what rank {writer} has written: {reason}{remedy}"
        except Exception as error:
            reason = getattr(error, "strerror", None) or one_line(str(error))
            return f"rank {rank} cannot read {name} of rank {writer}: {reason}"
    return None


def _load(state: dict[str, Any], reader: Reader) -> None:
    """Load into the tensors of `state`; raise UserError if a file has changed since it was verified."""
    try:
        dcp.load(state, storage_reader=reader)
    except CheckpointException as error:  # no Exception; of some ranks or all
        causes = [one_line(str(cause)) or type(cause).__name__ for cause, _ in error.failures.values()]
        path, reason = str(reader.checkpoint_id), causes[0] if causes else "unknown reason"
        raise UserError(f"cannot load {path!r}: {reason}; start the same command again") from None


def _index(path: Path, manifest: dict[str, Any], state: Mapping[str, Any] | None = None) -> Index:
    """Return the index of a checkpoint, verified against its manifest; raise DamageError if it does not fit `state`."""
    sizes = {name: entry["size"] for name, entry in manifest["files"].items() if name != METADATA}
    index = read_index(read_metadata(path, manifest), sizes)
    index.require(state or {})
    return index


def _check_files(path: Path, manifest: dict[str, Any], names: list[str]) -> None:
    """Raise DamageError unless these files have the hashes of the manifest, and hold the tensors of the index.

    Hashes are not enough: someone else may have computed them.
    """
    index = _index(path, manifest)
    for name in names:
        require_file(path / name, manifest["files"][name])
        check_parts(path, index, name)
