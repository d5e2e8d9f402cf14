"""The command line: mistakes are one line and exit code 2, the seed's commands run by path, tables in every format.

Most mistakes are told before any process is started, so they are tested in this one; a few again as a user meets them.
"""

import csv
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cs336_systems import __version__, record
from cs336_systems.cli import COMMANDS, main
from cs336_systems.config import RunConfig, model_config
from cs336_systems.experiments import runner as runner_module
from cs336_systems.record import CELL_TIME, SCHEMA_VERSION, Environment, Record
from tests.helpers import CPU_ONLY, CS336, MODEL, PACKAGE, TINY, clean_env, execute

BY_PATH = {name: PACKAGE / "benchmark" / f"{name}.py" for name in ("benchmark", "calculate_memory")}


@pytest.fixture(autouse=True)
def in_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in CPU_ONLY.items():
        monkeypatch.setenv(name, value)


def exit_code(argv: list[str]) -> int:
    try:
        return main(argv)
    except SystemExit as exit:
        return exit.code


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}


def assert_refused(argv: list[str], named: list[str], capsys) -> str:
    """Exit code 2, nothing printed but one line that names what was wrong, no file made."""
    before = files(Path.cwd())
    code = exit_code(argv)
    said = capsys.readouterr()
    assert code == 2, said
    assert said.out == ""
    assert said.err.count("\n") == 1, said.err
    assert said.err.startswith("cs336")
    assert all(word in said.err for word in named), said.err
    assert files(Path.cwd()) == before
    return said.err


# -- mistakes told before a process is started ------------------------------------------------------------------------

NUMBERS = ("batch_size", "context_length", "d_model", "num_layers", "num_heads", "d_ff", "vocab_size", "num_steps")


@pytest.fixture
def no_worker(monkeypatch):
    def start():
        pytest.fail("a worker was started for a configuration that cannot be run")

    monkeypatch.setattr(runner_module, "Worker", start)


@pytest.mark.parametrize("value", ["0", "-1"])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_below_one(name, value, no_worker, capsys):
    assert_refused(["bench", *TINY, f"--{name}", value], [name, value], capsys)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["bench", "--warmup_steps", "-1"], ["warmup_steps", "-1"]),
        (["bench", "--checkpoint_blocks", "-2"], ["checkpoint_blocks", "-2"]),
        (["bench", "--max_grad_norm", "nan"], ["max_grad_norm", "nan"]),
        (["bench", "--rope_theta", "0"], ["rope_theta", "0"]),
        (["bench", "--num_steps", "many"], ["num_steps", "many"]),
        (["bench", "--context_lengths", "8,x"], ["context_lengths", "8,x"]),
        (["bench", "--d_model", "17", "--num_heads", "2"], ["d_model 17", "num_heads 2"]),
        (["bench", "--d_model", "6", "--num_heads", "2"], ["6 / 2 = 3"]),
        (["bench", "--size", "huge"], ["'huge'", "2.7B"]),
        (["bench", "--sizes", "tiny,huge"], ["'huge'"]),
        (["bench", "--mode", "sideways"], ["'sideways'", "train-step"]),
        (["bench", "--modes", "forward,sideways"], ["'sideways'", "train-step"]),
        (["bench", "--precision", "fp7"], ["'fp7'", "bf16"]),
        (["bench", "--precisions", "fp7"], ["'fp7'", "bf16"]),
        (["bench", "--attention", "vague"], ["'vague'", "sdpa"]),
        (["bench", "--attentions", "vague"], ["'vague'", "sdpa"]),
        (["bench", "--device", "tpu"], ["'tpu'", "cpu"]),
        (["bench", "--model", "mymodel"], ["'mymodel'", "package.module:factory"]),
        (["bench", "--model", "my/model.py:build"], ["'my/model.py:build'"]),
        (["bench", "--nonsense", "1"], ["--nonsense"]),
        (["run", "astrology"], ["'astrology'", "end_to_end"]),
        (["run", "end_to_end", "--preset", "leisurely"], ["'leisurely'", "quick"]),
        (["run", "end_to_end", "--num_steps", "0"], ["num_steps", "0"]),
        (["run", "end_to_end", "--device", "tpu"], ["'tpu'"]),
        (["run"], ["experiment", "end_to_end"]),
        (["memory", "--d_model", "6", "--num_heads", "2"], ["6 / 2 = 3"]),
        (["memory", "--size", "huge"], ["'huge'"]),
        (["fit", "--gpu", "abacus"], ["'abacus'"]),
        (["fit", "--gpu", "0GiB"], ["'0GiB'"]),
        (["fit", "--sizes", "huge"], ["'huge'"]),
        (["fit", "--context_lengths", "0"], ["context_length", "0"]),
        (["table"], ["file of records"]),
        (["table", "missing.jsonl"], ["'missing.jsonl'"]),
        (["table", "x.jsonl", "--format", "papyrus"], ["'papyrus'", "typst"]),
        (["completion", "--shell", "fish"], ["'fish'", "bash"]),
    ],
    ids=" ".join,
)
def test_mistakes(argv, named, no_worker, capsys):
    assert_refused(argv, named, capsys)


