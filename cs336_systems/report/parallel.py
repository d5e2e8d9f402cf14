"""Tables of the experiments with several ranks: collectives, and ways to train side by side."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cs336_systems.record import BUS_FACTOR, GIB, MIB
from cs336_systems.report.cells import CellView
from cs336_systems.report.referee import remarks
from cs336_systems.report.rows import ms, number, percent
from cs336_systems.table import Column, Table


def collectives(cells: Sequence[CellView]) -> list[Table]:
    found = [cell for cell in cells if cell.ok]
    if not found:
        return [_failed(cells)]
    words = [Column(name, numeric=False) for name in ("ranks", "link", "collective")]
    times = [*words, Column("size", "MB"), Column("time", "us"), Column("algbw", "GB/s"), Column("busbw", "GB/s")]
    fits = [*words, Column("latency", "us"), Column("bandwidth", "GB/s"), Column("largest misfit")]
    rows, fitted = [], []
    for cell in found:
        for name in cell.get("collectives"):
            row = [str(cell.get("ranks")), _link(cell), name]
            found_times = points(cell, name)
            for size, seconds in found_times:
                rate = size / seconds / 1e9
                bus = rate * BUS_FACTOR[name](cell.get("ranks"))
                rows.append([*row, number(size / 1e6), number(seconds * 1e6, 0), number(rate), number(bus)])
            latency, per_byte, misfit = fit(found_times)
            fitted.append(
                [*row, number(latency * 1e6, 0), number(1e-9 / per_byte if per_byte else None), percent(misfit, 0)]
            )
    machine = f"{found[0].machine}, fp32"
    notes = [
        "size: the whole array; time: median of the slowest rank; algbw: size over time; busbw: over the busiest link",
        *_on_one_machine(found),
    ]
    line = "time = latency + size / bandwidth, fitted to relative errors; latency is that of the whole collective"
    return [
        Table(f"collectives: as nccl-tests show them · {machine}", times, rows, [*notes, *remarks(cells)]),
        Table(f"collectives: latency and bandwidth · {machine}", fits, fitted, [line]),
    ]


def points(cell: CellView, collective: str) -> list[tuple[float, float]]:
    """(bytes, seconds) of every size."""
    return [(size, cell.median(f"{collective} {size}: time") or 0.0) for size in cell.get("sizes")]


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Latency and seconds per byte of time = latency + size * rate, and the largest relative misfit.

    Least squares of relative errors: else the largest size alone would count. Neither can be below 0.
    """
    weighted = [(x, y, 1 / y**2) for x, y in points]
    total = sum(w for _, _, w in weighted)
    mean_x, mean_y = (sum(w * point[i] for *point, w in weighted) / total for i in (0, 1))
    spread = sum(w * (x - mean_x) ** 2 for x, _, w in weighted)
    rate = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in weighted) / spread if spread else mean_y / mean_x
    latency = mean_y - rate * mean_x
    if rate <= 0:
        latency, rate = mean_y, 0.0
    elif latency < 0:
        latency, rate = 0.0, sum(w * x * y for x, y, w in weighted) / sum(w * x * x for x, _, w in weighted)
    return latency, rate, max(abs((latency + rate * x) / y - 1) for x, y in points)


# -- ways to train ----------------------------------------------------------------------------------------------------


def ddp(cells: Sequence[CellView]) -> list[Table]:
    columns = [Column("arrangement", numeric=False)]
    columns += [Column(name, "ms") for name in ("step", "backward", "sync", "communication", "exposed")]
    columns += [Column("hidden"), Column("over torch DDP"), Column("weights off by")]
    tables = []
    for cell in (cell for cell in cells if cell.ok):
        rows = []
        for name, alone, exposed in exposures(cell):
            hidden = 1 - exposed / alone if alone and exposed is not None else None
            times = [cell.median(f"{name}: {phase}_time") for phase in ("step", "backward", "sync")]
            against = _paired(cell, f"{name}: step_time", "torch DDP: step_time", lambda a, b: a / b)
            rows.append(
                [
                    name,
                    *(ms(seconds) for seconds in times),
                    ms(alone),
                    "" if name == "none" else ms(exposed),
                    "" if hidden is None or name == "none" else percent(hidden, 0),
                    "" if against is None else f"{against:.2f}x",
                    "" if name == "none" else f"{cell.value(f'{name}: weight_error'):.1e}",
                ]
            )
        notes = [
            "medians; communication: averaging and nothing else; exposed: step less that of no wrapper, in pairs",
            "hidden: 1 - exposed / communication; below 0 where sending takes cores away from backward",
            *_on_one_machine([cell]),
        ]
        tables.append(Table(_title(cell, "averaging gradients"), columns, rows, notes))
    return tables or [_failed(cells)]


