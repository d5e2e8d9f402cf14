"""Tables of the experiments: records in, `Table`s out."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cs336_systems.config import MODES, PRECISIONS
from cs336_systems.record import GIB, MIB, Record, Statistics, steady_from
from cs336_systems.report.cells import PHASES, CellView, group
from cs336_systems.report.referee import remarks
from cs336_systems.table import Column, Table

# Fields of a configuration that may tell rows apart, with their headings. What is the same in all goes in the title.
_FIELDS = {
    "size": "size",
    "model_factory": "model",
    "context_length": "context",
    "batch_size": "batch",
    "vocab_size": "vocabulary",
    "mode": "mode",
    "precision": "precision",
    "attention": "attention",
    "checkpoint_blocks": "checkpoint",
    "compile": "compiled",
    "warmup_steps": "warm-up",
}


def tables(records: Iterable[Record]) -> list[Table]:
    """The tables of every experiment that the records hold; rows by size, context, mode and so on."""
    by_experiment: dict[str, list[CellView]] = {}
    for cell in group(records):
        by_experiment.setdefault(cell.experiment, []).append(cell)
    order = [*_SECTIONS, *sorted(by_experiment.keys() - _SECTIONS.keys())]
    return [
        table
        for experiment in order
        if experiment in by_experiment
        for table in _SECTIONS.get(experiment, _generic)(sorted(by_experiment[experiment], key=_position))
    ]


def _position(cell: CellView) -> tuple:
    """Where a cell's row stands; cells without such fields keep the order in which they were recorded."""

    def place(name: str, order: Sequence[str]) -> int:
        value = cell.get(name)
        return order.index(value) if value in order else len(order)

    numbers = ("d_model", "num_layers", "context_length", "batch_size")
    return (
        cell.machine,
        *(cell.get(name) or 0 for name in numbers),
        place("mode", MODES),
        place("precision", PRECISIONS),
        str(cell.get("attention")),
        *(cell.get(name) or 0 for name in ("checkpoint_blocks", "compile", "warmup_steps")),
    )


# -- formatting -------------------------------------------------------------------------------------------------------


def _number(value: float | None, digits: int = 2) -> str:
    return "N/A" if value is None else f"{value:,.{digits}f}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else _number(seconds * 1e3, 2 if seconds < 1 else 1)


def _spread(found: Statistics | None) -> str:
    return f"{_ms(found.mean)} ± {_ms(found.std)}" if found else ""


def _gib(size: float | None) -> str:
    if size is None:
        return ""
    return _number(size / GIB, 2 if size >= GIB / 10 else 4)


def _percent(share: float | None, digits: int = 1) -> str:
    return "N/A" if share is None else f"{share:.{digits}%}"


def _ratio(over: float | None, under: float | None) -> str:
    return f"{over / under:.2f}x" if over and under else ""


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)


# -- pieces -----------------------------------------------------------------------------------------------------------


def _varying(cells: Sequence[CellView], *, always: Sequence[str] = ("size",)) -> list[str]:
    return [name for name in _FIELDS if name in always or len({_text(cell.get(name)) for cell in cells}) > 1]


def _columns(names: Sequence[str]) -> list[Column]:
    return [Column(_FIELDS[name], numeric=False) for name in names]


def _keys(cell: CellView, names: Sequence[str]) -> list[str]:
    return [_text(cell.get(name)) for name in names]


def _title(experiment: str, what: str, cells: Sequence[CellView], shown: Sequence[str]) -> str:
    """What the table holds, on which machine, and the settings that are the same in all rows, the usual ones unsaid."""
    first = cells[0]
    same = [name for name in _FIELDS if name not in shown and len({_text(cell.get(name)) for cell in cells}) == 1]
    settings = [
        f"{label} {_text(first.get(name))}" if label else _text(first.get(name))
        for name, label in (
            ("context_length", "context"),
            ("batch_size", "batch"),
            ("mode", ""),
            ("precision", ""),
            ("attention", "attention"),
        )
        if name in same and first.get(name) is not None
    ]
    unusual = {"vocab_size": 10_000, "checkpoint_blocks": 0, "compile": False, "warmup_steps": 5, "model_factory": None}
    settings += [
        f"{_FIELDS[name]} {_text(first.get(name))}"
        for name, usual in unusual.items()
        if name in same and first.get(name) not in (usual, None)
    ]
    machines = sorted({cell.machine for cell in cells})
    return f"{experiment}: {what} · {', '.join([*machines, *settings])}"


