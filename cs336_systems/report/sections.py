"""Tables of the experiments: records in, `Table`s out."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cs336_systems.config import MODES, PRECISIONS
from cs336_systems.record import MIB, Record, steady_from
from cs336_systems.report import attention, kernels, memory, parallel
from cs336_systems.report.cells import PHASES, CellView, by_experiment, by_machine, group
from cs336_systems.report.referee import remarks
from cs336_systems.report.rows import (
    FIELDS,
    as_text,
    cell_table,
    gib,
    key_columns,
    keys,
    ms,
    number,
    percent,
    ratio,
    remarks_beside_times,
    remarks_on,
    spread,
    tflops,
    title_of,
    varying,
)
from cs336_systems.report.side_by_side import side_by_side
from cs336_systems.table import Column, Table


def tables(records: Iterable[Record]) -> list[Table]:
    """The tables of every experiment that the records hold; rows by size, context, mode and so on."""
    found = by_experiment(group(records))
    order = [*_SECTIONS, *sorted(found.keys() - _SECTIONS.keys())]
    return [table for name in order if name in found for table in tables_of(name, found[name])]


def tables_of(experiment: str, cells: Sequence[CellView], references: Sequence[CellView] = ()) -> list[Table]:
    """Those of each machine, and what several of them share: first, as it is why they were put together. What others
    have published (`references`) comes last."""
    make = _SECTIONS.get(experiment, _generic)
    machines = [sorted(chosen, key=_position) for chosen in by_machine(cells).values()]
    shared = side_by_side([*itertools.chain(*machines), *sorted(references, key=_position)])
    own = [table for chosen in machines for table in make(chosen)]
    return [*shared, *own] if len(machines) > 1 else [*own, *shared]


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


# -- sections ---------------------------------------------------------------------------------------------------------


def _steps(cells: Sequence[CellView]) -> list[Table]:
    return [_phase_table(cells), _summary_table(cells)]


def _phase_table(cells: Sequence[CellView]) -> Table:
    shown = varying(cells)
    columns = [
        Column("phase", numeric=False),
        *(Column(name, "ms") for name in ("mean", "std", "min", "max")),
        Column("n"),
    ]
    rows = []
    for cell in cells:
        if not cell.ok:
            rows.append([*keys(cell, shown), cell.verdict, *[""] * 5])
        # A step of one phase has nothing to add up: the phase is shown, the step would only repeat it.
        phases = [phase for phase in PHASES if f"{phase}_time" in cell.metrics]
        for phase in phases[:-1] if len(phases) == 2 else phases:
            found = cell.statistics(f"{phase}_time")
            if found:
                times = (found.mean, found.std, found.min, found.max)
                rows.append([*keys(cell, shown), phase, *map(ms, times), str(found.n)])
    title = title_of(cells[0].experiment, "time by phase", cells, shown)
    return Table(title, [*key_columns(shown), *columns], rows)


def _summary_table(cells: Sequence[CellView]) -> Table:
    shown = varying(cells)
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
        return [
            ms(cell.value("step_time")),
            number(cell.tokens_per_second, 0),
            tflops(cell.flops_per_second),
            percent(cell.mfu),
            ratio(cell.value("backward_time"), cell.value("forward_time")),
            gib(cell.value("peak_memory")),
            gib(cell.value("predicted_memory")),
            f"{cell.memory_error:+.1%}" if cell.memory_error is not None else "",
        ]

    return cell_table("throughput and memory", cells, shown, columns, row)


def _warmup(cells: Sequence[CellView]) -> list[Table]:
    shown = varying(cells, always=("size", "warmup_steps"))
    phases = [Column("forward", "ms"), Column("backward", "ms"), Column("step", "ms")]
    columns = [*phases, Column("first step", "ms"), Column("steady from step")]

    def row(cell: CellView) -> list[str]:
        steps = cell.metrics["warmup_time"].numbers + cell.metrics["step_time"].numbers
        steady = steady_from(steps)
        times = [spread(cell.statistics(f"{phase}_time")) for phase in ("forward", "backward", "step")]
        return [*times, ms(steps[0]), "never" if steady is None else str(steady + 1)]

    return [cell_table("mean ± std by warm-up steps", cells, shown, columns, row)]


def _against(
    cells: Sequence[CellView], field: str, baseline: Any, what: str, extra: Sequence[tuple[Column, Callable]] = ()
) -> Table:
    """Rows with their speed-up over the row that differs from them in `field` alone."""
    shown = varying(cells, always=("size", field))

    def work(cell: CellView) -> tuple:
        return (cell.machine, *(as_text(cell.get(name)) for name in FIELDS if name != field))

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
            *(ms(cell.value(f"{phase}_time")) for phase in ("forward", "backward", "optimizer", "step")),
            ms(step.std if step else None),
            ratio(base.value("step_time") if base else None, cell.value("step_time")),
            gib(cell.value("peak_memory")),
            ratio(cell.value("peak_memory"), base.value("peak_memory") if base else None),
            *(text(cell) for _, text in extra),
        ]

    return cell_table(what, cells, shown, columns, row)


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


def _fast_step(cells: Sequence[CellView]) -> list[Table]:
    def work(cell: CellView) -> tuple:
        return (cell.machine, *(cell.get(name) for name in ("size", "context_length", "batch_size", "precision")))

    def is_plain(cell: CellView) -> bool:
        return cell.get("fast") == "off" and not cell.get("compile") and not cell.get("model_factory")

    bases = {work(cell): cell for cell in cells if is_plain(cell) and cell.ok}
    shown = varying(cells, always=("size", "fast"))
    columns = [
        Column("step", "ms"),
        Column("std", "ms"),
        Column("speed-up"),
        Column("tokens/s"),
        Column("MFU"),
        Column("of the best matmul"),
        Column("peak", "GiB"),
        Column("memory"),
        Column("predicted"),
    ]

    def row(cell: CellView) -> list[str]:
        base = bases.get(work(cell))
        step, rate, ceiling = cell.statistics("step_time"), cell.flops_per_second, cell.value("matmul_ceiling")
        return [
            ms(step.mean if step else None),
            ms(step.std if step else None),
            ratio(base.value("step_time") if base else None, cell.value("step_time")),
            number(cell.tokens_per_second, 0),
            percent(cell.mfu),
            percent(rate / ceiling) if rate and ceiling else "",
            gib(cell.value("peak_memory")),
            ratio(cell.value("peak_memory"), base.value("peak_memory") if base else None),
            f"{cell.memory_error:+.1%}" if cell.memory_error is not None else "",
        ]

    return [cell_table("the step by what is switched on", cells, shown, columns, row)]


def _peak_memory(cells: Sequence[CellView]) -> list[Table]:
    """Two tables: the plain model, and what saves memory (fused attention, checkpointing)."""

    def is_plain(cell: CellView) -> bool:
        return cell.get("attention") == "reference" and not cell.get("checkpoint_blocks")

    plain = [cell for cell in cells if is_plain(cell)]
    saving = [cell for cell in cells if not is_plain(cell)]
    named = (("predicted peak against measured", plain), ("predicted peak against measured, saving memory", saving))
    return [_prediction_table(what, chosen) for what, chosen in named if chosen]


def _prediction_table(what: str, cells: Sequence[CellView]) -> Table:
    shown = varying(cells)
    columns = [Column("measured", "GiB"), Column("predicted", "GiB"), Column("error")]

    def row(cell: CellView) -> list[str]:
        error = cell.memory_error
        sizes = [gib(cell.value("peak_memory")), gib(cell.value("predicted_memory"))]
        return [*sizes, "" if error is None else f"{error:+.2%}"]

    judged = [(abs(cell.memory_error), cell) for cell in cells if cell.memory_error is not None]
    notes = remarks_beside_times(cells, shown)
    if judged:
        error, worst = max(judged, key=lambda pair: pair[0])
        notes = [f"worst of {len(judged)}: {error:.2%} ({' '.join(keys(worst, shown))})", *notes]
    return cell_table(what, cells, shown, columns, row, notes)


def _timing_agreement(cells: Sequence[CellView]) -> list[Table]:
    shown = varying(cells)
    columns = [Column("phase", numeric=False), Column("wall clock", "ms"), Column("CUDA events", "ms")]
    columns += [Column("do_bench", "ms"), Column("wall over do_bench")]
    rows = []
    for cell in cells:
        for phase in ("forward", "backward", "step"):
            names = (f"{phase}_time", f"{phase}_event_time", f"do_bench_{phase}_time")
            wall, events, other = (cell.value(name) for name in names)
            excess = f"{wall / other - 1:+.2%}" if wall and other else ("" if cell.ok else cell.verdict)
            rows.append([*keys(cell, shown), phase, ms(wall), ms(events), ms(other), excess])
    title = title_of(cells[0].experiment, "the same work by three clocks (means)", cells, shown)
    return [Table(title, [*key_columns(shown), *columns], rows, remarks_on(cells, shown))]


def _memory_model(cells: Sequence[CellView]) -> list[Table]:
    shown = varying(cells)
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
        return [*(gib(cell.value(name)) for _, name in names), *(number((v or 0) / MIB, 0) for v in mib), str(where)]

    return [cell_table("predicted for a CUDA GPU, none needed", cells, shown, columns, row)]


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
    "fast_step": _fast_step,
    "peak_memory": _peak_memory,
    "timing_agreement": _timing_agreement,
    "kernels": kernels.kernels,
    "attention_ops": kernels.attention_ops,
    "profiler_agreement": kernels.profiler_agreement,
    "pytorch_attention": attention.pytorch_attention,
    "flash": attention.flash,
    "attention_rivals": attention.attention_rivals,
    "flash_leaderboard": attention.flash_leaderboard,
    "attention_step": attention.attention_step,
    "collectives": parallel.collectives,
    "ddp": parallel.ddp,
    "bucket_model": parallel.bucket_model,
    "optimizer_sharding": parallel.sharding,
    "fsdp": parallel.sharding,
    "parallel_plan": parallel.plan,
    "memory": memory.memory,
    "checkpointing": memory.checkpointing,
    "saved_tensors": memory.saved_tensors,
    "memory_model": _memory_model,
    "accumulation": _accumulation,
    "autocast_dtypes": _autocast_dtypes,
}
