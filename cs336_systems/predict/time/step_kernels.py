"""The kernels of a fast training step, listed from its configuration: matmuls with their shapes, passes over memory
with their bytes, attention, and small kernels by their number. No torch.

A test runs the step and compares every matmul and every pass with this list.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from cs336_systems.config import RunConfig
from cs336_systems.predict.attention_programs import sees_few_keys, suits_hopper

CHUNK_BYTES, MATMUL_MULTIPLE = 512 << 20, 8
"""Equal to the constants of kernels/fused/nodes.py; a test compares them."""
FORWARD, INPUT, WEIGHT = "forward", "input", "weight"
"""Layouts of a matmul: x @ W^T, the gradient of its input (grad @ W) and of its weight (grad^T @ x)."""
ROTARY_ELEMENTS, LOGITS, NORM_PROGRAMS, MANY_ROWS = 4096, 2048, 264, 8192
"""Equal to the constants of kernels/fused/pointwise_triton.py; a test compares them."""
LAUNCH_BOUND = 1 << 31
SMALLEST_FOR_DESCRIPTORS, LONG_FOR_DESCRIPTORS = 1 << 21, 2048
WIDE_FOR_DESCRIPTORS, WIDEST_GRAD = 1 << 28, 64
"""Equal to the constants of kernels/flash/portable_launch.py and tiles.py; a test compares them."""
SMALL_PATH, PORTABLE, SHORT = " small", " triton", " short"
"""Suffixes of the pass in names of attention kernels. The first two are portable kernels: small problems are read
through pointers and have one kernel in backward; those of medium size have two. "short": forward of the Hopper kernels
in small programs."""
TRITON_WIDE, TRITON_TF32 = "wide", "tf32"
"""Suffixes of the pass for this package's attention in fp32, and in fp32 with TF32 matmuls."""
LINE = 256
"""Rows should be multiples of this many bytes; otherwise they share cache lines with their neighbours."""
VECTOR = 16
"""If a size is not a multiple of this, Triton loads one element at a time."""
CAST, TRANSPOSE, ADD = "fp8_cast", "fp8_transpose", "fp8_add"
"""Passes around FP8 matmuls: casting a matrix, writing its transposed copy, and adding a weight's gradient to that of
earlier micro batches, which these matmuls cannot do."""
SORTED_ROWS = 3072
"""Number of tokens from which torch's embedding gradient sorts them, in about 28 small kernels."""


class Matmul(NamedTuple):
    """A matmul of (rows, depth) x (depth, columns)."""

    name: str
    rows: int
    columns: int
    depth: int
    layout: str
    times: int = 1
    adds: bool = False
    """True if the result is added to the output in memory."""
    is_wide: bool = False
    """True if the result is fp32 and the operands are not."""
    batch: int = 1
    """Number of matmuls in one kernel."""
    precision: str = ""
    """Precision of the operands: "fp32" or "tf32" for 32 bits, "fp8" for 8, "" for 16."""
    multiple: int = 0
    """The power of 2 that divides the contiguous dimensions, if it is too small for the fastest kernels; else 0."""

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.rows * self.columns * self.depth


class Pass(NamedTuple):
    """A memory-bound kernel, whose arithmetic is ignored."""

    name: str
    bytes: int
    """Bytes read and written."""
    times: int = 1
    programs: int = 0
    """Number of programs, or of rows that `together` programs process one after another; 0 if only the bytes matter."""
    elements: int = 0
    """Number of elements that a program holds, a power of 2."""
    together: int = 0
    """Number of programs that share the rows."""


class AttentionPass(NamedTuple):
    name: str
    """"forward" or "backward", followed by the kernels' name unless they are this package's in 16 bits."""
    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    times: int = 1
    parts: int = 1
    """GPUs that share the visible pairs equally (context parallel)."""

    @property
    def is_backward(self) -> bool:
        return self.name.startswith("backward")

    @property
    def flops(self) -> int:
        """FLOPs of visible pairs: two matmuls forward, five backward."""
        pairs = self.batch * self.heads * self.length * (self.length + 1) // 2
        return (10 if self.is_backward else 4) * pairs * self.head_dim // self.parts


