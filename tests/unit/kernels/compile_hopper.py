"""Cross-compiles the kernels for Hopper GPUs where there is none, and says what sass.py reads in the code.

    python -m tests.unit.kernels.compile_hopper '[["forward", 64, "bfloat16", 4096, 4096, 0, 1], ...]'

A request is "forward" or "backward", head dim, dtype, queries, keys, the mask's upper bound (null: none), query heads
for each KV head. Prints, as JSON, Triton's version and a report for each.
"""

import json
import sys
from dataclasses import asdict
from typing import Any

import torch
import triton

from cs336_systems.kernels.flash import hopper_launch
from cs336_systems.kernels.flash.band import Band
from tests.unit.kernels import sass
from tests.unit.kernels.compile_kernels import AbsentGPU


def compile_one(kernel: str, d: int, dtype: str, len_q: int, len_k: int, hi: int | None, group: int) -> Any:
    """With tensors of the "meta" device: they have shapes and strides, and no memory."""
    q = torch.empty(2, 2 * group, len_q, d, dtype=getattr(torch, dtype), device="meta")
    k = torch.empty(2, 2, len_k, d, dtype=q.dtype, device="meta")
    problem = hopper_launch.Problem(q, k, k, Band(None, hi))
    numbers = torch.empty(q.shape[:3], device="meta")
    if kernel == "forward":
        tensors, pointers = (q, k, k, q), (numbers,)
        plans = problem.plan_forward(tensors)
    else:
        scratch = problem.scratch(q.device)
        tensors, pointers = (q, k, k, q, scratch, scratch, scratch, k, k), ()
        plans = problem.plan_backward(q, k, k, q, q, q, k, k)
    plan, pointers = plans.main, (*pointers, numbers if plans.split else None)
    return plan.kernel.warmup(*plan.arguments(tensors, pointers, 0.125), grid=(1,), **plan.options)


def main() -> None:
    triton.runtime.driver.set_active(AbsentGPU(90))
    reports = [asdict(sass.read(compile_one(*request))) for request in json.loads(sys.argv[1])]
    print(json.dumps([triton.__version__, reports]))


if __name__ == "__main__":
    main()
