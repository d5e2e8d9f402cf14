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
ADAMW_BYTES = 28
"""Bytes that AdamW moves for each fp32 weight: it reads weight, gradient and two moments, and writes all but one."""
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
    return EagerKernels(config).phases()


class EagerKernels:
    """Lists the kernels of a step on one GPU. Subclasses list those of a rank that holds a part of the model."""

    def __init__(self, config: RunConfig):
        model = config.model
        self.config, self.model, self.s = config, model, width(config)
        self.rows = config.tokens
        """Tokens that the matmuls process."""
        self.q, self.kv, self.inner, self.vocabulary = model.q_width, model.kv_width, model.d_ff, model.vocab_size
        """Widths of the matmuls' results."""
        self.heads = config.batch_size * model.num_heads
        self.stream = config.tokens * model.d_model
        """Elements of the residual stream."""
        self.stream_width = 4
        """Bytes of an element of the residual stream and its gradient."""

    @property
    def is_low(self) -> bool:
        """True if matmuls have operands of 16 bits."""
        return self.s == 2

    @property
    def casts_weights(self) -> bool:
        """True if autocast casts the weights and their gradients."""
        return self.is_low

    @property
    def casts_stream(self) -> bool:
        """True if the residual stream is wider than the operands of matmuls."""
        return self.stream_width > self.s

    def phases(self) -> dict[str, list[Kernel]]:
        found = {"forward": list(self.forward())}
        if self.config.mode in ("inference", "forward"):
            return found
        found["loss"] = list(self.loss())
        found["backward"] = list(self.backward())
        if self.config.mode == "train-step":
            found["optimizer"] = list(self.update())
        return found

    def update(self) -> Iterator[Kernel]:
        yield Pass(ADAMW, ADAMW_BYTES * self.held_weights)
        yield Small("counts of steps", 1)

    @property
    def held_weights(self) -> int:
        """Elements of the weights that the optimizer updates."""
        return self.model.parameters

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self) -> Iterator[Kernel]:
        yield from self.embedding()
        for kernel in (*self.gather_weights(), *self.block()):
            yield kernel._replace(times=kernel.times * self.model.num_layers)
        yield from self._norm()
        yield from self.enter_branch()
        yield from self._linear("logits", self.vocabulary, self.model.d_model)

    def embedding(self) -> Iterator[Kernel]:
        yield Pass("embedding", 2 * self.rows * self.model.d_model * self.stream_width)

    def block(self, *, stops_early: bool = False) -> Iterator[Kernel]:
        """Yield the operators of one block; `stops_early`: without those whose results backward does not need."""
        model, d, q, kv = self.model, self.model.d_model, self.q, self.kv
        yield from self._norm()
        yield from self.enter_branch()
        for columns in (q, kv, kv):
            yield from self._linear("qkv", columns, d)
            if model.qkv_bias and self.casts_weights:
                yield Small("cast of a vector", 1)
        if model.qk_norm:
            for columns in (q, kv):
                if self.casts_weights:
                    yield Small("cast of a vector", 1)
                heads = self.rows * columns // model.head_dim
                yield Pass(RMS_NORM, 2 * self.rows * columns * self.s, 1, heads, model.head_dim)
        for columns in (q, kv):
            yield from self._rotation(self.rows * columns)
        yield from self.attention()
        yield from self._linear("out", d, q)
        yield from self.leave_branch()
        yield self._residual()
        yield from self._norm()
        yield from self.enter_branch()
        for name in ("gate", "up"):
            yield from self._linear(name, self.inner, d)
            if name == "gate":
                yield self._pass(POINTWISE, 2, self.rows * self.inner)
        yield self._pass(POINTWISE, 3, self.rows * self.inner)
        down = list(self._linear("down", d, self.inner))
        if stops_early:
            yield from down[:-1]
            return
        yield from down
        yield from self.leave_branch()
        yield self._residual()

    def _norm(self) -> Iterator[Kernel]:
        """Yield a norm of the residual stream, and the cast for the matmuls that read it."""
        d = self.model.d_model
        yield Pass(RMS_NORM, 2 * self.stream_width * self.stream, 1, self.stream // d, d)
        if self.casts_stream:
            yield Pass(NARROW, 6 * self.stream)

    def _linear(self, name: str, columns: int, depth: int) -> Iterator[Kernel]:
        """Yield a projection; autocast casts its weight."""
        if self.casts_weights:
            yield Pass(NARROW, 6 * columns * depth)
        yield self._matmul(name, self.rows, columns, depth, FORWARD)

    def _rotation(self, elements: int) -> Iterator[Kernel]:
        """Yield the rotation: pairs are swapped, multiplied and added in fp32."""
        s = self.s
        yield self._pass(STRIDED, 2, elements)
        yield Pass(STRIDED_MIXED if self.is_low else STRIDED, (s + 4) * elements)
        if self.is_low:
            yield Pass(INNER_CAST, 6 * elements)  # of the swapped pairs
        yield Pass(STRIDED, (s + 8) * elements)
        if self.is_low:
            yield Pass(NARROW, 6 * elements)

    def _residual(self) -> Kernel:
        elements = self.stream
        return Pass(MIXED, 10 * elements) if self.casts_stream else self._stream_pass()

    def attention(self) -> Iterator[Kernel]:
        if self.config.attention != "reference":
            yield attention_pass("forward", self.config)
            return
        q, length, dim = self.rows * self.q, self.model.context_length, self.model.head_dim
        scores = self.heads * length * length
        yield self._pass(POINTWISE, 2, q)  # the scale
        yield self._pass(STRIDED, 2, q)
        yield self._pass(TRANSPOSED, 2, q)
        yield self._matmul("scores", length, length, dim, INPUT, self.heads)
        yield Pass(TRIANGLE, length * length)
        yield Pass(TRIANGLE, 2 * length * length)
        yield self._pass(MASKED, 2, scores)
        if self.is_low:
            yield Pass(CAST, 6 * scores)
        yield Pass(SOFTMAX, 8 * scores)
        if self.is_low:
            yield Pass(NARROW, 6 * scores)
        yield self._pass(STRIDED, 2, q)
        yield self._matmul("output", length, dim, length, INPUT, self.heads)
        yield self._pass(STRIDED, 2, q)

    def loss(self) -> Iterator[Kernel]:
        logits, vocabulary = self.rows * self.vocabulary, self.vocabulary
        if self.is_low:
            yield Pass(CAST, 6 * logits)
        is_large = vocabulary > LARGEST_ROW
        yield Pass(LOG_SOFTMAX, 8 * logits, 1, self.rows * is_large, vocabulary * is_large)
        yield Small("sum of losses", 8)

    # -- backward -----------------------------------------------------------------------------------------------------

    def backward(self) -> Iterator[Kernel]:
        yield Small("one", 1)
        yield from self.loss_backward()
        yield from self._both("logits", self.vocabulary, self.model.d_model)
        yield from self.enter_branch_backward()
        yield from self._norm_backward()
        for kernel in self._block_backward():
            yield kernel._replace(times=kernel.times * self.model.num_layers)
        if self.config.checkpoint_blocks:
            yield from self._recomputed()
        yield from self.embedding_backward()

    def loss_backward(self) -> Iterator[Kernel]:
        logits = self.rows * self.vocabulary
        yield Pass("fill", 4 * logits)
        yield Small("gradients of losses", 1)
        yield Pass(LOG_SOFTMAX_BACKWARD, 12 * logits)
        if self.is_low:
            yield Pass(NARROW, 6 * logits)

    def _recomputed(self) -> Iterator[Kernel]:
        """Yield the operators of forward that backward runs again. Each group of blocks stops before its last matmul,
        whose result is not needed."""
        layers, size = self.model.num_layers, self.config.checkpoint_blocks
        groups = -(-layers // size)
        for kernel in self.block():
            if layers > groups:
                yield kernel._replace(times=kernel.times * (layers - groups))
        for kernel in self.block(stops_early=True):
            yield kernel._replace(times=kernel.times * groups)

    def _block_backward(self) -> Iterator[Kernel]:
        model, rows, d, f, q, kv = self.model, self.rows, self.model.d_model, self.inner, self.q, self.kv
        branch = rows * d
        yield from self.gather_weights()
        if self.casts_stream:
            yield Pass(NARROW, 6 * self.stream)  # of the residual's gradient
        yield from self.leave_branch_backward()
        yield from self._both("down", d, f)
        yield self._pass(POINTWISE, 3, rows * f, times=2)
        yield from self._both("up", f, d)
        yield self._pass(POINTWISE, 3, rows * f)  # of silu
        yield from self._both("gate", f, d)
        yield self._pass(POINTWISE, 3, branch)
        yield from self.enter_branch_backward()
        yield from self._norm_backward()
        yield self._stream_pass()
        if self.casts_stream:
            yield Pass(NARROW, 6 * self.stream)
        yield from self.leave_branch_backward()
        yield from self._both("out", d, q)
        yield from self.attention_backward()
        for columns in (q, kv):
            yield from self._rotation_backward(rows * columns)
            if model.qk_norm:
                heads = rows * columns // model.head_dim
                yield Pass(RMS_NORM_BACKWARD, 3 * rows * columns * self.s, 1, *_norm_rows(heads, model.head_dim))
                if self.casts_weights:
                    yield Small("cast of a vector", 1)
        for columns in (q, kv, kv):
            yield from self._both("qkv", columns, d)
            if model.qkv_bias:
                yield self._pass("sum of biases' gradients", 1, rows * columns)
                if self.casts_weights:
                    yield Small("cast of a vector", 1)
        yield self._pass(POINTWISE, 3, branch, times=2)
        yield from self.enter_branch_backward()
        yield from self._norm_backward()
        yield self._stream_pass()
        yield from self.reduce_gradients()

    def _both(self, name: str, columns: int, depth: int) -> Iterator[Kernel]:
        """Yield the gradients of the weight and of the input of (rows, depth) x (depth, columns)."""
        yield self._matmul(f"{name}, gradient of the weight", columns, depth, self.rows, WEIGHT)
        if self.casts_weights:
            yield Pass(CAST, 6 * columns * depth)
        yield self._matmul(f"{name}, gradient of the input", self.rows, depth, columns, INPUT)

    def _norm_backward(self) -> Iterator[Kernel]:
        elements, d = self.stream, self.model.d_model
        if self.casts_stream:
            yield Pass(CAST, 6 * elements)
        yield Pass(RMS_NORM_BACKWARD, 3 * self.stream_width * elements, 1, *_norm_rows(elements // d, d))

    def _rotation_backward(self, elements: int) -> Iterator[Kernel]:
        if self.is_low:
            yield Pass(CAST, 6 * elements)
        yield Small("factor of the table", 1)
        yield Pass(STRIDED, 8 * elements, 2)
        if self.is_low:
            yield Pass(NARROW, 6 * elements, 2)
        yield self._pass(STRIDED, 2, elements)
        yield self._pass(POINTWISE, 3, elements)

    def attention_backward(self) -> Iterator[Kernel]:
        if self.config.attention != "reference":
            yield attention_pass("backward", self.config)
            return
        q, length, dim, heads = self.rows * self.q, self.model.context_length, self.model.head_dim, self.heads
        scores = heads * length * length
        yield self._pass(STRIDED, 2, q)
        yield self._matmul("output, gradient of the values", length, dim, length, WEIGHT, heads)
        yield self._matmul("output, gradient of the weights", length, length, dim, FORWARD, heads)
        if self.is_low:
            yield Pass(CAST, 6 * scores)
        yield Pass(POINTWISE, 12 * scores)  # the gradient times the weights
        yield Pass(SOFTMAX_BACKWARD, 12 * scores)
        if self.is_low:
            yield Pass(NARROW, 6 * scores)
        yield self._pass(COPY, 2, scores)
        yield self._pass(MASKED, 2, scores)
        yield self._matmul("scores, gradient of the keys", dim, length, length, WEIGHT, heads)
        yield self._matmul("scores, gradient of the queries", length, dim, length, FORWARD, heads)
        yield self._pass(POINTWISE, 2, q)
        yield self._pass(STRIDED, 2, q, times=2)
        yield self._pass(TRANSPOSED, 2, q)

    def embedding_backward(self) -> Iterator[Kernel]:
        vocabulary, d = self.model.vocab_size, self.model.d_model
        yield Pass("fill", self.stream_width * vocabulary * d)
        if self.rows > SORTED_ROWS:
            yield Pass("embedding_backward", 2 * self.stream_width * self.rows * d)
            yield Small("sort of tokens", 28)
        else:
            yield Pass("embedding_backward_unsorted", 2 * self.stream_width * self.rows * d)
        if self.model.tied_embeddings:
            yield Pass(POINTWISE, 3 * self.stream_width * vocabulary * d)

    # -- what ranks add -----------------------------------------------------------------------------------------------

    def gather_weights(self) -> Iterator[Kernel]:
        """Yield what makes a block's weights whole, once in forward and once in backward, for recomputation too."""
        yield from ()

    def reduce_gradients(self) -> Iterator[Kernel]:
        """Yield what reduces the gradients of a block's weights."""
        yield from ()

    def enter_branch(self) -> Iterator[Kernel]:
        """Yield what makes the sequence whole before matmuls that split columns."""
        yield from ()

    def leave_branch(self) -> Iterator[Kernel]:
        """Yield what splits the sequence again after matmuls that split rows."""
        yield from ()

    def enter_branch_backward(self) -> Iterator[Kernel]:
        yield from ()

    def leave_branch_backward(self) -> Iterator[Kernel]:
        yield from ()

    # -- kernels ------------------------------------------------------------------------------------------------------

    def _matmul(self, name: str, rows: int, columns: int, depth: int, layout: str, batch: int = 1) -> Matmul:
        precision = "" if self.is_low else self.config.precision
        multiple = 0 if self.config.compile else _multiple(rows, columns, depth, layout, precision)
        return Matmul(name, rows, columns, depth, layout, batch=batch, precision=precision, multiple=multiple)

    def _pass(self, name: str, tensors: int, elements: int, times: int = 1) -> Pass:
        """Return a pass over tensors of the matmuls' precision; those in ONE_BY_ONE take as long in 16 bits as in
        32."""
        return Pass(name, tensors * elements * self.s, times, *((elements, 1) if name in ONE_BY_ONE else ()))

    def _stream_pass(self) -> Pass:
        """Return a sum of two tensors of the residual stream's size."""
        return Pass(POINTWISE, 3 * self.stream_width * self.stream)


def _norm_rows(rows: int, elements: int) -> tuple[int, int, int]:
    """Return the number of rows in a norm's backward pass, their elements, and the rows processed in parallel; 0 for as
    many as the GPU can hold."""
    return rows, elements, GAIN_PROGRAMS if rows <= MOST_GAIN_ROWS else 0


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


def _multiple(rows: int, columns: int, depth: int, layout: str, precision: str) -> int:
    """Return the power of 2 that divides the contiguous dimensions of a matmul's operands and result, if it is too
    small for the Hopper kernels; else 0. The compiler pads such operands."""
    contiguous = math.gcd(columns, rows if layout == WEIGHT else depth)
    enough = ALIGNMENT.get(precision, 1)
    return 0 if contiguous % enough == 0 else math.gcd(contiguous, enough)


def width(config: RunConfig) -> int:
    """Return the bytes per element in matmuls."""
    return 4 if config.precision in ("fp32", "tf32") else 2
