"""One attention on paper: its shape, the floating-point operations and the bytes it takes. No torch."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cs336_systems.predict.memory_model import CUBLAS_WORKSPACE


@dataclass(frozen=True)
class AttentionShape:
    """Queries, keys and values of (batch_size, heads, seq_len, head_dim) each, in one precision."""

    batch_size: int
    heads: int
    seq_len: int
    head_dim: int
    is_causal: bool
    precision: str

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "AttentionShape":
        """The shape in a cell's configuration, which says more."""
        return cls(**{field.name: config[field.name] for field in dataclasses.fields(cls)})

    @property
    def size(self) -> tuple[int, int, int, int]:
        return (self.batch_size, self.heads, self.seq_len, self.head_dim)

    def __str__(self) -> str:
        mask = ("causal",) if self.is_causal else ()
        return " ".join(["x".join(map(str, self.size)), self.precision, *mask])

    @property
    def forward_flops(self) -> int:
        """Two products of 2 * seq^2 * d; a causal mask leaves half of them to do."""
        flops = 4 * self.batch_size * self.heads * self.seq_len**2 * self.head_dim
        return flops // 2 if self.is_causal else flops

    @property
    def flops(self) -> int:
        """Forward and backward; a fused backward is five products for forward's two."""
        return self.forward_flops * 7 // 2

    @property
    def width(self) -> int:
        """Bytes of an element of the inputs."""
        return 2 if self.precision in ("bf16", "fp16") else 4

    @property
    def tensor(self) -> int:
        """Bytes of q; k, v, the output and every gradient are as large."""
        return self.batch_size * self.heads * self.seq_len * self.head_dim * self.width

    def scores(self, width: int) -> int:
        """Bytes of a matrix of scores with elements of `width` bytes."""
        return self.batch_size * self.heads * self.seq_len**2 * width

    @property
    def mask(self) -> int:
        return self.seq_len**2 if self.is_causal else 0


def naive_peak(shape: AttentionShape, *, on_cuda: bool, keeps_graph: bool = False) -> int:
    """Peak bytes of kernels/flash/reference.py, forward and backward: in softmax, forward's or backward's.

    Alive throughout: q, k, v, the output's gradient, q * scale, and the mask.
    """
    casts = shape.width < 4
    inputs = 5 * shape.tensor + shape.mask
    low, full = shape.scores(shape.width), shape.scores(4)
    # Forward: the scores, their fp32 copy where they are not fp32, and the weights.
    forward = inputs + low + (full if casts else 0) + full
    # Backward: the output, dv, the weights, their gradient, the scores' gradient; CUDA forms gradient * weights first.
    # A graph that is kept to run backward again keeps the low-precision weights too.
    backward = inputs + 2 * shape.tensor + (4 if on_cuda else 3) * full + (low if casts and keeps_graph else 0)
    workspaces = 2 * CUBLAS_WORKSPACE if on_cuda else 0
    return max(forward, backward) + workspaces


def least_compiled(shape: AttentionShape) -> int:
    """Bytes that the same needs under torch.compile at the very least, whatever the compiler fuses: what enters and
    leaves, and in backward the scores, which were kept, beside their gradient."""
    return 8 * shape.tensor + 2 * shape.scores(shape.width)
