"""Experiments on the time of kernels by phase and kind, and on the time and the FLOPs of the parts of attention."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from cs336_systems.config import COURSE_SIZES, MODES, RunConfig
from cs336_systems.experiments.spec import (
    HANDOUT_2026,
    Config,
    Experiment,
    Instrument,
    label_step,
    run_config,
    step_memory,
)
from cs336_systems.measure.readers.kernel_classes import (
    ELEMENTWISE,
    KINDS,
    MATMUL,
    OUTPUT,
    REDUCTION,
    SCORES,
    SOFTMAX,
    classify,
    compared_kinds,
)
from cs336_systems.measure.readers.recorded_tables import KernelRow, KindRow, PartRow, rows_of
from cs336_systems.predict.fit import CONTEXTS_2026, gpu_bytes, largest_contexts, usable_bytes
from cs336_systems.predict.time.on_gpu import Predicted, predicted_of
from cs336_systems.predict.time.time_model import FAST_KERNELS
from cs336_systems.report import terms
from cs336_systems.report.cells import PHASES, CellView, grouped
from cs336_systems.report.document import Chart, Point, Series
from cs336_systems.report.names import size_name
from cs336_systems.report.phrases import (
    MODE_WORDS,
    compared,
    in_mode,
    named_values,
    naming,
    ranging,
    scale_of,
    span,
    together,
)
from cs336_systems.report.points import FEW, bar_name
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import (
    failed_row,
    key_columns,
    key_texts,
    ms,
    number,
    percent,
    remarks_on,
    rows_table,
    setting,
    shortened,
    signed,
    title_of,
    titled,
    value_text,
    varying,
)
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, listed, say

SOFTMAX_FLOPS = 3
"""FLOPs of softmax for one score, as the handout counts: subtract the maximum, exponentiate, divide."""
USUAL_CONTEXT = 512
KIND_NAMES = {
    kind: Text(kind, zh)
    for kind, zh in {
        "matmul": "矩阵乘",
        "elementwise": "逐元素",
        "softmax/reduction": "softmax/归约",
        "attention": "注意力",
        "copy": "拷贝",
        "communication": "通信",
        "optimizer": "优化器",
        "other": "其他",
        "unknown": "未知",
    }.items()
}

PROFILED_2026 = ("small", "2.7B")
"""The 2026 handout asks for two sizes; 2.7B is its xl."""
COURSE_GPU = "H100"
"""GPU whose memory limits the contexts where the memory of the present GPU is not known."""

# -- grids and instrument ---------------------------------------------------------------------------------------------


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    if preset == "quick":
        for mode in ("inference", "train-step"):
            yield run_config(base, "small" if base.device_type == "cuda" else "tiny", mode=mode)
        return
    sizes: tuple[str, ...] = COURSE_SIZES
    contexts: tuple[int, ...] = (128, 256, 512, 1024)
    if preset == HANDOUT_2026:
        sizes, contexts = PROFILED_2026, CONTEXTS_2026
    for size, context, mode in product(sizes, contexts, ("inference", "train-step")):
        yield run_config(base, size, context, mode=mode)


def largest_that_fit(configs: Sequence[Config], gpu_memory: int | None) -> Sequence[Config]:
    """In the grid of 2026, keep the three largest contexts with which a training step of the size fits."""
    if {config["model"]["context_length"] for config in configs} != set(CONTEXTS_2026):
        return configs
    budget = usable_bytes(gpu_memory or gpu_bytes(COURSE_GPU))
    chosen: dict[str, list[int]] = {}
    for config in configs:
        if config["size"] not in chosen:
            step = dataclasses.replace(RunConfig.of(config), mode="train-step")
            chosen[config["size"]] = largest_contexts(step, budget)
    return [config for config in configs if config["model"]["context_length"] in chosen[config["size"]]]


def _inference_grid(preset: str, base: RunConfig) -> Iterable[Config]:
    return (config for config in _grid(preset, base) if config["mode"] == "inference")


KERNEL_PROFILE = Instrument(
    name="kernels",
    measure="cs336_systems.experiments.kernels.measure_kernels:measure_kernels",
    label=label_step,
    memory=step_memory,
    keeps_files=True,
)

# -- recorded tables --------------------------------------------------------------------------------------------------


def _kinds(cell: CellView, phase: str) -> list[KindRow]:
    return rows_of(cell.samples(f"kind_table: {phase}"), KindRow)


def _kernels(cell: CellView, phase: str) -> list[KernelRow]:
    return rows_of(cell.samples(f"kernel_table: {phase}"), KernelRow)


def phases_of(cell: CellView) -> list[str]:
    return [phase for phase in PHASES if f"kind_table: {phase}" in cell.metrics]


def kind_seconds(cell: CellView, phases: Sequence[str]) -> dict[str, float]:
    """Return the seconds of each kind of kernel in these phases of a step."""
    found = dict.fromkeys(KINDS, 0.0)
    for phase in phases:
        for row in _kinds(cell, phase):
            found[row.kind] += row.seconds
    return found


# -- tables -----------------------------------------------------------------------------------------------------------


def kernel_tables(cells: Cells) -> list[Table]:
    """Return kernels by kind and by name; for several cells only the kernel that takes most time."""
    ok = [cell for cell in cells if cell.ok]
    tables = [_by_kind(cells), *_against_prediction(ok)]
    tables += [_shares_by_mode(ok)] if len({cell.get("mode") for cell in ok}) > 1 else []
    if len(ok) == 1:
        tables += [_by_name(ok[0], phase) for phase in phases_of(ok[0])]
    else:
        tables.append(_top(cells))
    return tables


def _by_kind(cells: Cells) -> Table:
    used = [kind for kind in KINDS if any(kind_seconds(cell, phases_of(cell))[kind] for cell in cells if cell.ok)]
    on_gpu = any(cell.value("kernels_on_gpu") for cell in cells if cell.ok)
    columns = [word(terms.PHASE), Column(Text("wall", "墙钟"), "ms"), Column(Text("kernels", "内核"), "ms")]
    columns += [Column(Text("GPU idle", "GPU 空闲"))] if on_gpu else []
    columns += [Column(Text("launches", "启动次数")), *(Column(KIND_NAMES[kind]) for kind in used)]

    def rows(cell: CellView) -> Iterable[list[str | Text]]:
        if not cell.ok:
            yield failed_row(cell, columns)
        for phase in phases_of(cell):
            seconds = kind_seconds(cell, [phase])
            total = sum(seconds.values())
            idle = [percent(_idle_share(cell, phase))] if on_gpu else []
            count = number(sum(row.kernels for row in _kinds(cell, phase)), 0)
            shares = [percent(seconds[kind] / total if total else 0.0) for kind in used]
            yield [terms.phase_name(phase), ms(cell.value(f"{phase}_time")), ms(total), *idle, count, *shares]

    what = Text("time by kind of kernel", "各类内核的时间")
    return rows_table(what, cells, columns, rows, notes=_kind_notes(cells, on_gpu))


def _against_prediction(cells: Cells) -> list[Table]:
    """Return measured and predicted kernel time of fast steps by kind, and the kind with the largest difference."""
    predicted = [(cell, found) for cell in cells if phases_of(cell) and (found := _prediction(cell))]
    if not predicted:
        return []
    times = {id(cell): found.time.by_kind() for cell, found in predicted}
    columns = [word(Text("kernels", "内核")), Column(terms.MEASURED, "ms"), Column(terms.PREDICTED, "ms")]
    columns += [Column(terms.ERROR), word(Text("largest difference", "差异最大"))]

    def rows(cell: CellView) -> Iterable[list[str | Text]]:
        compared = compared_kinds(kind_seconds(cell, phases_of(cell)), times[id(cell)])
        furthest = max(compared, key=lambda row: abs(row.measured - row.predicted))
        for row in compared:
            error = signed(row.predicted / row.measured - 1 if row.measured else None, 1)
            named = Text("yes", "是") if row is furthest else ""
            yield [KIND_NAMES[row.kind], ms(row.measured), ms(row.predicted), error, named]

    what = Text("kernel time of fast steps, measured and predicted", "快速步的内核时间，实测与预测")
    note = Text(
        "one step under the profiler, whose kernels may run at another clock than those of a step in training",
        "带分析器的一步，其内核的时钟频率可能与训练时不同",
    )
    return [rows_table(what, [cell for cell, _ in predicted], columns, rows, notes=[note])]


def _prediction(cell: CellView) -> Predicted | None:
    """Return the predicted kernels of a fast step in a CUDA graph, also for a profile, which runs without the graph."""
    parts = set(str(cell.get("fast")).split(","))
    is_fast = parts == {"on"} or parts >= FAST_KERNELS
    return predicted_of({**cell.config, "fast": "on"}, cell.environment.gpu) if is_fast else None


def _kind_notes(cells: Cells, on_gpu: bool) -> list[Text]:
    notes = [
        Text(
            "wall: without the profiler; kernels: their times added up, of one step; shares are of these",
            "墙钟：不带分析器；内核：一步之内各内核时间之和；占比以此为准",
        )
    ]
    if on_gpu:
        notes.append(
            Text(
                "GPU idle: share of the phase, by CUDA events without the profiler, in which no kernel ran",
                "GPU 空闲：不带分析器、以 CUDA event 计，阶段中没有内核运行的占比",
            )
        )
    ok = [cell for cell in cells if cell.ok]
    if any(not cell.value("kernels_on_gpu") for cell in ok):
        notes.append(
            Text(
                "no GPU: CPU operators are shown in place of kernels, each with its self time",
                "没有 GPU：以 CPU 算子代替内核，每个只计不在其他算子中的时间",
            )
        )
    total = sum(cell.value("kernel_time") or 0.0 for cell in ok)
    if total:
        lost = [sum(cell.value(name) or 0.0 for cell in ok) / total for name in _UNASSIGNED]
        notes.append(
            say(
                "of all kernel time {} is of a known kind and {} in a phase",
                "全部内核时间中 {} 属于已知类别，{} 属于某个阶段",
                *(f"{1 - share:.2%}" for share in lost),
            )
        )
    return [*notes, *remarks_on(cells)]


_UNASSIGNED = ("unknown_kernel_time", "kernel_time_outside_phases")


def _idle_share(cell: CellView, phase: str) -> float | None:
    events, busy = cell.value(f"{phase}_event_time"), cell.value(f"busy_time: {phase}")
    return max(0.0, 1 - busy / events) if events and busy is not None else None


def _shares_by_mode(cells: Cells) -> Table:
    """Return the shares of the main kinds of kernels for the same model in several modes."""
    modes = list(dict.fromkeys(cell.get("mode") for cell in cells))
    groups: dict[tuple, dict[str, CellView]] = {}
    shown = [name for name in varying(cells) if name != "mode"]
    for cell in cells:
        groups.setdefault(tuple(key_texts(cell, shown)), {})[cell.get("mode")] = cell
    kinds = (MATMUL, REDUCTION, ELEMENTWISE)
    names = product((KIND_NAMES[kind] for kind in kinds), (value_text("mode", str(mode)) for mode in modes))
    columns = [Column(say("{}, {}", "{}，{}", *pair)) for pair in names]
    rows = []
    for key, by_mode in groups.items():
        shares = []
        for kind, mode in product(kinds, modes):
            found = kind_seconds(by_mode[mode], phases_of(by_mode[mode])) if mode in by_mode else {}
            shares.append(percent(found[kind] / (sum(found.values()) or 1.0)) if found else "")
        rows.append([*key, *shares])
    what = Text("share of kernel time by mode", "各模式下内核时间的占比")
    title = title_of(cells[0].experiment, what, cells, [*shown, "mode"])
    return Table(title, [*key_columns(shown), *columns], rows)


def _top(cells: Cells) -> Table:
    """Return a table of the kernel with the largest time, in forward and in forward plus backward."""
    columns = [word(Text("of", "范围")), Column(terms.SHARE), Column(Text("launches", "启动次数")), word(terms.KERNEL)]

    def rows(cell: CellView) -> Iterable[list[str | Text]]:
        both = [phase for phase in phases_of(cell) if phase != "optimizer"]
        for what, phases in ((terms.FORWARD, ["forward"]), (terms.FORWARD_AND_BACKWARD, both)):
            if not cell.ok or (what != terms.FORWARD and phases == ["forward"]):
                continue
            seconds: defaultdict[str, float] = defaultdict(float)
            counts: defaultdict[str, float] = defaultdict(float)
            for row in (row for phase in phases for row in _kernels(cell, phase)):
                seconds[row.name] += row.seconds
                counts[row.name] += row.kernels
            if seconds:
                name = max(seconds, key=lambda name: seconds[name])
                share = seconds[name] / (sum(kind_seconds(cell, phases).values()) or 1.0)
                yield [what, percent(share), number(counts[name], 0), shortened(name)]

    return rows_table(Text("the kernel that takes most", "耗时最多的内核"), cells, columns, rows)


def _by_name(cell: CellView, phase: str) -> Table:
    """Return the kernels of a phase in the columns of `nsys stats`."""
    columns = [Column(terms.SHARE), Column(terms.TOTAL, "ms"), Column(Text("instances", "次数"))]
    columns += [Column(name, "us") for name in (terms.MEAN, terms.MEDIAN, terms.MIN, terms.MAX)]
    columns += [word(terms.KIND), word(terms.NAME)]
    whole = sum(kind_seconds(cell, [phase]).values()) or 1.0  # a foreign trace may hold no time at all
    rows = []
    for name, count, total, median, least, most in _kernels(cell, phase):
        times = [number(t * 1e6, 1) for t in (total / count, median, least, most)]
        rows.append([percent(total / whole), ms(total), number(count, 0), *times, classify(name), shortened(name)])
    what = say("{}, by name", "{}，按名称", terms.PHASE_NAMES.get(phase, Text(phase)))
    return Table(titled(cell.experiment, what, [cell.machine, cell.name]), columns, rows)


# -- charts -----------------------------------------------------------------------------------------------------------


IDLE_SHARE = Text("% of the time without a kernel", "没有内核运行的时间占比 %")


def _charts(cells: Cells) -> list[Chart]:
    """Chart the shares of the kinds at one context, for each mode, training steps first; and the time without a
    kernel."""
    chosen = sorted(at_one_context(cells), key=lambda cell: cell.get("mode") != MODES[-1])
    if len(chosen) > FEW:
        return []
    modes = grouped(chosen, lambda cell: cell.get("mode"))
    return [*map(_kinds_chart, modes.values()), _idle_chart(modes)]


def at_one_context(cells: Cells) -> list[CellView]:
    """Return the cells, by size, at the context length that most cells share; on a tie the usual length, or the
    shortest."""
    fine = sorted((cell for cell in cells if cell.ok), key=scale_of)
    cells_at = Counter(cell.get("context_length") for cell in fine)
    context = min(cells_at, key=lambda one: (-cells_at[one], one != USUAL_CONTEXT, one), default=0)
    return [cell for cell in fine if cell.get("context_length") == context]


def _kinds_chart(cells: Cells) -> Chart:
    """Chart a bar for each of several cells, or for each phase of a single one."""
    shown = varying(cells)
    bars = {bar_name(cell, shown): kind_seconds(cell, phases_of(cell)) for cell in cells}
    where, what = [_where(cells[0])], terms.SIZE
    if len(cells) == 1:
        where, what = [*bars, *where], terms.PHASE
        bars = {terms.PHASE_NAMES[phase]: kind_seconds(cells[0], [phase]) for phase in phases_of(cells[0])}
    series = []
    for kind in KINDS:
        points = [
            Point(say("{}, {} ms", "{}，{} ms", name, number(1e3 * total, 1)), 100 * seconds[kind] / total)
            for name, seconds in bars.items()
            if (total := sum(seconds.values()))
        ]
        if any(point.y for point in points):
            series.append(Series(KIND_NAMES[kind], points))
    title = say("Kernel time by kind: {}", "各类内核的时间占比：{}", listed(where, (", ", "，")))
    share = Text("% of kernel time", "内核时间占比 %")
    note = Text("beside each name: its kernel time in one step", "名称旁：一步的内核时间")
    return Chart("", title, "stacked", what, share, series, horizontal=True, digits=1, note=note)


def _where(cell: CellView) -> Text:
    context = setting("context_length", str(cell.get("context_length")))
    return say("{}, {}", "{}，{}", MODE_WORDS.get(str(cell.get("mode")), Text("step", "一步")), context)


def _idle_chart(modes: Mapping[str, Cells]) -> Chart:
    """Chart the share of a step's phases in which no kernel ran, by size and mode."""
    series = []
    for mode, members in modes.items():
        found = [(size_name(cell.get("size")), _idle_in_step(cell)) for cell in members]
        points = [Point(size, 100 * share) for size, share in found if share is not None]
        series.append(Series(MODE_WORDS.get(str(mode), Text(str(mode))), points))
    title = Text("GPU idle during a step", "一步中 GPU 的空闲")
    note = Text("CUDA events less kernels, with a wait after every phase", "CUDA event 减去内核时间，每个阶段之后等待")
    return Chart("", title, "bars", terms.SIZE, IDLE_SHARE, series, horizontal=True, digits=1, note=note)


