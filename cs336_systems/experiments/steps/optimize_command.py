"""`cs336 optimize`: the fastest way to run a step of given tokens on a GPU, by prediction; the best three are measured
where there is such a GPU."""

import contextlib
import dataclasses
import math
import os
import shutil
import sys
import timeit
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cs336_systems import record
from cs336_systems.commands import Interrupted, interrupt_raises
from cs336_systems.config import RunConfig, UserError, flag, nearest, without_unit
from cs336_systems.experiments.ranks.layout_commands import (
    DATA,
    example_data,
    flag_words,
    parallel_flags,
    shape_flags,
    started,
)
from cs336_systems.experiments.ranks.plan_cells import MOST_GPUS
from cs336_systems.experiments.runner import Runner, gather
from cs336_systems.experiments.session import OUTPUT, new_run_file
from cs336_systems.experiments.spec import Config
from cs336_systems.experiments.steps.optimized_steps import MEASURED, OPTIMIZE, activations_text, cell_config
from cs336_systems.predict.fit import margin_note, usable_bytes
from cs336_systems.predict.flops import model_flops
from cs336_systems.predict.gpus import (
    CARDS,
    ETHERNET,
    GIGA,
    GPU,
    PCIE_LINK,
    find_by_driver_name,
    find_card,
    memory_size,
)
from cs336_systems.predict.model_flags import LIMITS, ModelArguments, within_limits
from cs336_systems.predict.optimize import (
    ACTIVATIONS,
    GRAPH,
    KEEP,
    LAYOUT,
    MICRO_BATCH,
    PLAN,
    PRECISION,
    RECOMPUTE,
    STATE,
    Alternative,
    Candidate,
    Prediction,
    Search,
    Task,
    predictions_per_second,
)
from cs336_systems.predict.optimize_ranks import FP8_ON_RANKS, RankSearch
from cs336_systems.predict.parallel_model import Cluster, Plan
from cs336_systems.predict.strategy import Strategy
from cs336_systems.predict.time.gpu_profile import DATA_SHEET, GpuProfile, profile_of
from cs336_systems.predict.time.on_gpu import mfu_note
from cs336_systems.predict.time.time_model import spread_of
from cs336_systems.predict.training_cost import NO_COST, Cost, CostArguments
from cs336_systems.record import GIB
from cs336_systems.report import terms
from cs336_systems.report.cells import group
from cs336_systems.report.rows import ms, number, percent, signed
from cs336_systems.table import FORMATS, Column, Table, word
from cs336_systems.text import Text, listed, say

ROWS = 10
SHORTEST_CONTEXT = 128
"""A shorter context is no way out."""
BF16_STATE = "bf16_state"
ALLOWED = {BF16_STATE: "bf16"}
"""Values of `--allow`, and the optimizer states that they allow."""
OPTIMIZED_PRECISIONS = ("bf16", "fp8")
TIMED_SECONDS, MOST_STEPS = 3.0, 50
"""Seconds of the measured steps of a candidate, and the maximum number of steps."""
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
"""Allocator setting that avoids fragmentation, for the last few GiB of a GPU."""
TRAIN_GRAD_NORM, BENCH_GRAD_NORM = 1.0, 0.0
"""Default gradient clipping norms of the commands `train` and `bench`."""


@dataclass(frozen=True)
class OptimizeArguments(CostArguments, ModelArguments):
    gpu: str = flag("h200", "card: 4090, H100, H200, ...")
    gpus: int = flag(1, "number of GPUs, which share the sequences of a step")
    node: int = flag(8, "GPUs that the fast link joins")
    tokens_per_step: int = flag(524_288, "tokens of a step on all GPUs, a multiple of the context")
    memory: str = flag("", "peak memory to stay within, such as 60GiB (default: what fits on the card)")
    host_memory: str = flag("", "host memory that plans may use, such as 128GiB (default: any amount)")
    precision: str = flag("bf16", "of the step: bf16, or fp8 for the matmuls of its blocks", OPTIMIZED_PRECISIONS)
    allow: tuple[str, ...] = flag((), f"choices that change the numerics: {BF16_STATE} (weights and moments in bf16)")
    max_grad_norm: float = flag(TRAIN_GRAD_NORM, "clip the gradient's norm to this (0: no clipping)")
    no_measure: bool = flag(False, f"do not measure the best {MEASURED} where there is such a GPU")
    output: str | None = flag(None, f"{OUTPUT} (default: under runs/)")
    verbose: bool = flag(False, "also show how many candidates were predicted, and how fast")
    format: str = flag("terminal", "table format", FORMATS)


