"""flash_leaderboard: attention timed the way the course's leaderboard timed it."""

from collections.abc import Callable, Iterable

from cs336_systems.config import RunConfig
from cs336_systems.experiments.attention.implementations import (
    MODULE,
    Size,
    attention_config,
    contestants,
    exponential,
    fastest,
    label_shape,
    worst_error,
)
from cs336_systems.experiments.spec import Config, Experiment, Instrument, require_gpu
from cs336_systems.record import Statistics
from cs336_systems.report import entries
from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Chart
from cs336_systems.report.phrases import having, times_text, value_of
from cs336_systems.report.points import measured, series_of
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import FIELDS, kernel_ms, tflops, varying
from cs336_systems.report.terms import ERROR, MEAN, MS, TFLOPS
from cs336_systems.table import Table
from cs336_systems.text import Text, listed, say

TIME = "leaderboard_time"


def grid(preset: str, base: RunConfig) -> Iterable[Config]:
    require_gpu("flash_leaderboard", base, "the course timed it on one")
    warmup_ms, rep_ms = (200, 1000) if preset == "quick" else (1000, 10_000)
    for name in contestants():
        size = Size(1, 16, 16384, 64)
        yield attention_config(base, size, "bf16", implementation=name, warmup_ms=warmup_ms, rep_ms=rep_ms)


def tables(cells: Cells) -> list[Table]:
    shown = varying(cells, always=("implementation",))

    def rate_of(cell: CellView) -> str:
        seconds, flops = cell.value(TIME), cell.value("flops")
        return tflops(flops / seconds if flops and seconds else None)

    def of_time(show: Callable[[Statistics], float]) -> Callable[[CellView], str]:
        return lambda cell: kernel_ms(show(found)) if (found := cell.statistics(TIME)) else ""

    columns = [
        entries.of(MEAN, of_time(lambda found: found.mean), "ms"),
        entries.of(Text("std of tenths", "十等份的标准差"), of_time(lambda found: found.std), "ms"),
        entries.of(TFLOPS, rate_of),
        entries.of(ERROR, lambda cell: exponential(worst_error(cell))),
    ]
    notes = [
        Text(
            "forward, sum and backward as the course timed them; mean of do_bench",
            "按课程的方式对前向、求和与后向计时；do_bench 的均值",
        ),
        Text(
            "recorded are the means of ten equal parts of the run; std is the standard deviation of these",
            "保留的是整个运行十等份各自的均值：标准差由它们算出",
        ),
    ]
    return [
        entries.cell_table(Text("the course's leaderboard", "课程排行榜"), cells, columns, shown=shown, notes=notes)
    ]


def charts(cells: Cells) -> list[Chart]:
    times = series_of(Text("time", "耗时"), (measured(cell, TIME, str(cell.get("implementation"))) for cell in cells))
    title = Text("The course's leaderboard test", "课程排行榜测试")
    return [Chart("", title, "bars", FIELDS["implementation"], MS, [times], horizontal=True)]


def speed(cells: Cells) -> Text | None:
    times = {str(cell.get("implementation")): value_of(cell, TIME) or 0.0 for cell in having(cells, TIME)}
    name = fastest(times, ours=True)
    if name is None:
        return None
    ours = times.pop(name)
    said = say("{} takes {} ms", "{} 为 {} ms", name, kernel_ms(ours))
    each = [
        say("{0}x that of {1} ({2} ms)", "{1}（{2} ms）的 {0} 倍", times_text(seconds / ours), name, kernel_ms(seconds))
        for name, seconds in times.items()
    ]
    return say("{}; its speed is {}", "{}；速度是 {}", said, listed(each)) if each else said


FLASH_LEADERBOARD = Experiment(
    name="flash_leaderboard",
    title=Text("The course's leaderboard", "课程排行榜"),
    question=Text(
        "How fast is attention as the course's leaderboard timed it?", "按课程排行榜的计时方式，注意力有多快？"
    ),
    instrument=Instrument("flash_leaderboard", f"{MODULE}:measure_leaderboard", label=label_shape),
    grid=grid,
    tables=tables,
    charts=charts,
    findings=(speed,),
    order=40,
)
