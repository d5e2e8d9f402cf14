"""Experiments on the parts of memory at its peak, on what forward keeps for backward, and on what a model
needs by its configuration."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

from cs336_systems.config import COURSE_SIZES, MODES, RunConfig, model_config
from cs336_systems.experiments.spec import (
    HANDOUT_2026,
    Config,
    Experiment,
    Instrument,
    label_step,
    run_config,
    step_memory,
)
from cs336_systems.measure.readers.recorded_tables import BlockRow, LabelRow, OperationRow, SavedRow, rows_of
from cs336_systems.record import GIB, MIB
from cs336_systems.report import entries, terms
from cs336_systems.report.cells import CellView, grouped
from cs336_systems.report.document import Chart, Limit, Point, Series
from cs336_systems.report.names import PART_NAMES, implementation_name, part_name, size_name
from cs336_systems.report.phrases import (
    MODE_WORDS,
    having,
    known,
    naming,
    scale_of,
    size_of,
    together,
    value_of,
    with_name,
    worst_prediction,
)
from cs336_systems.report.points import FEW, joined, measured
from cs336_systems.report.presentation import Cells
from cs336_systems.report.referee import doubt
from cs336_systems.report.rows import (
    FIELDS,
    as_text,
    gib,
    ms,
    number,
    percent,
    rows_table,
    shortened,
    signed,
    varying,
)
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, listed, say

MODULE = "cs336_systems.experiments.memory.measure_memory"
FASTER = 0.95
"""A step that takes less than this share of its time under an instrument was not measured well."""
SMALL_PART = 0.01
"""Parts below this share of the largest bar are drawn together as one."""
XL_CONTEXTS = (128, 2048)
"""Contexts of the 2026 handout for its xl, which is 2.7B."""
LOW = 0.25
"""The GPU's memory is not drawn if all bars are below this share of it."""


# -- memory: the parts of the peak ------------------------------------------------------------------------------------


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    modes = ("inference", "forward", "train-step")
    if preset == "quick":
        for mode in modes:
            yield run_config(base, "small" if base.device_type == "cuda" else "tiny", mode=mode)
        return
    contexts: tuple[int, ...] = XL_CONTEXTS if preset == HANDOUT_2026 else (128, 256, 512)
    for context, mode, precision in product(contexts, modes, ("fp32", "bf16")):
        yield run_config(base, "2.7B", context, mode=mode, precision=precision)
    for precision in ("fp32", "bf16"):  # without score matrices
        yield run_config(base, "2.7B", contexts[-1], precision=precision, attention="auto")
    if preset == HANDOUT_2026:  # the naive training step that fits
        for precision in ("fp32", "bf16"):
            yield run_config(base, "2.7B", contexts[-1], precision=precision, checkpoint_blocks=1)
    if preset == "full":
        for size, mode in product(COURSE_SIZES, modes):
            yield run_config(base, size, mode=mode)


def _not_profiled(run: RunConfig) -> str | None:
    if run.compile:
        return "memory is traced operator by operator, which a compiled model does not have: leave out --compile"
    return None


PEAK_PHASE = entries.Entry(word(terms.PEAK_IN), lambda cell: str(cell.samples("peak_phase")[0]))


def _labels(cell: CellView) -> list[LabelRow]:
    return rows_of(cell.samples("part_memory"), LabelRow)


def _blocks(cell: CellView) -> list[BlockRow]:
    return rows_of(cell.samples("largest_blocks"), BlockRow)


def _tables(cells: Cells) -> list[Table]:
    ok = [cell for cell in cells if cell.ok]
    return [_peaks(cells), *([_parts(ok), _largest(ok), _overheads(ok)] if ok else [])]


def _peaks(cells: Cells) -> Table:
    def of_peak(size: float | None, cell: CellView) -> str:
        return percent((size or 0.0) / (cell.value("peak_memory") or 1.0), 2)

    columns = [
        entries.gib(terms.MEASURED, "peak_memory"),
        entries.gib(terms.PREDICTED, "predicted_memory"),
        entries.of(terms.ERROR, lambda cell: signed(cell.memory_error, 2)),
        entries.gib(terms.TRACED, "predicted_by_tracing_memory"),
        *entries.reserved(cells),
        PEAK_PHASE,
        entries.of(
            Text("parts / measured", "各部分 / 实测"),
            lambda cell: of_peak(sum(size for _, size in _labels(cell)), cell),
        ),
        entries.of(part_name("unlabelled"), lambda cell: of_peak(cell.value("unlabelled_memory"), cell)),
    ]
    note = Text(
        "measured: without instruments; predicted: from the configuration; traced: from its operators, no GPU",
        "实测：不带仪器；预测：仅由配置；追踪：由其算子，无需 GPU",
    )
    return entries.cell_table(Text("the peak", "峰值"), cells, columns, notes=[note], on_spread=False)


