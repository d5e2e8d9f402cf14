"""Kernels recorded by Nsight Systems: exports written here as its exporter does it, and an nsys that is a script."""

import json
import os
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from cs336_systems.config import RunConfig, UserError
from cs336_systems.measure.readers import nsys
from cs336_systems.measure.readers.kernel_classes import COPY, SOFTMAX
from cs336_systems.measure.readers.nsys import find_nsys, profile_with_nsys, read_nsys
from tests.helpers import execute, tiny_config

SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE ENUM_CUDA_MEM_KIND (id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT);
CREATE TABLE NVTX_EVENTS (
    start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER, color INTEGER,
    text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (
    start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER,
    correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
    streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL,
    shortName INTEGER NOT NULL, mangledName INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
    streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL,
    copyKind INTEGER NOT NULL, srcKind INTEGER, dstKind INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
    streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, value INTEGER NOT NULL,
    bytes INTEGER NOT NULL, memKind INTEGER);
INSERT INTO ENUM_CUDA_MEM_KIND VALUES
    (0, 'CUDA_MEMOPR_MEMORY_KIND_PAGEABLE', 'Pageable'), (2, 'CUDA_MEMOPR_MEMORY_KIND_DEVICE', 'Device');
"""
"""Of exporter version 3.16 (nsys 2024.6), without columns that say nothing here."""
MACHINE = 1 << 48
PUSH_POP, START_END, MARK, DOMAIN = 59, 60, 34, 75
HOST_TO_DEVICE, PAGEABLE, DEVICE = 1, 0, 2


class Recording:
    """An export being written. Times in microseconds; processes and threads by small numbers."""

    def __init__(self, path: Path):
        self.path = path
        self.database = sqlite3.connect(path, isolation_level=None)
        self.database.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;" + SCHEMA)
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
        """What the work that is launched has to say of it."""
        self.launched += 1
        number = number or self.launched
        self.insert(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=at * 1000,
            end=at * 1000 + 500,
            eventClass=0,
            globalTid=MACHINE | process << 24 | thread,
            correlationId=number,
            nameId=self.string("cudaLaunchKernel_v7000"),
            returnValue=0,
        )
        return {"correlationId": number, "globalPid": MACHINE | process << 24}

    def work(self, kind: str, ran: tuple, launch: dict, **values) -> None:
        place = {"deviceId": 0, "contextId": 1, "streamId": 7}
        times = {"start": ran[0] * 1000, "end": ran[1] * 1000}
        self.insert(f"CUPTI_ACTIVITY_KIND_{kind}", **times, **place, **launch, **values)

    def kernel(self, name: str, at, ran: tuple, **launch) -> None:
        names = {"demangledName": self.string(f"void {name}<float>(int)"), "shortName": self.string(name)}
        self.work("KERNEL", ran, self.launch(at, **launch), **names)

    def close(self) -> Path:
        self.database.close()
        return self.path


def two_steps(recording: Recording) -> None:
    """Each step takes 100 us on the host; its kernels begin 50 us late and end after it, in a queue."""
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


def told(trace) -> list[tuple]:
    return [(kernel.name.split("<")[0].removeprefix("void "), kernel.phase, kernel.part) for kernel in trace.kernels]


# -- reading ----------------------------------------------------------------------------------------------------------


def test_kernels_have_the_phase_and_part_of_their_launch_wherever_they_ran(recording):
    """All run after the ranges that launched them were left, and backward's come from another thread."""
    two_steps(recording)
    trace = read(recording)
    step = [
        ("gemm", "forward", None),
        ("cunn_SoftMaxForward", "forward", SOFTMAX),
        ("elementwise_kernel", "forward", "block"),
        ("gemm", "backward", None),
        ("multi_tensor_apply_kernel", "optimizer", None),
    ]
    assert told(trace) == step * 2
    assert trace.steps == 2
    assert trace.on_gpu


def test_times_are_seconds_and_durations_exact_however_late(recording):
    two_steps(recording)
    recording.kernel("late", 10**15, (10**15 + 1, 10**15 + 2))
    trace = read(recording)
    first, last = trace.kernels[0], trace.kernels[-1]
    assert (first.name, first.start) == ("void gemm<float>(int)", pytest.approx(50e-6))
    assert first.duration == pytest.approx(10e-6)
    assert last.duration == pytest.approx(1e-6, rel=1e-9)  # the difference of its times in seconds is far off
    assert [(span.name, span.start, span.end) for span in trace.phases[:2]] == [
        ("forward", 0.0, pytest.approx(30e-6)),
        ("backward", pytest.approx(30e-6), pytest.approx(70e-6)),
    ]
    assert trace.busy("forward") == pytest.approx(2 * 18e-6)


def test_what_ran_is_sorted_by_time_and_copies_are_copies(recording):
    recording.range("forward", 0, 100)
    recording.work("MEMSET", (30, 31), recording.launch(3), value=0, bytes=4, memKind=DEVICE)
    ends = {"srcKind": PAGEABLE, "dstKind": DEVICE}
    recording.work("MEMCPY", (10, 20), recording.launch(1), bytes=4, copyKind=HOST_TO_DEVICE, **ends)
    recording.work("MEMCPY", (21, 22), recording.launch(2), bytes=4, copyKind=77)
    recording.kernel("gemm", 4, (40, 50))
    trace = read(recording)
    names = ["Memcpy HtoD (Pageable -> Device)", "Memcpy", "Memset (Device)", "void gemm<float>(int)"]
    assert [kernel.name for kernel in trace.kernels] == names
    assert [kernel.kind for kernel in trace.kernels[:3]] == [COPY] * 3
    assert {kernel.phase for kernel in trace.kernels} == {"forward"}


def test_a_part_is_the_innermost_range_of_the_launching_thread(recording):
    recording.range("forward", 0, 100)
    recording.range("block", 10, 90)
    recording.range("inner", 10, 30)  # opened at the same moment
    recording.range("next", 30, 50)  # opened when the one before was closed
    recording.range("last", 60, 70)
    recording.range("of another thread", 60, 80, thread=2)
    for at, name in ((9, "before"), (10, "first"), (30, "second"), (40, "third"), (50, "between"), (90, "after")):
        recording.kernel(name, at, (200 + at, 201 + at))
    recording.kernel("elsewhere", 65, (400, 401), thread=3)
    assert told(read(recording)) == [
        ("before", "forward", None),
        ("first", "forward", "inner"),
        ("second", "forward", "next"),
        ("third", "forward", "next"),
        ("between", "forward", "block"),
        ("after", "forward", None),
        ("elsewhere", "forward", None),
    ]


def test_a_part_in_backward_is_that_of_recomputing(recording):
    recording.range("backward", 0, 100)
    recording.range(SOFTMAX, 10, 20, thread=2)
    recording.kernel("cunn_SoftMaxForward", 15, (200, 201), thread=2)
    recording.kernel("cunn_SoftMaxBackward", 25, (300, 301), thread=2)
    assert told(read(recording)) == [
        ("cunn_SoftMaxForward", "backward", SOFTMAX),
        ("cunn_SoftMaxBackward", "backward", None),
    ]


def test_processes_count_their_launches_alike(recording):
    """Ranks of one run: the same numbers, and phases at the same time."""
    recording.range("forward", 0, 50, process=7)
    recording.range("forward", 0, 20, process=8)
    recording.range("backward", 20, 50, process=8)
    recording.range(SOFTMAX, 0, 50, process=7)
    recording.kernel("seven", 30, (100, 101), process=7, number=1)
    recording.kernel("eight", 30, (102, 103), process=8, number=1)
    assert told(read(recording)) == [("seven", "forward", SOFTMAX), ("eight", "backward", None)]


def test_ranges_of_libraries_are_no_parts(recording):
    """CUB and NCCL name theirs in domains of their own."""
    recording.range("forward", 0, 100)
    recording.range("CCCL", -5, None, kind=DOMAIN, domain=3)
    recording.range("block", 10, 50)
    recording.range("cub::DeviceScan", 20, 30, domain=3)
    recording.range("of another process", 60, 70, process=8, domain=3)
    recording.kernel("scan", 25, (100, 101))
    recording.kernel("other", 65, (110, 111), process=8)
    assert told(read(recording)) == [("scan", "forward", "block"), ("other", None, "of another process")]


def test_only_ranges_that_a_thread_opened_and_closed_count(recording):
    recording.range("forward", 0, 100)
    recording.range("still open", 1, None)
    recording.range("anywhere", 2, 90, kind=START_END)
    recording.range("moment", 3, 3, kind=MARK)
    recording.kernel("gemm", 10, (100, 101))
    assert told(read(recording)) == [("gemm", "forward", None)]


def test_a_kernel_outside_of_phases_or_without_a_launch_has_none(recording):
    recording.range("forward", 0, 30)
    recording.kernel("last moment", 29, (49, 50))
    recording.kernel("too late", 30, (50, 51))
    recording.kernel("lost", 10, (60, 61))
    recording.database.execute("DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE correlationId = 3")
    assert told(read(recording)) == [("last moment", "forward", None), ("too late", None, None), ("lost", None, None)]


# -- other versions of the exporter -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "phase", "part"),
    [
        ("NVTX_EVENTS", None, None),
        ("CUPTI_ACTIVITY_KIND_RUNTIME", None, None),
        ("CUPTI_ACTIVITY_KIND_MEMCPY", "forward", SOFTMAX),
        ("CUPTI_ACTIVITY_KIND_MEMSET", "forward", SOFTMAX),
        ("ENUM_CUDA_MEM_KIND", "forward", SOFTMAX),
    ],
)
def test_tables_may_be_absent(recording, table, phase, part):
    two_steps(recording)
    recording.database.execute(f"DROP TABLE {table}")
    trace = read(recording)
    assert len(trace.kernels) == 10
    assert (trace.kernels[1].phase, trace.kernels[1].part) == (phase, part)


