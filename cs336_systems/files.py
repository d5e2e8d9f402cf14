"""Reads files that users name, and explains why one cannot be read or written. Standard library only."""

import contextlib
import errno
import os
import stat
from pathlib import Path

from cs336_systems.config import UserError

MACHINE_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that another path would not have avoided, or not for long."""


def read_input(path: Path) -> bytes:
    """Return the bytes of a file, or of a pipe such as `<(zcat records.gz)`; raise UserError if that is not possible.

    A FIFO without a writer and a device would block for ever.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise read_failure(error, path) from None
    try:
        mode = os.fstat(descriptor).st_mode
        _require_kind(path, mode, stat.S_IFREG, stat.S_IFIFO)
        first = _first_byte(descriptor, path) if stat.S_ISFIFO(mode) else b""
        with open(descriptor, "rb", closefd=False) as file:
            return first + file.read()
    except OSError as error:
        raise read_failure(error, path) from None
    finally:
        os.close(descriptor)


def _first_byte(descriptor: int, path: Path) -> bytes:
    """Return the first byte of a pipe, or none if its writer is not ready yet; the rest can be read by blocking."""
    first = None
    with contextlib.suppress(BlockingIOError):
        first = os.read(descriptor, 1)
    if first == b"":
        raise UserError(f"cannot read {str(path)!r}: it is a pipe that nothing is written to")
    os.set_blocking(descriptor, True)
    return first or b""


def require_regular(path: Path) -> None:
    """Raise UserError for a path that is not a regular file; for libraries that open the path themselves."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise read_failure(error, path) from None
    _require_kind(path, mode, stat.S_IFREG)


def read_failure(error: OSError, path: str | Path) -> UserError:
    """Return the error to raise in place of one that came up while reading `path`."""
    return UserError(f"cannot read {str(path)!r}: {error.strerror or error}")


def write_failure(error: OSError, path: str | Path) -> Exception:
    """Return the error to raise in place of one that came up while writing to `path`: a mistake of the user, such as a
    folder without permission, or a failure of the machine, such as a full disk."""
    if error.errno in MACHINE_FAILURES:
        return OSError(error.errno, error.strerror, str(path))
    return UserError(f"cannot write to {str(path)!r}: {error.strerror or error}; choose another output", "output")


def _require_kind(path: Path, mode: int, *kinds: int) -> None:
    if stat.S_IFMT(mode) not in kinds:
        names = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise UserError(f"cannot read {str(path)!r}: it is {names.get(stat.S_IFMT(mode), 'a device')}, not a file")
