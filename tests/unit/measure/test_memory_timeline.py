"""Memory of a step, block by block: the traced step, its file, tensors saved for backward, nested recomputation.

Expected sizes are computed from the shapes, or counted by autograd's own hooks.
"""

import dataclasses
import functools
import gzip
import json
import re
from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from cs336_systems.config import MODES, ModelConfig, RunConfig
from cs336_systems.measure.memory_timeline import trace_memory
from cs336_systems.measure.memory_trace import measure_peak, predict_by_tracing
from cs336_systems.measure.saved_tensors import block_backward, saved_tensors
from cs336_systems.step.train_step import TrainStep
from cs336_systems.timeline import Block, Span, Timeline
from tests.helpers import MODEL, refused

SMALL = ModelConfig(vocab_size=96, context_length=64, d_model=32, num_layers=2, num_heads=4, d_ff=64)
BATCH = 2
SCORE_BYTES = BATCH * SMALL.num_heads * SMALL.context_length**2 * 4
"""Larger than any other tensor of this model."""
LINE = re.compile(r"[\w./-]+\.py:\d+ in \S+")


def steady(config=None, **fields):
    """Return a step that has run once, which creates the optimizer's state."""
    step = TrainStep.build(config or RunConfig(model=SMALL, batch_size=BATCH, **fields))
    batch = step.random_batch()
    step(*batch)
    return step, batch


@pytest.fixture(scope="module")
def trained():
    step, batch = steady()
    found = trace_memory(step, batch)
    assert_consistent(found, measure_peak(step, batch))
    return step, found


@pytest.fixture(scope="module")
def trace(trained):
    return trained[1]


def phase_of(timeline, name):
    [span] = [span for span in timeline.phases if span.name == name]
    return span


def assert_consistent(found, measured):
    assert found.peak == measured
    assert sum(found.parts.values()) == found.peak
    assert all(size > 0 for size in found.parts.values())
    peak = found.timeline.peak()
    assert peak.size == found.peak
    assert found.timeline.parts_at(peak.time) == found.parts


# -- a traced step ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        *({"mode": mode} for mode in MODES[:3]),
        {"precision": "bf16"},
        {"attention": "sdpa"},
        {"attention": "flash_torch"},
        {"checkpoint_blocks": 1},
        {"checkpoint_blocks": 2, "attention": "sdpa"},
        {"max_grad_norm": 1.0},
    ],
    ids=str,
)
def test_parts_add_up_to_the_measured_peak(fields):
    step, batch = steady(**fields)
    found = trace_memory(step, batch)
    assert_consistent(found, measure_peak(step, batch))
    assert found.parts["parameters"] == 4 * SMALL.parameters


def test_bytes_of_gradients_and_optimizer_state(trained):
    """fp32: 4 bytes per parameter, 4 for its gradient, 8 for AdamW's moments, and AdamW's step counts."""
    step, found = trained
    tensors = len(list(step.model.parameters()))
    backward, optimizer = phase_of(found.timeline, "backward"), phase_of(found.timeline, "optimizer")
    parts = found.timeline.parts_at((backward.end + optimizer.start) / 2)
    assert parts["parameters"] == 4 * SMALL.parameters
    assert parts["gradients"] == 4 * SMALL.parameters
    assert 8 * SMALL.parameters <= parts["optimizer state"] <= 8 * SMALL.parameters + 8 * tensors
    assert parts.get("activations", 0) == 0
    after = found.timeline.parts_at(found.timeline.end + 1)
    assert after.get("gradients", 0) == 0


def test_gradients_grow_in_backward_and_activations_shrink(trace):
    span = phase_of(trace.timeline, "backward")
    times = [span.start + (span.end - span.start) * i / 10 for i in range(11)]
    parts = [trace.timeline.parts_at(time) for time in times]
    gradients, activations = ([p.get(name, 0) for p in parts] for name in ("gradients", "activations"))
    assert gradients == sorted(gradients)
    assert activations == sorted(activations, reverse=True)
    assert gradients[0] == 0 < gradients[-1]
    assert activations[0] >= 2 * SCORE_BYTES


