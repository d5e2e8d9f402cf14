"""The output folder of a run that fails: what it made is removed, and nothing else."""

from typing import Any

import pytest

from tests.distributed.train_cases import argv_of, fields, text_of
from tests.helpers import exit_code, files

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def words(elsewhere) -> list[str]:
    """A run that is refused only after it has made its output folder."""
    (elsewhere / "short.txt").write_bytes(text_of(330))
    return argv_of(fields(elsewhere / "runs/nn", data=str(elsewhere / "short.txt"), resume_from="5"))


def assert_step_refused(words: list[str], capture: Any) -> None:
    assert exit_code(words) == 2
    assert "no checkpoint of step 5" in capture.readouterr().err


def test_a_run_that_cannot_resume_leaves_nothing(words, elsewhere, capfd):
    assert_step_refused(words, capfd)
    assert [path.name for path in elsewhere.iterdir()] == ["short.txt"]


@pytest.mark.parametrize("there", ["runs/nn/.lock", "runs/nn/checkpoints/README", "runs/nn/notes", "runs/notes"])
def test_what_was_there_stays(there, words, elsewhere, capfd):
    (elsewhere / there).parent.mkdir(parents=True)
    (elsewhere / there).write_text("")
    before = files(elsewhere)
    assert_step_refused(words, capfd)
    assert files(elsewhere).keys() == before.keys()


def test_a_run_that_is_done_keeps_its_folder(words, elsewhere, capfd):
    asked = words.index("--resume_from")
    one_step = [*words[:asked], *words[asked + 2 :], "--steps", "1", "--warmup_steps", "0"]
    assert exit_code(one_step) == 0
    assert "\ndone: 1 step\n" in capfd.readouterr().out
    assert exit_code(one_step) == 0
    assert "nothing to do: the only step is done" in capfd.readouterr().out
    kept = elsewhere / "runs/nn"
    assert (kept / ".lock").exists()
    assert any((kept / "checkpoints").iterdir())
