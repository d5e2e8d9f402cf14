"""Checkpoints that someone else has written or changed are data: none is executed, none crashes or hangs a run."""

import contextlib
import logging
import os
import pickle
import shutil
import signal
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch

from cs336_systems.config import UserError
from cs336_systems.parallel.launch import process_group
from cs336_systems.train.checkpoint import DamagedCheckpointError, Store, rng_state
from cs336_systems.train.checkpoint_files import DamageError, name_of
from cs336_systems.train.checkpoint_reader import require_grid
from tests.distributed import checkpoint_cases as cases

MUTATIONS = int(os.environ.get("CS336_MUTATIONS", "200"))


@pytest.fixture(scope="module", autouse=True)
def alone():
    logging.disable(logging.DEBUG)  # torch logs every tensor of a checkpoint, and pytest would keep it all
    with process_group("gloo", "cpu"):
        yield
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True)
def no_hang():
    """A read of a FIFO or a device would never return."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("hangs"))
    signal.alarm(120)
    yield
    signal.alarm(0)


@pytest.fixture(scope="module")
def original(tmp_path_factory, alone) -> Path:
    folder = tmp_path_factory.mktemp("original") / "checkpoints"
    for step in (1, 2):
        assert cases.save(folder, step) == folder / name_of(step)
    return folder


@pytest.fixture
def folder(original, tmp_path) -> Path:
    """The checkpoints of steps 1 and 2."""
    return Path(shutil.copytree(original, tmp_path / "checkpoints"))


def test_what_was_saved_is_loaded(folder):
    assert cases.loaded_step(folder) == 2


def test_torch_loads_our_checkpoints(folder):
    import torch.distributed.checkpoint as dcp

    state = {name: torch.zeros_like(value) for name, value in cases.tiny_state(0).items()}
    dcp.load(state, checkpoint_id=folder / name_of(2))
    assert all(torch.equal(value, cases.tiny_state(2)[name]) for name, value in state.items())


LEFT, RIGHT = ((0, 0), (2, 2)), ((0, 2), (2, 2))
GRIDS = {
    "whole": ([((0, 0), (4, 4))], None),
    "rows": ([((0, 0), (3, 4)), ((3, 0), (1, 4))], None),
    "columns": ([((0, 0), (4, 2)), ((0, 2), (4, 2))], None),
    "rows and columns": ([LEFT, RIGHT, ((2, 0), (2, 2)), ((2, 2), (2, 2))], None),
    "rows, the last empty": ([((0, 0), (4, 4)), ((4, 0), (0, 4))], None),
    "a missing corner": ([LEFT, RIGHT, ((2, 0), (2, 2))], "grid"),
    "a corner twice": ([LEFT, RIGHT, ((2, 0), (2, 2)), ((2, 0), (2, 2))], "grid"),
    "an overlap": ([((0, 0), (4, 3)), ((0, 2), (4, 2))], "overlap"),
    "beyond the end": ([((0, 0), (4, 2)), ((0, 2), (4, 4))], "all of a tensor"),
    "another number of dimensions": ([((0,), (4, 4))], "dimensions"),
    "no part": ([], "all of a tensor"),
}


@pytest.mark.parametrize("name", GRIDS)
def test_parts_of_a_tensor_form_a_grid(name):
    parts, problem = GRIDS[name]
    with contextlib.nullcontext() if problem is None else pytest.raises(DamageError, match=problem):
        require_grid(parts, (4, 4))


@pytest.mark.parametrize("forgery", cases.FORGERIES)
def test_a_forged_checkpoint_is_ignored(forgery, folder, tmp_path):
    """Its files are left as they are, the one before it is loaded, and nothing of it is executed."""
    canary = tmp_path / "canary"
    path = folder / name_of(2)
    cases.FORGERIES[forgery](path, canary)
    assert not canary.exists()
    names = sorted(os.listdir(path))
    store = Store(folder, keep=2)
    with cases.no_unpickling(), pytest.warns(UserWarning, match=f"{name_of(2)}.*damaged and ignored: .+") as caught:
        assert cases.loaded_step(store) == 1
    assert not canary.exists()
    assert [len(str(warning.message).splitlines()) for warning in caught] == [1]
    assert sorted(os.listdir(path)) == names
    assert cases.save(store, 3) is not None
    assert sorted(os.listdir(path)) == names  # it neither counts among those to keep nor is removed
    assert (folder / name_of(1)).exists()


def test_a_forged_checkpoint_would_execute(folder, tmp_path):
    """Else the canary shows nothing."""
    canary = tmp_path / "canary"
    cases.FORGERIES["an index that calls os.system"](folder / name_of(2), canary)
    pickle.loads((folder / name_of(2) / ".metadata").read_bytes())
    assert canary.exists()


def test_random_changes_are_noticed_or_harmless(tmp_path):
    found = cases.survive_mutations(tmp_path, MUTATIONS)
    print(dict(found))
    assert set(found) == {"noticed", "loaded right"}
    assert found["noticed"] > MUTATIONS // 2
    assert found.total() == MUTATIONS


def test_a_tensor_of_another_shape_is_refused_before_anything_is_loaded(folder):
    store = Store(folder)
    state = {**cases.tiny_state(0), "model/weight": torch.zeros(5, 3)}
    before = {name: value.clone() for name, value in state.items()}
    found = store.newest()
    assert found is not None
    with (
        pytest.warns(UserWarning, match="damaged"),
        pytest.raises(DamagedCheckpointError, match=r"model/weight is float32 .*\[4, 3\]"),
    ):
        store.load(found, state)
    assert all(torch.equal(value, before[name]) for name, value in state.items())
    assert store.newest().path == folder / name_of(1)


def test_a_random_state_that_torch_refuses_is_found_before_anything_is_loaded(tmp_path):
    folder = tmp_path / "checkpoints"
    own = next(iter(rng_state()))
    Store(folder).save({**cases.tiny_state(1), own: torch.zeros_like(rng_state()[own])}, cases.tiny_manifest(1))
    store, state = Store(folder), {**cases.tiny_state(0), **rng_state()}
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(DamagedCheckpointError, match=own):
        store.load(store.newest(), state)
    assert all(torch.equal(value, state[name]) for name, value in cases.tiny_state(0).items())


def test_a_file_that_changes_after_verification_is_an_error_in_one_line(folder):
    store = Store(folder)
    found = store.newest()
    shard = folder / name_of(2) / cases.SHARD
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(UserError, match="start the same command again") as raised:
        store.load(found, {**cases.tiny_state(0), **rng_state()})
    assert "\n" not in str(raised.value)


def test_a_newer_format_counts_only_with_its_digest(folder):
    cases.rehash(folder / name_of(2), format=2)
    with pytest.raises(UserError, match="format 2"):
        Store(folder).newest()


def test_a_folder_that_cannot_be_read_is_an_error(folder, monkeypatch):
    """A run that has checkpoints must not start anew."""

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(UserError, match=r"cannot read .*checkpoints.*Permission denied"):
        Store(folder).newest()
    assert Store(folder / "none").newest() is None


@pytest.mark.parametrize("name", ["step-best.bak", "step-3", "step-000000003", "step-0000000x", "step-00000003.old"])
def test_other_names_are_no_checkpoints(name, folder):
    """They are neither loaded, nor do they count among those to keep, nor are they removed."""
    shutil.copytree(folder / name_of(2), folder / name)
    (folder / "step-00000009.tmp-notes").mkdir()
    assert cases.save(Store(folder, keep=1), 3) is not None
    Store(folder).prepare()
    assert cases.loaded_step(folder) == 3
    assert {path.name for path in folder.iterdir()} == {name, name_of(3), "step-00000009.tmp-notes"}


def test_what_a_killed_start_has_left_is_removed(folder):
    """A start tests whether it can write to the folder, and may be killed before it has tidied up."""
    with mock.patch.object(Path, "rmdir", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        Store(folder).prepare()
    assert len([*folder.iterdir()]) == 3
    Store(folder).prepare()
    assert {path.name for path in folder.iterdir()} == {name_of(1), name_of(2)}


def test_a_damaged_folder_of_the_same_step_is_moved_aside(folder):
    (folder / name_of(2) / "notes.txt").write_text("mine")
    assert cases.save(folder, 2) is not None
    assert cases.loaded_step(folder) == 2
    (aside,) = folder.glob("damaged-*")
    assert (aside / "notes.txt").read_text() == "mine"


def test_faults_at_every_phase_of_a_save(tmp_path):
    """The save fails in one line or succeeds; a good checkpoint remains, and the next save succeeds."""
    assert cases.saves_with_faults(tmp_path, 0, cases.faults(0)) == []


@pytest.mark.parametrize("phase", cases.PHASES)
def test_a_fault_is_reported_with_its_reason(phase, folder):
    store = Store(folder, keep=1)
    with cases.failing(phase, "EIO", folder), pytest.warns(UserWarning, match=r"Input/output error"):
        saved = cases.save(store, 3)
    assert (saved is None) == (phase not in cases.AFTER_RENAME[1:])


@pytest.mark.parametrize("phase", [phase for phase in cases.PHASES if phase not in cases.AFTER_RENAME])
def test_the_whole_folder_vanishes_in_a_save(phase, folder):
    """Only this save is lost: the next one creates the folder again."""
    owner, name, where = cases.PHASES[phase]
    real, taken = getattr(owner, name), folder.with_name("taken")

    def stand_in(*args, **kwargs):
        if where(*map(str, args)) and not taken.exists():
            folder.replace(taken)
        return real(*args, **kwargs)

    store = Store(folder)
    with mock.patch.object(owner, name, stand_in), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saved = cases.save(store, 3)
    assert taken.exists()
    assert [len(str(warning.message).splitlines()) for warning in caught] == ([1] if saved is None else [])
    assert cases.save(store, 4) == folder / name_of(4)
    assert cases.loaded_step(store) == 4
