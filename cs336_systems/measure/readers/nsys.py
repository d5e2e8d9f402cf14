"""Records the kernels of a step with Nsight Systems (nsys) and reads its SQLite export.

The result has the form of a torch.profiler trace; trace.py explains how a kernel gets its phase and part. The ranges
are NVTX ranges. nsys does not link a kernel of backward to an operator of forward, whose ranges are closed by then, so
the kernels of backward have no part, except those that recompute forward.

Schema: https://docs.nvidia.com/nsight-systems/UserGuide/index.html#sqlite-schema-reference. Times are nanoseconds,
names are indices into a table of strings, and empty tables are omitted. No torch: an export can be read on any machine.
"""

import itertools
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing
from glob import glob
from pathlib import Path
from typing import IO, Any, NamedTuple

from cs336_systems.config import RunConfig, UserError
from cs336_systems.files import LONGEST_NAME, MOST_ITEMS, foreign, limit, require_at_most, require_regular, write_file
from cs336_systems.measure.readers.trace import (
    HALF_NS,
    PHASES,
    UNLIMITED,
    Call,
    Event,
    Kernel,
    Moment,
    Nest,
    Origin,
    Span,
    StreamWait,
    Trace,
    innermost,
    phase_at,
)
from cs336_systems.text import printable

NS = 1e-9
WITHOUT_NSYS = "leave out --nsys to use torch.profiler"
EXPORT = "make one with: nsys export --type sqlite REPORT.nsys-rep"

INSTALLED = ("/usr/local/cuda*/bin/nsys", "/opt/nvidia/nsight-systems*/*/bin/nsys")
"""Default folders of installers that do not extend PATH. (The nsys inside Nsight Compute cannot write reports.)"""
OPTIONS = (
    "--capture-range=cudaProfilerApi",
    "--capture-range-end=stop",
    "--trace=cuda,nvtx",
    "--sample=none",
    "--cpuctxsw=none",
    "--force-overwrite=true",
)
GRACE = 10.0
"""Seconds that nsys has to terminate the program that it runs, and itself."""


def find_nsys() -> str | None:
    """Return the executable on PATH, or in a default folder."""
    installed = [path for pattern in INSTALLED for path in sorted(glob(pattern), reverse=True)]
    return next(filter(None, map(shutil.which, ["nsys", *installed])), None)


# -- recording --------------------------------------------------------------------------------------------------------


def profile_with_nsys(config: RunConfig, *, num_steps: int, folder: Path, nsys: str, timeout: float) -> Trace:
    """Trace `num_steps` steps after the warm-up in a separate process; the report and its export go to `folder`.

    `timeout`: seconds for recording, and again for exporting.
    """
    if config.device_type != "cuda":
        raise UserError(f"nsys records the kernels of a GPU, and the device is {config.device!r}; {WITHOUT_NSYS}")
    folder.mkdir(parents=True, exist_ok=True)
    request, report, export = (folder / name for name in ("nsys_step.json", "nsys.nsys-rep", "nsys.sqlite"))
    write_file(request, json.dumps({"config": config.to_dict(), "num_steps": num_steps}))
    # -P: a file in the working directory must not shadow a standard module or this package
    step = [sys.executable, "-P", "-m", "cs336_systems.measure.nsys_step", str(request)]
    _make(report, [nsys, "profile", *OPTIONS, "-o", str(folder / "nsys"), *step], timeout)
    to_export = ["--type", "sqlite", "--force-overwrite=true", "-o", str(export), str(report)]
    _make(export, [nsys, "export", *to_export], timeout)
    return read_nsys(export, is_own=True)


def _make(made: Path, command: list[str], timeout: float) -> None:
    """Run an nsys command that writes the file `made`."""
    made.unlink(missing_ok=True)  # a file of an earlier run must not be taken for the result
    # Files, not pipes: a process that outlives a killed nsys would hold a pipe open.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=_environment()
            )
        except OSError as error:
            raise UserError(f"cannot run {command[0]!r}: {error.strerror}; {WITHOUT_NSYS}") from None
        code = _exit_code(process, timeout)
        if code == 0 and made.exists():
            return
        if code is None:
            problem = f"did not end in {timeout:g} s"
        else:
            problem = f"ended with exit code {code}" if code else f"made no {made.name}"
        said = _last_line(errors) or _last_line(output)
        raise UserError(f"nsys {command[1]} {problem}{': ' if said else ''}{said}; {WITHOUT_NSYS}")


