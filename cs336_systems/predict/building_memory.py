"""Peak memory of building a model and its optimizer, before the first step. No torch.

A model is built with fp32 weights. With PackedAdamW it is built without memory, the optimizer allocates all of it, and
the weights are drawn in fp32 one module at a time.
"""

from cs336_systems.config import RunConfig
from cs336_systems.predict.fast_memory import packed_sizes
from cs336_systems.predict.memory_model import MemoryEstimate, Tensors

SPLIT_BYTES = 12
"""Bytes per element of the int32 temporaries in which a weight is split into bf16 and its low 16 bits."""


def building_peak(config: RunConfig) -> MemoryEstimate:
    """Return the peak of building the step of `config`; AdamW allocates its state in the first step, not here."""
    t = Tensors(config)
    if "optimizer" not in config.fast_parts:
        parts = {"parameters": t.parameters(), "buffers": t.buffers()}
        if t.parameter_rounding:
            parts["allocator rounding"] = t.parameter_rounding
        return MemoryEstimate(parts, sum(parts.values()), "building")
    matrices, gains = packed_sizes(config)
    packed = matrices + gains
    split = SPLIT_BYTES if t.low_precision else 0
    gradients = 2 * matrices + 4 * gains if t.low_precision else 4 * packed
    parts = {
        "packed weights": 4 * packed,
        "gradients": gradients,
        "moments": 8 * packed,
        "buffers": t.buffers(),
        "temporary": (4 + split) * _largest_weight(config),
    }
    return MemoryEstimate(parts, sum(parts.values()), "building")


def _largest_weight(config: RunConfig) -> int:
    """Return the elements of the largest weight."""
    model = config.model
    return max(model.vocab_size * model.d_model, model.d_model**2, model.d_model * model.d_ff)
