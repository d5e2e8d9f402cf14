"""A killed `cs336 tokenize`, started again, gives the store of an undisturbed run to the bit."""

import os
import random
import signal
import sys
from pathlib import Path

import pytest

from cs336_systems.train.tokens import parts
from tests.helpers import files, running, wait_until
from tests.unit.train.tokens.conftest import END, SENTENCES
from tests.unit.train.tokens.stores import run, texts, write_lines

pytestmark = pytest.mark.usefixtures("elsewhere", "small_parts")


@pytest.fixture
def words(elsewhere) -> tuple[object, ...]:
    """A command that also trains its tokenizer: nine parts of two files."""
    (elsewhere / "a.txt").write_text(END.join(SENTENCES[:30]), encoding="utf-8")
    write_lines(elsewhere / "b.jsonl", SENTENCES[30:])
    return ("a.txt", "b.jsonl", "--train_tokenizer", 270, "--workers", 1)


@pytest.fixture
def undisturbed(words, elsewhere) -> dict[str, bytes]:
    assert run(*words, "-o", "whole") == 0
    assert texts(elsewhere / "whole") == SENTENCES
    return files(elsewhere / "whole")


def killed_at(moment: int, *words: object) -> int:
    """Run the command in a fork that is killed before its n-th call on a file or in the midst of writing a part.

    Returns the number of calls, if it came to its end.
    """
    reader, writer = os.pipe()
    if child := os.fork():
        os.close(writer)
        calls = int(os.read(reader, 20) or 0)
        os.close(reader)
        _, status = os.waitpid(child, 0)
        assert status in (0, signal.SIGKILL)
        return calls
    try:
        calls = 0

        def count() -> None:
            nonlocal calls
            calls += 1
            if calls == moment:
                os.kill(os.getpid(), signal.SIGKILL)

        def audit(event: str, details: tuple) -> None:
            if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir") or (
                event == "open" and "b" in str(details[1])
            ):
                count()

        add = parts._Writer.add

        def adding(self, *given):
            add(self, *given)
            self._file.flush()
            count()

        parts._Writer.add = adding
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads do not survive a fork
        sys.addaudithook(audit)
        assert run(*words) == 0
        os.write(writer, str(calls).encode())
        os._exit(0)
    finally:
        os._exit(1)


def test_killed_once_at_any_call(words, undisturbed, elsewhere):
    calls = killed_at(0, *words, "-o", "counted")
    assert calls > 60
    assert files(elsewhere / "counted") == undisturbed
    moments = random.Random(5).sample(range(1, calls), 9)
    for moment in [1, *moments, calls]:
        assert killed_at(moment, *words, "-o", f"out{moment}") == 0
        assert run(*words, "-o", f"out{moment}") == 0
        assert files(elsewhere / f"out{moment}") == undisturbed, moment


def test_killed_again_and_again(words, undisturbed, elsewhere):
    """Every start finishes a few more calls; the parts that were finished are not written again."""
    starts = 1
    while not killed_at(25, *words, "-o", "out"):
        starts += 1
        assert starts < 30
    assert starts > 3
    assert files(elsewhere / "out") == undisturbed


def test_finished_parts_are_kept_and_damaged_ones_are_not(words, undisturbed, elsewhere, monkeypatch):
    def stop_before_the_end(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("cs336_systems.train.tokens.tokenizing.assemble", stop_before_the_end)
        assert run(*words, "-o", "out") == 130
    there = sorted((elsewhere / "out/.parts").glob("*.tokens"))
    there[0].write_bytes(there[0].read_bytes()[:-1] + b"\7")
    there[1].unlink()
    (elsewhere / "out/.parts/other.tokens").write_bytes(b"of another run")
    written = []
    write = parts.PartFiles.write
    monkeypatch.setattr(parts.PartFiles, "write", lambda self, *a: written.append(self.tokens) or write(self, *a))
    assert run(*words, "-o", "out") == 0
    assert sorted(path.name for path in written) == [path.name for path in there[:2]]
    assert files(elsewhere / "out") == undisturbed


def test_a_replaced_store_is_whole_or_absent(words, elsewhere):
    """Killed while it replaces the store of other inputs: store.json is never beside tokens of another run."""
    write_lines(elsewhere / "other.jsonl", SENTENCES[:5])
    other = ("other.jsonl", *words[2:], "-o", "out")
    calls = killed_at(0, *words, "-o", "counted")
    assert run(*words, "-o", "whole") == 0
    for moment in range(calls - 24, calls, 4):
        assert run(*other, "--force") == 0
        before = files(elsewhere / "out")
        assert killed_at(moment, *words, "-o", "out", "--force") == 0
        found = {name: content for name, content in files(elsewhere / "out").items() if ".parts" not in name}
        assert "store.json" not in found or found in (before, files(elsewhere / "whole"))
        assert run(*words, "-o", "out", "--force") == 0
        assert files(elsewhere / "out") == files(elsewhere / "whole")


SMALL_PARTS = """
import sys
from cs336_systems.cli import main
from cs336_systems.train.tokens import inputs
inputs.PART_BYTES = 700
sys.exit(main(sys.argv[1:]))
"""


def test_worker_processes_end_with_the_one_that_started_them(words, undisturbed, elsewhere):
    command = [sys.executable, "-c", SMALL_PARTS, "tokenize", *map(str, words[:-1]), "2", "-o", "out"]
    with running(command, elsewhere) as started:
        assert wait_until(lambda: any(Path("out/.parts").glob("*.ends")) or started.ended, 60)
        started.process.kill()
        started.process.wait(timeout=60)
        assert wait_until(lambda: not started.alive(), 60)
    assert run(*words, "-o", "out") == 0
    assert files(elsewhere / "out") == undisturbed
