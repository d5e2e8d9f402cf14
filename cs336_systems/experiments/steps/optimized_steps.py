"""Experiment `optimized_steps`: all ways to run one step, predicted and measured. How much slower than the fastest is
the one that `cs336 optimize` chooses, and how many seconds of a GPU does the choice save?"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from cs336_systems.config import OPTIMIZER_STATES, RunConfig, model_config
from cs336_systems.experiments.spec import Config, Experiment, Instrument, Memory, require_gpu
from cs336_systems.predict.memory_model import estimate
from cs336_systems.predict.optimize import WITHOUT_GRAPH
from cs336_systems.record import CELL_TIME, GIB
from cs336_systems.report import entries, terms
from cs336_systems.report.cells import CellView, grouped
from cs336_systems.report.phrases import having, known, together, value_of
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import number, percent, remarks_on, signed, title_of
from cs336_systems.table import Table, word
from cs336_systems.text import Text, say

SIZE, CONTEXT, SEQUENCES = "small", 1024, 64
"""The step that is measured in all ways."""
GROUPS = (0, 1, 4)
BUDGET = "8GiB"
"""Memory budget of plans, for micro batches that do not fit without a plan."""
MEASURED = 3
"""Number of candidates, those with the shortest predicted time, that `cs336 optimize` measures."""
LIMITS = (None, 8 * GIB, 4 * GIB, 2 * GIB)
"""Memory limits under which the choice is compared with the fastest; None: no limit."""

# -- grid -------------------------------------------------------------------------------------------------------------


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    """Yield all micro batches of one step, with and without recomputation, both optimizer states and CUDA graphs."""
    base = dataclasses.replace(base, attention="auto", precision="bf16" if base.device_type == "cuda" else "fp32")
    if preset == "quick":
        run = dataclasses.replace(base, model=model_config("tiny"), size="tiny", fast="on", num_steps=2)
        for size, group in product((1, 2), (0, 1)):
            yield cell_config(dataclasses.replace(run, batch_size=size, checkpoint_blocks=group), 2 // size)
        return
    require_gpu("optimized_steps", base, "its cells are fast steps of 65,536 tokens")
    model = model_config(SIZE, context_length=CONTEXT)
    run = dataclasses.replace(base, model=model, size=SIZE, num_steps=3)
    sizes = [2**power for power in range(SEQUENCES.bit_length())]
    for size, state, fast in product(sizes, OPTIMIZER_STATES, ("on", WITHOUT_GRAPH)):
        sized = dataclasses.replace(run, batch_size=size, optimizer_state=state, fast=fast)
        for group in GROUPS:
            yield cell_config(dataclasses.replace(sized, checkpoint_blocks=group), SEQUENCES // size)
        if fast == "on" and estimate(sized).peak > float(BUDGET.removesuffix("GiB")) * GIB:
            yield cell_config(dataclasses.replace(sized, memory_budget=BUDGET), SEQUENCES // size)


def cell_config(run: RunConfig, micro_batches: int) -> Config:
    """Return the configuration of a cell: a micro batch, and the number of micro batches."""
    return {**dataclasses.replace(run, warmup_steps=2).to_dict(), "micro_batches": micro_batches}


def _label(config: Mapping[str, Any], experiments: Sequence[str]) -> str:
    run = RunConfig.of(config)
    words = [f"{config['micro_batches']} x {run.batch_size}", f"{run.optimizer_state} state"]
    words += [f"recomputes {run.checkpoint_blocks}"] if run.checkpoint_blocks else []
    words += [f"budget {run.memory_budget}"] if run.memory_budget else []
    words += [] if "graph" in run.fast_parts else ["no graph"]
    return " ".join([run.size, *words])


# -- tables -----------------------------------------------------------------------------------------------------------


def activations_text(group: int, budget: str) -> Text:
    """Say what a step does with activations."""
    if budget:
        return say("plan for {}", "{} 显存预算", budget)
    if group:
        return say("recomputed, groups of {}", "重计算，每组 {} 块", str(group))
    return Text("kept", "全部保留")


def _graph(cell: CellView) -> Text:
    return Text("yes", "是") if "graph" in RunConfig.of(cell.config).fast_parts else Text("no", "否")


def _error(cell: CellView) -> float | None:
    predicted, measured = value_of(cell, "predicted_time"), value_of(cell, "step_time")
    return predicted / measured - 1 if predicted and measured else None


def _tables(cells: Cells) -> list[Table]:
    columns = [
        entries.ms(terms.PREDICTED, "predicted_time"),
        entries.ms(terms.MEASURED, "step_time"),
        entries.of(terms.ERROR, lambda cell: signed(_error(cell), 1)),
        entries.gib(terms.PEAK, "peak_memory"),
        entries.gib(Text("predicted peak", "预测峰值"), "predicted_memory"),
        entries.of(terms.MFU, lambda cell: percent(cell.mfu)),
    ]
    rows: list[list[str | Text]] = []
    for cell in sorted(cells, key=lambda cell: value_of(cell, "step_time") or float("inf")):
        batch = f"{cell.get('micro_batches')} x {cell.get('batch_size')}"
        kept = activations_text(cell.get("checkpoint_blocks"), cell.get("memory_budget"))
        names: list[str | Text] = [batch, kept, str(cell.get("optimizer_state")), _graph(cell)]
        found = [entry.text(cell) for entry in columns] if cell.ok else [cell.verdict, *[""] * (len(columns) - 1)]
        rows.append([*names, *found])
    shown = ["batch_size", "checkpoint_blocks", "memory_budget", "optimizer_state", "fast"]
    keys = [
        word(Text("micro batches", "micro batch 数")),
        word(terms.ACTIVATIONS),
        word(terms.OPTIMIZER_STATE),
        word(Text("CUDA graph", "CUDA 图")),
    ]
    title = title_of(cells[0].experiment, Text("ways to run one step", "同一步的各种运行方式"), cells, shown)
    note = Text(
        "micro batches: their number x sequences; the fastest step first",
        "micro batch 数：个数 x 序列数；最快者在前",
    )
    return [Table(title, [*keys, *(entry.column for entry in columns)], rows, [note, *remarks_on(cells, shown)])]


# -- findings ---------------------------------------------------------------------------------------------------------


def _compared(cells: Cells) -> list[CellView]:
    """Return the cells of the step that was measured in the most ways, if they have a prediction and a measurement."""
    done = having(cells, "predicted_time", "step_time", "predicted_memory")
    by_work = grouped(done, lambda cell: (cell.get("size"), cell.get("context_length"), value_of(cell, "tokens")))
    return max(by_work.values(), key=len, default=[])


def chosen_of(cells: Sequence[CellView], limit: float | None) -> tuple[list[CellView], CellView] | None:
    """Return the cells that `cs336 optimize` would measure (the least predicted times among those whose predicted peak
    is within the limit), and the fastest of all cells within it; None if there are no further cells to choose from.

    Of a step with and without a CUDA graph it measures the faster one, and of groups of recomputed blocks one.
    """
    fitting = [cell for cell in cells if limit is None or known(cell, "predicted_memory") <= limit]
    kinds: dict[tuple, CellView] = {}
    for cell in sorted(fitting, key=lambda cell: (known(cell, "predicted_time"), cell.get("fast") != "on")):
        activations = cell.get("memory_budget") or bool(cell.get("checkpoint_blocks"))
        kinds.setdefault((cell.get("batch_size"), activations, cell.get("optimizer_state")), cell)
    if len(kinds) <= MEASURED:
        return None
    return list(kinds.values())[:MEASURED], min(fitting, key=lambda cell: known(cell, "step_time"))


def _regret(cells: Cells) -> Text | None:
    """Return how much slower the choice is than the fastest way, under each limit."""
    compared, said = _compared(cells), None
    for limit in LIMITS:
        if (found := chosen_of(compared, limit)) is None:
            continue
        best, fastest = found
        least = known(fastest, "step_time")
        first = known(best[0], "step_time") / least - 1
        measured = min(known(cell, "step_time") for cell in best) / least - 1
        count = sum(1 for cell in compared if limit is None or known(cell, "predicted_memory") <= limit)
        own = say(
            "the choice by prediction is {} slower than the fastest of {} ways, the fastest of its best three {}",
            "仅凭预测的选择比 {1} 种方式中最快者慢 {0}，其前三名中实测最快者慢 {2}",
            *(percent(first), str(count), percent(measured)),
        )
        if limit is not None:
            own = say("within {} GiB {}", "在 {} GiB 之内，{}", number(limit / GIB, 0), own)
        said = together(said, own)
    return said


def _spent(cells: Cells) -> Text | None:
    """Return the GPU seconds of measuring all ways, and of measuring the best three."""
    compared = _compared(cells)
    if (found := chosen_of(compared, None)) is None:
        return None
    best, _ = found
    whole, three = (sum(known(cell, CELL_TIME) for cell in some) for some in (compared, best))
    return say(
        "measuring all {} ways takes {} s of the GPU, the best three {} s",
        "测量全部 {} 种方式用 GPU {} s，前三名用 {} s",
        *(str(len(compared)), number(whole, 0), number(three, 0)),
    )


def _accuracy(cells: Cells) -> Text | None:
    errors = sorted(abs(error) for cell in _compared(cells) if (error := _error(cell)) is not None)
    if not errors:
        return None
    return say(
        "the median error of {} predicted times is {}, the largest {}",
        "{} 个预测时间的误差中位数为 {}，最大为 {}",
        *(str(len(errors)), percent(errors[len(errors) // 2]), percent(errors[-1])),
    )


OPTIMIZE = Experiment(
    name="optimized_steps",
    title=Text("The fastest way to run a step", "一步的最快运行方式"),
    question=Text(
        "How close to the fastest way of running a step is the one that is chosen by prediction?",
        "凭预测选出的运行方式与最快的相差多少？",
    ),
    grid=_grid,
    instrument=Instrument(
        "optimized_steps",
        "cs336_systems.experiments.steps.measure_optimized:measure_optimized_step",
        label=_label,
        memory=lambda config: Memory(estimate(RunConfig.of(config)).peak),
        takes_peak_tflops=True,
    ),
    tables=_tables,
    findings=(_regret, _spent, _accuracy),
    group="speed",
    identity=("micro_batches",),
    order=47,
)
