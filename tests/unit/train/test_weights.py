"""`cs336 export` and `cs336 train --init`: a round trip to the bit, conversions, and every file that does not fit."""

import dataclasses
import hashlib
import json
import re
import shlex
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cs336_systems.cli import main
from cs336_systems.commands import flags_named
from cs336_systems.config import ModelConfig, UserError
from cs336_systems.flags import build
from cs336_systems.model import TransformerLM
from cs336_systems.parallel.launch import process_group
from cs336_systems.train.settings import TrainSettings
from tests.distributed.train_cases import SHAPE, Outcome, Run, argv_of, checkpoints, fields, perform, text_of
from tests.helpers import assert_refused, files

MODEL = ModelConfig(vocab_size=256, **SHAPE)


def performed(run: Run) -> Outcome:
    with process_group("gloo", "cpu"):
        return perform(run)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    (folder / "short.txt").write_bytes(text_of(330))
    return folder


@pytest.fixture(scope="module")
def trained(place) -> tuple[str, Outcome]:
    """The folder of a run with checkpoints of steps 2 and 4, and the weights of step 4."""
    settings = fields(place / "trained", save_every=2, steps=4)
    return settings["output"], performed(Run(settings))


@pytest.fixture
def exported(trained, elsewhere) -> Path:
    assert main(["export", trained[0], "weights.safetensors"]) == 0
    return elsewhere / "weights.safetensors"


def saved(weights: dict[str, torch.Tensor], path: Path, **metadata: str) -> None:
    save_file({name: value.contiguous() for name, value in weights.items()}, path, metadata)


# -- out --------------------------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_written_has_no_flag(trained, elsewhere, capfd):
    """The file of `cs336 export` is an operand: the line must not name --output."""
    refused = assert_refused(["export", trained[0], "/proc/weights.safetensors"], ["'/proc/weights.safet"], capfd)
    assert refused.endswith("choose another place")


def test_exported_weights_are_those_of_the_newest_checkpoint(trained, exported, capsys):
    found = load_file(exported)
    assert found.keys() == trained[1].weights.keys()
    assert all(torch.equal(value, trained[1].weights[name]) for name, value in found.items())
    TransformerLM(MODEL).load_state_dict(found)
    with safe_open(exported, framework="pt") as file:
        metadata = file.metadata()
    assert (json.loads(metadata["model"]), metadata["step"]) == (MODEL.to_dict(), "4")


def test_the_same_weights_give_the_same_bytes(trained, exported, elsewhere):
    for _ in range(4):
        assert main(["export", trained[0], "again.safetensors", "--force"]) == 0
        assert (elsewhere / "again.safetensors").read_bytes() == exported.read_bytes()


def test_an_earlier_step_in_another_dtype(trained, exported, elsewhere, capsys):
    """By its number and by its folder. The conversion rounds as torch does."""
    assert main(["export", trained[0], "two.safetensors", "--step", "2"]) == 0
    assert main(["export", str(checkpoints(trained[0])[2]), "half.safetensors", "--dtype", "bf16"]) == 0
    assert "step-00000002" in capsys.readouterr().out
    two, half, four = (load_file(elsewhere / f"{name}.safetensors") for name in ("two", "half", "weights"))
    assert any(not torch.equal(value, four[name]) for name, value in two.items())
    assert all(torch.equal(half[name], value.bfloat16()) for name, value in two.items())


