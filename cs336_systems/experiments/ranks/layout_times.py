"""Predicted step times of layouts in `cs336 plan`: kernels of one rank and exposed communication; days and money."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cs336_systems.config import RunConfig
from cs336_systems.experiments.ranks.plan_cells import (
    Passes,
    fitting_layouts,
    gpu_name,
    layout_name,
    plans,
    run_of,
    unfused_layouts,
    where,
)
from cs336_systems.predict.flops import model_flops
from cs336_systems.predict.gpus import find_card
from cs336_systems.predict.parallel_model import Plan
from cs336_systems.predict.strategy import Strategy
from cs336_systems.predict.time.eager_kernels import ADAMW
from cs336_systems.predict.time.eager_time import eager_step_time
from cs336_systems.predict.time.gpu_profile import DATA_SHEET, GpuProfile, profile_of
from cs336_systems.predict.time.time_model import StepTime, predicts, step_time
from cs336_systems.predict.training_cost import NO_COST, Cost
from cs336_systems.report.cells import CellView
from cs336_systems.report.rows import ms, number, percent, titled
from cs336_systems.report.terms import MFU, STEP, TOKENS_PER_SECOND
from cs336_systems.table import Column, Table, word
from cs336_systems.text import Text, listed, say

ALONE, AMONG_RANKS = "on", "kernels,loss,optimizer"
"""Parts of the fast step whose kernels are counted on one GPU, and on several: ranks have no CUDA graph."""
UPDATES = ("adamw", ADAMW)
"""Names of the kernels that update the weights, in the fast step and in others."""


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
        pairs = zip(passes.compute, passes.communication, strict=True)
        exposed = sum(max(0.0, communication - scale * compute) for compute, communication in pairs)
        busy = kernels + scale * passes.idle
        return cls(kernels, busy + exposed, busy + sum(passes.communication))


def predicted_times(cell: CellView, cost: Cost) -> list[Table]:
    """Return the table of layouts that fit and whose ranks run whole models on whole sequences; no table if there are
    none."""
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
    """Return the time of a layout's step; None if GPUs split layers, sequences or stages, or if kernels or rates are
    unknown."""
    (plan,) = plans({**cell.config, "strategies": [name]})
    return plan_time(cell.config, plan, Passes.of(cell.variant(name)))


def plan_time(config: Mapping[str, Any], plan: Plan, passes: Passes) -> RankTime | None:
    """Return the time of the step of a plan of `config`, as `rank_time` does."""
    profile, _ = _rates(config)
    run = _rank_run(config, plan)
    found = _step_time(run, profile, plan.micro_batches) if run and profile else None
    if found is None:
        return None
    update = sum(seconds for kernel, seconds in found.by_name().items() if kernel in UPDATES)
    saved = update * (1 - 1 / plan.shards) if plan.strategy.stage else 0.0  # a rank updates its shard alone
    kernels = sum(seconds for _, seconds in found.kernels) + found.gaps - saved
    return RankTime.of(max(kernels, found.host), passes)


def _step_time(run: RunConfig, profile: GpuProfile, micro_batches: int) -> StepTime | None:
    """Return the time of a rank's step, fast or without any of the fast parts; the latter in one micro batch only, and
    not if the host's launches bound it, because FSDP adds to them."""
    if run.fast != "off":
        return step_time(run, profile, micro_batches)
    found = eager_step_time(run, profile) if micro_batches == 1 else None
    return found if found and not found.is_launch_bound else None


def _rank_run(config: Mapping[str, Any], plan: Plan) -> RunConfig | None:
    """Return the step of one rank on a micro batch of its own sequences."""
    run = RunConfig.of(config)
    is_fused = run_of(config, plan.strategy) == run
    is_whole = plan.strategy.group == 1 and config["count"] == "transformer" and {"kernels", "loss"} <= run.fast_parts
    if not is_whole or run.mode != "train-step" or run.precision != "bf16" or run.batch_size % plan.micro_batches:
        return None
    if not predicts(dataclasses.replace(run, fast=AMONG_RANKS)):
        return None
    fast = ALONE if config["gpus"] == 1 else AMONG_RANKS if is_fused else "off"
    return dataclasses.replace(run, fast=fast, batch_size=run.batch_size // plan.micro_batches)


def _rates(config: Mapping[str, Any]) -> tuple[GpuProfile | None, float | None]:
    """Return the profile of the GPU and its peak FLOP/s."""
    gpu = find_card(config["gpu"])
    return (profile_of(gpu, config["precision"]), gpu.peak_flops(config["precision"])) if gpu else (None, None)


def _notes(cell: CellView, profile: GpuProfile, others: Sequence[str]) -> list[Text]:
    notes = [
        Text(
            "kernels: predicted for the fast step of one GPU on its own sequences, with AdamW of its shard",
            "内核：按单张 GPU 在其自身序列上的快速步预测，AdamW 只更新本分片",
        ),
        Text(
            "step: kernels and exposed communication, with all of it overlapped that can be, and with none; "
            "tokens/s (of all GPUs) and what follows: overlapped",
            "单步：内核加上未被掩盖的通信，分别为通信尽可能重叠与完全不重叠；tokens/s（全部 GPU）及其后各列按重叠计算",
        ),
    ]
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
    unfused = unfused_layouts(cell.config)
    if timed := [name for name in unfused if name not in others and name in fitting_layouts(cell)]:
        notes.append(
            say(
                "of {}: predicted operator by operator, without the fused kernels and loss",
                "{}：不使用融合内核与融合损失，逐算子预测",
                listed(map(layout_name, timed)),
            )
        )
    notes += [
        say("not predicted: {}, {}", "不作预测：{}，{}", listed(map(layout_name, names)), why)
        for why, names in _unpredicted(others).items()
    ]
    return notes


SHARED = Text("whose GPUs share layers or sequences", "其 GPU 共同处理同一层或同一序列")
PLAIN = Text("which runs without the fused kernels and loss", "其运行不使用融合内核与融合损失")


def _unpredicted(names: Sequence[str]) -> dict[Text, list[str]]:
    """Return layouts without a predicted time by the reason."""
    found: dict[Text, list[str]] = {}
    for name in names:
        found.setdefault(SHARED if Strategy.parse(name).group > 1 else PLAIN, []).append(name)
    return found


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
    reasons = [
        say("{}, {}", "{}，{}", listed(map(layout_name, names)), why) for why, names in _unpredicted(fitting).items()
    ]
    return say("not predicted for {}.", "不作预测：{}。", listed(reasons, ("; ", "；")))