class Small(NamedTuple):
    """Kernels whose time does not depend on the model's size."""

    name: str
    times: int


Kernel = Matmul | Pass | AttentionPass | Small


def gradient_kernels(config: RunConfig, *, adds: bool = False) -> list[Kernel]:
    """Return the kernels of one micro batch, forward and backward. `adds`: gradients of earlier micro batches exist."""
    backward = _backward(config, adds)
    if config.precision == "fp8":
        backward = _in_fp8(backward, config)
    return [*forward_kernels(config), *_loss(config, adds), *backward]


def forward_kernels(config: RunConfig) -> Iterator[Kernel]:
    """Return the kernels up to the last norm; blocks run once per layer, or twice."""
    return _in_fp8(_forward(config), config) if config.precision == "fp8" else _forward(config)


def _forward(config: RunConfig) -> Iterator[Kernel]:
    model, rows, s = config.model, config.tokens, _width(config)
    d, f, q, qk, qkv, layers = model.d_model, model.d_ff, model.q_width, *_head_widths(config), model.num_layers
    stream = rows * d * s
    yield Pass("embedding", 2 * stream)
    norm = (rows, power_of_2(d))
    yield Pass("add_norm", 2 * stream, 1, *norm)  # the first has nothing to add
    yield Pass("add_norm", 4 * stream, 2 * layers, *norm)
    yield Matmul("qkv", rows, qkv, d, FORWARD, layers)
    yield Pass("norm_rotate" if model.qk_norm else "rotate", 2 * rows * qk * s, layers, *_rotary_programs(config, 2))
    yield _attention("forward", config)
    yield Matmul("out", rows, d, q, FORWARD, layers)
    yield Matmul("gate and up", rows, 2 * f, d, FORWARD, layers)
    yield Pass("swiglu", 3 * rows * f * s, layers, *_unaligned_rows(rows, f, s))
    yield Matmul("down", rows, d, f, FORWARD, layers)