@pytest.mark.parametrize(
    ("table", "column", "name", "part"),
    [
        ("CUPTI_ACTIVITY_KIND_KERNEL", "demangledName", "cunn_SoftMaxForward", SOFTMAX),
        ("CUPTI_ACTIVITY_KIND_KERNEL", "shortName", "void cunn_SoftMaxForward<float>(int)", SOFTMAX),
        ("CUPTI_ACTIVITY_KIND_KERNEL", "globalPid", "void cunn_SoftMaxForward<float>(int)", SOFTMAX),
        ("NVTX_EVENTS", "domainId", "void cunn_SoftMaxForward<float>(int)", SOFTMAX),
        ("NVTX_EVENTS", "textId", "void cunn_SoftMaxForward<float>(int)", ""),
    ],
)
def test_columns_may_be_absent(recording, table, column, name, part):
    two_steps(recording)
    recording.database.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
    kernel = read(recording).kernels[1]
    assert (kernel.name, kernel.phase, kernel.part) == (name, "forward", part)


def test_work_that_does_not_name_its_process_is_not_given_to_one_of_two(recording):
    recording.range("forward", 0, 50, process=7)
    recording.range("backward", 0, 50, process=8)
    recording.kernel("gemm", 10, (60, 61), process=7, number=1)
    recording.kernel("gemm", 10, (62, 63), process=8, number=1)
    recording.database.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET globalPid = NULL")
    assert told(read(recording)) == [("gemm", None, None)] * 2