@pytest.mark.parametrize("command", [["bench", *TINY], ["run", "accumulation"]], ids=["bench", "run"])
@pytest.mark.parametrize("output", ["file/below.jsonl", "file/deeper/below.jsonl", "folder"])
def test_output_that_cannot_be_written(command, output, no_worker, capsys, tmp_path):
    """Below a regular file nobody can write, not even root."""
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder").mkdir()
    assert_refused([*command, "--output", output], [f"'{output}'"], capsys)
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.parametrize("flag", ["--timeout", "--peak_tflops"])
@pytest.mark.parametrize("value", ["-1", "0", "nan", "inf"])
def test_timeouts_and_peaks_that_cannot_be(flag, value, no_worker, capsys):
    """--timeout -1 and inf end in a traceback of queue.get; a peak below 0 makes an MFU below 0."""
    assert_refused(["bench", *TINY, flag, value], [flag.removeprefix("--"), value], capsys)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"size,ms\nsmall,12\n", ["line 1"]),
        (b'{"results": []}\n', ["line 1"]),
        (b"[1, 2]\n", ["line 1"]),
        (b"\x89PNG\r\n\x1a\n\x00\x00", ["line 1"]),
        (b"no line end", ["line 1"]),
        (b'{"experiment": "bench", "metric": "x", "schema_version": 1}\n', ["line 1"]),
    ],
    ids=["csv", "json", "array", "binary", "no line end", "fields missing"],
)
def test_table_of_a_foreign_file(content, named, capsys, tmp_path):
    (tmp_path / "foreign.dat").write_bytes(content)
    assert_refused(["table", "foreign.dat"], ["foreign.dat", *named], capsys)


def test_table_of_a_newer_schema(capsys, tmp_path):
    values = json.loads(Record("bench", RunConfig().to_dict(), "step_time", "s", (1.0,)).to_json())
    newer = SCHEMA_VERSION + 1
    (tmp_path / "new.jsonl").write_text(json.dumps({**values, "schema_version": newer}) + "\n")
    assert_refused(["table", "new.jsonl"], ["new.jsonl", f"schema version {newer}", "upgrade"], capsys)


# -- mistakes that only the worker can see ----------------------------------------------------------------------------

BAD_MODELS = {
    "absent:build": ("", ["absent:build", "cannot import"]),
    "needs:build": ("import not_installed_anywhere", ["needs:build", "not_installed_anywhere"]),
    "lacks:build": ("made = None", ["lacks:build", "has no 'build'"]),
    "narrow:build": ("def build(vocab_size): ...", ["narrow:build", "must accept the fields", "context_length"]),
    "other:build": ("def build(**_): return 'a string'", ["other:build", "torch.nn.Module", "str"]),
    "shape:build": (
        MODEL + "def build(vocab_size, d_model, **_): return Model(vocab_size, d_model, outputs=3)",
        ["(1, 8, 64)", "(1, 8, 3)"],
    ),
}


