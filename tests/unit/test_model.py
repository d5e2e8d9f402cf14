"""The model against an oracle written from the formulas, in float64 and without any of the model's code."""

import math

import pytest
import torch

from cs336_systems.config import COURSE_SIZES, ModelConfig, RunConfig, model_config
from cs336_systems.model import TransformerLM
from cs336_systems.step.train_step import TrainStep

SHAPE = ModelConfig(vocab_size=97, context_length=24, d_model=48, num_layers=3, num_heads=4, d_ff=80)


def oracle_logits(weights, config, tokens):
    """Compute a pre-norm Transformer from the course's definitions, one position at a time where that is clearer."""
    w = {name: tensor.double() for name, tensor in weights.items()}

    def norm(x, gain):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * gain

    def rotate(x):  # (T, K)
        out = torch.empty_like(x)
        for position in range(x.shape[0]):
            for pair in range(x.shape[1] // 2):
                angle = position / config.rope_theta ** (2 * pair / x.shape[1])
                a, b = x[position, 2 * pair], x[position, 2 * pair + 1]
                out[position, 2 * pair] = a * math.cos(angle) - b * math.sin(angle)
                out[position, 2 * pair + 1] = a * math.sin(angle) + b * math.cos(angle)
        return out

    def attend(x, prefix):  # (T, D)
        heads = []
        q, k, v = (x @ w[f"{prefix}.{name}_proj.weight"].T for name in "qkv")
        for head in range(config.num_heads):
            columns = slice(head * config.head_dim, (head + 1) * config.head_dim)
            scores = rotate(q[:, columns]) @ rotate(k[:, columns]).T / math.sqrt(config.head_dim)
            for row in range(len(x)):
                scores[row, row + 1 :] = -math.inf
            heads.append(torch.softmax(scores, -1) @ v[:, columns])
        return torch.cat(heads, -1) @ w[f"{prefix}.output_proj.weight"].T

    logits = []
    for sequence in tokens:
        x = w["token_embeddings.weight"][sequence]
        for layer in range(config.num_layers):
            name = f"layers.{layer}"
            x = x + attend(norm(x, w[f"{name}.ln1.weight"]), f"{name}.attn")
            y = norm(x, w[f"{name}.ln2.weight"])
            gate = y @ w[f"{name}.ffn.w1.weight"].T
            hidden = gate * torch.sigmoid(gate) * (y @ w[f"{name}.ffn.w3.weight"].T)
            x = x + hidden @ w[f"{name}.ffn.w2.weight"].T
        logits.append(norm(x, w["ln_final.weight"]) @ w["lm_head.weight"].T)
    return torch.stack(logits)


@pytest.fixture
def model():
    torch.manual_seed(1)
    model = TransformerLM(SHAPE, attention="reference")
    for parameter in model.parameters():  # gains of one would hide a missing gain
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture
def tokens():
    return torch.randint(SHAPE.vocab_size, (2, SHAPE.context_length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("impl", ["reference", "sdpa", "auto"])
def test_logits_equal_the_oracle(model, tokens, impl):
    expected = oracle_logits(model.state_dict(), SHAPE, tokens)
    for block in model.layers:
        block.attn.impl = impl
    torch.testing.assert_close(model(tokens).double(), expected, rtol=2e-4, atol=2e-4)


def test_shorter_sequences_use_the_first_positions(model, tokens):
    """A prefix gives the prefix of the logits: causality, and the position tables."""
    torch.testing.assert_close(model(tokens[:, :7]), model(tokens)[:, :7], rtol=1e-4, atol=1e-4)


def test_parameter_names_are_the_course_staff_models():
    with torch.device("meta"):
        names = set(TransformerLM(ModelConfig(num_layers=1)).state_dict())
    projections = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.output_proj", "ffn.w1", "ffn.w2", "ffn.w3")
    block = ("ln1", "ln2", *projections)
    expected = ["token_embeddings", "ln_final", "lm_head", *(f"layers.0.{name}" for name in block)]
    assert names == {f"{name}.weight" for name in expected}


@pytest.mark.parametrize("size", ["tiny", *COURSE_SIZES, "2026/10B"])
def test_parameter_count_of_the_config(size):
    config = model_config(size)
    with torch.device("meta"):
        model = TransformerLM(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == config.parameters


@pytest.mark.parametrize(("group", "inner"), [(1, 0), (2, 0), (5, 0), (2, 1), (3, 2), (2, 7), (20, 2), (0, 3)])
def test_recomputation_changes_no_gradient(model, tokens, group, inner):
    """Groups may not divide the layers, and the inner group may be larger or alone."""

    def gradients(checkpoint_blocks, checkpoint_inner):
        model.checkpoint_blocks, model.checkpoint_inner = checkpoint_blocks, checkpoint_inner
        model.zero_grad()
        model(tokens).square().mean().backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    expected, found = gradients(0, 0), gradients(group, inner)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_weights_are_the_same_for_the_same_seed():
    runs = [TrainStep.build(RunConfig(model=SHAPE, seed=seed)).model.state_dict() for seed in (3, 3, 4)]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert not torch.equal(runs[0]["lm_head.weight"], runs[2]["lm_head.weight"])
