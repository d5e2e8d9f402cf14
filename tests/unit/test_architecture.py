"""The rules of DESIGN that hold the modules apart, read from the source with ast: a rule nobody checks is a wish."""

import ast
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.helpers import PACKAGE, ROOT, execute, loaded_at_import, nodes

pytestmark = pytest.mark.xdist_group("sources")  # tests that read all sources: they are parsed once

OURS = PACKAGE.name
LEVELS = {
    0: ("", "config", "record", "text", "table", "flags", "commands", "files", "plain_pickle", "timeline", "predict"),
    1: ("kernels", "parallel"),
    2: ("model", "step", "hugging_face"),
    3: ("measure",),
    4: ("report",),
    5: ("experiments", "train"),
    6: ("cli", "__main__", "benchmark"),
}
"""The part of the package (a module or folder of its root, "" its __init__) to its level. A part imports from lower
levels and from itself."""
LEVEL = {part: level for level, parts in LEVELS.items() for part in parts}
PEERS = {*LEVELS[0], *LEVELS[2], *LEVELS[6]}
"""Parts that may import others of their own level."""


@dataclass(frozen=True)
class Import:
    line: int
    name: str
    """Absolute, down to the module: `torch.nn`, `cs336_systems.predict.flops`."""

    @property
    def top(self) -> str:
        return self.name.split(".")[0]

    @property
    def module(self) -> str:
        """The name below the package, for a module of ours."""
        return self.name.removeprefix(OURS).removeprefix(".")

    @property
    def part(self) -> str:
        return self.module.split(".")[0]


def module_name(path: Path) -> str:
    """Below the package: `measure.flops`; a folder's __init__ has the folder's name, the package's own is ""."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def is_module(name: str) -> bool:
    return name.removeprefix(OURS).removeprefix(".") in SOURCES


def imports(path: Path) -> list[Import]:
    """All of a file, also those inside functions, under conditions, and by name through importlib."""
    found = []
    for node in nodes(path):
        match node:
            case ast.Import(names=names):
                found += [Import(node.lineno, alias.name) for alias in names]
            case ast.ImportFrom(module=str(module), names=names, level=0):
                # `from cs336_systems.measure import flops` imports a module, `... import UserError` a name of one.
                for alias in names:
                    full = f"{module}.{alias.name}"
                    found.append(Import(node.lineno, full if module.startswith(OURS) and is_module(full) else module))
            case ast.ImportFrom():
                raise AssertionError(f"{path}:{node.lineno}: relative import")
            case ast.Call(
                func=ast.Name(id="__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name))],
            ):
                found.append(Import(node.lineno, name))
    return found


@cache
def all_imports() -> dict[str, list[Import]]:
    return {name: imports(path) for name, path in SOURCES.items()}


def test_the_reader_of_imports_sees_every_kind(tmp_path):
    """The tests below would all pass if this one found nothing."""
    path = tmp_path / "sample.py"
    path.write_text(
        "import torch.nn as nn\nfrom cs336_systems import record\nfrom cs336_systems.config import UserError\n"
        "def f():\n    from cs336_systems.predict import flops, gpus\n    import rich\n"
        "if True:\n    __import__('numpy')\nimportlib.import_module('cs336_systems.cli')\n"
    )
    assert sorted((found.line, found.name) for found in imports(path)) == [
        (1, "torch.nn"),
        (2, "cs336_systems.record"),
        (3, "cs336_systems.config"),
        (5, "cs336_systems.predict.flops"),
        (5, "cs336_systems.predict.gpus"),
        (6, "rich"),
        (8, "numpy"),
        (9, "cs336_systems.cli"),
    ]


def test_imports_in_functions_are_not_loaded_at_import(tmp_path):
    path = tmp_path / "sample.py"
    path.write_text(
        "import os.path\nif True:\n    from torch import nn\ntry:\n    import rich\nexcept ImportError:\n    pass\n"
        "class A:\n    import json\n    def f(self):\n        import triton\ndef g():\n    import torchao\n"
    )
    assert loaded_at_import(path) == {"os", "torch", "rich", "json"}


def test_every_part_has_a_level():
    parts = {name.split(".")[0] for name in SOURCES}
    assert parts == set(LEVEL)


def breaches(rule) -> list[str]:
    """`module:line imports name` for every import in the package for which `rule(module, import)` does not hold."""
    return [
        f"{name or '__init__'}:{found.line} imports {found.name}"
        for name, all_found in all_imports().items()
        for found in all_found
        if not rule(name, found)
    ]


def from_lower_levels_only(module: str, found: Import) -> bool:
    if found.top != OURS:
        return True
    part = module.split(".")[0]
    if LEVEL[found.part] == LEVEL[part]:
        return found.part == part or part in PEERS
    return LEVEL[found.part] < LEVEL[part]


def the_standard_library_and_rich_on_the_lowest_level(module: str, found: Import) -> bool:
    return LEVEL[module.split(".")[0]] > 0 or found.top in {*sys.stdlib_module_names, "rich", OURS}


def records_and_nothing_else_in_the_report(module: str, found: Import) -> bool:
    """Nobody calls the report, and it runs nothing: its tables can be made anywhere from the file alone."""
    if not module.startswith("report"):
        return True
    draws = module == "report.picture" and found.top in ("matplotlib", "cycler")
    ours = found.top == OURS and (LEVEL[found.part] == 0 or found.part == "report")
    return draws or ours or found.top in sys.stdlib_module_names


def no_torch_in_predictions_and_readers_of_files(module: str, found: Import) -> bool:
    """`predict` and `measure.readers` are levels without torch, not lists of exceptions."""
    if not module.startswith(("predict", "measure.readers")):
        return True
    ours = found.top == OURS and (LEVEL[found.part] == 0 or found.module.startswith("measure.readers"))
    return ours or found.top in sys.stdlib_module_names


@pytest.mark.parametrize(
    "rule",
    [
        from_lower_levels_only,
        the_standard_library_and_rich_on_the_lowest_level,
        records_and_nothing_else_in_the_report,
        no_torch_in_predictions_and_readers_of_files,
    ],
)
def test_imports(rule):
    assert breaches(rule) == []


def test_no_module_hides_one_of_the_standard_library():
    """`python cs336_systems/benchmark/benchmark.py` puts its folder first in sys.path: a profile.py there, and
    torch.compile imports it in place of the standard one. The same goes for the package's root."""
    names = {
        path.stem for folder in (PACKAGE, PACKAGE / "benchmark") for path in folder.iterdir() if path.suffix == ".py"
    }
    names |= {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert "calculate_memory" in names
    assert names & set(sys.stdlib_module_names) == set()


def test_modules_and_names_that_must_not_import_torch(tmp_path):
    modules = ["cli", "experiments.runner", "predict.memory_model", "predict.attention_model"]
    modules += ["predict.parallel_model", "measure.readers.trace", "measure.readers.nsys", "report.sections"]
    program = f"import sys; from {OURS} import RunConfig, load\nassert 'torch' not in sys.modules\n" + "".join(
        f"import {OURS}.{module}\nassert not {{'torch', 'matplotlib'}} & sys.modules.keys(), {module!r}\n"
        for module in modules
    )
    result = execute(sys.executable, "-c", program, cwd=tmp_path, timeout=30)
    assert result.returncode == 0, result.stderr


def eager_decorators(module: ast.Module) -> list[str]:
    """The decorators of functions and methods that run when a module is imported."""
    tops = module.body
    tops = [node for top in tops for node in (top.body if isinstance(top, ast.ClassDef) else [top])]
    return [ast.unparse(one) for node in tops if isinstance(node, ast.FunctionDef) for one in node.decorator_list]


def test_no_module_imports_torchs_compiler_for_a_decorator():
    """`torch.compiler.disable` and its like import it where they decorate: 2 s of CPU in every process."""
    sample = "@one\ndef f():\n  @no\n  def g(): ...\nclass A:\n  @two.three\n  def h(): ..."
    assert eager_decorators(ast.parse(sample)) == ["one", "two.three"]
    for name, path in SOURCES.items():
        assert not [one for one in eager_decorators(nodes(path)[0]) if one.startswith("torch.compiler.")], name


def test_every_public_module_says_what_it_is_for():
    public = [name for name in SOURCES if not name.split(".")[-1].startswith("_") or not name]
    assert [name for name in public if not ast.get_docstring(nodes(SOURCES[name])[0])] == []


def test_nothing_is_left_undone():
    words = re.compile(r"\b(NotImplementedError|TODO|FIXME)\b")
    assert words.search("TODO: a word this must find")
    files = [*SOURCES.values(), ROOT / "pyproject.toml", ROOT / "Makefile"]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if words.search(line)
    ]
    assert found == []


