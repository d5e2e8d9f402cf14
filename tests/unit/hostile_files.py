"""Hostile and malformed files for every reader, and a program that gives each to its command.

    python -m tests.unit.hostile_files

Valid small files are changed at random places (seeded), or built to exhaust memory, time or a stack. Each must be
answered in one line, in less than 10 s of processor time and 1 GiB, without torch. The program prints what was not, and
exits with 1. `make soak` runs it with the limits that users have, the tests with an eighth of them
(CS336_READ_LIMIT=0.125), on files that are an eighth as large.
"""

import contextlib
import copy
import gzip
import io
import json
import math
import os
import pickle
import random
import sqlite3
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SEED = 336
FACTOR = float(os.environ.get("CS336_READ_LIMIT", "1"))
SLOWEST = 10.0
MOST_MEMORY = 2**30
HUGE = 10**400
ODD: list[Any] = [None, True, "", "x", "\x1b[31mred\x07", -1, -1.5, 1e308, HUGE, float("nan"), float("inf")]
ODD += [float("-inf"), [], {}, [[]], {"a": 1}, "9" * 5000, 2**63, "</script><script>", "=cmd|' /C calc'!A0"]
"""Values that take the place of one in a valid file."""


class Case:
    """A file, the command that reads it, and part of the answer where one answer is right."""

    def __init__(self, name: str, content: bytes | Callable[[Path], object], command: str, expected: str = ""):
        self.name, self.content, self.command, self.expected = name, content, command, expected

    def write(self, folder: Path) -> Path:
        path = folder / self.name
        if callable(self.content):
            self.content(path)
        else:
            path.write_bytes(self.content)
        return path


# -- valid small files ------------------------------------------------------------------------------------------------


WAITED_FOR = {"wait_on_stream": 1, "wait_on_cuda_event_record_corr_id": 9}


def trace() -> dict[str, Any]:
    def event(category: str, name: str, start: float, duration: float, **arguments: Any) -> dict[str, Any]:
        place = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": duration}
        return {**place, "args": arguments}

    events = [
        event("user_annotation", "forward", 0, 100),
        event("cpu_op", "aten::mm", 10, 20, **{"Sequence number": 3}),
        event("cuda_runtime", "cudaLaunchKernel", 12, 2, correlation=7),
        event("cuda_runtime", "cudaEventRecord", 15, 1, correlation=9),
        event("cuda_runtime", "cudaStreamWaitEvent", 17, 1, correlation=10),
        event("cuda_sync", "Stream Wait Event", 17, 1, correlation=10, stream=2, **WAITED_FOR),
        event("kernel", "sgemm_nn", 30, 40, correlation=7),
        event("user_annotation", "backward", 100, 100),
        event("cpu_op", "MmBackward0", 110, 50, **{"Sequence number": 3, "Fwd thread id": 1}),
        event("cuda_runtime", "cudaLaunchKernel", 120, 2, correlation=8),
        {**event("kernel", "sgemm_nt", 130, 40, correlation=8), "tid": 2},
        event("cuda_runtime", "cudaDeviceSynchronize", 125, 50, correlation=11),
        {"ph": "s", "cat": "fwdbwd", "id": 1, "ts": 10, "tid": 1, "name": "fwdbwd"},
        {"ph": "f", "cat": "fwdbwd", "id": 1, "ts": 110, "tid": 1, "name": "fwdbwd"},
    ]
    return {"schemaVersion": 1, "traceEvents": events, "traceName": "x"}


def snapshot() -> dict[str, Any]:
    frames = [{"filename": "/torch/nn.py", "line": 1, "name": "f"}, {"filename": "model.py", "line": 2, "name": "g"}]
    history = [
        {"action": "alloc", "addr": 300, "size": 2**20, "time_us": 1_000_000, "frames": frames},
        {"action": "alloc", "addr": 400, "size": 2**21, "time_us": 2_000_000, "frames": frames},
        {"action": "free_completed", "addr": 300, "size": 2**20, "time_us": 3_000_000, "frames": []},
    ]
    held = [{"address": 100, "size": 512, "requested_size": 500, "state": "active_allocated"}]
    return {"segments": [{"blocks": held, "segment_pool_id": (0, 0)}], "device_traces": [history, []]}


