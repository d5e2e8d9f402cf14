"""Saves and resumes: stalled disks, time limits, `--keep_best`, `--resume_from`, and `--init` on ranks."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from cs336_systems.parallel.launch import spawn
from cs336_systems.train.checkpoint import Store
from cs336_systems.train.checkpoint_files import MANIFEST, METADATA, digest_of
from cs336_systems.train.loop import STOPPED
from tests.distributed.checkpoint_cases import tiny_manifest
from tests.distributed.train_cases import (
    STEPS,
    Outcome,
    Run,
    checkpoints,
    fields,
    losses_of,
    newest,
    perform,
    perform_all,
    temporaries,
    text_of,
)
from tests.helpers import files

pytestmark = pytest.mark.xdist_group("ranks")  # one at a time: a test has up to two busy processes

PARALLEL = ("ddp", "ddp-sharded", "fsdp")
every_parallel = pytest.mark.parametrize("parallel", PARALLEL)
HANG = 280.0
LIMIT = 10
"""A time limit that a save of this size keeps on the busiest machine."""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saving")
    (folder / "short.txt").write_bytes(text_of(330))
    (folder / "other.txt").write_bytes(text_of(330, seed=1))
    return folder


def assert_same_weights(found: Outcome, expected: Outcome) -> None:
    assert found.weights.keys() == expected.weights.keys() != set()
    assert all(torch.equal(value, expected.weights[name]) for name, value in found.weights.items())


@pytest.fixture(scope="module")
def whole(place, alone) -> Outcome:
    """An undisturbed run, which keeps the checkpoints of steps 2, 4, 6 and 8."""
    outcome = perform(Run(fields(place / "whole", save_every=2, keep=9)))
    assert (outcome.code, sorted(checkpoints(place / "whole"))) == (0, [2, 4, 6, 8])
    return outcome


# -- stalled disks ----------------------------------------------------------------------------------------------------


def test_training_goes_on_while_a_save_is_stalled(place, whole):
    """The save of step 2 waits until step 7 is in its forward; those of steps 4 and 6 are left out, with a line."""
    output = place / "stalled"
    found = perform(Run(fields(output, save_every=2, keep=9, async_save=True), fault="stalled disk"))
    assert (found.crash, found.code, found.step) == ("", 0, STEPS)
    for step in (4, 6):
        assert f"step {step} not saved: the save of step 2 is still running on rank 0; training" in found.printed
    assert sorted(checkpoints(output)) == [2, 8]
    assert_same_weights(found, whole)
    assert losses_of(output) == losses_of(place / "whole")
    assert_same_weights(perform(Run(fields(output), trains=False)), whole)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_save_without_progress_has_failed(is_async, place, whole):
    """Training goes on. What the stalled save writes later is not published: a synchronous one reads tensors in use."""
    output = place / f"overdue-{is_async}"
    run = Run(fields(output, save_every=2, keep=9, async_save=is_async), fault="stalled disk, overdue")
    found = perform(run)
    assert (found.crash, found.code, found.step) == ("", 0, STEPS)
    assert found.printed.count("step 2 not saved: no progress on rank 0 for --rank_timeout 600 s") == 1
    assert "step 6 not saved: the save of step 2 is still running on rank 0" in found.printed
    assert sorted(checkpoints(output)) == [8]
    assert temporaries(output) == []
    assert_same_weights(found, whole)


def test_the_last_save_gives_up_on_a_stalled_one(place, alone):
    """The disk is back after the run has ended. The run reports what is saved, and does not hang."""
    settings = fields(place / "last", save_every=2, steps=4, rank_timeout=1.0)
    found = perform(Run(settings, fault="stalled disk, overdue"))
    assert (found.crash, found.code, newest(settings["output"])) == ("", 1, 0)
    assert "step 4 not saved: the save of step 2 is still running on rank 0" in found.printed
    assert "all 4 steps are done, but no checkpoint was saved" in found.printed


# -- which checkpoints are kept ---------------------------------------------------------------------------------------


class Saves:
    """Checkpoints whose files are empty: retention reads the manifest."""

    def __init__(self, folder: Path, **chosen: int):
        shutil.rmtree(folder, ignore_errors=True)
        self.store = Store(folder, **chosen)

    def add(self, step: int, loss: float | None) -> None:
        path = self.store.folder / f"step-{step:08d}"
        path.mkdir(parents=True)
        empty = {"size": 0, "sha256": hashlib.sha256().hexdigest()}
        (path / METADATA).touch()
        manifest = {"format": 1, **tiny_manifest(step), "validation_loss": loss, "files": {METADATA: empty}}
        (path / MANIFEST).write_text(json.dumps({**manifest, "sha256": digest_of(manifest)}))
        self.store._tidy(path)

    @property
    def kept(self) -> set[int]:
        return {int(path.name[5:]) for path in self.store.folder.iterdir()}


LOSSES = st.lists(st.none() | st.sampled_from([0.5, 1.0, 1.5, 2.0, 2.5]), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(losses=LOSSES, keep=st.integers(1, 3), every=st.integers(0, 4), best=st.integers(0, 3))
def test_kept_are_the_latest_the_best_and_the_multiples(losses, keep, every, best, alone, tmp_path_factory):
    """After every save; of equal losses the later one is the better."""
    saves = Saves(tmp_path_factory.getbasetemp() / "retention", keep=keep, keep_every=every, keep_best=best)
    for step, loss in enumerate(losses, start=1):
        saves.add(step, loss)
        so_far = {number: value for number, value in enumerate(losses[:step], start=1) if value is not None}
        ranking = sorted(so_far, key=lambda number: (so_far[number], -number))
        multiples = {number for number in range(1, step + 1) if every and number % every == 0}
        assert saves.kept == {*range(max(1, step - keep + 1), step + 1), *ranking[:best], *multiples}


def test_the_checkpoint_just_saved_is_kept_among_later_ones(alone, tmp_path):
    saves = Saves(tmp_path / "saves", keep=1)
    saves.add(9, None)
    saves.add(4, None)
    assert saves.kept == {4, 9}


def test_the_best_are_kept_over_restarts(place, alone):
    """By the validation losses in their manifests, which a restart reads."""
    output = place / "best"
    same = fields(output, save_every=1, eval_every=2, sample_tokens=0, keep=1, keep_best=2, learning_rate=0.3)
    assert perform(Run(same, stop_after=5)).code == STOPPED
    assert perform(Run(same)).code == 0
    manifests = {
        step: json.loads((path / MANIFEST).read_text())["validation_loss"] for step, path in checkpoints(output).items()
    }
    lines = [json.loads(line) for line in (output / "records.jsonl").read_text().splitlines()]
    losses = {line["config"]["first_step"]: line["samples"][0] for line in lines if line["metric"] == "validation_loss"}
    best = sorted(losses, key=lambda step: losses[step])[:2]
    assert list(losses) == [2, 4, 6, 8]
    assert manifests == {step: losses[step] for step in sorted({8, *best})}


def test_a_loss_that_is_never_measured_at_a_save_is_announced(place, alone, capsys):
    from cs336_systems.flags import build
    from cs336_systems.train.loop import Trainer
    from cs336_systems.train.settings import TrainSettings

    for save_every, is_announced in ((3, True), (2, False)):
        changes = {"save_every": save_every, "eval_every": 4, "keep_best": 1}
        Trainer(build(TrainSettings, fields(place / "never", **changes)), alone).introduce()
        assert ("--keep_best: only the last step" in capsys.readouterr().out) == is_announced
    assert "--keep_best" in perform_refused(fields(place / "never", keep_best=1, eval_every=0))


def perform_refused(run_fields: dict[str, Any]) -> str:
    outcome = perform(Run(run_fields))
    assert (outcome.crash, outcome.code) == ("", None)
    assert "\n" not in outcome.error
    return outcome.error


# -- which checkpoint is resumed --------------------------------------------------------------------------------------


def copied(place: Path, name: str) -> Path:
    shutil.copytree(place / "whole", place / name)
    return place / name


def test_an_earlier_step_is_resumed_and_later_checkpoints_are_set_aside(place, whole):
    output = copied(place, "earlier")
    run = fields(output, save_every=2, keep=9, resume_from="4")
    found = perform(Run(run, stop_after=6))
    assert (found.code, found.resumed_at) == (STOPPED, 4)
    assert (sorted(checkpoints(output)), newest(output)) == ([2, 4, 6], 6)
    assert sorted(path.name for path in (output / "superseded-1").iterdir()) == ["step-00000006", "step-00000008"]
    assert "superseded-1" in found.printed
    # The same command again continues; without the flag it would, too.
    again = perform(Run(run))
    assert (again.code, again.resumed_at, again.step) == (0, 6, STEPS)
    assert "was done before" in again.printed
    assert_same_weights(again, whole)
    assert losses_of(output) == losses_of(place / "whole")
    # Another command goes back once more.
    changed = perform(Run({**run, "learning_rate": 2e-2}))
    assert (changed.code, changed.resumed_at) == (0, 4)
    assert sorted(path.name for path in (output / "superseded-2").iterdir()) == ["step-00000006", "step-00000008"]
    assert losses_of(output)[:4] == losses_of(place / "whole")[:4]
    assert losses_of(output)[5:] != losses_of(place / "whole")[5:]  # of a step that was trained again the last counts


@pytest.mark.parametrize("name", ["whole/checkpoints/step-00000004", "whole/checkpoints", "whole"])
def test_the_checkpoint_of_another_run_is_resumed(name, place, whole):
    before = files(place / "whole")
    run = fields(place / f"from-{name.count('/')}", resume_from=str(place / name))
    resumed_at = 4 if "step" in name else 8
    first = perform(Run({**run, "steps": 10}, stop_after=resumed_at + 1))
    assert (first.code, first.resumed_at) == (STOPPED, resumed_at)
    again = perform(Run({**run, "steps": 10}))
    assert (again.code, again.resumed_at, again.step) == (0, resumed_at + 1, 10)
    assert files(place / "whole") == before


def test_a_resumed_run_names_the_engine_and_its_mesh(place, alone):
    """`--parallel` is for our engine: its default says nothing about torch's."""
    first = fields(place / "engines", parallel="fsdp", steps=3, save_every=1)
    assert perform(Run(first, stop_after=1)).code == STOPPED
    other = {**first, "parallel": "ddp", "engine": "torch", "dp_shard": 0}
    printed = perform(Run(other, stop_after=2)).printed
    assert "changed since that checkpoint: parallel was fsdp and is torch\n" in printed
    assert "changed since" not in perform(Run({**other, "dp_shard": 1})).printed


