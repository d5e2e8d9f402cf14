"""`cs336 tokenize`: round trips of every kind of input, equality over processes, and everything that is refused."""

import gzip
import json
import os
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from cs336_systems.files import locked
from cs336_systems.train.tokens import byte_progress, inputs
from cs336_systems.train.tokens.token_store import read_store
from tests.helpers import assert_refused, execute, exit_code, files
from tests.unit.train.tokens.conftest import END, SENTENCES
from tests.unit.train.tokens.stores import documents, run, texts, write_lines

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def with_tokenizer(tokenizer_file) -> list[object]:
    return ["--tokenizer", tokenizer_file, "--workers", 1]


# -- round trips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part_bytes", [50, 700, 1 << 22])
def test_documents_of_every_kind_come_back(part_bytes, elsewhere, tokenizer_file, with_tokenizer, monkeypatch, capsys):
    """In the order of the inputs, whatever the parts are; a file of tokens is divided at its end tokens."""
    monkeypatch.setattr(inputs, "PART_BYTES", part_bytes)
    (elsewhere / "a.txt").write_text(END.join(SENTENCES[:12]) + END + "\n", encoding="utf-8")
    write_lines(elsewhere / "b.jsonl", ["", *SENTENCES[12:20], "x" * 3000])
    with gzip.open(elsewhere / "c.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"id": 1, "text": text}, ensure_ascii=False) + "\n\n" for text in SENTENCES[20:25])
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokens = [token for text in SENTENCES[25:30] for token in [*tokenizer.encode(text).ids, 0]]
    np.save("d.npy", np.array(tokens))
    np.array(tokens[:-1], "<u2").tofile("e.bin")  # the last document has no end token
    assert run("a.txt", "b.jsonl", "c.jsonl.gz", "d.npy", "-o", "out", *with_tokenizer) == 0
    expected = [*SENTENCES[:12], "", *SENTENCES[12:20], "x" * 3000, *SENTENCES[20:30]]
    assert texts(elsewhere / "out") == expected
    assert run("e.bin", "-o", "bin", *with_tokenizer) == 0
    assert documents(elsewhere / "bin") == [*documents(elsewhere / "out")[-5:-1], documents(elsewhere / "out")[-1][:-1]]
    assert sorted(path.name for path in (elsewhere / "out").iterdir()) == [
        *(".lock", "documents.bin", "store.json", "tokenizer.json", "tokens.bin")
    ]


def test_force_writes_a_damaged_folder_again(elsewhere, with_tokenizer, capsys):
    (elsewhere / "a.txt").write_text(" ".join(SENTENCES))
    assert run("a.txt", "-o", "out", *with_tokenizer) == 0
    tokens = elsewhere / "out/tokens.bin"
    right = tokens.read_bytes()
    tokens.write_bytes(bytes(len(right)))
    assert run("a.txt", "-o", "out", "--force", *with_tokenizer) == 0
    assert tokens.read_bytes() == right


def test_folders_and_patterns(elsewhere, with_tokenizer, capsys):
    """A folder is searched for known suffixes, in the order of the names; its own output is no input."""
    (elsewhere / "in/deep").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "deep/c.txt", "read.md", "notes.rst", ".hidden.txt", ".hidden.md"):
        (elsewhere / "in" / name).write_text(name)
    assert run("in", "-o", "in/out", *with_tokenizer) == 0
    assert texts(elsewhere / "in/out") == ["a.txt", "b.txt", "deep/c.txt", "read.md"]
    assert run("in", "-o", "in/out", *with_tokenizer) == 0  # also now that there is a tokens.bin
    assert "it was there" in capsys.readouterr().out
    assert run("in/*.rst", "in/**/c.*", "-o", "globbed", *with_tokenizer) == 0
    assert texts(elsewhere / "globbed") == ["notes.rst", "deep/c.txt"]


def test_the_command_that_train_names_for_a_folder_of_texts_works(elsewhere, capsys):
    """Also for a folder of Markdown, and from the refusal of `cs336 train --data` itself."""
    (elsewhere / "pages").mkdir()
    (elsewhere / "pages/a.md").write_text("# One page\n" + " ".join(SENTENCES))
    assert exit_code(["train", "--data", "pages"]) == 2
    named = capsys.readouterr().err.partition("to make one of texts: cs336 ")[2]
    assert exit_code(shlex.split(named)) == 0
    assert documents(elsewhere / "data/pages-tokens")


