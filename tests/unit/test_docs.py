"""The documents stay true: commands parse, experiments, make targets and links exist, both READMEs agree."""

import dataclasses
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from cs336_systems import cli
from cs336_systems.experiments.catalogue import ALL, runnable
from tests.unit.train.stores_by_hand import write_store

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("results/**/README.md")])
COMMAND = re.compile(r"(?:^|\s)cs336 (.+)")
PLACEHOLDERS = {"A", "B", "COMMAND", "FILE", "NAME...", "RUN", "STEP|PATH"}
"""Words in capitals that stand for something of the reader's."""


def code_of(page: Path) -> list[str]:
    """Lines of fenced blocks and inline code, without comments and prompts; continued lines are joined."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:bash|sh|text|console)?\n(.*?)^```", text, re.M | re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    outside = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return [
        re.sub(r"\s#.*", "", line).removeprefix("$ ").strip() for line in [*lines, *re.findall(r"`([^`\n]+)`", outside)]
    ]


def commands_of(page: Path) -> list[str]:
    """The `cs336 ...` commands of a page, as they are written there."""
    return [line for line in code_of(page) if re.match(r"(cs336|torchrun .*-m cs336_systems|srun torchrun .*) ", line)]


def arguments_of(line: str) -> list[str]:
    """The arguments of a command line of the package, whichever way it is started."""
    words = shlex.split(re.sub(r"\s*(\||>|&&).*", "", line))
    start = words.index("cs336_systems") if "cs336_systems" in words else words.index("cs336")
    return words[start + 1 :]


CASES = [(page, line) for page in PAGES for line in dict.fromkeys(commands_of(page))]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Commands only hand over their arguments, and nothing runs."""
    seen: list[object] = []

    def note(arguments: object) -> int:
        seen.append(arguments)
        return 0

    inert = {name: dataclasses.replace(command, function=note) for name, command in cli.COMMANDS.items()}
    monkeypatch.setattr(cli, "COMMANDS", inert)
    return seen


@pytest.mark.parametrize(("page", "line"), CASES, ids=[f"{page.relative_to(ROOT)}: {line}" for page, line in CASES])
def test_commands_parse(page: Path, line: str, parsed: list[object], tmp_path: Path) -> None:
    arguments = arguments_of(line)
    if "--data" in arguments:  # the reader's own file
        data = tmp_path / Path(arguments[arguments.index("--data") + 1]).name
        if "--pack" in arguments:
            data.mkdir()
            write_store(data, np.arange(400) % 97, [400])
        else:
            data.write_bytes(bytes(4096))
        arguments[arguments.index("--data") + 1] = str(data)
    if "--init" in arguments:
        weights = tmp_path / "weights.safetensors"
        weights.write_bytes((2).to_bytes(8, "little") + b"{}")
        arguments[arguments.index("--init") + 1] = str(weights)
    if not arguments or arguments[0] not in cli.COMMANDS:
        assert arguments in ([], ["--help"], ["<command>"], ["COMMAND", "--help"]), f"{line!r} names no command"
        return
    if len(arguments) == 1 or PLACEHOLDERS & set(arguments):
        return  # the command's name alone, or with words that stand for the reader's
    assert cli.main(arguments) == 0
    (found,) = parsed
    assert set(getattr(found, "names", ())) <= {*runnable(), ALL}


def test_there_are_commands_to_check() -> None:
    assert len(CASES) > 60


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    asked = {match[1] for line in code_of(page) if (match := re.match(r"make ([a-z-]+)", line))}
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in asked)


EXAMPLES = {"cs336_systems/experiments/steps/matmul_rate.py", "tests/adapters.py"}
"""A file that the reader is shown how to add, and one of the course's."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_exist(page: Path) -> None:
    """A page that names a module by a path of two or more parts, or by its file, names one that is there."""
    files = [
        path.as_posix()
        for top in ("cs336_systems", "tests", "examples", "tools")
        for path in (ROOT / top).rglob("*.py")
    ]
    named = set(re.findall(r"(?<![\w/*{}])\w[\w/]*\.py\b", page.read_text(encoding="utf-8")))
    assert [name for name in sorted(named - EXAMPLES) if not any(file.endswith("/" + name) for file in files)] == []


# -- both READMEs -----------------------------------------------------------------------------------------------------

ENGLISH, CHINESE = (ROOT / name for name in ("README.md", "README.zh-CN.md"))


OUTPUTS = [
    (page, *block.split("\n", 1))
    for page in PAGES
    for block in re.findall(
        r"^```(?:text|console)?\n\$ (cs336 (?:fit|memory) .*?)^```", page.read_text("utf-8"), re.M | re.S
    )
]


@pytest.mark.parametrize(("page", "line", "shown"), OUTPUTS, ids=[f"{page.name}: {line}" for page, line, _ in OUTPUTS])
def test_shown_output_is_what_the_command_prints(
    page: Path, line: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines may be left out, as `...`."""
    assert cli.main(arguments_of(line)) == 0
    printed = [one.rstrip() for one in capsys.readouterr().out.splitlines()]
    assert [one for one in shown.splitlines() if one != "..." and one.rstrip() not in printed] == []


def test_speeds_of_published_models_are_those_of_the_results() -> None:
    """The tables of docs/MODELS.md: thousands of tokens per second, with the state of LLMQ and in FP8."""
    lines = (ROOT / "results/h200/tables.md").read_text("utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("| qwen2.5/")]
    speeds = {(row[0].removeprefix("qwen2.5/"), "FP8" in row[1]): row[3] for row in rows if "fp32" not in row[1]}
    text = (ROOT / "docs/MODELS.md").read_text("utf-8")
    shown = re.findall(r"^\| ([\d.]+B) \| [\d.]+ \| ([\d.]+) \|(.*)$", text, re.M)
    found = {(size, not rest): speed for size, speed, rest in shown}
    assert len(found) == 8
    assert found == {key: speeds[key] for key in found}


def test_readmes_are_short() -> None:
    text = ENGLISH.read_text()
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 1200
    assert len(CHINESE.read_text(encoding="utf-8").splitlines()) <= 150


def test_readmes_have_the_same_sections() -> None:
    def shape(page: Path) -> list[str]:
        """The kind of every block: headings by level, fences, tables by rows, pictures."""
        lines = page.read_text(encoding="utf-8").splitlines()
        kinds = (r"#+ ", r"```\w*", r"\|", r"!\[", r"- \*\*")
        return [match[0] for line in lines for kind in kinds if (match := re.match(kind, line))]

    assert shape(ENGLISH) == shape(CHINESE)


def test_readmes_have_the_same_commands() -> None:
    assert code_of(ENGLISH) == code_of(CHINESE)


def test_readmes_have_the_same_numbers_and_links() -> None:
    def facts(page: Path) -> list[str]:
        return re.findall(r"\d[\d.]* (?:ms|GiB)|\d[\d.]*%|\]\([^)]+\)", page.read_text(encoding="utf-8"))

    assert [fact for fact in facts(ENGLISH) if "README" not in fact] == [
        fact for fact in facts(CHINESE) if "README" not in fact
    ]


def test_tables_of_the_readme_are_narrow() -> None:
    for line in ENGLISH.read_text().splitlines():
        if line.startswith("|"):
            assert line.count("|") - 1 <= 7
