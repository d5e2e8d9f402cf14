"""Peak memory of the fast step and of building a model: predicted without torch, traced, and measured on an H200."""

import json
import re
from dataclasses import replace
from itertools import product

import pytest

from cs336_systems.config import FAST_PARTS, ModelConfig, RunConfig, model_config
from cs336_systems.kernels.fused import nodes, packed_adamw
from cs336_systems.measure.memory_trace import predict_by_tracing
from cs336_systems.predict import fast_memory, fast_nodes
from cs336_systems.predict.building_memory import building_peak
from cs336_systems.predict.memory_model import breakdown, estimate
from cs336_systems.predict.simulated_memory import Memory, Node, Repetitions, Tape
from cs336_systems.record import GIB, MIB
from tests.helpers import PACKAGE, ROOT

MODEL = ModelConfig(vocab_size=3000, context_length=128, d_model=192, num_layers=6, num_heads=3, d_ff=512)
GROUPED = replace(MODEL, num_layers=3)
"""Two groups of blocks, if a group has two."""
FLAT = replace(MODEL, num_layers=2)
UNALIGNED = ModelConfig(vocab_size=101, context_length=48, d_model=90, num_layers=2, num_heads=3, d_ff=250)


def on_gpu(model=MODEL, **fields):
    return RunConfig(model=model, device="cuda", **{"precision": "bf16", "attention": "auto", **fields})


TRACED = [
    on_gpu(fast="on"),
    on_gpu(GROUPED, fast="on", checkpoint_blocks=1),
    on_gpu(fast="on", checkpoint_blocks=4, attention="reference"),
    on_gpu(FLAT, fast="on", precision="fp32", attention="sdpa"),
    on_gpu(fast="on", model=UNALIGNED),
    on_gpu(FLAT, fast="on", optimizer_state="bf16"),
    on_gpu(FLAT, fast="on", update_in_backward=True),
    on_gpu(GROUPED, fast="on", update_in_backward=True, optimizer_state="bf16", checkpoint_blocks=1),
    on_gpu(fast="on", update_in_backward=True, model=UNALIGNED),
    on_gpu(FLAT, fast="optimizer", update_in_backward=True, precision="fp32"),
    on_gpu(GROUPED, fast="loss,optimizer", optimizer_state="bf16", checkpoint_blocks=1),
    on_gpu(FLAT, fast="kernels", attention="flash_triton"),
    on_gpu(GROUPED, fast="kernels", checkpoint_blocks=2, precision="tf32"),
    on_gpu(FLAT, fast="kernels,loss", mode="forward-backward", precision="fp16"),
    on_gpu(FLAT, fast="kernels", mode="forward", attention="reference"),
    on_gpu(FLAT, fast="kernels", mode="inference"),
    on_gpu(GROUPED, fast="loss", checkpoint_blocks=2),
    on_gpu(FLAT, fast="loss", precision="fp32", attention="reference"),
    on_gpu(FLAT, fast="optimizer", attention="reference"),
    on_gpu(FLAT, fast="kernels,optimizer", batch_size=16),
    on_gpu(fast="on", precision="fp8"),
    on_gpu(replace(FLAT, num_kv_heads=1, qkv_bias=True, tied_embeddings=True), fast="on", precision="fp8"),
    on_gpu(FLAT, fast="kernels,loss", precision="fp8", mode="forward-backward"),
    on_gpu(FLAT, fast="on", precision="fp8", optimizer_state="bf16", update_in_backward=True),
]


def name_of(config):
    fields = (config.fast, config.mode, config.precision, config.attention, config.checkpoint_blocks)
    return " ".join(map(str, fields))


@pytest.mark.parametrize("config", TRACED, ids=name_of)
def test_fast_step_agrees_with_the_trace(config):
    pytest.importorskip("triton")
    workspace = 64 * MIB if config.mode not in ("inference", "forward") else 32 * MIB
    assert estimate(config).peak - workspace == pytest.approx(predict_by_tracing(config).peak - workspace, rel=0.01)


def recorded_peaks():
    """Fast steps that an H200 has measured."""
    found = {}
    for line in (ROOT / "results/h200/records.jsonl").read_text().splitlines():
        if '"fast_step"' in line and '"peak_memory"' in line:
            record = json.loads(line)
            if record["config"].get("fast", "off") != "off" and record["status"] == "ok":
                found[RunConfig.of(record["config"])] = record["samples"][0]
    return found


