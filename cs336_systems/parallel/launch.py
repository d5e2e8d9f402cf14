"""Starts ranks on this machine (`spawn`), or joins the ranks that torchrun has started (`process_group`).

    def work(scale):  # defined at the top level of a module: other processes import it by name
        t = torch.full((3,), scale * dist.get_rank())
        dist.all_reduce(t)
        return t

    spawn(work, 2, 10.0)  # results by rank: [tensor([10., 10., 10.]), tensor([10., 10., 10.])]

If a rank fails, the others are killed and RankError carries its traceback. If the time limit passes, RankError carries
the stack of every rank. Ranks of one machine meet through a file, so no port is chosen.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from cs336_systems.config import UserError, arg
from cs336_systems.parallel.peers import Peers, RankError, error_line, is_connection_error
from cs336_systems.parallel.rendezvous import Facts, Place, is_under_torchrun, join, tell_failure, torchrun_place

TIMEOUT = 600.0
"""Default time limit of `spawn`, in seconds."""
GRACE = 2.0
"""Seconds in which the other ranks may report why they ended before they are killed."""


@dataclass(frozen=True)
class Rank:
    """The rank, the size of its group, and its device."""

    rank: int
    world_size: int
    device: torch.device


def spawn(
    work: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    backend: str = "gloo",
    device: str = "cpu",
    timeout: float = TIMEOUT,
) -> list[Any]:
    """Call `work(*arguments)` in `world_size` new processes that form a process group; return the results by rank."""
    with Ranks(world_size, backend=backend, device=device, timeout=timeout) as ranks:
        return ranks.call(work, *arguments)


class Ranks:
    """Processes of this machine that form a process group and run one function after another.

    A call that fails ends the processes: collectives that some ranks have entered cannot be taken back.
    """

    def __init__(self, world_size: int, *, backend: str = "gloo", device: str = "cpu", timeout: float = TIMEOUT):
        require_slots(world_size, backend, device)
        # Ranks are forked from a server process that has imported torch, and its compiler, which every optimizer of
        # torch imports: seconds of a core.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "torch._dynamo"])
        self.timeout = timeout
        self._folder = tempfile.TemporaryDirectory(prefix="cs336-ranks-")
        self._processes = []
        for rank in range(world_size):
            connection, of_rank = context.Pipe()
            stack = Path(self._folder.name) / f"stack-{rank}"
            seat = _Seat(rank, world_size, backend, device, timeout, f"{self._folder.name}/store", stack)
            process = context.Process(target=_serve, args=(seat, dict(os.environ), of_rank), daemon=True)
            process.start()
            of_rank.close()
            self._processes.append(_RankProcess(rank, process, connection, stack))

    def call(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return what `work(*arguments)` returns on each rank, by rank."""
        # Pickled by value: tensors in shared memory would vanish with the process that made them.
        request = pickle.dumps((work, arguments))
        deadline = time.monotonic() + self.timeout
        try:
            for process in self._processes:
                with contextlib.suppress(BrokenPipeError):  # the rank has ended: reported below
                    process.connection.send_bytes(request)
            return _collect(self._processes, deadline, self.timeout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for process in self._processes:
            process.process.kill()
            process.process.join()
            process.connection.close()
        self._folder.cleanup()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def process_group(
    backend: str | None = None, device: str | None = None, timeout: float = TIMEOUT, facts: Facts | None = None
) -> Iterator[Rank]:
    """Join the group of torchrun's ranks, or form a group of this process alone without torchrun.

    Ranks use NCCL and one GPU each where there are enough GPUs, and Gloo otherwise. All ranks must have the same
    `facts`, else all raise a UserError that names the differences. A collective that takes longer than `timeout`
    seconds, or breaks, raises a RankError that names the missing rank. If a rank leaves with an exception, the others
    raise an error that carries its message.
    """
    place = torchrun_place() if is_under_torchrun() else Place()
    device = device or default_device()
    if backend is None:
        backend = "nccl" if device == "cuda" and place.local_size <= torch.cuda.device_count() else "gloo"
    try:
        require_slots(place.local_size, backend, device)
    except UserError as error:
        tell_failure(error_line(error))
        raise
    rank, world_size, facts = place.rank, place.world_size, facts or Facts()
    facts = Facts({**facts.required, "the backend of the group": backend}, facts.expected)
    store = join(place, facts, timeout) if is_under_torchrun() else dist.HashStore()
    peers = Peers(store, rank, world_size, hosts_store=place.hosts_store)
    with peers, contextlib.ExitStack() as group:
        try:
            group.enter_context(_group(store, rank, world_size, backend, timeout))
            yield Rank(rank, world_size, _use_device(place.local_rank, device))
        except BaseException as error:
            # Before the group is destroyed: that breaks the connections of the others.
            if world_size > 1 and not isinstance(error, UserError) and is_connection_error(str(error)):
                raise peers.loss() from error
            peers.report(error)
            raise


def default_device() -> str:
    """Return the default kind of device for ranks."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def this_rank(device: str = "cpu") -> Rank:
    """Describe this process, which is in a group."""
    rank = dist.get_rank()
    return Rank(rank, dist.get_world_size(), _use_device(rank, device))


def in_ranks(work: Callable[..., Any], config: dict[str, Any]) -> Any:
    """Return rank 0's `work(config)`, run with the `ranks`, `backend` and `device` of `config`.

    If a cell asks for more ranks than this machine has GPUs, it fails with a RankError, and the other cells run.
    """
    device = config["device"].split(":")[0]
    try:
        results = spawn(work, config["ranks"], config, backend=config["backend"], device=device)
    except UserError as error:
        raise RankError(str(error)) from None
    return results[0]


def require_slots(world_size: int, backend: str, device: str) -> None:
    """Raise a UserError if this machine cannot run these ranks."""
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise UserError(f"the number of ranks must be a whole number of at least 1, got {world_size!r}")
    if backend not in ("gloo", "nccl"):
        raise UserError(f"unknown backend {backend!r}; use gloo or nccl")
    if device not in ("cpu", "cuda"):
        raise UserError(f"unknown device {device!r} for ranks; use cpu or cuda")
    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus == 0:
        raise UserError(f"ranks on CUDA GPUs: torch {torch.__version__} sees none; use {arg('device')} cpu")
    if backend == "nccl" and device == "cpu":
        raise UserError("the backend nccl needs CUDA GPUs; use gloo for ranks on the CPU")
    if backend == "nccl" and world_size > gpus:
        raise UserError(
            f"nccl needs a GPU for each of {world_size} ranks, this machine has {gpus}; use gloo, or fewer ranks"
        )


# -- in a rank's process ----------------------------------------------------------------------------------------------


class _Seat(NamedTuple):
    """The place of a spawned rank in its group."""

    rank: int
    world_size: int
    backend: str
    device: str
    timeout: float
    store: str
    stack: Path
    """File to which the rank writes its stack on SIGUSR1."""


class _Answer(NamedTuple):
    ok: bool
    value: Any
    """The pickled result, or the traceback."""


def _serve(seat: _Seat, environment: dict[str, str], connection: Any) -> None:
    """Join the group, then answer requests until the parent closes the connection."""
    gc.freeze()  # a collection would copy the memory that ranks share with the server they are forked from
    _take_over(environment, seat.world_size)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with open(seat.stack, "w") as stack:
        faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
        try:
            # Read before the group is formed: a rank that waits for the others must not block the parent's write.
            request = connection.recv_bytes()
            if sys.platform == "linux":  # ranks of one machine need no network
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            store = dist.FileStore(seat.store, seat.world_size)
            # Above the parent's limit: a rank that waits must still be waiting when the parent asks for its stack.
            with _group(store, seat.rank, seat.world_size, seat.backend, seat.timeout + 2 * GRACE):
                _use_device(seat.rank, seat.device)
                while True:
                    answer = _answer(request)
                    sys.stdout.flush()  # the parent may end this process before Python does
                    connection.send(answer)
                    request = connection.recv_bytes()
        except EOFError:
            pass
        except BaseException:
            connection.send(_Answer(False, traceback.format_exc()))


def _answer(request: bytes) -> _Answer:
    try:
        work, arguments = pickle.loads(request)
        return _Answer(True, pickle.dumps(work(*arguments)))
    except BaseException:
        return _Answer(False, traceback.format_exc())


def _take_over(environment: dict[str, str], world_size: int) -> None:
    """Replace what the process inherits from the fork server by what its caller has."""
    os.environ.clear()
    os.environ.update(environment)
    # Divide the cores among ranks, unless the user has: ranks with a thread per core each wait for one another.
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world_size))).split(",")[0]
    if threads.isdigit() and int(threads) > 0:  # OpenMP ignores other values as well
        torch.set_num_threads(int(threads))
    np.random.seed()  # forked processes would all draw the same numbers


def _exit_with_parent() -> None:
    """End this process when its parent ends, even by SIGKILL."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def _group(store: dist.Store, rank: int, world_size: int, backend: str, timeout: float) -> Iterator[None]:
    limit = timedelta(seconds=max(1.0, timeout))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _use_device(local_rank: int, device: str) -> torch.device:
    if device == "cpu":
        return torch.device("cpu")
    index = local_rank % torch.cuda.device_count()  # several ranks may share a GPU through Gloo
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


# -- in the parent ----------------------------------------------------------------------------------------------------


class _RankProcess(NamedTuple):
    rank: int
    process: Any
    connection: Any
    stack: Path

    def receive(self) -> _Answer:
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):  # the process ended without an answer
            self.process.join(GRACE)
            code = self.process.exitcode
            how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
            return _Answer(False, f"the process {how}\n")


