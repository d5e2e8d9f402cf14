"""What needs how much memory, before a GPU is paid for?"""

import dataclasses
from collections.abc import Iterable
from itertools import product

from cs336_systems.config import COURSE_SIZES, RunConfig
from cs336_systems.experiments.memory.memory_parts import PART_NAMES
from cs336_systems.experiments.spec import Config, Experiment, Instrument, run_config
from cs336_systems.record import MIB
from cs336_systems.report import terms
from cs336_systems.report.cells import CellView
from cs336_systems.report.phrases import having, naming, value_of
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import cell_table, gib, number, varying
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, listed, say

PARTS = {
    "parameter_memory": terms.PARAMETERS,
    "gradient_memory": terms.GRADIENTS,
    "optimizer_memory": terms.OPTIMIZER,
    "activation_memory": terms.ACTIVATIONS,
    "loss_memory": Text("logits, loss", "logits、损失"),
    "predicted_memory": terms.PEAK,
    "traced_memory": Text("peak, traced", "峰值，追踪"),
}


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    """Predictions are for a GPU, whatever device this machine has."""
    gpu = dataclasses.replace(base, device="cuda")
    sizes = ("small", "2.7B") if preset == "quick" else COURSE_SIZES
    contexts = (128, 256, 512) if preset != "quick" else (512,)
    for size, context, precision in product(sizes, contexts, ("fp32", "bf16")):
        yield run_config(gpu, size, context, precision=precision)


def _tables(cells: Cells) -> list[Table]:
    columns = [Column(heading, "GiB") for heading in PARTS.values()]
    columns += [Column(Text("per block", "每块"), "MiB"), Column(Text("residual tensor", "残差张量"), "MiB")]
    columns += [word(terms.PEAK_IN)]

    def row(cell: CellView) -> list[str]:
        mib = [cell.value(name) for name in ("block_activation_memory", "residual_memory")]
        where = cell.metrics["peak_phase"].samples[0]
        return [*(gib(cell.value(name)) for name in PARTS), *(number((v or 0) / MIB, 0) for v in mib), str(where)]

    what = Text("predicted for a CUDA GPU, none needed", "对 CUDA GPU 的预测，无需 GPU")
    return [cell_table(what, cells, varying(cells), columns, row)]


def _largest_model(cells: Cells) -> Text | None:
    """State what the largest model needs, from its configuration alone."""
    fine = sorted(having(cells, "predicted_memory"), key=lambda cell: value_of(cell, "predicted_memory") or 0.0)
    cell = fine[-1]
    metrics = {"parameters": "parameter", "gradients": "gradient", "optimizer state": "optimizer"}
    sizes = {label: size for label, part in metrics.items() if (size := value_of(cell, f"{part}_memory"))}
    said = say("{} needs {} GiB", "{} 需要 {} GiB", naming(fine)(cell), gib(value_of(cell, "predicted_memory")))
    if not sizes:
        return said
    parts = listed(say("{} {}", "{} {}", PART_NAMES[label], gib(size)) for label, size in sizes.items())
    return say("{}: {}, and what forward keeps", "{}：{}，以及前向保留的部分", said, parts)


def _smallest_need(cells: Cells) -> Text | None:
    fine = having(cells, "predicted_memory")
    if len(fine) < 2:
        return None
    least = min(fine, key=lambda cell: value_of(cell, "predicted_memory") or 0.0)
    return say(
        "of {} configurations {} needs the least, {} GiB",
        "{} 个配置中 {} 需要最少，{} GiB",
        *(str(len(fine)), naming(fine)(least), gib(value_of(least, "predicted_memory"))),
    )


MEMORY_MODEL = Experiment(
    name="memory_model",
    title=Text("Memory from the configuration alone", "仅由配置算出的显存"),
    question=Text("What needs how much memory, before a GPU is paid for?", "付钱租 GPU 之前：什么需要多少显存？"),
    grid=_grid,
    instrument=Instrument("memory_model", "cs336_systems.experiments.memory.measure_memory:measure_prediction"),
    tables=_tables,
    findings=(_largest_model, _smallest_need),
    order=40,
)
