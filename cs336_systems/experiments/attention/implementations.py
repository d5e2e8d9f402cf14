"""Shared by the attention experiments: implementations by name, cells, and tables with a column per implementation."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

from cs336_systems.config import RunConfig
from cs336_systems.experiments.spec import Config, Memory
from cs336_systems.predict.attention_model import AttentionShape, least_compiled, naive_peak
from cs336_systems.record import CELL_TIME
from cs336_systems.report.cells import CellView
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import gib, kernel_ms, key_columns, row_name, tflops, title_of
from cs336_systems.table import Column, Table
from cs336_systems.text import Text, say

OURS = ("flash_hopper", "flash_triton", "auto")
"""The kernels of this project, and its own choice among them; all other implementations are rivals."""
RIVALS = ("sdpa_flash", "sdpa_cudnn", "flash_attention_4", "flex")
MODULE = "cs336_systems.experiments.attention.measure_attention"
RESULTS = ("out", "dq", "dk", "dv")
BEST = "*"


def contestants() -> list[str]:
    """Our kernels and the rivals. FlashAttention-4 is optional and takes part where it is installed."""
    from importlib import metadata  # takes 20 ms of every command's start

    try:
        metadata.version("flash-attn-4")
        missing = ""
    except metadata.PackageNotFoundError:
        missing = "flash_attention_4"
    return [name for name in ("flash_hopper", "flash_triton", *RIVALS) if name != missing]


def fastest(times: Mapping[str, float], *, ours: bool) -> str | None:
    """The name of the fastest of our kernels, or of their rivals."""
    return min((name for name in times if (name in OURS) == ours), key=lambda name: times[name], default=None)


class Lead(NamedTuple):
    """Our fastest kernel and the fastest rival on one shape."""

    ours: str
    rival: str
    ratio: float
    """The rival's time over ours: above 1, ours is faster."""


def lead(times: Mapping[str, float]) -> Lead | None:
    ours, rival = fastest(times, ours=True), fastest(times, ours=False)
    return Lead(ours, rival, times[rival] / times[ours]) if ours and rival else None


# -- cells ------------------------------------------------------------------------------------------------------------


class Size(NamedTuple):
    """The size of q, k and v."""

    batch: int
    heads: int
    seq_len: int
    head_dim: int


def attention_config(base: RunConfig, size: Size, precision: str, *, is_causal: bool = True, **fields: Any) -> Config:
    """The configuration of a cell that measures attention alone."""
    shape = AttentionShape(*size, is_causal=is_causal, precision=precision)
    return {**dataclasses.asdict(shape), "device": base.device, "seed": base.seed, **fields}


def label_shape(config: Mapping[str, Any], experiments: Sequence[str]) -> str:
    return f"{AttentionShape.of(config)} {config.get('implementation', 'interleaved')}"


def naive_memory(config: Mapping[str, Any], *, keeps_graph: bool = False) -> Memory | None:
    """The need of naive attention, eager or compiled; None for other implementations.

    `keeps_graph`: the cell times backward alone, again and again on one graph.
    """
    shape = AttentionShape.of(config)
    match config["implementation"]:
        case "reference":
            return Memory(naive_peak(shape, on_cuda=config["device"].startswith("cuda"), keeps_graph=keeps_graph))
        case "compiled":
            return Memory(least_compiled(shape), at_least=True)
    return None


def views(cell: CellView) -> dict[str, CellView]:
    """Implementation -> a view of its metrics and of the shape's FLOPs."""
    names = cell.get("implementations")
    if names is None:
        return {str(cell.get("implementation")): cell}
    shared = {name: cell.metrics[name] for name in ("flops", CELL_TIME) if name in cell.metrics}
    return {
        name: dataclasses.replace(cell, metrics={**cell.variant(name).metrics, **shared}, variants={}) for name in names
    }


def failure(view: CellView) -> str:
    """Why an implementation has no result, or an empty string. In an interleaved cell each has its own status."""
    own = view.metrics.get("status")
    return str(own.samples[0]) if own else ("" if view.ok else view.status)


def verdict(view: CellView) -> str:
    if "wrong result" in failure(view):
        return "wrong"
    return "error" if view.ok else view.verdict


def rate(view: CellView) -> float | None:
    """FLOP/s of forward and backward."""
    seconds, flops = view.median("forward_backward_time"), view.value("flops")
    return flops / seconds if flops and seconds else None


def worst_error(view: CellView) -> float | None:
    """The largest relative error of the output and the gradients."""
    errors = [view.value(f"error_{name}") for name in RESULTS]
    return max((error for error in errors if error is not None), default=None)