def test_labels_of_logits_and_loss(trace):
    """Logits, their log-softmax and its gradient have one size, and none is an activation."""
    size = 4 * BATCH * SMALL.context_length * SMALL.vocab_size
    found = [block for block in trace.timeline.blocks if block.label == "logits and loss" and block.size == size]
    assert len(found) >= 2
    assert any(block.module == "lm_head" for block in found)
    loss = phase_of(trace.timeline, "loss")
    assert trace.timeline.parts_at(loss.end)["logits and loss"] >= size
    assert not [b for b in trace.timeline.blocks if b.label == "activations" and b.module == "lm_head"]


def test_module_and_line_of_the_score_matrix(trace):
    for layer in range(SMALL.num_layers):
        scores = [
            block
            for block in trace.timeline.blocks
            if block.size == SCORE_BYTES and block.label == "activations" and block.module == f"layers.{layer}.attn"
        ]
        assert scores
        for block in scores:
            assert "reference.py:" in block.line
            assert LINE.fullmatch(block.line.split(" (")[0]), block.line
            assert "float32" in block.what
            assert all(str(n) in block.what for n in (BATCH, SMALL.num_heads, SMALL.context_length))
        assert any("softmax" in block.what for block in scores)


def test_module_and_line_of_activations(trained):
    step, found = trained
    modules = dict(step.model.named_modules())
    span = phase_of(found.timeline, "forward")
    saved = [b for b in found.timeline.blocks if b.label == "activations" and span.start <= b.start <= span.end]
    assert {block.module for block in saved} <= set(modules)
    for expected in ("layers.0.attn", "layers.1.ffn", "layers.0.ffn.w1", "layers.1.attn.q_proj", "ln_final"):
        assert expected in {block.module for block in saved}
    assert all(block.what and ".py:" in block.line for block in saved)
    w1 = 4 * BATCH * SMALL.context_length * SMALL.d_ff
    [block] = [b for b in saved if b.module == "layers.0.ffn.w1" and b.size == w1]
    assert "model.py" in block.line or "linear.py" in block.line
    assert str(SMALL.d_ff) in block.what


def test_parameters_and_buffers_are_allocated_throughout(trained):
    step, found = trained
    blocks = [block for block in found.timeline.blocks if block.label == "parameters"]
    assert Counter(block.size for block in blocks) == Counter(p.nbytes for p in step.model.parameters())
    assert all(block.start == 0 and block.end is None for block in blocks)
    tables = [block.size for block in found.timeline.blocks if block.label == "buffers"]
    assert sum(tables) == sum(buffer.nbytes for buffer in step.model.buffers())


def test_phases_are_in_order(trace):
    spans = trace.timeline.phases
    assert [span.name for span in spans] == ["forward", "loss", "backward", "optimizer"]
    assert all(span.start < span.end for span in spans)
    assert all(before.end <= after.start for before, after in pairwise(spans))
    peak = trace.timeline.peak()
    assert [trace.phase] == [span.name for span in spans if span.start <= peak.time <= span.end]


def test_the_largest_blocks_of_the_step(trace):
    sizes = [block.size for block in trace.largest]
    during = sorted((block.size for block in trace.timeline.blocks if block.start > 0), reverse=True)
    assert sizes == during[: len(sizes)]
    assert sizes[0] == SCORE_BYTES
    assert set(trace.largest) <= set(trace.timeline.blocks)


def test_labels_of_recomputed_activations():
    """With checkpointing, scores are freed in forward and recomputed in backward."""
    step, batch = steady(checkpoint_blocks=1)
    found = trace_memory(step, batch)
    backward = phase_of(found.timeline, "backward")
    again = [
        block
        for block in found.timeline.blocks
        if block.size == SCORE_BYTES and block.start >= backward.start and "reference.py" in block.line
    ]
    assert {block.label for block in again if "backward" not in block.what} == {"activations"}
    assert {block.module for block in again if block.label == "activations"} == {"layers.0.attn", "layers.1.attn"}
    assert found.timeline.parts_at(backward.start)["activations"] < SCORE_BYTES * 2
    assert found.timeline.parts_at(backward.end).get("activations", 0) == 0


