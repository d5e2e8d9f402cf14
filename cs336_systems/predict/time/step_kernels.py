"""The kernels of a fast training step, listed from its configuration: matmuls with their shapes, passes over memory
with their bytes, and attention. No torch.

A test runs the step and compares every matmul and every pass with this list. Kernels whose time does not depend on the
model's size, such as sums of a few numbers, are left out.
"""

from collections.abc import Iterator
from typing import NamedTuple

from cs336_systems.config import RunConfig

CHUNK_BYTES = 512 << 20
"""Equal to the constant of kernels/fused/nodes.py; a test compares them."""


class Matmul(NamedTuple):
    """(rows, depth) x (depth, columns)."""

    name: str
    rows: int
    columns: int
    depth: int
    count: int = 1
    adds: bool = False
    """The result is added to what is in memory."""
    is_wide: bool = False
    """The result is fp32."""

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.columns * self.depth


class Pass(NamedTuple):
    """A kernel that reads and writes memory, and whose arithmetic does not count."""

    name: str
    bytes: int
    """Read and written."""
    count: int = 1


class AttentionPass(NamedTuple):
    name: str
    """ "forward" or "backward"."""
    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    count: int = 1

    @property
    def flops(self) -> int:
        """Of visible pairs: two matmuls forward, five backward."""
        pairs = self.batch * self.heads * self.length * (self.length + 1) // 2
        return (10 if self.name == "backward" else 4) * pairs * self.head_dim


Kernel = Matmul | Pass | AttentionPass


def gradient_kernels(config: RunConfig, *, adds: bool = False) -> list[Kernel]:
    """Return the kernels of one micro batch, forward and backward. `adds`: gradients of earlier ones are there."""
    return [*_forward(config), *_loss(config, adds), *_backward(config, adds)]


def _forward(config: RunConfig) -> Iterator[Kernel]:
    model, rows, s = config.model, config.tokens, _width(config)
    d, f, q, qk, qkv, layers = model.d_model, model.d_ff, model.q_width, *_head_widths(config), model.num_layers
    stream = rows * d * s
    yield Pass("embedding", 2 * stream)
    yield Pass("add_norm", 2 * stream)  # the first has nothing to add
    yield Pass("add_norm", 4 * stream, 2 * layers)
    yield Matmul("qkv", rows, qkv, d, layers)
    yield Pass("norm_rotate" if model.qk_norm else "rotate", 2 * rows * qk * s, layers)
    yield _attention("forward", config)
    yield Matmul("out", rows, d, q, layers)
    yield Matmul("gate and up", rows, 2 * f, d, layers)
    yield Pass("swiglu", 3 * rows * f * s, layers)
    yield Matmul("down", rows, d, f, layers)


def _loss(config: RunConfig, adds: bool) -> Iterator[Kernel]:
    """Logits and their gradients in chunks; then the gradients' factor."""
    model, rows, s = config.model, config.tokens, _width(config)
    vocab, d = model.vocab_size, model.d_model
    chunks = max(1, -(-rows * vocab * s // CHUNK_BYTES))
    size = -(-rows // chunks)
    for part in (size, rows % size):
        count = rows // size if part == size else 1
        if not part or not count:
            continue
        yield Matmul("logits", part, vocab, d, count)
        yield Pass("cross_entropy", 2 * part * vocab * s, count)
        yield Matmul("logits, gradient of the input", part, d, vocab, count)
    wide = chunks > 1 and s == 2
    for number in range(-(-rows // size)):
        part = min(size, rows - number * size)
        yield Matmul("logits, gradient of the weight", vocab, d, part, adds=number > 0, is_wide=wide)
    width = 4 if wide else s
    yield Pass("scale", 2 * rows * d * s)
    yield Pass("scale", 2 * vocab * d * width)
    yield Pass("deposit", vocab * d * (width + (2 if adds or model.tied_embeddings else 1) * s))


def _backward(config: RunConfig, adds: bool) -> Iterator[Kernel]:
    model, rows, s = config.model, config.tokens, _width(config)
    d, f, q, qk, qkv, layers = model.d_model, model.d_ff, model.q_width, *_head_widths(config), model.num_layers
    stream = rows * d * s

    def both(name: str, columns: int, depth: int) -> Iterator[Kernel]:
        """Gradients of the input and of the weight of (rows, depth) x (depth, columns)."""
        yield Matmul(f"{name}, gradient of the input", rows, depth, columns, layers)
        yield Matmul(f"{name}, gradient of the weight", columns, depth, rows, layers, adds=adds)

    yield Pass("add_norm_backward", 3 * stream)  # of the last norm, whose output is not needed again
    yield from both("down", d, f)
    yield Pass("swiglu_backward", 6 * rows * f * s, layers)
    yield from both("gate and up", 2 * f, d)
    yield Pass("add_norm_backward", 5 * stream, 2 * layers)
    yield from both("out", d, q)
    yield _attention("backward", config)
    name, more = ("norm_rotate_backward", rows * qk * s) if model.qk_norm else ("rotate_backward", 0)
    yield Pass(name, 2 * rows * qkv * s + more, layers)
    yield from both("qkv", qkv, d)
    if model.qkv_bias:
        yield Pass("sum of biases' gradients", rows * qkv * s, layers)
    yield Pass("embedding_backward", 2 * stream)


def update_kernels(config: RunConfig) -> list[Kernel]:
    """Return the kernels of the packed optimizer's update."""
    model, s = config.model, _width(config)
    matrices = model.parameters - model.vector_parameters
    state = 2 * (2 if config.optimizer_state == "bf16" else 4)
    low_bits = 2 if s == 2 and config.optimizer_state == "fp32" else 0
    found: list[Kernel] = [Pass("adamw", matrices * (s + 2 * (s + low_bits + state)))]
    if config.max_grad_norm:
        found.insert(0, Pass("norm of gradients", matrices * s))
    return found


def _width(config: RunConfig) -> int:
    """Bytes of an element in matmuls and of the residual stream."""
    return 4 if config.precision == "fp32" else 2


def _head_widths(config: RunConfig) -> tuple[int, int]:
    """Columns of q and k, and of q, k and v."""
    model = config.model
    return model.q_width + model.kv_width, model.q_width + 2 * model.kv_width


def _attention(name: str, config: RunConfig) -> AttentionPass:
    model = config.model
    shape = (config.batch_size, model.num_heads, model.kv_heads, model.context_length, model.head_dim)
    return AttentionPass(name, *shape, model.num_layers)