# -- the task ---------------------------------------------------------------------------------------------------------


def task_of(arguments: OptimizeArguments) -> Task:
    """Return the task that the flags describe; raise UserError for what cannot be predicted."""
    gpu, profile = _card(arguments.gpu, arguments.precision)
    size, model = arguments.named_model()
    run = RunConfig(
        model=model,
        size=size,
        batch_size=1,
        precision=arguments.precision,
        attention="auto",
        fast="on",
        device="cuda",
        max_grad_norm=arguments.max_grad_norm,
    )
    tokens, context = arguments.tokens_per_step, model.context_length
    if tokens < 1 or tokens % context:
        below = tokens // context * context
        near = f"{below:,} or {below + context:,}" if below > 0 else f"{context:,}"
        raise UserError(
            f"--tokens_per_step {tokens:,} is not a multiple of the context of {context:,} tokens; use {near}, or "
            f"another --context_length"
        )
    sequences, most = tokens // context, LIMITS["batch_size"]
    if sequences > most:
        raise UserError(f"--tokens_per_step {tokens:,} is too large for a prediction: at most {most * context:,}")
    within_limits(run)
    _require_gpus(arguments, sequences)
    if unknown := [name for name in arguments.allow if name not in ALLOWED]:
        near, known = nearest(unknown[0], ALLOWED), ", ".join(ALLOWED)
        if unknown[0] == "fp8":
            near = " (matmuls in FP8: --precision fp8)"
        raise UserError(f"unknown --allow {unknown[0]!r}{near}; choose one of: {known}")
    assert gpu.memory_gib is not None, "cards have it"
    return Task(
        config=run,
        gpu=gpu,
        profile=profile,
        sequences=sequences // arguments.gpus,
        capacity=gpu.memory_gib * GIB,
        memory=_size("memory", arguments.memory),
        host_memory=_size("host_memory", arguments.host_memory),
        states=("fp32", *(ALLOWED[name] for name in arguments.allow)),
        gpus=arguments.gpus,
    )


def _require_gpus(arguments: OptimizeArguments, sequences: int) -> None:
    """Raise UserError unless the GPUs can share the sequences, or for flags that work on one GPU only."""
    gpus = arguments.gpus
    for name in ("gpus", "node"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name} must be at least 1, got {getattr(arguments, name)}")
    if sequences % gpus:
        raise UserError(
            f"--tokens_per_step {arguments.tokens_per_step:,} are {sequences:,} sequences, which cannot be divided "
            f"evenly among {gpus:,} GPUs; use {-(-sequences // gpus) * gpus * arguments.tokens_per_step // sequences:,}"
        )
    if gpus > MOST_GPUS:
        raise UserError(f"--gpus {gpus:,} is too large for a prediction: at most {MOST_GPUS:,}")
    if gpus > 1 and arguments.precision == "fp8":
        raise UserError(f"{FP8_ON_RANKS}; use --precision bf16, or leave out --gpus {gpus}")
    one_gpu = {"allow": bool(arguments.allow), "host_memory": bool(arguments.host_memory)}
    if gpus > 1 and (given := [f"--{name}" for name, value in one_gpu.items() if value]):
        raise UserError(f"{given[0]} is for one GPU; leave it out, or --gpus {gpus}")


