"""Reads the items of one list in a large JSON file one by one: a trace of 200 MB takes 2 GB as values of Python."""

import codecs
import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

from cs336_systems.files import LARGEST_VALUE, LimitError, require_at_most

_SPACE = re.compile(r"[ \t\r\n]*")
_decode = json.JSONDecoder().raw_decode


def items_of(pieces: Iterator[bytes], key: str) -> Iterator[Any]:
    """Yield the items of the list under `key` of a JSON object, then read the rest of the object.

    Raise KeyError if it has no such list, ValueError if it is not JSON.
    """
    text = _Text(pieces)
    has_list = False
    if text.peek() != "{":
        with contextlib.suppress(LimitError):  # a long list, say, which is not an object either
            text.value()
        raise KeyError(key)
    for name in _members(text):
        kind = text.peek()
        if name != key:
            text.value()
        elif kind == "[":
            has_list = True
            text.skip("[")
            yield from _items(text)
        else:
            raise KeyError(key)
    if text.peek():
        raise ValueError("there is more behind its end")
    if not has_list:
        raise KeyError(key)


def _members(text: "_Text") -> Iterator[str]:
    """Yield the keys of an object; the caller reads each key's value before the next key."""
    text.skip("{")
    while text.peek() != "}":
        name = text.value()
        text.skip(":")
        yield name
        if text.peek() != "}":
            text.skip(",")
    text.skip("}")


def _items(text: "_Text") -> Iterator[Any]:
    while text.peek() != "]":
        yield text.value()
        if not text.skip_comma() and text.peek() != "]":
            text.skip(",")
    text.skip("]")


class _Text:
    """The text of a file, of which only the part being read is in memory."""

    def __init__(self, pieces: Iterator[bytes]):
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")("surrogatepass")
        self._text = ""
        self._at = 0
        self._is_whole = False

    def peek(self) -> str:
        """Return the next character that is not white space, or "" at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read():
                return ""

    def skip(self, character: str) -> None:
        if (found := self.peek()) != character:
            raise ValueError(f"{found!r} where {character!r} belongs" if found else "it ends too early")
        self._at += 1

    def skip_comma(self) -> bool:
        """Skip a comma that comes next, without looking any further: a shortcut for most items of a list."""
        if self._text.startswith(",", self._at):
            self._at += 1
            return True
        return False

    def value(self) -> Any:
        """Return the next value; more text is read as long as the value may be incomplete."""
        while True:
            try:
                found, end = _decode(self._text, self._at)
                if end < len(self._text) or self._is_whole:  # a number at the end may go on
                    self._at = end
                    return found
            except json.JSONDecodeError:
                if self._is_whole:
                    raise
            self._read(len(self._text) - self._at)

    def _read(self, least: int = 1) -> bool:
        """Read at least `least` characters, more for long values, so that these are not parsed again for every
        chunk."""
        require_at_most(len(self._text) - self._at, LARGEST_VALUE, "bytes in one value")
        parts = [self._text[self._at :]]
        self._text, self._at, size = "", 0, 0
        while size < max(least, 1) and not self._is_whole:
            piece = next(self._pieces, None)
            self._is_whole = piece is None
            parts.append(self._utf8.decode(piece or b"", final=self._is_whole))
            size += len(parts[-1])
        self._text = "".join(parts)
        return size > 0
