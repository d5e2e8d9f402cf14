"""The blocks of a model that compute in FP8, and counters of the elements that became 0 there."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cs336_systems.config import ModelConfig
from cs336_systems.kernels.fused.fp8 import COUNTED_ROWS, SLOTS
from cs336_systems.kernels.fused.fp8_run import MATMULS, OPERANDS, TENSORS


class LostShare(NamedTuple):
    """Elements of a tensor other than 0 that became 0 in FP8, as a share of all its elements; estimated from every 16th
    row."""

    block: int
    tensor: str
    """Name of the tensor, one of fp8_run.TENSORS."""
    share: float


class Fp8Blocks(nn.Module):
    """FP8 state of a model's blocks. Counters are on the device, so that a step in a CUDA graph adds to them;
    `take_counts` reads and resets them."""

    lost: Tensor
    """Counters of elements that became 0. (block, tensor, slot)"""
    work: Tensor
    """Number of tokens, and of forward passes, since the last reading."""
    weight_scales: Tensor
    """Largest scale of each weight (`fp8.largest_scale`), written by every forward pass, by block and matmul."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.numbers = set(range(config.num_layers))
        """Indices of the blocks in FP8; a block that is removed computes in bf16 from the next step on."""
        self._widths = _widths(config)
        shape = (config.num_layers, len(TENSORS), SLOTS)
        self.register_buffer("lost", torch.zeros(shape, dtype=torch.int64), persistent=False)
        self.register_buffer("work", torch.zeros(2, dtype=torch.int64), persistent=False)
        self.register_buffer("weight_scales", torch.zeros(config.num_layers, len(MATMULS), 2, 4), persistent=False)

    def reset_parameters(self) -> None:
        """Set the counters to 0, also after the module was built on the "meta" device."""
        self.lost.zero_()
        self.work.zero_()

    def count(self, tokens: int) -> None:
        """Count a forward pass."""
        self.work[0] += tokens
        self.work[1] += 1

    def take_shares(self) -> list[LostShare]:
        """Return the shares since the last call. Waits for the device."""
        return self.shares_of(self.take_counts())

    def take_counts(self) -> Tensor:
        """Return and reset all counters: lost elements by block and tensor, then tokens and passes. They may be summed
        over ranks."""
        counts = torch.cat((self.lost.sum(-1).flatten(), self.work))
        self.reset_parameters()
        return counts

    def shares_of(self, counts: Tensor) -> list[LostShare]:
        *every, tokens, passes = counts.tolist()
        lost = [every[start : start + len(TENSORS)] for start in range(0, len(every), len(TENSORS))]
        return list(self._shares(lost, tokens, passes)) if passes else []

    def _shares(self, lost: list[list[int]], tokens: int, passes: int) -> Iterator[LostShare]:
        for block in sorted(self.numbers):
            for tensor, count in zip(TENSORS, lost[block], strict=True):
                times = passes if tensor.startswith("weight") else tokens
                yield LostShare(block, tensor, COUNTED_ROWS * count / (times * self._widths[tensor]))


def _widths(config: ModelConfig) -> dict[str, int]:
    """Return the number of elements of each tensor: per token, or of a weight."""
    d, f, q, qkv = config.d_model, config.d_ff, config.q_width, config.qkv_width
    inputs = dict(zip(OPERANDS, (d, q, d, f), strict=True))
    outputs = dict(zip(MATMULS.values(), (qkv, d, 2 * f, d), strict=True))
    found = dict(inputs)
    for operand, matmul in MATMULS.items():
        found[f"weight of {matmul}"] = inputs[operand] * outputs[matmul]
        found[f"gradient of {matmul}"] = found[f"transposed gradient of {matmul}"] = outputs[matmul]
    return found
