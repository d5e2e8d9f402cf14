"""Tables of memory: what the peak is made of, the largest blocks, checkpointing, and what forward keeps."""

from collections.abc import Sequence

from cs336_systems.record import MIB
from cs336_systems.report.cells import CellView
from cs336_systems.report.kernels import short
from cs336_systems.report.rows import (
    gib,
    key_columns,
    keys,
    ms,
    number,
    percent,
    remarks_beside_times,
    title_of,
    varying,
)
from cs336_systems.table import Column, Table


def memory(cells: Sequence[CellView]) -> list[Table]:
    ok = [cell for cell in cells if cell.ok]
    return [_peaks(cells), *([_parts(ok), _largest(ok), _overheads(ok)] if ok else [])]


def _peaks(cells: Sequence[CellView]) -> Table:
    shown = varying(cells)
    columns = [Column("measured", "GiB"), Column("predicted", "GiB"), Column("error"), Column("traced", "GiB")]
    columns += [Column("peak in", numeric=False), Column("parts / measured"), Column("unlabelled")]
    rows = []
    for cell in cells:
        if not cell.ok:
            rows.append([*keys(cell, shown), cell.verdict, *[""] * 6])
            continue
        peak = cell.value("peak_memory") or 1.0
        together = sum(size for _, size in cell.rows("part_memory", 2)) / peak
        error = "" if cell.memory_error is None else f"{cell.memory_error:+.2%}"
        sizes = [cell.value(name) for name in ("peak_memory", "predicted_memory", "predicted_by_tracing_memory")]
        rows.append(
            [
                *keys(cell, shown),
                *map(gib, sizes[:2]),
                error,
                gib(sizes[2]),
                str(cell.metrics["peak_phase"].samples[0]),
                percent(together, 2),
                percent((cell.value("unlabelled_memory") or 0.0) / peak, 2),
            ]
        )
    notes = ["measured: without instruments; predicted: from the configuration; traced: from its operators, no GPU"]
    title = title_of(cells[0].experiment, "the peak", cells, shown)
    return Table(title, [*key_columns(shown), *columns], rows, [*notes, *remarks_beside_times(cells, shown)])


def _parts(cells: Sequence[CellView]) -> Table:
    shown = varying(cells)
    labels = list(dict.fromkeys(label for cell in cells for label, _ in cell.rows("part_memory", 2)))
    rows = []
    for cell in cells:
        parts = dict(cell.rows("part_memory", 2))
        rows.append([*keys(cell, shown), *(gib(parts.get(label)) for label in labels)])
    title = title_of(cells[0].experiment, "what the peak is made of", cells, shown)
    return Table(title, [*key_columns(shown), *(Column(label, "GiB") for label in labels)], rows)


def _largest(cells: Sequence[CellView]) -> Table:
    """The largest blocks that a step made; of several cells, the largest of each."""
    shown = varying(cells)
    columns = [Column("size", "MiB"), *(Column(name, numeric=False) for name in ("label", "module", "made by", "line"))]
    rows = []
    for cell in cells:
        for size, label, module, what, line in cell.rows("largest_blocks", 5)[: 10 if len(cells) == 1 else 2]:
            rows.append([*keys(cell, shown), number(size / MIB, 1), label, module, short(what), line])
    title = title_of(cells[0].experiment, "the largest blocks", cells, shown)
    return Table(title, [*key_columns(shown), *columns], rows)


def _overheads(cells: Sequence[CellView]) -> Table:
    shown = varying(cells)
    columns = [Column("step", "ms"), Column("with the allocator's history"), Column("followed block by block")]
    rows = []
    for cell in cells:
        step = cell.value("step_time")
        slower = [cell.value(name) for name in ("history_step_time", "traced_step_time")]
        ratios = ["" if seconds is None or not step else f"{seconds / step:.1f}x" for seconds in slower]
        rows.append([*keys(cell, shown), ms(step), *ratios])
    title = title_of(cells[0].experiment, "how much slower a step is under each instrument", cells, shown)
    return Table(title, [*key_columns(shown), *columns], rows)


