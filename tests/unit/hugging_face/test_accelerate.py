"""accelerate(model): the same logits, losses and gradients as transformers' own model, and nothing left after undo."""

import copy
import inspect
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

pytest.importorskip("transformers", reason="needs transformers")

import transformers

from cs336_systems import accelerate
from cs336_systems.config import UserError
from cs336_systems.hugging_face import attention_interface
from cs336_systems.kernels.fused import nodes
from tests.unit.hugging_face.models import FAMILIES, LENGTH, batch, build, error, gradients, pair

pytestmark = [
    pytest.mark.xdist_group("transformers"),  # one worker imports it
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
PADDED = torch.tensor([[1] * LENGTH, [0] * 4 + [1] * (LENGTH - 4)])
VARIANTS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "own heads": {"num_key_value_heads": 4},
    "eager": {"attn_implementation": "eager"},
}


@pytest.fixture
def count_calls(monkeypatch):
    """Replace a function of `nodes` by itself, and count its calls."""

    def count(name):
        calls, function = [], getattr(nodes, name)
        monkeypatch.setattr(nodes, name, lambda *given, **named: (calls.append(given), function(*given, **named))[1])
        return calls

    return count


# -- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_the_plain_model(family, variant, count_calls):
    plain, model, _ = pair(family, **VARIANTS[variant])
    calls = count_calls("norm_linear")
    assert error(gradients(model, batch()), gradients(plain, batch())) < 1e-5
    assert len(calls) == 2 * plain.config.num_hidden_layers


def test_biases_of_all_projections():
    plain, model, _ = pair(attention_bias=True, mlp_bias=True)
    assert error(gradients(model, batch()), gradients(plain, batch())) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_padding(family):
    plain, model, _ = pair(family)
    labels = batch()["labels"].masked_fill(PADDED == 0, -100)
    inputs = batch(attention_mask=PADDED) | {"labels": labels}
    assert error(gradients(model, inputs), gradients(plain, inputs)) < 1e-5
    assert error(gradients(model, batch(attention_mask=PADDED * 0 + 1)), gradients(plain, batch())) < 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_gradient_checkpointing(family, reentrant, count_calls):
    plain, model, _ = pair(family)
    calls = count_calls("norm_linear")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert error(gradients(model, batch()), gradients(plain, batch())) < 1e-5
    assert len(calls) == 4 * plain.config.num_hidden_layers  # each layer runs twice
    model.gradient_checkpointing_disable()


@pytest.mark.parametrize("mode", ["weights", "autocast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_as_accurate_as_that_of_the_plain_model(family, mode):
    plain, _, _ = pair(family)
    exact = gradients(plain, batch())
    if mode == "weights":
        plain = plain.bfloat16()
    model = copy.deepcopy(plain)
    accelerate(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        found, theirs = gradients(model, batch()), gradients(plain, batch())
    assert {name: x.dtype for name, x in found.items()} == {name: x.dtype for name, x in theirs.items()}
    assert error(found, exact) < 1.3 * error(theirs, exact)


def test_packed_documents_by_their_positions():
    plain, model, _ = pair()
    positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)])[None].expand(2, -1)
    inputs = batch(position_ids=positions)
    expected = gradients(plain, inputs | {"use_cache": False})  # with a cache transformers does not see documents
    assert error(gradients(model, inputs), expected) < 1e-5
    assert error(gradients(model, batch()), expected) > 1e-2


