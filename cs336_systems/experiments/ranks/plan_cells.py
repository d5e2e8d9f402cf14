"""Plans of parallel layouts: the flags of `cs336 plan`, the cells that it predicts, and what such a cell holds.

Predicted from the configuration (predict/parallel_model.py); nothing runs.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from cs336_systems.commands import flags_named
from cs336_systems.config import OPTIMIZER_STATES, ModelConfig, RunConfig, UserError, flag, flag_like
from cs336_systems.predict.building_memory import building_peak
from cs336_systems.predict.engine_memory import engine_peak, is_predicted
from cs336_systems.predict.fit import gpu_bytes, usable_bytes
from cs336_systems.predict.gpus import ETHERNET, GIGA, PCIE_LINK, TERA, find_card, shown_name
from cs336_systems.predict.memory_model import estimate
from cs336_systems.predict.model_flags import ShapeArguments
from cs336_systems.predict.optimize_ranks import FAST_OF_RANKS, FP8_ON_RANKS
from cs336_systems.predict.parallel_model import Cluster, Plan, Workload, feed_forward, runs_fused, transformer
from cs336_systems.predict.rank_shards import (
    SPLIT_BY_TP,
    STAGES_PER_RANK,
    Mesh,
    divides_model,
    require_schedule,
    require_split,
)
from cs336_systems.predict.strategy import Strategy
from cs336_systems.predict.training_cost import CostArguments
from cs336_systems.record import Metric
from cs336_systems.report.cells import CellView
from cs336_systems.report.terms import ACTIVATIONS, BACKWARD, FORWARD, GRADIENTS, PARAMETERS
from cs336_systems.table import FORMATS
from cs336_systems.text import Text, say

PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
"""Precisions that the flag knows; that of fp8 is refused with a reason."""
STRATEGIES = ("dp", "zero1", "zero2", "zero3", "tp8", "zero3+tp8", "zero3+cp4", "zero1+tp8+pp4")
LONG_CONTEXTS = {32_768: "zero3+cp8", 131_072: "zero3+cp16"}
"""Least context -> a layout that is usual from there on: fewer ranks would hold too much of a sequence."""
ALONE, SHARDED = Strategy(0), Strategy(3)
MOST_GPUS = 1_000_000
COUNTED = {"transformer": transformer, "feed-forward": feed_forward}
INTERLEAVED = "interleaved"


@dataclass(frozen=True)
class PlanArguments(CostArguments, ShapeArguments):
    size: str = flag("xxl", "a size's name; any of its fields may be replaced")
    batch_size: int = flag(1, "sequences for each GPU")
    precision: str = flag("bf16", "fp32, or bf16 / fp16 for matmuls and communication (fp8: cs336 fit)", PRECISIONS)
    attention: str = flag("auto", "attention implementation", ("auto", "reference", "sdpa"))
    checkpoint_blocks: int = flag(1, "recompute activations in groups of this many blocks (0: keep all)")
    mode: str = flag_like(RunConfig, "mode")
    gpus: int = flag(1024, "total number of GPUs")
    fast: str = flag(
        "auto", "the fast step: on, off, or kernels,loss (auto: on for the training step of a whole model)"
    )
    gpu: str = flag("h100", "4090, A100, H200, ...; or memory such as 95GB, with --tflops")
    memory_budget: str = flag("", "not for plan: for one GPU, see cs336 fit and cs336 memory")
    optimizer_state: str = flag("fp32", "for plan only fp32; bf16 is for one GPU, see cs336 fit", OPTIMIZER_STATES)
    update_in_backward: bool = flag(False, "not for plan: for one GPU, see cs336 fit and cs336 memory")
    strategy: tuple[str, ...] = flag(
        STRATEGIES, "dp, zero1, zero2, zero3 (= fsdp), tpN, cpN, ringN, ppN, replicateN, or mixes such as zero1+tp8+pp4"
    )
    micro_batches: int = flag(
        0, "micro batches of a step (0: one for each sequence of a replica with cpN or ppN, else 1)"
    )
    count: str = flag("transformer", "the whole model, or two matrices a block as in the handout", tuple(COUNTED))
    tflops: float | None = flag(None, "TFLOP/s that a GPU reaches (default: its dense peak)")
    node: int = flag(8, "GPUs that the fast link joins")
    link: float | None = flag(None, f"GB/s, one way, between GPUs of a node (default: the GPU's, else {PCIE_LINK:g})")
    network: float | None = flag(
        None, f"GB/s, one way, of a GPU to other nodes (default: the GPU's, else {ETHERNET:g})"
    )
    format: str = flag("terminal", "table format", FORMATS)


def plan_config(arguments: PlanArguments) -> dict[str, Any]:
    """Return the configuration of a `parallel_plan` cell; rates that are not given are the GPU's."""
    for name in ("gpus", "node"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name} must be at least 1, got {getattr(arguments, name)}")
    if arguments.gpus > MOST_GPUS:
        raise UserError(f"--gpus {arguments.gpus:,} is too large for a prediction: at most {MOST_GPUS:,}")
    if arguments.precision == "fp8":
        raise UserError(f"{FP8_ON_RANKS}; plan with --precision bf16")
    for name in ("tflops", "link", "network"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name} must be above 0, got {value}")
    if arguments.micro_batches < 0:
        raise UserError(f"--micro_batches must be at least 0, got {arguments.micro_batches}")
    if not arguments.strategy:
        raise UserError(f"--strategy names none; try {','.join(STRATEGIES)}")
    memory = gpu_bytes(arguments.gpu)
    rates, assumed = _rates(arguments)
    run = arguments.predicted_config(default_size="xxl", fast=_fast(arguments))
    strategies, left_out = _strategies(arguments, run.model)
    # A cell without notes keeps the key that it has had before there were any.
    notes = {"assumed": assumed, "left_out": left_out}
    return {
        **run.to_dict(),
        "gpus": arguments.gpus,
        "gpu": arguments.gpu,
        "gpu_memory": memory,
        "node": arguments.node,
        **rates,
        "strategies": strategies,
        "count": arguments.count,
        **({"micro_batches": arguments.micro_batches} if arguments.micro_batches else {}),
        **{name: value for name, value in notes.items() if value},
    }


