"""Tables of the attention experiments: implementations side by side."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cs336_systems.report.cells import CellView
from cs336_systems.report.rows import (
    FIELDS,
    as_text,
    cell_table,
    gib,
    kernel_ms,
    key_columns,
    keys,
    ms,
    ratio,
    remarks_on,
    row_name,
    spread,
    tflops,
    title_of,
    varying,
)
from cs336_systems.table import Column, Table

OURS = ("flash_hopper", "flash_triton", "auto")
"""The kernels of this project, and what it chooses; all others are rivals."""
RESULTS = ("out", "dq", "dk", "dv")
BEST = "*"


def _by_shape(cell: CellView) -> tuple:
    return (cell.machine, cell.get("head_dim"), cell.get("seq_len"))


def _rate(cell: CellView, seconds: float | None) -> float | None:
    flops = cell.value("flops")
    return flops / seconds if flops and seconds else None


def _worst_error(cell: CellView, prefix: str) -> float | None:
    """Of output and gradients."""
    errors = [cell.value(f"{prefix}error_{name}") for name in RESULTS]
    return max((error for error in errors if error is not None), default=None)


def _exponential(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _how_compiled(cells: Sequence[CellView]) -> list[str]:
    """Flex's kernel leaves out its checks of bounds only where the length is known when it is compiled."""
    found = {cell.get("implementation") for cell in cells}
    names = [name for name in ("compiled", "flex") if name in found]
    slower = "; flex is faster compiled for one shape (attention_rivals)" if "flex" in found else ""
    return [f"{' and '.join(names)}: compiled once with dynamic shapes{slower}"] if names else []


# -- one row for each cell --------------------------------------------------------------------------------------------


def pytorch_attention(cells: Sequence[CellView]) -> list[Table]:
    cells = sorted(cells, key=_by_shape)
    shown = varying(cells, always=("head_dim", "seq_len", "implementation"))
    columns = [
        Column("forward", "ms"),
        Column("backward", "ms"),
        Column("before backward", "GiB"),
        Column("peak", "GiB"),
        Column("predicted", "GiB"),
        Column("forward speed-up"),
        Column("backward speed-up"),
    ]

    def work(cell: CellView) -> tuple:
        return (cell.machine, *(as_text(cell.get(name)) for name in FIELDS if name != "implementation"))

    eager = {work(cell): cell for cell in cells if cell.get("implementation") == "reference" and cell.ok}

    def row(cell: CellView) -> list[str]:
        base = eager.get(work(cell))
        phases = ("forward_time", "backward_time")
        memory = ("memory_before_backward", "peak_memory", "predicted_memory")
        return [
            *(spread(cell.statistics(phase), kernel_ms) for phase in phases),
            *(gib(cell.value(name)) for name in memory),
            *(ratio(base.value(phase) if base else None, cell.value(phase)) for phase in phases),
        ]

    notes = ["speed-up: over reference, the same formula run eagerly", *_how_compiled(cells), *remarks_on(cells, shown)]
    return [cell_table("attention by the formula (mean ± std)", cells, shown, columns, row, notes)]


def flash_leaderboard(cells: Sequence[CellView]) -> list[Table]:
    shown = varying(cells, always=("implementation",))
    columns = [Column("mean", "ms"), Column("std of tenths", "ms"), Column("TFLOP/s"), Column("error")]

    def row(cell: CellView) -> list[str]:
        time = cell.statistics("leaderboard_time")
        times = [kernel_ms(time.mean), kernel_ms(time.std)] if time else ["", ""]
        return [*times, tflops(_rate(cell, time.mean if time else None)), _exponential(_worst_error(cell, ""))]

    notes = [
        "forward, sum and backward as the course timed them; mean of do_bench",
        "kept are the means of ten equal parts of the run: std is that of these",
        *remarks_on(cells, shown),
    ]
    return [cell_table("the course's leaderboard", cells, shown, columns, row, notes)]


# -- implementations as columns ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """Where the metrics of one implementation are: in a cell, under names that begin with `prefix`."""

    cell: CellView
    prefix: str = ""

    @property
    def failure(self) -> str:
        """Empty where it went well; in a cell of several implementations each has a status of its own."""
        own = self.cell.metrics.get(f"{self.prefix}status")
        return str(own.samples[0]) if own else ("" if self.cell.ok else self.cell.status)

    @property
    def verdict(self) -> str:
        if "wrong result" in self.failure:
            return "wrong"
        return "error" if self.cell.ok else self.cell.verdict

    def value(self, metric: str) -> float | None:
        return self.cell.value(self.prefix + metric)

    def median(self, metric: str) -> float | None:
        return self.cell.median(self.prefix + metric)

    @property
    def rate(self) -> float | None:
        return _rate(self.cell, self.median("forward_backward_time"))


@dataclass(frozen=True)
class Quantity:
    """What one table shows of every implementation."""

    what: str
    of: Callable[[Source], float | None]
    show: Callable[[float], str]
    best: Callable[[list[float]], float] | None = None
    """min or max; None where a row has no winner."""
    is_time: bool = False


STEP = Quantity("training step (ms)", lambda s: s.median("step_time"), ms, min, True)
QUANTITIES = (
    Quantity("forward and backward (ms)", lambda s: s.median("forward_backward_time"), kernel_ms, min, True),
    Quantity("forward and backward, from a CUDA graph (ms)", lambda s: s.median("replayed_time"), kernel_ms, min, True),
    Quantity("forward (ms)", lambda s: s.median("forward_time"), kernel_ms, min, True),
    Quantity("backward (ms)", lambda s: s.median("backward_time"), kernel_ms, min, True),
    Quantity("forward and backward (TFLOP/s)", lambda s: s.rate, tflops, max),
    Quantity("peak memory (GiB)", lambda s: s.value("peak_memory"), gib),
    Quantity("largest error against float64", lambda s: _worst_error(s.cell, s.prefix), _exponential),
)

