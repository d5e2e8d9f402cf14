"""`parallel_plan` and `cs336 plan`: which layout fits a large model on a cluster, and what does a step wait for?

Predicted from the configuration (predict/parallel_model.py); nothing runs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from cs336_systems.config import RunConfig, UserError, flag, flag_like
from cs336_systems.experiments.ranks.multi_rank import charts_per_cell, tables_per_cell
from cs336_systems.experiments.spec import Config, Experiment, Instrument
from cs336_systems.predict.fit import gpu_bytes, usable_bytes
from cs336_systems.predict.gpus import ETHERNET, GIGA, PCIE_LINK, TERA, find_card
from cs336_systems.predict.model_flags import ShapeArguments
from cs336_systems.predict.parallel_model import Cluster, Plan, Strategy, feed_forward, transformer
from cs336_systems.record import GIB, Metric
from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Chart, Limit, Point, Series
from cs336_systems.report.phrases import MOST, safely, together
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import ms, number, setting, titled
from cs336_systems.report.terms import ACTIVATIONS, BACKWARD, FORWARD, GIB_TEXT, GRADIENTS, STEP
from cs336_systems.table import FORMATS, Column, Table, word
from cs336_systems.text import Text, listed, say

STRATEGIES = ("dp", "zero1", "zero2", "zero3", "tp8", "zero3+tp8")
COUNTED = {"transformer": transformer, "feed-forward": feed_forward}


@dataclass(frozen=True)
class PlanArguments(ShapeArguments):
    size: str = flag("xxl", "a size's name; any of its fields may be replaced")
    batch_size: int = flag(1, "sequences for each GPU")
    precision: str = flag("bf16", "fp32, or bf16 / fp16 for matmuls and communication", ("fp32", "bf16", "fp16"))
    attention: str = flag("auto", "attention implementation", ("auto", "reference", "sdpa"))
    checkpoint_blocks: int = flag(1, "recompute activations in groups of this many blocks (0: keep all)")
    mode: str = flag_like(RunConfig, "mode")
    gpus: int = flag(1024, "total number of GPUs")
    fast: str = flag("off", "the fast step: on, off, or kernels,loss (its optimizer and graph are for one GPU)")
    gpu: str = flag("h100", "4090, A100, H200, ...; or memory such as 95GB, with --tflops")
    strategy: tuple[str, ...] = flag(STRATEGIES, "dp, zero1, zero2, zero3 (= fsdp), tpN, or mixes such as zero3+tp8")
    count: str = flag("transformer", "the whole model, or two matrices a block as in the handout", tuple(COUNTED))
    tflops: float | None = flag(None, "TFLOP/s that a GPU reaches (default: its dense peak)")
    node: int = flag(8, "GPUs that the fast link joins")
    link: float | None = flag(None, f"GB/s, one way, between GPUs of a node (default: the GPU's, else {PCIE_LINK:g})")
    network: float | None = flag(
        None, f"GB/s, one way, of a GPU to other nodes (default: the GPU's, else {ETHERNET:g})"
    )
    format: str = flag("terminal", "table format", FORMATS)


def plan_config(arguments: PlanArguments) -> dict[str, Any]:
    """The configuration of a `parallel_plan` cell; rates that are not given are the GPU's."""
    for name in ("gpus", "node"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name} must be at least 1, got {getattr(arguments, name)}")
    for name in ("tflops", "link", "network"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name} must be above 0, got {value}")
    if not arguments.strategy:
        raise UserError(f"--strategy names none; try {','.join(STRATEGIES)}")
    memory = gpu_bytes(arguments.gpu)
    rates, assumed = _rates(arguments)
    run = arguments.predicted_config(default_size="xxl", fast=_fast(arguments))
    strategies, left_out = _strategies(arguments)
    # A cell without notes keeps the key that it has had before there were any.
    notes = {"assumed": assumed, "left_out": left_out}
    return {
        **run.to_dict(),
        "gpus": arguments.gpus,
        "gpu": arguments.gpu,
        "gpu_memory": memory,
        "node": arguments.node,
        **rates,
        "strategies": strategies,
        "count": arguments.count,
        **{name: value for name, value in notes.items() if value},
    }


