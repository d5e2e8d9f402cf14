"""Experiment `unseen_steps`: steps that a seeded generator draws, predicted and measured. How far off is the time that
is predicted for a step nobody chose?"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from cs336_systems.config import RunConfig
from cs336_systems.experiments.spec import Config, Experiment, Instrument, Memory, require_gpu, step_memory
from cs336_systems.experiments.steps.drawn_steps import SEED, SMALL, TINY, eager_steps, fast_steps
from cs336_systems.measure.readers.recorded_tables import ComparedRow, rows_of
from cs336_systems.predict.gpus import find_card
from cs336_systems.predict.memory_model import estimate
from cs336_systems.predict.time.eager_time import CLOSE_STEP, LAUNCH_BOUND_STEP, kind_of_step
from cs336_systems.predict.time.on_gpu import DRAW_SEED, predicted_on
from cs336_systems.record import GIB
from cs336_systems.report import terms
from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Chart, Highlight, Limit, Point, Series
from cs336_systems.report.names import implementation_name
from cs336_systems.report.phrases import median_of, together
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import FIELDS, ms, number, percent, remarks_on, signed, title_of
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, listed, say

FAST_STEPS, EAGER_STEPS = 60, 40
CLOSE, NEAR = 0.02, 0.05
"""Limits of the error: the summary counts steps within them; on the first screen the median error is below the first,
and the errors of nearly all steps are below the second."""
LARGE = 100 * GIB
"""Steps that need at least this memory start in a new process, without the kernels and buffers of others."""
NEARLY_ALL = 0.95
ENOUGH = 20
"""Minimum number of steps in a group for its errors to appear on the first screen."""

# -- grid -------------------------------------------------------------------------------------------------------------


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    """Yield fast steps, then eager and compiled ones, each with the seed that drew it."""
    if preset == "quick":
        for run in _quick(base):
            yield _config(run, base)
        return
    require_gpu("unseen_steps", base, "its steps have up to 8 billion parameters")
    for run in (*fast_steps(FAST_STEPS), *eager_steps(EAGER_STEPS)):
        yield _config(run, base)


def _quick(base: RunConfig) -> list[RunConfig]:
    """Return four small steps; on a CPU two tiny ones in fp32, since most CPUs emulate bf16."""
    if base.device_type == "cuda":
        return [*fast_steps(2, SMALL), *eager_steps(2, SMALL)]
    tiny = (*fast_steps(1, TINY), *eager_steps(1, TINY))
    return [dataclasses.replace(run, precision="fp32", device="cpu") for run in tiny]


def _config(run: RunConfig, base: RunConfig) -> Config:
    return {**dataclasses.replace(run, device=base.device).to_dict(), DRAW_SEED: SEED}


def _label(config: Mapping[str, Any], experiments: Sequence[str]) -> str:
    run = RunConfig.of(config)
    how = "fast" if run.fast != "off" else "compiled" if run.compile else "eager"
    shape = f"{short_count(run.model.parameters)} {run.batch_size} x {run.model.context_length}"
    return f"{shape} {how} {run.precision} {run.attention}"


def _memory(config: Mapping[str, Any]) -> Memory | None:
    run = RunConfig.of(config)
    return step_memory(config) if run.compile else Memory(estimate(run).peak)


def _is_fresh(config: Mapping[str, Any]) -> bool:
    """Return True if the step gets a process of its own: a compiled one, one that needs nearly all memory, or one that
    waits for the host, whose launches may take longer after a profiler has run."""
    run = RunConfig.of(config)
    if run.compile or run.device_type != "cuda":
        return run.compile
    found = predicted_on(run, find_card("h200")) if run.fast == "off" else None
    waits = found is not None and kind_of_step(found.time) in (LAUNCH_BOUND_STEP, CLOSE_STEP)
    return waits or estimate(run).peak > LARGE


def short_count(count: float) -> str:
    """Return a number of parameters with three digits: 51.2M, 1.35B."""
    unit, name = next((own for own in ((1e9, "B"), (1e6, "M")) if count >= 0.9995 * own[0]), (1e3, "K"))
    value = count / unit
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}{name}"


# -- errors -----------------------------------------------------------------------------------------------------------

FAST, EAGER, COMPILED = Text("fast", "快速"), Text("eager"), Text("compiled", "编译")
LAUNCH_BOUND = Text("launch-bound", "受限于主机发射")
GROUPS = {
    "fast": Text("fast steps", "快速步"),
    "eager": Text("eager and compiled steps", "eager 与编译步"),
    "launch-bound": Text("launch-bound steps", "受限于主机发射的步"),
}
"""Names of the groups of cells; the second has no launch-bound steps."""
REST = "rest"
PART_NAMES = {
    "matmul": terms.KERNEL_KINDS["matmul"],
    "attention": terms.KERNEL_KINDS["attention"],
    "other": Text("other kernels", "其他内核"),
    REST: Text("the time between kernels", "内核之间的时间"),
}


def error_of(cell: CellView) -> float | None:
    """Return predicted time over the median of the measured times, minus one; None without a prediction."""
    predicted, measured = cell.predicted_time, median_of(cell, "step_time")
    is_known = predicted is not None and math.isfinite(predicted) and predicted > 0
    return predicted / measured - 1 if cell.ok and is_known and predicted and measured else None


def _is_launch_bound(cell: CellView) -> bool:
    if "launch_bound" in cell.metrics:
        return bool(cell.value("launch_bound"))
    return cell.prediction is not None and cell.prediction.time.is_launch_bound


def _group(cell: CellView) -> str:
    if (cell.get("fast") or "off") != "off":
        return "fast"
    return "launch-bound" if _is_launch_bound(cell) else "eager"


def _kind(cell: CellView) -> Text:
    """Return how the step runs: fast, eager or compiled."""
    if _group(cell) == "fast":
        return FAST
    how = COMPILED if cell.get("compile") else EAGER
    return say("{}, {}", "{}，{}", how, LAUNCH_BOUND) if _group(cell) == "launch-bound" else how


class Part(NamedTuple):
    """A kind of kernels, or the rest of a step; all parts add up to the step."""

    name: str
    measured: float
    predicted: float

    @property
    def excess(self) -> float:
        """Predicted seconds minus measured seconds."""
        return self.predicted - self.measured


def responsible(cell: CellView) -> Part | None:
    """Return the part of a step with the largest absolute error; None if kernels were not recorded."""
    rows = [row for row in rows_of(cell.samples("compared_kinds"), ComparedRow) if row.kind in PART_NAMES]
    step, predicted = median_of(cell, "step_time"), cell.predicted_time
    if not rows or not step or not predicted or not cell.ok:
        return None
    rest = Part(REST, step - sum(row.measured for row in rows), predicted - sum(row.predicted for row in rows))
    return max((*(Part(*row) for row in rows), rest), key=lambda part: abs(part.excess))


def within(errors: Sequence[float], share: float) -> float:
    """Return the smallest error that is at least as large as this share of all errors."""
    ordered = sorted(map(abs, errors))
    return ordered[math.ceil(share * len(ordered)) - 1]


def _errors(cells: Cells) -> dict[str, list[float]]:
    """Return the errors by group, in the order of GROUPS."""
    found: dict[str, list[float]] = {name: [] for name in GROUPS}
    for cell in cells:
        if (error := error_of(cell)) is not None:
            found[_group(cell)].append(error)
    return {name: errors for name, errors in found.items() if errors}


# -- tables -----------------------------------------------------------------------------------------------------------

SHOWN = ("size", "context_length", "batch_size", "vocab_size", "precision", "attention", "compile", "fast")
"""Fields in which steps differ."""
NOTES = [
    Text(
        "error: predicted over measured, less one; measured: the median step",
        "误差：预测除以实测减一；实测：单步时间的中位数",
    ),
    Text(
        "furthest off: the kind of kernels, or the time between kernels, that differs most from its prediction; share: "
        "its measured part of the step; of the error: its difference, relative to the step",
        "差异最大：与预测相差最多的内核类别或内核之间的时间；占比：其实测时间占单步的比例；对误差的贡献：其差值与单步时间之比",
    ),
    Text(
        "kernels are those of one step under the profiler, which may run at another clock",
        "内核时间取自带分析器的一步，其时钟频率可能不同",
    ),
]
UNPREDICTED = Text(
    "no prediction: the rates of this device are not known (cs336 calibrate measures those of a CUDA GPU)",
    "无预测：不知道该设备的速率（cs336 calibrate 可测量 CUDA GPU 的速率）",
)


def _newest(cells: Cells) -> Cells:
    """Return the steps of the newest draw. The model was changed between two draws, so their errors are not of one
    model."""
    seeds = [seed for cell in cells if isinstance(seed := cell.get(DRAW_SEED), int)]
    return [cell for cell in cells if cell.get(DRAW_SEED) == max(seeds)] if seeds else cells


def _left_out(cells: Cells) -> list[Text]:
    """Return the draws in the file other than the newest one."""
    newest = {cell.get(DRAW_SEED) for cell in _newest(cells)}
    older = sorted({str(seed) for cell in cells if (seed := cell.get(DRAW_SEED)) not in newest})
    return (
        [say("steps of other draws are left out: seed {}", "不含其他抽样的步：随机种子 {}", listed(older))]
        if older
        else []
    )


def _tables(every: Cells) -> list[Table]:
    cells = _newest(every)
    errors = _errors(cells)
    found = [*([_summary(cells, errors)] if errors else []), _steps(cells)]
    return [dataclasses.replace(table, notes=[*table.notes, *_left_out(every)]) for table in found]


def _summary(cells: Cells, errors: Mapping[str, Sequence[float]]) -> Table:
    columns = [
        word(Text("steps", "步的类型")),
        Column(Text("number", "数量")),
        Column(Text("median error", "误差中位数")),
        Column(Text("95% within", "95% 不超过")),
        Column(say("within {}", "误差不超过 {}", percent(CLOSE, 0))),
        Column(say("within {}", "误差不超过 {}", percent(NEAR, 0))),
        Column(Text("largest", "最大")),
    ]
    rows: list[list[str | Text]] = []
    for name, own in errors.items():
        shares = [percent(sum(abs(error) <= most for error in own) / len(own), 0) for most in (CLOSE, NEAR)]
        usual = [percent(median(map(abs, own))), percent(within(own, NEARLY_ALL))]
        rows.append([GROUPS[name], str(len(own)), *usual, *shares, signed(max(own, key=abs), 1)])
    what = Text("errors of predicted step times", "单步时间预测的误差")
    note = Text(
        "launch-bound: the host needs longer than the GPU, and its time varies; such steps are in no other row",
        "受限于主机发射：主机比 GPU 慢且耗时不稳定；这些步不计入其他行",
    )
    notes = [note, *_origin(cells)] if "launch-bound" in errors else _origin(cells)
    return Table(title_of(cells[0].experiment, what, cells, SHOWN), columns, rows, notes)


def _steps(cells: Cells) -> Table:
    """Return a table with one row per step, the largest error first; steps without a prediction come last."""
    columns = [
        Column(terms.PARAMETERS),
        *(Column(FIELDS[name]) for name in ("context_length", "batch_size", "vocab_size")),
        *(word(FIELDS[name]) for name in ("precision", "attention")),
        word(terms.KIND),
        Column(terms.PREDICTED, "ms"),
        Column(terms.MEASURED, "ms"),
        Column(terms.ERROR),
        word(Text("furthest off", "差异最大")),
        Column(terms.SHARE),
        Column(Text("of the error", "对误差的贡献")),
    ]
    ordered = sorted(cells, key=lambda cell: -abs(error_of(cell) or 0.0))
    rows = [_row(cell) for cell in sorted(ordered, key=lambda cell: error_of(cell) is None)]
    missing = [UNPREDICTED] if any(cell.ok and error_of(cell) is None for cell in cells) else []
    recorded = NOTES if any(map(responsible, cells)) else NOTES[:1]
    what = Text("steps drawn at random, predicted and measured", "随机抽取的训练步，预测与实测")
    title = title_of(cells[0].experiment, what, cells, SHOWN)
    notes = [*recorded, *missing, *_origin(cells), *remarks_on(cells, ("size", "context_length", "batch_size"))]
    return Table(title, columns, rows, notes)


def _row(cell: CellView) -> list[str | Text]:
    shape = [str(cell.get("context_length")), str(cell.get("batch_size")), number(cell.get("vocab_size"), 0)]
    names = [short_count(_parameters(cell)), *shape, str(cell.get("precision"))]
    how = [implementation_name(cell.get("attention")), _kind(cell)]
    if not cell.ok:
        return [*names, *how, cell.verdict, *[""] * 5]
    step, part = median_of(cell, "step_time"), responsible(cell)
    error = error_of(cell)
    times = [ms(cell.predicted_time) or "N/A", ms(step), "N/A" if error is None else signed(error, 1)]
    if part is None or not step:
        return [*names, *how, *times, "", "", ""]
    shares = [percent(max(0.0, part.measured) / step, 0), signed(part.excess / step, 1)]
    return [*names, *how, *times, PART_NAMES[part.name], *shares]


def _parameters(cell: CellView) -> float:
    return RunConfig.of(cell.config).model.parameters


def _origin(cells: Cells) -> list[Text]:
    """Return the seeds of the draws and the commits that measured them."""
    seeds = sorted({str(cell.get(DRAW_SEED)) for cell in cells})
    commits = sorted({_commit(cell) for cell in cells if cell.environment.git_commit})
    if not commits:
        return [say("drawn with seed {}", "随机种子 {}", listed(seeds))]
    return [
        say(
            "drawn with seed {}; measured at commit {}",
            "随机种子 {}；测量时的提交为 {}",
            *map(listed, (seeds, commits)),
        )
    ]


def _commit(cell: CellView) -> str:
    changed = " (changed)" if cell.environment.git_dirty else ""
    return f"{(cell.environment.git_commit or '')[:12]}{changed}"


# -- chart ------------------------------------------------------------------------------------------------------------


def _charts(cells: Cells) -> list[Chart]:
    """Chart errors by the number of parameters, a mark for each step."""
    cells, series = _newest(cells), []
    for name, title in GROUPS.items():
        own = [(cell, error) for cell in cells if _group(cell) == name and (error := error_of(cell)) is not None]
        points = [Point(_parameters(cell), 100 * error, name=_shape(cell).en) for cell, error in own]
        if points:
            series.append(Series(title, sorted(points, key=lambda point: float(str(point.x))), drawn="marks"))
    if not series:
        return []
    title = Text("Errors of predicted step times", "单步时间预测的误差")
    y = Text("% of the measured step", "相对实测单步的 %")
    limits = [Limit(error, Text(f"{error:+.0f}%"), dashed=True) for error in (-100 * NEAR, 100 * NEAR)]
    note = Text("a mark for each step that was drawn; 0: as measured", "每个随机抽取的步一个点；0：与实测一致")
    x = terms.PARAMETERS
    return [Chart("", title, "lines", x, y, series, log_x=True, limits=limits, digits=1, note=note)]


def _shape(cell: CellView) -> Text:
    """Return the step's parameters and tokens."""
    values = (short_count(_parameters(cell)), str(cell.get("batch_size")), number(cell.get("context_length"), 0))
    return say("{}, {} x {} tokens", "{}，{} x {} 个 token", *values)


