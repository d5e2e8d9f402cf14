"""Does another timer give the same times for the same work?"""

from collections.abc import Iterable

from cs336_systems.config import RunConfig
from cs336_systems.experiments.spec import Config, Experiment, Instrument, require_gpu, run_config
from cs336_systems.report import terms
from cs336_systems.report.phrases import scale_of, size_of, together, value_of
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import key_columns, keys, ms, percent, remarks_on, title_of, varying
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, say


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    require_gpu(TIMING_AGREEMENT.name, base, "do_bench times with CUDA events")
    for size in ("small",) if preset == "quick" else ("small", "large", "2.7B"):
        yield run_config(base, size)


def _tables(cells: Cells) -> list[Table]:
    shown = varying(cells)
    columns = [word(terms.PHASE), Column(Text("wall clock", "墙钟"), "ms")]
    columns += [Column(Text("CUDA events", "CUDA event 计时"), "ms"), Column(Text("do_bench"), "ms")]
    columns += [Column(Text("wall over do_bench", "墙钟相对 do_bench"))]
    rows = []
    for cell in cells:
        for phase in ("forward", "backward", "step"):
            names = (f"{phase}_time", f"{phase}_event_time", f"do_bench_{phase}_time")
            wall, events, other = (cell.value(name) for name in names)
            excess = f"{wall / other - 1:+.2%}" if wall and other else ("" if cell.ok else cell.verdict)
            rows.append([*keys(cell, shown), phase, ms(wall), ms(events), ms(other), excess])
    what = Text("the same work by three clocks (means)", "三种时钟测同样的工作（均值）")
    title = title_of(cells[0].experiment, what, cells, shown)
    return [Table(title, [*key_columns(shown), *columns], rows, remarks_on(cells, shown))]


def _largest_difference(cells: Cells) -> Text | None:
    found = []
    for cell in sorted((cell for cell in cells if cell.ok), key=scale_of):
        for phase in ("forward", "backward", "step"):
            wall, other = (value_of(cell, name) for name in (f"{phase}_time", f"do_bench_{phase}_time"))
            if wall and other:
                name = say("{} {}", "{} {}", size_of(cell), {**terms.PHASE_NAMES, "step": terms.STEP}[phase])
                found.append((abs(wall / other - 1), name, cell))
    if not found:
        return None
    off, name, _ = max(found, key=lambda row: row[0])
    said = say(
        "the clock and do_bench differ by {} at most ({})", "墙钟与 do_bench 最多相差 {}（{}）", percent(off, 2), name
    )
    largest = found[-1][2]
    own = [off for off, _, cell in found if cell is largest]
    if len(own) == len(found):
        return said
    return together(said, say("for {} by {}", "{} 最多 {}", size_of(largest), percent(max(own), 2)))


TIMING_AGREEMENT = Experiment(
    name="timing_agreement",
    title=Text("Agreement of timers", "计时的一致性"),
    question=Text(
        "Does another timer give the same times for the same work?", "换一个计时器，同样的工作是否得到同样的时间？"
    ),
    grid=_grid,
    instrument=Instrument("agreement", "cs336_systems.experiments.steps.measure_agreement:measure_agreement"),
    tables=_tables,
    findings=(_largest_difference,),
    order=70,
)
