"""Does the predicted peak memory agree with the measured one?"""

from collections.abc import Iterable
from itertools import product

from cs336_systems.config import RunConfig
from cs336_systems.experiments.spec import Config, Experiment, run_config
from cs336_systems.experiments.steps.step_time import STEP, sizes
from cs336_systems.record import GIB
from cs336_systems.report import entries, terms
from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Chart
from cs336_systems.report.phrases import error_text, having, worst_prediction
from cs336_systems.report.points import FEW, measured, series_of
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import keys, row_name, signed, varying
from cs336_systems.table import Table
from cs336_systems.text import Text, say


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    modes = ("inference", "forward", "train-step")
    for size, mode, precision in product(sizes(preset, base), modes, ("fp32", "bf16")):
        yield run_config(base, size, mode=mode, precision=precision)
    if preset == "quick":
        return
    for context, mode, precision in product((128, 256), modes, ("fp32", "bf16")):
        yield run_config(base, "2.7B", context, mode=mode, precision=precision)
    for size, precision in product(("small", "large", "2.7B"), ("fp32", "bf16")):
        yield run_config(base, size, precision=precision, attention="sdpa")
        yield run_config(base, size, precision=precision, checkpoint_blocks=1)
        yield run_config(base, size, precision=precision, checkpoint_blocks=4)
        yield run_config(base, size, precision=precision, attention="sdpa", checkpoint_blocks=2)


def _is_plain(cell: CellView) -> bool:
    """Naive attention and no recomputation: nothing saves memory."""
    return cell.get("attention") == "reference" and not cell.get("checkpoint_blocks")


def _tables(cells: Cells) -> list[Table]:
    """Two tables: the plain model, and what saves memory (fused attention, recomputation)."""
    plain = [cell for cell in cells if _is_plain(cell)]
    saving = [cell for cell in cells if not _is_plain(cell)]
    named = (
        (Text("predicted peak against measured", "预测峰值与实测对比"), plain),
        (Text("predicted peak against measured, saving memory", "预测峰值与实测对比，节省显存时"), saving),
    )
    return [_prediction_table(what, chosen) for what, chosen in named if chosen]


def _prediction_table(what: Text, cells: Cells) -> Table:
    shown = varying(cells)
    columns = [
        entries.gib(terms.MEASURED, "peak_memory"),
        entries.gib(terms.PREDICTED, "predicted_memory"),
        entries.of(terms.ERROR, lambda cell: signed(cell.memory_error, 2)),
        *entries.reserved(cells),
    ]
    judged = [(abs(cell.memory_error), cell) for cell in cells if cell.memory_error is not None]
    notes = []
    if judged:
        error, worst = max(judged, key=lambda pair: pair[0])
        values = (str(len(judged)), f"{error:.2%}", " ".join(keys(worst, shown)))
        notes = [say("worst of {}: {} ({})", "{} 个中最差：{}（{}）", *values)]
    return entries.cell_table(what, cells, columns, notes=notes, on_spread=False)


def _charts(cells: Cells) -> list[Chart]:
    plain = [cell for cell in cells if cell.get("mode") == "train-step" and _is_plain(cell)]
    if not plain or len(plain) > FEW:
        return []
    shown = varying(plain)
    series = [
        series_of(text, (measured(cell, metric, row_name(cell, shown).en, GIB) for cell in plain))
        for text, metric in ((terms.MEASURED, "peak_memory"), (terms.PREDICTED, "predicted_memory"))
    ]
    title = Text("Peak memory of a training step, measured and predicted", "训练步峰值显存：实测与预测")
    return [Chart("", title, "bars", terms.SIZE, terms.GIB_TEXT, series, horizontal=True)]


def _saving_memory(cells: Cells) -> Text | None:
    """Compare the errors of cells that save memory with those of the plain ones."""
    fine = having(cells, "peak_memory", "predicted_memory")
    saving = [abs(cell.memory_error or 0.0) for cell in fine if not _is_plain(cell)]
    plain = [abs(cell.memory_error or 0.0) for cell in fine if _is_plain(cell)]
    return say(
        "peaks with fused attention or recomputation ({}) are off by {} at most, the others ({}) by {}",
        "使用融合注意力或重计算的 {} 个峰值最大误差 {}，其余 {} 个最大误差 {}",
        *(str(len(saving)), error_text(max(saving)), str(len(plain)), error_text(max(plain))),
    )


PEAK_MEMORY = Experiment(
    name="peak_memory",
    title=Text("Peak memory, predicted and measured", "峰值显存：预测与实测"),
    question=Text("Does the predicted peak agree with the measured one?", "预测的峰值与实测是否一致？"),
    grid=_grid,
    instrument=STEP,
    tables=_tables,
    charts=_charts,
    findings=(worst_prediction, _saving_memory),
    order=60,
)
