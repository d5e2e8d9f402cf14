"""Training: steps against a plain loop, and runs that continue to the bit after a stop, a kill, a damaged checkpoint, a
full disk, and on other numbers of ranks.

Starting ranks takes seconds, so each start performs all the runs of `train_cases` that it can.
"""

import contextlib
import itertools
import json
import logging
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cs336_systems.flags import build
from cs336_systems.model import TransformerLM
from cs336_systems.parallel.launch import spawn
from cs336_systems.step.updates import LossScale
from cs336_systems.train.checkpoint import Store
from cs336_systems.train.checkpoint_files import digest_of
from cs336_systems.train.loop import STOPPED, Trainer
from cs336_systems.train.saving import Progress
from cs336_systems.train.settings import TrainSettings
from cs336_systems.train.token_file import TokenFile
from tests.distributed.train_cases import (
    STEPS,
    Outcome,
    Run,
    argv_of,
    checkpoints,
    command,
    fields,
    lines_of,
    losses_of,
    newest,
    perform,
    perform_all,
    recorded,
    temporaries,
    text_of,
    weights_of,
    with_private_output,
)
from tests.forked_python import Interpreter
from tests.helpers import CPU_ONLY, clean_env, execute, files, wait_until

pytestmark = pytest.mark.xdist_group("ranks")  # one at a time: a test has up to three busy processes

HANG = 280.0
"""Seconds after which processes that need a few are taken to hang, however busy the machine is."""
PARALLEL = ("ddp", "ddp-sharded", "fsdp")
STOPS = (1, 5)
"""An epoch of 18 sequences ends within the fifth step."""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a text of 18 training sequences, an epoch of four and a half steps; and a longer one."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "short.txt").write_bytes(text_of(330))
    (folder / "long.txt").write_bytes(text_of(5000))
    return folder


@pytest.fixture(scope="module", autouse=True)
def quiet_checkpoints() -> Iterator[None]:
    logging.disable(logging.DEBUG)  # torch logs every tensor of a checkpoint, and pytest would keep it all
    yield
    logging.disable(logging.NOTSET)


def assert_same_weights(found: Outcome, expected: Outcome, tolerance: float = 0.0) -> None:
    assert found.weights.keys() == expected.weights.keys() != set()
    for name, value in found.weights.items():
        torch.testing.assert_close(value, expected.weights[name], rtol=0, atol=tolerance, msg=lambda m, n=name: n + m)


def assert_same(found: Outcome, expected: Outcome) -> None:
    """Compare to the bit."""
    assert_same_weights(found, expected)
    assert len(found.states) == len(expected.states) > 0
    assert all(torch.equal(one, other) for one, other in zip(found.states, expected.states, strict=True))
    assert (found.step, found.skipped, found.loss_scale) == (expected.step, expected.skipped, expected.loss_scale)


def loaded(run_fields: dict[str, Any]) -> Outcome:
    """Load the newest checkpoint of a run."""
    outcome = perform(Run(run_fields, trains=False))
    assert (outcome.crash, outcome.error) == ("", "")
    return outcome


def copied(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """Copy the folder of a run; return the settings of the copy."""
    target = Path(settings["output"]).with_name(name)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(settings["output"], target)
    return {**settings, "output": str(target)}


# -- steps ------------------------------------------------------------------------------------------------------------


def test_against_a_plain_loop(place, alone):
    """Norms have no weight decay, and the first steps see the first sequences of the run."""
    changes = {"micro_batch_size": 2, "num_layers": 2, "weight_decay": 0.3, "max_grad_norm": 0.5, "beta2": 0.9}
    settings = build(TrainSettings, fields(place / "plain", **changes))
    trainer = Trainer(settings, alone)
    model = TransformerLM(settings.model)
    initial = weights_of(trainer.step.model)
    model.load_state_dict(initial)
    assert trainer.run() == 0

    rates, norms = (list(recorded(settings.output, name).values()) for name in ("learning_rate", "gradient_norm"))
    losses = losses_of(settings.output)
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.9))
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rates[step]
        inputs, targets = trainer.corpus.training(settings.seed, step * 4, 4)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert losses[step] == pytest.approx(loss.item(), abs=1e-5)
        assert norms[step] == pytest.approx(norm.item(), rel=1e-4)
    found = weights_of(trainer.step.model)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)
    assert any((found[name] - initial[name]).abs().max() > 0.01 for name in found)
    assert min(norms) > 0.5  # else clipping was not tested


def test_records(place, alone):
    settings = fields(place / "records", steps=12, warmup_steps=4, final_share=0.25, eval_every=4, log_every=5)
    assert perform(Run(settings)).code == 0
    output = settings["output"]
    for metric in ("loss", "gradient_norm", "learning_rate", "step_time"):
        values = recorded(output, metric)
        assert list(values) == list(range(1, 13)), metric
        assert all(math.isfinite(value) for value in values.values())
    rates = list(recorded(output, "learning_rate").values())
    assert max(rates) == rates[4] == pytest.approx(1e-2)
    assert rates[:5] == sorted(rates[:5])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert 0.25e-2 <= rates[-1] < 0.4e-2
    validated = recorded(output, "validation_loss")
    assert list(validated) == [4, 8, 12]
    assert validated[12] < losses_of(output)[0]  # it has learnt
    assert all(line["environment"]["torch"] for line in lines_of(output))


@pytest.mark.parametrize(("steps", "eval_every", "at"), [(3, 50, [3]), (5, 4, [4, 5]), (3, 0, [])])
def test_a_run_ends_with_an_evaluation(steps, eval_every, at, place, alone):
    settings = fields(place / f"end-{steps}-{eval_every}", steps=steps, eval_every=eval_every, sample_tokens=1)
    assert perform(Run(settings)).code == 0
    assert list(recorded(settings["output"], "validation_loss")) == at