def _idle_in_step(cell: CellView) -> float | None:
    """Return the share of all phases together in which no kernel ran; see `_idle_share`."""
    pairs = [(cell.value(f"{phase}_event_time"), cell.value(f"busy_time: {phase}")) for phase in phases_of(cell)]
    both = [(events, busy) for events, busy in pairs if events and busy is not None]
    if not both or not cell.value("kernels_on_gpu"):
        return None
    return max(0.0, 1 - sum(busy for _, busy in both) / sum(events for events, _ in both))


# -- findings ---------------------------------------------------------------------------------------------------------


def _matmul_share(cells: Cells) -> Text | None:
    said = None
    for mode, chosen in grouped((cell for cell in cells if cell.ok), lambda cell: cell.get("mode")).items():
        shares = named_values(chosen, lambda cell: _shares(cell).get(MATMUL) or None)
        if shares:
            own = ("in {1} matmuls take {0} of kernel time", "{1}中矩阵乘占内核时间的 {0}")
            said = together(said, ranging(*own, shares, percent, in_mode(mode)))
    return said


def _shares(cell: CellView) -> Mapping[str, float]:
    """Return the share of each kind in a step's kernel time."""
    seconds = kind_seconds(cell, phases_of(cell))
    total = sum(seconds.values())
    return {kind: found / total for kind, found in seconds.items()} if total else {}