def test_the_summary_has_documents_and_files(elsewhere, with_tokenizer, capsys):
    """A separator inside a file makes two documents of it; without the number of files that reads as an error."""
    (elsewhere / "in").mkdir()
    (elsewhere / "in/a.txt").write_text("one")
    (elsewhere / "in/b.md").write_text(f"two {END} three")
    for _ in range(2):  # written, then found
        assert run("in", "-o", "out", *with_tokenizer) == 0
        assert "of 3 documents in 2 files, vocabulary" in capsys.readouterr().out
    assert run("in/a.txt", "-o", "one", *with_tokenizer) == 0
    assert "of 1 document in 1 file, vocabulary" in capsys.readouterr().out


@pytest.mark.parametrize("separator", ["", "\n", "\n\n", "猫", END])
def test_separators(separator, elsewhere, with_tokenizer, small_parts):
    text = "".join(SENTENCES)
    (elsewhere / "a.txt").write_text(text, encoding="utf-8")
    assert run("a.txt", "-o", "out", "--separator", separator, *with_tokenizer) == 0
    expected = text.split(separator) if separator else [text]
    assert texts(elsewhere / "out") == (expected if expected[-1].strip() else expected[:-1])


def test_a_separator_across_parts(elsewhere, with_tokenizer, monkeypatch):
    """Parts of every size: some end within the separator, some just before or after it."""
    expected = ["one", "two three", "", "four"]
    (elsewhere / "a.txt").write_text(END.join(expected))
    for size in range(1, 60, 5):
        monkeypatch.setattr(inputs, "PART_BYTES", size)
        assert run("a.txt", "-o", f"out{size}", *with_tokenizer) == 0
        assert texts(elsewhere / f"out{size}") == expected


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=12), size=st.integers(1, 100))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_documents_of_any_length(lengths, size, tmp_path_factory, tokenizer_file):
    """Also without tokens: nothing is added to documents here."""
    folder = tmp_path_factory.mktemp("lengths")
    write_lines(folder / "a.jsonl", ["x" * length for length in lengths])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "PART_BYTES", size)
        words = (folder / "a.jsonl", "-o", folder / "out", "--end_token", "none", "--tokenizer", tokenizer_file)
        code = run(*words, "--workers", 1)
    assert code == (0 if any(lengths) else 2)
    if any(lengths):
        assert [len(tokens) for tokens in documents(folder / "out")] == lengths


def test_names_of_special_tokens_in_a_document_are_text(elsewhere, with_tokenizer):
    """A document from a stranger cannot end itself, unless the user asks for that."""
    write_lines(elsewhere / "a.jsonl", [f"one{END}two"])
    assert run("a.jsonl", "-o", "text", *with_tokenizer) == 0
    assert texts(elsewhere / "text") == [f"one{END}two"]
    assert documents(elsewhere / "text")[0].count(0) == 1
    assert run("a.jsonl", "-o", "parsed", "--parse_special_tokens", *with_tokenizer) == 0
    assert documents(elsewhere / "parsed")[0].count(0) == 2


def test_a_tokenizer_that_truncates_and_adds_tokens_does_neither(elsewhere, tokenizer_file):
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    (elsewhere / "model").mkdir()
    tokenizer.save("model/tokenizer.json")
    write_lines(elsewhere / "a.jsonl", SENTENCES[:2])
    assert run("a.jsonl", "-o", "out", "--tokenizer", "model", "--workers", 1) == 0
    assert texts(elsewhere / "out") == SENTENCES[:2]


def test_a_large_vocabulary_has_wider_tokens(elsewhere, tokenizer_file):
    content = json.loads(tokenizer_file.read_text())
    content["model"]["vocab"]["far"] = 70_000
    Path("large.json").write_text(json.dumps(content))
    write_lines(elsewhere / "a.jsonl", SENTENCES[:2])
    assert run("a.jsonl", "-o", "out", "--tokenizer", "large.json", "--workers", 1) == 0
    store = read_store(elsewhere / "out")
    assert (store.dtype, store.vocab_size) == ("uint32", 70_001)
    assert texts(elsewhere / "out") == SENTENCES[:2]