def _table(
    what: str,
    cells: Sequence[CellView],
    shown: Sequence[str],
    columns: Sequence[Column],
    row: Callable[[CellView], list[str]],
    notes: Sequence[str] | None = None,
) -> Table:
    """One row for each cell: its distinguishing fields, then `row`, or its verdict where it failed."""
    rows = []
    for cell in cells:
        values = row(cell) if cell.ok else [cell.verdict] + [""] * (len(columns) - 1)
        rows.append([*_keys(cell, shown), *values])
    title = _title(cells[0].experiment, what, cells, shown)
    return Table(title, [*_columns(shown), *columns], rows, _remarks(cells, shown) if notes is None else notes)


def _remarks(cells: Sequence[CellView], shown: Sequence[str]) -> list[str]:
    """The referee's, with the cells named as in the table's rows."""

    def name(cell: CellView) -> str:
        return " ".join(
            f"{_FIELDS[field]} {text}" if text.isdigit() or text in ("yes", "no") else text
            for field, text in zip(shown, _keys(cell, shown), strict=True)
            if text
        )

    return remarks(cells, name)


# -- sections ---------------------------------------------------------------------------------------------------------


def _steps(cells: Sequence[CellView]) -> list[Table]:
    return [_phase_table(cells), _summary_table(cells)]


def _phase_table(cells: Sequence[CellView]) -> Table:
    shown = _varying(cells)
    columns = [
        Column("phase", numeric=False),
        *(Column(name, "ms") for name in ("mean", "std", "min", "max")),
        Column("n"),
    ]
    rows = []
    for cell in cells:
        if not cell.ok:
            rows.append([*_keys(cell, shown), cell.verdict, *[""] * 5])
        # A step of one phase has nothing to add up: the phase is shown, the step would only repeat it.
        phases = [phase for phase in PHASES if f"{phase}_time" in cell.metrics]
        for phase in phases[:-1] if len(phases) == 2 else phases:
            found = cell.statistics(f"{phase}_time")
            if found:
                times = (found.mean, found.std, found.min, found.max)
                rows.append([*_keys(cell, shown), phase, *map(_ms, times), str(found.n)])
    title = _title(cells[0].experiment, "time by phase", cells, shown)
    return Table(title, [*_columns(shown), *columns], rows)


def _summary_table(cells: Sequence[CellView]) -> Table:
    shown = _varying(cells)
    columns = [
        Column("step", "ms"),
        Column("tokens/s"),
        Column("TFLOP/s"),
        Column("MFU"),
        Column("backward / forward"),
        Column("peak", "GiB"),
        Column("predicted", "GiB"),
        Column("error"),
    ]

    def row(cell: CellView) -> list[str]:
        rate = cell.flops_per_second
        return [
            _ms(cell.value("step_time")),
            _number(cell.tokens_per_second, 0),
            _number(rate / 1e12 if rate else None, 1 if rate and rate > 1e12 else 3),
            _percent(cell.mfu),
            _ratio(cell.value("backward_time"), cell.value("forward_time")),
            _gib(cell.value("peak_memory")),
            _gib(cell.value("predicted_memory")),
            f"{cell.memory_error:+.1%}" if cell.memory_error is not None else "",
        ]

    return _table("throughput and memory", cells, shown, columns, row)


def _warmup(cells: Sequence[CellView]) -> list[Table]:
    shown = _varying(cells, always=("size", "warmup_steps"))
    phases = [Column("forward", "ms"), Column("backward", "ms"), Column("step", "ms")]
    columns = [*phases, Column("first step", "ms"), Column("steady from step")]

    def row(cell: CellView) -> list[str]:
        steps = cell.metrics["warmup_time"].numbers + cell.metrics["step_time"].numbers
        steady = steady_from(steps)
        times = [_spread(cell.statistics(f"{phase}_time")) for phase in ("forward", "backward", "step")]
        return [*times, _ms(steps[0]), "never" if steady is None else str(steady + 1)]

    return [_table("mean ± std by warm-up steps", cells, shown, columns, row)]


