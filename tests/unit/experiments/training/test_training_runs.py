"""`train`: curves of runs, put together from the cells that `cs336 train` records."""

from cs336_systems.experiments.training.loss_curves import loss_curves

from cs336_systems.experiments.catalogue import catalogue, runnable
from cs336_systems.record import Environment, Record
from cs336_systems.report.cells import group
from cs336_systems.report.sections import charts_of, tables_of


def stretch(run, first_step, losses, utc="2026-01-01T00:00:00"):
    config = {"output": f"runs/{run}/", "first_step": first_step}
    return Record("train", config, "loss", "1", tuple(losses), environment=Environment(utc=utc))


def test_stretches_of_a_run_become_one_curve():
    records = [stretch("a", 3, [1.0, 0.5]), stretch("a", 1, [3.0, 2.0]), stretch("b", 1, [9.0])]
    assert loss_curves(group(records)) == {"a": {1: 3.0, 2: 2.0, 3: 1.0, 4: 0.5}, "b": {1: 9.0}}


def test_a_step_trained_again_keeps_its_last_loss():
    records = [stretch("a", 2, [5.0], "2026-01-02T00:00:00"), stretch("a", 1, [3.0, 2.0])]
    assert loss_curves(group(records)) == {"a": {1: 3.0, 2: 5.0}}


def test_table_and_chart_of_unfinished_cells():
    cells = group([stretch("a", 1, [3.0, 1.0, 2.0])])
    (table,) = tables_of(catalogue()["train"], cells)
    assert table.rows == [["a", "3", "3.0000", "2.0000", "1.0000"]]
    (chart,) = charts_of(catalogue()["train"], cells)
    assert [point.y for point in chart.series[0].points] == [3.0, 1.0, 2.0]
    assert tables_of(catalogue()["train"], group([Record("train", {}, "step_time", "s", (1.0,))])) == []


def test_training_comes_last_and_is_not_run():
    assert list(catalogue())[-1] == "train"
    assert "train" not in runnable()
