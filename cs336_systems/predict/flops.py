"""Floating-point operations of a step, from the configuration alone.

Only matrix products and attention count (2 per multiply-add), as in torch.utils.flop_counter; a causal mask does not
halve attention, there or here. `executed_flops` equals what FlopCounterMode sees. `model_flops` leaves out work that is
only done again (checkpointing, the scores that fused attention recomputes in backward); MFU is made of it.
"""

from cs336_systems.config import RunConfig


def forward_flops(config: RunConfig) -> int:
    return _linear_flops(config) + _attention_flops(config)


def model_flops(config: RunConfig) -> int:
    """Of one step in the config's mode; a backward pass is two matrix products for each one of forward."""
    passes = 1 if config.mode in ("inference", "forward") else 3
    return passes * forward_flops(config)


def executed_flops(config: RunConfig) -> int:
    """What a FLOP counter sees in one eager step."""
    flops = model_flops(config)
    if config.mode in ("inference", "forward"):
        return flops
    if config.attention != "reference":
        flops += _attention_flops(config) // 2  # fused backward forms the scores again: five products for two
    if config.checkpoint_blocks:
        flops += _recomputed_flops(config)
    return flops


def _linear_flops(config: RunConfig) -> int:
    return 2 * config.tokens * config.model.linear_parameters


def _attention_flops(config: RunConfig) -> int:
    model = config.model
    return model.num_layers * 2 * 2 * config.batch_size * model.context_length**2 * model.d_model


def _recomputed_flops(config: RunConfig) -> int:
    """All blocks again, but for the last projection of each group: recomputation stops when it has what it needs."""
    model, group = config.model, config.checkpoint_blocks
    blocks = forward_flops(config) - 2 * config.tokens * model.vocab_size * model.d_model
    groups = -(-model.num_layers // group)
    return blocks - groups * 2 * config.tokens * model.d_model * model.d_ff