Row = tuple[list[str], dict[str, Source]]
"""The texts that name a shape, and its implementations."""


def flash(cells: Sequence[CellView]) -> list[Table]:
    """For each precision times, rates, memory and errors; a row for each shape."""
    by_precision: dict[str, list[CellView]] = {}
    for cell in sorted(cells, key=_by_shape):
        by_precision.setdefault(cell.get("precision"), []).append(cell)
    return [table for chosen in by_precision.values() for table in _flash_tables(chosen)]


def _flash_tables(cells: Sequence[CellView]) -> list[Table]:
    shown = [name for name in varying(cells, always=("head_dim", "seq_len")) if name != "implementation"]
    rows: dict[tuple, Row] = {}
    for cell in cells:
        texts = keys(cell, shown)
        _, sources = rows.setdefault((cell.machine, *texts), (texts, {}))
        sources[cell.get("implementation")] = Source(cell)
    notes = ["times: medians, on a GPU of do_bench", *_how_compiled(cells)]
    notes += remarks_on(cells, [*shown, "implementation"])
    return _side_by_side(cells, shown, list(rows.values()), notes)


def attention_rivals(cells: Sequence[CellView]) -> list[Table]:
    """The same for implementations that were measured in turns, and how the best of the others compares with ours."""
    shown = varying(cells, always=("batch_size", "heads", "head_dim", "seq_len", "is_causal"))
    rows = [
        (keys(cell, shown), {name: Source(cell, f"{name}_") for name in cell.get("implementations")}) for cell in cells
    ]
    notes = ["times: medians over rounds of each round's median of do_bench, the implementations in turns"]
    notes += [*_failures(rows, shown), *remarks_on(cells, shown)]
    return _side_by_side(cells, shown, rows, notes, compare=True)


def attention_step(cells: Sequence[CellView]) -> list[Table]:
    """Of a model whose attention changed in turns; with the spread, which says how far to trust a lead."""
    shown = varying(cells, always=("size", "context_length"))
    rows = [
        (keys(cell, shown), {name: Source(cell, f"{name}_") for name in cell.get("implementations")}) for cell in cells
    ]
    notes = ["medians of steps of one model on one batch, its attention changed in turns"]
    notes += [f"least and most in ms, {row_name(cell, shown)}: {_extents(cell)}" for cell in cells if cell.ok]
    notes += _failures(rows, shown)
    compare = any(name in OURS for _, sources in rows for name in sources)
    return _side_by_side(cells, shown, rows, [*notes, *remarks_on(cells, shown)], compare=compare, quantities=(STEP,))


def _extents(cell: CellView) -> str:
    found = {name: cell.statistics(f"{name}_step_time") for name in cell.get("implementations")}
    return ", ".join(f"{name} {ms(stats.min)} - {ms(stats.max)}" for name, stats in found.items() if stats)


def _failures(rows: Sequence[Row], shown: Sequence[str]) -> list[str]:
    """Of implementations that have a status of their own."""
    return [
        f"{row_name(source.cell, shown)} {name}: {source.failure}"
        for _, sources in rows
        for name, source in sources.items()
        if source.cell.ok and source.failure
    ]


def _side_by_side(
    cells: Sequence[CellView], shown: Sequence[str], rows: Sequence[Row], notes: Sequence[str], *,
    compare: bool = False, quantities: Sequence[Quantity] = QUANTITIES,
) -> list[Table]:  # fmt: skip
    """A table for each quantity that was measured, a column for each implementation; notes stand under the first."""
    names = list(dict.fromkeys(name for _, sources in rows for name in sources))
    found: list[Table] = []
    for quantity in quantities:
        values = [{name: quantity.of(source) for name, source in sources.items()} for _, sources in rows]
        if found and not any(value for row in values for value in row.values()):
            continue
        with_lead = compare and quantity.is_time
        lines = []
        for (texts, sources), row in zip(rows, values, strict=True):
            if found and not any(row.values()) and not any(source.failure for source in sources.values()):
                continue  # not measured of this shape
            lead = [_lead(row)] if with_lead else []
            lines.append([*texts, *_marked(names, sources, row, quantity), *lead])
        columns = [*key_columns(shown), *map(Column, names), *([Column("best rival / ours")] if with_lead else [])]
        title = title_of(cells[0].experiment, quantity.what, cells, [*shown, "implementation"])
        legend = [f"{BEST} best of its row"] if quantity.best else []
        found.append(Table(title, columns, lines, [*legend, *([] if found else notes)]))
    return found


def _marked(
    names: Sequence[str], sources: Mapping[str, Source], values: Mapping[str, float | None], quantity: Quantity
) -> list[str]:
    """A row's values as text, the best of them marked; in place of a failed one its verdict."""
    known = [value for value in values.values() if value is not None]
    best = quantity.best(known) if quantity.best and len(known) > 1 else None
    texts = []
    for name in names:
        value = values.get(name)
        if value is not None:
            texts.append(quantity.show(value) + (f" {BEST}" if value == best else ""))
        else:
            texts.append(sources[name].verdict if name in sources and sources[name].failure else "")
    return texts


def _lead(times: Mapping[str, float | None]) -> str:
    """Above 1 the best of ours is the faster."""
    known = {name: time for name, time in times.items() if time}
    ours, rival = fastest(known, ours=True), fastest(known, ours=False)
    return ratio(known[rival] if rival else None, known[ours] if ours else None)


def fastest(times: Mapping[str, float], *, ours: bool) -> str | None:
    """Of our kernels, or of their rivals."""
    return min((name for name in times if (name in OURS) == ours), key=lambda name: times[name], default=None)