@pytest.mark.parametrize(
    ("column", "name"),
    [("copyKind", "Memcpy (Pageable -> Device)"), ("srcKind", "Memcpy HtoD"), (None, "Memcpy HtoD")],
)
def test_a_copy_says_what_is_known_of_it(recording, column, name):
    ends = {"srcKind": PAGEABLE, "dstKind": DEVICE}
    recording.work("MEMCPY", (10, 20), recording.launch(1), bytes=4, copyKind=HOST_TO_DEVICE, **ends)
    recording.work("MEMSET", (30, 40), recording.launch(2), value=0, bytes=4)
    recording.kernel("gemm", 3, (50, 51))
    if column:
        recording.database.execute(f"ALTER TABLE CUPTI_ACTIVITY_KIND_MEMCPY DROP COLUMN {column}")
    else:
        recording.database.execute("DROP TABLE ENUM_CUDA_MEM_KIND")
    copy, fill, _ = read(recording).kernels
    assert (copy.name, copy.kind) == (name, COPY)
    assert (fill.name, fill.kind) == ("Memset", COPY)


def test_a_kernel_whose_name_is_lost_is_still_counted(recording):
    two_steps(recording)
    recording.database.execute("DELETE FROM StringIds")
    trace = read(recording)
    assert {kernel.name for kernel in trace.kernels} == {"kernel without a name"}


