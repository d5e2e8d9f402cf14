"""Shared by the attention experiments: implementations by name, cells, tables and charts of implementations."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

from cs336_systems.config import RunConfig
from cs336_systems.experiments.spec import Config, Memory
from cs336_systems.predict.attention_model import AttentionShape, least_compiled, naive_peak
from cs336_systems.predict.gpus import memory_bandwidth, peak_flops
from cs336_systems.record import CELL_TIME
from cs336_systems.report.cells import CellView, grouped
from cs336_systems.report.document import Chart, Limit, Point, Series
from cs336_systems.report.names import implementation_name
from cs336_systems.report.points import joined, measured
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import gib, kernel_ms, key_columns, key_texts, remarks_on, row_name, tflops, title_of
from cs336_systems.report.terms import FORWARD_AND_BACKWARD, MS, OUT_OF_MEMORY, TFLOPS
from cs336_systems.table import Column, Table
from cs336_systems.text import Text, listed, say

OURS = ("auto", "flash_hopper", "flash_triton")
"""The kernels of this project, and its own choice among them; all other implementations are rivals."""
RIVALS = ("sdpa_flash", "sdpa_cudnn", "flash_attention_4", "flex")
MODULE = "cs336_systems.experiments.attention.measure_attention"
RESULTS = ("out", "dq", "dk", "dv")
BEST = "*"


def contestants() -> list[str]:
    """Return our kernels and the rivals. FlashAttention-4 is optional and takes part where it is installed."""
    from importlib import metadata  # takes 20 ms of every command's start

    try:
        metadata.version("flash-attn-4")
        missing = ""
    except metadata.PackageNotFoundError:
        missing = "flash_attention_4"
    return [name for name in ("flash_hopper", "flash_triton", *RIVALS) if name != missing]


def fastest(times: Mapping[str, float], *, ours: bool) -> str | None:
    """Return the name of the fastest of our kernels, or of their rivals."""
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
    """Return the configuration of a cell that measures attention alone."""
    shape = AttentionShape(*size, is_causal=is_causal, precision=precision)
    return {**dataclasses.asdict(shape), "device": base.device, "seed": base.seed, **fields}


def label_shape(config: Mapping[str, Any], experiments: Sequence[str]) -> str:
    return f"{AttentionShape.of(config)} {config.get('implementation', 'interleaved')}"


def naive_memory(config: Mapping[str, Any], *, keeps_graph: bool = False) -> Memory | None:
    """Return the predicted memory of naive attention, eager or compiled; None for other implementations. `keeps_graph`:
    the cell times backward alone, repeatedly on one retained graph."""
    shape = AttentionShape.of(config)
    match config["implementation"]:
        case "reference":
            return Memory(naive_peak(shape, on_cuda=config["device"].startswith("cuda"), keeps_graph=keeps_graph))
        case "compiled":
            return Memory(least_compiled(shape), at_least=True)
    return None


def views(cell: CellView) -> dict[str, CellView]:
    """Return a view of the metrics and the shape's FLOPs for each implementation."""
    names = cell.get("implementations")
    if names is None:
        return {str(cell.get("implementation")): cell}
    shared = {name: cell.metrics[name] for name in ("flops", CELL_TIME) if name in cell.metrics}
    return {
        name: dataclasses.replace(cell, metrics={**cell.variant(name).metrics, **shared}, variants={}) for name in names
    }


def failure(view: CellView) -> str:
    """Return why an implementation has no result, or an empty string. In an interleaved cell each has its own
    status."""
    own = view.metrics.get("status")
    return str(own.samples[0]) if own else ("" if view.ok else view.status)


def verdict(view: CellView) -> str:
    if "wrong result" in failure(view):
        return "wrong"
    return "error" if view.ok else view.verdict


BOTH = "forward_backward_time"
SHARES = {"forward_time": 2 / 7, "backward_time": 5 / 7}
"""Shares of the FLOPs of forward and backward: a fused backward runs five matmuls for forward's two."""


def rate(view: CellView, metric: str = BOTH) -> float | None:
    """Return FLOP/s of forward, of backward or of both."""
    seconds, flops = view.median(metric), view.value("flops")
    return SHARES.get(metric, 1.0) * flops / seconds if flops and seconds else None


def worst_error(view: CellView) -> float | None:
    """Return the largest relative error of the output and the gradients."""
    errors = [view.value(f"error_{name}") for name in RESULTS]
    return max((error for error in errors if error is not None), default=None)


