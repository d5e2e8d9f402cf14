"""Names for readers: what charts and sentences call an implementation or a model, and the colour of each category.

A category has one colour in every chart. Colours are numbers: those of page.css, and of the palette of picture.py.
"""

import re
from typing import Any

from cs336_systems.config import COURSE_SIZES, model_config
from cs336_systems.text import Text, say

COLORS = 12
"""Number of colours; further series repeat them with another marker or pattern."""

IMPLEMENTATIONS = {
    "auto": Text("ours", "本项目"),
    "flash_hopper": Text("ours, Hopper", "本项目，Hopper"),
    "flash_triton": Text("ours, portable", "本项目，通用"),
    "flash_torch": Text("ours, in PyTorch", "本项目，PyTorch"),
    "flash_attention_4": Text("FlashAttention-4"),
    "sdpa_cudnn": Text("cuDNN"),
    "sdpa_flash": Text("FlashAttention-2 (SDPA)"),
    "sdpa_efficient": Text("memory-efficient (SDPA)", "memory-efficient（SDPA）"),
    "sdpa": Text("SDPA"),
    "flex": Text("FlexAttention"),
    "reference": Text("naive", "朴素"),
    "compiled": Text("naive, compiled", "朴素，编译"),
}
"""Implementations of attention."""

_COLORS = {
    **dict.fromkeys(("ours", "ours, Hopper", "this package", "measured", "forward", "matmul"), 0),
    **dict.fromkeys(("ours, portable", "backward", "predicted", "parameters"), 1),
    **dict.fromkeys(("ours, in PyTorch", "optimizer", "optimizer state"), 2),
    **dict.fromkeys(("FlashAttention-4", "gradients", "loss"), 3),
    **dict.fromkeys(("cuDNN", "activations", "softmax"), 5),
    **dict.fromkeys(("FlashAttention-2 (SDPA)", "sync", "communication"), 4),
    **dict.fromkeys(("naive", "rival", "other", "idle", "working"), 6),
    **dict.fromkeys(("FlexAttention",), 7),
    **dict.fromkeys(("memory-efficient (SDPA)",), 9),
    **dict.fromkeys(("naive, compiled",), 11),
    **dict.fromkeys(("SDPA",), 8),
    **dict.fromkeys(("ratio of medians",), 0),
    **dict.fromkeys(("geometric mean",), 5),
    **dict.fromkeys(("fp32",), 8),
    **dict.fromkeys(("bf16",), 0),
    **dict.fromkeys(("fp16",), 10),
}
"""English name of a category -> its colour."""


def color_of_name(name: str) -> int | None:
    return _COLORS.get(name)


def implementation_name(name: Any) -> Text:
    """The name of an attention implementation for readers."""
    return IMPLEMENTATIONS.get(str(name)) or Text(str(name))


def size_name(size: Any) -> Text:
    """The name of a model's size: `2560/10240/1/32` (d_model/d_ff/layers/heads) is "2.7B, 1 block"."""
    found = re.fullmatch(r"(\d+)/(\d+)/(\d+)/(\d+)", str(size))
    if not found:
        return Text(str(size))
    width, inner, layers, heads = map(int, found.groups())
    for name in COURSE_SIZES:
        model = model_config(name)
        if (model.d_model, model.d_ff, model.num_heads) == (width, inner, heads):
            if model.num_layers == layers:
                return Text(name)
            return say("{}, {}", "{}，{}", name, blocks(layers))
    return Text(str(size))


def blocks(number: int) -> Text:
    return Text("1 block" if number == 1 else f"{number} blocks", f"{number} 块")
