"""`bucket_model`: which bucket size is best, predicted and measured?

The prediction follows the buckets through a backward pass on an emulated network. Letters: S bytes of gradients in
n buckets, bandwidth w, overhead o of each collective.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from cs336_systems.config import RunConfig
from cs336_systems.experiments.ranks.arrangement import NONE, Arrangement
from cs336_systems.experiments.ranks.multi_rank import (
    INTERLEAVED,
    SLOW_LINK,
    arrangement_grid,
    arrangements_of,
    cell_title,
    chart_title,
    paired_steps,
    per_link,
    table_per_cell,
)
from cs336_systems.experiments.spec import Config, Experiment
from cs336_systems.record import MIB
from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Chart, Point, Series
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import ms, number
from cs336_systems.report.terms import MEASURED, MS, PREDICTED, STEP
from cs336_systems.table import Column, Table
from cs336_systems.text import Text, say

SIZES_MB = (0.5, 1, 2, 4, 8, 16, 32)


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    buckets = [Arrangement("bucketed", bucket_size_mb=size) for size in SIZES_MB]
    return arrangement_grid(preset, base, [NONE, *buckets], SLOW_LINK)


# -- the model --------------------------------------------------------------------------------------------------------


def exposed(total: float, bucket: float, backward: float, latency: float, bandwidth: float) -> float:
    """Seconds from the end of backward to the end of the last bucket's all-reduce."""
    sent, free_at = 0.0, 0.0
    while sent < total:
        size = min(bucket, total - sent)
        sent += size
        free_at = max(free_at, backward * sent / total) + latency + size / bandwidth
    return free_at - backward


@dataclass(frozen=True)
class BucketRow:
    """A bucket size in bytes, the number of buckets, exposed seconds from three sources, and seconds of a step."""

    size: float
    count: int
    predicted: float
    formula: float
    measured: float
    step: float


def bucket_rows(cell: CellView) -> list[BucketRow]:
    latency, bandwidth = cell.get("link")
    baseline, total, rows = cell.variant(NONE.name), _gradient_bytes(cell), []
    backward = baseline.median("backward_time") or 0.0
    for arrangement in arrangements_of(cell):
        if arrangement.bucket_size_mb is not None:
            size, own = arrangement.bucket_size_mb * MIB, cell.variant(arrangement.name)
            count = -int(-total // size)
            row = BucketRow(
                size,
                count,
                predicted=exposed(total, size, backward, latency, bandwidth),
                formula=total / (count * bandwidth) + count * latency,
                measured=paired_steps(own, baseline, lambda a, b: a - b) or 0.0,
                step=own.median("step_time") or 0.0,
            )
            rows.append(row)
    return rows


def _gradient_bytes(cell: CellView) -> float:
    return cell.variant(NONE.name).value("gradient_memory") or 0.0


# -- tables and charts ------------------------------------------------------------------------------------------------


def bucket_tables(cells: Cells) -> list[Table]:
    return table_per_cell(cells, _table)


def _table(cell: CellView) -> Table:
    columns = [
        Column(Text("bucket", "桶"), "MB"),
        Column(Text("buckets", "桶数")),
        Column(Text("predicted exposed", "未掩盖，预测"), "ms"),
        Column(Text("formula", "按公式"), "ms"),
        Column(Text("measured exposed", "未掩盖，实测"), "ms"),
        Column(STEP, "ms"),
    ]
    found, rows = bucket_rows(cell), []
    for row in found:
        times = [ms(seconds) for seconds in (row.predicted, row.formula, row.measured, row.step)]
        rows.append([number(row.size / MIB, 1), str(row.count), *times])
    predicted, measured = _best(found)
    latency, bandwidth = cell.get("link")
    ideal = (_gradient_bytes(cell) * bandwidth * latency) ** 0.5 / MIB
    notes = [
        say(
            "best bucket: {} MB predicted, {} MB measured; sqrt(S w o) = {} MB",
            "最好的桶：预测 {} MB，实测 {} MB；sqrt(S w o) = {} MB",
            *(f"{predicted.size / MIB:g}", f"{measured.size / MIB:g}", f"{ideal:.1f}"),
        ),
        Text(
            "predicted: gradients arrive evenly over backward, and full buckets are sent one after another",
            "预测：梯度在后向中均匀产生，桶满即发送，一个接一个",
        ),
        Text(
            "formula: last bucket + overheads, S / (n w) + n o, assuming that all else is hidden",
            "按公式：最后一个桶 + 各次开销，S / (n w) + n o，假定其余全被掩盖",
        ),
    ]
    return Table(cell_title(cell, Text("which bucket size", "桶的大小")), columns, rows, notes)


def _best(rows: list[BucketRow]) -> tuple[BucketRow, BucketRow]:
    """The best row as predicted, and as measured."""
    return min(rows, key=lambda row: row.predicted), min(rows, key=lambda row: row.measured)


def bucket_charts(cells: Cells) -> list[Chart]:
    return [_chart(cell) for cell in cells if cell.ok]


def _chart(cell: CellView) -> Chart:
    rows = bucket_rows(cell)
    series = [
        Series(MEASURED, [Point(row.size / MIB, 1e3 * row.measured) for row in rows]),
        Series(PREDICTED, [Point(row.size / MIB, 1e3 * row.predicted) for row in rows], dashed=True),
        Series(Text("S / (n w) + n o"), [Point(row.size / MIB, 1e3 * row.formula) for row in rows], dashed=True),
    ]
    title = chart_title(cell, Text("Exposed communication by bucket size", "未掩盖的通信与桶大小"))
    return Chart("", title, "lines", Text("bucket, MB", "桶 MB"), MS, series, log_x=True)


# -- findings ---------------------------------------------------------------------------------------------------------


def _best_bucket(cell: CellView) -> Text | None:
    predicted, measured = _best(bucket_rows(cell))
    return say(
        "the best bucket is {} MB predicted ({} ms exposed) and {} MB measured ({} ms)",
        "最好的桶预测为 {} MB（未掩盖 {} ms），实测 {} MB（{} ms）",
        *(f"{predicted.size / MIB:g}", ms(predicted.predicted), f"{measured.size / MIB:g}", ms(measured.measured)),
    )


def _worst_prediction(cell: CellView) -> Text | None:
    rows = [row for row in bucket_rows(cell) if row.measured > 0 and row.predicted > 0]
    worst = max(rows, key=lambda row: abs(row.predicted / row.measured - 1))
    return say(
        "of {} sizes the prediction is worst for {} MB: {} ms, measured {}",
        "{} 种大小中预测最差的是 {} MB：{} ms，实测 {}",
        *(str(len(rows)), f"{worst.size / MIB:g}", ms(worst.predicted), ms(worst.measured)),
    )


BUCKET_MODEL = Experiment(
    name="bucket_model",
    title=Text("Bucket size", "桶的大小"),
    question=Text("Which bucket size is best, predicted and measured?", "桶取多大最好，预测与实测如何？"),
    instrument=INTERLEAVED,
    grid=_grid,
    tables=bucket_tables,
    charts=bucket_charts,
    findings=per_link(_best_bucket, _worst_prediction),
    order=30,
)