def _against(
    cells: Sequence[CellView], field: str, baseline: Any, what: str, extra: Sequence[tuple[Column, Callable]] = ()
) -> Table:
    """Rows with their speed-up over the row that differs from them in `field` alone."""
    shown = _varying(cells, always=("size", field))

    def work(cell: CellView) -> tuple:
        return (cell.machine, *(_text(cell.get(name)) for name in _FIELDS if name != field))

    bases = {work(cell): cell for cell in cells if cell.get(field) == baseline and cell.ok}
    columns = [
        *(Column(phase, "ms") for phase in ("forward", "backward", "optimizer", "step")),
        Column("std", "ms"),
        Column("speed-up"),
        Column("peak", "GiB"),
        Column("memory"),
        *(column for column, _ in extra),
    ]

    def row(cell: CellView) -> list[str]:
        base = bases.get(work(cell))
        step = cell.statistics("step_time")
        return [
            *(_ms(cell.value(f"{phase}_time")) for phase in ("forward", "backward", "optimizer", "step")),
            _ms(step.std if step else None),
            _ratio(base.value("step_time") if base else None, cell.value("step_time")),
            _gib(cell.value("peak_memory")),
            _ratio(cell.value("peak_memory"), base.value("peak_memory") if base else None),
            *(text(cell) for _, text in extra),
        ]

    return _table(what, cells, shown, columns, row)


def _precision(cells: Sequence[CellView]) -> list[Table]:
    return [_against(cells, "precision", "fp32", "time and memory against fp32")]


def _compile(cells: Sequence[CellView]) -> list[Table]:
    def compile_seconds(cell: CellView) -> str:
        seconds = cell.value("compile_time")
        return "" if seconds is None else f"{seconds:.1f}"

    def graph_breaks(cell: CellView) -> str:
        breaks = cell.value("graph_breaks")
        return "" if breaks is None else f"{breaks:.0f}"

    extra = ((Column("compile time", "s"), compile_seconds), (Column("graph breaks"), graph_breaks))
    return [_against(cells, "compile", False, "eager against torch.compile", extra)]


def _peak_memory(cells: Sequence[CellView]) -> list[Table]:
    """Two tables: the plain model, and what saves memory (fused attention, checkpointing)."""

    def is_plain(cell: CellView) -> bool:
        return cell.get("attention") == "reference" and not cell.get("checkpoint_blocks")

    plain = [cell for cell in cells if is_plain(cell)]
    saving = [cell for cell in cells if not is_plain(cell)]
    named = (("predicted peak against measured", plain), ("predicted peak against measured, saving memory", saving))
    return [_prediction_table(what, chosen) for what, chosen in named if chosen]


def _prediction_table(what: str, cells: Sequence[CellView]) -> Table:
    shown = _varying(cells)
    columns = [Column("measured", "GiB"), Column("predicted", "GiB"), Column("error")]

    def row(cell: CellView) -> list[str]:
        error = cell.memory_error
        sizes = [_gib(cell.value("peak_memory")), _gib(cell.value("predicted_memory"))]
        return [*sizes, "" if error is None else f"{error:+.2%}"]

    judged = [(abs(cell.memory_error), cell) for cell in cells if cell.memory_error is not None]
    notes = [
        note for note in _remarks(cells, shown) if "step times vary" not in note
    ]  # times are not this table's subject
    if judged:
        error, worst = max(judged, key=lambda pair: pair[0])
        notes = [f"worst of {len(judged)}: {error:.2%} ({' '.join(_keys(worst, shown))})", *notes]
    return _table(what, cells, shown, columns, row, notes)


def _timing_agreement(cells: Sequence[CellView]) -> list[Table]:
    shown = _varying(cells)
    columns = [Column("phase", numeric=False), Column("wall clock", "ms"), Column("CUDA events", "ms")]
    columns += [Column("do_bench", "ms"), Column("wall over do_bench")]
    rows = []
    for cell in cells:
        for phase in ("forward", "backward", "step"):
            names = (f"{phase}_time", f"{phase}_event_time", f"do_bench_{phase}_time")
            wall, events, other = (cell.value(name) for name in names)
            ratio = f"{wall / other - 1:+.2%}" if wall and other else ("" if cell.ok else cell.verdict)
            rows.append([*_keys(cell, shown), phase, _ms(wall), _ms(events), _ms(other), ratio])
    title = _title(cells[0].experiment, "the same work by three clocks (means)", cells, shown)
    return [Table(title, [*_columns(shown), *columns], rows, _remarks(cells, shown))]


