"""`cs336 profile` and its experiments: files that agree with the records, mistakes that leave nothing behind."""

import json
import shutil
import struct
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest

from cs336_systems import record
from cs336_systems.config import RunConfig
from cs336_systems.experiments.catalogue import cells
from cs336_systems.experiments.session import written_files
from cs336_systems.measure.readers.trace import read_chrome
from cs336_systems.timeline import Timeline
from tests.helpers import MODEL, SHAPE, TINY, clean_env, execute, files

pytestmark = pytest.mark.xdist_group("ranks")

PROFILE_EXPERIMENTS = ("kernels", "memory", "checkpointing", "saved_tensors")
PARAMETER_BYTES = 4 * (2 * 64 * 16 + 4 * 16 * 16 + 3 * 16 * 32 + 3 * 16)
ONE_STEP = ["--num_steps", "1"]


# -- the files and records of one profile -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profiled(tmp_path_factory, forked_python):
    """With --nsys, which is not on PATH: torch.profiler records the kernels, and a line says so."""
    folder = tmp_path_factory.mktemp("profile")
    env = clean_env(PATH="/usr/bin:/bin")
    words = ["profile", *TINY, *ONE_STEP, "--nsys", "--output", "out"]
    result = execute(forked_python, "-m", "cs336_systems", *words, cwd=folder, env=env)
    assert result.returncode == 0, result.stderr
    return folder / "out", result


@pytest.fixture(scope="module")
def records(profiled):
    loaded = record.load(profiled[0] / "records.jsonl").records
    assert all(item.ok for item in loaded), [item.status for item in loaded if not item.ok]
    return {(item.experiment, item.metric): item for item in loaded}


def one_file(folder: Path, name: str) -> Path:
    [path] = folder.rglob(name)
    assert path.parent.parent == folder / "files"
    return path


def test_all_files_are_there_and_no_others(profiled):
    folder, _ = profiled
    names = Counter(Path(name).name for name in files(folder))
    assert names.pop("records.jsonl") == 1
    wanted = {"trace.json.gz", "timeline.json.gz", "timeline.html", "timeline.png", "timeline.svg"}
    assert {name for name in names if name.startswith(("trace.", "timeline."))} == wanted
    assert set(names.values()) == {1}
    assert set(files(folder.parent)) == {f"out/{name}" for name in files(folder)}  # nothing elsewhere
    assert not [name for name in files(folder) if name.endswith((".tmp", ".part"))]


def test_every_part_of_a_profile_is_recorded(records):
    assert {experiment for experiment, _ in records} == {"kernels", "memory", "saved_tensors"}
    configs = [item.config for item in records.values()]
    assert all(config["model"] == {**SHAPE, "context_length": 8, "rope_theta": 10_000.0} for config in configs)


def test_the_trace_agrees_with_the_records(profiled, records):
    """4 + 3 projections, the head and the two matmuls of attention; twice as many in backward."""
    trace = read_chrome(one_file(profiled[0], "trace.json.gz"))
    for phase, matmuls in (("forward", 10), ("backward", 20)):
        made = [kernel for kernel in trace.of(phase) if kernel.name in ("aten::mm", "aten::bmm")]
        assert len(made) == matmuls * trace.steps
        samples = records["kernels", f"kind_table: {phase}"].samples
        table = {samples[i]: samples[i + 1 : i + 3] for i in range(0, len(samples), 3)}
        count, seconds = table["matmul"]
        in_trace, in_trace_count = trace.by_kind(phase)["matmul"]
        assert count == in_trace_count / trace.steps
        assert seconds == pytest.approx(in_trace / trace.steps)


def test_the_timeline_agrees_with_the_records(profiled, records):
    timeline = Timeline.load(one_file(profiled[0], "timeline.json.gz"))
    when, peak = timeline.peak()
    parts = timeline.parts_at(when)
    assert parts["parameters"] == PARAMETER_BYTES
    assert sum(parts.values()) == peak
    assert [span.name for span in timeline.phases] == ["forward", "loss", "backward", "optimizer"]
    assert list(records["memory", "peak_memory"].numbers) == [peak]
    [predicted] = records["memory", "predicted_by_tracing_memory"].numbers
    assert predicted == pytest.approx(peak, rel=0.02)


def test_the_pictures_are_pictures(profiled):
    png = one_file(profiled[0], "timeline.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert png.rstrip(b"\0").endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", png[16:24])
    assert min(width, height) > 100
    root = ElementTree.fromstring(one_file(profiled[0], "timeline.svg").read_text(encoding="utf-8"))
    assert root.tag.endswith("svg")
    assert len(list(root.iter())) > 20