def exponential(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


Times = dict[str, float]
"""Implementation -> seconds."""


def medians(cell: CellView, metric: str) -> Times:
    """Return the median time of each implementation that succeeded in a cell."""
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
    """min or max, which marks the best value of a row; None if rows have no best value."""
    is_time: bool = False


def time_quantity(what: Text, metric: str, show: Callable[[float], str] = kernel_ms) -> Quantity:
    return Quantity(say("{} (ms)", "{}（ms）", what), lambda view: view.median(metric), show, min, is_time=True)


ERRORS = Quantity(Text("largest error against float64", "相对 float64 的最大误差"), worst_error, exponential)
QUANTITIES = (
    time_quantity(FORWARD_AND_BACKWARD, "forward_backward_time"),
    time_quantity(Text("forward and backward, from a CUDA graph", "前向加反向，由 CUDA graph 重放"), "replayed_time"),
    time_quantity(Text("forward", "前向"), "forward_time"),
    time_quantity(Text("backward", "反向"), "backward_time"),
    Quantity(Text("forward and backward (TFLOP/s)", "前向加反向（TFLOP/s）"), rate, tflops, max),
    Quantity(Text("peak memory (GiB)", "峰值显存（GiB）"), lambda view: view.value("peak_memory"), gib),
    Quantity(Text("reserved memory (GiB)", "预留显存（GiB）"), lambda view: view.value("reserved_memory"), gib),
    ERRORS,
)


class Row(NamedTuple):
    """One shape: the texts that identify it, and a view of each implementation."""

    texts: list[str | Text]
    views: dict[str, CellView]


def side_by_side(
    cells: Cells,
    shown: Sequence[str],
    notes: Sequence[Text],
    *,
    with_lead: bool = False,
    quantities: Sequence[Quantity] = QUANTITIES,
) -> list[Table]:
    """Return a table per measured quantity with a column per implementation; notes and remarks stand under the first.

    `with_lead` adds the fastest rival's time over the time of our fastest kernel to tables of times.
    """
    rows, named = _rows(cells, shown), [*shown, "implementation"]
    names = list(dict.fromkeys(name for row in rows for name in row.views))
    notes = [*notes, _names_note(names), *_failure_notes(rows, shown), *remarks_on(cells, named)]
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
        title = title_of(cells[0].experiment, quantity.what, cells, named)
        legend = [Text(f"{BEST} best of its row", f"{BEST} 为该行最好")] if quantity.best else []
        found.append(Table(title, columns, lines, [*legend, *([] if found else notes)]))
    return found


def _rows(cells: Cells, shown: Sequence[str]) -> list[Row]:
    """Return the rows of a table: an interleaved cell is one row; cells of one implementation share the row of their
    shape."""
    rows: dict[object, Row] = {}
    for cell in cells:
        texts = key_texts(cell, shown)
        key = tuple(texts) if cell.get("implementations") is None else id(cell)
        rows.setdefault(key, Row(texts, {})).views.update(views(cell))
    return list(rows.values())


def _marked(names: Sequence[str], row: Row, values: Mapping[str, float | None], quantity: Quantity) -> list[str]:
    """Return a row's values as text, the best one marked; a failed implementation has its verdict."""
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


def _names_note(names: Sequence[str]) -> Text:
    """Say what sentences and charts call the columns, whose names are those that flags take."""
    each = (say("{}: {}", "{}：{}", name, implementation_name(name)) for name in names)
    return say("in words: {}", "各列名称：{}", listed(each, ("; ", "；")))


def _failure_notes(rows: Sequence[Row], shown: Sequence[str]) -> list[Text]:
    """Return the reasons of the implementations that failed in interleaved cells whose other implementations
    succeeded."""
    return [
        say("{} {}: {}", "{} {}：{}", row_name(view, shown), name, failure(view))
        for row in rows
        for name, view in row.views.items()
        if view.ok and failure(view)
    ]


def compilation_notes(cells: Cells) -> list[Text]:
    """Return notes on how the compiled implementations were compiled.

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
    """Return the sort key of rows: head dimension, then length."""
    return (cell.machine, cell.get("head_dim"), cell.get("seq_len"))


# -- charts: rates side by side, time against length, the roofline ----------------------------------------------------

TOKENS = Text("tokens", "序列长度")
CAUSAL = Text("causal", "因果")
MOST_SERIES = 6
"""Maximum number of bars of one shape in a chart."""
FILLED = 0.15
"""Charts begin at the length where the fastest implementation reaches this share of its highest rate: at shorter
lengths most of the GPU is idle."""
IN_CHARTS = (
    *("flash_attention_4", "sdpa_cudnn", "sdpa_flash", "sdpa", "flex", "sdpa_efficient", "reference", "compiled"),
    *("torch_varlen", "padded"),
)
"""Rivals in the order of charts."""
RATES = {
    "forward_time": (
        Text("Attention forward", "注意力前向"),
        Text(
            "FLOPs as in the FlashAttention papers: 4 x tokens² x d x heads x batch, half of that if causal",
            "FLOPs 按 FlashAttention 论文计：4 x 长度² x d x 头数 x batch，因果掩码减半",
        ),
    ),
    "backward_time": (
        Text("Attention backward", "注意力反向"),
        Text("FLOPs as in the FlashAttention papers: 2.5 x forward", "FLOPs 按 FlashAttention 论文计：前向的 2.5 倍"),
    ),
    BOTH: (
        Text("Attention forward and backward", "注意力前向加反向"),
        Text("FLOPs as in the FlashAttention papers: 3.5 x forward", "FLOPs 按 FlashAttention 论文计：前向的 3.5 倍"),
    ),
}
"""Metric -> title of the chart of its rates, and how FLOPs are counted."""
WRITE_SCORES = ("reference", "compiled")
"""Implementations that write whole seq x seq matrices."""
INTENSITY = Text(
    "FLOPs per byte of least traffic (q, k, v, o, gradients; if written, scores)",
    "每字节最少访存的 FLOPs（q、k、v、o、梯度；若写出，另计分数矩阵）",
)


def shape_name(cell: CellView) -> str:
    sizes = " x ".join(str(cell.get(name)) for name in ("batch_size", "heads", "seq_len", "head_dim"))
    return f"{sizes}{' causal' if cell.get('is_causal') else ''}"


def length_name(length: int) -> str:
    """Return a number of tokens as papers write it: 16k."""
    return str(length) if length % 1024 else f"{length // 1024}k"


class Group(NamedTuple):
    """The cells of one head dimension in one precision, by length."""

    where: Text
    cells: Cells


def by_head_dim(cells: Cells) -> list[Group]:
    """Return the cells of head dimensions 64 and 128, or else the widest, in bf16 if that was measured."""
    precisions = {cell.get("precision") for cell in cells}
    precision = "bf16" if "bf16" in precisions else next(iter(precisions))
    dims = sorted({cell.get("head_dim") for cell in cells})
    groups = []
    for dim in [dim for dim in (64, 128) if dim in dims] or dims[-1:]:
        chosen = [cell for cell in cells if cell.get("head_dim") == dim and cell.get("precision") == precision]
        mask = [CAUSAL] if chosen and chosen[0].get("is_causal") else []
        where = listed([f"d {dim}", *mask, str(precision)], (", ", "，"))
        groups.append(Group(where, sorted(chosen, key=lambda cell: cell.get("seq_len"))))
    return groups


class Contest(NamedTuple):
    """Implementations side by side in a chart: their name on the axis, a view of each, and the metric compared."""

    name: Text
    views: Mapping[str, CellView]
    metric: str


def contestants_shown(contest: Contest) -> dict[Text, CellView]:
    """Return the fastest of our kernels as "ours", then the rivals."""
    views = contest.views
    seconds = {name: view.median(contest.metric) for name, view in views.items() if not failure(view)}
    ours = fastest({name: found for name, found in seconds.items() if found}, ours=True)
    own = {"auto": views[ours]} if ours else {name: views[name] for name in ("flash_torch",) if name in views}
    found = own | {name: views[name] for name in IN_CHARTS if name in views}
    return {implementation_name(name): found[name] for name in list(found)[:MOST_SERIES]}


def contest_series(contests: Iterable[Contest], value: Callable[[CellView, str], float | None]) -> list[Series]:
    """Return a series per implementation; where an implementation ran out of memory, a note replaces the value."""
    found: dict[Text, list[Point]] = {}
    for contest in contests:
        for name, view in contestants_shown(contest).items():
            points = found.setdefault(name, [])
            if view.is_oom:
                points.append(Point(contest.name, 0.0, note=OUT_OF_MEMORY))
            elif drawn := None if failure(view) else value(view, contest.metric):
                points.append(Point(contest.name, drawn))
    return [Series(name, points) for name, points in found.items()]


def rates_chart(
    contests: Sequence[Contest], where: Text, x: Text, statistic: Text, convention: Text | None = None
) -> Chart:
    """Chart the TFLOP/s side by side, with the GPU's peak. `convention`: how FLOPs are counted, if not as in the
    papers."""

    def teraflops(view: CellView, metric: str) -> float | None:
        found = rate(view, metric)
        return found / 1e12 if found else None

    what, usual = RATES[contests[0].metric]
    title, note = say("{}, {}", "{}，{}", what, where), say("{}; {}", "{}；{}", statistic, convention or usual)
    limits = _peak_limit(next(iter(contests[0].views.values())))
    series = contest_series(contests, teraflops)
    return Chart("", title, "bars", x, TFLOPS, series, limits=limits, digits=1, note=note)


def rates_by_length(group: Group, metric: str, statistic: Text) -> Chart:
    """Chart the TFLOP/s at every length that fills the GPU."""
    by_length = grouped(group.cells, lambda cell: cell.get("seq_len"))
    contests = [
        Contest(Text(length_name(length)), {str(cell.get("implementation")): cell for cell in cells}, metric)
        for length, cells in by_length.items()
    ]
    best = [max(rate(view, metric) or 0.0 for view in contest.views.values()) for contest in contests]
    first = next(index for index, found in enumerate(best) if found >= FILLED * max(best))
    return rates_chart(contests[first:], group.where, TOKENS, statistic)


def _peak_limit(view: CellView) -> list[Limit]:
    peak = _peak(view)
    if peak is None:
        return []
    values = (str(view.environment.gpu), str(view.get("precision")), f"{peak / 1e12:,.0f}")
    return [Limit(peak / 1e12, say("peak of {}, {}: {} TFLOP/s", "{} 的 {} 峰值：{} TFLOP/s", *values), dashed=True)]


def _peak(view: CellView) -> float | None:
    """Return dense FLOP/s of the GPU that a cell ran on; None for a CPU or an unknown GPU."""
    precision, on_cpu = view.get("precision"), view.get("device") == "cpu"
    tf32 = precision == "fp32" and view.environment.tf32
    return None if on_cpu else peak_flops(view.environment.gpu, "tf32" if tf32 else precision)


def time_by_length(what: Text, group: Group, metric: str, statistic: Text) -> Chart:
    """Chart the time by length, with a line per implementation."""

    def points(cell: CellView) -> list[Point]:
        x = cell.get("seq_len")
        return [Point(x, 0.0, note=OUT_OF_MEMORY)] if cell.is_oom else measured(cell, metric, x)

    by_name = grouped(group.cells, lambda cell: str(cell.get("implementation")))
    series = [Series(implementation_name(name), joined(map(points, own))) for name, own in by_name.items()]
    title = say("{}, {}", "{}，{}", what, group.where)
    return Chart("", title, "lines", TOKENS, MS, series, log_x=True, log_y=True, note=statistic)


def roofline(group: Group) -> list[Chart]:
    """Chart rates under the bounds of memory and arithmetic, a point per length; no chart for a CPU."""
    points: dict[Text, list[Point]] = {}
    for cells in grouped(group.cells, lambda cell: cell.get("seq_len")).values():
        contest = Contest(Text(""), {str(cell.get("implementation")): cell for cell in cells}, BOTH)
        for name, view in contestants_shown(contest).items():
            found = rate(view)
            if found and view.get("device") != "cpu":
                points.setdefault(name, []).append(Point(_intensity(view), found / 1e12, name=shape_name(view)))
    if not points:
        return []
    series = [Series(name, found, drawn="marks") for name, found in points.items()]
    reached = [x for found in points.values() for point in found if isinstance(x := point.x, float)]
    title = say("Roofline, forward and backward, {}", "屋顶线，前向加反向，{}", group.where)
    note, series = (
        Text("medians, a point per length", "中位数，每个长度一个点"),
        [*series, *_roof(group.cells[0], reached)],
    )
    return [Chart("roofline", title, "lines", INTENSITY, TFLOPS, series, log_x=True, log_y=True, note=note)]


def _intensity(view: CellView) -> float:
    """Return the FLOPs per byte of the least memory traffic.

    Inputs, output and gradients move once; where scores and weights are written, these and their gradients move once
    out and once in.
    """
    shape = AttentionShape.of(view.config)
    scores = 8 * shape.scores(shape.width) if view.get("implementation") in WRITE_SCORES else 0
    return (view.value("flops") or 0.0) / (8 * shape.tensor + scores)


def _roof(cell: CellView, reached: Sequence[float]) -> list[Series]:
    """Return the roofline, min(peak, bandwidth x intensity), drawn on both sides of the ridge; none for an unknown
    GPU."""
    gpu, peak = cell.environment.gpu, _peak(cell)
    bandwidth = memory_bandwidth(gpu)
    if peak is None or bandwidth is None:
        return []
    ridge = peak / bandwidth
    corners = sorted({min(ridge / 2, *reached), ridge, max(2 * ridge, *reached)})
    line = [Point(x, min(peak, bandwidth * x) / 1e12) for x in corners]
    rates = f"{peak / 1e12:,.0f} TFLOP/s, {bandwidth / 1e12:.3g} TB/s"
    return [Series(Text(f"{gpu} at most: {rates}", f"{gpu} 上限：{rates}"), line, dashed=True, drawn="line")]
