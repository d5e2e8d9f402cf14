"""Bytes that ranks of torch's engine send in a step, axis by axis, are those that `engine_messages` counts."""

import dataclasses
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cs336_systems.config import ModelConfig, RunConfig
from cs336_systems.model import TransformerLM
from cs336_systems.parallel.torch_engine import TorchEngine
from cs336_systems.predict.engine_messages import engine_messages
from cs336_systems.predict.rank_shards import Mesh
from cs336_systems.step.train_step import AUTOCAST_DTYPES, TrainStep
from tests.distributed.compare import rank

MODEL = ModelConfig(vocab_size=58, context_length=16, d_model=16, num_layers=2, num_heads=2, d_ff=36)
FOUR_BLOCKS = dataclasses.replace(MODEL, num_layers=4)
"""For pipelines, which have two stages a rank."""
NAMES = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "send": "send",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
}


class Sent(TorchDispatchMode):
    """Adds up the bytes of the whole arrays of collectives, by name and size of the group. Scalars are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # it calls the operators of its local tensors, which come here one by one
            return NotImplemented
        namespace, name = func._schema.name.split("::")
        if "c10d" in namespace and name in NAMES:
            tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
            size = self._group_size(args)
            largest = max(tensor.nbytes for tensor in tensors)
            whole = largest * size if name == "all_gather_into_tensor" else largest
            if max(tensor.numel() for tensor in tensors) > 1 and size > 1:
                self.bytes[NAMES[name], size] += whole
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _group_size(args: Any) -> int:
        for argument in args:
            if isinstance(argument, torch.ScriptObject):
                return dist.ProcessGroup.unbox(argument).size()
        # functional collectives have the name of their group as the last argument
        return dist.distributed_c10d._resolve_process_group(args[-1]).size()


def sent_by_this_rank(mesh: Mesh, micro_batches: int, run: RunConfig, schedule: str) -> dict[tuple, int]:
    torch.manual_seed(0)
    model = TransformerLM(run.model, checkpoint_blocks=run.checkpoint_blocks)
    dtype = AUTOCAST_DTYPES.get(run.precision)
    engine = TorchEngine(model, mesh, torch.device("cpu"), dtype, schedule=schedule)
    step = TrainStep(engine, run, torch.optim.AdamW(engine.parameters(), fused=True))
    batches = [step.random_batch()] * micro_batches
    learns = mesh.pp > 1 or mesh.is_replicated
    for _ in range(2 if learns else 1):  # the first time stages learn shapes, and replicas agree on buckets
        with Sent() as sent:
            step._accumulate(batches, lambda loss: loss, nullcontext)
        step.model.zero_grad()
    return dict(sent.bytes)


MESHES = {
    2: [Mesh(dp_replicate=2), Mesh(dp_shard=2), Mesh(tp=2), Mesh(cp=2), Mesh(pp=2)],
    4: [
        Mesh(dp_replicate=2, dp_shard=2),
        Mesh(dp_shard=4),
        Mesh(dp_shard=2, tp=2),
        Mesh(dp_shard=2, cp=2),
        Mesh(cp=2, tp=2),
        Mesh(pp=2, dp_shard=2),
        Mesh(pp=2, tp=2),
        Mesh(pp=2, cp=2),
        Mesh(pp=2, dp_replicate=2),
    ],
}
LOW = {"precision": "bf16", "checkpoint_blocks": 1}


def compare(mesh: Mesh, cases: list[dict[str, Any]]) -> None:
    for flags in cases:
        schedule = "interleaved" if mesh.pp > 1 and flags is LOW else "1f1b"
        micro_batches = 2
        run = RunConfig(model=FOUR_BLOCKS if mesh.pp > 1 else MODEL, device="cpu", batch_size=2, **flags)
        found = sent_by_this_rank(mesh, micro_batches, run, schedule)
        expected: Counter[tuple[str, int]] = Counter()
        for one in engine_messages(run, mesh, rank=rank(), micro_batches=micro_batches, schedule=schedule):
            expected[one.name, one.ranks] += one.nbytes
        assert found == dict(expected), f"{flags}, {schedule}: sent {found}, counted {dict(expected)}"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=str)
def test_two_ranks_send_what_is_counted(mesh):
    compare(mesh, [{}, LOW])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", MESHES[4], ids=str)
def test_four_ranks_send_what_is_counted(mesh):
    compare(mesh, [LOW])
