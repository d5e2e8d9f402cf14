"""Charts of attention: time and rate against length, and the roofline."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from cs336_systems.experiments.attention.implementations import rate
from cs336_systems.predict.attention_model import AttentionShape
from cs336_systems.predict.gpus import memory_bandwidth, peak_flops
from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Chart, Point, Series
from cs336_systems.report.points import joined, measured
from cs336_systems.report.presentation import Cells
from cs336_systems.report.terms import MS, OUT_OF_MEMORY, TFLOPS
from cs336_systems.text import Text, say

TOKENS = Text("tokens", "序列长度")
WRITE_SCORES = ("reference", "compiled")
"""Implementations that write whole seq x seq matrices."""
INTENSITY = Text(
    "FLOPs per byte of least traffic (q, k, v, o, gradients; if written, scores)",
    "每字节最少访存的 FLOPs（q、k、v、o、梯度；若写出，另计分数矩阵）",
)


def shape_name(cell: CellView) -> str:
    sizes = " x ".join(str(cell.get(name)) for name in ("batch_size", "heads", "seq_len", "head_dim"))
    return f"{sizes}{' causal' if cell.get('is_causal') else ''}"


class Group(NamedTuple):
    """The cells of one head dimension in one precision, by length."""

    where: str
    cells: Cells


def by_head_dim(cells: Cells) -> list[Group]:
    """Head dimensions 64 and 128, or else the widest, in bf16 if that was measured."""
    precisions = {cell.get("precision") for cell in cells}
    precision = "bf16" if "bf16" in precisions else next(iter(precisions))
    dims = sorted({cell.get("head_dim") for cell in cells})
    return [
        Group(
            f"d = {dim}, {precision}",
            sorted(
                (c for c in cells if c.get("head_dim") == dim and c.get("precision") == precision),
                key=lambda cell: cell.get("seq_len"),
            ),
        )
        for dim in ([dim for dim in (64, 128) if dim in dims] or dims[-1:])
    ]


def time_by_length(what: Text, group: Group, metric: str) -> Chart:
    def points(cell: CellView) -> list[Point]:
        x = cell.get("seq_len")
        return [Point(x, 0.0, note=OUT_OF_MEMORY)] if cell.is_oom else measured(cell, metric, x)

    return _by_length(what, group, MS, points)


def rate_by_length(what: Text, group: Group) -> Chart:
    def points(cell: CellView) -> list[Point]:
        found = rate(cell) if cell.ok else None
        return [Point(cell.get("seq_len"), found / 1e12)] if found else []

    return _by_length(what, group, TFLOPS, points)


def _by_length(what: Text, group: Group, unit: Text, points: Callable[[CellView], list[Point]]) -> Chart:
    """A line per implementation."""
    names = dict.fromkeys(str(cell.get("implementation")) for cell in group.cells)
    series = [
        Series(Text(name), joined(points(cell) for cell in group.cells if cell.get("implementation") == name))
        for name in names
    ]
    title = say("{}, {}", "{}，{}", what, group.where)
    return Chart("", title, "lines", TOKENS, unit, series, log_x=True, log_y=True)


# -- roofline ---------------------------------------------------------------------------------------------------------


def roofline(views: Iterable[tuple[str, CellView]], where: str) -> list[Chart]:
    """Rates of implementations under the bounds of memory and arithmetic, a point per shape; no chart for a CPU."""
    points: dict[str, list[Point]] = {}
    first = None
    for name, view in views:
        found = rate(view)
        if found and view.get("device") != "cpu":
            points.setdefault(name, []).append(Point(_intensity(view, name), found / 1e12, name=shape_name(view)))
            first = first or view
    if first is None:
        return []
    series = [Series(Text(name), found, drawn="marks") for name, found in points.items()]
    reached = [float(point.x) for found in points.values() for point in found]
    title = Text(f"Roofline, forward and backward, {where}", f"屋顶线，前向与后向，{where}")
    axes = INTENSITY, TFLOPS
    return [Chart("roofline", title, "lines", *axes, [*series, *_roof(first, reached)], log_x=True, log_y=True)]


def _intensity(view: CellView, implementation: str) -> float:
    """FLOPs per byte of the least traffic.

    Inputs, output and gradients move once; where scores and weights are written, these and their gradients move once
    out and once in.
    """
    shape = AttentionShape.of(view.config)
    scores = 8 * shape.scores(shape.width) if implementation in WRITE_SCORES else 0
    return (view.value("flops") or 0.0) / (8 * shape.tensor + scores)


def _roof(cell: CellView, reached: Sequence[float]) -> list[Series]:
    """The smaller of peak and bandwidth times intensity, with both parts in view; none for an unknown GPU."""
    gpu, precision = cell.environment.gpu, cell.get("precision")
    peak = peak_flops(gpu, "tf32" if precision == "fp32" and cell.environment.tf32 else precision)
    bandwidth = memory_bandwidth(gpu)
    if peak is None or bandwidth is None:
        return []
    ridge = peak / bandwidth
    corners = sorted({min(ridge / 2, *reached), ridge, max(2 * ridge, *reached)})
    line = [Point(x, min(peak, bandwidth * x) / 1e12) for x in corners]
    rates = f"{peak / 1e12:,.0f} TFLOP/s, {bandwidth / 1e12:.3g} TB/s"
    return [Series(Text(f"{gpu} at most: {rates}", f"{gpu} 上限：{rates}"), line, dashed=True, drawn="line")]
