"""`parallel_plan` and `cs336 plan`: which layout fits a large model on a cluster, and what does a step wait for?"""

from collections.abc import Iterable, Mapping
from itertools import product

from cs336_systems.config import RunConfig
from cs336_systems.experiments.ranks.multi_rank import charts_per_cell, tables_per_cell
from cs336_systems.experiments.ranks.plan_cells import (
    PARTS,
    SENT,
    Passes,
    PlanArguments,
    fitting_layouts,
    gpu_name,
    impossible_layouts,
    layout_name,
    part_sizes,
    plan_config,
    planned,
    possible_layouts,
    total,
    unfused_layouts,
    where,
)
from cs336_systems.experiments.ranks.recommended_layout import best_layout
from cs336_systems.experiments.spec import Config, Experiment, Instrument
from cs336_systems.predict.fit import margin_note, usable_bytes
from cs336_systems.predict.flops import causal_model_flops, model_flops
from cs336_systems.predict.gpus import GIGA, TERA
from cs336_systems.predict.strategy import Strategy
from cs336_systems.record import GIB
from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Chart, Limit, Point, Series
from cs336_systems.report.phrases import MOST, safely, together
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import ms, number, percent, setting, titled
from cs336_systems.report.terms import GIB_TEXT, STEP
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, listed, say

LAYOUT = Text("layout", "布局")
MATMULS = Text("matmuls", "矩阵乘")
IMPOSSIBLE = Text("impossible", "不可行")
MANY_HIDDEN = 0.1
"""Share of the FLOPs above which a note says that causal kernels skip them."""


def tables_of(arguments: PlanArguments) -> list[Table]:
    return list(PARALLEL_PLAN.tables([planned(arguments)]))


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    """Yield the handout's exercise and the same shape as a whole model, on clusters of H100s."""
    for count, gpus in product(("feed-forward", "transformer"), (1024,) if preset == "quick" else (64, 1024, 16384)):
        yield plan_config(PlanArguments(gpus=gpus, count=count, context_length=4096, fast="off"))


# -- tables -----------------------------------------------------------------------------------------------------------


def _title(cell: CellView, what: Text) -> Text:
    tokens = f"{cell.get('batch_size') * cell.get('context_length'):,}"
    told = [where(cell), Text(cell.get("precision")), say("{} tokens on each", "每张 {} 个 token", tokens)]
    if cell.get("count") == "transformer":
        told.append(setting("checkpoint_blocks", str(cell.get("checkpoint_blocks") or "off")))
        if (fast := cell.config.get("fast", "off")) != "off":
            told.append(setting("fast", fast))
    return titled(cell.experiment, what, told)


def _memory_table(cell: CellView) -> Table:
    peaks = {name: cell.variant(name).value("engine_peak_memory") for name in cell.get("strategies")}
    has_peaks = any(peak is not None for peak in peaks.values())
    impossible = impossible_layouts(cell.config)
    heads = [*PARTS.values(), Text("total", "合计"), *([Text("torch's peak", "torch 峰值")] if has_peaks else [])]
    columns = [word(LAYOUT), *(Column(head, "GiB") for head in heads)]
    columns += [word(Text("fits", "放得下")), Column(Text("GPUs needed", "所需 GPU"))]
    rows: list[list[str | Text]] = []
    for name, peak in peaks.items():
        own = cell.variant(name)
        sizes, needed = part_sizes(own), own.value("smallest_cluster")
        fits = Text("yes", "是") if own.value("fits") else Text("no", "否")
        if name in impossible:
            fits, needed = IMPOSSIBLE, None
        memory = [number(size / GIB) for size in (*sizes, sum(sizes))]
        if has_peaks:
            memory.append("-" if peak is None else number(peak / GIB))
        rows.append([layout_name(name), *memory, fits, "-" if needed is None else f"{needed:,.0f}"])
    notes = _memory_notes(cell, impossible, has_peaks=has_peaks)
    return Table(_title(cell, Text("memory on each GPU", "每张 GPU 的显存")), columns, rows, notes)


