"""Cross-compiles the Triton kernels for a GPU that is not there, and says what they need.

    python tests/unit/kernels/compile_kernels.py sm_90 '[["forward", 16, 64, true, [null, 0], 1], ...]'
    python tests/unit/kernels/compile_kernels.py sm_90 '["pointwise", 16, 2560, 80]'

A request is kernel, element bits, head dim, whether TMA moves the tiles, band, query heads per KV head; or, for all
kernels of pointwise_triton.py, element bits, width and head dim. Prints one JSON list, an item for each kernel:
registers, bytes of stack (spilled registers) and bytes of shared memory.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

from cs336_systems.kernels.flash import portable_launch as flash_launch
from cs336_systems.kernels.flash import tiles
from cs336_systems.kernels.flash.band import Band
from cs336_systems.kernels.fused import pointwise_triton

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
LENGTH = 4096


class AbsentGPU:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_one(
    kernel: str, bits: int, d: int, descriptors: bool, band: list[int | None], group: int, family: str
) -> dict[str, int]:
    """With tensors of the "meta" device: they have shapes and strides, and no memory."""
    dtype = {16: torch.bfloat16, 32: torch.float32}[bits]
    sides = {
        "q": torch.empty(2, 2 * group, LENGTH, d, dtype=dtype, device="meta"),
        "k": torch.empty(2, 2, LENGTH, d, dtype=dtype, device="meta"),
    }
    tensors = [sides[side] for side in flash_launch.SIDES[kernel]]
    row = torch.empty(2, 2 * group, LENGTH, device="meta")
    rows = {"forward": (row,), "grad_q": (row, None, row), "grad_kv": (row, row), "grad": (row, None)}[kernel]
    least = 0 if descriptors else 1 << 62
    with mock.patch.multiple(flash_launch, SMALLEST_FOR_DESCRIPTORS=least, LONG_FOR_DESCRIPTORS=least):
        key, traits = (of(kernel, tensors, Band(*band)) for of in (flash_launch.tile_key, flash_launch.traits))
        tile = tiles.sparing(family, key, traits) or tiles.shipped(family, key)
        plan = flash_launch.plan(kernel, tensors, Band(*band), tile)
    assert (plan.descriptions is not None) == descriptors
    return resources(plan.kernel.warmup(*plan.arguments(tensors, rows, 0.125), grid=(1,), **plan.options))


def compile_pointwise(bits: int, width: int, head_dim: int) -> list[dict[str, int]]:
    """Every kernel, in the order in which its launch function calls it."""
    dtype = {16: torch.bfloat16, 32: torch.float32}[bits]
    found = []

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **meta: Any) -> None:
        found.append({"kernel": kernel.fn.__name__, **resources(kernel.warmup(*arguments, grid=grid, **meta))})

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    wide = torch.float32
    x, gain, rstd = tensor(64, width), tensor(width, dtype=wide), tensor(64, dtype=wide)
    q = tensor(2, 32, width // head_dim, head_dim)
    table, packed = tensor(32, 1, head_dim, dtype=wide), tensor(2, 32, 3, width // head_dim, head_dim)
    flat, rest = tensor(1 << 20), tensor(1 << 20, dtype=torch.int16) if bits == 16 else None
    moment = tensor(1 << 20, dtype=wide)
    with mock.patch.object(pointwise_triton, "_launch", launch):
        for delta in (None, x):
            pointwise_triton.add_norm(x, delta, gain, 1e-5, x, x, rstd)
            pointwise_triton.add_norm_backward(x, delta, x, rstd, gain, x, True)
        pointwise_triton.turn(q, q, None, table, table, packed, 1.0)
        pointwise_triton.turn(q, q, q, table, table, packed, -1.0)
        pointwise_triton.swiglu(tensor(64, 2 * width), x)
        pointwise_triton.swiglu_backward(x, tensor(64, 2 * width), tensor(64, 2 * width))
        targets = tensor(64, dtype=torch.int64)
        pointwise_triton.cross_entropy(tensor(64, 50257), targets, rstd, tensor(dtype=wide), -100)
        scalars = tensor(5, dtype=wide)
        pointwise_triton.adamw(flat, rest, flat, moment, moment, scalars, (0.9, 0.95), 1e-8, 0.1)
    return found


def resources(compiled: Any) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        said = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, said
    return {"registers": int(found[1]), "stack": int(found[2]), "shared": compiled.metadata.shared}


def main() -> None:
    family, requests = sys.argv[1], json.loads(sys.argv[2])
    capability = int(family.removeprefix("sm_"))
    triton.runtime.driver.set_active(AbsentGPU(capability))
    if requests[0] == "pointwise":
        print(json.dumps(compile_pointwise(*requests[1:])))
        return
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=divmod(capability, 10)):
        found = [compile_one(*request, family) for request in requests]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