def test_an_existing_file_is_overwritten_only_by_force(trained, exported, elsewhere, capfd):
    capfd.readouterr()
    assert_refused(["export", trained[0], "weights.safetensors", "--dtype", "fp16"], ["'weights.safetensors'"], capfd)
    assert main(["export", trained[0], "weights.safetensors", "--dtype", "fp16", "--force"]) == 0
    assert {value.dtype for value in load_file(exported).values()} == {torch.float16}
    assert [path.name for path in elsewhere.iterdir()] == ["weights.safetensors"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["missing", "w"], "'missing'"),
        ([".", "w"], "no intact checkpoint in '.'"),
        (["RUN", "w", "--step", "3"], "there are: 2, 4"),
        (["RUN/checkpoints/step-00000002", "w", "--step", "4"], "--step 4"),
        (["RUN", "no-folder/w"], "no folder 'no-folder'"),
        (["RUN", "."], "'.' is a folder"),
        (["RUN", "w", "--dtype", "fp7"], "'fp7'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_in_an_export(words, named, trained, elsewhere, capfd):
    assert_refused(["export", *(word.replace("RUN", trained[0]) for word in words)], [named], capfd)


def test_a_damaged_checkpoint_is_not_exported(trained, elsewhere, capfd, monkeypatch):
    monkeypatch.setattr("cs336_systems.train.checkpoint_files.hashlib.file_digest", lambda *_: hashlib.sha256())
    assert_refused(["export", trained[0], "w", "--step", "4"], ["step-00000004", "damaged"], capfd)


def test_weights_beyond_fp16_are_not_exported_as_infinity(trained, elsewhere, capfd, monkeypatch):
    monkeypatch.setattr("cs336_systems.train.weights.saved_weights", lambda found: ({"a": torch.tensor([1e6])}, MODEL))
    assert_refused(["export", trained[0], "w", "--dtype", "fp16"], ["beyond the range of fp16"], capfd)


# -- in ---------------------------------------------------------------------------------------------------------------


def begun(place: Path, name: str, path: Path, **changes: Any) -> Outcome:
    """The state of a run that was started from a file and has trained no step."""
    return performed(Run(fields(place / name, init=str(path), **changes), trains=False))


@pytest.mark.parametrize(
    "changes", [{}, {"fast": "on", "precision": "bf16"}, {"seed": 5}], ids=["plain", "fast", "seed"]
)
def test_a_run_starts_from_the_weights_to_the_bit(changes, trained, exported, place, tmp_path):
    """The first checkpoint of the fast step has the fp32 masters, which bf16 weights alone would not give."""
    settings = fields(tmp_path / "begun", **{"data": str(place / "short.txt"), "init": str(exported), **changes})
    settings |= {"learning_rate": 1e-30, "weight_decay": 0.0, "steps": 1, "warmup_steps": 0}
    outcome = performed(Run(settings))
    assert (outcome.code, outcome.error, outcome.resumed_at) == (0, "", 0)
    assert main(["export", settings["output"], str(tmp_path / "after")]) == 0
    after, before = load_file(tmp_path / "after"), load_file(exported)
    assert all(torch.equal(value, before[name]) for name, value in after.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_are_loaded_as_their_values(dtype, trained, place, tmp_path):
    half = {name: value.to(dtype) for name, value in trained[1].weights.items()}
    saved(half, tmp_path / "half")  # no metadata: a file from elsewhere
    outcome = begun(place, "half", tmp_path / "half")
    assert all(torch.equal(value, half[name].float()) for name, value in outcome.weights.items())


def renamed(weights):
    weights["other.weight"] = weights.pop(next(iter(weights)))


def lacking(weights):
    del weights[next(iter(weights))], weights[max(weights)]


def reshaped(weights):
    weights[next(iter(weights))] = torch.zeros(3, 5)


def integers(weights):
    weights[next(iter(weights))] = weights[next(iter(weights))].long()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (renamed, ["is missing", "(and 1 more)"]),
        (lacking, ["is missing", "(and 1 more)"]),
        (reshaped, ["(3, 5) instead of"]),
        (integers, ["I64"]),
        (lambda weights: weights.update(extra=torch.zeros(1)), ["'extra' is not a tensor of the model"]),
    ],
)
def test_weights_that_do_not_fit(change, named, trained, place, tmp_path):
    weights = dict(trained[1].weights)
    first = next(iter(weights))
    change(weights)
    saved(weights, tmp_path / "w")
    outcome = begun(place, "unfit", tmp_path / "w")
    assert all(word in outcome.error for word in named), outcome.error
    assert first in outcome.error or "extra" in weights
    assert "\n" not in outcome.error


@pytest.mark.parametrize("engine", ["ours", "torch"])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_refused_by_name(dtype, value, engine, trained, place, tmp_path):
    weights = {name: tensor.to(dtype, copy=True) for name, tensor in trained[1].weights.items()}
    last = list(weights)[-1]
    weights[last].view(-1)[-2:] = value
    saved(weights, tmp_path / "w")
    outcome = performed(Run(fields(place / "not-finite", init=str(tmp_path / "w"), engine=engine, parallel="ddp")))
    assert f"2 of {weights[last].numel():,} values of {last!r} are not finite" in outcome.error
    assert "cs336 export RUN FILE --step STEP" in outcome.error
    assert "\n" not in outcome.error


