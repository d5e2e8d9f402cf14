"""The fast step part by part: time, memory and the gain of each."""

import dataclasses
import importlib.util
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from cs336_systems.config import FAST_PARTS, RunConfig
from cs336_systems.experiments.spec import Config, Experiment, Instrument, label_step, run_config, step_is_cold
from cs336_systems.experiments.steps.step_time import sizes
from cs336_systems.report import entries, terms
from cs336_systems.report.cells import CellView, grouped
from cs336_systems.report.document import Chart, Highlight, Limit, Point, Series
from cs336_systems.report.names import size_name
from cs336_systems.report.phrases import (
    beside,
    compared,
    having,
    known,
    predictions_hold,
    scale_of,
    size_of,
    speed_up,
    times_text,
    together,
    value_of,
    with_time,
)
from cs336_systems.report.points import means_of, measured, series_of
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import as_text, gib, ms, number, percent, settings_of, signed, varying
from cs336_systems.table import Table
from cs336_systems.text import Text, listed, say

LLAMA = "cs336_systems.experiments.steps.llama:build"
"""Hugging Face's Llama of the same shape, measured where transformers is installed."""
VARIED = ("fast", "compile", "model_factory")
"""Fields in which steps of the same work differ."""

# -- grid -------------------------------------------------------------------------------------------------------------


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    """Yield steps with no part, each part alone, all but one and all; with torch.compile; and Llama."""
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
        *entries.predicted_time(cells),
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
    """Return charts, each with the models of one batch and context, the smallest first."""
    works = sorted(_works(cells), key=lambda work: work[0].get("batch_size") * work[0].get("context_length"))
    return [*map(_build_up, works), *_savings(works)]


EAGER, COMPILED = Text("eager PyTorch"), Text("torch.compile")
_LOSS_AND_OPTIMIZER = Text("+ fused loss, optimizer", "+ 融合损失、优化器")
STAGES = {
    frozenset(): EAGER,
    frozenset({"graph"}): Text("+ CUDA graph"),
    frozenset({"loss", "optimizer"}): _LOSS_AND_OPTIMIZER,  # of a CPU, which has no graphs
    frozenset({"graph", "loss", "optimizer"}): _LOSS_AND_OPTIMIZER,
    frozenset(FAST_PARTS): Text("all parts (+ kernels)", "全部（+ 融合内核）"),
}
"""Maps enabled parts to the name of the bar: the stages from eager PyTorch to all parts that the grid measures."""
PLACES = [EAGER.en, COMPILED.en, *dict.fromkeys(name.en for name in STAGES.values() if name != EAGER)]
"""Order of the bars from top to bottom, in every chart."""
PART_NAMES = {
    "graph": Text("CUDA graph"),
    "optimizer": Text("fused optimizer", "融合优化器"),
    "kernels": Text("fused kernels", "融合内核"),
    "loss": Text("fused loss", "融合损失"),
}


def _parts(cell: CellView) -> frozenset[str]:
    fast = str(cell.get("fast"))
    return frozenset({"off": (), "on": FAST_PARTS}.get(fast, fast.split(",")))


def _stage(cell: CellView) -> Text | None:
    """Return the name of a cell's bar; None for another model, or for parts that are not a stage of the build-up."""
    if cell.get("model_factory"):
        return None
    return COMPILED if cell.get("compile") else STAGES.get(_parts(cell))


def _build_up(work: Cells) -> Chart:
    """Chart the stages from eager PyTorch to all parts, with lines for the rival and for the floor."""
    staged = [(cell, name) for cell in work if (name := _stage(cell))]
    series = [
        series_of(
            text, (measured(cell, "step_time", name) for cell, name in staged if (name in (EAGER, COMPILED)) == plain)
        )
        for text, plain in ((Text("PyTorch"), True), (Text("this package", "本项目"), False))
    ]
    title = say("A training step of {} tokens", "{} token 的训练步", _work_name(work[0]))
    order = Text("parts marked + add up, without torch.compile", "带 + 的部分逐条累加，不含 torch.compile")
    return Chart(
        "",
        title,
        "stacked",  # so that each bar stands beside its name
        Text("parts that are on", "启用的部分"),
        terms.MS,
        series,
        horizontal=True,
        places=PLACES,
        limits=_lines_across(work),
        note=listed((str(work[0].get("precision")), means_of(work), order), ("; ", "；")),
    )