def _memory_model(cells: Sequence[CellView]) -> list[Table]:
    shown = _varying(cells)
    names = (
        ("parameters", "parameter_memory"),
        ("gradients", "gradient_memory"),
        ("optimizer", "optimizer_memory"),
        ("activations", "activation_memory"),
        ("logits, loss", "loss_memory"),
        ("peak", "predicted_memory"),
        ("peak, traced", "traced_memory"),
    )
    columns = [*(Column(heading, "GiB") for heading, _ in names)]
    columns += [Column("per block", "MiB"), Column("residual tensor", "MiB"), Column("peak in", numeric=False)]

    def row(cell: CellView) -> list[str]:
        mib = [cell.value(name) for name in ("block_activation_memory", "residual_memory")]
        where = cell.metrics["peak_phase"].samples[0]
        return [*(_gib(cell.value(name)) for _, name in names), *(_number((v or 0) / MIB, 0) for v in mib), str(where)]

    return [_table("predicted for a CUDA GPU, none needed", cells, shown, columns, row)]


def _accumulation(cells: Sequence[CellView]) -> list[Table]:
    columns = [
        Column("accumulator", numeric=False),
        Column("term", numeric=False),
        Column("one term is"),
        Column("sum"),
    ]
    rows = [
        [cell.get("accumulator"), cell.get("term"), f"{cell.value('term'):.7f}", f"{cell.value('sum'):.4f}"]
        for cell in cells
        if cell.ok
    ]
    notes = [
        "fp16 accumulator: near 10 its steps are 2^-7 = 0.0078, so each 0.01 is rounded as it is added, and it drifts",
        "fp32 accumulator with fp16 terms: only 0.01 itself is rounded, to 0.0100021; the error stays in proportion",
    ]
    return [Table("accumulation: 0.01 added a thousand times", columns, rows, [*notes, *remarks(cells)])]


def _autocast_dtypes(cells: Sequence[CellView]) -> list[Table]:
    found = []
    for model in dict.fromkeys(cell.get("model") for cell in cells):
        chosen = [cell for cell in cells if cell.get("model") == model and cell.ok]
        what = dict.fromkeys(name for cell in chosen for name in cell.metrics if name.startswith("dtype of "))
        columns = [Column("tensor", numeric=False)]
        columns += [Column(f"autocast {cell.get('autocast')}", numeric=False) for cell in chosen]
        rows = [
            [name.removeprefix("dtype of "), *(str(cell.metrics[name].samples[0]) for cell in chosen)] for name in what
        ]
        tried = [cell for cell in cells if cell.get("model") == model]
        device = tried[0].get("device")
        found.append(Table(f"autocast_dtypes: {model} model on {device}", columns, rows, remarks(tried)))
    return found


def _generic(cells: Sequence[CellView]) -> list[Table]:
    """Records of an experiment this version has no section for: every metric in its base unit."""
    columns = [Column("cell", numeric=False), Column("metric", numeric=False), Column("unit", numeric=False)]
    columns += [Column("mean"), Column("std"), Column("n")]
    rows = []
    for cell in cells:
        for metric, found in cell.metrics.items():
            stats = cell.statistics(metric)
            text = str(found.samples[0]) if found.samples else ""
            values = (
                [f"{stats.mean:.6g}", f"{stats.std:.3g}", str(stats.n)]
                if stats
                else [text, "", str(len(found.samples))]
            )
            rows.append([cell.name or cell.verdict, metric, found.unit, *values])
    return [Table(cells[0].experiment, columns, rows, remarks(cells))]


_SECTIONS: dict[str, Callable[[Sequence[CellView]], list[Table]]] = {
    "bench": _steps,
    "end_to_end": _steps,
    "warmup": _warmup,
    "precision": _precision,
    "compile": _compile,
    "peak_memory": _peak_memory,
    "timing_agreement": _timing_agreement,
    "memory_model": _memory_model,
    "accumulation": _accumulation,
    "autocast_dtypes": _autocast_dtypes,
}
