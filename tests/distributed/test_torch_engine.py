"""`cs336 train --engine torch` against one process: losses, norms, weights and moments on every mesh, and resuming."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from cs336_systems.config import ModelConfig
from cs336_systems.model import TransformerLM
from cs336_systems.parallel.collectives import local_part
from cs336_systems.parallel.launch import process_group
from cs336_systems.parallel.pipeline import stage_blocks
from cs336_systems.parallel.torch_engine import TorchEngine, whole
from cs336_systems.predict.rank_shards import Mesh
from cs336_systems.train.weights import export
from tests.distributed.compare import assert_close, everywhere, rank
from tests.distributed.train_cases import Outcome, Run, checkpoints, fields, perform_all, recorded, state_of, text_of

pytestmark = pytest.mark.xdist_group("ranks")

TOLERANCE = 1e-6
BASE = {"num_layers": 2, "steps": 4, "micro_batch_size": 1, "learning_rate": 1e-3, "max_grad_norm": 0.5}
BASE |= {"parallel": "ddp", "save_every": 2, "keep": 4, "eval_every": 4, "sample_tokens": 0}
ODD = {"vocab_size": 257}
PP = {"pp": 2, "dp_shard": 1}
FOUR = {"num_layers": 4}
INTERLEAVED = {"pp_schedule": "interleaved", **FOUR}
MESHES = {
    2: {
        "dp_replicate": {"dp_replicate": 2, "replay_every": 4},
        "dp_shard": {"dp_shard": 0, "checkpoint_blocks": 1, "replay_every": 4},
        "tp": {"tp": 2, "async_save": True, "replay_every": 4, "sample_tokens": 1},
        "dp_shard, odd vocabulary": {"dp_shard": 2, **ODD},
        "tp, odd vocabulary": {"tp": 2, **ODD},
        "pp": {"pp": 2, "async_save": True, "replay_every": 4, "sample_tokens": 1},
        "pp, odd vocabulary": {"pp": 2, "checkpoint_blocks": 1, **ODD},
        "pp interleaved, four blocks": {"pp": 2, **INTERLEAVED},
    },
    4: {
        "dp_replicate and dp_shard": {"dp_replicate": 2, "dp_shard": 2},
        "tp and dp_shard": {"tp": 2, "dp_shard": 2},
        "tp and dp_replicate": {"tp": 2, "dp_replicate": 2},
        "pp and dp_shard": {"pp": 2, "dp_shard": 2, "replay_every": 4},
        "pp interleaved and dp_shard, four blocks": {"pp": 2, "dp_shard": 2, **INTERLEAVED},
        "pp and tp": {"pp": 2, "tp": 2, "sample_tokens": 1},
        "pp and dp_replicate": {"pp": 2, "dp_replicate": 2},
    },
}
"""Flags by number of ranks. Two ranks accumulate the gradients of two micro batches or more, one accumulates four."""
RESUMED = {
    2: {
        "our fsdp from tp": ("tp", {"engine": "ours", "parallel": "fsdp"}),
        "tp from one process of ours": ("ours", {"engine": "torch", "tp": 2}),
        "our ddp from pp": ("pp", {"engine": "ours"}),
        "dp_shard from tp": ("tp, odd vocabulary", {"engine": "torch", "dp_shard": 2, **ODD}),
    },
    4: {
        "tp and dp_shard from dp_shard": ("dp_shard", {"engine": "torch", "tp": 2, "dp_shard": 2}),
        "our ddp from tp and dp_shard": ("tp and dp_shard", {"engine": "ours"}),
        "pp and tp from dp_shard": ("dp_shard", {"engine": "torch", "pp": 2, "tp": 2}),
    },
}
"""A run that continues from step 2 of another, with other flags."""
RESUMED_FROM = {name: origin for runs in RESUMED.values() for name, (origin, _) in runs.items()}
ON_ONE = {"ours": {}, "ours, odd vocabulary": ODD, "ours, four blocks": FOUR}
NAN, CORRUPT, BF16 = "nan in the first step on rank 1", "another gradient in forward 2 on rank 1", "bf16"
NAN_PP, BF16_PP = "nan in every step", "bf16, pp"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    (folder / "short.txt").write_bytes(text_of(600))
    return folder


def run_of(place: Path, name: str, ranks: int, flags: dict[str, Any], fault: str = "") -> Run:
    """Return a run whose evaluation is over the same four sequences on any mesh."""
    shares = ranks // (flags.get("pp", 1) * flags.get("tp", 1))
    return Run(fields(place / name, **{**BASE, "eval_batches": 4 // shares, **flags}), fault=fault)


def runs_on(place: Path, ranks: int) -> dict[str, Run]:
    flags_of = {name: {"engine": "torch", **flags} for name, flags in MESHES[ranks].items()}
    for name, (origin, flags) in RESUMED[ranks].items():
        flags_of[name] = {**flags, "resume_from": str(place / origin / "checkpoints" / "step-00000002")}
    return {name: run_of(place, name, ranks, flags) for name, flags in flags_of.items()}


@pytest.fixture(scope="module")
def outcomes(place, rank_groups) -> dict[str, Outcome]:
    """The outcomes of all runs on rank 0, by name."""
    logging.disable(logging.WARNING)  # torch logs every tensor of a checkpoint, and pytest would keep it all
    with process_group("gloo", "cpu"):
        found = perform_all({name: run_of(place, name, 1, flags) for name, flags in ON_ONE.items()})
    short = {"engine": "torch", "dp_shard": 2, "steps": 2, "eval_every": 0}
    others = {
        NAN: run_of(place, NAN, 2, {**short, "find_nan": True}, fault=NAN),
        CORRUPT: run_of(place, CORRUPT, 2, {**short, "replay_every": 1}, fault=CORRUPT),
        BF16: run_of(place, BF16, 2, {**short, "precision": "bf16"}),
        NAN_PP: run_of(place, NAN_PP, 2, {**short, **PP, "find_nan": True}, fault=NAN_PP),
        BF16_PP: run_of(place, BF16_PP, 2, {**short, **PP, "precision": "bf16"}),
    }
    found |= rank_groups.call(2, perform_all, {**runs_on(place, 2), **others})[0]
    found |= rank_groups.call(4, perform_all, runs_on(place, 4))[0]
    logging.disable(logging.NOTSET)
    return found


def alone(name: str) -> str:
    """Return the name of the run on one rank."""
    return next((run for run in ON_ONE if name.endswith(run.removeprefix("ours")) and run != "ours"), "ours")


def assert_same_state(place: Path, name: str, expected: str) -> None:
    """Compare weights, moments and their steps in the last checkpoints, which hold whole tensors."""
    saved, wanted = (
        {key: value for key, value in state_of(checkpoints(place / run)[4]).items() if not key.startswith("rng/")}
        for run in (name, expected)
    )
    assert saved.keys() == wanted.keys()
    for key, value in saved.items():
        torch.testing.assert_close(value, wanted[key], rtol=0, atol=TOLERANCE, msg=lambda m, k=key: f"{k}: {m}")


def assert_same_records(place: Path, name: str, expected: str, first: int = 1) -> None:
    for metric in ("loss", "gradient_norm", "validation_loss"):
        found, wanted = (recorded(place / run, metric) for run in (name, expected))
        for step in range(first, 5):
            assert found.get(step) == (pytest.approx(wanted[step], abs=TOLERANCE) if step in wanted else None), metric


@pytest.mark.parametrize("name", [name for meshes in MESHES.values() for name in meshes])
def test_a_mesh_trains_as_one_process(outcomes, place, name):
    assert (outcomes[name].error, outcomes[name].crash, outcomes[name].code) == ("", "", 0)
    expected = alone(name)
    assert max(recorded(place / expected, "gradient_norm").values()) > BASE["max_grad_norm"]  # clipping matters
    assert_same_state(place, name, expected)
    assert_same_records(place, name, expected)


@pytest.mark.parametrize("name", RESUMED_FROM)
def test_a_run_resumes_on_another_mesh_and_engine(outcomes, place, name):
    assert (outcomes[name].error, outcomes[name].crash, outcomes[name].code) == ("", "", 0)
    assert outcomes[name].resumed_at == 2
    assert_same_state(place, name, alone(RESUMED_FROM[name]))
    assert_same_records(place, name, alone(RESUMED_FROM[name]), first=3)


def test_a_step_that_is_not_finite_is_left_out_on_all_ranks(outcomes):
    found = outcomes[NAN]
    assert (found.error, found.crash, found.code, found.step, found.skipped) == ("", "", 0, 2, 1)
    assert "not finite, but computed module by module it is" in found.printed  # the fault is in the first forward alone


def test_the_module_of_a_stage_is_named(outcomes):
    """The embedding of the first stage gets gradients that are not finite."""
    found = outcomes[NAN_PP]
    assert (found.error, found.crash, found.step, found.skipped) == ("", "", 2, 2)
    assert "not finite first in the gradient of the output of token_embeddings (rank 0)" in found.printed


def test_a_replay_finds_another_gradient(outcomes):
    """Rank 1 is disturbed; the shards of both may have the difference."""
    assert "ReplayError: step 1: two runs of it gave different results, first seen in the gr" in outcomes[CORRUPT].crash


@pytest.mark.parametrize("name", [BF16, BF16_PP])
def test_bf16_computes_in_bf16_and_keeps_fp32_weights(outcomes, place, name):
    assert (outcomes[name].error, outcomes[name].crash, outcomes[name].code) == ("", "", 0)
    losses, exact = (recorded(place / run, "loss") for run in (name, "ours"))
    assert 0 < abs(losses[1] - exact[1]) < 0.02
    weights = {name: t for name, t in state_of(checkpoints(place / name)[2]).items() if name.startswith("model/")}
    assert {t.dtype for t in weights.values()} == {torch.float32}
    assert any(not torch.equal(t, t.bfloat16().float()) for t in weights.values())


@pytest.mark.parametrize("name", ["dp_shard", "tp", "tp and dp_shard", "pp", "pp and dp_shard"])
def test_weights_are_exported_from_any_mesh(outcomes, place, name):
    weights = {}
    for run in (name, "ours"):
        file = place / f"{run}.safetensors"
        export(place / run, file, force=True)
        weights[run] = load_file(file)
    torch.testing.assert_close(weights[name], weights["ours"], rtol=0, atol=TOLERANCE)


CONFIG = ModelConfig(vocab_size=16, context_length=8, d_model=8, num_layers=2, num_heads=2, d_ff=16)
HALVES = {"dp_shard": ("",), "tp": ("embeddings", "proj", "ffn", "head"), "dp_replicate": ()}
"""Parts of the names of weights of which a rank of two holds one half, by axis."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", HALVES)
def test_a_rank_holds_its_part(axis):
    engine = TorchEngine(TransformerLM(CONFIG), Mesh(**{axis: 2}), torch.device("cpu"))
    whole_sizes = {name: p.numel() for name, p in TransformerLM(CONFIG).named_parameters()}
    for name, p in engine.module.named_parameters():
        share = 2 if any(part in name for part in HALVES[axis]) else 1
        assert local_part(p).numel() == whole_sizes[name] // share, name


