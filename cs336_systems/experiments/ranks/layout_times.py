"""Predicted step times of layouts in `cs336 plan`: kernels of one rank and exposed communication; days and money."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cs336_systems.config import RunConfig, UserError
from cs336_systems.experiments.ranks.plan_cells import (
    Passes,
    fitting_layouts,
    gpu_name,
    layout_name,
    plans,
    required_axes,
    run_of,
    unfused_layouts,
    where,
)
from cs336_systems.predict.flops import model_flops
from cs336_systems.predict.gpus import find_card
from cs336_systems.predict.parallel_model import Plan
from cs336_systems.predict.rank_shards import Mesh
from cs336_systems.predict.time.gpu_profile import DATA_SHEET, GpuProfile, profile_of
from cs336_systems.predict.time.rank_time import added_seconds, plain_rank_seconds
from cs336_systems.predict.time.time_model import predicts, step_time
from cs336_systems.predict.training_cost import NO_COST, Cost
from cs336_systems.report.cells import CellView
from cs336_systems.report.rows import ms, number, percent, titled
from cs336_systems.report.terms import MFU, STEP, TOKENS_PER_SECOND
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, listed, say

ALONE, AMONG_RANKS = "on", "kernels,loss,optimizer"
"""Parts of the fast step whose kernels are counted on one GPU, and on several: ranks have no CUDA graph."""
PACKED_UPDATE = "adamw"
"""Name of the kernel of the packed optimizer, which ranks do not have."""


class RankTime(NamedTuple):
    """Seconds of a layout's step."""

    kernels: float
    """Kernel time of one rank, on its own sequences."""
    overlapped: float
    """The step if communication overlaps with kernels as far as possible."""
    sequential: float

    @classmethod
    def of(cls, kernels: float, passes: Passes) -> "RankTime":
        """Split the kernels' time into forward and backward in proportion to the matmuls' time, as idle time is, and
        add exposed communication."""
        scale = kernels / sum(passes.compute)
        exposed = sum(passes.waiting)
        for compute, sent, waiting in zip(passes.compute, passes.communication, passes.waiting, strict=True):
            exposed += max(0.0, sent - waiting - scale * compute)
        busy = kernels + scale * passes.idle
        return cls(kernels, busy + exposed, busy + sum(passes.communication))


def predicted_times(cell: CellView, cost: Cost) -> list[Table]:
    """Return the table of the layouts that fit; no table if no step is predicted."""
    profile, peak = _rates(cell.config)
    fitting = fitting_layouts(cell)
    times = {name: time for name in fitting if (time := rank_time(cell, name)) is not None}
    if not times or profile is None or peak is None:
        return []
    columns = [word(Text("layout", "布局")), Column(Text("kernels", "内核"), "ms"), Column(STEP, "ms")]
    columns += [Column(TOKENS_PER_SECOND), Column(MFU), *cost.columns]
    run, gpus = RunConfig.of(cell.config), cell.get("gpus")
    rows: list[list[str | Text]] = []
    for name, time in times.items():
        rate = gpus * run.tokens / time.overlapped
        step = say("{} to {}", "{} 到 {}", ms(time.overlapped), ms(time.sequential))
        if ms(time.overlapped) == ms(time.sequential):
            step = Text(ms(time.overlapped))
        mfu = model_flops(run) / time.overlapped / peak
        rows.append([layout_name(name), ms(time.kernels), step, number(rate, 0), percent(mfu), *cost.cells(rate, gpus)])
    notes = _notes(cell, profile, [name for name in fitting if name not in times])
    title = titled(cell.experiment, Text("predicted time of a step", "单步时间预测"), [where(cell)])
    return [Table(title, columns, rows, [*notes, *cost.notes])]


def rank_time(cell: CellView, name: str) -> RankTime | None:
    """Return the time of a layout's step; None if its kernels or the rates of the GPU are unknown."""
    (plan,) = plans({**cell.config, "strategies": [name]})
    return plan_time(cell.config, plan)


def plan_time(config: Mapping[str, Any], plan: Plan) -> RankTime | None:
    """Return the time of the step of a plan of `config`, as `rank_time` does."""
    profile, _ = _rates(config)
    run = RunConfig.of(config)
    if profile is None or not _is_predicted(config, run) or run.batch_size * plan.strategy.group % plan.micro_batches:
        return None
    seconds = _fused_seconds if run_of(config, plan.strategy) == run else _plain_seconds
    kernels = seconds(run, plan, profile)
    return None if kernels is None else RankTime.of(kernels, Passes.of_plan(plan))


def _is_predicted(config: Mapping[str, Any], run: RunConfig) -> bool:
    is_fast = config["count"] == "transformer" and {"kernels", "loss"} <= run.fast_parts
    return is_fast and run.precision == "bf16" and predicts(dataclasses.replace(run, fast=AMONG_RANKS))