# -- files that cannot be read ----------------------------------------------------------------------------------------


def refusal(path: Path) -> str:
    """The one line that a user sees; and no file came to be."""
    before = sorted(path.parent.iterdir())
    with pytest.raises(UserError) as caught:
        read_nsys(path)
    message = str(caught.value)
    assert repr(str(path)) in message
    assert "\n" not in message
    assert sorted(path.parent.iterdir()) == before
    return message


def test_a_file_that_is_not_there(tmp_path):
    assert "no such file" in refusal(tmp_path / "absent.sqlite")
    assert "no such file" in refusal(tmp_path)


def test_a_file_that_is_empty_or_no_database(tmp_path):
    path = tmp_path / "nsys.sqlite"
    path.touch()
    assert "is empty; make one with: nsys export" in refusal(path)
    path.write_bytes(b"the report itself, not its export" * 100)
    assert "not an export of nsys" in refusal(path)
    assert "nsys export --type sqlite" in refusal(path)


@pytest.mark.parametrize("kept", [0.001, 0.5, 0.999])
def test_a_file_that_is_cut_off(recording, kept):
    two_steps(recording)
    path = recording.close()
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    assert "cut off" in refusal(path)


@pytest.mark.parametrize(
    "tables",
    [
        "CREATE TABLE customers (id INTEGER)",
        "CREATE TABLE StringIds (id INTEGER, value TEXT)",
        # nvprof, which came before nsys
        "CREATE TABLE StringTable (_id_ INTEGER, value TEXT); CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (name INTEGER)",
    ],
)
def test_a_database_of_another_tool(tmp_path, tables):
    path = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.executescript(tables)
    assert "was not made by nsys" in refusal(path)


@pytest.mark.parametrize("statement", ["DELETE FROM", "DROP TABLE"])
def test_an_export_without_kernels(recording, statement):
    two_steps(recording)
    recording.work("MEMSET", (30, 40), recording.launch(2), value=0, bytes=4)
    recording.database.execute(f"{statement} CUPTI_ACTIVITY_KIND_KERNEL")
    message = refusal(recording.close())
    assert "holds no kernels" in message
    assert "--trace=cuda,nvtx" in message


def test_an_export_is_only_read(recording, monkeypatch):
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


