"""`optimizer_sharding` and `fsdp`: memory beside the formula."""

import pytest

from cs336_systems.record import MIB, Metric
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