def _lines_across(work: Cells) -> list[Limit]:
    """Return lines for the other model's step, and for the floor: the step's FLOPs at the rate of a large matmul."""
    found = []
    for cell in work:
        if cell.get("model_factory"):
            seconds = known(cell, "step_time")
            found.append(Limit(seconds * 1e3, say("{}: {} ms", "{}：{} ms", _model_name(cell), ms(seconds))))
    own = [cell for cell in work if not cell.get("model_factory")]
    floor = next((floor for cell in reversed(own) if (floor := _floor(cell))), None)
    if floor:
        text = say(
            "floor (FLOPs at a large matmul's rate): {} ms", "下限（FLOPs 除以大矩阵乘的速率）：{} ms", ms(floor)
        )
        found.append(Limit(floor * 1e3, text, dashed=True))
    return found


def _floor(cell: CellView) -> float | None:
    flops, rate = value_of(cell, "flops"), value_of(cell, "matmul_ceiling")
    return flops / rate if flops and rate else None


def _model_name(cell: CellView) -> Text:
    factory = cell.get("model_factory")
    name = Text("Llama of transformers", "transformers 的 Llama") if factory == LLAMA else Text(as_text(factory))
    return say("{}, compiled", "{}，编译", name) if cell.get("compile") else name


def _work_name(cell: CellView) -> Text:
    shape = f"{cell.get('batch_size')} x {cell.get('context_length')}"
    return say("{}, {}", "{}，{}", size_name(cell.get("size")), shape)


def _savings(works: Sequence[Cells]) -> list[Chart]:
    """Return how much longer a step takes with one part left out, by part."""
    series = []
    for work in works:
        fast = _fast(work)
        if fast:
            there = [part for part in PART_NAMES if any(part in _parts(cell) for cell in work if cell is not fast)]
            without = {frozenset(there) - _parts(cell): cell for cell in work if not cell.get("model_factory")}
            pairs = [(part, without[frozenset({part})]) for part in there if frozenset({part}) in without]
            points = [
                Point(PART_NAMES[part], 1e3 * (known(cell, "step_time") - known(fast, "step_time")))
                for part, cell in pairs
            ]
            series.append(Series(_work_name(fast), points))
    title = Text("Time that each part saves", "每个部分节省的时间")
    note = Text(
        "the step without this part, less the step with all parts (means)", "缺这一部分的一步减去全部启用的一步（均值）"
    )
    what = Text("part", "部分")
    places = [name.en for name in PART_NAMES.values()]
    return [Chart("", title, "bars", what, terms.MS, series, horizontal=True, places=places, note=note)]


# -- first screen -----------------------------------------------------------------------------------------------------


def _highlights(cells: Cells) -> list[Highlight]:
    """Compare the fast step with its rival, the largest model first, and give its MFU."""
    duels = sorted(_duels(cells), key=lambda duel: -scale_of(duel[0]))
    return [*(_against_rival(20 if i == 0 else 25, *duel) for i, duel in enumerate(duels)), *_best_mfu(cells)]