def _memory_notes(cell: CellView, impossible: Mapping[str, str], *, has_peaks: bool) -> list[Text]:
    notes = []
    if cell.get("gpus") == 1 and (peak := cell.variant(cell.get("strategies")[0]).value("needed_memory")):
        notes.append(
            say(
                "one GPU: it fits or not by the peak of its step, {} GiB, as cs336 memory predicts it",
                "单张 GPU：以 cs336 memory 预测的单步峰值 {} GiB 判断是否放得下",
                number(peak / GIB),
            )
        )
    notes += [
        Text(
            "working: low-precision copies of weights, or the few that are gathered at a time",
            "工作副本：权重的低精度副本，或同一时刻收集起来的少数权重",
        ),
        Text(
            "GPUs needed: the fewest on which it fits with as many sequences on each; -: no number is enough",
            "所需 GPU：每张序列数不变时放得下的最少张数；-：多少都不够",
        ),
    ]
    if any(Strategy.parse(name).context > 1 for name in cell.get("strategies")) and cell.get("attention") != "auto":
        notes.append(
            Text(
                "CP without --attention auto: the mask of a GPU's tokens and all tokens of a sequence is not counted",
                "CP 不用 --attention auto 时：每张 GPU 的 token 对整个序列的掩码未计入",
            )
        )
    if has_peaks:
        notes.append(
            Text(
                "torch's peak: under --engine torch, of all tensors that exist at a time; -: it is not predicted",
                "torch 峰值：--engine torch 下同一时刻所有张量的最大值；-：不作预测",
            )
        )
        notes.append(
            Text(
                "whether a layout fits that cs336 train runs on torch's engine is judged by that peak, if predicted",
                "cs336 train 在 torch 引擎上运行的布局，若该峰值有预测，则以其判断是否放得下",
            )
        )
    if unfused := unfused_layouts(cell.config):
        notes.append(
            say(
                "without the fused kernels and loss, as cs336 train runs them: {}",
                "按 cs336 train 的实际运行方式，不使用融合内核与融合损失：{}",
                listed(map(layout_name, unfused)),
            )
        )
    notes += [
        say("impossible: {}: {}", "不可行：{}：{}", layout_name(name), Text(why)) for name, why in impossible.items()
    ]
    return [*notes, margin_note()]


def _time_table(cell: CellView) -> Table:
    heads = (MATMULS, Text("forward communication", "前向通信"), Text("backward communication", "反向通信"), STEP)
    columns = [word(LAYOUT), Column(Text("sent", "发送"), "GB"), *(Column(head, "ms") for head in heads)]
    columns += [Column(Text("tokens needed", "所需 token")), word(Text("waits for", "等待"))]
    rows: list[list[str | Text]] = []
    possible = possible_layouts(cell)
    for name in cell.get("strategies"):
        own = cell.variant(name)
        if name not in possible:
            rows.append([layout_name(name), *["-"] * (len(columns) - 2), IMPOSSIBLE])
            continue
        passes, needed = Passes.of(own), own.value("least_tokens")
        sent = sum(own.value(metric) or 0.0 for metric in own.metrics if metric.startswith(SENT))
        waits = MATMULS
        if passes.late:
            waits = say("communication in {}", "{}的通信", listed(passes.late, (" and ", "与")))
        if (bubble := own.value("bubble_share")) is not None:
            waits = say("{}; bubble {}", "{}；气泡 {}", waits, percent(bubble))
        rows.append(
            [
                *(layout_name(name), number(sent / 1e9), ms(sum(passes.compute)), *map(ms, passes.communication)),
                say("{} to {}", "{} 到 {}", ms(passes.overlapped), ms(passes.sequential)),
                "-" if needed is None else number(needed, 0),
                waits,
            ]
        )
    flops, link, network = cell.get("flops") / TERA, cell.get("link") / GIGA, cell.get("network") / GIGA
    notes = [
        say(
            "{} TFLOP/s, {} GB/s in a node of {}, {} GB/s of each GPU to other nodes; sent: by each GPU in a step",
            "{} TFLOP/s，{} GB/s（{} 张 GPU 的节点内），每张 GPU 到其他节点 {} GB/s；发送：每张每步",
            *(f"{flops:,.0f}", f"{link:g}", str(cell.get("node")), f"{network:g}"),
        ),
        Text(
            "step: with all communication overlapped with matmuls, and with none",
            "单步：通信全部与矩阵乘同时进行，以及全不同时进行",
        ),
        Text(
            "tokens needed: on each GPU, for matmuls to take longer than communication; -: no number is enough",
            "所需 token：每张 GPU 上使矩阵乘长于通信的 token 数；-：多少都不够",
        ),
    ]
    if any(cell.variant(name).value("bubble_share") is not None for name in cell.get("strategies")):
        notes.append(
            Text(
                "bubble: share of a step in which a pipeline stage waits for the first or last micro batch",
                "气泡：流水线阶段等待首个或末个微批次的时间占单步的比例",
            )
        )
    notes += _hidden_scores(cell)
    notes += _assumptions(cell)
    what = Text("bytes sent, and what a step waits for", "发送的字节数，以及一步在等待什么")
    return Table(_title(cell, what), columns, rows, notes)


def _hidden_scores(cell: CellView) -> list[Text]:
    """Say that matmuls and MFU count scores which causal kernels skip, where these are many."""
    if cell.get("count") != "transformer":
        return []
    run = RunConfig.of(cell.config)
    hidden = 1 - causal_model_flops(run) / model_flops(run)
    if run.attention == "reference" or hidden < MANY_HIDDEN:
        return []
    return [
        say(
            "matmuls and MFU count all pairs of tokens in attention; causal kernels skip half, {} of the FLOPs",
            "矩阵乘与 MFU 按所有 token 对的分数计；因果内核跳过其中一半，占 FLOPs 的 {}",
            percent(hidden, 0),
        )
    ]