@pytest.mark.parametrize("spec", BAD_MODELS)
def test_models_that_cannot_be_used(spec, capsys, tmp_path):
    source, named = BAD_MODELS[spec]
    if source:
        (tmp_path / f"{spec.split(':')[0]}.py").write_text(source)
    assert_refused(["bench", *TINY, "--model", spec, "--output", "new/r.jsonl"], named, capsys)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        pytest.param(
            "def build(:",
            ["mine:build", "cannot import"],
            id="syntax error",
        ),
        pytest.param(
            "raise ImportError('first line\\nsecond line')",
            ["mine:build", "first line"],
            id="message of two lines",
        ),
        pytest.param(
            "import math; math.nothing_of_this_name",
            ["mine:build", "nothing_of_this_name"],
            id="AttributeError of its own",
        ),
    ],
)
def test_models_that_fail_to_import_in_other_ways(source, named, capsys, tmp_path):
    (tmp_path / "mine.py").write_text(source)
    assert_refused(["bench", *TINY, "--model", "mine:build", "--output", "r.jsonl"], named, capsys)


# -- as a user meets them ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "argv", "named"),
    [
        ([CS336], ["bench", "--d_model", "17", "--num_heads", "2"], "d_model 17"),
        ([CS336], ["bench", "--mode", "sideways"], "'sideways'"),
        ([CS336], ["bench", *TINY, "--device", "cuda"], "'cuda'"),
        ([CS336], ["bench", "--output", "/dev/null/r.jsonl"], "'/dev/null/r.jsonl'"),
        ([CS336], ["table", "missing.jsonl"], "'missing.jsonl'"),
        ([CS336], [], "command"),
        ([sys.executable, "-m", "cs336_systems"], ["run", "astrology"], "'astrology'"),
        ([sys.executable, BY_PATH["benchmark"]], ["--num_heads", "0"], "num_heads"),
        ([sys.executable, BY_PATH["calculate_memory"]], ["--size", "huge"], "'huge'"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_mistakes_in_a_process_of_their_own(command, argv, named, tmp_path):
    result = execute(*command, *argv, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    assert named in result.stderr
    assert files(tmp_path) == set()


# -- the seed's commands, by path from elsewhere ----------------------------------------------------------------------

SEED_SHAPE = "--context_length 16 --d_model 32 --num_layers 1 --num_heads 2 --d_ff 64 --vocab_size 64 --num_steps 2"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--forward_only", {"mode": "forward", "batch_size": 4, "warmup_steps": 5}),
        (
            "--device cpu --rope_theta 5000 --batch_size 2 --warmup_steps 5",
            {"mode": "train-step", "batch_size": 2, "warmup_steps": 5},
        ),
    ],
)
def test_benchmark_by_path(flags, expected, tmp_path):
    result = execute(sys.executable, BY_PATH["benchmark"], *SEED_SHAPE.split(), *flags.split(), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    [path] = tmp_path.glob("runs/bench-*/records.jsonl")
    records = {r.metric: r for r in record.load(path).records}
    config = records["step_time"].config
    assert {name: config[name] for name in expected} == expected
    assert config["model"] == {
        "vocab_size": 64, "context_length": 16, "d_model": 32, "num_layers": 1, "num_heads": 2, "d_ff": 64,
        "rope_theta": 5000.0 if "rope" in flags else 10_000.0,
    }  # fmt: skip
    assert len(records["step_time"].samples) == 2
    assert ("backward_time" in records) == (expected["mode"] == "train-step")
    assert "32/64/1/2" in result.stdout
    assert "1 cell measured" in result.stdout


@pytest.mark.parametrize(
    ("flags", "env", "chinese"),
    [
        ([], {}, False),
        (["--lang", "zh"], {}, True),
        ([], {"LANG": "zh_CN.UTF-8"}, True),
        (["--lang", "en"], {"LANG": "zh_CN.UTF-8"}, False),
        ([], {"LANG": "zh_CN.UTF-8", "LC_ALL": "C.UTF-8"}, False),
    ],
)
def test_calculate_memory_by_path(flags, env, chinese, tmp_path):
    result = execute(sys.executable, BY_PATH["calculate_memory"], *flags, cwd=tmp_path, env=clean_env(**env))
    assert (result.returncode, result.stderr) == (0, "")
    assert "3,406,809,600" in result.stdout
    assert "12.69" in result.stdout
    assert ("模型参数" in result.stdout) == chinese
    assert ("Model parameters" in result.stdout) != chinese
    assert files(tmp_path) == set()


# -- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command, capsys):
    assert exit_code([command, "--help"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"usage: cs336 {command}")
    assert said.err == ""


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ([CS336, "--help"], list(COMMANDS)),
        ([CS336, "--version"], [__version__]),
        ([sys.executable, "-m", "cs336_systems", "--help"], list(COMMANDS)),
        ([sys.executable, BY_PATH["benchmark"], "--help"], ["--context_length", "--forward_only", "--model"]),
        ([sys.executable, BY_PATH["calculate_memory"], "--help"], ["--lang"]),
    ],
)
def test_help_and_version(command, shown, tmp_path):
    result = execute(*command, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert all(word in result.stdout for word in shown)


@pytest.mark.parametrize("argv", [["--help"], ["memory", "--size", "2.7B"], ["fit"]], ids=" ".join)
def test_answers_that_need_no_torch_do_not_import_it(argv, tmp_path):
    program = (
        "import sys; from cs336_systems.cli import main\n"
        f"try: code = main({argv!r})\n"
        "except SystemExit as exit: code = exit.code\n"
        "assert code == 0 and 'torch' not in sys.modules"
    )
    result = execute(sys.executable, "-c", program, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout


@pytest.mark.slow
def test_help_and_memory_take_a_third_of_importing_torch(tmp_path):
    """It would not be so for long if somebody imported torch at the top of a module. Time of the processor, in turns:
    tests beside this one take its cores away for seconds."""

    def used(*command) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert execute(*command, cwd=tmp_path).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    commands = (sys.executable, "-c", "import torch"), (CS336, "--help"), (CS336, "memory", "--size", "2.7B")
    torch, *ours = (min(times) for times in zip(*([used(*c) for c in commands] for _ in range(3)), strict=True))
    assert max(ours) < torch / 3


# -- a user's own model -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_model(tmp_path_factory):
    """A file of records of a module found in the working directory, which prints."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "mymodel.py").write_text(MODEL)
    result = execute(CS336, "bench", *TINY, "--model", "mymodel:build", "--output", "r.jsonl", cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder / "r.jsonl", result


def test_own_model_from_the_working_directory(own_model):
    path, result = own_model
    records = {r.metric: r for r in record.load(path).records}
    assert all(r.ok and r.config["model_factory"] == "mymodel:build" for r in records.values())
    assert len(records["step_time"].samples) == 2
    parameters = 64 * 16 + (16 * 16 + 16) + (16 * 64 + 64)
    assert records["parameters"].samples == (parameters,)
    # forward: two linear layers on 8 tokens; backward: twice that. The embedding is looked up, not multiplied.
    assert records["flops"].samples == (3 * 2 * 8 * (16 * 16 + 16 * 64),)
    [peak], [predicted] = records["peak_memory"].numbers, records["predicted_memory"].numbers
    assert peak > 4 * 4 * parameters  # weights, gradients and two moments, in fp32
    assert predicted == pytest.approx(peak, rel=0.02)
    assert "prints as it is imported" not in result.stdout + result.stderr


@pytest.mark.parametrize("name", ["random.py", "cs336_systems.py"])
def test_files_in_the_working_directory_do_not_stand_in_for_ours_or_the_standard_library(name, tmp_path):
    """The console script leaves the working directory out of sys.path; its worker must as well, or a user's random.py,
    or the checkout of another solution of this assignment, is what gets run."""
    (tmp_path / name).write_text("raise RuntimeError('imported by mistake')")
    result = execute(CS336, "bench", *TINY, "--mode", "inference", "--output", "r.jsonl", cwd=tmp_path)
    assert result.returncode == 0, result.stderr


# -- tables and completion --------------------------------------------------------------------------------------------


@pytest.fixture
def records_file(tmp_path):
    """Two cells: one of 12 ms steps, one that did not fit."""
    environment = Environment(cpu="a processor")
    fits, not_fits = (RunConfig(model=model_config(size), size=size).to_dict() for size in ("small", "2.7B"))
    metrics = [("forward_time", 0.004), ("backward_time", 0.007), ("step_time", 0.012), (CELL_TIME, 1.0)]
    record.append(
        tmp_path / "r.jsonl",
        [
            *(Record("bench", fits, metric, "s", (value, value), "ok", environment) for metric, value in metrics),
            Record("bench", not_fits, CELL_TIME, "s", (), "oom: needs 60.0 GiB of 16.0 GiB", environment),
        ],
    )
    return tmp_path / "r.jsonl"


MARKS = {
    "terminal": ["───", "bench: throughput and memory"],
    "md": ["**bench: throughput and memory", "|:---|---:|", "| small | 12.00 |"],
    "csv": ["size,step (ms),tokens/s", "small,12.00,"],
    "latex": [r"\begin{tabular}{lr", r"\toprule", r"small & 12.00 &", r"\end{table}"],
    "typst": ["#figure(", "table.header([size], [step (ms)]", "[small], [12.00],"],
}


@pytest.mark.parametrize("format", MARKS)
def test_table_formats(format, records_file, capsys):
    assert exit_code(["table", "r.jsonl", "--format", format]) == 0
    printed = capsys.readouterr().out
    assert all(mark in printed for mark in [*MARKS[format], "12.00", "OOM", "2.7B"])
    assert exit_code(["table", "r.jsonl", "--format", format, "--output", "table.txt"]) == 0
    assert capsys.readouterr().out == ""
    assert Path("table.txt").read_text() == printed


def test_csv_tables_have_as_many_fields_in_every_row(records_file, capsys):
    exit_code(["table", "r.jsonl", "--format", "csv"])
    for block in capsys.readouterr().out.strip().split("\n\n"):
        rows = list(csv.reader(block.splitlines()))
        assert len(rows) > 2
        assert len({len(row) for row in rows}) == 1


def test_table_is_for_the_terminal_by_default(records_file, capsys):
    exit_code(["table", "r.jsonl"])
    default = capsys.readouterr().out
    exit_code(["table", "r.jsonl", "--format", "terminal"])
    assert default == capsys.readouterr().out


def test_table_of_chosen_experiments(records_file, capsys):
    [row] = [item for item in record.load(records_file).records if item.metric == "step_time"]
    record.append(records_file, [Record("homemade", row.config, "step_time", "s", (5.0,), "ok", row.environment)])
    exit_code(["table", "r.jsonl", "--experiments", "homemade"])
    printed = capsys.readouterr().out
    assert "homemade" in printed
    assert "bench" not in printed


def test_a_table_that_cannot_be_written(records_file, capsys):
    assert_refused(["table", "r.jsonl", "--output", "r.jsonl/below"], ["'r.jsonl/below'"], capsys)


def test_a_torn_file_is_shown_with_a_remark(records_file, capsys):
    with open(records_file, "a") as file:
        file.write('{"experiment":"ben')
    assert exit_code(["table", "r.jsonl"]) == 0
    said = capsys.readouterr()
    assert "12.00" in said.out
    assert "torn" in said.err


def test_a_reader_that_goes_away_is_no_error(records_file, tmp_path):
    """As `| head -1` does, but gone for certain before the first line is written."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = subprocess.run(
            [CS336, "table", "r.jsonl"],
            cwd=tmp_path, env=clean_env(), stdout=writer, stderr=subprocess.PIPE, text=True, timeout=30, check=False,
        )  # fmt: skip
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_an_attention_that_cannot_run_here_is_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert exit_code(["bench", *TINY, "--attention", "flash_triton"]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1] == (
        "cs336 bench: --attention flash_triton: the Triton kernels need a CUDA GPU, not 'cpu'; use --attention auto"
    )
    assert not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["be"], {"bench"}),
        (["t"], {"table", "train", "tune"}),
        (["bench", "--prec"], {"--precision", "--precisions"}),
        (["run", "auto"], {"autocast_dtypes"}),
        (["bench", "--nothing"], set()),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_completion_in_bash(words, completed, capsys, tmp_path):
    assert exit_code(["completion"]) == 0
    (tmp_path / "completion.bash").write_text(capsys.readouterr().out)
    script = (
        f"set -eu; source completion.bash; complete -p cs336 >&2; COMP_WORDS=(cs336 {' '.join(words)}); "
        f'COMP_CWORD={len(words)}; _cs336 || true; [ "${{#COMPREPLY[@]}}" -eq 0 ] || printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    result = execute("bash", "--norc", "-c", script, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "-F _cs336" in result.stderr
    assert set(result.stdout.split()) == completed
