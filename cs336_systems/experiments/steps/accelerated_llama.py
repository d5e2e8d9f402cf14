"""transformers' Llama made faster: its own code, torch.compile, Liger and `accelerate`, interleaved in one process."""

import dataclasses
import importlib.util
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cs336_systems.config import RunConfig
from cs336_systems.experiments.attention.implementations import failure
from cs336_systems.experiments.spec import Config, Experiment, Instrument, require_package, run_config
from cs336_systems.report import entries, terms
from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Chart, Highlight
from cs336_systems.report.phrases import beside, compared, known, memory_beside, scale_of, size_of, together
from cs336_systems.report.points import measured, series_of
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import (
    FIELDS,
    gib,
    key_texts,
    ms,
    number,
    remarks_on,
    row_name,
    signed,
    title_of,
    varying,
)
from cs336_systems.table import Table, word
from cs336_systems.text import Text, listed, say

NAMES = {
    "plain": Text("transformers"),
    "compiled": Text("torch.compile"),
    "liger": Text("Liger"),
    "ours": Text("ours", "本项目"),
    "packed": Text("ours, packed optimizer", "本项目，打包优化器"),
}
OURS = ("ours", "packed")
RIVALS = ("liger", "compiled", "plain")
"""Implementations that ours is compared with, the fastest first."""
VOCABULARY = 32_000
TIME, PEAK = "step_time", "peak_memory"

# -- grid -------------------------------------------------------------------------------------------------------------


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    require_package("accelerate", "transformers")
    on_cuda = base.device_type == "cuda"
    names = ["plain", "ours", "packed"]
    if on_cuda:  # compilation for a CPU takes minutes, and Liger's kernels need a GPU
        names += ["compiled", *(["liger"] if importlib.util.find_spec("liger_kernel") is not None else [])]
    # A multiple of twice the number of names, so that each follows every other equally often.
    more = {"implementations": names, "rounds": 2 if preset == "quick" else 2 * len(names)}
    base = dataclasses.replace(base, attention="auto")
    if preset == "quick":
        yield {**run_config(base, "small" if on_cuda else "tiny", precision="bf16" if on_cuda else "fp32"), **more}
        return
    base = dataclasses.replace(base, precision="bf16", batch_size=4)
    for size in ("large", "2.7B"):
        run = run_config(base, size, 2048)
        yield {**run, "model": {**run["model"], "vocab_size": VOCABULARY}, **more}


def _label(config: Mapping[str, Any], experiments: Sequence[str]) -> str:
    run = RunConfig.of(config)
    return f"{run.size} {run.batch_size} x {run.model.context_length} {run.precision}"


# -- tables and charts ------------------------------------------------------------------------------------------------


def _views(cell: CellView) -> dict[str, CellView]:
    """Return the metrics of each implementation in the order of NAMES, also of those that failed."""
    return {name: cell.variant(name) for name in NAMES if name in cell.get("implementations")}


def _fine(cell: CellView) -> dict[str, CellView]:
    """Return the implementations that have a time."""
    return {name: view for name, view in _views(cell).items() if not failure(view) and view.median(TIME)}


def _tables(cells: Cells) -> list[Table]:
    shown = varying(cells, always=("size",))
    rows = [row for cell in cells for row in _rows(cell, shown)]
    columns = [word(FIELDS[name]) for name in (*shown, "implementation")]
    columns += [entry.column for entry in _columns(None)]
    failed = [
        say("{} {}: {}", "{} {}：{}", row_name(cell, shown), NAMES[name], failure(view))
        for cell in cells
        for name, view in _views(cell).items()
        if cell.ok and failure(view)
    ]
    what = Text("a training step of transformers' Llama", "transformers 的 Llama 的训练步")
    title = title_of(cells[0].experiment, what, cells, shown)
    return [Table(title, columns, rows, [*NOTES, *failed, *remarks_on(cells)])]


def _rows(cell: CellView, shown: Sequence[str]) -> Iterator[list[str | Text]]:
    """Yield a row for each implementation, or its verdict if it failed."""
    views = _views(cell)
    columns = _columns(views.get("plain"))
    for name, view in views.items():
        failed = ["error" if cell.ok else cell.verdict, *[""] * (len(columns) - 1)]
        yield [
            *key_texts(cell, shown),
            NAMES[name],
            *(failed if failure(view) else [entry.text(view) for entry in columns]),
        ]


def _columns(plain: CellView | None) -> list[entries.Entry]:
    def over_plain(view: CellView, metric: str) -> float | None:
        base, own = plain.median(metric) if plain else None, view.median(metric)
        return own / base if own and base else None

    def speed_up(view: CellView) -> str:
        share = over_plain(view, TIME)
        return f"{1 / share:.2f}x" if share else ""

    def off(metric: str) -> Any:
        return lambda view: signed(share - 1, 3) if (share := over_plain(view, metric)) else ""

    return [
        entries.of(terms.STEP, lambda view: ms(view.median(TIME)), "ms"),
        entries.std(terms.STD, TIME),
        entries.of(terms.SPEED_UP, speed_up),
        entries.of(terms.TOKENS_PER_SECOND, lambda view: number(_tokens(view) / _seconds(view), 0)),
        entries.gib(terms.PEAK, PEAK),
        entries.of(terms.MEMORY, lambda view: f"{share:.2f}x" if (share := over_plain(view, PEAK)) else ""),
        entries.of(Text("loss, difference", "损失差异"), off("loss")),
        entries.of(Text("gradient norm, difference", "梯度范数差异"), off("gradient_norm")),
    ]


