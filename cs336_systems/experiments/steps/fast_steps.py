"""The fast step part by part: time, memory and the gain of each."""

import dataclasses
import importlib.util
from collections.abc import Iterable
from itertools import product
from typing import Any

from cs336_systems.config import FAST_PARTS, RunConfig
from cs336_systems.experiments.spec import Config, Experiment, Instrument, label_step, run_config, step_is_cold
from cs336_systems.experiments.steps.step_time import sizes
from cs336_systems.report import entries, terms
from cs336_systems.report.cells import CellView, grouped
from cs336_systems.report.document import Chart
from cs336_systems.report.phrases import (
    beside,
    compared,
    having,
    known,
    scale_of,
    size_of,
    speed_up,
    together,
    value_of,
    with_time,
)
from cs336_systems.report.points import measured, series_of
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import as_text, gib, ms, number, percent, settings_of, signed, varying
from cs336_systems.table import Table
from cs336_systems.text import Text, say

LLAMA = "cs336_systems.experiments.steps.llama:build"
"""Hugging Face's Llama of the same shape, measured where transformers is installed."""
VARIED = ("fast", "compile", "model_factory")
"""Fields in which steps of the same work differ."""

# -- grid -------------------------------------------------------------------------------------------------------------


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    """No part, each part alone, all but one, all; torch.compile; and Llama."""
    on_cuda = base.device_type == "cuda"
    base = dataclasses.replace(base, attention="auto", precision="bf16" if on_cuda else "fp32")
    parts = [part for part in FAST_PARTS if on_cuda or part != "graph"]
    without_one = [",".join(other for other in parts if other != part) for part in parts]
    variants: list[dict[str, Any]] = [{"fast": fast} for fast in ("off", *parts, *without_one, "on")]
    if importlib.util.find_spec("transformers") is not None:
        variants.append({"compile": True, "model_factory": LLAMA})
    chosen = sizes("quick", base)[:1] if preset == "quick" else ("small", "large", "2.7B")
    yield run_config(base, chosen[0], compile=True)
    for size, variant in product(chosen, variants):
        yield run_config(base, size, **variant)
    if preset != "quick":
        for variant in variants:
            if variant.get("fast") in ("off", "on") or "model_factory" in variant:
                yield run_config(base, "large", 1024, batch_size=16, **variant)


# -- tables and charts ------------------------------------------------------------------------------------------------


def _tables(cells: Cells) -> list[Table]:
    def is_plain(cell: CellView) -> bool:
        return cell.get("fast") == "off" and not cell.get("compile") and not cell.get("model_factory")

    def of_best_matmul(cell: CellView) -> str:
        rate, ceiling = cell.flops_per_second, cell.value("matmul_ceiling")
        return percent(rate / ceiling) if rate and ceiling else ""

    base_of = entries.baselines(cells, is_plain, *VARIED)
    columns = [
        entries.ms(terms.STEP, "step_time"),
        entries.std(terms.STD, "step_time"),
        entries.speed_up(terms.SPEED_UP, "step_time", base_of),
        entries.of(terms.TOKENS_PER_SECOND, lambda cell: number(cell.tokens_per_second, 0)),
        entries.of(terms.MFU, lambda cell: percent(cell.mfu)),
        entries.of(Text("of the best matmul", "占最快矩阵乘"), of_best_matmul),
        entries.gib(terms.PEAK, "peak_memory"),
        entries.over_base(terms.MEMORY, "peak_memory", base_of),
        entries.of(terms.PREDICTED, lambda cell: signed(cell.memory_error, 1)),
    ]
    what = Text("the step by the parts that are on", "按启用部分比较训练步")
    return [entries.cell_table(what, cells, columns, shown=varying(cells, always=("size", "fast")))]


def _charts(cells: Cells) -> list[Chart]:
    fine = [cell for cell in cells if cell.ok]
    panels = grouped(fine, lambda cell: tuple(cell.get(name) for name in ("size", "batch_size", "context_length")))
    found = []
    for (size, batch, context), members in panels.items():
        ordered = sorted(members, key=lambda cell: -(cell.value("step_time") or 0.0))
        series = [
            series_of(
                text, (measured(c, "step_time", variant(c)) for c in ordered if bool(c.get("model_factory")) == other)
            )
            for text, other in ((Text("this package", "本工具"), False), (Text("rival", "对手"), True))
        ]
        where = f"{size}, {batch} x {context}"
        title = Text(
            f"A training step of {where} tokens by the parts that are on", f"{where} token 的训练步，按启用部分"
        )
        parts = Text("parts of the fast step", "启用的部分")
        kept = [s for s in series if s.points]
        # Stacked, so that each bar stands beside its name, the rival's among the others.
        places = [variant(cell) for cell in ordered]
        found.append(Chart("", title, "stacked", parts, terms.MS, kept, horizontal=True, places=places))
    return found