@pytest.mark.parametrize("positions", [True, False], ids=["positions", "offsets alone"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_by_their_offsets(family, positions, count_attention):
    """As the collator of transformers passes them; without positions, those of the whole sequence are used."""
    plain, model, _ = pair(family)
    lengths = (5, 1, LENGTH - 6)
    tokens, labels = batch()["input_ids"][:1], batch()["labels"][1:].clone()
    offsets = torch.tensor([0, 5, 6, LENGTH], dtype=torch.int32)
    apart = torch.cat([torch.arange(length) for length in lengths])[None]
    given = {"position_ids": apart} if positions else {}
    inputs = {"input_ids": tokens, "labels": labels, **given, "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    found = gradients(model, inputs | {"max_length_q": 7, "max_length_k": 7})
    assert len(count_attention) == plain.config.num_hidden_layers  # no SDPA

    # The plain model sees documents by positions; a document's own result does not depend on where it begins.
    expected = gradients(plain, {"input_ids": tokens, "labels": labels, "position_ids": apart, "use_cache": False})
    assert error(found, expected) < 1e-5


def test_documents_are_never_mixed_without_a_word():
    """Dropout goes to SDPA, which has no offsets: it needs the mask that positions give."""
    _, model, _ = pair(attention_dropout=0.5)
    offsets = torch.tensor([0, 5, LENGTH], dtype=torch.int32)
    inputs = {name: x[:1] for name, x in batch().items()} | {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    with pytest.raises(UserError, match="position_ids"):
        model(**inputs)
    positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)])[None]
    assert model(**inputs, position_ids=positions).loss.isfinite()


@pytest.fixture
def count_attention(monkeypatch):
    """Record the calls of our attention that have documents."""
    calls, own = [], attention_interface.attention

    def counted(*tensors, **options):
        calls.extend([options] * ("cu_seqlens_q" in options))
        return own(*tensors, **options)

    monkeypatch.setattr(attention_interface, "attention", counted)
    return calls


@pytest.mark.parametrize(
    "more",
    [
        {"num_items_in_batch": torch.tensor(40)},
        {"num_items_in_batch": 40},
        {"ignore_index": 60, "labels": batch()["labels"].clamp(min=0)},
        {"shift_labels": torch.full((2, LENGTH), 3)},
    ],
    ids=lambda more: next(iter(more)),
)
def test_arguments_of_the_loss(more):
    plain, model, _ = pair()
    assert error(gradients(model, batch(**more)), gradients(plain, batch(**more))) < 1e-5


def test_logits_are_computed_in_chunks(monkeypatch):
    plain, model, _ = pair()
    seen, product = [], torch.mm
    monkeypatch.setattr(nodes, "CHUNK_BYTES", 4 * 61 * 5)  # five rows
    monkeypatch.setattr(
        torch, "mm", lambda a, b, **named: (seen.append((len(a), b.shape[1])), product(a, b, **named))[1]
    )
    found = gradients(model, batch())
    logits = [rows for rows, columns in seen if columns == 56]  # of 61: the rest is a matmul of its own
    assert max(logits, default=99) <= 5
    monkeypatch.undo()
    assert error(found, gradients(plain, batch())) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_generation(family):
    plain, model, _ = pair(family)
    tokens = {"input_ids": batch()["input_ids"]}
    expected = plain(**tokens).logits
    assert torch.allclose(model(**tokens).logits, expected, atol=1e-5)
    model.eval(), plain.eval()
    with torch.no_grad():
        for use_cache in (False, True):
            assert torch.allclose(model(**tokens, use_cache=use_cache).logits, expected, atol=1e-5)
        assert torch.allclose(model(**batch()).logits, expected, atol=1e-5)
    options = {"attention_mask": PADDED, "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(**tokens, **options), plain.generate(**tokens, **options))


@pytest.mark.parametrize("packed", [False, True], ids=["torch", "packed"])
@pytest.mark.parametrize(("family", "fields"), [("Llama", {}), ("Qwen2", {"tie_word_embeddings": True})])
def test_thirty_steps_give_the_same_losses(family, fields, packed):
    plain, model, accelerated = pair(family, **fields)
    options = {"lr": 3e-3, "weight_decay": 0.1}
    optimizer = accelerated.packed_adamw(**options) if packed else torch.optim.AdamW(model.parameters(), **options)

    def train(model, optimizer):
        losses = []
        for _ in range(30):
            losses.append(gradient_step(model, optimizer))
        return losses

    expected = train(plain, torch.optim.AdamW(plain.parameters(), **options))
    assert expected[-1] < 0.7 * expected[0]
    assert train(model, optimizer) == pytest.approx(expected, rel=1e-4)


def gradient_step(model, optimizer):
    loss = model(**batch()).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# -- outputs ----------------------------------------------------------------------------------------------------------


def test_outputs_of_transformers():
    plain, model, _ = pair()
    hidden = model(**batch(), output_hidden_states=True).hidden_states
    expected = plain(**batch(), output_hidden_states=True).hidden_states
    assert len(hidden) == len(expected)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(hidden, expected, strict=True))
    (loss,) = model(**batch(), return_dict=False)
    assert torch.allclose(loss, plain(**batch()).loss)
    assert model(**batch()).logits is None
    last = {"input_ids": batch()["input_ids"], "logits_to_keep": 2}
    assert torch.allclose(model(**last).logits, plain(**last).logits, atol=1e-5)
    assert model(**batch()).past_key_values is None
    assert model(**batch(), use_cache=True).past_key_values.get_seq_length() == LENGTH


def test_models_without_a_language_head():
    for head in ("Model", "ForSequenceClassification"):
        plain = build("Qwen3", head)
        model = copy.deepcopy(plain)
        accelerate(model)
        tokens = batch()["input_ids"]
        found, expected = model(tokens)[0], plain(tokens)[0]
        assert torch.allclose(found, expected, atol=1e-5)
        for each in (found, expected):
            each.square().sum().backward()
        both = zip(model.named_parameters(), plain.parameters(), strict=True)
        grads = [(name, p.grad, q.grad) for (name, p), q in both if q.grad is not None]
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for _, a, b in grads), head


