"""`cs336 inspect`: memory snapshots and traces recorded elsewhere, complete, damaged, and of other kinds."""

import gzip
import json
import pickle
from pathlib import Path

import pytest

from cs336_systems.cli import main
from cs336_systems.config import UserError
from cs336_systems.measure.readers.snapshot import EARLIER, read_snapshot
from tests.helpers import assert_refused, refused

MIB = 2**20


def frames(*lines):
    return [{"filename": file, "line": line, "name": name} for file, line, name in lines]


IN_MODEL = frames(
    ("/x/torch/nn/functional.py", 9, "linear"), ("/home/me/model.py", 12, "forward"), ("run.py", 3, "main")
)
IN_CPP = frames(("??", 0, "at::native::empty_cuda"))


def event(action, addr, size, time_us, of=()):
    return {"action": action, "addr": addr, "size": size, "time_us": time_us, "frames": list(of)}


def snapshot():
    """Blocks from before the history, kept and freed; blocks of the history, freed, kept, and without a line."""
    history = [
        event("alloc", 300, 4 * MIB, 1_000_000, IN_MODEL),
        event("segment_alloc", 0, 20 * MIB, 1_000_000),
        event("alloc", 400, 8 * MIB, 2_000_000, IN_CPP),
        event("free_requested", 300, 4 * MIB, 3_000_000),
        event("free_completed", 300, 4 * MIB, 3_000_000),
        event("free_completed", 200, 2 * MIB, 3_500_000),
        event("alloc", 300, 1 * MIB, 4_000_000, IN_MODEL),
    ]
    held = [
        {"address": 100, "size": MIB, "requested_size": MIB - 12, "state": "active_allocated"},
        {"address": 400, "size": 8 * MIB, "requested_size": 8 * MIB, "state": "active_allocated"},
        {"address": 300, "size": 2 * MIB, "requested_size": MIB, "state": "active_allocated"},
        {"address": 500, "size": 9 * MIB, "requested_size": 0, "state": "inactive"},
    ]
    return {"segments": [{"blocks": held}], "device_traces": [history, []]}


def written(path: Path, content) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    return path


def test_snapshot_as_a_timeline(tmp_path):
    timeline = read_snapshot(written(tmp_path / "s.pickle", snapshot()))
    found = sorted((b.label, b.size, b.start, b.end, b.line) for b in timeline.blocks)
    assert found == sorted(
        [
            ("model.py: forward", 4 * MIB, 0.0, 2.0, "model.py:12 in forward"),
            ("model.py: forward", 1 * MIB, 3.0, None, "model.py:12 in forward"),
            ("unlabelled", 8 * MIB, 1.0, None, ""),
            (EARLIER, 2 * MIB, 0.0, 2.5, ""),
            (EARLIER, MIB - 12, 0.0, None, ""),
        ],
        key=lambda row: (row[0], row[1], row[2]),
    )
    assert timeline.peak() == (1.0, 4 * MIB + 8 * MIB + 2 * MIB + MIB - 12)


class Calls:
    """A pickle that calls a function when it is loaded."""

    def __reduce__(self):
        return print, ("called",)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        pytest.param(b"", "not a memory snapshot, or is cut off", id="empty"),
        pytest.param(pickle.dumps(snapshot())[:-40], "cut off", id="truncated"),
        pytest.param(b"\x00\x01 something else", "not a memory snapshot", id="no pickle"),
        pytest.param([1, 2, 3], "no segments and device_traces", id="a list"),
        pytest.param({"segments": []}, "no segments and device_traces", id="no traces"),
        pytest.param({"segments": [], "device_traces": []}, "holds no allocations", id="no allocations"),
        pytest.param({"segments": [], "device_traces": [], "more": Calls()}, "names builtins.print", id="code"),
    ],
)
def test_an_unreadable_snapshot_is_a_user_error(content, named, tmp_path, capsys):
    path = written(tmp_path / "s.pickle", content)
    with refused(str(path), named):
        read_snapshot(path)
    assert capsys.readouterr().out == ""


def test_a_missing_snapshot(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_snapshot(tmp_path / "none.pickle")


def test_inspect_shows_a_snapshot_and_writes_its_page(tmp_path, capsys):
    path = written(tmp_path / "s.pickle", snapshot())
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "peak 0.015 GiB" in shown
    assert "model.py:12 in forward" in shown
    assert "<html" in path.with_suffix(".html").read_text()


def test_inspect_shows_a_trace_without_phases(tmp_path, capsys):
    kernels = [
        {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, "tid": 7, "args": {"correlation": n}}
        for n, (name, ts, dur) in enumerate([("sgemm_nn", 10, 30), ("cunn_SoftMaxForward", 50, 10)])
    ]
    path = tmp_path / "theirs.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": kernels}).encode()))
    assert main(["inspect", str(path), "--format", "csv"]) == 0
    shown = capsys.readouterr().out
    assert "75.0%" in shown
    assert "sgemm_nn" in shown


@pytest.mark.parametrize("name", ["table.csv", "records.txt", "noend"])
def test_inspect_names_a_file_of_another_kind(name, elsewhere, capsys):
    (elsewhere / name).write_text("x")
    assert_refused(["inspect", name], [name, ".sqlite"], capsys)
