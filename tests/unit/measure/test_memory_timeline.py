"""Memory of a step, block by block: the followed step, its file, what forward keeps, and nested recomputation.

Sizes are worked out here from the shapes, or counted once more by other means (autograd's own hooks).
"""

import dataclasses
import functools
import gzip
import json
import re
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from cs336_systems.config import MODES, ModelConfig, RunConfig, UserError
from cs336_systems.measure.memory_timeline import trace_memory
from cs336_systems.measure.memory_trace import measure_peak, predict_by_tracing
from cs336_systems.measure.saved_tensors import saved_tensors
from cs336_systems.step.train_step import TrainStep
from cs336_systems.timeline import Block, Span, Timeline
from tests.helpers import MODEL

SMALL = ModelConfig(vocab_size=96, context_length=64, d_model=32, num_layers=2, num_heads=4, d_ff=64)
BATCH = 2
SCORE_BYTES = BATCH * SMALL.num_heads * SMALL.context_length**2 * 4
"""Larger than any other tensor of this model, so it cannot be mistaken."""
LINE = re.compile(r"[\w./-]+\.py:\d+ in \S+")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """On a busy machine two threads spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def steady(config=None, **fields):
    """A step that has run once: the first makes the optimizer's state."""
    step = TrainStep.build(config or RunConfig(model=SMALL, batch_size=BATCH, **fields))
    batch = step.random_batch()
    step(*batch)
    return step, batch


@pytest.fixture(scope="module")
def trained():
    step, batch = steady()
    return step, trace_memory(step, batch), measure_peak(step, batch)


@pytest.fixture(scope="module")
def trace(trained):
    return trained[1]


def in_phase(timeline, name):
    """The middle of a phase is any time in it; here its begin and end."""
    [span] = [span for span in timeline.phases if span.name == name]
    return span


def assert_consistent(found, measured):
    assert found.peak == measured
    assert sum(found.parts.values()) == found.peak
    assert all(size > 0 for size in found.parts.values())
    when, most = found.timeline.peak()
    assert most == found.peak
    assert found.timeline.parts_at(when) == found.parts


# -- a followed step --------------------------------------------------------------------------------------------------


def test_parts_add_up_to_the_measured_peak(trained):
    _, found, measured = trained
    assert_consistent(found, measured)


@pytest.mark.parametrize(
    "fields",
    [
        *({"mode": mode} for mode in MODES[:3]),
        {"precision": "bf16"},
        {"precision": "bf16", "mode": "inference"},
        {"attention": "sdpa"},
        {"attention": "flash_torch"},
        {"checkpoint_blocks": 1},
        {"checkpoint_blocks": 2, "attention": "sdpa"},
        {"max_grad_norm": 1.0},
    ],
    ids=str,
)
def test_parts_add_up_in_every_kind_of_step(fields):
    step, batch = steady(**fields)
    found = trace_memory(step, batch)
    assert_consistent(found, measure_peak(step, batch))
    assert found.parts["parameters"] == 4 * SMALL.parameters


def test_what_the_optimizer_and_the_gradients_take(trained):
    """fp32: 4 bytes a parameter, 4 of its gradient, 8 of AdamW's moments; beyond that AdamW counts its steps."""
    step, found, _ = trained
    tensors = len(list(step.model.parameters()))
    backward, optimizer = in_phase(found.timeline, "backward"), in_phase(found.timeline, "optimizer")
    parts = found.timeline.parts_at((backward.end + optimizer.start) / 2)
    assert parts["parameters"] == 4 * SMALL.parameters
    assert parts["gradients"] == 4 * SMALL.parameters
    assert 8 * SMALL.parameters <= parts["optimizer state"] <= 8 * SMALL.parameters + 8 * tensors
    assert parts.get("activations", 0) == 0
    after = found.timeline.parts_at(found.timeline.end + 1)
    assert after.get("gradients", 0) == 0  # dropped by the step


def test_gradients_grow_in_backward_and_activations_shrink(trace):
    span = in_phase(trace.timeline, "backward")
    times = [span.start + (span.end - span.start) * i / 10 for i in range(11)]
    parts = [trace.timeline.parts_at(time) for time in times]
    gradients, activations = ([p.get(name, 0) for p in parts] for name in ("gradients", "activations"))
    assert gradients == sorted(gradients)
    assert activations == sorted(activations, reverse=True)
    assert gradients[0] == 0 < gradients[-1]
    assert activations[0] >= 2 * SCORE_BYTES