def test_fast_steps_agree_with_an_h200():
    peaks = recorded_peaks()
    assert len(peaks) > 20
    errors = sorted(abs(estimate(config).peak / peak - 1) for config, peak in peaks.items())
    assert errors[-1] < 0.012
    assert errors[len(errors) // 2] < 0.001


@pytest.mark.parametrize("mode", ["inference", "forward", "forward-backward", "train-step"])
def test_parts_add_up_to_the_peak(mode):
    for parts, attention in product(("kernels", "loss", "kernels,loss"), ("auto", "reference")):
        found = estimate(on_gpu(fast=parts, mode=mode, attention=attention))
        assert sum(found.parts.values()) == found.peak
        assert all(size > 0 for size in found.parts.values())


def test_every_part_saves_memory():
    """At the sizes for which the fast step is made."""
    config = on_gpu(model_config("medium", vocab_size=50304), batch_size=8)
    plain = estimate(config).peak
    for part in FAST_PARTS[:3]:
        assert estimate(RunConfig(**{**vars(config), "fast": part})).peak < plain
    copies = 2 * config.tokens * 8  # of inputs and targets, which the graph reads
    assert estimate(RunConfig(**{**vars(config), "fast": "graph"})).peak == plain + copies


def test_breakdown_of_the_fast_step():
    full = breakdown(on_gpu(model_config("small"), fast="on"))
    parameters = model_config("small").parameters
    assert full.parameters == full.gradients == pytest.approx(2 * parameters, rel=0.001)
    assert full.optimizer_state == pytest.approx(10 * parameters, rel=0.001)
    assert full.weight_casts == 0
    narrow = breakdown(on_gpu(model_config("small"), fast="on", optimizer_state="bf16"))
    assert narrow.optimizer_state == pytest.approx(4 * parameters, rel=0.001)
    plain = breakdown(on_gpu(model_config("small")))
    assert full.activations_per_block < plain.activations_per_block
    assert full.logits_and_loss < plain.logits_and_loss


def test_constants_are_those_of_the_kernels():
    assert fast_memory.CHUNK_BYTES == nodes.CHUNK_BYTES
    assert fast_memory.LOGIT_ALIGNMENT == nodes.LOGIT_ALIGNMENT
    assert fast_nodes.PACK_ALIGNMENT == packed_adamw.ALIGNED
    source = (PACKAGE / "kernels/fused/pointwise_triton.py").read_text()  # importing it needs Triton
    for name in ("NORM_PROGRAMS", "MANY_ROWS"):
        assert int(re.search(rf"^{name} = (\d+)$", source, re.MULTILINE)[1]) == getattr(fast_nodes, name)


# -- building ---------------------------------------------------------------------------------------------------------


H200_BUILDING_GIB = {("medium", 10_000, "on"): 5.671, ("2.7B", 10_000, "off"): 12.816}


@pytest.mark.parametrize("cell", H200_BUILDING_GIB, ids=str)
def test_building_agrees_with_an_h200(cell):
    size, vocabulary, fast = cell
    found = building_peak(on_gpu(model_config(size, vocab_size=vocabulary), fast=fast))
    assert found.peak / GIB == pytest.approx(H200_BUILDING_GIB[cell], rel=0.002)
    assert sum(found.parts.values()) == found.peak


def test_eight_billion_parameters_are_built_on_one_h200():
    """Measured: 115.252 GiB, of which 9.27 are the largest weight in fp32 and what splits it."""
    model = ModelConfig(
        vocab_size=151_936, context_length=32_768, d_model=4096, num_layers=34, num_heads=32, d_ff=11_008
    )
    config = on_gpu(model, fast="on", batch_size=1, checkpoint_blocks=1)
    assert building_peak(config).peak / GIB == pytest.approx(115.252, rel=1e-4)
    assert building_peak(config).peak < estimate(config).peak


def test_an_update_in_backward_keeps_the_gradients_of_the_largest_group_only():
    """At 8 billion parameters those of the head: 1.2 GB instead of 16."""
    model = model_config("2026/10B", vocab_size=151_936)
    kept, shared = (on_gpu(model, fast="on", batch_size=1, update_in_backward=update) for update in (False, True))
    largest = 2 * model.vocab_size * model.d_model
    for found in (estimate(shared), building_peak(shared)):
        assert found.parts["gradients"] == pytest.approx(largest, rel=1e-3)
    for predict in (estimate, building_peak):
        assert predict(kept).peak - predict(shared).peak == pytest.approx(2 * model.parameters - largest, rel=0.01)


def test_building_a_bf16_state():
    """8 bytes a parameter, and the largest weight in fp32: it is rounded without temporaries."""
    model = model_config("small")
    found = building_peak(on_gpu(model, fast="on", optimizer_state="bf16"))
    gains = (2 * model.num_layers + 1) * model.d_model
    largest = model.vocab_size * model.d_model
    without_buffers = found.peak - found.parts["buffers"]
    assert without_buffers == 8 * (model.parameters - gains) + 16 * gains + 4 * largest


# -- the simulation ---------------------------------------------------------------------------------------------------


def test_a_block_is_freed_with_its_last_reference():
    memory = Memory(on_cuda=False)
    kept = memory.new("a", 100, 4)
    memory.new("b", 50, 2)
    assert (memory.total, memory.peak, memory.peak_parts) == (400, 500, {"a": 400, "b": 100})
    tape = Tape([Node(lambda block: None, (kept,))])
    del kept
    assert memory.total == 400
    tape.run_backward()
    assert memory.total == 0


@pytest.mark.parametrize("on_cuda", [False, True])
def test_extrapolated_repetitions_equal_simulated_ones(on_cuda):
    def run(repetitions):
        memory, held = Memory(on_cuda=on_cuda), []
        changes = repetitions.run(memory, lambda number: held.append(memory.new("a", 5 * MIB, 1)))
        return memory, held, changes

    whole, kept, none = run(Repetitions(40, 40, 0))
    some, held, changes = run(Repetitions(40, 5, 2))
    assert (len(kept), len(held), none) == (40, 7, [])
    assert changes[0].live["a"] == 5 * MIB
    assert some.live == whole.live
    assert some.peak == pytest.approx(whole.peak, rel=0.01)
