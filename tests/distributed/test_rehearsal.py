"""Two real ranks hold the bytes that a rehearsal of each says."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from cs336_systems.config import ModelConfig, RunConfig
from cs336_systems.measure.rehearsal import rehearse
from cs336_systems.model import TransformerLM
from cs336_systems.parallel.collectives import local_part
from cs336_systems.parallel.torch_engine import split
from cs336_systems.predict.rank_shards import Mesh

MODEL = ModelConfig(vocab_size=62, context_length=8, d_model=16, num_layers=1, num_heads=2, d_ff=26)


def real_bytes(shards: int, tensor: int) -> tuple[int, int]:
    """Return the bytes of parameters and gradients of this rank after a real backward pass."""
    axes = Mesh(dp_shard=shards, tp=tensor)
    mesh = init_device_mesh("cpu", tuple(axes), mesh_dim_names=axes._fields)
    torch.manual_seed(0)
    model = TransformerLM(MODEL, attention="reference")
    split(model, mesh, axes, None)
    tokens = torch.zeros(tensor, MODEL.context_length, dtype=torch.long)
    with loss_parallel():
        logits = model(tokens)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    dist.barrier()
    parameters = list(model.parameters())
    return sum(local_part(p).nbytes for p in parameters), sum(
        local_part(p.grad).nbytes for p in parameters if p.grad is not None
    )


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("mesh", [Mesh(dp_shard=2), Mesh(tp=2)], ids=str)
def test_real_ranks_hold_what_was_rehearsed(rank_groups, mesh):
    run = RunConfig(model=MODEL, batch_size=1, device="cuda", attention="auto")
    found = [rehearse(run, mesh, rank, on_gpu=False) for rank in range(2)]
    real = rank_groups.call(2, real_bytes, mesh.dp_shard, mesh.tp)
    assert real == [(one.parameters, one.gradients) for one in found]
