"""`optimizer_sharding` and `fsdp`: what does sharding the optimizer state, or everything, save and cost?"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from cs336_systems.config import RunConfig
from cs336_systems.experiments.ranks.multi_rank import (
    ARRANGEMENT,
    DDP,
    FSDP,
    INTERLEAVED,
    PARTS,
    SHARDED,
    TORCH_FSDP,
    TORCH_ZERO,
    WEIGHT_ERROR,
    Arrangement,
    arrangement_grid,
    arrangements_of,
    cell_title,
    chart_title,
    charts_per_cell,
    collective_name,
    gloo_notes,
    per_link,
    tables_per_cell,
)
from cs336_systems.experiments.spec import HANDOUT_2026, Config, Experiment, run_config
from cs336_systems.record import MIB
from cs336_systems.report.cells import CellView
from cs336_systems.report.document import Chart, Point, Series
from cs336_systems.report.phrases import beside, is_same, median_of, together, value_of
from cs336_systems.report.rows import ms, number, percent
from cs336_systems.report.terms import FORWARD, GRADIENTS, OPTIMIZER_STATE, PARAMETERS, PEAK, STEP
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, say

STATE_HEADS = (PARAMETERS, GRADIENTS, Text("state", "状态"), Text("total", "合计"), Text("formula", "公式"))
ALLOCATOR_HEADS = {
    "init": Text("init", "初始"),
    "before_update": Text("before update", "更新前"),
    "after_update": Text("after update", "更新后"),
    "peak": PEAK,
}
"""Moments at which the bytes of CUDA's allocator are recorded, with their headings."""


MOST_PARTS = 6
"""Maximum rows in the chart of all-gathers."""


def _fsdp_grid(preset: str, base: RunConfig) -> Iterable[Config]:
    """Yield the arrangements of FSDP; the 2026 preset adds the handout's xl, which is 2.7B here, on two GPUs."""
    yield from arrangement_grid(preset, base, (DDP, SHARDED, FSDP, TORCH_FSDP))
    if preset == HANDOUT_2026 and base.device_type == "cuda":
        own = {"ranks": 2, "backend": "nccl", "arrangements": [DDP.name, FSDP.name], "link": None, "rounds": 5}
        yield {**run_config(base, "2.7B", warmup_steps=2), **own}


# -- tables and charts ------------------------------------------------------------------------------------------------


def _table(cell: CellView) -> Table:
    """Return the memory on the rank with the most, beside the formula's, and time."""
    columns = [word(ARRANGEMENT), Column(STEP, "ms"), Column(Text("update", "更新"), "ms")]
    columns += [Column(head, "MiB") for head in STATE_HEADS]
    columns += [Column(Text("over ideal state", "相对理想状态")), Column(WEIGHT_ERROR)]
    notes = [
        Text(
            "medians; memory on the fullest rank before the update; formula: sharded parts over the number of ranks",
            "中位数；显存为最满的 rank 在更新之前的；公式：被分片的部分除以 rank 数",
        ),
        *gloo_notes([cell]),
    ]
    arrangements = arrangements_of(cell)
    views = [cell.variant(arrangement.name) for arrangement in arrangements]
    whole = {part: max(view.value(f"{part}_memory") or 0.0 for view in views) for part in PARTS}
    moments = [moment for moment in ALLOCATOR_HEADS if f"{moment}_memory" in views[0].metrics]
    if moments:
        columns += [Column(ALLOCATOR_HEADS[moment], "MiB") for moment in moments]
        note = "init, before and after the update, peak of the step: from CUDA's allocator, activations included"
        notes.append(Text(note, "初始、更新前后、单步峰值：来自 CUDA 分配器，含激活"))
    if found := gathers(cell):
        notes.append(
            say(
                "one more step of FSDP with its all-gathers timed: forward waits {} of its {} ms for weights",
                "另测 FSDP 一步并记录 all-gather：前向 {1} ms 中等待权重 {0} ms",
                *_waited_and_forward(found),
            )
        )
    rows = []
    for arrangement, own in zip(arrangements, views, strict=True):
        sizes = [own.value(f"{part}_memory") or 0.0 for part in PARTS]
        divisors = {part: cell.get("ranks") if part in arrangement.sharded_parts else 1 for part in PARTS}
        formula = sum(whole[part] / divisors[part] for part in PARTS)
        over_ideal = sizes[PARTS.index("optimizer")] / (whole["optimizer"] / divisors["optimizer"])
        times = [own.median("step_time"), own.median("optimizer_time")]
        memory = [number(size / MIB, 1) for size in (*sizes, sum(sizes), formula)]
        allocated = [number((own.value(f"{moment}_memory") or 0.0) / MIB, 1) for moment in moments]
        error = f"{own.value('weight_error'):.1e}"
        rows.append([arrangement.name, *map(ms, times), *memory, f"{over_ideal:.3f}x", error, *allocated])
    return Table(cell_title(cell, Text("memory and time", "显存与时间")), columns, rows, notes)