def _environment() -> dict[str, str]:
    """Return the environment with this package on PYTHONPATH, for where it is not installed."""
    root = str(Path(__file__).resolve().parents[3])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}


def _exit_code(process: subprocess.Popen[bytes], timeout: float) -> int | None:
    """Return the exit code, or None after a timeout; the process has ended in either case."""
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()  # not killed at once: nsys forwards the signal to the program that it runs
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    lines = file.read().decode(errors="replace").strip().splitlines()
    return " ".join(lines[-1].split())[:300] if lines else ""


# -- reading ----------------------------------------------------------------------------------------------------------

_PUSH_POP_RANGE, _DOMAIN_CREATE = 59, 75
"""Types of NVTX events: a push/pop range of a thread; the creation of a domain for a library's own ranges."""
_TEXTS = ("value", "label", "text")
"""Columns of text; all other columns that are read hold integers."""
_STREAM_WAIT, _STREAM_SYNC = 2, 3
"""Types of synchronisation: a stream with an event, the host with a stream."""
LATEST = 2**62
"""Upper bound of times in nanoseconds: 146 years."""
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}


class _Work(NamedTuple):
    """A kernel, copy or fill on a GPU; times in nanoseconds."""

    name: str
    start: int
    end: int
    process: int | None
    correlation: int | None
    """The correlation id of its launch, unique within a process."""
    stream: tuple[int | None, ...]


def read_nsys(path: Path, *, is_own: bool = False) -> Trace:
    """Read the output of `nsys export --type sqlite`; an export made by this process may have any size."""
    name = repr(str(path))
    if not path.exists():
        raise UserError(f"cannot read {name}: no such file; {EXPORT}")
    require_regular(path)
    if not path.stat().st_size:
        raise UserError(f"{name} is empty; {EXPORT}")
    try:
        with foreign(path, "an export of nsys"), closing(_opened(path)) as database:
            if not is_own:
                calls, most = itertools.count(), limit(MOST_INSTRUCTIONS) // 1000
                database.set_progress_handler(lambda: next(calls) > most, 1000)
            _require_whole(database, path)
            return _trace(_Export(database, name, UNLIMITED if is_own else MOST_ITEMS))
    except UserError as error:
        raise UserError(str(error) if EXPORT in str(error) else f"{error}; {EXPORT}") from None


def _opened(path: Path) -> sqlite3.Connection:
    """Open a database read-only, without its journals, and such that nothing stored in it is executed."""
    database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
    database.execute("PRAGMA trusted_schema = OFF")
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_ROW)
    return database


LARGEST_ROW = 1 << 20
"""Maximum bytes of a row or of a text in it; the longest texts are names of kernels."""
MOST_INSTRUCTIONS = 200_000_000
"""Maximum SQLite instructions for all queries, worth seconds of work: tables are read once, from start to end, 20
instructions a row at most. A count, unlike a time limit, does not depend on how busy the machine is."""


