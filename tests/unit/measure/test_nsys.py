"""Kernels recorded by Nsight Systems, with synthetic exports and a shell script in place of nsys."""

import json
import os
import re
import sqlite3
import sys
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from cs336_systems.config import RunConfig, UserError
from cs336_systems.measure.readers import nsys
from cs336_systems.measure.readers.kernel_classes import COPY, SOFTMAX
from cs336_systems.measure.readers.nsys import find_nsys, profile_with_nsys, read_nsys
from tests.helpers import tiny_config

WORK = "start, end, deviceId, contextId, streamId, correlationId, globalPid"
SCHEMA = f"""
PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
CREATE TABLE ENUM_CUDA_MEM_KIND (id INTEGER PRIMARY KEY, label TEXT);
CREATE TABLE NVTX_EVENTS (start, end, eventType, text TEXT, globalTid, textId, domainId);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, correlationId);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({WORK}, demangledName, shortName, mangledName);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY ({WORK}, copyKind, srcKind, dstKind);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET ({WORK}, memKind);
INSERT INTO ENUM_CUDA_MEM_KIND VALUES (0, 'Pageable'), (2, 'Device');
"""
"""The tables of exporter version 3.16 (nsys 2024.6), without unused columns."""
MACHINE = 1 << 48
PUSH_POP, START_END, MARK, DOMAIN = 59, 60, 34, 75
HOST_TO_DEVICE, PAGEABLE, DEVICE = 1, 0, 2


class Recording:
    """Writes an export. Times in microseconds; processes and threads are small numbers."""

    def __init__(self, path: Path):
        self.path = path
        self.database = sqlite3.connect(path, isolation_level=None)
        self.database.executescript(SCHEMA)
        self.launched = 0

    def insert(self, table: str, **values) -> None:
        names = ", ".join(f'"{name}"' for name in values)
        marks = ", ".join("?" for _ in values)
        self.database.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", list(values.values()))

    def string(self, text: str) -> int:
        found = self.database.execute("SELECT id FROM StringIds WHERE value = ?", [text]).fetchone()
        if found:
            return found[0]
        number = self.database.execute("SELECT count(*) + 1 FROM StringIds").fetchone()[0]
        self.insert("StringIds", id=number, value=text)
        return number

    def range(self, name, start, end, *, process=7, thread=1, registered=False, kind=PUSH_POP, domain=0) -> None:
        text = {"textId": self.string(name)} if registered else {"text": name}
        tid = MACHINE | process << 24 | thread
        ended = None if end is None else end * 1000
        self.insert(
            "NVTX_EVENTS", start=start * 1000, end=ended, eventType=kind, globalTid=tid, domainId=domain, **text
        )

    def launch(self, at, *, process=7, thread=1, number=None) -> dict:
        """Record a launch and return the columns that identify it."""
        self.launched += 1
        number = number or self.launched
        tid = MACHINE | process << 24 | thread
        times = {"start": at * 1000, "end": at * 1000 + 500}
        self.insert("CUPTI_ACTIVITY_KIND_RUNTIME", **times, globalTid=tid, correlationId=number)
        return {"correlationId": number, "globalPid": MACHINE | process << 24}

    def work(self, kind: str, ran: tuple, launch: dict, **values) -> None:
        stream = {"deviceId": 0, "contextId": 1, "streamId": 7}
        times = {"start": ran[0] * 1000, "end": ran[1] * 1000}
        self.insert(f"CUPTI_ACTIVITY_KIND_{kind}", **times, **stream, **launch, **values)

    def kernel(self, name: str, at, ran: tuple, **launch) -> None:
        names = {"demangledName": self.string(f"void {name}<float>(int)"), "shortName": self.string(name)}
        self.work("KERNEL", ran, self.launch(at, **launch), **names)

    def close(self) -> Path:
        self.database.close()
        return self.path