def _other_kinds(cells: Cells) -> Text | None:
    """State the largest shares of the two other kinds that take most of a step, above 2%."""
    fine = [cell for cell in cells if cell.ok]
    mode = next((mode for mode in reversed(MODES) if any(cell.get("mode") == mode for cell in fine)), None)
    chosen = [cell for cell in fine if cell.get("mode") == mode]
    most: dict[str, tuple[float, CellView]] = {}
    for cell in chosen:
        for kind, share in _shares(cell).items():
            if kind != MATMUL and share > max(0.02, most.get(kind, (0.0, cell))[0]):
                most[kind] = share, cell
    name = naming(chosen)
    each = [
        say("{} kernels take up to {} ({})", "{} 内核最多占 {}（{}）", KIND_NAMES[kind], percent(share), name(cell))
        for kind, (share, cell) in sorted(most.items(), key=lambda item: -item[1][0])[:2]
    ]
    if not each:
        return None
    shares = listed(each, (" and ", "，"))
    return say("apart from matmuls, in {} {}", "除矩阵乘外，{} 中 {}", in_mode(mode), shares)


def _idle(cells: Cells) -> Text | None:
    found = named_values(cells, lambda cell: _idle_share(cell, "forward") if cell.value("busy_time: forward") else None)
    return ranging("in forward the GPU is idle for {} of the time", "前向中 GPU 空闲时间占 {}", found, percent)