NOTES = [
    Text(
        "medians of whole steps with AdamW (fused), implementations interleaved; weights, gradients and AdamW's state "
        "have the precision in the title",
        "完整训练步（含融合 AdamW）的中位数，各实现交替测量；权重、梯度与 AdamW 状态均为标题中的精度",
    ),
    Text(
        "differences of loss and gradient norm are those from transformers, on the first weights and one batch",
        "损失与梯度范数的差异相对 transformers，在初始权重与同一批数据上",
    ),
]


def _charts(cells: Cells) -> list[Chart]:
    found = []
    for cell in (cell for cell in cells if cell.ok):
        fine = _fine(cell)
        title = say("A training step of transformers' Llama, {}", "transformers 的 Llama 的训练步，{}", _work(cell))
        series = [
            series_of(who, (measured(view, TIME, NAMES[name]) for name, view in fine.items() if (name in OURS) == own))
            for who, own in ((Text("PyTorch"), False), (Text("this package", "本项目"), True))
        ]
        places = [NAMES[name].en for name in fine]
        what = Text("implementation", "实现")
        note = Text("means, implementations interleaved", "均值，各实现交替测量")
        found.append(
            Chart("", title, "stacked", what, terms.MS, series, horizontal=True, places=places, digits=1, note=note)
        )
    return found


def _work(cell: CellView) -> Text:
    return say("{}, {} x {} tokens", "{}，{} x {} 个 token", size_of(cell), *_shape(cell))


def _tokens(cell: CellView) -> int:
    return cell.get("batch_size") * cell.get("context_length")


def _shape(cell: CellView) -> tuple[str, str]:
    return str(cell.get("batch_size")), str(cell.get("context_length"))


# -- findings ---------------------------------------------------------------------------------------------------------


def _largest(cells: Cells) -> CellView:
    """Return the cell of the largest model that has a time of ours."""
    return max((cell for cell in cells if cell.ok and "ours" in _fine(cell)), key=scale_of)


def _seconds(view: CellView) -> float:
    found = view.median(TIME)
    if not found:
        raise LookupError(TIME)
    return found


def _speed(cells: Cells) -> Text | None:
    cell = _largest(cells)
    fine = _fine(cell)
    ours = _seconds(fine["ours"])
    said = say("accelerated, a step of {} takes {} ms", "加速后 {} 每步 {} ms", _work(cell), ms(ours))
    ratios = {name: _seconds(fine[name]) / ours for name in RIVALS if name in fine}
    others = [compared(Text("it", "它"), NAMES[name], [(ratio, Text(""))]) for name, ratio in ratios.items()]
    return together(said, listed(others, ("; ", "；")) if others else None)


def _memory(cells: Cells) -> Text | None:
    cell = _largest(cells)
    fine = _fine(cell)
    peaks = {name: known(view, PEAK) for name, view in fine.items() if PEAK in view.metrics}
    said = say("its peak memory is {} GiB", "峰值显存为 {} GiB", gib(peaks["ours"]))
    others = [say("{} {} GiB", "{} {} GiB", NAMES[name], gib(peaks[name])) for name in RIVALS if name in peaks]
    return say("{} ({})", "{}（{}）", said, listed(others)) if others else said


def _packed(cells: Cells) -> Text | None:
    fine = _fine(_largest(cells))
    ours, packed = fine["ours"], fine["packed"]
    said = say(
        "with the packed optimizer a step takes {} ms, {}",
        "使用打包优化器时每步 {} ms，{}",
        ms(_seconds(packed)),
        beside(_seconds(ours) / _seconds(packed), Text("with torch's AdamW", "使用 torch 的 AdamW 时")),
    )
    peaks = [view.value(PEAK) for view in (packed, ours)]
    share = [peaks[0] / peaks[1]] if peaks[0] and peaks[1] else []
    return together(said, memory_beside(share, Text("the step with torch's AdamW", "使用 torch 的 AdamW 时")))


def _highlights(cells: Cells) -> list[Highlight]:
    """Return the speed against the fastest rival in the largest model."""
    cell = _largest(cells)
    fine = _fine(cell)
    rivals = [name for name in RIVALS if name in fine and name != "plain"]
    if not rivals:
        return []
    best = min(rivals, key=lambda name: _seconds(fine[name]))
    ours, theirs = _seconds(fine["ours"]), _seconds(fine[best])
    detail = say(
        "{}: ours {} ms, {} {} ms", "{}：本项目 {} ms，{} {} ms", _work(cell), ms(ours), NAMES[best], ms(theirs)
    )
    what = say("transformers' Llama, against {}", "transformers 的 Llama，相对 {}", NAMES[best])
    return [Highlight(27, Text(f"{theirs / ours:.2f}x"), what, detail, theirs / ours, what)]


ACCELERATE = Experiment(
    name="accelerate",
    title=Text("transformers' Llama, accelerated", "加速 transformers 的 Llama"),
    question=Text(
        "How much faster does accelerate make a training step of transformers' Llama?",
        "accelerate 能让 transformers 的 Llama 的训练步快多少？",
    ),
    grid=_grid,
    instrument=Instrument(
        "accelerate",
        "cs336_systems.experiments.steps.measure_accelerate:measure_accelerate",
        label=_label,
        needs_fresh_process=lambda config: True,
    ),
    tables=_tables,
    charts=_charts,
    findings=(_speed, _memory, _packed),
    highlights=_highlights,
    group="speed",
    statistic="median",
    order=52,
)