def two_steps(recording: Recording) -> None:
    """Each step takes 100 us on the host; its kernels start 50 us later and end after it."""
    for at in (0, 1000):
        recording.range("forward", at, at + 30)
        recording.range("block", at + 5, at + 25)
        recording.range(SOFTMAX, at + 10, at + 20, registered=True)
        recording.kernel("gemm", at + 1, (at + 50, at + 60))
        recording.kernel("cunn_SoftMaxForward", at + 12, (at + 60, at + 65))
        recording.kernel("elementwise_kernel", at + 22, (at + 65, at + 68))
        recording.range("backward", at + 30, at + 70)
        recording.kernel("gemm", at + 40, (at + 80, at + 100), thread=2)
        recording.range("optimizer", at + 70, at + 100)
        recording.kernel("multi_tensor_apply_kernel", at + 80, (at + 100, at + 130))


@pytest.fixture
def recording(tmp_path):
    made = Recording(tmp_path / "nsys.sqlite")
    yield made
    made.close()


def read(recording: Recording):
    return read_nsys(recording.close())


def origins(trace) -> list[tuple]:
    return [(kernel.name.split("<")[0].removeprefix("void "), kernel.phase, kernel.part) for kernel in trace.kernels]


# -- reading ----------------------------------------------------------------------------------------------------------


def test_phase_and_part_are_those_of_the_launch(recording):
    """All kernels run after their ranges closed, and another thread launches those of backward."""
    two_steps(recording)
    trace = read(recording)
    step = [
        ("gemm", "forward", None),
        ("cunn_SoftMaxForward", "forward", SOFTMAX),
        ("elementwise_kernel", "forward", "block"),
        ("gemm", "backward", None),
        ("multi_tensor_apply_kernel", "optimizer", None),
    ]
    assert origins(trace) == step * 2
    assert trace.steps == 2
    assert trace.on_gpu


def test_times_are_seconds_and_durations_exact(recording):
    two_steps(recording)
    recording.kernel("late", 10**15, (10**15 + 1, 10**15 + 2))
    trace = read(recording)
    first, last = trace.kernels[0], trace.kernels[-1]
    assert (first.name, first.start) == ("void gemm<float>(int)", pytest.approx(50e-6))
    assert first.duration == pytest.approx(10e-6)
    assert last.duration == pytest.approx(1e-6, rel=1e-9)  # the difference of its times in seconds would be far off
    assert [(span.name, span.start, span.end) for span in trace.phases[:2]] == [
        ("forward", 0.0, pytest.approx(30e-6)),
        ("backward", pytest.approx(30e-6), pytest.approx(70e-6)),
    ]
    assert trace.busy("forward") == pytest.approx(2 * 18e-6)


def test_kernels_copies_and_fills_are_sorted_by_time(recording):
    recording.range("forward", 0, 100)
    recording.work("MEMSET", (30, 31), recording.launch(3), memKind=DEVICE)
    ends = {"srcKind": PAGEABLE, "dstKind": DEVICE}
    recording.work("MEMCPY", (10, 20), recording.launch(1), copyKind=HOST_TO_DEVICE, **ends)
    recording.work("MEMCPY", (21, 22), recording.launch(2), copyKind=77)
    recording.kernel("gemm", 4, (40, 50))
    trace = read(recording)
    names = ["Memcpy HtoD (Pageable -> Device)", "Memcpy", "Memset (Device)", "void gemm<float>(int)"]
    assert [kernel.name for kernel in trace.kernels] == names
    assert [kernel.kind for kernel in trace.kernels[:3]] == [COPY] * 3
    assert {kernel.phase for kernel in trace.kernels} == {"forward"}


def test_part_is_the_innermost_range_of_the_launching_thread(recording):
    recording.range("forward", 0, 100)
    recording.range("block", 10, 90)
    recording.range("inner", 10, 30)  # opened at the same moment
    recording.range("next", 30, 50)  # opened when the one before was closed
    recording.range("last", 60, 70)
    recording.range("of another thread", 60, 80, thread=2)
    for at, name in ((9, "before"), (10, "first"), (30, "second"), (40, "third"), (50, "between"), (90, "after")):
        recording.kernel(name, at, (200 + at, 201 + at))
    recording.kernel("elsewhere", 65, (400, 401), thread=3)
    assert origins(read(recording)) == [
        ("before", "forward", None),
        ("first", "forward", "inner"),
        ("second", "forward", "next"),
        ("third", "forward", "next"),
        ("between", "forward", "block"),
        ("after", "forward", None),
        ("elsewhere", "forward", None),
    ]


