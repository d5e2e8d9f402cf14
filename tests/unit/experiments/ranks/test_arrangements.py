"""`Arrangement`, the grids that name arrangements, and the instrument that trains them."""

import pytest

from cs336_systems.config import RunConfig, UserError
from cs336_systems.experiments.catalogue import catalogue, cells, of_preset
from cs336_systems.experiments.ranks.measure_ranks import measure_arrangements
from cs336_systems.experiments.ranks.multi_rank import PARTS, Arrangement
from cs336_systems.experiments.ranks.sharding import gathers
from cs336_systems.experiments.runner import gather
from cs336_systems.experiments.spec import PRESETS
from cs336_systems.record import CELL_TIME, Record
from cs336_systems.report.cells import CellView, group
from tests.helpers import tiny_config
from tests.unit.experiments.ranks.samples import tables

ARRANGEMENTS = {
    "none": Arrangement(),
    "naive": Arrangement("naive"),
    "flat": Arrangement("flat"),
    "overlap": Arrangement("overlapped"),
    "bucketed 0.01": Arrangement("bucketed", bucket_size_mb=0.01),
    "bucketed 25": Arrangement("bucketed", bucket_size_mb=25),
    "ddp": Arrangement("bucketed"),
    "torch DDP": Arrangement("bucketed", library="torch"),
    "sharded": Arrangement("bucketed", "sharded"),
    "torch ZeRO": Arrangement("bucketed", "sharded", library="torch"),
    "fsdp": Arrangement("fsdp"),
    "torch fully_shard": Arrangement("fsdp", library="torch"),
}


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_names_are_those_of_records(name):
    assert Arrangement.named(name) == ARRANGEMENTS[name]
    assert ARRANGEMENTS[name].name == name


@pytest.mark.parametrize("name", ["zero", "bucketed", "bucketed x", ""])
def test_an_unknown_name_is_an_error(name):
    with pytest.raises(UserError, match="unknown arrangement"):
        Arrangement.named(name)


def test_sharded_parts():
    parts = {name: arrangement.sharded_parts for name, arrangement in ARRANGEMENTS.items()}
    assert {name: found for name, found in parts.items() if found} == {
        **dict.fromkeys(("sharded", "torch ZeRO"), ("optimizer",)),
        **dict.fromkeys(("fsdp", "torch fully_shard"), PARTS),
    }


@pytest.mark.parametrize("name", ["ddp", "bucket_model", "optimizer_sharding", "fsdp"])
@pytest.mark.parametrize("preset", PRESETS)
def test_grids_name_known_arrangements_once(name, preset):
    if name not in of_preset(preset):
        pytest.skip("2026 has no buckets")
    found = cells([name], preset, RunConfig(device="cpu"))
    assert found
    for _, config in found:
        named = [Arrangement.named(arrangement) for arrangement in config["arrangements"]]
        assert len(set(named)) == len(named) >= 3
        assert config["ranks"] == 2


def test_grids_on_a_gpu_leave_out_what_crashes_through_gloo():
    found = [config for _, config in cells(["fsdp"], "course", RunConfig(device="cuda"))]
    assert {config["backend"]: "torch fully_shard" in config["arrangements"] for config in found} == {
        "gloo": False,
        "nccl": True,
    }


def test_2026_has_the_handouts_model_on_two_gpus():
    (found,) = [config for _, config in cells(["fsdp"], "2026", RunConfig(device="cuda")) if config["size"] == "2.7B"]
    assert (found["backend"], found["ranks"]) == ("nccl", 2)


def test_progress_names_the_experiments_of_a_cell():
    (cell,) = gather(cells(["fsdp"], "quick", RunConfig(device="cpu")))
    assert cell.name == "fsdp 256/1024/6/8, 2 ranks, interleaved"


@pytest.mark.xdist_group("ranks")
def test_arrangements_agree_and_hold_the_expected_memory():
    """Sharded parts take half of the bytes on two ranks; every arrangement trains the same weights."""
    names = [name for name in ARRANGEMENTS if name not in ("bucketed 25", "ddp")]
    own = {"backend": "gloo", "device": "cpu", "ranks": 2, "arrangements": names, "rounds": 2, "link": None}
    config = {**tiny_config(device="cpu", warmup_steps=1), **own}
    cell = CellView.of("optimizer_sharding", config, measure_arrangements(config))
    found = {name: {m: r.samples for m, r in cell.variants[name].items()} for name in names}
    for name in names:
        assert len(found[name]["step_time"]) == 2
        if name != "none":
            assert found[name]["weight_error"][0] <= 1e-6, name
    assert found["none"]["weight_error"][0] > 1e-6, "ranks have different data, so averaging must matter"
    for name, first_sends_in in (("naive", "sync"), ("flat", "sync"), ("overlap", "backward"), ("fsdp", "forward")):
        phases = zip(*(found[name][m] for m in ("phase", "phase_start", "phase_end")), strict=True)
        during = [phase for phase, start, end in phases if start <= found[name]["message_start"][0] < end]
        assert during == [first_sends_in], name
    assert sum(found["naive"]["message_size"]) >= found["naive"]["parameter_memory"][0]
    whole = {part: found["flat"][f"{part}_memory"][0] for part in PARTS}
    assert whole["gradient"] == whole["parameter"]
    assert found["sharded"]["parameter_memory"][0] == whole["parameter"]
    assert found["sharded"]["optimizer_memory"][0] < 0.6 * whole["optimizer"]
    assert found["fsdp"]["parameter_memory"][0] < 0.6 * whole["parameter"]
    assert found["fsdp"]["gradient_memory"] == found["fsdp"]["parameter_memory"]
    assert "weight" not in found["flat"], "nothing is gathered"
    gathered = gathers(cell)
    assert [one.weight for one in gathered[:2]] == ["token_embeddings", "layers.0.attn.q_proj"]
    assert gathered[0].waited, "nothing comes before the first weight that could hide its all-gather"
    for one in gathered:
        assert one.start < one.end <= one.ready < one.done
        assert one.needed <= one.ready
    for experiment in ("ddp", "optimizer_sharding"):
        (table,) = catalogue()[experiment].tables([cell])
        assert [row[0] for row in table.rows] == names


@pytest.mark.xdist_group("ranks")
def test_an_unknown_arrangement_fails_its_cell():
    own = {"backend": "gloo", "device": "cpu", "ranks": 1, "arrangements": ["zero"], "rounds": 1, "link": None}
    with pytest.raises(RuntimeError, match="unknown arrangement 'zero'"):
        measure_arrangements({**tiny_config(device="cpu"), **own})


def test_cells_that_failed_are_listed():
    (table,) = tables(group([Record("fsdp", {"size": "small"}, CELL_TIME, "s", (), "oom: out of memory")]))
    assert table.rows == [["OOM"]]
    assert "out of memory" in table.notes[0].en
