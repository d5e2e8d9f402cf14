"""How much memory a training step needs, part by part, without a GPU and without torch.

    python cs336_systems/benchmark/calculate_memory.py
    python cs336_systems/benchmark/calculate_memory.py --size xl --context_length 512 --precision bf16 --lang zh

The parts are those alive at the moment of the peak, so they add up to it.
"""

import locale
import os
from dataclasses import dataclass
from typing import Any

from cs336_systems.config import RunConfig, flag
from cs336_systems.predict.memory_model import Breakdown, breakdown
from cs336_systems.predict.model_flags import ShapeArguments
from cs336_systems.record import GIB, MIB
from cs336_systems.table import Column, Table


@dataclass(frozen=True)
class CalculateArguments(ShapeArguments):
    lang: str | None = flag(None, "language of the output (default: the locale's)", ("en", "zh"))


TEXTS = {
    "en": {
        "title": "Memory of the {size} model ({precision}, {mode}, batch {batch}, context {context})",
        "heading": "Memory at the peak, which occurs in {where}",
        "parameters": "Model parameters",
        "count": "number of parameters: {count:,}",
        "gradients": "Gradients",
        "gradients note": "alive at that moment; {full:.2f} GiB once all are there",
        "optimizer state": "Optimizer state (AdamW)",
        "optimizer note": "momentum + variance = 2 x parameters",
        "activations": "Activations",
        "activations note": "alive at that moment; forward keeps {total:.2f} GiB in all, {block:.1f} MiB in each block",
        "other": "Logits and loss, temporary tensors, weight casts, workspace, inputs, allocator rounding",
        "total": "Total (peak)",
        "memory": "memory",
    },
    "zh": {
        "title": "{size} 模型内存占用计算（{precision}，{mode}，batch {batch}，context {context}）",
        "heading": "峰值时刻的内存占用明细（峰值出现在 {where} 阶段）",
        "parameters": "模型参数",
        "count": "总参数数: {count:,}",
        "gradients": "梯度内存",
        "gradients note": "该时刻存活的部分；全部梯度为 {full:.2f} GiB",
        "optimizer state": "优化器状态 (AdamW)",
        "optimizer note": "momentum + variance = 2 × 参数大小",
        "activations": "激活值内存",
        "activations note": "该时刻存活的部分；前向共保存 {total:.2f} GiB，每层 {block:.1f} MiB",
        "other": "logits 与 loss、临时张量、权重低精度副本、工作区、输入、分配器取整",
        "total": "总内存占用 (峰值)",
        "memory": "内存占用",
    },
}
_OWN_LINE = ("parameters", "gradients", "optimizer state", "activations")


def describe(config: RunConfig, lang: str) -> str:
    """The breakdown as numbered paragraphs whose figures, as printed, add up to the total as printed."""
    text, full = TEXTS[lang], breakdown(config)
    parts = full.peak.parts
    sizes = {name: round(parts.get(name, 0) / GIB, 2) for name in _OWN_LINE}
    total = round(full.peak.peak / GIB, 2)
    notes = {
        "parameters": text["count"].format(count=config.model.parameters),
        "gradients": text["gradients note"].format(full=full.gradients / GIB),
        "optimizer state": text["optimizer note"],
        "activations": text["activations note"].format(
            total=full.activations / GIB, block=full.activations_per_block / MIB
        ),
    }
    rule = "=" * 80
    title = text["title"].format(
        size=config.size, precision=config.precision, mode=config.mode, batch=config.batch_size,
        context=config.model.context_length,
    )  # fmt: skip
    lines = [rule, title, rule, "", text["heading"].format(where=full.peak.where), rule]
    for number, name in enumerate(_OWN_LINE, start=1):
        lines += ["", f"{number}. {text[name]}:", f"   {text['memory']}: {sizes[name]:.2f} GiB", f"   ({notes[name]})"]
    lines += ["", f"5. {text['other']}:", f"   {text['memory']}: {total - sum(sizes.values()):.2f} GiB"]
    return "\n".join([*lines, "", f"6. {text['total']}:", f"   {total:.2f} GiB"])


def system_language() -> str:
    names = [os.environ.get(name, "") for name in ("LC_ALL", "LC_MESSAGES", "LANG")]
    name = next((name for name in names if name), locale.getlocale()[0] or "")
    return "zh" if name.lower().startswith("zh") else "en"


def calculate(arguments: CalculateArguments) -> int:
    # The write-up that this answers to computed the 2.7B model at context 256.
    fields = {} if arguments.context_length or arguments.size else {"context_length": 256}
    config = arguments.run_config(default_size="2.7B", device="cuda", **fields)
    print(describe(config, arguments.lang or system_language()))
    return 0


# -- `cs336 memory` ---------------------------------------------------------------------------------------------------


def memory_table(config: RunConfig, *, trace: bool) -> Table:
    """The parts in full and at the peak, by the closed form and, on request, by a trace of the operators."""
    if config.model_factory is not None:
        trace = True
    full = breakdown(config) if config.model_factory is None else None
    traced = _traced(config) if trace else None
    columns = [Column("part", numeric=False)]
    columns += [Column("in full", "GiB"), Column("at the peak", "GiB")] if full else []
    columns += [Column("at the peak, traced", "GiB")] if traced else []
    rows = []
    for name in _part_names(full, traced):
        row = [name]
        if full:
            row += [_gib(_in_full(full).get(name)), _gib(full.peak.parts.get(name))]
        if traced:
            row.append(_gib(traced.parts.get(name)))
        rows.append(row)
    rows.append(["peak", *(["", _gib(full.peak.peak)] if full else []), *([_gib(traced.peak)] if traced else [])])
    where = (full.peak if full else traced).where  # type: ignore[union-attr]
    notes = [f"the peak occurs in {where}; parts in full are not all alive at once"]
    if full:
        block = f"{full.activations_per_block / MIB:.1f} MiB kept by a block"
        notes.append(f"{block}, {full.residual / MIB:.1f} MiB a tensor of the residual stream")
        notes.append(f"{config.model.parameters:,} parameters")
    if not trace:
        notes.append("add --trace to hold this against a trace of every operator (imports torch)")
    name = config.model_factory or config.size
    shape = f"batch {config.batch_size}, context {config.model.context_length}"
    title = f"memory of {name}: {config.mode}, {config.precision}, attention {config.attention}, {shape}"
    return Table(title, columns, rows, notes)


def _traced(config: RunConfig) -> Any:
    from cs336_systems.measure.memory_trace import predict_by_tracing

    return predict_by_tracing(config)


def _in_full(full: Breakdown) -> dict[str, int]:
    return {
        "parameters": full.parameters,
        "gradients": full.gradients,
        "optimizer state": full.optimizer_state,
        "activations": full.activations,
        "logits and loss": full.logits_and_loss,
        "weight casts": full.weight_casts,
        "workspace": full.workspace,
    }


def _part_names(full: Breakdown | None, traced: Any) -> list[str]:
    order = (
        "parameters", "gradients", "optimizer state", "activations", "weight casts", "logits and loss", "temporary",
        "workspace", "buffers", "inputs", "allocator rounding",
    )  # fmt: skip
    present = set(full.peak.parts) | {k for k, v in _in_full(full).items() if v} if full else set()
    present |= set(traced.parts) if traced else set()
    return [name for name in order if name in present]


def _gib(size: int | None) -> str:
    return "" if not size else f"{size / GIB:.3f}"
