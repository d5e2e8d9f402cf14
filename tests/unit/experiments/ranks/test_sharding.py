"""`optimizer_sharding` and `fsdp`: memory beside the formula."""

import pytest

from cs336_systems.experiments.catalogue import catalogue
from cs336_systems.record import MIB, Metric
from cs336_systems.report.sections import findings_of
from tests.unit.experiments.ranks.samples import SAMPLES, arrangement_cell, charts, tables
from tests.unit.report.step_cells import values


def test_formula_divides_the_sharded_parts_by_the_ranks():
    (table,) = tables([arrangement_cell("fsdp", {"ddp": 200, "sharded": 300, "fsdp": 100})])
    memory = {row[0]: row[3:9] for row in table.rows}
    assert memory == {
        "ddp": ["100.0", "100.0", "200.0", "400.0", "400.0", "1.000x"],
        "sharded": ["100.0", "100.0", "100.0", "300.0", "300.0", "1.000x"],
        "fsdp": ["50.0", "50.0", "100.0", "200.0", "200.0", "1.000x"],
    }


def test_state_above_the_ideal_is_shown():
    """The sample gives torch's fully_shard the whole state on each of two ranks."""
    (table,) = tables(SAMPLES["fsdp"])
    assert table.rows[-1][0] == "torch fully_shard"
    assert table.rows[-1][8] == "2.000x"


def test_allocator_columns_are_there_on_cuda_only():
    moments = ("init", "before_update", "after_update", "peak")
    own = [
        Metric(f"{moment}_memory", "B", [(1 + number) * MIB], name)
        for name in ("ddp", "sharded")
        for number, moment in enumerate(moments)
    ]
    (table,) = tables([arrangement_cell("optimizer_sharding", {"ddp": 200, "sharded": 300}, metrics=own)])
    assert [column.name.en for column in table.columns[-4:]] == ["init", "before update", "after update", "peak"]
    assert table.rows[0][-4:] == ["1.0", "2.0", "3.0", "4.0"]
    (plain,) = tables(SAMPLES["optimizer_sharding"])
    assert len(plain.columns) == len(table.columns) - 4


@pytest.mark.parametrize("experiment", ["optimizer_sharding", "fsdp"])
def test_chart_stacks_parameters_gradients_and_state(experiment):
    (chart,) = charts(arrangement_cell(experiment, {"ddp": 200, "fsdp": 100}))
    assert chart.kind == "stacked"
    assert [values(series) for series in chart.series] == [{"our DDP": a, "our FSDP": a / 2} for a in (100, 100, 200)]


GATHERS = {
    "weight": ["token_embeddings", "layers.0.ffn.w1", "layers.0.ffn.w2", "lm_head"],
    "gather_start": [0.000, 0.000, 0.001, 0.002],
    "gather_end": [0.001, 0.002, 0.003, 0.012],
    "weight_needed": [0.000, 0.003, 0.006, 0.010],
    "weight_ready": [0.001, 0.004, 0.007, 0.012],
    "weight_done": [0.003, 0.006, 0.010, 0.020],
}


def gathering_cell():
    own = [Metric(name, "" if name == "weight" else "s", samples, "fsdp") for name, samples in GATHERS.items()]
    return arrangement_cell("fsdp", {"ddp": 200, "fsdp": 100}, metrics=own)


def test_all_gathers_are_drawn_beside_forward_by_block():
    _, chart = charts(gathering_cell())
    assert (chart.kind, chart.bar_names) == ("spans", ["embedding", "block 0", "head"])
    spans = {
        series.name.en: [(point.place, point.start, point.y) for point in series.points] for series in chart.series
    }
    assert spans["all-gather"][-1] == ("head", 2.0, 12.0)
    assert spans["waits for a weight"] == [("embedding", 0.0, 1.0), ("head", 10.0, 12.0)]
    assert len(spans["forward"]) == 4
    assert [series.lane for series in chart.series] == [0, 0, 1]


def test_a_finding_says_whether_all_gathers_end_in_time():
    (said,) = findings_of(catalogue()["fsdp"], [gathering_cell()])
    assert "2 of 4 all-gathers end before forward needs the weight. Forward waits 3.00 of its 20.00 ms" in said.en


def test_older_records_have_no_chart_of_gathers():
    assert [chart.kind for chart in charts(*SAMPLES["fsdp"])] == ["stacked"]