def timeline() -> dict[str, Any]:
    blocks = {"label": [0, 1], "size": [10, 20], "start": [0.0, 0.5], "end": [None, 0.75], "module": [2, 2]}
    words = ["activations", "gradients", ""]
    head = {"format": "cs336 memory timeline", "version": 1, "title": "t", "device": "cpu", "words": words}
    return {**head, "phases": [["forward", 0.0, 1.0]], "blocks": {**blocks, "what": [2, 2], "line": [2, 2]}}


def record() -> dict[str, Any]:
    from cs336_systems.config import RunConfig
    from cs336_systems.record import CELL_TIME, Environment, Record

    made = Record("bench", RunConfig().to_dict(), CELL_TIME, "s", (0.5, 0.25), "ok", Environment(cpu="a processor"))
    return json.loads(made.to_json())


TABLES = {
    "StringIds": ("id INTEGER, value TEXT", [(1, "sgemm_nn"), (2, "forward")]),
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        "start INTEGER, end INTEGER, globalPid INTEGER, correlationId INTEGER, demangledName INTEGER",
        [(100, 200, 1 << 24, 7, 1), (300, 350, 1 << 24, 8, 1)],
    ),
    "CUPTI_ACTIVITY_KIND_RUNTIME": (
        "start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER",
        [(50, 60, (1 << 24) + 5, 7), (70, 80, (1 << 24) + 5, 8)],
    ),
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": (
        "globalPid INTEGER, deviceId INTEGER, streamId INTEGER, correlationId INTEGER, eventId INTEGER, "
        "syncType INTEGER",
        [(1 << 24, 0, 7, 8, 3, 2), (1 << 24, 0, 7, 8, 3, 3)],
    ),
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT": (
        "globalPid INTEGER, deviceId INTEGER, streamId INTEGER, correlationId INTEGER, eventId INTEGER",
        [(1 << 24, 0, 7, 7, 3)],
    ),
    "NVTX_EVENTS": (
        "start INTEGER, end INTEGER, eventType INTEGER, globalTid INTEGER, domainId INTEGER, text TEXT, textId INTEGER",
        [(0, 400, 59, (1 << 24) + 5, 0, "forward", None)],
    ),
}


def database(path: Path, *statements: str, change: tuple[str, int, int, Any] | None = None) -> None:
    """Write an export of nsys with one value changed (table, row, column, value), then run `statements` on it."""
    with contextlib.closing(sqlite3.connect(path)) as made, made:
        for name, (columns, rows) in TABLES.items():
            made.execute(f"CREATE TABLE {name} ({columns.replace(' INTEGER', '').replace(' TEXT', '')})")
            found = [list(row) for row in rows]
            if change is not None and change[0] == name:
                found[change[1]][change[2]] = change[3]
            made.executemany(f"INSERT INTO {name} VALUES ({','.join('?' * len(found[0]))})", found)
        for statement in statements:
            made.execute(statement)


# -- changes ----------------------------------------------------------------------------------------------------------


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside a document."""
    if path:
        yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        yield from places(item, (*path, key))


def changed(document: Any, chance: random.Random) -> Any:
    """Return a copy with one value replaced, removed or repeated."""
    document = copy.deepcopy(document)
    *way, last = chance.choice(list(places(document)))
    parent = document
    for key in way:
        parent = parent[key]
    kind = chance.random()
    if kind < 0.15:
        del parent[last]
    elif kind < 0.2 and isinstance(parent, list):
        parent[last:last] = [parent[last]] * 50
    else:
        parent[last] = chance.choice(ODD)
    return document


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Return the bytes cut off, with some flipped, removed or inserted."""
    at = chance.randrange(len(data))
    match chance.randrange(4):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
        case 2:
            return data[:at] + chance.randbytes(chance.randrange(1, 40)) + data[at:]
    return data[:at] + data[at + chance.randrange(1, 20) :]


