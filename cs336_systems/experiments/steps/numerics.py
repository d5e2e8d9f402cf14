"""Where does precision get lost when adding up, and which dtypes does autocast choose?"""

from collections.abc import Iterable
from itertools import product

from cs336_systems.config import RunConfig
from cs336_systems.experiments.spec import Config, Experiment, Instrument
from cs336_systems.report.cells import CellView, grouped
from cs336_systems.report.document import Chart, Point, Series
from cs336_systems.report.phrases import having, known, together
from cs336_systems.report.presentation import Cells
from cs336_systems.report.referee import remarks
from cs336_systems.report.rows import percent, titled
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
    """Chart the errors of the sums, in the order of the table."""
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
    """State the worst sum and the best one."""
    fine = having(cells, "sum")

    def error(cell: CellView) -> float:
        return known(cell, "sum") / (cell.get("value") * cell.get("count")) - 1

    worst, best = (pick(fine, key=lambda cell: abs(error(cell))) for pick in (max, min))
    said = say("{}: {}", "{}：{}", _terms(worst), _sum(worst, error(worst)))
    return together(said, _sum(best, error(best))) if best is not worst else said


def _sum(cell: CellView, error: float) -> Text:
    off = Text("correct to 0.001%", "误差不到 0.001%")
    if abs(error) >= 5e-6:
        off = say(*(("{} too high", "偏高 {}") if error > 0 else ("{} too low", "偏低 {}")), percent(abs(error), 3))
    return say(
        "{1} terms in an {0} accumulator give {2}, {3}",
        "{0} 累加器加 {1} 加数得 {2}，{3}",
        *(str(cell.get("accumulator")), str(cell.get("term")), f"{known(cell, 'sum'):,.4f}", off),
    )


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
    problems_2026=("mixed_precision_accumulation",),
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
_MODULES = {
    "fc1": Text("first linear layer", "第一个线性层"),
    "fc2": Text("second linear layer", "第二个线性层"),
    "ln": Text("LayerNorm"),
    "ln_final": Text("final norm", "最后的归一化层"),
    "token_embeddings": Text("token embedding", "词嵌入"),
    "rotate": Text("rotary embedding", "旋转位置编码"),
    "lm_head": Text("output layer", "输出层"),
}


def _tensor_name(tensor: str) -> Text:
    if tensor.endswith(" output"):
        module = tensor.removesuffix(" output")
        name = _MODULES.get(module) or Text(module.replace("_", " ").replace(".", " "))
        return say("output of the {}", "{} 的输出", name)
    return _TENSORS.get(tensor, Text(tensor))


def _float32_tensors(cells: Cells) -> Text | None:
    """Name the tensors that stay in float32, by model; dtypes that agree in them are named together."""
    found: dict[tuple, list[CellView]] = {}
    for cell in (cell for cell in cells if cell.ok and cell.variants):
        full = tuple(tensor for tensor in cell.variants if _dtype(cell, tensor) == "float32")
        found.setdefault((str(cell.get("model")), len(cell.variants), full), []).append(cell)
    said = None
    for (model, count, full), chosen in found.items():
        dtypes = listed((str(cell.get("autocast")) for cell in chosen), (" and ", " 和 "))
        values = (dtypes, str(count), model, str(len(full)))
        if full:
            names = listed(map(_tensor_name, full))
            own = say(
                "under autocast to {0}, {3} of {1} tensors of the {2} model are float32: {4}",
                "{0} autocast 下，{2} 模型的 {1} 个张量中有 {3} 个为 float32：{4}",
                *(*values, names),
            )
        else:
            own = say(
                "under autocast to {0}, none of {1} tensors of the {2} model is float32",
                "{0} autocast 下，{2} 模型的 {1} 个张量均不为 float32",
                *values,
            )
        said = together(said, own)
    return said


AUTOCAST_DTYPES = Experiment(
    name="autocast_dtypes",
    title=Text("Dtypes under autocast", "autocast 下的数据类型"),
    question=Text("Which tensors stay in float32 under autocast?", "autocast 下哪些张量保持 float32？"),
    grid=_dtypes_grid,
    instrument=Instrument("autocast_dtypes", "cs336_systems.experiments.steps.measure_step:measure_dtypes"),
    tables=_dtypes_tables,
    findings=(_float32_tensors,),
    group="trust",
    problems_2026=("benchmarking_mixed_precision",),
    order=81,
)