@pytest.mark.parametrize(
    ("blocks", "stages", "expected"),
    [
        (4, 2, [[0, 1], [2, 3]]),
        (5, 2, [[0, 1, 2], [3, 4]]),
        (3, 3, [[0], [1], [2]]),
        (6, 4, [[0, 1], [2], [3, 4], [5]]),
    ],
)
def test_blocks_are_spread_evenly_over_stages(blocks, stages, expected):
    assert [list(part) for part in stage_blocks(blocks, stages)] == expected


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("schedule", "of_first"), [("1f1b", (0, 1)), ("interleaved", (0, 2))])
def test_a_rank_holds_its_stages_under_the_names_of_the_whole_model(schedule, of_first):
    model = TransformerLM(dataclasses.replace(CONFIG, num_layers=4))
    names = {name for name, _ in model.named_parameters()}
    engine = TorchEngine(model, Mesh(pp=2), torch.device("cpu"), schedule=schedule)
    own = {name for name, p in engine.named_parameters()}
    held = everywhere({name.removeprefix("module.") for name in own})
    first = [name for name in names if name.startswith(("token_embeddings", *(f"layers.{n}." for n in of_first)))]
    assert held == [set(first), names - set(first)]


@pytest.mark.ranks(2)
def test_micro_batches_of_a_pipeline_have_one_size():
    engine = TorchEngine(TransformerLM(CONFIG), Mesh(pp=2), torch.device("cpu"))
    batches = [(torch.zeros(rows, 8, dtype=torch.long),) * 2 for rows in (1, 2)]
    with pytest.raises(ValueError, match=r"\(1, 8\), \(2, 8\)|\(2, 8\), \(1, 8\)"):
        engine.pipeline.accumulate(batches, lambda loss: loss, F.cross_entropy)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", ["dp_shard", "dp_replicate"])