def _parts(cells: Cells) -> Table:
    labels = list(dict.fromkeys(label for cell in cells for label, _ in _labels(cell)))
    columns = [Column(part_name(label), "GiB") for label in labels]
    what = Text("what the peak is made of", "峰值由什么组成")
    return rows_table(what, cells, columns, lambda cell: [list(map(gib, map(dict(_labels(cell)).get, labels)))])


def _largest(cells: Cells) -> Table:
    """Return the largest blocks that a step allocated; with several cells the two largest of each."""
    words = (Text("label", "标签"), terms.MODULE, Text("made by", "产生者"), terms.LINE)
    columns = [Column(terms.BYTES, "MiB"), *map(word, words)]

    def rows(cell: CellView) -> Iterable[list[str]]:
        for size, label, module, what, line in _blocks(cell)[: 10 if len(cells) == 1 else 2]:
            yield [number(size / MIB, 1), label, module, shortened(what), line]

    return rows_table(Text("the largest blocks", "最大的块"), cells, columns, rows)


def _overheads(cells: Cells) -> Table:
    columns = [Column(terms.STEP, "ms"), Column(Text("with the allocator's history", "记录分配器历史"))]
    columns += [Column(Text("traced block by block", "逐块跟踪"))]

    def rows(cell: CellView) -> Iterable[list[str]]:
        slower = ("" if ratio is None else f"{ratio:.1f}x" for ratio in _slowdowns(cell))
        yield [ms(cell.value("step_time")), *slower]

    what = Text("how much slower a step is under each instrument", "每种仪器使一步变慢多少")
    return rows_table(what, cells, columns, rows, notes=_doubts(cells))


def _slowdowns(cell: CellView) -> list[float | None]:
    """Return the time of a step with the allocator's history and traced, over that of a step without instruments."""
    step = cell.value("step_time")
    under = [cell.value(name) for name in ("history_step_time", "traced_step_time")]
    return [seconds / step if seconds is not None and step else None for seconds in under]


def _doubts(cells: Cells) -> list[Text]:
    """Return why the slowdowns may be wrong: steps that vary too much, and steps that instruments made faster."""
    found = [warning] if (warning := doubt(cells)) else []
    if any(ratio is not None and ratio < FASTER for cell in cells for ratio in _slowdowns(cell)):
        found.append(
            Text(
                "below 1x: no instrument makes a step faster, so other load slowed those without one; measure again",
                "小于 1x：仪器不会使一步变快，说明不带仪器的步受到其他负载影响，请重新测量",
            )
        )
    return found


def _charts(cells: Cells) -> list[Chart]:
    """Return a chart per mode, that of a training step first."""
    by_mode = grouped(sorted(cells, key=_place), lambda cell: str(cell.get("mode")))
    modes = sorted(by_mode, key=lambda mode: -MODES.index(mode) if mode in MODES else 0)
    return [_parts_chart(by_mode[mode], MODE_WORDS.get(mode, Text(mode))) for mode in modes]


def _place(cell: CellView) -> tuple:
    return scale_of(cell), cell.get("context_length"), cell.get("precision") != "fp32", cell.get("attention") == "auto"


def _parts_chart(cells: Cells, mode: Text) -> Chart:
    shown = [name for name in varying(cells, always=("context_length",)) if name not in ("mode", "vocab_size")]
    names = [_bar_name(cell, shown) for cell in cells]
    series = _part_series(cells, names) if len(cells) <= FEW else []
    highest = max((value_of(cell, "peak_memory") or 0.0 for cell in cells), default=0.0)
    title = say("What the peak is made of: {}", "峰值由什么组成：{}", mode)
    note = Text("at the peak of one step; attention is naive unless named", "一步的峰值时刻；未注明者为朴素注意力")
    axis = listed((FIELDS[name] for name in shown), (", ", "，"))
    limits = gpu_limit(cells, highest)
    return Chart("", title, "stacked", axis, terms.GIB_TEXT, series, limits=limits, digits=2, note=note)


