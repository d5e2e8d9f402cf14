"""Pictures of whole steps."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from cs336_systems.report.cells import CellView
from cs336_systems.report.layout import as_text
from cs336_systems.report.picture import PALETTE, Picture


def fast_step(cells: Sequence[CellView]) -> list[Picture]:
    """A panel for each size and batch: bars for what is switched on, the rival's in a colour of its own."""
    panels: dict[str, list[CellView]] = {}
    for cell in sorted(cells, key=lambda cell: (cell.get("batch_size"), cell.get("d_model"))):
        name = f"{cell.get('size')}, {cell.get('batch_size')} x {cell.get('context_length')} tokens"
        panels.setdefault(name, []).append(cell)
    if not panels:
        return []
    rows = max(len(found) for found in panels.values())
    size = (8.0, 0.5 + len(panels) * (0.45 + 0.19 * rows))
    return [Picture("fast_step", "A training step by what is switched on", partial(_draw, panels=panels), size)]


def variant(cell: CellView) -> str:
    """What a cell has switched on, in words."""
    if cell.get("model_factory"):
        name = "Llama of transformers" if cell.get("model_factory").endswith("llama:build") else "own model"
        return f"{name}, compiled" if cell.get("compile") else name
    parts = as_text(cell.get("fast")).replace(",", " + ")
    return "compiled" if cell.get("compile") else {"off": "none", "on": "all"}.get(parts, parts)


def _draw(figure: Any, panels: dict[str, list[CellView]]) -> None:
    heights = [len(found) + 1.5 for found in panels.values()]
    for axes, (title, found) in zip(
        figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0], panels.items(), strict=True
    ):
        found = sorted(found, key=lambda cell: -(cell.value("step_time") or 0.0))
        times = [1e3 * (cell.value("step_time") or 0.0) for cell in found]
        colors = [
            PALETTE[1] if cell.get("model_factory") else PALETTE[0] if cell.get("fast") == "on" else PALETTE[4]
            for cell in found
        ]
        bars = axes.barh([variant(cell) for cell in found], times, 0.7, color=colors)
        axes.bar_label(bars, [f"{time:,.1f}" for time in times], padding=3, fontsize=8)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.08)
        axes.set(title=title)
    axes.set_xlabel("ms a step")