def test_several_processes_and_a_trained_tokenizer_change_no_bit(elsewhere, small_parts, capsys):
    (elsewhere / "a.txt").write_text(END.join(SENTENCES), encoding="utf-8")
    write_lines(elsewhere / "b.jsonl", [*SENTENCES, f"a{END}b"])
    for workers in (1, 2):
        words = ("a.txt", "b.jsonl", "-o", f"out{workers}", "--train_tokenizer", 280, "--workers", workers)
        assert run(*words) == 0
    assert files(elsewhere / "out1") == files(elsewhere / "out2")
    assert texts(elsewhere / "out1") == [*SENTENCES * 2, f"a{END}b"]
    assert read_store(elsewhere / "out1").vocab_size == 280


def test_a_text_with_too_few_pairs_gives_a_smaller_vocabulary_and_says_so(elsewhere, capsys):
    (elsewhere / "a.txt").write_text("ab ab ab")
    assert run("a.txt", "-o", "out", "--train_tokenizer", 400) == 0
    size = read_store(elsewhere / "out").vocab_size
    assert size < 400
    printed = capsys.readouterr().out
    assert f"vocabulary {size} " in printed
    assert "(400 were asked for" in printed


def test_a_store_without_its_tokenizer_is_not_whole(elsewhere, with_tokenizer, capfd):
    (elsewhere / "a.txt").write_text("one")
    assert run("a.txt", "-o", "out", *with_tokenizer) == 0
    (elsewhere / "out/tokenizer.json").unlink()
    capfd.readouterr()
    words = ["tokenize", "a.txt", "-o", "out", *map(str, with_tokenizer)]
    assert_refused(words, ["'out/tokenizer.json' is missing", "--force"], capfd)
    assert run("a.txt", "-o", "out", "--force", *with_tokenizer) == 0
    assert (elsewhere / "out/tokenizer.json").exists()


def test_the_store_of_the_same_inputs_is_kept_and_of_others_is_not_replaced(elsewhere, with_tokenizer, capfd):
    (elsewhere / "a.txt").write_text("one")
    assert run("a.txt", "-o", "out", *with_tokenizer) == 0
    before = (elsewhere / "out/store.json").stat().st_mtime_ns
    assert run("a.txt", "-o", "out", *with_tokenizer) == 0
    assert (elsewhere / "out/store.json").stat().st_mtime_ns == before
    capfd.readouterr()
    words = ["tokenize", "a.txt", "-o", "out", "--separator", "n", *map(str, with_tokenizer)]
    assert_refused(words, ["'out'", "--force"], capfd)
    words = ["tokenize", "a.txt", "-o", "out", "--train_tokenizer", "257"]
    assert_refused(words, ["'out'", "--force"], capfd)
    assert run("a.txt", "-o", "out", "--separator", "n", "--force", *with_tokenizer) == 0
    assert texts(elsewhere / "out") == ["o", "e"]


def test_progress_in_lines(elsewhere, with_tokenizer, small_parts, monkeypatch, capsys):
    monkeypatch.setattr(byte_progress, "LINE_EVERY", 0.0)
    (elsewhere / "a.txt").write_text("".join(SENTENCES), encoding="utf-8")
    assert run("a.txt", "-o", "out", *with_tokenizer) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tokenizing: ")]
    assert len(lines) > 3
    assert "tokens/s" in lines[0]
    assert lines[-1].endswith(", 0 s left")


# -- mistakes and damaged files ---------------------------------------------------------------------------------------

