"""`cs336 train --engine torch` against one process: losses, norms, weights and moments on every mesh, and resuming."""

import dataclasses
import logging
import math
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cs336_systems.config import ModelConfig
from cs336_systems.model import TransformerLM
from cs336_systems.parallel.collectives import held_slices, local_part
from cs336_systems.parallel.launch import process_group
from cs336_systems.parallel.torch_engine import TorchEngine, device_mesh, store_shard, whole
from cs336_systems.predict.rank_shards import Mesh, elements, stage_blocks
from cs336_systems.step.initialise import initialise
from cs336_systems.train.weights import export
from tests.distributed.compare import assert_close, everywhere, rank
from tests.distributed.train_cases import Outcome, Run, checkpoints, fields, perform_all, recorded, state_of, text_of
from tests.unit.train.stores_by_hand import write_store

pytestmark = pytest.mark.xdist_group("ranks")

TOLERANCE = 1e-6
BASE = {"num_layers": 2, "steps": 4, "micro_batch_size": 1, "learning_rate": 1e-3, "max_grad_norm": 0.5}
BASE |= {"parallel": "ddp", "save_every": 2, "keep": 4, "eval_every": 4, "sample_tokens": 0}
ODD = {"vocab_size": 257}
PP = {"pp": 2, "dp_shard": 1}
FOUR = {"num_layers": 4}
INTERLEAVED = {"pp_schedule": "interleaved", **FOUR}
QWEN = {"num_heads": 4, "num_kv_heads": 2, "d_head": 8, "qkv_bias": True, "qk_norm": True, "tied_embeddings": True}
"""Everything in which families of models differ, at once."""
PACKED = {"data": "store", "pack": "documents"}
MESHES = {
    2: {
        "dp_replicate": {"dp_replicate": 2, "replay_every": 4},
        "dp_shard": {"dp_shard": 0, "checkpoint_blocks": 1, "replay_every": 4},
        "tp": {"tp": 2, "async_save": True, "replay_every": 4, "sample_tokens": 1},
        "dp_replicate, fused kernels": {"dp_replicate": 2, "fast": "kernels,loss"},
        "dp_shard, fused kernels, qwen": {"dp_shard": 2, "fast": "kernels,loss", **QWEN},
        "cp": {"cp": 2, "checkpoint_blocks": 1, "replay_every": 4, "sample_tokens": 1},
        "pp": {"pp": 2, "async_save": True, "replay_every": 4, "sample_tokens": 1},
        "pp, odd vocabulary": {"pp": 2, "checkpoint_blocks": 1, **ODD},
        "pp interleaved, four blocks": {"pp": 2, **INTERLEAVED},
        "dp_replicate, qwen": {"dp_replicate": 2, **QWEN},
        "tp, qwen": {"tp": 2, **QWEN},
        "dp_shard, packed": {"dp_shard": 2, **PACKED},
        "dp_shard, fused kernels, packed": {"dp_shard": 2, "fast": "kernels,loss", **PACKED},
    },
    4: {
        "dp_replicate of four, qwen": {"dp_replicate": 4, "replay_every": 1, **QWEN},
        "dp_replicate and dp_shard, fused kernels": {
            "dp_replicate": 2,
            "dp_shard": 2,
            "fast": "kernels,loss",
            "checkpoint_blocks": 1,
        },
        "tp and dp_shard, odd vocabulary": {"tp": 2, "dp_shard": 2, **ODD},
        "tp and dp_replicate": {"tp": 2, "dp_replicate": 2},
        "cp and dp_shard": {"cp": 2, "dp_shard": 2},
        "cp and dp_shard, qwen": {"cp": 2, "dp_shard": 2, **QWEN},
        "tp and dp_shard, qwen": {"tp": 2, "dp_shard": 2, **QWEN},
        "cp and tp": {"cp": 2, "tp": 2},
        "cp and dp_replicate": {"cp": 2, "dp_replicate": 2},
        "cp and pp": {"cp": 2, "pp": 2, "sample_tokens": 1},
        "pp and dp_shard": {"pp": 2, "dp_shard": 2, "replay_every": 4},
        "pp interleaved and dp_shard, four blocks": {"pp": 2, "dp_shard": 2, **INTERLEAVED},
        "pp and tp": {"pp": 2, "tp": 2, "sample_tokens": 1},
        "pp and dp_replicate": {"pp": 2, "dp_replicate": 2},
    },
}
"""Flags by number of ranks: every axis, every two axes. `make soak` trains longer, on 20 meshes of up to 8 ranks.

Two ranks accumulate the gradients of two micro batches or more, one accumulates four."""
ENGINES = {
    2: {
        "our fsdp from tp": {"engine": "ours", "parallel": "fsdp"},
        "our ddp from cp": {"engine": "ours"},
        "our ddp from pp": {"engine": "ours"},
        "our fsdp from tp, qwen": {"engine": "ours", "parallel": "fsdp", **QWEN},
        "our ddp-sharded from tp, qwen": {"engine": "ours", "parallel": "ddp-sharded", **QWEN},
        "our fsdp from dp_shard, packed": {"engine": "ours", "parallel": "fsdp", **PACKED},
    },
    4: {"our ddp from tp and dp_shard, odd vocabulary": {"engine": "ours", **ODD}},
}
"""Flags of our engine, which continues runs of torch's."""
ORIGINS = {
    "our fsdp from tp": "tp",
    "our ddp from cp": "cp",
    "our ddp from pp": "pp",
    "our fsdp from tp, qwen": "tp, qwen",
    "our ddp-sharded from tp, qwen": "tp, qwen",
    "our fsdp from dp_shard, packed": "dp_shard, packed",
    "cp and dp_shard, qwen": "dp_replicate, qwen",
    "our ddp from tp and dp_shard, odd vocabulary": "tp and dp_shard, odd vocabulary",
    "tp and dp_replicate": "dp_shard",
    "cp and dp_shard": "tp",
    "cp and tp": "ours",
    "cp and dp_replicate": "pp",
    "cp and pp": "dp_replicate",
    "pp interleaved and dp_shard, four blocks": "pp interleaved, four blocks",
    "pp and tp": "dp_shard",
    "pp and dp_replicate": "cp",
}
"""Runs that continue from step 2 of another."""
ON_ONE = {
    "ours": {},
    "ours, odd vocabulary": ODD,
    "ours, four blocks": FOUR,
    "ours, qwen": QWEN,
    "ours, packed": PACKED,
}
NAN, CORRUPT, BF16 = "nan in the first step on rank 1", "another gradient in forward 2 on rank 1", "bf16"
INIT = "from a file of weights"
NAN_PP, BF16_PP = "nan in every step", "bf16, pp"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    (folder / "short.txt").write_bytes(text_of(600))
    (folder / "store").mkdir()
    write_store(folder / "store", np.arange(600) * 7919 % 97, [60, 0, 3, 7, 130, 200, 30, 1, 69, 100])
    return folder


