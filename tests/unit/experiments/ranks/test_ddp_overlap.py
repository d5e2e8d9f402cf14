"""`ddp`: exposed communication and the lanes of a step."""

import re

import pytest

from cs336_systems.record import Metric
from cs336_systems.report.rows import percent
from tests.unit.experiments.ranks.samples import SAMPLES, arrangement_cell, charts, tables
from tests.unit.report.step_cells import values

TIMES = {"none": 10, "naive": 15, "torch DDP": 15}
LANES = [
    Metric("phase", "", ["forward", "backward"], "naive"),
    Metric("phase_start", "s", [0.0, 0.004], "naive"),
    Metric("phase_end", "s", [0.004, 0.010], "naive"),
    Metric("message", "", ["all_reduce"] * 2, "naive"),
    Metric("message_start", "s", [0.010, 0.012], "naive"),
    Metric("message_end", "s", [0.012, 0.015], "naive"),
]


def test_table_compares_with_no_wrapper_and_with_torch():
    (table,) = tables(SAMPLES["ddp"])
    assert table.rows[0] == ["none", "100.00", "100.00", "", "", "", "", "0.40x", ""]
    assert table.rows[1] == ["naive", "400.00", "", "", "200.00", "300.00", percent(-0.5, 0), "1.60x", "0.0e+00"]


def test_title_names_the_emulated_network():
    (table,) = tables([arrangement_cell("ddp", TIMES, link=[5e-3, 1e8])])
    assert table.title.en == (
        "ddp: averaging gradients, emulated network of 0.1 GB/s and 5 ms · unknown machine, 2 ranks, gloo, cuda, "
        "small, context 512, batch 4 on each rank"
    )
    assert table.title.zh == (
        "ddp：梯度平均，模拟 0.1 GB/s、5 ms 的网络 · unknown machine，2 个 rank，gloo，cuda，"
        "small，上下文长度 512，每个 rank 批大小 4"
    )


def test_exposed_communication_and_lanes():
    exposed, lanes = charts(arrangement_cell("ddp", TIMES, metrics=LANES))
    alone, felt = map(values, exposed.series)
    assert alone == {"naive": 200, "torch DDP": 200}
    assert felt == {"naive": pytest.approx(5), "torch DDP": pytest.approx(5)}
    assert (lanes.kind, lanes.name) == ("spans", "ddp-lanes")
    kinds = [(series.name.en, series.lane) for series in lanes.series]
    assert kinds == [("forward", 0), ("backward", 0), ("all-reduce", 1)]
    spans = [(point.x, point.start, point.y) for series in lanes.series for point in series.points]
    assert spans == [("naive", 0, 4), ("naive", 4, 10), ("naive", 10, 12), ("naive", 12, 15)]


def test_charts_of_several_cells_have_different_names():
    cells = [arrangement_cell("ddp", times, metrics=LANES) for times in (TIMES, {"none": 1, "naive": 2}, {"naive": 1})]
    names = [chart.name for chart in charts(*cells)]
    assert names[:2] == ["ddp-1", "ddp-lanes"]
    assert len(set(names)) == len(names) == 6
    assert all(re.fullmatch(r"[\w-]+", name) for name in names)
    assert charts(arrangement_cell("ddp", {"none": 10})) == []
