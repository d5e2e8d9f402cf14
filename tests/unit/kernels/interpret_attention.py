"""Runs Triton's attention kernels under Triton's interpreter, on the CPU, in a process of its own.

TRITON_INTERPRET must be set before triton is imported, and another test may have imported it by then. Reads one case a
line from standard input, as JSON (the arguments of `run`), and answers with a line: the JSON list of what is wrong.
"""

import json
import sys
import traceback
from typing import Any
from unittest import mock

import torch
import triton.language as tl

from cs336_systems.kernels import Packing, attention
from cs336_systems.kernels.flash import packing_triton
from cs336_systems.kernels.flash.packing import FIELDS, Blocks
from tests.unit.kernels.attention_cases import Case, failures, poisoned_memory
from tests.unit.kernels.fast_interpreter import speed_up
from tests.unit.kernels.packed_cases import Packed, packed_failures


def run(fields: dict[str, Any], dtype: str, deterministic: bool, **options: object) -> list[str]:
    """`fields`: those of a Case or, with `lengths_q`, of a Packed."""
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    is_packed = "lengths_q" in fields
    case: Any = (Packed if is_packed else Case)(**fields)

    def implementation(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **mask: object) -> object:
        return attention(q, k, v, impl="flash_triton", deterministic=deterministic, return_lse=True, **mask)

    try:
        with poisoned_memory():
            check = packed_failures if is_packed else failures
            return check(implementation, case, getattr(torch, dtype), **options)  # type: ignore[operator]
    except Exception:
        return [f"{case.name} {dtype}: {traceback.format_exc()}"]


def table(fields: dict[str, Any], blocks: list[Any], bottom_right: bool, at_once: int | None) -> list[list[int]]:
    """The lines of the table of a packing's blocks. `at_once`: documents that a program looks at together."""
    case = Packed(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
    packing = Packing(*case.offsets().values())
    number = packing_triton.AT_ONCE if at_once is None else tl.constexpr(at_once)
    with mock.patch.object(packing_triton, "AT_ONCE", number):
        return packing.table(Blocks(*blocks), case.tokens_q, case.tokens_k, bottom_right).view(-1, FIELDS).tolist()


if __name__ == "__main__":
    torch.set_num_threads(1)
    speed_up()
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(table(**request) if "blocks" in request else run(**request)), flush=True)
