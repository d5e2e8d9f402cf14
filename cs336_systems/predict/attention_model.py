"""Predicted FLOPs and memory of one attention call. No torch."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cs336_systems.predict.memory_model import cublas_workspace

SCORES, SOFTMAX, OUTPUT = "attention scores", "attention softmax", "attention output"
"""Names that traces use for the parts of naive attention."""


@dataclass(frozen=True)
class AttentionShape:
    """Shape and precision of an attention call: q, k and v are (batch_size, heads, seq_len, head_dim) each."""

    batch_size: int
    heads: int
    seq_len: int
    head_dim: int
    is_causal: bool
    precision: str

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "AttentionShape":
        """Return the shape in a cell's configuration, which has more fields."""
        return cls(**{field.name: config[field.name] for field in dataclasses.fields(cls)})

    @property
    def size(self) -> tuple[int, int, int, int]:
        return (self.batch_size, self.heads, self.seq_len, self.head_dim)

    def __str__(self) -> str:
        mask = ("causal",) if self.is_causal else ()
        return " ".join(["x".join(map(str, self.size)), self.precision, *mask])

    @property
    def forward_flops(self) -> int:
        """FLOPs of two matmuls, 2 * seq_len^2 * head_dim each; a causal mask halves them."""
        flops = 4 * self.batch_size * self.heads * self.seq_len**2 * self.head_dim
        return flops // 2 if self.is_causal else flops

    @property
    def flops(self) -> int:
        """FLOPs of forward and backward; a fused backward runs five matmuls for forward's two."""
        return self.forward_flops * 7 // 2

    @property
    def width(self) -> int:
        """Bytes per element of the inputs."""
        return 2 if self.precision in ("bf16", "fp16") else 4

    @property
    def tensor(self) -> int:
        """Bytes of q, and of each of k, v, the output and the gradients."""
        return self.batch_size * self.heads * self.seq_len * self.head_dim * self.width

    def scores(self, width: int) -> int:
        """Bytes of the score matrix with `width` bytes per element."""
        return self.batch_size * self.heads * self.seq_len**2 * width

    @property
    def mask(self) -> int:
        return self.seq_len**2 if self.is_causal else 0


def naive_peak(shape: AttentionShape, *, on_cuda: bool, keeps_graph: bool = False) -> int:
    """Return the peak bytes of naive attention (kernels/flash/reference.py), which occurs in softmax or its backward.

    Allocated throughout: q, k, v, the output's gradient, q * scale, and the mask.
    """
    casts = shape.width < 4
    inputs = 5 * shape.tensor + shape.mask
    low, full = shape.scores(shape.width), shape.scores(4)
    # Forward: the scores, their fp32 copy in low precision, and the weights.
    forward = inputs + low + (full if casts else 0) + full
    # Backward: the output, dv, the weights, their gradient, the scores' gradient; on CUDA also gradient * weights.
    # A retained graph also keeps the low-precision weights.
    backward = inputs + 2 * shape.tensor + (4 if on_cuda else 3) * full + (low if casts and keeps_graph else 0)
    return max(forward, backward) + cublas_workspace(on_cuda=on_cuda, backward=True)


def least_compiled(shape: AttentionShape) -> int:
    """Return a lower bound of the bytes of naive attention under torch.compile, whatever the compiler fuses: inputs,
    outputs, and in backward the saved scores and their gradient."""
    return 8 * shape.tensor + 2 * shape.scores(shape.width)