def test_logits_and_loss(trace):
    """Logits, their log-softmax and its gradient: all of one size, none an activation."""
    size = 4 * BATCH * SMALL.context_length * SMALL.vocab_size
    found = [block for block in trace.timeline.blocks if block.label == "logits and loss" and block.size == size]
    assert len(found) >= 2
    assert any(block.module == "lm_head" for block in found)
    loss = in_phase(trace.timeline, "loss")
    assert trace.timeline.parts_at(loss.end)["logits and loss"] >= size
    assert not [b for b in trace.timeline.blocks if b.label == "activations" and b.module == "lm_head"]


def test_the_score_matrix_is_found_where_it_was_made(trace):
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


def test_activations_name_their_module_and_line(trained):
    step, found, _ = trained
    modules = dict(step.model.named_modules())
    span = in_phase(found.timeline, "forward")
    made = [b for b in found.timeline.blocks if b.label == "activations" and span.start <= b.start <= span.end]
    assert {block.module for block in made} <= set(modules)
    for expected in ("layers.0.attn", "layers.1.ffn", "layers.0.ffn.w1", "layers.1.attn.q_proj", "ln_final"):
        assert expected in {block.module for block in made}
    assert all(block.what and ".py:" in block.line for block in made)
    w1 = 4 * BATCH * SMALL.context_length * SMALL.d_ff
    [block] = [b for b in made if b.module == "layers.0.ffn.w1" and b.size == w1]
    assert "model.py" in block.line or "linear.py" in block.line
    assert str(SMALL.d_ff) in block.what


def test_what_was_there_before_is_there_all_the_time(trained):
    step, found, _ = trained
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
    assert trace.phase in [span.name for span in spans]
    when, _ = trace.timeline.peak()
    [peak_phase] = [span.name for span in spans if span.start <= when <= span.end]
    assert trace.phase == peak_phase


def test_the_largest_blocks(trace):
    """Of those made in the step, the largest first: what to look at when memory is short."""
    sizes = [block.size for block in trace.largest]
    made = sorted((block.size for block in trace.timeline.blocks if block.start > 0), reverse=True)
    assert sizes == made[: len(sizes)]
    assert sizes[0] == SCORE_BYTES
    assert set(trace.largest) <= set(trace.timeline.blocks)


def test_recomputed_activations_are_activations():
    """Checkpointed: scores are made in forward and dropped, then again in backward and used."""
    step, batch = steady(checkpoint_blocks=1)
    found = trace_memory(step, batch)
    backward = in_phase(found.timeline, "backward")
    again = [
        block
        for block in found.timeline.blocks
        if block.size == SCORE_BYTES and block.start >= backward.start and "reference.py" in block.line
    ]
    assert {block.label for block in again if "backward" not in block.what} == {"activations"}
    assert {block.module for block in again if block.label == "activations"} == {"layers.0.attn", "layers.1.attn"}
    at_turn = found.timeline.parts_at(backward.start)
    assert at_turn["activations"] < SCORE_BYTES * 2
    assert found.timeline.parts_at(backward.end).get("activations", 0) == 0


@pytest.mark.parametrize("fields", [{}, {"checkpoint_blocks": 1}, {"precision": "bf16"}], ids=str)
def test_inference_leaves_nothing(fields):
    step, batch = steady(mode="inference", **fields)
    found = trace_memory(step, batch)
    left = Counter()
    for block in found.timeline.blocks:
        if block.end is None:
            left[block.label] += block.size
    assert left["activations"] == 0
    assert left["logits and loss"] == 0
    assert left["parameters"] == 4 * SMALL.parameters
    assert [span.name for span in found.timeline.phases] == ["forward"]
    made = [block for block in found.timeline.blocks if block.size == SCORE_BYTES]
    assert made  # they were there
    assert all(block.end is not None for block in made if block.label != "parameters")
    # Without a graph one layer's scores are gone before those of the next are made.
    assert found.peak < measure_peak(*steady(mode="forward"))