def exponential(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


Times = dict[str, float]
"""Implementation -> seconds."""


def medians(cell: CellView, metric: str) -> Times:
    """The median time of each implementation that succeeded in a cell."""
    found = {name: view.median(metric) for name, view in views(cell).items() if not failure(view)}
    return {name: seconds for name, seconds in found.items() if seconds and isfinite(seconds)}


# -- tables -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Quantity:
    """The subject of one table: a number for every implementation."""

    what: Text
    of: Callable[[CellView], float | None]
    show: Callable[[float], str]
    best: Callable[[list[float]], float] | None = None
    """min or max; None where a row has no winner."""
    is_time: bool = False


def time_quantity(what: Text, metric: str, show: Callable[[float], str] = kernel_ms) -> Quantity:
    return Quantity(say("{} (ms)", "{}（ms）", what), lambda view: view.median(metric), show, min, is_time=True)


FORWARD_AND_BACKWARD = Text("forward and backward", "前向加后向")
QUANTITIES = (
    time_quantity(FORWARD_AND_BACKWARD, "forward_backward_time"),
    time_quantity(Text("forward and backward, from a CUDA graph", "前向加后向，由 CUDA graph 重放"), "replayed_time"),
    time_quantity(Text("forward", "前向"), "forward_time"),
    time_quantity(Text("backward", "后向"), "backward_time"),
    Quantity(Text("forward and backward (TFLOP/s)", "前向加后向（TFLOP/s）"), rate, tflops, max),
    Quantity(Text("peak memory (GiB)", "峰值显存（GiB）"), lambda view: view.value("peak_memory"), gib),
    Quantity(Text("largest error against float64", "相对 float64 的最大误差"), worst_error, exponential),
)


class Row(NamedTuple):
    """One shape: the texts that name it, and a view of each implementation."""

    texts: list[str]
    views: dict[str, CellView]


def side_by_side(
    cells: Cells,
    shown: Sequence[str],
    rows: Sequence[Row],
    notes: Sequence[Text],
    *,
    with_lead: bool = False,
    quantities: Sequence[Quantity] = QUANTITIES,
) -> list[Table]:
    """A table per measured quantity with a column per implementation; `notes` stand under the first.

    `with_lead` adds the fastest rival's time over the time of our fastest kernel to tables of times.
    """
    names = list(dict.fromkeys(name for row in rows for name in row.views))
    found: list[Table] = []
    for quantity in quantities:
        values = [{name: quantity.of(view) for name, view in row.views.items()} for row in rows]
        if found and not any(value for row in values for value in row.values()):
            continue
        has_lead = with_lead and quantity.is_time
        lines = []
        for row, own in zip(rows, values, strict=True):
            if found and not any(own.values()) and not any(map(failure, row.views.values())):
                continue  # not measured for this shape
            lines.append([*row.texts, *_marked(names, row, own, quantity), *([_lead_text(own)] if has_lead else [])])
        columns = [*key_columns(shown), *(Column(Text(name)) for name in names)]
        columns += [Column(Text("best rival / ours", "最快对手 / 我们"))] if has_lead else []
        title = title_of(cells[0].experiment, quantity.what, cells, [*shown, "implementation"])
        legend = [Text(f"{BEST} best of its row", f"{BEST} 为该行最好")] if quantity.best else []
        found.append(Table(title, columns, lines, [*legend, *([] if found else notes)]))
    return found


def _marked(names: Sequence[str], row: Row, values: Mapping[str, float | None], quantity: Quantity) -> list[str]:
    """A row's values as text, the best one marked; a failed implementation has its verdict."""
    known = [value for value in values.values() if value is not None]
    best = quantity.best(known) if quantity.best and len(known) > 1 else None
    texts = []
    for name in names:
        value = values.get(name)
        if value is not None:
            texts.append(quantity.show(value) + (f" {BEST}" if value == best else ""))
        else:
            texts.append(verdict(row.views[name]) if name in row.views and failure(row.views[name]) else "")
    return texts


def _lead_text(times: Mapping[str, float | None]) -> str:
    found = lead({name: time for name, time in times.items() if time})
    return f"{found.ratio:.2f}x" if found else ""


def failure_notes(rows: Sequence[Row], shown: Sequence[str]) -> list[Text]:
    """Reasons of the implementations that failed in interleaved cells that did not."""
    return [
        say("{} {}: {}", "{} {}：{}", row_name(view, shown), name, failure(view))
        for row in rows
        for name, view in row.views.items()
        if view.ok and failure(view)
    ]


def compilation_notes(cells: Cells) -> list[Text]:
    """How the compiled implementations were compiled.

    Flex's kernel omits its bounds checks only where the length is known at compilation.
    """
    found = {cell.get("implementation") for cell in cells}
    names = [name for name in ("compiled", "flex") if name in found]
    if not names:
        return []
    said = say(
        "{}: compiled once with dynamic shapes", "{}：以动态形状编译一次", Text(" and ".join(names), " 与 ".join(names))
    )
    if "flex" not in found:
        return [said]
    faster = Text("flex is faster compiled for one shape", "flex 为单个形状编译时更快")
    return [say("{}; {} (attention_rivals)", "{}；{}（attention_rivals）", said, faster)]


def by_shape(cell: CellView) -> tuple:
    """Sort key of rows: head dimension, then length."""
    return (cell.machine, cell.get("head_dim"), cell.get("seq_len"))
