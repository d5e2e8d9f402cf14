"""What kernels compiled to, remembered.

Cross-compiling all variants for four families of GPUs takes six minutes of a core, and gives the same as long as the
kernels' sources, the request and Triton are the same. So results are kept in tests/golden/compiled.json under a hash of
these. What is not there is compiled; and of some groups of requests one is compiled all the same, and held against what
is remembered.

    python -m tests.unit.kernels.compiled      # after a change of the kernels: compile what is new, forget what is gone
"""

import hashlib
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tests.helpers import ROOT, clean_env

FILE = ROOT / "tests" / "golden" / "compiled.json"

Compile = Callable[[list], list[dict[str, Any]]]


def results(
    requests: Sequence, sources: Sequence[str], version: str, compile_all: Compile, *, sample: bool
) -> list[dict[str, Any]]:
    """Of `compile_all`, for each request. `sources`: files that decide them."""
    keys = [_key(request, sources, version) for request in requests]
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    tried = {min(keys)} if sample else set()  # arbitrary, and another one after every change of the sources
    chosen = [i for i, key in enumerate(keys) if key not in known or key in tried]
    for i, found in zip(chosen, compile_all([requests[i] for i in chosen]) if chosen else [], strict=True):
        found = json.loads(json.dumps(found))
        assert known.setdefault(keys[i], found) == found, (
            f"{requests[i]}: {FILE} is stale: python -m tests.unit.kernels.compiled"
        )
    used.update({key: known[key] for key in keys})
    return [known[key] for key in keys]


used: dict[str, dict[str, Any]] = {}
"""All that was asked for in this process."""


def compile_apart(module: str, *arguments: str, **env: str) -> Any:
    """What a module of tests/ that cross-compiles prints last, as JSON. A process of its own: it has no real driver."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.unit.kernels.{module}", *arguments],
        cwd=ROOT,
        env=clean_env(**env),
        capture_output=True,
        encoding="utf-8",
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def _key(request: Any, sources: Sequence[str], version: str) -> str:
    found = hashlib.sha256(json.dumps([request, version]).encode())
    for name in sources:
        found.update((ROOT / name).read_bytes())
    return found.hexdigest()[:20]


def triton_version() -> str:
    return importlib.metadata.version("triton")


def main() -> None:
    from tests.unit.kernels import (  # this module too: run by name it is another one
        compiled,
        test_hopper,
        test_kernel_tables,
    )

    for family, kind in test_kernel_tables.KINDS:
        test_kernel_tables.resources(family, kind)
    test_kernel_tables.pointwise_resources()
    for group in test_hopper.REQUESTS:
        test_hopper.reports(group)
    FILE.write_text(json.dumps(dict(sorted(compiled.used.items())), indent=0) + "\n")


if __name__ == "__main__":
    main()
