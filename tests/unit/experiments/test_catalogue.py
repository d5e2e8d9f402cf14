"""The catalogue: an experiment is one module of a topic folder, and its name is written nowhere else."""

import ast
import json
import re
import shutil
import sys
from functools import cache
from pathlib import Path

import pytest

from cs336_systems.config import RunConfig, UserError
from cs336_systems.experiments.catalogue import ALL, catalogue, cells, of_preset, runnable
from cs336_systems.experiments.runner import gather
from cs336_systems.experiments.spec import HANDOUT_2026, PRESETS
from cs336_systems.record import GIB, cell_key
from tests.helpers import PACKAGE, ROOT, clean_env, execute, loaded_at_import, nodes

pytestmark = pytest.mark.xdist_group("sources")  # tests that read all sources: they are parsed once

# -- one experiment from one new module -------------------------------------------------------------------------------

COMPLETE_EXAMPLE = re.search(
    r"```python\n(# cs336_systems/experiments/.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S
)
"""The example of CONTRIBUTING.md: the test adds exactly what a contributor is shown."""


@pytest.fixture(scope="module")
def extended(tmp_path_factory) -> Path:
    """A copy of the package with one module more, and nothing else changed."""
    assert COMPLETE_EXAMPLE is not None
    folder = tmp_path_factory.mktemp("extended")
    shutil.copytree(PACKAGE, folder / PACKAGE.name)
    source = COMPLETE_EXAMPLE[1]
    (folder / source.splitlines()[0].removeprefix("# ")).write_text(source)
    return folder


PROGRAM = """
import contextlib, io, json, sys
sys.path.insert(0, {folder!r})
from cs336_systems.cli import main

outputs = []
for words in {commands!r}:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            code = main(words)
        except SystemExit as exit:
            code = exit.code
    assert code == 0, words
    outputs.append(output.getvalue())
print(json.dumps(outputs))
"""


def run(folder: Path, *commands: str) -> list[str]:
    """The output of each command in the copy, all in one process."""
    program = PROGRAM.format(folder=str(folder), commands=[command.split() for command in commands])
    done = execute(sys.executable, "-P", "-c", program, cwd=folder, timeout=300, env=clean_env())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_new_module_is_a_new_experiment(extended):
    measure = "run matmul_rate --device cpu --output {}/records.jsonl"
    report = "report a -o {0} --lang {0} --formats md"
    manual, first, again, table, comparison, *_ = run(
        extended,
        "run --help",
        *[measure.format("a")] * 2,
        "table a/records.jsonl --format md",
        "compare a/records.jsonl a/records.jsonl --metric matmul_time",
        *(report.format(language) for language in ("en", "zh")),
    )
    assert "matmul_rate" in manual
    assert "2 cells measured" in first
    assert "2 taken from the file" in again
    assert "matmul_rate: rate by size" in table
    assert "matmul_time" in comparison
    for language, words in (("en", ["## Rate of a matmul"]), ("zh", ["## 矩阵乘的速率", "规模"])):
        text = (extended / language / "report.md").read_text()
        assert all(word in text for word in words)
        assert text.count("matmul-rate-1.png") == 1  # its chart
    assert "matmul_rate" in (extended / "en" / "index.html").read_text()


FOR_EXPERIMENTS = (
    "tests/unit/experiments/test_catalogue.py",
    "tests/unit/test_architecture.py::test_modules_of_a_topic_are_imported_without_torch",
    "tests/unit/report/test_report_document.py::test_golden",
)
"""Tests that read every experiment, or compare files that list experiments."""