def _chart(cell: CellView) -> Chart:
    series = []
    for part, head in zip(PARTS, (PARAMETERS, GRADIENTS, OPTIMIZER_STATE), strict=True):
        sizes = {one.label: cell.variant(one.name).value(f"{part}_memory") or 0.0 for one in arrangements_of(cell)}
        series.append(Series(head, [Point(label, size / MIB) for label, size in sizes.items()]))
    title = chart_title(cell, Text("Memory on the fullest rank", "占用最多的 rank 的显存"))
    note = Text("training state before the update, without activations", "更新之前的训练状态，不含激活")
    return Chart("", title, "stacked", ARRANGEMENT, Text("MiB"), series, digits=1, note=note)


class Gather(NamedTuple):
    """Use of a sharded weight in one forward pass, in seconds since the step began."""

    weight: str
    start: float
    end: float
    needed: float
    """Time at which forward reaches the module that uses it."""
    ready: float
    """Time at which forward has the whole weight."""
    done: float

    @property
    def waited(self) -> float:
        """Seconds that forward waits for the weight; until `ready` it also starts the next all-gathers."""
        return max(0.0, self.end - self.needed)


def gathers(cell: CellView) -> list[Gather]:
    """Return the all-gathers of our FSDP in the forward pass of one step, in the order of their use."""
    own = cell.variant(FSDP.name)
    names = ("weight", "gather_start", "gather_end", "weight_needed", "weight_ready", "weight_done")
    return [Gather(*row) for row in zip(*(own.samples(name) for name in names), strict=True)]


def _gather_chart(cell: CellView) -> Chart:
    """Return a chart with a row per block: forward and its waiting time above, all-gathers below."""
    found = gathers(cell)
    rows = list(dict.fromkeys(_part(gather.weight) for gather in found))[:MOST_PARTS]
    spans: tuple[list[Point], list[Point], list[Point]] = ([], [], [])
    for gather in found:
        if (part := _part(gather.weight)) in rows:
            waits_until = gather.needed + gather.waited
            moments = ((gather.ready, gather.done), (gather.needed, waits_until), (gather.start, gather.end))
            for points, (start, end) in zip(spans, moments, strict=True):
                if end > start:
                    points.append(Point(part, 1e3 * end, start=1e3 * start))
    names = (FORWARD, Text("waits for a weight", "等待权重"), collective_name("all_gather"))
    series = [Series(name, own, lane=int(own is spans[2])) for name, own in zip(names, spans, strict=True) if own]
    title = chart_title(cell, Text("All-gathers and forward of our FSDP", "本项目 FSDP 的 all-gather 与前向"))
    since = Text("ms of the host's clock; above: forward, below: all-gather", "主机时钟，ms；上：前向，下：all-gather")
    note = say(
        "one step on rank 0, the first {} parts of the model; each bar is one weight",
        "rank 0 的一步，模型的前 {} 个部分；每一条为一个权重",
        str(len(rows)),
    )
    return Chart("gathers", title, "spans", Text("part of the model", "模型的部分"), since, series, note=note)


def _part(weight: str) -> Text:
    """Return the block that a weight belongs to, or the part of the model outside the blocks."""
    found = re.match(r"layers\.(\d+)\.", weight)
    names = {"token_embeddings": Text("embedding", "嵌入"), "lm_head": Text("head", "输出层")}
    return say("block {}", "第 {} 块", found[1]) if found else names.get(weight, Text(weight))