@pytest.mark.parametrize("is_installed", [False, True])
def test_tensorboard(is_installed, place, monkeypatch, alone):
    written = []

    class Writer:
        def __init__(self, folder):
            written.append(folder)

        def add_scalar(self, name, value, step):
            written.append((name, step))

        def flush(self):
            pass

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if is_installed else None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    outcome = perform(Run(fields(place / "board", tensorboard=True, eval_every=4, sample_tokens=1)))
    if not is_installed:
        assert "pip install tensorboard" in outcome.error
        return
    assert outcome.code == 0
    assert written[0] == str(place / "board" / "tensorboard")
    assert [step for name, step in written[1:] if name == "loss"] == list(range(1, STEPS + 1))
    assert ("validation_loss", 4) in written


def test_evaluation_and_samples_do_not_change_the_run(place, alone):
    plain, evaluated = fields(place / "without"), fields(place / "with", eval_every=2, sample_prompt="abc")
    without, shown = perform(Run(plain)), perform(Run(evaluated))
    assert losses_of(plain["output"]) == losses_of(evaluated["output"])
    assert_same(shown, without)
    assert shown.printed.count("abc") >= 4


@pytest.mark.parametrize("prompt", ["", "a" * 40, "\u6587\u5b57"], ids=["empty", "long", "not ASCII"])
def test_any_prompt_can_be_sampled(prompt, place, alone):
    settings = fields(place / f"prompt-{len(prompt)}", steps=2, eval_every=1, sample_prompt=prompt, vocab_size=128)
    found = perform(Run(settings))
    assert (found.crash, found.code) == ("", 0)


# -- steps that are not finite ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "fast", "recorded_steps"), [("fp32", "off", 3), ("fp16", "off", 16 + 3), ("bf16", "on", 3)]
)
def test_too_many_non_finite_steps_end_the_run(precision, fast, recorded_steps, place, alone):
    """fp16 halves its loss scale first, down to 1."""
    output = place / f"bad-{precision}"
    settings = fields(output, most_skipped=3, precision=precision, steps=40, fast=fast, max_grad_norm=0.0)
    found = perform(Run(settings, fault="nan in every step"))
    assert "3 steps in a row" in found.error
    assert "\n" not in found.error
    assert len(losses_of(output)) == recorded_steps


def test_skipped_steps_do_not_replace_good_checkpoints(place, alone):
    """A diverged run can go back: its last good checkpoints are there."""
    settings = fields(place / "kept-good", save_every=1, keep=2, most_skipped=5, steps=20)
    assert perform(Run(settings, stop_after=3)).code == STOPPED
    found = perform(Run(settings, fault="nan in every step"))
    assert "5 steps in a row" in found.error
    assert "--resume_from" in found.error
    assert sorted(checkpoints(settings["output"])) == [2, 3]


@pytest.mark.parametrize(("precision", "fast"), [("fp32", "off"), ("fp32", "on"), ("bf16", "on")])
def test_single_non_finite_steps_are_skipped(precision, fast, place, alone):
    settings = fields(place / f"some-bad-{precision}-{fast}", precision=precision, fast=fast, most_skipped=2)
    found = perform(Run(settings, fault="nan in every other step"))
    assert (found.code, found.error, found.skipped) == (0, "", 4)
    assert all(bool(value.isfinite().all()) for value in found.weights.values())


@pytest.mark.parametrize(
    ("learning_rate", "reason"), [(1e6, "skipped|gradient is 0"), (20.0, "last loss is .* guessing gives 5.545")]
)
def test_a_finished_run_that_has_diverged_is_a_failure(learning_rate, reason, place, alone):
    """It has a checkpoint, and its exit code says that the model is of no use."""
    settings = fields(place / f"diverged-{learning_rate}", learning_rate=learning_rate)
    found = perform(Run(settings))
    assert (found.code, newest(settings["output"])) == (1, STEPS)
    assert re.search(rf"diverged: .*({reason}).*--learning_rate", found.printed), found.printed


