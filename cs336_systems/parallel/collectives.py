"""Functions that all ranks call together: exchange of objects, errors of one rank raised on all, broadcasts of tensors.

Also functions that the wrappers share: checks of the model, and flat tensors with views.
"""

from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.config import UserError
from cs336_systems.parallel.peers import error_line, ranks_by_value, ranks_named

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Result = TypeVar("Result")
T = TypeVar("T", bound=Tensor)

BROADCAST_BYTES = 250 << 20
"""Size of the chunks in which a model is broadcast: large enough for few collectives, small beside the model."""

# torch 2.13 renames these functions and warns about the old names.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def communication_device() -> torch.device:
    """Return the device of tensors for collectives: the GPU for NCCL, the CPU for Gloo."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


# -- objects ----------------------------------------------------------------------------------------------------------


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, by rank."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value, group=group)
    return every


def from_first(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return rank 0's value, on all ranks."""
    box = [value]
    dist.broadcast_object_list(box, 0, group=group)
    return box[0]


def on_first(work: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """Call `work` on rank 0 and return its result, or raise its UserError, on all ranks."""
    result, problem = None, None
    if dist.get_rank() == 0:
        try:
            result = work()
        except UserError as error:
            problem = str(error)
    result, problem = from_first((result, problem), group)
    if problem is not None:
        raise UserError(problem)
    return result


def together(work: Callable[[], Result]) -> Result:
    """Return `work()`. If it raises UserError on some rank, raise one on all ranks that names the rank."""
    result, problem = None, ""
    try:
        result = work()
    except UserError as error:
        problem = error_line(error)
    ranks = ranks_by_value(enumerate(gather(problem)))
    if len(ranks) == 1 and problem:
        raise UserError(problem)  # the same on all ranks
    ranks.pop("", None)
    if ranks:
        raise UserError("; ".join(f"on {ranks_named(which)}: {found}" for found, which in ranks.items()))
    return result  # type: ignore[return-value]


# -- models -----------------------------------------------------------------------------------------------------------


class Wrapper(nn.Module):
    """The base class of models over ranks: the same model on all of them, and its own state dict."""

    def __init__(self, module: nn.Module):
        super().__init__()
        require_group(type(self).__name__)
        require_same(module)
        self.module = module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's own state dict: checkpoints do not depend on the wrapper."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)


def require_group(name: str) -> None:
    if not dist.is_initialized():
        raise RuntimeError(f"{name} needs a process group; call dist.init_process_group first")


def require_same(module: nn.Module) -> None:
    """Raise a ValueError on every rank unless all ranks hold the same parameters and buffers.

    Strides count as well: a transposed weight must not be averaged with one that is not.
    """
    own = [
        (name, f"{tuple(t.shape)}, strides {t.stride()}, {t.dtype}, {'trained' if t.requires_grad else 'frozen'}")
        for name, t in (*module.named_parameters(), *module.named_buffers())
    ]
    by_rank = gather(own)
    absent = (None, "absent")
    for rank, others in enumerate(by_rank):
        for (first, kind), (other, other_kind) in zip_longest(by_rank[0], others, fillvalue=absent):
            if (first, kind) != (other, other_kind):
                raise ValueError(
                    f"ranks 0 and {rank} hold different models: {first or other!r} is {kind} on rank 0, "
                    f"{other or first!r} is {other_kind} on rank {rank}; build the same model on every rank"
                )


def broadcast(tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors with those of rank 0, in few broadcasts."""
    for chunk in (chunk for kind in by_kind(tensors) for chunk in pack(kind, BROADCAST_BYTES)):
        flat = torch.cat([t.reshape(-1) for t in chunk])
        dist.broadcast(flat, 0)
        for t, part in zip(chunk, flat.split([t.numel() for t in chunk]), strict=True):
            t.copy_(part.view(t.shape))


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, any other tensor as it is. The class itself takes 0.8 s to import."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def held_slices(tensor: "DTensor") -> tuple[slice, ...]:
    """Return where this rank's part of a DTensor is in the whole.

    The innermost axis, "tp", splits it first. As in torch.chunk, parts are equal, then a smaller one, then empty ones.
    (torch 2.13 has other offsets where two axes split the same dimension into unequal parts.)
    """
    mesh = tensor.device_mesh
    starts, sizes = [0] * tensor.ndim, list(tensor.shape)
    for axis in reversed(range(mesh.ndim)):
        placement = tensor.placements[axis]
        if placement.is_replicate():
            continue
        dim = placement.dim  # type: ignore[attr-defined]
        size = -(-sizes[dim] // mesh.size(axis))
        before = min(size * mesh.get_local_rank(axis), sizes[dim])
        starts[dim] += before
        sizes[dim] = min(size, sizes[dim] - before)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that checkpoints keep, by name. The others are constants, such as RoPE's tables."""
    return {
        f"{prefix}.{name}".lstrip("."): buffer
        for prefix, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    }


def by_kind(tensors: Iterable[T]) -> list[list[T]]:
    """Group tensors by dtype and device, so that each group fits into one flat tensor."""
    kinds: dict[tuple, list[T]] = {}
    for t in tensors:
        kinds.setdefault((t.dtype, t.device), []).append(t)
    return list(kinds.values())


def pack(tensors: Iterable[T], limit: float) -> list[list[T]]:
    """Split tensors, in order, into groups of at most `limit` bytes; a larger tensor forms its own group."""
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
    """Return consecutive views into `flat` with the shapes and the memory layouts of `tensors`."""
    found = []
    start = 0
    for t in tensors:
        found.append(flat.as_strided(t.shape, torch.empty_like(t, device="meta").stride(), start))
        start += t.numel()
    return found