GOOD = json.dumps({"text": "a good line"}).encode() + b"\n"
DAMAGED = {
    "cut.jsonl": (GOOD * 4 + b'{"text": "a', ["line 5: it is not JSON: Unterminated string starting at character 10"]),
    "list.jsonl": (GOOD + b"[1]\n", ["line 2", "[1]"]),
    "field.jsonl": (GOOD + b'{"texts": "a"}\n', ["line 2", "'text'", "did you mean 'texts'?", "--text_field"]),
    "empty_object.jsonl": (b"{}\n", ["line 1", "'text'"]),
    "number.jsonl": (b"\n\n" + b'{"text": 3}\n', ["line 3", "'text'", "3"]),
    "latin.jsonl": (b'{"text": "d\xe9j\xe0"}\n', ["line 1", "UTF-8"]),
    "surrogate.jsonl": (GOOD + b'{"text": "ab\\ud800"}\n', ["line 2", "character 3", "surrogate"]),
    "deep.jsonl": (GOOD + b"[" * 100_000 + b"\n", ["line 2"]),
    "digits.jsonl": (b'{"text": ' + b"1" * 10_000 + b"}\n", ["line 1"]),
    "latin.txt": (b"one\ntwo\nd\xe9j\xe0\n", ["line 3", "UTF-8"]),
    "plain.jsonl.gz": (GOOD, ["gzip"]),
    "cut.jsonl.gz": (gzip.compress(GOOD * 100)[:-9], ["gzip", "cut off"]),
    "line.jsonl.gz": (gzip.compress(GOOD * 100 + b"{"), ["line 101"]),
    "odd.bin": (b"abc", ["multiple of 2"]),
    "high.bin": (np.array([1, 2, 300], "<u2").tobytes(), ["token 3", "300"]),
    "text.npy": (b"no array at all", ["holds no tokens"]),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_input_is_one_line_and_nothing_is_written(name, elsewhere, with_tokenizer, capfd):
    content, named = DAMAGED[name]
    (elsewhere / name).write_bytes(content)
    assert_refused(["tokenize", name, "-o", "new/out", *map(str, with_tokenizer)], [f"'{name}'", *named], capfd)
    assert [path.name for path in elsewhere.iterdir()] == [name]


@pytest.mark.parametrize("name", ["latin.jsonl", "number.jsonl", "plain.jsonl.gz", "blank.txt"])
def test_inputs_are_checked_before_a_tokenizer_is_trained(name, elsewhere, capfd):
    """The first line that is printed is the error; a second file has the damage."""
    content, named = {**DAMAGED, "blank.txt": (b" \n", ["no tokens: 1 file, 2 bytes"])}[name]
    others = [] if name == "blank.txt" else ["a.txt"]
    (elsewhere / "a.txt").write_text("one text")
    (elsewhere / name).write_bytes(content)
    assert_refused(["tokenize", *others, name, "-o", "new/out", "--train_tokenizer", "300"], named, capfd)
    assert not (elsewhere / "new").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_the_line_of_an_error_in_a_later_part(workers, elsewhere, tokenizer_file, small_parts, capfd):
    """The first of two damaged lines, whoever finds the second first; finished parts are kept for the next run."""
    write_lines(elsewhere / "a.jsonl", SENTENCES)
    lines = (elsewhere / "a.jsonl").read_bytes().splitlines(keepends=True)
    (elsewhere / "a.jsonl").write_bytes(b"".join([*lines[:30], b"{]\n", *lines[30:36], b"[]\n", *lines[36:]]))
    words = ("a.jsonl", "-o", "out", "--tokenizer", tokenizer_file, "--workers", workers)
    assert run(*words) == 2
    assert "'a.jsonl' line 31: it is not JSON" in capfd.readouterr().err
    assert [path.name for path in (elsewhere / "out").iterdir() if path.suffix] == []
    assert len(list((elsewhere / "out/.parts").glob("*.json"))) >= 3


def test_a_line_beyond_the_limit(elsewhere, with_tokenizer, capfd, monkeypatch):
    monkeypatch.setenv("CS336_READ_LIMIT", "1e-5")
    write_lines(elsewhere / "a.jsonl", ["x" * 200])
    words = ["tokenize", "a.jsonl", "-o", "out", "--separator", "", *map(str, with_tokenizer)]
    monkeypatch.setattr("cs336_systems.train.tokens.tokenizing.read_tokenizer", lambda path: path.read_bytes())
    assert_refused(words, ["line 1", "167 bytes", "CS336_READ_LIMIT"], capfd)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("-o out --tokenizer TOKENIZER", ["name files"]),
        ("a.txt --tokenizer TOKENIZER", ["--output"]),
        ("a.txt -o out", ["--tokenizer", "--train_tokenizer"]),
        ("a.txt -o out --tokenizer TOKENIZER --train_tokenizer 300", ["exclude each other"]),
        ("a.txt -o out --train_tokenizer 12", ["--train_tokenizer", "12"]),
        ("a.txt -o out --tokenizer TOKENIZER --workers 0", ["--workers", "0"]),
        ("a.txt -o out --tokenizer missing.json", ["'missing.json'"]),
        ("a.txt -o out --tokenizer a.txt", ["'a.txt' is not a tokenizer.json"]),
        ("a.txt -o out --tokenizer TOKENIZER --end_token <eot>", ["'<eot>'", "--end_token"]),
        ("a.txt a.txt -o out --tokenizer TOKENIZER", ["'a.txt'", "twice"]),
        ("missing -o out --tokenizer TOKENIZER", ["'missing'"]),
        ("*.none -o out --tokenizer TOKENIZER", ["'*.none'"]),
        ("empty -o out --tokenizer TOKENIZER", ["no files to tokenize in empty", ".jsonl.gz"]),
        ("pipe -o out --tokenizer TOKENIZER", ["'pipe'", "a pipe"]),
        ("a.txt -o a.txt --tokenizer TOKENIZER", ["'a.txt'"]),
        ("a.txt -o a.txt/out --tokenizer TOKENIZER", ["'a.txt/out'"]),
        ("a.txt -o taken --tokenizer TOKENIZER", ["'taken/tokens.bin'", "--force"]),
        ("blank.txt -o out --tokenizer TOKENIZER", ["no tokens"]),
        ("nothing.txt -o out --tokenizer TOKENIZER", ["no tokens"]),
        ("nothing.txt -o out --train_tokenizer 300", ["no tokens"]),
        ("taken/tokens.bin -o out --train_tokenizer 300", ["--train_tokenizer", "tokens"]),
    ],
)
def test_mistakes(words, named, elsewhere, tokenizer_file, capfd):
    (elsewhere / "a.txt").write_text("one")
    (elsewhere / "blank.txt").write_text(" \n")
    (elsewhere / "nothing.txt").write_text("")
    (elsewhere / "empty").mkdir()
    (elsewhere / "taken").mkdir()
    (elsewhere / "taken/tokens.bin").write_bytes(b"mine")
    os.mkfifo("pipe")
    assert_refused(["tokenize", *words.replace("TOKENIZER", str(tokenizer_file)).split()], named, capfd)