def test_a_checkpoint_that_cannot_be_resumed_from(place, whole):
    output = copied(place, "cannot")
    data = sorted(checkpoints(output)[6].glob("*.distcp"))[0]
    data.write_bytes(data.read_bytes()[:-1])
    before = files(output)
    same = fields(output)
    assert "there are: 2, 4, 6, 8" in perform_refused({**same, "resume_from": "3"})
    assert all(word in perform_refused({**same, "resume_from": "6"}) for word in ("step-00000006", "damaged"))
    path = str(place / "whole" / "checkpoints" / "step-00000004")
    assert "holds a run that did not resume from" in perform_refused({**same, "resume_from": path})
    assert "batch_size was 4 and is 8" in perform_refused({**same, "resume_from": "4", "batch_size": 8})
    assert files(output) == before
    empty = fields(place / "empty")
    assert "no such step or path" in perform_refused({**empty, "resume_from": str(place / "nowhere")})
    assert "no intact checkpoint" in perform_refused({**empty, "resume_from": str(place)})
    assert "nothing would be trained" in perform_refused({**same, "resume_from": "4", "steps": 4})
    assert "there are: none" in perform_refused({**empty, "resume_from": "4"})
    other = {**empty, "resume_from": path, "data": str(place / "other.txt")}
    assert "other tokens" in perform_refused(other)