@pytest.mark.parametrize("fields", [{}, {"checkpoint_blocks": 1}, {"precision": "bf16"}], ids=str)
def test_inference_frees_all_activations(fields):
    step, batch = steady(mode="inference", **fields)
    found = trace_memory(step, batch)
    assert_consistent(found, measure_peak(step, batch))
    left = {block.label for block in found.timeline.blocks if block.end is None}
    assert "parameters" in left
    assert not left & {"activations", "logits and loss"}
    assert [span.name for span in found.timeline.phases] == ["forward"]
    scores = [block for block in found.timeline.blocks if block.size == SCORE_BYTES]
    assert scores
    assert all(block.end is not None for block in scores)
    # Without a graph one layer's scores are freed before those of the next layer are allocated.
    assert found.peak < measure_peak(*steady(mode="forward"))


def test_tracing_does_not_change_the_step():
    step, batch = steady()
    twin, _ = steady()
    trace_memory(step, batch)
    twin(*batch)
    assert all(torch.equal(a, b) for a, b in zip(step.model.parameters(), twin.model.parameters(), strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in step.model.modules())


def test_a_step_can_be_traced_again_after_a_failure(monkeypatch):
    """Out of memory in the middle of a step must not leave hooks or patches behind."""

    def fail(x):
        raise RuntimeError("out of memory")

    step, batch = steady()
    with monkeypatch.context() as patch:
        patch.setattr(step.model.ln_final, "forward", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            trace_memory(step, batch)
    found = trace_memory(step, batch)
    assert_consistent(found, measure_peak(step, batch))
    assert {"layers.0.attn", "layers.1.attn"} <= {block.module for block in found.timeline.blocks}


def test_a_user_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "traced_model.py").write_text(MODEL)
    step, batch = steady(model_factory="traced_model:build")
    found = trace_memory(step, batch)
    assert_consistent(found, measure_peak(step, batch))
    d, vocab = SMALL.d_model, SMALL.vocab_size
    assert found.parts["parameters"] == 4 * (vocab * d + d * d + d + d * vocab + vocab)
    modules = {b.module for b in found.timeline.blocks if b.label == "activations" and b.line}
    assert {"embed", "mix"} <= modules
    assert "head" not in modules
    assert any("traced_model.py:" in block.line for block in found.timeline.blocks)


# -- the file ---------------------------------------------------------------------------------------------------------

TIMELINES = {
    "empty": Timeline("nothing", "cpu", []),
    "unicode": Timeline('标题 "quoted"', "cpu", [Block("活动", 2**40, 0.0, None)], [Span("forward", 0.0, 1e-9)]),
    "shared words": Timeline("one", "cpu", [Block("a", 0, 0.25, 0.5, "m", "w", "l"), Block("a", 1, 0.0, 0.0)]),
}


@pytest.mark.parametrize("name", ["traced", *TIMELINES])
def test_a_timeline_survives_its_file(name, trace, tmp_path):
    timeline = TIMELINES.get(name, trace.timeline)
    first, second = tmp_path / "a.json.gz", tmp_path / "b.json.gz"
    timeline.save(first)
    loaded = Timeline.load(first)
    assert loaded == timeline
    loaded.save(second)
    assert first.read_bytes() == second.read_bytes()


CHANGES = {
    "newer version": lambda d: {**d, "version": d["version"] + 1},
    "another format": lambda d: {**d, "format": "another"},
    "no words": lambda d: {key: value for key, value in d.items() if key != "words"},
    "too few words": lambda d: {**d, "words": []},
    "a column too short": lambda d: {**d, "blocks": {**d["blocks"], "size": d["blocks"]["size"][:-1]}},
    "a phase without times": lambda d: {**d, "phases": [["forward"]]},
    "version is text": lambda d: {**d, "version": "one"},
    "a list": lambda d: [d],
    "null": lambda d: None,
    "a trace": lambda d: {"traceEvents": []},
}
CONTENTS = {
    **{f"cut at {share}": lambda data, share=share: data[: int(len(data) * share)] for share in (0, 0.01, 0.5, 0.99)},
    "JSON": lambda data: b"{}",
    "PNG": lambda data: b"\x89PNG\r\n\x1a\n",
    "gzip header": lambda data: b"\x1f\x8b\x08\x00",
    "gzip of something else": lambda data: gzip.compress(b"\xff\xfe", mtime=0),
}


@pytest.mark.parametrize("name", ["missing", "folder", *CHANGES, *CONTENTS])
def test_an_unreadable_timeline_is_a_user_error(name, tmp_path):
    path = tmp_path / "timeline.json.gz"
    TIMELINES["shared words"].save(path)
    data = path.read_bytes()
    path.unlink()
    if name == "folder":
        path.mkdir()
    elif name in CHANGES:
        path.write_bytes(gzip.compress(json.dumps(CHANGES[name](json.loads(gzip.decompress(data)))).encode()))
    elif name in CONTENTS:
        path.write_bytes(CONTENTS[name](data))
    with refused("newer" if name == "newer version" else path.name):
        Timeline.load(path)


# -- tensors saved for backward ---------------------------------------------------------------------------------------


def saved_by_hooks(step, batch):
    """Return the bytes of every storage that autograd saves: of parameters, and of others."""
    storages = {}
    tensors = []  # keeps them allocated, so that no address is reused

    def pack(tensor):
        tensors.append(tensor)
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = step.loss(step.logits(batch[0]), batch[1])
    del loss
    own = {p.untyped_storage().data_ptr() for p in step.model.parameters()}
    parameters = sum(size for key, size in storages.items() if key in own)
    return parameters, sum(storages.values()) - parameters


def totals(found):
    return (
        sum(item.size for item in found if item.is_parameter),
        sum(item.size for item in found if not item.is_parameter),
    )


@pytest.mark.parametrize(
    "fields",
    [{}, {"attention": "sdpa"}, {"attention": "flash_torch"}, {"precision": "bf16"}, {"mode": "forward-backward"}],
    ids=str,
)
def test_saved_bytes_equal_those_of_the_hooks(fields):
    step, batch = steady(**fields)
    assert totals(saved_tensors(step, batch)) == saved_by_hooks(step, batch)


def test_reference_attention_saves_the_score_matrix():
    found = saved_tensors(*steady())
    scores = [item for item in found if item.size == SCORE_BYTES]
    assert sorted(item.module for item in scores) == ["layers.0.attn", "layers.1.attn"]
    for item in scores:
        assert not item.is_parameter
        assert "reference.py:" in item.line
        assert "float32" in item.what
        assert str(SMALL.context_length) in item.what
    sizes = [item.size for item in found]
    assert max(sizes) == SCORE_BYTES
    assert all(size > 0 for size in sizes)


@pytest.mark.parametrize("attention", ["sdpa", "flash_torch"])
def test_fused_attentions_do_not_save_scores(attention):
    found = saved_tensors(*steady(attention=attention))
    assert max(item.size for item in found) < SCORE_BYTES / 2
    assert any(item.module.endswith("attn") for item in found)


def test_saved_parameters_are_marked():
    step, batch = steady()
    before = [p.detach().clone() for p in step.model.parameters()]
    saved = Counter(item.size for item in saved_tensors(step, batch) if item.is_parameter)
    weights = Counter(p.nbytes for p in step.model.parameters() if p.dim() == 2)
    weights[step.model.token_embeddings.weight.nbytes] -= 1  # a lookup saves its indices, not the table
    assert all(saved[size] == count for size, count in weights.items() if count)
    assert sum(saved.values()) == len(before) - 1
    assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))


