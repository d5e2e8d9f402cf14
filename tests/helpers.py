"""Shared by the tests of the runner, the command line and the architecture."""

import ast
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.cli import main
from cs336_systems.config import ModelConfig, RunConfig, UserError
from cs336_systems.record import CELL_TIME, Environment, Record, load

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "cs336_systems"
CS336 = Path(sys.executable).with_name("cs336")


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file's syntax tree, the module first."""
    return [*ast.walk(ast.parse(path.read_text()))]


@cache
def loaded_at_import(path: Path) -> set[str]:
    """The packages that a module imports when it is imported itself: not those that only its functions import."""
    found, waiting = set(), [nodes(path)[0]]
    while waiting:
        match node := waiting.pop():
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                continue
            case ast.Import(names=names):
                found |= {alias.name.split(".")[0] for alias in names}
            case ast.ImportFrom(module=str(module)):
                found.add(module.split(".")[0])
        waiting.extend(ast.iter_child_nodes(node))
    return found


@cache
def records_of_h200(file: str = "records") -> list[Record]:
    """A file of results/h200: reading it takes a second, and several modules of tests compare with it."""
    return list(load(ROOT / f"results/h200/{file}.jsonl").records)


SHAPE = {"vocab_size": 64, "d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 32}
"""As small as it gets. With the default warm-up of 5 cells share one worker; with less each starts its own."""
TINY = ["--device", "cpu", "--batch_size", "1", "--num_steps", "2", "--context_length", "8"]
TINY += [word for name, value in SHAPE.items() for word in (f"--{name}", str(value))]

MODEL = """
from torch import nn

print("a model that prints as it is imported")

class Model(nn.Module):
    def __init__(self, vocab_size, d_model, outputs):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, d_model)
        self.mix = nn.Linear(d_model, d_model)
        self.head = nn.Linear(d_model, outputs)

    def forward(self, tokens):
        return self.head(self.mix(self.embed(tokens)).relu())

def build(vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta):
    print("and as it is built")
    return Model(vocab_size, d_model, vocab_size)
"""
"""A user's own module: the source of a file to put in the working directory."""


def tiny_config(context_length: int = 8, **fields: Any) -> dict[str, Any]:
    model = ModelConfig(context_length=context_length, **SHAPE)
    return RunConfig(model=model, **{"batch_size": 1, "num_steps": 2, **fields}).to_dict()


CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
"""No GPU also where there is one, and one thread: on a busy machine two spend their time waiting for each other."""


def clean_env(**extra: str) -> dict[str, str]:
    """As a user's shell has it: no PYTHONPATH, no language set."""
    dropped = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "LC_ALL", "LC_MESSAGES", "LANG", "LANGUAGE")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, **CPU_ONLY, **extra}


UNITS = {"flops": "FLOP", "peak_flops": "FLOP/s", "bandwidth": "B/s", "kind": ""}
UNITS |= {"peak_memory": "B", "predicted_memory": "B"}


def entries(
    experiment: str, config: dict[str, Any], metrics: dict[str, Any], status: str, environment: Environment
) -> list[Record]:
    """The records of a cell as the runner writes them: its metrics, then its time; of a failure, only the end."""
    metrics = {**metrics, CELL_TIME: (9.0,)} if status == "ok" else {CELL_TIME: ()}
    return [
        Record(experiment, config, metric, UNITS.get(metric, "s"), tuple(samples), status, environment)
        for metric, samples in metrics.items()
    ]


def execute(
    *command: str | Path, cwd: Path, timeout: float = 240, env: dict[str, str] | None = None, given: str | None = None
) -> subprocess.CompletedProcess[str]:
    """`given`: what it reads from its standard input."""
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        input=given,
        env=clean_env() if env is None else env,
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
        check=False,
    )


def exit_code(argv: list[str]) -> int:
    """Run `cs336 ...` in this process."""
    try:
        return main(argv)
    except SystemExit as exit:
        return exit.code


def files(folder: Path) -> dict[str, bytes]:
    """Contents of all files, by name."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def assert_refused(argv: list[str], named: list[str], capture: Any) -> str:
    """Exit code 2, nothing printed but progress and one line that names what was wrong, no file made or changed.

    `capture`: pytest's capsys or capfd.
    """
    assert Path.cwd() != ROOT, "it would read every file of the repository: use the fixture `elsewhere`"
    before = files(Path.cwd())
    code = exit_code(argv)
    printed = capture.readouterr()
    errors = [line for line in printed.err.splitlines() if not line.endswith(": started")]
    assert (code, printed.out, len(errors)) == (2, "", 1), printed
    assert errors[0].startswith("cs336")
    assert all(word in errors[0] for word in named), errors
    assert files(Path.cwd()) == before
    return errors[0]


def interpret(module: str, runs: list[Any]) -> Any:
    """Run `module` on `runs` under Triton's interpreter, in a process of its own: JSON in, JSON out."""
    env = clean_env(TRITON_INTERPRET="1")
    done = execute(sys.executable, "-m", module, cwd=ROOT, timeout=240, env=env, given=json.dumps(runs))
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def refused(*named: str) -> Iterator[None]:
    """A user error, in one line that has all of `named`."""
    with pytest.raises(UserError) as caught:
        yield
    message = str(caught.value)
    assert all(part in message for part in named), message
    assert len(message.splitlines()) == 1


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for `condition`; True if it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class Marked:
    """A command in a session of its own, whose processes and all they start can be found by a mark they inherit."""

    def __init__(self, command: list[str], cwd: Path, log: Path | None = None, **variables: str):
        """`log`: a file for both outputs; without it, standard error goes to a file in `cwd`."""
        self.mark = f"CS336_TEST_MARK={uuid.uuid4().hex}"
        self.log = log or cwd / "stderr.txt"
        name, value = self.mark.split("=")
        with open(self.log, "w") as file:
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                env=clean_env(**{name: value}, **variables),
                stdout=file if log else subprocess.DEVNULL,
                stderr=file,
                start_new_session=True,
                # A shell's background job ignores Ctrl-C and would pass that on to this process.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def said(self, text: str) -> bool:
        return text in self.log.read_text()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def alive(self) -> list[int]:
        """Process ids that carry the mark; dead ones not yet waited for have no environment left."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.mark.encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found


@contextmanager
def running(command: list[str], cwd: Path) -> Iterator[Marked]:
    """`Marked`, with nothing left of it at the end whatever the test did."""
    marked = Marked(command, cwd)
    try:
        yield marked
    finally:
        for pid in marked.alive():
            os.kill(pid, signal.SIGKILL)
        marked.process.wait(timeout=120)