def _assumptions(cell: CellView) -> list[Text]:
    """Return notes on rates that are not known, and on layouts that do not divide the GPUs."""
    notes = []
    words = {
        "link": Text("PCIe 4.0 x16 in a node", "节点内 PCIe 4.0 x16"),
        "network": Text("25 Gb/s", "节点间 25 Gb/s"),
    }
    if assumed := cell.config.get("assumed"):
        notes.append(
            say(
                "the interconnect of {} is not known; assumed: {} (--link and --network set it)",
                "{} 的互连未知，假定为 {}（可用 --link 与 --network 指定）",
                *(gpu_name(cell), listed(words[name] for name in assumed)),
            )
        )
    if left_out := cell.config.get("left_out"):
        notes.append(
            say(
                "groups of {} do not divide {} GPUs or the model: shown with smaller groups, or left out",
                "{} 的分组不能整除 {} 张 GPU 或模型：改用更小的分组，或省略",
                *(listed(map(layout_name, left_out)), str(cell.get("gpus"))),
            )
        )
    return notes


# -- charts -----------------------------------------------------------------------------------------------------------


def _chart(cell: CellView) -> Chart:
    sizes = {
        layout_name(name): part_sizes(cell.variant(name)) for name in possible_layouts(cell) or cell.get("strategies")
    }
    series = [
        Series(head, [Point(name, parts[number] / GIB) for name, parts in sizes.items()])
        for number, head in enumerate(PARTS.values())
    ]
    title = say("Memory on each GPU: {}", "每张 GPU 的显存：{}", where(cell))
    capacity = cell.get("gpu_memory")
    usable = usable_bytes(capacity) / GIB
    sizes_text = (number(usable, 1), number(capacity / GIB, 1), gpu_name(cell))
    limit = Limit(
        usable, say("{} of the {} GiB of one {} are usable", "一张 {2} 的 {1} GiB 中可用 {0} GiB", *sizes_text)
    )
    note = say(
        "predicted: {}, {} tokens on each GPU; a bar that crosses the line does not fit",
        "预测值：{}，每张 GPU {} 个 token；超过竖线则放不下",
        *(cell.get("precision"), f"{cell.get('batch_size') * cell.get('context_length'):,}"),
    )
    return Chart("", title, "stacked", LAYOUT, GIB_TEXT, series, horizontal=True, limits=[limit], digits=1, note=note)


# -- findings ---------------------------------------------------------------------------------------------------------


def _whole_models(cells: Cells) -> list[CellView]:
    """Return the cells of the whole model, or all cells if only the exercise was predicted."""
    fine = [cell for cell in cells if cell.ok]
    return [cell for cell in fine if cell.get("count") == "transformer"] or fine


def _fitting_layouts(cells: Cells) -> Text | None:
    """State which layouts fit, and which of them is the fastest, on each cluster."""
    said = None
    for cell in _whole_models(cells)[:MOST]:
        said = together(said, safely(_fastest_layout, cell))
    return said


def _fastest_layout(cell: CellView) -> Text:
    names, fitting = list(cell.get("strategies")), fitting_layouts(cell)
    if not fitting:
        return say("0 of {} layouts of {} fit", "{1}，{0} 种布局中 0 种放得下", str(len(names)), where(cell))
    best, _ = best_layout(cell)
    counts = (str(len(fitting)), str(len(names)))
    return say(
        "{} of {} layouts of {} fit: {} is the one to take, {} ms a step with {} GiB on each GPU",
        "{2}，{1} 种布局中 {0} 种放得下：宜用 {3}，单步 {4} ms，每张 GPU {5} GiB",
        *(*counts, where(cell), layout_name(best), ms(Passes.of(cell.variant(best)).overlapped)),
        number(total(cell, best) / GIB, 1),
    )


def _communication_bound(cells: Cells) -> Text | None:
    """State which layouts wait for communication on the largest cluster."""
    cell = max(_whole_models(cells), key=lambda cell: cell.get("gpus"))
    late = [name for name in possible_layouts(cell) if Passes.of(cell.variant(name)).late]
    gpus = f"{cell.get('gpus'):,}"
    if not late:
        return say("on {} GPUs no layout waits for communication", "{} 张 GPU 上没有布局在等通信", gpus)
    names = listed(map(layout_name, late))
    return say("on {} GPUs these wait for communication: {}", "{} 张 GPU 上等待通信的有：{}", gpus, names)


PARALLEL_PLAN = Experiment(
    name="parallel_plan",
    title=Text("Layouts of a large model on a cluster", "大模型在集群上的并行布局"),
    question=Text(
        "Which layout fits a large model on a cluster, and what does it wait for?",
        "哪种布局能把大模型放进集群，它在等待什么？",
    ),
    instrument=Instrument("parallel_plan", "cs336_systems.experiments.ranks.plan_cells:measure_plan"),
    grid=_grid,
    tables=tables_per_cell(_memory_table, _time_table),
    charts=charts_per_cell(_chart),
    findings=(_fitting_layouts, _communication_bound),
    group="ranks",
    order=60,
)