def _rates(arguments: PlanArguments) -> tuple[dict[str, float], list[str]]:
    """FLOP/s and bytes per second as given, or else the GPU's own, or else assumed; and the names of the assumed."""
    gpu = find_card(arguments.gpu)
    own = (gpu.peaks.of(arguments.precision), gpu.link, gpu.network) if gpu else (None, None, None)
    tflops = arguments.tflops or own[0]
    if tflops is None:
        lacks = f"has no {arguments.precision}; take another --precision, or" if gpu else "is no known card:"
        raise UserError(f"--gpu {arguments.gpu!r} {lacks} give --tflops")
    link, network = arguments.link or own[1], arguments.network or own[2]
    assumed = [name for name, rate in (("link", link), ("network", network)) if rate is None]
    rates = {"flops": tflops * TERA, "link": (link or PCIE_LINK) * GIGA, "network": (network or ETHERNET) * GIGA}
    return rates, assumed


def _fast(arguments: PlanArguments) -> str:
    """The parts of the fast step that many GPUs can use."""
    if arguments.fast == "on":
        return "kernels,loss"
    if one_gpu := [part for part in ("optimizer", "graph") if part in arguments.fast]:
        raise UserError(f"--fast {one_gpu[0]} is for one GPU; use --fast kernels,loss")
    return arguments.fast


def _strategies(arguments: PlanArguments) -> tuple[list[str], list[str]]:
    """The names of the layouts; and of those, if none was asked for, that do not divide the GPUs and are replaced."""
    asked = [Strategy.parse(text) for text in arguments.strategy]
    if arguments.strategy != STRATEGIES:
        return [strategy.name for strategy in asked], []
    fitting = [strategy.within(arguments.gpus) for strategy in asked]
    names = list(dict.fromkeys(strategy.name for strategy in fitting))
    return names, [strategy.name for strategy in asked if strategy.name not in names]


def plans(config: Mapping[str, Any]) -> list[Plan]:
    usable = usable_bytes(config["gpu_memory"])
    cluster = Cluster(config["gpus"], usable, config["flops"], config["node"], config["link"], config["network"])
    workload = COUNTED[config["count"]](RunConfig.of(config))
    return [Plan(workload, cluster, Strategy.parse(name)) for name in config["strategies"]]


def measure_plan(config: dict[str, Any]) -> list[Metric]:
    """Instrument of `parallel_plan`; one variant for each strategy."""
    metrics: list[Metric] = []
    for plan in plans(config):
        found = [Metric(f"{part}_memory", "B", [size]) for part, size in plan.memory.items()]
        found += [Metric(f"{SENT}{c.name}, {c.purpose}", "B", [c.sent]) for c in plan.collectives]
        for during in PASSES:
            found.append(Metric(f"{during}_compute_time", "s", [plan.compute(during)]))
            found.append(Metric(f"{during}_communication_time", "s", [plan.communication(during)]))
        found.append(Metric("fits", "1", [int(plan.fits)]))
        for name, value in (("least_tokens", plan.least_tokens), ("smallest_cluster", plan.smallest_cluster)):
            if value is not None:
                found.append(Metric(name, "1", [value]))
        metrics += [metric._replace(variant=plan.strategy.name) for metric in found]
    return metrics


def tables_of(arguments: PlanArguments) -> list[Table]:
    """The tables of `cs336 run parallel_plan` without a run."""
    config = plan_config(arguments)
    return list(PARALLEL_PLAN.tables([CellView.of(PARALLEL_PLAN.name, config, measure_plan(config))]))


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    """The handout's exercise and the same shape as a whole model, on clusters of H100s."""
    for count, gpus in product(("feed-forward", "transformer"), (1024,) if preset == "quick" else (64, 1024, 16384)):
        yield plan_config(PlanArguments(gpus=gpus, count=count, context_length=4096))


# -- what a cell holds ------------------------------------------------------------------------------------------------

PASSES = {"forward": FORWARD, "backward": BACKWARD}
SENT = "sent by collective: "
PARTS = {
    "parameter": Text("weights", "权重"),
    "gradient": GRADIENTS,
    "optimizer": Text("state", "状态"),
    "activation": ACTIVATIONS,
    "working": Text("working", "工作副本"),
}
"""Parts of the memory of a GPU, with their headings."""
STRATEGY = Text("strategy", "布局")
MATMULS = Text("matmuls", "矩阵乘")


