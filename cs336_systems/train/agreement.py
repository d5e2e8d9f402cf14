"""Checks at the start of a run that its ranks do the same work: settings, code, data, and one output folder."""

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import secrets
import time
from concurrent.futures import wait
from functools import cache
from pathlib import Path

import torch.distributed as dist

from cs336_systems import __version__
from cs336_systems.config import UserError, size_name
from cs336_systems.flags import flat
from cs336_systems.parallel.collectives import from_first, gather, together
from cs336_systems.parallel.peers import in_background, ranks_named
from cs336_systems.parallel.rendezvous import Facts, differences
from cs336_systems.train.settings import TrainSettings
from cs336_systems.train.token_file import TokenFile, Tokens

VARIABLES = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "CUBLAS_WORKSPACE_CONFIG",
    "TRITON_F32_DEFAULT",
    "TRITON_INTERPRET",
)
"""Environment variables that change the results of kernels."""
SHARED_WITHIN = 10.0
"""Seconds in which a new file must be visible to all ranks: network file systems cache directories."""
HEARTBEAT = 5.0
"""Seconds between the heartbeats of ranks that read a long file."""
NONCE = ".shared-"
"""Prefix of the files that test whether a folder is shared."""
MUST_BE_SHARED = "--output must be on a file system that all ranks share"


def facts_of(settings: TrainSettings, device: str) -> Facts:
    """Return the facts that must agree on all ranks; `device` is cpu or cuda.

    Every flag must be equal, except that
    - `--data` may be another path, as of a copy on each node: the tokens are compared later;
    - `--device` may name another index: the kind of device must be equal;
    - `--output` may be written in another way: the absolute path must be equal;
    - with `--init` the shape may be given by flags or come with the weights: the model must be equal.
    """
    flags = {name: str(value) for name, value in flat(settings).items()}
    if settings.init is not None:
        flags |= {name: str(value) for name, value in vars(settings.model).items()}
        flags["size"] = size_name(settings.model)
    flags |= {
        "vocab_size": str(settings.model.vocab_size),
        "device": device,
        "output": os.path.abspath(settings.output),
    }
    flags["data"] = "a text" if settings.data.is_text else "a file of tokens"
    variables = {f"the environment variable {name}": os.environ.get(name, "not set") for name in VARIABLES}
    python = ".".join(platform.python_version_tuple()[:2])
    return Facts(
        {**{f"--{name}": value for name, value in flags.items()}, **code_facts(), **variables},
        {"the version of Python": python},
    )


def code_facts() -> dict[str, str]:
    """Return the versions of the packages that compute, and a hash of this one's source."""
    versions = {f"the version of {name}": _version(name) for name in ("torch", "triton")}
    return {**versions, "the code of cs336_systems": f"{__version__} ({_source_hash()})"}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@cache
def _source_hash() -> str:
    """Return a hash of the source files of the package."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


# -- data -------------------------------------------------------------------------------------------------------------


def read_once_per_host(file: TokenFile) -> Tokens:
    """Return the summary of a file of tokens, which is equal on all ranks. Called by all ranks together.

    Ranks of one machine that have opened the same file read it once. The others wait for as long as that takes.
    """
    owners = gather((_machine(), *file.identity))
    reader = owners.index(owners[dist.get_rank()])
    summary = in_background(file.summary if reader == dist.get_rank() else Tokens)
    while True:  # a collective now and then: its time limit must not end a long read
        wait([summary], HEARTBEAT)
        if all(gather(summary.done())):
            break
    found = gather(together(summary.result))
    found = [found[owners.index(owner)] for owner in owners]
    if differing := differences(
        {rank: {"the tokens of --data": one.fingerprint[:16]} for rank, one in enumerate(found)}
    ):
        raise UserError(f"ranks differ in {differing[0]}; give all ranks the same data")
    return found[dist.get_rank()]


def _machine() -> str:
    """Return an identifier of the running system: device numbers of files are unique in one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


# -- the output folder ------------------------------------------------------------------------------------------------


def require_shared(folder: Path) -> None:
    """Raise UserError on all ranks unless all of them share `folder`, which rank 0 has created, and can write into
    it."""
    rank, nonce = dist.get_rank(), from_first(secrets.token_hex(8))
    paths = [folder / f"{NONCE}{nonce}-{number}" for number in range(dist.get_world_size())]
    where = f"--output {str(folder)!r}"
    try:
        if rank == 0:
            for stale in folder.glob(f"{NONCE}*"):  # of a run that was killed here
                stale.unlink(missing_ok=True)
        together(lambda: _write(paths[0], nonce) if rank == 0 else None)
        blind = [number for number, unseen in enumerate(gather(_unseen(paths[:1], nonce))) if unseen]
        if blind:
            raise UserError(f"{where}: {ranks_named(blind)} cannot see what rank 0 writes there; {MUST_BE_SHARED}")
        together(lambda: _write(paths[rank], nonce) if rank > 0 else None)
        if hidden := from_first(_unseen(paths, nonce) if rank == 0 else []):
            raise UserError(f"{where}: rank 0 cannot see what {ranks_named(hidden)} writes there; {MUST_BE_SHARED}")
    finally:
        with contextlib.suppress(OSError):
            paths[rank].unlink(missing_ok=True)


def _write(path: Path, nonce: str) -> None:
    try:
        path.write_text(nonce)
    except OSError as error:
        raise UserError(f"cannot write to {str(path.parent)!r}: {error.strerror}; choose another --output") from None


def _unseen(paths: list[Path], nonce: str) -> list[int]:
    """Return the numbers of the files that do not appear with the content `nonce` in time."""
    unseen, deadline = list(range(len(paths))), time.monotonic() + SHARED_WITHIN
    while unseen:
        unseen = [number for number in unseen if not _holds(paths[number], nonce)]
        if not unseen or time.monotonic() > deadline:
            break
        time.sleep(0.1)
        with contextlib.suppress(OSError):
            os.listdir(paths[0].parent)  # makes a network file system look again
    return unseen


def _holds(path: Path, nonce: str) -> bool:
    try:
        return path.read_text() == nonce
    except (OSError, ValueError):
        return False
