"""How much time does a memory budget cost, and is it kept?

Plans of the memory planner against uniform recomputation of groups of blocks and against the budget of torch.compile.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from cs336_systems.config import RunConfig, model_config
from cs336_systems.experiments.spec import Config, Experiment, Instrument, Memory, label_step
from cs336_systems.predict.gpus import memory_size
from cs336_systems.predict.memory_model import estimate
from cs336_systems.predict.memory_planner import least_peak
from cs336_systems.record import GIB
from cs336_systems.report import entries, terms
from cs336_systems.report.cells import CellView, grouped
from cs336_systems.report.document import Chart, Highlight, Point, Series
from cs336_systems.report.names import size_name
from cs336_systems.report.phrases import (
    SAME,
    compared,
    error_text,
    having,
    known,
    safely,
    scale_of,
    speed_up,
    together,
    with_name,
)
from cs336_systems.report.points import means_of
from cs336_systems.report.presentation import Cells
from cs336_systems.report.rows import gib, ms, number, percent, signed
from cs336_systems.table import Table
from cs336_systems.text import Text, listed, say

PLAN, GROUPS, OFFLOAD_ONLY, TORCH = "plan", "groups", "offload", "torch"
"""Ways to save memory: a plan, recomputation in groups of a fixed number of blocks, offloading alone, torch.compile."""
WORKS = (("large", 1024), ("large", 4096), ("2.7B", 2048), ("2.7B", 4096))
SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Budgets as a share of the range from the peak of the most economical plan (0) to that of keeping everything (1)."""
BLOCKS = (2, 4, 1, 8, 0)
"""Numbers of blocks recomputed together."""
TORCH_BUDGETS = (0.3, 0.6, 1.0)
"""Values of `torch._functorch.config.activation_memory_budget`."""
TORCH_WORK, OFFLOAD_WORK = ("2.7B", 2048), ("2.7B", 4096)
OFFLOADED = 6 * GIB
"""Bytes that a plan without recomputation has to offload: about as many as can be copied during a forward pass."""

# -- grid -------------------------------------------------------------------------------------------------------------


def _grid(preset: str, base: RunConfig) -> Iterable[Config]:
    """Yield each budget next to a step with uniform groups, so that a drift of the GPU's clock favours neither."""
    base = dataclasses.replace(base, attention="auto", warmup_steps=3, num_steps=6)
    if preset == "quick":
        yield from _work(_quick_run(base), (0.25, 0.75), (1, 0))
        return
    for size, context in WORKS:
        model = model_config(size, context_length=context)
        run = dataclasses.replace(base, model=model, size=size, precision="bf16", fast="on")
        yield from _work(run, SHARES, BLOCKS)
        if (size, context) == OFFLOAD_WORK:
            budget = _gib_text(estimate(run).peak - OFFLOADED)
            yield _cell(dataclasses.replace(run, memory_budget=budget), OFFLOAD_ONLY)
        if (size, context) == TORCH_WORK:
            compiled = dataclasses.replace(run, attention="sdpa", fast="off", compile=True)
            yield from (_cell(compiled, TORCH, torch_budget=share) for share in TORCH_BUDGETS)


def _quick_run(base: RunConfig) -> RunConfig:
    if base.device_type == "cuda":
        return dataclasses.replace(base, model=model_config("small"), size="small", precision="bf16", fast="on")
    model = model_config("tiny", num_layers=8, vocab_size=1000)
    return dataclasses.replace(base, model=model, size="", fast="kernels,loss")


def _work(run: RunConfig, shares: Sequence[float], groups: Sequence[int]) -> Iterable[Config]:
    least, most = _ends(run)
    budgets = [_gib_text(least + share * (most - least)) for share in shares]
    for budget, blocks in zip(budgets, groups, strict=True):
        yield _cell(dataclasses.replace(run, memory_budget=budget), PLAN)
        yield _cell(dataclasses.replace(run, checkpoint_blocks=blocks), GROUPS)


def _cell(run: RunConfig, way: str, **fields: float) -> Config:
    return {**run.to_dict(), "way": way, **fields}


@lru_cache(maxsize=64)
def _ends(run: RunConfig) -> tuple[int, int]:
    """Return the predicted peaks of the most economical plan and of keeping everything."""
    return least_peak(run), estimate(run).peak


def _gib_text(size: float) -> str:
    return f"{size / GIB:.{2 if size >= GIB else 6}f}GiB"


def _label(config: Mapping[str, Any], experiments: Sequence[str]) -> str:
    own = {TORCH: f"torch's budget {config.get('torch_budget')}", OFFLOAD_ONLY: "offloading only"}
    return " ".join([label_step(config, experiments), *filter(None, [own.get(config["way"])])])