class Exposure(NamedTuple):
    """Seconds of an arrangement's communication: with nothing beside it, and as a step feels it."""

    name: str
    alone: float | None
    exposed: float | None


def exposures(cell: CellView) -> list[Exposure]:
    return [
        Exposure(
            name,
            cell.median(f"{name}: communication_time"),
            _paired(cell, f"{name}: step_time", "none: step_time", lambda a, b: a - b),
        )
        for name in cell.get("arrangements")
    ]


def bucket_model(cells: Sequence[CellView]) -> list[Table]:
    """Exposed communication by bucket size, predicted by following the buckets through a backward pass."""
    columns = [
        Column("bucket", "MB"),
        Column("buckets"),
        Column("predicted exposed", "ms"),
        Column("by the formula", "ms"),
    ]
    columns += [Column("measured exposed", "ms"), Column("step", "ms")]
    tables = []
    for cell in (cell for cell in cells if cell.ok):
        found = bucket_rows(cell)
        rows = []
        for row in found:
            times = [ms(seconds) for seconds in (row.predicted, row.formula, row.measured, row.step)]
            rows.append([number(row.size / MIB, 1), str(row.count), *times])
        best = [min(found, key=key).size / MIB for key in (lambda row: row.predicted, lambda row: row.measured)]
        latency, bandwidth = cell.get("link")
        ideal = (_gradients(cell) * bandwidth * latency) ** 0.5 / MIB
        notes = [
            f"best bucket: {best[0]:g} MB predicted, {best[1]:g} MB measured; sqrt(S w o) = {ideal:.1f} MB",
            "predicted: gradients come evenly over backward, a bucket is sent when it is full, one after another",
            "by the formula: last bucket + overheads, S / (n w) + n o, as if all else were hidden",
        ]
        tables.append(Table(_title(cell, "which bucket size"), columns, rows, notes))
    return tables or [_failed(cells)]


@dataclass(frozen=True)
class BucketRow:
    """A bucket size in bytes, the number of buckets, and seconds: exposed by three ways, and of the step."""

    size: float
    count: int
    predicted: float
    formula: float
    measured: float
    step: float


