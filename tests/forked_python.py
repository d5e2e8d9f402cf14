"""A program that takes the place of `python -m module ...` or `python file ...` and has torch imported: its process is
forked.

Programs that start interpreters, torchrun for one, start a small program instead (`Interpreter.path`). It sends its
arguments, environment, working directory and open files to a process that has imported torch and forks, passes signals
on, and ends as the forked process does. In the forked process `sys.executable` is the small program.
"""

import contextlib
import itertools
import json
import multiprocessing.forkserver
import os
import runpy
import select
import signal
import socket
import stat
import struct
import sys
import traceback
from pathlib import Path

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
PROGRAM = """#!{python} -SE
import json, os, signal, socket, struct, sys

server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps([sys.argv, dict(os.environ), os.getcwd()]).encode()
socket.send_fds(server, [struct.pack("!I", len(request))], [0, 1, 2])
server.sendall(request)
for number in {signals}:
    signal.signal(number, lambda number, frame: server.send(bytes([number])))
(code,) = struct.unpack("!i", server.recv(4))
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def start_server() -> None:
    """Start the process of which all others are forked: it has imported what they need, seconds of a core for each."""
    multiprocessing.forkserver.set_forkserver_preload(["torch._dynamo", "tests.distributed.train_cases"])
    multiprocessing.forkserver.ensure_running()


class Interpreter:
    """The process that forks, and the program that asks it to."""

    def __init__(self, folder: Path):
        address = str(folder / "fork")
        self.path = folder / "python"
        self.path.write_text(PROGRAM.format(python=sys.executable, address=address, signals=[*map(int, PASSED_ON)]))
        self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(address)
            server.listen()
            self._process = multiprocessing.get_context("forkserver").Process(
                target=_serve, args=(server,), daemon=True
            )
            self._process.start()

    def __enter__(self) -> "Interpreter":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


def _serve(server: socket.socket) -> None:
    while True:
        client, _ = server.accept()
        if os.fork() == 0:
            server.close()
            os._exit(_answer(client))
        client.close()


def _answer(client: socket.socket) -> int:
    """Fork the process that the program asks for, and stand between them until one has ended."""
    header, files, _, _ = socket.recv_fds(client, 4, 3)
    (length,) = struct.unpack("!I", header)
    request = b""
    while len(request) < length:
        request += client.recv(length - len(request))
    if (pid := os.fork()) == 0:
        client.close()
        os._exit(_run(*json.loads(request), files))
    for file in files:
        os.close(file)
    ended = os.pidfd_open(pid)
    while True:
        ready, _, _ = select.select([client, ended], [], [])
        if ended in ready:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(BrokenPipeError):
                client.send(struct.pack("!i", code))
            return 0
        numbers = client.recv(16)
        for number in numbers or [signal.SIGKILL]:  # the program was killed
            os.kill(pid, number)
        if not numbers:
            return 0


def _run(words: list[str], environment: dict[str, str], folder: str, files: list[int]) -> int:
    """Be `python -m module ...` or `python file ...`; return the exit code."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    multiprocessing.current_process()._config["daemon"] = False  # it may have children, as any program
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.executable, *rest = words
    rest = [*itertools.dropwhile(lambda word: word in ("-u", "-P"), rest)]
    is_module = rest[0] == "-m"
    sys.argv = rest[is_module:]
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    return code
