"""Rehearsals: bytes of a rank as traced against bytes as counted by shapes and as planned; mistakes are named."""

import dataclasses
import re
from functools import cache

import pytest
import torch

from cs336_systems.cli import main
from cs336_systems.config import ModelConfig, RunConfig, UserError
from cs336_systems.experiments.ranks.plan_cells import PlanArguments, peak_on_engine, plan_config, plans
from cs336_systems.experiments.ranks.rehearsal_command import (
    RehearseArguments,
    Rehearsed,
    _time_table,
    mesh_plan,
    predicted_compute,
    rehearsal_tables,
    verdict,
)
from cs336_systems.measure import rehearsal
from cs336_systems.predict.engine_memory import engine_estimate
from cs336_systems.predict.memory_model import estimate
from cs336_systems.predict.rank_shards import Mesh, elements
from cs336_systems.record import GIB
from tests.helpers import assert_refused

SHAPE = {"vocab_size": 96, "context_length": 16, "d_model": 32, "num_layers": 1, "num_heads": 4, "d_ff": 48}
MODEL = ModelConfig(**SHAPE)
NORMS = (2 * MODEL.num_layers + 1) * MODEL.d_model


@cache
def traced(mesh: Mesh, rank: int) -> rehearsal.Rehearsal:
    run = RunConfig(model=MODEL, batch_size=1, device="cuda", attention="auto")
    return rehearsal.rehearse(run, mesh, rank, on_gpu=False)


def planned(mesh: Mesh):
    axes = {name: size for name, size in mesh._asdict().items() if name != "pp"}
    return mesh_plan(RehearseArguments(gpus=mesh.gpus, **axes, **SHAPE, precision="fp32"))


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(dp_shard=4),
        Mesh(tp=4),
        Mesh(dp_shard=4, tp=2),
        Mesh(dp_replicate=2, dp_shard=2, tp=2),
        Mesh(dp_shard=2, cp=2),
    ],
    ids=str,
)
def test_bytes_of_a_rank_are_those_of_the_plan(mesh):
    """All rows divide, so every rank holds the mean. Two rules of torch differ: fully_shard shards the norms, which
    plan counts as whole, and tensor parallelism alone keeps the embedding's gradient whole."""
    found, plan = traced(mesh, mesh.gpus - 1), planned(mesh)
    shards = mesh.of_weights.dp_shard
    sharded_norms = 4 * NORMS * (shards - 1) // shards
    whole_embedding = 4 * MODEL.vocab_size * MODEL.d_model * (mesh.tp - 1) // mesh.tp if shards == 1 else 0
    assert found.parameters == plan.memory["parameter"] - sharded_norms
    assert found.gradients == plan.memory["gradient"] - sharded_norms + whole_embedding
    assert found.optimizer == plan.memory["optimizer"] - 2 * sharded_norms


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp_replicate=4), Mesh(dp_shard=4), Mesh(tp=4)], ids=str)
def test_tied_weights_are_one_tensor(mesh):
    """Weights that are built on the meta device get their memory module by module, and are tied again after it."""
    model = dataclasses.replace(MODEL, tied_embeddings=True, num_layers=2)
    run = RunConfig(model=model, batch_size=1, device="cuda", attention="auto")
    found = rehearsal.rehearse(run, mesh, 0, on_gpu=False)
    assert found.parameters == 4 * elements(model, mesh, 0)
    assert found.optimizer == 2 * found.parameters
    assert found.peak == pytest.approx(engine_estimate(run, mesh).peak, rel=0.01)


def test_rows_that_do_not_divide_are_rounded_up_on_the_first_ranks():
    mesh = Mesh(dp_shard=7, tp=2)
    sizes = {rank: traced(mesh, rank).parameters for rank in (0, 13)}
    assert sizes == {rank: 4 * elements(MODEL, mesh, rank) for rank in sizes}
    assert sizes[0] > sizes[13]
    every = sum(elements(MODEL, mesh, rank) for rank in range(mesh.gpus))
    assert every == MODEL.parameters + NORMS, "each weight once, and the norms on both ranks of a pair"


def test_a_mesh_of_one_has_the_peak_of_the_plain_step():
    run = RunConfig(model=MODEL, batch_size=1, device="cuda", attention="auto", checkpoint_blocks=1, precision="bf16")
    found = rehearsal.rehearse(run, Mesh(), 0, on_gpu=False)
    assert found.peak == pytest.approx(estimate(run).peak, rel=1e-3)
    assert sum(found.parts.values()) == found.peak


def test_more_shards_need_less():
    few, many = traced(Mesh(dp_shard=4), 3), traced(Mesh(dp_shard=7, tp=2), 13)
    assert many.peak < few.peak
    assert many.parts["optimizer state"] < few.parts["optimizer state"]