def _against_rival(rank: int, fast: CellView, _: Text, rival: CellView) -> Highlight:
    ratio = speed_up((fast, rival))
    compiled_llama = rival.get("model_factory") == LLAMA and rival.get("compile")
    name = _model_name(rival) if rival.get("model_factory") else EAGER
    name = Text("compiled Llama", "编译后的 Llama") if compiled_llama else name
    times = [ms(known(cell, "step_time")) for cell in (fast, rival)]
    slower = say("{}x slower", "耗时 {} 倍", times_text(1 / ratio))
    return Highlight(
        rank,
        Text(f"{ratio:.2f}x") if ratio >= 1 else slower,
        say("{} step, against {}", "{} 训练步，相对{}", size_name(fast.get("size")), name),
        say(
            "{0} tokens, {4}: ours {1} ms, {2} {3} ms",
            "{0} token，{4}：本项目 {1} ms，{2} {3} ms",
            *(_work_name(fast), times[0], name, times[1], str(fast.get("precision"))),
        ),
        ratio=ratio,
        bar=say("step of {}, against {}", "{} 训练步，相对{}", _work_name(fast), name),
    )


def _best_mfu(cells: Cells) -> list[Highlight]:
    found = [(fast.mfu, fast) for work in _works(cells) if (fast := _fast(work)) and fast.mfu]
    if not found:
        return []
    share, best = max(found, key=lambda pair: pair[0])
    values = (_work_name(best), str(best.get("precision")), ms(known(best, "step_time")))
    detail = say("{} tokens, {}: {} ms a step", "{} token，{}：每步 {} ms", *values)
    what = Text("of the GPU's peak FLOP/s in a step (MFU)", "训练步达到的 GPU 峰值占比（MFU）")
    return [Highlight(40, Text(percent(share)), what, detail)]


# -- findings ---------------------------------------------------------------------------------------------------------


def _works(cells: Cells) -> list[list[CellView]]:
    """Return groups of cells with the same model, context and batch, the smallest first."""
    fine = sorted(having(cells, "step_time"), key=scale_of)
    return list(grouped(fine, lambda cell: settings_of(cell, *VARIED)).values())


def _fast(work: Cells) -> CellView | None:
    return next((cell for cell in work if cell.get("fast") == "on"), None)


def _rival(work: Cells) -> tuple[Text, CellView] | None:
    """Return the rival of the fast step: another model, or else the plain step."""
    for cell in work:
        if cell.get("model_factory"):
            built = Text("compiled", "编译后的") if cell.get("compile") else Text("eager")
            if as_text(cell.get("model_factory")).startswith("llama:"):
                return say("the {} Llama of transformers", "{} transformers Llama", built), cell
            return say("the other {} model", "另一个 {} 模型", built), cell
    plain = [cell for cell in work if cell.get("fast") == "off" and not cell.get("compile")]
    return (Text("the plain step", "普通训练步"), plain[0]) if plain else None


def _duels(cells: Cells) -> list[tuple[CellView, Text, CellView]]:
    """Return the fast step, its rival's name and its rival, for each work that has both."""
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
    """State the same comparison for all sizes but the first."""
    duels = _duels(cells)[1:]
    names = {name for _, name, _ in duels}
    found = []
    for fast, _, rival in duels:
        shape = (size_of(fast), str(fast.get("batch_size")), str(fast.get("context_length")))
        found.append((speed_up((fast, rival)), say("{}, {} x {} tokens", "{}，{} x {} 个 token", *shape)))
    work = Text("for larger work the fast step", "工作量更大时，最快训练步")
    return compared(work, names.pop() if len(names) == 1 else Text("its rival", "对手"), found)


def _left_out_part(cells: Cells) -> Text | None:
    """State the time of a step without the part that saves most, and without the part that saves least."""
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
                "without the {0} a step of {1} takes {2} ms",
                "去掉 {0} 时 {1} 每步 {2} ms",
                *(PART_NAMES[most], size_of(fast), ms(without[most])),
            )
            other = say("without the {} {} ms", "去掉 {} 时为 {} ms", PART_NAMES[least], ms(without[least]))
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
    highlights=_highlights,
    trust=predictions_hold,
    group="speed",
    order=50,
)
