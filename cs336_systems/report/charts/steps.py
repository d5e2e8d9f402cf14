"""Charts of the time of steps, and of the memory they need."""

from collections.abc import Callable, Sequence
from typing import Any

from cs336_systems.record import GIB
from cs336_systems.report.cells import PHASES, CellView
from cs336_systems.report.charts.pieces import (
    FEW,
    GIB_TEXT,
    MEASURED,
    MS,
    PHASE_NAMES,
    PREDICTED,
    SIZE,
    measured,
    series_of,
)
from cs336_systems.report.document import Chart, Point, Series
from cs336_systems.report.rows import row_name, varying
from cs336_systems.text import Text


def _steps(cells: Sequence[CellView]) -> list[Chart]:
    chosen = [cell for cell in cells if cell.ok and cell.get("mode") in (None, "train-step")] or [*cells]
    shown = varying(chosen)
    if len(chosen) > FEW:
        return []
    names = [row_name(cell, shown) for cell in chosen]
    series = [
        series_of(
            PHASE_NAMES[phase],
            (measured(cell, f"{phase}_time", name) for cell, name in zip(chosen, names, strict=True)),
        )
        for phase in PHASES[:-1]
    ]
    title = Text("A training step by phase", "训练步各阶段耗时")
    kept = [s for s in series if s.points]
    return [Chart("", title, "stacked", SIZE, MS, kept, horizontal=len(chosen) > 6)]


def _warmup(cells: Sequence[CellView]) -> list[Chart]:
    """The course of steps without warm-up, by size: where it becomes flat is where measuring may begin."""
    series = []
    for cell in cells:
        if cell.ok and cell.get("warmup_steps") == 0:
            times = cell.metrics["step_time"].numbers
            points = [Point(number, 1e3 * seconds) for number, seconds in enumerate(times, start=1)]
            series.append(Series(Text(str(cell.get("size"))), points))
    title = Text("Steps from a cold start, without warm-up", "无预热时从冷启动开始的各步")
    return [Chart("", title, "lines", Text("step", "步"), MS, series, log_y=True)]


def _speedups(field: str, baseline: Any, title: Text) -> Callable[[Sequence[CellView]], list[Chart]]:
    def make(cells: Sequence[CellView]) -> list[Chart]:
        chosen = [cell for cell in cells if cell.ok and cell.get("mode") == "train-step"]
        values = [v for v in dict.fromkeys(cell.get(field) for cell in chosen) if v != baseline]
        sizes = list(dict.fromkeys(cell.get("size") for cell in chosen))
        by = {(cell.get("size"), cell.get(field)): cell.value("step_time") for cell in chosen}
        series = []
        for value in values:
            points = []
            for size in sizes:
                base, time = by.get((size, baseline)), by.get((size, value))
                if base and time:
                    points.append(Point(str(size), base / time))
            series.append(Series(Text("compiled", "编译") if value is True else Text(str(value)), points))
        times = Text(f"times as fast as {'eager' if baseline is False else baseline}", "加速比")
        return [Chart("", title, "bars", SIZE, times, series)]

    return make


def _predictions(cells: Sequence[CellView]) -> list[Chart]:
    plain = [
        cell
        for cell in cells
        if cell.get("mode") == "train-step"
        and cell.get("attention") == "reference"
        and not cell.get("checkpoint_blocks")
    ]
    shown = varying(plain)
    if not plain or len(plain) > FEW:
        return []
    names = [row_name(cell, shown) for cell in plain]
    series = [
        series_of(text, (measured(cell, metric, name, GIB) for cell, name in zip(plain, names, strict=True)))
        for text, metric in ((MEASURED, "peak_memory"), (PREDICTED, "predicted_memory"))
    ]
    title = Text("Peak memory of a training step, measured and predicted", "训练步峰值显存：实测与预测")
    return [Chart("", title, "bars", SIZE, GIB_TEXT, series, horizontal=True)]


def _fast_step(cells: Sequence[CellView]) -> list[Chart]:
    panels: dict[tuple, list[CellView]] = {}
    for cell in cells:
        if cell.ok:
            panels.setdefault(tuple(cell.get(n) for n in ("size", "batch_size", "context_length")), []).append(cell)
    found = []
    for (size, batch, context), members in panels.items():
        ordered = sorted(members, key=lambda cell: -(cell.value("step_time") or 0.0))
        series = [
            series_of(
                text, (measured(c, "step_time", variant(c)) for c in ordered if bool(c.get("model_factory")) == rival)
            )
            for text, rival in ((Text("this package", "本工具"), False), (Text("rival", "对手"), True))
        ]
        where = f"{size}, {batch} x {context}"
        title = Text(f"A training step of {where} tokens by what is switched on", f"{where} token 的训练步，按启用部分")
        parts = Text("parts of the fast step", "启用的部分")
        kept = [s for s in series if s.points]
        # One bar has one part: stacked, it stands beside its name, the rival's among the others.
        places = [variant(cell) for cell in ordered]
        found.append(Chart("", title, "stacked", parts, MS, kept, horizontal=True, places=places))
    return found


def variant(cell: CellView) -> str:
    """What a cell has switched on, in words."""
    if cell.get("model_factory"):
        name = "Llama of transformers" if cell.get("model_factory").endswith("llama:build") else "own model"
        return f"{name}, compiled" if cell.get("compile") else name
    parts = str(cell.get("fast")).replace(",", " + ")
    return "compiled" if cell.get("compile") else {"off": "none", "on": "all"}.get(parts, parts)


MAKERS: dict[str, Callable[[Sequence[CellView]], list[Chart]]] = {
    "bench": _steps,
    "end_to_end": _steps,
    "warmup": _warmup,
    "precision": _speedups("precision", "fp32", Text("Speed-up over fp32 by size", "各规模相对 fp32 的加速比")),
    "compile": _speedups("compile", False, Text("Speed-up by torch.compile", "torch.compile 的加速比")),
    "fast_step": _fast_step,
    "peak_memory": _predictions,
}
