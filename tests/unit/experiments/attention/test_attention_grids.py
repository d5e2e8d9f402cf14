"""Grids of the attention experiments, cell names, and memory needs."""

import importlib.metadata
import itertools
from collections import Counter

import pytest

from cs336_systems import record
from cs336_systems.cli import RunArguments
from cs336_systems.cli import run as run_command
from cs336_systems.config import RunConfig, UserError
from cs336_systems.experiments import session
from cs336_systems.experiments.attention import measure_varlen
from cs336_systems.experiments.attention.measure_attention import IMPLEMENTATIONS
from cs336_systems.experiments.catalogue import catalogue
from cs336_systems.experiments.runner import Cell
from cs336_systems.experiments.spec import PRESETS
from cs336_systems.predict.attention_model import AttentionShape
from tests.unit.experiments.attention.attention_cells import H200, attention_config, grid
from tests.unit.experiments.scripted_worker import run

ALONE = ("pytorch_attention", "flash", "attention_rivals", "flash_leaderboard")
"""Experiments that measure attention alone."""


def test_pytorch_attention_has_the_grid_of_the_course():
    configs = grid("pytorch_attention")
    shapes = {AttentionShape.of(c).size for c in configs}
    lengths, dims = (256, 1024, 4096, 8192, 16384), (16, 32, 64, 128)
    assert shapes == {(8, 1, length, dim) for length, dim in itertools.product(lengths, dims)}
    assert Counter(c["implementation"] for c in configs) == {"reference": 20, "compiled": 20}
    assert {(c["is_causal"], c["precision"], c["num_steps"]) for c in configs} == {(False, "fp32", 100)}
    assert {c["num_steps"] for c in grid("pytorch_attention", "quick")} == {RunConfig.num_steps}


@pytest.mark.parametrize("given", [7, RunConfig.num_steps, 100])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_given_number_of_steps_counts_also_if_it_is_the_default(monkeypatch, preset, given):
    asked = []

    def run_session(arguments, path, requests, **_):
        asked.extend(requests("cuda", None))
        return session.Session("cuda", 0)

    monkeypatch.setattr(session, "run_session", run_session)
    run_command(RunArguments(names=("pytorch_attention",), preset=preset, num_steps=given))
    assert {config["num_steps"] for _, config in asked} == {given}


def test_flash_has_every_shape_and_no_unsupported_precision():
    configs = grid("flash")
    assert len(configs) == 10 * 4 * (9 + 6)
    assert {c["seq_len"] for c in configs} == {2**n for n in range(7, 17)}
    assert {c["head_dim"] for c in configs} == {16, 32, 64, 128}
    fp32, bf16 = ({c["implementation"] for c in configs if c["precision"] == name} for name in ("fp32", "bf16"))
    assert bf16 - fp32 == {"sdpa_flash", "sdpa_cudnn", "flex"}
    assert fp32 <= bf16
    assert all(c["is_causal"] and c["batch_size"] == c["heads"] == 1 for c in configs)


def test_implementations_of_one_shape_are_adjacent():
    """The worker keeps the exact results of the last shape only."""
    shapes = [shape for shape, _ in itertools.groupby(AttentionShape.of(config) for config in grid("flash"))]
    assert len(shapes) == len(set(shapes)) == 80


def test_flash_on_a_cpu_has_no_gpu_kernels():
    for preset in ("quick", "course"):
        names = {c["implementation"] for c in grid("flash", preset, "cpu")}
        assert names == {"reference", "flash_torch", "compiled", "sdpa"}
    quick = grid("flash", "quick", "cpu")
    assert {(c["seq_len"], c["head_dim"]) for c in quick} == set(itertools.product((64, 256), (16, 64)))
    assert {c["precision"] for c in quick} == {"fp32"}


def test_quick_grids_are_small():
    sizes = {name: len(grid(name, "quick")) for name in ALONE}
    assert sizes == {"pytorch_attention": 8, "flash": 36, "attention_rivals": 1, "flash_leaderboard": 5}


def test_shapes_of_rivals_and_leaderboard():
    shapes = [AttentionShape.of(config) for config in grid("attention_rivals")]
    assert len(set(shapes)) == 7
    assert [str(s) for s in shapes[:3]] == [
        "1x16x16384x64 bf16 causal", "1x16x16384x128 bf16 causal", "1x16x16384x64 bf16",
    ]  # fmt: skip
    course, quick = grid("flash_leaderboard"), grid("flash_leaderboard", "quick")
    assert {(str(AttentionShape.of(c)), c["warmup_ms"], c["rep_ms"]) for c in course} == {
        ("1x16x16384x64 bf16 causal", 1000, 10_000)
    }
    assert {(c["warmup_ms"], c["rep_ms"]) for c in quick} == {(200, 1000)}
    assert [c["implementation"] for c in course] == ["flash_hopper", "flash_triton", "sdpa_flash", "sdpa_cudnn", "flex"]