def test_signatures_are_those_of_transformers():
    """Its Trainer reads them to choose columns, and to see if the loss takes num_items_in_batch."""
    plain, model, _ = pair()
    for one, other in ((model, plain), (model.model, plain.model), (model.model.norm, plain.model.norm)):
        assert list(inspect.signature(one.forward).parameters) == list(inspect.signature(other.forward).parameters)


def test_a_projection_that_was_replaced_later_is_used():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    plain, model, _ = pair()
    for each in (plain, model):
        each.model.layers[0].mlp.up_proj.__class__ = Doubled
    assert error(gradients(model, batch()), gradients(plain, batch())) < 1e-5


def test_a_loss_of_ones_own_is_used():
    plain, model, _ = pair()
    for each in (plain, model):
        each.loss_function = lambda logits, labels, **_: logits.square().mean()
    assert error(gradients(model, batch()), gradients(plain, batch())) < 1e-5


def test_under_torch_compile():
    plain, model, _ = pair()
    compiled = torch.compile(model, backend="eager")
    loss = compiled(**batch()).loss
    loss.backward()
    found = {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}
    assert error(found, gradients(plain, batch())) < 1e-5


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("wrapper", ["ddp", "fully_shard", "fully_shard of the head"])
def test_under_torchs_data_parallelism(group_of_one, wrapper):
    plain, model, _ = pair("Qwen2")
    call = model
    if wrapper == "ddp":
        call = nn.parallel.DistributedDataParallel(model)
    else:
        for module in (*model.model.layers, *([model.lm_head] if "head" in wrapper else []), model):
            fully_shard(module, mesh=group_of_one)
    loss = call(**batch()).loss
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    found = {name: getattr(grad, "full_tensor", lambda grad=grad: grad)() for name, grad in grads.items()}
    assert error({"loss": loss.detach(), **found}, gradients(plain, batch())) < 1e-5


# -- what is patched, and undo ----------------------------------------------------------------------------------------


def everything(model):
    """Classes, instance attributes, parameters and memory of all modules."""
    return {
        name: (
            type(module),
            {key: id(value) for key, value in vars(module).items() if key[0] != "_"},
            "forward" in vars(module),
        )
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_undo_restores_everything(family):
    model = build(family, attn_implementation="eager")
    before, weights = everything(model), {name: value.clone() for name, value in model.state_dict().items()}
    parameters, config = dict(model.named_parameters()), model.config.to_dict()
    logits = model(**batch()).logits
    accelerated = accelerate(model)
    assert model.config._attn_implementation == "cs336"
    assert everything(model) != before
    assert repr(accelerated).endswith("2 layers>")
    gradients(model, batch())
    accelerated.undo()
    accelerated.undo()
    assert repr(accelerated).endswith("undone>")
    assert everything(model) == before
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "eager"
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(**batch()).logits, logits)
    accelerate(model)  # and again


def test_classes_and_other_models_stay_as_they_are():
    other = build()
    sibling = type(other)(other.config)
    before = everything(other)
    classes = {module: dict(vars(type(module))) for module in other.modules()}
    accelerate(build())
    accelerate(sibling)
    assert sibling.config._attn_implementation == "cs336"
    assert other.config._attn_implementation == "sdpa"
    assert everything(other) == before
    assert all(dict(vars(type(module))) == fields for module, fields in classes.items())


def test_a_failure_on_the_way_leaves_the_model_as_it_was(monkeypatch):
    model = build()
    before = everything(model)
    monkeypatch.setattr(torch, "cat", lambda tensors: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        accelerate(model)
    assert everything(model) == before


def test_weights_with_the_same_input_are_one_matrix():
    _, model, _ = pair("Qwen2")
    layer = model.model.layers[0]
    for linears in (
        (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
        (layer.mlp.gate_proj, layer.mlp.up_proj),
    ):
        weights = [linear.weight for linear in linears]
        joined = nodes.joined(weights, torch.float32)
        assert joined.data_ptr() == weights[0].data_ptr()
        assert torch.equal(joined, torch.cat(weights))


def test_weights_that_moved_apart_are_joined_by_copying():
    plain, model, _ = pair()
    model.to(torch.float64).to(torch.float32)
    assert error(gradients(model, batch()), gradients(plain, batch())) < 1e-5


def test_saving_and_loading(tmp_path):
    plain, model, accelerated = pair("Qwen2", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path).train()
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in loaded.state_dict().items())
    assert loaded.config._attn_implementation == "sdpa"
    assert error(gradients(loaded, batch()), gradients(plain, batch())) < 1e-6
    model.load_state_dict({name: value + 1 for name, value in plain.state_dict().items()})
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, plain.model.layers[1].mlp.up_proj.weight + 1)
    accelerated.undo()