# -- readability ------------------------------------------------------------------------------------------------------

DEVICE_CODE = re.compile(
    r"kernels\.(flash\.(flash_triton|hopper_forward|hopper_backward|hopper_passes)|fused\.(pointwise|fp8)_triton)"
)
MAX_LINES, MAX_PARAMETERS = 60, 12


def functions() -> list[tuple[str, ast.FunctionDef]]:
    """All functions but those of device code, with their names."""
    return [
        (f"{module}.{node.name}", node)
        for module, path in SOURCES.items()
        if not DEVICE_CODE.fullmatch(module)
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef)
    ]


def test_functions_are_short():
    lengths = [(name, (function.end_lineno or 0) - function.lineno + 1) for name, function in functions()]
    assert len(lengths) > 1000
    assert [found for found in lengths if found[1] > MAX_LINES] == []


def test_functions_take_few_parameters():
    counts = [
        (name, len(function.args.posonlyargs) + len(function.args.args) + len(function.args.kwonlyargs))
        for name, function in functions()
    ]
    assert [found for found in counts if found[1] > MAX_PARAMETERS] == []


def test_no_two_modules_share_a_name():
    """A module is known by its name: none must be told apart by its folder alone. Folders of topics may have names of
    modules elsewhere."""
    names = [name.split(".")[-1] for name, path in SOURCES.items() if path.name not in ("__init__.py", "__main__.py")]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


def test_modules_of_a_topic_are_imported_without_torch():
    """The runner and the report import all of a topic but its instruments, `measure_*`."""
    topics = [name for name in SOURCES if name.startswith("experiments.") and name.count(".") == 2]
    assert len(topics) > 20
    for module in topics:
        if not module.split(".")[-1].startswith("measure_"):
            assert not loaded_at_import(SOURCES[module]) & {"torch", "triton"}, module


PRIVATE_WORDS = re.compile(r"^(Of|Those|Whether|Whoever|What|Who) ", re.MULTILINE)


def test_docstrings_begin_with_a_statement():
    """The first line of a docstring makes sense alone."""
    documented = [
        (module, ast.get_docstring(node) or "")
        for module, path in SOURCES.items()
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
    ]
    found = [(module, text.splitlines()[0]) for module, text in documented if text]
    assert len(found) > 1000
    assert [one for one in found if PRIVATE_WORDS.match(one[1]) and not one[1].endswith("?")] == []


def test_groups_of_tests_stay_together(request):
    """Ranks of two tests at a time would starve each other, and what a module shares would be made twice. A pytest that
    does not know of xdist's groups (9.2 with xdist 3.8) says nothing."""
    if getattr(request.config, "workerinput", None) is None:
        pytest.skip("one worker")
    assert request.node.nodeid.endswith("@sources")
