"""`collectives`: how long does a collective take, and what does the link give?"""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

from cs336_systems.config import RunConfig
from cs336_systems.experiments.ranks.multi_rank import (
    charts_per_cell,
    collective_name,
    failure_table,
    gloo_notes,
    per_link,
)
from cs336_systems.experiments.spec import Config, Experiment, Instrument
from cs336_systems.record import BUS_FACTOR
from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Chart, Point, Series
from cs336_systems.report.phrases import ranging, span, together
from cs336_systems.report.presentation import Cells
from cs336_systems.report.referee import remarks
from cs336_systems.report.rows import ms, number, percent, titled
from cs336_systems.report.terms import TIME
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, say

MB = 10**6
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
CURVE_STEPS = 50
"""Number of line segments in the drawing of a fitted curve."""


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    sizes = [MB // 100, MB, 10 * MB, 50 * MB] if preset == "quick" else [MB, 10 * MB, 100 * MB, 1000 * MB]
    links = [{"backend": "gloo", "device": "cpu"}]
    if base.device_type == "cuda" and preset != "quick":
        links.append({"backend": "nccl", "device": "cuda"})
    for link, ranks in product(links, (2,) if preset == "quick" else (2, 4, 6)):
        yield {**link, "ranks": ranks, "collectives": list(COLLECTIVES), "sizes": sizes, "calls": 10}


# -- the model: time = latency + size / bandwidth ---------------------------------------------------------------------


class Timing(NamedTuple):
    nbytes: float
    """Bytes of the whole array."""
    seconds: float


class Fit(NamedTuple):
    latency: float
    seconds_per_byte: float
    error: float
    """The largest relative error."""

    @property
    def gigabytes_per_second(self) -> float | None:
        return 1e-9 / self.seconds_per_byte if self.seconds_per_byte else None


def timings_of(cell: CellView, collective: str) -> list[Timing]:
    """Return the median time of every size."""
    sizes = cell.get("sizes")
    return [Timing(size, cell.variant(f"{collective} {size}").median("time") or 0.0) for size in sizes]


def fit(timings: Sequence[Timing]) -> Fit:
    """Fit by least squares of relative errors: with absolute errors the largest size alone would count. Neither term is
    negative."""
    weighted = [(x, y, 1 / y**2) for x, y in timings]
    total = sum(w for _, _, w in weighted)
    mean_x, mean_y = (sum(w * point[i] for *point, w in weighted) / total for i in (0, 1))
    spread = sum(w * (x - mean_x) ** 2 for x, _, w in weighted)
    rate = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in weighted) / spread if spread else mean_y / mean_x
    latency = mean_y - rate * mean_x
    if rate <= 0:
        latency, rate = mean_y, 0.0
    elif latency < 0:
        latency, rate = 0.0, sum(w * x * y for x, y, w in weighted) / sum(w * x * x for x, _, w in weighted)
    return Fit(latency, rate, max(abs((latency + rate * x) / y - 1) for x, y in timings))


# -- tables -----------------------------------------------------------------------------------------------------------


def collective_tables(cells: Cells) -> list[Table]:
    found = [cell for cell in cells if cell.ok]
    if not found:
        return [failure_table(cells)]
    heads = (Text("ranks", "rank 数"), Text("link", "链路"), Text("collective", "集合通信"))
    words = [word(head) for head in heads]
    times = [*words, Column(Text("size", "大小"), "MB"), Column(TIME, "us")]
    times += [Column(Text("algbw"), "GB/s"), Column(Text("busbw"), "GB/s")]
    fits = [*words, Column(Text("latency", "延迟"), "us"), Column(Text("bandwidth", "带宽"), "GB/s")]
    fits += [Column(Text("max fit error", "最大拟合误差"))]
    rows, fitted = [], []
    for cell in found:
        for name in cell.get("collectives"):
            row = [str(cell.get("ranks")), f"{cell.get('backend')}, {cell.get('device')}", name]
            timings = timings_of(cell, name)
            for size, seconds in timings:
                rate = size / seconds / 1e9
                bus = rate * BUS_FACTOR[name](cell.get("ranks"))
                rows.append([*row, number(size / 1e6), number(seconds * 1e6, 0), number(rate), number(bus)])
            line = fit(timings)
            values = [number(line.latency * 1e6, 0), number(line.gigabytes_per_second), percent(line.error, 0)]
            fitted.append([*row, *values])
    columns_note = Text(
        "size: the whole array; time: median of the slowest rank; algbw: size over time; busbw: over the busiest link",
        "大小：整个数组；时间：最慢 rank 的中位数；algbw：大小除以时间；busbw：以最忙的链路计",
    )
    fit_note = Text(
        "time = latency + size / bandwidth, fitted to relative errors; latency is that of the whole collective",
        "时间 = 延迟 + 大小 / 带宽，按相对误差拟合；延迟是整个集合通信的",
    )
    notes = [columns_note, *gloo_notes(found), *(remark.text for remark in remarks(cells))]
    name, where = found[0].experiment, (found[0].machine, "fp32")
    return [
        Table(titled(name, Text("in the columns of nccl-tests", "与 nccl-tests 相同的列"), where), times, rows, notes),
        Table(titled(name, Text("latency and bandwidth", "延迟与带宽"), where), fits, fitted, [fit_note]),
    ]


