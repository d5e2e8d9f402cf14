"""The kernels of a step without the fast parts, as PyTorch launches them: operator by operator, in phases. No torch.

A test runs the step under a dispatch mode and compares every matmul and every pass of every phase with this list.
Passes are named by how PyTorch's kernel reads memory, not by what it computes: passes of one name have one rate.
"""

import math
from collections.abc import Iterator

from cs336_systems.config import RunConfig
from cs336_systems.predict.time.step_kernels import (
    FORWARD,
    INPUT,
    LAUNCH_BOUND,
    SORTED_ROWS,
    TRITON_TF32,
    TRITON_WIDE,
    WEIGHT,
    AttentionPass,
    Kernel,
    Matmul,
    Pass,
    Small,
    attention_path,
)

POINTWISE, CAST, MIXED, STRIDED, TRANSPOSED = "pointwise", "cast", "mixed", "strided", "transposed"
"""Passes over contiguous tensors: of one dtype, between two dtypes, and over operands of two dtypes; passes over views
whose last dimension is not contiguous, or with a broadcast operand; and copies that swap the last two dimensions."""
NARROW, STRIDED_MIXED = "narrow", "strided_mixed"
"""Casts of contiguous tensors to 16 bits, whose kernel moves 8 elements at a time, and products of two dtypes with a
broadcast operand, whose kernel moves one."""
MASKED, COPY, TRIANGLE = "masked", "copy", "triangle"
"""Passes: filling scores with a mask, plain copies, and creating the mask itself."""
INNER_CAST = "inner_cast"
"""Casts that an operator launches itself, without time of the host."""
ONE_BY_ONE = (STRIDED, MASKED)
"""Passes whose kernels move one element at a time."""
SOFTMAX, SOFTMAX_BACKWARD, LOG_SOFTMAX, LOG_SOFTMAX_BACKWARD = (
    "softmax", "softmax_backward", "log_softmax", "log_softmax_backward",
)  # fmt: skip
RMS_NORM, RMS_NORM_BACKWARD, ADAMW = "rms_norm", "rms_norm_backward", "adamw_of_torch"
EFFICIENT, FLASH_2 = "efficient", "flash2"
"""Attention kernels of torch in fp32 and in 16 bits."""
PHASES = ("forward", "loss", "backward", "optimizer")
GAIN_PROGRAMS, MOST_GAIN_ROWS = 32, 1 << 16
"""Rows of a norm whose contributions to the gain's gradient are added in parallel, and the number of rows from which
more programs are used."""
LARGEST_ROW = 30_000
"""Maximum number of logits per row that stay in the cache while log-softmax reads them three times."""
ALIGNMENT = {"": 8, "tf32": 4}
"""The contiguous dimensions of a matmul's operands must be multiples of this many elements (16 bytes) for the Hopper
kernels, by precision. In fp32 there are no such kernels."""


def lists_operators(config: RunConfig) -> bool:
    """Return True if the operators of this step are listed. Grouped heads are not, because they run on this package's
    kernels."""
    model = config.model
    grouped = model.kv_heads < model.num_heads
    return (
        config.fast == "off"
        and config.attention in ("reference", "sdpa", "auto", "flash_triton", "flash_hopper")
        and not (grouped and config.attention in ("reference", "sdpa"))
        and not config.memory_budget
        and not config.max_grad_norm
        and config.model_factory is None
        and config.precision in ("fp32", "tf32", "bf16")
    )


def eager_phases(config: RunConfig) -> dict[str, list[Kernel]]:
    """Return the kernels of each phase of a step."""
    found = {"forward": list(forward_operators(config))}
    if config.mode in ("inference", "forward"):
        return found
    found["loss"] = list(_loss(config))
    found["backward"] = list(_backward(config))
    if config.mode == "train-step":
        found["optimizer"] = [Pass(ADAMW, 28 * config.model.parameters), Small("counts of steps", 1)]
    return found


def forward_operators(config: RunConfig) -> Iterator[Kernel]:
    model, rows, layers = config.model, config.tokens, config.model.num_layers
    yield Pass("embedding", 2 * rows * model.d_model * 4)
    for kernel in _block(config):
        yield kernel._replace(times=kernel.times * layers)
    yield from _norm(rows * model.d_model, config)
    yield from _linear("logits", rows, model.vocab_size, model.d_model, config)