def search_for(arguments: OptimizeArguments) -> Search:
    """Predict all candidates."""
    task, gpu = task_of(arguments), find_card(arguments.gpu)
    if task.gpus == 1 or gpu is None:
        return Search(task)
    link, network = (gpu.link or PCIE_LINK) * GIGA, (gpu.network or ETHERNET) * GIGA
    cluster = Cluster(task.gpus, task.limit, task.profile.peak, arguments.node, link, network)
    return RankSearch(task, cluster)


def _card(name: str, precision: str) -> tuple[GPU, GpuProfile]:
    gpu = find_card(name)
    if gpu is None:
        raise UserError(f"unknown --gpu {name!r}{nearest(name, CARDS)}; choose a card: {', '.join(_timed())}")
    profile = profile_of(gpu)
    if profile is not None and gpu.peak_flops(precision) is None:
        raise UserError(f"--gpu {name!r} has no matmuls in {precision}; use --precision bf16, or another card")
    if profile is None:
        lacks = "bf16"
        if gpu.peak_flops("bf16") is not None:
            lacks = "memory bandwidth in the table of GPUs, because data sheets differ (cs336 calibrate measures it)"
        near = [other for other in _timed() if other.startswith(gpu.card)] or _timed()
        raise UserError(f"--gpu {name!r} has no {lacks}: no time is predicted; choose from: {', '.join(near)}")
    return gpu, profile


def _timed() -> list[str]:
    """Return the GPUs whose step times are predicted."""
    return [name for name, gpu in CARDS.items() if profile_of(gpu) is not None]


def _size(flag_name: str, text: str) -> float:
    if not text:
        return math.inf
    found = memory_size(text)
    if found is None or not found[1] or found[0] <= 0:
        problem = without_unit(text) or "is not a size; use one such as 60GiB"
        raise UserError(f"--{flag_name} {text!r} {problem}")
    return found[0]


# -- the command ------------------------------------------------------------------------------------------------------


def optimize(arguments: OptimizeArguments) -> None:
    """Print the fastest candidates, what each choice gives, and the commands; measure the best ones."""
    start, cost = timeit.default_timer(), arguments.cost()
    search = search_for(arguments)
    best = search.ranked[:ROWS]
    seconds = timeit.default_timer() - start
    if not best:
        raise _nothing_fits(search, arguments)
    if arguments.verbose:
        rate = predictions_per_second(search.task)
        print(_speed(search, seconds, rate).en, file=sys.stderr)
    tables = [fastest_table(search, best, cost), choices_table(search, best[0])]
    print("\n\n".join(found.render(arguments.format) for found in tables), flush=True)
    chosen = best[0]
    if not arguments.no_measure and (measured := _measured(arguments, search, best[:MEASURED])) is not None:
        print(f"\n{measured_table(search, measured).render(arguments.format)}")
        chosen = min(measured, key=lambda found: found.seconds).prediction
    aside = sys.stdout if arguments.format in ("terminal", "md") else sys.stderr
    print(f"\n{advice(search, chosen, arguments.node).en}", file=aside)


def _nothing_fits(search: Search, arguments: OptimizeArguments) -> UserError:
    task, least = search.task, search.least_memory()
    has = task.limit
    where = f"--memory leaves {has / GIB:.1f} GiB" if task.memory == has else f"{task.gpu.name} has {has / GIB:.1f} GiB"
    tried = (next(filter(partial(_fits, arguments), changes), None) for changes in _changes(arguments, task, least))
    ways = [f"--{name} {_shown(value)}" for change in tried if change for name, value in change.items()]
    shown = f"{', '.join(ways)} or " if ways else ""
    return UserError(
        f"nothing fits: one sequence of {task.config.model.context_length:,} tokens needs at least "
        f"{least / GIB:.1f} GiB and {where}; use {shown}a smaller model"
    )