def test_finite_weights_whose_sum_overflows_are_loaded(trained, place, tmp_path):
    weights = dict(trained[1].weights)
    last = list(weights)[-1]
    weights[last] = torch.full_like(weights[last], 3e38)
    saved(weights, tmp_path / "w")
    assert begun(place, "large", tmp_path / "w").error == ""


def test_weights_of_an_unknown_shape_need_the_flags_of_their_shape(trained, place, tmp_path):
    """A file without metadata says no shape, so the model has the smallest size unless flags say more."""
    saved(trained[1].weights, tmp_path / "bare")
    saved(trained[1].weights, tmp_path / "full", model=json.dumps({**MODEL.to_dict(), "d_ff": 48}))
    bare, full = (begun(place, name, tmp_path / name, d_ff=48).error for name in ("bare", "full"))
    assert all("instead of" in error for error in (bare, full))
    advice = "the file has no configuration of a model, so the flags must give its shape: --size, or --vocab_size, "
    assert f"; {advice}--d_model, --num_layers, --num_heads and --d_ff" in bare
    assert advice not in full


def refusal(place: Path, weights: Path, **flags: Any) -> UserError:
    with pytest.raises(UserError) as refused:
        build(TrainSettings, {"data": str(place / "short.txt"), "init": str(weights), **flags})
    return refused.value


def test_flags_that_contradict_the_weights_are_named_with_both_values(trained, place, exported):
    """Heads do not show in any tensor. A context of another length is no other model."""
    error = begun(place, "heads", exported, num_heads=4).error
    assert "--num_heads 4 contradicts" in error
    assert "num_heads is 2" in error
    assert begun(place, "family", exported, qk_norm=True).error.startswith("--qk_norm contradicts")
    assert begun(place, "kv", exported, num_kv_heads=1).error.startswith("--num_kv_heads 1 contradicts")
    assert "--context_length must be" in flags_named(refusal(place, exported, context_length=0))
    size = {"size": "small", **dict.fromkeys(SHAPE), "context_length": 16}
    error = begun(place, "size", exported, **size).error
    assert "--size small contradicts" in error
    assert "d_model is 16 and not 768 (and 3 more fields differ)" in error
    assert begun(place, "equal", exported, num_kv_heads=2, d_head=8).error == ""
    assert begun(place, "longer", exported, context_length=8).error == ""


def test_the_shape_comes_with_the_weights(place, exported, monkeypatch):
    plain = {"data": str(place / "short.txt"), "init": str(exported)}
    settings = build(TrainSettings, plain)
    assert settings.model == MODEL
    assert build(TrainSettings, {**plain, "context_length": 24}).model.context_length == 24
    assert build(TrainSettings, {**plain, "num_layers": 1}).model == MODEL
    monkeypatch.setattr("cs336_systems.train.settings.INIT_CONTEXT", 12)
    assert build(TrainSettings, plain).model == dataclasses.replace(MODEL, context_length=12)
    again = {name: value for name, value in settings.to_dict().items() if name != "model"}
    assert build(TrainSettings, again) == settings


def test_a_text_for_weights_with_tokens_of_their_own(place, tmp_path):
    """They are not bytes, unless --vocab_size says so."""
    save_file({"a": torch.zeros(1)}, tmp_path / "w", {"model": json.dumps({**MODEL.to_dict(), "vocab_size": 400})})
    plain = {"data": str(place / "short.txt"), "init": str(tmp_path / "w")}
    with pytest.raises(UserError, match="has 400 tokens of its own; tokenize"):
        build(TrainSettings, plain)
    assert build(TrainSettings, {**plain, "vocab_size": 400}).model.vocab_size == 400


def test_weights_that_are_on_rank_0_only_take_the_flags_of_the_shape(place):
    """Without flags the shape would be unknown on the other ranks."""
    missing = {"data": str(place / "short.txt"), "init": "nowhere"}
    assert build(TrainSettings, {**missing, **SHAPE}).model == MODEL
    for shape in ({}, {"context_length": 16}):
        with pytest.raises(UserError, match="no file or folder 'nowhere'"):
            build(TrainSettings, {**missing, **shape})