def test_gradients_of_all_but_the_last_micro_batch_stay_on_their_rank(axis):
    engine = TorchEngine(TransformerLM(CONFIG), Mesh(**{axis: 2}), torch.device("cpu"))
    tokens = torch.randint(16, (1, 8), generator=torch.Generator().manual_seed(rank()))

    def head_gradient() -> Tensor | None:
        engine(tokens).float().logsumexp(-1).mean().backward()
        grad = engine.module.lm_head.weight.grad
        return None if grad is None else whole(grad).clone()

    with engine.no_sync():
        first = head_gradient()  # fully_shard keeps it to itself until it is reduced
        is_equal = first is not None and torch.equal(*everywhere(first))
        assert not is_equal
        assert (first is None) == (axis == "dp_shard")
    assert torch.equal(*everywhere(head_gradient()))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_logits_are_whole_outside_of_the_loss_and_for_any_length(axis):
    """Sampling reads them; ranks of a tensor-parallel group split the sequence, which may be odd."""
    model = TransformerLM(CONFIG)
    tokens = torch.randint(16, (2, 8), generator=torch.Generator().manual_seed(0))
    expected = model(tokens).detach()
    engine = TorchEngine(model, Mesh(**{axis: 2}), torch.device("cpu"))
    for length in (1, 5, 8):
        assert_close(f"length {length}", engine(tokens[:, :length]).detach(), expected[:, :length], TOLERANCE)
    with engine.loss_context():
        assert local_part(engine(tokens)).shape == (2, 8, 8 if axis == "tp" else 16)