# -- findings ---------------------------------------------------------------------------------------------------------


def _accuracy(cells: Cells, *groups: str) -> Text | None:
    said = None
    for name, errors in _errors(_newest(cells)).items():
        if name in groups:
            own = say(
                "random {} ({}): median error {}, 95% within {}",
                "随机抽取的 {}（{} 个）：误差中位数 {}，95% 不超过 {}",
                *(GROUPS[name], str(len(errors))),
                *(percent(median(map(abs, errors))), percent(within(errors, NEARLY_ALL))),
            )
            said = together(said, own)
    return said


def _fast_accuracy(cells: Cells) -> Text | None:
    return _accuracy(cells, "fast")


def _other_accuracy(cells: Cells) -> Text | None:
    return _accuracy(cells, "eager", "launch-bound")


def _largest(cells: Cells) -> Text | None:
    """State the largest error and the part of the step that makes most of it: of fast steps where there are any."""
    cells = _newest(cells)
    errors = _errors(cells)
    group = next(iter(errors))
    own = [cell for cell in cells if _group(cell) == group and error_of(cell) is not None]
    worst = max(own, key=lambda cell: abs(error_of(cell) or 0.0))
    error, part = error_of(worst) or 0.0, responsible(worst)
    size = percent(abs(error))
    texts = ("predicted {} too long", "预测偏长 {}") if error > 0 else ("predicted {} too short", "预测偏短 {}")
    said = say(
        "the largest error of {} is that of {}: {}",
        "{} 中误差最大的是 {}：{}",
        *(GROUPS[group], _shape(worst), say(*texts, size)),
    )
    if part is None:
        return said
    return together(said, say("most of the difference is in {}", "差异主要在于{}", PART_NAMES[part.name]))