def bucket_rows(cell: CellView) -> list[BucketRow]:
    latency, bandwidth = cell.get("link")
    backward, total = cell.median("none: backward_time") or 0.0, _gradients(cell)
    rows = []
    for name in (name for name in cell.get("arrangements") if name != "none"):
        size = float(name.split()[1]) * MIB
        count = -int(-total // size)
        rows.append(
            BucketRow(
                size,
                count,
                predicted=exposed(total, size, backward, latency, bandwidth),
                formula=total / (count * bandwidth) + count * latency,
                measured=_paired(cell, f"{name}: step_time", "none: step_time", lambda a, b: a - b) or 0.0,
                step=cell.median(f"{name}: step_time") or 0.0,
            )
        )
    return rows


def _gradients(cell: CellView) -> float:
    return cell.value("none: gradient_memory") or 0.0


def exposed(total: float, bucket: float, backward: float, latency: float, bandwidth: float) -> float:
    """Seconds from the end of backward to the end of the last message."""
    sent, free_at = 0.0, 0.0
    while sent < total:
        size = min(bucket, total - sent)
        sent += size
        free_at = max(free_at, backward * sent / total) + latency + size / bandwidth
    return free_at - backward


def sharding(cells: Sequence[CellView]) -> list[Table]:
    """Memory on the fullest rank beside what the formula says, and time."""
    parts = ("parameter", "gradient", "optimizer")
    columns = [Column("arrangement", numeric=False), Column("step", "ms"), Column("update", "ms")]
    columns += [Column(name, "MiB") for name in ("parameters", "gradients", "state", "together", "formula")]
    columns += [Column("over ideal state"), Column("weights off by")]
    moments = ("init", "before_update", "after_update", "peak")
    tables = []
    for cell in (cell for cell in cells if cell.ok):
        ranks, rows = cell.get("ranks"), []
        whole = {part: max(_sizes(cell, part), default=0.0) for part in parts}
        for name in cell.get("arrangements"):
            sizes = [cell.value(f"{name}: {part}_memory") or 0.0 for part in parts]
            # What is divided by the number of ranks: nothing, the state, or all.
            shares = (
                (1, 1, 1) if name == "ddp" else (1, 1, ranks) if name in ("sharded", "torch ZeRO") else (ranks,) * 3
            )
            formula = sum(whole[part] / share for part, share in zip(parts, shares, strict=True))
            ideal = whole["optimizer"] / shares[2]
            times = [cell.median(f"{name}: {phase}_time") for phase in ("step", "optimizer")]
            memory = [number(size / MIB, 1) for size in (*sizes, sum(sizes), formula)]
            error = f"{cell.value(f'{name}: weight_error'):.1e}"
            seen = [cell.value(f"{name}: {moment}_memory") for moment in moments]
            allocated = [number(size / MIB, 1) for size in seen if size is not None]
            rows.append([name, *map(ms, times), *memory, f"{sizes[2] / ideal:.3f}x", error, *allocated])
        notes = [
            "medians; memory on the fullest rank, before the update; formula: what is sharded divided by ranks",
            *_on_one_machine([cell]),
        ]
        on_cuda = [Column(moment.replace("_", " "), "MiB") for moment in moments] if len(rows[0]) > len(columns) else []
        if on_cuda:
            notes.append(
                "init, before and after the update, peak of the step: by CUDA's allocator, activations included"
            )
        tables.append(Table(_title(cell, "memory and time"), [*columns, *on_cuda], rows, notes))
    return tables or [_failed(cells)]


PLAN_PARTS = {
    "weights": "parameter",
    "gradients": "gradient",
    "state": "optimizer",
    "activations": "activation",
    "working": "working",
}
"""Heading -> metric."""


def plan_where(cell: CellView) -> str:
    counted = "" if cell.get("count") == "transformer" else f" ({cell.get('count')} only)"
    return f"{cell.get('size')}{counted} on {cell.get('gpus'):,} x {cell.get('gpu')}"


def plan(cells: Sequence[CellView]) -> list[Table]:
    """Bytes on a GPU, bytes sent, and what a step waits for, by strategy."""
    heads = (*PLAN_PARTS, "together")
    strategy = [Column("strategy", numeric=False)]
    memory = [*strategy, *(Column(name, "GiB") for name in heads), Column("fits", numeric=False), Column("GPUs needed")]
    times = [
        *strategy,
        Column("sent", "GB"),
        *(Column(name, "ms") for name in ("products", "forward sends", "backward sends")),
    ]
    times += [Column("step", "ms"), Column("tokens needed"), Column("waits for", numeric=False)]
    tables = []
    for cell in (cell for cell in cells if cell.ok):
        held, timed = [], []
        for name in cell.get("strategies"):
            sizes = [cell.value(f"{name}: {part}_memory") or 0.0 for part in PLAN_PARTS.values()]
            needed = cell.value(f"{name}: smallest_cluster")
            fits = "yes" if cell.value(f"{name}: fits") else "no"
            held.append(
                [
                    name,
                    *(number(size / GIB) for size in (*sizes, sum(sizes))),
                    fits,
                    "-" if needed is None else f"{needed:,.0f}",
                ]
            )
            timed.append([name, *_waiting(cell, name)])
        tokens = f"{cell.get('batch_size') * cell.get('context_length'):,}"
        rates = (
            f"{cell.get('flops') / 1e12:,.0f} TFLOP/s, {cell.get('link') / 1e9:g} GB/s in a node of {cell.get('node')}"
        )
        layout = plan_where(cell)
        how = f"{cell.get('precision')}, {tokens} tokens on each"
        how += f", checkpoint {cell.get('checkpoint_blocks') or 'off'}" if cell.get("count") == "transformer" else ""
        tables += [
            Table(
                f"{cell.experiment}: bytes on each GPU · {layout}, {how}",
                memory,
                held,
                [
                    "working: low-precision copies of weights, or the few that are gathered at a time",
                    "GPUs needed: the fewest on which it fits with as many sequences on each; -: no number is enough",
                ],
            ),
            Table(
                f"{cell.experiment}: bytes sent, and what a step waits for · {layout}, {how}",
                times,
                timed,
                [
                    f"{rates}, {cell.get('network') / 1e9:g} GB/s of each GPU to other nodes; sent: by each in a step",
                    "step: with every message beside products, and with none",
                    "tokens needed: on each GPU, for products to take longer than messages; -: no number is enough",
                ],
            ),
        ]
    return tables or [_failed(cells)]


def _waiting(cell: CellView, name: str) -> list[str]:
    passes = ("forward", "backward")
    compute = [cell.value(f"{name}: {during}_compute_time") or 0.0 for during in passes]
    sends = [cell.value(f"{name}: {during}_communication_time") or 0.0 for during in passes]
    prefix = f"{name}: sent by collective: "
    sent = sum(cell.value(metric) or 0.0 for metric in cell.metrics if metric.startswith(prefix))
    hidden = sum(map(max, compute, sends))
    late = [during for during, products, messages in zip(passes, compute, sends, strict=True) if messages > products]
    needed = cell.value(f"{name}: least_tokens")
    return [
        number(sent / 1e9),
        ms(sum(compute)),
        *map(ms, sends),
        f"{ms(hidden)} to {ms(sum(compute) + sum(sends))}",
        "-" if needed is None else number(needed, 0),
        f"messages in {' and '.join(late)}" if late else "products",
    ]


def _sizes(cell: CellView, part: str) -> list[float]:
    return [cell.value(f"{name}: {part}_memory") or 0.0 for name in cell.get("arrangements")]


def _paired(cell: CellView, metric: str, base: str, compare: Any) -> float | None:
    """The median over rounds of a comparison within the round: what disturbs both does not count."""
    if metric not in cell.metrics or base not in cell.metrics:
        return None
    pairs = zip(cell.metrics[metric].numbers, cell.metrics[base].numbers, strict=True)
    return statistics.median(compare(a, b) for a, b in pairs)


def _link(cell: CellView) -> str:
    return f"{cell.get('backend')}, {cell.get('device')}"


def _title(cell: CellView, what: str) -> str:
    model = f"context {cell.get('context_length')}, batch {cell.get('batch_size')} on each rank"
    return f"{cell.experiment}: {what}{_emulated(cell)} · {cell.machine}, {_ranks(cell)}, {cell.get('size')}, {model}"


def where(cell: CellView) -> str:
    """What a picture's title has room for."""
    return f"{cell.get('size')}, {_ranks(cell)}{_emulated(cell)}"


def _ranks(cell: CellView) -> str:
    return f"{cell.get('ranks')} ranks, {_link(cell)}"


def _emulated(cell: CellView) -> str:
    link = cell.get("link")
    return f", emulated network of {link[1] / 1e9:g} GB/s and {link[0] * 1e3:g} ms" if link else ""


def _on_one_machine(cells: Sequence[CellView]) -> list[str]:
    if all(cell.get("backend") == "nccl" for cell in cells):
        return []
    return ["Gloo between processes of one machine stands in for a network: no GPU-to-GPU figures"]


def _failed(cells: Sequence[CellView]) -> Table:
    return Table(cells[0].experiment, [Column("status", numeric=False)], [[c.verdict] for c in cells], remarks(cells))
