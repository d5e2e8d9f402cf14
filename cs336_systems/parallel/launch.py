"""Starts ranks: processes of this machine (`spawn`), or the ones that torchrun has started (`process_group`).

    def work(scale):  # at the top level of a module: it is sent to other processes by name
        t = torch.full((3,), scale * dist.get_rank())
        dist.all_reduce(t)
        return t

    spawn(work, 2, 10.0)  # what each rank returned: [tensor([10., 10., 10.]), tensor([10., 10., 10.])]

A rank that fails ends all the others, and its traceback is what the caller sees. When the time is over every rank says
where it stands. No port is chosen here: ranks of one machine meet through a file.
"""

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cs336_systems.config import UserError

TIMEOUT = 600.0
"""Seconds that `spawn` gives its ranks, unless told otherwise."""
LAST_WORDS = 2.0
"""Seconds in which ranks may say where they stand, or why they ended, before they are killed."""
LOOKS_EVERY = 0.3
"""Seconds between two looks whether a rank has lost its peers."""


@dataclass(frozen=True)
class Rank:
    """Which of the processes this is, and the device that is its own."""

    rank: int
    world_size: int
    device: torch.device


class RankError(RuntimeError):
    """A rank failed, died or took too long; the message has its traceback."""


def spawn(
    work: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    backend: str = "gloo",
    device: str = "cpu",
    timeout: float = TIMEOUT,
) -> list[Any]:
    """Call `work(*arguments)` in `world_size` new processes that form a process group; what they returned, by rank."""
    require_slots(world_size, backend, device)
    # Ranks are forked from a process that has torch and nothing else: importing it takes seconds of each core.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="cs336-ranks-") as folder:
        ranks = []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            where = (rank, world_size, backend, device, timeout, folder, dict(os.environ))
            process = context.Process(target=_serve, args=(where, work, arguments, sender), daemon=True)
            process.start()
            sender.close()
            ranks.append(_Running(rank, process, receiver, Path(folder) / f"stack-{rank}"))
        try:
            return _collect(ranks, deadline, timeout)
        finally:
            for running in ranks:
                running.process.kill()
                running.process.join()
                running.receiver.close()


@contextlib.contextmanager
def process_group(backend: str | None = None, device: str | None = None, timeout: float = TIMEOUT) -> Iterator[Rank]:
    """The group of torchrun's ranks, or of this process alone where torchrun is not at work; destroyed at the end.

    Ranks use NCCL, and a GPU each, where there are GPUs enough; else Gloo. `timeout`: seconds that a collective may
    take before its ranks are told that a peer is missing. RankError, which names it, where one is.
    """
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    rank, world_size, local_rank, local_size = _places() if by_torchrun else (0, 1, 0, 1)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if backend is None:
        backend = "nccl" if device == "cuda" and local_size <= torch.cuda.device_count() else "gloo"
    require_slots(local_size, backend, device)
    store = _torchrun_store(rank, world_size, timeout) if by_torchrun else dist.HashStore()
    with _group(store, rank, world_size, backend, timeout), _Peers(store, rank, world_size) as peers:
        try:
            yield Rank(rank, world_size, _device_of(local_rank, device))
        except RuntimeError as error:
            if world_size == 1 or not _is_echo(str(error)):
                raise
            raise RankError(peers.who_is_gone()) from error


def this_rank(device: str = "cpu") -> Rank:
    """Of a process that is in a group."""
    rank = dist.get_rank()
    return Rank(rank, dist.get_world_size(), _device_of(rank, device))


def in_ranks(work: Callable[..., Any], config: dict[str, Any]) -> Any:
    """Rank 0's answer to `work(config)`, in the `ranks` of `config`, on its `backend` and `device`.

    A grid of an experiment may ask for more ranks than this machine has GPUs: that cell fails, the others go on.
    """
    device = config["device"].split(":")[0]
    try:
        answers = spawn(work, config["ranks"], config, backend=config["backend"], device=device)
    except UserError as error:
        raise RankError(str(error)) from None
    return answers[0]


def require_slots(world_size: int, backend: str, device: str) -> None:
    """UserError for ranks that this machine cannot hold."""
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise UserError(f"the number of ranks must be a whole number of at least 1, got {world_size!r}")
    if backend not in ("gloo", "nccl"):
        raise UserError(f"unknown backend {backend!r}; use gloo or nccl")
    if device not in ("cpu", "cuda"):
        raise UserError(f"unknown device {device!r} for ranks; use cpu or cuda")
    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus == 0:
        raise UserError(f"ranks on CUDA GPUs: torch {torch.__version__} sees none; use --device cpu")
    if backend == "nccl" and device == "cpu":
        raise UserError("the backend nccl needs CUDA GPUs; use gloo for ranks on the CPU")
    if backend == "nccl" and world_size > gpus:
        raise UserError(f"nccl wants a GPU for each of {world_size} ranks, this machine has {gpus}; use gloo, or fewer")


