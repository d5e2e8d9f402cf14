"""The command line: mistakes are one line and exit code 2, the seed's commands run by path, tables in every format.

Commands run in this process where that is possible; only paths, imports and the console script need one of their own.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cs336_systems import __version__, record
from cs336_systems.cli import COMMANDS
from cs336_systems.config import RunConfig, UserError, model_config
from cs336_systems.experiments import runner as runner_module
from cs336_systems.experiments import session
from cs336_systems.experiments.bench_command import BenchArguments
from cs336_systems.record import CELL_TIME, Environment, Record
from cs336_systems.table import FORMATS
from tests.helpers import (
    CPU_ONLY,
    CS336,
    MODEL,
    PACKAGE,
    TINY,
    assert_refused,
    clean_env,
    execute,
    exit_code,
    files,
)

pytestmark = pytest.mark.usefixtures("elsewhere")
BY_PATH = {name: PACKAGE / "benchmark" / f"{name}.py" for name in ("benchmark", "calculate_memory")}


# -- mistakes reported before a process is started --------------------------------------------------------------------

NUMBERS = ("batch_size", "context_length", "d_model", "num_layers", "num_heads", "d_ff", "vocab_size", "num_steps")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        *((["bench", *TINY, f"--{name}", "0"], [name, "0"]) for name in NUMBERS),
        *((["bench", *TINY, f"--{name}", "-1"], [name, "-1"]) for name in NUMBERS[:1]),
        *((["bench", f"--timeout={value}"], ["timeout", value]) for value in ("-1", "0", "nan", "inf")),
        (["bench", "--peak_tflops=-1"], ["peak_tflops", "-1"]),
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
        (["fit", "--checkpoint_blocks", "-1"], ["checkpoint_blocks", "-1"]),
        (["table"], ["file of records"]),
        (["table", "missing.jsonl"], ["'missing.jsonl'"]),
        (["table", "x.jsonl", "--format", "papyrus"], ["'papyrus'", "typst"]),
        (["completion", "--shell", "fish"], ["'fish'", "bash"]),
        (["profile", *TINY, "--only", "kernel"], ["'kernel'", "kernels", "memory", "saved_tensors"]),
        (["profile", *TINY, "--only", "memory,astrology"], ["'astrology'", "saved_tensors"]),
        (["profile", *TINY, "--mode", "inference", "--only", "saved_tensors"], ["inference", "saved_tensors"]),
        (["profile", *TINY, "--mode", "inference", "--only", "kernels,saved_tensors"], ["inference", "saved_tensors"]),
        (["profile", *TINY, "--compile", "--only", "memory"], ["--compile"]),
        (["profile", *TINY, "--num_steps", "0"], ["num_steps", "0"]),
        (["run", "profiler_agreement", "--preset", "quick", "--device", "cpu"], ["profiler_agreement"]),
        (["report"], ["name a file of records"]),
        (["report", "missing.jsonl"], ["missing.jsonl"]),
        (["inspect"], [".sqlite"]),
    ],
    ids=lambda words: " ".join(words[-3:]),
)
def test_mistakes(argv, named, no_worker, capsys):
    assert_refused(argv, named, capsys)


@pytest.mark.parametrize("command", [["bench", *TINY], ["run", "accumulation"], ["profile", *TINY]], ids=lambda x: x[0])
@pytest.mark.parametrize("output", ["file/below.jsonl", "file/deeper/below.jsonl", "folder"])
def test_output_that_cannot_be_written(command, output, no_worker, capsys, tmp_path):
    """Below a regular file nobody can write, not even root. An output may be a folder, and a folder is in its place."""
    (tmp_path / "file").write_text("in the way")
    taken = "folder/records.jsonl" if output == "folder" else output
    (tmp_path / "folder" / "records.jsonl").mkdir(parents=True)
    assert_refused([*command, "--output", output], [f"'{taken}'"], capsys)
    assert (tmp_path / "file").read_text() == "in the way"


# -- mistakes that only the worker can see ----------------------------------------------------------------------------

BAD_MODELS = {
    "absent": (None, ["cannot import"]),
    "needs_another": ("import not_installed_anywhere", ["not_installed_anywhere"]),
    "lacks_build": ("made = None", ["has no 'build'"]),
    "too_narrow": ("def build(vocab_size): ...", ["must accept the fields", "context_length"]),
    "no_module": ("def build(**_): return 'a string'", ["torch.nn.Module", "str"]),
    "wrong_shape": (
        MODEL + "def build(vocab_size, d_model, **_): return Model(vocab_size, d_model, outputs=3)",
        ["(1, 8, 64)", "(1, 8, 3)"],
    ),
    "syntax_error": ("def build(:", ["cannot import"]),
    "message_of_two_lines": ("raise ImportError('first line\\nsecond line')", ["first line"]),
    "attribute_error": ("import math; math.nothing_of_this_name", ["nothing_of_this_name"]),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def started_worker(models, forked_python):
    """One worker for all bad models: none of them takes its process down."""
    folder = models
    for name, (source, _) in BAD_MODELS.items():
        if source is not None:
            (folder / f"{name}.py").write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "executable", str(forked_python))
        for name, value in CPU_ONLY.items():
            patch.setenv(name, value)
        worker = runner_module.Worker()
    yield worker
    worker.stop()


@pytest.fixture
def kept_worker(started_worker, models, monkeypatch):
    monkeypatch.syspath_prepend(models)  # the worker's folder
    monkeypatch.setattr(runner_module, "Worker", lambda *_: started_worker)
    monkeypatch.setattr(started_worker, "stop", lambda: None)


@pytest.mark.parametrize(
    ("output", "file"),
    [
        ("new", "new/records.jsonl"),
        ("new/deeper/", "new/deeper/records.jsonl"),
        ("new/b1.jsonl", "new/b1.jsonl"),
        ("b1.json", "b1.json/records.jsonl"),
        ("v0.2", "v0.2/records.jsonl"),
        ("there", "there/records.jsonl"),
        ("there.jsonl", "there.jsonl/records.jsonl"),
        ("taken", "taken"),
    ],
)
def test_output_is_a_folder_or_a_file_of_records(output, file, tmp_path, monkeypatch):
    """For all commands that measure alike; a file of an older version without a suffix goes on."""
    monkeypatch.chdir(tmp_path)
    for name in ("there", "there.jsonl"):
        (tmp_path / name).mkdir()
    (tmp_path / "taken").touch()
    assert record.output_file(output) == Path(file)


@pytest.mark.parametrize("command", [["bench", *TINY], ["run", "accumulation"], ["profile", *TINY]], ids=lambda x: x[0])
def test_every_command_that_measures_writes_records_into_a_new_folder(command, monkeypatch, tmp_path):
    opened = []

    def opens(self, path, *args, **kwargs):
        opened.append(path)
        raise UserError("seen")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session.Runner, "__init__", opens)
    assert exit_code([*command, "--output", "runs/b1"]) == 2
    assert opened == [Path("runs/b1/records.jsonl")]


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("name", BAD_MODELS)
def test_models_that_cannot_be_used(name, kept_worker, capsys):
    _, named = BAD_MODELS[name]
    shown = assert_refused(["bench", *TINY, "--model", f"{name}:build", "--output", "new/r.jsonl"], named, capsys)
    assert f"{name}:build" in shown or name == "wrong_shape"


@pytest.mark.xdist_group("ranks")
def test_nothing_measured_is_exit_code_1(kept_worker, capsys):
    """A cell that does not fit was not measured, now or when its record is read again."""
    for _ in range(2):
        assert exit_code(["bench", "--size", "xxl", "--device", "cpu", "--output", "r.jsonl"]) == 1
        printed = capsys.readouterr()
        assert "OOM" in printed.out
        assert "0 cells measured" in printed.out
        assert printed.err.splitlines()[-1].startswith("no smaller batch fits")


@pytest.mark.xdist_group("ranks")
def test_a_cell_that_does_not_fit_says_what_would(kept_worker, capsys):
    words = ["bench", "--device", "cpu", "--size", "small", "--context_length", "512", "--output", "r.jsonl"]
    assert exit_code([*words, "--batch_size", "1000000"]) == 1
    printed = capsys.readouterr()
    assert re.search(r"needs \d{1,3},\d{3}[\d,.]* GiB of", printed.out), "with a separator of thousands"
    found = re.fullmatch(r"it is predicted to fit with --batch_size (\d+)", printed.err.splitlines()[-1])
    assert 1 <= int(found[1]) < 1_000_000


@pytest.mark.parametrize("command", ["bench", "profile"])
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--model", "nowhere_at_all:build"], "--model nowhere_at_all:build: cannot import 'nowhere_at_all'"),
        (["--attention", "flash_hopper"], "--attention flash_hopper: the Triton kernels need a CUDA GPU"),
    ],
)
def test_what_no_process_can_run_is_refused_without_progress(command, flags, named, kept_worker, capsys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    shown = []
    monkeypatch.setattr("cs336_systems.experiments.progress.Progress.begin", lambda *_: shown.append("started"))
    assert_refused([command, *TINY, *flags], [named], capsys)
    assert not shown


@pytest.mark.xdist_group("ranks")
def test_an_attention_that_cannot_run_here(kept_worker, capsys):
    named = ["--attention flash_triton: the Triton kernels need a CUDA GPU, not 'cpu'; use --attention auto"]
    assert_refused(["bench", *TINY, "--attention", "flash_triton"], named, capsys)


# -- in a process of their own ----------------------------------------------------------------------------------------

STARTS = {
    "console script": ([CS336], ["bench", "--mode", "sideways"], "'sideways'"),
    "module": ([sys.executable, "-m", "cs336_systems"], ["run", "astrology"], "'astrology'"),
    "benchmark.py": ([sys.executable, BY_PATH["benchmark"]], ["--num_heads", "0"], "num_heads"),
    "calculate_memory.py": ([sys.executable, BY_PATH["calculate_memory"]], ["--size", "huge"], "'huge'"),
}


@pytest.mark.parametrize("start", STARTS)
def test_ways_to_start(start, tmp_path):
    command, argv, named = STARTS[start]
    wrong = execute(*command, *argv, cwd=tmp_path)
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1), wrong.stderr
    assert named in wrong.stderr
    manual = execute(*command, "--help", cwd=tmp_path)
    assert (manual.returncode, manual.stderr) == (0, "")
    assert manual.stdout.startswith("usage: ")
    assert files(tmp_path) == {}


# -- the seed's commands, by path from elsewhere ----------------------------------------------------------------------

SEED_SHAPE = "--context_length 16 --d_model 32 --num_layers 1 --num_heads 2 --d_ff 64 --vocab_size 64"


@pytest.mark.xdist_group("ranks")
def test_benchmark_by_path(tmp_path, forked_python):
    flags = [*SEED_SHAPE.split(), "--num_steps", "2", "--rope_theta", "5000"]
    result = execute(forked_python, BY_PATH["benchmark"], *flags, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    [path] = tmp_path.glob("runs/bench-*/records.jsonl")
    records = {r.metric: r for r in record.load(path).records}
    config = records["step_time"].config
    assert [config[name] for name in ("mode", "batch_size", "warmup_steps", "num_steps")] == ["train-step", 4, 5, 2]
    assert config["model"] == {
        "vocab_size": 64, "context_length": 16, "d_model": 32, "num_layers": 1, "num_heads": 2, "d_ff": 64,
        "rope_theta": 5000.0,
    }  # fmt: skip
    assert [len(records[name].samples) for name in ("step_time", "backward_time")] == [2, 2]
    assert "32/64/1/2" in result.stdout
    assert "1 cell measured" in result.stdout


def test_forward_only_is_a_mode():
    [config] = BenchArguments(forward_only=True).configs("cpu")
    assert config.mode == "forward"


@pytest.mark.parametrize(
    ("flags", "env", "chinese"),
    [
        ([], {}, False),
        ([], {"LANG": "zh_CN.UTF-8"}, True),
        (["--lang", "en"], {"LANG": "zh_CN.UTF-8"}, False),
        ([], {"LANG": "zh_CN.UTF-8", "LC_ALL": "C.UTF-8"}, False),
    ],
    ids=["default", "Chinese locale", "flag over locale", "LC_ALL over LANG"],
)
def test_calculate_memory_by_path(flags, env, chinese, tmp_path):
    result = execute(sys.executable, BY_PATH["calculate_memory"], *flags, cwd=tmp_path, env=clean_env(**env))
    assert (result.returncode, result.stderr) == (0, "")
    assert "3,406,809,600" in result.stdout
    assert "12.69" in result.stdout
    assert ("模型参数" in result.stdout) == chinese
    assert ("Model parameters" in result.stdout) != chinese
    assert files(tmp_path) == {}


# -- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command, capsys):
    assert exit_code([command, "--help"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"usage: cs336 {command}")
    assert printed.err == ""


def test_version(capsys):
    assert exit_code(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


def test_answers_that_need_no_torch_do_not_import_it(tmp_path):
    """Help, memory, fit and refusals of paths answer at once only as long as no module imports torch at its top."""
    program = (
        "import sys; from cs336_systems.cli import main\n"
        "wrong = ['train', '--data', 'nowhere'], ['import', 'nowhere', 'out'], ['export', 'nowhere', 'file']\n"
        "for argv in (['--help'], ['memory', '--size', '2.7B'], ['fit'], *wrong):\n"
        "    try: code = main(argv)\n"
        "    except SystemExit as exit: code = exit.code\n"
        "    assert code == 2 * (argv in wrong) and 'torch' not in sys.modules, argv"
    )
    result = execute(sys.executable, "-c", program, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert all(command in result.stdout for command in COMMANDS)


# -- a user's own model -----------------------------------------------------------------------------------------------


def test_a_model_of_the_working_directory(tmp_path):
    """It prints, and lies beside files named like a standard module and like this package; none of that matters."""
    (tmp_path / "mymodel.py").write_text(MODEL)
    for name in ("random.py", "cs336_systems.py"):
        (tmp_path / name).write_text("raise RuntimeError('imported by mistake')")
    result = execute(CS336, "bench", *TINY, "--model", "mymodel:build", "--output", "r.jsonl", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    records = {r.metric: r for r in record.load(tmp_path / "r.jsonl").records}
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


@pytest.mark.parametrize("format", FORMATS)
def test_table_formats(format, records_file, capsys):
    """Printed, and the same in a file."""
    assert exit_code(["table", "r.jsonl", "--format", format]) == 0
    printed = capsys.readouterr().out
    assert all(mark in printed for mark in ("size", "step", "small", "12.00", "OOM", "2.7B"))
    assert exit_code(["table", "r.jsonl", "--format", format, "--output", "table.txt"]) == 0
    assert capsys.readouterr().out == ""
    assert Path("table.txt").read_text() == printed


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
    printed = capsys.readouterr()
    assert "12.00" in printed.out
    assert "torn" in printed.err


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


COMPLETIONS = {
    "be": {"bench"},
    "t": {"table", "tokenize", "train", "tune"},
    "bench --prec": {"--precision", "--precisions"},
    "run auto": {"autocast_dtypes"},
    "completion z": {"zsh"},
    "bench --nothing": set(),
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_completion_in_bash(capsys, tmp_path):
    assert exit_code(["completion", "bash"]) == 0
    (tmp_path / "completion.bash").write_text(capsys.readouterr().out)
    script = "set -eu; source completion.bash; complete -p cs336 >&2\n" + "".join(
        f"COMP_WORDS=(cs336 {words}); COMP_CWORD={len(words.split())}; COMPREPLY=(); _cs336 || true\n"
        'echo "${COMPREPLY[*]-}"\n'
        for words in COMPLETIONS
    )
    result = execute("bash", "--norc", "-c", script, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "-F _cs336" in result.stderr
    assert [set(line.split()) for line in result.stdout.splitlines()] == list(COMPLETIONS.values())