def test_real_tensors_are_measured_as_traced_ones(monkeypatch):
    """The path of a GPU, on tensors of a CPU: steps run and are timed, and the bytes are those of the trace."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 7)
    run = RunConfig(model=MODEL, batch_size=1, device="cpu", attention="auto", num_steps=1)
    mesh = Mesh(dp_shard=4, tp=2)
    found = rehearsal.rehearse(run, mesh, 7, on_gpu=True)
    expected = traced(mesh, 7)
    assert (found.parameters, found.gradients, found.optimizer) == (
        expected.parameters,
        expected.gradients,
        expected.optimizer,
    )
    assert found.peak == 7
    assert found.seconds is not None
    plan = planned(mesh)
    axes = {name: size for name, size in mesh._asdict().items() if name != "pp"}
    arguments = RehearseArguments(gpus=mesh.gpus, **axes, **SHAPE, precision="fp32")
    rows = [float(row[1].replace(",", "")) for row in _time_table(arguments, Rehearsed(found, plan, None)).rows]
    at_peak = 1e3 * (plan.compute("forward") + plan.compute("backward"))
    wire, compute = 1e3 * plan.exposed - at_peak, 1e3 * found.seconds
    waiting = 1e3 * (plan.waiting("forward") + plan.waiting("backward"))
    overlapped = waiting + max(compute, wire - waiting)
    assert rows == pytest.approx([compute, at_peak, wire, overlapped, compute + wire], abs=0.1)


def test_context_parallel_splits_the_activations():
    """A group of two processes two sequences, half of each on a rank."""
    model = dataclasses.replace(MODEL, context_length=512)
    run = RunConfig(model=model, batch_size=1, device="cuda", attention="auto")
    whole = rehearsal.rehearse(dataclasses.replace(run, batch_size=2), Mesh(dp_shard=2), 1, on_gpu=False)
    half = rehearsal.rehearse(run, Mesh(cp=2), 1, on_gpu=False)
    assert half.parts["activations"] < 0.55 * whole.parts["activations"]
    assert half.parameters == whole.parameters


def test_logits_stay_split():
    """With loss_parallel no rank has logits of the whole vocabulary: logits, their fp32 copy and log-softmax here are
    as large as one tensor of them."""
    model = dataclasses.replace(MODEL, vocab_size=8192, num_layers=1)
    run = RunConfig(model=model, batch_size=1, device="cuda", attention="auto")
    found = rehearsal.rehearse(run, Mesh(dp_shard=2, tp=4), 3, on_gpu=False)
    whole = 4 * model.context_length * model.vocab_size * 4
    assert 0 < found.parts["logits and loss"] < whole


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gpus": 8, "dp_shard": 2, "tp": 2}, "= 4 GPUs, but --gpus is 8"),
        ({"gpus": 4, "dp_shard": 4, "rank": 4}, "--rank 4 is outside of the 4 ranks"),
        ({"gpus": 4, "dp_shard": 4, "rank": -1}, "--rank -1"),
        ({"gpus": 0, "dp_shard": 0}, "--dp_shard must be at least 1"),
        ({"gpus": 3, "tp": 3}, "--tp 3 does not divide --num_heads 4"),
        ({"gpus": 4, "cp": 4, "context_length": 20}, "--context_length 20 .*--cp 4 x --tp 1 = 8"),
        ({"gpus": 1, "fast": "on"}, "--fast"),
        ({"gpus": 1_000_000, "dp_shard": 1_000_000}, "--gpus 1,000,000 .* at most 65,536; use cs336 plan"),
        ({"gpus": 60_000, "dp_shard": 60_000, "num_layers": 20}, "--dp_shard x --cp 60,000 .* at most 16,393"),
    ],
    ids=str,
)
def test_mistakes_are_named(wrong, message):
    with pytest.raises(UserError, match=message):
        rehearsal_tables(RehearseArguments(**{**SHAPE, **wrong}))


def test_a_torch_without_the_fake_group(monkeypatch):
    monkeypatch.setattr(rehearsal, "FAKE_GROUP", "torch.moved.fake_pg")
    with pytest.raises(UserError, match=r"torch\.moved\.fake_pg\.FakeStore"):
        rehearsal_tables(RehearseArguments(gpus=2, dp_shard=2, **SHAPE))


def test_the_command_prints_both_counts(capsys):
    flags = [word for name, value in SHAPE.items() for word in (f"--{name}", str(value))]
    assert main(["rehearse", "--gpus", "4", "--dp_shard", "4", "--trace", "--rank", "3", *flags]) == 0
    shown = capsys.readouterr().out
    assert "rank 3 of 4 GPUs" in shown
    for text in ("parts of the traced peak", "communication (predicted)", "step without overlap"):
        assert text in shown
    assert "the launches of the host bound this step" in shown


def test_compute_is_predicted_for_the_gpu():
    """Beside the time at the peak rate, and the measured one if there is one; ranks of tp wait for communication."""
    arguments = RehearseArguments(
        gpus=16, dp_shard=2, tp=8, size="2.7B", batch_size=4, context_length=2048, vocab_size=32_000, gpu="h200"
    )
    plan = mesh_plan(arguments)
    nothing = rehearsal.Rehearsal(0, 0, 0, 0, {}, None)

    def rows(found):
        table = _time_table(arguments, Rehearsed(found, plan, None))
        return {str(name): float(time.replace(",", "")) for name, time in table.plain().rows}

    traced, measured = rows(nothing), rows(dataclasses.replace(nothing, seconds=0.5))
    predicted = 1e3 * predicted_compute(arguments)
    assert traced["compute (predicted for H200)"] == pytest.approx(predicted, abs=0.1)
    assert 1.3 < predicted / traced["compute (at the GPU's peak rate)"] < 3
    waiting = 1e3 * sum(map(plan.waiting, ("forward", "backward")))
    assert traced["step with overlap"] == pytest.approx(waiting + predicted, abs=0.2)
    assert measured["compute (measured)"] == 500.0
    assert measured["step with overlap"] == pytest.approx(waiting + 500, abs=0.2)
    assert predicted_compute(dataclasses.replace(arguments, gpu="80GiB", tflops=900.0)) is None


def test_the_verdict_names_what_is_spare_and_what_is_lacking():
    arguments = RehearseArguments(gpus=2, dp_shard=2, trace=True, gpu="4090", **SHAPE)
    notes = [note.en for note in rehearsal_tables(arguments)[0].notes]
    assert notes[0] == "fits on RTX 4090: needs 0.1 of 22.5 GiB usable (22.4 GiB to spare)"
    assert verdict(24 * GIB, 22 * GIB, "24GiB").en == (
        "does not fit on 24GiB: needs 24.0 GiB and 22.0 GiB are usable (2.0 GiB are lacking)"
    )


def test_parts_that_differ_from_the_plan_are_remarked_on():
    """The plan counts norms as whole, which are much of this model; those of a mesh of one do not differ."""

    def remarks(**axes):
        (memory, *_) = rehearsal_tables(RehearseArguments(trace=True, precision="fp32", **axes, **SHAPE))
        return [note.en for note in memory.notes if note.en.startswith("differs")]

    (remark,) = remarks(gpus=4, tp=4)
    whole = 4 * MODEL.vocab_size * MODEL.d_model * 3 // 4
    share = whole / planned(Mesh(tp=4)).memory["gradient"]
    assert remark == f"differs from the plan by more than 1%: gradients +{100 * share:.1f}%"
    assert remarks(gpus=1) == []


def test_the_peak_is_beside_its_prediction():
    """The models of these tests are smaller than the workspaces, which both columns have; columns have two decimals."""
    shape = {**SHAPE, "num_layers": 2}
    memory = rehearsal_tables(RehearseArguments(gpus=4, dp_shard=2, tp=2, trace=True, **shape))[0]
    found, predicted = (float(cell.replace(",", "")) for cell in memory.rows[-1][1:])
    assert predicted - 64 == pytest.approx(found - 64, rel=0.02)


def test_one_of_several_micro_batches_is_rehearsed(capsys):
    """One sequence on two GPUs that share it. The plan has the same peak, with gradients of earlier micro batches."""
    words = ["--size", "tiny", "--context_length", "256", "--gpus", "4", "--checkpoint_blocks", "0"]
    assert main(["rehearse", *words, "--dp_shard", "2", "--cp", "2", "--micro_batches", "2", "--trace"]) == 0
    printed = capsys.readouterr().out
    assert "later micro batches have a peak that is" in printed
    assert "a step with one of its 2 micro batches" in printed
    shape = {"size": "tiny", "context_length": 256, "gpus": 4, "checkpoint_blocks": 0}
    config = plan_config(PlanArguments(**shape, strategy=("zero3+cp2",)))
    (plan,) = plans(config)
    needed = float(re.search(r"needs ([\d.]+) of", printed)[1])
    assert plan.micro_batches == 2
    assert needed == pytest.approx(peak_on_engine(config, plan) / GIB, abs=0.06)
    whole = main(["rehearse", *words, "--dp_shard", "2", "--cp", "2", "--trace"])
    assert (whole, "later micro batches" in capsys.readouterr().out) == (0, False)


def test_micro_batches_must_divide_the_sequences(elsewhere, capfd):
    words = ["rehearse", "--size", "tiny", "--gpus", "4", "--cp", "4", "--trace", "--micro_batches"]
    assert_refused([*words, "3"], ["--micro_batches 3 does not divide the 4 sequences of --cp x --tp GPUs"], capfd)
    assert_refused([*words, "0"], ["--micro_batches must be at least 1, got 0"], capfd)
