"""Makes a store of tokens: finds the inputs, tokenizes the parts that are not finished yet, assembles the store."""

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cs336_systems.commands import interrupt_raises
from cs336_systems.config import UserError
from cs336_systems.files import locked, made_folder, write_failure, write_file
from cs336_systems.text import counted
from cs336_systems.train.tokens.assembly import assemble
from cs336_systems.train.tokens.byte_progress import ByteProgress
from cs336_systems.train.tokens.documents import Reading, texts
from cs336_systems.train.tokens.inputs import TOKENS, Input, Part, Span, divide, find_inputs
from cs336_systems.train.tokens.part_workers import Recipe, write_parts
from cs336_systems.train.tokens.parts import Counts, PartFiles, remove_leftovers
from cs336_systems.train.tokens.token_store import (
    DOCUMENTS_FILE,
    HEADER,
    TOKENIZER_FILE,
    TOKENS_FILE,
    UNFINISHED,
    TokenStore,
    is_store,
    read_store,
    require_size,
)
from cs336_systems.train.tokens.tokenize_command import TokenizeArguments
from cs336_systems.train.tokens.vocabulary import read_tokenizer, train_tokenizer

LOCK = ".lock"
"""Name of the lock file that a store's writer holds in its folder."""
CHECKED_BYTES = 1 << 16
"""Bytes at the beginning of each input that are read before a tokenizer is trained."""
TRAINED_ON = 1 << 30
"""Maximum bytes of text on which a tokenizer is trained; longer inputs are sampled in evenly spaced parts."""


def tokenize(arguments: TokenizeArguments) -> int:
    """Write the store, or its missing parts; return the exit code."""
    try:
        with interrupt_raises():
            print(_tokenize(arguments))
    except KeyboardInterrupt:
        done = "the finished parts are kept, and the same command continues"
        print(f"cs336 tokenize: stopped; {done}", file=sys.stderr)
        return 130
    return 0


def _tokenize(arguments: TokenizeArguments) -> str:
    """Write the store; return a line that says what was written."""
    folder, reading = Path(arguments.output), Reading(arguments.text_field, arguments.separator)
    inputs = find_inputs(arguments.inputs, folder)
    parts = divide(inputs)
    if not parts:
        raise _no_tokens(inputs)
    given = None if arguments.tokenizer is None else read_tokenizer(Path(arguments.tokenizer))
    if given is not None:
        _ = _recipe(arguments, reading, given).vocabulary  # reports its mistakes before a folder is made
    elif all(one.kind == TOKENS for one in inputs):
        raise UserError("--train_tokenizer needs text, and all inputs are tokens; give their --tokenizer")
    with _exclusive(folder):
        _require_ours(folder, arguments.force)
        trained_from = "" if given is not None else _training_key(arguments, inputs)
        used = given or _trained(arguments, folder, inputs, parts, reading, trained_from)
        recipe = _recipe(arguments, reading, used)
        files = [PartFiles(folder / UNFINISHED, part.key(recipe.text)) for part in parts]
        work = hashlib.sha256(json.dumps([recipe.text, inputs]).encode()).hexdigest()
        if not arguments.force and (store := _present(folder, arguments.force)) and store.work == work:
            shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
            return f"{_described(folder, store, len(inputs))}; it was there"
        _require_replaceable(folder, arguments.force)
        remove_leftovers(folder / UNFINISHED, {trained_from, *(one.key for one in files)})
        done = _written(recipe, list(zip(parts, files, strict=True)), arguments.workers)
        if not any(counts.tokens for _, counts in done):
            shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
            raise _no_tokens(inputs)
        settings = {
            "text_field": arguments.text_field,
            "separator": arguments.separator,
            "parse_special_tokens": arguments.parse_special_tokens,
            "trained_from": trained_from,
        }
        store = assemble(folder, done, recipe.vocabulary, inputs=inputs, settings=settings, work=work)
        shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
    fewer = ""
    if arguments.train_tokenizer is not None and store.vocab_size < arguments.train_tokenizer:
        fewer = f" ({arguments.train_tokenizer:,} were asked for; the text has no more pairs to merge)"
    command = f"cs336 train --data {shlex.quote(str(folder))}"
    return f"{_described(folder, store, len(inputs))}{fewer}; train on it with: {command}"


def _no_tokens(inputs: Sequence[Input]) -> UserError:
    size = f"{counted(len(inputs), 'file')}, {counted(sum(one.size for one in inputs), 'byte')}"
    return UserError(f"the inputs hold no tokens: {size}")


def _recipe(arguments: TokenizeArguments, reading: Reading, tokenizer: bytes) -> Recipe:
    name = arguments.tokenizer or TOKENIZER_FILE
    return Recipe(tokenizer, name, arguments.end_token, arguments.parse_special_tokens, reading)


def _described(folder: Path, store: TokenStore, files: int) -> str:
    documents = f"{counted(store.documents, 'document')} in {counted(files, 'file')}"
    size = f"{counted(store.tokens, 'token')} of {documents}"
    return f"{folder}: {size}, vocabulary {store.vocab_size:,} ({store.dtype})"


