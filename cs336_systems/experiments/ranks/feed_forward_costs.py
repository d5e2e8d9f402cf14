"""One feed-forward layer on many devices, in closed form: what limits each layout, and the best split."""

import math
from collections.abc import Iterable
from typing import Any

from cs336_systems.config import RunConfig
from cs336_systems.experiments.spec import Config, Experiment, Instrument
from cs336_systems.predict.feed_forward_layer import (
    LAYOUTS,
    Layer,
    Pass,
    best_tensor_degree,
    most_devices,
    ring,
    ring_of_whole_tensors,
    splits,
)
from cs336_systems.predict.gpus import GIGA, find_card
from cs336_systems.record import Metric
from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Chart, Point, Series
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import ms, number, titled
from cs336_systems.report.terms import MS
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, listed, say

SHAPES = ((65_536, 4096, 11_008, 64), (1_048_576, 8192, 28_672, 256))
"""Tokens on all devices, width, inner width, devices: the 2026 leaderboard's layer, and one of a 70B model."""
GPUS = ("H100", "B200")
PASSES: tuple[Pass, ...] = ("forward", "backward")


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    for gpu in GPUS[:1] if preset == "quick" else GPUS:
        card = find_card(gpu)
        assert card is not None
        assert card.link is not None
        for tokens, width, inner, devices in SHAPES[:1] if preset == "quick" else SHAPES:
            layer = {"tokens": tokens, "width": width, "inner": inner, "devices": devices}
            yield {"gpu": gpu, **layer, "flops": card.peak_flops("bf16"), "bandwidth": card.link * GIGA}


def layer_of(config: Any) -> Layer:
    return Layer(*(config[name] for name in ("tokens", "width", "inner", "flops", "bandwidth")))


def measure_costs(config: dict[str, Any]) -> list[Metric]:
    """Return the costs of each layout and pass, and of every split. They are computed, not measured."""
    layer, devices = layer_of(config), config["devices"]
    found = []
    for layout, cost in LAYOUTS.items():
        for during in PASSES:
            each = cost(layer, devices, during)
            values = {"flops": ("FLOP", each.flops), "sent": ("B", each.sent)}
            values |= {"compute_time": ("s", each.compute), "communication_time": ("s", each.communication)}
            most = most_devices(layer, layout, during)
            values |= {"most_devices": ("1", most)} if math.isfinite(most) else {}
            found += [Metric(name, unit, [value], f"{layout}, {during}") for name, (unit, value) in values.items()]
    for one in splits(layer, devices):
        times = {"compute_time": one.compute, "gather_time": one.gather, "reduce_time": one.reduce}
        times |= {"overlapped_time": one.overlapped, "in_turn_time": one.in_turn}
        found += [Metric(name, "s", [seconds], f"{one.sharded} x {one.tensor}") for name, seconds in times.items()]
    return found


# -- tables -----------------------------------------------------------------------------------------------------------


def _tables(cells: Cells) -> list[Table]:
    return [table for cell in cells if cell.ok for table in (_layouts(cell), _splits(cell), _rings(cell))]


def _where(cell: CellView) -> list[str]:
    names = ("tokens", "width", "inner")
    sizes = ", ".join(f"{letter} = {cell.get(name):,}" for letter, name in zip("BDF", names, strict=True))
    rates = f"C = {cell.get('flops') / 1e12:,.0f} TFLOP/s, W = {cell.get('bandwidth') / GIGA:,.0f} GB/s"
    return [f"{cell.get('devices')} x {cell.get('gpu')}", sizes, rates]


FORMULAS = {
    "DP, forward": ("0", "-"),
    "DP, backward": ("12 D F (N-1)/N", "1 + B W / C"),
    "FSDP, forward": ("6 D F (N-1)/N", "1 + B W / C"),
    "FSDP, backward": ("12 D F (N-1)/N", "1 + B W / C"),
    "TP, forward": ("4 B D (N-1)/N", "1 + 3 F W / (2 C)"),
    "TP, backward": ("4 B D (N-1)/N", "1 + 3 F W / C"),
}
"""Layout and pass -> bytes that a device sends, and the largest N whose communication hides behind matmuls."""


def _layouts(cell: CellView) -> Table:
    columns = [
        word(Text("layout", "布局")),
        word(Text("bytes sent", "发送字节数")),
        Column(Text("sent", "发送"), "MB"),
        Column(Text("matmuls", "矩阵乘"), "ms"),
        Column(Text("communication", "通信"), "ms"),
        word(Text("largest N", "最大 N")),
        Column(Text("largest N", "最大 N")),
    ]
    rows: list[list[str | Text]] = []
    for name, (sent, most) in FORMULAS.items():
        view = cell.variant(name)
        times = [ms(view.value(metric)) for metric in ("compute_time", "communication_time")]
        largest = view.value("most_devices")
        shown = "" if largest is None else f"{math.floor(largest + 1e-9):,}"
        rows.append([name, sent, number((view.value("sent") or 0.0) / 1e6, 1), *times, most, shown])
    notes = [
        Text(
            "matmuls: 6 B D F / (N C) in forward, 12 B D F / (N C) in backward",
            "矩阵乘：前向 6 B D F / (N C)，反向 12 B D F / (N C)",
        ),
        Text(
            "largest N: up to it communication takes no longer than matmuls",
            "最大 N：在此之前通信时间不超过矩阵乘",
        ),
    ]
    title = titled(cell.experiment, Text("one layer by layout", "单层，按布局"), _where(cell))
    return Table(title, columns, rows, notes)


