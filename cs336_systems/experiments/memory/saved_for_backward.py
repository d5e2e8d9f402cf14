"""What does forward keep for backward?"""

import dataclasses
from collections.abc import Iterable

from cs336_systems.config import RunConfig, model_config
from cs336_systems.experiments.spec import Config, Experiment, Instrument, label_step
from cs336_systems.measure.readers.recorded_tables import SavedRow, rows_of
from cs336_systems.record import MIB
from cs336_systems.report import terms
from cs336_systems.report.cells import CellView
from cs336_systems.report.phrases import having, value_of
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import key_columns, keys, number, percent, remarks_on, title_of, varying
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, listed, say

NAIVE = Text("naive attention", "朴素注意力")


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    """One block, so that the list of saved tensors stays readable."""
    size = "tiny" if preset == "quick" and base.device_type == "cpu" else "2.7B"
    model = model_config(size, num_layers=1)
    for fields in (
        {"attention": "reference"},
        {"attention": "auto"},
        {"attention": "reference", "compile": True},
        {"attention": "reference", "checkpoint_blocks": 1},
    ):
        for precision in ("fp32",) if preset == "quick" else ("fp32", "bf16"):
            yield dataclasses.replace(base, model=model, size="", precision=precision, **fields).to_dict()


def _not_profiled(run: RunConfig) -> str | None:
    return "mode 'inference' keeps nothing for backward; use another --mode" if run.mode == "inference" else None


def _tables(cells: Cells) -> list[Table]:
    shown = varying(cells, always=("size", "attention", "compile", "checkpoint_blocks"))
    totals, largest = [], []
    for cell in cells:
        if not cell.ok:
            totals.append([*keys(cell, shown), cell.verdict, "", ""])
            continue
        kept = [number((cell.value("saved_memory") or 0.0) / MIB, 1), number(cell.value("saved_tensors"), 0)]
        parameters = number((cell.value("saved_parameter_memory") or 0.0) / MIB, 1)
        totals.append([*keys(cell, shown), *kept, parameters])
        for size, module, what, line in rows_of(cell.samples("largest_saved"), SavedRow)[:5]:
            largest.append([*keys(cell, shown), number(size / MIB, 1), module, what, line])
    columns = [Column(Text("kept", "保留"), "MiB"), Column(Text("tensors", "张量数"))]
    columns += [Column(Text("parameters, too", "另有参数"), "MiB")]
    note = Text(
        "memory that several operators keep counts once; parameters would be there anyway",
        "多个算子共同保留的内存只计一次；参数本来就在",
    )
    words = [word(name) for name in (terms.MODULE, Text("what", "内容"), terms.LINE)]
    head, experiment = key_columns(shown), cells[0].experiment
    kept_title = title_of(experiment, Text("kept for backward", "为后向保留"), cells, shown)
    largest_title = title_of(experiment, Text("the five largest", "最大的五个"), cells, shown)
    return [
        Table(kept_title, [*head, *columns], totals, [note, *remarks_on(cells, shown, on_spread=False)]),
        Table(largest_title, [*head, Column(terms.BYTES, "MiB"), *words], largest),
    ]


def _kept(cells: Cells) -> Text | None:
    fine = having(cells, "saved_memory")
    plain = [cell for cell in fine if _variant(cell) == NAIVE]
    if not plain:
        return None
    base = plain[0]
    others = [cell for cell in fine if cell is not base and cell.get("precision") == base.get("precision")]
    whole = value_of(base, "saved_memory") or 1.0
    each = [
        say("{} {} ({})", "{} {}（{}）", _variant(cell), number(kept / MIB, 1), percent(kept / whole, 0))
        for cell in others
        if (kept := value_of(cell, "saved_memory"))
    ]
    count = base.get("num_layers")
    said = say(
        "of {} in {} naive attention keeps {} MiB for backward",
        "{}在 {} 下，朴素注意力为后向保留 {} MiB",
        Text(f"{count} block" if count == 1 else f"{count} blocks", f"{count} 个块"),
        *(str(base.get("precision")), number(whole / MIB, 1)),
    )
    return say("{}, {}", "{}，{}", said, listed(each)) if each else said


def _variant(cell: CellView) -> Text:
    if cell.get("checkpoint_blocks"):
        return Text("checkpointed", "检查点")
    if cell.get("compile"):
        return Text("compiled", "编译")
    return NAIVE if cell.get("attention") == "reference" else Text("fused attention", "融合注意力")


def _largest_kept(cells: Cells) -> Text | None:
    rows = [
        row for cell in having(cells, "saved_memory") for row in rows_of(cell.samples("largest_saved"), SavedRow)[:1]
    ]
    if not rows:
        return None
    size, _, what, line = max(rows, key=lambda row: row.size)
    return say(
        "the largest is {} with {} MiB, made at {}",
        "最大的是 {}，{} MiB，由 {} 产生",
        *(str(what), number(size / MIB, 1), str(line)),
    )


SAVED_TENSORS = Experiment(
    name="saved_tensors",
    title=Text("Tensors kept for backward", "为后向保存的张量"),
    question=Text("What does forward keep for backward?", "前向为后向保留了什么？"),
    grid=_grid,
    instrument=Instrument(
        name="saved_tensors",
        measure="cs336_systems.experiments.memory.measure_memory:measure_saved_tensors",
        label=label_step,
    ),
    profile=_not_profiled,
    tables=_tables,
    findings=(_kept, _largest_kept),
    order=30,
)
