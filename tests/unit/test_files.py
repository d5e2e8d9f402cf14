"""Files of strangers and our own: one line for what cannot be read, whole or nothing for what is written, locks."""

import contextlib
import csv
import errno
import gzip
import io
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cs336_systems import files, record
from cs336_systems.cli import main
from cs336_systems.config import RunConfig
from cs336_systems.experiments.session import draw_timelines
from cs336_systems.files import foreign, locked, read_input, replacing, write_file
from cs336_systems.measure.readers.json_stream import items_of
from cs336_systems.record import CELL_TIME, Environment, Record
from cs336_systems.report.picture import Picture, save
from cs336_systems.table import Table, word
from cs336_systems.text import Text, printable
from cs336_systems.timeline import TIMELINE_FILE, Block, Timeline
from tests.helpers import ROOT, clean_env, refused
from tests.unit import hostile_files

# -- reading ----------------------------------------------------------------------------------------------------------


def test_hostile_and_malformed_files():
    """Over 500 files, with an eighth of the limits; the program says which of them were not answered in one line."""
    command = [sys.executable, "-m", "tests.unit.hostile_files"]
    env = {**clean_env(), files.RAISED_BY: "0.125"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert int(done.stdout.split()[0]) > 500


def test_the_valid_files_that_the_hostile_ones_are_made_from_are_read(tmp_path, capsys):
    hostile_files.database(tmp_path / "n.sqlite")
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(hostile_files.snapshot()))
    (tmp_path / "t.json").write_text(json.dumps(hostile_files.trace()))
    (tmp_path / "m.json.gz").write_bytes(gzip.compress(json.dumps(hostile_files.timeline()).encode()))
    for name in ("n.sqlite", "s.pickle", "t.json"):
        assert main(["inspect", str(tmp_path / name)]) == 0
    assert len(Timeline.load(tmp_path / "m.json.gz").blocks) == 2
    assert capsys.readouterr().err == ""