def _highlights(cells: Cells) -> list[Highlight]:
    """Return the median error of fast steps, if nearly all are predicted well."""
    cells = _newest(cells)
    errors = _errors(cells).get("fast", [])
    if len(errors) < ENOUGH:
        return []
    usual, most = median(map(abs, errors)), within(errors, NEARLY_ALL)
    if usual > CLOSE or most > NEAR:
        return []
    what = say(
        "median error of the predicted time, {} random steps", "{} 个随机训练步预测时间的误差中位数", str(len(errors))
    )
    sizes = sorted(_parameters(cell) for cell in cells if _group(cell) == "fast" and error_of(cell) is not None)
    detail = say(
        "fast steps of {} to {} parameters: 95% within {}",
        "{} 到 {} 参数的快速步：95% 的误差不超过 {}",
        *(short_count(sizes[0]), short_count(sizes[-1]), percent(most)),
    )
    return [Highlight(31, Text(percent(usual)), what, detail)]


UNSEEN_STEPS = Experiment(
    name="unseen_steps",
    title=Text("Step times of random steps, predicted and measured", "随机训练步的时间：预测与实测"),
    question=Text(
        "How far off is the predicted time of a step that nobody chose?", "对随机抽取的训练步，预测时间的误差有多大？"
    ),
    grid=_grid,
    instrument=Instrument(
        "unseen_steps",
        "cs336_systems.experiments.steps.measure_unseen:measure_unseen_step",
        label=_label,
        memory=_memory,
        needs_fresh_process=_is_fresh,
        takes_peak_tflops=True,
    ),
    tables=_tables,
    charts=_charts,
    findings=(_fast_accuracy, _other_accuracy, _largest),
    highlights=_highlights,
    statistic="median",
    group="trust",
    order=65,
)