def test_saved_tensors_are_recorded(records):
    """At the least the logits' softmax, the scores and the inputs of the matrix products."""
    [saved] = records["saved_tensors", "saved_memory"].numbers
    [of_parameters] = records["saved_tensors", "saved_parameter_memory"].numbers
    tokens, heads = 8, SHAPE["num_heads"]
    assert saved > 4 * (tokens * SHAPE["vocab_size"] + heads * tokens**2 + 5 * tokens * SHAPE["d_model"])
    assert 0 < of_parameters < PARAMETER_BYTES


def test_tables_are_printed(profiled):
    _, result = profiled
    words = ("aten::mm", "matmul", "forward", "backward", "parameters", "activations", "layers.0")
    assert [word for word in words if word not in result.stdout] == []
    assert "Traceback" not in result.stderr


def test_the_last_lines_name_every_file_for_people_and_how_to_open_it(profiled):
    """All but what a page is made from, and pictures that are there in two formats."""
    folder, result = profiled
    listed = result.stdout.splitlines()
    first = listed.index("files in out:")
    named = [line.split()[0] for line in listed[first + 1 :]]
    found = {name for pattern in named for name in files(folder) if Path(name).match(pattern)}
    aside = {name for name in files(folder) if Path(name).suffix == ".svg"}
    aside |= {name for name in files(folder) if Path(name).name in ("timeline.json.gz", "timeline.png")}
    assert found == set(files(folder)) - aside
    hints = dict(zip(named, listed[first + 1 :], strict=True))
    assert all(any(word in hints[name] for word in ("perfetto", "browser", "cs336 report", "charts")) for name in named)


def test_files_of_one_kind_share_a_line(tmp_path):
    folders = [tmp_path / "files" / name for name in "ab"]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "trace.json.gz").touch()
    (folders[0] / "snapshot.pickle").touch()
    lines = written_files(tmp_path / "records.jsonl", [tmp_path / "figures" / "x.png"], [*folders, tmp_path / "none"])
    assert lines[0] == f"files in {tmp_path}:"
    assert [line.split()[0] for line in lines[1:]] == [
        *("records.jsonl", "figures/x.png", "files/*/trace.json.gz", "files/a/snapshot.pickle")
    ]
    assert "2 files" in lines[3]


@pytest.mark.skipif(shutil.which("nsys", path="/usr/bin:/bin") is not None, reason="nsys is installed")
def test_without_nsys_the_profiler_of_torch_is_used(profiled):
    _, result = profiled
    lines = [line for line in result.stderr.splitlines() if "nsys" in line]
    assert lines == ["nsys is not installed, or not on PATH: using torch.profiler"]


def test_memory_alone_of_a_users_own_model(tmp_path, forked_python):
    (tmp_path / "mine.py").write_text(MODEL)
    argv = [*TINY, *ONE_STEP, "--model", "mine:build", "--only", "memory", "--output", "r/records.jsonl"]
    result = execute(forked_python, "-m", "cs336_systems", "profile", *argv, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert {item.experiment for item in record.load(tmp_path / "r" / "records.jsonl").records} == {"memory"}
    assert not list(tmp_path.rglob("trace.json.gz"))
    timeline = Timeline.load(one_file(tmp_path / "r", "timeline.json.gz"))
    assert {"embed", "mix", "head"} <= {block.module for block in timeline.blocks}


# -- experiments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", PROFILE_EXPERIMENTS)
def test_grids(name, device):
    """No cell twice, the user's device and steps in each, more cells in `course` than in `quick`."""
    quick, course = (cells([name], preset, RunConfig(device=device, num_steps=1)) for preset in ("quick", "course"))
    assert 0 < len(quick) < len(course)
    for requests in (quick, course):
        assert {(experiment, config["device"], config["num_steps"]) for experiment, config in requests} == {
            (name, device, 1)
        }
        assert len({json.dumps(request, sort_keys=True) for request in requests}) == len(requests)
    assert cells(["profiler_agreement"], "quick", RunConfig(device="cuda"))


def test_quick_grids_are_small_and_have_both_sides_of_a_comparison():
    base = RunConfig(device="cpu")
    grids = {name: [config for _, config in cells([name], "quick", base)] for name in PROFILE_EXPERIMENTS}
    for configs in grids.values():
        assert all(config["model"]["d_model"] <= 256 for config in configs)
    modes = {name: {config["mode"] for config in configs} for name, configs in grids.items()}
    assert {"inference", "train-step"} <= modes["kernels"] & modes["memory"]
    assert "inference" not in modes["saved_tensors"]
    assert len({config["checkpoint_blocks"] for config in grids["checkpointing"]}) >= 3