# -- in a rank's process ----------------------------------------------------------------------------------------------


def _serve(where: tuple, work: Callable[..., Any], arguments: tuple, sender: Any) -> None:
    rank, world_size, backend, device, timeout, folder, environment = where
    _as_if_new(environment, world_size)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with open(Path(folder) / f"stack-{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
        answer: tuple[bool, Any]
        try:
            if sys.platform == "linux":  # ranks of one machine need no network
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            store = dist.FileStore(f"{folder}/store", world_size)
            # Longer than the parent waits: a rank that is kept waiting is to be found so when the time is over.
            with _group(store, rank, world_size, backend, timeout + 2 * LAST_WORDS):
                _device_of(rank, device)
                # By value: tensors sent through shared memory would be gone with this process.
                answer = True, pickle.dumps(work(*arguments))
        except BaseException:
            answer = False, traceback.format_exc()
        sender.send(answer)


def _as_if_new(environment: dict[str, str], world_size: int) -> None:
    """What a process takes over from the one it is forked from, and should have from its caller."""
    os.environ.clear()
    os.environ.update(environment)
    # Share the cores out, unless the user has: ranks that all start a thread per core wait for each other.
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world_size))).split(",")[0]
    if threads.isdigit() and int(threads) > 0:  # OpenMP, which has read the variable already, passes over others too
        torch.set_num_threads(int(threads))
    np.random.seed()  # else all ranks draw the same


