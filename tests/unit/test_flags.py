"""Command-line flags: both spellings; user errors are one line on standard error with exit code 2."""

import errno
import io
import pickle
import shlex
import sys
import warnings
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.benchmark.benchmark import BenchArguments
from cs336_systems.commands import Interrupted, flags_named, guarded, run_command
from cs336_systems.config import RunConfig, UserError, flag
from cs336_systems.experiments.memory.calculator import CalculateArguments
from cs336_systems.flags import Parser, add_flags, read_flags
from cs336_systems.predict.fit import FitArguments
from cs336_systems.predict.model_flags import ShapeArguments


@dataclass(frozen=True)
class Example:
    context_length: int = flag(512, "tokens per sequence")
    max_grad_norm: float = flag(0.0, "clip to this")
    mode: str = flag("forward", "what to do", ("forward", "backward"))
    device: str | None = flag(None, "where")
    layers: int | None = flag(None, "how many")
    sizes: tuple[str, ...] = flag((), "which sizes")
    batch_sizes: tuple[int, ...] = flag((1, 2), "which batches")
    force_all: bool = flag(False, "again")
    rules: tuple[str, ...] = flag((), "one rule", repeatable=True, metavar="RULE")


def parse(*argv, arguments=Example):
    parser = Parser(prog="prog")
    add_flags(parser, arguments)
    return read_flags(arguments, parser.parse_args(argv))


FIELDS = {
    "": Example(),
    **dict.fromkeys(["--context_length 64", "--context-length 64", "--context-length=64"], Example(context_length=64)),
    "--context_length 0": Example(context_length=0),  # not taken for the default
    "--max-grad-norm 2": Example(max_grad_norm=2.0),
    "--mode backward": Example(mode="backward"),
    "--device 7 --layers 7": Example(device="7", layers=7),
    "--layers -3": Example(layers=-3),  # a value and not a flag
    "--max_grad_norm -1e-3 --device -5GiB": Example(max_grad_norm=-0.001, device="-5GiB"),
    **dict.fromkeys(
        ["--sizes small,medium,2026/xl", "--sizes 'small, medium, 2026/xl'", "--sizes small,medium,2026/xl,"],
        Example(sizes=("small", "medium", "2026/xl")),
    ),
    "--batch-sizes 4,8": Example(batch_sizes=(4, 8)),
    "--batch_sizes 16": Example(batch_sizes=(16,)),
    **dict.fromkeys(["--force_all", "--force-all"], Example(force_all=True)),
    "--rules a=1,b=2 --rules c=3": Example(rules=("a=1,b=2", "c=3")),
}


@pytest.mark.parametrize("argv", FIELDS)
def test_flags_become_fields_of_their_types(argv):
    assert repr(parse(*shlex.split(argv))) == repr(FIELDS[argv])  # 2 is no 2.0


@pytest.mark.parametrize("arguments", [ShapeArguments, BenchArguments, FitArguments, CalculateArguments])
def test_fields_not_given_keep_their_defaults(arguments):
    assert parse(arguments=arguments) == arguments()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(), min_size=1, max_size=6).map(tuple))
def test_any_list_of_numbers_can_be_given(numbers):
    assert parse(f"--batch_sizes={','.join(map(str, numbers))}").batch_sizes == numbers


# -- user errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--context_length", "many"], "'many'"),
        (["--context-length", "1.5"], "'1.5'"),
        (["--context_length", "4k"], "'4k' may be 4000 or 4096; write the whole number"),
        (["--batch_sizes", "1,2Mi"], "'2Mi' may be 2000000 or 2097152"),
        (["--max_grad_norm", "big"], "'big'"),
        (["--mode", "sideways"], "'sideways'"),
        (["--mode", "sideways"], "backward"),
        (["--batch_sizes", "1,two,3"], "two"),
        (["--colour", "blue"], "--colour"),
        (["stray"], "stray"),
        (["--layer", "3"], "--layer"),  # no abbreviations: a new flag would change their meaning
        (["--context_length"], "--context_length"),
        (["--force_all=yes"], "'yes'"),
        (["--device\n", "x"], "--device"),
        (["--mode", "a\nb"], r"a\nb"),
        (["--context_length", "a\nb"], r"a\nb"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_user_error_is_one_line_that_names_the_value(capsys, argv, named):
    with pytest.raises(SystemExit) as end:
        parse(*argv)
    out, err = capsys.readouterr()
    assert end.value.code == 2
    assert out == ""
    assert err.startswith("prog: ")
    assert err.endswith("\n")
    assert len(err.splitlines()) == 1
    assert named in err


@pytest.mark.parametrize("arguments", [Example, ShapeArguments, BenchArguments, FitArguments, CalculateArguments])
def test_help_shows_every_flag(capsys, arguments):
    """A lone % in a help text would raise in --help."""
    with pytest.raises(SystemExit) as end:
        parse("--help", arguments=arguments)
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"--{name}" in shown for name in arguments.__dataclass_fields__)


