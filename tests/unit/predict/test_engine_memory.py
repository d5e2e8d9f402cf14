"""The predicted peak of a rank under torch's engine is that of a trace of its operators."""

import random
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from cs336_systems.config import ModelConfig, RunConfig
from cs336_systems.measure import rehearsal
from cs336_systems.measure.memory_trace import StorageTracker
from cs336_systems.predict.engine_memory import BUCKETS, EngineStep, engine_estimate, engine_peak
from cs336_systems.predict.memory_model import estimate, workspace
from cs336_systems.predict.rank_shards import Mesh, elements, of_replica

MODEL = ModelConfig(vocab_size=1000, context_length=64, d_model=256, num_layers=2, num_heads=8, d_ff=768)
RUN = RunConfig(model=MODEL, batch_size=1, device="cuda", precision="bf16", attention="sdpa", mode="train-step")
TOLERANCE = 0.02
SEEDS = (0, 1, 4, 5, 8, 10, 26, 27, 36, 38)
"""Together they have nearly every two values of axes, precision, attention and recomputation. `make soak` (R31) has
more."""


def random_layout(seed: int) -> tuple[RunConfig, Mesh]:
    pick = random.Random(seed).choice
    mesh = Mesh(dp_replicate=pick((1, 1, 2)), dp_shard=pick((1, 2, 3, 8)), tp=pick((1, 1, 2, 4)))
    heads = pick((4, 8))
    width = heads * pick((16, 32))
    model = ModelConfig(
        vocab_size=pick((512, 1000, 2048)),
        context_length=pick((32, 64, 128)),
        d_model=width,
        num_layers=pick((1, 2)),
        num_heads=heads,
        d_ff=pick((2, 3)) * width + pick((0, 16, 32)),
    )
    run = replace(
        *(RUN,),
        model=model,
        batch_size=pick((1, 2)),
        precision=pick(("fp32", "bf16")),
        attention=pick(("auto", "sdpa", "reference")),
        checkpoint_blocks=pick((0, 0, 1, 2)),
    )
    return run, mesh


def error_of(seed: int) -> float:
    """Return how far the predicted peak of a random layout is from the traced one, as a share of it."""
    run, mesh = random_layout(seed)
    found, predicted = rehearsal.rehearse(run, mesh, 0, on_gpu=False), engine_estimate(run, mesh)
    assert sum(predicted.parts.values()) == predicted.peak
    fixed = workspace(run)  # larger than these models
    return (predicted.peak - fixed) / (found.peak - fixed) - 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_layout_has_the_traced_peak(seed):
    assert error_of(seed) == pytest.approx(0, abs=TOLERANCE), random_layout(seed)