def test_a_run_or_a_published_model_as_init_names_the_command_that_makes_weights_of_it(trained, place, elsewhere):
    """The command works as it is printed."""
    data = str(place / "short.txt")
    for run in (Path(trained[0]), checkpoints(trained[0])[2]):
        with pytest.raises(UserError) as refused:
            build(TrainSettings, {"data": data, "init": str(run)})
        command = re.search(r"cs336 (export .*), then give --init (.*)", str(refused.value))
        assert command is not None
        assert main([*shlex.split(command[1]), "--force"]) == 0
        assert build(TrainSettings, {"data": data, "init": command[2]}).model == MODEL
    (elsewhere / "hf").mkdir()
    (elsewhere / "hf/config.json").write_text("{}")
    with pytest.raises(UserError, match="cs336 import hf weights/hf"):
        build(TrainSettings, {"data": data, "init": "hf"})
    with pytest.raises(UserError, match=r"hf download Qwen/Qwen3-0\.6B --local-dir Qwen3-0\.6B"):
        build(TrainSettings, {"data": data, "init": "Qwen/Qwen3-0.6B"})


def test_a_run_that_took_its_shape_from_init_is_resumed_by_the_same_command(exported, place, tmp_path):
    """Without --init the line names it, because the shape was never given."""
    settings = fields(tmp_path / "run", data=str(place / "short.txt"), init=str(exported), save_every=2)
    settings = {name: value for name, value in settings.items() if name not in SHAPE}
    assert performed(Run(settings, stop_after=4)).code == 75
    assert performed(Run(settings)).resumed_at == 4
    del settings["init"]
    assert f"give --init {exported} again" in performed(Run({**settings, "context_length": 16})).error


def header(value: Any, length: int | None = None) -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


MALFORMED = {
    "empty": b"",
    "text": b"not a safetensors file, but a text of some length",
    "header beyond the file": header(b"{}", 1 << 20),
    "header of 2**63 bytes": header(b"{}", 1 << 63),
    "no JSON": header(b"{" * 50),
    "deep": header(b"[" * 100_000),
    "offsets beyond the file": header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}),
    "overlapping": header({n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"}) + bytes(8),
    "shape against offsets": header({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}) + bytes(4),
    "unknown dtype": header({"a": {"dtype": "F7", "shape": [1], "data_offsets": [0, 4]}}) + bytes(4),
    "metadata no model": header({"__metadata__": {"model": "[1]"}}),
    "metadata deep": header({"__metadata__": {"model": "[" * 100_000}}),
}


@pytest.mark.parametrize("name", [*MALFORMED, "truncated", "folder", "absent"])
def test_a_malformed_file_is_one_line_and_nothing_is_written(name, exported, elsewhere, capfd):
    path, content = elsewhere / "w", exported.read_bytes()
    if name == "folder":
        path.mkdir()
    elif name != "absent":
        path.write_bytes(content[:-1] if name == "truncated" else MALFORMED[name])
    (elsewhere / "text.txt").write_bytes(text_of(400))
    capfd.readouterr()
    settings = {**fields(elsewhere / "output", data="text.txt"), "output": "output", "init": "w"}
    assert_refused(argv_of(settings), ["w'"], capfd)


def test_init_is_for_the_start_only(trained, exported, place, tmp_path, capsys):
    """A folder with checkpoints is resumed. Weights that the run did not start from are refused."""
    settings = fields(tmp_path / "run", data=str(place / "short.txt"), init=str(exported), save_every=2)
    assert performed(Run(settings, stop_after=4)).code == 75
    plain = {name: value for name, value in settings.items() if name != "init"}
    assert performed(Run(plain, stop_after=6)).resumed_at == 4
    again = performed(Run(settings))
    assert (again.code, again.resumed_at) == (0, 6)
    assert "not loaded again" in again.printed
    before = files(tmp_path / "run")
    other = exported.with_name("other.safetensors")
    other.write_bytes(exported.read_bytes())
    refused = performed(Run({**settings, "init": str(other)}))
    assert all(name in refused.error for name in (str(other), str(exported))), refused.error
    assert "random weights" in performed(Run({**settings, "output": trained[0], "init": str(other)})).error
    assert files(tmp_path / "run") == before


def test_init_and_resume_from_exclude_each_other(exported, place, elsewhere, capfd):
    capfd.readouterr()
    settings = fields(place / "both", init=str(exported), resume_from="4")
    assert_refused(argv_of(settings), ["--init", "--resume_from"], capfd)
