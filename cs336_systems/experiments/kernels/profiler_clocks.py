"""Do the profiler, CUDA events and the wall clock agree, and what is the gap?"""

from collections.abc import Iterable, Sequence
from itertools import product

from cs336_systems.config import RunConfig
from cs336_systems.experiments.kernels.kernel_time import (
    IDLE_SHARE,
    KERNEL_PROFILE,
    PROFILED_2026,
    largest_that_fit,
    phases_of,
)
from cs336_systems.experiments.spec import HANDOUT_2026, Config, Experiment, require_gpu, run_config
from cs336_systems.predict.fit import CONTEXTS_2026
from cs336_systems.report import terms
from cs336_systems.report.cells import PHASES, CellView
from cs336_systems.report.document import Chart, Point, Series
from cs336_systems.report.phrases import (
    compared,
    error_text,
    having,
    known,
    naming,
    ranging,
    scale_of,
    together,
    value_of,
)
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import ms, percent, remarks_on, rows_table
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, say

CLOCKS = ("{}_time", "{}_event_time", "queued_{}_event_time", "busy_time: {}", "nsys_busy_time: {}")
NOTES = [
    Text(
        "queued: nothing is synchronised between phases, and the host launches ahead, as in training",
        "排队：阶段之间不同步，主机提前启动，与训练时一样",
    ),
    Text(
        "torch.profiler, nsys: time in which at least one kernel ran, in profiled steps; empty: nsys is not installed",
        "torch.profiler、nsys：分析的步中至少有一个内核在运行的时间；空：未安装 nsys",
    ),
    Text(
        "launch-bound: events less kernels: the GPU waits for the host to launch the next one",
        "等待启动：CUDA event 减去内核：GPU 在等主机启动下一个",
    ),
    Text("step, profiled: how much longer a step takes while it is profiled", "单步，分析时：被分析时一步变慢多少"),
]


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    require_gpu(PROFILER_AGREEMENT.name, base, "its clocks are the GPU's")
    contexts: tuple[int | None, ...] = CONTEXTS_2026 if preset == HANDOUT_2026 else (None,)
    for size, context in product(_sizes(preset), contexts):
        yield {**run_config(base, size, context), "profiler": "both"}


def _sizes(preset: str) -> tuple[str, ...]:
    if preset == HANDOUT_2026:
        return PROFILED_2026
    return ("small",) if preset == "quick" else ("small", "large", "2.7B")


def _tables(cells: Cells) -> list[Table]:
    columns = [word(terms.PHASE), Column(Text("wall clock", "墙钟"), "ms")]
    columns += [Column(Text("CUDA events", "CUDA event 计时"), "ms")]
    columns += [Column(Text("events, queued", "CUDA event（排队）"), "ms")]
    columns += [Column(Text("torch.profiler"), "ms"), Column(Text("nsys"), "ms")]
    columns += [Column(Text("kernels over queued events", "内核相对排队的 event"))]
    columns += [Column(Text("launch-bound", "等待启动"), "ms"), Column(Text("step, profiled", "单步，分析时"))]

    def rows(cell: CellView) -> Iterable[list[str | Text]]:
        if not cell.ok:
            return
        slower = (cell.value("profiled_step_time") or 0.0) / (cell.value("step_time") or 1.0)
        times = {phase: [cell.value(name.format(phase)) for name in CLOCKS] for phase in phases_of(cell)}
        whole = [None if None in clock else sum(filter(None, clock)) for clock in zip(*times.values(), strict=True)]
        for phase, (wall, events, queued, busy, nsys) in {**times, "all": whole}.items():
            reference = queued or events  # older records have no queued ones
            excess = f"{busy / reference - 1:+.2%}" if busy and reference else ""
            gap = ms(events - busy) if busy and events else ""
            named = Text("all", "全部") if phase == "all" else terms.phase_name(phase)
            yield [named, *map(ms, (wall, events, queued, busy, nsys)), excess, gap, f"{slower:.2f}x"]

    what = Text("the same phases by four clocks", "四种时钟测同样的阶段")
    return [rows_table(what, cells, columns, rows, notes=[*NOTES, *remarks_on(cells)])]


