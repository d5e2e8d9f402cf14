"""Names for readers: what charts and sentences call an implementation or a model, and the colour of each category.

A category has one colour in every chart. Colours are numbers: those of page.css, and of the palette of picture.py.
"""

import re
from collections.abc import Mapping
from typing import Any

from cs336_systems.config import COURSE_SIZES, model_config
from cs336_systems.files import is_number
from cs336_systems.predict.rank_shards import Mesh
from cs336_systems.report import terms
from cs336_systems.text import Text, say

COLORS = 12
"""Number of colours; further series repeat them with another marker or pattern."""

IMPLEMENTATIONS = {
    "auto": Text("ours", "本项目"),
    "flash_hopper": Text("ours, Hopper", "本项目，Hopper"),
    "flash_hopper_repeatable": Text("ours, Hopper, repeatable", "本项目，Hopper，可重复"),
    "flash_triton": Text("ours, portable", "本项目，通用"),
    "flash_torch": Text("ours, in PyTorch", "本项目，PyTorch"),
    "flash_attention_4": Text("FlashAttention-4"),
    "sdpa_cudnn": Text("cuDNN"),
    "sdpa_flash": Text("FlashAttention-2 (SDPA)"),
    "sdpa_efficient": Text("memory-efficient (SDPA)", "memory-efficient（SDPA）"),
    "sdpa": Text("SDPA"),
    "flex": Text("FlexAttention"),
    "torch_varlen": Text("PyTorch varlen"),
    "padded": Text("padded batch", "填充后的批"),
    "reference": Text("naive", "朴素"),
    "compiled": Text("naive, compiled", "朴素，编译"),
}
"""Implementations of attention."""

_CATEGORIES = (
    (
        "ours",
        "ours, Hopper",
        "ours, Hopper, repeatable",
        "this package",
        "measured",
        "forward",
        "matmul",
        "bf16",
        "ratio of medians",
    ),
    ("ours, portable", "backward", "predicted", "parameters"),
    ("ours, in PyTorch", "optimizer", "optimizer state"),
    ("FlashAttention-4", "gradients", "loss"),
    ("FlashAttention-2 (SDPA)", "PyTorch varlen", "sync", "communication", "communication alone"),
    ("cuDNN", "activations", "softmax", "softmax/reduction", "exposed", "validation", "geometric mean"),
    ("naive", "rival", "other", "idle", "PyTorch", "fp32", "single steps", "working"),
    ("FlexAttention", "elementwise", "weight casts", "all-gather"),
    ("SDPA", "broadcast"),
    ("memory-efficient (SDPA)", "copy", "logits and loss", "all-reduce"),
    ("fp16", "padded batch"),
    ("naive, compiled", "attention", "temporary", "reduce-scatter"),
)
"""English names of categories, by colour. Names that share a colour never share a chart."""
_COLORS = {name: color for color, names in enumerate(_CATEGORIES) for name in names}


def color_of_name(name: str) -> int | None:
    return _COLORS.get(name)


def implementation_name(name: Any) -> Text:
    """Return the name of an attention implementation for readers."""
    return IMPLEMENTATIONS.get(str(name)) or Text(str(name))


ATTENTION_NAMES = {
    "auto": Text("our attention", "本项目的注意力"),
    "flash_hopper": Text("our Hopper kernel", "本项目的 Hopper 内核"),
    "flash_hopper_repeatable": Text("our repeatable Hopper kernel", "本项目可重复的 Hopper 内核"),
    "flash_triton": Text("our portable kernel", "本项目的通用内核"),
    "flash_torch": Text("our attention in PyTorch", "本项目的 PyTorch 注意力"),
    "sdpa_flash": Text("FlashAttention-2 in SDPA", "SDPA 的 FlashAttention-2"),
    "sdpa_efficient": Text("memory-efficient SDPA"),
    "torch_varlen": Text("variable-length attention in PyTorch", "PyTorch 的变长注意力"),
    "padded": Text("a padded batch", "填充后的批"),
    "reference": Text("naive attention", "朴素注意力"),
    "compiled": Text("compiled naive attention", "编译后的朴素注意力"),
}
"""Implementations whose names need a noun in a sentence."""


def attention_name(name: Any) -> Text:
    """Return the name of an attention implementation in a sentence."""
    return ATTENTION_NAMES.get(str(name)) or implementation_name(name)


PART_NAMES = {
    "parameters": terms.PARAMETERS,
    "gradients": terms.GRADIENTS,
    "gradient buckets": Text("gradient buckets", "梯度桶"),
    "optimizer state": terms.OPTIMIZER_STATE,
    "activations": terms.ACTIVATIONS,
    "activations, offloaded": Text("activations, offloaded", "卸载中的激活值"),
    "activations, fetched": Text("activations, fetched", "取回的激活值"),
    "activations, recomputed": Text("activations, recomputed", "重计算的激活值"),
    "weight casts": Text("weight casts", "权重的低精度副本"),
    "logits and loss": Text("logits and loss", "logits 与损失"),
    "temporary": Text("temporary", "临时"),
    "workspace": Text("workspace", "工作区"),
    "buffers": Text("buffers", "缓冲区"),
    "inputs": Text("inputs", "输入"),
    "allocator rounding": Text("allocator rounding", "分配器取整"),
    "unlabelled": Text("unlabelled", "无标签"),
}
"""Parts of memory as closed form, trace and timeline label them."""


def part_name(label: str) -> Text:
    return PART_NAMES.get(label, Text(label))


def parallel_name(settings: Mapping[str, Any], ranks: int) -> str:
    """Return how the ranks of a training run share the work: the wrapper of `--parallel`, or torch's engine with the
    axes of its mesh that are not 1."""
    if settings.get("engine") != "torch":
        return str(settings.get("parallel") or "")
    axes = {name: settings.get(name) for name in Mesh._fields}
    mesh = Mesh(**{name: int(size) for name, size in axes.items() if size is not None and is_number(size)})
    if mesh.dp_shard == 0:  # all ranks that the other axes leave
        mesh = mesh._replace(dp_shard=max(1, ranks // max(1, mesh._replace(dp_shard=1).gpus)))
    shown = [f"{name} {size}" for name, size in mesh._asdict().items() if size != 1]
    return f"torch, {' x '.join(shown)}" if shown else "torch"


PARALLEL_SETTINGS = ("engine", *Mesh._fields)
"""Settings that `parallel_name` shows, besides `parallel`."""


def size_name(size: Any) -> Text:
    """Return the name of a model's size: `2560/10240/1/32` (d_model/d_ff/layers/heads) is "2.7B, 1 block". What makes
    it another family follows in parentheses."""
    found = re.fullmatch(r"(\d+)/(\d+)/(\d+)/(\d+)((?:/\w+)*)", str(size))
    if not found:
        return Text(str(size))
    width, inner, layers, heads = map(int, found.groups()[:4])
    if family := ", ".join(part for part in found[5].split("/") if part):
        return say("width {}, {} ({})", "宽度 {}，{}（{}）", str(width), blocks(layers), family)
    for name in COURSE_SIZES:
        model = model_config(name)
        if (model.d_model, model.d_ff, model.num_heads) == (width, inner, heads):
            if model.num_layers == layers:
                return Text(name)
            return say("{}, {}", "{}，{}", name, blocks(layers))
    return say("width {}, {}", "宽度 {}，{}", str(width), blocks(layers))


def blocks(number: int) -> Text:
    return Text("1 block" if number == 1 else f"{number} blocks", f"{number} 块")
