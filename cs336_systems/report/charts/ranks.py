"""Charts of the experiments with several ranks."""

from collections.abc import Sequence

from cs336_systems.record import BUS_FACTOR, GIB, MIB
from cs336_systems.report import parallel
from cs336_systems.report.cells import CellView
from cs336_systems.report.charts.pieces import GIB_TEXT, MEASURED, MS, PHASE_NAMES, PREDICTED
from cs336_systems.report.document import Chart, Limit, Point, Series
from cs336_systems.text import Text

FITTED = 50
"""Pieces of which a fitted curve is made."""


def _collectives(cells: Sequence[CellView]) -> list[Chart]:
    found = []
    for cell in (cell for cell in cells if cell.ok):
        series = []
        for name in cell.get("collectives"):
            seen = [(size, seconds) for size, seconds in parallel.points(cell, name) if seconds]
            factor = BUS_FACTOR[name](cell.get("ranks")) / 1e9
            if seen:
                points = [Point(s / 1e6, s / t * factor) for s, t in seen]
                series.append(Series(Text(name), points, drawn="marks"))
            if len(seen) > 1:
                fit = Text(f"{name}: fit", f"{name}：拟合")
                line = [Point(s / 1e6, s / t * factor) for s, t in _fitted(seen)]
                series.append(Series(fit, line, dashed=True, drawn="line", over=len(series) - 1))
        where = f"{cell.get('ranks')} ranks, {cell.get('backend')}"
        title = Text(
            f"Bus bandwidth by size, {where}; fit: latency + size / bandwidth",
            f"总线带宽与数组大小，{where}；拟合：延迟 + 大小 / 带宽",
        )
        axes = Text("size of the whole array, MB", "整个数组 MB"), Text("busbw, GB/s")
        found.append(Chart("", title, "lines", *axes, series, log_x=True, log_y=True))
    return found


def _fitted(seen: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """(bytes, seconds) by the fit, so near each other that they look like the curve they are on."""
    latency, rate, _ = parallel.fit(seen)
    low, high = min(seen)[0], max(seen)[0]
    sizes = [low * (high / low) ** (piece / FITTED) for piece in range(FITTED + 1)]
    return [(size, latency + rate * size) for size in sizes]


def _ddp(cells: Sequence[CellView]) -> list[Chart]:
    return [chart for cell in cells if cell.ok for chart in (_exposed(cell), _lanes(cell))]


def _exposed(cell: CellView) -> Chart:
    rows = [row for row in parallel.exposures(cell) if row.name != "none"]
    alone = [Point(row.name, 1e3 * row.alone) for row in rows if row.alone is not None]
    exposed = [Point(row.name, 1e3 * max(0.0, row.exposed)) for row in rows if row.exposed is not None]
    series = [Series(Text("communication alone", "单独通信"), alone), Series(Text("exposed", "暴露的通信"), exposed)]
    title = Text(f"Averaging gradients: {parallel.where(cell)}", f"梯度平均：{parallel.where(cell)}")
    return Chart("", title, "bars", Text("wrapper", "封装"), MS, series)


def _lanes(cell: CellView) -> Chart:
    """One step of each wrapper: above what this rank computed, below what was on its way."""
    shown = [name for name in cell.get("arrangements") if f"{name}: message_start" in cell.metrics]
    lanes: list[dict[str, list[Point]]] = [{phase: [] for phase in PHASE_NAMES}, {}]
    for lane, kind in zip(lanes, ("phase", "message"), strict=True):
        for name in shown:
            for word, start, end in _spans(cell, f"{name}: {kind}"):
                lane.setdefault(word, []).append(Point(name, 1e3 * end, start=1e3 * start))
    series = [
        Series(PHASE_NAMES.get(word) or Text(word.replace("_", "-")), points, lane=number)
        for number, lane in enumerate(lanes)
        for word, points in lane.items()
        if points
    ]
    where = parallel.where(cell)
    title = Text(f"Computing and sending in one step of each wrapper: {where}", f"各封装一步中的计算与通信：{where}")
    since = Text(
        "ms since the step began; above: computing, below: messages on their way",
        "自该步开始的毫秒；上：计算，下：在途消息",
    )
    return Chart("lanes", title, "spans", Text("wrapper", "封装"), since, series)


def _spans(cell: CellView, kind: str) -> list[tuple[str, float, float]]:
    """What it was, and seconds at which it began and ended."""
    words = [str(word) for word in cell.metrics[kind].samples]
    starts, ends = (cell.metrics[f"{kind}_{end}"].numbers for end in ("start", "end"))
    return list(zip(words, starts, ends, strict=True))


def _bucket_model(cells: Sequence[CellView]) -> list[Chart]:
    found = []
    for cell in (cell for cell in cells if cell.ok):
        rows = parallel.bucket_rows(cell)
        series = [
            Series(MEASURED, [Point(row.size / MIB, 1e3 * row.measured) for row in rows]),
            Series(PREDICTED, [Point(row.size / MIB, 1e3 * row.predicted) for row in rows], dashed=True),
            Series(Text("S / (n w) + n o"), [Point(row.size / MIB, 1e3 * row.formula) for row in rows], dashed=True),
        ]
        title = Text(
            f"Exposed communication by bucket size: {parallel.where(cell)}",
            f"暴露的通信与桶大小：{parallel.where(cell)}",
        )
        found.append(Chart("", title, "lines", Text("bucket, MB", "桶 MB"), MS, series, log_x=True))
    return found


def _sharding(cells: Sequence[CellView]) -> list[Chart]:
    parts = {
        "parameter": Text("parameters", "参数"),
        "gradient": Text("gradients", "梯度"),
        "optimizer": Text("optimizer state", "优化器状态"),
    }
    found = []
    for cell in (cell for cell in cells if cell.ok):
        series = [
            Series(text, [Point(n, (cell.value(f"{n}: {part}_memory") or 0.0) / MIB) for n in cell.get("arrangements")])
            for part, text in parts.items()
        ]
        title = Text(f"Memory on the fullest rank: {parallel.where(cell)}", f"占用最多的 rank：{parallel.where(cell)}")
        wrapper = Text("arrangement", "方案")
        found.append(Chart("", title, "stacked", wrapper, Text("MiB"), series))
    return found


def _plan(cells: Sequence[CellView]) -> list[Chart]:
    found = []
    for cell in (cell for cell in cells if cell.ok):
        series = []
        for label, part in parallel.PLAN_PARTS.items():
            sizes = [(name, (cell.value(f"{name}: {part}_memory") or 0.0) / GIB) for name in cell.get("strategies")]
            series.append(Series(Text(label), [Point(name, size) for name, size in sizes]))
        title = Text(f"Bytes on each GPU: {parallel.plan_where(cell)}", f"每张 GPU 的字节：{parallel.plan_where(cell)}")
        gpu = cell.get("gpu")
        limit = Limit(cell.get("gpu_memory") / GIB, Text(f"what one {gpu} has", f"一张 {gpu} 的显存"))
        strategy = Text("strategy", "策略")
        found.append(Chart("", title, "stacked", strategy, GIB_TEXT, series, horizontal=True, limit=limit))
    return found


MAKERS = {
    "collectives": _collectives,
    "ddp": _ddp,
    "bucket_model": _bucket_model,
    "optimizer_sharding": _sharding,
    "fsdp": _sharding,
    "parallel_plan": _plan,
}