def run_of(place: Path, name: str, ranks: int, flags: dict[str, Any], fault: str = "") -> Run:
    """Return a run whose evaluation is over the same four sequences on any mesh.

    Meshes whose ranks all share a batch have two micro batches of two sequences: half the time of four.
    """
    shares = ranks // math.prod(flags.get(name, 1) for name in ("pp", "cp", "tp"))
    size = 2 if shares == 1 < ranks else 1
    batches = {"micro_batch_size": size, "eval_batches": 4 // (shares * size)}
    return Run(fields(place / name, **{**BASE, **batches, **flags}), fault=fault)


def runs_on(place: Path, ranks: int) -> dict[str, Run]:
    flags_of = {name: {"engine": "torch", **flags} for name, flags in MESHES[ranks].items()} | ENGINES[ranks]
    for name in flags_of.keys() & ORIGINS.keys():
        origin = {"resume_from": str(place / ORIGINS[name] / "checkpoints" / "step-00000002")}
        flags_of[name] = {**flags_of[name], **origin}
    return {name: run_of(place, name, ranks, flags) for name, flags in flags_of.items()}


@pytest.fixture(scope="module")
def outcomes(place, rank_groups) -> dict[str, Outcome]:
    """The outcomes of all runs on rank 0, by name."""
    logging.disable(logging.WARNING)  # torch logs every tensor of a checkpoint, and pytest would keep it all
    with process_group("gloo", "cpu"):
        found = perform_all({name: run_of(place, name, 1, flags) for name, flags in ON_ONE.items()})
    export(place / "ours", place / "initial")
    short = {"engine": "torch", "dp_shard": 2, "steps": 2, "eval_every": 0}
    others = {
        NAN: run_of(place, NAN, 2, {**short, "dp_shard": 1, "cp": 2, "find_nan": True}, fault=NAN),
        CORRUPT: run_of(place, CORRUPT, 2, {**short, "replay_every": 1}, fault=CORRUPT),
        BF16: run_of(place, BF16, 2, {**short, "precision": "bf16"}),
        NAN_PP: run_of(place, NAN_PP, 2, {**short, **PP, "find_nan": True}, fault=NAN_PP),
        BF16_PP: run_of(place, BF16_PP, 2, {**short, **PP, "precision": "bf16"}),
    }
    found |= rank_groups.call(2, perform_all, {**runs_on(place, 2), **others})[0]
    begun = run_of(place, INIT, 4, {"engine": "torch", "dp_shard": 2, "tp": 2, "init": str(place / "initial")})
    begun = dataclasses.replace(begun, trains=False)
    found |= rank_groups.call(4, perform_all, {**runs_on(place, 4), INIT: begun})[0]
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


@pytest.mark.parametrize("name", [name for runs in (*MESHES.values(), *ENGINES.values()) for name in runs])
def test_a_mesh_trains_as_one_process(outcomes, place, name):
    """From the beginning, or from step 2 of another mesh or engine."""
    assert (outcomes[name].error, outcomes[name].crash, outcomes[name].code) == ("", "", 0)
    assert outcomes[name].resumed_at == (2 if name in ORIGINS else 0)
    expected = alone(name)
    assert max(recorded(place / expected, "gradient_norm").values()) > BASE["max_grad_norm"]  # clipping matters
    assert_same_state(place, name, expected)
    assert_same_records(place, name, expected, first=3 if name in ORIGINS else 1)


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


@pytest.mark.parametrize("name", ["dp_shard", "tp", "cp and tp", "pp", "pp and dp_shard"])
def test_weights_are_exported_from_any_mesh(outcomes, place, name):
    weights = {}
    for run in (name, "ours"):
        file = place / f"{run}.safetensors"
        export(place / run, file, force=True)
        weights[run] = load_file(file)
    torch.testing.assert_close(weights[name], weights["ours"], rtol=0, atol=TOLERANCE)


def test_a_run_starts_from_the_weights_of_a_file_to_the_bit(outcomes, place):
    found, expected = outcomes[INIT], load_file(place / "initial")
    assert (found.error, found.crash, found.resumed_at) == ("", "", 0)
    assert found.weights.keys() == expected.keys()
    for name, value in found.weights.items():
        assert_close(name, value, expected[name])


CONFIG = ModelConfig(vocab_size=16, context_length=8, d_model=8, num_layers=2, num_heads=2, d_ff=16)
UNEVEN = (3, 5, 6, 7)
"""Rows that two axes of two ranks split into unequal parts, also empty ones."""


@pytest.mark.ranks(4)
def test_a_rank_knows_which_rows_it_holds():
    """Checkpoints rely on it: for some of these torch says other rows."""
    mesh = device_mesh(Mesh(dp_shard=2, tp=2), "cpu")
    for rows in UNEVEN:
        layer = torch.nn.Linear(2, rows, bias=False)
        whole_weight = torch.arange(2.0 * rows).view(rows, 2)
        parallelize_module(layer, mesh["tp"], ColwiseParallel())
        fully_shard(layer, mesh=mesh["dp_shard"])
        store_shard(layer.weight, whole_weight)
        assert torch.equal(whole(layer.weight).detach(), whole_weight)
        assert torch.equal(local_part(layer.weight).detach(), whole_weight[held_slices(layer.weight)])


HALVES = {"dp_shard": ("",), "cp": ("",), "tp": ("embeddings", "proj", "ffn", "head"), "dp_replicate": ()}
"""Parts of the names of weights of which a rank of two holds one half, by axis."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", HALVES)
def test_a_rank_holds_its_part(axis):
    engine = TorchEngine(TransformerLM(CONFIG), Mesh(**{axis: 2}), torch.device("cpu"))
    held = sum(local_part(p).numel() for p in engine.module.parameters())
    assert held == elements(CONFIG, Mesh(**{axis: 2}), rank())
    whole_sizes = {name: p.numel() for name, p in TransformerLM(CONFIG).named_parameters()}
    for name, p in engine.module.named_parameters():
        share = 2 if any(part in name for part in HALVES[axis]) else 1
        assert local_part(p).numel() == whole_sizes[name] // share, name


def built_on_meta(config: ModelConfig, mesh: Mesh) -> TorchEngine:
    with torch.device("meta"):
        model = TransformerLM(config)
    torch.manual_seed(5 + rank())  # rank 0's weights count
    device = torch.device("cpu")
    return TorchEngine(model, mesh, device, fill=lambda module: initialise(module, device, store_shard))


FILLED = [Mesh(dp_replicate=4), Mesh(dp_replicate=2, dp_shard=2), Mesh(dp_shard=2, tp=2), Mesh(cp=2, tp=2), Mesh(tp=4)]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", FILLED, ids=lambda mesh: " ".join(f"{k} {v}" for k, v in mesh._asdict().items()))
def test_a_model_built_on_the_meta_device_has_the_weights_of_one_process(mesh):
    """Equal to the bit. Neither 18 rows of the vocabulary nor 19 of the feed-forward layer divide by 4."""
    config = dataclasses.replace(CONFIG, vocab_size=18, num_heads=4, d_ff=20 if mesh.tp > 1 else 19)
    engine = built_on_meta(config, mesh)
    torch.manual_seed(5)
    expected = TransformerLM(config)
    for (name, p), q in zip(engine.module.named_parameters(), expected.parameters(), strict=True):
        assert_close(name, whole(p).detach(), q.detach())
    for (name, found), buffer in zip(engine.module.named_buffers(), expected.buffers(), strict=True):
        assert_close(name, found, buffer)


class Allocations(TorchDispatchMode):
    """Follows the bytes of all storages that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._seen: WeakSet[torch.UntypedStorage] = WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:  # it calls the operators of its local tensors, which come here one by one
            return NotImplemented
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self._follow(tensor.untyped_storage())
        return found

    def _follow(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen or not storage.nbytes():
            return
        self._seen.add(storage)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, nbytes: int) -> None:
        self.live -= nbytes


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", ["dp_shard", "tp"])
def test_building_needs_the_shards_and_one_whole_weight(axis):
    """Besides those tensors that torch's truncated normal distribution needs to draw one weight."""
    config = ModelConfig(vocab_size=512, context_length=2, d_model=32, num_layers=4, num_heads=2, d_ff=64)
    in_place = patch.object(torch.nn.init, "trunc_normal_", lambda weight, **_: weight.detach().normal_())
    with in_place, Allocations() as memory:
        engine = built_on_meta(config, Mesh(**{axis: 2}))
    parameters, buffers = list(engine.module.parameters()), list(engine.module.buffers())
    held = sum(local_part(t).nbytes for t in (*parameters, *buffers))
    largest = 4 * max(p.numel() for p in parameters)
    small = largest // 4  # Gloo's thread may hold the weight before for a moment, and RoPE's tables need some memory
    assert held + largest <= memory.peak < held + largest + small < 4 * sum(p.numel() for p in parameters)


@pytest.mark.parametrize(
    ("blocks", "stages", "expected"),
    [
        (4, 2, [[0, 1], [2, 3]]),
        (5, 2, [[0, 1, 2], [3, 4]]),
        (3, 3, [[0], [1], [2]]),
        (6, 4, [[0], [1, 2], [3, 4], [5]]),
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
def test_gradients_of_all_but_the_last_micro_batch_are_scattered_but_not_added_up(axis):
    engine = TorchEngine(TransformerLM(CONFIG), Mesh(**{axis: 2}), torch.device("cpu"))
    tokens = torch.randint(16, (1, 8), generator=torch.Generator().manual_seed(rank()))

    def head_gradient() -> Tensor | None:
        engine(tokens).float().logsumexp(-1).mean().backward()
        grad = engine.module.lm_head.weight.grad
        return None if grad is None else whole(grad).clone()

    with engine.no_sync():
        first = head_gradient()
        assert first is not None
        # Shards hold the mean over ranks after every micro batch, so that no rank keeps whole gradients.
        assert torch.equal(*everywhere(first)) == (axis == "dp_shard")
    assert torch.equal(*everywhere(head_gradient()))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", ["cp", "tp", "pp"])
def test_logits_are_whole_outside_of_the_loss_and_for_any_length(axis):
    """Sampling reads them; ranks of a tensor- or context-parallel group split the sequence, which may be odd."""
    model = TransformerLM(CONFIG)
    tokens = torch.randint(16, (2, 8), generator=torch.Generator().manual_seed(0))
    expected = model(tokens).detach()
    engine = TorchEngine(model, Mesh(**{axis: 2}), torch.device("cpu"))
    for length in (1, 5, 8):
        assert_close(f"length {length}", engine(tokens[:, :length]).detach(), expected[:, :length], TOLERANCE)
    with engine.loss_context():
        shape = local_part(engine(engine.own_part(tokens))).shape
    assert shape == {"tp": (2, 8, 8), "cp": (2, 4, 16), "pp": (2, 8, 16)}[axis]
