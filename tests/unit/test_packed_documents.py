"""Packed documents through the model: each computes what it would alone."""

import pytest
import torch
import torch.nn.functional as F

from cs336_systems.config import ModelConfig, RunConfig, UserError
from cs336_systems.model import PackedTokens, TransformerLM
from cs336_systems.predict.activation_plan import RECOMPUTE_ALL
from cs336_systems.predict.flops import forward_flops, model_flops
from cs336_systems.step.train_step import TrainStep

QWEN = ModelConfig(
    vocab_size=61, context_length=16, d_model=24, num_layers=2, num_heads=4, d_ff=40,
    num_kv_heads=2, d_head=8, qkv_bias=True, qk_norm=True, tied_embeddings=True,
)  # fmt: skip
COURSE = ModelConfig(vocab_size=61, context_length=16, d_model=24, num_layers=2, num_heads=3, d_ff=40)
LENGTHS = ((16,), (5, 1, 10), (3, 3, 3, 3, 4))
"""Lengths of the documents of each sequence."""


def model_of(config, **options):
    model = TransformerLM(config, attention="flash_torch", **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3, generator=generator)
    return model


def packed_batch(config, spare=3):
    tokens = torch.randint(config.vocab_size, (len(LENGTHS), 17), generator=torch.Generator().manual_seed(1))
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])
    offsets = torch.tensor([0, *(length for row in LENGTHS for length in row)]).cumsum(0)
    offsets = torch.cat([offsets, offsets[-1:].expand(spare)]).to(torch.int32)
    return PackedTokens(tokens[:, :-1], positions, offsets), tokens[:, 1:]


@pytest.mark.parametrize("config", [COURSE, QWEN], ids=["course", "qwen"])
@pytest.mark.parametrize(
    "options", [{}, {"fused": True}, {"checkpoint_blocks": 1}, {"fused": True, "checkpoint_blocks": 2}], ids=str
)
def test_a_document_has_the_logits_and_gradients_that_it_has_alone(config, options):
    inputs, targets = packed_batch(config)
    together, alone = model_of(config, **options), model_of(config)
    logits = together(inputs)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    parts, expected = [], []
    for row, lengths in enumerate(LENGTHS):
        for tokens, wanted in zip(inputs.tokens[row].split(lengths), targets[row].split(lengths), strict=True):
            parts.append(alone(tokens[None])[0])
            expected.append(wanted)
    F.cross_entropy(torch.cat(parts), torch.cat(expected)).backward()
    torch.testing.assert_close(logits.flatten(0, 1), torch.cat(parts), rtol=1e-4, atol=1e-5)
    for (name, found), wanted in zip(together.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_the_fused_loss_leaves_out_the_last_tokens_of_documents():
    inputs, targets = packed_batch(QWEN)
    targets = targets.clone()
    targets[1, 4] = targets[2, 2] = -100
    model = model_of(QWEN, fused=True)
    expected = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(inputs, targets), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fast", ["off", "kernels,loss,optimizer"])
def test_a_step_trains_on_packed_documents(fast):
    step = TrainStep.build(RunConfig(model=QWEN, batch_size=3, attention="flash_torch", fast=fast))
    inputs, targets = packed_batch(QWEN)
    losses = [float(step.launch([(inputs, targets)])) for _ in range(5)]
    assert losses[-1] < losses[0] - 0.05


def test_a_plan_of_a_memory_budget_is_refused():
    model = model_of(COURSE, fused=True)
    model.plan = (RECOMPUTE_ALL,) * 2
    with pytest.raises(UserError, match="memory_budget cannot plan packed documents"):
        model(*packed_batch(COURSE))


def test_flops_count_pairs_of_one_document_only():
    config = RunConfig(model=COURSE, batch_size=2)
    scores = 2 * 4 * 16**2 * COURSE.d_model * COURSE.num_layers
    assert model_flops(config) - model_flops(config, attention_share=0.25) == 3 * scores * 3 // 4
    assert model_flops(config, attention_share=0.0) == 3 * (forward_flops(config) - scores)
