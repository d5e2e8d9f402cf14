"""Tables of the kernels of a step: by phase and kind, by name, and inside attention."""

from collections.abc import Sequence
from typing import Any

from cs336_systems.measure.readers.kernel_classes import (
    ELEMENTWISE,
    KINDS,
    MATMUL,
    OUTPUT,
    REDUCTION,
    SCORES,
    SOFTMAX,
    classify,
)
from cs336_systems.report.cells import PHASES, CellView
from cs336_systems.report.rows import key_columns, keys, ms, number, percent, remarks_on, title_of, varying
from cs336_systems.table import Column, Table

SOFTMAX_FLOPS = 3
"""Of one score: subtract the maximum, raise, divide; as the handout counts."""


def rows_of(cell: CellView, table: str, phase: str) -> list[list[Any]]:
    """A table that was recorded row by row."""
    return cell.rows(f"{table}_table: {phase}", {"kind": 3, "part": 3, "kernel": 6}[table])


def phases_of(cell: CellView) -> list[str]:
    return [phase for phase in PHASES if f"kind_table: {phase}" in cell.metrics]


def kind_seconds(cell: CellView, phases: Sequence[str]) -> dict[str, float]:
    found = dict.fromkeys(KINDS, 0.0)
    for phase in phases:
        for kind, _, seconds in rows_of(cell, "kind", phase):
            found[kind] += seconds
    return found


def kernels(cells: Sequence[CellView]) -> list[Table]:
    ok = [cell for cell in cells if cell.ok]
    tables = [_by_kind(cells)]
    tables += [_shares(ok)] if len({cell.get("mode") for cell in ok}) > 1 else []
    if len(ok) == 1:
        tables += [_by_name(ok[0], phase) for phase in phases_of(ok[0])]
    else:
        tables.append(_top(cells))
    return tables


def _notes(cells: Sequence[CellView], shown: Sequence[str]) -> list[str]:
    notes = []
    ok = [cell for cell in cells if cell.ok]
    if any(not cell.value("kernels_on_gpu") for cell in ok):
        notes.append("no GPU: operators of the CPU stand in for kernels, each with the time it spent in no other")
    total = sum(cell.value("kernel_time") or 0.0 for cell in ok)
    if total:
        lost = [sum(cell.value(name) or 0.0 for cell in ok) / total for name in _LOST]
        notes.append(f"of all kernel time {1 - lost[0]:.2%} is of a known kind and {1 - lost[1]:.2%} in a phase")
    return [*notes, *remarks_on(cells, shown)]


_LOST = ("unknown_kernel_time", "kernel_time_outside_phases")


def _by_kind(cells: Sequence[CellView]) -> Table:
    shown = varying(cells)
    used = [kind for kind in KINDS if any(kind_seconds(cell, phases_of(cell))[kind] for cell in cells if cell.ok)]
    on_gpu = any(cell.value("kernels_on_gpu") for cell in cells if cell.ok)
    columns = [Column("phase", numeric=False), Column("wall", "ms"), Column("kernels", "ms")]
    columns += [Column("GPU idle")] if on_gpu else []
    columns += [Column("launches"), *(Column(kind) for kind in used)]
    rows = []
    for cell in cells:
        if not cell.ok:
            rows.append([*keys(cell, shown), cell.verdict, *[""] * (len(columns) - 1)])
        for phase in phases_of(cell):
            seconds = kind_seconds(cell, [phase])
            total = sum(seconds.values())
            wall = cell.value(f"{phase}_time")
            count = sum(n for _, n, _ in rows_of(cell, "kind", phase))
            idle = [percent(_idle(cell, phase))] if on_gpu else []
            shares = [percent(seconds[kind] / total if total else 0.0) for kind in used]
            rows.append([*keys(cell, shown), phase, ms(wall), ms(total), *idle, number(count, 0), *shares])
    notes = ["wall: without the profiler; kernels: their times added up, of one step; shares are of these"]
    if on_gpu:
        notes.append("GPU idle: share of the phase, by CUDA events without the profiler, in which no kernel ran")
    title = title_of(cells[0].experiment, "time by kind of kernel", cells, shown)
    return Table(title, [*key_columns(shown), *columns], rows, [*notes, *_notes(cells, shown)])


def _idle(cell: CellView, phase: str) -> float | None:
    events, busy = cell.value(f"{phase}_event_time"), cell.value(f"busy_time: {phase}")
    return max(0.0, 1 - busy / events) if events and busy is not None else None


def _shares(cells: Sequence[CellView]) -> Table:
    """The same model in several modes, side by side."""
    modes = list(dict.fromkeys(cell.get("mode") for cell in cells))
    groups: dict[tuple, dict[str, CellView]] = {}
    shown = [name for name in varying(cells) if name != "mode"]
    for cell in cells:
        groups.setdefault(tuple(keys(cell, shown)), {})[cell.get("mode")] = cell
    columns = [Column(f"{what}, {mode}") for what in (MATMUL, REDUCTION, ELEMENTWISE) for mode in modes]
    rows = []
    for key, by_mode in groups.items():
        shares = []
        for kind in (MATMUL, REDUCTION, ELEMENTWISE):
            for mode in modes:
                found = kind_seconds(by_mode[mode], phases_of(by_mode[mode])) if mode in by_mode else {}
                shares.append(percent(found[kind] / sum(found.values())) if found else "")
        rows.append([*key, *shares])
    title = title_of(cells[0].experiment, "share of kernel time by mode", cells, [*shown, "mode"])
    return Table(title, [*key_columns(shown), *columns], rows)