def test_part_in_backward_is_that_of_recomputation(recording):
    recording.range("backward", 0, 100)
    recording.range(SOFTMAX, 10, 20, thread=2)
    recording.kernel("recomputed", 15, (200, 201), thread=2)
    recording.kernel("gradient", 25, (300, 301), thread=2)
    assert origins(read(recording)) == [("recomputed", "backward", SOFTMAX), ("gradient", "backward", None)]


def test_processes_with_equal_correlation_ids(recording):
    """Ranks of one run have equal ids and simultaneous phases."""
    recording.range("forward", 0, 50, process=7)
    recording.range("forward", 0, 20, process=8)
    recording.range("backward", 20, 50, process=8)
    recording.range(SOFTMAX, 0, 50, process=7)
    recording.kernel("seven", 30, (100, 101), process=7, number=1)
    recording.kernel("eight", 30, (102, 103), process=8, number=1)
    assert origins(read(recording)) == [("seven", "forward", SOFTMAX), ("eight", "backward", None)]


def test_only_push_pop_ranges_outside_of_library_domains_count(recording):
    """CUB and NCCL name their ranges in domains of their own."""
    recording.range("forward", 0, 100)
    recording.range("CCCL", -5, None, kind=DOMAIN, domain=3)
    recording.range("still open", 1, None)
    recording.range("start-end range", 2, 90, kind=START_END)
    recording.range("mark", 3, 3, kind=MARK)
    recording.range("block", 10, 50)
    recording.range("cub::DeviceScan", 20, 30, domain=3)
    recording.range("of another process", 60, 70, process=8, domain=3)
    recording.kernel("gemm", 5, (90, 91))
    recording.kernel("scan", 25, (100, 101))
    recording.kernel("other", 65, (110, 111), process=8)
    assert origins(read(recording)) == [
        ("gemm", "forward", None),
        ("scan", "forward", "block"),
        ("other", None, "of another process"),
    ]


def test_kernels_outside_of_phases_or_without_a_launch(recording):
    recording.range("forward", 0, 30)
    recording.kernel("last moment", 29, (49, 50))
    recording.kernel("too late", 30, (50, 51))
    recording.kernel("lost", 10, (60, 61))
    recording.database.execute("DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE correlationId = 3")
    assert origins(read(recording)) == [
        ("last moment", "forward", None),
        ("too late", None, None),
        ("lost", None, None),
    ]


# -- other versions of the exporter -----------------------------------------------------------------------------------


FULL = "void cunn_SoftMaxForward<float>(int)"
ABSENT = {
    "TABLE NVTX_EVENTS": (FULL, None, None),
    "TABLE CUPTI_ACTIVITY_KIND_RUNTIME": (FULL, None, None),
    "TABLE CUPTI_ACTIVITY_KIND_MEMCPY": (FULL, "forward", SOFTMAX),
    "TABLE CUPTI_ACTIVITY_KIND_MEMSET": (FULL, "forward", SOFTMAX),
    "TABLE ENUM_CUDA_MEM_KIND": (FULL, "forward", SOFTMAX),
    "COLUMN CUPTI_ACTIVITY_KIND_KERNEL.demangledName": ("cunn_SoftMaxForward", "forward", SOFTMAX),
    "COLUMN CUPTI_ACTIVITY_KIND_KERNEL.shortName": (FULL, "forward", SOFTMAX),
    "COLUMN CUPTI_ACTIVITY_KIND_KERNEL.globalPid": (FULL, "forward", SOFTMAX),
    "COLUMN NVTX_EVENTS.domainId": (FULL, "forward", SOFTMAX),
    "COLUMN NVTX_EVENTS.textId": (FULL, "forward", ""),
}
"""What is absent -> name, phase and part of the second kernel."""


@pytest.mark.parametrize("absent", ABSENT)
def test_tables_and_columns_may_be_absent(recording, absent):
    two_steps(recording)
    kind, (table, *column) = absent.split()[0], absent.split()[1].split(".")
    recording.database.execute(
        f"DROP TABLE {table}" if kind == "TABLE" else f"ALTER TABLE {table} DROP COLUMN {column[0]}"
    )
    kernels = read(recording).kernels
    assert len(kernels) == 10
    assert (kernels[1].name, kernels[1].phase, kernels[1].part) == ABSENT[absent]


