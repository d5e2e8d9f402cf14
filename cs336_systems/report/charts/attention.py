"""Charts of attention: time and rate against length, implementations side by side, and the roofline they are under."""

import itertools
from collections.abc import Iterable, Sequence

from cs336_systems.predict.gpus import memory_bandwidth, peak_flops
from cs336_systems.report.attention import Source
from cs336_systems.report.cells import CellView
from cs336_systems.report.charts.pieces import MS, is_oom, measured, series_of
from cs336_systems.report.document import Chart, Point, Series
from cs336_systems.text import Text

OUT_OF_MEMORY = Text("out of memory", "显存不足")
TOKENS = Text("tokens", "序列长度")


def _by_length(cells: Sequence[CellView]) -> list[Chart]:
    """Time against length for the widest head, in the precision that most would use; rivals as lines."""
    if not cells:
        return []
    precision, dims = _charted(cells)
    found = []
    for dim in dims:
        chosen = [c for c in cells if c.get("head_dim") == dim and c.get("precision") == precision]
        chosen.sort(key=lambda cell: cell.get("seq_len"))
        names = list(dict.fromkeys(cell.get("implementation") for cell in chosen))
        times, rates = [], []
        for name in names:
            own = [cell for cell in chosen if cell.get("implementation") == name]
            times.append(Series(Text(name), [p for cell in own for p in _length_point(cell)]))
            measured = [(cell.get("seq_len"), Source(cell).rate) for cell in own if cell.ok]
            rates.append(Series(Text(name), [Point(x, rate / 1e12) for x, rate in measured if rate]))
        where = f"d = {dim}, {precision}"
        title = Text(f"Attention forward and backward, {where}", f"注意力前向与后向，{where}")
        found.append(Chart("", title, "lines", TOKENS, MS, times, log_x=True, log_y=True))
        if any(series.points for series in rates):
            title = Text(f"Attention, TFLOP/s, {where}", f"注意力 TFLOP/s，{where}")
            found.append(Chart("", title, "lines", TOKENS, Text("TFLOP/s"), rates, log_x=True, log_y=True))
    return found


def _charted(cells: Sequence[CellView]) -> tuple[str, list[int]]:
    """The precision, and the dimensions of heads."""
    precisions = {cell.get("precision") for cell in cells}
    precision = "bf16" if "bf16" in precisions else next(iter(precisions))
    dims = sorted({cell.get("head_dim") for cell in cells})
    return precision, [dim for dim in (64, 128) if dim in dims] or dims[-1:]


def _length_point(cell: CellView) -> list[Point]:
    x = cell.get("seq_len")
    if is_oom(cell):
        return [Point(x, 0.0, note=OUT_OF_MEMORY)]
    metric = "forward_backward_time" if "forward_backward_time" in cell.metrics else "backward_time"
    return measured(cell, metric, x)


def _rivals(cells: Sequence[CellView]) -> list[Chart]:
    names = list(dict.fromkeys(name for cell in cells if cell.ok for name in cell.get("implementations")))
    series = []
    for name in names:
        points = []
        for cell in cells:
            rate = Source(cell, f"{name}_").rate if cell.ok else None
            if rate:
                points.append(Point(_shape(cell), rate / 1e12))
        series.append(Series(Text(name), points))
    title = Text("Forward and backward, TFLOP/s, implementations in turns", "前向与后向 TFLOP/s，各实现轮流测量")
    shape = Text("batch x heads x tokens x d", "batch x 头数 x 长度 x d")
    bars = Chart("", title, "bars", shape, Text("TFLOP/s"), series, horizontal=True)
    roofs = []
    for precision in dict.fromkeys(cell.get("precision") for cell in cells):
        own = [cell for cell in cells if cell.ok and cell.get("precision") == precision]
        sources = [(name, Source(cell, f"{name}_")) for name, cell in itertools.product(names, own)]
        roofs += _roofline(sources, precision)
    return [bars, *roofs]


def _shape(cell: CellView) -> str:
    sizes = " x ".join(str(cell.get(name)) for name in ("batch_size", "heads", "seq_len", "head_dim"))
    return f"{sizes}{' causal' if cell.get('is_causal') else ''}"


# -- roofline ---------------------------------------------------------------------------------------------------------