class Passes(NamedTuple):
    """Seconds of a strategy's computation and communication, in forward and in backward."""

    compute: list[float]
    communication: list[float]

    @classmethod
    def of(cls, own: CellView) -> "Passes":
        return cls(
            [own.value(f"{during}_compute_time") or 0.0 for during in PASSES],
            [own.value(f"{during}_communication_time") or 0.0 for during in PASSES],
        )

    @property
    def overlapped(self) -> float:
        """The step with all communication beside matmuls."""
        return sum(map(max, self.compute, self.communication))

    @property
    def sequential(self) -> float:
        return sum(self.compute) + sum(self.communication)

    @property
    def late(self) -> list[Text]:
        """Passes in which communication takes longer than matmuls."""
        pairs = zip(PASSES.values(), self.compute, self.communication, strict=True)
        return [name for name, compute, communication in pairs if communication > compute]


def _part_sizes(own: CellView) -> list[float]:
    return [own.value(f"{part}_memory") or 0.0 for part in PARTS]


def _where(cell: CellView) -> Text:
    """The model and the cluster."""
    only = Text(" ", " ")
    if cell.get("count") != "transformer":
        only = say(" ({} only) ", "（仅{}）", Text(cell.get("count"), "前馈"))
    return say("{}{}on {} x {}", "{}{}在 {} x {} 上", cell.get("size"), only, f"{cell.get('gpus'):,}", cell.get("gpu"))


# -- tables -----------------------------------------------------------------------------------------------------------


def _title(cell: CellView, what: Text) -> Text:
    tokens = f"{cell.get('batch_size') * cell.get('context_length'):,}"
    where = [_where(cell), Text(cell.get("precision")), say("{} tokens on each", "每张 {} 个 token", tokens)]
    if cell.get("count") == "transformer":
        where.append(setting("checkpoint_blocks", str(cell.get("checkpoint_blocks") or "off")))
        if (fast := cell.config.get("fast", "off")) != "off":
            where.append(setting("fast", fast))
    return titled(cell.experiment, what, where)


def _memory_table(cell: CellView) -> Table:
    columns = [word(STRATEGY), *(Column(head, "GiB") for head in (*PARTS.values(), Text("total", "合计")))]
    columns += [word(Text("fits", "放得下")), Column(Text("GPUs needed", "所需 GPU"))]
    rows = []
    for name in cell.get("strategies"):
        own = cell.variant(name)
        sizes, needed = _part_sizes(own), own.value("smallest_cluster")
        fits = Text("yes", "是") if own.value("fits") else Text("no", "否")
        memory = [number(size / GIB) for size in (*sizes, sum(sizes))]
        rows.append([name, *memory, fits, "-" if needed is None else f"{needed:,.0f}"])
    notes = [
        Text(
            "working: low-precision copies of weights, or the few that are gathered at a time",
            "工作副本：权重的低精度副本，或同一时刻收集起来的少数权重",
        ),
        Text(
            "GPUs needed: the fewest on which it fits with as many sequences on each; -: no number is enough",
            "所需 GPU：每张序列数不变时放得下的最少张数；-：多少都不够",
        ),
    ]
    return Table(_title(cell, Text("bytes on each GPU", "每张 GPU 上的字节数")), columns, rows, notes)


def _time_table(cell: CellView) -> Table:
    heads = (MATMULS, Text("forward communication", "前向通信"), Text("backward communication", "后向通信"), STEP)
    columns = [word(STRATEGY), Column(Text("sent", "发送"), "GB"), *(Column(head, "ms") for head in heads)]
    columns += [Column(Text("tokens needed", "所需 token")), word(Text("waits for", "等待"))]
    rows = []
    for name in cell.get("strategies"):
        own = cell.variant(name)
        passes, needed = Passes.of(own), own.value("least_tokens")
        sent = sum(own.value(metric) or 0.0 for metric in own.metrics if metric.startswith(SENT))
        waits = MATMULS
        if passes.late:
            waits = say("communication in {}", "{}的通信", listed(passes.late, (" and ", "与")))
        rows.append(
            [
                *(name, number(sent / 1e9), ms(sum(passes.compute)), *map(ms, passes.communication)),
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
    notes += _assumptions(cell)
    what = Text("bytes sent, and what a step waits for", "发送的字节数，以及一步在等待什么")
    return Table(_title(cell, what), columns, rows, notes)


def _assumptions(cell: CellView) -> list[Text]:
    """Notes on rates that are not known, and on layouts that do not divide the GPUs."""
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
                *(cell.get("gpu"), listed(words[name] for name in assumed)),
            )
        )
    if left_out := cell.config.get("left_out"):
        notes.append(
            say(
                "groups of {} do not divide {} GPUs: shown with smaller groups, or left out",
                "{} 的分组不能整除 {} 张 GPU：改用更小的分组，或省略",
                *(listed(left_out), str(cell.get("gpus"))),
            )
        )
    return notes


