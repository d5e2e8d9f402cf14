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
from cs336_systems.predict.building_memory import building_peak
from cs336_systems.predict.memory_model import Breakdown, breakdown
from cs336_systems.predict.memory_planner import Rates, budget_bytes, plan_memory
from cs336_systems.predict.model_flags import ShapeArguments
from cs336_systems.record import GIB, MIB
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Language, Text, say


@dataclass(frozen=True)
class CalculateArguments(ShapeArguments):
    lang: str | None = flag(None, "language of the output (default: the locale's)", ("en", "zh"))


RULE = "=" * 80
_PARTS = {
    "parameters": Text("Model parameters", "模型参数"),
    "gradients": Text("Gradients", "梯度内存"),
    "optimizer state": Text("Optimizer state (AdamW)", "优化器状态 (AdamW)"),
    "activations": Text("Activations", "激活值内存"),
}
"""Parts that have a paragraph of their own."""
_OTHER = Text(
    "Logits and loss, temporary tensors, weight casts, workspace, inputs, allocator rounding",
    "logits 与 loss、临时张量、权重低精度副本、工作区、输入、分配器取整",
)


def describe(config: RunConfig, language: Language) -> str:
    """The breakdown as numbered paragraphs whose figures, as printed, add up to the total as printed."""
    full = breakdown(config)
    sizes = {name: round(full.peak.parts.get(name, 0) / GIB, 2) for name in _PARTS}
    total = round(full.peak.peak / GIB, 2)
    memory = Text("memory", "内存占用").in_(language)
    lines = [RULE, _title(config).in_(language), RULE, ""]
    lines += [
        say(
            "Memory at the peak, which occurs in {}", "峰值时刻的内存占用明细（峰值出现在 {} 阶段）", full.peak.where
        ).in_(language),
        RULE,
    ]
    notes = _notes(config, full)
    for number, (name, heading) in enumerate(_PARTS.items(), start=1):
        lines += ["", f"{number}. {heading.in_(language)}:", f"   {memory}: {sizes[name]:.2f} GiB"]
        lines += [f"   ({notes[name].in_(language)})"]
    lines += ["", f"5. {_OTHER.in_(language)}:", f"   {memory}: {total - sum(sizes.values()):.2f} GiB"]
    total_name = Text("Total (peak)", "总内存占用 (峰值)").in_(language)
    return "\n".join([*lines, "", f"6. {total_name}:", f"   {total:.2f} GiB"])


def _title(config: RunConfig) -> Text:
    return say(
        "Memory of the {} model ({}, {}, batch {}, context {})",
        "{} 模型内存占用计算（{}，{}，batch {}，context {}）",
        *(config.size, config.precision, config.mode, str(config.batch_size), str(config.model.context_length)),
    )


def _notes(config: RunConfig, full: Breakdown) -> dict[str, Text]:
    return {
        "parameters": say("number of parameters: {}", "总参数数: {}", f"{config.model.parameters:,}"),
        "gradients": say(
            "alive at that moment; {} GiB once all are there",
            "该时刻存活的部分；全部梯度为 {} GiB",
            f"{full.gradients / GIB:.2f}",
        ),
        "optimizer state": (
            Text("momentum, variance, low 16 bits of the weights", "momentum、variance 与权重的低 16 位")
            if "optimizer" in config.fast_parts
            else Text("momentum + variance = 2 x parameters", "momentum + variance = 2 × 参数大小")
        ),
        "activations": say(
            "alive at that moment; forward keeps {} GiB in all, {} MiB in each block",
            "该时刻存活的部分；前向共保存 {} GiB，每层 {} MiB",
            *(f"{full.activations / GIB:.2f}", f"{full.activations_per_block / MIB:.1f}"),
        ),
    }


def system_language() -> Language:
    names = [os.environ.get(name, "") for name in ("LC_ALL", "LC_MESSAGES", "LANG")]
    name = next((name for name in names if name), locale.getlocale()[0] or "")
    return "zh" if name.lower().startswith("zh") else "en"


