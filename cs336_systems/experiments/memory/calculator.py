"""How much memory a training step needs, part by part, without a GPU and without torch.

    python cs336_systems/benchmark/calculate_memory.py
    python cs336_systems/benchmark/calculate_memory.py --size xl --context_length 512 --precision bf16 --lang zh

The parts are those alive at the moment of the peak, so they add up to it.
"""

import locale
import os
from dataclasses import dataclass
from typing import Any

from cs336_systems.config import RunConfig, UserError, flag
from cs336_systems.experiments.ranks.rehearsal_command import verdict
from cs336_systems.predict.activation_plan import KEEP, OFFLOAD, RECOMPUTE, Plan
from cs336_systems.predict.building_memory import building_peak
from cs336_systems.predict.fit import gpu_bytes, reference_notes, safe_peak, usable_bytes
from cs336_systems.predict.gpus import CARDS, GIGA, find_card, shown_name
from cs336_systems.predict.memory_model import Breakdown, breakdown
from cs336_systems.predict.memory_planner import BlockCosts, PlannedMemory, Rates, budget_bytes, plan_memory
from cs336_systems.predict.model_flags import ShapeArguments
from cs336_systems.record import GIB, MIB
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Language, Text, listed, say


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
"""Parts of the memory that have a paragraph of their own."""
_OTHER = Text(
    "Logits and loss, temporary tensors, weight casts, workspace, inputs, allocator rounding",
    "logits 与 loss、临时张量、权重低精度副本、工作区、输入、分配器取整",
)


def describe(config: RunConfig, language: Language) -> str:
    """Return the breakdown as numbered paragraphs whose figures, as printed, add up to the total as printed."""
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


def memory_tables(config: RunConfig, *, gpu: str = "", trace: bool = False) -> list[Table]:
    """Return the parts of the memory, whether they fit on the GPU `gpu`, and with a memory budget the plan for it."""
    if not config.memory_budget:
        return [memory_table(config, trace=trace, gpu=gpu)]
    planned = planned_for(config, gpu)
    return [memory_table(config, trace=trace, plan=planned.plan, gpu=gpu), plan_table(config, planned, gpu)]


def memory_table(config: RunConfig, *, trace: bool, plan: Plan | None = None, gpu: str = "") -> Table:
    """Return all parts and those alive at the peak, by the closed form and, on request, by a trace of the operators."""
    usable = safe_peak(gpu_bytes(gpu), config) if gpu else None
    full = None
    if config.model_factory is None and not config.plans_whole_blocks:
        full = breakdown(config, plan)
    traced = _traced(config, plan) if trace or full is None else None
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
        "memory of {}: {}, {}, attention {}, batch {}, context {}{}{}",
        "{} 的显存：{}，{}，注意力 {}，batch {}，context {}{}{}",
        *(name, config.mode, config.precision, config.attention),
        *(str(config.batch_size), str(config.model.context_length)),
        Text("") if config.fast == "off" else say(", fast {}", "，快速步 {}", config.fast),
        say(", memory budget {}", "，显存预算 {}", config.memory_budget) if config.memory_budget else Text(""),
    )
    fits = [] if usable is None else [_verdict(config, full, traced, usable, gpu)]
    return Table(title, columns, rows, [*fits, *reference_notes(config), *_table_notes(config, full, traced)])


def _verdict(config: RunConfig, full: Breakdown | None, traced: Any, usable: float, gpu: str) -> Text:
    """Say whether a step, and building the model, fit on a GPU, given as for `fit`."""
    peak = max(full.peak.peak, building_peak(config).peak) if full else traced.peak
    return verdict(peak, usable, shown_name(gpu))


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
                "{} MiB kept by a block{}, {} MiB a tensor of the residual stream",
                "每块{1}保留 {0} MiB，残差流的每个张量 {2} MiB",
                *(sizes[0], Text(" that keeps all", "全部保留时") if config.memory_budget else Text(""), sizes[1]),
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


