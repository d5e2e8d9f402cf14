"""Does the predicted peak memory agree with the measured one?"""

from collections.abc import Iterable
from itertools import product

from cs336_systems.config import MODES, RunConfig
from cs336_systems.experiments.spec import Config, Experiment, run_config
from cs336_systems.experiments.steps.step_time import STEP, sizes
from cs336_systems.report import entries, terms
from cs336_systems.report.cells import CellView, grouped
from cs336_systems.report.document import Chart, Highlight, Limit, Point, Series
from cs336_systems.report.names import size_name
from cs336_systems.report.phrases import MODE_WORDS, error_text, having, scale_of, worst_prediction
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import gib, key_texts, percent, signed, varying
from cs336_systems.table import Table
from cs336_systems.text import Text, listed, say

USUAL_ERROR = 2
"""Percent; the chart of errors has lines at plus and minus this value."""


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
    """Return True for naive attention without recomputation: nothing saves memory."""
    return cell.get("attention") == "reference" and not cell.get("checkpoint_blocks")


def _tables(cells: Cells) -> list[Table]:
    """Return two tables: the plain model, and what saves memory (fused attention, recomputation)."""
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
        values = (str(len(judged)), f"{error:.2%}", listed(key_texts(worst, shown), (" ", " ")))
        notes = [say("worst of {}: {} ({})", "{} 个中最差：{}（{}）", *values)]
    return entries.cell_table(what, cells, columns, notes=notes, on_spread=False)


def _charts(cells: Cells) -> list[Chart]:
    """Chart the errors of the predictions: a row for each kind of step, a dot for each model and context."""
    fine = sorted(having(cells, "peak_memory", "predicted_memory"), key=scale_of)
    series = [
        Series(Text(str(precision)), [_error(cell) for cell in members])
        for precision, members in grouped(fine, lambda cell: cell.get("precision")).items()
    ]
    title = Text("Error of predicted peak memory", "峰值显存预测的误差")
    y = Text("% of the measured peak", "相对实测峰值的 %")
    limits = [Limit(error, Text(f"{error:+}%"), dashed=True) for error in (-USUAL_ERROR, USUAL_ERROR)]
    places = [_kind(cell).en for cell in sorted(fine, key=_position)]
    note = say("{} predictions; 0: as measured", "{} 个预测；0：与实测一致", str(len(fine)))
    kind = Text("kind of step", "步的类型")
    return [Chart("", title, "dots", kind, y, series, places=places, limits=limits, digits=2, note=note)]


def _error(cell: CellView) -> Point:
    shape = say("{} {}", "{} {}", size_name(cell.get("size")), str(cell.get("context_length")))
    return Point(_kind(cell), 100 * (cell.memory_error or 0.0), name=shape.en)


def _kind(cell: CellView) -> Text:
    """Return the mode and the means of saving memory, as the name of a row."""
    saving = [Text("SDPA")] if cell.get("attention") != "reference" else []
    saving += [Text("checkpointing", "激活重计算")] if cell.get("checkpoint_blocks") else []
    return listed((MODE_WORDS.get(str(cell.get("mode")), Text("step", "一步")), *saving), (", ", "，"))


def _position(cell: CellView) -> tuple[bool, int]:
    """Return the sort key of a row: short modes first, then what saves memory."""
    mode = cell.get("mode")
    return not _is_plain(cell), MODES.index(mode) if mode in MODES else len(MODES)


# -- first screen -----------------------------------------------------------------------------------------------------


def _errors(cells: Cells) -> tuple[list[float], CellView]:
    """Return the relative errors, the largest last, and its cell."""
    fine = sorted(having(cells, "peak_memory", "predicted_memory"), key=lambda cell: abs(cell.memory_error or 0.0))
    return [abs(cell.memory_error or 0.0) for cell in fine], fine[-1]


def _highlights(cells: Cells) -> list[Highlight]:
    if not having(cells, "peak_memory", "predicted_memory"):
        return []
    errors, worst = _errors(cells)
    what = say("largest error of {} predicted peak memories", "峰值显存预测的最大误差（共 {} 项）", str(len(errors)))
    sizes = [gib(worst.value(name)) for name in ("predicted_memory", "peak_memory")]
    name = say("{}, {}", "{}，{}", size_name(worst.get("size")), _kind(worst))
    detail = say("{}: {} GiB predicted, {} GiB measured", "{}：预测 {} GiB，实测 {} GiB", name, *sizes)
    return [Highlight(30, Text(_shown(errors[-1])), what, detail)]


def _shown(error: float) -> str:
    return percent(error) if error >= 0.0005 else "<0.1%"


def _within(cells: Cells) -> Text | None:
    errors, _ = _errors(cells)
    return say(
        "{} peak memories predicted within {}",
        "{} 个峰值显存的预测误差不超过 {}",
        str(len(errors)),
        _shown(errors[-1]).lstrip("<"),
    )


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
    highlights=_highlights,
    trust=_within,
    group="trust",
    order=60,
)
