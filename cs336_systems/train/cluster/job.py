"""The job of `cs336 launch`: its flags, the checked command of its ranks, and the shell lines that all clusters share.

No torch here: the scripts are made on a login node or a laptop.
"""

import dataclasses
import re
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import NoReturn

from cs336_systems.config import UserError, flag
from cs336_systems.files import write_file
from cs336_systems.flags import Parser, add_flags, read_flags
from cs336_systems.predict.fit import gpu_bytes
from cs336_systems.train.enough_memory import Memory, require_batch, require_memory
from cs336_systems.train.settings import BYTES, TrainSettings
from cs336_systems.train.tokens.token_store import (
    DOCUMENTS_FILE,
    HEADER,
    ITEM_BYTES,
    OFFSET_BYTES,
    TOKENS_FILE,
    TokenStore,
)

CLUSTERS = ("slurm", "skypilot", "kubernetes")
START = {"slurm": "sbatch", "skypilot": "sky jobs launch", "kubernetes": "kubectl apply -f"}
"""The command that starts a job from its file."""
RENTED = "H100"
"""The GPU that SkyPilot rents where none is named."""
PORTS = range(20000, 32000)
"""Ports for the rendezvous: below those that Linux gives to outgoing connections."""
SAVE_MARGIN = 20
"""Seconds between the end of the ranks' last save and the end of their job."""
STOP_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""Signals that torchrun passes on to the ranks; SIGUSR1 is not among its own."""
TIME = re.compile(r"(?:(\d+)-)?(\d{1,3}):([0-5]\d):([0-5]\d)")
NAME = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")
"""Names that all clusters accept: Kubernetes has the strictest rule."""
WORD = re.compile(r"[\w.,:/@+-]+")
NCCL = """\
# NCCL prints its errors; INFO also shows which network it uses, for a run that is slow.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# torch ends a rank whose collective fails or times out (TORCH_NCCL_ASYNC_ERROR_HANDLING=3, the default).
# Several networks, and NCCL_DEBUG=INFO shows the wrong one: name the interface for TCP (ip addr) ...
# export NCCL_SOCKET_IFNAME=eth0
# ... and the InfiniBand adapters (ibstat).
# export NCCL_IB_HCA=mlx5_0,mlx5_1
# A collective times out and nobody knows why: keep the last 2000 and write them to a file.
# export TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1
"""
GLOO = """\
# Several networks: name the interface that the machines share (ip addr).
# export GLOO_SOCKET_IFNAME=eth0
"""
VARIABLE = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class LaunchArguments:
    words: tuple[str, ...] = flag(
        (),
        "the command of every rank, after two dashes: train and its flags",
        positional=True,
        metavar="-- train",
        may_be_empty=True,
    )
    slurm: bool = flag(False, "print a batch script for sbatch", excludes=("skypilot", "kubernetes"))
    skypilot: bool = flag(False, "print a task for sky jobs launch", excludes=("kubernetes",))
    kubernetes: bool = flag(False, "print an indexed Job and its Service for kubectl apply")
    nodes: int = flag(1, "number of machines")
    gpus_per_node: int = flag(8, "GPUs of each machine (0: ranks on CPUs)")
    ranks_per_node: int | None = flag(None, "ranks on each machine (default: one for each GPU, or one)")
    cpus_per_rank: int = flag(8, "CPU cores of each rank, and its OpenMP threads")
    gpu: str = flag("", f"card of the machines: a step must fit; SkyPilot rents it ({RENTED} where none is named)")
    time: str = flag("24:00:00", "time limit, [DAYS-]HH:MM:SS")
    stop_before: int = flag(120, "seconds before the time limit at which the run stops and saves")
    requeues: int = flag(20, "times that a job which was stopped is started again")
    restarts: int = flag(3, "times that torchrun restarts the ranks after one of them has failed")
    name: str = flag("cs336", "name of the job: lower-case letters, digits and dashes")
    partition: str = flag("", "partition of Slurm")
    account: str = flag("", "account of Slurm")
    image: str = flag("", "container image; on Slurm it needs the Pyxis plugin")
    volume: str = flag("", "shared volume: a PersistentVolumeClaim, or a volume of SkyPilot")
    mount: str = flag("/shared", "where the volume is mounted; with --image on Slurm, a folder of the nodes")
    env: tuple[str, ...] = flag((), "environment variables, NAME=VALUE; a part without = belongs to the value before")
    setup: str = flag("", "shell command to run first on each machine, such as 'source /shared/venv/bin/activate'")
    output: str | None = flag(None, "file to write to, instead of the screen", short="-o")


@dataclass(frozen=True)
class Job:
    """A checked job: the flags of `cs336 launch` and the words of `train`."""

    flags: LaunchArguments
    train_words: tuple[str, ...]
    remarks: tuple[str, ...] = ()
    """Lines for standard error about settings that could not be checked here."""

    @property
    def cluster(self) -> str:
        return next(name for name in CLUSTERS if getattr(self.flags, name))

    @property
    def ranks_per_node(self) -> int:
        return self.flags.ranks_per_node or self.flags.gpus_per_node or 1

    @property
    def world_size(self) -> int:
        return self.flags.nodes * self.ranks_per_node

    @property
    def cpus_per_node(self) -> int:
        return self.ranks_per_node * self.flags.cpus_per_rank

    @property
    def seconds(self) -> int:
        """Time limit in seconds."""
        match = TIME.fullmatch(self.flags.time)
        if match is None:
            raise UserError(f"--time must be [DAYS-]HH:MM:SS, such as 24:00:00, got {self.flags.time!r}")
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds

    @property
    def save_within(self) -> int:
        """Seconds that torchrun gives the ranks to finish their step and save."""
        return self.flags.stop_before - SAVE_MARGIN

    @cached_property
    def variables(self) -> dict[str, str]:
        """Environment variables set by the user."""
        parts: list[str] = []
        for part in self.flags.env:
            if "=" in part:
                parts.append(part)
            elif parts:
                parts[-1] += f",{part}"
            else:
                raise UserError(f"--env must be NAME=VALUE, got {part!r}")
        found = dict(part.split("=", 1) for part in parts)
        for name in found:
            if not VARIABLE.fullmatch(name):
                raise UserError(f"--env: {name!r} is no name of an environment variable")
        return found

    def torchrun(
        self, *, nodes: str, endpoint: str, identifier: str, extra: tuple[str, ...] = (), indent: str = "    "
    ) -> str:
        """Return the shell command of one machine, on several lines; the arguments are shell words."""
        words = [
            ("python -m torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={self.ranks_per_node}"),
            ("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={identifier}", *extra),
            (f"--max-restarts={self.flags.restarts}", f"--signals-to-handle={STOP_SIGNALS}"),
            ("-m", "cs336_systems", *map(shlex.quote, self.train_words)),
        ]
        return f" \\\n{indent}".join(" ".join(line) for line in words)

    def environment(self) -> str:
        """Return the shell lines that set the environment of the ranks and run the setup, which must succeed."""
        lines = [
            "# Without it every rank starts a thread for each core of the machine.",
            f"export OMP_NUM_THREADS={self.flags.cpus_per_rank}",
            "# Lines of ranks appear when they are printed, not when a buffer is full.",
            "export PYTHONUNBUFFERED=1",
            "# Seconds that torchrun (2.13 or newer; 30 before) gives the ranks to save when it is asked to stop.",
            f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={self.save_within}",
        ]
        lines += (NCCL if self.flags.gpus_per_node else GLOO).splitlines()
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.variables.items()]
        if self.flags.setup:
            lines += ["", "set -e", self.flags.setup, "set +e"]
        elif not self.flags.image:
            lines += ["# The python of this script must have this package: --setup 'source VENV/bin/activate'."]
        return "\n".join(lines)


def next_steps(job: Job) -> list[str]:
    """Return lines for standard error that say what to do with the script."""
    lines = []
    if not job.flags.setup and not job.flags.image:
        lines.append(
            "no --setup: python on the machines must have this package; to activate its environment first: "
            "--setup 'source /shared/venv/bin/activate'"
        )
    if job.flags.output is not None:
        lines.append(f"wrote {job.flags.output}; start it with: {START[job.cluster]} {shlex.quote(job.flags.output)}")
    return lines


def checked(flags: LaunchArguments) -> Job:
    """Return the job; raise UserError for any mistake in its flags or in those of `train`."""
    if sum(getattr(flags, name) for name in CLUSTERS) != 1:
        raise UserError(f"choose a cluster: {', '.join(f'--{name}' for name in CLUSTERS)}")
    _require_numbers(flags)
    _require_words(flags)
    if flags.words[:1] != ("train",):
        raise UserError(
            "give the command of the ranks after two dashes: cs336 launch --slurm -- train --data tokens.bin"
        )
    settings, remarks = _train_settings(flags)
    job = Job(flags, flags.words, remarks)
    if job.seconds <= flags.stop_before:
        raise UserError(f"--time {flags.time} must be longer than --stop_before {flags.stop_before} seconds")
    if flags.gpus_per_node and job.ranks_per_node > flags.gpus_per_node:
        raise UserError(f"--ranks_per_node {job.ranks_per_node} is more than --gpus_per_node {flags.gpus_per_node}")
    device = (settings.compute.device or ("cuda" if flags.gpus_per_node else "cpu")).split(":")[0]
    if device == "cuda" and not flags.gpus_per_node:
        raise UserError("--device cuda of train needs GPUs, and --gpus_per_node is 0")
    require_batch(settings, job.world_size)
    settings.require_ranks(job.world_size)
    settings.run_config(device, job.world_size)
    _ = job.variables
    _require_shared_output(job, settings)
    unknown = _require_fitting(job, settings, device)
    return dataclasses.replace(job, remarks=(*remarks, *unknown))


def _require_fitting(job: Job, settings: TrainSettings, device: str) -> tuple[str, ...]:
    """Raise UserError if a step cannot fit on the card that is named; return a remark if only SkyPilot knows it."""
    flags = job.flags
    if not flags.gpu:
        return ()
    if device != "cuda":
        raise UserError(f"--gpu {flags.gpu} names a card, and the ranks run on CPUs; leave it out")
    try:
        capacity = gpu_bytes(flags.gpu)
    except UserError:
        if not flags.skypilot:  # which has names of its own
            raise
        return (f"the memory of --gpu {flags.gpu} is not known: whether a step fits was not checked",)
    require_memory(settings, device, job.world_size, Memory(capacity, f"--gpu {flags.gpu}"))
    return ()


def _require_numbers(flags: LaunchArguments) -> None:
    least = {"nodes": 1, "gpus_per_node": 0, "ranks_per_node": 1, "cpus_per_rank": 1, "requeues": 0, "restarts": 0}
    for name, bound in {**least, "stop_before": SAVE_MARGIN + 10}.items():
        value = getattr(flags, name)
        if value is not None and value < bound:
            raise UserError(f"--{name} must be at least {bound}, got {value}")


def _require_words(flags: LaunchArguments) -> None:
    """Raise UserError for values that directives and manifests cannot hold."""
    if not NAME.fullmatch(flags.name):
        raise UserError(
            f"--name must begin with a letter and have lower-case letters, digits and dashes, got {flags.name!r}"
        )
    for name in ("partition", "account", "image", "volume", "gpu", "mount"):
        value = getattr(flags, name)
        if value and not WORD.fullmatch(value):
            raise UserError(f"--{name}: {value!r} has characters that a job's description cannot hold")
    if not flags.mount.startswith("/"):
        raise UserError(f"--mount must be an absolute path, got {flags.mount!r}")
    if "://" in flags.volume:
        raise UserError(
            f"--volume {flags.volume!r} is a bucket, which has no file locks and no renames; checkpoints need a volume"
        )


class _TrainParser(Parser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"train: {message}{self._suggestion(message)}; see cs336 train --help")


def _train_settings(flags: LaunchArguments) -> tuple[TrainSettings, tuple[str, ...]]:
    """Return the settings of `train`, read by its own parser, and remarks on what could not be checked."""
    parser = _TrainParser(prog="cs336 train", add_help=False)
    add_flags(parser, TrainSettings)
    namespace = parser.parse_args(list(flags.words[1:]))
    absent = [path for path in (namespace.data, namespace.init) if path and not Path(path).exists()]
    if flags.slurm:  # the job starts in the folder of its submission: a relative path names a file of this machine
        if namespace.data in absent and not Path(namespace.data).is_absolute():
            raise UserError(
                f"train: no file {namespace.data!r} here; give the absolute path of data that only the cluster has"
            )
        absent = [path for path in absent if Path(path).is_absolute()]
    remarks = tuple(map(_unchecked, absent))
    if namespace.data not in absent:
        return read_flags(TrainSettings, namespace), remarks
    with _stand_in(namespace.data, is_store=namespace.pack == "documents") as namespace.data:
        return read_flags(TrainSettings, namespace), remarks


def _unchecked(path: str) -> str:
    """Return the remark on a path that only the cluster can have."""
    folder = str(Path(path).parent)
    doubt = f" (its folder {folder!r} is: is the name right?)" if Path(folder).is_dir() else ""
    return f"{path!r} is not on this machine{doubt}: it was not checked and must be there on the cluster"


@contextmanager
def _stand_in(data: str, *, is_store: bool) -> Iterator[str]:
    """Yield a placeholder file, or folder of tokens, for data that only the cluster has, so that all other flags can be
    checked."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"data{Path(data).suffix or '.bin'}")
        if is_store:
            path = Path(folder)
            store = TokenStore("uint16", 1, 1, BYTES, None, *("",) * 4)
            write_file(path / HEADER, store.to_json())
            write_file(path / TOKENS_FILE, bytes(ITEM_BYTES[store.dtype] * store.tokens))
            write_file(path / DOCUMENTS_FILE, bytes(OFFSET_BYTES * (store.documents + 1)))
        else:
            write_file(path, b"")
        yield str(path)


def _require_shared_output(job: Job, settings: TrainSettings) -> None:
    """Raise UserError if a job would write its checkpoints into a container or onto the disk of one machine."""
    flags = job.flags
    if flags.kubernetes and not (flags.volume and flags.image):
        raise UserError("--kubernetes needs --image, and a PersistentVolumeClaim as --volume for the checkpoints")
    if flags.skypilot and flags.nodes > 1 and not flags.volume:
        raise UserError("--skypilot with several --nodes needs a shared --volume for the checkpoints")
    is_mounted = bool(flags.image) if flags.slurm else bool(flags.volume)
    if is_mounted and not PurePosixPath(settings.output).is_relative_to(flags.mount):
        raise UserError(
            f"--output {settings.output!r} of train is not below --mount {flags.mount}; the run would be lost"
        )