def _bar_name(cell: CellView, shown: Sequence[str]) -> Text:
    words = {"size": size_name(cell.get("size")), "attention": implementation_name(cell.get("attention"))}
    plain = {"attention": "reference", "checkpoint_blocks": 0, "compile": False}
    told = [name for name in shown if cell.get(name) != plain.get(name, "")]
    return listed((words.get(name) or as_text(cell.get(name)) for name in told), (", ", "，"))


def _part_series(cells: Cells, names: Sequence[Text]) -> list[Series]:
    """Return the parts in the order of `PART_NAMES`, small ones together; a cell that did not fit has a note."""
    parts = [dict(_labels(cell)) for cell in cells]
    labels = sorted({label for found in parts for label in found}, key=_part_place)
    sizes = {label: [found.get(label, 0) / GIB for found in parts] for label in labels}
    largest = max((sum(column) for column in zip(*sizes.values(), strict=True)), default=0)
    small = [sizes.pop(label) for label in labels if max(sizes[label]) < SMALL_PART * largest]
    found = [(part_name(label), own) for label, own in sizes.items()]
    found += [(Text("other", "其余"), list(map(sum, zip(*small, strict=True))))] if small else []
    series = [Series(name, [Point(*pair) for pair in zip(names, own, strict=True) if pair[1]]) for name, own in found]
    failed = [
        Point(name, 0.0, note=terms.OUT_OF_MEMORY) for cell, name in zip(cells, names, strict=True) if cell.is_oom
    ]
    return [*series, Series(Text(""), failed)] if failed else series


def _part_place(label: str) -> int:
    known = list(PART_NAMES)
    return known.index(label) if label in known else len(known)


def gpu_limit(cells: Cells, highest: float) -> list[Limit]:
    """Return the memory of the GPU, unless all bars are too low to be compared with it."""
    memory = cells[0].environment.gpu_memory
    if not memory or (highest < memory * LOW and not any(cell.is_oom for cell in cells)):
        return []
    text = say("memory of {}: {} GiB", "{} 的显存：{} GiB", str(cells[0].environment.gpu), f"{memory / GIB:.1f}")
    return [Limit(memory / GIB, text)]


def _composition(cells: Cells) -> Text | None:
    fine = having(cells, "peak_memory")
    highest = max(fine, key=lambda cell: known(cell, "peak_memory"))
    peak = known(highest, "peak_memory")
    parts = sorted(_labels(highest), key=lambda part: -part.size)[:3]
    if not parts:
        return None
    shares = listed(say("{} {}", "{1} {0}", percent(size / peak, 0), part_name(str(label))) for label, size in parts)
    return say(
        "the highest peak is {} GiB ({}): {}",
        "最高的峰值为 {} GiB（{}）：{}",
        *(gib(peak), naming(fine)(highest), shares),
    )


def _largest_block(cells: Cells) -> Text | None:
    fine = [cell for cell in cells if cell.ok]
    blocks = [(row, cell) for cell in fine for row in _blocks(cell)[:1]]
    (size, label, _, _, line), cell = max(blocks, key=lambda pair: pair[0].size)
    said = say(
        "the largest block of a step is {} MiB of {}{}",
        "一步中最大的一块显存为 {} MiB {}{}",
        *(number(size / MIB, 1), part_name(str(label)), _made_at(str(line))),
    )
    return with_name(said, naming(fine)(cell))


def _made_at(line: str) -> Text:
    """Return the file and line that made a tensor, as the end of a sentence; empty if unknown."""
    place = line.split(" in ")[0]
    return say(", made at {}", "，由 {} 产生", place) if place else Text("")


MEMORY = Experiment(
    name="memory",
    title=Text("What the peak is made of", "峰值显存的组成"),
    question=Text(
        "What is memory made of at its peak, and which line made it?", "峰值处的显存由什么组成，是哪一行代码产生的？"
    ),
    grid=_grid,
    instrument=Instrument("memory", f"{MODULE}:measure_memory", label=label_step, memory=step_memory, keeps_files=True),
    profile=_not_profiled,
    tables=_tables,
    charts=_charts,
    group="memory",
    findings=(worst_prediction, _composition, _largest_block),
    problems_2026=("memory_profiling",),
    order=10,
)

# -- saved_tensors: what forward keeps for backward -------------------------------------------------------------------

NAIVE = Text("naive attention", "朴素注意力")