def _changes(arguments: OptimizeArguments, task: Task, least: float) -> Iterator[list[dict[str, Any]]]:
    """Yield, for each flag that may make something fit, its values, the one that changes the least first."""
    context, cards = task.config.model.context_length, {name: find_card(name) for name in _timed()}
    larger = {name: gpu.memory_gib * GIB for name, gpu in cards.items() if gpu is not None and gpu.memory_gib}
    larger = {name: size for name, size in larger.items() if usable_bytes(size) >= least and not arguments.memory}
    if arguments.memory:
        yield [{"memory": f"{math.ceil(10 * least / GIB) / 10:g}GiB"}]
    yield [{"allow": (*arguments.allow, BF16_STATE)}]
    shorter = [context >> times for times in range(1, context.bit_length()) if context % (1 << times) == 0]
    shorter = [length for length in shorter if length >= SHORTEST_CONTEXT]
    if shorter and _fits(arguments, {"context_length": shorter[-1]}):
        yield [{"context_length": length} for length in shorter]
    yield [{"gpus": task.gpus << times} for times in range(1, 7)]
    yield [{"gpu": name} for name in sorted(larger, key=lambda name: (larger[name], len(name)))]


def _fits(arguments: OptimizeArguments, change: dict[str, Any]) -> bool:
    """Return True if something is predicted to fit with other values of flags."""
    with contextlib.suppress(UserError):  # flags that exclude each other, a batch that the GPUs cannot share
        return bool(search_for(dataclasses.replace(arguments, **change)).ranked)
    return False


