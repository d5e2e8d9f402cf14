"""The commands that run a layout of `cs336 plan`: `cs336 train` on one GPU, torchrun in a node, `cs336 launch` beyond.

`cs336 train` has fewer layouts than the plan: no ZeRO-2, no ring attention, ZeRO-1 on whole layers only. Each of those
has a nearest one that it does have.
"""

import dataclasses
import shlex
from collections.abc import Mapping
from typing import Any

from cs336_systems.config import SIZES, ModelConfig, RunConfig, UserError, model_config
from cs336_systems.experiments.ranks.plan_cells import INTERLEAVED, plans, required_axes, schedule_of
from cs336_systems.predict.gpus import find_card
from cs336_systems.predict.parallel_model import Plan
from cs336_systems.predict.rank_shards import STAGES_PER_RANK
from cs336_systems.predict.strategy import Strategy

DATA, SHARED_DATA = "tokens.bin", "/shared/tokens.bin"
"""Name of the user's data in example commands: on this machine, and in a folder that all nodes share."""
BASE_SIZE = "small"
"""Size whose fields the flags override to describe a shape that has no name."""
WRAPPERS = {0: "ddp", 1: "ddp-sharded", 3: "fsdp"}
"""Our wrappers by the stage of ZeRO, for ranks that split data only."""


def nearest_trained(strategy: Strategy) -> Strategy:
    """Return the layout of `cs336 train` that is most like a layout of the plan; most often itself.

    Ranks that split sequences (`--cp`) shard weights, too. A mesh of torch's engine replicates or shards everything.
    """
    stage = strategy.stage
    if stage == 2 or strategy.context > 1 or (stage == 1 and strategy.group > 1):
        stage = 3
    return dataclasses.replace(
        strategy, stage=stage, ring=False, chunks=min(strategy.chunks, STAGES_PER_RANK[INTERLEAVED])
    )


def is_training(config: Mapping[str, Any]) -> bool:
    """Return whether a plan is of training a whole model, and not of a part of it."""
    return config["count"] == "transformer" and RunConfig.of(config).mode == "train-step"


def is_trained(config: Mapping[str, Any], name: str) -> bool:
    """Return whether `cs336 train` has a layout and can split the model of this plan by it."""
    strategy = Strategy.parse(name)
    if nearest_trained(strategy) != strategy:
        return False
    try:
        command_of(config, strategy)
    except UserError:
        return False
    return True


def command_of(config: Mapping[str, Any], strategy: Strategy) -> str:
    """Return the command that trains the model of a plan by a layout; raise UserError if there is none."""
    (plan,) = plans({**config, "strategies": [strategy.name]})
    run, gpus = RunConfig.of(config), int(config["gpus"])
    sequences = run.batch_size * strategy.group
    if sequences % plan.micro_batches:
        raise UserError(f"{plan.micro_batches} micro batches do not divide the {sequences} sequences of a replica")
    node = int(config["node"])
    flags = {
        "data": example_data(gpus, node),
        **shape_flags(run),
        "batch_size": run.batch_size * gpus,
        "micro_batch_size": sequences // plan.micro_batches,
        "precision": run.precision,
        **({} if run.attention == "auto" else {"attention": run.attention}),
        **({"checkpoint_blocks": run.checkpoint_blocks} if run.checkpoint_blocks else {}),
        **({"fast": "off"} if run.fast == "off" else {}),
        **parallel_flags(plan, run.model),
    }
    card = config["gpu"] if find_card(config["gpu"]) else ""
    return f"{started(gpus, node, card)} {' '.join(flag_words(flags))}"


def parallel_flags(plan: Plan, model: ModelConfig) -> dict[str, Any]:
    """Return the flags of a layout that `cs336 train` has; raise UserError for a model that it cannot split."""
    strategy = plan.strategy
    if not plan.is_on_engine:
        return {"parallel": WRAPPERS[strategy.stage]}
    axes = {name: size for name, size in required_axes(plan, model)._asdict().items() if size > 1}
    return {"engine": "torch", **axes, **({"pp_schedule": schedule_of(strategy)} if strategy.chunks > 1 else {})}


def shape_flags(run: RunConfig) -> dict[str, Any]:
    """Return the flags of the model: the name of a size and what differs from it."""
    size = run.size if run.size in SIZES else BASE_SIZE
    named = vars(model_config(size))
    return {"size": size, **{name: value for name, value in vars(run.model).items() if value != named[name]}}


def flag_words(flags: Mapping[str, Any]) -> list[str]:
    """Return flags as words of a command line."""
    negated = {True: "--{}", False: "--no-{}"}
    return [
        negated[value].format(name) if isinstance(value, bool) else f"--{name} {shlex.quote(str(value))}"
        for name, value in flags.items()
    ]


def example_data(gpus: int, node: int) -> str:
    """Return the name of the user's data in a command for these GPUs."""
    return DATA if gpus <= node else SHARED_DATA


def started(gpus: int, node: int, card: str = "") -> str:
    """Return the words that start `cs336 train` on these GPUs; a script for several nodes is checked for the card."""
    if gpus == 1:
        return "cs336 train"
    if gpus <= node:
        return f"torchrun --nproc_per_node {gpus} -m cs336_systems train"
    each = max(count for count in range(1, node + 1) if gpus % count == 0)
    named = f" --gpu {shlex.quote(card)}" if card else ""
    return f"cs336 launch --slurm --nodes {gpus // each} --gpus_per_node {each}{named} -- train"