def checkpointing(cells: Sequence[CellView]) -> list[Table]:
    tables = []
    for precision in dict.fromkeys(cell.get("precision") for cell in cells):
        chosen = [cell for cell in cells if cell.get("precision") == precision]
        columns = [Column("group"), Column("inside it"), Column("step", "ms"), Column("over none")]
        columns += [Column(name, "GiB") for name in ("peak", "predicted", "traced")]
        columns += [Column("error"), Column("traced, error")]
        base = next((c.value("step_time") for c in chosen if c.ok and not c.get("checkpoint_blocks")), None)
        rows = []
        for cell in sorted(chosen, key=lambda cell: (cell.get("inner") > 0, cell.get("checkpoint_blocks"))):
            group = [str(cell.get("checkpoint_blocks") or "none"), str(cell.get("inner") or "")]
            if not cell.ok:
                rows.append([*group, cell.verdict, *[""] * 6])
                continue
            step, peak = cell.value("step_time"), cell.value("peak_memory") or 1.0
            found = [cell.value(name) for name in ("predicted_memory", "predicted_by_tracing_memory")]
            errors = ["" if size is None else f"{size / peak - 1:+.2%}" for size in found]
            over = f"{step / base:.2f}x" if step and base else ""
            rows.append([*group, ms(step), over, *map(gib, (peak, *found)), *errors])
        title = title_of(cells[0].experiment, "blocks recomputed together", chosen, ["checkpoint_blocks"])
        tables.append(
            Table(title, columns, rows, [*_best(chosen), *remarks_beside_times(chosen, ["checkpoint_blocks"])])
        )
    return tables


def _best(cells: Sequence[CellView]) -> list[str]:
    """The group with the least memory, predicted and measured."""
    ok = [cell for cell in cells if cell.ok]
    notes = []
    for what, chosen in (("flat", [c for c in ok if not c.get("inner")]), ("of all", ok)):
        if not chosen:
            continue
        names = []
        for metric in ("predicted_by_tracing_memory", "peak_memory"):
            least = min(cell.value(metric) or float("inf") for cell in chosen)
            # The simplest of those that are equal to a thousandth.
            near = [cell for cell in chosen if (cell.value(metric) or float("inf")) <= 1.001 * least]
            best = min(near, key=lambda cell: (cell.get("inner"), cell.get("checkpoint_blocks") or float("inf")))
            inner = f" with {best.get('inner')} inside" if best.get("inner") else ""
            names.append(f"{best.get('checkpoint_blocks') or 'none'}{inner}")
        notes.append(f"least memory, {what}: groups of {names[0]} predicted, {names[1]} measured")
    return notes


def saved_tensors(cells: Sequence[CellView]) -> list[Table]:
    shown = varying(cells, always=("size", "attention", "compile", "checkpoint_blocks"))
    totals, largest = [], []
    for cell in cells:
        if not cell.ok:
            totals.append([*keys(cell, shown), cell.verdict, "", ""])
            continue
        parameters = cell.value("saved_parameter_memory") or 0.0
        sizes = [number((cell.value("saved_memory") or 0.0) / MIB, 1), number(cell.value("saved_tensors"), 0)]
        totals.append([*keys(cell, shown), *sizes, number(parameters / MIB, 1)])
        for size, module, what, line in cell.rows("largest_saved", 4)[:5]:
            largest.append([*keys(cell, shown), number(size / MIB, 1), module, what, line])
    head = key_columns(shown)
    title = title_of(cells[0].experiment, "kept for backward", cells, shown)
    five = title_of(cells[0].experiment, "the five largest", cells, shown)
    words = [Column(name, numeric=False) for name in ("module", "what", "line")]
    return [
        Table(
            title,
            [*head, Column("kept", "MiB"), Column("tensors"), Column("parameters, too", "MiB")],
            totals,
            [
                "memory that several operators keep counts once; parameters would be there anyway",
                *remarks_beside_times(cells, shown),
            ],
        ),
        Table(five, [*head, Column("size", "MiB"), *words], largest),
    ]