def test_kernels_without_a_process_id_among_two_processes(recording):
    recording.range("forward", 0, 50, process=7)
    recording.range("backward", 0, 50, process=8)
    recording.kernel("gemm", 10, (60, 61), process=7, number=1)
    recording.kernel("gemm", 10, (62, 63), process=8, number=1)
    recording.database.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET globalPid = NULL")
    assert origins(read(recording)) == [("gemm", None, None)] * 2


@pytest.mark.parametrize(
    ("column", "name"),
    [("copyKind", "Memcpy (Pageable -> Device)"), ("srcKind", "Memcpy HtoD"), (None, "Memcpy HtoD")],
)
def test_names_of_copies_with_columns_missing(recording, column, name):
    ends = {"srcKind": PAGEABLE, "dstKind": DEVICE}
    recording.work("MEMCPY", (10, 20), recording.launch(1), copyKind=HOST_TO_DEVICE, **ends)
    recording.work("MEMSET", (30, 40), recording.launch(2))
    recording.kernel("gemm", 3, (50, 51))
    if column:
        recording.database.execute(f"ALTER TABLE CUPTI_ACTIVITY_KIND_MEMCPY DROP COLUMN {column}")
    else:
        recording.database.execute("DROP TABLE ENUM_CUDA_MEM_KIND")
    copy, fill, _ = read(recording).kernels
    assert (copy.name, copy.kind) == (name, COPY)
    assert (fill.name, fill.kind) == ("Memset", COPY)


def test_a_kernel_without_a_name_is_counted(recording):
    two_steps(recording)
    recording.database.execute("DELETE FROM StringIds")
    assert {kernel.name for kernel in read(recording).kernels} == {"kernel without a name"}


# -- unreadable files -------------------------------------------------------------------------------------------------


def refusal(path: Path) -> str:
    """Return the message of the user error; reading leaves no files behind."""
    before = sorted(path.parent.iterdir())
    with pytest.raises(UserError) as caught:
        read_nsys(path)
    message = str(caught.value)
    assert repr(str(path)) in message
    assert "\n" not in message
    assert sorted(path.parent.iterdir()) == before
    return message


def test_missing_files(tmp_path):
    assert "no such file" in refusal(tmp_path / "absent.sqlite")
    assert "a folder" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "named"),
    [(b"", "is empty; make one with: nsys export"), (b"a report" * 100, "not an export of nsys.*nsys export --type")],
    ids=["empty", "no database"],
)
def test_files_that_are_no_database(tmp_path, content, named):
    path = tmp_path / "nsys.sqlite"
    path.write_bytes(content)
    assert re.search(named, refusal(path))


@pytest.mark.parametrize("kept", [0.001, 0.5, 0.999])
def test_a_truncated_export(recording, kept):
    two_steps(recording)
    path = recording.close()
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    assert "cut off" in refusal(path)


OTHER_TOOLS = {
    "customers": "CREATE TABLE customers (id INTEGER)",
    "strings only": "CREATE TABLE StringIds (id INTEGER, value TEXT)",
    "nvprof": "CREATE TABLE StringTable (value TEXT); CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (name INTEGER)",
}


@pytest.mark.parametrize("tables", OTHER_TOOLS.values(), ids=OTHER_TOOLS)
def test_a_database_of_another_tool(tmp_path, tables):
    path = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.executescript(tables)
    assert "was not made by nsys" in refusal(path)


@pytest.mark.parametrize("statement", ["DELETE FROM", "DROP TABLE"])
def test_an_export_without_kernels(recording, statement):
    two_steps(recording)
    recording.work("MEMSET", (30, 40), recording.launch(2))
    recording.database.execute(f"{statement} CUPTI_ACTIVITY_KIND_KERNEL")
    message = refusal(recording.close())
    assert "holds no kernels" in message
    assert "--trace=cuda,nvtx" in message


def test_an_export_is_opened_read_only(recording, monkeypatch):
    two_steps(recording)
    path = recording.close().rename(recording.path.with_name("100% of ?mode=rwc #2.sqlite"))
    before, listing = path.read_bytes(), list(path.parent.iterdir())
    connect = sqlite3.connect

    def writing(*arguments, **options):
        database = connect(*arguments, **options)
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            database.execute("CREATE TABLE mine (id INTEGER)")
        return database

    monkeypatch.setattr(sqlite3, "connect", writing)
    assert len(read_nsys(path).kernels) == 10
    assert (path.read_bytes(), list(path.parent.iterdir())) == (before, listing)


