"""Ranks that share a GPU under torch's engine. NCCL refuses them, and Gloo lacks collectives of fully_shard for CUDA
tensors: a process group of our own sends everything through host memory."""

import gc
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.config import RunConfig
from cs336_systems.measure import rehearsal
from cs336_systems.predict.rank_shards import Mesh, of_replica

BACKEND = "staged"


class StagedGroup(dist.ProcessGroup):
    """Collectives of tensors on any device by Gloo on their copies in host memory. They have ended when they return."""

    def __init__(self, gloo: dist.ProcessGroup, rank: int, size: int):
        super().__init__(rank, size)
        self._gloo = gloo

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        for tensor in tensors:
            tensor.copy_(self._reduced(tensor, opts))
        return _ended(tensors)

    allreduce_coalesced = allreduce

    def _allgather_base(self, output: Tensor, part: Tensor, opts: Any = None) -> dist.Work:
        output.copy_(torch.cat([each.flatten() for each in self._gathered(part)]).view_as(output))
        return _ended([output])

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], parts: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, part in zip(outputs, parts, strict=True):
            self._allgather_base(output, part)
        return _ended(outputs)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], parts: Sequence[Tensor], opts: Any = None) -> dist.Work:
        for every, part in zip(outputs, parts, strict=True):
            for output, found in zip(every, self._gathered(part), strict=True):
                output.copy_(found)
        return _ended(parts)

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:
        parts = self._reduced(whole, opts).flatten().chunk(self.size())
        output.copy_(parts[self.rank()].view_as(output))
        return _ended([output])

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], wholes: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, whole in zip(outputs, wholes, strict=True):
            self._reduce_scatter_base(output, whole, opts)
        return _ended(outputs)

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base  # their names in torch 2.13

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        for tensor in tensors:
            copy = tensor.detach().cpu()
            self._gloo.broadcast([copy], opts or dist.BroadcastOptions()).wait()
            tensor.copy_(copy)
        return _ended(tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        self._gloo.barrier().wait()
        return _ended([])

    def _reduced(self, tensor: Tensor, options: Any) -> Tensor:
        operation = dist.ReduceOp.SUM if options is None else options.reduceOp
        is_mean = operation == dist.ReduceOp.AVG
        given = dist.AllreduceOptions()
        given.reduceOp = dist.ReduceOp.SUM if is_mean else operation
        copy = tensor.detach().to("cpu", torch.float32 if tensor.dtype == torch.bfloat16 else None).contiguous()
        self._gloo.allreduce([copy], given).wait()
        return copy / self.size() if is_mean else copy

    def _gathered(self, part: Tensor) -> list[Tensor]:
        copy = part.detach().cpu().contiguous()
        every = [torch.empty_like(copy) for _ in range(self.size())]
        self._gloo.allgather([every], [copy]).wait()
        return every


def _ended(result: Sequence[Tensor]) -> dist.Work:
    future: Any = torch.futures.Future()
    future.set_result(list(result))
    return torch._C._distributed_c10d._create_work_from_future(future)


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> StagedGroup:
    return StagedGroup(dist.ProcessGroupGloo(dist.PrefixStore(BACKEND, store), rank, size, timeout), rank, size)


def use_staged_groups() -> None:
    """Replace the default process group of this rank, which `spawn` has made."""
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    if BACKEND.upper() not in dist.Backend.__dict__:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu", "cuda"])
    dist.init_process_group(BACKEND, store=dist.PrefixStore("again", store), rank=rank, world_size=size)


class Peaks(NamedTuple):
    """Peak bytes of a rank: of a step with the other ranks, and of its rehearsal alone."""

    real: int
    rehearsed: int


def peaks(config: RunConfig, mesh: Mesh) -> Peaks:
    """Measure both in this rank, one after the other. For all ranks of `mesh` together."""
    use_staged_groups()
    run = of_replica(config, mesh)
    model = rehearsal.sharded_model(run, mesh, torch.device(run.device).type)
    real = rehearsal.measured(model, run)
    del model
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()  # modules of fully_shard refer to each other
    rehearsed = rehearsal.rehearse(config, mesh, rank, on_gpu=True)
    return Peaks(real.peak, rehearsed.peak)