WRITE_SCORES = ("reference", "compiled")
"""Implementations that write whole matrices of seq x seq."""
INTENSITY = Text(
    "FLOPs per byte of least traffic (q, k, v, o, gradients; if written, scores)",
    "每字节最少访存的 FLOPs（q、k、v、o、梯度；若写出，另计分数矩阵）",
)
"""Least traffic: what enters and leaves, each tensor once in its dtype; where scores and weights are written, these and
the gradients of both, once out and once in."""


def _intensity(cell: CellView, implementation: str) -> float | None:
    sizes = [cell.get(name) for name in ("batch_size", "heads", "seq_len", "head_dim")]
    flops = cell.value("flops")
    if not flops or not all(sizes):
        return None
    batch, heads, length, dim = sizes
    elements = 8 * length * dim  # four tensors and their gradients
    if implementation in WRITE_SCORES:
        elements += 8 * length**2
    width = 2 if cell.get("precision") in ("bf16", "fp16") else 4
    return flops / (batch * heads * elements * width)


def _roofline(sources: Iterable[tuple[str, Source]], where: str) -> list[Chart]:
    """Rates of implementations against what memory and arithmetic allow; a point for each shape. None of a CPU."""
    points: dict[str, list[Point]] = {}
    first = None
    for name, source in sources:
        rate, intensity = source.rate, _intensity(source.cell, name)
        if rate and intensity and source.cell.config.get("device") != "cpu":
            points.setdefault(name, []).append(Point(intensity, rate / 1e12, name=_shape(source.cell)))
            first = first or source.cell
    if first is None:
        return []
    series = [Series(Text(name), found, drawn="marks") for name, found in points.items()]
    reached = [float(point.x) for found in points.values() for point in found]
    title = Text(f"Roofline, forward and backward, {where}", f"屋顶线，前向与后向，{where}")
    axes = INTENSITY, Text("TFLOP/s")
    return [Chart("roofline", title, "lines", *axes, [*series, *_roof(first, reached)], log_x=True, log_y=True)]


def _roof(cell: CellView, reached: Sequence[float]) -> list[Series]:
    """The least of peak and bandwidth times intensity, with both its parts in view; none where they are not known."""
    gpu, precision = cell.environment.gpu, cell.get("precision")
    peak = peak_flops(gpu, "tf32" if precision == "fp32" and cell.environment.tf32 else precision)
    bandwidth = memory_bandwidth(gpu)
    if peak is None or bandwidth is None:
        return []
    ridge = peak / bandwidth
    places = sorted({min(ridge / 2, *reached), ridge, max(2 * ridge, *reached)})
    line = [Point(x, min(peak, bandwidth * x) / 1e12) for x in places]
    rates = f"{peak / 1e12:,.0f} TFLOP/s, {bandwidth / 1e12:.3g} TB/s"
    return [Series(Text(f"{gpu} at most: {rates}", f"{gpu} 上限：{rates}"), line, dashed=True, drawn="line")]


def _flash(cells: Sequence[CellView]) -> list[Chart]:
    """Against length, and the roofline of the widest head that is charted."""
    precision, dims = _charted(cells) if cells else ("", [])
    chosen = [c for c in cells if c.ok and c.get("precision") == precision and c.get("head_dim") == dims[-1]]
    sources = [(cell.get("implementation"), Source(cell)) for cell in sorted(chosen, key=lambda c: c.get("seq_len"))]
    return [*_by_length(cells), *_roofline(sources, f"d = {dims[-1]}, {precision}" if dims else "")]


def _leaderboard(cells: Sequence[CellView]) -> list[Chart]:
    series = [
        series_of(Text("time", "耗时"), (measured(c, "leaderboard_time", str(c.get("implementation"))) for c in cells))
    ]
    title = Text("The course's leaderboard test", "课程排行榜测试")
    return [Chart("", title, "bars", Text("implementation", "实现"), MS, series, horizontal=True)]


def _step(cells: Sequence[CellView]) -> list[Chart]:
    names = dict.fromkeys(name for cell in cells if cell.ok for name in cell.get("implementations"))
    series = [
        series_of(
            name, (measured(c, f"{name}_step_time", f"{c.get('size')}, {c.get('context_length')}") for c in cells)
        )
        for name in names
    ]
    title = Text("A training step, its attention in turns", "训练步，注意力轮流更换")
    return [Chart("", title, "bars", Text("size, context", "规模，上下文"), MS, series, horizontal=True)]


MAKERS = {
    "pytorch_attention": _by_length,
    "flash": _flash,
    "attention_rivals": _rivals,
    "flash_leaderboard": _leaderboard,
    "attention_step": _step,
}
