"""Model shapes and run settings: validation, error messages, round trips, and names of sizes."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.config import (
    ADDED_LATER,
    ATTENTIONS,
    COURSE_SIZES,
    MODES,
    OPTIMIZER_STATES,
    PLAIN_PRECISIONS,
    PRECISIONS,
    SIZES,
    ModelConfig,
    RunConfig,
    UserError,
    canonical_size,
    model_config,
    recorded_size,
    size_name,
)
from cs336_systems.record import cell_key
from tests.helpers import refused
from tests.unit.any_text import any_text

quick = settings(max_examples=60, deadline=None)
WHOLE_NUMBERS = ("vocab_size", "context_length", "d_model", "num_layers", "num_heads", "d_ff")
SHAPE = ("d_model", "d_ff", "num_layers", "num_heads")


def shape_of(model):
    return tuple(getattr(model, name) for name in SHAPE)


@st.composite
def models(draw):
    heads, half_head = draw(st.integers(1, 16)), draw(st.integers(1, 32))
    return ModelConfig(
        vocab_size=draw(st.integers(1, 60_000)),
        context_length=draw(st.integers(1, 8192)),
        d_model=heads * 2 * half_head,
        num_layers=draw(st.integers(1, 60)),
        num_heads=heads,
        d_ff=draw(st.integers(1, 20_000)),
        rope_theta=draw(st.floats(1e-3, 1e9)),
    )


def runs():
    return st.builds(
        RunConfig,
        model=models(),
        size=any_text(max_size=8),
        batch_size=st.integers(1, 4096),
        mode=st.sampled_from(MODES),
        precision=st.sampled_from(PLAIN_PRECISIONS),
        attention=st.sampled_from(ATTENTIONS),
        checkpoint_blocks=st.integers(0, 64),
        compile=st.booleans(),
        max_grad_norm=st.floats(0, 1e6),
        device=st.sampled_from(["cpu", "cuda", "cuda:0", "cuda:15"]),
        warmup_steps=st.integers(0, 100),
        num_steps=st.integers(1, 1000),
        seed=st.integers(-(2**31), 2**31),
        model_factory=st.sampled_from([None, "package.module:build"]),
    )


# -- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ("small", 128_625_408),
        ("medium", 423_183_360),
        ("large", 969_411_840),
        ("xl", 1_998_235_200),
        ("2.7B", 3_406_809_600),
    ],
)
def test_parameters_of_the_course_sizes(size, count):
    assert model_config(size).parameters == count


@quick
@given(models())
def test_parameters_are_the_elements_of_all_weights(model):
    d, ff, vocabulary = model.d_model, model.d_ff, model.vocab_size
    matrices = [(d, d)] * 4 + [(ff, d), (d, ff), (ff, d)]
    linear = [*matrices * model.num_layers, (vocabulary, d)]
    elements = sum(rows * columns for rows, columns in linear)
    assert model.linear_parameters == elements
    gains = [d] * (2 * model.num_layers + 1)
    assert model.parameters == elements + vocabulary * d + sum(gains)


def test_every_named_size_is_a_valid_model():
    for name in SIZES:
        assert model_config(name).parameters > 0
    assert set(COURSE_SIZES) <= set(SIZES)


# -- validation -------------------------------------------------------------------------------------------------------


@quick
@given(st.fixed_dictionaries({name: st.integers(1, 48) for name in WHOLE_NUMBERS}))
def test_a_shape_is_valid_or_the_error_names_its_numbers(shape):
    divisible = shape["d_model"] % shape["num_heads"] == 0
    valid = divisible and (shape["d_model"] // shape["num_heads"]) % 2 == 0
    if valid:
        model = ModelConfig(**shape)
        assert model.head_dim * model.num_heads == model.d_model
        return
    odd = [f"= {shape['d_model'] // shape['num_heads']} is odd"] if divisible else []
    with refused("d_model", "num_heads", str(shape["d_model"]), str(shape["num_heads"]), *odd):
        ModelConfig(**shape)


INF, NAN = float("inf"), float("nan")
NUMBERS = {
    **{(ModelConfig, name): [0, -1, True, False, 1.0, 2.5, NAN, "4", None] for name in WHOLE_NUMBERS},
    (ModelConfig, "rope_theta"): [0, -1.0, INF, NAN, "10000", None, True],
    **{(RunConfig, name): [0, -1, True, 1.0, "4", None] for name in ("batch_size", "num_steps")},
    **{(RunConfig, name): [-1, True, 1.0, "4", None] for name in ("warmup_steps", "checkpoint_blocks")},
    (RunConfig, "max_grad_norm"): [-0.5, INF, NAN],
}
"""Numbers that a field refuses."""


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [(*field, value) for field, values in NUMBERS.items() for value in values],
    ids=lambda part: part.__name__ if isinstance(part, type) else repr(part),
)
def test_a_number_out_of_its_range_is_named(config, name, value):
    with pytest.raises(UserError, match=f"^{name} must be .*") as refusal:
        config(**{name: value})
    assert repr(value) in str(refusal.value)


def test_no_warm_up_no_recomputation_and_no_clipping_are_accepted():
    config = RunConfig(warmup_steps=0, checkpoint_blocks=0, max_grad_norm=0)
    assert (config.warmup_steps, config.checkpoint_blocks, config.max_grad_norm) == (0, 0, 0)


UNKNOWN = ["", "nonsense", "FP32", "forward "]
CHOICES = {
    "mode": (UNKNOWN, MODES),
    "precision": (UNKNOWN, PRECISIONS),
    "attention": (UNKNOWN, ATTENTIONS),
    "optimizer_state": (UNKNOWN, OPTIMIZER_STATES),
    "device": (["", "gpu", "mps", "CUDA", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "cuda\n"], ("cpu, cuda or cuda:N",)),
    "model_factory": (["", "module", "module.build", "a b:build", "module:", ":build", "m:build()"], ()),
    "size": (["huge"], SIZES),
}
"""Field -> values that it refuses, and what the message lists."""


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (values, _) in CHOICES.items() for value in values], ids=repr
)
def test_an_unknown_choice_is_named_with_all_choices(name, value):
    with refused(repr(value), *CHOICES[name][1]):
        model_config(value) if name == "size" else RunConfig(**{name: value})


def test_an_integer_rope_theta_gives_the_same_cell_as_the_float():
    whole, fraction = (RunConfig(model=ModelConfig(rope_theta=theta)) for theta in (10_000, 10_000.0))
    assert cell_key(whole.to_dict()) == cell_key(fraction.to_dict())


@pytest.mark.parametrize("name", ADDED_LATER)
def test_a_field_added_later_keeps_the_cell_keys_of_older_files(name):
    assert ADDED_LATER[name] == getattr(RunConfig(), name)
    assert name not in RunConfig().to_dict()
    other = {"fast": "on", "optimizer_state": "bf16", "update_in_backward": True, "memory_budget": "8GiB"}
    changed = RunConfig(precision="bf16", attention="auto", **{"fast": "on", name: other[name]})
    assert changed.to_dict()[name] == other[name]
    assert RunConfig.from_dict(changed.to_dict()) == changed


@pytest.mark.parametrize("fields", [{}, {"precision": "bf16"}, {"fast": "on"}, {"fast": "loss", "precision": "bf16"}])
def test_a_bf16_optimizer_state_needs_bf16_weights_and_the_packed_optimizer(fields):
    with refused("optimizer_state bf16", "fast on"):
        RunConfig(optimizer_state="bf16", **fields)


@pytest.mark.parametrize(
    ("fields", "way_out"),
    [({}, "fast on"), ({"fast": "on", "max_grad_norm": 1.0}, "use 0"), ({"fast": "on", "compile": True}, "compile")],
    ids=["plain step", "clipping", "compiled"],
)
def test_an_update_in_backward_names_what_excludes_it(fields, way_out):
    with refused("update_in_backward", way_out):
        RunConfig(update_in_backward=True, **fields)


@pytest.mark.parametrize("value", ["cpu", "cuda", "cuda:0", "cuda:12"])
def test_known_devices_are_accepted(value):
    assert RunConfig(device=value).device_type == value.split(":")[0]


@quick
@given(any_text())
def test_any_error_message_is_a_single_line(text):
    """Values are shown with repr, so that a newline or an escape sequence in them cannot break the line."""
    unknown = f"no choice {text} at all"
    attempts = [
        lambda: model_config(unknown),
        lambda: RunConfig(mode=unknown),
        lambda: RunConfig(precision=unknown),
        lambda: RunConfig(attention=unknown),
        lambda: RunConfig(device=unknown),
        lambda: RunConfig(model_factory=unknown),
        lambda: ModelConfig(d_model=unknown),
    ]
    for attempt in attempts:
        with refused(repr(unknown)):
            attempt()


# -- memory budgets ---------------------------------------------------------------------------------------------------

FUSED = {"fast": "on", "attention": "auto"}


@pytest.mark.parametrize("text", ["130GiB", "80GB", "0.5GiB", "auto"])
@pytest.mark.parametrize("fields", [FUSED, {}, {"model_factory": "package.module:build"}], ids=str)
def test_budgets_are_accepted(text, fields):
    config = RunConfig(memory_budget=text, **fields)
    assert config.plans_whole_blocks == (fields != FUSED)
    assert RunConfig.from_dict(config.to_dict()) == config
    assert not RunConfig(**fields).plans_whole_blocks


@pytest.mark.parametrize("text", ["80 GiB", "GiB", "-1GiB", "1e3GiB", "80gib", "80TB", "full", "1GiB\n", " "])
def test_nonsense_is_no_budget(text):
    with refused("memory_budget", repr(text), "130GiB"):
        RunConfig(memory_budget=text, **FUSED)


def test_a_budget_needs_a_unit():
    with refused("memory_budget '80' has no unit; use 80GiB or 80GB"):
        RunConfig(memory_budget="80", **FUSED)


REFUSED_BUDGETS = {
    "checkpoint_blocks": {"checkpoint_blocks": 2},
    "mode inference": {"mode": "inference"},
    "mode forward": {"mode": "forward"},
    "compile": {"compile": True},
    "not reference": {"fast": "kernels", "attention": "reference"},
    "not sdpa": {"fast": "kernels", "attention": "sdpa"},
}


@pytest.mark.parametrize("word", REFUSED_BUDGETS)
def test_what_a_budget_cannot_be_combined_with(word):
    with refused("memory_budget", "8GiB", word):
        RunConfig(memory_budget="8GiB", **REFUSED_BUDGETS[word])


# -- round trip -------------------------------------------------------------------------------------------------------


@quick
@given(runs())
def test_a_run_survives_json(config):
    restored = RunConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert restored == config
    assert cell_key(restored.to_dict()) == cell_key(config.to_dict())


@quick
@given(runs(), st.sampled_from([f.name for f in dataclasses.fields(RunConfig) if f.name not in ("model", "size")]))
def test_every_field_but_the_size_name_is_in_the_cell_key(config, name):
    other = {**config.to_dict(), name: "something else"}
    assert cell_key(other) != cell_key(config.to_dict())
    assert cell_key({**config.to_dict(), "size": "something else"}) == cell_key(config.to_dict())


@pytest.mark.parametrize(
    "changes",
    [
        *({"model": model} for model in (None, 7, "small", {"width": 3}, {"d_model": 0}, {"two\nlines": 1})),
        {"two\nlines": 1},
    ],
    ids=repr,
)
def test_an_invalid_dictionary_is_refused_in_a_single_line(changes):
    with refused():
        RunConfig.from_dict({**RunConfig().to_dict(), **changes})
    with pytest.raises(UserError, match="without a valid model"):
        RunConfig.from_dict({})


def test_fields_of_another_version_are_refused_by_name():
    with pytest.raises(UserError, match="unknown configuration fields: colour, flavour"):
        RunConfig.from_dict({**RunConfig().to_dict(), "flavour": 1, "colour": 2})


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_size_names_are_case_insensitive(size):
    for spelling in (size.lower(), size.upper(), size):
        model = model_config(spelling)
        assert model == model_config(size)
        assert canonical_size(spelling, model) == size


def test_xl_of_2026_differs_from_xl():
    """The two handouts call different models `xl`: 2.0B and 3.4B parameters."""
    old, new = model_config("xl"), model_config("2026/xl")
    assert shape_of(old) != shape_of(new)
    for asked in ("xl", "2026/xl", "XL", ""):
        assert canonical_size(asked, old) == "xl"
        assert canonical_size(asked, new) in ("2026/xl", "2.7B")
    keys = {cell_key(RunConfig(model=model).to_dict()) for model in (old, new)}
    assert len(keys) == 2


def test_xl_of_2026_is_2_7b_under_its_own_name():
    """Measured once, shown under the requested name."""
    asked, twin = (RunConfig(model=model_config(name), size=name) for name in ("2026/xl", "2.7B"))
    assert asked.model == twin.model
    assert cell_key(asked.to_dict()) == cell_key(twin.to_dict())
    assert asked.size == canonical_size("2026/xl", asked.model) == "2026/xl"
    assert twin.size == canonical_size("2.7b", twin.model) == "2.7B"


@quick
@given(st.sampled_from(list(SIZES)), st.sampled_from(SHAPE), st.integers(1, 8))
def test_an_override_of_the_shape_changes_the_name(size, field, factor):
    value = SIZES[size][field] * factor if field != "num_heads" else SIZES[size].get("num_kv_heads", 1)
    model = model_config(size, **{field: value})
    name = canonical_size(size, model)
    if value == SIZES[size][field]:
        assert name == size
    else:
        assert name != size
        assert shape_of(model) == (
            shape_of(model_config(name)) if name in SIZES else tuple(int(part) for part in name.split("/")[:4])
        )


@pytest.mark.parametrize("size", SIZES)
def test_another_context_length_keeps_the_size_name(size):
    model = model_config(size, context_length=77)
    assert model.context_length == 77
    assert canonical_size(size, model) == size


def test_overrides_that_give_another_size_take_its_name():
    model = model_config("small", **SIZES["large"])
    assert canonical_size("small", model) == "large"


@quick
@given(models())
def test_a_run_without_a_name_is_named_by_its_shape(model):
    name = RunConfig(model=model).size
    assert name == size_name(model)
    assert name in SIZES or name == "/".join(map(str, shape_of(model)))


def test_tokens_are_those_of_the_whole_batch():
    assert RunConfig(model=model_config("small", context_length=256), batch_size=3).tokens == 768


def test_the_recorded_size_of_a_model_that_cannot_be_read_stays():
    for size, model in (("own", {}), (3, {}), ("small", {"d_model": "?"}), ("small", {"of_a_later_version": 1})):
        assert recorded_size(size, model) == size