# -- finding and running nsys -----------------------------------------------------------------------------------------


def script(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_nsys_is_found_on_path_then_in_default_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(nsys, "INSTALLED", [str(tmp_path / "cuda*/bin/nsys"), str(tmp_path / "opt/*/bin/nsys")])
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert find_nsys() is None
    script(tmp_path / "cuda-13/bin/nsys", "")
    Path(tmp_path / "cuda-13/bin/nsys").chmod(0o644)
    assert find_nsys() is None
    script(tmp_path / "opt/2024.6.2/bin/nsys", "")
    newest = script(tmp_path / "opt/2025.1.1/bin/nsys", "")
    assert find_nsys() == newest
    on_path = script(tmp_path / "path/nsys", "")
    assert find_nsys() == on_path


CONFIG = RunConfig.from_dict(tiny_config(device="cuda:1", warmup_steps=3))

WORKING = """
printf '%s\\n' "$@" > {folder}/arguments.$1
case "$1" in
    profile) echo report > {folder}/out/nsys.nsys-rep ;;
    export) test -s {folder}/out/nsys.nsys-rep && cp {folder}/prepared.sqlite {folder}/out/nsys.sqlite ;;
esac
"""


def profile(folder: Path, program: str, *, config=CONFIG, timeout=20.0):
    command = script(folder / "nsys", program.format(folder=folder))
    return profile_with_nsys(config, num_steps=2, folder=folder / "out", nsys=command, timeout=timeout)


def complaint(folder: Path, program: str, **options) -> str:
    with pytest.raises(UserError) as caught:
        profile(folder, program, **options)
    message = str(caught.value)
    assert message.endswith("; leave out --nsys to use torch.profiler")
    assert "\n" not in message
    return message


@pytest.fixture
def prepared(tmp_path):
    """The folder of an nsys script, with the export that it copies."""
    made = Recording(tmp_path / "prepared.sqlite")
    two_steps(made)
    made.close()
    return tmp_path


def test_a_step_is_recorded_exported_and_read(prepared):
    trace = profile(prepared, WORKING)
    assert (len(trace.kernels), trace.steps) == (10, 2)
    out = prepared / "out"
    request = str(out / "nsys_step.json")
    assert (prepared / "arguments.profile").read_text().splitlines() == [
        "profile",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--trace=cuda,nvtx",
        "--sample=none",
        "--cpuctxsw=none",
        "--force-overwrite=true",
        "-o",
        str(out / "nsys"),
        *[sys.executable, "-P", "-m", "cs336_systems.measure.nsys_step", request],
    ]
    assert (prepared / "arguments.export").read_text().splitlines() == [
        *["export", "--type", "sqlite", "--force-overwrite=true", "-o", str(out / "nsys.sqlite")],
        str(out / "nsys.nsys-rep"),
    ]
    asked = json.loads(Path(request).read_text())
    assert RunConfig.from_dict(asked["config"]) == CONFIG
    assert asked["num_steps"] == 2


def test_the_package_is_on_the_path_of_the_recorded_program(prepared, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere/else")
    profile(prepared, 'echo "$PYTHONPATH" > {folder}/path\n' + WORKING)
    root, other = (prepared / "path").read_text().strip().split(os.pathsep)
    assert (Path(root) / "cs336_systems/measure/nsys_step.py").is_file()
    assert other == "/somewhere/else"


FAILURES = {
    "the last line of stderr": (
        "echo Collecting data...; echo first >&2; echo '  the GPU is   busy  ' >&2; exit 3",
        "nsys profile ended with exit code 3: the GPU is busy;",
    ),
    "a report in spite of the failure": (
        WORKING + "echo out of memory >&2; exit 5",
        "nsys profile ended with exit code 5: out of memory",
    ),
    "stdout where stderr is empty": (
        "echo no permission; exit 1",
        "nsys profile ended with exit code 1: no permission;",
    ),
    "no output": ("exit 1", "nsys profile ended with exit code 1; "),
    "no report": ("echo 'cannot import' >&2", "nsys profile made no nsys.nsys-rep: cannot imp"),
    "the export fails": (
        "if [ $1 = export ]; then echo 'disk full' >&2; exit 1; fi\n" + WORKING,
        "nsys export ended with exit code 1: disk full;",
    ),
    "no export": ("if [ $1 = export ]; then exit 0; fi\n" + WORKING, "nsys export made no nsys.sqlite; "),
}


@pytest.mark.parametrize(("program", "message"), FAILURES.values(), ids=FAILURES)
def test_a_failure_of_nsys_is_a_user_error(prepared, program, message):
    """Files of an earlier recording are not taken for its result."""
    profile(prepared, WORKING)
    assert complaint(prepared, program).startswith(message)


HANGING = {
    "terminated": "echo $$ > {folder}/pid; echo waiting >&2; exec sleep 600",
    "killed": "echo $$ > {folder}/pid; trap '' TERM; echo waiting >&2; while :; do sleep 0.05; done",
}


@pytest.mark.parametrize("program", HANGING.values(), ids=HANGING)
def test_a_recording_that_hangs_is_ended(prepared, monkeypatch, program):
    monkeypatch.setattr(nsys, "GRACE", 0.2)
    assert complaint(prepared, program, timeout=1.0).startswith("nsys profile did not end in 1 s")
    if (prepared / "pid").exists():  # a busy machine may not have started the script within the time limit
        assert not Path(f"/proc/{(prepared / 'pid').read_text().strip()}").exists()


def test_an_nsys_that_cannot_be_run(tmp_path):
    path = tmp_path / "nsys"
    for content in (None, "no program"):
        if content:
            path.write_text(content)
        with pytest.raises(UserError, match=r"cannot run '.*nsys': .*leave out --nsys"):
            profile_with_nsys(CONFIG, num_steps=2, folder=tmp_path / "out", nsys=str(path), timeout=1)


def test_a_cpu_is_refused(prepared):
    config = RunConfig.from_dict(tiny_config(device="cpu"))
    assert "the device is 'cpu'" in complaint(prepared, WORKING, config=config)
    assert not (prepared / "out").exists()


# -- the program that nsys runs ---------------------------------------------------------------------------------------


def run_step(folder: Path, monkeypatch, request: dict) -> None:
    from cs336_systems.measure import nsys_step

    path = folder / "request.json"
    path.write_text(json.dumps(request))
    monkeypatch.setattr(sys, "argv", ["nsys_step", str(path)])
    nsys_step.main()


def test_the_capture_range_holds_the_measured_steps_only(tmp_path, monkeypatch):
    import torch

    from cs336_systems.kernels.ranges import part
    from cs336_systems.step.train_step import TrainStep

    seen = []
    call = TrainStep.__call__

    def watched(step, *batch, watch):
        seen.append("step" if isinstance(part("any"), nullcontext) else "step with parts")
        return call(step, *batch, watch=watch)

    monkeypatch.setattr(TrainStep, "__call__", watched)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: seen.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: seen.append("stop"))
    config = tiny_config(device="cpu", warmup_steps=2, num_steps=5)
    run_step(tmp_path, monkeypatch, {"config": config, "num_steps": 3})
    assert seen == ["step with parts"] * 2 + ["start"] + ["step with parts"] * 3 + ["stop"]


def test_a_user_error_in_the_recorded_program_is_one_line(tmp_path, monkeypatch):
    config = {**tiny_config(), "unheard": 1}
    with pytest.raises(SystemExit, match="unknown configuration fields: unheard"):
        run_step(tmp_path, monkeypatch, {"config": config, "num_steps": 1})


@pytest.mark.gpu
def test_a_step_on_a_gpu(tmp_path):
    command = find_nsys()
    if command is None:
        pytest.skip("needs nsys")
    config = RunConfig.from_dict(tiny_config(device="cuda", warmup_steps=2))
    trace = profile_with_nsys(config, num_steps=2, folder=tmp_path, nsys=command, timeout=240)
    assert trace.steps == 2
    assert all(trace.of(phase) for phase in ("forward", "loss", "backward", "optimizer"))
    assert SOFTMAX in {kernel.part for kernel in trace.of("forward")}