def calculate(arguments: CalculateArguments) -> int:
    # The write-up that this answers to computed the 2.7B model at context 256.
    fields = {} if arguments.context_length is not None or arguments.size else {"context_length": 256}
    config = arguments.run_config(default_size="2.7B", device="cuda", **fields)
    language: Language = "zh" if (arguments.lang or system_language()) == "zh" else "en"
    print(describe(config, language))
    return 0


# -- `cs336 memory` ---------------------------------------------------------------------------------------------------


def memory_table(config: RunConfig, *, trace: bool) -> Table:
    """The parts in full and at the peak, by the closed form and, on request, by a trace of the operators."""
    full = breakdown(config) if config.model_factory is None and not config.plans_whole_blocks else None
    traced = _traced(config) if trace or full is None else None
    columns = [word(Text("part", "部分"))]
    columns += [Column(Text("in full", "全部"), "GiB"), Column(Text("at the peak", "峰值处"), "GiB")] if full else []
    columns += [Column(Text("at the peak, traced", "峰值处，追踪"), "GiB")] if traced else []
    rows: list[list[str | Text]] = []
    for name in _part_names(full, traced):
        row: list[str | Text] = [name]
        if full:
            row += [_gib(_in_full(full).get(name)), _gib(full.peak.parts.get(name))]
        if traced:
            row.append(_gib(traced.parts.get(name)))
        rows.append(row)
    rows.append(["peak", *(["", _gib(full.peak.peak)] if full else []), *([_gib(traced.peak)] if traced else [])])
    name = config.model_factory or config.size
    title = say(
        "memory of {}: {}, {}, attention {}, batch {}, context {}{}",
        "{} 的显存：{}，{}，注意力 {}，batch {}，context {}{}",
        *(name, config.mode, config.precision, config.attention),
        *(str(config.batch_size), str(config.model.context_length)),
        Text("") if config.fast == "off" else say(", fast {}", "，快速步 {}", config.fast),
    )
    return Table(title, columns, rows, _table_notes(config, full, traced))


def _table_notes(config: RunConfig, full: Breakdown | None, traced: Any) -> list[Text]:
    where = full.peak.where if full else traced.where
    notes = [
        say(
            "the peak occurs in {}; parts in full are not all alive at once",
            "峰值出现在 {} 阶段；各部分的全部不会同时存活",
            where,
        )
    ]
    if full:
        sizes = (f"{full.activations_per_block / MIB:.1f}", f"{full.residual / MIB:.1f}")
        notes.append(
            say(
                "{} MiB kept by a block, {} MiB a tensor of the residual stream",
                "每块保留 {} MiB，残差流的每个张量 {} MiB",
                *sizes,
            )
        )
        notes.append(say("{} parameters", "{} 个参数", f"{config.model.parameters:,}"))
        notes += _building_notes(config, full.peak.peak)
    if traced is None:
        notes.append(
            Text(
                "add --trace to compare this with a trace of every operator (imports torch)",
                "加上 --trace 可与逐算子追踪的结果对比（会导入 torch）",
            )
        )
    return notes


def _building_notes(config: RunConfig, step: int) -> list[Text]:
    """Say what building the model needs, where that is more than a step."""
    building = building_peak(config)
    if building.peak <= step:
        return []
    return [
        say(
            "building the model needs more than a step: {} GiB, with its largest weight in fp32, too",
            "构建模型所需显存多于一步：{} GiB，此时最大的 fp32 权重与优化器的内存同时存在",
            f"{building.peak / GIB:.3f}",
        )
    ]


def _traced(config: RunConfig) -> Any:
    from cs336_systems.measure.block_planner import plan_blocks
    from cs336_systems.measure.memory_trace import predict_by_tracing

    if not config.memory_budget:
        return predict_by_tracing(config)
    budget = budget_bytes(config.memory_budget)
    if config.plans_whole_blocks:
        return plan_blocks(config, budget, Rates.of(None)).estimate
    return predict_by_tracing(config, plan=plan_memory(config, budget).plan)


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
