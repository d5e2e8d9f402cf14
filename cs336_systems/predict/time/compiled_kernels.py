"""The kernels of a step whose model torch.compile has compiled: the matmuls of the eager step, and one pass for each
chain of operators between them, which reads its inputs and writes its outputs once. No torch.

Inductor itself decides what to fuse; this list assumes the best case. Loss and optimizer stay eager.
"""

from collections.abc import Iterator

from cs336_systems.config import RunConfig
from cs336_systems.predict.time.eager_kernels import CAST, NARROW, eager_phases, width
from cs336_systems.predict.time.step_kernels import SORTED_ROWS, AttentionPass, Kernel, Matmul, Pass

FUSED, FUSED_NORM_GRADIENT = "fused", "fused_norm_gradient"
"""Names of the passes that inductor generates, and of sums over all tokens, which it splits in two."""


def compiled_phases(config: RunConfig) -> dict[str, list[Kernel]]:
    """Return the kernels of each phase."""
    eager = eager_phases(config)
    found = {"forward": [*_kept(eager["forward"], config), *_forward_passes(config)]}
    if "loss" in eager:
        found["loss"] = eager["loss"]
        found["backward"] = [*_kept(eager["backward"], config), *_backward_passes(config)]
    if "optimizer" in eager:
        found["optimizer"] = eager["optimizer"]
    return found


def _kept(kernels: list[Kernel], config: RunConfig) -> Iterator[Kernel]:
    """Yield the kernels that compilation does not change: matmuls and fused attention, and casts of weights and
    gradients."""
    weights = _weight_sizes(config)
    for kernel in kernels:
        is_weight_cast = isinstance(kernel, Pass) and kernel.name in (CAST, NARROW) and kernel.bytes // 6 in weights
        if isinstance(kernel, Matmul | AttentionPass) or is_weight_cast:
            yield kernel


def _weight_sizes(config: RunConfig) -> set[int]:
    """Return the number of elements of weights, except where an activation has the same size: those count as
    activations."""
    model, rows = config.model, config.tokens
    d, q, kv, f = model.d_model, model.q_width, model.kv_width, model.d_ff
    scores = config.batch_size * model.num_heads * model.context_length**2
    activations = {rows * d, rows * q, rows * kv, rows * f, rows * model.vocab_size, scores}
    return {d * q, d * kv, d * f, d * model.vocab_size} - activations


def _forward_passes(config: RunConfig) -> Iterator[Kernel]:
    model, rows, s, layers = config.model, config.tokens, width(config), config.model.num_layers
    stream, q, kv, f = rows * model.d_model, rows * model.q_width, rows * model.kv_width, rows * model.d_ff
    yield Pass(FUSED, stream * (4 + 4 + s))  # the embedding and the first norm
    yield Pass(FUSED, stream * (4 + s + 4 + s), 2 * layers)  # the residual's sum and a norm
    yield Pass(FUSED, 2 * s * q, layers)
    yield Pass(FUSED, 2 * s * kv, layers)
    if config.attention == "reference":
        scores = config.batch_size * model.num_heads * model.context_length**2
        yield Pass(FUSED, scores * (s + s), layers)  # mask and softmax
        yield Pass(FUSED, 2 * s * q, 2 * layers)  # values and results, copied
    yield Pass(FUSED, 3 * s * f, layers)


def _backward_passes(config: RunConfig) -> Iterator[Kernel]:
    model, rows, s, layers = config.model, config.tokens, width(config), config.model.num_layers
    stream, q, kv, f = rows * model.d_model, rows * model.q_width, rows * model.kv_width, rows * model.d_ff
    table = model.vocab_size * model.d_model
    yield Pass(FUSED, stream * (s + 4 + 4))
    yield Pass(FUSED, 6 * s * f, layers)  # of the activation, and its product again
    yield Pass(FUSED, stream * (2 * s + 4 + 4 + 4 + s), layers)  # of the second norm
    yield Pass(FUSED, stream * (3 * s + 4 + 4 + 4 + s), layers)  # of the first
    yield Pass(FUSED_NORM_GRADIENT, stream * (s + 4), 2 * layers)
    yield Pass(FUSED, 2 * s * q, layers)
    yield Pass(FUSED, 2 * s * kv, 2 * layers)
    if config.attention == "reference":
        scores = config.batch_size * model.num_heads * model.context_length**2
        yield Pass(FUSED, scores * (s + s + s), layers)
        yield Pass(FUSED, 2 * s * q, 2 * layers)
    yield Pass("fill", 4 * table)
    yield Pass("embedding_backward" if rows > SORTED_ROWS else "embedding_backward_unsorted", 8 * stream)