def test_short_shapes_are_also_replayed_and_include_auto():
    long, short = grid("attention_rivals")[0], grid("attention_rivals", "quick")[0]
    assert "replayed" not in long
    assert "auto" not in long["implementations"]
    assert short["replayed"]
    assert short["implementations"][0] == "auto"
    for config in (long, short):
        assert config["rounds"] % (2 * len(config["implementations"])) == 0


def test_flash_attention_4_takes_part_where_it_is_installed(monkeypatch):
    assert "flash_attention_4" not in grid("attention_rivals")[0]["implementations"]
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"flash-attn-4": "4.0"}[name])
    assert "flash_attention_4" in grid("attention_rivals")[0]["implementations"]
    assert "flash_attention_4" in [c["implementation"] for c in grid("flash_leaderboard")]


@pytest.mark.parametrize("experiment", [*ALONE, "attention_step"])
def test_every_implementation_of_a_grid_exists(experiment):
    devices = ("cuda",) if experiment in ("attention_rivals", "flash_leaderboard") else ("cuda", "cpu")
    for device, preset in itertools.product(devices, ("quick", "full")):
        for config in grid(experiment, preset, device):
            names = config.get("implementations") or [config["implementation"]]
            assert set(names) <= IMPLEMENTATIONS.keys()
            assert config["device"] == device


def test_attention_step_uses_long_contexts_and_balanced_rounds():
    course = [RunConfig.of(config) for config in grid("attention_step")]
    assert [(run.size, run.model.context_length) for run in course][-1] == ("2.7B", 4096)
    assert {(run.precision, run.batch_size, run.mode) for run in course} == {("bf16", 1, "train-step")}
    for config in (*grid("attention_step"), *grid("attention_step", "quick", "cpu")):
        assert config["rounds"] % len(config["implementations"]) == 0


@pytest.mark.parametrize("experiment", ["attention_rivals", "attention_varlen", "flash_leaderboard"])
def test_gpu_experiments_refuse_a_cpu(experiment):
    with pytest.raises(UserError, match=f"{experiment} needs a CUDA GPU"):
        grid(experiment, "quick", "cpu")


def test_cell_names():
    names = {}
    for experiment in (*ALONE, "attention_step"):
        instrument = catalogue()[experiment].instrument
        assert instrument is not None
        names[experiment] = Cell(instrument, grid(experiment)[0]).name
    assert names == {
        "pytorch_attention": "pytorch_attention 8x1x256x16 fp32 reference",
        "flash": "flash 1x1x128x16 bf16 causal auto",
        "attention_rivals": "attention_rivals 1x16x16384x64 bf16 causal interleaved",
        "flash_leaderboard": "flash_leaderboard 1x16x16384x64 bf16 causal flash_hopper",
        "attention_step": "attention_step small 4096 train-step bf16",
    }


def test_a_cell_that_cannot_fit_is_not_run_and_states_its_need(tmp_path, scripted):
    """On a GPU of 24 GiB, where every cell runs out of memory."""
    scripted.device, scripted.environment = "cuda", H200
    scripted.answer = staticmethod(lambda request: {"event": "failure", "status": "oom"})
    naive = [c for c in grid("pytorch_attention") if (c["seq_len"], c["head_dim"]) == (16384, 64)]
    fused = attention_config("flash_torch", device="cuda")
    run(tmp_path / "r.jsonl", *(("pytorch_attention", config) for config in naive), ("flash", fused))
    statuses = {r.config["implementation"]: r.status for r in record.load(tmp_path / "r.jsonl").records}
    assert statuses == {
        "reference": "oom: needs 32.3 GiB of 24.0 GiB (predicted, not tried)",
        "compiled": "oom: needs at least 16.2 GiB of 24.0 GiB",
        "flash_torch": "oom: out of memory",
    }
    assert [request["config"]["implementation"] for request in scripted.asked] == ["compiled", "flash_torch"]


def test_flash_needs_memory_for_the_graph_it_keeps():
    """In bf16 the low-precision weights of the kept graph add to the need."""
    config = attention_config("reference", (1, 1, 1024, 64), precision="bf16")
    needs = [catalogue()[name].instrument.memory(config).predicted for name in ("flash", "pytorch_attention")]
    assert needs[0] - needs[1] == 1024**2 * 2


def test_packed_documents_of_three_mixes():
    course, quick = grid("attention_varlen"), grid("attention_varlen", "quick")
    assert [(c["mix"], c["head_dim"]) for c in course] == [
        (mix, dim) for mix in ("short", "mixed", "giant") for dim in (64, 128)
    ]
    assert [c["mix"] for c in quick] == ["mixed"]
    for config in (*course, *quick):
        assert config["implementations"] == ["flash_hopper", "flash_triton", "torch_varlen", "padded"]
        assert set(config["implementations"]) <= measure_varlen.IMPLEMENTATIONS.keys()
        assert config["rounds"] % len(config["implementations"]) == 0
    instrument = catalogue()["attention_varlen"].instrument
    assert Cell(instrument, course[0]).name == "attention_varlen 1x16x32768x64 bf16 causal short interleaved"
