"""Charts of attention: time and rate against length, implementations side by side."""

from collections.abc import Sequence

from cs336_systems.report.attention import Source
from cs336_systems.report.cells import CellView
from cs336_systems.report.charts.pieces import MS, is_oom, measured, series_of
from cs336_systems.report.document import Chart, Point, Series, Text

OUT_OF_MEMORY = Text("out of memory", "显存不足")
TOKENS = Text("tokens", "序列长度")


def _by_length(cells: Sequence[CellView]) -> list[Chart]:
    """Time against length for the widest head, in the precision that most would use; rivals as lines."""
    if not cells:
        return []
    precisions = {cell.get("precision") for cell in cells}
    precision = "bf16" if "bf16" in precisions else next(iter(precisions))
    dims = sorted({cell.get("head_dim") for cell in cells})
    found = []
    for dim in [d for d in (64, 128) if d in dims] or dims[-1:]:
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
    return [Chart("", title, "bars", shape, Text("TFLOP/s"), series, horizontal=True)]


def _shape(cell: CellView) -> str:
    sizes = " x ".join(str(cell.get(name)) for name in ("batch_size", "heads", "seq_len", "head_dim"))
    return f"{sizes}{' causal' if cell.get('is_causal') else ''}"


def _leaderboard(cells: Sequence[CellView]) -> list[Chart]:
    series = [
        series_of(Text("time", "耗时"), (measured(c, "leaderboard_time", str(c.get("implementation"))) for c in cells))
    ]
    title = Text("The course's leaderboard test", "课程排行榜测试")
    return [Chart("", title, "bars", Text("implementation", "实现"), MS, series, horizontal=True)]


MAKERS = {
    "pytorch_attention": _by_length,
    "flash": _by_length,
    "attention_rivals": _rivals,
    "flash_leaderboard": _leaderboard,
}
