"""pytorch_attention: what naive attention, which writes its score matrices, costs eagerly and compiled."""

from collections.abc import Iterable
from itertools import product

from cs336_systems.config import RunConfig
from cs336_systems.experiments.attention.attention_charts import by_head_dim, time_by_length
from cs336_systems.experiments.attention.implementations import (
    MODULE,
    Size,
    attention_config,
    by_shape,
    compilation_notes,
    label_shape,
    naive_memory,
)
from cs336_systems.experiments.spec import Config, Experiment, Instrument
from cs336_systems.report import entries
from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Chart
from cs336_systems.report.phrases import having, pairs_of, speed_up, times_text, together, value_of
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import gib, kernel_ms, varying
from cs336_systems.report.terms import BACKWARD, FORWARD, PEAK, PREDICTED
from cs336_systems.table import Table
from cs336_systems.text import Text, say

PASSES = ("forward_time", "backward_time")


def grid(preset: str, base: RunConfig) -> Iterable[Config]:
    """100 passes per cell, unless --num_steps says otherwise."""
    batch, passes = 8, 100 if base.num_steps == RunConfig.num_steps else base.num_steps
    dims: tuple[int, ...] = (16, 32, 64, 128)
    lengths: tuple[int, ...] = (256, 1024, 4096, 8192, 16384)
    if preset == "quick":
        dims, lengths, passes = (16, 64), (1024, 4096), base.num_steps
        if base.device_type == "cpu":
            batch, lengths = 2, (64, 256)
    for dim, length, name in product(dims, lengths, ("reference", "compiled")):
        fields = {"implementation": name, "warmup_steps": base.warmup_steps, "num_steps": passes}
        yield attention_config(base, Size(batch, 1, length, dim), "fp32", is_causal=False, **fields)


def tables(cells: Cells) -> list[Table]:
    cells = sorted(cells, key=by_shape)
    shown = varying(cells, always=("head_dim", "seq_len", "implementation"))
    eager = entries.baselines(cells, lambda cell: cell.get("implementation") == "reference", "implementation")
    columns = [
        entries.mean_and_std(FORWARD, "forward_time", kernel_ms),
        entries.mean_and_std(BACKWARD, "backward_time", kernel_ms),
        entries.gib(Text("before backward", "后向之前"), "memory_before_backward"),
        entries.gib(PEAK, "peak_memory"),
        entries.gib(PREDICTED, "predicted_memory"),
        entries.speed_up(Text("forward speed-up", "前向加速"), "forward_time", eager),
        entries.speed_up(Text("backward speed-up", "后向加速"), "backward_time", eager),
    ]
    notes = [
        Text("speed-up: over reference, the same formula run eagerly", "加速：相对 reference，即 eager 下的同一公式"),
        *compilation_notes(cells),
    ]
    what = Text("naive attention (mean ± std)", "朴素注意力（均值 ± 标准差）")
    return [entries.cell_table(what, cells, columns, shown=shown, notes=notes)]


def charts(cells: Cells) -> list[Chart]:
    what = Text("Naive attention, backward", "朴素注意力，后向")
    return [time_by_length(what, group, "backward_time") for group in by_head_dim(cells)]


# -- findings ---------------------------------------------------------------------------------------------------------


def longest(cells: Cells) -> list[CellView]:
    """Cells with the most tokens and, among these, the widest heads."""
    shape = max((cell.get("seq_len"), cell.get("head_dim")) for cell in cells)
    return [cell for cell in cells if (cell.get("seq_len"), cell.get("head_dim")) == shape]


def eager_cost(cells: Cells) -> Text | None:
    by_name = {cell.get("implementation"): cell for cell in longest(having(cells, *PASSES))}
    cell = by_name.get("reference") or next(iter(by_name.values()))
    said = say(
        "at {} tokens, d {}, forward takes {} ms and backward {}",
        "{} 个 token、d {} 时前向 {} ms，后向 {}",
        *(str(cell.get("seq_len")), str(cell.get("head_dim"))),
        *(kernel_ms(value_of(cell, phase)) for phase in PASSES),
    )
    kept = value_of(cell, "memory_before_backward")
    return together(said, say("{} GiB are held before backward", "后向之前占用 {} GiB", gib(kept))) if kept else said


def compiled_gain(cells: Cells) -> Text | None:
    pairs = pairs_of(cells, "implementation", "reference", "backward_time")
    if not pairs:
        return None
    long = longest([cell for cell, _ in pairs])
    cell, base = pair = next(pair for pair in pairs if pair[0] in long)
    said = say(
        "{}, forward is {}x and backward {}x as fast",
        "{} 的前向速度为 {} 倍，后向 {} 倍",
        *(str(cell.get("implementation")), *(times_text(speed_up(pair, phase)) for phase in PASSES)),
    )
    peaks = [value_of(found, "peak_memory") for found in (cell, base)]
    if not all(peaks):
        return said
    return together(said, say("its peak is {} GiB against {}", "峰值 {} GiB，原为 {}", *map(gib, peaks)))


def out_of_memory(cells: Cells) -> Text | None:
    failed = [cell for cell in cells if cell.is_oom]
    if not failed:
        return None
    shortest = min(cell.get("seq_len") or 0 for cell in failed)
    return say(
        "{} of {} do not fit in memory, the shortest of {} tokens",
        "{} 个（共 {} 个）显存不足，最短的为 {} 个 token",
        *(str(len(failed)), str(len(cells)), str(shortest)),
    )


PYTORCH_ATTENTION = Experiment(
    name="pytorch_attention",
    title=Text("Naive attention", "朴素注意力"),
    question=Text("What does naive attention cost, eager and compiled?", "朴素注意力在 eager 与编译下各要多少代价？"),
    instrument=Instrument(
        "pytorch_attention", f"{MODULE}:measure_pytorch_attention", label=label_shape, memory=naive_memory
    ),
    grid=grid,
    tables=tables,
    charts=charts,
    findings=(eager_cost, compiled_gain, out_of_memory),
    order=10,
)