def variant(cell: CellView) -> str:
    """The parts that a cell has switched on, in words."""
    if cell.get("model_factory"):
        name = "Llama of transformers" if cell.get("model_factory").endswith("llama:build") else "own model"
        return f"{name}, compiled" if cell.get("compile") else name
    parts = str(cell.get("fast")).replace(",", " + ")
    return "compiled" if cell.get("compile") else {"off": "none", "on": "all"}.get(parts, parts)


# -- findings ---------------------------------------------------------------------------------------------------------


def _works(cells: Cells) -> list[list[CellView]]:
    """Cells of the same model, context and batch together, the smallest first."""
    fine = sorted(having(cells, "step_time"), key=scale_of)
    return list(grouped(fine, lambda cell: settings_of(cell, *VARIED)).values())


def _fast(work: Cells) -> CellView | None:
    return next((cell for cell in work if cell.get("fast") == "on"), None)


def _rival(work: Cells) -> tuple[Text, CellView] | None:
    """The rival of the fast step: another model, else the plain step."""
    for cell in work:
        if cell.get("model_factory"):
            built = Text("compiled", "编译后的") if cell.get("compile") else Text("eager")
            if as_text(cell.get("model_factory")).startswith("llama:"):
                return say("the {} Llama of transformers", "{} transformers Llama", built), cell
            return say("the other {} model", "另一个 {} 模型", built), cell
    plain = [cell for cell in work if cell.get("fast") == "off" and not cell.get("compile")]
    return (Text("the plain step", "普通训练步"), plain[0]) if plain else None


def _duels(cells: Cells) -> list[tuple[CellView, Text, CellView]]:
    """The fast step, its rival's name and its rival, for each work that has both."""
    works = _works(cells)
    return [(fast, *rival) for work in works if (fast := _fast(work)) and (rival := _rival(work))]


def _all_parts(cells: Cells) -> Text | None:
    fast, name, other = _duels(cells)[0]
    times = [known(cell, "step_time") for cell in (fast, other)]
    said = say(
        "the fast step of {} takes {} ms: {}",
        "{} 的最快训练步用时 {} ms，{}",
        *(size_of(fast), ms(times[0]), beside(times[1] / times[0], with_time(name, ms(times[1])))),
    )
    memory = [value_of(cell, "peak_memory") for cell in (fast, other)]
    if not all(memory):
        return said
    sizes = say("its peak memory is {} GiB against {} GiB", "其峰值显存为 {} GiB，后者为 {} GiB", *map(gib, memory))
    return together(said, sizes)


def _other_works(cells: Cells) -> Text | None:
    """The same comparison for all sizes but the first."""
    duels = _duels(cells)[1:]
    names = {name for _, name, _ in duels}
    found = []
    for fast, _, rival in duels:
        shape = (size_of(fast), str(fast.get("batch_size")), str(fast.get("context_length")))
        found.append((speed_up((fast, rival)), say("{}, {} x {} tokens", "{}，{} x {} 个 token", *shape)))
    work = Text("for larger work the fast step", "工作量更大时，最快训练步")
    return compared(work, names.pop() if len(names) == 1 else Text("its rival", "对手"), found)


PART_NAMES = {
    "kernels": Text("the fused kernels", "融合内核"),
    "loss": Text("the fused loss", "融合损失"),
    "optimizer": Text("the fused optimizer", "融合优化器"),
    "graph": Text("the CUDA graph", "CUDA graph"),
}
"""Parts of the fast step in a sentence."""


def _left_out_part(cells: Cells) -> Text | None:
    """State the time of a step without the part that gives most, and without the part that gives least."""
    for work in _works(cells):
        fast = _fast(work)
        without: dict[str, float] = {}
        for cell in work:
            left = [part for part in FAST_PARTS if part not in str(cell.get("fast")).split(",")]
            if len(left) == 1:
                without[left[0]] = known(cell, "step_time")
        if fast and without:
            most, least = (pick(without, key=lambda part: without[part]) for pick in (max, min))
            said = say(
                "without {0} a step of {1} takes {2} ms",
                "去掉 {0} 时 {1} 每步 {2} ms",
                *(PART_NAMES[most], size_of(fast), ms(without[most])),
            )
            other = say("without {} {} ms", "去掉 {} 时为 {} ms", PART_NAMES[least], ms(without[least]))
            return say("{}, {}", "{}，{}", said, other) if most != least else said
    return None


FAST_STEP = Experiment(
    name="fast_step",
    title=Text("The fast step", "最快的训练步"),
    question=Text("What does each part of the fast step give?", "最快训练步的每个部分各有多少收益？"),
    grid=_grid,
    instrument=Instrument(
        name="fast_step",
        measure="cs336_systems.experiments.steps.measure_step:measure_fast_step",
        label=label_step,
        needs_fresh_process=step_is_cold,
        takes_peak_tflops=True,
    ),
    tables=_tables,
    charts=_charts,
    findings=(_all_parts, _other_works, _left_out_part),
    order=50,
)
