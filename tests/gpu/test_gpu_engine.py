"""torch's engine on a GPU: each axis over one NCCL rank against the plain model, and ranks that share the GPU."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from cs336_systems.config import ModelConfig, RunConfig
from cs336_systems.model import TransformerLM
from cs336_systems.parallel.collectives import local_part
from cs336_systems.parallel.context_parallel import ContextParallel
from cs336_systems.parallel.launch import process_group, spawn
from cs336_systems.parallel.pipeline import Pipeline
from cs336_systems.parallel.torch_engine import _without_all_reduce, device_mesh, shard, split_layers, whole
from cs336_systems.predict.rank_shards import Mesh

pytestmark = pytest.mark.gpu

CONFIG = ModelConfig(vocab_size=1000, context_length=256, d_model=256, num_layers=2, num_heads=4, d_ff=512)
CUDA = torch.device("cuda")
Work = Callable[[nn.Module, Tensor, Tensor], Tensor]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return whole(F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()))


def plain(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    loss = loss_of(model(tokens), targets)
    loss.backward()
    return loss


def sharded(*axes: str) -> Callable[[DeviceMesh], Work]:
    """The sizes that are given to `shard` only select the axes; the mesh has one rank."""

    def work(mesh: DeviceMesh) -> Work:
        def run(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
            shard(model, model.layers, mesh, Mesh(**dict.fromkeys(axes, 2)), None)
            return plain(model, tokens, targets)

        return run

    return work


def replicated(mesh: DeviceMesh) -> Work:
    return lambda model, tokens, targets: plain(DistributedDataParallel(model), tokens, targets)


def tensor_parallel(mesh: DeviceMesh) -> Work:
    def run(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        split_layers(model, mesh, Mesh(tp=2))
        with loss_parallel():
            return plain(model, tokens, targets)

    return run


def context_parallel(mesh: DeviceMesh) -> Work:
    def run(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        context = ContextParallel(mesh["cp"])
        context.install(model)
        return plain(model, context.own(tokens), context.own(targets))

    return run


def pipeline(mesh: DeviceMesh) -> Work:
    def run(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        batches = list(zip(tokens.split(1), targets.split(1), strict=True))
        return Pipeline(model, mesh.get_group("pp"), CUDA).accumulate(
            batches, lambda loss: loss / len(batches), loss_of
        )

    return run


PATHS: dict[str, Callable[[DeviceMesh], Work]] = {
    "dp_replicate": replicated,
    "dp_shard": sharded("dp_shard"),
    "dp_replicate and dp_shard": sharded("dp_replicate", "dp_shard"),
    "tp": tensor_parallel,
    "cp": context_parallel,
    "pp": pipeline,
}


def gradients(work: Work, attention: str) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    with CUDA:
        model = TransformerLM(CONFIG, attention=attention)
        tokens, targets = torch.randint(CONFIG.vocab_size, (2, 2, CONFIG.context_length))
    loss = work(model, tokens, targets)
    found: dict[str, Any] = {name: local_part(p.grad) for name, p in model.named_parameters()}
    return loss.detach(), found


@pytest.mark.parametrize("path", PATHS)
def test_every_axis_over_one_nccl_rank_has_the_gradients_of_the_plain_model(clean_gpu, path):
    with process_group("nccl", "cuda"):
        mesh = device_mesh(Mesh(), "cuda")
        for attention in ("reference", "auto"):
            loss, found = gradients(PATHS[path](mesh), attention)
            expected_loss, expected = gradients(plain, attention)
            torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-5)
            for name, gradient in expected.items():
                atol = 1e-5 * gradient.abs().max().item() + 1e-8
                torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=10 * atol, msg=f"{attention} {name}")


def in_two_micro_batches(axes: tuple[str, ...]) -> Work:
    """Return the mean loss of both sequences, whose gradients add up; those of the first are not reduced over
    replicas."""

    def run(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        if axes:
            shard(model, model.layers, device_mesh(Mesh(), "cuda"), Mesh(**dict.fromkeys(axes, 2)), None)
        losses = []
        for number, batch in enumerate(zip(tokens.split(1), targets.split(1), strict=True)):
            with _without_all_reduce(model) if axes and number == 0 else nullcontext():
                losses.append(loss_of(model(batch[0]), batch[1]) / 2)
                losses[-1].backward()
        return torch.stack(losses).sum()

    return run


@pytest.mark.parametrize("axes", [("dp_shard",), ("dp_replicate", "dp_shard")], ids=str)
def test_gradients_of_micro_batches_add_up_under_fully_shard(clean_gpu, axes):
    with process_group("nccl", "cuda"):
        loss, found = gradients(in_two_micro_batches(axes), "reference")
        expected_loss, expected = gradients(in_two_micro_batches(()), "reference")
        torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-5)
        for name, gradient in expected.items():
            atol = 1e-5 * gradient.abs().max().item() + 1e-8
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=10 * atol, msg=name)


@pytest.mark.parametrize("mesh", [Mesh(dp_shard=2), Mesh(tp=2)], ids=["dp_shard", "tp"])
def test_a_rehearsal_has_the_peak_of_a_rank_that_shares_the_gpu(mesh):
    from tests.gpu.shared_gpu import peaks

    model = ModelConfig(vocab_size=10_000, context_length=1024, d_model=1024, num_layers=8, num_heads=16, d_ff=2816)
    config = RunConfig(model=model, precision="bf16", attention="auto", device="cuda", num_steps=2, batch_size=1)
    for found in spawn(peaks, 2, config, mesh, device="cuda", timeout=240):
        assert found.rehearsed == pytest.approx(found.real, rel=0.02)
