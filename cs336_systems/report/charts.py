"""Charts of the experiments: cells in, `Chart`s out. What fits the question, no more than a few for each.

A maker leaves a chart's name empty: `charts` names it after its experiment.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from cs336_systems.record import BUS_FACTOR, GIB, MIB, Statistics
from cs336_systems.report import kernels, parallel
from cs336_systems.report.attention import Source
from cs336_systems.report.cells import PHASES, CellView
from cs336_systems.report.document import Chart, Point, Series, Text
from cs336_systems.report.layout import row_name, varying

MS = Text("ms", "毫秒")
GIB_TEXT = Text("GiB")
SIZE = Text("size", "规模")
MEASURED, PREDICTED = Text("measured", "实测"), Text("predicted", "预测")
OUT_OF_MEMORY = Text("out of memory", "显存不足")
FEW = 24
"""Bars that can be read in one chart."""


def charts(experiment: str, cells: Sequence[CellView]) -> list[Chart]:
    """Of one experiment; those of several machines apart."""
    make = _MAKERS.get(experiment)
    if make is None:
        return []
    shown = [cell for cell in cells if cell.ok or _is_oom(cell) or experiment == "train"]  # training has no end to note
    machines = list(dict.fromkeys(cell.machine for cell in shown))
    found: list[Chart] = []
    for machine in machines:
        for chart in make([cell for cell in shown if cell.machine == machine]):
            if any(series.points for series in chart.series):
                found.append(_named(chart, experiment, len(found), machine if len(machines) > 1 else ""))
    return found


def _named(chart: Chart, experiment: str, number: int, machine: str) -> Chart:
    """With a file name of its own, and the machine in its title where there are several."""
    title = Text(f"{chart.title.en} · {machine}", f"{chart.title.in_('zh')} · {machine}") if machine else chart.title
    name = f"{experiment.replace('_', '-')}-{number + 1}"
    return replace(chart, name=name, title=title)


def _is_oom(cell: CellView) -> bool:
    return cell.verdict == "OOM"


def _point(x: float | str, found: Statistics | None, unit: float = 1e-3) -> list[Point]:
    """One, or none where nothing was measured."""
    if found is None or not math.isfinite(found.mean):
        return []
    return [Point(x, found.mean / unit, found.std / unit if found.n > 1 else None, found.n)]


def _of(cell: CellView, metric: str, x: float | str, unit: float = 1e-3) -> list[Point]:
    return _point(x, cell.statistics(metric), unit)


def _series(name: Text | str, points: Iterable[list[Point]], *, dashed: bool = False) -> Series:
    text = name if isinstance(name, Text) else Text(name)
    return Series(text, [point for found in points for point in found], dashed)


# -- steps ------------------------------------------------------------------------------------------------------------

PHASE_NAMES = {
    "forward": Text("forward", "前向"),
    "loss": Text("loss", "损失"),
    "backward": Text("backward", "后向"),
    "sync": Text("sync", "同步"),
    "optimizer": Text("optimizer", "优化器"),
}


def _steps(cells: Sequence[CellView]) -> list[Chart]:
    chosen = [cell for cell in cells if cell.ok and cell.get("mode") in (None, "train-step")] or [*cells]
    shown = varying(chosen)
    if len(chosen) > FEW:
        return []
    names = [row_name(cell, shown) for cell in chosen]
    series = [
        _series(
            PHASE_NAMES[phase], (_of(cell, f"{phase}_time", name) for cell, name in zip(chosen, names, strict=True))
        )
        for phase in PHASES[:-1]
    ]
    title = Text("A training step by phase", "训练步各阶段耗时")
    kept = [s for s in series if s.points]
    return [Chart("", title, "stacked", SIZE, MS, kept, horizontal=len(chosen) > 6)]


def _warmup(cells: Sequence[CellView]) -> list[Chart]:
    """The course of steps without warm-up, by size: where it becomes flat is where measuring may begin."""
    series = []
    for cell in cells:
        if cell.ok and cell.get("warmup_steps") == 0:
            times = cell.metrics["step_time"].numbers
            points = [Point(number, 1e3 * seconds) for number, seconds in enumerate(times, start=1)]
            series.append(Series(Text(str(cell.get("size"))), points))
    title = Text("Steps from a cold start, without warm-up", "无预热时从冷启动开始的各步")
    return [Chart("", title, "lines", Text("step", "步"), MS, series, log_y=True)]


def _speedups(field: str, baseline: Any, title: Text) -> Callable[[Sequence[CellView]], list[Chart]]:
    def make(cells: Sequence[CellView]) -> list[Chart]:
        chosen = [cell for cell in cells if cell.ok and cell.get("mode") == "train-step"]
        values = [v for v in dict.fromkeys(cell.get(field) for cell in chosen) if v != baseline]
        sizes = list(dict.fromkeys(cell.get("size") for cell in chosen))
        by = {(cell.get("size"), cell.get(field)): cell.value("step_time") for cell in chosen}
        series = []
        for value in values:
            points = []
            for size in sizes:
                base, time = by.get((size, baseline)), by.get((size, value))
                if base and time:
                    points.append(Point(str(size), base / time))
            series.append(Series(Text("compiled", "编译") if value is True else Text(str(value)), points))
        times = Text(f"times as fast as {'eager' if baseline is False else baseline}", "加速比")
        return [Chart("", title, "bars", SIZE, times, series)]

    return make


def _predictions(cells: Sequence[CellView]) -> list[Chart]:
    plain = [
        cell
        for cell in cells
        if cell.get("mode") == "train-step"
        and cell.get("attention") == "reference"
        and not cell.get("checkpoint_blocks")
    ]
    shown = varying(plain)
    if not plain or len(plain) > FEW:
        return []
    names = [row_name(cell, shown) for cell in plain]
    series = [
        _series(text, (_of(cell, metric, name, GIB) for cell, name in zip(plain, names, strict=True)))
        for text, metric in ((MEASURED, "peak_memory"), (PREDICTED, "predicted_memory"))
    ]
    title = Text("Peak memory of a training step, measured and predicted", "训练步峰值显存：实测与预测")
    return [Chart("", title, "bars", SIZE, GIB_TEXT, series, horizontal=True)]


def _fast_step(cells: Sequence[CellView]) -> list[Chart]:
    panels: dict[tuple, list[CellView]] = {}
    for cell in cells:
        if cell.ok:
            panels.setdefault(tuple(cell.get(n) for n in ("size", "batch_size", "context_length")), []).append(cell)
    found = []
    for (size, batch, context), members in panels.items():
        ordered = sorted(members, key=lambda cell: -(cell.value("step_time") or 0.0))
        series = [
            _series(text, (_of(c, "step_time", variant(c)) for c in ordered if bool(c.get("model_factory")) == rival))
            for text, rival in ((Text("this package", "本工具"), False), (Text("rival", "对手"), True))
        ]
        where = f"{size}, {batch} x {context}"
        title = Text(f"A training step of {where} tokens by what is switched on", f"{where} token 的训练步，按启用部分")
        parts = Text("parts of the fast step", "启用的部分")
        kept = [s for s in series if s.points]
        # One bar has one part: stacked, it stands beside its name.
        found.append(Chart("", title, "stacked", parts, MS, kept, horizontal=True))
    return found


def variant(cell: CellView) -> str:
    """What a cell has switched on, in words."""
    if cell.get("model_factory"):
        name = "Llama of transformers" if cell.get("model_factory").endswith("llama:build") else "own model"
        return f"{name}, compiled" if cell.get("compile") else name
    parts = str(cell.get("fast")).replace(",", " + ")
    return "compiled" if cell.get("compile") else {"off": "none", "on": "all"}.get(parts, parts)


# -- profiles ---------------------------------------------------------------------------------------------------------


def _kernels(cells: Sequence[CellView]) -> list[Chart]:
    contexts = {cell.get("context_length") for cell in cells}
    context = 512 if 512 in contexts else min(contexts, default=0)
    chosen = [cell for cell in cells if cell.ok and cell.get("context_length") == context]
    if not chosen or len(chosen) > FEW:
        return []
    shown = varying(chosen)
    bars = {row_name(cell, shown): kernels.kind_seconds(cell, kernels.phases_of(cell)) for cell in chosen}
    kinds = list(dict.fromkeys(kind for seconds in bars.values() for kind in seconds))
    series = []
    for kind in kinds:
        shares = [(name, seconds.get(kind, 0.0), sum(seconds.values())) for name, seconds in bars.items()]
        if any(part for _, part, _ in shares):
            series.append(
                Series(Text(kind), [Point(name, 100 * part / total) for name, part, total in shares if total])
            )
    title = Text(f"Kernel time by kind, context {context}", f"各类内核的时间占比，context {context}")
    share = Text("% of kernel time", "内核时间占比 %")
    return [Chart("", title, "stacked", SIZE, share, series, horizontal=True)]


def _memory(cells: Sequence[CellView]) -> list[Chart]:
    chosen = [cell for cell in cells if cell.ok]
    if not chosen or len(chosen) > FEW:
        return []
    shown = varying(chosen)
    parts = {row_name(cell, shown): dict(cell.rows("part_memory", 2)) for cell in chosen}
    labels = list(dict.fromkeys(label for found in parts.values() for label in found))
    largest = max((sum(found.values()) for found in parts.values()), default=0)
    series = []
    for label in labels:
        sizes = [(name, found.get(label, 0)) for name, found in parts.items()]
        if max(size for _, size in sizes) >= 0.01 * largest:
            series.append(Series(Text(str(label)), [Point(name, size / GIB) for name, size in sizes]))
    title = Text("What the peak is made of", "峰值由什么组成")
    return [Chart("", title, "stacked", SIZE, GIB_TEXT, series, horizontal=True)]


def _checkpointing(cells: Sequence[CellView]) -> list[Chart]:
    ordered = sorted(cells, key=lambda cell: (cell.get("inner") > 0, cell.get("checkpoint_blocks"), cell.get("inner")))
    precisions = list(dict.fromkeys(cell.get("precision") for cell in cells))
    found = []
    for metric, unit, y, title in (
        (
            "peak_memory",
            GIB,
            GIB_TEXT,
            Text("Peak by blocks recomputed together", "峰值与重计算分组"),
        ),
        (
            "step_time",
            1e-3,
            MS,
            Text("Step time by blocks recomputed together", "耗时与重计算分组"),
        ),
    ):
        series = []
        for precision in precisions:
            chosen = [cell for cell in ordered if cell.get("precision") == precision]
            series.append(_series(str(precision), (_of(cell, metric, _group(cell), unit) for cell in chosen)))
        blocks = Text("blocks in a group; a/b: inside groups of a, of b", "每组块数；a/b 表示组内再分组")
        found.append(Chart("", title, "bars", blocks, y, series))
    return found


def _group(cell: CellView) -> str:
    inner = f"/{cell.get('inner')}" if cell.get("inner") else ""
    return f"{cell.get('checkpoint_blocks') or 'none'}{inner}"


# -- attention --------------------------------------------------------------------------------------------------------

TOKENS = Text("tokens", "序列长度")


def _by_length(cells: Sequence[CellView]) -> list[Chart]:
    """Time against length for the widest head, in the precision that most would use; rivals as lines."""
    if not cells:
        return []
    precisions = {cell.get("precision") for cell in cells}
    precision = "bf16" if "bf16" in precisions else next(iter(precisions))
    dims = sorted({cell.get("head_dim") for cell in cells})
    found = []
    for dim in [d for d in (64, 128) if d in dims] or dims[-1:]:
        chosen = [c for c in cells if c.get("head_dim") == dim and c.get("precision") == precision]
        chosen.sort(key=lambda cell: cell.get("seq_len"))
        names = list(dict.fromkeys(cell.get("implementation") for cell in chosen))
        times, rates = [], []
        for name in names:
            own = [cell for cell in chosen if cell.get("implementation") == name]
            times.append(Series(Text(name), [p for cell in own for p in _length_point(cell)]))
            measured = [(cell.get("seq_len"), Source(cell).rate) for cell in own if cell.ok]
            rates.append(Series(Text(name), [Point(x, rate / 1e12) for x, rate in measured if rate]))
        where = f"d = {dim}, {precision}"
        title = Text(f"Attention forward and backward, {where}", f"注意力前向与后向，{where}")
        found.append(Chart("", title, "lines", TOKENS, MS, times, log_x=True, log_y=True))
        if any(series.points for series in rates):
            title = Text(f"Attention, TFLOP/s, {where}", f"注意力 TFLOP/s，{where}")
            found.append(Chart("", title, "lines", TOKENS, Text("TFLOP/s"), rates, log_x=True, log_y=True))
    return found


def _length_point(cell: CellView) -> list[Point]:
    x = cell.get("seq_len")
    if _is_oom(cell):
        return [Point(x, 0.0, note=OUT_OF_MEMORY)]
    metric = "forward_backward_time" if "forward_backward_time" in cell.metrics else "backward_time"
    return _of(cell, metric, x)


def _rivals(cells: Sequence[CellView]) -> list[Chart]:
    names = list(dict.fromkeys(name for cell in cells if cell.ok for name in cell.get("implementations")))
    series = []
    for name in names:
        points = []
        for cell in cells:
            rate = Source(cell, f"{name}_").rate if cell.ok else None
            if rate:
                points.append(Point(_shape(cell), rate / 1e12))
        series.append(Series(Text(name), points))
    title = Text("Forward and backward, TFLOP/s, implementations in turns", "前向与后向 TFLOP/s，各实现轮流测量")
    shape = Text("batch x heads x tokens x d", "batch x 头数 x 长度 x d")
    return [Chart("", title, "bars", shape, Text("TFLOP/s"), series, horizontal=True)]


def _shape(cell: CellView) -> str:
    sizes = " x ".join(str(cell.get(name)) for name in ("batch_size", "heads", "seq_len", "head_dim"))
    return f"{sizes}{' causal' if cell.get('is_causal') else ''}"


def _leaderboard(cells: Sequence[CellView]) -> list[Chart]:
    series = [_series(Text("time", "耗时"), (_of(c, "leaderboard_time", str(c.get("implementation"))) for c in cells))]
    title = Text("The course's leaderboard test", "课程排行榜测试")
    return [Chart("", title, "bars", Text("implementation", "实现"), MS, series, horizontal=True)]


# -- several ranks ----------------------------------------------------------------------------------------------------


def _collectives(cells: Sequence[CellView]) -> list[Chart]:
    found = []
    for cell in (cell for cell in cells if cell.ok):
        series = []
        for name in cell.get("collectives"):
            seen = [(size, seconds) for size, seconds in parallel.points(cell, name) if seconds]
            factor = BUS_FACTOR[name](cell.get("ranks"))
            if seen:
                latency, rate, _ = parallel.fit(seen)
                line = [Point(size / 1e6, size / (latency + rate * size) / 1e9 * factor) for size, _ in seen]
                series.append(Series(Text(name), [Point(s / 1e6, s / t / 1e9 * factor) for s, t in seen]))
                series.append(Series(Text(f"{name}: fit", f"{name}：拟合"), line, dashed=True))
        where = f"{cell.get('ranks')} ranks, {cell.get('backend')}"
        title = Text(f"Bus bandwidth by size, {where}", f"总线带宽与数组大小，{where}")
        axes = Text("size of the whole array, MB", "整个数组 MB"), Text("busbw, GB/s")
        found.append(Chart("", title, "lines", *axes, series, log_x=True, log_y=True))
    return found


def _ddp(cells: Sequence[CellView]) -> list[Chart]:
    found = []
    for cell in (cell for cell in cells if cell.ok):
        parts: dict[str, list[Point]] = {"communication": [], "exposed": []}
        for row in (row for row in parallel.exposures(cell) if row.name != "none"):
            if row.alone is not None:
                parts["communication"].append(Point(row.name, 1e3 * row.alone))
            if row.exposed is not None:
                parts["exposed"].append(Point(row.name, 1e3 * max(0.0, row.exposed)))
        texts = {"communication": Text("communication alone", "单独通信"), "exposed": Text("exposed", "暴露的通信")}
        series = [Series(texts[name], points) for name, points in parts.items()]
        title = Text(f"Averaging gradients: {parallel.where(cell)}", f"梯度平均：{parallel.where(cell)}")
        found.append(Chart("", title, "bars", Text("wrapper", "封装"), MS, series))
    return found


def _bucket_model(cells: Sequence[CellView]) -> list[Chart]:
    found = []
    for cell in (cell for cell in cells if cell.ok):
        rows = parallel.bucket_rows(cell)
        series = [
            Series(MEASURED, [Point(row.size / MIB, 1e3 * row.measured) for row in rows]),
            Series(PREDICTED, [Point(row.size / MIB, 1e3 * row.predicted) for row in rows], dashed=True),
            Series(Text("S / (n w) + n o"), [Point(row.size / MIB, 1e3 * row.formula) for row in rows], dashed=True),
        ]
        title = Text("Exposed communication by bucket size", "暴露的通信与桶大小")
        found.append(Chart("", title, "lines", Text("bucket, MB", "桶 MB"), MS, series, log_x=True))
    return found


def _sharding(cells: Sequence[CellView]) -> list[Chart]:
    parts = {
        "parameter": Text("parameters", "参数"),
        "gradient": Text("gradients", "梯度"),
        "optimizer": Text("optimizer state", "优化器状态"),
    }
    found = []
    for cell in (cell for cell in cells if cell.ok):
        series = [
            Series(text, [Point(n, (cell.value(f"{n}: {part}_memory") or 0.0) / MIB) for n in cell.get("arrangements")])
            for part, text in parts.items()
        ]
        title = Text(f"Memory on the fullest rank: {parallel.where(cell)}", f"占用最多的 rank：{parallel.where(cell)}")
        wrapper = Text("arrangement", "方案")
        found.append(Chart("", title, "stacked", wrapper, Text("MiB"), series))
    return found


def _plan(cells: Sequence[CellView]) -> list[Chart]:
    found = []
    for cell in (cell for cell in cells if cell.ok):
        series = []
        for label, part in parallel.PLAN_PARTS.items():
            sizes = [(name, (cell.value(f"{name}: {part}_memory") or 0.0) / GIB) for name in cell.get("strategies")]
            series.append(Series(Text(label), [Point(name, size) for name, size in sizes]))
        title = Text(f"Bytes on each GPU: {parallel.plan_where(cell)}", f"每张 GPU 的字节：{parallel.plan_where(cell)}")
        strategy = Text("strategy", "策略")
        found.append(Chart("", title, "stacked", strategy, GIB_TEXT, series, horizontal=True))
    return found


# -- training ---------------------------------------------------------------------------------------------------------


def _train(cells: Sequence[CellView]) -> list[Chart]:
    """Loss curves, a line for each run; a run's cells are the stretches between two lines of its log."""
    runs: dict[str, dict[int, float]] = {}
    for cell in cells:
        record = cell.metrics.get("loss")
        if record is not None:
            first = cell.get("first_step") or 1
            runs.setdefault(_run_name(cell), {}).update({first + i: v for i, v in enumerate(record.numbers)})
    series = [
        Series(Text(name), [Point(step, value) for step, value in sorted(curve.items())])
        for name, curve in runs.items()
    ]
    title, axes = Text("Loss curves", "损失曲线"), (Text("step", "步"), Text("loss", "损失"))
    return [Chart("", title, "lines", *axes, series, log_y=True)]


def _run_name(cell: CellView) -> str:
    return str(cell.get("output") or "run").rstrip("/").rsplit("/", 1)[-1]


_MAKERS: dict[str, Callable[[Sequence[CellView]], list[Chart]]] = {
    "bench": _steps,
    "end_to_end": _steps,
    "warmup": _warmup,
    "precision": _speedups("precision", "fp32", Text("Speed-up over fp32 by size", "各规模相对 fp32 的加速比")),
    "compile": _speedups("compile", False, Text("Speed-up by torch.compile", "torch.compile 的加速比")),
    "fast_step": _fast_step,
    "peak_memory": _predictions,
    "kernels": _kernels,
    "memory": _memory,
    "checkpointing": _checkpointing,
    "pytorch_attention": _by_length,
    "flash": _by_length,
    "attention_rivals": _rivals,
    "flash_leaderboard": _leaderboard,
    "collectives": _collectives,
    "ddp": _ddp,
    "bucket_model": _bucket_model,
    "optimizer_sharding": _sharding,
    "fsdp": _sharding,
    "parallel_plan": _plan,
    "train": _train,
}