def _splits(cell: CellView) -> Table:
    metrics = {
        "compute_time": Text("matmuls", "矩阵乘"),
        "gather_time": Text("gather", "收集权重"),
        "reduce_time": Text("reduce", "归约激活"),
        "overlapped_time": Text("overlapped", "全部重叠"),
        "in_turn_time": Text("in turn", "通信轮流"),
    }
    columns = [word(Text("FSDP x TP")), *(Column(name, "ms") for name in metrics.values())]
    names = [f"{one.sharded} x {one.tensor}" for one in splits(layer_of(cell.config), cell.get("devices"))]
    rows: list[list[str | Text]] = [
        [name, *(ms(cell.variant(name).value(metric)) for metric in metrics)] for name in names
    ]
    degree = best_tensor_degree(layer_of(cell.config), cell.get("devices"))
    notes = [
        Text(
            "gather: 6 D F (X-1)/(X Y W), reduce: 4 B D (Y-1)/(X Y W), X x Y devices",
            "收集：6 D F (X-1)/(X Y W)，归约：4 B D (Y-1)/(X Y W)，共 X x Y 个设备",
        ),
        Text(
            "overlapped: the largest of the three; in turn: matmuls, or the sum of both communications",
            "全部重叠：三者最大值；通信轮流：矩阵乘与两种通信之和中的较大者",
        ),
        say(
            "in turn, communication is least near Y = sqrt(3 F N / (2 B)) = {}",
            "通信轮流时，Y = sqrt(3 F N / (2 B)) = {} 附近通信最少",
            f"{degree:.2f}",
        ),
    ]
    what = Text("forward by FSDP and TP together", "FSDP 与 TP 结合的前向")
    return Table(titled(cell.experiment, what, _where(cell)), columns, rows, notes)


def _rings(cell: CellView) -> Table:
    layer, devices = layer_of(cell.config), cell.get("devices")
    what = word(Text("all-reduce of the gradients", "梯度的 all-reduce"))
    columns = [what, word(Text("formula", "公式")), Column(Text("time", "时间"), "ms")]
    values = (layer.weights, devices, layer.bandwidth)
    rows: list[list[str | Text]] = [
        [Text("parts of S/N bytes", "每次 S/N 字节"), "2 (N-1)/N S/W", ms(ring(*values))],
        [Text("whole tensors", "每次整个张量"), "(N-1) S/W", ms(ring_of_whole_tensors(*values))],
    ]
    return Table(titled(cell.experiment, Text("two rings", "两种环"), _where(cell)), columns, rows)


# -- charts -----------------------------------------------------------------------------------------------------------


def _charts(cells: Cells) -> list[Chart]:
    return [_split_chart(cell) for cell in cells if cell.ok]


def _split_chart(cell: CellView) -> Chart:
    """Draw matmuls and both communications by the size of a group: the two cross near the best split."""
    found = splits(layer_of(cell.config), cell.get("devices"))
    times = {
        Text("matmuls", "矩阵乘"): [one.compute for one in found],
        Text("gathering weights (FSDP)", "收集权重（FSDP）"): [one.gather for one in found],
        Text("reducing activations (TP)", "归约激活（TP）"): [one.reduce for one in found],
    }
    series = [
        Series(name, [Point(one.tensor, 1e3 * value) for one, value in zip(found, values, strict=True)])
        for name, values in times.items()
    ]
    where = f"{cell.get('devices')} x {cell.get('gpu')}"
    title = say("Forward of one layer on {}", "{} 上单层的前向", where)
    x = Text("devices in a tensor-parallel group", "每个张量并行组的设备数")
    return Chart("", title, "lines", x, MS, series, log_x=True, note=listed(_where(cell)[1:]))


# -- findings ---------------------------------------------------------------------------------------------------------


def _limits(cells: Cells) -> Text | None:
    cell = next(cell for cell in cells if cell.ok)
    each = []
    for layout, during in (("FSDP", "forward"), ("TP", "forward")):
        most = math.floor((cell.variant(f"{layout}, {during}").value("most_devices") or 0.0) + 1e-9)
        each.append(say("{} up to {}", "{} 到 {}", layout, f"{most:,}"))
    return say(
        "in forward, communication hides behind matmuls on this many {}: {}",
        "前向中，通信可被矩阵乘掩盖的 {} 数量：{}",
        *(str(cell.get("gpu")), listed(each)),
    )


def _best_split(cells: Cells) -> Text | None:
    cell = next(cell for cell in cells if cell.ok)
    found = splits(layer_of(cell.config), cell.get("devices"))
    best = min(found, key=lambda one: (one.in_turn, one.gather + one.reduce))
    return say(
        "with both communications on one link, {} groups of {} devices are the best split: {} ms",
        "两种通信共用链路时，{} 组、每组 {} 个设备为最佳划分：{} ms",
        *(str(best.sharded), str(best.tensor), ms(best.in_turn)),
    )


FEED_FORWARD_COSTS = Experiment(
    name="feed_forward_costs",
    title=Text("One feed-forward layer on many devices", "单个前馈层在多设备上的开销"),
    question=Text(
        "From how many devices on does communication limit DP, FSDP and TP?",
        "设备多到什么程度，通信会限制 DP、FSDP 与 TP？",
    ),
    instrument=Instrument("feed_forward_costs", f"{__name__}:measure_costs"),
    grid=_grid,
    tables=_tables,
    charts=_charts,
    findings=(_limits, _best_split),
    group="ranks",
    problems_2026=("alternate_ring_all_reduce", "data_parallel_calcs", "fsdp_calcs", "tp_calcs", "fsdp_tp_calcs"),
    order=70,
)