def mutations() -> Iterator[Case]:
    chance = random.Random(SEED)
    plain = json.dumps(trace()).encode()
    for number in range(70):
        data = json.dumps(changed(trace(), chance)).encode()
        name, data = (f"t{number}.json", data) if number % 4 else (f"t{number}.json.gz", gzip.compress(data))
        yield Case(name, data, "inspect")
    for number in range(25):
        yield Case(f"td{number}.json", damaged(plain, chance), "inspect")
        yield Case(f"tz{number}.json.gz", damaged(gzip.compress(plain), chance), "inspect")
    for number in range(60):
        yield Case(f"s{number}.pickle", pickle.dumps(changed(snapshot(), chance)), "inspect")
    for number in range(50):
        yield Case(f"sd{number}.pickle", damaged(pickle.dumps(snapshot()), chance), "inspect")
    for number in range(60):
        yield Case(f"m{number}.json.gz", gzip.compress(json.dumps(changed(timeline(), chance)).encode()), "timeline")
    for number in range(20):
        yield Case(f"md{number}.json.gz", damaged(gzip.compress(json.dumps(timeline()).encode()), chance), "timeline")
    line = json.dumps(record()).encode() + b"\n"
    for number in range(70):
        yield Case(f"r{number}.jsonl", json.dumps(changed(record(), chance)).encode() + b"\n" + line, "table")
    for number in range(30):
        yield Case(f"rd{number}.jsonl", damaged(line, chance), "table")
    fields = [(n, r, c) for n, (_, rows) in TABLES.items() for r in range(len(rows)) for c in range(len(rows[0]))]
    values = [None, "x", b"\0", -1, 1.5, 2**63 - 1, -(2**63), "\x1b[31m", "9" * 5000]
    for number in range(60):
        change = (*chance.choice(fields), chance.choice(values))
        yield Case(f"n{number}.sqlite", lambda path, change=change: database(path, change=change), "inspect")
    for number in range(30):
        at = chance.random()
        yield Case(f"nd{number}.sqlite", lambda path, at=at: _flipped(path, at), "inspect")


def replays() -> Iterator[Case]:
    """Changed traces whose dependency graphs are replayed."""
    chance = random.Random(SEED)
    command = "inspect --critical_path --what_if sgemm_*=0 --what_if host=2,sgemm_n?=3us/2 --power_limited"
    for number in range(100):
        data = json.dumps(changed(changed(trace(), chance), chance)).encode()
        yield Case(f"w{number}.json", data, command)
    fields = [(n, r, c) for n, (_, rows) in TABLES.items() for r in range(len(rows)) for c in range(len(rows[0]))]
    for number in range(40):
        change = (*chance.choice(fields), chance.choice([None, -1, 1, 70, 2**63 - 1, -(2**63)]))
        yield Case(f"wn{number}.sqlite", lambda path, change=change: database(path, change=change), command)
    yield Case("streams.json", _many_streams(30_000), command)
    yield Case("graph.json", _one_launch(30_000), command)


def _many_streams(number: int) -> bytes:
    """Kernels on as many streams, each launched by a call of its own, then synchronised with again and again."""
    count = math.ceil(number * FACTOR)
    head = [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": n, "dur": 1, "tid": 1, "pid": 1}
        | {"args": {"correlation": n}}
        for n in range(count)
    ]
    works = [
        {"ph": "X", "cat": "kernel", "name": "sgemm_nn", "ts": 2 * n, "dur": 2 * count, "tid": n, "pid": 0}
        | {"args": {"correlation": n}}
        for n in range(count)
    ]
    syncs = [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": n, "dur": 9, "tid": 1, "pid": 1}
        for n in range(count, 2 * count)
    ]
    return json.dumps({"traceEvents": [*head, *works, *syncs]}).encode()


def _one_launch(number: int) -> bytes:
    """A CUDA graph with a stream for each kernel, twice, and kernels that all start at once."""
    count = math.ceil(number * FACTOR)
    calls = [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": n, "dur": 1, "tid": 1, "pid": 1}
        | {"args": {"correlation": n}}
        for n in (1, 5)
    ]
    works = [
        {"ph": "X", "cat": "kernel", "name": "sgemm_nt", "ts": 10 * n, "dur": 1, "tid": stream, "pid": 0}
        | {"args": {"correlation": n}}
        for n in (1, 5)
        for stream in range(count)
    ]
    return json.dumps({"traceEvents": [*calls, *works]}).encode()


def _flipped(path: Path, at: float) -> None:
    database(path)
    data = bytearray(path.read_bytes())
    start = int(at * len(data))
    data[start : start + 16] = bytes(255 - byte for byte in data[start : start + 16])
    path.write_bytes(data)


