"""Floating-point operations of a step, computed from the configuration.

Only matmuls and attention count (2 per multiply-add), as in torch.utils.flop_counter; neither halves attention for a
causal mask. `executed_flops` equals the count of FlopCounterMode. `model_flops`, the basis of MFU, excludes
recomputation (activation checkpointing, the scores that fused attention recomputes in backward).
"""

from cs336_systems.config import RunConfig


def forward_flops(config: RunConfig) -> int:
    return 2 * config.tokens * config.model.linear_parameters + _attention_flops(config)


def model_flops(config: RunConfig) -> int:
    """Return the FLOPs of one step in the config's mode; backward runs two matmuls for each matmul of forward."""
    passes = 1 if config.mode in ("inference", "forward") else 3
    return passes * forward_flops(config)


def causal_model_flops(config: RunConfig) -> int:
    """Return the same without the half of attention's scores that a causal mask hides."""
    passes = 1 if config.mode in ("inference", "forward") else 3
    return model_flops(config) - passes * _attention_flops(config) // 2


def executed_flops(config: RunConfig) -> int:
    """Return the FLOPs that a FLOP counter counts in one eager step."""
    flops = model_flops(config)
    if config.mode in ("inference", "forward"):
        return flops
    if config.attention != "reference":
        flops += _attention_flops(config) // 2  # fused backward recomputes the scores: five matmuls for forward's two
    if config.checkpoint_blocks:
        flops += _recomputed_flops(config)
    return flops


def _attention_flops(config: RunConfig) -> int:
    model = config.model
    return model.num_layers * 2 * 2 * config.batch_size * model.context_length**2 * model.q_width


def _recomputed_flops(config: RunConfig) -> int:
    """Return the FLOPs of recomputing all blocks but the last projection of each group, which backward can skip."""
    model, group = config.model, config.checkpoint_blocks
    blocks = forward_flops(config) - 2 * config.tokens * model.vocab_size * model.d_model
    groups = -(-model.num_layers // group)
    return blocks - groups * 2 * config.tokens * model.d_model * model.d_ff