KERNELS = Experiment(
    name="kernels",
    title=Text("Kernels by phase and kind", "各阶段与各类别的内核"),
    question=Text("Which kernels take the time, by phase and kind?", "按阶段和类别，时间花在哪些内核上？"),
    grid=_grid,
    fitting=largest_that_fit,
    instrument=KERNEL_PROFILE,
    profile=lambda run: None,
    tables=kernel_tables,
    charts=_charts,
    findings=(_matmul_share, _other_kinds, _idle),
    group="speed",
    problems_2026=("nsys_profile",),
    order=10,
)

# -- inside attention -------------------------------------------------------------------------------------------------


def _attention_parts(cell: CellView) -> dict[tuple[str, bool], float]:
    """Return seconds in forward by (part of attention, is a matmul)."""
    found = {(part, matmul): 0.0 for part in (SCORES, SOFTMAX, OUTPUT) for matmul in (True, False)}
    for part, kind, seconds in rows_of(cell.samples("part_table: forward"), PartRow):
        if part in (SCORES, SOFTMAX, OUTPUT):
            found[part, kind == MATMUL] += seconds
    return found


OPERATIONS = (
    Text("scores matmul", "scores 矩阵乘"),
    Text("scale and mask", "缩放与掩码"),
    Text("softmax"),
    Text("final matmul", "最后的矩阵乘"),
)