def _saved_grid(preset: str, base: RunConfig) -> Iterable[Config]:
    """Yield a model of one block, so that the list of saved tensors stays readable."""
    if preset == HANDOUT_2026:
        for context, attention, precision in product(XL_CONTEXTS, ("reference", "auto"), ("fp32", "bf16")):
            model = model_config("2.7B", num_layers=1, context_length=context)
            run = dataclasses.replace(base, model=model, size="", precision=precision, attention=attention)
            yield run.to_dict()
        return
    size = "tiny" if preset == "quick" and base.device_type == "cpu" else "2.7B"
    model = model_config(size, num_layers=1)
    variants: tuple[dict[str, Any], ...] = (
        {"attention": "reference"},
        {"attention": "auto"},
        {"attention": "reference", "compile": True},
        {"attention": "reference", "checkpoint_blocks": 1},
    )
    for fields in variants:
        for precision in ("fp32",) if preset == "quick" else ("fp32", "bf16"):
            yield dataclasses.replace(base, model=model, size="", precision=precision, **fields).to_dict()


def _saved_not_profiled(run: RunConfig) -> str | None:
    return "mode 'inference' keeps nothing for backward; use another --mode" if run.mode == "inference" else None


def _saved_tables(cells: Cells) -> list[Table]:
    shown = varying(cells, always=("size", "attention", "compile", "checkpoint_blocks"))
    kept = [
        entries.of(Text("kept", "保留"), lambda cell: _mib(cell.value("saved_memory")), "MiB"),
        entries.of(Text("tensors", "张量数"), lambda cell: number(cell.value("saved_tensors"), 0)),
        entries.of(Text("parameters, too", "另有参数"), lambda cell: _mib(cell.value("saved_parameter_memory")), "MiB"),
    ]
    note = Text(
        "memory that several operators keep counts once; parameters would be there anyway",
        "多个算子共同保留的内存只计一次；参数本来就在",
    )
    columns = [Column(terms.BYTES, "MiB"), *map(word, (terms.MODULE, Text("what", "内容"), terms.LINE))]

    def largest(cell: CellView) -> Iterable[list[str]]:
        for size, *words in _saved(cell)[:5] if cell.ok else ():
            yield [_mib(size), *words]

    what = Text("kept for backward", "为反向保留")
    of_block = having(cells, "block_saved_memory")
    return [
        entries.cell_table(what, cells, kept, shown=shown, notes=[note], on_spread=False),
        rows_table(Text("the five largest", "最大的五个"), cells, columns, largest, shown=shown),
        *([_block_table(of_block, shown), _operations_table(of_block, shown)] if of_block else []),
    ]


def _block_table(cells: Cells, shown: Sequence[str]) -> Table:
    """Return what one block keeps, and how its backward pass changes the memory."""

    def mib(metric: str) -> Callable[[CellView], str]:
        return lambda cell: "" if cell.value(metric) is None else _mib(cell.value(metric))

    def by_change(cell: CellView) -> str:
        change = cell.value("block_backward_change")
        return "" if change is None else _mib(change + (cell.value("block_saved_memory") or 0.0))

    columns = [
        entries.of(Text("kept", "保留"), mib("block_saved_memory"), "MiB"),
        entries.of(Text("change over its backward", "其反向前后的变化"), mib("block_backward_change"), "MiB"),
        entries.of(Text("gradients by the change", "由变化得出的梯度"), by_change, "MiB"),
        entries.of(Text("gradients counted", "直接统计的梯度"), mib("block_gradient_memory"), "MiB"),
    ]
    note = Text(
        "change: from the gradient of the block's output to that of its input; gradients: the change and what was kept",
        "变化：从块输出的梯度到块输入的梯度；梯度：变化加上所保留的",
    )
    return entries.cell_table(Text("one block", "一个块"), cells, columns, shown=shown, notes=[note], on_spread=False)


def _operations_table(cells: Cells, shown: Sequence[str]) -> Table:
    words = (Text("operation", "操作"), terms.MODULE)
    columns = [Column(terms.BYTES, "MiB"), Column(terms.SHARE), Column(Text("tensors", "张量数")), *map(word, words)]

    def rows(cell: CellView) -> Iterable[list[str | Text]]:
        for operation, module, size, tensors in _operations(cell)[:5]:
            share = percent(size / known(cell, "block_saved_memory"))
            yield [_mib(size), share, number(tensors, 0), operation, module]

    what = Text("one block, the five operations that keep most", "一个块，保留最多的五个操作")
    return rows_table(what, cells, columns, rows, shown=shown)