# -- built to exhaust -------------------------------------------------------------------------------------------------


def _gzip_of(piece: bytes, times: int, head: bytes = b"") -> Callable[[Path], object]:
    def write(path: Path) -> None:
        with gzip.open(path, "wb", compresslevel=1) as file:
            file.write(head)
            for _ in range(math.ceil(times * FACTOR)):
                file.write(piece)

    return write


def _repeated(piece: bytes, times: int, head: bytes = b"", tail: bytes = b"") -> Callable[[Path], object]:
    def write(path: Path) -> None:
        with path.open("wb") as file:
            file.write(head)
            for _ in range(math.ceil(times * FACTOR)):
                file.write(piece)
            file.write(tail)

    return write


def _sparse(size: int) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        path.touch()
        os.truncate(path, size)

    return write


MIB = 2**20
NOT_READ = "is not read: "
EVENT = b'{"ph":"X","cat":"cpu_op","name":"a","ts":1,"dur":1,"tid":1},'
NESTED = b"".join(
    b'{"ph":"X","cat":"cpu_op","name":"a","ts":%d,"dur":%d,"tid":1},' % (i, 9000 - i) for i in range(3000)
)
VIEW = (
    "CREATE VIEW CUPTI_ACTIVITY_KIND_MEMCPY AS WITH RECURSIVE c(start) AS (SELECT 1 UNION ALL SELECT start + 1 FROM c)"
)
MEMO_BOMB = b"\x80\x02]r\xff\xff\xff\x7f."
BYTES_BOMB = b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"."
LAUGHS = b"\x80\x04]\x94" + b"".join(b"(" + b"h" + bytes([i]) + b"h" + bytes([i]) + b"l" for i in range(30)) + b"."


def many_traces() -> bytes:
    """A snapshot in which one list of events occurs 200,000 times; it has 400 KB."""
    events = [{"action": "alloc", "addr": i, "size": 1, "time_us": i, "frames": []} for i in range(1000)]
    return pickle.dumps({"segments": [], "device_traces": [events] * 200_000}, protocol=4)


def laughs(of: str, name: str) -> bytes:
    """A snapshot in which a value has 2^30 parts, each of them a list that is there twice; it has 400 bytes."""
    document = snapshot()
    value: list[Any] = []
    for _ in range(30):
        value = [value, value]
    event = document["device_traces"][0][1]
    target = event if of == "event" else event["frames"][1]
    target[name] = value
    return pickle.dumps(document)


def same_hash() -> bytes:
    """A dictionary of integers that all have the same hash: 20,000 insertions take 200 million comparisons."""
    keys = b"".join(
        b"\x8a\x0a" + (i * (2**61 - 1)).to_bytes(10, "little") + b"K\x01" for i in range(1, 20_000)
    )  # LONG1, BININT1
    return b"\x80\x02}(" + keys + b"u."