def _operations(cell: CellView) -> list[float]:
    """Return the seconds of each of `OPERATIONS`."""
    parts = _attention_parts(cell)
    softmax = parts[SOFTMAX, True] + parts[SOFTMAX, False]
    return [parts[SCORES, True], parts[SCORES, False], softmax, parts[OUTPUT, True]]


def _attention_tables(cells: Cells) -> list[Table]:
    """Return the three steps of naive attention in forward: time beside FLOPs."""
    columns = [Column(name, "ms") for name in OPERATIONS]
    columns += [Column(Text("matmul / softmax, time", "矩阵乘 / softmax，时间"))]
    columns += [Column(Text("matmul / softmax, FLOPs", "矩阵乘 / softmax，FLOPs"))]

    def rows(cell: CellView) -> Iterable[list[str | Text]]:
        if not cell.ok:
            yield failed_row(cell, columns)
            return
        scores, around, softmax, final = _operations(cell)
        over = f"{scores / softmax:.2f}x" if softmax else ""
        yield [*map(ms, (scores, around, softmax, final)), over, f"{_flops_ratio(cell):.1f}x"]

    notes = [
        Text(
            "of all blocks, in one forward pass; ratios: the scores' matmul over softmax",
            "一次前向中所有块之和；比值：scores 矩阵乘比 softmax",
        ),
        say(
            "FLOPs: 2 head_dim for a score, {} for its softmax: bytes, not FLOPs, are what softmax waits for",
            "FLOPs：每个 score 2 head_dim，其 softmax {}：softmax 等的是字节而不是 FLOPs",
            str(SOFTMAX_FLOPS),
        ),
    ]
    what = Text("inside attention, forward", "注意力内部，前向")
    return [rows_table(what, cells, columns, rows, notes=[*notes, *remarks_on(cells)])]