def _memory(config: Mapping[str, Any]) -> Memory | None:
    return None if config["way"] == TORCH else Memory(estimate(RunConfig.of(config)).peak)


# -- what is compared -------------------------------------------------------------------------------------------------


def _key(cell: CellView) -> tuple:
    """Return a key that is equal for cells that do the same work in different ways; the smallest work has the smallest
    key."""
    return scale_of(cell), *map(cell.get, ("context_length", "batch_size", "size", "precision"))


def _by_work(cells: Cells) -> dict[tuple, list[CellView]]:
    return grouped(sorted(cells, key=_key), _key)


def _done(cells: Iterable[CellView], *ways: str) -> list[CellView]:
    """Return the cells of these ways that have a time and a peak."""
    return having((cell for cell in cells if cell.get("way") in ways), "peak_memory", "step_time")


def _budget(cell: CellView) -> float:
    """Return the budget in bytes; 0 where a record does not have a valid one."""
    text = str(cell.get("memory_budget"))
    size = memory_size(text)
    return int(size[0]) if size else 0.0


def _whole(work: Iterable[CellView]) -> CellView | None:
    """Return the step that keeps all activations."""
    return next((cell for cell in _done(work, GROUPS) if not cell.get("checkpoint_blocks")), None)


def _fastest_within(cells: Iterable[CellView], size: float) -> CellView | None:
    """Return the fastest of the cells whose peak is at most `size` bytes."""
    fitting = [cell for cell in cells if known(cell, "peak_memory") <= size]
    return min(fitting, key=lambda cell: known(cell, "step_time"), default=None)


def _duels(cells: Cells) -> list[tuple[CellView, CellView]]:
    """Return pairs of a planned step and the fastest uniform group whose peak is within its budget."""
    return [
        (cell, group)
        for work in _by_work(cells).values()
        for cell in _done(work, PLAN)
        if (group := _fastest_within(_done(work, GROUPS), _budget(cell)))
    ]


# -- tables -----------------------------------------------------------------------------------------------------------

CPU_NOTE = Text(
    "budgets are planned for the kernels of a GPU: on a CPU attention needs further temporary tensors",
    "预算按 GPU 内核规划：CPU 上的注意力另需临时张量",
)


def _tables(cells: Cells) -> list[Table]:
    planned = [cell for cell in cells if cell.get("way") in (PLAN, OFFLOAD_ONLY)]
    others = [cell for cell in cells if cell.get("way") in (GROUPS, TORCH)]
    planned.sort(key=lambda cell: (*_key(cell), _budget(cell)))
    others.sort(key=lambda cell: (*_key(cell), cell.get("torch_budget") or 0, cell.get("checkpoint_blocks")))
    whole_of = _whole_steps(cells)
    found = [_planned_table(planned, cells, whole_of)] if planned else []
    return found + ([_others_table(others, whole_of)] if others else [])


def _whole_steps(cells: Cells) -> entries.FindBase:
    found = {key: _whole(work) for key, work in _by_work(cells).items()}
    return lambda cell: found[_key(cell)]


def _planned_table(planned: Cells, cells: Cells, whole_of: entries.FindBase) -> Table:
    groups = {key: _done(work, GROUPS) for key, work in _by_work(cells).items()}

    def group_of(cell: CellView) -> CellView | None:
        return _fastest_within(groups[_key(cell)], _budget(cell))

    def added(cell: CellView) -> str:
        whole, step = whole_of(cell), cell.value("step_time")
        return number(1e3 * (step - known(whole, "step_time"))) if whole and step else ""

    columns = [
        entries.of(Text("plan", "方案"), _name),
        entries.gib(terms.PEAK, "peak_memory"),
        entries.gib(terms.PREDICTED, "predicted_memory"),
        entries.of(terms.ERROR, lambda cell: signed(cell.memory_error, 2)),
        entries.gib(Text("host memory", "主机内存"), "host_memory"),
        entries.ms(terms.STEP, "step_time"),
        entries.of(Text("added", "增加"), added, "ms"),
        entries.ms(Text("added, predicted", "增加，预测"), "predicted_added_time"),
        entries.of(
            Text("fastest group", "最快的分组"),
            lambda cell: _name(group) if (group := group_of(cell)) else Text("none fits", "都放不下"),
        ),
        entries.of(
            Text("its step", "其单步"),
            lambda cell: ms(group.value("step_time")) if (group := group_of(cell)) else "",
            "ms",
        ),
        entries.speed_up(terms.SPEED_UP, "step_time", group_of),
    ]
    notes = [
        Text(
            "added: beyond keeping everything; fastest group: of the uniform groups whose peak is within the budget",
            "增加：相对全部保留；最快的分组：峰值在预算内的均匀分组中最快者",
        ),
        *([CPU_NOTE] if planned[0].get("device") == "cpu" else []),
    ]
    what = Text("steps within a memory budget", "显存预算内的训练步")
    return entries.cell_table(what, planned, columns, shown=("size", "context_length", "memory_budget"), notes=notes)