def test_help_shows_defaults(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    shown = capsys.readouterr().out
    assert "(default: 512)" in shown
    assert "(default: 0.0)" in shown
    assert "(default: None)" not in shown


# -- commands ---------------------------------------------------------------------------------------------------------


def test_a_command_gets_its_arguments_and_returns_its_exit_code():
    seen = []

    def command(arguments):
        seen.append(arguments)
        return 7

    assert run_command("prog", "manual", Example, command, ["--context-length", "64"]) == 7
    assert seen == [Example(context_length=64)]


def raises(error):
    def run():
        raise error

    return run


def test_ctrl_c_is_exit_code_130(capsys):
    assert guarded("prog", raises(KeyboardInterrupt())) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("prog: stopped")


def test_a_closed_pipe_is_no_failure(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with (tmp_path / "out").open("w") as out:  # redirects this file's descriptor, not pytest's
        monkeypatch.setattr(sys, "stdout", out)
        assert guarded("prog", raises(BrokenPipeError())) == 0


def test_a_failure_of_the_machine_is_exit_code_1(capsys):
    full = OSError(errno.ENOSPC, "No space left on device", "runs/records.jsonl")
    assert guarded("prog", raises(full)) == 1
    message = "prog: 'runs/records.jsonl': No space left on device; free some space, or choose another place\n"
    assert capsys.readouterr().err == message
    assert guarded("prog", raises(MemoryError())) == 1
    assert capsys.readouterr().err.startswith("prog: out of memory")
    of_torch = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.16 GiB. GPU 0 has\n 139.80 GiB")
    assert guarded("prog", raises(of_torch)) == 1
    assert capsys.readouterr().err == "prog: CUDA out of memory. Tried to allocate 3.16 GiB\n"
    assert guarded("prog", raises(ModuleNotFoundError("No module named 'torch'", name="torch"))) == 1
    assert capsys.readouterr().err == "prog: the package 'torch' is not installed; pip install torch\n"


def test_an_interrupted_run_names_the_command_that_continues_it(capsys, tmp_path):
    path = tmp_path / "re cords.jsonl"
    words = ["cs336", "bench", "--sizes", "tiny,small"]
    assert guarded("cs336 bench", raises(Interrupted(path)), words) == 130
    assert "stopped before the first cell" in capsys.readouterr().err
    path.write_text("")
    assert guarded("cs336 bench", raises(Interrupted(path)), words) == 130
    assert f"cs336 bench --sizes tiny,small --output '{path}'\n" in capsys.readouterr().err
    assert guarded("cs336 bench", raises(Interrupted(path)), [*words, f"--output={path}", "--force"]) == 130
    assert capsys.readouterr().err.count("--output") == 1


def test_arguments_of_the_library_are_flags_on_the_command_line():
    with pytest.raises(UserError) as caught:
        RunConfig(model_factory="mine")
    assert str(caught.value).startswith("model_factory 'mine'")
    assert flags_named(caught.value).startswith("--model 'mine'")
    with pytest.raises(UserError) as caught:
        RunConfig(fast="kernels", compile=True)
    assert "--" not in str(caught.value)
    assert flags_named(caught.value) == "--fast kernels: cannot be combined with --compile"


@pytest.mark.parametrize(
    ("fields", "library", "command_line"),
    [
        (
            {"precision": "fp8"},
            "precision fp8 needs the kernels of the fast step, got fast off; use fast on",
            "--precision fp8 needs the kernels of the fast step, got --fast off; use --fast on",
        ),
        (
            {"precision": "fp8", "fast": "kernels", "attention": "sdpa"},
            "precision fp8 needs the fused attention of this package, not sdpa; use attention auto",
            "--precision fp8 needs the fused attention of this package, not sdpa; use --attention auto",
        ),
        (
            {"optimizer_state": "bf16"},
            "optimizer_state bf16 needs precision bf16 or fp8 and the optimizer of the fast step, got precision fp32 "
            "and fast off; use precision bf16 and fast on, in one process",
            "--optimizer_state bf16 needs --precision bf16 or fp8 and the optimizer of the fast step, got --precision "
            "fp32 and --fast off; use --precision bf16 and --fast on, in one process",
        ),
        (
            {"update_in_backward": True},
            "update_in_backward needs the optimizer of the fast step, got fast off; use fast on",
            "--update_in_backward needs the optimizer of the fast step, got --fast off; use --fast on",
        ),
        (
            {"update_in_backward": True, "fast": "on", "mode": "forward"},
            "update_in_backward needs the optimizer of the fast step, which needs mode train-step, not forward",
            "--update_in_backward needs the optimizer of the fast step, which needs --mode train-step, not forward",
        ),
        (
            {"memory_budget": "1GiB", "compile": True},
            "memory_budget '1GiB' cannot plan a compiled model, whose compiler decides what is kept; leave compile out",
            "--memory_budget '1GiB' cannot plan a compiled model, whose compiler decides what is kept; leave --compile "
            "out",
        ),
        ({"mode": "mode"}, "unknown mode 'mode'; choose", "unknown --mode 'mode'; choose"),
        ({"device": "device"}, "unknown device 'device'; use cpu", "unknown --device 'device'; use cpu"),
        (
            {"model_factory": "my.model_factory:model_factory", "fast": "kernels"},
            "fast kernels: supports this package's model only, not model_factory",
            "--fast kernels: supports this package's model only, not --model",
        ),
    ],
)
def test_only_fields_become_flags_not_the_same_words_in_prose(fields, library, command_line):
    with pytest.raises(UserError) as caught:
        RunConfig(**fields)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert str(error).startswith(library)
        assert flags_named(error).startswith(command_line)


def test_a_warning_is_one_line(capsys):
    def warn():
        print(warnings.formatwarning("the disk\nis slow", UserWarning, "file.py", 1), end="")
        return 0

    assert guarded("prog", warn) == 0
    assert capsys.readouterr().out == "prog: the disk is slow\n"


def test_an_internal_error_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        guarded("prog", lambda: 1 // 0)
