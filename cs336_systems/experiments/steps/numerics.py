"""Where does precision get lost when adding up, and which dtypes does autocast choose?"""

from collections.abc import Iterable
from itertools import product

from cs336_systems.config import RunConfig
from cs336_systems.experiments.spec import Config, Experiment, Instrument
from cs336_systems.report.cells import CellView, grouped
from cs336_systems.report.document import Chart, Point, Series
from cs336_systems.report.phrases import having, known, together, value_of
from cs336_systems.report.presentation import Cells
from cs336_systems.report.referee import remarks
from cs336_systems.report.rows import titled
from cs336_systems.report.terms import GRADIENTS, LOSS, PARAMETERS
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, listed, say

# -- accumulation -----------------------------------------------------------------------------------------------------


def _accumulation_grid(preset: str, base: RunConfig) -> Iterable[Config]:
    for accumulator, term in (("fp32", "fp32"), ("fp16", "fp16"), ("fp32", "fp16"), ("fp32", "fp16 cast to fp32")):
        yield {"accumulator": accumulator, "term": term, "value": 0.01, "count": 1000}


def _accumulation_tables(cells: Cells) -> list[Table]:
    columns = [word(Text("accumulator", "累加器")), word(Text("term", "加数"))]
    columns += [Column(Text("one term is", "加数的值")), Column(Text("sum", "和"))]
    rows = [
        [cell.get("accumulator"), cell.get("term"), f"{cell.value('term'):.7f}", f"{cell.value('sum'):.4f}"]
        for cell in cells
        if cell.ok
    ]
    notes = [
        Text(
            "fp16 accumulator: near 10 its steps are 2^-7 = 0.0078, so each 0.01 is rounded as it is added, "
            "and it drifts",
            "fp16 累加器：在 10 附近步长为 2^-7 = 0.0078，每个 0.01 相加时都被舍入，和逐渐偏离",
        ),
        Text(
            "fp32 accumulator with fp16 terms: only 0.01 itself is rounded, to 0.0100021; the error stays in "
            "proportion",
            "fp32 累加器、fp16 加数：只有 0.01 本身被舍入为 0.0100021；误差保持比例",
        ),
    ]
    title = titled(cells[0].experiment, Text("0.01 added a thousand times", "0.01 相加一千次"))
    return [Table(title, columns, rows, [*notes, *(remark.text for remark in remarks(cells))])]


def _accumulation_charts(cells: Cells) -> list[Chart]:
    """Errors of the sums, in the order of the table."""
    fine, points = having(cells, "sum"), []
    for cell in fine:
        exact = cell.get("value") * cell.get("count")
        points.append(Point(f"{cell.get('accumulator')} += {cell.get('term')}", 100 * (known(cell, "sum") / exact - 1)))
    title = Text("Error of a long sum", "多次累加之和的误差")
    note = listed(dict.fromkeys(_terms(cell) for cell in fine))
    names, y = Text("accumulator += term", "累加器 += 加数"), Text("% of the exact sum", "相对精确和的 %")
    return [Chart("", title, "bars", names, y, [Series(title, points)], horizontal=True, digits=3, note=note)]


def _terms(cell: CellView) -> Text:
    return say("{} added {} times", "{} 相加 {} 次", str(cell.get("value")), str(cell.get("count")))


def _sums(cells: Cells) -> Text | None:
    fine = having(cells, "sum")
    said = []
    for cell in fine:
        exact = cell.get("value") * cell.get("count")
        total = value_of(cell, "sum") or 0.0
        values = (f"{cell.get('accumulator')} += {cell.get('term')}", f"{total:.4f}", f"{total / exact - 1:+.3%}")
        said.append((abs(total / exact - 1), say("{} gives {} ({})", "{} 得 {}（{}）", *values)))
    count, value = str(fine[0].get("count")), str(fine[0].get("value"))
    ranked = [text for _, text in sorted(said, key=lambda pair: -pair[0])]
    return say("{} added {} times, the worst first: {}", "{} 相加 {} 次，最差在前：{}", value, count, listed(ranked))


ACCUMULATION = Experiment(
    name="accumulation",
    title=Text("Adding up in low precision", "低精度下的累加"),
    question=Text("Where does precision get lost when adding up?", "累加时精度在哪里丢失？"),
    grid=_accumulation_grid,
    instrument=Instrument("accumulation", "cs336_systems.experiments.steps.measure_step:measure_accumulation"),
    tables=_accumulation_tables,
    charts=_accumulation_charts,
    findings=(_sums,),
    group="trust",
    order=80,
)

# -- dtypes under autocast --------------------------------------------------------------------------------------------


def _dtypes_grid(preset: str, base: RunConfig) -> Iterable[Config]:
    for model, dtype in product(("toy", "transformer"), ("fp16", "bf16")):
        yield {"model": model, "autocast": dtype, "device": base.device}


def _dtypes_tables(cells: Cells) -> list[Table]:
    found = []
    for model, tried in grouped(cells, lambda cell: cell.get("model")).items():
        chosen = [cell for cell in tried if cell.ok]
        tensors = dict.fromkeys(tensor for cell in chosen for tensor in cell.variants)
        columns = [word(Text("tensor", "张量"))]
        columns += [word(say("autocast {}", "{} autocast 下", cell.get("autocast"))) for cell in chosen]
        rows = [[tensor, *(_dtype(cell, tensor) for cell in chosen)] for tensor in tensors]
        what = say("{} model on {}", "{} 模型，{}", str(model), str(tried[0].get("device")))
        notes = [remark.text for remark in remarks(tried)]
        found.append(Table(titled(cells[0].experiment, what), columns, rows, notes))
    return found


def _dtype(cell: CellView, tensor: str) -> str:
    return str(cell.variants[tensor]["dtype"].samples[0])


_TENSORS = {"parameters": PARAMETERS, "loss": LOSS, "gradients": GRADIENTS}


def _tensor_name(tensor: str) -> Text:
    if tensor.endswith(" output"):
        return Text(tensor, f"{tensor.removesuffix(' output')} 的输出")
    return _TENSORS.get(tensor, Text(tensor))


def _float32_tensors(cells: Cells) -> Text | None:
    """Name the tensors that stay in float32, by model; dtypes that agree in them are named together."""
    found: dict[tuple, list[CellView]] = {}
    for cell in (cell for cell in cells if cell.ok and cell.variants):
        full = tuple(tensor for tensor in cell.variants if _dtype(cell, tensor) == "float32")
        found.setdefault((str(cell.get("model")), len(cell.variants), full), []).append(cell)
    said = None
    for (model, count, full), chosen in found.items():
        own = say(
            "under autocast to {0}, {3} of {1} tensors of the {2} model are float32: {4}",
            "{0} autocast 下，{2} 模型的 {1} 个张量中 {3} 个为 float32：{4}",
            *("/".join(str(cell.get("autocast")) for cell in chosen), str(count), model, str(len(full))),
            listed(map(_tensor_name, full)),
        )
        said = together(said, own)
    return said


AUTOCAST_DTYPES = Experiment(
    name="autocast_dtypes",
    title=Text("Types under autocast", "autocast 下的类型"),
    question=Text("Which dtype has what under autocast?", "autocast 下什么是哪种类型？"),
    grid=_dtypes_grid,
    instrument=Instrument("autocast_dtypes", "cs336_systems.experiments.steps.measure_step:measure_dtypes"),
    tables=_dtypes_tables,
    findings=(_float32_tensors,),
    group="trust",
    order=81,
)
