"""Builds the step of a training run: model, wrapper, optimizer and loss scale from the settings."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.config import RunConfig, UserError
from cs336_systems.kernels.flash.dispatch import hopper_kernels, triton_problem
from cs336_systems.kernels.fused.packed_adamw import PackedAdamW
from cs336_systems.measure.block_planner import blocks_for_machine
from cs336_systems.model import Attention, TransformerLM
from cs336_systems.parallel import DDP, FSDP, ShardedOptimizer
from cs336_systems.parallel.launch import Rank
from cs336_systems.parallel.torch_engine import TorchEngine, store_shard
from cs336_systems.predict.attention_programs import repeatable_suits_hopper
from cs336_systems.step.block_memory import ChoiceByBlock
from cs336_systems.step.initialise import initialise
from cs336_systems.step.memory_budget import apply_memory_budget
from cs336_systems.step.train_step import (
    AUTOCAST_DTYPES,
    STATE_DTYPES,
    TrainStep,
    best_attention,
    build_model,
    require_device,
    require_fp8,
)
from cs336_systems.step.updates import LossScale
from cs336_systems.train.settings import OptimizerSettings, TrainSettings
from cs336_systems.train.weights import load_each, load_weights

BUCKET_MB = 25


def build_step(settings: TrainSettings, rank: Rank) -> TrainStep:
    """Build the step of this rank, with the initial weights of the seed or of `--init`."""
    run = settings.run_config(str(rank.device), rank.world_size)
    require_device(run.device)
    require_fp8(run)
    is_replayed, is_packed = settings.faults.replay_every > 0, settings.data.pack == "documents"
    if is_replayed and not is_packed:  # packed documents have no kernels that are chosen before the call
        run = dataclasses.replace(run, attention=_repeatable_attention(run))
    packs = "optimizer" in run.fast_parts
    torch.manual_seed(settings.seed)
    is_filled_later = settings.parallel.engine == "torch" or (packs and settings.init is None)
    with torch.device("meta") if is_filled_later else rank.device:
        model = build_model(run)
    for part in model.modules():
        if isinstance(part, Attention):
            part.deterministic = is_replayed
    apply_memory_budget(model, run, _agreed(blocks_for_machine(run)))
    if settings.init is not None and not is_filled_later:
        load_weights(Path(settings.init), model)
    optimizer: torch.optim.Optimizer
    if packs:
        optimizer = _packed_optimizer(model, settings, rank.device)
        if settings.init is None:
            initialise(model, rank.device, optimizer.load_master)
    else:
        model = _wrap(model, settings, rank)
        optimizer = _plain_optimizer(model, settings)
    loss_scale = LossScale.of(run.precision, settings.optimizer.loss_scale_growth)
    return TrainStep(model, run, optimizer, loss_scale=loss_scale)


def _agreed(blocks: ChoiceByBlock | None) -> ChoiceByBlock | None:
    """Return rank 0's plan on all ranks: FSDP gathers weights for recomputation, so all ranks must recompute the
    same."""
    if blocks is None or not dist.is_initialized():
        return blocks
    plans = [blocks]
    dist.broadcast_object_list(plans, 0)
    return plans[0]


def _repeatable_attention(run: RunConfig) -> str:
    """Return an attention implementation with repeatable gradients, for the comparison of two runs."""
    if not run.device.startswith("cuda") or run.attention not in ("auto", "flash_hopper", "sdpa"):
        return run.attention
    if run.attention == "sdpa":
        raise UserError(
            "--replay_every compares two runs to the bit, and the gradients of --attention sdpa differ from run to "
            "run; use --attention auto"
        )
    if run.attention == "auto" and triton_problem(torch.device(run.device)) is not None:
        return "reference"
    suits_hopper = run.has_low_precision and repeatable_suits_hopper(run.model.head_dim, has_window=False)
    takes_hopper = run.attention == "flash_hopper" or (suits_hopper and best_attention(run) == "flash_hopper")
    return hopper_kernels(deterministic=True) if takes_hopper else "flash_triton"


def _wrap(model: nn.Module, settings: TrainSettings, rank: Rank) -> nn.Module:
    if settings.parallel.engine == "torch":
        axes = settings.parallel.axes(rank.world_size)
        return TorchEngine(
            *(model, axes, rank.device, AUTOCAST_DTYPES.get(settings.compute.precision)),
            fill=lambda module: _fill(module, settings, rank.device),
            schedule=settings.parallel.pp_schedule,
            timeout=settings.parallel.rank_timeout,
        )
    match settings.parallel.wrapper:
        case "none":
            if rank.world_size > 1:
                raise UserError(f"--parallel none is for one rank, and there are {rank.world_size}; use ddp or fsdp")
            return model
        case "ddp" | "ddp-sharded":
            return DDP(model, bucket_size_mb=BUCKET_MB)
        case _:
            return FSDP(model, compute_dtype=AUTOCAST_DTYPES.get(settings.compute.precision))


def _fill(model: nn.Module, settings: TrainSettings, device: torch.device) -> None:
    """Give a model that is split over ranks the weights of the seed or of `--init`, one at a time."""
    if settings.init is None:
        initialise(model, device, store_shard)
        return
    initialise(model, device, lambda parameter, whole: None)  # buffers, and the state of the random numbers
    load_each(Path(settings.init), model, settings.model, device, store_shard)


def _packed_optimizer(model: nn.Module, settings: TrainSettings, device: torch.device) -> PackedAdamW:
    assert isinstance(model, TransformerLM)
    return PackedAdamW(
        _groups(model.in_packing_order(), settings.optimizer),
        dtype=AUTOCAST_DTYPES.get(settings.compute.precision, torch.float32),
        state_dtype=STATE_DTYPES[settings.optimizer.state],
        max_grad_norm=settings.optimizer.max_grad_norm,
        check_finite=True,
        device=device,
    )


def _plain_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    groups = _groups(model.parameters(), settings.optimizer)
    if settings.parallel.wrapper == "ddp-sharded":
        return ShardedOptimizer(groups, torch.optim.AdamW, fused=True)
    return torch.optim.AdamW(groups, fused=True)


def _groups(parameters: Iterable[nn.Parameter], settings: OptimizerSettings) -> list[dict[str, Any]]:
    """Return the parameter groups: matrices with weight decay, gains of norms without."""
    every = list(parameters)
    options = {"lr": settings.learning_rate, "betas": (settings.beta1, settings.beta2)}
    return [
        {"params": [p for p in every if p.dim() >= 2], "weight_decay": settings.weight_decay, **options},
        {"params": [p for p in every if p.dim() < 2], "weight_decay": 0.0, **options},
    ]
