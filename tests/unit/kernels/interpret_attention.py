"""Runs Triton's attention kernels under Triton's interpreter, on the CPU, in a process of its own.

TRITON_INTERPRET must be set before triton is imported, and another test may have imported it by then. Reads one case a
line from standard input, as JSON (the arguments of `run`), and answers with a line: the JSON list of what is wrong.
"""

import json
import sys
import traceback
from typing import Any

import torch

from cs336_systems.kernels import attention
from tests.unit.kernels.attention_cases import Case, failures, poisoned_memory
from tests.unit.kernels.fast_interpreter import replace_once


def run(fields: dict[str, Any], dtype: str, deterministic: bool, **options: object) -> list[str]:
    window = fields["window"]
    case = Case(**{**fields, "window": tuple(window) if isinstance(window, list) else window})

    def implementation(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **mask: object) -> object:
        return attention(q, k, v, impl="flash_triton", deterministic=deterministic, return_lse=True, **mask)

    try:
        with poisoned_memory():
            return failures(implementation, case, getattr(torch, dtype), **options)
    except Exception:
        return [f"{case.name} {dtype}: {traceback.format_exc()}"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    replace_once()
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)