def _block(config: RunConfig, *, stops_early: bool = False) -> Iterator[Kernel]:
    """Yield the operators of one block; `stops_early`: without those whose results backward does not need."""
    model, rows, s = config.model, config.tokens, width(config)
    d, f, q, kv = model.d_model, model.d_ff, model.q_width, model.kv_width
    stream = rows * d
    yield from _norm(stream, config)
    for columns in (q, kv, kv):
        yield from _linear("qkv", rows, columns, d, config)
        if model.qkv_bias and s == 2:
            yield Small("cast of a vector", 1)
    if model.qk_norm:
        for columns in (q, kv):
            if s == 2:
                yield Small("cast of a vector", 1)
            yield Pass(RMS_NORM, 2 * rows * columns * s, 1, rows * columns // model.head_dim, model.head_dim)
    for columns in (q, kv):
        yield from _rotation(rows * columns, config)
    yield from _attention(config)
    yield from _linear("out", rows, d, q, config)
    yield _residual(stream, config)
    yield from _norm(stream, config)
    for name in ("gate", "up"):
        yield from _linear(name, rows, f, d, config)
        if name == "gate":
            yield _pass(POINTWISE, 2, rows * f, config)
    yield _pass(POINTWISE, 3, rows * f, config)
    down, residual = list(_linear("down", rows, d, f, config)), _residual(stream, config)
    yield from down[:-1] if stops_early else [*down, residual]


def _norm(elements: int, config: RunConfig) -> Iterator[Kernel]:
    """Yield a norm of the fp32 residual stream, and the cast for the matmuls that read it."""
    yield Pass(RMS_NORM, 8 * elements, 1, elements // config.model.d_model, config.model.d_model)
    if width(config) == 2:
        yield Pass(NARROW, 6 * elements)


def _linear(name: str, rows: int, columns: int, depth: int, config: RunConfig) -> Iterator[Kernel]:
    """Yield a projection; autocast casts its weight."""
    if width(config) == 2:
        yield Pass(NARROW, 6 * columns * depth)
    yield _matmul(name, rows, columns, depth, FORWARD, config)


def _rotation(elements: int, config: RunConfig) -> Iterator[Kernel]:
    """Yield the rotation: pairs are swapped, multiplied and added in fp32."""
    s = width(config)
    yield _pass(STRIDED, 2, elements, config)
    yield Pass(STRIDED_MIXED if s == 2 else STRIDED, (s + 4) * elements)
    if s == 2:
        yield Pass(INNER_CAST, 6 * elements)  # of the swapped pairs
    yield Pass(STRIDED, (s + 8) * elements)
    if s == 2:
        yield Pass(NARROW, 6 * elements)


def _residual(elements: int, config: RunConfig) -> Kernel:
    return Pass(MIXED, 10 * elements) if width(config) == 2 else Pass(POINTWISE, 12 * elements)


def _attention(config: RunConfig) -> Iterator[Kernel]:
    if config.attention != "reference":
        yield attention_pass("forward", config)
        return
    model, rows, s = config.model, config.tokens, width(config)
    q, length, dim, heads = model.q_width, model.context_length, model.head_dim, config.batch_size * model.num_heads
    scores = heads * length * length
    yield _pass(POINTWISE, 2, rows * q, config)  # the scale
    yield _pass(STRIDED, 2, rows * q, config)
    yield _pass(TRANSPOSED, 2, rows * q, config)
    yield _matmul("scores", length, length, dim, INPUT, config, heads)
    yield Pass(TRIANGLE, length * length)
    yield Pass(TRIANGLE, 2 * length * length)
    yield _pass(MASKED, 2, scores, config)
    if s == 2:
        yield Pass(CAST, 6 * scores)
    yield Pass(SOFTMAX, 8 * scores)
    if s == 2:
        yield Pass(NARROW, 6 * scores)
    yield _pass(STRIDED, 2, rows * q, config)
    yield _matmul("output", length, dim, length, INPUT, config, heads)
    yield _pass(STRIDED, 2, rows * q, config)


def _loss(config: RunConfig) -> Iterator[Kernel]:
    logits = config.tokens * config.model.vocab_size
    if width(config) == 2:
        yield Pass(CAST, 6 * logits)
    vocabulary = config.model.vocab_size
    is_large = vocabulary > LARGEST_ROW
    yield Pass(LOG_SOFTMAX, 8 * logits, 1, config.tokens * is_large, vocabulary * is_large)
    yield Small("sum of losses", 8)


def _backward(config: RunConfig) -> Iterator[Kernel]:
    model, rows, s = config.model, config.tokens, width(config)
    d, vocabulary = model.d_model, model.vocab_size
    logits = rows * vocabulary
    yield Small("one", 1)
    yield Pass("fill", 4 * logits)
    yield Small("gradients of losses", 1)
    yield Pass(LOG_SOFTMAX_BACKWARD, 12 * logits)
    if s == 2:
        yield Pass(NARROW, 6 * logits)
    yield from _both("logits", rows, vocabulary, d, config)
    yield from _norm_backward(rows * d, config)
    for kernel in _block_backward(config):
        yield kernel._replace(times=kernel.times * model.num_layers)
    if config.checkpoint_blocks:
        yield from recomputed_operators(config)
    yield Pass("fill", 4 * vocabulary * d)
    if rows > SORTED_ROWS:
        yield Pass("embedding_backward", 8 * rows * d)
        yield Small("sort of tokens", 28)
    else:
        yield Pass("embedding_backward_unsorted", 8 * rows * d)
    if model.tied_embeddings:
        yield Pass(POINTWISE, 12 * vocabulary * d)


def recomputed_operators(config: RunConfig) -> Iterator[Kernel]:
    """Yield the operators of forward that backward runs again. Each group of blocks stops before its last matmul, whose
    result is not needed."""
    layers, size = config.model.num_layers, config.checkpoint_blocks
    groups = -(-layers // size)
    for kernel in _block(config):
        if layers > groups:
            yield kernel._replace(times=kernel.times * (layers - groups))
    for kernel in _block(config, stops_early=True):
        yield kernel._replace(times=kernel.times * groups)


def _block_backward(config: RunConfig) -> Iterator[Kernel]:
    model, rows, s = config.model, config.tokens, width(config)
    d, f, q, kv = model.d_model, model.d_ff, model.q_width, model.kv_width
    stream = rows * d
    if s == 2:
        yield Pass(NARROW, 6 * stream)  # of the residual's gradient
    yield from _both("down", rows, d, f, config)
    yield _pass(POINTWISE, 3, rows * f, config, times=2)
    yield from _both("up", rows, f, d, config)
    yield _pass(POINTWISE, 3, rows * f, config)  # of silu
    yield from _both("gate", rows, f, d, config)
    yield _pass(POINTWISE, 3, stream, config)
    yield from _norm_backward(stream, config)
    yield Pass(POINTWISE, 12 * stream)
    if s == 2:
        yield Pass(NARROW, 6 * stream)
    yield from _both("out", rows, d, q, config)
    yield from _attention_backward(config)
    for columns in (q, kv):
        yield from _rotation_backward(rows * columns, config)
        if model.qk_norm:
            heads = columns // model.head_dim
            yield Pass(RMS_NORM_BACKWARD, 3 * rows * columns * s, 1, *_norm_rows(rows * heads, model.head_dim))
            if s == 2:
                yield Small("cast of a vector", 1)
    for columns in (q, kv, kv):
        yield from _both("qkv", rows, columns, d, config)
        if model.qkv_bias:
            yield _pass("sum of biases' gradients", 1, rows * columns, config)
            if s == 2:
                yield Small("cast of a vector", 1)
    yield _pass(POINTWISE, 3, stream, config, times=2)
    yield from _norm_backward(stream, config)
    yield Pass(POINTWISE, 12 * stream)


def _both(name: str, rows: int, columns: int, depth: int, config: RunConfig) -> Iterator[Kernel]:
    """Yield the gradients of the weight and of the input of (rows, depth) x (depth, columns)."""
    yield _matmul(f"{name}, gradient of the weight", columns, depth, rows, WEIGHT, config)
    if width(config) == 2:
        yield Pass(CAST, 6 * columns * depth)
    yield _matmul(f"{name}, gradient of the input", rows, depth, columns, INPUT, config)


def _norm_backward(elements: int, config: RunConfig) -> Iterator[Kernel]:
    if width(config) == 2:
        yield Pass(CAST, 6 * elements)
    width_of_row = config.model.d_model
    yield Pass(RMS_NORM_BACKWARD, 12 * elements, 1, *_norm_rows(elements // width_of_row, width_of_row))


def _norm_rows(rows: int, elements: int) -> tuple[int, int, int]:
    """Return the number of rows in a norm's backward pass, their elements, and the rows processed in parallel; 0 for as
    many as the GPU can hold."""
    return rows, elements, GAIN_PROGRAMS if rows <= MOST_GAIN_ROWS else 0


def _rotation_backward(elements: int, config: RunConfig) -> Iterator[Kernel]:
    s = width(config)
    if s == 2:
        yield Pass(CAST, 6 * elements)
    yield Small("factor of the table", 1)
    yield Pass(STRIDED, 8 * elements, 2)
    if s == 2:
        yield Pass(NARROW, 6 * elements, 2)
    yield _pass(STRIDED, 2, elements, config)
    yield _pass(POINTWISE, 3, elements, config)


def _attention_backward(config: RunConfig) -> Iterator[Kernel]:
    if config.attention != "reference":
        yield attention_pass("backward", config)
        return
    model, rows, s = config.model, config.tokens, width(config)
    q, length, dim, heads = model.q_width, model.context_length, model.head_dim, config.batch_size * model.num_heads
    scores = heads * length * length
    yield _pass(STRIDED, 2, rows * q, config)
    yield _matmul("output, gradient of the values", length, dim, length, WEIGHT, config, heads)
    yield _matmul("output, gradient of the weights", length, length, dim, FORWARD, config, heads)
    if s == 2:
        yield Pass(CAST, 6 * scores)
    yield Pass(POINTWISE, 12 * scores)  # the gradient times the weights
    yield Pass(SOFTMAX_BACKWARD, 12 * scores)
    if s == 2:
        yield Pass(NARROW, 6 * scores)
    yield _pass(COPY, 2, scores, config)
    yield _pass(MASKED, 2, scores, config)
    yield _matmul("scores, gradient of the keys", dim, length, length, WEIGHT, config, heads)
    yield _matmul("scores, gradient of the queries", length, dim, length, FORWARD, config, heads)
    yield _pass(POINTWISE, 2, rows * q, config)
    yield _pass(STRIDED, 2, rows * q, config, times=2)
    yield _pass(TRANSPOSED, 2, rows * q, config)


def attention_pass(name: str, config: RunConfig) -> AttentionPass:
    """Return a fused attention pass; its name states the pass, the library and the precision that select its rates."""
    model = config.model
    shape = (config.batch_size, model.num_heads, model.kv_heads, model.context_length, model.head_dim)
    return AttentionPass(f"{name}{_kernels_of(config, is_backward=name == 'backward')}", *shape)


def _kernels_of(config: RunConfig, *, is_backward: bool) -> str:
    """Return the suffix of the attention kernels that a step runs; "" for this package's in 16 bits. `auto` selects
    torch's kernels where they are faster, as kernels/flash/dispatch.py does."""
    model, wide = config.model, width(config) == 4
    work = config.tokens * model.q_width * model.context_length
    takes_torch = config.attention == "sdpa"
    if config.attention == "auto":
        grouped_wide = wide and model.kv_heads < model.num_heads
        takes_torch = not grouped_wide and (work < LAUNCH_BOUND or (wide and model.head_dim > 64))
    if takes_torch:
        return f" {EFFICIENT}" if wide else f" {FLASH_2}"
    if wide:
        return f" {TRITON_TF32}" if config.precision == "tf32" else f" {TRITON_WIDE}"
    return attention_path(config, is_backward=is_backward)


def _matmul(name: str, rows: int, columns: int, depth: int, layout: str, config: RunConfig, batch: int = 1) -> Matmul:
    precision = "" if width(config) == 2 else config.precision
    multiple = 0 if config.compile else _multiple(rows, columns, depth, layout, precision)
    return Matmul(name, rows, columns, depth, layout, batch=batch, precision=precision, multiple=multiple)


def _multiple(rows: int, columns: int, depth: int, layout: str, precision: str) -> int:
    """Return the power of 2 that divides the contiguous dimensions of a matmul's operands and result, if it is too
    small for the Hopper kernels; else 0. The compiler pads such operands."""
    contiguous = math.gcd(columns, rows if layout == WEIGHT else depth)
    enough = ALIGNMENT.get(precision, 1)
    return 0 if contiguous % enough == 0 else math.gcd(contiguous, enough)


def _pass(name: str, tensors: int, elements: int, config: RunConfig, times: int = 1) -> Pass:
    """Return a pass over tensors of the matmuls' precision; those in ONE_BY_ONE take as long in 16 bits as in 32."""
    return Pass(name, tensors * elements * width(config), times, *((elements, 1) if name in ONE_BY_ONE else ()))


def width(config: RunConfig) -> int:
    """Return the bytes per element in matmuls."""
    return 4 if config.precision in ("fp32", "tf32") else 2