def _operations(cell: CellView) -> list[OperationRow]:
    return rows_of(cell.samples("block_operations"), OperationRow)


def _saved(cell: CellView) -> list[SavedRow]:
    return rows_of(cell.samples("largest_saved"), SavedRow)


def _mib(size: float | None) -> str:
    return number((size or 0.0) / MIB, 1)


def _saved_charts(cells: Cells) -> list[Chart]:
    return [_saved_chart(own) for own in grouped(cells, lambda cell: cell.get("context_length")).values()]


def _saved_chart(cells: Cells) -> Chart:
    by_precision = grouped(having(cells, "saved_memory"), lambda cell: str(cell.get("precision")))
    series = [
        Series(Text(precision), joined(measured(cell, "saved_memory", _variant(cell), MIB) for cell in own))
        for precision, own in by_precision.items()
    ]
    size = size_name(cells[0].get("size"))
    values = (size, str(cells[0].get("batch_size")), str(cells[0].get("context_length")))
    title = say("Kept for backward: {}, {} x {} tokens", "为反向保留：{}，{} x {} 个 token", *values)
    note = Text("memory of saved tensors, parameters not counted", "所保存张量的显存，不含参数")
    return Chart("", title, "bars", Text("how it runs", "运行方式"), Text("MiB"), series, digits=1, note=note)


def _one_block(cells: Cells) -> Text | None:
    """State what a block with naive attention keeps at the longest context, and its gradients."""
    fine = [cell for cell in having(cells, "block_saved_memory", "block_gradient_memory") if _variant(cell) == NAIVE]
    cell = max(fine, key=lambda cell: cell.get("context_length"))
    kept = known(cell, "block_saved_memory")
    largest = (
        say("{} {}", "{} {}", _operation_name(row.operation), percent(row.size / kept, 0))
        for row in _operations(cell)[:3]
    )
    said = say(
        "one block keeps {} MiB for backward ({}): {}",
        "一个块为反向保留 {} MiB（{}）：{}",
        *(_mib(kept), naming(fine)(cell), listed(largest)),
    )
    gradients = _mib(known(cell, "block_gradient_memory"))
    return together(said, say("its gradients take {} MiB", "其梯度占 {} MiB", gradients))


def _operation_name(operation: str) -> Text:
    names = {
        "linear": Text("linear layers", "线性层"),
        "matmul": Text("matmul", "矩阵乘"),
        "mul": Text("elementwise product", "逐元素乘"),
        "rms_norm": Text("RMSNorm"),
    }
    return names.get(operation) or Text(operation.replace("_", " ") or "other", "" if operation else "其他")


def _kept(cells: Cells) -> Text | None:
    fine = having(cells, "saved_memory")
    fine = [cell for cell in fine if cell.get("context_length") == max(cell.get("context_length") for cell in fine)]
    base = next(cell for cell in fine if _variant(cell) == NAIVE)
    others = [cell for cell in fine if cell is not base and cell.get("precision") == base.get("precision")]
    whole = known(base, "saved_memory")
    said = say(
        "naive attention keeps {} MiB for backward ({}, {})",
        "朴素注意力为反向保留 {} MiB（{}，{}）",
        *(_mib(whole), size_of(base), str(base.get("precision"))),
    )
    each = [
        say("{} keeps {}", "{} 保留 {}", _variant(cell), percent(kept / whole, 0))
        for cell in others
        if (kept := value_of(cell, "saved_memory"))
    ]
    return together(said, say("compared with that, {}", "相比之下，{}", listed(each))) if each else said


def _variant(cell: CellView) -> Text:
    if cell.get("checkpoint_blocks"):
        return Text("recomputation", "重计算")
    if cell.get("compile"):
        return Text("torch.compile")
    return NAIVE if cell.get("attention") == "reference" else Text("fused attention", "融合注意力")


def _largest_kept(cells: Cells) -> Text | None:
    rows = [row for cell in having(cells, "saved_memory") for row in _saved(cell)[:1]]
    size, _, what, line = max(rows, key=lambda row: row.size)
    return say(
        "the largest tensor kept has {} MiB ({}){}",
        "保留的最大张量为 {} MiB（{}）{}",
        *(_mib(size), str(what), _made_at(str(line))),
    )