def test_following_a_step_changes_nothing_of_it():
    step, batch = steady()
    twin, _ = steady()
    trace_memory(step, batch)
    twin(*batch)
    assert all(torch.equal(a, b) for a, b in zip(step.model.parameters(), twin.model.parameters(), strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in step.model.modules())
    assert trace_memory(step, batch).peak == measure_peak(step, batch)  # and it can be followed again


def test_a_step_that_failed_can_be_followed_again(monkeypatch):
    """Out of memory in the middle of a step must not leave hooks or a patched torch behind."""

    def fail(x):
        raise RuntimeError("out of luck")

    step, batch = steady()
    with monkeypatch.context() as patch:
        patch.setattr(step.model.ln_final, "forward", fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            trace_memory(step, batch)
    found = trace_memory(step, batch)
    assert_consistent(found, measure_peak(step, batch))
    assert {"layers.0.attn", "layers.1.attn"} <= {block.module for block in found.timeline.blocks}


def test_a_users_own_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "followed_model.py").write_text(MODEL)
    step, batch = steady(model_factory="followed_model:build")
    found = trace_memory(step, batch)
    assert_consistent(found, measure_peak(step, batch))
    d, vocab = SMALL.d_model, SMALL.vocab_size
    assert found.parts["parameters"] == 4 * (vocab * d + d * d + d + d * vocab + vocab)
    made = {b.module: b for b in found.timeline.blocks if b.label == "activations" and b.line}
    assert {"embed", "mix"} <= set(made)
    assert "head" not in made
    assert "followed_model.py:" in "".join(block.line for block in found.timeline.blocks)


# -- its file ---------------------------------------------------------------------------------------------------------


def test_a_followed_step_is_saved_and_loaded(trace, tmp_path):
    first, second = tmp_path / "a.json.gz", tmp_path / "b.json.gz"
    trace.timeline.save(first)
    loaded = Timeline.load(first)
    assert loaded == trace.timeline
    loaded.save(second)
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    "timeline",
    [
        Timeline("nothing", "cpu", []),
        Timeline("标题 \"quoted\"", "cpu", [Block("活动", 2**40, 0.0, None, "", "", "")], [Span("forward", 0.0, 1e-9)]),
        Timeline("one", "cpu", [Block("a", 0, 0.25, 0.5, "m", "w", "l"), Block("a", 1, 0.0, 0.0)]),
    ],
    ids=["empty", "unicode", "shared words"],
)  # fmt: skip
def test_any_timeline_is_saved_and_loaded(timeline, tmp_path):
    timeline.save(tmp_path / "t.json.gz")
    assert Timeline.load(tmp_path / "t.json.gz") == timeline


def refused(path):
    with pytest.raises(UserError) as caught:
        Timeline.load(path)
    message = str(caught.value)
    assert path.name in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.99])
def test_truncated_timelines(share, trace, tmp_path):
    path = tmp_path / "cut.json.gz"
    trace.timeline.save(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    refused(path)


def test_a_missing_timeline_and_a_folder(tmp_path):
    refused(tmp_path / "absent.json.gz")
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder")


def document_of(trace, path):
    trace.timeline.save(path)
    return json.loads(gzip.decompress(path.read_bytes()))


def test_a_timeline_of_a_newer_version(trace, tmp_path):
    path = tmp_path / "newer.json.gz"
    document = document_of(trace, path)
    path.write_bytes(gzip.compress(json.dumps({**document, "version": document["version"] + 1}).encode()))
    assert "newer" in refused(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: {**d, "format": "another"},
        lambda d: {key: value for key, value in d.items() if key != "words"},
        lambda d: {**d, "words": []},
        lambda d: {**d, "blocks": {**d["blocks"], "size": d["blocks"]["size"][:-1]}},
        lambda d: {**d, "phases": [["forward"]]},
        lambda d: {**d, "version": "one"},
        lambda d: [d],
        lambda d: "text",
        lambda d: None,
        lambda d: {"traceEvents": []},
    ],
    ids=range(10),
)
def test_foreign_documents(change, trace, tmp_path):
    path = tmp_path / "foreign.json.gz"
    document = document_of(trace, path)
    path.write_bytes(gzip.compress(json.dumps(change(document)).encode()))
    refused(path)


@pytest.mark.parametrize(
    "content",
    [b"{}", b"\x89PNG\r\n\x1a\n", b"\x1f\x8b\x08\x00", gzip.compress(b"\xff\xfe", mtime=0)],
    ids=["JSON", "PNG", "cut off", "gzip of something else"],
)
def test_foreign_files(content, tmp_path):
    (tmp_path / "other.bin").write_bytes(content)
    refused(tmp_path / "other.bin")


# -- what forward keeps for backward ----------------------------------------------------------------------------------


def kept_by_hooks(step, batch):
    """Bytes of every storage that autograd saves: of parameters, and others."""
    storages = {}
    tensors = []  # alive, so that no address is used twice

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
def test_saved_memory_is_that_of_the_hooks(fields):
    step, batch = steady(**fields)
    assert totals(saved_tensors(step, batch)) == kept_by_hooks(step, batch)


def test_the_reference_keeps_the_score_matrix():
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
def test_fused_attentions_do_not(attention):
    found = saved_tensors(*steady(attention=attention))
    assert max(item.size for item in found) < SCORE_BYTES / 2
    assert any(item.module.endswith("attn") for item in found)


