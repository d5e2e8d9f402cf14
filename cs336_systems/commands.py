"""Runs a command: parses flags into a dataclass, and reports every failure in one line.

Exit codes: 2 for mistakes of the user, 1 for failures of the machine (a full disk), 130 for Ctrl-C.
"""

import contextlib
import errno
import io
import os
import shlex
import signal
import stat
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cs336_systems.config import MARKED, UserError
from cs336_systems.flags import Parser, add_flags, one_line, read_flags

FLAG_OF = {"model_factory": "model"}
"""Argument names whose flag has another name."""

PATH_MISTAKES = (
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
)
"""Errors of the operating system that another path would avoid; they count as mistakes of the user."""


class Interrupted(KeyboardInterrupt):
    """Raised by Ctrl-C in a run that can be resumed; `path` is the file with the finished records."""

    def __init__(self, path: Path):
        super().__init__(str(path))
        self.path = path


def run_command(
    program: str, manual: str | None, arguments: type, function: Callable[[Any], int | None], argv: list[str] | None
) -> int:
    """Run the command of a script that is started by its path."""
    parser = Parser(prog=program, description=manual)
    add_flags(parser, arguments)
    words = sys.argv[1:] if argv is None else argv
    started_by = ["python", sys.argv[0], *words]
    return guarded(program, lambda: function(read_flags(arguments, parser.parse_args(argv))), started_by)


def guarded(program: str, run: Callable[[], int | None], started_by: Sequence[str] = ()) -> int:
    """Call `run` and return its exit code (None: 0); `started_by` are the words of the command that the user gave."""
    _prepare_streams()
    with _plain_warnings(program):
        try:
            return _flushed(run)
        except UserError as error:
            return _fail(program, flags_named(error), 2)
        except Interrupted as stop:
            return _fail(program, _resume_advice(stop.path, started_by), 130)
        except KeyboardInterrupt:
            return _fail(program, "stopped", 130)
        except BrokenPipeError:  # the reader of standard output has exited, as in `| head`
            _discard_output()
            return 0
        except OSError as error:
            return _fail(program, _machine_failure(error), 2 if error.errno in PATH_MISTAKES else 1)
        except MemoryError:
            return _fail(program, "out of memory: this process needs more than the machine, or its limit, allows", 1)
        except RuntimeError as error:
            if type(error).__name__ != "OutOfMemoryError":  # of torch, which is not imported here
                raise
            return _fail(program, ". ".join(str(error).split(". ")[:2]), 1)
        except ModuleNotFoundError as error:
            if (error.name or "cs336_systems").startswith("cs336_systems"):
                raise
            return _fail(program, f"the package {error.name!r} is not installed; pip install {error.name}", 1)


def flags_named(error: UserError) -> str:
    """Return an error message with the fields that it marks written as flags."""
    return MARKED.sub(lambda field: f"--{FLAG_OF.get(field[1], field[1])}", error.marked)


@contextlib.contextmanager
def interrupt_raises() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt inside, so that processes are ended; a second one exits at once."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _resume_advice(path: Path, started_by: Sequence[str]) -> str:
    """Return the command that continues an interrupted run."""
    if not path.exists():
        return "stopped before the first cell was finished; nothing was kept, and the same command starts over"
    words = list(started_by)
    if not any(word == "--output" or word.startswith("--output=") for word in words):
        words += ["--output", str(path)]
    note = " (--force measures the finished ones again)" if "--force" in words else ""
    return f"stopped; the finished cells are kept, and this continues: {shlex.join(words)}{note}"


# -- standard streams -------------------------------------------------------------------------------------------------


def _prepare_streams() -> None:
    """Replace closed standard streams by the null device, and characters that a stream cannot show by `?`.

    The next file to be opened would get the number of a closed stream, and then what is printed would go to that file.
    """
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            with contextlib.suppress(OSError):
                os.fstat(number)
                continue
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            setattr(sys, name, os.fdopen(opened, "r" if number == 0 else "w", encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _flushed(run: Callable[[], int | None]) -> int:
    """Call `run`, then write out what it printed, so that a failure of that is reported, too."""
    try:
        code = run() or 0
    except SystemExit:  # after --help, --version or a mistake in the flags
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return code


def _discard_output() -> None:
    """Send what is still to be printed to the null device."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(program: str, message: str, code: int) -> int:
    with contextlib.suppress(OSError):  # nobody reads standard error: the exit code remains
        print(f"{program}: {one_line(message)}", file=sys.stderr, flush=True)
    return code


@contextlib.contextmanager
def _plain_warnings(program: str) -> Iterator[None]:
    """Show a warning as one line, without the source line that raised it."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"{program}: {one_line(str(message))}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


def _machine_failure(error: OSError) -> str:
    """Return the reason and the file of an error of the operating system, and the remedy where there is one."""
    if isinstance(error, FileNotFoundError) and not _has_current_directory():
        return "the current directory was deleted; change to another one"
    reason = error.strerror or str(error) or type(error).__name__
    remedies = {
        errno.ENOSPC: "; free some space, or choose another place",
        errno.EDQUOT: "; free some space, or choose another place",
        errno.EMFILE: "; raise the limit: ulimit -n",
    }
    remedy = remedies.get(error.errno or 0, "")
    if error.filename is not None:
        return f"{os.fsdecode(error.filename)!r}: {reason}{remedy}"
    if _is_output_blocked():
        _discard_output()
        return f"cannot write to standard output: {reason}"
    return f"{reason}{remedy}"


def _is_output_blocked() -> bool:
    """Return whether standard output, redirected to a file, cannot be written: such an error names no file."""
    try:
        sys.stdout.flush()  # what could not be written is still in its buffer
        if not sys.stdout.isatty() and not stat.S_ISFIFO(os.fstat(sys.stdout.fileno()).st_mode):
            os.write(sys.stdout.fileno(), b"\n")  # with PYTHONUNBUFFERED there is no buffer
    except io.UnsupportedOperation:  # not a file of this process, as in a test
        return False
    except OSError:
        return True
    return False


def _has_current_directory() -> bool:
    try:
        return os.path.isdir(os.getcwd())
    except OSError:
        return False