@pytest.mark.parametrize("mesh", [Mesh(dp_shard=8), Mesh(tp=4), Mesh(dp_shard=4, tp=2), Mesh(dp_replicate=4)], ids=str)
@pytest.mark.parametrize("group", [0, 1, 3, 9])
def test_extrapolated_blocks_are_like_simulated_ones(mesh, group, monkeypatch):
    run = replace(RUN, model=replace(MODEL, num_layers=20), checkpoint_blocks=group)
    extrapolated = engine_estimate(run, mesh).peak
    for name in ("BLOCKS", "BLOCKS_OF_GROUP", "GROUPS"):
        monkeypatch.setattr(EngineStep, name, (99, 0))
    assert extrapolated == pytest.approx(engine_estimate(run, mesh).peak, rel=2e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("group", [0, 1])
def test_a_mesh_of_one_has_the_peak_of_the_plain_step(precision, group):
    run = replace(RUN, precision=precision, checkpoint_blocks=group)
    assert engine_estimate(run, Mesh()).peak == pytest.approx(estimate(run).peak, rel=1e-3)


def test_saved_inputs_grow_with_tensor_parallel_ranks():
    """Matmuls that split columns save their input of the whole sequence, two of them in a block; with as many tokens
    on each GPU, nothing else that is saved depends on `tp`."""
    run = replace(RUN, model=replace(MODEL, context_length=1024, num_layers=8))
    saved = {tp: engine_estimate(run, Mesh(tp=tp)).parts["activations"] for tp in (2, 4, 8)}
    inputs = 2 * 8 * run.tokens * MODEL.d_model * 2
    assert saved[4] - saved[2] == pytest.approx(2 * inputs, rel=0.1)
    assert saved[8] - saved[4] == pytest.approx(4 * inputs, rel=0.1)


def test_buckets_are_as_large_as_the_gradients():
    """DistributedDataParallel allocates them, here on tensors of a CPU."""
    mesh, run = Mesh(dp_replicate=2), replace(RUN, device="cpu", precision="fp32")
    with rehearsal.fake_group(0, mesh.gpus):
        model = rehearsal.sharded_model(run, mesh, "cpu")
        rehearsal._allocate(model, "cpu")
        with StorageTracker() as tracker:
            wrapped = rehearsal._replicated(model)
            allocated = tracker.live.total()
            step = rehearsal._step(wrapped, run)
            assert step(*step.random_batch()) is not None
    assert allocated == sum(parameter.nbytes for parameter in model.parameters())
    assert engine_estimate(RUN, mesh).parts[BUCKETS] == pytest.approx(allocated, rel=1e-3)


Sizes = tuple[int, ...]


def random_family(pick: Any, vocabularies: Sizes, contexts: Sizes, layers: Sizes) -> ModelConfig:
    """Return a model with some of the features of Llama and Qwen."""
    heads = pick((4, 8))
    width = heads * pick((16, 32))
    return ModelConfig(
        vocab_size=pick(vocabularies),
        context_length=pick(contexts),
        d_model=width,
        num_layers=pick(layers),
        num_heads=heads,
        d_ff=3 * width + pick((0, 16, 32)),
        num_kv_heads=pick((0, 2)),
        qkv_bias=pick((False, True)),
        qk_norm=pick((False, True)),
        tied_embeddings=pick((False, True)),
    )


def random_fused_layout(seed: int) -> tuple[RunConfig, Mesh]:
    pick = random.Random(seed).choice
    mesh = Mesh(dp_replicate=pick((1, 1, 2)), dp_shard=pick((2, 3, 8)))
    model = random_family(pick, (1000, 2048, 40_001), (32, 64, 128), (1, 2, 5))
    fields = {"batch_size": pick((1, 2, 64)), "precision": pick(("fp32", "bf16")), "checkpoint_blocks": pick((0, 1, 2))}
    return replace(RUN, model=model, attention="auto", fast=pick(("kernels", "kernels,loss")), **fields), mesh


@pytest.mark.parametrize("seed", range(5))
def test_fused_kernels_under_fully_shard_have_the_traced_peak(seed):
    """Concatenated weights are kept for backward, beside the shards."""
    run, mesh = random_fused_layout(seed)
    found, predicted = rehearsal.rehearse(run, mesh, 0, on_gpu=False), engine_estimate(run, mesh)
    fixed = workspace(run)
    assert predicted.peak - fixed == pytest.approx(found.peak - fixed, rel=TOLERANCE), (run, mesh)


def random_split_layout(seed: int) -> tuple[RunConfig, Mesh, int]:
    """Return a layout whose ranks share sequences, and the number of micro batches of such a group: in the most, each
    has one sequence."""
    pick = random.Random(seed).choice
    mesh = Mesh(dp_replicate=pick((1, 1, 2)), dp_shard=pick((1, 1, 2, 3)), cp=pick((2, 4)), tp=pick((1, 1, 2)))
    model = random_family(pick, (512, 1000, 2048), (256, 512), (1, 2, 3))
    fields = {"precision": pick(("fp32", "bf16")), "checkpoint_blocks": pick((0, 0, 1, 2))}
    micro_batches = pick((2 * mesh.cp * mesh.tp, 2, 1))
    return replace(RUN, model=model, batch_size=2, attention="auto", **fields), mesh, micro_batches


@pytest.mark.parametrize("seed", [2, 4, 5])
def test_ranks_that_share_sequences_have_the_traced_peak(seed):
    """Two and four ranks, with and without `tp`, both precisions; several micro batches, as few as one sequence."""
    run, mesh, micro_batches = random_split_layout(seed)
    found = rehearsal.rehearse(run, mesh, 0, on_gpu=False, micro_batches=micro_batches)
    fixed = workspace(run)
    predicted = engine_estimate(run, mesh, of_replica(run, mesh, micro_batches).batch_size).peak
    assert predicted - fixed == pytest.approx(found.peak - fixed, rel=TOLERANCE), (run, mesh, micro_batches)


@pytest.mark.parametrize("fast", ["off", "kernels,loss"])
@pytest.mark.parametrize("group", [0, 1])
def test_later_micro_batches_find_the_shards_of_gradients(fast, group):
    """Traced by a step that does not drop its gradients."""
    run, mesh = replace(RUN, model=replace(MODEL, num_layers=5), fast=fast, checkpoint_blocks=group), Mesh(dp_shard=4)
    with mock.patch.object(torch.optim.Optimizer, "zero_grad", return_value=None):
        found = rehearsal.rehearse(replace(run, attention="auto"), mesh, 0, on_gpu=False)
    fixed = workspace(run)
    predicted = engine_peak(replace(run, attention="auto"), mesh, 4)
    assert predicted - fixed == pytest.approx(found.peak - fixed, rel=TOLERANCE)
    assert predicted >= engine_peak(replace(run, attention="auto"), mesh, 1)


def test_without_shards_all_gradients_of_earlier_micro_batches_count():
    one, several = (engine_peak(RUN, Mesh(tp=2), micro_batches) for micro_batches in (1, 4))
    assert several - one == 4 * elements(MODEL, Mesh(tp=2), 0)
