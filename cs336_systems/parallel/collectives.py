"""What the wrappers share: one model on all ranks, rank 0's values, and tensors that lie in one."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T", bound=Tensor)

BROADCAST_BYTES = 250 << 20
"""A model is broadcast in pieces of this size: few messages, and little memory beside the model."""

# torch 2.13 has new names for these and warns of the old ones.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def message_device() -> torch.device:
    """Where tensors must lie that the group sends: NCCL knows only GPUs, and for Gloo main memory is nearest."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def require_same(module: nn.Module) -> None:
    """ValueError, on every rank, unless all ranks hold a model of the same parameters and buffers.

    Equal numbers of elements are not enough: a transposed weight would be averaged with one that is not.
    """
    mine = [
        (name, f"{tuple(t.shape)}, strides {t.stride()}, {t.dtype}, {'trained' if t.requires_grad else 'frozen'}")
        for name, t in (*module.named_parameters(), *module.named_buffers())
    ]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    for rank, theirs in enumerate(every):
        for first, other in zip(every[0], theirs, strict=False):
            if first != other:
                raise ValueError(
                    f"ranks 0 and {rank} hold different models: {first[0]!r} is {first[1]} on rank 0, "
                    f"{other[0]!r} is {other[1]} on rank {rank}; build the same model on every rank"
                )
        if len(theirs) != len(every[0]):
            longer, shorter = (0, rank) if len(every[0]) > len(theirs) else (rank, 0)
            extra = every[longer][len(every[shorter])][0]
            raise ValueError(
                f"ranks 0 and {rank} hold different models: rank {longer} has {extra!r}, which rank {shorter} has not; "
                f"build the same model on every rank"
            )


def broadcast(tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors with those of rank 0, in few messages."""
    for piece in (piece for kind in by_kind(tensors) for piece in pack(kind, BROADCAST_BYTES)):
        flat = torch.cat([t.reshape(-1) for t in piece])
        dist.broadcast(flat, 0)
        for t, part in zip(piece, flat.split([t.numel() for t in piece]), strict=True):
            t.copy_(part.view(t.shape))


def by_kind(tensors: Iterable[T]) -> list[list[T]]:
    """Those that can lie in one tensor: of one dtype, on one device."""
    kinds: dict[tuple, list[T]] = {}
    for t in tensors:
        kinds.setdefault((t.dtype, t.device), []).append(t)
    return list(kinds.values())


def pack(tensors: Iterable[T], limit: float) -> list[list[T]]:
    """In order, each group of at most `limit` bytes; a tensor larger than that has one of its own."""
    groups: list[list[T]] = []
    room = 0.0
    for t in tensors:
        room -= t.nbytes
        if room < 0 or not groups:
            groups.append([])
            room = limit - t.nbytes
        groups[-1].append(t)
    return groups


def views(flat: Tensor, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Parts of `flat`, one behind another, with the shapes of `tensors` and their elements in the same order: a
    transposed tensor has a transposed view."""
    found = []
    start = 0
    for t in tensors:
        found.append(flat.as_strided(t.shape, torch.empty_like(t, device="meta").stride(), start))
        start += t.numel()
    return found