def _charts(cells: Cells) -> list[Chart]:
    """Chart the share of a step in which no kernel runs, with and without a wait after every phase."""
    clocks = {
        Text("wait after every phase", "每个阶段之后等待"): "{}_event_time",
        Text("as in training", "与训练时一样"): "queued_{}_event_time",
    }
    series = []
    for name, events in clocks.items():
        found = _kernels_over_events(cells, events, PHASES)
        series.append(Series(name, [Point(size, 100 * max(0.0, 1 - share)) for share, size in found]))
    title = Text("GPU idle during a training step", "训练步中 GPU 的空闲")
    note = Text("CUDA events less kernels; means", "CUDA event 减去内核时间；均值")
    return [Chart("", title, "bars", terms.SIZE, IDLE_SHARE, series, horizontal=True, digits=1, note=note)]


def _busy_share(cells: Cells) -> Text | None:
    """State the share of forward and backward in which a kernel runs."""
    found = _kernels_over_events(cells, "{}_event_time", ("forward", "backward"))
    said = ranging(
        "by CUDA events, kernels run for {} of forward and backward",
        "以 CUDA event 计，内核运行时间占前向与反向的 {}",
        *(found, percent),
    )
    return together(said, Text("the rest of the time the GPU waits for the host", "其余时间 GPU 在等待主机"))


def _queued(cells: Cells) -> Text | None:
    """State how far kernels and events differ in steps that are not synchronised between phases."""
    found = _kernels_over_events(cells, "queued_{}_event_time", PHASES)
    return ranging(
        "without synchronisation between phases, kernels and CUDA events differ by {}",
        "阶段之间不同步时，内核与 CUDA event 相差 {}",
        [(abs(share - 1), name) for share, name in found],
        lambda share: percent(share, 2),
    )


def _kernels_over_events(cells: Cells, events: str, phases: Sequence[str]) -> list[tuple[float, Text]]:
    """Return kernel time over event time of each cell, over the phases that have both."""
    found = []
    fine = sorted((cell for cell in cells if cell.ok), key=scale_of)
    name = naming(fine)
    for cell in fine:
        pairs = [(value_of(cell, f"busy_time: {phase}"), value_of(cell, events.format(phase))) for phase in phases]
        both = [(kernels, seconds) for kernels, seconds in pairs if kernels and seconds]
        if both:
            found.append((sum(row[0] for row in both) / sum(row[1] for row in both), name(cell)))
    return found


def _profiled(cells: Cells) -> Text | None:
    fine = having(cells, "profiled_step_time", "step_time")
    name = naming(fine)
    found = [(known(cell, "step_time") / known(cell, "profiled_step_time"), name(cell)) for cell in fine]
    return compared(Text("a profiled step", "带分析器时单步"), Text("one without the profiler", "不带分析器时"), found)


def _nsys(cells: Cells) -> Text | None:
    found = []
    fine = [cell for cell in cells if cell.ok]
    name = naming(fine)
    for cell in fine:
        for phase in phases_of(cell):
            theirs, ours = value_of(cell, f"nsys_busy_time: {phase}"), value_of(cell, f"busy_time: {phase}")
            if theirs and ours:
                found.append(
                    (
                        abs(ours / theirs - 1),
                        say("{}, {}", "{}，{}", name(cell), terms.PHASE_NAMES.get(phase, Text(phase))),
                    )
                )
    off, where = max(found, key=lambda pair: pair[0])
    return say(
        "torch.profiler and nsys differ by {} at most ({})",
        "torch.profiler 与 nsys 最多相差 {}（{}）",
        *(error_text(off), where),
    )


PROFILER_AGREEMENT = Experiment(
    name="profiler_agreement",
    title=Text("Agreement of profilers", "性能分析器的一致性"),
    question=Text(
        "Do the profiler, CUDA events and the clock agree, and what is the gap?",
        "性能分析器、CUDA event 与墙钟是否一致，差异来自哪里？",
    ),
    grid=_grid,
    fitting=largest_that_fit,
    instrument=KERNEL_PROFILE,
    tables=_tables,
    charts=_charts,
    findings=(_busy_share, _queued, _profiled, _nsys),
    group="trust",
    problems_2026=("nsys_profile",),
    order=30,
)