def _others_table(others: Cells, whole_of: entries.FindBase) -> Table:
    columns = [
        entries.of(Text("way", "方式"), _name),
        entries.gib(terms.PEAK, "peak_memory"),
        entries.gib(terms.PREDICTED, "predicted_memory"),
        entries.of(terms.ERROR, lambda cell: signed(cell.memory_error, 2)),
        entries.ms(terms.STEP, "step_time"),
        entries.over_base(Text("over keeping everything", "相对全部保留"), "step_time", whole_of),
    ]
    with_torch = any(cell.get("way") == TORCH for cell in others)
    note = Text(
        "torch.compile: the plain model with SDPA under activation_memory_budget and the AdamW of torch; "
        "all others: the fast step",
        "torch.compile：普通模型加 SDPA，由 activation_memory_budget 限制显存，用 torch 的 AdamW；其余为快速步",
    )
    what = Text("uniform groups and torch.compile", "均匀分组与 torch.compile")
    shown = ("size", "context_length", "checkpoint_blocks")
    return entries.cell_table(what, others, columns, shown=shown, notes=[note] if with_torch else [])


def _name(cell: CellView) -> Text:
    """Return the name that reports use for the way of a cell."""
    match cell.get("way"):
        case "plan":
            return PLANNED
        case "offload":
            return OFFLOADING_ONLY
        case "torch":
            return say("torch.compile, budget {}", "torch.compile，预算 {}", str(cell.get("torch_budget")))
    blocks = cell.get("checkpoint_blocks")
    return say("groups of {}", "每组 {} 块", str(blocks)) if blocks else Text("everything kept", "全部保留")


PLANNED = Text("planned", "规划")
OFFLOADING_ONLY = Text("offloading only", "仅卸载")

# -- charts -----------------------------------------------------------------------------------------------------------


def _charts(cells: Cells) -> list[Chart]:
    """Time against memory for each work, the largest first."""
    fine = _done(cells, PLAN, GROUPS, TORCH, OFFLOAD_ONLY)
    return [_trade_off(work) for work in reversed(_by_work(fine).values())]


def _trade_off(work: Cells) -> Chart:
    whole = _whole(work)
    groups = [cell for cell in _done(work, GROUPS) if cell is not whole]
    series = [
        Series(PLANNED, _points([*_done(work, PLAN), *([whole] if whole else [])])),
        Series(Text("uniform groups", "均匀分组"), _points(groups), drawn="marks"),
        Series(Text("torch.compile with a budget", "带预算的 torch.compile"), _points(_done(work, TORCH))),
        Series(OFFLOADING_ONLY, _points(_done(work, OFFLOAD_ONLY)), drawn="marks"),
    ]
    title = say("Time within a memory budget: {}", "显存预算内的用时：{}", _work_name(work[0]))
    kept = Text("the last planned step keeps everything", "最后一个规划点保留全部激活")
    note = listed((str(work[0].get("precision")), means_of(work), kept), ("; ", "；"))
    return Chart("", title, "lines", Text("peak, GiB", "峰值，GiB"), terms.MS, series, digits=1, note=note)


def _points(cells: Iterable[CellView]) -> list[Point]:
    ordered = sorted(cells, key=lambda cell: known(cell, "peak_memory"))
    return [
        Point(known(cell, "peak_memory") / GIB, 1e3 * known(cell, "step_time"), name=_name(cell).en) for cell in ordered
    ]


def _work_name(cell: CellView) -> Text:
    values = (size_name(cell.get("size")), str(cell.get("batch_size")), str(cell.get("context_length")))
    return say("{}, {} x {} tokens", "{}，{} x {} 个 token", *values)


# -- findings ---------------------------------------------------------------------------------------------------------


def _kept(cells: Cells) -> Text | None:
    """State how many budgets are kept, and how good the predicted peaks are."""
    fine = having(_done(cells, PLAN, OFFLOAD_ONLY), "predicted_memory")
    if fine[0].get("device") == "cpu":
        return None
    within = sum(known(cell, "peak_memory") <= _budget(cell) for cell in fine)
    every, error = str(len(fine)), error_text(max(abs(cell.memory_error or 0.0) for cell in fine))
    if len(fine) == 1:
        kept = Text("the peak is within its budget", "峰值在预算之内") if within else None
    elif within == len(fine):
        kept = say("all {} peaks are within their budgets", "{} 个峰值都在预算之内", every)
    else:
        kept = say("{} of {} peaks are within their budgets", "{1} 个峰值中有 {0} 个在预算之内", str(within), every)
    return together(kept, say("predictions of planned peaks are off by {} at most", "规划的峰值预测误差最多 {}", error))


