"""Runs attention cases in a process of its own, for kernels that need one: Triton's interpreter must be chosen, and
the emulator of Hopper GPUs installed, before the kernels are imported.

A request is a line of JSON on standard input, the arguments of a function; the answer is a line with its result.
"""

import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cs336_systems.kernels import attention
from tests.helpers import ROOT, clean_env
from tests.unit.kernels.attention_cases import Case, failures, poisoned_memory
from tests.unit.kernels.packed_cases import Packed, packed_failures


def case_of(fields: dict[str, Any]) -> Any:
    """Return the Case or, with `lengths_q`, the Packed that was sent as these fields."""
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return (Packed if "lengths_q" in fields else Case)(**fields)


def run(impl: str, fields: dict[str, Any], dtype: str, deterministic: bool = False, **options: Any) -> list[str]:
    """Return what is wrong with the results of an implementation, by the comparison of the case's kind."""
    case = case_of(fields)

    def implementation(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **mask: object) -> object:
        return attention(q, k, v, impl=impl, deterministic=deterministic, return_lse=True, **mask)

    check: Any = packed_failures if isinstance(case, Packed) else failures
    try:
        with poisoned_memory():
            found: list[str] = check(implementation, case, getattr(torch, dtype), **options)
            return found
    except Exception:
        return [f"{case.name} {dtype}: {traceback.format_exc()}"]


def serve(answer: Callable[..., Any]) -> None:
    """Answer requests until the input ends."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


@contextmanager
def started(module: str, **environment: str) -> Iterator[Callable[..., Any]]:
    """Start `module`, which calls `serve`, and give a function that sends it a request."""
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        cwd=ROOT, env=clean_env(**environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    requests, answers = process.stdin, process.stdout

    def ask(**request: Any) -> Any:
        try:
            requests.write(json.dumps(request) + "\n")
            requests.flush()
            answer = answers.readline()
        except BrokenPipeError:
            answer = ""
        except BaseException:  # a time limit: the answer would be taken for that to the next request
            process.kill()
            raise
        assert answer, f"{module} ended with {process.wait()}"
        return json.loads(answer)

    try:
        yield ask
    finally:
        process.kill()
        process.wait()