def _rates(arguments: PlanArguments) -> tuple[dict[str, float], list[str]]:
    """Return FLOP/s and bytes per second as given, or else the GPU's own, or else assumed; and the names of the assumed
    rates."""
    gpu = find_card(arguments.gpu)
    own = (gpu.peaks.of(arguments.precision), gpu.link, gpu.network) if gpu else (None, None, None)
    tflops = arguments.tflops or own[0]
    if tflops is None:
        lacks = f"has no {arguments.precision}; take another --precision, or" if gpu else "is no known card:"
        raise UserError(f"--gpu {arguments.gpu!r} {lacks} give --tflops")
    link, network = arguments.link or own[1], arguments.network or own[2]
    assumed = [name for name, rate in (("link", link), ("network", network)) if rate is None]
    rates = {"flops": tflops * TERA, "link": (link or PCIE_LINK) * GIGA, "network": (network or ETHERNET) * GIGA}
    return rates, assumed


def _fast(arguments: PlanArguments) -> str:
    """Return the parts of the fast step that several GPUs can use."""
    if arguments.memory_budget:
        raise UserError(
            "--memory_budget is for one GPU, see cs336 fit and cs336 memory; leave it out, or use --checkpoint_blocks"
        )
    if arguments.optimizer_state != "fp32" or arguments.update_in_backward:
        given = (
            "--update_in_backward" if arguments.update_in_backward else f"--optimizer_state {arguments.optimizer_state}"
        )
        raise UserError(f"{given} is for one GPU, see cs336 fit and cs336 memory; leave it out")
    if arguments.fast == "auto":
        return FAST_OF_RANKS if (arguments.mode, arguments.count) == ("train-step", "transformer") else "off"
    if arguments.fast == "on":
        return FAST_OF_RANKS
    if one_gpu := [part for part in ("optimizer", "graph") if part in arguments.fast]:
        raise UserError(f"--fast {one_gpu[0]} is for one GPU; use --fast kernels,loss")
    return arguments.fast