def test_parameters_are_told_apart():
    step, batch = steady()
    weights = Counter(p.nbytes for p in step.model.parameters() if p.dim() == 2)
    found = saved_tensors(step, batch)
    saved = Counter(item.size for item in found if item.is_parameter)
    embedding = step.model.token_embeddings.weight.nbytes  # looked up: indices are kept, not the table
    weights[embedding] -= 1
    assert all(saved[size] == count for size, count in weights.items() if count)
    assert sum(saved.values()) == len(list(step.model.parameters())) - 1  # and the weights of the norms


def test_checkpointing_keeps_the_inputs_of_blocks():
    """One residual tensor more for each layer more, and nothing else."""
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


def test_inference_keeps_nothing_and_is_refused():
    with pytest.raises(UserError, match="inference") as caught:
        saved_tensors(*steady(mode="inference"))
    assert "\n" not in str(caught.value)


def test_looking_at_what_is_kept_changes_nothing():
    step, batch = steady()
    before = [p.detach().clone() for p in step.model.parameters()]
    first = saved_tensors(step, batch)
    assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))
    assert totals(saved_tensors(step, batch)) == totals(first)
    assert trace_memory(step, batch).peak == measure_peak(step, batch)


# -- recomputation inside recomputation -------------------------------------------------------------------------------

DEEP = ModelConfig(vocab_size=32, context_length=32, d_model=16, num_layers=8, num_heads=2, d_ff=32)
SCORES_OF_DEEP = 4 * 4 * DEEP.num_heads * DEEP.context_length**2


def deep_step(group, inner):
    step = TrainStep.build(RunConfig(model=DEEP, mode="forward-backward", checkpoint_blocks=group))
    step.model.checkpoint_inner = inner
    return step, step.random_batch()


@functools.cache
def gradients(group, inner):
    step, batch = deep_step(group, inner)
    loss = step(*batch)
    return [loss, *(p.grad for p in step.model.parameters())]


@functools.cache
def peak(group, inner):
    return measure_peak(*deep_step(group, inner))


@pytest.mark.parametrize(("group", "inner"), [(4, 0), (4, 1), (5, 2), (8, 3), (2, 7), (20, 4), (0, 3)])
def test_gradients_are_the_same_to_the_last_bit(group, inner):
    """Also where groups do not divide the layers, and where the inner group is the larger or stands alone."""
    assert all(torch.equal(a, b) for a, b in zip(gradients(0, 0), gradients(group, inner), strict=True))


@pytest.mark.parametrize(("group", "inner"), [(8, 2), (4, 1)])
def test_nested_recomputation_takes_less(group, inner):
    assert peak(group, inner) < peak(group, 0) < peak(0, 0)


def test_blocks_are_recomputed_as_often_as_asked():
    """Flat: forward and once more. Nested: forward, for the inner inputs, and for the block itself."""
    for group, inner, times in ((0, 0, 1), (4, 0, 2), (4, 1, 3)):
        step, batch = deep_step(group, inner)
        calls = Counter()
        for index, block in enumerate(step.model.layers):
            block.register_forward_pre_hook(lambda *_, index=index, calls=calls: calls.update([index]))
        step(*batch)
        assert max(calls.values()) == times, (group, inner)
        assert set(calls) == set(range(DEEP.num_layers))


@pytest.mark.parametrize(("group", "inner"), [(8, 0), (8, 2)])
def test_nested_recomputation_is_predicted(group, inner):
    seen = []

    def prepare(step):
        seen.append(step)
        step.model.checkpoint_inner = inner

    config = RunConfig(model=DEEP, mode="forward-backward", checkpoint_blocks=group)
    assert predict_by_tracing(config, prepare).peak == pytest.approx(peak(group, inner), rel=1e-3)
    [step] = seen
    assert isinstance(step, TrainStep)


def test_nested_recomputation_is_followed():
    """Each time a block runs, its scores are activations of its own attention."""
    step, batch = deep_step(8, 2)
    found = trace_memory(step, batch)
    assert_consistent(found, peak(8, 2))
    made = defaultdict(Counter)
    for block in found.timeline.blocks:
        if block.size == SCORES_OF_DEEP and "softmax" in block.what and "backward" not in block.what:
            made[block.label][block.module] += 1
    assert set(made) == {"activations"}
    assert set(made["activations"]) == {f"layers.{i}.attn" for i in range(DEEP.num_layers)}
    assert max(made["activations"].values()) == 3