def test_a_limit_can_be_raised(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(bytes(100))
    with refused("'" + str(tmp_path / "x"), "more than 50 bytes", "CS336_READ_LIMIT=4"):
        read_input(tmp_path / "x", most=50)
    monkeypatch.setenv("CS336_READ_LIMIT", "2")
    assert len(read_input(tmp_path / "x", most=50)) == 100
    monkeypatch.setenv("CS336_READ_LIMIT", "much")
    with refused("CS336_READ_LIMIT='much'"):
        read_input(tmp_path / "x")


@pytest.mark.parametrize(
    "error", [KeyError("blocks"), RecursionError(), MemoryError(), OverflowError("far"), EOFError()]
)
def test_every_failure_inside_the_guard_names_the_file(tmp_path, error):
    with refused(str(tmp_path / "x")), foreign(tmp_path / "x", "a trace"):
        raise error


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_a_stream_gives_what_json_gives_wherever_it_is_cut_into_pieces(size):
    events = [{"a": [1, 2.5, None], "é": '模型"\\', "b": {}}, {}, {"c": -1e-7}]
    for text in (json.dumps({"x": [1, {"y": 2}], "e": events, "z": 12}), json.dumps({"e": events}, indent=2) + "\n"):
        data = text.encode()
        assert list(items_of(iter([data[i : i + size] for i in range(0, len(data), size)]), "e")) == events


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"e": [1, 2', '{"e": [1 2]}', '{"e": []} x', '{"e": 1}', '{"f": []}', "", "{}"]
)
def test_a_stream_refuses_what_is_no_such_list(text):
    with pytest.raises((KeyError, ValueError)):
        list(items_of(iter([text.encode()]), "e"))


# -- output -----------------------------------------------------------------------------------------------------------

EVIL = '\x1b[2J\r\x07=HYPERLINK("http://x.y","z")|[a](http://x.y)![b](javascript:c)<img src=x>`\\input{x}#eval\u202e'


def hostile_records(path: Path) -> None:
    """A hostile text in every field of a record that is a text."""
    environment = Environment(
        **dict.fromkeys(("gpu", "driver", "cuda", "torch", "triton", "python", "cpu", "utc"), EVIL)
    )
    config = {**RunConfig().to_dict(), "size": EVIL, "mode": EVIL, "precision": EVIL, "attention": EVIL, EVIL: EVIL}
    names = [("step_time", ""), ("step_time", EVIL), (EVIL, ""), (EVIL, EVIL), (CELL_TIME, "")]
    items = [
        Record(experiment, config, metric, "s", (1.0, 2.0), "ok", environment, variant)
        for experiment in ("bench", EVIL)
        for metric, variant in names
    ]
    failed = Record("bench", {**config, "seed": 7}, CELL_TIME, "s", (), f"error: {EVIL}", environment)
    record.append(path, [*items, failed])


def test_hostile_texts_in_every_field_are_harmless_in_every_format(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    hostile_records(Path("r.jsonl"))
    shown = {}
    for format in ("terminal", "md", "csv", "latex", "typst"):
        assert main(["table", "r.jsonl", "--format", format]) == 0
        shown[format] = capsys.readouterr().out
        assert main(["compare", "r.jsonl", "r.jsonl", "--format", format]) == 0
        shown[format] += capsys.readouterr().out
    for text in shown.values():
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", text)
    assert not re.search(r"(?<!\\)\[[^\]]*(?<!\\)\]\(|(?<!\\)!\[|<img|(?<!\\)://|(?<!\\)`", shown["md"])
    cells = [cell for row in csv.reader(io.StringIO(shown["csv"])) for cell in row]
    assert any(cell.startswith(("'", "\\x1b")) for cell in cells)
    assert not [
        cell for cell in cells if cell.lstrip()[:1] in ("=", "+", "-", "@") and not re.match(r"[-+][\d.]", cell)
    ]
    assert "\\input" not in shown["latex"]
    assert not re.search(r"(?<!\\)#eval", shown["typst"])
    assert main(["report", "r.jsonl", "--formats", "md,csv"]) == 0
    capsys.readouterr()
    page = Path("report/index.html").read_text()
    assert "<img" not in page
    assert "</script><" not in page.replace("</script>\n<", "")
    assert not re.search(r"(?<!\\)\[[^\]]*(?<!\\)\]\(http|(?<!\\)<img", Path("report/report.md").read_text())


@pytest.mark.parametrize("cell", ["-3.2", "+0.41%", "-0.5x", "1,234.5", "-1e-07", "-0.30 ± 0.10", "-"])
def test_a_number_stays_a_number_in_csv(cell):
    assert hostile_table(cell) == cell


@pytest.mark.parametrize("cell", ["=1+1", "+1+cmd|'x'", "-2+3", "@SUM(A1)", "- (30.6)", " =1", "＝1"])
def test_a_formula_gets_an_apostrophe_in_csv(cell):
    assert hostile_table(cell) == f"'{cell}"


def hostile_table(cell: str) -> str:
    rendered = Table(Text("t"), [word(Text("a"))], [[cell]]).render("csv")
    return list(csv.reader(io.StringIO(rendered)))[1][0]


def test_printable_text_is_left_as_it_is():
    assert printable("模型 × ±\u3000a") == "模型 × ±\u3000a"
    assert printable("\x1b[1m\u202e\udc80\n", keep="\n") == "\\x1b[1m\\u202e\\udc80\n"


# -- writing ----------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for the end of the process in the middle of a write."""


def _drawn(path: Path) -> None:
    save([Picture(path.stem, "", lambda figure: figure.add_subplot().plot([1, 2]))], path.parent, ("png",))


WRITERS = {
    "text": lambda path: write_file(path, "new" * 1000),
    "timeline": lambda path: Timeline("t", "cpu", [Block("a", 1, 0.0, None)]).save(path),
    "picture": _drawn,
    "table": lambda path: main(["table", str(path.parent / "r.jsonl"), "--output", str(path)]),
}


@pytest.mark.parametrize("fault", ["full disk", "killed"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_fault_in_the_middle_leaves_the_old_file(name, fault, tmp_path, monkeypatch):
    path = tmp_path / "file.png"
    path.write_text("old")
    record.append(tmp_path / "r.jsonl", [Record("bench", RunConfig().to_dict(), CELL_TIME, "s", (1.0,))])
    listing = sorted(tmp_path.iterdir())

    def fsync(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device") if fault == "full disk" else Killed

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        with contextlib.suppress(OSError, Killed):
            assert WRITERS[name](path) == 1  # of the command; the functions raise
    assert path.read_text() == "old"
    assert sorted(tmp_path.iterdir()) == listing
    WRITERS[name](path)
    assert path.read_bytes() != b"old"
    assert sorted(tmp_path.iterdir()) == listing


def test_replacing_keeps_links_modes_and_devices(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    write_file(link, "new")
    assert link.is_symlink()
    assert (target.read_text(), target.stat().st_mode & 0o777) == ("new", 0o640)
    write_file(Path("/dev/null"), "x")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(OSError, match="nowhere"), replacing(tmp_path / "nowhere" / "x") as fresh:
        fresh.write_text("x")


def test_no_module_writes_files_in_another_way():
    """Exceptions: files that show whether a folder is shared, and the stacks of hanging ranks, which outlive their
    process."""
    pattern = re.compile(r"\.write_text\(|\.write_bytes\(|savefig\((?!fresh)|open\((?!fresh)[^)]*\"w")
    found = {
        str(path.relative_to(ROOT / "cs336_systems"))
        for path in (ROOT / "cs336_systems").rglob("*.py")
        if pattern.search(path.read_text())
    }
    assert found <= {"files.py", "train/agreement.py", "parallel/launch.py", "experiments/worker.py", "commands.py"}


def test_one_broken_timeline_does_not_hide_the_others(tmp_path, capsys):
    for name, content in (("a", b"\x1f\x8bbroken"), ("b", None), ("c", b"{}")):
        (tmp_path / name).mkdir()
        if content is None:
            Timeline("t", "cpu", [Block("a", 1, 0.0, None)]).save(tmp_path / name / TIMELINE_FILE)
        else:
            (tmp_path / name / TIMELINE_FILE).write_bytes(content)
    drawn = draw_timelines(tmp_path)
    assert {path.parent.name for path in drawn} == {"b"}
    assert [line.split("'")[1] for line in capsys.readouterr().err.splitlines()] == [
        str(tmp_path / name / TIMELINE_FILE) for name in "ac"
    ]


# -- locks ------------------------------------------------------------------------------------------------------------


def test_a_lock_is_held_once_and_changes_nothing(tmp_path):
    path = tmp_path / ".lock"
    path.write_text("something else")
    with locked(path), pytest.raises(BlockingIOError), locked(path):
        pass
    with locked(path):
        assert path.read_text() == "something else"


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder"])
def test_a_lock_follows_no_link_and_opens_no_pipe(kind, tmp_path):
    path, target = tmp_path / ".lock", tmp_path / "target"
    if kind != "dangling":
        target.write_text("precious")
    {"link": lambda: path.symlink_to(target), "dangling": lambda: path.symlink_to(target)}.get(
        kind, lambda: os.mkfifo(path) if kind == "pipe" else path.mkdir()
    )()
    with pytest.raises(OSError, match=r"\.lock"), locked(path):
        pass
    assert target.exists() == (kind != "dangling")
    assert kind == "dangling" or target.read_text() == "precious"