def test_a_second_command_leaves_the_folder_of_the_first_alone(elsewhere, with_tokenizer, capfd):
    (elsewhere / "a.txt").write_text("one")
    (elsewhere / "out/.parts").mkdir(parents=True)
    with locked(elsewhere / "out/.lock"):
        words = ["tokenize", "a.txt", "-o", "out", *map(str, with_tokenizer)]
        assert_refused(words, ["another cs336 tokenize", "'out'"], capfd)
        assert (elsewhere / "out/.parts").is_dir()
    assert run("a.txt", "-o", "out", *with_tokenizer) == 0


def test_without_the_library(elsewhere, tokenizer_file, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (elsewhere / "a.txt").write_text("one")
    words = ["tokenize", "a.txt", "-o", "out", "--tokenizer", str(tokenizer_file)]
    assert_refused(words, ["pip install 'tokenizers"], capfd)


def test_an_input_that_changes_while_it_is_read(elsewhere, with_tokenizer, small_parts, capfd, monkeypatch):
    (elsewhere / "a.txt").write_text("".join(SENTENCES), encoding="utf-8")
    add = byte_progress.ByteProgress.add

    def touching(self, *counts):
        add(self, *counts)
        os.utime("a.txt", ns=(0, 1))

    monkeypatch.setattr(byte_progress.ByteProgress, "add", touching)
    assert run("a.txt", "-o", "out", *with_tokenizer) == 2
    assert "'a.txt' was changed" in capfd.readouterr().err
    assert not (elsewhere / "out/store.json").exists()


# -- memory -----------------------------------------------------------------------------------------------------------

PEAK = """
import sys
from cs336_systems.cli import main
assert main(sys.argv[1:]) == 0
print(next(int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def test_memory_does_not_grow_with_the_input(elsewhere, tokenizer_file):
    """A compressed file of 60 MB, a text of 30 MB on one line, and 70 MB of tokens of ten million
    documents, beside a file of one word.

    The tokenizer drops the letter x: what is measured is reading, cutting and writing, not the speed of BPE.
    """
    content = json.loads(tokenizer_file.read_text())
    drop = {"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Removed", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [drop, content["pre_tokenizer"]]}
    Path("drops.json").write_text(json.dumps(content))
    Path("small.txt").write_text("one")
    line = json.dumps({"text": "one", "other": "y" * (1 << 20)}).encode() + b"\n"
    with gzip.open("lines.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(60):
            file.write(line)
    Path("text.txt").write_bytes(b"x" * 30_000_000 + b" one")
    tokens = np.full(35_000_000, 7, "<u2")
    tokens[:10_000_000] = 0  # ends of documents
    tokens.tofile("tokens.bin")
    peaks = []
    for name in ("small.txt", "lines.jsonl.gz", "text.txt", "tokens.bin"):
        words = ("tokenize", name, "-o", f"out-{name}", "--tokenizer", "drops.json", "--workers", "1")
        done = execute(sys.executable, "-c", PEAK, *words, cwd=elsewhere)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.splitlines()[-1]))
    assert max(peaks) - peaks[0] < 60, peaks
