"""The list of a rank's kernels against the rank's step under torch's engine: every matmul and every pass."""

import dataclasses
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.parallel import loss_parallel

from cs336_systems.config import ModelConfig, RunConfig
from cs336_systems.measure import rehearsal
from cs336_systems.measure.memory_trace import as_on_cuda
from cs336_systems.predict.rank_shards import Mesh, of_replica
from cs336_systems.predict.time.eager_kernels import COPY, MASKED, NARROW, POINTWISE, STRIDED
from cs336_systems.predict.time.engine_kernels import GATHERED, ORDERED, REDUCTION, EngineKernels
from tests.unit.predict.time.test_eager_kernels import Operators, counted
from tests.unit.test_families import FAMILIES

MODEL = ModelConfig(vocab_size=1024, context_length=64, d_model=64, num_layers=3, num_heads=4, d_ff=160)
COLLECTIVES = ("wait_tensor", "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "_allgather_base_")


class RankOperators(Operators):
    """Collects the operators of a rank's local tensors."""

    deriving = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:  # it calls the operators of its local tensors, which come here one by one
            return NotImplemented
        name = function.overloadpacket.__name__
        if name == "wait_tensor":
            return args[0]
        result = function(*args, **(kwargs or {}))
        if not self.deriving and self.phase:
            if moved := list(_copies(name, args, result)):
                self.passes[self.phase].update(moved)
            elif name == "empty_like" and result.dim() > 4:  # a buffer of a reduction
                pass
            elif name not in COLLECTIVES and not (isinstance(result, torch.Tensor) and result.dtype == torch.long):
                self._count(name, args, result)
        return result


def _copies(name, args, result):
    """Yield the copies around collectives."""

    def nbytes(tensors):
        return sum(t.nbytes for t in tensors)

    dims = result.dim() if isinstance(result, torch.Tensor) else 0
    is_float = dims and result.is_floating_point()
    if name == "_to_copy" and dims == 1 and args[0].numel() > 1:
        yield NARROW, nbytes([args[0], result])
    elif name == "copy_" and dims == 1:
        yield COPY, 2 * result.nbytes
    elif (name == "add_" and dims == 4) or name == "exp":
        yield POINTWISE, (3 if name == "add_" else 2) * result.nbytes
    elif name == "_foreach_copy_":
        yield NARROW, nbytes([*args[0], *args[1]])
    elif name == "all_gather_copy_in":
        yield COPY, 2 * nbytes(args[0])
    elif name == "split_with_sizes_copy":
        yield GATHERED, 2 * args[0].nbytes
    elif name == "chunk_cat":
        yield GATHERED, nbytes(args[0]) + 4 * sum(t.numel() for t in args[0])
    elif (name == "cat" and dims == 3 and result.shape[1] > 1) or (name == "clone" and is_float and dims == 2):
        yield COPY, 2 * result.nbytes
    elif (name in ("cat", "stack") and dims >= 4) or (name in ("flip", "clone") and dims == 6):
        yield ORDERED, 2 * result.nbytes
    elif name in ("amax", "sum") and dims == args[0].dim() == 2:
        yield REDUCTION, args[0].nbytes
    elif name == "index_put_" and is_float and dims == 3:
        yield MASKED, 2 * args[0].nbytes
    elif name == "zeros_like" and dims in (2, 5):
        yield "fill", result.nbytes
    elif name == "sub" and is_float and dims == 2:
        yield STRIDED, 2 * result.nbytes


def traced(run, mesh):
    seen = RankOperators()
    derive = ShardingPropagator._propagate_tensor_meta_non_cached

    def quietly(*args, **kwargs):
        seen.deriving = True
        try:
            return derive(*args, **kwargs)
        finally:
            seen.deriving = False

    own = dataclasses.replace(run, device="cpu")
    with rehearsal.fake_group(0, mesh.gpus), ExitStack() as stack:
        model = rehearsal.sharded_model(own, mesh, "cpu")
        stack.enter_context(mock.patch.object(nn.init, "normal_", lambda tensor, **_: tensor))
        stack.enter_context(mock.patch.object(ShardingPropagator, derive.__name__, quietly))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        rehearsal._allocate(model, "cpu")
        for context in (as_on_cuda(), loss_parallel()):
            stack.enter_context(context)
        step = rehearsal._step(model, own)
        batch = [torch.zeros(own.batch_size, own.model.context_length, dtype=torch.long) for _ in range(2)]
        with seen:
            step(*batch, watch=seen.watch)
    return seen


@pytest.mark.parametrize(
    ("axes", "precision", "blocks"),
    [
        ({"dp_shard": 4}, "fp32", 2),
        ({"dp_replicate": 2, "dp_shard": 2}, "bf16", 2),
        ({"tp": 2}, "bf16", 1),
        ({"tp": 4}, "fp32", 2),
        ({"dp_replicate": 2, "tp": 2}, "bf16", 0),
        ({"dp_shard": 2, "tp": 2}, "bf16", 2),
        ({"cp": 4}, "fp32", 1),
        ({"cp": 2, "tp": 2}, "bf16", 0),
    ],
    ids=str,
)
def test_every_operator_of_a_rank_is_listed(axes, precision, blocks):
    assert_listed(MODEL, Mesh(**axes), precision=precision, checkpoint_blocks=blocks)


@pytest.mark.parametrize(("name", "axes"), [("llama", {"dp_shard": 2, "tp": 2}), ("qwen3", {"cp": 2})])
def test_families_of_models(name, axes):
    model = dataclasses.replace(FAMILIES[name], vocab_size=96)  # a multiple of the shards, which are padded
    assert_listed(model, Mesh(**axes), precision="bf16")


def assert_listed(model, mesh, **fields):
    run = of_replica(RunConfig(model=model, batch_size=1, device="cuda", attention="flash_triton", **fields), mesh)
    seen = traced(run, mesh)
    for found, expected in zip(
        counted(EngineKernels(run, mesh).phases()), (seen.matmuls, seen.passes, seen.attention), strict=True
    ):
        for phase in ("forward", "loss", "backward"):
            assert found[phase] == expected[phase], phase


def test_the_weights_of_all_ranks_are_updated_once():
    run = RunConfig(model=MODEL, batch_size=4, device="cuda")
    for axes in ({"dp_shard": 4}, {"tp": 4}, {"dp_shard": 2, "tp": 2}, {"cp": 4}):
        held = EngineKernels(run, Mesh(**axes)).held_weights
        assert MODEL.parameters <= 4 * held < 1.01 * MODEL.parameters + 4 * MODEL.vector_parameters