def test_the_example_passes_the_tests_of_experiments(extended):
    """With nothing but its row in ARCHITECTURE.md, as CONTRIBUTING.md says."""
    shutil.copytree(ROOT / "tests", extended / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.suffix in (".md", ".toml") or path.name in ("docs", "results"):
            (extended / path.name).symlink_to(path)
    page, path = (ROOT / "ARCHITECTURE.md").read_text(), extended / "ARCHITECTURE.md"
    path.unlink()
    path.write_text(page.replace("| `steps/` | ", "| `steps/` | `matmul_rate.py`: matmul_rate · ", 1))
    words = ["-q", "-n", "0", "-p", "no:cacheprovider", "--basetemp", str(extended / "temporary"), *FOR_EXPERIMENTS]
    words += ["-k", "not a_new_module and not the_example"]
    done = execute(sys.executable, "-m", "pytest", *words, cwd=extended, timeout=300, env=clean_env())
    assert done.returncode == 0, done.stdout


# -- names ------------------------------------------------------------------------------------------------------------

HOMONYMS = {
    "accelerate": "a function",
    "memory": "a command, a metric's part and a folder",
    "kernels": "a part of the fast step and a folder",
    "precision": "a field of RunConfig",
    "compile": "a field of RunConfig",
    "warmup": "a part of metric names",
    "train": "a command",
    "bench": "a command",
    "flash": "a part of implementation names",
    "ddp": "a value of `train --parallel`",
    "fsdp": "a value of `train --parallel`",
    "collectives": "a field of older records",
    "fast_step": "a method's name",
    "peak_memory": "a metric of several experiments",
    "accumulation": "a word in the description of GPUs",
    "checkpointing": "a word in descriptions of memory",
}
"""Names that also mean something else; the test looks for them only as an item of a list of experiments."""


@cache
def texts() -> dict[Path, list[str]]:
    """Every string of the package, by file."""
    return {
        path: [node.value for node in nodes(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        for path in PACKAGE.rglob("*.py")
    }


def topic_of(name: str) -> str:
    for path in (PACKAGE / "experiments").glob("*/*.py"):
        if f'name="{name}"' in path.read_text():
            return path.parent.name
    raise AssertionError(f"{name} is defined in no topic folder")


@pytest.mark.parametrize("name", [name for name in catalogue() if name not in HOMONYMS])
def test_an_experiments_name_is_in_its_topic_folder_only(name):
    word = re.compile(rf"(?<![\w.]){name}(?![\w.])")
    own = PACKAGE / "experiments" / topic_of(name)
    assert [path for path, found in texts().items() if own not in path.parents and any(map(word.search, found))] == []


def test_no_other_list_of_experiments_exists():
    """A collection of two or more names is a list of experiments, also where each name means something else, too."""
    names = set(catalogue())
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in nodes(path):
            items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
            words = [item.value for item in items if isinstance(item, ast.Constant)]
            if len(words) > 1 and len(names & set(map(str, words))) == len(words):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {words}")
    allowed = ("train/settings.py", "train/loop.py")  # --parallel ddp, fsdp
    assert [place for place in found if not any(path in place for path in allowed)] == []


def test_the_architecture_page_says_where_each_experiment_is():
    page = (ROOT / "ARCHITECTURE.md").read_text()
    listed = {
        name: f"{topic}/{path}"
        for topic, row in re.findall(r"^\| `(\w+)/` \| (.+?) \|", page, re.M)
        for path, names in re.findall(r"`(\w+\.py)`: ([\w, ]+)", row)
        for name in names.strip().split(", ")
    }
    assert listed.keys() == catalogue().keys()
    for name, path in listed.items():
        assert f'name="{name}"' in (PACKAGE / "experiments" / path).read_text()


# -- grids ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_grid_gives_cells_with_labels(preset, device):
    for name in of_preset(preset):
        instrument = catalogue()[name].instrument
        try:
            requests = cells([name], preset, RunConfig(device=device))
        except UserError as error:
            if device == "cpu" and "needs a CUDA GPU" in str(error):
                continue
            raise
        assert requests, name
        assert all(instrument.label(config, [name]) for _, config in requests)


@pytest.mark.parametrize("preset", PRESETS)
def test_cells_of_an_experiment_have_different_names(preset):
    for name in of_preset(preset):
        names = [cell.name for cell in gather(cells([name], preset, RunConfig(device="cuda"), 140 * GIB))]
        assert len(names) == len(set(names)), name


def test_equal_labels_are_told_apart_by_numbers_with_their_names():
    def names(experiment: str, preset: str) -> list[str]:
        return [cell.name for cell in gather(cells([experiment], preset, RunConfig(device="cpu")))]

    before = "parallel_plan xxl train-step bf16 auto cuda h100"
    assert names("parallel_plan", "course") == [
        f"{before} {count}, gpus {gpus}" for count in ("feed-forward", "transformer") for gpus in (64, 1024, 16384)
    ]
    assert names("collectives", "course") == [f"collectives gloo cpu, ranks {ranks}" for ranks in (2, 4, 6)]
    assert "memory_model small train-step fp32 reference cuda, context length 128" in names("memory_model", "course")
    assert all(re.search(r"interleaved, (no )?link", name) for name in names("ddp", "quick"))
    assert not any("," in name for name in names("warmup", "quick")), "nothing where labels differ"


DROPPED_2026 = {"bucket_model", "parallel_plan", "flash_leaderboard"}
"""Experiments that answer problems of 2025 only."""


def test_the_preset_2026_has_what_the_handout_asks_for():
    found = of_preset(HANDOUT_2026)
    assert not DROPPED_2026 & set(found)
    assert {"end_to_end", "kernels", "memory", "saved_tensors", "checkpointing", "flash", "fsdp"} <= set(found)
    assert of_preset("course") == runnable()


def test_all_names_every_experiment_that_the_device_can_run():
    on_gpu = {name for name, _ in cells([ALL], HANDOUT_2026, RunConfig(device="cuda"))}
    on_cpu = {name for name, _ in cells([ALL], HANDOUT_2026, RunConfig(device="cpu"))}
    assert on_gpu == set(of_preset(HANDOUT_2026))
    assert on_gpu - on_cpu == {"profiler_agreement", "train_leaderboard"}
    named = [name for name, _ in cells(["warmup", ALL, "warmup"], "quick", RunConfig(device="cpu"))]
    assert named.count("warmup") == 4, "not twice"


@pytest.mark.parametrize("name", ["warmup", "pytorch_attention", "flash", "ddp", "optimizer_sharding", "collectives"])
def test_cells_that_2026_shares_with_2025_have_equal_keys(name):
    """So that what was measured for one handout is not measured again for the other, whatever a size is called."""
    keys = [
        {cell_key(config) for _, config in cells([name], preset, RunConfig(device="cuda"), 140 * GIB)}
        for preset in ("course", HANDOUT_2026)
    ]
    assert keys[0] == keys[1]


def test_the_largest_model_of_2026_is_predicted_not_to_fit_eager_or_compiled():
    for name in ("precision", "compile"):
        instrument = catalogue()[name].instrument
        steps = [
            config
            for _, config in cells([name], HANDOUT_2026, RunConfig(device="cuda"))
            if config["size"] == "2026/10B" and config["mode"] == "train-step"
        ]
        assert len(steps) == 2
        assert all(instrument.memory(config).predicted > 150 * GIB for config in steps)


def test_every_problem_of_the_2026_handout_is_in_the_documentation():
    page = (ROOT / "docs" / "COURSE.md").read_text()
    for experiment in catalogue().values():
        for problem in experiment.problems_2026:
            rows = [row for row in page.splitlines() if re.search(rf"^\|[^|]*\b{problem}\b", row)]
            assert any(experiment.name in row for row in rows), (problem, experiment.name)


def test_instruments_are_functions_of_modules_that_only_the_worker_imports():
    for experiment in catalogue().values():
        if experiment.instrument is not None:
            place, function = experiment.instrument.measure.split(":")
            path = ROOT / (place.replace(".", "/") + ".py")
            is_worker_only = path.name.startswith("measure_")
            assert is_worker_only or not loaded_at_import(path) & {"torch", "triton"}, place
            assert function in {
                node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
            }


def test_titles_and_questions_have_both_languages():
    for experiment in catalogue().values():
        assert experiment.question.zh, experiment.name
        assert experiment.title.zh or experiment.title.en.startswith("torch."), experiment.name


@pytest.mark.parametrize(
    ("names", "preset", "said"),
    [
        (["nope"], "quick", "unknown experiment 'nope'"),
        (["bench"], "quick", "'bench'"),
        (["warmup"], "x", "preset 'x'"),
        (["bucket_model"], "2026", "bucket_model answers no problem of the 2026 handout; use --preset course"),
    ],
)
def test_unknown_names_are_one_clear_line(names, preset, said):
    with pytest.raises(UserError, match=re.escape(said)):
        cells(names, preset, RunConfig())