# -- on ranks: all runs in one start ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_ranks(place, whole) -> dict[str, list[Outcome]]:
    save_file(whole.weights, place / "weights")
    runs = {}
    for parallel in PARALLEL:
        same = {"parallel": parallel, "save_every": 2, "keep": 9}
        runs[f"{parallel} init"] = Run(
            fields(place / f"{parallel}-init", **same, init=str(place / "weights")), trains=False
        )
        runs[f"{parallel} unfit"] = Run(
            fields(place / f"{parallel}-unfit", **same, init=str(place / "weights"), num_layers=2)
        )
        runs[f"{parallel} whole"] = Run(fields(place / f"{parallel}-whole", **same))
        stalled = fields(place / f"{parallel}-stalled", **same, async_save=True)
        runs[f"{parallel} stalled"] = Run(stalled, fault="stalled disk on rank 1")
        back = fields(place / f"{parallel}-stalled", **same, resume_from="2")
        runs[f"{parallel} back"] = Run(back)
        runs[f"{parallel} back again"] = Run(back)
    limited = fields(place / "limited", parallel="ddp", save_every=2, rank_timeout=LIMIT)
    runs["limited"] = Run(limited, fault="stalled disk on rank 1")
    by_rank = spawn(perform_all, 2, runs, timeout=HANG)
    return {name: [found[name] for found in by_rank] for name in runs}


