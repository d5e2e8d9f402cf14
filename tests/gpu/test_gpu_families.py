"""Families of models and packed documents on a GPU, in bf16: `pytest -m gpu tests/gpu/test_gpu_families.py`."""

import copy
import dataclasses

import pytest
import torch

from cs336_systems.config import ModelConfig, RunConfig
from cs336_systems.model import PackedTokens, TransformerLM
from cs336_systems.step.train_step import TrainStep
from tests.unit.kernels.attention_cases import relative_error
from tests.unit.test_families import of_transformers

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clean_gpu")]

SHAPE = {"vocab_size": 997, "context_length": 320, "d_model": 384, "num_layers": 3, "num_heads": 6, "d_ff": 640}
FAMILIES = {
    "llama": ModelConfig(**SHAPE, num_kv_heads=2, rope_theta=5e5, rope_scaling="8,1,4,64"),
    "qwen2": ModelConfig(**SHAPE, num_kv_heads=2, rope_theta=1e6, norm_eps=1e-6, qkv_bias=True, tied_embeddings=True),
    "qwen3": ModelConfig(
        **SHAPE, num_kv_heads=3, d_head=128, rope_theta=1e6, norm_eps=1e-6, qk_norm=True, tied_embeddings=True
    ),
}
LENGTHS = (100, 1, 219)
"""Of the documents in each sequence."""


def tokens_of(config, batch=2):
    shape = (batch, config.context_length + 1)
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(1)).cuda()


@pytest.mark.parametrize("attention", ["flash_triton", "flash_hopper"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_as_exact_as_those_of_transformers(name, fused, attention):
    """Both under autocast, against transformers in float64."""
    if attention != "flash_triton" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for compute capability 9.0")
    theirs, plain = of_transformers(FAMILIES[name])
    theirs.cuda()
    ours = TransformerLM(FAMILIES[name], attention=attention, fused=fused).cuda()
    ours.load_state_dict(plain.state_dict())
    tokens = tokens_of(FAMILIES[name])[:, :-1]
    with torch.no_grad():
        exact = copy.deepcopy(theirs).double()(tokens).logits
        with torch.autocast("cuda", torch.bfloat16):
            found, expected = ours(tokens), theirs(tokens).logits
    error = relative_error(expected, exact)
    assert 1e-4 < error < 0.1
    assert relative_error(found, exact) < 1.3 * error


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_fast_step_with_its_graph_trains_as_the_plain_one(name, precision):
    tokens = tokens_of(FAMILIES[name])
    losses = {}
    for fast in ("off", "on"):
        config = RunConfig(
            model=FAMILIES[name], batch_size=2, attention="flash_triton", fast=fast, device="cuda",
            precision=precision if fast == "on" else "fp32",
        )  # fmt: skip
        step = TrainStep.build(config)
        losses[fast] = torch.stack([step(tokens[:, :-1], tokens[:, 1:]).float() for _ in range(8)])
    assert losses["off"][0] - losses["off"][-1] > 0.1
    bound = 1e-3 if precision == "fp32" else 2e-2
    torch.testing.assert_close(losses["on"], losses["off"], rtol=bound, atol=bound)


@pytest.mark.parametrize("attention", ["flash_triton", "flash_hopper", "flash_hopper_repeatable"])
@pytest.mark.parametrize("fast", ["off", "kernels,loss,optimizer"])
def test_packed_documents_train_as_documents_apart(fast, attention):
    """The first loss of a packed batch is that of its documents, each in a batch of its own."""
    if attention != "flash_triton" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for compute capability 9.0")
    model = dataclasses.replace(FAMILIES["qwen3"], d_head=64)
    config = RunConfig(model=model, batch_size=2, attention=attention, fast=fast, device="cuda", precision="bf16")
    tokens = tokens_of(model)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).expand(2, -1).cuda()
    offsets = torch.tensor([0, *LENGTHS, *LENGTHS]).cumsum(0).to("cuda", torch.int32)
    step = TrainStep.build(config)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        alone = [
            torch.nn.functional.cross_entropy(step.logits(row[None]).flatten(0, 1).float(), wanted, reduction="sum")
            for rows, targets in zip(tokens[:, :-1], tokens[:, 1:], strict=True)
            for row, wanted in zip(rows.split(LENGTHS), targets.split(LENGTHS), strict=True)
        ]
    losses = [float(step(PackedTokens(tokens[:, :-1], positions, offsets), tokens[:, 1:])) for _ in range(8)]
    assert losses[0] == pytest.approx(float(sum(alone)) / tokens[:, 1:].numel(), rel=5e-3)
    assert losses[0] - losses[-1] > 0.1
