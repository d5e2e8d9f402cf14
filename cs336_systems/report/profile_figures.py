"""Pictures of kernels and memory."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from cs336_systems.kernel_classes import KINDS
from cs336_systems.record import GIB
from cs336_systems.report.cells import CellView
from cs336_systems.report.kernels import kind_seconds, phases_of
from cs336_systems.report.layout import row_name, varying
from cs336_systems.report.picture import Picture, stacked_bars

MOST_BARS = 24
USUAL_CONTEXT = 512
SMALL_PART = 0.01
"""Of the largest bar: parts that are nowhere larger are one part together."""


def kernels(cells: Sequence[CellView]) -> list[Picture]:
    """Shares of the kinds: a bar for each phase of one cell, or for each of several cells, at one context."""
    contexts = {cell.get("context_length") for cell in cells}
    context = USUAL_CONTEXT if USUAL_CONTEXT in contexts else min(contexts, default=0)
    chosen = [cell for cell in cells if cell.get("context_length") == context]
    shown = varying(chosen)
    bars = {row_name(cell, shown): kind_seconds(cell, phases_of(cell)) for cell in chosen}
    if len(chosen) == 1:
        bars = {phase: kind_seconds(chosen[0], [phase]) for phase in phases_of(chosen[0])}
    if not bars or len(bars) > MOST_BARS:
        return []
    size = (8.0, 1.4 + 0.28 * len(bars))
    return [Picture("kernels", f"Kernel time by kind, context {context}", partial(_draw_kinds, bars=bars), size)]


def _draw_kinds(figure: Any, bars: dict[str, dict[str, float]]) -> None:
    axes = figure.subplots()
    used = [kind for kind in KINDS if any(seconds[kind] for seconds in bars.values())]
    totals = [sum(seconds.values()) for seconds in bars.values()]
    parts = {
        kind: [100 * seconds[kind] / total for seconds, total in zip(bars.values(), totals, strict=True)]
        for kind in used
    }
    names = [f"{name}  {total * 1e3:,.1f} ms" for name, total in zip(bars, totals, strict=True)]
    stacked_bars(axes, names, parts)
    axes.set(xlim=(0, 100), xlabel="% of kernel time")
    axes.margins(y=0.01)


def memory(cells: Sequence[CellView]) -> list[Picture]:
    shown = varying(cells)
    if not cells or len(cells) > MOST_BARS:
        return []
    size = (8.0, 1.4 + 0.3 * len(cells))
    draw = partial(_draw_memory, cells=cells, names=[row_name(cell, shown) for cell in cells])
    return [Picture("memory", "What the peak is made of; crosses: predicted", draw, size)]


def _draw_memory(figure: Any, cells: Sequence[CellView], names: list[str]) -> None:
    axes = figure.subplots()
    by_cell = [dict(cell.rows("part_memory", 2)) for cell in cells]
    labels = list(dict.fromkeys(label for parts in by_cell for label in parts))
    sizes = {label: [parts.get(label, 0) / GIB for parts in by_cell] for label in labels}
    small = [
        label for label in labels if max(sizes[label]) < SMALL_PART * max(map(sum, zip(*sizes.values(), strict=True)))
    ]
    rest = [sum(column) for column in zip(*(sizes.pop(label) for label in small), strict=True)]
    stacked_bars(axes, names, sizes | ({"the rest": rest} if rest else {}))
    predicted = [(cell.value("predicted_memory") or float("nan")) / GIB for cell in cells]
    axes.plot(predicted, range(len(cells)), "x", color="black", label="predicted peak")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.set_xlabel("GiB at the peak of a step")


def checkpointing(cells: Sequence[CellView]) -> list[Picture]:
    if not cells:
        return []
    caption = "Peak and step time by blocks recomputed together; a/b: in groups of a, and inside these of b"
    return [Picture("checkpointing", caption, partial(_draw_groups, cells=cells), (9.0, 3.8))]


def _draw_groups(figure: Any, cells: Sequence[CellView]) -> None:
    ordered = sorted(cells, key=lambda cell: (cell.get("inner") > 0, cell.get("checkpoint_blocks"), cell.get("inner")))
    names = list(dict.fromkeys(map(_group_name, ordered)))
    precisions = list(dict.fromkeys(cell.get("precision") for cell in cells))
    width = 0.8 / len(precisions)
    peaks, times = figure.subplots(1, 2)
    for index, precision in enumerate(precisions):
        chosen = [cell for cell in ordered if cell.get("precision") == precision]
        places = [names.index(_group_name(cell)) + (index - (len(precisions) - 1) / 2) * width for cell in chosen]
        for axes, metric, unit in ((peaks, "peak_memory", GIB), (times, "step_time", 1e-3)):
            axes.bar(places, [(cell.value(metric) or 0.0) / unit for cell in chosen], width, label=precision)
        predicted = [(cell.value("predicted_by_tracing_memory") or 0.0) / GIB for cell in chosen]
        peaks.plot(places, predicted, "x", color="black", label=None if index else "predicted")
    for axes, label in ((peaks, "peak, GiB"), (times, "step, ms")):
        axes.set_xticks(range(len(names)), names, fontsize=8)
        axes.set(ylabel=label, xlabel="blocks recomputed together")
        axes.grid(axis="x", visible=False)
    peaks.legend()


def _group_name(cell: CellView) -> str:
    inner = f"/{cell.get('inner')}" if cell.get("inner") else ""
    return f"{cell.get('checkpoint_blocks') or 'none'}{inner}"