def _collect(processes: list[_RankProcess], deadline: float, timeout: float) -> list[Any]:
    """Wait for the answer of every rank; return the results by rank, or raise RankError."""
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = {process.connection: process for process in processes}
    # A dead rank makes its peers fail too, and they may answer first: the cause is the error that is no connection's.
    while waiting and all(map(is_connection_error, failures.values())):
        ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready and failures:
            break
        if not ready:
            raise RankError(_describe_timeout(list(waiting.values()), len(processes), timeout))
        for connection in ready:
            process = waiting.pop(connection)
            answer = process.receive()
            if answer.ok:
                results[process.rank] = pickle.loads(answer.value)
            else:
                deadline = min(deadline, time.monotonic() + GRACE)
                failures[process.rank] = answer.value
    if failures:
        raise RankError(_describe_failures(failures, len(processes)))
    return [results[rank] for rank in range(len(processes))]


def _describe_failures(failures: dict[int, str], world_size: int) -> str:
    cause, *others = sorted(failures, key=lambda rank: is_connection_error(failures[rank]))
    after = f"\n(then rank {', '.join(map(str, others))} failed too)" if others else ""
    return f"rank {cause} of {world_size} failed:\n{failures[cause].rstrip()}{after}"


def _describe_timeout(late: list[_RankProcess], world_size: int, timeout: float) -> str:
    for process in late:
        if process.process.is_alive():
            os.kill(process.process.pid, signal.SIGUSR1)
    time.sleep(0.5)
    names = ", ".join(str(process.rank) for process in late)
    lines = [f"rank {names} of {world_size} did not end within {timeout:g} s; the stack of each:"]
    for process in late:
        stack = process.stack.read_text().rstrip() if process.stack.exists() else ""
        lines += [f"-- rank {process.rank}", stack or "(no answer)"]
    return "\n".join(lines)