# -- the folder -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Lock the folder of a store, which is made; what was created is removed again if nothing was written to it."""
    had_lock = (folder / LOCK).exists()
    try:
        with made_folder(folder), locked(folder / LOCK):
            (folder / UNFINISHED).mkdir(exist_ok=True)
            try:
                yield
            finally:
                _remove_unused(folder, lock=not had_lock)
    except BlockingIOError:
        raise UserError(f"another cs336 tokenize is writing to {str(folder)!r}; choose another --output") from None
    except OSError as error:
        raise write_failure(error, folder) from None


def _remove_unused(folder: Path, *, lock: bool) -> None:
    """Remove the folder of parts if it is empty, and then the lock that was created for it."""
    with contextlib.suppress(OSError):
        (folder / UNFINISHED).rmdir()
    if is_store(folder) or (folder / UNFINISHED).exists():
        return
    if lock:
        with contextlib.suppress(OSError):
            (folder / LOCK).unlink()


def _require_ours(folder: Path, force: bool) -> None:
    """Raise UserError for a folder with files of these names that no run of this command has written."""
    if force or is_store(folder) or any((folder / UNFINISHED).iterdir()):
        return
    for name in (TOKENS_FILE, DOCUMENTS_FILE, TOKENIZER_FILE):
        if os.path.lexists(folder / name):
            raise UserError(f"{str(folder / name)!r} exists, and the folder has no {HEADER}; --force overwrites it")


def _present(folder: Path, force: bool) -> TokenStore | None:
    """Return the store in the folder; a damaged one counts as absent if it may be replaced."""
    if not is_store(folder):
        return None
    try:
        store = read_store(folder)
        require_size(folder / TOKENIZER_FILE)
        return store
    except UserError:
        if not force:
            raise
        return None


def _require_replaceable(folder: Path, force: bool) -> None:
    """Raise UserError for a folder with a store of other inputs or settings."""
    if is_store(folder) and not force:
        raise UserError(
            f"{str(folder)!r} has the tokens of other inputs or settings; --force replaces them, or choose another "
            "--output"
        )


# -- the work ---------------------------------------------------------------------------------------------------------


def _written(recipe: Recipe, work: list[tuple[Part, PartFiles]], workers: int | None) -> list[tuple[PartFiles, Counts]]:
    """Tokenize the missing parts; return all parts with their counts."""
    counts: dict[str, Counts | None] = {}
    with ByteProgress(sum(part.size for part, _ in work)) as progress:
        for part, files in work:
            counts[files.key] = found = files.found()
            if found is not None:
                progress.skip(part.size)
        missing = [(part, files) for part, files in work if counts[files.key] is None]
        sizes = {files.key: part.size for part, files in missing}
        processes = min(workers or len(os.sched_getaffinity(0)), max(len(missing), 1))
        for files, found in write_parts(recipe, missing, processes):
            counts[files.key] = found
            progress.add(sizes[files.key], found.tokens)
    return [(files, found) for _, files in work if (found := counts[files.key]) is not None]


def _training_key(arguments: TokenizeArguments, inputs: Sequence[Input]) -> str:
    """Return a name for the tokenizer that is trained on these inputs."""
    made_from = [inputs, arguments.train_tokenizer, arguments.text_field, arguments.separator]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:32]


def _trained(
    arguments: TokenizeArguments,
    folder: Path,
    inputs: Sequence[Input],
    parts: Sequence[Part],
    reading: Reading,
    trained_from: str,
) -> bytes:
    """Return the tokenizer.json that was trained before, or that is trained now."""
    before = folder / UNFINISHED / f"{trained_from}.tokenizer"
    if before.exists():
        return read_tokenizer(before)
    if (store := _present(folder, arguments.force)) and store.settings.get("trained_from") == trained_from:
        return read_tokenizer(folder / TOKENIZER_FILE)
    _require_replaceable(folder, arguments.force)
    _require_text(inputs, parts, reading)
    print(f"training a tokenizer of {arguments.train_tokenizer:,} tokens", file=sys.stderr, flush=True)
    trained = train_tokenizer(_training_texts(parts, reading), arguments.train_tokenizer or 0)
    write_file(before, trained)
    return trained


def _require_text(inputs: Sequence[Input], parts: Sequence[Part], reading: Reading) -> None:
    """Raise UserError if the beginning of an input cannot be read, or if no input has text."""
    for one in inputs:
        if one.kind != TOKENS:
            next(texts(Span(one, 0, min(one.size, CHECKED_BYTES)), reading), None)
    if next(_training_texts(parts, reading), None) is None:
        raise _no_tokens(inputs)


def _training_texts(parts: Sequence[Part], reading: Reading) -> Iterator[str]:
    every = max(1, -(-sum(part.size for part in parts) // TRAINED_ON))
    left = TRAINED_ON
    for span in (span for part in parts[::every] for span in part.spans if span.input.kind != TOKENS):
        for piece in texts(span, reading):
            yield piece.text
            left -= len(piece.text)
            if left <= 0:  # a compressed file has more than its size
                return