@every_parallel
def test_weights_reach_every_rank_to_the_bit(parallel, two_ranks, whole):
    for outcome in two_ranks[f"{parallel} init"]:
        assert (outcome.crash, outcome.error, outcome.resumed_at) == ("", "", 0)
        assert_same_weights(outcome, whole)
    assert all("layers.1" in outcome.error for outcome in two_ranks[f"{parallel} unfit"])


@every_parallel
def test_a_stalled_rank_does_not_hold_the_training(parallel, two_ranks, place):
    """Rank 0 has written its part and waits for rank 1, in the background as well."""
    found = two_ranks[f"{parallel} stalled"]
    assert [(outcome.crash, outcome.code, outcome.step) for outcome in found] == [("", 0, STEPS)] * 2
    for step in (4, 6):
        assert f"step {step} not saved: the save of step 2 is still running on rank 0, 1;" in found[0].printed
    assert [outcome.printed for outcome in found[1:]] == [""]
    for rank in (0, 1):
        assert_same_weights(found[rank], two_ranks[f"{parallel} whole"][rank])


@every_parallel
def test_an_earlier_step_is_resumed_on_ranks(parallel, two_ranks, place):
    """From step 2 of a run with checkpoints of steps 2 and 8."""
    for rank in (0, 1):
        back, again = two_ranks[f"{parallel} back"][rank], two_ranks[f"{parallel} back again"][rank]
        assert (back.crash, back.code, back.resumed_at, back.step) == ("", 0, 2, STEPS)
        assert (again.crash, again.code, again.resumed_at) == ("", 0, STEPS)
        assert_same_weights(back, two_ranks[f"{parallel} whole"][rank])
    output = place / f"{parallel}-stalled"
    assert [path.name for path in (output / "superseded-1").iterdir()] == ["step-00000008"]
    assert sorted(checkpoints(output)) == [2, 4, 6, 8]


def test_the_rank_that_stalls_is_named(two_ranks, place):
    """Not rank 0, whose collective ends by the time limit. The last save succeeds: the disk of rank 1 is back."""
    found = two_ranks["limited"]
    assert [(outcome.crash, outcome.code, outcome.step) for outcome in found] == [("", 0, STEPS)] * 2
    warned = [line for line in found[0].printed.splitlines() if "not saved" in line]
    assert [line.split("not saved: ")[1] for line in warned] == [
        f"no progress on rank 1 for --rank_timeout {LIMIT} s; training continues",
        "the save of step 2 is still running on rank 1; training continues",
        "the save of step 2 is still running on rank 1; training continues",
    ]
    assert (sorted(checkpoints(place / "limited")), temporaries(place / "limited")) == ([8], [])
