"""Peak memory of building a model and its optimizer, before the first step. No torch.

A model is built with fp32 weights. With PackedAdamW it is built without memory, the optimizer allocates all of it, and
the weights are drawn in fp32 one module at a time.
"""

from cs336_systems.config import RunConfig
from cs336_systems.predict.fast_memory import packs
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
    every = packs(config)
    splits = any(pack.low_bits for pack in every)
    parts = {
        "packed weights": sum(pack.size * (pack.weight + pack.low_bits) for pack in every),
        "gradients": sum(pack.gradients * pack.weight for pack in every),
        "moments": sum(2 * pack.size * pack.moment for pack in every),
        "buffers": t.buffers(),
        "temporary": (4 + (SPLIT_BYTES if splits else 0)) * _largest_weight(config),
    }
    return MemoryEstimate(parts, sum(parts.values()), "building")


def _largest_weight(config: RunConfig) -> int:
    """Return the elements of the largest weight."""
    model = config.model
    return model.d_model * max(model.vocab_size, model.q_width, model.d_ff)