# -- stop and resume on one rank --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "changes"),
    [
        *((precision, {}) for precision in ("fp32", "bf16", "fp16")),
        ("fp32", {"fast": "on"}),
        ("bf16", {"fast": "optimizer"}),
        ("bf16", {"fast": "on", "optimizer_state": "bf16"}),
        ("fp16", {"fast": "kernels,loss"}),
        ("fp32", {"async_save": True, "save_every": 1, "keep": 3}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_stop_and_resume_to_the_bit(precision, changes, place, alone, tmp_path):
    """The loss scale of fp16 grows on the way. Lines are logged every third step only: no record is lost."""
    same = {"data": str(place / "short.txt"), "precision": precision, "micro_batch_size": 2, "log_every": 3}
    same |= {"loss_scale_growth": 3, **changes}
    whole = fields(tmp_path / "whole", **same)
    expected = perform(Run(whole))
    assert (expected.code, expected.resumed_at, expected.step) == (0, 0, STEPS)
    losses = losses_of(whole["output"])
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    parts = fields(tmp_path / "parts", **same)
    scales: list[float] = []
    for before, stop in itertools.pairwise((0, *STOPS)):
        found = perform(Run(parts, stop_after=stop))
        assert (found.code, found.resumed_at, found.step, newest(parts["output"])) == (STOPPED, before, stop, stop)
        assert len(losses_of(parts["output"])) == stop
        torch.manual_seed(stop)
        scales.append(found.loss_scale)
    last = perform(Run(parts))
    assert (last.code, last.resumed_at) == (0, STOPS[-1])
    assert_same(last, expected)
    assert losses_of(parts["output"]) == losses
    if precision == "fp16":
        assert expected.loss_scale == 2 * scales[1] == 4 * scales[0]


def test_fast_and_plain_step_resume_each_other(place, alone, tmp_path):
    same = {"data": str(place / "short.txt")}
    plain, mixed = fields(tmp_path / "off", fast="off", **same), fields(tmp_path / "mixed", **same)
    expected = perform(Run(plain))
    for stop, fast in ((2, "off"), (5, "on"), (7, "off")):
        assert perform(Run({**mixed, "fast": fast}, stop_after=stop)).code == STOPPED
    last = perform(Run({**mixed, "fast": "on"}))
    assert (last.code, last.step) == (0, STEPS)
    assert_same_weights(last, expected, 1e-4)
    assert losses_of(mixed["output"]) == pytest.approx(losses_of(plain["output"]), rel=1e-4)


def test_optimizer_states_of_both_precisions_resume_each_other(place, alone, tmp_path):
    """A checkpoint holds fp32 weights and moments in either case; in bf16 they are coarser."""
    same = {"data": str(place / "short.txt"), "precision": "bf16", "fast": "on"}
    wide, mixed = fields(tmp_path / "fp32", **same), fields(tmp_path / "mixed", **same)
    expected = perform(Run(wide))
    for stop, state in ((2, "fp32"), (5, "bf16"), (7, "fp32")):
        assert perform(Run({**mixed, "optimizer_state": state}, stop_after=stop)).code == STOPPED
    last = perform(Run({**mixed, "optimizer_state": "bf16"}))
    assert (last.code, last.step) == (0, STEPS)
    assert_same_weights(last, expected, 4e-2)
    losses = losses_of(mixed["output"])
    assert losses[:2] == losses_of(wide["output"])[:2]
    assert losses == pytest.approx(losses_of(wide["output"]), rel=1e-2)


def test_a_finished_run_can_be_made_longer(place, alone):
    settings = fields(place / "longer", steps=4)
    assert perform(Run(settings)).code == 0
    before = files(place / "longer")
    again = perform(Run(settings))
    assert (again.code, again.resumed_at, again.step) == (0, 4, 4)
    assert files(place / "longer") == before
    longer = perform(Run({**settings, "steps": 6, "save_every": 1, "eval_every": 2}))
    assert (longer.code, longer.resumed_at, longer.step) == (0, 4, 6)
    assert len(losses_of(settings["output"])) == 6


OLD_PROGRESS = {"step": 4, "loss_scale": 1.0, "good_steps": 4, "skipped": 0, "skipped_in_a_row": 0}
OLD_SETTINGS = {"batch_size": 4, "seed": 0, "validation_share": 0.1, "precision": "fp32", "warmup_steps": 1}
OLD_SETTINGS |= {"final_share": 0.1, "checkpoint_blocks": 0, "most_skipped": 10, "data": "short.txt"}
OLD_MODEL = {"vocab_size": 256, "context_length": 16, "d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 32}
OLD_MODEL |= {"rope_theta": 10000.0}


def test_a_manifest_of_the_first_version_is_resumed(two_saved):
    """Its settings are flat, by the names of flags, and the state of loss scaling is part of its progress."""
    settings, _, four = two_saved
    old = copied(settings, "first-version")
    path = checkpoints(old["output"])[4] / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["progress"] == OLD_PROGRESS
    assert OLD_SETTINGS.keys() <= manifest["settings"].keys()
    literal = {"format": 1, "step": 4, "progress": OLD_PROGRESS, "settings": {**OLD_SETTINGS, "model": OLD_MODEL}}
    literal |= {name: manifest[name] for name in ("data", "world_size", "rng", "files")}
    path.write_text(json.dumps({**literal, "sha256": digest_of(literal)}))
    assert_same(loaded(old), four)
    scale = LossScale.of("fp16")
    progress = Progress.from_manifest({**OLD_PROGRESS, "loss_scale": 512.0, "skipped": 2}, scale)
    assert (progress, scale.value, scale.good_steps) == (Progress(4, 2, 0), 512.0, 4)
    assert progress.to_manifest(scale) == {**OLD_PROGRESS, "loss_scale": 512.0, "skipped": 2}


def test_one_changed_token_of_8_mb_is_refused(place, alone):
    """A checkpoint of the first version is resumed where its 64 samples agree, and saved with the new fingerprint."""
    text = bytearray(text_of(1000) * 8000)
    (place / "large.txt").write_bytes(text)
    settings = fields(place / "large", data="large.txt")
    assert perform(Run(settings, stop_after=2)).code == STOPPED
    text[1_234_567] ^= 1
    (place / "large.txt").write_bytes(text)
    assert "large.txt' has other tokens than" in perform(Run(settings)).error
    path = checkpoints(settings["output"])[2] / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    manifest["data"] = TokenFile(place / "large.txt").probes()
    path.write_text(json.dumps({**manifest, "sha256": digest_of(manifest)}))
    found = perform(Run(settings))
    assert (found.code, found.resumed_at) == (0, 2)
    saved = json.loads((checkpoints(settings["output"])[STEPS] / "manifest.json").read_text())
    assert saved["data"] == TokenFile(place / "large.txt").summary().fingerprint


# -- damaged checkpoints ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_saved(place, alone) -> tuple[dict[str, Any], Outcome, Outcome]:
    """A run stopped in step 4, with checkpoints of steps 2 and 4, and the contents of both."""
    settings = fields(place / "two", save_every=2)
    four = perform(Run(settings, stop_after=4))
    assert sorted(checkpoints(settings["output"])) == [2, 4]
    only_two = copied(settings, "two-2")
    shutil.rmtree(checkpoints(only_two["output"])[4])
    two = loaded(only_two)
    assert (two.resumed_at, four.step) == (2, 4)
    assert_same(loaded(settings), four)
    return settings, two, four


def flip(path: Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def flip_largest(folder: Path) -> None:
    flip(max(folder.iterdir(), key=lambda path: path.stat().st_size))


def exchange(path: Path) -> None:
    """Replace the file by that of the older checkpoint."""
    path.write_bytes((checkpoints(path.parents[2])[2] / path.name).read_bytes())


DAMAGES = {
    "emptied": lambda path: path.write_bytes(b""),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "flipped at its start": lambda path: flip(path, 0.0),
    "flipped": flip,
    "flipped at its end": lambda path: flip(path, 1.0),
    "garbage": lambda path: path.write_bytes(os.urandom(path.stat().st_size)),
    "deleted": Path.unlink,
    "exchanged": exchange,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.json"])
def test_a_damaged_checkpoint_is_not_loaded(name, damage, two_saved):
    """The previous one is, and a warning names the damaged one and the reason."""
    settings, _, _ = two_saved
    broken = copied(settings, "damaged")
    path = checkpoints(broken["output"])[4] / name
    before = path.read_bytes()
    DAMAGES[damage](path)
    if path.exists() and path.read_bytes() == before:
        pytest.skip("both checkpoints have the same file")
    with pytest.warns(UserWarning, match="step-00000004.* damaged") as caught:
        found = Store(path.parents[1]).newest()
    assert found is not None
    assert found.manifest["step"] == 2
    assert name in str(caught[0].message) or damage == "exchanged"


def test_a_changed_byte_of_the_manifest_is_detected(two_saved):
    """Also where it is still valid JSON: a digit of the step, of the loss scale, of a hash."""
    settings, _, _ = two_saved
    path = checkpoints(copied(settings, "manifest")["output"])[4] / "manifest.json"
    intact, accepted = path.read_bytes(), []
    positions = [
        *range(0, len(intact), max(1, len(intact) // 40)),
        *(i for i, byte in enumerate(intact) if byte in b"4"),
    ]
    for i in positions[:80]:
        data = bytearray(intact)
        data[i] ^= 1
        path.write_bytes(data)
        with pytest.warns(UserWarning, match="step-00000004.* damaged"):
            found = Store(path.parents[1]).newest()
        if found is None or found.manifest["step"] != 2:
            accepted.append(intact[max(0, i - 20) : i + 10])
    assert accepted == []


def test_the_previous_checkpoint_is_loaded_to_the_bit(two_saved):
    settings, two, _ = two_saved
    broken = copied(settings, "fallback")
    flip_largest(checkpoints(broken["output"])[4])
    assert_same(loaded(broken), two)
    flip_largest(checkpoints(broken["output"])[2])
    found = perform(Run(broken, trains=False))  # a run that has checkpoints does not start anew
    assert "(2), and none can be loaded" in found.error
    assert all(name in found.printed for name in ("step-00000002", "step-00000004"))


@pytest.mark.parametrize("save_every", [2, 1])
def test_a_run_continues_past_a_damaged_checkpoint(save_every, two_saved, place, alone):
    """An intact one replaces it; and it does not count among those that are kept: of two saved two are valid."""
    settings, _, _ = two_saved
    broken = {**copied(settings, f"past-{save_every}"), "save_every": save_every, "keep": 2}
    flip_largest(checkpoints(broken["output"])[4])
    if save_every == 1:
        assert perform(Run(broken, stop_after=3)).step == 3
        spare = copied(broken, "past-spare")
        shutil.rmtree(checkpoints(spare["output"])[3])
        assert loaded(spare).resumed_at == 2
    found = perform(Run(broken))
    assert found.code == 0
    whole = fields(place / f"past-whole-{save_every}")
    assert_same(found, perform(Run(whole)))
    assert losses_of(broken["output"]) == losses_of(whole["output"])
    assert_same(loaded(broken), found)
    assert len(checkpoints(broken["output"])) == 2


def test_a_damaged_last_checkpoint_is_written_again(two_saved):
    """Else a finished run would train its last steps at every call."""
    settings, _, _ = two_saved
    broken = {**copied(settings, "last"), "steps": 4}
    flip_largest(checkpoints(broken["output"])[4])
    again = perform(Run(broken))
    assert (again.code, again.resumed_at, again.step) == (0, 2, 4)
    found = loaded(broken)
    assert found.resumed_at == 4, found.printed
    assert_same(found, again)


def test_leftovers_of_a_killed_save_are_removed_and_not_loaded(two_saved):
    settings, _, four = two_saved
    strewn = copied(settings, "strewn")
    folder = checkpoints(strewn["output"])[4].parent
    shutil.copytree(folder / "step-00000004", folder / "step-00000006.tmp-0123abcd")
    (folder / "step-00000008.tmp-99999999").mkdir()
    assert_same(loaded(strewn), four)
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-00000002", "step-00000004"]


# -- saves that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["one save", "one rename", "one write", "one hash", "every save"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_save_that_fails_does_not_end_the_run(is_async, fault, two_saved, alone):
    """Steps 6 and 8 are saved; of the first one, or of both, nothing is left."""
    settings, _, four = two_saved
    full = {**copied(settings, "full"), "keep": 5, "async_save": is_async}
    older = {step: files(path) for step, path in checkpoints(full["output"]).items()}
    found = perform(Run(full, fault=fault))
    assert (found.crash, found.error, found.resumed_at, found.step) == ("", "", 4, 8)
    assert found.code == (1 if fault == "every save" else 0)
    assert "No space left on device" in found.printed
    assert sorted(checkpoints(full["output"])) == ([2, 4] if fault == "every save" else [2, 4, 8])
    assert temporaries(full["output"]) == []
    assert {step: files(checkpoints(full["output"])[step]) for step in older} == older
    assert_same(loaded(full), four if fault == "every save" else found)
    assert len(losses_of(full["output"])) == 8


def test_a_record_that_cannot_be_written_does_not_end_the_run(place, alone):
    found = perform(Run(fields(place / "unrecorded"), fault="one record"))
    assert (found.crash, found.code, found.step) == ("", 0, STEPS)
    assert "No space left on device" in found.printed


@pytest.mark.parametrize(("keep", "keep_every", "kept"), [(1, 0, [8]), (2, 3, [3, 6, 7, 8])])
def test_which_checkpoints_are_kept(keep, keep_every, kept, place, alone, monkeypatch):
    """At no moment are there fewer than `keep`."""
    settings = fields(place / f"kept-{keep}-{keep_every}", save_every=1, keep=keep, keep_every=keep_every)
    counts, real = [], shutil.rmtree

    def watched(*args, **kwargs):
        real(*args, **kwargs)
        counts.append(len(checkpoints(settings["output"])))

    monkeypatch.setattr(shutil, "rmtree", watched)
    assert perform(Run(settings)).code == 0
    assert sorted(checkpoints(settings["output"])) == kept
    assert min(counts, default=100) >= min(keep, 8)


def test_a_delete_that_fails_is_a_warning(place, alone):
    settings = fields(place / "undeleted", save_every=4, keep=1)
    found = perform(Run(settings, fault="every delete"))
    assert (found.code, found.step) == (0, STEPS)
    assert "No space left on device" in found.printed
    assert sorted(checkpoints(settings["output"])) == [8]
    assert len(temporaries(settings["output"])) == 1  # what is left of step 4, which is no checkpoint any more
    assert loaded(settings).resumed_at == 8
    assert temporaries(settings["output"]) == []


# -- another run in the same folder -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        *({name: value} for name, value in {"d_model": 32, "num_heads": 1, "vocab_size": 300, "batch_size": 8}.items()),
        {"data": "long.txt"},
        {"precision": "bf16"},
        {"validation_share": 0.2},
        {"seed": 1, "d_ff": 64},
    ],
    ids=lambda value: " ".join(value),
)
def test_another_run_is_refused(changes, two_saved, place):
    settings, _, _ = two_saved
    if "data" in changes:
        changes = {"data": str(place / changes["data"])}
    before = files(Path(settings["output"]))
    found = perform(Run({**settings, **changes}))
    assert all(name in found.error for name in changes), found.error
    assert not any(other in found.error for other in {*TrainSettings.FIXED} - changes.keys()), found.error
    assert "\n" not in found.error
    assert files(Path(settings["output"])) == before


def test_settings_that_do_not_define_the_run_may_change(two_saved):
    settings, _, four = two_saved
    other = {"steps": 20, "save_every": 7, "keep": 3, "micro_batch_size": 2, "eval_every": 3, "log_every": 2}
    assert_same(loaded({**copied(settings, "free"), **other}), four)


def make_newer(output: str | Path) -> None:
    path = checkpoints(output)[newest(output)] / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    manifest["format"] += 1
    path.write_text(json.dumps({**manifest, "sha256": digest_of(manifest)}))


def test_a_checkpoint_of_a_newer_format_is_refused(two_saved):
    """It is not ignored: the run would continue from an older one, and overwrite it."""
    newer = copied(two_saved[0], "newer")
    make_newer(newer["output"])
    before = files(Path(newer["output"]))
    assert "format 2" in perform(Run(newer)).error
    assert files(Path(newer["output"])) == before


# -- on ranks: all runs in three starts -------------------------------------------------------------------------------

SHARED = {"data": "long.txt", "batch_size": 6, "micro_batch_size": 6}
"""A batch that 1, 2 and 3 ranks can share."""
HALFWAY = 3

Outcomes = dict[str, list[Outcome]]
"""Name of a run -> outcome of each rank."""


def start_ranks(count: int, runs: dict[str, Run]) -> Outcomes:
    by_rank = spawn(perform_all, count, runs, timeout=HANG)
    return {name: [found[name] for found in by_rank] for name in runs}


def poisoned_fields(place: Path, parallel: str) -> dict[str, Any]:
    return fields(place / f"{parallel}-nan", parallel=parallel, max_grad_norm=0.0 if parallel == "fsdp" else 1.0)


@pytest.fixture(scope="module")
def three_ranks(place) -> Outcomes:
    """Shards of three ranks are not of equal size."""
    runs = {
        "fsdp": Run(fields(place / "fsdp-3", parallel="fsdp", **SHARED)),
        "half": Run(fields(place / "half-fsdp-3", parallel="fsdp", **SHARED), stop_after=HALFWAY),
    }
    return start_ranks(3, runs)


@pytest.fixture(scope="module")
def two_ranks(place) -> Outcomes:
    runs = {}
    for parallel in PARALLEL:
        same = {"parallel": parallel, "micro_batch_size": 1}
        runs[f"{parallel} whole"] = Run(fields(place / f"{parallel}-whole", **same))
        runs[f"{parallel} evaluated"] = Run(fields(place / f"{parallel}-eval", eval_every=4, sample_tokens=5, **same))
        runs[f"{parallel} stopped"] = Run(fields(place / f"{parallel}-stopped", **same), stop_after=STOPS[-1])
        runs[f"{parallel} good"] = Run(poisoned_fields(place, parallel), stop_after=3)
        full = fields(place / f"{parallel}-full", parallel=parallel, save_every=2, keep=5)
        runs[f"{parallel} full disk"] = Run(full, fault="one write on rank 1")
        runs[f"{parallel} shared"] = Run(fields(place / f"{parallel}-shared", parallel=parallel, **SHARED))
        runs[f"{parallel} odd batch"] = Run(fields(place / f"{parallel}-odd", parallel=parallel, batch_size=3))
        bad = fields(place / f"{parallel}-bad", parallel=parallel, most_skipped=2)
        runs[f"{parallel} all bad"] = Run(bad, fault="nan in every step")
    runs["half sharded"] = Run(fields(place / "half-sharded", parallel="ddp-sharded", **SHARED), stop_after=HALFWAY)
    return start_ranks(2, runs)


@pytest.fixture(scope="module")
def resumed(two_ranks, three_ranks, place) -> Outcomes:
    """New processes resume the runs of the first ones; one file of a newest checkpoint is damaged."""
    runs = {}
    for parallel in PARALLEL:
        shutil.copytree(place / f"{parallel}-full", place / f"{parallel}-damaged")
        flip(sorted(checkpoints(place / f"{parallel}-damaged")[8].glob("*.distcp"))[-1])
        shutil.copytree(place / "half-fsdp-3", place / f"fsdp-to-{parallel}")
        same = {"parallel": parallel, "micro_batch_size": 1}
        runs[f"{parallel} stopped"] = Run(fields(place / f"{parallel}-stopped", **same))
        value, poisoned = "inf" if parallel == "ddp" else "nan", poisoned_fields(place, parallel)
        runs[f"{parallel} bad"] = Run(poisoned, stop_after=4, fault=f"{value} in the first step on rank 1")
        runs[f"{parallel} after"] = Run(poisoned)
        runs[f"{parallel} damaged"] = Run(fields(place / f"{parallel}-damaged", parallel=parallel), trains=False)
        runs[f"{parallel} refused"] = Run(fields(place / f"{parallel}-whole", **same, num_layers=2))
        stopped = fields(place / f"{parallel}-signal", **same)
        runs[f"{parallel} signal"] = Run(stopped, fault="SIGTERM on rank 1 in forward 3")
        runs[f"{parallel} after signal"] = Run(stopped)
        runs[f"3 fsdp to 2 {parallel}"] = Run(fields(place / f"fsdp-to-{parallel}", parallel=parallel, **SHARED))
    runs["2 ddp-sharded to 2 fsdp"] = Run(fields(place / "half-sharded", parallel="fsdp", **SHARED))
    # The last, because ranks that disagree here would leave each other waiting.
    shutil.copytree(place / "ddp-whole", place / "newer-2")
    make_newer(place / "newer-2")
    runs["newer"] = Run(fields(place / "newer-2", parallel="ddp"))
    shutil.copytree(place / "half-fsdp-3", place / "fsdp-to-none")
    shutil.copytree(place / "half-sharded", place / "sharded-to-none")
    return start_ranks(2, runs)


@pytest.fixture(scope="module")
def alone_shared(place, alone) -> Outcome:
    return perform(Run(fields(place / "none-shared", **SHARED)))


every_parallel = pytest.mark.parametrize("parallel", PARALLEL)


@every_parallel
def test_evaluation_on_ranks_does_not_change_the_run(parallel, two_ranks, place):
    for rank in (0, 1):
        assert_same(two_ranks[f"{parallel} evaluated"][rank], two_ranks[f"{parallel} whole"][rank])
    assert losses_of(place / f"{parallel}-eval") == losses_of(place / f"{parallel}-whole")
    assert "The " in two_ranks[f"{parallel} evaluated"][0].printed
    assert two_ranks[f"{parallel} evaluated"][1].printed == ""


@every_parallel
def test_a_disk_that_is_full_for_one_rank(parallel, two_ranks, place):
    """Nothing is left of the first of four saves; the others are intact."""
    found = two_ranks[f"{parallel} full disk"]
    assert [(outcome.crash, outcome.code, outcome.step) for outcome in found] == [("", 0, STEPS)] * 2
    assert "No space left on device" in found[0].printed + found[1].printed
    assert sorted(checkpoints(place / f"{parallel}-full")) == [4, 6, 8]
    assert temporaries(place / f"{parallel}-full") == []


@every_parallel
def test_two_ranks_train_as_one(parallel, two_ranks, alone_shared, place):
    expected = losses_of(place / "none-shared")
    assert expected[-1] < expected[0] - 0.1
    assert losses_of(place / f"{parallel}-shared") == pytest.approx(expected, abs=1e-5)
    for outcome in two_ranks[f"{parallel} shared"]:
        assert_same_weights(outcome, alone_shared, 1e-5)


@every_parallel
def test_stop_and_resume_on_ranks_to_the_bit(parallel, two_ranks, resumed, place):
    """With micro batches, and an epoch that ends within the fifth step."""
    whole = two_ranks[f"{parallel} whole"]
    assert [found.code for found in whole] == [0, 0]
    assert_same_weights(whole[1], whole[0])
    for rank in (0, 1):
        before, after = two_ranks[f"{parallel} stopped"][rank], resumed[f"{parallel} stopped"][rank]
        assert (before.code, before.step, after.resumed_at, after.code) == (STOPPED, STOPS[-1], STOPS[-1], 0)
        assert_same(after, whole[rank])
    assert losses_of(place / f"{parallel}-stopped") == losses_of(place / f"{parallel}-whole")


@pytest.mark.parametrize(
    "target", ["fsdp-to-ddp", "fsdp-to-ddp-sharded", "fsdp-to-fsdp", "half-sharded", "fsdp-to-none", "sharded-to-none"]
)
def test_resume_with_other_ranks_and_wrapper(target, three_ranks, resumed, alone, place):
    """From three ranks of fsdp, or two of ddp-sharded."""
    assert newest(place / "half-fsdp-3") == HALFWAY
    if target.endswith("none"):
        found = [perform(Run(fields(place / target, **SHARED)))]
    elif target == "half-sharded":
        found = resumed["2 ddp-sharded to 2 fsdp"]
    else:
        found = resumed[f"3 fsdp to 2 {target.removeprefix('fsdp-to-')}"]
    assert losses_of(place / target) == pytest.approx(losses_of(place / "fsdp-3"), abs=1e-5)
    for outcome in found:
        assert (outcome.code, outcome.resumed_at, outcome.step) == (0, HALFWAY, STEPS)
        assert_same_weights(outcome, three_ranks["fsdp"][0], 1e-5)


@every_parallel
def test_a_gradient_that_is_not_finite_on_one_rank(parallel, two_ranks, resumed, place):
    """All ranks skip the step, with clipping and without; then they continue."""
    for rank in (0, 1):
        good, bad = two_ranks[f"{parallel} good"][rank], resumed[f"{parallel} bad"][rank]
        after = resumed[f"{parallel} after"][rank]
        assert (bad.resumed_at, bad.step, bad.skipped) == (3, 4, 1)
        assert_same_weights(bad, good)
        assert all(torch.equal(one, other) for one, other in zip(bad.states, good.states, strict=True))
        assert (after.code, after.step, after.skipped) == (0, STEPS, 1)
        assert any(not torch.equal(value, bad.weights[name]) for name, value in after.weights.items())
        assert_same_weights(after, resumed[f"{parallel} after"][0])
    norms = list(recorded(place / f"{parallel}-nan", "gradient_norm").values())
    assert [math.isfinite(norm) for norm in norms] == [True] * 3 + [False] + [True] * 4


@every_parallel
def test_a_damaged_shard_is_not_loaded_on_any_rank(parallel, resumed):
    found = resumed[f"{parallel} damaged"]
    assert [outcome.resumed_at for outcome in found] == [6, 6]
    assert "step-00000008" in found[0].printed
    assert ".distcp" in found[0].printed
    assert_same_weights(found[1], found[0])


@every_parallel
def test_mistakes_and_non_finite_steps_end_all_ranks(parallel, two_ranks, resumed):
    assert all("2 steps in a row" in outcome.error for outcome in two_ranks[f"{parallel} all bad"])
    assert all("batch_size 3" in outcome.error for outcome in two_ranks[f"{parallel} odd batch"])
    assert all("num_layers" in outcome.error for outcome in resumed[f"{parallel} refused"])
    assert all((outcome.crash, "format" in outcome.error) == ("", True) for outcome in resumed["newer"])


@every_parallel
def test_a_signal_to_one_rank_stops_all_in_the_same_step(parallel, two_ranks, resumed, place):
    """The signal comes in the first of two micro batches of the second step."""
    assert [(found.code, found.step) for found in resumed[f"{parallel} signal"]] == [(STOPPED, 2)] * 2
    for rank in (0, 1):
        assert resumed[f"{parallel} after signal"][rank].resumed_at == 2
        assert_same(resumed[f"{parallel} after signal"][rank], two_ranks[f"{parallel} whole"][rank])
    assert losses_of(place / f"{parallel}-signal") == losses_of(place / f"{parallel}-whole")


# -- the command ------------------------------------------------------------------------------------------------------


class Command:
    """`cs336 train` in a forked process, which starts in a moment and can be killed at any."""

    def __init__(self, settings: dict[str, Any], folder: Path, variables: dict[str, str], target: Any = command):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("forkserver")
        arguments = (argv_of(settings), str(folder), {**CPU_ONLY, **variables})
        self.process = context.Process(target=target, args=arguments, daemon=True)
        self.process.start()

    @property
    def ended(self) -> bool:
        return self.process.exitcode is not None

    def wait(self) -> int | None:
        self.process.join(HANG)
        return self.process.exitcode

    def reaches(self, condition: Any) -> bool:
        return wait_until(lambda: condition() or self.ended, HANG) and condition()

    def printed(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""


@pytest.fixture
def start(tmp_path):
    with contextlib.ExitStack() as stack:

        def begin(settings: dict[str, Any], name: str = "printed", target: Any = command, **variables: str) -> Command:
            made = Command(settings, tmp_path / name, variables, target)
            stack.callback(made.process.join)
            stack.callback(made.process.kill)
            return made

        yield begin


def test_stopped_by_signals_and_resumed_to_the_bit(start, place, alone):
    """SIGTERM, then Ctrl-C; and a second command in the same folder meanwhile."""
    settings = fields(place / "signals", data="long.txt", steps=100_000, save_every=20)
    output, stopped = settings["output"], 0
    for number in (signal.SIGTERM, signal.SIGINT):
        run = start(settings)
        assert run.reaches(lambda stopped=stopped: newest(output) > stopped), run.printed("stderr")
        if number == signal.SIGTERM:
            second = start(settings, "second")
            assert second.wait() == 2
            assert not run.ended
            assert (second.printed("stdout"), second.printed("stderr").count("\n")) == ("", 1)
            assert output in second.printed("stderr")
        os.kill(run.process.pid, number)
        assert run.wait() == STOPPED, run.printed("stderr")
        assert "Traceback" not in run.printed("stderr")
        stopped = newest(output)
        assert len(losses_of(output)) == stopped  # the step was ended, recorded and saved
        assert temporaries(output) == []
    last = stopped + 3
    assert start({**settings, "steps": last}).wait() == 0
    # The learning rate depends on the number of steps, so the reference run is stopped and resumed, too.
    whole = {**settings, "output": str(place / "no-signals"), "save_every": 100_000}
    assert perform(Run(whole, stop_after=stopped)).code == STOPPED
    assert_same(loaded({**settings, "steps": last}), perform(Run({**whole, "steps": last})))
    assert losses_of(output) == losses_of(whole["output"])


def test_killed_at_any_moment(start, place, alone):
    """It saves in every step: the newest checkpoint can be resumed, and at most one step is lost."""
    settings = fields(place / "killed", steps=60, save_every=1, parallel="ddp")
    output, chance = settings["output"], random.Random(0)
    for _ in range(2):  # make soak kills a thousand times
        before = newest(output)
        killed = start(settings)
        assert killed.reaches(lambda before=before: newest(output) > before), killed.printed("stderr")
        time.sleep(chance.uniform(0, 0.12))
        killed.process.kill()
        assert killed.wait() == -signal.SIGKILL, killed.printed("stderr")
        assert loaded(copied(settings, "killed-copy")).resumed_at == newest(output) > before
        assert "damaged" not in killed.printed("stderr")
        assert temporaries(place / "killed-copy") == []
    last = start(settings)
    assert last.wait() == 0, last.printed("stderr")
    whole = fields(place / "unkilled", steps=60, parallel="ddp")
    assert_same(loaded(settings), perform(Run(whole)))
    assert list(recorded(output, "loss").items())[-5:] == list(recorded(whole["output"], "loss").items())[-5:]
    assert temporaries(output) == []


def test_under_torchrun(two_ranks, place, tmp_path):
    """In processes of their own; and rank 0 prints into a pipe that is closed after the first line."""
    settings = fields(place / "torchrun", parallel="ddp", micro_batch_size=1)
    with Interpreter(tmp_path) as python:
        torchrun = [str(python.path), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        words = " ".join([*torchrun, "-m", "cs336_systems", *argv_of(settings)])
        env = clean_env(PYTHON_EXEC=str(python.path))
        done = execute("bash", "-c", f"set -o pipefail; {words} | head -n 1", cwd=tmp_path, timeout=HANG, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert newest(settings["output"]) == STEPS
    assert losses_of(settings["output"]) == losses_of(place / "ddp-whole")


@pytest.fixture
def start_each(start):
    """Return a function that starts the command of each rank, with settings of its own, as torchrun would."""

    def begin(each: list[dict[str, Any]], target: Any = command) -> list[Command]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test"}
        common |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(len(each)))
        numbered = ((rank, settings, str(rank)) for rank, settings in enumerate(each))
        return [
            start(settings, f"rank-{rank}", target, RANK=number, LOCAL_RANK=number, **common)
            for rank, settings, number in numbered
        ]

    return begin


SAVES: dict[str, Any] = {"async_save": True, "save_every": 1}
PIPELINE = {"engine": "torch", "pp": 3, "num_layers": 3, "micro_batch_size": 1}


@pytest.mark.parametrize(
    ("number", "timeout", "flags"),
    [(signal.SIGKILL, 60, {}), (signal.SIGSTOP, 10, {}), (signal.SIGKILL, 60, SAVES), (signal.SIGSTOP, 10, PIPELINE)],
    ids=["dies", "stalls", "dies in an asynchronous save", "stalls in a pipeline"],
)
def test_a_missing_rank_is_named_by_the_others(number, timeout, flags, start_each, place, tmp_path):
    """No torchrun is there to end them. What their saves see of it is not reported."""
    output = tmp_path / "gone"
    settings = fields(output, parallel="ddp", batch_size=3, steps=100_000, rank_timeout=timeout)
    settings |= {"data": str(place / "short.txt"), **flags}
    ranks = start_each([settings] * 3)
    assert ranks[0].reaches(lambda: "step 3/" in ranks[0].printed("stdout")), ranks[0].printed("stderr")
    if flags is SAVES:
        assert ranks[0].reaches(lambda: bool(temporaries(output)))
    os.kill(ranks[1].process.pid, number)
    for rank in (ranks[0], ranks[2]):
        assert rank.wait() == 1
        assert "rank 1 of 3 died or does not answer" in rank.printed("stderr")
        assert "Traceback" not in rank.printed("stderr")
        # torch itself may log a lost connection, with the rank before it, if its heartbeat comes at that moment.
        assert not [line for line in rank.printed("stderr").splitlines() if "closed" in line and line[:5] != "[rank"]


def assert_refused_by_all(ranks: list[Command], *named: str) -> None:
    """Exit code 2 and one line on every rank, which has all of `named`."""
    for rank in ranks:
        assert rank.wait() == 2, rank.printed("stderr")
        printed = rank.printed("stderr")
        assert printed.count("\n") == 1
        assert all(text in printed for text in named), printed


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"learning_rate": 0.5}, "ranks differ in --learning_rate: 0.01 on ranks 0, 2 and 0.5 on rank 1; start all"),
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"data": "missing.txt"}, "no file 'missing.txt'"),
        ({"output": "elsewhere"}, "elsewhere on rank 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_rank_with_another_command_line(changes, named, start_each, place):
    """The ranks name it, also where it ends before it meets them; nothing is written."""
    settings = fields(place / "unlike", parallel="ddp", batch_size=3)
    ranks = start_each([settings, {**settings, **changes}, settings])
    assert_refused_by_all(ranks, named)
    if "ranks differ" not in named and "output" not in changes:
        assert_refused_by_all([ranks[0], ranks[2]], "rank 1 of 3 failed: ")
    assert not (place / "unlike").exists()


def test_a_model_that_cannot_fit_is_refused_on_all_ranks_before_it_is_built(start_each, place):
    settings = fields(place / "huge", parallel="fsdp", batch_size=2, num_layers=9000, d_model=65536, num_heads=8)
    ranks = start_each([settings] * 2)
    assert_refused_by_all(ranks, "a step of this model needs at least ", "(predicted, not tried); use a smaller --size")
    assert not (place / "huge").exists()


def test_data_that_shrinks_under_one_rank(start_each, place, tmp_path):
    """The others give its error as the cause of their end."""
    copies = [tmp_path / f"copy-{rank}.txt" for rank in range(3)]
    for copy in copies:
        shutil.copy(place / "long.txt", copy)
    settings = fields(place / "shrinks", parallel="ddp", batch_size=3, steps=100_000)
    ranks = start_each([{**settings, "data": str(copy)} for copy in copies])
    assert ranks[0].reaches(lambda: "step 3/" in ranks[0].printed("stdout")), ranks[0].printed("stderr")
    os.truncate(copies[1], 100)
    assert_refused_by_all(ranks, f"--data '{copies[1]}' has become shorter than the 5,000 tokens it had")
    assert_refused_by_all([ranks[0], ranks[2]], "rank 1 of 3 failed: ")


def test_an_output_folder_of_each_node(start_each, place, tmp_path):
    """A tmpfs of its own for rank 1, as a disk of another node would be."""
    if execute("unshare", "-m", "true", cwd=tmp_path).returncode:
        pytest.skip("needs the right to mount")
    folder = tmp_path / "mounted"
    folder.mkdir()
    settings = fields(folder, data=str(place / "long.txt"), parallel="ddp", batch_size=2)
    named = f"--output '{folder}': rank 1 cannot see what rank 0 writes there; --output must be on a file system that"
    assert_refused_by_all(start_each([settings] * 2, with_private_output), named)
    assert list(folder.iterdir()) == []