def test_checkpointing_saves_the_inputs_of_blocks():
    """Each layer saves one residual tensor."""
    residual = 4 * BATCH * SMALL.context_length * SMALL.d_model
    kept = {}
    for layers in (2, 6):
        shape = dataclasses.replace(SMALL, num_layers=layers)
        config = RunConfig(model=shape, batch_size=BATCH, checkpoint_blocks=1, mode="forward-backward")
        _, kept[layers] = totals(saved_tensors(*steady(config)))
    per_layer = (kept[6] - kept[2]) / 4
    assert residual <= per_layer <= 1.05 * residual
    _, everything = totals(saved_tensors(*steady()))
    assert kept[2] < everything / 3


def test_inference_is_refused():
    with refused("inference"):
        saved_tensors(*steady(mode="inference"))


# -- nested recomputation ---------------------------------------------------------------------------------------------

DEEP = ModelConfig(vocab_size=32, context_length=32, d_model=16, num_layers=8, num_heads=2, d_ff=32)
SCORES_OF_DEEP = 4 * 4 * DEEP.num_heads * DEEP.context_length**2


def deep_step(group, inner):
    step = TrainStep.build(RunConfig(model=DEEP, mode="forward-backward", checkpoint_blocks=group))
    step.model.checkpoint_inner = inner
    return step, step.random_batch()