def _against_groups(cells: Cells) -> Text | None:
    """Compare each planned step with the fastest uniform group within its budget."""
    duels = _duels(cells)
    name = Text("the fastest uniform group within the budget", "预算内最快的均匀分组")
    found = [(speed_up(duel), _budget_name(duel[0])) for duel in duels]
    said = compared(Text("a planned step", "规划的一步"), name, found) if found else None
    if len(found) > 2 and (middle := statistics.median(ratio for ratio, _ in found)) > 1:
        saved = percent(1 - 1 / middle)
        said = together(said, say("in the median it saves {} of the time", "用时的中位数减少 {}", saved))
    alone = len(_done(cells, PLAN)) - len(duels)
    below = say("budgets that no uniform group can meet: {}", "没有任何均匀分组能满足的预算：{} 个", str(alone))
    return together(said, below) if alone else said


def _budget_name(cell: CellView) -> Text:
    return say("{}, {} GiB", "{}，{} GiB", _work_name(cell), gib(_budget(cell)))


def _others(cells: Cells) -> Text | None:
    return together(safely(_offloading, cells), safely(_against_torch, cells))


def _offloading(cells: Cells) -> Text | None:
    """State what it costs to offload without recomputation."""
    for work in _by_work(cells).values():
        for cell in having(_done(work, OFFLOAD_ONLY), "host_memory"):
            if whole := _whole(work):
                longer = known(cell, "step_time") / known(whole, "step_time") - 1
                moved, name = gib(known(cell, "host_memory")), _work_name(cell)
                if longer < 0.0005:
                    en = "offloading {} GiB to the host costs no time"
                    return with_name(say(en, "向主机卸载 {} GiB 不增加用时", moved), name)
                en = "offloading {} GiB to the host makes a step {} longer"
                return with_name(say(en, "向主机卸载 {} GiB 使一步延长 {}", moved, percent(longer)), name)
    return None


def _against_torch(cells: Cells) -> Text | None:
    """Compare torch.compile under each of its budgets with the fastest planned step of no more memory."""
    found = []
    for work in _by_work(cells).values():
        ours = [*_done(work, PLAN), *([whole] if (whole := _whole(work)) else [])]
        for cell in _done(work, TORCH):
            if best := _fastest_within(ours, known(cell, "peak_memory")):
                found.append((speed_up((cell, best)), say("budget {}", "预算 {}", str(cell.get("torch_budget")))))
    name = Text("torch.compile with an activation memory budget", "带激活显存预算的 torch.compile")
    return compared(name, Text("a planned step with no more memory", "显存不多于它的规划步"), found)


def _highlights(cells: Cells) -> list[Highlight]:
    """Return the budget with the median gain."""
    duels = sorted(_duels(cells), key=speed_up)
    if not duels or (ratio := speed_up(duels[len(duels) // 2])) <= SAME:
        return []
    cell, group = duels[len(duels) // 2]
    what = say(
        "training within a memory budget, against recomputed groups of blocks (median of {})",
        "显存预算内训练，相对分组重计算（{} 个预算的中位数）",
        str(len(duels)),
    )
    times = [ms(known(own, "step_time")) for own in (cell, group)]
    detail = say(
        "{}: planned {} ms, {} {} ms", "{}：规划 {} ms，{} {} ms", _budget_name(cell), times[0], _name(group), times[1]
    )
    bar = say("{}, against groups", "{}，相对分组", _budget_name(cell))
    return [Highlight(35, Text(f"{ratio:.2f}x"), what, detail, ratio, bar)]


MEMORY_BUDGETS = Experiment(
    name="memory_budgets",
    title=Text("Training within a memory budget", "显存预算内的训练"),
    question=Text("How much time does a memory budget cost, and is it kept?", "显存预算要付出多少时间，能否守住？"),
    grid=_grid,
    instrument=Instrument(
        "memory_budgets",
        "cs336_systems.experiments.memory.measure_budgets:measure_budget",
        label=_label,
        memory=_memory,
        needs_fresh_process=lambda config: config["compile"],
    ),
    tables=_tables,
    charts=_charts,
    highlights=_highlights,
    group="memory",
    findings=(_kept, _against_groups, _others),
    order=30,
)
