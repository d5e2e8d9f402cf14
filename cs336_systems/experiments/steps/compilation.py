"""What does torch.compile give, and cost?"""

from collections.abc import Iterable
from itertools import product

from cs336_systems.config import RunConfig
from cs336_systems.experiments.spec import Config, Experiment, run_config
from cs336_systems.experiments.steps.against_baseline import against, speed_up_chart, speed_ups, with_memory
from cs336_systems.experiments.steps.instruments import STEP
from cs336_systems.experiments.steps.step_time import sizes
from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Chart
from cs336_systems.report.phrases import pairs_of, size_of, together, value_of
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import number
from cs336_systems.table import Column, Table
from cs336_systems.text import Text, say


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    for size, compiled in product(sizes(preset, base), (False, True)):
        yield run_config(base, size, compile=compiled)


def _tables(cells: Cells) -> list[Table]:
    def compile_seconds(cell: CellView) -> str:
        seconds = cell.value("compile_time")
        return "" if seconds is None else f"{seconds:.1f}"

    def graph_breaks(cell: CellView) -> str:
        breaks = cell.value("graph_breaks")
        return "" if breaks is None else f"{breaks:.0f}"

    extra = (
        (Column(Text("compile time", "编译时间"), "s"), compile_seconds),
        (Column(Text("graph breaks", "图中断")), graph_breaks),
    )
    what = Text("eager against torch.compile", "eager 与 torch.compile 对比")
    return [against(cells, "compile", False, what, extra)]


def _charts(cells: Cells) -> list[Chart]:
    return speed_up_chart(cells, "compile", False, Text("Speed-up by torch.compile", "torch.compile 的加速比"))


def _gains(cells: Cells) -> Text | None:
    pairs = pairs_of(cells, "compile", False)
    if not pairs:
        return None
    said = say("torch.compile speeds up {}", "torch.compile 的加速：{}", speed_ups(pairs))
    return with_memory(said, pairs, "eager")


def _cost(cells: Cells) -> Text | None:
    pairs = [pair for pair in pairs_of(cells, "compile", False) if value_of(pair[0], "compile_time")]
    if not pairs:
        return None
    worst, _ = max(pairs, key=lambda pair: value_of(pair[0], "compile_time") or 0.0)
    seconds = number(value_of(worst, "compile_time"), 1)
    said = say("compiling takes up to {} s ({})", "编译最多用 {} s（{}）", seconds, size_of(worst))
    cell, base = pairs[-1]
    saved = (value_of(base, "step_time") or 0.0) - (value_of(cell, "step_time") or 0.0)
    if saved <= 0:
        return said
    steps = number((value_of(cell, "compile_time") or 0.0) / saved, 0)
    return together(said, say("for {} {} steps earn it back", "{} 需 {} 步才能收回", size_of(cell), steps))


COMPILE = Experiment(
    name="compile",
    title=Text("torch.compile"),
    question=Text("What does torch.compile give, and cost?", "torch.compile 带来什么，代价是什么？"),
    grid=_grid,
    instrument=STEP,
    tables=_tables,
    charts=_charts,
    findings=(_gains, _cost),
    order=40,
)