def _loss(config: RunConfig, adds: bool) -> Iterator[Kernel]:
    """Yield the kernels of the loss: logits and their gradients in chunks; then the factor of the gradients."""
    model, rows, s = config.model, config.tokens, _width(config)
    vocabulary, d = model.vocab_size, model.d_model
    chunks = max(1, -(-rows * vocabulary * s // CHUNK_BYTES))
    size = -(-rows // chunks)
    wide = chunks > 1 and s == 2
    even = vocabulary // MATMUL_MULTIPLE * MATMUL_MULTIPLE
    parts = [part for part in (even, vocabulary - even) if part]
    yield Small("sums and counts of the loss", 6)
    for number in range(-(-rows // size)):
        own = min(size, rows - number * size)
        for columns in parts:
            yield Matmul("logits", own, columns, d, FORWARD)
        yield Pass("cross_entropy", 2 * own * vocabulary * s, 1, *_loss_programs(own, vocabulary))
        for index, columns in enumerate(parts):
            yield Matmul("logits, gradient of the input", own, d, columns, INPUT, adds=index > 0)
            yield Matmul("logits, gradient of the weight", columns, d, own, WEIGHT, adds=number > 0, is_wide=wide)
        yield Small("sum of losses", 2)
    width = 4 if wide else s
    yield Pass("scale", 2 * rows * d * s)
    yield Pass("scale" if width == s else "scale_wide", 2 * vocabulary * d * width)
    yield Pass("deposit", vocabulary * d * (width + (2 if adds or model.tied_embeddings else 1) * s))
    yield Small("factor of the loss", 2)


def _backward(config: RunConfig, adds: bool) -> Iterator[Kernel]:
    model, rows, s = config.model, config.tokens, _width(config)
    d, f, q, qk, qkv, layers = model.d_model, model.d_ff, model.q_width, *_head_widths(config), model.num_layers
    stream = rows * d * s

    def both(name: str, columns: int, depth: int) -> Iterator[Kernel]:
        """Yield the gradients of the input and of the weight of (rows, depth) x (depth, columns)."""
        yield Matmul(f"{name}, gradient of the input", rows, depth, columns, INPUT, layers)
        yield Matmul(f"{name}, gradient of the weight", columns, depth, rows, WEIGHT, layers, adds=adds)

    norm = (rows, power_of_2(d), _sharing_programs(rows))
    yield Pass("add_norm_backward", 3 * stream, 1, *norm)  # of the last norm, whose output is not needed again
    yield from both("down", d, f)
    yield Pass("swiglu_backward", 6 * rows * f * s, layers, *_unaligned_rows(rows, f, s))
    yield from both("gate and up", 2 * f, d)
    yield Pass("add_norm_backward", 5 * stream, 2 * layers, *norm)
    yield Small("gradients of norms", 2 * (2 * layers + 1) + (4 * layers if model.qk_norm else 0))
    yield from both("out", d, q)
    yield _attention("backward", config)
    if model.qk_norm:
        groups, elements = _rotary_block(config)
        yield Pass("norm_rotate_backward", rows * (2 * qkv + qk) * s, layers, rows * groups, elements)
    else:
        yield Pass("rotate_backward", 2 * rows * qkv * s, layers, *_rotary_programs(config, 3))
    yield from both("qkv", qkv, d)
    if model.qkv_bias:
        yield Pass("sum of biases' gradients", rows * qkv * s, layers)
        yield Small("copies of biases and their gradients", 5 * layers)
    table = model.vocab_size * d * s
    yield Pass("fill", table)
    if rows > SORTED_ROWS:
        yield Pass("embedding_backward", 2 * stream)
        yield Small("sort of tokens", 28)
    else:
        yield Pass("embedding_backward_unsorted", 2 * stream)
    yield Pass("deposit", (3 if adds or model.tied_embeddings else 2) * table)


def _in_fp8(kernels: Iterable[Kernel], config: RunConfig) -> Iterator[Kernel]:
    """Yield kernels of forward or backward with the blocks' matmuls in FP8, as in kernels/fused/fp8_run.py."""
    model = config.model
    d, f = model.d_model, model.d_ff
    widths = {"qkv": (d, model.qkv_width), "out": (model.q_width, d), "gate and up": (d, 2 * f), "down": (f, d)}
    for kernel in kernels:
        name = kernel.name.partition(",")[0]
        if isinstance(kernel, Matmul) and name in widths:
            yield from _matmul_in_fp8(kernel, name, *widths[name], config.tokens)
        elif isinstance(kernel, Pass):
            yield from _pass_in_fp8(kernel, config)
        else:
            yield kernel


def _matmul_in_fp8(kernel: Matmul, name: str, d_in: int, d_out: int, rows: int) -> Iterator[Kernel]:
    """Yield the matmul, and the passes that write its operands if no other kernel does."""
    weight, times = d_in * d_out, kernel.times
    scale = Small("largest scale of a matrix", times)
    if kernel.layout == FORWARD:
        if name == "out":
            yield Pass(CAST, 3 * rows * d_in, times)
        yield from (Pass(CAST, 3 * weight, times), scale)
        if name == "qkv":  # in bf16; backward needs the scale
            yield kernel
            return
    elif kernel.layout == INPUT:
        if name != "gate and up":  # SwiGLU's backward writes the gradient of that one
            yield Pass(CAST, 3 * rows * d_out, times)
        yield Pass(TRANSPOSE, 3 * weight, times)
    else:
        yield Pass(TRANSPOSE, (2 if name == "down" else 3) * rows * d_in, times)
        yield from (scale, Pass(TRANSPOSE, 2 * rows * d_out, times))
    yield kernel._replace(precision="fp8", adds=False)
    if kernel.adds:
        yield Pass(ADD, 6 * weight, times)


def _pass_in_fp8(kernel: Pass, config: RunConfig) -> Iterator[Kernel]:
    """Yield a pass of a block with its result in FP8. All norms but the last belong to blocks; every other one writes
    bf16, and their backward does not write the norm again."""
    stream, layers = config.tokens * config.model.d_model, config.model.num_layers
    name, size, times = kernel[:3]
    if name == "add_norm":
        if times == 1:
            yield Pass("fp8_add_norm", size)
        else:
            yield from (Pass("fp8_add_norm", size - stream, layers), Pass("fp8_add_norm", size, layers - 1))
            yield kernel._replace(times=1)
    elif name == "add_norm_backward" and times == 2 * layers:
        yield kernel._replace(bytes=size - 2 * stream)
    elif name == "swiglu":
        yield Pass("fp8_swiglu", size * 5 // 6, times)
    elif name == "swiglu_backward":
        yield Pass("fp8_swiglu_backward", size * 9 // 12, times)
    else:
        yield kernel


def update_kernels(config: RunConfig) -> list[Kernel]:
    """Return the kernels of the packed optimizer's update."""
    model, s = config.model, _width(config)
    matrices = model.parameters - model.vector_parameters
    state = 2 * (2 if config.optimizer_state == "bf16" else 4)
    low_bits = 2 if s == 2 and config.optimizer_state == "fp32" else 0
    found: list[Kernel] = [
        Pass("adamw", matrices * (s + 2 * (s + low_bits + state))),
        Small("factors of the update", 20),
    ]
    if config.max_grad_norm:
        found.insert(0, Pass("norm of gradients", matrices * s))
    return found


def _width(config: RunConfig) -> int:
    """Return the bytes per element in matmuls and in the residual stream."""
    return 4 if config.precision == "fp32" else 2


def _head_widths(config: RunConfig) -> tuple[int, int]:
    """Return the columns of q and k, and of q, k and v."""
    model = config.model
    return model.q_width + model.kv_width, model.q_width + 2 * model.kv_width


def _rotary_block(config: RunConfig) -> tuple[int, int]:
    """Return the programs that share the heads of a row, and the elements of each: powers of 2."""
    model = config.model
    pairs = power_of_2(model.head_dim // 2)
    heads = max(1, min(ROTARY_ELEMENTS // (2 * pairs), power_of_2(model.num_heads)))
    return -(-model.num_heads // heads), heads * 2 * pairs


def _rotary_programs(config: RunConfig, parts: int) -> tuple[int, int]:
    """Return the programs of a rotation and their elements; each of q, k and v has as many as q needs."""
    groups, elements = _rotary_block(config)
    return config.tokens * parts * groups, elements


def _unaligned_rows(rows: int, width: int, size: int) -> tuple[int, int]:
    """Return the number of rows that do not begin at a multiple of LINE bytes, and their elements; none if all rows are
    aligned."""
    return (rows, width) if width * size % LINE else (0, 0)


def _loss_programs(rows: int, vocabulary: int) -> tuple[int, int]:
    """Return the blocks of logits that are loaded one element at a time, and their size; none if rows are aligned."""
    block = min(LOGITS, power_of_2(vocabulary))
    return (0, 0) if vocabulary % VECTOR == 0 else (rows * -(-vocabulary // block), block)


def _sharing_programs(rows: int) -> int:
    """Return the programs that share the rows of a norm's backward pass."""
    return min(rows, NORM_PROGRAMS if rows < MANY_ROWS else 2 * NORM_PROGRAMS)


def power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _attention(name: str, config: RunConfig) -> AttentionPass:
    model = config.model
    shape = (config.batch_size, model.num_heads, model.kv_heads, model.context_length, model.head_dim)
    return AttentionPass(name + attention_path(config, is_backward=name == "backward"), *shape, model.num_layers)


def attention_path(config: RunConfig, *, is_backward: bool) -> str:
    """Return the suffix of the kernels that run this package's attention in 16 bits: "" or SHORT for the Hopper
    kernels."""
    model = config.model
    elements, keys = config.tokens * model.q_width, model.context_length
    if config.attention == "flash_hopper" or (
        config.attention == "auto" and suits_hopper(elements * keys, model.head_dim)
    ):
        return SHORT if not is_backward and sees_few_keys(model.head_dim, keys, "causal") else ""
    if config.attention not in ("auto", "flash_triton"):
        return ""
    is_small = elements * keys < LAUNCH_BOUND
    if is_backward:
        return SMALL_PATH if is_small and model.head_dim <= WIDEST_GRAD else PORTABLE
    if model.head_dim > WIDEST_GRAD:
        is_small = elements * keys < WIDE_FOR_DESCRIPTORS
    by_pointer = is_small and elements < SMALLEST_FOR_DESCRIPTORS and keys < LONG_FOR_DESCRIPTORS
    return SMALL_PATH if by_pointer else PORTABLE
