"""Runs the test suites of CS336 assignment 2, 2025 and 2026, on this package.

In a clone of the course's repository (stanford-cs336/assignment2-systems), with this package installed:

    rm -r cs336_systems                                  # the course's empty package, which would hide this one
    cp path/to/examples/course_adapters.py tests/adapters.py
    pytest tests

The names and arguments are those of the course's own `tests/adapters.py`; 2026 renamed some, and both are here.
The Triton tests need a GPU; the course skips them on other machines.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cs336_systems.kernels import FlashAttentionTorch, FlashAttentionTriton
from cs336_systems.parallel import DDP, FSDP, ShardedOptimizer, gather_full_params

# -- both years -------------------------------------------------------------------------------------------------------


def get_flashattention_autograd_function_pytorch() -> type:
    return FlashAttentionTorch


def get_flashattention_autograd_function_triton() -> type:
    return FlashAttentionTriton


def get_sharded_optimizer(params: Iterable[Any], optimizer_cls: type[Optimizer], **kwargs: Any) -> Optimizer:
    return ShardedOptimizer(params, optimizer_cls, **kwargs)


# -- 2025: one all-reduce per parameter, and buckets -------------------------------------------------------------------


def get_ddp_individual_parameters(module: nn.Module) -> nn.Module:
    return DDP(module)


def ddp_individual_parameters_on_after_backward(ddp_model: DDP, optimizer: Optimizer) -> None:
    ddp_model.finish_gradient_synchronization()


def get_ddp_bucketed(module: nn.Module, bucket_size_mb: float) -> nn.Module:
    return DDP(module, bucket_size_mb=bucket_size_mb)


def ddp_bucketed_on_after_backward(ddp_model: DDP, optimizer: Optimizer) -> None:
    ddp_model.finish_gradient_synchronization()


def ddp_bucketed_on_train_batch_start(ddp_model: DDP, optimizer: Optimizer) -> None:
    """Nothing to prepare: the wrapper resets its buckets when a synchronization ends."""


# -- 2026: data parallel under a shorter name, and fully sharded data parallel ----------------------------------------


def get_ddp(module: nn.Module) -> nn.Module:
    return DDP(module)


def ddp_on_after_backward(ddp_model: DDP, optimizer: Optimizer) -> None:
    ddp_model.finish_gradient_synchronization()


def get_fsdp(module: nn.Module, compute_dtype: torch.dtype | None = None) -> nn.Module:
    return FSDP(module, compute_dtype=compute_dtype)


def fsdp_on_after_backward(fsdp_model: FSDP, optimizer: Optimizer) -> None:
    fsdp_model.finish_gradient_synchronization()


def fsdp_gather_full_params(fsdp_model: FSDP) -> dict[str, Tensor]:
    return gather_full_params(fsdp_model)
