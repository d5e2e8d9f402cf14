"""Cross-compiles the Triton kernels for a GPU that is not there, and says what they need.

    python tests/compile_kernels.py sm_90 '[["forward", 16, 64, true, [null, 0], 1], ...]'

A request is kernel, element bits, head dim, whether TMA moves the tiles, band, query heads per KV head. Prints one JSON
list, an item for each request: registers, bytes of stack (spilled registers) and bytes of shared memory.
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

from cs336_systems.kernels import flash_launch, tiles
from cs336_systems.kernels.band import Band
from cs336_systems.kernels.tiles import Key, Tile

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
    kernel: str, bits: int, d: int, descriptors: bool, band: list[int | None], group: int, tile: Tile
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
        plan = flash_launch.plan(kernel, tensors, Band(*band), tile)
    assert (plan.descriptors is not None) == descriptors
    return resources(plan.kernel.warmup(*plan.arguments(tensors, rows, 0.125), grid=(1,), **plan.options))


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
    found = []
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=divmod(capability, 10)):
        for kernel, bits, d, descriptors, band, group in requests:
            key = Key(kernel, bits, flash_launch.padded(d), band[1] is not None, descriptors)
            tile = tiles.shipped(family, key)
            found.append(compile_one(kernel, bits, d, descriptors, band, group, tile))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
