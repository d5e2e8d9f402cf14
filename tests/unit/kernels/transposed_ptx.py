"""Prints the instructions by which fp8_triton.transposed moves the words of an fp32 matrix between threads."""

from unittest import mock

import torch
import triton

from cs336_systems.kernels.fused import fp8_triton
from tests.golden.kernel_resources import AbsentGPU

INSTRUCTIONS = ("st.shared", "ld.shared", "stmatrix", "ldmatrix")


def instructions() -> list[str]:
    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, out = tensor(256, 64), tensor(64, 256, dtype=torch.float8_e4m3fn)
    with mock.patch.object(fp8_triton, "launch") as launch:
        fp8_triton.transposed(x, None, None, tensor(256), None, out, None, None)
    kernel, _, *arguments = launch.call_args.args
    compiled = kernel.warmup(*arguments, grid=(1,), **launch.call_args.kwargs)
    return [name for name in INSTRUCTIONS if name in compiled.asm["ptx"]]


if __name__ == "__main__":
    triton.runtime.driver.set_active(AbsentGPU("sm_90"))
    print(*instructions())