def test_a_copy_is_accelerated_and_independent(count_calls):
    _, model, _ = pair()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    calls = count_calls("norm_linear")
    assert all(value.abs().sum() > 0 for value in gradients(other, batch()).values())
    assert len(calls) == 4


# -- the packed optimizer ---------------------------------------------------------------------------------------------


def test_packed_optimizer_of_a_bf16_model():
    _, model, accelerated = pair("Qwen3")
    model.bfloat16()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = accelerated.packed_adamw(lr=1e-3)
    assert all(p.dtype == torch.bfloat16 and torch.equal(p, weights[name]) for name, p in model.named_parameters())
    attn = model.model.layers[1].self_attn
    joined = [attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight]
    assert nodes.joined(joined, torch.bfloat16).data_ptr() == joined[0].data_ptr()
    losses = [gradient_step(model, optimizer) for _ in range(5)]
    assert losses[-1] < losses[0]
    accelerated.undo()
    assert model(**batch()).loss.item() < losses[-1]
    assert joined[0].data_ptr() == nodes.joined(joined, torch.bfloat16).data_ptr()  # the optimizer's memory


def test_updates_in_backward_are_those_of_a_step():
    _, model, accelerated = pair()
    other = copy.deepcopy(model)
    ours = accelerated.packed_adamw(lr=1e-3, update_in_backward=True)
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-3)
    for _ in range(3):
        assert gradient_step(model, ours) == pytest.approx(gradient_step(other, theirs), rel=1e-5)


def test_packed_optimizer_refuses_what_it_cannot_do():
    _, model, accelerated = pair(tie_word_embeddings=True)
    with pytest.raises(UserError, match="tied to the embedding"):
        accelerated.packed_adamw(update_in_backward=True)
    model.half()
    with pytest.raises(UserError, match="bfloat16 or float32, got float16"):
        accelerated.packed_adamw()


# -- attn_implementation="cs336" --------------------------------------------------------------------------------------


def test_attention_of_a_model_that_is_not_accelerated(monkeypatch):
    attention_interface.register_attention()
    calls, attention = [], attention_interface.attention
    monkeypatch.setattr(attention_interface, "attention", lambda *q, **w: (calls.append(w), attention(*q, **w))[1])
    for family, windows in (("Qwen2", {None, (4, None)}), ("Mistral", {(5, None)}), ("Llama", {None})):
        plain, model = build(family), build(family, attn_implementation="cs336")
        calls.clear()
        assert error(gradients(model, batch()), gradients(plain, batch())) < 1e-5
        assert {call["window"] for call in calls} == windows
        assert len(calls) == 2


def test_dropout_and_masks_fall_back_to_sdpa_with_one_warning(monkeypatch):
    monkeypatch.setattr(attention_interface, "_warned", set())
    monkeypatch.setattr(attention_interface, "attention", None)
    plain, model, _ = pair("Mistral", attention_dropout=0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        found = gradients(model, batch())
        torch.manual_seed(0)
        assert error(found, gradients(plain, batch())) < 1e-5
        gradients(model, batch(attention_mask=PADDED))
        gradients(model, batch(attention_mask=PADDED))
    said = [str(one.message) for one in caught if "cs336_systems" in str(one.message)]
    assert len(said) == 2
    assert "dropout 0.5" in said[0]
    assert "a mask" in said[1]


# -- errors -----------------------------------------------------------------------------------------------------------


def wrapped() -> nn.Module:
    """A model whose forward another library has replaced."""
    model = build()
    model.model.norm.forward = model.model.norm.forward
    return model


def test_errors():
    cases = {
        "got Linear": lambda: nn.Linear(2, 2),
        "got GPT2LMHeadModel": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=9)
        ),
        "got OptimizedModule": lambda: torch.compile(build()),
        "got 'gelu'": lambda: build(hidden_act="gelu"),
        "got torch.float64": lambda: build().double(),
        "got on the meta device": lambda: build().to("meta"),
        "^LlamaForCausalLM is already accelerated; call undo\\(\\) first$": lambda: pair()[1],
        "has a forward of its own: accelerate\\(model\\) comes first": wrapped,
    }
    for words, make in cases.items():
        with pytest.raises(UserError, match=words) as caught:
            accelerate(make())
        assert "\n" not in str(caught.value)
    model = build()
    model.model.layers[1].mlp.up_proj = nn.Identity()
    before = everything(model)
    with pytest.raises(UserError, match="Identity: merge adapters"):
        accelerate(model)
    assert everything(model) == before


def test_transformers_missing_or_old(monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.9.1")
    with pytest.raises(UserError, match=r"transformers 5\.9\.1 is too old; pip install 'transformers>=5\.17'"):
        attention_interface.register_attention()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match="pip install transformers"):
        attention_interface.register_attention()
