"""transformers' models accelerated on a GPU: the Triton kernels against the plain model in fp32, and training."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs transformers")

from cs336_systems import accelerate  # noqa: E402

pytestmark = pytest.mark.gpu

SHAPE = {
    "vocab_size": 4001,
    "hidden_size": 320,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
FAMILIES = {
    "llama": ("Llama", {}),
    "llama-biases-tied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 128}),
    "mistral": ("Mistral", {"sliding_window": 64, "head_dim": 80}),
}


def build(family, **fields):
    name, own = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SHAPE | own | fields)
    model = getattr(transformers, f"{name}ForCausalLM")(config).cuda().train()
    with torch.no_grad():
        for parameter in model.parameters():  # gains of 1 and biases of 0 would hide errors
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def batch(rows=2, length=256):
    tokens = torch.randint(SHAPE["vocab_size"], (rows, length), device="cuda")
    labels = tokens.clone()
    labels[:, :5] = -100
    return {"input_ids": tokens, "labels": labels}


def gradients(model, **inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


def error(found, exact):
    return {name: ((found[name].double() - x.double()).norm() / x.double().norm()).item() for name, x in exact.items()}


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_fp32_gradients_are_those_of_the_plain_model(family):
    plain = build(family)
    model, inputs = copy.deepcopy(plain), batch()
    accelerate(model)
    errors = error(gradients(model, **inputs), gradients(plain, **inputs))
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.parametrize(
    ("family", "mode"), [*((family, "weights") for family in FAMILIES), ("llama-biases-tied", "autocast")]
)
def test_bf16_gradients_are_as_accurate_as_the_plain_model(family, mode):
    """Both are compared with fp32: ours may be off by a little more than transformers' own bf16 is."""
    exact_model, inputs = build(family), batch()
    plain = copy.deepcopy(exact_model)
    if mode == "weights":
        plain = plain.bfloat16()
        exact_model.load_state_dict(plain.state_dict())  # the rounded weights
    exact = gradients(exact_model, **inputs)
    model = copy.deepcopy(plain)
    accelerate(model)
    with torch.autocast("cuda", torch.bfloat16, enabled=mode == "autocast"):
        ours, theirs = error(gradients(model, **inputs), exact), error(gradients(plain, **inputs), exact)
    worse = {name: (own, theirs[name]) for name, own in ours.items() if own > 1.3 * theirs[name] + 5e-3}
    assert not worse


def test_hopper_attention_in_a_step_of_head_dim_80():
    """Large enough for the kernels of GPUs of compute capability 9.0."""
    plain = build("llama", num_attention_heads=4, head_dim=80).bfloat16()
    model, inputs = copy.deepcopy(plain), batch(rows=8, length=2048)
    accelerate(model)
    errors = error(gradients(model, **inputs), gradients(plain, **inputs))
    assert max(errors.values()) < 5e-2, errors


@pytest.mark.parametrize("packed", [False, True], ids=["torch", "packed"])
def test_training_follows_the_plain_model(packed):
    plain = build("qwen3").bfloat16()
    model, inputs = copy.deepcopy(plain), batch()
    accelerated = accelerate(model)
    if packed:
        optimizer = accelerated.packed_adamw(lr=1e-3, state_dtype=torch.bfloat16)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def train(model, optimizer):
        losses = []
        for _ in range(20):
            loss = model(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True))
    found = train(model, optimizer)
    assert expected[-1] < 0.8 * expected[0]
    assert found == pytest.approx(expected, rel=0.03)


def test_gradient_checkpointing_compile_and_generation():
    plain = build("llama")
    model, inputs = copy.deepcopy(plain), batch()
    accelerate(model)
    exact = gradients(plain, **inputs)
    model.gradient_checkpointing_enable()
    assert max(error(gradients(model, **inputs), exact).values()) < 1e-4
    model.gradient_checkpointing_disable()
    model.zero_grad()
    torch.compile(model)(**inputs).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    assert max(error(found, {name: exact[name] for name in found}).values()) < 1e-4
    prompt = inputs["input_ids"][:1, :8]
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt), "pad_token_id": 0}
    assert torch.equal(model.eval().generate(prompt, **options), plain.eval().generate(prompt, **options))


def test_less_memory_than_the_plain_model():
    plain = build("llama", num_hidden_layers=4).bfloat16()
    model, inputs = copy.deepcopy(plain), batch(rows=8, length=512)
    accelerate(model)

    def peak(model):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(**inputs).loss.backward()
        model.zero_grad()
        return torch.cuda.max_memory_allocated() - before

    peak(plain), peak(model)  # libraries allocate workspaces
    assert peak(model) < 0.75 * peak(plain)
