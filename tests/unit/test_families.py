"""Families of models: Llama 3, Qwen 2.5 and Qwen 3 in this package's model, against transformers and each other."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from cs336_systems.config import FAMILY_FIELDS, SIZES, ModelConfig, RunConfig, UserError, model_config
from cs336_systems.model import TransformerLM
from cs336_systems.step.train_step import TrainStep
from cs336_systems.train.hf.hf_tensors import from_hf, hf_name

SHAPE = {"vocab_size": 97, "context_length": 24, "d_model": 48, "num_layers": 2, "num_heads": 6, "d_ff": 80}
FAMILIES = {
    "llama": ModelConfig(**SHAPE, num_kv_heads=2, rope_theta=5e5, rope_scaling="8,1,4,16"),
    "llama, tied": ModelConfig(**SHAPE, num_kv_heads=3, rope_theta=5e5, tied_embeddings=True),
    "qwen2": ModelConfig(**SHAPE, num_kv_heads=2, rope_theta=1e6, norm_eps=1e-6, qkv_bias=True, tied_embeddings=True),
    "qwen3": ModelConfig(
        **SHAPE, num_kv_heads=2, d_head=16, rope_theta=1e6, norm_eps=1e-6, qk_norm=True, tied_embeddings=True
    ),
    "all": ModelConfig(**SHAPE, num_kv_heads=1, d_head=10, qkv_bias=True, qk_norm=True),
}


def built(config, seed=0, **options):
    model = TransformerLM(config, attention="flash_torch", **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3, generator=generator)
    return model


def tokens(config, batch=2, seed=1):
    shape = (batch, config.context_length + 1)
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def loss_and_gradients(model, batch):
    loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_parameters_are_those_that_the_configuration_counts(name):
    model = TransformerLM(FAMILIES[name])
    assert sum(parameter.numel() for parameter in model.parameters()) == FAMILIES[name].parameters
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)
    assert vectors == FAMILIES[name].vector_parameters


@pytest.mark.parametrize("name", FAMILIES)
def test_fused_blocks_compute_the_same_as_plain_ones(name):
    batch = tokens(FAMILIES[name])
    plain_loss, plain = loss_and_gradients(built(FAMILIES[name]), batch)
    fused_loss, found = loss_and_gradients(built(FAMILIES[name], fused=True), batch)
    torch.testing.assert_close(fused_loss, plain_loss, rtol=1e-5, atol=1e-5)
    for parameter, gradient in plain.items():
        torch.testing.assert_close(found[parameter], gradient, rtol=2e-4, atol=2e-5, msg=parameter)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("fast", ["kernels,loss,optimizer", "optimizer"])
def test_the_fast_step_trains_as_the_plain_one(name, fast):
    losses = {}
    for own in ("off", fast):
        config = RunConfig(model=FAMILIES[name], batch_size=2, attention="flash_torch", fast=own)
        step = TrainStep.build(config)
        batch = tokens(FAMILIES[name])
        losses[own] = [step(batch[:, :-1], batch[:, 1:]) for _ in range(4)]
    found, expected = (torch.tensor([float(loss) for loss in losses[own]]) for own in (fast, "off"))
    assert expected[0] - expected[-1] > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("choice", ["keep", "recompute"])
def test_a_planned_block_computes_the_same_to_the_bit(name, choice):
    from cs336_systems.predict.activation_plan import KEEP, BlockPlan

    batch = tokens(FAMILIES[name])
    expected_loss, expected = loss_and_gradients(built(FAMILIES[name], fused=True), batch)
    model = built(FAMILIES[name], fused=True)
    model.plan = (BlockPlan(KEEP, KEEP, choice, choice, KEEP), BlockPlan(KEEP, *[choice] * 4))
    loss, found = loss_and_gradients(model, batch)
    assert torch.equal(loss, expected_loss)
    for parameter, gradient in expected.items():
        assert torch.equal(found[parameter], gradient), parameter


def test_a_tied_head_is_the_embedding_also_after_building_without_memory():
    config = RunConfig(model=FAMILIES["qwen2"], attention="flash_torch", fast="kernels,loss,optimizer")
    model = TrainStep.build(config).model
    assert model.lm_head.weight is model.token_embeddings.weight
    logits = TransformerLM(FAMILIES["qwen2"])(tokens(FAMILIES["qwen2"])[:, :-1])
    assert 0.1 < logits.std() < 10  # an embedding of variance 1 would give logits of variance d_model


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"num_kv_heads": 4}, "num_heads 6 is not a multiple of num_kv_heads 4"),
        ({"num_kv_heads": -1}, "num_kv_heads must be a whole number of at least 0"),
        ({"d_head": 7}, "head dimension 7 is odd"),
        ({"norm_eps": 0.0}, "norm_eps must be a finite number above 0"),
        ({"qkv_bias": 1}, "qkv_bias must be true or false"),
        ({"rope_scaling": "8,4,1,8192"}, "rope_scaling '8,4,1,8192' is not factor,low,high,original"),
        ({"rope_scaling": "linear"}, "rope_scaling 'linear' is not"),
        ({"rope_scaling": 8}, "rope_scaling must be a text"),
    ],
)
def test_what_cannot_be_is_one_clear_line(fields, names):
    with pytest.raises(UserError, match=names):
        ModelConfig(**SHAPE, **fields)


def test_one_model_has_one_configuration():
    """Written out or left to the defaults, in a record or not."""
    assert ModelConfig(**SHAPE, num_kv_heads=6, d_head=8) == ModelConfig(**SHAPE)
    assert ModelConfig(**SHAPE).to_dict().keys().isdisjoint(FAMILY_FIELDS)
    assert {name: getattr(ModelConfig(), name) for name in FAMILY_FIELDS} == FAMILY_FIELDS
    for config in FAMILIES.values():
        assert ModelConfig(**config.to_dict()) == config
        assert RunConfig.from_dict(RunConfig(model=config).to_dict()).model == config


@pytest.mark.parametrize(
    ("size", "billions"),
    [
        *(("llama3/1B", 1.236), ("llama3/3B", 3.213), ("llama3/8B", 8.030), ("qwen2.5/0.5B", 0.494)),
        *(("qwen2.5/1.5B", 1.544), ("qwen2.5/3B", 3.086), ("qwen2.5/7B", 7.616), ("qwen2.5/14B", 14.770)),
        *(("qwen3/0.6B", 0.596), ("qwen3/1.7B", 1.721), ("qwen3/4B", 4.022), ("qwen3/8B", 8.191)),
    ],
)
def test_published_models_have_their_number_of_parameters(size, billions):
    assert round(model_config(size).parameters / 1e9, 3) == billions


# -- against transformers ---------------------------------------------------------------------------------------------


def of_transformers(config):
    """A random model of transformers, and its weights in ours."""
    transformers = pytest.importorskip("transformers")
    common = {
        "vocab_size": config.vocab_size, "hidden_size": config.d_model, "intermediate_size": config.d_ff,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim, "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": 64, "tie_word_embeddings": config.tied_embeddings, "attn_implementation": "eager",
    }  # fmt: skip
    rope = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if config.frequency_scaling:
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        rope |= {"rope_type": "llama3", **dict(zip(names, config.frequency_scaling, strict=True))}
    family = "Qwen3" if config.qk_norm else "Qwen2" if config.qkv_bias else "Llama"
    torch.manual_seed(0)
    their_config = getattr(transformers, f"{family}Config")(**common, rope_parameters=rope)
    theirs = getattr(transformers, f"{family}ForCausalLM")(their_config).eval()
    ours = TransformerLM(config, attention="reference")
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
        state = dict(theirs.named_parameters())
        for name, parameter in ours.named_parameters():
            parameter.copy_(_weight(name, state, config))
    return theirs, ours


def _weight(name, state, config):
    return from_hf(name, state[hf_name(name)], config.head_dim)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "all"])
def test_logits_and_gradients_are_those_of_transformers(name):
    config = dataclasses.replace(FAMILIES[name], context_length=24)
    theirs, ours = of_transformers(config)
    batch = tokens(config)
    logits = theirs(batch[:, :-1]).logits
    torch.testing.assert_close(ours(batch[:, :-1]), logits, rtol=1e-5, atol=1e-5 * float(logits.detach().std()))
    F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
    loss_and_gradients(ours, batch)
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    for key, parameter in ours.named_parameters():
        expected = _weight(key, gradients, config)
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("size", [size for size, fields in SIZES.items() if "rope_scaling" in fields])
def test_rotary_frequencies_are_those_of_transformers(size):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = model_config(size, context_length=64)
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    rope = {"rope_theta": config.rope_theta, "rope_type": "llama3"}
    their_config = transformers.LlamaConfig(
        hidden_size=config.d_model, num_attention_heads=config.num_heads, head_dim=config.head_dim,
        rope_parameters=rope | dict(zip(names, config.frequency_scaling, strict=True)),
    )  # fmt: skip
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](their_config, torch.device("cpu"))
    with torch.device("meta"):
        model = TransformerLM(dataclasses.replace(config, num_layers=1))
    rotate = model.rotate.to_empty(device="cpu")
    rotate.reset_parameters()
    angles = torch.arange(64)[:, None] * frequencies.double()
    torch.testing.assert_close(rotate.cos[:, 0, ::2], angles.cos().float(), rtol=0, atol=2e-5)