SAVED_TENSORS = Experiment(
    name="saved_tensors",
    title=Text("Tensors kept for backward", "为反向保存的张量"),
    question=Text("What does forward keep for backward?", "前向为反向保留了什么？"),
    grid=_saved_grid,
    instrument=Instrument("saved_tensors", f"{MODULE}:measure_saved_tensors", label=label_step),
    profile=_saved_not_profiled,
    tables=_saved_tables,
    charts=_saved_charts,
    group="memory",
    findings=(_one_block, _kept, _largest_kept),
    problems_2026=("memory_profiling",),
    order=30,
)

# -- memory_model: from the configuration alone -----------------------------------------------------------------------

PREDICTED_PARTS = {
    "parameter_memory": terms.PARAMETERS,
    "gradient_memory": terms.GRADIENTS,
    "optimizer_memory": terms.OPTIMIZER,
    "activation_memory": terms.ACTIVATIONS,
    "loss_memory": Text("logits, loss", "logits、损失"),
    "predicted_memory": terms.PEAK,
    "traced_memory": Text("peak, traced", "峰值，追踪"),
}


def _model_grid(preset: str, base: RunConfig) -> Iterable[Config]:
    """Yield predictions for a GPU, whatever device this machine has."""
    gpu = dataclasses.replace(base, device="cuda")
    if preset == "quick":
        for size, precision in (("small", "fp32"), ("small", "bf16"), ("2.7B", "bf16")):
            yield run_config(gpu, size, 512, precision=precision)
        return
    if preset == HANDOUT_2026:
        for context, precision in product(XL_CONTEXTS, ("fp32", "bf16")):
            yield run_config(gpu, "2.7B", context, precision=precision)
        return
    for size, context, precision in product(COURSE_SIZES, (128, 256, 512), ("fp32", "bf16")):
        yield run_config(gpu, size, context, precision=precision)


def _model_tables(cells: Cells) -> list[Table]:
    def mib(heading: Text, metric: str) -> entries.Entry:
        return entries.of(heading, lambda cell: number((cell.value(metric) or 0) / MIB, 0), "MiB")

    columns = [
        *(entries.gib(heading, metric) for metric, heading in PREDICTED_PARTS.items()),
        mib(Text("per block", "每块"), "block_activation_memory"),
        mib(Text("residual tensor", "残差张量"), "residual_memory"),
        PEAK_PHASE,
    ]
    return [
        entries.cell_table(
            Text("predicted for a CUDA GPU, none needed", "对 CUDA GPU 的预测，无需 GPU"), cells, columns
        )
    ]


def _largest_model(cells: Cells) -> Text | None:
    """State what the largest model needs, from its configuration alone."""
    fine = sorted(having(cells, "predicted_memory"), key=lambda cell: known(cell, "predicted_memory"))
    cell = fine[-1]
    metrics = {"parameters": "parameter", "gradients": "gradient", "optimizer state": "optimizer"}
    sizes = {label: size for label, part in metrics.items() if (size := value_of(cell, f"{part}_memory"))}
    peak = gib(known(cell, "predicted_memory"))
    said = say("the largest model needs {} GiB ({})", "最大的模型需要 {} GiB（{}）", peak, naming(fine)(cell))
    if not sizes:
        return said
    each = (say("{} GiB of {}", "{1} {0} GiB", gib(size), PART_NAMES[label]) for label, size in sizes.items())
    return together(said, say("it holds {}", "其中 {}", listed(each)))


def _smallest_need(cells: Cells) -> Text | None:
    fine = having(cells, "predicted_memory")
    if len(fine) < 2:
        return None
    least = min(fine, key=lambda cell: known(cell, "predicted_memory"))
    return say(
        "the smallest of {} configurations needs {} GiB ({})",
        "{} 个配置中需求最小的为 {} GiB（{}）",
        *(str(len(fine)), gib(known(least, "predicted_memory")), naming(fine)(least)),
    )


MEMORY_MODEL = Experiment(
    name="memory_model",
    title=Text("Memory from the configuration alone", "仅由配置算出的显存"),
    question=Text(
        "How much memory does a model need, before a GPU is rented?", "租用 GPU 之前：一个模型需要多少显存？"
    ),
    grid=_model_grid,
    instrument=Instrument("memory_model", f"{MODULE}:measure_prediction"),
    tables=_model_tables,
    group="memory",
    findings=(_largest_model, _smallest_need),
    problems_2026=("memory_profiling",),
    order=40,
)