# -- charts -----------------------------------------------------------------------------------------------------------


def _chart(cell: CellView) -> Chart:
    series = []
    for name in cell.get("collectives"):
        seen = [timing for timing in timings_of(cell, name) if timing.seconds]
        factor = BUS_FACTOR[name](cell.get("ranks")) / 1e9
        if seen:
            points = [Point(size / 1e6, size / seconds * factor) for size, seconds in seen]
            series.append(Series(collective_name(name), points, drawn="marks"))
        if len(seen) > 1:
            points = [Point(size / 1e6, size / seconds * factor) for size, seconds in _curve(seen)]
            name_of_fit = say("{}: fit", "{}：拟合", collective_name(name))
            series.append(Series(name_of_fit, points, dashed=True, drawn="line", over=len(series) - 1))
    values = (str(cell.get("ranks")), cell.get("backend"))
    title = say("Bus bandwidth by size: {} ranks, {}", "总线带宽与数组大小：{} 个 rank，{}", *values)
    note = Text(
        "medians of the slowest rank; fit: latency + size / bandwidth", "最慢 rank 的中位数；拟合：延迟 + 大小 / 带宽"
    )
    axes = Text("size of the whole array, MB", "整个数组，MB"), Text("busbw, GB/s")
    return Chart("", title, "lines", *axes, series, log_x=True, log_y=True, note=note)


def _curve(seen: Sequence[Timing]) -> list[Timing]:
    """Return points of the fitted line, close enough to be drawn as a curve."""
    line = fit(seen)
    low, high = min(seen).nbytes, max(seen).nbytes
    sizes = [low * (high / low) ** (step / CURVE_STEPS) for step in range(CURVE_STEPS + 1)]
    return [Timing(size, line.latency + line.seconds_per_byte * size) for size in sizes]


# -- findings ---------------------------------------------------------------------------------------------------------


def _largest_array(cell: CellView) -> Text | None:
    name = "all_reduce" if "all_reduce" in cell.get("collectives") else cell.get("collectives")[0]
    size, seconds = max(timings_of(cell, name))
    bus = size / seconds / 1e9 * BUS_FACTOR[name](cell.get("ranks"))
    values = (_named(name), f"{size / 1e6:g}", ms(seconds))
    said = say("{} of {} MB takes {} ms", "{} 传输 {} MB 用时 {} ms", *values)
    return together(said, say("that is {} GB/s over the busiest link", "最忙的链路为 {} GB/s", number(bus)))


def _fitted(cell: CellView) -> Text | None:
    fits = {name: fit(timings_of(cell, name)) for name in cell.get("collectives")}
    rates = [(rate, _named(name)) for name, line in fits.items() if (rate := line.gigabytes_per_second)]
    latencies = span([line.latency * 1e6 for line in fits.values()], lambda latency: number(latency, 0))
    bandwidth = ranging("the fitted bandwidth is {} GB/s", "拟合的带宽为 {} GB/s", rates, number)
    return say("{}, the latency {} us", "{}，延迟 {} us", bandwidth, latencies)


def _named(collective: str) -> Text:
    return Text(collective.replace("_", "-"))


COLLECTIVE_TIMES = Experiment(
    name="collectives",
    title=Text("Collectives", "集合通信"),
    question=Text(
        "How long does a collective take, and what does the link give?", "一次集合通信用时多少，链路能提供多少带宽？"
    ),
    instrument=Instrument("collectives", "cs336_systems.experiments.ranks.measure_ranks:measure_collectives"),
    grid=_grid,
    tables=collective_tables,
    charts=charts_per_cell(_chart),
    group="ranks",
    findings=per_link(_largest_array, _fitted),
    problems_2026=("distributed_communication_single_node",),
    order=10,
)
