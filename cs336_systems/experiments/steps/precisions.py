"""What does lower precision give, in time and memory?"""

from collections.abc import Iterable
from itertools import product

from cs336_systems.config import MODES, PRECISIONS, RunConfig
from cs336_systems.experiments.spec import Config, Experiment, run_config
from cs336_systems.experiments.steps.against_baseline import against, speed_up_chart, speed_ups, with_memory
from cs336_systems.experiments.steps.instruments import STEP
from cs336_systems.experiments.steps.step_time import sizes
from cs336_systems.report.document import Chart
from cs336_systems.report.phrases import pairs_of, together
from cs336_systems.report.presentation import Cells
from cs336_systems.table import Table
from cs336_systems.text import Text, say


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    quick_on_cpu = preset == "quick" and base.device_type == "cpu"
    precisions = PRECISIONS if preset == "full" or quick_on_cpu else ("fp32", "bf16")
    modes = MODES if quick_on_cpu else ("train-step",)
    for size, precision, mode in product(sizes(preset, base), precisions, modes):
        yield run_config(base, size, precision=precision, mode=mode)


def _tables(cells: Cells) -> list[Table]:
    what = Text("time and memory against fp32", "时间与显存，与 fp32 相比")
    return [against(cells, "precision", "fp32", what)]


def _charts(cells: Cells) -> list[Chart]:
    return speed_up_chart(cells, "precision", "fp32", Text("Speed-up over fp32 by size", "各规模相对 fp32 的加速比"))


def _gains(cells: Cells) -> Text | None:
    pairs = pairs_of(cells, "precision", "fp32")
    said = None
    for precision in dict.fromkeys(cell.get("precision") for cell, _ in pairs):
        chosen = [pair for pair in pairs if pair[0].get("precision") == precision]
        own = say("{} speeds up {}", "{} 的加速：{}", precision, speed_ups(chosen))
        said = together(said, with_memory(own, chosen, "fp32"))
    return said


PRECISION = Experiment(
    name="precision",
    title=Text("Precision", "精度"),
    question=Text("What does lower precision give, in time and memory?", "降低精度在时间和显存上带来什么？"),
    grid=_grid,
    instrument=STEP,
    tables=_tables,
    charts=_charts,
    findings=(_gains,),
    order=30,
)
