"""Reads documents from a span of an input file, in pieces of text or of tokens. Memory is bounded for any file.

A document may be longer than a span and begins where the one before it ended. Whatever is damaged is a UserError with
the file and the number of the line.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np

from cs336_systems.config import UserError, nearest
from cs336_systems.files import (
    LARGEST_VALUE,
    RAISED_BY,
    json_problem,
    limit,
    open_regular,
    read_failure,
    reason_of,
    shown,
)
from cs336_systems.train.token_file import TokenFile, state_of
from cs336_systems.train.tokens.inputs import LINES, PACKED_LINES, Input, Span
from cs336_systems.train.tokens.text_cuts import MARGIN, SEARCHED, find_cut, pieces

PIECE_BYTES = 1 << 18
"""Bytes of the longest text that is tokenized in one call; longer documents are cut."""
TOKENS_AT_ONCE = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Piece(NamedTuple):
    """A piece of a document's text; `is_last` if the document ends with it."""

    text: str
    is_last: bool


class Reading(NamedTuple):
    """How documents are read from text: the field of JSON lines, and the separator in text files."""

    text_field: str
    separator: str


def texts(span: Span, reading: Reading) -> Iterator[Piece]:
    """Yield the text of a span of a text file, or of a file of JSON lines."""
    path = Path(span.input.path)
    try:
        with open(open_regular(path, follow_links=True), "rb") as file:
            span.input.require_unchanged(state_of(file.fileno()))
            if span.input.kind == PACKED_LINES:
                with gzip.open(file) as unpacked:
                    yield from _of_lines(cast(IO[bytes], unpacked), span, reading.text_field)
            elif span.input.kind == LINES:
                yield from _of_lines(file, span, reading.text_field)
            else:
                yield from _of_text(file, span, reading.separator.encode())
            span.input.require_unchanged(state_of(file.fileno()))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{str(path)!r} is no gzip file, or is cut off: {reason_of(error)}") from None
    except OSError as error:
        raise read_failure(error, path) from None


# -- JSON lines -------------------------------------------------------------------------------------------------------


def _of_lines(file: IO[bytes], span: Span, field: str) -> Iterator[Piece]:
    """Yield the documents of the lines that begin in a span; blank lines are skipped."""
    is_whole = span.input.kind == PACKED_LINES
    place = 0 if is_whole else _first_line(file, span.begin)
    number = 0
    while is_whole or place < span.end:
        line = file.readline(limit(LARGEST_VALUE) + 1)
        number += 1
        if not line:
            return
        if not line.isspace():
            try:
                document = _field_of(line.removeprefix(_BYTE_ORDER_MARK) if place == 0 else line, field)
            except ValueError as error:
                line_number = number if is_whole else _line_number(file, place)
                raise UserError(f"{span.input.path!r} line {line_number}: {error}") from None
            *before, last = pieces(document, PIECE_BYTES)
            yield from (Piece(piece.decode(), False) for piece in before)
            yield Piece(last.decode(), True)
        place += len(line)


def _first_line(file: IO[bytes], begin: int) -> int:
    """Seek to the first line that begins at `begin` or later, and return its position."""
    if begin == 0:
        return 0
    file.seek(begin - 1)
    while part := file.readline(1 << 20):
        if part.endswith(b"\n"):
            break
    return file.tell()


def _field_of(line: bytes, field: str) -> bytes:
    """Return the text of a JSON line as UTF-8; raise ValueError for anything else."""
    if len(line) > limit(LARGEST_VALUE):
        raise ValueError(f"it has more than {limit(LARGEST_VALUE):,} bytes; {RAISED_BY}=4 raises the limit fourfold")
    try:
        value: Any = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is no UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {json_problem(error)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is no JSON object, but {shown(value)}")
    if field not in value:
        there = f"it has {shown(list(value))}{nearest(field, value)}" if value else "it is empty"
        raise ValueError(f"it has no field {field!r}; {there}; --text_field names another one")
    if not isinstance(value[field], str):
        raise ValueError(f"its field {field!r} is no text, but {shown(value[field])}")
    try:
        return value[field].encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start + 1} of its field {field!r} is half of a surrogate pair") from None


def _line_number(file: IO[bytes], place: int) -> int:
    """Return the number of the line that contains a position."""
    file.seek(0)
    number, left = 1, place
    while left and (part := file.read(min(left, 1 << 20))):
        number += part.count(b"\n")
        left -= len(part)
    return number


# -- text -------------------------------------------------------------------------------------------------------------


def _of_text(file: IO[bytes], span: Span, separator: bytes) -> Iterator[Piece]:
    """Yield the text of a span, cut at separators. Blank text after the last separator is no document."""
    begin, end = (_cut_near(file, span.input, place, separator) for place in (span.begin, span.end))
    if begin >= end:
        return
    reach = min(begin, len(separator))
    file.seek(begin - reach)
    data = file.read(end - begin + reach)
    is_begun = begin > 0 and not (separator and data[:reach] == separator)
    parts = data[reach:].split(separator) if separator else [data[reach:]]
    place = begin
    for number, part in enumerate(parts):
        is_last = number < len(parts) - 1 or end == span.input.size
        begins_here = number > 0 or not is_begun
        if number == len(parts) - 1 and is_last and begins_here and not part.strip():
            return
        yield from _decoded(file, span.input, part, place, is_last)
        place += len(part) + len(separator)


def _decoded(file: IO[bytes], found: Input, text: bytes, place: int, is_last: bool) -> Iterator[Piece]:
    if place == 0:
        text = text.removeprefix(_BYTE_ORDER_MARK)
    every = pieces(text, PIECE_BYTES)
    for number, piece in enumerate(every):
        try:
            yield Piece(piece.decode(), is_last and number == len(every) - 1)
        except UnicodeDecodeError as error:
            line = _line_number(file, place + sum(map(len, every[:number])) + error.start)
            raise UserError(f"{found.path!r} line {line}: it is no UTF-8 text; convert it, or leave it out") from None


def _cut_near(file: IO[bytes], found: Input, place: int, separator: bytes) -> int:
    """Return the actual start of the span whose nominal first byte this is."""
    if place in (0, found.size):
        return place
    margin = len(separator) + MARGIN
    begin = max(place - margin, 0)
    file.seek(begin)
    return begin + find_cut(file.read(place - begin + SEARCHED + margin), place - begin, separator)


# -- tokens -----------------------------------------------------------------------------------------------------------


def tokens(span: Span, vocab_size: int) -> Iterator[np.ndarray]:
    """Yield the tokens of a span of a token file; raise UserError for one that is not in the vocabulary."""
    path = Path(span.input.path)
    file = TokenFile(path, flag="")
    span.input.require_unchanged(file.state)
    first, last = (_token_at(file, place, span.input.size) for place in (span.begin, span.end))
    for start in range(first, last, TOKENS_AT_ONCE):
        found = file.read(start, min(TOKENS_AT_ONCE, last - start))
        wrong = np.flatnonzero((found < 0) | (found >= vocab_size))
        if len(wrong):
            token = int(found[wrong[0]])
            raise UserError(
                f"{str(path)!r} token {start + int(wrong[0]) + 1}: {token} is not in the tokenizer's vocabulary of "
                f"{vocab_size:,}"
            )
        yield found


def _token_at(file: TokenFile, place: int, size: int) -> int:
    """Return the index of the token at a share of the file, such that spans have consecutive tokens."""
    return file.count * place // size


def is_at_end(span: Span) -> bool:
    """Return True if a span is the last of its file."""
    return span.end == span.input.size
