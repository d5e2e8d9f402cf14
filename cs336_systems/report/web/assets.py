"""The scripts and styles of the pages, and the policy that forbids all others. A page is one file: they are inlined."""

import base64
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any


@cache
def asset(name: str) -> str:
    """Return the text of a file beside this module."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def policy(*scripts: str) -> str:
    """Return a Content-Security-Policy under which the page loads nothing and runs only these scripts, named by
    hash."""
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        f"script-src {allowed}"
    )


def embedded_json(data: Any) -> str:
    """Return JSON that is safe inside a script element: no text in it can end the element or open a comment."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