def _traced(config: RunConfig, plan: Plan | None) -> Any:
    from cs336_systems.measure.block_planner import plan_blocks
    from cs336_systems.measure.memory_trace import predict_by_tracing

    if config.plans_whole_blocks:
        return plan_blocks(config, budget_bytes(config.memory_budget), Rates.of(None)).estimate
    return predict_by_tracing(config, plan=plan)


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


# -- the plan of a memory budget --------------------------------------------------------------------------------------

KIND_NAMES = {
    "input": Text("input", "输入"),
    "qkv": Text("qkv"),
    "attention": Text("attention", "注意力输出"),
    "middle": Text("middle", "中间残差"),
    "gate_up": Text("gate and up", "gate 与 up"),
}


def planned_for(config: RunConfig, gpu: str) -> PlannedMemory:
    """Return the plan of a memory budget on the named card; on an H200 where none is named."""
    card = find_card(gpu) if gpu else None
    if gpu and (card is None or card.memory_gib is None):
        raise UserError(f"unknown --gpu {gpu!r}; choose one of: {', '.join(CARDS)}")
    if config.memory_budget == "auto" and card is None:
        raise UserError("--memory_budget auto needs a card to plan for; add --gpu, such as --gpu h200")
    capacity = usable_bytes(card.memory_gib * GIB) if card and card.memory_gib else None
    return plan_memory(config, budget_bytes(config.memory_budget, capacity), Rates.of(card, config.precision))


def plan_table(config: RunConfig, planned: PlannedMemory, gpu: str) -> Table:
    """Return the plan with one row for all blocks that do the same."""
    costs = BlockCosts(config, Rates.of(find_card(gpu) if gpu else None, config.precision))
    columns = [word(Text("blocks", "块"))]
    columns += [word(Text(*names)) for names in (("kept", "保留"), ("recomputed", "重计算"), ("offloaded", "卸载"))]
    columns += [Column(Text("kept by each", "每块保留"), "GiB"), Column(Text("offloaded by each", "每块卸载"), "GiB")]
    rows: list[list[str | Text]] = []
    for own in dict.fromkeys(planned.plan):
        blocks = _ranges([number for number, other in enumerate(planned.plan) if other == own])
        names = [listed(map(KIND_NAMES.__getitem__, own.kinds(choice))) for choice in (KEEP, RECOMPUTE, OFFLOAD)]
        rows.append([blocks, *names, _gib(costs.kept(own)), _gib(costs.offloaded(own))])
    card = say(" on {}", "（{}）", gpu) if gpu else Text("")
    budget = f"{planned.budget / GIB:.2f}"
    title = say("plan of {} for a budget of {} GiB{}", "{} 在 {} GiB 预算下的方案{}", config.size, budget, card)
    return Table(title, columns, rows, _plan_notes(planned))


def _plan_notes(planned: PlannedMemory) -> list[Text]:
    return [
        say(
            "predicted peak: {} GiB; predicted time added to a micro batch: {} ms",
            "预测峰值：{} GiB；预测每个 micro batch 增加 {} ms",
            *(f"{planned.estimate.peak / GIB:.2f}", f"{planned.added_seconds * 1e3:.1f}"),
        ),
        say(
            "pinned host memory: {} GiB; {} GB are copied each way in a micro batch",
            "锁页主机内存：{} GiB；每个 micro batch 双向各复制 {} GB",
            *(f"{planned.host_bytes / GIB:.2f}", f"{planned.host_bytes / GIGA:.2f}"),
        ),
    ]


def _ranges(numbers: list[int]) -> str:
    """Return increasing numbers in short form: `0-20`, `1, 3, ..., 29`."""
    found = list[str]()
    while numbers:
        first, *others = numbers
        step = others[0] - first if others else 1
        length = next((n for n, number in enumerate(numbers) if number != first + n * step), len(numbers))
        if length < 3 and step > 1:
            length = 1
        last = numbers[length - 1]
        steps = f"{first}-{last}" if step == 1 else f"{first}, {others[0]}, ..., {last}"
        found.append(str(first) if length == 1 else steps)
        numbers = numbers[length:]
    return "; ".join(found)
