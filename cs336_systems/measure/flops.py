"""Floating-point operations of a step, from the configuration alone, and the dense peaks they are held against.

Only matrix products and attention count (2 per multiply-add), as in torch.utils.flop_counter; a causal mask does not
halve attention, there or here. `executed_flops` equals what FlopCounterMode sees. `model_flops` leaves out work that is
only done again (checkpointing, the scores that fused attention recomputes in backward); MFU is made of it.
"""

import re

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


# name pattern -> dense TFLOP/s: fp32 (CUDA cores), tf32, bf16, fp16 with fp32 accumulation. None: no such unit.
# From the vendors' data sheets; where a sheet gives sparse figures, half of them. First match counts.
_PEAKS: list[tuple[str, tuple[float, float | None, float | None, float | None]]] = [
    (r"GB200", (80.0, 1250.0, 2500.0, 2500.0)),
    (r"\bB200", (75.0, 1125.0, 2250.0, 2250.0)),
    (r"H200 NVL", (60.0, 417.5, 835.5, 835.5)),
    (r"H200|H100 80GB HBM3|H100 SXM|H800(?! PCIe)|GH200", (66.9, 494.7, 989.4, 989.4)),
    (r"H100 NVL", (60.0, 417.5, 835.5, 835.5)),
    (r"H100 PCIe|H800 PCIe", (51.2, 378.0, 756.0, 756.0)),
    (r"\bH20\b", (44.0, 74.0, 148.0, 148.0)),
    (r"A100|A800", (19.5, 156.0, 312.0, 312.0)),
    (r"RTX PRO 6000 Blackwell", (125.0, 251.9, 503.8, 503.8)),
    (r"RTX 6000 Ada", (91.1, 182.1, 364.2, 364.2)),
    (r"L40S", (91.6, 183.0, 362.0, 362.0)),
    (r"L40\b", (90.5, 90.5, 181.0, 181.0)),
    (r"\bL20\b", (59.8, 59.8, 119.5, 119.5)),
    (r"\bL4\b", (30.3, 60.0, 121.0, 121.0)),
    (r"RTX A6000", (38.7, 77.4, 154.8, 154.8)),
    (r"\bA40\b", (37.4, 74.8, 149.7, 149.7)),
    (r"\bA10G", (31.5, 35.0, 70.0, 70.0)),
    (r"\bA10\b", (31.2, 62.5, 125.0, 125.0)),
    (r"\bA30\b", (10.3, 82.0, 165.0, 165.0)),
    (r"RTX 5090(?! D)", (104.8, 104.8, 209.5, 209.5)),
    (r"RTX 5080", (56.3, 56.3, 112.6, 112.6)),
    (r"RTX 4090 D", (73.5, 73.5, 147.0, 147.0)),
    (r"RTX 4090", (82.6, 82.6, 165.2, 165.2)),
    (r"RTX 4080 SUPER", (52.2, 52.2, 104.4, 104.4)),
    (r"RTX 4080", (48.7, 48.7, 97.5, 97.5)),
    (r"RTX 3090 Ti", (40.0, 40.0, 80.0, 80.0)),
    (r"RTX 3090", (35.6, 35.6, 71.2, 71.2)),
    (r"RTX 3080", (29.8, 29.8, 59.5, 59.5)),
    (r"RTX 2080 Ti", (13.4, None, None, 53.8)),
    (r"V100", (15.7, None, None, 125.0)),
    (r"\bT4\b", (8.1, None, None, 65.0)),
]
_COLUMN = {"fp32": 0, "tf32": 1, "bf16": 2, "fp16": 3}


def peak_flops(gpu: str | None, precision: str) -> float | None:
    """Dense peak in FLOP/s of a GPU by its driver's name, or None where it is not known: never a guess."""
    for pattern, peaks in _PEAKS:
        if gpu and re.search(pattern, gpu):
            peak = peaks[_COLUMN[precision]]
            return None if peak is None else peak * 1e12
    return None