def _fused_seconds(run: RunConfig, plan: Plan, profile: GpuProfile) -> float | None:
    """Return the seconds of the kernels of a rank's fast step on its own sequences."""
    fast = ALONE if plan.cluster.gpus == 1 else AMONG_RANKS
    run = dataclasses.replace(run, fast=fast, batch_size=run.batch_size // plan.micro_batches)
    found = step_time(run, profile, plan.micro_batches)
    if found is None:
        return None
    kernels = sum(seconds for _, seconds in found.kernels) + found.gaps
    if plan.cluster.gpus > 1:
        sharded = plan.strategy.stage == 3
        added = added_seconds(run, required_axes(plan, run.model) if sharded else Mesh(), profile)
        update = added.update / (plan.shards if plan.strategy.stage in (1, 2) else 1)
        kernels += plan.micro_batches * added.gradients + update - found.by_name()[PACKED_UPDATE]
    return max(kernels, found.host)


def _plain_seconds(run: RunConfig, plan: Plan, profile: GpuProfile) -> float | None:
    """Return the seconds of the kernels of a rank without the fused kernels, under torch's engine."""
    strategy = plan.strategy
    try:
        mesh = required_axes(plan, run.model)
    except UserError:  # ranks cannot split the model
        return None
    sequences = run.batch_size * strategy.group // plan.micro_batches
    run = dataclasses.replace(run, fast="off", batch_size=sequences)
    found = plain_rank_seconds(run, mesh, profile, plan.micro_batches)
    if found is None:
        return None
    return found.gradients + found.update / (plan.shards if strategy.stage in (1, 2) else 1)


def _rates(config: Mapping[str, Any]) -> tuple[GpuProfile | None, float | None]:
    """Return the profile of the GPU and its peak FLOP/s."""
    gpu = find_card(config["gpu"])
    return (profile_of(gpu, config["precision"]), gpu.peak_flops(config["precision"])) if gpu else (None, None)


def _notes(cell: CellView, profile: GpuProfile, others: Sequence[str]) -> list[Text]:
    timed = [name for name in fitting_layouts(cell) if name not in others]
    unfused = unfused_layouts(cell.config)
    plain = [name for name in timed if name in unfused]
    notes = []
    if len(plain) < len(timed):
        notes.append(
            Text(
                "kernels: those of the fast step of one GPU on its own sequences, with torch's AdamW of its shard",
                "内核：单张 GPU 在其自身序列上的快速步，以 torch 的 AdamW 更新本分片",
            )
        )
    if plain:
        notes.append(
            say(
                "kernels of {}: those of a rank, operator by operator, without the fused kernels and loss",
                "{} 的内核：单个 rank 的各算子，不使用融合内核与融合损失",
                listed(map(layout_name, plain)),
            )
        )
    notes.append(
        Text(
            "step: kernels and exposed communication, with all of it overlapped that can be, and with none; "
            "tokens/s (of all GPUs) and what follows: overlapped",
            "单步：内核加上未被掩盖的通信，分别为通信尽可能重叠与完全不重叠；tokens/s（全部 GPU）及其后各列按重叠计算",
        )
    )
    if cell.get("gpus") > 1:
        notes.append(
            Text(
                "a step of several ranks was not measured: read it as a lower bound",
                "多进程训练步未经实测：请视为下界",
            )
        )
    if profile.source == DATA_SHEET:
        notes.append(
            say(
                "the rates of {} are from its data sheet: kernels may be off by a factor of {}",
                "{} 的速率来自数据手册：内核时间误差可达 {} 倍",
                *(gpu_name(cell), f"{1 + profile.spread:.3g}"),
            )
        )
    if any(plan.waiting("forward") for plan in plans({**cell.config, "strategies": timed})):
        notes.append(WAITING)
    return [*notes, *(say("not predicted: {}, {}", "不作预测：{}，{}", *why) for why in _unpredicted(cell, others))]


WAITING = Text(
    "communication of TP and CP never overlaps: the next kernel needs what it brings",
    "TP 与 CP 的通信不与计算重叠：下一个内核需要其结果",
)
LAUNCHES = Text("whose step is bound by the launches of the host", "单步受主机启动内核的时间限制")
UNEVEN = Text("whose micro batches are not of one size", "微批大小不一")
"""Why a step is not predicted. How long the host takes to launch the kernels of several ranks is not known."""


def _unpredicted(cell: CellView, names: Sequence[str]) -> list[tuple[Text, Text]]:
    """Return layouts without a predicted time, and the reason."""
    found: dict[Text, list[str]] = {}
    for name in names:
        (plan,) = plans({**cell.config, "strategies": [name]})
        is_uneven = cell.get("batch_size") * plan.strategy.group % plan.micro_batches
        found.setdefault(UNEVEN if is_uneven else LAUNCHES, []).append(name)
    return [(listed(map(layout_name, own)), why) for why, own in found.items()]


def missing_times(cell: CellView, cost: Cost = NO_COST) -> Text | None:
    """Say with which flags `cs336 plan` predicts the time of a step, and with it days and cost where they are asked
    for; None where it does, or where nothing fits."""
    fitting = fitting_layouts(cell)
    if not fitting or any(rank_time(cell, name) for name in fitting):
        return None
    asked = Text("Step time", "单步时间")
    if cost.tokens is not None:
        asked = Text("Step time, days and cost", "单步时间、天数与费用")
    return say("{}: {}", "{}：{}", asked, _why_no_times(cell, fitting))


def _why_no_times(cell: CellView, fitting: Sequence[str]) -> Text:
    wanted = {"mode": "train-step", "precision": "bf16", "attention": "auto", "count": "transformer"}
    flags = [f"--{name} {value}" for name, value in wanted.items() if cell.get(name) != value]
    flags += ["--fast on"] if "kernels,loss" not in str(cell.get("fast")) else []
    if flags:
        return say("predicted with {}.", "加上 {} 即可预测。", " ".join(flags))
    if _rates(cell.config)[0] is None:
        return say("the rates of {} are not known.", "{} 的速率未知，无法预测。", gpu_name(cell))
    reasons = [say("{}, {}", "{}，{}", *why) for why in _unpredicted(cell, fitting)]
    return say("not predicted for {}.", "不作预测：{}。", listed(reasons, ("; ", "；")))
