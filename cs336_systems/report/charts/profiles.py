"""Charts of what a step is made of: kernels, memory at its peak, and what recomputing saves of it."""

from collections.abc import Sequence

from cs336_systems.record import GIB
from cs336_systems.report import kernels
from cs336_systems.report.cells import CellView
from cs336_systems.report.charts.pieces import FEW, GIB_TEXT, MS, PREDICTED, SIZE, joined, measured, series_of
from cs336_systems.report.document import Chart, Point, Series
from cs336_systems.report.rows import row_name, varying
from cs336_systems.text import Text

USUAL_CONTEXT = 512
SMALL_PART = 0.01
"""Of the largest bar: parts that are nowhere larger are one part together."""


def _kernels(cells: Sequence[CellView]) -> list[Chart]:
    """Shares of the kinds at one context: a bar for each of several cells, or for each phase of the only one."""
    ok = [cell for cell in cells if cell.ok]
    contexts = {cell.get("context_length") for cell in ok}
    context = USUAL_CONTEXT if USUAL_CONTEXT in contexts else min(contexts, default=0)
    chosen = [cell for cell in ok if cell.get("context_length") == context]
    shown = varying(chosen)
    bars = {row_name(cell, shown): kernels.kind_seconds(cell, kernels.phases_of(cell)) for cell in chosen}
    where, what = f"context {context}", SIZE
    if len(chosen) == 1:
        where, what = f"{next(iter(bars))}, {where}", Text("phase", "阶段")
        bars = {phase: kernels.kind_seconds(chosen[0], [phase]) for phase in kernels.phases_of(chosen[0])}
    totals = {name: sum(seconds.values()) for name, seconds in bars.items()}
    if not any(totals.values()) or len(bars) > FEW:
        return []
    series = []
    for kind in kernels.KINDS:
        shares = [(name, seconds[kind], totals[name]) for name, seconds in bars.items() if totals[name]]
        if any(part for _, part, _ in shares):
            named = [Point(f"{name}, {total * 1e3:,.1f} ms", 100 * part / total) for name, part, total in shares]
            series.append(Series(Text(kind), named))
    title = Text(f"Kernel time by kind, {where}", f"各类内核的时间占比，{where}")
    share = Text("% of kernel time", "内核时间占比 %")
    return [Chart("", title, "stacked", what, share, series, horizontal=True)]


def _memory(cells: Sequence[CellView]) -> list[Chart]:
    chosen = [cell for cell in cells if cell.ok]
    if not chosen or len(chosen) > FEW:
        return []
    shown = varying(chosen)
    names = [row_name(cell, shown) for cell in chosen]
    parts = [dict(cell.rows("part_memory", 2)) for cell in chosen]
    labels = list(dict.fromkeys(label for found in parts for label in found))
    sizes = {label: [found.get(label, 0) / GIB for found in parts] for label in labels}
    largest = max(map(sum, zip(*sizes.values(), strict=True)), default=0)
    small = [sizes.pop(label) for label in labels if max(sizes[label]) < SMALL_PART * largest]
    series = [Series(Text(str(label)), list(map(Point, names, found))) for label, found in sizes.items()]
    if small:
        series.append(Series(Text("other", "其余"), list(map(Point, names, map(sum, zip(*small, strict=True))))))
    if series:
        predicted = joined(
            measured(cell, "predicted_memory", name, GIB) for cell, name in zip(chosen, names, strict=True)
        )
        series.append(Series(Text("predicted peak", "预测的峰值"), predicted, drawn="marks"))
    title = Text("What the peak is made of", "峰值由什么组成")
    return [Chart("", title, "stacked", SIZE, GIB_TEXT, series, horizontal=True)]


def _checkpointing(cells: Sequence[CellView]) -> list[Chart]:
    ordered = sorted(cells, key=lambda cell: (cell.get("inner") > 0, cell.get("checkpoint_blocks"), cell.get("inner")))
    precisions = list(dict.fromkeys(cell.get("precision") for cell in cells))
    found = []
    for metric, unit, y, title in (
        ("peak_memory", GIB, GIB_TEXT, Text("Peak by blocks recomputed together", "峰值与重计算分组")),
        ("step_time", 1e-3, MS, Text("Step time by blocks recomputed together", "耗时与重计算分组")),
    ):
        chosen = [[cell for cell in ordered if cell.get("precision") == precision] for precision in precisions]
        series = [
            series_of(str(precision), (measured(cell, metric, _group(cell), unit) for cell in own))
            for precision, own in zip(precisions, chosen, strict=True)
        ]
        if metric == "peak_memory":
            series += [
                Series(
                    Text(f"{precision}: {PREDICTED.en}", f"{precision}：{PREDICTED.zh}"),
                    joined(measured(cell, "predicted_by_tracing_memory", _group(cell), unit) for cell in own),
                    drawn="marks",
                    over=number,
                )
                for number, (precision, own) in enumerate(zip(precisions, chosen, strict=True))
            ]
        blocks = Text("blocks in a group; a/b: inside groups of a, of b", "每组块数；a/b 表示组内再分组")
        found.append(Chart("", title, "bars", blocks, y, series))
    return found


def _group(cell: CellView) -> str:
    inner = f"/{cell.get('inner')}" if cell.get("inner") else ""
    return f"{cell.get('checkpoint_blocks') or 'none'}{inner}"


MAKERS = {"kernels": _kernels, "memory": _memory, "checkpointing": _checkpointing}
