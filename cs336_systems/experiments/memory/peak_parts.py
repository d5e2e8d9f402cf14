"""What is memory made of at its peak, and which line allocated it?"""

from collections.abc import Iterable
from itertools import product

from cs336_systems.config import COURSE_SIZES, RunConfig
from cs336_systems.experiments.memory.memory_parts import part_name
from cs336_systems.experiments.spec import Config, Experiment, Instrument, label_step, run_config, step_memory
from cs336_systems.measure.readers.recorded_tables import BlockRow, LabelRow, rows_of
from cs336_systems.record import GIB, MIB
from cs336_systems.report import terms
from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Chart, Point, Series
from cs336_systems.report.phrases import having, naming, value_of, worst_prediction
from cs336_systems.report.points import FEW, joined, measured
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import (
    gib,
    key_columns,
    keys,
    ms,
    number,
    percent,
    remarks_on,
    row_name,
    shortened,
    title_of,
    varying,
)
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, listed, say

SMALL_PART = 0.01
"""Share of the largest bar below which parts are drawn together as one."""

# -- grid -------------------------------------------------------------------------------------------------------------


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    modes = ("inference", "forward", "train-step")
    if preset == "quick":
        for mode in modes:
            yield run_config(base, "small" if base.device_type == "cuda" else "tiny", mode=mode)
        return
    for context, mode, precision in product((128, 256, 512), modes, ("fp32", "bf16")):
        yield run_config(base, "2.7B", context, mode=mode, precision=precision)
    for precision in ("fp32", "bf16"):  # without score matrices
        yield run_config(base, "2.7B", 512, precision=precision, attention="auto")
    if preset == "full":
        for size, mode in product(COURSE_SIZES, modes):
            yield run_config(base, size, mode=mode)


MEMORY_PROFILE = Instrument(
    name="memory",
    measure="cs336_systems.experiments.memory.measure_memory:measure_memory",
    label=label_step,
    memory=step_memory,
    keeps_files=True,
)


def _not_profiled(run: RunConfig) -> str | None:
    if run.compile:
        return "memory is traced operator by operator, which a compiled model does not have: leave out --compile"
    return None


# -- recorded tables --------------------------------------------------------------------------------------------------


def _labels(cell: CellView) -> list[LabelRow]:
    return rows_of(cell.samples("part_memory"), LabelRow)


def _blocks(cell: CellView) -> list[BlockRow]:
    return rows_of(cell.samples("largest_blocks"), BlockRow)


# -- tables -----------------------------------------------------------------------------------------------------------


def _tables(cells: Cells) -> list[Table]:
    ok = [cell for cell in cells if cell.ok]
    return [_peaks(cells), *([_parts(ok), _largest(ok), _overheads(ok)] if ok else [])]


def _peaks(cells: Cells) -> Table:
    shown = varying(cells)
    columns = [Column(terms.MEASURED, "GiB"), Column(terms.PREDICTED, "GiB"), Column(terms.ERROR)]
    columns += [Column(terms.TRACED, "GiB"), word(terms.PEAK_IN)]
    columns += [Column(Text("parts / measured", "各部分 / 实测")), Column(part_name("unlabelled"))]
    rows = []
    for cell in cells:
        if not cell.ok:
            rows.append([*keys(cell, shown), cell.verdict, *[""] * 6])
            continue
        peak = cell.value("peak_memory") or 1.0
        together = sum(size for _, size in _labels(cell)) / peak
        rows.append(
            [
                *keys(cell, shown),
                gib(cell.value("peak_memory")),
                gib(cell.value("predicted_memory")),
                "" if cell.memory_error is None else f"{cell.memory_error:+.2%}",
                gib(cell.value("predicted_by_tracing_memory")),
                str(cell.metrics["peak_phase"].samples[0]),
                percent(together, 2),
                percent((cell.value("unlabelled_memory") or 0.0) / peak, 2),
            ]
        )
    note = Text(
        "measured: without instruments; predicted: from the configuration; traced: from its operators, no GPU",
        "实测：不带仪器；预测：仅由配置；追踪：由其算子，无需 GPU",
    )
    title = title_of(cells[0].experiment, Text("the peak", "峰值"), cells, shown)
    notes = [note, *remarks_on(cells, shown, on_spread=False)]
    return Table(title, [*key_columns(shown), *columns], rows, notes)


def _parts(cells: Cells) -> Table:
    shown = varying(cells)
    labels = list(dict.fromkeys(label for cell in cells for label, _ in _labels(cell)))
    rows = []
    for cell in cells:
        parts = dict(_labels(cell))
        rows.append([*keys(cell, shown), *(gib(parts.get(label)) for label in labels)])
    title = title_of(cells[0].experiment, Text("what the peak is made of", "峰值由什么组成"), cells, shown)
    return Table(title, [*key_columns(shown), *(Column(part_name(label), "GiB") for label in labels)], rows)


