"""Reads files that users name, writes files whole or not at all, and explains why neither is possible.

A file that someone else made may hold anything. `foreign` is the guard around every reader of one: it limits memory and
turns whatever goes wrong into one line that names the file. Standard library only.
"""

import contextlib
import errno
import gc
import gzip
import io
import json
import os
import reprlib
import secrets
import stat
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cs336_systems.config import UserError, arg

MACHINE_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that another path would not have avoided, or not for long."""

# -- limits of foreign files ------------------------------------------------------------------------------------------

LARGEST_FILE = 256 << 20
"""Bytes of a file, and bytes after decompression. Traces and snapshots of a few steps have up to 200 MB; parsing this
much takes 5 s. A gzip file of 6 MB can hold 6 GB."""
LARGEST_VALUE = 16 << 20
"""Bytes of one line of records or one event of a trace; real ones have up to 10 KB."""
MOST_ITEMS = LARGEST_FILE // 512
"""Events, rows or blocks of a file. Half a million take 8 s; an event of a real trace has about 512 bytes."""
MOST_MEMORY = 768 << 20
"""Bytes by which a reader may grow this process, which then stays below 1 GiB."""
LONGEST_NAME = 4000
"""Characters of a name that are kept; kernels of C++ templates have names of up to 2,000."""

RAISED_BY = "CS336_READ_LIMIT"
"""The environment variable that multiplies these limits."""


class LimitError(ValueError):
    """A file exceeds one of the limits."""


def limit(value: int) -> int:
    """Return a limit, multiplied by what the user has set."""
    text = os.environ.get(RAISED_BY, "1")
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0 < factor <= 1e6:
        raise UserError(f"{RAISED_BY}={text!r} must be a number above 0, such as 4")
    return int(value * factor)


def require_at_most(count: int, most: int, what: str) -> None:
    """Raise LimitError for more than `most` of something, such as "bytes"; `most` is before multiplication."""
    if count > limit(most):
        raise LimitError(f"it has more than {limit(most):,} {what}")


@contextlib.contextmanager
def foreign(path: Path, what: str, repair: str = "") -> Iterator[None]:
    """Read and check a file that may hold anything; any failure inside is a UserError that says it is not `what`.
    `repair`: what to do about a damaged file."""
    name, way_out = repr(str(path)), f"; {repair}" if repair else ""
    try:
        with all_kept(), _limited_memory():
            yield
    except UserError:
        raise
    except LimitError as error:
        raise _too_large(path, error) from None
    except MemoryError:
        raise _too_large(path, f"it needs more than {limit(MOST_MEMORY) >> 20} MiB of memory") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{name} is cut off: {error}{way_out}") from None
    except OSError as error:
        raise read_failure(error, path) from None
    except Exception as error:  # a damaged file can raise any exception
        reason = f"it has no {reason_of(error)}" if isinstance(error, KeyError) else reason_of(error)
        raise UserError(f"{name} is not {what}, or is cut off: {reason}{way_out}") from None


def _too_large(path: Path, reason: LimitError | str) -> UserError:
    return UserError(f"{str(path)!r} is not read: {reason}; {RAISED_BY}=4 raises all limits fourfold")


def reason_of(error: BaseException) -> str:
    """Return the message of an error as one line that is not long, or else its type."""
    return " ".join(str(error).split())[:200] or type(error).__name__


@contextlib.contextmanager
def all_kept() -> Iterator[None]:
    """Disable garbage collection while a large file is read: its millions of small objects are all kept, and searching
    them for garbage takes a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
    """Let allocations beyond MOST_MEMORY fail with MemoryError, on Linux.

    Not where torch is loaded: threads of its libraries allocate, too. Commands that read foreign files do not load it.
    """
    if sys.platform != "linux" or "torch" in sys.modules:
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    lowest = min(used + limit(MOST_MEMORY), *(bound for bound in before if bound != resource.RLIM_INFINITY), 2**62)
    resource.setrlimit(resource.RLIMIT_AS, (lowest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# -- reading ----------------------------------------------------------------------------------------------------------


def read_input(path: Path, most: int = LARGEST_FILE) -> bytes:
    """Return the bytes of a file, or of a pipe such as `<(zcat records.gz)`; raise UserError if that is not possible.

    A FIFO without a writer and a device would block for ever.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise read_failure(error, path) from None
    try:
        status = os.fstat(descriptor)
        _require_kind(path, status.st_mode, stat.S_IFREG, stat.S_IFIFO)
        require_at_most(status.st_size, most, "bytes")
        first = _first_byte(descriptor, path) if stat.S_ISFIFO(status.st_mode) else b""
        with open(descriptor, "rb", closefd=False) as file:
            return file.read() if status.st_size else first + b"".join(_pieces(file, most))
    except LimitError as error:
        raise _too_large(path, error) from None
    except OSError as error:
        raise read_failure(error, path) from None
    finally:
        os.close(descriptor)


def decompressed(data: bytes, most: int = LARGEST_FILE) -> Iterator[bytes]:
    """Return the bytes of a file in pieces, decompressed if it is a gzip file; raise LimitError beyond the limit."""
    source = io.BytesIO(data)
    stream: Any = gzip.GzipFile(fileobj=source) if data[:2] == b"\x1f\x8b" else source
    return _pieces(stream, most)


def _pieces(stream: Any, most: int) -> Iterator[bytes]:
    total = 0
    while piece := stream.read(1 << 20):
        total += len(piece)
        require_at_most(total, most, "bytes")
        yield piece


def read_json(path: Path, most: int) -> Any:
    """Return the value of a JSON file that may be gzipped."""
    return json.loads(b"".join(decompressed(read_input(path, most), most)))


def json_problem(error: Exception) -> str:
    """Return what is wrong with a line of JSON lines; the library's message has the number of a line of its own."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
    return reason_of(error)


def is_number(value: Any, least: float = -1e18, most: float = 1e18) -> bool:
    """Return whether a value of a file is a finite number in these bounds; an integer of 400 digits is not."""
    return type(value) in (int, float) and least <= value <= most


def shown(value: Any) -> str:
    """Return a value of a file for a message. The repr of a small pickle may have gigabytes: lists can be shared."""
    return reprlib.repr(value)[:40]


def _first_byte(descriptor: int, path: Path) -> bytes:
    """Return the first byte of a pipe, or none if its writer is not ready yet; the rest can be read by blocking."""
    first = None
    with contextlib.suppress(BlockingIOError):
        first = os.read(descriptor, 1)
    if first == b"":
        raise UserError(f"cannot read {str(path)!r}: it is a pipe that nothing is written to")
    os.set_blocking(descriptor, True)
    return first or b""


def require_shallow(value: Any, levels: int, what: str) -> None:
    """Raise ValueError for a value of a JSON file that is nested more deeply, or has an integer that no float holds."""
    inside = [value]
    for _ in range(levels):
        inside = [
            part
            for whole in inside
            if isinstance(whole, dict | list)
            for part in (whole.values() if isinstance(whole, dict) else whole)
        ]
        if any(isinstance(part, int) and not -1e300 < part < 1e300 for part in inside):
            raise ValueError(f"{what} has an integer of more than 300 digits")
    if any(isinstance(part, dict | list) for part in inside):
        raise ValueError(f"{what} is nested more than {levels} levels deep")


def open_regular(path: Path, flags: int = os.O_RDONLY, *, follow_links: bool = False) -> int:
    """Open a regular file and return its descriptor; raise OSError for a link or a FIFO, which is not waited for."""
    flags |= os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0) | (0 if follow_links else getattr(os, "O_NOFOLLOW", 0))
    try:
        descriptor = os.open(path, flags, 0o644)
    except OSError as error:
        reason = "it is a symbolic link" if error.errno == errno.ELOOP and path.is_symlink() else error.strerror
        raise OSError(error.errno, reason, str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


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


def _require_kind(path: Path, mode: int, *kinds: int) -> None:
    if stat.S_IFMT(mode) not in kinds:
        names = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise UserError(f"cannot read {str(path)!r}: it is {names.get(stat.S_IFMT(mode), 'a device')}, not a file")


# -- writing ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a new file in the folder of `path` to write to; it replaces `path` at the end, unless there was an error.

    A process that is killed, or a full disk, leaves the old file as it was.
    """
    path = Path(os.path.realpath(path))  # a link stays one
    if path.exists() and not path.is_file():  # /dev/stdout, a pipe: nothing to replace
        yield path
        return
    fresh = path.with_name(f".tmp-{os.getpid()}-{secrets.token_hex(4)}{path.suffix}")
    try:
        fresh.touch()
        mode = stat.S_IMODE((path if path.exists() else fresh).stat().st_mode)
        yield fresh
        with open(fresh, "rb+") as file:
            os.fchmod(file.fileno(), mode)  # a library may have made another file, for the owner alone
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # not the name that nobody knows
    finally:
        fresh.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Force the names of a folder's files to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Make a folder and its parents; at the end, remove those that were made here and are still empty."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        with contextlib.suppress(OSError):  # one that is not empty, and so none of its parents
            for path in missing:
                path.rmdir()


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file, whole or not at all; characters that have no UTF-8 are replaced by `?`."""
    with replacing(path) as fresh:
        fresh.write_bytes(content.encode("utf-8", "replace") if isinstance(content, str) else content)


def append_lines(path: Path, data: bytes) -> None:
    """Append whole lines in one write and force them to disk; a failed append leaves the file as it was.

    A torn last line, which a killed writer left, is cut off first. Two writers wait for each other.
    """
    descriptor = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, follow_links=True)
    try:
        _wait_for_writers(descriptor)
        size = _whole_lines(descriptor)
        if size < os.fstat(descriptor).st_size:
            os.ftruncate(descriptor, size)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        except OSError:
            with contextlib.suppress(OSError):  # then the next writer cuts off what is left
                os.ftruncate(descriptor, size)
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # such as a full disk: of which file
    finally:
        os.close(descriptor)


def _wait_for_writers(descriptor: int) -> None:
    """Lock a file against other processes that append to it, until it is closed.

    This kind of lock is independent of `locked`, which a run holds on its file of records while it appends to it.
    """
    with contextlib.suppress(ImportError):  # no such locks on Windows
        import fcntl

        end = time.monotonic() + 10  # a writer that is stopped in the middle must not stop this one, too
        while True:
            try:
                return fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                if time.monotonic() > end:
                    raise OSError(errno.EBUSY, "another process has been writing to it for 10 s") from None
                time.sleep(0.01)


def _whole_lines(descriptor: int) -> int:
    """Return the bytes up to the end of the last whole line."""
    end = os.fstat(descriptor).st_size
    while end:
        begin = max(0, end - (1 << 16))
        found = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0


@contextlib.contextmanager
def locked(path: Path, *, follow_links: bool = False) -> Iterator[None]:
    """Hold the lock of a file, which is created if it is not there and never changed; BlockingIOError if it is held."""
    try:
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT, follow_links=follow_links)
    except OSError as error:
        raise OSError(error.errno, f"{path.name}: {error.strerror}", str(path)) from None
    try:
        with contextlib.suppress(ImportError):  # no such locks on Windows
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def write_failure(error: OSError, path: str | Path, *, is_flag: bool = True) -> Exception:
    """Return the error to raise in place of one that came up while writing to `path`: a mistake of the user, such as a
    folder without permission, or a failure of the machine, such as a full disk.

    `is_flag` says that the path is the value of --output, and not an operand of the command.
    """
    if error.errno in MACHINE_FAILURES:
        return OSError(error.errno, error.strerror, str(path))
    way_out = f"choose another {arg('output') if is_flag else 'place'}"
    return UserError(f"cannot write to {str(path)!r}: {error.strerror or error}; {way_out}")
