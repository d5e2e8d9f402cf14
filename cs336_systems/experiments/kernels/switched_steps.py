"""Experiment `switched_steps`: one step in two variants, each predicted from the trace of the other as `cs336 inspect
--what_if` does. How close is the prediction to the step after the switch?"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from cs336_systems.config import RunConfig
from cs336_systems.experiments.spec import Config, Experiment, Instrument, Memory, require_gpu, run_config
from cs336_systems.measure.readers.kernel_classes import (
    ATTENTION,
    COPY,
    ELEMENTWISE,
    HOST,
    MATMUL,
    OPTIMIZER,
    OTHER,
    REDUCTION,
    UNKNOWN,
)
from cs336_systems.predict.memory_model import estimate
from cs336_systems.report import terms
from cs336_systems.report.cells import CellView
from cs336_systems.report.names import attention_name
from cs336_systems.report.phrases import having, known, median_of, size_of
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import ms, percent, remarks_on, signed, title_of
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, say

MEMORY_BOUND = "+".join((ELEMENTWISE, REDUCTION, COPY, OTHER, UNKNOWN))
"""Kernels that move data: norms, activations, casts, losses."""
WITH_ATTENTION = f"{ATTENTION},{MEMORY_BOUND}"
"""Kernels that change with the implementation of attention: its own, and copies into other layouts."""
PARTS = {
    "kernels": ("loss,optimizer,graph", MEMORY_BOUND),
    "loss": ("kernels,optimizer,graph", f"{MATMUL}+{MEMORY_BOUND}"),
    "optimizer": ("kernels,loss,graph", f"{OPTIMIZER}+{MEMORY_BOUND}"),
    "graph": ("kernels,loss,optimizer", HOST),
}
"""Part of the fast step -> the others, and the kernels that change with it."""

# -- grid -------------------------------------------------------------------------------------------------------------


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    """Yield cells for attention in eager and fast steps, and for the parts of the fast step one by one."""
    on_cuda = base.device_type == "cuda"
    base = dataclasses.replace(base, precision="bf16" if on_cuda else "fp32", attention="auto")
    if preset == "quick":
        small = run_config(base, "small" if on_cuda else "tiny", 512 if on_cuda else 64)
        yield _switch({**small, "attention": "reference"}, "attention=sdpa", WITH_ATTENTION)
        return
    require_gpu("switched_steps", base, "the fast step is a CUDA graph")
    eager = run_config(base, "medium", 1024, batch_size=8)
    fast = {**eager, "fast": "on"}
    large = run_config(base, "large", 2048, batch_size=4, fast="on")
    for attention in ("reference", "sdpa"):
        yield _switch({**eager, "attention": attention}, "attention=auto", WITH_ATTENTION)
    for run in (fast, large):
        yield _switch({**run, "attention": "sdpa"}, "attention=auto", WITH_ATTENTION)
    for others, kernels in PARTS.values():
        yield _switch({**fast, "fast": others}, "fast=on", kernels)
    small = run_config(base, "small", 512, batch_size=4)
    yield _switch({**small, "fast": PARTS["graph"][0]}, "fast=on", HOST)


def _switch(config: Config, switch: str, kernels: str) -> Config:
    return {**config, "switch": switch, "kernels": kernels}


def _label(config: Mapping[str, Any], experiments: Sequence[str]) -> str:
    run = RunConfig.of(config)
    name, _, value = str(config["switch"]).partition("=")
    how = "" if name == "fast" else " eager" if run.fast == "off" else " fast"
    return f"{run.size} {run.batch_size} x {run.model.context_length}{how}, {name} {getattr(run, name)} -> {value}"


def _memory(config: Mapping[str, Any]) -> Memory:
    run = RunConfig.of(config)
    name, _, value = str(config["switch"]).partition("=")
    return Memory(max(estimate(own).peak for own in (run, dataclasses.replace(run, **{name: value}))))  # type: ignore[arg-type]


# -- switches ---------------------------------------------------------------------------------------------------------


class Switch(NamedTuple):
    """One variant, predicted from a trace of the other."""

    cell: CellView
    before: Text
    after: Text
    recorded: float
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def switches(cells: Cells) -> list[Switch]:
    """Return the switches of all cells, in both directions where both are predicted; the largest error first."""
    found = []
    for cell in having(cells, "step_time", "switched_time"):
        before, after = _names(cell)
        first, second = (median_of(cell, name) or 0.0 for name in ("step_time", "switched_time"))
        if "replayed_time" in cell.metrics:
            found.append(Switch(cell, before, after, first, known(cell, "replayed_time"), second))
        if "replayed_back_time" in cell.metrics:
            found.append(Switch(cell, after, before, second, known(cell, "replayed_back_time"), first))
    return sorted(found, key=lambda switch: -abs(switch.error))


def _names(cell: CellView) -> tuple[Text, Text]:
    """Return the names of both variants: an implementation of attention, or the part of the fast step that differs."""
    field, _, value = str(cell.get("switch")).partition("=")
    if field == "fast":
        part = next((part for part, (others, _) in PARTS.items() if others == cell.get("fast")), str(cell.get("fast")))
        return say("fast without {}", "快速步，不含 {}", part), Text("fast", "快速步")
    how = Text("fast", "快速步") if (cell.get("fast") or "off") != "off" else Text("eager")
    before, after = (say("{} with {}", "{}，{}", how, attention_name(own)) for own in (cell.get(field), value))
    return before, after


def _tables(cells: Cells) -> list[Table]:
    columns = [
        word(terms.SIZE),
        word(Text("traced", "trace 来自")),
        word(Text("predicted step", "预测的步")),
        Column(Text("traced step", "trace 的步"), "ms"),
        Column(terms.PREDICTED, "ms"),
        Column(terms.MEASURED, "ms"),
        Column(terms.ERROR),
    ]
    rows: list[list[str | Text]] = []
    for found in switches(cells):
        cell = found.cell
        shape = f"{cell.get('batch_size')} x {cell.get('context_length')}"
        times = [*map(ms, (found.recorded, found.predicted, found.measured)), signed(found.error, 1)]
        rows.append([say("{}, {}", "{}，{}", size_of(cell), shape), found.before, found.after, *times])
    rows += [[size_of(cell), *_names(cell), cell.verdict, "", "", ""] for cell in cells if not cell.ok]
    shown = ["size", "batch_size", "context_length", "attention", "fast"]
    title = title_of(
        cells[0].experiment,
        Text("steps predicted from another one's trace", "由另一个步的 trace 预测的步"),
        cells,
        shown,
    )
    notes = [
        Text(
            "known beforehand: a trace of one step and its time without the profiler; of the step to predict, the time "
            "and number of the kernels in the groups that change (attention: its kernels, and those that move data; a "
            "part of the fast step: one group). A CUDA graph: nothing but the step without it",
            "预测所用：第一个步的 trace 及其不用 profiler 时的时间；被预测的步中发生变化的各组内核的时间与数量"
            "（注意力：其内核，以及搬运数据的内核；快速步的一部分：一组）。CUDA 图：只用没有图的步",
        ),
        Text(
            "where a kernel runs nearly all the time the prediction is the middle of the times at unchanged clocks and "
            "at equal power",
            "内核几乎一直在运行时，预测取时钟不变与功率不变两个时间的中间值",
        ),
        Text("error: predicted over measured, less one; medians", "误差：预测除以实测减一；取中位数"),
    ]
    return [Table(title, columns, rows, [*notes, *remarks_on(cells, shown)])]


def _accuracy(cells: Cells) -> Text | None:
    found = switches(cells)
    if not found:
        return None
    worst = found[0]
    texts = ("{} too long", "偏长 {}") if worst.error > 0 else ("{} too short", "偏短 {}")
    return say(
        "switches predicted from a trace ({}): median error {}, at most {} ({} to {})",
        "由 trace 预测的切换（{} 次）：误差中位数 {}，最多 {}（{} 到 {}）",
        str(len(found)),
        percent(median(abs(switch.error) for switch in found)),
        *(say(*texts, percent(abs(worst.error))), worst.before, worst.after),
    )


SWITCHED_STEPS = Experiment(
    name="switched_steps",
    title=Text("What-if predictions against switched steps", "假设分析的预测与切换后的实测"),
    question=Text(
        "How close is a step that is predicted from a trace of another variant?",
        "由另一种实现的 trace 预测的步有多准？",
    ),
    grid=_grid,
    instrument=Instrument(
        "switched_steps",
        "cs336_systems.experiments.kernels.measure_switches:measure_switch",
        label=_label,
        memory=_memory,
        needs_fresh_process=lambda config: True,  # after a profiler has run, the host may stay slower
        keeps_files=True,
    ),
    tables=_tables,
    findings=(_accuracy,),
    statistic="median",
    group="trust",
    identity=("switch", "kernels"),
    order=40,
)