def _top(cells: Sequence[CellView]) -> Table:
    """The kernel that took most, in forward and in forward with backward."""
    shown = varying(cells)
    columns = [Column("of", numeric=False), Column("share"), Column("launches"), Column("kernel", numeric=False)]
    rows = []
    for cell in (cell for cell in cells if cell.ok):
        both = [phase for phase in phases_of(cell) if phase != "optimizer"]
        for what, phases in (("forward", ["forward"]), ("forward and backward", both)):
            if what != "forward" and phases == ["forward"]:
                continue
            totals: dict[str, list[float]] = {}
            for phase in phases:
                for name, count, seconds, *_ in rows_of(cell, "kernel", phase):
                    found = totals.setdefault(name, [0.0, 0.0])
                    found[0], found[1] = found[0] + seconds, found[1] + count
            if totals:
                name, (seconds, count) = max(totals.items(), key=lambda item: item[1][0])
                share = seconds / sum(kind_seconds(cell, phases).values())
                rows.append([*keys(cell, shown), what, percent(share), number(count, 0), short(name)])
    title = title_of(cells[0].experiment, "the kernel that takes most", cells, shown)
    return Table(title, [*key_columns(shown), *columns], rows)


def _by_name(cell: CellView, phase: str) -> Table:
    """As `nsys stats` shows it."""
    columns = [Column("share"), Column("total", "ms"), Column("instances")]
    columns += [Column(name, "us") for name in ("mean", "median", "min", "max")]
    columns += [Column("kind", numeric=False), Column("name", numeric=False)]
    whole = sum(kind_seconds(cell, [phase]).values())
    rows = []
    for name, count, total, median, least, most in rows_of(cell, "kernel", phase):
        times = [number(t * 1e6, 1) for t in (total / count, median, least, most)]
        rows.append([percent(total / whole), ms(total), number(count, 0), *times, classify(name), short(name)])
    return Table(f"{cell.experiment}: {phase}, by name · {cell.machine}, {cell.name}", columns, rows)


def short(name: str, limit: int = 90) -> str:
    """Names of C++ templates go on for lines."""
    return name if len(name) <= limit else name[: limit - 1] + "…"


def attention_ops(cells: Sequence[CellView]) -> list[Table]:
    """The three steps of attention by the formula, in forward: time beside FLOPs."""
    shown = varying(cells)
    columns = [Column(name, "ms") for name in ("scores matmul", "scale and mask", "softmax", "final matmul")]
    columns += [Column("matmul / softmax, time"), Column("matmul / softmax, FLOPs")]
    rows = []
    for cell in cells:
        if not cell.ok:
            rows.append([*keys(cell, shown), cell.verdict, *[""] * 5])
            continue
        seconds = {(part, kind): t for part, kind, t in rows_of(cell, "part", "forward")}
        scores, final = seconds.get((SCORES, MATMUL), 0.0), seconds.get((OUTPUT, MATMUL), 0.0)
        around = sum(t for (part, kind), t in seconds.items() if part == SCORES and kind != MATMUL)
        softmax = sum(t for (part, _), t in seconds.items() if part == SOFTMAX)
        flops = 2 * cell.get("d_model") / cell.get("num_heads") / SOFTMAX_FLOPS
        ratio = f"{scores / softmax:.2f}x" if softmax else ""
        rows.append([*keys(cell, shown), *map(ms, (scores, around, softmax, final)), ratio, f"{flops:.1f}x"])
    notes = [
        "of all blocks, in one forward pass; ratios: the scores' matmul over softmax",
        f"FLOPs: 2 head_dim for a score, {SOFTMAX_FLOPS} for its softmax: bytes, not FLOPs, are what softmax waits for",
    ]
    title = title_of(cells[0].experiment, "inside attention, forward", cells, shown)
    return [Table(title, [*key_columns(shown), *columns], rows, [*notes, *remarks_on(cells, shown)])]


def profiler_agreement(cells: Sequence[CellView]) -> list[Table]:
    shown = varying(cells)
    columns = [Column("phase", numeric=False), Column("wall clock", "ms"), Column("CUDA events", "ms")]
    columns += [Column("events, queued", "ms"), Column("torch.profiler", "ms"), Column("nsys", "ms")]
    columns += [Column("kernels over queued events"), Column("launch-bound", "ms"), Column("step, profiled")]
    rows = []
    for cell in (cell for cell in cells if cell.ok):
        slower = (cell.value("profiled_step_time") or 0.0) / (cell.value("step_time") or 1.0)
        times = {phase: _clocks(cell, phase) for phase in phases_of(cell)}
        whole = [None if None in clock else sum(filter(None, clock)) for clock in zip(*times.values(), strict=True)]
        for phase, (wall, events, queued, busy, nsys) in {**times, "all": whole}.items():
            reference = queued or events  # older records have no queued ones
            excess = f"{busy / reference - 1:+.2%}" if busy and reference else ""
            gap = ms(events - busy) if busy and events else ""
            clocks = map(ms, (wall, events, queued, busy, nsys))
            rows.append([*keys(cell, shown), phase, *clocks, excess, gap, f"{slower:.2f}x"])
    notes = [
        "queued: nothing is synchronised between phases, and the host launches ahead, as in training",
        "torch.profiler, nsys: time in which at least one kernel ran, in profiled steps; empty: nsys is not installed",
        "launch-bound: events less kernels: the GPU waits for the host to launch the next one",
        "step, profiled: how much longer a step takes while it is profiled",
    ]
    title = title_of(cells[0].experiment, "the same phases by four clocks", cells, shown)
    return [Table(title, [*key_columns(shown), *columns], rows, [*notes, *remarks_on(cells, shown)])]


def _clocks(cell: CellView, phase: str) -> list[float | None]:
    names = ("{}_time", "{}_event_time", "queued_{}_event_time", "busy_time: {}", "nsys_busy_time: {}")
    return [cell.value(name.format(phase)) for name in names]