def _require_whole(database: sqlite3.Connection, path: Path) -> None:
    """Raise for a truncated file; SQLite itself reads zeros for the missing part of the last page."""
    (pages,), (size,) = (database.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size"))
    if path.stat().st_size < pages * size:
        raise sqlite3.DatabaseError(f"{path.stat().st_size} bytes of {pages * size}")


class _Export:
    """The tables of an export; their columns differ by version of the exporter."""

    def __init__(self, database: sqlite3.Connection, name: str, most_rows: int):
        self._database = database
        self._most = most_rows
        self.name = name
        # Not views, whose queries may be endless, and not virtual tables, which have no page of their own.
        stored = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0")
        self._tables = {row[0] for row in stored}
        recorded = any(table == "NVTX_EVENTS" or table.startswith("CUPTI_") for table in self._tables)
        if "StringIds" not in self._tables or not recorded:
            raise UserError(
                f"{name} was not made by nsys, or nsys recorded nothing: no tables of CUDA and NVTX; {EXPORT}"
            )
        self._strings = self.lookup("StringIds", "value")

    def rows(self, table: str, *columns: str) -> list[Any]:
        """Return the rows of a table, with None for absent columns."""
        if table not in self._tables:
            return []
        present = {row[1] for row in self._database.execute(f'PRAGMA table_info("{table}")')}
        wanted = ", ".join(f'"{column}"' if column in present else "NULL" for column in columns)
        cursor = self._database.execute(f'SELECT {wanted} FROM "{table}"')
        found = list(itertools.islice(cursor, limit(self._most) + 1))
        require_at_most(len(found), self._most, f"rows in {table}")
        kinds = [str if column in _TEXTS else int for column in columns]
        for row in found:
            for value, kind, column in zip(row, kinds, columns, strict=True):
                if value is not None and type(value) is not kind:
                    raise ValueError(f"{table}.{column} holds {value!r:.40}")
        return found

    def timed(self, table: str, *columns: str) -> list[Any]:
        """Return start, end and `columns` of the rows that have both a start and an end."""
        rows = self.rows(table, "start", "end", *columns)
        found = [row for row in rows for start, end, *_ in [row] if start is not None and end is not None]
        for start, end, *_ in found:
            if not -LATEST < start <= end < LATEST:
                raise ValueError(f"a row of {table} lasts from {start} to {end} ns")
        return found

    def lookup(self, table: str, column: str) -> dict[int, str]:
        rows = self.rows(table, "id", column)
        return {number: printable(text[:LONGEST_NAME]) for number, text in rows if text is not None}

    def string(self, *numbers: int | None) -> str | None:
        """Return the first string that exists in the table."""
        return next((self._strings[number] for number in numbers if number in self._strings), None)


def _trace(export: _Export) -> Trace:
    kernels = _kernels(export)
    if not kernels:
        raise UserError(
            f"{export.name} holds no kernels: nothing ran on a GPU during the capture, or nsys could not trace CUDA; "
            f"record again with --trace=cuda,nvtx, or {WITHOUT_NSYS}"
        )
    calls, launches = _calls(export)
    host = _Host(_ranges(export))
    found = []
    for work in sorted([*kernels, *_copies(export), *_fills(export)], key=lambda work: work.start):
        number = launches.get((work.process, work.correlation))
        origin = Origin() if number is None else host.at(Moment(calls[number].start, calls[number].thread))
        times = work.start * NS, (work.end - work.start) * NS
        found.append(Kernel(work.name, *times, *origin, work.stream, number))
    return Trace(found, host.phases, on_gpu=True, calls=calls, waits=_waits(export, calls, launches))


_LAUNCH_COLUMNS = ("globalPid", "correlationId", "deviceId", "streamId")


def _kernels(export: _Export) -> list[_Work]:
    rows = export.timed("CUPTI_ACTIVITY_KIND_KERNEL", *_LAUNCH_COLUMNS, "demangledName", "shortName", "mangledName")
    return [_work(export.string(*row[-3:]) or "kernel without a name", *row[:-3]) for row in rows]


def _copies(export: _Export) -> Iterator[_Work]:
    """Yield copies, named as in torch.profiler: `Memcpy HtoD (Pageable -> Device)`."""
    memory = export.lookup("ENUM_CUDA_MEM_KIND", "label")
    rows = export.timed("CUPTI_ACTIVITY_KIND_MEMCPY", *_LAUNCH_COLUMNS, "copyKind", "srcKind", "dstKind")
    for *launch, kind, source, target in rows:
        between = f"({memory[source]} -> {memory[target]})" if {source, target} <= memory.keys() else ""
        name = " ".join(filter(None, ("Memcpy", _COPIES.get(kind), between)))
        yield _work(name, *launch)


def _fills(export: _Export) -> Iterator[_Work]:
    memory = export.lookup("ENUM_CUDA_MEM_KIND", "label")
    rows = export.timed("CUPTI_ACTIVITY_KIND_MEMSET", *_LAUNCH_COLUMNS, "memKind")
    for *launch, kind in rows:
        yield _work(f"Memset ({memory[kind]})" if kind in memory else "Memset", *launch)


def _work(name: str, start: int, end: int, process: int | None, correlation: int | None, *stream: int | None) -> _Work:
    return _Work(name, start, end, _process(process), correlation, (_process(process), *stream))


_Numbers = dict[tuple[int | None, int | None], int]


def _calls(export: _Export) -> tuple[list[Call], _Numbers]:
    """Return the calls of the runtime and of the driver, and (process, correlation id) -> index of the call."""
    rows = export.timed("CUPTI_ACTIVITY_KIND_RUNTIME", "globalTid", "correlationId", "nameId")
    calls = [
        Call(export.string(name) or "", start * NS, end * NS, thread, _process(thread))
        for start, end, thread, _, name in rows
    ]
    numbers: _Numbers = {(_process(row[2]), row[3]): number for number, row in enumerate(rows)}
    if len({process for process, _ in numbers}) == 1:  # kernels without a process id belong to this one
        numbers |= {(None, correlation): number for (_, correlation), number in numbers.items()}
    return calls, numbers


def _waits(export: _Export, calls: list[Call], numbers: _Numbers) -> list[StreamWait]:
    """Return the events that streams wait for, and add to `calls` the streams that the host waits for."""
    place = ("globalPid", "deviceId", "streamId", "correlationId", "eventId")
    records = defaultdict(list)
    for process, device, stream, correlation, event in export.rows("CUPTI_ACTIVITY_KIND_CUDA_EVENT", *place):
        if (number := numbers.get((_process(process), correlation))) is not None:
            source = (_process(process), device, stream)
            records[_process(process), event].append((calls[number].start, number, source))
    for found in records.values():
        found.sort(key=lambda record: record[0])
    waits = []
    for process, device, stream, correlation, event, kind in export.rows(
        "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", *place, "syncType"
    ):
        number = numbers.get((_process(process), correlation))
        if number is None:
            continue
        where = (_process(process), device, stream)
        if kind == _STREAM_SYNC:
            calls[number] = calls[number]._replace(stream=where)
        elif kind == _STREAM_WAIT:
            of_event = records[_process(process), event]
            before = bisect_left(of_event, calls[number].start, key=lambda record: record[0])
            if before:
                _, record, source = of_event[before - 1]
                waits.append(StreamWait(number, where, record, source))
    return waits


def _ranges(export: _Export) -> list[Span]:
    """Return the NVTX ranges, except those of libraries (NCCL, CUB), which have their own domains."""
    domains = {
        (_process(thread), domain)
        for kind, thread, domain in export.rows("NVTX_EVENTS", "eventType", "globalTid", "domainId")
        if kind == _DOMAIN_CREATE
    }
    return [
        Span(printable((text or export.string(number) or "")[:LONGEST_NAME]), start * NS, end * NS, thread)
        for start, end, kind, thread, domain, text, number in export.timed(
            "NVTX_EVENTS", "eventType", "globalTid", "domainId", "text", "textId"
        )
        if kind == _PUSH_POP_RANGE and (_process(thread), domain) not in domains
    ]


def _process(number: int | None) -> int | None:
    """Return the process of a global thread or process id: bits 24 to 47."""
    return None if number is None else number >> 24 & 0xFFFFFF


class _Host:
    """Finds the phase and part that the host was in at a launch."""

    def __init__(self, ranges: Iterable[Span]):
        self.phases: list[Span] = []
        self._phases: defaultdict[int | None, list[Span]] = defaultdict(list)
        self._parts: defaultdict[int | None, Nest] = defaultdict(Nest)
        for span in sorted(ranges, key=lambda span: (span.start, -span.end)):
            if span.name in PHASES:
                self.phases.append(span)
                self._phases[_process(span.thread)].append(span)
            else:
                self._parts[span.thread].add(Event(span.name, span.start, span.end))

    def at(self, launch: Moment) -> Origin:
        """Return the phase, opened by any thread of the process, and the part, opened by the launching thread."""
        after = launch._replace(time=launch.time + HALF_NS)  # a range that ends at the launch is closed
        part = innermost(self._parts, after)
        return Origin(phase_at(self._phases[_process(launch.thread)], launch.time), part.name if part else None)
