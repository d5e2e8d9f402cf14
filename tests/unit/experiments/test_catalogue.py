"""The catalogue: an experiment is one module of a topic folder, and its name is written nowhere else."""

import ast
import re
import shutil
import sys
from pathlib import Path

import pytest

from cs336_systems.config import RunConfig, UserError
from cs336_systems.experiments import catalogue as module
from cs336_systems.experiments.catalogue import catalogue, cells, runnable
from cs336_systems.experiments.spec import PRESETS
from tests.helpers import PACKAGE, ROOT, clean_env, execute

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
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    source = COMPLETE_EXAMPLE[1]
    (folder / source.splitlines()[0].removeprefix("# ")).write_text(source)
    return folder


def run(folder: Path, *words: str) -> str:
    """The output of `python -m cs336_systems WORDS` in the copy."""
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); from cs336_systems.cli import main; sys.exit(main())"
    done = execute(sys.executable, "-P", "-c", program, *words, cwd=folder, timeout=300, env=clean_env())
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_new_module_is_a_new_experiment(extended):
    assert "matmul_rate" in run(extended, "run", "--help")
    for output, said in (("a", "2 cells measured"), ("a", "2 taken from the file"), ("b", "2 cells measured")):
        assert said in run(extended, "run", "matmul_rate", "--device", "cpu", "--output", f"{output}/records.jsonl")
    assert "matmul_rate: rate by size" in run(extended, "table", "a/records.jsonl", "--format", "md")
    assert "matmul_rate" in run(extended, "compare", "a/records.jsonl", "b/records.jsonl", "--metric", "matmul_time")
    for language, title in (("en", "## Rate of a matmul"), ("zh", "## 矩阵乘的速率")):
        run(extended, "report", "a", "-o", language, "--lang", language, "--formats", "md")
        text = (extended / language / "report.md").read_text()
        assert title in text
        assert text.count("matmul-rate-1.png") == 1  # its chart
    assert "加速" not in text
    assert "规模" in text  # a heading in Chinese
    assert "matmul_rate" in (extended / "en" / "index.html").read_text()


# -- names ------------------------------------------------------------------------------------------------------------

HOMONYMS = {
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
}
"""Names that also mean something else; the test looks for them only as an item of a list of experiments."""


def texts_outside(topic: str) -> dict[Path, list[str]]:
    """Every string of the package outside a topic's folder, by file."""
    own = PACKAGE / "experiments" / topic
    found = {}
    for path in PACKAGE.rglob("*.py"):
        if own not in path.parents:
            tree = ast.parse(path.read_text())
            found[path] = [
                node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
    return found


def topic_of(name: str) -> str:
    experiment = catalogue()[name]
    for value in vars(module).values():
        assert value is not experiment
    for path in (PACKAGE / "experiments").glob("*/*.py"):
        if f'name="{name}"' in path.read_text():
            return path.parent.name
    raise AssertionError(f"{name} is defined in no topic folder")


@pytest.mark.parametrize("name", [name for name in catalogue() if name not in HOMONYMS])
def test_an_experiments_name_is_in_its_topic_folder_only(name):
    word = re.compile(rf"(?<![\w.]){name}(?![\w.])")
    places = [str(path) for path, texts in texts_outside(topic_of(name)).items() if any(map(word.search, texts))]
    assert places == []


def test_no_other_list_of_experiments_exists():
    """A collection of two or more names is a list of experiments, also where each name means something else, too."""
    names = set(catalogue())
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
            words = [item.value for item in items if isinstance(item, ast.Constant)]
            if len(words) > 1 and len(names & set(map(str, words))) == len(words):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {words}")
    allowed = ("train/settings.py", "train/loop.py")  # --parallel ddp, fsdp
    assert [place for place in found if not any(path in place for path in allowed)] == []


# -- grids ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_grid_gives_cells_with_labels(preset, device):
    for name in runnable():
        instrument = catalogue()[name].instrument
        try:
            requests = cells([name], preset, RunConfig(device=device))
        except UserError as error:
            assert "needs a CUDA GPU" in str(error)
            assert device == "cpu"
            continue
        assert requests, name
        assert all(instrument.label(config, [name]) for _, config in requests)


def test_instruments_are_functions_of_modules_that_only_the_worker_imports():
    for experiment in catalogue().values():
        if experiment.instrument is not None:
            place, function = experiment.instrument.measure.split(":")
            path = ROOT / (place.replace(".", "/") + ".py")
            assert path.name.startswith("measure_") or "torch" not in path.read_text(), place
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
    ],
)
def test_unknown_names_are_one_clear_line(names, preset, said):
    with pytest.raises(UserError, match=re.escape(said)):
        cells(names, preset, RunConfig())