def _largest(cells: Cells) -> Table:
    """The largest blocks that a step allocated; the two largest of each cell where there are several."""
    shown = varying(cells)
    words = (Text("label", "标签"), terms.MODULE, Text("made by", "产生者"), terms.LINE)
    columns = [Column(terms.BYTES, "MiB"), *map(word, words)]
    rows = []
    for cell in cells:
        for size, label, module, what, line in _blocks(cell)[: 10 if len(cells) == 1 else 2]:
            rows.append([*keys(cell, shown), number(size / MIB, 1), label, module, shortened(what), line])
    title = title_of(cells[0].experiment, Text("the largest blocks", "最大的块"), cells, shown)
    return Table(title, [*key_columns(shown), *columns], rows)


def _overheads(cells: Cells) -> Table:
    shown = varying(cells)
    columns = [Column(terms.STEP, "ms"), Column(Text("with the allocator's history", "记录分配器历史"))]
    columns += [Column(Text("traced block by block", "逐块跟踪"))]
    rows = []
    for cell in cells:
        step = cell.value("step_time")
        slower = [cell.value(name) for name in ("history_step_time", "traced_step_time")]
        ratios = ["" if seconds is None or not step else f"{seconds / step:.1f}x" for seconds in slower]
        rows.append([*keys(cell, shown), ms(step), *ratios])
    what = Text("how much slower a step is under each instrument", "每种仪器使一步变慢多少")
    return Table(title_of(cells[0].experiment, what, cells, shown), [*key_columns(shown), *columns], rows)


# -- charts -----------------------------------------------------------------------------------------------------------


def _charts(cells: Cells) -> list[Chart]:
    chosen = [cell for cell in cells if cell.ok]
    if not chosen or len(chosen) > FEW:
        return []
    shown = varying(chosen)
    names = [row_name(cell, shown).en for cell in chosen]
    parts = [dict(_labels(cell)) for cell in chosen]
    labels = list(dict.fromkeys(label for found in parts for label in found))
    sizes = {label: [found.get(label, 0) / GIB for found in parts] for label in labels}
    largest = max(map(sum, zip(*sizes.values(), strict=True)), default=0)
    small = [sizes.pop(label) for label in labels if max(sizes[label]) < SMALL_PART * largest]
    series = [Series(part_name(str(label)), list(map(Point, names, found))) for label, found in sizes.items()]
    if small:
        series.append(Series(Text("other", "其余"), list(map(Point, names, map(sum, zip(*small, strict=True))))))
    if series:
        pairs = zip(chosen, names, strict=True)
        predicted = joined(measured(cell, "predicted_memory", name, GIB) for cell, name in pairs)
        series.append(Series(Text("predicted peak", "预测的峰值"), predicted, drawn="marks"))
    title = Text("What the peak is made of", "峰值由什么组成")
    return [Chart("", title, "stacked", terms.SIZE, terms.GIB_TEXT, series, horizontal=True)]


# -- findings ---------------------------------------------------------------------------------------------------------


def _composition(cells: Cells) -> Text | None:
    fine = having(cells, "peak_memory")
    highest = max(fine, key=lambda cell: value_of(cell, "peak_memory") or 0.0)
    peak = value_of(highest, "peak_memory") or 1.0
    parts = sorted(_labels(highest), key=lambda part: -part.size)[:3]
    if not parts:
        return None
    shares = listed(say("{} {}", "{} {}", percent(size / peak, 0), part_name(str(label))) for label, size in parts)
    return say(
        "at the highest peak, {} GiB ({}), are {}",
        "最高的峰值 {} GiB（{}）中：{}",
        *(gib(peak), naming(fine)(highest), shares),
    )


def _largest_block(cells: Cells) -> Text | None:
    fine = [cell for cell in cells if cell.ok]
    blocks = [(row, cell) for cell in fine for row in _blocks(cell)[:1]]
    if not blocks:
        return None
    (size, label, _, what, line), cell = max(blocks, key=lambda pair: pair[0].size)
    made = say(", made at {}", "，由 {} 产生", str(line)) if line else Text("")
    return say(
        "the largest block of a step is {} MiB of {}: {}{} ({})",
        "一步中最大的块为 {} MiB 的{}：{}{}（{}）",
        *(number(size / MIB, 1), part_name(str(label)), str(what), made, naming(fine)(cell)),
    )


MEMORY = Experiment(
    name="memory",
    title=Text("What the peak is made of", "峰值由什么组成"),
    question=Text(
        "What is memory made of at its peak, and which line made it?", "峰值处的显存由什么组成，是哪一行代码产生的？"
    ),
    grid=_grid,
    instrument=MEMORY_PROFILE,
    profile=_not_profiled,
    tables=_tables,
    charts=_charts,
    findings=(worst_prediction, _composition, _largest_block),
    order=10,
)
