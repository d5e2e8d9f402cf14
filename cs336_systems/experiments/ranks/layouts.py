"""`cs336 plan`, and the instrument of the `parallel_plan` experiment: what a parallel layout needs."""

from dataclasses import dataclass
from typing import Any

from cs336_systems.config import RunConfig, UserError, flag, flag_like
from cs336_systems.predict.fit import gpu_bytes, usable_bytes
from cs336_systems.predict.gpus import GIGA, GPUS, TERA, find_card
from cs336_systems.predict.model_flags import ShapeArguments
from cs336_systems.predict.parallel_model import Cluster, Plan, Strategy, feed_forward, transformer
from cs336_systems.report.cells import CellView
from cs336_systems.report.parallel import plan as plan_tables
from cs336_systems.table import Table

STRATEGIES = ("dp", "zero1", "zero2", "zero3", "tp8", "zero3+tp8")
COUNTED = {"transformer": transformer, "feed-forward": feed_forward}


NODE_CARDS = [gpu.card for gpu in GPUS if gpu.link is not None]
"""GPUs whose interconnect is known."""


@dataclass(frozen=True)
class PlanArguments(ShapeArguments):
    size: str = flag("xxl", "a size's name; any of its fields may be replaced")
    batch_size: int = flag(1, "sequences for each GPU")
    precision: str = flag("bf16", "fp32, or bf16 / fp16 for products and messages", ("fp32", "bf16", "fp16"))
    attention: str = flag("auto", "attention implementation", ("auto", "reference", "sdpa"))
    checkpoint_blocks: int = flag(1, "recompute activations in groups of this many blocks (0: keep them all)")
    mode: str = flag_like(RunConfig, "mode")
    gpus: int = flag(1024, "GPUs in all")
    gpu: str = flag("h100", f"{', '.join(NODE_CARDS)}; or memory such as 95GB, with --tflops, --link and --network")
    strategy: tuple[str, ...] = flag(STRATEGIES, "dp, zero1, zero2, zero3 (= fsdp), tpN, or mixes such as zero3+tp8")
    count: str = flag("transformer", "the whole model, or two matrices a block as in the handout", tuple(COUNTED))
    tflops: float | None = flag(None, "TFLOP/s that a GPU reaches (default: its dense peak)")
    node: int = flag(8, "GPUs that the fast link joins")
    link: float | None = flag(None, "GB/s, one way, between GPUs of a node")
    network: float | None = flag(None, "GB/s, one way, of each GPU to other nodes")


def plan_config(arguments: PlanArguments) -> dict[str, Any]:
    """The configuration of a `parallel_plan` cell; what is not given is that of the GPU."""
    for name in ("gpus", "node"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name} must be at least 1, got {getattr(arguments, name)}")
    for name in ("tflops", "link", "network"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name} must be above 0, got {value}")
    if not arguments.strategy:
        raise UserError(f"--strategy names none; try {','.join(STRATEGIES)}")
    memory = gpu_bytes(arguments.gpu)
    rates = _rates(arguments)
    run = arguments.run_config(default_size="xxl", device="cuda")
    return {
        **run.to_dict(),
        "gpus": arguments.gpus,
        "gpu": arguments.gpu,
        "gpu_memory": memory,
        "node": arguments.node,
        **rates,
        "strategies": [Strategy.parse(text).name for text in arguments.strategy],
        "count": arguments.count,
    }


def _rates(arguments: PlanArguments) -> dict[str, float]:
    """FLOP/s and bytes per second: those given, else those of the GPU."""
    rates: dict[str, float | None] = {"tflops": None, "link": None, "network": None}
    if gpu := find_card(arguments.gpu):
        rates = {"tflops": gpu.peaks.of(arguments.precision), "link": gpu.link, "network": gpu.network}
    for name, unit in (("tflops", TERA), ("link", GIGA), ("network", GIGA)):
        given = getattr(arguments, name)
        rate = rates[name] if given is None else given
        rates[name] = None if rate is None else rate * unit
    if missing := [f"--{name}" for name, rate in rates.items() if rate is None]:
        raise UserError(f"what a {arguments.gpu!r} reaches is not known here: give {', '.join(missing)}")
    return {{"tflops": "flops"}.get(name, name): rate for name, rate in rates.items() if rate is not None}


def plans(config: dict[str, Any]) -> list[Plan]:
    usable = usable_bytes(config["gpu_memory"])
    cluster = Cluster(config["gpus"], usable, config["flops"], config["node"], config["link"], config["network"])
    workload = COUNTED[config["count"]](RunConfig.of(config))
    return [Plan(workload, cluster, Strategy.parse(name)) for name in config["strategies"]]


def measure_plan(config: dict[str, Any]) -> list[list[Any]]:
    metrics: list[list[Any]] = []
    for plan in plans(config):
        name = plan.strategy.name
        metrics += [[f"{name}: {part}_memory", "B", [size]] for part, size in plan.memory.items()]
        metrics += [[f"{name}: sent by collective: {c.name}, {c.purpose}", "B", [c.sent]] for c in plan.collectives]
        for during in ("forward", "backward"):
            metrics.append([f"{name}: {during}_compute_time", "s", [plan.compute(during)]])
            metrics.append([f"{name}: {during}_communication_time", "s", [plan.communication(during)]])
        metrics.append([f"{name}: fits", "1", [int(plan.fits)]])
        for metric, value in (("least_tokens", plan.least_tokens), ("smallest_cluster", plan.smallest_cluster)):
            if value is not None:
                metrics.append([f"{name}: {metric}", "1", [value]])
    return metrics


def tables_of(arguments: PlanArguments) -> list[Table]:
    """As `cs336 run parallel_plan` would show it, without a run."""
    config = plan_config(arguments)
    return plan_tables([CellView.of("parallel_plan", config, measure_plan(config))])