def _strategies(arguments: PlanArguments, model: ModelConfig) -> tuple[list[str], list[str]]:
    """Return the names of the layouts and, if none was asked for, of the usual layouts that do not divide the GPUs or
    the model and were replaced."""
    asked = [Strategy.parse(text) for text in arguments.strategy]
    if arguments.strategy != STRATEGIES:
        return list(dict.fromkeys(strategy.name for strategy in asked)), []
    names = usual_layouts(arguments.gpus, model, arguments.count, arguments.node)
    left_out = [strategy.name for strategy in asked if strategy.name not in names]
    return names, left_out if arguments.gpus > 1 else []


def usual_layouts(gpus: int, model: ModelConfig, count: str, node: int) -> list[str]:
    """Return the names of the usual layouts with groups that divide `gpus` and the heads and widths of the model,
    without those that lose an axis of stages or sequences by it; and ZeRO-3 within each of several nodes. On one GPU
    all layouts are the same step."""
    if gpus == 1:
        return [ALONE.name]
    found = []
    longer = [name for least, name in LONG_CONTEXTS.items() if model.context_length >= least]
    for asked in map(Strategy.parse, (*STRATEGIES, *longer)):
        fitting = asked.within(gpus)
        while count == "transformer" and not divides_model(model, fitting.tensor):
            fitting = replace(fitting, tensor=fitting.tensor // 2)
        keeps_axes = (fitting.pipeline > 1, fitting.context > 1) == (asked.pipeline > 1, asked.context > 1)
        if keeps_axes and fitting.pipeline <= model.num_layers:
            found.append(fitting.name)
        if fitting == SHARDED and count == "transformer" and gpus > node > 1 and gpus % node == 0:
            found.append(replace(SHARDED, replicate=gpus // node).name)
    return list(dict.fromkeys(found))


def run_of(config: Mapping[str, Any], strategy: Strategy) -> RunConfig:
    """Return the step of a layout's ranks, with those parts of the fast step with which `cs336 train` runs it."""
    run = RunConfig.of(config)
    return run if runs_fused(strategy) else replace(run, fast="off")


def unfused_layouts(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the layouts that run without the parts of the fast step that were asked for."""
    fast = config.get("fast", "off")
    return [name for name in config["strategies"] if run_of(config, Strategy.parse(name)).fast != fast]


def plans(config: Mapping[str, Any]) -> list[Plan]:
    """Return the plan of each layout."""
    usable = usable_bytes(config["gpu_memory"])
    cluster = Cluster(config["gpus"], usable, config["flops"], config["node"], config["link"], config["network"])
    micro = config.get("micro_batches", 0)
    workloads: dict[str, Workload] = {}
    found = []
    for strategy in map(Strategy.parse, config["strategies"]):
        run = run_of(config, strategy)
        if run.fast not in workloads:
            workloads[run.fast] = COUNTED[config["count"]](run)
        found.append(Plan(workloads[run.fast], cluster, strategy, micro))
    return found


def mesh_of(plan: Plan) -> Mesh:
    """Return the device mesh of a layout on torch's engine."""
    strategy = plan.strategy
    sharded = strategy.stage == 3
    return Mesh(
        pp=strategy.pipeline,
        dp_replicate=strategy.replicate if sharded else plan.replicas,
        dp_shard=plan.shards // strategy.context if sharded else 1,
        cp=strategy.context,
        tp=strategy.tensor,
    )


def required_axes(plan: Plan, model: ModelConfig) -> Mesh:
    """Return the device mesh of a layout; raise UserError for a model that its ranks cannot split."""
    strategy, mesh = plan.strategy, mesh_of(plan)
    if plan.shards % strategy.context:
        raise UserError(f"{plan.shards} shards of weights are not a multiple of the {strategy.context} of a sequence")
    schedule = schedule_of(strategy)
    require_split(model, mesh, mesh.pp * STAGES_PER_RANK[schedule])
    require_schedule(mesh.pp, schedule, plan.micro_batches)
    return mesh


def schedule_of(strategy: Strategy) -> str:
    """Return the name of the pipeline schedule, as `--pp_schedule` spells it."""
    return INTERLEAVED if strategy.chunks > 1 else "1f1b"


def impossible_layouts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the layouts whose ranks cannot split the model, each with the reason: a head, a layer or a sequence that
    does not divide."""
    split = [name for name in config["strategies"] if Strategy.parse(name).group > 1]
    if not split or config["count"] != "transformer":
        return {}
    model, found = RunConfig.of(config).model, {}
    for plan in plans({**config, "strategies": split}):
        try:
            required_axes(plan, model)
        except UserError as error:
            found[plan.strategy.name] = flags_named(error)
    return found


def peak_on_engine(config: Mapping[str, Any], plan: Plan) -> int | None:
    """Return the predicted peak of a GPU under torch's engine; None where it does not run the layout, or where its peak
    is not predicted."""
    run, strategy = run_of(config, plan.strategy), plan.strategy
    is_fused_by_ours = run.fast != "off" and not plan.is_on_engine
    group = strategy.tensor * strategy.context
    stages = (0, 3) if strategy.context == 1 else (3,)
    is_run = strategy.stage in stages and strategy.group == group and not (strategy.ring or is_fused_by_ours)
    is_split = all(getattr(run.model, name) % strategy.tensor == 0 for name in SPLIT_BY_TP)
    is_known = run.mode == "train-step" and run.precision in ("fp32", "bf16") and config["count"] == "transformer"
    mesh, (sequences, rest) = mesh_of(plan), divmod(run.batch_size * group, plan.micro_batches)
    if not (is_run and is_split and is_known) or rest or not is_predicted(run, mesh, sequences):
        return None
    return engine_peak(run, mesh, plan.micro_batches, sequences)


def needed_memory(config: Mapping[str, Any], plan: Plan) -> float:
    """Return the bytes that a GPU needs: the peak of torch's engine where `cs336 train` runs the layout on it and the
    peak is predicted, on one GPU that of the fast step, else the sum of the plan's parts."""
    peak = None
    if plan.cluster.gpus == 1:
        peak = alone_peak(config, plan)
    elif plan.is_on_engine:
        peak = peak_on_engine(config, plan)
    return plan.total if peak is None else float(peak)


def alone_peak(config: Mapping[str, Any], plan: Plan) -> int | None:
    """Return the peak of one GPU that trains alone, the building of the model included, as `cs336 optimize` predicts
    it; None if it is not a training step in one micro batch."""
    run = RunConfig.of(config)
    if config["count"] != "transformer" or run.mode != "train-step" or plan.micro_batches > 1:
        return None
    return _alone_peak(replace(run, fast="on") if run.fast == FAST_OF_RANKS else run)


@lru_cache(maxsize=64)
def _alone_peak(run: RunConfig) -> int:
    return max(estimate(run).peak, building_peak(run).peak)


def plan_fits(config: Mapping[str, Any], plan: Plan) -> bool:
    return needed_memory(config, plan) <= plan.cluster.memory


def fewest_gpus(config: Mapping[str, Any], plan: Plan) -> int | None:
    """Return the fewest GPUs on which the layout fits with as many sequences on each; None if no number is enough."""
    strategy = plan.strategy
    unit = strategy.group * strategy.replicate
    if unit == 1 and plan_fits(config, replace(plan, cluster=replace(plan.cluster, gpus=1))):
        return 1
    if not plan.is_on_engine or peak_on_engine(config, plan) is None:
        return plan.smallest_cluster

    def fits(times: int) -> bool:
        return plan_fits(config, replace(plan, cluster=replace(plan.cluster, gpus=times * unit)))

    most = MOST_GPUS // unit if strategy.stage == 3 else 1  # more replicas of whole weights save no memory
    # More shards need less memory until they are padded to a row each.
    enough = next((times for times in (2**power for power in range(most.bit_length())) if fits(times)), None)
    if enough is None:
        return None
    least = enough // 2 + 1
    return unit * (least + bisect_left(range(least, enough), True, key=fits))


def measure_plan(config: dict[str, Any]) -> list[Metric]:
    """Instrument of `parallel_plan`; one variant for each strategy."""
    metrics: list[Metric] = []
    for plan in plans(config):
        found = [Metric(f"{part}_memory", "B", [size]) for part, size in plan.memory.items()]
        found += [Metric(f"{SENT}{c.name}, {c.purpose}", "B", [c.sent]) for c in plan.collectives]
        for during in PASSES:
            found.append(Metric(f"{during}_compute_time", "s", [plan.compute(during)]))
            found.append(Metric(f"{during}_communication_time", "s", [plan.communication(during)]))
        if plan.strategy.pipeline > 1:
            found += [Metric("bubble_share", "1", [plan.bubble]), Metric("idle_time", "s", [plan.idle])]
        if (peak := peak_on_engine(config, plan)) is not None:
            found.append(Metric("engine_peak_memory", "B", [peak]))
        found.append(Metric("needed_memory", "B", [needed_memory(config, plan)]))
        found.append(Metric("fits", "1", [int(plan_fits(config, plan))]))
        for name, value in (("least_tokens", plan.least_tokens), ("smallest_cluster", fewest_gpus(config, plan))):
            if value is not None:
                found.append(Metric(name, "1", [value]))
        metrics += [metric._replace(variant=plan.strategy.name) for metric in found]
    return metrics


def planned(arguments: PlanArguments) -> CellView:
    """Return the cell that `cs336 run parallel_plan` would record, without a run."""
    config = plan_config(arguments)
    return CellView.of("parallel_plan", config, measure_plan(config))


# -- what a cell holds ------------------------------------------------------------------------------------------------

PASSES = {"forward": FORWARD, "backward": BACKWARD}
SENT = "sent by collective: "
PARTS = {
    "parameter": PARAMETERS,
    "gradient": GRADIENTS,
    "optimizer": Text("optimizer", "优化器状态"),
    "activation": ACTIVATIONS,
    "working": Text("working", "工作副本"),
}
"""Parts of a GPU's memory, with their headings."""


class Passes(NamedTuple):
    """Seconds of a strategy's computation and communication, in forward and in backward; and of waiting in between."""

    compute: list[float]
    communication: list[float]
    idle: float = 0.0
    """Seconds in which a pipeline stage waits for others."""
    waiting: tuple[float, ...] = (0.0, 0.0)
    """The part of the communication that never overlaps, because the next kernel needs it; known for plans."""

    @classmethod
    def of(cls, own: CellView) -> "Passes":
        return cls(
            [own.value(f"{during}_compute_time") or 0.0 for during in PASSES],
            [own.value(f"{during}_communication_time") or 0.0 for during in PASSES],
            own.value("idle_time") or 0.0,
        )

    @classmethod
    def of_plan(cls, plan: Plan) -> "Passes":
        compute, communication = (list(map(seconds, PASSES)) for seconds in (plan.compute, plan.communication))
        return cls(compute, communication, plan.idle, tuple(map(plan.waiting, PASSES)))

    @property
    def overlapped(self) -> float:
        """Seconds of the step if all communication overlaps with matmuls."""
        return self.idle + sum(map(max, self.compute, self.communication))

    @property
    def sequential(self) -> float:
        return self.idle + sum(self.compute) + sum(self.communication)

    @property
    def late(self) -> list[Text]:
        """Passes in which communication takes longer than matmuls."""
        pairs = zip(PASSES.values(), self.compute, self.communication, strict=True)
        return [name for name, compute, communication in pairs if communication > compute]


def part_sizes(own: CellView) -> list[float]:
    return [own.value(f"{part}_memory") or 0.0 for part in PARTS]


def total(cell: CellView, name: str) -> float:
    """Return the bytes that a GPU of a layout needs."""
    own = cell.variant(name)
    return own.value("needed_memory") or sum(part_sizes(own))


def possible_layouts(cell: CellView) -> list[str]:
    """Return the layouts whose ranks can split the model."""
    impossible = impossible_layouts(cell.config)
    return [name for name in cell.get("strategies") if name not in impossible]


def fitting_layouts(cell: CellView) -> list[str]:
    """Return the layouts that can split the model and whose ranks have enough memory."""
    return [name for name in possible_layouts(cell) if cell.variant(name).value("fits")]


def layout_name(name: str) -> str:
    """Return the name that reports use for a layout."""
    return Strategy.parse(name).title


def gpu_name(cell: CellView) -> str:
    return shown_name(str(cell.get("gpu")))


def where(cell: CellView) -> Text:
    """Return the model and the cluster."""
    only = Text(" ", " ")
    if cell.get("count") != "transformer":
        only = say(" ({} only) ", "（仅{}）", Text(cell.get("count"), "前馈"))
    return say("{}{}on {} x {}", "{}{}在 {} x {} 上", cell.get("size"), only, f"{cell.get('gpus'):,}", gpu_name(cell))