def _attention_charts(cells: Cells) -> list[Chart]:
    chosen = at_one_context(cells)
    if not chosen or len(chosen) > FEW:
        return []
    shown = varying(chosen)
    times = [(bar_name(cell, shown), _operations(cell)) for cell in chosen]
    series = [
        Series(name, [Point(bar, 1e3 * seconds[index]) for bar, seconds in times if any(seconds)])
        for index, name in enumerate(OPERATIONS)
    ]
    title = say("Inside attention: {}", "注意力内部：{}", _where(chosen[0]))
    note = Text("all blocks, one forward pass", "一次前向中所有块之和")
    return [Chart("", title, "stacked", terms.SIZE, terms.MS, series, horizontal=True, note=note)]


def _flops_ratio(cell: CellView) -> float:
    """Return the FLOPs of the scores' matmul over those of softmax."""
    return 2 * cell.get("d_model") / cell.get("num_heads") / SOFTMAX_FLOPS


def _time_against_flops(cells: Cells) -> Text | None:
    def over_softmax(cell: CellView) -> float | None:
        parts = _attention_parts(cell)
        scores, softmax = parts[SCORES, True], parts[SOFTMAX, False]
        return scores / softmax if scores and softmax else None

    flops = [_flops_ratio(cell) for cell in cells if cell.ok and over_softmax(cell)]
    said = say(
        "the scores' matmul has {} times the FLOPs of softmax",
        "scores 矩阵乘的 FLOPs 是 softmax 的 {} 倍",
        span(flops, "{:.1f}".format),
    )
    slower = [(1 / ratio, name) for ratio, name in named_values(cells, over_softmax)]
    return together(said, compared(Text("it", "它"), Text("softmax"), slower))


def _around_matmuls(cells: Cells) -> Text | None:
    def share_of_rest(cell: CellView) -> float | None:
        parts = _attention_parts(cell)
        rest = sum(seconds for (_, matmul), seconds in parts.items() if not matmul)
        return rest / sum(parts.values()) if rest else None

    return ranging(
        "scale, mask and softmax take {} of the time of attention",
        "缩放、掩码与 softmax 占注意力时间的 {}",
        named_values(cells, share_of_rest),
        lambda share: percent(share, 0),
    )


ATTENTION_OPS = Experiment(
    name="attention_ops",
    title=Text("Inside attention", "注意力内部"),
    question=Text(
        "Inside attention, what takes the time and what the FLOPs?", "注意力内部，时间花在哪里，FLOPs 花在哪里？"
    ),
    grid=_inference_grid,
    fitting=largest_that_fit,
    instrument=KERNEL_PROFILE,
    tables=_attention_tables,
    charts=_attention_charts,
    findings=(_time_against_flops, _around_matmuls),
    group="attention",
    problems_2026=("nsys_profile",),
    order=20,
)