def test_an_export_can_be_read_without_torch(tmp_path):
    program = "import sys; import cs336_systems.measure.readers.nsys; assert 'torch' not in sys.modules"
    result = execute(sys.executable, "-c", program, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


# -- finding and running nsys -----------------------------------------------------------------------------------------


def script(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_nsys_is_found_on_path_first_then_where_installers_put_it(tmp_path, monkeypatch):
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


def test_the_usual_folders_are_those_of_the_installers():
    assert [Path(pattern).parts[:4] for pattern in nsys.INSTALLED] == [
        ("/", "usr", "local", "cuda*"),
        ("/", "opt", "nvidia", "nsight-systems*"),
    ]


CONFIG = RunConfig.from_dict(tiny_config(device="cuda:1", warmup_steps=3))

OBEDIENT = """
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
    """The folder of an nsys, with the export that it is to make."""
    made = Recording(tmp_path / "prepared.sqlite")
    two_steps(made)
    made.close()
    return tmp_path


def test_a_step_is_recorded_exported_and_read(prepared):
    trace = profile(prepared, OBEDIENT)
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


def test_the_package_is_found_by_the_program_that_nsys_runs(prepared, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere/else")
    profile(prepared, 'echo "$PYTHONPATH" > {folder}/path\n' + OBEDIENT)
    root, other = (prepared / "path").read_text().strip().split(os.pathsep)
    assert (Path(root) / "cs336_systems/measure/nsys_step.py").is_file()
    assert other == "/somewhere/else"


def test_a_recording_that_fails_says_why(prepared):
    fails = "echo Collecting data...; echo first >&2; echo '  the GPU is   busy  ' >&2; exit 3"
    assert complaint(prepared, fails).startswith("nsys profile ended with exit code 3: the GPU is busy;")


def test_a_report_of_a_step_that_failed_does_not_count(prepared):
    assert "exit code 5: out of memory" in complaint(prepared, OBEDIENT + "echo out of memory >&2; exit 5")


def test_what_nsys_says_on_standard_output_serves_where_there_is_no_other(prepared):
    assert complaint(prepared, "echo no permission; exit 1").startswith(
        "nsys profile ended with exit code 1: no permission;"
    )
    assert complaint(prepared, "exit 1").startswith("nsys profile ended with exit code 1; ")


def test_a_recording_without_a_report_fails_whatever_an_earlier_one_left(prepared):
    """nsys ends well also where it could write a .qdstrm file only."""
    profile(prepared, OBEDIENT)
    assert complaint(prepared, "echo 'cannot import' >&2").startswith("nsys profile made no nsys.nsys-rep: cannot imp")


def test_an_export_that_fails_says_why_whatever_an_earlier_one_left(prepared):
    profile(prepared, OBEDIENT)
    fails = "if [ $1 = export ]; then echo 'disk full' >&2; exit 1; fi\n" + OBEDIENT
    assert complaint(prepared, fails).startswith("nsys export ended with exit code 1: disk full;")
    silent = "if [ $1 = export ]; then exit 0; fi\n" + OBEDIENT
    assert complaint(prepared, silent).startswith("nsys export made no nsys.sqlite; ")


def test_a_recording_that_does_not_end_is_ended(prepared):
    began = time.monotonic()
    message = complaint(prepared, "echo $$ > {folder}/pid; echo waiting >&2; exec sleep 60", timeout=0.3)
    assert message.startswith("nsys profile did not end in 0.3 s: waiting;")
    assert time.monotonic() - began < 10
    assert not Path(f"/proc/{(prepared / 'pid').read_text().strip()}").exists()


def test_a_recording_that_will_not_end_is_killed(prepared, monkeypatch):
    monkeypatch.setattr(nsys, "GRACE", 0.2)
    deaf = "echo $$ > {folder}/pid; trap '' TERM; while :; do sleep 0.05; done"
    assert "did not end in 0.3 s" in complaint(prepared, deaf, timeout=0.3)
    assert not Path(f"/proc/{(prepared / 'pid').read_text().strip()}").exists()


def test_an_nsys_that_cannot_be_run(tmp_path):
    path = tmp_path / "nsys"
    for content in (None, "no program"):
        if content:
            path.write_text(content)
        with pytest.raises(UserError, match=r"cannot run '.*nsys': .*leave out --nsys"):
            profile_with_nsys(CONFIG, num_steps=2, folder=tmp_path / "out", nsys=str(path), timeout=1)


def test_there_is_nothing_to_record_on_a_cpu(prepared):
    config = RunConfig.from_dict(tiny_config(device="cpu"))
    assert "the device is 'cpu'" in complaint(prepared, OBEDIENT, config=config)
    assert not (prepared / "out").exists()


# -- the program that nsys runs ---------------------------------------------------------------------------------------


def run_step(folder: Path, monkeypatch, request: dict) -> None:
    from cs336_systems.measure import nsys_step

    path = folder / "request.json"
    path.write_text(json.dumps(request))
    monkeypatch.setattr(sys, "argv", ["nsys_step", str(path)])
    nsys_step.main()


def test_nsys_sees_the_measured_steps_and_none_of_the_warm_up(tmp_path, monkeypatch):
    import torch

    from cs336_systems.kernels import ranges
    from cs336_systems.step.train_step import TrainStep

    seen = []
    call = TrainStep.__call__

    def watched(step, *batch, watch):
        seen.append("step with parts" if ranges._enabled else "step")
        return call(step, *batch, watch=watch)

    monkeypatch.setattr(TrainStep, "__call__", watched)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: seen.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: seen.append("stop"))
    config = tiny_config(device="cpu", warmup_steps=2, num_steps=5)
    run_step(tmp_path, monkeypatch, {"config": config, "num_steps": 3})
    assert seen == ["step with parts"] * 2 + ["start"] + ["step with parts"] * 3 + ["stop"]


def test_the_program_ends_with_one_line_where_the_user_can_help(tmp_path, monkeypatch):
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