def _shown(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _speed(search: Search, seconds: float, rate: float) -> Text:
    return say(
        "{} candidates, {} of them fit, in {} s; {} times of steps are predicted a second on one core",
        "{} 个候选，其中 {} 个放得下，用时 {} s；单核每秒预测 {} 个步时",
        *(f"{search.considered:,}", f"{len(search.found):,}", number(seconds), f"{rate:,.0f}"),
    )


# -- tables -----------------------------------------------------------------------------------------------------------

MICRO_BATCH_HEAD, MICRO_BATCHES_HEAD = Text("micro batch", "micro batch 大小"), Text("micro batches", "micro batch 数")
LAYOUT_HEAD = Text("layout", "布局")
FIGURES = [
    Column(terms.PEAK, "GiB"),
    Column(terms.STEP, "ms"),
    Column(terms.TOKENS_PER_SECOND),
    Column(terms.MFU),
]


def fastest_table(search: Search, best: list[Prediction], cost: Cost = NO_COST) -> Table:
    task = search.task
    columns = [
        *([word(LAYOUT_HEAD)] if task.gpus > 1 else []),
        Column(MICRO_BATCH_HEAD),
        Column(MICRO_BATCHES_HEAD),
        word(terms.ACTIVATIONS),
        word(terms.OPTIMIZER_STATE),
        *FIGURES,
        *cost.columns,
    ]
    rows = [_row(search, found, cost) for found in best]
    title = say(
        "fastest predicted steps of {} on {}: {} tokens a step, context {}, {}, peaks up to {} GiB",
        "{} 在 {} 上预测最快的训练步：每步 {} 个 token，上下文 {}，{}，峰值不超过 {} GiB",
        *(task.config.size, _where(task), f"{task.tokens:,}", f"{task.config.model.context_length:,}"),
        *(task.config.precision, number(task.limit / GIB, 1)),
    )
    return Table(title, columns, rows, [*_notes(search, best), *cost.notes])


def _where(task: Task) -> str:
    return task.gpu.name if task.gpus == 1 else f"{task.gpus:,} x {task.gpu.name}"


def _row(search: Search, found: Prediction, cost: Cost) -> list[str | Text]:
    own, task = found.candidate, search.task
    whole = dataclasses.replace(task.config, batch_size=task.sequences)
    peak = task.gpu.peak_flops(task.config.precision)
    share = model_flops(whole) / found.seconds / peak if peak else None
    return [
        *([Strategy.parse(own.layout).title] if own.layout else []),
        *(str(own.micro_batch), str(own.micro_batches), activations_text(own.group, own.budget), own.state),
        *(number(search.peak_of(found) / GIB, 1), ms(found.seconds), f"{task.tokens / found.seconds:,.0f}"),
        percent(share),
        *cost.cells(task.tokens / found.seconds, task.gpus),
    ]


def _notes(search: Search, best: list[Prediction]) -> Iterator[Text]:
    task, plan = search.task, best[0].plan
    if task.config.precision == "fp8":
        yield mfu_note([task.gpu.peak_flops("fp8") or 0.0])
    if task.limit < task.memory:
        yield margin_note(task.error)
    if plan is not None:
        yield say(
            "the plan of the fastest step keeps {} GiB of activations in host memory",
            "最快一步的方案把 {} GiB 激活放在主机内存中",
            number(plan.host_bytes / GIB, 1),
        )
    if isinstance(search, RankSearch):
        yield say(
            "computation: the fast step's kernels on one GPU, with torch's AdamW; a step of several ranks was not "
            "measured. The fastest step waits {} ms for communication",
            "计算时间：单 GPU 快速步的内核，更新用 torch 的 AdamW；多进程训练步未经实测。最快一步等待通信 {} ms",
            ms(search.waiting(best[0].candidate)),
        )
        if task.gpu.link is None or task.gpu.network is None:
            yield say(
                "the interconnect of {} is not known: PCIe 4.0 x16 in a node, 25 Gb/s between nodes",
                "{} 的互连未知：假定节点内 PCIe 4.0 x16、节点间 25 Gb/s",
                task.gpu.name,
            )
    if task.profile.source == DATA_SHEET:
        yield say(
            "{} was not measured: times are those of its data sheet, within {}; their order is more certain",
            "{} 未经实测：时间按其规格参数推算，误差在 {} 以内；排序比时间可靠",
            *(task.gpu.name, percent(task.profile.spread, 0)),
        )
    elif task.gpus == 1:
        spread = percent(spread_of(task.config, task.profile), 0)
        yield say("a measurement is expected within {}", "实测值预计在 {} 以内", spread)


def choices_table(search: Search, chosen: Prediction) -> Table:
    """Return the costs and gains of the choices: for each choice, the best candidate that differs in it."""
    columns = [
        word(Text("instead", "若改为")),
        word(Text("the best with it", "其中最快")),
        Column(terms.STEP, "ms"),
        Column(Text("change", "变化")),
        Column(terms.PEAK, "GiB"),
        word(Text("remark", "说明")),
    ]
    rows = [_choice_row(search, chosen, found) for found in search.alternatives(chosen)]
    title = Text("what each choice costs or gives", "每项选择的得失")
    own = chosen.candidate
    notes = [
        say("chosen: {}", "当前选择：{}", described(own)),
        say(
            "{} x {}: micro batches x sequences in each",
            "{} x {}：micro batch 数 x 每个的序列数",
            *(str(own.micro_batches), str(own.micro_batch)),
        ),
    ]
    if problem := search.fp8_problem(chosen.candidate):
        notes.append(say("no prediction of matmuls in FP8: {}", "不预测 FP8 矩阵乘：{}", problem))
    return Table(title, columns, rows, notes)


def _choice_row(search: Search, chosen: Prediction, found: Alternative) -> list[str | Text]:
    best, bound = found.best, found.least_seconds
    remarks = []
    if found.unfit is not None:
        remarks.append(say("alone does not fit ({} GiB)", "仅改此项放不下（{} GiB）", number(found.unfit / GIB, 1)))
    if found.dimension == STATE and found.value not in search.task.states:
        remarks.append(say("changes the numerics: --allow {}", "改变数值精度：--allow {}", BF16_STATE))
    if found.dimension == PRECISION:
        remarks.append(say("changes the numerics: --precision {}", "改变数值精度：--precision {}", str(found.value)))
    figures: list[str | Text] = [Text("none fits", "都放不下"), "", "", ""]
    if bound is not None:
        remarks.append(say("a plan was not searched: at least {}", "未搜索方案：至少 {}", _change(bound, chosen)))
        figures[0] = Text("a plan", "方案") if best is None else figures[0]
    if best is not None:
        peak = number(search.peak_of(best) / GIB, 1)
        figures = [described(best.candidate), ms(best.seconds), _change(best.seconds, chosen), peak]
    return [_instead(found), *figures, listed(remarks, ("; ", "；")) if remarks else ""]


def _change(seconds: float, chosen: Prediction) -> str:
    return signed(seconds / chosen.seconds - 1, 1)


def _instead(found: Alternative) -> Text:
    words = {
        KEEP: Text("keep all activations", "保留全部激活"),
        RECOMPUTE: Text("recompute blocks", "重计算各块"),
        PLAN: Text("a plan within the memory", "显存预算内的方案"),
    }
    if found.dimension == ACTIVATIONS:
        return words[str(found.value)]
    if found.dimension == MICRO_BATCH:
        return say("micro batch {}", "micro batch 大小 {}", str(found.value))
    if found.dimension == GRAPH:
        return Text("with a CUDA graph", "使用 CUDA 图") if found.value else Text("no CUDA graph", "不用 CUDA 图")
    if found.dimension == LAYOUT:
        return Text(Strategy.parse(str(found.value)).title)
    if found.dimension == PRECISION:
        return Text("matmuls in FP8", "FP8 矩阵乘")
    fp32 = Text("fp32 masters and moments", "fp32 主权重与动量")
    return fp32 if found.value == "fp32" else Text("bf16 weights and moments", "bf16 权重与动量")


def described(own: Candidate) -> Text:
    """Return a candidate in words."""
    parts = [Text(Strategy.parse(own.layout).title)] if own.layout else []
    parts += [Text(f"{own.micro_batches} x {own.micro_batch}"), activations_text(own.group, own.budget)]
    parts += [] if own.state == "fp32" else [Text("bf16 state", "bf16 状态")]
    parts += [] if own.graph or own.layout else [Text("no graph", "无 CUDA 图")]
    return listed(parts, (", ", "，"))


# -- commands ---------------------------------------------------------------------------------------------------------


def advice(search: Search, chosen: Prediction, node: int = 8) -> Text:
    """Return the commands that run the chosen candidate."""
    task, own = search.task, chosen.candidate
    alone = task.run_config(own)
    if isinstance(search, RankSearch):
        return say("Train with it: {}", "训练命令：{}", ranks_command(alone, task, search.plan_of(own), node))
    before = f"{'='.join(ALLOCATOR)} " if search.peak_of(chosen) > usable_bytes(task.capacity) else ""
    return say(
        "Train with it: {}\nMeasure one of its micro batches: {}",
        "训练命令：{}\n测量其一个 micro batch：{}",
        f"{before}{train_command(alone, task.sequences)}",
        f"{before}{bench_command(alone)}",
    )


def train_command(run: RunConfig, sequences: int) -> str:
    flags = {**_trained(run, sequences), **({} if run.fast == "on" else {"fast": run.fast})}
    return f"cs336 train {' '.join(flag_words(flags))}"


def ranks_command(run: RunConfig, task: Task, plan: Plan, node: int) -> str:
    """Return the command for several GPUs; `cs336 train` chooses the parts of the fast step that ranks have."""
    data = {"data": example_data(task.gpus, node)}
    flags = {**_trained(run, task.gpus * task.sequences), **data, **parallel_flags(plan, run.model)}
    return f"{started(task.gpus, node)} {' '.join(flag_words(flags))}"


def _trained(run: RunConfig, sequences: int) -> dict[str, int | float | str]:
    return {
        "data": DATA,
        **shape_flags(run),
        "batch_size": sequences,
        "micro_batch_size": run.batch_size,
        "precision": run.precision,
        **_choices(run, TRAIN_GRAD_NORM),
    }


def bench_command(run: RunConfig) -> str:
    names = ("batch_size", "precision", "attention", "fast")
    flags = {**shape_flags(run), **{name: getattr(run, name) for name in names}, **_choices(run, BENCH_GRAD_NORM)}
    return f"cs336 bench {' '.join(flag_words(flags))}"


def _choices(run: RunConfig, grad_norm: float) -> dict[str, int | float | str]:
    """Return the flags that differ from the defaults: those of both commands, and those of one."""
    flags: dict[str, int | float | str] = {}
    if run.checkpoint_blocks:
        flags["checkpoint_blocks"] = run.checkpoint_blocks
    if run.memory_budget:
        flags["memory_budget"] = run.memory_budget
    if run.optimizer_state != "fp32":
        flags["optimizer_state"] = run.optimizer_state
    if run.max_grad_norm != grad_norm:
        flags["max_grad_norm"] = run.max_grad_norm
    return flags


# -- measurement ------------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    prediction: Prediction
    seconds: float
    """Measured seconds per step; infinite if the candidate failed."""
    peak: float | None
    status: str


def _measured(arguments: OptimizeArguments, search: Search, best: list[Prediction]) -> list[Measured] | None:
    """Measure candidates in a worker process. On a machine without this GPU return None, and a line that says why."""
    task = search.task
    if task.gpus > 1:
        print(f"not measured: {task.gpus} GPUs; cs336 optimize measures on one", file=sys.stderr)
        return None
    if shutil.which("nvidia-smi") is None:
        print(f"not measured: no NVIDIA GPU here; predictions are for {task.gpu.name}", file=sys.stderr)
        return None
    path = record.output_file(arguments.output) if arguments.output else new_run_file("optimize")
    try:
        with interrupt_raises(), _unfragmented(), Runner(path) as runner:
            here = find_by_driver_name(runner.environment.gpu)
            if runner.device != "cuda" or here is None or here.card != task.gpu.card:
                machine = runner.environment.gpu or "no GPU that torch can use"
                print(f"not measured: predictions are for {task.gpu.name}, this machine has {machine}", file=sys.stderr)
                return None
            configs = [_timed_config(task, found) for found in best]
            runner.run(gather((OPTIMIZE.name, config) for config in configs))
    except KeyboardInterrupt:
        raise Interrupted(path) from None
    print(f"records: {path}", file=sys.stderr)
    return [_result(path, prediction, config) for prediction, config in zip(best, configs, strict=True)]


def _result(path: Path, prediction: Prediction, config: Config) -> Measured:
    """Return the recorded result of a candidate."""
    own = (OPTIMIZE.name, record.cell_key(config))
    (cell,) = group(item for item in record.load(path).records if (item.experiment, item.cell) == own)
    seconds = cell.value("step_time") if cell.ok else None
    return Measured(prediction, seconds or math.inf, cell.value("peak_memory"), cell.status)


def _timed_config(task: Task, found: Prediction) -> Config:
    """Return the cell of a candidate, with as many steps as fit into a few seconds."""
    steps = min(MOST_STEPS, max(1, round(TIMED_SECONDS / found.seconds)))
    run = dataclasses.replace(task.run_config(found.candidate), num_steps=steps)
    return cell_config(run, found.candidate.micro_batches)


@contextlib.contextmanager
def _unfragmented() -> Iterator[None]:
    """Let worker processes use the last few GiB of a GPU, unless the user has set the allocator up."""
    name, value = ALLOCATOR
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def measured_table(search: Search, measured: list[Measured]) -> Table:
    columns = [
        word(Text("candidate", "候选")),
        Column(terms.PREDICTED, "ms"),
        Column(terms.MEASURED, "ms"),
        Column(terms.ERROR),
        Column(Text("predicted peak", "预测峰值"), "GiB"),
        Column(Text("measured peak", "实测峰值"), "GiB"),
    ]
    rows: list[list[str | Text]] = []
    for found in measured:
        prediction = found.prediction
        own: list[str | Text] = [described(prediction.candidate), ms(prediction.seconds)]
        predicted_peak = number(search.peak_of(prediction) / GIB, 1)
        if math.isfinite(found.seconds):
            error = signed(prediction.seconds / found.seconds - 1, 1)
            peak = number(found.peak / GIB, 1) if found.peak is not None else ""
            rows.append([*own, ms(found.seconds), error, predicted_peak, peak])
        else:
            rows.append([*own, found.status.split(":")[0], "", predicted_peak, ""])
    title = say("the best {}, measured on {}", "实测前 {} 名（{}）", str(len(measured)), search.task.gpu.name)
    return Table(title, columns, rows)