# -- findings ---------------------------------------------------------------------------------------------------------


def _saving_of(subject: Arrangement) -> Callable[[CellView], Text | None]:
    """Return a finding that compares the arrangement with plain data parallel and with torch's own implementation."""
    theirs = replace(subject, library="torch")

    def fact(cell: CellView) -> Text | None:
        base, held = _held(cell, DDP.name), _held(cell, subject.name)
        if not base or not held:
            return None
        said: Text | None = say(
            "{} holds {} MiB on a rank, {}",
            "{} 在每个 rank 上占用 {} MiB，{}",
            *(subject.label, number(held / MIB, 1), _memory_beside(held, base)),
        )
        ours, plain, other = (median_of(cell.variant(one.name), "step_time") for one in (subject, DDP, theirs))
        if ours and plain:
            cost = beside(plain / ours, say("with {}", "{}", DDP.label))
            said = together(said, say("a step takes {} ms: {}", "每步 {} ms，{}", ms(ours), cost))
        if other:
            values = (theirs.label, number(_held(cell, theirs.name) / MIB, 1), ms(other))
            said = together(said, say("{} holds {} MiB and takes {} ms", "{} 占用 {} MiB，每步 {} ms", *values))
        return said

    return fact


def _gathers_in_time(cell: CellView) -> Text | None:
    """State whether all-gathers end before forward needs the weights, and how long it waits for them."""
    found = gathers(cell)
    if not found:
        return None
    on_time = sum(not gather.waited for gather in found)
    said = say(
        "{} of {} all-gathers end before forward needs the weight",
        "{1} 次 all-gather 中有 {0} 次在前向用到权重之前结束",
        *(str(on_time), str(len(found))),
    )
    waits = say(
        "forward waits {} of its {} ms for weights", "前向 {1} ms 中等待权重 {0} ms", *_waited_and_forward(found)
    )
    return together(said, waits)


def _waited_and_forward(found: Sequence[Gather]) -> tuple[str, str]:
    whole = max(gather.done for gather in found) - min(gather.needed for gather in found)
    return ms(sum(gather.waited for gather in found)), ms(max(0.0, whole))


def _memory_beside(held: float, base: float) -> Text:
    """Compare the memory with that of plain data parallel."""
    other = say("{} ({} MiB)", "{}（{} MiB）", DDP.label, number(base / MIB, 1))
    if is_same(held / base):
        return say("as much as {}", "与 {} 相同", other)
    share = percent(abs(1 - held / base), 0)
    if held > base:
        return say("{} more than {}", "比 {1} 多 {0}", share, other)
    return say("{} less than {}", "比 {1} 少 {0}", share, other)


def _held(cell: CellView, name: str) -> float:
    return sum(value_of(cell.variant(name), f"{part}_memory") or 0.0 for part in PARTS)


OPTIMIZER_SHARDING = Experiment(
    name="optimizer_sharding",
    title=Text("Sharded optimizer", "优化器状态分片"),
    question=Text(
        "What does sharding the optimizer state save, and cost?",
        "把优化器状态分片到各 rank 能节省多少显存，代价是什么？",
    ),
    instrument=INTERLEAVED,
    grid=partial(arrangement_grid, arrangements=(DDP, SHARDED, TORCH_ZERO)),
    tables=tables_per_cell(_table),
    charts=charts_per_cell(_chart),
    group="ranks",
    findings=per_link(_saving_of(SHARDED)),
    statistic="median",
    problems_2026=("optimizer_state_sharding", "optimizer_state_sharding_accounting"),
    order=40,
)
FULLY_SHARDED = replace(
    OPTIMIZER_SHARDING,
    name="fsdp",
    title=Text("Sharding everything", "全部分片"),
    question=Text(
        "What does sharding everything save, and cost?", "参数、梯度和优化器状态全部分片能节省多少，代价是什么？"
    ),
    grid=_fsdp_grid,
    charts=lambda cells: [
        *charts_per_cell(_chart)(cells),
        *charts_per_cell(_gather_chart)(list(filter(gathers, cells))),
    ],
    findings=per_link(_saving_of(FSDP), _gathers_in_time),
    problems_2026=("fsdp", "fsdp_accounting"),
    order=50,
)
