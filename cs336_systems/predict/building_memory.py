"""Peak memory of building a model and its optimizer, before the first step. No torch.

A model is built with fp32 weights. PackedAdamW then allocates its own memory beside them, moves the weights there one
by one, and frees each. For a large model and a small batch this needs more memory than a step.
"""

from cs336_systems.config import RunConfig
from cs336_systems.predict.fast_memory import packed_sizes
from cs336_systems.predict.memory_model import MemoryEstimate, Tensors

SPLIT_BYTES = 12
"""Bytes per element of the int32 temporaries in which a weight is split into bf16 and its low 16 bits."""


def building_peak(config: RunConfig) -> MemoryEstimate:
    """Return the peak of building the step of `config`; AdamW allocates its state in the first step, not here."""
    t = Tensors(config)
    parts = {"parameters": t.parameters(), "buffers": t.buffers()}
    if t.parameter_rounding:
        parts["allocator rounding"] = t.parameter_rounding
    if "optimizer" in config.fast_parts:
        matrices, gains = packed_sizes(config)
        if t.low_precision:  # gains are packed after the matrices, whose fp32 weights are free by then
            parts |= {"packed weights": 4 * matrices, "gradients": 2 * matrices, "moments": 8 * matrices}
            parts["temporary"] = _largest_split(config)
        else:
            packed = matrices + gains
            parts |= {"packed weights": 4 * packed, "gradients": 4 * packed, "moments": 8 * packed}
    return MemoryEstimate(parts, sum(parts.values()), "building")


def _largest_split(config: RunConfig) -> int:
    """Return the bytes by which splitting a weight raises the peak: the temporaries of one, less those already freed.

    Weights are split in the order of the model, so the embedding or a weight of the first block is the one.
    """
    model = config.model
    table, square, wide = model.vocab_size * model.d_model, model.d_model**2, model.d_model * model.d_ff
    largest, freed = 0, 0
    for size in (table, *(square,) * 4, *(wide,) * 3):
        largest = max(largest, SPLIT_BYTES * size - 4 * freed)
        freed += size
    return largest