def _end_with_parent() -> None:
    """A parent that is killed cannot end its ranks: they would wait, or compute, for nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def _group(store: dist.Store, rank: int, world_size: int, backend: str, timeout: float) -> Iterator[None]:
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=max(1.0, timeout))
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _device_of(local_rank: int, device: str) -> torch.device:
    if device == "cpu":
        return torch.device("cpu")
    index = local_rank % torch.cuda.device_count()  # several ranks may share a GPU through Gloo
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _places() -> tuple[int, int, int, int]:
    """Rank and world size, of all machines and of this one. torchrun sets all of them, so none is guessed."""
    world_size, local_size = (_environment(name, least=1) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    rank = _environment("RANK", least=0, below=world_size)
    return rank, world_size, _environment("LOCAL_RANK", least=0, below=local_size), local_size


def _torchrun_store(rank: int, world_size: int, timeout: float) -> dist.Store:
    """torchrun restarts its workers on the same store, where the addresses of dead ranks are still written (torch 2.13:
    three of four restarts fail under Gloo). So every attempt writes under a name of its own."""
    address, port = os.environ.get("MASTER_ADDR", ""), _environment("MASTER_PORT", least=1, below=1 << 16)
    attempt = _environment("TORCHELASTIC_RESTART_COUNT", 0, least=0)
    if not address:
        raise UserError("the environment variable MASTER_ADDR is not set; torchrun sets it")
    try:
        socket.getaddrinfo(address, port)
    except OSError as error:  # torch would try again and again, for as long as it may wait
        raise UserError(f"no rendezvous at MASTER_ADDR {address!r}: {error.strerror}") from None
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            address, port, world_size, is_master=rank == 0 and not of_agent, timeout=timedelta(seconds=timeout)
        )
    except RuntimeError as error:  # torch's DistNetworkError is one
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"no rendezvous at MASTER_ADDR {address!r}, MASTER_PORT {port}: {reason}") from None
    return dist.PrefixStore(f"attempt-{attempt}", store)


class _Peers:
    """What ranks tell each other, by way of the store, when one of them is gone.

    A dead rank breaks the connections of its neighbours only; the others wait for these until their time is over, and
    would be taken for dead as well. So each has a thread that answers while it computes or waits, and that learns what
    the first to notice has found: the store may be gone with it.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int):
        self.store, self.rank, self.world_size = store, rank, world_size
        self.gone = ""
        """Who is, as one of the others has found."""
        self._over = threading.Event()

    def __enter__(self) -> "_Peers":
        if self.world_size > 1:
            # Over a connection of its own: a call that waits holds the other.
            own: Any = self.store
            threading.Thread(target=self._listen, args=(own.clone(),), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _listen(self, store: dist.Store) -> None:
        with contextlib.suppress(RuntimeError):  # the process that keeps the store has ended
            while not self._over.wait(LOOKS_EVERY):
                if store.check(["call"]):
                    store.set(f"here-{self.rank}", "yes")
                if store.check(["gone"]):
                    self.gone = store.get("gone").decode()
                    return

    def who_is_gone(self) -> str:
        """Of ranks whose connections broke: those that do not answer; where all do, those that do not end as this."""
        try:
            found = self.gone or self._call()
            if found:
                self.store.set("gone", found)
                time.sleep(3 * LOOKS_EVERY if self.rank == 0 else 0.0)  # it may keep the store: let others look
        except RuntimeError:
            found = self.gone
            if not found:
                return (
                    f"rank {self.rank} of {self.world_size} lost its peers, and the process at MASTER_ADDR that knew "
                    f"of all is gone, too"
                )
        if not found:
            return (
                f"rank {self.rank} of {self.world_size} lost a connection, though all ranks are there: "
                f"look at the network"
            )
        return f"rank {found} of {self.world_size} died or does not answer; rank {self.rank} stops"

    def _call(self) -> str:
        until = time.monotonic() + LAST_WORDS
        for key in (f"here-{self.rank}", f"ended-{self.rank}", "call"):
            self.store.set(key, "yes")
        dead = silent = list(range(self.world_size))
        while silent and time.monotonic() < until and not self.gone:
            dead = [rank for rank in dead if not self.store.check([f"here-{rank}"])]
            silent = [rank for rank in silent if not self.store.check([f"ended-{rank}"])]
            time.sleep(0.05)
        return self.gone or ", ".join(map(str, dead or silent))


def _environment(name: str, default: int | None = None, *, least: int, below: int | None = None) -> int:
    """A whole number that torchrun has set."""
    value = os.environ.get(name, "" if default is None else str(default))
    if not value:
        raise UserError(f"the environment variable {name} is not set; torchrun sets it")
    try:
        number = int(value)
    except ValueError:
        raise UserError(f"the environment variable {name} must be a whole number, got {value!r}") from None
    if number < least or (below is not None and number >= below):
        bound = f" and below {below}" if below is not None else ""
        raise UserError(f"the environment variable {name} must be at least {least}{bound}, got {number}")
    return number


# -- in the parent ----------------------------------------------------------------------------------------------------


@dataclass
class _Running:
    rank: int
    process: Any
    receiver: Any
    stack: Path


def _collect(ranks: list[_Running], deadline: float, timeout: float) -> list[Any]:
    world_size = len(ranks)
    results: dict[int, Any] = {}
    waiting = {running.receiver: running for running in ranks}
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(_out_of_time(list(waiting.values()), world_size, timeout))
        failures = []
        for receiver in ready:
            running = waiting.pop(receiver)
            good, answer = _answer_of(running)
            if good:
                results[running.rank] = pickle.loads(answer)
            else:
                failures.append((running.rank, answer))
        if failures:
            raise RankError(_first_cause(failures, waiting, world_size))
    return [results[rank] for rank in range(world_size)]


def _answer_of(running: _Running) -> tuple[bool, Any]:
    try:
        return running.receiver.recv()
    except EOFError:  # gone without a word
        running.process.join(LAST_WORDS)
        code = running.process.exitcode
        cause = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
        return False, f"it {cause}\n"


def _first_cause(failures: list[tuple[int, str]], waiting: dict, world_size: int) -> str:
    """A dead rank makes its peers fail too, and they may be heard first: wait a moment for the one without a word, or
    whose error is not that of a lost connection."""
    until = time.monotonic() + LAST_WORDS
    while waiting and time.monotonic() < until and all(_is_echo(text) for _, text in failures):
        for receiver in multiprocessing.connection.wait(list(waiting), max(0.0, until - time.monotonic())):
            running = waiting.pop(receiver)
            good, answer = _answer_of(running)
            if not good:
                failures.append((running.rank, answer))
    failures.sort(key=lambda failure: _is_echo(failure[1]))
    rank, text = failures[0]
    others = ", ".join(str(other) for other, _ in failures[1:])
    after = f"\n(then rank {others} failed too)" if others else ""
    return f"rank {rank} of {world_size} failed:\n{text.rstrip()}{after}"


def _is_echo(text: str) -> bool:
    """Whether an error only says that a peer is gone."""
    return any(words in text for words in ("Connection closed", "Connection reset", "Timed out", "gloo/transport"))


def _out_of_time(late: list[_Running], world_size: int, timeout: float) -> str:
    for running in late:
        if running.process.is_alive():
            os.kill(running.process.pid, signal.SIGUSR1)
    time.sleep(min(LAST_WORDS, 0.5))
    names = ", ".join(str(running.rank) for running in late)
    lines = [f"rank {names} of {world_size} did not end within {timeout:g} s; where each stands:"]
    for running in late:
        said = running.stack.read_text().rstrip() if running.stack.exists() else ""
        lines += [f"-- rank {running.rank}", said or "(no answer)"]
    return "\n".join(lines)
