"""Writes nested dicts and lists as YAML: block style, texts of several lines as literal blocks."""

import json
import re
from collections.abc import Iterator
from typing import Any

PLAIN = re.compile(r"[A-Za-z/][\w./-]*")
"""Texts that YAML reads unchanged, unless they are YAML keywords."""
RESERVED = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def dump(value: dict[str, Any]) -> str:
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> Iterator[str]:
    """Yield the lines of a dict or a list that is not empty."""
    for key, item in value.items() if isinstance(value, dict) else ((None, item) for item in value):
        head = "-" if key is None else f"{_scalar(key)}:"
        if isinstance(item, dict | list) and item:
            lines = [f"  {line}" if line else "" for line in _lines(item)]
            if key is None:  # the first entry stands behind the dash
                yield f"- {lines[0][2:]}"
                yield from lines[1:]
            else:
                yield head
                yield from lines
        elif isinstance(item, str) and "\n" in item:
            yield f"{head} |"
            yield from (f"  {line}" if line else "" for line in item.rstrip("\n").split("\n"))
        else:
            yield f"{head} {_scalar(item)}"


def _scalar(value: Any) -> str:
    if isinstance(value, str) and PLAIN.fullmatch(value) and value.lower() not in RESERVED:
        return value
    return json.dumps(value)
