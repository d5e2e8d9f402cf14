"""Names of the parts of memory, in both languages, as closed form, trace and timeline label them."""

from cs336_systems.report import terms
from cs336_systems.text import Text

PART_NAMES = {
    "parameters": terms.PARAMETERS,
    "gradients": terms.GRADIENTS,
    "optimizer state": terms.OPTIMIZER_STATE,
    "activations": terms.ACTIVATIONS,
    "weight casts": Text("weight casts", "权重的低精度副本"),
    "logits and loss": Text("logits and loss", "logits 与损失"),
    "temporary": Text("temporary", "临时"),
    "workspace": Text("workspace", "工作区"),
    "buffers": Text("buffers", "缓冲区"),
    "inputs": Text("inputs", "输入"),
    "allocator rounding": Text("allocator rounding", "分配器取整"),
    "unlabelled": Text("unlabelled", "无标签"),
}


def part_name(label: str) -> Text:
    return PART_NAMES.get(label, Text(label))
