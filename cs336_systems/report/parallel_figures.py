"""Pictures of the experiments with several ranks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from cs336_systems.record import BUS_FACTOR, GIB, MIB
from cs336_systems.report import parallel
from cs336_systems.report.cells import CellView
from cs336_systems.report.picture import PALETTE, Picture, stacked_bars

PHASE_COLORS = dict(zip(("forward", "loss", "backward", "sync", "optimizer"), PALETTE, strict=False))
MESSAGE_COLOR = "#555555"


def _one_each(
    cells: Sequence[CellView], name: str, caption: str, draw: Callable[..., None], bars: str | None = None
) -> list[Picture]:
    """A picture of every cell, its file numbered where there are several; as high as the bars of that field need."""
    return [
        Picture(
            f"{name}-{index}" if len(cells) > 1 else name,
            caption,
            partial(draw, cell=cell),
            (7.0, 1.2 + 0.45 * len(cell.get(bars)) if bars else 3.6),
        )
        for index, cell in enumerate(cells, start=1)
    ]


def collectives(cells: Sequence[CellView]) -> list[Picture]:
    return _one_each(cells, "collectives", "Bus bandwidth by size of the array", _draw_collectives)


def _draw_collectives(figure: Any, cell: CellView) -> None:
    axes = figure.subplots()
    for color, name in zip(PALETTE, cell.get("collectives"), strict=False):
        points = parallel.points(cell, name)
        factor = BUS_FACTOR[name](cell.get("ranks"))
        sizes = [size / 1e6 for size, _ in points]
        axes.plot(sizes, [size / t / 1e9 * factor for size, t in points], "o", color=color, label=name)
        latency, rate, _ = parallel.fit(points)
        between = [sizes[0] * (sizes[-1] / sizes[0]) ** (i / 50) for i in range(51)]
        fitted = [mb * 1e6 / (latency + rate * mb * 1e6) / 1e9 * factor for mb in between]
        axes.plot(between, fitted, "-", color=color, linewidth=1, alpha=0.7)
    axes.set(xscale="log", yscale="log", xlabel="size of the whole array, MB", ylabel="busbw, GB/s")
    axes.set_title(
        f"{cell.get('ranks')} ranks, {cell.get('backend')} on {cell.machine}; lines: latency + size / bandwidth"
    )
    axes.legend()


def lanes(cells: Sequence[CellView]) -> list[Picture]:
    """One step of each arrangement: above what this rank computed, below what was on its way."""
    seen = [cell for cell in cells if _with_messages(cell)]
    caption = "Computing and sending, side by side, in one step of each wrapper"
    return _one_each(seen, "ddp-lanes", caption, _draw_lanes, "arrangements")


def _with_messages(cell: CellView) -> list[str]:
    return [name for name in cell.get("arrangements") if f"{name}: message_start" in cell.metrics]


def _draw_lanes(figure: Any, cell: CellView) -> None:
    shown = _with_messages(cell)
    axes = figure.subplots()
    spans = {name: _spans(cell, name) for name in shown}
    for row, name in enumerate(shown):
        phases, messages = spans[name]
        for phase, start, end in phases:
            axes.barh(row - 0.2, end - start, 0.34, left=start, color=PHASE_COLORS[phase], linewidth=0)
        for _, start, end in messages:
            axes.barh(row + 0.2, end - start, 0.34, left=start, color=MESSAGE_COLOR, edgecolor="white", linewidth=0.4)
    axes.set_yticks(range(len(shown)), shown)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("ms since the step began; of each pair, above: computing, below: messages on their way")
    axes.set_title(parallel.where(cell))
    seen = {phase for phases, _ in spans.values() for phase, *_ in phases}
    patches = [axes.barh(0, 0, color=color, label=phase) for phase, color in PHASE_COLORS.items() if phase in seen]
    patches.append(axes.barh(0, 0, color=MESSAGE_COLOR, label="all-reduce"))
    figure.legend(handles=patches, loc="outside lower center", ncols=6)


def _spans(cell: CellView, name: str) -> tuple[list[tuple[str, float, float]], list[tuple[str, float, float]]]:
    """Phases and messages, each with its start and end in ms."""
    both = []
    for kind in ("phase", "message"):
        words = [str(word) for word in cell.metrics[f"{name}: {kind}"].samples]
        starts, ends = ([t * 1e3 for t in cell.metrics[f"{name}: {kind}_{end}"].numbers] for end in ("start", "end"))
        both.append(list(zip(words, starts, ends, strict=True)))
    return both[0], both[1]


def bucket_model(cells: Sequence[CellView]) -> list[Picture]:
    caption = "Exposed communication by bucket size, predicted and measured"
    return _one_each(cells, "bucket-model", caption, _draw_bucket_model)


def _draw_bucket_model(figure: Any, cell: CellView) -> None:
    axes = figure.subplots()
    rows = parallel.bucket_rows(cell)
    sizes = [row.size / MIB for row in rows]
    axes.plot(sizes, [row.measured * 1e3 for row in rows], "o-", label="measured")
    axes.plot(sizes, [row.predicted * 1e3 for row in rows], "s--", label="predicted, bucket by bucket")
    axes.plot(sizes, [row.formula * 1e3 for row in rows], "^:", label="S / (n w) + n o")
    axes.set(xscale="log", xlabel="bucket size, MB", ylabel="exposed communication, ms", ylim=(0, None))
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.minorticks_off()
    axes.set_title(parallel.where(cell))
    axes.legend()


def sharding(cells: Sequence[CellView]) -> list[Picture]:
    name = f"{cells[0].experiment.replace('_', '-')}-memory" if cells else ""
    return _one_each(cells, name, "Memory on the fullest rank by part", _draw_sharding, "arrangements")


def _draw_sharding(figure: Any, cell: CellView) -> None:
    names = cell.get("arrangements")
    parts = {
        label: [(cell.value(f"{name}: {part}_memory") or 0.0) / MIB for name in names]
        for label, part in (("parameters", "parameter"), ("gradients", "gradient"), ("optimizer state", "optimizer"))
    }
    axes = figure.subplots()
    stacked_bars(axes, names, parts)
    axes.set_xlabel("MiB on the fullest rank, before the update")
    axes.set_title(parallel.where(cell))


def plan(cells: Sequence[CellView]) -> list[Picture]:
    return _one_each(cells, "parallel-plan", "Memory on each GPU by strategy", _draw_plan, "strategies")


def _draw_plan(figure: Any, cell: CellView) -> None:
    names = cell.get("strategies")
    parts = {
        label: [(cell.value(f"{name}: {part}_memory") or 0.0) / GIB for name in names]
        for label, part in parallel.PLAN_PARTS.items()
    }
    axes = figure.subplots()
    stacked_bars(axes, names, parts)
    limit = cell.get("gpu_memory") / GIB
    totals = [sum(column) for column in zip(*parts.values(), strict=True)]
    axes.axvline(limit, color="black", linewidth=1)
    shown = max(1.15 * limit, 1.05 * min(max(totals), 4 * limit))
    axes.set_xlim(0, shown)
    for row, total in enumerate(totals):
        if total > shown:  # a bar that goes on beyond the picture says how far
            axes.text(shown * 0.99, row, f"{total:,.0f} →", ha="right", va="center", color="white")
    axes.set_xlabel(f"GiB on each GPU; the line: what one {cell.get('gpu')} has")
    axes.set_title(parallel.plan_where(cell))