# -- charts -----------------------------------------------------------------------------------------------------------


def _chart(cell: CellView) -> Chart:
    sizes = {name: _part_sizes(cell.variant(name)) for name in cell.get("strategies")}
    series = [
        Series(head, [Point(name, parts[number] / GIB) for name, parts in sizes.items()])
        for number, head in enumerate(PARTS.values())
    ]
    title = say("Bytes on each GPU: {}", "每张 GPU 的字节：{}", _where(cell))
    limit = Limit(cell.get("gpu_memory") / GIB, say("memory of one {}", "一张 {} 的显存", cell.get("gpu")))
    return Chart("", title, "stacked", STRATEGY, GIB_TEXT, series, horizontal=True, limits=[limit])


# -- findings ---------------------------------------------------------------------------------------------------------


def _whole_models(cells: Cells) -> list[CellView]:
    """Cells of the whole model, or all where only the exercise was predicted."""
    fine = [cell for cell in cells if cell.ok]
    return [cell for cell in fine if cell.get("count") == "transformer"] or fine


def _fitting_layouts(cells: Cells) -> Text | None:
    """The layouts that fit, and the fastest of them, on each cluster."""
    said = None
    for cell in _whole_models(cells)[:MOST]:
        said = together(said, safely(_fastest_layout, cell))
    return said


def _fastest_layout(cell: CellView) -> Text:
    names = list(cell.get("strategies"))
    fitting = [name for name in names if cell.variant(name).value("fits")]
    said = say(
        "of {0} layouts of {1} {2} fit",
        "{1}的 {0} 种布局中 {2} 种放得下",
        str(len(names)),
        _where(cell),
        str(len(fitting)),
    )
    if not fitting:
        return said
    seconds = {name: Passes.of(cell.variant(name)).overlapped for name in fitting}
    best = min(fitting, key=lambda name: seconds[name])
    return say(
        "{}: {} has the shortest step, {} ms, with {} GiB on a GPU",
        "{}：{} 的一步最短，{} ms，每张 GPU {} GiB",
        *(said, best, ms(seconds[best]), number(sum(_part_sizes(cell.variant(best))) / GIB, 1)),
    )


def _communication_bound(cells: Cells) -> Text | None:
    """The layouts that wait for communication on the largest cluster."""
    cell = max(_whole_models(cells), key=lambda cell: cell.get("gpus"))
    late = [name for name in cell.get("strategies") if Passes.of(cell.variant(name)).late]
    where = f"{cell.get('gpus'):,}"
    if not late:
        return say("on {} GPUs no layout waits for communication", "{} 张 GPU 上没有布局在等通信", where)
    return say("on {} GPUs these wait for communication: {}", "{} 张 GPU 上等待通信的有：{}", where, listed(late))


PARALLEL_PLAN = Experiment(
    name="parallel_plan",
    title=Text("Layouts of a large model on a cluster", "大模型在集群上的并行布局"),
    question=Text(
        "Which layout fits a large model on a cluster, and what does it wait for?",
        "哪种布局能把大模型放进集群，它在等待什么？",
    ),
    instrument=Instrument("parallel_plan", "cs336_systems.experiments.ranks.layouts:measure_plan"),
    grid=_grid,
    tables=tables_per_cell(_memory_table, _time_table),
    charts=charts_per_cell(_chart),
    findings=(_fitting_layouts, _communication_bound),
    order=60,
)