def bombs() -> Iterator[Case]:
    spaces, zeros = b" " * MIB, bytes(MIB)
    yield Case("spaces.json.gz", _gzip_of(spaces, 600), "inspect", NOT_READ)
    yield Case("zeros.json.gz", _gzip_of(zeros, 600), "inspect", "no list of traceEvents")
    yield Case("name.json.gz", _gzip_of(b"x" * MIB, 600, b'{"traceEvents": ["'), "inspect", NOT_READ)
    yield Case("lists.json.gz", _gzip_of(b"[]," * (MIB // 3), 300, b'{"a": ['), "inspect", NOT_READ)
    yield Case("events.json.gz", _gzip_of(EVENT * 5000, 120, b'{"traceEvents": ['), "inspect", NOT_READ)
    yield Case("deep.json", b'{"traceEvents": [' + b"[" * 10**6, "inspect", "is not a trace")
    deep = b'{"traceEvents": [' + NESTED[:-1] + b"]}"
    yield Case("nested.json", deep, "inspect", "levels deep")
    yield Case("sparse.json", _sparse(2**40), "inspect", NOT_READ)
    yield Case("sparse.pickle", _sparse(2**40), "inspect", NOT_READ)
    yield Case("sparse.jsonl", _sparse(2**40), "table", NOT_READ)
    yield Case("sparse.sqlite", _sparse(2**33), "inspect", "sparse.sqlite")
    yield Case("bomb.json.gz", _gzip_of(zeros, 600), "timeline", NOT_READ)
    yield Case("values.json.gz", _gzip_of(b"[]," * (MIB // 3), 60, b'{"a": ['), "timeline", "values.json.gz")
    line = json.dumps(record()).encode()
    yield Case("long.jsonl", _repeated(b"1," * (MIB // 2), 200, b'{"samples": [', line), "table", "more than")
    yield Case("huge.jsonl", _repeated(b"1," * (MIB // 2), 300), "table", NOT_READ)
    yield Case("lists.jsonl", _repeated(b"[" + b"[]," * (MIB // 2) + b"[]]\n", 30), "table", "not a record")
    nest = json.dumps(record()).replace('"size"', '"deep": ' + "[" * 500 + "]" * 500 + ', "size"').encode()
    yield Case("nest.jsonl", nest + b"\n", "table", "levels deep")
    yield Case("torn.jsonl", line + b"\n" + line[:50] + line + b"\n" + line + b"\n", "table", "line 2")
    yield from pickles()
    yield from databases()


def pickles() -> Iterator[Case]:
    yield Case("memo.pickle", MEMO_BOMB, "inspect", "is not a memory snapshot")
    yield Case("bytes.pickle", BYTES_BOMB, "inspect", "is not a memory snapshot")
    yield Case("laughs.pickle", LAUGHS, "inspect", "is not a memory snapshot")
    yield Case("lists.pickle", _repeated(b"]" * MIB, 200, b"\x80\x04"), "inspect", NOT_READ)
    yield Case("marks.pickle", _repeated(b"(" * MIB, 20, b"\x80\x04"), "inspect", "levels deep")
    yield Case("many.pickle", many_traces(), "inspect", NOT_READ)
    for of, name in (("event", "time_us"), ("event", "addr"), ("event", "size"), ("frame", "name"), ("frame", "line")):
        yield Case(f"{name}.pickle", laughs(of, name), "inspect", "is not a memory snapshot")
    yield Case("hash.pickle", same_hash(), "inspect", "a key that is not a text")
    file = "harmed"
    for number, code in enumerate(HOSTILE_CODE):
        yield Case(
            f"code{number}.pickle", code.replace(b"HARMED", file.encode()), "inspect", "is not a memory snapshot"
        )


HOSTILE_CODE = [
    b"cos\nsystem\n(S'touch HARMED'\ntR.",
    b"cposix\nsystem\n(S'touch HARMED'\ntR.",
    b"csubprocess\ncall\n((lS'touch'\naS'HARMED'\natR.",
    b'cbuiltins\neval\n(S\'open("HARMED", "w")\'\ntR.',
    b'cbuiltins\nexec\n(S\'open("HARMED", "w")\'\ntR.',
    b"(S'touch HARMED'\nios\nsystem\n.",
    b"(cos\nsystem\nS'touch HARMED'\no.",
    b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0ctouch HARMED\x85R.",
    b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0ctouch HARMED\x85R.",
    b"\x80\x02cos\nsystem\nX\x0c\x00\x00\x00touch HARMED\x85R.",
    b"\x80\x02}X\x08\x00\x00\x00segmentscos\nsystem\nX\x0c\x00\x00\x00touch HARMED\x85Rs.",
    b"\x80\x02cbuiltins\nobject\n)\x81.",
    b"\x80\x02cbuiltins\ngetattr\ncos\nX\x06\x00\x00\x00system\x86R.",
    b"\x80\x02]cos\nsystem\n(X\x0c\x00\x00\x00touch HARMEDtRa.",
    b"\x80\x02\x82\x01.",
    b"\x80\x02\x83\x01\x00.",
    b"\x80\x02\x84\x01\x00\x00\x00.",
    b"Psome id\n.",
    b"\x80\x02X\x01\x00\x00\x00aQ.",
    b"\x80\x02}}X\x01\x00\x00\x00aK\x01sb.",
    b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93)}\x92.",
    b"\x80\x05\x97.",
    b"\x80\x04\x8c\x0acopyreg\x8c\x10_reconstructor\x93.",
]
"""Pickles that import, call, build or ask for something when they are loaded."""


def databases() -> Iterator[Case]:
    def with_statements(*statements: str) -> Callable[[Path], object]:
        return lambda path: database(path, *statements)

    def numbers(count: int, rest: str) -> str:
        return f"WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < {count}) {rest}"

    kernels = "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL"
    many = f"{kernels} " + numbers(int(600_000 * FACTOR), "SELECT n, n + 1, 0, n, 1 FROM c")
    texts = "INSERT INTO StringIds " + numbers(3, "SELECT n + 9, printf('%.*c', 40000000, 'x') FROM c")
    nested = "INSERT INTO NVTX_EVENTS " + numbers(500, "SELECT n, 9000 - n, 59, 5, 0, 'part', NULL FROM c")
    yield Case("view.sqlite", with_statements(VIEW + " SELECT * FROM c"), "inspect")
    strings = ("DROP TABLE StringIds", "CREATE VIEW StringIds AS SELECT 1 AS id, 'x' AS value")
    yield Case("strings.sqlite", with_statements(*strings), "inspect", "was not made by nsys")
    fts = ("DROP TABLE StringIds", "CREATE VIRTUAL TABLE StringIds USING fts5(id, value)")
    yield Case("virtual.sqlite", with_statements(*fts), "inspect", "was not made by nsys")
    yield Case("many.sqlite", with_statements(many), "inspect", NOT_READ)
    yield Case("texts.sqlite", with_statements(texts), "inspect", "too big")
    yield Case("nested.sqlite", with_statements(nested), "inspect", "levels deep")
    backwards = f"{kernels} VALUES (100, 50, 0, 9, 1)"
    yield Case("backwards.sqlite", with_statements(backwards), "inspect", "lasts from 100 to 50 ns")
    generated = "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (a, start AS (length(hex(zeroblob(99999999)))))"
    yield Case("generated.sqlite", with_statements(generated), "inspect")


def cases() -> list[Case]:
    return [*mutations(), *replays(), *bombs()]


# -- the program ------------------------------------------------------------------------------------------------------


def read_timeline(path: Path) -> int:
    """Load a timeline and write its page, as `cs336 profile` does after a run."""
    from cs336_systems.commands import guarded
    from cs336_systems.report.web.timeline_page import write_page
    from cs336_systems.timeline import Timeline

    return guarded("cs336", lambda: write_page(Timeline.load(path), path.with_suffix(".html")))


def peak_memory() -> int:
    """Return the peak of this program, in bytes. getrusage would count the process that has started it, too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def answer(case: Case, folder: Path) -> str | None:
    """Give a file to its command; return what is wrong with the answer, or None."""
    from cs336_systems.cli import main

    path = case.write(folder)
    out, err = io.StringIO(), io.StringIO()
    start = time.process_time()  # not of the clock: other processes use this machine, too
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: Any = read_timeline(path) if case.command == "timeline" else main([*case.command.split(), str(path)])
        except BaseException:
            code = traceback.format_exc()
    seconds = time.process_time() - start
    memory = peak_memory()
    path.unlink()
    said = err.getvalue()
    if code not in (0, 2) or said.count("\n") != (1 if code else min(said.count("\n"), 2)):
        return f"exit code {code}: {said}"
    if case.expected not in said:
        return f"not {case.expected!r}: {said}"
    if any(ord(char) < 32 and char != "\n" for char in out.getvalue() + said):
        return "control characters in the output"
    if seconds > SLOWEST or memory > MOST_MEMORY:
        return f"{seconds:.1f} s, {memory >> 20} MiB"
    return None


def run(folder: Path) -> int:
    os.chdir(folder)
    tried = cases()
    wrong = {case.name: problem for case in tried if (problem := answer(case, folder))}
    if "torch" in sys.modules:
        wrong["the readers"] = "imported torch"
    if left := [path.name for path in folder.iterdir() if path.suffix != ".html"]:
        wrong["left over"] = ", ".join(left)
    for name, problem in wrong.items():
        print(f"{name}: {problem}")
    print(f"{len(tried)} files, {len(wrong)} not answered as they should be, {peak_memory() >> 20} MiB")
    return 1 if wrong else 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(run(Path(folder)))
