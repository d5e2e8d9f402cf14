"""Runs Triton's attention kernels under Triton's interpreter, on the CPU: a process for attention_worker.py."""

from typing import Any
from unittest import mock

import triton.language as tl

from cs336_systems.kernels import Packing
from cs336_systems.kernels.flash import packing_triton
from cs336_systems.kernels.flash.packing import FIELDS, Blocks
from tests.unit.kernels.attention_worker import case_of, run, serve
from tests.unit.kernels.fast_interpreter import speed_up


def table(fields: dict[str, Any], blocks: list[Any], bottom_right: bool, at_once: int | None) -> list[list[int]]:
    """The lines of the table of a packing's blocks. `at_once`: documents that a program looks at together."""
    case = case_of(fields)
    packing = Packing(*case.offsets().values())
    number = packing_triton.AT_ONCE if at_once is None else tl.constexpr(at_once)
    with mock.patch.object(packing_triton, "AT_ONCE", number):
        found = packing.table(Blocks(*blocks), case.tokens_q, case.tokens_k, bottom_right)
    return found.view(-1, FIELDS).tolist()


def answer(**request: Any) -> Any:
    return table(**request) if "blocks" in request else run("flash_triton", **request)


if __name__ == "__main__":
    speed_up()
    serve(answer)