@functools.cache
def peak(group, inner):
    return measure_peak(*deep_step(group, inner))


@pytest.mark.parametrize(("group", "inner"), [(8, 2), (4, 1)])
def test_nested_recomputation_takes_less_memory(group, inner):
    assert peak(group, inner) < peak(group, 0) < peak(0, 0)


@pytest.mark.parametrize(("group", "inner", "times"), [(0, 0, 1), (4, 0, 2), (4, 1, 3)])
def test_number_of_recomputations(group, inner, times):
    """Flat: forward and once more. Nested: forward, for the inner inputs, and for the block itself."""
    step, batch = deep_step(group, inner)
    calls = Counter()
    for index, block in enumerate(step.model.layers):
        block.register_forward_pre_hook(lambda *_, index=index: calls.update([index]))
    step(*batch)
    assert max(calls.values()) == times
    assert set(calls) == set(range(DEEP.num_layers))


@pytest.mark.parametrize(("group", "inner"), [(8, 0), (8, 2)])
def test_nested_recomputation_is_predicted(group, inner):
    def prepare(step):
        step.model.checkpoint_inner = inner

    config = RunConfig(model=DEEP, mode="forward-backward", checkpoint_blocks=group)
    assert predict_by_tracing(config, prepare).peak == pytest.approx(peak(group, inner), rel=1e-3)


def test_nested_recomputation_is_traced():
    """Each time a block runs, its scores are activations of its own attention."""
    step, batch = deep_step(8, 2)
    found = trace_memory(step, batch)
    assert_consistent(found, peak(8, 2))
    scores = [b for b in found.timeline.blocks if b.size == SCORES_OF_DEEP and "softmax" in b.what]
    forward = [block for block in scores if "backward" not in block.what]
    assert {block.label for block in forward} == {"activations"}
    runs = Counter(block.module for block in forward)
    assert set(runs) == {f"layers.{i}.attn" for i in range(DEEP.num_layers)}
    assert max(runs.values()) == 3


# -- one block --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_gradients_of_a_block_follow_from_the_change_over_its_backward(attention):
    """Its backward frees what it has saved and adds its gradients, and nothing else is left."""
    step, batch = steady(attention=attention)
    number = len(step.model.layers) - 1
    saved = [one for one in saved_tensors(step, batch) if one.module.startswith(f"layers.{number}")]
    kept = sum(one.size for one in saved if not one.is_parameter)
    block = step.model.layers[number]
    change, gradients = block_backward(step, batch, block)
    assert gradients == sum(parameter.nbytes for parameter in block.parameters())
    assert change + kept == gradients
    assert all(parameter.grad is None for parameter in step.model.parameters())


def test_saved_tensors_name_the_operation():
    saved = saved_tensors(*steady())
    operations = {(one.operation, one.module) for one in saved if one.module.startswith("layers.0")}
    assert {("softmax", "layers.0.attn"), ("silu", "layers.0.ffn"), ("rms_norm", "layers.0.ln1")} <= operations
